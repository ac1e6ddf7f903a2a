"""What training longer changes: Table 4's exponents, and standard against muP (ours).

    python -m plots everett/length [length.csv length_constants.csv figure_12_adam.csv figure_2.csv]

Left: the exponent of Adam's best global rate in the width after 200 steps (Figure 12's table), 800
and 3,200, and what the paper prints for 50,000. Right: the lowest loss of standard minus that of
muP, both with full alignment and constants, at one width, which the paper has below zero.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from plots import naming, rates, style, tables
from plots.everett import horizons
from plots.everett.entries import beside
from plots.everett.published import STEPS, TABLE_4
from plots.findings import HEADER, Estimate, Report
from plots.rates import Exponent
from plots.tables import CURVE, PARAMETERIZATION, WIDTH

LONGER = ("everett/length", "everett/length_constants")
TABLES = (*LONGER, "everett/figure_12_adam", "everett/figure_2_adam")
LENGTH, FAIR = "steps", "full_constants"
COLUMNS = (*tables.RESULTS, PARAMETERIZATION, WIDTH, tables.RATE, LENGTH)


class Data(NamedTuple):
    """Runs of a global rate, and of full alignment with constants; a run's length is its curve."""

    exponents: pd.DataFrame
    compared: pd.DataFrame


def read(paths: tables.Paths) -> Data:
    """The longer runs, with those of Figures 12 and 2 at the longer ones' widths."""
    sources = dict.fromkeys(("length.csv", "length_constants.csv", "figure_12.csv", "figure_2.csv"))
    long, constants, short, fair = tables.read_each(paths, dict.fromkeys(sources, COLUMNS))
    where = horizons.places(short)
    short = short[[where[curve][1] == "fixed" for curve in short[CURVE]]]
    fair = fair[fair[CURVE] == FAIR]

    def joined(longer: pd.DataFrame, shorter: pd.DataFrame) -> pd.DataFrame:
        both = pd.concat([shorter[shorter[WIDTH].isin(longer[WIDTH])], longer], ignore_index=True)
        return both.assign(**{CURVE: both[LENGTH].map("{:.0f}".format)})

    return Data(joined(long, short), joined(constants, fair))


def exponents(table: pd.DataFrame) -> dict[str, dict[int, Exponent]]:
    """Parameterisation -> steps -> the exponent of the best rate."""
    fits: dict[str, dict[int, Exponent]] = {}
    for (rule, steps), sweeps in _lines(table).items():
        fits.setdefault(rule, {})[int(steps)] = rates.exponent(sweeps)
    return {rule: dict(sorted(own.items())) for rule, own in fits.items()}


def gains(table: pd.DataFrame) -> dict[int, tuple[int, Estimate]]:
    """Steps -> (width, lowest loss of standard minus that of muP), at the largest common width."""
    sweeps_of, result = _lines(table), {}
    for steps in sorted({int(steps) for _, steps in sweeps_of}):
        pair = [sweeps_of.get((rule, str(steps)), {}) for rule in ("standard", "mup")]
        if by_width := rates.gains(*pair):
            result[steps] = max(by_width.items())
    return result


def findings(data: Data) -> Report:
    """Both, by steps."""
    yield horizons.EXPONENT_NOTE
    yield HEADER
    for rule, by_steps in exponents(data.exponents).items():
        published = TABLE_4["fixed"]["adam"].get(rule, math.nan)
        for steps, fit in by_steps.items():
            before = {n: Estimate(e.value, e.error) for n, e in by_steps.items() if n <= steps}
            name = f"{style.LABELS.get(rule, rule)}, {steps} steps: exponent of the best rate"
            yield beside(name, replace(fit, by_size=before), published)
    by_steps = gains(data.compared)
    for steps, (width, gain) in by_steps.items():
        before = {n: one for n, (_, one) in by_steps.items() if n <= steps}
        name = f"standard - muP, {steps} steps, D = {width} (nats)"
        yield replace(gain, by_size=before).judged(name, "loses", "below 0")
    yield from rates.basis(data.exponents, _lines(data.exponents), [PARAMETERIZATION, CURVE])
    yield from rates.basis(data.compared, _lines(data.compared), [PARAMETERIZATION, CURVE])


def _lines(table: pd.DataFrame) -> rates.Lines:
    """(parameterisation, steps) -> sweeps; the spread over seeds is that of runs of one length."""
    by_curve = rates.lines_of(table, {PARAMETERIZATION: style.LABELS, CURVE: {}}, {})
    return {(rule, steps): sweeps for (rule, steps, _), sweeps in by_curve.items()}


def draw(data: Data) -> style.Drawn:
    """Exponents, then losses, against steps."""
    figure, axes = style.subplots("what training longer changes, Adam (ours)", 1, 2, (4.2, 3.3))
    left, right = axes[0]
    fits = exponents(data.exponents)
    looks: Mapping[str, dict] = naming.looks(list(fits))
    for place, (rule, by_steps) in enumerate(fits.items()):
        shifted = [steps * 1.04 ** (place - 1.5) for steps in by_steps]  # bars side by side
        values = [fit.value for fit in by_steps.values()]
        errors = [fit.bar or 0.0 for fit in by_steps.values()]
        left.errorbar(shifted, values, errors, capsize=2, lw=1.2, ms=5, **looks[rule])
        if rule in TABLE_4["fixed"]["adam"]:
            left.plot(STEPS, TABLE_4["fixed"]["adam"][rule], mfc="white", ls="", **looks[rule])
    left.set(xscale="log", ylabel="exponent of the best rate in the width")
    point = [LENGTH, WIDTH, PARAMETERIZATION, tables.RATE]
    seeds = data.exponents.groupby(point)[tables.SEED].nunique().groupby(LENGTH).min()
    ticks = [f"{steps:.0f}\nn = {count}" for steps, count in seeds.items()]
    left.set_xticks([*seeds.index, STEPS], [*ticks, f"{STEPS}\npaper"])
    left.minorticks_off()
    by_steps = gains(data.compared)
    points = [(steps, gain.value, gain.bar or 0.0) for steps, (_, gain) in by_steps.items()]
    if by_steps:
        right.errorbar(*zip(*points, strict=True), color="black", marker="o", capsize=2)
        right.axhline(0, color="0.45", ls=":")
        width = max(width for width, _ in by_steps.values())
        right.set(xscale="log", ylabel=f"standard minus muP, D = {width} (nats)")
        ticks = [f"{steps}\nn = {gain.groups}" for steps, (_, gain) in by_steps.items()]
        right.set_xticks([*by_steps], ticks)
        right.minorticks_off()
    else:
        style.empty(right, "no finished run")
    for axis in (left, right):
        axis.set_xlabel("steps, and seeds of a point")
    entries = naming.rule_entries(naming.present(style.LABELS, fits))
    style.legend(figure, [*entries, ("the paper", style.HOLLOW)])
    yield "length", figure
