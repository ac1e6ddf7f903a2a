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
from plots.findings import HEADER, Finding, Printed
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
COLUMNS = (CURVE, PARAMETERIZATION, WIDTH, SEED, STEP, LAYER, ALIGNMENT)


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The probes of Figures 1 and 5 to 7 with a column `kind`; what is not finite is left out."""
    tables.expect(paths, "probes.csv")
    path = paths[0]
    table = tables.only(tables.read(path, COLUMNS, "probes.csv"), path, CURVE, FIGURES)
    table = tables.only(table, path, PARAMETERIZATION, style.LABELS)
    table = table.assign(**{KIND: table[LAYER].str.rpartition(".")[2]})
    table = tables.only(table, path, KIND, KINDS)
    table = table[table[ALIGNMENT].map(math.isfinite)]
    if table.empty:
        raise TableError(f"{path}: no finite {ALIGNMENT} in it")
    return table


def trace(rows: pd.DataFrame) -> pd.DataFrame:
    """Step -> mean, low and high: over blocks, of the mean over seeds."""
    layers = rows.groupby([STEP, LAYER])[ALIGNMENT].mean()
    return layers.groupby(level=STEP).agg(["mean", "min", "max"])


@dataclass(frozen=True)
class Peak:
    """The highest alignment of one layer over training: mean over seeds and their spread."""

    value: float
    spread: float
    seeds: int
    step: int

    def text(self) -> str:
        """In words."""
        spread = f" ± {self.spread:.3f}" if math.isfinite(self.spread) else ""
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        return f"{self.value:.3f}{spread} at step {self.step} ({seeds})"


def peak(rows: pd.DataFrame) -> Peak:
    """The layer and step with the highest mean over seeds, and what seeds differ by there.

    Means come first: the highest of noisy values would rise with the number of seeds.
    """
    groups = rows.groupby([STEP, LAYER])[ALIGNMENT]
    means = groups.mean()
    place = means.idxmax()
    values = groups.get_group(place)
    return Peak(float(means[place]), float(values.std()), len(values), int(place[0]))


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
              f"seed{'s' * (seeds != 1)}; ± is the standard deviation over seeds", HEADER]
    for curve in _curves(table):
        for rule in style.LABELS:
            result += [
                _start(table, curve, rule),
                _readout(table, curve, rule),
                _mlp(table, curve, rule),
                *([] if curve == "sgd" else [_highest(table, curve, rule)]),
            ]
    return result


def _curves(table: pd.DataFrame) -> list[str]:
    return [curve for curve in FIGURES if (table[CURVE] == curve).any()]


def _start(table: pd.DataFrame, curve: str, rule: str) -> Finding:
    rows = of(table, curve, rule, list(KINDS))
    name = f"{curve}, {style.LABELS[rule]}: first value, all layers"
    if rows.empty:
        return Finding(name, "not measured", f"{ALIGNMENT_START}")
    first = rows[rows[STEP] == rows[STEP].min()]
    layers = first.groupby(LAYER)[ALIGNMENT].mean()
    measured = (f"{layers.mean():.3f} ({layers.min():.3f} to {layers.max():.3f}) at step "
                f"{first[STEP].iloc[0]}, D = {rows[WIDTH].iloc[0]}")
    off = layers.mean() - ALIGNMENT_START
    return Finding(name, measured, f"{ALIGNMENT_START}", f"off by {off:+.3f}")


def _readout(table: pd.DataFrame, curve: str, rule: str) -> Finding:
    rows = of(table, curve, rule, ["readout"])
    name = f"{curve}, {style.LABELS[rule]}: peak of the readout"
    if rows.empty:
        return Finding(name, "not measured")
    found = peak(rows)
    if curve == "sgd":
        return Finding(name, found.text(), SGD_ALIGNMENT[rule], "no number to compare")
    low, high = READOUT_PEAK[rule]
    published = f"> {low}" if high == 1 else f"{low} to {high}"
    inside = found.value > low if high == 1 else low <= found.value <= high
    miss = f"disagrees: {'below' if found.value <= low else 'above'}"
    return Finding(name, found.text(), published, "agrees" if inside else miss)


def _mlp(table: pd.DataFrame, curve: str, rule: str) -> Finding:
    rows = of(table, curve, rule, MLP)
    name = f"{curve}, {style.LABELS[rule]}: highest peak of MLP layers"
    if rows.empty:
        return Finding(name, "not measured")
    found = peak(rows)
    if curve == "sgd":
        return Finding(name, found.text(), SGD_ALIGNMENT[rule], "no number to compare")
    word = "agrees" if found.value <= MLP_PEAK else "disagrees: above"
    return Finding(name, found.text(), f"<= {MLP_PEAK}", word)


def _highest(table: pd.DataFrame, curve: str, rule: str) -> Finding:
    name = f"{curve}, {style.LABELS[rule]}: kind of layer with the highest peak"
    rows = {kind: of(table, curve, rule, [kind]) for kind in KINDS}
    peaks = {kind: peak(own).value for kind, own in rows.items() if not own.empty}
    if not peaks:
        return Finding(name, "not measured", "readout")
    best = max(peaks, key=lambda kind: peaks[kind])
    word = "agrees" if best == "readout" else "disagrees"
    return Finding(name, f"{KINDS[best]} {peaks[best]:.3f}", "readout", word)


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Figure 1, of Adam, then a figure per optimiser."""
    curves = _curves(table)
    if "adam" in curves:
        yield FIRST, _figure_1(table)
    for curve in curves:
        yield FIGURES[curve], _of_optimizer(table, curve)


