"""Adafactor without momentum (Shazeer & Stern, 2018), in optax.adafactor's order of operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training import sharding
from training.compiled import Compiled
from training.optim import decoupled
from training.optim.decoupled import Decoupled, Group

# Everett et al., Appendix C, leave optax's defaults in place for these three.
ADAFACTOR_DECAY = 0.8
ADAFACTOR_CLIP = 1.0
STACKED = 1 << 20  # entries of a tensor that may be copied into a stack: 24 bytes for each
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
        steps, directions = self._steps(group, params), list[Tensor]()
        if group["fused"]:
            self._compiled(group, params, grads, steps)
            return
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
        scales = decoupled.param_scales(params)
        clips = decoupled.rms(directions, params)
        torch._foreach_div_(clips, ADAFACTOR_CLIP)
        torch._foreach_clamp_min_(clips, 1.0)
        torch._foreach_div_(scales, clips)
        theta = decoupled.local_parts(params)
        decoupled.decay_weights(group, theta)
        torch._foreach_addcmul_(theta, directions, scales, value=-group["lr"])

    def _factored(
        self, param: Tensor, grad: Tensor, square: Tensor, decay: float, i: int, j: int
    ) -> Tensor:
        """g / sqrt(v) of one factored tensor; the names are those of the class's docstring."""
        row_mean, col_mean = _mean(square, j, param), _mean(square, i, param)
        v_row, v_col = self._rows_and_columns(param, square, i, j)
        row = v_row.unsqueeze(j).lerp_(row_mean, 1 - decay)
        col = v_col.unsqueeze(i).lerp_(col_mean, 1 - decay)
        row = (row / _mean(row, i, param)).rsqrt_()
        return torch.mul(grad, row, out=square).mul_(col.rsqrt())

    def _rows_and_columns(self, param: Tensor, like: Tensor, i: int, j: int) -> list[Tensor]:
        """v without axis j and without axis i, zero before the first use."""
        state = self.state[param]
        if "v_row" not in state:
            for key, axis in (("v_row", j), ("v_col", i)):
                state[key] = _zeros_without(axis, param, like.narrow(axis, 0, 1))
        return decoupled.local_parts((state["v_row"], state["v_col"]))

    def _compiled(
        self, group: Group, params: list[Tensor], grads: list[Tensor], steps: list[Tensor]
    ) -> None:
        """The same as compiled functions of stacks: small tensors of one shape are stacked, as
        launches decide there, and of a large one a view is a stack of one."""
        fresh = (self._counted(steps) ** -ADAFACTOR_DECAY).unbind()  # 1 - beta_t
        rest = (*self._numbers(group), torch.tensor(group["eps"], dtype=torch.float64))
        alike: dict[object, list[int]] = {}
        for place, param in enumerate(params):
            alone = place if param.numel() > STACKED else None
            alike.setdefault((param.shape, param.dtype, alone), []).append(place)
        for places in alike.values():
            owners = [params[place] for place in places]
            axes = factored_axes(owners[0].shape, group["min_dim_factored"])
            if axes is None:
                states = [self._buffers(owners, "v")]
            else:
                state = [self._rows_and_columns(params[n], grads[n], *axes) for n in places]
                states = [list(tensors) for tensors in zip(*state, strict=True)]
                axes = axes[0] + 1, axes[1] + 1
            taken = [owners, [grads[place] for place in places], *states]
            one = len(places) == 1
            stacks = [tensors[0][None] if one else torch.stack(tensors) for tensors in taken]
            weight = torch.stack([fresh[place] for place in places]).to(stacks[0].dtype)
            weight = weight.view(-1, *[1] * (stacks[0].ndim - 1))
            (_factored if axes else _unfactored)(*stacks, weight, *rest, *(axes or ()))
            if not one:
                for old, new in zip([owners, *states], [stacks[0], *stacks[2:]], strict=True):
                    torch._foreach_copy_(old, new.unbind())


@Compiled
def _unfactored(
    w: Tensor,
    g: Tensor,
    v: Tensor,
    weight: Tensor,
    rate: Tensor,
    keep: Tensor,
    skip: Tensor,
    eps: Tensor,
) -> None:
    """Stacks (n, *shape); `weight` is (n, 1, ...)."""
    second = v + (g * g + eps - v) * weight
    decoupled.update(skip, (v, second), (w, _stepped(w, g * second.rsqrt(), rate, keep)))


@Compiled
def _factored(
    w: Tensor,
    g: Tensor,
    v_row: Tensor,
    v_col: Tensor,
    weight: Tensor,
    rate: Tensor,
    keep: Tensor,
    skip: Tensor,
    eps: Tensor,
    i: int,
    j: int,
) -> None:
    """The same; i and j are axes of the stacks."""
    square, weight = g * g + eps, weight.squeeze(-1)
    row = v_row + (square.mean(j) - v_row) * weight
    col = v_col + (square.mean(i) - v_col) * weight
    rows, cols = row.unsqueeze(j), col.unsqueeze(i)
    direction = g * (rows / rows.mean(i, keepdim=True)).rsqrt() * cols.rsqrt()
    decoupled.update(skip, (v_row, row), (v_col, col), (w, _stepped(w, direction, rate, keep)))


def _stepped(w: Tensor, direction: Tensor, rate: Tensor, keep: Tensor) -> Tensor:
    """Lines 3 and 4 of each tensor in a stack: clipped, scaled, with decay."""
    inside = tuple(range(1, w.ndim))
    clip = (decoupled.rms_inside(direction, inside) / ADAFACTOR_CLIP).clamp_min(1.0)
    scale = decoupled.rms_inside(w, inside).clamp_min(decoupled.PARAM_SCALE_FLOOR)
    return w * keep - direction * (rate * (scale / clip))


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
