"""Workers: which GPUs they get, and runs that a launch command starts in several processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sweeps import workers
from sweeps.workers import (
    LaunchedWorker,
    RunBusy,
    RunFailed,
    RunRefused,
    RunStopped,
    RunUnusable,
    Worker,
)
from training.config import read_yaml
from training.errors import UserError
from training.files import locked

ROOT = Path(__file__).resolve().parents[2]
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ONE = (sys.executable,)  # a launch command that starts one process: itself

EXPERIMENT = """
import os, time
import toy_run
from training import loop, processes, runs
from training.settings import RunConfig as Config
from training.errors import RunError, UserError
from training.experiment import Experiment

def run(config, run_dir, progress):
    print("what a library prints", flush=True)
    with open(run_dir / f"pid-{os.environ.get('RANK', '0')}", "w") as file:
        file.write(str(os.getpid()))
    trouble = os.environ.get("TROUBLE")
    if trouble == "user":
        processes.on_main(lambda: refuse())
    if trouble == "second" and os.environ.get("RANK") == "1":
        raise RuntimeError("the second process cannot")
    if trouble == "folder":
        raise RunError(f"{run_dir}: holds something else")
    task = toy_run.build_task(config)
    count = task.count

    def slowly(batch):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return count(batch)

    task.count = slowly
    return runs.train_once(run_dir, config, task.plan, lambda: loop.train(task, run_dir, progress))

def refuse():
    raise UserError("corpus.txt: no such file")

class Toy(Experiment):
    run = staticmethod(run)

EXPERIMENT = Toy(
    name="toy", description="", config=Config, flops=len, result=str,
    **dict.fromkeys(["build_task", "build_plan", "parameters", "tokens_per_step", "memory"]),
)
"""
CONFIG = {
    "optimizer": {"lr": 0.05},
    "schedule": {},
    "training": {"steps": 30, "batch_size": 4, "log_every": 1},
}


@pytest.fixture
def experiment(tmp_path):
    """The name of an experiment's package in tmp_path."""
    name = "toy_" + tmp_path.name.replace("-", "_")
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "train.py").write_text(EXPERIMENT)
    return name


