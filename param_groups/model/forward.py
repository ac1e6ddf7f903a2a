"""Factors of the forward pass: those that a model applies must be the prescription's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from types import NoneType
from typing import NamedTuple

from torch import nn

from param_groups.layers import Scaled
from param_groups.prescription import Forward, Prescription, Tensor
from param_groups.quantities import check_positive, check_sizes
from param_groups.roles import OUT, PlanError, Role, choose
from param_groups.rows import READERS, Factor, Held


def applied_factors(model: nn.Module) -> Iterator[tuple[Scaled, str, int | None]]:
    """The factors that a model's modules apply: (module, name, head dimension of an attention).

    Raises PlanError for an attention without head dimension.
    """
    for path, module in model.named_modules():
        for name in module.factors if isinstance(module, Scaled) else ():
            size = getattr(module, "head_dim", None) if name == "attention_scale" else None
            if name == "attention_scale" and not isinstance(size, int):
                raise PlanError(f"module {path!r} applies {name}; it needs head_dim, its size")
            yield module, name, size


LORA = "lora_scaling"  # on which prescriptions say nothing: one value for all sizes
FACTORS = ("attention_scale", "residual_multiplier", "logit_multiplier", LORA)
_MEASURED = "take it out of the forward pass or, if it is meant, out of its rule's `measured`"
_BESIDE = {Role.MLP_IN, Role.MLP_OUT, Role.READOUT, Role.TOKEN_EMBEDDING}  # in no attention
_STOCK_EXPONENT = -0.5  # libraries divide attention logits by the root of the head dimension


class Settled(NamedTuple):
    """The factors of a model's forward pass, and what initial values of tensors carry of them."""

    factors: tuple[Factor, ...]
    starts: Mapping[str, float]


def forward_pass(
    model: nn.Module,
    tensors: Sequence[Tensor],
    prescription: Prescription,
    applied: Mapping[str, float] | None,
    head_dim: int | None,
) -> Settled:
    """The factors of the forward pass that the model applies, each as the prescription has it.

    They are those that `layers.Scaled` modules will be given, those that the user says are
    `applied`, and those that library modules hold. PlanError where one of these is not the
    prescription's, and where the prescription has one that nothing applies.
    """
    if not isinstance(applied, (Mapping, NoneType)):
        raise PlanError(f"applied is a dict of forward factors, got {applied!r}")
    if head_dim is not None:
        check_sizes("plan", head_dim=head_dim)
    tied = [tensor for tensor in tensors if tensor.reads_out]
    if prescription.forward().ties and not tied:
        raise PlanError(
            f"{prescription.form} is for a word embedding that is the readout, too, and this model "
            "has none: leave Tied out"
        )
    logits_at = tied[0].size if tied else None  # in a model of several widths
    applied, wanted, rule = applied or {}, prescription.forward(logits_at), prescription.form
    attends, measured = _attentions(tensors), _measured(tensors)
    # What modules hold. A measurement stands above what is known of a module by its queries alone,
    # above a convention, what is no number, and a number without the head dimension it belongs to.
    held = [one for reader in READERS for one in reader(model, attends - measured)]
    held = [one for one in held if not _is_vague(one) or one.path not in measured]
    if head_dim is None:
        held = [one for one in held if not _sizeless(one) or _is_near(one.path, attends)]
    held += _traced(tensors, {name for one in held for name in one.queries})
    factors: dict[tuple[str, int | None], Factor] = {}
    for _, name, size in applied_factors(model):
        value = wanted.factors(size).get(choose("forward factor", name, FACTORS), 1.0)
        factors[name, size] = Factor(name, value, size)
    for name, value in applied.items():
        size = _one_head_dim(wanted, head_dim, held) if name == "attention_scale" else None
        _check_applied(name, value, size, wanted, rule)
        factors.setdefault((name, size), Factor(name, value, size))
    named = {tensor.name: tensor for tensor in tensors}
    for one in held:
        size, asked = one.head_dim or head_dim or wanted.head_dim, wanted
        if one.grows and one.factor == "logit_multiplier":  # at the width at which it was measured
            tensor, at = named[one.path], prescription.at(named[one.path])
            width = tensor.fan_out if tensor.role.facts.axis == OUT else tensor.fan_in
            asked = prescription.forward(at._replace(width=at.width * (size or 1) / width))
            value = wanted.logit_multiplier
            factors.setdefault((one.factor, None), Factor(one.factor, value))
        factor = _of_module(one, asked, applied, size, rule)
        if factor is not None:
            factors.setdefault((factor.name, factor.head_dim), factor)
    present = {name for name, _ in factors} | {one.factor for one in held if one.grows}
    roles = {part.role for tensor in tensors for part in tensor.parts}
    if {Role.QUERY, Role.KEY} <= roles and "attention_scale" not in present:
        if wanted.attention != _STOCK_EXPONENT:
            raise PlanError(_unscaled(wanted, rule))
        if head_dim is not None:  # the library's
            scale = wanted.attention_scale(head_dim)
            factors["attention_scale", head_dim] = Factor("attention_scale", scale, head_dim)
    for name, value in wanted.factors().items():
        if name not in present:
            raise PlanError(
                f"{rule} has {name} {value:g} in the forward pass, which this model does not "
                "apply: derive the module from param_groups.layers.Scaled, or apply it and plan "
                f"with applied={{{name!r}: {value:g}}}"
            )
    return Settled(tuple(factors.values()), _starts(tensors, held, wanted, applied))


