"""What one step tells of anybody's optimiser that its numbers do not: how large it is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from param_groups.check import reading
from param_groups.check.reading import Reading
from param_groups.families import OPTIMIZER_FAMILY
from param_groups.roles import PlanError
from param_groups.rules.muon import MUON_CONVENTIONS

SCALES = (1e-3, 1.0, 1e3)  # standard deviations of the random gradients
WITHIN = 1.5  # Newton-Schulz leaves singular values between 0.7 and 1.2
Steps = Mapping[tuple[int, float], Mapping[str, float]]  # {(size, scale): what `first_step` gives}
Convention = Callable[[float, float], float]  # (inputs, outputs) -> factor of the rate
CONVENTIONS: list[Convention] = [*MUON_CONVENTIONS.values()]
_UNSCALED: Convention = lambda inputs, outputs: 1.0
_ROOT: Convention = lambda inputs, outputs: math.sqrt(inputs * outputs)  # AdaMuon's


def judged_steps(
    readings: Mapping[int, Mapping[str, Reading]], steps: Steps
) -> tuple[dict[int, dict[str, Reading]], list[tuple[str, str]]]:
    """(readings with what only a step tells, a line for each tensor whose step has another size).

    A Muon of one's own gets the factor of the shape that fits its steps at all sizes.
    """
    first = readings[min(readings)]
    by_muon = [n for n, one in first.items() if one.optimizer == "muon"]
    unknown = [n for n in by_muon if reading.UNKNOWN_MUON in first[n].unread]
    plain = [n for n in unknown if len(first[n].shape) == 2]  # kernels have ways of their own
    factors: dict[tuple[int, str], float] = {}
    if unknown:
        fitting = _fitting(readings, steps, plain or unknown)
        for size, found in readings.items():
            factors |= {(size, n): fitting(*reading.flat(found[n].shape)) for n in unknown}
    told = {
        size: {
            n: replace(
                one,
                lr=one.lr * factors.get((size, n), 1.0),
                unread=tuple(doubt for doubt in one.unread if not doubt.endswith(reading.BY_STEP)),
            )
            for n, one in found.items()
        }
        for size, found in readings.items()
    }
    ratios = {
        key: {n: ratio / factors.get((key[0], n), 1.0) for n, ratio in found.items()}
        for key, found in steps.items()
    }
    matrices = [[found[n] for n in by_muon if n in found] for found in ratios.values()]
    alike = all(some and max(some) < WITHIN * min(some) for some in matrices)
    lines = []
    for n, one in first.items():
        seen = [found[n] for found in ratios.values() if n in found]
        if not all(map(math.isfinite, seen)):
            lines.append((n, "a step is not finite"))
            continue
        if not seen or (min(seen) > 1 / WITHIN and max(seen) < WITHIN):
            continue
        shapes = [(readings[size][n].shape, found[n]) for (size, _), found in ratios.items()]
        why = ""
        if n in by_muon and len(one.shape) > 2 and _by_kernel(shapes):
            kernel = "x".join(map(str, one.shape[2:]))
            why = f": the factor is that of the kernel, {kernel}, and not of the whole matrix"
        elif n in by_muon and alike and max(seen) < 1:
            why = ": one factor for all matrices, as of a clip after the orthogonalisation"
        span = f"{min(seen):.2g}" + (f" to {max(seen):.2g}" if max(seen) > 1.05 * min(seen) else "")
        lines.append((n, f"a step is {span} times what rate, shape and {one.optimizer} say{why}"))
    return told, lines


def _fitting(
    readings: Mapping[int, Mapping[str, Reading]], steps: Steps, names: Sequence[str]
) -> Convention:
    """The convention by which a Muon multiplies its rates: of those that leave the matrices' steps
    most alike, the one that is nearest to them."""

    def misfit(convention: Convention) -> tuple[bool, bool, float]:
        logs = [
            [
                math.log(max(found[n], 1e-30) / convention(*reading.flat(readings[size][n].shape)))
                for n in names
            ]
            for (size, _), found in steps.items()
        ]
        off = max(abs(value) for some in logs for value in some)
        spread = max(max(some) - min(some) for some in logs)
        return off > math.log(WITHIN), spread > math.log(WITHIN), off

    return min([_UNSCALED, *CONVENTIONS], key=misfit)


def _by_kernel(steps: Sequence[tuple[Sequence[int], float]]) -> bool:
    """Whether steps, each (shape, ratio), have the factor of a kernel's two axes in place of the
    whole matrix's."""
    for factor in (_ROOT, *CONVENTIONS):
        shares = [
            (factor(*shape[:1:-1]) / factor(*reading.flat(shape)), ratio)
            for shape, ratio in steps
            if len(shape) == 4
        ]
        if shares and all(s * WITHIN < 1 and 1 < WITHIN * r / s < WITHIN**2 for s, r in shares):
            return True
    return False


