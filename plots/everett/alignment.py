"""Log alignment ratio over training (Everett et al., Figure 1 and, per optimiser, 5 to 7).

    python -m plots everett/alignment [probes.csv]

Reads the probes of a sweep: one figure per optimiser, a row per kind of dense layer and a column
per parameterisation, lines are means over blocks and seeds, shades span the blocks; and Figure 1,
Adam's readout and MLP layers at the largest width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.everett.published import (
    ALIGNMENT_START,
    ALMOST_NONE,
    MLP_PEAK,
    READOUT_PEAK,
    SGD_ALIGNMENT,
)
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import mean
from plots.tables import CURVE, PARAMETERIZATION, SEED, STEP, WIDTH, TableError

TABLES = ("everett/figure_1_5_6_7_alignment",)
FIGURES = {
    "sgd": "figure_5_alignment_sgd",
    "adam": "figure_6_alignment_adam",
    "adafactor": "figure_7_alignment_adafactor",
}
KINDS = {
    "readout": "readout",
    "up": "MLP up",
    "down": "MLP down",
    "query": "query",
    "key": "key",
    "value": "value",
    "output": "attention output",
}
FIRST, MLP = "figure_1_alignment", ("up", "down")
LAYER, ALIGNMENT, KIND = "layer", "alignment", "kind"
# "Similar values across three model sizes" (Section 4.1); how similar is ours: half of what the
# paper tells apart, peaks of 0.7 to 0.8 from those above 0.9.
SIMILAR = 0.05
HALF = {"color": "black", "ls": ":", "lw": 0.9}
NONE = ("½: no alignment", HALF)
NOTE = "lines: means over the blocks' layers of a kind; bands: from the lowest to the highest block"
COLUMNS = (CURVE, PARAMETERIZATION, WIDTH, SEED, STEP, LAYER, ALIGNMENT)


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The probes of Figures 1 and 5 to 7 with a column `kind`; what is not finite is left out."""
    (table,) = tables.read_each(paths, {"probes.csv": COLUMNS})
    table = table.assign(**{KIND: table[LAYER].astype(str).str.rpartition(".")[2]})
    table = table[table[ALIGNMENT].map(math.isfinite)]
    if table.empty:
        raise TableError(f"{paths[0]}: no finite {ALIGNMENT} in it")
    return table


def trace(rows: pd.DataFrame) -> pd.DataFrame:
    """Step -> mean, low and high: over blocks, of the mean over seeds."""
    layers = rows.groupby([STEP, LAYER])[ALIGNMENT].mean()
    return layers.groupby(level=STEP).agg(["mean", "min", "max"])


def peak(rows: pd.DataFrame) -> tuple[Estimate, str]:
    """(mean over seeds of one layer at one step where it is highest, the same in words with the
    step). Each seed is read where the mean of the others is highest: read where its own mean takes
    part, noise would count as height. A single seed has only its own highest value.
    """
    values = rows.pivot_table(index=[STEP, LAYER], columns=SEED, values=ALIGNMENT)
    heights = {}
    for seed, own in values.items():
        others = values.drop(columns=seed)[own.notna()].mean(axis="columns")
        highest = (own if others.isna().all() else others).idxmax()
        heights[seed] = own[highest]
    found = mean(heights)
    step = values.mean(axis="columns").idxmax()[0]
    error = f" ± {found.error:.3f}" if found.bar is not None else ""
    return found, f"{found.value:.3f}{error} at step {step:.0f} ({_seeds(len(heights))})"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def of(
    table: pd.DataFrame, curve: str, rule: str, kinds: Sequence[str], width: int | None = None
) -> pd.DataFrame:
    """The rows of some kinds of layers, of one width or the largest that the line has."""
    rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
    rows = rows[rows[KIND].isin(kinds)]
    return rows[rows[WIDTH] == (rows[WIDTH].max() if width is None else width)]


