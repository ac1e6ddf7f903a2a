"""Text to rows: sources, tokeniser, cache and rows; offline, on corpora of a few kilobytes."""

import io
import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nanolm_c4 import data
from nanolm_c4.config import DataConfig
from tests import damages
from tests.text_files import as_c4, as_txt, error_line, of_split, write_documents
from training.data import text as texts
from training.data.sampling import BatchIds
from training.data.text import embedded_file, read_embedded

DOCUMENTS = write_documents(60)


def prepare(tmp_path, threads=1, **settings):
    """The corpus of a config's data section at toy size."""
    toy = {"source": "local", "tokenizer_vocab_size": 64, "validation_fraction": 0.3}
    toy["cache_dir"] = str(tmp_path / "cache")
    return data.from_config(DataConfig(**{**toy, **settings}), threads, lambda line: None)


def train_model(file, **ids):
    """A small SentencePiece model with the given special ids."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(DOCUMENTS),
        model_writer=model,
        vocab_size=64,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, **ids},
    )
    file.write_bytes(model.getvalue())
    return str(file)


def stored_documents(corpus, split):
    """Each stored document's text; checks that BOS and EOS enclose it."""
    tokens, offsets = corpus.tokens(split), corpus.offsets(split)
    texts = []
    for start, end in itertools.pairwise(offsets):
        ids = tokens[start:end].tolist()
        assert ids[0] == corpus.tokenizer.bos
        assert ids[-1] == corpus.tokenizer.eos
        texts.append(corpus.tokenizer.decode(ids))
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return as_txt(tmp_path_factory.mktemp("text") / "documents", DOCUMENTS)


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), path=str(folder))


@pytest.mark.thorough
def test_the_embedded_corpus_survives_the_round_trip(tmp_path):
    chapters = read_embedded(embedded_file())
    corpus = data.from_config(DataConfig(cache_dir=str(tmp_path)), report=lambda line: None)
    for split in data.SPLITS:
        assert stored_documents(corpus, split) == of_split(chapters, split, 0.05)
        assert corpus.meta[split]["unknown"] == 0
    counts = [corpus.meta[split] for split in data.SPLITS]
    assert corpus.vocab_size == 1024 > corpus.tokens("train").max()
    assert sum(count["documents"] for count in counts) == 1189
    assert sum(count["characters"] for count in counts) == sum(map(len, chapters))
    assert 40 < corpus.meta["validation"]["documents"] < 80
    assert 3.0 < corpus.meta["bytes_per_token"]["train"] < 3.5


def test_split_is_by_document_and_complete(corpus):
    for split in data.SPLITS:
        assert stored_documents(corpus, split) == of_split(DOCUMENTS, split)
        assert corpus.meta[split]["documents"] == len(of_split(DOCUMENTS, split)) > 0


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A model with T5's special ids: pad 0, EOS 1, unknown 2 and no BOS."""
    return train_model(tmp_path_factory.mktemp("t5") / "spiece.model")


@pytest.fixture
def c4(tmp_path, monkeypatch):
    """Its fetched files."""
    monkeypatch.setattr(texts, "FETCHED", tmp_path / "c4")
    return as_c4(tmp_path / "c4", DOCUMENTS)


def test_c4_stops_after_the_asked_tokens(tmp_path, t5, c4):
    limits = {"max_train_tokens": 300, "max_validation_tokens": 100}
    corpus = prepare(tmp_path, source="c4", tokenizer=t5, **limits)
    for split, limit in (("train", 300), ("validation", 100)):
        offsets = corpus.offsets(split)
        assert offsets[-2] < limit <= offsets[-1]
        assert corpus.meta[split]["tokens"] == offsets[-1] == len(corpus.tokens(split))
        documents = {"train": DOCUMENTS, "validation": DOCUMENTS[50:]}[split]
        assert stored_documents(corpus, split) == documents[: len(offsets) - 1]


def test_c4_stops_reading_files_too(tmp_path, t5, c4, monkeypatch):
    """A later file that is broken is never opened: a stream ends where the limit is reached."""
    monkeypatch.setattr(data, "ENCODE_DOCUMENTS", 5)
    (c4 / "c4-train.00001-of-00002.json.gz").write_bytes(b"broken")
    settings = {"source": "c4", "tokenizer": t5}
    prepare(tmp_path, **settings, max_train_tokens=50)
    assert "c4-train.00001" in error_line(lambda: prepare(tmp_path, **settings))


