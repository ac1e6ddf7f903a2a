"""Probes against float64 formulas, and that they neither change training nor fall silent."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from measure import probes
from measure.probes import Probes
from nanolm_c4.model import Decoder
from param_groups import Everett, PlanError, Role, Rule, plan
from param_groups.layers import Embedding, LayerNorm, Linear
from param_groups.models import TIMM_VIT_RULES, TORCH_DECODER_RULES
from param_groups.roles import DECODER_RULES, Layout, present
from training import optimizers, processes
from training.errors import UserError


def decoder(parameterization="mup", rule="adam", eps=1e-9, lr=0.01, **changes):
    """A small decoder in the given parameterisation with its plan and optimiser."""
    sizes = {"vocab_size": 40, "context": 8, "layers": 2, "heads": 2, "head_dim": 8}
    model = Decoder(**{**sizes, "mlp_ratio": 2, "attention_scale": 0.3, **changes})
    prescription = Everett(parameterization, 16, 8, optimizer=rule)
    numbers = plan(model, DECODER_RULES, prescription, lr=lr, eps=eps, weight_decay=1e-3)
    numbers.initialise(model, 0)
    return model, numbers, optimizers.build(rule, numbers.groups(model, check=False))


def probed(*args, **options):
    """The decoder with its probes and optimiser."""
    model, numbers, optimizer = decoder(*args, **options)
    return model, Probes(model, numbers, optimizer), optimizer


def rows(seed=0, batch=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (batch, 9), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def backward(model, seed=0):
    (model(*rows(seed)) / 24).backward()


def probed_step(model, probe, optimizer, seed=0):
    """One step with its line; the gradients are left in place."""
    optimizer.zero_grad()
    backward(model, seed)
    probe.before_step()
    optimizer.step()
    probe.after_step()
    return probe.read(lambda: model(rows()[0]))


def rms(tensor):
    return tensor.detach().double().square().mean().sqrt().item()


def single(layer, rows_of_plan, width, **options):
    """A model of one layer called `layer`, its plan and plain SGD."""
    model = nn.Module()
    model.layer = layer
    model.forward = lambda *args: model.layer(*args)
    prescription = Everett("standard", width, width, optimizer="sgd")
    numbers = plan(model, rows_of_plan, prescription, lr=0.1, **options)
    return model, numbers, optimizers.build("sgd", numbers.groups(model, check=False))


def linear(weight, bias=None, multiplier=1.0):
    """A readout with the given weight (out, in), in the probes' own model and plan."""
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data = weight.float()
    rules = [Rule("layer.weight", Role.READOUT)]
    if bias is not None:
        layer.bias.data = bias.float()
        rules.append(Rule("layer.bias", Role.READOUT_BIAS))
    model, *rest = single(layer, rules, weight.shape[1])
    layer.multiplier = multiplier
    return model, *rest


def ratio(weight, z, **options):
    """The probes' alignment of z W^T."""
    model, numbers, optimizer = linear(weight, **options)
    probe = Probes(model, numbers, optimizer)
    return probe.alignment(lambda: model(z.float()))["layer"]["alignment"]


# The log alignment ratio, Def. 3.1


def definition(weight, z):
    """Def. 3.1 in float64; weight (out, in), z (..., in)."""
    w, z = weight.detach().double(), z.detach().double()
    return math.log(rms(z @ w.T) / (rms(z) * rms(w))) / math.log(w.shape[1])


def test_weights_parallel_to_every_input_have_alignment_one():
    u, v, tokens = (torch.randn(size, dtype=torch.float64) for size in (24, 64, 10))
    assert ratio(torch.outer(u, v), torch.outer(tokens, v)) == pytest.approx(1, abs=1e-6)
    # One aligned output of 24 is worth a constant factor, not an exponent.
    one = torch.outer(torch.eye(24, dtype=torch.float64)[0], torch.ones(64))
    assert ratio(one, torch.ones(10, 64)) == pytest.approx(1, abs=1e-6)
    assert ratio(torch.ones(24, 64), torch.ones(10, 64)) == pytest.approx(1, abs=1e-6)


def test_an_orthogonal_matrix_has_alignment_one_half():
    assert ratio(torch.eye(64), torch.randn(10, 64)) == pytest.approx(0.5, abs=1e-6)
    rotation = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64)).Q
    assert ratio(rotation, torch.randn(10, 64)) == pytest.approx(0.5, abs=1e-6)


