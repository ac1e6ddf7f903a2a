"""Text to training rows: documents -> SentencePiece -> token files on disk -> fixed rows.

`from_config` tokenises a source once into a cache folder and returns a `Corpus`, whose rows a
DataLoader reads from memory-mapped files. `python -m nanolm_c4.data --help` does the same ahead
of time, for clusters whose compute nodes have no network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data import token_cache
from training.data.text import SPLITS, Source, open_source, split_sentences
from training.data.token_cache import Progress, Report, TokenCache
from training.errors import UserError, reason
from training.files import sha256, write_bytes

# torch, datasets and sentencepiece take seconds to import, so each is imported where it is used.
if TYPE_CHECKING:
    import torch

    from nanolm_c4.config import DataConfig

IGNORE = -100  # target without a loss: torch's default ignore_index
CODE_VERSION = 1  # raise it when the same text would give other files; old caches are then unused
TOKENIZER_CHARACTERS = 10_000_000  # text a tokeniser is trained on, at most
SENTENCE_CHARACTERS = 1_000  # SentencePiece drops lines over 4,192 bytes; UTF-8 needs at most 4
ENCODE_DOCUMENTS = 256  # documents tokenised together
# T5's model: its bytes and their SHA-256, as scripts/download.sh has them.
T5 = 791656, "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"


# Tokeniser


def train_tokenizer(documents: Iterable[str], vocab_size: int, path: str | Path) -> None:
    """Trains a unigram SentencePiece model and writes it to `path`.

    At most the first TOKENIZER_CHARACTERS characters are used, which bounds time and memory on
    any corpus. Pad, EOS, unknown and BOS are ids 0 to 3 of the vocabulary (T5's order, then BOS).
    The same documents give the same file: SentencePiece's sums depend on its number of threads,
    so there is one.
    """
    import sentencepiece

    sentences = _training_sentences(documents)
    if not sentences:
        raise UserError("data.tokenizer: no text to train one on; expected at least one document")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=_coverage(sentences, vocab_size),
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=3,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"data.tokenizer_vocab_size: this text supports no tokeniser of {vocab_size} pieces "
            f"({reason(error)}); change it or give more text"
        ) from error
    write_bytes(Path(path), model.getvalue())


def _training_sentences(documents: Iterable[str]) -> list[str]:
    """Sentences of the documents, up to the limit of characters."""
    sentences, characters = [], 0
    pieces = (split_sentences(document, SENTENCE_CHARACTERS) for document in documents)
    for sentence in chain.from_iterable(pieces):
        if characters >= TOKENIZER_CHARACTERS:
            break
        sentences.append(sentence)
        characters += len(sentence)
    return sentences


def _coverage(sentences: Iterable[str], vocab_size: int) -> float:
    """Share of the text whose characters get a piece each: all of it, if they fit.

    Rare characters become unknown once they would fill over three quarters of the vocabulary.
    """
    counts = Counter(chain.from_iterable(sentences))
    kept = counts.most_common(max(1, vocab_size * 3 // 4))
    return 1.0 if len(kept) == len(counts) else sum(n for _, n in kept) / counts.total()


class Tokenizer:
    """A SentencePiece model with BOS, EOS and pad ids.

    A model without BOS (T5's) gets the id right after its pieces, which `vocab_size` then counts.
    A model without pad uses EOS in its place: pads carry no loss and nothing attends to them.
    """

    def __init__(self, model: bytes, num_threads: int = 1) -> None:
        """Raises RuntimeError or ValueError when the bytes are no usable model."""
        import sentencepiece

        if not model:
            raise ValueError("the file is empty")
        self.num_threads = num_threads
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        # A flipped bit makes a piece a field that is skipped, and all ids after it others.
        if len(model) == T5[0]:
            whole = hashlib.sha256(model).hexdigest() == T5[1]
        else:
            whole = self._processor.serialized_model_proto() == model
        if not whole:
            raise ValueError("it is damaged, or holds what SentencePiece does not read")
        pieces = self._processor.get_piece_size()
        self.eos, self.unk = self._processor.eos_id(), self._processor.unk_id()
        if pieces == 0 or self.eos < 0:
            raise ValueError("the model has no end-of-sentence piece")
        bos, pad = self._processor.bos_id(), self._processor.pad_id()
        self.bos = bos if bos >= 0 else pieces
        self.pad = pad if pad >= 0 else self.eos
        self.vocab_size = max(pieces, self.bos + 1)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids [length] (int32) of each text, without BOS and EOS."""
        return self._processor.encode(texts, num_threads=self.num_threads, out_type="numpy")

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; BOS, EOS and pad vanish."""
        special = {self.bos, self.eos, self.pad}
        return self._processor.decode([int(i) for i in ids if int(i) not in special])


def load_tokenizer(path: str | Path, num_threads: int = 1) -> Tokenizer:
    """Reads a SentencePiece model; raises UserError when there is none at `path`."""
    path = Path(path).expanduser()
    try:
        return Tokenizer(path.read_bytes(), num_threads)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"data.tokenizer: {path} is not a usable SentencePiece model ({reason(error)}); bash "
            "scripts/download.sh c4 fetches T5's"
        ) from error


# Token cache


def from_config(
    data: DataConfig, num_threads: int = 1, report: Report = token_cache.print_line
) -> Corpus:
    """The corpus that a config's data section describes; tokenised once, later calls open it.

    A given tokeniser brings its own vocabulary, and c4, which has its own splits, does without
    `validation_fraction`. A split ends after the document with which it reaches its maximum of
    tokens. `report` gets a line now and then.

    The result is a folder of `cache_dir` named by all that decides its content. It appears under
    its name only when complete, so an interrupted or a concurrent preparation does no harm.
    Raises UserError for every mistake in these keys or in the files they name.
    """
    documents = open_source(data.source, data.path, data.text_key, data.validation_fraction)
    limits = {"train": data.max_train_tokens, "validation": data.max_validation_tokens}
    given, vocab_size = data.tokenizer, data.tokenizer_vocab_size
    identity = {
        **documents.fingerprint,
        "tokenizer": _tokenizer_identity(data.source, given, vocab_size),
        "limits": limits,
        "code_version": CODE_VERSION,
    }
    name = f"{data.source}-{token_cache.digest(identity)}"
    folder = Path(data.cache_dir).expanduser().resolve() / name

    def build(folder: Path) -> dict[str, Any]:
        model = folder / "tokenizer.model"
        if given is not None:
            shutil.copyfile(Path(given).expanduser(), model)
        else:
            documents.documents("validation")  # an empty one is refused before the training
            report(f"training a tokeniser of {vocab_size} pieces on {documents.label}")
            train_tokenizer(documents.documents("train"), vocab_size, model)
        loaded = load_tokenizer(model, num_threads)
        # Two bytes a token where they suffice; little-endian, so that caches can be copied.
        dtype = "<u2" if loaded.vocab_size <= 2**16 else "<u4"
        counts = {
            split: _write_split(folder, split, documents, loaded, dtype, limits[split], report)
            for split in SPLITS
        }
        return {
            **identity,
            "vocab_size": loaded.vocab_size,
            "bos": loaded.bos,
            "eos": loaded.eos,
            "pad": loaded.pad,
            "dtype": dtype,
            **counts,
            # UTF-8 bytes of text for each stored token, BOS and EOS among them
            "bytes_per_token": {s: round(c["bytes"] / c["tokens"], 4) for s, c in counts.items()},
        }

    token_cache.prepare(folder, build, ("numpy", "sentencepiece", "datasets"), report)
    return Corpus(folder)


def _tokenizer_identity(source: str, tokenizer: str | None, vocab_size: int) -> dict[str, Any]:
    """What decides the tokeniser: the given file's content, or how one is trained."""
    if tokenizer is not None:
        load_tokenizer(tokenizer)  # a file that cannot work is refused before any work is done
        return {"sha256": sha256(Path(tokenizer).expanduser())}
    if source == "c4":
        raise UserError(
            "data.tokenizer: source c4 needs T5's SentencePiece model; give data/t5/spiece.model, "
            "which bash scripts/download.sh c4 fetches"
        )
    version = importlib.metadata.version("sentencepiece")
    return {"vocab_size": vocab_size, "sentencepiece": version}


def _write_split(
    folder: Path,
    split: str,
    source: Source,
    tokenizer: Tokenizer,
    dtype: str,
    limit: int | None,
    report: Report,
) -> dict[str, int]:
    """Streams one split's tokens into its files; returns what was counted.

    Only the document starts, 8 bytes each, are kept in memory.
    """
    starts, counts = array("q", [0]), Counter(documents=0, characters=0, bytes=0, unknown=0)
    progress, documents = Progress(split, report), source.documents(split)
    first, last = (np.array([id], dtype) for id in (tokenizer.bos, tokenizer.eos))
    with open(folder / f"{split}.bin", "wb") as file:
        while texts := list(islice(documents, ENCODE_DOCUMENTS)):
            encoded = tokenizer.encode(texts)
            ends = starts[-1] + np.cumsum([len(ids) + 2 for ids in encoded])
            if limit is not None:  # the document that reaches it is the last one
                kept = int(np.searchsorted(ends, limit)) + 1
                texts, encoded, ends = texts[:kept], encoded[:kept], ends[:kept]
            starts.extend(ends.tolist())
            parts = [part for ids in encoded for part in (first, ids.astype(dtype), last)]
            tokens = np.concatenate(parts)
            file.write(tokens.tobytes())
            counts["documents"] += len(texts)
            counts["characters"] += sum(map(len, texts))
            counts["bytes"] += len("".join(texts).encode("utf-8"))
            counts["unknown"] += int(np.count_nonzero(tokens == tokenizer.unk))
            if limit is not None and starts[-1] >= limit:
                break
            progress(counts["documents"], starts[-1])
    np.save(folder / f"{split}_offsets.npy", np.frombuffer(starts, dtype=np.int64))
    return {**counts, "tokens": starts[-1]}


# Rows


class Corpus(TokenCache):
    """A prepared cache folder: token files, tokeniser and numbers."""

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokeniser can give, BOS among them."""
        return self.meta["vocab_size"]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened("tokenizer", lambda: load_tokenizer(self.folder / "tokenizer.model"))

    def tokens(self, split: str) -> np.ndarray:
        """All tokens of a split, documents end to end, each with its BOS and EOS (a memmap)."""
        file = self.folder / f"{split}.bin"
        return self.opened(split, lambda: np.memmap(file, self.meta["dtype"], mode="r"))

    def offsets(self, split: str) -> np.ndarray:
        """Document d is tokens[offsets[d] : offsets[d + 1]]; one entry more than documents."""
        return self.array(f"{split}_offsets")


class Rows:
    """Map-style dataset of (inputs [context], targets [context]), both int64 tensors.

    Subclasses define a length and `_fetch(ids_B)`: inputs and targets [B, context] as arrays.
    `__getitems__`, which DataLoader calls with a whole batch of ids, reads the batch at once.
    """

    def __init__(self, corpus: Corpus, context: int) -> None:
        self.corpus, self.context = corpus, context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        import torch

        ids_B = np.asarray(ids, dtype=np.int64)
        if ids_B.size and not 0 <= ids_B.min() <= ids_B.max() < len(self):
            raise IndexError(f"row {ids_B.min()} .. {ids_B.max()} of {len(self)}")
        inputs_BxT, targets_BxT = self._fetch(ids_B)
        return list(zip(torch.from_numpy(inputs_BxT), torch.from_numpy(targets_BxT), strict=True))


class PackedRows(Rows):
    """A split's documents end to end, cut into rows; the tail that fills no row is dropped.

    Targets are the inputs shifted left by one; the last position of a row has none (IGNORE).
    Documents are not masked from each other and positions run on through a row.
    """

    def __init__(self, corpus: Corpus, context: int, split: str) -> None:
        super().__init__(corpus, context)
        self.split = split
        if split == "train" and not len(self):
            raise UserError(
                f"model.context: {context} is more than the {corpus.meta[split]['tokens']} "
                f"training tokens of {corpus.folder}; lower it or prepare more text"
            )
        self.unit = f"full rows of {context} tokens"  # what len counts, for messages

    def __len__(self) -> int:
        return self.corpus.meta[self.split]["tokens"] // self.context

    def _fetch(self, ids_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.corpus.tokens(self.split)[: len(self) * self.context]
        inputs_BxT = tokens.reshape(-1, self.context)[ids_B].astype(np.int64)
        targets_BxT = np.full_like(inputs_BxT, IGNORE)
        targets_BxT[:, :-1] = inputs_BxT[:, 1:]
        return inputs_BxT, targets_BxT


class ValidationRows(Rows):
    """Validation documents, padded to the context; pads carry no loss.

    A document longer than the context is cut off (NanoDO's convention) or, with `split`, continues
    in further rows, whose first tokens are nobody's target. Inputs are padded with the pad id,
    targets with IGNORE; the last token of a row has no target.
    """

    def __init__(self, corpus: Corpus, context: int, split: bool = False) -> None:
        super().__init__(corpus, context)
        offsets = corpus.offsets("validation")
        self.bounds = [
            (start, min(start + context, int(last)))
            for first, last in pairwise(offsets)
            for start in (range(int(first), int(last), context) if split else [int(first)])
        ]

    def __len__(self) -> int:
        return len(self.bounds)

    def _fetch(self, ids_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = self.corpus.tokens("validation")
        shape = (len(ids_B), self.context)
        inputs_BxT = np.full(shape, self.corpus.meta["pad"], dtype=np.int64)
        targets_BxT = np.full(shape, IGNORE, dtype=np.int64)
        for row, index in enumerate(ids_B):
            start, end = self.bounds[index]
            inputs_BxT[row, : end - start] = tokens[start:end]
            targets_BxT[row, : end - start - 1] = tokens[start + 1 : end]
        return inputs_BxT, targets_BxT


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A fetched batch as (inputs_BxT, targets_BxT), for DataLoader's collate_fn."""
    import torch

    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets)


# Command


def main(arguments: list[str] | None = None) -> None:
    """Prepares a config's corpus and prints its folder and meta.json."""
    from nanolm_c4.config import Config

    token_cache.command(
        "nanolm_c4.data",
        Config,
        lambda config, threads: from_config(config.data, threads),
        arguments,
    )


if __name__ == "__main__":
    main()
