"""Learning-rate schedules: pure functions of the number of optimiser steps already taken.

A schedule is a factor in [0, 1] on every group's own peak rate. Floors are fractions of the peak,
so neither the ratio between two groups' rates nor that between their decays ever changes.
"""

from __future__ import annotations

from typing import Any, Protocol

from param_groups import schedules
from training.errors import UserError, nearest

SCHEDULES = schedules.SHAPES


class ScheduleError(UserError):
    """A schedule was asked for with numbers or a name that make none."""


class HasGroups(Protocol):
    """Anything with torch's parameter groups: an optimiser, or a wrapper around one."""

    param_groups: list[dict[str, Any]]


def factor(
    name: str, step: int, *, warmup_steps: int, total_steps: int, floor: float = 0.0
) -> float:
    """The factor on the peak rate for the update that follows `step` earlier ones (first: 0).

    As optax.warmup_cosine_decay_schedule with init_value 0; param_groups.schedules.factor has the
    formulas.

    The last update of a run is step = total_steps - 1, so the floor itself is reached only past
    the end. A learning rate lr_min quoted beside a peak lr is floor = lr_min / lr.

    Raises ScheduleError: an unknown name, a negative count, warmup_steps > total_steps, or a
    floor outside [0, 1].
    """
    _check(name, step, warmup_steps, total_steps, floor)
    settings = {"warmup_steps": warmup_steps, "total_steps": total_steps, "floor": floor}
    return schedules.factor(name, step, **settings)


def _check(name: str, step: int, warmup_steps: int, total_steps: int, floor: float) -> None:
    """Raises ScheduleError for what `factor` cannot use."""
    if name not in SCHEDULES:
        raise ScheduleError(
            f"unknown schedule {name!r}{nearest(name, SCHEDULES)} Known: {', '.join(SCHEDULES)}"
        )
    counts = {"step": step, "warmup_steps": warmup_steps, "total_steps": total_steps}
    for key, count in counts.items():
        if not count >= 0:
            raise ScheduleError(f"{key} must not be negative, got {count}")
    if warmup_steps > total_steps:
        raise ScheduleError(f"warmup_steps = {warmup_steps} exceeds total_steps = {total_steps}")
    if not 0 <= floor <= 1:
        raise ScheduleError(f"floor must be a fraction of the peak in [0, 1], got {floor}")


def set_lr(optimizer: HasGroups, factor: float) -> None:
    """Sets every group's lr to its initial_lr * factor, which keeps all ratios between groups.

    Raises ScheduleError, before any group is touched: a factor outside [0, 1] (a learning rate
    given in its place, say), or a group without initial_lr.
    """
    if not 0 <= factor <= 1:
        raise ScheduleError(f"the factor on the peak rates must be in [0, 1], got {factor}")
    for index, group in enumerate(optimizer.param_groups):
        if "initial_lr" not in group:
            label = repr(group["name"]) if "name" in group else index
            raise ScheduleError(f"group {label} has no 'initial_lr' to apply the schedule to")
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
