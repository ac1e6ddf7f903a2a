"""Everett et al. 2024: four parameterisations x optimisers x alignment, at any width and base.

CompleteP (Dey et al. 2025) is a name for muP with this module's rule for the depth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from param_groups.prescription import (
    CONSTANT,
    NORMAL,
    OPTIMIZER_FAMILY,
    Numbers,
    Prescription,
    check_flag,
    check_limits,
    check_positive,
    check_sizes,
    finite,
    of_families,
)
from param_groups.roles import BIASES, BLOCK, SCALES, TRUNK, PlanError, Role, choose
from param_groups.rules import exponents
from param_groups.rules.exponents import Alignment

# Which of the paper's three layer types a role belongs to (App. C.1). The paper's model has no
# biases; like every tensor of fan-in 1 they scale as the embedding layer (Yang et al. 2022, Table
# 8: "input weights and all biases"), the readout's apart (see `Everett.numbers`).
_EMBEDDINGS = (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING, Role.PATCH_EMBEDDING)
LAYER_TYPE = {
    **dict.fromkeys(_EMBEDDINGS, "embedding"),
    **dict.fromkeys((*SCALES, *BIASES), "embedding"),
    **dict.fromkeys((*BLOCK, Role.HIDDEN), "hidden"),
    Role.READOUT: "readout",
    Role.ROUTER: "readout",  # its outputs are as few at every width
    Role.DEPTHWISE: "embedding",  # fan-in constant
    Role.LORA_A: "hidden",  # sums over n
    Role.LORA_B: "embedding",  # sums over the rank
    Role.RELATIVE_POSITION: "embedding",
}
# Their gradients' powers of n are derived for Adam's family and Adafactor only, which need none.
_NOT_SGD = {Role.LORA_A, Role.LORA_B, Role.RELATIVE_POSITION, Role.ROUTER}

# Everett C.1: where the embedding's initialisation is constant in n, its std is 0.01; "we otherwise
# omit constant factors", so muP's embedding has effective scale 1.
_EMBEDDING_STD = {"standard": 0.01, "ntk": 0.01, "mup": 1.0, "mean_field": 0.01}
# Everett C.1: query-key products are divided by sqrt(h) or by h.
_ATTENTION_EXPONENT = {"standard": -0.5, "ntk": -0.5, "mup": -1.0, "mean_field": -1.0}


@dataclass(frozen=True)
class Everett(Prescription):
    """Everett et al. 2024, Table 1 and section 4: eta_l = beta gamma_l (n/b)^(-c_l).

    `alignment` is "full", "none", "global" (c_l = 0: the one rate everybody uses) or an `Alignment`
    whose exponents the solver derives. If these depend on the number of consecutive hidden layers,
    as with any omega above 1/2, `hidden_layers` is needed. With `eps_per_layer`, epsilon scales as
    the gradient does, (n/b)^(-g_l), and as its square in Adafactor, which adds epsilon to g^2. Init
    std and multiplier are absolute powers of n. `embedding_std` is the effective scale (multiplier
    times std) of embeddings and positions at every width, by default the paper's: 0.01, and 1 for
    muP. A matrix whose fan-in is not n (the MLP's second) keeps the multiplier, rate and epsilon of
    n and carries the constant in its std, so that its variance is 1/fan_in and the equivalence
    classes of App. B.2 hold exactly. `qk_exponent` is the power of the head dimension on attention
    logits (default -1/2; -1 for muP and mean field).

    A decay per step is multiplied by (n/b)^decay_exponent in matrices that sum over the width,
    whose rates fall with it: 0 is independent decay (App. F; mup; CompleteP), -1/2 Fan et al. 2025,
    -1 what torch's AdamW does under muP (Qiu et al. 2025). With `decay_depth` it takes the depth's
    factor on the rate, too. `spare_vectors` takes norms and biases out.

    Rates of embeddings (tokens, positions, patches) are multiplied by (n/b)^embedding_exponent: 1
    beside "standard" and "global" keeps the embedding's rate while the one rate falls (Kalra &
    Barkeshli 2026), -1/2 beside muP is for large vocabularies (Hayou & Liu 2025).

    The constants gamma_l multiply the rates of the tensors, as in the paper, or with `gamma_units`
    "effective" those of multiplier times tensor at the base width (gamma_l / m for Adam, / m^2 for
    SGD, unchanged under parameter scaling). Parameterisations of one equivalence class train alike
    at equal lr and equal effective constants. The constant of a readout's bias, which no model of
    the paper has, is the embedding's, as for all tensors of fan-in 1.

    The paper has no rule for the depth. `alpha_depth` in [1/2, 1] adds that of Bordelon et al.
    2024, relative to `base_depth` L_b as widths are to b, with r = L/L_b for `depth` L:

        branches times r^(-alpha); rates of tensors in branches times r^(alpha - 1) for Adam and
        parameter scaling, r^(2 alpha - 1) for SGD; their gradients go as r^(-alpha).

    Derivation: 2L branches that start independent add r^(-alpha) sqrt(L), at most of order one, to
    the stream, so activations and gradients in the stream have no power of L. Updates add up in one
    direction: a tensor whose branch's output changes by d moves the stream by L r^(-alpha) d, which
    is of order one at every L for d ~ r^(alpha - 1). Adam's d goes as its rate, as parameter
    scaling's (no initial size depends on L); SGD's as rate times gradient, r^(-alpha). What no
    branch holds (embeddings, last norm, readout) keeps its rate: its gradient has no power of L.
    Bordelon et al., Tables 1 and 2, give all tensors the branches' rate and undo it in the first
    and last layer by a multiplier, L^(1 - alpha) for Adam, L^(1/2 - alpha) for SGD: the same
    training. At alpha = 1 initial branches add r^(-1) sqrt(L) to the stream, which falls with L
    until the embedding carries it: take an `embedding_std` of order one there, as 0.01 does so at
    depths far beyond those in use. `depth` alone changes no number.

    Args:
        parameterization: "standard", "ntk", "mup" or "mean_field".
        width, base_width: n and b; rates at n = b are the global one times gamma_l.
        optimizer: one of the families "sgd", "adam" and "adafactor" (`OPTIMIZER_FAMILY`).
        alignment, hidden_layers, gamma_embedding, gamma_hidden, gamma_readout, gamma_units,
            eps_per_layer, embedding_std, qk_exponent, embedding_exponent: above.
        depth, base_depth, alpha_depth: L, L_b and alpha.
        decay_exponent, decay_depth, spare_vectors: powers of the decay, and what has none.

    Raises:
        PlanError: an unknown name, a number out of range, fields that go together given apart.

    Source: Everett et al. 2024, Table 1, App. B and C.1; Bordelon et al. 2024 for the depth.

    >>> Everett("mup", 1024, 256)(Role.QUERY, 1024, 1024).lr
    0.25
    """

    parameterization: str
    width: float
    base_width: float
    optimizer: str = "adam"
    alignment: str | Alignment = "full"
    gamma_embedding: float = 1.0
    gamma_hidden: float = 1.0
    gamma_readout: float = 1.0
    gamma_units: str = "tensor"
    eps_per_layer: bool = False
    embedding_std: float | None = None
    qk_exponent: float | None = None
    depth: int | None = None
    base_depth: float = 1.0
    alpha_depth: float | None = None
    hidden_layers: int | None = None
    embedding_exponent: float = 0.0
    decay_exponent: float = 0.0
    decay_depth: bool = False
    spare_vectors: bool = False

    def __post_init__(self) -> None:
        choose("parameterization", self.parameterization, exponents.PARAMETERIZATION_TABLE)
        for flag in ("eps_per_layer", "decay_depth", "spare_vectors"):
            check_flag(f"Everett: {flag}", getattr(self, flag))
        for name in ("embedding_exponent", "decay_exponent"):
            if not finite(getattr(self, name)):
                raise PlanError(f"Everett: {name} must be finite, got {getattr(self, name)!r}")
        choose("gamma_units", self.gamma_units, ("tensor", "effective"))
        self._settle(of_families("sgd", "adam", "adafactor"))
        self._check_alignment()
        positive = ["width", "base_width", "base_depth"]
        positive += [f"gamma_{layer}" for layer in exponents.LAYERS]
        positive += ["embedding_std"] if self.embedding_std is not None else []
        check_positive("Everett", **{name: getattr(self, name) for name in positive})
        whole = {"depth": self.depth, "hidden_layers": self.hidden_layers}
        check_sizes("Everett", **{name: n for name, n in whole.items() if n is not None})
        if self.qk_exponent is not None and not finite(self.qk_exponent):
            raise PlanError(f"Everett: qk_exponent must be finite, got {self.qk_exponent!r}")
        if self.alpha_depth is None and self.base_depth != 1.0:
            raise PlanError("Everett: base_depth acts with alpha_depth; give both or neither")
        if self.alpha_depth is not None:
            check_limits("Everett", alpha_depth=self.alpha_depth)
            if self.depth is None:
                raise PlanError("Everett: alpha_depth needs depth, the number of blocks")

    def lr_exponent(self, layer: str) -> Fraction:
        """-c_l, the power of n/b in a layer type's learning rate."""
        if self.alignment == "global":
            return Fraction(0)
        case = (self.parameterization, OPTIMIZER_FAMILY[self.optimizer], self.alignment)
        return _solved(*case, self.hidden_layers or 1)[layer]

    def _check_alignment(self) -> None:
        if not isinstance(self.alignment, Alignment):
            choose("alignment", self.alignment, (*exponents.ALIGNMENTS, "global"))
            if self.hidden_layers is not None:
                raise PlanError("Everett: hidden_layers goes with an Alignment; leave it out")
            return
        case = (self.parameterization, OPTIMIZER_FAMILY[self.optimizer], self.alignment)
        if self.hidden_layers is None and _solved(*case, 1) != _solved(*case, 2):
            raise PlanError(
                "Everett: under this Alignment every hidden layer changes the stable rates; give "
                "hidden_layers, how many follow each other (with an omega of 1/2 there is no need)"
            )

    def describe(self) -> dict[str, object]:
        """The fields by name; without those that came later, unless they act."""
        fields = super().describe()
        later = "hidden_layers gamma_units embedding_exponent decay_exponent decay_depth".split()
        idle = {key for key in (*later, "spare_vectors") if fields[key] == getattr(Everett, key)}
        return {key: value for key, value in fields.items() if key not in idle}

    def numbers(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """Table 1 at this width, then the rule for the depth; see the class for the constants."""
        found = self._at_width(role, fan_in)
        if self.spare_vectors and role in SCALES | BIASES:
            found = replace(found, decay=0.0)
        if self.alpha_depth is None or role in TRUNK:  # where gradients and rates know no depth
            return found
        gradient = self.residual_multiplier()
        lr = self._depth_ratio ** (self.alpha_depth - 1)
        lr /= gradient if self.optimizer == "sgd" else 1.0
        eps = gradient ** (2 if self.optimizer == "adafactor" else 1) if self.eps_per_layer else 1.0
        decay = found.decay * (lr if self.decay_depth else 1.0)
        return replace(found, lr=found.lr * lr, eps=found.eps * eps, decay=decay)

    def check_roles(self, roles: Collection[str]) -> None:
        """The rule for the depth gives the last norm another rate than those in branches."""
        norms = {Role.NORM_SCALE, Role.FINAL_NORM_SCALE} & set(roles)
        if self.alpha_depth is not None and norms == {Role.NORM_SCALE}:
            raise PlanError(
                "Everett: alpha_depth gives norms in branches another rate than the last one: use "
                "a rule that gives the last norm's scale the role 'final_norm_scale'"
            )

    def _at_width(self, role: Role, fan_in: int) -> Numbers:
        """Table 1, which does not know the number of blocks."""
        layer_type = LAYER_TYPE[role]
        if role in _NOT_SGD and (self.optimizer == "sgd" or self.eps_per_layer):
            raise PlanError(
                f"Everett: there is no power of the width for the gradient of a {role}; use adam "
                "or adafactor, without eps_per_layer"
            )
        if role is Role.RELATIVE_POSITION:  # added to logits: as a readout's bias
            return Numbers(0.0, CONSTANT, lr=self._gamma(layer_type, multiplied=False))
        if role is Role.READOUT_BIAS:
            # The logits change by m^2 lr g under SGD, by m lr under Adam and Adafactor. g is the
            # loss's gradient in the logits, of order one at every width in every parameterisation,
            # because no layer of size n comes after; the embedding's rate, in contrast, makes up
            # for gradients that shrink with n. So nothing may depend on n.
            return Numbers(0.0, CONSTANT, lr=self._gamma(layer_type, multiplied=False))
        layer = getattr(exponents.PARAMETERIZATION_TABLE[self.parameterization], layer_type)
        multiplier = _power(self.width, -layer.a)
        mean, std = self._init(role, layer_type, fan_in, layer.b, multiplier)
        extra = float(self._ratio**self.embedding_exponent) if role in _EMBEDDINGS else 1.0
        return Numbers(
            init_std=std,
            init_distribution=NORMAL if std > 0 else CONSTANT,
            init_mean=mean,
            multiplier=multiplier,
            lr=self._gamma(layer_type) * _power(self._ratio, self.lr_exponent(layer_type)) * extra,
            eps=_power(self._ratio, self._eps_exponent(layer_type)),
            decay=self._decay(layer_type),
        )

    def scaled(self, ratio: float) -> Everett:
        """The rule at `ratio` times the base width, which is the width of the base model."""
        return replace(self, width=self.base_width * ratio)

    def follows_gradients(self) -> bool:
        """SGD's rates do, and with `eps_per_layer` epsilons."""
        return self.optimizer == "sgd" or self.eps_per_layer

    def outside_branches(self) -> Everett:
        """The rule without the depth's."""
        return self if self.alpha_depth is None else replace(self, alpha_depth=None, base_depth=1.0)

    def attention_exponent(self) -> float:
        """-1/2 or -1, App. C.1, or the `qk_exponent` given."""
        if self.qk_exponent is None:
            return _ATTENTION_EXPONENT[self.parameterization]
        return self.qk_exponent

    def residual_multiplier(self) -> float:
        """(L/L_b)^(-alpha_depth); 1 without a rule for the depth."""
        return float(self._depth_ratio ** -(self.alpha_depth or 0.0))

    @property
    def _ratio(self) -> float:
        return self.width / self.base_width

    @property
    def _depth_ratio(self) -> float:
        return (self.depth or self.base_depth) / self.base_depth

    def _gamma(self, layer_type: str, multiplied: bool = True) -> float:
        """The constant on the rate of a tensor, which a multiplier may follow."""
        gamma = float(getattr(self, f"gamma_{layer_type}"))
        if self.gamma_units == "tensor" or not multiplied:
            return gamma
        a = getattr(exponents.PARAMETERIZATION_TABLE[self.parameterization], layer_type).a
        at_base = Numbers(1.0, multiplier=_power(self.base_width, -a))
        return gamma / at_base.absorbed(self.optimizer).lr

    def _eps_exponent(self, layer_type: str) -> Fraction:
        if not self.eps_per_layer:
            return Fraction(0)
        gradient = exponents.gradient_exponents(self.parameterization)[layer_type]
        return 2 * gradient if self.optimizer == "adafactor" else gradient

    def _decay(self, layer_type: str) -> float:
        """The factor on the decay per step at this width."""
        sums = layer_type in ("hidden", "readout")
        return float(self._ratio**self.decay_exponent) if sums and self.decay_exponent else 1.0

    def _init(
        self, role: Role, layer_type: str, fan_in: int, b: Fraction, multiplier: float
    ) -> tuple[float, float]:
        """(mean, std) of the initial values."""
        if role in SCALES:
            return 1.0 / multiplier, 0.0
        if role in BIASES or role is Role.LORA_B:
            return 0.0, 0.0
        power = _power(self.width, -b)
        if role in (Role.PATCH_EMBEDDING, Role.DEPTHWISE):  # inputs of order one, fan-in constant
            return 0.0, power / math.sqrt(fan_in)
        if layer_type == "embedding":
            default = _EMBEDDING_STD[self.parameterization]
            return 0.0, power * (default if self.embedding_std is None else self.embedding_std)
        return 0.0, power * math.sqrt(self.width / fan_in)


def CompleteP(
    width: float,
    base_width: float,
    depth: int,
    base_depth: float,
    *,
    alpha: float = 1.0,
    **fields: Any,
) -> Everett:
    """CompleteP (Dey et al. 2025): muP in the width, branches and rates in the depth.

    With m = width / base_width and r = depth / base_depth, for Adam: matrices in blocks have rate
    1/m r^(alpha-1) and epsilon 1/m r^(-alpha), branches are multiplied by r^(-alpha), attention by
    1/h; norms and biases do not decay, and a decay per step falls as r^(alpha-1) in blocks. Epsilon
    of the last norm and the embedding is 1/m (Equation 40 of the authors' code of 2025; its older
    form has one epsilon for all tensors).

    Args:
        width, base_width: of the model and of the one that was tuned.
        depth, base_depth: their numbers of blocks.
        alpha: in [1/2, 1]; the paper's is 1.
        fields: others of `Everett`: `qk_exponent`, constants.

    Returns:
        The `Everett` prescription that has these numbers.

    Raises:
        PlanError: as `Everett`.

    Source: Dey et al. 2025, "Don't be lazy: CompleteP", Table 1.

    >>> CompleteP(1024, 256, depth=16, base_depth=4).residual_multiplier()
    0.25
    """
    fields = {"eps_per_layer": True, "spare_vectors": True, "decay_depth": True, **fields}
    fields |= {"depth": depth, "base_depth": base_depth, "alpha_depth": alpha}
    return Everett("mup", width, base_width, **fields)


@functools.cache  # a plan asks once per tensor
def _solved(
    name: str, family: str, alignment: str | Alignment, hidden_layers: int
) -> exponents.Exponents:
    return exponents.solve(name, family, alignment, hidden_layers=hidden_layers).lr


def _power(base: float, exponent: Fraction) -> float:
    return 1.0 if exponent == 0 else float(base) ** float(exponent)
