"""Mean neural tangent kernels of a wide Transformer at initialisation, at leading order in 1/n.

Dinan, Yaida & Zhang (2023), section I 3, with the learning-rate factors that `param_groups` gives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effective_theory.dinan.config import Config, RatesConfig
from effective_theory.dinan.config import group as group_of
from effective_theory.dinan.gaussian import REPLICATES, attention_means, mean_and_error
from effective_theory.dinan.kernels import (
    Kernels,
    attention_setting,
    check_finite,
    head_factor,
    input_kernel,
    mlp_kernels,
    norm_scale,
    normalised,
    pooled,
    same_token,
)
from param_groups import Dinan, Role


@dataclass(frozen=True)
class Tangent:
    """E[H^(l)] = delta_{i1 i2} Theta^(l), (1.117), and what every tensor contributes to it.

    Tensors are "stem", "position", "attention.0.query", ..., "mlp.0.mlp_out", "readout" and
    "readout_bias". With a tied head, "stem" and "readout" are the two uses (1.129) and (1.186) of
    the word embedding; the cross terms of both (1.187), which exist for outputs that occur in the
    input, are left out.
    """

    theta: dict[str, Tensor]
    """Theta per block, (P, P); a pooled head's is (D, D)."""
    theta_se: dict[str, Tensor]
    """Standard errors of Theta from the attention draws, those of G included, as Kernels.G_se."""
    parts: dict[str, dict[str, Tensor]]
    """Per block, every tensor's additive part of Theta, carried there from its own block."""
    norms: dict[str, dict[str, Tensor]]
    """The parts without lambda_G: sums over a tensor's parameters of dz/dtheta dz/dtheta."""
    rates: dict[str, float]
    """lambda_G per tensor, Lambda_G included."""
    patch: int | None
    """n_patch of the inputs; None for language."""
    tokens: int
    """T of the inputs."""

    def groups(self, block: str) -> dict[str, Tensor]:
        """Parts of a block summed over blocks: group (a key of RatesConfig) -> kernel.

        A tied head's use of the word embedding is "readout" here too, though its rate is the
        stem's.
        """
        result = {}
        for group in RatesConfig.model_fields:
            own = [part for name, part in self.parts[block].items() if group_of(name) == group]
            if own:
                result[group] = torch.stack(own).sum(0)
        return result


def tangent(config: Config, x: Tensor, kernels: Kernels) -> Tangent:
    """Theta by (1.98): (1.122)-(1.130), (1.139), (1.151)-(1.163), (1.168)-(1.173), (1.178)-(1.190).

    `x` and `kernels` as `forward` takes and gives them. With B = Theta / (sqrt(G_aa + eps)
    sqrt(G_bb + eps)), a block adds, to Theta and its own tensors' parts, C_U C_V E[Omega Omega] B
    + C_U C_V C_Q C_K (B_{t1 t2} Xi(F, F) + F_{t1 t2} Xi(B, F)) or C_X C_W <sigma' sigma'> B, and
    the head multiplies B by its factor. Before the head every part has the n^s of footnote 26,
    which the head takes back. Neglected: O(1/n), in attention O(H/n), stem-head cross terms.
    """
    norms = {"stem": _stem(config, x)}
    patch = None if config.model.stem == "language" else x.shape[-1]
    sizes = tensors(config, patch, x.shape[1])
    rates = {name: _sgd(config, size) for name, size in sizes.items()}
    for stream, (before, block) in enumerate(zip(kernels.blocks, kernels.blocks[1:], strict=False)):
        step = {"attention": _attention, "mlp": _mlp, "head": _head}[block.split(".")[0]]
        norms[block] = step(_Step(config, x, kernels, before, block, stream), norms[before])
    theta, means, parts = {}, {}, {}
    for block, own in norms.items():
        total = torch.stack([rates[name] * norm for name, norm in own.items()]).sum(0)
        theta[block] = mean_and_error(check_finite(config, f"Theta of block {block}", total))
        means[block] = {name: mean_and_error(norm)[0] for name, norm in own.items()}
        parts[block] = {name: rates[name] * norm for name, norm in means[block].items()}
    return Tangent(
        theta={block: mean for block, (mean, _) in theta.items()},
        theta_se={block: error for block, (_, error) in theta.items()},
        parts=parts,
        norms=means,
        rates=rates,
        patch=patch,
        tokens=x.shape[1],
    )


