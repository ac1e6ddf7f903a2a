"""Does the best learning rate stay as a model grows? What to train next, and what the losses say.

Everything here is a function of the losses so far; `transfer_command` trains. At every width a grid
of rates is trained with some seeds and grows past an edge until the best rate has neighbours.
Further seeds then judge two rates of each width: its own best and the smallest width's.

The vertex of a parabola in log2 of the rate is a width's best rate (`fits.optimum`). Its error
follows from what seeds leave open in the shape of the curve, pooled over all widths' rates near
their best. The power of the width is the weighted line through the vertices; scatter beyond their
errors widens its error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from param_groups import fits
from param_groups.check.slopes import student
from param_groups.fits import Optimum, PowerLaw

# Powers of rules that work and of those that do not differ by halves: nearer to 0 than half of
# that, a best rate stays.
EFFECT = 0.25
# The spread over seeds grows near divergence: it is taken from rates whose mean loss exceeds their
# width's lowest by at most this share.
NEAR = 0.05
OCTAVES = 8.0  # that a grid may grow beyond either end before a width is given up
MOST_SEEDS = 64  # that are worth asking for
STAYS, MOVES, UNDECIDED = "stays", "moves", "undecided"


class Run(NamedTuple):
    """One training run; `octave` is log2 of its rate."""

    width: int
    octave: float
    seed: int


@dataclass(frozen=True)
class Grid:
    """What is trained: `octaves` are log2 of the first rates, `step` apart; the `seeds` choose the
    best rates and the `fresh` ones judge them."""

    widths: tuple[int, ...]
    octaves: tuple[float, ...]
    step: float
    seeds: tuple[int, ...]
    fresh: tuple[int, ...]

    def all_of(self, width: int, octaves: Sequence[float], seeds: Sequence[int]) -> list[Run]:
        """Every rate with every seed at one width."""
        return [Run(width, octave, seed) for octave in octaves for seed in seeds]


Losses = Mapping[Run, float]  # infinite where a run diverged


def means(grid: Grid, losses: Losses, width: int) -> dict[float, float]:
    """Octave -> mean loss over the seeds that choose, at rates where all of them have run."""
    rates: dict[float, float] = {}
    for octave in sorted({run.octave for run in losses if run.width == width}):
        runs = grid.all_of(width, [octave], grid.seeds)
        if all(run in losses for run in runs):
            rates[octave] = fmean(losses[run] for run in runs)
    return rates


def wanted(grid: Grid, losses: Losses) -> list[Run]:
    """The runs that come next; none when the grid is done."""
    first = [run for w in grid.widths for run in grid.all_of(w, grid.octaves, grid.seeds)]
    if missing := [run for run in first if run not in losses]:
        return missing
    if beyond := [run for w in grid.widths for run in _beyond(grid, losses, w)]:
        return beyond
    rates = {w: judged_octaves(grid, losses, w) for w in grid.widths}
    judged = [run for w, own in rates.items() for run in grid.all_of(w, own, grid.fresh)]
    return [run for run in judged if run not in losses]


def _beyond(grid: Grid, losses: Losses, width: int) -> list[Run]:
    """The next rate where the best one is at an edge, or where every run diverged."""
    known = means(grid, losses, width)
    octaves, ends = [*known], any(map(math.isfinite, known.values()))
    best = fits.best_grid_value(known) if ends else octaves[0]
    if best == octaves[0]:
        further, grown = octaves[0] - grid.step, grid.octaves[0] - octaves[0]
    elif best == octaves[-1]:
        further, grown = octaves[-1] + grid.step, octaves[-1] - grid.octaves[-1]
    else:
        return []
    return grid.all_of(width, [further], grid.seeds) if grown < OCTAVES else []


def judged_octaves(grid: Grid, losses: Losses, width: int) -> list[float]:
    """The best rate of the smallest width and this one's own, as far as they are known."""
    of = [means(grid, losses, one) for one in (grid.widths[0], width)]
    best = [fits.best_grid_value(one) for one in of if any(map(math.isfinite, one.values()))]
    return sorted({*best}) if len(best) == 2 else []


# Answers


@dataclass(frozen=True)
class AtWidth:
    """What one width says. `lowest` and `at_base` are mean losses of the seeds that judge, at its
    best grid rate, whose log2 is `octave`, and at the smallest width's; `price` is their mean
    difference, `error` its standard error (NaN: one seed). `losses` has the mean over the seeds
    that choose by rate."""

    width: int
    best: Optimum | None
    octave: float
    lowest: float
    at_base: float
    price: float
    error: float
    losses: Mapping[float, float]


@dataclass(frozen=True)
class Answer:
    """The verdict and what it rests on.

    `power` is the law of the best rates (None: fewer than two widths have one), `error` its
    exponent's standard error with `freedom` degrees of freedom, `advice` what would decide.
    """

    verdict: str
    at: tuple[AtWidth, ...]
    power: PowerLaw | None
    error: float
    freedom: float
    advice: str = ""

    @property
    def reach(self) -> float:
        """How far the 95 % interval of the power reaches to either side."""
        return student(self.freedom) * self.error


