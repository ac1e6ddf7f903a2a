"""Corpora on disk in fairseq's mmap format, and how their sentences are packed into samples.

A split is `train.bin`, token ids end to end, and `train.idx`, the length of every line; likewise
`valid`. A line ends with </s>, and an empty one, which is </s> alone, ends a document. Made by
fairseq-preprocess or by `bart_span_denoise.data`, either loads both.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
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
    """All tokens of a split (a memmap), after a look at its index; UserError as `_open`."""
    return _open(prefix)[0]


def _open(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and sizes of the lines, as memmaps.

    Raises UserError naming the file when one is missing, of another format, or cut short.
    """
    tokens, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    problem = next((f"{file} does not exist" for file in (tokens, index) if not file.is_file()), "")
    if not problem:
        with open(index, "rb") as file:
            head = file.read(HEADER.size).ljust(HEADER.size, b"\0")
        magic, version, code, count = HEADER.unpack(head)
        if (magic, version) != (MAGIC, VERSION) or code not in TYPES:
            problem = f"{index} is not fairseq's mmap index"
        elif index.stat().st_size != HEADER.size + 12 * count or count == 0:
            problem = f"{index} does not hold {count} lines as it says"
        else:
            sizes, dtype = (
                np.memmap(index, "<i4", "r", HEADER.size, (count,)),
                np.dtype(TYPES[code]),
            )
            expected = int(sizes.sum(dtype=np.int64)) * dtype.itemsize
            if (found := tokens.stat().st_size) == expected > 0:
                return np.memmap(tokens, dtype, mode="r"), sizes
            problem = f"{tokens} has {found} bytes where {index.name} says {expected}"
    raise UserError(
        f"data.path: {problem}; expected train and valid, .bin and .idx, as fairseq-preprocess "
        "--only-source --dataset-impl mmap writes them"
    )


def check(prefix: Path, vocab_size: int) -> int:
    """Raises UserError for tokens that no sample can be made of; returns the number of <unk>."""
    (tokens, sizes), unknown, end = _open(prefix), 0, 0

    def refuse(problem: str) -> None:
        raise UserError(f"data.path: {prefix.with_suffix('.bin')} {problem}")

    for first in range(0, len(tokens), WINDOW):
        part = tokens[first : first + WINDOW]
        for wrong in part[(part < 0) | (part >= vocab_size)][:1]:
            refuse(f"holds token id {wrong}, but its dictionary has {vocab_size} symbols")
        if np.isin(part, (BOS, PAD)).any():
            refuse("holds <s> or <pad>, which samples get later; binarise text without")
        unknown += int(np.count_nonzero(part == UNK))
    for first in range(0, len(sizes), ONCE):
        ends = end + np.cumsum(sizes[first : first + ONCE], dtype=np.int64)
        for line in np.flatnonzero(tokens[ends - 1] != EOS)[:1]:
            refuse(f"has a line without </s> at its end, number {first + line + 1}")
        end = ends[-1]
    return unknown


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
    bounds, total, sentences, over_long = array("q", [0]), 0, 0, 0
    size, is_last, within = WINDOW, False, False  # within: the last bound is within a sentence
    while not is_last:  # from the last bound on, WINDOW tokens at a time or more
        start = bounds[-1]
        is_last = start + size >= len(tokens)
        part = np.asarray(tokens[start : start + size])
        content = np.cumsum(part != EOS, dtype=np.int64)  # up to each token
        ends = np.flatnonzero(sentence_ends(part, stops)) + 1
        at_end, done, place = content[ends - 1], 0, 0
        # Set no bound that tokens beyond the window could change.
        while done < content[-1] and (is_last or done + limit < content[-1]):
            fits = int(np.searchsorted(at_end, done + limit, side="right"))
            if whole := fits > 0 and at_end[fits - 1] > done:
                place = int(ends[fits - 1])
            else:
                place = int(np.searchsorted(content, done + limit)) + 1
                over_long += not within
            within, done = not whole, int(content[place - 1])
            bounds.append(start + place)
        total += done
        sentences += len(np.unique(at_end[(at_end > 0) & (ends <= place)]))
        size = WINDOW if bounds[-1] > start else 2 * size
    return Packed(np.frombuffer(bounds, dtype=np.int64), total, sentences, over_long)
