"""The paper's Vision Transformer: its listing re-implemented in numpy, its tensors and roles."""

import math

import numpy as np
import pytest
import torch

from param_groups import Bordelon, plan
from param_groups.roles import Role, assign
from vit_cifar5m.config import ModelConfig
from vit_cifar5m.model import ROLES, VisionTransformer, cross_entropy, measure


def network(optimizer="adam", seed=0, dtype=torch.float32, patch=8, classes=10, **rule):
    """A small model with the plan's values, and its prescription."""
    sizes = {"head_dim": 6, "heads": 4, "depth": 3} | rule
    shape = {"head_dim": sizes["head_dim"], "heads": sizes["heads"], "layers": sizes["depth"]}
    shape = ModelConfig(patch_size=patch, classes=classes, **shape)
    prescription = Bordelon(optimizer=optimizer, **sizes)
    model = VisionTransformer(
        shape,
        attention_scale=prescription.forward().attention_scale(shape.head_dim),
        residual_multiplier=prescription.forward().residual_multiplier,
    ).to(dtype)
    plan(model, ROLES, prescription, lr=0.1).initialise(model, seed)
    return model, prescription


def images(rows=3, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64).to(dtype)


# The listings of App. B, in numpy


def layer_norm(x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6)


def gelu(x):
    """flax's nn.gelu, the tanh form."""
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def listing(weights, x, *, adam, dim, heads, depth, scale_exp, alpha_depth, beta, gamma, patch=8):
    """The ViT of App. B with weights as drawn; x channels first; alpha_depth 1 is what it shows.

    Its (L/beta)^(-1/2) and (beta/L) are, for any alpha_depth, beta^(1/2) L^(1/2 - alpha_depth) and
    beta L^(-alpha_depth); Adam's first layers have L^(1 - alpha_depth), and gamma divides the
    output (Table 1 and eq. 5).
    """
    n, grid = heads * dim, 32 // patch
    first = (
        math.sqrt(n) * depth ** (1 - alpha_depth)
        if adam
        else beta**0.5 * depth ** (0.5 - alpha_depth)
    )

    def attention(h, w):
        c = 1.5 - scale_exp
        q, k = (h @ w[name].T / heads**0.5 / dim**c for name in ("query", "key"))
        v = h @ w["value"].T / math.sqrt(n)
        q, k, v = (z.reshape(*z.shape[:2], heads, dim) for z in (q, k, v))
        logits = dim**-scale_exp * np.einsum("bihd,bjhd->bhij", q, k)
        mixed = np.einsum("bhij,bjhd->bihd", softmax(logits), v).reshape(h.shape)
        return mixed @ w["output"].T / math.sqrt(n)

    def mlp(h, w):
        return gelu(h @ w["up"].T / math.sqrt(n)) @ w["down"].T / math.sqrt(n)

    # einops: b (w p1) (h p2) c -> b (w h) (p1 p2 c), of channels-last images
    last = x.transpose(0, 2, 3, 1).reshape(len(x), grid, patch, grid, patch, 3)
    z = last.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), grid * grid, -1)
    z = first * (z @ weights["patch_embedding.weight"].T) / math.sqrt(3 * patch**2)
    z = z + first * weights["position_embedding.weight"]
    for layer in range(depth):
        start = f"blocks.{layer}."
        w = {
            name.split(".")[-2]: value for name, value in weights.items() if name.startswith(start)
        }
        z = z + beta * depth**-alpha_depth * attention(layer_norm(z), w)
        z = z + beta * depth**-alpha_depth * mlp(layer_norm(z), w)
    pooled = layer_norm(z).mean(1)
    return first * (pooled @ weights["readout.weight"].T) / (gamma * n)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("alpha_attention", "alpha_depth"), [(1.0, 1.0), (0.5, 0.75)])
def test_logits_are_those_of_the_papers_listing(optimizer, alpha_attention, alpha_depth):
    rule = {"alpha_attention": alpha_attention, "alpha_depth": alpha_depth}
    model, _ = network(optimizer, dtype=torch.float64, beta0=3.0, gamma0=0.2, **rule)
    x = images(dtype=torch.float64)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    numbers = {"scale_exp": alpha_attention, "alpha_depth": alpha_depth, "beta": 3.0, "gamma": 0.2}
    sizes = {"dim": 6, "heads": 4, "depth": 3}
    expected = listing(weights, x.numpy(), adam=optimizer == "adam", **sizes, **numbers)
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def test_every_tensor_has_the_role_it_plays_and_its_papers_numbers():
    model, rule = network("sgd", alpha_attention=0.5, alpha_depth=0.5, beta0=2.0, gamma0=0.25)
    block = {f"attention.{name}": Role(name) for name in ("query", "key", "value")}
    block |= {"attention.output": Role.ATTENTION_OUTPUT}
    block |= {"mlp.up": Role.MLP_IN, "mlp.down": Role.MLP_OUT}
    assert {found.name: found.role for found in assign(model, ROLES)} == {
        "patch_embedding.weight": Role.PATCH_EMBEDDING,
        "position_embedding.weight": Role.POSITION_EMBEDDING,
        **{f"blocks.{i}.{name}.weight": role for i in range(3) for name, role in block.items()},
        "readout.weight": Role.READOUT,
    }
    rows = plan(model, ROLES, rule, lr=1.0)
    n = 24
    # Table 1 for SGD at alpha_depth 1/2: the first and last layers' factor is beta^(1/2).
    first = 2.0**0.5
    assert rows["patch_embedding.weight"].multiplier == pytest.approx(first * 192**-0.5)
    assert rows["position_embedding.weight"].multiplier == pytest.approx(first)
    assert rows["readout.weight"].multiplier == pytest.approx(first / (0.25 * n))
    assert rows["blocks.1.attention.key.weight"].init_std == pytest.approx(6**0.5)
    assert rows["blocks.1.attention.key.weight"].multiplier == pytest.approx(4**-0.5 / 6)
    assert rows["blocks.1.mlp.up.weight"].multiplier == pytest.approx(n**-0.5)
    assert {row.lr for row in rows.rows} == {0.25**2 * n}  # eta_0 gamma0^2 n L^0


def test_a_zero_readout_starts_with_logits_of_zero():
    model, _ = network(zero_readout=True)
    assert not model(images()).any()
    assert network()[0](images()).any()


def test_it_compiles_without_graph_breaks():
    model, _ = network()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images()), model(images()))


def test_under_bf16_autocast_the_stream_stays_float32_and_logits_agree():
    model, types = network("sgd")[0], []
    model.blocks[2].register_forward_hook(lambda m, i, out: types.append(out.dtype))
    exact = model(images())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images())
    assert types == [torch.float32, torch.float32]
    assert 0 < (rounded - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_summed_and_top1_counts_the_largest(dtype):
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [0.5, 0.0, 0.0]], dtype=dtype)
    labels = torch.tensor([0, 2, 0])
    p = [math.exp(2) / (math.exp(2) + 1 + math.e), math.e / (1 + math.exp(3) + math.e)]
    p += [math.exp(0.5) / (math.exp(0.5) + 2)]
    found = measure(logits, labels)
    assert found["loss"].item() == pytest.approx(-sum(map(math.log, p)), rel=1e-6)
    assert found["loss"] == cross_entropy(logits, labels)
    assert found["loss"].dtype == torch.float32
    assert found["top1"] == 2
