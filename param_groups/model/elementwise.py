"""Functions that treat entries one by one, or move them: sums, norms, numbers, softmax, choices."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from param_groups.model import calls
from param_groups.model.calls import Call
from param_groups.model.notes import NOTHING, Attention, Flow, Notes, added, folded, joined, times

Flows = Sequence[Flow]


def flow(notes: Notes, call: Call, views: Sequence[Tensor], flows: Flows, came: Flow) -> Flow:
    """What the results of a call carry; `came` is what its activations do together."""
    if call.bare in calls.NORMS:
        return _norm(notes, call, came)
    came = _acted(notes, call, views, came)
    if product := _inner_product(notes, call):
        return product
    if call.bare in calls.LIKE and not views:
        return notes.flow(call.ins[0])
    if call.bare in ("sin", "cos") and not came.made:  # of positions: no larger than 1
        return replace(came, factor=1.0, marks=came.marks - {"turned"})
    entries = [t for t in call.ins if calls.is_number(t) and id(t) in notes.flows]
    if calls.is_number(call.outs[0]):  # an index that was made like an activation adds nothing
        if not entries:  # constants that an index or a condition chose
            return _unsized(_marked(came, "numbers"))
        flows, came = _chosen(notes, call, entries, came)
    if measured := _measures(notes, call, flows):
        flows = [gained(notes, call, t) for t in entries]
        one = joined(flows)
        came = replace(came, factor=one.factor, terms=one.terms, marks=came.marks | one.marks)
    else:
        single = entries[0] if len(entries) == 1 and not views else None
        flows, came = _summed(call, single, flows, came)
    by = 1.0 if measured else call.kwargs.get("alpha", call.kwargs.get("value", 1.0))
    if len(flows) == 1 and call.bare in calls.SUMS and id(call.ins[-1]) in notes.flows:
        came = replace(came, factor=times(came.factor, by))
    if len(flows) > 1 and call.bare in calls.ADDS:
        if len(flows) == 3 and call.bare in ("addcmul", "addcdiv"):
            both = times(flows[1].factor, flows[2].factor, 1 if call.bare == "addcmul" else -1)
            flows = [flows[0], replace(joined(flows[1:]), factor=both)]
        flows = [flows[0], *(replace(one, factor=times(one.factor, by)) for one in flows[1:])]
        came = replace(came, factor=joined(flows).factor)
        if len(flows) == 2 and (joint := _sum(notes, flows, came)):
            return joint
        came = replace(came, terms=added(flows))
    return _bent(notes, call, views, flows, came)


def _marked(came: Flow, mark: str) -> Flow:
    return replace(came, marks=came.marks | {mark})


def _acted(notes: Notes, call: Call, views: Sequence[Tensor], came: Flow) -> Flow:
    """Activations after the parameters beside them, whose products a sum may follow."""
    power, out = calls.TIMES.get(call.bare), call.outs[0]
    for t in views:
        came = beside(notes, t, _taken(call, t), came, {"divides"} if power == -1 else NOTHING)
        if power == 1:
            notes.scaled[id(out)] = out, t
    if call.bare in calls.KEEPS and len(call.ins) == 1 and id(call.ins[0]) in notes.scaled:
        notes.scaled[id(out)] = out, notes.scaled[id(call.ins[0])][1]
    return came


def _chosen(notes: Notes, call: Call, entries: Sequence[Tensor], came: Flow) -> tuple[Flows, Flow]:
    """Activations beside numbers that an index or a condition chose among constants."""
    flows = [notes.flows[id(t)] for t in entries]
    apart = [one for one in flows if "numbers" in one.marks]
    if len(flows) > len(apart) > 0:
        came = replace(came, marks=came.marks - {"numbers"} | {"turned"})
    if call.bare in calls.TIMES and len(flows) == 2 and len(apart) == 1:
        size = calls.number_in(entries[flows.index(apart[0])]) ** calls.TIMES[call.bare]
        rest = [one for one in flows if one not in apart]
        flows = [replace(one, factor=times(one.factor, size)) for one in rest]
        came = replace(came, factor=flows[0].factor)
    return flows, came


def _summed(call: Call, single: Tensor | None, flows: Flows, came: Flow) -> tuple[Flows, Flow]:
    """Activations with how many entries a call adds up, or by which number it multiplies them."""
    if terms := calls.terms(call):
        if "squared" in came.marks or "norm" in call.bare:  # of entries of one the root is a norm
            came = replace(came.summed(1.0), factor=times(came.factor, terms))
        elif len(flows) > 1 and call.bare in calls.ADDS:  # into the first
            flows = [flows[0], *(one.summed(terms) for one in flows[1:])]
        else:
            came = came.summed(terms)
    elif single is not None and len(flows) == 1 and calls.acts(call) and not came.scores:
        number, several = calls.gain(call, single) or (1.0, 1.0)
        came = came if several > 1 else replace(came, factor=times(came.factor, number))
    return flows, came


def _bent(notes: Notes, call: Call, views: Sequence[Tensor], flows: Flows, came: Flow) -> Flow:
    """Activations after what the call's function is by its name: a choice, softmax, power, norm."""
    bare, out = call.bare, call.outs[0]
    if not calls.is_number(out) and bare in {*calls.SUMS, *calls.TIMES, "cumsum"}:
        return _marked(came, "counted")
    if bare == "one_hot":
        return _marked(came, "one_hot")
    if bare in calls.CHOICES:
        notes.chosen |= came.names
        return _marked(came, "chosen")
    if bare in ("softmax", "exp"):
        return _softmax(notes, call, came)
    if raised := _raised(notes, call, came):
        return raised
    if bare == "normalize":
        axis = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else 1)
        return replace(_unsized(_marked(came, "normed")), factor=out.shape[axis] ** -0.5)
    if "norm" in bare:
        return _marked(came, "root")
    if bare in calls.TIMES:
        return _times(notes, call, flows, came)
    if came.scores and bare in {*calls.SUMS, *calls.JOINS, "tanh"}:
        before = next(t for t in call.ins if notes.flow(t).scores)
        own = [notes.flow(before)] if len(came.scores) == 1 else flows
        came = replace(came, factor=joined([f for f in own if f.scores]).factor)
        for i in came.scores:
            names = notes.names(*views).union(*(f.names for f in flows if not f.scores))
            notes.attentions[i].added |= names
        return replace(came, factor=rebased(notes, came, before, out))
    if came.factor is None and not came.scores:
        came = replace(came, terms=joined([*map(folded, flows)]).terms)
        return _together(notes, flows, came)
    return came


