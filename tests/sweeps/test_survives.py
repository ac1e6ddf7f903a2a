"""Sweeps and searches whose driver, workers or nodes are killed or stopped, on every engine.

Whatever happens, the tables are those of an undisturbed sweep, byte for byte.
"""

import csv
import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter

import pytest

from sweeps import __main__ as command
from tests.processes import Program, gone
from tests.sweeps.conftest import DIES, FAILS, HOLD, ROOT, wait_until
from training.signals import STOPPED

BASE = (
    "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
    "training: {steps: 6, batch_size: 4, log_every: 1}\n"
)
SWEEP = """
config: base.yaml
grid: {optimizer.lr: [0.01, 0.02]}
curves: {a: {}}
extend: {key: optimizer.lr, points: 1}
gpus: 8  # all of one of Ray's nodes
processes: 1
"""
TRIALS = 4
SEARCH = f"""
config: base.yaml
search: {{optimizer.lr: [1.0e-3, 1.0], optimizer.beta1: [0.1, 0.9]}}
trials: {TRIALS}
parallel: 2
rounds: 1
"""
WITHOUT_RAY = importlib.util.find_spec("ray") is None
RAY = [pytest.mark.xdist_group("ray"), pytest.mark.thorough]
RAY += [pytest.mark.skipif(WITHOUT_RAY, reason="Ray is an extra")]


class Engine:
    """Starts drivers of one engine."""

    def __init__(self, name, toy, tmp_path, request):
        self.name, self.toy, self.folder, self.drivers = name, toy, tmp_path, []
        self.pause = request.getfixturevalue("pause")
        self.options = ["--engine", name, "--threads", "1"]
        if name == "local":
            self.options += ["--workers", "2"]
        if name == "ray":
            self.ray = request.getfixturevalue("ray_cluster")
            self.options += ["--address", self.ray.address]

    def launch(self, results, kind="s", pause=0.0):
        """A driver as a process. Where workers stand already, a file has runs take their time."""
        self.pause(pause)
        file = self.folder / self.toy / f"{kind}.yaml"
        words = ["run", file, "--results", self.folder / results, *self.options]
        self.drivers.append(Program("-m", "tests.sweeps.impatient", *words, cwd=ROOT))
        return self.drivers[-1]

    def finish(self, driver):
        _, errors = driver.communicate(timeout=300)
        return driver.returncode, errors

    def kill(self, driver):
        driver.send_signal(signal.SIGKILL)
        driver.communicate()

    def interrupted(self, results, kind="s", runs=1):
        """A driver with so many runs that wait in their second step, and their processes."""
        driver = self.launch(results, kind, pause=HOLD)
        wait_until(lambda: len(self.at_work(results, kind)) >= runs)
        return driver, self.at_work(results, kind)

    def whole(self, results, kind="s"):
        """The table after a driver that nothing disturbs."""
        code, errors = self.finish(self.launch(results, kind))
        assert code == 0, errors
        return self.table(results, kind)

    def runs(self, results, kind="s"):
        return self.folder / results / self.toy / kind

    def table(self, results, kind="s"):
        return self.content(results, kind, "results.csv" if kind == "s" else "trials.csv")

    def content(self, results, kind, name):
        """A file without the commit: whoever edits the repository meanwhile changes that."""
        text = (self.runs(results, kind) / name).read_bytes().decode()
        return re.sub(r"\b[0-9a-f]{40}(\+changes)?", "", text)

    def summaries(self, results, kind="s"):
        paths = self.runs(results, kind).glob("*/summary.json")
        return [json.loads(path.read_text()) for path in paths]

    def at_work(self, results, kind="s"):
        """The processes of runs that have saved a step and wait in the next one."""
        pids = set()
        for waits in self.runs(results, kind).glob("*/training"):
            process = waits.with_name("at-0")
            if waits.stat().st_mtime_ns >= process.stat().st_mtime_ns:  # not one before it
                pids.add(json.loads(process.read_text())["pid"])
        return [pid for pid in pids if not gone(pid)]

    def trained(self, results, kind="s"):
        """Run -> how often it began to train."""
        text = (self.runs(results, kind) / "calls.txt").read_text()
        return Counter(line.split()[1] for line in text.splitlines())


