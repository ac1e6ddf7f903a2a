"""What a sweep runs next, cell by cell: pure functions from the results so far to the next places.

A cell is one curve at one set of grid values; a place is where in it the searched keys stand. A
rule looks at a cell and answers with a `Next`: places to run, WAIT for results, or nothing more. It
decides only on complete results, so the places of a cell do not depend on the order in which runs
end. There is no clock, file or thread here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import Field, model_validator

from param_groups.fits import stability
from training.config import PositiveFloat, PositiveInt, Section, shifted
from training.errors import UserError
from training.log import lower_is_better
from training.runs import Summary

Coordinates = tuple[float, ...]  # a point of a cell, by the values of the searched keys
Score = tuple[float, float]  # higher is better: the metric, then minus the final loss
Shift = Annotated[float, Field(ge=-10, le=10)]  # an exponent of two
FAILED = {"status": "failed"}  # the result of a run that will not be tried again


@dataclass(frozen=True)
class Next:
    """A rule's answer: what to run next in a cell."""

    places: tuple[Coordinates, ...] = ()
    """New places."""
    seeds: tuple[int, ...] | None = None
    """Seeds of those places; by default the cell's own."""
    done: bool = False
    """Nothing will be asked for any more."""
    note: str = ""
    """What a user should know at the end."""


WAIT = Next()
DONE = Next(done=True)


@dataclass
class Cell:
    """The places of one cell, and what has come out there."""

    name: str
    results: dict[Coordinates, dict[int, Summary | None]] = field(default_factory=dict)
    """Coordinates -> seed -> summary; None while the run is not done."""
    named: set[Coordinates] = field(default_factory=set)
    """Places that the sweep file names."""
    further: dict[Coordinates, tuple[int, ...]] = field(default_factory=dict)
    """Seeds beyond the cell's own, which repeat an optimum and have no say in where it is."""
    refused: dict[Coordinates, str] = field(default_factory=dict)
    """Places whose values make no config, and why."""
    source: Cell | None = None
    """The cell whose optimum is to be run here, too."""
    settled: bool = False
    """Its rule asks for nothing more."""

    @property
    def added(self) -> int:
        """Places that its rule has asked for."""
        asked = self.results.keys() | self.refused.keys()
        return len(asked - self.named - {self.source and optimum(self.source)})

    def seeds(self, place: Coordinates) -> dict[int, Summary | None]:
        """Seed -> summary at a place, without further seeds."""
        extra = self.further.get(place, ())
        return {seed: summary for seed, summary in self.results[place].items() if seed not in extra}

    def is_complete(self) -> bool:
        """Whether every run of the cell's own seeds is done."""
        return all(None not in self.seeds(place).values() for place in self.results)


class Rule(Protocol):
    """How cells are searched, with at most `points` new places each; `seeds` repeat an optimum."""

    points: int
    seeds: list[int]

    def next(self, cell: Cell) -> Next:
        """What to run next in a cell, by its results alone."""


class Coverage(Section):
    """Go on above the optimum until the first unstable value is known (Everett et al., App. C)."""

    excess: PositiveFloat = 0.2
    """Above the optimum a value is unstable when its loss exceeds the lowest by this share."""
    gap: PositiveFloat = 0.5
    """Largest distance between the last stable value and that one, as an exponent of two."""


