"""Whether each strategy's best learning rate is that of every width, which the paper's
meta-principle predicts and no figure of it shows.

    python -m plots dinan/rate_transfer [results.csv]

Evaluation loss of a ViT against the global learning rate, a line per width and a panel per
strategy, then the best rates against width, with the power of the width that follows from the
strategies' relative rates. Drawn images, each of them seen once; the decay per step is the same in
all runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import rates, style, tables
from plots.dinan.published import TRANSFER_EXPONENTS, VIT_CLAIMS
from plots.findings import HEADER, Estimate, Finding, Printed, exact_text
from plots.rates import RateSweep, exponent
from plots.tables import CURVE, RATE, RESULTS, SEED, STATUS, WIDTH, TableError

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
    tables.one_run_each(rows, paths[0], [CURVE, WIDTH, RATE, SEED],
                        "results.csv of vit_imagenet/sweeps/rate_transfer.yaml")
    if rows[STATUS].eq("failed").all():
        raise TableError(f"{paths[0]}: every run failed; see their log.txt and run the sweep again")
    return rows


def fits(rows: pd.DataFrame) -> Fits:
    """Strategy -> width -> loss against rate with the optimum."""
    return rates.width_sweeps(rows, style.present(style.STRATEGIES, rows[CURVE]))


def findings(rows: pd.DataFrame) -> list[Printed]:
    """Per strategy: the best rates, their power of the width and what transfer costs; then the
    lowest losses beside each other."""
    found = fits(rows)
    result: list[Printed] = [
        rates.width_noise_line(rows, "n", "all strategies"),
        "derived: relative rates of (1.108)-(1.116) and footnote 26 leave no power of the width to "
        "lr*; without them it is that of the blocks' matrices, (1.110)-(1.115)",
        *(line.replace(" D = ", " n = ") for line in [
            *rates.lost_lines(rows, [CURVE]),
            *rates.edge_lines({(name,): sweeps for name, sweeps in found.items()}),
            *rates.selection_lines(rows, [CURVE, WIDTH]),
        ]),
        HEADER,
    ]
    for strategy, sweeps in found.items():
        name, power = style.STRATEGIES[strategy], TRANSFER_EXPONENTS[strategy]
        fit = exponent(sweeps)
        best = ", ".join(f"{n}: {rates.optimum_text(sweep)}" for n, sweep in sweeps.items())
        lowest = ", ".join(f"{n}: {sweep.lowest.compact()}" for n, sweep in sweeps.items())
        verdict = Estimate(fit.value, fit.error, fit.widths, fitted=2).distance(float(power))
        result += [
            Finding(f"{name}: lr* by width", best or "every run diverged"),
            Finding(f"{name}: exponent of the width in lr*", fit.text(),
                    f"{exact_text(power)} (derived)", verdict),
            Finding(f"{name}: lowest loss by width", lowest or "every run diverged"),
            Finding(f"{name}: cost of the smallest n's lr* at the largest",
                    rates.transfer_text(sweeps)),
        ]
    for better, worse in VIT_CLAIMS:
        if {better, worse} <= found.keys():
            name = f"{style.STRATEGIES[better]} against {style.STRATEGIES[worse]}: gain in loss"
            gain = rates.compared(name, found[worse], found[better], "gains")
            result.append(Finding(name, gain.measured.replace(" D = ", " n = "),
                                  "gains in accuracy", gain.verdict))
    return result


def draw(rows: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """A panel of rates per strategy, and one of the optima."""
    found = fits(rows)
    widths = sorted({n for sweeps in found.values() for n in sweeps})
    colors = style.width_colors(widths)
    figure, axes = style.subplots(1, len(found) + 1, (3.0, 3.0))
    figure.suptitle("learning-rate transfer\n"
                    f"{rates.RATE_NOTE}; {rates.optima_note(map(exponent, found.values()))}; "
                    "dotted: the derived power of the width, 0 but for standard, there -3/2")
    rates.loss_limits(axes[0][:-1], list(found.values()))
    for axis, (strategy, sweeps) in zip(axes[0], found.items()):
        rates.draw_rates(axis, sweeps, colors)
        axis.set(title=style.STRATEGIES[strategy], xlabel="learning rate lr")
    axes[0][0].set_ylabel(LOSS_LABEL)
    axis = axes[0][-1]
    for strategy, sweeps in found.items():
        fit, color = exponent(sweeps), style.STRATEGY_COLORS[strategy]
        power = rf": $n^{{{fit.value:+.2f} \pm {fit.error:.2f}}}$" if fit.law else ""
        rates.draw_optima(axis, sweeps, fit, label=style.STRATEGIES[strategy] + power, color=color,
                          marker=style.STRATEGY_MARKERS[strategy])
        if sweeps:
            rates.draw_published(axis, sweeps, float(TRANSFER_EXPONENTS[strategy]), color=color)
    if widths:
        style.octave_limits(axis, widths)
    axis.set(title="best rate", xlabel="width n", ylabel="best learning rate lr*")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    style.legend(figure, [*style.width_entries(colors, "n"), *style.STAR_ENTRIES])
    yield "rate_transfer", figure
