"""Gaussian expectations against closed forms, fine grids and small integrals done by hand."""

import math

import numpy as np
import pytest
import torch

from effective_theory.dinan import gaussian
from effective_theory.dinan.config import TheoryConfig
from effective_theory.dinan.gaussian import activation_kernels, attention_means, mean_and_error

# Variances 1.3, 0.6, 1.3, 1.3 and 0; the first correlates with the third by 1, the fourth by -1.
_ROOT = torch.tensor(
    [[1.3**0.5, 0], [0.3, 0.51**0.5], [1.3**0.5, 0], [-(1.3**0.5), 0], [0, 0]], dtype=torch.float64
)
_K = _ROOT @ _ROOT.T
_F = torch.tensor(
    [[1, 0.5, -0.2, 0.3], [0.5, 1, 0.4, 0.1], [-0.2, 0.4, 1, 0.6], [0.3, 0.1, 0.6, 1]],
    dtype=torch.float64,
)


def _close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_identity_gives_the_covariance_back():
    values, slopes = activation_kernels(_K, "identity")
    _close(values, _K)
    _close(slopes, torch.ones_like(_K))


def test_relu_at_special_correlations():
    covariance = torch.tensor(
        [[2.0, 0, -2, 0, 2], [0, 2, 0, 0, 0], [-2, 0, 2, 0, -2], [0] * 5, [2, 0, -2, 0, 2]],
        dtype=torch.float64,
    )
    values, slopes = activation_kernels(covariance, "relu")
    _close(values[0], torch.tensor([1, 1 / math.pi, 0, 0, 1], dtype=torch.float64))
    _close(slopes[0], torch.tensor([0.5, 0.25, 0, 0, 0.5], dtype=torch.float64))
    assert values[3].abs().max() == 0 and slopes[3].abs().max() == 0


def _phi(w):
    return np.exp(-(w**2) / 2) / math.sqrt(2 * math.pi)


def _erf(w):
    return torch.erf(torch.from_numpy(w)).numpy()


def _logistic(w):
    return 1 / (1 + np.exp(-w))


def _gelu_tanh(w):
    return 0.5 * w * (1 + np.tanh(math.sqrt(2 / math.pi) * (w + 0.044715 * w**3)))


_BY_HAND = {
    "gelu": (
        lambda w: w * (1 + _erf(w / math.sqrt(2))) / 2,
        lambda w: (1 + _erf(w / math.sqrt(2))) / 2 + w * _phi(w),
    ),
    "gelu_tanh": (_gelu_tanh, lambda w: (_gelu_tanh(w + 1e-5) - _gelu_tanh(w - 1e-5)) / 2e-5),
    "silu": (lambda w: w * _logistic(w), lambda w: _logistic(w) * (1 + w * (1 - _logistic(w)))),
    "erf": (_erf, lambda w: 2 / math.sqrt(math.pi) * np.exp(-(w**2))),
    "tanh": (np.tanh, lambda w: 1 - np.tanh(w) ** 2),
    "relu": (lambda w: np.maximum(w, 0), lambda w: (w > 0).astype(float)),
}


def _on_a_grid(activation, root, points=301):
    """Both expectations for all pairs by the trapezoidal rule: converges exponentially."""
    grid = np.linspace(-9, 9, points)
    weight = _phi(grid) * (grid[1] - grid[0])
    x, y = np.meshgrid(grid, grid, indexing="ij")
    w = [a * x + b * y for a, b in root.tolist()]
    for function in _BY_HAND[activation]:
        f = np.stack([function(one) for one in w])
        weighted = (f * weight[:, None] * weight).reshape(len(w), -1)
        yield f.reshape(len(w), -1) @ weighted.T