def test_independent_weights_and_inputs_have_alignment_one_half():
    # RMS^2 of the product is a mean of 2,048 values around n; its relative spread is about
    # sqrt(2 / 256 + 2 / 512), so A is within 0.11 / (2 ln 256) = 0.01 at one sigma.
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(512, 256, generator=generator)
    z = 3 * torch.randn(4, 64, 256, generator=generator)
    assert ratio(weight, z) == pytest.approx(0.5, abs=0.03)


def test_inputs_the_weights_remove_have_none():
    weight, z = torch.zeros(3, 4), torch.zeros(2, 4)
    weight[:, 0], z[:, 1] = 1, 1
    assert ratio(weight, z) is None
    assert ratio(torch.zeros(3, 4), torch.ones(2, 4)) is None
    assert ratio(torch.full((3, 4), math.nan), torch.ones(2, 4)) is None


def test_fan_in_one_has_none():
    layer = nn.Linear(1, 5, bias=False)
    model, numbers, optimizer = single(layer, [Rule("layer.weight", Role.READOUT)], 1)
    line = Probes(model, numbers, optimizer).alignment(lambda: model(torch.ones(2, 1)))
    assert line["layer"]["alignment"] is None


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 4, 32)])
def test_all_leading_axes_are_one_batch(shape):
    weight, z = torch.randn(24, 32), torch.randn(shape) + 1
    assert ratio(weight, z) == pytest.approx(definition(weight, z), abs=1e-6)


def test_a_multiplier_cancels_and_scales_the_output():
    weight, z, multiplier = torch.randn(24, 32), torch.randn(7, 32) + 0.5, 0.03
    assert ratio(weight, z, multiplier=multiplier) == pytest.approx(definition(weight, z), abs=1e-6)
    assert ratio(weight * multiplier, z) == pytest.approx(definition(weight, z), abs=1e-6)
    model, numbers, optimizer = linear(weight, multiplier=multiplier)
    line = Probes(model, numbers, optimizer).alignment(lambda: model(z))["layer"]
    expected = rms(multiplier * z.double() @ weight.double().T)
    assert line["output_rms"] == pytest.approx(expected, rel=1e-6)
    assert line["input_rms"] == pytest.approx(rms(z), rel=1e-6)


