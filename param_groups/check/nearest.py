"""The rule whose powers of the size are nearest to those of anybody's optimiser.

What was read becomes rows of a plan, and its exponents are those of the check (`PlanExponents`).
The rules are the papers' (`PAPERS`) and one rate for all tensors, each with its multipliers
absorbed, in the forward pass, or the readout's alone there.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from param_groups.check.measuring import pooled
from param_groups.check.papers import ONE, PAPERS, Promise, over_depth
from param_groups.check.reading import Reading
from param_groups.check.theory import PlanExponents
from param_groups.families import OPTIMIZER_FAMILY, SHIFT
from param_groups.plan import Plan
from param_groups.roles import Layout, Role, fans
from param_groups.rows import Row
from param_groups.rules.exponents import ALIGNMENTS, HALF, LAYERS, PARAMETERIZATION_TABLE, ZERO

EXACT, DRAWN = 0.02, 0.1  # tolerances of a power: of numbers, of fans that a model may round
Multipliers = Mapping[str, float]  # {kind: a}, a multiplier that goes as size^(-a)
Readings = Mapping[int, Mapping[str, Reading]]  # {size: what `read` gives}


KINDS = (*LAYERS, "constant")


@dataclass(frozen=True)
class Form:
    """A rule with some of its multipliers, size^(-kept), in the forward pass, all by kind.

    `start`, `step` and `gradient` are the rule's, of multiplier times tensor; `shift` is the power
    of a multiplier in a rate that has absorbed it.
    """

    name: str
    start: Multipliers
    step: Multipliers
    gradient: Multipliers
    shift: int
    kept: Multipliers


def _form(name: str, rule: Promise, kept: Mapping[str, Fraction]) -> Form:
    start, step, gradient, forward = (
        {kind: float(numbers.get(kind, ZERO)) for kind in KINDS}
        for numbers in (rule.start, rule.step, {k: rule.gradient(k) for k in KINDS}, kept)
    )
    return Form(name, start, step, gradient, SHIFT[rule.family], forward)


@functools.cache
def _over_width(family: str) -> list[Form]:
    zeros = dict.fromkeys(LAYERS, ZERO)
    even = Promise("", "width", family, zeros, zeros)
    none = dict.fromkeys(KINDS, 0.0)
    drawn = replace(even, start={**zeros, "hidden": HALF, "readout": HALF})
    forms = [
        _form("one rate, one initial size", even, {}),
        _form("one rate, standard initial values", drawn, {}),
    ]
    tables = []
    for alignment in (*ALIGNMENTS, "global"):
        for name, table in PARAMETERIZATION_TABLE.items():
            a = {layer: table[layer].a for layer in LAYERS}
            start = {layer: table[layer].scale for layer in LAYERS}
            step = {layer: SHIFT[family] * a[layer] for layer in LAYERS}
            fields = {"parameterization": name, "alignment": alignment}
            rule = PAPERS["everett"](fields, "width", family)
            rule = rule or replace(even, start=start, step=step)
            tables.append(_form(f"{name}, {alignment} alignment", rule, a))
    forms += [replace(one, kept=none) for one in tables]
    forward = ", multipliers in the forward pass"
    forms += [replace(one, name=one.name + forward) for one in tables]
    # The library mup, nanoGPT-mup, Cerebras, Megatron and Granite: a = 1, b = 0, c = 0 for Adam.
    last = ", the readout's multiplier in the forward pass (as microsoft/mup)"
    mups = [one for one in tables if one.name.startswith("mup, ")]
    forms += [replace(one, name=one.name + last, kept={**none, "readout": 1.0}) for one in mups]
    if family == "adafactor":
        return forms
    for strategy in ("neural_tangent", "hybrid", "maximal_update"):
        for init in ("vit", "bart"):
            rule = PAPERS["dinan"]({"strategy": strategy, "s": None, "init": init}, "width", family)
            forms += [_form(f"dinan, {strategy}, {init}", rule, {})] if rule else []
    if rule := PAPERS["bordelon"]({"alpha_attention": 1}, "width", family):
        forms += [_form("bordelon", rule, {}), _form("bordelon" + forward, rule, rule.multiplier)]
    return forms


def _over_depth(family: str) -> list[Form]:
    forms = []
    for alpha in (HALF, ONE) if family == "sgd" else (ONE, HALF):
        power = -over_depth(alpha, family).step["hidden"]
        name = f"rates in blocks as depth^({power})" if power else "no power of the depth in rates"
        forms.append(_form(name, over_depth(alpha, family), {}))
        rule = PAPERS["bordelon"]({"alpha_depth": alpha}, "depth", family)
        if rule and power and family != "adafactor":
            name = f"rates of all tensors as depth^({power}), multipliers in the forward pass"
            forms.append(_form(name, rule, rule.multiplier))
    return forms


# A plan of what was read


def plans_of(readings: Readings, *, depth: bool) -> dict[int, Plan]:
    """Rows of the tensors that all sizes have, with the role that says which axes sum."""
    sizes = sorted(readings)
    first, last = readings[sizes[0]], readings[sizes[-1]]
    names = [n for n in first if all(n in readings[size] for size in sizes)]
    counts = [Counter(map(pooled, readings[size])) for size in (sizes[0], sizes[-1])]
    blocks = {name for name, n in counts[1].items() if n > counts[0][name]}
    kinds = Counter(r.optimizer for r in first.values() if r.optimizer in OPTIMIZER_FAMILY)
    usual = next((kind for kind, _ in kinds.most_common() if kind != "muon"), "adam")
    plans = {}
    for size in sizes:
        rows = []
        for name in names:
            one = readings[size][name]
            if depth:
                role = Role.MLP_IN if pooled(name) in blocks else Role.TOKEN_EMBEDDING
            elif len(one.shape) < 2 or one.layout == Layout.VECTOR:
                grows = last[name].shape > first[name].shape
                role = Role.HIDDEN_BIAS if grows else Role.READOUT_BIAS
            else:
                role = Role.TOKEN_EMBEDDING if one.table else Role.HIDDEN
            ins, outs = 1, (one.shape or (1,))[-1]
            if role is Role.HIDDEN:
                layout = Layout.TRANSPOSED if one.transposed else Layout.LINEAR
                layout = Layout(one.layout or layout)
                ins, outs = fans(name, one.shape, layout)
            decay = one.decay / one.lr if one.lr else 0.0
            rows.append(
                Row(
                    name=name,
                    shape=one.shape,
                    role=role,
                    fan_in=ins,
                    fan_out=outs,
                    tied_to=(),
                    init_mean=0.0,
                    init_std=one.init,
                    init_distribution="normal",
                    multiplier=1.0,
                    lr=one.lr,
                    eps=one.eps,
                    weight_decay=decay,
                    optimizer=one.optimizer.partition(" and ")[0],
                )
            )
        rule = {"depth" if depth else "width": size, "optimizer": usual}
        plans[size] = Plan(tuple(rows), rule, 1.0, 0.0, 0.0, "per_group")
    return plans


# Powers


Miss = tuple[str, str, float, float]  # (tensor, number, power, the expected one)


@dataclass(frozen=True)
class Powers:
    """A tensor's powers between neighbouring sizes; None where a number is zero at one of them.
    `noise`: how far the power of its initial size may be off by chance."""

    kind: str
    muon: bool
    square: bool  # epsilon is added to the square of the gradient
    lr: Sequence[float | None]
    eps: Sequence[float | None]
    decay: Sequence[float | None]
    init: Sequence[float | None] = ()
    noise: float = 0.0


def _powers(name: str, numbers: PlanExponents) -> Powers:
    pairs = [numbers.powers(name, pair) for pair in numbers.pairs]
    rows = [numbers.plans[size][name] for size in numbers.sizes]
    muon, square = numbers.by_muon(name), 2 if rows[0].optimizer == "adafactor" else 1
    up = int(muon and numbers.size != "depth")
    steps = [None if one.step is None else one.step - up for one in pairs]
    # Of N random numbers the logarithm of their size is known within sqrt(1 / 2N).
    closest = min(large / small for small, large in numbers.pairs)
    noise = 4 / math.sqrt(min(math.prod(row.shape) for row in rows)) / math.log(closest)
    judged = len(rows[0].shape) > 1 and numbers.size != "depth"
    return Powers(
        pairs[0].kind,
        muon,
        square == 2,
        lr=_signed(steps, -1),
        eps=_signed([one.epsilon for one in pairs], square),
        decay=_signed([one.decay for one in pairs], 1),
        init=_signed([one.start for one in pairs], -1) if judged else (),
        noise=DRAWN + noise,
    )


def _signed(values: Sequence[Fraction | None], by: int) -> tuple[float | None, ...]:
    return tuple(None if value is None else by * float(value) + 0.0 for value in values)


def _off(given: Sequence[float | None], aim: float, tolerance: float) -> float | None:
    """The power that is not the expected one, nan if there is none; None where all is well."""
    if given.count(None) == len(given):
        return None
    values = [math.nan if one is None else one for one in given]
    if all(abs(value - aim) <= tolerance for value in values):
        return None
    return values[0] if max(values) - min(values) <= 2 * tolerance else math.nan


def nearest_rule(numbers: PlanExponents) -> tuple[str, list[Miss]]:
    """(the name of the rule that fits best, what deviates from it)."""
    tensors = {name: _powers(name, numbers) for name in numbers.names}
    alike: dict[Powers, list[str]] = {}  # but for their initial values, which are random
    for name, one in tensors.items():
        alike.setdefault(replace(one, init=(), noise=0.0), []).append(name)
    forms = _over_depth(numbers.family) if numbers.size == "depth" else _over_width(numbers.family)
    if any(one.muon for one in alike):  # of which these papers say nothing
        forms = [one for one in forms if not one.name.startswith(("dinan", "bordelon"))]
    found: list[tuple[int, str, list[Miss]]] = []
    for form in forms:
        homes = [one.kept for one in forms if _trains_alike(one, form)]
        missed = [
            *_fewest(alike, "lr", _rates(form, alike)),
            *(one for name, powers in tensors.items() for one in _start(name, powers, form)),
            *_fewest(alike, "eps", _epsilons(form, homes, alike)),
            *_fewest(alike, "decay", _decays(form, homes, alike, numbers.size)),
        ]
        weight = sum(9 if number == "lr" else 1 for _, number, _, _ in missed)
        found.append((weight, form.name, missed))
    return min(found, key=lambda one: one[0])[1:]


def _trains_alike(one: Form, other: Form) -> bool:
    """Whether two rules are one once their multipliers are absorbed."""
    pairs = ((one.start, other.start), (one.step, other.step))
    return all(mine[layer] == theirs[layer] for mine, theirs in pairs for layer in LAYERS)


def _start(name: str, one: Powers, form: Form) -> Iterator[Miss]:
    """A matrix whose initial size does not follow a rule."""
    aim = form.kept[one.kind] - form.start[one.kind]
    power = _off(one.init, aim, one.noise)
    if power is not None and one.kind != "constant":
        yield name, "init", round(power, 1) + 0.0, aim


Aims = dict[Powers, float]  # the powers that a number is expected to have


def _rates(form: Form, alike: Iterable[Powers]) -> Iterator[Aims]:
    """The rule's; the spectral norm of Muon's update stays."""
    aims = {kind: form.shift * form.kept[kind] - form.step[kind] + 0.0 for kind in KINDS}
    yield {one: 0.0 if one.muon else aims[one.kind] for one in alike}


def _epsilons(form: Form, homes: Sequence[Multipliers], alike: Iterable[Powers]) -> Iterator[Aims]:
    """None, before multipliers were absorbed or after; or the gradient's (Everett et al., 4.3)."""
    for powers in (form.kept, *homes, form.gradient):
        aims = {kind: powers[kind] - form.kept[kind] for kind in KINDS}
        yield {one: aims[one.kind] * (2 if one.square else 1) for one in alike}


def _decays(
    form: Form, homes: Sequence[Multipliers], alike: Iterable[Powers], size: str
) -> Iterator[Aims]:
    """None; -1/2 or -1 in what sums over the width (Fan et al. 2025; Qiu et al. 2025); those of the
    rates, of now or before they were absorbed."""
    for power in (0.0,) if size == "depth" else (0.0, -0.5, -1.0):
        yield {one: power * (one.kind in ("hidden", "readout")) for one in alike}
    for home in (form.kept, *homes):
        moved = {kind: form.shift * (home[kind] - form.kept[kind]) for kind in KINDS}
        yield {
            one: 0.0 if one.muon or one.lr[0] is None else one.lr[0] + moved[one.kind]
            for one in alike
        }


def _fewest(
    alike: Mapping[Powers, Sequence[str]], key: str, expected: Iterable[Aims]
) -> list[Miss]:
    """What deviates from the powers that fit best."""
    found: list[list[Miss]] = []
    for aims in expected:
        missed = [(one, _off(getattr(one, key), aim, EXACT)) for one, aim in aims.items()]
        off = [(one, power) for one, power in missed if power is not None]
        found.append([(name, key, power, aims[one]) for one, power in off for name in alike[one]])
    return min(found, key=len)
