"""Text to batches: documents -> sentences -> BPE -> packed samples on disk -> noise -> batches.

`from_config` makes the samples once, in a cache folder, and returns a `Corpus`, whose samples a
DataLoader reads from memory-mapped files. `python -m bart_span_denoise.data --help` does the same
ahead of time, for clusters whose compute nodes have no network.

A binarised corpus stays where it is, only its samples are computed. Its lines end sentences, and
where the BPE's files are given so does, within a line, a token that ends with . ! or ? (and maybe
a closing quote) if a word's beginning follows. fairseq's own rule for GPT-2's BPE has the full stop
alone, and also cuts 3.14. So lines may hold sentences or whole paragraphs; without the BPE's files
every line is one sentence.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bart_span_denoise import bpe, corpora
from bart_span_denoise.bpe import EOS, PAD, Bpe
from bart_span_denoise.noise import MASKED, Noise
from training.data import token_cache
from training.data.text import SPLITS, open_source, split_sentences
from training.data.token_cache import Progress, TokenCache
from training.errors import UserError
from training.files import scratch_folder, sha256

# torch takes seconds to import, so it is imported where it is used.
if TYPE_CHECKING:
    import torch

    from bart_span_denoise.config import Config, DataConfig
    from training.data.sampling import Place

IGNORE = -100  # target without a loss: torch's default ignore_index
CODE_VERSION = 1  # raise it when the same text would give other files; old caches are then unused
TRAINING_CHARACTERS = 10_000_000  # text a BPE is trained on, at most
ENCODE_DOCUMENTS = 256  # documents tokenised together
# The corruption of validation samples, the same for every run and evaluation: no run's seed enters,
# and no run's training reaches this epoch.
VALIDATION_SEED, VALIDATION_EPOCH = 0, 2**64 - 1
STEMS = {"train": "train", "validation": "valid"}  # fairseq's names of the splits
ENDS = (".bin", ".idx")
BPE_KEYS = ("bpe_encoder", "bpe_vocab", "bpe_dictionary")

Sample = tuple["torch.Tensor", "torch.Tensor"]
Batch = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


# Batches


def collate(samples: list[tuple[Any, ...]], multiple: int = 1) -> Batch:
    """Encoder ids [B, S], decoder ids [B, T] and targets [B, T], int64, of (source, target, ...).

    Decoder ids are the targets shifted right behind an end token, as fairseq has them. Lengths are
    the batch's longest, rounded up to a multiple; the rest is [pad], and IGNORE in the targets.
    """
    sources, targets = zip(*(sample[:2] for sample in samples), strict=True)
    targets_BxT = _padded(targets, multiple, IGNORE)
    decoder_ids_BxT = _padded(targets, multiple, PAD).roll(1, dims=1)
    decoder_ids_BxT[:, 0] = EOS
    decoder_ids_BxT.masked_fill_(targets_BxT == IGNORE, PAD)
    return _padded(sources, multiple, PAD), decoder_ids_BxT, targets_BxT


def _padded(rows: tuple[torch.Tensor, ...], multiple: int, value: int) -> torch.Tensor:
    import torch

    longest = max(len(row) for row in rows)
    padded = torch.full((len(rows), -(-longest // multiple) * multiple), value, dtype=torch.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded


def collate_evaluation(samples: list[tuple[Any, ...]], multiple: int = 1) -> tuple[Any, ...]:
    """A batch, and its targets that a mask hides from the encoder, IGNORE in place of others."""
    sources, decoder_ids, targets_BxT = collate(samples, multiple)
    hidden_BxT = _padded(tuple(sample[2] for sample in samples), multiple, 0) == 1
    return sources, decoder_ids, targets_BxT, targets_BxT.masked_fill(~hidden_BxT, IGNORE)


def count(batch: Batch) -> torch.Tensor:
    """The number of targets of a batch."""
    return (batch[2] != IGNORE).sum()


# Samples


class Samples:
    """Map-style dataset of (source ids, target ids), int64 tensors, of one split.

    A source is the corrupted target. If inserted masks make it longer than the model's positions,
    the last masks are dropped. No text is lost: the rest of a source is part of the target, which
    fits. This affects 1 % of samples of 8 tokens and 0.02 % of samples of 32 tokens; of 6,000
    samples of 64 or 128 tokens it affected none.
    """

    def __init__(self, cache: Cache, split: str, noise: Noise) -> None:
        self.cache, self.split, self.noise = cache, split, noise
        self.longest = cache.meta["limit"] + 2

    def __len__(self) -> int:
        return self.cache.meta[self.split]["samples"]

    def describe(self) -> str:
        """The split's numbers, as one line."""
        found, limit, samples = self.cache.meta[self.split], self.cache.meta["limit"], len(self)
        line = (
            f"{self.split}: {samples:,} samples of {found['tokens'] / samples:.1f} tokens and "
            f"{found['sentences'] / samples:.1f} sentences on average, {found['tokens']:,} tokens"
        )
        if found["over_long"]:
            line += f"; {found['over_long']:,} sentences of more than {limit} tokens were split"
        if found["unknown"]:
            line += f"; {found['unknown']:,} tokens are <unk>"
        return line

    def clean(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [L] of a sample from start to end token, and its sentence ends [S]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.split}")
        bounds = self.cache.bounds(self.split)
        stored = self.cache.tokens(self.split)[bounds[index] : bounds[index + 1]]
        return corpora.sample(np.array(stored), self.cache.stops)

    def corrupted(self, index: int, seed: int, epoch: int) -> Sample:
        """A sample under the noise of this seed and epoch."""
        import torch

        target, ends = self.clean(index)
        source = self.noise(target, ends, seed=seed, epoch=epoch, index=index)
        surplus = len(source) - self.longest
        if surplus > 0:
            source = np.delete(source, np.flatnonzero(source == self.noise.mask_id)[-surplus:])
        return torch.from_numpy(source), torch.from_numpy(target)


