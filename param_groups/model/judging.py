"""What a parameter is for, judged from its uses at two widths; no name decides."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from param_groups.model import calls
from param_groups.model.attention import Ranges
from param_groups.model.notes import Notes, Use
from param_groups.roles import Layout, PlanError, Role, fans

Pair = tuple[Use, Use]  # one use at the small and at the large width
_VECTORS = {"bias", "norm_scale", "norm_bias", "scale", "added", "joined", "elementwise"}


@dataclass
class Reading:
    """What a trace reads of one parameter.

    Args:
        name, shape: of the model at the larger width; `grows` are the axes that differ, `axes`
            the shape in terms of the width.
        use: the function that takes it, with the way to it.
        role, layout: None where they could not be read.
        fan_in, fan_out: inputs summed into one output, and outputs.
        start: how a fresh one starts, in words; `scale`, `keep` and `parts` as in `Rule`.
        inside: whether a residual branch holds it; `after_blocks`: whether it meets something
            that a branch has joined.
        places: of which attention's places its outputs are, and which outputs.
        why: what led to the role; `problem`: why there is none.
    """

    name: str
    shape: tuple[int, ...]
    grows: tuple[int, ...] = ()
    axes: str = ""
    use: str = "nothing"
    role: Role | None = None
    layout: Layout | None = None
    fan_in: int = 1
    fan_out: int = 1
    start: str = ""
    scale: float = 1.0
    keep: bool = False
    parts: tuple[int, ...] | None = None
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
    reading = Reading(name, tuple(q.shape), places=places)
    if p.ndim != q.ndim:
        reading.problem = "has another number of axes at the other width"
        return reading
    reading.grows = tuple(i for i in range(q.ndim) if p.shape[i] != q.shape[i])
    first, second = ({(u.op, u.path): u for u in reversed(r.uses[name])} for r in (small, large))
    pairs = [(first[key], use) for key, use in reversed(second.items()) if key in first]
    if not pairs:  # another expert was chosen
        seen = [
            {(u.op, re.sub(r"\d+", "", u.path)): u for u in r.uses[name]} for r in (small, large)
        ]
        pairs = [(seen[0][key], use) for key, use in seen[1].items() if key in seen[0]]
    if not pairs:
        both = " in both models" if first or second else ""
        reading.problem = f"is taken by nothing{both}"
        return reading
    rank: Callable[[Pair], int] = lambda pair: 2 - 2 * bool(pair[1].summed) - _is_table(pair[1])
    pair = min(pairs, key=rank)
    use = pair[1]
    reading.use = f"{use.path} {use.op}".strip()
    reading.after_blocks = bool(large.fed[name] & large.joined)
    reading.inside = name in large.branch or bool(places and name in large.beside)
    if use.op == "a product of parameters" or not (
        use.summed or _is_table(use) or use.op in _VECTORS
    ):
        reading.problem = f"goes into {use.op}, after which nothing is known of it"
    elif use.summed:
        _matrix(reading, pairs, pair, p.shape, large, places)
        if any(_is_table(other) for _, other in pairs):
            reading.role, reading.layout = Role.TOKEN_EMBEDDING, Layout.TABLE
            reading.why = "looked up, and the readout too"
            if name not in large.tied:  # else `plan` sees it
                reading.problem = "is a table and the readout at once, which most rules refuse"
    else:
        _vector_or_table(reading, use, p.shape, q.shape, large)
    if use.acts_as is not None and {*use.path.split()} & calls.ACTS:
        reading.why = f"{reading.why}, acts as {use.acts_as:.3g}".removeprefix(", ")
    return reading


def _is_table(use: Use) -> bool:
    return use.op == "embedding"


def _grown(pair: Pair, axes: Sequence[int]) -> bool:
    return any(pair[0].shape[i] != pair[1].shape[i] for i in axes)


def _fans(use: Use) -> tuple[int, int]:
    sizes = [math.prod(use.shape[i] for i in axes) for axes in (use.summed, use.made)]
    return sizes[0], sizes[1]


def _matrix(
    reading: Reading,
    pairs: Sequence[Pair],
    pair: Pair,
    small: Sequence[int],
    large: Notes,
    places: Mapping[str, Ranges],
) -> None:
    """A matrix by the axes that grow: what it sums over, what it makes."""
    use, name = pair[1], reading.name
    sums, makes = _grown(pair, use.summed), _grown(pair, use.made)
    reading.fan_in, reading.fan_out = _fans(use)
    ways = {_fans(other)[0] for _, other in pairs if other.summed}
    if len(ways) > 1:
        reading.problem = f"is summed over in two ways, {sorted(ways)} terms"
    if "normalize" in use.path:
        reading.problem = "is normalised before use, so that its size has no effect"
    if "one_hot" in use.marks:
        reading.role, reading.why = Role.TOKEN_EMBEDDING, "takes one-hot rows"
        reading.fan_in, reading.layout = 1, Layout.TABLE
    elif sums and makes:
        products = [one for one in large.uses[name] if one.summed]
        last = all((name, one.at) in large.closing for one in products)
        reading.role = Role.HIDDEN
        if "attended" in use.marks:
            reading.role, reading.why = Role.ATTENTION_OUTPUT, "takes what an attention mixed"
        elif last:
            reading.role, reading.why = Role.MLP_OUT, "the last of a residual branch"
    elif makes:
        outside = "input" in use.marks
        reading.role = Role.PATCH_EMBEDDING if outside else Role.WIDENING
        reading.why = "takes the model's input" if outside else "sums over what does not grow"
    elif sums and name in large.chosen:
        reading.role, reading.why = Role.ROUTER, "its results are sorted"
    elif sums and name in large.output:
        reading.role, reading.why = Role.READOUT, "reaches the output"
    else:
        reading.role = Role.NARROWING if sums else Role.WIDENING
        reading.why = "makes what does not grow" if sums else "nothing in it grows"
    if "grouped" in use.marks and not sums:
        reading.role, reading.why = Role.DEPTHWISE, "a kernel per channel"
    mixed = {"attended" in one.marks for one in large.uses[name] if one.summed}
    if sums and places and len(mixed) > 1:
        reading.role, reading.why = Role.HIDDEN, f"holds {_said(places)} and the output"
    elif sums and places:
        reading.role, reading.why = _placed(places), f"reaches {_said(places)}"
    elif name in large.splits:
        parts = large.splits[name]
        reading.why = f"{reading.why}; split into {' + '.join(map(str, parts))}".removeprefix("; ")
    if reading.layout is None:
        reading.layout = _layout(reading, pair, small)
    if reading.problem:
        return
    if reading.layout is None or (
        reading.layout is Layout.TABLE
        and fans(name, reading.shape, Layout.TABLE)[1] != reading.fan_out
    ):
        axes = [tuple(use.own[i] for i in group) for group in (use.summed, use.made)]
        reading.problem = (
            f"sums over axes {axes[0]} and makes {axes[1]}, for which there is no layout"
        )


def _placed(places: Set[str] | Mapping[str, Ranges]) -> Role:
    if len(places) == 1:
        (place,) = places
        return Role(place)
    return Role.KEY_VALUE if {*places} == {"key", "value"} else Role.QKV


def _said(places: Mapping[str, Ranges]) -> str:
    """Places with the outputs that make them; of interleaved ones the first."""
    whole = len(places) == 1
    texts = []
    for place, reached in places.items():
        shown = ", ".join(f"{a}:{b}" for a, b in (reached or ())[:2])
        more = ", ..." if reached and len(reached) > 2 else ""
        texts.append(place if whole or not shown else f"{place} ({shown}{more})")
    return ", ".join(texts)


def _layout(reading: Reading, pair: Pair, small: Sequence[int]) -> Layout | None:
    """The layout under which the parameter's fans are those of its use at both widths."""
    use = pair[1]
    own = [[use.own[i] for i in axes if use.own[i] is not None] for axes in (use.summed, use.made)]
    turned = bool(own[0] and own[1]) and (own[0][0] or 0) < (own[1][0] or 0)
    order = [Layout.LINEAR, Layout.EXPERTS, Layout.TRANSPOSED, Layout.EXPERTS_TRANSPOSED]
    for layout in order[2:] + order[:2] if turned else order:
        try:
            shapes = (reading.shape, pair[1]), (small, pair[0])
            if all(fans(reading.name, shape, layout) == _fans(one) for shape, one in shapes):
                return layout
        except PlanError:
            continue
    return None


