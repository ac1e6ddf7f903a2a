"""Prescriptions of Dinan et al., of Bordelon et al., and for Muon; `everett` has Everett et al.'s.

A prescription turns (role, fan_in, fan_out) into `Numbers` for a model of one width and depth.
Learning rate and epsilon are factors on the global values; `plan` multiplies them in.

    Everett      Everett et al. 2024: parameterisation x optimiser x alignment, any width and base
    Dinan        Dinan, Yaida & Zhang 2023: standard runs and the meta-principled family, AdamW, SGD
    Bordelon     Bordelon, Chaudhry & Pehlevan 2024: heads, head dimension and depth, SGD and Adam
    Spectral     Muon for hidden matrices, muP's AdamW for the rest, in three conventions
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from param_groups.prescription import (
    CONSTANT,
    NORMAL,
    UNIFORM,
    Numbers,
    Prescription,
    check_flag,
    check_limits,
    check_positive,
    check_sizes,
    finite,
    of_families,
)
from param_groups.roles import BLOCK, FUSED_PARTS, PlanError, Role, choose
from param_groups.rules.everett import CompleteP, Everett

__all__ = [
    "DINAN_INIT",
    "DINAN_STRATEGIES",
    "Bordelon",
    "CompleteP",
    "Dinan",
    "Draw",
    "Everett",
    "Spectral",
]

# Dinan, Yaida & Zhang


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
        (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING, *BLOCK),
        Draw(NORMAL, 0.02**2, per_fan_in=False),
    ),
}

# Part II, sections 1 and 2: the strategies by name, as s of footnote 8; None is "standard".
DINAN_STRATEGIES = {"standard": None, "neural_tangent": 0.0, "hybrid": 0.5, "maximal_update": 1.0}
_READOUTS = {Role.READOUT, Role.READOUT_BIAS}


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

    >>> Dinan(width=64, strategy="maximal_update")(Role.READOUT, 64, 10).init_std
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
        self._settle(("adam", "sgd"))
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

    def numbers(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """Initialisation of Part II and lambda_G; PlanError for roles the paper's models lack."""
        distribution, std = self._init(role, fan_in)
        return Numbers(
            init_std=std,
            init_distribution=distribution,
            lr=self.lr_factor(role, fan_in, fan_out),
            decay=float(role is not Role.READOUT_BIAS),  # section II 1D
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
            return sgd if role in _READOUTS else sgd * n**s
        return sgd * self._gradient(role, fan_out) * (1.0 if role in _READOUTS else n ** (s / 2))

    def logit_multiplier(self) -> float:
        """N_rescale = n^(-(1+s)/2), (1.34); 1 in the standard runs, and where nothing is tied."""
        s = self.exponent_s
        return 1.0 if s is None or not self.ties_readout() else float(self.width ** (-(1 + s) / 2))

    def ties_readout(self) -> bool:
        """True for BART, whose word embedding serves encoder, decoder and output."""
        return self.init == "bart"

    def _gradient(self, role: Role, fan_out: int) -> float:
        """Per-parameter gradient magnitude at s = 0, the factor between (1.99) and (1.108)."""
        if role in _READOUTS:
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


# Bordelon, Chaudhry & Pehlevan


@dataclass(frozen=True)
class Bordelon(Prescription):
    """Bordelon, Chaudhry & Pehlevan 2024: N head dimension, H heads, L depth; width n = N H.

    Block weights have unit-variance entries and multiplier fan_in^(-1/2); queries and keys have
    std N^(1 - alpha_attention) and multiplier H^(-1/2) N^(alpha_attention - 3/2), so q and k
    start at order one. Rates: SGD gamma0^2 n L^(2 alpha_depth - 1), Adam n^(-1/2)
    L^(alpha_depth - 1). First layer: multiplier beta0^(1/2) L^(1/2 - alpha_depth) for SGD, sqrt(n)
    L^(1 - alpha_depth) for Adam, std its inverse; the readout has the same divided by gamma0 n.
    Norms have no parameters.

    Args:
        head_dim: N.
        heads: H; the width is N H.
        depth: L, residual blocks.
        optimizer: one of the families "sgd" and "adam".
        alpha_attention: query-key products are multiplied by N^(-alpha_attention), in [1/2, 1].
        alpha_depth: branches are multiplied by beta0 L^(-alpha_depth), in [1/2, 1].
        beta0: the constant on branches.
        gamma0: how much features move; gamma0^2 in SGD's rate keeps the change of the output at 1.
        zero_readout: whether the readout starts at zero, as in the paper's language model.

    Raises:
        PlanError: a size or constant outside of these, and from a call, for a role that the paper's
            models lack.

    Source: Tables 1 and 2 and App. C; signs and roots lost in print follow the listings of App. B.

    >>> Bordelon(head_dim=16, heads=4, depth=4)(Role.VALUE, 64, 64).lr
    0.125
    """

    head_dim: int
    heads: int
    depth: int
    optimizer: str = "adam"
    alpha_attention: float = 1.0
    alpha_depth: float = 1.0
    beta0: float = 1.0
    gamma0: float = 1.0
    zero_readout: bool = False
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self._settle(of_families("sgd", "adam"))
        check_flag("Bordelon: zero_readout", self.zero_readout)
        check_sizes("Bordelon", head_dim=self.head_dim, heads=self.heads, depth=self.depth)
        check_positive("Bordelon", beta0=self.beta0, gamma0=self.gamma0)
        check_limits("Bordelon", alpha_attention=self.alpha_attention, alpha_depth=self.alpha_depth)
        object.__setattr__(self, "width", self.head_dim * self.heads)

    @property
    def lr_factor(self) -> float:
        """The factor on eta_0, the same for every tensor."""
        if self.optimizer == "sgd":
            return float(self.gamma0**2 * self.width * self.depth ** (2 * self.alpha_depth - 1))
        return float(self.width**-0.5 * self.depth ** (self.alpha_depth - 1))

    @property
    def first_multiplier(self) -> float:
        """The multiplier of embedding and positions; their std is its inverse."""
        if self.optimizer == "sgd":
            # The paper lists (L/beta0)^(1/2 - alpha_depth), at alpha_depth = 1 alone. A single
            # block's branch is multiplied by beta0 whatever alpha_depth is, so at L = 1 nothing may
            # depend on it: the power of beta0 is 1/2 throughout.
            listed = (self.depth / self.beta0) ** (0.5 - self.alpha_depth)
            return float(listed * self.beta0 ** (1 - self.alpha_depth))
        return float(math.sqrt(self.width) * self.depth ** (1 - self.alpha_depth))

    def numbers(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """std and multiplier per role; PlanError for roles the paper's models lack."""
        std, multiplier = self._scales(role, fan_in)
        distribution = NORMAL if std > 0 else CONSTANT
        return Numbers(std, distribution, multiplier=multiplier, lr=self.lr_factor)

    def attention_exponent(self) -> float:
        """-alpha_attention, (3)."""
        return -self.alpha_attention

    def residual_multiplier(self) -> float:
        """beta0 L^(-alpha_depth), section 2.1."""
        return float(self.beta0 * self.depth**-self.alpha_depth)

    def _scales(self, role: Role, fan_in: int) -> tuple[float, float]:
        """(std, multiplier)."""
        first = self.first_multiplier
        if role in (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING):
            return 1 / first, first
        if role is Role.PATCH_EMBEDDING:
            return 1 / first, first * fan_in**-0.5
        if role in (Role.QUERY, Role.KEY):
            # H^(-1/2) N^(alpha - 3/2), written so that alpha = 1 is exactly the values' numbers
            spread = self.head_dim ** (1 - self.alpha_attention)
            return spread, fan_in**-0.5 / spread
        if role in (Role.VALUE, Role.ATTENTION_OUTPUT, Role.MLP_IN, Role.MLP_OUT):
            return 1.0, fan_in**-0.5
        if role in _READOUTS:
            zero = self.zero_readout or role is Role.READOUT_BIAS
            return 0.0 if zero else 1 / first, first / (self.gamma0 * self.width)
        raise PlanError(
            f"Bordelon et al. prescribe nothing for {role}; build the model without it "
            "(norms without parameters, no biases inside blocks)"
        )


# Muon

# The rate of U, the orthogonalised momentum of a matrix (out, in), over the global one.
MUON_CONVENTIONS = {
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "original": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "match_rms": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_out, fan_in)),
}


