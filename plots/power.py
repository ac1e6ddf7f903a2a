"""Which claims of the papers are decided here, and what it would take to decide the others.

    python -m plots.power            writes plots/power.md from power.yaml and the shipped tables

A claim is judged by its findings, those of tables of preset desktop in place of laptop ones. It
disagrees if more of them do, at 95 % each, than chance has in 5 % of such claims, or if one does at
95 % for all of them together (Bonferroni); findings count as independent, though those of a figure
share seeds and data, and settings that train alike (Adafactor's standard and NTK) are nearly one.
It agrees if all do, and is undecided otherwise. That no difference is seen counts as agreement
only if one of the size `effect` would have been seen: errors must be at most effect / 2.8, which
finds it with 80 % power at 95 % confidence, and smaller where they rest on few seeds (Student's
quantiles). Lines through widths keep the 2.8: their errors are at least what those of the optima
imply. Of three seeds or more the losses of a best rate are of seeds that did not choose it: fresh
ones, or each at the rate that the others choose. Their errors are those of the rates as chosen:
other choices may move a difference of a few hundredths further. Errors are taken to fall as the
root of the number of runs. Costs are the planner's.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from scipy.special import stdtrit

from plots import catalogue, tables
from plots.findings import Finding, Printed, kind
from plots.rates import seed_noise, seeded_points
from plots.tables import CURVE, DATA, LOSS, PARAMETERIZATION, ROOT, shipped

CLAIMS, PAGE = ROOT / "plots" / "power.yaml", ROOT / "plots" / "power.md"
POWER = 2.8  # standard errors: 1.96 for 95 % confidence and 0.84 for 80 % power
DESKTOP = 3.0  # core-hours of a sweep file: 1.5 hours of two cores
REACH = 48.0  # core-hours: a day of two cores; beyond, a claim is out of reach here
AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "undecided"
OUT, UNTESTED = "out of reach", "not tested"
NUMBER = r"[+-]?\d+(?:\.\d+)?"
BY_SIZE = re.compile(rf"\d+: ({NUMBER})(?:±({NUMBER}))?")


@dataclass(frozen=True)
class Judged:
    """One finding: its verdict, its number with the standard error (NaN: unknown) and how many
    independent values that rests on (None: not said, as where noise is pooled)."""

    word: str
    value: float
    error: float
    n: int | None
    alone: bool = False
    """A disagreement that holds for all the claim's findings together."""
    off: float = math.nan
    """How far the number lies from what is claimed."""
    widths: int | None = None
    """Through how many widths an exponent's line goes."""
    published: str = ""
    """What it is compared with."""

    @property
    def distance(self) -> float:
        """How far the number lies from what is claimed, in standard errors where there are any."""
        return self.off / self.error if self.error > 0 else self.off


@dataclass(frozen=True)
class Claim:
    """A claim with the verdict on each of its findings."""

    said: dict[str, Any]
    found: list[Judged]
    desktop: bool = False
    """Whether findings come from tables of this preset."""

    @property
    def word(self) -> str:
        """The verdict on the claim, without regard to cost."""
        if "out" in self.said or "untested" in self.said:
            return OUT if "out" in self.said else UNTESTED
        against = [one for one in self.found if one.word == DISAGREES]
        total, least = len(self.found), len(against)
        chance = sum(
            math.comb(total, k) * 0.05**k * 0.95 ** (total - k) for k in range(least, total + 1)
        )
        if any(one.alone for one in against) or chance < 0.05:
            return DISAGREES
        agrees = all(one.word == AGREES for one in self.found) and "open" not in self.said
        return AGREES if agrees else UNDECIDED

    @property
    def decisive(self) -> Judged | None:
        """The finding that decides: of those that disagree the one farthest off; where all agree
        the weakest, farthest from a number or, with a sign, nearest to zero."""
        known = [one for one in self.found if math.isfinite(one.distance)]
        against = [one for one in known if one.word == DISAGREES]
        if self.said.get("judge") == "near":
            return max(against or known, key=lambda one: one.off, default=None)
        if against or any(re.match(NUMBER, one.published) for one in known):
            return max(against or known, key=lambda one: one.distance)
        return min(known, key=lambda one: one.distance, default=None)

    @property
    def needed(self) -> float:
        """The standard error that finds the effect."""
        return float(self.said.get("effect", math.nan)) / POWER

    @property
    def worst(self) -> Judged | None:
        """The undecided finding with the largest error."""
        open_ones = [one for one in self.found if one.word != AGREES and not one.alone]
        return max(
            open_ones, key=lambda one: one.error if one.error > 0 else math.inf, default=None
        )

    @property
    def more_widths(self) -> bool:
        """Whether no seed decides it, but a wider model: an exponent's error is small enough and
        has a single degree of freedom."""
        worst = self.worst
        return bool(worst and worst.widths == 3 and worst.error <= 2 * self.needed)

    @property
    def times(self) -> float:
        """How many times the runs there are decide what is undecided."""
        worst = self.worst
        if worst is None:
            return math.nan
        if not worst.error > 0:
            return 3.0 / (worst.n or 1)  # no spread is known: three seeds give one
        if worst.n is None or worst.n < 2:
            return max(1.0, (worst.error / self.needed) ** 2)
        spread, n = worst.error * math.sqrt(worst.n), max(worst.n, 3)
        while n < 10_000 and _visible(n) * spread > POWER * self.needed * math.sqrt(n):
            n += 1
        return n / worst.n


