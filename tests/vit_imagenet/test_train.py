"""The experiment as a user meets it: commands, files, resume, and a config whose fields act."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image

from training import runs, signals
from training import task as tasks
from training.config import leaves, load
from training.errors import UserError
from vit_imagenet import train
from vit_imagenet.config import Config

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "vit_imagenet/configs/laptop.yaml"
SMALL = [
    "model.width=16", "model.head_dim=8", "model.layers=1", "model.image_size=8",
    "data.eval_resize=8", "training.steps=6", "training.batch_size=8", "training.log_every=2",
    "training.eval_every=0", "training.eval_samples=20", "schedule.warmup_steps=2",
    "data.augmentation.mix_group=4", "training.eval_batch_size=8",
]


def settings(*overrides):
    return load(Config, LAPTOP, [*SMALL, *overrides])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of little JPEGs in ImageNet's layout, and the same as parquet shards."""
    import datasets

    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        rows = []
        for label, name in enumerate(("cat", "dog")):
            folder = root / "folder" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                small = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
                image = Image.fromarray(small).resize((24, 20))
                image.save(folder / f"{index:02}.JPEG")
                rows.append({"image": str(folder / f"{index:02}.JPEG"), "label": label})
        table = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
        (root / "shards").mkdir(exist_ok=True)
        for part in range(2):
            shard = table.shard(2, part, contiguous=False)
            shard = shard.map(embed, remove_columns=["image"], features=FEATURES())
            shard.to_parquet(root / "shards" / f"{split}-{part}.parquet")
    return root


def embed(row):
    import io

    file = io.BytesIO()
    row["image"].save(file, "JPEG")
    return {"image": {"bytes": file.getvalue(), "path": None}, "label": row["label"]}


def FEATURES():
    import datasets

    return datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})


def test_a_run_leaves_its_config_plan_metrics_and_summary(tmp_path):
    config = settings("training.eval_every=3")
    summary = train.EXPERIMENT.run(config, tmp_path)
    assert summary["status"] == "finished"
    assert {file.name for file in tmp_path.iterdir()} - {".lock"} == {
        "config.yaml", "plan.json", "metrics.jsonl", "timing.jsonl", "summary.json"
    }
    assert load(Config, tmp_path / "config.yaml") == config
    assert 0 <= summary["final_eval_top1"] <= summary["final_eval_top5"] <= 1
    assert summary["targets"] == 6 * 8
    lines = [line for line in metrics(tmp_path) if "eval_top1" in line]
    per_epoch = len(train.build_task(config).train_data) // 8
    assert [line["epoch"] for line in lines] == pytest.approx(
        [3 / per_epoch, 6 / per_epoch], abs=1e-6
    )


def test_training_learns_and_beats_chance_by_far(tmp_path):
    words = ["training.steps=60", "training.batch_size=64", "training.eval_samples=300",
             "optimizer.lr=0.008", "data.augmentation.mixup=0", "data.augmentation.cutmix=0",
             "data.augmentation.crop_scale=[1.0,1.0]", "schedule.warmup_steps=5"]
    summary = train.EXPERIMENT.run(settings(*words), tmp_path)
    assert summary["final_eval_top1"] > 0.5


def test_a_run_stopped_on_the_way_ends_as_the_one_that_was_not(tmp_path, monkeypatch):
    words = ["training.eval_every=2", "checkpoint.final=true", "training.data_workers=1"]
    train.EXPERIMENT.run(settings(*words), tmp_path / "whole")
    add = tasks.Losses.add

    def stopping(self, *args):  # a signal during the third step
        add(self, *args)
        if len(self.sums) and self.targets == 16:
            signals.signal.raise_signal(signals.signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Losses, "add", stopping)
        assert train.EXPERIMENT.run(settings(*words), tmp_path / "parts")["status"] == "stopped"
    summary = train.EXPERIMENT.run(settings(*words), tmp_path / "parts")
    assert summary["resumed_from"] == [3]
    states = [
        sorted((tmp_path / name).glob("checkpoints/step-*/state.safetensors"))[-1].read_bytes()
        for name in ("whole", "parts")
    ]
    assert states[0] == states[1]
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_a_run_goes_on_with_other_workers_and_another_limit(tmp_path):
    """What changes no result may change between a stop and a resume."""
    words = ["training.data_workers=1", "data.max_unreadable=3", "data.cache_dir=elsewhere"]
    first, second = settings(), settings(*words)
    assert runs.run_id(first) == runs.run_id(second)
    assert runs.run_id(first) != runs.run_id(settings("training.eval_samples=19"))
    train.EXPERIMENT.run(first, tmp_path)
    assert train.EXPERIMENT.run(second, tmp_path)["status"] == "finished"  # the same run, done already


