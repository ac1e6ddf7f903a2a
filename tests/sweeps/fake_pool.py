"""A pool in this process: runs are done by threads, or one after the other in a shuffled order."""

import random
import threading
from concurrent.futures import Future
from pathlib import Path

from sweeps.pool import RunFailed
from training.config import validate
from training.errors import UserError


class Lost(Exception):
    """The place of a run died."""


class FakePool:
    """At most `slots` jobs at a time; which of them ends next is drawn from `seed`.

    `perform` does a job and returns its summary; by default it is the toy's own `run`, read from
    its file every time.
    """

    lost = (Lost,)

    def __init__(self, slots=2, seed=0, perform=None):
        self.slots, self.random = slots, random.Random(seed)
        self.perform = perform or perform_toy
        self.waiting, self.needs, self.stopped = [], {}, 0
        self.changed = threading.Condition()
        self.open = True
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, job, needs):
        future = Future()
        with self.changed:
            self.needs[job.name] = needs
            self.waiting.append((job, future))
            self.changed.notify()
        return future

    def stop(self):
        with self.changed:
            self.stopped += 1
            self.changed.notify()

    def shutdown(self, wait=True, *, cancel_futures=False):
        with self.changed:
            self.open = False
            self.changed.notify()

    def _serve(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or not self.open)
                if not self.waiting:
                    return
                index = self.random.randrange(len(self.waiting))
                job, future = self.waiting.pop(index)
            if self.stopped:
                future.set_result({"status": "stopped"})
                continue
            try:
                future.set_result(self.perform(job))
            except (UserError, Lost, RunFailed) as error:
                future.set_exception(error)
            except Exception as error:
                future.set_exception(RunFailed(f"{type(error).__name__}: {error}"))


def perform_toy(job):
    """Runs the toy experiment that the job names, as it stands in its file now."""
    import importlib.util

    found = importlib.util.find_spec(f"{job.experiment}.train")
    space = {"__name__": f"{job.experiment}.train"}
    exec(compile(Path(found.origin).read_text(), found.origin, "exec"), space)
    config = validate(space["Config"], job.config, job.name)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    return space["run"](config, job.run_dir, lambda *step: None)
