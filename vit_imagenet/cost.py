"""What a run costs, by its config: patches, and multiply-adds of a sample."""

from __future__ import annotations

from training.experiment import Weights
from vit_imagenet.config import Config, ModelConfig


def tokens(shape: ModelConfig) -> int:
    """T = (image / patch)^2."""
    return (shape.image_size // shape.patch_size) ** 2


def products(config: Config, weights: Weights) -> int:
    """T (matrices + 2 L T n) and the readout's, which reads one mean per image.

    Patchify counts as the other matrices, though no gradient of the images is formed, which is
    0.2 % of ViT-B.
    """
    shape, count = config.model, tokens(config.model)
    readout = weights.by_role["readout"]
    attention = 2 * shape.layers * count * shape.width
    return count * (weights.matrices - readout + attention) + readout


def tokens_per_step(config: Config) -> int:
    """Patches of one optimiser step, over all GPUs and micro-batches."""
    return config.training.batch_size * tokens(config.model)
