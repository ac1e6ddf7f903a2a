"""Whether the best learning rate depends on the head dimension (Bordelon et al., Figure 2a).

    python -m plots bordelon/rate_transfer [results.csv]

Evaluation loss against the learning rate eta_0, a line per head dimension N and a panel per
alpha_A, then the best rate against N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import panels, rates, style, tables
from plots.bordelon import scans
from plots.bordelon.scans import ALPHA, ALPHA_LOOKS, CHANCE, HEAD_DIM
from plots.findings import HEADER, Finding, Printed
from plots.rates import RateSweep, exponent
from plots.tables import CURVE, RATE, RESULTS, STATUS, WIDTH, TableError

TABLES = ("bordelon/figure_2",)
LOSS_LABEL = "evaluation loss (nats/image)"


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The table's runs, N in the column of widths and alpha_A as curves: what rate sweeps read.

    TableError for a table that lacks a column or has two runs at one rate.
    """
    (table,) = tables.read_each(paths, {"results.csv": [*RESULTS, ALPHA, HEAD_DIM, RATE]})
    path = paths[0]
    table = tables.only(table, path, ALPHA, ALPHA_LOOKS)
    rows = table.assign(**{WIDTH: table[HEAD_DIM], CURVE: table[ALPHA].map(scans.alpha_title)})
    if rows[STATUS].eq("failed").all():
        raise TableError(f"{path}: every run failed; see their log.txt and run the sweep again")
    return rows


def fits(rows: pd.DataFrame) -> dict[float, dict[int, RateSweep]]:
    """alpha_A, falling -> N -> loss against rate with the optimum; errors rest on the spread over
    seeds at the same N where enough is known of it, as small ones spread most."""
    titles = {alpha: scans.alpha_title(alpha) for alpha in scans.alphas(rows)}
    found = rates.curve_sweeps(rows, titles.values())
    return {alpha: found[title] for alpha, title in titles.items()}


def findings(rows: pd.DataFrame) -> list[Printed]:
    """Per alpha_A: the best rates, their exponent of N, and what transfer costs."""
    fitted = fits(rows)
    result = [rates.noise_line(rows, "both alpha_A", "N"), HEADER]
    for alpha, sweeps in fitted.items():
        place = scans.alpha_name(alpha)
        best = ", ".join(f"{n}: {rates.optimum_text(sweep)}" for n, sweep in sweeps.items())
        fit = exponent(sweeps)
        result += [
            Finding(f"{place}: best rate by N", best or "every run diverged"),
            Finding(
                f"{place}: exponent of N in the best rate", fit.text(), "0", fit.distance(0.0), fit
            ),
            Finding(
                f"{place}: cost of the smallest N's rate at the largest N",
                rates.transfer_text(sweeps),
                "about 0",
            ),
        ]
    named = {(scans.alpha_title(alpha),): sweeps for alpha, sweeps in fitted.items()}
    notes = [*rates.lost_lines(rows, [CURVE], "N"), *rates.edge_lines(named, "N")]
    return [*result, *map(scans.plain, notes)]


def draw(rows: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """A panel of rates per alpha_A and one of the optima."""
    fitted = fits(rows)
    head_dims = sorted({n for sweeps in fitted.values() for n in sweeps})
    colors = style.width_colors(head_dims)
    figure, axes = style.subplots(1, len(fitted) + 1, (3.6, 3.2))
    note = panels.optima_note(map(exponent, fitted.values()), "N").replace("width", "N")
    figure.suptitle(
        f"learning rates against head dimension\n{panels.RATE_NOTE}; {note}; "
        "dotted: no power of N (the paper)"
    )
    for axis, (alpha, sweeps) in zip(axes[0], fitted.items(), strict=False):
        axis.sharex(axes[0][0])
        axis.sharey(axes[0][0])
        panels.draw_rates(axis, sweeps, colors)
        axis.axhline(CHANCE, color="black", ls=":", lw=1)
        axis.set_title(scans.alpha_title(alpha))
        axis.set_xlabel(r"learning rate $\eta_0$")
    axes[0][0].set_ylabel(LOSS_LABEL)
    axes[0][0].set_ylim(top=min(axes[0][0].get_ylim()[1], 1.05 * CHANCE))
    axis = axes[0][-1]
    for alpha, sweeps in fitted.items():
        fit = exponent(sweeps)
        power = rf": $N^{{{fit.value:+.2f} \pm {fit.error:.2f}}}$" if fit.law else ""
        label = scans.alpha_title(alpha) + power
        panels.draw_optima(axis, sweeps, fit, label=label, **ALPHA_LOOKS[alpha])
        if sweeps:
            panels.draw_published(axis, sweeps, 0.0, color=ALPHA_LOOKS[alpha]["color"])
    if head_dims:
        style.octave_limits(axis, head_dims)
    axis.set(title="best rate", xlabel="head dimension N", ylabel=r"best learning rate $\eta_0$")
    axis.legend(fontsize=7)
    chance = ("chance, ln 10", {"color": "black", "ls": ":", "lw": 1})
    style.legend(figure, [*style.width_entries(colors, "N"), *style.STAR_ENTRIES, chance])
    yield "figure_2a_rate_transfer", figure