class TrainSamples(Samples):
    """Training samples by Place: the noise is a function of (seed, epoch, index)."""

    def __init__(self, cache: Cache, noise: Noise, seed: int) -> None:
        super().__init__(cache, "train", noise)
        self.seed = seed

    def __getitem__(self, place: Place) -> Sample:
        return self.corrupted(place.index, self.seed, place.epoch)


class ValidationSamples(Samples):
    """Validation samples by number, always under the same noise."""

    def __init__(self, cache: Cache, noise: Noise) -> None:
        super().__init__(cache, "validation", noise)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """(source, target, hidden): hidden is 1 where no token of the source is the target's."""
        import torch

        source, target = self.corrupted(index, VALIDATION_SEED, VALIDATION_EPOCH)
        places = self.noise.places(
            *self.clean(index), seed=VALIDATION_SEED, epoch=VALIDATION_EPOCH, index=index
        )
        hidden = torch.ones_like(target)
        hidden[places[places != MASKED]] = 0
        return source, target, hidden


@dataclass(frozen=True)
class Corpus:
    """Samples of both splits under a config's noise."""

    cache: Cache
    train: TrainSamples
    validation: ValidationSamples

    @property
    def vocab_size(self) -> int:
        """Symbols of the dictionary, special ones and <mask> among them."""
        return self.cache.meta["vocab_size"]

    @property
    def bpe(self) -> Bpe | None:
        """The BPE; None for a binarised corpus without its files."""
        return self.cache.bpe

    def describe(self) -> list[str]:
        """The samples' numbers, a line for each split."""
        return [self.train.describe(), self.validation.describe()]


def from_config(config: Config, num_threads: int = 1) -> Corpus:
    """The corpus that a config describes; made on the first call, later ones only open it.

    It is a folder of data.cache_dir named by all that decides its content. It appears under its
    name only when complete, so an interrupted or a concurrent preparation does no harm. Raises
    UserError for every mistake in the config's data section or in the files that it names.
    """
    data = config.data
    # Tokens of content that a sample has at most: fairseq's positions count start and end, too.
    limit = data.tokens_per_sample - (2 if config.model.positions == "fairseq" else 0)
    recipe = _Binarised(data) if data.source == "binarised" else _Text(data, num_threads)
    identity = {**recipe.identity(), "limit": limit, "code_version": CODE_VERSION}
    name = f"bart-{data.source}-{token_cache.digest(identity)}"
    folder = Path(data.cache_dir).expanduser().resolve() / name

    def build(folder: Path) -> dict[str, Any]:
        meta = identity | recipe.build(folder)
        return meta | _pack(folder, meta, limit)

    token_cache.prepare(folder, build, ("numpy", "tokenizers", "datasets"))
    cache = Cache(folder)
    noise = Noise(cache.meta["mask"], cache.word_starts, **data.noise.model_dump())
    return Corpus(cache, TrainSamples(cache, noise, config.seed), ValidationSamples(cache, noise))


# Cache


