"""From a model and a prescription to a plan: what every tensor's numbers are, and why.

`roles` names tensors, `exponents` holds the theory, `contract` says what a prescription
is, `prescriptions` has the papers', `plan` the result. Nothing here knows an experiment.
"""

from param_groups.plan import Plan, plan
from param_groups.prescription import Numbers, Prescription
from param_groups.roles import Layout, PlanError, Role, Rule, assign, fans_of, present
from param_groups.rows import READERS, Factor, Row
from param_groups.rules.dinan import Bordelon, CompleteP, Dinan, Everett, Spectral
from param_groups.rules.wrappers import Recipe, initial_stds
from param_groups.schedules import guard, schedule, timescale
from param_groups.stock.factors import held
from param_groups.stock.rules import rules_for
from param_groups.stock.suggest import suggest

READERS.append(held)  # what modules of libraries multiply by

__all__ = [
    "Bordelon",
    "CompleteP",
    "Dinan",
    "Everett",
    "Factor",
    "Layout",
    "Numbers",
    "Plan",
    "PlanError",
    "Prescription",
    "Recipe",
    "Role",
    "Row",
    "Rule",
    "Spectral",
    "assign",
    "fans_of",
    "guard",
    "initial_stds",
    "plan",
    "present",
    "rules_for",
    "schedule",
    "suggest",
    "timescale",
]
