"""Hill climbing to a confirmed optimum on a log2 grid (Dinan et al., Part II, section 1E).

A candidate is confirmed when every neighbour has been run and none is better. A better neighbour
becomes the candidate, and its own neighbours are run next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from sweeps.rules import DONE, WAIT, Cell, Next, Place, names
from training.config import PositiveInt, Section, shifted
from training.errors import UserError
from training.log import lower_is_better

# Dinan et al., footnote 42: twice both and half both are left out.
SIX_NEIGHBOURS = [[1, 0], [0, 1], [1, -1], [-1, 1], [0, -1], [-1, 0]]

Score = tuple[float, float]  # higher is better: the metric, then minus the final loss


class Confirm(Section):
    """Climb from the grid's points to an optimum whose neighbours are all known to be worse."""

    keys: Annotated[list[str], Field(min_length=1)]
    """Grid keys to search over, positive numbers such as optimizer.lr."""
    metric: str = "best_eval_loss"
    """What decides, best_eval_NAME or final_eval_NAME of summary.json: a loss is better low, all
    else high. Ties are decided by the lower final_eval_loss."""
    neighbours: Annotated[list[list[float]], Field(min_length=1)] = SIX_NEIGHBOURS
    """Exponents of two per key that lead from a point to each of its neighbours."""
    points: PositiveInt = 30
    """At most this many new points per cell."""
    seeds: list[int] = []
    """Seeds of the confirmed optimum, on top of the search's own."""

    @model_validator(mode="after")
    def _names_make_sense(self) -> Confirm:
        if len(set(self.keys)) < len(self.keys):
            raise ValueError(f"confirm.keys: {', '.join(self.keys)}: name each key once")
        if not re.fullmatch(r"(best|final)_eval_\w+", self.metric) or self.metric.endswith("_step"):
            raise ValueError(
                f"confirm.metric {self.metric!r}: expected best_eval_NAME or final_eval_NAME, such "
                "as best_eval_loss"
            )
        return self

    @model_validator(mode="after")
    def _neighbours_have_a_step_per_key(self) -> Confirm:
        for step in self.neighbours:
            if len(step) != len(self.keys) or not any(step):
                raise ValueError(
                    f"confirm.neighbours: {step} needs one exponent of two for each of "
                    f"{', '.join(self.keys)}, not all 0"
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
        scores = self._scores(cell)
        if not scores:
            return DONE
        best = candidate(scores)
        neighbours = around(best, self.neighbours, cell.results)
        new = [place for place in neighbours if place not in cell.results.keys() | cell.refused]
        if cell.added + len(new) > self.points:
            return Next(done=True, note=f"{cell.name}: {self._unfinished(best, scores[best])}")
        if new:
            return Next(tuple(new))
        if all(place in scores for place in neighbours):
            return Next((best,), seeds=tuple(self.seeds), done=True)
        refused = [cell.refused[place] for place in neighbours if place in cell.refused]
        reason = refused[0] if refused else "a neighbour failed"
        note = f"{names(self.keys, best)} is not confirmed: {reason}"
        return Next(done=True, note=f"{cell.name}: {note}")

    def _scores(self, cell: Cell) -> dict[Place, Score]:
        """Place -> mean score over seeds; places where a seed failed are left out."""
        scores = {}
        for place in cell.results:
            found = [score(summary, self.metric) for summary in cell.seeds(place).values()]
            if found and None not in found:
                scores[place] = mean_score(found)
        return scores

    def _unfinished(self, best: Place, score: Score) -> str:
        """Why the limit on points has ended the climb."""
        if math.isinf(score[0]):
            return f"every run diverged, also after {self.points} more points"
        where = names(self.keys, best)
        return f"{self.points} points are not enough to confirm {where}; raise confirm.points"


def score(summary: Mapping[str, Any], metric: str) -> Score | None:
    """How good a run is; None for one that failed. A run that diverged is worse than any other.

    Raises UserError for a metric that the summary of a finished run does not have.
    """
    if summary["status"] == "failed":
        return None
    if summary["status"] == "diverged":
        return -math.inf, -math.inf
    if metric not in summary:
        known = [key for key in summary if key.startswith(("final_eval_", "best_eval_"))]
        raise UserError(
            f"confirm.metric: runs measure no {metric!r}; they have {', '.join(known)}"
        )
    value = summary[metric]
    lower = lower_is_better(metric.partition("_eval_")[2])
    return (-value if lower else value), -summary["final_eval_loss"]


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean over seeds, of metric and loss each."""
    first, second = zip(*scores)
    return sum(first) / len(scores), sum(second) / len(scores)


def candidate(scores: Mapping[Place, Score]) -> Place:
    """The best point; of equal ones the one that is low in all keys, not in one.

    So a search that starts where every run diverges goes down in each of them.
    """
    tops = [max(values) for values in zip(*scores)]

    def order(place: Place) -> tuple:
        below = [math.log2(value / top) for value, top in zip(place, tops)]
        return [-part for part in scores[place]], max(below), sum(below), place

    return min(scores, key=order)


def around(
    place: Place, neighbours: Sequence[Sequence[float]], known: Collection[Place] = ()
) -> list[Place]:
    """The neighbours of a point, in the very numbers of the known ones.

    Powers of two that are no whole ones would come back to a value with another last digit.
    """
    values = [sorted(set(column)) for column in zip(*known)] or [[] for _ in place]
    return [
        tuple(_snapped(shifted(v, s), own) for v, s, own in zip(place, step, values))
        for step in neighbours
    ]


def _snapped(value: float, known: Sequence[float]) -> float:
    """The known value that this one is up to rounding, or itself."""
    return next((own for own in known if math.isclose(own, value, rel_tol=1e-9)), value)
