"""What a parameter is for, judged from its uses at two widths; no name decides."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from param_groups.model import calls
from param_groups.model.notes import UNREAD, Notes, Number, Ranges, Use
from param_groups.roles import Layout, PlanError, Role, fans

Pair = tuple[Use, Use]  # one use at the small and at the large width
_KNOWN = {"embedding", "bias", "norm_scale", "norm_bias", "scale", "added", "joined", "elementwise"}
# Of a matrix that stores its outputs first, and of one that stores its inputs first.
_PLAIN = (Layout.LINEAR, Layout.EXPERTS, Layout.OUTS_IN)
_TURNED = (Layout.TRANSPOSED, Layout.EXPERTS_TRANSPOSED, Layout.IN_OUTS, Layout.INS_OUT)


@dataclass
class Reading:
    """What a trace reads of one parameter.

    Args:
        name, shape: of the model at the larger width; `before` at the smaller one.
        use: the function that takes it, with the way to it.
        role, layout: None where they could not be read.
        fan_in, fan_out: inputs summed into one output, and outputs.
        start: how a fresh one starts, in words; `scale`, `keep` and `parts` as in `Rule`.
        grew: how many times as many inputs are summed as at the smaller width.
        inside: whether a residual branch holds it; `after_blocks`: whether it meets something
            that a branch has joined.
        places: of which attention's places its outputs are, and which outputs.
        why: what led to the role; `problem`: why there is none.
    """

    name: str
    shape: tuple[int, ...]
    before: tuple[int, ...]
    use: str = "nothing"
    role: Role | None = None
    layout: Layout | None = None
    fan_in: int = 1
    fan_out: int = 1
    start: str = ""
    scale: float = 1.0
    keep: bool = False
    parts: tuple[int, ...] | None = None
    grew: float = 1.0
    inside: bool = False
    after_blocks: bool = False
    places: Mapping[str, Ranges] = field(default_factory=dict)
    why: str = ""
    problem: str = ""


def judge(name: str, small: Notes, large: Notes, places: Mapping[str, Ranges]) -> Reading:
    """Reads one parameter that both models have; products come before lookups, these before sums.

    Uses are compared by function and path: caches and experts differ between two passes.
    """
    p, q = small.parameters[name], large.parameters[name]
    reading = Reading(name, tuple(q.shape), tuple(p.shape), places=places)
    if p.ndim != q.ndim:
        reading.problem = "has another number of axes at the other width"
        return reading
    pairs = _pairs(small.uses[name], large.uses[name])
    if not pairs:
        both = " in both models" if small.uses[name] or large.uses[name] else ""
        reading.problem = f"is taken by nothing{both}"
        return reading
    pair = min(pairs, key=lambda pair: 2 - 2 * bool(pair[1].summed) - (pair[1].op == "embedding"))
    use = pair[1]
    reading.use = f"{use.path} {use.op}".strip()
    reading.after_blocks = bool(large.fed[name] & large.joined)
    reading.inside = any(name in one or (places and name in by) for one, by, _ in large.branches)
    if not (use.op in _KNOWN or use.summed):
        reading.problem = f"goes into {use.op}, after which nothing is known of it"
    elif use.summed:
        _matrix(reading, pairs, pair, large)
    else:
        _vector_or_table(reading, use, large)
    reading.problem = reading.problem or _grown(name, pairs, small, large)
    if use.acts_as is not None and {*use.path.split()} & calls.ACTS:
        reading.why = f"{reading.why}, acts as {use.acts_as:.3g}".removeprefix(", ")
    return reading


def _pairs(small: Sequence[Use], large: Sequence[Use]) -> list[Pair]:
    """Uses in both passes; without numbers in their paths where another expert was chosen."""
    pairs: list[Pair] = []
    for numbers in ("\0", r"\d+"):
        first, second = defaultdict[tuple[str, str], list[Use]](list), Counter[tuple[str, str]]()
        for use in small:
            first[use.op, re.sub(numbers, "", use.path)].append(use)
        for use in large if not pairs else ():
            key = use.op, re.sub(numbers, "", use.path)
            if key in first:
                pairs.append((first[key][min(second[key], len(first[key]) - 1)], use))
            second[key] += 1
    return pairs


def _grown(name: str, pairs: Sequence[Pair], small: Notes, large: Notes) -> str:
    """What is wrong with sums and numbers around a tensor that grow with the width; "" if nothing
    is."""
    for place in ("sum", "input", "term", "stream"):
        for first, then in matched(*(notes.factors[place, name] for notes in (small, large))):
            sizes = f"{then:.4g} are added up, {first:.4g} at the smaller width"
            if place == "sum" and then > 1.2 * first:
                if first < 1:  # more divides than is added up
                    return f"makes results that count {_counts(first, then)}"
                return f"makes results of which {sizes}, and nothing divides the sum"
            how = "takes activations" if place == "input" else "makes one of two terms"
            by = f"by {then:.4g}, by {first:.4g} at the smaller width"
            if place != "sum" and UNREAD in (first, then):
                return f"{how} that are multiplied by what was not read"
            if place != "sum" and not math.isclose(first, then, rel_tol=0.02):
                return f"{how} that a number multiplies {by}; take it out of the forward pass"
    for one, other in pairs:
        rough = {"unsized", "unread"} & (one.marks | other.marks)  # what is drawn says its size
        if not math.isclose(one.factor, other.factor, rel_tol=0.2 if rough else 0.02):
            return f"counts {_counts(one.factor, other.factor, ' where it is used')}"
    return ""


def _counts(first: float, then: float, where: str = "") -> str:
    return (
        f"{then:.4g} times{where}, {first:.4g} times at the smaller width: a number multiplies it, "
        "or entries are added up; take the number out of the forward pass, or divide the sum"
    )


def matched(small: Sequence[Number], large: Sequence[Number]) -> list[tuple[float, float]]:
    """Numbers of two passes one by one; the least and the greatest where there are not as many
    and not the same ones. Of one that divides a sum what is left: no change with the width."""
    one: Number = (1.0, ())
    pairs = [*zip(small, large, strict=False)]
    if len(small) != len(large):
        alike = {*small, one} == {*large, one}
        pairs = [] if alike else [(min(small, default=one), max(large, default=one))]
    found = []
    for (first, fewer), (then, more) in pairs:
        ways = [(first, then), *((first * a, then * b) for a, b in zip(fewer, more, strict=False))]
        found.append(next((two for two in ways if math.isclose(*two, rel_tol=0.02)), ways[0]))
    return found


# Matrices


def _matrix(reading: Reading, pairs: Sequence[Pair], pair: Pair, large: Notes) -> None:
    """A matrix by the axes that grow: what it sums over, what it makes. The first line holds."""
    name, places, use = reading.name, reading.places, pair[1]
    sums, makes = (a != b for a, b in zip(pair[0].fans, use.fans, strict=True))
    products = [one for one in large.uses[name] if one.summed]
    mixed = {"attended" in one.marks for one in products}
    one_place = Role(min(places)) if len(places) == 1 else Role.QKV
    placed = Role.KEY_VALUE if {*places} == {"key", "value"} else one_place
    ends = {end for *_, closing in large.branches for end in closing}
    last = all((name, one.at) in ends for one in products)
    table = (
        ("one_hot" in use.marks, Role.TOKEN_EMBEDDING, "takes one-hot rows"),
        (sums and places and len(mixed) > 1, Role.HIDDEN, f"holds {_said(places)} and the output"),
        (sums and places, placed, f"reaches {_said(places)}"),
        ("grouped" in use.marks and not sums, Role.DEPTHWISE, "a kernel per channel"),
        (not sums and not makes, Role.WIDENING, "nothing in it grows"),
        (not sums and "input" in use.marks, Role.PATCH_EMBEDDING, "takes the model's input"),
        (not sums, Role.WIDENING, "sums over what does not grow"),
        (makes and "attended" in use.marks, Role.ATTENTION_OUTPUT, "takes what an attention mixed"),
        (makes and last, Role.MLP_OUT, "the last of a residual branch"),
        (makes, Role.HIDDEN, ""),
        (name in large.chosen, Role.ROUTER, "its results are sorted"),
        (name in large.output, Role.READOUT, "reaches the output"),
        (True, Role.NARROWING, "makes what does not grow"),
    )
    reading.role, reading.why = next((role, why) for holds, role, why in table if holds)
    if name in large.splits and not (sums and places):
        parts = " + ".join(map(str, large.splits[name]))
        reading.why = f"{reading.why}; split into {parts}".removeprefix("; ")
    reading.fan_in, reading.fan_out = use.fans
    reading.grew = use.fans[0] / pair[0].fans[0]
    reading.layout = _layout(reading, pair)
    if "one_hot" in use.marks:
        reading.fan_in, reading.layout = 1, Layout.TABLE
        readable = fans(name, reading.shape, Layout.TABLE)[1] == reading.fan_out
    else:
        readable = reading.layout is not None
    ways = {other.fans[0] for _, other in pairs if other.summed}
    if "unsized" in use.marks and not makes:
        reading.problem = "is normalised before use, so that its size has no effect"
    elif len(ways) > 1:
        reading.problem = f"is summed over in two ways, {sorted(ways)} terms"
    elif not readable:
        axes = f"sums over axes {use.summed} and makes {use.made}"
        reading.problem = f"{axes}, for which there is no layout"
    if any(other.op == "embedding" for _, other in pairs):
        reading.role, reading.layout = Role.TOKEN_EMBEDDING, Layout.TABLE
        reading.why = "looked up, and the readout too"
        if name not in large.tied:  # else `plan` sees it
            reading.problem = "is a table and the readout at once, which most rules refuse"


def _said(places: Mapping[str, Ranges]) -> str:
    """Places with the outputs that make them; of interleaved ones the first."""
    texts = []
    for place, reached in places.items():
        shown = ", ".join(f"{a}:{b}" for a, b in (reached or ())[:2])
        more = ", ..." if reached and len(reached) > 2 else ""
        texts.append(place if len(places) == 1 or not shown else f"{place} ({shown}{more})")
    return ", ".join(texts)


def _layout(reading: Reading, pair: Pair) -> Layout | None:
    """The layout under which the parameter's fans are those of its use at both widths."""
    use, shapes = pair[1], ((reading.shape, pair[1]), (reading.before, pair[0]))
    ins, outs = ([axis for axis in axes if axis is not None] for axes in (use.summed, use.made))
    turned = bool(ins and outs) and ins[0] < outs[0]
    every = {shape[0] for shape, _ in shapes} if outs[1:] and not outs[0] else set[int]()
    for experts in (1, *(every if len(every) == 1 else ())):  # then all of them at once
        for layout in (*_TURNED, *_PLAIN) if turned else (*_PLAIN, *_TURNED):
            sizes = [(one.fans[0], one.fans[1] / experts) for _, one in shapes]
            try:
                if [fans(reading.name, shape, layout) for shape, _ in shapes] == sizes:
                    return layout
            except PlanError:
                continue
    return None