@dataclass(frozen=True)
class Spectral(Prescription):
    """Muon for the matrices of hidden layers, AdamW with muP's numbers for all other tensors.

    Muon's update is U, the momentum with all singular values near 1, so its spectral norm is the
    rate at every size. `convention` says what multiplies it:

        spectral    sqrt(out/in): changes of activations stay as large as the activations (Bernstein
                    et al.; Dion; torch's "spectral_unclamped")
        original    sqrt(max(1, out/in)): the same powers of the width (Jordan et al. 2024)
        match_rms   0.2 sqrt(max(out, in)): entries as large as AdamW's (Liu et al. 2025), which
                    grows as the root of the width and transfers with the power -1/2

    Muon's rates go as (width/base_width)^rate_exponent beside it, by default 0, and -1/2 for
    match_rms; 0 there is the rule as it is mostly used. Adam's rates are `adam_factor` times muP's
    (Everett et al., Table 1, full alignment). `depth` with `base_depth` multiplies branches by
    base_depth/depth and leaves all rates alone. A decay per step goes as
    (width/base_width)^decay_exponent in matrices that sum over the width, as in `Everett`.

    Args:
        width, base_width: n, and the width at which muP's rates are the global one.
        depth, base_depth: blocks, and those of the model that was tuned.
        convention, rate_exponent, adam_factor, decay_exponent: above.
        embedding_std, qk_exponent: as in `Everett`.

    Raises:
        PlanError: a number out of range; a fused matrix of queries, keys and values, as its U is
            not that of its parts. `plan` refuses kernels of convolutions and tied matrices.

    Source: Jordan et al. 2024 (Muon); `MUON_CONVENTIONS` names the others.

    >>> Spectral(1024, 256)(Role.MLP_IN, 1024, 4096).lr
    2.0
    """

    width: float
    base_width: float
    depth: int | None = None
    base_depth: float = 1.0
    convention: str = "spectral"
    rate_exponent: float | None = None
    adam_factor: float = 1.0
    embedding_std: float | None = None
    qk_exponent: float | None = None
    decay_exponent: float = 0.0
    optimizer: str = "muon"

    def __post_init__(self) -> None:
        self._settle(("muon",))
        choose("convention", self.convention, MUON_CONVENTIONS)
        check_positive("Spectral", base_depth=self.base_depth, adam_factor=self.adam_factor)
        if self.rate_exponent is None:
            power = -0.5 if self.convention == "match_rms" else 0.0
            object.__setattr__(self, "rate_exponent", power)
        if not finite(self.rate_exponent):
            raise PlanError(f"Spectral: rate_exponent must be finite, got {self.rate_exponent!r}")
        if self.depth is None and self.base_depth != 1.0:
            raise PlanError("Spectral: base_depth acts with depth; give both or neither")
        if self.depth is not None:
            check_sizes("Spectral", depth=self.depth)
        self._mup()  # checks what the two share

    def __call__(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """The numbers of one tensor; PlanError for a fused one."""
        if role in FUSED_PARTS:
            raise PlanError(
                "Muon orthogonalises queries, keys and values one by one, which a fused tensor "
                f"({role}) does not allow; use separate matrices"
            )
        return self.numbers(role, fan_in, fan_out)

    def numbers(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """muP's numbers; the rate of a hidden matrix is Muon's, by its shape."""
        given = self._mup().numbers(role, fan_in, fan_out)
        if role not in (*BLOCK, Role.HIDDEN):
            return replace(given, lr=given.lr * self.adam_factor, optimizer="adam")
        power = (self.width / self.base_width) ** (self.rate_exponent or 0.0)
        lr = MUON_CONVENTIONS[self.convention](fan_in, fan_out) * power
        return replace(given, lr=lr, optimizer="muon")

    def scaled(self, ratio: float) -> Spectral:
        """The rule at `ratio` times the base width, which is the width of the base model."""
        return replace(self, width=self.base_width * ratio)

    def attention_exponent(self) -> float:
        """-1, muP's, or the `qk_exponent` given."""
        return self._mup().attention_exponent()

    def residual_multiplier(self) -> float:
        """base_depth / depth; 1 without a depth."""
        return 1.0 if self.depth is None else float(self.base_depth / self.depth)

    def _mup(self) -> Everett:
        return Everett(
            "mup",
            self.width,
            self.base_width,
            embedding_std=self.embedding_std,
            qk_exponent=self.qk_exponent,
            decay_exponent=self.decay_exponent,
        )
