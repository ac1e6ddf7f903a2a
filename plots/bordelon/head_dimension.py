"""Attention against the head dimension N (Bordelon et al., Figures 2b, 6d and 13).

    python -m plots bordelon/head_dimension [observations.csv ...]

Figure 2b, from figure_11.yaml: variance of the attention logits A over heads, before training and
after; the same and the change of A in rich training (gamma_0 = 1, ours), from figure_6d.yaml.
Figure 13, from figure_13.yaml: how far entries of k and A have moved. Its upper row has what the
movement of W_Q and W_K causes at the initial residual stream, which is what the paper's exponents
speak of; the lower row has all movement, of which embeddings and other layers cause a part. All are
means over blocks and the observed samples. The paper's Table 3 is the
powers of 2b before training and of 13's upper row.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import scans
from plots.bordelon.published import CAPTION_2B, DERIVED
from plots.bordelon.scans import ALPHA, ALPHA_LOOKS, HEAD_DIM
from plots.findings import HEADER, Finding, Report
from plots.naming import AnyOf, told_apart
from plots.statistics import Power, exponent
from plots.tables import CURVE, OPTIMIZER, RUN, SEED, STEP

TABLES = AnyOf(f"bordelon/figure_{number}_observations" for number in ("11", "13", "6d"))
BLOCK, ALL = "block", "all"
VARIANCE, CHANGE, GAMMA = "head_variance", "attention_change", "prescription.gamma0"
FUNCTION, LEARNT = "function_change", 0.5  # RMS change of outputs; of runs at chance it is 0.1
# Column -> what moves, as axes have it.
INDUCED = {"key_change_weights": "k", "attention_change_weights": "A"}
TOTAL = {"key_change": "k", CHANGE: "A"}
CAUSES = {"by W_Q, W_K": INDUCED, "in all": TOTAL}
SPREAD, MOVED, RICH = "Figure 2b", "Figure 13", "Figure 6d"
COLUMNS = (CURVE, RUN, ALPHA, HEAD_DIM, SEED, STEP, BLOCK)
Data = Mapping[str, tuple[int, pd.DataFrame]]  # figure -> index of its table, rows


def read(paths: tables.Paths) -> Data:
    """The rows of each figure for all blocks together; 13's table has optimisers, 6d's gamma_0."""

    def figure_of(path: Path) -> str:
        table = tables.read(path, COLUMNS, "observations.csv")
        return MOVED if OPTIMIZER in table else RICH if GAMMA in table else SPREAD

    measured = {MOVED: [*INDUCED, *TOTAL], RICH: [VARIANCE, CHANGE, FUNCTION], SPREAD: [VARIANCE]}
    data = {}
    for figure, (place, path) in told_apart(paths, figure_of).items():
        rows = tables.read(path, [*COLUMNS, *measured[figure]], "observations.csv")
        rows = tables.only(tables.only(rows, path, BLOCK, [ALL]), path, ALPHA, ALPHA_LOOKS)
        data[figure] = place, rows
    return data


def power_of_n(rows: pd.DataFrame, column: str) -> Power:
    """The power of N in the mean over seeds of `column`."""
    return exponent(rows, SEED, HEAD_DIM, column)


def exact(alpha: float) -> Fraction:
    """alpha_A as the paper has it."""
    return Fraction(alpha).limit_denominator(64)


def ends(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Before and after training: each run's first and last observation; the last one of a run that
    was observed at step 0 alone is not after anything."""
    first, last = (rows.groupby(RUN)[STEP].transform(end) for end in ("min", "max"))
    after = f"at t = {rows[STEP].max():.0f}"
    states = {
        "at initialisation": rows[rows[STEP] == first],
        after: rows[(rows[STEP] == last) & (last > 0)],
    }
    return {when: own for when, own in states.items() if len(own)}


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, float, int, pd.DataFrame]]:
    """(optimiser, alpha_A, t, its rows) of Figure 13, t rising, without the initial state."""
    for optimizer in (name for name in style.OPTIMIZERS if (rows[OPTIMIZER] == name).any()):
        own = rows[(rows[OPTIMIZER] == optimizer) & (rows[STEP] > 0)]
        for alpha in scans.alphas(own):
            for step, cell in own[own[ALPHA] == alpha].groupby(STEP):
                yield optimizer, alpha, int(step), cell


