"""A recipe at its base size and at others, against stock AdamW and the rule's own ratios."""

import copy

import pytest
import torch

from param_groups import (
    Bordelon,
    CompleteP,
    Dinan,
    Everett,
    Muon,
    PlanError,
    Role,
    Rule,
    Tensor,
    Tuned,
    initial_stds,
    plan,
)
from tests.param_groups.test_muon import RULES, Block, train

RECIPE = {"lr": 3e-3, "eps": 1e-8, "weight_decay": 0.1, "decay_mode": "per_group"}
AT = {
    "mup": lambda n: Everett("mup", n, 32),
    "ntk": lambda n: Everett("ntk", n, 32),
    "completep": lambda n: CompleteP(n, 32, 4, 2),
}


def planned(n, rule="mup"):
    torch.manual_seed(0)
    stds, model = initial_stds(Block(32), RULES), Block(n)
    recipe = Tuned(AT[rule](n), init=stds)
    return model, plan(model, RULES, recipe, **RECIPE, absorb_multipliers=True)


def test_at_the_base_size_fifty_steps_are_stock_adamws_bit_for_bit():
    model, made = planned(32)
    stock = copy.deepcopy(model)
    made.apply_multipliers(model)
    ours = torch.optim.AdamW(made.groups(model), betas=(0.9, 0.95))
    theirs = torch.optim.AdamW(stock.parameters(), 3e-3, (0.9, 0.95), 1e-8, 0.1)
    for one, optimizer in ((model, ours), (stock, theirs)):
        train(one, optimizer, range(50))
    assert all(map(torch.equal, model.parameters(), stock.parameters()))


def test_at_the_base_size_initial_values_are_the_recipes():
    _, made = planned(32)
    stds = initial_stds(Block(32), RULES)
    for row in made.rows:
        if row.role == "norm_scale":
            assert (row.init_distribution, row.init_mean, row.init_std) == ("constant", 1.0, 0.0)
        else:
            assert row.init_distribution == "normal" and row.init_mean == 0.0
            assert row.init_std == pytest.approx(stds[row.role], rel=0.1)
    assert made.prescription["form"] == "Tuned(Everett)"
    assert made.prescription["initial"] == pytest.approx(stds, rel=0.1)


def test_small_matrices_of_a_role_start_alike_within_chance():
    """Eight entries tell a standard deviation to a quarter: the role's is that of them all."""
    torch.manual_seed(0)
    rules, many = [Rule("*", "hidden")], torch.nn.Sequential()
    many.extend(torch.nn.Linear(4, 2, bias=False) for _ in range(100))
    for layer in many:
        torch.nn.init.normal_(layer.weight, std=0.3)
    assert initial_stds(many, rules)["hidden"] == pytest.approx(0.3, rel=0.05)
    torch.nn.init.normal_(many[7].weight, std=3.0)
    with pytest.raises(PlanError, match="'7.weight' of the same role"):
        initial_stds(many, rules)


@pytest.mark.parametrize("rule", ["mup", "ntk"])
def test_ratios_between_sizes_are_those_of_the_rule(rule):
    small, large = (made for _, made in (planned(n, rule) for n in (32, 128)))
    absolute = [
        plan(Block(n), RULES, AT[rule](n), **RECIPE, absorb_multipliers=True) for n in (32, 128)
    ]
    for name in (row.name for row in small.rows):
        for key in ("lr", "eps", "decay_per_step", "init_std"):
            ours = [getattr(made[name], key) for made in (small, large)]
            rules = [getattr(made[name], key) for made in absolute]
            if rules[0]:
                ratio = pytest.approx(rules[1] / rules[0], rel=1e-9)
                assert ours[1] / ours[0] == ratio, (name, key)


def test_depth_and_forward_factors_are_relative_too():
    recipe = Tuned(AT["completep"](64), init={})
    assert recipe.forward().residual_multiplier == 0.5
    assert Tuned(AT["mup"](64), init={}).forward().attention_scale(16) == 0.25
    other = Tuned(AT["mup"](64), init={}, base_head_dim=16).forward()
    assert other.attention_scale(16) == 0.25 and other.attention_scale(32) == 0.125


def test_a_tied_recipe_is_told_to_untie_and_at_the_base_size_needs_not():
    model = Block(32)
    model.readout.weight = model.embedding.weight
    rules = [rule for rule in RULES if rule.role is not Role.READOUT]
    recipe = lambda n: Tuned(AT["mup"](n), init=initial_stds(model, rules))
    assert plan(model, rules, recipe(32), **RECIPE)["readout.weight"].lr == 3e-3
    wide = Block(64)
    wide.readout.weight = wide.embedding.weight
    with pytest.raises(PlanError, match="'embedding.weight' is tied to readout.weight, but Tuned"):
        plan(wide, rules, recipe(64), **RECIPE)


RULES_AT = [Dinan, lambda n: Bordelon(8, n // 8, 2), lambda n: Muon(Everett("mup", n, 32))]


@pytest.mark.parametrize("make", RULES_AT)
def test_every_prescription_can_be_asked_for_it(make):
    """A rule without a base width is told which it was."""
    rule, base = make(128), make(32)
    small, large = Tensor("mlp_in", 32, 128), Tensor("mlp_in", 128, 512)
    own = None if rule.base else 32
    same = Tuned(base, init={"mlp_in": 0.02}, base_width=own)(small)
    assert (same.init_std, same.lr, same.eps, same.multiplier) == (0.02, 1.0, 1.0, 1.0)
    wide, here = Tuned(rule, {"mlp_in": 0.02}, base_width=own)(large), rule(large)
    there = base(small)
    assert wide.lr == pytest.approx(here.lr / there.lr) and wide.optimizer == here.optimizer
    assert wide.init_std == pytest.approx(0.02 * here.init_std / there.init_std)


def test_a_fused_tensor_has_the_initial_size_of_its_parts():
    model = torch.nn.Module()
    model.qkv = torch.nn.Linear(32, 96, bias=False)
    rules = [Rule("qkv.weight", Role.QKV)]
    recipe = Tuned(AT["mup"](32), init=initial_stds(model, rules))
    made = plan(model, rules, recipe, **RECIPE, applied={"attention_scale": 0.25}, head_dim=16)
    assert made["qkv.weight"].init_std == pytest.approx(model.qkv.weight.std().item(), rel=0.01)
    # A base model of another head dimension: the library's power is not the rule's any more.
    other = Tuned(AT["mup"](32), init=initial_stds(model, rules), base_head_dim=8)
    with pytest.raises(PlanError, match=r"head_dim\^\(-1\)"):
        plan(model, rules, other, **RECIPE, head_dim=16)
    applied = {"attention_scale": 8**0.5 / 16}
    grown = plan(model, rules, other, **RECIPE, head_dim=16, applied=applied)
    assert grown.forward[0].value == 8**-0.5 / 2
