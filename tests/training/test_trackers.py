"""Trackers show what the JSON lines say, once, whatever happens to the run; none can fail it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import finished
from tests.run_folders import lines
from tests.training import toy_run as toy
from training import runs, trackers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("toy_run.py")
REMOTE = ("wandb", "mlflow", "trackio")


def folder_of(tmp_path):
    return tmp_path / "experiment" / "sweep" / "run-1"


def interrupt(folder, step):
    """The folder as a run leaves it that was killed long after the checkpoint of a step."""
    (folder / "summary.json").unlink()
    for path in folder.glob("checkpoints/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def logged(folder, key):
    return [(line["step"], line[key]) for line in lines(folder) if key in line]


def curves(folder):
    """What TensorBoard shows of a run."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def assert_shown_whole(folder):
    shown = curves(folder)
    for key in ("train_loss", "eval_loss", "gradient_norm", "lr_factor"):
        assert shown[key] == logged(folder, key)
    (plan,) = [json.loads((folder / "plan.json").read_text())]
    for row in plan["rows"]:
        rates = [(step, factor * row["lr"]) for step, factor in logged(folder, "lr_factor")]
        assert shown[f"lr/{row['role']}"] == rates
    probed = [
        (line["step"], line["layers"]["readout"]["alignment"])
        for line in lines(folder, "probes.jsonl")
    ]
    assert shown["probes/layers/readout/alignment"] == probed


def test_tensorboard_shows_losses_rates_norms_and_probes(tmp_path):
    folder = folder_of(tmp_path)
    toy.train(folder, ["training.trackers=[tensorboard]"])
    assert_shown_whole(folder)


@pytest.mark.parametrize("before", [[], ["training.trackers=[tensorboard]"]])
def test_a_resumed_run_is_shown_whole_and_once(tmp_path, before):
    """With a tracker from the start or switched on later."""
    folder = folder_of(tmp_path)
    toy.train(folder, [*before, "checkpoint.keep=9"])
    interrupt(folder, step=4)  # 6 and 7 may have been shown
    toy.train(folder, ["training.trackers=[tensorboard]"])
    assert_shown_whole(folder)


def test_only_the_first_of_several_processes_shows_the_run(tmp_path):
    folder = folder_of(tmp_path)
    result = finished(SCRIPT, folder, "training.trackers=[tensorboard]", ranks=2)
    assert result.returncode == 0, result.err
    assert len(list(folder.glob("tensorboard/*"))) == 1
    assert_shown_whole(folder)


def test_a_tracker_changes_neither_the_run_nor_its_name(tmp_path):
    for name, words in (("with", ["training.trackers=[tensorboard]"]), ("without", [])):
        toy.train(tmp_path / name, words)
    for file in ("metrics.jsonl", "probes.jsonl"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    shown = toy.build_config(["training.trackers=[wandb, mlflow]"])
    assert runs.run_id(shown) == runs.run_id(toy.build_config())


@pytest.fixture
def told(monkeypatch):
    """Imitated trackers: what each run by name or id was told, in one list per service."""
    services = {name: {} for name in REMOTE}
    asked = []

    class Imitated:
        name = ""

        def __init__(self, project, run_id=None, name=None, run_name=None, **options):
            asked.append({"project": project, "name": name or run_name, **options})
            # MLflow opens a run of its own each time, unless it gets the id that it gave.
            self.runs = services[self.name]
            known = options.get("id") or (name if self.name == "trackio" else run_id)
            self.id = known or f"made-{len(self.runs)}"
            self.info = self.tracker = self
            self.run_id = self.id

        def start(self):
            self.runs.setdefault(self.id, [])

        def store_init_configuration(self, config):
            assert config["optimizer.lr"] == 0.05 and "training.trackers" not in config

        def log(self, values, step):
            self.runs[self.id].append((step, values))

        def finish(self):
            pass

    classes = {name: type(name, (Imitated,), {"name": name}) for name in REMOTE}
    monkeypatch.setattr(trackers, "LOGGER_TYPE_TO_CLASS", classes)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: REMOTE)
    return services, asked, classes


@pytest.mark.parametrize("name", REMOTE)
def test_a_service_is_told_every_line_once_under_the_sweep_and_the_runs_id(name, told, tmp_path):
    services, asked, _ = told
    folder, words = folder_of(tmp_path), [f"training.trackers=[{name}]", "checkpoint.keep=9"]
    toy.train(folder, words)
    interrupt(folder, step=4)
    toy.train(folder, words)
    ((_known, shown),) = services[name].items()
    losses = [(step, values["train_loss"]) for step, values in shown if "train_loss" in values]
    assert losses == logged(folder, "train_loss")
    steps = [step for step, _ in shown]
    assert steps == sorted(steps)
    assert len(steps) == len(lines(folder) + lines(folder, "probes.jsonl"))
    for options in asked:
        words = " ".join(map(str, options.values()))
        assert "sweep" in words and "experiment" in words and "run-1" in options["name"]


@pytest.mark.parametrize("place", ["start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(
    place, told, tmp_path, monkeypatch, capsys
):
    services, _, classes = told

    def fails(*args, **kwargs):
        raise RuntimeError("no network\nand more")

    monkeypatch.setattr(classes["wandb"], place, fails)
    folder = folder_of(tmp_path)
    summary = toy.train(folder, ["training.trackers=[wandb, trackio]"])
    assert summary["status"] == "finished"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "trackers" in line]
    assert line == (
        "training.trackers: wandb is dropped, the run goes on: RuntimeError: no network"
    )
    (shown,) = services["trackio"].values()
    assert len(shown) == len(lines(folder) + lines(folder, "probes.jsonl"))


def test_links_and_pipes_in_a_run_folder_are_not_followed(told, tmp_path, monkeypatch, capsys):
    services, _, _ = told
    real = {**trackers.LOGGER_TYPE_TO_CLASS, "tensorboard": TensorBoardTracker}
    monkeypatch.setattr(trackers, "LOGGER_TYPE_TO_CLASS", real)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ("tensorboard", *REMOTE))
    folder, outside = folder_of(tmp_path), tmp_path / "outside"
    for place in (folder, outside):
        place.mkdir(parents=True)
    (outside / "kept").touch()
    (folder / "tensorboard").symlink_to(outside)
    os.mkfifo(folder / "trackers.json")
    toy.train(folder, ["training.trackers=[tensorboard, mlflow]"])
    assert "tensorboard is dropped" in capsys.readouterr().err
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert len(services["mlflow"]["made-0"]) == len(lines(folder) + lines(folder, "probes.jsonl"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "[tensorbord]",
            "training.trackers.0: expected 'tensorboard', 'wandb', 'mlflow' or 'trackio'",
        ),
        (
            "[wandb]",
            "training.trackers: wandb is not installed; pip install wandb, or leave it out",
        ),
    ],
)
def test_an_unknown_or_missing_tracker_is_one_line_before_training(
    value, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    monkeypatch.setattr(sys, "argv", ["toy", str(tmp_path), f"training.trackers={value}"])
    with pytest.raises(SystemExit) as ended:
        toy.main()
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0]
    assert not (tmp_path / "metrics.jsonl").exists()
