"""Dinan, Yaida & Zhang 2023: standard runs and the meta-principled family, for AdamW and SGD."""

import math
from dataclasses import dataclass, replace

from param_groups.prescription import Forward, Prescription, Size, Tensor
from param_groups.quantities import CONSTANT, NORMAL, UNIFORM, Numbers, check_sizes, finite
from param_groups.roles import PlanError, Role, choose


@dataclass(frozen=True)
class Draw:
    """An initial distribution: variance `c`/fan_in with `per_fan_in`, else variance `c`."""

    distribution: str
    c: float
    per_fan_in: bool = True

    def std(self, fan_in: int) -> float:
        """The standard deviation at a fan-in."""
        return math.sqrt(self.c / fan_in if self.per_fan_in else self.c)


# Part II, section 1C (ViT) and section 2C (BART). The readouts follow the strategy instead.
DINAN_INIT = {
    "vit": {
        Role.PATCH_EMBEDDING: Draw(NORMAL, 1.0),
        Role.POSITION_EMBEDDING: Draw(NORMAL, 0.02**2, per_fan_in=False),
        **dict.fromkeys((Role.QUERY, Role.KEY, Role.VALUE), Draw(UNIFORM, 1 / 2)),
        Role.ATTENTION_OUTPUT: Draw(UNIFORM, 1 / 3),
        Role.MLP_IN: Draw(UNIFORM, 2 / 5),
        Role.MLP_OUT: Draw(UNIFORM, 8 / 5),
    },
    "bart": dict.fromkeys(
        (
            *(Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING, Role.QUERY, Role.KEY, Role.VALUE),
            *(Role.ATTENTION_OUTPUT, Role.MLP_IN, Role.MLP_OUT),
        ),
        Draw(NORMAL, 0.02**2, per_fan_in=False),
    ),
}

# Part II, sections 1 and 2: the strategies by name, as s of footnote 8; None is "standard".
DINAN_STRATEGIES = {"standard": None, "neural_tangent": 0.0, "hybrid": 0.5, "maximal_update": 1.0}
_HEAD = ("readout", "logits")  # kinds of the head's tensors


