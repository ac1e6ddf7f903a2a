"""Adafactor without momentum (Shazeer & Stern, 2018), in optax.adafactor's order of operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from training import sharding
from training.decoupled import Decoupled, Group, decay_weights, local_parts, param_scales, rms

# Everett et al., Appendix C, leave optax's defaults in place for these three.
ADAFACTOR_DECAY = 0.8
ADAFACTOR_CLIP = 1.0
ADAFACTOR_MIN_DIM = 128  # all the paper's widths have that; narrower models need a smaller one


class Adafactor(Decoupled):
    """Adafactor without momentum, in optax.adafactor's order of operations.

    At step t = 1, 2, ... of a tensor theta (Shazeer & Stern, 2018, Algorithms 4 and 5):

    1. beta_t = 1 - t^-0.8 (0 at the first step), s = g^2 + eps.
    2. If the second-largest axis has at least `min_dim_factored` entries, the two largest axes i
       and j are factored:
       r <- beta_t r + (1 - beta_t) mean_j(s), c <- beta_t c + (1 - beta_t) mean_i(s),
       v = r c / mean_i(r); further axes index independent matrices. Otherwise
       v <- beta_t v + (1 - beta_t) s.
    3. u = g / sqrt(v), then u <- u / max(1, RMS(u)): clipped per tensor, before any scaling.
    4. u <- max(RMS(theta), 1e-3) * u, and theta <- (1 - lr*wd) * theta - lr * u, with the RMS
       taken before decay.

    "eps" of a group is the eps of line 1, 1e-30 in the papers: it competes with squared
    gradients. One deviation from optax: its weight_decay_rate is not multiplied by the rate.
    State: "v_row" (without axis j) and "v_col" (without axis i), or "v" (theta's shape).
    """

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        steps, directions = self._steps(params), []
        torch._foreach_add_(steps, 1.0)
        for param, grad, step in zip(params, grads, steps, strict=True):
            decay = 1 - step.item() ** -ADAFACTOR_DECAY
            square = grad.square().add_(group["eps"])
            axes = factored_axes(param.shape, group["min_dim_factored"])
            if axes is not None:
                directions.append(self._factored(param, grad, square, decay, *axes))
                continue
            [second] = self._buffers([param], "v")
            second.mul_(decay).add_(square.mul_(1 - decay))
            directions.append(torch.rsqrt(second, out=square).mul_(grad))
        # Clip and parameter scale are one number per tensor.
        scales = param_scales(params)
        clips = rms(directions, params)
        torch._foreach_div_(clips, ADAFACTOR_CLIP)
        torch._foreach_clamp_min_(clips, 1.0)
        torch._foreach_div_(scales, clips)
        theta = local_parts(params)
        decay_weights(group, theta)
        torch._foreach_addcmul_(theta, directions, scales, value=-group["lr"])

    def _factored(
        self, param: Tensor, grad: Tensor, square: Tensor, decay: float, i: int, j: int
    ) -> Tensor:
        """g / sqrt(v) of one factored tensor; the names are those of the class's docstring."""
        row_mean, col_mean = _mean(square, j, param), _mean(square, i, param)
        state = self.state[param]
        if "v_row" not in state:
            state["v_row"] = _zeros_without(j, param, row_mean)
            state["v_col"] = _zeros_without(i, param, col_mean)
        v_row, v_col = local_parts((state["v_row"], state["v_col"]))
        row = v_row.unsqueeze(j).lerp_(row_mean, 1 - decay)
        col = v_col.unsqueeze(i).lerp_(col_mean, 1 - decay)
        row = (row / _mean(row, i, param)).rsqrt_()
        return torch.mul(grad, row, out=square).mul_(col.rsqrt())


def factored_axes(shape: Sequence[int], min_dim: int) -> tuple[int, int] | None:
    """The second-largest and the largest axis, or None if the former is shorter than `min_dim`.

    Among equal axes the later counts as larger (optax's factored dimensions).
    """
    if len(shape) < 2:
        return None
    second, largest = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
    return (second, largest) if shape[second] >= min_dim else None


def keeps_first_axis(key: str, shape: Sequence[int]) -> bool:
    """Whether the state tensor `key` of a parameter of this shape has its first axis too."""
    axes = factored_axes(shape, 0)  # 0: a tensor with this state was factored
    lacks = {} if axes is None else {"v_row": axes[1], "v_col": axes[0]}
    return lacks.get(key) != 0


def _mean(values: Tensor, axis: int, owner: Tensor) -> Tensor:
    """The mean over an axis of the whole tensor, of which `values` is this process's part."""
    if axis != 0 or not sharding.is_sharded(owner):
        return values.mean(dim=axis, keepdim=True)
    return sharding.total(values.sum(dim=0, keepdim=True), owner).div_(owner.shape[0])


def _zeros_without(axis: int, param: Tensor, like: Tensor) -> Tensor:
    """The parameter's shape without one axis; `like` is this process's part, that axis being 1."""
    zeros = torch.zeros_like(like.squeeze(axis))
    if not sharding.is_sharded(param):
        return zeros
    shape = (*param.shape[:axis], *param.shape[axis + 1 :])
    return sharding.wrap(zeros, param, shape, first_axis=axis != 0)