def _raised(notes: Notes, call: Call, came: Flow) -> Flow | None:
    """Activations to a power, and those that a constant is divided by; None for other calls."""
    exponent = call.kwargs.get("exponent", call.args[1] if len(call.args) > 1 else None)
    constants = _constants(notes, call)
    below = calls.TIMES.get(call.bare) == -1 and call.ins[0] is next(iter(constants), None)
    power = -1.0 if below else float(calls.POWERS.get(call.bare, 0))
    if call.bare == "pow" and isinstance(exponent, (int, float)):
        power = float(exponent)
    if not power:
        return None
    root = 0 < power < 1 or call.bare == "std"
    mark = {power == 2: "squared", power < 0: "normed", root: "root"}.get(True)
    marks = came.marks - {"squared"} | ({mark} if mark else NOTHING)
    kept = frozenset((name, n**power, k**power) for name, n, k in came.terms if power > 0)
    above = calls.numbers(call, constants) if call.bare in {*calls.TIMES, "rdiv"} else []
    top = above[0] if above else 1.0
    factor, gain = times(top, came.factor, power), times(1.0, came.gain, power)
    return replace(_unsized(came), marks=marks, terms=kept, factor=factor, gain=gain)


def _measures(notes: Notes, call: Call, flows: Flows) -> bool:
    """Whether constant tensors say what a call does to activations, and how is to be measured."""
    if call.bare in calls.SUMS | calls.JOINS or not calls.is_number(call.outs[0]) or not flows:
        return False
    if call.bare == "lerp" and len(flows) == 2 and not notes.names(*call.ins):
        return id(call.ins[-1]) not in notes.flows or len(call.ins) == 2
    constants = _constants(notes, call)
    read = call.bare in calls.TIMES and all(map(calls.alike, constants))  # as one number
    return bool(constants) and not read


def _constants(notes: Notes, call: Call) -> list[Tensor]:
    others = [t for t in call.ins if id(t) not in notes.flows and not notes.names(t)]
    whole = call.bare in {*calls.TIMES, "ldexp"}  # else whole numbers are indices
    return [t for t in others if calls.is_number(t) or (whole and t.dtype != torch.bool)]