@pytest.fixture(params=["local", pytest.param("ray", marks=RAY)])
def engine(request, toy, tmp_path):
    """An engine, a sweep file `s.yaml` and a search file `c.yaml` of a toy experiment."""
    package = tmp_path / toy
    (package / "base.yaml").write_text(BASE)
    (package / "s.yaml").write_text(f"experiment: {toy}\n" + SWEEP)
    (package / "c.yaml").write_text(f"experiment: {toy}\n" + SEARCH)
    made = Engine(request.param, toy, tmp_path, request)
    yield made
    for driver in made.drivers:  # of a test that has failed
        if driver.poll() is None:
            driver.send_signal(signal.SIGKILL)


_tables = []


@pytest.fixture
def whole(toy, tmp_path, engine, request):
    """The table of a sweep that nothing has disturbed, on this machine."""
    if not _tables:
        _tables.append(Engine("local", toy, tmp_path, request).whole("whole"))
        assert len(_tables[0].splitlines()) >= 1 + 2 + 1  # at least one point more
    return _tables[0]


def test_a_killed_worker_and_a_lost_node_cost_their_own_runs_a_few_steps(engine, whole):
    nodes = engine.name == "ray"
    driver, pids = engine.interrupted("killed", runs=2)
    os.kill(pids[0], signal.SIGKILL)
    if nodes:  # has two; on the other one a run goes on
        wait_until(lambda: len(set(engine.at_work("killed")) | set(pids)) == 3)
        engine.ray.kill_node()
    engine.pause(0)
    code, errors = engine.finish(driver)
    assert code == 0, errors
    assert errors.count("it will be resumed") == 1 + nodes
    assert engine.table("killed") == whole
    assert sum(len(one["resumed_from"]) for one in engine.summaries("killed")) == 1 + nodes


def test_a_driver_that_is_stopped_or_killed_is_started_again_and_ends_with_the_same_table(
    engine, whole
):
    driver, _ = engine.interrupted("ends")
    driver.terminate()
    code, errors = engine.finish(driver)
    assert code == 75, errors
    assert "stopping: runs save a checkpoint" in errors
    wait_until(lambda: not engine.at_work("ends"))
    ended = engine.summaries("ends")
    stopped = [one["step"] for one in ended if one["status"] == "stopped"]
    assert stopped and all(0 < step < 6 for step in stopped)

    driver, pids = engine.interrupted("ends")
    engine.kill(driver)
    wait_until(lambda: all(map(gone, pids)))
    if engine.name == "local":
        assert any(one["status"] == "stopped" for one in engine.summaries("ends"))
    assert engine.whole("ends") == whole
    resumed = sorted(step for one in engine.summaries("ends") for step in one["resumed_from"])
    assert set(resumed) >= set(stopped) and len(resumed) > len(stopped)


LOCAL = pytest.mark.parametrize("engine", ["local"], indirect=True)


@LOCAL  # what a driver remembers of a search is the same on every engine
def test_an_interrupted_search_of_one_trial_at_a_time_ends_as_an_undisturbed_one(engine):
    """With several, what is tried depends on which have ended."""
    path = engine.folder / engine.toy / "c.yaml"
    path.write_text(path.read_text().replace("parallel: 2", "parallel: 1"))
    engine.whole("undisturbed", "c")
    for number in (signal.SIGTERM, signal.SIGKILL):
        driver, _ = engine.interrupted("search", "c")
        driver.send_signal(number)
        engine.finish(driver)
    engine.whole("search", "c")
    assert sum(len(one["resumed_from"]) for one in engine.summaries("search", "c")) == 2
    for name in ("trials.csv", "constants.yaml"):
        ours, theirs = (engine.content(folder, "c", name) for folder in ("search", "undisturbed"))
        assert ours == theirs and ours.count("\n") > TRIALS


