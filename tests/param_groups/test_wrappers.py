"""Prescriptions around others: closed forms, orders that are equal, orders that mean nothing."""

import functools
import itertools
import math
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import param_groups
from param_groups import (
    Decay,
    Depth,
    Dinan,
    EpsFollows,
    Everett,
    Forward,
    Muon,
    Numbers,
    PlanError,
    Prescription,
    Role,
    Rule,
    Size,
    Tensor,
    Tied,
    Tuned,
    plan,
)
from param_groups.rules.muon import MUON_CONVENTIONS
from param_groups.rules.wrappers import Around
from tests.param_groups import test_depth_and_decay as completep
from tests.param_groups import test_dinan_bordelon as papers
from tests.param_groups import test_horizon as horizon
from tests.param_groups import test_prescriptions as prescriptions
from tests.param_groups.test_prescriptions import BLOCK, EMBEDDINGS, fans

M, R = 4.0, 3.0  # width and depth over those of the base
TRUNK = (*EMBEDDINGS, Role.PATCH_EMBEDDING, Role.FINAL_NORM_SCALE, Role.READOUT, Role.READOUT_BIAS)
INIT = dict.fromkeys(Role, 0.02) | {"lora_b": 0.0}  # which rules start at zero


class Mine(Prescription):
    """A rule of one's own in a few lines, with a base, a gradient and an optimiser."""

    base = Size(64)

    def __init__(self, width=256, optimizer="adam"):
        self.width, self.optimizer = width, optimizer

    def __call__(self, tensor):
        ratio = self.at(tensor).width / 64
        return Numbers(tensor.fan_in**-0.5, lr=1 / ratio, gradient=ratio**-0.5)


def rules(optimizer="adam"):
    """Every kind of rule, at four times its base width."""
    own = {"mine": Mine(optimizer=optimizer)}
    own |= {} if optimizer == "adafactor" else {"dinan": Dinan(256, optimizer=optimizer)}
    return {name: Everett(name, 256, 64, optimizer) for name in ("mup", "ntk")} | own


def tensors(rule):
    """Tensors of a model of the rule's width that it has numbers for."""
    roles = (*BLOCK, Role.NORM_SCALE, Role.READOUT, Role.READOUT_BIAS, Role.PATCH_EMBEDDING)
    for role in roles:
        tensor = Tensor(role, *fans(role, rule.width))
        try:
            rule(tensor)
        except PlanError:
            assert isinstance(rule, Dinan) and role is Role.NORM_SCALE
        else:
            yield tensor


def own_base(rule):
    return {} if rule.base else {"base_width": 64}


def close(one, other):
    for key in fields(Numbers):
        mine, theirs = getattr(one, key.name), getattr(other, key.name)
        same = mine == theirs or math.isclose(mine, theirs, rel_tol=1e-12)
        assert same, (key.name, mine, theirs)


# Closed forms, of which a wrong power must be seen


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *itertools.product(("mup", "ntk", "dinan", "mine"), ("adam", "sgd")),
        *(("mup", "adafactor"), ("mine", "adafactor")),
    ],
)
def test_depth_is_bordelons_power_around_any_rule(name, optimizer):
    """Branches shrink; their rates keep the sum of all updates constant, Bordelon et al., C.1."""
    every = (*TRUNK, *BLOCK, Role.NORM_SCALE, Role.HIDDEN_BIAS, Role.RELATIVE_POSITION)
    assert [role for role in every if not Tensor(role, 8, 8).in_branch] == [*TRUNK]
    for alpha, decays in itertools.product((0.5, 0.75, 1.0), (False, True)):
        rule = rules(optimizer)[name]
        deep = Depth(rule, depth=12, base_depth=4, alpha=alpha, decays=decays)
        assert deep.forward().residual_multiplier == pytest.approx(R**-alpha)
        for tensor in tensors(rule):
            before, after = rule(tensor), deep(tensor)
            power = (2 * alpha - 1 if optimizer == "sgd" else alpha - 1) * tensor.in_branch
            assert after.lr == pytest.approx(before.lr * R**power), tensor
            assert after.decay == pytest.approx(before.decay * R ** (power * decays)), tensor
            if before.gradient is not None:
                share = R ** (-alpha * tensor.in_branch)
                assert after.gradient == pytest.approx(before.gradient * share)
            assert (after.eps, after.multiplier) == (before.eps, before.multiplier)
            assert after.init_std == before.init_std


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_epsilon_is_as_the_gradient_or_its_square(optimizer):
    power = 2 if optimizer == "adafactor" else 1
    for rule in (Everett("mup", 256, 64, optimizer), Mine(optimizer=optimizer)):
        deep = Depth(rule, depth=12, base_depth=4)
        for one, tensor in itertools.product((rule, deep), tensors(rule)):
            expected = one(tensor).gradient ** power
            assert EpsFollows(one)(tensor).eps == pytest.approx(expected), tensor
    if optimizer == "adam":  # the paper's own factor between the rates of SGD and AdamW
        for tensor in tensors(Dinan(256)):
            sizes = [
                Dinan(n, "hybrid")(t).lr / Dinan(n, "hybrid", optimizer="sgd")(t).lr
                for n, t in ((256, tensor), (64, tensor.at(Size(64), 1 / M)))
            ]
            eps = EpsFollows(Dinan(256, "hybrid"), base_width=64)(tensor).eps
            assert eps == pytest.approx(sizes[0] / sizes[1]), tensor


