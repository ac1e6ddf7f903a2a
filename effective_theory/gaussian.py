"""Gaussian expectations of wide Transformers: activations in pairs, and attention of one head.

Dinan, Yaida & Zhang (2023), (1.74) and App. A. Everything is float64, and the same numbers come
out of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from effective_theory.config import TheoryConfig
from training.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "identity": torch.positive,
}
"""sigma of (1.21), by the names of ModelConfig.activation."""

REPLICATES = 16
"""Independent randomisations that the draws are split into; their spread is the error."""

_CHUNK_BYTES = 2**26
_TOLERANCE = 1e-6
_REFERENCE_POINTS = 512


def activation_kernels(covariance: Tensor, activation: str, points: int) -> tuple[Tensor, Tensor]:
    """<sigma(w1) sigma(w2)>_K and <sigma'(w1) sigma'(w2)>_K of (1.74) for all pairs: two (P, P).

    `covariance` K is (P, P), singular or zero as it likes. Gauss-Hermite with `points` per
    dimension; UserError if they are too few for this activation at these variances. ReLU, whose
    kink a quadrature resolves badly, has closed forms, with relu'(0) = 0 as in torch.
    """
    covariance = covariance.double()
    if activation == "relu":
        return _relu_kernels(covariance)
    _check_points(covariance.diagonal(), activation, points)
    rows, columns = torch.triu_indices(len(covariance), len(covariance))
    values, slopes = torch.empty_like(covariance), torch.empty_like(covariance)
    pairs = max(1, _CHUNK_BYTES // (64 * points**2))
    for row, column in zip(rows.split(pairs), columns.split(pairs), strict=True):
        value, slope = _quadrature(covariance, row, column, activation, points)
        values[row, column] = values[column, row] = value
        slopes[row, column] = slopes[column, row] = slope
    return values, slopes


def correlations(covariance: Tensor) -> Tensor:
    """Correlations (P, P): exactly 1 on the diagonal, 0 beside a variance of 0."""
    variance = covariance.diagonal().clamp(min=0)
    # The root of the product, not the product of roots, whose rounding arccos would amplify.
    scale = (variance[:, None] * variance).sqrt()
    rho = torch.where(scale > 0, covariance / scale.where(scale > 0, 1.0), 0.0).clamp(-1, 1)
    return rho.fill_diagonal_(1.0)


def with_slope(activation: str, w: Tensor) -> tuple[Tensor, Tensor]:
    """(sigma(w), sigma'(w)), both shaped like w."""
    with torch.enable_grad():
        w = w.detach().requires_grad_()
        value = ACTIVATIONS[activation](w)
        (slope,) = torch.autograd.grad(value.sum(), w)
    return value.detach(), slope


def _quadrature(
    covariance: Tensor, row: Tensor, column: Tensor, activation: str, points: int
) -> tuple[Tensor, Tensor]:
    nodes, weights = _hermite(points)
    std = covariance.diagonal().clamp(min=0).sqrt()
    rho = correlations(covariance)[row, column][:, None, None]
    second = rho * nodes[:, None] + (1 - rho**2).clamp(min=0).sqrt() * nodes
    one = with_slope(activation, std[row][:, None] * nodes)
    two = with_slope(activation, std[column][:, None, None] * second)
    value, slope = (((b @ weights) * a) @ weights for a, b in zip(one, two, strict=True))
    return value, slope


@cache
def _hermite(points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of expectations over a standard normal, by Golub & Welsch (1969).

    numpy's own rule overflows beyond some 380 points.
    """
    beside = torch.arange(1, points, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
    return nodes, vectors[0] ** 2


def _check_points(variances: Tensor, activation: str, points: int) -> None:
    """The largest variance converges last; one dimension shows it."""
    variance = float(variances.max())
    few, many = (_moments(variance, activation, count) for count in (points, _REFERENCE_POINTS))
    error = float(((few - many).abs() / many.abs().clamp(min=1e-300)).max())
    if variance > 0 and not error <= _TOLERANCE:
        raise UserError(
            f"theory.quadrature_points {points} are too few for {activation} at variance "
            f"{variance:.3g}: relative error {error:.1g}, wanted {_TOLERANCE:g}; give more, or "
            "lower init.mlp_in"
        )


def _moments(variance: float, activation: str, points: int) -> Tensor:
    nodes, weights = _hermite(points)
    both = torch.stack(with_slope(activation, max(variance, 0.0) ** 0.5 * nodes))
    return both**2 @ weights


def _relu_kernels(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Arc-cosine kernels of order one and zero, Cho & Saul (2009)."""
    std = covariance.diagonal().clamp(min=0).sqrt()
    scale = std[:, None] * std
    rho = correlations(covariance)
    rest = torch.pi - torch.arccos(rho)
    values = scale * ((1 - rho**2).clamp(min=0).sqrt() + rest * rho) / (2 * torch.pi)
    slopes = torch.where(scale > 0, rest / (2 * torch.pi), 0.0)
    return values, slopes


@dataclass(frozen=True)
class AttentionMeans:
    """Expectations over one head's query-key products, one estimate per randomisation."""

    mixed: Tensor
    """(REPLICATES, K, P, P): sum over t1', t2' of E[Omega_{t1 t1'} Omega_{t2 t2'}] X_{t1' t2'}."""
    jacobian: Tensor | None
    """(REPLICATES, K, P, P): Xi(X, Y)."""


def mean_and_error(estimates: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the first dimension and its standard error."""
    return estimates.mean(0), estimates.std(0) / len(estimates) ** 0.5


def attention_means(
    f: Tensor,
    x: Tensor,
    y: Tensor | None,
    *,
    tokens: int,
    variance: float,
    causal: bool,
    theory: TheoryConfig,
    stream: int = 0,
) -> AttentionMeans:
    """Expectations over Omega, the softmax (1.17) or (1.18) of Gaussian products (A4).

    `f` (P, P) is the normalised kernel, P = samples * `tokens`; `variance` is C_Q C_K, so that
    products Z_{t t'} and Z_{s s'} have covariance variance * F_ts F_t's'. `x` (K, P, P) are the
    kernels X; with `y` (P, P), Xi(X, Y)_{t1 t2} = sum over t1', t2', s1, s2 of
    E[dOmega_{t1 t1'}/dZ_{t1 s1} dOmega_{t2 t2'}/dZ_{t2 s2}] X_{s1 s2} Y_{t1' t2'} comes too.
    Indices t1 and t2 run over all samples, primed ones over the sample's own tokens. Neglected:
    O(1/C) = O(H/n). `stream` numbers independent draws under one seed. Memory is bounded by
    taking the draws in chunks.
    """
    if theory.attention_draws < 2 * REPLICATES:
        raise ValueError(f"attention_draws must be at least {2 * REPLICATES}")
    count, size = len(x), len(f)
    chunk = max(2, _CHUNK_BYTES // (64 * (count + 1) * size**2) // 2 * 2)
    draws = -(-theory.attention_draws // (2 * REPLICATES)) * 2
    mixed = torch.zeros(REPLICATES, count, size, size, dtype=torch.float64)
    jacobian = None if y is None else torch.zeros_like(mixed)
    for replicate in range(REPLICATES):
        seed = int(np.random.SeedSequence((theory.seed, stream, replicate)).generate_state(1)[0])
        for z in _products(f, tokens, variance, draws, chunk, seed):
            omega = _softmax(z, causal)
            mean, slope = _accumulate(omega, x, y)
            mixed[replicate] += mean / draws
            if jacobian is not None:
                jacobian[replicate] += slope / draws
    return AttentionMeans(mixed, jacobian)


def _products(
    f: Tensor, tokens: int, variance: float, draws: int, chunk: int, seed: int
) -> Iterator[Tensor]:
    """Chunks (N, D, T, T) of the products Z = L E L^T within every sample, F = L L^T."""
    root = _root(f)
    rank = root.shape[1]
    # A low-discrepancy sequence is best in its first dimensions: give them the most variance.
    weight = root.square().sum(0)
    order = (weight[:, None] * weight).flatten().argsort(descending=True, stable=True)
    root = root.view(len(f) // tokens, tokens, rank)  # rank 0 is F = 0
    for flat in _normals(rank**2, draws, chunk, seed):
        e = torch.empty_like(flat)
        e[:, order] = flat
        e = e.view(-1, rank, rank)
        left = torch.einsum("atr,nrq->natq", root, e)
        yield variance**0.5 * torch.einsum("natq,asq->nats", left, root)


def _root(f: Tensor) -> Tensor:
    """(P, rank) L with L L^T = F, largest direction first; F may be singular."""
    values, vectors = torch.linalg.eigh(f.double())
    kept = values > 1e-13 * values[-1].clamp(min=1e-300)
    return (vectors[:, kept] * values[kept].sqrt()).flip(1)


def _normals(dimension: int, draws: int, chunk: int, seed: int) -> Iterator[Tensor]:
    """Chunks of standard normals: scrambled Sobol points, beyond its dimensions +- pairs."""
    sizes = [min(chunk, draws - start) for start in range(0, draws, chunk)]
    if 0 < dimension <= torch.quasirandom.SobolEngine.MAXDIM:
        engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed)
        for size in sizes:
            # Points are multiples of 2^-30; half a step keeps 0 out.
            yield torch.special.ndtri(engine.draw(size, dtype=torch.float64) + 2.0**-31)
        return
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        half = torch.randn(size // 2, dimension, generator=generator, dtype=torch.float64)
        yield torch.cat([half, -half])


def _softmax(z: Tensor, causal: bool) -> Tensor:
    if causal:
        later = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
        z = z.masked_fill(later, -torch.inf)
    return z.softmax(-1)


def _accumulate(omega: Tensor, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sums over the draws of Omega X Omega^T and of the Jacobians, both (K, P, P).

    With p and q two rows of Omega, the softmax gives sum over i, j of p_i q_j Y_ij
    (X_ij - (X q)_i - (p X)_j + p X q). Letters: n draws, k kernels, a b samples, the rest tokens.
    """
    samples, tokens = omega.shape[1:3]
    shape = (-1, samples, tokens, samples, tokens)
    x = x.view(shape)
    px = torch.einsum("nats,kasbu->natkbu", omega, x)
    pxq = torch.einsum("natkbu,nbvu->natkbv", px, omega)
    if y is None:
        return _summed(pxq), None
    y = y.view(shape)
    py = torch.einsum("nats,kasbu->natkbu", omega, y)
    pyq = torch.einsum("natkbu,nbvu->natkbv", py, omega)
    xq = torch.einsum("kasbu,nbvu->naskbv", x, omega)
    yq = torch.einsum("kasbu,nbvu->naskbv", y, omega)
    pxy = torch.einsum("nats,kasbu->natkbu", omega, x * y)
    slopes = torch.einsum("natkbu,nbvu->natkbv", pxy - px * py, omega)
    slopes -= torch.einsum("nats,naskbv->natkbv", omega, xq * yq)
    slopes += pxq * pyq
    return _summed(pxq), _summed(slopes)


def _summed(values: Tensor) -> Tensor:
    """(n, a, t, k, b, v) -> (k, P, P)."""
    samples, tokens, count = values.shape[1:4]
    size = samples * tokens
    return values.sum(0).permute(2, 0, 1, 3, 4).reshape(count, size, size)
