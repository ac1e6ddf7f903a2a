"""Findings: what was measured, on how much, and what the paper says."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line: what, measured with its uncertainty, published, and how they compare."""

    name: str
    measured: str
    published: str = ""
    verdict: str = ""

    def __str__(self) -> str:
        """The finding in one line."""
        return f"{self.name:<62} {self.measured:<42} {self.published:<18} {self.verdict}".rstrip()


Printed = Finding | str  # of what a figure prints: a finding, or what findings rest on
HEADER = str(Finding("finding", "measured", "published", "verdict"))


def number(value: float, error: float, digits: int = 3, sign: str = "+") -> str:
    """value ± error, with ? for an error that is unknown; `sign` "" leaves a plus out."""
    if math.isnan(value):
        return "not measured"
    known = f"± {error:.{digits}f}" if math.isfinite(error) else "± ?"
    return f"{value:{sign}.{digits}f} {known}"


def compact(value: float, error: float) -> str:
    """value±error, without an error that is unknown."""
    return f"{value:.3f}" + (f"±{error:.3f}" if math.isfinite(error) else "")


# Verdicts. `n`, where given, is the number of independent values (seeds, or runs of a fit) that
# mean and error come from: intervals then have 95 % coverage. Two standard errors have 70 % at
# n = 2 and 82 % at n = 3.


def reach(n: int | None, fitted: int = 1) -> float:
    """Standard errors on either side of an interval: 2, or Student's 97.5 % quantile for n values
    from which `fitted` parameters were estimated (1: a mean)."""
    if n is None:
        return 2.0
    from scipy.special import stdtrit

    return float(stdtrit(n - fitted, 0.975))


def few(n: int | None, fitted: int = 1) -> str:
    """The verdict where n values leave fewer than two degrees of freedom, or ""."""
    return f"undecided (n = {n})" if n is not None and n - fitted < 2 else ""


def claimed_gain(gain: float, error: float, n: int | None = None) -> str:
    """Whether a gain the paper claims is there: outside the interval of `reach` or within it."""
    if not math.isfinite(gain):
        return "not measured"
    if few(n):
        return few(n)
    word = "agrees" if gain > 0 else "disagrees"
    if not math.isfinite(error):
        return f"{word} in sign, " + ("one seed" if n is None else "error unknown")
    return "within noise" if abs(gain) <= reach(n) * error else word


def _unknown(value: float, error: float, n: int | None) -> str:
    """Why there is no verdict, or ""."""
    if not math.isfinite(value):
        return "not measured"
    return few(n) or ("" if math.isfinite(error) else "undecided: error unknown")


def claimed_no_fall(value: float, error: float, n: int | None = None) -> str:
    """Whether a number the paper says is not below zero may be so: its interval's upper end."""
    known = "agrees" if value + reach(n) * error >= 0 else "disagrees"
    return _unknown(value, error, n) or known


def claimed_equal(difference: float, error: float, n: int | None = None) -> str:
    """Whether a difference the paper finds none in lies within the interval of `reach`."""
    known = "agrees" if abs(difference) <= reach(n) * error else "disagrees"
    return _unknown(difference, error, n) or known


def distance(
    value: float, error: float, published: float, n: int | None = None, fitted: int = 1
) -> str:
    """How far a measured number lies from the published one, in its own standard errors."""
    if not math.isfinite(value):
        return "not measured"
    if few(n, fitted):
        return few(n, fitted)
    if not math.isfinite(error):
        return f"off by {value - published:+.2f}, error unknown"
    error = max(error, 1e-9)  # the rounding of a fit
    if abs(value - published) <= reach(n, fitted) * error:
        return "agrees within " + ("2 SE" if n is None else "95 %")
    return f"off by {value - published:+.2f}, {abs(value - published) / error:.1f} SE"
