"""Factors of the forward pass that two passes show: of attentions, embeddings, branches, logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from param_groups.model.judging import matched
from param_groups.model.notes import UNREAD, Attention, Notes
from param_groups.model.recording import Recorder
from param_groups.roles import Measured, Role

_NAMES = {"embedding": "embed_scale", "branch": "residual_multiplier", "logits": "logit_multiplier"}
_NAMES["readout"] = "logit_multiplier"  # a number on what it takes
_BESIDE = {"input", "readout", "term"}  # which count where they change with the width
Factors = dict[str, list[Measured]]  # of a tensor: what `plan` compares with the prescription's


def read_factors(small: Notes, large: Notes, doubts: list[str]) -> tuple[Factors, dict[str, str]]:
    """Factors by tensor, and all of them in words; what was not read is a doubt."""
    before, after = ([one for one in notes.attentions if one.soft] for notes in (small, large))
    if len(before) != len(after):
        doubts.append(f"there are {len(before)} attentions at one width, {len(after)} at the other")
    found, texts = Factors(), Counter[str]()
    for one, other in zip(before, after, strict=False):
        alike = math.isclose(one.factor or 0.0, other.factor or 0.0, rel_tol=0.02)
        if one.factor is None or other.factor is None or other.head_dim < 1:
            doubts.append("what an attention multiplies query-key products by was not read")
        else:
            texts[f"{other.factor:.4g}, head dimension {other.head_dim}{_power(one, other)}"] += 1
        grows = one.head_dim != other.head_dim  # else a factor that does fits no power of it
        makers = next((other.parts[place] for place in _places(other)), {})
        for name in makers:
            for size in (one, other) if grows or not alike else (other,):
                entry = Measured("attention_scale", size.factor, size.head_dim, grows)
                if entry not in found.setdefault(name, []):
                    found[name].append(entry)
    for name, uses in large.uses.items():
        if any("unread" in use.marks for use in uses):
            doubts.append(f"what multiplies {name} before it is used was not read")
    keys = [f"attention {i}" if len(texts) > 1 else "attention" for i in range(1, len(texts) + 1)]
    times = (text if n == 1 else f"{text} ({n} times)" for text, n in texts.items())
    said = dict(zip(keys, times, strict=True))
    for place, name in dict.fromkeys((*large.factors, *small.factors)):
        pairs = matched(*(notes.factors[place, name] for notes in (small, large)))
        for first, factor in dict.fromkeys(pairs) if place != "sum" else ():
            steady, unread = math.isclose(first, factor, rel_tol=0.02), UNREAD in (first, factor)
            if (
                steady
                and not unread
                and (place in _BESIDE or math.isclose(factor, 1.0, rel_tol=1e-6))
            ):
                continue
            beside = "" if steady else f" ({first:.4g} at the smaller width)"
            if unread:
                doubts.append(f"{place} {name}: what multiplies it was not read")
            else:
                said[f"{place} {name}"] = f"{factor:.4g}{beside}"
            for value, notes in ((factor, large), (first, small))[: 1 if steady else None]:
                entry = Measured(_NAMES.get(place, ""), float(f"{value:.7g}") or None)
                if place in ("logits", "readout") and not steady and name in large.parameters:
                    shapes = (one.parameters[name].shape for one in (notes, small, large))
                    sizes = {size for size, a, b in zip(*shapes, strict=True) if a != b}
                    entry = entry._replace(head_dim=max(sizes), grows=True) if sizes else entry
                if entry.factor and name in large.parameters and entry not in found.get(name, ()):
                    found.setdefault(name, []).append(entry)
    return found, said


def unnamed(model: nn.Module, run: Callable[[nn.Module], Any], roles: Mapping[str, Role]) -> str:
    """What one pass shows of attentions whose queries have another role; "" if there are none."""
    recorder = Recorder(model, *[dict(model.named_parameters())] * 2)
    with torch.compiler.set_stance("force_eager"), recorder:
        run(model)
    for one in (one for one in recorder.notes.attentions if one.soft):
        names = next((sorted(one.parts[place]) for place in _places(one)), [])
        kinds = {kind for name in names for kind in roles[name].parts}
        if kinds and not kinds & {Role.QUERY, Role.KEY, Role.VALUE}:
            by = "what was not read" if one.factor is None else f"{one.factor:.4g}"
            makes = f"{names[0]} ({min(kinds)}) makes queries, whose products with keys are"
            size = f"head dimension {one.head_dim}"
            return f"{makes} multiplied by {by} at {size}: give it the role query"
    return ""


def _places(one: Attention) -> Sequence[str]:
    """Those that parameters make, of which the first carries the factor."""
    return [place for place in ("query", "key", "value") if one.parts.get(place)]


def _power(one: Attention, other: Attention) -> str:
    """Of one head dimension the power is a guess: the number may hold a constant, too."""
    small, large, size = one.factor or 0.0, other.factor or 0.0, other.head_dim
    if min(small, large) <= 0 or size < 2:
        return ""
    if one.head_dim == size:
        return f", its power {math.log(large) / math.log(size):.3g}"
    power = math.log(large / small) / math.log(size / one.head_dim)
    return f", as its power {power:.3g} between the widths"
