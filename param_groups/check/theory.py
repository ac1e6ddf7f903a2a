"""What a check expects of a plan's numbers, and of what it measures.

Expectations come from papers or from the demand for stability, never from the plan under check. A
plan says which rule it follows; the exponents of that rule stand in `papers`. For every other
rule, and for one global rate, stability sets the standard (`_demand`): what a step changes neither
grows nor vanishes with the size.

Two exponents are expected of a measured change. The *aim* is what the rule promises under its own
assumptions. The *prediction* is what theory says of the first steps. Where they differ the paper
assumes less alignment than there is at first (`exception`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from param_groups.check.measuring import pooled, scanned
from param_groups.check.papers import ONE, PAPERS, SHIFT, Promise, over_depth
from param_groups.contract import OPTIMIZER_FAMILY
from param_groups.exponents import HALF, LAYERS, ZERO, Alignment
from param_groups.plan import Plan
from param_groups.roles import BIASES, BLOCK, FUSED_PARTS, SCALES, TRUNK, Role
from param_groups.rows import Row

MATRICES = {*BLOCK, *FUSED_PARTS}  # which residual branches hold, whatever their names
# The first steps: updates align with activations (alpha = 1), hidden weights do not align with
# the change of their input (omega = 1/2), the readout does (omega = 0.96 to 1.00 at the first step,
# see effective_theory). u = 0 leaves out the product of two changes, which is of second order.
FIRST_STEPS = Alignment(alpha=1, omega=HALF, u=0, omega_readout=1)
OK, EXCEPTION, GROWS, VANISHES = "ok", "expected exception", "grows", "vanishes"
DIFFERS = "differs"  # numbers of several sizes that are not one power of the size

# A paper's rates are exact powers; initial values follow fans, which a model may round. A rule of
# no paper may have 1/(n + 1), and exponents of the theory differ by halves.
_EXACT = {"rate": 0.01, "start": 0.1, "factor": 0.01}
_NEAR, _STRAIGHT = 0.25, 0.1


def _rule(plan: Plan) -> dict[str, Any]:
    """The fields of a plan's rule; a recipe's has the powers of the rule inside."""
    inside: Any = plan.prescription.get("rule", {})
    return {"name": None, **plan.prescription, **inside, "rule": None}


def family_of(plan: Plan) -> str | None:
    """The optimiser's family; Adam's where a prescription names none, and beside Muon."""
    family = OPTIMIZER_FAMILY.get(str(plan.prescription.get("optimizer", "adam")))
    return "adam" if family == "spectral" else family


def expected_of(plans: Mapping[int, Plan]) -> Promise | None:
    """What a check of these plans expects: the exponents of the rule's paper, or else stability's;
    None for an optimiser of no known family."""
    plan, size = plans[min(plans)], scanned(plans)
    rule = _rule(plan)
    paper, family = PAPERS.get(str(rule["name"])), family_of(plan)
    if family is None:
        return None
    return (paper and paper(rule, size, family)) or _demand(plans, size, family)


def _demand(plans: Mapping[int, Plan], size: str, family: str) -> Promise | None:
    """The exponents with which no change grows or vanishes in the first steps, for any rule.

    d of Everett et al., B.9 (multiplier times update goes as size^(-d)) is 0 for embeddings and 1
    for what sums over the width; in a branch of a model of many blocks it is 1 - residual. SGD and
    parameter scaling turn d into a rate by the gradient's or the tensor's initial size, which are
    the readout's, the residual multiplier's and the attention scale's: these are the plan's, where
    they are stable. None for depths between which the residual multiplier follows no power.
    """
    numbers = PlanExponents(plans)
    if size == "depth":
        residual = numbers.factor("residual_multiplier")
        if residual is None:
            return None
        stable = over_depth(max(HALF, -residual), family)
        return replace(stable, source="stability", alignment=None, published=False)
    starts = [p.start for n in numbers.names if (p := numbers.powers(n)).kind == "readout"]
    readout = max([HALF, *(start for start in starts if start is not None)]) if starts else ONE
    if None in starts:  # what starts at zero has the size of its first update
        readout = ONE
    start = {"embedding": ZERO, "hidden": HALF, "readout": readout}
    d = {"embedding": ZERO, "hidden": ONE, "readout": ONE}
    below = {"embedding": readout, "hidden": readout, "readout": ZERO}
    given = {"adam": dict.fromkeys(LAYERS, ZERO), "adafactor": start, "sgd": below}[family]
    step = {layer: d[layer] - given[layer] for layer in LAYERS}
    # Head dimension times attention scale multiplies what queries and keys do to the logits.
    attention = numbers.factor("attention_scale") or ZERO
    step["query"] = step["hidden"] + (2 if family == "sgd" else 1) * attention
    return Promise("stability", size, family, start, step, attention=attention, published=False)


def heads_note(plans: Mapping[int, Plan]) -> str:
    """A warning where muP has the library's attention while the head dimension grows; else ""."""
    rule = _rule(plans[min(plans)])
    heads = [max((f.head_dim or 0 for f in one.forward), default=0) for one in plans.values()]
    other = rule.get("parameterization", "mup") not in ("mup", "mean_field")
    if other or rule.get("qk_exponent") != -0.5 or all(size == heads[0] for size in heads):
        return ""
    return (
        f"warning: head dimensions {heads[0]} to {heads[-1]}: qk_exponent=-0.5 is muP's only where "
        "they are the same at all widths; add heads with the width, or multiply by 1/d"
    )