# Vectors and tables


def _vector_or_table(reading: Reading, use: Use, notes: Notes) -> None:
    """A table that is looked up, added or joined; a vector that scales or is added."""
    op, looked_up, added = use.op, use.op == "embedding", use.op == "added"
    scored = any(reading.name in one.added for one in notes.attentions if one.soft)
    tokens = "input" in use.marks and "counted" not in use.marks
    rows = added and use.axes > 1 and "stacked" not in use.marks
    scale, normed = op in ("scale", "elementwise"), "normed" in use.marks
    gain = scale and normed and use.acts_as is not None and use.axes > 0
    of = next((mark for mark in sorted(use.marks) if mark.startswith("of ")), "added")
    table = (
        (scored, Role.RELATIVE_POSITION, "added to attention logits"),
        (looked_up and tokens, Role.TOKEN_EMBEDDING, "looked up by the model's input"),
        (looked_up, Role.POSITION_EMBEDDING, "looked up by numbers of its own"),
        (op == "joined", Role.POSITION_EMBEDDING, "joins the stream"),
        (rows, Role.POSITION_EMBEDDING, "added to the stream"),
        (gain or op == "norm_scale", Role.NORM_SCALE, "scales what is normed"),
        (scale, Role.LAYER_SCALE, "a gain"),
        (op == "norm_bias" or (added and normed), Role.NORM_BIAS, "added to what is normed"),
        (True, Role.HIDDEN_BIAS, of),
    )
    role, reading.why = next((role, why) for holds, role, why in table if holds)
    reading.role, reading.layout = role, role.facts.layout
    reading.inside |= scored
    if reading.layout is Layout.TABLE and len(reading.shape) == 1:
        reading.layout = Layout.VECTOR
    reading.fan_out = reading.shape[-1] if reading.shape else 1
    grows = [a != b for a, b in zip(reading.shape, reading.before, strict=True)]
    if reading.layout is Layout.TABLE and any(grows[:-1]) and not scored:
        axis = grows.index(True)
        reading.problem = f"is a table whose axis {axis} grows, where the last one should"
