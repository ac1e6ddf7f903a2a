"""Which claims of the papers are reproduced here, and how sure that is.

    python -m plots claims            writes plots/claims.md from claims.yaml and the shipped tables

*Sign*: whether the number, or the difference, lies on the claimed side of zero: no, where its 95 %
interval lies on the other side, and for a claimed side beyond the effect. *Size*: whether it is
shown to lie within the effect of the claimed number or range, by two one-sided tests at 5 %, or to
be a difference beyond the effect where a side is claimed; no, where the 95 % interval of a number
lies outside. So a difference within the effect is none, whatever is claimed of it. Of several
findings all must; one that does not, with errors for all of them together (Bonferroni), is a no.
*Drift*: whether over the last three sizes of a preset the number moves toward the claim or away
from it, by more than its error; empty where that is not known. An effect has its date, and says
*after the data* where it is younger than the commit that the runs of its tables were made from. A
later preset stands for an earlier one where it has as many seeds and sizes; else both are judged.
A preset called closer, with more seeds at fewer places, counts only where it has as many seeds and
as large sizes.
*Prepared*: the sweep that would decide, and has not run.
"""

import argparse
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from plots import catalogue, tables
from plots.findings import Estimate, Finding, kind
from plots.statistics import slope
from training.files import write_text

PAPERS = ("Everett et al.", "Dinan et al.", "Bordelon et al.", "Stratos")
CLAIMS, PAGE = (Path(__file__).with_name(f"claims.{end}") for end in ("yaml", "md"))
YES, NO, UNKNOWN, NONE, TOWARD, AWAY, STILL = "yes", "no", "unknown", "–", "toward", "away", "none"
ORDER = (UNKNOWN, STILL, AWAY, TOWARD).index  # of several drifts the first stands
WORDS = {
    "reproduced": "beyond the effect on the claimed side, or within it of the claimed number",
    "reproduced in sign": "the claimed side of zero; another size, below the effect, or unknown",
    "approaching": "outside the effect, moving toward the claim, and within it at the last size",
    "not reproduced, cause known": "another sign or size; runs without the cause have the claim's",
    "not reproduced": "another sign or size here, without a run that shows why",
    "undecided": "errors, or constants near an edge of their search, leave it open",
    "not tested": "nothing here tests it",
}
FIRST_LINE = (
    "*Not reproduced* does not say that a paper is wrong, nor *reproduced* that it is right: the "
    "words speak of small models, short runs and other data than the papers'."
)
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:/\d+)?"


