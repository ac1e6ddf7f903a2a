"""Forward hooks that record what modules read and make, and the sizes that are taken of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def recording(
    model: nn.Module,
    names: Sequence[str],
    keep: Callable[[Tensor], Tensor],
    *,
    inputs: bool = False,
    of_reals: bool = True,
) -> Iterator[dict[str, list[Tensor]]]:
    """Collects the outputs, or inputs, of the named modules while it is open, one per call."""
    outputs: dict[str, list[Tensor]] = {}

    def record(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = _first_tensor(args if inputs else output, of_reals)
        if tensor is not None:
            outputs.setdefault(name, []).append(keep(tensor))

    handles = [model.get_submodule(n).register_forward_hook(partial(record, n)) for n in names]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any, of_reals: bool) -> Tensor | None:
    """The first tensor, of real numbers or of any, in a module's output, which may be nested."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() or not of_reals else None
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, list, tuple)):
        return None
    return next((t for v in values if (t := _first_tensor(v, of_reals)) is not None), None)


def square(tensor: Tensor) -> Tensor:
    return tensor.detach().float().square().mean()


def keep_gradient(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.retain_grad()
    return tensor


def rows(tensors: Sequence[Tensor]) -> Tensor:
    """All calls of a module as rows of one float32 matrix, features last."""
    return torch.cat([t.detach().float().reshape(-1, t.shape[-1]) for t in tensors])


def rms_of(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def spectral_norm(matrix: Tensor) -> float:
    """The largest singular value, by power iteration; of Muon's update all are about the same."""
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=draw).to(matrix.device)
    matrix = matrix.float()
    for _ in range(8):
        vector = nn.functional.normalize(matrix.T @ (matrix @ vector), dim=0)
    return float((matrix @ vector).norm())


def rms_along(change: Tensor, gradient: Tensor) -> float:
    """RMS over positions of the change's component along the gradient; both (positions, V).

    Positions without a gradient are left out.
    """
    norm = gradient.norm(dim=-1)
    along = (change * gradient).sum(-1)[norm > 0] / norm[norm > 0]
    return float(along.square().mean().sqrt())