def at_width(config: Config, derived: Tangent, width: int) -> Tangent:
    """The tangent kernels at another width: those before the head go as n^s, norms as Theta over
    lambda_G."""
    sized = config.model_copy(update={"model": config.model.model_copy(update={"width": width})})
    rates, growth = {}, {}
    before = tensors(config, derived.patch, derived.tokens)
    for name, size in tensors(sized, derived.patch, derived.tokens).items():
        rates[name] = _sgd(sized, size)
        old = _sgd(config, replace(before[name], rate=1.0))
        growth[name] = old / _sgd(sized, replace(size, rate=1.0))
    rise = dict.fromkeys(derived.theta, (width / config.model.width) ** config.model.s)
    rise["head"] = 1.0
    return replace(
        derived,
        theta={block: rise[block] * kernel for block, kernel in derived.theta.items()},
        theta_se={block: rise[block] * kernel for block, kernel in derived.theta_se.items()},
        parts={
            block: {name: rise[block] * kernel for name, kernel in own.items()}
            for block, own in derived.parts.items()
        },
        norms={
            block: {name: rise[block] * growth[name] * kernel for name, kernel in own.items()}
            for block, own in derived.norms.items()
        },
        rates=rates,
    )


@dataclass(frozen=True)
class TensorSize:
    """A tensor's role, its fans as `param_groups` counts them, and its gradient's entries."""

    role: Role
    fan_in: int
    fan_out: int
    rate: float
    """Lambda_G."""
    entries: int
    """Parameters that the squared gradient spreads over, as the paper counts them."""


def tensors(config: Config, patch: int | None, tokens: int) -> dict[str, TensorSize]:
    """All tensors in the order of the blocks; `patch` is n_patch, None for language.

    Entries are all parameters, the head's n_out rows included (1.181), but of words the n of one
    row (1.132), in a tied head too (1.189). Positions count all T rows; the paper leaves T out
    of its scalings (footnote 28).
    """
    model, rates = config.model, config.rates
    n, wide = model.width, model.width * model.mlp_ratio
    if patch is None:
        stem = TensorSize(Role.TOKEN_EMBEDDING, 1, n, rates.stem, n)
    else:
        stem = TensorSize(Role.PATCH_EMBEDDING, patch, n, rates.stem, n * patch)
    result = {
        "stem": stem,
        "position": TensorSize(Role.POSITION_EMBEDDING, 1, n, rates.position, tokens * n),
    }
    for index in range(model.depth):
        for name in ("query", "key", "value", "attention_output"):
            size = TensorSize(Role(name), n, n, getattr(rates, name), n * n)
            result[f"attention.{index}.{name}"] = size
        for name, fan_in, fan_out in (("mlp_in", n, wide), ("mlp_out", wide, n)):
            size = TensorSize(Role(name), fan_in, fan_out, getattr(rates, name), n * wide)
            result[f"mlp.{index}.{name}"] = size
    if patch is None:
        return result | {"readout": stem}
    outputs = model.outputs
    return result | {
        "readout": TensorSize(Role.READOUT, n, outputs, rates.readout, n * outputs),
        "readout_bias": TensorSize(Role.READOUT_BIAS, 1, outputs, rates.readout_bias, outputs),
    }


def magnitudes(config: Config, derived: Tangent) -> dict[str, float]:
    """|g| per tensor: rms over its entries of dz^(L)_i/dtheta for one output i, over all inputs.

    sqrt(mean over inputs of Theta's part / lambda_G / entries), entries as `tensors` counts them.
    """
    sizes = tensors(config, derived.patch, derived.tokens)
    return {
        name: float((norm.diagonal().mean() / sizes[name].entries).sqrt())
        for name, norm in derived.norms["head"].items()
    }


@dataclass(frozen=True)
class AdamWFactor:
    """One tensor's factor for AdamW, derived here and as `param_groups` has it."""

    predicted: float
    """lambda_G |g|."""
    closed_form: float
    """(1.108)-(1.116) with footnote 26 and Lambda = 1."""
    ratio: float
    """predicted / closed_form."""
    gradient_scaling: float
    """The power of the widths in |g|, between (1.99)-(1.107) and (1.108)-(1.116)."""


def adamw_factors(config: Config, derived: Tangent) -> dict[str, AdamWFactor]:
    """lambda_G |g| and the closed forms; M is kept in both, which the paper's
    experiments leave out.

    The ratio has no n, H, M, n_out or s in it and n_patch only through the inputs; it does
    depend on Lambda_G, on every C_G, on the activation, the depth, the inputs, T and pooling.
    """
    gradients, result = magnitudes(config, derived), {}
    for name, size in tensors(config, derived.patch, derived.tokens).items():
        fans = size.role, size.fan_in, size.fan_out
        closed, sgd = (
            prescription(config.model.s, config.model.width, optimizer).lr_factor(*fans)
            for optimizer in ("adam", "sgd")
        )
        predicted = derived.rates[name] * gradients[name]
        ratio = torch.tensor(predicted / closed, dtype=torch.float64)
        check_finite(config, f"AdamW's factor of {name}", ratio)
        result[name] = AdamWFactor(predicted, closed, float(ratio), closed / sgd)
    return result