def predicted(column: str, optimizer: str, alpha: float, step: int) -> Fraction | None:
    """The exponent of N that (15) and (16) give to what W_Q and W_K cause: alpha_A - 1 in k and 0
    in A, less 1/2 at SGD's first step, when W_O and the gradient are not yet correlated (Figure
    13). None for all movement, of which they do not speak."""
    if column not in INDUCED:
        return None
    first = Fraction(1, 2) if optimizer == "sgd" and step == 1 else 0
    return (exact(alpha) - 1 if INDUCED[column] == "k" else Fraction(0)) - first


def findings(data: Data) -> Report:
    """The powers of the figures whose tables there are."""
    yield "powers of N in means over seeds (n), ± their jackknife over seeds"
    yield HEADER
    for figure, (_, rows) in data.items():
        yield from _of_movement(rows) if figure == MOVED else _of_variance(rows, figure)


def _of_variance(rows: pd.DataFrame, figure: str) -> Report:
    """Slopes of the variance over heads, and in rich training of the change of A."""
    rich = "rich training, " * (figure == RICH)
    for alpha in scans.alphas(rows):
        place = f"{rich}{scans.alpha_name(alpha)}: "
        for when, state in ends(rows[rows[ALPHA] == alpha]).items():
            theory, measured = 1 - 2 * exact(alpha), power_of_n(state, VARIANCE)
            name, after = f"{place}variance of A over heads {when}", when != "at initialisation"
            if after and alpha == 0.5:
                # "Does not decay with N" (Fig. 2b), "non-decreasing diversity" (section 3.2).
                verdict = measured.claimed_no_fall()
                yield Finding(name, measured.text(), "not below 0", verdict, measured)
            else:
                derived = f" {DERIVED} (caption {CAPTION_2B})" if after and alpha == 1 else ""
                yield measured.finding(name, float(theory), f"{theory}{derived}")
            if figure == RICH and after:
                name = f"{place}RMS change of A {when}, exponent of N"
                yield power_of_n(state, CHANGE).finding(name, 0.0)
                learnt = state[state[FUNCTION] > LEARNT]
                yield power_of_n(learnt, CHANGE).finding(f"{name}, of seeds that learn", 0.0)


def _of_movement(rows: pd.DataFrame) -> Report:
    """Slopes of what W_Q and W_K cause, compared with theory, then of all movement."""
    for cause, columns in CAUSES.items():
        for optimizer, alpha, step, cell in cells(rows):
            for column, what in columns.items():
                place = f"{style.OPTIMIZERS[optimizer]}, {scans.alpha_name(alpha)}, t = {step}"
                name = f"{place}: change of {what} {cause}"
                measured = power_of_n(cell, column)
                theory = predicted(column, optimizer, alpha, step)
                if theory is None:
                    yield Finding(name, measured.text(), "", "", measured)  # claims.yaml says what
                    continue
                # The paper says "suppressed", without saying by which power of N.
                derived = f" {DERIVED}" * (optimizer == "sgd" and step == 1)
                yield measured.finding(name, float(theory), f"{theory}{derived}")


def draw(data: Data) -> style.Drawn:
    """Figures 2b, 13 and 6d, as far as there are tables."""
    for figure, (index, rows) in data.items():
        if figure == MOVED:
            yield "figure_13_movement", _figure_13(rows), [index]
        else:
            name = "figure_2b_head_variance" if figure == SPREAD else "figure_6d_rich_training"
            yield name, _figure_2b(rows, figure), [index]