# A plan's numbers


@dataclass(frozen=True)
class Powers:
    """A tensor's kind and exponents between two sizes; None stands for a number that is zero."""

    kind: str
    start: Fraction | None
    step: Fraction | None
    multiplier: Fraction


def power(small: float, large: float, ratio: float) -> Fraction | None:
    """p in large / small = ratio^p, exact for any but odd fractions; None if a number is zero."""
    if not (small > 0 and large > 0):
        return None
    return Fraction(math.log(large / small) / math.log(ratio)).limit_denominator(10**6)


def kind_of(small: Row, large: Row, size: str) -> str:
    """The layer type of a tensor, from the axes that grow with the size and not from its role.

    In depth: whether a numbered block holds it. Roles decide where shapes cannot: biases and scales
    go with embeddings (Yang et al. 2022, Table 8), what is added to logits goes with nothing, and
    LoRA's A sums over the width.
    """
    role = Role(small.role)
    if role in (Role.READOUT_BIAS, Role.RELATIVE_POSITION):
        return "constant"
    if size == "depth":
        inside = role in MATRICES or (role not in TRUNK and pooled(small.name) != small.name)
        return "hidden" if inside else "readout" if role is Role.READOUT else "embedding"
    if role in SCALES | BIASES or role is Role.LORA_B:
        return "embedding"
    axes = sum(wide > narrow for narrow, wide in zip(small.shape, large.shape, strict=True))
    if axes > 1 or role is Role.LORA_A:
        return "hidden"
    if axes == 0:
        return "constant"
    return "readout" if large.fan_in > small.fan_in else "embedding"


class PlanExponents:
    """Every tensor's exponents between the sizes of a check's plans."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.plans, self.size, self.sizes = plans, scanned(plans), sorted(plans)
        self.family = family_of(plans[self.sizes[0]]) or "adam"
        common = set.intersection(*({row.name for row in plan.rows} for plan in plans.values()))
        self.names = [row.name for row in plans[self.sizes[0]].rows if row.name in common]
        self.pairs = [*itertools.pairwise(self.sizes)]

    def powers(self, name: str, sizes: tuple[int, int] | None = None) -> Powers:
        """A tensor's exponents between two sizes, by default the smallest and the largest."""
        low, high = sizes or (self.sizes[0], self.sizes[-1])
        small, large, ratio = self.plans[low][name], self.plans[high][name], high / low
        a = -(power(small.multiplier, large.multiplier, ratio) or ZERO)
        first, last = (math.hypot(row.init_std, row.init_mean) for row in (small, large))
        b, c = power(first, last, ratio), power(small.lr, large.lr, ratio)
        start = None if b is None else a - b
        step = None if c is None else SHIFT[self.family] * a - c
        if step is not None and self.by_muon(name) and self.size != "depth":
            step += 1  # entries of a matrix of one spectral norm, that all point one way
        return Powers(kind_of(small, large, self.size), start, step, -a)

    def by_muon(self, name: str) -> bool:
        """Whether a tensor's updates are orthogonalised."""
        return self.plans[self.sizes[0]][name].optimizer == "muon"

    def attends(self, name: str) -> bool:
        """Whether a tensor makes queries or keys."""
        return self.plans[self.sizes[0]][name].role in (Role.QUERY, Role.KEY)

    def factor(self, name: str, sizes: tuple[int, int] | None = None) -> Fraction | None:
        """The power of the size in a factor of the forward pass; of attention's, times head_dim."""
        low, high = sizes or (self.sizes[0], self.sizes[-1])
        values = []
        for plan in (self.plans[low], self.plans[high]):
            factors = (f.value * (f.head_dim or 1) for f in plan.forward if f.name == name)
            values.append(next(factors, 1.0))
        return power(values[0], values[1], high / low)


