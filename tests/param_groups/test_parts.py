"""Tensors of several matrices under Muon: fused is separate, rates by closed form, whole models."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import muon_models
from param_groups import Everett, Muon, PlanError, Role, Rule, plan, rules_for
from param_groups.check import judge
from param_groups.check.steps import first_step
from param_groups.check.stock import sizes
from param_groups.check.theory import GROWS, OK
from param_groups.optim import MuonAdamW
from param_groups.plan import Plan
from param_groups.stock.rules import stock
from tests.param_groups.test_muon import Kernel, matrix, spectral


def held(shape, role=Role.MLP_IN, layout=None, parts=None, **numbers):
    """One tensor under Muon, its plan and the parts of a gradient as separate matrices would be."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(shape))
    numbers = {"lr": 0.02, "weight_decay": 0.1, "decay_mode": "independent", **numbers}
    keys = {"applied": {"attention_scale": 1 / 16}, "head_dim": 16}
    keys = keys if role is Role.QKV else {}
    rule = Rule("w", role, layout, parts=parts)
    made = plan(model, [rule], spectral(64, 64), absorb_multipliers=True, **numbers, **keys)
    made.initialise(model, seed=0)
    return model, made


CUTS = {  # (shape, role, layout, parts) -> the matrices (out, in), by hand
    "qkv": ((192, 64), Role.QKV, None, None, lambda w: w.split(64)),
    "grouped keys": ((96, 64), Role.QKV, None, (64, 16, 16), lambda w: w.split([64, 16, 16])),
    "their ratios": ((96, 64), Role.QKV, None, (4, 1, 1), lambda w: w.split([64, 16, 16])),
    "one of two": ((128, 64), Role.QKV, None, (2, 1, 1), lambda w: w.split([64, 32, 32])),
    "by head": ((192, 64), Role.QKV, None, (1,) * 12, lambda w: w.split(16)),
    "conv1d": ((64, 192), Role.QKV, "transposed", None, lambda w: w.mT.split(64)),
    "gate and up": ((256, 64), Role.MLP_IN, None, (1, 1), lambda w: w.split(128)),
    "experts": ((3, 128, 64), Role.MLP_IN, "experts", None, lambda w: w.unbind()),
    "halves": ((3, 128, 64), Role.MLP_IN, "experts", (1, 1), lambda w: w.reshape(6, 64, 64)),
    "turned": (
        *((3, 64, 128), Role.MLP_IN, "experts_transposed", (1, 1)),
        lambda w: [half for one in w for half in one.mT.split(64)],
    ),
    "layers of experts": (
        *((2, 3, 128, 64), Role.MLP_IN, "experts", None),
        lambda w: w.flatten(0, 1).unbind(),
    ),
}


@pytest.mark.parametrize("case", CUTS)
def test_fused_is_separate_to_the_bit_with_each_parts_own_rate(case):
    shape, role, layout, parts, cut = CUTS[case]
    model, made = held(shape, role, layout, parts)
    pieces = [nn.Parameter(one.contiguous()) for one in cut(model.w.detach().clone())]
    groups = [
        {"params": [one], "lr": 0.02 * math.sqrt(len(one) / one.shape[1]), "optimizer": "muon"}
        for one in pieces
    ]
    for group in groups:
        group["weight_decay"] = made["w"].decay_per_step / group["lr"]
    fused, separate = made.optimizers(model), MuonAdamW(groups)
    for step in range(3):
        model.w.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        for one, gradient in zip(pieces, cut(model.w.grad), strict=True):
            one.grad = gradient.contiguous()
        fused.step()
        separate.step()
    for one, other in zip(cut(model.w.detach()), pieces, strict=True):
        assert torch.equal(one, other)
    assert made["w"].decay_per_step == pytest.approx(0.1)


def test_what_is_printed_and_saved_is_the_rate_of_every_part():
    model, made = held((96, 64), Role.QKV, None, (4, 1, 1))
    assert made["w"].parts == ((64, 1.0), (16, 0.5), (16, 0.5))
    assert "0.02 by Muon: 1 x 0.02 (64 outputs), 2 x 0.01 (16 outputs)" in made.table()
    again = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made and not again.differences(made)
    older = made.to_dict()
    for row in older["rows"]:
        del row["parts"], row["layout"]
    assert Plan.from_dict(older).differences(made) == [
        "w: layout  -> linear",
        "w: parts () -> ((64, 1.0), (16, 0.5), (16, 0.5))",
    ]
    (group,) = made.groups(model, several=True)
    assert group["parts"] == made["w"].parts and group["param_names"] == ["w"]
    plain, whole = held((96, 64), Role.MLP_IN)
    assert "parts" not in whole.groups(plain, several=True)[0]


def test_a_saved_plan_holds_the_numbers_of_float32_and_the_lengths_of_torch():
    saved = held((96, 64), Role.MLP_IN)[1].to_dict()
    largest, longest = 2.0**127, 2**63 - 1
    row = saved["rows"][0] | {"lr": largest, "fan_in": longest}
    again = Plan.from_dict(saved | {"rows": [row]})["w"]
    assert (again.lr, again.fan_in) == (largest, longest)
    for key, value in (("lr", 2 * largest), ("fan_in", longest + 1)):
        with pytest.raises(PlanError, match=f"w: {key} is "):
            Plan.from_dict(saved | {"rows": [row | {key: value}]})


