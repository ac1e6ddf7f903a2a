"""The training loop of every experiment, on accelerate: step, log, record, save, evaluate.

An experiment hands over a `Task`: its model, plan, data and loss. The loop owns everything that
must be the same for all: the loss normalised by the global number of targets, rates and decays as
planned times one schedule factor, data order from (seed, step), divergence as a result, and a run
that resumes where it was stopped, however it was stopped.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, distributed

from param_groups.schedules import factor as schedule_factor
from training import loading, processes, runs, sharding, summary, trackers
from training import task as tasks
from training.checkpoints.resume import Checkpoints
from training.data.sampling import steps_per_epoch
from training.evaluation import evaluate
from training.log import History, Log
from training.optim import optimizers
from training.task import Task

SKIPS = 100  # steps in a row without a finite gradient are divergence
HOSTS = ("cpu",)  # devices whose numbers are there to be read; reading others' waits for all work


def train(task: Task, run_dir: Path, progress: tasks.Progress | None = None) -> runs.Summary:
    """Runs a task into `run_dir` and returns its summary; see `training.runs` for the folder."""
    loop = Loop(task, run_dir, progress)
    try:
        return loop.run()
    finally:
        for tracker in loop.accelerator.trackers:
            with trackers.harmless(loop.accelerator):
                tracker.finish()


class Loop:
    """One run while it trains."""

    def __init__(self, task: Task, run_dir: Path, progress: tasks.Progress | None = None) -> None:
        self.task, self.run_dir, self.progress = task, run_dir, progress
        self.settings = settings = task.config.training
        trackers.check_installed(settings.trackers)
        self.accelerator = processes.accelerator(settings, run_dir)
        self.precision, device = processes.precision(settings.precision), self.accelerator.device
        # For models that draw during training; accelerate adds the process index.
        set_seed(task.config.seed % 2**31, device_specific=True)
        self.is_sharded = sharding.place(task.model, device, self.precision)
        tasks.initialise(task)
        # Not wrapped by accelerate, which would look for a package at every step.
        self.optimizer = tasks.build_optimizer(task)
        # For a sharded model accelerate only adds compilation: `evaluation_mode` stops it from
        # checking the tensors' devices.
        self.model = self.accelerator.prepare_model(
            task.model, device_placement=not self.is_sharded, evaluation_mode=self.is_sharded
        )
        # Micikevicius et al. (2018) scale the loss so that small gradients are not lost in fp16's
        # range. torch's scaler with its own numbers (torch.amp.GradScaler): from 2^16 on, halved
        # after a step that overflows, doubled after 2000 in a row that do not.
        fp16 = self.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.skips_overflow = settings.skip_overflow or fp16
        self.device_decides = (
            self.skips_overflow
            and device.type not in HOSTS
            and not self.is_sharded
            and optimizers.takes_found_inf(self.optimizer)
        )
        self.losses, self.history = tasks.Losses(), History()
        self.gradient_scale: dict[str, float] = {}
        self.wait_seconds, self.timed = 0.0, (0, 0.0, 0.0)  # as of the last line of timing.jsonl
        self.metrics, self.timing = Log(run_dir / "metrics.jsonl"), Log(run_dir / "timing.jsonl")
        live = tasks.LiveRun(
            task=task,
            folder=run_dir,
            optimizer=self.optimizer,
            device=device,
            is_main=self.accelerator.is_main_process,
            is_sharded=self.is_sharded,
            aside=self._aside,
        )
        recorded = [log for recorder in task.recorders for log in recorder.start(live)]
        self.checkpoints = Checkpoints(
            task,
            run_dir,
            self.accelerator,
            self.optimizer,
            self.losses,
            self.history,
            [self.metrics, self.timing, *recorded],
            self.scaler,
            self.precision,
        )

    def run(self) -> runs.Summary:
        """Trains to the end, to divergence or to a stop, and returns the summary."""
        taken = self.checkpoints.resume()
        if self.settings.trackers:
            config = dict(runs.flat(runs.identity(self.task.config)))
            trackers.start(self.accelerator, self.run_dir, config, taken)
        status: dict[str, Any] = {"status": "finished", "step": self.settings.steps}
        with self.checkpoints.stop:
            try:
                self._train(taken)
            except tasks.Diverged as diverged:
                status = {"status": "diverged", "step": diverged.step}
                self._write(diverged.step, {"diverged": diverged.loss})
            except tasks.Stopped as stopped:
                status = {"status": "stopped", "step": stopped.step}
        device = self.accelerator.device
        outcome = summary.of(status, self.task, self.losses, self.history, self.precision, device)
        if self.accelerator.is_main_process:
            run, logs = runs.run_id(self.task.config), self.checkpoints.logs
            outcome = runs.write_summary(self.run_dir, run, outcome, logs)
            if not (self.task.config.checkpoint.final or status["status"] == "stopped"):
                self.checkpoints.discard()
        return outcome

    def _train(self, taken: int) -> None:
        """Every step after the first `taken`; an evaluation the checkpoint misses comes first."""
        task, settings, evals = self.task, self.settings, self.history.evals
        batches, micro_batches = loading.train_batches(task, self.accelerator, taken)
        if taken and self._evaluates(taken) and (not evals or evals[-1][0] < taken):
            self._evaluate(taken)
        if taken == 0:
            self._after(0)
        self.checkpoints.saved_at = time.monotonic()
        self.timed = (taken, self.history.train_seconds(), self.wait_seconds)
        for step in range(taken + 1, settings.steps + 1):
            logged = step in (1, settings.steps) or step % settings.log_every == 0
            began = time.perf_counter()
            micro = [next(batches) for _ in range(micro_batches)]
            self.wait_seconds += time.perf_counter() - began
            factor = self.factor(step - 1)  # one for all groups: the ratios of their rates stay
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            total, count = self._forward_backward(micro)
            self.scaler.unscale_(self.optimizer)
            if logged:
                self._settle(step)
            norm = self._clip(logged or self.skips_overflow)
            overflow: Tensor | None = None
            if self.device_decides and norm is not None:
                overflow = None if logged else 1 - norm.isfinite().float()
                found = torch.zeros_like(norm) if overflow is None else overflow
                self.optimizer.found_inf = found  # type: ignore[attr-defined]
            if overflow is None and self._overflows(norm):
                self._skip(step)
                total, count = torch.zeros_like(total), 0
            else:
                if logged and settings.gradient_scale:
                    self.gradient_scale = self._gradient_to_epsilon()
                self._update(step)
                if overflow is None:
                    self.history.skipped_in_a_row = 0
            self.scaler.update()
            self.optimizer.zero_grad()
            self.losses.add(total, count, overflow)
            if logged:
                self._log_step(step, norm)
            if self.progress is not None and self.accelerator.is_main_process:
                self.progress(step, settings.steps, self.losses.last if logged else None)
            self._after(step)
            self.checkpoints.save_if_due(step)
            if self._evaluates(step):
                self._evaluate(step)

    def _forward_backward(self, micro: list[Any]) -> tuple[Tensor, int]:
        """(this process's summed loss, targets of all processes); leaves the mean's gradients."""
        accelerator, world = self.accelerator, self.accelerator.num_processes
        # A number of the host: a copy to the device would wait for the step before.
        count = sum(int(self.task.count(batch)) for batch in micro)
        if world > 1:
            counts = torch.tensor(count)
            distributed.all_reduce(counts, group=self.checkpoints.control)
            count = int(counts)
        share = world / count if count else math.inf
        total = torch.zeros((), device=accelerator.device)
        if self.settings.cuda_graphs:  # what the step before has left in their memory is read
            torch.compiler.cudagraph_mark_step_begin()
        for index, batch in enumerate(micro, start=1):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            # Only the last micro-batch reduces gradients over processes. A sharded model reduces
            # them at each one: otherwise every process would hold the whole gradient.
            exchanges = index == len(micro) or self.is_sharded
            with contextlib.nullcontext() if exchanges else accelerator.no_sync(self.model):
                loss_sum = self.task.loss(self.model, batch)
                # Gradients are averaged over processes, the loss over the targets of all of them.
                # Not accelerate's `backward`, which divides by a number of micro-batches of its
                # own, by an exported ACCELERATE_GRADIENT_ACCUMULATION_STEPS, and adds nothing here.
                self.scaler.scale(loss_sum * share).backward()
            total += loss_sum.detach()
        return total, count

    def _clip(self, want_norm: bool) -> Tensor | None:
        """The norm of the whole gradient, if it is wanted or clipped."""
        clip = self.task.config.optimizer.clip_norm
        if clip is None and not want_norm:
            return None
        parameters = list(self.model.parameters())
        norm = self._norm([p.grad for p in parameters if p.grad is not None])
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        return norm

    def _norm(self, tensors: list[Tensor]) -> Tensor:
        """The L2 norm of tensors together, whole ones where they are sharded."""
        norm = torch.nn.utils.get_total_norm(tensors)
        return norm.full_tensor() if sharding.is_sharded(norm) else norm

    def _overflows(self, norm: Tensor | None) -> bool:
        return self.skips_overflow and norm is not None and not math.isfinite(norm)

    def _settle(self, step: int) -> None:
        """Notes which steps since the last log the device has skipped."""
        for earlier, skipped in self.losses.settle(step):
            if skipped:
                self._skip(earlier)
            else:
                self.history.skipped_in_a_row = 0

    def _skip(self, step: int) -> None:
        """Skips a step and logs the event; raises Diverged after SKIPS skipped steps in a row.

        The norm is that of the whole gradient, so all processes skip the same steps.
        """
        self.history.skipped += 1
        self.history.skipped_in_a_row += 1
        self.gradient_scale = {}
        self._write(step, {"event": "gradient_overflow", "skipped_steps": self.history.skipped})
        if self.history.skipped_in_a_row == SKIPS:
            raise tasks.Diverged(step, math.nan)

    def _update(self, step: int) -> None:
        """The optimiser's step, with the recorders around it."""
        with contextlib.ExitStack() as around:
            for recorder in self.task.recorders:
                around.enter_context(recorder.around(step))
            self.optimizer.step()

    def _after(self, step: int) -> None:
        for recorder in self.task.recorders:
            recorder.after(step)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Time that counts as observing, not as training."""
        if self.accelerator.device.type == "cuda":  # which may still be busy with the step
            torch.cuda.synchronize(self.accelerator.device)
        started = time.perf_counter()
        yield
        self.history.observe_seconds += time.perf_counter() - started

    def _gradient_to_epsilon(self) -> dict[str, float]:
        """RMS of the gradient over epsilon of each role's tensors, where there is an epsilon."""
        parameters = dict(self.task.model.named_parameters())
        gradients: dict[tuple[str, float], list[Tensor]] = {}
        for row in self.task.plan.rows:
            gradient = parameters[row.name].grad
            if gradient is not None and row.eps:
                gradients.setdefault((row.role, row.eps), []).append(gradient)
        scales: dict[str, float] = {}
        for (role, eps), tensors in gradients.items():
            count = sum(tensor.numel() for tensor in tensors)
            scales[role] = float(self._norm(tensors)) / math.sqrt(count) / eps
        return scales

    def factor(self, taken: int) -> float:
        """The schedule's factor for the step after `taken` steps."""
        schedule = self.task.config.schedule
        return schedule_factor(
            schedule.name,
            taken,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.steps or self.settings.steps,
            floor=self.task.config.floor,
        )

    def _evaluates(self, step: int) -> bool:
        every, n = self.settings.eval_every, self.settings.eval_per_octave
        if step == self.settings.steps or (every and step % every == 0):
            return True
        # Whether some 2^(k/n) is rounded to the step.
        low, high = n * math.log2(step - 0.5), n * math.log2(step + 0.5)
        return n > 0 and math.ceil(low) < high

    def _evaluate(self, step: int) -> None:
        started = time.perf_counter()
        found = evaluate(
            self.task, self.model, self.accelerator, self.is_sharded, self.checkpoints.stopping
        )
        self.history.eval_seconds += time.perf_counter() - started
        if found is None:
            self.checkpoints.stop_after(step)
        means, self.history.eval_targets = found
        if not math.isfinite(means["loss"]):
            raise tasks.Diverged(step, means["loss"])
        self.history.evals.append((step, means))
        self._write(step, {f"eval_{name}": value for name, value in means.items()})

    def _log_step(self, step: int, norm: Tensor | None) -> None:
        loss = self.losses.drain(self.accelerator, step, self.settings.divergence_factor)
        line: dict[str, Any] = {"train_loss": loss, "lr_factor": self.factor(step - 1)}
        line["gradient_norm"] = None if norm is None else float(norm)
        if self.settings.gradient_scale:
            line["gradient_to_epsilon"] = self.gradient_scale
        if self.skips_overflow:
            line["skipped_steps"] = self.history.skipped
        if self.scaler.is_enabled():
            line["loss_scale"] = self.scaler.get_scale()
        self._write(step, line)
        # Speed since the last line: in a separate log, as it differs from run to run.
        now = step, self.history.train_seconds(), self.wait_seconds
        steps, trained, waited = (b - a for a, b in zip(self.timed, now, strict=True))
        self.timed, seconds = now, max(trained, 1e-9)
        speed = {
            "step": step,
            "samples_per_second": steps * self.settings.batch_size / seconds,
            "waiting_for_data": waited / seconds,
        }
        if self.accelerator.is_main_process:
            self.timing.append(speed)
        rates = {f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups}
        with trackers.harmless(self.accelerator):
            self.accelerator.log(rates, step)

    def _write(self, step: int, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl, with the epochs taken where the experiment counts them."""
        if self.task.by_epoch:
            whole = steps_per_epoch(len(self.task.train_data), self.settings.batch_size)
            line = {"epoch": round(step / whole, 6), **line}
        if self.accelerator.is_main_process:
            self.metrics.append({"step": step, **line})
        with trackers.harmless(self.accelerator):
            self.accelerator.log(dict(runs.flat(line)), step)