def findings(table: pd.DataFrame) -> list[Printed]:
    """Start, and peaks of readout and MLP layers, of every line: those without a width in their
    name are of its largest one; then how peaks change with the width, and SGD's beside each other.
    """
    widths = sorted(map(int, table[WIDTH].unique()))
    result = [
        f"log alignment ratio; widths {', '.join(map(str, widths))}, "
        f"{_seeds(table[SEED].nunique())}; ± is one standard error over seeds",
        HEADER,
    ]
    for curve in style.present(FIGURES, table[CURVE]):
        for rule, label in style.present(style.LABELS, table[PARAMETERIZATION]).items():
            name, kinds = f"{curve}, {label}: ", list(table[KIND].unique())
            first = of(table, curve, rule, kinds)
            result.append(_start(first, name + "first value, all layers"))
            below = (-math.inf, MLP_PEAK) if rule in READOUT_PEAK else None
            for shown, ends, what in (
                (["readout"], READOUT_PEAK.get(rule), "peak of the readout"),
                (MLP, below, "highest peak of MLP layers"),
            ):
                result.append(_peak(of(table, curve, rule, shown), curve, ends, rule, name + what))
                for width in (width for width in widths if width not in first[WIDTH].values):
                    rows = of(table, curve, rule, shown, width)
                    if not rows.empty:
                        place = f"{name}{what}, D = {width}"
                        result.append(_peak(rows, curve, ends, rule, place))
            result += _change(table, curve, rule, name)
            if curve != "sgd":
                result.append(_highest(table, curve, rule, kinds, name))
    return [*result, *_of_sgd(table)]


def _start(rows: pd.DataFrame, name: str) -> Finding:
    """The mean over layers of the first values."""
    if rows.empty:
        return Finding(name, "not measured", f"{ALIGNMENT_START}")
    first = rows[rows[STEP] == rows[STEP].min()]
    layers = first.groupby(LAYER)[ALIGNMENT].mean()
    measured = (
        f"{layers.mean():.3f} ({layers.min():.3f} to {layers.max():.3f}) at step "
        f"{first[STEP].iloc[0]:.0f}, D = {rows[WIDTH].iloc[0]:.0f}"
    )
    off = layers.mean() - ALIGNMENT_START
    return Finding(name, measured, f"{ALIGNMENT_START}", f"off by {off:+.3f}")


def _peak(
    rows: pd.DataFrame, curve: str, ends: tuple[float, float] | None, rule: str, name: str
) -> Finding:
    """The highest peak of some layers beside the range that the paper reads off for Adam and
    Adafactor, or what it says of SGD."""
    if rows.empty:
        return Finding(name, "not measured")
    found, text = peak(rows)
    if curve not in ("adam", "adafactor") or ends is None:
        words = SGD_ALIGNMENT.get(rule, "") if curve == "sgd" else ""
        return Finding(name, text, words, "no number to compare")
    low, high = ends
    published = f"<= {high}" if low < 0 else f"> {low}" if high == 1 else f"{low} to {high}"
    return Finding(name, text, published, _inside(found, low, high))


def _inside(found: Estimate, low: float, high: float) -> str:
    """Whether a number lies in a range: in it, outside of it, or either within the interval; one
    seed, which has none, does not say."""
    if math.isnan(found.error):
        return found.few
    if min(abs(found.value - low), abs(found.value - high)) <= found.reach * found.error:
        return "within noise"
    inside = found.value > low if high == 1 else low <= found.value <= high
    return "agrees" if inside else f"disagrees: {'below' if found.value <= low else 'above'}"


def _gap_text(gap: Estimate) -> str:
    return replace(gap, groups=None).text()


def _change(table: pd.DataFrame, curve: str, rule: str, name: str) -> Iterator[Finding]:
    """The readout's peak at the largest width minus that at the smallest; none for one width."""
    rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
    widths = sorted(map(int, rows.loc[rows[KIND] == "readout", WIDTH].unique()))
    if len(widths) > 1:
        large, small = (
            peak(of(table, curve, rule, ["readout"], width))[0] for width in (widths[-1], widths[0])
        )
        gap = large - small
        claimed = rule in READOUT_PEAK and curve in FIGURES
        yield Finding(
            f"{name}readout's peak from D = {widths[0]} to {widths[-1]}",
            f"{_gap_text(gap)} ({_seeds(gap.groups or 0)})",
            f"{-SIMILAR} to {SIMILAR}" if claimed else "no claim",
            (gap.few or _inside(gap, -SIMILAR, SIMILAR)) if claimed else "",
        )


def _of_sgd(table: pd.DataFrame) -> Iterator[Finding]:
    """Peaks of SGD's readout where the paper says almost no alignment, minus those where it says
    low amounts, at the largest width."""
    rows = {rule: of(table, "sgd", rule, ["readout"]) for rule in SGD_ALIGNMENT}
    peaks = {rule: peak(own)[0] for rule, own in rows.items() if not own.empty}
    for less in (rule for rule in peaks if SGD_ALIGNMENT[rule] == ALMOST_NONE):
        for more in (rule for rule in peaks if SGD_ALIGNMENT[rule] != ALMOST_NONE):
            gap = peaks[less] - peaks[more]
            name = f"sgd, {style.LABELS[less]} - {style.LABELS[more]}: peak of the readout"
            yield Finding(
                name,
                f"{_gap_text(gap)} ({_seeds(gap.groups or 0)})",
                "below 0",
                (-gap).claimed_gain(),
            )


