"""Several processes on a folder of images: each is evaluated once."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.experiment_cases import CASES
from tests.processes import finished
from tests.test_experiments import lines

ROOT = Path(__file__).resolve().parents[2]


def launch(processes, folder, *overrides):
    words = [*CASES["vit_imagenet"].small, "training.batch_size=16", "training.eval_every=3"]
    return finished(
        "-m",
        "vit_imagenet.train",
        "vit_imagenet/configs/laptop.yaml",
        *words,
        *overrides,
        "--run-dir",
        folder,
        ranks=processes,
        cwd=ROOT,
    )


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
        result = launch(
            processes,
            run,
            "data.source=folder",
            f"data.path={tmp_path / 'images'}",
            "model.classes=2",
        )
        assert result.returncode == 0, result.err
        assert result.err.count(f"not used: {damaged}: cannot be read") == 1
        assert json.loads((run / "summary.json").read_text())["eval_targets"] == 8
        found.append([line for line in lines(run) if "eval_top1" in line])
    assert [line["step"] for line in found[0]] == [3, 6]
    for one, two in zip(*found, strict=True):
        for name in ("eval_top1", "eval_loss"):
            assert two[name] == pytest.approx(one[name], rel=2e-5)
        assert one["eval_top1"] * 8 == pytest.approx(round(one["eval_top1"] * 8))
