"""One driver for every sweep and search: ask what to run next, submit it, wait, write the tables.

A run's folder is its state. A run whose place died is submitted again and resumes from its newest
checkpoint; a run that fails by itself is tried again as often as the file says, and then reported
with the end of its log, while the rest goes on. Failures are counted in this process: the same
command, started again, tries such runs again.
"""

import queue
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass

from sweeps.pool import Job, Pool, RunFailed
from sweeps.progress import Board, last_line, say
from sweeps.sweep import Work, shortened
from sweeps.sweep_file import Point
from training.errors import RunError, UserError
from training.files import Busy, is_locked
from training.runs import Summary
from training.signals import StopRequest

TABLE_SECONDS = 5.0  # between two writings of the tables
TABLE_SHARE = 0.05  # of the driver's time at most: the tables of large sweeps take a second
LOOK_SECONDS = 0.5  # between looks at signals and at the runs at work
BUSY_SECONDS = 2.0  # until a run that another process holds is tried again
LOST = 5  # worker deaths without progress after which a run is given up


@dataclass(frozen=True)
class _Flight:
    """A run at work."""

    point: Point
    submitted_at: float
    from_step: int


class Driver:
    """Drives work through a pool."""

    def __init__(self, work: Work, pool: Pool) -> None:
        self.work, self.pool = work, pool
        self.board = Board(work)
        self.flights: dict[Future[Summary], _Flight] = {}
        # A SimpleQueue waits for ever if a signal comes as its timeout ends (CPython 3.11).
        self.ended: queue.Queue[Future[Summary]] = queue.Queue()
        self.postponed: list[tuple[float, Point]] = []  # other processes train them
        self.tries: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.named_busy: set[str] = set()
        self.started: set[str] = set()  # by this driver, so that what they have saved is its own
        self.tables_stale, self.written_at, self.write_seconds = False, time.monotonic(), 0.0

    def run(self) -> bool:
        """Runs what is left; whether it came to its end, and was not stopped.

        The first SIGTERM or Ctrl-C lets every run save and end; a second Ctrl-C ends them at once
        (KeyboardInterrupt). Raises UserError for a user's mistake, after the other runs have saved.
        """
        try:
            with StopRequest() as stop:
                self._drive(stop)
        except BaseException as error:
            self.pool.stop()
            if isinstance(error, Exception):
                while self.flights:  # waits until the other runs have saved
                    del self.flights[self.ended.get()]
            self.pool.shutdown(wait=isinstance(error, Exception))
            raise
        self.pool.shutdown()
        self.work.write(final=True)
        return not stop.requested

    def _drive(self, stop: StopRequest) -> None:
        """The loop; returns when all is done, or was stopped and has saved."""
        self.work.write(final=False)
        stopping = False
        while True:
            if stop.requested and not stopping:
                stopping = True
                say("stopping: runs save a checkpoint; interrupt again to end them now")
                self.pool.stop()
            waits = stopping or self._submit()
            if not self.flights and (stopping or not (waits or self.postponed)):
                return
            self._take()
            self._write_if_due()

    def _submit(self) -> bool:
        """Submits runs while slots are free; returns whether runs may be left to submit."""
        now = time.monotonic()
        for due, locked in [item for item in self.postponed if item[0] <= now]:
            self.postponed.remove((due, locked))
            if is_locked(self.work.folder / locked.run):  # on a cluster, another try is a job
                self.postponed.append((now + BUSY_SECONDS, locked))
            else:
                self.work.put_back(locked)
        while len(self.flights) < self.pool.slots:
            point = self.work.next()
            if point is None:
                return False
            folder = self.work.folder / point.run
            config = point.config.model_dump(mode="json")
            job = Job(point.run, self.work.file.config.experiment, config, folder)
            job = job.resumed() if point.run in self.started else job
            step = last_line(folder).get("step", 0)  # before it takes another one
            try:
                future = self.pool.submit(job, self.work.needs(point))
            except UserError as error:  # no place is large enough for it
                self._give_up(point, str(error))
                continue
            self.flights[future] = _Flight(point, time.monotonic(), step)
            future.add_done_callback(self.ended.put)
        return True

    def _take(self) -> None:
        """Waits for a run to end, then handles every run that has ended."""
        timeout = LOOK_SECONDS
        while True:
            try:
                future = self.ended.get(timeout=timeout)
            except queue.Empty:
                return
            timeout = 0.0
            self._end(self.flights.pop(future), future)

    def _end(self, flight: _Flight, future: Future[Summary]) -> None:
        """Records, retries or gives up one run that has ended."""
        point = flight.point
        if not isinstance(future.exception(), Busy):
            self.started.add(point.run)
        try:
            summary = future.result()
        except self.pool.lost as error:
            self._lost(flight, str(error) or type(error).__name__)
        except Busy as error:
            if point.run not in self.named_busy:
                self.named_busy.add(point.run)
                say(f"{error}; it will be tried again")
            self.postponed.append((time.monotonic() + BUSY_SECONDS, point))
        except RunError as error:
            self._give_up(point, str(error))
        except RunFailed as error:
            say(f"{point.run}: {error}")
            self.tries[point.run] += 1
            count = self.tries[point.run]
            if count <= self.work.file.config.retries:
                self.work.put_back(point)
            else:
                self._give_up(point, f"failed {count} times: {error}")
        else:
            if summary["status"] == "stopped":
                self.work.put_back(point)
                return
            self.work.record(point, shortened(summary))
            self.tables_stale = True
            seconds = time.monotonic() - flight.submitted_at
            trained = not flight.from_step and not summary.get("resumed_from")
            self.board.ended(point, seconds, trained, len(self.flights) + 1)

    def _lost(self, flight: _Flight, reason: str) -> None:
        """Requeues a run whose worker died; gives it up after LOST deaths without progress."""
        point = flight.point
        if last_line(self.work.folder / point.run).get("step", 0) > flight.from_step:
            self.losses[point.run] = 0
        else:
            self.losses[point.run] += 1
        if self.losses[point.run] < LOST:
            say(f"{point.run}: {reason}; it will be resumed")
            self.work.put_back(point)
        else:
            self._give_up(point, f"lost its worker {LOST} times without progress: {reason}")

    def _give_up(self, point: Point, reason: str) -> None:
        self.work.fail(point, reason)
        self.tables_stale = True
        say(f"{self.board.count()}  {self.work.outcome(point)}")

    def _write_if_due(self) -> None:
        """Writes the tables now and then, less often where that takes long."""
        begun = time.monotonic()
        pause = max(TABLE_SECONDS, self.write_seconds / TABLE_SHARE)
        if not self.tables_stale or begun - self.written_at < pause:
            return
        self.work.write(final=False)
        self.tables_stale, self.written_at = False, time.monotonic()
        self.write_seconds = self.written_at - begun
