"""What a model must be so that a plan can give every tensor its numbers, looked at before any row.

Each check raises PlanError, one line that names the tensor and what to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from param_groups.layers import Multiplied
from param_groups.prescription import Prescription
from param_groups.roles import (
    BLOCK,
    FUSED_PARTS,
    TRUNK,
    UNTIE,
    WIDTH_AXIS,
    Assignment,
    Fans,
    Layout,
    PlanError,
    Role,
    Rule,
    assign,
    fans_of,
)
from param_groups.rules.wrappers import Recipe

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def prepared(
    model: nn.Module,
    rules: Sequence[Rule],
    prescription: Prescription,
    base: nn.Module | Fans | None = None,
) -> list[tuple[Assignment, Prescription]]:
    """Every tensor with its role and the prescription at its width and place in the model.

    Raises PlanError for whatever in model, rules or widths leaves a tensor without right numbers.
    """
    if not isinstance(prescription, Prescription):
        raise PlanError(f"a prescription is a rule such as Everett(...); got {prescription!r}")
    if lacking := {"width", "optimizer"} - {*dir(prescription)}:
        raise PlanError(f"{type(prescription).__name__} has no {sorted(lacking)[0]}")
    if isinstance(model, nn.Module):  # else `assign` says what a model is
        check_tensors(model)
    assignments = assign(model, rules)
    ratios = check_assigned(model, assignments, rules, prescription, base)
    prescription.check_roles({one.role for one in assignments})
    paths = {_list_of(one) for one in assignments if one.role in (*BLOCK, *FUSED_PARTS)}
    _check_depth(assignments, prescription)
    found = []
    for one in assignments:
        rule = prescription.scaled(ratios[one.name]) if one.name in ratios else prescription
        rule = _at_its_place(rule, one, paths)
        _check_tie(model, one, rule)
        found.append((one, rule))
    return found


def check_tensors(model: nn.Module) -> None:
    """Refuses tensors that a plan could not fill or train, and multipliers that no plan knows."""
    parameters = dict(model.named_parameters())
    seen: dict[tuple[str, int], str] = {}
    for name, parameter in parameters.items():
        if problem := _problem(name, parameter):
            raise PlanError(f"{name!r} {problem}")
        if parameter.is_meta or is_sharded(parameter):
            continue
        place = (str(parameter.device), parameter.data_ptr())
        if (other := seen.setdefault(place, name)) != name:  # each step would move both
            raise PlanError(
                f"{name!r} and {other!r} are two parameters over the same memory; tie them by "
                "assigning one and the same Parameter to both layers"
            )
    for path, layer in model.named_modules():
        multiplier = getattr(layer, "multiplier", 1.0)
        neutral = isinstance(multiplier, (int, float)) and multiplier == 1.0
        owns = any(True for _ in layer.parameters(recurse=False))
        if owns and not neutral and not isinstance(layer, Multiplied):
            raise PlanError(
                f"layer {path!r} ({type(layer).__name__}) has a multiplier of its own, which "
                "no plan knows; derive the layer from param_groups.layers.Multiplied, whose "
                "multiplier the plan sets, or give the attribute another name"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise PlanError(
                f"layer {path!r} rescales its rows to max_norm {layer.max_norm:g} in every forward "
                "pass, so that they have other sizes than a plan's; build it without max_norm"
            )


def _problem(name: str, parameter: nn.Parameter) -> str | None:
    """Why a plan cannot give this tensor values and a learning rate; None if it can."""
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet (a lazy layer); run one batch through the model first"
    if ".parametrizations." in name:
        layer = name.partition(".parametrizations.")[0]
        return (
            f"stands behind a parametrisation: what {layer!r} multiplies by has other sizes and "
            "other rates; plan the model before the parametrisation is registered, or after "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    if parameter.numel() == 0:
        return f"has no entries (shape {tuple(parameter.shape)}); build the model without it"
    if parameter.dtype not in _DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        return (
            f"is of type {kind}, for which no plan has numbers (only float32, bfloat16, float16 "
            "and float64); plan the model before it is quantised, or a module without this tensor"
        )
    return None


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a process holds only a part of a tensor (a DTensor, as fully_shard makes them)."""
    return hasattr(parameter, "device_mesh")


# Layouts and widths


