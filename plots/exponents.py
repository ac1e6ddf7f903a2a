"""Powers of a size (heads, head dimension, depth) in something measured over seeds, with errors.

Runs of one seed may share random numbers across sizes, so that the points of a fit are not
independent: errors are jackknife ones, a seed left out of all sizes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from plots.findings import Finding, claimed_gain, distance, number
from training.fits import PowerLaw, power_law

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

    def distance(self, published: float) -> str:
        """The verdict beside a published number."""
        return distance(self.value, self.error, published, self.groups)

    def claimed_gain(self) -> str:
        """The verdict on a number that the paper says is above zero."""
        return claimed_gain(self.value, self.error, self.groups)

    def claimed_fall(self) -> str:
        """The verdict on a number that the paper says is below zero."""
        return claimed_gain(-self.value, self.error, self.groups)

    def finding(self, name: str, published: float, beside: str | None = None) -> Finding:
        """One line; `beside` stands for the published number in words."""
        beside = f"{published:g}" if beside is None else beside
        return Finding(name, self.text(), beside, self.distance(published))


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
    """The power of `size` in the mean of `value` and its jackknife error over groups."""
    return jackknife(rows, group, lambda part: power_of(law(part, size, value)))


def power_of(found: PowerLaw | None) -> float:
    """The exponent of a fit; NaN without one."""
    return math.nan if found is None else found.exponent
