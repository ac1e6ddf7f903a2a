"""The log alignment ratio of dense layers against its definition in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from measure.probes import Probes
from param_groups import Everett, Role, Rule, rules_for
from param_groups.layers import Linear
from tests.measure.probed import decoder, planned, probed, probed_step, rms, rows, single


def definition(weight, z):
    """Def. 3.1 in float64; weight (out, in), z (..., in)."""
    w, z = weight.detach().double(), z.detach().double()
    return math.log(rms(z @ w.T) / (rms(z) * rms(w))) / math.log(w.shape[1])


def aligned(found, *inputs):
    """The probes' lines of the layers of a model with its plan and optimiser."""
    return Probes(*found).alignment(lambda: found[0](*inputs))


def linear(weight, bias=None, multiplier=1.0):
    """A readout with the given weight (out, in), in the probes' own model and plan."""
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data = weight.float()
    rules = [Rule("layer.weight", Role.READOUT)]
    if bias is not None:
        layer.bias.data = bias.float()
        rules.append(Rule("layer.bias", Role.READOUT_BIAS))
    found = single(layer, rules, weight.shape[1])
    layer.multiplier = multiplier
    return found


def ratio(weight, z, **options):
    """The probes' alignment of z W^T."""
    return aligned(linear(weight, **options), z.float())["layer"]["alignment"]


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


def test_inputs_the_weights_remove_have_none():
    weight, z = torch.zeros(3, 4), torch.zeros(2, 4)
    weight[:, 0], z[:, 1] = 1, 1
    assert ratio(weight, z) is None
    assert ratio(torch.zeros(3, 4), torch.ones(2, 4)) is None
    assert ratio(torch.full((3, 4), math.nan), torch.ones(2, 4)) is None


def test_fan_in_one_has_none():
    layer = nn.Linear(1, 5, bias=False)
    line = aligned(single(layer, [Rule("layer.weight", Role.READOUT)], 1), torch.ones(2, 1))
    assert line["layer"]["alignment"] is None


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 4, 32)])
def test_all_leading_axes_are_one_batch(shape):
    weight, z = torch.randn(24, 32), torch.randn(shape) + 1
    assert ratio(weight, z) == pytest.approx(definition(weight, z), abs=1e-6)


def test_a_multiplier_cancels_and_scales_the_output():
    weight, z, multiplier = torch.randn(24, 32), torch.randn(7, 32) + 0.5, 0.03
    assert ratio(weight, z, multiplier=multiplier) == pytest.approx(definition(weight, z), abs=1e-6)
    assert ratio(weight * multiplier, z) == pytest.approx(definition(weight, z), abs=1e-6)
    line = aligned(linear(weight, multiplier=multiplier), z)["layer"]
    expected = rms(multiplier * z.double() @ weight.double().T)
    assert line["output_rms"] == pytest.approx(expected, rel=1e-6)
    assert line["input_rms"] == pytest.approx(rms(z), rel=1e-6)


@pytest.mark.parametrize("multiplier", [1.0, 0.03])
def test_a_bias_is_left_out_however_large(multiplier):
    weight, z, bias = torch.randn(24, 32), torch.randn(7, 32), 1e6 * torch.randn(24)
    found = ratio(weight, z, bias=bias, multiplier=multiplier)
    assert found == pytest.approx(definition(weight, z), abs=1e-6)
    line = aligned(linear(weight, bias=bias, multiplier=multiplier), z)["layer"]
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
    lines = [aligned(decoder(name), rows()[0]) for name in ("standard", "ntk")]
    found = [[layer["alignment"] for layer in line.values()] for line in lines]
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
    found = planned(model, rules, Everett("standard", 16, 16))
    found[1].initialise(model, 0)
    first, second = torch.randn(3, 16), 5 + torch.randn(11, 16)
    line = aligned(found, first, second)
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
    rules, ids = [Rule("tokens.weight", Role.TOKEN_EMBEDDING)], torch.arange(6)
    line = aligned(planned(model, rules, Everett("standard", 16, 16)), ids)
    expected = definition(model.readout.weight, model.tokens(ids))
    assert list(line) == ["readout"]
    assert line["readout"]["alignment"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [12, 14])  # 14: two columns and rows outside every patch
@pytest.mark.parametrize("bias", [False, True])
def test_a_patch_projection_is_a_dense_layer_over_patches(size, bias):
    layer = nn.Conv2d(3, 8, kernel_size=4, stride=4, bias=bias)
    rules = [Rule("layer.weight", Role.PATCH_EMBEDDING), Rule("layer.bias", Role.HIDDEN_BIAS)]
    images = torch.randn(2, 3, size, size) + 1
    line = aligned(single(layer, rules[: 1 + bias], 8), images)["layer"]
    patches = F.unfold(images[..., :12, :12], kernel_size=4, stride=4).transpose(1, 2)
    expected = definition(layer.weight.flatten(1), patches)
    assert line["alignment"] == pytest.approx(expected, abs=1e-6)


def test_a_vision_transformer_of_timm():
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    model = timm.create_model(
        "vit_tiny_patch16_224", **sizes, num_classes=5, drop_rate=0.3, drop_path_rate=0.3
    )
    found = planned(model, rules_for(model), Everett("standard", 24, 24))
    found[1].initialise(model, 0)
    images = torch.randn(2, 3, 32, 32)
    line = aligned(found, images)
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
    model, probe, _optimizer = probed()
    exact = probe.alignment(lambda: model(rows()[0]))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = probe.alignment(lambda: model(rows()[0]))
    for name, line in exact.items():
        # A relative error of 2^-8 in z, W and the product, over ln 16.
        assert rounded[name]["alignment"] == pytest.approx(line["alignment"], abs=5e-3)
    assert rounded != exact
