"""Findings in words: what was measured, on how much, and what the paper says."""

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

    def line(self) -> str:
        """The finding in one line."""
        return f"{self.name:<62} {self.measured:<42} {self.published:<18} {self.verdict}".rstrip()


HEADER = Finding("finding", "measured", "published", "verdict").line()


def number(value: float, error: float, digits: int = 3) -> str:
    """value ± error, with ? for an error that is unknown."""
    if math.isnan(value):
        return "not measured"
    known = f"± {error:.{digits}f}" if math.isfinite(error) else "± ?"
    return f"{value:+.{digits}f} {known}"


def claimed_gain(gain: float, error: float) -> str:
    """Whether a gain the paper claims is there: beyond two standard errors or within them."""
    if math.isnan(gain):
        return "not measured"
    word = "agrees" if gain > 0 else "disagrees"
    if not math.isfinite(error):
        return f"{word} in sign, one seed"
    return "within noise" if abs(gain) <= 2 * error else word


def claimed_equal(difference: float, error: float) -> str:
    """Whether a difference the paper finds none in lies within two standard errors."""
    if math.isnan(difference):
        return "not measured"
    if not math.isfinite(error):
        return "undecided: error unknown"
    return "agrees" if abs(difference) <= 2 * error else "disagrees"


def distance(value: float, error: float, published: float) -> str:
    """How far a measured number lies from the published one, in its own standard errors."""
    if math.isnan(value):
        return "not measured"
    if not math.isfinite(error):
        return f"off by {value - published:+.2f}, error unknown"
    if abs(value - published) <= 2 * error:
        return "agrees within 2 SE"
    return f"off by {value - published:+.2f}, {abs(value - published) / max(error, 1e-9):.1f} SE"