def first_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scale: float
) -> dict[str, float]:
    """How many times the first step of every tensor is what its rate, shape and optimiser say.

    Tensors start at 0, where no decay acts, or at 1 where steps are in proportion to them. Then a
    step is the rate times: g for SGD, g / (|g| + eps) for Adam, 1 with parameter scaling, and for
    Muon a matrix (out, in times kernel) of singular values 1 times the factor of the shape.

    Args:
        model, optimizers: as `read` takes them, fresh; the step uses them up.
        scale: standard deviation of the random gradients.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    expected: dict[str, tuple[torch.Tensor, float, float]] = {}
    draw = torch.Generator().manual_seed(0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            meta = ["a tensor is on the meta device"] * any(one.is_meta for one in group["params"])
            if none := reading.no_numbers(group) or meta:
                raise PlanError(f"--step: {none[0]}, with which no step can be taken")
            group["lr"], group["weight_decay"] = group.get("initial_lr", group["lr"]), 0.0
            for param in group["params"]:
                gradient = scale * torch.randn(param.shape, generator=draw)
                kind = reading.kind_of(optimizer, group, param)
                if param.requires_grad and kind in OPTIMIZER_FAMILY and id(param) in names:
                    start = float(OPTIMIZER_FAMILY[kind] == "adafactor")
                    size = reading.as_number(group["lr"]) * _says(
                        optimizer, group, gradient, param, kind
                    )
                    expected[names[id(param)]] = (param, start, size)
                    param.grad = gradient.to(param)
                    param.detach().fill_(start)
    for optimizer in optimizers:
        optimizer.step()
    return {
        name: float((param.detach().double() - start).norm()) / size
        for name, (param, start, size) in expected.items()
        if size
    }


def _says(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    gradient: torch.Tensor,
    param: torch.Tensor,
    kind: str,
) -> float:
    """The norm of a first step over the group's rate."""
    family = OPTIMIZER_FAMILY[kind]
    if family == "spectral":
        if {"parts", "layout"} & {*group}:
            return _of_matrices(group, param)
        return reading.shape_factor(optimizer, group, param, kind)[0] * math.sqrt(
            min(reading.flat(param.shape))
        )
    if family == "sgd":
        twice = float(group.get("momentum", 0.0)) * bool(group.get("nesterov", False))
        return float(gradient.norm()) * (1 + twice)
    if family == "adafactor":
        return math.sqrt(param.numel())
    scaled = gradient / (gradient.abs() + reading.epsilon(group, param))
    return float(scaled.norm()) * float(group.get("fallback_lr_scale", 1.0))


def _of_matrices(group: Mapping[str, Any], param: torch.Tensor) -> float:
    """The same of a plan's tensor of several matrices, each of singular values near its factor."""
    layout = group.get("layout", "linear")
    whole = param.flatten(1)[None] if layout == "linear" else param.reshape(-1, *param.shape[-2:])
    outputs, inputs = whole.shape[1:] if not layout.endswith("transposed") else whole.mT.shape[1:]
    parts = group.get("parts") or ((outputs, 1.0),)
    return math.sqrt(len(whole) * sum(rate**2 * min(size, inputs) for size, rate in parts))
