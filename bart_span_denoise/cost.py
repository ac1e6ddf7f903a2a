"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L layers of the encoder and as many of the decoder, n width, M MLP multiplier, H heads,
V vocabulary, R rows of positions, T tokens of a sample. Every sample counts as a full one, and the
encoder sees T tokens too: spans that one [MASK] replaces make its rows shorter by a sixth or so,
where no sample of the batch is longer. What is counted is thus the most a run can cost.
"""

from __future__ import annotations

import functools
from pathlib import Path

from bart_span_denoise.config import Config, ModelConfig

ENDS = 2  # a start and an end around the content
# Matrices of n^2 weights in attention: Q, K, V, U. The decoder's blocks have it twice.
_ATTENTION = 4


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


def flops(config: Config) -> float:
    """Training FLOPs: 6 per weight of a matrix and token, and 12 per query-key pair and width.

    The decoder's own attention is causal: half of all T^2 pairs. The output's V n weights act on
    every decoder token; embeddings are looked up and cost nothing. Evaluation and probes are not
    counted.
    """
    shape, count = config.model, tokens(config)
    matrices = shape.layers * sum(_blocks(shape)) + vocabulary(config) * shape.width
    pairs = shape.layers * (2 + 1 + 2) * count * shape.width  # encoder, decoder, between them
    return 6.0 * config.training.steps * config.training.batch_size * count * (matrices + pairs)


def tokens_per_step(config: Config) -> int:
    """Target tokens of one optimiser step, over all GPUs and micro-batches."""
    return config.training.batch_size * tokens(config)


def parameters(config: Config) -> dict[str, int]:
    """Numbers of parameters: embedding and non_embedding, and total, their sum.

    embedding is V n of the words, which encoder, decoder and output share, and 2 R n of positions;
    non_embedding the blocks' (4 + 2M) L n^2 of the encoder and (8 + 2M) L n^2 of the decoder.
    """
    shape = config.model
    embedding = (vocabulary(config) + 2 * position_rows(config)) * shape.width
    others = shape.layers * sum(_blocks(shape))
    return {"embedding": embedding, "non_embedding": others, "total": embedding + others}


def _blocks(shape: ModelConfig) -> tuple[int, int]:
    """Weights of an encoder's and of a decoder's block."""
    square, mlp = shape.width**2, 2 * shape.mlp_ratio
    return (_ATTENTION + mlp) * square, (2 * _ATTENTION + mlp) * square
