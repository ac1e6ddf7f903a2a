"""Attention against the head dimension N (Bordelon et al., Figures 2b and 13).

    python -m plots bordelon/head_dimension [observations.csv ...]

Figure 2b, from figure_11.yaml: variance of the attention logits A over heads, before training and
after. Figure 13, from figure_13.yaml: how far entries of k and A have moved. Its upper row has what
the movement of W_Q and W_K causes at the initial residual stream, which is what the paper's
exponents speak of; the lower row has all movement, of which embeddings and other layers cause a
part. Both are means over blocks and the observed samples. Draws the figures whose tables it is
given; with both, also writes table_3.csv, the paper's Table 3 with the powers measured.

Powers are unweighted fits to means over seeds; their errors are jackknife ones over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import scans
from plots.bordelon.published import CAPTION_2B, DERIVED
from plots.bordelon.scans import ALPHA, ALPHA_LOOKS, HEAD_DIM
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import complete, exponent, law
from plots.tables import CURVE, OPTIMIZER, RUN, SEED, STEP, TableError

TABLES = ("bordelon/figure_11_observations", "bordelon/figure_13_observations")
PER_TABLE = True  # a figure for each
BLOCK, ALL = "block", "all"
VARIANCE = "head_variance"
# Column -> what moves, as axes have it.
INDUCED = {"key_change_weights": "k", "attention_change_weights": "A"}
TOTAL = {"key_change": "k", "attention_change": "A"}
POINT = (ALPHA, HEAD_DIM, SEED, STEP)  # a figure has one run here, and per optimiser
COLUMNS = (CURVE, RUN, *POINT, BLOCK)


def read(paths: Sequence[Path]) -> list[pd.DataFrame]:
    """The rows of one figure or of both; TableError for two tables of one."""
    found = [_read(path) for path in paths]
    if len({OPTIMIZER in rows for rows in found}) != len(found):
        raise TableError(
            f"{paths[-1]}: a second table of one figure; expected the observations "
            "of figure_11.yaml, of figure_13.yaml or of both"
        )
    return found


def _read(path: Path) -> pd.DataFrame:
    """The rows for all blocks together; TableError for a table that lacks what its figure needs,
    that has two runs where a figure expects one, or, for Figure 13, not both of its steps."""
    moved = OPTIMIZER in tables.read(path, COLUMNS, "observations.csv")
    measured = [*INDUCED, *TOTAL] if moved else [VARIANCE]
    rows = tables.read(path, [*COLUMNS, *measured], "observations.csv")
    rows = tables.only(tables.only(rows, path, BLOCK, [ALL]), path, ALPHA, ALPHA_LOOKS)
    source = f"observations.csv of figure_{13 if moved else 11}.yaml"
    if not moved:
        return rows
    steps = sorted(rows.loc[rows[STEP] > 0, STEP].unique())
    if len(steps) != 2 or steps[0] != 1:
        found = ", ".join(f"{step:g}" for step in steps) or "0"
        raise TableError(
            f"{path}: observed after {found} steps; expected step 1 and one later "
            f"step; is it the whole {source}?"
        )
    return rows


def power(rows: pd.DataFrame, column: str) -> Estimate:
    """The power of N in the mean over seeds of `column`."""
    return exponent(rows, SEED, HEAD_DIM, column)


def exact(alpha: float) -> Fraction:
    """alpha_A as the paper has it."""
    return Fraction(alpha).limit_denominator(64)


# Figure 2b


def variance_rows(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Before and after training: each run's first and last observation; the last one of a run that
    was observed at step 0 alone is not after anything."""
    first, last = (rows.groupby(RUN)[STEP].transform(end) for end in ("min", "max"))
    found = {
        "at initialisation": rows[rows[STEP] == first],
        "after training": rows[(rows[STEP] == last) & (last > 0)],
    }
    return {when: own for when, own in found.items() if len(own)}