class Cache(TokenCache):
    """A prepared folder of samples; a binarised corpus itself stays where it is."""

    @property
    def checksum(self) -> str:
        """Of the cache's files, and of those of a binarised corpus, which stay where they are."""
        if not self.meta["corpus"]:
            return super().checksum
        return token_cache.digest([self.meta["sha256"], self.meta["corpus_sha256"]])

    def tokens(self, split: str) -> np.ndarray:
        """All stored tokens of a split, </s> of lines included (a memmap)."""
        prefix = Path(self.meta["corpus"] or self.folder) / STEMS[split]
        return self.opened(split, lambda: corpora.read(prefix))

    def bounds(self, split: str) -> np.ndarray:
        """Sample i is tokens[bounds[i] : bounds[i + 1]]."""
        return self.array(f"{split}_samples")

    @property
    def word_starts(self) -> np.ndarray | None:
        """Bool [vocab_size]; None without a BPE."""
        return self.array("word_starts") if self.meta["has_bpe"] else None

    @property
    def stops(self) -> corpora.Stops | None:
        """How sentences end within lines; None where only lines do."""
        if not self.meta["stops"]:
            return None
        return corpora.Stops(self.array("sentence_stops"), self.array("word_starts"))

    @property
    def bpe(self) -> Bpe | None:
        """The BPE of the files in the folder."""
        if not self.meta["has_bpe"]:
            return None
        files = (self.folder / name for name in bpe.FILES)
        return self.opened("bpe", lambda: Bpe(*files, whole=not self.meta["corpus"]))


def _pack(folder: Path, meta: dict[str, Any], limit: int) -> dict[str, dict[str, int]]:
    """Writes each split's samples; returns their counts with those that `meta` has."""
    stops, counts = None, {}
    if meta["stops"]:
        arrays = (folder / f"{name}.npy" for name in ("sentence_stops", "word_starts"))
        stops = corpora.Stops(*map(np.load, arrays))
    for split in SPLITS:
        prefix = Path(meta["corpus"] or folder) / STEMS[split]
        packed = corpora.pack(corpora.read(prefix), limit, stops)
        if packed.tokens == 0:
            raise UserError(f"data.path: {prefix}.bin has only empty lines; expected text")
        np.save(folder / f"{split}_samples.npy", packed.bounds)
        counts[split] = {
            **meta[split],
            "samples": len(packed.bounds) - 1,
            "tokens": packed.tokens,
            "sentences": packed.sentences,
            "over_long": packed.over_long,
        }
    return counts


def _write_bpe(folder: Path, loaded: Bpe, files: Iterable[str | Path] = ()) -> dict[str, Any]:
    """Writes what samples need of a BPE, and a given one's files; its share of meta.json."""
    for file, name in zip(files, bpe.FILES, strict=False):
        shutil.copyfile(Path(file).expanduser(), folder / name)
    np.save(folder / "word_starts.npy", loaded.word_starts)
    np.save(folder / "sentence_stops.npy", loaded.sentence_stops)
    return {"vocab_size": loaded.vocab_size, "mask": loaded.mask, "has_bpe": True}


# Sources


def binarise(data: DataConfig, folder: Path, num_threads: int = 1) -> None:
    """Makes the folder that source binarised reads, with the BPE's files, of a text source."""
    with scratch_folder(folder) as scratch:
        _Text(data, num_threads).build(scratch)
        os.rename(scratch, folder)


def _checksums(data: DataConfig) -> dict[str, str]:
    """What decides a given BPE: its files' content."""
    given = {f"data.{key}": getattr(data, key) for key in BPE_KEYS}
    return {key: bpe.checksum(path, key) for key, path in given.items() if path is not None}


class _Binarised:
    """A folder of fairseq-preprocess: dict.txt, and .bin and .idx of train and valid."""

    def __init__(self, data: DataConfig) -> None:
        self.data, self.root = data, Path(data.path).expanduser().resolve()
        if not self.root.is_dir():
            raise UserError(
                f"data.path: {self.root} is not a folder; expected one made by fairseq-preprocess, "
                "or of your text by `bash scripts/download.sh bart --text FOLDER`"
            )
        for stem in STEMS.values():
            corpora.read(self.root / stem)
        self.files = [self.root / f"{stem}{end}" for stem in STEMS.values() for end in ENDS]
        self.dictionary = self.root / "dict.txt"

    def identity(self) -> dict[str, Any]:
        """All that decides the samples, but for their length."""
        stats = [(file.name, file.stat()) for file in self.files]
        return {
            "source": "binarised",
            "corpus": str(self.root),
            "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
            "dictionary": bpe.checksum(self.dictionary, "data.path"),
            "bpe": _checksums(self.data),
        }

    def build(self, folder: Path) -> dict[str, Any]:
        """Writes the folder's files; returns their share of meta.json."""
        if has_bpe := self.data.bpe_encoder is not None:
            files = (self.data.bpe_encoder, self.data.bpe_vocab, self.dictionary)
            loaded = Bpe(*files, whole=False, dictionary_key="data.path")
            meta = _write_bpe(folder, loaded, files)
        else:
            known = bpe.load_dictionary(self.dictionary, "data.path")
            meta = {"vocab_size": len(known), "mask": known.index(bpe.MASK), "has_bpe": False}
        unknown = {
            split: {"unknown": corpora.check(self.root / stem, meta["vocab_size"])}
            for split, stem in STEMS.items()
        }
        sums = {file.name: sha256(file) for file in self.files}
        return {**meta, "stops": has_bpe, "corpus_sha256": sums, **unknown}


