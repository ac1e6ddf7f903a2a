"""The experiment as a user meets it: commands, files, and a config whose every field acts."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nanolm_c4 import train
from nanolm_c4.config import Config
from training import loading, loop
from training.config import leaves, load

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = "nanolm_c4/configs/laptop.yaml"
SMALL = [
    "model.width=16", "model.head_dim=4", "model.layers=1", "model.context=8",
    "training.steps=6", "training.batch_size=4", "training.log_every=2",
    "schedule.warmup_steps=2", "training.eval_samples=20", "prescription.base_width=32",
    "data.tokenizer_vocab_size=80", "data.validation_fraction=0.2", "data.source=local",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two folders of little documents, and a file with two columns of text."""
    root = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(random.choice(syllables, random.integers(1, 4))) for _ in range(300)]
    for folder in ("one", "two"):
        (root / folder).mkdir()
        for i in range(40):
            text = " ".join(random.choice(words, 40))
            (root / folder / f"{i:02}.txt").write_text(text.capitalize() + ".")
    rows = [
        {"body": (root / "one" / f"{i:02}.txt").read_text(),
         "text": (root / "two" / f"{i:02}.txt").read_text()}
        for i in range(40)
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def settings(texts, *overrides):
    base = [*SMALL, f"data.path={texts / 'one'}", f"data.cache_dir={texts / 'cache'}"]
    return load(Config, ROOT / "nanolm_c4/configs/laptop.yaml", [*base, *overrides])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_config_plan_metrics_and_summary(texts, tmp_path):
    config = settings(texts)
    summary = train.EXPERIMENT.run(config, tmp_path)
    assert summary["status"] == "finished"
    assert {file.name for file in tmp_path.iterdir()} - {".lock"} == {
        "config.yaml", "plan.json", "metrics.jsonl", "timing.jsonl", "summary.json"
    }
    assert load(Config, tmp_path / "config.yaml") == config
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert sum(torch.Size(row["shape"]).numel() for row in rows) == summary["parameters"]


def test_a_done_run_is_not_trained_again(texts, tmp_path, monkeypatch):
    first = train.EXPERIMENT.run(settings(texts), tmp_path)
    monkeypatch.setattr(loop, "train", lambda *args: pytest.fail("trained again"))
    assert train.EXPERIMENT.run(settings(texts), tmp_path) == first


def test_a_folder_with_another_run_is_refused(texts, tmp_path):
    train.EXPERIMENT.run(settings(texts), tmp_path)
    with pytest.raises(ValueError, match=r"another config \(optimizer.lr 0.0078125 -> 0.5\)"):
        train.EXPERIMENT.run(settings(texts, "optimizer.lr=0.5"), tmp_path)


# ------------------------------------------------------------------------------------------------
# Every field has an effect: another value of it changes what a short run leaves behind.

BORDELON = (
    "prescription.alignment=null", "prescription.base_width=null", "model.mlp_ratio=1",
    "prescription.parameterization=bordelon", "prescription.alpha_attention=1.0",
    "prescription.alpha_depth=1.0", "prescription.beta0=4.0", "prescription.gamma0=0.25",
)
OTHER = {
    "seed": "7",
    "optimizer.name": "adam_atan2",
    "optimizer.lr": "0.02",
    "optimizer.beta1": "0.5",
    "optimizer.beta2": "0.5",
    "optimizer.eps": "0.1",
    "optimizer.momentum": ("0.5", "optimizer.name=sgd"),
    "optimizer.atan2_lambda": ("1.0", "optimizer.name=adam_atan2"),
    "optimizer.weight_decay": "0.1",
    "optimizer.decay_mode": ("global", "optimizer.weight_decay=0.1"),
    "optimizer.clip_norm": ("1e-3", "optimizer.name=sgd"),
    "schedule.name": "constant",
    "schedule.warmup_steps": "1",
    "schedule.steps": "9",
    "schedule.floor": "0.5",
    "schedule.min_lr": "0.004",
    "training.steps": "5",
    "training.batch_size": "6",
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
    "training.observe_every": "2",
    "training.observe_samples": ("1", "training.observe_every=2"),
    "model.width": "32",
    "model.heads": ("8", "model.width=null", "model.heads=4"),
    "model.layers": "2",
    "model.head_dim": "8",
    "model.mlp_ratio": "2",
    "model.context": "6",
    "model.vocab_size": "100",
    "prescription.parameterization": "mup",
    "prescription.alignment": "full",
    "prescription.base_width": ("64", "prescription.alignment=full"),
    "prescription.gamma_embedding": "2.0",
    "prescription.gamma_hidden": "2.0",
    "prescription.gamma_readout": "2.0",
    "prescription.eps_per_layer": ("true", "optimizer.eps=0.1"),
    "prescription.embedding_std": "0.5",
    "prescription.qk_exponent": ("-2.0", "model.head_dim=8", "prescription.embedding_std=1.0"),
    "prescription.alpha_attention": ("0.5", *BORDELON),
    "prescription.alpha_depth": ("0.5", *BORDELON, "model.layers=2"),
    "prescription.beta0": ("2.0", *BORDELON),
    "prescription.gamma0": ("2.0", *BORDELON),
    "data.source": "embedded",
    "data.path": "{texts}/two",
    "data.text_key": ("body", "data.path={texts}/rows.jsonl"),
    "data.tokenizer": "{model}",
    "data.tokenizer_vocab_size": "70",
    "data.validation_fraction": "0.4",
    "data.evaluation": "truncate",
    "data.max_train_tokens": "300",
    "data.max_validation_tokens": "100",
}
# These change how a run is computed, not its result: what to look at instead.
HOW = {
    "training.micro_batch_size": ("1", lambda calls: max(calls["rows"]) == 1),
    "training.eval_batch_size": ("2", lambda calls: max(calls["eval_rows"]) == 2),
    "training.compile": ("true", lambda calls: calls["compiled"]),
    "training.data_workers": ("1", lambda calls: calls["workers"] == {1}),
    "data.cache_dir": ("{texts}/other", lambda calls: (calls["texts"] / "other").is_dir()),
}


def test_every_field_is_covered_here():
    # What checkpoint.* does is tested in tests/training/test_resume.py, field by field.
    keys = {key for key, _ in leaves(Config) if not key.startswith("checkpoint.")}
    assert set(OTHER) | set(HOW) == keys
    assert not set(OTHER) & set(HOW)


def words(key, change, texts):
    value, *others = change if isinstance(change, tuple) else (change,)
    found = sorted((texts / "cache").glob("local-*/tokenizer.model"))
    filled = [w.format(texts=texts, model=found[0] if found else "") for w in (value, *others)]
    if key == "data.source":  # the embedded corpus takes no path
        return [], ["data.source=embedded", "data.path=null"]
    return filled[1:], [*filled[1:], f"{key}={filled[0]}"]


def trace(texts, folder, overrides):
    summary = train.EXPERIMENT.run(settings(texts, *overrides), folder)
    probes, seen = folder / "probes.jsonl", folder / "observations.jsonl"
    probed = [path.read_text() if path.exists() else None for path in (probes, seen)]
    return metrics(folder), probed, summary["status"], summary["parameters"]


@pytest.mark.parametrize("key", OTHER)
def test_every_field_changes_what_a_run_leaves_behind(texts, tmp_path, key):
    train.EXPERIMENT.run(settings(texts), tmp_path / "warm")  # makes the tokeniser that one case uses
    base, changed = words(key, OTHER[key], texts)
    if key == "data.tokenizer":
        base = ["data.tokenizer_vocab_size=75"]
    first, second = trace(texts, tmp_path / "a", base), trace(texts, tmp_path / "b", changed)
    assert first != second


@pytest.mark.parametrize("key", HOW)
def test_the_other_fields_change_how_it_is_computed(texts, tmp_path, monkeypatch, key):
    from nanolm_c4 import model as models

    calls = {"rows": [], "eval_rows": [], "compiled": False, "workers": set(),
             "texts": texts}
    forward, loader = models.Decoder.forward, loading.DataLoader
    compiler = torch.compile

    def counted_forward(self, ids, targets=None):
        calls["rows" if self.training else "eval_rows"].append(len(ids))
        return forward(self, ids, targets)

    def counted_loader(*args, **kwargs):
        calls["workers"].add(kwargs["num_workers"])
        return loader(*args, **kwargs)

    def counted_compile(model=None, **kwargs):
        calls["compiled"] = True
        return compiler(model, backend="eager")

    monkeypatch.setattr(models.Decoder, "forward", counted_forward)
    monkeypatch.setattr(loading, "DataLoader", counted_loader)
    monkeypatch.setattr(torch, "compile", counted_compile)
    value, seen = HOW[key]
    train.EXPERIMENT.run(settings(texts, f"{key}={value.format(texts=texts)}"), tmp_path)
    assert seen(calls), calls


# ------------------------------------------------------------------------------------------------
# Commands


def command(*arguments, timeout=100):
    return subprocess.run(
        [sys.executable, "-m", "nanolm_c4.train", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, timeout=timeout,
    )


def test_help_needs_neither_torch_nor_data():
    code = "import sys, nanolm_c4.train as t\ntry: t.EXPERIMENT.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'accelerate', 'datasets'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "optimizer.lr (float, required)" in result.stdout


def test_the_plan_is_printed_as_text_and_as_json(capsys):
    arguments = ["nanolm_c4/configs/paper.yaml", "model.width=2048", "--plan"]
    train.EXPERIMENT.main([str(ROOT / arguments[0]), *arguments[1:]])
    text = capsys.readouterr().out
    assert "blocks.*.mlp.down.weight (8 tensors)" in text and "0.0005" in text
    train.EXPERIMENT.main([str(ROOT / arguments[0]), *arguments[1:], "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["readout.weight"]["lr"] == pytest.approx(0.001 / 2)
    assert rows["token_embedding.weight"]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: cannot read the file"),
        ([LAPTOP, "model.wdth=3"], "unknown key 'model.wdth'; did you mean 'model.width'?"),
        ([LAPTOP, "optimizer.lr=fast"], "optimizer.lr: expected a valid number"),
        ([LAPTOP, "model.vocab_size=5"], "model.vocab_size 5 is smaller than the tokeniser's"),
        ([LAPTOP, "data.source=local"], "path: source local needs one"),
    ],
)
def test_a_users_mistake_is_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        train.EXPERIMENT.main([*arguments, f"data.cache_dir={tmp_path}", "--run-dir", str(tmp_path / "run")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 2
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "run").exists()


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("nanolm_c4.train.prescription", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.EXPERIMENT.main([str(ROOT / "nanolm_c4/configs/paper.yaml"), "--plan"])


def test_the_command_trains(texts, tmp_path):
    words = [*SMALL, f"data.path={texts / 'one'}", f"data.cache_dir={texts / 'cache'}"]
    result = command("nanolm_c4/configs/laptop.yaml", *words, "--run-dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "step 6/6" in result.stderr and "finished: final eval loss" in result.stderr
    assert (tmp_path / "run" / "summary.json").exists()
