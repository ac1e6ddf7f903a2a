"""What the coordinate check measures: how large outputs, their changes and updates are.

A model is trained for a few steps at several widths and seeds. The check records the RMS of

* init: every module's output at initialisation, on the batch of the first step, and its input.
  Logits under `Tied` have a second row, each position's logit of the token that it embeds: a factor
  that is too large shows there, and one that is too small in the RMS over all of them;
* gradient: the loss's gradient at its output, then. It shows what the model makes of the output:
  a factor behind a readout or a branch, which the output itself does not have, is in it;
* change: what the steps add up to, output after t steps minus output at first. The logits have a
  second row, their change along the gradient of the loss: a softmax over V tokens pushes about one
  logit of V in a common direction, so the RMS over all of them shows the growth of that one only at
  widths far beyond V;
* update: every tensor's change; of a matrix that Muon trains the spectral norm, which is the rate
  whether the batch has fewer directions than the width or more.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from param_groups.check.reading import Reading, read
from param_groups.check.recording import (
    keep_gradient,
    recording,
    rms_along,
    rms_of,
    rows,
    spectral_norm,
    square,
)
from param_groups.optim import MuonAdamW
from param_groups.plan import Plan
from param_groups.roles import OUT, PlanError, Role
from param_groups.rows import Row

WIDTHS, STEPS, SEEDS = (64, 128, 256, 512), 4, 3
ALONG, INPUT, OWN = " along the loss gradient", " input", " of the position's token"


@dataclass
class Check:
    """A model at one width, ready to train; what `task(width, seed)` of your own file returns.

    Args:
        model: unwrapped and uncompiled.
        plan: its plan, which the check initialises it with. In a file it may be a function of the
            rules that a trace of the models at the two smallest widths reads: plan(rules). None is
            for an optimizer alone over the model's own initial values, which `transfer` trains.
        batches: step t trains on batches[t], again from the first when they run out; all outputs
            are compared on batches[0].
        loss: loss(model, batch), the mean loss of a batch, a scalar.
        optimizer: over the model's tensors, whose rates, epsilons and decays are compared with the
            plan's; by default the prescription's, over the plan's groups, without decay.
        clip_norm: the largest gradient norm, none by default.
        after_init: after_init(model) may change what the plan drew.
    """

    model: nn.Module
    plan: Plan | None
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    after_init: Callable[[nn.Module], None] | None = None

    @property
    def planned(self) -> Plan:
        """The plan; PlanError without one."""
        if self.plan is None:
            raise PlanError(
                "the check has no plan: give Check(plan=...). Of an optimizer alone `param-groups "
                "audit` reads the powers, and `param-groups transfer` trains it"
            )
        return self.plan


Build = Callable[[int, int], Check]  # (width, seed) -> Check


def checked(check: object) -> Check:
    """What a task returns; PlanError for what is no check, and for one without batches."""
    if not isinstance(check, Check):
        raise PlanError(
            f"task(width, seed) returned {type(check).__name__}; expected a "
            "param_groups.check.Check"
        )
    if not len(check.batches):
        raise PlanError("the check has no batches; give Check(batches=[...]) at least one")
    return check


@dataclass(frozen=True)
class Coordinate:
    """One measured RMS.

    `quantity` is "init", "gradient", "change" or "update"; `name` is a tensor's for updates, else a
    module's. `part` is what the module's output is: "embedding", "hidden", "router" or "logits";
    "tensor" for updates.
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
    held: dict[int, dict[str, Reading]] = field(default_factory=dict)
    """What the check's own optimisers have for every tensor, by width."""
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
            prescription that has one, and nothing else, points are of the blocks at the relative
            depths that the shallowest model has, under its names.
        steps: optimiser steps.
        seeds: of initial values and data.
        device: where the models are trained.
        progress: gets a line for each run that is done.

    Returns:
        Points of the modules that own a planned tensor and of the blocks of a ModuleList or
        Sequential, taken by forward hooks without dropout; and the plan at every width.

    Raises:
        PlanError: too few widths, and models that cannot be compared.

    Source: Yang et al. 2022, App. D.1 (the coordinate check).
    """
    check_numbers(widths, steps, seeds)
    result = Measurement()
    runs = [(width, seed) for width in sorted(widths) for seed in seeds]
    for number, (width, seed) in enumerate(runs, start=1):
        check = checked(build(width, seed))
        result.plans[width] = check.planned
        _check_rows(result.plans)
        if check.optimizer is not None:
            result.held[width] = read(check.model, [check.optimizer], now=True)
        with torch.random.fork_rng():  # dropout, too, is a function of the seed
            torch.manual_seed(seed)
            points, result.silent = _measure_one(check, width, seed, steps, torch.device(device))
        result.points += points
        if progress is not None:
            progress(f"width {width} seed {seed} ({number} of {len(runs)})")
    _check_parts(result)
    return result


def _check_parts(result: Measurement) -> None:
    """PlanError unless the models of all widths have the same parts.

    Where the depth is the size, leaves the points of blocks at the same relative depths.
    """
    first, *rest = sorted(result.plans)
    if scanned(result.plans) == "depth":
        result.points = _at_equal_depths(result.points)
    parts: dict[int, dict[tuple[str, str], str]] = {}
    for point in result.points:
        parts.setdefault(point.width, {})[point.quantity, point.name] = point.part
    for width in rest:
        if odd := sorted(parts[first].items() ^ parts[width].items()):
            (_, name), _ = odd[0]
            raise PlanError(
                f"module {name!r} is in the model of width {first} or {width} only; widths can "
                "be compared only between models that are otherwise the same"
            )


def _check_rows(plans: Mapping[int, Plan]) -> None:
    """PlanError unless the plans of all sizes have the same roles, and shapes of their own."""
    first, *rest = plans
    for size in rest:
        one, other = ({row.name: row for row in plans[n].rows} for n in (first, size))
        for name in one.keys() & other.keys():
            if one[name].role != other[name].role:
                raise PlanError(
                    f"{name!r} is {one[name].role} at width {first} and {other[name].role} at "
                    f"{size}; plan all widths with one list of rules"
                )
            if len(one[name].shape) != len(other[name].shape):
                raise PlanError(f"{name!r} has other axes at width {first} than at {size}")
        if [row.shape for row in plans[first].rows] == [row.shape for row in plans[size].rows]:
            raise PlanError(
                f"widths {first} and {size} gave models of the same shapes; the function of a "
                "width must make a model of that width"
            )


def scanned(plans: Mapping[int, Plan]) -> str:
    """The size in which the plans differ: depth or head_dim where it is that alone, else width (to
    which a head dimension is in proportion)."""
    rules = [plan.prescription for plan in plans.values()]
    keys = ("head_dim", "heads", "depth", "width")
    differ = [key for key in keys if len({rule.get(key) for rule in rules}) > 1]
    if differ == ["depth"]:
        return "depth"
    return "head_dim" if differ in (["head_dim"], ["head_dim", "width"]) else "width"


def embeds(row: Row) -> bool:
    """Whether a tensor embeds what a model is given: tokens, positions, patches."""
    facts = Role(row.role).facts
    return (facts.kind, facts.axis) == ("embedding", OUT)


def pooled(name: str) -> str:
    """A name without the number of its block, the first one: blocks.0.mlp.2 -> blocks.*.mlp.2."""
    return _BLOCK.sub("*", name, count=1)


_BLOCK = re.compile(r"(?<=\.)\d+(?=\.|$|\s)")


def check_numbers(widths: Sequence[int], steps: int, seeds: Sequence[int]) -> None:
    """PlanError for numbers that no slope can be fitted to."""
    if len(set(widths)) < 3 or len(set(widths)) < len(widths) or min(widths) < 1:
        raise PlanError(
            f"widths {' '.join(map(str, widths))}: expected at least 3 different positive ones, "
            "for example 64 128 256 512"
        )
    if steps < 1 or len(seeds) < 1:
        raise PlanError(f"{steps} steps, {len(seeds)} seeds: expected at least 1 of each")


def _at_equal_depths(points: Sequence[Coordinate]) -> list[Coordinate]:
    """The points of the blocks that stand as deep, relative to the model, as those of the
    shallowest model, under its names; all that is in no block."""
    blocks: dict[tuple[str, int], int] = {}  # (what is before the number, size) -> how many
    for point in points:
        if found := _BLOCK.search(point.name):
            key = (point.name[: found.start()], point.width)
            blocks[key] = max(blocks.get(key, 0), int(found.group()) + 1)
    kept, shallowest = [], min(point.width for point in points)
    for point in points:
        found = _BLOCK.search(point.name)
        if found is None:
            kept.append(point)
            continue
        stack = point.name[: found.start()]
        few, many = blocks.get((stack, shallowest), 0), blocks[stack, point.width]
        # A block's output is the stream behind it; its modules read the stream before it (0) or
        # within it (1/2), so between these. In the first half of few blocks half a block is much:
        # there changes inside of blocks are not compared.
        whole = found.end() == len(point.name)
        at = 1.0 if whole else 0.25
        for block in range(few):
            alike = round((block + at) * many / few - at)
            late = whole or point.quantity != "change" or 2 * block + 1 >= few
            if int(found.group()) == alike and late:
                name = f"{stack}{block}{point.name[found.end() :]}"
                kept.append(replace(point, name=name))
    return kept


# One width and seed


def _measure_one(
    check: Check, width: int, seed: int, steps: int, device: torch.device
) -> tuple[list[Coordinate], tuple[str, ...]]:
    """The points of one width and seed, and the modules that were never called."""
    model = check.model.to(device)
    optimizer = begun(check, seed)
    batches = [tree_map_only(Tensor, lambda t: t.to(device), batch) for batch in check.batches]
    parts = watched(model, check.planned)
    rows_ = check.planned.rows if check.planned.prescription.get("tied") else ()
    tied = [row.name for row in rows_ if row.tied_to and row.role == Role.TOKEN_EMBEDDING]
    tables = [name.rpartition(".")[0] for name in tied]  # which `Tied` makes the readout, too
    with recording(model, tables, lambda t: t, inputs=True, of_reals=False) as embedded:
        first, inputs, gradients = _first_outputs(check, parts, batches[0])
    ids = [one for calls in embedded.values() for one in calls]
    along = {name: g for name, g in gradients.items() if parts.get(name) == "logits"}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    by_muon = {row.name: row.layout for row in check.planned.rows if row.optimizer == "muon"}
    points: list[Coordinate] = []

    def keep(quantity: str, name: str, part: str, step: int, rms: float) -> None:
        points.append(Coordinate(quantity, name, part, step, width, seed, rms))

    for name, output in first.items():
        keep("init", name, parts[name], 0, rms_of(output))
        alike = [one for one in ids if parts[name] == "logits" and one.numel() == len(output)]
        if alike:
            keep("init", name + OWN, "logits", 0, rms_of(output.gather(1, alike[-1].view(-1, 1))))
    for name, size in inputs.items():
        keep("init", name + INPUT, "hidden", 0, size)
    # Below a readout that starts at zero there is a gradient after the first step.
    late = any(g.any() for g in along.values()) and not any(
        g.any() for name, g in gradients.items() if name not in along
    )
    for name, gradient in gradients.items():
        if not late or name in along:
            keep("gradient", name, parts.get(name, "embedding"), 0, rms_of(gradient))
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
            keep("change", name, parts[name], step, rms_of(now[name] - first[name]))
        for name, direction in along.items():
            size = rms_along(now[name] - first[name], direction)
            keep("change", name + ALONG, "logits", step, size)
        for name, parameter in model.named_parameters():
            moved = parameter.detach() - start[name]
            if moved.ndim > 2 and name in by_muon:  # experts above one another, or one kernel
                stacked = by_muon[name].startswith("experts")
                moved = moved.flatten(0, -2) if stacked else moved.flatten(1)
            by = spectral_norm(moved) if name in by_muon else rms_of(moved)
            keep("update", name, "tensor", step, by)
        if late and step == 1:
            for name, gradient in _first_outputs(check, parts, batches[0])[2].items():
                if name not in along:
                    keep("gradient", name, parts.get(name, "embedding"), 1, rms_of(gradient))
    return points, tuple(name for name in parts if name not in first)


def begun(check: Check, seed: int, *, decays: bool = False) -> torch.optim.Optimizer:
    """Draws the model as its plan says, if it has one; the check's own optimiser, or torch's update
    rule of the plan's prescription (Adam where it names none). Both without decay unless it
    `decays`: the check judges decay as a number, since it moves a tensor by a share of itself,
    whatever its rate."""
    if check.plan is not None:
        check.plan.initialise(check.model, seed, overwrite=True)
    if check.after_init is not None:
        check.after_init(check.model)
    optimizer = check.optimizer
    if optimizer is None:
        name = str(check.planned.prescription.get("optimizer", "adam"))
        kinds = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD, "muon": MuonAdamW}
        if name not in kinds:
            raise PlanError(
                f"torch has no {name} with an epsilon per group; give Check(optimizer=...) one "
                "that is built over plan.groups(model)"
            )
        # What `after_init` changes is meant, and would be refused as another plan's values.
        as_drawn = check.after_init is None
        groups = check.planned.groups(check.model, check=as_drawn, several=name == "muon")
        optimizer = kinds[name](groups)
    for group in optimizer.param_groups if not decays else ():
        group["weight_decay"] = 0.0
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for name, parameter in check.model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:  # it could not move
            raise PlanError(
                f"the optimizer does not hold {name!r}; build it over all tensors of the check's "
                "model, as plan.groups(model) has them, or freeze what is not to be trained"
            )
    return optimizer


def watched(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Module name -> part ("embedding", "hidden", "router", "logits") of all that is measured.

    A word embedding that is also the readout counts as logits under its second name.
    """
    parts: dict[str, str] = {}
    for row in plan.rows:
        for name in (row.name, *row.tied_to):
            module = name.rpartition(".")[0]
            # Not the whole model, whose output is the loss or the logits again. Of a layer's
            # tensors a bias says less than the matrix.
            if module and parts.get(module) not in ("logits", "embedding", "router"):
                tied = row.role == Role.TOKEN_EMBEDDING and name != row.name
                logits = tied or row.role in (Role.READOUT, Role.READOUT_BIAS)
                part = "embedding" if embeds(row) else "hidden"
                part = "router" if row.role == Role.ROUTER else part
                parts[module] = "logits" if logits else part
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        block = isinstance(parent, (nn.ModuleList, nn.Sequential)) and module is not model
        if block and name not in parts and any(True for _ in module.parameters()):
            parts[name] = "hidden"
    return {name: parts[name] for name, _ in model.named_modules() if name in parts}


