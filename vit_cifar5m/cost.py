"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L blocks, n = N H width, H heads, T tokens (patches), n_patch numbers of a patch.
"""

from __future__ import annotations

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


def _block(shape: ModelConfig) -> int:
    """Weights of one block: four matrices of attention and two of the MLP."""
    return 6 * shape.width**2
