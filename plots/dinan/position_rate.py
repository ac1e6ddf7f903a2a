"""Is the positional embedding's rate what neural-tangent gains over standard, as Part II, 1E of
Dinan et al. says of their runs?

    python -m plots dinan/position_rate [results.csv]

Left: evaluation loss of a ViT against the global learning rate, mapped to that of the blocks'
matrices; standard, standard with n times the rate of one tensor, neural-tangent, and
neural-tangent with its positional embedding at the blocks' rate. Right: the lowest losses. Drawn
images, each seen once; all runs have one decay per step.
"""

import functools
from collections.abc import Mapping

import pandas as pd

from plots import naming, rates, style, tables
from plots.dinan.published import BULK_EXPONENTS
from plots.findings import HEADER, Finding, Report
from plots.rates import Sweeps
from plots.tables import CURVE, WIDTH

TABLES = ("dinan/position_rate",)
LABELS = {
    "standard": "standard",
    "position": "standard, n times the positions' rate",
    "head_bias": "standard, n times the bias' rate",
    "neural_tangent": "neural-tangent",
    "blocks_alone": "neural-tangent, positions at the blocks' rate",
}
SCALED = ("neural_tangent", "blocks_alone")
# (curve, another one, what the difference of their losses is if the positional rate is the gain)
CLAIMS = (
    ("standard", "neural_tangent", "gains", "above 0"),
    ("standard", "position", "gains", "above 0"),
    ("position", "neural_tangent", "equal", "about 0"),
    ("head_bias", "standard", "equal", "about 0"),
    ("blocks_alone", "standard", "equal", "about 0"),
)
read = functools.partial(tables.read_rates, known=LABELS)


def fits(rows: pd.DataFrame) -> Mapping[str, Sweeps]:
    """Curve -> width -> loss against rate."""
    return rates.curve_sweeps(rows, naming.present(LABELS, rows[CURVE]))


def findings(rows: pd.DataFrame) -> Report:
    """The lowest loss of every curve, then the differences that say what gains."""
    sweeps_of = fits(rows)
    lines = {(LABELS[name],): sweeps for name, sweeps in sweeps_of.items()}
    named = rows.assign(**{CURVE: rows[CURVE].map(LABELS)})
    yield from rates.basis(named, lines, [CURVE], "n")
    yield HEADER
    for name, sweeps in sweeps_of.items():
        for width, sweep in sweeps.items():
            lowest = f"{sweep.lowest.text(sign='')} at {rates.optimum_text(sweep)}"
            yield Finding(f"n = {width}: lowest loss of {LABELS[name]} (nats)", lowest)
    for one, other, kind, words in CLAIMS:
        if one in sweeps_of and other in sweeps_of:
            name = f"{LABELS[one]} - {LABELS[other]} (nats)"
            yield rates.compared(name, sweeps_of[one], sweeps_of[other], kind, words, "n")


def draw(rows: pd.DataFrame) -> style.Drawn:
    """Loss against rate, and the lowest losses beside each other, at the largest width."""
    lines, width = fits(rows), int(rows[WIDTH].max())
    figure, axes = style.subplots(f"which tensor's rate gains, n = {width}", 1, 2, (3.9, 3.2))
    losses, lowest = axes[0]
    for place, (name, sweeps) in enumerate(lines.items()):
        if width not in sweeps:
            continue
        sweep, look = sweeps[width], {"color": style.PALETTE[place], "marker": style.SHAPES[place]}
        mapped = float(width) ** float(BULK_EXPONENTS["neural_tangent"]) if name in SCALED else 1.0
        points = {rate * mapped: loss for rate, loss in sweep.stable.items()}
        losses.plot(list(points), list(points.values()), lw=1.2, ms=4, **look)
        best = sweep.lowest
        label = LABELS[name].replace(", ", ",\n")
        lowest.errorbar(best.value, label, xerr=best.bar, capsize=2, ms=5, **look)
    losses.set_xscale("log", base=2)
    losses.set_xlabel("learning rate of the blocks' matrices")
    losses.set_ylabel("evaluation loss (nats/image)")
    lowest.invert_yaxis()
    lowest.tick_params(axis="y", labelsize=7.5)
    lowest.set_xlabel("lowest loss ± standard error (nats/image)")
    yield "position_rate", figure
