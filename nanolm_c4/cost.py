"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L layers, D width, F MLP width, V vocabulary, T context, H heads; r = F / D.
"""

from __future__ import annotations

import functools

from nanolm_c4.config import BORDELON, Config


def vocabulary(config: Config) -> int:
    """V before there is a corpus: the config's, or its tokeniser's ids, given or to be trained.

    Raises UserError where a given tokeniser is needed and cannot be read.
    """
    if config.model.vocab_size:
        return config.model.vocab_size
    if config.data.tokenizer:
        return _ids(config.data.tokenizer)
    return config.data.tokenizer_vocab_size


@functools.cache
def _ids(tokenizer: str) -> int:
    from nanolm_c4.data import load_tokenizer

    return load_tokenizer(tokenizer).vocab_size


def flops(config: Config) -> float:
    """Training FLOPs: 6 per weight of a matrix and token, and 6 per query-key pair and width.

    Causal attention: half of all T^2 pairs. Embeddings are looked up and cost nothing; evaluation
    and probes are not counted.
    """
    shape = config.model
    blocks = shape.layers * (4 + 2 * shape.mlp_ratio) * shape.width**2
    attention = shape.layers * shape.context * shape.width  # causal: half of 2 T D
    tokens = config.training.steps * tokens_per_step(config)
    return 6.0 * tokens * (blocks + attention + vocabulary(config) * shape.width)


def tokens_per_step(config: Config) -> int:
    """Positions of one optimiser step, over all GPUs and micro-batches."""
    return config.training.batch_size * config.model.context


def parameters(config: Config) -> dict[str, int]:
    """Numbers of parameters as Everett et al., Table 3, count them.

    embedding = V D; non_embedding, with readout, positions and scales in it as in the table, is
    L (4 + 2r) D^2 + V D + T D + (2L + 1) D; total is their sum. Bordelon et al.'s decoder has no
    scales and a readout's bias: V in place of (2L + 1) D; without norms there are no scales. A tied
    readout is the embedding, and counts once.
    """
    total = sum(rows * columns * count for rows, columns, count in _tensors(config))
    embedding = vocabulary(config) * config.model.width
    return {"embedding": embedding, "non_embedding": total - embedding, "total": total}


def _tensors(config: Config) -> list[tuple[int, int, int]]:
    """(rows, columns, how many) of every kind of tensor; vectors have one row."""
    shape, words = config.model, vocabulary(config)
    hidden = shape.mlp_ratio * shape.width
    bias, scales = (1, words, 1), (1, shape.width, (2 * shape.layers + 1) * shape.norms)
    return [
        (words, shape.width, 1 if shape.tied else 2),  # embedding and readout
        (shape.context, shape.width, 1),
        (shape.width, shape.width, 4 * shape.layers),
        (hidden, shape.width, 2 * shape.layers),
        bias if _is_bordelon(config) else scales,
    ]


def _is_bordelon(config: Config) -> bool:
    """Whether the readout has a bias, and the norms no scales."""
    return config.prescription.parameterization == BORDELON
