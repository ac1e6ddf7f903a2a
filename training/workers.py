"""Worker processes: each imports an experiment once and runs one config after another.

Launcher and worker talk in JSON lines over the worker's standard input and output; whatever a run
prints goes to `log.txt` in its folder.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Progress = Callable[[int, int, float], None]


class RunFailed(Exception):
    """A run ended for a reason of its own; the message holds the end of its log."""


class Worker:
    """The launcher's side: a process that is started when needed and replaced when it dies."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[str] | None = None

    def run(
        self, experiment: str, config: dict[str, Any], run_dir: Path, progress: Progress
    ) -> dict[str, Any]:
        """The summary of one run; RunFailed if it raised or the process died."""
        process = self._alive()
        job = {"experiment": experiment, "config": config, "run_dir": str(run_dir)}
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._died(run_dir) from None
        for line in process.stdout:
            message = json.loads(line)
            if message["event"] == "step":
                progress(message["step"], message["steps"], message["loss"])
            elif message["event"] == "done":
                return message["summary"]
            else:
                raise RunFailed(f"{message['error']}; see {run_dir / 'log.txt'}")
        raise self._died(run_dir)

    def close(self) -> None:
        """Ends the process; a run in progress is killed."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "training.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self.environment,
            )
        return self.process

    def _died(self, run_dir: Path) -> RunFailed:
        code = self.process.wait()
        self.process = None
        tail = log_tail(run_dir)
        return RunFailed(f"the worker process ended with code {code}" + (f"\n{tail}" if tail else ""))


def log_tail(run_dir: Path, lines: int = 5) -> str:
    """The last lines of a run's log."""
    try:
        text = (run_dir / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _work(jobs: Any, answers: Any) -> None:
    """The worker's side: run jobs until the launcher closes the pipe."""

    def tell(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for line in jobs:
        job = json.loads(line)
        run_dir = Path(job["run_dir"])
        run_dir.mkdir(parents=True, exist_ok=True)
        _log_to(run_dir / "log.txt")
        try:
            summary = _run(job, run_dir, lambda *step: tell(event="step", **_named(step)))
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
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
    with open(path, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def main() -> None:
    """Runs as `python -m training.workers`; keeps the real standard output for answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    _work(sys.stdin, answers)


if __name__ == "__main__":
    main()
