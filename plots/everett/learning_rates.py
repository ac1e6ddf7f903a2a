"""Learning-rate sweeps for two horizons and the exponent of the optimum in the width (Everett et
al., Figures 11 to 13 and Table 4).

    python -m plots.everett.learning_rates [results.csv ...] [--out FOLDER]

One figure per table, that is per optimiser: a column per parameterisation; loss against rate for
a fixed number of steps and for a compute-optimal one, stable rates only; optimum against width.
Writes PNG, PDF and table_4.csv, measured exponents beside the published ones.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from plots import style, tables
from plots.everett.published import TABLE_4
from plots.findings import HEADER, Finding, distance, number
from plots.rate_panels import draw_optima, draw_rates, loss_limits, octave_limits, pair_rows
from plots.rate_sweeps import (
    Exponent,
    RateSweep,
    exponent,
    lost_lines,
    noise_line,
    rate_sweeps,
    seed_noise,
)
from plots.tables import CURVE, HORIZON, OPTIMIZER, WIDTH, TableError

STEMS = ("figure_11_sgd", "figure_12_adam", "figure_13_adafactor")
EXPONENT_NOTE = (
    "exponent of the optimal rate in the width ± the larger of two standard errors: from the "
    "scatter of widths about the line, and from the errors of the optima"
)
HORIZONS = ("fixed", "compute_optimal")
COMPUTE_OPTIMAL = "20 tokens per parameter"  # Everett et al., App. H, after Hoffmann et al.
HORIZON_STYLES = {"fixed": ("o", "-"), "compute_optimal": ("s", "--")}
COLUMNS = (*tables.RESULTS, WIDTH, tables.RATE)
Lines = dict[tuple[str, str], dict[int, RateSweep]]


def curves() -> list[str]:
    """Names of the curves of one optimiser's table."""
    return [f"{rule}_{horizon}" for rule in style.LABELS for horizon in HORIZONS]


def horizon_labels(table: pd.DataFrame) -> dict[str, str]:
    """Horizon -> what it is in this table: a short preset's is not the compute-optimal one."""
    rows = table[table[CURVE].str.endswith("compute_optimal")]
    found = list(rows[HORIZON].dropna().unique()) if HORIZON in rows else []
    optimal = not found or found == [COMPUTE_OPTIMAL]
    label = "compute-optimal" if optimal else ", ".join(map(str, found))
    return {"fixed": "fixed steps", "compute_optimal": label}


def read(path: Path) -> tuple[str, pd.DataFrame]:
    """(optimiser, table) of Figure 11, 12 or 13."""
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


def lines(table: pd.DataFrame) -> Lines:
    """(parameterisation, horizon) -> sweeps by width, of what has a finished run."""
    found = {}
    for rule in style.LABELS:
        both = table[table[CURVE].isin([f"{rule}_{horizon}" for horizon in HORIZONS])]
        noise, _ = seed_noise(both)
        for horizon in HORIZONS:
            rows = both[both[CURVE] == f"{rule}_{horizon}"]
            sweeps = rate_sweeps(rows, noise)
            if sweeps:
                found[rule, horizon] = sweeps
    return found


@dataclass(frozen=True)
class Row:
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
        """The entry in words."""
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


def rows(data: Sequence[tuple[str, pd.DataFrame]]) -> list[Row]:
    """Table 4, as far as there are tables: what has no run at all is left out."""
    return [
        Row(optimizer, rule, horizon, labels[horizon], exponent(sweeps))
        for optimizer, table in data
        for labels in [horizon_labels(table)]
        for (rule, horizon), sweeps in lines(table).items()
    ]


def differences(entries: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """(optimiser, parameterisation) -> compute-optimal minus fixed exponent and its error."""
    fits = {(row.optimizer, row.rule, row.horizon): row.fit for row in entries}
    found = {}
    for optimizer, rule, _ in fits:
        pair = [fits.get((optimizer, rule, horizon)) for horizon in HORIZONS]
        if all(fit is not None and fit.law for fit in pair):
            fixed, optimal = pair
            change = optimal.value - fixed.value
            found[optimizer, rule] = change, math.hypot(fixed.error, optimal.error)
    return found


def horizon_lines(entries: Sequence[Row]) -> list[str]:
    """The claim of App. H: compute-optimal exponents are the smaller ones."""
    found = differences(entries)
    grown = ", ".join(dict.fromkeys(e.label for e in entries if e.horizon == "compute_optimal"))
    text = []
    for (optimizer, rule), (change, error) in found.items():
        table = [TABLE_4[horizon][optimizer][rule] for horizon in HORIZONS]
        name = f"{optimizer}, {style.LABELS[rule]}: {grown} minus fixed"
        published = table[1] - table[0]
        word = distance(change, error, published)
        text.append(Finding(name, number(change, error, 2), f"{published:+.2f}", word).line())
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


def report(data: Sequence[tuple[str, pd.DataFrame]]) -> str:
    """Table 4 and the findings in words, with what they rest on."""
    entries = rows(data)
    text = [EXPONENT_NOTE, HEADER]
    text += [row.finding().line() for row in entries]
    for row in entries:
        weighted = row.fit.weighted
        if weighted:
            text.append(
                f"{row.optimizer}, {style.LABELS[row.rule]}, {row.label}: weighted by "
                f"the optima's own errors {number(weighted.exponent, weighted.error, 2)} "
                f"(n = {weighted.n})"
            )
    text += horizon_lines(entries)
    for optimizer, table in data:
        text += [f"{optimizer}, {line}" for line in lost_lines(table, [CURVE])]
        for rule, label in style.LABELS.items():
            own = table[table[CURVE].isin([f"{rule}_{horizon}" for horizon in HORIZONS])]
            text.append(noise_line(own, f"{optimizer}, {label}"))
    return "\n".join(text)


def draw(optimizer: str, table: pd.DataFrame, folder: Path, name: str) -> list[Path]:
    """Draws one optimiser's figure and returns the paths of PNG and PDF."""
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
    entries = [*style.width_entries(colors), *style.STAR_ENTRIES]
    style.legend(figure, entries, ncols=min(len(entries), 8))
    figure.suptitle(f"{style.OPTIMIZERS[optimizer]}, one global learning rate", fontsize=11)
    return style.save(figure, folder, name)


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


def write_table(entries: Sequence[Row], folder: Path) -> Path:
    """table_4.csv: a row per optimiser, parameterisation and horizon."""
    text = io.StringIO()
    if entries:
        writer = csv.DictWriter(text, list(entries[0].record()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.record() for row in entries)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table_4.csv"
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def make(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    """Findings and figures of all tables, and Table 4."""
    data = [read(path) for path in paths]
    if len({optimizer for optimizer, _ in data}) < len(data):
        raise TableError(f"{paths[-1]}: two tables of one optimiser")
    files = [
        file
        for path, (optimizer, table) in zip(paths, data)
        for file in draw(optimizer, table, folder, tables.name(path))
    ]
    return report(data), [*files, write_table(rows(data), folder)]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    style.command("learning_rates", __doc__, STEMS, make, argv)


if __name__ == "__main__":
    main()
