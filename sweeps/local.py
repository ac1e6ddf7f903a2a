"""Runs on this machine (`--engine local`): processes of the standard library.

A slot is a pool of one process, so that a killed process costs its own run only. It imports torch
once and serves one run after another with its GPUs, or its share of one. Runs start in the order in
which they came; one that has no room yet holds back those behind it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from fractions import Fraction
from multiprocessing import resource_tracker
from typing import Any

from sweeps import task
from sweeps.pool import Job, Needs, Pool, PoolOptions, cores, visible_gpus
from training.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_SECONDS = 5.0  # for an idle process to end and leave its GPU


@dataclass(eq=False)
class _Worker:
    """A process and the GPUs that it was started for."""

    devices: tuple[str, ...]
    executor: ProcessPoolExecutor
    process: Any


@dataclass(eq=False)
class _Run:
    """A job in the pool's hands."""

    job: Job
    needs: Needs
    share: Fraction
    """GPUs, or a part of one."""
    cpus: int
    future: Future[dict[str, Any]] = field(default_factory=Future)
    devices: tuple[str, ...] = ()
    worker: _Worker | None = None
    started: bool = False


class LocalPool(Pool):
    """Packs runs on this machine's GPUs; without GPUs `workers` runs at a time, by default one."""

    lost = (BrokenProcessPool,)

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self.free = dict.fromkeys(visible_gpus(), Fraction(1))
        self.workers = options.workers or (None if self.free else 1)
        self.cores = self.free_cores = cores()
        self.idle: list[_Worker] = []
        self.closed = False
        # Workers end with the thread that started them, so one thread starts them all. It leaves
        # the signals to the main thread; a worker has its own session before it listens.
        resource_tracker.ensure_running()
        self.desk = ThreadPoolExecutor(
            1, initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, _SIGNALS)
        )

    @property
    def slots(self) -> int:
        """Runs here, and one more while something is free."""
        with self.lock:
            free = len(self.runs) < self.workers if self.workers else self.free_cores > 0
            waits = not all(run.started for run in self.runs)
            full = self.free and not any(self.free.values())
            return len(self.runs) + (free and not waits and not full)

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The run's summary to come; UserError where this machine could not hold the run."""
        if needs.nodes > 1:
            raise UserError(
                f"{job.name} needs {needs.nodes} nodes; --engine local has this machine only: use "
                "--engine ray"
            )
        share = self._share(needs)
        if share > len(self.free) > 0:
            raise UserError(
                f"{job.name} needs {needs.gpus:g} GPUs, but {len(self.free)} are visible here; "
                "lower `needs` in the sweep file or use --engine ray"
            )
        cpus = 0 if self.workers else min(needs.cpus, self.cores)
        job = replace(job, threads=job.threads or self._threads(needs, share))
        run = _Run(job, needs, share, cpus)
        with self.lock:
            self.runs.append(run)
            self._place()
        return run.future

    def _stop(self, at_once: bool) -> None:
        for run in list(self.runs):
            if run.started:
                self._end_process(run)
            else:
                self.runs.remove(run)
                task.resolve(run.future, task.STOPPED)

    def _close(self, wait: bool) -> None:
        with self.lock:
            self.closed = True
            idle, self.idle = self.idle, []
        for worker in idle:
            worker.executor.shutdown(wait)
        if wait:
            self.desk.shutdown()

    def _end_process(self, run: _Run) -> None:
        if run.worker is not None:
            (run.worker.process.terminate if self.stops == 1 else run.worker.process.kill)()

    def _share(self, needs: Needs) -> Fraction:
        """GPUs of a run. `workers` at a time have room, so they share GPUs where they must; what a
        launch command starts has an equal part of the machine unless its needs say more."""
        count, each = len(self.free), self.workers or 1
        share = Fraction(needs.gpus).limit_denominator(1000)
        if not count:
            return Fraction(0)
        launched = self.options.launch and not task.only_several(self.options.launch)
        if launched and needs.processes == 1:
            return Fraction(max(1, count // each))
        return min(share, Fraction(1, -(-each // count))) if share <= 1 else share

    def _threads(self, needs: Needs, share: Fraction) -> int:
        """Threads of each process of a run: all that may run at a time have as many cores."""
        if self.options.threads:
            return self.options.threads
        if self.workers:
            own = Fraction(self.cores, self.workers)
        else:
            own = max(self.cores * share / len(self.free), Fraction(min(needs.cpus, self.cores)))
        processes = max(needs.processes, task.said_of_all(self.options.launch))
        return max(1, int(own / processes))

    def _place(self) -> None:
        """Starts waiting runs in turn while there is room."""
        for run in self.runs:
            if not run.started:
                run.started = self._take(run)
                if not run.started:
                    return
                self.desk.submit(self._start, run)

    def _take(self, run: _Run) -> bool:
        """Sets a run's GPUs and cores aside; False while they are not free."""
        running = sum(run.started for run in self.runs)
        if (self.workers and running >= self.workers) or run.cpus > self.free_cores:
            return False
        room = [gpu for gpu, free in self.free.items() if free >= min(run.share, 1)]
        if run.share < 1:
            room.sort(key=self.free.__getitem__)  # fills a GPU before it opens another one
        count = -(-run.share // 1)
        if len(room) < count:
            return False
        run.devices = tuple(room[:count])
        self._account(run, -1)
        return True

    def _account(self, run: _Run, sign: int) -> None:
        self.free_cores += sign * run.cpus
        for gpu in run.devices:
            self.free[gpu] += sign * min(run.share, Fraction(1))

    def _start(self, run: _Run) -> None:
        """Hands a run to a worker, on the desk's thread."""
        words = task.perform, run.job, run.needs, self.options.launch
        try:
            worker = self._idle(run) or self._spawn(run.devices)
            try:
                done = worker.executor.submit(*words)
            except BrokenProcessPool:  # it died while it had nothing to do
                worker = self._spawn(run.devices)
                done = worker.executor.submit(*words)
            with self.lock:
                run.worker = worker
                if self.stops:
                    self._end_process(run)
        except BaseException as error:
            done = Future[dict[str, Any]]()
            done.set_exception(error)
        done.add_done_callback(lambda done: self._tell(run, done))

    def _tell(self, run: _Run, done: Future[dict[str, Any]]) -> None:
        with contextlib.suppress(RuntimeError):  # interrupted twice, Python takes the desk down
            self.desk.submit(self._end, run, done)

    def _idle(self, run: _Run) -> _Worker | None:
        """An idle worker of the run's GPUs; ends those that are in the way of the run.

        A run of whole GPUs has them alone: an idle process holds memory there, too.
        """
        alone = run.share >= 1
        with self.lock:
            found = next((w for w in self.idle if w.devices == run.devices), None)
            ended = [
                worker
                for worker in self.idle
                if worker is not found
                and (alone or found is None)
                and set(worker.devices) & set(run.devices)
            ]
            self.idle = [w for w in self.idle if w is not found and w not in ended]
        for worker in ended:
            worker.executor.shutdown(wait=False)
        for worker in ended if alone else ():
            worker.process.join(EXIT_SECONDS)
        return found

    def _spawn(self, devices: tuple[str, ...]) -> _Worker:
        """A new process; what CUDA reads when it starts is in its environment before that."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if self.free else {}
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(1, context, task.begin, (os.getpid(), own))
        executor.submit(os.getpid)  # the process starts now
        (process,) = set(multiprocessing.active_children()) - others
        return _Worker(devices, executor, process)

    def _end(self, run: _Run, done: Future[dict[str, Any]]) -> None:
        """Frees what a run held, starts what waits for it, and tells the driver."""
        error, worker = done.exception(), run.worker
        if worker is not None and isinstance(error, BrokenProcessPool):
            end = time.monotonic() + 1.0  # the executor's own thread may be the one that is told
            while worker.process.exitcode is None and time.monotonic() < end:
                time.sleep(0.01)
            error = BrokenProcessPool(
                f"the worker process ended with code {worker.process.exitcode}; the end of "
                f"{run.job.run_dir / 'log.txt'}:\n{task.log_tail(run.job.run_dir)}"
            )
        with self.lock:
            if worker is not None and (error is not None or self.closed):
                worker.executor.shutdown(wait=False)
            elif worker is not None:
                self.idle.append(worker)
            self.runs.remove(run)
            self._account(run, +1)
            self._place()
            asked = self.stops == 1
        if asked and isinstance(error, (BrokenProcessPool, KeyboardInterrupt)):
            task.resolve(run.future, task.STOPPED)  # asked before the run could listen
        elif error is not None:
            run.future.set_exception(error)
        else:
            task.resolve(run.future, done.result())
