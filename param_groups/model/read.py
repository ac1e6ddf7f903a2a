"""What a model must be so that a plan can give every tensor its numbers, looked at before any row.

Each check raises PlanError, one line that names the tensor and what to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from param_groups.layers import Multiplied
from param_groups.prescription import Prescription, Size, Tensor
from param_groups.roles import IN, Assignment, Fans, Layout, PlanError, Role, Rule, assign, fans_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read(
    model: nn.Module,
    rules: Sequence[Rule],
    prescription: Prescription,
    base: nn.Module | Fans | None = None,
) -> list[Tensor]:
    """Every tensor of a model with its role, its size and its place.

    Raises PlanError for whatever in model, rules or widths leaves a tensor without right numbers.
    """
    if isinstance(model, nn.Module):  # else `assign` says what a model is
        check_tensors(model)
    assignments = assign(model, rules)
    for one in assignments:
        if problem := layout_problem(model, one):
            raise PlanError(f"{one.name!r} belongs to {problem}")
    sizes: dict[str, Size] = {}
    if base is None:
        check_widths(assignments, prescription)
        summed = {one.name: _few(one, prescription.width) for one in assignments}
    else:
        sizes, several = _base_sizes(assignments, rules, prescription, base)
        summed = dict.fromkeys((one.name for one in assignments), several)
    _check_depth(assignments, prescription)
    lists = {_list_of(one) for one in assignments if one.role.facts.block}
    last_norm = any(one.role is Role.FINAL_NORM_SCALE for one in assignments)
    gated = gates(assignments)
    tensors = []
    for one in assignments:
        inside, unplaced = _place(one, lists, last_norm)
        tensors.append(
            Tensor(
                one.role,
                *one.fans,
                size=sizes.get(one.name),
                inside=inside,
                reads_out=_reads_out(model, one),
                name=one.name,
                shape=tuple(one.parameter.shape),
                tied_to=one.tied_to,
                scale=one.scale,
                unplaced=unplaced,
                summed=summed[one.name],
                keep=one.keep,
                measured=one.measured,
                layout=one.layout,
                cuts=_cuts(model, one, gated),
            )
        )
    return tensors


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
        if replaced := _replaced(layer):
            name, key = replaced
            raise PlanError(
                f"layer {path!r} does not use {key!r} as it is, but {name!r}, which is made of it "
                "(torch.nn.utils.spectral_norm, weight_norm and prune do so): its sizes and rates "
                "are others; plan the model before that is applied, or after it is removed"
            )
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
    if not isinstance(parameter, nn.Parameter):
        return "is no nn.Parameter, though its module lists it as one; assign nn.Parameter(values)"
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet (a lazy layer); run one batch through the model first"
    layer, hidden, _ = f".{name}".partition(".parametrizations.")
    if hidden:
        return (
            f"stands behind a parametrisation: what {layer[1:]!r} multiplies by has other sizes "
            "and other rates; plan the model before the parametrisation is registered, or after "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    if parameter.is_inference():
        return "was made in torch.inference_mode, where nothing is trained; build the model outside"
    if parameter.layout is not torch.strided:
        return "is sparse, for which no plan has numbers; plan the model before it becomes so"
    if parameter.numel() == 0:
        return f"has no entries (shape {tuple(parameter.shape)}); build the model without it"
    if parameter.dtype not in _DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        return (
            f"is of type {kind}, for which no plan has numbers (only float32, bfloat16, float16 "
            "and float64); plan the model before it is quantised, or a module without this tensor"
        )
    return None


def _replaced(layer: nn.Module) -> tuple[str, str] | None:
    """A tensor of a layer that is no Parameter and is made of one, and that one's name.

    Known by what is there: a tensor of the same shape that is called weight, as what torch's layers
    use, or whose name the Parameter's contains (bias beside bias_orig), whatever put it there.
    """
    held = {**vars(layer), **layer._buffers}
    made = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
    for own, parameter in layer.named_parameters(recurse=False):
        for key, value in made.items():
            if (key in own or key == "weight") and value.shape == parameter.shape:
                return key, own
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


def check_widths(assignments: Sequence[Assignment], prescription: Prescription) -> None:
    """Refuses tensors of another width than the prescription's."""
    for assignment in assignments:
        fan_in, fan_out = assignment.fans
        axis = assignment.role.facts.axis
        size = fan_in if axis == IN else fan_out
        if axis is not None and size != prescription.width:
            way = "give it the model's width; several widths are planned with base=small_model"
            if assignment.role is Role.READOUT and fan_out == prescription.width:
                way = "a first layer has the role patch_embedding"
            raise PlanError(
                f"{assignment.name!r} ({assignment.role}) has {axis} {size}, but the prescription "
                f"is for width {prescription.width:g}; {way}"
            )