def variance_findings(rows: pd.DataFrame) -> list[Finding]:
    """Slope of the variance over heads against 1 - 2 alpha_A, before and after training."""
    result = []
    for alpha in scans.alphas(rows):
        for when, found in variance_rows(rows[rows[ALPHA] == alpha]).items():
            predicted = 1 - 2 * exact(alpha)
            measured = power(found, VARIANCE)
            caption = when == "after training" and alpha == 1
            beside = f"{predicted}" + (f" {DERIVED} (caption {CAPTION_2B})" if caption else "")
            name = f"{scans.alpha_name(alpha)}: variance of A over heads {_when(found, when)}"
            if when == "after training" and alpha == 0.5:
                # "Does not decay with N" (Fig. 2b), "non-decreasing diversity" (section 3.2).
                text, verdict = measured.text(), measured.claimed_no_fall()
                result.append(Finding(name, text, "not below 0", verdict))
                continue
            result.append(measured.finding(name, float(predicted), beside))
    return result


def _when(rows: pd.DataFrame, when: str) -> str:
    return when if when == "at initialisation" else f"at t = {rows[STEP].max():.0f}"


def _figure_2b(rows: pd.DataFrame):
    """Figure 2b: one panel, a line per alpha_A, hollow before training, with the power that the
    caption gives to alpha_A = 1 after it."""
    figure, axes = style.subplots(1, 1, (4.6, 3.9))
    axis = axes[0][0]
    for alpha in scans.alphas(rows):
        for when, found in variance_rows(rows[rows[ALPHA] == alpha]).items():
            before = when == "at initialisation"
            label = f"{scans.alpha_title(alpha)}, {_when(found, when)}"
            label += f": $N^{{{_printed(power(found, VARIANCE))}}}$"
            _draw_points(axis, found, VARIANCE, label, _look(alpha, before))
            if alpha == 1 and not before:
                means = found.groupby(HEAD_DIM)[VARIANCE].mean()
                axis.plot(
                    means.index,
                    means.iloc[0] * (means.index / means.index[0]) ** CAPTION_2B,
                    ":",
                    color="black",
                    lw=1.2,
                    label=rf"caption: $N^{{{CAPTION_2B}}}$",
                )
    _finish(axis, rows)
    axis.set_ylabel("variance of A over heads")
    figure.suptitle("variance over heads\npower ± standard error; small points: seeds")
    figure.legend(loc="outside lower center", fontsize=7, ncols=2, frameon=False)
    return figure


def _look(alpha: float, before: bool) -> dict:
    """How a line is drawn: hollow and dashed for the earlier of its two steps."""
    look = {"ms": 5, "lw": 1.2, **ALPHA_LOOKS[alpha]}
    return look | ({"ls": "--", "mfc": "white"} if before else {"ls": "-", "mfc": look["color"]})


def _draw_points(axis, rows: pd.DataFrame, column: str, label: str, look: dict) -> None:
    """Means over seeds, every run as a faint point, and the power law."""
    kept = rows[np.isfinite(rows[column]) & (rows[column] > 0)]
    if kept.empty:
        return
    means = kept.groupby(HEAD_DIM)[column].mean()
    axis.plot(
        kept[HEAD_DIM],
        kept[column],
        ls="",
        marker=look["marker"],
        ms=2.5,
        alpha=0.4,
        color=look["color"],
    )
    fit = law(complete(kept, SEED, HEAD_DIM), HEAD_DIM, column)  # as in the findings
    axis.plot(means.index, means, **{**look, "ls": "" if fit else look["ls"]})
    if fit:
        axis.plot(means.index, [fit(n) for n in means.index], **{**look, "marker": ""})
    axis.plot([], [], label=label, **look)


def _printed(found: Estimate) -> str:
    """A power with its error, in matplotlib's notation."""
    error = rf" \pm {found.error:.3f}" if math.isfinite(found.error) else ""
    return f"{found.value:+.3f}{error}" if math.isfinite(found.value) else "?"


def _finish(axis, rows: pd.DataFrame) -> None:
    scans.size_axis(axis, rows[HEAD_DIM], "head dimension N")
    scans.label_decades(axis)


