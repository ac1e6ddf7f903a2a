"""Learning-rate sweeps for two horizons and the exponent of the optimum in the width (Everett et
al., Figures 11 to 13 and Table 4).

    python -m plots everett/learning_rates [results.csv ...]

One figure per table, that is per optimiser: a column per parameterisation; loss against rate for
a fixed number of steps and for a compute-optimal one, stable rates only; optimum against width,
with the slope that the paper prints. A curve or an optimiser of your own is drawn under its name.
Also writes table_4.csv, measured exponents next to the published ones: of the straight line in
logarithms, and of a power law with an irreducible term, which the paper says it fits (App. H). The
error of an exponent is the largest of four: from the scatter of widths about the line, from the
errors of the optima, from leaving out seeds, and half the range over the windows around the best
rate that the parabolas of the optima may be fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from measure.fits import IrreduciblePowerLaw, irreducible_power_law, optimum
from plots import panels, rates, style, tables
from plots.everett import horizons
from plots.everett.horizons import HORIZON_STYLES
from plots.everett.published import TABLE_4
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import complete, fitted, jackknife, power_of
from plots.tables import CURVE, OPTIMIZER, PARAMETERIZATION, SEED, WIDTH, TableError

TABLES = ("everett/figure_11_sgd", "everett/figure_12_adam", "everett/figure_13_adafactor")
PER_TABLE = True
FIGURES = {
    "sgd": "figure_11_sgd",
    "adam": "figure_12_adam",
    "adafactor": "figure_13_adafactor",
}
PUBLISHED_LOOKS = {"fixed": ":", "compute_optimal": (0, (5, 1.5, 1, 1.5))}
# Octaves to either side of the best rate: from the neighbours on a factor-2 grid to where loss
# curves stop being parabolas. The paper does not say how it finds the optimum.
WINDOWS = (1.0, 1.5, 2.0, 2.5)
Data = dict[str, pd.DataFrame]  # by optimiser


def read(paths: Sequence[Path]) -> Data:
    """Optimiser -> table of Figure 11, 12 or 13, in the order given. The optimiser is what the
    table's column says, or its file's name, or else it is called as the file."""
    data = {}
    for path in paths:
        table = horizons.by_rule(tables.read(path, horizons.COLUMNS))
        named = sorted(set(table[OPTIMIZER].dropna())) if OPTIMIZER in table else []
        if len(named) > 1:
            raise TableError(
                f"{path}: {len(named)} optimisers, expected one: {', '.join(named)}; "
                f"choose with --where {OPTIMIZER}={named[0]}"
            )
        stem = tables.name(path)
        named += [optimizer for optimizer in FIGURES if optimizer in stem.split("_")]
        data[(named or [stem])[0]] = table
    if len(data) < len(paths):
        raise TableError(f"{paths[-1]}: two tables of one optimiser")
    return data


@dataclass(frozen=True)
class Entry:
    """One entry of Table 4: measured and published exponent."""

    optimizer: str
    rule: str
    horizon: str
    label: str
    """The horizon in this table's words."""
    sweeps: Mapping[int, rates.RateSweep]
    fit: rates.Exponent
    floored: IrreduciblePowerLaw | None
    """The optima as a power law with an irreducible term; None below four widths."""
    by_seed: Estimate | None
    """The exponent over shared seeds with its jackknife error; None below three of them."""
    by_window: tuple[float, ...]
    """The exponent with the parabolas of the optima fitted to each of WINDOWS; empty without."""

    @property
    def name(self) -> str:
        """The entry in words."""
        return f"{self.optimizer}, {style.LABELS.get(self.rule, self.rule)}, {self.label}"

    @property
    def published(self) -> float:
        """The paper's exponent; NaN for what it does not have."""
        return TABLE_4[self.horizon].get(self.optimizer, {}).get(self.rule, math.nan)

    def record(self) -> dict[str, object]:
        """The entry as a row of table_4.csv."""
        weighted, law = self.fit.weighted, self.floored if self.levels_off else None
        return {
            "optimizer": self.optimizer,
            "parameterization": self.rule,
            "horizon": self.horizon,
            "horizon_here": self.label,
            "exponent": self.fit.value,
            "standard_error": self.fit.error,
            "scatter_error": self.fit.law.error if self.fit.law else math.nan,
            "seed_error": self.by_seed.error if self.by_seed else math.nan,
            "window_lowest": min(self.by_window, default=math.nan),
            "window_highest": max(self.by_window, default=math.nan),
            "widths": self.fit.widths,
            "weighted_exponent": weighted.exponent if weighted else math.nan,
            "weighted_error": weighted.error if weighted else math.nan,
            "weighted_widths": weighted.n if weighted else 0,
            "widths_at_edge": " ".join(map(str, self.fit.edge)),
            "irreducible_exponent": -law.exponent if law else math.nan,
            "irreducible_error": law.exponent_error if law else math.nan,
            "irreducible_rate": law.floor if law else math.nan,
            "published": self.published,
            "difference": self.fit.value - self.published,
        }

    @property
    def levels_off(self) -> bool:
        """Whether the widths determine the irreducible term."""
        return self.floored is not None and math.isfinite(self.floored.exponent_error)