def _few(assignment: Assignment, width: float) -> str:
    """Why the gradient of a tensor that heads share has no power of the width; "" if it has one.

    The gradient is a sum over these heads: as the number of heads grows with the width, so does
    the gradient, unless the tensor's fan-out grows alike. Matrices of keys and values are taken to
    do so: as many heads share a key at every width, a constant. One model cannot show otherwise;
    a base model can, and so can a check, which compares widths.
    """
    outputs, facts = assignment.fans[1], assignment.role.facts
    matrix = IN in facts.grows
    if not facts.shared or matrix or assignment.role is Role.HIDDEN_BIAS or outputs >= width:
        return ""
    return (
        f"has {outputs} outputs, fewer than the width {width:g}: what shares one adds to its "
        "gradient, for which there is no power of the width (plan with base=, if it grows with it)"
    )


def _base_sizes(
    assignments: Sequence[Assignment],
    rules: Sequence[Rule],
    prescription: Prescription,
    base: nn.Module | Fans,
) -> tuple[dict[str, Size], str]:
    """The size at each tensor by its fans over those in the base model, along the axis that counts;
    and why gradients have no common power of the width, "" if they have one."""
    at_base = prescription.base
    if at_base is None:
        raise PlanError(
            f"{prescription.form} is for models of one width; plan without a base model, or with "
            "Everett"
        )
    if prescription.width != at_base.width:
        raise PlanError(
            "with a base model the fans decide: give the prescription its base width as width, too"
        )
    fans = base if isinstance(base, Mapping) else fans_of(base, rules)
    if odd := sorted({a.name for a in assignments} ^ set(fans)):
        raise PlanError(f"the base model is another: {odd[0]!r} is only in one of the two")
    grew = {
        a.name: tuple(large / small for large, small in zip(a.fans, fans[a.name], strict=True))
        for a in assignments
    }
    sums = {a.name for a in assignments if IN in a.role.facts.grows}
    wider = any(grew[name][0] != 1 for name in sums)
    for a in assignments:
        if wider and a.role is Role.READOUT and grew[a.name][0] == 1 != grew[a.name][1]:
            raise PlanError(
                f"{a.name!r} ({a.role}) reads {a.fans[0]} inputs at both sizes and grows in its "
                "outputs; a first layer has the role patch_embedding"
            )
        if wider and a.role is Role.READOUT and grew[a.name][1] != 1:
            raise PlanError(
                f"{a.name!r} ({a.role}) has {a.fans[1]} outputs, {grew[a.name][1]:g} times those "
                "in the base model: what leads from one width to another has the role hidden, and "
                "a readout as many outputs at every size"
            )
    counted = [(a.name, grew[a.name][1]) for a in assignments if a.role.facts.shared]
    counted += [(name, grew[name][0]) for name in grew if name in sums]
    ratios = {ratio: name for name, ratio in counted}
    several = ""
    if len(ratios) > 1:
        (one, first), (other, second), *_ = ratios.items()
        several = (
            f"stands in a model where {first!r} is {one:g} times as wide as in the base model, "
            f"{second!r} {other:g} times, so that gradients have no common power of the width "
            "(scale all widths alike)"
        )
    for a in assignments:
        into, out = grew[a.name]
        if a.role.facts.shared and IN in a.role.facts.grows and into != out:
            several = (
                f"stands in a model where {a.name!r} ({a.role}) has {out:g} times the outputs of "
                f"the base model and {into:g} times the inputs: other numbers of heads share a key "
                "there, so that gradients have no known power of the width (keep their ratio)"
            )
            break
    depth = prescription.size.depth
    at = {name: at_base.width * ratio[0 if name in sums else 1] for name, ratio in grew.items()}
    return {name: Size(width, depth) for name, width in at.items()}, several


