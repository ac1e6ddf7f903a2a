"""One random network's kernels and neural tangent kernels, by autograd.

Kernels are (P, P) over pairs of (sample, token), P = D T, samples first; those of a pooled head are
(D, D).
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from effective_theory.dinan.config import ALPHABET, group
from effective_theory.dinan.network import Encoder, Trace, Use
from effective_theory.dinan.tangent import prescription

Key = tuple[str, ...]  # ("theta", "head", "stem") and the like
Values = dict[Key, Tensor]
Directions = dict[Key, Tensor]  # per kernel, what its off-diagonal entries are projected on


def observe(encoder: Encoder, x: Tensor, directions: Directions | None = None) -> Values:
    """One network's values: keys are a field of `KernelMeans`, a block and, for theta, a tensor.

    Under "magnitudes" stand squares, whose mean over networks is then rooted.
    """
    trace: Trace = {}
    with torch.enable_grad():
        z = encoder(x, trace)
    values: Values = {}
    for block, preactivations in z.items():
        # Without the outputs of a tied head that inputs may have, whose contact terms (footnote 19)
        # the leading order leaves out.
        free = ALPHABET if encoder.tied and block == "head" else 0
        values["G", block] = _gram(preactivations.detach()[..., free:])
        if block != "head":
            values["F", block] = _gram(encoder.norm(preactivations.detach()))
        kernels = tangent_kernels(encoder, z, trace, block)
        values |= _theta(encoder, block, kernels)
        if block == "head":
            values |= _magnitudes(encoder, kernels)
    return values | _numbers(values, directions or {})


def tangent_kernels(
    encoder: Encoder, z: dict[str, Tensor], trace: Trace, block: str
) -> dict[str, Tensor]:
    """Sum over each tensor's parameters of dz_{a;i} dz_{b;j}: (K, K, P, P) over components i, j.

    Without lambda_G. From inputs and cotangents of every product with a tensor, since a token adds
    (cotangent)(input)^T to the gradient: no gradient of a tensor's size is formed.
    """
    uses = _uses_before(trace, block)
    cotangents = torch.autograd.grad(
        z[block],
        [use.output for use in uses.values()],
        _selections(encoder, z[block], block),
        is_grads_batched=True,
        retain_graph=True,
    )
    count = len(components(encoder, block))
    kernels = {}
    for (name, use), cotangent in zip(uses.items(), cotangents, strict=True):
        kernel = _product_kernel(use, cotangent)  # (K T, D, K T, D) -> (K, K, D T, D T)
        kernel = kernel.unflatten(2, (count, -1)).unflatten(0, (count, -1))
        kernels[name] = kernel.permute(0, 3, 2, 1, 5, 4).flatten(4, 5).flatten(2, 3)
    return kernels


def rate(encoder: Encoder, name: str) -> float:
    """lambda_G of a tensor for SGD: (1.99)-(1.107) and, for s > 0, footnote 26."""
    own = "stem" if encoder.tied and name == "readout" else group(name)
    rule = prescription(encoder.config.model.s, encoder.width, "sgd")
    closed = rule.lr_factor(encoder.role(name), *encoder.fans(name))
    return getattr(encoder.config.rates, own) * closed


def _theta(encoder: Encoder, block: str, kernels: dict[str, Tensor]) -> Values:
    values: Values = {}
    scaled = {name: rate(encoder, name) * kernel for name, kernel in kernels.items()}
    for name, kernel in (scaled | {"total": sum(scaled.values(), torch.zeros(()))}).items():
        values["theta", block, name] = kernel.diagonal().mean(-1)
    for name in scaled:
        key = "groups", block, group(name)
        values[key] = values.get(key, 0) + values["theta", block, name]
    pairs = list(permutations(range(len(kernel)), 2))
    if pairs:
        values["off_diagonal", block] = torch.stack([kernel[pair] for pair in pairs]).mean(0)
    return values


def _numbers(values: Values, directions: Directions) -> Values:
    """What is compared with the theory as one number: diagonals, and rests along a direction."""
    numbers: Values = {}
    for (kind, *names), value in values.items():
        if kind in ("G", "F", "groups") or (kind, names[-1]) == ("theta", "total"):
            key = ("theta" if kind == "groups" else kind, *names)
            numbers["diagonals", *key] = value.diagonal().mean()
            if key in directions:
                numbers["rests", *key] = (directions[key] * value).sum()
    return numbers


def _magnitudes(encoder: Encoder, kernels: dict[str, Tensor]) -> Values:
    """Mean squares of the gradient's entries."""
    values: Values = {}
    for name, kernel in kernels.items():
        words = encoder.tied and name in ("stem", "readout")
        entries = encoder.width if words else encoder.get_parameter(name).numel()
        squares = kernel.diagonal().mean(-1).diagonal()
        values["magnitudes", name] = squares.mean() / entries
    return values


def _gram(vectors: Tensor) -> Tensor:
    """(..., n) -> mean over n of products of all pairs, (P, P), float64."""
    rows = vectors.flatten(0, -2).double()
    return rows @ rows.T / rows.shape[1]


def components(encoder: Encoder, block: str) -> list[int]:
    """The components whose gradients are taken."""
    first = ALPHABET if encoder.tied and block == "head" else 0
    return list(range(first, first + encoder.config.measure.outputs))


def _uses_before(trace: Trace, block: str) -> dict[str, Use]:
    """The part of a trace that comes before the end of a block."""
    names = list(trace)
    last = max(
        place
        for place, name in enumerate(names)
        if block == "head" or name.startswith(f"{block}.") or (block, name) == ("stem", "position")
    )
    return {name: trace[name] for name in names[: last + 1]}


def _selections(encoder: Encoder, z: Tensor, block: str) -> Tensor:
    """One-hot cotangents (K T, *z.shape), for every component and token; all samples at once."""
    chosen = components(encoder, block)
    tokens = z.shape[1] if z.dim() == 3 else 1
    selections = torch.zeros(len(chosen), tokens, len(z), tokens, z.shape[-1], dtype=z.dtype)
    for place, component in enumerate(chosen):
        for token in range(tokens):
            selections[place, token, :, token, component] = 1
    return selections.view(-1, *z.shape)


def _product_kernel(use: Use, cotangent: Tensor) -> Tensor:
    """Kernel (R, D, R, D) of one tensor from cotangents (R, D, T, fan_out), R = K T.

    Sums (g_{ra;t} . g_{sb;u}) (x_{a;t} . x_{b;u}) over tokens t, u. The inputs' products are put
    into one of the cotangents, which keeps memory linear in R.
    """
    rows, samples = cotangent.shape[:2]
    products = torch.einsum("atj,buj->abtu", use.inputs, use.inputs)
    columns = []
    for sample in range(samples):
        mixed = products[:, sample].mT @ cotangent  # (R, D, T, fan_out)
        right = cotangent[:, sample].reshape(rows, -1)
        columns.append(mixed.reshape(rows * samples, -1) @ right.T)
    return torch.stack(columns, -1).view(rows, samples, rows, samples).detach().double()
