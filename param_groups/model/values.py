"""Initial values and multipliers of a model's tensors, and what a model was given.

Everything that could fail is looked at before anything is written, so that an error leaves the
model as it was.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import nn

from param_groups.layers import Multiplied
from param_groups.model.forward import factor_places
from param_groups.model.read import is_sharded
from param_groups.quantities import CONSTANT, UNIFORM
from param_groups.roles import PlanError, Role
from param_groups.rows import Factor, Row

# Initial values


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


def check_drawable(row: Row, parameter: nn.Parameter, overwrite: bool) -> None:
    """Raises PlanError for a tensor without entries of its own, and for one whose constant says
    that its role is another."""
    if parameter.is_meta:
        raise PlanError(f"{row.name!r} is on the meta device and has no values to initialise")
    if not all(parameter.stride()[i] for i, n in enumerate(row.shape) if n > 1):
        raise PlanError(f"{row.name!r} is expanded: its entries share memory; clone it")
    value = constant(parameter) if Role(row.role).facts.start == "zero" else None
    if value and row.init_mean == 0 and (value == 1 or not overwrite):
        raise PlanError(
            f"{row.name!r} ({row.role}) is {value:.4g} in all entries, and initialise would set "
            "it to 0: a gain has the role norm_scale or layer_scale (with the rule's scale=, if "
            "it is not 1); a bias is to be 0 before, or named in keep="
        )


def constant(parameter: torch.Tensor) -> float | None:
    """The one value of all entries that this process has; None if there are several.

    A single entry says nothing, unless it is the 1 of a fresh gain.
    """
    part = getattr(parameter, "_local_tensor", parameter).detach().flatten()
    alike = part.numel() > 0 and bool((part == part[0]).all())
    return float(part[0]) if alike and (part.numel() > 1 or part[0] == 1) else None


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


# What a model held before

# Of every tensor of a model that was planned or drawn, (id, torch's count of writes) at that time;
# the id is 0 on the meta device, where there is nothing to lose.
_VERSIONS: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)


def note_versions(model: nn.Module) -> None:
    """Remembers when each tensor was last written to."""
    _VERSIONS[model] = {
        name: (0 if p.is_meta else id(p), p._version) for name, p in model.named_parameters()
    }


def check_fresh(module: nn.Module, drawn: Sequence[Row], *, whole: bool) -> None:
    """Raises PlanError where a draw would erase a checkpoint's values or those of training.

    Known by a Hugging Face model's name, in the evaluation mode that from_pretrained leaves it in
    (if the `whole` model is drawn); by a norm that is no constant; and by writes since the plan.
    """
    way_out = (
        "; plan.apply_multipliers(model) keeps the weights of a checkpoint, keep= those of a part, "
        "and initialise(..., overwrite=True) draws all anew"
    )
    source = getattr(module, "name_or_path", "")
    if whole and source and isinstance(source, str) and not module.training:
        raise PlanError(f"the model was loaded from {source!r}, and its weights would go{way_out}")
    for row in drawn:
        parameter = module.get_parameter(row.name)
        identity, version = _VERSIONS.get(module, {}).get(row.name, (0, 0))
        if identity == id(parameter) and parameter._version > version:
            raise PlanError(
                f"{row.name!r} was written to since the plan was made or drawn, by load_state_dict "
                f"or training, and its values would go{way_out}"
            )
        # Memory that nothing was written to, as to_empty leaves it, holds anything; so does a copy.
        written = parameter._version > 0 or (identity and not is_sharded(parameter))
        judged = Role(row.role).facts.norm and written and parameter.numel() > 1
        if judged and constant(parameter) is None:
            raise PlanError(
                f"{row.name!r} ({row.role}) has other values than a fresh model's, which are one "
                f"number: those of a checkpoint would go{way_out}"
            )


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


# What a model was given


@dataclass(frozen=True)
class Given:
    """How a model was prepared: by which rows, whether values were drawn, which tensors were not
    because they were frozen, and of every drawn tensor how large its values were, and torch's count
    of writes to it."""

    rows: Sequence[Row]
    drawn: bool
    frozen: Set[str]
    sizes: Mapping[str, tuple[float | None, int]]


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
    parameters = {row.name: model.get_parameter(row.name) for row in drawn}
    sizes = {name: (_size(one), one._version) for name, one in parameters.items()}
    note_versions(model)
    _GIVEN[model] = Given(rows, bool(drawn) and not kept, frozen, sizes)


def _size(parameter: torch.Tensor) -> float | None:
    """The root mean square of the entries; None where this process has not all values."""
    if is_sharded(parameter) or parameter.is_meta:
        return None
    return float(parameter.detach().float().square().mean().sqrt())


def check_given(model: nn.Module, rows: Sequence[Row], forward: Sequence[Factor] | None) -> None:
    """Raises PlanError unless the model has the values and multipliers that the rates assume."""
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
    keys = ("multiplier", *(("init_mean", "init_std", "init_distribution") if given.drawn else ()))
    for new in rows:
        old = before.get(new.name)
        if old is None or any(getattr(old, key) != getattr(new, key) for key in keys):
            raise PlanError(
                f"this model was prepared with another plan, which gave {new.name!r} other "
                "initial values or another multiplier; call initialise or apply_multipliers of "
                "this plan; " + way_out
            )
        parameter = model.get_parameter(new.name)
        if not _as_large(parameter, given.sizes.get(new.name)):
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


def _as_large(parameter: nn.Parameter, drawn: tuple[float | None, int] | None) -> bool:
    """Whether values are still about as large as those drawn: a few steps, a row set to zero, a
    move to another device or precision and a second draw of one size leave them so.

    Values are looked at, whatever wrote them: torch's version of a tensor does not count `.data`.
    Where zeros were drawn, only that count tells a step from another draw.
    """
    size, (before, writes) = _size(parameter), drawn or (None, 0)
    if size is None or before is None:
        return True
    if before == 0:
        return size == 0 or (size < 0.1 and parameter._version > writes)
    return abs(size / before - 1) < 0.1 + 3 / math.sqrt(2 * parameter.numel())