def test_runs_keep_their_names_though_keys_went(tmp_path):
    """Shipped tables name runs by hashes of configs that still had these three keys."""
    assert runs.run_id(load(Config, LAPTOP)) == "run-9cb9a7c901"
    train.run(settings(), tmp_path)
    old = {"streaming": False, "lanes": 32, "decoder": "pil"}
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    saved["data"] |= old
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert load(Config, tmp_path / "config.yaml") == settings()
    assert train.run(settings(), tmp_path)["status"] == "finished"  # the same run, done already
    saved["data"]["lanes"] = 16
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(UserError, match="data.lanes 16 -> 32"):
        train.run(settings(), tmp_path)


# ------------------------------------------------------------------------------------------------
# Every field has an effect: another value of it changes what a short run leaves behind.

OTHER = {
    "seed": "7",
    "optimizer.name": "sgd",
    "optimizer.lr": "0.02",
    "optimizer.beta1": "0.5",
    "optimizer.beta2": "0.5",
    "optimizer.eps": "0.1",
    "optimizer.momentum": ("0.5", "optimizer.name=sgd"),
    "optimizer.weight_decay": "0.5",
    "optimizer.decay_mode": ("per_group", "prescription.strategy=maximal_update"),
    "optimizer.clip_norm": ("1e-3", "optimizer.name=sgd"),
    "schedule.name": "constant",
    "schedule.warmup_steps": "1",
    "schedule.steps": "9",
    "schedule.floor": ("0.5", "schedule.min_lr=0.0"),
    "schedule.min_lr": "0.001",
    "training.steps": "5",
    "training.batch_size": "16",
    "training.log_every": "3",
    "training.eval_every": "2",
    "training.eval_samples": "5",
    "training.precision": "bf16",
    "training.divergence_factor": (
        "1.0001", "optimizer.lr=3.0", "training.divergence_factor=1000.0"
    ),
    "training.gradient_scale": "true",
    "training.skip_overflow": "true",
    "training.probe_every": "2",
    "training.probe_samples": ("1", "training.probe_every=2"),
    "model.width": "32",
    "model.layers": "2",
    "model.head_dim": "4",
    "model.mlp_ratio": "2",
    "model.patch_size": "2",
    "model.image_size": ("4", "data.eval_resize=12"),
    "model.classes": ("2", "data.source=folder", "data.path={photos}/folder"),
    "prescription.strategy": "hybrid",
    "prescription.s": (
        "0.25", "prescription.strategy=meta_principled", "prescription.s=0.75"
    ),
    "prescription.mlp_factor": ("keep", "prescription.strategy=neural_tangent"),
    "data.source": ("folder", "data.path={photos}/folder", "model.classes=2"),
    "data.path": ("{photos}/folder", "data.source=folder", "model.classes=2"),
    "data.validation_fraction": "0.5",
    "data.eval_resize": "12",
    "data.augmentation.crop_scale": "[0.3,0.4]",
    "data.augmentation.crop_ratio": "[2.0,3.0]",
    "data.augmentation.flip": "0.5",
    "data.augmentation.rand_augment": "rand-m9-mstd0.5-inc1",
    "data.augmentation.mixup": "0",
    "data.augmentation.cutmix": "0",
    "data.augmentation.cutmix_share": "0.9",
    "data.augmentation.mix_group": "8",
    "data.augmentation.erasing": "1.0",
    "data.augmentation.label_smoothing": "0.3",
}  # fmt: skip
# These change how a run is computed, or act elsewhere: where each is tested.
ELSEWHERE = {
    "training.micro_batch_size": "test_processes",
    "training.eval_batch_size": "test_processes",
    "training.compile": "tests/nanolm_c4/test_train.py, the loop's own",
    "training.data_workers": "test_a_run_stopped_on_the_way_ends_as_the_one_that_was_not",
    "optimizer.atan2_lambda": "of an optimiser that the paper has no rates for",
    "data.max_unreadable": "test_data",
    "data.cache_dir": "test_shards_are_copied_into_the_cache",
}


def test_every_field_is_covered_here():
    keys = {key for key, _ in leaves(Config) if not key.startswith("checkpoint.")}
    assert set(OTHER) | set(ELSEWHERE) == keys
    assert not set(OTHER) & set(ELSEWHERE)


def words(key, photos):
    change = OTHER[key]
    value, *base = change if isinstance(change, tuple) else (change,)
    changed = [*base, f"{key}={value}"]
    if key in ("data.source", "model.classes", "data.path"):  # these only go together
        base = []
    return [[word.format(photos=photos) for word in part] for part in (base, changed)]


def trace(folder, overrides):
    summary = train.EXPERIMENT.run(settings(*overrides), folder)
    probes = folder / "probes.jsonl"
    probed = probes.read_text() if probes.exists() else None
    return metrics(folder), probed, summary["status"], summary["parameters"]


