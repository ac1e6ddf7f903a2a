"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs, memory per GPU.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L blocks, n = N H width, H heads, T tokens (patches), n_patch numbers of a patch.
"""

from __future__ import annotations

from training import memory as gpu
from training.memory import BF16, FP32, Observed
from vit_cifar5m.config import Config, ModelConfig

CHANNELS = 3


def tokens(shape: ModelConfig) -> int:
    """T = (image / patch)^2."""
    return (shape.image_size // shape.patch_size) ** 2


def patch_numbers(shape: ModelConfig) -> int:
    """n_patch, the patch embedding's fan-in."""
    return CHANNELS * shape.patch_size**2


def flops(config: Config) -> float:
    """Training FLOPs: 6 per weight of a matrix and token, and 12 per pair of tokens and width.

    Every token attends to all T. The readout reads one mean per image. The patch embedding counts
    as the other matrices, though no gradient of the images is formed. Evaluation and probes are
    not counted.
    """
    shape, count = config.model, tokens(config.model)
    matrices = patch_numbers(shape) * shape.width + shape.layers * _block(shape)
    attention = 2 * shape.layers * count * shape.width
    image = count * (matrices + attention) + shape.width * shape.classes
    return 6.0 * config.training.steps * config.training.batch_size * image


def tokens_per_step(config: Config) -> int:
    """Patches of one optimiser step, over all GPUs and micro-batches."""
    return config.training.batch_size * tokens(config.model)


def parameters(config: Config) -> dict[str, int]:
    """Numbers of parameters: embedding and non_embedding, and total, their sum.

    embedding is n_patch n of the patches and T n of the positions; non_embedding the blocks'
    6 L n^2 and the readout's, one n per class.
    """
    shape = config.model
    embedding = (patch_numbers(shape) + tokens(shape)) * shape.width
    others = shape.layers * _block(shape) + shape.width * shape.classes
    return {"embedding": embedding, "non_embedding": others, "total": embedding + others}


def memory(config: Config, shards: int = 1, replicas: int = 1) -> dict[str, int]:
    """Bytes on each of `shards * replicas` GPUs, see training.memory.on_each_gpu."""
    shape, weights = config.model, parameters(config)["total"]
    return gpu.on_each_gpu(
        config,
        shards,
        replicas,
        parameters=weights,
        optimizer=optimizer_state(config),
        outside=weights - shape.layers * _block(shape),
        block=_block(shape),
        output=shape.classes * shape.width,
        layers=shape.layers,
        weight_copies=_weight_copies(config, shards),
        activations=lambda rows: activations(config, rows, shards > 1),
        inside=lambda rows: rows * tokens(shape) * _kept_by_block(config),
        loss=lambda rows: 4 * FP32 * rows * shape.classes,
        update=gpu.scratch(config.optimizer.name, weights, shards),
        observation=_observation(config),
    )


def optimizer_state(config: Config) -> int:
    """Bytes of the optimiser's state over all tensors, after its first step."""
    tensors = 6 * config.model.layers + 3  # in blocks; patches, positions, readout
    return gpu.optimizer_state(config.optimizer.name, parameters(config)["total"], tensors)


def activations(config: Config, rows: int, recomputed: bool = False) -> int:
    """Bytes kept for the backward pass of `rows` images, without copies of weights.

    Before the blocks: the patches. After: the last norm's input, mean and deviation, and the
    tokens' mean. Where blocks are recomputed, each keeps its input, and one of them all of it.
    """
    shape, size = config.model, FP32 if config.training.precision == "fp32" else BF16
    stream, block = FP32 * shape.width, _kept_by_block(config)
    blocks = shape.layers * stream + block if recomputed else shape.layers * block
    per_token = size * patch_numbers(shape) + blocks + stream + FP32 * 2
    return rows * (tokens(shape) * per_token + size * shape.width)


def _kept_by_block(config: Config) -> int:
    """Bytes per token that a block keeps; q, k and v are three products."""
    shape, low = config.model, config.training.precision != "fp32"
    return gpu.kept_by_block(shape.width, 1, shape.heads, low)


def _weight_copies(config: Config, shards: int) -> int:
    """Bytes of matrices times their multipliers, kept for gradients of what they multiply.

    The images have none. Where blocks are recomputed only one has its copies.
    """
    shape = config.model
    blocks = shape.layers if shards == 1 else 1
    size = BF16 if config.training.precision != "fp32" else FP32
    return size * (shape.classes * shape.width + blocks * _block(shape))


def _block(shape: ModelConfig) -> int:
    """Weights of one block: four matrices of attention and two of the MLP."""
    return 6 * shape.width**2


def _observation(config: Config) -> int:
    """Bytes of an observation, see training.memory; none where nothing is observed."""
    shape, settings = config.model, config.training
    if not settings.observe_every:
        return 0
    return gpu.observation(
        Observed(
            samples=settings.observe_samples,
            tokens=tokens(shape),
            width=shape.width,
            hidden=shape.width,
            heads=shape.heads,
            layers=shape.layers,
            outputs=shape.classes,
            parameters=parameters(config)["total"],
            matrix=shape.width**2,
            causal=False,
        )
    )
