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
from typing import TYPE_CHECKING

import numpy as np

from training.errors import UserError, reason
from training.files import write_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
        from tokenizers.pre_tokenizers import ByteLevel

        self._tokenizer, numbers = _load(encoder, vocab)
        self._tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self.symbols = load_dictionary(dictionary, dictionary_key)
        self.mask, self.vocab_size = self.symbols.index(MASK), len(self.symbols)
        by_number = {str(number): token for token, number in numbers.items()}
        self._tokens = [by_number.get(symbol) for symbol in self.symbols]
        self._ids = np.full(max(numbers.values()) + 1, UNK, dtype=np.int64)
        for index, symbol in enumerate(self.symbols):
            if self._tokens[index] is not None:
                self._ids[int(symbol)] = index
        lacking = sorted(n for t, n in numbers.items() if self._ids[n] == UNK and not _special(t))
        odd = [
            s for s, t in zip(self.symbols, self._tokens, strict=True) if not t and s.isdecimal()
        ]
        if odd or (lacking and whole) or not any(self._tokens):
            lacks = f"lacks {len(lacking)} of the BPE's tokens, the first {min(lacking, default=0)}"
            problem = f"has {odd[0]}" if odd else lacks
            raise UserError(
                f"{dictionary_key}: {dictionary} {problem}; expected the numbers of "
                f"data.bpe_encoder {encoder}, as in fairseq's dict.txt for GPT-2"
            )

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
    symbols = dict.fromkeys(SPECIAL_SYMBOLS)
    lines = _bytes(path, key).decode("utf-8", "replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        if not symbol or not count.isdecimal() or symbol in symbols:
            raise UserError(
                f"{key}: {path} is not fairseq's dict.txt (line {number}: {line!r}); expected a "
                "symbol and its count, each symbol once"
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
    parallel = "true" if count > 1 else "false"
    wanted = {"TOKENIZERS_PARALLELISM": parallel, "RAYON_NUM_THREADS": str(count)}
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


# Files


def checksum(path: str | Path, key: str) -> str:
    """SHA-256 of one of the files; UserError if it cannot be read."""
    return hashlib.sha256(_bytes(path, key)).hexdigest()


def _bytes(path: str | Path, key: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        expected = EXPECTED.get(key, "fairseq's dict.txt")
        raise UserError(
            f"{key}: {path} cannot be read ({reason(error)}); expected {expected}"
        ) from error


def _load(encoder: str | Path, vocab: str | Path) -> tuple[Tokenizer, dict[str, int]]:
    """GPT-2's BPE in `tokenizers`, which gives the numbers of fairseq's own, faster."""
    from tokenizers import Tokenizer, models

    try:
        files = (str(Path(file).expanduser()) for file in (encoder, vocab))
        tokenizer = Tokenizer(models.BPE.from_file(*files))
    except Exception as error:  # of tokenizers, which has no kind of its own
        raise UserError(
            f"data.bpe_encoder, data.bpe_vocab: {encoder} and {vocab} cannot be read "
            f"({reason(error)}); expected {' and '.join(EXPECTED.values())}"
        ) from error
    return tokenizer, tokenizer.get_vocab()


def _special(token: str) -> bool:
    """Whether no text becomes this token, as GPT-2's <|endoftext|>."""
    return token.startswith("<") and token.endswith(">") and len(token) > 2
