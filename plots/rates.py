"""Learning-rate sweeps of a table: optimum, lowest loss and noise at every width; their panels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from measure import fits
from plots import tables
from plots.findings import UNKNOWN, Estimate, Finding
from plots.statistics import differences, mean, slope
from plots.style import LABELS, LOSS_LABEL, STAR, VERTEX, empty, present
from plots.tables import CURVE, LOSS, PARAMETERIZATION, RATE, SEED, STATUS, WIDTH

# Seeds differ most close to divergence; what errors of optima and best losses rest on is the
# spread of points whose mean loss is at most this much above their sweep's lowest.
NEAR = 0.05
FREE = 4  # degrees of freedom that a width's own spread takes
PAIRED = 3  # seeds; with two, 95 % of Student's distribution reach to 12.7 errors
LONGEST = fits.WINDOW  # octaves; an optimum lies within them of the best rate, whatever its error
RATE_NOTE = "points: means over seeds, up to the first rate 20 % above the best loss"
OPTIMA_NOTE = (
    "optimum against width: vertex, or best rate run without one; bar: standard error, cut at "
    f"{LONGEST:g} octaves"
)
HOLLOW_NOTE = (
    "hollow points in the panel of optima: best rate first or last tried, left out of the fit"
)
BEST_NOTE = "loss of the best rate; bar: standard error from the spread over seeds"


@dataclass(frozen=True)
class RateSweep:
    """Loss against learning rate at one width.

    `losses` are means over the seeds that were run, infinite where one diverged, and `runs` those
    of the best rate by seed; `noise` is the standard deviation of one run's loss over seeds (NaN:
    no point has two) with `freedom` degrees of freedom (None: not said), and `spread_of` are the
    widths whose seeds it comes from (empty: not said).
    """

    width: int
    parameters: float
    losses: Mapping[float, float]
    runs: Mapping[int, float]
    noise: float
    best: fits.Optimum
    freedom: int | None = None
    spread_of: tuple[int, ...] = ()

    @property
    def stable(self) -> dict[float, float]:
        """The sweep up to its first unstable rate, which is left out."""
        largest, _ = fits.stability(self.losses)
        return {rate: loss for rate, loss in sorted(self.losses.items())
                if rate <= largest and math.isfinite(loss)}

    @property
    def loss(self) -> float:
        """The lowest mean loss."""
        return self.best.loss

    @property
    def error(self) -> float:
        """Standard error of the lowest mean loss, from the spread over seeds."""
        return self.noise / math.sqrt(len(self.runs))

    @property
    def lowest(self) -> Estimate:
        """Both."""
        return Estimate(self.loss, self.error, freedom=self.freedom)


Sweeps = Mapping[int, RateSweep]  # by width
Lines = Mapping[tuple[str, ...], Sweeps]  # what tells a line apart -> its sweeps


def rate_sweeps(
    rows: pd.DataFrame, noise: float = math.nan, window: float | None = fits.WINDOW
) -> dict[int, RateSweep]:
    """Width -> sweep, of one line; widths where every run diverged are left out. The parabola of
    the optimum reaches `window` octaves, or to the neighbours of the best rate."""
    found = {}
    for width, cell in rows.groupby(WIDTH):
        runs = tables.losses_by(cell, RATE)
        losses = tables.mean_losses(runs)
        if any(map(math.isfinite, losses.values())):
            spread = noise / math.sqrt(min(map(len, runs.values())))
            best = fits.optimum(losses, window, spread)
            size = float(cell[tables.PARAMETERS].iloc[0]) if tables.PARAMETERS in cell else math.nan
            found[int(width)] = RateSweep(int(width), size, losses, dict(runs[best.grid_value]),
                                          noise, best)
    return found


def curve_sweeps(rows: pd.DataFrame, curves: Iterable[str]) -> dict[str, dict[int, RateSweep]]:
    """Curve -> sweeps by width, empty where no run has finished. Errors rest on the spread over
    seeds at the same width (`width_noise`), all curves of the rows together."""
    found: dict[str, dict[int, RateSweep]] = {curve: {} for curve in curves}
    for width, (noise, freedom, of) in width_noise(rows).items():
        for curve, sweeps in found.items():
            own = rows[(rows[WIDTH] == width) & (rows[CURVE] == curve)]
            for sweep in rate_sweeps(own, noise).values():
                sweeps[width] = replace(sweep, freedom=freedom, spread_of=of)
    return found


def lost_lines(rows: pd.DataFrame, keys: Sequence[str], symbol: str = "D") -> list[str]:
    """Names the widths where every run diverged, by what tells a figure's lines apart."""
    text = []
    for names, line in rows.groupby(list(keys), sort=False):
        lost = sorted(set(map(int, line[WIDTH].unique())) - set(rate_sweeps(line)))
        if lost:
            text.append(f"{', '.join(names)}: every run diverged at {symbol} = {_listed(lost)}")
    return text


