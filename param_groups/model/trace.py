"""Roles from use: what every tensor of a model is for, without a name.

    found = traced(build, run, widths=(64, 128))
    print(found)
    numbers = plan(build(1024), found.rules, Everett("mup", 1024, 64), lr=3e-3)

One forward pass at two widths says into which function a tensor goes, which of its axes is summed
over and which grow. Plain tensors at small widths: fake ones have no starts, gradients or ratios.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from param_groups.model.context import judged, starred
from param_groups.model.factors import Factors, read_factors
from param_groups.model.judging import Reading
from param_groups.model.notes import Notes
from param_groups.model.recording import Recorder
from param_groups.model.starts import read_starts
from param_groups.roles import Layout, Measured, PlanError, Rule, fans
from param_groups.rows import align, unwrapped

Build = Callable[..., nn.Module]
Run = Callable[[nn.Module], Any]
_HAND = "by hand"
_INNER = re.compile(r"(?<=\.)\d+(?=\.)")  # a block's number


@dataclass(frozen=True, repr=False)
class Trace:
    """What `traced` reads of a model.

    Args:
        widths: at which it was built.
        readings: one of every tensor, in the model's order.
        factors: {what: value}: what query-key products, embeddings, branches and logits are
            multiplied by, with the power of what grows.
        doubts: what could not be read, a sentence each.
        made: the rules as far as they could be read.
        blind: why nothing can be read, if so.
    """

    widths: Sequence[int]
    readings: tuple[Reading, ...]
    factors: Mapping[str, str]
    doubts: tuple[str, ...]
    made: tuple[Rule, ...]
    blind: str = ""

    def __getitem__(self, name: str) -> Reading:
        """The reading of a tensor; KeyError if there is none."""
        return {reading.name: reading for reading in self.readings}[name]

    @property
    def rules(self) -> list[Rule]:
        """Rules by pattern for models of this kind, at any width and depth; PlanError where a
        tensor has no role."""
        if self.blind:
            raise PlanError(self.blind)
        for one in self.readings:
            if one.problem:
                way_out = f"give its rule by hand: traced(..., known=[Rule({one.name!r}, role)])"
                raise PlanError(f"{one.name!r} {one.problem}; {way_out}")
        return [*self.made]

    def _repr_html_(self) -> str:
        return unwrapped(str(self))

    def __repr__(self) -> str:
        """A line per kind of tensor: use, axes, role, why; then factors, then doubts."""
        rows = Counter(_cells(reading, self.widths) for reading in self.readings)
        header = ("tensor", "shape", "use", "role", "fan_in", "start", "why")
        lines = [(f"{n} x {row[0]}" if n > 1 else row[0], *row[1:]) for row, n in rows.items()]
        factors = [f"{what}: {value}" for what, value in self.factors.items()]
        doubts = dict.fromkeys(_INNER.sub("*", f"# check: {doubt}") for doubt in self.doubts)
        return "\n".join([align([header, *lines]), *factors, *doubts])


def traced(
    build: Build,
    run: Run,
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
    widths, deeper = sorted(widths), {}
    with torch.random.fork_rng(devices=[]):
        flat = functools.partial(build, depth=min(depths)) if depths else build
        again = dict(_fresh(flat, widths[0], seed=1).named_parameters())
        large = _record(flat, run, widths[1], again)
        small = _record(flat, run, widths[0], large.parameters)
        if depths:
            deep = _fresh(build, widths[1], depth=max(depths))
            deeper = {name: tuple(p.shape) for name, p in deep.named_parameters()}
    if odd := sorted({*small.parameters} ^ {*large.parameters}):
        raise PlanError(f"traced: {odd[0]!r} is in the model of one of the widths {widths} alone")
    shapes = [[p.shape for p in notes.parameters.values()] for notes in (small, large)]
    if shapes[0] == shapes[1]:
        raise PlanError(
            f"traced: no tensor of build({widths[1]}) is larger than in build({widths[0]})"
        )
    doubts, blind = [*dict.fromkeys([*large.doubts, *small.doubts])], ""
    if doubts:
        blind = f"traced: {doubts[0]}; trace the model's own code in its place, or write rules"
    readings = judged(small, large, deeper)
    factors, said = read_factors(small, large, doubts)
    read_starts(readings, small, large, again, draw)
    doubts += [
        f"which outputs of {r.name} make which place was not read"
        for r in readings
        if len(r.places) > 1 and None in r.places.values()
    ]
    rules = [*_by_hand(known, readings, factors), *_by_kind(readings, factors)]
    doubts += [f"{r.name} {r.problem}" for r in readings if r.problem]
    return Trace(widths, tuple(readings), said, tuple(doubts), tuple(rules), blind)


def _fresh(build: Build, width: int, seed: int = 0, **depth: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build(width, **depth)
    if not isinstance(model, nn.Module):
        raise PlanError(f"traced: build({width}) gives an nn.Module, got {type(model).__name__}")
    return model


def _record(build: Build, run: Run, width: int, other: Mapping[str, torch.Tensor]) -> Notes:
    """One pass in eval mode: dropout's 1 / (1 - p) is no factor of the model's."""
    model = _fresh(build, width).eval()
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if p.is_meta:
            raise PlanError(f"traced: {name!r} is on the meta device; build the model on the CPU")
        p.requires_grad_(p.is_floating_point())
        if p.numel() and not p.any():  # a closed branch would hide what is in it
            with torch.no_grad():
                p.add_(1e-3 * torch.randn_like(p))
    recorder = Recorder(model, starts, other)
    with torch.compiler.set_stance("force_eager"), recorder:
        run(model)
    if not recorder.called:
        raise PlanError("traced: run(model) has to call model(...) itself")
    return recorder.notes


# Rules


def _by_hand(known: Sequence[Rule], readings: Sequence[Reading], factors: Factors) -> list[Rule]:
    """Rules by hand with what was measured of their tensors, whose readings have their roles."""
    rules = []
    for rule in known:
        layout, named = rule.layout or rule.role.facts.layout, list[Measured]()
        for r in (reading for reading in readings if rule.matches(reading.name)):
            r.fan_in, r.fan_out = fans(r.name, r.shape, layout)
            r.role, r.layout, r.why, r.problem = rule.role, layout, _HAND, ""
            named += factors.get(r.name, ())
        rules.append(replace(rule, measured=rule.measured or tuple(dict.fromkeys(named))))
    return rules


def _by_kind(readings: Sequence[Reading], factors: Factors) -> list[Rule]:
    """A rule per kind: a pattern over block numbers where that names its tensors and no other."""
    kinds: dict[Rule, list[str]] = {}
    for r in readings:
        if r.role is None or r.problem or r.why == _HAND:
            continue
        long = sum(size > 1 for size in r.shape)  # axes that may mean two things, too
        several = {Layout.LINEAR: len(r.shape) > 2, Layout.VECTOR: long > 1}
        said = r.layout is not r.role.facts.layout or several.get(r.layout, False)
        trunk = not r.inside if r.role.facts.branch else None
        measured = tuple(factors.get(r.name, ()))
        layout = r.layout if said else None
        rule = Rule("", r.role, layout, r.scale, trunk, r.keep, measured, r.parts)
        kinds.setdefault(replace(rule, pattern=starred(r.name)), []).append(r.name)
    rules: list[Rule] = []
    for rule, names in kinds.items():
        left, numbers = {*names}, 0
        while left:  # a pattern has more numbers of the names, as stages are not alike
            for pattern in dict.fromkeys(starred(name, numbers) for name in names):
                group = {name for name in left if starred(name, numbers) == pattern}
                for text in (pattern, pattern.replace("*", "#")) if group else ():
                    one = replace(rule, pattern=text)
                    if {r.name for r in readings if one.matches(r.name)} == group:
                        rules.append(one)
                        left -= group
                        break
            numbers += 1
    return rules


# The text


def _cells(r: Reading, widths: Sequence[int]) -> tuple[str, ...]:
    layout = "" if r.role is None or r.layout is r.role.facts.layout else f" {r.layout}"
    shape = " x ".join(
        _size(size, before, widths) for size, before in zip(r.shape, r.before, strict=False)
    )
    start, why = r.start + ", kept" * r.keep, _INNER.sub("*", r.why)
    return starred(r.name), shape, r.use, f"{r.role or '?'}{layout}", str(r.fan_in), start, why


def _size(size: int, before: int, widths: Sequence[int]) -> str:
    """An axis in terms of the width n, as 3n; a star marks one that grows otherwise."""
    times = Fraction(size, widths[1])
    if size == before:
        return str(size)
    same, (n, parts) = times == Fraction(before, widths[0]), times.as_integer_ratio()
    return f"{n if n > 1 else ''}n{f'/{parts}' if parts > 1 else ''}" if same else f"{size}*"
