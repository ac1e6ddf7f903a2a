"""Whether the best learning rate depends on the head dimension (Bordelon et al., Figure 2a).

    python -m plots bordelon/rate_transfer [results.csv]

Evaluation loss against the learning rate eta_0, a line per head dimension N and a panel per
alpha_A, then the best rate against N. The paper has no power of N; dotted lines are chance.
"""

from collections.abc import Iterator

import pandas as pd

from plots import panels, rates, tables
from plots.bordelon import scans
from plots.bordelon.scans import ALPHA, ALPHA_LOOKS, CHANCE, HEAD_DIM
from plots.findings import HEADER, Finding, Report
from plots.rates import Sweeps, exponent
from plots.tables import CURVE, RATE, RESULTS, WIDTH

TABLES = ("bordelon/figure_2",)


def read(paths: tables.Paths) -> pd.DataFrame:
    """The table's runs, N in the column of widths and alpha_A as curves: what rate sweeps read."""
    (table,) = tables.read_each(paths, {"results.csv": [*RESULTS, ALPHA, HEAD_DIM, RATE]})
    table = tables.only(table, paths[0], ALPHA, ALPHA_LOOKS)
    return table.assign(**{WIDTH: table[HEAD_DIM], CURVE: table[ALPHA].map(scans.alpha_name)})


def fits(rows: pd.DataFrame) -> dict[float, Sweeps]:
    """alpha_A, falling -> N -> loss against rate with the optimum."""
    names = {alpha: scans.alpha_name(alpha) for alpha in scans.alphas(rows)}
    sweeps = rates.curve_sweeps(rows, names.values())
    return {alpha: sweeps[name] for alpha, name in names.items()}


def findings(rows: pd.DataFrame) -> Report:
    """Per alpha_A: the best rates, their exponent of N, and what transfer costs."""
    yield HEADER
    sweeps_of = fits(rows)
    for alpha, sweeps in sweeps_of.items():
        place = scans.alpha_name(alpha)
        best = ", ".join(f"{n}: {rates.optimum_text(sweep)}" for n, sweep in sweeps.items())
        cost = f"{place}: cost of the smallest N's rate at the largest N"
        yield Finding(f"{place}: best rate by N", best or "every run diverged")
        yield exponent(sweeps).finding(f"{place}: exponent of N in the best rate", 0.0, digits=2)
        yield Finding(cost, rates.transfer_text(sweeps), "about 0")
    lines = {(scans.alpha_name(alpha),): sweeps for alpha, sweeps in sweeps_of.items()}
    yield from rates.basis(rows, lines, [CURVE], "N")


def draw(rows: pd.DataFrame) -> Iterator[tuple]:
    """A panel of rates per alpha_A and one of the optima."""
    lines = [
        panels.Line(scans.alpha_title(alpha), sweeps, ALPHA_LOOKS[alpha], 0.0)
        for alpha, sweeps in fits(rows).items()
    ]
    title, loss = "learning rates against head dimension", "evaluation loss (nats/image)"
    figure = panels.transfer(title, lines, "N", "head dimension N", r"learning rate $\eta_0$", loss)
    for axis in figure.axes[: len(lines)]:
        axis.axhline(CHANCE, **scans.CHANCE_LOOK)
        axis.set_ylim(top=min(max(axis.get_ylim()[1], 1.02 * CHANCE), 1.05 * CHANCE))
    yield "figure_2a_rate_transfer", figure
