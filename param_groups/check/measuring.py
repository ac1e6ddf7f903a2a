"""What the coordinate check measures: how large outputs, their changes and updates are.

A model is trained for a few steps at several widths and seeds. The check records the RMS of

* init: every module's output at initialisation, on the batch of the first step;
* change: what the steps add up to, output after t steps minus output at first. The logits have a
  second row, their change along the gradient of the loss: a softmax over V tokens pushes about one
  logit of V in a common direction, so the RMS over all of them shows the growth of that one only at
  widths far beyond V;
* update: every tensor's change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from param_groups.optim import MuonAdamW
from param_groups.plan import Plan
from param_groups.roles import PlanError, Role

WIDTHS, STEPS, SEEDS = (64, 128, 256, 512), 4, 3
ALONG = " along the loss gradient"


class CheckError(PlanError):
    """A model, a file or a command that cannot be checked; the message says what to do."""


@dataclass
class Check:
    """A model at one width, ready to train; what `task(width, seed)` of your own file returns.

    Args:
        model: unwrapped and uncompiled.
        plan: its plan, which the check initialises it with.
        batches: step t trains on batches[t], again from the first when they run out; all outputs
            are compared on batches[0].
        loss: loss(model, batch), the mean loss of a batch, a scalar.
        optimizer: over the model's tensors; by default the prescription's, over the plan's groups.
        clip_norm: the largest gradient norm, none by default.
        after_init: after_init(model) may change what the plan drew.
    """

    model: nn.Module
    plan: Plan
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    after_init: Callable[[nn.Module], None] | None = None


Build = Callable[[int, int], Check]  # (width, seed) -> Check


@dataclass(frozen=True)
class Coordinate:
    """One measured RMS.

    `quantity` is "init", "change" or "update"; `name` is a tensor's for updates, else a module's.
    `part` is what the module's output is: "embedding", "hidden" or "logits"; "tensor" for updates.
    """

    quantity: str
    name: str
    part: str
    step: int
    width: int
    seed: int
    rms: float


@dataclass
class Measurement:
    """All that a check measured, and the plan at every width."""

    points: list[Coordinate] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    """Modules that own planned tensors and were never called."""


def measure(
    build: Build,
    widths: Sequence[int] = WIDTHS,
    *,
    steps: int = STEPS,
    seeds: Sequence[int] = tuple(range(SEEDS)),
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Trains every width and seed and takes the RMS of outputs, changes and updates.

    Args:
        build: build(width, seed), the Check to train.
        widths: at least 3 sizes, of any kind that `build` understands. If they are the depth of a
            prescription that has one, and nothing else, points are of all blocks together.
        steps: optimiser steps.
        seeds: of initial values and data.
        device: where the models are trained.
        progress: gets a line for each run that is done.

    Returns:
        Points of the modules that own a planned tensor and of the blocks of a ModuleList or
        Sequential, taken by forward hooks without dropout; and the plan at every width.

    Raises:
        CheckError: too few widths, and models that cannot be compared.

    Source: Yang et al. 2022, App. D.1 (the coordinate check).
    """
    check_numbers(widths, steps, seeds)
    result = Measurement()
    modules: dict[int, set[str]] = {}
    runs = [(width, seed) for width in sorted(widths) for seed in seeds]
    for number, (width, seed) in enumerate(runs, start=1):
        check = build(width, seed)
        if not isinstance(check, Check):
            raise CheckError(
                f"task(width, seed) returned {type(check).__name__}; expected a "
                "param_groups.check.Check"
            )
        if not len(check.batches):
            raise CheckError("the check has no batches; give Check(batches=[...]) at least one")
        result.plans[width] = check.plan
        with torch.random.fork_rng():  # dropout, too, is a function of the seed
            torch.manual_seed(seed)
            points, result.silent = _measure_one(check, width, seed, steps, torch.device(device))
        result.points += points
        modules[width] = {point.name for point in points if point.quantity == "init"}
        if progress is not None:
            progress(f"width {width} seed {seed} ({number} of {len(runs)})")
    if scanned(result.plans) == "depth":
        result.points = _over_blocks(result.points)
        modules = {depth: set(map(pooled, names)) for depth, names in modules.items()}
    first, *rest = sorted(modules)
    shapes = {width: [row.shape for row in plan.rows] for width, plan in result.plans.items()}
    for width in rest:
        if odd := sorted(modules[first] ^ modules[width]):
            raise CheckError(
                f"module {odd[0]!r} is in the model of width {first} or {width} only; widths can "
                "be compared only between models that are otherwise the same"
            )
        if shapes[first] == shapes[width]:
            raise CheckError(
                f"widths {first} and {width} gave models of the same shapes; the function of a "
                "width must make a model of that width"
            )
    return result