@LOCAL
@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.thorough) for one in (">&-", "2>&-"))],
)
def test_a_sweep_without_standard_streams_trains_all_the_same(engine, whole, closed):
    """As a daemon's: their numbers are not those of other files of the workers."""
    file = engine.folder / engine.toy / "s.yaml"
    results = engine.folder / "closed"
    command = f"{sys.executable} -m sweeps run {file} --results {results} --workers 2 {closed}"
    assert subprocess.call(command, shell=True, cwd=ROOT) == 0
    assert engine.table("closed") == whole
    assert all("loading the data" in p.read_text() for p in engine.runs("closed").glob("*/log.txt"))


@LOCAL  # what the others say of such runs is tested with each of them
def test_a_run_that_fails_or_dies_is_reported_and_the_rest_goes_on(engine):
    path = engine.folder / engine.toy / "s.yaml"
    path.write_text(
        f"experiment: {engine.toy}\nconfig: base.yaml\ngrid: {{optimizer.lr: [0.01]}}\n"
        f"curves: {{a: {{}}}}\nseeds: [0, {FAILS}, {DIES}]\n"
    )
    code, errors = engine.finish(engine.launch("fails"))
    assert code == 1
    assert errors.count("failed 2 times: RuntimeError: no such thing") == 1
    assert errors.count('raise RuntimeError("no such thing")') >= 1  # the log's last lines
    assert errors.count("lost its worker 5 times without progress") == 1
    rows = list(csv.DictReader(engine.table("fails").splitlines()))
    assert Counter(row["status"] for row in rows) == {"finished": 1, "failed": 2}
    logs = [path.read_text() for path in engine.runs("fails").glob("*/log.txt")]
    tries = Counter(text.count("loading the data") for text in logs)
    assert tries == {1: 1, 2: 1, 5: 1}


# Several processes that want the same folder, and others that look on while it is written


@pytest.fixture
def file(toy, tmp_path):
    (tmp_path / toy / "base.yaml").write_text(BASE.replace("steps: 6", "steps: 8"))
    path = tmp_path / toy / "s.yaml"
    path.write_text(f"experiment: {toy}\nconfig: base.yaml\nseeds: [1, 2, 3]\ncurves: {{a: {{}}}}")
    return path


def test_of_four_drivers_of_one_sweep_one_trains_and_others_look_on(
    toy, file, tmp_path, capsys, pause
):
    pause(HOLD)  # until all other drivers have come and been refused
    words = [str(file), "--results", str(tmp_path / "results")]
    drivers = [Program("-m", "sweeps", "run", *words, "--threads", "1", cwd=ROOT) for _ in range(4)]
    folder, seen = tmp_path / "results" / toy / "s", set()
    while any(driver.poll() is None for driver in drivers):  # no reader meets half a file
        command.main(["status", *words])
        seen.add(capsys.readouterr().out.splitlines()[0])
        for summary in folder.glob("*/summary.json"):
            json.loads(summary.read_text())
        if sum(driver.poll() is None for driver in drivers) == 1:
            pause(0.02)
        time.sleep(0.05)
    ended = [(*driver.communicate(), driver.returncode) for driver in drivers]
    assert sorted(code for *_, code in ended) == [0] + [2] * 3, ended
    for _, errors, code in ended:
        assert code == 0 or (errors.count("\n") == 1 and "another driver is at work here" in errors)
    trained = [line.split()[1] for line in (folder / "calls.txt").read_text().splitlines()]
    assert len(trained) == len(set(trained)) == 3 and len(seen) > 1
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [row["status"] for row in rows] == ["finished"] * 3


