"""What C_WE = 1 and N_rescale = n^(-1/2) do one at a time in BART (Dinan et al., II, 2C).

    python -m plots dinan/ablations [results.csv]

Table of bart_span_denoise/sweeps/ablations.yaml. Evaluation loss against the global learning rate:
the standard strategy with either or both, the neural-tangent one without either; then the lowest
losses. What is exchanged is judged by seed, each strategy at its best rate. The paper changes both
and the relative rates at once, and has no number to compare.
"""

from collections.abc import Mapping

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.findings import HEADER, Finding, Report
from plots.rates import RateSweep
from plots.statistics import differences, mean
from plots.tables import CURVE, WIDTH, TableError

TABLES = ("dinan/ablations",)
STANDARD, SCALED = "standard", "neural_tangent"
LABELS = {
    "standard": "standard",
    "standard_rescale": "standard, N_rescale = n^(-1/2)",
    "standard_c_we": "standard, C_WE = 1",
    "standard_both": "standard, both",
    "neural_tangent": "neural-tangent",
    "neural_tangent_rescale": "neural-tangent, N_rescale = 1",
    "neural_tangent_c_we": "neural-tangent, C_WE = 0.02^2",
}
# (what, curve without it, curve with it): either strategy with and without C_WE = 1 and N_rescale,
# and what is left between standard with both and neural-tangent.
EXCHANGES = (
    ("C_WE = 1, in standard", "standard", "standard_c_we"),
    ("N_rescale, in standard", "standard", "standard_rescale"),
    ("both, in standard", "standard", "standard_both"),
    ("C_WE = 1, in neural-tangent", "neural_tangent_c_we", "neural_tangent"),
    ("N_rescale, in neural-tangent", "neural_tangent_rescale", "neural_tangent"),
    ("relative rates, with both", "standard_both", "neural_tangent"),
    ("all three", "standard", "neural_tangent"),
)
LOOKS = {
    curve: {"color": color, "marker": marker, "ms": 4}
    for curve, color, marker in zip(LABELS, style.PALETTE, "os^Dos^", strict=False)
}


def read(paths: tables.Paths) -> pd.DataFrame:
    """The table's runs, of one width."""
    rows = tables.read_rates(paths, LABELS)
    if rows[WIDTH].nunique() > 1:
        choice = f"--where {WIDTH}={rows[WIDTH].min():g}"
        raise TableError(f"{paths[0]}: several widths; expected one: choose it with {choice}")
    return rows


def fits(rows: pd.DataFrame) -> Mapping[str, RateSweep]:
    """Curve -> loss against rate, with the best rate, of what has a finished run."""
    lines = rates.curve_sweeps(rows, naming.present(LABELS, rows[CURVE]))
    return {curve: sweep for curve, sweeps in lines.items() for sweep in sweeps.values()}


def findings(rows: pd.DataFrame) -> Report:
    """The best rate and lowest loss of every curve, then what each exchange gains."""
    sweeps_of = fits(rows)
    lines = {(curve,): {sweep.width: sweep} for curve, sweep in sweeps_of.items()}
    yield "gains are differences by seed of the final loss, each at its best rate"
    yield from rates.basis(rows, lines, [CURVE], "n")
    yield HEADER
    for curve, sweep in sweeps_of.items():
        lowest = f"{mean(sweep.ended).text(sign='')} at lr = {sweep.best.grid_value:g}"
        yield Finding(f"{LABELS[curve]}: lowest loss (nats)", lowest)
    for what, before, after in EXCHANGES:
        if {before, after} <= sweeps_of.keys():
            gain = mean(differences(sweeps_of[before].ended, sweeps_of[after].ended))
            verdict = gain.claimed_gain().replace("disagrees", "harms").replace("agrees", "helps")
            name = f"gain of {what} (nats)"
            yield Finding(name, gain.text(), "no number", verdict, gain)


def formula(label: str) -> str:
    """A label with its symbols as they are printed."""
    signs = {"C_WE": "C_{WE}", "N_rescale": "N_{rescale}", "n^(-1/2)": "n^{-1/2}", "^2": "^2"}
    for text, math in signs.items():
        label = label.replace(text, f"${math}$")
    return label


def draw(rows: pd.DataFrame) -> style.Drawn:
    """A panel of rates for each strategy with its exchanges, and one of the lowest losses."""
    lines = fits(rows)
    title = "word embeddings and logits, exchanged one at a time"
    figure, axes = style.subplots(title, 1, 3, (3.4, 3.1))
    losses, best = axes[0][:2], axes[0][2]
    panels.loss_limits(losses, [{0: sweep} for sweep in lines.values()])
    for axis, strategy in zip(losses, (STANDARD, SCALED), strict=True):
        for curve in (curve for curve in lines if curve.startswith(strategy)):
            stable, at, look = lines[curve].stable, lines[curve].best, LOOKS[curve]
            axis.plot(list(stable), list(stable.values()), lw=1.1, **look)
            axis.plot(at.grid_value, at.loss, color=look["color"], **style.STAR)
            value = mean(lines[curve].ended)
            best.errorbar(value.value, formula(LABELS[curve]), xerr=value.bar, capsize=2, **look)
        axis.set_xscale("log", base=2)
        axis.set(title=style.STRATEGIES[strategy], xlabel="learning rate lr")
    losses[0].set_ylabel(style.VALIDATION_LABEL)
    style.legend(figure, [(formula(LABELS[curve]), LOOKS[curve]) for curve in lines])
    best.invert_yaxis()
    best.set(title="best rate of each", xlabel=style.VALIDATION_LABEL)
    yield "bart_ablations", figure
