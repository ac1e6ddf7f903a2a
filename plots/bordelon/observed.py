"""What runs were observed to compute before and after training: kernels, and how alike they are.

The tables are observed_kernels.csv and observed_attention.csv of sweeps that grow one of heads H,
head dimension N and depth L at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon.scans import ALPHA, SIZES, SYMBOLS, alphas, base, scan
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


def read_observed(path: Path, source: str) -> pd.DataFrame:
    """observed_kernels.csv or observed_attention.csv; TableError for a bad one.

    Entries that were not finite are left out.
    """
    own = {
        "observed_kernels.csv": [ROW, COLUMN, VALUE],
        "observed_attention.csv": [BLOCK, TOKEN, ATTENDED, HEAD, VALUE],
    }[source]
    needed = [*PLACE, *own, KIND] if COLUMN in own else [*PLACE, *own]
    rows = tables.read(path, needed, source, numbers=own)
    return rows[np.isfinite(rows[VALUE])]


def pairs(rows: pd.DataFrame, kind: str, by: str, alpha: float) -> Pairs:
    """The kernels of a scan, by rising size and seed; runs that stopped at once are left out."""
    own = scan(rows[rows[KIND] == kind], by, alpha)[[by, SEED, STEP, ROW, COLUMN, VALUE]]
    found: dict[tuple[int, int], list[Kernel]] = {}
    for (size, seed, _), entries in own.groupby([by, SEED, STEP]):
        found.setdefault((int(size), int(seed)), []).append(matrix(entries))
    return {
        place: (kernels[0], kernels[1]) for place, kernels in found.items() if len(kernels) == 2
    }


def check(rows: pd.DataFrame, kind: str, path: Path) -> None:
    """TableError without a run of `kind` that has a kernel before and one after training."""
    if all(not pairs(rows, kind, by, alpha) for by in SIZES for alpha in alphas(rows)):
        raise TableError(
            f"{path}: no {kind} kernels before and after training of any run; set "
            "training.observe_every to the number of steps and run the sweep"
        )


def matrix(rows: pd.DataFrame) -> Kernel:
    """The symmetric matrix of which a table has one half; NaN where it has no entry."""
    places, at = np.unique(rows[[ROW, COLUMN]].to_numpy(), return_inverse=True)
    row, column = at.reshape(-1, 2).T
    kernel = np.full((len(places), len(places)), math.nan)
    kernel[row, column] = kernel[column, row] = rows[VALUE]
    return kernel


def alignment(first: Kernel, second: Kernel) -> float:
    """Centred kernel alignment (Cortes et al., 2012): 1 if equal up to scale and a constant."""
    if first.shape != second.shape:
        raise TableError(
            f"kernels of {len(first)} and {len(second)} rows cannot be compared; expected the same "
            "samples in all runs"
        )
    a, b = (k - k.mean(0) - k.mean(1, keepdims=True) + k.mean() for k in (first, second))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norms if norms else math.nan


def scale(kernel: Kernel) -> float:
    """Mean of the diagonal: the mean square of a feature."""
    return float(np.diag(kernel).mean())


def to_largest(found: Pairs, state: int) -> dict[int, SeedPairs]:
    """Size -> {(seed, seed of the largest size): alignment of their kernels}, seeds different.

    Runs of one seed share initial random numbers across sizes, which would make kernels alike.
    """
    largest = max((size for size, _ in found), default=0)
    result: dict[int, SeedPairs] = {}
    for (size, seed), kernels in found.items():
        for other in (own for n, own in found if n == largest and own != seed):
            if size != largest:
                value = alignment(kernels[state], found[largest, other][state])
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


def aligned(found: Pairs, kind: str, by: str, state: int) -> Finding:
    """Whether the kernels of a scan come closer to that of the largest size, of other seeds."""
    symbol, values = SYMBOLS[by], to_largest(found, state)
    largest = max((size for size, _ in found), default=0)
    name = f"{STATES[state]} {kind} kernel: alignment with {symbol} = {largest}"
    if len(values) < 2:
        return Finding(name, "not measured", "rises")
    first, last = values[min(values)], values[max(values)]
    both = {pair: last[pair] - first[pair] for pair in first.keys() & last.keys()}
    gain = over_seeds(both)
    measured = f"{by_size(values)} (n = {gain.groups})"
    return Finding(name, measured, "rises", gain.claimed_gain(), gain)


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


# Panels


class Strip(NamedTuple):
    """Kernels side by side, each with its title."""

    label: str
    panels: list[tuple[str, Kernel]]


def draw_strips(grid: Sequence[Strip], unit: str, title: str):
    """Rows of kernels, each divided by the mean of its diagonal, which is written below it: sizes
    change the scale so much that undivided ones would show the largest alone."""
    across = max(len(row.panels) for row in grid)
    figure, axes = style.subplots(len(grid), across, (1.75, 2.05))
    figure.suptitle(title)
    for axis in axes.flat:
        axis.set_visible(False)
    for axis_row, row in zip(axes, grid, strict=True):
        parts = [kernel / (scale(kernel) or 1) for _, kernel in row.panels]
        top = max(float(np.nanmax(np.abs(part))) for part in parts)
        for axis, (name, kernel), part in zip(axis_row, row.panels, parts, strict=True):
            axis.set(visible=True, xticks=[], yticks=[])
            axis.grid(False)
            image = axis.imshow(part, vmin=-top, vmax=top, cmap="RdBu_r", interpolation="nearest")
            axis.set_title(name, fontsize=8)
            axis.set_xlabel(f"{unit} (mean diag. {scale(kernel):.3g})", fontsize=7)
        axis_row[0].set_ylabel(f"{row.label}\n{unit}", fontsize=7)
        bar = figure.colorbar(image, ax=list(axis_row), shrink=0.85, pad=0.02)
        bar.set_label("entry / mean diag.", fontsize=7)
        bar.ax.tick_params(labelsize=7)
    return figure


def first_seed(kernels: pd.DataFrame) -> str:
    """Which of the runs kernels are drawn of."""
    return f"runs of the first seed ({kernels[SEED].min():.0f}); diag.: diagonal of a kernel"


def largest_of_scans(kernels: pd.DataFrame, kind: str) -> list[Strip]:
    """Figure 6b, c: initial and final kernels of the base model and the largest of every scan."""
    alpha, columns = alphas(kernels)[0], {}
    start = base(kernels)
    whole = "base: " + "{} = {},\n{} = {}, {} = {}".format(
        *(part for size in SIZES for part in (SYMBOLS[size], start[size]))
    )
    for by in SIZES:
        found = pairs(kernels, kind, by, alpha)
        sizes = sorted({size for size, _ in found})
        for size in (sizes[0], sizes[-1]) if sizes else ():
            seed = min(seed for other, seed in found if other == size)
            name = whole if size == sizes[0] else f"{SYMBOLS[by]} = {size}"
            columns.setdefault(name, found[size, seed])
    return _by_state(columns)


def _by_state(columns: Mapping[str, tuple[Kernel, Kernel]]) -> list[Strip]:
    """A row of initial kernels and one of final ones."""
    return [
        Strip(label, [(name, pair[state]) for name, pair in columns.items()])
        for state, label in enumerate(STATES)
    ]


def all_of_scans(kernels: pd.DataFrame, kind: str) -> list[Strip]:
    """Figures 9 and 10: initial and final kernels of every size of every scan."""
    alpha, grid = alphas(kernels)[0], []
    for by in SIZES:
        found = pairs(kernels, kind, by, alpha)
        firsts = {size: found[size, seed] for size, seed in sorted(found, reverse=True)}
        columns = {f"{SYMBOLS[by]} = {size}": firsts[size] for size in sorted(firsts)}
        grid += _by_state(columns) if len(columns) > 1 else []
    return grid or largest_of_scans(kernels, kind)