@pytest.mark.parametrize("name", ["mup", "ntk", "dinan", "mine"])
@pytest.mark.parametrize("power", [0.0, -0.5, -1.0])
def test_decay_has_its_power_in_what_sums_over_the_width(name, power):
    rule = rules()[name]
    spared = Decay(rule, power, spare="vectors", **own_base(rule))
    for tensor in tensors(rule):
        sums = tensor.role in (*BLOCK, Role.READOUT)
        before = rule(tensor)
        expected = before.decay * M ** (power * sums)
        after = Decay(rule, power, **own_base(rule))(tensor)
        assert after == replace(before, decay=pytest.approx(expected)), tensor
        vector = tensor.role in (Role.NORM_SCALE, Role.READOUT_BIAS)
        assert spared(tensor).decay == pytest.approx(0.0 if vector else expected)


@pytest.mark.parametrize("name", ["mup", "ntk", "dinan", "mine"])
def test_a_tuned_recipe_has_the_rules_powers_and_at_the_base_its_own_numbers(name):
    rule = rules()[name]
    tuned = Tuned(rule, INIT, **own_base(rule))
    for tensor in tensors(rule):
        small = tensor.at(Size(64), 1 / M)
        here, there, got = rule(tensor), rule(replace(small, size=Size(64))), tuned(tensor)
        for key in ("lr", "eps", "multiplier", "decay"):
            expected = getattr(here, key) and getattr(here, key) / getattr(there, key)
            assert getattr(got, key) == pytest.approx(expected), (tensor, key)
        if there.init_std and tensor.role not in (Role.NORM_SCALE, Role.READOUT_BIAS):
            assert got.init_std == pytest.approx(0.02 * here.init_std / there.init_std), tensor
        at_base = tuned(small)
        assert (at_base.lr, at_base.eps, at_base.multiplier) == (1.0, 1.0, 1.0)
        assert at_base.init_std in (0.0, 0.02)
    deep = Depth(rule, depth=12, base_depth=4)
    assert Tuned(rule, INIT, **own_base(rule)).forward().factors() == {}
    factors = {"residual_multiplier": pytest.approx(1 / 3)}
    assert Tuned(deep, INIT, **own_base(rule)).forward().factors() == factors
    language = Tuned(Dinan(256, "hybrid", init="bart"), INIT, base_width=64).forward()
    assert language.logit_multiplier == pytest.approx(M**-0.75)  # n^(-(1 + s) / 2)
    if name in ("mup", "ntk"):  # a bias that is added to logits starts as it did, at every width
        assert tuned(Tensor("relative_position", 8, 4)).init_std == 0.02


@pytest.mark.parametrize("convention", MUON_CONVENTIONS)
@pytest.mark.parametrize("name", ["mup", "ntk", "dinan", "mine"])
def test_muon_has_one_spectral_norm_at_every_width(name, convention):
    """The change of multiplier times tensor, over the root of out/in, has no power of the width;
    of match_rms it has none with the power of its rate."""
    rule = rules()[name]
    muon = Muon(rule, convention, **own_base(rule))
    for tensor in tensors(rule):
        before, after = rule(tensor), muon(tensor)
        if tensor.role not in BLOCK:
            assert after == replace(before, optimizer="adam")
            continue
        small = tensor.at(Size(64), 1 / M)
        norms = [
            number.lr * number.multiplier * math.sqrt(t.fan_in / t.fan_out)
            for t, number in ((tensor, after), (small, muon(small)))
        ]
        assert after.optimizer == "muon" and norms[0] == pytest.approx(norms[1]), tensor


