"""The five update rules of the experiments, every one with decoupled decay and per-group numbers.

Groups come from a plan: one dict per group with "params", "lr", "eps" and "weight_decay" (and
"name", "param_names", "initial_lr"). For a parameter theta with gradient g, all rules share

    theta <- (1 - lr * weight_decay) * theta - lr * u        (theta on the right: the old one)

with lr the group's current rate, as in torch's AdamW, and differ in the direction u:

    sgd                  b <- momentum * b + g;  u = b
    adam                 u = m_hat / (sqrt(v_hat) + eps)
    adam_param_scaling   u = max(RMS(theta), 1e-3) * m_hat / (sqrt(v_hat) + eps)
    adafactor            u = max(RMS(theta), 1e-3) * clip(g / sqrt(factored v))
    adam_atan2           u = 4/pi * lambda * atan2(m_hat, lambda * sqrt(v_hat))

m <- beta1 * m + (1 - beta1) * g and v <- beta2 * v + (1 - beta2) * g^2 start at 0, and the hat
divides by 1 - beta^t, t = 1 at the first step. sgd and adam_atan2 have no eps. With eps = 0 the
other three compute 0/0 = NaN where the gradient has been exactly zero since the first step.

Of sharded parameters (see `sharding`) a process updates its part; what a rule asks of the whole
tensor (an RMS, Adafactor's means, adam_atan2's largest gradient) is of the whole tensor there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from training import sharding
from training.adafactor import Adafactor
from training.adam_atan2 import AdamAtan2
from training.decoupled import (
    PARAM_SCALE_FLOOR,
    Decoupled,
    Group,
    OptimizerError,
    blocks,
    decay_weights,
    group_label,
    local_parts,
    param_name,
    param_scales,
    rms_on_cpu,
)
from training.errors import nearest

OPTIMIZERS = ("sgd", "adam", "adam_param_scaling", "adafactor", "adam_atan2")
_FUSED_DEVICES = ("cpu", "cuda")


def build(
    name: str,
    groups: Iterable[Mapping[str, Any]],
    *,
    betas: Sequence[float] = (0.9, 0.98),
    momentum: float = 0.9,
    atan2_lambda: float = 8.0,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """The optimiser called `name` over a plan's groups, which are copied and never modified.

    `betas` serve the three Adams, `momentum` sgd, `atan2_lambda` adam_atan2; every number is
    checked whichever rule uses it. `fused` chooses the kernel of the first two Adams: None takes
    the fastest the parameters' device has, False the foreach one, True insists on the fused one.
    torch's fused AdamW needs every gradient in its parameter's memory layout; autograd's are.

    Raises OptimizerError: an unknown name; a number out of range; no groups or an empty one; a
    missing key; a parameter twice; fused=True where there is no fused kernel.
    """
    if name not in OPTIMIZERS:
        raise OptimizerError(
            f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS)} Known: {', '.join(OPTIMIZERS)}"
        )
    betas = _checked_betas(betas)
    if not 0 <= momentum < 1:
        raise OptimizerError(f"momentum must be in [0, 1), got {momentum}")
    if not 0 < atan2_lambda < math.inf:
        raise OptimizerError(f"atan2_lambda must be positive and finite, got {atan2_lambda}")
    groups = _checked_groups(groups)
    fused = _choose_fused(name, groups, fused)
    if name == "sgd":
        return SGD(groups, momentum)
    if name == "adam":
        return torch.optim.AdamW(groups, betas=betas, fused=fused, foreach=not fused)
    if name == "adam_param_scaling":
        return AdamParamScaling(groups, betas, fused)
    if name == "adafactor":
        return Adafactor(groups)
    return AdamAtan2(groups, betas, atan2_lambda)


def _checked_betas(betas: Sequence[float]) -> tuple[float, float]:
    """The two betas as a tuple."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise OptimizerError(f"betas must be two numbers in [0, 1), got {tuple(betas)}")
    return betas[0], betas[1]


