"""Adam's epsilon: heat maps of the loss, and three mitigations (Everett et al., Figures 4 and 8).

    python -m plots everett/epsilon [figure_4_epsilon.csv] [figure_8_mitigations.csv]

Figure 4: (a, b) loss above the best epsilon of the same width, for a constant and a per-layer
epsilon, colours by its root; (c, d) are panels of Figure 8: mitigations against size, a panel per
parameterisation. Where the table of Figure 8 has a curve
`enlarged`, epsilon is larger than the usual 1e-9: it stands in for the widths at which gradients
sink to the usual one, and the figures say so.
"""

import itertools
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.everett.published import EPSILON_GAIN
from plots.findings import HEADER, Finding, Report
from plots.naming import AnyOf, told_apart
from plots.statistics import slope
from plots.tables import CURVE, EPS, PARAMETERIZATION, WIDTH

TABLES = AnyOf(("everett/figure_4_epsilon", "everett/figure_8_mitigations"))
SCALINGS = {"constant": "(a) constant ε", "per_layer": "(b) per-layer ε"}
BASELINES = ("enlarged", "default")
MITIGATIONS = {"small": "small ε", "per_layer": "per-layer ε", "atan2": "Adam-atan2"}
NAMES = {"enlarged": "enlarged ε", "default": "default ε", **MITIGATIONS}
# Curves that coincide are told apart by marks that grow smaller, drawn one on another.
CURVE_LOOKS = {
    "enlarged": {"color": style.VERMILION, "marker": "X", "ms": 6},
    "default": {"color": style.BLACK, "marker": "D", "ms": 8.5, "mfc": "none", "lw": 3.2},
    "small": {"color": style.SKY, "marker": "o", "ms": 8, "lw": 3.5},
    "per_layer": {"color": style.WINE, "marker": "s", "ms": 3.4, "ls": "--"},
    "atan2": {"color": style.ORANGE, "marker": "^", "ms": 4.5},
}
EQUIVALENT = (("standard", "ntk"), ("mup", "mean_field"))
# Heat maps saturate here, so that one diverging corner does not wash out the rest.
MOST = 0.5
COLUMNS = (*tables.RESULTS, PARAMETERIZATION, WIDTH)
Data = tuple[pd.DataFrame | None, pd.DataFrame | None]  # heat maps, mitigations


def read(paths: tables.Paths) -> Data:
    """(heat maps, mitigations), told apart by the curve `constant`; None for a missing one."""

    def figure(path: Path) -> str:
        constant = (tables.read(path, [CURVE])[CURVE] == "constant").any()
        return "Figure 4" if constant else "Figure 8"

    places = told_apart(paths, figure)
    needed = {"Figure 4": (EPS,), "Figure 8": (tables.RATE, tables.PARAMETERS)}
    data: list[pd.DataFrame | None] = [None, None]
    for place, (kind, columns) in enumerate(needed.items()):
        if kind in places:
            table = tables.read(places[kind][1], (*COLUMNS, *columns))
            data[place] = table.dropna(subset=[CURVE, PARAMETERIZATION])
    return data[0], data[1]


def heat_map(table: pd.DataFrame, curve: str, rule: str) -> pd.DataFrame:
    """Width by epsilon: mean loss above the lowest of the width, of the best rate if several were
    swept; infinite where every rate diverged."""
    rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
    losses_of: dict[int, dict[float, float]] = {}
    for (width, eps), cell in rows.groupby([WIDTH, EPS]):
        column = tables.RATE if tables.RATE in cell and cell[tables.RATE].notna().all() else EPS
        losses: dict[float, list[float]] = {}
        for value, _, loss in tables.runs(cell, column):
            losses.setdefault(value, []).append(loss)
        of_width = losses_of.setdefault(int(width), {})
        of_width[eps] = min(map(fmean, losses.values()), default=math.nan)
    grid = pd.DataFrame(losses_of).T.sort_index().sort_index(axis=1)
    lowest = grid.replace(math.inf, math.nan).min(axis=1)
    return grid.sub(lowest, axis=0)


