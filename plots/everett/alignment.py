"""Log alignment ratio over training (Everett et al., Figure 1 and, per optimiser, 5 to 7).

    python -m plots everett/alignment [probes.csv]

Reads the probes of a sweep: one figure per optimiser, a row per kind of dense layer and a column
per parameterisation, lines are means over blocks and seeds, shades span the blocks; and Figure 1,
Adam's readout and MLP layers at the largest width. The ratio A is a logarithm to the base of the
layer's fan-in n: a factor f of alignment is A = 1 + log f / log n, so that the same f is another A
at another width. Where widths are compared, A is that of the measured f at the paper's D = 4,096.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from plots import naming, style, tables
from plots.everett import published
from plots.findings import HEADER, UNKNOWN, Estimate, Finding, Report
from plots.statistics import average, mean
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
MLP = ("up", "down")
LAYER, ALIGNMENT, KIND, FAN_IN = "layer", "alignment", "kind", "fan_in"
AT_PAPER = "alignment_at_paper"
# "Similar values across three model sizes" (Section 4.1); how similar is ours: half of what the
# paper tells apart, peaks of 0.7 to 0.8 from those above 0.9.
SIMILAR = 0.05
HALF = {"color": "black", "ls": ":", "lw": 0.9}
NONE = ("½: no alignment", HALF)
COLUMNS = (CURVE, PARAMETERIZATION, WIDTH, SEED, STEP, LAYER, ALIGNMENT, FAN_IN)


def read(paths: tables.Paths) -> pd.DataFrame:
    """The probes of Figures 1 and 5 to 7 with columns `kind` and the ratio at the paper's width;
    what is not finite is left out."""
    (table,) = tables.read_each(paths, {"probes.csv": COLUMNS})
    table = table.loc[np.isfinite(table[ALIGNMENT]), list(COLUMNS)]
    if table.empty:
        raise TableError(f"{paths[0]}: no finite {ALIGNMENT} in it")
    log_f = (table[ALIGNMENT] - 1) * np.log(table[FAN_IN])
    at_paper = 1 + log_f / np.log(table[FAN_IN] * published.ALIGNMENT_WIDTH / table[WIDTH])
    kinds = table[LAYER].astype(str).str.rpartition(".")[2]
    table = table.assign(**{KIND: kinds, AT_PAPER: at_paper})
    words = (CURVE, PARAMETERIZATION, LAYER, KIND)
    return table.astype(dict.fromkeys(words, "category"))  # fast to compare


def largest(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of the largest width that there is."""
    return rows[rows[WIDTH] == rows[WIDTH].max()]


def peak(rows: pd.DataFrame, value: str = AT_PAPER) -> tuple[Estimate, float]:
    """(mean over seeds of the highest value of any layer and step, its step). Each seed is read at
    the layer and step where the mean of the others is highest: including its own values would bias
    the peak upwards. A single seed is read at its own maximum."""
    layers = rows[LAYER].astype("category").cat.codes
    places, place = np.unique([rows[STEP], layers], axis=1, return_inverse=True)
    seeds, seed = np.unique(rows[SEED], return_inverse=True)
    values = np.full((len(seeds), places.shape[1]), math.nan)
    values[seed, place] = rows[value]
    total, count = np.nansum(values, axis=0), (~np.isnan(values)).sum(axis=0)
    with np.errstate(invalid="ignore"):  # a single seed has no others: 0 / 0
        others = (total - values) / (count - 1)
    heights = {
        name: own[np.nanargmax(own if np.isnan(other).all() else other)]
        for name, own, other in zip(seeds, values, others, strict=True)
    }
    return mean(heights), float(places[0, np.argmax(total / count)])


def peaks(rows: pd.DataFrame) -> Estimate:
    """The peak at the largest width, with those at all widths."""
    by_width = {int(width): peak(own)[0] for width, own in rows.groupby(WIDTH)}
    return replace(by_width[max(by_width)], by_size=by_width) if by_width else UNKNOWN