def layout_problem(model: nn.Module, assignment: Assignment) -> str | None:
    """Why a tensor's layout is not that of its layer; None if it is, or if the layer is unknown."""
    path, _, key = assignment.name.rpartition(".")
    layer, shape = model.get_submodule(path), assignment.parameter.shape
    if key != "weight" or len(shape) < 2:
        return None
    kind = type(layer).__name__
    turned = assignment.layout is Layout.TRANSPOSED
    into_first = isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    if kind == "Conv1D" or into_first:  # Hugging Face's Conv1D stores (in, out)
        if assignment.layout is Layout.LINEAR and shape[0] != shape[1]:
            return f"a {kind}, which stores (in, out): give its rule Layout.TRANSPOSED"
    elif turned and isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return f"a {kind}, which stores (out, in): leave Layout.TRANSPOSED out of its rule"
    return None


# Roles whose fan-in grows with the width; of all others the fan-out does.
_SUMS_OVER_WIDTH = {*BLOCK, Role.QKV, Role.HIDDEN, Role.READOUT, Role.ROUTER, Role.LORA_A}
# Tensors that several heads may share, whose gradient then is a sum over these heads: as the number
# of heads grows with the width, so does the gradient, unless the tensor's fan-out grows alike.
_NORMS = {Role.NORM_SCALE, Role.NORM_BIAS}
_SHARED_BY_HEADS = {*_NORMS, Role.HIDDEN_BIAS, Role.KEY, Role.VALUE, Role.QKV}


def check_assigned(
    model: nn.Module,
    assignments: Sequence[Assignment],
    rules: Sequence[Rule],
    prescription: Prescription,
    base: nn.Module | Fans | None,
) -> dict[str, float]:
    """Refuses layouts that layers contradict, and tensors of another width than the prescription's.

    Returns {name: width over the base model's}, empty without a base model.
    """
    for one in assignments:
        if problem := layout_problem(model, one):
            raise PlanError(f"{one.name!r} belongs to {problem}")
    if base is not None:
        return _base_ratios(assignments, rules, prescription, base)
    for assignment in assignments:
        fan_in, fan_out = assignment.fans
        axis = WIDTH_AXIS.get(assignment.role)
        size = fan_in if axis == "fan_in" else fan_out
        if axis is not None and size != prescription.width:
            way = "give it the model's width; several widths are planned with base=small_model"
            if assignment.role is Role.READOUT and fan_out == prescription.width:
                way = "a first layer has the role patch_embedding"
            raise PlanError(
                f"{assignment.name!r} ({assignment.role}) has {axis} {size}, but the prescription "
                f"is for width {prescription.width:g}; {way}"
            )
        few = assignment.role in (*_NORMS, Role.KEY, Role.VALUE) and fan_out < prescription.width
        if few and prescription.follows_gradients():
            raise PlanError(
                f"{assignment.name!r} has {fan_out} outputs, fewer than the width "
                f"{prescription.width:g}: heads that share it add to its gradient, for which there "
                "is no power of the width; use adam or adafactor, without eps_per_layer (or plan "
                "with base=, if it grows with the width)"
            )
    return {}


def _base_ratios(
    assignments: Sequence[Assignment],
    rules: Sequence[Rule],
    prescription: Prescription,
    base: nn.Module | Fans,
) -> dict[str, float]:
    """How many times wider than in the base model each tensor is, along the axis that counts."""
    if prescription.width != getattr(prescription, "base_width", None):
        raise PlanError(
            "with a base model the fans decide: give the prescription its base width as width, too"
        )
    fans = base if isinstance(base, Mapping) else fans_of(base, rules)
    if odd := sorted({a.name for a in assignments} ^ set(fans)):
        raise PlanError(f"the base model is another: {odd[0]!r} is only in one of the two")
    grew = {
        a.name: tuple(own / fan for own, fan in zip(a.fans, fans[a.name], strict=True))
        for a in assignments
    }
    wider = any(grew[a.name][0] != 1 for a in assignments if a.role in _SUMS_OVER_WIDTH)
    for a in assignments:
        if wider and a.role is Role.READOUT and grew[a.name][0] == 1 != grew[a.name][1]:
            raise PlanError(
                f"{a.name!r} ({a.role}) reads {a.fans[0]} inputs at both sizes and grows in its "
                "outputs; a first layer has the role patch_embedding"
            )
    if prescription.follows_gradients():
        counted = [(a.name, grew[a.name][1]) for a in assignments if a.role in _SHARED_BY_HEADS]
        counted += [(a.name, grew[a.name][0]) for a in assignments if a.role in _SUMS_OVER_WIDTH]
        sizes = {ratio: name for name, ratio in counted}
        if len(sizes) > 1:
            (one, first), (other, second), *_ = sizes.items()
            raise PlanError(
                f"{first!r} is {one:g} times as wide as in the base model, {second!r} {other:g} "
                "times; gradients then have no common power of the width: use adam or adafactor "
                "without eps_per_layer, or scale all widths alike"
            )
    return {a.name: grew[a.name][0 if a.role in _SUMS_OVER_WIDTH else 1] for a in assignments}


