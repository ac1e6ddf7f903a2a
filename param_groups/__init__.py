"""From a model and a prescription to a plan: what every tensor's numbers are, and why.

`roles` names tensors, `exponents` holds the theory, `contract` says what a prescription
is, `prescriptions` has the papers', `plan` the result. Nothing here knows an experiment.
"""

from param_groups.contract import Numbers, Prescription
from param_groups.models import rules_for
from param_groups.plan import Plan, plan
from param_groups.prescriptions import Bordelon, Dinan, Everett
from param_groups.roles import Layout, PlanError, Role, Rule, assign, present
from param_groups.rows import Factor, Row
from param_groups.schedules import guard, schedule
from param_groups.suggest import suggest
from param_groups.widths import fans_of

__all__ = [
    "Bordelon",
    "Dinan",
    "Everett",
    "Factor",
    "Layout",
    "Numbers",
    "Plan",
    "PlanError",
    "Prescription",
    "Role",
    "Row",
    "Rule",
    "assign",
    "fans_of",
    "guard",
    "plan",
    "present",
    "rules_for",
    "schedule",
    "suggest",
]
