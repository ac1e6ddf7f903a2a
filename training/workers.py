"""Worker processes: each imports an experiment once and runs one config after another.

Launcher and worker talk in JSON lines over the worker's standard input and output; whatever a run
prints goes to `log.txt` in its folder.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from training import allocator
from training.errors import RunError, UserError, is_users
from training.files import Busy, open_plain, writing

Progress = Callable[[int, int, float], None]


class RunRefused(UserError):
    """A run cannot start because of a mistake of the user's; the message is theirs to read."""


class RunBusy(Exception):
    """Another process is at work in the run's folder."""


class RunUnusable(Exception):
    """A run's folder holds what cannot be used; trying again would not help."""


class RunStopped(Exception):
    """A run was stopped from outside, with what it needs to go on."""


class RunFailed(Exception):
    """A run ended for a reason of its own; the message holds the end of its log."""


_ENDS = {"busy": RunBusy, "unusable": RunUnusable, "refused": RunRefused}


class Worker:
    """The launcher's side: a process that is started when needed and replaced when it dies."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[str] | None = None

    def run(
        self, experiment: str, config: dict[str, Any], run_dir: Path, progress: Progress
    ) -> dict[str, Any]:
        """The summary of one run that is done; otherwise one of this module's exceptions."""
        job = {"experiment": experiment, "config": config, "run_dir": str(run_dir)}
        process = self._started(json.dumps(job) + "\n")
        for line in process.stdout:
            message = json.loads(line)
            if message["event"] == "step":
                progress(message["step"], message["steps"], message["loss"])
            elif message["event"] == "done":
                if message["summary"]["status"] == "stopped":
                    raise RunStopped
                return message["summary"]
            elif message["event"] in _ENDS:
                raise _ENDS[message["event"]](message["error"])
            else:
                report = f"{message['error']}; the end of {run_dir / 'log.txt'}:"
                raise RunFailed(f"{report}\n{log_tail(run_dir)}")
        raise self._died(run_dir)

    def ask_to_stop(self) -> None:
        """Has the run in progress save a checkpoint and end; without one the process ends."""
        process = self.process
        if process is not None:
            process.terminate()

    def close(self) -> None:
        """Ends the process; a run in progress is killed."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def _started(self, job: str) -> subprocess.Popen[str]:
        """The process with a job handed over; one that died while it had none is replaced."""
        while True:
            fresh = self.process is None
            process = self._alive()
            try:
                process.stdin.write(job)
                process.stdin.flush()
                return process
            except BrokenPipeError:
                process.wait()
                self.process = None
                if fresh:
                    raise

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "training.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is the launcher's, which ends its workers
            )
        return self.process

    def _died(self, run_dir: Path) -> RunFailed:
        process, self.process = self.process, None
        code = process.wait() if process is not None else "none, closed by the launcher"
        tail = log_tail(run_dir)
        end = f"the worker process ended with code {code}"
        return RunFailed(f"{end}\n{tail}" if tail else end)


def log_tail(run_dir: Path, lines: int = 5) -> str:
    """The last lines of a run's log."""
    try:
        text = (run_dir / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _queue(jobs: IO[str]) -> queue.SimpleQueue:
    """The jobs as they come; when the launcher is gone, the run at work is told to stop.

    A run that trains then saves and ends; one that does not train yet ends at once.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        for line in jobs:
            waiting.put(line)
        waiting.put(None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    return waiting


def _work(jobs: IO[str], answers: IO[str]) -> None:
    """The worker's side: run jobs until the launcher closes the pipe."""

    def tell(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # see _queue
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    for line in iter(_queue(jobs).get, None):
        job = json.loads(line)
        run_dir = Path(job["run_dir"])
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            _log_to(run_dir / "log.txt")
            summary = _run(job, run_dir, lambda *step: tell(event="step", **_named(step)))
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            if isinstance(error, Busy):
                tell(event="busy", error=str(error))
            elif isinstance(error, RunError):
                tell(event="unusable", error=str(error))
            elif is_users(error):
                tell(event="refused", error=str(error))
            else:
                tell(event="failed", error=f"{type(error).__name__}: {error}")
        else:
            tell(event="done", summary=summary)


def _run(job: dict[str, Any], run_dir: Path, progress: Progress) -> dict[str, Any]:
    from training.config import validate

    experiment = importlib.import_module(f"{job['experiment']}.train")
    config = validate(experiment.Config, job["config"], str(run_dir))
    return experiment.run(config, run_dir, progress)


def _named(step: tuple[int, int, float]) -> dict[str, float]:
    return dict(zip(("step", "steps", "loss"), step))


def _log_to(path: Path) -> None:
    """Sends standard output and error, also those of libraries in C, to a file."""
    with writing(path), open_plain(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def main() -> None:
    """Runs as `python -m training.workers`; keeps the real standard output for answers."""
    allocator.keep_memory()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    _work(sys.stdin, answers)


if __name__ == "__main__":
    main()
