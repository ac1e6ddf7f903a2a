"""Layers with a forward multiplier, the n^(-a) of a parameterisation.

The plan sets `multiplier`; 1 leaves torch's layers as they are.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class Multiplied(nn.Module):
    """A layer that multiplies what its tensors do by `multiplier`; derive your own layers from it.

    A plan sets the multiplier of these layers and of no others.
    """

    multiplier: float = 1.0


class Scaled(nn.Module):
    """A module whose forward pass applies factors of the prescription; derive your own from it.

    `factors` names the attributes that hold them: "attention_scale", on query-key products, in a
    module that also says its `head_dim`; "residual_multiplier", on every residual branch;
    "logit_multiplier", on logits from a tied word embedding. The plan sets them.
    """

    factors: ClassVar[tuple[str, ...]] = ()


class Linear(Multiplied, nn.Linear):
    """y = m (W x + b), without a bias by default.

    The multiplier scales the weight rather than the activations: at the token counts of a training
    step the weight is the smaller of the two, and in bf16 the product is formed in float32 before
    it is rounded.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def effective_weight(self) -> torch.Tensor:
        """m W, shape (out_features, in_features)."""
        return self.weight if self.multiplier == 1.0 else self.weight * self.multiplier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) -> (..., out_features)."""
        bias = self.bias if self.bias is None else self.bias * self.multiplier
        return F.linear(x, self.effective_weight(), bias)

    def reset_parameters(self) -> None:
        """NaN until the plan initialises it: a forgotten `plan.initialise` shows at once."""
        nn.init.constant_(self.weight, math.nan)
        if self.bias is not None:
            nn.init.constant_(self.bias, math.nan)


class Embedding(Multiplied, nn.Embedding):
    """m W[ids]: one row per id."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., embedding_dim)."""
        rows = super().forward(ids)
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def reset_parameters(self) -> None:
        """NaN until the plan initialises it, as in Linear."""
        nn.init.constant_(self.weight, math.nan)


class LayerNorm(Multiplied):
    """Normalisation over the last axis with scale m w and no bias.

    `w` is allocated at 1; the plan sets it to 1/m, so the effective scale starts at 1.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., width) -> (..., width)."""
        scale = self.weight if self.multiplier == 1.0 else self.weight * self.multiplier
        return F.layer_norm(x, self.weight.shape, weight=scale, eps=self.eps)
