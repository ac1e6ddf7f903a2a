"""Verdicts on numbers alone, before any training: a plan's, and those of an optimiser beside it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from param_groups.check import theory
from param_groups.check.papers import ONE, Promise
from param_groups.check.reading import Reading, not_read
from param_groups.check.theory import PlanExponents, Powers
from param_groups.families import OPTIMIZER_FAMILY, SHIFT
from param_groups.plan import Plan
from param_groups.roles import Role, Rule
from param_groups.rules.exponents import HALF, LAYERS, ZERO

# A paper's rates are exact powers; initial values follow fans, which a model may round. A rule of
# no paper may have 1/(n + 1), and exponents of the theory differ by halves.
_EXACT = {"rate": 0.01, "start": 0.1, "factor": 0.01, "epsilon": 0.01, "decay": 0.01}
_NEAR, _STRAIGHT = 0.25, 0.1


@dataclass(frozen=True)
class Judged:
    """A verdict from numbers alone, before any training."""

    name: str
    quantity: str  # start, rate, epsilon, decay, factor, constant, change, or optimiser's ...
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
    expected, numbers = theory.expected_of(plans), PlanExponents(plans)
    if expected is None:
        return []
    found: list[Judged] = []
    if expected.published:  # fields of the rule that differ between sizes and are no size
        rules = [plans[size].prescription for size in numbers.sizes]
        for key in rules[0].keys() - {"width", "heads", "head_dim", "depth", "hidden_layers"}:
            values = [rule.get(key) for rule in rules]
            if any(value != values[0] for value in values):
                note = f"{', '.join(map(str, values))} at {', '.join(map(str, numbers.sizes))}"
                found.append(
                    Judged(key, "constant", None, None, theory.DIFFERS, expected.source, note)
                )
    for name in numbers.names:
        found += _of_tensor(name, numbers, expected)
    if numbers.family == "sgd" or plans[min(plans)].prescription.get("eps_per_layer"):
        found += _shared_keys(numbers, expected)
    factors = {"residual_multiplier": -expected.residual}
    if expected.published:
        factors["logit_multiplier"] = -expected.logit
        if expected.size == "head_dim":
            factors["attention_scale"] = expected.attention
    for name, aim in factors.items():
        powers = [p for pair in numbers.pairs if (p := numbers.factor(name, pair)) is not None]
        if len(powers) == len(numbers.pairs):
            found.append(_word(name, "factor", powers, aim, expected))
    if not expected.published and all(one.verdict == theory.OK for one in found):
        found += _of_parts(numbers, expected)
    return found


def judge_optimizers(
    plans: Mapping[int, Plan],
    held: Mapping[int, Mapping[str, Reading]],
    factor: float | None = None,
) -> list[Judged]:
    """Where the optimisers that a check was given are not the plans'.

    One factor may lie between all rates and the plans', as a schedule's does; epsilons and decays
    are the plans'.

    Args:
        plans: a plan per size.
        held: what the optimiser of every size has, tensor by tensor, as `Measurement.held`.
        factor: that between all rates and the plans'; by default the one of most.

    Returns:
        A verdict per tensor and number that differs, with both numbers where they first do.
    """
    pairs = [(size, row, held[size].get(row.name)) for size in held for row in plans[size].rows]
    there = [(n, row, one) for n, row, one in pairs if one and one.optimizer != "frozen"]
    if factor is None:
        shares = [one.lr / row.lr for _, row, one in there if one.lr and row.lr] or [0.0]
        middle = statistics.median_low(shares), statistics.median_high(shares)
        factor = min(middle, key=lambda one: abs(one - 1))  # of two, that nearer to no schedule
    scheduled = "" if math.isclose(factor, 1, rel_tol=1e-3) else f"{factor:.4g} times "
    found: dict[tuple[str, str], Judged] = {}
    for size, row, one in there:
        numbers = {
            "rate": (one.lr, factor * row.lr, scheduled),
            "epsilon": (one.eps, one.eps if row.optimizer in theory.WITHOUT_EPS else row.eps, ""),
            "weight_decay": (one.lr and one.decay / one.lr, one.lr and row.weight_decay, ""),
        }
        said = {
            number: f"{value:.4g} at {size}, {times}the plan's is {aim:.4g}"
            for number, (value, aim, times) in numbers.items()
            if not math.isclose(value, aim, rel_tol=1e-3)
        }
        family = OPTIMIZER_FAMILY.get(one.optimizer)
        if family not in (None, OPTIMIZER_FAMILY.get(row.optimizer)):
            said["kind"] = f"{one.optimizer}, the plan's is {row.optimizer}"
        for number, note in said.items():
            quantity = f"optimiser's {number}"
            judged = Judged(row.name, quantity, None, None, theory.DIFFERS, "the plan", note)
            found.setdefault((row.name, quantity), judged)
    return [*found.values()]


def _of_tensor(name: str, numbers: PlanExponents, expected: Promise) -> list[Judged]:
    """The verdicts on the numbers of one tensor, those that are not zero at all sizes."""
    whole = numbers.powers(name)
    start = expected.start.get(whole.kind, ZERO)
    if not expected.published and whole.kind == "readout" and whole.start is not None:
        start = max(start, whole.start)  # a readout may start smaller than needed
    aims = {
        "start": -start,
        "rate": -expected.rate(whole.own, whole.kind),
        "epsilon": _epsilon(name, numbers, expected),
        "decay": _decay(name, numbers, expected),
    }
    result = []
    for quantity, aim in aims.items():
        between = numbers.between(name, quantity)
        powers = [power for power in between if power is not None]
        if len(powers) < len(between):
            note = "zero at some sizes"
            result.append(Judged(name, quantity, None, None, theory.DIFFERS, expected.source, note))
        elif powers and (quantity, whole.kind) != ("start", "constant"):
            result.append(_word(name, quantity, powers, aim, expected))
    return result


def _shared_keys(numbers: PlanExponents, expected: Promise) -> list[Judged]:
    """Keys and values whose outputs over inputs are others at another width: as many more heads
    add to their gradients, of which SGD's rates and an epsilon of its own know no power."""
    result = []
    for name in numbers.names if numbers.size == "width" else ():
        rows = [numbers.plans[size][name] for size in numbers.sizes]
        shares = [row.fan_out / row.fan_in for row in rows]
        facts = Role(rows[0].role).facts
        if facts.kind == "hidden" and facts.shared and len({*shares}) > 1:
            note = ", ".join(
                f"{share:.4g} outputs per input at {size}"
                for share, size in zip(shares, numbers.sizes, strict=True)
            )
            result.append(Judged(name, "heads", None, None, theory.DIFFERS, expected.source, note))
    return result