@pytest.mark.parametrize("name", ["mup", "ntk", "mine"])
def test_a_tied_rule_has_another_factor_on_logits_and_gradients_of_its_own(name):
    rule = rules()[name]
    assert Tied(rule).forward() == rule.forward()._replace(logit_multiplier=1 / M, ties=True)
    for tensor in tensors(rule):
        number, gradient = rule(tensor), rule(tensor).gradient
        if name != "mup" and gradient and tensor.role.facts.kind != "logits":
            gradient = pytest.approx(gradient * M**-0.5)  # 1 / n in place of its root
        assert Tied(rule)(tensor) == replace(number, gradient=gradient)


@pytest.mark.parametrize("name", ["standard", "ntk", "mup", "mean_field"])
def test_gradients_below_a_tie_are_those_of_a_network(name):
    """Logits are products with the table that was looked up, times b / n."""
    seen, said = [], []
    for width in (64, 1024):
        rule = Tied(Everett(name, width, 64))
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape, g=generator: torch.randn(*shape, generator=g, requires_grad=True)
        table, square = draw(16, width) / 8, draw(width, width)
        features = table[:8] @ (square / width**0.5).T
        logits = features @ table.T * rule.forward().logit_multiplier
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(8, 16))
        grown = torch.autograd.grad(loss, square)[0] * width**0.5
        seen.append(float(grown.square().mean().sqrt()))
        number = rule(Tensor("query", width, width))
        said.append(number.gradient / number.multiplier)
    assert said[1] / said[0] == pytest.approx(1 / 16) == pytest.approx(seen[1] / seen[0], rel=0.1)
    for role, expected in (("query", 1), ("token_embedding", 16)):  # changes of order one
        small, large = (
            Tied(Everett(name, width, 64, "sgd"))(Tensor(role, width, width)).absorbed("sgd").lr
            for width in (64, 1024)
        )
        assert large / small == pytest.approx(expected)


# What catches a wrong power, a case of it, and what is planted: powers, in these numbers of a rule,
# of a size over that at which the power is 1.
ALIKE, HYBRID = ("mup", "adam"), {"strategy": "hybrid"}
PLANTED = [
    (prescriptions.test_everett_rates_are_the_papers_powers_of_the_width_ratio, ALIKE,
     ("Everett", "lr", "width", 128)),
    (prescriptions.test_everett_multipliers_and_initial_scales, ("mup", 256, 128),
     ("Everett", "multiplier init_std", "width", 128)),
    (prescriptions.test_everett_epsilon_follows_the_gradient_if_asked, ALIKE,
     ("Everett", "gradient", "width", 128)),
    (prescriptions.test_everett_attention_scales, ("mup", None, -1),
     ("Everett", "attention", "width", 128)),
    (papers.test_dinan_rates_are_those_of_the_papers_table, (HYBRID, 0.5, "adam"),
     ("Dinan", "lr", "width", 64)),
    (papers.test_dinan_initialises_the_vision_model_as_the_paper_did, (HYBRID, 0.5),
     ("Dinan", "init_std", "width", 64)),
    (papers.test_dinan_initialises_the_language_model_as_the_paper_did, (HYBRID, 1, 1024**-0.75),
     ("Dinan", "logit_multiplier", "width", 64)),
    (test_epsilon_is_as_the_gradient_or_its_square, ("adam",), ("Dinan", "gradient", "width", 64)),
    (papers.test_bordelon_rates_first_layer_and_readout, (8, 4, 3, 0.75, "adam"),
     ("Bordelon", "lr multiplier init_std", "width", 16)),
    (papers.test_bordelon_rates_first_layer_and_readout, (8, 4, 3, 0.75, "adam"),
     ("Bordelon", "lr multiplier init_std", "depth", 1)),
    (papers.test_bordelon_scalars_of_the_forward_pass, (0.75,),
     ("Bordelon", "residual_multiplier attention", "depth", 1)),
    (test_depth_is_bordelons_power_around_any_rule, ALIKE,
     ("Depth", "lr decay gradient residual_multiplier", "depth", 4)),
    (test_epsilon_is_as_the_gradient_or_its_square, ("adam",), ("EpsFollows", "eps", "width", 64)),
    (test_decay_has_its_power_in_what_sums_over_the_width, ("mup", -1.0),
     ("Decay", "decay", "width", 64)),
    (test_a_tuned_recipe_has_the_rules_powers_and_at_the_base_its_own_numbers, ("mup",),
     ("Tuned", "lr eps decay multiplier init_std", "width", 64)),
    (test_a_tuned_recipe_has_the_rules_powers_and_at_the_base_its_own_numbers, ("mup",),
     ("Tuned", "residual_multiplier logit_multiplier", "width", 64)),
    (test_muon_has_one_spectral_norm_at_every_width, ("mup", "spectral"),
     ("Muon", "lr", "width", 64)),
    (test_a_tied_rule_has_another_factor_on_logits_and_gradients_of_its_own, ("mup",),
     ("Tied", "lr eps decay gradient init_std multiplier logit_multiplier", "width", 64)),
    (completep.test_completep_is_that_of_its_authors_code, (96, 8, 0.75),
     ("CompleteP", "lr eps decay", "width", 32)),
    (completep.test_completep_is_that_of_its_authors_code, (96, 8, 0.75),
     ("CompleteP", "lr eps decay residual_multiplier", "depth", 2)),
    (horizon.test_a_published_set_holds_what_its_source_says, ("sde",),
     ("Horizon", "lr eps decay", "batch", horizon.BATCH)),
    (horizon.test_a_published_set_holds_what_its_source_says, ("sde",),
     ("Horizon", "lr eps decay", "tokens", horizon.TOKENS)),
]  # fmt: skip