def floored(sweeps: Mapping[int, rates.RateSweep]) -> IrreduciblePowerLaw | None:
    """lr* = floor + amplitude D^-k over the widths whose optimum is not at the edge, each optimum
    weighing alike; None where there are fewer than four, or the fit does not end."""
    used = {width: sweep.best for width, sweep in sweeps.items() if not sweep.best.at_edge}
    known = [math.log(2) * b.error * b.value for b in used.values() if math.isfinite(b.error)]
    noise = float(np.sqrt(np.mean(np.square(known)))) if known else math.nan
    try:
        # In units of the largest: the fit is made for losses, which are of order 1.
        unit = max(best.value for best in used.values())
        relative = [best.value / unit for best in used.values()]
        law = irreducible_power_law(list(used), relative, noise / unit)
    except (ValueError, RuntimeError):
        return None
    floor, error = unit * law.floor, unit * law.floor_error
    return replace(law, floor=floor, floor_error=error, amplitude=unit * law.amplitude)


def floored_lines(table_4: Sequence[Entry]) -> list[str]:
    """The exponents with an irreducible term, and where it cannot be fitted."""
    text = []
    for entry in table_4:
        if entry.levels_off and entry.floored:
            law = entry.floored
            exponent = Estimate(-law.exponent, law.exponent_error).text(2)
            text.append(
                f"{entry.name}: with an irreducible rate {exponent}, rate "
                f"{law.floor:.2g} ± {law.floor_error:.1g} (n = {law.n})"
            )
    bound = [entry.name for entry in table_4 if entry.floored and not entry.levels_off]
    few = [entry.name for entry in table_4 if not entry.floored]
    if bound:
        text.append(
            "an irreducible rate is not determined, as the fit ends at a bound (no rate "
            f"left over, or an optimum that does not fall): {'; '.join(bound)}"
        )
    if few:
        text.append(f"an irreducible rate takes four widths, not at an edge: {'; '.join(few)}")
    return text


def _beside(name: str, measured: Estimate, published: float) -> Finding:
    exponent = isinstance(measured, rates.Exponent)  # the other ones are differences of two
    text = measured.text(2) if exponent else measured.through_widths()
    beside = "no claim" if math.isnan(published) else f"{published:+.2f}"
    verdict = "" if math.isnan(published) else measured.distance(published)
    return Finding(name, text, beside, verdict, measured)


