"""Slopes of what was measured: powers of the size with their errors, and verdicts.

`ok`: within the tolerance of the aim. `expected exception`: off the aim, on the side of what the
first steps are predicted to have, and not beyond that by more than the tolerance. `grows`,
`vanishes`: off by more. `unclear`: the noise leaves the word open, or some values are zero and
others are not. `not finite`: NaN or infinite. `-`: always zero, or nothing is known to compare
with.

Exponents of the theory differ by halves, and the tolerance is half of that. So a slope near its aim
is decided where its 95 % interval leaves out the exponents next to the aim, two tolerances away.
Then one of these passes as the aim in at most 2.5 % of cases, however large the noise.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from param_groups.check import theory
from param_groups.check.judging import Judged
from param_groups.check.measuring import ALONG, INPUT, Coordinate, Measurement, pooled
from param_groups.check.theory import DIFFERS, EXCEPTION, GROWS, OK, VANISHES
from param_groups.rows import align

TOLERANCE = 0.25
MOST_SEEDS = 4  # times as many as were asked for, where noise leaves a verdict open
UNCLEAR, NOT_FINITE, UNKNOWN = "unclear", "not finite", "-"
SEVERITY = (NOT_FINITE, DIFFERS, GROWS, VANISHES, UNCLEAR, EXCEPTION, OK, UNKNOWN)
BAD = SEVERITY[:5]


@dataclass(frozen=True)
class Slope:
    """The power of the size in one quantity, with its verdict.

    `reach`: how far its 95 % interval reaches to either side. `aim` and `predicted` are those of
    `theory.expectation`; `note` says why a verdict is not plain.
    """

    quantity: str
    name: str
    part: str
    step: int
    slope: float | None
    reach: float | None
    aim: float | None
    predicted: float | None
    verdict: str
    note: str = ""


def fit(measurement: Measurement, tolerance: float = TOLERANCE) -> list[Slope]:
    """The powers of the size in all that was measured.

    Args:
        measurement: of `measure`.
        tolerance: how far a slope may be from its aim; exponents of the theory differ by halves.

    Returns:
        One slope with its verdict per quantity, name and step, in the order they were measured.

    Source: the aims are those of `theory.expectation`; intervals are those of `slope_of`.
    """
    groups: dict[tuple[str, str, str, int], list[Coordinate]] = {}
    for point in measurement.points:
        key = (point.quantity, point.name, point.part, point.step)
        groups.setdefault(key, []).append(point)
    expected = theory.expected_of(measurement.plans)
    numbers = theory.PlanExponents(measurement.plans)
    slopes = []
    for key, points in groups.items():
        quantity, name, part, step = key
        if quantity == "update":
            aims = theory.expected_update(name, numbers, expected)
        elif quantity == "gradient":
            aims = (theory.expected_gradient(name, part, step, numbers, expected),) * 2
        else:
            aims = theory.expectation(expected, quantity, part)
        aim, predicted = (None if value is None else float(value) for value in aims)
        slope, reach, note = None, None, ""
        if not all(math.isfinite(point.rms) for point in points):
            word = NOT_FINITE
        elif max(point.rms for point in points) == 0:
            word, note = UNKNOWN, "zero"
        elif zero := next((point for point in points if point.rms == 0), None):
            word, note = UNCLEAR, f"zero at width {zero.width}, seed {zero.seed}"
        else:
            slope, reach = slope_of(points)
            reason = theory.exception(expected, quantity, part)
            plain = part == "logits" and quantity == "change" and ALONG not in name
            one_sided = plain or part == "router"
            allowed = predicted if reason else aim
            word = verdict(slope, reach, aim, allowed, tolerance, one_sided)
            note = reason if word == EXCEPTION else ""
        slopes.append(Slope(*key, slope, reach, aim, predicted, word, note))
    return slopes


def decided(
    run: Callable[[Sequence[int]], Measurement], seeds: int, tolerance: float = TOLERANCE
) -> tuple[Measurement, list[Slope], int]:
    """Measures, and measures more seeds while nothing but the noise of seeds leaves a verdict open.

    Args:
        run: run(seeds), a `Measurement` of these seeds.
        seeds: how many to begin with; at most MOST_SEEDS times as many are measured.
        tolerance: as in `fit`.

    Returns:
        What was measured, its slopes, and how many seeds there are.
    """
    result, most = run(range(seeds)), MOST_SEEDS * seeds
    slopes = fit(result, tolerance)
    while seeds < most and {one.verdict for one in slopes if one.verdict in BAD} == {UNCLEAR}:
        more = range(seeds, min(2 * seeds, most))
        result.points += run(more).points
        seeds = more.stop
        slopes = fit(result, tolerance)
    return result, slopes, seeds


def slope_of(points: Sequence[Coordinate]) -> tuple[float, float]:
    """(slope of log RMS against log size, how far its 95 % interval reaches to either side).

    The slope is that of the mean logarithm over seeds. A seed's batch is the same at every size:
    what it adds to the values of all sizes moves no slope, and is no part of the error, which is
    that of the slopes of single seeds about their mean. A bend that seeds share is no noise. Where
    it is far larger than noise explains (of a hundred straight lines of a check hardly one), the
    interval is that of the line through the means.

    Source: least squares in a randomised block design, where the seeds are the blocks.
    """
    logs: dict[int, dict[int, float]] = {}  # by size and seed
    for point in points:
        logs.setdefault(point.width, {})[point.seed] = math.log(point.rms)
    seeds = [*set.intersection(*(set(of) for of in logs.values()))]
    x = [math.log(size) for size in logs]
    x = [one - fmean(x) for one in x]
    spread = sum(one * one for one in x)
    rows = [[of[seed] for seed in seeds] for of in logs.values()]
    means = [fmean(row) for row in rows]
    levels = [fmean(column) for column in zip(*rows, strict=True)]
    slope = sum(a * b for a, b in zip(x, means, strict=True)) / spread
    middle = fmean(means)
    bent = sum((y - middle - slope * a) ** 2 for a, y in zip(x, means, strict=True))
    shared = math.sqrt(bent / max(len(x) - 2, 1) / spread)
    if len(seeds) == 1:
        return slope, student(len(x) - 2) * shared
    rest = sum(
        (value - mean - level + middle) ** 2
        for row, mean in zip(rows, means, strict=True)
        for value, level in zip(row, levels, strict=True)
    )
    freedom = (len(x) - 1) * (len(seeds) - 1)
    reach = student(freedom) * math.sqrt(rest / freedom / len(seeds) / spread)
    return slope, 2 * shared if shared > 2 * reach else reach


# Student's 97.5 % quantiles for 1, 2, ... degrees of freedom; beyond, 1.96 + 2.5 / freedom is
# within 0.015 of them.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def student(freedom: float) -> float:
    """Student's 97.5 % quantile."""
    whole = math.floor(freedom)
    if whole < 1:
        return math.inf
    return STUDENT[whole - 1] if whole <= len(STUDENT) else 1.96 + 2.5 / freedom


