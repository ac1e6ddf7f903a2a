"""Small twins of libraries' models, of the same class and options, whose traces are their rules."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from param_groups.roles import PlanError, Role, Rule

if TYPE_CHECKING:
    from torch import nn

_WIDTHS, _HEAD, _TOKENS, _IMAGE = (64, 128), 16, 64, 28
# What a trace cannot decide: tensors that nothing uses. The heads of BERT and RoBERTa hold a bias
# that the decoder's own replaces, T5 and its likes the table that their encoder and decoder share
# where they are tied; a mask token waits for masked patches.
_UNUSED = (
    Rule("*predictions.bias", Role.READOUT_BIAS),
    Rule("lm_head.bias", Role.READOUT_BIAS),
    Rule("*shared.weight", Role.TOKEN_EMBEDDING),
    Rule("*.mask_token", Role.POSITION_EMBEDDING),
)
_TRACED: dict[tuple[Any, ...], list[Rule]] = {}  # by class and options


class Twins(NamedTuple):
    """build(width, depth) of a small model, run(model) of one pass, and what tells its options."""

    build: Callable[[int, int], nn.Module]
    run: Callable[[nn.Module], Any]
    options: object


def traced_rules(model: nn.Module) -> list[Rule]:
    """The rules of a library's model, from a trace of its class at two small widths.

    Factors of the forward pass are not in them: those of the model itself are read, at its own
    head dimension. Raises PlanError where no small model can be built or traced.
    """
    import torch

    from param_groups.model.trace import traced

    libraries = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    twins: Callable[[Any], Twins]
    if "transformers" in libraries and hasattr(getattr(model, "config", None), "to_dict"):
        twins = _hugging_face
    elif "timm" in libraries:
        twins = _timm
    else:
        raise PlanError(
            f"rules_for knows models of Hugging Face and timm, and {type(model).__name__} is none: "
            "traced(build, run).rules has those of any model"
        )
    try:
        with torch.device("cpu"):  # whichever the caller's is
            small = twins(model)
            if (key := (type(model), small.options)) not in _TRACED:
                read = functools.partial(traced, small.build, small.run, _WIDTHS, depths=(2, 3))
                found = read()
                if any(r.problem.startswith("is taken by nothing") for r in found.readings):
                    found = read(known=_UNUSED)
                _TRACED[key] = [replace(rule, measured=()) for rule in found.rules]
            return _TRACED[key]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(
            f"a small {type(model).__name__} cannot be traced: {reason[:200]}; give "
            "traced(build, run) a build of your own"
        ) from None


# Hugging Face: the config says what to build

# Keys of configs that are sizes, and what a small model has; the first that fits counts. Ranks,
# groups and kernels stay.
_SIZES: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    (r"vocab_size", lambda n, depth: _TOKENS),
    (r"(hidden|d_model|n_embd)(_size)?", lambda n, depth: n),
    (r"(\w+_)?(intermediate_size|ffn_dim)|d_ff|n_inner", lambda n, depth: 4 * n),
    (r"num_(key_value|kv)_heads", lambda n, depth: n // (2 * _HEAD)),
    (r"(\w+_)?(attention_|num_)heads|n_heads?", lambda n, depth: n // _HEAD),
    (r"head_dim|d_kv", lambda n, depth: _HEAD),
    (r"(num_(hidden_|decoder_)?|encoder_|decoder_|n_)layers?", lambda n, depth: depth),
    (r"num_(local_)?experts", lambda n, depth: 4),
    (r"(image|patch)_size", lambda n, depth: _IMAGE),
    (r"max_source_positions", lambda n, depth: 16),
    (r"max_(position_embeddings|target_positions|seq_len)|n_positions", lambda n, d: 2 * _TOKENS),
)


def _hugging_face(model: Any) -> Twins:
    apart = tuple(_untied(model))

    def build(width: int, depth: int) -> nn.Module:
        from torch import nn

        built: nn.Module = type(model)(small(model.config, width, depth))
        for name in apart:
            path, _, key = name.rpartition(".")
            value = built.get_parameter(name).detach().clone()
            setattr(built.get_submodule(path), key, nn.Parameter(value))
        return built

    config = json.dumps(small(model.config, 64, 2).to_dict(), default=str)
    return Twins(build, _read, (config, apart))


def small(config: Any, width: int, depth: int) -> Any:
    """A config with the sizes of a small model."""
    config = copy.deepcopy(config)
    heads = getattr(config, "num_attention_heads", None)
    for key, value in config.to_dict().items():
        number = isinstance(value, int) and not isinstance(value, bool)
        for pattern, size in _SIZES:
            if number and re.fullmatch(pattern, key):
                shared = "key_value" in pattern and value == heads
                setattr(config, key, width // _HEAD if shared else size(width, depth))
                break
        if isinstance(value, list) and key in ("layer_types", "mlp_layer_types"):
            setattr(config, key, (value * depth)[:depth])
        if key in ("attention_types", "attention_layers"):  # GPT-Neo's
            types = ["global"] * depth
            setattr(config, key, types if key.endswith("layers") else [[types, 1]])
        if key.endswith("token_id") and number:
            setattr(config, key, min(value, 1))
    return config


def _untied(model: Any) -> Iterable[str]:
    """Second names of tensors that a fresh model of the config ties and this one does not."""
    import torch

    with torch.device("meta"):
        fresh = type(model)(small(model.config, 64, 2))
    mine = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, tensor in fresh.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(tensor), name)
        if other != name and name in mine and mine[name] is not mine.get(other):
            yield name


def _read(model: Any) -> None:
    """One pass over noise or over all words, which reach every expert."""
    import torch

    config, name = model.config, model.main_input_name
    ids = torch.arange(_TOKENS)[None]
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["pixel_values"] = (2, getattr(config, "num_channels", 3), _IMAGE, _IMAGE)
    shapes["input_features"] = (2, getattr(config, "num_mel_bins", 80), 32)
    inputs = {name: torch.randn(shapes[name]) if name in shapes else ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :12].expand(len(inputs[name]), -1)
    model(**inputs)


# timm: the name says what to build, the tensors with which options


def _timm(model: Any) -> Twins:
    import torch

    signature: dict[str, inspect.Parameter] = {}
    for kind in type(model).__mro__:
        if "__init__" in vars(kind):
            signature = {**inspect.signature(vars(kind)["__init__"]).parameters} | signature
    known: dict[str, Any] = {key: one.default for key, one in signature.items()}
    cfg = getattr(model, "pretrained_cfg", None)  # of what timm.create_model made
    name = cfg.get("architecture") if isinstance(cfg, Mapping) else None
    options: dict[str, Any] = {}

    def build(width: int, depth: int, **more: Any) -> nn.Module:
        sizes = {**_sizes(known, width, depth), **options, **more}
        built: nn.Module = named(name, sizes) if name else type(model)(**sizes)
        return built

    def missing(**more: Any) -> int:
        """How many kinds of tensors of the model the twin has not."""
        try:
            with torch.device("meta"):
                return len(_kinds(model) - _kinds(build(64, 2, **more)))
        except (AssertionError, RuntimeError, TypeError, ValueError):  # no such option
            return len(_kinds(model)) + 1

    lacks = missing()
    for key, default in known.items():  # those that add tensors which the model has
        others: list[Any] = []
        if isinstance(default, str):  # a Literal
            others = [*typing.get_args(signature[key].annotation)]
        elif default is None:
            others = [1.0]
        elif isinstance(default, int) and default in (False, True):  # or 0 and 1, no rate of 0.0
            others = [not default]
        for other in others:
            if lacks and (left := missing(**{key: other})) < lacks:
                options[key], lacks = other, left
    side = 32 if "img_size" not in known else _sizes(known, 64, 2)["img_size"]
    look = lambda twin: twin(torch.randn(2, 3, side, side))
    return Twins(build, look, (name, tuple(sorted(options.items()))))


def named(kind: str, sizes: Mapping[str, Any]) -> nn.Module:
    """A model of timm's; by its class where its name has sizes that are asked for (mixer_s16)."""
    import timm
    import torch

    try:
        model: nn.Module = timm.create_model(kind, pretrained=False, **sizes)
    except TypeError:
        with torch.device("meta"):
            whole = timm.create_model(kind, pretrained=False)
        model = type(whole)(**sizes)
        alike = lambda one: {(_kind(path), type(module)) for path, module in one.named_modules()}
        if alike(model) != alike(whole) or _kinds(model) != _kinds(whole):
            raise
    return model


def _sizes(known: Mapping[str, Any], width: int, depth: int) -> dict[str, Any]:
    """Sizes of a small model of timm's, of one width or with a width per stage."""
    if not {"embed_dim", "dims"} & {*known}:
        raise ValueError("its class takes no embed_dim and no dims")
    one: dict[str, Any] = {"img_size": _IMAGE, "patch_size": 7}
    one |= {"embed_dim": width, "num_heads": width // _HEAD}
    one |= {"depth": depth, "num_blocks": depth}
    stages = tuple(width // part for part in (8, 4, 2, 1))
    several: dict[str, Any] = {"img_size": 32, "patch_size": 2, "window_size": 2, "dims": stages}
    several |= {"embed_dim": stages[0], "num_heads": tuple(max(n // _HEAD, 1) for n in stages)}
    several |= {"depths": (1, 1, 1, depth)}
    staged = "dims" in known or isinstance(known.get("num_heads"), tuple)
    sizes = several if staged else one
    return {"num_classes": 16} | {key: size for key, size in sizes.items() if key in known}


def _kinds(model: nn.Module) -> set[str]:
    return {_kind(name) for name, _ in model.named_parameters()}


def _kind(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
