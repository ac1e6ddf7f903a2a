"""timm's Vision Transformer as Dinan, Yaida & Zhang train it (Part II, section 1B).

No class token: the tokens of the last LayerNorm are averaged, (1.23), and the head reads the mean.
Learned positions, GELU in its exact form, LayerNorm with eps 1e-6. No biases but the head's
(footnote 44: nor that), and norms without parameters: those are the tensors for which the paper has
learning rates.

Sizes: B batch, T tokens (patches), n width, n_out classes, M MLP multiplier, L blocks.
"""

from __future__ import annotations

import functools
from typing import Any

from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from param_groups.roles import Role, Rule
from vit_imagenet.config import ModelConfig

ROLES = (
    Rule("patch_embed.proj.weight", Role.PATCH_EMBEDDING),
    Rule("pos_embed", Role.POSITION_EMBEDDING),
    Rule("blocks.*.attn.qkv.weight", Role.QKV),
    Rule("blocks.*.attn.proj.weight", Role.ATTENTION_OUTPUT),
    Rule("blocks.*.mlp.fc1.weight", Role.MLP_IN),
    Rule("blocks.*.mlp.fc2.weight", Role.MLP_OUT),
    Rule("head.weight", Role.READOUT),
    Rule("head.bias", Role.READOUT_BIAS),  # the last one: a model may lack it
)


def build(model: ModelConfig) -> VisionTransformer:
    """The network (B, 3, size, size) -> logits (B, n_out), allocated but not initialised.

    Has n_patch n + T n + (4 + 2M) L n^2 + n_out n + n_out parameters; the plan gives them their
    values. timm calls torch's attention without a scale, which then is C^(-1/2) at head dimension
    C, as the paper's prescriptions have it; the plan refuses any other.
    """
    network = VisionTransformer(
        img_size=model.image_size,
        patch_size=model.patch_size,
        num_classes=model.classes,
        embed_dim=model.width,
        depth=model.layers,
        num_heads=model.width // model.head_dim,
        mlp_ratio=model.mlp_ratio,
        class_token=False,
        global_pool="avg",
        fc_norm=False,  # normalise tokens, then average; timm's default is the other way round
        qkv_bias=False,
        proj_bias=False,  # of the attention's output and of both MLP matrices
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6, elementwise_affine=False),
        embed_layer=_patchify,
        weight_init="skip",
    )
    if not model.head_bias:  # for which timm has no option, either
        network.head.register_parameter("bias", None)
    return network


def _patchify(**arguments: Any) -> PatchEmbed:
    """timm's patch embedding without its bias, for which VisionTransformer has no option."""
    return PatchEmbed(**{**arguments, "bias": False})
