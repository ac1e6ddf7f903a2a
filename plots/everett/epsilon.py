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
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import panels, rates, style, tables
from plots.everett.published import EPSILON_GAIN
from plots.findings import HEADER, Finding, Printed
from plots.tables import CURVE, EPS, PARAMETERIZATION, WIDTH, TableError

TABLES = ("everett/figure_4_epsilon", "everett/figure_8_mitigations")
SCALINGS = {"constant": "(a) constant ε", "per_layer": "(b) per-layer ε"}
BASELINES = ("enlarged", "default")
MITIGATIONS = {"small": "small ε", "per_layer": "per-layer ε", "atan2": "Adam-atan2"}
# The curve names that only one of the two tables has.
HEAT_ONLY, MITIGATION_ONLY = {"constant"}, {"small", "atan2", *BASELINES}
NAMES = {"enlarged": "enlarged ε", "default": "default ε", **MITIGATIONS}
CURES = "loss against size with cures of a too large ε"
# Curves that coincide are told apart by marks that grow smaller, drawn one on another.
CURVE_LOOKS = {
    "enlarged": {"color": style.VERMILION, "marker": "X", "ms": 6},
    "default": {"color": style.BLACK, "marker": "D", "ms": 8.5, "mfc": "none", "lw": 3.2},
    "small": {"color": style.SKY, "marker": "o", "ms": 6, "lw": 2.2},
    "per_layer": {"color": style.WINE, "marker": "s", "ms": 3.4, "ls": "--"},
    "atan2": {"color": style.ORANGE, "marker": "^", "ms": 4.5},
}
EQUIVALENT = (("standard", "ntk"), ("mup", "mean_field"))
# Heat maps saturate here, so that one diverging corner does not wash out the rest.
MOST = 0.5
COLUMNS = (*tables.RESULTS, PARAMETERIZATION, WIDTH)
Data = tuple[pd.DataFrame | None, pd.DataFrame | None]  # heat maps, mitigations


def read(paths: Sequence[Path]) -> Data:
    """(heat maps, mitigations), told apart by their curves; None for one that is not given."""
    heat = mitigations = None
    for path in paths:
        curves = set(tables.read(path, [CURVE])[CURVE])
        if curves & HEAT_ONLY and heat is None:
            heat = tables.read(path, (*COLUMNS, EPS)).dropna(subset=[CURVE, PARAMETERIZATION])
        elif curves & MITIGATION_ONLY and mitigations is None:
            mitigations = tables.read(path, (*COLUMNS, tables.RATE, tables.PARAMETERS))
            mitigations = mitigations.dropna(subset=[CURVE, PARAMETERIZATION])
        else:
            raise TableError(
                f"{path}: expected one table of Figure 4 and one of Figure 8, got "
                f"the curves {', '.join(sorted(map(str, curves)))}"
            )
    if mitigations is not None and (mitigations[CURVE] == "enlarged").any():
        rows = mitigations[mitigations[CURVE] == "enlarged"]
        if EPS not in rows or rows[EPS].nunique() != 1:
            raise TableError(f"{paths[-1]}: curve 'enlarged' needs one value in column {EPS}")
    return heat, mitigations


def heat_map(table: pd.DataFrame, curve: str, rule: str) -> pd.DataFrame:
    """Width by epsilon: mean loss above the lowest of the width, of the best rate if several were
    swept; infinite where every rate diverged."""
    rows = table[(table[CURVE] == curve) & (table[PARAMETERIZATION] == rule)]
    found = {}
    for (width, eps), cell in rows.groupby([WIDTH, EPS]):
        column = tables.RATE if tables.RATE in cell and cell[tables.RATE].notna().all() else EPS
        losses = tables.mean_losses(tables.losses_by(cell, column))
        found.setdefault(int(width), {})[eps] = min(losses.values(), default=math.nan)
    grid = pd.DataFrame(found).T.sort_index().sort_index(axis=1)
    lowest = grid.replace(math.inf, math.nan).min(axis=1)
    return grid.sub(lowest, axis=0)


def heat_findings(table: pd.DataFrame) -> list[Finding]:
    """The best epsilon at the largest width and what the ends of the range cost."""

    def best(line: pd.Series) -> str:
        return "none" if line.isna().all() else f"{line.idxmin():g}"

    result = []
    for curve in style.present(SCALINGS, table[CURVE]):
        for rule, label in style.present(style.LABELS, table[PARAMETERIZATION]).items():
            grid = heat_map(table, curve, rule)
            name = f"{curve.replace('_', '-')} ε, {label}: best, cost of the ends"
            if grid.empty or grid.iloc[-1].isna().all():
                result.append(Finding(name, "not measured"))
                continue
            row = grid.iloc[-1].dropna()
            ends = f"{row.index[0]:g}: {row.iloc[0]:+.3f}, {row.index[-1]:g}: {row.iloc[-1]:+.3f}"
            moved = ", ".join(f"{best(line)} at {width}" for width, line in grid.iterrows())
            measured = f"{ends} at D = {grid.index[-1]}"
            result.append(Finding(name, measured, "both ends cost", f"best: {moved}"))
    return result


