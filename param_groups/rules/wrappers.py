"""Prescriptions around a prescription: depth, epsilon, decay, a tuned recipe, Muon.

    rule = Everett("mup", width=1024, base_width=256)   # Table 1
    rule = Depth(rule, depth=32, base_depth=4)          # branches r^-alpha, rates r^(alpha - 1)
    rule = EpsFollows(rule)                             # epsilon as the gradient
    rule = Decay(rule, exponent=-1, spare="vectors")    # powers of the decay, and what has none
    rule = Tuned(rule, init=initial_stds(small, rules)) # a recipe: nothing changes at the base
    rule = Muon(rule)                                   # hidden matrices by Muon

Each takes any prescription, and one of these. Depth, EpsFollows, Decay and Tuned give the same
numbers in every order; so does Muon with all but Tuned. Tuned(Muon(rule)) divides Muon's rate by
that at the base size, as a recipe that was tuned with Muon wants; Muon(Tuned(rule)) has Muon's own.
Two of a kind are refused, and so is a Depth around a rule with a depth of its own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from param_groups.families import OPTIMIZER_FAMILY, epsilon_power
from param_groups.prescription import Forward, Prescription, Size, Tensor, plain
from param_groups.quantities import (
    CONSTANT,
    NORMAL,
    Numbers,
    check_finite,
    check_flag,
    check_limits,
    check_positive,
    check_sizes,
    finite,
    python_number,
)
from param_groups.roles import IN, OUT, Layout, PlanError, Role, Rule, assign, choose
from param_groups.rules.everett import Everett

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Around(Prescription):
    """A prescription that changes the numbers of another; derive your own from it.

    A class of its own has `change`, and `forward` if it has factors. `described` names its fields
    in a plan where they have other names there.
    """

    rule: Prescription
    described: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """What becomes of the rule's numbers for a tensor."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.rule, Prescription):
            raise PlanError(f"{name} goes around a prescription, got {self.rule!r}")
        if name in self.rule.form.replace("(", " ").replace(")", " ").split():
            raise PlanError(f"{name} stands around {self.rule.form} already; leave one out")
        for key in fields(self):
            object.__setattr__(self, key.name, python_number(vars(self)[key.name]))

    def __call__(self, tensor: Tensor) -> Numbers:
        """The rule's numbers, changed."""
        return self.change(tensor, self.rule(tensor))

    def relative(self, tensor: Tensor) -> Numbers:
        """The same without the initial size."""
        return self.change(tensor, self.rule.relative(tensor))

    def forward(self, size: Size | None = None) -> Forward:
        """The rule's."""
        return self.rule.forward(size or self.size)

    @property
    def width(self) -> float:  # type: ignore[override]  # the rule's
        """The rule's width."""
        return self.rule.width

    @property
    def optimizer(self) -> str:  # type: ignore[override]  # the rule's
        """The rule's optimiser."""
        return self.rule.optimizer

    @property
    def size(self) -> Size:
        """The rule's size."""
        return self.rule.size

    @property
    def base(self) -> Size | None:
        """The rule's base size."""
        return self.rule.base

    @property
    def form(self) -> str:
        """What it is made of, outermost first."""
        return f"{type(self).__name__}({self.rule.form})"

    def describe(self) -> dict[str, object]:
        """The rule's fields and its own, and what is around what."""
        hidden = ("rule", "base_width")  # of a wrapper's base width `Compared` tells
        own = {key.name: vars(self)[key.name] for key in fields(self) if key.name not in hidden}
        named = {self.described.get(key, key): value for key, value in own.items()}
        return {**self.rule.describe(), **plain(named), "form": self.form}


