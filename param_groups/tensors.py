"""What a plan does to a model: which tensors it can use, initial values, multipliers.

Everything that could fail is looked at before anything is written, so that an error leaves the
model as it was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from param_groups.contract import CONSTANT, UNIFORM
from param_groups.layers import Multiplied, Scaled
from param_groups.roles import PlanError
from param_groups.rows import Factor, Row

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ------------------------------------------------------------------------------------------------
# Which models can be planned


def check_tensors(model: nn.Module) -> None:
    """Raises PlanError for tensors that a plan could not fill or train, and for layers' factors."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if problem := _problem(parameter):
            raise PlanError(f"{name!r} {problem}")
    _refuse_shared_memory(parameters)
    for path, layer in model.named_modules():
        own = getattr(layer, "multiplier", 1.0)
        if any(True for _ in layer.parameters(recurse=False)):
            if not isinstance(layer, Multiplied) and not (_number(own) and own == 1.0):
                raise PlanError(
                    f"layer {path!r} ({type(layer).__name__}) has a multiplier of its own, which "
                    "no plan knows; derive the layer from param_groups.layers.Multiplied, whose "
                    "multiplier the plan sets, or give the attribute another name"
                )


def _number(value: object) -> bool:
    return isinstance(value, (int, float))


def _problem(parameter: nn.Parameter) -> str | None:
    """Why a plan cannot give this tensor values and a learning rate; None if it can."""
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet (a lazy layer); run one batch through the model first"
    if parameter.layout is not torch.strided:
        return f"is sparse ({parameter.layout}); a plan needs dense tensors"
    if parameter.is_quantized or parameter.dtype not in _DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        return (
            f"is of type {kind}, for which no plan has numbers (only float32, bfloat16, float16 "
            "and float64); plan the model before it is quantised, or a module without this tensor"
        )
    if parameter.is_inference():
        return "was made in torch.inference_mode() and cannot be trained; build the model outside"
    axes = zip(parameter.stride(), parameter.shape, strict=True)
    if any(step == 0 and size > 1 for step, size in axes):
        return "is expanded: several entries share one place in memory; use .clone()"
    return None


def _refuse_shared_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Two parameters over the same memory: each step would move both."""
    seen: dict[tuple[str, int], str] = {}
    for name, parameter in parameters.items():
        if parameter.is_meta or is_sharded(parameter) or parameter.numel() == 0:
            continue
        place = (str(parameter.device), parameter.data_ptr())
        if other := seen.setdefault(place, name):
            if other != name:
                raise PlanError(
                    f"{name!r} and {other!r} are two parameters over the same memory; tie them by "
                    "assigning one and the same Parameter to both layers"
                )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a process holds only a part of a tensor (a DTensor, as fully_shard makes them)."""
    return hasattr(parameter, "device_mesh")


# ------------------------------------------------------------------------------------------------
# Initial values


def named_by(rows: Sequence[Row], keep: Iterable[str]) -> set[str]:
    """The tensors that a pattern of `keep` names, which keep their values.

    Raises PlanError for a pattern that names no tensor.
    """
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    kept: set[str] = set()
    for pattern in patterns:
        named = {
            row.name
            for row in rows
            if any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.tied_to))
        }
        if not named:
            raise PlanError(f"keep={pattern!r} names no tensor of the plan")
        kept |= named
    return kept


@torch.no_grad()
def fill(parameter: nn.Parameter, row: Row, seed: int) -> None:
    """Draws one tensor's values from (seed, name), in float32 on the CPU, and puts them there."""
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


# What libraries call the head dimension of an attention.
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim")


def head_dims(model: nn.Module) -> set[int]:
    """The head dimensions that the attentions of a stock model say they have."""
    return {
        size
        for module in model.modules()
        if "attention" in type(module).__name__.lower() and not isinstance(module, Scaled)
        for name in _HEAD_DIM
        if isinstance(size := getattr(module, name, None), int)
    }


def unscaled_queries(model: nn.Module) -> dict[str, int]:
    """{query: head dimension} of T5's attentions, which multiply logits by nothing.

    By class name, so that no library is imported to look; mT5 and its likes have the ending, too.
    """
    return {
        f"{path}.q.weight": module.key_value_proj_dim
        for path, module in model.named_modules()
        if type(module).__name__.endswith("T5Attention")
    }


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

# The rows by which a model was initialised, whether values were drawn and which tensors were not
# because they were frozen; a model that is gone takes its entry with it.
_GIVEN: weakref.WeakKeyDictionary[nn.Module, tuple[Sequence[Row], bool, Set[str]]]
_GIVEN = weakref.WeakKeyDictionary()


def note_given(
    model: nn.Module, rows: Sequence[Row], drawn: bool, frozen: Set[str] = frozenset()
) -> None:
    """Remembers that a model has these rows' multipliers, and with `drawn` their initial values.

    Tensors in `frozen` were not drawn because they did not require gradients.
    """
    _GIVEN[model] = (rows, drawn, frozen)


def check_given(
    model: nn.Module, rows: Sequence[Row], forward: Sequence[Factor] | None
) -> None:
    """Raises PlanError for a model that has not what the rates of these rows go with."""
    way_out = "groups(model, check=False) skips this check"
    if model not in _GIVEN:
        raise PlanError(
            "this model was not prepared with a plan: its learning rates hold for the plan's "
            "initial values and multipliers. Call plan.initialise(model, seed), or "
            "plan.apply_multipliers(model) to train the weights that it has; " + way_out
        )
    given, drawn, frozen = _GIVEN[model]
    for name in sorted(frozen):
        if model.get_parameter(name).requires_grad:
            raise PlanError(
                f"{name!r} was frozen at initialise, so it has no values of the plan, and is not "
                "now; call initialise after unfreezing, or plan.apply_multipliers(model) to train "
                "the weights that it has; " + way_out
            )
    before = {row.name: row for row in given}
    for new in rows:
        old = before.get(new.name)
        same = old is not None and old.multiplier == new.multiplier
        if not same or (drawn and _start(old) != _start(new)):
            raise PlanError(
                f"this model was prepared with another plan, which gave {new.name!r} other "
                "initial values or another multiplier; call initialise or apply_multipliers of "
                "this plan; " + way_out
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
