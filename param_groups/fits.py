"""Where a sweep's optimum lies, how sure that is, and how it moves with size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Octaves to either side of the best grid point that a parabola with an error is fitted to. Two:
# on a factor-2 grid, the coarsest in use, that is five points for three unknowns, so residuals
# exist; wider, loss curves stop being parabolas (they rise steeply towards divergence).
WINDOW = 2.0


@dataclass(frozen=True)
class Optimum:
    """The best value of a positive hyperparameter, from losses on a grid.

    `value` is the vertex of a parabola in log2 around the best grid point, `grid_value` the best
    grid point itself and `loss` its loss. `inside` is False when the best point lies at an edge,
    next to a run that diverged, or has no curvature: then `value` is the grid point. `at_edge`
    says that it is the first or last value tried, so that the true optimum may lie beyond.
    `error` is the standard error of log2 `value`, in octaves (NaN: unknown); next to a run that
    diverged it is the grid's resolution, its step over sqrt(12), or more where noise leaves open
    which value is the best. `n` is the number of points in the parabola (0 without one),
    `vertex_loss` its value at `value` (NaN without one).
    """

    value: float
    grid_value: float
    loss: float
    inside: bool
    at_edge: bool = False
    error: float = math.nan
    n: int = 0
    vertex_loss: float = math.nan


def optimum(
    losses: Mapping[float, float], window: float | None = None, noise: float = math.nan
) -> Optimum:
    """The optimum of value -> loss; losses that are not finite are runs that diverged.

    Without `window` the parabola goes exactly through the best point and its neighbours; with it,
    it is the least-squares one through the stable points (`stability`) at most `window` octaves
    from the best. `noise` is the standard deviation of one given loss; the vertex' error follows
    by the delta method from the larger of it and the residuals' (which exist from four points
    on). Raises ValueError when no loss is finite.
    """
    values = sorted(losses)
    best = best_grid_value(losses)
    at_edge = best in (values[0], values[-1])
    at = values.index(best)
    beside = [value for value in values[max(at - 1, 0) : at + 2] if math.isfinite(losses[value])]
    near = beside if window is None else _around(losses, best, window)
    if not at_edge and not near[0] < best < near[-1]:
        return Optimum(best, best, losses[best], False, error=_resolution(losses, best, noise))
    vertex = None
    if not at_edge:
        x = np.log2(near) - math.log2(best)
        vertex = _vertex(x, np.array([losses[value] for value in near]), noise)
    if vertex is None:
        return Optimum(best, best, losses[best], False, at_edge)
    place, error, lowest = vertex
    return Optimum(best * 2.0**place, best, losses[best], True, at_edge, error, len(near), lowest)


def _resolution(losses: Mapping[float, float], best: float, noise: float) -> float:
    """RMS distance in octaves from the best point to an optimum that is uniform over the grid cells
    where it may lie: the best point's and those up to points with losses at most 2 `noise` higher
    (only the best point's if the noise is unknown)."""
    values = sorted(losses)
    near = [value for value in values if losses[value] <= losses[best] + 2 * noise] or [best]
    first, last = values.index(near[0]), values.index(near[-1])
    low = math.log2(values[max(first - 1, 0)] * values[first]) / 2 - math.log2(best)
    high = math.log2(values[min(last + 1, len(values) - 1)] * values[last]) / 2 - math.log2(best)
    return math.sqrt((high**3 - low**3) / (3 * (high - low)))


def _around(losses: Mapping[float, float], best: float, window: float) -> list[float]:
    """The stable values at most `window` octaves from the best, as far as nothing diverged."""
    largest, _ = stability(losses)
    lost = [value for value in losses if value < best and not math.isfinite(losses[value])]
    reach = 2.0 ** (window + 1e-6)  # a grid point at the window's end belongs to it
    low = max([best / reach, *(math.nextafter(value, math.inf) for value in lost)])
    return sorted(value for value in losses if low <= value <= min(best * reach, largest))


def _vertex(x: Floats, y: Floats, noise: float) -> tuple[float, float, float] | None:
    """(lowest point, its standard error, value there) of the least-squares parabola through three
    points or more; None without upward curvature or when the point lies outside of them."""
    design = np.stack([np.ones_like(x), x, x * x], axis=1)
    found = np.linalg.lstsq(design, y, rcond=None)[0]
    start, slope, curvature = found
    if curvature <= 1e-12 * np.abs(y).max():
        return None
    place = -slope / (2 * curvature)
    if not x[0] <= place <= x[-1]:
        return None
    residual = y - design @ found
    free = len(x) - 3
    scatter = math.sqrt(float(residual @ residual) / free) if free else math.nan
    gradient = np.array([0.0, -1 / (2 * curvature), slope / (2 * curvature**2)])
    spread = gradient @ np.linalg.solve(design.T @ design, gradient)
    lowest = start - slope**2 / (4 * curvature)
    return float(place), float(np.fmax(scatter, noise) * math.sqrt(spread)), float(lowest)


def stability(losses: Mapping[float, float], excess: float = 0.2) -> tuple[float, float | None]:
    """(largest stable, smallest unstable) of learning rate -> loss.

    A rate above the optimum is unstable when its loss exceeds (1 + `excess`) times the lowest or
    is not finite (Everett et al., App. C). The curve is cut at the first such rate, so what a
    non-monotone curve does beyond it does not count. None when no rate is unstable; ValueError
    when no loss is finite.
    """
    largest = best_grid_value(losses)
    limit = (1 + excess) * losses[largest]
    for rate in sorted(rate for rate in losses if rate > largest):
        if not losses[rate] <= limit:
            return largest, rate
        largest = rate
    return largest, None


def best_grid_value(losses: Mapping[float, float]) -> float:
    """The value with the lowest finite loss, the lower of equals; ValueError if there is none."""
    finite = [value for value in losses if math.isfinite(losses[value])]
    if not finite:
        raise ValueError("every run diverged")
    return min(finite, key=lambda value: (losses[value], value))


@dataclass(frozen=True)
class PowerLaw:
    """y = 2^intercept x^exponent; `error` is the exponent's standard error (NaN if unknown)."""

    exponent: float
    error: float
    intercept: float
    n: int

    def __call__(self, x: float) -> float:
        """y at x."""
        return float(2.0 ** (self.intercept + self.exponent * math.log2(x)))


def power_law(
    x: Sequence[float], y: Sequence[float], errors: Sequence[float] | None = None
) -> PowerLaw:
    """Least squares on log-log axes; ValueError for fewer than two different x and for x or y that
    are not positive and finite.

    Without `errors` every point counts the same and the exponent's error comes from the
    residuals (NaN below three points). `errors`, standard errors of log2 y, weigh the points by
    1/error^2, and the exponent's error is what follows from them alone: scatter about the line
    beyond them is not in it. ValueError unless they are positive and finite.
    """
    given = np.asarray(x, float), np.asarray(y, float)
    if len(np.unique(given[0])) < 2:
        raise ValueError("a power law needs at least two different x")
    if not all((np.isfinite(values) & (values > 0)).all() for values in given):
        raise ValueError("a power law needs positive, finite x and y")
    lx, ly = map(np.log2, given)
    weights = np.ones_like(lx) if errors is None else _weights(errors)
    centred = lx - np.average(lx, weights=weights)
    spread = float(weights @ centred**2)
    exponent = float((weights * centred) @ ly) / spread
    intercept = float(np.average(ly - exponent * lx, weights=weights))
    if errors is not None:
        return PowerLaw(exponent, 1 / math.sqrt(spread), intercept, len(lx))
    residual = ly - intercept - exponent * lx
    free = len(lx) - 2
    error = math.sqrt(float(residual @ residual) / free / spread) if free else math.nan
    return PowerLaw(exponent, error, intercept, len(lx))


def _weights(errors: Sequence[float]) -> Floats:
    values = np.asarray(errors, float)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError("errors must be positive and finite")
    return values**-2
