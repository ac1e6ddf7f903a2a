"""What a plan does to a model: initial values, multipliers, factors of the forward pass.

Everything that could fail is looked at before anything is written, so that an error leaves the
model as it was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from param_groups.contract import CONSTANT, UNIFORM, Prescription, check_positive
from param_groups.layers import Multiplied, Scaled
from param_groups.model import is_sharded
from param_groups.roles import PlanError, Role, choose
from param_groups.rows import Factor, Held, Row

# ------------------------------------------------------------------------------------------------
# Initial values


def named_by(
    rows: Sequence[Row], keep: Iterable[str], argument: str = "keep", roles: Set[str] = frozenset()
) -> set[str]:
    """The tensors that a pattern of `keep`, or of another `argument`, names; a word that is one of
    `roles` names all tensors of that role, if any.

    Raises PlanError for a pattern that names no tensor.
    """
    patterns = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else [*keep]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise PlanError(f"{argument} is a list of patterns such as 'backbone.*', got {keep!r}")
    kept: set[str] = set()
    for pattern in patterns:
        named = {
            row.name
            for row in rows
            if (pattern in roles and row.role == pattern)
            or any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.tied_to))
        }
        if not named and pattern not in roles:
            also = ", and is no role such as 'norm_scale'" if roles else ""
            raise PlanError(f"{argument}={pattern!r} names no tensor of the plan{also}")
        kept |= named
    return kept


@torch.no_grad()
def fill(model: nn.Module, row: Row, seed: int) -> None:
    """Draws one tensor's values from (seed, name), in float32 on the CPU, and puts them there.

    The row of an embedding's padding is 0, as in torch, which gives it no gradient.
    """
    parameter = model.get_parameter(row.name)
    if row.init_distribution == CONSTANT:
        parameter.fill_(row.init_mean)
        return
    digest = hashlib.blake2b(f"{seed}/{row.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    draw = torch.empty(parameter.shape, dtype=torch.float32)
    if row.init_distribution == UNIFORM:
        draw.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator)
    else:
        draw.normal_(generator=generator)
    # Scaled in the parameter's own precision, so that equivalent plans start from equal models.
    values = draw.to(parameter.dtype).mul_(row.init_std).add_(row.init_mean)
    for name in (row.name, *row.tied_to):
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.padding_idx is not None:
            values[owner.padding_idx] = 0
    put(parameter, values)


def put(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Copies a whole tensor's values; into a sharded tensor, this process's part of them.

    Every process has all the values, so nothing is sent.
    """
    if not is_sharded(parameter):
        parameter.copy_(values)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(values.to(parameter.device), mesh, placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())


# ------------------------------------------------------------------------------------------------
# Multipliers


def layer_multipliers(model: nn.Module, rows: Sequence[Row]) -> dict[Multiplied, float]:
    """The multiplier of every layer that has one.

    Raises PlanError when a layer that applies no multiplier would need one, or when the tensors of
    one layer disagree.
    """
    first: dict[str, Row] = {}
    for row in rows:
        for name in (row.name, *row.tied_to):
            path = name.rpartition(".")[0]
            other = first.setdefault(path, row)
            if other.multiplier != row.multiplier:
                raise PlanError(
                    f"layer {path!r} has one multiplier, but the plan wants "
                    f"{other.multiplier:g} for {other.name!r} and {row.multiplier:g} for "
                    f"{row.name!r}; plan with absorb_multipliers=True"
                )
    found: dict[Multiplied, float] = {}
    for path, row in first.items():
        layer = model.get_submodule(path)
        if isinstance(layer, Multiplied):
            found[layer] = row.multiplier
        elif row.multiplier != 1.0:
            raise PlanError(
                f"the plan multiplies {row.name!r} by {row.multiplier:g}, which "
                f"{type(layer).__name__} cannot do; use the layers of param_groups.layers, or plan "
                "with absorb_multipliers=True"
            )
    return found


# ------------------------------------------------------------------------------------------------
# Factors of the forward pass


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


