"""Panels that several figures share: loss against rate, optimum and best loss against size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from plots.rate_sweeps import Exponent, RateSweep, loss_law

LONGEST = 2.0  # octaves; error bars are cut there, or one that says nothing would hide the rest
STAR = {"marker": "*", "ms": 10, "mec": "black", "mew": 0.5, "zorder": 5, "ls": ""}


def draw_rates(axis, sweeps: Mapping[int, RateSweep], colors: Mapping[int, tuple]) -> None:
    """Loss against learning rate, stable rates only, a line per width with a star at the optimum;
    a bar along the rate is the optimum's standard error, a hollow star has none."""
    for width, sweep in sweeps.items():
        stable = sweep.stable
        axis.plot(list(stable), list(stable.values()), "o-", ms=2.5, lw=1.1, color=colors[width])
        best = sweep.best
        if math.isfinite(best.error):
            error = min(best.error, LONGEST)
            ends = [best.value * 2**-error, best.value * 2**error]
            axis.plot(ends, [best.loss] * 2, "-", lw=2.2, color="black", alpha=0.6, zorder=4)
        face = colors[width] if best.inside else "white"
        axis.plot(best.value, best.loss, color=face, **STAR)
    axis.set_xscale("log", base=2)


def pair_rows(axes, titles: Iterable[str]) -> None:
    """Column titles, and one axis of rates for the first two rows, to call before drawing."""
    for first, second, title in zip(axes[0], axes[1], titles):
        first.set_title(title)
        second.sharex(first)
        first.tick_params(labelbottom=False)
        second.set_xlabel("learning rate")


def loss_limits(axes, sweeps: list[Mapping[int, RateSweep]]) -> None:
    """From below the best loss to 20% above the worst optimum, where stability ends."""
    best = [sweep.loss for line in sweeps for sweep in line.values()]
    if best:
        for axis in axes:
            axis.set_ylim(min(best) - 0.05 * max(best), 1.2 * max(best))


def draw_optima(axis, sweeps: Mapping[int, RateSweep], fit: Exponent, **look) -> None:
    """Optimal rate against width with error bars and the power law; what the fit leaves out,
    because the best rate is the first or last tried, is hollow."""
    marker = look.pop("marker", "*")
    line = look.pop("ls", "-")
    label = look.pop("label", None)
    for width, sweep in sweeps.items():
        best = sweep.best
        error = min(best.error, LONGEST) if math.isfinite(best.error) else 0.0
        bars = [[best.value * (1 - 2**-error)], [best.value * (2**error - 1)]]
        face = "white" if best.at_edge else look["color"]
        axis.errorbar(width, best.value, yerr=bars, fmt=marker, ms=6, mfc=face, capsize=2, lw=1,
                      **look)
    if fit.law:
        widths = sorted(set(sweeps) - set(fit.edge))
        axis.plot(widths, [fit.law(width) for width in widths], ls=line, lw=1.2, **look)
    axis.plot([], [], ls=line, lw=1.2, marker=marker, ms=5, label=label, **look)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)


def octave_limits(axis, widths: list[int]) -> None:
    """Ticks at the widths, and at least two whole octaves of rates."""
    if axis.has_data() and axis.get_yscale() == "log":
        low, high = (math.log2(end) for end in axis.get_ylim())
        low, high = math.floor(low), math.ceil(high)
        axis.set_ylim(2.0**low, 2.0 ** max(high, low + 2))
    axis.set_xticks(widths, labels=[str(width) for width in widths])
    axis.set_xlim(min(widths) / 1.3, max(widths) * 1.3)
    axis.minorticks_off()


def draw_best(axis, sweeps: Mapping[int, RateSweep], **look) -> None:
    """Loss of the best rate against parameters with seed error bars. The line is the power law
    with a floor where the data determine it (from four sizes on), and joins the points otherwise.
    """
    sizes = [sweep.parameters for sweep in sweeps.values()]
    values = [sweep.loss for sweep in sweeps.values()]
    errors = [sweep.error if math.isfinite(sweep.error) else 0.0 for sweep in sweeps.values()]
    look = {"ls": "-", "ms": 4, "lw": 1.2, **look}
    law = loss_law(sweeps)
    if law and math.isfinite(law.exponent_error):
        low, high = math.log(min(sizes)), math.log(max(sizes))
        dense = [math.exp(low + (high - low) * step / 50) for step in range(51)]
        curve = [law(size) for size in dense]
        line = {key: look[key] for key in ("ls", "lw", "color", "alpha") if key in look}
        axis.plot(dense, curve, **line)
        look["ls"] = ""
    axis.errorbar(sizes, values, yerr=errors, capsize=2, **look)
    axis.set_xscale("log")
    _size_ticks(axis)


def _size_ticks(axis) -> None:
    """Ticks such as 300k or 1M: at decades, or in between where there are too few of them."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high / low < 100 else (1,)))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.xaxis.set_minor_locator(NullLocator())
