"""Schedules that keep the ratios between a plan's learning rates, and a guard for those of others.

Every group's rate is the plan's times one factor of the step. A scheduler that sets absolute rates
(a floor, a maximum or a rate at the start of warm-up) makes all groups the same and loses the plan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from param_groups.contract import exponent_optimizer
from param_groups.plan import Plan
from param_groups.roles import PlanError, choose

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.hooks import RemovableHandle

SHAPES = ("cosine", "linear", "constant")


def factor(
    shape: str, step: int, *, warmup_steps: int, total_steps: int, floor: float = 0.0
) -> float:
    """The factor on every group's rate for the update that follows `step` earlier ones (first: 0).

    step / warmup_steps during warm-up, so the first update has rate 0 unless warmup_steps is 0;
    then with x = (step - warmup_steps) / (total_steps - warmup_steps), at most 1:

        cosine     floor + (1 - floor) * (1 + cos(pi * x)) / 2
        linear     floor + (1 - floor) * (1 - x)
        constant   1, whatever floor is
    """
    if step < warmup_steps:
        return step / warmup_steps
    if shape == "constant":
        return 1.0
    if step >= total_steps:
        return float(floor)
    x = (step - warmup_steps) / (total_steps - warmup_steps)
    left = (1 + math.cos(math.pi * x)) / 2 if shape == "cosine" else 1 - x
    return floor + (1 - floor) * left


def schedule(
    optimizer: torch.optim.Optimizer,
    shape: str = "cosine",
    *,
    total_steps: int,
    warmup_steps: int = 0,
    floor: float = 0.0,
) -> LambdaLR:
    """A torch scheduler that multiplies every group's rate by `factor` of its arguments.

    `floor` is a fraction of each group's own rate. Raises PlanError for an unknown shape, a floor
    outside [0, 1] and a warm-up that is negative or longer than the run.
    """
    from torch.optim.lr_scheduler import LambdaLR

    choose("shape", shape, SHAPES)
    if not 0 <= floor <= 1:
        raise PlanError(f"floor is a fraction of each group's rate, in [0, 1], got {floor!r}")
    if not 0 <= warmup_steps <= total_steps:
        raise PlanError(f"warmup_steps must lie in [0, {total_steps}], got {warmup_steps!r}")
    settings = {"warmup_steps": warmup_steps, "total_steps": total_steps}
    return LambdaLR(optimizer, lambda step: factor(shape, step, **settings, floor=floor))


def guard(optimizer: torch.optim.Optimizer, plan: Plan) -> RemovableHandle:
    """Raises PlanError now, or before a later step, once rates are not the plan's times one factor.

    Call it after the scheduler is made; `.remove()` of what it returns ends it. An optimiser whose
    updates no exponents describe is refused by name, torch.optim.Adafactor among them.
    """
    import torch

    known = isinstance(optimizer, torch.optim.Adafactor)
    exponent_optimizer("torch.optim.Adafactor" if known else type(optimizer).__name__)

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factors: list[tuple[str, float]] = []
        for group in optimizer.param_groups:
            if not group.get("param_names"):
                raise PlanError("a parameter group has no param_names: take groups from the plan")
            rates = {name: plan[name].lr for name in group["param_names"]}
            factors += [(name, group["lr"] / lr) for name, lr in rates.items() if lr > 0]
        for name, factor in factors:
            first, expected = factors[0]
            if not math.isclose(factor, expected, rel_tol=1e-6):
                raise PlanError(
                    f"the scheduler has changed the ratios between groups: {first!r} has "
                    f"{expected:.4g} of the plan's rate, {name!r} {factor:.4g}; it sets absolute "
                    "rates, use param_groups.schedule or a LambdaLR"
                )

    check(optimizer)
    return optimizer.register_step_pre_hook(check)
