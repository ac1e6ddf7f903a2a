"""Learning-rate sweeps for two horizons and the exponent of the optimum in the width (Everett et
al., Figures 11 to 13 and Table 4).

    python -m plots everett/learning_rates [results.csv ...]

One figure per table, that is per optimiser: a column per parameterisation; loss against rate for
a fixed number of steps and for a compute-optimal one, stable rates only; optimum against width,
with the slope that the paper prints. Adam's optima at fixed steps stand in one panel, too. A curve
or an optimiser of your own is drawn under its name. Findings judge by a power law with an
irreducible term, which the paper says it fits (App. H); the straight line in logarithms stands
beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.everett import horizons
from plots.everett.entries import Entry, beside, entries
from plots.findings import HEADER, Estimate, Finding, Report
from plots.naming import AnyOf, told_apart
from plots.tables import CURVE, OPTIMIZER, PARAMETERIZATION, WIDTH, TableError

TABLES = AnyOf(("everett/figure_11_sgd", "everett/figure_12_adam", "everett/figure_13_adafactor"))
FIGURES = {"sgd": "figure_11_sgd", "adam": "figure_12_adam", "adafactor": "figure_13_adafactor"}
ALIGNMENT = "prescription.alignment"
PUBLISHED_LOOKS = {"fixed": ":", "compute_optimal": (0, (5, 1.5, 1, 1.5))}
Data = dict[str, pd.DataFrame]  # by optimiser


def read(paths: tables.Paths) -> Data:
    """Optimiser -> table of Figure 11, 12 or 13, in the order given. The optimiser is what the
    table's column says, or its file's name, or else it is called as the file."""
    return {
        optimizer: horizons.by_rule(tables.read(path, horizons.COLUMNS))
        for optimizer, (_, path) in told_apart(paths, _optimizer).items()
    }


def _optimizer(path: Path) -> str:
    table, stem = tables.read(path, horizons.COLUMNS), tables.name(path)
    named = sorted(set(table[OPTIMIZER].fillna("unknown"))) if OPTIMIZER in table else []
    if len(named) > 1:
        raise TableError(
            f"{path}: {len(named)} optimisers, expected one: {', '.join(named)}; "
            f"choose with --where {OPTIMIZER}={named[0]}"
        )
    return [*named, *(one for one in FIGURES if one in stem.split("_")), stem][0]


def findings(data: Data) -> Report:
    """Table 4 and what the horizon changes."""
    table_4 = entries(data)
    yield horizons.EXPONENT_NOTE
    yield HEADER
    yield from (_of_table_4(entry) for entry in table_4)
    for entry in table_4:
        parts = [f"{name} {error:.3f}" for name, error in entry.fit.errors.items()]
        local = [f"{one.value:+.2f} to {size}" for size, one in entry.fit.by_size.items()]
        if parts:
            yield f"{entry.name}: errors by {', '.join(parts)}; local slopes {', '.join(local)}"
        if law := entry.floored:
            power = Estimate(-law.exponent, law.exponent_error).text(2)
            floor = f"rate {law.floor:.2g} ± {law.floor_error:.1g} (n = {law.n})"
            known = f"{power}, {floor}" if entry.levels_off else "not determined, at a bound"
            yield f"{entry.name}: with an irreducible rate {known}"
    yield from _of_horizons(table_4)
    for optimizer, table in data.items():
        lines = {(": ".join(key),): sweeps for key, sweeps in horizons.lines(table).items()}
        yield from (f"{optimizer}, {line}" for line in rates.basis(table, lines, [CURVE]))


def _of_table_4(entry: Entry) -> Finding:
    """By the paper's estimator, and the straight line beside it."""
    finding = beside(entry.name, entry.deciding, entry.published)
    line = f"{finding.measured} with an irreducible term; {entry.fit.text()} without"
    return replace(finding, measured=line) if entry.levels_off else finding


def _of_horizons(table_4: Sequence[Entry]) -> Report:
    """The claim of App. H: compute-optimal exponents are the smaller ones."""
    fixed = {(e.optimizer, e.rule): e for e in table_4 if e.horizon == "fixed"}
    grown = [entry for entry in table_4 if entry.horizon == "compute_optimal"]
    drops: list[float] = []
    for entry in grown:
        start = fixed.get((entry.optimizer, entry.rule))
        if start and math.isfinite(start.fit.value + entry.fit.value):
            change = entry.fit - start.fit
            drops.append(-change.value)
            name = f"{entry.name} minus fixed"
            yield beside(name, change, entry.published - start.published)
    if not drops:
        yield "growing minus fixed horizon's exponent: not measured"
        return
    labels = ", ".join(dict.fromkeys(entry.label for entry in grown))
    yield (
        f"the exponent at {labels} is smaller in {sum(drop > 0 for drop in drops)} of {len(drops)} "
        f"settings, by {median(drops):.2f} in the median, {min(drops):.2f} to {max(drops):.2f}; "
        "the paper's Table 4: in 12 of 12, by 0.405, 0.18 to 1.05"
    )