# ------------------------------------------------------------------------------------------------
# What a model was given


@dataclass(frozen=True)
class Given:
    """How a model was prepared: by which rows, whether values were drawn, which tensors were not
    because they were frozen, and the state of every drawn tensor ((id, version) of its values)."""

    rows: Sequence[Row]
    drawn: bool
    frozen: Set[str]
    states: Mapping[str, tuple[int, int]]


# A model that is gone takes its entry with it.
_GIVEN: weakref.WeakKeyDictionary[nn.Module, Given] = weakref.WeakKeyDictionary()


def note_given(
    model: nn.Module,
    rows: Sequence[Row],
    drawn: Sequence[Row] = (),
    kept: bool = True,
    frozen: Set[str] = frozenset(),
) -> None:
    """Remembers that a model has these rows' multipliers, and the initial values of those `drawn`.

    `kept` says that others were kept on purpose. Tensors in `frozen` were not drawn because they
    did not require gradients.
    """
    states = {row.name: _state(model.get_parameter(row.name)) for row in drawn}
    _GIVEN[model] = Given(rows, bool(drawn) and not kept, frozen, states)


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    return id(parameter), parameter._version


def check_given(model: nn.Module, rows: Sequence[Row], forward: Sequence[Factor] | None) -> None:
    """Raises PlanError for a model that has not what the rates of these rows go with."""
    way_out = "groups(model, check=False) skips this check"
    if model not in _GIVEN:
        raise PlanError(
            "this model was not prepared with a plan: its learning rates hold for the plan's "
            "initial values and multipliers. Call plan.initialise(model, seed), or "
            "plan.apply_multipliers(model) to train the weights that it has; " + way_out
        )
    given = _GIVEN[model]
    for name in sorted(given.frozen):
        if model.get_parameter(name).requires_grad:
            raise PlanError(
                f"{name!r} was frozen at initialise, so it has no values of the plan, and is not "
                "now; call initialise after unfreezing, or plan.apply_multipliers(model) to train "
                "the weights that it has; " + way_out
            )
    before = {row.name: row for row in given.rows}
    for new in rows:
        old = before.get(new.name)
        same = old is not None and old.multiplier == new.multiplier
        if not same or (given.drawn and _start(old) != _start(new)):
            raise PlanError(
                f"this model was prepared with another plan, which gave {new.name!r} other "
                "initial values or another multiplier; call initialise or apply_multipliers of "
                "this plan; " + way_out
            )
        parameter = model.get_parameter(new.name)
        state = given.states.get(new.name)
        if state not in (None, _state(parameter)) and not _looks_drawn(parameter, new):
            raise PlanError(
                f"{new.name!r} has changed since plan.initialise, and its values are not the "
                "plan's: a layer was replaced or drawn again; call initialise last, or "
                "plan.apply_multipliers(model) to train the weights that it has; " + way_out
            )
    layers = layer_multipliers(model, rows).items()
    places: list[tuple[nn.Module, str, float]] = [(one, "multiplier", m) for one, m in layers]
    for module, name, value in [*places, *factor_places(model, forward)]:
        if getattr(module, name) != value:
            raise PlanError(
                f"a {type(module).__name__} has {name} {getattr(module, name):g}, the plan wants "
                f"{value:g}; call plan.apply_multipliers(model); " + way_out
            )


def _start(row: Row | None) -> tuple[float, float, str] | None:
    return None if row is None else (row.init_mean, row.init_std, row.init_distribution)


def _looks_drawn(parameter: nn.Parameter, row: Row) -> bool:
    """Whether values that were touched since are still about as large as the row's: a few steps, a
    row set to zero, or a move to another device or precision leave them so."""
    if is_sharded(parameter) or parameter.is_meta:
        return True
    wanted = math.hypot(row.init_mean, row.init_std)
    size = float(parameter.detach().float().square().mean().sqrt())
    if wanted == 0:
        return size < 0.1
    slack = 0.1 + 3 / math.sqrt(2 * parameter.numel())
    return abs(size / wanted - 1) < slack