@pytest.mark.parametrize("activation", _BY_HAND)
def test_pairs_agree_with_a_fine_grid(activation):
    # At relu's kink the grid converges as h^2 only.
    kernels = activation_kernels(_K, activation)
    tolerances = (2e-3, 2e-2) if activation == "relu" else (1e-8, 1e-8)
    grids = _on_a_grid(activation, _ROOT)
    for expected, kernel, tolerance in zip(grids, kernels, tolerances, strict=True):
        np.testing.assert_allclose(kernel.numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variance", [9.0, 100.0])
@pytest.mark.parametrize("activation", ["tanh", "gelu", "erf"])
def test_large_variances_agree_with_a_finer_grid(activation, variance):
    scale = variance / 1.3
    kernels = activation_kernels(scale * _K, activation)
    for expected, kernel in zip(
        _on_a_grid(activation, scale**0.5 * _ROOT, 751), kernels, strict=True
    ):
        np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("activation", ["relu", "erf", "silu"])
def test_several_covariances_at_once_are_the_same_as_one_by_one(activation):
    many = torch.stack([_K, 0.1 * _K, 0 * _K])
    together = activation_kernels(many, activation)
    for i, one in enumerate(many):
        for part, expected in zip(together, activation_kernels(one, activation), strict=True):
            _close(part[i], expected, 1e-8)


def _means(f, x, y, tokens, variance, *, causal=False, draws=16384, seed=0):
    theory = TheoryConfig(attention_draws=draws, seed=seed)
    return attention_means(f, x, y, tokens=tokens, variance=variance, causal=causal, theory=theory)


def _random(size):
    """Two kernels X, Y without any symmetry."""
    return torch.randn(2, size, size, generator=torch.Generator().manual_seed(3)).double()


def _agrees(estimates, expected, largest):
    """Within five standard errors, which are themselves small."""
    mean, error = mean_and_error(estimates)
    assert float(error.max()) < largest
    assert bool(((mean - expected).abs() <= 5 * error + 1e-12).all())


def test_two_tokens_are_two_dimensional_integrals():
    # Softmax over two products is the logistic function of their difference, jointly Gaussian.
    variance, (x, y) = 1.7, _random(4)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)
    blocks = _F.view(2, 2, 2, 2)
    apart = torch.einsum("atbs,t,s->ab", blocks, sign, sign)
    spread = variance * _F * apart.repeat_interleave(2, 0).repeat_interleave(2, 1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = torch.from_numpy(weights / weights.sum())
    nodes = torch.from_numpy(nodes)
    mixed, xi = torch.empty(4, 4).double(), torch.empty(4, 4).double()
    for i in range(4):
        for j in range(4):
            a, b = i // 2 * 2, j // 2 * 2
            d1 = spread[i, i] ** 0.5 * nodes
            rho = spread[i, j] / (spread[i, i] * spread[j, j]) ** 0.5
            rest = (1 - rho**2).clamp(min=0).sqrt()
            d2 = spread[j, j] ** 0.5 * (rho * nodes[:, None] + rest * nodes)
            p = torch.stack([d1.sigmoid(), (-d1).sigmoid()])
            q = torch.stack([d2.sigmoid(), (-d2).sigmoid()])
            own = x[a : a + 2, b : b + 2]
            mixed[i, j] = torch.einsum("ux,vxy,uv,x,y->", p, q, own, weights, weights)
            slope = torch.einsum("x,xy,x,y->", p.prod(0), q.prod(0), weights, weights)
            twice = (sign @ own @ sign) * (sign @ y[a : a + 2, b : b + 2] @ sign)
            xi[i, j] = slope * twice
    means = _means(_F, torch.stack([x, _F]), y, 2, variance)
    _agrees(means.mixed[:, 0], mixed, 5e-3)
    _agrees(means.jacobian[:, 0], xi, 5e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_of_rank_one_is_a_single_integral(causal):
    # F = u u^T makes every product the same normal e times u_t u_t'.
    u = torch.tensor([1, -0.7, 0.4, 0.9, 0.2, -1.1], dtype=torch.float64)
    x, y = _random(6)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    mixed, xi = torch.zeros(6, 6).double(), torch.zeros(6, 6).double()
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        omega, jacobian = torch.zeros(6, 6).double(), torch.zeros(6, 6, 6).double()
        for t in range(6):
            first, last = t // 3 * 3, t + 1 if causal else t // 3 * 3 + 3
            p = (1.3**0.5 * node * u[t] * u[first:last]).softmax(0)
            omega[t, first:last] = p
            jacobian[t, first:last, first:last] = p.diag() - p[:, None] * p
        mixed += weight * omega @ x @ omega.T
        xi += weight * torch.einsum("pis,qju,su,ij->pq", jacobian, jacobian, x, y)
    means = _means(u[:, None] * u, x[None], y, 3, 1.3, causal=causal)
    _agrees(means.mixed[:, 0], mixed, 1e-4)
    _agrees(means.jacobian[:, 0], xi, 1e-4)


def test_one_token_attends_to_itself():
    means = _means(_F, _F[None], _F, 1, 1.0, draws=256)
    _close(means.mixed.mean((0, 1)), _F)
    assert means.jacobian.abs().max() < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_no_products_give_uniform_attention(causal):
    means = _means(_F, _F[None], None, 2, 0.0, causal=causal, draws=256)
    row = [[1, 0], [0.5, 0.5]] if causal else [[0.5, 0.5]] * 2
    uniform = torch.block_diag(torch.tensor(row), torch.tensor(row)).double()
    _close(means.mixed[3, 0], uniform @ _F @ uniform.T)
    assert means.jacobian is None


def test_a_kernel_of_zero_gives_uniform_attention():
    means = _means(0 * _F, _F[None], _F, 2, 1.0, draws=256)
    uniform = torch.full((2, 2), 0.5).double()
    uniform = torch.block_diag(uniform, uniform)
    _close(means.mixed[5, 0], uniform @ _F @ uniform.T)
    assert bool(torch.isfinite(means.jacobian).all())


def test_every_randomisation_may_have_kernels_of_its_own():
    other = _F * torch.tensor([1.0, 0.5, 1, 1]).double().outer(torch.ones(4).double())
    other = (other + other.T) / 2
    kernels = torch.stack([_F] * 15 + [other])
    mixed = _means(kernels, kernels[:, None], kernels, 2, 1.0, draws=256)
    one, two = (_means(f, f[None], f, 2, 1.0, draws=256) for f in (_F, other))
    for name in ("mixed", "jacobian"):
        _close(getattr(mixed, name)[:15], getattr(one, name)[:15])
        _close(getattr(mixed, name)[15], getattr(two, name)[15])


def test_draws_are_fewer_for_many_tokens_unless_given():
    theory = TheoryConfig()
    assert theory.draws(8, 4) == theory.draws(32, 16) == 65536
    assert theory.draws(128, 64) == 1024 == theory.draws(2000, 1000)
    assert theory.draws(64, 32) == 8192
    assert TheoryConfig(attention_draws=300).draws(2000, 1000) == 300


def test_draws_come_in_chunks_of_bounded_memory(monkeypatch):
    whole = _means(_F, _F[None], _F, 2, 1.0, draws=2048)
    seen, accumulate = [], gaussian._accumulate
    monkeypatch.setattr(gaussian, "_CHUNK_BYTES", 64 * 2 * 16 * 24)
    monkeypatch.setattr(
        gaussian, "_accumulate", lambda o, x, y: (seen.append(len(o)), accumulate(o, x, y))[1]
    )
    parts = _means(_F, _F[None], _F, 2, 1.0, draws=2048)
    assert max(seen) == 24 and sum(seen) == 2048
    _close(parts.mixed, whole.mixed)
    _close(parts.jacobian, whole.jacobian)


def test_kernels_beyond_the_sequence_use_plain_draws(monkeypatch):
    sobol = mean_and_error(_means(_F, _F[None], _F, 2, 1.0).mixed)
    monkeypatch.setattr(torch.quasirandom.SobolEngine, "MAXDIM", 15)
    plain = mean_and_error(_means(_F, _F[None], _F, 2, 1.0).mixed)
    error = (sobol[1] ** 2 + plain[1] ** 2).sqrt()
    assert not torch.equal(sobol[0], plain[0])
    assert bool(((sobol[0] - plain[0]).abs() < 5 * error).all())
    assert float(plain[1].max()) > float(sobol[1].max())


def test_same_seed_same_numbers_and_errors_are_honest():
    first = _means(_F, _F[None], None, 2, 1.0, draws=512).mixed
    assert torch.equal(first, _means(_F, _F[None], None, 2, 1.0, draws=512).mixed)
    runs = [
        mean_and_error(_means(_F, _F[None], None, 2, 1.0, draws=512, seed=seed).mixed)
        for seed in range(12)
    ]
    means, errors = (torch.stack(part).squeeze(1) for part in zip(*runs, strict=True))
    ratio = means.std(0).mean() / errors.square().mean(0).sqrt().mean()
    assert 0.6 < float(ratio) < 1.6  # measured 1.0
