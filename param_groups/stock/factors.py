"""Factors of the forward pass that modules of libraries hold, as far as they can be read.

`held(model)` is what `plan` compares with the prescription (`param_groups.rows.READERS`).
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

from param_groups.rows import Held

if TYPE_CHECKING:
    from torch import nn

# What libraries call the head dimension of an attention's queries, most telling first (the last is
# T5's and its likes' alone), and the factor on query-key products or 1 over it.
_HEAD_DIM = ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_SCALE = ("scaling", "scale", "softmax_scale", "inv_norm_factor", "norm_factor")
# Children that make queries: an attention that has one computes products itself.
_QUERIES = re.compile(r"(w?q(uery)?(_proj)?|to_q|c_attn|w?qkv(_proj)?|query_key_value)", re.I)
# Other factors that modules or configs hold as numbers.
_FACTOR = re.compile(r"(embed|embedding|residual|logits?|lm_head|key)_(scale|scaling|multiplier)")
# Adam's step of B is the rate, whatever factor s the product BA has: B' = s B trains without the
# factor, with s times B's rate and 1/s of its epsilon (SGD: s^2 times its rate); A trains alike.
_LORA = (
    "set lora_alpha to the rank; or, if the rate is of a model with this same factor, plan with "
    "applied={{'lora_scaling': {0:.8g}}}: under Adam it acts as {0:.8g} times the rate of lora_B "
    "does without it"
)
_MEANT = {"residual": "residual_multiplier", "logit": "logit_multiplier"}


def held(model: nn.Module, attends: Set[str] = frozenset()) -> Iterator[Held]:
    """The factors that a model's modules and its config hold; modules at the paths of `attends`
    make queries."""
    from param_groups.layers import Scaled

    for path, module in model.named_modules():
        if isinstance(module, Scaled):
            pass
        elif "attention" in type(module).__name__.lower():
            yield from _of_attention(path, module)
        elif path in attends or _is_part(path, attends, model):  # no convention is known of it
            yield from (one for one in _of_attention(path, module) if not one.assumed)
        if hasattr(module, "lora_B") and isinstance(scales := vars(module).get("scaling"), dict):
            for name, value in scales.items():  # peft's, by adapter
                scaling = f"scaling[{name!r}]", "lora_scaling", value
                yield Held(path, type(module).__name__, *scaling, hint=_LORA.format(value))
    config: Any = getattr(model, "config", None)
    places: list[tuple[str, object, str]] = []
    for path, module in model.named_modules():
        factors = module.factors if isinstance(module, Scaled) else ()
        names = (*vars(module), *(name for name, _ in module.named_buffers(recurse=False)))
        places += [(path, module, n) for n in names if _FACTOR.fullmatch(n) and n not in factors]
    known = {name for _, _, name in places}
    for name in getattr(config, "__dict__", {}):  # which some forward passes read themselves
        if _FACTOR.fullmatch(name) and name not in known:
            places.append(("config", config, name))
    for path, holder, name in places:
        value = _number(holder, name)
        if value is not None:
            word = "logit" if name.startswith(("logit", "lm_head")) else name.partition("_")[0]
            yield Held(path, type(holder).__name__, name, _MEANT.get(word, name), value)
    if getattr(config, "scale_decoder_outputs", False):  # T5 does, unless its config says untied
        hint = "set it to False, as tie_word_embeddings=False does in the config"
        factor = "scale_decoder_outputs", "logit_multiplier", config.d_model**-0.5
        yield Held("config", type(config).__name__, *factor, hint=hint)


def _is_part(path: str, attends: Set[str], model: nn.Module) -> bool:
    """Whether a module without parameters stands in an attention, whose products it may take: of a
    model that is one itself in no other part that has parameters."""
    inside = [home for home in attends if path.startswith(f"{home}." if home else "")]
    part = path.partition(".")[0] if inside == [""] else path
    return bool(inside) and next(model.get_submodule(part).parameters(), None) is None


def _of_attention(path: str, module: nn.Module) -> Iterator[Held]:
    """What an attention multiplies query-key products by."""
    from torch import Tensor, nn

    kind, library = type(module).__name__, type(module).__module__.partition(".")[0]
    sizes = (getattr(module, name, None) for name in _HEAD_DIM)
    size = next((size for size in sizes if isinstance(size, int)), None)
    read = {name: _number(module, name) for name in _SCALE}
    tensors = (getattr(module, name, None) for name in _SCALE)  # learned, or a number per head
    unread = any(isinstance(one, Tensor) and not one.is_meta for one in tensors)
    name, value = next(((n, v) for n, v in read.items() if v is not None), ("", None))
    computes = any(_QUERIES.fullmatch(child) for child, _ in module.named_children())
    if hasattr(module, "key_value_proj_dim") and value in (None, 1.0):
        # T5 and its likes multiply by nothing: their initial queries are that much smaller.
        queries = tuple(f"{path}.{n}".lstrip(".") for n, _ in module.named_parameters())
        yield Held(path, kind, name, "attention_scale", 1.0, size, queries=queries)
    elif isinstance(module, nn.MultiheadAttention):
        yield Held(path, kind, "", "attention_scale", module.head_dim**-0.5, module.head_dim)
    elif library == "timm" and getattr(module, "fused_attn", False) and size:
        hint = "set fused_attn to False in all attentions, with which timm does not read its scale"
        yield Held(path, kind, "", "attention_scale", size**-0.5, size, hint)
        if value is not None:
            yield Held(path, kind, name, "attention_scale", value, size)
    elif "gptneo" in kind.lower() and "x" not in kind.lower() and computes:
        yield Held(path, kind, "", "attention_scale", 1.0, size)
    elif value is not None:
        yield Held(path, kind, name, "attention_scale", value, size)
    elif (library == "transformers" and computes) or unread:
        yield Held(path, kind, "", "attention_scale", None, size)
    elif size is not None:  # of one's own, as libraries have it
        yield Held(path, kind, "", "attention_scale", size**-0.5, size, assumed=True)


def _number(holder: object, name: str) -> float | None:
    """A number of a module or config; None for all else, and for a tensor on the meta device."""
    import torch
    from torch import nn

    value = getattr(holder, name, None)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's, too
        return float(value)
    return None
