"""The search of Dinan et al. (Part II, section 1E): walk a log2 grid to a confirmed optimum.

A candidate is confirmed when every neighbour has been run and none is better. A better neighbour
becomes the candidate, and its own neighbours are run next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from training.config import PositiveInt, Section, shifted

# Footnote 42: twice both and half both are left out. Errata D16.
SIX_NEIGHBOURS = [[1, 0], [0, 1], [1, -1], [-1, 1], [0, -1], [-1, 0]]

Place = tuple[float, ...]  # a point of the grid, by the values of the searched keys
Score = tuple[float, float]  # higher is better: the metric, then minus the final loss


class Confirm(Section):
    """Walk from the grid's points to an optimum whose neighbours are all known to be worse."""

    keys: Annotated[list[str], Field(min_length=1)]
    """Grid keys to search over, positive numbers such as optimizer.lr."""
    metric: str = "best_eval_loss"
    """What decides, a key of summary.json: losses are better low, all else high. Ties are decided
    by the lower final_eval_loss."""
    neighbours: Annotated[list[list[float]], Field(min_length=1)] = SIX_NEIGHBOURS
    """Exponents of two per key that lead from a point to each of its neighbours."""
    points: PositiveInt = 30
    """At most this many new points per cell."""
    seeds: list[int] = []
    """Seeds of the confirmed optimum, on top of the search's own."""

    @model_validator(mode="after")
    def _neighbours_have_a_step_per_key(self) -> Confirm:
        for step in self.neighbours:
            if len(step) != len(self.keys) or not any(step):
                raise ValueError(
                    f"confirm.neighbours: {step} needs one exponent of two for each of "
                    f"{', '.join(self.keys)}, not all 0"
                )
        return self


def score(summary: Mapping[str, Any], metric: str) -> Score | None:
    """How good a run is; None for one that failed. A run that diverged is worse than any other.

    Raises KeyError for a metric that the summary of a finished run does not have.
    """
    if summary["status"] == "failed":
        return None
    if summary["status"] == "diverged":
        return -math.inf, -math.inf
    value = summary[metric]
    return (-value if metric.endswith("loss") else value), -summary["final_eval_loss"]


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean over seeds, of metric and loss each."""
    first, second = zip(*scores)
    return sum(first) / len(scores), sum(second) / len(scores)


def candidate(scores: Mapping[Place, Score]) -> Place:
    """The best point; of equal ones the first in the grid's order."""
    return min(scores, key=lambda place: ([-part for part in scores[place]], place))


def around(place: Place, neighbours: Sequence[Sequence[float]]) -> list[Place]:
    """The neighbours of a point."""
    return [tuple(map(shifted, place, step)) for step in neighbours]