def _vector_or_table(
    reading: Reading, use: Use, small: Sequence[int], large: Sequence[int], notes: Notes
) -> None:
    """A table that is looked up, added or joined; a vector that scales or is added."""
    name, axes = reading.name, sum(n > 1 for n in use.shape)
    scored = {n for i, one in enumerate(notes.attentions) if one.soft for n in notes.on_scores[i]}
    if name in scored:
        reading.role, reading.why = Role.RELATIVE_POSITION, "added to attention logits"
        reading.inside = True
    elif _is_table(use):
        tokens = "input" in use.marks and "counted" not in use.marks
        reading.role = Role.TOKEN_EMBEDDING if tokens else Role.POSITION_EMBEDDING
        reading.why = (
            "looked up by the model's input" if tokens else "looked up by numbers of its own"
        )
    elif use.op == "joined" or (use.op == "added" and axes > 1 and "stacked" not in use.marks):
        reading.role = Role.POSITION_EMBEDDING
        reading.why = "joins the stream" if use.op == "joined" else "added to the stream"
    elif use.op in ("norm_scale", "scale", "elementwise"):
        normed = use.op == "norm_scale" or (
            "normed" in use.marks and use.acts_as is not None and axes > 0
        )
        reading.role = Role.NORM_SCALE if normed else Role.LAYER_SCALE
        reading.why = "scales what is normed" if normed else "a gain"
    elif use.op == "norm_bias" or (use.op == "added" and "normed" in use.marks):
        reading.role, reading.why = Role.NORM_BIAS, "added to what is normed"
    else:
        reading.role = Role.HIDDEN_BIAS
        reading.why = next((mark for mark in sorted(use.marks) if mark.startswith("of ")), "added")
    reading.layout = reading.role.facts.layout
    if reading.layout is Layout.TABLE and len(reading.shape) == 1:
        reading.layout = Layout.VECTOR
    reading.fan_out = reading.shape[-1] if reading.shape else 1
    table = reading.layout is Layout.TABLE and reading.role is not Role.RELATIVE_POSITION
    if table and reading.grows and reading.grows != (len(reading.shape) - 1,):
        reading.problem = (
            f"is a table whose axis {reading.grows[0]} grows, where the last one should"
        )


