"""Many heads in training (Bordelon et al., Figure 4): losses, and logits' distance to their limit.

    python -m plots bordelon/heads [DISTANCES METRICS]

The tables are that of `python -m vit_cifar5m.distances` and the metrics.csv of the same sweep.

Exponents are unweighted fits to means over seeds; their errors are jackknife ones, each seed left
out of all sizes at once. The ensemble of 4b keeps the one left out. The widest models are that
ensemble: their distance to it, drawn hollow, is their own spread, and no exponent counts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import scans
from plots.bordelon.published import FIGURE_4B_STEPS, SQUARE_ERROR
from plots.bordelon.scans import CHANCE, HEADS
from plots.bordelon.scans import EVAL_LOSS as LOSS
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import complete, exponent, fitted, jackknife, law, power_of
from plots.tables import TableError

TABLES = ("bordelon/figure_4_distances", "bordelon/figure_4_metrics")
MEMBER = "member"  # whether a model is of the ensemble it is compared with
# The columns of each, by its file's usual name.
COLUMNS = {
    "distances.csv": (HEADS, "seed", "step", "square_distance", MEMBER),
    "metrics.csv": (HEADS, "seed", "step", LOSS),
}
LEARNT = 0.1  # nats below CHANCE from which a size counts as having learnt; ours


# Tables


def read(paths: Sequence[Path]) -> list[pd.DataFrame]:
    """The tables as numbers, in the order of COLUMNS; TableError for one that is missing or another
    one, or without an evaluation."""
    found = tables.read_each(paths, COLUMNS)
    found[-1] = found[-1][np.isfinite(found[-1][LOSS])]
    if found[-1].empty:
        raise TableError(f"{paths[-1]}: no evaluation in it; set training.eval_every in the sweep")
    return found


# Findings


def findings(both: Sequence[pd.DataFrame]) -> list[Printed]:
    """Fig. 4a, then 4b."""
    distances, metrics = both
    seeds = distances.groupby(HEADS)["seed"].nunique()
    sizes = ", ".join(f"{size:g}" for size in sorted(distances[HEADS].unique()))
    return [
        f"4a: eval loss after {metrics['step'].max():.0f} steps; a size has learnt when its mean "
        f"ends {LEARNT:g} nats below ln 10 (ours); ± is jackknife over seeds",
        f"4b: H = {sizes}, {scans.span(seeds)} seeds; ± is jackknife over seeds;"
        " exponents without the widest models, which are the ensemble all are compared with",
        HEADER,
        *_of_losses(metrics),
        *_of_distances(distances),
    ]


def _of_losses(metrics: pd.DataFrame) -> list[Finding]:
    """4a: whether the final loss falls with H, and its spread over seeds. Runs at chance agree, as
    they all do nothing, so that there is a verdict on the spread only of sizes that have learnt."""
    last = scans.final(metrics)
    sizes = sorted(last[HEADS].unique())
    if len(sizes) < 2:
        return [Finding("4a: final loss and its spread over seeds by H", "not measured")]
    low, high = sizes[0], sizes[-1]

    def by_size(values: pd.Series) -> str:
        return ", ".join(f"{size:.0f}: {value:.3f}" for size, value in values.items())

    def fall(part: pd.DataFrame) -> float:
        means = part.groupby(HEADS)[LOSS].mean()
        return means.get(low, math.nan) - means.get(high, math.nan)

    def spread_exponent(rows: pd.DataFrame) -> Estimate:
        return jackknife(
            complete(rows, "seed", HEADS),
            "seed",
            lambda part: power_of(fitted(part.groupby(HEADS)[LOSS].std().dropna())),
        )

    both = complete(last[last[HEADS].isin((low, high))], "seed", HEADS)
    found = jackknife(both, "seed", fall)
    groups = last.groupby(HEADS)[LOSS]
    means = groups.mean()
    result = [
        Finding("4a: final loss by H (nats)", by_size(means)),
        Finding(
            f"4a: final loss, H = {low:.0f} minus H = {high:.0f} (nats)",
            found.text(),
            "above 0",
            found.claimed_gain(),
        ),
        Finding(
            "4a: standard deviation over seeds by H (nats)",
            f"{by_size(groups.std())} (n = {scans.span(groups.count())})",
        ),
        Finding("4a: H in that deviation, all H", spread_exponent(last).text(), "below 0"),
    ]
    learnt = sorted(means.index[means < CHANCE - LEARNT])
    if len(learnt) < 2:
        return [
            *result,
            Finding(
                "4a: the same, of H that have learnt",
                "not measured",
                "below 0",
                "no verdict: at chance",
            ),
        ]
    found = spread_exponent(last[last[HEADS].isin(learnt)])
    name = f"4a: the same, of H that have learnt ({', '.join(f'{size:.0f}' for size in learnt)})"
    return [*result, Finding(name, found.text(), "below 0", (-found).claimed_gain())]


def shown_steps(distances: pd.DataFrame) -> list[int]:
    """The paper's steps as far as they were observed, and the last one."""
    steps = sorted(int(step) for step in distances["step"].unique())
    return sorted({step for step in FIGURE_4B_STEPS if step in steps} | {steps[-1]})


