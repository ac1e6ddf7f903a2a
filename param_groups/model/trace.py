"""Roles from use: what every tensor of a model is for, without a name.

    found = traced(build, run, widths=(64, 128))
    print(found)
    numbers = plan(build(1024), found.rules, Everett("mup", 1024, 64), lr=3e-3)

One forward pass at two widths says into which function a tensor goes, which of its axes is summed
over and which grow. Plain tensors at small widths: fake ones have no starts, gradients or ratios.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from param_groups.model.attention import Attention, Ranges, cuts, places
from param_groups.model.judging import (
    Reading,
    biases_of_readouts,
    inputs_of_branches,
    judge,
    last_norms,
)
from param_groups.model.notes import Notes
from param_groups.model.recording import Recorder
from param_groups.model.starts import read_starts
from param_groups.roles import (
    Layout,
    Measured,
    PlanError,
    Role,
    Rule,
    fans,
)

Build = Callable[..., nn.Module]
_HAND = "by hand"
_BY_HAND = "give its rule by hand: traced(..., known=[Rule({name!r}, role)])"
_PLACES = {
    "embedding": "embed_scale",
    "branch": "residual_multiplier",
    "logits": "logit_multiplier",
}


@dataclass(frozen=True)
class Trace:
    """What `traced` reads of a model.

    Args:
        readings: one of every tensor, in the model's order.
        parts: {tensor: {place: ranges of its outputs}}: which of its outputs make queries, keys and
            values; None where the model takes no gradients, which would tell.
        factors: {what: value}: what query-key products, embeddings, branches and logits are
            multiplied by, with the power of what grows.
        starts: {tensor: how a fresh one starts}, where that is not its role's start.
        doubts: what could not be read, a sentence each.
        rules: a list for `plan`; asking for it raises PlanError where a tensor has no role.
    """

    readings: tuple[Reading, ...]
    parts: Mapping[str, Mapping[str, Ranges]]
    factors: Mapping[str, str]
    starts: Mapping[str, str]
    doubts: tuple[str, ...]
    made: tuple[Rule, ...]
    blind: str = ""

    def __getitem__(self, name: str) -> Reading:
        """The reading of a tensor; KeyError if there is none."""
        for reading in self.readings:
            if reading.name == name:
                return reading
        raise KeyError(name)

    @property
    def rules(self) -> list[Rule]:
        """Rules by pattern for models of this kind, at any width and depth."""
        if self.blind:
            raise PlanError(self.blind)
        for reading in self.readings:
            if reading.problem:
                way_out = _BY_HAND.format(name=reading.name)
                raise PlanError(f"{reading.name!r} {reading.problem}; {way_out}")
        return [*self.made]

    def __str__(self) -> str:
        """A line per kind of tensor: use, axes, role, why; then factors, then doubts."""
        rows = Counter(map(_cells, self.readings))
        header = ("tensor", "shape", "use", "role", "fan_in", "start", "why")
        lines = [(f"{n} x {row[0]}" if n > 1 else row[0], *row[1:]) for row, n in rows.items()]
        wide = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
        text = [
            "  ".join(cell.ljust(n) for cell, n in zip(line, wide, strict=True)).rstrip()
            for line in (header, *lines)
        ]
        text += [f"{what}: {value}" for what, value in self.factors.items()]
        return "\n".join([*text, *(f"# check: {doubt}" for doubt in _pooled(self.doubts))])


def traced(
    build: Build,
    run: Callable[[nn.Module], Any],
    widths: Sequence[int] = (64, 128),
    *,
    depths: Sequence[int] = (),
    known: Sequence[Rule] = (),
    draw: Sequence[str] = (),
) -> Trace:
    """Reads roles, layouts, fans, starts and forward factors from one pass at each of two widths.

    Args:
        build: build(width) gives a fresh model on the CPU, with its own initial values.
        run: run(model) calls the model once, on a batch that uses every part of it.
        widths: two; axes that differ between them grow with the width.
        depths: two, if build(width, depth) takes one: a block holds what becomes more. Without them
            a residual branch holds what lies between a stream and a sum with it.
        known: rules for what cannot be read; they go before what is read.
        draw: patterns of tensors that `plan.initialise` draws though they start in another way.

    Returns:
        A `Trace`: print it; its `rules` are for `plan`.

    Raises:
        PlanError: widths that are no two, models that differ in more than sizes, a `run` that does
            not call the model. What could not be read is a doubt of the trace, and an error of its
            `rules` where a rate depends on it.

    Source: the powers of Yang et al. 2022, Table 8, follow from the axes that grow.

    >>> from torch import nn
    >>> layers = lambda n: nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2))
    >>> found = traced(layers, lambda model: model(torch.randn(3, 4)))
    >>> [str(rule.role) for rule in found.rules]
    ['patch_embedding', 'hidden_bias', 'readout', 'readout_bias']
    """
    if len(widths) != 2 or widths[0] == widths[1]:
        raise PlanError(f"traced: widths are two different ones, got {widths!r}")
    with torch.random.fork_rng(devices=[]):
        at_depth = functools.partial(build, depth=min(depths)) if depths else build
        small, large = (_record(at_depth, run, width) for width in sorted(widths))
        again = _fresh(at_depth, min(widths), seed=1)
        deeper = {}
        if depths:
            deeper = dict(_fresh(build, max(widths), 0, depth=max(depths)).named_parameters())
    if odd := sorted({*small.parameters} ^ {*large.parameters}):
        raise PlanError(f"traced: {odd[0]!r} is in the model of one of the widths {widths} alone")
    doubts = [*dict.fromkeys(large.doubts)]
    blind = ""
    if doubts:
        blind = f"traced: {doubts[0]}; trace the model's own code in its place, or write rules"
    at, at_small = places(large.attentions), places(small.attentions)
    readings = [judge(name, small, large, at.get(name, {})) for name in large.parameters]
    biases_of_readouts(readings)
    inputs_of_branches(readings, large)
    _as_siblings(readings)
    _by_depth(readings, deeper)
    last_norms(readings)
    attentions, said = _attentions(small, large, doubts)
    measured = _measured(small, large, attentions, said)
    read_starts(readings, small, large, again, draw)
    for reading in readings:
        reading.axes = _axes(reading, small, sorted(widths))
        if reading.role and reading.role.facts.kind == "hidden":
            halves = [
                cuts(where.get(reading.name, {}), notes.splits.get(reading.name, ()))
                for where, notes in ((at_small, small), (at, large))
            ]
            reading.parts = halves[1] if halves[0] == halves[1] else ()
        if reading.name in at and None in at[reading.name].values() and len(at[reading.name]) > 1:
            doubts.append(f"which outputs of {reading.name} make which place was not read")
    by_hand = _by_hand(known, readings, measured)
    doubts += [f"{r.name} {r.problem}" for r in readings if r.problem]
    return Trace(
        readings=tuple(readings),
        parts={name: at[name] for name in large.parameters if len(at.get(name, {})) > 1},
        factors=said,
        starts={r.name: r.start for r in readings if r.start},
        doubts=tuple(doubts),
        made=(*by_hand, *_rules([r for r in readings if r.why != _HAND], measured, large)),
        blind=blind,
    )


# Two passes


def _fresh(build: Build, width: int, seed: int, **depth: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build(width, **depth)
    if not isinstance(model, nn.Module):
        raise PlanError(f"traced: build({width}) gives an nn.Module, got {type(model).__name__}")
    return model


def _record(build: Build, run: Callable[[nn.Module], Any], width: int) -> Notes:
    """One pass in eval mode: dropout's 1 / (1 - p) is no factor of the model's."""
    model = _fresh(build, width, seed=0).eval()
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    if meta := [name for name, p in starts.items() if p.is_meta]:
        raise PlanError(f"traced: {meta[0]!r} is on the meta device; build the model on the CPU")
    closed = {name for name, t in starts.items() if t.numel() and not t.any()}
    for name, p in model.named_parameters():
        p.requires_grad_(p.is_floating_point())
        if name in closed:  # a closed branch would hide what is in it
            with torch.no_grad():
                p.add_(1e-3 * torch.randn_like(p))
    recorder = Recorder(model, starts)
    with torch.compiler.set_stance("force_eager"), recorder:
        run(model)
    if not recorder.called:
        raise PlanError("traced: run(model) has to call model(...) itself")
    return recorder.notes


# What is not of one tensor


def _as_siblings(readings: Sequence[Reading]) -> None:
    """Experts that no token chose in this pass are as those in the same list that one chose."""
    groups: dict[tuple[str, tuple[int, ...]], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((_starred(reading.name), reading.shape), []).append(reading)
    for group in groups.values():
        used = [r for r in group if r.role and not r.problem]
        if used and len({(r.role, r.layout, r.fan_in) for r in used}) == 1:
            for r in group:
                if r.problem.startswith("is taken by nothing"):
                    why = f"as {used[0].name}: no token came here"
                    vars(r).update(vars(replace(used[0], name=r.name, why=why)))


def _by_depth(readings: Sequence[Reading], deeper: Mapping[str, nn.Parameter]) -> None:
    """A block holds what becomes more in a deeper model, or grows in it as stacked layers do."""
    if not deeper:
        return
    more = {_starred(name) for name in deeper.keys() - {r.name for r in readings}}
    for r in readings:
        stacked = r.name in deeper and tuple(deeper[r.name].shape) != r.shape
        added = r.role is Role.RELATIVE_POSITION  # which the first block may hold for all
        r.inside = _starred(r.name) in more or stacked or added


def _attentions(
    small: Notes, large: Notes, doubts: list[str]
) -> tuple[list[tuple[Attention, Attention]], dict[str, str]]:
    """The attentions of both passes in pairs, and their factors in words."""
    a, b = ([one for one in r.attentions if one.soft] for r in (small, large))
    said: Counter[str] = Counter()
    if len(a) != len(b):
        doubts.append(f"there are {len(a)} attentions at one width and {len(b)} at the other")
    pairs = [*zip(a, b, strict=False)]
    for one, other in pairs:
        if one.factor is None or other.factor is None or other.head_dim < 1:
            doubts.append("what an attention multiplies query-key products by was not read")
        else:
            said[f"{other.factor:.4g}, head dimension {other.head_dim}{_power(one, other)}"] += 1
    keys = [f"attention {i}" if len(said) > 1 else "attention" for i in range(1, len(said) + 1)]
    texts = (text if n == 1 else f"{text} ({n} times)" for text, n in said.items())
    return pairs, dict(zip(keys, texts, strict=True))


def _power(one: Attention, other: Attention) -> str:
    """Of one head dimension the power is a guess: the number may hold a constant, too."""
    if (
        not (one.factor and other.factor and other.head_dim > 1)
        or min(one.factor, other.factor) < 0
    ):
        return ""
    if one.head_dim == other.head_dim:
        return f", its power {math.log(other.factor) / math.log(other.head_dim):.3g}"
    power = math.log(other.factor / one.factor) / math.log(other.head_dim / one.head_dim)
    return f", as its power {power:.3g} between the widths"


def _measured(
    small: Notes,
    large: Notes,
    attentions: Sequence[tuple[Attention, Attention]],
    said: dict[str, str],
) -> dict[str, list[Measured]]:
    """{tensor: factors that go with it}: what `plan` compares with the prescription's."""
    found: dict[str, list[Measured]] = {}
    for one, other in attentions:
        parts = (other.parts.get(place) for place in ("query", "key", "value"))
        makers = next((names for names in parts if names), {})
        grows = one.head_dim != other.head_dim
        for name in makers:
            for size in (one, other) if grows else (other,):
                entry = Measured("attention_scale", size.factor, size.head_dim, grows)
                if entry not in found.setdefault(name, []):
                    found[name].append(entry)
    for place, name in dict.fromkeys((*large.factors, *small.factors)):
        factor = large.factors.get((place, name), 1.0)
        before = small.factors.get((place, name), 1.0)
        steady = math.isclose(before, factor, rel_tol=0.02)
        if steady and (place == "input" or math.isclose(factor, 1.0, rel_tol=1e-6)):
            continue
        beside = "" if steady else f" ({before:.4g} at the smaller width)"
        said[f"{place} {name}"] = f"{factor:.4g}{beside}"
        if place in _PLACES and name in large.parameters:
            found.setdefault(name, []).append(Measured(_PLACES[place], float(f"{factor:.7g}")))
    return found


