"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs, memory per GPU.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L layers, D width, F MLP width, V vocabulary, T context, H heads; r = F / D.
"""

from __future__ import annotations

import functools

from nanolm_c4.config import BORDELON, Config, ModelConfig
from training import memory as gpu
from training.memory import BF16, FP32, Observed, linear_cross_entropy

_FACTORED_FROM = 128  # training.adafactor.ADAFACTOR_MIN_DIM
# Hidden weights have a multiplier n^(-1/2) (Everett et al., Table 1): a product that is kept.
_MULTIPLIED = ("ntk", "mean_field", BORDELON)
_BIAS_COLUMNS = 8  # nanolm_c4.model: what a readout's bias adds to the loss's matrices


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
    scales and a readout's bias: V in place of (2L + 1) D.
    """
    total = sum(rows * columns * count for rows, columns, count in _tensors(config))
    embedding = vocabulary(config) * config.model.width
    return {"embedding": embedding, "non_embedding": total - embedding, "total": total}


def _tensors(config: Config) -> list[tuple[int, int, int]]:
    """(rows, columns, how many) of every kind of tensor; vectors have one row."""
    shape, words = config.model, vocabulary(config)
    hidden = shape.mlp_ratio * shape.width
    bias, scales = (1, words, 1), (1, shape.width, 2 * shape.layers + 1)
    return [
        (words, shape.width, 2),  # embedding and readout
        (shape.context, shape.width, 1),
        (shape.width, shape.width, 4 * shape.layers),
        (hidden, shape.width, 2 * shape.layers),
        bias if _is_bordelon(config) else scales,
    ]


def _is_bordelon(config: Config) -> bool:
    """Whether the readout has a bias, and the norms no scales."""
    return config.prescription.parameterization == BORDELON


def memory(config: Config, shards: int = 1, replicas: int = 1) -> dict[str, int]:
    """Bytes on each of `shards * replicas` GPUs, see training.memory.on_each_gpu; the loss has the
    logits of a chunk and the readout's gradient."""
    shape, weights, block = config.model, parameters(config)["total"], _block(config.model)
    scales = 0 if _is_bordelon(config) else 2 * shape.width
    low = config.training.precision != "fp32"
    return gpu.on_each_gpu(
        config,
        shards,
        replicas,
        parameters=weights,
        optimizer=optimizer_state(config),
        outside=weights - shape.layers * (block + scales),
        block=block,
        output=vocabulary(config) * shape.width,
        layers=shape.layers,
        weight_copies=_weight_copies(config, shards),
        activations=lambda rows: activations(config, rows, shards > 1),
        inside=lambda rows: rows * shape.context * _kept_by_block(config),
        loss=lambda rows: _loss(config, rows * shape.context, low),
        update=gpu.scratch(config.optimizer.name, weights, shards),
        observation=_observation(config),
    )


def optimizer_state(config: Config) -> int:
    """Bytes of the optimiser's state over all tensors, after its first step."""
    tensors = _tensors(config)
    if config.optimizer.name != "adafactor":
        weights = sum(rows * columns * count for rows, columns, count in tensors)
        count = sum(count for *_, count in tensors)
        return gpu.optimizer_state(config.optimizer.name, weights, count)
    numbers = 0
    for rows, columns, count in tensors:
        factored = min(rows, columns) >= _FACTORED_FROM
        numbers += count * (1 + (rows + columns if factored else rows * columns))
    return FP32 * numbers


def activations(config: Config, rows: int, recomputed: bool = False) -> int:
    """Bytes kept for the backward pass of `rows` sequences, without copies of weights.

    After the blocks, per token: the last norm's input, the gradient of its output (which a
    readout's bias widens by its columns), the ids.
    Where blocks are recomputed, each keeps its input, and one of them all of it.
    """
    shape, width, block = config.model, config.model.width, _kept_by_block(config)
    blocks = shape.layers * FP32 * width + block if recomputed else shape.layers * block
    columns = _BIAS_COLUMNS if _is_bordelon(config) else 0
    ends = FP32 * (2 * width + columns + 2) + 8  # ids are int64
    return rows * shape.context * (blocks + ends) + 8 * shape.context


def _kept_by_block(config: Config) -> int:
    """Bytes per token that a block keeps; q, k and v are three products."""
    shape, low = config.model, config.training.precision != "fp32"
    return gpu.kept_by_block(shape.width, shape.mlp_ratio, shape.heads, low)


def _loss(config: Config, positions: int, low: bool) -> int:
    """Bytes of readout and loss, see training.memory; a bias joins a copy of the matrix."""
    words, width = vocabulary(config), config.model.width
    if not _is_bordelon(config):
        return linear_cross_entropy(positions, width, words, low)
    width += _BIAS_COLUMNS
    return linear_cross_entropy(positions, width, words, low) + FP32 * words * width


def _weight_copies(config: Config, shards: int) -> int:
    """Bytes of the blocks' matrices in the form that enters a product, where that is a copy.

    Autocast rounds them to bf16, once per step; a multiplier makes a product. Where blocks are
    recomputed only one has its copies.
    """
    low = config.training.precision != "fp32"
    if not low and config.prescription.parameterization not in _MULTIPLIED:
        return 0
    blocks = config.model.layers if shards == 1 else 1
    return (BF16 if low else FP32) * blocks * _block(config.model)


def _block(shape: ModelConfig) -> int:
    """Weights of one block's matrices."""
    return (4 + 2 * shape.mlp_ratio) * shape.width**2


def _observation(config: Config) -> int:
    """Bytes of an observation, see training.memory; none where nothing is observed."""
    shape, settings, words = config.model, config.training, vocabulary(config)
    if not settings.observe_every:
        return 0
    hidden = shape.mlp_ratio * shape.width
    multiplied = config.prescription.parameterization in _MULTIPLIED
    return gpu.observation(
        Observed(
            samples=settings.observe_samples,
            tokens=shape.context,
            width=shape.width,
            hidden=hidden,
            heads=shape.heads,
            layers=shape.layers,
            outputs=shape.context * words,
            parameters=parameters(config)["total"],
            matrix=shape.width * (max(hidden, words) if multiplied else 0),
            causal=True,
        )
    )
