"""Corpora of fairseq-preprocess: read as fairseq does, packed like text, and named when damaged."""

import os
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bart_span_denoise import bpe, corpora, data, fairseq_interop
from bart_span_denoise.bpe import EOS, FILES, Bpe
from tests import damages
from tests.bart_span_denoise.texts import (
    DOCUMENTS,
    LIMIT,
    SIZE,
    clean,
    fairseq_preprocess,
    line_tokens,
    of_split,
    prepare,
    random_sizes,
)
from tests.text_files import error_line
from training.data.sampling import Place
from training.data.text import split_sentences

# fairseq takes seconds to import: one process has all tests that do.
pytestmark = pytest.mark.xdist_group("fairseq")


def write_encoded(folder, gpt2, split_lines):
    """GPT-2's numbers of each line, as fairseq's multiprocessing_bpe_encoder writes them."""
    loaded = Bpe(*gpt2.values())
    for split in ("train", "validation"):
        lines = []
        for document in of_split(split):
            lines += [*(split_lines(document)), ""]
        ids = (" ".join(loaded.symbols[i] for i in loaded.encode(line)) for line in lines)
        (folder / f"{split}.bpe").write_text("".join(f"{line}\n" for line in ids))
    return folder


@pytest.fixture(scope="module")
def binarised(tmp_path_factory, gpt2):
    """Folders of fairseq-preprocess.

    A sentence a line over the BPE's dict.txt, a document a line over a dictionary of their own,
    and the first in fairseq's older format.
    """
    root = tmp_path_factory.mktemp("binarised")
    for name in ("sentences", "documents"):
        (root / name).mkdir()
    write_encoded(root / "sentences", gpt2, split_sentences)
    write_encoded(root / "documents", gpt2, lambda document: [document])
    for name, more in {
        "sentences": ["--srcdict", gpt2["bpe_dictionary"], "--dataset-impl", "mmap"],
        "documents": ["--dataset-impl", "mmap"],
        "cached": ["--dataset-impl", "cached"],
    }.items():
        text = root / ("sentences" if name == "cached" else name)
        files = ["--trainpref", f"{text}/train.bpe", "--validpref", f"{text}/validation.bpe"]
        fairseq_preprocess(*files, "--destdir", root / f"{name}-bin", *more)
    return {name: root / f"{name}-bin" for name in ("sentences", "documents", "cached")}


def bpe_files(gpt2):
    return {key: gpt2[key] for key in data.BPE_KEYS[:2]}


def prepare_binarised(tmp_path, folder, **settings):
    return prepare(tmp_path, source="binarised", path=str(folder), **settings)


def test_binarised_tokens_are_fairseqs(tmp_path, binarised, gpt2):
    """Every line that fairseq's reader has, without </s>, is a sentence, in order."""
    corpus = prepare_binarised(tmp_path, binarised["sentences"], **bpe_files(gpt2))
    fairseq = fairseq_interop.fairseq()
    for split, stem in data.STEMS.items():
        theirs = fairseq.data.indexed_dataset.MMapIndexedDataset(str(binarised["sentences"] / stem))
        lines = [theirs[i] for i in range(len(theirs))]
        sentences, long = [], 0
        for tokens, ends in clean(corpus, split):
            sentences += np.split(tokens[1:-1], ends[:-1] - 1)
        assert np.concatenate(sentences).tolist() == torch.cat([x[:-1] for x in lines]).tolist()
        short = [line[:-1].tolist() for line in lines if 1 < len(line) <= LIMIT + 1]
        long = sum(len(line) > LIMIT + 1 for line in lines)
        assert [s.tolist() for s in sentences if s.tolist() in short] == short
        assert corpus.cache.meta[split]["over_long"] == long > 0
        assert corpus.cache.meta[split]["sentences"] == len(short) + long


def test_binarised_corpora_are_packed_like_text(tmp_path, binarised, gpt2):
    """The words of fairseq's dictionary keep their ids, and <mask> comes last."""
    corpus = prepare_binarised(tmp_path, binarised["sentences"], **bpe_files(gpt2))
    loaded = Bpe(*gpt2.values())
    assert (corpus.vocab_size, corpus.cache.meta["mask"]) == (SIZE, SIZE - 1)
    assert corpus.train.noise.word_starts.tolist() == loaded.word_starts.tolist()
    assert corpus.bpe.mask == SIZE - 1
    text = corpus.bpe.decode(np.concatenate([t[1:-1] for t, _ in clean(corpus, "train")]))
    assert text == "".join("".join(split_sentences(d)) for d in of_split("train"))


def test_documents_in_lines_are_cut_into_sentences(tmp_path, binarised, gpt2):
    """With a dictionary of its own, which lacks tokens, and whole documents in lines."""
    corpus = prepare_binarised(tmp_path, binarised["documents"], **bpe_files(gpt2))
    assert corpus.vocab_size % 8 == 1, "padded by fairseq, and <mask>"
    starts, found = corpus.train.noise.word_starts, []
    for tokens, ends in clean(corpus, "train"):
        found += [corpus.bpe.decode(s).strip() for s in np.split(tokens[1:-1], ends[:-1] - 1)]
    sentences = [s for d in of_split("train") for s in split_sentences(d)]
    assert "".join(found).replace(" ", "") == "".join(sentences).replace(" ", "")
    short = [s for s in sentences if len(corpus.bpe.encode(f" {s}")) <= LIMIT - 1]
    missing = Counter(short) - Counter(found)
    assert not missing and len(short) > 100
    assert starts[corpus.bpe.encode(" no")[0]]
    assert corpus.cache.meta["train"]["sentences"] == len(sentences)


