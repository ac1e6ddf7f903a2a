"""Corpora on disk in fairseq's mmap format, and how their sentences are packed into samples.

A split is `train.bin`, token ids end to end, and `train.idx`, the length of every line; likewise
`valid`. A line ends with </s>, and an empty one, which is </s> alone, ends a document. Made by
fairseq-preprocess or by `bart_span_denoise.data`, either loads both.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bart_span_denoise.bpe import BOS, EOS, PAD, UNK
from training.errors import UserError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the type, number of lines
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4"}  # fairseq's codes
WINDOW = 2**22  # tokens looked at together
ONCE = 2**20  # lines written or checked together


def token_type(vocab_size: int) -> str:
    """The type that fairseq stores ids in."""
    return "<u2" if vocab_size < 65500 else "<u4"


def write(prefix: Path, lines: Iterable[np.ndarray], vocab_size: int) -> None:
    """Writes prefix.bin and prefix.idx; each line's ids end with </s>."""
    dtype, lengths = np.dtype(token_type(vocab_size)), array("i")
    with open(prefix.with_suffix(".bin"), "wb") as file:
        for line in lines:
            file.write(line.astype(dtype).tobytes())
            lengths.append(len(line))
    sizes = np.frombuffer(lengths, dtype=np.int32)
    code = next(code for code, name in TYPES.items() if np.dtype(name) == dtype)
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(sizes)))
        file.write(sizes.astype("<i4").tobytes())
        end = 0
        for first in range(0, len(sizes), ONCE):
            part = sizes[first : first + ONCE].astype("<i8") * dtype.itemsize
            ends = end + np.cumsum(part)
            file.write((ends - part).tobytes())
            end = ends[-1]


def read(prefix: Path) -> np.ndarray:
    """All tokens of a split (a memmap), after a look at its index.

    Raises UserError naming the file when it is missing, of another format, or cut short.
    """
    tokens, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    for file in (tokens, index):
        if not file.is_file():
            raise UserError(
                f"data.path: {file} does not exist; expected train and valid, .bin and .idx, as "
                "fairseq-preprocess --only-source --dataset-impl mmap writes them"
            )
    sizes, dtype = _read_index(index)
    expected, found = int(sizes.sum(dtype=np.int64)) * dtype.itemsize, tokens.stat().st_size
    if found != expected or found == 0:
        raise UserError(
            f"data.path: {tokens} has {found} bytes where {index.name} says {expected}; make both "
            "again"
        )
    return np.memmap(tokens, dtype, mode="r")


def _read_index(path: Path) -> tuple[np.ndarray, np.dtype]:
    """Sizes of the lines and type of the tokens."""
    with open(path, "rb") as file:
        head = file.read(HEADER.size).ljust(HEADER.size, b"\0")
    magic, version, code, count = HEADER.unpack(head)
    if (magic, version) != (MAGIC, VERSION) or code not in TYPES:
        raise UserError(
            f"data.path: {path} is not fairseq's mmap index; make it with fairseq-preprocess "
            "--dataset-impl mmap"
        )
    if path.stat().st_size != HEADER.size + 12 * count:
        raise UserError(f"data.path: {path} does not hold {count} lines as it says; make it again")
    if count == 0:
        return np.empty(0, np.int32), np.dtype(TYPES[code])
    return np.memmap(path, "<i4", "r", HEADER.size, shape=(count,)), np.dtype(TYPES[code])


def check(prefix: Path, vocab_size: int) -> int:
    """Raises UserError for tokens that no sample can be made of; returns the number of <unk>."""
    tokens, (sizes, _) = read(prefix), _read_index(prefix.with_suffix(".idx"))
    file, unknown = prefix.with_suffix(".bin"), 0
    for first in range(0, len(tokens), WINDOW):
        part = tokens[first : first + WINDOW]
        _check_ids(part, vocab_size, file)
        unknown += int(np.count_nonzero(part == UNK))
    end = 0
    for first in range(0, len(sizes), ONCE):
        ends = end + np.cumsum(sizes[first : first + ONCE], dtype=np.int64)
        open_lines = np.flatnonzero(tokens[ends - 1] != EOS)
        if len(open_lines):
            raise UserError(
                f"data.path: {file}: line {first + open_lines[0] + 1} does not end with </s>, as "
                "fairseq-preprocess makes it"
            )
        end = ends[-1]
    return unknown


