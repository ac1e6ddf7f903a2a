"""Models of several widths: how much wider than in a base model each tensor is.

Where rates or epsilons undo a gradient's power of the width, all tensors need to have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from param_groups.contract import Prescription, finite
from param_groups.prescriptions import Everett
from param_groups.roles import BLOCK, Assignment, PlanError, Role, Rule, assign

if TYPE_CHECKING:
    from torch import nn

Fans = Mapping[str, tuple[int, int]]


# Roles whose fan-in grows with the width; of all others the fan-out does.
_SUMS_OVER_WIDTH = {*BLOCK, Role.QKV, Role.HIDDEN, Role.READOUT, Role.ROUTER, Role.LORA_A}
# Tensors that several heads may share, whose gradient then is a sum over these heads: as the number
# of heads grows with the width, so does the gradient, unless the tensor's fan-out grows alike.
_NORMS = {Role.NORM_SCALE, Role.NORM_BIAS}
_SHARED_BY_HEADS = {*_NORMS, Role.HIDDEN_BIAS, Role.KEY, Role.VALUE, Role.QKV}


def fans_of(model: nn.Module, rules: Sequence[Rule]) -> Fans:
    """{name: (fan_in, fan_out)} of a model: a base that can be kept as JSON."""
    return {assignment.name: assignment.fans for assignment in assign(model, rules)}


def base_ratios(
    assignments: Sequence[Assignment],
    rules: Sequence[Rule],
    prescription: Prescription,
    base: nn.Module | Fans,
) -> dict[str, float]:
    """How many times wider than in the base model each tensor is, along the axis that counts."""
    if prescription.width != getattr(prescription, "base_width", None):
        raise PlanError(
            "with a base model the fans decide: give the prescription its base width as width, too"
        )
    fans = base if isinstance(base, Mapping) else fans_of(base, rules)
    for name, pair in fans.items():
        two = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not (two and all(finite(fan) and fan > 0 for fan in pair)):
            raise PlanError(f"base: {name!r} has {pair!r}, no (fan_in, fan_out); use fans_of")
    if odd := sorted({a.name for a in assignments} ^ set(fans)):
        raise PlanError(f"the base model is another: {odd[0]!r} is only in one of the two")
    grew = {
        a.name: tuple(own / fan for own, fan in zip(a.fans, fans[a.name], strict=True))
        for a in assignments
    }
    if _follows_gradients(prescription):
        counted = [(a.name, grew[a.name][1]) for a in assignments if a.role in _SHARED_BY_HEADS]
        counted += [(a.name, grew[a.name][0]) for a in assignments if a.role in _SUMS_OVER_WIDTH]
        sizes = {ratio: name for name, ratio in counted}
        if len(sizes) > 1:
            (one, first), (other, second), *_ = sizes.items()
            raise PlanError(
                f"{first!r} is {one:g} times as wide as in the base model, {second!r} {other:g} "
                "times; gradients then have no common power of the width: use adam or adafactor "
                "without eps_per_layer, or scale all widths alike"
            )
    return {a.name: grew[a.name][0 if a.role in _SUMS_OVER_WIDTH else 1] for a in assignments}


def _follows_gradients(prescription: Prescription) -> bool:
    """Whether rate or epsilon undoes the gradient's power of the width."""
    return prescription.optimizer == "sgd" or bool(getattr(prescription, "eps_per_layer", False))


def check_of_heads(assignment: Assignment, prescription: Prescription) -> None:
    """Refuses a norm of one head's size, and keys and values that heads share, unless a base model
    says how that grows."""
    size, shared = assignment.fans[1], {*_NORMS, Role.KEY, Role.VALUE}
    small = assignment.role in shared and size < prescription.width
    if small and isinstance(prescription, Everett) and _follows_gradients(prescription):
        raise PlanError(
            f"{assignment.name!r} has {size} outputs, fewer than the width {prescription.width:g}: "
            "heads that share it add to its gradient, for which there is no power of the width; "
            "use adam or adafactor, without eps_per_layer (or plan with base=, if it grows with "
            "the width)"
        )