@dataclass(frozen=True)
class Judged:
    """A verdict from numbers alone, before any training."""

    name: str
    quantity: str  # start, rate, factor, constant or change
    power: float | None
    expected: float | None
    verdict: str
    source: str
    note: str = ""


def judge(plans: Mapping[int, Plan]) -> list[Judged]:
    """What the plans' numbers alone say, tensor by tensor, against `expected_of`.

    A rate that falls too slowly makes its tensor's changes grow, one that falls too fast makes them
    vanish, and numbers that are not one power of the size have other constants at other sizes. For
    a rule of no paper, theory also says what all tensors together do to the parts of the model.

    Args:
        plans: a plan per size, as `Measurement.plans` holds them.

    Returns:
        A verdict per number; empty where nothing is known to compare with.

    Source:
        The paper that the rule names; for any other rule stability (Everett et al., App. B).
    """
    expected, numbers = expected_of(plans), PlanExponents(plans)
    if expected is None:
        return []
    found: list[Judged] = []
    if expected.published:  # fields of the rule that differ between sizes and are no size
        rules = [_rule(plans[size]) for size in numbers.sizes]
        for key in rules[0].keys() - {"width", "heads", "head_dim", "depth", "hidden_layers"}:
            values = [rule.get(key) for rule in rules]
            if any(value != values[0] for value in values):
                note = f"{', '.join(map(str, values))} at {', '.join(map(str, numbers.sizes))}"
                found.append(Judged(key, "constant", None, None, DIFFERS, expected.source, note))
    for name in numbers.names:
        found += _of_tensor(name, numbers, expected)
    factors = {"residual_multiplier": -expected.residual}
    if expected.published:
        factors["logit_multiplier"] = -expected.logit
        if expected.size == "head_dim":
            factors["attention_scale"] = expected.attention
    for name, aim in factors.items():
        powers = [p for pair in numbers.pairs if (p := numbers.factor(name, pair)) is not None]
        if len(powers) == len(numbers.pairs):
            found.append(_word(name, "factor", powers, aim, expected))
    if not expected.published and all(one.verdict == OK for one in found):
        found += _of_parts(numbers, expected)
    return found


def _of_tensor(name: str, numbers: PlanExponents, expected: Promise) -> list[Judged]:
    whole = numbers.powers(name)
    rows = [numbers.plans[size][name] for size in numbers.sizes]
    if len({math.hypot(row.init_std, row.init_mean) > 0 for row in rows}) > 1:
        return [Judged(name, "start", None, None, DIFFERS, expected.source, "zero at some sizes")]
    start = expected.start.get(whole.kind, ZERO)
    kind = "query" if numbers.attends(name) and "query" in expected.step else whole.kind
    step = expected.step.get(kind, ZERO)
    if not expected.published and whole.kind == "readout" and whole.start is not None:
        start = max(start, whole.start)  # a readout may start smaller than needed
    between = [numbers.powers(name, pair) for pair in numbers.pairs]
    result = []
    if whole.start is not None and whole.kind != "constant":
        values = [-(p.start if p.start is not None else whole.start) for p in between]
        result.append(_word(name, "start", values, -start, expected))
    if whole.step is not None:
        values = [-(p.step if p.step is not None else whole.step) for p in between]
        result.append(_word(name, "rate", values, -step, expected))
    return result


def _word(
    name: str, quantity: str, values: Sequence[Fraction], aim: Fraction, expected: Promise
) -> Judged:
    """The verdict on the powers between neighbouring sizes, which all must be the expected one."""
    tolerance = _EXACT[quantity] if expected.published else _NEAR
    farthest = max(values, key=lambda value: abs(value - aim))
    word = OK
    if max(values) - min(values) > _STRAIGHT:
        word = DIFFERS
    elif abs(farthest - aim) > tolerance:
        word = GROWS if farthest > aim else VANISHES
    return Judged(name, quantity, float(farthest), float(aim), word, expected.source)