def _check_ids(tokens: np.ndarray, vocab_size: int, file: Path) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"data.path: {file} holds token id {low if low < 0 else high}, but the dictionary has "
            f"{vocab_size} symbols; are they of one folder?"
        )
    if low < EOS and np.isin(tokens, (BOS, PAD)).any():
        raise UserError(
            f"data.path: {file} holds <s> or <pad>, which samples get later; binarise text without"
        )


# Sentences and samples


class Stops(NamedTuple):
    """Where sentences end within a line: after a stop that a word's beginning follows.

    Both are bool [vocab_size]. The first is true of tokens that end with . ! or ?.
    """

    stops: np.ndarray
    word_starts: np.ndarray


def sentence_ends(tokens: np.ndarray, stops: Stops | None) -> np.ndarray:
    """Bool [length]: whether a sentence ends with this token, which </s> does."""
    ends = tokens == EOS
    if stops is not None:
        ends[:-1] |= stops.stops[tokens[:-1]] & stops.word_starts[tokens[1:]]
    return ends


def sample(tokens: np.ndarray, stops: Stops | None) -> tuple[np.ndarray, np.ndarray]:
    """A sample's stored tokens as ids [L] from <s> to </s> (int64), and its sentence ends [S].

    Sentence i is ids[ends[i - 1] : ends[i]], the first one begins at 1. The </s> of lines vanish.
    """
    ends = sentence_ends(tokens, stops)
    ends[-1] = True  # also where a sentence was split
    is_content = tokens != EOS
    places = np.unique(np.cumsum(is_content)[ends])
    ids = np.concatenate(([BOS], tokens[is_content], [EOS]), dtype=np.int64)
    return ids, places[places > 0] + 1


class Packed(NamedTuple):
    """Samples of a split, and what they hold."""

    bounds: np.ndarray
    """int64 [samples + 1]: sample i is tokens[bounds[i] : bounds[i + 1]], </s> of lines included"""
    tokens: int
    """Tokens of content."""
    sentences: int
    over_long: int
    """Sentences that were split, being longer than a sample."""


def pack(tokens: np.ndarray, limit: int, stops: Stops | None = None) -> Packed:
    """Whole sentences in order, as many as fit into `limit` tokens of content, over and over.

    As fairseq's break mode "complete": a sample continues in the next document. A sentence of more
    tokens begins a sample and is split after every `limit` tokens; what is left of it is followed
    by the next sentence. Every token is in exactly one sample, and every sample has content.
    """
    packing = _Packing(limit)
    for part, is_last in _windows(tokens, packing):
        is_content = part != EOS
        ends = np.flatnonzero(sentence_ends(part, stops)) + 1
        packing.add(np.cumsum(is_content, dtype=np.int64), ends, is_last)
    bounds = np.frombuffer(packing.bounds, dtype=np.int64)
    return Packed(bounds, packing.tokens, packing.sentences, packing.over_long)


def _windows(tokens: np.ndarray, packing: _Packing) -> Iterator[tuple[np.ndarray, bool]]:
    """Tokens from the last bound on, WINDOW at a time or more, and whether they are the last."""
    size, is_last = WINDOW, False
    while not is_last:
        start = packing.bounds[-1]
        is_last = start + size >= len(tokens)
        yield np.asarray(tokens[start : start + size]), is_last
        size = WINDOW if packing.bounds[-1] > start else 2 * size


class _Packing:
    """Bounds found so far, and counts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bounds = array("q", [0])
        self.tokens = self.sentences = self.over_long = 0
        self.within = False  # whether the last bound is within a sentence

    def add(self, content: np.ndarray, ends: np.ndarray, is_last: bool) -> None:
        """Continues from the last bound; content [length] counts the content up to each token.

        `ends` are the places behind the sentences' ends. Without is_last the tokens are followed
        by others, and nothing is done that those could change.
        """
        start, done, place = self.bounds[-1], 0, 0
        at_end = content[ends - 1]
        while done < content[-1] and (is_last or done + self.limit < content[-1]):
            fits = int(np.searchsorted(at_end, done + self.limit, side="right"))
            whole = fits > 0 and at_end[fits - 1] > done
            if whole:
                place = int(ends[fits - 1])
            else:
                place = int(np.searchsorted(content, done + self.limit)) + 1
                self.over_long += not self.within
            self.within = not whole
            done = int(content[place - 1])
            self.bounds.append(start + place)
        self.tokens += done
        self.sentences += len(np.unique(at_end[(at_end > 0) & (ends <= place)]))
