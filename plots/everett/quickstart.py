"""The quickstart: does the best learning rate move with width, and does muP hold it still?

    python -m plots everett/quickstart [results.csv]

Loss against learning rate for four widths, standard and muP, and how the optimum moves. What is
expected of the findings are bands for this small sweep, not the paper's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import panels, rates, style, tables
from plots.findings import Estimate, Finding, Printed
from plots.rates import RateSweep, exponent
from plots.tables import CURVE, LOSS, RATE, WIDTH, TableError

TABLES = ("everett/quickstart",)
STANDARD, MUP = "standard_global", "mup_full"
TITLES = {
    STANDARD: "standard, one global rate",
    MUP: "muP, full-alignment exponents",
}
RULES = {STANDARD: "standard", MUP: "mup"}  # whose colours the curves have
TUNED_AT, USED_AT = 64, 256
HEADER = str(Finding("finding", "measured", "expected"))


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The sweep's table; TableError if a curve lacks one of the two widths that are compared."""
    (table,) = tables.read_each(paths, {"results.csv": (*tables.RESULTS, WIDTH, RATE)})
    for curve in (STANDARD, MUP):
        found = sweeps(table, curve)
        for width in (TUNED_AT, USED_AT):
            if width not in found:
                raise TableError(
                    f"{paths[0]}: no finished run of curve {curve!r} at {WIDTH} {width}; finish "
                    f"the sweep, with no --where that leaves out {TUNED_AT} or {USED_AT}"
                )
    return table


def sweeps(table: pd.DataFrame, curve: str) -> dict[int, RateSweep]:
    """Width -> sweep; its optimum is the vertex through the best rate and its neighbours."""
    noise, _ = seed_spread(table, curve)
    return rates.rate_sweeps(table[table[CURVE] == curve], noise, window=None)


def transfer_penalty(table: pd.DataFrame, curve: str) -> float:
    """Loss at USED_AT with the best grid rate of TUNED_AT, above the loss with its own; NaN if
    that rate was not run there."""
    tuned, used = (sweeps(table, curve)[width] for width in (TUNED_AT, USED_AT))
    return rates.cost_of(used, tuned.best.grid_value).value


def seed_spread(table: pd.DataFrame, curve: str) -> tuple[float, int]:
    """(standard deviation of the final loss over seeds, number of points it is pooled over)."""
    rows = table[(table[CURVE] == curve) & table[LOSS].notna()]
    groups = rows.groupby([WIDTH, RATE])[LOSS]
    variances = groups.var()[groups.count() > 1]
    return math.sqrt(variances.mean()) if len(variances) else math.nan, len(variances)


def findings(table: pd.DataFrame) -> list[Printed]:
    """The quickstart's claims, measured, and what they rest on."""
    fits = {curve: exponent(sweeps(table, curve)) for curve in (STANDARD, MUP)}
    penalties = {curve: transfer_penalty(table, curve) for curve in (STANDARD, MUP)}
    notes = {curve: f" ± {fit.error:.2f} (n = {fit.widths} widths)" for curve, fit in fits.items()}
    name = "exponent of the optimal rate in width, "
    transfer = f"loss at D={USED_AT} with the rate of D={TUNED_AT}, "
    change = fits[MUP].value - fits[STANDARD].value
    result: list[Printed] = [
        HEADER,
        _expected(name + "standard", fits[STANDARD].value, -1.3, -0.5, notes[STANDARD]),
        _expected(name + "muP", fits[MUP].value, -0.3, 0.3, notes[MUP]),
        _expected("muP minus standard", change, 0.5, math.inf),
        _expected(transfer + "standard", penalties[STANDARD], 0.05, math.inf, " nats"),
        _expected(transfer + "muP", penalties[MUP], -math.inf, 0.05, " nats"),
    ]
    for curve, title in style.present(TITLES, table[CURVE]).items():
        spread, n = seed_spread(table, curve)
        result.append(
            f"{title}: final loss varies by {spread:.3f} nats over seeds "
            f"(standard deviation, pooled over {n} points with two seeds)"
        )
        edges = [str(width) for width, one in sweeps(table, curve).items() if not one.best.inside]
        if edges:
            result.append(f"{title}: no parabola at width {', '.join(edges)}; grid point used")
        if curve not in TITLES:
            fit = exponent(sweeps(table, curve))
            result.append(Finding(name + title, Estimate(fit.value, fit.error).text()))
    return result


def _expected(name: str, value: float, low: float, high: float, note: str = "") -> Finding:
    """A measured number and the band it was expected in."""
    band = f"[{low:g}, {high:g}]"
    if math.isinf(high):
        band = f"> {low:g}"
    elif math.isinf(low):
        band = f"< {high:g}"
    met = "as expected" if low <= value <= high else "MISSED"
    return Finding(name, f"{value:+.3f}{note}", band, met)


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Losses against rate, a panel per curve, and the optima against width."""
    titles = style.present(TITLES, table[CURVE])
    found = {curve: sweeps(table, curve) for curve in titles}
    figure, axes = style.subplots(1, len(titles) + 1, (11 / 3, 3.2))
    colors = style.width_colors(sorted(map(int, table[WIDTH].unique())))
    for axis, (curve, title) in zip(axes[0], titles.items(), strict=False):
        panels.draw_rates(axis, found[curve], colors)
        axis.sharey(axes[0, 0])
        axis.set_title(title)
        axis.set_xlabel("learning rate")
    panels.loss_limits(axes[0, :1], list(found.values()))
    axes[0, 0].set_ylabel("evaluation loss (nats per token)")
    looks = dict(
        zip(
            titles, style.looks([RULES.get(curve, curve) for curve in titles]).values(), strict=True
        )
    )
    for (curve, title), line in zip(
        titles.items(), ("-", "--", "-.", ":") * len(titles), strict=False
    ):
        fit = exponent(found[curve])
        power = f"$D^{{{fit.value:+.2f}}}$ ± {fit.error:.2f}" if fit.law else "no fit"
        label = f"{title.partition(',')[0]}: {power}"
        panels.draw_optima(axes[0, -1], found[curve], fit, label=label, ls=line, **looks[curve])
    style.octave_limits(axes[0, -1], sorted(colors))
    axes[0, -1].set(xlabel="width D", ylabel="optimal learning rate")
    axes[0, -1].set_title("how the optimum moves")
    axes[0, -1].legend(fontsize=7)
    style.legend(figure, [*style.width_entries(colors), *style.STAR_ENTRIES])
    note = panels.optima_note(map(exponent, found.values()))
    figure.suptitle(f"learning rates against width\n{panels.RATE_NOTE}; {note}")
    yield "quickstart", figure
