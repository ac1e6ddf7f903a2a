"""GPT-2's byte-level BPE over fairseq's dictionary: what BART's token ids mean.

GPT-2's two files, encoder.json and vocab.bpe, make text into GPT-2's numbers; fairseq's dict.txt
lists these numbers as its symbols, and a token's id is its place there. The files are GPT-2's own,
or `train` writes ones of the same form, which fairseq loads as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from training.errors import UserError, reason
from training.files import write_bytes

BOS, PAD, EOS, UNK = 0, 1, 2, 3  # fairseq's Dictionary begins with these
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"  # fairseq's denoising task adds it behind the last symbol
SPECIAL = 5
HEADER = "#version: 0.2"  # first line of vocab.bpe, which fairseq skips unread
SPACE = "Ġ"  # GPT-2 writes the bytes as visible characters; this is the space
FILES = ("encoder.json", "vocab.bpe", "dict.txt")
EXPECTED = {"data.bpe_encoder": "GPT-2's encoder.json", "data.bpe_vocab": "GPT-2's vocab.bpe"}


class Bpe:
    """Text to token ids and back.

    Text never becomes <unk>: a byte-level BPE has a token for every byte. `whole=False` accepts a
    dictionary that lacks some of the BPE's tokens, as fairseq-preprocess makes it of a corpus.

    Raises UserError naming file and config key when a file is missing, of another form, or does
    not belong to the others.
    """

    bos, pad, eos, unk = BOS, PAD, EOS, UNK

    def __init__(
        self,
        encoder: str | Path,
        vocab: str | Path,
        dictionary: str | Path,
        *,
        whole: bool = True,
        dictionary_key: str = "data.bpe_dictionary",
    ) -> None:
        from tokenizers import Tokenizer, models
        from tokenizers.pre_tokenizers import ByteLevel

        numbers = _read_encoder(encoder)
        merges = _read_merges(vocab, encoder, numbers)
        known = load_dictionary(dictionary, dictionary_key)
        self.symbols, self.mask, self.vocab_size = known, known.index(MASK), len(known)
        where = f"{dictionary_key}: {dictionary}"
        self._tokens = _tokens(self.symbols, numbers, f"{where} has", encoder)
        self._ids = np.full(max(numbers.values()) + 1, UNK, dtype=np.int64)
        for index, symbol in enumerate(self.symbols):
            if self._tokens[index] is not None:
                self._ids[int(symbol)] = index
        lacking = [numbers[t] for t in _makeable(merges) if self._ids[numbers[t]] == UNK]
        if whole and lacking:
            raise UserError(
                f"{where} lacks {len(lacking)} of the BPE's tokens, the first {min(lacking)}; "
                "expected one for every token, as in fairseq's dict.txt for GPT-2"
            )
        # GPT-2's BPE in `tokenizers`, which gives the numbers of fairseq's own, faster.
        self._tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=merges))
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)

    def encode(self, text: str) -> np.ndarray:
        """Token ids [length] (int64), without start and end token."""
        return self._ids[self._tokenizer.encode(text).ids]

    def encode_batch(self, texts: list[str], num_threads: int = 1) -> list[np.ndarray]:
        """The ids of each text; the number of threads holds from the first call on."""
        with _threads(num_threads):
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._ids[one.ids] for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; start, end and pad vanish, bytes that are not UTF-8 become U+FFFD.

        <unk>, <mask> and made-up symbols are spelt out.
        """
        from tokenizers.decoders import ByteLevel

        ids = [int(i) for i in ids]
        pieces = [self._tokens[i] or self.symbols[i] for i in ids if i not in (BOS, PAD, EOS)]
        return ByteLevel().decode(pieces)

    @property
    def word_starts(self) -> np.ndarray:
        """Bool [vocab_size]: which tokens begin a word, by fairseq's rule.

        They are the tokens that begin with a space and the symbols that are not tokens, but for
        <mask>.
        """
        starts = [token is None or token.startswith(SPACE) for token in self._tokens]
        starts[self.mask] = False
        return np.array(starts)

    @property
    def sentence_stops(self) -> np.ndarray:
        """Bool [vocab_size]: which tokens end with . ! or ?, and maybe a closing quote."""
        stop = re.compile(r"[.!?][\"']?$")
        return np.array([token is not None and bool(stop.search(token)) for token in self._tokens])


