"""Where runs run: the interface of every engine, what a run needs there, and the cards there are.

    pool = open_pool("local", PoolOptions(workers=2))
    future = pool.submit(job, needs)      # while fewer than pool.slots are in flight

An engine has the interface of `concurrent.futures.Executor`, plus `slots` and `stop`.
A future holds the run's summary, or raises

- one of `pool.lost`: the worker or node died, not the run; submitted again, the run resumes;
- RunFailed: the run ended for a reason of its own;
- Busy: another process trains this run, for instance on a node that was cut off;
- RunError: the run's folder cannot be used;
- any other UserError: a mistake of the user's, or the engine is gone. It ends the sweep.

Torch is not imported here, so that a driver starts in a second.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
import subprocess
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from training.errors import UserError
from training.runs import Summary

NODE = 8  # GPUs of a machine
STOP_SECONDS = "TRAINING_STOP_SECONDS"  # a variable: large models take longer to save


class Card(NamedTuple):
    """A GPU: dense peaks in FLOP/s by precision of the products, memory in bytes."""

    name: str
    bf16: float
    fp16: float
    fp32: float
    memory: float


CARDS = (  # from the datasheets of NVIDIA
    Card("H100", 989e12, 989e12, 67e12, 80e9),  # SXM
    Card("A100", 312e12, 312e12, 19.5e12, 80e9),  # SXM
    # Ada whitepaper: half-precision products that are summed in fp32, as torch's.
    Card("RTX 4090", 165.2e12, 165.2e12, 82.6e12, 24e9),
    Card("L4", 121e12, 121e12, 30.3e12, 24e9),  # half of the rates with sparsity
    # A T4 has no units for bf16: what torch does in it takes as long as fp32.
    Card("T4", 8.1e12, 65e12, 8.1e12, 16e9),
)


@dataclass(frozen=True)
class Needs:
    """What one run takes, all its processes together. A place without GPUs ignores `gpus`."""

    gpus: int = 1
    """Above NODE those of whole machines."""
    processes: int = 1
    """Above 1 the run is started by `accelerate launch`, sharded unless --launch says otherwise."""

    @property
    def nodes(self) -> int:
        """Machines, each with an equal part of the rest."""
        return max(1, self.gpus // NODE)

    def lacks(self, count: int) -> bool:
        """Whether a place of so many GPUs is too small; without any, one machine is enough."""
        return self.gpus > count and (count > 0 or self.nodes > 1)


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
        """The job to resubmit once a run has begun: it resumes from its own checkpoints even if
        its config says checkpoint.resume=never."""
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


@dataclass(frozen=True)
class PoolOptions:
    """What a user says about the place where runs run."""

    workers: int | None = None
    threads: int | None = None
    launch: tuple[str, ...] = ()
    address: str | None = None


class Pool(ABC):
    """An engine: a place for runs that are told to stop. Only the thread that opened it submits."""

    lost: tuple[type[BaseException], ...]

    def __init__(self, options: PoolOptions) -> None:
        stop_seconds()  # a mistake in it shows before the first run
        self.options = options
        self.held: list[Any] = []  # the runs in its hands, each with its future
        self.lock = threading.RLock()
        self.stops = 0
        self.deadline: threading.Timer | None = None

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many jobs are worth having in flight now, those that are included."""

    @abstractmethod
    def submit(self, job: Job, needs: Needs) -> Future[Summary]:
        """The summary to come; UserError where no place could ever hold the run."""

    @abstractmethod
    def _stop(self, at_once: bool) -> None:
        """Asks all runs to save, or ends them, with the lock held."""

    @abstractmethod
    def _close(self, wait: bool) -> None:
        """Gives back what the engine holds."""

    def stop(self) -> None:
        """Has every run save and end, whose summary then says `stopped`.

        What is left after stop_seconds(), or now if called again, is ended at once.
        """
        with self.lock:
            self.stops += 1
            if self.stops == 1:
                self.deadline = threading.Timer(stop_seconds(), self.stop)
                self.deadline.daemon = True
                with suppress(RuntimeError):  # no thread can be started: stop again by hand
                    self.deadline.start()
            self._stop(at_once=self.stops > 1)

    def shutdown(self, wait: bool = True) -> None:
        """Ends what the pool has started here; with `wait`, only after its runs have ended."""
        with self.lock:
            futures = [run.future for run in self.held]
        if wait:
            wait_for(futures)
        if self.deadline is not None:
            self.deadline.cancel()
        self._close(wait)


ENGINES = {"local": "sweeps.local.LocalPool", "ray": "sweeps.on_ray.RayPool"}


def check(engine: str, options: PoolOptions) -> None:
    """Raises UserError for options that an engine cannot have."""
    if options.address is not None and engine != "ray":
        raise UserError("--address goes with --engine ray")
    for name, value in (("workers", options.workers), ("threads", options.threads)):
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1")


def open_pool(engine: str, options: PoolOptions) -> Pool:
    """An engine, ready to take jobs; UserError for options that it cannot have."""
    check(engine, options)
    module, _, name = ENGINES[engine].rpartition(".")
    return getattr(importlib.import_module(module), name)(options)


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

    Without that variable, every GPU that nvidia-smi lists; it alone can name parts of one (MIG).
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        words = [word.strip() for word in named.split(",")]
        return list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, words))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


def cores() -> int:
    """Cores that this process may use: those of its batch job, not of the node."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
