"""Where runs run: the interface of every engine, `concurrent.futures.Executor` and three words.

    pool = open_pool("local", PoolOptions(workers=2))
    future = pool.submit(job, needs)      # while fewer than pool.slots are in flight

A future holds the run's summary, or raises

- one of `pool.lost`: the place died and not the run; submitted again, the run resumes;
- RunFailed: the run ended for a reason of its own;
- Busy: another process trains this run, for instance on a node that was cut off;
- RunError: the run's folder cannot be used; any other UserError: a mistake of the user's.

Torch is not imported here, so that a driver starts in a second.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import re
import shlex
import subprocess
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from training.config import Section
from training.errors import UserError

STOP_SECONDS = "TRAINING_STOP_SECONDS"  # a variable: large models take longer to save


class Needs(Section):
    """What one run takes, all its processes together. A place without GPUs ignores `gpus`."""

    gpus: float = Field(default=1, ge=0)
    """GPUs of the run; below 1 a share of one, which it has with others."""
    cpus: int = Field(default=1, ge=1)
    """Cores that a cluster sets aside; on one machine without --workers, too."""
    processes: int = Field(default=1, ge=1)
    """Above 1 the run is started by `accelerate launch`, sharded unless --launch says otherwise."""
    nodes: int = Field(default=1, ge=1)
    """Machines, each with an equal part of the rest."""

    @model_validator(mode="after")
    def _divides(self) -> Needs:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus {self.gpus:g}: above 1 it must be a whole number")
        if self.nodes > 1 and (self.processes % self.nodes or self.gpus % self.nodes):
            raise ValueError(f"nodes {self.nodes}: must divide gpus and processes")
        return self


@dataclass(frozen=True)
class Job:
    """One run, as it travels to the place where it runs."""

    name: str
    """The run's id."""
    experiment: str
    config: dict[str, Any]
    """The resolved config as JSON types."""
    run_dir: Path
    threads: int | None = None
    """None lets the pool decide."""

    def resumed(self) -> Job:
        """The same run once it has begun: it goes on from its checkpoints, also where its config
        says that those which were there before are not to be used."""
        if "checkpoint" not in self.config:
            return self
        checkpoint = {**self.config["checkpoint"], "resume": "auto"}
        return replace(self, config={**self.config, "checkpoint": checkpoint})


class RunFailed(Exception):
    """A run ended for a reason of its own; `tail` holds the end of its log."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message, tail)
        self.tail = tail

    def __str__(self) -> str:
        return "\n".join(filter(None, self.args))


class Pool:
    """An engine, and what all engines have: a place for runs that are told to stop.

    Only the thread that opened it may submit.
    """

    lost: tuple[type[BaseException], ...]

    def __init__(self, options: PoolOptions) -> None:
        stop_seconds()  # a mistake in it shows before the first run
        self.options = options
        self.lock = threading.RLock()
        self.runs: list[Any] = []  # in the pool's hands, each with its future
        self.stops = 0
        self.deadline: threading.Timer | None = None

    @property
    def slots(self) -> int:
        """How many jobs are worth having in flight now, those that are included."""

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The summary to come; UserError where no place could ever hold the run."""

    def stop(self) -> None:
        """Has every run save and end, whose summary then says `stopped`.

        What is left after stop_seconds(), or now if called again, is ended at once.
        """
        with self.lock:
            self.stops += 1
            if self.stops == 1:
                self.deadline = threading.Timer(stop_seconds(), self.stop)
                self.deadline.daemon = True
                self.deadline.start()
            self._stop(at_once=self.stops > 1)

    def _stop(self, at_once: bool) -> None:
        """Asks all runs to save, or ends them, with the lock held."""

    def shutdown(self, wait: bool = True) -> None:
        """Ends what the pool has started here, at first its runs if it is to `wait` for them."""
        with self.lock:
            futures = [run.future for run in self.runs]
        if wait:
            wait_for(futures)
        if self.deadline is not None:
            self.deadline.cancel()
        self._close(wait)

    def _close(self, wait: bool) -> None:
        """Gives back what the engine holds."""


@dataclass(frozen=True)
class PoolOptions:
    """What a user says about the place where runs run."""

    workers: int | None = None
    threads: int | None = None
    launch: tuple[str, ...] = ()
    address: str | None = None


ENGINES = {
    "local": "sweeps.local.LocalPool",
    "ray": "sweeps.on_ray.RayPool",
}


def check(engine: str, options: PoolOptions) -> None:
    """Raises UserError for options that an engine cannot have."""
    if options.address and engine != "ray":
        raise UserError("--address goes with --engine ray")
    for name in ("workers", "threads"):
        if (getattr(options, name) or 1) < 1 or getattr(options, name) == 0:
            raise UserError(f"--{name} must be at least 1")


def open_pool(engine: str, options: PoolOptions) -> Pool:
    """An engine, ready to take jobs; UserError for options that it cannot have."""
    check(engine, options)
    module, _, name = ENGINES[engine].rpartition(".")
    return getattr(importlib.import_module(module), name)(options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that runs something."""
    engine = parser.add_argument_group("where runs run")
    add = engine.add_argument
    add("--engine", choices=sorted(ENGINES), default="local", help="default: local")
    add("--workers", type=int, help="runs at a time (default: what the GPUs hold, without GPUs 1)")
    add("--threads", type=int, help="threads per run (default: an equal share of the cores)")
    add(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="start each run by this command, such as 'accelerate launch --config_file FILE'; "
        "with {processes} in it only those runs that need several",
    )
    add("--address", help="ray: a cluster's address (default: Ray on this machine)")


def options(args: argparse.Namespace) -> tuple[str, PoolOptions]:
    """The engine and its options from a parsed command line."""
    return args.engine, PoolOptions(args.workers, args.threads, tuple(args.launch), args.address)


def stop_seconds() -> float:
    """Seconds that a run has to reach its next step and save when it is asked to stop: 120, or what
    the environment says. UserError if that is no number."""
    text = os.environ.get(STOP_SECONDS, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{STOP_SECONDS}: expected a number of seconds above 0, got {text!r}")
    return seconds


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; torch is not loaded.

    Without that variable, every GPU that nvidia-smi lists; parts of a GPU (MIG) must be named in
    the variable.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        words = [word.strip() for word in named.split(",")]
        return list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, words))
    return re.findall(r"^GPU (\d+):", _nvidia_smi("-L"), re.MULTILINE)


def gpu_memory() -> float | None:
    """Bytes of the smallest GPU that nvidia-smi lists; None without one."""
    listed = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes = [float(word) for word in re.findall(r"^\d+$", listed, re.MULTILINE)]
    return min(sizes) * 2**20 if sizes and visible_gpus() else None


def _nvidia_smi(*words: str) -> str:
    try:
        command = ["nvidia-smi", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def cores() -> int:
    """Cores that this process may use: those of its batch job, not of the node."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
