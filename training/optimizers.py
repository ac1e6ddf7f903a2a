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

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from training import sharding
from training.errors import UserError, nearest

OPTIMIZERS = ("sgd", "adam", "adam_param_scaling", "adafactor", "adam_atan2")

# Everett et al., Appendix C, leave optax's defaults in place for these four.
PARAM_SCALE_FLOOR = 1e-3
ADAFACTOR_DECAY = 0.8
ADAFACTOR_CLIP = 1.0
ADAFACTOR_MIN_DIM = 128

# Entries worked on at a time on a CPU: their parameter, gradient, moments and scratch stay in
# cache from one elementwise operation to the next; fewer cost more in calls than they save.
_BLOCK = 1 << 19
# Entries whose squares a CPU adds up in single precision, for a parameter's norm.
_NORM_ROW = 1 << 12
_FUSED_DEVICES = ("cpu", "cuda")

# arctan(x) = x * (linear + rational / (1 + pole * x^2)) to 8e-8 for abs(x) <= end, which is the
# rounding of float32: a minimax fit.
_ATAN_LINEAR, _ATAN_RATIONAL, _ATAN_POLE = 0.43993879, 0.56006113, 0.59512153
_ATAN_END = 0.22
# Between these decays a direction divided by the decay is safely within float32.
_LERP_DECAYS = (1e-6, 1e6)

Group = dict[str, Any]


class OptimizerError(UserError):
    """An optimiser cannot be built from, or cannot step with, what it was given."""


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
        label = _label(group, index)
        _check_group(group, label)
        for position, param in enumerate(group["params"]):
            if id(param) in owner:
                raise OptimizerError(
                    f"parameter {_param_name(group, position)} of {label} is already in "
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
                f"parameter {_param_name(group, position)} of {label} is {param.dtype}: "
                "only real floating-point parameters can be trained"
            )


def _label(group: Mapping[str, Any], index: int) -> str:
    """How messages call a group: by its name, or else by its position."""
    return f"group {group['name']!r}" if "name" in group else f"group {index}"


def _param_name(group: Mapping[str, Any], position: int) -> str:
    """How messages call a group's parameter: by its name, or else by its position."""
    names = group.get("param_names", ())
    return repr(names[position]) if position < len(names) else f"number {position}"


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


class _Decoupled(torch.optim.Optimizer):
    """What the rules below share: the loop over groups, decay, per-parameter state and steps.

    Parameters without a gradient are left alone, decay and step count included. The state of a
    parameter is "step" (a float tensor on the CPU, as torch keeps it) beside the rule's tensors.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._refuse_sparse(group, index)
                self._update(group, params, _local(param.grad for param in params))
        return loss

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        """Decays and updates `params`, or this process's part of them, in place.

        Gradients and what `_buffers` returns are such parts; `params` are the keys to the state.
        """
        raise NotImplementedError

    @staticmethod
    def _refuse_sparse(group: Group, index: int) -> None:
        """Raises OptimizerError for a gradient that is not dense."""
        for position, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise OptimizerError(
                    f"parameter {_param_name(group, position)} of {_label(group, index)} has a "
                    "sparse gradient: only dense gradients are supported"
                )

    def _steps(self, params: list[Tensor]) -> list[float]:
        """The number t of each parameter's update now being made, 1 for its first."""
        for param in params:
            if "step" not in self.state[param]:
                self.state[param]["step"] = torch.tensor(0.0)
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1.0)
        return [step.item() for step in steps]

    def _buffers(self, params: list[Tensor], key: str) -> list[Tensor]:
        """The state tensor `key` of each parameter, in its shape and zero before the first use."""
        for param in params:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param)
        return _local(self.state[param][key] for param in params)


class SGD(_Decoupled):
    """Heavy-ball momentum, b <- momentum * b + g, theta <- (1 - lr*wd) * theta - lr * b.

    torch.optim.SGD's weight_decay adds wd * theta to the gradient, where momentum would
    accumulate it; here decay is decoupled as for the other rules.
    """

    def __init__(self, groups: list[Group], momentum: float) -> None:
        super().__init__(groups, {"momentum": momentum})

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        buffers = self._buffers(params, "momentum_buffer")
        for _, theta, g, b in _blocks(self._steps(params), _local(params), grads, buffers):
            torch._foreach_mul_(b, group["momentum"])
            torch._foreach_add_(b, g)
            _decay(group, theta)
            torch._foreach_add_(theta, b, alpha=-group["lr"])


