"""Toy experiments in packages of their own, and a pool of threads in this process."""

import importlib.util
import os
import random
import threading
from concurrent.futures import Future
from pathlib import Path

from sweeps.driver import Driver
from sweeps.pool import Needs, RunFailed
from sweeps.reuse import Store
from sweeps.search import SearchWork
from sweeps.search_file import load_search
from sweeps.storage import Storage
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from training.config import read_yaml, validate
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# What every toy's train.py ends with: its `run` in place of training.
TAIL = '''
from training.experiment import Experiment

class Toy(Experiment):
    run = staticmethod(run)

COSTS = ("flops", "parameters", "tokens_per_step")
EXPERIMENT = Toy(
    name="toy", description="", config=Config, result=str, build_task=None, build_plan=None,
    memory=None, **{name: globals().get(name) for name in COSTS},
)
'''


def make_toy(tmp_path, monkeypatch, source, base):
    """A folder with a toy experiment in package `toy_<unique>`, ready to import."""
    package = tmp_path / ("toy_" + tmp_path.name.replace("-", "_"))
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(source + TAIL)
    (package / "base.yaml").write_text(base)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    return package


def write_file(package, text, name="s.yaml"):
    """A sweep or search file of a toy."""
    path = package / name
    path.write_text(f"experiment: {package.name}\nconfig: base.yaml\n" + text)
    return path


def work_of(package, path, **options):
    """What is left of a toy's sweep or search."""
    results = package.parent / "results"
    if "search" in read_yaml(path):
        search = load_search(path, results, **options)
        return SearchWork(search, Storage(search.folder), Store(search.folder).recall)
    sweep = load_sweep(path, results, **options)
    return SweepWork(sweep, Store(sweep.folder).recall)


def drive(work, pool=None):
    """Runs what is left through the driver; the same work, with its results."""
    assert Driver(work, pool or FakePool(), lambda point: Needs()).run()
    return work


class Lost(Exception):
    """The place of a run died."""


class FakePool:
    """At most `slots` jobs at a time; which of them ends next is drawn from `seed`.

    `perform` does a job and returns its summary; by default it is the toy's own `run`.
    """

    lost = (Lost,)

    def __init__(self, slots=1, seed=0, perform=None):
        self.slots, self.random = slots, random.Random(seed)
        self.perform = perform or perform_toy
        self.waiting, self.submitted, self.stops, self.open = [], [], 0, True
        self.changed = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, job, needs):
        future = Future()
        with self.changed:
            self.submitted.append((job, needs))
            self.waiting.append((job, future))
            assert len(self.waiting) <= self.slots
            self.changed.notify()
        return future

    def stop(self):
        self.stops += 1

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
                job, future = self.waiting.pop(self.random.randrange(len(self.waiting)))
            try:
                summary = {"status": "stopped"} if self.stops else self.perform(job)
            except (UserError, Lost, RunFailed) as error:
                future.set_exception(error)
            except Exception as error:
                future.set_exception(RunFailed(f"{type(error).__name__}: {error}"))
            else:
                future.set_result(summary)


def perform_toy(job):
    """Runs the toy experiment that the job names, as it stands in its file now."""
    found = importlib.util.find_spec(f"{job.experiment}.train").origin
    space = {"__name__": f"{job.experiment}.train"}
    exec(compile(Path(found).read_text(), found, "exec"), space)
    config = validate(space["Config"], job.config, job.name)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    return space["run"](config, job.run_dir, lambda *step: None)
