"""What theory expects of a check's slopes, from the numbers of its plans at two sizes.

Two exponents are expected of a quantity. The *aim* is what the plan's prescription promises under
its own assumptions. The *prediction* is what theory says of the first steps. They differ where a
prescription assumes less alignment than there is at first. Everett et al. (2024) assume that the
readout's initial weights and the change of its input are unaligned (omega = 1/2), and "no
alignment" that updates and activations are, too (alpha = 1/2). In the first steps of training both
exponents are measured to be 1. Hence the logits of standard and NTK grow as width^(1/2) at their
full-alignment rates.

Both follow from numbers: multiplier n^(-a), initial std n^(-b) and rate n^(-c) of every tensor,
read at the smallest and the largest width. For the papers' prescriptions these are the numbers that
the prescription gives, so a plan that was changed by hand is held to it. For any other prescription
they are the plan's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from measure.coordinates import pooled, scanned
from param_groups import Bordelon, Dinan, Everett, Numbers, Plan, Prescription, Role, Row, exponents
from param_groups.contract import OPTIMIZER_FAMILY
from param_groups.exponents import HALF, LAYERS, ZERO, Alignment, Layer, Parameterization
from param_groups.prescriptions import LAYER_TYPE

# The first steps: updates align with activations (alpha = 1), hidden weights do not align with
# the change of their input (omega = 1/2), the readout does (omega = 0.96 to 1.00 at the first step,
# see effective_theory). u = 0 leaves out the product of two changes, which is of second order.
FIRST_STEPS = Alignment(alpha=1, omega=HALF, u=0, omega_readout=1)
_NEAR = 0.1  # exponents of the theory differ by more
_PARTS = dict(zip(("embedding", "hidden", "logits"), LAYERS, strict=True))


# ------------------------------------------------------------------------------------------------
# What the numbers of a plan say


@dataclass(frozen=True)
class Powers:
    """One tensor's multiplier, initial size and rate as powers size^(-a), size^(-b), size^(-c).

    None stands for a number that is zero: b of a tensor that starts at zero, c of a frozen one.
    """

    a: Fraction
    b: Fraction | None
    c: Fraction | None


def power(small: float, large: float, ratio: float) -> Fraction | None:
    """p in large / small = ratio^p, exact for any but odd fractions; None if a number is zero."""
    if not (small > 0 and large > 0):
        return None
    return Fraction(math.log(large / small) / math.log(ratio)).limit_denominator(10**6)


def powers(small: Numbers | Row, large: Numbers | Row, ratio: float) -> Powers:
    """The exponents of a tensor from its numbers at two sizes, `ratio` apart."""
    sizes = (math.hypot(numbers.init_std, numbers.init_mean) for numbers in (small, large))
    b, c = power(*sizes, ratio), power(small.lr, large.lr, ratio)
    return Powers(
        -power(small.multiplier, large.multiplier, ratio),
        None if b is None else -b,
        None if c is None else -c,
    )


def prescription_of(plan: Plan) -> Prescription | None:
    """The prescription a plan was made by; None if it is not one of the papers'."""
    known = {"everett": Everett, "dinan": Dinan, "bordelon": Bordelon}
    fields = dict(plan.prescription)
    kind = known.get(str(fields.pop("name", "")))
    if kind is Bordelon:
        fields.pop("width")
    if isinstance(fields.get("alignment"), Mapping):
        fields["alignment"] = Alignment(**fields["alignment"])
    return kind(**fields) if kind else None


def assumed_alignment(plan: Plan) -> Alignment | None:
    """The alignment that a prescription's rates allow for; None for one rate and if it is unsaid.

    No number of a plan says it: Everett et al.'s rule, and any other with a field `alignment` that
    is "full", "none" or an `Alignment`, carries it. Dinan et al. and Bordelon et al. assume that
    the readout aligns with the change of its input.
    """
    described = plan.prescription
    if described.get("name") == "bordelon":
        return exponents.TENSOR_PROGRAMS
    if described.get("name") == "dinan":
        return None if described["strategy"] == "standard" else exponents.TENSOR_PROGRAMS
    value = described.get("alignment")
    if isinstance(value, Mapping):
        return Alignment(**value)
    return {"full": exponents.FULL_ALIGNMENT, "none": exponents.NO_ALIGNMENT}.get(value)


