"""The Vision Transformer: its tensors, its function and its gradients, against plain torch."""

import math

import pytest
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from param_groups import Dinan, Forward, plan
from param_groups.roles import PlanError, Role, assign
from vit_imagenet.config import ModelConfig
from vit_imagenet.losses import IGNORE, measure, soft_cross_entropy
from vit_imagenet.model import ROLES, build

PAPER = {"width": 768, "layers": 12, "head_dim": 64, "mlp_ratio": 4}
PAPER |= {"patch_size": 16, "image_size": 224, "classes": 1000}
SMALL = {"width": 24, "layers": 2, "head_dim": 8, "mlp_ratio": 3}
SMALL |= {"patch_size": 4, "image_size": 12, "classes": 7}


def small(dtype=torch.float64, **changes):
    """A little model, every tensor drawn at a size where all parts matter."""
    model = build(ModelConfig(**{**SMALL, **changes})).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(0.3 * noise)
    return model


def images(dtype=torch.float64, rows=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 12, 12, generator=generator, dtype=torch.float64).to(dtype)


def on_meta(**changes):
    with torch.device("meta"):
        return build(ModelConfig(**{**PAPER, **changes}))


def test_every_tensor_has_the_role_it_plays():
    roles = {found.name: found.role for found in assign(on_meta(layers=2), ROLES)}
    block = {
        "attn.qkv.weight": Role.QKV,
        "attn.proj.weight": Role.ATTENTION_OUTPUT,
        "mlp.fc1.weight": Role.MLP_IN,
        "mlp.fc2.weight": Role.MLP_OUT,
    }
    assert roles == {
        "patch_embed.proj.weight": Role.PATCH_EMBEDDING,
        "pos_embed": Role.POSITION_EMBEDDING,
        **{f"blocks.{i}.{name}": role for i in range(2) for name, role in block.items()},
        "head.weight": Role.READOUT,
        "head.bias": Role.READOUT_BIAS,
    }


def reference_logits(model, x):
    """The same network written out with torch's basic operations (Part I, sections 0A to 0C)."""
    w, (width, head_dim, patch) = dict(model.named_parameters()), (24, 8, 4)
    rows, grid = len(x), 12 // patch

    def norm(z):
        centred = z - z.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def heads(z):
        return z.reshape(rows, grid**2, -1, head_dim).transpose(1, 2)

    cut = x.reshape(rows, 3, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
    z = cut.reshape(rows, grid**2, -1) @ w["patch_embed.proj.weight"].reshape(width, -1).T
    z = z + w["pos_embed"]
    for i in range(SMALL["layers"]):
        name = f"blocks.{i}."
        q, k, v = (heads(norm(z) @ m.T) for m in w[name + "attn.qkv.weight"].split(width))
        attention = (q @ k.transpose(-1, -2) / math.sqrt(head_dim)).softmax(-1) @ v
        merged = attention.transpose(1, 2).reshape(rows, grid**2, width)
        z = z + merged @ w[name + "attn.proj.weight"].T
        hidden = norm(z) @ w[name + "mlp.fc1.weight"].T
        gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        z = z + gelu @ w[name + "mlp.fc2.weight"].T
    return norm(z).mean(1) @ w["head.weight"].T + w["head.bias"]


def test_logits_and_gradients_agree_with_the_written_out_network():
    model, x = small(), images()
    assert model.training  # and nothing is random
    expected = reference_logits(model, x)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    got = torch.autograd.grad(model(x).square().sum(), parameters)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


class Steeper(Dinan):
    """A prescription with another power of the head dimension."""

    def forward(self, size=None):
        return Forward(attention=-1.0)


def test_only_the_attention_scale_that_timm_has_is_accepted():
    with pytest.raises(PlanError, match="multiplies by 0.353553 on query-key products, but"):
        plan(small(), ROLES, Steeper(24), lr=1.0)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_it_compiles_without_graph_breaks(precision):
    model, x = small(torch.float32), images(torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x))


def test_under_bf16_autocast_it_computes_the_same_up_to_rounding():
    """Products are bf16; weights, the residual stream and their gradients stay float32."""
    prescription = Dinan(24)
    model = small(torch.float32)
    plan(model, ROLES, prescription, lr=1.0).initialise(model, 0)
    x, types, norms = images(torch.float32), [], []
    model.norm.register_forward_pre_hook(lambda _, inputs: types.append(inputs[0].dtype))
    model.blocks[0].attn.qkv.register_forward_hook(lambda *io: types.append(io[2].dtype))
    exact = model(x)
    exact.square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x)
    rounded.float().square().sum().backward()
    assert types == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad.dtype == torch.float32
        norms.append((parameter.grad - gradient).norm() / gradient.norm())
    assert 1e-4 < max(norms) < 0.05


# Losses against timm's and counts by hand


def draw(batch=6, classes=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, classes, generator=generator)
    return logits, torch.randint(classes, (batch,), generator=generator)


def test_soft_cross_entropy_is_timms_on_timms_mixed_targets():
    logits, labels = draw()
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=7)
    _, targets = mixup(torch.randn(6, 3, 4, 4), labels)
    expected = 6 * SoftTargetCrossEntropy()(logits, targets)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), expected)


def test_soft_cross_entropy_of_smoothed_labels_is_timms_label_smoothing():
    logits, labels = draw()
    targets = torch.full((6, 7), 0.1 / 7).scatter_add(1, labels[:, None], torch.full((6, 1), 0.9))
    expected = 6 * LabelSmoothingCrossEntropy(0.1)(logits, labels)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), expected)


@pytest.mark.parametrize("loss", ["soft", "measured"])
def test_bf16_logits_under_autocast_lose_no_further_precision(loss):
    logits, labels = draw(batch=64, classes=1000)
    logits = logits.bfloat16()
    function = {
        "soft": lambda z: soft_cross_entropy(z, torch.nn.functional.one_hot(labels, 1000).float()),
        "measured": lambda z: measure(z, labels)["loss"],
    }[loss]
    exact = function(logits.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = function(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_the_gradient_is_that_of_float64():
    logits, labels = draw()
    targets = torch.nn.functional.one_hot(labels, 7).double()
    logits = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: soft_cross_entropy(z, targets), logits)


def test_measure_counts_by_rank_and_leaves_out_images_without_label():
    logits = torch.arange(7.0).repeat(5, 1)  # class 6 first, then 5, 4, 3, 2, 1, 0
    sums = measure(logits, torch.tensor([6, 5, 2, 1, IGNORE]))
    assert {name: sums[name].item() for name in ("top1", "top5")} == {"top1": 1, "top5": 3}
    total = math.log(sum(math.exp(k) for k in range(7)))
    assert sums["loss"].item() == pytest.approx(4 * total - (6 + 5 + 2 + 1), rel=1e-6)


def test_with_fewer_than_five_classes_top5_is_among_all():
    logits, labels = draw(classes=3)
    assert measure(logits, labels)["top5"] == 6


def test_a_batch_without_labels_sums_to_zero():
    sums = measure(torch.randn(3, 9), torch.full((3,), IGNORE))
    assert {name: value.item() for name, value in sums.items()} == {"loss": 0, "top1": 0, "top5": 0}