def test_training_is_repeatable_and_quiet(tmp_path, capfd):
    for name in ("a.model", "b.model"):
        data.train_tokenizer(DOCUMENTS, 64, tmp_path / name)
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    assert capfd.readouterr() == ("", "")
    assert sorted(os.listdir(tmp_path)) == ["a.model", "b.model"]


def test_training_reads_a_bounded_amount(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TOKENIZER_CHARACTERS", 4000)
    read = []
    many = (read.append(i) or DOCUMENTS[i % 60] for i in range(600))
    data.train_tokenizer(many, 64, tmp_path / "a.model")
    assert len(read) < 60


def test_round_trip_and_threads(corpus):
    tokenizer = data.load_tokenizer(corpus.folder / "tokenizer.model", num_threads=2)
    ids = tokenizer.encode(DOCUMENTS)
    assert [tokenizer.decode(one) for one in ids] == DOCUMENTS
    alone = [corpus.tokenizer.encode([text])[0] for text in DOCUMENTS]
    assert all((a == b).all() for a, b in zip(ids, alone, strict=True))
    wrapped = [tokenizer.bos, *ids[0], tokenizer.eos, tokenizer.pad, tokenizer.pad]
    assert tokenizer.decode(wrapped) == DOCUMENTS[0]


def test_a_model_without_bos_gets_the_next_id(tmp_path, folder, t5):
    corpus = prepare(tmp_path, path=str(folder), tokenizer=t5)
    assert corpus.tokenizer.bos == 64
    assert (corpus.tokenizer.pad, corpus.tokenizer.eos) == (0, 1)
    assert corpus.vocab_size == 65
    assert stored_documents(corpus, "train") == of_split(DOCUMENTS, "train")
    assert corpus.tokens("train")[0] == 64


def test_a_model_without_pad_pads_with_eos(tmp_path):
    model = train_model(tmp_path / "m", pad_id=-1, bos_id=0)
    tokenizer = data.load_tokenizer(model)
    assert tokenizer.pad == tokenizer.eos == 1
    assert (tokenizer.bos, tokenizer.vocab_size) == (0, 64)


def test_rare_characters_become_unknown_not_an_error(tmp_path):
    exotic = "".join(map(chr, range(0x4E00, 0x4E00 + 100)))
    documents = [*DOCUMENTS, exotic]
    data.train_tokenizer(documents, 64, tmp_path / "a.model")
    tokenizer = data.load_tokenizer(tmp_path / "a.model")
    assert tokenizer.unk in tokenizer.encode([exotic])[0]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(DOCUMENTS)] == DOCUMENTS


@pytest.mark.parametrize("damage", damages.of("tokeniser"), ids=str)
def test_tokeniser_file_errors(tmp_path, folder, damage):
    data.train_tokenizer(DOCUMENTS, 64, tmp_path / damage.name)
    file = damage.do(tmp_path)
    for load in (
        lambda: data.load_tokenizer(file),
        lambda: prepare(tmp_path, path=str(folder), tokenizer=str(file)),
    ):
        assert error_line(load).startswith(f"{damage.words} {file} ")


def test_t5s_model_is_the_one_that_is_fetched():
    bytes_, digest = data.T5
    script = (Path(data.__file__).parents[1] / "scripts/download.sh").read_text()
    assert f"data/t5 {bytes_} \\\n    {digest}\n" in script


def test_meta_counts_what_is_stored(corpus):
    names = {"train.bin", "validation.bin", "train_offsets.npy", "validation_offsets.npy"}
    assert set(corpus.meta["sizes"]) == names | {"tokenizer.model"}
    train, texts = corpus.meta["train"], of_split(DOCUMENTS, "train")
    assert train["characters"] == train["bytes"] == sum(map(len, texts))
    assert train["tokens"] == len(corpus.tokens("train")) == corpus.offsets("train")[-1]
    assert corpus.meta["bytes_per_token"]["train"] == round(train["bytes"] / train["tokens"], 4)
    assert (corpus.meta["source"], corpus.meta["validation_fraction"]) == ("local", 0.3)
    assert set(corpus.meta["versions"]) == {"python", "numpy", "sentencepiece", "datasets"}
    assert corpus.tokens("train").dtype == np.uint16  # small vocabularies take two bytes