def load_dictionary(path: str | Path, key: str) -> list[str]:
    """The symbols of fairseq's dict.txt, each at its id, and <mask>.

    Read here rather than by fairseq's Dictionary, which takes seconds to import in every run. A
    line is a symbol and its count. UserError names the config key.
    """
    *lines, rest = _text(path, key).split("\n")
    symbols = dict.fromkeys(SPECIAL_SYMBOLS)
    for number, line in enumerate([*lines, rest] if rest else lines, start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        if not symbol or not count.isdecimal() or symbol in symbols:
            problem = "a symbol for the second time" if symbol in symbols else "no symbol and count"
            raise UserError(
                f"{key}: {path} is not fairseq's dict.txt (line {number} has {problem}: {line!r})"
            )
        symbols[symbol] = None
    return [*(symbols | {MASK: None})]


def train(texts: Iterable[str], size: int, folder: Path) -> None:
    """Trains a BPE and writes FILES; its dictionary has `size` symbols, SPECIAL ones among them.

    The same texts give the same files. Raises UserError when they do not hold that many tokens.
    """
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - SPECIAL,
        min_frequency=2,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    with _threads(1):
        tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    found = len(model["vocab"]) + SPECIAL
    if found != size:
        raise UserError(
            f"data.trained_vocab_size: {size} is more than this text supports; expected at most "
            f"{found}; lower it or give more text"
        )
    lines = [HEADER, *(" ".join(pair) for pair in model["merges"])]
    symbols = [f"{number} 1" for number in sorted(model["vocab"].values())]
    contents = (json.dumps(model["vocab"]), *("\n".join([*part, ""]) for part in (lines, symbols)))
    for name, content in zip(FILES, contents, strict=True):
        write_bytes(folder / name, content.encode("utf-8"))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Lets `tokenizers` use this many threads, however the process is set up otherwise."""
    wanted = {
        "TOKENIZERS_PARALLELISM": "true" if count > 1 else "false",
        "RAYON_NUM_THREADS": str(count),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Files


def checksum(path: str | Path, key: str) -> str:
    """SHA-256 of one of the files; UserError if it cannot be read."""
    return hashlib.sha256(_bytes(path, key)).hexdigest()


def _bytes(path: str | Path, key: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        raise UserError(f"{key}: {path} does not exist; expected {_expected(key)}") from None
    except OSError as error:
        raise UserError(
            f"{key}: {path} cannot be read ({reason(error)}); expected {_expected(key)}"
        ) from error


def _text(path: str | Path, key: str) -> str:
    try:
        return _bytes(path, key).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}: {path} is not UTF-8 text ({reason(error)}); expected {_expected(key)}"
        ) from error


def _expected(key: str) -> str:
    return EXPECTED.get(key, "fairseq's dict.txt")


def _read_encoder(path: str | Path) -> dict[str, int]:
    """GPT-2's number of each token."""
    from tokenizers.pre_tokenizers import ByteLevel

    key = "data.bpe_encoder"
    text, expected = _text(path, key), _expected(key)
    try:
        numbers = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{key}: {path} is not JSON ({reason(error)}); expected {expected}"
        ) from error
    if not _numbers_tokens(numbers):
        raise UserError(
            f"{key}: {path} is not {expected}; expected an object of tokens and their numbers"
        )
    missing = sorted(set(ByteLevel.alphabet()) - set(numbers))
    if missing:
        raise UserError(
            f"{key}: {path} has no token {missing[0]!r}; expected one for each of the 256 bytes, "
            f"as in {expected}"
        )
    return numbers


def _numbers_tokens(numbers: Any) -> bool:
    """Whether this maps tokens to distinct numbers from 0."""
    if not isinstance(numbers, dict) or not all(type(n) is int for n in numbers.values()):
        return False
    return len(set(numbers.values())) == len(numbers) and min(numbers.values(), default=0) >= 0


def _read_merges(
    path: str | Path, encoder: str | Path, numbers: dict[str, int]
) -> list[tuple[str, str]]:
    """The merges in order; UserError unless they make the encoder's tokens and no others."""
    key = "data.bpe_vocab"
    header, *lines = _text(path, key).split("\n")
    merges = [tuple(line.split()) for line in lines if line]
    if not header.startswith("#version") or lines[-1:] != [""] or {*map(len, merges)} - {2}:
        raise UserError(
            f"{key}: {path} is not {_expected(key)}; expected a line #version, then two tokens a "
            "line, each line ended"
        )
    other = f"are data.bpe_encoder {encoder} and data.bpe_vocab {path} of one BPE?"
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in numbers:
                raise UserError(
                    f"{key}: the merge {left!r} {right!r} needs {token!r}, which the encoder "
                    f"lacks; {other}"
                )
    special = {token for token in numbers if re.fullmatch(r"<.*>", token)}
    unmade = sorted(set(numbers) - _makeable(merges) - special)
    if unmade:
        raise UserError(
            f"{key}: no merge makes {unmade[0]!r}, one of {len(unmade)} such tokens of the "
            f"encoder; {other}"
        )
    return merges


def _makeable(merges: list[tuple[str, str]]) -> set[str]:
    """The tokens that text can become: bytes and what they are merged to."""
    from tokenizers.pre_tokenizers import ByteLevel

    return {*ByteLevel.alphabet(), *(left + right for left, right in merges)}


def _tokens(
    symbols: list[str], numbers: dict[str, int], where: str, encoder: str | Path
) -> list[str | None]:
    """GPT-2's token of each symbol, None for one that is not a number."""
    by_number = {str(number): token for token, number in numbers.items()}
    tokens = [by_number.get(symbol) for symbol in symbols]
    odd = [s for s, token in zip(symbols, tokens, strict=True) if token is None and s.isdecimal()]
    if odd or not any(tokens):
        found = f"{where} {odd[0]}" if odd else f"{where} no number"
        raise UserError(
            f"{found}, expected numbers of data.bpe_encoder {encoder}; is it over another BPE?"
        )
    return tokens
