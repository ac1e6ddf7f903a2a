"""Stock models at any width, ready for the coordinate check: tiny configs, nothing downloaded.

A name is the model type of a Hugging Face config (hf:llama) or a model of timm's
(timm:vit_small_patch16_224), as in `stock.rules.stock`. Heads of 16, 8 times as wide from
one width to the next where the model's width is; text of random tokens, noise for images.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from param_groups.check.measuring import Check
from param_groups.plan import plan
from param_groups.roles import PlanError, Role
from param_groups.rules.everett import Everett
from param_groups.stock.rules import rules_for, stock

BASE_WIDTH, HEAD_DIM, TOKENS, CLASSES = 64, 16, 64, 64
# What a check is run under. One rate is what everybody does without a plan.
RULES: dict[str, dict[str, Any]] = {
    "mup": {"parameterization": "mup"},
    "standard": {"parameterization": "standard"},
    "one_rate": {"parameterization": "standard", "alignment": "global"},
}
_HUGGING_FACE = (
    "gpt2 llama mistral mixtral granitemoe qwen2 qwen3 gemma gemma2 gemma3_text gpt_neox bert "
    "roberta t5 vit whisper"
)
_TIMM = (
    "vit_small_patch16_224 deit3_small_patch16_224 vit_small_patch14_dinov2 "
    "eva02_tiny_patch14_224 vit_base_patch16_siglip_224 convnext_tiny swin_tiny_patch4_window7_224"
)
MODELS = (*(f"hf:{n}" for n in _HUGGING_FACE.split()), *(f"timm:{n}" for n in _TIMM.split()))


def sizes(name: str, width: int) -> dict[str, Any]:
    """The keys of a small model of a width; for stages of several widths, of the widest one.

    PlanError for a width that is no multiple of its heads or stages.
    """
    kind, heads = name.partition(":")[2], width // HEAD_DIM
    unit = 2 * HEAD_DIM  # two heads that share keys
    if width % unit:
        raise PlanError(
            f"--widths {width}: stock models have heads of {HEAD_DIM}, in pairs, and "
            f"up to four stages; expected multiples of {unit}"
        )
    images: dict[str, Any] = {"img_size": 28, "patch_size": 7, "num_classes": CLASSES}
    if kind.startswith("convnext"):
        dims = [width // part for part in (8, 4, 2, 1)]
        return {"dims": dims, "depths": [1, 1, 1, 1], "num_classes": CLASSES}
    if kind.startswith("mixer"):
        return {**images, "embed_dim": width, "num_blocks": 2}
    if kind.startswith("swin"):
        stages = [max(heads // part, 1) for part in (8, 4, 2, 1)]
        images |= {"img_size": 32, "patch_size": 2, "window_size": 2, "depths": (1, 1, 1, 1)}
        return {**images, "embed_dim": width // 8, "num_heads": stages}
    if name.startswith("timm:"):
        return {**images, "embed_dim": width, "depth": 2, "num_heads": heads}
    mlp = {"intermediate_size": 4 * width}
    common = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": heads}
    if kind == "vit":
        return {**common, **mlp, "image_size": 28, "patch_size": 7, "num_labels": CLASSES}
    text: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    text |= {"vocab_size": TOKENS, "pad_token_id": None, "decoder_start_token_id": 0}
    if kind == "whisper":
        for end in ("encoder", "decoder"):
            keys = (f"{end}_layers", f"{end}_attention_heads", f"{end}_ffn_dim")
            text |= zip(keys, (1, heads, 4 * width), strict=True)
        text |= {"max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0}
        return {**text, "d_model": width}
    by_kind: dict[str, dict[str, Any]] = {
        "t5": {"num_layers": 1, "d_kv": HEAD_DIM, "d_ff": 4 * width, "pad_token_id": 0},
        "gpt2": {"n_positions": 32},
        "gpt_neox": mlp,
        "bert": {**mlp, "pad_token_id": 1},
        "roberta": {**mlp, "pad_token_id": 1},
    }
    shared_keys = {**mlp, "num_key_value_heads": heads // 2, "head_dim": HEAD_DIM}
    return {**common, **text, **by_kind.get(kind, shared_keys)}


def build(name: str, width: int) -> nn.Module:
    """The small model, without dropout; Gemma's factor on embeddings is set to 1.

    The bias of keys is frozen: it adds one number to all attention logits of a query, which the
    softmax does not feel, so its gradient is rounding error and Adam would follow that.
    """
    model = stock(name, **sizes(name, width))
    for module in model.modules():
        for key in ("p", "dropout", "attention_dropout", "activation_dropout", "drop_prob"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
        keys = getattr(module, "k_proj", getattr(module, "key", None))
        if isinstance(keys, nn.Linear) and keys.bias is not None:
            keys.bias.requires_grad_(False)
        scale = getattr(module, "embed_scale", None)
        if isinstance(scale, Tensor) and isinstance(module, nn.Embedding):
            scale.fill_(1.0)
    return model


def set_attention_scale(model: nn.Module, scale: float) -> bool:
    """Gives all attention layers one scale; False, and nothing done, where one has no place for it.

    Hugging Face's layers have `scaling`, timm's `scale`, which counts when `fused_attn` is off. T5
    and torch's nn.MultiheadAttention have neither.
    """
    places = []
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) or type(module).__name__ == "T5Attention":
            return False
        if "Attention" in type(module).__name__:
            keys = ("scaling", "scale")
            places += [(module, k) for k in keys if isinstance(getattr(module, k, None), float)]
    for module, key in places:
        setattr(module, key, scale)
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010 - timm's, which no type knows
    return bool(places)


def planned(name: str, rule: str, width: int) -> tuple[nn.Module, Any, str]:
    """A model, its plan and what cannot be set of its forward pass ("" if all can)."""
    staged = name.startswith(("timm:swin", "timm:convnext"))
    model = build(name, width)
    # Branches that start at 1e-6 change too little in a few steps to show how they scale.
    rules = [
        replace(rule, scale=1.0) if rule.role is Role.LAYER_SCALE else rule
        for rule in rules_for(model)
    ]
    own = BASE_WIDTH if staged else width
    options = {"width": own, "base_width": BASE_WIDTH, "embedding_std": 1.0, **RULES[rule]}
    prescription = Everett(**options)
    attends = not name.startswith(("timm:convnext", "timm:mixer"))
    note, applied = "", {}
    forward = prescription.forward()
    scale = forward.attention_scale(HEAD_DIM)
    if attends and set_attention_scale(model, scale):
        applied = {"attention_scale": scale}
    elif attends and forward.attention != -0.5:
        note = "no place for an attention scale: the library's own"
        prescription = Everett(**options, qk_exponent=-0.5)
    with torch.device("meta"):
        base = build(name, BASE_WIDTH) if staged else None
    keys: dict[str, Any] = {"applied": applied, "head_dim": HEAD_DIM, "base": base}
    numbers = plan(model, rules, prescription, lr=2**-8, absorb_multipliers=True, **keys)
    return model, numbers, note


def check(name: str, rule: str) -> Callable[[int, int], Check]:
    """`task(width, seed)` of a stock model under one of RULES."""

    def task(width: int, seed: int) -> Check:
        model, numbers, _ = planned(name, rule, width)
        return Check(model, numbers, [batch_of(name, seed)], loss_of)

    return task


def batch_of(name: str, seed: int) -> dict[str, Tensor]:
    """One sample: many show less of how updates align with activations."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, TOKENS, (1, 16), generator=draw)
    if name == "hf:whisper":
        return {"input_features": torch.randn(1, 80, 32, generator=draw), "labels": ids}
    if name.startswith("hf:") and name != "hf:vit":
        return {"input_ids": ids, "labels": ids.flip(1)}
    size = 32 if "swin" in name or "convnext" in name else 28
    return {
        "pixel_values": torch.randn(1, 3, size, size, generator=draw),
        "labels": torch.randint(CLASSES, (1,), generator=draw),
    }


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss, Hugging Face's own or the cross-entropy of timm's logits."""
    if type(model).__module__.startswith("timm"):
        return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])
    loss: Tensor = model(**batch).loss
    return loss
