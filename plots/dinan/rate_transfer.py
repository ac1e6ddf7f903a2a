"""Whether each strategy's best learning rate is that of every width, which the paper's
meta-principle predicts and no figure of it shows.

    python -m plots dinan/rate_transfer [results.csv]

Evaluation loss of a ViT against the global learning rate, a line per width and a panel per
strategy, then the best rates against width, with the power of the width that follows from the
strategies' relative rates. Drawn images, each of them seen once; the decay per step is the same in
all runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import panels, rates, style, tables
from plots.dinan.published import TRANSFER_EXPONENTS, VIT_CLAIMS
from plots.findings import HEADER, Finding, Printed, exact_text
from plots.rates import RateSweep, exponent
from plots.tables import CURVE, RATE, RESULTS, STATUS, WIDTH, TableError

TABLES = ("dinan/rate_transfer",)
LOSS_LABEL = "evaluation loss (nats/image)"
ACCURACY = "final_eval_top1"  # tells images from BART's text, whose curves have the same names
Fits = Mapping[str, Mapping[int, RateSweep]]


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The table's runs; TableError if it lacks a column or has two runs at one rate."""
    tables.expect(paths, "results.csv")
    columns = [*RESULTS, WIDTH, RATE, ACCURACY]
    table = tables.read(paths[0], columns, maker="vit_imagenet/sweeps/rate_transfer.yaml")
    rows = tables.only(table, paths[0], CURVE, style.STRATEGIES)
    if rows[STATUS].eq("failed").all():
        raise TableError(f"{paths[0]}: every run failed; see their log.txt and run the sweep again")
    return rows


def fits(rows: pd.DataFrame) -> Fits:
    """Strategy -> width -> loss against rate with the optimum."""
    return rates.curve_sweeps(rows, style.present(style.STRATEGIES, rows[CURVE]))


def findings(rows: pd.DataFrame) -> list[Printed]:
    """Per strategy: the best rates, their power of the width and what transfer costs; then the
    lowest losses beside each other."""
    found = fits(rows)
    result: list[Printed] = [
        "derived: relative rates of (1.108)-(1.116) and footnote 26 leave no power of the width to "
        "lr*; without them it is that of the blocks' matrices, (1.110)-(1.115)",
        rates.noise_line(rows, "all strategies", "n"),
        *rates.lost_lines(rows, [CURVE], "n"),
        *rates.edge_lines({(name,): sweeps for name, sweeps in found.items()}, "n"),
        *rates.selection_lines({(name,): sweeps for name, sweeps in found.items()}, "n"),
        "lowest losses beside each other: the paper compares strategies by accuracy, each with a "
        "decay of its own; here weight decay was not searched for and is the same per step in all",
        HEADER,
    ]
    for strategy, sweeps in found.items():
        name, power = style.STRATEGIES[strategy], TRANSFER_EXPONENTS[strategy]
        fit = exponent(sweeps)
        best = ", ".join(f"{n}: {rates.optimum_text(sweep)}" for n, sweep in sweeps.items())
        lowest = ", ".join(f"{n}: {sweep.lowest.compact()}" for n, sweep in sweeps.items())
        result += [
            Finding(f"{name}: lr* by width", best or "every run diverged"),
            Finding(
                f"{name}: exponent of the width in lr*",
                fit.text(),
                f"{exact_text(power)} (derived)",
                fit.distance(float(power)),
                fit,
            ),
            Finding(f"{name}: lowest loss by width", lowest or "every run diverged"),
            Finding(
                f"{name}: cost of the smallest n's lr* at the largest", rates.transfer_text(sweeps)
            ),
        ]
    for better, worse in VIT_CLAIMS:
        if {better, worse} <= found.keys():
            width, _ = rates.gain(found[better], found[worse])
            place = f"n = {width}: " if width else ""
            name = f"{place}{style.STRATEGIES[better]} - {style.STRATEGIES[worse]} (nats)"
            result.append(
                rates.compared(name, found[better], found[worse], "loses", "below 0", symbol="n")
            )
    return result


def draw(rows: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """A panel of rates per strategy, and one of the optima; more than three are in two rows."""
    found = fits(rows)
    widths = sorted({n for sweeps in found.values() for n in sweeps})
    colors = style.width_colors(widths)
    count = len(found) + 1
    down = 1 + (count > 3)
    across = math.ceil(count / down)
    figure, axes = style.subplots(down, across, (3.0, 2.7))
    for spare in axes.flat[count:]:
        spare.remove()
    *shown, last = axes.flat[:count]
    note = panels.optima_note(map(exponent, found.values()), "n")
    figure.suptitle(
        "learning-rate transfer\n"
        f"{panels.RATE_NOTE}; {note}; "
        "dotted: the derived power of the width, 0 but for standard, there -3/2"
    )
    panels.loss_limits(shown, list(found.values()))
    for place, (axis, (strategy, sweeps)) in enumerate(zip(shown, found.items(), strict=True)):
        panels.draw_rates(axis, sweeps, colors)
        axis.set(
            title=style.STRATEGIES[strategy],
            xlabel="learning rate lr",
            ylabel="" if place % across else LOSS_LABEL,
        )
    entries = [*style.width_entries(colors, "n"), *style.STAR_ENTRIES]
    for strategy, sweeps in found.items():
        fit, color = exponent(sweeps), style.STRATEGY_COLORS[strategy]
        look = {"color": color, "marker": style.STRATEGY_MARKERS[strategy]}
        power = rf": lr* $\sim n^{{{fit.value:+.2f} \pm {fit.error:.2f}}}$" if fit.law else ""
        entries.append((style.STRATEGIES[strategy] + power, {**look, "ms": 4, "lw": 1.2}))
        panels.draw_optima(last, sweeps, fit, **look)
        if sweeps:
            panels.draw_published(last, sweeps, float(TRANSFER_EXPONENTS[strategy]), color=color)
    if widths:
        style.octave_limits(last, widths)
    last.set(title="best rate", xlabel="width n", ylabel="best learning rate lr*")
    style.legend(figure, entries, ncols=3)
    yield "rate_transfer", figure
