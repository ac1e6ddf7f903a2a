"""What a config may say, and the one line that answers what it may not."""

from pathlib import Path

import pytest

from training import runs
from training.config import leaves, load
from vit_cifar5m import train
from vit_cifar5m.config import Config

ROOT = Path(__file__).resolve().parents[2]
LAPTOP, PAPER = (ROOT / f"vit_cifar5m/configs/{name}.yaml" for name in ("laptop", "paper"))


def settings(*overrides):
    return load(Config, LAPTOP, overrides)


def test_the_papers_base_model_is_that_of_figure_6():
    config = load(Config, PAPER)
    model, rule = config.model, config.prescription
    assert (model.head_dim, model.heads, model.layers, model.width) == (16, 16, 4, 256)
    assert (rule.alpha_attention, rule.alpha_depth, rule.beta0, rule.gamma0) == (1, 1, 4, 0.1)
    assert config.optimizer.name == "sgd"
    assert config.optimizer.momentum > 0
    images = 5 * 1_000_448  # Nakkiran et al. (2021) train on five of six files
    assert config.training.steps == images // config.training.batch_size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.patch_size=5"], "model.patch_size 5 does not divide model.image_size 32"),
        (["model.image_size=64"], "model.image_size"),
        (["model.width=32"], "model.width"),
        (["model.heads=0"], "model.heads"),
        (["prescription.alpha_attention=0.4"], "prescription.alpha_attention"),
        (["prescription.alpha_depth=1.1"], "prescription.alpha_depth"),
        (["prescription.gamma0=0.0"], "prescription.gamma0"),
        (["data.source=cifar5m"], "data.path is missing: the folder of the cifar5m source"),
        (["data.sauce=1"], "did you mean 'data.source'"),
        (["optimizer.name=adafactor"], "optimizer.name adafactor: Bordelon et al. prescribe rates"),
        (["data.source=cifar5m", "data.path=nowhere"], "data.path: nowhere is not a folder"),
    ],
)
def test_what_is_impossible_is_one_line_and_exit_code_2(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        train.EXPERIMENT.main([str(LAPTOP), *words, "--run-dir", str(tmp_path / "run")])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and message in line
    assert str(LAPTOP) in line or "nowhere" in line
    assert not (tmp_path / "run").exists()


def test_every_key_has_its_help_text():
    assert not [key for key, item in leaves(Config) if not item.description]


def test_where_files_are_kept_makes_no_other_run():
    assert runs.run_id(settings()) == runs.run_id(settings("data.cache_dir=elsewhere"))
    assert runs.run_id(settings()) != runs.run_id(settings("data.validation_images=7"))
