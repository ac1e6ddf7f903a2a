"""Runs on this machine (`--engine local`): processes of the standard library.

A thread for each run at a time has a pool of one process, so that a killed process costs its own
run only. It imports torch once and serves one run after another on its GPUs.
"""

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from sweeps import task
from sweeps.pool import Job, Needs, Pool, PoolOptions, cores, visible_gpus
from training.errors import UserError
from training.runs import Summary

EXIT_SECONDS = 5.0  # for an idle process to end and leave its GPUs
LOOK_SECONDS = 1.0  # between looks at whether a run's executor can still end it
THREADS = (
    "--engine local: no further thread can be started here (`ulimit -u` and `ulimit -v` say how "
    "many and how much memory); give a smaller --workers"
)
STARTS = 3  # processes in a row that may die before they can take a run: the next would, too


class _Worker:
    """A process that serves one run after another on the GPUs that it was started for."""

    def __init__(self, devices: tuple[str, ...], starting: threading.Lock) -> None:
        # CUDA reads this variable when it starts, so it must be set in the new process before.
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        self.devices = devices
        with starting:
            others = set(multiprocessing.active_children())
            self.executor = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), task.begin, (os.getpid(), environment)
            )
            try:
                self.begun = self.executor.submit(os.getpid)  # the process starts now
            except RuntimeError:
                for process in set(multiprocessing.active_children()) - others:
                    process.kill()  # nobody would tell it to end
                    process.join()
                raise UserError(THREADS) from None
            new = set(multiprocessing.active_children()) - others
            self.process: BaseProcess | None = next(iter(new), None)  # or it is gone already

    def end(self, dead: bool = False) -> None:
        # With a dead process, wait for the executor's thread, which ends at once. Otherwise it may
        # close its pipe while Python writes to that pipe at exit.
        self.executor.shutdown(wait=dead)
        if self.process is not None:
            self.process.join(EXIT_SECONDS)
            self.process.kill()  # it has nothing to do
            self.process.join()


@dataclass(eq=False)
class _Held:
    """A run in the pool's hands."""

    job: Job
    needs: Needs
    future: Future[Summary] = field(default_factory=Future)
    placed: bool = False
    worker: _Worker | None = None


