"""Powers of a size (width, heads, head dimension, depth) in what was measured, with their errors,
and means over seeds.

Runs of one seed may share random numbers across sizes, so that the points of a line are not
independent. So the error of a power is the jackknife's, which leaves a seed out of all sizes at
once; a seed that lacks a size counts at none. Where no seeds are shared it is the one with the
longer interval of two: from the points' own errors, if all are known, and from the scatter about
the line. More scatter than the errors explain says that the law is none, not how sure its power is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from plots.findings import UNKNOWN, Estimate, weighted

Points = Mapping[float, float]  # size -> log2 of what is measured there
CHANCE = 0.01  # of so much scatter about a power law; below it the law is called none


@dataclass(frozen=True)
class Power(Estimate):
    """The exponent of a power law through several sizes; called with a size, the law's value.

    `errors` are those that are known, by name: seeds, points, scatter. `chance` is that of so much
    scatter if the law is one (NaN: the points' errors are unknown)."""

    intercept: float = math.nan
    errors: Mapping[str, float] = field(default_factory=dict, compare=False)
    chance: float = math.nan

    @property
    def bent(self) -> str:
        """That it is no power law, with a comma before, where its scatter says so."""
        return ", not a power law" if self.chance < CHANCE else ""

    def text(self, digits: int = 3, sign: str = "+") -> str:
        """In words, with what it rests on."""
        return super().text(digits, sign) + self.bent

    def __call__(self, size: float) -> float:
        """The law at a size."""
        return 2.0 ** (self.intercept + self.value * math.log2(size))


def power(
    points: Points,
    own: Points | None = None,
    left_out: Sequence[Points] = (),
    freedom: float | None = None,
) -> Power:
    """The unweighted straight line through log2 of sizes and `points`; NaN below two sizes.

    `own` are the points' standard errors with their degrees of freedom `freedom` (None: not known),
    `left_out` the points without one group each. One error is unknown: so is what they imply.
    """
    sizes = sorted(points)
    if len(sizes) < 2:
        return Power(math.nan, math.nan, groups=len(sizes), fitted=2)
    x, y = np.log2(sizes), np.array([points[size] for size in sizes])
    weights = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
    value = float(weights @ y)
    intercept = float(y.mean() - value * x.mean())
    free, residuals = len(sizes) - 2, y - intercept - value * x
    alone = np.array([(own or {}).get(size, math.nan) for size in sizes])
    errors: dict[str, tuple[float, float | None]] = {
        "points": (float(np.sqrt(np.sum((weights * alone) ** 2))), freedom or free or None)
    }
    if free:
        scatter = math.sqrt(residuals @ residuals / free * (weights @ weights))
        errors["scatter"] = (scatter, free)
    # The scatter that errors explain: a point's own variance, but for what the line takes of it.
    explained = float(alone**2 @ (1 - 1 / len(x) - (x - x.mean()) * weights))
    step = np.diff(x)
    apart = np.hypot(alone[:-1], alone[1:]) / step  # errors of local slopes
    if len(left_out) > 1:
        parts = np.array([[part[size] for size in sizes] for part in left_out])
        if np.isfinite(parts).all():
            freedom = len(parts) - 1
            errors["seeds"] = (math.sqrt(freedom * (parts @ weights).var()), freedom)
            apart = np.sqrt(freedom * np.diff(parts).var(axis=0)) / step
            lines = np.outer(parts @ weights, x - x.mean()) + parts.mean(axis=1, keepdims=True)
            explained, freedom = float(freedom * (parts - lines).var(axis=0).sum()), freedom * free
    known = {name: one for name, one in errors.items() if math.isfinite(one[0])}
    reach = lambda one: one[0] * Estimate(0.0, one[0], freedom=one[1]).reach  # of 95 %
    longest = max(known.values(), key=reach, default=(math.nan, None))
    error, of_error = known.get("seeds", longest)
    slopes = zip(sizes[1:], (np.diff(y) / step).tolist(), apart.tolist(), strict=True)
    by_size = {size: Estimate(one, own_error) for size, one, own_error in slopes}
    chance = _chance(float(residuals @ residuals), free, explained, freedom)
    by_name = {name: one[0] for name, one in known.items()}
    law = {"intercept": intercept, "errors": by_name, "chance": chance}
    return Power(value, error, len(sizes), 2, of_error, by_size, **law)


def _chance(squares: float, free: int, explained: float, freedom: float | None) -> float:
    """The chance of residuals with this sum of `squares` or more on `free` degrees of freedom where
    the errors, known on `freedom`, explain `explained` in the mean (F distribution)."""
    from scipy.special import chdtrc, fdtrc

    if not free or not explained > 1e-20:  # rounding
        return math.nan
    ratio = squares / explained
    return float(fdtrc(free, freedom, ratio) if freedom else chdtrc(free, ratio * free))


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
    fit = power(whole.to_dict(), own, [part.to_dict() for part in parts], count - 1)
    return replace(fit, groups=count, fitted=1)


def complete(rows: pd.DataFrame, group: str, *keys: str) -> pd.DataFrame:
    """The rows of those groups that have one at every combination of `keys` there is."""
    points = rows.drop_duplicates([group, *keys])
    sizes, wanted = points.groupby(group).size(), len(points.drop_duplicates(list(keys)))
    return rows[rows[group].isin(sizes.index[sizes == wanted])]


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
