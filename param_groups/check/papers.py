"""What papers promise of a rule: the exponents of its numbers and of what they do.

Tensors are compared in the form without multipliers (Everett et al., B.2). There multiplier times
initial value goes as size^(-start), and the rate of multiplier times tensor as size^(-step).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from param_groups.families import SHIFT
from param_groups.rules import exponents
from param_groups.rules.exponents import (
    HALF,
    LAYERS,
    ZERO,
    Alignment,
    Layer,
    Parameterization,
    fraction,
)

ONE = Fraction(1)


@dataclass(frozen=True)
class Promise:
    """Exponents of a rule in one size, and where they come from.

    `start` and `step` are by kind of tensor (`kind_of`), and for queries and keys ("query") or
    tables of embeddings ("table") where these differ. `alignment` is what the rates allow for; None
    allows for all there is. `residual` is the exponent of the residual multiplier,
    size^(-residual). `attention` is the power of the size in head dimension times attention scale.
    `logit` is that of a factor on tied logits, `tied` whether they are an embedding's.

    `multiplier` is a, where the paper multiplies a kind by size^(-a): its constant epsilon, in the
    form without multipliers, goes as size^a. With `eps_follows` epsilon goes as the gradient does.
    `decay` is the power of the share that a step removes, in modes that do not hold the rate.
    """

    source: str
    size: str
    family: str
    start: Mapping[str, Fraction]
    step: Mapping[str, Fraction]
    alignment: Alignment | None = None
    residual: Fraction = ZERO
    attention: Fraction = ZERO
    logit: Fraction = ZERO
    tied: bool = False
    published: bool = True
    multiplier: Mapping[str, Fraction] = field(default_factory=dict)
    eps_follows: bool = False
    decay: Mapping[str, Fraction] = field(default_factory=dict)

    def init(self, part: str) -> Fraction:
        """The power of the size in a part's output at initialisation."""
        embedding, hidden, readout = (self.start[layer] for layer in LAYERS)
        if part == "embedding":
            return -embedding
        if self.size == "depth":  # the blocks' outputs are independent and add up as a root
            stream = max(-embedding, HALF - self.residual - hidden)
            return stream if part == "hidden" else stream - readout
        return HALF - (readout if part == "logits" else hidden)

    def change(self, part: str, alignment: Alignment) -> Fraction:
        """The power of the size in the change of a part's output."""
        if self.size == "depth":  # all blocks' updates add up in the stream, in one direction
            embedding, hidden, readout = map(self.update, LAYERS)
            stream = max(embedding, 1 - self.residual + hidden)
            logits = max(readout, stream - self.start["readout"])
            return {"embedding": embedding, "hidden": max(stream, hidden), "logits": logits}[part]
        table = Parameterization(*(Layer(0, self.start[layer]) for layer in LAYERS))
        c = {**{layer: self.step[layer] for layer in LAYERS}, "embedding": self.rate("table")}
        residuals = exponents.residuals(table, self.family, alignment, c)
        return -dict(zip(("embedding", "hidden", "logits"), residuals, strict=True))[part]

    def rate(self, own: str, kind: str = "embedding") -> Fraction:
        """The exponent of a rate, by a tensor's own name or by its kind."""
        return self.step.get(own, self.step.get(kind, ZERO))

    def update(self, kind: str, own: str = "") -> Fraction:
        """The power of the size in multiplier times first update, -d (Everett et al., B.9)."""
        step = self.rate(own, kind)
        if kind == "constant" or self.family == "adam":
            return -step
        if self.family == "adafactor":
            return -step - self.start[kind]
        return self.gradient(kind) - step + (self.attention if own == "query" else ZERO)

    def gradient(self, kind: str) -> Fraction:
        """The power of the size in a tensor's gradient at first (Everett et al., B.7)."""
        if kind in ("readout", "constant"):
            return ZERO
        return -self.start["readout"] - (self.residual if kind == "hidden" else ZERO)

    def epsilon(self, kind: str, own: str = "") -> Fraction:
        """The power of the size in epsilon, where it is added to the gradient's size."""
        if self.eps_follows:
            return self.gradient(kind)
        return self.multiplier.get(own, self.multiplier.get(kind, ZERO))


# What papers promise, each rule as (its fields, the size, the optimiser's family) -> Promise; None
# for one rate for all tensors and for a size that the rule does not know.


def _everett(rule: Mapping[str, Any], size: str, family: str) -> Promise | None:
    """Table 1; the depth's rule is Bordelon et al.'s, relative to a base depth."""
    if size == "depth":
        alpha = rule.get("alpha_depth")
        return None if alpha is None else over_depth(fraction(alpha), family)
    given = rule["alignment"]
    if given == "global":
        return None
    aligned = Alignment(**given) if isinstance(given, Mapping) else exponents.ALIGNMENTS[given]
    name = str(rule["parameterization"])
    layers = rule.get("hidden_layers") or 1
    c = exponents.solve(name, family, aligned, hidden_layers=layers).c
    table, shift = exponents.PARAMETERIZATION_TABLE[name], SHIFT[family]
    start = {layer: table[layer].scale for layer in LAYERS}
    step = {layer: c[layer] + shift * table[layer].a for layer in LAYERS}
    if extra := fraction(rule.get("embedding_exponent") or 0):
        step["table"] = step["embedding"] - extra
    multiplier = {layer: table[layer].a for layer in LAYERS}
    source = "Everett et al., Table 1"
    return Promise(source, size, family, start, step, aligned, multiplier=multiplier)


