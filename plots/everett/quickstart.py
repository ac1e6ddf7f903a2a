"""The quickstart: does the best learning rate move with width, and does muP hold it still?

    python -m plots everett/quickstart [results.csv]

Loss against learning rate for four widths, standard and muP, and how the optimum moves. What is
expected of the findings are bands for this small sweep, not the paper's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from measure.fits import Optimum, PowerLaw, optimum, power_law
from plots import style, tables
from plots.findings import Finding, Printed
from plots.tables import CURVE, LOSS, RATE, WIDTH, TableError

TABLES = ("everett/quickstart",)
STANDARD, MUP = "standard_global", "mup_full"
TITLES = {
    STANDARD: "standard, one global rate",
    MUP: "muP, full-alignment exponents",
}
TUNED_AT, USED_AT = 64, 256
HEADER = str(Finding("finding", "measured", "expected"))


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The sweep's table; TableError if a curve lacks one of the two widths that are compared."""
    tables.expect(paths, "results.csv")
    path = paths[0]
    table = tables.read(path, (*tables.RESULTS, WIDTH, RATE))
    for curve in (STANDARD, MUP):
        best = optima(table, curve)
        for width in (TUNED_AT, USED_AT):
            if width not in best:
                raise TableError(
                    f"{path}: no finished run of curve {curve!r} at {WIDTH} {width}; "
                    "finish the sweep first"
                )
    return table


def losses(table: pd.DataFrame, curve: str, width: int) -> dict[float, float]:
    """Learning rate -> mean final loss over seeds, infinite where a seed diverged."""
    return tables.mean_losses(table[(table[CURVE] == curve) & (table[WIDTH] == width)], RATE)


def optima(table: pd.DataFrame, curve: str) -> dict[int, Optimum]:
    """Width -> optimum of the learning rate."""
    widths = sorted(table[table[CURVE] == curve][WIDTH].unique())
    found = {int(width): losses(table, curve, width) for width in widths}
    return {w: optimum(row) for w, row in found.items() if any(map(math.isfinite, row.values()))}


def exponent(best: Mapping[int, Optimum]) -> PowerLaw:
    """The power of width in the optimal learning rate."""
    return power_law(list(best), [entry.value for entry in best.values()])


def transfer_penalty(table: pd.DataFrame, curve: str) -> float:
    """Loss at USED_AT with the best grid rate of TUNED_AT, above the loss with its own; NaN if
    that rate was not run there."""
    best = optima(table, curve)
    tuned = best[TUNED_AT].grid_value
    return losses(table, curve, USED_AT).get(tuned, math.nan) - best[USED_AT].loss


def seed_spread(table: pd.DataFrame, curve: str) -> tuple[float, int]:
    """(standard deviation of the final loss over seeds, number of points it is pooled over)."""
    rows = table[(table[CURVE] == curve) & table[LOSS].notna()]
    groups = rows.groupby([WIDTH, RATE])[LOSS]
    variances = groups.var()[groups.count() > 1]
    return math.sqrt(variances.mean()) if len(variances) else math.nan, len(variances)


def findings(table: pd.DataFrame) -> list[Printed]:
    """The quickstart's claims, measured, and what they rest on."""
    laws = {curve: exponent(optima(table, curve)) for curve in (STANDARD, MUP)}
    penalties = {curve: transfer_penalty(table, curve) for curve in (STANDARD, MUP)}
    notes = {curve: f" ± {law.error:.2f} (n = {law.n} widths)" for curve, law in laws.items()}
    name = "exponent of the optimal rate in width, "
    transfer = f"loss at D={USED_AT} with the rate of D={TUNED_AT}, "
    change = laws[MUP].exponent - laws[STANDARD].exponent
    result = [
        HEADER,
        _expected(name + "standard", laws[STANDARD].exponent, -1.3, -0.5, notes[STANDARD]),
        _expected(name + "muP", laws[MUP].exponent, -0.3, 0.3, notes[MUP]),
        _expected("muP minus standard", change, 0.5, math.inf),
        _expected(transfer + "standard", penalties[STANDARD], 0.05, math.inf, " nats"),
        _expected(transfer + "muP", penalties[MUP], -math.inf, 0.05, " nats"),
    ]
    for curve in (STANDARD, MUP):
        spread, n = seed_spread(table, curve)
        result.append(f"{TITLES[curve]}: final loss varies by {spread:.3f} nats over seeds "
                      f"(standard deviation, pooled over {n} points with two seeds)")
        edges = [str(width) for width, best in optima(table, curve).items() if not best.inside]
        if edges:
            note = f"no parabola at width {', '.join(edges)}; grid point used"
            result.append(f"{TITLES[curve]}: {note}")
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
    """Losses of standard and of muP against rate, and the optima against width."""
    import seaborn as sns

    figure, axes = style.subplots(1, 3, (11 / 3, 3.4))
    axes = axes[0]
    colors = style.width_colors(sorted(table[WIDTH].unique()))
    for axis, curve in zip(axes, (STANDARD, MUP)):
        _draw_losses(axis, table, curve, colors)
    axes[1].sharey(axes[0])
    axes[0].set_ylim(*_loss_limits(table))
    axes[0].set_ylabel("evaluation loss (nats per token)")
    axes[0].legend(title="width D", fontsize=7, title_fontsize=7)
    _draw_optima(axes[2], table, sns.color_palette("deep"))
    yield "quickstart", figure


def _draw_losses(axis, table: pd.DataFrame, curve: str, colors: Mapping[int, tuple]) -> None:
    for width, best in optima(table, curve).items():
        row, color = losses(table, curve, width), colors[width]
        axis.plot(list(row), list(row.values()), "o-", ms=3, lw=1.2, color=color, label=width)
        axis.plot(best.value, best.loss, "*", ms=11, color=color, mec="black", mew=0.5, zorder=5)
    axis.set_xscale("log", base=2)
    axis.set_title(TITLES[curve])
    axis.set_xlabel("learning rate (star: optimum)")


def _loss_limits(table: pd.DataFrame) -> tuple[float, float]:
    """From just below the best loss to where curves leave the picture."""
    best = [entry.loss for curve in (STANDARD, MUP) for entry in optima(table, curve).values()]
    return min(best) - 0.05, max(best) + 0.6


def _draw_optima(axis, table: pd.DataFrame, palette: Sequence[tuple]) -> None:
    for curve, color in zip((STANDARD, MUP), palette):
        best = optima(table, curve)
        law = exponent(best)
        widths = sorted(best)
        axis.plot(widths, [best[width].value for width in widths], "*", ms=10, color=color)
        label = f"{TITLES[curve].partition(',')[0]}: D^({law.exponent:+.2f} ± {law.error:.2f})"
        axis.plot(widths, [law(width) for width in widths], "-", lw=1.2, color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("width D")
    axis.set_ylabel("optimal learning rate")
    axis.set_title("how the optimum moves")
    axis.legend(fontsize=7)
