"""Muon beside AdamW as one torch optimiser, over the groups of a plan that has both.

For a matrix W with gradient G, momentum mu and the group's rate and decay:

    B <- mu B + (1 - mu) G;  U = orthogonalised((1 - mu) G + mu B)
    W <- (1 - lr weight_decay) W - lr U

The group's rate holds all factors of the matrix's shape, and U sees no common factor of the
gradients. Every other tensor takes torch's AdamW step. A sharded matrix is put together, as U is of
the whole: every process computes it and keeps its part.

Matrices of one shape are one stack: on a GPU launches decide, 1,344 for those of 8 blocks one by
one. torch.optim.Muon takes them one by one, in bfloat16 on a CPU too, has no batched form up to
torch 2.14 (foreach=True raises) and no AdamW for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Jordan et al. 2024: after five steps singular values between 0.001 and 1 of the largest lie within
# 0.68 and 1.13; exact values are not the aim.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


# Entries of a matrix that a CPU still computes faster in a stack (3.7 times at 32 x 32, 1.2 at
# 64 x 256, 0.8 at 128 x 512), and of a whole stack elsewhere, so that it takes at most 0.5 GB.
SMALL, STACK = 1 << 14, 1 << 27


def orthogonalised(matrix: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest matrix with singular values near 1, U V^T of the singular value decomposition.

    Args:
        matrix: (out, in), of any scale, or a stack of such, (n, out, in), each for itself.
        dtype: of the products; by default bfloat16 on a GPU, and float32 elsewhere, since a CPU
            without bf16 units takes thirty times as long.

    Returns:
        A tensor like `matrix`; zeros where it is zero. A matrix in a stack becomes what it becomes
        alone, on a CPU in float32 to the last bit.

    Source: Jordan et al. 2024, the quintic Newton-Schulz iteration of Muon.
    """
    if not matrix.numel():
        return matrix.clone()
    if dtype is None:
        dtype = torch.bfloat16 if matrix.device.type == "cuda" else torch.float32
    single = matrix.ndim == 2
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    tiny = torch.finfo(torch.float32).tiny
    largest = wide.abs().amax((-2, -1), keepdim=True).float()
    x = wide.float() / largest.clamp_min(tiny)  # squares of 1e-30 would vanish
    norm = x.norm() if single else torch.stack(torch._foreach_norm(x.unbind()))[:, None, None]
    x = (x / norm.clamp_min(tiny)).to(dtype)
    product = torch.addmm if single else torch.baddbmm
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide is matrix else x.mT).to(matrix.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups whose `optimizer` is "muon", AdamW for those of "adam".

    `fused` is torch's for AdamW's step. Parameters without a gradient are left alone, and all of
    them where `found_inf` is a tensor of 1. Raises ValueError for a group whose numbers are missing
    or out of range, whose optimizer is another, or whose matrices are none.
    """

    found_inf: Tensor | None = None
    """Whether to leave all as it is, 1 or 0 on the parameters' device, where that decides."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        fused: bool = False,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
    ) -> None:
        numbers = {"betas": betas, "momentum": momentum, "optimizer": "adam", "fused": fused}
        super().__init__(groups, numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; a group that is refused is not added."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's; ValueError for the state of another optimiser, which has other numbers."""
        for group in state_dict["param_groups"]:
            _check({**group, "params": []})
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            graded = [param for param in group["params"] if param.grad is not None]
            if group["optimizer"] == "muon":
                for stack in _stacks(graded):
                    self._muon(stack, group)
            elif graded:
                self._adamw(graded, group)
        return loss

    def _muon(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        rate: Any = group["lr"]
        if self.found_inf is not None:  # no rate, and a gradient that leaves the momentum as it is
            skip = self.found_inf > 0
            gradients = [torch.where(skip, m, g) for m, g in zip(momenta, gradients, strict=True)]
            rate = rate * (1 - self.found_inf)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        if len(matrices) == 1:
            updates = [_whole_update(gradients[0].lerp(momenta[0], group["momentum"]))]
        else:
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
            updates = list(orthogonalised(torch.stack(ahead)).contiguous().unbind())
        torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            torch._foreach_mul_(updates, rate)
            rate = 1.0
        torch._foreach_add_(matrices, updates, alpha=-rate)

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                # torch's fused kernels read it on the parameter's device.
                device = param.device if group["fused"] else None
                self.state[param]["step"] = torch.tensor(0.0, device=device)
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        states = [self.state[param] for param in params]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            foreach=not group["fused"],
            found_inf=self.found_inf,
            has_complex=any(map(torch.is_complex, params)),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            amsgrad=False,
            maximize=False,
        )


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError for numbers that torch.optim.AdamW and Muon refuse or do without."""
    kind, betas, momentum = (group.get(key) for key in ("optimizer", "betas", "momentum"))
    if kind not in ("muon", "adam"):
        raise ValueError(f"a group's optimizer is {kind!r}; expected 'muon' or 'adam'")
    for key in ("lr", "weight_decay", *(["eps"] if kind == "adam" else [])):
        if not group.get(key, -1) >= 0:
            raise ValueError(f"a group's {key} is {group.get(key)}; expected a number from 0 on")
    for key, value in (("momentum", momentum), *(("betas", beta) for beta in betas or (None,))):
        if value is None or not 0 <= value < 1:
            raise ValueError(f"a group's {key} is {group.get(key)}; expected 0 <= {key} < 1")
    for param in group["params"] if kind == "muon" else ():
        if param.ndim != 2:
            raise ValueError(f"a group of muon has a tensor of shape {tuple(param.shape)}")


def _stacks(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices that one stack may hold: alike in shape, type and device, whole, not too many."""
    alike: dict[Any, list[Tensor]] = {}
    for matrix in matrices:
        kind = (matrix.shape, matrix.dtype, matrix.device, hasattr(matrix, "full_tensor"))
        alike.setdefault(kind, []).append(matrix)
    for (shape, _, device, sharded), found in alike.items():
        size = shape.numel()
        single = sharded or not size or (device.type == "cpu" and size > SMALL)
        most = 1 if single else max(1, STACK // size)
        for first in range(0, len(found), most):
            yield found[first : first + most]


def _whole_update(ahead: Any) -> Any:
    """A matrix orthogonalised; of a sharded one this process's part."""
    if not hasattr(ahead, "full_tensor"):
        return orthogonalised(ahead)
    from torch.distributed.tensor import distribute_tensor

    whole = orthogonalised(ahead.full_tensor())
    return distribute_tensor(whole, ahead.device_mesh, ahead.placements)