# Figure 13


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, float, int, pd.DataFrame]]:
    """(optimiser, alpha_A, t, its rows), t rising, without the initial state."""
    for optimizer in _optimizers(rows):
        own = rows[(rows[OPTIMIZER] == optimizer) & (rows[STEP] > 0)]
        for alpha in scans.alphas(own):
            for step, found in own[own[ALPHA] == alpha].groupby(STEP):
                yield optimizer, alpha, int(step), found


def _optimizers(rows: pd.DataFrame) -> list[str]:
    present = set(rows[OPTIMIZER])
    return [name for name in style.OPTIMIZERS if name in present]


def predicted(column: str, optimizer: str, alpha: float, step: int) -> Fraction | None:
    """The exponent of N that (15) and (16) give to what W_Q and W_K cause: alpha_A - 1 in k and 0
    in A, less 1/2 at SGD's first step, when W_O and the gradient are not yet correlated (Figure
    13). None for all movement, of which they do not speak."""
    if column not in INDUCED:
        return None
    first = Fraction(1, 2) if suppressed(optimizer, step) else 0
    return (exact(alpha) - 1 if INDUCED[column] == "k" else Fraction(0)) - first


def suppressed(optimizer: str, step: int) -> bool:
    """Whether Figure 13 calls the movement suppressed, without saying by which power of N."""
    return optimizer == "sgd" and step == 1


def movement_findings(rows: pd.DataFrame) -> list[Finding]:
    """Slopes of what W_Q and W_K cause, compared with theory, then of all movement."""
    result = []
    for columns, kind in ((INDUCED, "by W_Q, W_K"), (TOTAL, "in all")):
        for optimizer, alpha, step, found in cells(rows):
            for column, what in columns.items():
                place = f"{style.OPTIMIZERS[optimizer]}, {scans.alpha_name(alpha)}, t = {step}"
                name = f"{place}: change of {what} {kind}"
                measured, theory = power(found, column), predicted(column, optimizer, alpha, step)
                if theory is None:
                    result.append(Finding(name, measured.text()))
                    continue
                beside = f"{theory} {DERIVED}" if suppressed(optimizer, step) else str(theory)
                result.append(measured.finding(name, float(theory), beside))
    return result


def _figure_13(rows: pd.DataFrame):
    """Figure 13: k and A per optimiser, what W_Q and W_K cause above and all movement below. Each
    panel's legend has the powers, next to those of theory where there are some."""
    optimizers = _optimizers(rows)
    figure, axes = style.subplots(2, 2 * len(optimizers), (3.1, 3.1), sharex=True)
    figure.suptitle(
        "movement of keys and attention logits\nlegends: power of N ± standard error "
        "[theory]; small points: seeds; all movement has parts of other causes"
    )
    for row, columns, kind in zip(axes, (INDUCED, TOTAL), ("by W_Q, W_K", "in all"), strict=True):
        panels = {
            (optimizer, column): row[2 * i + j]
            for i, optimizer in enumerate(optimizers)
            for j, column in enumerate(columns)
        }
        for (optimizer, column), axis in panels.items():
            for name, alpha, step, found in cells(rows):
                if name == optimizer:
                    theory = predicted(column, optimizer, alpha, step)
                    label = f"${_printed(power(found, column))}$"
                    label += f" [${theory}$]" if theory is not None else ""
                    _draw_points(axis, found, column, label, _look(alpha, step == 1))
            _finish(axis, rows)
            what = columns[column]
            cause = kind.replace("W_Q, W_K", "$W_Q$, $W_K$")
            axis.set_title(f"{style.OPTIMIZERS[optimizer]}: change of {what} {cause}", fontsize=9)
            axis.set_ylabel(f"RMS change of {what} entries")
            axis.legend(
                fontsize=7,
                ncols=2,
                frameon=False,
                loc="upper center",
                handlelength=1.6,
                columnspacing=0.8,
                handletextpad=0.4,
                bbox_to_anchor=(0.5, -0.02 if columns is INDUCED else -0.2),
            )
    for axis in axes[0]:
        axis.set_xlabel("")
    lines = dict.fromkeys((alpha, step) for _, alpha, step, _ in cells(rows))
    style.legend(
        figure,
        [
            (f"{scans.alpha_title(alpha)}, t = {step}", _look(alpha, step == 1))
            for alpha, step in lines
        ],
    )
    return figure


