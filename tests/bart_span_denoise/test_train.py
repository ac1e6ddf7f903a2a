"""The experiment as a user meets it: commands, resume, strategies, and fields that act."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bart_span_denoise import train
from bart_span_denoise.config import Config
from training import loop, signals
from training import task as tasks
from training.config import leaves, load

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "bart_span_denoise/configs/laptop.yaml"
SMALL = [
    "model.width=16", "model.head_dim=8", "model.layers=1", "data.source=text",
    "data.tokens_per_sample=24", "data.trained_vocab_size=300", "data.validation_fraction=0.2",
    "training.steps=6", "training.batch_size=4", "training.log_every=2", "training.eval_every=0",
    "training.eval_samples=10", "training.eval_batch_size=8", "schedule.warmup_steps=2",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two folders of little documents, and a file with two columns of text."""
    root = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(random.choice(syllables, random.integers(1, 4))) for _ in range(200)]

    def document():
        sentences = [" ".join(random.choice(words, random.integers(3, 8))) for _ in range(6)]
        return " ".join(f"{sentence.capitalize()}." for sentence in sentences)

    for folder in ("one", "two"):
        (root / folder).mkdir()
        for index in range(40):
            (root / folder / f"{index:02}.txt").write_text(document())
    rows = [
        {"body": (root / "one" / f"{i:02}.txt").read_text(),
         "text": (root / "two" / f"{i:02}.txt").read_text()}
        for i in range(40)
    ]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def settings(texts, *overrides):
    base = [*SMALL, f"data.path={texts / 'one'}", f"data.cache_dir={texts / 'cache'}"]
    return load(Config, LAPTOP, [*base, *overrides])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_its_config_plan_metrics_and_summary(texts, tmp_path):
    config = settings(texts, "training.eval_every=3")
    summary = train.EXPERIMENT.run(config, tmp_path)
    assert summary["status"] == "finished"
    assert {file.name for file in tmp_path.iterdir()} - {".lock"} == {
        "config.yaml", "plan.json", "metrics.jsonl", "timing.jsonl", "summary.json"
    }
    assert load(Config, tmp_path / "config.yaml") == config
    first = metrics(tmp_path)[0]
    assert {"token_embedding", "query", "mlp_out"} <= first["gradient_to_epsilon"].keys()
    assert first["skipped_steps"] == 0


def test_the_first_loss_is_that_of_a_model_that_knows_nothing(texts, tmp_path):
    config = settings(texts, "prescription.strategy=neural_tangent", "optimizer.lr=0.5")
    task = train.build_task(config)
    summary = train.EXPERIMENT.run(config, tmp_path)
    # N_rescale makes the logits of order one: a spread adds about half their variance.
    assert summary["first_train_loss"] == pytest.approx(
        math.log(len(task.model.word_embedding.weight)), abs=1.0
    )


def test_the_paddings_row_stays_zero(texts, tmp_path):
    task = train.build_task(settings(texts, "optimizer.weight_decay=0.5"))
    loop.train(task, tmp_path)
    weight = task.model.word_embedding.weight
    assert (weight[1] == 0).all() and (weight[2] != 0).any()


def test_a_run_stopped_on_the_way_ends_as_the_one_that_was_not(texts, tmp_path, monkeypatch):
    words = ["training.eval_every=2", "checkpoint.final=true", "training.data_workers=1"]
    train.EXPERIMENT.run(settings(texts, *words), tmp_path / "whole")
    add = tasks.Losses.add
    calls = []

    def stopping(self, *args):  # a signal during the third step
        add(self, *args)
        calls.append(1)
        if len(calls) == 3:
            signals.signal.raise_signal(signals.signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Losses, "add", stopping)
        assert train.EXPERIMENT.run(settings(texts, *words), tmp_path / "parts")["status"] == "stopped"
    summary = train.EXPERIMENT.run(settings(texts, *words), tmp_path / "parts")
    assert summary["resumed_from"] == [3]
    states = [
        sorted((tmp_path / name).glob("checkpoints/step-*/state.safetensors"))[-1].read_bytes()
        for name in ("whole", "parts")
    ]
    assert states[0] == states[1]  # dropout and noise included
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_lr_and_decay_of_neural_tangent_are_the_standard_run_s_at_every_block(texts):
    """(n^(3/2) lr, n^(-3/2) wd) gives the blocks the standard rates and all tensors its decay."""
    n = 16
    standard = train.build_task(settings(texts, "optimizer.lr=0.002")).plan
    words = [f"optimizer.lr={0.002 * n**1.5}", f"optimizer.weight_decay={0.01 * n**-1.5}",
             "prescription.strategy=neural_tangent"]
    mapped = train.build_task(settings(texts, *words)).plan
    for ours, theirs in zip(mapped.rows, standard.rows):
        same = ours.role not in ("token_embedding", "position_embedding")
        assert (ours.lr == pytest.approx(theirs.lr)) is same
        assert ours.decay_per_step == pytest.approx(theirs.decay_per_step)


