"""Learning-rate sweeps for two horizons and the exponent of the optimum in the width (Everett et
al., Figures 11 to 13 and Table 4).

    python -m plots everett/learning_rates [results.csv ...]

One figure per table, that is per optimiser: a column per parameterisation; loss against rate for
a fixed number of steps and for a compute-optimal one, stable rates only; optimum against width.
Also writes table_4.csv, measured exponents next to the published ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from plots import style, tables
from plots.everett.horizons import (
    COLUMNS,
    EXPONENT_NOTE,
    HORIZON_STYLES,
    HORIZONS,
    Lines,
    curves,
    horizon_labels,
    lines,
)
from plots.everett.published import TABLE_4
from plots.findings import HEADER, Finding, Printed, distance, number
from plots.rates import (
    Exponent,
    draw_optima,
    draw_rates,
    exponent,
    loss_limits,
    lost_lines,
    noise_line,
    octave_limits,
    pair_rows,
)
from plots.tables import CURVE, OPTIMIZER, WIDTH, TableError

TABLES = ("everett/figure_11_sgd", "everett/figure_12_adam", "everett/figure_13_adafactor")
FIGURES = {
    "sgd": "figure_11_sgd", "adam": "figure_12_adam", "adafactor": "figure_13_adafactor",
}
Data = dict[str, pd.DataFrame]  # by optimiser


def read(paths: Sequence[Path]) -> Data:
    """Optimiser -> table of Figure 11, 12 or 13, in the order given."""
    data = dict(map(_read, paths))
    if len(data) < len(paths):
        raise TableError(f"{paths[-1]}: two tables of one optimiser")
    return data


def _read(path: Path) -> tuple[str, pd.DataFrame]:
    table = tables.only(tables.read(path, COLUMNS), path, CURVE, curves())
    named = sorted(set(table[OPTIMIZER].dropna())) if OPTIMIZER in table else []
    stem = tables.name(path)
    known = named or [name for name in TABLE_4["fixed"] if name in stem.split("_")]
    if len(known) != 1 or known[0] not in TABLE_4["fixed"]:
        raise TableError(
            f"{path}: which optimiser is it? expected one of {', '.join(TABLE_4['fixed'])} in "
            f"column {OPTIMIZER} or in the file's name"
        )
    return known[0], table


@dataclass(frozen=True)
class Entry:
    """One entry of Table 4: measured and published exponent."""

    optimizer: str
    rule: str
    horizon: str
    label: str
    """The horizon in this table's words."""
    fit: Exponent

    @property
    def published(self) -> float:
        """The paper's exponent."""
        return TABLE_4[self.horizon][self.optimizer][self.rule]

    def finding(self) -> Finding:
        """The entry as a finding."""
        name = f"{self.optimizer}, {style.LABELS[self.rule]}, {self.label}"
        word = distance(self.fit.value, self.fit.error, self.published)
        return Finding(name, self.fit.text(), f"{self.published:+.2f}", word)

    def record(self) -> dict[str, object]:
        """The entry as a row of table_4.csv."""
        weighted = self.fit.weighted
        return {
            "optimizer": self.optimizer,
            "parameterization": self.rule,
            "horizon": self.horizon,
            "horizon_here": self.label,
            "exponent": self.fit.value,
            "standard_error": self.fit.error,
            "scatter_error": self.fit.law.error if self.fit.law else math.nan,
            "widths": self.fit.widths,
            "weighted_exponent": weighted.exponent if weighted else math.nan,
            "weighted_error": weighted.error if weighted else math.nan,
            "weighted_widths": weighted.n if weighted else 0,
            "widths_at_edge": " ".join(map(str, self.fit.edge)),
            "published": self.published,
            "difference": self.fit.value - self.published,
        }


def entries(data: Data) -> list[Entry]:
    """Table 4, as far as there are tables: what has no run at all is left out."""
    return [
        Entry(optimizer, rule, horizon, labels[horizon], exponent(sweeps))
        for optimizer, table in data.items()
        for labels in [horizon_labels(table)]
        for (rule, horizon), sweeps in lines(table).items()
    ]


def differences(table_4: Sequence[Entry]) -> dict[tuple[str, str], tuple[float, float]]:
    """(optimiser, parameterisation) -> compute-optimal minus fixed exponent and its error."""
    fits = {(entry.optimizer, entry.rule, entry.horizon): entry.fit for entry in table_4}
    found = {}
    for optimizer, rule, _ in fits:
        pair = [fits.get((optimizer, rule, horizon)) for horizon in HORIZONS]
        if all(fit is not None and fit.law for fit in pair):
            fixed, optimal = pair
            change = optimal.value - fixed.value
            found[optimizer, rule] = change, math.hypot(fixed.error, optimal.error)
    return found


