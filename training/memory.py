"""What the memory of all experiments has in common: how its parts add up on a GPU.

Torch is not imported, so that thousands of configs are counted in a second.
"""

from __future__ import annotations

FP32, BF16 = 4, 2  # bytes of a number
LOGITS_PER_CHUNK = 1 << 27  # training.losses, on a GPU
LINE = 64  # bytes to which training.losses pads a row of logits


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


def linear_cross_entropy(tokens: int, width: int, words: int, low: bool) -> int:
    """Bytes of training.losses.linear_cross_entropy while it has a chunk of logits, or after.

    Its input, masked and not, and the gradient; the output's weight rounded (where the precision
    is `low`, bf16), its gradient and one chunk's part of that; logits and their softmax. After:
    the weight's gradient, and that times the loss's own.
    """
    size = BF16 if low else FP32
    chunks = max(1, ceil(tokens, max(1, LOGITS_PER_CHUNK // words)))
    line = LINE // size
    columns = (ceil(words, line) | 1) * line
    logits = ceil(tokens, chunks) * columns * (size + (FP32 if low else 0))
    inside = 3 * size * tokens * width + (FP32 + (2 * BF16 if low else 0)) * words * width + logits
    return max(inside, 2 * FP32 * words * width)