def _of_distances(distances: pd.DataFrame) -> list[Finding]:
    """4b: the power of H at every step, and whether it weakens in training: whether the last one
    is closer to zero than the earliest."""
    result, steps = [], shown_steps(distances)
    distances = distances[distances[MEMBER] == 0]
    for step in steps:
        rows = distances[distances["step"] == step]
        found = exponent(rows, "seed", HEADS, "square_distance")
        if step in (0, min(s for s in steps if s or len(steps) == 1)):
            name = f"4b: H in the logits' square error, step {step}"
            result.append(found.finding(name, SQUARE_ERROR))
        else:
            result.append(Finding(f"4b: the same, step {step}", found.text()))
    first, last = next((s for s in steps if s), steps[0]), steps[-1]

    def gain(part: pd.DataFrame) -> float:
        late, early = (
            power_of(law(part[part["step"] == step], HEADS, "square_distance"))
            for step in (last, first)
        )
        return late - early

    ends = distances[distances["step"].isin((first, last))]
    found = jackknife(complete(ends, "seed", HEADS, "step"), "seed", gain)
    name = f"4b: exponent at step {last} minus step {first}"
    return [*result, Finding(name, found.text(), "above 0", found.claimed_gain())]


# Figures


def draw(both: Sequence[pd.DataFrame]) -> Iterator[tuple[str, object]]:
    """Figure 4."""
    distances, metrics = both
    figure, axes = style.subplots(1, 2, (4.6, 3.4))
    figure.suptitle(
        "training with many heads\nmeans over seeds; (a) bands: standard deviation, as "
        "in the paper; (b) bars: standard error, hollow: the widest models, which are "
        "the ensemble"
    )
    _draw_losses(axes[0][0], metrics)
    _draw_distances(axes[0][1], distances)
    yield "figure_4_many_heads", figure


def _draw_losses(axis, metrics: pd.DataFrame) -> None:
    """Loss over steps: means over seeds, with their standard deviation as a band."""
    for heads, color in style.width_colors(sorted(metrics[HEADS].unique())).items():
        groups = metrics[metrics[HEADS] == heads].groupby("step")[LOSS]
        means, deviations = groups.mean(), groups.std().fillna(0)
        axis.plot(means.index, means, color=color, lw=1.3, label=f"$H = {heads:.0f}$")
        axis.fill_between(
            means.index, means - deviations, means + deviations, color=color, alpha=0.2, lw=0
        )
    axis.axhline(CHANCE, color="black", ls=":", lw=1, label="chance, ln 10")
    axis.set_xlabel("steps")
    axis.set_ylabel("evaluation loss (nats/image)")
    axis.set_title("(a) training", fontsize=9)
    axis.legend(fontsize=7)


def _draw_distances(axis, distances: pd.DataFrame) -> None:
    steps = shown_steps(distances)
    for step, color in style.width_colors(steps).items():
        rows = distances[distances["step"] == step]
        scans.mean_line(axis, rows, HEADS, "square_distance", color, f"step {step}")
        members = rows[rows[MEMBER] == 1].groupby(HEADS)["square_distance"].mean()
        axis.plot(members.index, members, "o", ms=4, mec=color, mfc="white", zorder=3)
    first = distances[distances["step"] == next((s for s in steps if s), steps[0])]
    scans.guide(axis, first.groupby(HEADS)["square_distance"].mean(), SQUARE_ERROR, r"$H^{-1}$")
    scans.size_axis(axis, distances[HEADS], "heads $H$")
    axis.set_ylabel("logits: mean square distance to limit")
    axis.set_title("(b) convergence to many heads", fontsize=9)
    axis.legend(fontsize=7)
