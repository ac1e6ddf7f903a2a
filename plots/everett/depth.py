"""Whether the best learning rate moves with depth, without and with a rule for it (ours).

    python -m plots everett/depth [results.csv]

A column per parameterisation; a row of loss against rate without a rule, with branches times
(L/L_b)^(-1/2) and times (L/L_b)^(-1), a line per depth; then the best rate against depth. At the
base depth L_b the three are one run. What is expected is derived at `param_groups.Everett`: both
rules hold the best rate still; without one, updates add up as L in a stream that grows as sqrt(L).
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.findings import Estimate, Finding, Report
from plots.rates import Lines, exponent, lines_of
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


def read(paths: tables.Paths) -> pd.DataFrame:
    """The sweep's runs, depths in the column of widths; those of the base depth in every curve."""
    columns = (*RESULTS, PARAMETERIZATION, LAYERS, RATE)
    (table,) = tables.read_each(paths, {"results.csv": columns})
    table = table.assign(**{WIDTH: table[LAYERS]})
    base, own = table[table[CURVE] == BASE], table[table[CURVE] != BASE]
    curves = naming.present(CURVES, own[CURVE]) or CURVES
    return pd.concat([own, *(base.assign(**{CURVE: curve}) for curve in curves)])


def fits(table: pd.DataFrame) -> Lines:
    """(parameterisation, curve) -> loss against rate by depth, of what has a finished run."""
    return lines_of(table, {PARAMETERIZATION: style.LABELS}, CURVES)


def findings(table: pd.DataFrame) -> Report:
    """The exponents of the best rate, what keeping the base depth's rate costs, and what a rule
    gains, by parameterisation and in the mean over them."""
    lines = fits(table)
    yield (
        "the optimum's error is from the spread over seeds; means are over parameterisations, "
        "which share seeds and data, ± the larger of their scatter and of what their errors imply"
    )
    yield HEADER
    for curve, label in naming.present(PLAIN, (curve for _, curve in lines)).items():
        own = {rule: sweeps for (rule, name), sweeps in lines.items() if name == curve}
        powers = [(style.LABELS.get(rule, rule), exponent(sweeps)) for rule, sweeps in own.items()]
        mean = _pooled([fit for _, fit in powers if math.isfinite(fit.value)])
        for who, fit in (*powers, ("mean", mean)):
            name = f"exponent of L in the best rate, {label}: {who}"
            text, expected = fit.text(2).replace("width", "depth"), EXPECTED.get(curve)
            known = () if expected is None else (f"{expected:g}", fit.distance(expected), fit)
            yield Finding(name, text, *known)
        costs = []
        for sweeps in own.values():
            shallow, deep = sweeps[min(sweeps)], sweeps[max(sweeps)]
            costs.append(rates.cost_of(deep, shallow.best.grid_value).value)
        known = [value for value in costs if math.isfinite(value)]
        gone = f"; {costs.count(math.inf)} diverged" if math.inf in costs else ""
        text = f"{average(known).text()} nats (n = {len(known)} of {len(costs)}{gone})"
        yield Finding(f"cost of the base depth's rate at the deepest, {label}", text)
        if curve != NO_RULE:
            gains = []
            for rule, sweeps in own.items():
                name = f"gain of {label} in the best loss: {style.LABELS.get(rule, rule)}"
                pair = lines.get((rule, NO_RULE), {}), sweeps
                finding = rates.compared(name, *pair, None, "ours", symbol="L")
                gains += [finding.estimate] if finding.estimate else []
                yield finding
            text = f"{_pooled(gains).text()}, nats"
            yield Finding(f"gain of {label} in the best loss: mean", text)
    yield from rates.basis(table, lines, [PARAMETERIZATION, CURVE], "L")


def _pooled(values: Sequence[Estimate]) -> Estimate:
    """The mean of numbers with errors: scatter alone is small by chance where they are few."""
    mean = average([one.value for one in values])
    implied = math.hypot(*(one.error for one in values)) / max(len(values), 1)
    return Estimate(mean.value, float(np.fmax(mean.error, implied)), len(values))


def draw(table: pd.DataFrame) -> style.Drawn:
    """Losses and optima."""
    lines = fits(table)
    rules = naming.present(style.LABELS, table[PARAMETERIZATION])
    curves = naming.present(CURVES, table[CURVE])
    depths = sorted(map(int, table[WIDTH].unique()))
    colors, looks = style.width_colors(depths), naming.looks(list(curves), LOOKS)
    title = "learning rates against depth, without and with a rule for it"
    figure, axes = style.subplots(title, len(curves) + 1, len(rules), (2.5, 2.1))
    for row, (curve, label) in zip(axes[:-1], curves.items(), strict=True):
        for axis, (rule, title) in zip(row, rules.items(), strict=True):
            axis.sharex(axes[0, 0])
            axis.set_title(f"{title}, {label}", fontsize=9)
            panels.draw_rates(axis, lines.get((rule, curve), {}), colors)
            axis.tick_params(labelleft=axis is row[0])
        panels.loss_limits(row, [lines.get((rule, curve), {}) for rule in rules])
        row[0].set_ylabel(style.LOSS_LABEL)
    for axis in axes[-2]:
        axis.set_xlabel("learning rate")
    for axis, rule in zip(axes[-1], rules, strict=True):
        for place, (curve, label) in enumerate(curves.items()):
            if sweeps := lines.get((rule, curve)):
                fit = exponent(sweeps)
                label = f"{label}: {panels.power_text(fit, 'L')}"
                shift = 1.06 ** (place - 1)  # bars side by side
                panels.draw_optima(axis, sweeps, fit, shift, label=label, **looks[curve])
        if axis.has_data():
            axis.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        axis.set_xlabel("depth L (blocks)")
    style.octave_limits(axes[-1], depths)
    axes[-1, 0].set_ylabel("best learning rate")
    entries = [*style.width_entries(colors, "L"), *style.rate_entries(lines.items())]
    style.legend(figure, entries)
    yield "depth", figure