@dataclass(frozen=True)
class Compared(Around):
    """A prescription that compares with a base size, the rule's or a base width of its own."""

    base_width: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, base = type(self).__name__, self.rule.base
        if self.base_width is None and base is None and self.compares:
            raise PlanError(
                f"{name}: {self.rule.form} has no base width to compare with; say "
                f"{name}(rule, base_width=...), the width that was tuned"
            )
        if self.base_width is not None:
            check_positive(name, base_width=self.base_width)
            if base is not None and base.width != self.base_width:
                raise PlanError(
                    f"{name}: base_width is {self.base_width:g}, that of {self.rule.form} "
                    f"{base.width:g}; leave it out"
                )

    @property
    def compares(self) -> bool:
        """Whether a base is needed at all."""
        return True

    @property
    def base(self) -> Size:
        """The rule's base size, or the base width; the rule's own size where none is needed."""
        return self.rule.base or self.rule.size._replace(width=self.base_width or self.width)

    def ratio(self, tensor: Tensor) -> float:
        """The width at a tensor over that of the base."""
        return self.at(tensor).width / self.base.width

    def at_base(self, tensor: Tensor) -> Tensor:
        """The tensor of the base model."""
        depth = self.base.depth
        size = Size(self.base.width, self.rule.size.depth if depth is None else depth)
        return tensor.at(size, 1 / self.ratio(tensor))

    def describe(self) -> dict[str, object]:
        """As all; the base width only where it is its own."""
        described = super().describe()
        return (
            described if self.base_width is None else {**described, "base_width": self.base_width}
        )


