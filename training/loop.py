"""The training loop of every experiment, on accelerate: step, log, probe, observe, evaluate, save.

An experiment hands over a `Task`: its model, plan, data and loss. The loop owns everything that
must be the same for all: the loss normalised by the global number of targets, rates and decays as
planned times one schedule factor, data order from (seed, step), divergence as a result, and a run
that goes on where it was stopped, however it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    gather_object,
    send_to_device,
    set_seed,
)
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from measure import observations
from measure.probes import Probes
from param_groups import Plan
from sweeps.confirm import lower_is_better
from training import (
    checkpoint,
    environment,
    loading,
    optimizers,
    processes,
    runs,
    schedules,
    sharding,
    signals,
    state,
)
from training.checkpoint import Checkpoint, Damaged
from training.config import ObservedLoopConfig, RunConfig
from training.errors import RunError, UserError
from training.files import write_json, write_text
from training.metrics import Log
from training.sampling import BatchIds, EpochPlaces, eval_ids, steps_per_epoch

Progress = Callable[[int, int, float], None]

SKIPS = 100  # steps in a row without a finite gradient are divergence
IDLE = (0,)  # the ids of a batch whose result does not count; told by identity


@dataclass
class Task:
    """What an experiment gives the loop.

    The loop gives the model its values, so that its parameters may be on meta: a model that is to
    be sharded then takes no memory before it is. `after_init(model)` may change what the plan drew,
    such as the row of a padding token; the tensors of a sharded model are reached through
    `training.sharding.local`.

    `loss(model, batch)` is the summed loss of a batch in nats, `count(batch)` the number of
    targets it sums over (a tensor on the CPU). `collate` turns fetched samples into a batch;
    batches are tensors or nested tuples of them. `forward(model, batch)` calls every layer, for the
    probes; by default the loss does, but one that fuses the readout does not.

    Batches for evaluation may differ from those for training: `eval_collate`, `eval_count` and
    `measure` are for them, by default the same as for training. `measure(model, batch)` sums the
    loss and any other quantities over targets, by name; of these a higher mean is better.

    Observations and probes see the first samples of `observe_data`, by default of `eval_data`, in
    batches as for evaluation. Text has one of its own where evaluation pads it: what a model makes
    of padding is no representation. Its `unit`, if any, says in messages what its samples are.

    `data_seed` orders the data in place of the config's seed, which then decides the initial values
    alone: runs of several seeds differ in these and in nothing else.

    With `by_epoch` samples are asked for by `Place`, and an epoch ends with its last whole batch;
    otherwise by number, and epochs follow each other without a gap.
    """

    config: RunConfig
    model: nn.Module
    plan: Plan
    train_data: Dataset
    eval_data: Dataset
    loss: Callable[[nn.Module, Any], torch.Tensor]
    count: Callable[[Any], torch.Tensor]
    collate: Callable[[Any], Any] | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    by_epoch: bool = False
    after_init: Callable[[nn.Module], None] | None = None
    eval_collate: Callable[[Any], Any] | None = None
    eval_count: Callable[[Any], torch.Tensor] | None = None
    measure: Callable[[nn.Module, Any], dict[str, torch.Tensor]] | None = None
    data_seed: int | None = None
    observe_data: Dataset | None = None

    @property
    def order_seed(self) -> int:
        """What the data's order follows from."""
        return self.config.seed if self.data_seed is None else self.data_seed


@dataclass
class Diverged(Exception):
    """The loss of a step was NaN or past the bound; caught by the loop, a result like any other."""

    step: int
    loss: float


