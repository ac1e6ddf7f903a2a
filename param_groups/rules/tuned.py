"""A recipe that works at one size, as a prescription around the rule that carries it to others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from param_groups.prescription import Forward, Size, Tensor
from param_groups.quantities import CONSTANT, NORMAL, Numbers, check_positive, finite
from param_groups.roles import Layout, PlanError, Role, Rule, assign, choose
from param_groups.rules.wrappers import Compared

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Tuned(Compared):
    """A recipe that works at one size, carried to others: nothing changes at the base size.

    Every number of the rule is divided by its value at the base size, so that there rates,
    epsilons, decays and initial values are the recipe's own, to the bit. Elsewhere each is the
    recipe's times the rule's power of the size, as users of mup know it. Multipliers are 1 at the
    base size. With `plan(absorb_multipliers=True)` any model takes them.

    Args:
        rule: the prescription at the model's size, such as Everett("mup", 1024, 256).
        init: standard deviation of each role's initial values at the base size, as `initial_stds`
            reads them from a freshly built base model; norms start at 1, biases at 0.
        base_head_dim: head dimension of the base model where the model has another; attention then
            is base_head_dim^(-1/2) (head_dim / base_head_dim)^p, p the rule's power.
        base_width: of a rule without one.

    Raises:
        PlanError: a name that is no role, a size that is negative; from a call, a role without an
            initial size.

    Source: Yang et al. 2022, "Tensor Programs V", App. B; the powers are the rule's.

    >>> from param_groups import Everett
    >>> wide = Tuned(Everett("mup", 1024, 256), init={"query": 0.02})(Tensor("query", 1024, 1024))
    >>> wide.init_std, wide.lr
    (0.01, 0.25)
    """

    init: Mapping[str, float]
    base_head_dim: int | None = None
    described = {"init": "initial"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_head_dim is not None:
            check_positive("Tuned", base_head_dim=self.base_head_dim)
        for role, std in self.init.items():
            choose("role", role, map(str, Role))
            if not (finite(std) and std >= 0):
                raise PlanError(f"Tuned: init of {role} must be finite and not negative: {std!r}")

    def __call__(self, tensor: Tensor) -> Numbers:
        """The rule's numbers over those at the base size, and the recipe's initial size."""
        numbers, role = self.relative(tensor), tensor.role
        if role.facts.layout is Layout.VECTOR:
            mean = 1.0 / numbers.multiplier if role.facts.start == "one" else 0.0
            return replace(numbers, init_mean=mean, init_std=0.0, init_distribution=CONSTANT)
        if role not in self.init:
            raise PlanError(f"Tuned: init has no {role}; give its standard deviation at the base")
        std, power = self.init[role], numbers.init_std
        if std and not power:
            if role.facts.kind != "logits":  # to which the width does nothing
                raise PlanError(
                    f"Tuned: {self.rule.form} starts {tensor} at 0, which has no power of the size "
                    f"for init {std:g}; give init 0, or a rule that draws it"
                )
            power = 1.0
        distribution = NORMAL if std * power > 0 else CONSTANT
        return replace(numbers, init_std=std * power, init_mean=0.0, init_distribution=distribution)

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """Every number over that at the base size; 0 where both are."""
        there = vars(self.rule.relative(self.at_base(tensor)))
        shares: dict[str, Any] = {}
        for key in ("init_std", "multiplier", "lr", "eps", "decay"):
            here = vars(numbers)[key]
            if here and not there[key]:
                raise PlanError(
                    f"Tuned: {self.rule.form} gives {tensor} the {key} 0 at the base size and "
                    f"{here:g} here, which no power of the size joins"
                )
            shares[key] = here / there[key] if here else 0.0
        return replace(numbers, **shares)

    def forward(self, size: Size | None = None) -> Forward:
        """Factors over those at the base size; attention as said above."""
        here, there = self.rule.forward(size or self.size), self.rule.forward(self.there)
        relative = here._replace(
            residual_multiplier=here.residual_multiplier / there.residual_multiplier,
            logit_multiplier=here.logit_multiplier / there.logit_multiplier,
        )
        if self.base_head_dim is None:
            return relative._replace(attention=-0.5, constant=1.0)
        return relative._replace(constant=self.base_head_dim ** (-0.5 - here.attention))


def initial_stds(model: nn.Module, rules: Sequence[Rule]) -> dict[str, float]:
    """The standard deviation of each role's values in a freshly built base model, for `Tuned`.

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
    drawn: dict[Role, list[tuple[str, float, int]]] = {}  # (name, mean square, entries)
    closed: set[str] = set()
    for one in assign(model, rules):
        if one.role.facts.layout is Layout.VECTOR:
            continue
        if one.keep or not one.scale:  # as built, and closed: no draw has a size
            closed.add(str(one.role))
            continue
        square = float(one.parameter.detach().double().square().mean())
        drawn.setdefault(one.role, []).append((one.name, square, one.parameter.numel()))
    stds = dict.fromkeys(closed, 0.0)
    for role, tensors in drawn.items():
        first, known, n = tensors[0]
        for name, square, m in tensors[1:]:
            # n normal draws tell their standard deviation to 1/sqrt(2n): four such errors.
            chance = 1.15 * math.exp(4 * math.sqrt((1 / n + 1 / m) / 2))
            low, high = sorted((square**0.5, known**0.5))
            if high > chance * low + 1e-12:
                raise PlanError(
                    f"{first!r} starts with standard deviation {known**0.5:.3g}, {name!r} of the "
                    f"same role with {square**0.5:.3g}: give Tuned(init=...) by hand"
                )
        entries = sum(m for *_, m in tensors)
        stds[str(role)] = math.sqrt(sum(square * m for _, square, m in tensors) / entries)
    return stds | {str(part): stds[str(role)] for role in drawn for part in role.parts}
