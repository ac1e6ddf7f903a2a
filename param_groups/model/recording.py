"""One forward pass, recorded: what every function does with parameters and activations.

Why a `TorchFunctionMode`: it sees the calls that an author wrote (linear, einsum, scaled_dot_
product_attention with its scale) with the parameter itself as an argument. Below autograd there are
a transpose and an addmm, and the attention kernel of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from param_groups.model import calls
from param_groups.model.attention import Attention, Flow, joined, measured, ranges, times
from param_groups.model.calls import Call
from param_groups.model.notes import NOTHING, Notes

_OWN_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_SDPA = "query key value attn_mask dropout_p is_causal scale"
_MULTI_HEAD = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v "
    "add_zero_attn dropout_p out_proj_weight out_proj_bias"
)
_LINEAR = ((1,), (0,))  # the axes of an nn.Linear's weight: summed over, made


class Recorder(TorchFunctionMode):
    """Notes on a model's parameters, while its forward pass runs under it."""

    def __init__(self, model: nn.Module, starts: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.notes, self.called = Notes(model, starts), False
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.called = True
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self.notes.put(t, Flow(marks=frozenset({"input"})))

    def _end(self, _: nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, (Tensor, tuple, list)):  # a dict or a dataclass of a library
            out = (
                [*out.values()]
                if isinstance(out, dict)
                else [*getattr(out, "__dict__", {}).values()]
            )
        flows = [self.notes.flow(t) for t in tree_leaves(out) if isinstance(t, Tensor)]
        for flow in flows:
            self.notes.output |= flow.names
            if len(flow.names) == 1 and not flow.names <= self.notes.tables:
                self.notes.note_factor("logits", flow)
        if not any(flow.names for flow in flows):
            self.notes.doubts.append("in the model's output there is nothing that a product made")

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", str(function))
        if name == "__get__":  # W.T
            name = (torch.overrides.resolve_name(function) or "..").split(".")[-2]
        out = function(*args, **kwargs)
        call = calls.seen(name, args, kwargs, out)
        views, flows, doubts = self.notes.views, self.notes.flows, self.notes.doubts
        known = [id(t) in views or id(t) in flows for t in call.ins]
        new = [*zip(call.ins, known, strict=True)][int(call.in_place) :]
        if call.outs and any(t.requires_grad and not seen for t, seen in new):
            doubts.append(f"{name} takes the result of a function that was not seen")
        if call.outs and any(known):
            if isinstance(function, _OWN_OPS) and not str(function).startswith("aten"):
                doubts.append(f"what {function} does is not known")
            self._see(call)
        return out

    def _see(self, call: Call) -> None:
        """Notes what a call does, and what its results carry."""
        notes, bare = self.notes, call.bare
        views = [t for t in call.ins if id(t) in notes.views]
        flows = [notes.flows[id(t)] for t in call.ins if id(t) in notes.flows]
        came = joined(flows)
        lookup = views and call.name in calls.LOOKUPS
        summed = bare in {*calls.SUMS, "addcmul"} and len(flows) == 2 and not came.scores
        flow: Flow | None = None
        if call.name == "scaled_dot_product_attention":
            flow = self._attention(calls.bound(_SDPA, call))
        elif call.name == "multi_head_attention_forward":
            flow = self._multi_head(calls.bound(_MULTI_HEAD, call), call.outs[0])
        elif bare in calls.RECURRENT and views:
            for t in views:
                axes, op = (_LINEAR, "recurrent") if t.ndim > 1 else (((), ()), "bias")
                flow = notes.use(t, op, axes, call.outs[0], marks=came.marks)
        elif lookup and "chosen" not in came.marks and calls.looks_up(call):
            marks = came.marks & {"input", "counted"}
            flow = notes.use(views[0], "embedding", result=call.outs[0], marks=marks)
            notes.tables |= flow.names
        elif call.is_product:
            flow = self._product(call)
        elif bare in calls.NORMS:
            flow = self._norm(call, came)
        elif not (lookup or (views and not flows)):
            for t in views:
                notes.use(t, _taken(call, t), marks=came.marks)
            flow = self._sum(flows, came) if summed else self._pointwise(call, views, flows, came)
        if flow is None:
            notes.derive(call)
            return
        past = flow.past if "stream" in flow.marks else came.past
        for name in NOTHING.union(*(notes.names(t) for t in views)):
            past |= notes.bits[name]
            notes.fed[name] |= came.above
        for t in call.outs:
            notes.put(t, replace(flow, past=past, above=came.above | flow.above))
        if call.name in calls.SPLITS and len(flow.made) == 1:
            ((made, at),), sizes = flow.made, tuple(t.shape[-1] for t in call.outs)
            if notes.results[at][0].shape[-1] == sum(sizes):
                notes.splits.setdefault(made, sizes)

    # Products

    def _product(self, call: Call) -> Flow | None:
        """Activations times parameters; two activations; no activation at all, which is None."""
        notes, found, out = self.notes, calls.operands(call), call.outs[0]
        first = found[0].tensor
        if call.takes_input and id(first) in notes.views:  # learned queries
            notes.put(first, notes.use(first, "joined", result=first))
            del notes.views[id(first)]
        ours = [one for one in found if id(one.tensor) in notes.views]
        flows = [notes.flows[id(t)] for t, *_ in found if id(t) in notes.flows]
        came, apart = joined(flows), calls.groups_of(call) > 1
        if len(ours) == len(found) or (not flows and not call.takes_input):  # constants beside it
            for t, *_ in ours:
                notes.use(t, "a product of parameters")
            return None
        marks = came.marks - {"input"} if came.made else came.marks
        marks |= {"grouped"} if apart else NOTHING
        made = frozenset[tuple[str, int]]()
        tables = came.names <= notes.tables
        for t, summed, makes, axis in ours:
            op = "matmul" if call.name in calls.TWO or call.name in calls.ADDING else call.name
            marks |= {"stacked"} if len(summed) + len(makes) < t.ndim else NOTHING
            used = notes.use(t, op, (summed, makes), out, axis, marks)
            made |= used.made
            notes.note_factor(
                "embedding" if tables else "input", came, came.names if tables else used.names
            )
        bias = calls.bias_of(call)
        if id(bias) in notes.views and bias is not None:
            notes.use(bias, "bias", marks={"of " + name for name, _ in made})
        elif not made:
            notes.on_scores[len(notes.attentions)] |= notes.flow(bias).names
        if not made:
            return self._scores(call, found, flows, came)
        kept, raws = Flow(), [notes.attentions[i].raw for i in came.scores | came.weights]
        if any(raw is not None and raw.shape[-2:] == out.shape[-2:] for raw in raws):  # mixed heads
            before = next(t for t, *_ in found if id(t) in notes.flows)
            kept = replace(came, factor=self._rebased(came, before, out))
        deep = made | came.made if apart else made
        return replace(kept, made=deep, past=0, above=0, marks=marks & {"stacked"})

    def _scores(
        self, call: Call, found: Sequence[calls.Operand], flows: Sequence[Flow], came: Flow
    ) -> Flow:
        """Of two activations: weights times values, or queries times keys."""
        notes = self.notes
        if len(flows) != 2:
            return came
        (a, b), (one, two) = flows, (found[0].tensor, found[1].tensor)
        if came.weights:
            for i in came.weights:
                self._parts(i, value=(b, two) if a.weights else (a, one))
            return Flow(marks=frozenset({"attended"}))
        if "softmax" in came.marks:
            notes.doubts.append(f"{call.name} takes a softmax whose scores were not seen")
        size = one.shape[found[0].summed[0]] if found[0].summed else 0
        factor = times(times(a.factor, b.factor), call.kwargs.get("alpha", 1.0))
        notes.attentions.append(Attention(size, factor, call.outs[0].detach().clone()))
        at = len(notes.attentions) - 1
        self._parts(at, query=(a, one), key=(b, two))
        return Flow(came.made, factor=factor, scores=frozenset({at}))

    # Attention

    def _parts(self, at: int, **places: tuple[Flow, Tensor]) -> None:
        for place, (flow, tensor) in places.items():
            parts = self.notes.attentions[at].parts.setdefault(place, {})
            parts.update(ranges(tensor, flow, self.notes.results))

    def _attention(self, given: dict[str, Any]) -> Flow:
        notes, at = self.notes, len(self.notes.attentions)
        three = {place: (notes.flow(given[place]), given[place]) for place in _SDPA.split()[:3]}
        size, scale = given["query"].shape[-1], given.get("scale")
        factor = times(three["query"][0].factor, three["key"][0].factor)
        factor = times(factor, size**-0.5 if scale is None else float(scale))
        notes.attentions.append(Attention(size, factor, soft=True))
        self._parts(at, **three)
        mask = given.get("attn_mask")
        if mask is not None and notes.names(mask):
            notes.use(mask, "added")
        notes.on_scores[at] |= notes.names(mask) | notes.flow(mask).names
        return Flow(marks=frozenset({"attended"}))

    def _multi_head(self, given: dict[str, Any], out: Tensor) -> Flow:
        """nn.MultiheadAttention is one call, whose arguments are read by name."""
        notes, at, last = self.notes, len(self.notes.attentions), given["out_proj_weight"]
        width, fused = given["embed_dim_to_check"], given.get("in_proj_weight")
        weight: Any
        size = width // given["num_heads"]
        notes.attentions.append(Attention(size, size**-0.5, soft=True))
        for i, place in enumerate(_SDPA.split()[:3]):
            alone, came = given.get(f"{place[0]}_proj_weight"), notes.flow(given[place])
            weight, shift = (fused, i * width) if alone is None else (alone, 0)
            names = notes.names(weight)
            notes.attentions[at].parts[place] = dict.fromkeys(names, ((shift, shift + width),))
            if names and (alone is not None or i == 0):
                notes.use(weight, "linear", _LINEAR, marks=came.marks)
            for name in names:
                notes.fed[name] |= came.above
        for key, owner in (("in_proj_bias", fused), ("out_proj_bias", last)):
            if notes.names(given.get(key)):
                notes.use(given[key], "bias", marks={"of " + n for n in notes.names(owner)})
        for key in ("bias_k", "bias_v"):
            if notes.names(given.get(key)):
                notes.use(given[key], "added")
        return notes.use(last, "linear", _LINEAR, out, marks={"attended"})

    def _rebased(self, came: Flow, before: Tensor, out: Tensor) -> float | None:
        """The factor on scores after a step that does more than multiply them (a bias, a mask, a
        soft cap, a mix of heads); from here on ratios are to its results."""
        if len(came.scores) != 1:
            return came.factor
        (one,) = (self.notes.attentions[i] for i in came.scores)
        written = before is out  # in place: what was before is gone
        one.factor = came.factor if written else measured(one, before, came.factor)
        one.raw = out.detach().clone()
        return one.factor

    def _softmax(self, call: Call, came: Flow) -> Flow:
        if not came.scores:
            soft = {"softmax"} if call.bare == "softmax" else NOTHING
            return replace(came, marks=came.marks | soft)
        for one in (self.notes.attentions[i] for i in came.scores):
            one.soft, several = True, len(came.scores) > 1
            one.factor = came.factor if several else measured(one, call.ins[0], came.factor)
        return replace(came, scores=frozenset(), weights=came.scores, factor=1.0)

    # All else

    def _norm(self, call: Call, came: Flow) -> Flow:
        given = [*call.args[calls.NORMS[call.bare] :][:2]]
        given += [call.kwargs.get("weight"), call.kwargs.get("bias")]
        vectors = [t for t in given if isinstance(t, Tensor)]
        for t, what in zip(vectors, ("norm_scale", "norm_bias"), strict=False):
            if self.notes.names(t):
                self.notes.use(t, what)
        if came.names <= self.notes.tables:
            self.notes.note_factor("embedding", came)
        return replace(came, factor=1.0, marks=came.marks | {"normed"})

    def _sum(self, flows: Sequence[Flow], came: Flow) -> Flow:
        """A branch that joins the stream it came from, or two activations."""
        for stream, other in (flows, flows[::-1]):
            if self.notes.join_stream(stream, other):
                marks = (stream.marks - {"normed"}) | {"stream"}
                return replace(came, past=stream.past, factor=1.0, marks=marks)
        came = replace(came, marks=came.marks - {"stream"})
        if flows[0].made == flows[1].made:
            return came
        for flow in flows:
            if flow.names <= self.notes.tables:
                self.notes.note_factor("embedding", flow)
        apart = {flow.factor for flow in flows if flow.made}
        return replace(came, factor=apart.pop() if len(apart) == 1 else 1.0)

    def _pointwise(
        self, call: Call, views: Sequence[Tensor], flows: Sequence[Flow], came: Flow
    ) -> Flow:
        """Everything that treats entries one by one, or moves them; with the numbers in it."""
        notes, bare, out = self.notes, call.bare, call.outs[0]
        if not out.is_floating_point() and bare in {*calls.SUMS, *calls.TIMES, "cumsum"}:
            return replace(came, marks=came.marks | {"counted"})
        if bare == "one_hot":
            return replace(came, marks=came.marks | {"one_hot"})
        if bare in calls.CHOICES:
            notes.chosen |= came.names
            return replace(came, marks=came.marks | {"chosen"})
        if bare in ("softmax", "exp"):
            return self._softmax(call, came)
        power = call.args[1] if bare == "pow" and isinstance(call.args[1], (int, float)) else None
        if power := power or calls.POWERS.get(bare):
            marks = came.marks | ({"normed"} if power < 0 else NOTHING)
            return replace(came, factor=times(1.0, came.factor, power), marks=marks)
        if bare == "normalize":
            axis = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 1)
            return replace(came, factor=out.shape[axis] ** -0.5, marks=came.marks | {"normed"})
        if "norm" in bare:  # of a vector: the root of its entries times their size
            size = (call.ins[0].numel() / out.numel()) ** 0.5
            return replace(came, factor=times(came.factor, size))
        if bare in calls.TIMES:
            return self._times(call, flows, came)
        if came.scores and bare in {*calls.SUMS, *calls.JOINS, "tanh"}:
            before = next(t for t in call.ins if notes.flow(t).scores)
            own = [notes.flow(before)] if len(came.scores) == 1 else flows
            came = replace(came, factor=joined([f for f in own if f.scores]).factor)
            for i in came.scores:
                notes.on_scores[i] |= {n for f in flows if not f.scores for n in f.names}
                notes.on_scores[i] |= NOTHING.union(*(notes.names(t) for t in views))
            return replace(came, factor=self._rebased(came, before, out))
        return came

    def _times(self, call: Call, flows: Sequence[Flow], came: Flow) -> Flow:
        notes, power = self.notes, calls.TIMES[call.bare]
        if len(flows) > 1:
            factor = times(flows[0].factor, flows[1].factor, power)
            shape = call.outs[0].shape
            whole = [notes.flow(t) for t in call.ins if id(t) in notes.flows and t.shape == shape]
            made = joined(whole or flows).made  # a smaller one is a gate of the other
            return replace(came, factor=factor, made=made)
        numbers = [float(a) for a in call.args if isinstance(a, (int, float))]
        for t in call.ins:
            fixed = id(t) not in notes.flows and (came.scores or not notes.names(t))
            if t.numel() == 1 and t.is_floating_point() and fixed:
                numbers.append(float(t.detach()))
        if numbers:
            return replace(came, factor=times(came.factor, numbers[0], power))
        many = came.scores and not any(notes.names(t) for t in call.ins)
        return replace(came, factor=None) if many else came


def _taken(call: Call, tensor: Tensor) -> str:
    """What a function of activations does with a parameter beside them."""
    if call.bare in calls.SUMS or (call.bare == "addcmul" and tensor is call.args[0]):
        return "added"
    if call.bare in {*calls.TIMES, "lerp", "addcmul"}:
        return "scale"
    if call.bare in calls.JOINS:
        return "joined"
    try:
        alike = torch.broadcast_shapes(*(t.shape for t in call.ins))  # type: ignore[no-untyped-call]
    except RuntimeError:
        alike = None
    return "elementwise" if alike == call.outs[0].shape else f"function {call.bare}"
