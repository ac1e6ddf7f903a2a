"""What runs were observed to compute before and after training: kernels, and how alike they are.

The tables are observed_kernels.csv and observed_attention.csv of sweeps that grow one of heads H,
head dimension N and depth L at a time.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon.scans import ALPHA, SIZES, SYMBOLS, alphas, scan
from plots.findings import Estimate, Finding
from plots.tables import CURVE, RUN, SEED, STEP, TableError

KIND, ROW, COLUMN, VALUE = "kind", "row", "column", "value"
BLOCK, TOKEN, ATTENDED, HEAD = "block", "token", "attended", "head"
PLACE = (CURVE, *SIZES, ALPHA, SEED, RUN, STEP)
LABELS = {"pooled": "sample", "last_token": "sample", "spatial": "token"}
STATES = ("initial", "final")

Kernel = np.ndarray
Pairs = dict[tuple[int, int], tuple[Kernel, Kernel]]  # (size, seed) -> initial and final
SeedPairs = dict[tuple[int, int], float]  # a number of two runs, by their seeds


def read_kernels(path: Path, kinds: Sequence[str]) -> pd.DataFrame:
    """The finite entries of observed_kernels.csv; TableError without a run that has kernels of
    these kinds before and after training."""
    own = [ROW, COLUMN, VALUE]
    rows = tables.read(path, [*PLACE, *own, KIND], "observed_kernels.csv", numbers=own)
    rows = rows[np.isfinite(rows[VALUE])]
    for kind in kinds:
        if not any(pairs(rows, kind, by, alpha) for by in SIZES for alpha in alphas(rows)):
            raise TableError(
                f"{path}: no {kind} kernels before and after training of any run; set "
                "training.observe_every to the number of steps and run the sweep"
            )
    return rows


def pairs(rows: pd.DataFrame, kind: str, by: str, alpha: float) -> Pairs:
    """The kernels of a scan, by rising size and seed; runs that stopped at once are left out."""
    own = scan(rows[rows[KIND] == kind], by, alpha).sort_values([by, SEED, STEP], kind="stable")
    places = own[[by, SEED, STEP]].to_numpy()
    ends = np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1
    kernels_of: dict[tuple[int, int], list[Kernel]] = {}
    for entries in np.split(own[[by, SEED, ROW, COLUMN, VALUE]].to_numpy(), ends):
        for size, seed in entries[:1, :2]:  # none where there is no row at all
            kernels_of.setdefault((int(size), int(seed)), []).append(matrix(entries[:, 2:]))
    return {place: (of[0], of[1]) for place, of in kernels_of.items() if len(of) == 2}


def matrix(entries: np.ndarray) -> Kernel:
    """The symmetric matrix of which rows of (row, column, value) have one half; else NaN."""
    places, at = np.unique(entries[:, :2], return_inverse=True)
    row, column = at.reshape(-1, 2).T
    kernel = np.full((len(places), len(places)), math.nan)
    kernel[row, column] = kernel[column, row] = entries[:, 2]
    return kernel


def centred(kernel: Kernel) -> Kernel:
    """A kernel without the means of rows and columns, of norm 1; NaN for a constant."""
    centred = kernel - kernel.mean(0) - kernel.mean(1, keepdims=True) + kernel.mean()
    return centred / (np.linalg.norm(centred) or math.nan)


def product(first: Kernel, second: Kernel) -> float:
    """The alignment (Cortes et al., 2012) of two `centred` kernels: 1 if equal up to scale."""
    if first.shape != second.shape:
        raise TableError(
            f"kernels of {len(first)} and {len(second)} rows cannot be compared; expected the same "
            "samples in all runs"
        )
    return float(np.vdot(first, second))


def scale(kernel: Kernel) -> float:
    """Mean of the diagonal: the mean square of a feature."""
    return float(np.diag(kernel).mean())


def to_largest(pairs_of: Pairs, state: int) -> dict[int, SeedPairs]:
    """Size -> {(seed, seed of the largest size): alignment of their kernels}, seeds different.

    Runs of one seed share initial random numbers across sizes, which would make kernels alike.
    """
    largest = max((size for size, _ in pairs_of), default=0)
    own = {place: centred(kernels[state]) for place, kernels in pairs_of.items()}
    result: dict[int, SeedPairs] = {}
    for (size, seed), kernel in own.items():
        for other in (one for n, one in own if n == largest and one != seed):
            if size != largest:
                value = product(kernel, own[largest, other])
                result.setdefault(size, {})[seed, other] = value
    return result


def over_seeds(values: SeedPairs) -> Estimate:
    """The mean over pairs of seeds; its error is the jackknife's that leaves out a seed with all of
    its pairs, as pairs with a common seed are not independent; unknown below three seeds."""
    seeds = {seed for pair in values for seed in pair}
    average = float(np.mean(list(values.values()))) if values else math.nan
    rest = [[value for pair, value in values.items() if seed not in pair] for seed in seeds]
    if not seeds or not all(rest):
        return Estimate(average, math.nan, len(seeds))
    left, n = np.array([np.mean(own) for own in rest]), len(seeds)
    return Estimate(average, math.sqrt((n - 1) * left.var()), n)


def aligned(kernels: Pairs, kind: str, by: str, state: int, place: str = "") -> Finding:
    """Whether the kernels of a scan come closer to that of the largest size, of other seeds."""
    values = to_largest(kernels, state)
    largest = max((size for size, _ in kernels), default=0)
    name = f"{place}{STATES[state]} {kind} kernel: alignment with {SYMBOLS[by]} = {largest}"
    if len(values) < 2:
        return Finding(name, "not measured", "rises")
    first, last = values[min(values)], values[max(values)]
    gain = over_seeds({pair: last[pair] - first[pair] for pair in first.keys() & last.keys()})
    return gain.judged(name, "gains", "rises", text=f"{by_size(values)} (n = {gain.groups})")


def by_size(values: Mapping[int, SeedPairs]) -> str:
    """Means over pairs of seeds and their errors, by size."""
    return ", ".join(f"{size}: {over_seeds(own).compact()}" for size, own in values.items())


def basis(kernels: pd.DataFrame) -> list[str]:
    """Lines before the findings: what alignments rest on, and which scans are not independent."""
    n = kernels[SEED].nunique()
    text = [
        "alignment of kernels: centred (Cortes et al.), of runs of different seeds, as runs of "
        "one seed share initial random numbers across sizes; mean over "
        f"{n * (n - 1)} pairs of {n} seeds (n), ± jackknife over seeds (from 3 on)"
    ]
    if 1 in alphas(kernels):
        text.append(
            "at alpha_A = 1 the H and N scans start from the same networks: runs of equal "
            "seed and width from equal weights, of which only the split into heads "
            "differs; the two scans are not independent"
        )
    return text


class Strip(NamedTuple):
    """Kernels side by side, each with its title."""

    label: str
    panels: list[tuple[str, Kernel]]


def draw_strips(grid: Sequence[Strip], unit: str, title: str):
    """Rows of kernels, all in one scale: each is divided by the mean of its diagonal, as sizes
    change the scale so much that undivided ones would show the largest alone."""
    across = max(len(row.panels) for row in grid)
    figure, axes = style.subplots(title, len(grid), across, (1.6, 1.95))
    parts = [[kernel / (scale(kernel) or 1) for _, kernel in row.panels] for row in grid]
    top = max(float(np.nanmax(np.abs(part))) for row in parts for part in row)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis_row, row, kernels in zip(axes, grid, parts, strict=True):
        for axis, (name, _), part in zip(axis_row, row.panels, kernels, strict=False):
            axis.set(visible=True, xticks=[], yticks=[])
            axis.grid(False)
            image = axis.imshow(part, vmin=-top, vmax=top, cmap="RdBu_r", interpolation="nearest")
            axis.set_title(name, fontsize=8)
        axis_row[0].set_ylabel(f"{row.label}\n{unit} by {unit}", fontsize=7)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, aspect=30)
    bar.set_label("entry / mean of the diagonal", fontsize=7)
    bar.ax.tick_params(labelsize=7)
    return figure


def strips(kernels: pd.DataFrame, kind: str, alpha: float, every: bool) -> list[Strip]:
    """Rows of initial and of final kernels of the first seed. With `every`, each scan has a pair of
    rows with all its sizes; else one pair has the base model and each scan's largest size (Figure
    6b, c). Below a name is the similarity to the largest size's kernel, over other seeds; in the
    one pair, it is the base model's."""
    grid: list[Strip] = []
    columns: dict[str, list[tuple[str, Kernel]]] = {}
    for by in SIZES:
        kernels_of = pairs(kernels, kind, by, alpha)
        sizes = sorted({size for size, _ in kernels_of})
        own: dict[str, list[tuple[str, Kernel]]] = {}
        similar = [to_largest(kernels_of, state) for state in range(len(STATES))]
        for size in sizes if every else [*sizes[:1], *sizes[1:][-1:]]:
            firsts = kernels_of[size, min(seed for other, seed in kernels_of if other == size)]
            name = f"{SYMBOLS[by]} = {size}" if every or size != sizes[0] else "base"
            for alike, kernel in zip(similar, firsts, strict=True):
                words = "\n "
                if every and size in alike:
                    words = f"\nsimilarity {over_seeds(alike[size]).value:.2f}"
                elif size == sizes[-1] and sizes[0] in alike:
                    below = over_seeds(alike[sizes[0]]).value
                    words = "\nthe largest" if every else f"\nof the base {below:.2f}"
                own.setdefault(name, []).append((name + words, kernel))
        columns |= {name: two for name, two in own.items() if name not in columns}
        if every and len(own) > 1:
            grid += _rows(own)
    return grid or _rows(columns)


def _rows(columns: Mapping[str, Sequence[tuple[str, Kernel]]]) -> list[Strip]:
    pairs_of = columns.values()
    return [Strip(label, [two[at] for two in pairs_of]) for at, label in enumerate(STATES)]
