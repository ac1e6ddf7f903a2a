"""Readout and cross-entropy in one step that never holds all logits.

At a language model's vocabulary the logits and their gradient are by far the largest tensors of a
training step. Here they exist for one chunk of tokens at a time: the gradient of a chunk is known
as soon as its softmax is, so the forward pass computes the gradients of input and weight too, and
the backward pass only scales them.

On a GPU the elementwise work is one compiled function that moves 6 bytes per logit in bf16: a read,
then a read and a write. Liger Kernel's fused loss moves as many; it would add a dependency that
needs Triton and has no CPU. torch has such a function from 2.14 on, with as many eager passes as
were here before (28 bytes), and up to ten times slower on a CPU, 112 ms against 11 ms on two cores.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from training.compiled import Compiled

IGNORE = -100  # the target of a position that carries no loss

# Logits per chunk. On a CPU larger chunks are no faster, and smaller ones update the weight's
# gradient, which does not fit into a cache, more often. A GPU needs larger products to be busy.
_CHUNK = {"cpu": 1 << 24}
_CHUNK_ELSEWHERE = 1 << 27
# Logits per piece of a chunk on a CPU: the passes of a softmax find the piece in the cache.
_PIECE = 1 << 19
# Rows of a chunk begin at odd multiples of this many bytes: aligned, and in different cache sets.
_LINE = 64
# Elsewhere the weight gets rows of zeros up to a whole line: with 32,101 tokens cuBLAS took kernels
# for unaligned sizes, 22 ms of a step's 53 on an H100.
_ANY_SIZE = ("cpu",)
# Step by step: compiled it took as long in bf16 and 1.3 times as long in float32 (512 rows of
# 32,101 logits, one thread of a Xeon, medians of 15), and it rounds otherwise.
_EAGER = ("cpu",)
# Products of low precision with a float32 result, which sums over chunks are not to round.
_EXACT_PRODUCTS = ("cuda",)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, multiplier: float = 1.0
) -> Tensor:
    """Cross-entropy in nats, summed over tokens, of the logits multiplier * x @ weight.T.

    x (N, D), weight (V, D), targets (N) with ids below V, or IGNORE where there is no loss.
    Returns a scalar. Under autocast the products are formed in autocast's type; the softmax, the
    loss and the sum of the weight's gradient over chunks are float32 at least. The result can be
    differentiated once: create_graph=True, for a second derivative, raises RuntimeError.
    """
    device = x.device.type
    products = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return _LinearCrossEntropy.apply(x, weight, targets, multiplier, products)
        return _implementation()(x, weight, targets, multiplier, products, False)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, which brings its gradients along."""

    @staticmethod
    def forward(ctx, x, weight, targets, multiplier, products):
        loss, x_grad, weight_grad = _implementation()(
            x, weight, targets, multiplier, products, True
        )
        ctx.save_for_backward(x_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, grad):
        # Not once_differentiable: that lets a second derivative vanish where `grad` is constant.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative: leave out create_graph=True, or "
                "use torch.nn.functional.cross_entropy on the logits"
            )
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad * grad, None, None, None