@dataclass(frozen=True)
class Judgement:
    """What one finding, of a preset's tables, says of its claim; whether its last size is near."""

    finding: Finding
    off: float = 0.0
    sign: str = NONE
    size: str = NONE
    drift: str = UNKNOWN
    arrived: bool = False
    preset: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of the file with what its findings say."""

    paper: str
    entry: Mapping[str, Any]
    judgements: Sequence[Judgement] = ()
    cause: str = ""

    @property
    def blocked(self) -> str:
        """Why a finding decides nothing whatever its error is, or ""."""
        estimates = (one.finding.estimate for one in self.judgements)
        return next((one.blocked for one in estimates if one and one.blocked), "")

    @property
    def against(self) -> Sequence[Judgement]:
        """The findings that contradict it."""
        return [one for one in self.judgements if NO in (one.sign, one.size)]

    def column(self, name: str) -> str:
        """Sign or size of all findings: no if one is, yes if all are, as far as they say it."""
        words = {getattr(one, name) for one in self.judgements} - {NONE}
        return NO if NO in words else YES if words == {YES} else UNKNOWN if words else NONE

    @property
    def drift(self) -> str:
        """Of those that contradict the claim, or of all."""
        drifts = {one.drift for one in self.against or self.judgements}
        return NONE if not drifts else drifts.pop() if len(drifts) == 1 else min(drifts, key=ORDER)

    @property
    def known_drift(self) -> str:
        """The same for readers: empty where it is not known."""
        return "" if self.drift in (UNKNOWN, NONE) else self.drift

    @property
    def word(self) -> str:
        """The verdict, a key of WORDS."""
        if not self.judgements:
            return "not tested"
        if all((one.sign if one.size == NONE else one.size) == YES for one in self.judgements):
            return "reproduced in sign" if self.entry.get("beside") else "reproduced"
        if self.against and all(one.drift == TOWARD and one.arrived for one in self.against):
            return "approaching"
        if all(YES in (one.sign, one.size) for one in self.judgements):
            return "reproduced in sign"
        if not self.against:
            return "undecided"
        return "not reproduced, cause known" if self.cause else "not reproduced"

    @property
    def number(self) -> str:
        """The number farthest from what is claimed, with its name, and what is claimed."""
        if not self.judgements:
            return ""
        worst = max(self.against or self.judgements, key=lambda one: one.off)
        finding, names = worst.finding, [one.finding.name for one in self.judgements]
        label = _label(finding.name, names)
        if names.count(finding.name) > 1:  # several presets stand
            label += f" ({worst.preset.strip('_') or 'laptop'})"
        text = finding.measured if finding.estimate is None else finding.estimate.rounded()
        return f"{label} {text}, claimed {self.entry.get('published', finding.published)}"

    @property
    def effect(self) -> str:
        """The effect and its date, and whether it is younger than what it judges."""
        if not (self.judgements and "effect" in self.entry):
            return ""
        late = ", after the data" * self.after_the_data
        return f"effect {self.entry['effect']} ({str(self.entry['since'])[:10]}{late})"

    @property
    def after_the_data(self) -> bool:
        """Whether the effect is younger than the earliest table its findings are of, or one has no
        date."""
        paths = [
            path
            for one in self.judgements
            for path in catalogue.saying(self.entry["figure"] + one.preset, one.finding.name)
        ]
        dates = [tables.origin(path).get("date") or "" for path in paths]
        return str(self.entry["since"]) > min(dates, default="")


def _label(name: str, names: Sequence[str]) -> str:
    """What tells a finding's name from the others: the parts between those that all begin and end
    with; the whole of a name that stands alone, but for its unit."""
    split = [re.split("(?<=[,:]) ", one) for one in dict.fromkeys(names)]
    words = re.split("(?<=[,:]) ", name)
    if len(split) > 1:
        rest = [words, *split]
        while all(rest) and len({one[0] for one in rest}) == 1:
            rest = [one[1:] for one in rest]
        while all(rest) and len({one[-1] for one in rest}) == 1:
            rest = [one[:-1] for one in rest]
        words = rest[0] or words
    return re.sub(r" \((?:nats|points|%)\)$", "", " ".join(words)).strip(",:")


def claimed(published: str) -> tuple[str, float, float]:
    """(kind, low, high) of what a finding is compared with: a number, a range, a side of zero."""
    numbers = [float(Fraction(one)) for one in re.findall(NUMBER, published)]
    if re.match("no gain|equal|same|similar|about 0|about the same", published):
        return "number", 0.0, 0.0
    if re.match("below 0|loses|lowest", published):
        return "side", -math.inf, 0.0
    if re.match(rf"{NUMBER} to", published):
        return "range", numbers[0], numbers[1]
    if re.match("[<>]", published):
        ends = (-math.inf, numbers[0]) if published[0] == "<" else (numbers[0], math.inf)
        return "range", *ends
    if re.match(NUMBER, published):
        return "number", numbers[0], numbers[0]
    return "not below" if published.startswith("not below") else "side", 0.0, math.inf


def judgement(finding: Finding, published: str, effect: str | float, count: int = 1) -> Judgement:
    """What one of `count` findings says of a claim; without a number only its own verdict."""
    estimate = finding.estimate
    if estimate is None:
        sign = {"agrees": YES, "disagrees": NO}.get(kind(finding.verdict), UNKNOWN)
        return Judgement(finding, sign=sign)
    what, low, high = claimed(published)
    room = float(str(effect).rstrip("%")) * (abs(low) / 100 if str(effect).endswith("%") else 1)
    value, error = estimate.value, max(estimate.error, 1e-12)
    near, reach, far = (estimate.reach_of(number) * error for number in (0.5, 1, count))
    known = math.isfinite(value + far) and not estimate.undecided
    off = max(low - value, value - high, 0.0)  # outside of what is claimed
    within, outside = known and off + near < room, known and off - far > room
    drift, arrived = _drift(estimate, low, high, room)
    size, sign = YES if within else NO if outside else UNKNOWN, NONE
    if what == "number" and low and known:
        side = value * math.copysign(1, low)
        sign = YES if side > reach else NO if side < -far else UNKNOWN
    elif what in ("side", "not below"):
        inside = abs(value) if off == 0 else -off
        may = what == "not below" and within
        sign = YES if known and (inside > reach or may) else NO if outside else UNKNOWN
        size = NONE if what == "not below" else YES if known and inside - near > room else UNKNOWN
        off = -inside  # the nearest to zero is the weakest
    return Judgement(finding, off, sign, size, drift, arrived)


def _drift(estimate: Estimate, low: float, high: float, room: float) -> tuple[str, bool]:
    """Whether the last three sizes move toward the claim, and the last is shown to be near it."""
    known = {n: one for n, one in estimate.by_size.items() if math.isfinite(one.value)}
    last = sorted(known)[-3:]
    away = {n: max(low - known[n].value, known[n].value - high) for n in last}
    change = slope({n: replace(known[n], value=away[n]) for n in last})
    if change.blocked or not math.isfinite(change.error):
        return UNKNOWN, False
    sure, end = abs(change.value) > 2 * change.error, known[last[-1]]
    arrived = max(away[last[-1]], 0) + end.reach_of(0.5) * end.error < room
    return (TOWARD if change.value < 0 else AWAY) if sure else STILL, arrived


def matching(figure: str, pattern: str, only: str | None = None) -> list[tuple[str, Finding]]:
    """(preset, finding) of a figure's shipped tables, or of those of one preset, whose names match.
    Of one name a later preset stands for the earlier ones, unless it rests on fewer seeds or sizes,
    and then beside them, but for `closer`, which has fewer on purpose; of a pattern with a group
    the largest measured."""
    named: dict[str, list[tuple[str, Finding]]] = {}
    every = ("", tables.DESKTOP, tables.CLOSER, tables.WIDE)
    for preset in every if only is None else (f"_{only}",):
        for line in catalogue.of_shipped(figure + preset):
            if isinstance(line, Finding):
                before = named.get(line.name, [])
                left = [one for one in before if weaker(line, one[1])]
                fewer = bool(left) and preset == tables.CLOSER
                named[line.name] = before if fewer else [*left, (preset, line)]
    matches = [(match, of) for name, of in named.items() if (match := re.match(pattern, name))]
    if matches and matches[0][0].groups():
        known = [m for m in matches if any(_measured(one) for _, one in m[1])]
        return max(known or matches, key=lambda one: float(one[0][1]))[1]
    return [one for _, of in matches for one in of]


def _measured(finding: Finding) -> bool:
    return finding.estimate is not None and not math.isnan(finding.estimate.value)


def weaker(later: Finding, earlier: Finding) -> bool:
    """Whether a finding rests on fewer seeds or sizes than an earlier one, or is not measured."""
    if not _measured(earlier):
        return False
    if not _measured(later):
        return True
    return any(a < b for a, b in zip(later.estimate.basis, earlier.estimate.basis, strict=True))


def judge(paper: str, entry: Mapping[str, Any]) -> Claim:
    """A claim with what its findings say, and what a run without its cause says."""

    def judgements(of: Mapping[str, Any]) -> list[Judgement]:
        lines = matching(of["figure"], of["findings"], of.get("preset"))
        effect = entry.get("effect", 0)
        words = [str(of.get("published", line.published)) for _, line in lines]
        return [
            replace(judgement(line, published, effect, len(lines)), preset=preset)
            for (preset, line), published in zip(lines, words, strict=True)
        ]

    claim = Claim(paper, entry, () if "untested" in entry else judgements(entry))
    if "cause" in entry and claim.word == "not reproduced":
        without = Claim(paper, entry, judgements(entry["cause"]))
        if without.judgements and all(YES in (o.sign, o.size) for o in without.judgements):
            number = without.number.partition(", claimed")[0]
            return replace(claim, cause=f"cause: {entry['cause']['words']}; without it {number}")
    return claim


@functools.cache
def claims() -> Sequence[Claim]:
    """All claims of the file, judged by the shipped tables."""
    entries = yaml.load(CLAIMS.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return [judge(paper, entry) for paper, listed in entries.items() for entry in listed]


def tally(some: Iterable[Claim]) -> str:
    """How many claims there are, by word."""
    count = Counter(claim.word for claim in some)
    words = ", ".join(f"{count[word]} {word}" for word in WORDS if count[word])
    return f"{count.total()} claims, {words}"


def page() -> str:
    """The page, as Markdown."""
    lines = [FIRST_LINE, "\n# Claims of the papers, as far as they can be judged here\n"]
    lines += [f"The four papers: {tally(one for one in claims() if one.paper in PAPERS)}.\n"]
    lines += [f"Ours, at the end: {tally(one for one in claims() if one.paper not in PAPERS)}.\n"]
    lines += [f"- *{word}*: {meaning}" for word, meaning in WORDS.items()]
    lines += ["\n" + (__doc__ or "").split("\n\n")[2].strip()]
    head = ("claim", "where", "word", "number", "sign", "size", "drift", "what differs here")
    for paper in dict.fromkeys(claim.paper for claim in claims()):
        lines += [f"\n## {paper}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for of, claim in ((claim.entry, claim) for claim in claims() if claim.paper == paper):
            notes = (of.get("untested"), of.get("beside"), claim.blocked, claim.cause)
            ready = of.get("prepared", "")
            differs = (*notes, of.get("differs"), ready and f"prepared: {ready}")
            number = "; ".join(filter(None, (claim.number, claim.effect)))
            cells = (of["claim"], of["where"], claim.word, number)
            three = (claim.column("sign"), claim.column("size"), claim.known_drift)
            lines.append(f"| {' | '.join((*cells, *three, '; '.join(filter(None, differs))))} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Writes the page; there are no options."""
    look = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    argparse.ArgumentParser(prog="python -m plots claims", **look).parse_args(argv)
    write_text(PAGE, page())
    print(PAGE)