def gained(notes: Notes, call: Call, tensor: Tensor) -> Flow:
    """An activation with what a call's constant tensors do to it; scores are measured later."""
    flow, alone = notes.flow(tensor), sum(id(t) in notes.flows for t in call.ins) == 1
    flow = replace(flow, marks=flow.marks | {"turned"})
    if flow.scores or not (alone or call.bare in calls.ADDS):
        return flow
    if (found := calls.gain(call, tensor)) is None:
        if not flow.made and "attended" not in flow.marks:
            return replace(flow, factor=1.0)
        # One number bends a curve, as a zero does in `maximum`; several are not read.
        bends = all(map(calls.alike, _constants(notes, call))) and call.bare not in calls.TIMES
        return flow if bends else replace(flow, factor=None)
    by, terms = found
    flow = replace(flow, factor=times(flow.factor, by))
    return flow.summed(terms) if terms > 1 else flow


def beside(notes: Notes, vector: Tensor, op: str, came: Flow, marks: Set[str] = NOTHING) -> Flow:
    """Activations after a parameter acted on their entries."""
    notes.use(vector, op, marks=came.marks | marks)
    gain, names = came.gain, notes.names(vector)
    for acts in (notes.uses[name][-1].acts_as for name in names if "scale" in op):
        if acts and not math.isclose(acts, 1, rel_tol=1e-2):  # with some noise
            gain = times(gain, acts, -1 if "divides" in marks else 1)
    return replace(came, gain=gain, vectors=came.vectors | names)


def _inner_product(notes: Notes, call: Call) -> Flow | None:
    """Activations times a parameter, summed over what grows in it: a product by hand."""
    if call.bare not in ("sum", "nansum") or id(call.ins[0]) not in notes.scaled:
        return None
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


def _unsized(came: Flow) -> Flow:
    """Entries whose size is none of what came: after a norm, or beside a stream."""
    return replace(came, factor=1.0, gain=1.0, terms=frozenset(), numbers=frozenset())


def _norm(notes: Notes, call: Call, came: Flow) -> Flow:
    place = calls.NORMS[call.bare]
    bound = {**dict(zip(("weight", "bias"), call.args[place:], strict=False)), **call.kwargs}
    weight = bound.get("weight")
    if came.made <= notes.rows:
        notes.note_factor("embedding", came)
    by = 1.0
    if isinstance(weight, Tensor) and id(weight) not in notes.flows and not notes.names(weight):
        by = calls.number_in(weight)
    came = replace(_unsized(came), marks=came.marks - {"turned"} | {"normed"}, factor=by)
    for key, what in (("weight", "norm_scale"), ("bias", "norm_bias")):
        if notes.names(bound.get(key)):
            came = beside(notes, bound[key], what, came)
    return came


def _sum(notes: Notes, flows: Flows, came: Flow) -> Flow | None:
    """A branch that joins the stream it came from, or two activations; None for scores."""
    for stream, other in (flows, flows[::-1]):
        scored = stream.scores or (other.scores and "stream" not in stream.marks)
        if not scored and notes.join_stream(stream, other):
            marks = (stream.marks - {"normed"}) | {"stream"}
            terms = added([*map(folded, flows)])
            came = replace(_unsized(came), past=stream.past, serial=stream.serial)
            return replace(came, terms=terms, marks=marks, scores=frozenset())
    if came.scores:
        return None
    terms = added([*map(folded, flows)] if came.factor is None else flows)
    came = replace(came, marks=came.marks - {"stream"}, terms=terms)
    if flows[0].made == flows[1].made:
        turned = all("turned" in one.marks for one in flows)
        if turned and came.factor != 1.0:  # as by cosines and sines, and not by masks
            by = [one.factor for one in flows if one.factor]
            size = 1.0 if math.isclose(math.hypot(*by), 1, rel_tol=0.02) else math.hypot(*by)
            return replace(came, factor=size if len(by) == 2 else None)
        if came.factor is not None:
            return came
    for one in flows:
        if one.made <= notes.rows:
            notes.note_factor("embedding", one)
    return _together(notes, flows, came)


def _together(notes: Notes, flows: Flows, came: Flow) -> Flow:
    """Activations side by side, or their sum, which numbers multiply each for itself."""
    made = [one for one in flows if one.made or "attended" in one.marks]
    apart = {one.factor for one in made}
    if len(apart) < 2:
        return replace(came, factor=apart.pop() if apart else 1.0)
    if not all(one.made for one in made):
        return came
    for one in made:
        notes.note_factor("term", one)
    pairs = ((one, name) for one in made for name in one.names)
    by = frozenset((name, n * (one.factor or 1.0)) for one, name in pairs for n in one.on(name))
    return replace(came, factor=1.0, numbers=by)


