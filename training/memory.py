"""What the memory of all experiments has in common: how its parts add up on a GPU.

Torch is not imported, so that thousands of configs are counted in a second.
"""

from __future__ import annotations

FP32, BF16 = 4, 2  # bytes of a number


def ceil(number: int, parts: int) -> int:
    """`number` divided by `parts`, rounded up."""
    return -(-number // parts)


def peak(parts: dict[str, int], accumulates: bool, layers: int) -> int:
    """The larger of two moments: the backward pass begins, and it ends or the optimiser steps."""
    always = parts["weights"] + parts["optimizer"] + parts["communication"]
    begins = parts["weight_copies"] + parts["activations"] + parts["loss"]
    if accumulates:
        begins += parts["gradients"]
    ends = parts["gradients"] + max(parts["update"], parts["activations"] // layers)
    return always + max(begins, ends)


def communication(total: int, outside: int, block: int, shards: int, replicas: int) -> int:
    """Bytes of DDP's buckets, or of what FSDP2 holds whole.

    The latter: the `outside` weights, of no block, two blocks' weights (one fetched ahead) and two
    blocks' gradients (one being summed). `total` and `block` count weights, too.
    """
    if shards == 1:
        return FP32 * total if replicas > 1 else 0
    return FP32 * (outside + 4 * block)
