"""What is special to a run of ViT: accuracies and epochs, sources, the paper's plan, mistakes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.experiment_cases import CASES, write_photos
from tests.processes import finished
from tests.test_experiments import lines
from training import runs
from training.config import load
from vit_imagenet import train
from vit_imagenet.config import Config

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "vit_imagenet/configs/laptop.yaml"
SMALL = CASES["vit_imagenet"].small


def settings(*overrides):
    return load(Config, LAPTOP, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of little JPEGs in ImageNet's layout, and the same as parquet shards."""
    root = tmp_path_factory.mktemp("photos")
    write_photos(root)
    return root


def test_accuracies_are_shares_and_epochs_are_counted(tmp_path):
    config = settings("training.eval_every=3")
    summary = train.EXPERIMENT.run(config, tmp_path)
    assert summary["status"] == "finished"
    assert 0 <= summary["final_eval_top1"] <= summary["final_eval_top5"] <= 1
    assert summary["targets"] == 6 * 8
    found = [line for line in lines(tmp_path) if "eval_top1" in line]
    per_epoch = len(train.build_task(config).train_data) // 8
    assert [line["epoch"] for line in found] == pytest.approx(
        [3 / per_epoch, 6 / per_epoch], abs=1e-6
    )


def test_training_learns_and_beats_chance_by_far(tmp_path):
    words = (
        "training.steps=60 training.batch_size=64 training.eval_samples=300 optimizer.lr=0.008 "
        "data.augmentation.mixup=0 data.augmentation.cutmix=0 "
        "data.augmentation.crop_scale=[1.0,1.0] schedule.warmup_steps=5"
    ).split()
    summary = train.EXPERIMENT.run(settings(*words), tmp_path)
    assert summary["final_eval_top1"] > 0.5


def test_a_run_goes_on_with_other_workers_and_another_limit(tmp_path):
    """What changes no result may change between a stop and a resume."""
    words = ["training.data_workers=1", "data.max_unreadable=3", "data.cache_dir=elsewhere"]
    first, second = settings(), settings(*words)
    assert runs.run_id(first) == runs.run_id(second)
    assert runs.run_id(first) != runs.run_id(settings("training.eval_samples=19"))
    train.EXPERIMENT.run(first, tmp_path)
    assert train.EXPERIMENT.run(second, tmp_path)["status"] == "finished"  # it was done already


def test_constants_of_the_config_are_part_of_a_runs_name():
    """Shipped tables name runs by hashes in which three constants stand."""
    assert runs.run_id(load(Config, LAPTOP)) == "run-9cb9a7c901"


def test_a_folder_and_its_shards_train_on_the_same_classes(photos, tmp_path):
    base = ["model.classes=2", f"data.cache_dir={tmp_path / 'cache'}"]
    for source in ("folder", "shards"):
        words = [f"data.source={source}", f"data.path={photos / source}"]
        summary = train.EXPERIMENT.run(settings(*base, *words), tmp_path / source)
        assert summary["status"] == "finished" and summary["targets"] == 48


def test_the_paper_s_plan_is_printed_with_its_numbers(capsys):
    train.EXPERIMENT.main([str(ROOT / "vit_imagenet/configs/paper.yaml"), "--plan", "--json"])
    plan = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in plan["rows"]}
    published = {  # 20 lambda_G
        "blocks.0.attn.qkv.weight": 9.397e-4,
        "pos_embed": 0.7217,
        "head.weight": 8.235e-4,
        "head.bias": 0.6325,
    }
    for name, lr in published.items():
        assert rows[name]["lr"] == pytest.approx(lr, rel=1e-3)
    decays = {name: row["lr"] * row["weight_decay"] for name, row in rows.items()}
    assert decays.pop("head.bias") == 0
    assert list(decays.values()) == pytest.approx([8e-4] * len(decays))


