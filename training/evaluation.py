"""Means over the evaluation samples, each counted once in all processes."""

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from training import loading, sharding
from training.errors import UserError
from training.task import Task

PLACEHOLDER = [0]  # the ids of a batch whose result does not count; recognised with `is`


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    accelerator: Accelerator,
    is_sharded: bool,
    stopping: Callable[[], bool],
) -> tuple[dict[str, float], int] | None:
    """Means per target by name, and the number of targets, the same in all processes.

    `model` is the task's as accelerate has wrapped it. None if `stopping`, which all processes
    answer alike, became true on the way. Raises UserError when no sample could be read.
    """
    settings, world = task.config.training, accelerator.num_processes
    size = min(len(task.eval_data), settings.eval_samples or len(task.eval_data))
    # Every world-th sample: each is seen once, and lower ranks may have one more.
    own, batch_size = range(accelerator.process_index, size, world), settings.eval_batch_size
    batches = [list(own[first : first + batch_size]) for first in range(0, len(own), batch_size)]
    # All processes take part in each forward pass of a sharded model, and in each question whether
    # to stop: those that have no samples left take placeholders.
    most = math.ceil(len(range(0, size, world)) / batch_size)
    batches += [PLACEHOLDER] * (most - len(batches))
    loader = loading.loader(task, accelerator, task.eval_data, task.eval_batch, batches)
    measure = task.measure or (lambda model, batch: {"loss": task.loss(model, batch)})
    names, sums, stopped = ["loss"], [], False
    model.eval()
    for batch, ids in zip(loading.batches(loader), batches, strict=True):
        if stopped := stopping():
            break
        count = task.count(batch)
        measured = measure(model, send_to_device(batch, accelerator.device, non_blocking=True))
        names = list(measured)
        if ids is not PLACEHOLDER:
            sums.append([*measured.values(), count])
    model.train()
    if is_sharded:
        sharding.reshard(model)
    if stopped:
        return None
    device = accelerator.device
    total = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
    for row in sums:
        total += torch.stack([value.to(device).double() for value in row])
    *values, count = accelerator.reduce(total, reduction="sum").tolist()
    if count == 0:
        raise UserError("no evaluation sample could be read; see the messages above")
    return {name: value / count for name, value in zip(names, values, strict=True)}, int(count)
