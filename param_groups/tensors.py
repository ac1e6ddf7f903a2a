"""What a plan does to a model: which tensors it can use, initial values, multipliers.

Everything that could fail is looked at before anything is written, so that an error leaves the
model as it was.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from param_groups.contract import CONSTANT, UNIFORM, Prescription
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
        foreign = not isinstance(layer, Multiplied) and not (_number(own) and own == 1.0)
        if foreign and any(True for _ in layer.parameters(recurse=False)):
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
        if (other := seen.setdefault(place, name)) and other != name:
            raise PlanError(
                f"{name!r} and {other!r} are two parameters over the same memory; tie them by "
                "assigning one and the same Parameter to both layers"
            )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a process holds only a part of a tensor (a DTensor, as fully_shard makes them)."""
    return hasattr(parameter, "device_mesh")


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


# What libraries call the head dimension of an attention's queries, most telling first (the last is
# T5's and its likes' alone), and the factor on query-key products.
_HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim")
_SCALE = ("scaling", "scale")
# Other factors of the forward pass that modules of libraries hold as numbers.
_FACTOR = re.compile(r"(embed|embedding|residual|logits?|lm_head|key)_(scale|scaling|multiplier)")


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, int | None]]:
    """(path, module, head dimension if it says one) of the attentions of a stock model."""
    for path, module in model.named_modules():
        if "attention" in type(module).__name__.lower() and not isinstance(module, Scaled):
            sizes = (getattr(module, name, None) for name in _HEAD_DIM)
            yield path, module, next((size for size in sizes if isinstance(size, int)), None)


def _held(holder: object, name: str) -> float | None:
    """A number of a module or config; None for all else, and for a tensor on the meta device."""
    value = getattr(holder, name, None)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def head_dims(model: nn.Module, scaled: bool = False) -> set[int]:
    """The head dimensions that the attentions of a stock model say they have; with `scaled` of
    those alone that multiply query-key products by a factor."""
    sizes = ((size, module) for _, module, size in _attentions(model) if size is not None)
    return {size for size, module in sizes if not (scaled and _unscaled(module))}


def _unscaled(module: nn.Module) -> bool:
    """Whether an attention is one of T5's and its likes, which multiply logits by nothing."""
    return hasattr(module, _HEAD_DIM[-1]) and _held(module, "scaling") in (None, 1.0)


def unscaled_attentions(model: nn.Module) -> dict[str, int]:
    """{tensor: head dimension} of all tensors in T5's attentions and in those of its likes."""
    return {
        f"{path}.{name}".lstrip("."): size
        for path, module, size in _attentions(model)
        for name, _ in module.named_parameters()
        if size is not None and _unscaled(module)
    }


def check_held(
    model: nn.Module,
    prescription: Prescription,
    applied: Mapping[str, float],
    factors: Sequence[Factor],
    head_dim: int | None,
) -> None:
    """Raises PlanError for a module that holds another factor than the plan counts on.

    That is what `applied` says; else for attentions the prescription's, at the head dimension that
    they say, or `head_dim`; else 1, or what `layers.Scaled` modules were given (`factors`). A
    number may be 1 over the factor, as some modules divide.
    """
    for path, module, own in _attentions(model):
        size = own or head_dim or getattr(prescription, "head_dim", None)
        if problem := _other_scale(module, size, prescription, applied.get("attention_scale")):
            raise PlanError(f"{path!r} ({type(module).__name__}) {problem}")
    config: Any = getattr(model, "config", None)
    places: list[tuple[str, object, str]] = []
    for path, module in model.named_modules():
        names = (*vars(module), *(name for name, _ in module.named_buffers(recurse=False)))
        places += [(path, module, name) for name in names if _FACTOR.fullmatch(name)]
    known = {name for _, _, name in places}
    for name in getattr(config, "__dict__", {}):  # which some forward passes read themselves
        if _FACTOR.fullmatch(name) and name not in known:
            places.append(("config", config, name))
    if getattr(config, "scale_decoder_outputs", False):  # T5 does, unless its config says untied
        factor, wanted = config.d_model**-0.5, applied.get("logit_multiplier", 1.0)
        if not _same(factor, wanted):
            raise PlanError(
                f"'config' ({type(config).__name__}) has scale_decoder_outputs, which multiplies "
                f"logits by d_model^(-1/2) = {factor:g}, where the plan has {wanted:g}: set it to "
                "False, as tie_word_embeddings=False does in the config"
            )
    given = {factor.name: factor.value for factor in factors}
    for path, holder, name in places:
        meant, value = "logit_multiplier", _held(holder, name)
        if not name.startswith(("logit", "lm_head")):
            meant = "residual_multiplier" if name.startswith("residual") else name
        right = [applied[meant]] if meant in applied else [1.0, given.get(meant, 1.0)]
        scaled = isinstance(holder, Scaled) and name in holder.factors
        if not scaled and value is not None and not any(_same(value, one) for one in right):
            raise PlanError(
                f"{path!r} ({type(holder).__name__}) has {name} {value:g} in the forward pass, "
                f"where the plan has {right[-1]:g}: set it to that, by the config where that has "
                "a key for it, or give the attribute another name if it is no factor"
            )


def _other_scale(
    module: nn.Module, size: int | None, prescription: Prescription, given: float | None
) -> str | None:
    """What is wrong with an attention's scale; None if nothing, or if nothing can be said."""
    if given is None and (size is None or _unscaled(module)):
        return None
    wanted = given or prescription.attention_scale(size or 1)
    of = f" for head dimension {size}" if size else ""
    source = f"{type(prescription).__name__} asks for" if given is None else "applied says"
    for name in _SCALE:
        value = _held(module, name)
        if value is None or _same(value, wanted):
            continue
        way_out = (
            "set it to that in all attentions, by the config where that has a key for it, give it "
            "another name if it is no such factor"
        )
        if size and size > 1 and value > 0:
            power = f"{math.log(value) / math.log(size):.8g}"
            applied = f"applied={{'attention_scale': {value:.8g}}}"
            way_out += f", or plan it as it is: qk_exponent={power} in Everett and {applied}"
        return f"has {name} {value:g} on query-key products, but {source} {wanted:g}{of}: {way_out}"
    fused = getattr(module, "fused_attn", False) and type(module).__module__.startswith("timm.")
    if fused and size and not _same(size**-0.5, wanted):  # which does not read its scale then
        return (
            f"multiplies query-key products by {size**-0.5:g} while its fused_attn is True, but "
            f"{source} {wanted:g}{of}: set fused_attn to False in all attentions"
        )
    return None


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


def check_given(model: nn.Module, rows: Sequence[Row], forward: Sequence[Factor] | None) -> None:
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
