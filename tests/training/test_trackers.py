"""Trackers show what metrics.jsonl says; they change no number, and none can fail a run."""

import shutil

import pytest
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import finished
from tests.run_folders import lines
from tests.training import toy_run as toy
from training import runs

SHOWN = ["training.trackers=[tensorboard]"]


def curves(folder):
    """What TensorBoard shows of a run."""
    events = EventAccumulator(str(next(folder.glob("tensorboard/*"))), {"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def assert_shown_whole(folder, groups):
    shown, logged = curves(folder), lines(folder)
    for key in ("train_loss", "eval_loss", "gradient_norm", "lr_factor"):
        wanted = [(line["step"], line[key]) for line in logged if key in line]
        assert shown[key] == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]
    factors = dict(shown["lr_factor"])
    for name, rate in groups.items():
        assert shown[f"lr/{name}"] == [
            (step, pytest.approx(factor * rate, rel=1e-6)) for step, factor in factors.items()
        ]


def rates():
    plan = toy.build_task(toy.build_config()).plan
    return {row.role: row.lr for row in plan.rows}


def test_tensorboard_shows_the_lines_also_of_steps_that_are_taken_again(tmp_path):
    toy.train(tmp_path / "run", [*SHOWN, "checkpoint.keep=9"])
    assert_shown_whole(tmp_path / "run", rates())
    (tmp_path / "run/summary.json").unlink()  # as if killed long after the checkpoint of step 4
    for step in (6, 7):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-0000000{step}")
    toy.train(tmp_path / "run", SHOWN)
    assert_shown_whole(tmp_path / "run", rates())


def test_only_the_first_of_several_processes_shows_the_run(tmp_path):
    result = finished(toy.__file__, tmp_path / "run", *SHOWN, ranks=2)
    assert result.returncode == 0, result.err
    assert len(list((tmp_path / "run").glob("tensorboard/*/*"))) == 1


def test_a_tracker_changes_neither_the_run_nor_its_name(tmp_path):
    for name, words in (("with", SHOWN), ("without", [])):
        toy.train(tmp_path / name, words)
    for file in ("metrics.jsonl", "probes.jsonl"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    shown = toy.build_config(["training.trackers=[wandb, mlflow]"])
    assert runs.run_id(shown) == runs.run_id(toy.build_config())


@pytest.mark.parametrize("place", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(place, tmp_path, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("no network\nand more")

    monkeypatch.setattr(TensorBoardTracker, place, fails)
    assert toy.train(tmp_path, SHOWN)["status"] == "finished"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "trackers" in line]
    assert line == "training.trackers: dropped, the run goes on: RuntimeError: no network"
