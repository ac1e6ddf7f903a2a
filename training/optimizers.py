"""The six update rules of the experiments, every one with decoupled decay and per-group numbers.

Groups come from a plan: one dict per group with "params", "lr", "eps" and "weight_decay" (and
"name", "param_names", "initial_lr"). For a parameter theta with gradient g, all rules share

    theta <- (1 - lr * weight_decay) * theta - lr * u        (theta on the right: the old one)

with lr the group's current rate, as in torch's AdamW, and differ in the direction u:

    sgd                  b <- momentum * b + g;  u = b
    adam                 u = m_hat / (sqrt(v_hat) + eps)
    adam_param_scaling   u = max(RMS(theta), 1e-3) * m_hat / (sqrt(v_hat) + eps)
    adafactor            u = max(RMS(theta), 1e-3) * clip(g / sqrt(factored v))
    adam_atan2           u = 4/pi * lambda * atan2(m_hat, lambda * sqrt(v_hat))
    muon                 u = U V^T of the momentum's decomposition; adam where a group says so

m <- beta1 * m + (1 - beta1) * g and v <- beta2 * v + (1 - beta2) * g^2 start at 0, and the hat
divides by 1 - beta^t, t = 1 at the first step. sgd and adam_atan2 have no eps. With eps = 0 the
others compute 0/0 = NaN where the gradient has been exactly zero since the first step.

Of sharded parameters (see `sharding`) a process updates its part; what a rule asks of the whole
tensor (an RMS, Adafactor's means) is of the whole tensor there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from param_groups.optim import MuonAdamW
from training import sharding
from training.adafactor import ADAFACTOR_MIN_DIM, Adafactor
from training.decoupled import (
    PARAM_SCALE_FLOOR,
    AdamW,
    Decoupled,
    Eager,
    Group,
    decay_weights,
    local_parts,
    param_scales,
    rms_on_cpu,
)
from training.errors import UserError, nearest


class SGD(Decoupled):
    """Heavy-ball momentum, b <- momentum * b + g, theta <- (1 - lr*wd) * theta - lr * b.

    torch.optim.SGD's weight_decay adds wd * theta to the gradient, where momentum would
    accumulate it; here decay is decoupled as for the other rules.
    """

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        theta, buffers = local_parts(params), self._buffers(params, "momentum_buffer")
        decay_weights(group, theta)
        sgd(
            theta,
            grads,
            list[Tensor | None](buffers),
            fused=self._fused,
            foreach=not self._fused,
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class AdamParamScaling(Decoupled):
    """Adam's direction times max(RMS(theta), 1e-3), RMS over the tensor before decay and update.

    The scaling is optax.scale_by_param_block_rms between scale_by_adam and decay, so
    theta <- (1 - lr*wd) * theta - lr * max(RMS(theta), 1e-3) * m_hat / (sqrt(v_hat) + eps)
    (Everett et al., "Adam + parameter scaling").
    """

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        lr, wd, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        first, second = self._buffers(params, "exp_avg"), self._buffers(params, "exp_avg_sq")
        steps, kernel = self._steps(params), {"fused": self._fused, "foreach": not self._fused}
        numbers = {**kernel, "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        rest = {**numbers, "amsgrad": False, "maximize": False}
        step: Callable[..., None] = partial(adamw, **rest)
        if self._fused:  # AdamW tensor by tensor, at lr * scale and an unchanged lr * decay
            for w, g, m, v, t in zip(params, grads, first, second, steps, strict=True):
                # Directly before the update, which then finds much of the tensor in cache.
                scale = max(rms_on_cpu(w), PARAM_SCALE_FLOOR)
                step([w], [g], [m], [v], [], [t], lr=lr * scale, weight_decay=wd / scale)
            return
        # m_hat / (sqrt(v_hat) + eps): what AdamW makes of zeros at a rate of -1.
        directions = [torch.zeros_like(part) for part in local_parts(params)]
        step(directions, grads, first, second, [], steps, lr=-1.0, weight_decay=0.0)
        torch._foreach_mul_(directions, param_scales(params))
        theta = local_parts(params)
        decay_weights(group, theta)
        torch._foreach_add_(theta, directions, alpha=-lr)


class AdamAtan2(Decoupled):
    """Adam with 4/pi * lambda * atan2(m_hat, lambda * sqrt(v_hat)) for its quotient, and no eps.

    Everett et al., Appendix C.3, use lambda = 8. The direction tends to 4/pi * m_hat / sqrt(v_hat)
    for small quotients, is 1.267 where m_hat = sqrt(v_hat) (so a rate tuned for Adam does not
    carry over), at most 2 * lambda, and 0 where m = v = 0.

    The rule does not see a common factor of all gradients, and neither does this code: it never
    squares a gradient. What it keeps is r = sqrt(v), r <- hypot(sqrt(beta2) r, sqrt(1 - beta2) g),
    so float32 holds gradients from 1e-36 (below, digits are lost; below 1e-45 nothing is left and
    nothing moves) to 1e38. On a CPU a step takes five to seven times that of torch's fused AdamW.
    """

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        (beta1, beta2), lam = group["betas"], group["atan2_lambda"]
        first, root = self._buffers(params, "exp_avg"), self._buffers(params, "exp_avg_root")
        steps, theta = self._steps(params), local_parts(params)
        torch._foreach_add_(steps, 1.0)
        decay_weights(group, theta)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(root, math.sqrt(beta2))
        # Tensor by tensor: what stands between two lines is then still in the cache.
        for w, g, m, r, step in zip(theta, grads, first, root, steps, strict=True):
            x = g * math.sqrt(1 - beta2)
            torch.hypot(r, x, out=r)
            t = step.item()
            ratio = math.sqrt(1 - beta2**t) / (1 - beta1**t)  # of m_hat / sqrt(v_hat) over m / r
            torch.atan2(torch.mul(m, ratio / lam, out=x), r, out=x)
            w.add_(x, alpha=-group["lr"] * 4 / math.pi * lam)


class Muon(Eager, MuonAdamW):
    """Muon for hidden matrices and AdamW for the rest, as the plan's groups say."""


