"""What torch's functions do with their tensors: sum over axes, look up, add, multiply, move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

CONVOLUTIONS = {f"conv{turned}{d}d" for turned in ("", "_transpose") for d in (1, 2, 3)}
ADDING = {"addmm", "baddbmm"}  # products that come after a tensor to add
TWO = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot"}
TWO |= {"_grouped_mm", "grouped_mm"}
PRODUCTS = {"linear", "einsum", *CONVOLUTIONS, *ADDING, *TWO}
RECURRENT = {
    f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")
}
NORMS = {"layer_norm": 2, "rms_norm": 2, "group_norm": 2}  # the weight's place
NORMS |= {"batch_norm": 3, "instance_norm": 3}
LOOKUPS = {"embedding", "index_select", "embedding_bag", "__getitem__"}
SPLITS = {"chunk", "split", "tensor_split", "split_with_sizes", "unbind"}
TIMES = dict.fromkeys(("mul", "imul", "rmul", "multiply"), 1)
TIMES |= dict.fromkeys(("div", "divide", "truediv", "itruediv", "true_divide"), -1)
POWERS = {"rsqrt": -0.5, "sqrt": 0.5, "square": 2, "var": 2, "std": 1, "reciprocal": -1, "rdiv": -1}
SUMS = {"add", "iadd", "radd", "sub", "isub", "rsub", "subtract"}
ADDS = SUMS | {"addcmul", "addcdiv", "index_add", "index_put", "put"}  # one tensor to another
ADDS |= {"index_reduce", "scatter_add", "scatter_reduce", "lerp"}
KEEPS = {*TIMES, *SUMS, "neg", "to", "float", "double", "clone"}  # by a number the same entries
JOINS = {"cat", "concat", "stack", "where", "setitem", "scatter", "masked_fill", "copy"}
MEANS = {"mean", "nanmean", "var", "std", "var_mean", "std_mean", "interpolate"}
LOGS = {"logsumexp", "logcumsumexp", "prod"}  # of sums
FILLS = {"normal", "log_normal", "exponential", "cauchy", "geometric", "random", "zero", "fill"}
LIKE = {"type_as", "expand_as", "view_as", "reshape_as", "to"}  # what the second tensor is
CHOICES = {"topk", "sort", "argsort", "argmax"}
# Functions whose numbers are read by name, or that bend a curve.
NAMED = {*TIMES, *SUMS, *JOINS, *SPLITS, *CHOICES, *POWERS, *MEANS, *LOGS, "pow", "cumsum"}
NAMED |= {"softmax", "exp", "relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "dropout"}
# After these a constant acts as another number. A parameter's path names them, and no views.
ACTS = SUMS | {"exp", "sigmoid", "softplus", "tanh", "softmax", "normalize"}

# What functions raise on other values than the model's.
_NO_ANSWER = RuntimeError, ValueError, LookupError, TypeError, AttributeError, StopIteration
Tensors = Mapping[str, Tensor]


def writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument, as `x *= 2` does."""
    own = name.endswith("_") and not name.startswith("__")
    return own or name in {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


class Call(NamedTuple):
    """One call of a torch function; `ins` and `outs` are the tensors in it."""

    function: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    ins: Sequence[Tensor]
    outs: Sequence[Tensor]

    @property
    def bare(self) -> str:
        """The name without the underscores of a method or of a function in place."""
        return self.name.strip("_")

    @property
    def in_place(self) -> bool:
        """Whether the first tensor is written to."""
        return self.name == "__setitem__" or (self.name[-1] == "_" != self.name[0])

    @property
    def forgets(self) -> bool:
        """Whether no entry of a tensor among its arguments is in the result."""
        new = self.name.endswith("_like") or self.name.startswith("new_")
        return new or (self.in_place and self.bare in FILLS)

    @property
    def takes_input(self) -> bool:
        """Whether the first tensor is an activation by its place, whatever made it."""
        return self.name == "linear" or self.name in CONVOLUTIONS

    def bound(self, names: str) -> dict[str, Any]:
        """Arguments by name, however they were passed."""
        return {**dict(zip(names.split(), self.args, strict=False)), **self.kwargs}


class Operand(NamedTuple):
    """A tensor in a product: the axes summed over, those that it alone makes, and where the first
    of these is in the result."""

    tensor: Tensor
    summed: tuple[int, ...]
    made: tuple[int, ...]
    axis: int


def operands(call: Call) -> list[Operand]:
    """What a product multiplies; of a convolution the kernel's axes are summed over, too."""
    tensors, terms, result = _equation(call)

    def place(term: str, letter: str) -> int:
        at = term.index(letter)
        return at - len(term) if "." in term[:at] else at

    found = []
    for i, (tensor, term) in enumerate(zip(tensors, terms, strict=True)):
        others, letters = "".join(terms[:i] + terms[i + 1 :]), [c for c in term if c.isalpha()]
        made = [c for c in letters if c in result and c not in others]
        summed = tuple(place(term, c) for c in letters if c not in result)
        axis = place(result, min(made, key=result.index)) if made else -1
        found.append(Operand(tensor, summed, tuple(place(term, c) for c in made), axis))
    return found


def _equation(call: Call) -> tuple[Sequence[Tensor], list[str], str]:
    """A product as einsum writes it: tensors, a term for each, the result. A dot stands for axes
    in front, an underscore for the kernel of a turned convolution, which nothing is said of."""
    if call.takes_input:
        inputs, weight = (call.bound("input weight")[key] for key in ("input", "weight"))
        space = "XYZ"[: weight.ndim - 2]
        kernel = "io" + "_" * len(space) if "transpose" in call.name else "oi" + space.lower()
        return [inputs, weight], [f".i{space}" if space else ".i", kernel], f".o{space}"
    if call.name == "einsum":
        left, arrow, right = call.args[0].replace(" ", "").replace("...", ".").partition("->")
        letters = sorted({*left} - {",", "."})
        right = right if arrow else "".join(c for c in letters if left.count(c) == 1)
        return call.ins, left.split(","), right
    first, second = call.ins[call.name in ADDING :][:2]
    if call.name == "__rmatmul__":
        first, second = second, first
    terms = [".ij" if first.ndim > 1 else "j", ".jk" if second.ndim > 1 else "j"]
    return [first, second], terms, "." + "i" * (first.ndim > 1) + "k" * (second.ndim > 1)


def bias_of(call: Call) -> Tensor | None:
    """What is added to a product in the same call."""
    names = "bias" if call.name in ADDING else "input weight bias" if call.takes_input else ""
    bias = call.bound(names).get("bias", call.kwargs.get("input") if names == "bias" else None)
    return bias if isinstance(bias, Tensor) else None


def groups_of(call: Call) -> int:
    """Into how many parts a convolution splits its channels; 1 for all else."""
    last = "output_padding groups" if "transpose" in call.name else "dilation groups"
    bound = call.bound(f"input weight bias stride padding {last}")
    return int(bound.get("groups", 1)) if call.name in CONVOLUTIONS else 1


def summed_axes(call: Call) -> set[int]:
    """The axes of its first tensor that a sum goes over."""
    bound, ndim = call.bound("input dim"), call.ins[0].ndim
    dims = bound.get("dim", call.kwargs.get("axis"))
    dims = (dims,) if isinstance(dims, int) else dims
    return {dim % max(ndim, 1) for dim in (range(ndim) if dims is None else dims)}


def terms(call: Call) -> float | None:
    """How many entries of its tensors a call adds up into one, read from its result where all of
    these are 1: for a norm the root. 1 for a mean, None for what treats entries one by one."""
    name, first, out = call.bare, call.ins[0], call.outs[0]
    mean = name in MEANS or name.endswith(("_loss", "kl_div", "cross_entropy"))
    if mean or "avg_pool" in name or call.kwargs.get("norm") == "ortho":  # a turn
        return 1.0
    view = out is not first and views(out, first) and not call.in_place
    if view or name in {*SUMS, *TIMES, *JOINS, *ACTS} or not is_number(out):
        return None
    if name in LOGS:
        return float(math.prod(first.shape[axis] for axis in summed_axes(call) if first.ndim))
    # Of two tensors a distance; of one into which others go they alone.
    first_one = 0.0 if name.startswith(("index_", "scatter_")) else -1.0
    level = itertools.chain([first_one], itertools.repeat(1.0))

    def flat(value: Any) -> Any:
        number = isinstance(value, Tensor) and is_number(value)
        return torch.full_like(value, next(level)) if number else value

    try:
        args, kwargs = tree_map(flat, (tuple(call.args), dict(call.kwargs)))
        found = tree_leaves(call.function(*args, **kwargs))
        result = next(t for t in found if isinstance(t, Tensor)).detach().abs()
    except torch.linalg.LinAlgError:  # no inverse: of each matrix apart
        return float(first.shape[-1])
    # Nothing that ones can tell, or no tensor: as if it added all up.
    except _NO_ANSWER:
        return float(first.numel())
    most = float(result.max()) if result.numel() else 0.0
    alike = len(call.ins) == 1 and result.shape == first.shape and bool((result == most).all())
    return most if most > 1.001 and not alike else None


def is_number(tensor: Tensor) -> bool:
    """Whether its entries are numbers, and no indices or truths."""
    return tensor.is_floating_point() or tensor.is_complex()


def level(tensor: Tensor) -> float:
    """The root mean square of the entries."""
    return float(tensor.detach().abs().float().square().mean().sqrt())


def number_in(tensor: Tensor) -> float:
    """What its entries multiply others by: the one number of a mask, or the root mean square."""
    entries = tensor[tensor.abs() > 1e-12].abs()
    return common(entries, 1e-3, 0.999) or (level(tensor) if entries.numel() else 1.0)


def common(entries: Tensor, within: float, share: float) -> float | None:
    """The number that nearly all entries have; None if they have several."""
    middle = float(entries.median()) if entries.numel() else math.nan
    return middle if float(((entries / middle - 1).abs() < within).float().mean()) > share else None


def numbers(call: Call, constants: Sequence[Tensor] = ()) -> list[float]:
    """The numbers among a call's arguments, and of `constants` those whose entries are alike."""
    given = (*call.args, *(call.kwargs.get(key) for key in ("other", "value")))
    entries = [t.detach().flatten() for t in constants if alike(t)]
    first = [float(t[0].abs() if t.is_complex() else t[0]) for t in entries]
    plain = [abs(one) if isinstance(one, complex) else one for one in given]
    return [*(float(one) for one in plain if isinstance(one, Real)), *first]


def alike(tensor: Tensor) -> bool:
    """Whether all its entries are one number."""
    whole = tensor.layout is torch.strided and tensor.numel() > 0
    return whole and bool((tensor == tensor.flatten()[0]).all())


def acts(call: Call) -> bool:
    """Whether a call may hide a number: no view of its first tensor, nor read by its name."""
    first, out = call.ins[0], call.outs[0]
    return call.bare not in NAMED and (out is first or not views(out, first))


def views(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at one place in memory."""
    stored = tensor.layout is other.layout is torch.strided
    return stored and tensor.data_ptr() == other.data_ptr()


def gain(call: Call, tensor: Tensor) -> tuple[float, float] | None:
    """By which number a linear function of one of its tensors multiplies entries, in the root mean
    square, and how large a sum of ones it makes of them, if it makes one. None for a function that
    is not linear. Where constants are a mask, entries that it hides do not count."""
    ones = torch.ones(tensor.numel())
    signs = torch.rand(len(ones), generator=torch.Generator().manual_seed(0)).round() * 2 - 1

    def of(value: Tensor, power: int = 1) -> Tensor:
        def apart(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            new = value.view_as(one).to(one) if one is tensor else one
            new = new.abs().square().to(new) if power == 2 and one is not tensor else new
            short = new.is_floating_point() and new.dtype.itemsize < 4
            return new.float() if short else new.clone()

        args, kwargs = tree_map(apart, (tuple(call.args), dict(call.kwargs)))
        found = tree_leaves((call.function(*args, **kwargs), args[:1]))  # where it writes there
        return next(t.detach() for t in found if isinstance(t, Tensor) and is_number(t))

    try:
        rest = of(ones * 0)
        whole = of(ones) - rest
        if call.name in PRODUCTS:
            first = (of(ones, power=2) - of(ones * 0, power=2)).abs().sqrt()
        else:
            first, twice, turned = (of(signs * by) - rest for by in (1, 2, -1))
            if not (torch.allclose(twice, 2 * first) and torch.allclose(turned, -first)):
                return None
    except (*_NO_ANSWER, AssertionError, ArithmeticError):
        return None
    found = number_in(first)
    sums = not torch.allclose(first.abs(), whole.abs(), rtol=1e-4)
    if sums:  # of fewer at an edge
        reached = (first.abs() + whole.abs()) > 1e-12
        found = max(found, float(whole[reached].abs().median()))
    found = 1.0 if math.isclose(found, 1, rel_tol=0.01) else found
    return (1.0, found) if sums and found > 1 else (found, 1.0)


def looks_up(call: Call) -> bool:
    """Whether an index takes rows of a table, where numbers take a part of a tensor."""
    if call.name != "__getitem__":
        return True
    index = [t for t in tree_leaves(call.args[1]) if isinstance(t, Tensor)]
    whole = [t for t in index if not t.is_floating_point() and t.dtype != torch.bool and t.ndim]
    return len(whole) == len(index) > 0 and call.args[0].ndim - len(index) == 1


def step(call: Call, i: int) -> str:
    """How the i-th result was taken from a parameter: its index, part or function; else nothing."""
    if call.name == "__getitem__":
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        return "[" + ", ".join(map(_said, index)) + "]"
    return f"part {i}" if call.name in SPLITS else call.bare if call.bare in {*ACTS, "neg"} else ""


def _said(index: Any) -> str:
    if isinstance(index, slice):
        return f"{index.start}:{index.stop}".replace("None", "")
    return "chosen" if isinstance(index, Tensor) else "..." if index is ... else str(index)
