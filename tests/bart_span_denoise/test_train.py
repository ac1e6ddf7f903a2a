"""What is special to a run of BART: strategies, padding, compiled shapes, fairseq's corpora."""

import math
from pathlib import Path

import pytest

from bart_span_denoise import train
from bart_span_denoise.config import Config
from tests.bart_span_denoise.texts import fairseq_preprocess
from tests.experiment_cases import CASES, write_texts
from tests.processes import finished
from tests.run_folders import lines
from tests.test_experiments import flat
from training import loop
from training import task as tasks
from training.config import load

# fairseq takes seconds to import: one process has all tests that do.
pytestmark = pytest.mark.xdist_group("fairseq")
ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "bart_span_denoise/configs/laptop.yaml"
SMALL = [*CASES["bart_span_denoise"].small[:-1], "training.batch_size=4"]  # but for the path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two folders of little documents, and a file with two columns of text."""
    root = tmp_path_factory.mktemp("texts")
    write_texts(root)
    return root


def settings(texts, *overrides):
    base = [*SMALL, f"data.path={texts / 'one'}", f"data.cache_dir={texts / 'cache'}"]
    return load(Config, LAPTOP, [*base, *overrides])


def test_a_run_compares_gradients_with_epsilon_and_keeps_the_paddings_row_at_zero(texts, tmp_path):
    task = train.build_task(settings(texts, "optimizer.weight_decay=0.5"))
    loop.train(task, tmp_path)
    first = lines(tmp_path)[0]
    assert {"token_embedding", "query", "mlp_out"} <= first["gradient_to_epsilon"].keys()
    assert first["skipped_steps"] == 0
    weight = task.model.word_embedding.weight
    assert (weight[1] == 0).all() and (weight[2] != 0).any()


def test_an_evaluation_tells_copying_from_infilling(texts, tmp_path):
    """Per target, the loss behind masks and the rest add up; both are a blank model's ln V."""
    config = settings(texts, "prescription.strategy=neural_tangent", "optimizer.lr=1e-9")
    task = train.build_task(config)
    final = train.EXPERIMENT.run(config, tmp_path)
    share, infilling = final["final_eval_infilled_tokens"], final["final_eval_infilling"]
    seen = min(len(task.eval_data), config.training.eval_samples)
    samples = [task.eval_data[index] for index in range(seen)]
    hidden = sum(sample[2].sum().item() for sample in samples)
    assert share == pytest.approx(hidden / sum(len(sample[1]) for sample in samples))
    copying = (final["final_eval_loss"] - infilling) / (1 - share)
    assert infilling / share == pytest.approx(copying, rel=0.1)


def test_the_first_loss_is_that_of_a_model_that_knows_nothing(texts, tmp_path):
    config = settings(texts, "prescription.strategy=neural_tangent", "optimizer.lr=0.5")
    task = train.build_task(config)
    summary = train.EXPERIMENT.run(config, tmp_path)
    # N_rescale makes the logits of order one: a spread adds about half their variance.
    words = len(task.model.word_embedding.weight)
    assert summary["first_train_loss"] == pytest.approx(math.log(words), abs=1.0)


@pytest.mark.parametrize("positions", ["paper", "fairseq"])
def test_under_compile_all_batches_have_the_one_shape_that_the_positions_hold(texts, positions):
    words = [f"model.positions={positions}", "training.compile=true"]
    task = train.build_task(settings(texts, *words))
    batches = list(tasks.first_batches(task, 3))
    assert {part.shape for batch in batches for part in batch} == {(4, task.model.longest)}
    plain = train.build_task(settings(texts, words[0]))
    for padded, batch in zip(batches, tasks.first_batches(plain, 3), strict=True):
        length = batch[0].shape[1]
        assert (padded[0][:, :length] == batch[0]).all()
        assert task.count(padded) == plain.count(batch)


@pytest.fixture(scope="module")
def binarised(texts, tmp_path_factory):
    """A folder of fairseq-preprocess with the BPE's files, as configs/bart_large.yaml has it."""
    folder = tmp_path_factory.mktemp("binarised")
    config = settings(texts, "data.trained_vocab_size=300")
    corpus = train.open_corpus(config)
    for name in ("encoder.json", "vocab.bpe", "dict.txt"):
        (folder / name).write_bytes((corpus.cache.folder / name).read_bytes())
    files = sorted((texts / "one").glob("*.txt"))
    encoded = lambda text: " ".join(corpus.bpe.symbols[i] for i in corpus.bpe.encode(text))
    for split, part in (("train", files[:32]), ("valid", files[32:])):
        lines = []
        for file in part:
            lines += [*map(encoded, file.read_text().replace(". ", ".\n ").split("\n")), ""]
        (folder / f"{split}.bpe").write_text("".join(f"{line}\n" for line in lines))
    words = ("--dataset-impl", "mmap", "--srcdict", folder / "dict.txt", "--destdir", folder)
    parts = ("--trainpref", folder / "train.bpe", "--validpref", folder / "valid.bpe")
    fairseq_preprocess(*words, *parts)
    return folder


def test_a_whole_run_on_a_corpus_of_fairseq_preprocess(texts, binarised, tmp_path):
    words = (
        f"data.path={binarised} data.source=binarised data.bpe_encoder={binarised}/encoder.json "
        f"data.bpe_vocab={binarised}/vocab.bpe training.eval_every=3 data.cache_dir={tmp_path}/c"
    ).split()
    config = settings(texts, *words)
    summary = train.EXPERIMENT.run(config, tmp_path / "whole")
    assert summary["status"] == "finished" and config.data.noise.unit == "word"
    assert summary["final_eval_bits"] == pytest.approx(summary["final_eval_loss"] / math.log(2))
    assert summary["best_eval_bits"] == pytest.approx(summary["best_eval_loss"] / math.log(2))


# A sharded run, with samples of all lengths


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}


def test_sharded_with_recomputed_blocks_it_is_the_same_run(tmp_path):
    """FSDP2 over two processes, as R2C2 is launched; clip and the roles' numbers included."""
    write_texts(tmp_path)
    words = [word.format(files=tmp_path) for word in CASES["bart_span_denoise"].small]
    words += (
        f"data.cache_dir={tmp_path} training.eval_every=3 training.micro_batch_size=4 "
        "prescription.strategy=neural_tangent optimizer.lr=0.2 training.eval_samples=7 "
        "model.dropout=0.0 model.attention_dropout=0.0"  # every process drops out for itself
    ).split()
    command = ["-m", "bart_span_denoise.train", "bart_span_denoise/configs/laptop.yaml", *words]
    for ranks, env in ((1, {}), (2, FSDP)):
        folder = tmp_path / str(ranks)
        result = finished(*command, "--run-dir", folder, ranks=ranks, cwd=ROOT, **env)
        assert result.returncode == 0, result.err
    one, two = (list(map(flat, lines(tmp_path / name))) for name in ("1", "2"))
    assert len(one) == len(two)
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=1e-4)