class AdamParamScaling(_Decoupled):
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
            theta, g, m, v = _same_strides(tensors)
            # Directly before the update, which then finds much of the tensor in cache.
            scale = max(_rms_on_cpu(theta), PARAM_SCALE_FLOOR)
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
        torch._foreach_div_(below, _param_scales(params))
        theta = _local(params)
        _decay(group, theta)
        rates = [-group["lr"] * root / (1 - beta1**step) for root, step in zip(roots, steps)]
        torch._foreach_addcdiv_(theta, first, below, rates)


class Adafactor(_Decoupled):
    """Adafactor without momentum, in optax.adafactor's order of operations.

    At step t = 1, 2, ... of a tensor theta (Shazeer & Stern, 2018, Algorithms 4 and 5):

    1. beta_t = 1 - t^-0.8 (0 at the first step), s = g^2 + eps.
    2. If the second-largest axis has at least 128 entries, the two largest axes i and j are
       factored: r <- beta_t r + (1 - beta_t) mean_j(s), c <- beta_t c + (1 - beta_t) mean_i(s),
       v = r c / mean_i(r); further axes index independent matrices. Otherwise
       v <- beta_t v + (1 - beta_t) s.
    3. u = g / sqrt(v), then u <- u / max(1, RMS(u)): clipped per tensor, before any scaling.
    4. u <- max(RMS(theta), 1e-3) * u, and theta <- (1 - lr*wd) * theta - lr * u, with the RMS
       taken before decay.

    "eps" of a group is the eps of line 1, 1e-30 in the papers: it competes with squared
    gradients. One deviation from optax: its weight_decay_rate is not multiplied by the rate.
    State: "v_row" (without axis j) and "v_col" (without axis i), or "v" (theta's shape).
    """

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {})

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        decays = [1 - step**-ADAFACTOR_DECAY for step in self._steps(params)]
        rows = list(zip(params, grads, decays))
        axes = [factored_axes(param.shape) for param in params]
        whole = [row for row, pair in zip(rows, axes) if pair is None]
        unfactored = iter(self._unfactored(group["eps"], *map(list, zip(*whole))) if whole else ())
        directions = [
            next(unfactored) if pair is None else self._factored(group["eps"], *row, *pair)
            for row, pair in zip(rows, axes)
        ]
        self._apply(group, params, directions)

    def _factored(
        self, eps: float, param: Tensor, grad: Tensor, decay: float, i: int, j: int
    ) -> Tensor:
        """g / sqrt(v) of one factored tensor; the names are those of the class's docstring."""
        square = grad.square().add_(eps)
        row_mean, col_mean = _mean(square, j, param), _mean(square, i, param)
        state = self.state[param]
        if "v_row" not in state:
            state["v_row"] = _zeros_without(j, param, row_mean)
            state["v_col"] = _zeros_without(i, param, col_mean)
        v_row, v_col = _local((state["v_row"], state["v_col"]))
        row = v_row.unsqueeze(j).lerp_(row_mean, 1 - decay)
        col = v_col.unsqueeze(i).lerp_(col_mean, 1 - decay)
        row = (row / _mean(row, i, param)).rsqrt_()
        return torch.mul(grad, row, out=square).mul_(col.rsqrt())

    def _unfactored(
        self,
        eps: float,
        params: list[Tensor],
        grads: list[Tensor],
        decays: list[float],
    ) -> Sequence[Tensor]:
        """g / sqrt(v) of the tensors whose second moment is kept whole."""
        second = self._buffers(params, "v")
        square = torch._foreach_mul(grads, grads)
        torch._foreach_add_(square, eps)
        torch._foreach_mul_(square, [1 - decay for decay in decays])
        torch._foreach_mul_(second, decays)
        torch._foreach_add_(second, square)
        directions = torch._foreach_rsqrt(second)
        torch._foreach_mul_(directions, grads)
        return directions

    @staticmethod
    def _apply(group: Group, params: list[Tensor], directions: list[Tensor]) -> None:
        """Lines 3 (clipping) and 4; clip and parameter scale are one number per tensor."""
        scales = _param_scales(params)
        clips = _rms(directions, params)
        torch._foreach_div_(clips, ADAFACTOR_CLIP)
        torch._foreach_clamp_min_(clips, 1.0)
        torch._foreach_div_(scales, clips)
        theta = _local(params)
        _decay(group, theta)
        torch._foreach_addcmul_(theta, directions, scales, value=-group["lr"])


