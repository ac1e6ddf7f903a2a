"""What a run costs, as closed forms of its config: parameters, tokens, FLOPs.

Nothing is built and torch is not imported, so thousands of configs are counted in a second.

Sizes: L layers, n width, M MLP multiplier, H heads, T tokens (patches), n_patch numbers of a
patch, n_out classes.
"""

from __future__ import annotations

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


def _block(shape: ModelConfig) -> int:
    """Weights of one block."""
    return (4 + 2 * shape.mlp_ratio) * shape.width**2
