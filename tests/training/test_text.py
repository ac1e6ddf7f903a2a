"""training.data.text: which documents each source has, how they are split, and what is refused."""

import gzip

import pytest

from tests import damages
from tests.text_files import as_c4, as_jsonl_gz, as_parquet, as_txt, error_line, of_split
from training.data import text
from training.data.text import (
    SPLITS,
    embedded_file,
    in_validation,
    open_source,
    read_embedded,
    split_sentences,
)

DOCUMENTS = [f"Document {i} has {7 * i} words; some — odd “ones”. And an end!" for i in range(60)]
# which of "document 0" .. "document 39" are held out at 0.2
FROZEN_VALIDATION = [15, 26, 27, 36, 37]


def read(source="local", path=None, **settings):
    """Both splits' documents of a source."""
    path = None if path is None else str(path)
    opened = open_source(source, path, **{"validation_fraction": 0.3, **settings})
    return {split: [*opened.documents(split)] for split in SPLITS}


EXPECTED = {split: of_split(DOCUMENTS, split) for split in SPLITS}


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
    assert psalms[0].startswith("BOOK I Psalm 1 Blessed is the man who doesn't walk")
    assert psalms[22].startswith("Psalm 23 A Psalm by David. Yahweh is my shepherd:")
    numbers = [int(text.split("Psalm ", 1)[1].split()[0]) for text in psalms]
    assert numbers == list(range(1, 151))


def test_split_is_frozen():
    """A document must never change sides: results on the validation split are compared."""
    chosen = [i for i in range(40) if in_validation(f"document {i}", 0.2)]
    assert chosen == FROZEN_VALIDATION


def test_split_share_and_nesting():
    small = {i for i in range(4000) if in_validation(str(i), 0.05)}
    large = {i for i in range(4000) if in_validation(str(i), 0.2)}
    assert 150 < len(small) < 250
    assert small < large


def test_sentences_lose_nothing_but_spaces():
    text = 'One. Two! "Three?" he said.\nFour\n\n' + "long " * 900 + "x" * 2500 + " end"
    sentences = list(split_sentences(text, 1000))
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert sentences[:5] == ["One.", "Two!", '"Three?"', "he said.", "Four"]
    assert max(map(len, sentences)) <= 1000
    assert not any(sentence.startswith(" ") for sentence in sentences)


def mixed_folder(path):
    as_txt(path / "a", DOCUMENTS[:20])
    as_jsonl_gz(path / "b.jsonl.gz", DOCUMENTS[20:40])
    as_parquet(path / "c.parquet", DOCUMENTS[40:])
    as_jsonl_gz(path / ".cache" / "hidden.jsonl.gz", DOCUMENTS)
    (path / "notes.md").write_text("not read")
    (path / "empty.jsonl").write_text("")
    return path


def plain_jsonl(path):
    path.write_bytes(gzip.decompress(as_jsonl_gz(path.with_suffix(".gz"), DOCUMENTS).read_bytes()))
    return path


def lone_text(path):
    """One document would have no split, so it is cut at blank lines."""
    path.write_text("\n \n\n".join(DOCUMENTS), encoding="utf-8")
    return path


LAYOUTS = {
    "documents": lambda path: as_txt(path, DOCUMENTS),
    "all.jsonl": plain_jsonl,
    "all.jsonl.gz": lambda path: as_jsonl_gz(path, DOCUMENTS),
    "all.json.gz": lambda path: as_jsonl_gz(path, DOCUMENTS),
    "all.parquet": lambda path: as_parquet(path, DOCUMENTS),
    "all.txt": lone_text,
    "mixed": mixed_folder,
    "a [b]*?": lambda path: as_jsonl_gz(path / "c.jsonl.gz", DOCUMENTS),
    "blank.jsonl.gz": lambda path: as_jsonl_gz(path, [None, " \n", *DOCUMENTS, ""]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_gives_the_same_documents(tmp_path, name):
    assert read(path=LAYOUTS[name](tmp_path / name)) == EXPECTED


def test_text_key_names_the_column(tmp_path):
    path = as_jsonl_gz(tmp_path / "all.jsonl.gz", DOCUMENTS, key="content")
    assert read(path=path, text_key="content") == EXPECTED
    line = error_line(lambda: read(path=path, text_key="contnt"))
    assert line.startswith(f"{path}: no column 'contnt'")
    assert "did you mean 'content'?" in line


@pytest.mark.parametrize("damage", damages.of("text"), ids=str)
def test_corrupt_file_is_named_in_one_line(tmp_path, capfd, damage):
    documents = as_txt(tmp_path / "documents", DOCUMENTS)
    file = damage.do(documents)
    line = error_line(lambda: read(path=documents))
    assert line.startswith(f"{file}: {damage.words}")
    assert capfd.readouterr().err == ""


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path):
    folder = as_txt(tmp_path / "documents", DOCUMENTS)
    documents = open_source("local", str(folder), validation_fraction=0.3).documents("train")
    next(documents)
    (folder / "0059.txt").write_text("another text")
    line = error_line(lambda: [*documents])
    assert line.startswith(f"data.path: {folder} has changed while it was read")


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Where bash scripts/download.sh c4 puts files."""
    monkeypatch.setattr(text, "FETCHED", tmp_path / "c4")
    return tmp_path / "c4"


WHOLE_C4 = {"train": DOCUMENTS[:50], "validation": DOCUMENTS[50:]}


def test_c4_has_its_own_splits_from_fetched_files_as_from_the_hub(fetched, monkeypatch):
    """What is asked of `datasets`, with the hub's answer replaced by records of its shape."""
    import datasets

    asked = []

    def load_dataset(path, name, *, split, revision, streaming):
        asked.append((path, name, split, revision, streaming))
        return ({"text": t, "timestamp": "t", "url": "u"} for t in WHOLE_C4[split])

    line = error_line(lambda: read("c4"))
    assert line.startswith("data.source: allenai/c4 (validation) cannot be streamed")
    assert "without a network, download" in line
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("c4") == WHOLE_C4
    commit = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
    assert sorted(asked) == [
        ("allenai/c4", "en", split, commit, True) for split in ("train", "validation")
    ]
    streamed = open_source("c4", None).fingerprint  # which names the caches
    as_c4(fetched, DOCUMENTS)
    assert read("c4") == WHOLE_C4 and len(asked) == 2
    assert open_source("c4", None).fingerprint == streamed and streamed["revision"] == commit
