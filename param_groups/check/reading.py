"""What anybody's model and optimiser have, tensor by tensor, as their groups say it.

Groups are read as the field's trainers and optimisers write them. What cannot be read is said, in
words, beside the numbers: a key whose meaning is not known, an optimiser of no known family, the
factor that a Muon of one's own multiplies rates by. `steps` has what one step tells.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from param_groups.families import OPTIMIZER_FAMILY, reason_without
from param_groups.optim import MuonAdamW
from param_groups.roles import Layout
from param_groups.rules.muon import MUON_CONVENTIONS

# Keys that a loop or a schedule multiplies into a group's rate, and into its decay.
FACTORS = {
    "lr": ("lr_scale", "lr_mult", "lr_multiplier", "lr_factor", "lr_ratio"),
    "weight_decay": (
        *("wd_scale", "wd_mult", "wd_multiplier", "wd_factor", "decay_mult"),
        *("weight_decay_scale", "weight_decay_mult", "weight_decay_multiplier"),
    ),
}
# Keys that are read here, and keys that no number read here depends on.
_READ = {
    *("params", "lr", "initial_lr", "eps", "weight_decay", *FACTORS["lr"]),
    *(*FACTORS["weight_decay"], "optimizer", "algorithm", "kind", "use_muon", "use_fallback"),
    *("adjust_lr_fn", "algo", "fallback_lr_scale", "decoupled_weight_decay", "nesterov"),
    *("parts", "layout"),  # of a plan's groups for Muon
}
_IDLE = {
    *("name", "names", "param_names", "betas", "momentum", "dampening", "amsgrad", "maximize"),
    *("foreach", "fused", "capturable", "differentiable", "ns_steps", "ns_coefficients"),
    *("conv_mode", "normalize_spatial", "safety_factor", "scale_eps", "verbose"),
    *("min_dim_factored", "atan2_lambda"),  # of Adafactor, of AdamAtan2: a constant at all sizes
}
# What libraries call the conventions by which Muon multiplies its rate.
_MUONS = {
    "original": "original",
    "match_rms_adamw": "match_rms",
    "spectral_unclamped": "spectral",
    "rms_to_rms": "spectral",
}
_SUITS = "_is_suitable_for_muon"  # timm's, which leaves other tensors to Adam
BY_STEP = "; --step tells"  # how what a step tells ends
UNKNOWN_MUON = "what its Muon multiplies the rate of a matrix by" + BY_STEP
NUMBERS = ("init", "lr", "eps", "decay")


@dataclass(frozen=True)
class Reading:
    """What one tensor of one model has.

    `init`: root mean square of its values. `lr`: the rate at a schedule's peak, with all factors
    that are read. `decay`: the fraction that a step removes. `optimizer`: "" where none holds the
    tensor, "frozen" where it needs no gradient. `unread`: what the numbers may lack, in words.
    `layout`: of its axes, as its module and its name tell.
    """

    shape: tuple[int, ...]
    layout: Layout
    optimizer: str
    init: float
    lr: float
    eps: float
    decay: float
    unread: tuple[str, ...] = ()


def read(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    ignore: Collection[str] = (),
    *,
    now: bool = False,
) -> dict[str, Reading]:
    """The numbers of every tensor of a model, by name.

    Args:
        model: freshly initialised.
        optimizers: that together hold its tensors.
        ignore: keys of groups that say nothing of rates or decay.
        now: rates and decays of the next step, instead of those that a schedule starts from.
    """
    owners: dict[int, list[tuple[torch.optim.Optimizer, int]]] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                owners.setdefault(id(param), []).append((optimizer, number))
    peaks = {id(one): _peaks(one.param_groups, now) for one in optimizers}
    readings = {}
    for name, param in model.named_parameters():
        if not param.numel():
            continue  # no entry is trained
        module, values = model.get_submodule(name.rpartition(".")[0]), param.detach().abs().double()
        init = math.nan if param.is_meta else float(values.square().mean().sqrt())
        held = "" if param.requires_grad else "frozen"
        numbers, unread = (0.0, 0.0, 0.0), list[str]()
        if param.requires_grad and id(param) in owners:
            optimizer, number = owners[id(param)][0]
            kinds = [kind_of(o, o.param_groups[n], param) for o, n in owners[id(param)]]
            lr, decay, unread = peaks[id(optimizer)][number]
            group = optimizer.param_groups[number]
            unread = [*unread, *_unknown(optimizer, group, kinds[0], ignore)]
            if kinds[0] == "adam" and "fallback_lr_scale" in group:
                lr *= as_number(group["fallback_lr_scale"])
            factor, doubt = shape_factor(optimizer, group, param, kinds[0])
            held, unread = " and ".join(kinds), [*unread, *doubt, *no_numbers(group)]
            # No Muon known here decays by the rate of the shape.
            numbers = lr * factor, epsilon(group, param), lr * decay
        every = zip(NUMBERS, (init, *numbers), strict=True)
        odd = [f"{key} is {value}" for key, value in every if not 0 <= value < math.inf]
        doubts = (*dict.fromkeys(unread), *odd)
        layout = _layout(name, param, module)
        readings[name] = Reading(tuple(param.shape), layout, held, init, *numbers, doubts)
    return readings


def _layout(name: str, param: torch.Tensor, module: nn.Module) -> Layout:
    if param.ndim < 2:
        return Layout.VECTOR
    if isinstance(module, nn.Embedding) or "weight" not in name:  # rows, of positions say
        return Layout.TABLE
    gpt2s = type(module).__name__ == "Conv1D"
    return Layout.TRANSPOSED if gpt2s or getattr(module, "transposed", False) else Layout.LINEAR


def _peaks(groups: Sequence[Mapping[str, Any]], now: bool) -> list[tuple[float, float, list[str]]]:
    """(rate, decay, what is not read) of each group, with the factors that a loop multiplies in.

    A schedule leaves the rate it starts from in `initial_lr`, and 0 in `lr` where it warms up from
    0. It must have multiplied all groups alike; one that multiplies `lr_scale` in, as timm's, too.
    """
    first = "" if now else "initial_"
    rates, scaled, doubts = _multiplied(groups, "lr", first)
    present = [as_number(group.get("lr")) for group in groups]
    shares = [a / b for a, b in zip(present, rates, strict=True) if b]
    bare = [a / b for a, b in zip(present, scaled, strict=True) if b]
    if not (_alike(shares) or _alike(bare)):
        seen = ", ".join(f"{share:.3g}" for share in dict.fromkeys(shares))
        doubts.append(f"lr is {seen} times initial_lr: a schedule with several factors")
    _, wd, more = _multiplied(groups, "weight_decay", first)
    result = []
    for group, rate, decay in zip(groups, scaled, wd, strict=True):
        own = [*doubts, *more]
        still = rate == 0 and _is_number(group.get("lr"))
        if still and not any(group.get(key) == 0 for key in FACTORS["lr"]):
            if "initial_lr" not in group:
                own.append("lr is 0, and no initial_lr says what a schedule starts from")
            elif now:
                own.append("lr is 0 before the first step")
        result.append((rate, decay, own))
    return result


def _multiplied(
    groups: Sequence[Mapping[str, Any]], key: str, first: str
) -> tuple[list[float], list[float], list[str]]:
    """(numbers, the same times their factors, doubts). A number that is already in proportion to
    its factor has been multiplied by it."""
    numbers = [as_number(group.get(first + key, group.get(key, 0.0))) for group in groups]
    named = [[(one, group[one]) for one in FACTORS[key] if one in group] for group in groups]
    doubts = [
        f"{one} is {value!r}"
        for factors in named
        for one, value in factors
        if not _is_number(value)
    ]
    factors = [math.prod(as_number(value) for _, value in some) for some in named]
    shares = [n / f for n, f in zip(numbers, factors, strict=True) if n and f]
    yet = any(n and not f for n, f in zip(numbers, factors, strict=True))  # a factor of 0 acts
    if not (yet or _alike(factors)) and _alike(shares):
        return numbers, numbers, doubts
    return numbers, [n * f for n, f in zip(numbers, factors, strict=True)], doubts


def _alike(values: Sequence[float]) -> bool:
    return not values or max(values) - min(values) <= 1e-6 * max(map(abs, values))


def as_number(value: object) -> float:
    return float(value) if _is_number(value) else 0.0  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    single = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return single or isinstance(value, (int, float))


def no_numbers(group: Mapping[str, Any]) -> list[str]:
    """What stands in a group for a number and is none; Adafactor's epsilons may be None."""
    keys, eps = ("weight_decay", "initial_lr", "fallback_lr_scale"), _eps(group)
    values = {"lr": group.get("lr"), **{key: group.get(key, 0.0) for key in keys}}
    values["eps"] = 0.0 if eps is None else eps
    return [f"{key} is {value!r:.60}" for key, value in values.items() if not _is_number(value)]