@pytest.mark.parametrize("positions", ["paper", "fairseq"])
def test_under_compile_all_batches_have_the_one_shape_that_the_positions_hold(texts, positions):
    words = [f"model.positions={positions}", "training.compile=true"]
    task = train.build_task(settings(texts, *words))
    batches = list(tasks.first_batches(task, 3))
    assert {part.shape for batch in batches for part in batch} == {(4, task.model.longest)}
    plain = train.build_task(settings(texts, words[0]))
    for padded, batch in zip(batches, tasks.first_batches(plain, 3)):
        length = batch[0].shape[1]
        assert (padded[0][:, :length] == batch[0]).all()
        assert task.count(padded) == plain.count(batch)


PREPROCESS = """
import sys
from bart_span_denoise import fairseq_library
fairseq = fairseq_library.load()
from fairseq import options
from fairseq_cli import preprocess
preprocess.main(options.get_preprocessing_parser().parse_args(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def binarised(texts, tmp_path_factory):
    """A folder of fairseq-preprocess with the BPE's files, as configs/bart_large.yaml has it."""
    folder = tmp_path_factory.mktemp("binarised")
    config = settings(texts, "data.trained_vocab_size=300")
    corpus = train.open_corpus(config)
    for name in ("encoder.json", "vocab.bpe", "dict.txt"):
        (folder / name).write_bytes((corpus.cache.folder / name).read_bytes())
    files = sorted((texts / "one").glob("*.txt"))
    for split, part in (("train", files[:32]), ("valid", files[32:])):
        lines = []
        for file in part:
            sentences = file.read_text().replace(". ", ".\n ").split("\n")
            lines += [" ".join(corpus.bpe.symbols[i] for i in corpus.bpe.encode(s))
                      for s in sentences] + [""]
        (folder / f"{split}.bpe").write_text("".join(f"{line}\n" for line in lines))
    subprocess.run(
        [sys.executable, "-c", PREPROCESS, "--only-source", "--dataset-impl", "mmap",
         "--srcdict", folder / "dict.txt", "--destdir", folder,
         "--trainpref", folder / "train.bpe", "--validpref", folder / "valid.bpe"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return folder


def test_a_whole_run_on_a_corpus_of_fairseq_preprocess(texts, binarised, tmp_path, monkeypatch):
    words = [f"data.path={binarised}", "data.source=binarised", "checkpoint.final=true",
             f"data.bpe_encoder={binarised / 'encoder.json'}", "training.eval_every=3",
             f"data.bpe_vocab={binarised / 'vocab.bpe'}", f"data.cache_dir={tmp_path / 'cache'}"]
    config = settings(texts, *words)
    summary = train.EXPERIMENT.run(config, tmp_path / "whole")
    assert summary["status"] == "finished" and config.data.noise.unit == "word"
    assert summary["final_eval_bits"] == pytest.approx(summary["final_eval_loss"] / math.log(2))
    assert summary["best_eval_bits"] == pytest.approx(summary["best_eval_loss"] / math.log(2))
    add, calls = tasks.Losses.add, []

    def stopping(self, *args):
        add(self, *args)
        calls.append(1)
        if len(calls) == 4:
            signals.signal.raise_signal(signals.signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.Losses, "add", stopping)
        train.EXPERIMENT.run(config, tmp_path / "parts")
    assert train.EXPERIMENT.run(config, tmp_path / "parts")["resumed_from"] == [4]
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


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
    "optimizer.decay_mode": ("per_group", "prescription.strategy=neural_tangent",
                             "optimizer.weight_decay=0.5"),
    "optimizer.clip_norm": "1e-5",
    "schedule.name": "constant",
    "schedule.warmup_steps": "1",
    "schedule.steps": "9",
    "schedule.floor": "0.5",
    "schedule.min_lr": "0.001",
    "training.steps": "5",
    "training.batch_size": "6",
    "training.log_every": "3",
    "training.eval_every": "2",
    "training.eval_samples": "5",
    "training.precision": "bf16",
    "training.gradient_scale": "false",
    "training.skip_overflow": "false",
    "training.divergence_factor": (
        "1.0001", "optimizer.lr=3.0", "training.divergence_factor=1000.0"
    ),
    "training.probe_every": "2",
    "training.probe_samples": ("1", "training.probe_every=2"),
    "model.width": "32",
    "model.layers": "2",
    "model.head_dim": "4",
    "model.mlp_ratio": "2",
    "model.vocab_size": "400",
    "model.positions": "fairseq",
    "model.dropout": "0.5",
    "model.attention_dropout": "0.5",
    "prescription.strategy": "hybrid",
    "prescription.s": (
        "0.25", "prescription.strategy=meta_principled", "prescription.s=0.75"
    ),
    "prescription.mlp_factor": ("keep", "prescription.strategy=neural_tangent"),
    "data.source": ("embedded", "data.path=null"),
    "data.path": "{texts}/two",
    "data.text_key": ("body", "data.path={texts}/rows.jsonl"),
    "data.trained_vocab_size": "320",
    "data.tokens_per_sample": "16",
    "data.validation_fraction": "0.4",
    "data.max_train_tokens": "600",
    "data.max_validation_tokens": "100",
    "data.noise.unit": "token",
    "data.noise.fraction": "0.5",
    "data.noise.fraction_mode": "exact",
    "data.noise.poisson_lambda": "1.5",
    "data.noise.permute": "false",
}  # fmt: skip
# These change how a run is computed, or act elsewhere: where each is tested.
ELSEWHERE = {
    "training.micro_batch_size": "test_processes",
    "training.eval_batch_size": "test_processes",
    "training.compile": "tests/nanolm_c4/test_train.py, the loop's own",
    "training.data_workers": "test_a_run_stopped_on_the_way_ends_as_the_one_that_was_not",
    "optimizer.atan2_lambda": "of an optimiser that the paper has no rates for",
    "data.cache_dir": "test_data",
    "data.bpe_encoder": "test_data",
    "data.bpe_vocab": "test_data",
    "data.bpe_dictionary": "test_data",
}


def test_every_field_is_covered_here():
    keys = {key for key, _ in leaves(Config) if not key.startswith("checkpoint.")}
    assert set(OTHER) | set(ELSEWHERE) == keys
    assert not set(OTHER) & set(ELSEWHERE)


def trace(texts, folder, overrides):
    summary = train.EXPERIMENT.run(settings(texts, *overrides), folder)
    probes = folder / "probes.jsonl"
    probed = probes.read_text() if probes.exists() else None
    return metrics(folder), probed, summary["status"], summary["parameters"]


@pytest.mark.parametrize("key", OTHER)
def test_every_field_changes_what_a_run_leaves_behind(texts, tmp_path, key):
    change = OTHER[key]
    value, *others = change if isinstance(change, tuple) else (change,)
    base = [word.format(texts=texts) for word in others]
    changed = [*base, f"{key}={value}".format(texts=texts)]
    if key == "data.source":  # the embedded corpus takes no path
        base = []
    assert trace(texts, tmp_path / "a", base) != trace(texts, tmp_path / "b", changed)


# ------------------------------------------------------------------------------------------------
# Commands


def test_help_needs_neither_torch_nor_data_nor_fairseq():
    code = "import sys, bart_span_denoise.train as t\n"
    code += "try: t.EXPERIMENT.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'accelerate', 'datasets', 'fairseq'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "data.noise.fraction (float, default 0.3)" in result.stdout


@pytest.mark.parametrize(
    ("config", "parameters"), [("bart_large", 404_845_568), ("r2c2", 2_688_739_328)]
)
def test_the_paper_s_plans_are_printed_without_data(capsys, config, parameters):
    train.EXPERIMENT.main([str(ROOT / f"bart_span_denoise/configs/{config}.yaml"), "--plan", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert sum(torch.Size(row["shape"]).numel() for row in rows) == parameters


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.wdth=3"], "unknown key 'model.wdth'; did you mean 'model.width'?"),
        (["model.width=20"], "model.width 20 is not a multiple of model.head_dim 16"),
        (["model.vocab_size=50"], "model.vocab_size 50 is smaller than the dictionary's"),
        (["prescription.s=0.5"], "prescription.s goes with strategy meta_principled"),
        (["data.path=somewhere"], "data.path: source embedded takes no path"),
        (["data.source=text"], "data.path: source text needs data.path"),
        (["data.bpe_vocab=a"], "data.bpe_encoder and data.bpe_vocab go together"),
        (["optimizer.name=adafactor"], "optimizer 'adafactor'"),
    ],
)
def test_a_users_mistake_is_one_line(texts, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        cache = f"data.cache_dir={texts / 'cache'}"
        train.EXPERIMENT.main([str(LAPTOP), cache, *words, "--run-dir", str(tmp_path / "run")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 2
    assert error.startswith("error: ") and message in error