@dataclass(frozen=True)
class _Step:
    """One block; its kernels have a leading dimension REPLICATES."""

    config: Config
    x: Tensor
    kernels: Kernels
    before: str
    block: str
    stream: int

    @property
    def f(self) -> Tensor:
        """F of the block before."""
        return normalised(self.config, self.before, self.kernels.replicates[self.before])

    def hats(self, kernels: Tensor) -> Tensor:
        """B of kernels (..., REPLICATES, P, P) after the block before: LayerNorm's (1.139)."""
        return kernels / norm_scale(self.config, self.before, self.kernels.replicates[self.before])


def _stem(config: Config, x: Tensor) -> dict[str, Tensor]:
    """(1.122) or (1.129), and (1.123)."""
    count = 1 if config.model.stem == "language" else x.shape[-1]
    norms = {"stem": count * input_kernel(config, x), "position": same_token(x)}
    return {name: norm.expand(REPLICATES, -1, -1) for name, norm in norms.items()}


def _attention(step: _Step, norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """(1.151)-(1.154) and (1.161), (1.163)."""
    init, n, f = step.config.init, step.config.model.width, step.f
    b = step.hats(torch.stack(list(norms.values())))
    setting = attention_setting(step.config, step.x.shape[1], step.block, step.stream)
    means = attention_means(f, torch.cat([f[None], b]).transpose(0, 1), f, **setting)
    assert means.jacobian is not None  # which f asks for
    mixed, xi = means.mixed.unbind(1), means.jacobian.unbind(1)
    values = init.attention_output * init.value
    products = values * init.query * init.key
    residual = {
        name: values * mixed[i] + products * (b[i - 1] * xi[0] + f * xi[i])
        for i, name in enumerate(norms, 1)
    }
    own = {
        "query": n * values * init.key * f * xi[0],
        "key": n * values * init.query * f * xi[0],
        "value": n * init.attention_output * mixed[0],
        "attention_output": n * init.value * mixed[0],
    }
    return _added(norms, residual | {f"{step.block}.{name}": norm for name, norm in own.items()})


def _mlp(step: _Step, norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """(1.168), (1.169) and (1.173)."""
    init, model, f = step.config.init, step.config.model, step.f
    values, slopes = mlp_kernels(step.config, f)
    factor = step.hats(init.mlp_out * init.mlp_in * slopes)
    residual = {name: factor * norm for name, norm in norms.items()}
    residual[f"{step.block}.mlp_in"] = model.width * init.mlp_out * slopes * f
    residual[f"{step.block}.mlp_out"] = model.mlp_ratio * model.width * values
    return _added(norms, residual)


def _head(step: _Step, norms: dict[str, Tensor]) -> dict[str, Tensor]:
    """(1.178), (1.179) and (1.182), or (1.186) and (1.190), at s as in (1.34)."""
    config, n, f = step.config, step.config.model.width, step.f
    factor = step.hats(torch.full_like(f, head_factor(config)))
    norms = {name: factor * norm for name, norm in norms.items()}
    if config.model.stem == "language":
        norms["readout"] = n**-config.model.s * f
    else:
        norms["readout"] = n * f
        norms["readout_bias"] = torch.ones_like(f)
    return {name: pooled(config, step.x, norm) for name, norm in norms.items()}


def _added(skip: dict[str, Tensor], residual: dict[str, Tensor]) -> dict[str, Tensor]:
    """The skip path's kernels plus the residual path's; cross terms vanish, (1.159), (1.172)."""
    return {name: norm + skip.get(name, 0.0) for name, norm in residual.items()}


def _sgd(config: Config, tensor: TensorSize) -> float:
    """lambda_G, (1.99)-(1.107) with footnote 26."""
    return tensor.rate * prescription(config.model.s, config.model.width, "sgd").lr_factor(
        tensor.role, tensor.fan_in, tensor.fan_out
    )


def prescription(s: float, width: int, optimizer: str) -> Dinan:
    """The paper's learning-rate factors at one s and width, with the M of its theory."""
    return Dinan(width, "meta_principled", s, optimizer, mlp_factor="keep")
