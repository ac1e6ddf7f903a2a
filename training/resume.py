"""How a run survives: when it saves a checkpoint, what is in one, and how a run resumes."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from pydantic import ConfigDict, Field
from torch import distributed

from param_groups import Plan
from training import checkpoint, environment, processes, runs, sharding, signals, state
from training.checkpoint import Checkpoint
from training.config import Count, NonNegativeFloat, Section, validate
from training.errors import Damaged, RunError, reason
from training.log import History, Log
from training.task import Losses, Stopped, Task


class _Numbers(Section):
    """What `Losses.state` says."""

    first: float | None
    last: float | None
    targets: Count


class _Position(Section):
    """What `Log.position` says."""

    bytes: Count
    sha256: str


class _Meta(Section):
    """What a run's checkpoint says of the run; `training.checkpoint` adds keys of its own."""

    model_config = ConfigDict(extra="ignore")

    step: Count
    config: dict[str, Any]
    data: str | None
    plan: dict[str, Any]
    losses: _Numbers
    evals: list[tuple[Count, dict[str, float]]]
    seconds: NonNegativeFloat
    eval_seconds: NonNegativeFloat
    observe_seconds: NonNegativeFloat
    resumed_from: list[Count]
    skipped: tuple[Count, Count]
    eval_targets: Count | None
    random: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logs: dict[str, _Position]
    loss_scale: dict[str, float]  # of an fp16 run, as torch.amp.GradScaler saves it