def edge_lines(sweeps: Lines, symbol: str = "D") -> list[str]:
    """Names the widths whose best rate is the first or last of those tried: their loss is an upper
    bound. A single rate was not searched for, and is not named."""
    text = []
    for names, line in sweeps.items():
        searched = {width: sweep.best for width, sweep in line.items() if len(sweep.losses) > 1}
        edge = [width for width, best in searched.items() if best.at_edge]
        if edge:
            text.append(f"{', '.join(names)}: best rate at the edge of its sweep at {symbol} = "
                        f"{_listed(edge)}")
    return text


def _listed(widths: Sequence[int]) -> str:
    return ", ".join(map(str, widths))


def seeded_points(rows: pd.DataFrame) -> pd.DataFrame:
    """The points that errors rest on, with the variance of their losses: they have two finished
    seeds or more, none of them diverged, and a mean loss at most NEAR above the lowest of their
    sweep. A point of runs that several curves share counts once."""
    keys = (CURVE, PARAMETERIZATION, tables.OPTIMIZER, tables.EPS, WIDTH)
    sweep = [key for key in keys if key in rows]
    kept = rows[rows[STATUS] != "failed"]
    groups = kept.groupby([*sweep, RATE], dropna=False)[LOSS]
    points = pd.DataFrame({key: getattr(groups, key)() for key in ("mean", "var", "count", "size")})
    points = points[points["count"] == points["size"]]
    lowest = points.groupby(level=list(range(len(sweep))), dropna=False)["mean"].transform("min")
    points = points[(points["count"] > 1) & (points["mean"] <= (1 + NEAR) * lowest)].reset_index()
    return points.drop_duplicates(points.columns.difference([CURVE]))


def seed_noise(points: pd.DataFrame, free: int = 1) -> tuple[float, int]:
    """(standard deviation of one run's loss over seeds, its degrees of freedom), pooled over
    `seeded_points`; (NaN, 0) below `free` of these."""
    known = points["count"] - 1
    if known.sum() < free:
        return math.nan, 0
    return math.sqrt((points["var"] * known).sum() / known.sum()), int(known.sum())


def width_noise(rows: pd.DataFrame) -> dict[int, tuple[float, int, tuple[int, ...]]]:
    """Width -> (standard deviation of one run's loss over seeds, its degrees of freedom, widths
    whose seeds it comes from): its own, as widths differ several-fold in it, or where it has fewer
    than FREE degrees of freedom that of all widths with seeds."""
    points, widths = seeded_points(rows), sorted(map(int, rows[WIDTH].dropna().unique()))
    every = *seed_noise(points), tuple(sorted(map(int, points[WIDTH].unique())))
    own = {width: seed_noise(points[points[WIDTH] == width], FREE) for width in widths}
    return {n: (noise, free, (n,)) if free else every for n, (noise, free) in own.items()}


def borrowed(lines: Iterable[Sweeps], symbol: str = "D") -> str:
    """Which widths take the spread over seeds of which others; "" where none does."""
    every = [(width, sweep.spread_of) for line in lines for width, sweep in line.items()]
    others = {width: of for width, of in every if of not in ((), (width,))}
    if not others:
        return ""
    of = _listed(sorted(set().union(*others.values())))
    at = f"all {symbol}" if len(others) == len(dict(every)) else (
        f"{symbol} = {_listed(sorted(others))}")
    return f"{at}: spread of {symbol} = {of}"


def noise_line(rows: pd.DataFrame, what: str, symbol: str = "D") -> str:
    """What the errors of the rows' sweeps rest on; `symbol`, here and elsewhere, is the width's."""
    at: dict[str, list[int]] = {}
    for width, (spread, _, of) in width_noise(rows).items():
        if not of:
            return f"{what}: no point near an optimum has two seeds; spread over seeds unknown"
        whose = "" if of == (width,) else f", the spread of {symbol} = {_listed(of)}"
        at.setdefault(f"{spread:.3f} at {symbol} = {{}}{whose}", []).append(width)
    known = "; ".join(text.format(_listed(widths)) for text, widths in at.items())
    return f"{what}: standard deviation of the final loss over seeds, near optima: {known} (nats)"


def noise_lines(table: pd.DataFrame, symbol: str = "D") -> list[str]:
    """The same for every parameterisation of a table."""
    labels = present(LABELS, table[PARAMETERIZATION])
    return [noise_line(table[table[PARAMETERIZATION] == rule], label, symbol)
            for rule, label in labels.items()]


