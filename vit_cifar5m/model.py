"""The Vision Transformer of Bordelon, Chaudhry & Pehlevan (2024), section 2 and App. B.

Pre-LayerNorm without parameters (eps 1e-6), learned positions, an MLP as wide as the stream with
GELU in the tanh form, residual branches scaled by beta0 L^(-alpha_L), a last LayerNorm, the mean
over tokens and a readout. No biases. All other scales, n^(-1/2) of a dense layer among them, are
the multipliers that the plan sets.

Sizes: B batch, T tokens (patches), N head dimension, H heads, D = N H width, L blocks, P patch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from param_groups.layers import Embedding, Linear, Scaled
from param_groups.roles import Role, Rule
from vit_cifar5m.config import ModelConfig

CHANNELS = 3

ROLES = (
    Rule("patch_embedding.weight", Role.PATCH_EMBEDDING),
    Rule("position_embedding.weight", Role.POSITION_EMBEDDING),
    Rule("blocks.*.attention.query.weight", Role.QUERY),
    Rule("blocks.*.attention.key.weight", Role.KEY),
    Rule("blocks.*.attention.value.weight", Role.VALUE),
    Rule("blocks.*.attention.output.weight", Role.ATTENTION_OUTPUT),
    Rule("blocks.*.mlp.up.weight", Role.MLP_IN),
    Rule("blocks.*.mlp.down.weight", Role.MLP_OUT),
    Rule("readout.weight", Role.READOUT),
)


def _norm(width: int) -> nn.LayerNorm:
    """(x - mean) / sqrt(var + eps) over the last axis, footnote 3."""
    return nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)


class Attention(Scaled):
    """Self-attention among all tokens; the logits are q.k times `attention_scale`, (3)."""

    factors = ("attention_scale",)
    causal = False

    def __init__(self, width: int, heads: int, attention_scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.attention_scale = attention_scale
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        split = (*x_BxTxD.shape[:2], self.heads, -1)
        q_BxHxTxN = self.query(x_BxTxD).view(split).transpose(1, 2)
        k_BxHxTxN = self.key(x_BxTxD).view(split).transpose(1, 2)
        v_BxHxTxN = self.value(x_BxTxD).view(split).transpose(1, 2)
        y_BxHxTxN = F.scaled_dot_product_attention(
            q_BxHxTxN, k_BxHxTxN, v_BxHxTxN, scale=self.attention_scale
        )
        return self.output(y_BxHxTxN.transpose(1, 2).reshape(x_BxTxD.shape))


class MLP(nn.Module):
    """Two dense layers of the stream's width with GELU between, (4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, width)
        self.down = Linear(width, width)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(F.gelu(self.up(x_BxTxD), approximate="tanh"))


class Block(Scaled):
    """Attention, then MLP, each on a residual branch times `residual_multiplier`, (1)."""

    factors = ("residual_multiplier",)

    def __init__(
        self, width: int, heads: int, attention_scale: float, residual_multiplier: float
    ) -> None:
        super().__init__()
        self.residual_multiplier = residual_multiplier
        self.attention_norm = _norm(width)
        self.attention = Attention(width, heads, attention_scale)
        self.mlp_norm = _norm(width)
        self.mlp = MLP(width)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, T, D) before and after the block."""
        scale = self.residual_multiplier
        x_BxTxD = x_BxTxD.add(self.attention(self.attention_norm(x_BxTxD)), alpha=scale)
        return x_BxTxD.add(self.mlp(self.mlp_norm(x_BxTxD)), alpha=scale)


class VisionTransformer(nn.Module):
    """Images (B, 3, size, size) -> logits (B, classes), allocated but not initialised.

    Has 6 L D^2 + (3 P^2 + T + classes) D parameters; the plan gives them their values.
    The plan sets `attention_scale` and `residual_multiplier` as well.
    """

    def __init__(
        self,
        shape: ModelConfig,
        *,
        attention_scale: float = math.nan,
        residual_multiplier: float = math.nan,
    ) -> None:
        super().__init__()
        width, self.patch_size = shape.width, shape.patch_size
        tokens = (shape.image_size // shape.patch_size) ** 2
        self.patch_embedding = Linear(CHANNELS * shape.patch_size**2, width)
        self.position_embedding = Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            Block(width, shape.heads, attention_scale, residual_multiplier)
            for _ in range(shape.layers)
        )
        self.final_norm = _norm(width)
        self.readout = Linear(width, shape.classes)

    def forward(self, images_Bx3xSxS: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes)."""
        patches = patchify(images_Bx3xSxS, self.patch_size)
        positions_T = torch.arange(patches.shape[1], device=patches.device)
        x_BxTxD = self.patch_embedding(patches) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD)
        return self.readout(self.final_norm(x_BxTxD).mean(1))


def patchify(images_Bx3xSxS: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, T, 3 P^2): patches row by row, the numbers of a patch by row, column and channel."""
    batch, channels, side, _ = images_Bx3xSxS.shape
    cut = images_Bx3xSxS.reshape(batch, channels, side // patch, patch, side // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def cross_entropy(logits_BxK: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in nats, in float32 or better whatever the logits are."""
    dtype = torch.promote_types(logits_BxK.dtype, torch.float32)
    return F.cross_entropy(logits_BxK.to(dtype), labels_B, reduction="sum")


def measure(logits_BxK: torch.Tensor, labels_B: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over images: cross-entropy in nats, and how many have their label's logit largest."""
    right = logits_BxK.argmax(-1) == labels_B
    return {"loss": cross_entropy(logits_BxK, labels_B), "top1": right.sum()}
