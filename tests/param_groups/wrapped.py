"""Rules in a line; Everett's with what is put around it, by the keys of configs."""

from param_groups import Decay, Depth, EpsFollows, Everett, Rule, Tensor
from param_groups.prescription import numbers_of
from param_groups.quantities import Asked

ASKED = Asked(1.0, 1.0, 0.0, "independent")


def ruled(text):
    """Rules, `pattern role` between commas."""
    return [Rule(*one.split()) for one in text.split(",")]


def numbers(rule, role, fan_in, fan_out):
    """What a rule gives a tensor, fused ones included."""
    return numbers_of(rule, Tensor(role, fan_in, fan_out), ASKED)


def everett(
    name, width, base, *, alpha_depth=None, base_depth=1.0, eps_per_layer=False, decay_depth=False,
    decay_exponent=0.0, spare_vectors=False, **fields,
):  # fmt: skip
    """Table 1 with the wrappers that the keys ask for."""
    rule = Everett(name, width, base, **fields)
    if alpha_depth is not None:
        rule = Depth(rule, fields["depth"], base_depth, alpha_depth, decay_depth)
    if eps_per_layer:
        rule = EpsFollows(rule)
    if decay_exponent or spare_vectors:
        rule = Decay(rule, decay_exponent, "vectors" if spare_vectors else None)
    return rule
