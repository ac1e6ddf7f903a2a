"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs, memory per GPU.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L layers, n width, M MLP multiplier, H heads, T tokens (patches), n_patch numbers of a
patch, n_out classes.
"""

from __future__ import annotations

from training import memory as gpu
from training.memory import BF16, FP32
from vit_imagenet.config import Config, ModelConfig

CHANNELS = 3


def tokens(shape: ModelConfig) -> int:
    """T = (image / patch)^2."""
    return (shape.image_size // shape.patch_size) ** 2


def patch_numbers(shape: ModelConfig) -> int:
    """n_patch, the patchify layer's fan-in."""
    return CHANNELS * shape.patch_size**2


def flops(config: Config) -> float:
    """Training FLOPs: 6 per weight of a matrix and token, and 12 per pair of tokens and width.

    Every token attends to all T. The head reads one mean per image. Patchify counts as the other
    matrices, though no gradient of the images is formed, which saves a third of it (0.2 % of
    ViT-B). Evaluation and probes are not counted.
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

    embedding is the stem, n_patch n of patchify and T n of positions; non_embedding the blocks'
    (4 + 2M) L n^2 and the head's n_out n, with its bias n_out more.
    """
    shape = config.model
    embedding = (patch_numbers(shape) + tokens(shape)) * shape.width
    others = shape.layers * _block(shape) + (shape.width + shape.head_bias) * shape.classes
    return {"embedding": embedding, "non_embedding": others, "total": embedding + others}


def memory(config: Config, shards: int = 1, replicas: int = 1) -> dict[str, int]:
    """Bytes on each of `shards * replicas` GPUs, see training.memory.on_each_gpu; the images are
    among the activations, and the kernels of these rules need no scratch."""
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
        # Targets, log-probabilities, their product and its gradients.
        loss=lambda rows: 4 * FP32 * rows * shape.classes,
    )


def optimizer_state(config: Config) -> int:
    """Bytes of the optimiser's state over all tensors, after its first step."""
    # In blocks; patchify, positions, the head's two.
    tensors = 4 * config.model.layers + 3 + config.model.head_bias
    return gpu.optimizer_state(config.optimizer.name, parameters(config)["total"], tensors)


def activations(config: Config, rows: int, recomputed: bool = False) -> int:
    """Bytes kept for the backward pass of `rows` images, without copies of weights.

    Before the blocks: the patches, under autocast beside their rounding. After: the last norm's
    input, mean and deviation, and the tokens' mean. Where blocks are recomputed, each keeps its
    input, and one of them all of it.
    """
    shape, low = config.model, config.training.precision != "fp32"
    size = BF16 if low else FP32
    stream, block = FP32 * shape.width, _kept_by_block(config)
    blocks = shape.layers * stream + block if recomputed else shape.layers * block
    images = patch_numbers(shape) * (FP32 + (BF16 if low else 0))
    per_token = images + blocks + stream + FP32 * 2
    return rows * (tokens(shape) * per_token + size * shape.width)


def _kept_by_block(config: Config) -> int:
    """Bytes per token that a block keeps; q, k and v are one product."""
    shape, low = config.model, config.training.precision != "fp32"
    heads = shape.width // shape.head_dim
    return gpu.kept_by_block(shape.width, shape.mlp_ratio, heads, low, roundings=0)


def _weight_copies(config: Config, shards: int) -> int:
    """Bytes of all matrices rounded to bf16, once per step; of one block if they are recomputed."""
    if config.training.precision == "fp32":
        return 0
    shape = config.model
    blocks = shape.layers if shards == 1 else 1
    ends = patch_numbers(shape) * shape.width + (shape.width + 1) * shape.classes
    return BF16 * (ends + blocks * _block(shape))


def _block(shape: ModelConfig) -> int:
    """Weights of one block."""
    return (4 + 2 * shape.mlp_ratio) * shape.width**2