# Outputs


def _first_outputs(
    check: Check, parts: Mapping[str, str], batch: Any
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
    """Of modules by name: the outputs on a batch, the RMS of the inputs, and the loss's gradients
    at the outputs. The last two are of modules that own a planned tensor."""
    logits = [name for name, part in parts.items() if part == "logits"]
    owners = {n.rpartition(".")[0] for row in check.planned.rows for n in (row.name, *row.tied_to)}
    planned = [name for name in parts if name in owners]
    read = [name for name in planned if parts[name] != "embedding"]
    check.model.eval()  # no dropout: outputs are compared between steps
    with (
        recording(check.model, list(parts), lambda t: t.detach().clone()) as outputs,
        recording(check.model, read, square, inputs=True) as squares,
        recording(check.model, planned, keep_gradient) as live,
    ):
        torch.autograd.backward(check.loss(check.model, batch))
    if not outputs:
        raise PlanError("no planned module was called; does loss(model, batch) call the model?")
    if len(logits) == 1 and logits[0] not in outputs:
        raise PlanError(
            f"module {logits[0]!r} was never called, so the logits cannot be measured; give a "
            "loss(model, batch) that calls it, not one that fuses readout and cross-entropy"
        )
    grads = {name: [tensor.grad for tensor in tensors] for name, tensors in live.items()}
    gradient = {
        name: rows([grad for grad in of_calls if grad is not None])
        for name, of_calls in grads.items()
        if all(grad is not None for grad in of_calls)
    }
    for row in check.planned.rows:  # an embedding whose tensor is added, and no module called
        module, tensor = row.name.rpartition(".")[0], check.model.get_parameter(row.name)
        if embeds(row) and module not in outputs and tensor.grad is not None:
            gradient[row.name] = rows([tensor.grad])
    check.model.zero_grad()
    sizes = {name: float(torch.stack(calls).mean().sqrt()) for name, calls in squares.items()}
    return {name: rows(outputs[name]) for name in parts if name in outputs}, sizes, gradient


@torch.no_grad()
def _outputs(check: Check, first: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
    """The outputs now, which must be those of the same calls as at first."""
    check.model.eval()
    with recording(check.model, list(first), lambda t: t.clone()) as outputs:
        check.loss(check.model, batch)
    now = {name: rows(tensors) for name, tensors in outputs.items()}
    for name, before in first.items():
        if name not in now or now[name].shape != before.shape:
            raise PlanError(
                f"module {name!r} was called otherwise than at first on the same batch; the check "
                "needs a forward pass that does not depend on the step: give experts that get some "
                "of the tokens all of them (as many chosen as there are)"
            )
    return now