def factored_axes(shape: Sequence[int], min_dim: int = ADAFACTOR_MIN_DIM) -> tuple[int, int] | None:
    """The second-largest and the largest axis, or None if the former is shorter than `min_dim`.

    Among equal axes the later counts as larger (optax's factored dimensions).
    """
    if len(shape) < 2:
        return None
    second, largest = sorted(range(len(shape)), key=lambda axis: shape[axis])[-2:]
    return (second, largest) if shape[second] >= min_dim else None


def keeps_first_axis(key: str, shape: Sequence[int]) -> bool:
    """Whether the state tensor `key` of a parameter of this shape has its first axis too."""
    axes = factored_axes(shape)
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


class AdamAtan2(_Decoupled):
    """Adam with 4/pi * lambda * atan2(m_hat, lambda * sqrt(v_hat)) for its quotient, and no eps.

    Everett et al., Appendix C.3, use lambda = 8. The direction tends to 4/pi * m_hat / sqrt(v_hat)
    for small quotients, is 1.267 where m_hat = sqrt(v_hat) (so a rate tuned for Adam does not
    carry over), at most 2 * lambda, and 0 where m = v = 0.

    The rule does not see a common factor of all gradients. Squaring them as they come would end
    that where g^2 leaves the number format: below about 1e-22 in float32 v would be 0, and every
    step the largest possible. So the moments are those of gradient_scale * g, with a power of two
    per tensor, fixed by its first gradient that is not zero: 1 if the largest abs(g) is moderate
    (3e-8 to 3e7 in float32), else what brings it to 1. Powers of two are exact, so invariance is,
    for every finite factor. Other factors round differently, nothing else.

    What is left is the format's range within one tensor's history. In float32, where the largest
    first gradient is a: gradients may grow to 2e11 * a, and entries stay exact down to 3e-8 * a
    (a = 1 gives 1e-15); far below, at 1e-15 * a, they fade to no update, as with a small eps.
    """

    def __init__(self, groups: list[Group], betas: tuple[float, float], lam: float) -> None:
        super().__init__(groups, {"betas": betas, "atan2_lambda": lam})
        # The scales as numbers beside the tensors they were read from: no transfer per step.
        self._known_scales: dict[Tensor, tuple[Tensor, float]] = {}
        self._kept = torch.empty(2, 0)

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        first, second = self._buffers(params, "exp_avg"), self._buffers(params, "exp_avg_sq")
        scales = [self._gradient_scale(param) for param in params]
        numbers = list(zip(self._steps(params), scales))
        for numbers, *block in _blocks(numbers, _local(params), grads, first, second):
            steps, scales = map(list, zip(*numbers))
            params, grads, first, second = block
            if any(scale != 1 for scale in scales):
                grads = torch._foreach_mul(grads, scales)
            tensors = [*params, *grads, *first, *second]
            on_cpu = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
            update = self._fused_update if on_cpu else self._foreach_update
            update(group, steps, params, grads, first, second)

    def _gradient_scale(self, param: Tensor) -> float:
        """The power of two on this parameter's gradients; 1 while they are all zero."""
        state = self.state[param]
        if "gradient_scale" not in state:
            part = sharding.local(param.grad)
            largest = sharding.largest(part.abs().max().item() if part.numel() else 0.0, param)
            if largest == 0 or not math.isfinite(largest):
                return 1.0
            scale = _gradient_scale(largest, param.dtype)
            state["gradient_scale"] = torch.tensor(scale, dtype=param.dtype, device=param.device)
        kept = state["gradient_scale"]
        known, scale = self._known_scales.get(param, (None, 0.0))
        if known is not kept:
            scale = kept.item()
            self._known_scales[param] = kept, scale
        return scale

    def _fused_update(
        self,
        group: Group,
        steps: list[float],
        params: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
    ) -> None:
        """The rule in five passes over the cache, the first of them torch's fused AdamW.

        From zeros, at a rate of -before / lambda and without decay, that one advances the moments
        and leaves before * m_hat / (lambda * sqrt(v_hat)). All of it is one tensor, for few calls.
        """
        beta1, beta2 = group["betas"]
        lam, lr, wd = group["atan2_lambda"], group["lr"], group["weight_decay"]
        x, below = self._scratch(sum(param.numel() for param in params), params[0].dtype)
        parts = x.split_with_sizes([param.numel() for param in params])
        parts = [part.view_as(param) for part, param in zip(parts, params)]
        # With decay, one lerp towards -direction / wd decays and updates in a single pass.
        lerps = _LERP_DECAYS[0] < wd < _LERP_DECAYS[1]
        size = 4 / math.pi * lam / (-wd if lerps else 1)
        small = x.dtype == torch.float32 and largest_quotient(beta1, beta2) <= _ATAN_END * lam
        before = size * _ATAN_LINEAR if small else 1.0
        counts = {step: torch.tensor(step) for step in set(steps)}
        torch._fused_adamw_(
            parts, grads, first, second, [], [counts[step] for step in steps],
            lr=-before / lam, weight_decay=0.0, beta1=beta1, beta2=beta2, eps=_tiny(x.dtype),
            amsgrad=False, maximize=False,
        )  # fmt: skip
        one = torch.ones((), dtype=x.dtype)
        if small:
            torch.addcmul(one, x, x, value=_ATAN_POLE / before**2, out=below)
            x.addcdiv_(x, below, value=_ATAN_RATIONAL / _ATAN_LINEAR)
        else:
            torch.atan2(x, one, out=x).mul_(size)
        if lerps:
            torch._foreach_lerp_(params, parts, lr * wd)
        else:
            _decay(group, params)
            torch._foreach_add_(params, parts, alpha=-lr)

    def _scratch(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two vectors on the CPU, kept from block to block; the first is zero."""
        if self._kept.dtype != dtype or self._kept.shape[1] < size:
            self._kept = torch.empty(2, max(size, _BLOCK), dtype=dtype)
        zeros, other = self._kept[:, :size].unbind()
        return zeros.zero_(), other

    @staticmethod
    def _foreach_update(
        group: Group,
        steps: list[float],
        params: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
    ) -> None:
        """The same with foreach kernels; torch has no foreach atan2."""
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        # atan2(m / b1, lambda r / b2) = atan2(m, (lambda b1 / b2) r): one pass instead of two.
        lams = [group["atan2_lambda"] * (1 - beta1**step) for step in steps]
        angles = torch._foreach_sqrt(second)
        torch._foreach_mul_(
            angles, [lam / math.sqrt(1 - beta2**step) for lam, step in zip(lams, steps)]
        )
        torch._foreach_add_(angles, [lam * _tiny(params[0].dtype) for lam in lams])
        for m, angle in zip(first, angles):
            torch.atan2(m, angle, out=angle)
        _decay(group, params)
        size = 4 / math.pi * group["atan2_lambda"]
        torch._foreach_add_(params, angles, alpha=-group["lr"] * size)


def _gradient_scale(largest: float, dtype: torch.dtype) -> float:
    """AdamAtan2's power of two for gradients of at most `largest`, in reach of the format."""
    range_ = -math.frexp(torch.finfo(dtype).tiny)[1]
    exponent = math.frexp(largest)[1]
    if abs(exponent) <= range_ // 5:
        return 1.0
    return math.ldexp(1.0, max(-range_, min(range_, -exponent)))


def _tiny(dtype: torch.dtype) -> float:
    """The root of the smallest positive number: an eps that no sqrt(v) well above it can feel."""
    info = torch.finfo(dtype)
    return math.sqrt(info.tiny) * math.sqrt(info.eps)


@functools.cache
def largest_quotient(beta1: float, beta2: float) -> float:
    """The largest abs(m_hat) / sqrt(v_hat) that any gradients can bring about, at any step.

    m_hat^2 <= v_hat * sum(a_i^2 / b_i) by Cauchy and Schwarz, with a_i and b_i the weights of the
    gradient of i steps ago in m_hat and v_hat: a geometric series of ratio beta1^2 / beta2.
    """
    ratio = beta1**2 / beta2 if beta2 else math.inf
    if ratio >= 1:
        return math.inf
    squares = [
        (1 - ratio**t) / (1 - ratio) * (1 - beta2**t) / (1 - beta1**t) ** 2
        for t in (*range(1, 1000), math.inf)
    ]
    return (1 - beta1) * math.sqrt(max(squares) / (1 - beta2))


def _decay(group: Group, params: list[Tensor]) -> None:
    """theta <- (1 - lr * weight_decay) * theta; a plan's decay modes are in weight_decay."""
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's parts of tensors that may be sharded."""
    return [sharding.local(tensor) for tensor in tensors]


def _rms(tensors: list[Tensor], owners: list[Tensor]) -> list[Tensor]:
    """The root mean square of each tensor, on its device.

    Where the parameters `owners` are sharded, of the whole tensors whose parts these are.
    """
    if sharding.is_sharded(owners[0]):
        return _rms_of_parts(tensors, owners)
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.new_tensor(_rms_on_cpu(tensor)) for tensor in tensors]
    norms = list(torch._foreach_norm(tensors))
    torch._foreach_div_(norms, [math.sqrt(tensor.numel()) for tensor in tensors])
    return norms


