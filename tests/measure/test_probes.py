"""RMS of tensors and shares below epsilon in float64; probing changes nothing; what is refused."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from measure import representations
from measure.probes import Probes
from measure.representations import norm
from nanolm_c4.model import RULES
from param_groups import Everett, PlanError, Role, Rule
from param_groups.layers import Linear
from tests.measure.probed import (
    backward,
    decoder,
    planned,
    probed,
    probed_step,
    rms,
    rows,
    single,
    step_between,
)
from training.errors import UserError
from training.optim import optimizers

# RMS of parameters, gradients and updates; share below 10 eps


@pytest.mark.parametrize("rule", optimizers.OPTIMIZERS)
def test_rms_of_every_tensor(rule):
    model, probe, optimizer = probed(rule=rule)
    for seed in range(2):
        old = {name: p.detach().clone() for name, p in model.named_parameters()}
        line = probed_step(model, probe, optimizer, seed)
    assert list(line["tensors"]) == list(old)
    for name, parameter in model.named_parameters():
        found = line["tensors"][name]
        assert found["parameter_rms"] == pytest.approx(rms(parameter), rel=1e-9)
        assert found["gradient_rms"] == pytest.approx(rms(parameter.grad), rel=1e-9)
        assert found["update_rms"] == pytest.approx(rms(parameter - old[name]), rel=1e-9)
        assert found["update_rms"] > 0


def test_the_update_of_sgd_is_rate_times_gradient():
    model, numbers, _ = decoder(rule="sgd", lr=0.5)
    groups = [{**group, "weight_decay": 0.0} for group in numbers.groups(model, check=False)]
    optimizer = optimizers.build("sgd", groups, momentum=0.0)
    line = probed_step(model, Probes(model, numbers, optimizer), optimizer)
    for row in numbers.rows:
        found = line["tensors"][row.name]
        expected = row.lr * found["gradient_rms"]
        # theta' is rounded to float32: an absolute error of 2^-24 theta.
        assert found["update_rms"] == pytest.approx(expected, rel=1e-3), row.name


@pytest.mark.parametrize("rule", ["adam", "adam_param_scaling"])
def test_the_share_below_ten_eps_is_counted_with_bias_correction(rule):
    layer = Linear(4, 2)
    model, numbers, _ = single(layer, [Rule("layer.weight", Role.READOUT)], 4, eps=1e-3)
    layer.weight.data.fill_(0.5)
    optimizer = optimizers.build(rule, numbers.groups(model, check=False), betas=(0.9, 0.98))
    probe = Probes(model, numbers, optimizer)
    # sqrt(v_hat) is abs(g) at the first step; 10 eps = 0.01.
    gradient = torch.tensor([[0.0, 0.009, -0.0099, 0.0101], [1.0, -0.02, 0.5, -0.0101]])
    shares = []
    for _ in range(2):
        layer.weight.grad = gradient
        step_between(probe, optimizer)
        line = probe.read(lambda: model(torch.ones(1, 4)))
        shares.append(line["tensors"]["layer.weight"]["below_10_eps"])
        gradient = gradient * 1.05
    # v_hat of the second step: (0.98 g^2 + 1.05^2 g^2) / 1.98, so 0.0099 rises to 0.01015.
    assert shares == [3 / 8, 2 / 8]


@pytest.mark.parametrize("rule", ["adam", "adam_param_scaling"])
def test_the_share_below_ten_eps_follows_each_groups_eps(rule, monkeypatch):
    monkeypatch.setattr(representations, "_PIECE", 100)  # several blocks, the last one shorter
    model, numbers, optimizer = decoder(rule=rule)
    for index, group in enumerate(optimizer.param_groups):
        group["eps"] = 10.0 ** -(4 + index)
    line = probed_step(model, Probes(model, numbers, optimizer), optimizer)
    named, shares = dict(model.named_parameters()), []
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            below = (named[name].grad.abs().double() < 10 * group["eps"]).double().mean().item()
            # Entries at the threshold may fall on either side in float32.
            assert line["tensors"][name]["below_10_eps"] == pytest.approx(below, abs=2e-3)
            shares.append(below)
    assert min(shares) < 0.05 and max(shares) > 0.5


def test_an_eps_whose_square_is_no_float32():
    line = probed_step(*probed(eps=1e-30))
    embedding = line["tensors"]["token_embedding.weight"]["below_10_eps"]
    unseen = 1 - len(set(rows()[0].flatten().tolist())) / 40
    assert embedding == pytest.approx(unseen) and 0 < unseen < 1


@pytest.mark.parametrize("rule", ["sgd", "adafactor", "adam_atan2"])
def test_rules_without_an_eps_beside_sqrt_v_have_no_share(rule):
    line = probed_step(*probed(rule=rule))
    assert {tensor["below_10_eps"] for tensor in line["tensors"].values()} == {None}


def test_frozen_tensors_and_tensors_without_gradient():
    model, _, _ = decoder()
    model.readout.weight.requires_grad_(False)
    model, numbers, optimizer = planned(model, RULES, Everett("mup", 16, 8))
    probe = Probes(model, numbers, optimizer)
    backward(model)
    model.final_norm.weight.grad = None
    step_between(probe, optimizer)
    line = probe.read(lambda: model(rows()[0]))
    for name in ("readout.weight", "final_norm.weight"):
        found = line["tensors"][name]
        assert (found["gradient_rms"], found["update_rms"]) == (None, 0)
        assert found["below_10_eps"] is None and found["parameter_rms"] > 0
    assert line["layers"]["readout"]["alignment"] > 0


def test_a_line_is_json_also_after_divergence():
    model, numbers, optimizer = decoder()
    model.blocks[0].mlp.up.weight.data[0, 0] = math.nan
    model.token_embedding.weight.data[0, 0] = math.inf
    line = probed_step(model, Probes(model, numbers, optimizer), optimizer)
    json.dumps(line, allow_nan=False)
    assert line["tensors"]["blocks.0.mlp.up.weight"]["parameter_rms"] is None
    assert line["layers"]["blocks.0.mlp.up"]["alignment"] is None


def test_norms_are_exact_where_float32_sums_are_not():
    ones = torch.ones(20_000_000)
    assert norm(ones).item() == pytest.approx(math.sqrt(20_000_000), rel=1e-12)
    assert norm(torch.full((3, 3), 1e-30)).item() == pytest.approx(3e-30, rel=1e-6)
    assert norm(torch.full((3, 3), 1e30)).item() == pytest.approx(3e30, rel=1e-6)
    across = torch.randn(300, 1000).T
    assert norm(across).item() == pytest.approx(across.double().norm().item(), rel=1e-12)


# What probing leaves alone


def trained(probe_every, steps=4):
    torch.manual_seed(0)
    model, numbers, optimizer = decoder()
    model.blocks[0].mlp.register_forward_hook(lambda m, args, y: F.dropout(y, 0.2, m.training))
    probe = Probes(model, numbers, optimizer)
    for step in range(steps):
        probed = probe_every and step % probe_every == 0
        backward(model, step)
        if probed:
            probe.before_step()
        optimizer.step()
        if probed:
            probe.after_step()
            probe.read(lambda: model(rows()[0]))
        optimizer.zero_grad()
    return model.state_dict(), torch.get_rng_state()


def test_probing_does_not_change_training():
    plain, state = trained(probe_every=0)
    for every in (1, 3):
        probed, probed_state = trained(probe_every=every)
        assert all(torch.equal(plain[name], probed[name]) for name in plain)
        assert torch.equal(state, probed_state)


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_modes_and_random_state_are_as_before(fails):
    model, numbers, optimizer = decoder()
    model.blocks[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    probe = Probes(model, numbers, optimizer)
    state = torch.get_rng_state()
    seen = []

    def forward():
        seen.append((model.training, torch.is_grad_enabled()))
        model(rows()[0])
        torch.rand(3)
        if fails:
            raise KeyError("in the forward pass")

    if fails:
        with pytest.raises(KeyError, match="in the forward pass"):
            probe.alignment(forward)
    else:
        probe.alignment(forward)
    assert seen == [(False, False)] and torch.is_grad_enabled()
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_no_copy_of_the_parameters_outlives_the_step():
    model, probe, optimizer = probed()
    probed_step(model, probe, optimizer)
    assert probe._old == {}
    assert all(p.grad_fn is None for p in model.parameters())


def test_a_wrapped_or_compiled_model_is_refused():
    model, numbers, optimizer = decoder()
    with pytest.raises(PlanError, match="torch.compile; plan the unwrapped, uncompiled"):
        Probes(torch.compile(model), numbers, optimizer)
    wrapped = nn.Module()
    wrapped.module = model
    with pytest.raises(PlanError, match="unwrapped, uncompiled"):
        Probes(wrapped, numbers, optimizer)


def test_a_plan_of_another_model_is_refused():
    model, _, optimizer = decoder()
    with pytest.raises(PlanError, match="another model"):
        Probes(model, decoder(layers=1)[1], optimizer)


def test_a_probed_layer_has_the_fan_in_of_its_matrix():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False))
    rules = [Rule("0.weight", Role.PATCH_EMBEDDING), Rule("1.weight", Role.READOUT)]
    right = Probes(*planned(model, rules, Everett("standard", 8, 8, optimizer="sgd")))
    assert [layer.fan_in for layer in right.layers] == [4, 8]


def test_a_layer_that_is_not_called_is_an_error_and_hooks_go():
    model, probe, _optimizer = probed()
    with pytest.raises(UserError, match=r"'blocks.0.attention.query' was not called .*\(13 of"):
        probe.alignment(lambda: None)
    with pytest.raises(UserError, match=r"'readout' was not called .*\(1 of 13"):
        probe.alignment(lambda: model(*rows()))  # the loss fuses the readout
    assert not any(module._forward_hooks for module in model.modules())
    assert len(probe.alignment(lambda: model(rows()[0]))) == 13


def test_a_resumed_optimiser_keeps_its_share():
    lines = []
    for resumed in (False, True):
        model, probe, optimizer = probed(eps=1e-4)
        probed_step(model, probe, optimizer)
        if resumed:  # replaces the optimiser's groups and state
            optimizer.load_state_dict(optimizer.state_dict())
        lines.append(probed_step(model, probe, optimizer, seed=1))
    assert lines[0] == lines[1]
    assert 0 < lines[0]["tensors"]["readout.weight"]["below_10_eps"] < 1