@pytest.mark.parametrize("power", [-1, -0.5, 0.5, 1])
@pytest.mark.parametrize(
    ("test", "case", "name", "key", "size", "one"),
    [(*by, name, key, *at) for *by, (name, keys, *at) in PLANTED for key in keys.split()],
    ids=[f"{name}-{key}-{at}" for *_, (name, keys, at, _) in PLANTED for key in keys.split()],
)
def test_a_wrong_power_in_a_prescription_is_caught(
    test, case, name, key, size, one, power, monkeypatch
):
    """By the test that is named; CompleteP's in the outermost rule that it returns."""
    kind = getattr(param_groups, "Decay" if name == "CompleteP" else name)
    passes = key in Forward._fields
    where = "forward" if passes else "change" if issubclass(kind, Around) else "__call__"
    right = getattr(kind, where)

    def wrong(self, tensor=None, *numbers):
        made = right(self, tensor, *numbers)
        at = (tensor or self.size) if passes else self.at(tensor)
        ratio = (getattr(at, size) if size in Size._fields else vars(self)[size]) / one
        value = getattr(made, key)
        value = value + power if key == "attention" else value * ratio**power
        return made._replace(**{key: value}) if passes else replace(made, **{key: value})

    monkeypatch.setattr(kind, where, wrong)
    with pytest.raises((AssertionError, PlanError)):
        test(*case)


AROUND = {
    "depth": lambda rule: Depth(rule, depth=12, base_depth=4, alpha=0.75, decays=True),
    "eps": EpsFollows,
    "decay": lambda rule: Decay(rule, exponent=-0.5, spare="vectors"),
    "tuned": lambda rule: Tuned(rule, INIT, base_head_dim=8),
    "muon": lambda rule: Muon(rule, "match_rms", adam_factor=0.5),
    "tied": Tied,
}


def stacked(order, rule):
    for name in order:
        rule = AROUND[name](rule)
    return rule


@pytest.mark.parametrize("name", ["mup", "ntk", "mine"])
@pytest.mark.parametrize("last", ["tuned", "muon"])
def test_the_order_of_wrappers_changes_no_number(name, last):
    """Of depth, epsilon, decay and recipe; of Muon with all but the recipe; of a tie with all."""
    rule = rules()[name]
    first, *others = itertools.permutations(("depth", "eps", "decay", last))
    orders = [
        (*one[:place], "tied", *one[place:]) for one in (first, first[::-1]) for place in range(5)
    ]
    others += orders[:4] + orders[5:]  # but the one that is compared with
    for order in others:
        expected = stacked(first + ("tied",) * ("tied" in order), rule)
        made = stacked(order, rule)
        for tensor in tensors(rule):
            close(made(tensor), expected(tensor))
        assert made.forward() == pytest.approx(expected.forward()) or (
            made.forward()._replace(way_out="") == expected.forward()._replace(way_out="")
        )