def _epsilon(name: str, numbers: PlanExponents, expected: Promise) -> Fraction:
    """The power expected of epsilon. For a rule of no paper: that of most tensors of the kind, if
    no constant epsilon of Table 1 grows more; one that falls is only nearer to none."""
    kind, own = numbers.powers(name).kind, numbers.powers(name).own
    if expected.published:
        return expected.epsilon(kind, own)
    highest = {"embedding": ZERO, "hidden": HALF}.get(kind, ONE)
    if numbers.size == "depth":
        highest = ZERO
    elif numbers.size == "head_dim" and own == "query":
        highest = ONE
    return min(numbers.usual("epsilon", kind, own == "query"), highest)


def _decay(name: str, numbers: PlanExponents, expected: Promise) -> Fraction:
    """The power expected of the share that a step removes. For a rule of no paper: that of most
    tensors of the kind, which does not grow but by a rate's power."""
    kind, own = numbers.powers(name).kind, numbers.powers(name).own
    holds_rate = numbers.plans[numbers.sizes[0]].decay_mode == "per_group"
    if not expected.published:
        usual = numbers.usual("decay", kind, own == "query")
        return usual if holds_rate else min(usual, ZERO)
    aim = expected.decay.get(kind, ZERO)
    if holds_rate:  # of the tensor before it has absorbed a multiplier
        multiplier = expected.multiplier.get(own, expected.multiplier.get(kind, ZERO))
        aim -= expected.rate(own, kind) - SHIFT[numbers.family] * multiplier
        aim += numbers.by_muon(name)
    return aim


def _word(
    name: str, quantity: str, values: Sequence[Fraction], aim: Fraction, expected: Promise
) -> Judged:
    """The verdict on the powers between neighbouring sizes, which all must be the expected one."""
    tolerance = _EXACT[quantity] if expected.published else _NEAR
    farthest = max(values, key=lambda value: abs(value - aim))
    word = theory.OK
    if max(values) - min(values) > _STRAIGHT:
        word = theory.DIFFERS
    elif abs(farthest - aim) > tolerance:
        word = theory.GROWS if farthest > aim else theory.VANISHES
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
        change = actual.change(part, theory.FIRST_STEPS)
        if (part == "logits" or part in fastest) and abs(change) > _NEAR:
            word = theory.GROWS if change > 0 else theory.VANISHES
            result.append(Judged(part, "change", float(change), 0.0, word, expected.source))
    return result


def not_judged(
    plans: Mapping[int, Plan], held: Mapping[int, Mapping[str, Reading]], rules: Sequence[Rule] = ()
) -> list[str]:
    """What a rate depends on and no verdict speaks of, a line each. `rules` are those of a trace.

    What a step of an optimiser tells, as a Muon's factor, is in the measured updates.
    """
    doubts = not_read(held, PlanExponents(plans).family, stepped=True)
    lines = [f"not read: {one}" for one in doubts]
    if theory.expected_of(plans) is None:
        optimizer = plans[min(plans)].prescription.get("optimizer")
        lines.append(
            f"not judged: the plan's numbers, which nothing is known to compare with ({optimizer})"
        )
    if not _traced_heads(rules) and any(one.head_dim_is_missing() for one in plans.values()):
        lines.append(
            "not judged: whether the head dimension is the same at all widths, as muP with "
            "qk_exponent=-0.5 needs; plan with head_dim="
        )
    return lines


def heads_note(plans: Mapping[int, Plan], rules: Sequence[Rule] = ()) -> list[str]:
    """A warning where muP has the library's attention while the head dimension grows, in the plans
    or in the trace that gave `rules`."""
    rule = plans[min(plans)].prescription
    heads = [max((f.head_dim or 0 for f in one.forward), default=0) for one in plans.values()]
    heads = _traced_heads(rules) or heads
    other = rule.get("parameterization", "mup") not in ("mup", "mean_field")
    if other or rule.get("qk_exponent") != -0.5 or len({*heads}) == 1:
        return []
    return [
        f"warning: head dimensions {heads[0]} to {heads[-1]}: qk_exponent=-0.5 is muP's only where "
        "they are the same at all widths; add heads with the width, or multiply by 1/d"
    ]


def _traced_heads(rules: Sequence[Rule]) -> list[int]:
    """Head dimensions that a trace saw grow with the width."""
    return sorted(
        {
            one.head_dim or 0
            for r in rules
            for one in r.measured
            if one.grows and "att" in one.factor
        }
    )