@pytest.mark.parametrize("key", OTHER)
def test_every_field_changes_what_a_run_leaves_behind(photos, tmp_path, key):
    base, changed = words(key, photos)
    assert trace(tmp_path / "a", base) != trace(tmp_path / "b", changed)


def test_shards_are_copied_into_the_cache(photos, tmp_path):
    base = ["data.source=shards", f"data.path={photos}/shards", "model.classes=2"]
    train.build_task(settings(*base, f"data.cache_dir={tmp_path}"))
    assert list(tmp_path.rglob("*.arrow"))


def test_a_folder_and_its_shards_train_on_the_same_classes(photos, tmp_path):
    base = ["model.classes=2", f"data.cache_dir={tmp_path / 'cache'}"]
    for source in ("folder", "shards"):
        words = [f"data.source={source}", f"data.path={photos / source}"]
        summary = train.EXPERIMENT.run(settings(*base, *words), tmp_path / source)
        assert summary["status"] == "finished" and summary["targets"] == 48


# ------------------------------------------------------------------------------------------------
# Commands


def test_help_needs_neither_torch_nor_data():
    code = "import sys, vit_imagenet.train as t\ntry: t.EXPERIMENT.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'accelerate', 'datasets', 'timm'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "data.augmentation.mixup (float, default 0.8)" in result.stdout


def test_the_paper_s_plan_is_printed_with_its_numbers(capsys):
    train.EXPERIMENT.main([str(ROOT / "vit_imagenet/configs/paper.yaml"), "--plan", "--json"])
    plan = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in plan["rows"]}
    published = {  # 20 lambda_G
        "blocks.0.attn.qkv.weight": 9.397e-4, "pos_embed": 0.7217, "head.weight": 8.235e-4,
        "head.bias": 0.6325,
    }  # fmt: skip
    for name, lr in published.items():
        assert rows[name]["lr"] == pytest.approx(lr, rel=1e-3)
    decays = {name: row["lr"] * row["weight_decay"] for name, row in rows.items()}
    assert decays.pop("head.bias") == 0
    assert list(decays.values()) == pytest.approx([8e-4] * len(decays))


def test_the_arithmetic_of_the_paper_s_recipe_is_printed():
    config = load(Config, ROOT / "vit_imagenet/configs/paper.yaml")
    task = SimpleNamespace(config=config, train_data=range(1281167))
    lines = train.arithmetic(task, 8)
    assert lines[0] == "batch 4096 = 8 processes x 2 micro-batches of 256"
    assert lines[1] == "epoch 1,281,167 images = 312 steps, 3,215 left out"
    assert "93,600 steps = 300 epochs; warm-up 6,240 steps = 20 epochs" in lines[2]
    assert "evaluation every 312 steps = 1 epochs" in lines[2]
    assert "rate 20 to 1e-06, cosine; decay per step at the peak: lr wd = 0.0008 (glob" in lines[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.wdth=3"], "unknown key 'model.wdth'; did you mean 'model.width'?"),
        (["model.width=20"], "model.width 20 is not a multiple of model.head_dim 16"),
        (["model.image_size=18"], "model.image_size 18 is not a multiple of model.patch_size 4"),
        (["model.image_size=20"], "data.eval_resize 16 is less than model.image_size 20"),
        (["model.classes=7"], "set model.classes=10"),
        (["prescription.s=0.5"], "prescription.s goes with strategy meta_principled"),
        (["prescription.strategy=meta_principled"], "prescription.s goes with strategy meta_princ"),
        (["prescription.strategy=ntk"], "prescription.strategy: expected 'standard'"),
        (["data.source=folder"], "data.path is missing: the folder of the folder source"),
        (["data.source=folder", "data.path=nowhere"], "data.path: nowhere does not exist"),
        (["data.streaming=true"], "data.streaming=true is gone; leave the key out: shards are "),
        (["data.lanes=16"], "data.lanes=16 is gone; leave the key out"),
        (["data.decoder=draft"], 'data.decoder="draft" is gone; leave the key out'),
        (["data.augmentation.crop_scale=[0.5,0.2]"], "crop_scale [0.5, 0.2]: expected a lower"),
        (["data.augmentation.mix_group=3"], "mix_group: expected a multiple of 2"),
        (["data.augmentation.mix_group=48"], "training.batch_size 128 does not consist of whole"),
        (["training.micro_batch_size=16"], "training.micro_batch_size 16 does not consist of wh"),
        (["optimizer.name=adafactor"], "optimizer 'adafactor'"),
        (["training.batch_size=4096"], "training.batch_size 4096 is more than the"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        train.EXPERIMENT.main([str(LAPTOP), *words, "--run-dir", str(tmp_path / "run")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 2
    assert error.startswith("error: ") and message in error