def claims(path: Path = CLAIMS) -> dict[str, list[Claim]]:
    """Paper -> its claims, judged by the shipped tables."""
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        paper: [Claim(one, list(_judge(one)), _of_desktop(one)) for one in ones]
        for paper, ones in said.items()
    }


@functools.cache
def of_shipped(figure: str) -> Sequence[Printed]:
    """What a figure says of its shipped tables."""
    module, paths = catalogue.load(figure), catalogue.shipped(figure)
    return module.findings(module.read(paths)) if paths else []


def printed(figure: str) -> Sequence[Printed]:
    """What a figure says of the shipped tables; of two findings of one name, that of the tables of
    preset desktop, and last those that only they have, such as of greater depths."""
    laptop, desktop = of_shipped(figure), of_shipped(f"{figure}{tables.DESKTOP}")
    better = {line.name: line for line in desktop if isinstance(line, Finding)}
    both = [better.pop(line.name, line) if isinstance(line, Finding) else line for line in laptop]
    return [*both, *better.values()]


def _of_desktop(said: dict[str, Any]) -> bool:
    """Whether tables of preset desktop have a finding of the claim."""
    lines = of_shipped(f"{said['figure']}{tables.DESKTOP}") if "findings" in said else ()
    return any(
        isinstance(line, Finding) and re.match(said["findings"], line.name) for line in lines
    )


def _judge(said: dict[str, Any]) -> Iterator[Judged]:
    if "met" in said:
        table = pd.read_csv(shipped(said["met"]))
        rows = table[table["table"] == said["rows"]] if "rows" in said else table
        for met in rows["met"].dropna():
            yield Judged(AGREES if met else DISAGREES, math.nan, math.nan, None, alone=not met)
    if "findings" not in said:
        return
    lines = [
        line
        for line in printed(said["figure"])
        if isinstance(line, Finding) and re.match(said["findings"], line.name)
    ]
    if not lines:
        raise ValueError(f"{said['claim']}: {said['figure']} has no finding {said['findings']!r}")
    for line in lines:
        yield judged(line, said, len(lines))