def _figure_2b(rows: pd.DataFrame, figure: str):
    """A line per alpha_A, hollow before training; in rich training the change of A beside it."""
    title = "variance over heads" + ", rich training (ours)" * (figure == RICH)
    drawn, axes = style.subplots(title, 1, 1 + (figure == RICH), (4.6, 3.6))
    for alpha in scans.alphas(rows):
        for when, state in ends(rows[rows[ALPHA] == alpha]).items():
            before = when == "at initialisation"
            label = f"{scans.alpha_title(alpha)}, {when}: "
            _draw_points(axes[0][0], state, VARIANCE, label, _look(alpha, before), "N")
            if alpha == 1 and not before and figure == SPREAD:
                means = state.groupby(HEAD_DIM)[VARIANCE].mean()
                label = rf"the paper's caption: $N^{{{CAPTION_2B}}}$"
                scans.guide(axes[0][0], means, CAPTION_2B, label, 1.0)
            if figure == RICH and not before:
                _draw_points(axes[0][1], state, CHANGE, "change of A: ", _look(alpha, False), "N")
    for axis, label in zip(axes[0], ("variance of A over heads", "RMS change of A"), strict=False):
        _finish(axis, rows)
        axis.set_ylabel(label)
    look = {"fontsize": 7, "ncols": 2, "handlelength": 1.6, "columnspacing": 0.8}
    drawn.legend(loc="outside lower center", frameon=False, **look)
    return drawn


def _look(alpha: float, before: bool) -> dict:
    """How a line is drawn: hollow and dashed for the earlier of its two steps."""
    look = {"ms": 5, "lw": 1.2, **ALPHA_LOOKS[alpha]}
    return look | ({"ls": "--", "mfc": "white"} if before else {"ls": "-", "mfc": look["color"]})


def _draw_points(axis, rows: pd.DataFrame, column: str, label: str, look: dict, symbol="") -> None:
    """Means over seeds, every run as a faint point, and the power law, named in the label."""
    positive = rows[np.isfinite(rows[column]) & (rows[column] > 0)]
    fit = power_of_n(rows, column)
    error = rf" \pm {fit.error:.2f}" if math.isfinite(fit.error) else ""
    value = f"{fit.value:+.2f}{error}"
    label = f"{label}${symbol}^{{{value}}}$" if symbol else f"${value}$ {label}"
    means = positive.groupby(HEAD_DIM)[column].mean()
    faint = {"ls": "", "marker": look["marker"], "ms": 2.5, "alpha": 0.4, "color": look["color"]}
    axis.plot(positive[HEAD_DIM], positive[column], **faint)
    axis.plot(means.index, means, **{**look, "ls": ""})
    if math.isfinite(fit.value):
        axis.plot(means.index, [fit(n) for n in means.index], **{**look, "marker": ""})
    axis.plot([], [], label=label, **look)


def _finish(axis, rows: pd.DataFrame) -> None:
    scans.size_axis(axis, rows[HEAD_DIM], "head dimension N")
    scans.label_decades(axis)


def _figure_13(rows: pd.DataFrame):
    """Figure 13: k and A per optimiser, what W_Q and W_K cause above, all movement below."""
    optimizers = list(dict.fromkeys(optimizer for optimizer, *_ in cells(rows)))
    title = "movement of keys and attention logits; below panels: powers of N [theory]"
    figure, axes = style.subplots(title, 2, 2 * len(optimizers), (3.1, 2.9), sharex=True)
    for row, (cause, columns) in zip(axes, CAUSES.items(), strict=True):
        places = [(optimizer, column) for optimizer in optimizers for column in columns]
        for axis, (optimizer, column) in zip(row, places, strict=True):
            for name, alpha, step, cell in cells(rows):
                if name == optimizer:
                    theory = predicted(column, optimizer, alpha, step)
                    label = f"[{theory}]" if theory is not None else ""
                    _draw_points(axis, cell, column, label, _look(alpha, step == 1))
            _finish(axis, rows)
            what, words = columns[column], cause.replace("W_Q, W_K", "$W_Q$, $W_K$")
            axis.set_title(f"{style.OPTIMIZERS[optimizer]}: change of {what} {words}", fontsize=9)
            axis.set_ylabel(f"RMS change of {what} entries")
            below = -0.02 if columns is INDUCED else -0.2
            size = {"fontsize": 8, "ncols": 2, "handlelength": 1.6, "columnspacing": 0.8}
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, below), "frameon": False}
            axis.legend(title="power of N", title_fontsize=8, **size, **place)
    for axis in axes[0]:
        axis.set_xlabel("")
    steps = dict.fromkeys((alpha, step) for _, alpha, step, _ in cells(rows))
    entries = [(f"{scans.alpha_title(a)}, t = {step}", _look(a, step == 1)) for a, step in steps]
    style.legend(figure, entries)
    return figure
