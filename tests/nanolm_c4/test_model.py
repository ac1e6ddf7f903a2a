"""The decoder: sizes, causality, and agreement with plain torch."""

import pytest
import torch
import torch.nn.functional as F

from nanolm_c4.model import Decoder
from training.linear_cross_entropy import IGNORE

SMALL = {"vocab_size": 50, "context": 12, "layers": 2, "heads": 3, "head_dim": 4, "mlp_ratio": 4}


def small(seed=0, **changes):
    """A little decoder in float64 with every weight drawn at a size where all parts matter."""
    factors = {"attention_scale": 0.5, "residual_multiplier": 1.0}
    model = Decoder(**{**SMALL, **factors, **changes}).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data.copy_(noise + 1 if "norm" in name else noise)
    tied = "readout.weight" not in dict(model.named_parameters())
    setattr(model.readout, "logit_multiplier" if tied else "multiplier", 0.7)
    return model


def tokens(rows=2, length=12, seed=1):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def reference_logits(model, ids):
    """The same decoder written out with torch's basic operations."""
    weights = dict(model.named_parameters())
    heads, width = SMALL["heads"], SMALL["heads"] * SMALL["head_dim"]

    def norm(x, name):
        if name not in weights:
            return x
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).permute(0, 2, 1, 3)

    x = weights["token_embedding.weight"][ids]
    x = x + weights["position_embedding.weight"][: ids.shape[1]]
    for i in range(SMALL["layers"]):
        block = f"blocks.{i}."
        y = norm(x, block + "attention_norm.weight")
        q, k, v = (
            split(y @ weights[f"{block}attention.{part}.weight"].T)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(-1, -2) * model.blocks[i].attention.attention_scale
        future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        merged = attended.permute(0, 2, 1, 3).reshape(*ids.shape, width)
        x = x + merged @ weights[block + "attention.output.weight"].T
        y = norm(x, block + "mlp_norm.weight") @ weights[block + "mlp.up.weight"].T
        gelu = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + gelu @ weights[block + "mlp.down.weight"].T
    readout = weights.get("readout.weight", weights["token_embedding.weight"])
    return 0.7 * norm(x, "final_norm.weight") @ readout.T


@pytest.mark.parametrize("changes", [{}, {"norms": False}, {"tied": True}])
def test_logits_and_gradients_agree_with_the_written_out_decoder(changes):
    model, ids = small(**changes), tokens()
    norms = any("norm" in name for name, _ in model.named_parameters())
    assert norms is changes.get("norms", True)
    expected = reference_logits(model, ids)
    got = torch.autograd.grad(model(ids).square().sum(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    torch.testing.assert_close(model(ids), expected, rtol=1e-11, atol=1e-11)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_uses_the_readouts_multiplier_and_gives_every_parameter_its_gradient(tied):
    ids = tokens(rows=5)
    targets = ids.clone()
    targets[0, :3] = IGNORE
    model = small(tied=tied)
    logits = model(ids).flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(plain, parameters)
    loss = model(ids, targets)
    torch.testing.assert_close(loss, plain)
    got = torch.autograd.grad(loss, parameters)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_multipliers_scale_embedding_hidden_and_readout():
    """Multiplying a layer's multiplier by m is multiplying its weight by m."""
    ids = tokens()
    for layer in ("token_embedding", "blocks.0.mlp.up", "blocks.1.attention_norm", "readout"):
        with_multiplier, with_weight = small(), small()
        with_multiplier.get_submodule(layer).multiplier *= 1.7
        with_weight.get_submodule(layer).weight.data.mul_(1.7)
        torch.testing.assert_close(with_multiplier(ids), with_weight(ids), rtol=1e-11, atol=1e-11)


def test_softmax_and_loss_are_float32_under_bf16_autocast():
    model = small().float()
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids).dtype == torch.float32
        assert model(ids, ids).dtype == torch.float32


def test_it_compiles_without_graph_breaks():
    model, ids = small().float(), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, ids), model(ids, ids))