def _attentions(tensors: Sequence[Tensor]) -> set[str]:
    """Paths of the modules that make queries and keys, whatever their class is called: from the
    innermost up to those that hold another attention, or a matrix of no attention, too."""
    holds: defaultdict[str, list[Role]] = defaultdict(list)
    for one in tensors:
        for home in _homes(one.name) if len(one.shape) > 1 else ():
            holds[home].append(one.role)
    paths = set()
    for one in tensors:
        leaf, *above = _homes(one.name)
        queries, most = 0, len(tensors)  # in the module below; what one with an output may hold
        for home in (above if len(holds[leaf]) == 1 else (leaf, *above)) if _asks(one.role) else ():
            kinds = {part for role in holds[home] for part in role.parts}
            count = sum(map(_asks, holds[home]))
            several = count > queries and kinds - {Role.QUERY, Role.KEY, Role.VALUE}
            if queries and (several or kinds & _BESIDE or len(holds[home]) > most):
                break
            if Role.KEY in kinds:
                paths.add(home)
                queries, out = count, Role.ATTENTION_OUTPUT in kinds
                most = len(holds[home]) if out else most
    return paths


def _asks(role: Role) -> bool:
    return Role.QUERY in role.parts


def _measured(tensors: Sequence[Tensor]) -> set[str]:
    """Paths of the modules around tensors whose attention's factor a trace has measured."""
    factors = ((one.name, {each.factor for each in one.measured}) for one in tensors)
    return {home for name, kinds in factors if "attention_scale" in kinds for home in _homes(name)}


def _is_near(path: str, attends: Set[str]) -> bool:
    """Whether a module makes queries, or is inside of one that does or around it."""
    return any(f"{a}.".startswith(f"{path}.") or f"{path}.".startswith(f"{a}.") for a in attends)


def _homes(name: str) -> Iterator[str]:
    """Paths of the modules that hold a tensor, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_vague(one: Held) -> bool:
    """An attention's factor that is a convention, no number, or without its head dimension."""
    return one.factor == "attention_scale" and (one.assumed or None in (one.value, one.head_dim))


def _sizeless(one: Held) -> bool:
    """An attention's number without the head dimension that it is compared for."""
    return one.factor == "attention_scale" and one.head_dim is None and one.value is not None


def _traced(tensors: Sequence[Tensor], carriers: Set[str]) -> Iterator[Held]:
    """What a trace measured; not of queries that carry the factor which their attention lacks."""
    for tensor in tensors:
        for one in tensor.measured if tensor.name not in carriers else ():
            name, hint = ("", "") if one.factor == "attention_scale" else ("a factor", _MEASURED)
            sizes = (one.factor, one.value, one.head_dim)
            yield Held(tensor.name, "as traced", name, *sizes, hint, grows=one.grows)


def _starts(
    tensors: Sequence[Tensor], held: Sequence[Held], wanted: Forward, applied: Mapping[str, float]
) -> dict[str, float]:
    """What initial queries carry of the factor that their attention lacks (T5); nothing where the
    user says that it is applied."""
    if "attention_scale" in applied:
        return {}
    queries = {tensor.name for tensor in tensors if tensor.role is Role.QUERY}
    lacking = {name: one.head_dim or 1 for one in held for name in one.queries}
    return {n: wanted.attention_scale(size) for n, size in lacking.items() if n in queries}


def _check_applied(name: str, value: float, size: int | None, wanted: Forward, rule: str) -> None:
    choose("forward factor", name, FACTORS)
    check_positive("applied", **{name: value})
    asked = value if name == LORA else wanted.factors(size).get(name, 1.0)
    if not math.isclose(asked, value, rel_tol=1e-6):
        of = "" if size is None else f" for head dimension {size}"
        raise PlanError(f"applied: {name} is {value:g}, but {rule} has {asked:g}{of}")


