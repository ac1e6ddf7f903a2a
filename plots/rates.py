"""Learning-rate sweeps of a table: optimum, lowest loss and noise at every width."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np
import pandas as pd

from param_groups import fits
from plots import naming, statistics, tables
from plots.findings import UNKNOWN, Estimate, Finding
from plots.statistics import differences, mean
from plots.style import LABELS
from plots.tables import CURVE, LOSS, PARAMETERIZATION, RATE, STATUS, WIDTH

# The spread over seeds is largest near divergence. So errors of optima and best losses use only
# points whose mean loss exceeds their sweep's lowest by at most this share.
NEAR = 0.05
FREE = 4  # least degrees of freedom for a width to use its own spread over seeds
PAIRED = 3  # seeds; with two, 95 % of Student's distribution reach to 12.7 errors
LONGEST = fits.WINDOW  # octaves; what a parabola leaves open by more it does not know
# Octaves to either side of the best rate that a parabola may be fitted to: its neighbours (None),
# and on a grid of factors of 2 up to where loss curves stop being parabolas.
WINDOWS = (None, 1.0, 1.5, 2.0, 2.5)
# By whom a sweep's best rate is judged.
JUDGES = {
    "fresh": "best rates are judged on fresh seeds",
    "others": "every seed is judged at the rate that the others choose",
    "own": "best rates are judged by the seeds that choose them",
}
BySeed = Mapping[float, Mapping[int, float]]  # rate -> seed -> loss, infinite where it diverged


@dataclass(frozen=True)
class RateSweep:
    """Loss against learning rate at one width.

    `chosen_from` has the runs that choose the `best` rate, and `runs`, by seed, those that judge
    it; `judges` says which seeds these are, a key of JUDGES, and `tried` has their losses at all
    rates. `noise` is the standard deviation of one run's loss over seeds (NaN: no point has two)
    with `freedom` degrees of freedom (None: not said), from the seeds of the widths `spread_of`.
    `blocked` says why its loss decides nothing.
    """

    width: int
    parameters: float
    chosen_from: BySeed
    best: fits.Optimum
    judges: str
    runs: Mapping[int, float]
    tried: BySeed
    noise: float
    freedom: int | None = None
    spread_of: tuple[int, ...] = ()
    blocked: str = ""

    @cached_property
    def losses(self) -> dict[float, float]:
        """Means over the seeds that choose, infinite where one diverged."""
        return {rate: fmean(of.values()) for rate, of in self.chosen_from.items()}

    @property
    def stable(self) -> dict[float, float]:
        """The sweep up to its first unstable rate, which is left out."""
        largest, _ = fits.stability(self.losses)
        return {r: loss for r, loss in self.losses.items() if r <= largest and math.isfinite(loss)}

    @property
    def unstable(self) -> float | None:
        """The first rate above the stable ones, if a run diverged there."""
        _, rate = fits.stability(self.losses)
        return rate if rate is not None and math.isinf(self.losses[rate]) else None

    @property
    def ended(self) -> dict[int, float]:
        """The runs that judge and did not diverge."""
        return {seed: loss for seed, loss in self.runs.items() if math.isfinite(loss)}

    @property
    def lost(self) -> int:
        """How many of them diverged."""
        return len(self.runs) - len(self.ended)

    @property
    def loss(self) -> float:
        """The best rate's mean loss over those that did not; NaN if all diverged."""
        return fmean(self.ended.values()) if self.ended else math.nan

    @property
    def lowest(self) -> Estimate:
        """The same with its standard error, from the spread over seeds."""
        error = self.noise / math.sqrt(max(len(self.ended), 1))
        return Estimate(self.loss, error, freedom=self.freedom, blocked=self.blocked)


Sweeps = Mapping[int, RateSweep]  # by width
Lines = Mapping[tuple[str, ...], Sweeps]  # what tells a line apart -> its sweeps


# From a table to sweeps


