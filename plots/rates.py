"""Learning-rate sweeps of a table: optimum, lowest loss and noise at every width; their panels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from measure.fits import (
    WINDOW,
    IrreduciblePowerLaw,
    Optimum,
    PowerLaw,
    irreducible_power_law,
    optimum,
    power_law,
    stability,
)
from plots.findings import number
from plots.style import LABELS
from plots.tables import (
    CURVE,
    EPS,
    LOSS,
    OPTIMIZER,
    PARAMETERIZATION,
    PARAMETERS,
    RATE,
    SEED,
    STATUS,
    WIDTH,
    counts,
    mean_losses,
)

# Seeds differ most close to divergence; what errors of optima and best losses rest on is the
# spread of points whose mean loss is at most this much above their sweep's lowest.
NEAR = 0.05
LONGEST = 2.0  # octaves; error bars are cut there, or one that says nothing would hide the rest
STAR = {"marker": "*", "ms": 10, "mec": "black", "mew": 0.5, "zorder": 5, "ls": ""}


@dataclass(frozen=True)
class RateSweep:
    """Loss against learning rate at one width.

    `losses` are means over the seeds that were run, infinite where one diverged; `noise` is the
    standard deviation of one run's loss over seeds (NaN: no point has two).
    """

    width: int
    parameters: float
    losses: Mapping[float, float]
    seeds: Mapping[float, int]
    noise: float
    best: Optimum

    @property
    def stable(self) -> dict[float, float]:
        """The sweep up to its first unstable rate, which is left out."""
        largest, _ = stability(self.losses)
        return {
            rate: loss
            for rate, loss in sorted(self.losses.items())
            if rate <= largest and math.isfinite(loss)
        }

    @property
    def loss(self) -> float:
        """The lowest mean loss."""
        return self.best.loss

    @property
    def error(self) -> float:
        """Standard error of the lowest mean loss, from the spread over seeds."""
        return self.noise / math.sqrt(self.seeds[self.best.grid_value])


def rate_sweeps(rows: pd.DataFrame, noise: float = math.nan) -> dict[int, RateSweep]:
    """Width -> sweep, of one line of a figure; widths where every run diverged are left out."""
    found = {}
    for width, cell in rows.groupby(WIDTH):
        losses, seeds = mean_losses(cell, RATE), counts(cell, RATE)
        if any(map(math.isfinite, losses.values())):
            spread = noise / math.sqrt(min(seeds.values()))
            best = optimum(losses, WINDOW, spread)
            size = float(cell[PARAMETERS].iloc[0]) if PARAMETERS in cell else math.nan
            found[int(width)] = RateSweep(int(width), size, losses, seeds, noise, best)
    return found


def curve_sweeps(rows: pd.DataFrame, curves: Iterable[str]) -> dict[str, dict[int, RateSweep]]:
    """Curve -> sweeps by width, of what has a finished run; all curves share the rows' noise."""
    noise, _ = seed_noise(rows)
    found = {curve: rate_sweeps(rows[rows[CURVE] == curve], noise) for curve in curves}
    return {curve: sweeps for curve, sweeps in found.items() if sweeps}