@dataclass
class Stopped(Exception):
    """The run was asked to stop and has saved what it needs to go on; caught by the loop."""

    step: int


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
        taken = counts > 0  # a step that was skipped has none
        steps = dict(enumerate((sums / counts).tolist(), start=step - len(sums) + 1))
        steps = {index: loss for (index, loss), kept in zip(steps.items(), taken.tolist()) if kept}
        if steps:
            self.last = (sums.sum() / counts.sum()).item()
            self.targets += int(counts.sum())
            self.first = next(iter(steps.values())) if self.first is None else self.first
        self.sums.clear()
        self.counts.clear()
        for index, loss in steps.items():
            if not math.isfinite(loss) or loss > bound * self.first:
                raise Diverged(index, loss)
        return self.last

    def state(self, accelerator: Accelerator) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a checkpoint keeps: the numbers so far, and the steps not logged yet, summed over
        the processes."""
        numbers = {"first": self.first, "last": _finite(self.last), "targets": self.targets}
        if not self.sums:
            return numbers, {}
        sums = accelerator.reduce(torch.stack(self.sums), reduction="sum")
        return numbers, {"sums": sums, "counts": torch.stack(self.counts)}

    def restore(
        self, numbers: dict[str, Any], tensors: dict[str, torch.Tensor], accelerator: Accelerator
    ) -> None:
        """The inverse of `state`; the main process holds the sums of all."""
        self.first, self.targets = numbers["first"], numbers["targets"]
        self.last = math.nan if numbers["last"] is None else numbers["last"]
        if tensors:
            sums, counts = (tensors[k].clone().to(accelerator.device) for k in ("sums", "counts"))
            self.sums = list(sums if accelerator.is_main_process else torch.zeros_like(sums))
            self.counts = list(counts)


class Loop:
    """The state of one run while it trains."""

    def __init__(self, task: Task, run_dir: Path, progress: Progress | None = None) -> None:
        self.task, self.run_dir, self.progress = task, run_dir, progress
        self.settings = task.config.training
        # accelerate keeps its state per process; runs of one worker may differ in precision.
        AcceleratorState._reset_state()
        self.sharding = sharding.requested()
        self.accelerator = Accelerator(
            cpu=processes.ON_CPU,
            mixed_precision="bf16" if self.settings.precision == "bf16" else "no",
            dynamo_backend="inductor" if self.settings.compile else "no",
            # A process without evaluation samples would miss the exchange of buffers before the
            # first forward pass, and wait for ever. No model here trains its buffers.
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False),
                # Kept for the whole forward pass, copies of sharded weights would be whole ones.
                AutocastKwargs(cache_enabled=self.sharding is None),
            ],
        )
        # For models that draw during training; accelerate adds the process index.
        set_seed(task.config.seed % 2**31, device_specific=True)
        self._prepare()
        self.losses = Losses()
        self.evals: list[tuple[int, dict[str, float]]] = []
        self.started = time.perf_counter()
        self.seconds_before = 0.0
        self.eval_seconds = 0.0
        self.observe_seconds = 0.0
        self.eval_targets: int | None = None
        self.skipped = self.skipped_in_a_row = 0
        self.gradient_scale: dict[str, float] = {}
        self.wait_seconds = 0.0
        self.timed = (0, 0.0, 0.0)
        self.resumed_from: list[int] = []
        self.metrics = Log(run_dir / "metrics.jsonl")
        self.timing = Log(run_dir / "timing.jsonl")
        self.probe_log = Log(run_dir / "probes.jsonl")
        self.observation_log = Log(run_dir / "observations.jsonl")
        self.logs = (self.metrics, self.probe_log, self.observation_log)
        self.probes = self._make_probes()
        self.observer = self._make_observer()
        self.stop = signals.StopRequest()
        self.control = None
        if self.accelerator.num_processes > 1:  # what is agreed on there does not wait for a GPU
            self.control = distributed.new_group(backend="gloo", timeout=processes.TIMEOUT)

    def _prepare(self) -> None:
        """Puts the model in place with its initial values, and builds its optimiser."""
        task, device = self.task, self.accelerator.device
        if self.sharding is not None:
            sharding.shard(task.model, device, self.sharding)
        sharding.allocate(task.model, device)
        initialise(task, sharding.store)
        self.torch_optimizer = build_optimizer(task)
        if self.sharding is None:
            self.model, self.optimizer = self.accelerator.prepare(task.model, self.torch_optimizer)
        else:  # autocast and compilation are all that accelerate has to add
            self.model, self.optimizer = task.model, self.torch_optimizer
            self.model = self.accelerator.prepare_model(
                task.model, device_placement=False, evaluation_mode=True
            )

    def run(self) -> dict[str, Any]:
        """Trains to the end, to divergence or to a stop, and returns the summary."""
        first = self._resume()
        status: dict[str, Any] = {"status": "finished", "step": self.settings.steps}
        try:
            with self.stop:
                self._train(first)
        except Diverged as diverged:
            status = {"status": "diverged", "step": diverged.step}
            self._write(diverged.step, {"diverged": _finite(diverged.loss)})
        except Stopped as stopped:
            status = {"status": "stopped", "step": stopped.step}
        summary = self._summary(status)
        kept = self.task.config.checkpoint.final or status["status"] == "stopped"
        if self.accelerator.is_main_process and not kept:
            checkpoint.discard(self._checkpoints)
        return summary

    def _train(self, taken: int) -> None:
        """Every step after the first `taken`; what a checkpoint misses is done first."""
        settings = self.settings
        batches = loading.batches(self._train_loader(taken))
        if taken and self._evaluates(taken) and (not self.evals or self.evals[-1][0] < taken):
            self._evaluate(taken)
        self.saved_at = time.monotonic()
        if taken == 0:
            self._observe(0)
        self.timed = (taken, self._train_seconds(), self.wait_seconds)
        for step in range(taken + 1, settings.steps + 1):
            logged = step in (1, settings.steps) or step % settings.log_every == 0
            norm = self._step(step, batches, logged)
            if logged:
                self._log_step(step, norm)
            self._observe(step)
            self._save_if_due(step)
            if self._evaluates(step):
                self._evaluate(step)

    def _step(self, step: int, batches: Iterator[Any], want_norm: bool) -> torch.Tensor | None:
        """One optimiser step over this process's micro-batches; the gradient norm if wanted."""
        accelerator, world = self.accelerator, self.accelerator.num_processes
        asked = time.perf_counter()
        micro = [next(batches) for _ in range(self._micro_batches)]
        self.wait_seconds += time.perf_counter() - asked
        local = torch.stack([self.task.count(batch) for batch in micro]).sum()
        count = accelerator.reduce(local.to(accelerator.device), reduction="sum")
        schedules.set_lr(self.optimizer, self.factor(step - 1))
        total = torch.zeros((), device=accelerator.device)
        for index, batch in enumerate(micro, start=1):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            more = index < len(micro)
            with self._without_exchange() if more else contextlib.nullcontext():
                loss_sum = self.task.loss(self.model, batch)
                # Gradients are averaged over processes, the loss over the targets of all of them.
                accelerator.backward(loss_sum * (world / count))
            total += loss_sum.detach()
        norm = self._clip(want_norm or self.settings.skip_overflow)
        if self.settings.skip_overflow and not math.isfinite(norm):
            self._skip(step)
            total, count = torch.zeros_like(total), torch.zeros_like(count)
        else:
            if want_norm and self.settings.gradient_scale:
                self.gradient_scale = self._gradient_to_epsilon()
            self._update(step)
            self.skipped_in_a_row = 0
        self.optimizer.zero_grad()
        self.losses.add(total, count)
        return norm

    def _skip(self, step: int) -> None:
        """Leaves a step out, as an event in the log; Diverged when nothing but such steps follow.

        The norm is that of the whole gradient, so all processes skip the same steps.
        """
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.gradient_scale = {}
        self._write(step, {"event": "gradient_overflow", "skipped_steps": self.skipped})
        if self.skipped_in_a_row == SKIPS:
            raise Diverged(step, math.nan)

    def _gradient_to_epsilon(self) -> dict[str, float]:
        """RMS of the gradient over epsilon of each role's tensors, where there is an epsilon."""
        parameters = dict(self.task.model.named_parameters())
        gradients: dict[tuple[str, float], list[torch.Tensor]] = {}
        for row in self.task.plan.rows:
            gradient = parameters[row.name].grad
            if gradient is not None and row.eps:
                gradients.setdefault((row.role, row.eps), []).append(gradient)
        scales: dict[str, float] = {}
        for (role, eps), tensors in gradients.items():
            norm = torch.nn.utils.get_total_norm(tensors)
            norm = norm if self.sharding is None else norm.full_tensor()
            count = sum(tensor.numel() for tensor in tensors)
            scales[role] = float(norm) / math.sqrt(count) / eps
        return scales

    def _without_exchange(self) -> contextlib.AbstractContextManager:
        """Leaves the gradients of a micro-batch in their process, for the last one to exchange.

        Not of a sharded model: every process would then hold the gradient of all of it.
        """
        if self.sharding is not None:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.model)

    def _update(self, step: int) -> None:
        """The optimiser's step, probed if it is time to."""
        if self.probes is None or not self._probed(step):
            self.optimizer.step()
            return
        self.probes.before_step()
        self.optimizer.step()
        self.probes.after_step()
        forward = self.task.forward or self.task.measure or self.task.loss
        line = self.probes.read(lambda: forward(self.task.model, self.probe_batch))
        if self.accelerator.is_main_process:
            self.probe_log.append({"step": step, **line})

    def _probed(self, step: int) -> bool:
        return step in (1, self.settings.steps) or step % self.settings.probe_every == 0

    def _make_probes(self) -> Probes | None:
        """The probes of the run, if any, and the batch that they see."""
        if not self.settings.probe_every:
            return None
        # A decoder's full rows, where there are any: statistics would count pads of others.
        data = observations.observed_data(self.task)
        data = data if len(data) else self.task.eval_data
        size = min(len(data), self.settings.probe_samples)
        batch = self._eval_collate([data[index] for index in range(size)])
        self.probe_batch = send_to_device(batch, self.accelerator.device)
        return Probes(self.task.model, self.task.plan, self.torch_optimizer)

    def _make_observer(self) -> observations.Observer | None:
        """What observes the representations, if they are to be, in the main process."""
        settings = self.settings
        if not isinstance(settings, ObservedLoopConfig) or not settings.observe_every:
            return None
        observations.forward_of(self.task)
        observations.check_samples(self.task, settings.observe_samples)
        if not self.accelerator.is_main_process:
            return None
        device = self.accelerator.device
        return observations.Observer(self.task, settings.observe_samples, device)

    def _observe(self, step: int) -> None:
        """Observes the state after a step if it is time to; the arrays are there before the line.

        Before the step's checkpoint, which so has it, and nothing is observed twice.
        """
        if self.observer is None:
            return
        if step != self.settings.steps and step % self.settings.observe_every:
            return
        if self.accelerator.device.type == "cuda":  # which may still be busy with the step
            torch.cuda.synchronize(self.accelerator.device)
        started = time.perf_counter()
        found = self.observer.observe()
        observations.save_arrays(self.run_dir, step, found.arrays)
        self.observation_log.append(found.line(step))
        self.observe_seconds += time.perf_counter() - started

    def _clip(self, want_norm: bool) -> torch.Tensor | None:
        clip = self.task.config.optimizer.clip_norm
        if clip is None and not want_norm:
            return None
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.sharding is not None:
            norm = norm.full_tensor()
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        return norm

    def factor(self, taken: int) -> float:
        """The schedule's factor for the step after `taken` steps."""
        schedule = self.task.config.schedule
        return schedules.factor(
            schedule.name,
            taken,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.steps or self.settings.steps,
            floor=self.task.config.floor,
        )

    def _log_step(self, step: int, norm: torch.Tensor | None) -> None:
        loss = self.losses.drain(self.accelerator, step, self.settings.divergence_factor)
        gradient = None if norm is None else float(norm)
        line: dict[str, Any] = {"train_loss": _finite(loss), "lr_factor": self.factor(step - 1)}
        line["gradient_norm"] = _finite(gradient)
        if self.settings.gradient_scale:
            line["gradient_to_epsilon"] = self.gradient_scale
        if self.settings.skip_overflow:
            line["skipped_steps"] = self.skipped
        self._write(step, line)
        self._log_timing(step)
        if self.progress is not None and self.accelerator.is_main_process:
            self.progress(step, self.settings.steps, loss)

    def _log_timing(self, step: int) -> None:
        """Speed since the last line: in a log of its own, as it differs from run to run."""
        before, then, waited = self.timed
        now = self._train_seconds()
        self.timed = (step, now, self.wait_seconds)
        samples = (step - before) * self.settings.batch_size
        line = {
            "step": step,
            "samples_per_second": samples / max(now - then, 1e-9),
            "waiting_for_data": (self.wait_seconds - waited) / max(now - then, 1e-9),
        }
        if self.accelerator.is_main_process:
            self.timing.append(line)

    def _evaluates(self, step: int) -> bool:
        every = self.settings.eval_every
        return step == self.settings.steps or bool(every and step % every == 0)

    def _evaluate(self, step: int) -> None:
        started = time.perf_counter()
        means = self.evaluate()
        self.eval_seconds += time.perf_counter() - started
        if not math.isfinite(means["loss"]):
            raise Diverged(step, means["loss"])
        self.evals.append((step, means))
        self._write(step, {f"eval_{name}": value for name, value in means.items()})

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means per target over the evaluation samples, each counted once in all processes."""
        task, settings = self.task, self.settings
        size = min(len(task.eval_data), settings.eval_samples or len(task.eval_data))
        batches = self._eval_batches(size)
        loader = self._loader(task.eval_data, self._eval_collate, batch_sampler=batches)
        names, sums = ["loss"], []
        self.model.eval()
        for batch, ids in zip(loading.batches(loader), batches):
            count = (task.eval_count or task.count)(batch)
            batch = send_to_device(batch, self.accelerator.device, non_blocking=True)
            measured = self._measure(batch)
            names = list(measured)
            if ids is not IDLE:
                sums.append([*measured.values(), count])
        self.model.train()
        if self.sharding is not None:
            sharding.reshard(self.model)
        return self._means(names, sums)

    def _measure(self, batch: Any) -> dict[str, torch.Tensor]:
        """The sums of one evaluation batch by name."""
        if self.task.measure is not None:
            return self.task.measure(self.model, batch)
        return {"loss": self.task.loss(self.model, batch)}

    def _means(self, names: list[str], sums: list[list[torch.Tensor]]) -> dict[str, float]:
        """Sums of this process's batches as means over the targets of all processes."""
        device = self.accelerator.device
        if self.accelerator.num_processes > 1:  # one without samples knows no names
            names = max(gather_object([names]), key=len)
        total = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
        for row in sums:
            total += torch.stack([value.to(device).double() for value in row])
        *values, count = self.accelerator.reduce(total, reduction="sum").tolist()
        self.eval_targets = int(count)
        if count == 0:
            raise UserError("no evaluation sample could be read; see the messages above")
        return {name: value / count for name, value in zip(names, values)}

    def _eval_batches(self, size: int) -> list[Sequence[int]]:
        """The ids of this process's evaluation batches; IDLE ones only keep the others company.

        Every process takes part in each forward pass of a sharded model, with samples or without.
        """
        world, batch = self.accelerator.num_processes, self.settings.eval_batch_size
        own = eval_ids(size, self.accelerator.process_index, world).tolist()
        batches = [own[first : first + batch] for first in range(0, len(own), batch)]
        if self.sharding is not None:
            most = math.ceil(len(eval_ids(size, 0, world)) / batch)
            batches += [IDLE] * (most - len(batches))
        return batches

    @property
    def _micro_batches(self) -> int:
        share = self.settings.batch_size // self.accelerator.num_processes
        return math.ceil(share / (self.settings.micro_batch_size or share))

    @property
    def _eval_collate(self) -> Callable[[Any], Any]:
        return self.task.eval_collate or self.task.collate or default_collate

    def _train_loader(self, first_step: int) -> DataLoader:
        settings, accelerator, data = self.settings, self.accelerator, self.task.train_data
        share = settings.batch_size // accelerator.num_processes
        place = {
            "global_batch": settings.batch_size,
            "micro_batch": settings.micro_batch_size or max(share, 1),
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "first_step": first_step,
            "last_step": settings.steps,
        }
        order = EpochPlaces if self.task.by_epoch else BatchIds
        ids = order(len(data), self.task.order_seed, **place)
        return self._loader(data, self.task.collate, batch_sampler=ids)

    def _loader(
        self, data: Dataset, collate: Callable[[Any], Any] | None, **batching: Any
    ) -> DataLoader:
        return DataLoader(
            data,
            collate_fn=collate,
            num_workers=self.settings.data_workers,
            pin_memory=self.accelerator.device.type == "cuda",
            worker_init_fn=signals.follow_parent,
            # Without one of its own, making a loader would draw from the run's generator.
            generator=torch.Generator().manual_seed(self.task.config.seed % 2**63),
            **batching,
        )

    def _write(self, step: int, line: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.metrics.append({"step": step, **self._epoch(step), **line})

    def _epoch(self, step: int) -> dict[str, float]:
        """Epochs taken, where the experiment counts them."""
        if not self.task.by_epoch:
            return {}
        size = len(self.task.train_data)
        return {"epoch": round(step / steps_per_epoch(size, self.settings.batch_size), 6)}

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _checkpoint_is_late(self) -> bool:
        minutes = self.task.config.checkpoint.minutes
        return minutes is not None and time.monotonic() - self.saved_at > 60 * minutes

    def _save_if_due(self, step: int) -> None:
        """Saves when it is time to or the run is asked to stop; raises Stopped for the latter."""
        settings, last = self.task.config.checkpoint, step == self.settings.steps
        flags = torch.tensor([self.stop.requested, self._checkpoint_is_late()], dtype=torch.int64)
        if self.control is not None:  # all must do the same
            distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self.control)
        stop, late = map(bool, flags.tolist())
        due = late or bool(settings.every and step % settings.every == 0)
        if (settings.final if last else stop or due):
            self._save(step)
        if stop and not last:
            raise Stopped(step)

    def _save(self, step: int) -> None:
        losses, pending = self.losses.state(self.accelerator)
        random_states = gather_object([state.random_state(self.accelerator.device)])
        self.saved_at = time.monotonic()
        tensors = {
            **_under("model", state.model_tensors(self.task.model)),
            **_under("optimizer", state.optimizer_tensors(self.torch_optimizer)),
            **_under("pending", pending),
        }
        tensors = sharding.gather(tensors, keep=self.accelerator.is_main_process)
        if not self.accelerator.is_main_process:
            return
        meta = {
            "config": runs.identity(self.task.config),
            "plan": self.task.plan.to_dict(),
            "losses": losses,
            "evals": self.evals,
            "seconds": self._seconds(),
            "eval_seconds": self.eval_seconds,
            "observe_seconds": self.observe_seconds,
            "resumed_from": self.resumed_from,
            "skipped": [self.skipped, self.skipped_in_a_row],
            "eval_targets": self.eval_targets,
            "random": random_states,
            "logs": {log.path.name: log.position() for log in self.logs},
            "environment": environment.describe(self.accelerator.device),
        }
        checkpoint.save(self._checkpoints, step, tensors, meta, self.task.config.checkpoint.keep)

    def _resume(self) -> int:
        """Brings back the newest good checkpoint; returns the number of steps it had taken."""
        found: list[Checkpoint] = []
        path = processes.on_main(lambda: self._start(found))
        if path is None:
            return 0
        saved = found[0] if found else checkpoint.load(path, verify=False)
        state.load_model(self.task.model, saved.part("model"))
        state.load_optimizer(self.torch_optimizer, saved.part("optimizer"))
        self.losses.restore(saved.meta["losses"], saved.part("pending"), self.accelerator)
        self.evals = [(step, means) for step, means in saved.meta["evals"]]
        self.seconds_before = saved.meta["seconds"]
        self.eval_seconds = saved.meta["eval_seconds"]
        self.observe_seconds = saved.meta.get("observe_seconds", 0.0)  # older ones do not say
        self.resumed_from = [*saved.meta["resumed_from"], saved.step]
        self.skipped, self.skipped_in_a_row = saved.meta["skipped"]
        self.eval_targets = saved.meta["eval_targets"]
        states, index = saved.meta["random"], self.accelerator.process_index
        if index < len(states):  # a process that was not there before keeps its seed's state
            state.set_random_state(states[index], self.accelerator.device)
        return saved.step

    def _start(self, read: list[Checkpoint]) -> Path | None:
        """The checkpoint to go on from, also put into `read`, with the logs cut back to it.

        None to begin anew. Nothing is changed if there are checkpoints but none can be used.
        """
        if self.task.config.checkpoint.resume == "never":
            checkpoint.discard(self._checkpoints)
        found = self._newest_good()
        checkpoint.tidy(self._checkpoints)
        for left in self.run_dir.glob(".*.tmp"):
            left.unlink()
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        self._trim_timing(0 if found is None else found.step)
        observations.cut_arrays(self.run_dir, -1 if found is None else found.step)
        for log in self.logs:
            length = self._position(found.meta, log)["bytes"] if found else 0
            if length or log.path.exists() or log is self.metrics:
                log.cut(length)
        if found is None:
            return None
        print(f"resuming after step {found.step} ({found.path})", file=sys.stderr)
        read.append(found)
        return found.path

    def _trim_timing(self, step: int) -> None:
        """Leaves the lines of the steps that are not taken again."""
        if not self.timing.path.exists():
            return
        kept = []
        for line in self.timing.path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a last line cut short
                kept += [line] if json.loads(line)["step"] <= step else []
        write_text(self.timing.path, "".join(f"{line}\n" for line in kept))

    def _newest_good(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; those that are not are named and set aside.

        Raises RunError when none is whole, or when it was made by another config or plan.
        """
        damaged: list[tuple[Path, Damaged]] = []
        for path in reversed(checkpoint.paths(self._checkpoints)):
            try:
                found, plan = self._read(path)
            except Damaged as damage:
                print(f"not used: {damage}", file=sys.stderr)
                damaged.append((path, damage))
                continue
            config = self.task.config
            runs.refuse_differences(path, found.meta["config"], plan, config, self.task.plan)
            for bad, _ in damaged:
                checkpoint.set_aside(bad)
            return found
        if damaged:
            raise RunError(
                f"{self._checkpoints}: no checkpoint can be used ({damaged[0][1]}); mend it, or "
                "start anew with checkpoint.resume=never, which deletes them"
            )
        return None

    def _read(self, path: Path) -> tuple[Checkpoint, Plan]:
        """A checkpoint that this run can load, and its plan; Damaged for any other."""
        found = checkpoint.load(path)
        try:
            meta, plan = found.meta, Plan.from_dict(found.meta["plan"])
            keys = (
                *("losses", "evals", "seconds", "eval_seconds"),
                *("resumed_from", "skipped", "eval_targets", "random"),
            )
            missing = [key for key in keys if key not in meta]
            if missing or not isinstance(meta["config"], dict):
                raise Damaged(f"{path}: lacks {missing or 'its config'}")
            if plan.differences(self.task.plan) == []:  # else refused, with the difference shown
                state.check_model(self.task.model, found.part("model"))
                state.check_optimizer(self.torch_optimizer, found.part("optimizer"))
            for log in self.logs:
                log.check(self._position(meta, log))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(f"{path}: not a checkpoint of a run ({error!r})") from None
        return found, plan

    def _position(self, meta: dict[str, Any], log: Log) -> dict[str, Any]:
        """How much of a log belongs to a checkpoint; older ones do not know of observations."""
        if log is self.observation_log:
            return meta["logs"].get(log.path.name, {"bytes": 0})
        return meta["logs"][log.path.name]

    def _parameters_by_role(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for row in self.task.plan.rows:
            counts[row.role] += math.prod(row.shape)
        return dict(counts)

    def _train_seconds(self) -> float:
        """Seconds since this process began the run, but for evaluations and observations."""
        return time.perf_counter() - self.started - self.eval_seconds - self.observe_seconds

    def _seconds(self) -> float:
        """Seconds since the run began, without those between a stop and a resume."""
        return self.seconds_before + time.perf_counter() - self.started

    def _measured(self, finished: bool) -> dict[str, Any]:
        """Last and best evaluation of the loss, then of whatever else was measured."""
        names = list(self.evals[-1][1]) if self.evals else ["loss"]
        values: dict[str, Any] = {}
        for name in names:
            best: tuple[int | None, float | None] = (None, None)
            for step, means in self.evals:
                if best[1] is None or _better(name, best[1], means[name]):
                    best = step, means[name]
            last = self.evals[-1][1][name] if finished else None
            values |= {f"final_eval_{name}": last, f"best_eval_{name}": best[1]}
            values["best_eval_step" if name == "loss" else f"best_eval_{name}_step"] = best[0]
        return values

    def _summary(self, status: dict[str, Any]) -> dict[str, Any]:
        wall = self._seconds()
        training = wall - self.eval_seconds - self.observe_seconds
        finished = status["status"] == "finished"
        summary = {
            **status,
            "steps": self.settings.steps,
            **self._measured(finished),
            "first_train_loss": _finite(self.losses.first),
            "final_train_loss": _finite(self.losses.last),
            "eval_targets": self.eval_targets,
            "targets": self.losses.targets,
            "targets_per_second": self.losses.targets / training,
            "wall_seconds": wall,
            "train_seconds": training,
            "eval_seconds": self.eval_seconds,
            "observe_seconds": self.observe_seconds,
            "skipped_steps": self.skipped,
            "resumed_from": self.resumed_from,
            "parameters": sum(parameter.numel() for parameter in self.task.model.parameters()),
            "parameters_by_role": self._parameters_by_role(),
            "environment": environment.describe(self.accelerator.device),
        }
        if self.accelerator.is_main_process:
            write_json(self.run_dir / "summary.json", summary)
        return summary


def _better(name: str, old: float, new: float) -> bool:
    """Whether a mean is better than the best so far; a tie is not."""
    return new < old if lower_is_better(name) else new > old


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def initialise(
    task: Task, store: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_
) -> None:
    """Gives the model the values it starts from."""
    task.plan.initialise(task.model, task.config.seed, store)
    if task.after_init is not None:
        task.after_init(task.model)


def first_batches(task: Task, steps: int) -> Iterator[Any]:
    """The first batches of a run, whole, as one process would see them."""
    size, data = task.config.training.batch_size, task.train_data
    order = EpochPlaces if task.by_epoch else BatchIds
    places = order(len(data), task.order_seed, size, size, 0, 1, 0, steps)
    collate = task.collate or default_collate
    return (collate([data[place] for place in batch]) for batch in places)


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
    if task.config.training.probe_every and sharding.requested() is not None:
        raise UserError(
            "training.probe_every is not supported with sharding, where no process holds a whole "
            "tensor: set it to 0, or launch without FSDP"
        )
    settings = task.config.training
    observed = isinstance(settings, ObservedLoopConfig) and settings.observe_every
    if observed and sharding.requested() is not None:
        raise UserError(
            "training.observe_every is not supported with sharding, where no process holds a whole "
            "tensor: set it to 0, or launch without FSDP"
        )
    return Loop(task, run_dir, progress).run()