def _highest(
    table: pd.DataFrame, curve: str, rule: str, kinds: Sequence[str], name: str
) -> Finding:
    """Which kind of layer has the highest peak, and by how much: above the readout, which the paper
    names, or where it is the readout above the next one."""
    name += "kind of layer with the highest peak"
    rows = {kind: of(table, curve, rule, [kind]) for kind in kinds}
    peaks = {kind: peak(own)[0] for kind, own in rows.items() if not own.empty}
    if not peaks:
        return Finding(name, "not measured", "readout")
    best, *others = sorted(peaks, key=lambda kind: -peaks[kind].value)
    word, top = "agrees" if best == "readout" else "disagrees", peaks[best]
    measured = f"{KINDS.get(best, best)} {top.value:.3f}"
    for other in others[:1] if best == "readout" else {"readout"} & {*others}:
        gap = top - peaks[other]
        measured += f", {_gap_text(gap)} above {KINDS.get(other, other)}"
        word = "within noise" if gap.value <= gap.reach * gap.error else word
        word = gap.few if math.isnan(gap.error) else word
    return Finding(name, f"{measured} ({_seeds(top.groups or 0)})", "readout", word)


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Figure 1, of Adam, then a figure per optimiser."""
    curves = style.present(FIGURES, table[CURVE])
    if "adam" in curves:
        yield FIRST, _figure_1(table)
    for curve in curves:
        name = FIGURES.get(curve, f"alignment_{curve}")
        yield name, _of_optimizer(table[table[CURVE] == curve], curve)


def _of_optimizer(table: pd.DataFrame, curve: str):
    """A row per kind of layer, a column per parameterisation, a line per width."""
    kinds = style.present(KINDS, table[KIND])
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    figure, axes = style.subplots(len(kinds), len(rules), (2.4, 1.35), sharex=True, sharey=True)
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    for axis in axes.flat:
        axis.autoscale(False)  # each band would ask for the limits of all panels again
    for row, (kind, label) in zip(axes, kinds.items(), strict=True):
        for axis, rule in zip(row, rules, strict=True):
            lines = [(of(table, curve, rule, [kind], width), c) for width, c in colors.items()]
            _draw_traces(axis, lines)
        row[0].set_ylabel(label, fontsize=8)
    for axis in axes.flat:
        axis.autoscale()
    style.label_grid(axes, rules.values(), "step")
    entries = [(f"D = {width}", {"color": color}) for width, color in colors.items()]
    style.legend(figure, [*entries, NONE])
    figure.suptitle(f"{style.OPTIMIZERS.get(curve, curve)}: log alignment ratio\n{NOTE}")
    return figure


def _figure_1(table: pd.DataFrame):
    """Readout and MLP layers under Adam at the largest width."""
    table = table[table[CURVE] == "adam"]
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    figure, axes = style.subplots(1, len(rules), (2.5, 2.3), sharex=True, sharey=True)
    colors = dict(zip(("readout", *MLP), style.PALETTE, strict=False))
    for axis, rule in zip(axes[0], rules, strict=True):
        _draw_traces(axis, [(of(table, "adam", rule, [k]), color) for k, color in colors.items()])
    style.label_grid(axes, rules.values(), "step", ["log alignment ratio"])
    entries = [(KINDS[kind], {"color": color}) for kind, color in colors.items()]
    style.legend(figure, [*entries, NONE])
    figure.suptitle(f"Adam, D = {table[WIDTH].max():.0f}: log alignment ratio\n{NOTE}")
    return figure


def _draw_traces(axis, lines: Sequence[tuple[pd.DataFrame, object]]) -> None:
    axis.axhline(ALIGNMENT_START, **HALF)
    for rows, color in lines:
        if not rows.empty:
            line = trace(rows)
            axis.plot(line.index, line["mean"], lw=1.2, color=color)
            axis.fill_between(line.index, line["min"], line["max"], color=color, alpha=0.2, lw=0)
    if all(rows.empty for rows, _ in lines):
        style.empty(axis, "not measured")