# Places and ties


def _place(
    assignment: Assignment, lists: Set[str | None], last_norm: bool
) -> tuple[bool | None, str]:
    """Whether a residual branch holds a tensor, and why nobody knows where that is so.

    `lists` are the paths of numbered blocks; `last_norm` says whether any rule names the last norm.
    """
    role, number = assignment.role, _list_of(assignment)
    if not role.facts.branch:
        if assignment.trunk is False:
            return None, (
                "stands outside of all residual branches by its role; leave trunk=False out of its "
                "rule"
            )
        return False, ""
    if role is Role.NORM_SCALE and not last_norm:
        return None, (
            "is one of the norms, of which the last has another rate than those in branches: use a "
            "rule that gives the last norm's scale the role 'final_norm_scale'"
        )
    if assignment.trunk is not None:
        return not assignment.trunk, ""
    if number is not None and number in lists:
        return True, ""
    return None, (
        "is in no numbered block, and tensors outside of the residual branches have other rates "
        "than those inside: say Rule(..., trunk=True) if it stands outside, trunk=False if inside"
    )


def _list_of(assignment: Assignment) -> str | None:
    """The path up to a tensor's first number, such as model.layers; None without a number."""
    match = re.match(r"(?:(.*?)\.)?\d+(?:\.|$)", assignment.name)
    return (match[1] or "") if match else None


def _check_depth(assignments: Sequence[Assignment], prescription: Prescription) -> None:
    """Refuses another depth than the model's, where that is certain: one numbered list has all
    matrices of blocks, and all its entries the same two or more."""
    depth = prescription.size.depth
    names = [one.name for one in assignments if one.role.facts.block]
    kinds = Counter(re.sub(r"(^|\.)\d+\.", r"\1*.", name, count=1) for name in names)
    lists, blocks = {kind.partition("*")[0] for kind in kinds}, {*kinds.values()}
    nested = any(re.search(r"\.\d+\.", kind) for kind in kinds)
    certain = len(lists) == len(blocks) == 1 < min(len(kinds), *blocks) and not nested
    if certain and depth and depth % min(blocks):  # may loop
        raise PlanError(
            f"{names[0]!r} and its likes are in {blocks.pop()} blocks, but the prescription is for "
            f"depth {depth:g}; give the prescription the model's depth"
        )


def gates(assignments: Sequence[Assignment]) -> set[str]:
    """Tensors that hold gate and up: twice the outputs that the mlp_out beside them reads."""
    read = {_above(one.name): one.fans[0] for one in assignments if one.role is Role.MLP_OUT}
    inner = [one for one in assignments if one.role is Role.MLP_IN]
    return {one.name for one in inner if one.fans[1] == 2 * read.get(_above(one.name), 0)}


def _above(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def _cuts(model: nn.Module, assignment: Assignment, gated: Set[str]) -> tuple[int, ...] | None:
    """The parts that a rule names; by default the groups of a convolution, and none that anybody
    knows for gate and up, which some models interleave."""
    if assignment.parts is not None or assignment.name in gated:
        return assignment.parts or ()
    layer = model.get_submodule(assignment.name.rpartition(".")[0])
    groups = getattr(layer, "groups", 1) if len(assignment.parameter.shape) > 2 else 1
    several = assignment.role is Role.HIDDEN and isinstance(groups, int) and groups > 1
    return (1,) * groups if several else None


def _reads_out(model: nn.Module, assignment: Assignment) -> bool:
    """Whether a tied tensor is a word embedding and the readout in one."""
    paths = [name.rpartition(".")[0] for name in (assignment.name, *assignment.tied_to)]
    tables = [isinstance(model.get_submodule(path), nn.Embedding) for path in paths]
    named = assignment.role is Role.TOKEN_EMBEDDING
    return bool(assignment.tied_to) and not all(tables) and (named or any(tables))
