"""What a run costs, by its config: tokens, and multiply-adds of a sample.

Every sample counts as a full one, and the encoder sees T tokens too: spans that one [MASK] replaces
make its rows shorter by a sixth or so, where no sample of the batch is longer. What is counted is
thus the most that a run can cost.
"""

from __future__ import annotations

import functools
from pathlib import Path

from bart_span_denoise.config import Config
from training.experiment import Weights

ENDS = 2  # a start and an end around the content


def vocabulary(config: Config) -> int:
    """V before there is a corpus: the config's, or the symbols, special ones included, of its
    dictionary or of the BPE that would be trained.

    Raises UserError where a dictionary is needed and cannot be read.
    """
    data = config.data
    if config.model.vocab_size:
        return config.model.vocab_size
    if data.source == "binarised":
        return _symbols(Path(data.path).expanduser() / "dict.txt", "data.path")
    if data.bpe_dictionary:
        return _symbols(Path(data.bpe_dictionary), "data.bpe_dictionary")
    return data.trained_vocab_size


@functools.cache
def _symbols(dictionary: Path, key: str) -> int:
    from bart_span_denoise.bpe import load_dictionary

    return len(load_dictionary(dictionary, key))


def position_rows(config: Config) -> int:
    """R, rows of positions in each of the two stems."""
    return config.data.tokens_per_sample + ENDS


def tokens(config: Config) -> int:
    """T, the most tokens of a sample with start and end; fairseq's positions leave out two rows."""
    return position_rows(config) - (2 if config.model.positions == "fairseq" else 0)


def products(config: Config, weights: Weights) -> int:
    """T (matrices + V n + 5 L T n): the output shares the V n of the word embedding.

    Attention is 2 T n per token and layer in the encoder and between both, and half of it in the
    decoder, which is causal.
    """
    shape, count = config.model, tokens(config)
    matrices = weights.matrices + weights.by_role["token_embedding"]
    return count * (matrices + 5 * shape.layers * count * shape.width)


def tokens_per_step(config: Config) -> int:
    """Target tokens of one optimiser step, over all GPUs and micro-batches."""
    return config.training.batch_size * tokens(config)
