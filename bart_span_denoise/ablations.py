"""A strategy of Dinan et al. with the C_WE or N_rescale of another: what does each of them do?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from param_groups import Dinan, Forward, Numbers, Role, Size, Tensor


@dataclass(frozen=True)
class Ablated(Dinan):
    """`Dinan` for BART with what it gives the word embedding and the logits exchanged.

    `c_we` is the variance C_WE that word embeddings start from, `rescale` says whether logits are
    multiplied by N_rescale = n^(-(1+s)/2), (1.34) (s = 0 for the standard strategy), or by 1; None
    is the strategy's own. Rates stay the strategy's.
    """

    c_we: float | None = None
    rescale: bool | None = None

    def __call__(self, tensor: Tensor) -> Numbers:
        """The strategy's, but for the word embedding's initial deviation sqrt(C_WE)."""
        numbers = super().__call__(tensor)
        if tensor.role is not Role.TOKEN_EMBEDDING or self.c_we is None:
            return numbers
        return replace(numbers, init_std=math.sqrt(self.c_we))

    def forward(self, size: Size | None = None) -> Forward:
        """N_rescale, as `rescale` has it."""
        n, s = (size or self.size).width, self.exponent_s or 0.0
        if self.rescale is None:
            return super().forward(size)
        return Forward(logit_multiplier=float(n ** (-(1 + s) / 2)) if self.rescale else 1.0)
