"""Powers of a size (width, heads, head dimension, depth) in what was measured, with their errors,
and means over seeds.

Runs of one seed may share random numbers across sizes, so that the points of a line are not
independent, and the scatter of few points is small by luck now and then. So the error of a power is
the largest of three: from the scatter about the line, from the points' own errors, and the
jackknife's, which leaves a seed out of all sizes at once. A seed that lacks a size counts at none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from plots.findings import UNKNOWN, Estimate, weighted

Points = Mapping[float, float]  # size -> log2 of what is measured there


@dataclass(frozen=True)
class Power(Estimate):
    """The exponent of a power law through several sizes; called with a size, the law's value.

    `errors` are those that its error is the largest of; NaN is left out."""

    intercept: float = math.nan
    errors: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __call__(self, size: float) -> float:
        """The law at a size."""
        return 2.0 ** (self.intercept + self.value * math.log2(size))


def power(
    points: Points,
    own: Points | None = None,
    left_out: Sequence[Points] = (),
    freedom: float | None = None,
    further: Mapping[str, float] | None = None,
) -> Power:
    """The unweighted straight line through log2 of sizes and `points`; NaN below two sizes.

    `own` are the points' standard errors with their degrees of freedom `freedom` (None: those of
    the line), `left_out` the points without one group each, `further` other errors by name.
    """
    sizes = sorted(points)
    if len(sizes) < 2:
        return Power(math.nan, math.nan, groups=len(sizes), fitted=2)
    x, y = np.log2(sizes), np.array([points[size] for size in sizes])
    weights = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
    value = float(weights @ y)
    intercept = float(y.mean() - value * x.mean())
    free = len(sizes) - 2 or None
    alone = np.array([(own or {}).get(size, math.nan) for size in sizes])
    errors: dict[str, tuple[float, float | None]] = {
        "points": (float(np.sqrt(np.sum((weights * alone) ** 2))), freedom or free),
        **{name: (error, free) for name, error in (further or {}).items()},
    }
    if free:
        residuals = y - intercept - value * x
        scatter = math.sqrt(residuals @ residuals / free * (weights @ weights))
        errors["scatter"] = (scatter, free)
    step = np.diff(x)
    apart = np.hypot(alone[:-1], alone[1:]) / step  # errors of local slopes
    if len(left_out) > 1:
        parts = np.array([[part[size] for size in sizes] for part in left_out])
        jackknife = math.sqrt((len(parts) - 1) * (parts @ weights).var())
        errors["seeds"] = (jackknife, len(left_out) - 1)
        apart = np.fmax(apart, np.sqrt((len(parts) - 1) * np.diff(parts).var(axis=0)) / step)
    known = {name: one for name, one in errors.items() if math.isfinite(one[0])}
    error, free = max(known.values(), key=lambda one: one[0], default=(math.nan, None))
    slopes = zip(sizes[1:], (np.diff(y) / step).tolist(), apart.tolist(), strict=True)
    local = {size: Estimate(one, own_error) for size, one, own_error in slopes}
    return Power(
        value,
        error,
        groups=len(sizes),
        fitted=2,
        freedom=free,
        by_size=local,
        intercept=intercept,
        errors={name: one[0] for name, one in known.items()},
    )


def exponent(rows: pd.DataFrame, group: str, size: str, value: str, of: str = "mean") -> Power:
    """The power of `size` in the mean of `value` over groups, or in their spread (`of`="std"), over
    the groups that have a finite value at every size; it rests on that many groups."""
    rows = complete(rows.loc[np.isfinite(rows[value]), [group, size, value]], group, size)
    return exponent_in(rows, group, lambda part: part.groupby(size)[value].agg(of))


def exponent_in(
    rows: pd.DataFrame, group: str, points: Callable[[pd.DataFrame], pd.Series]
) -> Power:
    """The power of the index in the values above zero of `points(rows)`, a series by size."""

    def logs(part: pd.DataFrame) -> pd.Series:
        values = points(part)
        return np.log2(values[np.isfinite(values) & (values > 0)])

    groups, whole = rows[group].unique(), logs(rows)
    count = len(groups)
    parts = [logs(rows[rows[group] != one]).reindex(whole.index) for one in groups]
    parts = parts if count > 1 else []
    own = {}
    if parts:
        spread = pd.concat(parts, axis=1).var(axis=1, ddof=0, skipna=False)
        own = np.sqrt((count - 1) * spread).to_dict()
    found = power(whole.to_dict(), own, [part.to_dict() for part in parts], count - 1)
    return replace(found, groups=count, fitted=1)


def complete(rows: pd.DataFrame, group: str, *keys: str) -> pd.DataFrame:
    """The rows of those groups that have one at every combination of `keys` there is."""
    points = rows.drop_duplicates([group, *keys])
    found, wanted = points.groupby(group).size(), len(points.drop_duplicates(list(keys)))
    return rows[rows[group].isin(found.index[found == wanted])]


def jackknife(
    rows: pd.DataFrame, group: str, statistic: Callable[[pd.DataFrame], float]
) -> Estimate:
    """The statistic of all rows, and its error from leaving out one group after another; no error
    with a single group or where a part has no value."""
    groups = rows[group].unique()
    value, count = statistic(rows), len(groups)
    if count < 2:
        return Estimate(value, math.nan, count)
    parts = np.array([statistic(rows[rows[group] != one]) for one in groups])
    return Estimate(value, math.sqrt((count - 1) * parts.var()), count)


def slope(values: Mapping[int, Estimate]) -> Estimate:
    """What a doubling of the size adds: the unweighted line through all values, with the error and
    the degrees of freedom that theirs imply (NaN where one is unknown); NaN below two sizes."""
    if len(values) < 2:
        return UNKNOWN
    octaves = np.log2(list(values)) - np.mean(np.log2(list(values)))
    return weighted(zip((octaves / (octaves @ octaves)).tolist(), values.values(), strict=True))


def extrapolated(values: Mapping[int, Estimate], octaves: float) -> Estimate:
    """The unweighted line in log size, `octaves` beyond the largest; NaN below two sizes."""
    if len(values) < 2:
        return UNKNOWN
    apart = np.log2(list(values)) - np.mean(np.log2(list(values)))
    weights = 1 / len(values) + (apart.max() + octaves) * apart / (apart @ apart)
    return replace(weighted(zip(weights.tolist(), values.values(), strict=True)), by_size=values)


def average(values: Sequence[float]) -> Estimate:
    """Mean and standard error, NaN for what too few values leave open."""
    if len(values) < 2:
        return Estimate(float(values[0]) if len(values) else math.nan, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(float(np.mean(values)), error, freedom=len(values) - 1)


def mean(values: Mapping[int, float]) -> Estimate:
    """The mean over seeds and its standard error, with the number of seeds; seed -> value."""
    return replace(average([*values.values()]), groups=len(values))


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """first - second by seed, over the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}
