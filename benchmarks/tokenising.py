"""Megabytes of text per second that become token files, beside SentencePiece's own encoding.

    python -m benchmarks.tokenising --threads 1 2 --json benchmarks/results/tokenising.json

The embedded corpus in documents of `--characters`, a tokeniser of 1,024 pieces: `encode` of batches
of documents as lists, which is all that SentencePiece does, and `nanolm_c4.data`'s writing of one
split: batches, token files, offsets and counts. They take turns; ratios are taken within a turn,
by the clock. Prints JSON.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from benchmarks import harness
from nanolm_c4 import data
from training.text import open_source


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--characters", type=int, default=2200, help="of a document")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args(argv)


@dataclass
class Texts:
    """A source whose documents are at hand."""

    texts: list[str]

    def documents(self, split: str) -> Iterator[str]:
        """All of them, whatever the split."""
        return iter(self.texts)


def main(argv: list[str] | None = None) -> None:
    """Prints JSON."""
    args = parse(argv)
    whole = "\n".join(open_source("embedded", None, "text", 0.05).documents("train"))
    size = args.characters
    texts = [whole[at : at + size] for at in range(0, len(whole), size)]
    megabytes = len(whole.encode("utf-8")) / 1e6
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data.train_tokenizer(texts, 1024, folder / "tokenizer.model")
        library = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        for threads in args.threads:
            tokenizer = data.load_tokenizer(folder / "tokenizer.model", threads)

            def plain() -> float:
                begun = time.perf_counter()
                for at in range(0, len(texts), data.ENCODE_DOCUMENTS):
                    batch = texts[at : at + data.ENCODE_DOCUMENTS]
                    library.encode(batch, num_threads=threads)  # noqa: B023
                return time.perf_counter() - begun

            def ours() -> float:
                begun = time.perf_counter()
                data._write_split(folder, "train", Texts(texts), tokenizer, "<u2", None, print)  # noqa: B023
                return time.perf_counter() - begun

            times = harness.take_turns({"plain": plain, "ours": ours}, args.repeats, warmup=1)
            speeds = {
                kind: harness.spread([megabytes / seconds for seconds in times[kind]])
                for kind in times
            }
            share = harness.ratios(times, "plain", "ours")
            rows.append({"threads": threads, "megabytes_per_second": speeds, "ratio": share})
    harness.show(args, "cpu", rows, megabytes=megabytes)


if __name__ == "__main__":
    main()
