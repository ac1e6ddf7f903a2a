"""Adam with an arctangent for its quotient, whose epsilon thereby scales itself.

The rule is a few lines (`_foreach_update`); the rest of the file buys speed on a CPU. torch has no
fused or foreach atan2, and by plain operations a step takes several times as long as torch's fused
AdamW. `_fused_update` therefore lets that kernel advance the moments and divide, and takes the
arctangent of the quotient by a minimax fit: 1.5 to 2.1 times the time of fused AdamW.
benchmarks/optimizers.py measures it.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from training import sharding
from training.decoupled import BLOCK, Decoupled, Group, blocks, decay_weights, local_parts

# arctan(x) = x * (linear + rational / (1 + pole * x^2)) to 8e-8 for abs(x) <= end, which is the
# rounding of float32: a minimax fit.
_ATAN_LINEAR, _ATAN_RATIONAL, _ATAN_POLE = 0.43993879, 0.56006113, 0.59512153
_ATAN_END = 0.22
# Between these decays a direction divided by the decay is safely within float32.
_LERP_DECAYS = (1e-6, 1e6)


class AdamAtan2(Decoupled):
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
        # The scales as numbers, next to the tensors they were read from: no transfer per step.
        self._known_scales: dict[Tensor, tuple[Tensor, float]] = {}
        self._kept = torch.empty(2, 0)

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        first, second = self._buffers(params, "exp_avg"), self._buffers(params, "exp_avg_sq")
        scales = [self._gradient_scale(param) for param in params]
        numbers = list(zip(self._steps(params), scales))
        for numbers, *block in blocks(numbers, local_parts(params), grads, first, second):
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
            decay_weights(group, params)
            torch._foreach_add_(params, parts, alpha=-lr)

    def _scratch(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two vectors on the CPU, kept from block to block; the first is zero."""
        if self._kept.dtype != dtype or self._kept.shape[1] < size:
            self._kept = torch.empty(2, max(size, BLOCK), dtype=dtype)
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
        decay_weights(group, params)
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
