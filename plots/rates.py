"""Learning-rate sweeps of a table: optimum, lowest loss and noise at every width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
import pandas as pd

from measure import fits
from plots import tables
from plots.findings import UNKNOWN, Estimate, Finding
from plots.statistics import differences, mean, slope
from plots.style import LABELS, present
from plots.tables import CURVE, LOSS, PARAMETERIZATION, RATE, STATUS, WIDTH

# Seeds differ most close to divergence; what errors of optima and best losses rest on is the
# spread of points whose mean loss is at most this much above their sweep's lowest.
NEAR = 0.05
FREE = 4  # degrees of freedom that a width's own spread takes
PAIRED = 3  # seeds; with two, 95 % of Student's distribution reach to 12.7 errors
LONGEST = fits.WINDOW  # octaves; an optimum lies within them of the best rate, whatever its error
# By whom a sweep's best rate is judged, in the words of `selection_lines`.
JUDGES = {
    "fresh": "best rates are judged on fresh seeds",
    "others": "every seed is judged at the rate that the others choose",
    "own": "best rates are judged by the seeds that choose them",
}


@dataclass(frozen=True)
class RateSweep:
    """Loss against learning rate at one width.

    `losses` are means over the seeds that were run, infinite where one diverged, and `best` is the
    rate that they choose. `runs`, by seed and infinite where one diverged, judge it; `judges` says
    which seeds these are, a key of JUDGES, and `tried` has their losses by rate and seed. `noise`
    is the standard deviation of one run's loss over seeds (NaN: no point has two) with `freedom`
    degrees of freedom (None: not said), and `spread_of` are the widths whose seeds it comes from
    (empty: not said).
    """

    width: int
    parameters: float
    losses: Mapping[float, float]
    runs: Mapping[int, float]
    noise: float
    best: fits.Optimum
    judges: str
    tried: Mapping[float, Mapping[int, float]]
    freedom: int | None = None
    spread_of: tuple[int, ...] = ()

    @property
    def stable(self) -> dict[float, float]:
        """The sweep up to its first unstable rate, which is left out."""
        largest, _ = fits.stability(self.losses)
        return {
            rate: loss
            for rate, loss in sorted(self.losses.items())
            if rate <= largest and math.isfinite(loss)
        }

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
    def error(self) -> float:
        """Its standard error, from the spread over seeds."""
        return self.noise / math.sqrt(max(len(self.ended), 1))

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
        fresh = tables.is_fresh(cell)
        runs = tables.losses_by(cell[~fresh], RATE)
        losses = tables.mean_losses(runs)
        if any(map(math.isfinite, losses.values())):
            spread = noise / math.sqrt(min(map(len, runs.values())))
            best = fits.optimum(losses, window, spread)
            size = float(cell[tables.PARAMETERS].iloc[0]) if tables.PARAMETERS in cell else math.nan
            others = tables.losses_by(cell[fresh], RATE)
            judges, judging = _judged(runs, others, best.grid_value)
            tried = others if judges == "fresh" else runs
            by_seed = {rate: dict(own) for rate, own in tried.items()}
            found[int(width)] = RateSweep(
                int(width), size, losses, judging, noise, best, judges, by_seed
            )
    return found


def _judged(
    runs: Mapping[float, Sequence[tuple[int, float]]],
    fresh: Mapping[float, Sequence[tuple[int, float]]],
    best: float,
) -> tuple[str, dict[int, float]]:
    """(which seeds judge the best rate, their losses): fresh ones, where there are any; else every
    seed at the rate that the others choose; else those that choose it."""
    if best in fresh:
        return "fresh", dict(fresh[best])
    if chosen := chosen_by_others(runs):
        return "others", {seed: dict(runs[rate])[seed] for seed, rate in chosen.items()}
    return "own", dict(runs[best])


def chosen_by_others(runs: Mapping[float, Sequence[tuple[int, float]]]) -> dict[int, float]:
    """Seed -> the rate with the lowest mean loss of all other seeds, the lowest of equals, of rates
    that every seed has; empty below three seeds or two such rates. `runs`: rate -> (seed, loss),
    by rising rate."""
    seeds = sorted({seed for own in runs.values() for seed, _ in own})
    shared = {rate: dict(own) for rate, own in runs.items() if len(dict(own)) == len(seeds)}
    if len(seeds) < PAIRED or len(shared) < 2:
        return {}
    means = {
        seed: {
            rate: fmean(loss for other, loss in own.items() if other != seed)
            for rate, own in shared.items()
        }
        for seed in seeds
    }
    return {seed: min(of, key=lambda rate: of[rate]) for seed, of in means.items()}


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
            text.append(
                f"{', '.join(names)}: best rate at the edge of its sweep at {symbol} = "
                f"{_listed(edge)}"
            )
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
    at = (
        f"all {symbol}"
        if len(others) == len(dict(every))
        else (f"{symbol} = {_listed(sorted(others))}")
    )
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
    return [
        noise_line(table[table[PARAMETERIZATION] == rule], label, symbol)
        for rule, label in labels.items()
    ]


def selection_lines(found: Lines, symbol: str = "D") -> list[str]:
    """By which seeds best rates are judged, how far that is above the lowest loss of the seeds that
    choose where they are the same seeds, and which of them diverge; a single rate was not chosen.
    """
    kinds: dict[str, list[RateSweep]] = {}
    lost = []
    for names, line in found.items():
        for sweep in (sweep for sweep in line.values() if len(sweep.losses) > 1):
            kinds.setdefault(sweep.judges, []).append(sweep)
        gone = ", ".join(
            f"{sweep.lost} of {len(sweep.runs)} at {symbol} = {width}"
            for width, sweep in line.items()
            if sweep.lost
        )
        lost += [f"{', '.join(names)}: {gone}"] * bool(gone)
    text = []
    for kind, sweeps in sorted(kinds.items()):
        rises = [sweep.loss - sweep.best.loss for sweep in sweeps if not sweep.lost]
        line = f"{JUDGES[kind]} (n = {len(sweeps)} sweeps)"
        if kind == "others" and rises:
            line += (
                f", {np.mean(rises):.3f} nats in the mean and {max(rises):.3f} at most above "
                f"the lowest loss (n = {len(rises)} without one that diverges)"
            )
        text.append(line)
    return [
        *text,
        *(
            ["runs that judge a best rate diverge, and are left out: " + "; ".join(lost)]
            if lost
            else []
        ),
    ]


def basis(table: pd.DataFrame, found: Lines, keys: Sequence[str], symbol: str = "D") -> list[str]:
    """What a figure's findings rest on: optima at an edge, widths that are lost, the noise, and
    which seeds judge; `keys` are the columns that tell its lines apart."""
    return [
        *edge_lines(found, symbol),
        *lost_lines(table, keys, symbol),
        *noise_lines(table, symbol),
        *selection_lines(found, symbol),
    ]


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
        implied = slope({w: Estimate(0.0, error) for w, error in octaves(sweeps).items()})
        value, error = law.exponent, np.fmax(law.error, implied.error)
    return Exponent(
        value,
        float(error),
        len(used),
        2,
        law=law,
        weighted=weighted,
        widths=len(used),
        edge=edge,
        sweeps=sweeps,
    )


def octaves(sweeps: Sweeps) -> dict[int, float]:
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
    cost = cost_of(large, small.best.grid_value)
    return f"{cost.text()} nats" + ("" if math.isnan(cost.value) else f", of {large.loss:.3f}")


def cost_of(sweep: RateSweep, rate: float) -> Estimate:
    """The loss at a rate above that of the best one, on the seeds that judge it, by seed where
    there are three; infinite where one diverged there, NaN where it was not run."""
    there = sweep.tried.get(rate, {})
    if not all(map(math.isfinite, there.values())):
        return Estimate(math.inf, math.nan)
    pairs = differences(there, sweep.ended)
    if len(pairs) >= PAIRED:
        return mean(pairs)
    loss = fmean(there.values()) if there else math.nan
    return Estimate(loss - sweep.loss, math.sqrt(2) * sweep.error)


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
    most start alike: of three seeds or more, the same in both, the error is that of differences,
    over those that diverge on neither side."""
    if len(before.runs) >= PAIRED and before.runs.keys() == after.runs.keys():
        return mean(differences(before.ended, after.ended))
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
    if width is None:
        return "not measured"
    note = f" ({earlier.value:+.3f} at {small})" if small != width else ""
    lost = before[width].lost + after[width].lost
    return f"{change.text()} at {symbol} = {width}{note}" + f"; {lost} diverged" * bool(lost)


def compared(
    name: str,
    before: Sweeps,
    after: Sweeps,
    claim: str | None,
    published: str | None = None,
    symbol: str = "D",
) -> Finding:
    """The gain as a finding: the paper says that there is one (`gains`), a loss (`loses`), neither
    (`equal`), or nothing (None), in the words `published`. What is left of runs of which some
    diverge decides nothing: they are the better ones."""
    width, change = gain(before, after)
    verdicts = {
        None: "",
        "gains": change.claimed_gain(),
        "loses": (-change).claimed_gain(),
        "equal": change.claimed_equal(),
    }
    verdict, published = verdicts[claim], published or claim or "no claim"
    if width is not None and (before[width].lost or after[width].lost):
        verdict, change = "undecided: a run diverges" if claim else "", UNKNOWN
    return Finding(name, gain_text(before, after, symbol), published, verdict, change)


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