def _chunked(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    multiplier: float,
    products: torch.dtype,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients by x and weight; without `gradients` those are empty."""
    exact = torch.promote_types(x.dtype, torch.float32)
    kept = targets != IGNORE
    ids = targets.where(kept, 0)[:, None]
    # The multiplier and the mask act on x, which is small, and not on logits or weight.
    scaled_x = (x.to(exact) * multiplier).to(products)
    masked_x = scaled_x * kept[:, None]
    losses = torch.empty(len(x), dtype=exact, device=x.device)
    x_grad = torch.empty_like(scaled_x if gradients else scaled_x[:0])
    weight_grad = weight.new_empty(0)
    buffer = _buffer(scaled_x, len(weight))
    low_weight = weight.to(products)
    if x.device.type not in _ANY_SIZE:
        low_weight = F.pad(low_weight, (0, 0, 0, buffer.shape[1] - len(weight)))
    for start in range(0, len(x), len(buffer)):
        rows = slice(start, min(start + len(buffer), len(x)))
        padded = buffer[: rows.stop - start]
        logits = padded[:, : len(low_weight)]
        torch.mm(scaled_x[rows], low_weight.T, out=logits)
        padded[:, len(weight) :] = -torch.inf
        _to_gradients(padded, len(weight), ids[rows], losses[rows])
        if gradients:
            torch.mm(logits, low_weight, out=x_grad[rows])
            weight_grad = _accumulated(weight_grad, logits.T, masked_x[rows], exact)
    if gradients:
        x_grad = x_grad.to(exact) * multiplier * kept[:, None]
    weight_grad = weight_grad[: len(weight)].to(weight.dtype)
    return (losses * kept).sum(), x_grad.to(x.dtype), weight_grad


# Opaque to torch.compile: unrolled, the chunks would only make compilation longer.
_opaque = torch.library.custom_op("training::linear_cross_entropy", _chunked, mutates_args=())


def _implementation() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The plain function; under torch.compile the custom op, which is slower to dispatch."""
    return _opaque if torch.compiler.is_compiling() else _chunked


@_opaque.register_fake
def _(x, weight, targets, multiplier, products, gradients):
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    if not gradients:
        return loss, x.new_empty((0, x.shape[1])), weight.new_empty(0)
    return loss, torch.empty_like(x), torch.empty_like(weight)


def _buffer(x: Tensor, vocabulary: int) -> Tensor:
    """Room for the logits of one chunk: chunks of equal size, columns padded to whole lines."""
    most = max(1, _CHUNK.get(x.device.type, _CHUNK_ELSEWHERE) // vocabulary)
    chunks = max(1, -(-len(x) // most))
    line = _LINE // x.element_size()
    columns = (-(-vocabulary // line) | 1) * line
    return x.new_empty((max(1, -(-len(x) // chunks)), columns))


def _to_gradients(logits: Tensor, vocabulary: int, ids: Tensor, losses: Tensor) -> None:
    """Writes each row's loss, and over its logits their gradient, softmax minus one-hot.

    The logarithm of the sum of exponentials is taken at the row's largest logit, whose
    probability is at least 1/V: unlike the target's it cannot vanish. Columns past the vocabulary
    hold -inf on entry; an id that points there is refused like any other that is too large.
    """
    if logits.device.type not in _EAGER:
        own = logits[:, :vocabulary].gather(1, ids)
        for tensor in (logits, ids, own, losses):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # the last chunk may have fewer rows
        _two_passes(logits, ids, own, losses)
        return
    size = max(1, _PIECE // logits.shape[1])
    parts = zip(logits.split(size), ids.split(size), losses.split(size), strict=True)
    for piece, target, loss in parts:
        p = piece.to(losses.dtype)
        inside = p[:, :vocabulary]
        largest, own = p.amax(1), inside.gather(1, target)[:, 0]
        torch.softmax(p, 1, out=p)
        torch.sub(largest - p.amax(1).log(), own, out=loss)
        inside.scatter_add_(1, target, p.new_full(target.shape, -1.0))
        if p is not piece:
            piece.copy_(p)


@Compiled
def _two_passes(logits: Tensor, ids: Tensor, own: Tensor, losses: Tensor) -> None:
    """The same, of the targets' logits `own`: first the sums, then the gradients in place.

    Written so that torch finds its one-pass softmax. The target's column is compared with, not
    scattered to: p - 1 is rounded once.
    """
    exact = logits.to(losses.dtype)
    largest = exact.amax(1, keepdim=True)
    below = exact - largest
    log_sum = below.exp().sum(1, keepdim=True).log()
    losses.copy_((largest + log_sum - own)[:, 0])
    p = (below - log_sum).exp()
    columns = torch.arange(logits.shape[1], device=logits.device)
    logits.copy_(torch.where(columns == ids, p - 1, p))


def _accumulated(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right in `dtype`, in place; an empty total is 0."""
    exact = left.dtype != dtype == torch.float32 and left.device.type in _EXACT_PRODUCTS
    if total.numel() == 0:
        return torch.mm(left, right, out_dtype=dtype) if exact else torch.mm(left, right).to(dtype)
    if exact:
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    if left.dtype == dtype:
        return total.addmm_(left, right)
    return total.add_(torch.mm(left, right))
