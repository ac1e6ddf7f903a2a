"""Log alignment ratio over training (Everett et al., Figure 1 and, per optimiser, 5 to 7).

    python -m plots everett/alignment [probes.csv]

Reads the probes of a sweep: one figure per optimiser, a row per kind of dense layer and a column
per parameterisation, lines are means over blocks and seeds, shades span the blocks; and Figure 1,
Adam's readout and MLP layers at the largest width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.everett.published import ALIGNMENT_START, MLP_PEAK, READOUT_PEAK, SGD_ALIGNMENT
from plots.findings import HEADER, Finding, Printed, number, reach
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
HALF = {"color": "black", "ls": ":", "lw": 0.9}
NOTE = "lines: means over the blocks' layers of a kind; bands: from the lowest to the highest block"
COLUMNS = (CURVE, PARAMETERIZATION, WIDTH, SEED, STEP, LAYER, ALIGNMENT)


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The probes of Figures 1 and 5 to 7 with a column `kind`; what is not finite is left out."""
    tables.expect(paths, "probes.csv")
    table = tables.read(paths[0], COLUMNS, "probes.csv")
    table = table.assign(**{KIND: table[LAYER].astype(str).str.rpartition(".")[2]})
    table = table[table[ALIGNMENT].map(math.isfinite)]
    if table.empty:
        raise TableError(f"{paths[0]}: no finite {ALIGNMENT} in it")
    return table


def trace(rows: pd.DataFrame) -> pd.DataFrame:
    """Step -> mean, low and high: over blocks, of the mean over seeds."""
    layers = rows.groupby([STEP, LAYER])[ALIGNMENT].mean()
    return layers.groupby(level=STEP).agg(["mean", "min", "max"])


@dataclass(frozen=True)
class Peak:
    """The highest alignment of one layer over training: mean over seeds, and its standard error."""

    value: float
    error: float
    seeds: int
    step: int

    def text(self) -> str:
        """In words."""
        error = f" ± {self.error:.3f}" if math.isfinite(self.error) else ""
        return f"{self.value:.3f}{error} at step {self.step} ({_seeds(self.seeds)})"

    def surely(self, bound: float) -> bool:
        """Whether the mean differs from a bound: beyond its 95 % interval, if seeds give one."""
        return not abs(self.value - bound) <= reach(self.seeds) * self.error


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def peak(rows: pd.DataFrame) -> Peak:
    """The layer and step with the highest mean over seeds, and what seeds differ by there.

    Means come first: the highest of noisy values would rise with the number of seeds.
    """
    groups = rows.groupby([STEP, LAYER])[ALIGNMENT]
    means = groups.mean()
    place = means.idxmax()
    values = groups.get_group(place)
    return Peak(float(means[place]), float(values.sem()), len(values), int(place[0]))


def of(
    table: pd.DataFrame, curve: str, rule: str, kinds: Sequence[str], width: int | None = None
) -> pd.DataFrame:
    """The rows of some kinds of layers, of one width or the largest that the line has."""
    rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
    rows = rows[rows[KIND].isin(kinds)]
    return rows[rows[WIDTH] == (rows[WIDTH].max() if width is None else width)]


def findings(table: pd.DataFrame) -> list[Printed]:
    """Start, and peaks of readout and MLP layers, at the largest width of every line."""
    widths = sorted(map(int, table[WIDTH].unique()))
    seeds = table[SEED].nunique()
    result = [f"log alignment ratio; widths {', '.join(map(str, widths))}, {seeds} "
              f"seed{'s' * (seeds != 1)}; ± is one standard error over seeds", HEADER]
    for curve in style.present(FIGURES, table[CURVE]):
        for rule, label in style.present(style.LABELS, table[PARAMETERIZATION]).items():
            name = f"{curve}, {label}: "
            result.append(_start(table, curve, rule, name + "first value, all layers"))
            for kinds, what in ((("readout",), "peak of the readout"),
                                (MLP, "highest peak of MLP layers")):
                result.append(_peak(of(table, curve, rule, kinds), curve, rule, kinds, name + what))
            if curve != "sgd":
                result.append(_highest(table, curve, rule, name))
    return result


def _start(table: pd.DataFrame, curve: str, rule: str, name: str) -> Finding:
    rows = of(table, curve, rule, list(table[KIND].unique()))
    if rows.empty:
        return Finding(name, "not measured", f"{ALIGNMENT_START}")
    first = rows[rows[STEP] == rows[STEP].min()]
    layers = first.groupby(LAYER)[ALIGNMENT].mean()
    measured = (f"{layers.mean():.3f} ({layers.min():.3f} to {layers.max():.3f}) at step "
                f"{first[STEP].iloc[0]}, D = {rows[WIDTH].iloc[0]}")
    off = layers.mean() - ALIGNMENT_START
    return Finding(name, measured, f"{ALIGNMENT_START}", f"off by {off:+.3f}")


