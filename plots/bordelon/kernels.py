"""Kernels and attention of Vision Transformers of growing size (Bordelon et al., Figures 6, 8-10).

    python -m plots.bordelon.kernels [observed_kernels.csv observed_attention.csv metrics.csv]
                                     [--out FOLDER]

The sweep grows one of heads H, head dimension N and depth L at a time from a base model. Writes the
test loss (6a) and the training loss (8) of each scan against steps, pooled kernels (6b, 9) and
spatial ones (6c, 10) before and after training, the latter divided by the mean of their diagonal,
and the density over heads of the attention logits A (6d). The findings: how alike the kernels of
different sizes and different seeds are, how the initial kernel's scale falls with L, and how the
spread of A over heads changes with N. Without arguments, of the shipped tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from measure.fits import irreducible_power_law
from plots import style, tables
from plots.bordelon import dynamics as infinite_dynamics
from plots.bordelon.dynamics import (
    ALPHA,
    DERIVED,
    HEAD_DIM,
    HEADS,
    LAYERS,
    RUN,
    STEP,
    SYMBOLS,
    alphas,
)
from plots.findings import HEADER, Finding
from plots.statistics import (
    Estimate,
    complete,
    differences,
    exact_text,
    exponent,
    jackknife,
    mean,
)
from plots.tables import CURVE, SEED, TableError

STEMS = ("infinite_figure_6_kernels", "infinite_figure_6_attention", "infinite_figure_6_metrics")
KIND, ROW, COLUMN, VALUE = "kind", "row", "column", "value"
EVAL_LOSS = "eval_loss"
BLOCK, TOKEN, ATTENDED, HEAD = "block", "token", "attended", "head"
SIZES = (HEADS, HEAD_DIM, LAYERS)
PLACE = (CURVE, *SIZES, ALPHA, SEED, RUN, STEP)
KINDS = {"pooled": "pooled over tokens", "spatial": "tokens of one sample"}
LABELS = {"pooled": "sample", "last_token": "sample", "spatial": "token"}
STATES = ("initial", "final")
RELATIVE = "final (mean\nof diagonal 1)"

Kernel = np.ndarray
Pairs = dict[tuple[int, int], tuple[Kernel, Kernel]]  # (size, seed) -> initial and final
SeedPairs = dict[tuple[int, int], float]  # a number of two runs, by their seeds


class Row(NamedTuple):
    """Kernels side by side, each with its title, on one colour scale or each on its own."""

    label: str
    panels: list[tuple[str, Kernel]]
    own_scales: bool = False


# Rows of scans


def read(path: Path, source: str) -> pd.DataFrame:
    """observed_kernels.csv or observed_attention.csv; TableError for a bad one.

    Entries that were not finite are left out.
    """
    own = {
        "observed_kernels.csv": [ROW, COLUMN, VALUE],
        "observed_attention.csv": [BLOCK, TOKEN, ATTENDED, HEAD, VALUE],
    }[source]
    needed = [*PLACE, *own, KIND] if COLUMN in own else [*PLACE, *own]
    rows = tables.read(path, needed, source)
    rows = tables.numbers(rows, path, [*SIZES, ALPHA, SEED, STEP, *own])
    infinite_dynamics.one_run_each(rows.drop_duplicates(RUN), path, (*SIZES, ALPHA, SEED),
                                   f"{source} of figure_6.yaml or figure_7_12.yaml")
    return rows[np.isfinite(rows[VALUE])]


def base(rows: pd.DataFrame) -> dict[str, int]:
    """The model that all scans grow from: the smallest in every size."""
    return {size: int(rows[size].min()) for size in SIZES}


def scan(rows: pd.DataFrame, by: str, alpha: float | None = None) -> pd.DataFrame:
    """The rows where only `by` differs from the base model, which is one of them."""
    start = base(rows)
    same = np.logical_and.reduce([rows[size] == start[size] for size in SIZES if size != by])
    return rows[same if alpha is None else same & (rows[ALPHA] == alpha)]


# Kernels


def pairs(rows: pd.DataFrame, kind: str, by: str, alpha: float) -> Pairs:
    """The kernels of a scan, by rising size and seed; runs that stopped at once are left out."""
    own = scan(rows[rows[KIND] == kind], by, alpha)
    found: Pairs = {}
    for (size, seed), run in own.groupby([by, SEED]):
        steps = sorted(run[STEP].unique())
        if len(steps) == 2:
            first, last = (matrix(run[run[STEP] == step]) for step in steps)
            found[int(size), int(seed)] = first, last
    return found


def check(rows: pd.DataFrame, kind: str, path: Path) -> None:
    """TableError without a run of `kind` that has a kernel before and one after training."""
    if all(not pairs(rows, kind, by, alpha) for by in SIZES for alpha in alphas(rows)):
        raise TableError(
            f"{path}: no {kind} kernels before and after training of any run; set "
            "training.observe_every to the number of steps and run the sweep"
        )


def matrix(rows: pd.DataFrame) -> Kernel:
    """The symmetric matrix of which a table has one half; NaN where it has no entry."""
    places = {number: i for i, number in enumerate(sorted({*rows[ROW], *rows[COLUMN]}))}
    kernel = np.full((len(places), len(places)), math.nan)
    at = [rows[column].map(places).to_numpy() for column in (ROW, COLUMN)]
    kernel[at[0], at[1]] = kernel[at[1], at[0]] = rows[VALUE]
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


# Attention


def entries(rows: pd.DataFrame, by: str, alpha: float) -> dict[tuple[int, int], np.ndarray]:
    """(size, seed) -> A as (2, places, heads): before and after; a place has a block, too."""
    found = {}
    for (size, seed), run in scan(rows, by, alpha).groupby([by, SEED]):
        grid = run.pivot(index=[STEP, BLOCK, TOKEN, ATTENDED], columns=HEAD, values=VALUE)
        steps = grid.index.get_level_values(STEP).unique()
        if len(steps) == 2 and not grid.isna().to_numpy().any():
            states = [grid.loc[step].to_numpy() for step in sorted(steps)]
            if states[0].shape == states[1].shape:
                found[int(size), int(seed)] = np.stack(states)
    return found


def spread(values: np.ndarray) -> float:
    """Unbiased variance over heads, mean over places: (places, heads) -> number."""
    return float(values.var(axis=-1, ddof=1).mean()) if values.shape[-1] > 1 else math.nan


# Findings


def findings(kernels: pd.DataFrame, attention: pd.DataFrame) -> list[Finding]:
    """Alignment of sizes, scale over depth, and the spread over heads against N."""
    result, alpha = [], alphas(kernels)[0]
    for by in SIZES:
        for kind in KINDS:
            found = pairs(kernels, kind, by, alpha)
            result += [aligned(found, kind, by, state) for state in (0, 1)]
    for kind in KINDS:
        result += _scales(pairs(kernels, kind, LAYERS, alpha), kind)
    for own in alphas(attention):
        result += _spreads(entries(attention, HEAD_DIM, own), own)
    return result


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
    return Finding(name, f"{by_size(values)} (n = {gain.groups})", "rises", gain.claimed_gain())


def by_size(values: Mapping[int, SeedPairs]) -> str:
    """Means over pairs of seeds and their errors, by size."""
    return ", ".join(f"{size}: {over_seeds(own).compact()}" for size, own in values.items())


def basis(kernels: pd.DataFrame) -> list[str]:
    """Lines before the findings: what alignments rest on, and which scans are not independent."""
    n = kernels[SEED].nunique()
    text = ["alignment of kernels: centred (Cortes et al.), of runs of different seeds, as runs of "
            "one seed share initial random numbers across sizes; mean over "
            f"{n * (n - 1)} pairs of {n} seeds (n), ± jackknife over seeds (from 3 on)"]
    if 1 in alphas(kernels):
        text.append("at alpha_A = 1 the H and N scans start from the same networks: runs of equal "
                    "seed and width from equal weights, of which only the split into heads "
                    "differs; the two scans are not independent")
    return text


def _scales(found: Pairs, kind: str) -> list[Finding]:
    """How the initial kernel's scale falls with depth: branches add an amount of order 1/L."""
    values: dict[int, dict[int, float]] = {}
    for (size, seed), (initial, _) in found.items():
        values.setdefault(size, {})[seed] = scale(initial)
    name = f"initial {kind} kernel: mean of the diagonal, by L"
    if len(values) < 2:
        return [Finding(name, "not measured", "falls")]
    text = ", ".join(f"{size}: {mean(own).compact()}" for size, own in values.items())
    fall = mean(differences(values[min(values)], values[max(values)]))
    rows = pd.DataFrame([{LAYERS: size, SEED: seed, VALUE: one}
                         for size, own in values.items() for seed, one in own.items()])
    return [Finding(name, f"{text} (n = {fall.groups})", "falls", fall.claimed_gain()),
            _excess(rows, kind)]