def horizon_lines(table_4: Sequence[Entry]) -> list[Printed]:
    """The claim of App. H: compute-optimal exponents are the smaller ones."""
    found = differences(table_4)
    grown = ", ".join(dict.fromkeys(e.label for e in table_4 if e.horizon == "compute_optimal"))
    text = []
    for (optimizer, rule), (change, error) in found.items():
        fixed, optimal = (TABLE_4[horizon][optimizer][rule] for horizon in HORIZONS)
        name = f"{optimizer}, {style.LABELS[rule]}: {grown} minus fixed"
        published = optimal - fixed
        word = distance(change, error, published)
        text.append(Finding(name, number(change, error, 2), f"{published:+.2f}", word))
    if not found:
        return ["growing minus fixed horizon's exponent: not measured"]
    drops = [-change for change, _ in found.values()]
    sure = sum(change < -2 * error for change, error in found.values())
    text.append(
        f"the exponent at {grown} is smaller in {sum(drop > 0 for drop in drops)} of "
        f"{len(drops)} settings ({sure} beyond two standard errors), by {median(drops):.2f} in the "
        f"median, {min(drops):.2f} to {max(drops):.2f}; "
        "the paper's Table 4: in 12 of 12, by 0.405, 0.18 to 1.05"
    )
    return text


def findings(data: Data) -> list[Printed]:
    """Table 4 and what the horizon changes."""
    table_4 = entries(data)
    text = [EXPONENT_NOTE, HEADER, *(entry.finding() for entry in table_4)]
    for entry in table_4:
        weighted = entry.fit.weighted
        if weighted:
            text.append(
                f"{entry.optimizer}, {style.LABELS[entry.rule]}, {entry.label}: weighted by "
                f"the optima's own errors {number(weighted.exponent, weighted.error, 2)} "
                f"(n = {weighted.n})"
            )
    text += horizon_lines(table_4)
    for optimizer, table in data.items():
        text += [f"{optimizer}, {line}" for line in lost_lines(table, [CURVE])]
        for rule, label in style.LABELS.items():
            own = table[table[CURVE].isin([f"{rule}_{horizon}" for horizon in HORIZONS])]
            text.append(noise_line(own, f"{optimizer}, {label}"))
    return text


def draw(data: Data) -> Iterator[tuple[str, object]]:
    """A figure per optimiser, and Table 4: a row per optimiser, parameterisation and horizon."""
    for optimizer, table in data.items():
        yield FIGURES[optimizer], _figure(optimizer, table)
    yield "table_4", pd.DataFrame([entry.record() for entry in entries(data)])


def _figure(optimizer: str, table: pd.DataFrame):
    found, labels = lines(table), horizon_labels(table)
    figure, axes = style.subplots(3, len(style.LABELS), (2.5, 2.3))
    pair_rows(axes, style.LABELS.values())
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    for row, horizon in zip(axes, HORIZONS):
        drawn = [found.get((rule, horizon), {}) for rule in style.LABELS]
        for axis, sweeps in zip(row, drawn):
            draw_rates(axis, sweeps, colors)
        loss_limits(row, drawn)
        for axis in row[1:]:
            axis.tick_params(labelleft=False)
        row[0].set_ylabel(f"{labels[horizon]}\n{style.LOSS_LABEL}")
    for axis, rule in zip(axes[2], style.LABELS):
        _draw_exponents(axis, found, rule, labels)
        octave_limits(axis, sorted(colors))
    axes[2, 0].set_ylabel("optimal learning rate")
    handles = [*style.width_entries(colors), *style.STAR_ENTRIES]
    style.legend(figure, handles, ncols=min(len(handles), 8))
    figure.suptitle(f"{style.OPTIMIZERS[optimizer]}, one global learning rate", fontsize=11)
    return figure


def _draw_exponents(axis, found: Lines, rule: str, labels: Mapping[str, str]) -> None:
    for horizon, (marker, line) in HORIZON_STYLES.items():
        sweeps = found.get((rule, horizon))
        if sweeps:
            fit = exponent(sweeps)
            power = f"$D^{{{fit.value:+.2f}}}$" if fit.law else "no fit"
            error = f" ± {fit.error:.2f}" if math.isfinite(fit.error) else ""
            look = {"color": style.color(rule), "marker": marker, "ls": line}
            draw_optima(axis, sweeps, fit, label=f"{labels[horizon]}: {power}{error}", **look)
    axis.set_xlabel("width D")
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
