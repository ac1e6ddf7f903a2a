"""Rules of Hugging Face's models: traces of two small models of the same class and config."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from param_groups.roles import PlanError, Role, Rule

if TYPE_CHECKING:
    from torch import nn

_WIDTHS, _HEAD, _TOKENS = (64, 128), 16, 64
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
    (r"(image|patch)_size", lambda n, depth: 28),
    (r"max_source_positions", lambda n, depth: 16),
    (
        r"max_(position_embeddings|target_positions|seq_len)|n_positions",
        lambda n, depth: 2 * _TOKENS,
    ),
)
# What a trace cannot decide: tensors that nothing uses. The heads of BERT and RoBERTa hold a bias
# that the decoder's own replaces, T5 and its likes the table that their encoder and decoder share
# where they are tied; a mask token waits for masked patches.
_UNUSED = (
    Rule("*predictions.bias", Role.READOUT_BIAS),
    Rule("lm_head.bias", Role.READOUT_BIAS),
    Rule("*shared.weight", Role.TOKEN_EMBEDDING),
    Rule("*.mask_token", Role.POSITION_EMBEDDING),
)
_TRACED: dict[tuple[Any, ...], list[Rule]] = {}  # by class, config and ties


def is_hugging_faces(model: nn.Module) -> bool:
    """Whether a model is one of transformers', with a config to build smaller ones from."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return "transformers" in kinds and hasattr(getattr(model, "config", None), "to_dict")


def traced_rules(model: Any) -> list[Rule]:
    """The rules of a model of Hugging Face's, from a trace of its class at two small widths.

    Factors of the forward pass are not in them: those of the model itself are read, at its own
    head dimension. Raises PlanError where no small model can be built or traced.
    """
    import torch

    try:
        with torch.device("cpu"):  # whichever the caller's is
            return _traced(model)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(
            f"a small {type(model).__name__} cannot be traced: {reason[:200]}; give "
            "traced(build, run) a build of your own"
        ) from None


def _traced(model: Any) -> list[Rule]:
    from param_groups.model.trace import traced

    apart = tuple(_untied(model))
    config = json.dumps(small(model.config, 64, 2).to_dict(), default=str)
    if (key := (type(model), config, apart)) not in _TRACED:
        build = lambda width, depth: _built(model, width, depth, apart)
        found = traced(build, _run, _WIDTHS, depths=(2, 3))
        idle = {r.name for r in found.readings if r.problem.startswith("is taken by nothing")}
        known = [rule for rule in _UNUSED if any(map(rule.matches, idle))]
        if known:
            found = traced(build, _run, _WIDTHS, depths=(2, 3), known=known)
        _TRACED[key] = [replace(rule, measured=()) for rule in found.rules]
    return _TRACED[key]


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


def _built(model: Any, width: int, depth: int, apart: tuple[str, ...]) -> nn.Module:
    """A fresh small model, with those tensors apart that the model does not tie."""
    from torch import nn

    built: nn.Module = type(model)(small(model.config, width, depth))
    for name in apart:
        path, _, key = name.rpartition(".")
        owner = built.get_submodule(path)
        setattr(owner, key, nn.Parameter(built.get_parameter(name).detach().clone()))
    return built


def _untied(model: Any) -> list[str]:
    """Second names of tensors that a fresh model of the config ties and this one does not."""
    import torch

    with torch.device("meta"):
        fresh = type(model)(small(model.config, 64, 2))
    mine = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    apart = []
    for name, tensor in fresh.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(tensor), name)
        if other != name and name in mine and mine[name] is not mine.get(other):
            apart.append(name)
    return apart


def _run(model: Any) -> None:
    """One pass over noise or over all words, which reach every expert."""
    import torch

    config, name = model.config, model.main_input_name
    ids = torch.arange(_TOKENS)[None]
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["pixel_values"] = (2, getattr(config, "num_channels", 3), 28, 28)
    shapes["input_features"] = (2, getattr(config, "num_mel_bins", 80), 32)
    inputs = {name: torch.randn(shapes[name]) if name in shapes else ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :12].expand(len(inputs[name]), -1)
    model(**inputs)
