"""Roles: every tensor gets exactly one, and whatever cannot be decided is an error by name."""

import math

import pytest
import torch
from torch import nn

from nanolm_c4.model import RULES
from param_groups import Everett, Layout, PlanError, Role, Rule, assign, plan, present
from param_groups.model.read import check_widths
from param_groups.roles import fans

MLP_RULES = (Rule("up.weight", Role.MLP_IN), Rule("down.weight", Role.MLP_OUT))


def check_width(assignment, width):
    """What `plan` asks of a tensor's axes and layout."""
    check_widths([assignment], Everett("mup", width, width))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 16, bias=False)
        self.down = nn.Linear(16, 4, bias=False)


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.readout = nn.Linear(4, 7, bias=False)
        with torch.no_grad():
            self.readout.weight.copy_(self.tokens.weight)
        if tie:
            self.readout.weight = self.tokens.weight


def one(module, name, rule):
    """The assignment of the only tensor of a module, registered under a name."""
    model = nn.Module()
    model.add_module(name, module)
    return assign(model, [rule])[0]


def roles_of(model, rules):
    return {assignment.name: assignment.role for assignment in assign(model, rules)}


def test_a_rule_may_write_role_and_layout_as_texts():
    rule = Rule("up.weight", "mlp_in", "transposed")
    assert rule.role is Role.MLP_IN and rule.layout is Layout.TRANSPOSED


def test_every_tensor_has_its_role_in_the_models_order():
    assert list(roles_of(Mlp(), MLP_RULES[::-1]).items()) == [
        ("up.weight", Role.MLP_IN),
        ("down.weight", Role.MLP_OUT),
    ]


def test_two_rules_that_agree_are_no_conflict():
    rules = (*MLP_RULES, Rule("u*", Role.MLP_IN))
    assert roles_of(Mlp(), rules)["up.weight"] is Role.MLP_IN


def test_a_submodule_called_module_is_no_wrapper():
    rules = [Rule(f"module.{rule.pattern}", rule.role) for rule in MLP_RULES]
    assert len(assign(nn.ModuleDict({"module": Mlp()}), rules)) == 2


@pytest.mark.parametrize("name", ["tokens.weight", "readout.weight"])
def test_a_tied_tensor_is_one_row_and_any_of_its_names_will_do(name):
    (row,) = assign(Tied(), [Rule(name, Role.TOKEN_EMBEDDING)])
    assert (row.name, row.tied_to) == ("tokens.weight", ("readout.weight",))
    assert row.fans == (1, 4)


def test_equal_tensors_that_are_two_objects_are_two_rows():
    model = Tied(tie=False)
    assert torch.equal(model.tokens.weight, model.readout.weight)
    rules = (Rule("tokens.weight", Role.TOKEN_EMBEDDING), Rule("readout.weight", Role.READOUT))
    rows = [(row.name, row.tied_to) for row in assign(model, rules)]
    assert rows == [("tokens.weight", ()), ("readout.weight", ())]


@pytest.mark.parametrize(
    ("module", "role", "layout", "expected"),
    [
        (nn.Linear(6, 10, bias=False), Role.MLP_IN, None, (6, 10)),
        (nn.Conv2d(3, 12, (4, 5), bias=False), Role.PATCH_EMBEDDING, None, (3 * 4 * 5, 12)),
        (nn.Embedding(50, 6), Role.TOKEN_EMBEDDING, None, (1, 6)),
        (nn.LayerNorm(6, bias=False), Role.NORM_SCALE, None, (1, 6)),
        (nn.Linear(6, 10, bias=False), Role.MLP_OUT, Layout.TRANSPOSED, (10, 6)),
        (nn.Linear(6, 10, bias=False), Role.READOUT, Layout.TABLE, (1, 6)),
    ],
)
def test_fans_follow_the_layout(module, role, layout, expected):
    assert one(module, "tensor", Rule("tensor.weight", role, layout)).fans == expected


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        *((shape, Layout.TABLE, (1, 6)) for shape in ((1, 197, 6), (8, 6))),
        *(((6,), Layout.VECTOR, (1, 6)), ((), Layout.VECTOR, (1, 1))),
        *(((6, 18), Layout.TRANSPOSED, (6, 18)), ((5, 3, 2), Layout.LINEAR, (3 * 2, 5))),
        *(((4, 5, 6), Layout.EXPERTS, (6, 5)), ((4, 5, 6), Layout.EXPERTS_TRANSPOSED, (5, 6))),
        *(((4, 5, 6), Layout.OUTS_IN, (6, 20)), ((6, 4, 5), Layout.IN_OUTS, (6, 20))),
        ((4, 5, 6), Layout.INS_OUT, (20, 6)),
    ],
)
def test_fans_of_shapes(shape, layout, expected):
    assert fans("tensor", shape, layout) == expected