def _checked_groups(groups: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Copies of the groups, after refusing what torch would accept silently or explain badly."""
    copies = [{**group, "params": list(group.get("params", ()))} for group in groups]
    if not copies:
        raise OptimizerError("no parameter groups: the plan holds no tensors to train")
    owner: dict[int, str] = {}
    for index, group in enumerate(copies):
        label = group_label(group, index)
        _check_group(group, label)
        for position, param in enumerate(group["params"]):
            if id(param) in owner:
                raise OptimizerError(
                    f"parameter {param_name(group, position)} of {label} is already in "
                    f"{owner[id(param)]}: a parameter belongs to one group, once"
                )
            owner[id(param)] = label
    return copies


def _check_group(group: Group, label: str) -> None:
    """Refuses a group without parameters, or with a missing, negative or non-finite number."""
    if not group["params"]:
        raise OptimizerError(f"{label} has no parameters")
    for key in ("lr", "eps", "weight_decay"):
        if key not in group:
            raise OptimizerError(f"{label} has no {key!r}")
        value = group[key]
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise OptimizerError(f"{key} of {label} must be a finite number >= 0, got {value!r}")
    for position, param in enumerate(group["params"]):
        if not param.is_floating_point():
            raise OptimizerError(
                f"parameter {param_name(group, position)} of {label} is {param.dtype}: "
                "only real floating-point parameters can be trained"
            )


def _choose_fused(name: str, groups: list[Group], fused: bool | None) -> bool:
    """Whether to run the fused kernel; param scaling drives it only where RMS needs no sync."""
    devices = {"adam": _FUSED_DEVICES, "adam_param_scaling": ("cpu",)}.get(name, ())
    params = [param for group in groups for param in group["params"]]
    found = sorted({param.device.type for param in params})
    supported = all(device in devices for device in found)
    if name == "adam_param_scaling" and any(map(sharding.is_sharded, params)):
        supported = False
    if fused and not supported:
        raise OptimizerError(
            f"fused=True: {name} has no fused kernel for parameters on {', '.join(found)}"
        )
    return supported if fused is None else fused


class SGD(Decoupled):
    """Heavy-ball momentum, b <- momentum * b + g, theta <- (1 - lr*wd) * theta - lr * b.

    torch.optim.SGD's weight_decay adds wd * theta to the gradient, where momentum would
    accumulate it; here decay is decoupled as for the other rules.
    """

    def __init__(self, groups: list[Group], momentum: float) -> None:
        super().__init__(groups, {"momentum": momentum})

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        buffers = self._buffers(params, "momentum_buffer")
        for _, theta, g, b in blocks(self._steps(params), local_parts(params), grads, buffers):
            torch._foreach_mul_(b, group["momentum"])
            torch._foreach_add_(b, g)
            decay_weights(group, theta)
            torch._foreach_add_(theta, b, alpha=-group["lr"])


class AdamParamScaling(Decoupled):
    """Adam's direction times max(RMS(theta), 1e-3), RMS over the tensor before decay and update.

    The scaling is optax.scale_by_param_block_rms between scale_by_adam and decay, so
    theta <- (1 - lr*wd) * theta - lr * max(RMS(theta), 1e-3) * m_hat / (sqrt(v_hat) + eps)
    (Everett et al., "Adam + parameter scaling").
    """

    def __init__(self, groups: list[Group], betas: tuple[float, float], fused: bool) -> None:
        super().__init__(groups, {"betas": betas})
        # Not in the groups: a checkpoint must not bring along the choice made for its device.
        self._fused = fused

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        first, second = self._buffers(params, "exp_avg"), self._buffers(params, "exp_avg_sq")
        update = self._fused_update if self._fused else self._foreach_update
        update(group, self._steps(params), params, grads, first, second)

    def _fused_update(self, group: Group, steps: list[float], *lists: list[Tensor]) -> None:
        """torch's fused AdamW, tensor by tensor, at lr * scale and an unchanged lr * decay."""
        beta1, beta2 = group["betas"]
        for step, *tensors in zip(steps, *lists):
            theta, g, m, v = same_strides(tensors)
            # Directly before the update, which then finds much of the tensor in cache.
            scale = max(rms_on_cpu(theta), PARAM_SCALE_FLOOR)
            torch._fused_adamw_(
                [theta], [g], [m], [v], [], [torch.tensor(step)],
                lr=group["lr"] * scale, weight_decay=group["weight_decay"] / scale,
                beta1=beta1, beta2=beta2, eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip

    def _foreach_update(
        self,
        group: Group,
        steps: list[float],
        params: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
    ) -> None:
        """The same with foreach kernels; the scales stay on the device."""
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        roots = [math.sqrt(1 - beta2**step) for step in steps]
        below = torch._foreach_sqrt(second)
        torch._foreach_add_(below, [group["eps"] * root for root in roots])
        torch._foreach_div_(below, param_scales(params))
        theta = local_parts(params)
        decay_weights(group, theta)
        rates = [-group["lr"] * root / (1 - beta1**step) for root, step in zip(roots, steps)]
        torch._foreach_addcdiv_(theta, first, below, rates)


def same_strides(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, with the gradient (second) laid out as the parameter (first) if it is not.

    The fused kernel walks through memory and would pair up the wrong entries.
    """
    param, grad, *state = tensors
    if grad.stride() != param.stride():
        grad = torch.empty_like(param).copy_(grad)
    return [param, grad, *state]
