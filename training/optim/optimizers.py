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
from training.compiled import Compiled
from training.errors import UserError, nearest
from training.optim import decoupled
from training.optim.adafactor import ADAFACTOR_MIN_DIM, Adafactor
from training.optim.decoupled import AdamW, Decoupled, Eager, Group


class SGD(Decoupled):
    """Heavy-ball momentum, b <- momentum * b + g, theta <- (1 - lr*wd) * theta - lr * b.

    torch.optim.SGD's weight_decay adds wd * theta to the gradient, where momentum would
    accumulate it; here decay is decoupled as for the other rules.
    """

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        theta, buffers = decoupled.local_parts(params), self._buffers(params, "momentum_buffer")
        decoupled.decay_weights(group, theta, self.found_inf)
        sgd(
            theta,
            grads,
            list[Tensor | None](buffers),
            fused=group["fused"],
            foreach=not group["fused"],
            found_inf=self.found_inf,
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
        steps, fused = self._steps(group, params), group["fused"]
        if fused and params[0].device.type not in TORCHS_KERNEL:
            counts, eps = self._counted(steps), torch.tensor(group["eps"], dtype=torch.float64)
            corrections = ((1 - beta1**counts).unbind(), (1 - beta2**counts).unbind())
            for tensors in zip(params, grads, first, second, *corrections, strict=True):
                _param_scaling(*tensors, *self._numbers(group), eps, beta1, beta2)
            return
        numbers = {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        rest = {**numbers, "fused": fused, "foreach": not fused, "amsgrad": False}
        step: Callable[..., None] = partial(adamw, **rest, maximize=False)
        if fused:  # AdamW tensor by tensor, at lr * scale and an unchanged lr * decay
            for w, g, m, v, t in zip(params, grads, first, second, steps, strict=True):
                # Directly before the update, which then finds much of the tensor in cache.
                scale = max(decoupled.rms_on_cpu(w), decoupled.PARAM_SCALE_FLOOR)
                rate, found = {"lr": lr * scale, "weight_decay": wd / scale}, self.found_inf
                step([w], [g], [m], [v], [], [t], **rate, found_inf=found)
            return
        # m_hat / (sqrt(v_hat) + eps): what AdamW makes of zeros at a rate of -1.
        directions = [torch.zeros_like(part) for part in decoupled.local_parts(params)]
        step(directions, grads, first, second, [], steps, lr=-1.0, weight_decay=0.0)
        torch._foreach_mul_(directions, decoupled.param_scales(params))
        theta = decoupled.local_parts(params)
        decoupled.decay_weights(group, theta)
        torch._foreach_add_(theta, directions, alpha=-lr)


@Compiled
def _param_scaling(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    correction1: Tensor,
    correction2: Tensor,
    rate: Tensor,
    keep: Tensor,
    skip: Tensor,
    eps: Tensor,
    beta1: float,
    beta2: float,
) -> None:
    scale = decoupled.rms_inside(w).clamp_min(decoupled.PARAM_SCALE_FLOOR)
    first, second = m.lerp(g, 1 - beta1), v.lerp(g * g, 1 - beta2)
    direction = first / correction1 / ((second / correction2).sqrt() + eps)
    decoupled.update(skip, (m, first), (v, second), (w, w * keep - direction * (rate * scale)))


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
        steps, theta = self._steps(group, params), decoupled.local_parts(params)
        if group["fused"]:
            counts = self._counted(steps)
            ratios = ((1 - beta2**counts).sqrt() / (1 - beta1**counts)).unbind()
            for tensors in zip(theta, grads, first, root, ratios, strict=True):
                _atan2(*tensors, *self._numbers(group), beta1, beta2, lam)
            return
        torch._foreach_add_(steps, 1.0)
        decoupled.decay_weights(group, theta)
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


@Compiled
def _atan2(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    root: Tensor,
    ratio: Tensor,
    rate: Tensor,
    keep: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    lam: float,
) -> None:
    first = m.lerp(g, 1 - beta1)
    size = torch.hypot(root * math.sqrt(beta2), g * math.sqrt(1 - beta2))
    direction = torch.atan2(first * (ratio / lam), size) * (4 / math.pi * lam)
    decoupled.update(skip, (m, first), (root, size), (w, w * keep - direction * rate))


class Muon(MuonAdamW, Eager):
    """Muon for hidden matrices and AdamW for the rest, as the plan's groups say."""


@dataclass(frozen=True)
class Kind:
    """A row of the table of optimisers."""

    make: Callable[..., torch.optim.Optimizer]
    """Its class: of groups, whether to use torch's fused kernel, and the numbers below."""
    numbers: tuple[str, ...]
    """What it takes of `DEFAULTS`, for all groups."""
    fused_on: tuple[str, ...] = ()
    """Devices where a tensor's update is one kernel: torch's, or the rule compiled."""
    whole: bool = False
    """Whether a fused update needs an RMS of the whole tensor: not of a sharded one."""


TORCHS_KERNEL = ("cpu",)  # where parameter scaling takes AdamW's; its RMS is exact there
DEFAULTS = {
    "betas": (0.9, 0.98),
    "momentum": 0.9,
    "atan2_lambda": 8.0,
    "min_dim_factored": ADAFACTOR_MIN_DIM,
}
OPTIMIZERS = {  # by the names of param_groups.prescription.OPTIMIZER_FAMILY
    "sgd": Kind(SGD, ("momentum",), ("cpu", "cuda")),
    "adam": Kind(AdamW, ("betas",), ("cpu", "cuda")),
    "adam_atan2": Kind(AdamAtan2, ("betas", "atan2_lambda"), ("cuda",)),
    "adafactor": Kind(Adafactor, ("min_dim_factored",), ("cuda",), whole=True),
    "adam_param_scaling": Kind(AdamParamScaling, ("betas",), ("cpu", "cuda"), whole=True),
    "muon": Kind(Muon, ("betas", "momentum"), ("cpu", "cuda")),
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
    supported &= not (kind.whole and any(map(sharding.is_sharded, params)))
    if fused and not supported:
        raise UserError(f"fused=True: {name} has no fused kernel for these parameters")
    taken = {key: {**DEFAULTS, **numbers}[key] for key in kind.numbers}
    return kind.make(copies, supported if fused is None else fused, **taken)


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser leaves all as it is where its `found_inf`, on the device, is 1."""
    return all(group.get("fused") for group in optimizer.param_groups)