def _peak(rows: pd.DataFrame, curve: str, rule: str, kinds: Sequence[str], name: str) -> Finding:
    """The highest peak of these kinds of layers beside the range that the paper reads off."""
    if rows.empty:
        return Finding(name, "not measured")
    found = peak(rows)
    if curve not in ("adam", "adafactor") or rule not in READOUT_PEAK:
        return Finding(name, found.text(), SGD_ALIGNMENT.get(rule, "") if curve == "sgd" else "",
                       "no number to compare")
    low, high = READOUT_PEAK[rule] if kinds == ("readout",) else (-math.inf, MLP_PEAK)
    published = f"<= {high}" if low < 0 else f"> {low}" if high == 1 else f"{low} to {high}"
    inside = found.value > low if high == 1 else low <= found.value <= high
    word = "agrees" if inside else f"disagrees: {'below' if found.value <= low else 'above'}"
    if not (found.surely(low) and found.surely(high)):
        word = "within noise"
    return Finding(name, found.text(), published, word)


def _highest(table: pd.DataFrame, curve: str, rule: str, name: str) -> Finding:
    name += "kind of layer with the highest peak"
    rows = {kind: of(table, curve, rule, [kind]) for kind in table[KIND].unique()}
    peaks = {kind: peak(own) for kind, own in rows.items() if not own.empty}
    if not peaks:
        return Finding(name, "not measured", "readout")
    best, *others = sorted(peaks, key=lambda kind: -peaks[kind].value)
    word, top = "agrees" if best == "readout" else "disagrees", peaks[best]
    measured = f"{KINDS.get(best, best)} {top.value:.3f}"
    for other in others[:1] if best == "readout" else {"readout"} & {*others}:
        gap, error = top.value - peaks[other].value, math.hypot(top.error, peaks[other].error)
        measured += f", {number(gap, error)} above {KINDS.get(other, other)}"
        word = "within noise" if gap <= reach(top.seeds) * error else word
    return Finding(name, f"{measured} ({_seeds(top.seeds)})", "readout", word)


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Figure 1, of Adam, then a figure per optimiser."""
    curves = style.present(FIGURES, table[CURVE])
    if "adam" in curves:
        yield FIRST, _figure_1(table)
    for curve in curves:
        name = FIGURES.get(curve, f"alignment_{curve}")
        yield name, _of_optimizer(table[table[CURVE] == curve], curve)


def _of_optimizer(table: pd.DataFrame, curve: str):
    kinds = style.present(KINDS, table[KIND])
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    figure, axes = style.subplots(len(kinds), len(rules), (2.4, 1.35), sharex=True, sharey=True)
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    for row, (kind, label) in zip(axes, kinds.items()):
        for axis, rule in zip(row, rules):
            lines = [(of(table, curve, rule, [kind], width), c) for width, c in colors.items()]
            _draw_traces(axis, lines)
        row[0].set_ylabel(label, fontsize=8)
    entries = [(f"D = {width}", {"color": color}) for width, color in colors.items()]
    _finish(figure, axes, rules, entries)
    figure.suptitle(f"{style.OPTIMIZERS.get(curve, curve)}: log alignment ratio\n{NOTE}")
    return figure


def _figure_1(table: pd.DataFrame):
    """Readout and MLP layers under Adam at the largest width."""
    table = table[table[CURVE] == "adam"]
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    figure, axes = style.subplots(1, len(rules), (2.5, 2.3), sharex=True, sharey=True)
    colors = dict(zip(("readout", *MLP), style.PALETTE))
    for axis, rule in zip(axes[0], rules):
        _draw_traces(axis, [(of(table, "adam", rule, [k]), color) for k, color in colors.items()])
    axes[0, 0].set_ylabel("log alignment ratio")
    _finish(figure, axes, rules, [(KINDS[kind], {"color": c}) for kind, c in colors.items()])
    figure.suptitle(f"Adam, D = {table[WIDTH].max()}\n{NOTE}")
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


def _finish(figure, axes, rules: dict[str, str], entries: list[tuple[str, dict]]) -> None:
    for axis, label in zip(axes[0], rules.values()):
        axis.set_title(label)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    style.legend(figure, [*entries, ("½: no alignment", HALF)])
