"""Bordelon, Chaudhry & Pehlevan 2024: heads, head dimension and depth, for SGD and Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from param_groups.families import of_families
from param_groups.prescription import Forward, Prescription, Size, Tensor
from param_groups.quantities import (
    CONSTANT,
    NORMAL,
    Numbers,
    check_flag,
    check_limits,
    check_positive,
    check_sizes,
)
from param_groups.roles import PlanError, Role


@dataclass(frozen=True)
class Bordelon(Prescription):
    """Bordelon, Chaudhry & Pehlevan 2024: N head dimension, H heads, L depth; width n = N H.

    Block weights have unit-variance entries and multiplier fan_in^(-1/2); queries and keys have
    std N^(1 - alpha_attention) and multiplier H^(-1/2) N^(alpha_attention - 3/2), so q and k
    start at order one. Rates: SGD gamma0^2 n L^(2 alpha_depth - 1), Adam n^(-1/2)
    L^(alpha_depth - 1). First layer: multiplier beta0^(1/2) L^(1/2 - alpha_depth) for SGD, sqrt(n)
    L^(1 - alpha_depth) for Adam, std its inverse; the readout has the same divided by gamma0 n.
    Norms have no parameters.

    Args:
        head_dim: N.
        heads: H; the width is N H.
        depth: L, residual blocks.
        optimizer: one of the families "sgd" and "adam".
        alpha_attention: query-key products are multiplied by N^(-alpha_attention), in [1/2, 1].
        alpha_depth: branches are multiplied by beta0 L^(-alpha_depth), in [1/2, 1].
        beta0: the constant on branches.
        gamma0: how much features move; gamma0^2 in SGD's rate keeps the change of the output at 1.
        zero_readout: whether the readout starts at zero, as in the paper's language model.

    Raises:
        PlanError: a size or constant outside of these, and from a call, for a role that the paper's
            models lack.

    Source: Tables 1 and 2 and App. C; signs and roots lost in print follow the listings of App. B.

    >>> Bordelon(head_dim=16, heads=4, depth=4)(Tensor("value", 64, 64)).lr
    0.125
    """

    head_dim: int
    heads: int
    depth: int
    optimizer: str = "adam"
    alpha_attention: float = 1.0
    alpha_depth: float = 1.0
    beta0: float = 1.0
    gamma0: float = 1.0
    zero_readout: bool = False
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.settle(of_families("sgd", "adam"))
        check_flag("Bordelon: zero_readout", self.zero_readout)
        check_sizes("Bordelon", head_dim=self.head_dim, heads=self.heads, depth=self.depth)
        check_positive("Bordelon", beta0=self.beta0, gamma0=self.gamma0)
        check_limits("Bordelon", alpha_attention=self.alpha_attention, alpha_depth=self.alpha_depth)
        object.__setattr__(self, "width", self.head_dim * self.heads)

    @property
    def lr_factor(self) -> float:
        """The factor on eta_0, the same for every tensor."""
        if self.optimizer == "sgd":
            return float(self.gamma0**2 * self.width * self.depth ** (2 * self.alpha_depth - 1))
        return float(self.width**-0.5 * self.depth ** (self.alpha_depth - 1))

    @property
    def first_multiplier(self) -> float:
        """The multiplier of embedding and positions; their std is its inverse."""
        if self.optimizer == "sgd":
            # The paper lists (L/beta0)^(1/2 - alpha_depth), at alpha_depth = 1 alone. A single
            # block's branch is multiplied by beta0 whatever alpha_depth is, so at L = 1 nothing may
            # depend on it: the power of beta0 is 1/2 throughout.
            listed = (self.depth / self.beta0) ** (0.5 - self.alpha_depth)
            return float(listed * self.beta0 ** (1 - self.alpha_depth))
        return float(math.sqrt(self.width) * self.depth ** (1 - self.alpha_depth))

    @property
    def size(self) -> Size:
        """Width and number of blocks."""
        return Size(self.width, self.depth)

    def _resized(self, size: Size | None) -> Bordelon:
        """The rule at another size: more heads of one dimension, and more blocks."""
        if size is None or size == self.size:
            return self
        depth = self.depth if size.depth is None else round(size.depth)
        return replace(self, heads=max(round(size.width / self.head_dim), 1), depth=depth)

    def __call__(self, tensor: Tensor) -> Numbers:
        """std and multiplier per role; PlanError for roles the paper's models lack."""
        rule = self._resized(tensor.size)
        std, multiplier = rule._scales(tensor.role, tensor.fan_in)
        distribution = NORMAL if std > 0 else CONSTANT
        return Numbers(std, distribution, multiplier=multiplier, lr=rule.lr_factor)

    def forward(self, size: Size | None = None) -> Forward:
        """Attention as N^(-alpha_attention), (3); branches as beta0 L^(-alpha_depth), 2.1."""
        rule = self._resized(size)
        residual = float(rule.beta0 * rule.depth**-rule.alpha_depth)
        return Forward(-self.alpha_attention, 1.0, residual, head_dim=self.head_dim)

    def _scales(self, role: Role, fan_in: int) -> tuple[float, float]:
        """(std, multiplier)."""
        first = self.first_multiplier
        if role in (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING):
            return 1 / first, first
        if role is Role.PATCH_EMBEDDING:
            return 1 / first, first * fan_in**-0.5
        if role in (Role.QUERY, Role.KEY):
            # H^(-1/2) N^(alpha - 3/2), written so that alpha = 1 is exactly the values' numbers
            spread = self.head_dim ** (1 - self.alpha_attention)
            return spread, fan_in**-0.5 / spread
        if role in (Role.VALUE, Role.ATTENTION_OUTPUT, Role.MLP_IN, Role.MLP_OUT):
            return 1.0, fan_in**-0.5
        if role in (Role.READOUT, Role.READOUT_BIAS):
            zero = self.zero_readout or role is Role.READOUT_BIAS
            return 0.0 if zero else 1 / first, first / (self.gamma0 * self.width)
        raise PlanError(
            f"Bordelon et al. prescribe nothing for {role}; build the model without it "
            "(norms without parameters, no biases inside blocks)"
        )
