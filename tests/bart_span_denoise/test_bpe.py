"""GPT-2's byte-level BPE over fairseq's dictionary, compared with fairseq's own."""

import hashlib
import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest

from bart_span_denoise import bpe, fairseq_interop
from bart_span_denoise.bpe import FILES, Bpe
from tests import damages
from tests.text_files import error_line

# fairseq takes seconds to import: one process has all tests that do.
pytestmark = pytest.mark.xdist_group("fairseq")
ROOT = Path(bpe.__file__).parents[1]
SIZE = 400
TEXTS = [
    "The king said to his servants, \"Don't go out! We'll see them here.\" They didn't.",
    "She's 42 years old; it's 3.14 km to the city? Yes... (or 1,000 more).",
    "Straße, naïve café, Ångström — “quoted” text… Дорогой друг, как дела? 日本語の文章です。",
    'He said, "Go." She said, "Come." They said, "Go!" He said, "No."',
    "the cat and the dog and the other animals of the land went to the water and drank.",
] * 20
VARIED = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "two  spaces,   three\ttabs\t\tand\r\nlines\n\n\nover",
    "don't we'll I'M they'RE o'clock 'tis 's",
    'x=3.14*10**-5; y[0] != "a\\b"',
    "e\u0301 combining, \u200b zero width, \u00a0 no-break, \u3000 ideographic, \x85 next line",
    "مرحبا بالعالم שלום नमस्ते ภาษาไทย 한국어 中文，標點。",
    "👩‍👩‍👧‍👦 🇩🇪 ☃️ 🤷🏽‍♀️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ½ ² Ⅷ ١٢٣",
    "\x00\x01\x1c\x1f\x7f control",
    "<s> <pad> </s> <unk> <mask> <|endoftext|> madeupword0000",
    "\ufeffmark \ufffd \U0010fffd \ud7ff",
]