def rate_sweeps(
    rows: pd.DataFrame, noise: float | Mapping = math.nan, window: float | None = fits.WINDOW
) -> dict[int, RateSweep]:
    """Width -> sweep, of one line, with one noise or that of each width; widths where every rate
    has a run that diverged are left out. The parabola of the optimum reaches `window` octaves, or
    to the neighbours of the best rate."""
    rows = rows.dropna(subset=[WIDTH, RATE]).sort_values([WIDTH, RATE], kind="stable")
    sizes = rows.get(tables.PARAMETERS, math.nan)
    rows = rows.assign(**{tables.PARAMETERS: sizes, tables.FRESH: tables.is_fresh(rows)})
    cells: dict[int, tuple[float, dict, dict]] = {}  # parameters, runs that choose, fresh runs
    columns = (WIDTH, tables.PARAMETERS, tables.FRESH, RATE)
    for width, size, fresh, rate, seed, loss in tables.runs(rows, *columns):
        cell = cells.setdefault(int(width), (float(size), {}, {}))
        cell[1 + fresh].setdefault(rate, {})[seed] = loss
    edge = "near_edge" in set(rows.get("constants", ()))
    sweeps, why = {}, "constants near an edge" if edge else ""
    for width, (size, runs, others) in cells.items():
        losses = {rate: fmean(of.values()) for rate, of in runs.items()}
        if not any(map(math.isfinite, losses.values())):
            continue
        own = noise[width] if isinstance(noise, Mapping) else noise
        best = fits.optimum(losses, window, own / math.sqrt(min(map(len, runs.values()))))
        judges, judging = _judged(runs, others, best.grid_value)
        tried = others if judges == "fresh" else runs
        sweeps[width] = RateSweep(width, size, runs, best, judges, judging, tried, own, blocked=why)
    return sweeps


def _judged(runs: BySeed, fresh: BySeed, best: float) -> tuple[str, dict[int, float]]:
    """(which seeds judge the best rate, a key of JUDGES, and their losses)."""
    if best in fresh:
        return "fresh", dict(fresh[best])
    if chosen := chosen_by_others(runs):
        return "others", {seed: runs[rate][seed] for seed, rate in chosen.items()}
    return "own", dict(runs[best])


def chosen_by_others(runs: BySeed) -> dict[int, float]:
    """Seed -> the rate with the lowest mean loss of all other seeds, the lowest of equals, of rates
    that every seed has; empty below three seeds or two such rates."""
    seeds = sorted({seed for of in runs.values() for seed in of})
    shared = {rate: of for rate, of in sorted(runs.items()) if len(of) == len(seeds)}
    if len(seeds) < PAIRED or len(shared) < 2:
        return {}

    def without(seed: int, rate: float) -> float:
        return fmean(loss for one, loss in shared[rate].items() if one != seed)

    return {seed: min(shared, key=lambda rate: without(seed, rate)) for seed in seeds}


def curve_sweeps(rows: pd.DataFrame, curves: Iterable[str]) -> dict[str, dict[int, RateSweep]]:
    """Curve -> sweeps by width, empty where no run has finished. Errors rest on the spread over
    seeds at the same width (`width_noise`), all curves of the rows together."""
    known = width_noise(rows)
    noise = {width: one for width, (one, _, _) in known.items()}
    return {
        curve: {
            width: replace(sweep, freedom=known[width][1], spread_of=known[width][2])
            for width, sweep in rate_sweeps(rows[rows[CURVE] == curve], noise).items()
        }
        for curve in curves
    }


def lines_of(
    table: pd.DataFrame, keys: Mapping[str, Mapping[str, str]], curves: Mapping[str, str]
) -> dict[tuple[str, ...], dict[int, RateSweep]]:
    """(value of every key column, curve) -> sweeps by width, of what has a finished run; `keys`
    and `curves` have the labels of what comes first, in this order. Lines of the same key values
    share the spread over seeds at a width."""
    if not keys:
        by_curve = curve_sweeps(table, naming.present(curves, table[CURVE]))
        return {(curve,): sweeps for curve, sweeps in by_curve.items() if sweeps}
    (column, labels), *rest = keys.items()
    return {
        (value, *further): sweeps
        for value in naming.present(labels, table[column])
        for further, sweeps in lines_of(table[table[column] == value], dict(rest), curves).items()
    }


# Noise


