"""Schedules that keep the ratios between a plan's learning rates, and a guard for those of others.

Every group's rate is the plan's times one factor of the step. A scheduler that sets absolute rates
(a floor, a maximum or a rate at the start of warm-up) makes all groups the same and loses the plan.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from param_groups.families import OPTIMIZER_FAMILY, exponent_optimizer
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

    To resume, make it before the states are loaded, the optimiser's and then its own.

    Args:
        optimizer: over the groups of a plan, or any other; one that has not stepped.
        shape: "cosine", "linear" or "constant".
        total_steps: optimiser steps of the run.
        warmup_steps: the first of them, in which the factor grows from 0.
        floor: what is left at the end, as a fraction of each group's own rate.

    Returns:
        A LambdaLR, to be stepped once per optimiser step.

    Raises:
        PlanError: an unknown shape, a floor outside [0, 1], a run of no steps, a warm-up that is
            negative or longer than the run, an optimiser that has stepped or holds a loaded state;
            later, a state that is loaded and has other rates than the optimiser's groups.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    >>> schedule(sgd, "linear", total_steps=10, warmup_steps=2).get_last_lr()
    [0.0]
    """
    from torch.optim.lr_scheduler import LambdaLR

    choose("shape", shape, SHAPES)
    if not (isinstance(floor, Real) and 0 <= floor <= 1):
        raise PlanError(f"floor is a fraction of each group's rate, in [0, 1], got {floor!r}")
    if not (isinstance(total_steps, Real) and total_steps > 0):
        raise PlanError(f"total_steps must be a number above 0, got {total_steps!r}")
    if not (isinstance(warmup_steps, Real) and 0 <= warmup_steps <= total_steps):
        raise PlanError(f"warmup_steps must lie in [0, {total_steps}], got {warmup_steps!r}")
    under_way = any(optimizer.state.values()) or any(
        group["lr"] not in (0, group.get("initial_lr", group["lr"]))
        for group in optimizer.param_groups
    )
    if under_way:  # a schedule begins with the first factor, which is 0 in a warm-up
        raise PlanError(
            "the optimiser has stepped, or its state was loaded: make the schedule first, then "
            "load the optimiser's state and the schedule's; a new run needs a new optimiser"
        )

    class Schedule(LambdaLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            _same_rates("schedule's base_lrs", state_dict["base_lrs"], self.base_lrs)
            super().load_state_dict(state_dict)

    def compare(made: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        saved, own = state["param_groups"], made.param_groups
        for one, other in zip(saved, own, strict=False):  # torch compares their numbers
            if one.get("param_names", other.get("param_names")) != other.get("param_names"):
                raise PlanError(
                    "the optimiser's state has its tensors in other groups than the optimiser, and "
                    "torch would give them each other's moments: load it under the plan it is from"
                )
        rates = ([group.get("initial_lr") for group in groups] for groups in (saved, own))
        _same_rates("optimiser's initial_lr", *rates)

    settings = {"warmup_steps": warmup_steps, "total_steps": total_steps}
    made = Schedule(optimizer, lambda step: factor(shape, step, **settings, floor=floor))
    # accelerate's is a shell around torch's.
    getattr(optimizer, "optimizer", optimizer).register_load_state_dict_pre_hook(compare)
    return made


_OTHER_PLAN = (
    "the state is of another plan, whose rates would be trained with; to keep its moments, write "
    "the new groups' lr and initial_lr into its param_groups, and base_lrs into a schedule's "
    "state, before load_state_dict"
)


def _same_rates(of: str, saved: Sequence[Any], own: Sequence[Any]) -> None:
    for old, new in zip(saved, own, strict=False):
        if old is None or not math.isclose(old, new, rel_tol=1e-6):
            raise PlanError(f"the saved {of} is {old}, this one's {new}: {_OTHER_PLAN}")


def guard(optimizer: torch.optim.Optimizer, plan: Plan) -> RemovableHandle:
    """Watches that the optimiser's rates are the plan's, times one factor for all groups.

    Schedulers with absolute rates, an old state and a keyword that the groups' own numbers
    override make them others.

    Args:
        optimizer: over the plan's groups; call this after the scheduler is made.
        plan: whose ratios are to hold.

    Returns:
        A handle, whose `.remove()` ends it.

    Raises:
        PlanError: now or before a step, once ratios differ or the rates that a schedule multiplies
            are not the plan's; at once for one of torch's optimisers that no exponents describe, or
            whose updates scale otherwise than the plan's, and for a keyword that acts on no group.

    >>> import torch, param_groups
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9, bias=False))
    >>> rules = [param_groups.Rule("0.weight", "token_embedding")]
    >>> rules += [param_groups.Rule("1.weight", "readout")]
    >>> mup = param_groups.Everett("mup", 8, 4)
    >>> numbers = param_groups.plan(model, rules, mup, lr=0.1, absorb_multipliers=True)
    >>> numbers.initialise(model, seed=0)
    >>> adam = torch.optim.AdamW(numbers.groups(model))
    >>> handle = param_groups.guard(adam, numbers)
    >>> adam.param_groups[0]["lr"] = 0.01
    >>> adam.step()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    param_groups.roles.PlanError: the scheduler has changed the ratios between groups: ...
    """
    if not (isinstance(plan, Plan) and hasattr(optimizer, "register_step_pre_hook")):
        got = f"{type(optimizer).__name__} and {type(plan).__name__}"
        raise PlanError(f"guard takes a torch optimiser and a plan, got {got}")
    _check_kind(optimizer, plan)
    _check_keywords(getattr(optimizer, "optimizer", optimizer), plan)
    rates = {name: row.lr for row in plan.rows for name in (row.name, *row.tied_to)}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factors: dict[str, float] = {}
        for group in optimizer.param_groups:
            names = group.get("param_names")
            if not names or names[0] not in rates:
                raise PlanError(
                    f"a parameter group holds {names[0] if names else 'no names'!r}, which the "
                    "plan does not know: take groups from the plan"
                )
            factors |= {name: group["lr"] / rates[name] for name in names if rates[name] > 0}
        first = next(iter(factors), None)
        for name, factor in factors.items():
            same = math.isclose(factor, factors[str(first)], rel_tol=1e-6)
            if not (same and 0 <= factor < math.inf):
                raise PlanError(
                    f"the scheduler has changed the ratios between groups: {first!r} has "
                    f"{factors[str(first)]:.4g} of the plan's rate, {name!r} {factor:.4g}; it sets "
                    "absolute rates, use param_groups.schedule or a LambdaLR"
                )
        for group in optimizer.param_groups:
            # OneCycleLR's initial_lr is where its warm-up begins, and max_lr what it multiplies.
            peak = group.get("max_lr", group.get("initial_lr"))
            for name in group["param_names"]:
                if peak is None or not math.isclose(peak, rates[name], rel_tol=1e-6):
                    raise PlanError(
                        f"{name!r} has the initial_lr {peak}, the plan {rates[name]}: {_OTHER_PLAN}"
                    )

    check(optimizer)
    return optimizer.register_step_pre_hook(check)


def _check_keywords(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses a number that was given to the optimiser and that every group overrides, unless it
    is the plan's global number."""
    usual = inspect.signature(type(optimizer).__init__).parameters
    said = {"lr": plan.lr, "eps": plan.eps, "weight_decay": plan.weight_decay}
    for key, value in optimizer.defaults.items():
        held = [group.get("initial_lr" if key == "lr" else key) for group in optimizer.param_groups]
        taken = key in usual and value != usual[key].default
        if taken and value not in (*held, said.get(key)):
            raise PlanError(
                f"{key}={value} of {type(optimizer).__name__} acts on no group, as the plan gives "
                f"each its own: leave it out, and give it to plan({key}=...) if it is meant"
            )


def _check_kind(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Refuses what is known to be wrong; classes of other libraries are taken as they are."""
    kind = type(optimizer)
    name = f"torch.optim.{kind.__name__}"
    if not kind.__module__.startswith("torch.optim"):
        return
    exponent_optimizer(name if kind.__name__ in ("Adafactor", "Muon") else kind.__name__)
    families = {"Adam": "adam", "AdamW": "adam", "NAdam": "adam", "RAdam": "adam", "SGD": "sgd"}
    family = families.get(kind.__name__)
    planned = exponent_optimizer(str(plan.prescription.get("optimizer")))
    if family is not None and OPTIMIZER_FAMILY.get(planned, family) != family:
        raise PlanError(
            f"the plan is for optimizer {planned!r}, but {name} is of the family {family!r}, whose "
            f"rates have other powers of the width: give the prescription optimizer={family!r}, or "
            f"train with {planned!r}"
        )
    for group in optimizer.param_groups:
        coupled = not group.get("decoupled_weight_decay", kind.__name__ == "AdamW")
        # Without momentum SGD's two kinds of decay are one.
        if coupled and group["weight_decay"] and (family == "adam" or group.get("momentum")):
            raise PlanError(
                f"{name} adds weight_decay to the gradients, so a step does not remove the plan's "
                "fraction of a tensor: use an optimiser with decoupled decay (torch.optim.AdamW, "
                "timm's SGDW), or plan with weight_decay=0"
            )
