"""The encoder against torch's own attention, formulas written out once more, and its variances."""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from effective_theory.dinan.config import Activation, Config, block_names
from effective_theory.dinan.inputs import inputs
from effective_theory.dinan.network import ACTIVATIONS, Encoder

BLOCK_TENSORS = [f"attention.0.{name}" for name in ("query", "key", "value", "attention_output")]
BLOCK_TENSORS += ["mlp.0.mlp_in", "mlp.0.mlp_out"]


def config(stem="vision", init=None, **model):
    """A small network; language comes with a causal mask and no pooling."""
    language = stem == "language"
    settings = {"depth": 1, "heads": 2, "outputs": 40, "pooling": not language} | model
    settings = {"causal": language} | settings
    return Config(model={"stem": stem, **settings}, init=init or {})


def encoder(config, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Encoder(config, width, torch.float64).initialise(generator)


def test_every_group_is_one_tensor_and_a_tied_head_has_none():
    vision = [name for name, _ in Encoder(config(), 8).named_parameters()]
    language = [name for name, _ in Encoder(config("language"), 8).named_parameters()]
    assert sorted(vision) == sorted(["stem", "position", *BLOCK_TENSORS, "readout", "readout_bias"])
    assert sorted(language) == sorted(["stem", "position", *BLOCK_TENSORS])
    assert block_names(2) == ("stem", "attention.0", "mlp.0", "attention.1", "mlp.1", "head")
    assert block_names(0) == ("stem", "head")


@pytest.mark.parametrize("stem", ["vision", "language"])
def test_initial_variances(stem):
    width, s, ratio = 128, 0.5, 3
    names = "stem position query key value attention_output mlp_in mlp_out".split()
    names += ["readout"] if stem == "vision" else []
    init = {name: 0.5 + index for index, name in enumerate(names)}
    network = encoder(config(stem, init, mlp_ratio=ratio, s=s), width)
    expected = {name: init[name.rsplit(".", 1)[-1]] / width for name in BLOCK_TENSORS}
    expected["mlp.0.mlp_out"] /= ratio
    expected["stem"] = init["stem"] / (16 if stem == "vision" else 1)  # (1.25)
    expected["position"] = init["position"]
    if stem == "vision":
        expected |= {"readout": init["readout"] / width ** (1 + s), "readout_bias": 0.0}
    for name, tensor in network.named_parameters():
        error = 5 * math.sqrt(2 / tensor.numel())
        assert tensor.var(correction=0).item() == pytest.approx(expected.pop(name), rel=error)
        assert abs(tensor.mean()) <= 5 * tensor.std() / tensor.numel() ** 0.5
    assert not expected


def test_draws_depend_on_the_generator_alone():
    network = encoder(config(), 8, seed=3)
    before = {name: tensor.clone() for name, tensor in network.named_parameters()}
    network.initialise(torch.Generator().manual_seed(4))
    assert not torch.equal(network.stem, before["stem"])
    network.initialise(torch.Generator().manual_seed(3))
    for name, tensor in network.named_parameters():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(causal):
    block = encoder(config(causal=causal, heads=2), 8).attention[0]
    s = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    without = dict.fromkeys(("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_bias"))
    given = {"embed_dim_to_check": 8, "num_heads": 2, "add_zero_attn": False, "dropout_p": 0.0}
    given |= {"out_proj_weight": block.attention_output, "use_separate_proj_weight": True}
    names = {"q_proj_weight": block.query, "k_proj_weight": block.key, "v_proj_weight": block.value}
    signals = [s.transpose(0, 1)] * 3
    expected, _ = F.multi_head_attention_forward(
        *signals, **without, **given, **names, attn_mask=mask
    )
    torch.testing.assert_close(block(s, {}), expected.transpose(0, 1))


def normalised(z, epsilon):
    """(1.11) as printed."""
    mean = z.mean(-1, keepdim=True)
    return (z - mean) / ((z**2).mean(-1, keepdim=True) - mean**2 + epsilon).sqrt()


@pytest.mark.parametrize("stem", ["vision", "language"])
def test_every_block_is_the_papers(stem):
    settings = config(stem, s=0.5, norm_eps=0.3, activation="relu")
    network, x = encoder(settings, 8), inputs(settings)
    z = network(x)
    if stem == "vision":
        first = torch.einsum("ij,atj->ati", network.stem, x) + network.position
    else:
        first = torch.stack([network.stem[row] for row in x]) + network.position  # (1.9)
    torch.testing.assert_close(z["stem"], first)
    second = first + network.attention[0](normalised(first, 0.3), {})
    torch.testing.assert_close(z["attention.0"], second)
    hidden = torch.einsum("ji,ati->atj", network.mlp[0].mlp_in, normalised(second, 0.3))
    third = second + torch.einsum("ij,atj->ati", network.mlp[0].mlp_out, hidden.clamp(min=0))
    torch.testing.assert_close(z["mlp.0"], third)
    if stem == "vision":
        network.readout_bias.data.uniform_()
        outputs = torch.einsum("ij,atj->ati", network.readout, normalised(third, 0.3))
        outputs = (outputs + network.readout_bias).mean(1)
    else:
        outputs = torch.einsum("ij,atj->ati", network.stem, normalised(third, 0.3)) / 8**0.75
    torch.testing.assert_close(network(x)["head"], outputs)
    assert tuple(z) == block_names(1)


def test_a_causal_network_does_not_see_later_tokens():
    settings = config("language", depth=2)
    network, ids = encoder(settings, 8), inputs(settings)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 27
    before, after = network(ids)["head"], network(changed)["head"]
    torch.testing.assert_close(before[:, :2], after[:, :2], rtol=0, atol=0)
    assert ((before - after)[:, 2:].abs().amax(-1) > 1e-6).all()


def test_activations():
    w = torch.linspace(-3, 3, 13, dtype=torch.float64)
    cubic = math.sqrt(2 / math.pi) * (w + 0.044715 * w**3)
    expected = {
        "gelu": w * (1 + torch.erf(w / math.sqrt(2))) / 2,
        "gelu_tanh": w * (1 + torch.tanh(cubic)) / 2,
        "relu": (w + w.abs()) / 2,
        "silu": w / (1 + torch.exp(-w)),
        "tanh": 1 - 2 / (torch.exp(2 * w) + 1),
        "erf": torch.special.erf(w),
        "identity": w,
    }
    assert set(expected) == set(ACTIVATIONS) == set(get_args(Activation))
    for name, values in expected.items():
        torch.testing.assert_close(ACTIVATIONS[name](w), values)