def by_seed(rows: pd.DataFrame, edge: Collection[int]) -> Estimate | None:
    """The exponent of a curve over the seeds that all its widths share, its error from leaving one
    after another out: runs of a seed share random numbers across widths, so their optima are not
    independent. It is that of the same widths whichever seed is left out, all but those at an edge
    with all seeds. None below three shared seeds."""

    def exponent(part: pd.DataFrame) -> float:
        optima = {width: sweep.best.value for width, sweep in rates.rate_sweeps(part).items()}
        return power_of(fitted(pd.Series(optima, dtype=float)))

    shared = complete(rows[~rows[WIDTH].isin(edge)], SEED, WIDTH)
    return jackknife(shared, SEED, exponent) if shared[SEED].nunique() > 2 else None


def by_window(sweeps: Mapping[int, rates.RateSweep]) -> tuple[float, ...]:
    """The exponent with each of WINDOWS, of all seeds; empty below two widths."""
    found = [
        rates.exponent(
            {
                width: replace(sweep, best=optimum(sweep.losses, window))
                for width, sweep in sweeps.items()
            }
        ).value
        for window in WINDOWS
    ]
    return tuple(value for value in found if math.isfinite(value))


def entries(data: Data) -> list[Entry]:
    """Table 4, as far as there are tables: what has no run at all is left out."""
    found = []
    for optimizer, table in data.items():
        labels, lines = horizons.horizon_labels(table), horizons.lines(table)
        curves = {place: curve for curve, place in horizons.places(table).items()}
        for (rule, horizon), sweeps in lines.items():
            fit = rates.exponent(sweeps)
            seeds = by_seed(table[table[CURVE] == curves[rule, horizon]], fit.edge)
            if seeds is not None:
                fit = replace(fit, error=float(np.fmax(fit.error, seeds.error)))
            if windows := by_window(sweeps):
                # Half a range alone is no standard error, so one that is unknown stays so.
                fit = replace(fit, error=float(np.maximum(fit.error, np.ptp(windows) / 2)))
            found.append(
                Entry(
                    optimizer,
                    rule,
                    horizon,
                    labels[horizon],
                    sweeps,
                    fit,
                    floored(sweeps),
                    seeds,
                    windows,
                )
            )
    return found


def horizon_lines(table_4: Sequence[Entry]) -> list[Printed]:
    """The claim of App. H: compute-optimal exponents are the smaller ones."""
    fixed = {(e.optimizer, e.rule): e for e in table_4 if e.horizon == "fixed"}
    grown = [entry for entry in table_4 if entry.horizon == "compute_optimal"]
    labels = ", ".join(dict.fromkeys(entry.label for entry in grown))
    text: list[Printed] = []
    changes: list[Estimate] = []
    for entry in grown:
        start = fixed.get((entry.optimizer, entry.rule))
        if start and start.fit.law and entry.fit.law:
            changes.append(entry.fit - start.fit)
            name = f"{entry.name.removesuffix(entry.label)}{labels} minus fixed"
            text.append(_beside(name, changes[-1], entry.published - start.published))
    if not changes:
        return ["growing minus fixed horizon's exponent: not measured"]
    drops = [-change.value for change in changes]
    sure = sum((-change).claimed_gain() == "agrees" for change in changes)
    text.append(
        f"the exponent at {labels} is smaller in {sum(drop > 0 for drop in drops)} of "
        f"{len(drops)} settings ({sure} beyond 95 %), by {median(drops):.2f} in the "
        f"median, {min(drops):.2f} to {max(drops):.2f}; "
        "the paper's Table 4: in 12 of 12, by 0.405, 0.18 to 1.05"
    )
    return text


