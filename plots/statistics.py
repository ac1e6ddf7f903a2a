"""Powers of a size (heads, head dimension, depth) in something measured over seeds, with errors.

Runs of one seed may share random numbers across sizes, so that the points of a fit are not
independent: errors are jackknife ones, a seed left out of all sizes at once. A seed that lacks a
size counts at none: sizes are compared on the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd

from measure.fits import PowerLaw, power_law
from plots.findings import (
    Finding,
    claimed_gain,
    claimed_no_fall,
    compact,
    distance,
    number,
)

Statistic = Callable[[pd.DataFrame], float]


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error (NaN if unknown) and how many independent groups, such as
    seeds, both come from."""

    value: float
    error: float
    groups: int

    def text(self, digits: int = 3) -> str:
        """value ± error (n = groups)."""
        known = not math.isnan(self.value)
        return number(self.value, self.error, digits) + (f" (n = {self.groups})" if known else "")

    def compact(self) -> str:
        """value±error, without an error that is unknown."""
        return compact(self.value, self.error)

    def distance(self, published: float) -> str:
        """The verdict against a published number."""
        return distance(self.value, self.error, published, self.groups)

    def claimed_gain(self) -> str:
        """The verdict on a number that the paper says is above zero."""
        return claimed_gain(self.value, self.error, self.groups)

    def claimed_fall(self) -> str:
        """The verdict on a number that the paper says is below zero."""
        return claimed_gain(-self.value, self.error, self.groups)

    def claimed_no_fall(self) -> str:
        """The verdict on a number that the paper says is not below zero."""
        return claimed_no_fall(self.value, self.error, self.groups)

    def finding(self, name: str, published: float, beside: str | None = None) -> Finding:
        """One line; `beside` is the text of the published number."""
        beside = exact_text(published) if beside is None else beside
        return Finding(name, self.text(), beside, self.distance(published))


def exact_text(value: float) -> str:
    """An exponent as the papers write it: -1/2."""
    return str(Fraction(value).limit_denominator(64))


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


def exponent(rows: pd.DataFrame, group: str, size: str, value: str) -> Estimate:
    """The power of `size` in the mean of `value` and its jackknife error, over the groups that have
    a finite value at every size."""
    rows = complete(rows[np.isfinite(rows[value])], group, size)
    return jackknife(rows, group, lambda part: power_of(law(part, size, value)))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; NaN for what too few values leave open."""
    if not len(values):
        return math.nan, math.nan
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), spread / math.sqrt(len(values))


def mean(values: Mapping[int, float]) -> Estimate:
    """The mean over seeds and its standard error; seed -> value."""
    rows = pd.DataFrame({"seed": list(values), "value": list(values.values())}, dtype=float)
    return jackknife(rows, "seed", lambda part: float(part["value"].mean()))


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """first - second by seed, over the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}


def power_of(found: PowerLaw | None) -> float:
    """The exponent of a fit; NaN without one."""
    return math.nan if found is None else found.exponent
