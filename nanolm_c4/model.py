"""The decoders of two papers, with the multipliers of a parameterisation.

NanoDO's (Everett et al., App. C): pre-LayerNorm, learned positions, GELU in the tanh form, untied
embedding and readout, no biases, LayerNorm with a scale and eps 1e-6, a last LayerNorm before the
readout. Bordelon, Chaudhry & Pehlevan's (App. B) differs in three things: norms have no scale,
every residual branch has a multiplier, and the readout has a bias.

Sizes: B batch, T context, V vocabulary, D width, H heads, K head dimension, F MLP width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from param_groups.layers import Embedding, LayerNorm, Linear, Scaled
from param_groups.roles import Role, Rule
from training.linear_cross_entropy import linear_cross_entropy


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Softmax and loss are computed in float32 also under autocast, as in NanoDO."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Attention(Scaled):
    """Causal self-attention; logits are q.k times `attention_scale`."""

    factors = ("attention_scale",)
    causal = True

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


class TiedReadout(Scaled, nn.Linear):
    """Logits W x times `logit_multiplier`, W (V, D) the word embedding."""

    factors = ("logit_multiplier",)
    logit_multiplier = math.nan

    def __init__(self, embedding: Embedding) -> None:
        vocab_size, width = embedding.weight.shape
        super().__init__(width, vocab_size, bias=False, device="meta")
        self.weight = embedding.weight

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, V)."""
        return F.linear(x_BxTxD, self.weight * self.logit_multiplier)


def layer_norm(width: int, scale: bool) -> nn.Module:
    """Normalisation over the last axis, with a scale or with no parameter at all; eps 1e-6."""
    return LayerNorm(width) if scale else nn.LayerNorm(width, 1e-6, elementwise_affine=False)


def no_norm(width: int) -> nn.Module:
    """Nothing where a norm would stand."""
    return nn.Identity()


class Block(Scaled):
    """One pre-LayerNorm block: attention and MLP, on branches times `residual_multiplier`."""

    factors = ("residual_multiplier",)

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        attention_scale: float,
        residual_multiplier: float,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.residual_multiplier = residual_multiplier
        self.attention_norm = norm(width)
        self.attention = Attention(width, heads, attention_scale)
        self.mlp_norm = norm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x_BxTxD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        # x + alpha * branch in one pass, which at alpha = 1 is x + branch to the last bit.
        branch_BxTxD = self.attention(self.attention_norm(x_BxTxD))
        x_BxTxD = torch.add(x_BxTxD, branch_BxTxD, alpha=self.residual_multiplier)
        branch_BxTxD = self.mlp(self.mlp_norm(x_BxTxD))
        return torch.add(x_BxTxD, branch_BxTxD, alpha=self.residual_multiplier)


# One for the bias; the others are zeros, so that rows stay a multiple of 16 bytes in bf16: matrix
# products on a GPU are far slower otherwise.
BIAS_COLUMNS = 8


def with_bias_columns(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x' (N, D + 8) and weight' (V, D + 8) with x' @ weight'.T = x @ weight.T + bias.

    For a loss that forms its logits from a matrix alone. x (N, D), weight (V, D), bias (V).
    """
    pad = (0, BIAS_COLUMNS - 1)
    ones = F.pad(x.new_ones(len(x), 1), pad)
    return torch.cat([x, ones], 1), torch.cat([weight, F.pad(bias[:, None], pad)], 1)


class Decoder(nn.Module):
    """A decoder-only language model of `layers` blocks.

    Has L (4 D^2 + 2 D F) + 2 V D + T D parameters, (2L + 1) D more with `norm_scale`, V more with
    `readout_bias` and V D less if `tied`. Without `norms` nothing is normalised.
    The plan sets `attention_scale`, `residual_multiplier` and the `logit_multiplier` of a tie.
    The loss never holds all logits at once.
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
        attention_scale: float = math.nan,
        residual_multiplier: float = math.nan,
        norm_scale: bool = True,
        readout_bias: bool = False,
        norms: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        width = heads * head_dim
        norm = functools.partial(layer_norm, scale=norm_scale) if norms else no_norm
        self.token_embedding = Embedding(vocab_size, width)
        self.position_embedding = Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp_ratio * width, attention_scale, residual_multiplier, norm)
            for _ in range(layers)
        )
        self.final_norm = norm(width)
        self.readout = (
            TiedReadout(self.token_embedding)
            if tied
            else Linear(width, vocab_size, bias=readout_bias)
        )

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
        x, weight = x_BxTxD.flatten(0, 1), self.readout.weight
        if self.readout.bias is not None:
            x, weight = with_bias_columns(x, weight, self.readout.bias)
        tied = isinstance(self.readout, TiedReadout)
        factor = self.readout.logit_multiplier if tied else self.readout.multiplier
        return linear_cross_entropy(x, weight, targets_BxT.flatten(), factor)


# The role of every tensor.
RULES = (
    Rule("token_embedding.weight", Role.TOKEN_EMBEDDING),
    Rule("position_embedding.weight", Role.POSITION_EMBEDDING),
    Rule("blocks.*.attention.query.weight", Role.QUERY),
    Rule("blocks.*.attention.key.weight", Role.KEY),
    Rule("blocks.*.attention.value.weight", Role.VALUE),
    Rule("blocks.*.attention.output.weight", Role.ATTENTION_OUTPUT),
    Rule("blocks.*.mlp.up.weight", Role.MLP_IN),
    Rule("blocks.*.mlp.down.weight", Role.MLP_OUT),
    Rule("*norm.weight", Role.NORM_SCALE),
    Rule("readout.weight", Role.READOUT),
)
# The same for a prescription with a rule for the depth, which the last norm is not subject to.
DEEP_RULES = (
    *(rule for rule in RULES if rule.role is not Role.NORM_SCALE),
    Rule("blocks.*norm.weight", Role.NORM_SCALE),
    Rule("final_norm.weight", Role.FINAL_NORM_SCALE),
)
