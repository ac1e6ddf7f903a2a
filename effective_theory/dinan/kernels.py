"""Kernels G of a wide Transformer at initialisation, at leading order in 1/n.

Dinan, Yaida & Zhang (2023), section I 1. `python -m effective_theory.dinan.predict` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effective_theory.dinan.config import Config, block_names
from effective_theory.dinan.gaussian import (
    REPLICATES,
    activation_kernels,
    attention_means,
    mean_and_error,
)
from training.errors import UserError


@dataclass(frozen=True)
class Kernels:
    """Covariances of every block's output components, E[z_i z_j] = delta_ij G, (1.35)."""

    blocks: tuple[str, ...]
    """stem, attention.0, mlp.0, attention.1, ..., head."""
    G: dict[str, Tensor]
    """(P, P) per block, P = samples * tokens in this order; a pooled head's is (D, D)."""
    F: dict[str, Tensor]
    """(P, P) per block but the head: kernels after LayerNorm, (1.53)."""
    G_se: dict[str, Tensor]
    """Standard errors of G from the attention draws, shaped like G: the spread of `replicates`."""
    replicates: dict[str, Tensor]
    """(REPLICATES, ...) per block: G from each randomisation of the draws alone, through all
    blocks; G and F are means over them."""


def forward(config: Config, x: Tensor) -> Kernels:
    """(1.41) or (1.45), then (1.53), (1.65) with (1.64), (1.77), and (1.80), (1.81) or (1.84).

    `x`: patches (D, T, n_patch), or ids (D, T) for language. The head's kernel has the factor
    n^(-s) of (1.34); nothing else depends on the width. Neglected: O(1/n), in attention
    O(1/C) = O(H/n) (App. A), and the contact terms of a tied head, see `contact_terms`. UserError
    for x of the wrong rank, for a zero signal without norm_eps and for numbers beyond float64.
    """
    blocks = block_names(config.model.depth)
    g = config.init.stem * input_kernel(config, x) + config.init.position * same_token(x)
    g = g.expand(REPLICATES, -1, -1)
    G, F = {}, {}
    for index, block in enumerate(blocks):
        G[block] = check_finite(config, f"G of block {block}", g)
        if block == "head":
            break
        F[block] = f = normalised(config, block, g)
        if blocks[index + 1] == "head":
            g = pooled(config, x, head_factor(config) * f)
        else:
            g = g + _residual(config, x.shape[1], blocks[index + 1], index, f)
    pairs = {block: mean_and_error(samples) for block, samples in G.items()}
    return Kernels(
        blocks,
        G={block: mean for block, (mean, _) in pairs.items()},
        F={block: mean_and_error(samples)[0] for block, samples in F.items()},
        G_se={block: error for block, (_, error) in pairs.items()},
        replicates=G,
    )


def at_width(config: Config, kernels: Kernels, width: int) -> Kernels:
    """The kernels at another width: only the head's depend on it, as n^(-s)."""
    fall = (width / config.model.width) ** -config.model.s

    def scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {"head": fall * tensors["head"]}

    return replace(
        kernels,
        G=scaled(kernels.G),
        G_se=scaled(kernels.G_se),
        replicates=scaled(kernels.replicates),
    )


def input_kernel(config: Config, x: Tensor) -> Tensor:
    """G^(0), (1.40) or (1.44): (P, P)."""
    if config.model.stem == "language":
        return (x.reshape(-1, 1) == x.reshape(1, -1)).double()
    flat = x.double().flatten(0, 1)
    return flat @ flat.T / x.shape[-1]


def same_token(x: Tensor) -> Tensor:
    """delta_{t1 t2} over all pairs: (P, P)."""
    samples, tokens = x.shape[:2]
    return torch.eye(tokens, dtype=torch.float64).repeat(samples, samples)


def norm_scale(config: Config, block: str, g: Tensor) -> Tensor:
    """1 / N of (1.53) and (1.139), sqrt(G_aa + eps) sqrt(G_bb + eps): shaped like G (..., P, P).

    UserError where it is 0.
    """
    variance = g.diagonal(dim1=-2, dim2=-1) + config.model.norm_eps
    if not bool((variance > 0).all()):
        place = int(variance.argmin()) % variance.shape[-1]
        raise UserError(
            f"the signal after block {block} is zero at input {place}, so that LayerNorm is "
            "undefined; raise init.stem, init.position or model.norm_eps"
        )
    root = variance.sqrt()
    return root[..., :, None] * root[..., None, :]


