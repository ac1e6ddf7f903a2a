"""Searches whose launcher or workers are killed, and searches with two launchers."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

# Real runs of the loop; each notes its name when it begins to train, and takes its time.
EXPERIMENT = """
import os, time
import toy_run
from training import loop, runs
from training.settings import RunConfig as Config
from training.experiment import Experiment

def flops(config):
    return 1.0

def run(config, run_dir, progress):
    task = toy_run.build_task(config)
    count = task.count

    def slowly(batch):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return count(batch)

    task.count = slowly

    def train():
        with open(run_dir.parent / "calls.txt", "a") as file:
            file.write(run_dir.name + chr(10))
        return loop.train(task, run_dir, progress)

    return runs.train_once(run_dir, config, task.plan, train)

class Toy(Experiment):
    run = staticmethod(run)

EXPERIMENT = Toy(
    name="toy", description="", config=Config, flops=flops, result=str,
    **dict.fromkeys(["build_task", "build_plan", "parameters", "tokens_per_step", "memory"]),
)
"""
TRIALS = 5
SEARCH = f"""
config: base.yaml
search: {{optimizer.lr: [1.0e-3, 1.0], optimizer.beta1: [0.1, 0.9]}}
trials: {TRIALS}
parallel: 3
rounds: 1
"""


@pytest.fixture
def search(tmp_path):
    """A search file of a real experiment, beside the folder of its results."""
    return write_search(tmp_path)


def write_search(tmp_path):
    name = "toy_" + tmp_path.name.replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(EXPERIMENT)
    (package / "base.yaml").write_text(
        "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
        "training: {steps: 6, batch_size: 4, log_every: 1000}\n"
    )
    (package / "s.yaml").write_text(f"experiment: {name}\n" + SEARCH)
    return package / "s.yaml"


def launch(search, results, workers=1, **more):
    path = os.pathsep.join(map(str, (ROOT, search.parents[1], ROOT / "tests" / "training")))
    return subprocess.Popen(
        [sys.executable, "-m", "sweeps.search", str(search), "--results", str(results),
         "--workers", str(workers), "--threads", "1"],
        env={**os.environ, "PYTHONPATH": path, **more}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process):
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def folder(search, results):
    return results / search.parent.name / "s"


def tables(search, results):
    """trials.csv, and the constants that were found."""
    found = yaml.safe_load((folder(search, results) / "constants.yaml").read_text())["constants"]
    return (folder(search, results) / "trials.csv").read_text(), found


def begun(search, results):
    """Run -> how often it began to train."""
    path = folder(search, results) / "calls.txt"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def summaries(search, results):
    return [json.loads(p.read_text()) for p in folder(search, results).glob("*/summary.json")]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def workers_of(process):
    out = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in out.stdout.split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tables of the search that nothing disturbs; no name of a folder is in them."""
    folder = tmp_path_factory.mktemp("whole")
    search = write_search(folder)
    code, errors = finish(launch(search, folder))
    assert code == 0, errors
    assert set(begun(search, folder).values()) == {1}
    text, constants = tables(search, folder)
    assert len(text.splitlines()) == 1 + TRIALS and len(constants) == 1
    return text, constants


def in_the_middle(search, results, trial):
    """Whether this many trials have begun, and the last one has saved something."""
    saved = [path.parents[1].name for path in folder(search, results).glob("*/checkpoints/step-*")]
    names = list(begun(search, results))
    return len(names) >= trial and names[-1] in saved


def test_a_killed_launcher_or_worker_leaves_the_same_tables(search, tmp_path, whole):
    results = tmp_path / "killed"
    launcher = launch(search, results, PAUSE="0.3")
    wait_for(lambda: in_the_middle(search, results, 2))
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    # The next launcher takes the trial over; then its worker dies, in another trial.
    launcher = launch(search, results, PAUSE="0.3")
    wait_for(lambda: in_the_middle(search, results, 4))
    os.kill(workers_of(launcher)[0], signal.SIGKILL)
    code, errors = finish(launcher)
    assert code == 0, errors
    assert "the worker process ended with code -9" in errors
    assert tables(search, results) == whole
    assert len(begun(search, results)) == TRIALS
    assert sum(bool(summary["resumed_from"]) for summary in summaries(search, results)) == 2


def test_a_stopped_search_saves_and_goes_on_as_if_it_had_not_stopped(search, tmp_path, whole):
    results = tmp_path / "stopped"
    launcher = launch(search, results, PAUSE="0.3")
    wait_for(lambda: in_the_middle(search, results, 2))
    launcher.terminate()
    code, errors = finish(launcher)
    assert code == 75 and "the same command goes on from here" in errors
    stopped = [s["step"] for s in summaries(search, results) if s["status"] == "stopped"]
    assert len(stopped) == 1 and 0 < stopped[0] < 6
    code, errors = finish(launch(search, results))
    assert code == 0, errors
    assert tables(search, results) == whole


def test_two_launchers_share_a_search_and_do_no_trial_twice(search, tmp_path):
    results = tmp_path / "two"
    launchers = [launch(search, results, workers=2, PAUSE="0.1") for _ in range(2)]
    for launcher in launchers:
        code, errors = finish(launcher)
        assert code == 0, errors
    assert sorted(begun(search, results).values()) == [1] * TRIALS
    text, [found] = tables(search, results)
    rows = list(csv.DictReader(text.splitlines()))
    assert [int(row["trial"]) for row in rows] == list(range(TRIALS))
    assert {row["status"] for row in rows} == {"finished"}
    assert found["trials"] == TRIALS


def test_one_launcher_takes_over_from_another_that_is_killed_beside_it(search, tmp_path):
    results = tmp_path / "over"
    first, second = (launch(search, results, PAUSE="0.2") for _ in range(2))
    wait_for(lambda: in_the_middle(search, results, 2))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    code, errors = finish(second)
    assert code == 0, errors
    assert len(tables(search, results)[0].splitlines()) == 1 + TRIALS
    assert len(begun(search, results)) == TRIALS