def verdict(
    slope: float,
    reach: float,
    aim: float | None,
    allowed: float | None,
    tolerance: float = TOLERANCE,
    one_sided: bool = False,
) -> str:
    """The verdict on a slope that may lie between `aim` and `allowed`. A one-sided slope can only
    be too large; below its aim it is not judged."""
    if aim is None or allowed is None:
        return UNKNOWN
    low, high = min(aim, allowed), max(aim, allowed)
    if slope - reach > high + tolerance:
        return GROWS
    if one_sided and slope < aim - tolerance:
        return UNKNOWN
    if slope + reach < low - tolerance:
        return VANISHES
    off = max(low - slope, slope - high, 0.0)
    below = one_sided and slope + reach < high + tolerance  # however far noise may reach down
    if not below and (off > tolerance or off + reach > 2 * tolerance):
        return UNCLEAR
    return OK if abs(slope - aim) <= tolerance else EXCEPTION


def worst(words: Iterable[str]) -> str:
    """The most severe of several verdicts."""
    return min(words, key=SEVERITY.index)


def failed(slopes: Sequence[Slope], numbers: Sequence[Judged] = ()) -> bool:
    """Whether any verdict is bad, or nothing has moved."""
    bad = any(one.verdict in BAD for one in slopes) or any(one.verdict in BAD for one in numbers)
    return bad or at_rest(slopes)


def at_rest(slopes: Sequence[Slope]) -> bool:
    """Whether no step has changed anything, so that nothing but the start was judged."""
    return not any(slope.slope is not None for slope in slopes if slope.quantity != "init")


# For people