def _eps(group: Mapping[str, Any]) -> Any:
    """A group's epsilon; of Adafactor's pair that on squared gradients."""
    eps = group.get("eps", 0.0)
    return eps[0] if isinstance(eps, (tuple, list)) and eps else eps


def epsilon(group: Mapping[str, Any], param: torch.Tensor) -> float:
    eps = _eps(group)
    return torch.finfo(param.dtype).eps if eps is None else as_number(eps)


# Parts of the names of classes, the longer first, and the update rules that they tell.
_NAMES = {
    "muon": "muon",
    "adafactor": "adafactor",
    "paramscaling": "adam_param_scaling",
    "adamatan2": "adam_atan2",
    "adam": "adam",
}


def kind_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor) -> str:
    """A tensor's update rule: that of its optimiser's class, by name, or of a class above it. Of a
    Muon, and of a class that is not known, the group's own word for it (Dion's, nanochat's,
    Muon's; a plan's only of a Muon); and Adam for what a Muon does not train by Muon."""
    kind = next(filter(None, (_named(one.__name__) for one in type(optimizer).__mro__)), "")
    if kind not in ("", "muon"):
        return kind
    flag = optimizer.state.get(param, {}).get("use_muon", group.get("use_muon"))
    keys = ("algorithm", "kind", "optimizer") if kind else ("algorithm", "kind")
    word = next((group[key] for key in keys if key in group), None)
    if word is None and flag is not None:
        word = "muon" if flag else "adam"
    if word is not None:
        kind = _named(str(word)) or str(word).lower()
    if kind == "muon" and flag is None:
        homes = [sys.modules.get(one.__module__) for one in type(optimizer).__mro__]
        suits = next((getattr(h, _SUITS) for h in homes if hasattr(h, _SUITS)), None)
        if group.get("use_fallback") or (suits and not suits(param)):
            return "adam"
        return kind if param.ndim > 1 else "muon of a vector"
    return kind or type(optimizer).__name__.lower()


