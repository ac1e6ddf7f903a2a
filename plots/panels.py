"""Panels that several figures share: loss against rate, optimum and best loss against size."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from plots import style
from plots.rates import LONGEST, Exponent, Lines, Sweeps, exponent, octaves
from plots.style import LOST, STAR, VERTEX, empty


def draw_rates(axis, sweeps: Sweeps, colors: Mapping[int, tuple]) -> None:
    """Loss against learning rate, up to the first rate 20 % above the best, a line per width: a
    star at the best rate that was run, a diamond on the line, with its standard error, at the rate
    of the vertex of the parabola through it, where there is one, and a cross at the top edge at the
    first rate at which a run diverged."""
    if not sweeps:
        empty(axis, "no finished run")
        return
    for width, sweep in sweeps.items():
        stable, best, color = sweep.stable, sweep.best, colors[width]
        axis.plot(list(stable), list(stable.values()), "o-", ms=2.5, lw=1.1, color=color)
        axis.plot(best.grid_value, best.loss, color=color, **STAR)
        if sweep.unstable:
            place = {"transform": axis.get_xaxis_transform(), "clip_on": False}
            axis.plot(sweep.unstable, 1.0, color=color, **LOST, **place)
        if best.inside:
            error = best.error if best.error < LONGEST else 0.0
            ends = [best.value * 2**-error, best.value * 2**error]
            at, losses = np.log2(list(stable)), list(stable.values())
            on_line = float(np.interp(math.log2(best.value), at, losses))
            axis.plot(ends, [on_line] * 2, "-", lw=0.8, color=color, zorder=4)
            axis.plot(best.value, on_line, color=color, **VERTEX)
    axis.set_xscale("log", base=2)


def loss_limits(axes, sweeps: Sequence[Sweeps]) -> None:
    """One range of losses for all axes: of what is drawn, and a margin."""
    drawn = [sweep for line in sweeps for sweep in line.values()]
    values = [loss for sweep in drawn for loss in sweep.stable.values()]
    if values:
        margin = 0.06 * (max(values) - min(values)) or 0.1
        for axis in axes:
            axis.set_ylim(min(values) - margin, max(values) + margin)


def draw_optima(
    axis, sweeps: Sweeps, fit: Exponent, shift=1.0, marker="*", ls="-", label=None, **look
) -> None:
    """Optimal rate against width, `shift` times to the right, with bars of its standard error, and
    the power law. Hollow are points whose error is unknown where others' are known, and those
    that the fit leaves out, because the best rate is the first or last tried."""
    if not sweeps:
        return
    errors = {width: error for width, error in octaves(sweeps).items() if math.isfinite(error)}
    for width, sweep in sweeps.items():
        best, error = sweep.best, errors.get(width, 0.0)
        bars = [[best.value * (1 - 2**-error)], [best.value * (2**error - 1)]]
        hollow = best.at_edge or (errors and width not in errors)
        shape = {"fmt": marker, "ms": 6, "mfc": "white" if hollow else look["color"]}
        axis.errorbar(width * shift, best.value, yerr=bars, capsize=2, lw=1, **shape, **look)
    if math.isfinite(fit.value):
        widths = sorted(set(sweeps) - set(fit.edge))
        axis.plot(widths, [fit(width) for width in widths], ls=ls, lw=1.2, **look)
    axis.plot([], [], ls=ls, lw=1.2, marker=marker, ms=5, label=label, **look)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)


def draw_published(axis, sweeps: Sweeps, power: float, **look) -> None:
    """The slope that the paper prints, through the middle of the optima that were measured."""
    widths = np.array(sorted(sweeps), dtype=float)
    middle = np.mean(np.log2([sweeps[int(width)].best.value for width in widths]))
    place = np.log2(widths)
    line = 2.0 ** (middle + power * (place - place.mean()))
    axis.plot(widths, line, **{"ls": ":", "lw": 1.4, "color": "0.45", "zorder": 1, **look})


def power_text(fit: Exponent, symbol: str = "D") -> str:
    """A measured power in matplotlib's notation."""
    if math.isnan(fit.value):
        return "no fit"
    return rf"${symbol}^{{{fit.value:+.2f}}}$ ± {fit.error:.{2 + (0 < fit.error < 0.005)}f}"


