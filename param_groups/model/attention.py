"""Attentions in a forward pass: what makes queries, keys and values, and the factor on their
products. An attention counts once its products enter a softmax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Of a parameter's outputs the ranges that make a query, key or value; None where that is not known.
Ranges = tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class Flow:
    """What an activation carries through a forward pass.

    Args:
        made: the parameters whose products it is, each with the index of its result.
        past: the parameters that it went through, as bits; a residual sum has the stream's.
        above: the activations that it was made from, as bits.
        serial: its own bit in the `above` of others.
        factor: numbers that it was multiplied by since; None where they are not known.
        scores, weights: attentions whose query-key products, whose softmaxes are in it.
        marks: attended, normed, chosen, input, one_hot, counted, stacked, stream, softmax.
    """

    made: frozenset[tuple[str, int]] = frozenset()
    past: int = 0
    above: int = 0
    serial: int = 0
    factor: float | None = 1.0
    scores: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    marks: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        """The parameters whose products it is."""
        return {name for name, _ in self.made}


@dataclass
class Attention:
    """One attention of a forward pass.

    `factor` is that on query-key products, in `raw`, the scores after the last step that did more
    than multiply them. `soft`: they entered a softmax. `parts`: who makes queries, keys and values.
    """

    head_dim: int
    factor: float | None
    raw: Tensor | None = None
    soft: bool = False
    parts: dict[str, dict[str, Ranges]] = field(default_factory=dict)


def times(a: float | None, b: float | None, power: float = 1) -> float | None:
    """The product of two factors; None where one is not known."""
    return None if a is None or not b else float(a * b**power)


def joined(flows: Sequence[Flow]) -> Flow:
    """What several activations carry together."""
    factors = {flow.factor for flow in flows if flow.made or flow.scores} or {1.0}
    past = above = 0
    for flow in flows:
        past, above = past | flow.past, above | flow.above
    none: frozenset[int] = frozenset()
    return Flow(
        made=frozenset[tuple[str, int]]().union(*(flow.made for flow in flows)),
        past=past,
        above=above,
        factor=factors.pop() if len(factors) == 1 else None,
        scores=none.union(*(flow.scores for flow in flows)),
        weights=none.union(*(flow.weights for flow in flows)),
        marks=frozenset[str]().union(*(flow.marks for flow in flows)),
    )


def ranges(place: Tensor, flow: Flow, results: Sequence[tuple[Tensor, int]]) -> dict[str, Ranges]:
    """Which outputs of the products behind a query, key or value reach it.

    They are those to which it has a gradient, whatever views, rotations and norms lie between.
    """
    found: dict[str, Ranges] = {}
    if "stream" in flow.marks:  # no product is between the residual stream and the place
        return found
    for name, at in sorted(flow.made):
        result, axis = results[at]
        try:
            noise = torch.randn_like(place)
            (slope,) = torch.autograd.grad(
                place, result, noise, retain_graph=True, allow_unused=True
            )
        except RuntimeError:  # the model takes no gradients
            found[name] = None
            continue
        if slope is not None:
            reached = (slope.abs().movedim(axis, 0).flatten(1).sum(1) > 0).int()
            ends = torch.diff(reached, prepend=reached[:1] * 0, append=reached[:1] * 0)
            edges = ends.nonzero().flatten().tolist()
            if edges:
                found[name] = tuple(zip(edges[::2], edges[1::2], strict=True))
    return found


def measured(one: Attention, scores: Tensor, followed: float | None) -> float | None:
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
    exact = followed and found and math.isclose(found, followed, rel_tol=1e-2)
    return followed if exact else found


def places(attentions: Sequence[Attention]) -> Mapping[str, dict[str, Ranges]]:
    """{parameter: {place: ranges of its outputs}} over all attentions."""
    found: dict[str, dict[str, Ranges]] = {}
    for one in attentions:
        for place, parts in one.parts.items() if one.soft else ():
            for name, reached in parts.items():
                found.setdefault(name, {})[place] = reached
    return found


def cuts(places: Mapping[str, Ranges], split: Sequence[int]) -> tuple[int, ...] | None:
    """The ratios of the matrices in a fused one, as in `Rule.parts`: () where no cut is known to
    separate them, None for a matrix that is one.

    They are the outputs that make queries, keys and values, one after the other, or those into
    which the result is `split`.
    """
    sizes = [*split]
    if len(places) > 1:
        if None in places.values():
            return ()
        ends = sorted({pair for reached in places.values() for pair in reached or ()})
        if len(ends) == 1:  # queries and keys in one
            return None
        apart = all(a[1] == b[0] for a, b in itertools.pairwise(ends)) and ends[0][0] == 0
        sizes = [b - a for a, b in ends] if apart and not split else sizes
        if not sizes:
            return ()
    if len(sizes) < 2:
        return None
    unit = math.gcd(*sizes)
    return tuple(size // unit for size in sizes)