def seeded_points(rows: pd.DataFrame) -> list[tuple[int, float, int]]:
    """(width, variance of the losses, its degrees of freedom) of the points that errors rest on:
    they have two finished seeds or more, none of them diverged, and a mean loss at most NEAR above
    the lowest of their sweep. A point of runs that several curves share counts once."""
    keys = [key for key in (PARAMETERIZATION, tables.OPTIMIZER, tables.EPS) if key in rows]
    groups = {f"{key} group": rows[key].factorize(sort=True)[0] for key in (CURVE, *keys)}
    rows = rows.assign(**groups).dropna(subset=[WIDTH]).sort_values(RATE, kind="stable")
    sweeps: dict[tuple, dict[float, list[float]]] = {}
    for *sweep, rate, _, loss in tables.runs(rows, *groups, WIDTH, RATE):
        sweeps.setdefault(tuple(sweep), {}).setdefault(rate, []).append(loss)
    points = {}
    for (_, *place), losses in sorted(sweeps.items()):
        means = {rate: fmean(of) for rate, of in losses.items()}
        lowest = min(means.values())
        for rate, of in losses.items():
            free = len(of) - 1
            if free and means[rate] <= (1 + NEAR) * lowest < math.inf:
                point = int(place[-1]), float(np.var(of, ddof=1)), free
                points[*place, rate, means[rate], *point] = point
    return list(points.values())


def seed_noise(points: Sequence[tuple[int, float, int]], least: int = 1) -> tuple[float, int]:
    """(standard deviation of one run's loss over seeds, its degrees of freedom), pooled over
    `seeded_points`; (NaN, 0) below `least` of these."""
    _, variances, free = np.reshape(points, (-1, 3)).T
    known = int(free.sum())
    return (math.sqrt((variances * free).sum() / known), known) if known >= least else (math.nan, 0)


def width_noise(rows: pd.DataFrame) -> dict[int, tuple[float, int, tuple[int, ...]]]:
    """Width -> (standard deviation of one run's loss over seeds, its degrees of freedom, widths it
    is pooled over). Each width uses its own, as widths differ several-fold; one with fewer than
    FREE degrees of freedom uses that of all widths with seeds."""
    points, widths = seeded_points(rows), sorted(map(int, rows[WIDTH].dropna().unique()))
    every = *seed_noise(points), tuple(sorted({width for width, _, _ in points}))
    own = {n: seed_noise([point for point in points if point[0] == n], FREE) for n in widths}
    return {n: (noise, free, (n,)) if free else every for n, (noise, free) in own.items()}


# What findings rest on, said once


def basis(table: pd.DataFrame, lines: Lines, keys: Sequence[str], symbol: str = "D") -> list[str]:
    """Optima at an edge, whose loss is an upper bound; widths where every run diverged; the noise;
    and which seeds judge. `keys` are the columns that tell a figure's lines apart."""
    edge = {
        ", ".join(names): [w for w, one in line.items() if one.best.at_edge and len(one.losses) > 1]
        for names, line in lines.items()
    }
    text = _at("best rate first or last of those tried", edge, symbol)
    ended = np.isfinite(table[LOSS]) & (table[STATUS] == "finished")
    ended = ended[~tables.is_fresh(table)]
    whole = ended.groupby([table[key] for key in (*keys, WIDTH, RATE)]).all()
    lost: dict[str, list[int]] = {}
    for (*names, width), any_rate in whole.groupby(level=[*keys, WIDTH]).any().items():
        lost.setdefault(", ".join(map(str, names)), []).extend([] if any_rate else [int(width)])
    text += _at("a run diverged at every rate", lost, symbol)
    return [*text, noise_line(table, symbol), *_judges(lines, symbol)]


def _at(what: str, widths: Mapping[str, Sequence[int]], symbol: str) -> list[str]:
    """A line that names lines and their widths; none where there are none."""
    named = [f"{name} at {symbol} = {listed(own)}" for name, own in widths.items() if own]
    return [f"{what}: {'; '.join(named)}"] if named else []


def listed(widths: Iterable[int]) -> str:
    """Widths in a row."""
    return ", ".join(map(str, widths))


def noise_line(table: pd.DataFrame, symbol: str = "D") -> str:
    """The standard deviation of the final loss over seeds, near optima, by parameterisation."""
    parts = {"": table}
    if PARAMETERIZATION in table:
        rules = naming.present(LABELS, table[PARAMETERIZATION])
        parts = {rules[rule]: table[table[PARAMETERIZATION] == rule] for rule in rules}
    text = []
    for label, rows in parts.items():
        at: dict[str, list[int]] = {}
        for width, (spread, _, of) in width_noise(rows).items():
            whose = "" if of == (width,) else f" (spread of {symbol} = {listed(of)})"
            words = f"{spread:.3f} at {symbol} = {{}}{whose}" if of else "unknown, of one seed"
            at.setdefault(words, []).append(width)
        known = (words.format(listed(widths)) for words, widths in at.items())
        text.append(f"{label} {', '.join(known)}".strip())
    return "standard deviation of the final loss over seeds, near optima (nats): " + "; ".join(text)