def _rms_of_parts(parts: list[Tensor], owners: list[Tensor]) -> list[Tensor]:
    """The same from every process's sums of squares, added up at once and in float64."""
    if parts[0].device.type == "cpu":
        norms = torch.tensor([_norm_on_cpu(part) for part in parts], dtype=torch.float64)
    else:
        norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64))
    squares = sharding.total(norms.square(), owners[0])
    sizes = squares.new_tensor([owner.numel() for owner in owners])
    return list((squares / sizes).sqrt().to(parts[0].dtype).unbind())


def _rms_on_cpu(tensor: Tensor) -> float:
    """The root mean square of a tensor."""
    return _norm_on_cpu(tensor) / math.sqrt(max(tensor.numel(), 1))


def _norm_on_cpu(tensor: Tensor) -> float:
    """The L2 norm, by the norms of rows that are short enough for single precision.

    torch's norm adds up all of a float32 tensor in single precision, which costs 2e-3 of the
    result where 4 million entries are about equal.
    """
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    flat = tensor.reshape(-1)
    even = flat.numel() // _NORM_ROW * _NORM_ROW
    rows = flat[:even].view(-1, _NORM_ROW).norm(dim=1).double()
    return math.hypot(rows.norm().item(), flat[even:].norm().item())


def _param_scales(params: list[Tensor]) -> list[Tensor]:
    """max(RMS(theta), 1e-3) of each parameter: a tensor that starts at zero must still move."""
    scales = _rms(_local(params), params)
    torch._foreach_clamp_min_(scales, PARAM_SCALE_FLOOR)
    return scales


