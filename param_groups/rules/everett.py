"""Everett et al. 2024: four parameterisations x optimisers x alignment, at any width and base."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from param_groups import quantities
from param_groups.families import OPTIMIZER_FAMILY, of_families
from param_groups.prescription import Forward, Prescription, Size, Tensor
from param_groups.quantities import Numbers
from param_groups.roles import OUT, Facts, PlanError, choose
from param_groups.rules import exponents
from param_groups.rules.exponents import Alignment

# Everett C.1: where the embedding's initialisation is constant in n, its std is 0.01; "we otherwise
# omit constant factors", so muP's embedding has effective scale 1.
_EMBEDDING_STD = {"standard": 0.01, "ntk": 0.01, "mup": 1.0, "mean_field": 0.01}
# Everett C.1: query-key products are divided by sqrt(h) or by h.
_ATTENTION_EXPONENT = {"standard": -0.5, "ntk": -0.5, "mup": -1.0, "mean_field": -1.0}
# Keys that are prescriptions around this one.
_AROUND = {
    **dict.fromkeys(("alpha_depth", "base_depth"), "Depth(rule, depth=, base_depth=, alpha=)"),
    "decay_depth": "Depth(rule, depth=, base_depth=, decays=True)",
    "eps_per_layer": "EpsFollows(rule)",
    "decay_exponent": "Decay(rule, exponent=)",
    "spare_vectors": "Decay(rule, spare='vectors')",
}


@dataclass(frozen=True)
class Everett(Prescription):
    """Everett et al. 2024, Table 1 and section 4: eta_l = beta gamma_l (n/b)^(-c_l).

    `alignment` is "full", "none", "global" (c_l = 0: the one rate everybody uses) or an `Alignment`
    whose exponents the solver derives. If these depend on the number of consecutive hidden layers,
    as with any omega above 1/2, `hidden_layers` is needed. Init std and multiplier are absolute
    powers of n. A matrix whose fan-in is not n (the MLP's second) keeps the multiplier and rate of
    n and carries the constant in its std, so that its variance is 1/fan_in and the equivalence
    classes of App. B.2 hold exactly. Gradients go as (n/b)^(-g_l).

    Args:
        parameterization: "standard", "ntk", "mup" or "mean_field".
        width, base_width: n and b; rates at n = b are the global one times gamma_l.
        optimizer: one of the families "sgd", "adam" and "adafactor" (`OPTIMIZER_FAMILY`).
        alignment, hidden_layers: above.
        gamma_embedding, gamma_hidden, gamma_readout: constants on rates. That of a readout's bias,
            which no model of the paper has, is the embedding's, as for all tensors of fan-in 1.
        gamma_units: "tensor" as in the paper, or "effective": constants on the rates of multiplier
            times tensor at the base width (gamma_l / m for Adam, / m^2 for SGD, unchanged under
            parameter scaling). Parameterisations of one equivalence class then train alike.
        embedding_std: multiplier times std of embeddings and positions at every width, by default
            the paper's: 0.01, and 1 for muP.
        qk_exponent: the power of the head dimension on attention logits; by default -1/2, and -1
            for muP and mean field.
        depth: number of blocks, for scans over it; changes no number (`Depth` does).
        embedding_exponent: rates of embeddings (tokens, positions, patches) are multiplied by
            (n/b)^this: 1 beside "standard" and "global" keeps the embedding's rate while the one
            rate falls (Kalra & Barkeshli 2026), -1/2 beside muP is for large vocabularies (Hayou &
            Liu 2025).

    Raises:
        PlanError: an unknown name, a number out of range, fields that go together given apart; from
            a call, a gradient without a power of the width, where SGD needs one.

    Source: Everett et al. 2024, Table 1, App. B and C.1.

    >>> Everett("mup", 1024, 256)(Tensor("query", 1024, 1024)).lr
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
    embedding_std: float | None = None
    qk_exponent: float | None = None
    depth: int | None = None
    hidden_layers: int | None = None
    embedding_exponent: float = 0.0

    def __new__(cls, *_: Any, **fields: Any) -> Everett:
        """Names the prescription that a key of former versions has become."""
        for key in fields.keys() & _AROUND.keys():
            raise PlanError(f"Everett has no {key}; put {_AROUND[key]} around the rule")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        choose("parameterization", self.parameterization, exponents.PARAMETERIZATION_TABLE)
        quantities.check_finite("Everett", embedding_exponent=self.embedding_exponent)
        choose("gamma_units", self.gamma_units, ("tensor", "effective"))
        self.settle(of_families("sgd", "adam", "adafactor"))
        self._check_alignment()
        positive = ["width", "base_width", *(f"gamma_{layer}" for layer in exponents.LAYERS)]
        positive += ["embedding_std"] if self.embedding_std is not None else []
        quantities.check_positive("Everett", **{name: vars(self)[name] for name in positive})
        whole = {"depth": self.depth, "hidden_layers": self.hidden_layers}
        quantities.check_sizes("Everett", **{name: n for name, n in whole.items() if n is not None})
        if self.qk_exponent is not None:
            quantities.check_finite("Everett", qk_exponent=self.qk_exponent)

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

    @property
    def base(self) -> Size:
        """The base width."""
        return Size(self.base_width)

    def __call__(self, tensor: Tensor) -> Numbers:
        """Table 1 at this width; see the class for the constants."""
        facts, n = tensor.role.facts, self.at(tensor).width
        ratio = n / self.base_width
        known = facts.gradient and not tensor.summed
        if self.optimizer == "sgd" and not known:
            raise tensor.without_gradient("Everett")
        if facts.kind == "logits":
            # The logits change by m^2 lr g under SGD, by m lr under Adam and Adafactor. g is the
            # loss's gradient in the logits, of order one at every width in every parameterisation,
            # because no layer of size n comes after; the embedding's rate, in contrast, makes up
            # for gradients that shrink with n. So nothing may depend on n.
            lr = self._gamma("embedding", multiplied=False)
            return Numbers(0.0, quantities.CONSTANT, lr=lr, gradient=1.0 if known else None)
        layer = exponents.PARAMETERIZATION_TABLE[self.parameterization][facts.kind]
        multiplier = _power(n, -layer.a)
        mean, std = self._init(facts, tensor.fan_in, n, layer.b, multiplier)
        extra = 1.0
        if facts.kind == "embedding" and facts.axis == OUT:  # tokens, positions, patches
            extra = float(ratio**self.embedding_exponent)
        power = exponents.gradient_exponents(self.parameterization)[facts.kind]
        return Numbers(
            init_std=std,
            init_distribution=quantities.NORMAL if std > 0 else quantities.CONSTANT,
            init_mean=mean,
            multiplier=multiplier,
            lr=self._gamma(facts.kind) * _power(ratio, self.lr_exponent(facts.kind)) * extra,
            gradient=_power(ratio, power) if known else None,
        )

    def lr_exponent(self, layer: str) -> Fraction:
        """-c_l, the power of n/b in a layer type's learning rate."""
        if self.alignment == "global":
            return Fraction(0)
        case = (self.parameterization, OPTIMIZER_FAMILY[self.optimizer], self.alignment)
        return _solved(*case, self.hidden_layers or 1)[layer]

    def _gamma(self, layer_type: str, multiplied: bool = True) -> float:
        """The constant on the rate of a tensor, which a multiplier may follow."""
        gamma = float(vars(self)[f"gamma_{layer_type}"])
        if self.gamma_units == "tensor" or not multiplied:
            return gamma
        a = exponents.PARAMETERIZATION_TABLE[self.parameterization][layer_type].a
        at_base = Numbers(1.0, multiplier=_power(self.base_width, -a))
        return gamma / at_base.absorbed(self.optimizer).lr

    def _init(
        self, facts: Facts, fan_in: int, n: float, b: Fraction, multiplier: float
    ) -> tuple[float, float]:
        """(mean, std) of the initial values."""
        if facts.start != "normal":
            return (1.0 / multiplier if facts.start == "one" else 0.0), 0.0
        power = _power(n, -b)
        if facts.spread == "fan_in":  # inputs of order one, fan-in constant
            return 0.0, power / math.sqrt(fan_in)
        if facts.spread == "none":
            default = _EMBEDDING_STD[self.parameterization]
            return 0.0, power * (default if self.embedding_std is None else self.embedding_std)
        return 0.0, power * math.sqrt(n / fan_in)

    def forward(self, size: Size | None = None) -> Forward:
        """Attention's power: App. C.1, or the `qk_exponent` given."""
        power = _ATTENTION_EXPONENT[self.parameterization]
        power = power if self.qk_exponent is None else self.qk_exponent
        return Forward(attention=power, way_out="qk_exponent={power} in Everett")


@functools.cache  # a plan asks once per tensor
def _solved(
    name: str, family: str, alignment: str | Alignment, hidden_layers: int
) -> exponents.Exponents:
    return exponents.solve(name, family, alignment, hidden_layers=hidden_layers).lr


def _power(base: float, exponent: Fraction) -> float:
    return 1.0 if exponent == 0 else float(base) ** float(exponent)
