"""One training loop on accelerate: step, evaluate, log, stop; every experiment uses it.

An experiment hands over a `Task`: its model, plan, data and loss. The loop owns everything that
must be the same for all: the loss normalised by the global number of targets, rates and decays as
planned times one schedule factor, data order from (seed, step), divergence as a result, and files
that are whole or absent.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from param_groups import Plan
from training import environment, optimizers, processes, schedules
from training.config import RunConfig
from training.errors import UserError
from training.files import write_json, write_text
from training.sampling import BatchIds, eval_ids

Progress = Callable[[int, int, float], None]


@dataclass
class Task:
    """What an experiment gives the loop.

    `loss(model, batch)` is the summed loss of a batch in nats, `count(batch)` the number of
    targets it sums over (a tensor on the CPU). `collate` turns fetched samples into a batch;
    batches are tensors or nested tuples of them.
    """

    config: RunConfig
    model: nn.Module
    plan: Plan
    train_data: Dataset
    eval_data: Dataset
    loss: Callable[[nn.Module, Any], torch.Tensor]
    count: Callable[[Any], torch.Tensor]
    collate: Callable[[Any], Any] | None = None


@dataclass
class Diverged(Exception):
    """The loss of a step was NaN or past the bound; caught by the loop, a result like any other."""

    step: int
    loss: float


@dataclass
class Losses:
    """Per-step losses kept on the device until they are logged."""

    sums: list[torch.Tensor] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)
    first: float | None = None
    last: float = math.nan
    targets: int = 0

    def add(self, loss_sum: torch.Tensor, count: torch.Tensor) -> None:
        """Keeps one step: this process's loss sum and the global number of targets."""
        self.sums.append(loss_sum)
        self.counts.append(count)

    def drain(self, accelerator: Accelerator, step: int, bound: float) -> float:
        """The mean loss per target since the last call; `step` is the last step kept.

        Raises Diverged for the first step whose loss is not finite or above `bound` times the
        run's first loss.
        """
        sums = accelerator.reduce(torch.stack(self.sums), reduction="sum")
        counts = torch.stack(self.counts)
        steps = (sums / counts).tolist()
        self.last = (sums.sum() / counts.sum()).item()
        self.targets += int(counts.sum())
        self.first = steps[0] if self.first is None else self.first
        self.sums.clear()
        self.counts.clear()
        for index, loss in enumerate(steps, start=step - len(steps) + 1):
            if not math.isfinite(loss) or loss > bound * self.first:
                raise Diverged(index, loss)
        return self.last