def scanned(plans: Mapping[int, Plan]) -> str:
    """The size in which the plans differ: depth or head_dim where it is that alone, else width (to
    which a head dimension is in proportion)."""
    rules = [plan.prescription for plan in plans.values()]
    keys = ("head_dim", "heads", "depth", "width")
    differ = [key for key in keys if len({rule.get(key) for rule in rules}) > 1]
    if differ == ["depth"]:
        return "depth"
    return "head_dim" if differ in (["head_dim"], ["head_dim", "width"]) else "width"


def pooled(name: str) -> str:
    """A name without the number of its block, the first one: blocks.0.mlp.2 -> blocks.*.mlp.2."""
    return re.sub(r"(?<=\.)\d+(?=\.|$|\s)", "*", name, count=1)


def check_numbers(widths: Sequence[int], steps: int, seeds: Sequence[int]) -> None:
    """CheckError for numbers that no slope can be fitted to."""
    if len(set(widths)) < 3 or len(set(widths)) < len(widths) or min(widths) < 1:
        raise CheckError(
            f"widths {' '.join(map(str, widths))}: expected at least 3 different positive ones, "
            "for example 64 128 256 512"
        )
    if steps < 1 or len(seeds) < 1:
        raise CheckError(f"{steps} steps, {len(seeds)} seeds: expected at least 1 of each")


def _over_blocks(points: Sequence[Coordinate]) -> list[Coordinate]:
    """The RMS over all blocks of what each of them has, so that depths can be compared."""
    groups: dict[Coordinate, list[float]] = {}
    for point in points:
        group = replace(point, name=pooled(point.name), rms=0.0)
        groups.setdefault(group, []).append(point.rms)
    return [
        replace(group, rms=math.sqrt(sum(rms * rms for rms in values) / len(values)))
        for group, values in groups.items()
    ]


# One width and seed


def _measure_one(
    check: Check, width: int, seed: int, steps: int, device: torch.device
) -> tuple[list[Coordinate], tuple[str, ...]]:
    """The points of one width and seed, and the modules that were never called."""
    model = check.model.to(device)
    check.plan.initialise(model, seed)
    if check.after_init is not None:
        check.after_init(model)
    optimizer = _optimizer(check)
    batches = [tree_map_only(Tensor, lambda t: t.to(device), batch) for batch in check.batches]
    parts = watched(model, check.plan)
    first, gradient = _first_outputs(check, parts, batches[0])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    points: list[Coordinate] = []

    def keep(quantity: str, name: str, part: str, step: int, rms: float) -> None:
        points.append(Coordinate(quantity, name, part, step, width, seed, rms))

    for name, output in first.items():
        keep("init", name, parts[name], 0, _rms(output))
    for step in range(1, steps + 1):
        model.train()
        optimizer.zero_grad()
        torch.autograd.backward(check.loss(model, batches[(step - 1) % len(batches)]))
        if check.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), check.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        now = _outputs(check, first, batches[0])
        for name in first:
            keep("change", name, parts[name], step, _rms(now[name] - first[name]))
        for name, direction in gradient.items():
            along = rms_along(now[name] - first[name], direction)
            keep("change", name + ALONG, "logits", step, along)
        for name, parameter in model.named_parameters():
            keep("update", name, "tensor", step, _rms(parameter.detach() - start[name]))
    return points, tuple(name for name in parts if name not in first)


def _optimizer(check: Check) -> torch.optim.Optimizer:
    """The check's own, or torch's update rule of the plan's prescription (Adam where it names
    none), without decay: that moves a tensor by a share of itself, whatever its rate."""
    optimizer = check.optimizer
    if optimizer is None:
        name = str(check.plan.prescription.get("optimizer", "adam"))
        kinds = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": MuonAdamW}
        if name not in kinds:
            raise CheckError(
                f"torch has no {name} with an epsilon per group; give Check(optimizer=...) one "
                "that is built over plan.groups(model)"
            )
        groups = check.plan.groups(check.model, several=name == "muon")
        optimizer = kinds[name]([{**group, "weight_decay": 0.0} for group in groups])
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for name, parameter in check.model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:  # it could not move
            raise CheckError(
                f"the optimizer does not hold {name!r}; build it over plan.groups(model) of the "
                "model that the check is given, or freeze what is not to be trained"
            )
    return optimizer


