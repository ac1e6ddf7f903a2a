"""Adam's epsilon: heat maps of the loss, and three mitigations (Everett et al., Figures 4 and 8).

    python -m plots everett/epsilon [figure_4_epsilon.csv] [figure_8_mitigations.csv]

Figure 4: (a, b) loss above the best epsilon of the same width, for a constant and a per-layer
epsilon; (c, d) mitigations against size, from the table of Figure 8, which also draws Figure 8, a
panel per parameterisation. Where the table of Figure 8 has a curve `enlarged`, epsilon is larger
than the usual 1e-9: it stands in for the widths at which gradients sink to the usual one, and the
figures say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.everett.published import EPSILON_GAIN
from plots.findings import HEADER, Finding, Printed, claimed_equal, claimed_gain, number
from plots.rates import (
    RateSweep,
    curve_sweeps,
    draw_best,
    edge_lines,
    gain,
    gain_text,
    lost_lines,
    noise_lines,
)
from plots.tables import CURVE, EPS, PARAMETERIZATION, WIDTH, TableError

TABLES = ("everett/figure_4_epsilon", "everett/figure_8_mitigations")
SCALINGS = {"constant": "(a) constant ε", "per_layer": "(b) per-layer ε"}
BASELINES = ("enlarged", "default")
MITIGATIONS = {"small": "small ε", "per_layer": "per-layer ε", "atan2": "Adam-atan2"}
# The curve names that only one of the two tables has.
HEAT_ONLY, MITIGATION_ONLY = {"constant"}, {"small", "atan2", *BASELINES}
CURVE_COLORS = {"enlarged": 3, "default": 7, "small": 0, "per_layer": 2, "atan2": 4}
CURVE_MARKERS = {"enlarged": "X", "default": "D", "small": "o", "per_layer": "s", "atan2": "^"}
EQUIVALENT = (("standard", "ntk"), ("mup", "mean_field"))
# Heat maps saturate here, so that one diverging corner does not wash out the rest.
MOST = 0.5
COLUMNS = (*tables.RESULTS, PARAMETERIZATION, WIDTH)
Lines = dict[tuple[str, str], dict[int, RateSweep]]
Data = tuple[pd.DataFrame | None, pd.DataFrame | None]  # heat maps, mitigations


def read(paths: Sequence[Path]) -> Data:
    """(heat maps, mitigations), told apart by their curves; None for one that is not given."""
    heat = mitigations = None
    for path in paths:
        curves = set(tables.read(path, [CURVE])[CURVE])
        if curves & HEAT_ONLY and heat is None:
            heat = _read(path, (*COLUMNS, EPS), SCALINGS)
        elif curves & MITIGATION_ONLY and mitigations is None:
            columns = (*COLUMNS, tables.RATE, tables.PARAMETERS)
            mitigations = _read(path, columns, (*BASELINES, *MITIGATIONS))
        else:
            raise TableError(f"{path}: expected one table of Figure 4 and one of Figure 8, got "
                             f"the curves {', '.join(sorted(map(str, curves)))}")
    if mitigations is not None and (mitigations[CURVE] == "enlarged").any():
        _enlarged(mitigations, paths)
    return heat, mitigations


def _read(path: Path, columns: Sequence[str], curves: Sequence[str]) -> pd.DataFrame:
    table = tables.only(tables.read(path, columns), path, CURVE, curves)
    return tables.only(table, path, PARAMETERIZATION, style.LABELS)


def _enlarged(table: pd.DataFrame, paths: Sequence[Path]) -> float:
    """The enlarged epsilon of a table; TableError when it is not one number."""
    rows = table[table[CURVE] == "enlarged"]
    values = set(rows[EPS].dropna()) if EPS in rows else set()
    if len(values) != 1:
        raise TableError(f"{paths[-1]}: curve 'enlarged' needs one value in column {EPS}")
    return float(values.pop())


def heat_map(table: pd.DataFrame, curve: str, rule: str) -> pd.DataFrame:
    """Width by epsilon: mean loss above the lowest of the width, of the best rate if several were
    swept; infinite where every rate diverged."""
    rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
    found = {}
    for (width, eps), cell in rows.groupby([WIDTH, EPS]):
        column = tables.RATE if tables.RATE in cell and cell[tables.RATE].notna().all() else EPS
        losses = tables.mean_losses(cell, column)
        found.setdefault(int(width), {})[eps] = min(losses.values(), default=math.nan)
    grid = pd.DataFrame(found).T.sort_index().sort_index(axis=1)
    lowest = grid.replace(math.inf, math.nan).min(axis=1)
    return grid.sub(lowest, axis=0)


def heat_findings(table: pd.DataFrame) -> list[Finding]:
    """The best epsilon at the largest width and what the ends of the range cost."""
    result = []
    for curve in SCALINGS:
        for rule, label in style.LABELS.items():
            grid = heat_map(table, curve, rule)
            name = f"{curve.replace('_', '-')} ε, {label}: best, cost of the ends"
            if grid.empty or grid.iloc[-1].isna().all():
                result.append(Finding(name, "not measured"))
                continue
            row = grid.iloc[-1].dropna()
            ends = f"{row.index[0]:g}: {row.iloc[0]:+.3f}, {row.index[-1]:g}: {row.iloc[-1]:+.3f}"
            bests = {width: _best(line) for width, line in grid.iterrows()}
            moved = ", ".join(f"{eps} at {width}" for width, eps in bests.items())
            measured = f"{ends} at D = {grid.index[-1]}"
            result.append(Finding(name, measured, "both ends cost", f"best: {moved}"))
    return result


def _best(line: pd.Series) -> str:
    return "none" if line.isna().all() else f"{line.idxmin():g}"


def lines(table: pd.DataFrame) -> Lines:
    """(curve, parameterisation) -> sweeps by width, of what has a finished run."""
    curves = (*BASELINES, *MITIGATIONS)
    return {
        (curve, rule): sweeps
        for rule in style.LABELS
        for curve, sweeps in curve_sweeps(table[table[PARAMETERIZATION] == rule], curves).items()
    }


def baseline(table: pd.DataFrame) -> str:
    """The curve that mitigations are compared with: the enlarged epsilon where there is one."""
    return next((curve for curve in BASELINES if (table[CURVE] == curve).any()), BASELINES[-1])


def mitigation_findings(table: pd.DataFrame) -> list[Finding]:
    """What each mitigation gains at the largest width, and whether equivalent pairs agree then."""
    found, start = lines(table), baseline(table)
    result = [
        _gain(found, start, curve, rule) for rule in style.LABELS for curve in MITIGATIONS
    ]
    for first, second in EQUIVALENT:
        for curve in (start, *MITIGATIONS):
            sweeps = [found.get((curve, rule), {}) for rule in (first, second)]
            width, change, error = gain(*sweeps)
            name = f"{style.LABELS[first]} - {style.LABELS[second]}: {curve}"
            at = "" if width is None else f" at D = {width}"
            claim = claimed_equal(change, error) if curve in MITIGATIONS else ""
            published = "equal" if curve in MITIGATIONS else "apart"
            result.append(Finding(name, number(change, error) + at, published, claim))
    return result


def _gain(found: Lines, start: str, curve: str, rule: str) -> Finding:
    pair = found.get((start, rule), {}), found.get((curve, rule), {})
    width, change, error = gain(*pair)
    name = f"{style.LABELS[rule]}: gain of {curve} over {start}"
    claim = EPSILON_GAIN[rule]
    published = "gains" if claim else "no gain"
    if width is None:
        return Finding(name, "not measured", published, "not measured")
    word = claimed_gain(change, error) if claim else claimed_equal(change, error)
    return Finding(name, gain_text(*pair), published, word)


def caption(table: pd.DataFrame) -> str:
    """What the baseline is, for titles."""
    rows = table[table[CURVE] == "enlarged"]
    if rows.empty:
        return "baseline: the default ε"
    return f"baseline: ε enlarged to {rows[EPS].iloc[0]:g}, in place of widths out of reach"


def findings(data: Data) -> list[Printed]:
    """Both kinds, as far as their tables are there."""
    heat, mitigations = data
    text = []
    if heat is not None:
        text += ["loss above the best ε of the same width, in nats", HEADER, *heat_findings(heat)]
    if mitigations is not None:
        text += [
            f"loss before minus after in nats ± its error from seeds; {caption(mitigations)}",
            HEADER,
            *mitigation_findings(mitigations),
            *edge_lines(lines(mitigations)),
            *lost_lines(mitigations, [CURVE, PARAMETERIZATION]),
            *noise_lines(mitigations),
        ]
    return text


def draw(data: Data) -> Iterator[tuple[str, object]]:
    """Figure 4 from what is there, and Figure 8 from the table of mitigations."""
    yield "figure_4_epsilon", _figure_4(*data)
    if data[1] is not None:
        yield "figure_8_mitigations", _figure_8(data[1])


def _figure_4(heat: pd.DataFrame | None, mitigations: pd.DataFrame | None):
    """Heat maps, and mitigations of mean-field and of all."""
    down = 2 * (heat is not None) + (mitigations is not None)
    figure, axes = style.subplots(down, len(style.LABELS), (2.5, 2.2))
    if heat is not None:
        _draw_heat(figure, axes[:2], heat)
    if mitigations is not None:
        _draw_mitigations(figure, axes[-1], mitigations)
    return figure


def _draw_heat(figure, axes, table: pd.DataFrame) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    for row, (curve, title) in zip(axes, SCALINGS.items()):
        for axis, (rule, label) in zip(row, style.LABELS.items()):
            _draw_grid(axis, heat_map(table, curve, rule))
            axis.set_title(f"{title}, {label}" if axis is row[0] else label, fontsize=9)
        row[0].set_ylabel("width D")
    scale = ScalarMappable(Normalize(0, MOST), "viridis")
    bar = figure.colorbar(scale, ax=axes, extend="max", shrink=0.8, aspect=30)
    bar.set_label("loss above the row's best (nats)\ngray: diverged, white: not run", fontsize=8)


def _draw_grid(axis, grid: pd.DataFrame) -> None:
    import matplotlib
    import numpy as np

    axis.grid(False)
    if grid.empty:
        axis.set_visible(False)
        return
    values = grid.to_numpy(float)
    colors = matplotlib.colormaps["viridis"](np.clip(np.nan_to_num(values), 0, MOST) / MOST)
    colors[np.isinf(values)] = (0.6, 0.6, 0.6, 1)
    colors[np.isnan(values)] = (1, 1, 1, 1)
    axis.imshow(colors, aspect="auto", origin="lower", interpolation="nearest")
    axis.set_yticks(range(len(grid)), labels=list(map(str, grid.index)))
    step = math.ceil(len(grid.columns) / 4)
    ticks = range(0, len(grid.columns), step)
    axis.set_xticks(ticks, labels=[_power(grid.columns[tick]) for tick in ticks])
    axis.set_xlabel("ε")


def _power(eps: float) -> str:
    """1e-9 as a power of ten, anything else as it is."""
    power = math.log10(eps) if eps > 0 else math.nan
    return f"$10^{{{power:.0f}}}$" if abs(power - round(power)) < 1e-6 else f"{eps:g}"


def _draw_mitigations(figure, axes, table: pd.DataFrame) -> None:
    """(c) all mitigations of mean-field, (d) baseline and per-layer epsilon of all."""
    found, start = lines(table), baseline(table)
    grid = axes[0].get_gridspec()
    line = axes[0].get_subplotspec().rowspan.start
    for axis in axes:
        axis.remove()
    left, right = figure.add_subplot(grid[line, :2]), figure.add_subplot(grid[line, 2:])
    _draw_curves(left, found, "mean_field")
    left.set_title("(c) mean-field", fontsize=9)
    for rule in style.LABELS:
        for curve, light in ((start, {}), ("per_layer", {"ls": "--", "alpha": 0.5})):
            if (curve, rule) in found:
                look = {"color": style.color(rule), "marker": style.MARKERS[rule], **light}
                draw_best(right, found[curve, rule], **look)
    right.set_title("(d) all: solid baseline, dashed per-layer ε", fontsize=9)
    for axis in (left, right):
        axis.set_xlabel(f"parameters\n{caption(table)}", fontsize=8)
        axis.set_ylabel(style.LOSS_LABEL, fontsize=8)
    _small_legend(left, _entries(table))
    _small_legend(right, style.parameterization_entries())


def _small_legend(axis, entries: Sequence[tuple[str, dict]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look) for _, look in entries]
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    labels = [label for label, _ in entries]
    axis.legend(handles, labels, fontsize=7, ncols=2, loc="upper right")


def _entries(table: pd.DataFrame) -> list[tuple[str, dict]]:
    present = [curve for curve in (*BASELINES, *MITIGATIONS) if (table[CURVE] == curve).any()]
    return [(_label(table, curve), {**_look(curve), "ms": 4, "lw": 1.2}) for curve in present]


def _label(table: pd.DataFrame, curve: str) -> str:
    if curve not in BASELINES:
        return MITIGATIONS[curve]
    if curve == "default":
        return "default ε"
    return f"enlarged ε = {table[table[CURVE] == curve][EPS].iloc[0]:g}"


def _look(curve: str) -> Mapping[str, object]:
    import seaborn as sns

    color = sns.color_palette("colorblind")[CURVE_COLORS[curve]]
    return {"color": color, "marker": CURVE_MARKERS[curve]}


def _draw_curves(axis, found: Lines, rule: str) -> None:
    for curve in (*BASELINES, *MITIGATIONS):
        if (curve, rule) in found:
            draw_best(axis, found[curve, rule], **_look(curve))


def _figure_8(table: pd.DataFrame):
    """Every mitigation, a panel per parameterisation."""
    figure, axes = style.subplots(1, len(style.LABELS), (2.5, 2.6), sharey=True)
    found = lines(table)
    for axis, (rule, label) in zip(axes[0], style.LABELS.items()):
        _draw_curves(axis, found, rule)
        axis.set_title(label)
        axis.set_xlabel("parameters")
    axes[0, 0].set_ylabel(style.LOSS_LABEL)
    figure.suptitle(caption(table), fontsize=10)
    style.legend(figure, _entries(table))
    return figure