# Rules


def _by_hand(
    known: Sequence[Rule], readings: Sequence[Reading], measured: Mapping[str, Sequence[Measured]]
) -> list[Rule]:
    """Rules by hand with what was measured of their tensors, whose readings have their roles."""
    rules = []
    for rule in known:
        named = [reading for reading in readings if rule.matches(reading.name)]
        layout = rule.layout or rule.role.facts.layout
        for r in named:
            r.fan_in, r.fan_out = fans(r.name, r.shape, layout)
            r.role, r.layout, r.why, r.problem = rule.role, layout, _HAND, ""
        factors = dict.fromkeys(m for r in named for m in measured.get(r.name, ()))
        rules.append(replace(rule, measured=rule.measured or tuple(factors)))
    return rules


def _rules(
    readings: Sequence[Reading], measured: Mapping[str, Sequence[Measured]], large: Notes
) -> list[Rule]:
    """A rule per kind: a pattern over block numbers where that names its tensors and no other."""
    kinds: dict[Rule, list[str]] = {}
    for r in readings:
        if r.role is None or r.problem:
            continue
        layout = r.layout if r.layout is not r.role.facts.layout or _is_stack(r) else None
        trunk = not r.inside if r.role.facts.branch else None
        factors = tuple(measured.get(r.name, ()))
        rule = Rule(_starred(r.name), r.role, layout, r.scale, trunk, r.keep, factors, r.parts)
        kinds.setdefault(rule, []).append(r.name)
    rules: list[Rule] = []
    for rule, names in kinds.items():
        kept = 0  # numbers that the pattern keeps: all stages are not alike, all blocks of one are
        while names:
            groups: dict[str, set[str]] = {}
            for name in names:
                groups.setdefault(_starred(name, kept), set()).add(name)
            for pattern, group in groups.items():
                for one in (
                    replace(rule, pattern=text) for text in (pattern, pattern.replace("*", "#"))
                ):
                    if {name for name in large.parameters if one.matches(name)} == group:
                        rules.append(one)
                        names = [name for name in names if name not in group]
                        break
            kept += 1
    return rules


