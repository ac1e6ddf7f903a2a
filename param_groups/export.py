"""A plan as the multipliers by regular expression that torchtitan and NeMo Automodel read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from param_groups.roles import PlanError, choose

if TYPE_CHECKING:
    from param_groups.plan import Plan, Row

# Keys of torchtitan's optimizer.param_groups and NeMo Automodel's optimizer.param_group_overrides,
# which multiply the global learning rate and weight decay where `pattern` is found in the name.
KEYS = {
    "torchtitan": ("pattern", "lr_multiplier", "weight_decay_multiplier"),
    "nemo": ("pattern", "lr_mult", "wd_mult"),
}


def export(plan: Plan, trainer: str) -> list[dict[str, object]]:
    """One entry per learning rate and decay; the trainer's own rate is the plan's `lr`.

    Its own decay is to be the plan's `weight_decay`. Both read nothing else, so PlanError for
    forward multipliers and factors, and for epsilons that differ.
    """
    names = KEYS[choose("trainer", trainer, KEYS)]
    for row in plan.rows:
        if row.multiplier != 1.0:
            raise PlanError(
                f"{trainer} cannot multiply {row.name!r} by {row.multiplier:g}; plan with "
                "absorb_multipliers=True"
            )
        if row.eps != plan.eps:
            raise PlanError(
                f"{trainer} has one epsilon, but {row.name!r} has {row.eps:g} and the plan "
                f"{plan.eps:g}; take a parameterisation without multipliers, or an epsilon of 0"
            )
    if plan.forward:
        raise PlanError(
            f"{trainer} does not apply {plan.forward[0]}; export a plan without factors"
        )
    if plan.lr == 0:
        raise PlanError("a learning rate of 0 has no multipliers")
    groups: dict[tuple[float, float], list[Row]] = {}
    for row in plan.rows:
        decay = row.weight_decay / plan.weight_decay if plan.weight_decay else 1.0
        groups.setdefault((row.lr / plan.lr, decay), []).append(row)
    entries = [(_expression(rows), rate, decay) for (rate, decay), rows in groups.items()]
    for row in plan.rows:
        if sum(re.search(entry[0], row.name) is not None for entry in entries) != 1:
            raise PlanError(f"{row.name!r} has other numbers than the same tensor of another block")
    return [dict(zip(names, entry, strict=True)) for entry in entries]


def _expression(rows: Sequence[Row]) -> str:
    """Matches the names of these rows, any block number where a name has one, and nothing else."""
    patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", row.name) for row in rows)
    return "^(" + "|".join(re.escape(p).replace(r"\.N\.", r"\.\d+\.") for p in patterns) + ")$"
