"""Schedules that keep the ratios between a plan's learning rates, and a guard for those of others.

Every group's rate is the plan's times one factor of the step. A scheduler that sets absolute rates
(a floor, a maximum or a rate at the start of warm-up) makes all groups the same and loses the plan.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from numbers import Real
from typing import TYPE_CHECKING, Any

from param_groups.contract import OPTIMIZER_FAMILY, exponent_optimizer
from param_groups.plan import Plan
from param_groups.roles import PlanError, choose
from param_groups.rows import Row

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
    outside [0, 1], a run of no steps and a warm-up that is negative or longer than the run.
    """
    from torch.optim.lr_scheduler import LambdaLR

    choose("shape", shape, SHAPES)
    if not (isinstance(floor, Real) and 0 <= floor <= 1):
        raise PlanError(f"floor is a fraction of each group's rate, in [0, 1], got {floor!r}")
    if not (isinstance(total_steps, Real) and total_steps > 0):
        raise PlanError(f"total_steps must be a number above 0, got {total_steps!r}")
    if not (isinstance(warmup_steps, Real) and 0 <= warmup_steps <= total_steps):
        raise PlanError(f"warmup_steps must lie in [0, {total_steps}], got {warmup_steps!r}")
    settings = {"warmup_steps": warmup_steps, "total_steps": total_steps}
    return LambdaLR(optimizer, lambda step: factor(shape, step, **settings, floor=floor))


def guard(optimizer: torch.optim.Optimizer, plan: Plan) -> RemovableHandle:
    """Raises PlanError now, or before a later step, once the groups' numbers are not the plan's.

    Rates must be the plan's times one factor, epsilon and weight decay the plan's, and every group
    must hold the tensors that it held at first: load_state_dict takes all of these but the tensors
    from the checkpoint, by their order. Call it after the scheduler is made and before a checkpoint
    is loaded; `.remove()` of what it returns ends it. Refused at once: an optimiser whose updates
    no exponents describe, by name, torch.optim.Adafactor among them; one of torch's whose updates
    scale otherwise than those that the plan is for; and weight decay where one of torch's adds it
    to the gradients.
    """
    _check_kind(optimizer, plan)
    rows = {name: row for row in plan.rows for name in (row.name, *row.tied_to)}
    # Of each group its tensors, and the rows that differ. By position, which outlasts both what
    # load_state_dict does to a group and tensors that a trainer replaces by sharded ones.
    groups: list[tuple[list[str], list[Row]]] = []

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups[len(groups) :]:  # all, or one added later
            groups.append(_names_and_rows(group, rows))
        factors: list[tuple[str, float]] = []
        for (names, wanted), group in zip(groups, optimizer.param_groups, strict=True):
            found = [*group.get("param_names", names)]
            if found != names:
                one, other = next(pair for pair in zip_longest(names, found) if len({*pair}) > 1)
                raise PlanError(
                    f"the group of {one!r} now says that it holds {other!r}: a checkpoint was "
                    "loaded that has the tensors in another order, so each has the moments and the "
                    "numbers of another; load it into a model that registers them in its order"
                )
            for row in wanted:
                for key in ("eps", "weight_decay"):
                    value, planned = group.get(key, getattr(row, key)), getattr(row, key)
                    if value != planned and not (
                        isinstance(value, Real) and math.isclose(value, planned, rel_tol=1e-6)
                    ):
                        raise PlanError(
                            f"{row.name!r} has {key} {value!r}, the plan {planned!r}: a schedule "
                            "changed it, or a checkpoint, which brings what it was saved with: set "
                            "the group's again after load_state_dict, or plan with the old ones"
                        )
                if row.lr > 0:
                    factors.append((row.name, group["lr"] / row.lr))
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


def _check_kind(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses what is known to be wrong; classes of other libraries are taken as they are."""
    import torch

    if not (isinstance(optimizer, torch.optim.Optimizer) and isinstance(plan, Plan)):
        raise PlanError(
            f"guard takes a torch optimiser and a plan, got {type(optimizer).__name__} and "
            f"{type(plan).__name__}"
        )
    kind = type(optimizer)
    name = f"torch.optim.{kind.__name__}"
    exponent_optimizer(name if isinstance(optimizer, torch.optim.Adafactor) else kind.__name__)
    adams = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)
    families = {**dict.fromkeys((*adams, torch.optim.AdamW), "adam"), torch.optim.SGD: "sgd"}
    family = families.get(kind)
    planned = exponent_optimizer(str(plan.prescription.get("optimizer")))
    if family is not None and OPTIMIZER_FAMILY.get(planned, family) != family:
        raise PlanError(
            f"the plan is for optimizer {planned!r}, but {name} is of the family {family!r}, whose "
            f"rates have other powers of the width: give the prescription optimizer={family!r}, or "
            f"train with {planned!r}"
        )
    for group in optimizer.param_groups:
        coupled = (kind in adams and not group.get("decoupled_weight_decay", False)) or (
            kind is torch.optim.SGD and group["momentum"] != 0  # without it, both decays are one
        )
        if coupled and group["weight_decay"]:
            raise PlanError(
                f"{name} adds weight_decay to the gradients, so a step does not remove the plan's "
                "fraction of a tensor: use an optimiser with decoupled decay (torch.optim.AdamW, "
                "timm's SGDW), or plan with weight_decay=0"
            )


def _names_and_rows(group: dict[str, Any], rows: dict[str, Row]) -> tuple[list[str], list[Row]]:
    """A group's tensors, and one row for each (rate, epsilon, decay) that the plan gives them."""
    names = [*group.get("param_names", ())]
    if not names:
        raise PlanError("a parameter group has no param_names: take groups from the plan")
    if other := [name for name in names if name not in rows]:
        raise PlanError(f"the plan is for another model: it has no tensor {other[0]!r}")
    if len(names) != len(group["params"]):
        raise PlanError(
            f"a parameter group has {len(group['params'])} tensors and {len(names)} param_names: "
            "take groups from the plan"
        )
    distinct: dict[tuple[float, float, float], Row] = {}
    for row in (rows[name] for name in names):
        distinct.setdefault((row.lr, row.eps, row.weight_decay), row)
    return names, list(distinct.values())
