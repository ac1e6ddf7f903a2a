"""Where a sweep's optimum lies, and how it moves with width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Optimum:
    """The best value of a positive hyperparameter, from losses on a grid.

    `value` is the vertex of the parabola in log2 through the best grid point and its neighbours,
    `grid_value` the best grid point itself and `loss` its loss. `inside` is False when the best
    point lies at an edge, next to a run that diverged, or has no curvature: then `value` is the
    grid point.
    """

    value: float
    grid_value: float
    loss: float
    inside: bool


def optimum(losses: Mapping[float, float]) -> Optimum:
    """The optimum of value -> loss; infinite losses are runs that diverged.

    Raises ValueError when no loss is finite.
    """
    values = sorted(losses)
    best = min(values, key=lambda value: (losses[value], value))
    if not math.isfinite(losses[best]):
        raise ValueError("every run diverged")
    index = values.index(best)
    vertex = None
    if 0 < index < len(values) - 1:
        near = values[index - 1 : index + 2]
        vertex = _vertex([math.log2(value) for value in near], [losses[value] for value in near])
    inside = vertex is not None
    return Optimum(2.0**vertex if inside else best, best, losses[best], inside)


def _vertex(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The lowest point of the parabola through three points; None without upward curvature."""
    if not all(map(math.isfinite, y)):
        return None
    slope_left = (y[1] - y[0]) / (x[1] - x[0])
    slope_right = (y[2] - y[1]) / (x[2] - x[1])
    curvature = (slope_right - slope_left) / (x[2] - x[0])
    return (x[0] + x[1]) / 2 - slope_left / (2 * curvature) if curvature > 0 else None


@dataclass(frozen=True)
class PowerLaw:
    """y = 2^intercept x^exponent; `error` is the exponent's standard error (NaN below 3 points)."""

    exponent: float
    error: float
    intercept: float
    n: int

    def __call__(self, x: float) -> float:
        """y at x."""
        return 2.0 ** (self.intercept + self.exponent * math.log2(x))


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Least squares on log-log axes; ValueError for fewer than two different x."""
    lx, ly = np.log2(np.asarray(x, float)), np.log2(np.asarray(y, float))
    centred = lx - lx.mean()
    spread = float(centred @ centred)
    if len(lx) < 2 or spread == 0:
        raise ValueError("a power law needs at least two different x")
    exponent = float(centred @ ly) / spread
    intercept = float(ly.mean() - exponent * lx.mean())
    residual = ly - intercept - exponent * lx
    free = len(lx) - 2
    error = math.sqrt(float(residual @ residual) / free / spread) if free else math.nan
    return PowerLaw(exponent, error, intercept, len(lx))
