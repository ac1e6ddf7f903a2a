"""Muon beside AdamW as one torch optimiser, over the groups of a plan that has both.

For a matrix W with gradient G, momentum mu and the group's rate and decay:

    B <- mu B + (1 - mu) G;  U = orthogonalised((1 - mu) G + mu B)
    W <- (1 - lr weight_decay) W - lr U

The group's rate holds all factors of the matrix's shape, and U sees no common factor of the
gradients. A tensor that holds several matrices says so by its group's `parts`, (outputs, rate over
lr) of each, and `layout`, the name of its axes: each matrix is then orthogonalised for itself, the
kernels of a convolution as (out, in * kernel). Every other tensor takes torch's AdamW step. A
sharded matrix is put together, as U is of the whole: every process computes it and keeps its part.

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
NUMBER = (int, float, Tensor)
LAYOUTS = ("linear", "transposed", "experts", "experts_transposed")  # of param_groups.roles.Layout


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
        except Exception:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's; ValueError for the state of another optimiser: other numbers or parts."""
        for group in state_dict["param_groups"]:
            _check({**group, "params": []})
        for one, other in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if _parts(one) != _parts(other):
                raise ValueError(
                    f"a group's parts are {_parts(other)} in the state, {_parts(one)} here: it is "
                    "of another plan"
                )
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
                for stack in _stacks(graded, group):
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
        parts, layout = _parts(group)
        if len(matrices) == 1:
            one = gradients[0].lerp(momenta[0], group["momentum"])
            updates = [_whole_update(one, parts, layout)]
        else:
            ahead = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
            updates = list(_updates(torch.stack(ahead), parts, layout).contiguous().unbind())
        torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            torch._foreach_mul_(updates, rate)
            rate = 1.0
        if len({factor for _, factor in parts}) < 2 or hasattr(matrices[0], "full_tensor"):
            torch._foreach_add_(matrices, updates, alpha=-rate)
            return
        axis, sizes = _axis(layout), [size for size, _ in parts]
        pieces = zip(
            *(tensor.split_with_sizes(sizes, axis) for tensor in (*matrices, *updates)), strict=True
        )
        for (_, factor), piece in zip(parts, pieces, strict=True):
            ours, theirs = piece[: len(matrices)], piece[len(matrices) :]
            torch._foreach_add_(ours, theirs, alpha=-rate * factor)

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
            foreach=not (group["fused"] or isinstance(group["lr"], Tensor)),  # as torch has it
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
        if not (isinstance(group.get(key), NUMBER) and group[key] >= 0):
            raise ValueError(f"a group's {key} is {group.get(key)}; expected a number from 0 on")
    pair = betas if isinstance(betas, (tuple, list)) and len(betas) == 2 else (None,)
    for key, value in (("momentum", momentum), *(("betas", beta) for beta in pair)):
        if not (isinstance(value, NUMBER) and 0 <= value < 1):
            raise ValueError(f"a group's {key} is {group.get(key)}; expected 0 <= {key} < 1")
    parts, layout = _parts(group)
    if layout not in LAYOUTS:
        raise ValueError(f"a group's layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    for param in group["params"] if kind == "muon" else ():
        outputs = sum(size for size, _ in parts)
        matrix = layout == "transposed" or "layout" not in group  # else a kernel or a stack
        if param.ndim < 2 + layout.startswith("experts") or (matrix and param.ndim > 2):
            raise ValueError(f"a group of muon has a tensor of shape {tuple(param.shape)}")
        if parts and param.shape[_axis(layout)] != outputs:
            shape = tuple(param.shape)
            raise ValueError(
                f"a group has parts of {outputs} outputs, and a tensor of shape {shape}"
            )


def _parts(group: dict[str, Any]) -> tuple[tuple[tuple[int, float], ...], str]:
    """What a group says of the matrices in its tensors; JSON has lists for pairs."""
    return tuple((n, rate) for n, rate in group.get("parts", ())), group.get("layout", "linear")


def _axis(layout: str) -> int:
    """That of the outputs."""
    return {"linear": 0, "transposed": 1, "experts": -2, "experts_transposed": -1}[layout]


def _updates(ahead: Tensor, parts: tuple[tuple[int, float], ...], layout: str) -> Tensor:
    """Each matrix in a stack of tensors (n, *shape) orthogonalised, those of one size together."""
    if not parts and ahead.ndim == 3:
        return orthogonalised(ahead)
    # As (n, out, in) or, of tensors that are stacks themselves, (n * experts, out, in).
    turned = layout.endswith("transposed")
    stack = ahead.flatten(2) if layout == "linear" else ahead.flatten(0, -3)
    stack = stack.mT if turned else stack
    sizes = [size for size, _ in parts] or [stack.shape[1]]
    pieces: list[Tensor] = list(stack.split_with_sizes(sizes, 1))
    for size in dict.fromkeys(sizes):
        places = [place for place, other in enumerate(sizes) if other == size]
        done = orthogonalised(torch.cat([pieces[place] for place in places]).contiguous())
        for place, update in zip(places, done.chunk(len(places)), strict=True):
            pieces[place] = update
    updates = torch.cat(pieces, 1)
    return (updates.mT if turned else updates).reshape(ahead.shape)


def _stacks(matrices: list[Tensor], group: dict[str, Any]) -> Iterator[list[Tensor]]:
    """Matrices that one stack may hold: alike in shape, type and device, whole, not too many."""
    alike: dict[Any, list[Tensor]] = {}
    for matrix in matrices:
        kind = (matrix.shape, matrix.dtype, matrix.device, hasattr(matrix, "full_tensor"))
        alike.setdefault(kind, []).append(matrix)
    for (shape, _, device, sharded), found in alike.items():
        size = shape.numel()
        whole = not group.get("parts") and "layout" not in group
        single = sharded or not size or (whole and device.type == "cpu" and size > SMALL)
        most = 1 if single else max(1, STACK // size)
        for first in range(0, len(found), most):
            yield found[first : first + most]


def _whole_update(ahead: Any, parts: tuple[tuple[int, float], ...], layout: str) -> Any:
    """A tensor's matrices orthogonalised; of a sharded one this process's, times the factors."""
    if not hasattr(ahead, "full_tensor"):
        plain = not parts and ahead.ndim == 2
        return orthogonalised(ahead) if plain else _updates(ahead[None], parts, layout)[0]
    from torch.distributed.tensor import distribute_tensor

    whole = _whole_update(ahead.full_tensor(), parts, layout)
    if len({factor for _, factor in parts}) > 1:
        axis, factors = _axis(layout), [torch.full((n,), rate) for n, rate in parts]
        shape = [1] * whole.ndim
        shape[axis] = -1
        whole = whole * torch.cat(factors).to(whole).view(shape)
    return distribute_tensor(whole, ahead.device_mesh, ahead.placements)