def _excess(rows: pd.DataFrame, kind: str) -> Finding:
    """The exponent with which the scale falls to that of the embedding."""
    name = f"initial {kind} kernel: exponent of L in what branches add"

    def power(part: pd.DataFrame) -> float:
        means = part.groupby(LAYERS)[VALUE].mean()
        law = irreducible_power_law(means.index.tolist(), means.tolist())
        # At a bound of the fit, the scales do not determine it.
        return -law.exponent if math.isfinite(law.exponent_error) else math.nan

    try:
        found = jackknife(complete(rows, SEED, LAYERS), SEED, power)
    except (ValueError, RuntimeError) as error:
        return Finding(name, f"not measured: {error}", f"-1 {DERIVED}")
    return found.finding(name, -1.0, f"-1 {DERIVED}")


def _spreads(found: Mapping[tuple[int, int], np.ndarray], alpha: float) -> list[Finding]:
    """Exponents of N in the variance over heads, before and after, and in the change of A."""
    place = infinite_dynamics.plain(infinite_dynamics.alpha_title(alpha))
    variance, text = 1 - 2 * alpha, exact_text(1 - 2 * alpha)
    # Of alpha_A = 1 the caption of Fig. 6d says that the initial variance decreases and the update
    # is about the same for all N, of 1/2 that both distributions are; that of Fig. 2b says N^-2.
    final = f"{text} {DERIVED} (2b: -2)" if alpha == 1 else text
    measured = (
        ("initial variance of A over heads", lambda a: spread(a[0]), variance, text),
        ("final variance of A over heads", lambda a: spread(a[1]), variance, final),
        ("RMS change of A", lambda a: float(np.sqrt(np.square(a[1] - a[0]).mean())), 0.0, "0"),
    )
    laws = []
    for name, value, published, beside in measured:
        rows = pd.DataFrame([(size, seed, value(a)) for (size, seed), a in found.items()],
                            columns=[HEAD_DIM, SEED, VALUE])
        power = exponent(rows, SEED, HEAD_DIM, VALUE)
        laws.append(power.finding(f"{place}: {name}, exponent of N", published, beside))
    return laws