def _of_module(
    one: Held, wanted: Forward, applied: Mapping[str, float], size: int | None, rule: str
) -> Factor | None:
    """The factor that a library module applies; PlanError if it is not the prescription's."""
    attention = one.factor == "attention_scale"
    if one.factor in applied and not one.grows:
        value, source = applied[one.factor], "applied says"
    elif _sizeless(one) and size is None and not one.queries:
        raise PlanError(
            f"{one.path!r} ({one.kind}) has {one.name} {one.value:g} on query-key products, and "
            "its head dimension is not known: give plan(..., head_dim=), for which "
            f"{rule} has its own"
        )
    elif attention and (size is None or one.queries):
        return None
    else:
        value = wanted.factors(size).get(one.factor, 1.0)
        source = f"{rule} {'asks for' if attention else 'has'}"
    if problem := _other_value(one, value, source, size):
        raise PlanError(f"{one.path!r} ({one.kind}) {problem}")
    if one.grows:  # at a size that need not be this model's
        return None
    if attention:
        return None if size is None else Factor(one.factor, value, size)
    return Factor(one.factor, value) if one.factor in FACTORS and value != 1.0 else None


def _unscaled(wanted: Forward, rule: str) -> str:
    power = f"{_STOCK_EXPONENT:g}"
    way_out = f" ({wanted.way_out.format(power=power)})" if wanted.way_out else ""
    return (
        f"{rule} multiplies query-key products by head_dim^({wanted.attention:g}), which this "
        f"model does not apply (libraries have head_dim^({power})): set that in its attention and "
        "plan with applied={'attention_scale': value}, derive your attention from "
        "param_groups.layers.Scaled, or take a prescription with the library's power" + way_out
    )


def _one_head_dim(wanted: Forward, head_dim: int | None, held: Sequence[Held]) -> int:
    """The head dimension that argument, prescription and the model's attentions agree on."""
    sizes = {head_dim, wanted.head_dim}
    sizes |= {one.head_dim for one in held if one.factor == "attention_scale"}
    stated = sizes - {None}
    if len(stated) == 1 and isinstance(size := stated.pop(), int) and size > 0:
        return size
    raise PlanError(
        "applied: attention_scale is checked against one head dimension, a positive integer; "
        f"head_dim= and the model say {', '.join(sorted(map(repr, sizes - {None}))) or 'none'}: "
        "give head_dim=, or derive attentions of several sizes from param_groups.layers.Scaled"
    )


def _other_value(one: Held, wanted: float, source: str, size: int | None) -> str | None:
    """What is wrong with a factor that a module holds; None if nothing. A number may be 1 over the
    factor, as some modules divide."""
    if one.factor != "attention_scale":
        if source == "applied says" and one.value is None:
            return None
        if one.value is None:
            return (
                f"is multiplied in the forward pass by what was not read, where the plan has "
                f"{wanted:g}: {one.hint}"
            )
        if _same(one.value, wanted):
            return None
        way_out = one.hint or (
            "set it to that, by the config where that has a key for it, or give the attribute "
            "another name if it is no factor"
        )
        return (
            f"has {one.name} {one.value:g} in the forward pass, where the plan has {wanted:g}: "
            f"{way_out}"
        )
    if one.value is None:
        if source == "applied says":
            return None
        return (
            "does not say what it multiplies query-key products by: read its forward pass, then "
            f"plan with applied={{'attention_scale': value}}, where {source} {wanted:g}"
        )
    if (one.assumed and source == "applied says") or _same(one.value, wanted):
        return None
    has = f"has {one.name} {one.value:g}" if one.name else f"multiplies by {one.value:g}"
    of = f" for head dimension {size}" if size else ""
    way_out = one.hint or (
        "set it to that in all attentions, by the config where that has a key for it, give it "
        "another name if it is no such factor"
    )
    if size and size > 1 and one.value > 0:
        power = f"{math.log(one.value) / math.log(size):.8g}"
        applied = f"applied={{'attention_scale': {one.value:.8g}}}"
        way_out += f", or plan it as it is: qk_exponent={power} in Everett and {applied}"
    return f"{has} on query-key products, but {source} {wanted:g}{of}: {way_out}"


def _same(value: float, wanted: float) -> bool:
    return any(math.isclose(one, wanted, rel_tol=1e-6) for one in (value, 1 / (value or math.inf)))


def factor_places(
    model: nn.Module, forward: Sequence[Factor] | None
) -> Iterator[tuple[Scaled, str, float]]:
    """(module, attribute, value) wherever the model applies a factor of the plan."""
    values = {(factor.name, factor.head_dim): factor.value for factor in forward or ()}
    for module, name, size in applied_factors(model):
        if (name, size) in values:
            yield module, name, values[name, size]