class _Text:
    """Documents of the embedded corpus or of local files, with a BPE given or trained."""

    def __init__(self, data: DataConfig, num_threads: int) -> None:
        self.data, self.num_threads = data, num_threads
        self.limits = {"train": data.max_train_tokens, "validation": data.max_validation_tokens}
        kind = "embedded" if data.source == "embedded" else "local"
        self.source = open_source(kind, data.path, data.text_key, data.validation_fraction)

    def identity(self) -> dict[str, Any]:
        """All that decides the samples, but for their length."""
        known = _checksums(self.data) or {
            "trained_vocab_size": self.data.trained_vocab_size,
            "tokenizers": importlib.metadata.version("tokenizers"),
        }
        return {**self.source.fingerprint, "bpe": known, "limits": self.limits}

    def build(self, folder: Path) -> dict[str, Any]:
        """Writes the folder's files, and a BPE's: the given one or a trained one; returns their
        share of meta.json."""
        files: list[str | Path] = []
        if self.data.bpe_encoder is not None:
            files = [getattr(self.data, key) for key in BPE_KEYS]
        else:
            size = self.data.trained_vocab_size
            self.source.documents("validation")  # an empty one is refused before the training
            token_cache.print_line(f"training a BPE of {size} symbols on {self.source.label}")
            bpe.train(_training_texts(self.source.documents("train")), size, folder)
        loaded = Bpe(*(files or (folder / name for name in bpe.FILES)))
        counts = {split: Counter(documents=0, characters=0, unknown=0) for split in SPLITS}
        for split in SPLITS:
            lines = self._lines(split, loaded, counts[split])
            corpora.write(folder / STEMS[split], lines, loaded.vocab_size)
        return {**_write_bpe(folder, loaded, files), "corpus": None, "stops": False, **counts}

    def _lines(self, split: str, loaded: Bpe, counts: Counter) -> Iterator[np.ndarray]:
        """The ids of each sentence, and of an empty line behind each document, with </s>."""
        tokens, limit = 0, self.limits[split]
        documents = self.source.documents(split)
        progress = Progress(split, token_cache.print_line)
        while batch := list(islice(documents, ENCODE_DOCUMENTS)):
            sentences = [_sentences(document) for document in batch]
            ids = iter(loaded.encode_batch([*chain.from_iterable(sentences)], self.num_threads))
            for document, of_document in zip(batch, sentences, strict=True):
                encoded = list(islice(ids, len(of_document)))
                yield from (np.append(line, EOS) for line in encoded)
                yield np.array([EOS])
                counts["documents"] += 1
                counts["characters"] += len(document)
                tokens += sum(map(len, encoded))
                if limit is not None and tokens >= limit:
                    return
            progress(counts["documents"], tokens)


def _sentences(document: str) -> list[str]:
    """Sentences as they stand in running text: those behind the first begin with a space."""
    first, *others = split_sentences(document.strip())
    return [first, *(f" {other}" for other in others)]


def _training_texts(documents: Iterator[str]) -> Iterator[str]:
    """Documents as they are encoded, up to the limit of characters."""
    characters = 0
    for document in documents:
        if characters >= TRAINING_CHARACTERS:
            return
        yield "".join(_sentences(document))
        characters += len(document)


# Command


def main(arguments: list[str] | None = None) -> None:
    """Prepares a config's corpus, describes it and prints its folder and meta.json."""
    from bart_span_denoise.config import Config

    def prepare(config: Config, num_threads: int) -> Cache:
        corpus = from_config(config, num_threads)
        for line in corpus.describe():
            token_cache.print_line(line)
        return corpus.cache

    token_cache.command("bart_span_denoise.data", Config, prepare, arguments)


if __name__ == "__main__":
    main()