class Loop:
    """The state of one run while it trains."""

    def __init__(self, task: Task, run_dir: Path, progress: Progress | None = None) -> None:
        self.task, self.run_dir, self.progress = task, run_dir, progress
        self.settings = task.config.training
        # accelerate keeps its state per process; runs of one worker may differ in precision.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            cpu=processes.ON_CPU,
            mixed_precision="bf16" if self.settings.precision == "bf16" else "no",
            dynamo_backend="inductor" if self.settings.compile else "no",
        )
        task.model.to(self.accelerator.device)
        task.plan.initialise(task.model, task.config.seed)
        self.optimizer = build_optimizer(task)
        self.model, self.optimizer = self.accelerator.prepare(task.model, self.optimizer)
        self.losses = Losses()
        self.evals: list[tuple[int, float]] = []
        self.eval_seconds = 0.0

    def run(self) -> dict[str, Any]:
        """Trains to the end or to divergence and returns the summary."""
        started = time.perf_counter()
        if self.accelerator.is_main_process:
            write_text(self._log_file, "")
        status: dict[str, Any] = {"status": "finished", "step": self.settings.steps}
        try:
            self._train()
        except Diverged as diverged:
            status = {"status": "diverged", "step": diverged.step}
            self._write({"step": diverged.step, "diverged": _finite(diverged.loss)})
        return self._summary(status, time.perf_counter() - started)

    def _train(self) -> None:
        settings = self.settings
        batches = iter(self._train_loader())
        for step in range(1, settings.steps + 1):
            last = step == settings.steps
            logged = last or step == 1 or step % settings.log_every == 0
            norm = self._step(step, batches, logged)
            if logged:
                self._log_step(step, norm)
            if last or (settings.eval_every and step % settings.eval_every == 0):
                self._evaluate(step)

    def _step(self, step: int, batches: Iterator[Any], want_norm: bool) -> torch.Tensor | None:
        """One optimiser step over this process's micro-batches; the gradient norm if wanted."""
        accelerator, world = self.accelerator, self.accelerator.num_processes
        micro = [next(batches) for _ in range(self._micro_batches)]
        local = torch.stack([self.task.count(batch) for batch in micro]).sum()
        count = accelerator.reduce(local.to(accelerator.device), reduction="sum")
        schedules.set_lr(self.optimizer, self.factor(step - 1))
        total = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(micro, start=1):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            more = index < len(micro)
            with accelerator.no_sync(self.model) if more else contextlib.nullcontext():
                loss_sum = self.task.loss(self.model, batch)
                # DDP averages over processes; the loss is a mean over the targets of all of them.
                accelerator.backward(loss_sum * (world / count))
            total += loss_sum.detach()
        norm = self._clip(want_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.add(total, count)
        return norm

    def _clip(self, want_norm: bool) -> torch.Tensor | None:
        clip = self.task.config.optimizer.clip_norm
        parameters = list(self.model.parameters())
        if clip is not None:
            return self.accelerator.clip_grad_norm_(parameters, clip)
        if want_norm:
            gradients = [p.grad for p in parameters if p.grad is not None]
            return torch.nn.utils.get_total_norm(gradients)
        return None

    def factor(self, taken: int) -> float:
        """The schedule's factor for the step after `taken` steps."""
        schedule = self.task.config.schedule
        return schedules.factor(
            schedule.name,
            taken,
            warmup_steps=schedule.warmup_steps,
            total_steps=self.settings.steps,
            floor=schedule.floor,
        )

    def _log_step(self, step: int, norm: torch.Tensor | None) -> None:
        loss = self.losses.drain(self.accelerator, step, self.settings.divergence_factor)
        gradient = None if norm is None else float(norm)
        line = {"step": step, "train_loss": loss, "lr_factor": self.factor(step - 1)}
        self._write({**line, "gradient_norm": gradient})
        if self.progress is not None and self.accelerator.is_main_process:
            self.progress(step, self.settings.steps, loss)

    def _evaluate(self, step: int) -> None:
        started = time.perf_counter()
        loss = self.evaluate()
        self.eval_seconds += time.perf_counter() - started
        if not math.isfinite(loss):
            raise Diverged(step, loss)
        self.evals.append((step, loss))
        self._write({"step": step, "eval_loss": loss})

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss per target over the evaluation samples, each counted once in all processes."""
        accelerator, task, settings = self.accelerator, self.task, self.settings
        size = min(len(task.eval_data), settings.eval_samples or len(task.eval_data))
        own = eval_ids(size, accelerator.process_index, accelerator.num_processes)
        loader = self._loader(Subset(task.eval_data, own), batch_size=settings.eval_batch_size)
        total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        self.model.eval()
        for batch in loader:
            count = task.count(batch).to(accelerator.device)
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            total += torch.stack([task.loss(self.model, batch), count]).double()
        self.model.train()
        loss_sum, count = accelerator.reduce(total, reduction="sum").tolist()
        return loss_sum / count

    @property
    def _micro_batches(self) -> int:
        share = self.settings.batch_size // self.accelerator.num_processes
        return math.ceil(share / (self.settings.micro_batch_size or share))

    def _train_loader(self) -> DataLoader:
        settings, accelerator = self.settings, self.accelerator
        share = settings.batch_size // accelerator.num_processes
        ids = BatchIds(
            size=len(self.task.train_data),
            seed=self.task.config.seed,
            global_batch=settings.batch_size,
            micro_batch=settings.micro_batch_size or max(share, 1),
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            first_step=0,
            last_step=settings.steps,
        )
        return self._loader(self.task.train_data, batch_sampler=ids)

    def _loader(self, data: Dataset, **batching: Any) -> DataLoader:
        return DataLoader(
            data,
            collate_fn=self.task.collate,
            num_workers=self.settings.data_workers,
            pin_memory=self.accelerator.device.type == "cuda",
            **batching,
        )

    @property
    def _log_file(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def _write(self, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with open(self._log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _parameters_by_role(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for row in self.task.plan.rows:
            counts[row.role] += math.prod(row.shape)
        return dict(counts)

    def _summary(self, status: dict[str, Any], wall: float) -> dict[str, Any]:
        best = min(self.evals, key=lambda entry: entry[1], default=(None, None))
        finished = status["status"] == "finished"
        summary = {
            **status,
            "steps": self.settings.steps,
            "final_eval_loss": self.evals[-1][1] if finished else None,
            "best_eval_loss": best[1],
            "best_eval_step": best[0],
            "first_train_loss": _finite(self.losses.first),
            "final_train_loss": _finite(self.losses.last),
            "targets": self.losses.targets,
            "targets_per_second": self.losses.targets / (wall - self.eval_seconds),
            "wall_seconds": wall,
            "train_seconds": wall - self.eval_seconds,
            "eval_seconds": self.eval_seconds,
            "parameters": sum(parameter.numel() for parameter in self.task.model.parameters()),
            "parameters_by_role": self._parameters_by_role(),
            "environment": environment.describe(self.accelerator.device),
        }
        if self.accelerator.is_main_process:
            write_json(self.run_dir / "summary.json", summary)
        return summary


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def build_optimizer(task: Task) -> torch.optim.Optimizer:
    """The configured optimiser over the plan's groups; prints nothing, changes no number."""
    settings = task.config.optimizer
    return optimizers.build(
        settings.name,
        task.plan.groups(task.model),
        betas=(settings.beta1, settings.beta2),
        momentum=settings.momentum,
        atan2_lambda=settings.atan2_lambda,
    )


def train(task: Task, run_dir: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Runs a task into `run_dir` and returns its summary; see `training.runs` for the folder."""
    world = processes.state().num_processes
    if task.config.training.batch_size % world:
        raise UserError(
            f"training.batch_size {task.config.training.batch_size} does not divide by "
            f"{world} processes; change one of them"
        )
    return Loop(task, run_dir, progress).run()
