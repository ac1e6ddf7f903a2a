"""A recipe that works at one size, carried to others: nothing changes at the base size.

Every number of a prescription is divided by its value at the base size, so that there rates,
epsilons, decays and initial values are the recipe's own, to the bit. Elsewhere each is the recipe's
times the prescription's power of the size, as users of mup know it (Yang et al. 2022, App. B).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from param_groups.prescription import (
    CONSTANT,
    NORMAL,
    Numbers,
    Prescription,
    check_positive,
    finite,
)
from param_groups.roles import (
    BIASES,
    BLOCK,
    FUSED_PARTS,
    SCALES,
    PlanError,
    Role,
    Rule,
    assign,
    choose,
)

if TYPE_CHECKING:
    from torch import nn

# Which fans grow with the width; of all other roles the fan-out does.
_BOTH = {*BLOCK, Role.QKV, Role.HIDDEN}
_FAN_IN = {Role.READOUT, Role.ROUTER, Role.LORA_A}


@dataclass(frozen=True)
class Recipe(Prescription):
    """A prescription relative to itself at the base size.

    Args:
        rule: the prescription at the model's size, such as Everett("mup", 1024, 256).
        base: the same at the base size, Everett("mup", 256, 256), where the recipe was tuned.
        init: standard deviation of each role's initial values at the base size, as `initial_stds`
            reads them from a freshly built base model; norms start at 1, biases at 0.
        base_head_dim: head dimension of the base model where the model has another; attention then
            is base_head_dim^(-1/2) (head_dim / base_head_dim)^p, p the rule's power.

    Multipliers are 1 at the base size. With `plan(absorb_multipliers=True)` any model takes them.

    Raises:
        PlanError: two rules of different kinds, a role without an initial size, a size that is
            negative.

    Source: Yang et al. 2022, "Tensor Programs V", App. B; the powers are the rule's.

    >>> from param_groups import Everett
    >>> mup = [Everett("mup", width, 256) for width in (1024, 256)]
    >>> wide = Recipe(*mup, init={"query": 0.02})
    >>> wide.numbers(Role.QUERY, 1024, 1024).init_std, wide.numbers(Role.QUERY, 1024, 1024).lr
    (0.01, 0.25)
    """

    rule: Prescription
    base: Prescription
    init: Mapping[str, float]
    base_head_dim: int | None = None

    def __post_init__(self) -> None:
        if type(self.rule) is not type(self.base) or self.rule.optimizer != self.base.optimizer:
            raise PlanError(
                f"Recipe: rule and base are one rule at two sizes, got {self.rule!r:.60} and "
                f"{self.base!r:.60}"
            )
        if self.base_head_dim is not None:
            check_positive("Recipe", base_head_dim=self.base_head_dim)
        for role, std in self.init.items():
            choose("role", role, map(str, Role))
            if not (finite(std) and std >= 0):
                raise PlanError(f"Recipe: init of {role} must be finite and not negative: {std!r}")

    @property
    def width(self) -> float:  # type: ignore[override]  # the rule's
        """The rule's width."""
        return self.rule.width

    @property
    def optimizer(self) -> str:  # type: ignore[override]  # the rule's
        """The rule's optimiser."""
        return self.rule.optimizer

    @property
    def base_width(self) -> float:
        """The width at which nothing changes."""
        return self.base.width

    def numbers(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """The rule's numbers over those at the base size, and the recipe's initial size."""
        ratio = self.rule.width / self.base.width
        small_in = fan_in / ratio if role in _BOTH | _FAN_IN else fan_in
        small_out = fan_out if role in _FAN_IN else fan_out / ratio
        here = self.rule(role, fan_in, fan_out)
        there = self.base(role, max(round(small_in), 1), max(round(small_out), 1))
        relative = replace(
            here,
            multiplier=here.multiplier / there.multiplier,
            lr=here.lr / there.lr,
            eps=here.eps / there.eps,
            decay=here.decay / there.decay if there.decay else 0.0,
        )
        if role in SCALES | BIASES:
            mean = 1.0 / relative.multiplier if role in SCALES else 0.0
            return replace(relative, init_mean=mean, init_std=0.0)
        if role not in self.init:
            raise PlanError(f"Recipe: init has no {role}; give its standard deviation at the base")
        grown = here.init_std / there.init_std if there.init_std else 1.0
        std = self.init[role] * grown
        distribution = NORMAL if std > 0 else CONSTANT
        return replace(relative, init_std=std, init_mean=0.0, init_distribution=distribution)

    def scaled(self, ratio: float) -> Recipe:
        """The recipe for a tensor whose fans are `ratio` times those of a base model."""
        return replace(self, rule=self.rule.scaled(ratio))

    def outside_branches(self) -> Prescription:
        """The recipe without the depth's part."""
        rule, base = self.rule.outside_branches(), self.base.outside_branches()
        same = rule is self.rule and base is self.base
        return self if same else replace(self, rule=rule, base=base)

    def check_roles(self, roles: Collection[str]) -> None:
        """As the rule does."""
        self.rule.check_roles(roles)

    def follows_gradients(self) -> bool:
        """As the rule does."""
        return self.rule.follows_gradients()

    def attention_exponent(self) -> float:
        """-1/2, unless the base model has another head dimension: then the rule's power."""
        return -0.5 if self.base_head_dim is None else self.rule.attention_exponent()

    def attention_scale(self, head_dim: int) -> float:
        """head_dim^(-1/2), or the base's times the rule's power of the ratio."""
        if self.base_head_dim is None:
            return super().attention_scale(head_dim)
        check_positive("Recipe", head_dim=head_dim)
        grown = (head_dim / self.base_head_dim) ** self.rule.attention_exponent()
        return float(self.base_head_dim**-0.5 * grown)

    def residual_multiplier(self) -> float:
        """The rule's over that at the base size."""
        return self.rule.residual_multiplier() / self.base.residual_multiplier()

    def logit_multiplier(self) -> float:
        """The rule's over that at the base size."""
        return self.rule.logit_multiplier() / self.base.logit_multiplier()

    def describe(self) -> dict[str, object]:
        """Both rules, the initial sizes and the head dimension."""
        return {
            "name": "recipe",
            "optimizer": self.optimizer,
            "rule": self.rule.describe(),
            "base": self.base.describe(),
            "init": {str(role): std for role, std in self.init.items()},
            "base_head_dim": self.base_head_dim,
        }


def initial_stds(model: nn.Module, rules: Sequence[Rule]) -> dict[str, float]:
    """The standard deviation of each role's values in a freshly built base model, for `Recipe`.

    Args:
        model: the base model with its own initial values.
        rules: as in `plan`.

    Returns:
        {role: standard deviation}; norms and biases are left out.

    Raises:
        PlanError: tensors of one role that start with different ones: give them by hand.

    >>> from torch import nn
    >>> readout = nn.Linear(4, 2, bias=False)
    >>> _ = nn.init.constant_(readout.weight, 0.5)
    >>> initial_stds(nn.Sequential(readout), [Rule("0.weight", "readout")])
    {'readout': 0.5}
    """
    found: dict[str, tuple[str, float]] = {}
    for one in assign(model, rules):
        if one.role in SCALES | BIASES:
            continue
        std = float(one.parameter.detach().double().square().mean().sqrt())
        # Tensors are random: a thousand entries are within 10 % of their standard deviation.
        name, known = found.setdefault(str(one.role), (one.name, std))
        if not math.isclose(std, known, rel_tol=0.15, abs_tol=1e-12):
            raise PlanError(
                f"{name!r} starts with standard deviation {known:.3g}, {one.name!r} of the same "
                f"role with {std:.3g}: give Recipe(init=...) by hand"
            )
    stds = {role: std for role, (_, std) in found.items()}
    parts = {p: stds[role] for role, split in FUSED_PARTS.items() if role in stds for p in split}
    return stds | {str(part): std for part, std in parts.items()}
