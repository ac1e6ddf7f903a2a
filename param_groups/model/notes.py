"""What a trace notes of one pass: what activations carry, where parameters go, attentions."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from param_groups.model import calls

NOTHING: frozenset[str] = frozenset()
Axes = tuple[Sequence[int], Sequence[int]]  # summed over, and made
# Of a parameter's outputs the ranges that make a query, key or value; None where that is not known.
Ranges = tuple[tuple[int, int], ...] | None
Terms = frozenset[tuple[str, float, float]]
Result = tuple[Tensor, int, int, float]
UNREAD = 0.0  # a number that was not read
Number = tuple[float, tuple[float, ...]]  # on an activation, and how many terms are added up in it


@dataclass(frozen=True)
class Flow:
    """What an activation carries through a forward pass.

    Args:
        made: the parameters of its last products, each with the index of the product's result.
        past: all parameters that it went through, as bits. A residual sum has its stream's.
        above: all activations that it was made from, as bits, with its own, `serial`, which it has
            in common with what a number makes of it.
        factor: the product of the numbers that have multiplied it since `made`; None if unknown.
        gain: the product of the gains since then, as they start; None if its parts have several.
        scores, weights: the attentions of whose query-key products, or softmaxes, it is made.
        vectors: the parameters that have acted on its entries one by one since `made`.
        terms: (parameter, entries that a call adds up into one, entries added one by one).
        numbers: (parameter, number on it alone) in a sum of which each term has another.
        marks: attended, normed, chosen, input, one_hot, counted, stacked, stream, softmax, summed,
            turned (by a tensor of numbers), numbers (constants that an index chose), weighs (a
            softmax of one product).
    """

    made: frozenset[tuple[str, int]] = frozenset()
    past: int = 0
    above: int = 0
    serial: int = 0
    factor: float | None = 1.0
    gain: float | None = 1.0
    scores: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    vectors: frozenset[str] = NOTHING
    terms: Terms = frozenset()
    numbers: frozenset[tuple[str, float]] = frozenset()
    marks: frozenset[str] = NOTHING

    @property
    def every(self) -> Terms:
        """Its terms, and one of each parameter that is not added up."""
        first = (self.names | self.vectors) - {name for name, *_ in self.terms}
        return self.terms | {(name, 1.0, 1.0) for name in first}

    def summed(self, terms: float) -> Flow:
        """What a sum over some of its entries carries."""
        more = frozenset((name, n * terms, times) for name, n, times in self.every)
        return replace(self, terms=more, marks=self.marks | {"summed"})

    def on(self, name: str) -> set[float]:
        """The numbers on one of its parameters alone."""
        return {by for one, by in self.numbers if one == name} or {1.0}

    @property
    def number(self) -> float | None:
        """Its factor; of one that divides a sum what is left, 1 for a mean by hand."""
        if not self.factor:
            return None
        left = abs(self.factor) * max((n for _, n, _ in self.terms), default=1.0)
        near = abs(math.log(left)) < abs(math.log(abs(self.factor)))  # to 1, than the factor is
        return 1.0 if math.isclose(left, 1, rel_tol=1e-4) else left if near else self.factor

    @property
    def names(self) -> set[str]:
        """The parameters whose products it is."""
        return {name for name, _ in self.made}


@dataclass
class Attention:
    """One attention of a forward pass.

    `factor` is that on query-key products, in `raw`, the scores after the last step that did more
    than multiply them. `soft`: they entered a softmax. `parts`: who makes queries, keys and values;
    `added`: which parameters are added to scores.
    """

    head_dim: int
    factor: float | None
    raw: Tensor | None = None
    soft: bool = False
    parts: dict[str, dict[str, Ranges]] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)


def times(a: float | None, b: float | None, power: float = 1) -> float | None:
    """The product of two factors; None where one is not known."""
    return None if a is None or not b else float(a * b**power)


def joined(flows: Sequence[Flow]) -> Flow:
    """What several activations carry together."""
    if len(flows) == 1:
        return flows[0]
    apart = [flow for flow in flows if flow.made or flow.scores] or [Flow()]
    together: dict[str, Any] = {
        key: functools.reduce(operator.or_, (getattr(flow, key) for flow in (Flow(), *flows)))
        for key in "made past above scores weights vectors terms numbers marks".split()
    }
    for key in ("factor", "gain"):
        values = {getattr(flow, key) for flow in apart}
        together[key] = values.pop() if len(values) == 1 else None
    return Flow(**together)


def added(flows: Sequence[Flow]) -> Terms:
    """The terms in a sum of activations: of a parameter in several as many as in all. What was
    added up in two ways stays two."""
    in_order = [sorted(flow.every, key=lambda one: one[2]) for flow in flows]
    most = [{name: k for name, _, k in one} for one in in_order]
    found = {
        (name, n, k + sum(one.get(name, 0.0) for one in most[:i] + most[i + 1 :]))
        for i, terms in enumerate(in_order)
        for name, n, k in terms
    }
    return frozenset(one for one in found if one[1:] != (1, 1))


def folded(flow: Flow) -> Flow:
    """An activation whose factor counts as terms."""
    terms = frozenset((name, n, k * abs(flow.factor or 1.0)) for name, n, k in flow.terms)
    return replace(flow, factor=1.0, terms=terms)


@dataclass(frozen=True)
class Use:
    """One call that takes a parameter, maybe through views.

    Args:
        op: the function, or what it does ("bias", "norm_scale", "scale", "added", "joined").
        path: functions and indices between the parameter and the call.
        axes: of the view, those longer than 1.
        summed, made: the parameter's axes that are summed over, and that the result has; None for
            one that the view split or merged.
        fans: inputs that are summed, and outputs; of rows of a fused matrix all of them.
        marks: of the activations beside it; "of NAME" is the matrix whose bias it is; unsized after
            a norm of itself, unread where entries have several numbers.
        factor: numbers that the parameter was multiplied by, and terms that were added up.
        acts_as: the number as which a constant tensor acts after functions of it.
        at: the index of the result, of a product or a lookup.
    """

    op: str
    path: str
    axes: int
    summed: tuple[int | None, ...]
    made: tuple[int | None, ...]
    fans: tuple[int, int]
    marks: frozenset[str]
    factor: float
    acts_as: float | None
    at: int


class Notes:
    """The notes of one pass; `starts` are the fresh values of the parameters, `other` parameters of
    the model at another width."""

    def __init__(self, model: nn.Module, starts: calls.Tensors, other: calls.Tensors) -> None:
        self.parameters, self.starts, self.other = dict(model.named_parameters()), starts, other
        same = {n: bool((t == t.flatten()[0]).all()) for n, t in starts.items() if t.numel()}
        self.constant = {name for name, constant in same.items() if constant}
        owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.tied = {name for name, p in self.parameters.items() if owners[id(p)] > 1}
        self.bits = {name: 1 << i for i, name in enumerate(self.parameters)}
        # Parameters and what is made of them alone: by id, names, the path to it and its factor.
        self.views = {id(p): (frozenset({n}), "", 1.0) for n, p in self.parameters.items()}
        self.flows: dict[int, Flow] = {}
        self.alive: list[Tensor] = []  # so that no id is given twice
        # Results of products, with the axis that a parameter made, the first of its outputs, and
        # the number on it.
        self.results: list[Result] = []
        self.uses: dict[str, list[Use]] = defaultdict(list)
        self.fed: dict[str, int] = defaultdict(int)  # what each parameter met, as bits
        self.joined = 0  # activations after a residual sum, as bits
        # Activations times a parameter, which must not lose their id, and its view.
        self.scaled: dict[int, tuple[Tensor, Tensor]] = {}
        self.attentions: list[Attention] = []
        # Of a place and a parameter numbers, one after the other.
        self.factors: dict[tuple[str, str], list[Number]] = defaultdict(list)
        self.splits: dict[str, tuple[int, ...]] = {}
        # Parameters that reach the output, and whose results are sorted; rows of tables.
        self.output, self.chosen = set[str](), set[str]()
        self.rows: set[tuple[str, int]] = set()
        # Of residual branches what is in them, what reaches them from elsewhere (an encoder's) and
        # their last products.
        self.branches: list[tuple[set[str], set[str], frozenset[tuple[str, int]]]] = []
        self.doubts: list[str] = []

    def names(self, *tensors: Tensor | None) -> frozenset[str]:
        """The parameters that tensors are views of; none for all else."""
        return NOTHING.union(*(self.views.get(id(t), (NOTHING,))[0] for t in tensors))

    def flow(self, tensor: Tensor | None) -> Flow:
        """What an activation carries; nothing for all else."""
        return self.flows.get(id(tensor), Flow())

    def put(self, tensor: Tensor, flow: Flow, past: int = 0, above: int = 0, same: int = 0) -> None:
        """Notes what a new activation carries, and what it was made from or is `same` as."""
        self.alive.append(tensor)
        new = 1 << len(self.alive)
        self.joined |= new if "stream" in flow.marks else 0
        self.flows[id(tensor)] = replace(flow, past=past, above=above | new, serial=new | same)

    def put_through(self, written: Tensor, flow: Flow, before: float | None) -> None:
        """Notes what a number does, in place, to others over the same memory, whose factor was
        `before`, too; what it does to a part of them is not read."""
        memory = _memory(written)
        for t in self.alive if flow.factor != before else ():
            if t is not written and id(t) in self.flows and _memory(t) == memory:
                whole = t.numel() == written.numel() and self.flow(t).factor == before
                factor = flow.factor if whole else None
                self.flows[id(t)] = replace(self.flow(t), factor=factor)

    def closed(self, names: Collection[str]) -> bool:
        """Whether all of some parameters start at zero."""
        return all(name in self.constant and not self.starts[name].any() for name in names)

    def spend(self, *flows: Flow) -> None:
        """Notes the sums in what a product takes, or what is the output."""
        for flow in flows:
            for name, n, times in sorted(flow.terms):
                self.factors["sum", name].append((n * times * abs(flow.factor or 1.0), ()))

    def note_factor(self, place: str, flow: Flow, names: Collection[str] = ()) -> None:
        """Notes numbers that an activation was multiplied by, of the parameters that made it, and
        how many terms were added up in it."""
        counts = tuple(sorted({n * k for _, n, k in flow.terms}))
        for name in names or flow.names:
            for by in sorted(flow.on(name)):
                factor = times(by, flow.number) or UNREAD
                if factor != 1.0:
                    self.factors[place, name].append((factor, counts))

    def use(
        self,
        tensor: Tensor,
        op: str,
        axes: Axes = ((), ()),
        result: Tensor | None = None,
        axis: int = -1,
        marks: Iterable[str] = (),
    ) -> Flow:
        """Notes a use of all parameters in a view; what its result carries."""
        (names, path, factor), at, first = self.views[id(tensor)], len(self.results), 0
        numbers = set[float | None]()
        for name in names:
            whole, long = self.parameters[name], sum(size > 1 for size in tensor.shape)
            own = self._axes(tensor, name)
            summed, made = (tuple(own[i] for i in group) for group in axes)
            sizes = [
                tensor.shape[i] if o is None or whole.ndim != tensor.ndim else whole.shape[o]
                for i, o in zip(axes[1], made, strict=True)
            ]
            fans = math.prod(tensor.shape[i] for i in axes[0]), math.prod(sizes)
            found = _number(tensor, whole, factor, fans[0]) if result is not None else None
            number, mark, reached = found or (factor, "", None)
            if reached is not None and made and made[0] is not None:  # rows of a fused matrix
                rows = reached.movedim(made[0], 0).reshape(whole.shape[made[0]], -1)
                first = int(rows.any(1).int().argmax())
            numbers.add(None if mark == "unread" else number)
            self.factors["weight", name] += [(number, ())] if number != 1.0 else []
            acts = float(tensor.detach().mean()) if name in self.constant else None
            rest = fans, frozenset(marks) | {mark}, number
            self.uses[name].append(Use(op, path, long, summed, made, *rest, acts, at))
        if result is None:
            return Flow()
        on_all = numbers.pop() if len(numbers) == 1 else None
        self.results.append((result, axis, first, on_all or 1.0))
        return Flow(frozenset((name, at) for name in names), factor=on_all)

    def _axes(self, tensor: Tensor, name: str) -> list[int | None]:
        """Of which of its parameter's axes a view's are; None for one that it split or merged."""
        steps, own = (
            [step if size > 1 else 0 for step, size in zip(t.stride(), t.shape, strict=True)]
            for t in (self.parameters[name], tensor)
        )
        return [steps.index(step) if step and step in steps else None for step in own]

    def grows(self, tensor: Tensor, axis: int) -> bool:
        """Whether an axis of a view has another size at the other width."""
        for name in self.names(tensor):
            here = self.parameters[name].shape
            there = self.other.get(name, self.parameters[name]).shape
            own = self._axes(tensor, name)[axis]
            if not tensor.stride(axis):  # expanded
                return False
            own = None if own is not None and tensor.shape[axis] > here[own] else own  # merged
            if here != there and (own is None or here[own : own + 1] != there[own : own + 1]):
                return True
        return False

    def derive(self, call: calls.Call) -> None:
        """What is made of parameters alone is the parameter still; a smaller one in it, as a weight
        norm's g, only scales it; of a product no one of them is the parameter."""
        views = [t for t in call.ins if id(t) in self.views]
        largest = max(t.numel() for t in views)
        same = [t for t in views if t.numel() == largest]
        for t in views:
            if t.numel() < largest and not self.names(t) <= self.names(*same):  # no norm of itself
                self.use(t, "scale")
        several = len({self.names(t) for t in same}) > 1 and sum(n > 1 for n in same[0].shape) > 1
        masked = several and call.bare in calls.TIMES
        for t in same if masked else ():
            self.use(t, "a product of parameters")
        names = NOTHING if masked or call.name in calls.PRODUCTS else self.names(*same)
        _, path, factor = self.views[id(same[0])]
        factor *= calls.terms(call) or 1.0
        if power := calls.TIMES.get(call.bare):
            by = calls.numbers(call, [t for t in call.ins if id(t) not in self.views])
            factor = times(factor, math.prod(by), power) or factor
        for i, t in enumerate(call.outs):
            self.alive.append(t)
            self.views[id(t)] = names, f"{path} {calls.step(call, i)}".strip(), factor

    def join_stream(self, stream: Flow, other: Flow) -> bool:
        """Notes a residual branch, if `other` was made from the stream that it is added to.

        The branch holds what met something that was made from the stream; what else is in `other`
        comes from beside it, as what a decoder's keys read of an encoder.
        """
        new = other.past & ~stream.past
        if not stream.serial & other.above or not new:
            return False
        inside = {name for name, bit in self.bits.items() if new & bit}
        below = {name for name in inside if self.fed[name] & stream.serial}
        self.branches.append((below, inside - below, other.made - stream.made))
        self.note_factor("embedding" if stream.made <= self.rows else "stream", stream)
        self.note_factor("branch", other)
        self.spend(other)  # a norm after it takes no sum away, which stands beside the stream
        return True


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -1


