"""Whether the best learning rate moves with depth, without and with a rule for it (ours).

    python -m plots everett/depth [results.csv]

A column per parameterisation; a row of loss against rate without a rule, with branches times
(L/L_b)^(-1/2) and times (L/L_b)^(-1), a line per depth; then the best rate against depth. At the
base depth L_b the three are one run. What is expected is derived at `param_groups.Everett`: both
rules hold the best rate still; without one, updates add up as L in a stream that grows as sqrt(L).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from plots import panels, rates, style, tables
from plots.findings import Estimate, Finding, Printed
from plots.rates import Lines, RateSweep, exponent, lines_of
from plots.statistics import average
from plots.tables import CURVE, PARAMETERIZATION, RATE, RESULTS, WIDTH

PAPER = "Ours, after Everett et al. and Bordelon et al."
TABLES = ("everett/depth",)
LAYERS, BASE, NO_RULE = "model.layers", "base", "no_rule"
CURVES = {NO_RULE: "no rule", "half": r"$\alpha_L = 1/2$", "one": r"$\alpha_L = 1$"}
PLAIN = {NO_RULE: "no rule", "half": "alpha_L = 1/2", "one": "alpha_L = 1"}
EXPECTED = {NO_RULE: -0.5, "half": 0.0, "one": 0.0}  # the power of L in the best rate
LOOKS = {
    NO_RULE: {"color": style.BLACK, "marker": "o", "ls": ":"},
    "half": {"color": style.BLUE, "marker": "s", "ls": "--"},
    "one": {"color": style.VERMILION, "marker": "D", "ls": "-"},
}
HEADER = str(Finding("finding", "measured", "expected", "verdict"))


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The sweep's runs, depths in the column of widths; those of the base depth in every curve."""
    columns = (*RESULTS, PARAMETERIZATION, LAYERS, RATE)
    (table,) = tables.read_each(paths, {"results.csv": columns})
    table = table.assign(**{WIDTH: table[LAYERS]})
    base, own = table[table[CURVE] == BASE], table[table[CURVE] != BASE]
    curves = style.present(CURVES, own[CURVE]) or CURVES
    return pd.concat([own, *(base.assign(**{CURVE: curve}) for curve in curves)])


def fits(table: pd.DataFrame) -> Lines:
    """(parameterisation, curve) -> loss against rate by depth, of what has a finished run."""
    return lines_of(table, {PARAMETERIZATION: style.LABELS}, CURVES)


def findings(table: pd.DataFrame) -> list[Printed]:
    """The exponents of the best rate, what keeping the base depth's rate costs, and what a rule
    gains, by parameterisation and in the mean over them."""
    found = fits(table)
    curves = style.present(PLAIN, (curve for _, curve in found))
    result: list[Printed] = [
        "the optimum's error is from the spread over seeds; means are over parameterisations, "
        "which share seeds and data, ± the larger of their scatter and of what their errors imply",
        HEADER,
    ]
    for curve, label in curves.items():
        powers = {rule: exponent(sweeps) for (rule, name), sweeps in found.items() if name == curve}
        name = f"exponent of L in the best rate, {label}: "
        for rule, fit in powers.items():
            text = fit.text().replace("width", "depth")
            result.append(_power(name + style.LABELS.get(rule, rule), text, fit, curve))
        mean = _pooled([fit for fit in powers.values() if fit.law])
        result.append(_power(f"{name}mean", mean.text(2), mean, curve))
    for curve, label in curves.items():
        costs = [cost(sweeps) for (_, name), sweeps in found.items() if name == curve]
        known = [value for value in costs if math.isfinite(value)]
        lost = f"; {gone} diverge{'s' * (gone == 1)}" if (gone := costs.count(math.inf)) else ""
        text = f"{average(known).text()} nats (n = {len(known)} of {len(costs)}{lost})"
        result.append(Finding(f"cost of the base depth's rate at the deepest, {label}", text))
    for curve, label in curves.items():
        if curve != NO_RULE:
            result += _gains(found, curve, label)
    return [*result, *rates.basis(table, found, [PARAMETERIZATION, CURVE], "L")]