class LocalPool(Pool):
    """Runs on this machine's GPUs, `workers` at a time; without GPUs one, unless told otherwise.

    With more workers than GPUs, several runs share each GPU. Runs get GPUs in the order in which
    they were submitted: a run that does not fit yet blocks those behind it.
    """

    lost = (BrokenProcessPool,)

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        gpus, self.cores = visible_gpus(), cores()
        self.workers = options.workers or len(gpus) or 1
        self.seats = -(-self.workers // len(gpus)) if gpus else 0
        self.free = dict.fromkeys(gpus, self.seats)
        self.changed = threading.Condition(self.lock)
        self.dead_starts, self.several = 0, False
        self.of_thread, self.starting = threading.local(), threading.Lock()
        # Processes end with the thread that started them. They inherit which signals it blocks,
        # and listen once they have a session of their own.
        resource_tracker.ensure_running()
        mask = signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM)
        self.threads = ThreadPoolExecutor(self.workers, "run", signal.pthread_sigmask, mask)
        self.starved, self.hook, all_started = False, threading.excepthook, threading.Event()
        try:
            for _ in range(self.workers):
                self.threads.submit(all_started.wait)
        except RuntimeError:
            raise UserError(THREADS) from None
        finally:
            all_started.set()
        threading.excepthook = self._thread_died

    @property
    def slots(self) -> int:
        return self.workers

    def submit(self, job: Job, needs: Needs) -> Future[Summary]:
        """The run's summary to come; UserError where this machine could not hold the run."""
        launch, count = self.options.launch, len(self.free)
        if launch and not task.only_several(launch) and needs.processes == 1:
            # What a launch command starts has an equal part of the machine.
            needs = replace(needs, gpus=max(1, count // (self.options.workers or 1)))
        if needs.lacks(count):
            raise UserError(
                f"{job.name} needs {needs.gpus} GPUs, but {count} are visible here; lower `gpus` "
                "in the sweep file or use --engine ray"
            )
        # Concurrent runs share the cores equally, and so do the processes of one run.
        by_gpu = count and not self.options.workers
        part = self.cores * needs.gpus // count if by_gpu else self.cores // self.workers
        share = part // max(needs.processes, task.processes_of_all(launch))
        threads = job.threads or self.options.threads or max(1, share)
        run = _Held(replace(job, threads=threads), needs)
        with self.lock:
            self.held.append(run)
            self.several = self.several or needs.gpus > 1
        self.threads.submit(self._serve, run)
        return run.future

    def _stop(self, at_once: bool) -> None:
        for run in self.held:
            self._end_process(run)
        self.changed.notify_all()

    def _thread_died(self, what: threading.ExceptHookArgs) -> None:
        """An executor whose thread cannot start one of its own never ends its runs."""
        if isinstance(what.exc_value, RuntimeError):
            self.starved = True
        else:
            self.hook(what)

    def _close(self, wait: bool) -> None:
        self.threads.shutdown(wait)
        threading.excepthook = self.hook

    def _end_process(self, run: _Held) -> None:
        if run.worker is not None and run.worker.process is not None:
            (run.worker.process.terminate if self.stops == 1 else run.worker.process.kill)()

    def _serve(self, run: _Held) -> None:
        """A run from its place to its end, on a thread of its own."""
        devices, outcome = self._take(run), task.STOPPED
        error: BaseException | None = None
        try:
            if not self.stops:
                outcome = self._perform(run, devices)
        except BrokenProcessPool:
            error = self._death(run)
        except BaseException as other:
            error = other
        with self.changed:
            self.held.remove(run)
            for gpu in devices:
                self.free[gpu] += self._seats(run)
            stopping = self.stops == 1
            self.changed.notify_all()
        if stopping and isinstance(error, (BrokenProcessPool, KeyboardInterrupt)):
            task.resolve(run.future, task.STOPPED)  # told before the run could listen
        elif error is not None:
            run.future.set_exception(error)
        else:
            task.resolve(run.future, outcome)

    def _seats(self, run: _Held) -> int:
        """The seats that a run takes on each of its GPUs: one, or all if it has several GPUs."""
        return self.seats if run.needs.gpus > 1 else 1

    def _take(self, run: _Held) -> tuple[str, ...]:
        """Waits until the runs before this one have their GPUs, and its own are free."""
        count = run.needs.gpus if self.free else 0
        with self.changed:
            while not self.stops:
                room = [gpu for gpu, free in self.free.items() if free >= self._seats(run)]
                if (
                    next(held for held in self.held if not held.placed) is run
                    and len(room) >= count
                ):
                    run.placed = True
                    room.sort(key=self.free.__getitem__)  # fills a GPU before it opens another one
                    devices = tuple(gpu for gpu in self.free if gpu in room[:count])
                    for gpu in devices:
                        self.free[gpu] -= self._seats(run)
                    self.changed.notify_all()
                    return devices
                self.changed.wait()
        return ()

    def _perform(self, run: _Held, devices: tuple[str, ...]) -> task.Outcome:
        """The outcome of a run in this thread's process, or a new one where that has other GPUs."""
        words = run.job, run.needs, self.options.launch
        worker: _Worker | None = getattr(self.of_thread, "worker", None)
        if worker is not None and worker.devices != devices:
            worker.end()
            worker = None
        try:
            worker = worker or _Worker(devices, self.starting)
            done = worker.executor.submit(task.perform, *words)
        except BrokenProcessPool:  # it died while it had nothing to do
            worker = _Worker(devices, self.starting)
            done = worker.executor.submit(task.perform, *words)
        with self.lock:
            run.worker = self.of_thread.worker = worker
            if self.stops:
                self._end_process(run)
        starved = UserError(THREADS)
        error: BaseException | None = starved
        try:
            while not wait((done,), LOOK_SECONDS).done:
                if self.starved:
                    self._end_process(run)
                    raise starved
            error = done.exception()
            return done.result()
        finally:
            # An idle process holds memory of its GPU, which a run of several would have alone.
            if error is not None or self.several:
                worker.end(dead=isinstance(error, BrokenProcessPool))
                self.of_thread.worker = None

    def _death(self, run: _Held) -> Exception:
        """What a run's process has died of; UserError if several have died as they started."""
        worker, code = run.worker, None
        if worker is not None and worker.process is not None:
            worker.process.join(1.0)
            code = worker.process.exitcode
        if worker is not None and worker.begun.done() and worker.begun.exception() is None:
            self.dead_starts = 0
            log = run.job.run_dir / "log.txt"
            return BrokenProcessPool(
                f"the worker process ended with code {code}; the end of {log}:\n"
                f"{task.log_tail(run.job.run_dir)}"
            )
        self.dead_starts += 1
        if self.dead_starts < STARTS or self.stops:
            return BrokenProcessPool(f"the worker process died as it started, with code {code}")
        return UserError(
            f"--engine local: the last {STARTS} processes of {sys.executable} died as they start; "
            "see what `python -c 'import sweeps.task'` says, then give the same command again"
        )
