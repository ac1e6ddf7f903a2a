"""Toy experiments in packages of their own, and a pool of threads in this process."""

import csv
import importlib.util
import os
import random
import threading
from concurrent.futures import Future
from pathlib import Path

from sweeps import __main__ as command
from sweeps.driver import Driver
from sweeps.pool import RunFailed
from sweeps.study import load_search
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from tests.run_folders import end_run
from training.config import read_yaml, validate
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# A loss that is a parabola in log2 of the rate, whose optimum, 2^-4, falls with width and with
# 1/gain, and in log10 of two constants, with its minimum at (minimum_a, 0.3): no training, but the
# driver is the real one.
PARABOLA = """
import json, math, os
from training.config import Section
from training.experiment import Experiment
from training.files import write_json
from training.settings import RunConfig

class Inner(Section):
    kind: str = "plain"
    gain: float | None = None

class Gamma(Section):
    a: float = 1.0
    b: float = 1.0

class Config(RunConfig):
    width: int
    lr: float
    inner: Inner = Inner()
    gamma: Gamma = Gamma()
    minimum_a: float = 1.0
    kind: str = "plain"
    diverge_above: float = 1e9
    fail_below: float = 0.0

def flops(config):
    return float(config.width)

def parameters(config):
    return {"non_embedding": 10 * config.width**2}

def tokens_per_step(config):
    return 8 * config.training.batch_size

def run(config, run_dir, progress=None):
    with open(run_dir.parent / "calls.txt", "a") as file:
        file.write(run_dir.name + "\\n")
    progress(1, 2, 3.0)
    log = run_dir / "metrics.jsonl"
    broken = config.gamma.a > float(os.environ.get("BREAK_ABOVE", "inf"))
    if broken or config.lr < config.fail_below:
        log.write_text('{"step": 1, "tra')
        raise RuntimeError("something broke")
    a, b = math.log10(config.gamma.a / config.minimum_a), math.log10(config.gamma.b / 0.3)
    distance = math.log2(config.lr * (config.inner.gain or 1)) + 4 + math.log2(config.width)
    loss = 3 + 0.1 * distance**2 + 0.01 * config.seed
    loss += 0.2 * a**2 + 0.1 * b**2 + 0.1 * config.optimizer.lr
    lines = [
        {"step": 1, "train_loss": 2.0, "lr_factor": 0.5, "gradient_norm": 1.0},
        {"step": 2, "epoch": 1.0, "train_loss": 1.0, "lr_factor": 1.0, "gradient_norm": None},
        {"step": 2, "epoch": 1.0, "eval_loss": loss, "eval_top1": -loss},
    ]
    log.write_text("".join(json.dumps(line) + "\\n" for line in lines))
    diverged = max(config.lr, config.gamma.a) > config.diverge_above
    summary = {
        "status": "diverged" if diverged else "finished", "step": 2, "steps": 2,
        "final_eval_loss": None if diverged else loss, "best_eval_loss": loss,
        "first_train_loss": 4.0, "environment": {"commit": "c0ffee"},
    }
    write_json(run_dir / "summary.json", summary)
    return summary

class Toy(Experiment):
    run, flops, parameters = staticmethod(run), staticmethod(flops), staticmethod(parameters)

EXPERIMENT = Toy(
    name="toy", description="", config=Config, result=str, tokens_per_step=tokens_per_step,
    **dict.fromkeys(("build_task", "build_plan", "products")),
)
"""
BASE = """
width: 1
lr: 0.5
optimizer: {lr: 1}
schedule: {}
training: {steps: 9, batch_size: 2}
"""


def make_toy(tmp_path, monkeypatch, base=BASE):
    """A folder with a toy experiment in package `toy_<unique>`, ready to import."""
    package = tmp_path / ("toy_" + tmp_path.name.replace("-", "_"))
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(PARABOLA)
    (package / "base.yaml").write_text(base)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    return package


def write_file(package, text, name="s.yaml"):
    path = package / name
    path.write_text(f"experiment: {package.name}\nconfig: base.yaml\n" + text)
    return path


def work_of(package, path, **options):
    """What is left of a toy's sweep or search."""
    load = load_search if "search" in read_yaml(path) else load_sweep
    return command.work_of(load(path, package.parent / "results", **options), looks=False)


def calls(package):
    files = package.parent.glob("results/*/*/calls.txt")
    return [line for file in files for line in file.read_text().splitlines()]


def rows_of(work):
    with open(work.table, newline="") as file:
        return list(csv.DictReader(file))


def drive(work, pool=None):
    """Runs what is left through the driver; the same work, with its results."""
    assert Driver(work, pool or FakePool()).run()
    return work


def play(sweep, result, seed, room):
    """Runs a sweep with at most `room` runs at a time, which end in a random order."""
    work, random_, at_work = SweepWork(sweep), random.Random(seed), []
    while True:
        while len(at_work) < room and (point := work.next()):
            at_work.append(point)
        if not at_work:
            return work
        point = at_work.pop(random_.randrange(len(at_work)))
        if random_.random() < 0.1:  # a place that died, or a run that was stopped
            work.put_back(point)
            continue
        summary = result(point)
        if summary["status"] == "failed":
            work.fail(point, "broken")
        else:
            work.record(point, summary)


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
        self.server = threading.Thread(target=self._serve, daemon=True)
        self.server.start()

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

    def shutdown(self, wait=True):
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
                if summary["status"] in ("finished", "diverged"):  # as the loop
                    end_run(job.run_dir, summary)
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
