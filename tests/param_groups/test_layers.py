"""The layers with a forward multiplier against plain torch formulas, gradients included."""

import functools

import pytest
import torch
from torch import nn

from param_groups.layers import Embedding, LayerNorm, Linear

MULTIPLIERS = (1.0, 0.3, -2.0, 2.0)


def values(*shape, seed=0):
    """Reproducible float64 numbers that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def filled(layer, multiplier):
    """The layer in float64 with reproducible tensors and a multiplier."""
    layer = layer.double()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(values(*parameter.shape, seed=10 + index))
    layer.multiplier = multiplier
    return layer


def agree(layer, formula, inputs):
    """Output and the gradients of the layer's tensors and inputs are the formula's."""
    tensors = [*layer.parameters(), *(x for x in inputs if x.requires_grad)]
    got, wanted = layer(*inputs), formula(*layer.parameters(), *inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
    weights = values(*got.shape, seed=99).detach()
    mine = torch.autograd.grad((got * weights).sum(), tensors)
    theirs = torch.autograd.grad((wanted * weights).sum(), tensors)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def normalised(m, w, x):
    centred = x - x.mean(-1, keepdim=True)
    return m * w * centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()


LAYERS = {
    "linear": (Linear(5, 3), lambda m, w, x: m * (x @ w.T), values(2, 4, 5)),
    "bias": (Linear(5, 3, bias=True), lambda m, w, b, x: m * (x @ w.T + b), values(2, 5)),
    "embedding": (Embedding(7, 4), lambda m, w, ids: m * w[ids], torch.tensor([[0, 6, 3, 3]])),
    "norm": (LayerNorm(6, eps=1e-3), normalised, values(2, 3, 6)),
}


@pytest.mark.parametrize("m", MULTIPLIERS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_multiplier_times_the_formula(name, m):
    layer, formula, inputs = LAYERS[name]
    agree(filled(layer, m), functools.partial(formula, m), [inputs])


def test_layer_norm_has_the_papers_eps_and_no_bias():
    layer = LayerNorm(6)
    assert layer.eps == 1e-6
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert torch.equal(layer.weight, torch.ones(6))


@pytest.mark.parametrize(
    ("layer", "count"), [(Linear(3, 2), 1), (Linear(3, 2, bias=True), 2), (Embedding(3, 2), 1)]
)
def test_tensors_are_nan_until_a_plan_fills_them(layer, count):
    assert len(list(layer.parameters())) == count
    assert all(parameter.isnan().all() for parameter in layer.parameters())


def test_a_multiplier_of_one_leaves_the_weight_itself():
    """Nothing is copied or recorded for autograd where no parameterisation asks for it."""
    layer = Linear(3, 2)
    assert layer.effective_weight() is layer.weight
    layer.multiplier = 2.0
    assert layer.effective_weight() is not layer.weight


@pytest.mark.parametrize("layer", [Linear(3, 2), Embedding(3, 2), LayerNorm(3)])
def test_layers_start_without_a_multiplier_and_never_save_it(layer):
    """State dicts stay torch's, so a saved model loads into torch's own layers."""
    assert layer.multiplier == 1.0
    assert list(layer.state_dict()) == ["weight"]


def test_the_layers_are_torchs_own_kinds():
    assert isinstance(Linear(3, 2), nn.Linear) and isinstance(Embedding(3, 2), nn.Embedding)


def test_a_16_bit_product_is_rounded_once():
    """Under autocast the multiplier meets the float32 weight, as the class promises."""
    layer = Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4) * 1.0038)  # bfloat16 alone would make this 1
    layer.multiplier = 1.75
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(torch.eye(4))
    assert out.dtype == torch.bfloat16
    assert out.diagonal().tolist() == [225 / 128] * 4  # 1.0038 * 1.75 * 128 = 224.85
