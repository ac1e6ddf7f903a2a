"""Files of text in every format that is read, for the tests of what reads them."""

import gzip
import json
import random

import pyarrow
import pyarrow.parquet
import pytest

from training.data import text
from training.data.text import in_validation
from training.errors import UserError

SYLLABLES = "ka ri no the mu sel to ven ba pi lor e dan is wo ghu".split()
WORDS = [a + b + c for a in SYLLABLES for b in SYLLABLES[::3] for c in ("", "s", "'s", "ing")]


def write_documents(count, seed=0, least=3, long=0.0):
    """Random documents of a few sentences, each unlike the others, a share of them `long`."""
    draw = random.Random(seed)
    length = lambda: 60 if long and draw.random() < long else draw.randint(least, 9)
    sentence = lambda: " ".join(draw.choices(WORDS, k=length())) + draw.choice(".!?")
    return [" ".join(sentence() for _ in range(draw.randint(1, 9))) for _ in range(count)]


def as_txt(folder, documents):
    folder.mkdir(parents=True)
    for number, words in enumerate(documents):
        (folder / f"{number:04}.txt").write_text(words, encoding="utf-8")
    return folder


def as_jsonl_gz(file, documents, key="text"):
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as opened:
        for words in documents:
            opened.write(json.dumps({key: words, "timestamp": "t", "url": "u"}) + "\n")
    return file


def as_parquet(file, documents):
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file)
    return file


def as_c4(folder, documents):
    """The fetched files of C4, of 60 documents: two for training, one for validation."""
    place = folder / text.C4_REVISION / text.C4_NAME
    as_jsonl_gz(place / "c4-train.00000-of-00002.json.gz", documents[:20])
    as_jsonl_gz(place / "c4-train.00001-of-00002.json.gz", documents[20:50])
    as_jsonl_gz(place / "c4-validation.00000-of-00001.json.gz", documents[50:])
    return place


def of_split(texts, split, fraction=0.3):
    """The documents that belong to a split."""
    wanted = split == "validation"
    return [one for one in texts if in_validation(one, fraction) == wanted]


def error_line(action):
    """The message of the UserError that `action` ends with; it is one line."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)
