"""Models that people have: frozen, pretrained, sharded, odd; nothing is lost or half written."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from param_groups import Depth, Everett, Factor, Plan, PlanError, Role, Rule, plan
from param_groups.layers import Linear, Multiplied, Scaled
from param_groups.plan import dumps
from tests.processes import finished

WIDTH = 8
RULES = (Rule("first.*", Role.QUERY), Rule("last.*", Role.READOUT))


class Pair(nn.Module):
    """Two layers of one kind, 8 -> 8 -> 3."""

    def __init__(self, linear=Linear):
        super().__init__()
        self.first, self.last = linear(WIDTH, WIDTH, bias=False), linear(WIDTH, 3, bias=False)

    def forward(self, x):
        return self.last(self.first(x))


def made(model, rules=RULES, parameterization="mup", **settings):
    return plan(model, rules, Everett(parameterization, WIDTH, 4), lr=0.1, **settings)


def values(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


# What keeps its values


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_tensors_and_those_to_keep_keep_their_values_alone(frozen):
    """Those to keep are trained; the others are drawn as without them."""
    model, whole = Pair(nn.Linear), Pair(nn.Linear)
    before = values(model)
    model.first.weight.requires_grad_(not frozen)
    numbers = made(model, absorb_multipliers=True)
    numbers.initialise(model, seed=0, keep=() if frozen else ["first.*"])
    numbers.initialise(whole, seed=0)
    assert torch.equal(model.first.weight, before["first.weight"])
    assert torch.equal(model.last.weight, whole.last.weight)
    assert not torch.equal(model.last.weight, before["last.weight"])
    trained = {name for group in numbers.groups(model) for name in group["param_names"]}
    assert trained == {"last.weight"} | (set() if frozen else {"first.weight"})


def test_a_name_to_keep_that_no_tensor_has_is_an_error_and_nothing_is_drawn():
    model = Pair()
    with pytest.raises(PlanError, match="keep='frist.*' names no tensor"):
        made(model).initialise(model, seed=0, keep=["last.*", "frist.*"])
    assert model.first.weight.isnan().all()


def test_pretrained_weights_stay_while_groups_and_multipliers_are_set():
    model = Pair()
    nn.init.ones_(model.first.weight), nn.init.ones_(model.last.weight)
    numbers = made(model)
    numbers.apply_multipliers(model)
    assert all((value == 1).all() for value in values(model).values())
    assert model.last.multiplier == pytest.approx(WIDTH**-0.5)
    assert len(numbers.groups(model)) == 2
    drawn_otherwise = made(model, [Rule("first.*", Role.QUERY, scale=0.5), RULES[1]])
    assert drawn_otherwise.groups(model)  # whose initial values it was never given either
    numbers.initialise(model, seed=0)
    with pytest.raises(PlanError, match="another plan, which gave 'first.weight'"):
        drawn_otherwise.groups(model)


# Groups of a model that the plan has not prepared


def test_equal_plans_are_one_plan():
    """As when a script makes the plan once to initialise and once more for the optimiser."""
    model = Pair()
    made(model).initialise(model, seed=0)
    assert made(model, eps=1e-6).groups(model)


# Factors of the forward pass


class Attention(Scaled):
    """Query and key of 8 inputs; what is looked at here is its scale."""

    factors = ("attention_scale",)

    def __init__(self, head_dim=4):
        super().__init__()
        self.query, self.key = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.head_dim, self.attention_scale = head_dim, float("nan")


ATTENTION = (Rule("query.weight", Role.QUERY), Rule("key.weight", Role.KEY))


class Stock(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)


def test_the_plan_has_the_models_factors_and_sets_them():
    model = Attention()
    numbers = made(model, ATTENTION)
    assert numbers.forward == (Factor("attention_scale", 0.25, 4),)
    assert "forward pass: attention_scale 0.25 (head dimension 4)" in numbers.table()
    numbers.initialise(model, seed=0)
    assert model.attention_scale == 0.25
    assert Plan.from_dict(json.loads(dumps(numbers))) == numbers


@pytest.mark.parametrize("call", ["initialise", "apply_multipliers"])
def test_a_factor_that_was_changed_is_an_error(call):
    model = Attention()
    numbers = made(model, ATTENTION)
    getattr(numbers, call)(model, *([0] if call == "initialise" else []))
    model.attention_scale = 0.5
    with pytest.raises(PlanError, match="Attention has attention_scale 0.5, the plan wants 0.25"):
        numbers.groups(model)


def test_attentions_of_two_head_dimensions_each_get_their_own():
    model = nn.ModuleDict({"one": Attention(4), "other": Attention(16)})
    rules = [Rule(f"*.{rule.pattern}", rule.role) for rule in ATTENTION]
    made(model, rules).initialise(model, seed=0)
    assert (model["one"].attention_scale, model["other"].attention_scale) == (1 / 4, 1 / 16)
    silent = Attention()
    del silent.head_dim
    for unknown in (Attention(None), silent):
        with pytest.raises(PlanError, match="module '' applies attention_scale; it needs head_dim"):
            made(unknown, ATTENTION)


def test_a_module_may_apply_an_attention_scale_and_the_factor_of_its_branch():
    class Branch(Attention):
        factors = ("attention_scale", "residual_multiplier")

    rule = Depth(Everett("mup", WIDTH, 4), depth=4, alpha=0.5)
    inside = [dataclasses.replace(one, trunk=False) for one in ATTENTION]
    assert plan(Branch(), inside, rule, lr=0.1).forward == (
        Factor("attention_scale", 0.25, 4),
        Factor("residual_multiplier", 0.5),
    )


def test_an_attention_scale_that_a_stock_model_lacks_is_an_error_with_three_ways_out():
    with pytest.raises(PlanError, match=r"head_dim\^\(-1\).*applied=.*Scaled.*qk_exponent=-0.5"):
        made(Stock(), ATTENTION, absorb_multipliers=True)
    assert made(Stock(), ATTENTION, "standard").forward == ()
    stated = made(Stock(), ATTENTION, "standard", head_dim=16)
    assert stated.forward == (Factor("attention_scale", 0.25, 16),)


def test_what_the_user_applies_is_in_the_plan_and_checked():
    options = {"absorb_multipliers": True, "head_dim": 16}
    numbers = made(Stock(), ATTENTION, applied={"attention_scale": 1 / 16}, **options)
    assert numbers.forward == (Factor("attention_scale", 1 / 16, 16),)
    one = made(Stock(), ATTENTION, applied={"attention_scale": 1.0}, **options | {"head_dim": 1})
    assert one.forward == (Factor("attention_scale", 1.0, 1),)
    for value in (0.3, 0.25, 1 / 8, 1e-300):  # the library's 1/sqrt(16) and other integers' powers
        with pytest.raises(PlanError, match=f"is {value:g}, but Everett has 0.0625 for head dim"):
            made(Stock(), ATTENTION, applied={"attention_scale": value}, head_dim=16)
    with pytest.raises(PlanError, match="attention_scale must be positive and finite, got -1"):
        made(Stock(), ATTENTION, applied={"attention_scale": -1}, head_dim=16)
    with pytest.raises(PlanError, match="logit_multiplier is 0.5, but Everett has 1"):
        made(Stock(), ATTENTION, "standard", applied={"logit_multiplier": 0.5})


def test_plans_with_other_factors_differ():
    one, other = (made(Attention(size), ATTENTION) for size in (4, 16))
    assert one.differences(other) == [
        "forward pass: attention_scale (head dimension 16) None -> 0.0625",
        "forward pass: attention_scale (head dimension 4) 0.25 -> None",
    ]


# Odd models, and errors that leave them as they were


def test_a_module_that_only_holds_others_may_call_an_attribute_multiplier():
    model = Pair()
    model.multiplier = 8.0
    assert made(model).rows == made(Pair()).rows


def test_an_error_leaves_the_model_as_it_was():
    """The second layer cannot apply its multiplier; the first is not drawn either."""
    model = Pair(nn.Linear)
    before = values(model)
    with pytest.raises(PlanError, match="'last.weight' by 0.353"):
        made(model).initialise(model, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def test_a_layer_derived_from_multiplied_gets_the_plans_multiplier():
    class Doubled(Multiplied, nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.multiplier

    model = Pair(Doubled)
    made(model).initialise(model, seed=0)
    assert model.last.multiplier == pytest.approx(WIDTH**-0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_precisions_that_are_trained_in_are_planned(dtype):
    model = Pair().to(dtype)
    made(model).initialise(model, seed=0)
    assert model.first.weight.isfinite().all()


SHARDED = """
import sys
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
sys.path.insert(0, ".")
from tests.param_groups.test_tensors import Pair, made
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = Pair()
made(whole).initialise(whole, seed=3)

before = Pair()
made(before).initialise(before, seed=3)
fully_shard(before, mesh=mesh)
after = Pair()
fully_shard(after, mesh=mesh)
made(after).initialise(after, seed=3)
with torch.device("meta"):
    empty = Pair()
fully_shard(empty, mesh=mesh)
empty.to_empty(device="cpu")
numbers = made(empty)
numbers.initialise(empty, seed=3)
for model in (before, after, empty):
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    assert model.last.multiplier == whole.last.multiplier
optimizer = torch.optim.AdamW(numbers.groups(empty))
empty(torch.ones(2, 8)).sum().backward()
optimizer.step()
distributed.destroy_process_group()
print("equal")
"""


def test_initialising_before_or_after_sharding_gives_the_same_model(tmp_path):
    """Two processes with gloo; 3 rows over 2 processes are cut unevenly."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    done = finished(script, ranks=2, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.err[-3000:]
    assert done.out.count("equal") == 2
