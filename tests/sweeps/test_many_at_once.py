"""Several processes that want the same folder, and others that look on while it is written."""

import csv
import json
import time

import pytest

from sweeps import __main__ as command
from tests.processes import Program
from tests.sweeps.conftest import HOLD, ROOT, wait_until
from training.signals import STOPPED

BASE = (
    "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
    "training: {steps: 8, batch_size: 4, log_every: 1}\n"
)


@pytest.fixture
def file(toy, tmp_path):
    (tmp_path / toy / "base.yaml").write_text(BASE)
    path = tmp_path / toy / "s.yaml"
    path.write_text(f"experiment: {toy}\nconfig: base.yaml\nseeds: [1, 2, 3]\ncurves: {{a: {{}}}}")
    return path


def test_of_eight_drivers_of_one_sweep_one_trains_and_others_look_on(
    toy, file, tmp_path, capsys, pause
):
    pause(HOLD)  # until all other drivers have come and been refused
    words = [str(file), "--results", str(tmp_path / "results")]
    drivers = [Program("-m", "sweeps", "run", *words, "--threads", "1", cwd=ROOT) for _ in range(8)]
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
    assert sorted(code for *_, code in ended) == [0] + [2] * 7, ended
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
