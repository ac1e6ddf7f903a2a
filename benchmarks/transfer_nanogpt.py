"""nanoGPT's shape on the bytes of Python's manual, for `param-groups transfer`; no batch repeats.

The command stands in benchmarks/README.md.
"""

import sys
from dataclasses import replace

import torch

sys.path.insert(0, ".")  # the repository's root, which is not installed
from examples.nanogpt import TEXT
from examples.nanogpt import task as of_one_batch

ROWS = 8


def task(width, seed):
    """The example's model and plan, in batches of ROWS passages."""
    order = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(seed))
    return replace(of_one_batch(width, seed), batches=TEXT[order].split(ROWS)[:-1])
