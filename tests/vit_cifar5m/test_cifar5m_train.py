"""The experiment as a user meets it: commands, files, resume, mistakes, and the size scans."""

import json
from pathlib import Path

import pytest

from training import coordinate_check, loop, signals
from training.config import load
from training.errors import UserError
from vit_cifar5m import train
from vit_cifar5m.config import Config

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "vit_cifar5m/configs/laptop.yaml"
SMALL = [
    "model.head_dim=4", "model.heads=2", "model.layers=1", "model.patch_size=16",
    "training.steps=6", "training.batch_size=8", "training.log_every=2", "training.eval_every=3",
    "training.eval_batch_size=16", "data.validation_images=20",
]


def settings(*overrides):
    return load(Config, LAPTOP, [*SMALL, *overrides])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_config_plan_metrics_and_summary(tmp_path, capsys):
    config = settings()
    summary = train.run(config, tmp_path)
    assert summary["status"] == "finished"
    assert {file.name for file in tmp_path.iterdir()} - {".lock"} == {
        "config.yaml", "plan.json", "metrics.jsonl", "timing.jsonl", "summary.json"
    }
    assert load(Config, tmp_path / "config.yaml") == config
    assert 0 <= summary["final_eval_top1"] <= 1
    assert summary["targets"] == 6 * 8
    assert len([line for line in metrics(tmp_path) if "eval_top1" in line]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "batch 8 = 1 processes x 1 micro-batches of 8"
    assert lines[1].startswith("length 6 steps = 48 images")
    # SGD: gamma0^2 n L^(2 alpha_depth - 1) = 0.1^2 x 8
    assert lines[2] == "rate 2 to 2, constant, times 0.08 in every group"


@pytest.mark.parametrize("optimizer", [["optimizer.name=sgd", "optimizer.lr=2.0"],
                                       ["optimizer.name=adam", "optimizer.lr=0.1",
                                        "optimizer.eps=1e-15"]])
def test_training_lowers_the_loss_it_is_given(tmp_path, optimizer):
    """64 images again and again: a network that cannot learn them cannot learn."""
    words = ["data.train_images=64", "data.repeat=true", "training.steps=60",
             "training.batch_size=64", "model.head_dim=8", "model.heads=4", "model.patch_size=8",
             "training.eval_every=0", *optimizer]
    summary = train.run(settings(*words), tmp_path)
    assert summary["final_train_loss"] < 0.6 * summary["first_train_loss"]


def test_a_run_stopped_on_the_way_ends_as_the_one_that_was_not(tmp_path, monkeypatch):
    config = settings("checkpoint.final=true")
    train.run(config, tmp_path / "whole")
    add = loop.Losses.add

    def stopping(self, *args):  # a signal during the third step
        add(self, *args)
        if len(self.sums) and self.targets == 16:
            signals.signal.raise_signal(signals.signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Losses, "add", stopping)
        assert train.run(config, tmp_path / "parts")["status"] == "stopped"
    assert train.run(config, tmp_path / "parts")["resumed_from"] == [3]
    states = [
        sorted((tmp_path / name).glob("checkpoints/step-*/state.safetensors"))[-1].read_bytes()
        for name in ("whole", "parts")
    ]
    assert states[0] == states[1]
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_a_run_that_would_see_images_twice_is_refused_unless_it_may():
    words = ["data.train_images=47"]
    with pytest.raises(UserError, match="48 images, but there are 47 to be seen once"):
        train.build_task(settings(*words))
    assert len(train.build_task(settings(*words, "data.repeat=true")).train_data) == 47


def test_classes_are_the_datas():
    with pytest.raises(UserError, match="images of data.source embedded have 10 classes; set "):
        train.build_task(settings("model.classes=7"))


def test_the_rule_has_every_number_of_the_config():
    words = ["prescription.alpha_attention=0.5", "prescription.alpha_depth=0.75",
             "prescription.zero_readout=true", "optimizer.name=adam_atan2"]
    rule = train.prescription(settings(*words)).describe()
    assert rule == {
        "name": "bordelon", "head_dim": 4, "heads": 2, "depth": 1, "optimizer": "adam_atan2",
        "alpha_attention": 0.5, "alpha_depth": 0.75, "beta0": 4.0, "gamma0": 0.1,
        "zero_readout": True, "width": 8,
    }
    model = train.build_model(settings(*words))
    assert model.blocks[0].attention.attention_scale == 4**-0.5
    deep = train.build_model(settings(*words, "model.layers=16"))
    assert deep.blocks[0].residual_multiplier == 4.0 * 16**-0.75


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["data.source=cifar5m", "data.path=nowhere"], "data.path: nowhere is not a folder"),
        (["prescription.alpha_depth=2"], "prescription.alpha_depth"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(argv, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        train.main([str(LAPTOP), *argv, "--run-dir", str(tmp_path / "run")])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


def test_the_coordinate_check_scans_the_depth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coordinate_check, "_draw", lambda folder: None)
    small = ["model.patch_size=16", "data.validation_images=1"]
    argv = ["vit_cifar5m", str(LAPTOP), *small, "--scan", "model.layers", "--widths", "2", "4", "8"]
    argv += ["--steps", "1", "--seeds", "2", "--out", str(tmp_path)]
    try:
        coordinate_check.main(argv)
    except SystemExit as exit_:  # few seeds: some slopes are unclear
        assert exit_.code == 1
    found = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert found["scan"] == "model.layers"
    kept = ("prescription.beta0", "prescription.gamma0", "optimizer.lr")
    assert [found["set_for_the_check"][key] for key in kept] == [1.0, 1.0, 0.25]
    slopes = {(slope["quantity"], slope["name"]): slope for slope in found["slopes"]}
    assert slopes["update", "blocks.*.mlp.up.weight"]["aim"] == 0  # alpha_depth 1
    assert slopes["update", "readout.weight"]["aim"] == pytest.approx(0.5)  # x L^(-1/2)
    assert not {"grows", "shrinks"} & {slope["verdict"] for slope in found["slopes"]}
