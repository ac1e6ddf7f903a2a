"""Rates and initial values grow with the width as those of the library `mup` do, tensor by tensor.

The library's numbers were taken from `mup` 1.0.0 on 2026-11-22. Where it is installed
(`pip install --no-deps mup==1.0.0`; it is no requirement) they are taken from it again.
"""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from param_groups import Everett, plan, rules_for
from param_groups.check.stock import sizes
from param_groups.stock.rules import stock
from tests.param_groups.wrapped import ruled

BASE, TIMES, LR = 64, 4, 0.01
# Growth of the rate of multiplier times tensor under Adam and SGD from width 64 to 256, and the
# power of the width in the tensor's standard deviation.
HIDDEN, READOUT = (1 / 4, 1.0, -0.5), (1 / 4, 1 / 4, -1.0)
INPUT, OUTPUT_BIAS = (1.0, 4.0, 0.0), (1.0, 1.0, 0.0)
MLP_RULES = ruled("""0.weight patch_embedding, 2.weight hidden, 4.weight readout,
4.bias readout_bias, [02].bias hidden_bias""")


def mlp(width, readout=nn.Linear):
    layers = nn.Linear(12, width), nn.Linear(width, width), readout(width, 10)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def gpt2(width):
    return stock("hf:gpt2", **sizes("hf:gpt2", width))


def vit(width):
    name = "timm:vit_small_patch16_224"
    return stock(name, **sizes(name, width))


# Model, its readout, its hidden matrices, the number of its tensors.
MODELS = {
    "mlp": (mlp, "4", ["2.weight"], 6),
    "gpt2": (gpt2, "lm_head", ["c_attn.weight", "c_proj.weight", "c_fc.weight"], 29),
    "vit": (vit, "head", ["qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight"], 32),
}


def recorded(name, readout, hidden):
    if name.startswith(f"{readout}."):
        return READOUT if name.endswith("weight") else OUTPUT_BIAS
    return HIDDEN if name.endswith(tuple(hidden)) else INPUT


def planned(make, width, optimizer):
    """A model and its torch optimiser by this package: multipliers are absorbed."""
    model = make(width)
    rules = MLP_RULES if make is mlp else rules_for(model)
    power = None if make is mlp else -0.5
    rule = Everett("mup", width, BASE, optimizer=optimizer, qk_exponent=power)
    numbers = plan(model, rules, rule, lr=LR, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    return model, {"adam": AdamW, "sgd": SGD}[optimizer](numbers.groups(model))


def by_mup(mup, make, readout, width, optimizer):
    """The same by mup, whose users exchange the readout and draw the initial values again."""
    base, delta, model = (make(n) for n in (BASE, 2 * BASE, width))
    for made in (base, delta, model):
        layer = made.get_submodule(readout)
        rows, columns = layer.weight.shape
        made.set_submodule(readout, mup.MuReadout(columns, rows, bias=layer.bias is not None))
    mup.set_base_shapes(model, base, delta=delta)
    if make is not mlp:  # the libraries draw std 0.02 at every width
        for parameter in model.parameters():
            if parameter.ndim == 2:
                mup.normal_(parameter, std=0.02)
    return model, {"adam": mup.MuAdamW, "sgd": mup.MuSGD}[optimizer](model.parameters(), lr=LR)


def growth(prepared, power):
    """{name: (growth of m^power lr, power of the width in m std)} for a forward multiplier m."""
    torch.manual_seed(0)
    found = []
    for model, optimizer in map(prepared, (BASE, TIMES * BASE)):
        names = {parameter: name for name, parameter in model.named_parameters()}
        numbers = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                layer = model.get_submodule(names[parameter].rpartition(".")[0])
                divides = hasattr(layer, "width_mult") and parameter is layer.weight
                m = 1 / layer.width_mult() if divides else 1.0
                std = m * parameter.detach().double().std().item()
                numbers[names[parameter]] = (m**power * group["lr"], std)
        found.append(numbers)
    small, large = found
    return {
        name: (
            large[name][0] / rate,
            round(2 * math.log(large[name][1] / std, TIMES)) / 2 if std else 0.0,
        )
        for name, (rate, std) in small.items()
    }


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_rates_and_initial_values_grow_as_mups(name, optimizer):
    make, readout, hidden, count = MODELS[name]
    power = {"adam": 1, "sgd": 2}[optimizer]
    ours = growth(lambda width: planned(make, width, optimizer), power)
    assert len(ours) == count
    for tensor, (rate, initial) in ours.items():
        numbers = recorded(tensor, readout, hidden)
        assert rate == pytest.approx(numbers[power - 1], rel=1e-12), tensor
        assert initial == numbers[2], tensor


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_mups_numbers_are_its_own(name, optimizer):
    mup = pytest.importorskip("mup")
    make, readout, hidden, _ = MODELS[name]
    power = {"adam": 1, "sgd": 2}[optimizer]
    theirs = growth(lambda width: by_mup(mup, make, readout, width, optimizer), power)
    for tensor, (rate, initial) in theirs.items():
        numbers = recorded(tensor, readout, hidden)
        assert rate == pytest.approx(numbers[power - 1], rel=1e-12), tensor
        assert initial == numbers[2] or tensor.endswith("bias"), tensor  # mup's biases are random
