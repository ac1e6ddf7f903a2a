"""What the Transformers that are written out here share: attention, MLP and a block of both.

Sizes: B batch, T tokens, S tokens attended to, D width, H heads, K head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from param_groups.layers import Linear, Scaled


def at_least_float32(x: Tensor) -> Tensor:
    """Softmax and loss are computed in float32 also under autocast."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Attention(Scaled):
    """Multi-head attention; logits are q.k times `attention_scale`; dropout on probabilities."""

    factors = ("attention_scale",)

    def __init__(
        self,
        width: int,
        heads: int,
        attention_scale: float,
        dropout: float = 0.0,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.attention_scale = attention_scale
        self.dropout = dropout
        self.is_causal = is_causal
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(
        self,
        x_BxTxD: Tensor,
        source_BxSxD: Tensor | None = None,
        mask_Bx1x1xS: Tensor | None = None,
    ) -> Tensor:
        """Queries from x, keys and values from the source, by default x: (B, T, D).

        True in the mask may be attended to.
        """
        source_BxSxD = x_BxTxD if source_BxSxD is None else source_BxSxD
        y_BxHxTxK = F.scaled_dot_product_attention(
            self._heads(self.query(x_BxTxD)),
            self._heads(self.key(source_BxSxD)),
            self._heads(self.value(source_BxSxD)),
            attn_mask=mask_Bx1x1xS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            scale=self.attention_scale,
        )
        return self.output(y_BxHxTxK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two dense layers with GELU between, exact or in the tanh form."""

    def __init__(self, width: int, hidden: int, gelu: str = "none") -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down(F.gelu(self.up(x), approximate=self.gelu))


class Block(Scaled):
    """One pre-norm block: self-attention and MLP, on branches times `residual_multiplier`."""

    factors = ("residual_multiplier",)

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        attention_scale: float,
        residual_multiplier: float,
        norm: Callable[[int], nn.Module],
        is_causal: bool,
    ) -> None:
        super().__init__()
        self.residual_multiplier = residual_multiplier
        self.attention_norm = norm(width)
        self.attention = Attention(width, heads, attention_scale, is_causal=is_causal)
        self.mlp_norm = norm(width)
        self.mlp = MLP(width, hidden, "tanh")

    def forward(self, x_BxTxD: Tensor) -> Tensor:
        """The residual stream (B, T, D) before and after the block."""
        # x + alpha * branch in one pass, which at alpha = 1 is x + branch to the last bit.
        branch_BxTxD = self.attention(self.attention_norm(x_BxTxD))
        x_BxTxD = torch.add(x_BxTxD, branch_BxTxD, alpha=self.residual_multiplier)
        branch_BxTxD = self.mlp(self.mlp_norm(x_BxTxD))
        return torch.add(x_BxTxD, branch_BxTxD, alpha=self.residual_multiplier)