def _of_optimizer(table: pd.DataFrame, curve: str):
    figure, axes = style.subplots(
        len(KINDS), len(style.LABELS), (2.4, 1.35), sharex=True, sharey=True
    )
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    for row, (kind, label) in zip(axes, KINDS.items()):
        for axis, rule in zip(row, style.LABELS):
            for width, color in colors.items():
                _draw_trace(axis, of(table, curve, rule, [kind], width), color)
            _half(axis)
        row[0].set_ylabel(label, fontsize=8)
    _titles(axes)
    entries = [(f"D = {width}", {"color": color}) for width, color in colors.items()]
    style.legend(figure, [*entries, _HALF_ENTRY])
    figure.suptitle(f"{style.OPTIMIZERS[curve]}: log alignment ratio (shade: span of blocks)",
                    fontsize=10)
    return figure


def _figure_1(table: pd.DataFrame):
    """Readout and MLP layers under Adam at the largest width."""
    import seaborn as sns

    figure, axes = style.subplots(1, len(style.LABELS), (2.5, 2.3), sharex=True, sharey=True)
    colors = dict(zip(("readout", *MLP), sns.color_palette("colorblind")))
    for axis, rule in zip(axes[0], style.LABELS):
        for kind, color in colors.items():
            _draw_trace(axis, of(table, "adam", rule, [kind]), color)
        _half(axis)
    _titles(axes)
    axes[0, 0].set_ylabel("log alignment ratio")
    entries = [(KINDS[kind], {"color": color}) for kind, color in colors.items()]
    style.legend(figure, [*entries, _HALF_ENTRY])
    width = table[table[CURVE] == "adam"][WIDTH].max()
    figure.suptitle(f"Adam, D = {width}", fontsize=10)
    return figure


_HALF = {"color": "black", "ls": ":", "lw": 0.9}
_HALF_ENTRY = ("½: no alignment", _HALF)


def _half(axis) -> None:
    axis.axhline(ALIGNMENT_START, **_HALF)


def _draw_trace(axis, rows: pd.DataFrame, color) -> None:
    if not rows.empty:
        line = trace(rows)
        axis.plot(line.index, line["mean"], lw=1.2, color=color)
        axis.fill_between(line.index, line["min"], line["max"], color=color, alpha=0.2, lw=0)


def _titles(axes) -> None:
    for axis, label in zip(axes[0], style.LABELS.values()):
        axis.set_title(label)
    for axis in axes[-1]:
        axis.set_xlabel("step")