def _dinan(rule: Mapping[str, Any], size: str, family: str) -> Promise | None:
    """The meta-principled family, s of footnote 8; the standard runs have one rate."""
    known = {"neural_tangent": ZERO, "hybrid": HALF, "maximal_update": ONE}
    s = known.get(str(rule["strategy"]), None if rule["s"] is None else fraction(rule["s"]))
    if s is None or size != "width":
        return None
    bart = rule["init"] == "bart"
    # (1.99)-(1.107) for SGD; AdamW's (1.108)-(1.116) have the gradient's n^(-1/2), but at the head.
    step = {"embedding": -s, "hidden": 1 - s, "readout": ONE}
    if family == "adam":
        step = {"embedding": (1 - s) / 2, "hidden": Fraction(3, 2) - s / 2, "readout": ONE}
    # Section II 2C: BART's matrices start with 0.02, and word embeddings with 1, at all widths.
    start = {"embedding": ZERO, "hidden": ZERO if bart else HALF, "readout": (1 + s) / 2}
    source = "Dinan, Yaida & Zhang, (1.99) to (1.116) and footnote 8"
    logit = (1 + s) / 2 if bart else ZERO
    return Promise(source, size, family, start, step, exponents.TENSOR_PROGRAMS, logit=logit)


def _bordelon(rule: Mapping[str, Any], size: str, family: str) -> Promise | None:
    """Tables 1 and 2 and App. C: the powers of muP in the width, alpha_A in queries and keys."""
    sgd = family == "sgd"
    if size == "depth":
        alpha = fraction(rule["alpha_depth"])
        outside = dict.fromkeys(("embedding", "readout", "constant"), alpha - (HALF if sgd else 1))
        return replace(over_depth(alpha, family), multiplier=outside)
    step = {"embedding": -ONE if sgd else ZERO, "hidden": ZERO if sgd else ONE, "readout": ONE}
    start = {"embedding": ZERO, "hidden": HALF, "readout": ONE}
    spread = 1 - fraction(rule["alpha_attention"]) if size == "head_dim" else ZERO
    step["query"] = step["hidden"] + (2 if sgd else 1) * spread
    step["constant"] = ONE  # the listings of App. B divide the readout's bias by N H, too
    last = ONE if sgd else HALF
    multiplier = {"embedding": last - 1, "hidden": HALF, "readout": last, "constant": last}
    multiplier["query"] = HALF + spread
    source = "Bordelon et al., Tables 1 and 2"
    found = Promise(source, size, family, start, step, exponents.TENSOR_PROGRAMS, attention=spread)
    return replace(found, multiplier=multiplier)


def over_depth(alpha: Fraction, family: str) -> Promise:
    """Bordelon et al., Tables 1 and 2: rates in branches; other tensors do not depend on depth."""
    start = dict.fromkeys(LAYERS, ZERO)
    step = {**start, "hidden": 1 - (2 if family == "sgd" else 1) * alpha}
    source = "Bordelon et al., Tables 1 and 2, the depth"
    return Promise(source, "depth", family, start, step, exponents.TENSOR_PROGRAMS, residual=alpha)


PAPERS = {"everett": _everett, "dinan": _dinan, "bordelon": _bordelon}


def promised(rule: Mapping[str, Any], size: str, family: str) -> Promise | None:
    """What a rule's paper promises, changed by what stands around the rule.

    Epsilon as the gradient: Everett et al., section 4.3. Powers of the decay: -1/2 Fan et al. 2025,
    -1 Qiu et al. 2025, the depth's in the rate CompleteP. Muon's hidden matrices have one spectral
    norm, whatever rate the rule gives them: Bernstein et al. 2024.
    """
    paper = PAPERS.get(str(rule.get("name")))
    promise = paper(rule, size, family) if paper else None
    if promise is None:
        return None
    step, logit = promise.step, promise.logit
    if size == "depth":
        decay = {"hidden": -step["hidden"]} if rule.get("decay_depth") else {}
    else:
        decay = dict.fromkeys(("hidden", "readout"), fraction(rule.get("decay_exponent", 0)))
        if rule.get("optimizer") == "muon":
            step = {**step, **dict.fromkeys(step.keys() & {"hidden", "query"}, ONE)}
            source = f"{promise.source}, and one spectral norm for Muon (Bernstein et al. 2024)"
            promise = replace(promise, source=source, alignment=exponents.TENSOR_PROGRAMS)
    tied, follows = bool(rule.get("tied")), bool(rule.get("eps_per_layer"))
    logit += ONE if tied and size == "width" else ZERO
    return replace(promise, step=step, eps_follows=follows, decay=decay, tied=tied, logit=logit)
