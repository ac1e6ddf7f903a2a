"""What the update rules share: the loop over groups, decoupled decay, state, norms."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from training import sharding

# Everett et al., Appendix C, leave optax's default in place.
PARAM_SCALE_FLOOR = 1e-3

# Entries whose squares a CPU adds up in single precision, for a parameter's norm.
_NORM_ROW = 1 << 12

Group = dict[str, Any]


class Eager(torch.optim.Optimizer):
    """torch's optimiser without the guards that keep torch.compile out of these methods.

    The guards import the compiler, which takes a third of a short run's start-up time. No run here
    compiles its optimiser.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(Eager, torch.optim.AdamW):
    """torch.optim.AdamW, number by number."""

    def __init__(self, groups: list[Group], fused: bool, betas: tuple[float, float]) -> None:
        super().__init__(groups, betas=betas, fused=fused, foreach=not fused)

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Decoupled(Eager):
    """What the rules below share: the loop over groups, decay, per-parameter state and steps.

    Parameters without a gradient are left alone, decay and step count included. The state of a
    parameter is "step" (a float tensor, on a GPU if `fused`, as torch keeps it) and the rule's
    tensors. A group's numbers are the plan's and the rule's; `fused` wants one kernel per tensor.
    """

    found_inf: Tensor | None = None
    """1 on the parameters' device where a `fused` step is to leave all as it is, 0 where not."""

    def __init__(self, groups: list[Group], fused: bool = False, **numbers: Any) -> None:
        super().__init__(groups, {**numbers, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            graded = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if graded:
                grads = [_laid_out(param, grad) for param, grad in graded]
                self._update(group, [param for param, _ in graded], grads)
        return loss

    def _update(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        """Decays and updates `params`, or this process's part of them, in place.

        Gradients and what `_buffers` returns are such parts; `params` are the keys to the state.
        """
        raise NotImplementedError

    def _steps(self, group: Group, params: list[Tensor]) -> list[Tensor]:
        """How many updates each parameter has had; torch's kernels count them up."""
        for param in params:
            if "step" not in self.state[param]:
                device = sharding.local(param).device if group["fused"] else None
                self.state[param]["step"] = torch.tensor(0.0, device=device)
        return [self.state[param]["step"] for param in params]

    def _numbers(self, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Rate, what decay leaves of the weights, and `found_inf`: tensors, so that a compiled
        rule does not depend on their values. Those on the CPU are arguments of its kernels."""
        rate = torch.tensor(group["lr"], dtype=torch.float64)
        skip = torch.tensor(0.0) if self.found_inf is None else self.found_inf
        return rate, 1 - rate * group["weight_decay"], skip

    def _counted(self, steps: list[Tensor]) -> Tensor:
        """Counts a compiled update that is not skipped; the counts, in float64, on the device."""
        torch._foreach_add_(steps, 1.0)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        return torch.stack(steps).double()

    def _buffers(self, params: list[Tensor], key: str) -> list[Tensor]:
        """The state tensor `key` of each parameter, in its shape and zero before the first use."""
        for param in params:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param)
        return local_parts(self.state[param][key] for param in params)


def _laid_out(param: Tensor, grad: Tensor) -> Tensor:
    """This process's part of a gradient, in the memory layout of its parameter's.

    torch's fused kernels walk through memory and would pair up the wrong entries.
    """
    part, grad = sharding.local(param), sharding.local(grad)
    return grad if grad.stride() == part.stride() else torch.empty_like(part).copy_(grad)


def decay_weights(group: Group, params: list[Tensor], skip: Tensor | None = None) -> None:
    """theta <- (1 - lr * weight_decay) * theta; a plan's decay modes are in weight_decay.

    Nothing is decayed where `skip` is 1.
    """
    if group["weight_decay"]:
        decay = group["lr"] * group["weight_decay"]
        torch._foreach_mul_(params, 1 - decay if skip is None else 1 - decay * (1 - skip))


def update(skip: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Copies the second tensor of each pair into the first, or nothing where `skip` is 1."""
    for old, new in pairs:
        old.copy_(torch.where(skip > 0, old, new))


def rms_inside(tensor: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """The root mean square, over these axes or all, to be compiled into the rule that needs it."""
    return tensor.square().mean(axes, keepdim=bool(axes)).sqrt()


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This process's parts of tensors that may be sharded."""
    return [sharding.local(tensor) for tensor in tensors]


def rms(tensors: list[Tensor], owners: list[Tensor]) -> list[Tensor]:
    """The root mean square of each tensor, on its device.

    Where the parameters `owners` are sharded, of the whole tensors whose parts these are.
    """
    if sharding.is_sharded(owners[0]):
        return _rms_of_parts(tensors, owners)
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.new_tensor(rms_on_cpu(tensor)) for tensor in tensors]
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


def rms_on_cpu(tensor: Tensor) -> float:
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


def param_scales(params: list[Tensor]) -> list[Tensor]:
    """max(RMS(theta), 1e-3) of each parameter: a tensor that starts at zero must still move."""
    scales = rms(local_parts(params), params)
    torch._foreach_clamp_min_(scales, PARAM_SCALE_FLOOR)
    return scales
