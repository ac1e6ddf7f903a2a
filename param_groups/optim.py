"""Muon beside AdamW as one torch optimiser, over the groups of a plan that has both.

For a matrix W with gradient G, momentum mu and the group's rate and decay:

    B <- mu B + (1 - mu) G;  U = orthogonalised((1 - mu) G + mu B)
    W <- (1 - lr weight_decay) W - lr U

The group's rate holds all factors of the matrix's shape, and U sees no common factor of the
gradients. Every other tensor takes torch's AdamW step. A sharded matrix is put together, as U is of
the whole: every process computes it and keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Jordan et al. 2024: after five steps singular values between 0.001 and 1 of the largest lie within
# 0.68 and 1.13; exact values are not the aim.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalised(matrix: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The nearest matrix with singular values near 1, U V^T of the singular value decomposition.

    Args:
        matrix: (out, in), of any scale.
        dtype: of the products; by default bfloat16 on a GPU, and float32 elsewhere, since a CPU
            without bf16 units takes thirty times as long.

    Returns:
        A tensor like `matrix`; zeros where it is zero.

    Source: Jordan et al. 2024, the quintic Newton-Schulz iteration of Muon.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrix.device.type == "cuda" else torch.float32
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    tiny = torch.finfo(torch.float32).tiny
    x = wide.float() / wide.abs().max().float().clamp_min(tiny)  # squares of 1e-30 would vanish
    x = (x / x.norm().clamp_min(tiny)).to(dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide is matrix else x.T).to(matrix.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups whose `optimizer` is "muon", AdamW for those of "adam".

    `fused` is torch's for AdamW's step. Parameters without a gradient are left alone.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        fused: bool = False,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
    ) -> None:
        super().__init__(groups, {"betas": betas, "momentum": momentum, "optimizer": "adam"})
        self._fused = fused

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
                for matrix in graded:
                    self._muon(matrix, group)
            elif graded:
                self._adamw(graded, group)
        return loss

    def _muon(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(momentum, group["momentum"])
        update: Any = ahead
        if hasattr(update, "full_tensor"):  # a part of it
            from torch.distributed.tensor import distribute_tensor

            whole = orthogonalised(update.full_tensor())
            update = distribute_tensor(whole, update.device_mesh, update.placements)
        else:
            update = orthogonalised(ahead)
        matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["step"] = torch.tensor(0.0)
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
            fused=self._fused,
            foreach=not self._fused,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            amsgrad=False,
            maximize=False,
        )
