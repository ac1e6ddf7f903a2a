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
import sys
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from fractions import Fraction
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from sweeps import task
from sweeps.pool import Job, Needs, Pool, PoolOptions, cores, visible_gpus
from training.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_SECONDS = 5.0  # for an idle process to end and leave its GPU
STARTS = 3  # processes in a row that may die before they can take a run: the next would, too


@dataclass(eq=False)
class _Worker:
    """A process and the GPUs that it was started for."""

    devices: tuple[str, ...]
    executor: ProcessPoolExecutor
    begun: Future[int]
    process: BaseProcess | None
    """None if it was gone before it could be looked at."""


@dataclass(eq=False)
class _Held:
    """A run in the pool's hands."""

    job: Job
    needs: Needs
    share: Fraction
    """GPUs, or a part of one."""
    future: Future[dict[str, Any]] = field(default_factory=Future)
    devices: tuple[str, ...] = ()
    worker: _Worker | None = None
    started: bool = False


class LocalPool(Pool):
    """Packs runs on this machine's GPUs, a core each; without GPUs one at a time by default."""

    lost = (BrokenProcessPool,)

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self.free = dict.fromkeys(visible_gpus(), Fraction(1))
        self.cores = cores()
        self.workers = options.workers or (self.cores if self.free else 1)
        self.held: list[_Held] = []
        self.idle: list[_Worker] = []
        self.dead_starts = 0
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
            waits = not all(run.started for run in self.held)
            full = len(self.held) >= self.workers or (self.free and not any(self.free.values()))
            return len(self.held) + (not waits and not full)

    @property
    def futures(self) -> list[Future[dict[str, Any]]]:
        """Of the runs here."""
        return [run.future for run in self.held]

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The run's summary to come; UserError where this machine could not hold the run."""
        share = self._share(needs)
        if share > len(self.free) > 0 or needs.nodes > 1 > len(self.free):
            raise UserError(
                f"{job.name} needs {needs.gpus:g} GPUs, but {len(self.free)} are visible here; "
                "lower `gpus` in the sweep file or use --engine ray"
            )
        job = replace(job, threads=job.threads or self._threads(needs, share))
        run = _Held(job, needs, share)
        with self.lock:
            self.held.append(run)
            self._place()
        return run.future

    def _stop(self, at_once: bool) -> None:
        for run in list(self.held):
            if run.started:
                self._end_process(run)
            else:
                self.held.remove(run)
                task.resolve(run.future, task.STOPPED)

    def _close(self, wait: bool) -> None:
        with self.lock:
            self.closed = True
            idle, self.idle = self.idle, []
        for worker in idle:
            worker.executor.shutdown(wait)
        if wait:
            self.desk.shutdown()

    def _end_process(self, run: _Held) -> None:
        if run.worker is not None and run.worker.process is not None:
            (run.worker.process.terminate if self.stops == 1 else run.worker.process.kill)()

    def _share(self, needs: Needs) -> Fraction:
        """GPUs of a run. `workers` at a time have room, so they share GPUs where they must; what a
        launch command starts has an equal part of the machine unless the run needs several."""
        count, each = len(self.free), self.options.workers or 1
        share = Fraction(needs.gpus).limit_denominator(1000)
        if not count:
            return Fraction(0)
        of_all = self.options.launch and not task.only_several(self.options.launch)
        if of_all and needs.processes == 1:
            return Fraction(max(1, count // each))
        return min(share, Fraction(1, -(-each // count))) if share <= 1 else share

    def _threads(self, needs: Needs, share: Fraction) -> int:
        """Threads of each process of a run: all that may run at a time have as many cores."""
        if self.options.threads:
            return self.options.threads
        if self.options.workers or not self.free:
            part = Fraction(self.cores, self.workers)
        else:
            part = self.cores * share / len(self.free)
        return max(1, int(part / max(needs.processes, task.processes_of_all(self.options.launch))))

    def _place(self) -> None:
        """Starts waiting runs in turn while there is room."""
        for run in self.held:
            if not run.started:
                run.started = self._take(run)
                if not run.started:
                    return
                self.desk.submit(self._start, run)

    def _take(self, run: _Held) -> bool:
        """Sets a run's GPUs aside; False while they are not free."""
        if sum(run.started for run in self.held) >= self.workers:
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

    def _account(self, run: _Held, sign: int) -> None:
        for gpu in run.devices:
            self.free[gpu] += sign * min(run.share, Fraction(1))

    def _start(self, run: _Held) -> None:
        """Hands a run to a worker, on the desk's thread."""
        words = task.perform, run.job, run.needs, self.options.launch
        try:
            run.worker = self._idle(run) or self._spawn(run.devices)
            try:
                done = run.worker.executor.submit(*words)
            except BrokenProcessPool:  # it died while it had nothing to do
                run.worker = self._spawn(run.devices)
                done = run.worker.executor.submit(*words)
            with self.lock:
                if self.stops:
                    self._end_process(run)
        except BaseException as error:
            done = Future[dict[str, Any]]()
            done.set_exception(error)
        done.add_done_callback(lambda done: self._tell(run, done))

    def _tell(self, run: _Held, done: Future[dict[str, Any]]) -> None:
        with contextlib.suppress(RuntimeError):  # interrupted twice, Python takes the desk down
            self.desk.submit(self._end, run, done)

    def _idle(self, run: _Held) -> _Worker | None:
        """An idle worker of the run's GPUs; ends those that are in the way of the run.

        A run of whole GPUs has them alone: an idle process holds memory there, too.
        """
        alone = run.share >= 1
        with self.lock:
            chosen = next((w for w in self.idle if w.devices == run.devices), None)
            ended = [
                worker
                for worker in self.idle
                if worker is not chosen
                and (alone or chosen is None)
                and set(worker.devices) & set(run.devices)
            ]
            self.idle = [w for w in self.idle if w is not chosen and w not in ended]
        for worker in ended:
            worker.executor.shutdown(wait=False)
        for worker in ended if alone else ():
            if worker.process is not None:
                worker.process.join(EXIT_SECONDS)
        return chosen

    def _spawn(self, devices: tuple[str, ...]) -> _Worker:
        """A new process; what CUDA reads when it starts is in its environment before that."""
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if self.free else {}
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(1, context, task.begin, (os.getpid(), environment))
        begun = executor.submit(os.getpid)  # the process starts now
        process = next(iter(set(multiprocessing.active_children()) - others), None)
        return _Worker(devices, executor, begun, process)

    def _end(self, run: _Held, done: Future[dict[str, Any]]) -> None:
        """Frees what a run held, starts what waits for it, and tells the driver."""
        error, worker = done.exception(), run.worker
        if isinstance(error, BrokenProcessPool):
            error = self._death(run)
        with self.lock:
            if worker is not None and (error is not None or self.closed):
                worker.executor.shutdown(wait=False)
            elif worker is not None:
                self.idle.append(worker)
            self.held.remove(run)
            self._account(run, +1)
            self._place()
            stopping = self.stops == 1
        if stopping and isinstance(error, (BrokenProcessPool, KeyboardInterrupt)):
            task.resolve(run.future, task.STOPPED)  # told before the run could listen
        elif error is not None:
            run.future.set_exception(error)
        else:
            task.resolve(run.future, done.result())

    def _death(self, run: _Held) -> BaseException:
        """What a run's process has died of; UserError if several have died as they started."""
        worker = run.worker
        code = None
        if worker is not None and worker.process is not None:
            worker.process.join(1.0)  # the executor's own thread may be the one that is told
            code = worker.process.exitcode
        if worker is not None and worker.begun.done() and worker.begun.exception() is None:
            self.dead_starts = 0
            return BrokenProcessPool(
                f"the worker process ended with code {code}; the end of "
                f"{run.job.run_dir / 'log.txt'}:\n{task.log_tail(run.job.run_dir)}"
            )
        self.dead_starts += 1
        if self.dead_starts < STARTS or self.stops:
            return BrokenProcessPool(f"the worker process died as it started, with code {code}")
        return UserError(
            f"--engine local: the last {STARTS} worker processes of {sys.executable} died as they "
            "started; see what `python -c 'import sweeps.task'` says, then give the same command "
            "again"
        )