# role, module, layout, the width that fits
WIDTHS = {
    "query": (Role.QUERY, nn.Linear(4, 12, bias=False), None, 4),
    "value": (Role.VALUE, nn.Linear(4, 2, bias=False), None, 4),
    "fused": (Role.QKV, nn.Linear(4, 12, bias=False), None, 4),
    "fused, in and out exchanged": (Role.QKV, nn.Linear(12, 4, bias=False), Layout.TRANSPOSED, 4),
    "attention output": (Role.ATTENTION_OUTPUT, nn.Linear(2, 4, bias=False), None, 4),
    "mlp in": (Role.MLP_IN, nn.Linear(4, 16, bias=False), None, 4),
    "mlp out": (Role.MLP_OUT, nn.Linear(16, 4, bias=False), None, 4),
    "readout": (Role.READOUT, nn.Linear(4, 7, bias=False), None, 4),
    "tokens": (Role.TOKEN_EMBEDDING, nn.Embedding(7, 4), None, 4),
    "patches": (Role.PATCH_EMBEDDING, nn.Conv2d(3, 4, 2, bias=False), None, 4),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_a_tensor_of_another_width_is_an_error_that_shows_both(case):
    role, module, layout, width = WIDTHS[case]
    assignment = one(module, "tensor", Rule("tensor.weight", role, layout))
    check_width(assignment, width)
    for other in (5, width // 2, 2 * width):
        message = f"'tensor.weight'.* {width},.*width {other};.*planned with base=small_model"
        with pytest.raises(PlanError, match=message):
            check_width(assignment, other)


def test_a_readout_may_change_its_outputs_at_one_width_and_a_projection_its_width():
    """What is neither is in refused.txt."""
    rules = [Rule("0.weight", Role.READOUT), Rule("1.weight", Role.HIDDEN)]
    rule = Everett("mup", 4, 4)
    make = lambda *sizes: nn.Sequential(*(nn.Linear(*two, bias=False) for two in sizes))
    assert plan(make((7, 9), (4, 4)), rules, rule, lr=0.1, base=make((7, 4), (4, 4))).rows
    rules[0] = Rule("0.weight", Role.HIDDEN)
    large, small = make((8, 9), (9, 9)), make((4, 6), (6, 6))
    assert plan(large, rules, rule, lr=0.1, base=small)["0.weight"].lr == pytest.approx(0.05)


VECTORS = [role for role in Role if role.facts.layout is Layout.VECTOR]


@pytest.mark.parametrize("role", VECTORS, ids=str)
def test_a_matrix_is_no_vector_unless_its_rule_says_so(role):
    model = nn.ParameterDict({"w": torch.ones(8, 8)})
    with pytest.raises(PlanError, match=rf"'w' has shape \(8, 8\), and a {role} is a vector: "):
        assign(model, [Rule("w", role)])
    assert assign(model, [Rule("w", role, "vector")])[0].fans == (1, 8)  # one bias per expert
    assign(nn.ParameterDict({"w": torch.ones(1, 1, 8)}), [Rule("w", role)])


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 2, 8, 8)])
def test_layers_stacked_in_one_tensor_are_no_kernel(shape):
    """Read as one, fan_in was 16 times too large and the rate fell as the width squared."""
    model = nn.ParameterDict({"bank": torch.zeros(shape)})
    said = "ParameterDict is no convolution of torch: give its rule L"
    with pytest.raises(PlanError, match=said):
        assign(model, [Rule("bank", Role.HIDDEN)])
    for layout, fan_in in (("experts", 8), ("linear", math.prod(shape[1:]))):
        assert assign(model, [Rule("bank", Role.HIDDEN, layout)])[0].fans[0] == fan_in


def test_vectors_may_have_any_size():
    """A norm over a head dimension or a bias of a fused matrix is no width mismatch."""
    for role in (Role.NORM_SCALE, Role.NORM_BIAS, Role.HIDDEN_BIAS, Role.READOUT_BIAS):
        check_width(one(nn.LayerNorm(3, bias=False), "v", Rule("v.weight", role)), 64)


def test_present_keeps_the_rules_that_match_any_name_in_their_order():
    rules = (Rule("nothing", Role.QUERY), *MLP_RULES, Rule("head.*", Role.READOUT))
    assert present(rules, Mlp()) == list(MLP_RULES)
    rules = (Rule("readout.weight", Role.READOUT),)  # of a tied tensor
    assert present(rules, Tied()) == list(rules)


def test_no_rule_of_an_experiment_names_a_tensor_twice():
    for name in [rule.pattern.replace("*", "x") for rule in RULES]:
        assert sum(rule.matches(name) for rule in RULES) == 1