def test_sentences_within_lines_are_fairseqs_at_full_stops(gpt2, monkeypatch):
    """Where all sentences end with full stops, fairseq cuts alike: both reversed give one text."""
    loaded = Bpe(*gpt2.values())
    stops = corpora.Stops(loaded.sentence_stops, loaded.word_starts)
    text = "no mu. the sel ven. to ba pi lor. e dan."
    line = np.append(loaded.encode(text), EOS)
    ids, ends = corpora.sample(line, stops)
    assert len(ends) == 4
    permute = fairseq_interop.fairseq().data.denoising_dataset.DenoisingDataset.permute_sentences
    orders = iter([torch.arange, lambda n: torch.arange(n - 1, -1, -1)])
    monkeypatch.setattr(torch, "randperm", lambda n: next(orders)(n))
    rule = SimpleNamespace(full_stop_index=loaded.encode(".")[0])
    theirs = permute(rule, torch.from_numpy(ids), 1.0).tolist()
    assert np.concatenate(np.split(ids[1:-1], ends[:-1] - 1)[::-1]).tolist() == theirs[1:-1]
    numbers = np.append(loaded.encode("no 3.14 mu! is the sel? to"), EOS)
    ids, ends = corpora.sample(numbers, stops)
    found = [loaded.decode(part) for part in np.split(ids[1:-1], ends[:-1] - 1)]
    assert found == ["no 3.14 mu!", " is the sel?", " to"]


def test_binarised_without_the_bpes_files(tmp_path, binarised):
    corpus = prepare_binarised(tmp_path, binarised["documents"], noise={"unit": "token"})
    assert corpus.bpe is None
    assert corpus.cache.meta["train"]["sentences"] == len(of_split("train"))
    source, _target = corpus.train[Place(0, 0, 0)]
    assert corpus.cache.meta["mask"] in source.tolist()
    assert corpus.cache.meta["mask"] == corpus.vocab_size - 1


def test_unknown_tokens_are_reported(tmp_path, binarised, gpt2):
    """validation.bpe has symbols that training text has not: fairseq writes <unk>."""
    folder = tmp_path / "unknown"
    shutil.copytree(binarised["documents"], folder)
    tokens = np.memmap(folder / "valid.bin", "<u2", "r+")
    tokens[np.flatnonzero(tokens > 10)[:3]] = 3
    tokens.flush()
    corpus = prepare_binarised(tmp_path, folder, noise={"unit": "token"})
    already = np.count_nonzero(np.fromfile(binarised["documents"] / "valid.bin", "<u2") == 3)
    assert corpus.describe()[1].endswith(f"; {already + 3} tokens are <unk>")


def test_a_changed_binarised_corpus_is_another_cache(tmp_path, binarised):
    folder = tmp_path / "corpus"
    shutil.copytree(binarised["sentences"], folder)
    settings = {"noise": {"unit": "token"}}
    first = prepare_binarised(tmp_path, folder, **settings).cache.folder
    assert prepare_binarised(tmp_path, folder, **settings).cache.folder == first
    os.utime(folder / "train.bin", (1, 1))
    assert prepare_binarised(tmp_path, folder, **settings).cache.folder != first


def test_index_round_trip_in_parts(tmp_path, monkeypatch):
    """Pointers and line ends are written and checked a part at a time."""
    monkeypatch.setattr(corpora, "ONCE", 7)
    monkeypatch.setattr(corpora, "WINDOW", 50)
    tokens = line_tokens(random_sizes(1))
    lines = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]
    for vocab_size, dtype in ((1000, "<u2"), (70_000, "<u4")):
        corpora.write(tmp_path / "train", lines, vocab_size)
        found = corpora.read(tmp_path / "train")
        assert found.dtype == dtype
        assert found.tolist() == tokens.tolist()
        assert corpora.check(tmp_path / "train", vocab_size) == 0
        fairseqs = fairseq_interop.fairseq().data.indexed_dataset
        theirs = fairseqs.MMapIndexedDataset(str(tmp_path / "train"))
        assert [theirs[i].tolist() for i in range(len(theirs))] == [x.tolist() for x in lines]
        assert theirs._index.dtype == fairseqs.best_fitting_int_dtype(vocab_size)


@pytest.mark.parametrize("damage", damages.of("binarised"), ids=str)
def test_broken_binarised_corpora_are_named(tmp_path, binarised, damage):
    folder = shutil.copytree(binarised["sentences"], tmp_path / "corpus")
    file = damage.do(folder)
    line = error_line(lambda: prepare_binarised(tmp_path, folder, noise={"unit": "token"}))
    assert damage.follows(f"data.path: {file} ", line)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_a_bpe_of_another_corpus_is_refused(tmp_path, binarised, gpt2):
    other = tmp_path / "other"
    other.mkdir()
    bpe.train(DOCUMENTS, 300, other)
    files = {"bpe_encoder": str(other / FILES[0]), "bpe_vocab": str(other / FILES[1])}
    line = error_line(lambda: prepare_binarised(tmp_path, binarised["sentences"], **files))
    assert line.startswith(f"data.path: {binarised['sentences'] / 'dict.txt'} has 295; expected")


def test_other_tokens_are_another_checksum(tmp_path, binarised):
    """A resumed run notices a corpus of as many other tokens."""
    settings = {"noise": {"unit": "token"}}
    folder = shutil.copytree(binarised["sentences"], tmp_path / "bin")
    first = prepare_binarised(tmp_path, folder, **settings).cache
    tokens = np.memmap(folder / "train.bin", corpora.read(folder / "train").dtype, mode="r+")
    tokens[tokens > 4] = 5
    tokens.flush()
    second = prepare_binarised(tmp_path, folder, **settings).cache
    assert first.meta["sha256"] == second.meta["sha256"]
    assert first.checksum != second.checksum
