"""How fresh tensors start, where that is not how their roles do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from param_groups.model.judging import Reading
from param_groups.model.notes import Notes
from param_groups.roles import Role, Rule

_STARTS = {"one": 1.0, "zero": 0.0}


def read_starts(
    readings: Sequence[Reading],
    small: Notes,
    large: Notes,
    again: Mapping[str, Tensor],
    draw: Sequence[str],
) -> None:
    """Compares fresh tensors with the starts of their roles.

    A constant becomes the rule's scale where the role can start there; what else is no noise about
    the role's start is kept as built. `again` is the small model of another seed: what is in both
    alike was set on purpose, unless the model seeds itself.
    """
    alike = {name for name, start in small.starts.items() if torch.equal(start, again[name])}
    alike = set() if len(alike) == len(again) else alike
    rules = [Rule(pattern, Role.HIDDEN) for pattern in draw]
    for reading in readings:
        start = large.starts[reading.name]
        if reading.role is not None and start.is_floating_point() and start.numel():
            _read(reading, small, large, fixed=reading.name in alike)
            if reading.start and any(rule.matches(reading.name) for rule in rules):
                reading.keep, reading.scale = False, 1.0
                reading.start += ", to be drawn"


def _read(reading: Reading, small: Notes, large: Notes, fixed: bool) -> None:
    name, start = reading.name, large.starts[reading.name].float()
    constant = name in large.constant and (start.numel() > 1 or fixed)
    level, before = float(start.flatten()[0]), float(small.starts[name].flatten()[0])
    usual = _STARTS.get(reading.role.facts.start) if reading.role else None
    noise = not constant and not fixed
    if usual is None and noise:
        return
    if usual is not None:
        error = float(start.std()) / start.numel() ** 0.5 if start.numel() > 1 else 0.0
        about = abs(float(start.mean()) - usual) <= 4 * error  # as nn.Linear draws its bias
        if (constant and level == usual) or (noise and about):
            return
    steady = constant and name in small.constant and level == before
    reading.keep = not (steady and (level == 0 or (usual == 1 and level > 0)))
    reading.scale = 1.0 if reading.keep else float(f"{level:.7g}")
    between = f"starts between {float(start.min()):.2g} and {float(start.max()):.2g}"
    reading.start = f"starts at {level:.7g}" if constant else between
