"""The only door to fairseq, which is slow to import and rearranges the process it is in.

Importing it gives the root logger a handler and level INFO, fixes the start method of processes,
draws from Python's random numbers and sets environment variables and warning filters; `load` puts
all of these back. Nothing here needs fairseq before `load` is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch

from training.errors import UserError

# What is used of it anywhere; once these are imported, fairseq's own modules find the rest loaded.
_PARTS = (
    "fairseq.checkpoint_utils",
    "fairseq.data",
    "fairseq.data.denoising_dataset",
    "fairseq.data.encoders.gpt2_bpe",
    "fairseq.models.bart",
    "fairseq.tasks.denoising",
)


@functools.cache
def load() -> ModuleType:
    """The package `fairseq`, with the modules of BART and of its data imported.

    Raises UserError when ve-fairseq is not installed.
    """
    with _process_as_it_was():
        try:
            package = importlib.import_module("fairseq")
            for name in _PARTS:
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or str(error)
            raise UserError(
                f"fairseq cannot be imported, because {missing!r} is not installed: "
                "pip install -r requirements.txt (the package is ve-fairseq)"
            ) from None
    return package


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restores the state of the process that an import may have changed."""
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    start_method = multiprocessing.get_start_method(allow_none=True)
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.INFO)  # its modules log while they are imported
            yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers
        multiprocessing.set_start_method(start_method, force=True)
        _restore_environment(environment)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