def findings(table: pd.DataFrame) -> Report:
    """Start and peaks of readout and MLP layers at the largest width; peaks against width."""
    yield (
        "log alignment ratio, that of the measured factor f at D = "
        f"{published.ALIGNMENT_WIDTH} but for [as measured]; ± is one standard error over seeds"
    )
    yield HEADER
    for curve in naming.present(FIGURES, table[CURVE]):
        for rule, label in naming.present(style.LABELS, table[PARAMETERIZATION]).items():
            name, line = f"{curve}, {label}: ", (curve, rule)
            rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
            rows = rows[rows[KIND].isin(list(KINDS))]
            layers = dict(iter(rows.groupby(KIND)))
            peak_of = {kind: peaks(layers[kind]) for kind in KINDS if kind in layers}
            if peak_of:
                yield _start(largest(rows), name)
            if "readout" in peak_of:
                what, ends = f"{name}peak of the readout", published.READOUT_PEAK.get(rule)
                yield _peak(layers["readout"], peak_of["readout"], line, ends, what)
            if peak_of.keys() & MLP:
                what, own = f"{name}highest peak of MLP layers", rows[rows[KIND].isin(MLP)]
                below = (-math.inf, published.MLP_PEAK) if rule in published.READOUT_PEAK else None
                yield _peak(own, peaks(own), line, below, what)
            if "readout" in peak_of:
                claimed = curve in FIGURES and rule in published.READOUT_PEAK
                yield from _change(peak_of["readout"].by_size, claimed, name)
                if curve != "sgd":
                    yield _highest(peak_of, name)


def _start(rows: pd.DataFrame, name: str) -> Finding:
    """The mean over layers of the first values, as measured."""
    first = rows[rows[STEP] == rows[STEP].min()]
    layers = first.groupby(LAYER)[ALIGNMENT].mean()
    start = replace(average(list(layers)), groups=len(layers))
    measured = (
        f"{layers.mean():.3f} ({layers.min():.3f} to {layers.max():.3f}) at step "
        f"{first[STEP].iloc[0]:.0f}, D = {rows[WIDTH].iloc[0]:.0f}"
    )
    there = published.ALIGNMENT_START
    words = f"{there}", f"off by {layers.mean() - there:+.3f}"
    return Finding(name + "first value, all layers", measured, *words, start)


def _peak(rows: pd.DataFrame, highest: Estimate, line: tuple, ends, name: str) -> Finding:
    """The highest peak of some layers beside the paper's range, or its words on SGD."""
    (curve, rule), (measured, step) = line, peak(largest(rows), ALIGNMENT)
    text = f"{highest.text(sign='')} [{measured.value:.3f} at D = {rows[WIDTH].max():.0f}, step "
    text += f"{step:.0f}]"
    if curve not in ("adam", "adafactor") or ends is None:
        words = published.SGD_ALIGNMENT.get(rule, "") if curve == "sgd" else ""
        return Finding(name, text, words, "no number to compare", highest)
    low, high = ends
    there = f"<= {high}" if low < 0 else f"> {low}" if high == 1 else f"{low} to {high}"
    return Finding(name, text, there, _inside(highest, low, high), highest)


def _inside(number: Estimate, low: float, high: float) -> str:
    """Whether a number lies in a range, by its interval; one seed, which has none, does not say."""
    if math.isnan(number.error):
        return number.undecided
    if min(abs(number.value - low), abs(number.value - high)) <= number.reach * number.error:
        return "within noise"
    inside = number.value > low if high == 1 else low <= number.value <= high
    return "agrees" if inside else f"disagrees: {'below' if number.value <= low else 'above'}"


def _change(by_width: Mapping[float, Estimate], claimed: bool, name: str) -> list[Finding]:
    """The readout's peak at the largest width minus that at the smallest."""
    if len(by_width) < 2:
        return []
    small, large = min(by_width), max(by_width)
    gap = by_width[large] - by_width[small]
    name = f"{name}readout's peak from D = {small} to {large}"
    verdict = gap.undecided or _inside(gap, -SIMILAR, SIMILAR)
    claim = (f"{-SIMILAR} to {SIMILAR}", verdict) if claimed else ("no claim", "")
    return [Finding(name, gap.text(), *claim, gap)]


def _highest(peak_of: Mapping[str, Estimate], name: str) -> Finding:
    """The readout's peak minus the highest of the other kinds of layers."""
    rest = dict(peak_of)
    top = rest.pop("readout")
    name += "readout's peak minus the highest of other layers"
    if not rest:
        return Finding(name, "not measured", "above 0")
    gaps = {}
    for width in top.by_size:
        others = [one.by_size[width] for one in rest.values() if width in one.by_size]
        if others:
            gaps[width] = top.by_size[width] - max(others, key=lambda one: one.value)
    gap = replace(gaps[max(gaps)], by_size=gaps)
    highest = max(rest, key=lambda kind: rest[kind].value)
    return gap.judged(name, "gains", "above 0", text=f"{gap.text()}, next {KINDS[highest]}")