@dataclass(frozen=True)
class Depth(Around):
    """The depth by Bordelon et al. 2024 around any rule that has none, relative to a base depth.

    With r = depth / base_depth:

        branches times r^(-alpha); rates of tensors in branches times r^(alpha - 1) for Adam, Muon
        and parameter scaling, r^(2 alpha - 1) for SGD; their gradients go as r^(-alpha).

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
    depths far beyond those in use.

    Args:
        rule: any prescription without a rule for the depth.
        depth, base_depth: numbers of blocks, of the model and of the one that was tuned.
        alpha: in [1/2, 1].
        decays: whether a decay per step takes the factor on the rate, too (Dey et al. 2025).

    Raises:
        PlanError: a number out of range, a rule with a depth of its own; from a call, a tensor of
            which nobody knows whether a branch holds it.

    Source: Bordelon et al. 2024, Tables 1 and 2, at matched constants.

    >>> Depth(Everett("mup", 64, 64), depth=8, base_depth=2, alpha=0.5)(Tensor("query", 64, 64)).lr
    0.5
    """

    depth: int
    base_depth: float = 1.0
    alpha: float = 1.0
    decays: bool = False
    described = {"alpha": "alpha_depth", "decays": "decay_depth"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule.size.depth is not None:
            raise PlanError(
                f"Depth: {self.rule.form} has a rule for the depth of its own; leave one out"
            )
        check_sizes("Depth", depth=self.depth)
        check_positive("Depth", base_depth=self.base_depth)
        check_limits("Depth", alpha=self.alpha)
        check_flag("Depth: decays", self.decays)

    @property
    def size(self) -> Size:
        """The rule's width, and the number of blocks."""
        return self.rule.size._replace(depth=self.depth)

    @property
    def base(self) -> Size | None:
        """The rule's base width, and the base depth."""
        return self.rule.base and self.rule.base._replace(depth=self.base_depth)

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """Rates, gradients and, if asked for, decays of what a branch holds."""
        ratio = self._ratio(self.at(tensor))
        gradient = ratio**-self.alpha
        lr = ratio ** (self.alpha - 1)
        sgd = OPTIMIZER_FAMILY.get(numbers.optimizer or self.optimizer) == "sgd"
        lr /= gradient if sgd else 1.0
        if tensor.unplaced and self.alpha == 1 and not sgd and not numbers.eps_power:
            return replace(numbers, gradient=None)  # the only number that its place decides
        if not tensor.in_branch:
            return numbers
        decay = numbers.decay * (lr if self.decays else 1.0)
        return replace(numbers, lr=numbers.lr * lr, decay=decay).with_gradient(gradient)

    def forward(self, size: Size | None = None) -> Forward:
        """Branches times r^(-alpha)."""
        size = size or self.size
        inner = self.rule.forward(size)
        factor = float(self._ratio(size) ** -self.alpha)
        return inner._replace(residual_multiplier=inner.residual_multiplier * factor)

    def _ratio(self, size: Size) -> float:
        return (self.depth if size.depth is None else size.depth) / self.base_depth


@dataclass(frozen=True)
class EpsFollows(Compared):
    """Epsilon as the gradient, relative to the base size; as its square where it is added to g^2.

    Args:
        rule: any prescription that knows how its gradients scale.
        base_width: of a rule without one.

    Raises:
        PlanError: from a call, a gradient without a known power, an epsilon that follows already.

    Source: Everett et al. 2024, section 4.3; Dey et al. 2025 for the depth.

    >>> EpsFollows(Everett("mup", 1024, 256))(Tensor("query", 1024, 1024)).eps
    0.25
    """

    described = {}

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """Another epsilon."""
        there = self.rule.relative(self.at_base(tensor)).gradient
        if numbers.gradient is None or not there:
            raise tensor.without_gradient(self.form)
        if numbers.eps_power:
            raise PlanError(f"{self.form}: epsilon follows the gradient already; leave one out")
        power = epsilon_power(self.optimizer)
        eps = numbers.eps * (numbers.gradient / there) ** power
        return replace(numbers, eps=eps, eps_power=power)

    def describe(self) -> dict[str, object]:
        """As all, by the key of configs."""
        return {**super().describe(), "eps_per_layer": True}


@dataclass(frozen=True)
class Decay(Compared):
    """Powers of the width in the decay per step, and tensors that have none.

    Args:
        rule: any prescription.
        exponent: a decay per step goes as (width / base width)^exponent in matrices that sum over
            the width, whose rates fall with it: 0 is independent decay (Everett et al., App. F;
            mup; CompleteP), -1/2 Fan et al. 2025, -1 what torch's AdamW does under muP (Qiu et al.
            2025).
        spare: "vectors" takes scales and biases out.
        base_width: of a rule without one.

    Raises:
        PlanError: an exponent that is not finite, another word than "vectors".

    >>> Decay(Everett("mup", 1024, 256), exponent=-1)(Tensor("query", 1024, 1024)).decay
    0.25
    """

    exponent: float = 0.0
    spare: str | None = None
    described = {"exponent": "decay_exponent"}

    @property
    def compares(self) -> bool:
        """With an exponent alone."""
        return self.exponent != 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("Decay", exponent=self.exponent)
        if self.spare is not None:
            choose("spare", self.spare, ("vectors",))

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """Another decay."""
        facts = tensor.role.facts
        if self.spare and facts.layout is Layout.VECTOR:
            return replace(numbers, decay=0.0)
        if not self.exponent or facts.kind not in ("hidden", "readout"):
            return numbers
        return replace(numbers, decay=numbers.decay * float(self.ratio(tensor) ** self.exponent))


def CompleteP(
    width: float,
    base_width: float,
    depth: int,
    base_depth: float,
    *,
    alpha: float = 1.0,
    **more: Any,
) -> Decay:
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
        more: fields of `Everett`: `qk_exponent`, constants.

    Returns:
        The prescription that has these numbers.

    Raises:
        PlanError: as `Everett` and `Depth`.

    Source: Dey et al. 2025, "Don't be lazy: CompleteP", Table 1.

    >>> CompleteP(1024, 256, depth=16, base_depth=4).forward().residual_multiplier
    0.25
    """
    mup = Everett("mup", width, base_width, **more)
    deep = Depth(mup, depth, base_depth, alpha, decays=True)
    return Decay(EpsFollows(deep), spare="vectors")


# A recipe that works at one size


@dataclass(frozen=True)
class Tuned(Compared):
    """A recipe that works at one size, carried to others: nothing changes at the base size.

    Every number of the rule is divided by its value at the base size, so that there rates,
    epsilons, decays and initial values are the recipe's own, to the bit. Elsewhere each is the
    recipe's times the rule's power of the size, as users of mup know it. Multipliers are 1 at the
    base size. With `plan(absorb_multipliers=True)` any model takes them.

    Args:
        rule: the prescription at the model's size, such as Everett("mup", 1024, 256).
        init: standard deviation of each role's initial values at the base size, as `initial_stds`
            reads them from a freshly built base model; norms start at 1, biases at 0.
        base_head_dim: head dimension of the base model where the model has another; attention then
            is base_head_dim^(-1/2) (head_dim / base_head_dim)^p, p the rule's power.
        base_width: of a rule without one.

    Raises:
        PlanError: a name that is no role, a size that is negative; from a call, a role without an
            initial size.

    Source: Yang et al. 2022, "Tensor Programs V", App. B; the powers are the rule's.

    >>> wide = Tuned(Everett("mup", 1024, 256), init={"query": 0.02})(Tensor("query", 1024, 1024))
    >>> wide.init_std, wide.lr
    (0.01, 0.25)
    """

    init: Mapping[str, float]
    base_head_dim: int | None = None
    described = {"init": "initial"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_head_dim is not None:
            check_positive("Tuned", base_head_dim=self.base_head_dim)
        for role, std in self.init.items():
            choose("role", role, map(str, Role))
            if not (finite(std) and std >= 0):
                raise PlanError(f"Tuned: init of {role} must be finite and not negative: {std!r}")

    def __call__(self, tensor: Tensor) -> Numbers:
        """The rule's numbers over those at the base size, and the recipe's initial size."""
        numbers, role = self.relative(tensor), tensor.role
        if role.facts.layout is Layout.VECTOR:
            mean = 1.0 / numbers.multiplier if role.facts.start == "one" else 0.0
            return replace(numbers, init_mean=mean, init_std=0.0, init_distribution=CONSTANT)
        if role not in self.init:
            raise PlanError(f"Tuned: init has no {role}; give its standard deviation at the base")
        std = self.init[role] * numbers.init_std
        distribution = NORMAL if std > 0 else CONSTANT
        return replace(numbers, init_std=std, init_mean=0.0, init_distribution=distribution)

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """Every number over that at the base size."""
        there = self.rule.relative(self.at_base(tensor))
        return replace(
            numbers,
            init_std=numbers.init_std / there.init_std if there.init_std else 1.0,
            multiplier=numbers.multiplier / there.multiplier,
            lr=numbers.lr / there.lr,
            eps=numbers.eps / there.eps,
            decay=numbers.decay / there.decay if there.decay else 0.0,
        )

    def forward(self, size: Size | None = None) -> Forward:
        """Factors over those at the base size; attention as said above."""
        here, there = self.rule.forward(size or self.size), self.rule.forward(self.base)
        relative = here._replace(
            residual_multiplier=here.residual_multiplier / there.residual_multiplier,
            logit_multiplier=here.logit_multiplier / there.logit_multiplier,
        )
        if self.base_head_dim is None:
            return relative._replace(attention=-0.5, constant=1.0)
        return relative._replace(constant=self.base_head_dim ** (-0.5 - here.attention))


def initial_stds(model: nn.Module, rules: Sequence[Rule]) -> dict[str, float]:
    """The standard deviation of each role's values in a freshly built base model, for `Tuned`.

    Args:
        model: the base model with its own initial values.
        rules: as in `plan`.

    Returns:
        {role: standard deviation}; norms and biases are left out.

    Raises:
        PlanError: tensors of one role that start with different ones: give them by hand.

    >>> from torch import nn
    >>> readout = nn.Linear(4, 2, bias=False)
    >>> _ = nn.init.constant_(readout.weight, 0.5)
    >>> initial_stds(nn.Sequential(readout), [Rule("0.weight", "readout")])
    {'readout': 0.5}
    """
    first: dict[Role, tuple[str, float]] = {}
    for one in assign(model, rules):
        if one.role.facts.layout is Layout.VECTOR:
            continue
        std = float(one.parameter.detach().double().square().mean().sqrt())
        # Tensors are random: a thousand entries are within 10 % of their standard deviation.
        name, known = first.setdefault(one.role, (one.name, std))
        if not math.isclose(std, known, rel_tol=0.15, abs_tol=1e-12):
            raise PlanError(
                f"{name!r} starts with standard deviation {known:.3g}, {one.name!r} of the same "
                f"role with {std:.3g}: give Tuned(init=...) by hand"
            )
    stds = {str(role): std for role, (_, std) in first.items()}
    return stds | {str(part): std for role, (_, std) in first.items() for part in role.parts}


# Muon

# The rate of U, the orthogonalised momentum of a matrix (out, in), over the global one.
MUON_CONVENTIONS = {
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "original": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "match_rms": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_out, fan_in)),
}


@dataclass(frozen=True)
class Muon(Compared):
    """Muon for the matrices of hidden layers, the rule's AdamW for all other tensors.

    Muon's update is U, the momentum with all singular values near 1, so its spectral norm is the
    rate at every size. `convention` says what multiplies it:

        spectral    sqrt(out/in): changes of activations stay as large as the activations (Bernstein
                    et al.; Dion; torch's "spectral_unclamped")
        original    sqrt(max(1, out/in)): the same powers of the width (Jordan et al. 2024)
        match_rms   0.2 sqrt(max(out, in)): entries as large as AdamW's (Liu et al. 2025), which
                    grows as the root of the width and transfers with the power -1/2

    Muon's rates go as (width / base width)^rate_exponent beside it, by default 0, and -1/2 for
    match_rms; 0 there is the rule as it is mostly used. Forward multipliers are divided out, and
    a depth around which it stands is kept.

    Args:
        rule: any prescription for Adam.
        convention, rate_exponent: above.
        adam_factor: what multiplies the rates of AdamW's tensors.
        base_width: of a rule without one.

    Raises:
        PlanError: a number out of range, a rule for another optimiser than Adam; from a call, a
            fused matrix of queries, keys and values, as its U is not that of its parts, a kernel of
            a convolution, a stack of matrices, a tied matrix.

    Source: Jordan et al. 2024 (Muon); `MUON_CONVENTIONS` names the others.

    >>> Muon(Everett("mup", 1024, 256))(Tensor("mlp_in", 1024, 4096)).lr
    2.0
    """

    convention: str = "spectral"
    rate_exponent: float | None = None
    adam_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule.optimizer != "adam":
            raise PlanError(
                f"Muon: the rule inside has the numbers of AdamW's tensors, but {self.rule.form} "
                f"is for {self.rule.optimizer!r}; give it optimizer='adam'"
            )
        choose("convention", self.convention, MUON_CONVENTIONS)
        check_positive("Muon", adam_factor=self.adam_factor)
        if self.rate_exponent is None:
            power = -0.5 if self.convention == "match_rms" else 0.0
            object.__setattr__(self, "rate_exponent", power)
        check_finite("Muon", rate_exponent=self.rate_exponent)

    @property
    def optimizer(self) -> str:  # type: ignore[override]
        """Muon, with AdamW beside it."""
        return "muon"

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """The rate of a hidden matrix is Muon's, by its shape."""
        facts = tensor.role.facts
        if facts.grows != (IN, OUT):
            return replace(numbers, lr=numbers.lr * self.adam_factor, optimizer="adam")
        if tensor.part_of:
            raise PlanError(
                "Muon orthogonalises queries, keys and values one by one, which a fused tensor "
                f"({tensor.part_of}) does not allow; use separate matrices"
            )
        if tensor.tied_to or len(tensor.shape) not in (0, 2):
            why = f"tied to {tensor.tied_to[0]}" if tensor.tied_to else "no matrix"
            raise PlanError(
                f"{tensor} is {why}, and Muon's rate is that of a matrix with one place in the "
                "model: train this model with a rule for Adam"
            )
        power = self.ratio(tensor) ** (self.rate_exponent or 0.0)
        lr = MUON_CONVENTIONS[self.convention](tensor.fan_in, tensor.fan_out) * power
        # What a branch's depth does to the rate, it does to Muon's.
        if tensor.role.facts.branch if tensor.inside is None else tensor.inside:
            lr *= numbers.lr / self.rule.relative(replace(tensor, inside=False)).lr
        return replace(numbers, lr=lr / numbers.multiplier, optimizer="muon")

    def describe(self) -> dict[str, object]:
        """As all, with its optimiser."""
        return {**super().describe(), "optimizer": self.optimizer}