def numbers_table(numbers: Sequence[Judged]) -> str:
    """What the numbers alone say: one line if all is as expected, else the lines that are not."""
    if not numbers:
        return "numbers, before training: nothing is known to compare them with"
    bad = {(pooled(one.name), one.quantity): one for one in numbers if one.verdict in BAD}
    tensors = len({one.name for one in numbers if one.quantity in ("start", "rate")})
    if not bad:
        return f"numbers, before training: all {tensors} as expected ({numbers[0].source})"
    rows = [("number", "goes as size^", "expected", "verdict")]
    for (name, quantity), one in bad.items():
        aim = "one" if one.expected is None else _number(one.expected)
        rows.append((f"{name} {quantity}", one.note or _number(one.power), aim, one.verdict))
    return f"numbers, before training, against {numbers[0].source}:\n{align(rows)}"


def table(slopes: Sequence[Slope]) -> str:
    """Modules, then tensors: slopes at the first and the last step, with the expected ones.

    Repeated blocks are one line, with the slope that is farthest from its aim; the verdict is the
    worst over blocks and all steps.
    """
    last = max(slope.step for slope in slopes)
    head = ("module", "init", "aim", "gradient", "aim", "change, step 1", f"step {last}", "aim")
    modules = [(*head, "predicted", "verdict")]
    tensors = [("tensor", "update, step 1", f"step {last}", "expected", "verdict")]
    for name, group in _lines(slopes, updates=False).items():
        start = _farthest(group, "init", 0)
        one, end = _farthest(group, "change", 1), _farthest(group, "change", last)
        aims = (_number(one.aim), _number(one.predicted)) if one else ("", "")
        below = _farthest(group, "gradient", 0) or _farthest(group, "gradient", 1)
        cells = [(_cell(s), _number(s.aim) if s else "") for s in (start, below)]
        word = worst(slope.verdict for slope in group)
        modules.append((name, *cells[0], *cells[1], _cell(one), _cell(end), *aims, word))
    for name, group in _lines(slopes, updates=True).items():
        one, end = _farthest(group, "update", 1), _farthest(group, "update", last)
        aim, word = _number(one.aim if one else None), worst(slope.verdict for slope in group)
        tensors.append((name, _cell(one), _cell(end), aim, word))
    notes = dict.fromkeys(slope.note for slope in slopes if slope.verdict == EXCEPTION)
    return "\n\n".join([align(modules), align(tensors), *(f"{EXCEPTION}: {n}" for n in notes)])


def summary(
    slopes: Sequence[Slope], numbers: Sequence[Judged] = (), left: Sequence[str] = ()
) -> str:
    """The outcome in one line; `left`: what was not judged."""
    groups = [group for updates in (False, True) for group in _lines(slopes, updates).values()]
    words = [worst(slope.verdict for slope in group) for group in groups]
    counts = ", ".join(f"{words.count(word)} {word}" for word in SEVERITY if word in words)
    still = "; no step has changed anything" if at_rest(slopes) else ""
    wrong = len({(pooled(one.name), one.quantity) for one in numbers if one.verdict in BAD})
    before = f"; of the numbers alone {wrong} wrong" if wrong else ""
    passed = f"NOT ALL JUDGED ({len(left)} left)" if left else "passed"
    return f"{'FAILED' if failed(slopes, numbers) else passed}: {counts}{still}{before}"


def _lines(slopes: Sequence[Slope], updates: bool) -> Mapping[str, list[Slope]]:
    """The slopes of each line of the table, those of tensors or those of modules; of the inputs
    those that are bad."""
    groups: dict[str, list[Slope]] = {}
    for slope in slopes:
        if (slope.quantity == "update") == updates:
            groups.setdefault(pooled(slope.name), []).append(slope)
    words = {name: {slope.verdict for slope in group} for name, group in groups.items()}
    return {n: group for n, group in groups.items() if INPUT not in n or words[n] & {*BAD}}


def _farthest(group: Sequence[Slope], quantity: str, step: int) -> Slope | None:
    """Of the blocks of one line, the slope to show."""
    there = [slope for slope in group if (slope.quantity, slope.step) == (quantity, step)]
    return max(there, key=lambda s: abs((s.slope or 0) - (s.aim or 0)), default=None)


def _cell(slope: Slope | None) -> str:
    if slope is None or slope.slope is None or slope.reach is None:
        return (slope and (slope.note or slope.verdict)) or ""
    return f"{round(slope.slope, 2) + 0.0:+.2f} ± {slope.reach:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:+.2g}" if abs(value) > 1e-6 else "0"
