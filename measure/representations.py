"""Measurements of a transformer's representations: kernels, attention over heads, movement.

    start, now = (capture(m, batch, call) for m in (initial_model, model))  # call gives the logits
    pooled_kernel(now.stream[-1])                          # (B, B)
    head_variance(now.blocks[0].entries())
    attention_movement(start, now, model)                  # total and weight-induced, per block

The model is any whose `blocks` return the residual stream and each have an `attention` with
`causal`, `heads`, `attention_scale`, and `query` and `key`, both of LayerNorm of the stream: found
by these names, not by class. Equation and figure numbers are those of Bordelon et al., "Infinite
limits of multi-head transformer dynamics".

Sizes: B samples, T tokens (or patches), n = N H width, H heads, N head dimension, L blocks.

Cost of an observation (`measure.observations`), on one CPU core with 8 samples observed and 16
trained on: 0.5 to 1.0 of a training step of decoders (4 blocks, width 64 and 256), 1.0 to 3.5 of
small Vision Transformers. Memory: (4 L + 1) B T n numbers for each of the two states, a copy of the
parameters while the initial state is there, and three times B H T^2 for the logits of one block.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import UserError

NEEDED = ("causal", "heads", "attention_scale", "query", "key")
_PIECE = 1 << 18  # entries; a float64 copy of them stays in a CPU's cache

Forward = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Block:
    """What the attention of one block saw and formed.

    `entering` (B, T, n): the input of the query and key layers, LayerNorm of the residual stream,
    in the type it has there, so that they can be applied to it again. `queries`, `keys`
    (B, H, T, N): outputs of these layers, multipliers included, in float32 (or float64).
    """

    entering: Tensor
    queries: Tensor
    keys: Tensor
    scale: float
    causal: bool

    def entries(self) -> Tensor:
        """The attention logits scale * q_t . k_t' before the softmax that are not masked (eq. 7).

        (B, H, E): E = T^2, or T (T + 1) / 2 if causal. Formed again at every call, as they are the
        largest tensor of all.
        """
        logits = self.scale * self.queries @ self.keys.transpose(-1, -2)
        if not self.causal:
            return logits.flatten(-2)
        # Row by row: eight times as fast as a mask.
        return torch.cat([logits[..., t, : t + 1] for t in range(logits.shape[-1])], dim=-1)


@dataclass(frozen=True)
class Capture:
    """One pass: `stream` h^0 .. h^L, each (B, T, n), `blocks`, and the model's output f.

    h^0 is what the embedding gives the first block. In float32 (float64 if the model is), but for
    `Block.entering`.
    """

    stream: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    outputs: Tensor


def attention_blocks(model: nn.Module) -> list[Any]:
    """The blocks of a model that can be observed.

    Raises UserError for one without the names needed.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise UserError(
            f"{type(model).__name__} cannot be observed: expected a list of transformer blocks in "
            "its attribute 'blocks'; give the model itself, unwrapped, or turn observations off"
        )
    for index, block in enumerate(blocks):
        attention = getattr(block, "attention", None)
        missing = [f"attention.{name}" for name in NEEDED if not hasattr(attention, name)]
        if missing:
            raise UserError(
                f"blocks.{index} of {type(model).__name__} cannot be observed: it has no "
                f"{missing[0]!r}; expected an attention with {', '.join(NEEDED)}"
            )
    return list(blocks)