def answer(grid: Grid, losses: Losses, effect: float = EFFECT) -> Answer:
    """The verdict on the power of the width in the best rate.

    *stays*: its 95 % interval lies within `effect` of 0; *moves*: outside; *undecided*: neither, or
    a width whose best rate is unknown.
    """
    noise, freedom = seed_noise(grid, losses)
    at = tuple(_at(grid, losses, width, noise) for width in grid.widths)
    inside = {one.width: one.best for one in at if one.best and not one.best.at_edge}
    power, error, freedom = _power(inside, freedom)
    result = Answer(UNDECIDED, at, power, error, freedom)
    if lost := [str(one.width) for one in at if one.width not in inside]:
        advice = f"no best rate between others at width {', '.join(lost)}: give other --lr"
        return replace(result, advice=advice)
    if power is None or not math.isfinite(result.reach):
        return replace(result, advice="give more --seeds or --widths")
    size = abs(power.exponent)
    if size + result.reach < effect:
        return replace(result, verdict=STAYS)
    if size - result.reach > effect:
        return replace(result, verdict=MOVES)
    seeds = math.ceil(len(grid.seeds) * (result.reach / max(abs(size - effect), 1e-9)) ** 2)
    if seeds <= MOST_SEEDS:
        return replace(result, advice=f"--seeds {seeds} would decide if the power stays as it is")
    part = f"the power is too near to {effect:g}, where the words part"
    return replace(result, advice=f"{part}: give --widths further apart")


def seed_noise(grid: Grid, losses: Losses) -> tuple[float, float]:
    """(standard deviation of one run's loss near the best rates, degrees of freedom).

    A seed's data and initial values are the same at every rate. What they add to all of a width's
    losses moves no vertex, so it is taken out: what is left are residuals from rates and seeds.
    """
    total, freedom = 0.0, 0.0
    for width in grid.widths:
        known = means(grid, losses, width)
        lowest = min(known.values(), default=math.inf)
        octaves = [octave for octave, mean in known.items() if math.isfinite(mean)]  # rising
        best = octaves.index(fits.best_grid_value(known)) if octaves else 0
        beside = octaves[max(best - 1, 0) : best + 2]  # a steep curve has no others near its best
        near = [one for one in octaves if one in beside or known[one] <= (1 + NEAR) * lowest]
        if len(near) > 1 and len(grid.seeds) > 1:
            of = np.array([[losses[Run(width, one, s)] for s in grid.seeds] for one in near])
            rest = of - of.mean(axis=0) - of.mean(axis=1, keepdims=True) + of.mean()
            total += float((rest**2).sum())
            freedom += (len(near) - 1) * (len(grid.seeds) - 1)
    return (math.sqrt(total / freedom), freedom) if freedom else (math.nan, 0.0)


def _at(grid: Grid, losses: Losses, width: int, noise: float) -> AtWidth:
    known = means(grid, losses, width)
    rates = {2.0**octave: loss for octave, loss in known.items()}
    first = means(grid, losses, grid.widths[0])
    if not all(any(map(math.isfinite, of.values())) for of in (known, first)):
        return AtWidth(width, None, math.nan, math.nan, math.nan, math.nan, math.nan, rates)
    best = fits.optimum(rates, fits.WINDOW, noise / math.sqrt(len(grid.seeds)))
    octaves = fits.best_grid_value(known), fits.best_grid_value(first)
    seeds = grid.fresh or grid.seeds
    pairs = [
        [losses.get(Run(width, octave, seed), math.nan) for octave in octaves] for seed in seeds
    ]
    own, base = (fmean(column) for column in zip(*pairs, strict=True))
    above = [there - here for here, there in pairs]
    spread = (
        np.std(above, ddof=1) if len(above) > 1 and all(map(math.isfinite, above)) else math.nan
    )
    error = float(spread) / len(above) ** 0.5
    return AtWidth(width, best, octaves[0], own, base, base - own, error, rates)


def _power(inside: Mapping[int, Optimum], freedom: float) -> tuple[PowerLaw | None, float, float]:
    """(law of the best rates, its exponent's standard error, degrees of freedom)."""
    if len(inside) < 2:
        return None, math.nan, 0
    widths, rates = [*inside], [one.value for one in inside.values()]
    errors = [one.error for one in inside.values()]
    if not freedom or not all(math.isfinite(error) and error > 0 for error in errors):
        plain = fits.power_law(widths, rates)
        return plain, plain.error, len(inside) - 2
    law = fits.power_law(widths, rates, errors)
    off = [math.log2(rate / law(w)) / e for w, rate, e in zip(widths, rates, errors, strict=True)]
    scatter = sum(one * one for one in off) / max(len(off) - 2, 1)
    return law, law.error * math.sqrt(max(1.0, scatter)), freedom


def collapse(curves: Mapping[int, Sequence[Sequence[float]]]) -> tuple[float, float]:
    """(spread over widths, spread over seeds) of loss curves brought to one scale.

    Each curve is (loss - last) / (first - last) over the share of training done; widths are
    compared by their means over seeds, seeds by the error that they leave in such a mean. Widths
    that differ by no more than seeds do train alike up to units (Qiu et al. 2025).

    Args:
        curves: width -> a curve of losses per seed, all of one length.
    """
    rows = {width: np.array(of) for width, of in curves.items()}
    scaled = {w: (of - of[:, -1:]) / (of[:, :1] - of[:, -1:]) for w, of in rows.items()}
    between = np.array([of.mean(axis=0) for of in scaled.values()]).std(axis=0, ddof=1)
    alone = [of.var(axis=0, ddof=1) / len(of) for of in scaled.values() if len(of) > 1]
    within = math.sqrt(float(np.mean(alone))) if alone else math.nan
    return math.sqrt(float(np.mean(between**2))), within
