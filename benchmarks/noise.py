"""Samples per CPU-second: BART's corruption here and fairseq's DenoisingDataset.

    python -m benchmarks.noise                       # half a minute on one core
    python -m benchmarks.noise --repeats 50 --json benchmarks/results/noise.json

Both permute the sentences of 512-token samples and infill 30 % of them in spans of Poisson(3)
units: fairseq as its denoising task does (a sample of the dataset, from token tensor to source and
target tensors), ours from token array to source tensor. In words, 1.4 tokens each on average, and
in tokens. The rows "fairseq" and "exact" are the two settings of `fraction_mode`; fairseq has
only its own. All take turns, in an order that rotates; a turn is the processor time of
`--samples` samples in one thread, and ratios are taken within a turn. Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch

from bart_span_denoise import fairseq_library
from bart_span_denoise.noise import Noise
from benchmarks import harness

START, END, FIRST_SYMBOL, FULL_STOP, VOCABULARY = 0, 2, 4, 17, 50265
MASK = VOCABULARY - 1
TOKENS, TOKENS_PER_WORD, TOKENS_PER_SENTENCE = 512, 1.4, 25
# Row -> (unit, fraction_mode); None is fairseq itself.
CASES = {
    "word, fairseq's own": ("word", None),
    "word, fairseq": ("word", "fairseq"),
    "word, exact": ("word", "exact"),
    "token, fairseq's own": ("token", None),
    "token, fairseq": ("token", "fairseq"),
    "token, exact": ("token", "exact"),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=20, help="timed turns of each row")
    add("--samples", type=int, default=200, help="samples per turn")
    return parser.parse_args(argv)


class Text:
    """Random samples: words and sentences of geometric length, ends of sentences full stops."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.word_starts = rng.random(VOCABULARY) < 1 / TOKENS_PER_WORD
        self.word_starts[:FIRST_SYMBOL] = True
        self.word_starts[FULL_STOP] = False
        shape = count, TOKENS
        content = rng.integers(FULL_STOP + 1, MASK, size=shape)
        ends = rng.random(shape) < 1 / TOKENS_PER_SENTENCE
        ends[:, 1:] &= ~ends[:, :-1]
        ends[:, -2], ends[:, -1] = False, True
        content[ends] = FULL_STOP
        edge = np.full((count, 1), START), np.full((count, 1), END)
        self.tokens = np.concatenate((edge[0], content, edge[1]), axis=1)
        self.ends = [np.flatnonzero(row) + 2 for row in ends]
        self.tensors = torch.from_numpy(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        """What fairseq's dataset reads."""
        return self.tensors[index]


def fairseq_corruption(text: Text, unit: str) -> Callable[[int], torch.Tensor]:
    """fairseq's dataset in the setting of the paper's authors."""
    library = fairseq_library.load()
    vocab = library.data.Dictionary()
    for number in range(MASK - FIRST_SYMBOL):
        vocab.add_symbol(str(number))
    assert vocab.add_symbol("<mask>") == MASK and vocab.index("13") == FULL_STOP
    starts = torch.from_numpy(text.word_starts.astype(np.uint8)) if unit == "word" else None
    dataset = library.data.denoising_dataset.DenoisingDataset(
        text,
        None,
        vocab,
        MASK,
        starts,
        shuffle=False,
        seed=0,
        mask=0.3,
        mask_random=0.0,
        insert=0.0,
        rotate=0.0,
        permute_sentences=1.0,
        bpe="gpt2",
        replace_length=1,
        mask_length="span-poisson",
        poisson_lambda=3.0,
    )
    return lambda index: dataset[index]["source"]


def our_corruption(text: Text, unit: str, mode: str) -> Callable[[int], torch.Tensor]:
    """This repository's, to a tensor as well."""
    noise = Noise(MASK, VOCABULARY, text.word_starts, unit=unit, fraction_mode=mode)

    def corrupt(index: int) -> torch.Tensor:
        tokens, ends = text.tokens[index], text.ends[index]
        return torch.from_numpy(noise(tokens, ends, seed=0, epoch=0, index=index))

    return corrupt


def turn(corrupt: Callable[[int], torch.Tensor], count: int) -> Callable[[], float]:
    """Samples per second of processor time."""

    def run() -> int:
        for index in range(count):
            corrupt(index)
        return count

    return lambda: harness.per_second(run, time.process_time)


def summarise(speeds: dict[str, list[float]], shares: dict[str, float]) -> list[dict[str, Any]]:
    """Rows: medians with quartiles, and the ratio to fairseq in the same unit."""
    rows = []
    for name, (unit, mode) in CASES.items():
        row = {
            "row": name,
            "corrupted": shares[name],
            "samples_per_cpu_second": harness.spread(speeds[name]),
        }
        if mode:
            reference = f"{unit}, fairseq's own"
            row["ratio_to_fairseq"] = harness.ratios(speeds, name, reference)
        rows.append(row)
    return rows


def corrupted_share(corrupt: Callable[[int], torch.Tensor], count: int) -> float:
    """Mean share of the 512 tokens that are gone: what shows that rows do the same work."""
    left = [int((corrupt(index) != MASK).sum()) - 2 for index in range(count)]
    return 1 - statistics.mean(left) / TOKENS


def main() -> None:
    """The command."""
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = Text(args.samples)
    corruptions = {
        name: our_corruption(text, unit, mode) if mode else fairseq_corruption(text, unit)
        for name, (unit, mode) in CASES.items()
    }
    shares = {name: corrupted_share(run, args.samples) for name, run in corruptions.items()}
    actions = {name: turn(run, args.samples) for name, run in corruptions.items()}
    speeds = harness.take_turns(actions, args.repeats, warmup=1)
    rows = summarise(speeds, shares)
    harness.show(args, "cpu", rows, fairseq=metadata.version("ve-fairseq"))


if __name__ == "__main__":
    main()