def _times(notes: Notes, call: Call, flows: Flows, came: Flow) -> Flow:
    power = calls.TIMES[call.bare]
    if power > 0 and len(call.ins) == 2 and call.ins[0] is call.ins[1]:
        came = replace(came, marks=came.marks | {"squared"})
    if len(flows) > 1:
        factor = times(flows[0].factor, flows[1].factor, power)
        if power < 0:  # a sum over another is as many terms as it has more
            below = max((n * k for _, n, k in flows[1].terms), default=1.0)
            one = flows[0].summed(1 / below) if below != 1 else flows[0]
            came = replace(came, terms=one.terms)
            if "root" in flows[1].marks - flows[0].marks and flows[0].names & flows[1].names:
                came = replace(came, marks=came.marks - {"root"} | {"normed"})
                for name in flows[0].vectors - flows[1].vectors:  # that acts before it divides
                    use = notes.uses[name][-1]
                    notes.uses[name][-1] = replace(use, marks=use.marks | {"normed"})
        came = replace(came, marks=came.marks - {"weighs", *(["one_hot"] if came.made else [])})
        shape = call.outs[0].shape
        whole = [notes.flow(t) for t in call.ins if id(t) in notes.flows and t.shape == shape]
        made = joined(whole or flows).made  # a smaller one is a gate of the other
        gain = times(flows[0].gain, flows[1].gain, power)
        apart = frozenset() if "normed" in came.marks else came.numbers
        return replace(came, factor=factor, gain=gain, made=made, numbers=apart)
    others = [t for t in call.ins if id(t) not in notes.flows]
    single = (t for t in others if t.numel() == 1 and came.scores)  # a learned temperature's start
    if numbers := calls.numbers(call, [*single, *(t for t in others if not notes.names(t))]):
        by = numbers[0] or 1.0  # of nothing no number is read
        return replace(came, factor=times(came.factor, by, power))
    many = came.scores and not notes.names(*call.ins)
    return replace(came, factor=None) if many else came


# Scores of attentions


def _softmax(notes: Notes, call: Call, came: Flow) -> Flow:
    if not came.scores:
        # Scores that a parameter made, as a router's or a pooling's, are of no attention.
        mark = "weighs" if len(came.names) == 1 and "summed" not in came.marks else "softmax"
        soft = replace(came, terms=frozenset(), marks=came.marks | {mark})
        return soft if call.bare == "softmax" else came
    size = max(max(notes.attentions[i].head_dim for i in came.scores), 1)  # what is summed but it
    came = replace(came, terms=frozenset((name, n / size, k) for name, n, k in came.terms))
    notes.spend(came)
    several = max((n for _, n, _ in came.terms), default=1.0)  # heads, added up
    came = replace(came, factor=times(came.factor, max(several, 1.0)))
    rebased(notes, came, call.ins[0], call.outs[0])
    for i in came.scores:
        notes.attentions[i].soft = True
    return replace(came, scores=frozenset(), weights=came.scores, factor=1.0, terms=frozenset())


def rebased(notes: Notes, came: Flow, before: Tensor, out: Tensor) -> float | None:
    """The factor on scores after a step that does more than multiply them (a bias, a mask, a soft
    cap, a mix of heads); from here on ratios are to its results."""
    factor = came.factor
    for one in (notes.attentions[i] for i in came.scores):
        if before is not out and len(came.scores) == 1:  # not in place: what was before is there
            factor = _measured(one, before, came.factor)
        one.factor = factor
        one.raw = out.detach().clone() if len(came.scores) == 1 else one.raw
    return factor


def _measured(one: Attention, scores: Tensor, followed: float | None) -> float | None:
    """The factor on query-key products in `scores`: the ratio to those before, if nearly all
    entries have one. `followed` is what the calls since then say; None if entries have several."""
    if one.raw is None or one.raw.numel() != scores.numel():
        return followed
    now, then = scores.detach().flatten(), one.raw.flatten()
    ratio = calls.common((now / then)[(now > -1e4) & (now != 0) & (then != 0)], 1e-2, 0.9)
    if ratio is None:
        return None
    found = times(ratio, one.factor)
    return followed if followed and found and math.isclose(found, followed, rel_tol=1e-2) else found