def _same_strides(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, with the gradient (second) laid out as the parameter (first) if it is not.

    The fused kernel walks through memory and would pair up the wrong entries.
    """
    param, grad, *state = tensors
    if grad.stride() != param.stride():
        grad = torch.empty_like(param).copy_(grad)
    return [param, grad, *state]


def _blocks(numbers: list[Any], *lists: list[Tensor]) -> Iterator[tuple[list[Any], ...]]:
    """Matching parts (numbers, *lists) of the arguments, for one elementwise update each.

    On an accelerator there is a single part, all of it, for few and large foreach calls. On a
    CPU large tensors are cut and small ones put together into parts of a size for the cache: the
    update is limited by memory there. Tensors that cannot be cut come whole and alone.
    """
    if any(tensor.device.type != "cpu" for tensor in lists[0]):
        yield numbers, *lists
        return
    part: list[tuple[Any, ...]] = []
    room = _BLOCK
    for piece in _pieces(numbers, lists):
        size = piece[1].numel()
        if not all(tensor.is_contiguous() for tensor in piece[1:]):
            yield tuple([entry] for entry in piece)
            continue
        if size > room:
            yield tuple(map(list, zip(*part)))
            part, room = [], _BLOCK
        part.append(piece)
        room -= size
    if part:
        yield tuple(map(list, zip(*part)))


def _pieces(numbers: list[Any], lists: Sequence[list[Tensor]]) -> Iterator[tuple[Any, ...]]:
    """One tensor of each list with its number at a time, large ones in pieces where possible."""
    for number, *tensors in zip(numbers, *lists):
        if tensors[0].numel() <= _BLOCK or not all(t.is_contiguous() for t in tensors):
            yield number, *tensors
            continue
        for cut in zip(*(tensor.view(-1).split(_BLOCK) for tensor in tensors)):
            yield number, *cut