@dataclass
class Checkpoints:
    """A run's checkpoints: model, optimiser, losses, history, random states and lengths of logs.

    `logs` are cut back to the checkpoint that a run resumes from, the first of them being
    metrics.jsonl.
    """

    task: Task
    run_dir: Path
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    losses: Losses
    history: History
    logs: Sequence[Log]
    scaler: torch.amp.GradScaler

    def __post_init__(self) -> None:
        self.folder, self.settings = self.run_dir / "checkpoints", self.task.config.checkpoint
        self.stop = signals.StopRequest()
        self.saved_at, self.saved_step = time.monotonic(), -1
        self.control = self.writers = None
        if self.accelerator.num_processes > 1:  # what is agreed on there does not wait for a GPU
            self.control = distributed.new_group(backend="gloo", timeout=processes.TIMEOUT)
        if any(map(sharding.is_sharded, self.task.model.parameters())):  # and what a thread writes
            self.writers = distributed.new_group(backend="gloo", timeout=processes.TIMEOUT)
        self.writing: Future | None = None
        self.read: Checkpoint | None = None  # by the first process, until the run resumes from it
        self.damaged: list[tuple[Path, Damaged]] = []  # the newest first

    # Saving

    def save_if_due(self, step: int) -> None:
        """Saves when it is time to or the run is asked to stop; raises Stopped for the latter.

        The last step is saved before its evaluation, which may take long.
        """
        every, minutes = self.settings.every, self.settings.minutes
        late = minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
        failed = self.writing is not None and self.writing.done() and self.writing.exception()
        stop, late, failed = self._agreed(self.stop.requested, late, bool(failed))
        if failed:
            self.settle()
        due = late or bool(every and step % every == 0)
        if step == self.task.config.training.steps:
            due = self.settings.final or bool(every) or minutes is not None
        if stop:
            self.stop_after(step)
        if due:
            self._save(step)

    def stopping(self) -> bool:
        """Whether the run is asked to stop, in any of its processes."""
        return self._agreed(self.stop.requested)[0]

    def stop_after(self, step: int) -> NoReturn:
        """Saves, unless that was done after this step; raises Stopped."""
        if self.saved_step != step:
            self._save(step)
        self.settle()
        raise Stopped(step)

    def settle(self) -> None:
        """Waits until the last checkpoint is on the disk; raises UserError if it cannot be."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            checkpoint.finish(self.folder, self.saved_step, writing)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Each flag, true where it is so in any process: all must do the same."""
        found = torch.tensor(flags, dtype=torch.int64)
        if self.control is not None:
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.control)
        return [bool(flag) for flag in found.tolist()]

    def _save(self, step: int) -> None:
        """Saves; a sharded run goes on as soon as its tensors are copied, one save at a time."""
        self.settle()
        self.saved_step = step
        losses, pending = self.losses.state(self.accelerator)
        random_states = gather_object([state.random_state(self.accelerator.device)])
        self.saved_at = time.monotonic()
        tensors = {
            **_under("model", state.model_tensors(self.task.model)),
            **_under("optimizer", state.optimizer_tensors(self.optimizer)),
            **_under("pending", pending),
        }
        meta: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            meta = {
                "config": runs.identity(self.task.config),
                "data": self.task.data_checksum,
                "plan": self.task.plan.to_dict(),
                "losses": losses,
                **self.history.state(),
                "random": random_states,
                "logs": {log.path.name: log.position() for log in self.logs},
                "environment": environment.describe(self.accelerator.device),
                "precision": self.accelerator.mixed_precision,
                "loss_scale": self.scaler.state_dict(),
            }
        saving = (self.folder, step, tensors, meta, self.settings.keep)
        if self.writers is not None:
            self.writing = checkpoint.save_shards(*saving, self.writers)
        elif self.accelerator.is_main_process:
            checkpoint.save(*saving)

    def discard(self) -> None:
        """Removes all checkpoints, of a run that needs none any more."""
        checkpoint.discard(self.folder)

    # Resuming

    def resume(self) -> int:
        """Brings back the newest good checkpoint; returns the number of steps it had taken."""
        if self.settings.resume == "never":
            processes.on_main(self.discard)
        path = self._newest_good()
        processes.on_main(self._start)
        if path is None:
            return 0
        sharded = self.writers is not None
        saved = self.read or checkpoint.load(path, verify=False, shapes_only=sharded)
        self.read = None
        if sharded:
            saved = self._fetched(saved)
        else:
            state.load_model(self.task.model, saved.part("model"))
        state.load_optimizer(self.optimizer, saved.part("optimizer"))
        self.saved_step = saved.step
        self.losses.restore(saved.meta["losses"], saved.part("pending"), self.accelerator)
        self.history.restore(saved.meta, saved.step)
        self.scaler.load_state_dict(saved.meta["loss_scale"])
        states, index = saved.meta["random"], self.accelerator.process_index
        if index < len(states):  # a process that was not there before keeps its seed's state
            state.set_random_state(states[index], self.accelerator.device)
        return saved.step

    def _fetched(self, saved: Checkpoint) -> Checkpoint:
        """The checkpoint with this process's parts of its tensors; those of the model in place."""
        tensors = {
            **_under("model", state.model_tensors(self.task.model)),
            **_under("optimizer", state.optimizer_places(self.optimizer, saved.part("optimizer"))),
            **_under(
                "pending",
                {
                    name: torch.empty_like(tensor, device="cpu")
                    for name, tensor in saved.part("pending").items()
                },
            ),
        }
        try:
            checkpoint.read(saved.path, tensors, self.writers)
        except Damaged as error:  # its checksums were right a moment ago
            raise RunError(f"{error}; repair that and give the same command again") from None
        return replace(saved, tensors=tensors)

    def _newest_good(self) -> Path | None:
        """The newest checkpoint that is whole; those that are not are named and set aside.

        All processes call it and share the work of comparing checksums, which takes longer than
        reading; the first one does the rest and keeps what it has read. None to start from step 0.
        Raises RunError when none is whole, or when it was made by another config or plan; nothing
        is changed then.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        for path in processes.on_main(lambda: checkpoint.paths(self.folder))[::-1]:
            damage = None
            try:
                checkpoint.check(path, rank, world)
            except Damaged as error:
                damage = error
            found = [error for error in gather_object([damage]) if error is not None]
            if processes.on_main(functools.partial(self._usable, path, found)):
                return path
        return processes.on_main(self._refuse_damaged)

    def _refuse_damaged(self) -> None:
        """Raises RunError if there are checkpoints, all of them damaged."""
        if self.damaged:
            raise RunError(
                f"{self.folder}: no checkpoint can be used ({self.damaged[0][1]}); repair it, or "
                "start from step 0 with checkpoint.resume=never, which deletes them"
            )

    def _usable(self, path: Path, found: list[Damaged]) -> bool:
        """Whether a checkpoint that has been `found` damaged or not is one to resume from."""
        try:
            if found:
                raise found[0]
            saved, plan = self._read(path)
        except Damaged as damage:
            print(f"not used: {damage}", file=sys.stderr)
            self.damaged.append((path, damage))
            return False
        config = self.task.config
        runs.refuse_differences(path, saved.meta["config"], plan, config, self.task.plan)
        if saved.meta["data"] != self.task.data_checksum:
            raise RunError(
                f"{path}: the run began on other data than its config's files hold now; bring "
                "those back, choose another --run-dir or delete the folder"
            )
        precision = self.accelerator.mixed_precision
        if saved.meta["precision"] != precision:
            raise RunError(
                f"{path}: the run began with mixed precision {saved.meta['precision']!r}, here "
                f"it would go on with {precision!r}; resume it on a processor like the first"
            )
        for bad, _ in self.damaged:
            checkpoint.set_aside(bad)
        self.read = saved
        return True

    def _start(self) -> None:
        """Cuts the logs back to the checkpoint that was read, and tidies the folder."""
        found = self.read
        checkpoint.tidy(self.folder)
        for left in self.run_dir.glob(".*.tmp"):
            left.unlink()
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        for log in self.logs:
            length = found.meta["logs"][log.path.name]["bytes"] if found else 0
            if length or log.path.exists() or log is self.logs[0]:
                log.cut(length)
        if found is not None:
            print(f"resuming after step {found.step} ({found.path})", file=sys.stderr)

    def _read(self, path: Path) -> tuple[Checkpoint, Plan]:
        """A checkpoint that this run can load, and its plan; Damaged for any other."""
        found = checkpoint.load(path, verify=False, shapes_only=self.writers is not None)
        try:
            meta, plan = found.meta, Plan.from_dict(found.meta["plan"])
            validate(_Meta, meta, "meta.json")
            for kept in meta["random"]:
                state.check_random_state(kept, self.accelerator.device)
            scaler = torch.amp.GradScaler("cpu", enabled=self.scaler.is_enabled())
            scaler.load_state_dict(meta["loss_scale"])
            steps = self.task.config.training.steps
            if found.step > steps and meta["config"]["training"]["steps"] == steps:
                raise Damaged(f"{path}: of step {found.step} in a run of {steps}")
            if plan.differences(self.task.plan) == []:  # else refused, with the difference shown
                state.check_model(self.task.model, found.part("model"))
                state.check_optimizer(self.optimizer, found.part("optimizer"))
            for log in self.logs:
                log.check(meta["logs"][log.path.name])
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise Damaged(f"{path}: not a checkpoint of a run ({reason(error)})") from None
        return found, plan


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
