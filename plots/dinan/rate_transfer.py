"""Whether each strategy's best learning rate is that of every width, which the paper's
meta-principle predicts and no figure of it shows.

    python -m plots dinan/rate_transfer [results.csv]

Evaluation loss of a ViT against the global learning rate, a line per width and a panel per
strategy, then the best rates against width, with the power of the width that follows from the
strategies' relative rates. Drawn images, each seen once; all runs have one decay per step.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.dinan.published import BULK_EXPONENTS, TRANSFER_EXPONENTS, VIT_CLAIMS
from plots.findings import HEADER, Estimate, Finding, Report
from plots.rates import RateSweep, Sweeps, exponent
from plots.tables import CURVE

TABLES = ("dinan/rate_transfer",)
read = functools.partial(tables.read_rates, known=style.STRATEGIES)


def fits(rows: pd.DataFrame) -> Mapping[str, Sweeps]:
    """Strategy -> width -> loss against rate with the optimum."""
    return rates.curve_sweeps(rows, naming.present(style.STRATEGIES, rows[CURVE]))


def findings(rows: pd.DataFrame) -> Report:
    """Per strategy: the best rates, their power of the width and what transfer costs; then the
    lowest losses beside each other."""
    lines = fits(rows)
    yield (
        "derived: relative rates of (1.108)-(1.116) and footnote 26 leave no power of the width to "
        "lr*; without them it is that of the blocks' matrices, (1.110)-(1.115)"
    )
    yield from rates.basis(rows, {(name,): sweeps for name, sweeps in lines.items()}, [CURVE], "n")
    yield (
        "lowest losses beside each other: the paper compares strategies by accuracy, each with a "
        "decay of its own; here weight decay was not searched for and is the same per step in all"
    )
    yield HEADER
    for strategy, sweeps in lines.items():
        name, power = style.STRATEGIES[strategy], TRANSFER_EXPONENTS[strategy]
        best = ", ".join(f"{n}: {rates.optimum_text(sweep)}" for n, sweep in sweeps.items())
        lowest = ", ".join(f"{n}: {sweep.lowest.compact()}" for n, sweep in sweeps.items())
        law = f"{name}: exponent of the width in lr*"
        cost = f"{name}: cost of the smallest n's lr* at the largest"
        yield Finding(f"{name}: lr* by width", best or "every run diverged")
        yield exponent(sweeps).finding(law, float(power), f"{power} derived", 2)
        yield Finding(f"{name}: lowest loss by width", lowest or "every run diverged")
        yield Finding(cost, rates.transfer_text(sweeps))
    one, other = (lines.get(strategy, {}) for strategy in ("standard", "neural_tangent"))
    yield from (_blocks(n, one[n], other[n]) for n in sorted(one.keys() & other.keys()))
    for better, worse in VIT_CLAIMS:
        pair = lines.get(better, {}), lines.get(worse, {})
        if width := max(rates.gains(*pair), default=0):
            label = f"{style.STRATEGIES[better]} - {style.STRATEGIES[worse]}"
            name = f"n = {width}: {label} (nats)"
            yield rates.compared(name, *pair, "loses", "below 0", symbol="n")


def _blocks(width: int, standard: RateSweep, scaled: RateSweep) -> Finding:
    """How far apart the best rates of the blocks' matrices lie (II 1E: "essentially equal")."""
    power = float(BULK_EXPONENTS["neural_tangent"])
    gap = Estimate(math.log2(scaled.best.value) + power * math.log2(width), scaled.best.error)
    gap -= Estimate(math.log2(standard.best.value), standard.best.error)
    name = f"n = {width}: blocks' lr*, neural-tangent / standard (octaves)"
    if standard.best.at_edge or scaled.best.at_edge:
        gap = replace(gap, error=math.nan)
    return gap.judged(name, "equal", "0", 2)


def draw(rows: pd.DataFrame) -> style.Drawn:
    """A panel of rates per strategy, and one of the optima."""
    looks = style.STRATEGY_LOOKS
    lines = [
        panels.Line(style.STRATEGIES[one], sweeps, looks[one], float(TRANSFER_EXPONENTS[one]))
        for one, sweeps in fits(rows).items()
    ]
    loss = "evaluation loss (nats/image)"
    figure = panels.transfer("learning-rate transfer", lines, "n", "width n", "learning rate", loss)
    yield "rate_transfer", figure
