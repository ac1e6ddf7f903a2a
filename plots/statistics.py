"""Powers of a size (heads, head dimension, depth) in something measured over seeds, with errors.

Runs of one seed may share random numbers across sizes, so that the points of a fit are not
independent: errors are jackknife ones, a seed left out of all sizes at once. A seed that lacks a
size counts at none: sizes are compared on the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from measure.fits import PowerLaw, power_law
from plots.findings import UNKNOWN, Estimate, weighted

Statistic = Callable[[pd.DataFrame], float]


def complete(rows: pd.DataFrame, group: str, *keys: str) -> pd.DataFrame:
    """The rows of those groups that have one at every combination of `keys` there is."""
    points = rows.drop_duplicates([group, *keys])
    found, wanted = points.groupby(group).size(), len(points.drop_duplicates(list(keys)))
    return rows[rows[group].isin(found.index[found == wanted])]


def jackknife(rows: pd.DataFrame, group: str, statistic: Statistic) -> Estimate:
    """The statistic of all rows, and its error from leaving out one group after another; no error
    with a single group or where a part has no value."""
    groups = rows[group].unique()
    value, count = statistic(rows), len(groups)
    if count < 2:
        return Estimate(value, math.nan, count)
    parts = np.array([statistic(rows[rows[group] != one]) for one in groups])
    return Estimate(value, math.sqrt((count - 1) * parts.var()), count)


def law(rows: pd.DataFrame, size: str, value: str) -> PowerLaw | None:
    """The unweighted fit to the means of `value` by `size`; None with fewer than two sizes whose
    mean is above zero."""
    return fitted(rows.groupby(size)[value].mean())


def fitted(means: pd.Series) -> PowerLaw | None:
    """The power of the index in the finite values above zero; None for fewer than two of them."""
    means = means[np.isfinite(means) & (means > 0)]
    return power_law(means.index.tolist(), means.tolist()) if len(means) > 1 else None


def power_of(found: PowerLaw | None) -> float:
    """The exponent of a fit; NaN without one."""
    return math.nan if found is None else found.exponent


def exponent(rows: pd.DataFrame, group: str, size: str, value: str) -> Estimate:
    """The power of `size` in the mean of `value` and its jackknife error, over the groups that have
    a finite value at every size."""
    rows = complete(rows[np.isfinite(rows[value])], group, size)
    return jackknife(rows, group, lambda part: power_of(law(part, size, value)))


def slope(values: Mapping[int, Estimate]) -> Estimate:
    """What a doubling of the size adds: the unweighted line through all values, with the error and
    the degrees of freedom that theirs imply (NaN where one is unknown); NaN below two sizes."""
    if len(values) < 2:
        return UNKNOWN
    octaves = np.log2(list(values)) - np.mean(np.log2(list(values)))
    return weighted(zip((octaves / (octaves @ octaves)).tolist(), values.values(), strict=True))


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
