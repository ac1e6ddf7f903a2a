"""The coordinate check's slopes: powers of the width with their errors, and verdicts.

`ok`: within the tolerance of the aim. `expected exception`: off the aim, towards the prediction of
the first steps and past it by no more than the tolerance. `grows`, `shrinks`: off by more.
`unclear`: the standard errors leave the word open, or some values are zero and others are not.
`not finite`: NaN or infinite. `-`: always zero, or nothing is known to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from measure.coordinates import ALONG, Coordinate, Measurement
from measure.fits import power_law
from measure.theory import Theory, expectation, expected_update, has_exceptions, theory_of
from param_groups import Plan

TOLERANCE = 0.25
OK, EXCEPTION, GROWS, SHRINKS = "ok", "expected exception", "grows", "shrinks"
UNCLEAR, NOT_FINITE, UNKNOWN = "unclear", "not finite", "-"
SEVERITY = (NOT_FINITE, GROWS, SHRINKS, UNCLEAR, EXCEPTION, OK, UNKNOWN)
BAD = SEVERITY[:4]


@dataclass(frozen=True)
class Slope:
    """The power of the width in one quantity, with its standard error and verdict.

    `aim` and `predicted` are those of `expectation`; `note` says why a verdict is not plain.
    """

    quantity: str
    name: str
    part: str
    step: int
    slope: float | None
    error: float | None
    aim: float | None
    predicted: float | None
    verdict: str
    note: str = ""


def fit(measurement: Measurement, tolerance: float = TOLERANCE) -> list[Slope]:
    """One slope per quantity, name and step, in the order they were measured."""
    groups: dict[tuple[str, str, str, int], list[Coordinate]] = {}
    for point in measurement.points:
        key = (point.quantity, point.name, point.part, point.step)
        groups.setdefault(key, []).append(point)
    theory = theory_of(measurement.plans)
    return [
        _judged(key, points, _expected(key, measurement.plans, theory), theory, tolerance)
        for key, points in groups.items()
    ]


def _expected(
    key: tuple[str, str, str, int], plans: Mapping[int, Plan], theory: Theory | None
) -> tuple[float | None, float | None]:
    """(aim, prediction) of a module or tensor."""
    quantity, name, part, _ = key
    update = quantity == "update"
    found = expected_update(name, plans, theory) if update else expectation(theory, quantity, part)
    return tuple(None if value is None else float(value) for value in found)


def slope_of(points: Sequence[Coordinate]) -> tuple[float, float]:
    """(slope, standard error) of log RMS against log width.

    The slope is that of the mean logarithm over seeds. The error is the larger of two: that of all
    points, which holds the spread of the seeds, and that of the means, which holds the curvature
    that seeds share.
    """
    widths = [point.width for point in points]
    law = power_law(widths, [point.rms for point in points])
    different = sorted(set(widths))
    logs = [[math.log(p.rms) for p in points if p.width == width] for width in different]
    means = power_law(different, [math.exp(sum(seeds) / len(seeds)) for seeds in logs])
    return law.exponent, max(law.error, means.error)


def _judged(
    key: tuple[str, str, str, int],
    points: Sequence[Coordinate],
    expected: tuple[float | None, float | None],
    theory: Theory | None,
    tolerance: float,
) -> Slope:
    quantity, name, part, _ = key
    aim, predicted = expected
    values = [point.rms for point in points]
    if not all(map(math.isfinite, values)):
        return Slope(*key, None, None, aim, predicted, NOT_FINITE)
    if max(values) == 0:
        return Slope(*key, None, None, aim, predicted, UNKNOWN, "zero")
    if zero := next((point for point in points if point.rms == 0), None):
        note = f"zero at width {zero.width}, seed {zero.seed}"
        return Slope(*key, None, None, aim, predicted, UNCLEAR, note)
    slope, error = slope_of(points)
    one_sided = part == "logits" and quantity == "change" and ALONG not in name
    allowed = predicted if has_exceptions(theory, quantity, part) else aim
    word = verdict(slope, error, aim, allowed, tolerance, one_sided)
    note = _note(part, theory) if word == EXCEPTION else ""
    return Slope(*key, slope, error, aim, predicted, word, note)


def verdict(
    slope: float,
    error: float,
    aim: float | None,
    predicted: float | None,
    tolerance: float = TOLERANCE,
    one_sided: bool = False,
) -> str:
    """The word for a slope; one-sided slopes are only too large, or not judged."""
    if aim is None or predicted is None:
        return UNKNOWN
    low, high = min(aim, predicted) - tolerance, max(aim, predicted) + tolerance
    if slope - 2 * error > high:
        return GROWS
    if one_sided and slope < aim - tolerance:
        return UNKNOWN
    if slope + 2 * error < low:
        return SHRINKS
    if not low <= slope <= high or 2 * error > tolerance:
        return UNCLEAR
    return OK if abs(slope - aim) <= tolerance else EXCEPTION


_SGD_NOTE = (
    "in the first steps of SGD the values that attention mixes do not align with the gradient yet, "
    "so queries and keys move less by a factor N^(-1/2) (Bordelon et al., Fig. 13)"
)
_ALPHA_NOTE = (
    "the rates assume that updates and activations are unaligned (alpha 1/2, Everett et al.'s no "
    "alignment); in the first steps they are aligned (1), so changes grow"
)
_OMEGA_NOTE = (
    "Everett et al. assume that the readout's weights do not align with the change of their input "
    "(omega 1/2); in the first steps they do (1), so logits grow as width^(1/2)"
)


def _note(part: str, theory: Theory) -> str:
    """Why an expected exception is one."""
    if part == "tensor":
        return _SGD_NOTE
    return _ALPHA_NOTE if theory.alignment.alpha < 1 else _OMEGA_NOTE


def worst(words: Sequence[str]) -> str:
    """The most severe of several verdicts."""
    return min(words, key=SEVERITY.index)


def failed(slopes: Sequence[Slope]) -> bool:
    """Whether any verdict is bad, or nothing has moved."""
    return any(slope.verdict in BAD for slope in slopes) or at_rest(slopes)


def at_rest(slopes: Sequence[Slope]) -> bool:
    """Whether no step has changed anything, so that nothing but the start was judged."""
    return not any(slope.slope is not None for slope in slopes if slope.quantity != "init")