def _judges(lines: Lines, symbol: str) -> list[str]:
    """Which seeds judge the best rates, and which of their runs diverged; one rate is no choice."""
    kinds: dict[str, list[RateSweep]] = {}
    lost: dict[str, list[int]] = {}
    for names, line in lines.items():
        for sweep in (sweep for sweep in line.values() if len(sweep.losses) > 1):
            kinds.setdefault(sweep.judges, []).append(sweep)
        lost[", ".join(names)] = [width for width, sweep in line.items() if sweep.lost]
    text = []
    for kind, sweeps in sorted(kinds.items()):
        rises = [sweep.loss - sweep.best.loss for sweep in sweeps if not sweep.lost]
        above = f", {np.mean(rises):.3f} nats above the lowest loss in the mean" if rises else ""
        text.append(f"{JUDGES[kind]} (n = {len(sweeps)} sweeps{above if kind == 'others' else ''})")
    return [*text, *_at("of the runs that judge some diverge, and are left out", lost, symbol)]


# Exponents of the optimum


@dataclass(frozen=True)
class Exponent(statistics.Power):
    """The power of width in the optimal rate; `edge`: widths left out, with optima at an edge;
    `windows`: how far other windows of the parabolas move it, which its error does not hold."""

    edge: tuple[int, ...] = ()
    windows: float = math.nan
    sweeps: Sweeps = field(default_factory=dict, compare=False)

    @property
    def basis(self) -> tuple[float, float]:
        """(seeds that choose an optimum, fewest of all widths, widths)."""
        counts = (len(of) for s in self.sweeps.values() for of in s.chosen_from.values())
        return float(min(counts, default=0)), float(self.groups or 0)

    def text(self, digits: int = 2, sign: str = "+") -> str:
        """In words, with what it rests on."""
        edge = f"; at edge: {listed(self.edge)}" if self.edge else ""
        if math.isnan(self.value):
            return f"no fit: {self.groups} width{'s' * (self.groups != 1)}{edge}"
        moved = f"; other windows ± {self.windows:.{digits}f}" if self.windows >= 0 else ""
        return self.through_widths(digits, sign, edge + moved) + self.bent


def exponent(sweeps: Sweeps) -> Exponent:
    """The exponent of the optimal rate over the widths whose optimum is not at the edge, all alike,
    with the error of `statistics.power`."""
    used = {width: sweep for width, sweep in sweeps.items() if not sweep.best.at_edge}
    points = {width: math.log2(sweep.best.value) for width, sweep in used.items()}
    value = statistics.power(points).value
    moved = [abs(one - value) for one in by_window(used).values()]
    fit = statistics.power(points, octaves(sweeps), without_each_seed(used))
    edge = tuple(sorted(set(sweeps) - set(used)))
    blocked = next((sweep.blocked for sweep in sweeps.values() if sweep.blocked), "")
    further = {"edge": edge, "windows": max(moved, default=math.nan), "sweeps": sweeps}
    return Exponent(**{**vars(fit), **further, "blocked": blocked})


def by_window(sweeps: Sweeps) -> dict[float | None, float]:
    """Window -> the exponent with the parabolas of all optima fitted to it."""
    exponents = {}
    for window in WINDOWS:
        best = {width: fits.optimum(sweep.losses, window) for width, sweep in sweeps.items()}
        points = {w: math.log2(one.value) for w, one in best.items() if not one.at_edge}
        exponents[window] = statistics.power(points).value
    return {window: value for window, value in exponents.items() if math.isfinite(value)}


def without_each_seed(sweeps: Sweeps) -> list[dict[int, float]]:
    """Width -> log2 of the optimum without one seed, for each of the seeds that all widths share:
    runs of a seed share random numbers across widths. None below three of them."""
    seeds = [{seed for of in s.chosen_from.values() for seed in of} for s in sweeps.values()]
    shared = sorted(set.intersection(*seeds)) if seeds else []
    parts = []
    for left in shared if len(shared) >= PAIRED else ():
        others = set(shared) - {left}
        part = {}
        for width, sweep in sweeps.items():
            runs = {r: [of[s] for s in of if s in others] for r, of in sweep.chosen_from.items()}
            losses = {rate: fmean(of) for rate, of in runs.items() if of}
            ends = any(map(math.isfinite, losses.values()))
            part[width] = math.log2(fits.optimum(losses, fits.WINDOW).value) if ends else math.nan
        parts.append(part)
    return parts


