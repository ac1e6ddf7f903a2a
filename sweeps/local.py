"""Runs on this machine (`--engine local`): processes of the standard library.

A slot is a pool of one process, so that a killed process costs its own run only. It imports torch
once and serves one run after another with its threads and its GPUs, or its share of one. Runs start
in the order in which they came; one that has no room yet holds back those behind it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import resource_tracker
from typing import Any

from sweeps import task
from sweeps.pool import Job, Needs, PoolOptions, cores, stop_seconds, visible_gpus
from training.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WHOLE = Fraction(1)
EXIT_SECONDS = 5.0  # for an idle process to end and leave its GPU


@dataclass
class _Worker:
    """A process and the part of the machine that it was started for."""

    devices: tuple[str, ...]
    threads: int
    executor: ProcessPoolExecutor
    process: Any

    def perform(
        self, job: Job, needs: Needs, launch: Sequence[str]
    ) -> Future[dict[str, Any]]:
        return self.executor.submit(task.perform, job, needs, launch)


@dataclass(eq=False)
class _Run:
    """A job in the pool's hands."""

    job: Job
    needs: Needs
    share: Fraction
    """GPUs, or a part of one."""
    cpus: int
    future: Future[dict[str, Any]]
    devices: tuple[str, ...] = ()
    worker: _Worker | None = None


