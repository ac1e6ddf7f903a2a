"""One forward pass, recorded: what every function does with parameters and activations.

Why a `TorchFunctionMode`: it sees the calls that an author wrote (linear, einsum, scaled_dot_
product_attention with its scale) with the parameter itself as an argument. Below autograd there are
a transpose and an addmm, and the attention kernel of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from param_groups.model import calls, elementwise
from param_groups.model.calls import Call
from param_groups.model.notes import NOTHING, Attention, Flow, Notes, Ranges, joined, ranges, times

_OWN_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_SDPA = "query key value attn_mask dropout_p is_causal scale"


class Recorder(TorchFunctionMode):
    """Notes on a model's parameters, while its forward pass runs under it."""

    def __init__(self, model: nn.Module, starts: calls.Tensors, other: calls.Tensors) -> None:
        super().__init__()
        self.notes, self.called = Notes(model, starts, other), False
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.called = True
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self.notes.put(t, Flow(marks=frozenset({"input"})))

    def _end(self, _: nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, (Tensor, tuple, list)):  # a dict or a dataclass of a library
            out = [*(out if isinstance(out, dict) else getattr(out, "__dict__", {})).values()]
        flows = [self.notes.flow(t) for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.notes.spend(*flows)
        into: dict[str, Any] = {}  # a number on what it takes is one on what it makes
        for flow in flows:
            self.notes.output |= flow.names
            rows = "stream" in flow.marks or flow.made <= self.notes.rows
            for name in () if rows else sorted(flow.names):
                if name not in into:
                    into[name] = self.notes.factors.pop(("input", name), [(1.0, ())])[-1]
                by, counts = into[name]
                untied = flow.factor == 1.0 and not flow.numbers and name not in self.notes.tied
                place = "readout" if untied else "logits"  # an activation's, unless it grows
                factor, terms = times(flow.factor, by), {(name, n, 1.0) for n in counts}
                one = replace(flow, factor=factor, terms=flow.terms | terms)
                self.notes.note_factor(place, one, [name])
        if not any(flow.names for flow in flows):
            self.notes.doubts.append("in the model's output there is nothing that a product made")

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", str(function))
        if name == "__get__":  # W.T
            name = (torch.overrides.resolve_name(function) or "..").split(".")[-2]
        if function is F.multi_head_attention_forward:  # each of its calls is seen
            with self, mock.patch.object(F, "has_torch_function", return_value=False):
                return function(*args, **kwargs)
        written, before = args[0] if args and calls.writes(name) else None, None
        if isinstance(written, Tensor) and id(written) not in self.notes.flows:
            before = None if self.notes.names(written) else written.detach().clone()
        out = function(*args, **kwargs)
        ins, outs = (
            [t for t in tree_leaves(of) if isinstance(t, Tensor)] for of in ((args, kwargs), out)
        )
        name += " of lists" if name == "einsum" and not isinstance(args[0], str) else ""
        outs = outs or (ins[:1] if calls.writes(name) else [])
        if before is not None:  # a constant as it was
            args, ins = (before, *args[1:]), [before if t is written else t for t in ins]
        call, notes = Call(function, name, args, kwargs, ins, outs), self.notes
        known = [id(t) in notes.views or id(t) in notes.flows for t in call.ins]
        new = [*zip(call.ins, known, strict=True)][int(call.in_place) :]
        if call.outs and any(t.requires_grad and not seen for t, seen in new):
            notes.doubts.append(f"{name} takes the result of a function that was not seen")
        if call.forgets:
            notes.flows.pop(id(out), None)
        elif call.outs and any(known[:1] if call.bare in calls.LIKE else known):
            if isinstance(function, _OWN_OPS) and not str(function).startswith("aten"):
                notes.doubts.append(f"what {function} does is not known")
            self._see(call)
        return out

    def _see(self, call: Call) -> None:
        """Notes what a call does, and what its results carry."""
        notes = self.notes
        views = [t for t in call.ins if id(t) in notes.views]
        lookup = bool(views) and call.name in calls.LOOKUPS
        flows = [notes.flows[id(t)] for t in call.ins if id(t) in notes.flows]
        if call.name in calls.LOOKUPS and id(call.ins[0]) in notes.flows:
            flows = flows[:1]  # whatever the index is
        came = joined(flows)
        flow: Flow | None = None
        spent = call.name in calls.PRODUCTS and not (views and self._mixes(call, came))
        if spent or call.name == "scaled_dot_product_attention":
            notes.spend(*flows)
        if call.name == "scaled_dot_product_attention":
            flow = self._attention(call.bound(_SDPA))
        elif call.bare in calls.RECURRENT and views:
            for t in views:
                axes, op = (((1,), (0,)), "recurrent") if t.ndim > 1 else (((), ()), "bias")
                flow = notes.use(t, op, axes, call.outs[0], marks=came.marks)
        elif lookup and "chosen" not in came.marks and calls.looks_up(call):
            marks = came.marks & {"input", "counted"}
            flow = notes.use(views[0], "embedding", result=call.outs[0], marks=marks)
            notes.rows |= flow.made
        elif call.name in calls.PRODUCTS:
            flow = self._product(call)
        elif flows and not lookup:
            flow = elementwise.flow(notes, call, views, flows, came)
        if flow is None:
            notes.derive(call)
            return
        past = flow.past if "stream" in flow.marks else came.past
        for name in notes.names(*views):
            past |= notes.bits[name]
            notes.fed[name] |= came.above
        if calls.writes(call.name) and call.name != "__setitem__":
            notes.put_through(call.outs[0], flow, notes.flow(call.outs[0]).factor)
        given = [t for t in call.ins if id(t) not in notes.flows and id(t) not in notes.views]
        several = len(call.outs) > 1  # of which some are constants still, as after a broadcast
        for t in call.outs:
            if several and any(calls.views(t, one) for one in given):
                continue
            same = flow.serial if len(flows) > 1 or call.bare in calls.KEEPS else 0
            notes.put(t, flow, past, came.above | flow.above, same)
        if call.name in calls.SPLITS and len(flow.made) == 1 and call.outs[0].ndim:
            ((made, at),), sizes = flow.made, tuple(t.shape[-1] for t in call.outs)
            if notes.results[at][0].shape[-1] == sum(sizes):
                notes.splits.setdefault(made, sizes)

    def _product(self, call: Call) -> Flow | None:
        """Activations times parameters; two activations; no activation at all, which is None."""
        notes, found, out = self.notes, calls.operands(call), call.outs[0]
        first, bias = found[0].tensor, calls.bias_of(call)
        if call.takes_input:
            self._learned(first)
        ours = [one for one in found if id(one.tensor) in notes.views]
        flows = [notes.flows[id(t)] for t, *_ in found if id(t) in notes.flows]
        came, grouped = joined(flows), calls.groups_of(call) > 1
        came = replace(came, factor=times(came.factor, call.kwargs.get("alpha", 1.0)))
        if len(ours) == len(found) or (ours and not (flows or call.takes_input)):  # constants
            for t, *_ in ours:
                notes.use(t, "a product of parameters")
            return None
        if not ours and not flows:  # of constants, added to activations
            kept = notes.flow(bias)
            return replace(kept, factor=times(kept.factor, call.kwargs.get("beta", 1.0)))
        if call.name in calls.ADDING and notes.flow(bias).made:
            notes.doubts.append(f"{call.name} adds a product to activations, in one call")
        if not ours:
            return self._scores(call, found, flows, came)
        if flows and all(t.ndim == 1 and not notes.grows(t, 0) for t, *_ in ours):  # a few numbers
            for t, *_ in ours:
                came = elementwise.beside(notes, t, "scale", came)
            return came
        marks = came.marks - {"input"} if came.made else came.marks
        marks |= {"grouped"} if grouped else NOTHING
        made = frozenset[tuple[str, int]]()
        beside = len(found) > max(2, len(ours) + len(flows))  # a constant in an einsum
        number: float | None = None if beside else 1.0
        for t, summed, makes, axis in ours:
            op = "matmul" if call.name in calls.TWO | calls.ADDING else call.name
            marks |= {"stacked"} if len(summed) + len(makes) < t.ndim else NOTHING
            used = notes.use(t, op, (summed, makes), out, axis, marks)
            made, number = made | used.made, times(number, used.factor)
            place = "embedding" if came.made and came.made <= notes.rows else "input"
            if not came.scores:
                notes.note_factor(place, came, used.names if place == "input" else ())
        if bias is not None and notes.names(bias):
            notes.use(bias, "bias", marks={"of " + name for name, _ in made})
        kept = Flow()
        if self._mixes(call, came):
            before = next(t for t, *_ in found if id(t) in notes.flows)
            kept = replace(came, factor=elementwise.rebased(notes, came, before, out))
        made |= came.made if grouped else frozenset()
        factor = times(kept.factor, number)
        flow = replace(kept, made=made, past=0, above=0, factor=factor, marks=marks & {"stacked"})
        # An einsum may sum over axes of the activations that no parameter has.
        here = max(_terms(one) for one in found if id(one.tensor) not in notes.views)
        more = here // max(map(_terms, ours))
        return flow.summed(more) if call.name == "einsum" and more > 1 else flow

    def _mixes(self, call: Call, came: Flow) -> bool:
        """Whether a product may mix the heads of scores or softmaxes."""
        raws = (self.notes.attentions[i].raw for i in came.scores | came.weights)
        return any(raw is not None and raw.shape[-2:] == call.outs[0].shape[-2:] for raw in raws)

    def _learned(self, tensor: Tensor) -> None:
        """A parameter that stands in an activation's place, as learned queries do."""
        if id(tensor) in self.notes.views:
            self.notes.put(tensor, self.notes.use(tensor, "joined", result=tensor))
            del self.notes.views[id(tensor)]

    # Attention

    def _scores(
        self, call: Call, found: Sequence[calls.Operand], flows: Sequence[Flow], came: Flow
    ) -> Flow:
        """Of two activations: weights times values, or queries times keys."""
        size = _terms(found[0])
        if len(flows) != 2:
            if len(flows) > 2:
                return came.summed(size)
            (tensor,) = (t for t, *_ in found if id(t) in self.notes.flows)
            return elementwise.gained(self.notes, call, tensor)
        if len(found) > 2:  # a constant beside them
            return replace(came, factor=None)
        (a, b), (one, two) = flows, (found[0].tensor, found[1].tensor)
        if not any(each.summed or each.made for each in found):  # entry by entry
            return replace(came, factor=times(a.factor, b.factor))
        if came.weights:
            value, tensor = (b, two) if a.weights else (a, one)
            value = replace(value, factor=times(a.factor, b.factor))
            reached = ranges(tensor, value, self.notes.results)
            for i in came.weights:
                self.notes.attentions[i].parts.setdefault("value", {}).update(reached)
            return _attended(value)
        if "weighs" in came.marks:
            return replace(b if "weighs" in a.marks else a, factor=times(a.factor, b.factor))
        if "softmax" in came.marks:
            self.notes.doubts.append(f"{call.name} takes a softmax whose scores were not seen")
        raw, size = call.outs[0].detach().clone(), size if found[0].summed else 0
        attention = Attention(size, call.kwargs.get("alpha", 1.0), raw)
        at = self._found(attention, calls.bias_of(call), query=(a, one), key=(b, two))
        flow = Flow(came.made, factor=attention.factor, scores=frozenset({at}))
        return replace(flow, vectors=came.vectors).summed(_terms(found[0]))

    def _attention(self, bound: dict[str, Any]) -> Flow:
        three = {}
        for place in _SDPA.split()[:3]:
            self._learned(bound[place])
            three[place] = self.notes.flow(bound[place]), bound[place]
        size, scale, mask = bound["query"].shape[-1], bound.get("scale"), bound.get("attn_mask")
        factor = size**-0.5 if scale is None else float(scale)
        self._found(Attention(size, factor, soft=True), mask, **three)
        if mask is not None and self.notes.names(mask):
            self.notes.use(mask, "added")
        return _attended(three["value"][0])

    def _found(self, one: Attention, beside: Tensor | None, **places: tuple[Flow, Tensor]) -> int:
        """The number of a new attention, to whose scores something may be added. Its factor has
        those of queries and keys."""
        self.notes.attentions.append(one)
        one.added |= self.notes.names(beside) | self.notes.flow(beside).names
        for place, (flow, tensor) in places.items():
            one.parts[place] = ranges(tensor, flow, self.notes.results)
            if place != "value":
                one.factor = times(one.factor, self._level(flow, tensor, one.parts[place]))
        return len(self.notes.attentions) - 1

    def _level(self, flow: Flow, tensor: Tensor, parts: Mapping[str, Ranges]) -> float | None:
        """The factor and the gains on queries or keys. It is measured where numbers turn them, as
        rotary positions do, beside the product that makes them; after a norm it is followed."""
        numbers = {by for name, by in flow.numbers if not self.notes.closed({name})} or {1.0}
        level = times(times(flow.number, flow.gain), max(numbers)) if len(numbers) == 1 else None
        made = [pair for pair in flow.made if not self.notes.closed({pair[0]})]
        if level is None or {"turned", "normed"} & flow.marks != {"turned"} or len(made) != 1:
            return level
        result, axis, shift, by = self.notes.results[made[0][1]]
        reached = parts.get(made[0][0]) or ()
        rows = [result.movedim(axis, 0)[a - shift : b - shift].flatten() for a, b in reached]
        before = calls.level(torch.cat(rows) if rows else result) / by
        found = float(f"{calls.level(tensor) / before:.6g}")  # alike in all blocks
        return level if math.isclose(found, level, rel_tol=0.02) else found if reached else None


def _attended(value: Flow) -> Flow:
    """What an attention makes of values; their parameters act on its entries."""
    attended = Flow(factor=value.factor, marks=frozenset({"attended"}))
    return replace(attended, vectors=value.vectors | value.names)


def _terms(one: calls.Operand) -> int:
    """Over how many of its entries a product sums."""
    return math.prod(one.tensor.shape[axis] for axis in one.summed)
