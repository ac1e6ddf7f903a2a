"""What an experiment gives the loop, and what may look at a run while it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import default_collate

from param_groups import Plan
from training.data.sampling import BatchIds, EpochPlaces
from training.log import Log, finite
from training.optim import optimizers
from training.settings import RunConfig

Batch = TypeVar("Batch")
"""A tensor, or nested tuples of them, as the experiment's `collate` makes it."""
Loss = Callable[[nn.Module, Batch], Tensor]
Progress = Callable[[int, int, float | None], None]
"""Called after every step, with all steps of the run and, at logged ones, the training loss."""


class Samples(Protocol):
    """A map-style data set, by number or by `sampling.Place`, of samples that `collate` knows."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: Any, /) -> Any: ...


@dataclass
class Task(Generic[Batch]):
    """What an experiment gives the loop.

    The loop gives the model its values, so that its parameters may be on meta: a model that is to
    be sharded then takes no memory before it is. `after_init(model)` may change what the plan drew,
    such as the row of a padding token; the tensors of a sharded model are reached through
    `training.sharding.local`.

    `loss(model, batch)` is the summed loss of a batch in nats, `count(batch)` the number of
    targets it sums over (a tensor on the CPU). `collate` turns fetched samples into a batch;
    batches are tensors or nested tuples of them. `forward(model, batch)` calls every layer, for the
    probes; by default the loss does, but one that fuses the readout does not.

    Batches for evaluation may differ from those for training: `eval_collate` makes them. `measure`
    sums the loss and any other quantities over targets, by name; of these a higher mean is better.

    `recorders` look at the run while it trains. They see the first samples of `observe_data`, by
    default of `eval_data`, in batches as for evaluation. Text has its own where evaluation pads it:
    what a model makes of padding tells nothing about text.

    `data_checksum` names the data's content where that is known: a run does not resume on other
    data. With `by_epoch` samples are asked for by `Place`, and an epoch ends with its last whole
    batch; otherwise by number, and epochs follow each other without a gap.
    """

    config: RunConfig
    model: nn.Module
    plan: Plan
    train_data: Samples
    eval_data: Samples
    loss: Loss[Batch]
    count: Callable[[Batch], Tensor]
    collate: Callable[[list[Any]], Batch] | None = None
    forward: Loss[Batch] | None = None
    by_epoch: bool = False
    after_init: Callable[[nn.Module], None] | None = None
    eval_collate: Callable[[list[Any]], Batch] | None = None
    measure: Callable[[nn.Module, Batch], dict[str, Tensor]] | None = None
    recorders: Sequence[Recorder] = ()
    observe_data: Samples | None = None
    data_checksum: str | None = None

    @property
    def observed_data(self) -> Samples:
        """The samples that recorders see, from the first on."""
        return self.eval_data if self.observe_data is None else self.observe_data

    def batch_ids(self, micro_batch: int, rank: int, world_size: int, steps: range) -> BatchIds:
        """The training samples that a process sees in some steps; see `BatchIds`."""
        order = EpochPlaces if self.by_epoch else BatchIds
        return order(
            size=len(self.train_data),
            seed=self.config.order_seed,
            global_batch=self.config.training.batch_size,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            first_step=steps.start,
            last_step=steps.stop,
        )

    def eval_batch(self, samples: list[Any]) -> Batch:
        """Fetched samples as one batch for evaluation, on the CPU."""
        return (self.eval_collate or self.collate or default_collate)(samples)


@dataclass(frozen=True)
class LiveRun:
    """What a recorder may look at of a run that trains."""

    task: Task
    folder: Path
    optimizer: torch.optim.Optimizer
    device: torch.device
    is_main: bool
    """Whether this process writes; the others compute the same numbers, or none."""
    is_sharded: bool
    """Whether no process holds a whole tensor."""
    aside: Callable[[], AbstractContextManager[None]]
    """A context whose time counts as observing, not as training."""


class Recorder(Protocol):
    """Looks at a run while it trains and writes what it sees; it may not change the run.

    This is the only way from the loop to measurement. The order is start, then at every step
    around and after. A skipped step has no `around`, or on a GPU one around an update that changes
    nothing: only the device knows of it yet.
    """

    def start(self, run: LiveRun) -> Sequence[Log]:
        """The logs it will write, which a resumed run cuts back to its checkpoint.

        Called once, before the first step. Raises UserError if it cannot work in this run.
        """

    def around(self, step: int) -> AbstractContextManager[None]:
        """Entered right before the optimiser's step and left right after, gradients in place."""

    def after(self, step: int) -> None:
        """Called when a step is logged and not yet saved, and with 0 before the first step.

        A resumed run therefore never sees a step twice.
        """


