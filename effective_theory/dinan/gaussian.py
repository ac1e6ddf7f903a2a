"""Gaussian expectations of wide Transformers: activations in pairs, and attention of one head.

Dinan, Yaida & Zhang (2023), (1.74) and App. A. Everything is float64, and the same numbers come
out of every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from effective_theory.dinan.config import TheoryConfig
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

_CHUNK_BYTES = 2**23  # a cache of some MB: bigger chunks take several times longer
_TOLERANCE = 1e-9
_LARGEST_VARIANCE = 1000.0
_TERMS, _TERMS_AT_ONCE = 2**15, 64


def activation_kernels(covariance: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """<sigma(w1) sigma(w2)>_K and <sigma'(w1) sigma'(w2)>_K of (1.74): two (..., P, P), all pairs.

    `covariance` K is (..., P, P), singular or zero as it likes. relu (with relu'(0) = 0 as in
    torch), erf and identity have closed forms. The others are summed as Hermite series until the
    diagonals are good to a relative 1e-9; UserError for a variance above 1000, where that takes
    too many terms.
    """
    covariance = covariance.double()
    closed = _CLOSED_FORMS.get(activation)
    return _series(covariance, activation) if closed is None else closed(covariance)


def correlations(covariance: Tensor) -> Tensor:
    """Correlations (..., P, P): exactly 1 on the diagonal, 0 where a variance is 0."""
    variance = _variances(covariance)
    # The root of the product, not the product of roots, whose rounding arccos would amplify.
    scale = (variance[..., :, None] * variance[..., None, :]).sqrt()
    rho = torch.where(scale > 0, covariance / scale.where(scale > 0, 1.0), 0.0).clamp(-1, 1)
    rho.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return rho


def with_slope(activation: str, w: Tensor) -> tuple[Tensor, Tensor]:
    """(sigma(w), sigma'(w)), both shaped like w."""
    with torch.enable_grad():
        w = w.detach().requires_grad_()
        value = ACTIVATIONS[activation](w)
        (slope,) = torch.autograd.grad(value.sum(), w)
    return value.detach(), slope


def _variances(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)


def _series(covariance: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Sum over k of a_k(w1) a_k(w2) rho^k, a_k the coefficients in normalised Hermite polynomials.

    The squares of all a_k sum to <sigma sigma> of one input (Parseval), which says what is missing.
    """
    std, rho = _variances(covariance).sqrt(), correlations(covariance)
    largest = float(std.max())
    if not largest**2 <= _LARGEST_VARIANCE:
        raise _too_large(activation, largest)
    nodes = _nodes(largest)
    functions = torch.stack(with_slope(activation, std[..., None] * nodes))  # (2, ..., P, nodes)
    norms = functions**2 @ _density(nodes)
    total, power = torch.zeros_like(torch.stack([rho, rho])), torch.ones_like(rho)
    reached = torch.zeros_like(norms)
    for basis in _hermite(nodes):
        coefficients = functions @ basis
        for a in coefficients.unbind(-1):
            total += a[..., :, None] * a[..., None, :] * power
            power *= rho
        reached += (coefficients**2).sum(-1)
        if bool((norms - reached <= _TOLERANCE * norms).all()):
            return total[0], total[1]
    raise _too_large(activation, largest)


def _too_large(activation: str, std: float) -> UserError:
    return UserError(
        f"{activation} at variance {std**2:.3g}: expectations are computed up to "
        f"{_LARGEST_VARIANCE:g}; lower init.mlp_in"
    )


def _nodes(std: float) -> Tensor:
    """An even grid, on which sums converge exponentially: sigma(std u) is analytic near reals.

    The nearest poles are those of tanh, pi / (2 std) away, so that the error is some 1e-17.
    """
    step = 0.25 / max(std, 5.0)
    return torch.arange(-13.0, 13.0, step, dtype=torch.float64)


def _density(nodes: Tensor) -> Tensor:
    step = nodes[1] - nodes[0]
    return step / (2 * torch.pi) ** 0.5 * torch.exp(-(nodes**2) / 2)


def _hermite(nodes: Tensor) -> Iterator[Tensor]:
    """Normalised Hermite polynomials times the density, some at a time: (nodes, terms).

    The recursion runs on polynomials times the root of the density, which stay of order one.
    """
    root = _density(nodes).sqrt()
    before, now = torch.zeros_like(root), root
    for start in range(0, _TERMS, _TERMS_AT_ONCE):
        columns = []
        for k in range(start, start + _TERMS_AT_ONCE):
            columns.append(now * root)
            before, now = now, (nodes * now - k**0.5 * before) / (k + 1) ** 0.5
        yield torch.stack(columns, 1)


def _relu_kernels(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Arc-cosine kernels of order one and zero, Cho & Saul (2009)."""
    std, rho = _variances(covariance).sqrt(), correlations(covariance)
    scale = std[..., :, None] * std[..., None, :]
    rest = torch.pi - torch.arccos(rho)
    values = scale * ((1 - rho**2).clamp(min=0).sqrt() + rest * rho) / (2 * torch.pi)
    slopes = torch.where(scale > 0, rest / (2 * torch.pi), 0.0)
    return values, slopes


def _erf_kernels(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The arcsine kernel of Williams (1998) and its derivative, without cancellation."""
    variance, rho = _variances(covariance), correlations(covariance)
    one, two = variance[..., :, None], variance[..., None, :]
    rest = (1 + 2 * (one + two) + 4 * one * two * (1 - rho) * (1 + rho)).sqrt()
    return 2 / torch.pi * torch.atan2(2 * covariance, rest), 4 / torch.pi / rest


_CLOSED_FORMS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "relu": _relu_kernels,
    "erf": _erf_kernels,
    "identity": lambda covariance: (covariance, torch.ones_like(covariance)),
}


@dataclass(frozen=True)
class AttentionMeans:
    """Expectations over one head's query-key products, one estimate per randomisation."""

    mixed: Tensor
    """(REPLICATES, K, P, P): sum over t1', t2' of E[Omega_{t1 t1'} Omega_{t2 t2'}] X_{t1' t2'}."""
    jacobian: Tensor | None
    """(REPLICATES, K, P, P): Xi(X, Y)."""


def mean_and_error(estimates: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the first dimension and its standard error, exactly 0 if all are the same."""
    apart = estimates - estimates[0]
    return estimates[0] + apart.mean(0), apart.std(0) / len(estimates) ** 0.5


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
    All three may have a leading dimension REPLICATES: one kernel per randomisation. Indices t1
    and t2 run over all samples, primed ones over the sample's own tokens. Neglected:
    O(1/C) = O(H/n). `stream` numbers independent draws under one seed. Memory is bounded by
    taking the draws in chunks.
    """
    count, size = x.shape[-3], f.shape[-1]
    f, x = (one.expand(REPLICATES, *one.shape[-dims:]) for one, dims in ((f, 2), (x, 3)))
    y = None if y is None else y.expand(REPLICATES, size, size)
    draws = -(-theory.draws(size, tokens) // (2 * REPLICATES)) * 2
    chunk = max(2, _CHUNK_BYTES // (64 * (count + 1) * size**2) // 2 * 2)
    mixed = torch.zeros(REPLICATES, count, size, size, dtype=torch.float64)
    jacobian = None if y is None else torch.zeros_like(mixed)
    for replicate in range(REPLICATES):
        seed = int(np.random.SeedSequence((theory.seed, stream, replicate)).generate_state(1)[0])
        own = x[replicate], None if y is None else y[replicate]
        for z in _products(f[replicate], tokens, variance, draws, chunk, seed):
            mean, slope = _accumulate(_softmax(z, causal), *own)
            mixed[replicate] += mean / draws
            if jacobian is not None and slope is not None:
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
        e = e.view(len(e), rank, rank)
        left = torch.einsum("atr,nrq->natq", root, e)
        yield variance**0.5 * torch.einsum("natq,asq->nats", left, root)


def _root(f: Tensor) -> Tensor:
    """(P, rank) L with L L^T = F, largest direction first; F may be singular."""
    values, vectors = torch.linalg.eigh(f.double())
    positive = values > 1e-13 * values[-1].clamp(min=1e-300)
    return (vectors[:, positive] * values[positive].sqrt()).flip(1)


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
    x = x.reshape(shape)
    px = torch.einsum("nats,kasbu->natkbu", omega, x)
    pxq = torch.einsum("natkbu,nbvu->natkbv", px, omega)
    if y is None:
        return _summed(pxq), None
    y = y.reshape(shape)
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