def test_muon_inside_a_recipe_is_divided_by_its_rate_at_the_base_and_outside_is_not():
    rule, up = rules()["mup"], Tensor("mlp_in", 256, 1024)
    assert Tuned(Muon(rule), INIT)(up).lr == 1.0
    assert Muon(Tuned(rule, INIT))(up).lr == 2.0


def test_a_base_width_of_its_own_leaves_the_base_depth_of_the_rule_inside():
    rule, query = Dinan(256), Tensor("query", 256, 256)
    for around in (
        lambda one: Tuned(one, INIT, base_width=64),
        lambda one: EpsFollows(one, base_width=64),
    ):
        inside = around(Depth(rule, 8, 2, alpha=0.5))
        outside = Depth(around(rule), 8, 2, alpha=0.5)
        assert numbers_at(inside, query) == pytest.approx(numbers_at(outside, query))
        assert inside.forward() == outside.forward() and inside.base == Size(64, 2)


def test_what_compares_with_nothing_gives_no_base_to_others():
    with pytest.raises(PlanError, match="has no base width to compare with"):
        Tuned(Decay(Dinan(256), spare="vectors"), INIT)


def numbers_at(rule, tensor):
    return {key: vars(rule(tensor))[key] for key in ("init_std", "lr", "eps", "decay")}


def test_a_readouts_bias_has_as_many_entries_at_the_base_size():
    """Dinan et al.'s rate of it goes with their number, which no width changes."""
    rule, bias = Dinan(256), Tensor("readout_bias", 1, 10)
    assert Tuned(rule, INIT, base_width=64)(bias).lr == 1.0
    assert EpsFollows(rule, base_width=64)(bias).eps == 1.0


@pytest.mark.parametrize("name", [one for one in AROUND if one != "tied"])
def test_what_a_rule_of_ones_own_refuses_its_wrappers_refuse(name):
    class Careful(Mine):
        def refuse(self, tensor, asked):
            super().refuse(tensor, asked)
            if tensor.role is Role.HIDDEN:
                raise PlanError("no hidden matrix here")

    model, options = torch.nn.Linear(256, 256, bias=False), {"lr": 0.1, "applied": {}}
    rule = AROUND[name](Careful())
    options["applied"] = rule.forward().factors()
    for role in ("hidden", "mlp_in"):
        call = functools.partial(plan, model, [Rule("weight", role, trunk=False)], rule, **options)
        if role == "hidden":
            with pytest.raises(PlanError, match="no hidden matrix here"):
                call()
        else:
            assert call()["weight"].lr > 0


def test_a_role_is_added_by_one_row(tmp_path):
    """In a copy of the package: every rule and wrapper has numbers for it by its facts alone."""
    copy = tmp_path / "param_groups"
    shutil.copytree(Path(param_groups.__file__).parent, copy)
    source = (copy / "roles.py").read_text(encoding="utf-8")
    row = '    BOTTLENECK = "bottleneck", Facts("hidden", (IN,))\n'
    mark = '    LORA_A = "lora_a"'
    assert source.count(mark) == 1
    (copy / "roles.py").write_text(source.replace(mark, row + mark), encoding="utf-8")
    program = """
from torch import nn
from param_groups import *
model = nn.Sequential(nn.Linear(64, 8, bias=False))
stem = Muon(Decay(EpsFollows(Depth(Everett("mup", 64, 16), 2, 1, 0.5)), -1.0))
options = {"lr": 1.0, "applied": stem.forward().factors()}
row = plan(model, [Rule("0.weight", "bottleneck", trunk=False)], stem, **options,
           weight_decay=0.1, decay_mode="independent").rows[0]
print(row.role, row.fan_in, row.lr, row.eps / 1e-8, row.decay_per_step, row.optimizer)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    role, *numbers, optimizer = ran.stdout.split()
    assert (role, optimizer) == ("bottleneck", "adam")  # Muon trains what grows on both axes
    expected = [64, 0.25 * 2**-0.5, 0.25 * 2**-0.5, 0.1 / 4]
    assert [float(number) for number in numbers] == pytest.approx(expected)