def lines(table: pd.DataFrame) -> rates.Lines:
    """(parameterisation, curve) -> sweeps by width, of what has a finished run."""
    return rates.lines_of(table, {PARAMETERIZATION: style.LABELS}, NAMES)


def baseline(table: pd.DataFrame) -> str:
    """The curve that mitigations are compared with: the enlarged epsilon where there is one."""
    return next((curve for curve in BASELINES if (table[CURVE] == curve).any()), BASELINES[-1])


def baseline_text(table: pd.DataFrame) -> str:
    """What it is; the paper's solid lines have its usual epsilon."""
    rows = table[table[CURVE] == "enlarged"]
    return "default ε" if rows.empty else f"ε = {rows[EPS].iloc[0]:g} (paper: 1e-9)"


def findings(data: Data) -> Report:
    """Both kinds, as far as their tables are there."""
    heat, mitigations = data
    if heat is not None:
        yield "loss above the best ε of the same width, in nats"
        yield HEADER
        yield from _of_heat(heat)
    if mitigations is not None:
        before = baseline_text(mitigations)
        yield f"loss before minus after in nats ± its error from seeds; before: {before}"
        yield HEADER
        yield from _of_mitigations(mitigations)
        yield from rates.basis(mitigations, lines(mitigations), [CURVE, PARAMETERIZATION])


def _of_heat(table: pd.DataFrame) -> Report:
    """The best epsilon at the largest width and what the ends of the range cost."""
    for curve in naming.present(SCALINGS, table[CURVE]):
        for rule, label in naming.present(style.LABELS, table[PARAMETERIZATION]).items():
            grid = heat_map(table, curve, rule)
            if grid.empty or grid.iloc[-1].isna().all():
                continue
            name = f"{curve.replace('_', '-')} ε, {label}: best, cost of the ends"
            row = grid.iloc[-1].dropna()
            ends = f"{row.index[0]:g}: {row.iloc[0]:+.3f}, {row.index[-1]:g}: {row.iloc[-1]:+.3f}"
            known = grid.dropna(how="all")
            moved = ", ".join(f"{line.idxmin():g} at {width}" for width, line in known.iterrows())
            measured = f"{ends} at D = {grid.index[-1]}"
            yield Finding(name, measured, "both ends cost", f"best: {moved}")


def _of_mitigations(table: pd.DataFrame) -> Report:
    """What each mitigation gains, how they differ, and whether equivalent pairs agree."""
    sweeps_of, start = lines(table), baseline(table)
    own = dict.fromkeys([*MITIGATIONS, *naming.present(NAMES, table[CURVE])])
    for rule, label in naming.present(style.LABELS, table[PARAMETERIZATION]).items():
        for curve in (curve for curve in own if curve not in BASELINES):
            gains = EPSILON_GAIN.get(rule) if curve in MITIGATIONS else None
            claim = None if gains is None else "gains" if gains else "equal"
            pair = sweeps_of.get((rule, start), {}), sweeps_of.get((rule, curve), {})
            if not all(pair):
                continue
            published = "no gain" if claim == "equal" else None
            name = f"{label}: gain of {curve} over {start}"
            yield rates.compared(name, *pair, claim, published)
            both = pair[0].keys() & pair[1].keys()
            growth = slope({w: rates.difference(*(one[w] for one in pair)) for w in sorted(both)})
            words = {"gains": "grows", "equal": "no gain"}.get(claim or "", "no claim")
            name = f"{label}: {curve} over {start}, per doubling of D"
            yield growth.judged(name, claim, words)
        cures = [curve for curve in MITIGATIONS if (rule, curve) in sweeps_of]
        for one, other in itertools.combinations(cures, 2):
            pair = sweeps_of[rule, one], sweeps_of[rule, other]
            published = "equal" if rule == "mean_field" else None  # Figure 4c
            yield rates.compared(f"{label}: {one} - {other}", *pair, None, published)
    for first, second in EQUIVALENT:
        for curve in (start, *MITIGATIONS):
            pair = sweeps_of.get((first, curve), {}), sweeps_of.get((second, curve), {})
            if all(pair):
                name = f"{style.LABELS[first]} - {style.LABELS[second]}: {curve}"
                claimed = ("equal",) if curve in MITIGATIONS else (None, "apart")
                yield rates.compared(name, *pair, *claimed)


