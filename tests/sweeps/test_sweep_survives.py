"""Sweeps whose launcher or workers are killed, and sweeps with two launchers."""

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

ROOT = Path(__file__).resolve().parents[2]

# Real runs of the loop; each notes its name when it begins to train, and takes its time.
EXPERIMENT = '''
import os, time
import toy_run
from training import loop, runs
from training.settings import RunConfig as Config
from training.experiment import Experiment

def flops(config):
    return config.optimizer.lr

def run(config, run_dir, progress):
    task = toy_run.build_task(config)
    count = task.count

    def slowly(batch):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return count(batch)

    task.count = slowly

    def train():
        with open(run_dir.parent / "calls.txt", "a") as file:
            file.write(run_dir.name + "\\\\n")
        if config.optimizer.lr in BROKEN:
            print("loading the data")
            raise RuntimeError("no such thing")
        return loop.train(task, run_dir, progress)

    return runs.train_once(run_dir, config, task.plan, train)

class Toy(Experiment):
    run = staticmethod(run)

EXPERIMENT = Toy(
    name="toy", description="", config=Config, flops=flops, result=str,
    **dict.fromkeys(["build_task", "build_plan", "parameters", "tokens_per_step", "memory"]),
)
'''.replace("\\\\", "\\")
SWEEP = """
config: base.yaml
grid: {optimizer.lr: [0.01, 0.02]}
curves: {a: {}, b: {set: {optimizer.name: sgd}}}
extend: {key: optimizer.lr, points: 2}
"""


@pytest.fixture
def sweep(tmp_path):
    """A sweep file of a real experiment, beside the folder of its results."""
    name = "toy_" + tmp_path.name.replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("BROKEN = ()\n" + EXPERIMENT)
    (package / "base.yaml").write_text(
        "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
        "training: {steps: 6, batch_size: 4, log_every: 1000}\n"
    )
    (package / "s.yaml").write_text(f"experiment: {name}\n" + SWEEP)
    return package / "s.yaml"


def launch(sweep, results, **more):
    """The launcher as a process, with two workers."""
    path = os.pathsep.join(map(str, (ROOT, sweep.parents[1], ROOT / "tests" / "training")))
    return subprocess.Popen(
        [sys.executable, "-m", "sweeps.sweep", str(sweep), "--results", str(results),
         "--workers", "2", "--threads", "1"],
        env={**os.environ, "PYTHONPATH": path, **more}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process):
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def folder(sweep, results):
    return results / sweep.parent.name / "s"


def table(sweep, results):
    return (folder(sweep, results) / "results.csv").read_text()


def rows(sweep, results):
    return list(csv.DictReader(table(sweep, results).splitlines()))


def trained(sweep, results):
    """Run -> how often it began to train."""
    path = folder(sweep, results) / "calls.txt"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def workers_of(process):
    out = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in out.stdout.split()]


def gone(pid):
    """Whether a process has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def whole(sweep, tmp_path):
    """The table of the sweep that nothing disturbs."""
    code, errors = finish(launch(sweep, tmp_path / "whole"))
    assert code == 0, errors
    assert set(trained(sweep, tmp_path / "whole").values()) == {1}
    text = table(sweep, tmp_path / "whole")
    assert len(text.splitlines()) >= 1 + 4 + 2  # at least one point more on each curve
    return text


def test_a_killed_launcher_or_worker_leaves_the_same_table(sweep, tmp_path, whole):
    results = tmp_path / "killed"
    # The launcher, when the first run trains: its workers notice, save and end.
    launcher = launch(sweep, results, PAUSE="0.3")
    wait_for(lambda: list(folder(sweep, results).glob("*/checkpoints/step-*")))
    orphans = workers_of(launcher)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    wait_for(lambda: all(gone(pid) for pid in orphans), seconds=20)  # nothing to log until then
    # A worker of the second launcher, in the middle of a run.
    launcher = launch(sweep, results, PAUSE="0.3")
    before = sum(trained(sweep, results).values())
    wait_for(lambda: sum(trained(sweep, results).values()) > before + 1)
    os.kill(workers_of(launcher)[0], signal.SIGKILL)
    code, errors = finish(launcher)
    assert code == 0, errors
    assert "not done, will be tried again" in errors
    assert table(sweep, results) == whole
    summaries = [json.loads(p.read_text()) for p in folder(sweep, results).glob("*/summary.json")]
    assert any(summary["resumed_from"] for summary in summaries)


def test_a_stopped_launcher_has_its_runs_save_and_goes_on_from_there(sweep, tmp_path, whole):
    results = tmp_path / "stopped"
    launcher = launch(sweep, results, PAUSE="0.5")
    wait_for(lambda: list(folder(sweep, results).glob("*/checkpoints/step-*")))
    launcher.terminate()
    code, errors = finish(launcher)
    assert code == 75 and "stopping: runs save a checkpoint" in errors
    summaries = [json.loads(p.read_text()) for p in folder(sweep, results).glob("*/summary.json")]
    stopped = [summary["step"] for summary in summaries if summary["status"] == "stopped"]
    assert stopped and all(0 < step < 6 for step in stopped)
    code, errors = finish(launch(sweep, results))
    assert code == 0, errors
    assert table(sweep, results) == whole


def test_two_launchers_share_a_sweep_and_run_no_point_twice(sweep, tmp_path, whole):
    results = tmp_path / "two"
    launchers = [launch(sweep, results, PAUSE="0.1") for _ in range(2)]
    for launcher in launchers:
        code, errors = finish(launcher)
        assert code == 0, errors
    assert set(trained(sweep, results).values()) == {1}
    assert table(sweep, results) == whole


def test_a_run_that_fails_by_itself_is_reported_and_the_rest_goes_on(sweep, tmp_path):
    source = sweep.parent / "train.py"
    source.write_text(source.read_text().replace("BROKEN = ()", "BROKEN = (0.01,)", 1))
    code, errors = finish(launch(sweep, tmp_path / "results"))
    assert code == 1
    assert errors.count("failed 2 times: RuntimeError: no such thing") == 2  # once per curve
    assert errors.count('raise RuntimeError("no such thing")') >= 2  # the log's last lines
    statuses = Counter(row["status"] for row in rows(sweep, tmp_path / "results"))
    assert statuses["failed"] == 2 and statuses["finished"] == statuses.total() - 2 >= 2
    logs = [path.read_text() for path in folder(sweep, tmp_path / "results").glob("*/log.txt")]
    assert sum(text.count("loading the data") for text in logs) == 4  # two tries of two runs


def test_a_failure_counts_for_both_launchers_and_the_last_table_is_complete(sweep, tmp_path):
    source = sweep.parent / "train.py"
    source.write_text(source.read_text().replace("BROKEN = ()", "BROKEN = (0.01,)", 1))
    results = tmp_path / "two"
    launchers = [launch(sweep, results, PAUSE="0.05") for _ in range(2)]
    assert [finish(launcher)[0] for launcher in launchers] == [1, 1]
    broken = [n for run, n in trained(sweep, results).items()
              if (folder(sweep, results) / run / "failures.jsonl").exists()]  # fmt: skip
    # Two tries each; a third if the other launcher starts one before the second is written down.
    assert len(broken) == 2 and all(2 <= tries <= 3 for tries in broken)
    assert Counter(row["status"] for row in rows(sweep, results))["failed"] == 2
