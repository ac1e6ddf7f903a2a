"""Panels that several figures share: loss against rate, optimum and best loss against size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from plots.rates import LONGEST, Exponent, Sweeps, borrowed, loss_law, octaves
from plots.style import LOSS_LABEL, STAR, VERTEX, empty

RATE_NOTE = "points: means over seeds, up to the first rate 20 % above the best loss"
OPTIMA_NOTE = (
    "optimum against width: vertex, or best rate run without one; bar: standard error, cut at "
    f"{LONGEST:g} octaves"
)
HOLLOW_NOTE = (
    "hollow points in the panel of optima: best rate first or last tried, left out of the fit"
)
BEST_NOTE = (
    "loss of the best rate, on fresh seeds or of three and more each at the rate that the others "
    "choose; bar: standard error from the spread over seeds"
)


def optima_note(fits: Iterable[Exponent], symbol: str = "D") -> str:
    """What the marks in panels of these optima are."""
    fits = list(fits)
    hollow = HOLLOW_NOTE * any(fit.edge for fit in fits)
    whose = borrowed((fit.sweeps for fit in fits), symbol)
    return "; ".join(filter(None, (OPTIMA_NOTE, hollow, whose)))


def draw_rates(axis, sweeps: Sweeps, colors: Mapping[int, tuple]) -> None:
    """Loss against learning rate, stable rates only, a line per width with a star at the best rate
    that was run and, where a parabola has one, its vertex with the standard error of the rate."""
    for width, sweep in sweeps.items():
        stable, best, color = sweep.stable, sweep.best, colors[width]
        axis.plot(list(stable), list(stable.values()), "o-", ms=2.5, lw=1.1, color=color)
        axis.plot(best.grid_value, best.loss, color=color, **STAR)
        if best.inside:
            error = min(best.error, LONGEST) if math.isfinite(best.error) else 0.0
            ends = [best.value * 2**-error, best.value * 2**error]
            axis.plot(ends, [best.vertex_loss] * 2, "-", lw=0.8, color=color, zorder=4)
            axis.plot(best.value, best.vertex_loss, color=color, **VERTEX)
    axis.set_xscale("log", base=2)


def loss_limits(axes, sweeps: list[Sweeps]) -> None:
    """One range of losses for all axes: of what is drawn, and a margin."""
    drawn = [sweep for line in sweeps for sweep in line.values()]
    values = [loss for sweep in drawn for loss in sweep.stable.values()]
    values += [sweep.best.vertex_loss for sweep in drawn if sweep.best.inside]
    if values:
        margin = 0.06 * (max(values) - min(values)) or 0.1
        for axis in axes:
            axis.set_ylim(min(values) - margin, max(values) + margin)


def draw_optima(axis, sweeps: Sweeps, fit: Exponent, **look) -> None:
    """Optimal rate against width with error bars and the power law; what the fit leaves out,
    because the best rate is the first or last tried, is hollow."""
    marker = look.pop("marker", "*")
    line = look.pop("ls", "-")
    label = look.pop("label", None)
    errors = octaves(sweeps)
    for width, sweep in sweeps.items():
        best, error = sweep.best, float(np.nan_to_num(errors.get(width, 0.0)))
        bars = [[best.value * (1 - 2**-error)], [best.value * (2**error - 1)]]
        face = "white" if best.at_edge else look["color"]
        axis.errorbar(
            width, best.value, yerr=bars, fmt=marker, ms=6, mfc=face, capsize=2, lw=1, **look
        )
    if fit.law:
        widths = sorted(set(sweeps) - set(fit.edge))
        axis.plot(widths, [fit.law(width) for width in widths], ls=line, lw=1.2, **look)
    axis.plot([], [], ls=line, lw=1.2, marker=marker, ms=5, label=label, **look)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)


def draw_published(axis, sweeps: Sweeps, power: float, **look) -> None:
    """The slope that the paper prints, through the middle of the optima that were measured."""
    widths = np.array(sorted(sweeps), dtype=float)
    middle = np.mean(np.log2([sweeps[int(width)].best.value for width in widths]))
    place = np.log2(widths)
    line = 2.0 ** (middle + power * (place - place.mean()))
    axis.plot(widths, line, **{"ls": ":", "lw": 1.4, "color": "0.45", "zorder": 1, **look})


def draw_best(axis, sweeps: Sweeps, **look) -> None:
    """Loss of the best rate against parameters with seed error bars. The line is the power law
    with a floor where the data determine it (from four sizes on), and joins the points otherwise.
    """
    sizes = [sweep.parameters for sweep in sweeps.values()]
    values = [sweep.loss for sweep in sweeps.values()]
    errors = [sweep.error if math.isfinite(sweep.error) else 0.0 for sweep in sweeps.values()]
    look = {"ls": "-", "ms": 4, "lw": 1.2, **look}
    law = loss_law(sweeps)
    if law and math.isfinite(law.exponent_error):
        dense = np.geomspace(min(sizes), max(sizes), 51)
        line = {key: look[key] for key in ("ls", "lw", "color", "alpha") if key in look}
        axis.plot(dense, [law(size) for size in dense], **line)
        look["ls"] = ""
    axis.errorbar(sizes, values, yerr=errors, capsize=2, **look)
    axis.set_xscale("log")


def size_panels(axes, panels: Iterable[Iterable[tuple[Sweeps, dict]]]) -> None:
    """Best loss against size, in every panel a line per (sweeps, look), with ticks such as 200k or
    1M at decades, or in between where there are too few of them; a panel without any line says so,
    and one whose bars are by the spread over seeds of other widths says of which."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    for axis, drawn in zip(axes, panels, strict=True):
        drawn = list(drawn)
        for sweeps, look in drawn:
            draw_best(axis, sweeps, **look)
        if drawn:
            low, high = axis.get_xlim()
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.xaxis.set_minor_locator(NullLocator())
        else:
            empty(axis, "no finished run")
        axis.set_xlabel("parameters")
        if note := borrowed(sweeps for sweeps, _ in drawn).replace(": ", ":\n"):
            axis.text(0.03, 0.03, f"bars at {note}", fontsize=6, transform=axis.transAxes)
    axes[0].set_ylabel(LOSS_LABEL)