def paths(folder):
    return [folder / name for name in FILES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    bpe.train(TEXTS, SIZE, folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return Bpe(*paths(folder))


@pytest.fixture(scope="module")
def theirs(folder):
    """fairseq's BPE and Dictionary of the same files."""
    return fairseqs(*paths(folder))


def fairseqs(encoder, vocab, dictionary):
    fairseq = fairseq_interop.fairseq()
    files = Namespace(gpt2_encoder_json=str(encoder), gpt2_vocab_bpe=str(vocab))
    loaded = fairseq.data.Dictionary.load(str(dictionary))
    loaded.add_symbol("<mask>")
    return fairseq.data.encoders.gpt2_bpe.GPT2BPE(files), loaded


def fairseq_ids(theirs, text):
    encoder, dictionary = theirs
    line = dictionary.encode_line(encoder.encode(text), append_eos=False, add_if_not_exist=False)
    return line.tolist()


def random_texts(count, seed=0):
    """Strings of random characters of all kinds, words of the training text among them."""
    draw = random.Random(seed)
    words = " ".join(TEXTS).split()
    ranges = [(32, 127), (0, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000)]
    kinds = [lambda: chr(draw.randrange(*draw.choice(ranges))), lambda: " " * draw.randint(1, 3)]
    kinds += [lambda: draw.choice(words)]
    piece = lambda: draw.choice(kinds)()
    return ["".join(piece() for _ in range(draw.randint(1, 30))) for _ in range(count)]


def changed(tmp_path, folder, name, change):
    """The three files, one of them with other content."""
    for file in paths(folder):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(change((folder / name).read_text("utf-8")), encoding="utf-8")
    return paths(tmp_path)


@pytest.mark.parametrize("text", VARIED, ids=range(len(VARIED)))
def test_ids_are_fairseqs_and_text_comes_back(ours, theirs, text):
    ids = ours.encode(text)
    assert ids.tolist() == fairseq_ids(theirs, text)
    assert ours.decode(ids) == text
    assert ids.dtype == np.int64
    assert ((ids > ours.unk) & (ids < ours.mask)).all()


def test_ids_are_fairseqs_on_random_text(ours, theirs):
    texts = random_texts(1000)
    expected = [fairseq_ids(theirs, text) for text in texts]
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == expected
    assert [ours.encode(text).tolist() for text in texts] == expected
    assert len({i for ids in expected for i in ids}) > 300, "hardly any token was met"


def test_bytes_that_are_no_text_decode_as_fairseqs(ours, theirs):
    encoder, dictionary = theirs
    draw = random.Random(1)
    for _ in range(500):
        ids = [draw.randrange(4, ours.vocab_size) for _ in range(draw.randint(1, 12))]
        assert ours.decode(ids) == encoder.decode(dictionary.string(ids))


def test_special_tokens(ours, theirs):
    _, dictionary = theirs
    special = (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk())
    assert (ours.bos, ours.pad, ours.eos, ours.unk) == special == (0, 1, 2, 3)
    assert ours.mask == dictionary.index("<mask>") == SIZE - 1
    assert ours.vocab_size == len(dictionary) == SIZE and ours.symbols == dictionary.symbols
    ids = [ours.bos, *ours.encode("a b"), ours.mask, ours.unk, ours.eos, ours.pad]
    assert ours.decode(ids) == "a b<mask><unk>"


def test_a_file_as_large_as_gpt2s(tmp_path):
    """GPT-2's counts: 256 bytes, 50,000 merges, <|endoftext|>; fairseq pads to 50,264 and masks."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merges = list(islice(product(letters, letters), 50_000))
    tokens = [*letters, *(a + b for a, b in merges), "<|endoftext|>"]
    (tmp_path / FILES[0]).write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (tmp_path / FILES[1]).write_text("\n".join(lines), encoding="utf-8")
    numbers = random.Random(0).sample(range(50_257), 50_257)
    symbols = [f"{n} 1" for n in numbers] + [f"madeupword{i:04} 0" for i in range(3)]
    (tmp_path / FILES[2]).write_text("\n".join(symbols) + "\n")
    loaded = Bpe(*paths(tmp_path))
    assert (loaded.vocab_size, loaded.mask) == (50_265, 50_264)
    assert loaded.encode("!").tolist() == [4 + numbers.index(0)]
    assert loaded.word_starts[50_261:].tolist() == [True, True, True, False]


def test_word_starts_are_fairseqs(tmp_path, folder):
    """Also of made-up symbols and of ones that are no number, as corpora's own dictionaries have.

    fairseq counts <mask>, which it spells out, as the middle of a word.
    """
    add = lambda text: text + "hello 3\nmadeupword0000 0\nmadeupword0001 0\n"
    files = changed(tmp_path, folder, "dict.txt", add)
    fairseq = fairseq_interop.fairseq()
    args = Namespace(bpe="gpt2", gpt2_encoder_json=str(files[0]), gpt2_vocab_bpe=str(files[1]))
    rule = fairseq.data.encoders.utils.get_whole_word_mask(args, fairseqs(*files)[1])
    ours = Bpe(*files)
    assert ours.word_starts.tolist() == rule.bool().tolist()
    assert ours.word_starts.shape == (SIZE + 3,)
    assert 50 < ours.word_starts.sum() < 300


def test_sentence_stops(ours):
    stops = {ours.decode([i]) for i in np.flatnonzero(ours.sentence_stops)}
    assert {".", "!", "?", '."'} <= stops
    assert all(stop.rstrip("\"'")[-1] in ".!?" for stop in stops)
    assert not ours.sentence_stops[[ours.bos, ours.pad, ours.eos, ours.unk, ours.mask]].any()
    inside = ours.encode("a, b; c: d - e")
    assert not ours.sentence_stops[inside].any()


def test_training_gives_the_same_files_in_any_process(folder, tmp_path):
    script = "import json, sys; from pathlib import Path; from bart_span_denoise import bpe; "
    script += "bpe.train(json.load(sys.stdin), int(sys.argv[1]), Path(sys.argv[2]))"
    command = [sys.executable, "-c", script, str(SIZE), str(tmp_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "77", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run(
        command, input=json.dumps(TEXTS), text=True, cwd=ROOT, check=True, env=environment
    )
    digest = lambda file: hashlib.sha256(file.read_bytes()).hexdigest()
    assert [*map(digest, paths(tmp_path))] == [*map(digest, paths(folder))]


def test_too_little_text_says_how_much_it_supports(tmp_path):
    line = error_line(lambda: bpe.train(TEXTS[:1], 1000, tmp_path))
    assert line.startswith("data.trained_vocab_size: 1000 is more than this text supports")
    most = int(line.split("at most ")[1].split(";")[0])
    bpe.train(TEXTS[:1], most, tmp_path)
    assert Bpe(*paths(tmp_path)).vocab_size == most


@pytest.mark.parametrize("damage", damages.of("bpe"), ids=str)
def test_a_wrong_file_is_named_with_its_key(tmp_path, folder, damage):
    files = changed(tmp_path, folder, FILES[0], str)
    file = damage.do(tmp_path)
    line = error_line(lambda: Bpe(*files))
    assert damage.follows("", line) and str(file) in line


def test_a_corpus_dictionary_may_lack_tokens(tmp_path, folder):
    lacking = lambda text: text.replace("\n17 1\n", "\n")
    loaded = Bpe(*changed(tmp_path, folder, "dict.txt", lacking), whole=False)
    assert loaded.vocab_size == SIZE - 1
    assert "".join(loaded.decode([i]) for i in loaded.encode("the king")) == "the king"