def _power(name: str, text: str, power: Estimate, curve: str) -> Finding:
    """Beside what is expected of a curve, which one of one's own has not."""
    if curve not in EXPECTED:
        return Finding(name, text)
    return Finding(name, text, f"{EXPECTED[curve]:g}", power.distance(EXPECTED[curve]), power)


def _pooled(values: Sequence[Estimate]) -> Estimate:
    """The mean of numbers with errors: scatter alone is small by chance where they are few."""
    mean = average([one.value for one in values])
    implied = math.hypot(*(one.error for one in values)) / max(len(values), 1)
    return Estimate(mean.value, float(np.fmax(mean.error, implied)), len(values))


def cost(sweeps: Mapping[int, RateSweep]) -> float:
    """The deepest model's loss at the best grid rate of the least deep one, above its own best; NaN
    where that rate was not run, infinite where it diverged."""
    shallow, deep = sweeps[min(sweeps)], sweeps[max(sweeps)]
    return rates.cost_of(deep, shallow.best.grid_value).value


def _gains(found: Lines, curve: str, label: str) -> list[Printed]:
    """Best loss without a rule minus with it at the deepest common depth."""
    gains: list[Estimate] = []
    result: list[Printed] = []
    for rule in dict.fromkeys(rule for rule, _ in found):
        pair = [found.get((rule, name), {}) for name in (NO_RULE, curve)]
        depth, gain = rates.gain(*pair)
        gains += [gain] if depth else []
        name = f"gain of {label} in the best loss: {style.LABELS.get(rule, rule)}"
        text = gain.text() + (f" nats at L = {depth}" if depth else "")
        result.append(Finding(name, text))
    name = f"gain of {label} in the best loss: mean"
    return [*result, Finding(name, f"{_pooled(gains).text()}, nats")]


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Losses and optima."""
    found = fits(table)
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    curves = style.present(CURVES, table[CURVE])
    depths = sorted(map(int, table[WIDTH].unique()))
    colors, looks = style.width_colors(depths), {**style.looks(list(curves)), **LOOKS}
    figure, axes = style.subplots(len(curves) + 1, len(rules), (2.5, 2.1))
    for row, (curve, label) in zip(axes, curves.items(), strict=False):
        for axis, (rule, title) in zip(row, rules.items(), strict=True):
            axis.sharex(axes[0, 0])
            axis.set_title(f"{title}, {label}", fontsize=9)
            if sweeps := found.get((rule, curve)):
                panels.draw_rates(axis, sweeps, colors)
            else:
                style.empty(axis, "no finished run")
            axis.tick_params(labelleft=axis is row[0])
        panels.loss_limits(row, [found.get((rule, curve), {}) for rule in rules])
        row[0].set_ylabel(style.LOSS_LABEL)
    for axis in axes[-2]:
        axis.set_xlabel("learning rate")
    for axis, rule in zip(axes[-1], rules, strict=True):
        for curve, label in curves.items():
            if sweeps := found.get((rule, curve)):
                fit = exponent(sweeps)
                power = f"$L^{{{fit.value:+.2f}}}$ ± {fit.error:.2f}" if fit.law else "no fit"
                panels.draw_optima(axis, sweeps, fit, label=f"{label}: {power}", **looks[curve])
        if axis.has_data():
            axis.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        style.octave_limits(axis, depths)
        axis.set_xlabel("depth L (blocks)")
    axes[-1, 0].set_ylabel("best learning rate")
    style.legend(figure, [*style.width_entries(colors, "L"), *style.STAR_ENTRIES])
    note = panels.optima_note(map(exponent, found.values()), "L").replace("width", "depth")
    figure.suptitle(
        f"learning rates against depth, without and with a rule for it\n{panels.RATE_NOTE}; {note}"
    )
    yield "depth", figure
