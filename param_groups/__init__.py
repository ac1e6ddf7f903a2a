"""From a model and a prescription to a plan: what every tensor's numbers are, and why.

`roles` says what tensors do, `prescription` what turns one into numbers, `rules` has those of
papers and those around others, `model` reads a model, `plan` is the result. Nothing here knows an
experiment.
"""

from typing import TYPE_CHECKING, Any

from param_groups.plan import Plan, plan
from param_groups.prescription import Forward, Prescription, Size, Tensor
from param_groups.quantities import Numbers
from param_groups.roles import Layout, PlanError, Role, Rule, assign, fans_of, present
from param_groups.rows import READERS, Factor, Row
from param_groups.rules.bordelon import Bordelon
from param_groups.rules.dinan import Dinan
from param_groups.rules.everett import Everett
from param_groups.rules.horizon import Horizon, timescale
from param_groups.rules.muon import Muon
from param_groups.rules.tuned import Tuned, initial_stds
from param_groups.rules.wrappers import CompleteP, Decay, Depth, EpsFollows, Tied
from param_groups.schedules import guard, schedule
from param_groups.stock.factors import held
from param_groups.stock.rules import rules_for

if TYPE_CHECKING:
    from param_groups.model.trace import traced

__version__ = "0.1.0"
READERS.append(held)  # what modules of libraries multiply by

__all__ = [
    "Bordelon",
    "CompleteP",
    "Decay",
    "Depth",
    "Dinan",
    "EpsFollows",
    "Everett",
    "Factor",
    "Forward",
    "Horizon",
    "Layout",
    "Muon",
    "Numbers",
    "Plan",
    "PlanError",
    "Prescription",
    "Role",
    "Row",
    "Rule",
    "Size",
    "Tensor",
    "Tied",
    "Tuned",
    "assign",
    "fans_of",
    "guard",
    "initial_stds",
    "plan",
    "present",
    "rules_for",
    "schedule",
    "timescale",
    "traced",
]

_GONE = {
    "Spectral": 'Muon(Everett("mup", width, base_width))',
    "Recipe": "Tuned(rule, init=initial_stds(small, rules)), which finds its base itself",
}


def __getattr__(name: str) -> Any:
    if name == "traced":  # with which torch is imported: exact tables answer without it
        from param_groups.model.trace import traced

        return traced
    if name in _GONE:
        raise ImportError(f"param_groups has no {name}: it is {_GONE[name]}")
    raise AttributeError(f"module 'param_groups' has no attribute {name!r}")