def _named(name: str) -> str:
    """The update rule that a name tells; "" for none, and for one that is of no family."""
    plain = name.lower().replace("_", "")
    if plain in ("sgd", "fusedsgd"):  # SignSGD is none
        return "sgd"
    if reason_without(plain):
        return ""
    return next((kind for part, kind in _NAMES.items() if part in plain), "")


def _unknown(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], kind: str, ignore: Collection[str]
) -> list[str]:
    """What of a group says something that is not known here."""
    torchs = type(optimizer).__module__.startswith("torch.optim")
    known = _READ | _IDLE | set(ignore) | (set(optimizer.defaults) if torchs else set())
    # A step is taken without decay.
    told = ", on which its decay may depend" if group.get("weight_decay") else BY_STEP
    lines = [
        f"{key!r} of its optimiser{told}" if key in optimizer.defaults else f"{key!r} of its group"
        for key in group
        if key not in known
    ]
    if kind not in OPTIMIZER_FAMILY:
        unknown = (
            "which power of the gradient its steps have, what its decay removes; if it is Adam's, "
            'say algorithm="adam" in its groups'
        )
        why = reason_without(kind) or unknown
        lines.append(f"{kind}, an optimiser of no known family: {why}")
    coupled = group.get("decoupled_weight_decay") is False and group.get("weight_decay")
    if coupled and kind == "adam":
        lines.append("weight_decay of Adam, which is added to the gradient: it removes no fraction")
    return lines


def shape_factor(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: torch.Tensor, kind: str
) -> tuple[float, list[str]]:
    """(what an optimiser multiplies a group's rate by for the tensor's shape, what is not read)."""
    if kind != "muon" or isinstance(optimizer, MuonAdamW):  # a plan's rates hold it
        return 1.0, []
    said = group.get("adjust_lr_fn")
    libraries = [one.__module__.partition(".")[0] for one in type(optimizer).__mro__[:-2]]
    if "torch" in libraries:
        said = said or "original"
    elif "timm" not in libraries:
        return 1.0, [UNKNOWN_MUON]
    if said in _MUONS:
        return float(MUON_CONVENTIONS[_MUONS[said]](*flat(param.shape))), []
    return (1.0, []) if said is None else (1.0, [UNKNOWN_MUON])


def not_read(
    readings: Mapping[int, Mapping[str, Reading]], family: str, stepped: bool = False
) -> list[str]:
    """What the numbers may lack, with the tensors that it concerns.

    Args:
        readings: {size: `read` of the model of that size}.
        family: of the rule, whose rates are for one family of optimisers, and for Muon beside it.
        stepped: whether what a step tells has been measured.
    """
    found: dict[str, dict[str, None]] = {}
    for tensors in readings.values():
        for name, one in tensors.items():
            kind = one.optimizer.partition(" and ")[0]
            doubts = [doubt for doubt in one.unread if not (stepped and doubt.endswith(BY_STEP))]
            if OPTIMIZER_FAMILY.get(kind, "spectral") not in ("spectral", family):
                doubts.append(f"{kind} beside {family}: rules are for one family of optimisers")
            for doubt in doubts:
                found.setdefault(doubt, {})[name] = None
    return [
        f"{doubt} ({len(names)} tensors, such as {next(iter(names))})"
        for doubt, names in found.items()
    ]


def flat(shape: Sequence[int]) -> tuple[int, int]:
    """(inputs times kernel, outputs)."""
    return math.prod(shape[1:]), shape[0]