def draw(data: Data) -> style.Drawn:
    """Figure 4 where there is its table, and Figure 8 from the table of mitigations."""
    heat, mitigations = data
    if heat is not None:
        yield "figure_4_epsilon", _figure_4(heat), [0]
    if mitigations is not None:
        yield "figure_8_mitigations", _figure_8(mitigations), [-1]


def _figure_4(table: pd.DataFrame):
    """Heat maps; half of the colours are the lowest quarter of losses, where most cells are."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    rules = naming.present(style.LABELS, table[PARAMETERIZATION])
    scalings = naming.present(SCALINGS, table[CURVE])
    figure, axes = style.subplots("Adam, loss over ε", len(scalings), len(rules), (2.5, 2.2))
    scale = PowerNorm(0.5, 0, MOST, clip=True)
    for row, (curve, title) in zip(axes, scalings.items(), strict=True):
        for axis, (rule, label) in zip(row, rules.items(), strict=True):
            _draw_grid(axis, heat_map(table, curve, rule), scale)
            axis.set_title(f"{title}, {label}", fontsize=9)
        row[0].set_ylabel("width D")
    shape = {"extend": "max", "shrink": 0.8, "aspect": 30}
    bar = figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, **shape)
    bar.set_label("loss above the row's best (nats)\ngray: diverged, white: not run", fontsize=8)
    return figure


def _draw_grid(axis, grid: pd.DataFrame, scale) -> None:
    """Cells on a logarithmic axis of ε, each from half way to its neighbours."""
    import matplotlib

    axis.grid(False)
    grid = grid[[eps for eps in grid.columns if eps > 0]]
    if grid.empty:
        style.empty(axis, "not run")
        return
    powers, values = np.log10(list(grid.columns)), grid.to_numpy(float)
    colors = matplotlib.colormaps["viridis"](scale(np.nan_to_num(values)).filled())
    colors[np.isinf(values)] = (0.6, 0.6, 0.6, 1)
    colors[np.isnan(values)] = (1, 1, 1, 1)
    half = np.diff(powers) / 2 if len(powers) > 1 else np.array([0.5])
    middles = (powers[:-1] + half)[: len(powers) - 1]
    edges = np.array([powers[0] - half[0], *middles, powers[-1] + half[-1]])
    axis.pcolormesh(10**edges, np.arange(len(grid) + 1) - 0.5, colors, edgecolors="white", lw=0.3)
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.set_yticks(range(len(grid)), labels=list(map(str, grid.index)))
    axis.set_xlabel("ε")


def _named(table: pd.DataFrame) -> dict[str, tuple[str, dict]]:
    """Curve -> label, colour and mark."""
    labels = naming.present(NAMES, table[CURVE])
    looks = naming.looks(list(labels), CURVE_LOOKS)
    if "enlarged" in labels:
        labels["enlarged"] = baseline_text(table)
    return {name: (label, looks[name]) for name, label in labels.items()}


def _figure_8(table: pd.DataFrame):
    """Every mitigation, a panel per parameterisation."""
    rules, sweeps_of = naming.present(style.LABELS, table[PARAMETERIZATION]), lines(table)
    named = _named(table)
    title = "Adam, loss against size with cures of a too large ε"
    figure, axes = style.subplots(title, 1, len(rules), (2.5, 2.6), sharey=True)
    drawn = (
        [(sweeps_of.get((rule, curve)), look) for curve, (_, look) in named.items()]
        for rule in rules
    )
    panels.size_panels(axes[0], drawn)
    style.label_grid(axes, rules.values())
    entries = [(label, {"lw": 1.2, **look}) for label, look in named.values()]
    style.legend(figure, [*entries, *panels.lost_entries(sweeps_of)])
    return figure
