"""Factors of the forward pass: those that a model applies must be the prescription's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set

from torch import nn

from param_groups.layers import Scaled
from param_groups.prescription import Prescription, check_positive
from param_groups.roles import PlanError, Role, choose
from param_groups.rows import Factor, Held


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


FACTORS = ("attention_scale", "residual_multiplier", "logit_multiplier")
_STOCK_EXPONENT = -0.5  # libraries divide attention logits by the root of the head dimension


def settle_factors(
    model: nn.Module,
    roles: Set[str],
    prescription: Prescription,
    applied: Mapping[str, float],
    head_dim: int | None,
    held: Sequence[Held],
) -> tuple[Factor, ...]:
    """The factors of the forward pass that the model applies, each as the prescription has it.

    They are those that `layers.Scaled` modules will be given, those that the user says are
    `applied`, and those that library modules hold. PlanError where one of these is not the
    prescription's, and where the prescription has one that nothing applies.
    """
    rule, forward = type(prescription).__name__, prescription.forward()
    factors: dict[tuple[str, int | None], Factor] = {}

    def wanted(name: str, size: int | None) -> float:
        return prescription.forward(size).get(name, 1.0)

    def add(name: str, value: float, size: int | None) -> None:
        factors.setdefault((name, size), Factor(name, value, size))

    for _, name, size in applied_factors(model):
        add(choose("forward factor", name, FACTORS), wanted(name, size), size)
    for name, value in applied.items():
        choose("forward factor", name, FACTORS)
        size = _one_head_dim(prescription, head_dim, held) if name == "attention_scale" else None
        check_positive("applied", **{name: value})
        if not math.isclose(wanted(name, size), value, rel_tol=1e-6):
            of = "" if size is None else f" for head dimension {size}"
            raise PlanError(
                f"applied: {name} is {value:g}, but {rule} has {wanted(name, size):g}{of}"
            )
        add(name, value, size)
    for one in held:
        size = one.head_dim or head_dim or getattr(prescription, "head_dim", None)
        if one.factor in applied:
            value, source = applied[one.factor], "applied says"
        elif one.factor == "attention_scale" and (size is None or one.queries):
            continue
        else:
            verb = "asks for" if one.factor == "attention_scale" else "has"
            value, source = wanted(one.factor, size), f"{rule} {verb}"
        if problem := _other_value(one, value, source, size):
            raise PlanError(f"{one.path!r} ({one.kind}) {problem}")
        if one.factor == "attention_scale" and size is not None:
            add(one.factor, value, size)
        elif one.factor in FACTORS and value != 1.0:
            add(one.factor, value, None)
    present = {name for name, _ in factors}
    attends = Role.QKV in roles or {Role.QUERY, Role.KEY} <= roles
    power = prescription.attention_exponent()
    if attends and "attention_scale" not in present and power != _STOCK_EXPONENT:
        raise PlanError(
            f"{rule} multiplies query-key products by head_dim^({power:g}), which this model does "
            "not apply (libraries have head_dim^(-0.5)): set that in its attention and plan with "
            "applied={'attention_scale': value}, derive your attention from "
            "param_groups.layers.Scaled, or take a prescription with the library's power "
            "(Everett's qk_exponent=-0.5)"
        )
    if attends and "attention_scale" not in present and head_dim is not None:
        add("attention_scale", wanted("attention_scale", head_dim), head_dim)  # the library's
    for name, value in forward.items():
        if name not in present:
            raise PlanError(
                f"{rule} has {name} {value:g} in the forward pass, which this model does not "
                "apply: derive the module from param_groups.layers.Scaled, or apply it and plan "
                f"with applied={{{name!r}: {value:g}}}"
            )
    return tuple(factors.values())


def _one_head_dim(prescription: Prescription, head_dim: int | None, held: Sequence[Held]) -> int:
    """The head dimension that argument, prescription and the model's attentions agree on."""
    sizes = {head_dim, getattr(prescription, "head_dim", None)}
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
        if one.value is None or _same(one.value, wanted):
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
