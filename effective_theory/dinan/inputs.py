"""The inputs that kernels are computed for: a few digits or a few lines of text."""

from __future__ import annotations

import string

import torch
from torch import Tensor

from effective_theory.dinan.config import Config
from training.errors import UserError

LETTERS = " " + string.ascii_lowercase
"""What ids of language stand for, by number."""


def inputs(config: Config) -> Tensor:
    """Vision: patches (D, T, n_patch), float64; language: ids (D, T), int64.

    Pixels of all digits are shifted and scaled to mean 0 and variance 1. Letters are numbered
    0 to 26, the space first, so that higher ids never occur. UserError if there are too few.
    """
    return _digits(config) if config.model.stem == "vision" else _letters(config)


def _digits(config: Config) -> Tensor:
    from sklearn.datasets import load_digits

    first, count, side = config.data.first, config.data.samples, config.data.patch_size
    images = torch.from_numpy(load_digits().images)
    if first + count > len(images):
        raise UserError(
            f"data.first {first} and data.samples {count} ask for more than the {len(images)} "
            "digits; lower one of them"
        )
    chosen = ((images - images.mean()) / images.std())[first : first + count]
    return chosen.unfold(1, side, side).unfold(2, side, side).reshape(count, -1, side * side)


def _letters(config: Config) -> Tensor:
    from training.data.text import embedded_file, read_embedded

    first, count, tokens = config.data.first, config.data.samples, config.data.tokens
    ids: list[int] = []
    for document in read_embedded(embedded_file()):
        ids += [LETTERS.index(letter) for letter in document.lower() if letter in LETTERS]
        if len(ids) >= (first + count) * tokens:
            return torch.tensor(ids[first * tokens : (first + count) * tokens]).view(count, tokens)
    raise UserError(
        f"data.first {first}, data.samples {count} and data.tokens {tokens} ask for more text "
        "than there is; lower one of them"
    )