@pytest.mark.parametrize("multiplier", [1.0, 0.03])
def test_a_bias_is_left_out_however_large(multiplier):
    weight, z, bias = torch.randn(24, 32), torch.randn(7, 32), 1e6 * torch.randn(24)
    found = ratio(weight, z, bias=bias, multiplier=multiplier)
    assert found == pytest.approx(definition(weight, z), abs=1e-6)
    model, numbers, optimizer = linear(weight, bias=bias, multiplier=multiplier)
    line = Probes(model, numbers, optimizer).alignment(lambda: model(z))["layer"]
    expected = multiplier * rms(z.double() @ weight.double().T)
    assert line["output_rms"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("parameterization", ["standard", "ntk", "mup", "mean_field"])
def test_every_dense_layer_of_the_decoder(parameterization):
    model, probe, optimizer = probed(parameterization)
    line = probed_step(model, probe, optimizer)
    inputs = {}
    dense = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    for name, module in dense.items():
        module.register_forward_hook(lambda m, args, y, name=name: inputs.update({name: args[0]}))
    model(rows()[0])
    assert list(line["layers"]) == list(dense) and len(dense) == 13
    for name, module in dense.items():
        expected = definition(module.weight, inputs[name])
        assert line["layers"][name]["alignment"] == pytest.approx(expected, abs=1e-5), name
        assert 0 < line["layers"][name]["alignment"] < 1


def test_parameterisations_that_compute_the_same_have_the_same_alignment():
    found = []
    for parameterization in ("standard", "ntk"):
        model, numbers, optimizer = decoder(parameterization)
        line = Probes(model, numbers, optimizer).alignment(lambda: model(rows()[0]))
        found.append([layer["alignment"] for layer in line.values()])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


class TwoPaths(nn.Module):
    """One layer, used for two inputs of different size and scale."""

    def __init__(self):
        super().__init__()
        self.layer = Linear(16, 16)
        self.again = self.layer

    def forward(self, first, second):
        return self.layer(first), self.again(x=second)


def test_a_layer_used_twice_is_one_entry_over_both_inputs():
    model = TwoPaths()
    rules = [Rule("layer.weight", Role.MLP_IN)]
    numbers = plan(model, rules, Everett("standard", 16, 16), lr=0.1)
    numbers.initialise(model, 0)
    probe = Probes(model, numbers, optimizers.build("adam", numbers.groups(model, check=False)))
    first, second = torch.randn(3, 16), 5 + torch.randn(11, 16)
    line = probe.alignment(lambda: model(first, second))
    expected = definition(model.layer.weight, torch.cat([first, second]))
    assert list(line) == ["layer"]
    assert line["layer"]["alignment"] == pytest.approx(expected, abs=1e-6)


class Tied(nn.Module):
    """Word embedding and readout share their weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.readout = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.readout.weight = self.tokens.weight

    def forward(self, ids):
        return self.readout(self.tokens(ids))


def test_a_tied_readout_is_dense_and_its_lookup_is_not():
    model = Tied()
    rules = [Rule("tokens.weight", Role.TOKEN_EMBEDDING)]
    numbers = plan(model, rules, Everett("standard", 16, 16, optimizer="sgd"), lr=0.1)
    ids = torch.arange(6)
    probe = Probes(model, numbers, optimizers.build("sgd", numbers.groups(model, check=False)))
    line = probe.alignment(lambda: model(ids))
    expected = definition(model.readout.weight, model.tokens(ids))
    assert list(line) == ["readout"]
    assert line["readout"]["alignment"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [12, 14])  # 14: two columns and rows outside every patch
@pytest.mark.parametrize("bias", [False, True])
def test_a_patch_projection_is_a_dense_layer_over_patches(size, bias):
    layer = nn.Conv2d(3, 8, kernel_size=4, stride=4, bias=bias)
    rules = [Rule("layer.weight", Role.PATCH_EMBEDDING), Rule("layer.bias", Role.HIDDEN_BIAS)]
    model, numbers, optimizer = single(layer, rules[: 1 + bias], 8)
    images = torch.randn(2, 3, size, size) + 1
    line = Probes(model, numbers, optimizer).alignment(lambda: model(images))["layer"]
    patches = F.unfold(images[..., :12, :12], kernel_size=4, stride=4).transpose(1, 2)
    expected = definition(layer.weight.flatten(1), patches)
    assert line["alignment"] == pytest.approx(expected, abs=1e-6)


def test_a_vision_transformer_of_timm():
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2,
        num_classes=5, drop_rate=0.3, drop_path_rate=0.3,
    )  # fmt: skip
    rules = present(TIMM_VIT_RULES, model)
    numbers = plan(model, rules, Everett("standard", 24, 24), lr=0.01)
    numbers.initialise(model, 0)
    optimizer = optimizers.build("adam", numbers.groups(model, check=False))
    images = torch.randn(2, 3, 32, 32)
    line = Probes(model, numbers, optimizer).alignment(lambda: model(images))
    assert list(line) == ["patch_embed.proj"] + [
        f"blocks.{block}.{name}"
        for block in range(2)
        for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ] + ["head"]
    model.eval()
    z = model.blocks[0].norm1(model._pos_embed(model.patch_embed(images)))
    expected = definition(model.blocks[0].attn.qkv.weight, z)
    assert line["blocks.0.attn.qkv"]["alignment"] == pytest.approx(expected, abs=1e-5)


def test_under_autocast_the_ratios_are_those_of_its_rounded_products():
    model, probe, optimizer = probed()
    exact = probe.alignment(lambda: model(rows()[0]))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = probe.alignment(lambda: model(rows()[0]))
    for name, line in exact.items():
        # A relative error of 2^-8 in z, W and the product, over ln 16.
        assert rounded[name]["alignment"] == pytest.approx(line["alignment"], abs=5e-3)
    assert rounded != exact


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
        probe.before_step()
        optimizer.step()
        probe.after_step()
        line = probe.read(lambda: model(torch.ones(1, 4)))
        shares.append(line["tensors"]["layer.weight"]["below_10_eps"])
        gradient = gradient * 1.05
    # v_hat of the second step: (0.98 g^2 + 1.05^2 g^2) / 1.98, so 0.0099 rises to 0.01015.
    assert shares == [3 / 8, 2 / 8]


@pytest.mark.parametrize("rule", ["adam", "adam_param_scaling"])
def test_the_share_below_ten_eps_follows_each_groups_eps(rule, monkeypatch):
    monkeypatch.setattr(probes, "_BLOCK", 100)  # several blocks per tensor, the last one shorter
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
    numbers = plan(model, DECODER_RULES, Everett("mup", 16, 8), lr=0.01)
    optimizer = optimizers.build("adam", numbers.groups(model, check=False))
    probe = Probes(model, numbers, optimizer)
    backward(model)
    model.final_norm.weight.grad = None
    probe.before_step()
    optimizer.step()
    probe.after_step()
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


@pytest.mark.parametrize("norms", [
    lambda tensor: probes._norm_in_blocks(tensor),
    # What other devices run.
    lambda tensor: torch._foreach_norm([tensor], 2, dtype=torch.float64)[0],
])  # fmt: skip
def test_norms_are_exact_where_float32_sums_are_not(norms):
    ones = torch.ones(20_000_000)
    assert norms(ones).item() == pytest.approx(math.sqrt(20_000_000), rel=1e-12)
    assert norms(torch.full((3, 3), 1e-30)).item() == pytest.approx(3e-30, rel=1e-6)
    assert norms(torch.full((3, 3), 1e30)).item() == pytest.approx(3e30, rel=1e-6)
    across = torch.randn(300, 1000).T
    assert norms(across).item() == pytest.approx(across.double().norm().item(), rel=1e-12)


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
    assert probe._old == {} and probe._measured == {}
    assert all(p.grad_fn is None for p in model.parameters())


# Errors


def test_a_wrapped_or_compiled_model_is_refused():
    model, numbers, optimizer = decoder()
    with pytest.raises(PlanError, match="_orig_mod.*unwrapped, uncompiled"):
        Probes(torch.compile(model), numbers, optimizer)
    wrapped = nn.Module()
    wrapped.module = model
    with pytest.raises(PlanError, match="unwrapped, uncompiled"):
        Probes(wrapped, numbers, optimizer)
    model.blocks[0].compile()
    with pytest.raises(UserError, match="'blocks.0' was compiled in place"):
        Probes(model, numbers, optimizer)


def test_a_plan_or_optimiser_of_another_model_is_refused():
    model, numbers, optimizer = decoder()
    other, other_numbers, other_optimizer = decoder(layers=1)
    with pytest.raises(PlanError, match="another model"):
        Probes(model, other_numbers, optimizer)
    with pytest.raises(UserError, match="'token_embedding.weight' is only in one of the two"):
        Probes(model, numbers, other_optimizer)
    foreign = {**other_numbers.groups(other)[0], "params": [other.readout.weight]}
    optimizer.add_param_group({**foreign, "param_names": ["foreign"]})
    with pytest.raises(UserError, match="a tensor of another model is only in one"):
        Probes(model, numbers, optimizer)
    partial = numbers.groups(model, check=False)
    names = partial[0]["param_names"]
    partial[0]["params"] = partial[0]["params"][1:]
    with pytest.raises(UserError, match=f"'{names[0]}' is only in one of the two"):
        Probes(model, numbers, optimizers.build("adam", partial))


def test_a_model_without_dense_layers_is_refused():
    rules = [Rule("layer.weight", Role.TOKEN_EMBEDDING)]
    with pytest.raises(UserError, match="none of the plan's 1 tensors .* dense layer"):
        Probes(*single(Embedding(5, 8), rules, 8))
    with pytest.raises(UserError, match="none of the plan's 1 tensors"):
        Probes(*single(LayerNorm(8), [Rule("layer.weight", Role.NORM_SCALE)], 8))


def test_an_unknown_or_wrapped_optimiser_is_refused():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model, numbers, optimizer = decoder()
    AcceleratorState._reset_state()
    wrapped = Accelerator(cpu=processes.ON_CPU).prepare(optimizer)
    with pytest.raises(UserError, match="do not know the optimiser AcceleratedOptimizer"):
        Probes(model, numbers, wrapped)
    assert Probes(model, numbers, wrapped.optimizer).layers
    with pytest.raises(UserError, match="do not know the optimiser RMSprop"):
        Probes(model, numbers, torch.optim.RMSprop(model.parameters()))


class Doubling(nn.Linear):
    """Not the product the probes would take it for."""

    def forward(self, x):
        return 2 * super().forward(x)


class Pair(nn.Module):
    """Any first layer, and one the probes know."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.readout = layer, nn.Linear(8, 8, bias=False)


def pair(layer, role, layout=None):
    model = Pair(layer)
    rules = [Rule("layer.weight", role, layout), Rule("readout.weight", Role.READOUT)]
    numbers = plan(model, rules, Everett("standard", 8, 8, optimizer="sgd"), lr=0.1)
    return model, numbers, optimizers.build("sgd", numbers.groups(model, check=False))


@pytest.mark.parametrize("layer", [
    Doubling(8, 8, bias=False),
    nn.Conv2d(8, 8, 3, bias=False),
    nn.Conv2d(8, 8, 3, stride=3, padding=1, bias=False),
    nn.Conv2d(8, 8, 3, stride=3, dilation=2, bias=False),
    nn.Conv2d(8, 8, 3, stride=3, groups=2, bias=False),
    nn.Embedding(8, 8),
])  # fmt: skip
def test_a_matrix_whose_product_cannot_be_seen_is_refused(layer):
    with pytest.raises(UserError, match=f"'layer.weight' .* {type(layer).__name__}, whose"):
        Probes(*pair(layer, Role.PATCH_EMBEDDING))


def test_torchs_attention_is_refused():
    model = nn.Module()
    model.tokens, model.positions = nn.Embedding(9, 16), nn.Embedding(4, 16)
    model.block = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
    model.readout = nn.Linear(16, 9)
    numbers = plan(model, present(TORCH_DECODER_RULES, model), Everett("standard", 16, 16), lr=0.1)
    optimizer = optimizers.build("adam", numbers.groups(model, check=False))
    with pytest.raises(UserError, match="in_proj_weight.*MultiheadAttention, whose product"):
        Probes(model, numbers, optimizer)


def test_a_plan_with_the_axes_exchanged_is_refused():
    model, numbers, optimizer = pair(nn.Linear(4, 8, bias=False), Role.PATCH_EMBEDDING)
    assert [layer.fan_in for layer in Probes(model, numbers, optimizer).layers] == [4, 8]
    exchanged = pair(nn.Linear(8, 4, bias=False), Role.PATCH_EMBEDDING, Layout.TRANSPOSED)
    with pytest.raises(UserError, match="'layer.weight' fan_in 4, but its layer sums 8"):
        Probes(*exchanged)


def test_a_layer_that_is_not_called_is_an_error_and_hooks_go():
    model, probe, optimizer = probed()
    with pytest.raises(RuntimeError, match=r"'blocks.0.attention.query' was not called .*\(13 of"):
        probe.alignment(lambda: None)
    with pytest.raises(RuntimeError, match=r"'readout' was not called .*\(1 of 13"):
        probe.alignment(lambda: model(*rows()))  # the loss fuses the readout
    assert not any(module._forward_hooks for module in model.modules())
    assert len(probe.alignment(lambda: model(rows()[0]))) == 13


def test_a_layer_called_more_often_than_before_is_an_error():
    model, probe, optimizer = probed()
    probe.alignment(lambda: model(rows()[0]))
    with pytest.raises(RuntimeError, match="called 2 times .* but 1 times in the first"):
        probe.alignment(lambda: [model(rows()[0]) for _ in range(2)])


def test_a_tensor_replaced_or_added_later_is_an_error():
    model, probe, optimizer = probed()
    model.readout.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match="'readout.extra' was replaced, added or removed"):
        probe.alignment(lambda: model(rows()[0]))
    del model.readout.extra
    backward(model)
    model.readout.weight = nn.Parameter(model.readout.weight.detach().clone())
    with pytest.raises(RuntimeError, match="'readout.weight' was replaced"):
        probe.before_step()


def test_the_calls_of_a_step_belong_together():
    model, probe, optimizer = probed()
    with pytest.raises(RuntimeError, match="no tensor has a gradient"):
        probe.before_step()
    with pytest.raises(RuntimeError, match="after_step without before_step"):
        probe.after_step()
    with pytest.raises(RuntimeError, match="read without before_step and after_step"):
        probe.read(lambda: None)
    backward(model)
    probe.before_step()
    with pytest.raises(RuntimeError, match="read without before_step and after_step"):
        probe.read(lambda: None)
    optimizer.step()
    probe.after_step()
    probe.read(lambda: model(rows()[0]))
    with pytest.raises(RuntimeError, match="read without"):
        probe.read(lambda: model(rows()[0]))


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