def lines(table: pd.DataFrame) -> rates.Lines:
    """(parameterisation, curve) -> sweeps by width, of what has a finished run."""
    return rates.lines_of(table, {PARAMETERIZATION: style.LABELS}, NAMES)


def baseline(table: pd.DataFrame) -> str:
    """The curve that mitigations are compared with: the enlarged epsilon where there is one."""
    return next((curve for curve in BASELINES if (table[CURVE] == curve).any()), BASELINES[-1])


def mitigation_findings(table: pd.DataFrame) -> list[Finding]:
    """What each mitigation gains at the largest width and with every doubling of the width, and
    whether equivalent pairs agree once it is taken."""
    found, start = lines(table), baseline(table)
    own = dict.fromkeys([*MITIGATIONS, *style.present(NAMES, table[CURVE])])
    result = []
    for rule, label in style.present(style.LABELS, table[PARAMETERIZATION]).items():
        for curve in (curve for curve in own if curve not in BASELINES):
            gains = EPSILON_GAIN.get(rule) if curve in MITIGATIONS else None
            claim = None if gains is None else "gains" if gains else "equal"
            pair = found.get((rule, start), {}), found.get((rule, curve), {})
            published = {"equal": "no gain"}.get(claim or "")
            name = f"{label}: gain of {curve} over {start}"
            result.append(rates.compared(name, *pair, claim, published))
            growth = rates.gain_by_width(*pair)
            verdict = growth.claimed_gain() if claim == "gains" else growth.claimed_equal()
            said = {"gains": "grows", "equal": "no gain"}.get(claim or "", "no claim")
            result.append(
                Finding(
                    f"{label}: {curve} over {start}, per doubling of D",
                    growth.text(),
                    said,
                    verdict if claim else "",
                    growth,
                )
            )
    for first, second in EQUIVALENT:
        run = table[PARAMETERIZATION].isin([first, second]).any()
        for curve in (start, *MITIGATIONS) if run else ():
            pair = found.get((first, curve), {}), found.get((second, curve), {})
            name = f"{style.LABELS[first]} - {style.LABELS[second]}: {curve}"
            said = ("equal",) if curve in MITIGATIONS else (None, "apart")
            result.append(rates.compared(name, *pair, *said))
    return result


def caption(table: pd.DataFrame) -> str:
    """What the baseline is, for titles."""
    rows = table[table[CURVE] == "enlarged"]
    if rows.empty:
        return "baseline: the default ε"
    return (
        f"baseline: ε enlarged to {rows[EPS].iloc[0]:g}, because gradients sink to the usual "
        "1e-9 only at widths that were not run"
    )


def baseline_text(table: pd.DataFrame) -> str:
    """The same in a few words, for a panel: the paper's solid lines have its usual epsilon."""
    rows = table[table[CURVE] == "enlarged"]
    if rows.empty:
        return "default ε"
    return f"ε enlarged to {rows[EPS].iloc[0]:g} (paper: 1e-9)"


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
            *rates.basis(mitigations, lines(mitigations), [CURVE, PARAMETERIZATION]),
        ]
    return text


def draw(data: Data) -> Iterator[tuple[str, object]]:
    """Figure 4 from what is there, and Figure 8 from the table of mitigations."""
    yield "figure_4_epsilon", _figure_4(*data)
    if data[1] is not None:
        yield "figure_8_mitigations", _figure_8(data[1])


def _figure_4(heat: pd.DataFrame | None, mitigations: pd.DataFrame | None):
    """Heat maps, and mitigations of mean-field and of all."""
    both = pd.concat([table for table in (heat, mitigations) if table is not None])
    rules = style.present(style.LABELS, both[PARAMETERIZATION])
    scalings = {} if heat is None else style.present(SCALINGS, heat[CURVE])
    down = len(scalings) + (mitigations is not None)
    figure, axes = style.subplots(down, max(len(rules), 2), (2.5, 2.2))
    notes = []
    if heat is not None:
        _draw_heat(figure, axes[: len(scalings)], heat, scalings, rules)
        notes.append("(a, b) colours by the root of the loss, cells reach half way to the next ε")
    if mitigations is not None:
        _draw_mitigations(figure, axes[-1], mitigations)
        notes += [f"(c, d) {panels.BEST_NOTE}", caption(mitigations)]
    parts = ["loss over ε"] * (heat is not None) + [CURES] * (mitigations is not None)
    figure.suptitle(f"Adam, {', '.join(parts)}\n" + "; ".join(notes))
    return figure