def test_the_head_s_bias_can_be_turned_off():
    """Footnote 44: one tensor and one row of the plan less, and another run."""
    paper = ROOT / "vit_imagenet/configs/paper.yaml"
    config, without = (load(Config, paper, words) for words in ([], ["model.head_bias=false"]))
    names = [{row.name for row in train.EXPERIMENT.plan(c).rows} for c in (config, without)]
    assert names[0] - names[1] == {"head.bias"} and names[1] < names[0]
    counts = [train.EXPERIMENT.parameters(c)["total"] for c in (config, without)]
    assert counts[0] - counts[1] == 1000
    assert runs.run_id(config) != runs.run_id(without)


@pytest.mark.parametrize(("tensor", "key"), [("pos_embed", "position"), ("head.bias", "head_bias")])
def test_a_factor_changes_one_tensor_s_rate_alone(tensor, key):
    """II 1E: n times the positional embedding's rate, no other number; footnote 44: the bias."""
    for strategy in ("standard", "neural_tangent"):
        words = [f"prescription.strategy={strategy}"]
        configs = [settings(*words, *more) for more in ([], [f"prescription.{key}_lr=16"])]
        plain, changed = ({r.name: r for r in train.EXPERIMENT.plan(c).rows} for c in configs)
        different = {name for name in plain if plain[name] != changed[name]}
        assert different == {tensor}
        assert changed[tensor].lr == 16 * plain[tensor].lr
        # (1.94): what a step takes off a weight stays, and is said relative to the tensor's rate.
        decay = plain[tensor].weight_decay / 16
        moved = replace(plain[tensor], lr=16 * plain[tensor].lr, weight_decay=decay)
        assert moved == changed[tensor]
        assert runs.run_id(configs[0]) == runs.run_id(settings(*words, f"prescription.{key}_lr=1"))


def test_the_arithmetic_of_the_paper_s_recipe_is_printed():
    config = load(Config, ROOT / "vit_imagenet/configs/paper.yaml")
    task = SimpleNamespace(config=config, train_data=range(1281167))
    assert config.training.split(8) == (2, 256)
    lines = train.arithmetic(task)
    assert lines[0] == "epoch 1,281,167 images = 312 steps, 3,215 left out"
    assert "93,600 steps = 300 epochs; warm-up 6,240 steps = 20 epochs" in lines[1]
    assert "evaluation every 312 steps = 1 epochs" in lines[1]
    assert "rate 20 to 1e-06, cosine; decay per step at the peak: lr wd = 0.0008 (glob" in lines[2]


# Several processes on a folder of images: each is evaluated once


def launch(processes, folder, *overrides):
    words = [*CASES["vit_imagenet"].small, "training.batch_size=16", "training.eval_every=3"]
    command = ["-m", "vit_imagenet.train", "vit_imagenet/configs/laptop.yaml", *words, *overrides]
    return finished(*command, "--run-dir", folder, ranks=processes, cwd=ROOT)


def write_images(root):
    """2 classes of noise, 10 training images each, 4 + 5 validation images, one of them cut off."""
    generator = np.random.default_rng(0)
    for split, counts in {"train": (10, 10), "val": (4, 5)}.items():
        for label, count in enumerate(counts):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 128, (12, 10, 3), dtype=np.uint8) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.JPEG")
    damaged = root / "val" / "class1" / "2.JPEG"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    return damaged


def test_processes_count_the_readable_images_of_a_folder_once(tmp_path):
    damaged = write_images(tmp_path / "images")
    found = []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        words = ["data.source=folder", f"data.path={tmp_path / 'images'}", "model.classes=2"]
        result = launch(processes, run, *words)
        assert result.returncode == 0, result.err
        assert result.err.count(f"not used: {damaged}: cannot be read") == 1
        assert json.loads((run / "summary.json").read_text())["eval_targets"] == 8
        found.append([line for line in lines(run) if "eval_top1" in line])
    assert [line["step"] for line in found[0]] == [3, 6]
    for one, two in zip(*found, strict=True):
        for name in ("eval_top1", "eval_loss"):
            assert two[name] == pytest.approx(one[name], rel=2e-5)
        assert one["eval_top1"] * 8 == pytest.approx(round(one["eval_top1"] * 8))