# Both


def findings(found: Sequence[pd.DataFrame]) -> list[Printed]:
    """The powers of the figures whose tables there are, with what they rest on: how much runs that
    differ in their seeds alone scatter, by figure and optimiser."""
    text: list[Printed] = ["powers of N in means over seeds (n), ± jackknife over seeds"]
    for rows in found:
        if OPTIMIZER not in rows:
            text.append(f"Figure 2b: {_spread(rows, [VARIANCE])}")
            continue
        for optimizer in _optimizers(rows):
            spread = _spread(rows[rows[OPTIMIZER] == optimizer], [*INDUCED, *TOTAL])
            text.append(f"Figure 13, {style.OPTIMIZERS[optimizer]}: {spread}")
    text.append(HEADER)
    for rows in found:
        if OPTIMIZER not in rows:
            text += variance_findings(rows)
            continue
        own = movement_findings(rows)
        late = (f for f in own if f.name.startswith("SGD") and ", t = 1:" not in f.name)
        text += own
        if any(finding.verdict.startswith("off") for finding in late):
            text.append(
                "note: SGD does not reach all exponents after its first step; Figure 13 "
                "expects them once W_O and the gradient correlate, which is not measured "
                "here"
            )
    return text


def draw(found: Sequence[pd.DataFrame]) -> Iterator[tuple[str, object]]:
    """Figure 2b, Figure 13 or both."""
    for rows in found:
        if OPTIMIZER in rows:
            yield "figure_13_movement", _figure_13(rows)
        else:
            yield "figure_2b_head_variance", _figure_2b(rows)
    if len(found) > 1:
        yield "table_3", table_3(found)


def table_3(found: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The paper's Table 3, a row per alpha_A and entry: the variance of A(0) over heads, then what
    W_Q and W_K change in A and in k, per optimiser and after the later of Figure 13's steps."""
    (variances,) = (rows for rows in found if OPTIMIZER not in rows)
    (moved,) = (rows for rows in found if OPTIMIZER in rows)
    entries = [
        (
            "",
            alpha,
            0,
            "variance of A(0)",
            1 - 2 * exact(alpha),
            power(
                variance_rows(variances[variances[ALPHA] == alpha])["at initialisation"], VARIANCE
            ),
        )
        for alpha in scans.alphas(variances)
    ]
    for optimizer, alpha, step, rows in cells(moved):
        if step == moved[STEP].max():
            entries += [
                (
                    optimizer,
                    alpha,
                    step,
                    f"update to {what}",
                    predicted(column, optimizer, alpha, step),
                    power(rows, column),
                )
                for column, what in reversed(INDUCED.items())
            ]
    return pd.DataFrame(
        [
            {
                "alpha_attention": alpha,
                "entry": entry,
                "optimizer": optimizer,
                "step": step,
                "published": float(published),
                "exponent": measured.value,
                "standard_error": measured.error,
                "seeds": measured.groups,
            }
            for optimizer, alpha, step, entry, published, measured in entries
        ]
    ).sort_values("alpha_attention", ascending=False, kind="stable")


def _spread(rows: pd.DataFrame, columns: Sequence[str]) -> str:
    variances, free = 0.0, 0
    for column in columns:
        keys = [rows[key] for key in (ALPHA, HEAD_DIM, STEP)]
        logs = np.log(rows[column].where(rows[column] > 0)).groupby(keys)
        kept = logs.count() > 1
        variances += float((logs.var() * (logs.count() - 1))[kept].sum())
        free += int((logs.count() - 1)[kept].sum())
    if not free:
        return "one seed, spread unknown"
    return f"spread over seeds {math.sqrt(variances / free):.1%} of a value"