def _draw_heat(figure, axes, table: pd.DataFrame, scalings, rules) -> None:
    """Half of the colours are the lowest quarter of losses, where most cells are."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    scale = PowerNorm(0.5, 0, MOST, clip=True)
    for row, (curve, title) in zip(axes, scalings.items(), strict=True):
        for axis, (rule, label) in zip(row, rules.items(), strict=False):
            _draw_grid(axis, heat_map(table, curve, rule), scale)
            axis.set_title(f"{title}, {label}", fontsize=9)
        for axis in row[len(rules) :]:
            axis.set_visible(False)
        row[0].set_ylabel("width D")
    bar = figure.colorbar(
        ScalarMappable(scale, "viridis"), ax=axes, extend="max", shrink=0.8, aspect=30
    )
    bar.set_label("loss above the row's best (nats)\ngray: diverged, white: not run", fontsize=8)


def _draw_grid(axis, grid: pd.DataFrame, scale) -> None:
    """Cells on a logarithmic axis of ε, each from half way to its neighbours."""
    import matplotlib
    import numpy as np

    axis.grid(False)
    powers = np.log10([eps for eps in grid.columns if eps > 0])
    if not len(powers):
        style.empty(axis, "not run")
        return
    values = grid[[eps for eps in grid.columns if eps > 0]].to_numpy(float)
    colors = matplotlib.colormaps["viridis"](scale(np.nan_to_num(values)).filled())
    colors[np.isinf(values)] = (0.6, 0.6, 0.6, 1)
    colors[np.isnan(values)] = (1, 1, 1, 1)
    half = np.diff(powers) / 2 if len(powers) > 1 else np.array([0.5])
    edges = np.array(
        [powers[0] - half[0], *(powers[:-1] + half)[: len(powers) - 1], powers[-1] + half[-1]]
    )
    axis.pcolormesh(10**edges, np.arange(len(grid) + 1) - 0.5, colors, edgecolors="white", lw=0.3)
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.set_yticks(range(len(grid)), labels=list(map(str, grid.index)))
    axis.set_xlabel("ε")


def _draw_mitigations(figure, axes, table: pd.DataFrame) -> None:
    """(c) all mitigations of mean-field, or of the last parameterisation there is, (d) baseline and
    per-layer epsilon of all."""
    found, start = lines(table), baseline(table)
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    grid, line = axes[0].get_gridspec(), axes[0].get_subplotspec().rowspan.start
    middle = len(axes) // 2
    for axis in axes:
        axis.remove()
    pair = figure.add_subplot(grid[line, :middle]), figure.add_subplot(grid[line, middle:])
    shown = "mean_field" if "mean_field" in rules else list(rules)[-1]
    colored = style.looks(list(rules))
    panels.size_panels(
        pair,
        (
            _curves(table, found, shown),
            [
                (found[rule, curve], {**colored[rule], **light})
                for rule in rules
                for curve, light in ((start, {}), ("per_layer", {"ls": "--", "ms": 3}))
                if (rule, curve) in found
            ],
        ),
    )
    pair[0].set_title(f"(c) {rules[shown]}", fontsize=9)
    pair[1].set_title(f"(d) all: solid {baseline_text(table)}, dashed per-layer ε", fontsize=9)
    pair[1].set_ylabel(style.LOSS_LABEL)
    for axis, entries in zip(pair, (_entries(table), style.rule_entries(rules)), strict=True):
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
        axis.legend(handles=style.handles(entries), fontsize=7, ncols=2, loc="upper right")


def _named(table: pd.DataFrame) -> dict[str, tuple[str, dict]]:
    """Curve -> label, colour and mark; curves of one's own have the colours that others leave."""
    labels, looks = style.present(NAMES, table[CURVE]), dict(CURVE_LOOKS)
    own = [name for name in labels if name not in NAMES]
    left = (style.GREEN, style.PINK, style.BLUE) * len(own)
    looks |= {
        name: {**look, "color": color}
        for (name, look), color in zip(style.looks(own).items(), left, strict=False)
    }
    if "enlarged" in labels:
        labels["enlarged"] += f" = {table[table[CURVE] == 'enlarged'][EPS].iloc[0]:g}"
    return {name: (label, looks[name]) for name, label in labels.items()}


def _entries(table: pd.DataFrame) -> list[tuple[str, dict]]:
    return [(label, {"lw": 1.2, **look}) for label, look in _named(table).values()]


def _curves(table: pd.DataFrame, found: rates.Lines, rule: str) -> list[tuple[dict, dict]]:
    """(sweeps, look) of every curve of one parameterisation."""
    return [
        (found[rule, curve], look)
        for curve, (_, look) in _named(table).items()
        if (rule, curve) in found
    ]


def _figure_8(table: pd.DataFrame):
    """Every mitigation, a panel per parameterisation."""
    rules, found = style.present(style.LABELS, table[PARAMETERIZATION]), lines(table)
    figure, axes = style.subplots(1, len(rules), (2.5, 2.6), sharey=True)
    panels.size_panels(axes[0], (_curves(table, found, rule) for rule in rules))
    style.label_grid(axes, rules.values())
    figure.suptitle(f"Adam, {CURES}\n{panels.BEST_NOTE}; {caption(table)}")
    style.legend(figure, _entries(table))
    return figure