class Extend(Section):
    """Grid extension: follow an optimum that lies at the edge of a cell's grid."""

    key: str
    """Grid key of the quantity to extend, a positive number such as optimizer.lr."""
    step: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Distance of a new point from the edge, as an exponent of two."""
    points: PositiveInt = 6
    """At most this many new points per cell."""
    coverage: Coverage | None = None
    """How far past the optimum to go; by default until it is inside."""
    seeds: list[int] = []
    """Fresh seeds: they run only the optimum and do not choose it, so that they can judge it."""

    def next(self, cell: Cell) -> Next:
        """The next value past the edge, once the optimum of the cell's source is known; finally
        the fresh seeds at both optima."""
        known = cell.results.keys() | cell.refused
        best = None
        if cell.source is not None:
            if not cell.source.settled:
                return WAIT
            best = optimum(cell.source)
            if best is not None and best not in known:
                return Next((best,))
        if not cell.is_complete():
            return WAIT
        losses = mean_losses(cell)
        alone = best[0] if best and best not in cell.named else None
        value = next_value(losses, self.step, self.coverage, alone) if losses else None
        note = ""
        if value is not None and cell.added >= self.points:
            note = f"{cell.name}: {self.points} values of {self.key} added, and more are needed"
        elif value is not None and (value,) not in known:
            return Next(((value,),))
        elif value is not None:
            why = cell.refused.get((value,))
            what = "failed" if why is None else f"was not run: {why}"
            note = f"{cell.name}: {self.key} {value:g} {what}; it is needed"
        if not self.seeds:
            return Next(done=True, note=note)
        places = dict.fromkeys(place for place in (optimum(cell), best) if place)
        ended = (place for place in places if math.isfinite(losses.get(place[0], math.inf)))
        return Next(tuple(ended), seeds=tuple(self.seeds), done=True, note=note)


class Transfer(Section):
    """Run the best value of one cell in another one, too, so that using it there is measured."""

    source: dict[str, Any]
    """Grid values of the cell that was tuned, for example {model.width: 64}."""
    target: dict[str, Any]
    """Grid values of the cell that shall use its optimum."""


def mean_losses(cell: Cell) -> dict[float, float]:
    """Searched value -> mean final loss over the cell's own seeds, infinite where a run diverged.

    Runs that failed are left out.
    """
    losses: dict[float, float] = {}
    for place in cell.results:
        summaries = cell.seeds(place).values()
        of_seeds = [s["final_eval_loss"] for s in summaries if s and s["status"] != "failed"]
        if of_seeds:
            whole = [math.inf if loss is None else loss for loss in of_seeds]
            losses[place[0]] = sum(whole) / len(whole)
    return losses


def optimum(cell: Cell) -> Coordinates | None:
    """The place with the lowest mean loss, the lowest of equals; None if every run failed."""
    losses = mean_losses(cell)
    best = min(losses, key=lambda value: (losses[value], value), default=None)
    return None if best is None else (best,)


def next_value(
    losses: Mapping[float, float],
    step: float,
    coverage: Coverage | None = None,
    alone: float | None = None,
) -> float | None:
    """The value to try next, or None when the optimum, and what `coverage` asks for, is known.

    `losses` maps positive values to mean losses, infinite where a run diverged. If all diverged,
    the next value is below the lowest. Otherwise the lowest loss must lie inside the grid; a gap
    next to `alone`, which may lie far from the others, is first narrowed to `step`. Then the
    smallest unstable value must be known, and the largest stable one be near enough to it.
    """
    values = sorted(losses)
    best = min(values, key=lambda value: (losses[value], value))
    if best == values[0] or math.isinf(losses[best]):
        return shifted(values[0], -step)
    if best == values[-1]:
        return shifted(best, step)
    place = values.index(best)
    for beside, towards in ((values[place - 1], -step), (values[place + 1], step)):
        if alone in (best, beside) and abs(math.log2(beside / best)) > step + 1e-9:
            return shifted(best, towards)
    if coverage is None:
        return None
    stable, unstable = stability(losses, coverage.excess)
    if unstable is None:
        return shifted(values[-1], step)
    distance = math.log2(unstable / stable)
    return shifted(stable, distance / 2) if distance > coverage.gap + 1e-9 else None


# Dinan et al., footnote 42: twice both and half both are left out.
SIX_NEIGHBOURS: list[list[float]] = [[1, 0], [0, 1], [1, -1], [-1, 1], [0, -1], [-1, 0]]


class Confirm(Section):
    """Hill climbing from the grid's points to a confirmed optimum (Dinan et al., Part II, 1E).

    A candidate is confirmed when every neighbour has been run and none is better. A better
    neighbour becomes the candidate, and its own neighbours are run next.
    """

    keys: Annotated[list[str], Field(min_length=1)]
    """Grid keys to search over, positive numbers such as optimizer.lr."""
    metric: str = "best_eval_loss"
    """What decides, best_eval_NAME or final_eval_NAME of summary.json: a loss is better low, all
    else high. Ties are decided by the lower final_eval_loss."""
    neighbours: Annotated[list[list[Shift]], Field(min_length=1)] = SIX_NEIGHBOURS
    """Exponents of two per key that lead from a point to each of its neighbours."""
    points: PositiveInt = 30
    """At most this many new points per cell."""
    seeds: list[int] = []
    """Seeds of the confirmed optimum, on top of the search's own."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Confirm:
        keys = ", ".join(self.keys)
        if len(set(self.keys)) < len(self.keys):
            raise ValueError(f"confirm.keys: {keys}: name each key once")
        if not re.fullmatch(r"(best|final)_eval_\w+", self.metric) or self.metric.endswith("_step"):
            raise ValueError(
                f"confirm.metric {self.metric!r}: expected best_eval_NAME or final_eval_NAME, such "
                "as best_eval_loss"
            )
        for step in self.neighbours:
            if len(step) != len(self.keys) or not any(step):
                raise ValueError(
                    f"confirm.neighbours: {step} needs one exponent of two for each of {keys}, "
                    "not all 0"
                )
        if len(set(map(tuple, self.neighbours))) < len(self.neighbours):
            raise ValueError("confirm.neighbours: name each neighbour once")
        return self

    def next(self, cell: Cell) -> Next:
        """The neighbours of a complete cell's best place, or its further seeds once confirmed.

        Raises UserError for a metric that the runs do not measure.
        """
        if not cell.is_complete():
            return WAIT
        scores = {}  # of places where no seed has failed
        for place in cell.results:
            of_seeds = [score(s, self.metric) for s in cell.seeds(place).values() if s]
            whole = [one for one in of_seeds if one]
            if whole and len(whole) == len(of_seeds):
                scores[place] = mean_score(whole)
        if not scores:
            return DONE
        best = candidate(scores)
        where = " ".join(f"{key}={value:g}" for key, value in zip(self.keys, best, strict=True))
        neighbours = around(best, self.neighbours, cell.results)
        new = [place for place in neighbours if place not in cell.results.keys() | cell.refused]
        if cell.added + len(new) > self.points:
            note = f"{self.points} points are not enough to confirm {where}; raise confirm.points"
            if math.isinf(scores[best][0]):
                note = f"every run diverged, also after {self.points} more points"
            return Next(done=True, note=f"{cell.name}: {note}")
        if new:
            return Next(tuple(new))
        if all(place in scores for place in neighbours):
            return Next((best,), seeds=tuple(self.seeds), done=True)
        refused = [cell.refused[place] for place in neighbours if place in cell.refused]
        reason = refused[0] if refused else "a neighbour failed"
        return Next(done=True, note=f"{cell.name}: {where} is not confirmed: {reason}")


