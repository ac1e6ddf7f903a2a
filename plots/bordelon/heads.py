"""Many heads in training (Bordelon et al., Figure 4): losses, and logits' distance to their limit.

    python -m plots bordelon/heads [DISTANCES METRICS]

The tables are that of `python -m vit_cifar5m.distances` and the metrics.csv of the same sweep. The
ensemble of 4b keeps a seed that the jackknife leaves out. The widest models are that ensemble:
their distance to it, drawn hollow, is their own spread, and no exponent counts it. Bands in (a) are
standard deviations, as in the paper.
"""

import math

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import scans
from plots.bordelon.published import FIGURE_4B_STEPS, SQUARE_ERROR
from plots.bordelon.scans import CHANCE, EVAL_LOSS, HEADS
from plots.findings import HEADER, Finding, Report
from plots.statistics import complete, exponent, jackknife
from plots.tables import SEED, STEP, TableError

TABLES = ("bordelon/figure_4_distances", "bordelon/figure_4_metrics")
MEMBER = "member"  # whether a model is of the ensemble it is compared with
DISTANCE = "square_distance"
COLUMNS = {
    "distances.csv": (HEADS, SEED, STEP, DISTANCE, MEMBER),
    "metrics.csv": (HEADS, SEED, STEP, EVAL_LOSS),
}
LEARNT = 0.1  # nats below CHANCE from which a size counts as having learnt; ours


def read(paths: tables.Paths) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Distances, and evaluations; TableError without one."""
    distances, metrics = tables.read_each(paths, COLUMNS)
    metrics = metrics[np.isfinite(metrics[EVAL_LOSS])]
    if metrics.empty:
        raise TableError(f"{paths[-1]}: no evaluation in it; set training.eval_every in the sweep")
    return distances, metrics


def findings(both: tuple[pd.DataFrame, pd.DataFrame]) -> Report:
    """Fig. 4a, then 4b."""
    distances, metrics = both
    seeds = tables.span(distances.groupby(HEADS)[SEED].nunique())
    yield (
        f"4a: eval loss after {metrics[STEP].max():.0f} steps; a size has learnt when its mean "
        f"ends {LEARNT:g} nats below ln 10 (ours)"
    )
    yield (
        f"4b: {seeds} seeds; exponents without the widest models, which are the ensemble all are "
        "compared with"
    )
    yield HEADER
    yield from _of_losses(metrics)
    yield from _of_distances(distances)


def _of_losses(metrics: pd.DataFrame) -> Report:
    """4a: the final loss by H, and its spread; runs at chance agree, as they all do nothing."""
    last = metrics[metrics[STEP] == metrics[STEP].max()]
    sizes = sorted(last[HEADS].unique())
    low, high = sizes[0], sizes[-1]

    def fall(part: pd.DataFrame) -> float:
        means = part.groupby(HEADS)[EVAL_LOSS].mean()
        return means.get(low, math.nan) - means.get(high, math.nan)

    def by_size(values: pd.Series) -> str:
        return ", ".join(f"{size:.0f}: {value:.3f}" for size, value in values.items())

    groups = last.groupby(HEADS)[EVAL_LOSS]
    means = groups.mean()
    yield Finding("4a: final loss by H (nats)", by_size(means))
    gain = jackknife(complete(last[last[HEADS].isin((low, high))], SEED, HEADS), SEED, fall)
    name = f"4a: final loss, H = {low:.0f} minus H = {high:.0f} (nats)"
    yield gain.judged(name, "gains", "above 0")
    spread = f"{by_size(groups.std())} (n = {tables.span(groups.count())})"
    yield Finding("4a: standard deviation over seeds by H (nats)", spread)
    whole = exponent(last, SEED, HEADS, EVAL_LOSS, "std")
    yield Finding("4a: H in that deviation, all H", whole.text(), "below 0")
    learnt = sorted(means.index[means < CHANCE - LEARNT])
    name = f"4a: the same, of H that have learnt ({', '.join(f'{size:.0f}' for size in learnt)})"
    if len(learnt) < 2:
        yield Finding(name, "not measured", "below 0", "no verdict: at chance")
        return
    gain = exponent(last[last[HEADS].isin(learnt)], SEED, HEADS, EVAL_LOSS, "std")
    yield gain.judged(name, "loses", "below 0")


def shown_steps(distances: pd.DataFrame) -> list[int]:
    """The paper's steps as far as they were observed, and the last one."""
    steps = sorted(int(step) for step in distances[STEP].unique())
    return sorted({step for step in FIGURE_4B_STEPS if step in steps} | {steps[-1]})


def _of_distances(distances: pd.DataFrame) -> Report:
    """4b: the power of H at every step, and whether it is closer to zero at the last one."""
    steps = shown_steps(distances)
    distances = distances[distances[MEMBER] == 0]
    first, last = next((s for s in steps if s), steps[0]), steps[-1]
    for step in steps:
        change = exponent(distances[distances[STEP] == step], SEED, HEADS, DISTANCE)
        if step in (0, first):
            name = f"4b: H in the logits' square error, step {step}"
            yield change.finding(name, SQUARE_ERROR)
        else:
            yield Finding(f"4b: the same, step {step}", change.text(), "", "", change)

    def gain(part: pd.DataFrame) -> float:
        parts = (part[part[STEP] == step] for step in (last, first))
        late, early = (exponent(one, STEP, HEADS, DISTANCE).value for one in parts)
        return late - early

    ends = distances[distances[STEP].isin((first, last))]
    change = jackknife(complete(ends, SEED, HEADS, STEP), SEED, gain)
    yield change.judged(f"4b: exponent at step {last} minus step {first}", "gains", "above 0")


def draw(both: tuple[pd.DataFrame, pd.DataFrame]) -> style.Drawn:
    """Figure 4."""
    distances, metrics = both
    figure, ((left, right),) = style.subplots("training with many heads", 1, 2, (4.6, 3.4))
    for heads, color in style.width_colors(sorted(metrics[HEADS].unique())).items():
        groups = metrics[metrics[HEADS] == heads].groupby(STEP)[EVAL_LOSS]
        means, sd = groups.mean(), groups.std().fillna(0)
        left.plot(means.index, means, color=color, lw=1.3, label=f"$H = {heads:.0f}$")
        left.fill_between(means.index, means - sd, means + sd, color=color, alpha=0.2, lw=0)
    left.axhline(CHANCE, **scans.CHANCE_LOOK, label="chance, ln 10")
    left.set(xlabel="steps", ylabel="evaluation loss (nats/image)")
    left.set_title("(a) training", fontsize=9)
    left.legend(fontsize=7)
    steps = shown_steps(distances)
    for step, color in style.width_colors(steps).items():
        rows = distances[distances[STEP] == step]
        scans.mean_line(right, rows, HEADS, DISTANCE, color, f"step {step}")
        members = rows[rows[MEMBER] == 1].groupby(HEADS)[DISTANCE].mean()
        right.plot(members.index, members, "o", ms=4, mec=color, mfc="white", zorder=3)
    first = distances[distances[STEP] == next((s for s in steps if s), steps[0])]
    scans.guide(right, first.groupby(HEADS)[DISTANCE].mean(), SQUARE_ERROR, r"$H^{-1}$")
    scans.size_axis(right, distances[HEADS], "heads $H$")
    right.set_ylabel("logits: mean square distance to limit")
    right.set_title("(b) convergence to many heads; hollow: of the ensemble", fontsize=9)
    right.set_ylim(right.get_ylim()[0] / 6)  # room for the legend, below all lines
    right.legend(fontsize=7, ncols=2, loc="lower left")
    yield "figure_4_many_heads", figure