def test_whatever_changes_the_content_changes_the_folder(tmp_path, t5):
    path = as_txt(tmp_path / "documents", DOCUMENTS)
    keys = {"tokenizer_vocab_size": 70, "validation_fraction": 0.4, "tokenizer": t5}
    keys |= {"max_train_tokens": 100, "max_validation_tokens": 100}
    settings = [{}, *({key: value} for key, value in keys.items())]
    folders = [prepare(tmp_path, path=str(path), **changes).folder for changes in settings]
    (path / "0000.txt").write_text("Another text.")
    folders.append(prepare(tmp_path, path=str(path)).folder)
    assert len(set(folders)) == len(settings) + 1


@pytest.mark.parametrize("context", [8, 16, 61])
def test_train_rows_are_the_documents_end_to_end(corpus, context):
    rows = data.PackedRows(corpus, context, "train")
    ids = torch.cat([inputs for inputs, _ in rows]).tolist()
    assert len(rows) == corpus.meta["train"]["tokens"] // context
    tokenizer = corpus.tokenizer
    ends = [position + 1 for position, token in enumerate(ids) if token == tokenizer.eos]
    starts = [0, *ends[:-1]]
    texts = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]
    documents = of_split(DOCUMENTS, "train")
    assert texts == documents[: len(texts)]
    assert corpus.meta["train"]["tokens"] - len(ids) < context
    # Only what the dropped tail holds may be missing.
    assert corpus.offsets("train")[len(texts) + 1 :].size <= context


@pytest.mark.parametrize("context", [8, 40, 400])
def test_validation_rows_hold_one_document_each(corpus, context):
    rows = data.ValidationRows(corpus, context)
    documents = of_split(DOCUMENTS, "validation")
    assert len(rows) == len(documents)
    lengths = np.diff(corpus.offsets("validation"))
    for (inputs_T, targets_T), text, length in zip(rows, documents, lengths, strict=True):
        kept = min(int(length), context)
        assert inputs_T.shape == targets_T.shape == (context,)
        assert inputs_T[0] == corpus.tokenizer.bos
        assert (inputs_T[kept:] == corpus.tokenizer.pad).all()
        assert torch.equal(targets_T[: kept - 1], inputs_T[1:kept])
        assert (targets_T[kept - 1 :] == data.IGNORE).all()
        if kept == length:
            assert corpus.tokenizer.decode(inputs_T.tolist()) == text
            assert targets_T[kept - 2] == corpus.tokenizer.eos


def test_split_validation_rows_hold_all_of_every_document(corpus):
    rows = data.ValidationRows(corpus, 16, split=True)
    lengths = np.diff(corpus.offsets("validation"))
    assert len(rows) == sum(-(-int(length) // 16) for length in lengths)
    tokens = torch.cat([inputs_T[inputs_T != corpus.tokenizer.pad] for inputs_T, _ in rows])
    assert tokens.tolist() == corpus.tokens("validation").tolist()
    targets = sum(int((targets_T != data.IGNORE).sum()) for _, targets_T in rows)
    assert targets == lengths.sum() - len(rows)


def test_batch_fetch_equals_single_fetches(corpus):
    for rows in (data.PackedRows(corpus, 16, "train"), data.ValidationRows(corpus, 16)):
        ids = [3, 0, 3, len(rows) - 1]
        batch = data.collate(rows.__getitems__(ids))
        single = data.collate([rows[i] for i in ids])
        assert all(torch.equal(a, b) for a, b in zip(batch, single, strict=True))
        assert all(tensor.shape == (4, 16) for tensor in batch)


def test_context_errors(corpus):
    tokens = corpus.meta["train"]["tokens"]
    assert len(data.PackedRows(corpus, tokens, "train")) == 1
    assert error_line(lambda: data.PackedRows(corpus, tokens + 1, "train"))


def test_what_spawned_workers_are_sent_carries_no_opened_file(corpus):
    rows = data.PackedRows(corpus, 16, "train")
    first, _ = rows[0]
    content = pickle.dumps((rows, data.collate))
    assert len(content) < 10_000
    again, collate = pickle.loads(content)
    assert torch.equal(first, collate([again[0]])[0][0])


def test_workers_change_no_batch(corpus):
    rows = data.PackedRows(corpus, 16, "train")
    sampler = BatchIds(len(rows), 0, 8, 4, rank=1, world_size=2, first_step=0, last_step=5)
    alone, helped = (
        list(DataLoader(rows, batch_sampler=sampler, collate_fn=data.collate, num_workers=workers))
        for workers in (0, 2)
    )
    assert len(alone) == len(helped) == 5
    for batch, other in zip(alone, helped, strict=True):
        assert all(map(torch.equal, batch, other))