def draw(table: pd.DataFrame) -> style.Drawn:
    """Figure 1, of Adam, then a figure per optimiser."""
    curves = naming.present(FIGURES, table[CURVE])
    if "adam" in curves:
        yield "figure_1_alignment", _figure_1(table[table[CURVE] == "adam"])
    for curve in curves:
        name = FIGURES.get(curve, f"alignment_{curve}")
        yield name, _of_optimizer(table[table[CURVE] == curve], curve)


def _of_optimizer(table: pd.DataFrame, curve: str):
    """A row per kind of layer, a column per parameterisation, a line per width."""
    from matplotlib.ticker import MultipleLocator

    kinds = naming.present(KINDS, table[KIND])
    rules = naming.present(style.LABELS, table[PARAMETERIZATION])
    title = f"{style.OPTIMIZERS.get(curve, curve)}: log alignment ratio"
    shape = len(kinds), len(rules)
    figure, axes = style.subplots(title, *shape, (2.4, 1.35), sharex=True, sharey=True)
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    for axis in axes.flat:
        axis.autoscale(False)  # each band would ask for the limits of all panels again
    traces = _traces(table)
    for row, (kind, label) in zip(axes, kinds.items(), strict=True):
        for axis, rule in zip(row, rules, strict=True):
            of = traces.get((rule, kind), {})
            _draw_traces(axis, [(trace, colors[width]) for width, trace in of.items()])
        row[0].set_ylabel(label, fontsize=8)
    for axis in axes.flat:
        axis.autoscale()
        axis.yaxis.set_major_locator(MultipleLocator(0.2))
    style.label_grid(axes, rules.values(), "step")
    entries = [(f"D = {width}", {"color": color}) for width, color in colors.items()]
    style.legend(figure, [*entries, NONE])
    return figure


def _figure_1(table: pd.DataFrame):
    """Readout and MLP layers under Adam at the largest width."""
    rules = naming.present(style.LABELS, table[PARAMETERIZATION])
    title = f"Adam, D = {table[WIDTH].max():.0f}: log alignment ratio"
    figure, axes = style.subplots(title, 1, len(rules), (2.5, 2.3), sharex=True, sharey=True)
    colors = dict(zip(("readout", *MLP), style.PALETTE, strict=False))
    traces = _traces(table)
    for axis, rule in zip(axes[0], rules, strict=True):
        lines = [(traces[rule, k], color) for k, color in colors.items() if (rule, k) in traces]
        _draw_traces(axis, [(of[max(of)], color) for of, color in lines])
    style.label_grid(axes, rules.values(), "step", ["log alignment ratio"])
    entries = [(KINDS[kind], {"color": color}) for kind, color in colors.items()]
    style.legend(figure, [*entries, NONE])
    return figure


def _traces(table: pd.DataFrame) -> dict[tuple[str, str], dict[int, pd.DataFrame]]:
    """(parameterisation, kind) -> width -> by step the mean and the range over blocks."""
    line = [PARAMETERIZATION, KIND, WIDTH]
    layers = table.groupby([*line, STEP, LAYER])[ALIGNMENT].mean()
    steps = layers.groupby(level=[*line, STEP]).agg(["mean", "min", "max"])
    traces: dict[tuple[str, str], dict[int, pd.DataFrame]] = {}
    for (rule, kind, width), trace in steps.groupby(level=line):
        traces.setdefault((rule, kind), {})[int(width)] = trace.droplevel(line)
    return traces


def _draw_traces(axis, lines: Sequence[tuple[pd.DataFrame, object]]) -> None:
    """Lines of `_traces` and their ranges."""
    axis.axhline(published.ALIGNMENT_START, **HALF)
    for line, color in lines:
        axis.plot(line.index, line["mean"], lw=1.2, color=color)
        axis.fill_between(line.index, line["min"], line["max"], color=color, alpha=0.2, lw=0)
    if not lines:
        style.empty(axis, "not measured")