def test_of_two_runs_in_one_folder_one_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_PAUSE", "0.1")
    words = [ROOT / "tests/training/toy_run.py", tmp_path / "run", "training.steps=900"]
    first = Program(*words, PYTHONPATH=ROOT)
    wait_until(lambda: (tmp_path / "run/metrics.jsonl").exists())
    second = Program(*words, PYTHONPATH=ROOT)
    _, errors = second.communicate()
    assert second.returncode == 2 and errors.count("\n") == 1, errors
    assert str(tmp_path / "run") in errors and "another process" in errors
    first.terminate()
    assert first.wait() == STOPPED
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if "train_loss" in line]
    assert steps and steps == sorted(set(steps))


# What a user sees in a terminal, and what Ctrl-C does there


LONG = "optimizer: {lr: 0.01}\nschedule: {}\ntraining: {steps: 900, batch_size: 4, log_every: 2}\n"
STOPPING = "stopping: runs save a checkpoint; interrupt again to end them now"


class Terminal:
    """A command in a terminal of its own, whose Ctrl-C is a signal, and what it has shown."""

    def __init__(self, *words):
        self.text, (self.master, other) = "", pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), other)
        own = {"start_new_session": True}
        own["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, **streams, **own)
        os.close(other)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        while True:
            try:
                self.text += os.read(self.master, 4096).decode()
            except OSError:  # the last process that had it has ended
                return

    def wait_for(self, words):
        wait_until(lambda: words in self.text or self.process.poll() is not None)
        assert words in self.text, self.text

    def interrupt(self):
        os.write(self.master, b"\x03")

    def end(self):
        """The exit code, and the last line."""
        code = self.process.wait(300)
        self.reader.join(300)
        return code, self.text.splitlines()[-1].removeprefix("^C")


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(*words):
        started.append(Terminal(*words))
        return started[-1]

    (tmp_path / "pause").write_text("0.05")
    yield start
    for found in started:
        found.process.kill()
        found.process.wait()
        found.reader.join(300)
        os.close(found.master)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_has_a_sweep_save_and_a_second_one_ends_it(times, toy, tmp_path, terminal):
    (tmp_path / toy / "base.yaml").write_text(LONG)
    file = tmp_path / toy / "s.yaml"
    file.write_text(
        f"experiment: {toy}\nconfig: base.yaml\ngrid: {{optimizer.lr: [0.01, 0.02]}}\n"
        "curves: {a: {}}\n"
    )
    options = ["--results", str(tmp_path / "results"), "--workers", "2", "--threads", "1"]
    sweep = terminal("-m", "sweeps", "run", str(file), *options)
    folders = tmp_path / "results" / toy / "s"
    wait_until(lambda: len(list(folders.glob("*/training"))) == 2)
    if times == 2:  # their next steps end long after the second Ctrl-C
        (tmp_path / "pause.new").write_text("100")
        (tmp_path / "pause.new").rename(tmp_path / "pause")
    for _ in range(times):
        sweep.interrupt()
        if times == 2:
            sweep.wait_for(STOPPING)
    ends = {1: (75, "stopped; the same command goes on from here"), 2: (130, "interrupted")}
    assert sweep.end() == ends[times] and STOPPING in sweep.text, sweep.text


def test_a_run_says_its_steps_and_the_time_left_and_ends_at_ctrl_c(toy, tmp_path, terminal):
    (tmp_path / "base.yaml").write_text(LONG)
    folder = tmp_path / "results/toys/single/run"
    folder.mkdir(parents=True)
    code = f"from {toy}.real.train import EXPERIMENT as e; e.main()"
    run = terminal("-c", code, str(tmp_path / "base.yaml"), "--run-dir", str(folder))
    run.wait_for("step 1/900  train loss ")
    run.wait_for(" s left")
    run.interrupt()
    code, last = run.end()
    assert code == 75 and last.startswith("stopped: ")
