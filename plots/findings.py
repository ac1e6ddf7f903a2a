"""Findings: what was measured, on how much, and what the paper says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction


@dataclass(frozen=True)
class Finding:
    """One line: what, measured with its uncertainty, published, and how they compare; the number
    itself where `measured` rounds it."""

    name: str
    measured: str
    published: str = ""
    verdict: str = ""
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        """What has no number, as where runs are missing in a table, is no verdict."""
        if re.search(r"(?<!\w)[-+]?nan\b", self.measured):
            object.__setattr__(self, "measured", "not measured")
            object.__setattr__(self, "verdict", "not measured")

    def __str__(self) -> str:
        """The finding in one line."""
        return f"{self.name:<62} {self.measured:<42} {self.published:<18} {self.verdict}".rstrip()


KINDS = {  # the words that verdicts begin with
    "agrees": r"agrees|as expected|confirmed|within one step",
    "off": r"off by",
    "disagrees": r"disagrees|MISSED",
    "open": r"within noise|undecided|not measured",
    "none": r"",
}


def kind(verdict: str) -> str:
    """The key of KINDS that a verdict's words belong to."""
    return next(key for key, words in KINDS.items() if re.match(words, verdict))


Printed = Finding | str  # of what a figure prints: a finding, or what findings rest on
Report = Iterator[Printed]
HEADER = str(Finding("finding", "measured", "published", "verdict"))


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error (NaN: unknown) and, where they are known, how many independent
    `groups` (seeds, or runs of a fit) both come from, from which `fitted` parameters were estimated
    (1: a mean); `freedom` are the error's degrees of freedom where they are not groups - fitted.
    `by_size` has the same number at each size, of an exponent the local one from the size before.
    `blocked` says why it decides nothing.

    Verdicts have intervals of 95 % coverage where the degrees of freedom are known. Else these are
    two standard errors, which have 70 % with two groups and 82 % with three.
    """

    value: float
    error: float
    groups: int | None = None
    fitted: int = 1
    freedom: float | None = None
    by_size: Mapping[float, Estimate] = field(default_factory=dict, compare=False, repr=False)
    blocked: str = ""

    def __post_init__(self) -> None:
        if self.freedom is None and self.groups is not None:
            object.__setattr__(self, "freedom", float(self.groups - self.fitted))

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two independent numbers."""
        return weighted([(1.0, self), (-1.0, other)])

    def __neg__(self) -> Estimate:
        """The number with the other sign, to judge a claim that it is below zero."""
        turned = {size: -one for size, one in self.by_size.items()}
        return replace(self, value=-self.value, by_size=turned)

    def text(self, digits: int = 3, sign: str = "+") -> str:
        """value ± error (n = groups), with ? for an unknown error; `sign` "" leaves a plus out."""
        if math.isnan(self.value):
            return "not measured"
        known = f"± {self.error:.{digits}f}" if math.isfinite(self.error) else "± ?"
        groups = "" if self.groups is None else f" (n = {self.groups})"
        return f"{self.value:{sign}.{digits}f} {known}{groups}"

    def through_widths(self, digits: int = 2, sign: str = "+", edge: str = "") -> str:
        """An exponent, or a difference of two, whose groups are the widths of a fit."""
        digits += 0.05 <= self.error * 10.0**digits < 0.5  # which ± 0.00 would hide
        text = Estimate(self.value, self.error).text(digits, sign)
        return text if math.isnan(self.value) else f"{text} (n = {self.groups} widths{edge})"

    def rounded(self) -> str:
        """The text with as many digits as show one of the error, two where it begins with a 1; at
        least two and at most four."""
        if not 0 < self.error < math.inf:
            return self.text(3)
        places = -math.floor(math.log10(self.error))
        return self.text(min(max(places + (self.error * 10**places < 2), 2), 4))

    @property
    def basis(self) -> tuple[float, float]:
        """(seeds, sizes) that the number rests on, to compare two of one name: of a fit through
        sizes their number, of others the largest size."""
        if self.fitted > 1:
            return 0.0, float(self.groups or 0)
        return float(self.groups or 0), float(max(self.by_size, default=0))

    def compact(self) -> str:
        """value±error, without an error that is unknown."""
        return f"{self.value:.3f}" + (f"±{self.error:.3f}" if math.isfinite(self.error) else "")

    @property
    def bar(self) -> float | None:
        """The length of an error bar; None for an unknown error."""
        return self.error if math.isfinite(self.error) else None

    # Verdicts

    @property
    def reach(self) -> float:
        """Standard errors on either side: 2, or Student's 97.5 % quantile."""
        return 2.0 if self.freedom is None else self.reach_of(1)

    def reach_of(self, count: float) -> float:
        """The same with a Bonferroni correction for `count` numbers."""
        from scipy.special import stdtrit

        return float(stdtrit(math.inf if self.freedom is None else self.freedom, 1 - 0.025 / count))

    @property
    def undecided(self) -> str:
        """The verdict where one is blocked or fewer than two degrees of freedom are left, or ""."""
        known = self.groups is None or self.groups - self.fitted >= 2
        few = "" if known else f"undecided (n = {self.groups})"
        return f"undecided: {self.blocked}" if self.blocked else few

    def claimed_gain(self) -> str:
        """Whether the paper is right that this is above zero: outside the interval or within it."""
        if not math.isfinite(self.value):
            return "not measured"
        if self.undecided:
            return self.undecided
        word = "agrees" if self.value > 0 else "disagrees"
        if not math.isfinite(self.error):
            return f"{word} in sign, " + ("one seed" if self.groups is None else "error unknown")
        return "within noise" if abs(self.value) <= self.reach * self.error else word

    def claimed_no_fall(self) -> str:
        """Whether this may be zero or more, as the paper says: by its interval's upper end."""
        return self._verdict(self.value + self.reach * self.error >= 0)

    def claimed_equal(self) -> str:
        """Whether the interval contains zero, where the paper claims no difference."""
        return self._verdict(abs(self.value) <= self.reach * self.error)

    def _verdict(self, agrees: bool) -> str:
        if not math.isfinite(self.value):
            return "not measured"
        unknown = "" if math.isfinite(self.error) else "undecided: error unknown"
        return self.undecided or unknown or ("agrees" if agrees else "disagrees")

    def judged(
        self, name: str, claim: str | None, published: str, digits: int = 3, text: str = ""
    ) -> Finding:
        """Beside `published`, the words by which the paper claims that this is above 0 (`gains`),
        below (`loses`) or 0 (`equal`), or nothing (None); `text` stands for its own."""
        verdicts = {
            None: lambda: "",
            "gains": self.claimed_gain,
            "loses": (-self).claimed_gain,
            "equal": self.claimed_equal,
        }
        return Finding(name, text or self.text(digits), published, verdicts[claim](), self)

    def distance(self, published: float) -> str:
        """How far this lies from the published number, in its own standard errors."""
        if not math.isfinite(self.value):
            return "not measured"
        off = self.value - published
        if self.undecided:
            return self.undecided
        if not math.isfinite(self.error):
            return f"off by {off:+.2f}, error unknown"
        error = max(self.error, 1e-9)  # the rounding of a fit
        if abs(off) <= self.reach * error:
            return "agrees within " + ("2 SE" if self.freedom is None else "95 %")
        return f"off by {off:+.2f}, {abs(off) / error:.1f} SE"

    def finding(
        self, name: str, published: float, beside: str | None = None, digits=3, sign="+"
    ) -> Finding:
        """Beside a published number; `beside` is its text, -1/2 as the papers write it if None."""
        beside = exact_text(published) if beside is None else beside
        return Finding(name, self.text(digits, sign), beside, self.distance(published), self)


UNKNOWN = Estimate(math.nan, math.nan)


def weighted(parts: Iterable[tuple[float, Estimate]]) -> Estimate:
    """The sum of weight times number over independent numbers; their errors add in squares, with
    Welch's and Satterthwaite's degrees of freedom. It rests on the fewest groups of all."""
    parts = list(parts)
    errors = [weight * one.error for weight, one in parts]
    error, freedom = math.hypot(*errors), None
    least = min(
        (one for _, one in parts),
        default=None,
        key=lambda one: math.inf if one.groups is None else one.groups - one.fitted,
    )
    known = least is not None and all(one.groups is not None for _, one in parts)
    if error > 0 and all(one.freedom for _, one in parts):
        freedom = 1 / sum(
            (own / error) ** 4 / (one.freedom or 1)
            for own, (_, one) in zip(errors, parts, strict=True)
        )
    total = float(sum(weight * one.value for weight, one in parts))
    counts = (least.groups, least.fitted) if known else (None, 1)
    blocked = next((one.blocked for _, one in parts if one.blocked), "")
    return Estimate(total, error, *counts, freedom, blocked=blocked)


def exact_text(value: float) -> str:
    """An exponent as the papers write it: -1/2."""
    return str(Fraction(value).limit_denominator(64))