def draw(data: Data) -> style.Drawn:
    """A figure per optimiser, and Adam's optima alone."""
    table_4 = entries(data)
    for index, (optimizer, table) in enumerate(data.items()):
        own = [entry for entry in table_4 if entry.optimizer == optimizer]
        aligned = set(table[ALIGNMENT].dropna()) if ALIGNMENT in table else {"global"}
        name = FIGURES.get(optimizer, f"learning_rates_{optimizer}")
        if aligned != {"global"}:  # Figures 11 to 13 have one global rate
            name = f"learning_rates_{optimizer}"
        words = {"global": "one global learning rate", "none": "no alignment"}
        kinds = " and ".join(words.get(one, f"{one} alignment") for one in sorted(aligned))
        title = f"{style.OPTIMIZERS.get(optimizer, optimizer)}, {kinds}"
        yield name, _figure(title, table, own), [index]
        fixed = [entry for entry in own if entry.horizon == "fixed"]
        if name == FIGURES["adam"] and fixed:
            yield "figure_12_adam_optima", _optima(fixed), [index]


def _figure(title: str, table: pd.DataFrame, table_4: Sequence[Entry]):
    """Loss against rate at every horizon, then the optima and their powers of the width."""
    sweeps_of = {(entry.rule, entry.horizon): entry.fit.sweeps for entry in table_4}
    labels = horizons.horizon_labels(table)
    rules = naming.present(style.LABELS, table[PARAMETERIZATION])
    shown = horizons.drawn_horizons(sweeps_of)
    figure, axes = style.subplots(title, len(shown) + 1, len(rules), (2.5, 2.3))
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    horizons.draw_rows(axes[:-1], sweeps_of, rules, labels, colors)
    for axis, (rule, look) in zip(axes[-1], naming.looks(list(rules)).items(), strict=True):
        own = [entry for entry in table_4 if entry.rule == rule]
        for entry in own:
            label = panels.power_text(entry.fit)
            if math.isfinite(entry.published):
                label += f" (paper $D^{{{entry.published:+.2f}}}$)"
                dots = PUBLISHED_LOOKS[entry.horizon]
                panels.draw_published(axis, entry.fit.sweeps, entry.published, ls=dots)
            shape = {"color": look["color"], **horizons.LOOKS[entry.horizon]}
            panels.draw_optima(axis, entry.fit.sweeps, entry.fit, label=label, **shape)
        axis.set_xlabel("width D")
        if own:
            axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        else:
            style.empty(axis, "no finished run")
    style.octave_limits(axes[-1], sorted(colors))
    axes[-1, 0].set_ylabel("optimal learning rate")
    handles = [*style.width_entries(colors), *style.rate_entries(sweeps_of.items())]
    handles += horizons.legend_entries(shown, labels, 5)
    for horizon in shown:
        if any(math.isfinite(e.published) for e in table_4 if e.horizon == horizon):
            words = f"slope that the paper prints, {horizon.replace('_', '-')}"
            handles.append((words, {"color": "0.45", "ls": PUBLISHED_LOOKS[horizon]}))
    style.legend(figure, handles)
    return figure


def _optima(fixed: Sequence[Entry]):
    """Optimum against width of all parameterisations in one panel, to be read when it is small."""
    figure, axes = style.subplots("Adam's best rate against width", 1, 1, (3.7, 3.5))
    axis = axes[0][0]
    for entry in fixed:
        label = f"{style.LABELS.get(entry.rule, entry.rule)} {panels.power_text(entry.fit)}"
        look = naming.looks([entry.rule])[entry.rule]
        panels.draw_optima(axis, entry.fit.sweeps, entry.fit, label=label, **look)
    style.octave_limits([axis], sorted({width for e in fixed for width in e.fit.sweeps}))
    axis.tick_params(labelsize=10)
    axis.set_xlabel("width D", fontsize=11)
    axis.set_ylabel("best learning rate", fontsize=11)
    handles = axis.get_legend_handles_labels()[0]
    place = {"loc": "outside lower center", "ncols": 2, "columnspacing": 1, "handlelength": 1.5}
    figure.legend(handles=handles, fontsize=9, frameon=False, **place)
    return figure