def _spreads(rows: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(curve, parameterisation) -> standard deviation of one run's loss over seeds, where known."""
    keys = [CURVE, PARAMETERIZATION]
    found = {
        names: seed_noise(seeded_points(own))[0] for names, own in rows.groupby(keys, sort=False)
    }
    return {names: noise for names, noise in found.items() if noise > 0}


def judged(line: Finding, said: dict[str, Any], count: int) -> Judged:
    """The verdict on one of `count` findings of a claim."""
    (value, error), freedom = measured(line.measured), None
    if line.estimate is not None:
        value, error, freedom = line.estimate.value, line.estimate.error, line.estimate.freedom
    seeds = re.search(r"\(n = (\d+)\)|\((\d+) seeds?\)", line.measured)
    n = int(seeds[1] or seeds[2]) if seeds else None
    rule = said.get("judge", "verdict")
    widths = re.search(r"\(n = (\d+) widths", line.measured)  # a line through them has two less
    through = int(widths[1]) if widths else None
    rests = freedom + 1 if freedom else through - 1 if through else n
    reach, far = (_quantile(rests, tail) for tail in (0.05, 0.05 / count))
    # The nearest bound of a range, and zero where a sign is claimed.
    bounds = re.findall(rf"{NUMBER}(?:/\d+)?", str(said.get("published", line.published)))
    if rule in ("below", "above"):
        bounds = []
    off = min((abs(value - float(Fraction(bound))) for bound in bounds), default=abs(value))
    word, known = UNDECIDED, error > 0
    if rule == "near":
        sizes = [abs(float(one) - float(bounds[0])) for one, _ in BY_SIZE.findall(line.measured)]
        word = AGREES if max(sizes, default=off) <= said["effect"] else DISAGREES
    elif rule in ("below", "above"):
        if abs(value) > reach * error:
            word = AGREES if (value < 0) == (rule == "below") else DISAGREES
    elif "published" in said:
        word = AGREES if off <= reach * error else DISAGREES
    elif "in sign" in line.verdict or "error unknown" in line.verdict:
        pass
    elif kind(line.verdict) in ("disagrees", "off"):
        word = UNDECIDED if known and off <= reach * error else DISAGREES
    elif kind(line.verdict) == "agrees":
        word = AGREES
    if rule == "equal" and word == AGREES and not error <= said["effect"] / _visible(n):
        word = UNDECIDED  # nor would a difference have been seen
    if rule == "verdict" and n == 1:
        word = UNDECIDED
    alone = word == DISAGREES and known and off > far * error
    beside = str(said.get("published", line.published))
    return Judged(word, value, error, n, alone, off, through, beside)


def _quantile(n: float | None, tail: float) -> float:
    """Standard errors to either side that leave `tail` out."""
    return float(stdtrit(max(n - 1, 1) if n else math.inf, 1 - tail / 2))


def _visible(n: int | None) -> float:
    """Standard errors that a difference has which n values find with 80 % power at 95 %."""
    return _quantile(n, 0.05) + _quantile(n, 0.4) if n else POWER


def measured(text: str) -> tuple[float, float]:
    """(number, standard error) of a finding; of numbers by size, the last minus the first."""
    if BY_SIZE.match(text):
        (first, *_, last) = BY_SIZE.findall(text)
        errors = (float(error or math.nan) for _, error in (first, last))
        return float(last[0]) - float(first[0]), math.hypot(*errors)
    if pair := re.search(rf"({NUMBER}) ± ({NUMBER}|\?)", text):
        return float(pair[1]), math.nan if pair[2] == "?" else float(pair[2])
    alone = re.match(NUMBER, text)
    return float(alone[0]) if alone else math.nan, math.nan


@functools.cache
def planned(sweep: str, preset: str | None) -> dict[str, float]:
    """The planner's runs, core-hours and H100-hours of a sweep before it asks for more; of a file
    without this preset {}."""
    file = f"{sweep.replace('/', '/sweeps/')}.yaml"
    text = (ROOT / file).read_text(encoding="utf-8")
    if preset and not re.search(f"^  {preset}:", text, re.MULTILINE):
        return {}
    command = [sys.executable, "-m", "sweeps", "cost", file, "--json"]
    command += ["--preset", preset] if preset else []
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (plan,) = json.loads(found.stdout)["files"]
    all_runs = [size["all"] for size in plan["sizes"]]
    return {
        "may_add": plan["may_add"]["runs"],
        "runs": sum(size["runs"] for size in all_runs),
        "core": sum(size["cpu_seconds"] for size in all_runs) / 3600,
        "H100": sum(size["gpu_hours"]["H100"] for size in all_runs),
    }


def cost(sweep: str, desktop: bool = False) -> float:
    """Core-hours of the runs of a sweep's preset laptop, or desktop, those that the sweep asked for
    as it went included."""
    made: Counter[str] = Counter()
    for path in DATA.glob("*/*.json"):
        one = json.loads(path.read_text(encoding="utf-8"))
        if "sweep" in one:
            made[one["sweep"]] = max(made[one["sweep"]], one["runs"])
    preset = "desktop" if desktop else "laptop"
    plan = planned(sweep, preset)
    name = f"{sweep}_{preset}"
    if not plan:
        name, plan = sweep, planned(sweep, None)
    return plan["core"] * max(1.0, made[name] / plan["runs"])


def verdict(claim: Claim) -> tuple[str, float]:
    """(verdict, core-hours that decide it): out of reach where they are more than a day's."""
    if claim.word != UNDECIDED:
        return claim.word, math.nan
    sweeps = claim.said.get("sweeps", ())
    hours = claim.times * sum(cost(sweep, claim.desktop) for sweep in sweeps)
    return (OUT if hours > REACH else UNDECIDED), hours


def spreads() -> Iterator[str]:
    """How much seeds differ by curve, as rows of the page."""
    for path in sorted(DATA.glob("everett/figure_*.csv")):
        rows = pd.read_csv(path)
        if LOSS in rows:
            noise = _spreads(rows)
            for curve in dict.fromkeys(curve for curve, _ in noise):
                own = [value for (name, _), value in noise.items() if name == curve]
                most = f" to {max(own):.3f}" if len(own) > 1 else ""
                yield f"| `{path.stem}` | {curve} | {min(own):.3f}{most} |"


def page() -> str:
    """The page, as Markdown."""
    papers = claims()
    verdicts = {id(one): verdict(one) for ones in papers.values() for one in ones}
    count = Counter(word for word, _ in verdicts.values())
    total = sum(count.values())
    derived, ours = (
        sum(f"({words})" in one.said["claim"] for ones in papers.values() for one in ones)
        for words in ("derived", "our test")
    )
    text = [
        HEAD.format(
            total=total,
            derived=derived,
            ours=ours,
            **{
                word.replace(" ", "_"): count[word]
                for word in (AGREES, DISAGREES, UNDECIDED, OUT, UNTESTED)
            },
        )
    ]
    for paper, ones in papers.items():
        text.append(f"\n## {paper}\n\n{COLUMNS}")
        text += [_row(one, *verdicts[id(one)]) for one in ones]
    text += [ORDER, *_order(papers, verdicts)]
    made = [
        (path, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(DATA.glob("*/*.json"))
    ]
    text.append(SHIPPED)
    for path, one in made:
        if where := one.get("environment"):
            only = ", ".join(one.get("only", ()))
            text.append(
                f"| `{path.parent.name}/{path.stem}` | {one.get('runs', '')} | {only} | "
                f"{where.get('commit', '')[:10]} | {where.get('device', '')} |"
            )
    text += [SPREAD, *spreads()]
    return "\n".join(text) + "\n"


def _row(claim: Claim, word: str, hours: float) -> str:
    count = Counter(one.word for one in claim.found)
    split = " / ".join(str(count[word]) for word in (AGREES, UNDECIDED, DISAGREES))
    worst, decisive, now, runs = claim.worst, claim.decisive, "", ""
    against = max((one.off for one in claim.found if one.word == DISAGREES), default=math.nan)
    if word == UNTESTED or "out" in claim.said:
        now, split = claim.said.get("out") or claim.said["untested"], ""
        plans = [planned(sweep, None) for sweep in claim.said.get("sweeps", ())]
        if plans:
            least = "at least " * any(plan["may_add"] for plan in plans)
            runs = (
                f"{least}{sum(plan['H100'] for plan in plans):,.0f} H100-hours, all of the "
                "figure at the paper's size"
            )
    elif word not in (AGREES, DISAGREES) and "open" in claim.said:
        now = claim.said["open"]
    elif word in (AGREES, DISAGREES) and decisive is not None:
        error = f" ± {decisive.error:.2g}" if decisive.error > 0 else ""
        seeds = f" (n = {decisive.n})" if decisive.n else ""
        beside = f"; claimed: {decisive.published}" if decisive.published else ""
        now = f"{decisive.value:+.3g}{error}{seeds}{beside}"
        if word == DISAGREES and against < claim.said.get("effect", 0):
            now += (
                f"; differs by at most {against:.2g}, less than the effect of "
                f"{claim.said['effect']}"
            )
    elif worst is not None and word != DISAGREES:
        error = f"{worst.error:.3f}" if worst.error > 0 else "unknown"
        now = f"error {error} → {claim.needed:.3f}"
        seeds = f" (n = {math.ceil(claim.times * worst.n)})" if worst.n else ""
        runs = f"x {claim.times:.1f}{seeds}" + f", {hours:.1f} core-hours" * (hours > 0)
        if claim.more_widths:
            runs = "more widths"
        elif claim.times <= 1 and worst.error <= claim.needed:
            runs = f"enough runs: errors would show {claim.said['effect']}"
    return f"| {claim.said['claim']} | {claim.said['where']} | {word} | {split} | {now} | {runs} |"


def _order(papers: dict[str, list[Claim]], verdicts: dict[int, tuple[str, float]]) -> list[str]:
    """Sweeps by the claims that they decide in an hour: each is run for its dearest claim that a
    preset's hours allow."""
    found: dict[tuple[str, ...], list[float]] = {}
    for claim in (one for ones in papers.values() for one in ones):
        word, hours = verdicts[id(claim)]
        sweeps = tuple(claim.said.get("sweeps", ()))
        decidable = claim.times > 1 and not claim.more_widths
        if word == UNDECIDED and decidable and 0 < hours <= DESKTOP * len(sweeps):
            found.setdefault(sweeps, []).append(hours)
    ranked = sorted(found.items(), key=lambda item: max(item[1]) / len(item[1]))
    return [
        f"| {', '.join(f'`{sweep}`' for sweep in sweeps)} | {len(hours)} | {max(hours):.1f} | "
        f"{len(hours) / max(max(hours), 0.01):.1f} | {', '.join(map(_desktop, sweeps))} |"
        for sweeps, hours in ranked
    ]


def _desktop(sweep: str) -> str:
    plan = planned(sweep, "desktop")
    return f"{plan['runs']} runs, {plan['core']:.1f}" if plan else "none"


HEAD = f"""# What is decided here, and what it would take

Written by `python -m plots.power` from `power.yaml` and the shipped tables; not edited by hand.

Of {{total}} claims of the four papers that a figure here bears on,
**{{agrees}} agree, {{disagrees}} disagree, {{undecided}} are undecided, {{out_of_reach}} out of
reach and {{not_tested}} not tested** at this scale: small models, short runs, embedded data. A
disagreement says that a claim does not hold *here*. {{derived}} of them do not stand in a paper but
follow from its theory (derived), {{ours}} put a test of ours to a paper's words (our test).

{(__doc__ or "").split(chr(10) * 2)[2]}
*Findings* counts those that agree / are undecided / disagree. *Measured* is, of what is decided,
the finding that decides it: of several that disagree the one farthest off, of several that agree
the weakest; of what is undecided the largest standard error, and what it must become. *To decide*
multiplies the runs of the preset `laptop`, or of `desktop` where findings come from its table (n:
independent seeds), with the planner's hours of one core; above {REACH:.0f} a claim is out of reach.
*Enough runs*: an effect of that size would have been seen; what there is is smaller, or is seen in
a part of the findings. *More widths*: an exponent's error is small enough, but from so few widths
that it is hardly known."""
COLUMNS = """| claim | where | verdict | findings | measured | to decide |
|---|---|---|---|---|---|"""
ORDER = f"""
## What pays most

Undecided claims that at most {DESKTOP:.0f} core-hours per sweep file decide, by claims per hour.
The last column has the runs and core-hours of the file's preset `desktop` before it extends itself:
`python -m sweeps run FILE --preset desktop`, which Ctrl-C stops and the same command continues,
then `python -m plots ship .../results.csv PAPER/NAME_desktop`.

| sweeps | claims | core-hours | claims per hour | preset desktop |
|---|---|---|---|---|"""
SHIPPED = """
## The shipped tables

Where *only* says something, the preset has not been run to its end: these are the runs there are.

| table | runs | only | commit | machine |
|---|---|---|---|---|"""
SPREAD = """
## How much seeds differ

Everett et al.: standard deviation over seeds of one run's final loss near the optimum, from the
least to the most of the parameterisations. Figures pool it over the curves of a parameterisation,
and so overstate the errors of curves with tuned constants.

| table | curve | nats |
|---|---|---|"""


def main() -> None:
    """Writes the page; there are no options."""
    parser = argparse.ArgumentParser(prog="python -m plots.power", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