def normalised(config: Config, block: str, g: Tensor) -> Tensor:
    """F, (1.53): shaped like G, (..., P, P)."""
    return g / norm_scale(config, block, g)


def check_finite(config: Config, what: str, values: Tensor) -> Tensor:
    """The values again; UserError naming the keys that are not 1 if one is not finite."""
    if bool(torch.isfinite(values).all()):
        return values
    unequal = [
        f"{section}.{key} = {value:g}"
        for section in ("init", "rates")
        for key, value in getattr(config, section).model_dump().items()
        if value != 1
    ]
    raise UserError(f"{what} is beyond float64 with {', '.join(unequal)}; bring these nearer to 1")


def attention_setting(config: Config, tokens: int, block: str, stream: int) -> dict[str, Any]:
    """What `attention_means` needs besides kernels; forward and tangent share the draws."""
    variance = torch.tensor(config.init.query * config.init.key, dtype=torch.float64)
    check_finite(config, f"the variance of queries times keys in {block}", variance)
    return {
        "tokens": tokens,
        "variance": float(variance),
        "causal": config.model.causal,
        "theory": config.theory,
        "stream": stream,
    }


def mlp_kernels(config: Config, f: Tensor) -> tuple[Tensor, Tensor]:
    """<sigma sigma> and <sigma' sigma'> at C_W F: two (..., P, P)."""
    return activation_kernels(config.init.mlp_in * f, config.model.activation)


def head_factor(config: Config) -> float:
    """C_head or C_WE, times n^(-s): what (1.34) leaves of (1.80) or (1.84)."""
    tied = config.model.stem == "language"
    c = config.init.stem if tied else config.init.readout
    return c * config.model.width**-config.model.s


def pooled(config: Config, x: Tensor, kernel: Tensor) -> Tensor:
    """(..., P, P) -> (..., D, D), the mean over both tokens (1.81); unchanged without pooling."""
    if not config.model.pooling:
        return kernel
    samples, tokens = x.shape[:2]
    return kernel.unflatten(-1, (samples, tokens)).unflatten(-3, (samples, tokens)).mean((-3, -1))


@dataclass(frozen=True)
class Contact:
    """Terms that a tied head adds to E[z_i z_i] of the outputs that occur in the input."""

    outputs: tuple[int, ...]
    """The outputs i that occur in the input, ascending."""
    leading: Tensor
    """(outputs, P, P), order n^(1-s): the square of a mean, through the skip path."""


def contact_terms(config: Config, x: Tensor, kernels: Kernels) -> Contact | None:
    """Contact terms of footnote 19 with LayerNorm; None for an untied head.

    With N = N_rescale: E[z_{t1;i} z_{t2;i}] has N^2 n^2 C_WE^2 x_{t1;i} x_{t2;i} / (sqrt(G_t1 +
    eps) sqrt(G_t2 + eps)) besides (1.84), G being the last block's before the head. It is of order
    n^(1-s), and relatively good to O(1/n). (1.84) itself, of order n^(-s), is complete only where
    neither input is i: elsewhere LayerNorm's derivatives and exchanged contractions have its order.
    """
    if config.model.stem != "language":
        return None
    last = kernels.blocks[-2]
    scale = kernels.G[last].diagonal() + config.model.norm_eps
    outputs = torch.unique(x)
    hits = (x.flatten() == outputs[:, None]) * (config.init.stem / scale.sqrt())
    strength = config.model.width ** (1 - config.model.s)
    leading = strength * hits[:, :, None] * hits[:, None]
    return Contact(tuple(outputs.tolist()), check_finite(config, "the contact term", leading))


def _residual(config: Config, tokens: int, block: str, stream: int, f: Tensor) -> Tensor:
    """What a residual path adds to G: (REPLICATES, P, P)."""
    init = config.init
    if block.startswith("mlp"):
        return init.mlp_out * mlp_kernels(config, f)[0]
    setting = attention_setting(config, tokens, block, stream)
    means = attention_means(f, f[:, None], None, **setting)
    return init.attention_output * init.value * means.mixed[:, 0]
