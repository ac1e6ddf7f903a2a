"""Batches of a run, from data-loading processes that end with it."""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from training import signals
from training.data.sampling import BatchIds, EpochPlaces
from training.errors import UserError
from training.task import Batch, Samples, Task

Item = TypeVar("Item")


def loader(
    task: Task[Batch],
    accelerator: Accelerator,
    data: Samples,
    collate: Callable[[list[Any]], Batch] | None,
    batches: Iterable[list[Any]],
) -> DataLoader[Batch]:
    """A DataLoader as the config asks for it, of the samples that `batches` lists."""
    return DataLoader(
        cast("Dataset[Any]", data),
        collate_fn=collate,
        num_workers=task.config.training.data_workers,
        pin_memory=accelerator.device.type == "cuda",
        worker_init_fn=signals.follow_parent,
        # Without its own generator, making a loader would draw from the run's generator.
        generator=torch.Generator().manual_seed(task.config.seed % 2**63),
        batch_sampler=batches,
    )


def train_batches(
    task: Task[Batch], accelerator: Accelerator, first_step: int
) -> tuple[Iterator[Batch], int]:
    """This process's micro-batches of every step after the first `first_step`; their number in a
    step."""
    settings, data = task.config.training, task.train_data
    micro_batches, micro_batch = settings.split(accelerator.num_processes)
    order = EpochPlaces if task.by_epoch else BatchIds
    ids = order(
        size=len(data),
        seed=task.config.order_seed,
        global_batch=settings.batch_size,
        micro_batch=micro_batch,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        first_step=first_step,
        last_step=settings.steps,
    )
    return batches(loader(task, accelerator, data, task.collate, ids)), micro_batches


def batches(loader: Iterable[Item]) -> Iterator[Item]:
    """The batches of a DataLoader; a UserError in one of its processes keeps its own words.

    torch raises another one, with the process's traceback for a message.
    """
    iterator = iter(loader)
    # Registered again, so that it runs before torch's exit handler, which waits for each process.
    atexit.unregister(_kill_children)
    atexit.register(_kill_children)
    try:
        yield from iterator
        return
    except UserError as caught:
        kind, text = type(caught), str(caught)
        before, frame, words = text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
        error = kind(words.strip() if frame and before.startswith("Caught ") else text)
        caught.__traceback__ = None
    # Now nothing refers to the iterator any more, and its processes end.
    del iterator
    raise error


def _kill_children() -> None:
    """Kills data-loading processes at exit, as they ignore SIGTERM.

    Some are left when an error ends the run: its traceback keeps their iterator alive.
    """
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if children:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report their end
    for child in children:
        child.kill()