@dataclass(frozen=True)
class Theory:
    """The exponents of a prescription in one size; `alignment` as in `assumed_alignment`.

    `residual` is the exponent of the residual multiplier, size^(-residual), and `attention` the
    power of the size in head dimension times attention scale, which gradients of queries and keys
    pass.
    """

    size: str
    optimizer: str
    parameterization: Parameterization
    c: Mapping[str, Fraction]
    alignment: Alignment | None
    residual: Fraction = ZERO
    attention: Fraction = ZERO

    def change(self, part: str, alignment: Alignment) -> Fraction:
        """The power of the size in the change of a part's output."""
        if self.size == "depth":
            return self._change_over_depth(part)
        case = (self.parameterization, self.optimizer, alignment, self.c)
        return -dict(zip(_PARTS, exponents.residuals(*case), strict=True))[part]

    def init(self, part: str) -> Fraction:
        """The power of the size in a part's output at initialisation."""
        embedding, hidden, readout = (self.parameterization[layer].scale for layer in LAYERS)
        if part == "embedding":
            return -embedding
        if self.size == "depth":  # the blocks' outputs are independent and add up as a root
            stream = max(-embedding, HALF - self.residual - hidden)
            return stream if part == "hidden" else stream - readout
        return HALF - (readout if part == "logits" else hidden)

    def update(self, own: Powers, layer: str, attends: bool = False) -> Fraction:
        """The power of the size in multiplier times first update, -d (Everett et al., B.9)."""
        if self.optimizer == "adam":
            return -own.c - own.a
        if self.optimizer == "adafactor":
            return -own.c - own.a - (own.b or ZERO)
        gradient = own.a
        if layer != "readout":
            gradient += self.parameterization.readout.scale
        if layer == "hidden":
            gradient += self.residual - (self.attention if attends else ZERO)
        return -own.c - own.a - gradient

    def _change_over_depth(self, part: str) -> Fraction:
        """All blocks' updates add up in the residual stream, in one direction."""
        embedding, hidden, readout = (
            self.update(Powers(scale.a, scale.b, self.c[layer]), layer)
            for layer in LAYERS
            for scale in [self.parameterization[layer]]
        )
        if part == "embedding":
            return embedding
        stream = max(embedding, 1 - self.residual + hidden)
        if part == "hidden":
            return max(stream, hidden)
        return max(readout, stream - self.parameterization.readout.scale)


class Numbered:
    """Every tensor's exponents between the smallest and the largest of a check's plans."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.plans = plans[min(plans)], plans[max(plans)]
        self.rules = tuple(map(prescription_of, self.plans))
        if self.rules[0] == self.rules[1]:  # planned with a base model, whose fans decide
            self.rules = None, None
        self.ratio = max(plans) / min(plans)

    def rows(self, name: str) -> tuple[Row, Row]:
        """A tensor's rows at both sizes; all blocks have the numbers of the first."""
        if "*" not in name:
            return tuple(plan[name] for plan in self.plans)
        return tuple(
            next(row for row in plan.rows if pooled(row.name) == name) for plan in self.plans
        )

    def powers(self, name: str) -> Powers:
        """A tensor's exponents: those of the prescription, or of the plan where it is unknown."""
        given = [
            rule(Role(row.role), row.fan_in, row.fan_out) if rule else row
            for rule, row in zip(self.rules, self.rows(name), strict=True)
        ]
        return powers(*given, self.ratio)

    def factor(self, name: str) -> Fraction | None:
        """The power of the size in a factor of the forward pass; None where a plan has not kept it.

        An attention's scale is taken times the head dimension.
        """
        values = [
            _factor(plan, rule, name) for plan, rule in zip(self.plans, self.rules, strict=True)
        ]
        return None if None in values else power(*values, self.ratio)


def _factor(plan: Plan, rule: Prescription | None, name: str) -> float | None:
    if rule is not None:
        head_dim = getattr(rule, "head_dim", None)
        value = rule.forward(head_dim).get(name, 1.0)
        return value * head_dim if head_dim and name == "attention_scale" else value
    if plan.forward is None:
        return None
    found = [factor for factor in plan.forward if factor.name == name]
    return found[0].value * (found[0].head_dim or 1) if found else 1.0


_MATRICES = {  # biases and norms are no layers of the theory
    role: layer for role, layer in LAYER_TYPE.items() if not role.endswith(("bias", "scale"))
} | {Role.QKV: "hidden"}
# A kind of layer that a model lacks neither moves nor hides what others do.
_ABSENT = {
    "embedding": Powers(ZERO, ZERO, Fraction(9)),
    "hidden": Powers(ZERO, HALF, Fraction(9)),
    "readout": Powers(ZERO, HALF, Fraction(9)),
}