# Places and ties


def _at_its_place(
    prescription: Prescription, assignment: Assignment, lists: Set[str | None]
) -> Prescription:
    """The prescription inside residual branches or outside; `lists`: paths of numbered blocks.

    Raises PlanError where these differ and nothing says where this one stands.
    """
    outside = prescription.outside_branches()
    if outside is prescription:
        return prescription
    if assignment.trunk is False and assignment.role in TRUNK:
        raise PlanError(
            f"{assignment.name!r} ({assignment.role}) stands outside of all residual "
            "branches by its role; leave trunk=False out of its rule"
        )
    number = _list_of(assignment)
    placed = assignment.trunk is not None or (number is not None and number in lists)
    if assignment.role not in TRUNK and not placed:
        raise PlanError(
            f"{assignment.name!r} ({assignment.role}) is in no numbered block, and tensors outside "
            "of the residual branches have other rates than those inside: say "
            "Rule(..., trunk=True) if it stands outside, trunk=False if inside"
        )
    return outside if assignment.trunk else prescription


def _list_of(assignment: Assignment) -> str | None:
    """The path up to a tensor's first number, such as model.layers; None without a number."""
    found = re.match(r"(?:(.*?)\.)?\d+(?:\.|$)", assignment.name)
    return (found[1] or "") if found else None


def _check_depth(assignments: Sequence[Assignment], prescription: Prescription) -> None:
    """Refuses another depth than the model's, where that is certain: one numbered list has all
    matrices of blocks, and all its entries the same two or more."""
    branches = prescription.residual_multiplier(), prescription.outside_branches()
    depth = getattr(getattr(prescription, "rule", prescription), "depth", None)  # a recipe's rule
    names = [one.name for one in assignments if one.role in (*BLOCK, *FUSED_PARTS)]
    kinds = Counter(re.sub(r"(^|\.)\d+\.", r"\1*.", name, count=1) for name in names)
    lists, blocks = {kind.partition("*")[0] for kind in kinds}, {*kinds.values()}
    nested = any(re.search(r"\.\d+\.", kind) for kind in kinds)
    certain = len(lists) == len(blocks) == 1 < min(len(kinds), *blocks) and not nested
    if certain and depth and depth % min(blocks) and branches != (1, prescription):  # may loop
        raise PlanError(
            f"{names[0]!r} and its likes are in {blocks.pop()} blocks, but the prescription is for "
            f"depth {depth}; give the prescription the model's depth"
        )


def _check_tie(model: nn.Module, assignment: Assignment, prescription: Prescription) -> None:
    """Refuses a word embedding that is also the readout where one row cannot serve as both."""
    paths = [name.rpartition(".")[0] for name in (assignment.name, *assignment.tied_to)]
    tables = [isinstance(model.get_submodule(path), nn.Embedding) for path in paths]
    named = assignment.role is Role.TOKEN_EMBEDDING
    if not assignment.tied_to or all(tables) or not (named or any(tables)):
        return
    if named and prescription.ties_readout():
        return
    if isinstance(prescription, Recipe):  # a tied model has no readout's initial size to ask for
        prescription = replace(prescription, init=dict.fromkeys(Role, 0.0))
    rows, width = assignment.parameter.shape[0], assignment.parameter.shape[-1]
    embedding = prescription(Role.TOKEN_EMBEDDING, 1, width)
    readout = prescription(Role.READOUT, width, rows)
    keys = ("lr", "multiplier", "eps", "decay")
    if any(getattr(readout, key) != getattr(embedding, key) for key in keys):
        way_out = UNTIE
        if prescription.ties_readout():
            way_out = f"; give it the role {Role.TOKEN_EMBEDDING}, whose numbers are meant for both"
        raise PlanError(
            f"{assignment.name!r} is tied to {', '.join(assignment.tied_to)}, but "
            f"{type(prescription).__name__} gives {Role.TOKEN_EMBEDDING} lr {embedding.lr:g} x, "
            f"eps {embedding.eps:g} x, decay {embedding.decay:g} x and multiplier "
            f"{embedding.multiplier:g}, {Role.READOUT} lr {readout.lr:g} x, eps {readout.eps:g} x, "
            f"decay {readout.decay:g} x and multiplier {readout.multiplier:g}{way_out}"
        )
