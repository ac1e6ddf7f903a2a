"""What torch's functions do with their tensors: sum over axes, look up, add, multiply, move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

CONVOLUTIONS = {f"conv{turned}{d}d" for turned in ("", "_transpose") for d in (1, 2, 3)}
ADDING = {"addmm": 1, "baddbmm": 1}  # products that come after a tensor to add
TWO = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "_grouped_mm", "grouped_mm"}
PRODUCTS = {"linear", "einsum", *CONVOLUTIONS, *ADDING, *TWO}
RECURRENT = {
    f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")
}
NORMS = {"layer_norm": 2, "rms_norm": 2, "group_norm": 2, "batch_norm": 3}  # the weight's place
LOOKUPS = {"embedding", "index_select", "embedding_bag", "__getitem__"}
SPLITS = {"chunk", "split", "tensor_split", "split_with_sizes", "unbind"}
TIMES = dict.fromkeys(("mul", "imul", "rmul", "multiply"), 1)
TIMES |= dict.fromkeys(("div", "divide", "truediv", "itruediv", "true_divide"), -1)
POWERS = {"rsqrt": -0.5, "sqrt": 0.5, "square": 2, "var": 2, "reciprocal": -1}
SUMS = {"add", "iadd", "radd", "sub", "isub", "rsub", "subtract"}
JOINS = {"cat", "concat", "stack", "where", "setitem", "scatter", "masked_fill", "copy"}
CHOICES = {"topk", "sort", "argsort", "argmax"}
# Functions of a parameter alone that its path names; views and casts it does not.
SHOWN = SUMS | {"exp", "neg", "sigmoid", "softplus", "tanh", "softmax", "normalize"}
ACTS = SHOWN - {"neg"}  # after which a constant acts as another number


class Call(NamedTuple):
    """One call of a torch function; `ins` and `outs` are the tensors in it."""

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
    def takes_input(self) -> bool:
        """Whether the first tensor is an activation by its place, whatever made it."""
        return self.name == "linear" or self.name in CONVOLUTIONS

    @property
    def is_product(self) -> bool:
        """Whether it is a product whose axes `operands` knows."""
        return self.name in PRODUCTS and (self.name != "einsum" or isinstance(self.args[0], str))


def seen(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Call:
    """A call with its tensors found."""
    ins = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)]
    outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    return Call(name, args, kwargs, ins, outs or (ins[:1] if name == "__setitem__" else []))


class Operand(NamedTuple):
    """A tensor in a product: the axes summed over, those that it alone makes, and where the first
    of these is in the result."""

    tensor: Tensor
    summed: tuple[int, ...]
    made: tuple[int, ...]
    axis: int


def bound(names: str, call: Call) -> dict[str, Any]:
    """Arguments by name, however they were passed."""
    return {**dict(zip(names.split(), call.args, strict=False)), **call.kwargs}


def operands(call: Call) -> list[Operand]:
    """What a product multiplies; of a convolution the kernel's axes are summed over, too."""
    given = bound("input weight", call)
    if call.name == "linear":
        return [Operand(given["input"], (-1,), (-2,), -2), Operand(given["weight"], (1,), (0,), -1)]
    if call.name in CONVOLUTIONS:
        weight, channels = given["weight"], 1 - given["weight"].ndim
        turned = "transpose" in call.name
        axes = ((0,), (1,)) if turned else (tuple(range(1, weight.ndim)), (0,))
        return [Operand(given["input"], (channels,), (), 0), Operand(weight, *axes, channels)]
    if call.name == "einsum":
        return _of_einsum(call.args[0], call.ins)
    first, second = call.ins[ADDING.get(call.name, 0) :][:2]
    if call.name == "__rmatmul__":
        first, second = second, first
    rows = (-2,) if first.ndim > 1 else ()
    summed, columns = ((-2,), (-1,)) if second.ndim > 1 else ((-1,), ())
    row = -2 if second.ndim > 1 else -1
    return [Operand(first, (-1,), rows, row), Operand(second, summed, columns, -1)]


def bias_of(call: Call) -> Tensor | None:
    """What is added to a product in the same call."""
    bias = None
    if call.name in ADDING:
        bias = bound("input", call)["input"]
    elif call.takes_input:
        bias = bound("input weight bias", call).get("bias")
    return bias if isinstance(bias, Tensor) else None


def groups_of(call: Call) -> int:
    """Into how many parts a convolution splits its channels; 1 for all else."""
    places = "input weight bias stride padding dilation groups"
    if "transpose" in call.name:
        places = places.replace("dilation", "output_padding")
    return int(bound(places, call).get("groups", 1)) if call.name in CONVOLUTIONS else 1


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
    if call.name == "unbind":
        return f"[{i}]"
    return f"part {i}" if call.name in SPLITS else call.bare if call.bare in SHOWN else ""


def _of_einsum(equation: str, tensors: Sequence[Tensor]) -> list[Operand]:
    left, _, right = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = left.split(",")
    if "->" not in equation:
        right = "".join(sorted(c for c in {*left} - {",", "."} if left.count(c) == 1))

    def place(term: str, letter: str) -> int:
        at = term.index(letter)
        return at - len(term) if "." in term[:at] else at

    found = []
    for i, (tensor, term) in enumerate(zip(tensors, terms, strict=True)):
        others = "".join(terms[:i] + terms[i + 1 :])
        letters = [c for c in term if c != "."]
        made = [c for c in letters if c in right and c not in others]
        summed = tuple(place(term, c) for c in letters if c not in right)
        axis = place(right, min(made, key=right.index)) if made else -1
        found.append(Operand(tensor, summed, tuple(place(term, c) for c in made), axis))
    return found


def _said(index: Any) -> str:
    if isinstance(index, slice):
        return f"{index.start}:{index.stop}".replace("None", "")
    return "chosen" if isinstance(index, Tensor) else "..." if index is ... else str(index)
