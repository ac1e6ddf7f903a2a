"""What jobs of a SLURM cluster run; submitit stores it, calls it and requeues it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps import task
from sweeps.local import LocalPool
from sweeps.pool import Job, Needs, PoolOptions, cores, visible_gpus
from training.files import write_json
from training.signals import STOPPED

STOP = "stop"  # a file: the driver has stopped the runs, which are not to come back


def outcome_file(folder: Path, name: str) -> Path:
    """Where a job leaves what became of a run, in the jobs' folder."""
    return folder / f"{name}.outcome.json"


class _Asked:
    """The signals that a job has got: SIGTERM, or the warning before its time limit.

    submitit would answer its warning by requeueing the job at once; that comes after saving.
    """

    def __init__(self) -> None:
        from submitit import JobEnvironment

        self.warning = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
        self.requeue = signal.getsignal(self.warning)
        self.received: list[int] = []
        for number in (signal.SIGTERM, self.warning):
            signal.signal(number, lambda received, frame: self.received.append(received))

    def answer(self) -> None:
        """Requeues the job, which ends this process, once it is warned.

        After a SIGTERM alone SLURM ends the job itself, and starts it again if it was preempted: a
        job that ended by its own will would not come back.
        """
        if self.warning not in self.received:
            print("saved; SLURM ends this job, and starts it again if it was preempted", flush=True)
        while self.warning not in self.received:
            time.sleep(0.5)
        if callable(self.requeue):
            self.requeue(self.warning, None)


@dataclass
class Payload:
    """What a job calls, and calls again after it was requeued."""

    def checkpoint(self) -> Any:
        """What submitit starts when the job comes back."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass
class Runs(Payload):
    """Runs that are one job, by the engine of one machine; those that have ended are taken out."""

    jobs: tuple[Job, ...]
    needs: Needs
    launch: tuple[str, ...]
    folder: Path

    def __call__(self) -> None:
        """Trains to the end, or until it is stopped; outcomes are files for the driver."""
        asked, stopping = _Asked(), False
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            self.jobs = tuple(job.resumed() for job in self.jobs)
        at_once = max(1, min(len(self.jobs), cores() // self.needs.cpus))
        workers = None if visible_gpus() else at_once
        pool = LocalPool(PoolOptions(workers=workers, launch=self.launch))
        futures = {pool.submit(job, self.needs): job for job in self.jobs}
        left = set(futures)
        while left:
            done, left = wait(left, timeout=0.5, return_when="FIRST_COMPLETED")
            for future in done:
                self._tell(futures[future], future)
            if not stopping and (asked.received or (self.folder / STOP).exists()):
                stopping = True
                pool.stop()
        pool.shutdown()
        if self.jobs and asked.received:
            asked.answer()

    def _tell(self, job: Job, future: Any) -> None:
        """Leaves a run's outcome to the driver, unless this job resumes the run later."""
        try:
            outcome = {"summary": future.result()}
        except BrokenProcessPool as error:
            outcome = {"error": "lost", "message": str(error)}
        except Exception as error:
            outcome = task.told(error, job.run_dir)
        stopped = outcome.get("summary", {}).get("status") == "stopped"
        if not stopped or (self.folder / STOP).exists():
            self.jobs = tuple(other for other in self.jobs if other != job)
            write_json(outcome_file(self.folder, job.name), outcome)


@dataclass
class Driver(Payload):
    """`python -m sweeps run` with some words, in a process of its own."""

    words: tuple[str, ...]
    detached: bool
    """Its runs are jobs, too, which outlive it."""

    def __call__(self) -> None:
        """Runs to the end; otherwise exits: 1 a run failed, 2 a user's mistake, 75 stopped.

        Only the warning leaves jobs of its runs at work, for when it comes back.
        """
        asked, told = _Asked(), False
        # SLURM warns every process of a job; the driver hears of it from here.
        deaf = ("sh", "-c", f"trap '' {int(asked.warning)}; exec \"$@\"", "sh")
        driver = subprocess.Popen([*deaf, sys.executable, "-m", "sweeps", "run", *self.words])
        while (code := driver.poll()) is None:
            if asked.received and not told:
                told = True
                leaves = self.detached and asked.warning in asked.received
                driver.send_signal(signal.SIGKILL if leaves else signal.SIGTERM)
            time.sleep(0.2)
        if told and code in (STOPPED, -signal.SIGKILL):
            asked.answer()
        if code:
            raise SystemExit(code)