def biases_of_readouts(readings: Sequence[Reading]) -> None:
    """A bias of what makes logits is added to them."""
    ends = {r.name for r in readings if r.role in (Role.READOUT, Role.ROUTER)}
    inside = {r.name: r.inside for r in readings}
    for reading in readings:
        if reading.why.startswith("of "):
            owner = reading.why.removeprefix("of ")
            reading.inside = inside.get(owner, reading.inside)
            if owner in ends:
                reading.role = Role.READOUT_BIAS


def last_norms(readings: Sequence[Reading]) -> None:
    """A norm after blocks and in none of their branches is the last one."""
    for reading in readings:
        if reading.role is Role.NORM_SCALE and reading.after_blocks and not reading.inside:
            reading.role = Role.FINAL_NORM_SCALE


def inputs_of_branches(readings: Sequence[Reading], large: Notes) -> None:
    """A hidden matrix that reads the stream's width, in a branch that no attention ends, is the
    first of its block's MLP."""
    last = {r.name: r.fan_out for r in readings if r.role is Role.MLP_OUT}
    for reading in readings:
        ends = [ends for inside, ends in large.branches if reading.name in inside]
        widths = {last[name] for name in frozenset[str]().union(*ends) & {*last}}
        if reading.role is Role.HIDDEN and reading.fan_in in widths:
            reading.role, reading.why = Role.MLP_IN, reading.why or "the first of a residual branch"