def watched(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Module name -> part ("embedding", "hidden", "logits") of all that is measured.

    A word embedding that is also the readout counts as logits under its second name.
    """
    parts: dict[str, str] = {}
    tables = (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING, Role.PATCH_EMBEDDING)
    for row in plan.rows:
        for name in (row.name, *row.tied_to):
            module = name.rpartition(".")[0]
            # Not the whole model, whose output is the loss or the logits again. Of a layer's
            # tensors a bias says less than the matrix.
            if module and parts.get(module) not in ("logits", "embedding"):
                tied = row.role == Role.TOKEN_EMBEDDING and name != row.name
                logits = tied or row.role in (Role.READOUT, Role.READOUT_BIAS)
                part = "embedding" if row.role in tables else "hidden"
                parts[module] = "logits" if logits else part
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        block = isinstance(parent, (nn.ModuleList, nn.Sequential)) and module is not model
        if block and name not in parts and any(True for _ in module.parameters()):
            parts[name] = "hidden"
    return {name: parts[name] for name, _ in model.named_modules() if name in parts}


# Outputs


@contextmanager
def recording(
    model: nn.Module, names: Sequence[str], keep: Callable[[Tensor], Tensor]
) -> Iterator[dict[str, list[Tensor]]]:
    """Collects the outputs of the named modules while it is open, one entry per call."""
    outputs: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                outputs.setdefault(name, []).append(keep(tensor))

        return record

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor | None:
    """The first tensor of real numbers in a module's output, which may be nested."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, list, tuple)):
        return None
    return next((t for t in map(_first_tensor, values) if t is not None), None)


def _first_outputs(
    check: Check, parts: Mapping[str, str], batch: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs at initialisation, and the loss gradient at the logits, by module name."""
    logits = [name for name, part in parts.items() if part == "logits"]
    check.model.eval()  # no dropout: outputs are compared between steps
    with (
        recording(check.model, list(parts), lambda t: t.detach().clone()) as outputs,
        recording(check.model, logits, _keep_gradient) as live,
    ):
        torch.autograd.backward(check.loss(check.model, batch))
    if not outputs:
        raise CheckError("no planned module was called; does loss(model, batch) call the model?")
    if len(logits) == 1 and logits[0] not in outputs:
        raise CheckError(
            f"module {logits[0]!r} was never called, so the logits cannot be measured; give a "
            "loss(model, batch) that calls it, not one that fuses readout and cross-entropy"
        )
    grads = {name: [tensor.grad for tensor in tensors] for name, tensors in live.items()}
    gradient = {
        name: _rows([grad for grad in of_calls if grad is not None])
        for name, of_calls in grads.items()
        if all(grad is not None for grad in of_calls)
    }
    check.model.zero_grad()
    return {name: _rows(outputs[name]) for name in parts if name in outputs}, gradient


def _keep_gradient(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor.retain_grad()
    return tensor


@torch.no_grad()
def _outputs(check: Check, first: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
    """The outputs now, which must be those of the same calls as at first."""
    check.model.eval()
    with recording(check.model, list(first), lambda t: t.clone()) as outputs:
        check.loss(check.model, batch)
    now = {name: _rows(tensors) for name, tensors in outputs.items()}
    for name, before in first.items():
        if name not in now or now[name].shape != before.shape:
            raise CheckError(
                f"module {name!r} was called otherwise than at first on the same batch; the check "
                "needs a forward pass that does not depend on the step"
            )
    return now


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """All calls of a module as rows of one float32 matrix, features last."""
    return torch.cat([t.detach().float().reshape(-1, t.shape[-1]) for t in tensors])


def _rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def rms_along(change: Tensor, gradient: Tensor) -> float:
    """RMS over positions of the change's component along the gradient; both (positions, V).

    Positions without a gradient are left out.
    """
    norm = gradient.norm(dim=-1)
    along = (change * gradient).sum(-1)[norm > 0] / norm[norm > 0]
    return float(along.square().mean().sqrt())