def _number(
    tensor: Tensor, whole: Tensor, followed: float, size: int
) -> tuple[float, str, Tensor | None]:
    """The number on a parameter in a product that sums over `size` entries, as gradients say it, a
    mark, and which entries count. `followed` is what calls say. After a norm it is the number on a
    fresh matrix's size^(-1/2); where entries have several, or a mask hides some, how much larger
    they are."""
    now, then = tensor.detach(), whole.detach()
    part = _memory(now) == _memory(then)
    slopes, zero = list[Tensor](), now == 0
    with contextlib.suppress(RuntimeError):  # where there are no gradients
        # Uneven, so that several numbers on copies of an entry show.
        probe = (torch.arange(now.numel()) * 0.618 % 1 + 0.1).view_as(now).to(now.dtype)
        for by in (probe, probe * now, probe * zero):
            slopes += torch.autograd.grad(tensor, whole, by, retain_graph=True)
    if part or not slopes or now.is_complex():
        return followed, "" if part else "unread", next(iter(slopes), None)
    first, slope, starts = slopes
    number = calls.common((slope / first / then)[(first != 0) & (then != 0)], 0.1, 0.999)
    if number is not None and zero.sum() <= starts.count_nonzero():  # no more than start at zero
        mark = ""
    elif abs(float((slope * then).sum())) < 0.01 * float(now.square().sum()):
        number, mark = calls.level(now) * size**0.5, "unsized"
    else:
        number, mark = calls.level(now) / calls.level(then), "unread"
    near = (one for one in (followed, 1.0) if math.isclose(number, one, rel_tol=0.02))
    return next(near, float(f"{number:.6g}")), mark, first


def ranges(place: Tensor, flow: Flow, results: Sequence[Result]) -> dict[str, Ranges]:
    """Which outputs of the products behind a query, key or value reach it: those to which it has a
    gradient, whatever views, rotations and norms lie between. None where none can be taken."""
    found: dict[str, Ranges] = {}
    # Between the residual stream and the place there is no product.
    for name, at in () if "stream" in flow.marks else sorted(flow.made):
        (result, axis, shift, _), noise = results[at], torch.randn_like(place)
        try:
            (slope,) = torch.autograd.grad(
                place, result, noise, retain_graph=True, allow_unused=True
            )
        except RuntimeError:
            found[name] = None
            continue
        if slope is not None:
            outputs = slope.abs().reshape(slope.shape or (1,)).movedim(axis, 0)
            reached = (outputs.reshape(len(outputs), -1).sum(1) > 0).int()
            ends = torch.diff(reached, prepend=reached[:1] * 0, append=reached[:1] * 0)
            if edges := (ends.nonzero().flatten() + shift).tolist():
                pairs = zip(edges[::2], edges[1::2], strict=True)
                found[name] = (*(found.get(name) or ()), *pairs)
    return found