def report(kernels: pd.DataFrame, attention: pd.DataFrame) -> str:
    """The findings in words, with what they rest on."""
    start = ", ".join(f"{SYMBOLS[size]} = {value}" for size, value in base(kernels).items())
    text = [f"base {start}; kernels of the residual stream after the last block",
            *basis(kernels), HEADER]
    return "\n".join([*text, *(finding.line() for finding in findings(kernels, attention))])


# Figures


def draw_kernel(axis, kernel: Kernel, limits: tuple[float, float]):
    """A kernel as an image; returns what a colour bar needs."""
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    return axis.imshow(kernel, vmin=limits[0], vmax=limits[1], cmap="viridis",
                       interpolation="nearest")


def limits_of(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Lowest and highest entry."""
    return min(map(np.nanmin, kernels)), max(map(np.nanmax, kernels))


def draw_rows(grid: Sequence[Row], unit: str, folder: Path, name: str) -> list[Path]:
    """Rows of kernels; panels on scales of their own say the mean of their diagonal."""
    across = max(len(row.panels) for row in grid)
    figure, axes = style.subplots(len(grid), across, (1.55, 1.5))
    for axis_row, row in zip(axes, grid):
        shared = limits_of([kernel for _, kernel in row.panels])
        for axis in axis_row[len(row.panels):]:
            axis.set_visible(False)
        for axis, (title, kernel) in zip(axis_row, row.panels):
            image = draw_kernel(axis, kernel, limits_of([kernel]) if row.own_scales else shared)
            text = f"{title}\nmean diag. {scale(kernel):.2f}" if row.own_scales else title
            axis.set_title(text, fontsize=8)
            axis.set_xlabel(unit, fontsize=7)
            if row.own_scales:
                figure.colorbar(image, ax=axis, shrink=0.85, pad=0.02).ax.tick_params(labelsize=6)
        axis_row[0].set_ylabel(f"{row.label}\n{unit}", fontsize=7)
        if not row.own_scales:
            figure.colorbar(image, ax=list(axis_row), shrink=0.85, pad=0.02)
    return style.save(figure, folder, name)


def largest_of_scans(kernels: pd.DataFrame, kind: str) -> list[Row]:
    """Figure 6b, c: initial and final kernels of the base model and the largest of every scan."""
    alpha, columns = alphas(kernels)[0], {}
    for by in SIZES:
        found = pairs(kernels, kind, by, alpha)
        sizes = sorted({size for size, _ in found})
        for size in (sizes[0], sizes[-1]) if sizes else ():
            seed = min(seed for other, seed in found if other == size)
            name = "base" if size == sizes[0] else f"{SYMBOLS[by]} = {size}"
            columns.setdefault(name, found[size, seed])
    return _by_state([(name, pair) for name, pair in columns.items()])


def _by_state(
    columns: Sequence[tuple[str, tuple[Kernel, Kernel]]], own_scales: bool = False
) -> list[Row]:
    """A row of initial kernels, whose scale tells, and one of final ones, divided by theirs."""
    final = [(name, pair[1] / (scale(pair[1]) or 1)) for name, pair in columns]
    initial = Row("initial", [(name, pair[0]) for name, pair in columns], own_scales)
    return [initial, Row(RELATIVE, final)]


def all_of_scans(kernels: pd.DataFrame, kind: str) -> list[Row]:
    """Figures 9 and 10: initial and final kernels of every size of every scan."""
    alpha, grid = alphas(kernels)[0], []
    for by in SIZES:
        found = pairs(kernels, kind, by, alpha)
        firsts = {size: found[size, seed] for size, seed in sorted(found, reverse=True)}
        columns = [(f"{SYMBOLS[by]} = {size}", firsts[size]) for size in sorted(firsts)]
        # Depth changes the scale so much that one colour scale shows the smallest L alone.
        grid += _by_state(columns, own_scales=by == LAYERS) if len(columns) > 1 else []
    return grid or largest_of_scans(kernels, kind)


def draw_attention(attention: pd.DataFrame, folder: Path) -> list[Path]:
    """Figure 6d: the density over heads of A, a row per alpha_A, before and after."""
    own = alphas(attention)
    figure, axes = style.subplots(len(own), 2, (3.6, 2.6), sharex="row")
    for row, alpha in zip(axes, own):
        found = one_place(entries(attention, HEAD_DIM, alpha))
        for (size, values), color in zip(found.items(), style.width_colors(list(found)).values()):
            for axis, state in zip(row, values):
                _draw_density(axis, state, color=color, label=f"N = {size}")
        for axis, state in zip(row, STATES):
            axis.set_title(f"{state}, {infinite_dynamics.alpha_title(alpha)}")
            axis.set_xlabel("attention logit A")
        row[0].set_ylabel("density over heads")
        if row[1].get_legend_handles_labels()[0]:
            row[1].legend(fontsize=7, frameon=False)
    return style.save(figure, folder, "infinite_figure_6_attention")


def one_place(found: Mapping[tuple[int, int], np.ndarray]) -> dict[int, np.ndarray]:
    """N -> A (2, heads of all seeds) of the last block, the last token attending to the middle."""
    result: dict[int, list[np.ndarray]] = {}
    for (size, _), states in found.items():
        # The places of a block are sorted; the last but one is (last, middle) of its token.
        result.setdefault(size, []).append(states[:, -2])
    return {size: np.concatenate(own, axis=1) for size, own in sorted(result.items())}


def _draw_density(axis, values: np.ndarray, **look) -> None:
    """A Gaussian kernel estimate, and a tick per head."""
    from scipy.stats import gaussian_kde

    if len(values) > 2 and values.std() > 0:
        reach = 3 * values.std(ddof=1)
        x = np.linspace(values.min() - reach, values.max() + reach, 200)
        axis.plot(x, gaussian_kde(values)(x), lw=1.3, **look)
    axis.plot(values, np.zeros_like(values), "|", ms=5, mew=0.7, color=look["color"])


def draw_dynamics(metrics: Path, loss: str, label: str, folder: Path, name: str) -> list[Path]:
    """Figures 6a (test loss) and 8 (training loss): loss against steps, a panel per scan."""
    rows = infinite_dynamics.read(metrics, by=HEADS, loss=loss)
    rows = tables.numbers(rows, metrics, [ALPHA, *SIZES])
    alpha = alphas(rows)[0]
    figure, axes = style.subplots(1, len(SIZES), (3.4, 2.9), sharey=True)
    for axis, by in zip(axes[0], SIZES):
        # Evaluations may be few: too short a stretch of a logarithmic axis for its labels, and a
        # line through one of them is not to be seen.
        scale = "linear" if loss == EVAL_LOSS else "log"
        infinite_dynamics.draw_lines(axis, scan(rows, by, alpha), by, loss, scale)
        axis.set_title(f"{SYMBOLS[by]} grows, {infinite_dynamics.alpha_title(alpha)}")
        if loss == EVAL_LOSS:
            for line in axis.get_lines():
                line.set(marker="o", markersize=3)
            axis.legend(fontsize=7, frameon=False)
    axes[0][0].set_ylabel(label)
    return style.save(figure, folder, name)


def make(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    """Findings and figures of one sweep."""
    if len(paths) != 3:
        raise TableError(
            f"{len(paths)} tables given, expected 3: observed_kernels.csv, observed_attention.csv "
            "and metrics.csv of one sweep"
        )
    kernels = read(paths[0], "observed_kernels.csv")
    attention = read(paths[1], "observed_attention.csv")
    for kind in KINDS:
        check(kernels, kind, paths[0])
    written = draw_dynamics(paths[2], EVAL_LOSS, "test loss (nats/image)", folder,
                            "infinite_figure_6_dynamics")
    written += draw_dynamics(paths[2], infinite_dynamics.TRAIN_LOSS, infinite_dynamics.LOSS_LABEL,
                             folder, "infinite_figure_8_dynamics")
    for kind, number in (("pooled", 9), ("spatial", 10)):
        written += draw_rows(largest_of_scans(kernels, kind), LABELS[kind], folder,
                             f"infinite_figure_6_{kind}")
        written += draw_rows(all_of_scans(kernels, kind), LABELS[kind], folder,
                             f"infinite_figure_{number}_kernels")
    written += draw_attention(attention, folder)
    lost = infinite_dynamics.cut_lines(infinite_dynamics.cut_short(paths[2], by=HEADS))
    return "\n".join([report(kernels, attention), *lost]), written


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a bad table is one line and exit code 2."""
    style.command("infinite_kernels", __doc__, STEMS, make, argv)


if __name__ == "__main__":
    main()
