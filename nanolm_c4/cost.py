"""What a run costs, by its config: tokens, and multiply-adds of a sample."""

from __future__ import annotations

import functools

from nanolm_c4.config import BORDELON, Config
from training.experiment import Weights


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


def shape(config: Config) -> object:
    """What decides the tensors: Bordelon et al.'s decoder has a bias and no scales."""
    is_bordelon = config.prescription.parameterization == BORDELON
    return *vars(config.model).values(), vocabulary(config), is_bordelon


def products(config: Config, weights: Weights) -> int:
    """T (matrices + L T D): causal attention takes half of the 2 T D per token and layer. A tied
    table is a matrix, too."""
    model = config.model
    matrices = weights.matrices + vocabulary(config) * model.width * model.tied
    return model.context * (matrices + model.layers * model.context * model.width)


def tokens_per_step(config: Config) -> int:
    """Positions of one optimiser step, over all GPUs and micro-batches."""
    return config.training.batch_size * config.model.context
