"""One forward pass, recorded: into which function every parameter goes, and what follows from it.

Why a `TorchFunctionMode`: it sees the calls that an author wrote (linear, einsum, scaled_dot_
product_attention with its scale) with the parameter itself as an argument. Below autograd there are
a transpose and an addmm, and the attention kernel of this machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from param_groups.model import calls
from param_groups.model.attention import Attention, Flow, joined, measured, ranges, times

_OWN_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_SDPA = "query key value attn_mask dropout_p is_causal scale"
_MULTI_HEAD = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v "
    "add_zero_attn dropout_p out_proj_weight out_proj_bias"
)


@dataclass(frozen=True)
class Use:
    """One call that takes a parameter, maybe through views.

    Args:
        op: the function, or what it does ("bias", "norm_scale", "scale", "added", "joined").
        path: functions and indices between the parameter and the call.
        shape: of the view; `summed` and `made` are its axes, as in `calls.Operand`.
        own: of each axis of the view the parameter's, None where several were merged.
        marks: of the activations beside it; "of NAME" is the matrix whose bias it is.
        acts_as: the number as which a constant tensor acts after functions of it.
        at: the index of the result, of a product or a lookup.
    """

    op: str
    path: str
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    made: tuple[int, ...]
    own: tuple[int | None, ...]
    marks: frozenset[str]
    acts_as: float | None
    at: int


class Recorder(TorchFunctionMode):
    """Notes on every parameter of a model, while its forward pass runs under it."""

    def __init__(self, model: nn.Module, constant: Set[str]) -> None:
        super().__init__()
        self.parameters, self.constant = dict(model.named_parameters()), constant
        self.bits = {name: 1 << i for i, name in enumerate(self.parameters)}
        # Parameters and what is made of them alone: by id, their names and the path to it.
        self.views = {id(p): (frozenset({n}), "") for n, p in self.parameters.items()}
        self.flows: dict[int, Flow] = {}
        self.alive: list[Tensor] = []  # so that no id is given twice
        self.results: list[tuple[Tensor, int]] = []
        self.uses: dict[str, list[Use]] = defaultdict(list)
        self.fed: dict[str, int] = defaultdict(int)  # what each parameter multiplied, as bits
        self.attentions: list[Attention] = []
        self.on_scores: dict[int, set[str]] = defaultdict(set)
        self.factors: dict[tuple[str, str], float] = {}
        self.splits: dict[str, tuple[int, ...]] = {}
        self.output: set[str] = set()
        self.chosen: set[str] = set()
        self.tables: set[str] = set()
        self.branch: set[str] = set()  # inside a residual branch
        self.beside: set[str] = set()  # reaches a branch from elsewhere, as an encoder does
        self.closing: set[tuple[str, int]] = set()  # the last products of branches
        self.branches: list[tuple[set[str], set[str]]] = []  # what is in them, what ends them
        self.doubts: list[str] = []
        self.called = False
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.called = True
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self._put(t, Flow(marks=frozenset({"input"})))

    def _end(self, _: nn.Module, args: Any, out: Any) -> None:
        leaves = tree_leaves(out if isinstance(out, (Tensor, tuple, list, dict)) else vars(out))
        for flow in (self.flows[id(t)] for t in leaves if id(t) in self.flows):
            self.output |= flow.names
            if not flow.names <= self.tables and len(flow.names) == 1:
                self._note("logits", flow)

    def _put(self, tensor: Tensor, flow: Flow) -> None:
        self.alive.append(tensor)
        serial = 1 << len(self.alive)
        self.flows[id(tensor)] = replace(flow, above=flow.above | serial, serial=serial)

    def _note(self, place: str, flow: Flow, names: Iterable[str] = ()) -> None:
        if flow.factor not in (1.0, None):
            self.factors.update({(place, name): flow.factor for name in names or flow.names})

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", str(function))
        if name == "__get__":  # W.T
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        out = function(*args, **kwargs)
        ins = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        written = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
        outs = outs or (ins[:1] if name == "__setitem__" else [])
        known = [id(t) in self.views or id(t) in self.flows for t in ins]
        for t, seen in [*zip(ins, known, strict=True)][int(written) :] if outs else ():
            if t.requires_grad and not seen:
                self.doubts.append(f"{name} takes the result of a function that was not seen")
        if outs and any(known):
            if isinstance(function, _OWN_OPS) and not str(function).startswith("aten"):
                self.doubts.append(f"what {function} does is not known")
            self._see(name, args, kwargs, ins, outs)
        return out

    def _see(
        self, name: str, args: Any, kwargs: Any, ins: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        bare, views = name.strip("_"), [t for t in ins if id(t) in self.views]
        flows = [self.flows[id(t)] for t in ins if id(t) in self.flows]
        came = joined(flows)
        if name == "scaled_dot_product_attention":
            flow = self._attention(calls.bound(_SDPA, args, kwargs))
        elif name == "multi_head_attention_forward":
            flow = self._multi_head(calls.bound(_MULTI_HEAD, args, kwargs), outs[0])
        elif bare in calls.RECURRENT and views:
            flow = self._recurrent(views, came, outs[0])
        elif views and name in calls.LOOKUPS and self._is_lookup(name, args, came):
            marks = came.marks & {"input", "counted"}
            flow = self._use(views[0], "embedding", result=outs[0], marks=marks)
            self.tables |= flow.names
        elif name in calls.PRODUCTS and not (name == "einsum" and not isinstance(args[0], str)):
            found = self._product(name, args, kwargs, outs[0])
            if found is None:
                self._derive(name, args, views, outs)
                return
            flow = found
        elif views and (not flows or name in calls.LOOKUPS):
            self._derive(name, args, views, outs)
            return
        elif bare in calls.NORMS:
            flow = self._norm(bare, args, kwargs, came)
        elif bare in {*calls.SUMS, "addcmul"} and len(flows) == 2 and not came.scores:
            for t in views:  # the gain of a branch
                self._use(t, "scale", marks=came.marks)
            flow = self._sum(flows, came)
        else:
            flow = self._pointwise(name, bare, args, kwargs, views, flows, came, ins, outs[0])
        past = flow.past if "stream" in flow.marks else came.past
        for t in views:
            for n in self.views.get(id(t), (frozenset(),))[0]:
                past |= self.bits[n]
                self.fed[n] |= came.above
        for t in outs:
            self._put(t, replace(flow, past=past, above=came.above | flow.above))
        if name in calls.SPLITS and len(flow.made) == 1:
            ((made, at),) = flow.made
            sizes = tuple(t.shape[-1] for t in outs)
            if self.results[at][0].shape[-1] == sum(sizes):
                self.splits.setdefault(made, sizes)

    def _is_lookup(self, name: str, args: Any, came: Flow) -> bool:
        """An index that came out of a choice selects experts; any other looks rows up."""
        return "chosen" not in came.marks and calls.looks_up(name, args)

    def _derive(
        self, name: str, args: Any, views: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """What is made of parameters alone is the parameter still; a smaller one in it, as a weight
        norm's g, only scales it."""
        largest = max(t.numel() for t in views)
        for t in views:
            if t.numel() < largest:
                self._use(t, "scale")
        same = [self.views[id(t)] for t in views if t.numel() == largest]
        names = frozenset[str]().union(*(names for names, _ in same))
        if name in calls.PRODUCTS:  # of parameters: no one of them is the product
            names = frozenset()
        for i, t in enumerate(outs):
            self.alive.append(t)
            self.views[id(t)] = names, f"{same[0][1]} {calls.step(name, args, i)}".strip()

    def _use(
        self,
        tensor: Tensor,
        op: str,
        summed: Sequence[int] = (),
        made: Sequence[int] = (),
        result: Tensor | None = None,
        axis: int = -1,
        marks: Iterable[str] = (),
    ) -> Flow:
        """Notes a use of all parameters in a view; what its result carries."""
        names, path = self.views[id(tensor)]
        at = len(self.results)
        for name in names:
            whole = self.parameters[name]
            strides = [
                s if n > 1 else None for s, n in zip(whole.stride(), whole.shape, strict=True)
            ]
            own = tuple(
                strides.index(s) if n > 1 and s in strides else None
                for s, n in zip(tensor.stride(), tensor.shape, strict=True)
            )
            acts_as = float(tensor.detach().mean()) if name in self.constant else None
            axes = [tuple(i % tensor.ndim for i in group) for group in (summed, made)]
            use = Use(op, path, tuple(tensor.shape), *axes, own, frozenset(marks), acts_as, at)
            self.uses[name].append(use)
        if result is None:
            return Flow()
        self.results.append((result, axis))
        return Flow(frozenset((name, at) for name in names))

    # Products

    def _product(self, name: str, args: Any, kwargs: Any, out: Tensor) -> Flow | None:
        """Activations times parameters; two activations; parameters alone, which is None."""
        found = calls.operands(name, args, kwargs)
        first, bias = found[0].tensor, self._bias(name, args, kwargs)
        if (name == "linear" or name in calls.CONVOLUTIONS) and id(first) in self.views:
            self._put(first, self._use(first, "joined", result=first))  # learned queries
            del self.views[id(first)]
        if all(id(t) in self.views for t, *_ in found):
            for t, *_ in found:
                self._use(t, "a product of parameters")
            return None
        flows = [self.flows[id(t)] for t, *_ in found if id(t) in self.flows]
        came, groups = joined(flows), calls.groups_of(name, args, kwargs)
        marks = came.marks - {"input"} if came.made else came.marks
        if groups > 1:
            marks |= {"grouped"}
        made, ours = (
            frozenset[tuple[str, int]](),
            [one for one in found if id(one.tensor) in self.views],
        )
        for t, summed, makes, axis in ours:
            op = "matmul" if name in calls.TWO or name in calls.ADDING else name
            used = self._use(t, op, summed, makes, out, axis, marks)
            made |= used.made
            tables = came.names <= self.tables
            self._note(
                "embedding" if tables else "input", came, came.names if tables else used.names
            )
            if "stacked" in marks or len(summed) + len(makes) < t.ndim:
                marks |= {"stacked"}
        if bias is not None and id(bias) in self.views:
            self._use(bias, "bias", marks={"of " + n for n, _ in made})
        elif bias is not None and id(bias) in self.flows and not made:
            self.on_scores[len(self.attentions)] |= self.flows[id(bias)].names
        if made:
            raws = [self.attentions[i].raw for i in came.scores | came.weights]
            mixed = any(raw is not None and raw.shape[-2:] == out.shape[-2:] for raw in raws)
            kept = came if mixed else Flow()  # a mix of heads leaves scores what they are
            if mixed and came.scores:
                before = next(t for t, *_ in found if id(t) in self.flows)
                kept = replace(came, factor=self._rebased(came, before, out))
            deep = made | came.made if groups > 1 else made  # so do channels that stay apart
            stacked = marks & {"stacked"}
            return replace(
                Flow(deep, 0, 0, 0, kept.factor, kept.scores, kept.weights), marks=stacked
            )
        if len(flows) != 2:
            return came
        (a, b), (one, two) = flows, (found[0], found[1].tensor)
        if came.weights:
            for i in came.weights:
                self._parts(i, value=(b, two) if a.weights else (a, one.tensor))
            return Flow(marks=frozenset({"attended"}))
        if "softmax" in came.marks:
            self.doubts.append(f"{name} takes a softmax of scores whose product was not seen")
        size = one.tensor.shape[one.summed[0]] if one.summed else 0
        factor = times(times(a.factor, b.factor), kwargs.get("alpha", 1.0))
        self.attentions.append(Attention(size, factor, out.detach().clone()))
        at = len(self.attentions) - 1
        self._parts(at, query=(a, one.tensor), key=(b, two))
        return Flow(came.made, factor=factor, scores=frozenset({at}))

    def _bias(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        names = "bias" if name in calls.ADDING else "input weight bias"
        bias = calls.bound(names, args, kwargs).get("bias", kwargs.get("input"))
        known = name in calls.ADDING or name == "linear" or name in calls.CONVOLUTIONS
        return bias if known and isinstance(bias, Tensor) else None

    def _recurrent(self, views: Sequence[Tensor], came: Flow, out: Tensor) -> Flow:
        flow = Flow()
        for t in views:
            matrix = t.ndim > 1
            axes = ((1,), (0,)) if matrix else ((), ())
            used = self._use(t, "recurrent" if matrix else "bias", *axes, out, marks=came.marks)
            flow = used if matrix else flow
        return flow

    # Attention

    def _parts(self, at: int, **places: tuple[Flow, Tensor]) -> None:
        for place, (flow, tensor) in places.items():
            parts = self.attentions[at].parts.setdefault(place, {})
            parts.update(ranges(tensor, flow, self.results))

    def _attention(self, given: dict[str, Any]) -> Flow:
        tensors = {place: given[place] for place in ("query", "key", "value")}
        flows = {place: self.flows.get(id(t), Flow()) for place, t in tensors.items()}
        size, scale = tensors["query"].shape[-1], given.get("scale")
        factor = size**-0.5 if scale is None else float(scale)
        factor_in = times(flows["query"].factor, flows["key"].factor)
        self.attentions.append(Attention(size, times(factor_in, factor), soft=True))
        at = len(self.attentions) - 1
        self._parts(at, **{place: (flows[place], t) for place, t in tensors.items()})
        mask = given.get("attn_mask")
        if id(mask) in self.views:
            self._use(mask, "added")
            self.on_scores[at] |= self.views[id(mask)][0]
        self.on_scores[at] |= self.flows.get(id(mask), Flow()).names
        return Flow(marks=frozenset({"attended"}))

    def _multi_head(self, given: dict[str, Any], out: Tensor) -> Flow:
        """nn.MultiheadAttention is one call, whose arguments are read by name."""
        width, heads = given["embed_dim_to_check"], given["num_heads"]
        size, at, linear = width // heads, len(self.attentions), ((1,), (0,))
        self.attentions.append(Attention(size, size**-0.5, soft=True))
        fused, last = given.get("in_proj_weight"), given["out_proj_weight"]
        parts = self.attentions[at].parts
        apart = {place: given.get(f"{place[0]}_proj_weight") for place in ("query", "key", "value")}
        for i, (place, one) in enumerate(apart.items()):
            came, weight = self.flows.get(id(given[place]), Flow()), fused if one is None else one
            if id(weight) in self.views:
                end = (i * width, (i + 1) * width) if one is None else (0, len(weight))
                parts[place] = dict.fromkeys(self.views[id(weight)][0], (end,))
                if one is not None or i == 0:
                    self._use(weight, "linear", *linear, marks=came.marks)
                for name in self.views[id(weight)][0]:
                    self.fed[name] |= came.above
        for key, owner in (("in_proj_bias", fused), ("out_proj_bias", last)):
            if id(given.get(key)) in self.views:
                names = self.views.get(id(owner), (frozenset(),))[0]
                self._use(given[key], "bias", marks={"of " + n for n in names})
        for key in ("bias_k", "bias_v"):
            if id(given.get(key)) in self.views:
                self._use(given[key], "added")
        return self._use(last, "linear", *linear, out, marks={"attended"})

    # All else

    def _norm(self, bare: str, args: Any, kwargs: Any, came: Flow) -> Flow:
        given = [*args[calls.NORMS[bare] :][:2], kwargs.get("weight"), kwargs.get("bias")]
        given = [t for t in given if isinstance(t, Tensor)]
        for t, what in zip(given, ("norm_scale", "norm_bias"), strict=False):
            if id(t) in self.views:
                self._use(t, what)
        if came.names <= self.tables:
            self._note("embedding", came)
        return replace(came, factor=1.0, marks=came.marks | {"normed"})

    def _sum(self, flows: Sequence[Flow], came: Flow) -> Flow:
        """A branch that joins the stream it came from, or two activations."""
        for stream, other in (flows, flows[::-1]):
            new = other.past & ~stream.past
            if not stream.serial & other.above or not new:
                continue
            inside = {name for name, bit in self.bits.items() if new & bit}
            below = {name for name in inside if self.fed[name] & stream.serial}
            self.branch |= below
            self.beside |= inside - below
            ends = other.made - stream.made
            self.closing |= ends
            self.branches.append((below, {name for name, _ in ends}))
            self._note("embedding" if stream.names <= self.tables else "stream", stream)
            if len(other.names) == 1:
                self._note("branch", other)
            marks = (stream.marks - {"normed"}) | {"stream"}
            return replace(came, past=stream.past, factor=1.0, marks=marks)
        if flows[0].made == flows[1].made:
            return came
        for flow in flows:
            if flow.names <= self.tables:
                self._note("embedding", flow)
        apart = {flow.factor for flow in flows if flow.made}
        return replace(came, factor=apart.pop() if len(apart) == 1 else 1.0)

    def _pointwise(
        self,
        name: str,
        bare: str,
        args: Any,
        kwargs: Any,
        views: Sequence[Tensor],
        flows: Sequence[Flow],
        came: Flow,
        ins: Sequence[Tensor],
        out: Tensor,
    ) -> Flow:
        """Everything that treats entries one by one, or moves them; with the numbers in it."""
        for t in views:
            self._use(t, _taken(bare, t is args[0], ins, out), marks=came.marks)
            for i in came.scores if bare in calls.SUMS else ():
                self.on_scores[i] |= self.views[id(t)][0]
        if not out.is_floating_point() and bare in {*calls.SUMS, *calls.TIMES, "cumsum"}:
            return replace(came, marks=came.marks | {"counted"})
        if bare == "one_hot":
            return replace(came, marks=came.marks | {"one_hot"})
        if bare in calls.CHOICES:
            self.chosen |= came.names
            return replace(came, marks=came.marks | {"chosen"})
        if bare in ("softmax", "exp"):
            return self._softmax(bare, came, ins[0])
        power = args[1] if bare == "pow" and isinstance(args[1], (int, float)) else None
        power = power or calls.POWERS.get(bare)
        if power:
            normed = {"normed"} if power < 0 else set()
            return replace(came, factor=times(1.0, came.factor, power), marks=came.marks | normed)
        if bare == "normalize":
            size = out.shape[kwargs.get("dim", args[2] if len(args) > 2 else 1)]
            return replace(came, factor=size**-0.5, marks=came.marks | {"normed"})
        if "norm" in bare:  # of a vector: the root of its entries times their size
            return replace(came, factor=times(came.factor, (ins[0].numel() / out.numel()) ** 0.5))
        if bare in calls.TIMES:
            return self._times(bare, args, flows, came, ins, out)
        if came.scores and bare in {*calls.SUMS, *calls.JOINS, "tanh"}:
            before = next(t for t in ins if id(t) in self.flows and self.flows[id(t)].scores)
            own = [self.flows[id(before)]] if len(came.scores) == 1 else flows
            came = replace(came, factor=joined([f for f in own if f.scores]).factor)
            for i in came.scores if bare in calls.SUMS else ():
                self.on_scores[i] |= {n for f in flows if not f.scores for n in f.names}
            return replace(came, factor=self._rebased(came, before, out))
        return came

    def _rebased(self, came: Flow, before: Tensor, out: Tensor) -> float | None:
        """The factor on scores after a step that does more than multiply them (a bias, a mask, a
        soft cap, a mix of heads); from here on ratios are to its results."""
        if len(came.scores) != 1:
            return came.factor
        (one,) = (self.attentions[i] for i in came.scores)
        written = before is out  # in place: what was before is gone
        one.factor = came.factor if written else measured(one, before, came.factor)
        one.raw = out.detach().clone()
        return one.factor

    def _softmax(self, bare: str, came: Flow, entering: Tensor) -> Flow:
        if not came.scores:
            return replace(
                came, marks=came.marks | {"softmax"} if bare == "softmax" else came.marks
            )
        for one in (self.attentions[i] for i in came.scores):
            one.soft, several = True, len(came.scores) > 1
            one.factor = came.factor if several else measured(one, entering, came.factor)
        return replace(came, scores=frozenset(), weights=came.scores, factor=1.0)

    def _times(
        self,
        bare: str,
        args: Any,
        flows: Sequence[Flow],
        came: Flow,
        ins: Sequence[Tensor],
        out: Tensor,
    ) -> Flow:
        if len(flows) > 1:
            factor = times(flows[0].factor, flows[1].factor, calls.TIMES[bare])
            whole = [self.flows[id(t)] for t in ins if id(t) in self.flows and t.shape == out.shape]
            made = joined(whole or flows).made  # a smaller one is a gate of the other
            return replace(came, factor=factor, made=made)
        numbers = [float(a) for a in args if isinstance(a, (int, float))]
        for t in ins:
            fixed = id(t) not in self.flows and (came.scores or id(t) not in self.views)
            if t.numel() == 1 and t.is_floating_point() and fixed:
                numbers.append(float(t.detach()))
        if numbers:
            return replace(came, factor=times(came.factor, numbers[0], calls.TIMES[bare]))
        many = came.scores and not any(id(t) in self.views for t in ins)
        return replace(came, factor=None) if many else came


def _taken(bare: str, first: bool, ins: Sequence[Tensor], out: Tensor) -> str:
    """What a function of activations does with a parameter beside them."""
    if bare in calls.SUMS or (bare == "addcmul" and first):
        return "added"
    if bare in {*calls.TIMES, "lerp", "addcmul"}:
        return "scale"
    if bare in calls.JOINS:
        return "joined"
    try:
        alike = torch.broadcast_shapes(*(t.shape for t in ins)) == out.shape
    except RuntimeError:
        alike = False
    return "elementwise" if alike else f"function {bare}"
