"""The learning-rate schedule of a run: one factor in [0, 1] on every group's own peak rate.

`factor` is param_groups', a pure function of the number of optimiser steps already taken. Floors
are fractions of the peak, so neither the ratio between two groups' rates nor that between their
decays ever changes. A learning rate lr_min quoted beside a peak lr is floor = lr_min / lr.
"""

from __future__ import annotations

from typing import Any, Protocol

from param_groups.schedules import SHAPES, factor
from training.errors import UserError

__all__ = ["SHAPES", "HasGroups", "ScheduleError", "factor", "set_lr"]


class ScheduleError(UserError):
    """A schedule cannot be applied to an optimiser."""


class HasGroups(Protocol):
    """Anything with torch's parameter groups: an optimiser, or a wrapper around one."""

    param_groups: list[dict[str, Any]]


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