def theory_of(plans: Mapping[int, Plan]) -> Theory | None:
    """The exponents of a check's plans in the size in which they differ (`scanned`).

    Of several tensors of one kind the one that is updated most stands for the layer. None where
    nothing follows from the numbers: for an optimiser of no known family, for depths in plans that
    have not kept the residual multiplier, and where activations do not start at constant scale, as
    in Dinan et al.'s BART, whose hidden matrices start with one std at all widths: the theory of
    changes is about models that do.
    """
    numbered, size = Numbered(plans), scanned(plans)
    family, residual = _family(numbered.plans[0]), numbered.factor("residual_multiplier")
    if family is None or (size == "depth" and residual is None):
        return None
    layers = {layer: _fastest(numbered, layer, family) for layer in LAYERS}
    if any(own.b is None for own in layers.values()):
        return None
    theory = Theory(
        size,
        family,
        Parameterization(*(Layer(layers[layer].a, layers[layer].b) for layer in LAYERS)),
        {layer: layers[layer].c for layer in LAYERS},
        assumed_alignment(numbered.plans[0]),
        residual=-(residual or ZERO),
        attention=(numbered.factor("attention_scale") or ZERO) if size == "head_dim" else ZERO,
    )
    return theory if size == "depth" or _starts_at_constant_scale(theory) else None


def _family(plan: Plan) -> str | None:
    """The optimiser's family; Adam's where a prescription names none."""
    return OPTIMIZER_FAMILY.get(str(plan.prescription.get("optimizer", "adam")))


def _fastest(numbered: Numbered, layer: str, family: str) -> Powers:
    """The exponents of the matrix of a layer type whose update is the largest power."""
    names = [row.name for row in numbered.plans[0].rows if _MATRICES.get(Role(row.role)) == layer]
    moving = [own for own in map(numbered.powers, names) if own.c is not None]
    if not moving:
        return _ABSENT[layer]

    def d(own: Powers) -> Fraction:
        own_b = own.b or ZERO
        return own.c + own.a + {"adam": ZERO, "adafactor": own_b, "sgd": own.a}[family]

    chosen = min(moving, key=d)
    if chosen.b is None and layer == "readout":
        # What starts at zero has the scale of its first update, in the forward pass and for the
        # gradients of all other layers.
        return Powers(chosen.a, d(chosen) - chosen.a, chosen.c)
    return chosen


def _starts_at_constant_scale(theory: Theory) -> bool:
    """Everett et al., B.6, for exponents that may be approximate."""
    steady = max(abs(theory.init("embedding")), abs(theory.init("hidden"))) < _NEAR
    return steady and theory.init("logits") < _NEAR


# ------------------------------------------------------------------------------------------------
# What is expected of a slope


def expectation(
    theory: Theory | None, quantity: str, part: str
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a module's slope; None where nothing is known.

    The aim is what a prescription promises under its own assumptions, and constant scale where it
    has none or its numbers grow under these very assumptions. The prediction is what theory says of
    the first steps. Without a theory hidden activations and their changes, and the change of the
    logits, are expected to be constant.
    """
    if theory is None:
        unknown = quantity == "init" and part == "logits"
        return (None, None) if unknown else (ZERO, ZERO)
    if quantity == "init":
        aim = theory.init(part) if part == "logits" else ZERO
        return aim, theory.init(part)
    aim = min(theory.change(part, theory.alignment), ZERO) if theory.alignment else ZERO
    return aim, theory.change(part, FIRST_STEPS)


def has_exceptions(theory: Theory | None, quantity: str, part: str) -> bool:
    """Whether a slope may differ from its aim as the first steps differ from what a prescription
    assumes: only of one that assumes an alignment, and whose numbers do not grow under it."""
    if theory is None or theory.alignment is None or quantity == "init":
        return False
    return quantity == "update" or theory.change(part, theory.alignment) <= 0


def expected_update(
    name: str, plans: Mapping[int, Plan], theory: Theory | None
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a tensor's update. Without a theory Adam's moves by the rate."""
    numbered = Numbered(plans)
    rows, own = numbered.rows(name), numbered.powers(name)
    role = Role(rows[0].role)
    if own.c is None or (theory is None and _family(numbered.plans[0]) != "adam"):
        return None, None
    if theory and theory.optimizer == "adafactor" and own.b is None:
        return -own.c, -own.c  # scaled by the floor, not by itself
    layer = {Role.QKV: "hidden", Role.READOUT_BIAS: "readout"}.get(role) or LAYER_TYPE[role]
    attends = role in (Role.QUERY, Role.KEY)
    scaled = -own.c - own.a if theory is None else theory.update(own, layer, attends)
    # Of multiplier times update; a plan that has absorbed its multipliers updates by all of it.
    aim = scaled - power(rows[0].multiplier, rows[1].multiplier, numbered.ratio)
    if theory and attends and (theory.optimizer, theory.size) == ("sgd", "head_dim"):
        return aim, aim - HALF  # see _SGD_NOTE
    return aim, aim
