"""summary.json: a run's outcome, its cost, and the environment it ran in."""

import math
from collections import Counter
from typing import Any

import torch

from training import environment
from training.log import History, finite
from training.runs import Summary
from training.task import Losses, Task


def of(
    status: dict[str, Any],
    task: Task,
    losses: Losses,
    history: History,
    precision: str,
    device: torch.device,
) -> Summary:
    """The summary of a run that ends with this status and step."""
    wall = history.seconds()
    training = wall - history.eval_seconds - history.observe_seconds
    by_role: Counter[str] = Counter()
    for row in task.plan.rows:
        by_role[row.role] += math.prod(row.shape)
    return {
        **status,
        "steps": task.config.training.steps,
        **history.measured(status["status"] == "finished"),
        "first_train_loss": finite(losses.first),
        "final_train_loss": finite(losses.last),
        "eval_targets": history.eval_targets,
        "targets": losses.targets,
        "targets_per_second": losses.targets / training,
        "wall_seconds": wall,
        "train_seconds": training,
        "eval_seconds": history.eval_seconds,
        "observe_seconds": history.observe_seconds,
        "skipped_steps": history.skipped,
        "resumed_from": history.resumed_from,
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "parameters_by_role": dict(by_role),
        "precision": precision,
        "data_checksum": task.data_checksum,
        "environment": environment.describe(device),
    }