def score(summary: Summary, metric: str) -> Score | None:
    """How good a run is; None for one that failed. A run that diverged is worse than any other.

    Raises UserError for a metric that the summary of a finished run does not have.
    """
    if summary["status"] == "failed":
        return None
    if summary["status"] == "diverged":
        return -math.inf, -math.inf
    if metric not in summary:
        known = [key for key in summary if key.startswith(("final_eval_", "best_eval_"))]
        raise UserError(f"confirm.metric: runs measure no {metric!r}; they have {', '.join(known)}")
    value = summary[metric]
    lower = lower_is_better(metric.partition("_eval_")[2])
    return (-value if lower else value), -summary["final_eval_loss"]


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean over seeds, of metric and loss each."""
    first, second = zip(*scores, strict=True)
    return sum(first) / len(scores), sum(second) / len(scores)


def candidate(scores: Mapping[Coordinates, Score]) -> Coordinates:
    """The best point; among ties, the one whose values are low in all keys rather than in one.

    So a search that starts where every run diverges lowers every key.
    """
    tops = [max(values) for values in zip(*scores, strict=True)]

    def order(place: Coordinates) -> tuple:
        below = [math.log2(value / top) for value, top in zip(place, tops, strict=True)]
        return [-part for part in scores[place]], max(below), sum(below), place

    return min(scores, key=order)


def around(
    place: Coordinates, neighbours: Sequence[Sequence[float]], known: Collection[Coordinates] = ()
) -> list[Coordinates]:
    """The neighbours of a point, snapped to the known values.

    Fractional powers of two would otherwise return to a value with a different last digit.
    """
    values = [sorted(set(column)) for column in zip(*known, strict=True)] or [[] for _ in place]

    def snapped(value: float, others: Sequence[float]) -> float:
        return next((o for o in others if math.isclose(o, value, rel_tol=1e-9)), value)

    return [
        tuple(
            snapped(shifted(v, s), others) for v, s, others in zip(place, step, values, strict=True)
        )
        for step in neighbours
    ]