def octaves(sweeps: Sweeps) -> dict[int, float]:
    """Width -> standard error of log2 of the optimum, for optima not at the edge. It is unknown
    (NaN) without a parabola, and where the parabola leaves open more than LONGEST octaves."""
    own = {width: sweep.best.error for width, sweep in sweeps.items() if not sweep.best.at_edge}
    return {width: one if one < LONGEST else math.nan for width, one in own.items()}


def optimum_text(sweep: RateSweep) -> str:
    """The rate, with its error as a factor; the best of the grid, as ~, without a parabola."""
    best = sweep.best
    if not best.inside:
        return f"~{best.value:.3g}"
    return f"{best.value:.3g}" + (f" x/÷ {2**best.error:.2g}" if math.isfinite(best.error) else "")


# Losses of the best rate


def transfer_text(sweeps: Sweeps) -> str:
    """The loss of the largest width at the best grid rate of the smallest, above its own best; not
    measured if that rate was not run there."""
    if len(sweeps) < 2:
        return "not measured nats"
    small, large = sweeps[min(sweeps)], sweeps[max(sweeps)]
    if small.best.grid_value == large.best.grid_value:
        return "same grid rate"
    cost = cost_of(large, small.best.grid_value)
    return f"{cost.text()} nats" + ("" if math.isnan(cost.value) else f", of {large.loss:.3f}")


def cost_of(sweep: RateSweep, rate: float) -> Estimate:
    """The loss at `rate` minus the best rate's loss, on the seeds that judge it, paired if there
    are three; infinite if a run diverged at `rate`, NaN if it was not run."""
    there = sweep.tried.get(rate, {})
    if not all(map(math.isfinite, there.values())):
        return Estimate(math.inf, math.nan)
    pairs = differences(there, sweep.ended)
    if len(pairs) >= PAIRED:
        return replace(mean(pairs), blocked=sweep.blocked)
    loss = fmean(there.values()) if there else math.nan
    return Estimate(loss - sweep.loss, math.sqrt(2) * sweep.lowest.error, blocked=sweep.blocked)


def difference(before: RateSweep, after: RateSweep) -> Estimate:
    """Lowest loss before minus after, at one width. Runs of one seed see the same data, and most
    start from equal weights: if both sides have the same three seeds or more, the error is that of
    paired differences, over the seeds that diverge on neither side."""
    change = unpaired(before, after)
    if len(before.runs) >= PAIRED and before.runs.keys() == after.runs.keys():
        return replace(mean(differences(before.ended, after.ended)), blocked=change.blocked)
    return change


def unpaired(before: RateSweep, after: RateSweep) -> Estimate:
    """The same where seeds do not pair: errors add in squares."""
    change = before.lowest - after.lowest
    return replace(change, freedom=before.freedom) if before.noise == after.noise else change


def gains(before: Sweeps, after: Sweeps) -> dict[int, Estimate]:
    """Common width -> loss before minus after; unknown where a run diverged on either side, as the
    remaining runs are the better ones."""
    return {
        width: difference(before[width], after[width])
        if not (before[width].lost or after[width].lost)
        else UNKNOWN
        for width in sorted(before.keys() & after.keys())
    }


def compared(
    name: str, before: Sweeps, after: Sweeps, claim: str | None, published="", symbol="D"
) -> Finding:
    """Loss before minus after at the largest common width as a finding: the paper says that there
    is a gain (`gains`), a loss (`loses`), neither (`equal`), or nothing (None), in the words
    `published`. Where a run diverges nothing is decided."""
    by_width = gains(before, after)
    if not by_width:
        verdict = "not measured" if claim else ""
        return Finding(name, "not measured", published or claim or "no claim", verdict, UNKNOWN)
    (width, change), small = max(by_width.items()), min(by_width)
    at = f" at {symbol} = {width}"
    if small != width and math.isfinite(by_width[small].value):
        at += f" ({by_width[small].value:+.3f} at {small})"
    change, text = replace(change, by_size=by_width), change.text()
    lost = before[width].lost + after[width].lost
    if lost:
        text = f"{difference(before[width], after[width]).text()}, {lost} diverged"
    finding = change.judged(name, claim, published or claim or "no claim", text=text + at)
    return replace(finding, verdict="undecided: a run diverges") if lost and claim else finding