@dataclass(frozen=True)
class Kind:
    """A row of the table of optimisers."""

    make: Callable[..., torch.optim.Optimizer]
    """Its class: of groups, whether to use torch's fused kernel, and the numbers below."""
    numbers: tuple[str, ...]
    """What it takes of `DEFAULTS`, for all groups."""
    fused_on: tuple[str, ...] = ()
    """Devices with a fused kernel. Off the CPU the kernel needs step counts on the device, which
    only torch's own optimisers keep; parameter scaling uses it where an RMS needs no all-reduce."""


DEFAULTS = {
    "betas": (0.9, 0.98),
    "momentum": 0.9,
    "atan2_lambda": 8.0,
    "min_dim_factored": ADAFACTOR_MIN_DIM,
}
OPTIMIZERS = {  # by the names of param_groups.prescription.OPTIMIZER_FAMILY
    "sgd": Kind(SGD, ("momentum",), ("cpu", "cuda")),
    "adam": Kind(AdamW, ("betas",), ("cpu", "cuda")),
    "adam_atan2": Kind(AdamAtan2, ("betas", "atan2_lambda")),
    "adafactor": Kind(Adafactor, ("min_dim_factored",)),
    "adam_param_scaling": Kind(AdamParamScaling, ("betas",), ("cpu",)),
    "muon": Kind(Muon, ("betas", "momentum"), ("cpu",)),
}


def build(
    name: str, groups: Iterable[Mapping[str, Any]], *, fused: bool | None = None, **numbers: Any
) -> torch.optim.Optimizer:
    """The optimiser called `name` over a plan's groups, which are copied and never modified.

    `numbers` are of `DEFAULTS`; an optimiser takes those that it knows. `fused` chooses torch's
    kernel: None takes the fused one where the parameters' device has it, False the foreach one,
    True insists. Fused AdamW needs every gradient in its parameter's memory layout; autograd's are.
    """
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UserError(f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS)} Known: {known}")
    kind, copies = OPTIMIZERS[name], [{**group, "params": [*group["params"]]} for group in groups]
    params = [param for group in copies for param in group["params"]]
    supported = all(param.device.type in kind.fused_on for param in params)
    if name == "adam_param_scaling" and any(map(sharding.is_sharded, params)):
        supported = False
    if fused and not supported:
        raise UserError(f"fused=True: {name} has no fused kernel for these parameters")
    taken = {key: {**DEFAULTS, **numbers}[key] for key in kind.numbers}
    return kind.make(copies, supported if fused is None else fused, **taken)