class Line(NamedTuple):
    """A line of `transfer`: its panel's title, its sweeps, colour and marker, and the power that
    the paper gives to its optimum, if it does."""

    label: str
    sweeps: Sweeps
    look: Mapping[str, object]
    published: float | None = None


def transfer(
    title: str, lines: Sequence[Line], symbol: str, size: str, rate: str, loss: str, small=False
):
    """A panel of loss against rate for every line, and one of the optima against the size; more
    than four, or a `small` figure's, are in two rows, with the legend in the last place. `size`,
    `rate` and `loss` are labels."""
    count = len(lines) + 1
    down = 1 + (count > 4 or small)
    across = math.ceil(count / down)
    figure, axes = style.subplots(title, down, across, (2.45, 2.1) if small else (3.5, 3.0))
    *shown, last = axes.flat[:count]
    sizes = sorted({n for line in lines for n in line.sweeps})
    colors = style.width_colors(sizes)
    for place, (axis, line) in enumerate(zip(shown, lines, strict=True)):
        draw_rates(axis, line.sweeps, colors)
        ylabel = "" if place % across else loss
        axis.set(title=line.label, xlabel=rate, ylabel=ylabel)
    loss_limits(shown, [line.sweeps for line in lines])
    entries = []
    for line in lines:
        fit, look = exponent(line.sweeps), dict(line.look)
        label = f"{line.label.partition(',')[0]}: {power_text(fit, symbol)}"
        entries.append((label, {**look, "ms": 5, "lw": 1.2}))
        draw_optima(last, line.sweeps, fit, **look)
        if line.published is not None and line.sweeps:
            draw_published(last, line.sweeps, line.published, color=look["color"])
    if sizes:
        style.octave_limits([last], sizes)
    last.set(title="best rate", xlabel=size, ylabel=f"best {rate}")
    if len(sizes) > 1 and any(line.published is not None for line in lines):
        entries.append(("published or derived slope", {"color": "0.45", "ls": ":"}))
    entries += [*style.width_entries(colors, symbol), *style.rate_entries(lines)]
    style.legend(figure, entries, *axes.flat[count:][:1])
    return figure


def draw_best(axis, sweeps: Sweeps, **look) -> None:
    """Loss of the best rate against parameters with seed errors, hollow if a run diverged."""
    drawn = [sweep for sweep in sweeps.values() if sweep.ended]
    sizes, values = [one.parameters for one in drawn], [one.loss for one in drawn]
    errors = [np.nan_to_num(sweep.lowest.error) for sweep in drawn]
    look = {"ls": "-", "ms": 4, "lw": 1.2, **look}
    axis.errorbar(sizes, values, yerr=errors, capsize=2, **look)
    lost = [(one.parameters, one.loss) for one in drawn if one.lost]
    if lost:
        face = {**look, "ls": "", "mfc": "white", "zorder": 5}
        axis.plot(*zip(*lost, strict=True), **face)
    axis.set_xscale("log")


def size_panels(axes, panels: Iterable[Iterable[tuple[Sweeps | None, dict]]]) -> None:
    """Best loss against size, in every panel a line per (sweeps, look) that has some, with ticks
    such as 200k or 1M at decades, or in between where they are too few; one without any says so."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    for axis, drawn in zip(axes, panels, strict=True):
        drawn = [(sweeps, look) for sweeps, look in drawn if sweeps]
        for sweeps, look in drawn:
            draw_best(axis, sweeps, **look)
        if drawn:
            sizes = {sweep.parameters for sweeps, _ in drawn for sweep in sweeps.values()}
            if len(sizes) == 1:  # no range of its own
                axis.set_xlim(max(sizes) / 4, max(sizes) * 4)
            low, high = axis.get_xlim()
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.xaxis.set_minor_locator(NullLocator())
        else:
            empty(axis, "no finished run")
        axis.set_xlabel("parameters")
    axes[0].set_ylabel(style.LOSS_LABEL)


def lost_entries(lines: Lines) -> list[tuple[str, dict]]:
    """The legend entry of hollow points in `size_panels`, if there are some."""
    lost = any(sweep.lost for sweeps in lines.values() for sweep in sweeps.values())
    return [("some seeds diverged", style.HOLLOW)] if lost else []
