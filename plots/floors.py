"""Power laws with an irreducible term: loss, or best rate, against size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from param_groups.fits import Floats


@dataclass(frozen=True)
class IrreduciblePowerLaw:
    """loss = floor + amplitude (x / scale)^-exponent, with the standard errors of floor and
    exponent: NaN where the fit ended at a bound (floor 0 or the lowest loss, amplitude 0,
    exponent 0 or 5), as the data then do not determine them."""

    floor: float
    amplitude: float
    exponent: float
    floor_error: float
    exponent_error: float
    scale: float
    n: int

    def __call__(self, x: float) -> float:
        """The loss at x."""
        return float(self.floor + self.amplitude * (x / self.scale) ** -self.exponent)


SIZES_FOR_A_FLOOR = 4
STEEPEST = 5.0


def irreducible_power_law(
    x: Sequence[float], losses: Sequence[float], noise: float = math.nan
) -> IrreduciblePowerLaw:
    """Least squares of a power law with an irreducible term, for loss against size.

    Every loss must be finite; ValueError otherwise and below four different x: three unknowns
    leave no error to state. Errors come from the larger of the residuals, which with four points
    are small by chance quite often, and `noise`, the standard deviation of one given loss.
    """
    from scipy.optimize import curve_fit

    sizes, y = np.asarray(x, float), np.asarray(losses, float)
    if len(np.unique(sizes)) < SIZES_FOR_A_FLOOR:
        raise ValueError(f"a floor needs at least {SIZES_FOR_A_FLOOR} different sizes")
    if not np.isfinite(y).all():
        raise ValueError("losses must be finite")
    scale, unit = math.exp(np.log(sizes).mean()), float(np.abs(y).max()) or 1.0
    y, noise = y / unit, noise / unit  # the fit's tolerances are absolute
    high = np.array([y.min(), np.inf, STEEPEST])

    def law(size: Floats, floor: float, amplitude: float, exponent: float) -> Floats:
        return floor + amplitude * size**-exponent

    start = _start(sizes / scale, y)
    found, covariance = curve_fit(
        law,
        sizes / scale,
        y,
        start,
        bounds=(0, high),
        max_nfev=10_000,
        ftol=1e-14,
        xtol=1e-14,
        gtol=1e-14,
        x_scale=np.maximum(start, 0.1),
        absolute_sigma=True,  # of residuals of size 1: an exact fit has none to scale by
    )
    width = np.array([y.min(), max(np.ptp(y), 1e-300), STEEPEST])
    inner = (found > 1e-6 * width) & (high - found > 1e-6 * width) & (np.ptp(y) > 0)
    per_sigma = np.sqrt(np.diag(covariance)) if inner.all() else np.full(3, math.nan)
    residual = y - law(sizes / scale, *found)
    scatter = math.sqrt(float(residual @ residual) / (len(y) - 3))
    errors = per_sigma * np.fmax(scatter, noise)
    floor, amplitude, exponent = map(float, found)
    own = unit * float(errors[0]), float(errors[2])
    return IrreduciblePowerLaw(unit * floor, unit * amplitude, exponent, *own, scale, len(sizes))


def _start(x: Floats, y: Floats) -> Floats:
    """(floor, amplitude, exponent) to start from: the best of many exponents, as the other two
    are linear. Without it a fit can end in a far corner."""
    best, lowest = np.array([0.5 * y.min(), np.ptp(y), 0.5]), math.inf
    for exponent in np.geomspace(0.01, 0.98 * STEEPEST, 60):
        design = np.stack([np.ones_like(x), x**-exponent], axis=1)
        (floor, amplitude), *_ = np.linalg.lstsq(design, y, rcond=None)
        floor = min(max(floor, 1e-3 * y.min()), (1 - 1e-6) * y.min())
        amplitude = max(float(design[:, 1] @ (y - floor) / (design[:, 1] @ design[:, 1])), 1e-12)
        residual = y - floor - amplitude * design[:, 1]
        if residual @ residual < lowest:
            best, lowest = np.array([floor, amplitude, exponent]), residual @ residual
    return best