@dataclass
class Diverged(Exception):
    """The loss of a step was NaN or past the bound; caught by the loop, a result like any other."""

    step: int
    loss: float


@dataclass
class Stopped(Exception):
    """The run was asked to stop and has saved what it needs to resume; caught by the loop."""

    step: int


@dataclass
class Losses:
    """Per-step losses kept on the device until they are logged."""

    sums: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    overflows: list[Tensor] = field(default_factory=list)
    first: float | None = None
    last: float = math.nan
    targets: int = 0

    def add(self, loss_sum: Tensor, count: int, overflow: Tensor | None = None) -> None:
        """Keeps one step: this process's loss sum, the global number of targets and, where the
        device decides whether the step is skipped, 1 if it is and 0 if not."""
        self.sums.append(loss_sum)
        self.counts.append(count)
        if overflow is not None:
            self.overflows.append(overflow)

    def settle(self, step: int) -> list[tuple[int, bool]]:
        """The steps before `step` that the device decides on, and whether it has skipped them.

        What is kept of a skipped step becomes nothing: no loss, no targets.
        """
        if not self.overflows:
            return []
        told = [bool(overflow) for overflow in torch.stack(self.overflows).tolist()]
        self.overflows.clear()
        for index, overflow in enumerate(told, start=len(self.sums) - len(told)):
            if overflow:
                self.sums[index], self.counts[index] = torch.zeros_like(self.sums[index]), 0
        return list(enumerate(told, start=step - len(told)))

    def drain(self, accelerator: Accelerator, step: int, bound: float) -> float:
        """The mean loss per target since the last call; `step` is the last step kept.

        Raises Diverged for the first step whose loss is not finite or above `bound` times the
        run's first loss.
        """
        sums = accelerator.reduce(torch.stack(self.sums), reduction="sum").cpu()
        counts = torch.tensor(self.counts)
        numbers = range(step - len(sums) + 1, step + 1)
        means = zip(numbers, (sums / counts).tolist(), counts.tolist(), strict=True)
        steps = {index: loss for index, loss, count in means if count}  # a skipped step has none
        if steps:
            self.last = (sums.sum() / counts.sum()).item()
            self.targets += int(counts.sum())
            self.first = next(iter(steps.values())) if self.first is None else self.first
        self.sums.clear()
        self.counts.clear()
        for index, loss in steps.items():
            if not math.isfinite(loss) or (self.first is not None and loss > bound * self.first):
                raise Diverged(index, loss)
        return self.last

    def state(self, accelerator: Accelerator) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint keeps: the numbers so far, and the steps not logged yet, summed over
        the processes."""
        numbers = {"first": self.first, "last": finite(self.last), "targets": self.targets}
        if not self.sums:
            return numbers, {}
        sums = accelerator.reduce(torch.stack(self.sums), reduction="sum")
        pending = {"sums": sums, "counts": torch.tensor(self.counts)}
        if self.overflows:
            pending["overflows"] = torch.stack(self.overflows)
        return numbers, pending

    def restore(
        self, numbers: dict[str, Any], tensors: dict[str, Tensor], accelerator: Accelerator
    ) -> None:
        """The inverse of `state`; the main process holds the sums of all."""
        self.first, self.targets = numbers["first"], numbers["targets"]
        self.last = math.nan if numbers["last"] is None else numbers["last"]
        if tensors:
            sums = tensors["sums"].clone().to(accelerator.device)
            self.sums = list(sums if accelerator.is_main_process else torch.zeros_like(sums))
            self.counts = tensors["counts"].tolist()
            overflows = tensors.get("overflows", torch.empty(0))
            self.overflows = list(overflows.clone().to(accelerator.device))


def initialise(task: Task) -> None:
    """Gives the model the values it starts from."""
    task.plan.initialise(task.model, task.config.seed, overwrite=True)
    if task.after_init is not None:
        task.after_init(task.model)


def first_batches(task: Task[Batch], steps: int) -> Iterator[Batch]:
    """The first batches of a run, whole, as one process would see them."""
    ids = task.batch_ids(task.config.training.batch_size, 0, 1, range(steps))
    data, collate = task.train_data, task.collate or default_collate
    return (collate([data[place] for place in batch]) for batch in ids)


def build_optimizer(task: Task) -> torch.optim.Optimizer:
    """The configured optimiser over the plan's groups; prints nothing, changes no number."""
    settings = task.config.optimizer
    numbers: dict[str, Any] = {
        "betas": (settings.beta1, settings.beta2),
        "momentum": settings.momentum,
        "atan2_lambda": settings.atan2_lambda,
    }
    if settings.min_dim_factored is not None:
        numbers["min_dim_factored"] = settings.min_dim_factored
    return optimizers.build(
        settings.name, task.plan.groups(task.model, several=settings.name == "muon"), **numbers
    )
