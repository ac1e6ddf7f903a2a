"""How a run survives: when it saves a checkpoint, what is in one, and how a run resumes."""

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed

from param_groups import Plan
from training import environment, processes, runs, signals
from training.checkpoints import checkpoint, state
from training.checkpoints.checkpoint import Checkpoint
from training.errors import Damaged, RunError, UserError
from training.log import History, Log
from training.task import Losses, Stopped, Task


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
    precision: str

    def __post_init__(self) -> None:
        self.folder, self.settings = self.run_dir / "checkpoints", self.task.config.checkpoint
        self.stop = signals.StopRequest()
        self.saved_at, self.saved_step = time.monotonic(), -1
        self.control: Any = None
        if self.accelerator.num_processes > 1:  # what is agreed on there does not wait for a GPU
            self.control = distributed.new_group(backend="gloo", timeout=processes.TIMEOUT)

    # Saving

    def save_if_due(self, step: int) -> None:
        """Saves when it is time to or the run is asked to stop; raises Stopped for the latter.

        The last step is saved before its evaluation, which may take long.
        """
        every, minutes = self.settings.every, self.settings.minutes
        late = minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
        stop, late = self._agreed(self.stop.requested, late)
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
        raise Stopped(step)

    def _agreed(self, *flags: bool) -> list[bool]:
        """Each flag, true if it is true in any process, so that all processes act alike."""
        agreed = torch.tensor(flags, dtype=torch.int64)
        if self.control is not None:
            distributed.all_reduce(agreed, distributed.ReduceOp.MAX, group=self.control)
        return [bool(flag) for flag in agreed.tolist()]

    def _save(self, step: int) -> None:
        losses, pending = self.losses.state(self.accelerator)
        random_states = gather_object([state.random_state(self.accelerator.device)])
        parts = {
            "model": state.model_tensors(self.task.model),
            "optimizer": state.optimizer_tensors(self.optimizer),
            "pending": pending,
        }
        tensors = {
            f"{part}/{name}": t for part, named in parts.items() for name, t in named.items()
        }
        meta: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            meta = {
                "config": runs.identity(self.task.config),
                "data": self.task.data_checksum,
                "plan": self.task.plan.to_dict(),
                "losses": losses,
                "history": self.history.state(),
                "random": random_states,
                "logs": {log.path.name: log.position() for log in self.logs},
                "environment": environment.describe(self.accelerator.device),
                "precision": self.precision,
                "loss_scale": self.scaler.state_dict(),
            }
        checkpoint.save(self.folder, step, tensors, meta, self.settings.keep)
        self.saved_at, self.saved_step = time.monotonic(), step

    def discard(self) -> None:
        """Removes all checkpoints, of a run that needs none any more."""
        checkpoint.discard(self.folder)

    # Resuming

    def resume(self) -> int:
        """Brings back the newest good checkpoint; returns the number of steps it had taken."""
        if self.settings.resume == "never":
            processes.on_main(self.discard)
        saved = self._newest_good()
        processes.on_main(lambda: self._start(saved))
        if saved is None:
            return 0
        meta, step, index = saved.meta, saved.meta["step"], self.accelerator.process_index
        state.load_model(self.task.model, saved)
        state.load_optimizer(self.optimizer, saved)
        pending = {name: saved.read(f"pending/{name}") for name in saved.named("pending")}
        self.losses.restore(meta["losses"], pending, self.accelerator)
        self.history.restore(meta["history"], step)
        self.scaler.load_state_dict(meta["loss_scale"])
        if index < len(meta["random"]):  # a process that is new keeps its seed's state
            state.set_random_state(meta["random"][index], self.accelerator.device)
        self.saved_step = step
        return step

    def _newest_good(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; those that are not are named and set aside.

        All processes call it and share the work of comparing checksums, which takes longer than
        reading. None to start from step 0. Raises RunError when none is whole, or when it was made
        by another config or plan; nothing is changed then.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        damaged: list[Path] = []
        first = ""
        for path in processes.on_main(lambda: checkpoint.paths(self.folder))[::-1]:
            problem: Exception | str | None = None
            try:
                checkpoint.check(path, rank, world)
            except (Damaged, UserError) as error:
                problem = error
            problems = [one for one in gather_object([problem]) if one is not None]
            problem = processes.on_main(functools.partial(self._problem, path, problems))
            if problem is None:
                processes.on_main(functools.partial(checkpoint.set_aside, damaged))
                try:
                    return checkpoint.load(path)
                except Damaged as error:  # its files were whole a moment ago
                    raise RunError(f"{error}; give the same command again") from None
            damaged, first = [*damaged, path], first or problem
        if damaged:
            processes.on_main(functools.partial(self._refuse, first))
        return None

    def _refuse(self, problem: str) -> NoReturn:
        raise RunError(
            f"{self.folder}: no checkpoint can be used ({problem}); repair it, or start from "
            "step 0 with checkpoint.resume=never, which deletes them"
        )

    def _problem(self, path: Path, problems: list[Exception]) -> str | None:
        """Why a checkpoint is not whole, the first of `problems` if any; None if it can be used.

        RunError if it is of another config, plan, data or precision; UserError of `problems` if it
        could not be read.
        """
        task = self.task
        try:
            if problems:
                raise next((one for one in problems if isinstance(one, UserError)), problems[0])
            meta = checkpoint.load(path).meta
            plan = Plan.from_dict(meta["plan"])
            runs.refuse_differences(path, meta["config"], plan, task.config, task.plan)
            for log in self.logs:
                log.check(meta["logs"][log.path.name])
        except Damaged as damage:
            print(f"not used: {damage}", file=sys.stderr)
            return str(damage)
        if meta["data"] != task.data_checksum:
            raise RunError(
                f"{path}: the run began on other data than its config's files hold now; bring "
                "those back, choose another --run-dir or delete the folder"
            )
        if meta["precision"] != self.precision:
            raise RunError(
                f"{path}: the run began in {meta['precision']}, here it would go on in "
                f"{self.precision}; resume it on a processor like the first"
            )
        return None

    def _start(self, saved: Checkpoint | None) -> None:
        """Cuts the logs back to the checkpoint, and tidies the folder."""
        checkpoint.tidy(self.folder)
        for left in self.run_dir.glob(".*.tmp"):
            left.unlink()
        (self.run_dir / "summary.json").unlink(missing_ok=True)
        for log in self.logs:
            length = saved.meta["logs"][log.path.name]["bytes"] if saved else 0
            if length or log.path.exists() or log is self.logs[0]:
                log.cut(length)
        if saved is not None:
            print(f"resuming after step {saved.meta['step']} ({saved.path})", file=sys.stderr)
