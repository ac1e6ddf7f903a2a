"""Functions that treat entries one by one, or move them: sums, norms, numbers, softmax, choices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from param_groups.model import calls
from param_groups.model.calls import Call
from param_groups.model.notes import NOTHING, Attention, Flow, Notes, joined, times


def flow(
    notes: Notes, call: Call, views: Sequence[Tensor], flows: Sequence[Flow], came: Flow
) -> Flow:
    """What the results of a call carry; `came` is what its activations do together."""
    bare, out = call.bare, call.outs[0]
    marked: Callable[[str], Flow] = lambda mark: replace(came, marks=came.marks | {mark})
    if bare in calls.NORMS:
        return _norm(notes, call, came)
    for t in views:
        marks = frozenset({"divides"}) if calls.TIMES.get(bare) == -1 else NOTHING
        came = beside(notes, t, _taken(call, t), came, marks)
        if calls.TIMES.get(bare) == 1:
            notes.scaled[id(out)] = out, t
    keeps = bare in {*calls.TIMES, "neg", "to", "float", "double"} and not views  # by a number
    if keeps and len(call.ins) == 1 and id(call.ins[0]) in notes.scaled:
        notes.scaled[id(out)] = out, notes.scaled[id(call.ins[0])][1]
    summed = bare in ("sum", "nansum") and id(call.ins[0]) in notes.scaled
    if summed and (product := _inner_product(notes, call)):
        return product
    if terms := calls.terms(call):
        came = came.summed(terms)
        if "squared" in came.marks:  # of entries of one, whose root is a norm
            came = replace(came, factor=times(came.factor, terms))
    adds = bare in {*calls.SUMS, "addcmul", "addcdiv"}
    if adds and len(flows) > 1:  # one by one, as in a loop
        counts = Counter[str]()
        for one in flows:
            counts.update({name: one.adds.get(name, 1.0) for name in one.names | one.vectors})
        came = replace(came, adds={name: n for name, n in counts.items() if n > 1})
    if adds and len(flows) == 2 and not came.scores:
        factor = times(flows[1].factor, call.kwargs.get("alpha", 1.0))
        return _sum(notes, [flows[0], replace(flows[1], factor=factor)], came)
    if not out.is_floating_point() and bare in {*calls.SUMS, *calls.TIMES, "cumsum"}:
        return marked("counted")
    if bare == "one_hot":
        return marked("one_hot")
    if bare in calls.CHOICES:
        notes.chosen |= came.names
        return marked("chosen")
    if bare in ("softmax", "exp"):
        return _softmax(notes, call, came)
    by = call.kwargs.get("exponent", call.args[1] if len(call.args) > 1 else None)
    power = by if bare == "pow" and isinstance(by, (int, float)) else None
    if power := power or calls.POWERS.get(bare):
        root = 0 < power < 1 or bare == "std"
        mark = {power == 2: "squared", power < 0: "normed", root: "root"}.get(True)
        after = replace(came, marks=came.marks - {"squared"} | ({mark} if mark else NOTHING))
        sums = frozenset() if power < 0 else came.rescaled(1.0, power)
        after = replace(after, sums=sums, adds={} if power < 0 else came.adds)
        top = calls.numbers(call)[0] if bare == "rdiv" and calls.numbers(call) else 1.0
        return replace(after, factor=times(top, came.factor, power))
    if bare == "normalize":
        axis = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 1)
        return replace(marked("normed"), sums=frozenset(), factor=out.shape[axis] ** -0.5)
    if "norm" in bare:  # of a vector: the root of its entries times their size
        size = (call.ins[0].numel() / out.numel()) ** 0.5
        return replace(marked("root"), factor=times(came.factor, size))
    if bare in calls.TIMES:
        return _times(notes, call, flows, came)
    if came.scores and bare in {*calls.SUMS, *calls.JOINS, "tanh"}:
        before = next(t for t in call.ins if notes.flow(t).scores)
        own = [notes.flow(before)] if len(came.scores) == 1 else flows
        came = replace(came, factor=joined([f for f in own if f.scores]).factor)
        for i in came.scores:
            added = notes.names(*views).union(*(f.names for f in flows if not f.scores))
            notes.attentions[i].added |= added
        return replace(came, factor=rebased(notes, came, before, out))
    if came.factor is None and not came.scores:
        entries = [t for t in call.ins if t.is_floating_point()][
            : 1 if bare in calls.LIKE else None
        ]
        return _together(notes, [notes.flow(t) for t in entries], came)
    return came


def beside(
    notes: Notes, vector: Tensor, op: str, came: Flow, marks: frozenset[str] = NOTHING
) -> Flow:
    """Activations after a parameter acted on their entries."""
    notes.use(vector, op, marks=came.marks | marks)
    return replace(came, vectors=came.vectors | notes.names(vector))


def _inner_product(notes: Notes, call: Call) -> Flow | None:
    """Activations times a parameter, summed over what grows in it: a product by hand."""
    (scaled, one), out = notes.scaled[id(call.ins[0])], call.outs[0]
    over = {axis - scaled.ndim + one.ndim for axis in calls.summed_axes(call)}
    long = [axis for axis, size in enumerate(one.shape) if size > 1]
    summed, made = ([axis for axis in long if (axis in over) is inside] for inside in (True, False))
    if not any(notes.grows(one, axis) for axis in summed):
        return None
    at = made[0] - one.ndim if made else -1
    at += sum(axis > made[0] for axis in over) if made and out.ndim < scaled.ndim else 0
    return notes.use(one, "sum", (summed, made), out, at)


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


def _norm(notes: Notes, call: Call, came: Flow) -> Flow:
    vectors = [*call.args[calls.NORMS[call.bare] :][:2]]
    vectors += [call.kwargs.get("weight"), call.kwargs.get("bias")]
    tensors = [t for t in vectors if isinstance(t, Tensor)]
    for t, what in zip(tensors, ("norm_scale", "norm_bias"), strict=False):
        if notes.names(t):
            came = replace(came, vectors=came.vectors | notes.names(t))
            notes.use(t, what)
    if came.made <= notes.rows:
        notes.note_factor("embedding", came)
    return replace(came, factor=1.0, sums=frozenset(), adds={}, marks=came.marks | {"normed"})


def _sum(notes: Notes, flows: Sequence[Flow], came: Flow) -> Flow:
    """A branch that joins the stream it came from, or two activations."""
    for stream, other in (flows, flows[::-1]):
        if notes.join_stream(stream, other):
            marks = (stream.marks - {"normed"}) | {"stream"}
            return replace(came, past=stream.past, factor=1.0, marks=marks)
    came = replace(came, marks=came.marks - {"stream"})
    if flows[0].made == flows[1].made:
        return came
    for one in flows:
        if one.made <= notes.rows:
            notes.note_factor("embedding", one)
    return _together(notes, flows, came)


def _together(notes: Notes, flows: Sequence[Flow], came: Flow) -> Flow:
    """Activations side by side, or their sum, which numbers multiply each for itself."""
    apart = {one.factor for one in flows if one.made}
    for one in flows if len(apart) > 1 else ():
        notes.note_factor("term", one)
    return replace(came, factor=apart.pop() if len(apart) == 1 else 1.0)


def _times(notes: Notes, call: Call, flows: Sequence[Flow], came: Flow) -> Flow:
    power = calls.TIMES[call.bare]
    if power > 0 and len(call.ins) == 2 and call.ins[0] is call.ins[1]:
        came = replace(came, marks=came.marks | {"squared"})
    if len(flows) > 1:
        factor = times(flows[0].factor, flows[1].factor, power)
        if power < 0:  # a sum over another is as many terms as it has more
            below = max((terms for _, terms in flows[1].sums), default=1.0)
            came = replace(came, sums=flows[0].rescaled(1 / below))
            if "root" in flows[1].marks - flows[0].marks and flows[0].names & flows[1].names:
                came = replace(came, marks=came.marks - {"root"} | {"normed"})
                for name in flows[0].vectors - flows[1].vectors:  # that acts before it divides
                    use = notes.uses[name][-1]
                    notes.uses[name][-1] = replace(use, marks=use.marks | {"normed"})
        came = replace(came, marks=came.marks - {"weighs"})
        shape = call.outs[0].shape
        whole = [notes.flow(t) for t in call.ins if id(t) in notes.flows and t.shape == shape]
        made = joined(whole or flows).made  # a smaller one is a gate of the other
        return replace(came, factor=factor, made=made)
    others = [t for t in call.ins if id(t) not in notes.flows]
    single = (t for t in others if t.numel() == 1 and came.scores)  # a learned temperature's start
    if numbers := calls.numbers(call, [*single, *(t for t in others if not notes.names(t))]):
        by = abs(numbers[0]) ** power if numbers[0] else 1.0
        adds = {n for n in came.adds.values() if n > 2}  # two are a rotation, too
        sizes = {*(terms for _, terms in came.sums), *adds} - {1, came.factor}
        divides = any(math.isclose(terms * by, 1) for terms in sizes)  # a mean by hand
        factor = came.factor if divides else times(came.factor, numbers[0], power)
        kept = {} if any(math.isclose(n * by, 1) for n in adds) else came.adds
        return replace(came, factor=factor, sums=came.rescaled(by), adds=kept)
    many = came.scores and not notes.names(*call.ins)
    return replace(came, factor=None) if many else came


# Scores of attentions


def _softmax(notes: Notes, call: Call, came: Flow) -> Flow:
    if not came.scores:
        # Scores that a parameter made, as a router's or a pooling's, are of no attention.
        mark = "softmax" if came.sums or len(came.names) != 1 else "weighs"
        soft = {mark} if call.bare == "softmax" else NOTHING
        came = replace(came, sums=frozenset()) if soft else came
        return replace(came, marks=came.marks | soft)
    for one in (notes.attentions[i] for i in came.scores):
        one.soft, several = True, len(came.scores) > 1
        one.factor = came.factor if several else _measured(one, call.ins[0], came.factor)
    return replace(came, scores=frozenset(), weights=came.scores, factor=1.0, sums=frozenset())


def rebased(notes: Notes, came: Flow, before: Tensor, out: Tensor) -> float | None:
    """The factor on scores after a step that does more than multiply them (a bias, a mask, a soft
    cap, a mix of heads); from here on ratios are to its results."""
    if len(came.scores) != 1:
        return came.factor
    (one,) = (notes.attentions[i] for i in came.scores)
    written = before is out  # in place: what was before is gone
    one.factor = came.factor if written else _measured(one, before, came.factor)
    one.raw = out.detach().clone()
    return one.factor


def _measured(one: Attention, scores: Tensor, followed: float | None) -> float | None:
    """The factor on query-key products in `scores`: the ratio to those before, if nearly all
    entries have one. `followed` is what the calls since then say; None if entries have several."""
    if one.raw is None or one.raw.numel() != scores.numel():
        return followed
    now, then = scores.detach().flatten(), one.raw.flatten()
    ratio = (now / then)[(now > -1e4) & (then != 0)]
    middle = float(ratio.median()) if len(ratio) else math.nan
    if not float(((ratio / middle - 1).abs() < 1e-2).float().mean()) > 0.9:
        return None
    found = times(middle, one.factor)
    return followed if followed and found and math.isclose(found, followed, rel_tol=1e-2) else found
