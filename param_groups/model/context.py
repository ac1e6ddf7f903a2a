"""Readings of a whole model: what a parameter is for takes what others are for, too."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from param_groups.model.judging import Reading, judge
from param_groups.model.notes import Notes, Ranges
from param_groups.roles import Layout, Role


def judged(small: Notes, large: Notes, deeper: Mapping[str, Sequence[int]]) -> list[Reading]:
    """Readings of all parameters; `deeper` are the shapes of a deeper model, if there is one."""
    at_small, at = _places(small), _places(large)
    readings = [judge(name, small, large, at.get(name, {})) for name in large.parameters]
    usual = statistics.median_low([r.grew for r in readings if r.grew != 1] or [1])
    for r in readings:
        entries = math.prod(r.shape) / math.prod(r.before)
        if r.role and r.layout is Layout.VECTOR and 1 < usual**1.4 < entries and not r.problem:
            r.problem = (
                f"has {entries:.3g} times as many entries at the larger width and goes into no "
                "product that a trace knows"
            )
        if r.grew != 1 and not usual**0.7 < r.grew < usual**1.4 and not r.problem:
            r.problem = (
                f"sums over {r.grew:.3g} times as many inputs at the larger width, where others "
                f"sum over {usual:.3g} times as many: its rates are those of plan(..., base=)"
            )
    _biases_of_readouts(readings)
    _inputs_of_branches(readings, large)
    _as_siblings(readings)
    more = {starred(name) for name in deeper.keys() - {r.name for r in readings}}
    for r in readings if deeper else ():
        # A block holds what becomes more in it, or grows as stacked layers do; a table of
        # attention logits may be in the first block for all.
        stacked = r.name in deeper and tuple(deeper[r.name]) != r.shape
        r.inside = starred(r.name) in more or stacked or r.role is Role.RELATIVE_POSITION
    for r in readings:  # a norm after blocks and in none of their branches is the last one
        if r.role is Role.NORM_SCALE and r.after_blocks and not r.inside:
            r.role = Role.FINAL_NORM_SCALE
        if r.role is not None and r.role.facts.kind == "hidden":
            before = _cuts(at_small.get(r.name, {}), small.splits.get(r.name, ()))
            r.parts = _cuts(r.places, large.splits.get(r.name, ()))
            r.parts = r.parts if r.parts == before else ()
    return readings


def _places(notes: Notes) -> dict[str, dict[str, Ranges]]:
    """{parameter: {place: ranges of its outputs}} over all attentions."""
    found: dict[str, dict[str, Ranges]] = {}
    for one in notes.attentions:
        for place, parts in one.parts.items() if one.soft else ():
            for name, reached in parts.items():
                found.setdefault(name, {})[place] = reached
    return found


def starred(name: str, numbers: int = 0) -> str:
    """A name with * for its numbers but so many first ones."""
    count = itertools.count()
    star = lambda found: found[0] if next(count) < numbers else "*"
    return re.sub(r"(?<![^.])\d+(?![^.])", star, name)


def _biases_of_readouts(readings: Sequence[Reading]) -> None:
    """A bias is in the branch of its matrix; that of what makes logits is added to them."""
    by_name = {r.name: r for r in readings}
    for reading in readings:
        owner = by_name.get(reading.why.removeprefix("of "))
        if owner and reading.why.startswith("of "):
            reading.inside = owner.inside
            if owner.role in (Role.READOUT, Role.ROUTER):
                reading.role = Role.READOUT_BIAS


def _inputs_of_branches(readings: Sequence[Reading], large: Notes) -> None:
    """A hidden matrix that reads the stream's width, in a branch that no attention ends, is the
    first of its block's MLP."""
    last = {r.name: r.fan_out for r in readings if r.role is Role.MLP_OUT}
    for reading in readings:
        ends = [ends for inside, _, ends in large.branches if reading.name in inside]
        widths = {last[name] for name, _ in frozenset().union(*ends) if name in last}
        if reading.role is Role.HIDDEN and reading.fan_in in widths:
            reading.role, reading.why = Role.MLP_IN, reading.why or "the first of a residual branch"


def _as_siblings(readings: Sequence[Reading]) -> None:
    """Experts that no token chose in this pass are as those in the same list that one chose."""
    groups: dict[tuple[str, tuple[int, ...]], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((starred(reading.name), reading.shape), []).append(reading)
    for group in groups.values():
        used = [r for r in group if r.role and not r.problem]
        if used and len({(r.role, r.layout, r.fan_in) for r in used}) == 1:
            for r in group:
                if r.problem.startswith("is taken by nothing"):
                    why = f"as {used[0].name}: no token came here"
                    vars(r).update(vars(used[0]) | {"name": r.name, "why": why})


def _cuts(places: Mapping[str, Ranges], split: Sequence[int]) -> tuple[int, ...] | None:
    """The ratios of the matrices in a fused one, as in `Rule.parts`: () where no cut is known to
    separate them, None for a matrix that is one.

    They are the outputs that make queries, keys and values, one after the other, or those into
    which the result is `split`.
    """
    sizes = [*split]
    if len(places) > 1:
        ends = sorted({pair for reached in places.values() for pair in reached or ()})
        if None in places.values() or not ends:
            return ()
        if len(ends) == 1:  # queries and keys in one
            return None
        apart = all(a[1] == b[0] for a, b in itertools.pairwise(ends)) and ends[0][0] == 0
        if apart and not split:
            sizes = [b - a for a, b in ends]
        if not sizes:
            return ()
    unit = math.gcd(*sizes)
    return tuple(size // unit for size in sizes) if len(sizes) > 1 else None
