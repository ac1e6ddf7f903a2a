"""nanoGPT's shape on the bytes of Python's manual, for `param-groups transfer`; no batch repeats.

The command stands in param_groups/README.md.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # where nanogpt.py is
from nanogpt import TEXT
from nanogpt import task as of_one_batch

ROWS = 8


def task(width, seed):
    """The example's model and plan, in batches of ROWS passages."""
    order = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(seed))
    return replace(of_one_batch(width, seed), batches=TEXT[order].split(ROWS)[:-1])
