"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs, memory per GPU.

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
from training import memory as gpu
from training.memory import BF16, FP32, linear_cross_entropy

ENDS = 2  # a start and an end around the content
INT64 = 8
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


def memory(config: Config, shards: int = 1, replicas: int = 1) -> dict[str, int]:
    """Bytes on each of `shards * replicas` GPUs, see training.memory.on_each_gpu.

    The loss has the logits of a chunk and the output's gradient. The word embedding's gradient
    comes from the output and from two look-ups, each as large as V n, so that they are more than
    one while they are summed; the optimiser's step itself needs no scratch. Of blocks, the
    decoder's are exchanged.
    """
    shape, words, counts = config.model, vocabulary(config), parameters(config)
    low = config.training.precision != "fp32"
    return gpu.on_each_gpu(
        config,
        shards,
        replicas,
        parameters=counts["total"],
        optimizer=optimizer_state(config),
        outside=counts["embedding"],
        block=_blocks(shape)[1],
        output=words * shape.width,
        layers=2 * shape.layers,
        weight_copies=_weight_copies(config, shards),
        activations=lambda rows: activations(config, rows, shards > 1),
        inside=lambda rows: rows * tokens(config) * _kept_by_blocks(config)[1],
        loss=lambda rows: linear_cross_entropy(rows * tokens(config), shape.width, words, low),
        update=lambda summed: FP32 * words * shape.width * (2 if summed else 1),
    )


def optimizer_state(config: Config) -> int:
    """Bytes of the optimiser's state over all tensors, after its first step."""
    tensors = (3 * _ATTENTION + 4) * config.model.layers + 3  # in blocks; words, two of positions
    return gpu.optimizer_state(config.optimizer.name, parameters(config)["total"], tensors)


def activations(config: Config, rows: int, recomputed: bool = False) -> int:
    """Bytes kept for the backward pass of `rows` samples, without copies of weights.

    Outside of blocks: ids and targets, the stems' norms, the last norms' inputs, the encoder's
    output and the gradient of the decoder's. Where blocks are recomputed, each keeps its input, and
    one decoder block all of it.
    """
    shape, count = config.model, tokens(config)
    stream = FP32 * shape.width
    encoder, decoder = _kept_by_blocks(config)
    blocks = shape.layers * (encoder + decoder)
    if recomputed:
        blocks = shape.layers * 2 * stream + decoder
    dropped = shape.width if shape.dropout else 0
    stems = 2 * (stream + 2 * FP32 + dropped + INT64)
    ends = 4 * stream + 2 * 2 * FP32 + INT64 + 1  # and the mask of [pad]s
    return rows * count * (blocks + stems + ends) + 2 * INT64 * count


def _kept_by_blocks(config: Config) -> tuple[int, int]:
    """Bytes per token that an encoder's and a decoder's block keep, see training.memory.

    A decoder block has a second attention with its norm; its k and v keep their roundings of the
    encoder's output. Attention with a mask keeps one number per key. Dropout keeps one byte per
    number, as on a GPU; attention's, drawn anew from its seed, none.
    """
    shape, low = config.model, config.training.precision != "fp32"
    width, heads, size = shape.width, shape.width // shape.head_dim, BF16 if low else FP32
    dropped = width if shape.dropout else 0
    encoder = gpu.kept_by_block(width, shape.mlp_ratio, heads, low) + size + 2 * dropped
    attention = FP32 * (width + 2 + heads) + size * (5 + 2 * low) * width + dropped
    return encoder, encoder + attention


def _weight_copies(config: Config, shards: int) -> int:
    """Bytes of the blocks' matrices rounded to bf16, once per step; of one if recomputed."""
    if config.training.precision == "fp32":
        return 0
    encoder, decoder = _blocks(config.model)
    return BF16 * (config.model.layers * (encoder + decoder) if shards == 1 else decoder)
