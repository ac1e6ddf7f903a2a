"""The rule whose powers of the size are nearest to those of anybody's optimiser.

What was read becomes rows of a plan, and its exponents are those of the check (`PlanExponents`).
The rules are the papers' as the check knows them (`PAPERS`) and one rate for all tensors, each with
its multipliers absorbed, in the forward pass, or the readout's alone there.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from param_groups.check.measuring import pooled
from param_groups.check.papers import ONE, PAPERS, Promise, over_depth
from param_groups.check.reading import Reading
from param_groups.check.theory import PlanExponents, numbers_of, power_between
from param_groups.families import OPTIMIZER_FAMILY, SHIFT, epsilon_power
from param_groups.plan import Plan
from param_groups.roles import Layout, PlanError, Role, fans
from param_groups.rows import Row
from param_groups.rules.exponents import ALIGNMENTS, HALF, LAYERS, PARAMETERIZATION_TABLE, ZERO

EXACT, DRAWN = 0.02, 0.1  # tolerances of a power: of numbers, of fans that a model may round
Multipliers = Mapping[str, Fraction]  # {kind: a}, a multiplier that goes as size^(-a)
Readings = Mapping[int, Mapping[str, Reading]]  # {size: what `read` gives}


@dataclass(frozen=True)
class Form:
    """A rule with some of its multipliers, size^(-kept), in the forward pass."""

    name: str
    rule: Promise
    kept: Multipliers


@functools.cache
def _over_width(family: str) -> list[Form]:
    zeros = dict.fromkeys(LAYERS, ZERO)
    even = Promise("", "width", family, zeros, zeros)
    drawn = replace(even, start={**zeros, "hidden": HALF, "readout": HALF})
    forms = [
        Form("one rate, one initial size", even, {}),
        Form("one rate, standard initial values", drawn, {}),
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
            tables.append(Form(f"{name}, {alignment} alignment", rule, a))
    vocabulary = {"parameterization": "mup", "alignment": "full", "embedding_exponent": -HALF}
    if rule := PAPERS["everett"](vocabulary, "width", family):
        name = "mup with embeddings' rates as size^(-1/2), full alignment"
        tables.append(Form(name, rule, rule.multiplier))
    forms += [replace(one, kept={}) for one in tables]
    forward = ", multipliers in the forward pass"
    forms += [replace(one, name=one.name + forward) for one in tables]
    # The library mup, nanoGPT-mup, Cerebras, Megatron and Granite: a = 1, b = 0, c = 0 for Adam.
    last = ", the readout's multiplier in the forward pass (as microsoft/mup)"
    mups = [one for one in tables if one.name.startswith("mup, ")]
    forms += [replace(one, name=one.name + last, kept={"readout": ONE}) for one in mups]
    if family == "adafactor":
        return forms
    for strategy in ("neural_tangent", "hybrid", "maximal_update"):
        for init in ("vit", "bart"):
            rule = PAPERS["dinan"]({"strategy": strategy, "s": None, "init": init}, "width", family)
            forms += [Form(f"dinan, {strategy}, {init}", rule, {})] if rule else []
    if rule := PAPERS["bordelon"]({"alpha_attention": 1}, "width", family):
        forms += [Form("bordelon", rule, {}), Form("bordelon" + forward, rule, rule.multiplier)]
    return forms


def _over_depth(family: str) -> list[Form]:
    forms = []
    for alpha in (HALF, ONE) if family == "sgd" else (ONE, HALF):
        power = -over_depth(alpha, family).step["hidden"]
        name = f"rates in blocks as depth^({power})" if power else "no power of the depth in rates"
        forms.append(Form(name, over_depth(alpha, family), {}))
        rule = PAPERS["bordelon"]({"alpha_depth": alpha}, "depth", family)
        if rule and power and family != "adafactor":
            name = f"rates of all tensors as depth^({power}), multipliers in the forward pass"
            forms.append(Form(name, rule, rule.multiplier))
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
            ins, outs = fans(name, one.shape or (1,), one.layout)
            if depth:
                role = Role.MLP_IN if pooled(name) in blocks else Role.TOKEN_EMBEDDING
            elif one.layout is Layout.VECTOR:
                grows = last[name].shape > first[name].shape
                role = Role.HIDDEN_BIAS if grows else Role.READOUT_BIAS
            elif one.layout is Layout.TABLE:
                role = Role.TOKEN_EMBEDDING
            else:
                few, many = (fans(name, of[name].shape, one.layout)[0] for of in (first, last))
                role = Role.PATCH_EMBEDDING if few == many else Role.HIDDEN
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
                    weight_decay=one.decay / one.lr if one.lr else 0.0,
                    optimizer=one.optimizer.partition(" and ")[0],
                )
            )
        rule = {"depth" if depth else "width": size, "optimizer": usual}
        plans[size] = Plan(tuple(rows), rule, 1.0, 0.0, 0.0, "per_group")
    return plans


# Its verdicts

Between = tuple[Fraction | None, ...] | None  # between neighbouring sizes; None: all are zero
Miss = tuple[str, str, float, float]  # (tensor, number, power, the expected one)


def powers_of(values: Sequence[float], sizes: Sequence[int]) -> Between:
    """The powers of the size in a number that is read at several."""
    pairs = zip(itertools.pairwise(values), itertools.pairwise(sizes), strict=True)
    return tuple(power_between(*of, b / a) for of, (a, b) in pairs) if any(values) else None


def one_power(powers: Between, tolerance: float) -> float | None:
    """The power that a number has between all sizes; nan where these are not one, or some values
    are zero; None where all are."""
    if powers is None or None in powers:
        return None if powers is None else math.nan
    values = [float(one) for one in powers if one is not None]
    return values[0] if max(values) - min(values) <= 2 * tolerance else math.nan


class Alike(NamedTuple):
    """What tensors have whose numbers go alike, but for their random initial values. Epsilon goes
    with the gradient to the power of `square`."""

    kind: str
    own: str
    muon: bool
    square: int
    lr: Between
    eps: Between
    decay: Between


def _alike(name: str, numbers: PlanExponents) -> Alike:
    powers, sizes = numbers.powers(name), numbers.sizes
    square = epsilon_power(numbers.plans[sizes[0]][name].optimizer)
    of = [numbers_of(numbers.plans[size][name]) for size in sizes]
    lr, eps, decay = (
        powers_of([one[key] for one in of], sizes) for key in ("rate", "epsilon", "decay")
    )
    return Alike(powers.kind, powers.own, numbers.by_muon(name), square, lr, eps, decay)


def nearest_rule(numbers: PlanExponents, told: str = "") -> tuple[str, list[Miss]]:
    """(the name of the rule that fits best, what deviates from it).

    Of the rules whose name is `told` or else begins with it, if one is told; a parameterisation by
    itself is that for full alignment, wherever its multipliers are. PlanError for no rule's name.
    """
    forms = _over_depth(numbers.family) if numbers.size == "depth" else _over_width(numbers.family)
    if any(map(numbers.by_muon, numbers.names)):  # of which these papers say nothing
        forms = [one for one in forms if not one.name.startswith(("dinan", "bordelon"))]
    begin = f"{told}, full alignment" if told in PARAMETERIZATION_TABLE else told
    begins = [one for one in forms if not told or f"{one.name},".startswith(f"{begin},")]
    meant = [one for one in forms if one.name == told] or begins
    if not meant:
        names = "; ".join(dict.fromkeys(one.name.partition(",")[0] for one in forms))
        raise PlanError(
            f"--rule {told!r}: no rule here has this name; expected one of {names}, or a whole name"
        )
    alike: dict[Alike, list[str]] = {}  # but for their initial values, which are random
    for name in numbers.names:
        alike.setdefault(_alike(name, numbers), []).append(name)
    absorbed: Callable[[Promise], object] = lambda r: [(r.start[k], r.step[k]) for k in LAYERS]
    found: list[tuple[int, str, list[Miss]]] = []
    for form in meant:
        homes = [form.kept]  # multipliers of what is one rule once they are absorbed, each once
        for one in forms:
            if one.kept not in homes and absorbed(one.rule) == absorbed(form.rule):
                homes.append(one.kept)
        missed = [*_missed(form, homes, alike, numbers), *_starts(form, numbers)]
        weight = sum(9 if number == "lr" else 1 for _, number, _, _ in missed)
        found.append((weight, form.name, missed))
    return min(found, key=lambda one: one[0])[1:]


def _missed(
    form: Form,
    homes: Sequence[Multipliers],
    alike: Mapping[Alike, Sequence[str]],
    numbers: PlanExponents,
) -> Iterator[Miss]:
    """What deviates from a rule. Of the ways to have an epsilon or a decay the nearest one counts.

    Epsilon: one for all, before multipliers were absorbed or after; or the gradient's (Everett et
    al., 4.3). Decay: one for all; -1/2 or -1 in what sums over the width (Fan et al. 2025; Qiu et
    al. 2025); those of the rates, of now or before multipliers were absorbed.
    """
    rule, shift, here = form.rule, SHIFT[numbers.family], form.kept

    def lost(one: Alike, home: Multipliers) -> Fraction:
        return home.get(one.kind, ZERO) - here.get(one.kind, ZERO)

    powers = (ZERO,) if numbers.size == "depth" else (ZERO, -HALF, -ONE)
    ways: dict[str, list[Callable[[Alike], Fraction]]] = {
        "lr": [
            lambda one: ZERO if one.muon else -rule.rate(one.own, one.kind) - shift * lost(one, {})
        ],
        "eps": [
            *(lambda one, home=home: one.square * lost(one, home) for home in homes),
            lambda one: one.square * (rule.gradient(one.kind) + lost(one, {})),
        ],
        "decay": [
            *(
                lambda one, power=power: power * (one.kind in ("hidden", "readout"))
                for power in powers
            ),
            *(
                lambda one, home=home: (
                    ZERO if one.muon else ((one.lr and one.lr[0]) or ZERO) + shift * lost(one, home)
                )
                for home in homes
            ),
        ],
    }
    for key, aims in ways.items():
        found: list[list[Miss]] = []
        for aim_of in aims:
            off = []
            for one, names in alike.items():
                aim = aim_of(one)
                if (power := _off(getattr(one, key), aim, EXACT)) is not None:
                    off += [(name, key, power, float(aim)) for name in names]
            found.append(off)
        yield from min(found, key=len)


def _starts(form: Form, numbers: PlanExponents) -> Iterator[Miss]:
    """Matrices whose initial size does not follow a rule, over the width."""
    closest = min(large / small for small, large in numbers.pairs)
    for name in numbers.names if numbers.size != "depth" else ():
        rows = [numbers.plans[size][name] for size in numbers.sizes]
        kind = numbers.powers(name).kind
        if len(rows[0].shape) < 2 or kind == "constant":
            continue
        # Of N random numbers the logarithm of their size is known within sqrt(1 / 2N).
        noise = 4 / math.sqrt(min(math.prod(row.shape) for row in rows)) / math.log(closest)
        aim = form.kept.get(kind, ZERO) - form.rule.start[kind]
        powers = powers_of([row.init_std for row in rows], numbers.sizes)
        if (power := _off(powers, aim, DRAWN + noise)) is not None:
            yield name, "init", round(power, 1) + 0.0, float(aim)


def _off(powers: Between, aim: Fraction, tolerance: float) -> float | None:
    """The power that is not the expected one, nan if there is none; None where all is well."""
    far = [one is None or abs(float(one) - float(aim)) > tolerance for one in powers or ()]
    return one_power(powers, tolerance) if any(far) else None