def test_a_state_without_the_parts_is_refused_and_one_from_json_goes_on():
    model, made = held((96, 64), Role.QKV, None, (4, 1, 1))
    optimizer = made.optimizers(model)
    state = optimizer.state_dict()
    groups = json.loads(json.dumps(state["param_groups"]))
    optimizer.load_state_dict(copy.deepcopy(state) | {"param_groups": groups})
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    del state["param_groups"][0]["parts"]
    with pytest.raises(ValueError, match="parts are .* in the state, .*64, 1.0.* here"):
        made.optimizers(model).load_state_dict(state)


def test_a_decay_that_would_differ_between_parts_is_refused():
    numbers = {"weight_decay": 0.1, "decay_mode": "per_group"}
    held((192, 64), Role.QKV, **numbers)
    with pytest.raises(PlanError, match="'w' .* matrices of 64, 16 outputs, .* 'independent'"):
        held((96, 64), Role.QKV, None, (4, 1, 1), **numbers)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_kernel_is_flattened_and_groups_of_a_convolution_are_matrices(groups):
    model = Kernel(n=8, out=16, groups=groups)
    made = plan(model, [Rule("conv.weight", Role.HIDDEN)], spectral(8, 8), lr=0.02)
    made.initialise(model, seed=0)
    optimizer, before = made.optimizers(model), model.conv.weight.detach().clone()
    model.conv.weight.grad = matrix(16, 72 // groups).view_as(model.conv.weight)
    optimizer.step()
    rate = 0.02 * math.sqrt((16 / groups) / (72 / groups))
    for one in (model.conv.weight.detach() - before).flatten(1).split(16 // groups):
        values = torch.linalg.svdvals(one) / rate
        assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("case", CUTS)
def test_a_step_is_as_large_as_the_audit_says(case):
    model, made = held(*CUTS[case][:4])
    assert 0.8 < first_step(model, [made.optimizers(model)], 1.0)["w"] < 1.2


# Models that people have


RATES = {  # (model, tensor) -> its rates over lr part by part
    ("nanoGPT", "c_attn.weight"): [1, 1, 1],
    ("GPT-2", "c_attn.weight"): [1, 1, 1],
    ("GPT-2, tied", "c_attn.weight"): [1, 1, 1],
    ("Llama, 1 heads to a key", "k_proj.weight"): [1],
    ("Llama, 4 heads to a key", "k_proj.weight"): [0.5],
    ("Llama, 8 heads to a key", "k_proj.weight"): [8**-0.5],
    ("Mixtral", "experts.gate_up_proj"): [2, 2],
    ("Phi-3", "qkv_proj.weight"): [1, 0.5**0.5, 0.5**0.5],
    ("Phi-3", "gate_up_proj.weight"): [2, 2],
    ("ViT (timm)", "attn.qkv.weight"): [1, 1, 1],
}


@pytest.mark.parametrize(("name", "tensor"), RATES)
def test_models_that_people_have_are_planned_alike_at_every_width(name, tensor):
    plans, wrong = {}, {}
    for width in (128, 256, 512):
        with torch.device("meta"):
            _, plans[width] = muon_models.planned(name, width)
            _, wrong[width] = muon_models.planned(name, width, muon_models.WRONG[1])
        (row, *_) = [row for row in plans[width].rows if row.name.endswith(tensor)]
        each = [factor * row.lr / 2**-8 for _, factor in row.parts or ((0, 1.0),)]
        assert each == pytest.approx(RATES[name, tensor])
    assert {one.verdict for one in judge(plans)} == {OK}
    planted = {one.name for one in judge(wrong) if one.verdict == GROWS}
    assert any(one.endswith(tensor) for one in planted)


@pytest.mark.thorough
def test_a_right_plan_passes_the_check_and_wrong_ones_fail(capsys):
    """Of stacks of experts; stock/models.md has the table of all models."""
    muon_models.main(["--widths", "32", "64", "128", "--models", "Mixtral"])
    right, *wrong = json.loads(capsys.readouterr().out)["rows"]
    assert "passed" in right["measured alone"]
    assert ["FAILED" in row["measured alone"] for row in wrong] == [True, True]


def test_keys_between_queries_are_refused_until_heads_are_named():
    with torch.device("meta"):
        model = stock("hf:gpt_neox", **sizes("hf:gpt_neox", 64))
    rules, name = rules_for(model), "gpt_neox.layers.0.attention.query_key_value.weight"
    muon = Muon(Everett("mup", 64, 64, qk_exponent=-0.5))
    with pytest.raises(PlanError, match="query_key_value.weight' .*heads have theirs in turn"):
        plan(model, rules, muon, lr=0.1, absorb_multipliers=True)
    heads = [replace(rule, parts=(1,) * 12) if rule.matches(name) else rule for rule in rules]
    made = plan(model, heads, muon, lr=0.1, absorb_multipliers=True)
    row = made[name]
    assert row.lr == pytest.approx(0.1 * 0.5) and row.parts == ((16, 1.0),) * 12