def _is_stack(r: Reading) -> bool:
    """Whether its axes may mean two things, so that a rule has to say which."""
    long = sum(size > 1 for size in r.shape)
    several = {Layout.LINEAR: len(r.shape) > 2, Layout.VECTOR: long > 1}
    return r.layout is not None and several.get(r.layout, False)


def _starred(name: str, kept: int = 0) -> str:
    """A name with * for its numbers but the first ones."""
    numbers = itertools.count()
    star = lambda found: found[0] if next(numbers) < kept else "*"
    return re.sub(r"(?<![^.])\d+(?![^.])", star, name)


def _axes(reading: Reading, small: Notes, widths: Sequence[int]) -> str:
    """A shape in terms of the width n, as 3n x n; a star marks an axis that grows otherwise."""
    sizes = []
    for i, size in enumerate(reading.shape):
        share = Fraction(size, widths[1])
        times, parts = share.as_integer_ratio()
        if i not in reading.grows:
            sizes.append(str(size))
        elif small.parameters[reading.name].shape[i] == share * widths[0]:
            sizes.append(f"{times if times > 1 else ''}n" + (f"/{parts}" if parts > 1 else ""))
        else:
            sizes.append(f"{size}*")
    return " x ".join(sizes)


def _pooled(texts: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", text) for text in texts)]


def _cells(r: Reading) -> tuple[str, ...]:
    layout = "" if r.role is None or r.layout is r.role.facts.layout else f" {r.layout}"
    start = r.start + ", kept" * r.keep
    role = f"{r.role or '?'}{layout}"
    return _starred(r.name), r.axes, r.use, role, str(r.fan_in), start, _starred(r.why)
