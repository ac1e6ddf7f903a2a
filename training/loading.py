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
    settings, world = task.config.training, accelerator.num_processes
    micro_batches, micro_batch = settings.split(world)
    steps = range(first_step, settings.steps)
    ids = task.batch_ids(micro_batch, accelerator.process_index, world, steps)
    return batches(loader(task, accelerator, task.train_data, task.collate, ids)), micro_batches


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
