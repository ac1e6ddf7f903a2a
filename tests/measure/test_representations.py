"""Measurements of representations on cases whose answers are known."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from measure import representations as measure
from measure.representations import capture
from nanolm_c4.model import Decoder
from tests.measure.probed import logits

SCALE = 0.37


class Attention(nn.Module):
    """Bidirectional or causal attention written out, with values of its own input."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.attention_scale, self.causal = heads, SCALE, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, x):
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (y.view(split).transpose(1, 2) for y in (self.query(x), self.key(x), x))
        a = self.attention_scale * q @ k.transpose(-1, -2)
        if self.causal:
            a = a.masked_fill(torch.ones(a.shape[-2:]).triu(1).bool(), -math.inf)
        return (a.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


class ToyBlock(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, heads, causal)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.attention(self.attention_norm(x)))


class Toy(nn.Module):
    """Embedding (n <- 5), blocks, mean over tokens, 3 logits."""

    def __init__(self, width=12, heads=2, layers=2, causal=False, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Linear(5, width)
            self.blocks = nn.ModuleList(ToyBlock(width, heads, causal) for _ in range(layers))
            self.readout = nn.Linear(width, 3)

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.readout(h.mean(1))


def inputs(samples=4, tokens=6, seed=0):
    return torch.randn(samples, tokens, 5, generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def call(model, batch):
    return model(batch)


def twins(**options):
    """Two equal models."""
    return Toy(**options), Toy(**options)


def moved(start, now, batch=None):
    batch = inputs() if batch is None else batch
    first, second = (capture(model, batch, call) for model in (start, now))
    return measure.attention_movement(first, second, now)


def test_rank_one_queries_and_keys_give_a_rank_one_attention():
    model = Toy(layers=1)
    u, v, a, b = (normal(12, seed=seed, dtype=torch.float32) for seed in range(4))
    with torch.no_grad():
        model.blocks[0].attention.query.weight.copy_(torch.outer(u, a))
        model.blocks[0].attention.key.weight.copy_(torch.outer(v, b))
        normed = F.layer_norm(model.embedding(inputs()), (12,))
    found = capture(model, inputs(), call).blocks[0]
    gains = SCALE * (u.view(2, 6) * v.view(2, 6)).sum(1)
    expected = torch.einsum("h,bt,bs->bhts", gains, normed @ a, normed @ b)
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-4)
    assert torch.linalg.matrix_rank(logits(found)[1, 0], rtol=1e-4) == 1
    assert found.entries().shape == (4, 2, 36)
    torch.testing.assert_close(
        measure.attention_entries(found, 1, 5, 2), expected[1, :, 5, 2], rtol=1e-4, atol=1e-4
    )


def test_the_stream_is_that_of_the_model_and_the_outputs_its_logits():
    model = Toy()
    found = capture(model, inputs(), call)
    model.eval()
    h = [model.embedding(inputs())]
    for block in model.blocks:
        h.append(block(h[-1]))
    assert len(found.stream) == 3 and len(found.blocks) == 2
    for captured, expected in zip(found.stream, h, strict=True):
        assert torch.equal(captured, expected)
    assert torch.equal(found.outputs, model(inputs()))


def nanolm():
    sizes = {"vocab_size": 40, "context": 8, "layers": 2, "heads": 4, "head_dim": 8}
    model = Decoder(**sizes, mlp_ratio=2, attention_scale=0.3, residual_multiplier=1.0)
    batch = torch.randint(0, 40, (3, 8), generator=torch.Generator().manual_seed(0))
    return model, batch, True


def vit():
    from vit_cifar5m.config import ModelConfig
    from vit_cifar5m.model import VisionTransformer

    shape = ModelConfig(head_dim=8, heads=4, layers=2, patch_size=8)
    model = VisionTransformer(shape, attention_scale=0.3, residual_multiplier=0.5)
    return model, normal(3, 3, 32, 32, dtype=torch.float32), False


@pytest.mark.parametrize("make", [nanolm, vit])
def test_captured_logits_are_those_that_the_models_attention_uses(make):
    model, batch, causal = make()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed, dtype=torch.float32) / 4
    model.blocks[1].attention.query.multiplier = 1.7  # captured with its multiplier
    found = capture(model, batch, call)
    attention, block = model.blocks[1].attention, found.blocks[1]
    assert block.causal is causal
    assert torch.equal(block.entries(), entries(block, causal))
    values = attention.value(block.entering).unflatten(-1, (4, -1)).transpose(1, 2)
    weights = logits(block).nan_to_num(nan=-math.inf).softmax(-1)
    expected = attention.output((weights @ values).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(attention(block.entering), expected, rtol=1e-4, atol=1e-5)
    one = measure.attention_entries(block, 0, 5, 2)
    torch.testing.assert_close(one, logits(block)[0, :, 5, 2])


def entries(block, causal):
    """Those that are not masked, by a mask."""
    found = logits(block)
    seen = torch.ones(found.shape[-2:]).tril().bool() if causal else slice(None)
    return found[..., seen].flatten(2) if causal else found.flatten(2)


def test_a_capture_leaves_the_model_and_the_generators_as_they_were():
    model, state = Toy().train(), torch.get_rng_state()
    model.blocks[1].eval()
    first = capture(model, inputs(), call)
    with pytest.raises(ZeroDivisionError):
        capture(model, inputs(), lambda model, batch: model(batch) / (1 // 0))
    assert [block.training for block in model.blocks] == [True, False]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.outputs.requires_grad


def test_kernels_are_inner_products_over_the_width():
    h = normal(3, 4, 8).float()
    found = measure.token_kernel(h)
    for i, t, j, s in ((0, 1, 2, 3), (1, 1, 1, 1), (2, 0, 0, 2)):
        expected = sum(float(a) * float(b) for a, b in zip(h[i, t], h[j, s], strict=True)) / 8
        assert found[i, t, j, s].item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(measure.pooled_kernel(h), found.mean((1, 3)))
    torch.testing.assert_close(measure.spatial_kernel(h, 1), found[1, :, 1])
    torch.testing.assert_close(measure.sample_kernel(h), found[:, 3, :, 3])
    torch.testing.assert_close(measure.sample_kernel(h, 0), found[:, 0, :, 0])


def test_alignment_sees_neither_scale_nor_constant_and_errors_do():
    h = normal(6, 4)
    kernel, other = h @ h.T, normal(6, 5, seed=1) @ normal(6, 5, seed=1).T
    assert measure.kernel_alignment(kernel, 3 * kernel + 2) == pytest.approx(1)
    centre = torch.eye(6, dtype=torch.float64) - 1 / 6
    a, b = centre @ kernel @ centre, centre @ other @ centre
    expected = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()
    assert measure.kernel_alignment(kernel, other) == pytest.approx(expected.item())
    assert math.isnan(measure.kernel_alignment(torch.ones(1, 1), torch.ones(1, 1)))
    assert math.isnan(measure.kernel_alignment(torch.full((6, 6), 0.1), torch.full((6, 6), 0.3)))
    assert measure.square_error(3 * kernel, kernel) == pytest.approx(
        4 * kernel.square().mean().item()
    )
    assert measure.relative_square_error(3 * kernel, kernel) == pytest.approx(4)
    assert math.isnan(measure.relative_square_error(kernel, 0 * kernel))


def test_identical_heads_have_no_variance():
    model = Toy(width=12, heads=4, layers=1)
    with torch.no_grad():
        for layer in (model.blocks[0].attention.query, model.blocks[0].attention.key):
            layer.weight.copy_(layer.weight[:3].repeat(4, 1))
    entries = capture(model, inputs(), call).blocks[0].entries()
    assert measure.head_variance(entries) == pytest.approx(0, abs=1e-14)
    assert measure.rms(entries) > 0.01
    assert math.isnan(measure.excess_kurtosis(torch.ones(2, 5, 3)))
    heads = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    small = measure.excess_kurtosis(1e-11 * heads)  # whose fourth powers float32 has not
    assert small == pytest.approx(measure.excess_kurtosis(heads), rel=1e-4)


def test_the_variance_over_heads_is_unbiased_and_averaged_over_entries():
    heads = torch.tensor([-1.0, 0.0, 4.0])  # unbiased variance 7
    entries = heads[None, :, None] * torch.tensor([1.0, 2.0]) + torch.tensor([50.0, -9.0])
    assert measure.head_variance(entries.repeat(4, 1, 1)) == pytest.approx(7 * (1 + 4) / 2)
    assert math.isnan(measure.head_variance(torch.ones(2, 1, 3)))


def test_the_kurtosis_of_gaussian_heads_is_zero_at_every_number_of_heads():
    # Standard error of G2 at 6 heads is about 1.7 per entry, so 0.012 over 20,000.
    for heads in (6, 24):
        gaussian = normal(2, heads, 10_000) * normal(2, 1, 10_000, seed=1)
        assert abs(measure.excess_kurtosis(gaussian)) < 0.06
    product = (normal(2, 64, 4000) * normal(2, 64, 4000, seed=1)).float()  # N = 1: kurtosis 9
    assert measure.excess_kurtosis(product) > 2
    # Fisher's G2 of 1, 2, 3, 4, 100: the textbook formula in integers, 110 / 5 = 22 the mean.
    x = [1, 2, 3, 4, 100]
    m2, m4 = (sum((value - 22) ** power for value in x) / 5 for power in (2, 4))
    expected = 4 / (3 * 2) * (6 * (m4 / m2**2 - 3) + 6)
    found = measure.excess_kurtosis(torch.tensor(x, dtype=torch.float64)[None, :, None])
    assert found == pytest.approx(expected)
    assert math.isnan(measure.excess_kurtosis(torch.randn(2, 3, 4)))


def test_moved_embeddings_move_keys_and_attention_but_not_by_the_weights():
    start, now = twins()
    with torch.no_grad():
        now.embedding.weight += 0.3 * normal(12, 5, dtype=torch.float32)
    for numbers in moved(start, now):
        for name in ("query", "key", "attention"):
            assert numbers[f"{name}_change"] > 0.01
            assert numbers[f"{name}_change_weights"] == 0
    assert all(
        value == 0 for block in measure.weight_movement(start, now) for value in block.values()
    )


def test_a_moved_key_matrix_is_weight_induced_in_its_block_and_only_there():
    start, now = twins()
    change = 0.3 * normal(12, 12, dtype=torch.float32)
    with torch.no_grad():
        now.blocks[0].attention.key.weight += change
    first, second = moved(start, now)
    block = capture(start, inputs(), call).blocks[0]
    expected = measure.rms(block.entering @ change.T)
    assert first["key_change"] == pytest.approx(expected, rel=1e-5)
    keys = (block.entering @ change.T).view(4, 6, 2, 6).transpose(1, 2)
    expected = measure.rms(logits(replace(block, keys=keys)))
    assert first["attention_change"] == pytest.approx(expected, rel=1e-5)
    for name in ("query", "key", "attention"):
        assert first[f"{name}_change_weights"] == pytest.approx(first[f"{name}_change"], rel=1e-6)
        assert second[f"{name}_change_weights"] == 0
        assert second[f"{name}_change"] > 1e-4
    assert first["query_change"] == 0


def test_masked_entries_do_not_count_in_movement():
    start, now = twins(causal=True)
    with torch.no_grad():
        now.blocks[0].attention.key.weight *= 2  # A doubles where it is seen
    seen = logits(capture(start, inputs(), call).blocks[0])
    expected = seen[~seen.isnan()].square().mean().sqrt().item()
    assert moved(start, now)[0]["attention_change"] == pytest.approx(expected, rel=1e-5)


def test_the_movement_of_weights_is_rms_and_relative_norm():
    start, now = twins()
    weight = start.blocks[1].attention.query.weight
    with torch.no_grad():
        now.blocks[1].attention.query.weight += 0.25
        now.blocks[1].attention.key.weight *= 1.5
        start.blocks[0].attention.key.weight.zero_()
    zero, found = measure.weight_movement(start, now)
    assert found["query_weight_change"] == pytest.approx(0.25, rel=1e-5)
    assert found["query_weight_relative"] == pytest.approx(3 / weight.norm().item(), rel=1e-5)
    assert found["key_weight_relative"] == pytest.approx(0.5, rel=1e-5)
    assert math.isnan(zero["key_weight_relative"]) and zero["query_weight_change"] == 0


def test_leaving_one_out_gives_the_variance_of_an_ensemble():
    members = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 1.0]), torch.tensor([7.0, 4.0])]
    distances = measure.leave_one_out(members)
    # Unbiased variances 13 and 3, mean 8. First member: (0 - 4.5)^2, (1 - 2.5)^2, less 8 / 2.
    assert distances[0] == pytest.approx((4.5**2 + 1.5**2) / 2 - 4)
    assert sum(distances) / 3 == pytest.approx(8)
    assert measure.leave_one_out(members[:2]) == pytest.approx([1.0, 1.0])  # (2^2 / 2) / 2


def test_the_distance_to_a_limit_does_not_depend_on_the_size_of_the_ensemble():
    limit, values = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.5, -2.0, 0.0])
    for size in (2, 5):
        draws = limit + 0.8 * normal(1500, size, 3, seed=size).float()
        found = [measure.distance_to_ensemble(values, list(members)) for members in draws]
        # Spread of one about 0.5, of the mean of 1,500 about 0.015; uncorrected it is 0.32 more
        # at two references and 0.13 at five.
        assert sum(found) / 1500 == pytest.approx(0.5 / 3, abs=0.05)
    assert measure.distance_to_ensemble(values, [limit]) == pytest.approx(0.5 / 3)


# Models that cannot be observed
