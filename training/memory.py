"""What the memory of all experiments has in common: how its parts add up on a GPU.

Torch is not imported, so that thousands of configs are counted in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FP32, BF16 = 4, 2  # bytes of a number
LOGITS_PER_CHUNK = 1 << 27  # training.linear_cross_entropy, on a GPU
LINE = 64  # bytes to which training.linear_cross_entropy pads a row of logits
# Numbers per weight that an optimiser's step holds besides: directions and, of Adam's, roots. No
# fused kernel makes them on a GPU.
_SCRATCH = {"adam_param_scaling": 2, "adafactor": 1, "adam_atan2": 2}


def ceil(number: int, parts: int) -> int:
    """`number` divided by `parts`, rounded up."""
    return -(-number // parts)


# What training/optimizers.py keeps of every tensor: numbers in its shape, and a step count.
_STATES = {"sgd": (1, 0), "adam": (2, 1), "adam_param_scaling": (2, 1), "adam_atan2": (2, 1)}


def optimizer_state(optimizer: str, weights: int, tensors: int) -> int:
    """Bytes of an optimiser's state over so many weights in so many tensors, after its first
    step."""
    numbers, counts = _STATES[optimizer]
    return FP32 * (numbers * weights + counts * tensors)


def kept_by_block(width: int, mlp_ratio: int, heads: int, low: bool, roundings: int = 2) -> int:
    """Bytes per token that a pre-norm block keeps for its backward pass, weights excluded.

    In float32: both norms' inputs and outputs, q, k, v, the attention's output, and the MLP's
    hidden layer before and after GELU, 8 + 2r widths; four numbers are the norms' means and
    deviations, and the attention keeps a logarithm per head. Under autocast (`low`) the residual
    stream stays float32, the rest is bf16, and where q, k, v are three products, each keeps its
    own rounding of their common input: two more `roundings`.
    """
    inner = BF16 * (6 + roundings + 2 * mlp_ratio) if low else FP32 * (6 + 2 * mlp_ratio)
    return (2 * FP32 + inner) * width + FP32 * (4 + heads)


def scratch(optimizer: str, weights: int, shards: int) -> int:
    """Bytes that the step of an optimiser over so many weights takes on each of its shards."""
    return ceil(FP32 * weights * _SCRATCH.get(optimizer, 0), shards)


def on_each_gpu(
    config: Any,
    shards: int,
    replicas: int,
    *,
    parameters: int,
    optimizer: int,
    outside: int,
    block: int,
    output: int,
    layers: int,
    weight_copies: int,
    activations: Callable[[int], int],
    inside: Callable[[int], int],
    loss: Callable[[int], int],
    update: int | Callable[[bool], int] = 0,
    observation: int | None = None,
) -> dict[str, int]:
    """Bytes on each of `shards * replicas` GPUs, by kind, and the largest sum at one time.

    Every GPU takes its share of the batch, in micro-batches. `shards` divide weights, gradients
    and optimiser state and recompute the blocks' activations, as the launch configs for FSDP2 in
    scripts/accelerate do; `replicas` repeat them (DDP). Kinds: weights, gradients, optimizer,
    weight_copies (for autocast and multipliers), activations (kept for the backward pass by eager
    autograd; torch.compile keeps fewer), loss (logits and what is made of them), communication
    (DDP's buckets, or what FSDP2 holds whole), update (scratch of the optimiser's step),
    observation (of the representations, where there are any; not of a sharded run) and total.

    The total is not the sum: gradients and activations of a block do not exist together, unless
    gradients are accumulated over micro-batches, and an observation has neither.

    `parameters`, `outside` (of no block), `block` and `output` (of the last matrix) count weights,
    `optimizer`, `weight_copies`, `update` and `observation` bytes; `activations`, those `inside`
    one block and `loss` are functions of a micro-batch's rows, and `update` may be one of whether
    gradients are summed, over micro-batches or shards.
    """
    share = ceil(config.training.batch_size, shards * replicas)
    rows = min(config.training.micro_batch_size or share, share)
    summed = rows < share or shards > 1
    parts = {
        "weights": ceil(FP32 * parameters, shards),
        "gradients": ceil(FP32 * parameters, shards),
        "optimizer": ceil(optimizer, shards),
        "weight_copies": weight_copies,
        "activations": activations(rows),
        "loss": loss(rows),
        "communication": FP32 * parameters if shards == 1 < replicas else 0,  # DDP's buckets
        "update": update(summed) if callable(update) else update,
    }
    if observation is not None:  # an experiment that observes
        parts["observation"] = observation if shards == 1 else 0
    accumulated = parts["gradients"] if rows < share else 0
    if shards == 1:
        # The largest of three moments: the backward pass begins; it ends, or the optimiser steps;
        # the representations are observed, in an experiment that can.
        begins = parts["weight_copies"] + parts["activations"] + parts["loss"] + accumulated
        ends = parts["gradients"] + max(parts["update"], parts["activations"] // layers)
        most = max(begins, ends, parts.get("observation", 0))
        return {**parts, "total": _always(parts) + most}
    # The largest of three moments, with what FSDP2 holds whole. The weights of no block are whole
    # from the forward pass on. At the loss the last block's gathered weights are still held. In its
    # backward pass a block has its weights, the next one's, the gradients of the one before, and
    # its own activations and copies of weights, which go as its gradients come; the output's
    # gradient waits for the end. There the weights are gone, and the gradients of no block exist
    # twice.
    inputs = parts["activations"] - inside(rows)
    turning = max(inside(rows) + parts["weight_copies"], FP32 * block)
    moments = [
        (FP32 * (outside + block), accumulated + inputs + parts["loss"]),
        (FP32 * (outside + output + min(3, layers) * block), parts["gradients"] + inputs + turning),
        (FP32 * 2 * outside, parts["gradients"] + parts["update"]),
    ]
    parts["communication"], beside = max(moments, key=sum)
    return {**parts, "total": _always(parts) + beside}


def is_observation(parts: Mapping[str, int]) -> bool:
    """Whether the peak, `total`, is that of an observation and not of a training step."""
    observation = parts.get("observation", 0)
    return observation > 0 and parts["total"] == _always(parts) + observation


def _always(parts: Mapping[str, int]) -> int:
    return parts["weights"] + parts["optimizer"] + parts["communication"]


@dataclass(frozen=True)
class Observed:
    """What the memory of an observation follows from; all but the first are of the model.

    `hidden` is the MLP's width, `outputs` the numbers that one sample's output has, `matrix` the
    weights of the largest matrix that a forward pass multiplies by a number.
    """

    samples: int
    tokens: int
    width: int
    hidden: int
    heads: int
    layers: int
    outputs: int
    parameters: int
    matrix: int
    causal: bool

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return FP32 * self.samples * self.tokens * self.width


def observation(of: Observed) -> int:
    """Bytes that measure.observations takes at most, on top of weights and optimiser state.

    Gradients are gone by then, the initial values drawn again. Of both states there are 4 L + 1
    streams (before and after blocks; in each the norm's output, q and k) and the output. To these
    comes the largest of: a block's MLP, or a weight times its multiplier, before the second output
    is there; after it, what `_attention` counts, or a difference of outputs or of weights. All of
    it is float32, whatever the precision of training, and in one process, however many train.
    """
    inner = FP32 * of.samples * of.tokens * of.hidden
    outputs = FP32 * of.samples * of.outputs
    forward = max(2 * (of.stream + inner), 3 * of.stream + inner + FP32 * of.matrix)
    kept = FP32 * of.parameters + 2 * (4 * of.layers + 1) * of.stream + outputs
    return kept + max(forward, outputs + max(_attention(of), outputs, FP32 * of.width**2))


def _attention(of: Observed) -> int:
    """Bytes of measuring one block's attention logits, samples x heads x tokens^2 numbers.

    Their movement takes them twice: one state's entries, and another's being formed from scaled q
    and copies of q and k in order (causal ones are cut from the whole square), besides q and k by
    the current weights, which those of the block before outlive. Their kurtosis over heads, which
    four heads have, takes them three times, and their mean.
    """
    square = FP32 * of.samples * of.heads * of.tokens**2
    entries = square * (of.tokens + 1) // (2 * of.tokens) if of.causal else square
    formed = square + max(3 * of.stream, entries if of.causal else 0)
    movement = entries + formed + (4 if of.layers > 1 else 2) * of.stream
    return max(movement, (3 if of.heads >= 4 else 2) * entries + entries // of.heads)


def linear_cross_entropy(tokens: int, width: int, words: int, low: bool) -> int:
    """Bytes of training.linear_cross_entropy while it has a chunk of logits, or after.

    Its input, masked and not, and the gradient; the output's weight rounded (where the precision
    is `low`, bf16 or fp16), its gradient and one chunk's part of that; logits and their softmax.
    After: the weight's gradient, and that times the loss's own.
    """
    size = BF16 if low else FP32
    chunks = max(1, ceil(tokens, max(1, LOGITS_PER_CHUNK // words)))
    line = LINE // size
    columns = (ceil(words, line) | 1) * line
    logits = ceil(tokens, chunks) * columns * (size + (FP32 if low else 0))
    inside = 3 * size * tokens * width + (FP32 + (2 * BF16 if low else 0)) * words * width + logits
    return max(inside, 2 * FP32 * words * width)