def environment(tmp_path, **more):
    path = os.pathsep.join(map(str, (ROOT, tmp_path, ROOT / "tests" / "training")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def launched(tmp_path, launch, **more):
    return LaunchedWorker(environment(tmp_path, **more), launch)


def ignore(*_):
    """Progress that nobody looks at."""


def pids(run_dir):
    return [int(path.read_text()) for path in sorted(run_dir.glob("pid-*"))]


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def gone(pid):
    """Whether a process has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_two_processes_stop_with_a_checkpoint_and_go_on_as_the_same_run(tmp_path, experiment):
    run_dir, steps = tmp_path / "run", []
    worker = launched(tmp_path, TWO, PAUSE="0.1")

    def stop_at_2(step, total, loss):
        steps.append((step, total))
        if step == 2:
            worker.ask_to_stop()

    with pytest.raises(RunStopped):
        worker.run(experiment, CONFIG, run_dir, stop_at_2)
    assert steps[:2] == [(1, 30), (2, 30)]
    reached = len(steps)
    assert [path.name for path in run_dir.glob("checkpoints/*")] == [f"step-{reached:08d}"]
    wait_until(lambda: all(map(gone, pids(run_dir))))
    assert len(pids(run_dir)) == 2

    summary = launched(tmp_path, TWO).run(experiment, CONFIG, run_dir, ignore)
    assert (summary["status"], summary["resumed_from"]) == ("finished", [reached])
    log = (run_dir / "log.txt").read_text()
    assert log.count("what a library prints") == 4  # two starts of two processes

    # The config is written as any other way of running writes it: nothing is trained anew.
    resident = Worker(environment(tmp_path))
    assert resident.run(experiment, CONFIG, run_dir, ignore) == summary
    other = {**CONFIG, "seed": 1}
    with pytest.raises(RunUnusable, match="another config"):
        resident.run(experiment, other, run_dir, ignore)
    summary = resident.run(experiment, other, tmp_path / "alone", ignore)
    resident.close()
    ours, theirs = (read_yaml(path / "config.yaml") for path in (run_dir, tmp_path / "alone"))
    assert {**ours, "seed": 1} == theirs


def test_close_kills_every_process_of_a_run(tmp_path, experiment):
    run_dir = tmp_path / "run"
    worker = launched(tmp_path, TWO, PAUSE="0.2")
    training = threading.Event()
    failures = []

    def work():
        try:
            worker.run(experiment, CONFIG, run_dir, lambda *_: training.set())
        except RunFailed as failure:
            failures.append(str(failure))

    thread = threading.Thread(target=work)
    thread.start()
    assert training.wait(60)
    started = pids(run_dir)
    worker.close()
    thread.join(60)
    assert "ended with code -9" in failures[0]
    wait_until(lambda: all(map(gone, started)), seconds=5)
    assert len(started) == 2 and not (run_dir / "summary.json").exists()


def test_a_killed_launcher_leaves_no_process_and_a_checkpoint(tmp_path, experiment):
    run_dir = tmp_path / "run"
    script = (
        "import os, pathlib, sys; from sweeps.workers import LaunchedWorker\n"
        f"LaunchedWorker(dict(os.environ), {TWO}).run({experiment!r}, {CONFIG}, "
        f"pathlib.Path({str(run_dir)!r}), lambda *step: print(step, flush=True))\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], env=environment(tmp_path, PAUSE="0.2"),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout.readline()
    started = pids(run_dir)
    command = int(Path(f"/proc/{started[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (*started, command):  # a scheduler may send its signal to all processes of a job
        os.kill(pid, signal.SIGUSR2)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    wait_until(lambda: all(map(gone, [*started, command])))
    assert '"stopped"' in (run_dir / "summary.json").read_text()
    assert list(run_dir.glob("checkpoints/step-*"))


def test_the_first_process_tells_what_is_wrong_and_the_others_end(tmp_path, experiment):
    with pytest.raises(RunRefused, match="^corpus.txt: no such file$"):
        launched(tmp_path, TWO, TROUBLE="user").run(experiment, CONFIG, tmp_path / "run", ignore)
    wait_until(lambda: all(map(gone, pids(tmp_path / "run"))))


def test_a_process_that_fails_beside_the_first_ends_the_run(tmp_path, experiment):
    worker = launched(tmp_path, TWO, TROUBLE="second")
    with pytest.raises(RunFailed):
        worker.run(experiment, CONFIG, tmp_path / "run", ignore)
    assert "the second process cannot" in (tmp_path / "run" / "log.txt").read_text()
    wait_until(lambda: all(map(gone, pids(tmp_path / "run"))))


def test_a_held_or_foreign_folder_is_told_apart_from_a_failure(tmp_path, experiment):
    with locked(tmp_path / "run", "run"), pytest.raises(RunBusy, match="another process"):
        launched(tmp_path, ONE).run(experiment, CONFIG, tmp_path / "run", ignore)
    worker = launched(tmp_path, ONE, TROUBLE="folder")
    with pytest.raises(RunUnusable, match="holds something else"):
        worker.run(experiment, CONFIG, tmp_path / "run", ignore)


def test_a_launch_command_that_is_wrong_is_named(tmp_path, experiment):
    with pytest.raises(RunRefused, match="--launch: no command 'acelerate' on PATH"):
        launched(tmp_path, ("acelerate", "launch")).run(experiment, CONFIG, tmp_path, ignore)
    worker = launched(tmp_path, ("sh", "-c", "echo no such option >&2; exit 2"))
    with pytest.raises(RunFailed, match="sh ended with code 2 and no word.*\nno such option"):
        worker.run(experiment, CONFIG, tmp_path / "run", ignore)


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Pretends that nvidia-smi lists some GPUs and that CUDA_VISIBLE_DEVICES is as given."""

    def pretend(count, visible=None):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        lines = [f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i}abc)'" for i in range(count)]
        failure = "echo 'GPU 0: lost' && exit 9"  # a driver that does not answer
        tool.write_text("\n".join(["#!/bin/sh", *(lines or [failure])]) + "\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


def devices(environments):
    return [settings.get("CUDA_VISIBLE_DEVICES") for settings in environments]


@pytest.mark.parametrize(
    ("listed", "visible", "count", "processes", "expected"),
    [
        (4, None, 2, 1, ["0", "1"]),
        (4, None, 2, 2, ["0,1", "2,3"]),
        (2, None, 4, 1, ["0", "1", "0", "1"]),  # small runs share a GPU
        (8, "3,5,GPU-7abc", 3, 1, ["3", "5", "GPU-7abc"]),
        (8, "2,-1,3", 1, 1, ["2"]),  # CUDA ignores what follows an invalid one
        (0, None, 2, 1, [None, None]),
        (8, "", 2, 1, ["", ""]),  # switched off
    ],
)
def test_workers_get_gpus_of_their_own(gpus, listed, visible, count, processes, expected):
    gpus(listed, visible)
    environments = workers.environments(count, 3, processes)
    assert devices(environments) == expected
    assert {settings["OMP_NUM_THREADS"] for settings in environments} == {"3"}


def test_processes_of_a_run_never_share_a_gpu(gpus):
    gpus(8, "0,1,2,3,4")
    with pytest.raises(UserError, match="6 GPUs, but 5 are visible; take at most 2 workers"):
        workers.environments(3, 1, 2)


def test_a_launch_command_gets_an_equal_share_of_the_gpus(gpus):
    gpus(8)
    crew = workers.crew(2, 1, ("accelerate", "launch"))
    assert devices(w.environment for w in crew) == ["0,1,2,3", "4,5,6,7"]
    assert {(type(w), w.launch) for w in crew} == {(LaunchedWorker, ("accelerate", "launch"))}
    crew = workers.crew(2, 1)
    assert devices(w.environment for w in crew) == ["0", "1"]
    assert {type(w) for w in crew} == {Worker}


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan"])
def test_the_time_to_save_is_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv("TRAINING_STOP_SECONDS", text)
    with pytest.raises(UserError, match=f"TRAINING_STOP_SECONDS: expected .* got '{text}'"):
        workers.stop_seconds()
    monkeypatch.setenv("TRAINING_STOP_SECONDS", "900")
    assert workers.stop_seconds() == 900