class LocalPool:
    """Packs runs on this machine's GPUs; without GPUs `workers` runs at a time, by default one."""

    lost = (BrokenProcessPool,)

    def __init__(self, options: PoolOptions) -> None:
        stop_seconds()  # a mistake in it shows before the first run
        self.launch = options.launch
        self.free = dict.fromkeys(visible_gpus(), _WHOLE)
        self.workers = options.workers or (None if self.free else 1)
        self.cores = self.free_cores = cores()
        at_once = self.workers or len(self.free)
        self.threads = options.threads or max(1, self.cores // at_once)
        self.waiting: deque[_Run] = deque()
        self.running: set[_Run] = set()
        self.idle: list[_Worker] = []
        self.lock = threading.RLock()
        self.stops = 0
        self.closed = False
        self.deadline: threading.Timer | None = None
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
            held = len(self.running) + len(self.waiting)
            free = self.workers is None or held < self.workers
            if self.free and self.workers is None:
                free = self.free_cores > 0
            if self.free and not any(self.free.values()):
                free = False
            return held + (free and not self.waiting)

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The run's summary to come; UserError where this machine could not hold the run."""
        if needs.nodes > 1:
            raise UserError(
                f"{job.name} needs {needs.nodes} nodes; --engine local has this machine only: use "
                "--engine slurm or ray"
            )
        share = self._share(needs)
        if share > len(self.free) > 0:
            raise UserError(
                f"{job.name} needs {needs.gpus:g} GPUs, but {len(self.free)} are visible here; "
                "lower `needs` in the sweep file or use --engine slurm or ray"
            )
        cpus = min(needs.cpus, self.cores) if self.workers is None else 0
        run = _Run(job, needs, share, cpus, Future())
        with self.lock:
            self.waiting.append(run)
            self._place()
        return run.future

    def stop(self) -> None:
        """Has every run save and end; what is left after stop_seconds(), or now if called again,
        is killed."""
        with self.lock:
            self.stops += 1
            first = self.stops == 1
            waiting, self.waiting = self.waiting, deque()
            workers = [run.worker for run in self.running if run.worker is not None]
            if first and workers:
                self.deadline = threading.Timer(stop_seconds(), self.stop)
                self.deadline.daemon = True
                self.deadline.start()
        for run in waiting:
            run.future.set_result({"status": "stopped"})
        for worker in workers:
            self._end_process(worker)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers, each after the run that it may be at work on."""
        with self.lock:
            self.closed = True
            if cancel_futures:
                for run in self.waiting:
                    run.future.cancel()
                self.waiting.clear()
            idle, self.idle = self.idle, []
            futures = [run.future for run in (*self.running, *self.waiting)]
        for worker in idle:
            worker.executor.shutdown(wait)
        if wait:
            wait_for(futures)
            self.desk.shutdown()
            if self.deadline is not None:
                self.deadline.cancel()

    def _end_process(self, worker: _Worker) -> None:
        (worker.process.terminate if self.stops == 1 else worker.process.kill)()

    def _share(self, needs: Needs) -> Fraction:
        """GPUs of a run. `workers` at a time have room, so they share GPUs where they must; what a
        launch command starts has an equal part of the machine unless its needs say more."""
        count = len(self.free)
        if not count:
            return Fraction(0)
        share = Fraction(needs.gpus).limit_denominator(1000)
        each = self.workers or 1
        if self.launch and needs.processes == 1 and not task.only_several(self.launch):
            return Fraction(max(1, count // each))
        return min(share, Fraction(1, -(-each // count))) if share <= 1 else share

    def _place(self) -> None:
        """Starts waiting runs in turn while there is room."""
        while self.waiting and self._take(self.waiting[0]):
            run = self.waiting.popleft()
            self.running.add(run)
            self.desk.submit(self._start, run)

    def _take(self, run: _Run) -> bool:
        """Sets a run's GPUs and cores aside; False while they are not free."""
        if self.workers is not None and len(self.running) >= self.workers:
            return False
        if run.cpus > self.free_cores:
            return False
        room = [gpu for gpu, free in self.free.items() if free >= min(run.share, _WHOLE)]
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
            self.free[gpu] += sign * min(run.share, _WHOLE)

    def _start(self, run: _Run) -> None:
        """Hands a run to a worker, on the desk's thread."""
        try:
            threads = run.job.threads or self.threads
            worker = self._worker(run, threads)
            try:
                done = worker.perform(run.job, run.needs, self.launch)
            except BrokenProcessPool:  # it died while it had nothing to do
                worker = self._spawn(run.devices, threads)
                done = worker.perform(run.job, run.needs, self.launch)
        except BaseException as error:
            self._finish(run, error=error)
            return
        with self.lock:
            run.worker = worker
            if self.stops:
                self._end_process(worker)
        done.add_done_callback(lambda ended: self.desk.submit(self._end, run, worker, ended))

    def _worker(self, run: _Run, threads: int) -> _Worker:
        """An idle worker of the run's GPUs and threads, or a new one in place of those on its GPUs.

        A run of whole GPUs has them alone: an idle process holds memory there, too.
        """
        alone = run.share >= 1
        with self.lock:
            found = next(
                (w for w in self.idle if (w.devices, w.threads) == (run.devices, threads)), None
            )
            ended = [
                worker for worker in self.idle
                if worker is not found and (alone or found is None)
                and (set(worker.devices) & set(run.devices) or not run.devices)
            ]  # fmt: skip
            self.idle = [w for w in self.idle if w is not found and w not in ended]
        for worker in ended:
            worker.executor.shutdown(wait=False)
        for worker in ended if alone else ():
            worker.process.join(EXIT_SECONDS)
        return found or self._spawn(run.devices, threads)

    def _spawn(self, devices: tuple[str, ...], threads: int) -> _Worker:
        """A new process; what torch reads on import is in its environment from the start."""
        own = {"OMP_NUM_THREADS": str(threads)}
        if self.free:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(1, context, task.begin, (os.getpid(),))
        with _environment(own):
            executor.submit(os.getpid)  # the process starts now
        (process,) = set(multiprocessing.active_children()) - others
        return _Worker(devices, threads, executor, process)

    def _end(self, run: _Run, worker: _Worker, done: Future[dict[str, Any]]) -> None:
        error = done.exception()
        if error is not None:
            worker.executor.shutdown(wait=False)
            if isinstance(error, BrokenProcessPool):
                worker.process.join(1.0)
                error = BrokenProcessPool(
                    f"the worker process ended with code {worker.process.exitcode}; the end of "
                    f"{run.job.run_dir / 'log.txt'}:\n{task.log_tail(run.job.run_dir)}"
                )
            self._finish(run, error=error)
            return
        with self.lock:
            if self.closed:
                worker.executor.shutdown(wait=False)
            else:
                self.idle.append(worker)
        self._finish(run, done.result())

    def _finish(
        self, run: _Run, outcome: dict[str, Any] | None = None, error: BaseException | None = None
    ) -> None:
        """Frees what a run held, starts what waits for it, and tells the driver."""
        with self.lock:
            self.running.remove(run)
            self._account(run, +1)
            self._place()
            asked = self.stops == 1
        if asked and isinstance(error, (*self.lost, KeyboardInterrupt)):
            outcome = task.STOPPED  # its process was asked before the run could listen
        if outcome is not None:
            task.resolve(run.future, outcome)
        else:
            run.future.set_exception(error)


@contextlib.contextmanager
def _environment(own: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