def lost_lines(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Names the widths where every run diverged, by what tells a figure's lines apart."""
    text = []
    for names, line in rows.groupby(list(keys), sort=False):
        lost = sorted(set(map(int, line[WIDTH].unique())) - set(rate_sweeps(line)))
        if lost:
            text.append(f"{', '.join(names)}: every run diverged at D = {_listed(lost)}")
    return text


def edge_lines(sweeps: Mapping[tuple[str, ...], Mapping[int, RateSweep]]) -> list[str]:
    """Names the widths whose best rate is the first or last of those tried: their loss is an upper
    bound. A single rate was not searched for, and is not named."""
    text = []
    for names, line in sweeps.items():
        searched = {width: sweep.best for width, sweep in line.items() if len(sweep.losses) > 1}
        edge = [width for width, best in searched.items() if best.at_edge]
        if edge:
            text.append(f"{', '.join(names)}: best rate at the edge of its sweep at D = "
                        f"{_listed(edge)}")
    return text


def _listed(widths: Sequence[int]) -> str:
    return ", ".join(map(str, widths))


def seed_noise(rows: pd.DataFrame) -> tuple[float, int]:
    """(standard deviation of one run's loss over seeds, number of points it is pooled over).

    Points have two finished seeds or more, none of them diverged, and a mean loss at most NEAR
    above the lowest of their sweep.
    """
    sweep = [key for key in (CURVE, PARAMETERIZATION, OPTIMIZER, EPS, WIDTH) if key in rows]
    kept = rows[rows[STATUS] != "failed"]
    points = kept.groupby([*sweep, RATE], dropna=False)[LOSS].agg(["mean", "var", "count", "size"])
    points = points[points["count"] == points["size"]]
    lowest = points.groupby(level=list(range(len(sweep))), dropna=False)["mean"].transform("min")
    points = points[(points["count"] > 1) & (points["mean"] <= (1 + NEAR) * lowest)]
    if points.empty:
        return math.nan, 0
    free = points["count"] - 1
    return math.sqrt((points["var"] * free).sum() / free.sum()), len(points)


def noise_line(rows: pd.DataFrame, what: str) -> str:
    """What the errors of a figure rest on."""
    noise, n = seed_noise(rows)
    if n == 0:
        return f"{what}: no point near an optimum has two seeds; spread over seeds unknown"
    seeds = rows.groupby(WIDTH)[SEED].nunique()
    at = _listed(sorted(map(int, seeds[seeds > 1].index)))
    return (f"{what}: final loss varies by {noise:.4f} nats over seeds (standard deviation, pooled "
            f"over {n} points near optima at D = {at}, taken for all widths)")


def noise_lines(table: pd.DataFrame) -> list[str]:
    """The same for every parameterisation of a table."""
    return [
        noise_line(table[table[PARAMETERIZATION] == rule], label) for rule, label in LABELS.items()
    ]


@dataclass(frozen=True)
class Exponent:
    """The power of width in the optimal rate.

    `law` weighs all widths alike, `weighted` those whose optimum has an error, by it; None where
    there are fewer than two widths. `edge` are widths left out because the best rate is the first
    or last one tried.
    """

    law: PowerLaw | None
    weighted: PowerLaw | None
    widths: int
    edge: tuple[int, ...]

    @property
    def value(self) -> float:
        """The exponent; NaN without a fit."""
        return self.law.exponent if self.law else math.nan

    @property
    def error(self) -> float:
        """Its standard error: the larger of the one from the scatter of widths, which is small by
        chance where widths are few, and the one that the optima's own errors imply."""
        if self.law is None:
            return math.nan
        same = self.weighted and self.weighted.n == self.law.n
        return float(np.fmax(self.law.error, self.weighted.error if same else math.nan))

    def text(self) -> str:
        """In words, with what it rests on."""
        edge = f"; at edge: {_listed(self.edge)}" if self.edge else ""
        if self.law is None:
            return f"no fit: {self.widths} width{'s' * (self.widths != 1)}{edge}"
        return f"{number(self.value, self.error, 2)} (n = {self.widths} widths{edge})"


def exponent(sweeps: Mapping[int, RateSweep]) -> Exponent:
    """The exponent of the optimal rate over the widths whose optimum is not at the edge."""
    used = {width: sweep.best for width, sweep in sweeps.items() if not sweep.best.at_edge}
    edge = tuple(sorted(set(sweeps) - set(used)))
    law = weighted = None
    if len(used) > 1:
        law = power_law(list(used), [best.value for best in used.values()])
    known = {w: best for w, best in used.items() if math.isfinite(best.error) and best.error > 0}
    if len(known) > 1:
        values = [best.value for best in known.values()]
        weighted = power_law(list(known), values, [best.error for best in known.values()])
    return Exponent(law, weighted, len(used), edge)


def loss_law(sweeps: Mapping[int, RateSweep]) -> IrreduciblePowerLaw | None:
    """Best loss against parameters as a power law with a floor; None below four sizes."""
    try:
        return irreducible_power_law(
            [sweep.parameters for sweep in sweeps.values()],
            [sweep.loss for sweep in sweeps.values()],
            max(sweep.error for sweep in sweeps.values()),
        )
    except ValueError:
        return None


def law_text(law: IrreduciblePowerLaw) -> str:
    """The law's two telling numbers."""
    if not math.isfinite(law.exponent_error):
        return f"floor not determined (n = {law.n})"
    floor = f"floor {law.floor:.2f} ± {law.floor_error:.2f}"
    return f"{floor}, k {law.exponent:.2f} ± {law.exponent_error:.2f} (n = {law.n} sizes)"


def gain(
    before: Mapping[int, RateSweep], after: Mapping[int, RateSweep], last: bool = True
) -> tuple[int | None, float, float]:
    """(width, loss before minus after, its standard error) at the largest common width, or the
    smallest; (None, NaN, NaN) without a common one."""
    common = sorted(set(before) & set(after))
    if not common:
        return None, math.nan, math.nan
    width = common[-1 if last else 0]
    first, second = before[width], after[width]
    return width, first.loss - second.loss, math.hypot(first.error, second.error)


def gain_text(before: Mapping[int, RateSweep], after: Mapping[int, RateSweep]) -> str:
    """The gain at the largest common width, and the smallest one's if that is another."""
    width, change, error = gain(before, after)
    small, earlier, _ = gain(before, after, last=False)
    note = f" ({earlier:+.3f} at {small})" if small != width else ""
    return f"{number(change, error)} at D = {width}{note}"


# Panels that several figures share: loss against rate, optimum and best loss against size.


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