def _of_parts(numbers: PlanExponents, expected: Promise) -> list[Judged]:
    """What the tensors of each kind, with the largest update of each, do to the parts."""
    fastest: dict[str, Powers] = {}
    for name in numbers.names:
        powers = numbers.powers(name)
        known = fastest.get(powers.kind)
        if powers.step is not None and (known is None or powers.step < (known.step or ZERO)):
            fastest[powers.kind] = powers
    start, step = dict(expected.start), dict.fromkeys(LAYERS, Fraction(9))
    for kind in LAYERS:  # a missing kind keeps step 9: a negligible change
        if one := fastest.get(kind):
            start[kind] = start[kind] if one.start is None else one.start
            step[kind] = step[kind] if one.step is None else one.step
    actual = replace(expected, start=start, step=step, attention=ZERO)
    result = []
    for part in ("embedding", "hidden", "logits"):
        change = actual.change(part, FIRST_STEPS)
        if (part == "logits" or part in fastest) and abs(change) > _NEAR:
            word = GROWS if change > 0 else VANISHES
            result.append(Judged(part, "change", float(change), 0.0, word, expected.source))
    return result


# What is expected of a measured slope


def expectation(
    expected: Promise | None, quantity: str, part: str
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a module's slope; None where nothing is known.

    The theory of changes is about activations that start at constant scale. Where they do not,
    hidden activations and changes are expected to be constant.
    """
    steady = expected is not None and (
        expected.size == "depth"
        or (
            expected.start["embedding"] == 0
            and expected.start["hidden"] == HALF <= expected.start["readout"]
        )
    )
    if expected is None or not steady:
        return (None, None) if (quantity, part) == ("init", "logits") else (ZERO, ZERO)
    if quantity == "init":
        return expected.init(part) if part == "logits" else ZERO, expected.init(part)
    if expected.alignment is None:
        return ZERO, ZERO
    aim = min(expected.change(part, expected.alignment), ZERO)
    return aim, expected.change(part, FIRST_STEPS)


def expected_update(
    name: str, numbers: PlanExponents, expected: Promise | None
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a tensor's first update; `name` may stand for all blocks ("*")."""
    first = next(one for one in numbers.names if name in (one, pooled(one)))
    powers, attends = numbers.powers(first), numbers.attends(first)
    if expected is None or powers.step is None:
        return None, None
    if expected.family == "adafactor" and powers.start is None:
        aim = -expected.step.get(powers.kind, ZERO)  # scaled by the floor, not by itself
        return aim, aim
    # Of multiplier times update; a plan that has absorbed its multipliers updates by all of it.
    aim = expected.update(powers.kind, attends) - powers.multiplier
    if numbers.by_muon(first) and expected.size != "depth":
        return aim, aim + HALF
    slower = attends and (expected.family, expected.size) == ("sgd", "head_dim")
    return aim, aim - (HALF if slower and expected.published else ZERO)


def exception(expected: Promise | None, quantity: str, part: str) -> str:
    """Why a slope may differ from its aim towards the prediction; "" where it may not."""
    if expected is None or quantity == "init":
        return ""
    if quantity == "update":
        return _QUERIES if expected.family == "sgd" else _FULL_RANK
    if expected.alignment is None:
        return ""
    aim, predicted = expectation(expected, quantity, part)
    if aim == predicted:
        return ""
    return _NO_ALIGNMENT if expected.alignment.alpha < 1 else _OMEGA


# The exceptions, each with its source.
_QUERIES = (
    "in the first steps of SGD the values that attention mixes do not align with the gradient yet, "
    "so queries and keys move less by a factor N^(-1/2) (Bordelon et al., Figure 13)"
)
_FULL_RANK = (
    "Muon's update has all singular values alike: entries go as 1/n while a batch has fewer "
    "directions than the width, and as n^(-1/2) with more; the spectral norm is the same"
)
_NO_ALIGNMENT = (
    "the rates assume that updates and activations are unaligned (alpha 1/2, Everett et al., "
    "section 3.2, no alignment); in the first steps they are aligned (1), so changes grow"
)
_OMEGA = (
    "the rates assume that the readout's weights do not align with the change of their input "
    "(omega 1/2, Everett et al., section 3.2, full alignment); in the first steps they do (1, the "
    "infinite-width limit of B.16), so logits grow as width^(1/2)"
)