def capture(model: nn.Module, batch: Any, call: Forward) -> Capture:
    """Runs `call(model, batch)` once in evaluation mode, without gradients, and keeps what passes.

    `call` returns the logits f, a tensor whose first axis is the sample. Heads are contiguous
    slices of the query and key outputs, as `view(B, T, H, N)` cuts them.

    Modes, hooks and random states are as before afterwards, also when it fails. Raises UserError
    for a model that cannot be observed, or whose blocks do not run exactly once each.
    """
    blocks = attention_blocks(model)
    seen: dict[tuple[str, int], list[Tensor]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for index, block in enumerate(blocks):
            for handle in _hooks(seen, index, block):
                stack.callback(handle.remove)
        outputs = call(model, batch)
    for (what, index), found in seen.items():
        if len(found) != 1 or not isinstance(found[0], Tensor) or found[0].ndim != 3:
            raise UserError(
                f"blocks.{index} cannot be observed: expected one {what} of shape (batch, token, "
                f"width) in a pass, got {len(found)}; the call must run the given model once"
            )
    taken = {key: found[0] for key, found in seen.items()}
    samples = len(taken["entering", 0])
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or len(outputs) != samples:
        raise UserError(
            f"an observed pass must return the logits of its {samples} samples; give the task a "
            "`forward` that does"
        )
    stream = (taken["entering", 0], *(taken["leaving", index] for index in range(len(blocks))))
    return Capture(
        stream=tuple(_real(h) for h in stream),
        blocks=tuple(_block(taken, i, b.attention) for i, b in enumerate(blocks)),
        outputs=_real(outputs),
    )


def _hooks(
    seen: dict[tuple[str, int], list[Tensor]], index: int, block: Any
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Keeps the inputs and outputs of a block, of its attention, and of query and key."""
    attention = block.attention
    entering = {"entering": block, "normed": attention.query}
    leaving = {"leaving": block, "query": attention.query, "key": attention.key}
    for what, module in entering.items():
        keep = seen.setdefault((what, index), []).append
        yield module.register_forward_pre_hook(
            lambda _, args, kwargs, keep=keep: keep((*args, *kwargs.values())[0]), with_kwargs=True
        )
    for what, module in leaving.items():
        keep = seen.setdefault((what, index), []).append
        yield module.register_forward_hook(lambda _, args, output, keep=keep: keep(output))


def _block(taken: dict[tuple[str, int], Tensor], index: int, attention: Any) -> Block:
    return Block(
        entering=taken["normed", index],
        queries=_by_head(taken["query", index], attention.heads),
        keys=_by_head(taken["key", index], attention.heads),
        scale=float(attention.attention_scale),
        causal=attention.causal,
    )


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(B, T, H N) -> (B, H, T, N)."""
    return _real(x).unflatten(-1, (heads, -1)).transpose(1, 2)


def _real(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores each module's mode and the random states."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training


# ------------------------------------------------------------------------------------------------
# Kernels of the residual stream, in float64


def pooled_kernel(h: Tensor) -> Tensor:
    """(B, T, n) -> H(x, x') = <h(x)> . <h(x')> / n, (B, B), < > the mean over tokens (Fig. 6b, 9).

    The mean is taken first, which is the mean of `token_kernel` over both tokens.
    """
    return _gram(h.double().mean(1))


def token_kernel(h: Tensor) -> Tensor:
    """(B, T, n) -> H_tt'(x, x') = h_t(x) . h_t'(x') / n, (B, T, B, T): all of eq. 6."""
    samples, tokens, width = h.shape
    return _gram(h.double().reshape(-1, width)).view(samples, tokens, samples, tokens)


def sample_kernel(h: Tensor, token: int = -1) -> Tensor:
    """(B, T, n) -> H_tt(x, x'), (B, B), of one token: the last in Fig. 7b."""
    return _gram(h[:, token].double())


def spatial_kernel(h: Tensor, sample: int = 0) -> Tensor:
    """(B, T, n) -> H_tt'(x, x), (T, T), of one sample (Fig. 6c, 7c, 10)."""
    return _gram(h[sample].double())


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.T / rows.shape[-1]


def kernel_alignment(first: Tensor, second: Tensor) -> float:
    """Centred kernel alignment of two (B, B) kernels: 1 if equal up to scale and a constant; NaN
    where a centred kernel is zero (Cortes et al., 2012)."""
    a, b = _centred(first.double()), _centred(second.double())
    return ((a * b).sum() / (a.norm() * b.norm())).item()


def _centred(kernel: Tensor) -> Tensor:
    """Without what all samples share; zero where nothing but rounding is left."""
    centred = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
    return centred if centred.norm() > 1e-12 * kernel.norm() else torch.zeros_like(kernel)


def square_error(values: Tensor, reference: Tensor) -> float:
    """Mean over entries of (values - reference)^2; averaged over seeds, Fig. 3a and 4b."""
    return rms(values - reference) ** 2


def relative_square_error(values: Tensor, reference: Tensor) -> float:
    """||values - reference||^2 / ||reference||^2; NaN or infinite for a reference of zero."""
    return _ratio(square_error(values, reference), rms(reference) ** 2)


def rms(x: Tensor) -> float:
    """Root mean square of all entries, accumulated in float64."""
    return norm(x.detach()).item() / math.sqrt(x.numel())


def norm(x: Tensor) -> Tensor:
    """The L2 norm, accumulated in float64 and left on the device.

    float32 will not do: torch's norm on a CPU is 0.2% too small at 3e7 entries and half the
    truth at 3e8, and squares of gradients below 1e-23 vanish.
    """
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces(x)]
    return torch.stack(norms).norm()


def pieces(x: Tensor) -> Sequence[Tensor]:
    """All entries: in pieces on a CPU, where torch makes a float64 copy of what it is given."""
    return x.reshape(-1).split(_PIECE) if x.device.type == "cpu" else (x.reshape(-1),)


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


# ------------------------------------------------------------------------------------------------
# Attention logits over heads


def head_variance(entries: Tensor) -> float:
    """Unbiased variance over heads (axis 1 of (B, H, ...)), averaged over samples and entries.

    N^(1 - 2 alpha_A) at initialisation (Table 3). NaN for one head.
    """
    if entries.shape[1] < 2:
        return math.nan
    # torch's own variance takes twenty times as long over an axis that is not the last.
    deviation = entries - entries.mean(dim=1, keepdim=True)
    return rms(deviation) ** 2 * entries.shape[1] / (entries.shape[1] - 1)


def excess_kurtosis(entries: Tensor) -> float:
    """Excess kurtosis over heads (axis 1 of (B, H, ...)), averaged over samples and entries.

    0 for a Gaussian at any number of heads: Fisher's G2, unbiased there. Each entry is taken by
    itself, as entries differ in variance. NaN for fewer than 4 heads or equal ones.
    """
    heads = entries.shape[1]
    if heads < 4:
        return math.nan
    deviation = entries - entries.mean(dim=1, keepdim=True)
    largest = torch.maximum(deviation.amax(1, keepdim=True), -deviation.amin(1, keepdim=True))
    # Fourth powers of small logits underflow in float32; in place, as the logits are large.
    square = deviation.div_(largest).square_()
    g2 = square.square().mean(dim=1) / square.mean(dim=1).square() - 3
    unbiased = ((heads + 1) * g2 + 6) * (heads - 1) / ((heads - 2) * (heads - 3))
    return unbiased.mean(dtype=torch.float64).item()


def attention_entries(block: Block, sample: int, token: int, other: int) -> Tensor:
    """The logits of every head at one place, (H,): the token attending, and the one attended to
    (Fig. 3b). The place is not masked."""
    products = block.queries[sample, :, token] * block.keys[sample, :, other]
    return block.scale * products.sum(-1)


# ------------------------------------------------------------------------------------------------
# Movement from one state of a model to another


@torch.no_grad()
def attention_movement(
    initial: Capture, current: Capture, model: nn.Module
) -> list[dict[str, float]]:
    """Per block the RMS over entries of the change of q, k and A, total and weight-induced.

    "..._change": current minus initial. "..._change_weights": with the current W_Q and W_K of
    `model` applied to the initial LayerNorm of the residual stream, minus initial: eq. 15 and
    Table 3 count only these (Fig. 13), and the total holds what embeddings and earlier layers
    move, too. Both captures are of one batch.
    """
    moved = []
    for block, start, now in zip(
        attention_blocks(model), initial.blocks, current.blocks, strict=True
    ):
        attention = block.attention
        layers = (attention.query, attention.key)
        queries, keys = (_by_head(layer(start.entering), attention.heads) for layer in layers)
        induced = replace(start, queries=queries, keys=keys)
        entries, numbers = start.entries(), {}
        for name, end in (("change", now), ("change_weights", induced)):
            numbers[f"query_{name}"] = rms(end.queries - start.queries)
            numbers[f"key_{name}"] = rms(end.keys - start.keys)
            numbers[f"attention_{name}"] = rms(end.entries().sub_(entries))
        moved.append(numbers)
    return moved


@torch.no_grad()
def weight_movement(initial: nn.Module, model: nn.Module) -> list[dict[str, float]]:
    """Per block how far W_Q and W_K have moved (Fig. 5a).

    "..._weight_change": RMS over entries of W - W_0, as stored, without the forward multiplier.
    "..._weight_relative": ||W - W_0||_F / ||W_0||_F; NaN if W_0 is zero.
    """
    moved = []
    for old, new in zip(attention_blocks(initial), attention_blocks(model), strict=True):
        numbers = {}
        for name in ("query", "key"):
            before = getattr(old.attention, name).weight
            change = rms(getattr(new.attention, name).weight - before)
            numbers[f"{name}_weight_change"] = change
            numbers[f"{name}_weight_relative"] = _ratio(change, rms(before))
        moved.append(numbers)
    return moved


# ------------------------------------------------------------------------------------------------
# Distance between functions, and between kernels, of several models


def distance_to_ensemble(values: Tensor, ensemble: Sequence[Tensor]) -> float:
    """Mean square difference to the limit that independent models of one kind scatter around.

    The mean of m of them stands in for the limit (Fig. 4b). Its own scatter, an m-th of their
    variance, is subtracted, so the result is unbiased for every m > 1 and may come out below zero.
    One reference is taken as it is. `values` is of none of them: see `leave_one_out`.
    """
    references = torch.stack([reference.double() for reference in ensemble])
    return square_error(values, references.mean(0)) - _scatter(references) / len(references)


def leave_one_out(ensemble: Sequence[Tensor]) -> list[float]:
    """Of every model of an ensemble, the mean square difference to the limit of the others.

    Each is compared with the mean of the m - 1 others, less the scatter of that mean. The mean of
    the result is the ensemble's unbiased variance.
    """
    members = torch.stack([member.double() for member in ensemble])
    others = (members.sum(0) - members) / (len(members) - 1)
    noise = _scatter(members) / (len(members) - 1)
    return [
        square_error(member, other) - noise for member, other in zip(members, others, strict=True)
    ]


def _scatter(members: Tensor) -> float:
    """Unbiased variance over the members, averaged over entries; 0 for one."""
    return members.var(dim=0).mean().item() if len(members) > 1 else 0.0