@dataclass(frozen=True)
class Dinan(Prescription):
    """Dinan, Yaida & Zhang 2023: "standard" runs, or the meta-principled family, s in [0, 1].

    Weight decay is not multiplied by lambda_G, (1.94): plan with `decay_mode="global"`. The head
    bias does not decay.

    Args:
        width: n.
        strategy: "standard", "neural_tangent", "hybrid", "maximal_update", or "meta_principled"
            together with `s`.
        s: of the meta-principled family, in [0, 1].
        optimizer: "adam" or "sgd".
        mlp_factor: "keep" is the theory's M in (1.106), (1.114), (1.115); "drop" is what the
            paper's runs and tables use.
        init: "vit" or "bart", whose constants the initial values have.

    Raises:
        PlanError: an unknown name, a width that is no positive integer, and from a call, for a role
            that the paper's models lack.

    Source: relative rates (1.99)-(1.107) for SGD, (1.108)-(1.116) for AdamW, times n^s and n^(s/2)
    except at the head (footnote 26); head std n^(-(1+s)/2) (footnote 8).

    >>> Dinan(width=64, strategy="maximal_update")(Tensor("readout", 64, 10)).init_std
    0.015625
    """

    width: int
    strategy: str = "neural_tangent"
    s: float | None = None
    optimizer: str = "adam"
    mlp_factor: str = "drop"
    init: str = "vit"

    def __post_init__(self) -> None:
        choose("strategy", self.strategy, (*DINAN_STRATEGIES, "meta_principled"))
        self.settle(("adam", "sgd"))
        choose("mlp_factor", self.mlp_factor, ("keep", "drop"))
        choose("init", self.init, DINAN_INIT)
        check_sizes("Dinan", width=self.width)
        named = self.strategy != "meta_principled"
        if named and self.s is not None:
            raise PlanError(f"Dinan: strategy {self.strategy!r} fixes s; leave s out")
        if not named and not (finite(self.s) and 0 <= self.s <= 1):
            raise PlanError(f"Dinan: meta_principled needs s in [0, 1], got {self.s!r}")

    @property
    def exponent_s(self) -> float | None:
        """s of footnote 8, or None for the standard runs."""
        if self.strategy == "meta_principled":
            return self.s
        return DINAN_STRATEGIES[self.strategy]

    def __call__(self, tensor: Tensor) -> Numbers:
        """Initialisation of Part II and lambda_G; PlanError for roles the paper's models lack."""
        rule = replace(self, width=round(self.at(tensor).width))
        role, fans = tensor.role, (tensor.fan_in, tensor.fan_out)
        if tensor.reads_out and self.init == "bart":  # its numbers are meant for both
            role, fans = Role.TOKEN_EMBEDDING, (1, rule.width)
        distribution, std = rule._init(role, fans[0])
        return Numbers(
            init_std=std,
            init_distribution=distribution,
            lr=rule.lr_factor(role, *fans),
            decay=float(role is not Role.READOUT_BIAS),  # section II 1D
            gradient=rule._gradient(role, fans[1]) / rule._power(role, 0.5),
        )

    def lr_factor(self, role: Role, fan_in: int, fan_out: int) -> float:
        """lambda_G: 1 in the standard runs, else (1.99)-(1.116) with footnote 26."""
        s = self.exponent_s
        if s is None:
            return 1.0
        n = self.width
        sgd = {  # (1.99)-(1.107) with Lambda = 1
            Role.PATCH_EMBEDDING: 1 / fan_in,
            **dict.fromkeys((Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING), 1.0),
            Role.MLP_OUT: 1 / fan_in if self.mlp_factor == "keep" else 1 / n,
            Role.READOUT_BIAS: 1.0,
        }.get(role, 1 / n)
        if self.optimizer == "sgd":
            return sgd * self._power(role, 1.0)
        return sgd * self._gradient(role, fan_out) * self._power(role, 0.5)

    def _power(self, role: Role, half: float) -> float:
        """n^s to a power; 1 at the head (footnote 26)."""
        s = self.exponent_s or 0.0
        return 1.0 if role.facts.kind in _HEAD else float(self.width ** (s * half))

    def forward(self, size: Size | None = None) -> Forward:
        """N_rescale = n^(-(1+s)/2), (1.34), for BART, whose word embedding serves encoder, decoder
        and output; 1 in the standard runs, and where nothing is tied."""
        s, (n, _) = self.exponent_s, size or self.size
        if s is None or self.init != "bart":
            return Forward()
        return Forward(logit_multiplier=float(n ** (-(1 + s) / 2)))

    def _gradient(self, role: Role, fan_out: int) -> float:
        """Per-parameter gradient magnitude at s = 0, the factor between (1.99) and (1.108)."""
        if role.facts.kind in _HEAD:
            return float(fan_out**-0.5)
        wide = role is Role.MLP_IN and self.mlp_factor == "keep"
        return float((fan_out if wide else self.width) ** -0.5)

    def _init(self, role: Role, fan_in: int) -> tuple[str, float]:
        s = self.exponent_s
        if role is Role.READOUT_BIAS:
            return CONSTANT, 0.0
        if role is Role.READOUT:
            return NORMAL, self.width ** (-(1 + (s or 0.0)) / 2)
        if role is Role.TOKEN_EMBEDDING and self.init == "bart" and s is not None:
            return NORMAL, 1.0  # C_WE = 1, section II 2C
        draw = DINAN_INIT[self.init].get(role)
        if draw is None:
            ways = [f"give init={init!r}" for init in DINAN_INIT if role in DINAN_INIT[init]]
            ways += ["build the model without it (no bias but a head's, norms without parameters)"]
            raise PlanError(
                f"Dinan et al. prescribe nothing for {role} in their {self.init} models; {ways[0]}"
            )
        return draw.distribution, draw.std(fan_in)
