"""NanoDO's decoder with the multipliers of a parameterisation (Everett et al., App. C).

Pre-LayerNorm, learned positions, GELU in the tanh form, untied embedding and readout, no biases,
LayerNorm with a scale and eps 1e-6, a last LayerNorm before the readout.

Sizes: B batch, T context, V vocabulary, D width, H heads, K head dimension, F MLP width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from param_groups.layers import Embedding, LayerNorm, Linear
from training.losses import linear_cross_entropy


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Softmax and loss are computed in float32 also under autocast, as in NanoDO."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Attention(nn.Module):
    """Causal self-attention; logits are q.k times `attention_scale`."""

    def __init__(self, width: int, heads: int, attention_scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_scale = attention_scale
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        split = (*x_BxTxD.shape[:2], self.heads, -1)
        q_BxHxTxK = self.query(x_BxTxD).view(split).transpose(1, 2)
        k_BxHxTxK = self.key(x_BxTxD).view(split).transpose(1, 2)
        v_BxHxTxK = self.value(x_BxTxD).view(split).transpose(1, 2)
        y_BxHxTxK = F.scaled_dot_product_attention(
            q_BxHxTxK, k_BxHxTxK, v_BxHxTxK, is_causal=True, scale=self.attention_scale
        )
        return self.output(y_BxHxTxK.transpose(1, 2).reshape(x_BxTxD.shape))


class MLP(nn.Module):
    """Two dense layers with GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(F.gelu(self.up(x_BxTxD), approximate="tanh"))


class Block(nn.Module):
    """One pre-LayerNorm block: attention, then MLP, each on a residual branch."""

    def __init__(self, width: int, heads: int, hidden: int, attention_scale: float) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width)
        self.attention = Attention(width, heads, attention_scale)
        self.mlp_norm = LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class Decoder(nn.Module):
    """A decoder-only language model of `layers` blocks.

    Has 12 L D^2 + 2 V D + T D + (2L + 1) D parameters at the MLP width F = 4D. `attention_scale`
    comes from the prescription. The loss never holds all logits at once.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        layers: int,
        heads: int,
        head_dim: int,
        mlp_ratio: int,
        attention_scale: float,
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.token_embedding = Embedding(vocab_size, width)
        self.position_embedding = Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp_ratio * width, attention_scale) for _ in range(layers)
        )
        self.final_norm = LayerNorm(width)
        self.readout = Linear(width, vocab_size)

    def forward(
        self, ids_BxT: torch.Tensor, targets_BxT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (B, T, V), or with targets the summed cross-entropy in nats.

        Targets of -100 carry no loss; divide by the number of the others for the mean.
        """
        positions_T = torch.arange(ids_BxT.shape[1], device=ids_BxT.device)
        x_BxTxD = self.token_embedding(ids_BxT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD)
        x_BxTxD = self.final_norm(x_BxTxD)
        if targets_BxT is None:
            return at_least_float32(self.readout(x_BxTxD))
        return linear_cross_entropy(
            x_BxTxD.flatten(0, 1),
            self.readout.weight,
            targets_BxT.flatten(),
            self.readout.multiplier,
        )
