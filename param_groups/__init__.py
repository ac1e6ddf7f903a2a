"""From a model and a prescription to a plan: what every tensor's numbers are, and why.

`roles` names tensors, `exponents` holds the theory, `prescriptions` the papers' rules, `plan` the
result. Nothing here knows an experiment.
"""

from param_groups.models import rules_for
from param_groups.plan import Factor, Plan, Row, fans_of, plan
from param_groups.prescriptions import Bordelon, Dinan, Everett, Numbers, Prescription
from param_groups.roles import Layout, PlanError, Role, Rule, assign, present
from param_groups.suggest import suggest

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
    "plan",
    "present",
    "rules_for",
    "suggest",
]