def selection_lines(table: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """How much of the lowest losses is owed to rates chosen on the same seeds: what they become
    where every seed has the rate that the others choose, over the rates that all seeds have;
    `keys` are the columns that tell sweeps apart."""
    rises = []
    for _, sweep in table.groupby([*keys], dropna=False, sort=False):
        losses = tables.losses(sweep)
        at = [sweep.loc[losses.index, key] for key in (SEED, RATE)]
        by_rate = losses.groupby(at).mean().unstack().dropna(axis=1)
        if min(by_rate.shape) > 1 and np.isfinite(lowest := by_rate.mean().min()):
            others = (by_rate.drop(index=seed).mean().idxmin() for seed in by_rate.index)
            chosen = [by_rate.loc[seed, rate] for seed, rate in zip(by_rate.index, others)]
            rises.append(float(np.mean(chosen)) - float(lowest))
    finite = [rise for rise in rises if math.isfinite(rise)]
    if not finite:
        return []
    gone = len(rises) - len(finite)
    return ["best rates are chosen on the seeds that they are judged by; chosen on the others, the "
            f"lowest loss is {np.mean(finite):.3f} nats higher in the mean and at most "
            f"{max(finite):.3f} (n = {len(rises)} sweeps"
            f"{f', in {gone} of which a run diverges' if gone else ''})"]


def basis(table: pd.DataFrame, found: Lines, keys: Sequence[str], symbol: str = "D") -> list[str]:
    """What a figure's findings rest on: optima at an edge, widths that are lost, the noise, and
    what selection costs; `keys` are the columns that tell its lines apart."""
    return [*edge_lines(found, symbol), *lost_lines(table, keys, symbol),
            *noise_lines(table, symbol), *selection_lines(table, [*keys, WIDTH])]


@dataclass(frozen=True)
class Exponent(Estimate):
    """The power of width in the optimal rate; NaN for fewer than two widths.

    `law` weighs all widths alike, `weighted` those whose optimum has an error, by it. The standard
    error is the larger of the one from the scatter of widths, which is small by chance where widths
    are few, and the one that the optima's own errors, at most LONGEST (which an unknown one counts
    as), imply for `law`. `edge` are widths left out: their best rate is the first or last tried.
    """

    law: fits.PowerLaw | None = None
    weighted: fits.PowerLaw | None = None
    widths: int = 0
    edge: tuple[int, ...] = ()
    sweeps: Sweeps = field(default_factory=dict)

    def text(self, digits: int = 2, sign: str = "+") -> str:
        """In words, with what it rests on."""
        edge = f"; at edge: {_listed(self.edge)}" if self.edge else ""
        if self.law is None:
            return f"no fit: {self.widths} width{'s' * (self.widths != 1)}{edge}"
        return self.through_widths(digits, sign, edge)


def exponent(sweeps: Sweeps) -> Exponent:
    """The exponent of the optimal rate over the widths whose optimum is not at the edge."""
    used = {width: sweep.best for width, sweep in sweeps.items() if not sweep.best.at_edge}
    edge = tuple(sorted(set(sweeps) - set(used)))
    law = weighted = None
    value, error = math.nan, math.nan
    known = {w: best for w, best in used.items() if math.isfinite(best.error) and best.error > 0}
    if len(known) > 1:
        values = [best.value for best in known.values()]
        weighted = fits.power_law(list(known), values, [best.error for best in known.values()])
    if len(used) > 1:
        law = fits.power_law(list(used), [best.value for best in used.values()])
        implied = slope({w: Estimate(0.0, error) for w, error in _octaves(sweeps).items()})
        value, error = law.exponent, np.fmax(law.error, implied.error)
    return Exponent(value, float(error), len(used), 2, law=law, weighted=weighted,
                    widths=len(used), edge=edge, sweeps=sweeps)


def _octaves(sweeps: Sweeps) -> dict[int, float]:
    """Width -> error of log2 of an optimum that is not at the edge, at most LONGEST, which stands
    for one that is not known where that of another width is."""
    own = {width: sweep.best.error for width, sweep in sweeps.items() if not sweep.best.at_edge}
    known = any(map(math.isfinite, own.values()))
    return {width: float(np.fmin(one, LONGEST)) if known else one for width, one in own.items()}


def optimum_text(sweep: RateSweep) -> str:
    """The rate, with its error as a factor; the best of the grid, as ~, without a parabola."""
    best = sweep.best
    if not best.inside:
        return f"~{best.value:.3g}"
    return f"{best.value:.3g}" + (f" x/÷ {2**best.error:.2g}" if math.isfinite(best.error) else "")


def transfer_text(sweeps: Sweeps) -> str:
    """The loss of the largest width at the best grid rate of the smallest, above its own best; not
    measured if that rate was not run there."""
    if len(sweeps) < 2:
        return "not measured nats"
    small, large = sweeps[min(sweeps)], sweeps[max(sweeps)]
    if small.best.grid_value == large.best.grid_value:
        return "same grid rate"
    loss = large.losses.get(small.best.grid_value, math.nan)
    cost = Estimate(loss - large.loss, math.sqrt(2) * large.error)
    return f"{cost.text()} nats" + ("" if math.isnan(loss) else f", of {large.loss:.3f}")


def optima_note(fits: Iterable[Exponent], symbol: str = "D") -> str:
    """What the marks in panels of these optima are."""
    fits = list(fits)
    hollow = HOLLOW_NOTE * any(fit.edge for fit in fits)
    whose = borrowed((fit.sweeps for fit in fits), symbol)
    return "; ".join(filter(None, (OPTIMA_NOTE, hollow, whose)))


def loss_law(sweeps: Sweeps) -> fits.IrreduciblePowerLaw | None:
    """Best loss against parameters as a power law with a floor; None below four sizes."""
    try:
        return fits.irreducible_power_law(
            [sweep.parameters for sweep in sweeps.values()],
            [sweep.loss for sweep in sweeps.values()],
            max(sweep.error for sweep in sweeps.values()),
        )
    except ValueError:
        return None


def law_text(law: fits.IrreduciblePowerLaw) -> str:
    """The law's two telling numbers."""
    if not math.isfinite(law.exponent_error):
        return f"floor not determined (n = {law.n})"
    floor = f"floor {law.floor:.2f} ± {law.floor_error:.2f}"
    return f"{floor}, k {law.exponent:.2f} ± {law.exponent_error:.2f} (n = {law.n} sizes)"


def gain(before: Sweeps, after: Sweeps, last: bool = True) -> tuple[int | None, Estimate]:
    """(width, loss before minus after) at the largest common width, or the smallest; None for the
    width without a common one."""
    common = sorted(set(before) & set(after))
    if not common:
        return None, UNKNOWN
    width = common[-1 if last else 0]
    return width, difference(before[width], after[width])


def difference(before: RateSweep, after: RateSweep) -> Estimate:
    """Lowest loss before minus after, at one width. Runs that share a seed see the same data, and
    most start alike: of three seeds or more, the same in both, the error is that of differences."""
    if len(before.runs) >= PAIRED and before.runs.keys() == after.runs.keys():
        return mean(differences(before.runs, after.runs))
    return unpaired(before, after)


def unpaired(before: RateSweep, after: RateSweep) -> Estimate:
    """The same where seeds do not pair: errors add in squares; one spread for both has its own
    degrees of freedom."""
    change = before.lowest - after.lowest
    return replace(change, freedom=before.freedom) if before.noise == after.noise else change


def gain_by_width(before: Sweeps, after: Sweeps) -> Estimate:
    """What a doubling of the width adds to the gain, in nats, over all common widths."""
    widths = sorted(set(before) & set(after))
    return slope({width: difference(before[width], after[width]) for width in widths})


def gain_text(before: Sweeps, after: Sweeps, symbol: str = "D") -> str:
    """The gain at the largest common width, and the smallest one's if that is another."""
    (width, change), (small, earlier) = gain(before, after), gain(before, after, last=False)
    note = f" ({earlier.value:+.3f} at {small})" if small != width else ""
    return "not measured" if width is None else f"{change.text()} at {symbol} = {width}{note}"


def compared(
    name: str, before: Sweeps, after: Sweeps, claim: str | None, published: str | None = None,
    symbol: str = "D",
) -> Finding:
    """The gain as a finding: the paper says that there is one (`gains`), a loss (`loses`), neither
    (`equal`), or nothing (None), in the words `published`."""
    _, change = gain(before, after)
    verdicts = {None: "", "gains": change.claimed_gain(), "loses": (-change).claimed_gain(),
                "equal": change.claimed_equal()}
    published = published or claim or "no claim"
    return Finding(name, gain_text(before, after, symbol), published, verdicts[claim], change)


def lines_of(
    table: pd.DataFrame, keys: Mapping[str, Mapping[str, str]], curves: Mapping[str, str]
) -> dict[tuple[str, ...], dict[int, RateSweep]]:
    """(value of every key column, curve) -> sweeps by width, of what has a finished run; `keys`
    and `curves` have the labels of what comes first, in this order. Lines of the same key values
    share the spread over seeds at a width."""
    if not keys:
        found = curve_sweeps(table, present(curves, table[CURVE]))
        return {(curve,): sweeps for curve, sweeps in found.items() if sweeps}
    (column, labels), *rest = keys.items()
    return {
        (value, *further): sweeps
        for value in present(labels, table[column])
        for further, sweeps in lines_of(table[table[column] == value], dict(rest), curves).items()
    }


# Panels that several figures share: loss against rate, optimum and best loss against size.


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
    octaves = _octaves(sweeps)
    for width, sweep in sweeps.items():
        best, error = sweep.best, float(np.nan_to_num(octaves.get(width, 0.0)))
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

    for axis, drawn in zip(axes, panels):
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

