"""Leading-order kernels: by hand where a page suffices, and invariances."""

import math

import numpy as np
import pytest
import torch

from effective_theory.dinan.config import Config
from effective_theory.dinan.gaussian import activation_kernels
from effective_theory.dinan.inputs import inputs
from effective_theory.dinan.kernels import attention_setting, contact_terms, forward


def _config(stem="vision", *, draws=1024, theory=None, **keys):
    sections = {name: keys.pop(name) for name in ("init", "rates", "data") if name in keys}
    model = {"stem": stem, "pooling": stem == "vision", "depth": 1, "heads": 2} | keys
    theory = {"attention_draws": draws} | (theory or {})
    return Config(model=model, theory=theory, measure={"widths": (12,), "seeds": (2,)}, **sections)


def _close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _x(samples=2, tokens=3, pixels=5):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, tokens, pixels, generator=generator, dtype=torch.float64)


def _layernorm(g, eps=1e-5):
    return g / torch.outer((g.diagonal() + eps).sqrt(), (g.diagonal() + eps).sqrt())


def test_depth_zero_by_hand():
    init = {"stem": 1.5, "position": 0.3, "readout": 0.7}
    x = _x()
    result = forward(_config(init=init, depth=0, s=0.5, width=64), x)
    assert result.blocks == ("stem", "head") and result.F.keys() == {"stem"}
    g = torch.zeros(6, 6).double()
    for i in range(6):
        for j in range(6):
            g[i, j] = 1.5 * (x[i // 3, i % 3] @ x[j // 3, j % 3]) / 5 + 0.3 * (i % 3 == j % 3)
    _close(result.G["stem"], g)
    _close(result.F["stem"], _layernorm(g))
    expected = torch.stack(
        [_layernorm(g)[3 * a : 3 * a + 3, 3 * b : 3 * b + 3].mean() for a in (0, 1) for b in (0, 1)]
    )
    _close(result.G["head"], 0.7 / 8 * expected.view(2, 2))
    apart = forward(_config(init=init, depth=0, pooling=False), x)
    _close(apart.G["head"], 0.7 * _layernorm(g))


def test_words_agree_with_their_one_hot_vectors():
    config = _config("language", init={"stem": 0.4, "position": 2.0}, depth=0, s=1.0, width=16)
    ids = inputs(config)
    vectors = torch.nn.functional.one_hot(ids, 64).double().flatten(0, 1)
    g = 0.4 * vectors @ vectors.T + 2.0 * torch.eye(4).double().repeat(2, 2)
    result = forward(config, ids)
    _close(result.G["stem"], g)
    _close(result.G["head"], 0.4 / 16 * _layernorm(g))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_by_hand_with_uniform_attention_and_identity(causal):
    # C_Q = 0 makes the products vanish: every token averages over those it may see.
    init = {"query": 0.0, "value": 1.3, "attention_output": 0.8, "mlp_in": 0.6, "mlp_out": 1.4}
    config = _config(init=init, activation="identity", causal=causal)
    result = forward(config, _x())
    seen = torch.ones(3, 3).double()
    seen = seen.tril() if causal else seen
    uniform = torch.block_diag(*[seen / seen.sum(1, keepdim=True)] * 2)
    g = result.G["stem"] + 1.3 * 0.8 * uniform @ _layernorm(result.G["stem"]) @ uniform.T
    _close(result.G["attention.0"], g)
    g = g + 0.6 * 1.4 * _layernorm(g)
    _close(result.G["mlp.0"], g)
    assert all(error.abs().max() == 0 for error in result.G_se.values())


def test_mlp_adds_its_activation_kernel():
    config = _config(init={"mlp_in": 0.5, "mlp_out": 1.7, "query": 0.0}, activation="silu")
    result = forward(config, _x())
    values, _ = activation_kernels(0.5 * result.F["attention.0"], "silu")
    _close(result.G["mlp.0"], result.G["attention.0"] + 1.7 * values)


def test_width_heads_ratio_and_outputs_change_nothing_and_s_only_the_head():
    x = _x()
    base = forward(_config(width=24, heads=2), x)
    for change in ({"width": 96}, {"heads": 12}, {"mlp_ratio": 1}, {"outputs": 7}):
        other = forward(_config(**{"width": 24, "heads": 2} | change), x)
        assert all(torch.equal(base.G[block], other.G[block]) for block in base.blocks)
    other = forward(_config(width=24, s=1.0), x)
    assert torch.equal(base.G["mlp.0"], other.G["mlp.0"])
    _close(other.G["head"], base.G["head"] / 24)


def test_queries_and_keys_enter_as_a_product():
    base, same, other = (
        forward(_config(init={"query": query, "key": key}), _x()).G["attention.0"]
        for query, key in ((1.0, 1.0), (4.0, 0.25), (1.0, 4.0))
    )
    _close(same, base)
    assert float((other - base).abs().max()) > 0.05
    setting = attention_setting(_config(init={"query": 1.5, "key": 0.5}), 3, "attention.0", 0)
    assert setting["variance"] == 0.75  # of a product of entries


def _within_errors(one, two, block, order):
    apart = (one.G[block][order][:, order] - two.G[block]).abs()
    error = (one.G_se[block][order][:, order] ** 2 + two.G_se[block] ** 2).sqrt()
    assert bool((apart <= 5 * error + 1e-3).all())


def test_order_of_samples_and_tokens_is_a_label():
    config, x = _config(draws=4096, depth=2, pooling=False), _x()
    base = forward(config, x)
    _within_errors(base, forward(config, x.flip(0)), "head", torch.tensor([3, 4, 5, 0, 1, 2]))
    _within_errors(base, forward(config, x[:, [2, 0, 1]]), "head", torch.tensor([2, 0, 1, 5, 3, 4]))


def test_later_tokens_matter_only_without_the_mask():
    x = _x()
    changed = x.clone()
    changed[:, 2] = -3 * x[:, 2] + 1
    early, size = torch.tensor([0, 1, 3, 4]), {"draws": 4096, "pooling": False}
    for causal in (True, False):
        config = _config(causal=causal, **size)
        a, b = forward(config, x), forward(config, changed)
        apart = (a.G["mlp.0"] - b.G["mlp.0"])[early][:, early].abs().max()
        assert (float(apart) < 5e-3) is causal


def test_errors_shrink_with_draws_and_reach_the_head():
    few, many = (forward(_config(draws=draws, depth=2), _x()) for draws in (512, 16384))
    for block in ("attention.0", "mlp.1", "head"):
        assert 0 < float(many.G_se[block].max()) < 0.5 * float(few.G_se[block].max())
        error = (many.G_se[block] ** 2 + few.G_se[block] ** 2).sqrt()
        assert bool(((many.G[block] - few.G[block]).abs() < 6 * error + 1e-5).all())


def test_contact_terms_agree_with_a_tied_network():
    n, networks, ids = 400, 1500, torch.tensor([[3, 5], [4, 3]])
    init = {"stem": 0.5, "position": 1.0}
    config = _config("language", width=n, init=init, data={"tokens": 2}, norm_eps=0.0, depth=0)
    result = forward(config, ids)
    contact = contact_terms(config, ids, result)
    assert contact.outputs == (3, 4, 5)
    assert float(contact.leading.max()) == pytest.approx(n * 0.25 / 1.5)
    generator = np.random.default_rng(1)
    words = math.sqrt(0.5) * generator.standard_normal((networks, 6, n), dtype=np.float32)
    z = words[:, ids.flatten()] + np.tile(
        generator.standard_normal((networks, 2, n), dtype=np.float32), (1, 2, 1)
    )
    s = (z - z.mean(-1, keepdims=True)) / z.std(-1, keepdims=True)
    out = words[:, [3, 4, 5]] @ s.swapaxes(1, 2) / math.sqrt(n)
    products = np.einsum("rvp,rvq->vpqr", out, out)
    means, errors = products.mean(-1), products.std(-1) / math.sqrt(networks)
    for found, error, leading, output in zip(
        means, errors, contact.leading, (3, 4, 5), strict=True
    ):
        hit = ids.flatten() == output
        both, neither = torch.outer(hit, hit), torch.outer(~hit, ~hit)
        assert leading[~both].abs().max() == 0
        # Relatively good to O(1/n); these networks leave an error of 0.4 %
        expected = (result.G["head"] + leading)[both].numpy()
        np.testing.assert_allclose(found[both], expected, rtol=0.015)
        # Without the output in the input the kernel alone
        apart = np.abs(found - result.G["head"].numpy())[neither]
        assert error[neither].max() < 0.02 and (apart < 4 * error[neither] + 1 / n).all()