def findings(data: Data) -> list[Printed]:
    """Table 4 and what the horizon changes."""
    table_4 = entries(data)
    seeds = ", from leaving out a seed where all widths share three or more"
    has = any(entry.by_seed for entry in table_4)
    reach = ", ".join(f"{window:g}" for window in WINDOWS)
    windows = f", half the range over windows of {reach} octaves around the best rate"
    text = [horizons.EXPONENT_NOTE + seeds * has + windows, HEADER]
    text += [_beside(entry.name, entry.fit, entry.published) for entry in table_4]
    for entry in table_4:
        if weighted := entry.fit.weighted:
            own = Estimate(weighted.exponent, weighted.error, weighted.n)
            text.append(f"{entry.name}: weighted by the optima's own errors {own.text(2)}")
        if entry.by_seed:
            text.append(f"{entry.name}: jackknife over seeds {entry.by_seed.text(2)}")
        if entry.by_window:
            of = ", ".join(f"{value:+.2f}" for value in entry.by_window)
            low, high = min(entry.by_window), max(entry.by_window)
            text.append(
                f"{entry.name}: windows {reach} octaves: {of}; half the range "
                f"{(high - low) / 2:.3f}"
            )
    text += [*floored_lines(table_4), *horizon_lines(table_4)]
    for optimizer, table in data.items():
        notes = (*rates.lost_lines(table, [CURVE]), *rates.noise_lines(table))
        text += [f"{optimizer}, {line}" for line in notes]
    return text


def draw(data: Data) -> Iterator[tuple[str, object]]:
    """A figure per optimiser, and Table 4: a row per optimiser, parameterisation and horizon."""
    table_4 = entries(data)
    for optimizer, table in data.items():
        own = [entry for entry in table_4 if entry.optimizer == optimizer]
        name = FIGURES.get(optimizer, f"learning_rates_{optimizer}")
        yield name, _figure(optimizer, table, own)
    yield "table_4", pd.DataFrame([entry.record() for entry in table_4])


def _figure(optimizer: str, table: pd.DataFrame, table_4: Sequence[Entry]):
    """Loss against rate at every horizon, then the optima and their powers of the width."""
    found = {(entry.rule, entry.horizon): entry.sweeps for entry in table_4}
    labels = horizons.horizon_labels(table)
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    shown = horizons.drawn_horizons(found)
    figure, axes = style.subplots(len(shown) + 1, len(rules), (2.5, 2.3))
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    horizons.draw_rows(axes[:-1], found, rules, labels, colors)
    for axis, (rule, look) in zip(axes[-1], style.looks(list(rules)).items(), strict=True):
        own = [entry for entry in table_4 if entry.rule == rule]
        for entry in own:
            fit, sweeps = entry.fit, entry.sweeps
            marker, line = HORIZON_STYLES[entry.horizon]
            error = f" ± {fit.error:.2f}" if math.isfinite(fit.error) else ""
            label = f"$D^{{{fit.value:+.2f}}}${error}" if fit.law else "no fit"
            if math.isfinite(entry.published):
                label += f" (paper $D^{{{entry.published:+.2f}}}$)"
                dots = PUBLISHED_LOOKS[entry.horizon]
                panels.draw_published(axis, sweeps, entry.published, ls=dots)
            panels.draw_optima(
                axis, sweeps, fit, label=label, color=look["color"], marker=marker, ls=line
            )
        axis.set_xlabel("width D")
        if own:
            axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        else:
            style.empty(axis, "no finished run")
        style.octave_limits(axis, sorted(colors))
    axes[-1, 0].set_ylabel("optimal learning rate")
    handles = [*style.width_entries(colors), *style.STAR_ENTRIES]
    for horizon in shown:
        marker, line = HORIZON_STYLES[horizon]
        handles.append((labels[horizon], {"color": "0.3", "marker": marker, "ls": line, "ms": 5}))
        if any(math.isfinite(e.published) for e in table_4 if e.horizon == horizon):
            handles.append(
                (
                    f"slope that the paper prints, {horizon.replace('_', '-')}",
                    {"color": "0.45", "ls": PUBLISHED_LOOKS[horizon]},
                )
            )
    style.legend(figure, handles, ncols=4)
    name = style.OPTIMIZERS.get(optimizer, optimizer)
    note = panels.optima_note(entry.fit for entry in table_4)
    figure.suptitle(f"{name}, one global learning rate\n{panels.RATE_NOTE}; {note}")
    return figure
