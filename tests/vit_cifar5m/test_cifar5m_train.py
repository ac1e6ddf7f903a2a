"""Configs and runs on CIFAR-5m: images seen once, the rule's numbers, mistakes, the size scans."""

from pathlib import Path

import pytest
import torch

from tests.run_folders import lines
from training import runs, signals
from training import task as tasks
from training.config import load
from training.data import shapes
from training.data.sampling import sample_ids
from training.errors import UserError
from vit_cifar5m import data, train
from vit_cifar5m.config import Config
from vit_cifar5m.model import VisionTransformer

ROOT = Path(__file__).resolve().parents[2]
LAPTOP, PAPER = (ROOT / f"vit_cifar5m/configs/{name}.yaml" for name in ("laptop", "paper"))
SMALL = (
    "model.head_dim=4 model.heads=2 model.layers=1 model.patch_size=16 training.steps=6 "
    "training.batch_size=8 training.log_every=2 training.eval_every=3 training.eval_batch_size=16 "
    "data.validation_images=20"
).split()


def settings(*overrides):
    return load(Config, LAPTOP, [*SMALL, *overrides])


def test_where_files_are_kept_makes_no_other_run():
    assert runs.run_id(settings()) == runs.run_id(settings("data.cache_dir=elsewhere"))
    assert runs.run_id(settings()) != runs.run_id(settings("data.validation_images=7"))


def test_a_run_says_how_its_numbers_come_about(tmp_path, capsys):
    config = settings()
    summary = train.EXPERIMENT.run(config, tmp_path)
    assert summary["status"] == "finished"
    assert 0 <= summary["final_eval_top1"] <= 1
    assert summary["targets"] == 6 * 8
    assert len([line for line in lines(tmp_path) if "eval_top1" in line]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "batch 8 = 1 processes x 1 micro-batches of 8"
    assert said[1].startswith("length 6 steps = 48 images")
    # SGD: gamma0^2 n L^(2 alpha_depth - 1) = 0.1^2 x 8
    assert said[2] == "rate 2 to 2, constant, times 0.08 in every group"


@pytest.mark.parametrize(
    "optimizer", ["name=sgd optimizer.lr=2.0", "name=adam optimizer.lr=0.1 optimizer.eps=1e-15"]
)
def test_training_lowers_the_loss_it_is_given(tmp_path, optimizer):
    """64 images again and again: a network that cannot learn them cannot learn."""
    words = (
        "data.train_images=64 data.repeat=true training.steps=40 training.batch_size=64 "
        "model.head_dim=8 model.heads=4 model.patch_size=8 training.eval_every=0 "
        f"optimizer.{optimizer}"
    ).split()
    summary = train.EXPERIMENT.run(settings(*words), tmp_path)
    assert summary["final_train_loss"] < 0.6 * summary["first_train_loss"]


@pytest.mark.parametrize("overrides", [[], ["training.micro_batch_size=3", "data.seed=5"]])
def test_a_stopped_and_resumed_run_trains_once_on_every_image(tmp_path, monkeypatch, overrides):
    """The images that the model is given to train on, told apart by their pixels."""
    config = settings("data.train_images=48", *overrides)
    pixels = data.collate([train.build_data(config).train[i] for i in range(48)])[0]
    numbers = {image.numpy().tobytes(): i for i, image in enumerate(pixels)}
    ids, rows, forward = [], [], VisionTransformer.forward

    def recorded(self, images):
        if self.training:
            ids.extend(numbers[image.numpy().tobytes()] for image in images)
            rows.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(VisionTransformer, "forward", recorded)
    add = tasks.Losses.add

    def stopping(self, *args):  # a signal during the third step of 8
        add(self, *args)
        if len(self.sums) and self.targets == 16:
            signals.signal.raise_signal(signals.signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Losses, "add", stopping)
        assert train.EXPERIMENT.run(config, tmp_path)["status"] == "stopped"
    assert train.EXPERIMENT.run(config, tmp_path)["resumed_from"] == [3]
    assert sorted(ids) == list(range(48)) and ids != sorted(ids)
    assert rows == ([3, 3, 2] if overrides else [8]) * 6


def test_a_run_that_needs_more_drawn_images_than_cifar_5m_has_gets_them():
    """The paper's steps on drawn images: 19540 x 256 = 5,002,240 of them."""
    words = ["data.source=embedded", "data.path=null", "model.head_dim=2", "model.heads=2"]
    config = load(Config, PAPER, words)
    assert len(train.build_data(config).train) == 5_002_240
    words = ["data.train_images=6000000", "training.batch_size=64"]
    config = load(Config, LAPTOP, [*words, "training.steps=93750"])
    assert len(train.build_data(config).train) == 6_000_000
    with pytest.raises(UserError, match="6000064 images, but there are 6000000 to be seen once"):
        train.build_data(load(Config, LAPTOP, [*words, "training.steps=93751"]))


def test_runs_on_drawn_images_begin_as_they_always_have():
    """The order is that of 5,000,000 images for every run that asks for no more."""
    task = train.build_task(settings("seed=3"))
    images, labels = next(iter(tasks.first_batches(task, 1)))
    drawn, expected = shapes.draw(sample_ids(5_000_000, 3, 0, 8), 3)
    assert torch.equal(labels, torch.from_numpy(expected))
    assert torch.equal(images, data.collate(list(zip(drawn, expected, strict=True)))[0])


def test_the_rule_has_every_number_of_the_config():
    words = (
        "prescription.alpha_attention=0.5 prescription.alpha_depth=0.75 "
        "prescription.zero_readout=true optimizer.name=adam_atan2"
    ).split()
    rule = train.prescription(settings(*words)).describe()
    numbers = {"alpha_attention": 0.5, "alpha_depth": 0.75, "beta0": 4.0, "gamma0": 0.1}
    numbers |= {"head_dim": 4, "heads": 2, "depth": 1, "width": 8, "zero_readout": True}
    assert rule == {"name": "bordelon", "optimizer": "adam_atan2", **numbers}
    block = initialised(*words).blocks[0]
    assert block.attention.attention_scale == 4**-0.5
    block = initialised(*words, "model.layers=16").blocks[0]
    assert block.residual_multiplier == 4.0 * 16**-0.75


def initialised(*words):
    model = train.build_model(settings(*words))
    train.build_plan(settings(*words), model).initialise(model, seed=0)
    return model
