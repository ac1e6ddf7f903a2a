"""Rules in a line, and what a rule gives a tensor."""

from param_groups import Rule, Tensor
from param_groups.prescription import numbers_of
from param_groups.quantities import Asked

ASKED = Asked(1.0, 1.0, 0.0, "independent")


def ruled(text):
    """Rules, `pattern role` between commas."""
    return [Rule(*one.split()) for one in text.split(",")]


def numbers(rule, role, fan_in, fan_out):
    """What a rule gives a tensor, fused ones included."""
    return numbers_of(rule, Tensor(role, fan_in, fan_out), ASKED)
