"""Prescriptions around a prescription: depth, epsilon, decay, a tie, a tuned recipe, Muon.

    rule = Everett("mup", width=1024, base_width=256)   # Table 1
    rule = Depth(rule, depth=32, base_depth=4)          # branches r^-alpha, rates r^(alpha - 1)
    rule = EpsFollows(rule)                             # epsilon as the gradient
    rule = Decay(rule, exponent=-1, spare="vectors")    # powers of the decay, and what has none
    rule = Tuned(rule, init=initial_stds(small, rules)) # a recipe: nothing changes at the base
    rule = Muon(rule)                                   # hidden matrices by Muon

Each takes a prescription, and one of these. Depth, EpsFollows, Decay, Tied and Tuned give the same
numbers in every order; so does Muon with all but Tuned. Tuned(Muon(rule)) divides Muon's rate by
that at the base size, as a recipe that was tuned with Muon wants; Muon(Tuned(rule)) has Muon's.
Horizon(rule, ...), batch and tokens, goes around all others (`rules.horizon`). Two of a kind are
refused, and so is a Depth around a rule with a depth of its own.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from param_groups import quantities
from param_groups.families import OPTIMIZER_FAMILY, epsilon_power
from param_groups.prescription import Forward, Momenta, Prescription, Size, Tensor, plain
from param_groups.quantities import Asked, Numbers
from param_groups.roles import Layout, PlanError, Role, choose
from param_groups.rules.everett import Everett


@dataclass(frozen=True)
class Around(Prescription):
    """A prescription that changes the numbers of another; derive your own from it.

    A class of its own has `change`, and `forward` if it has factors. `described` names its fields
    in a plan where they have other names there; `marks` are what else a plan says of it.
    """

    rule: Prescription
    described: ClassVar[Mapping[str, str]] = {}
    marks: ClassVar[Mapping[str, object]] = {}

    @abstractmethod
    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """What becomes of the rule's numbers for a tensor."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.rule, Prescription):
            raise PlanError(f"{name} goes around a prescription, got {self.rule!r}")
        if name in self.rule.form.replace("(", " ").replace(")", " ").split():
            raise PlanError(f"{name} stands around {self.rule.form} already; leave one out")
        if self.rule.outermost:
            inner = type(self.rule).__name__
            raise PlanError(f"{name} would undo what {inner} does; put {inner} around {name}")
        for key in fields(self):
            object.__setattr__(self, key.name, quantities.python_number(vars(self)[key.name]))

    def __call__(self, tensor: Tensor) -> Numbers:
        """The rule's numbers, changed."""
        return self.change(tensor, self.rule(tensor))

    def relative(self, tensor: Tensor) -> Numbers:
        """The same without the initial size."""
        return self.change(tensor, self.rule.relative(tensor))

    def refuse(self, tensor: Tensor, asked: Asked) -> None:
        """A tensor that the rule refuses; a tie and a meaning of decay by the changed numbers."""
        self.rule.refuse(replace(tensor, reads_out=False), replace(asked, weight_decay=0.0))
        super().refuse(tensor, asked)

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
    def base_depth(self) -> float | None:  # type: ignore[override]  # the rule's
        """The rule's base depth."""
        return self.rule.base_depth

    @property
    def momenta(self) -> Momenta:
        """The rule's."""
        return self.rule.momenta

    @property
    def form(self) -> str:
        """What it is made of, outermost first."""
        return f"{type(self).__name__}({self.rule.form})"

    def describe(self) -> dict[str, object]:
        """The rule's fields and its own, and what is around what."""
        own = {key.name: vars(self)[key.name] for key in fields(self) if key.name != "rule"}
        if own.get("base_width", ...) is None:  # the rule's
            del own["base_width"]
        named = {self.described.get(key, key): value for key, value in own.items()}
        return {**self.rule.describe(), **plain(named), **self.marks, "form": self.form}


@dataclass(frozen=True)
class Compared(Around):
    """A prescription that compares with a base size, the rule's or a base width of its own.

    A rule with a depth and no base depth is compared at its own depth.
    """

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
            quantities.check_positive(name, base_width=self.base_width)
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
    def base(self) -> Size | None:
        """The rule's base size, or the base width at the rule's base depth; None without either."""
        if self.rule.base or self.base_width is None:
            return self.rule.base
        return Size(self.base_width, self.rule.base_depth)

    @property
    def there(self) -> Size:
        """The size that it compares with, of the rule's depth where that has no base."""
        base = self.base or self.size
        return base if base.depth is not None else base._replace(depth=self.size.depth)

    def ratio(self, tensor: Tensor) -> float:
        """The width at a tensor over that of the base."""
        return self.at(tensor).width / self.there.width

    def at_base(self, tensor: Tensor) -> Tensor:
        """The tensor of the base model."""
        return tensor.at(self.there, 1 / self.ratio(tensor))


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
        quantities.check_sizes("Depth", depth=self.depth)
        quantities.check_positive("Depth", base_depth=self.base_depth)
        quantities.check_limits("Depth", alpha=self.alpha)
        quantities.check_flag("Depth: decays", self.decays)

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

    marks = {"eps_per_layer": True}

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
        quantities.check_finite("Decay", exponent=self.exponent)
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


@dataclass(frozen=True)
class Tied(Compared):
    """The embedding's numbers for a tensor that embeds and reads out, and logits times b / n.

    Under muP an embedding starts with entries of order one and changes by as much per step. Read
    out by it, logits are sums over the width n of products that all point one way: that of a
    position's own token starts at n. Times b / n, b the base width, they are of order one at the
    start, and so are their changes, and gradients below go as 1 / n under any rule. The model
    applies the factor, where the readout's module or a hook of it returns the logits, so that a
    check sees them.

    Args:
        rule: any prescription with a base width and no such factor of its own, Muon's too.
        base_width: of a rule without one.

    Raises:
        PlanError: a rule whose own factor on logits has a power of the width; from a call, a tied
            tensor that is named by its readout; from a plan, a model without one, and multipliers
            that are not absorbed, of which two layers need two.

    Source: the shared readout of mup (Yang et al. 2022).

    >>> from param_groups import Everett
    >>> Tied(Everett("mup", 1024, 256)).forward().logit_multiplier
    0.25
    """

    marks = {"tied": True}

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.size, self.size._replace(width=2 * self.size.width)
        if len({self.rule.forward(size).logit_multiplier for size in sizes}) > 1:
            raise PlanError(
                f"Tied: {self.rule.form} multiplies logits by a power of the width; leave one out"
            )

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """SGD's rates and epsilons that follow, for gradients as 1 / n in place of the rule's."""
        if tensor.reads_out and tensor.role is not Role.TOKEN_EMBEDDING:
            raise PlanError(f"{tensor} is tied to an embedding: name it once, as token_embedding")
        if numbers.gradient is None or tensor.role.facts.kind == "logits":
            return numbers
        sizes = self.at(tensor), self.at(tensor)._replace(width=self.there.width)
        square = Tensor(Role.QUERY, n := round(sizes[0].width), n, size=sizes[0], inside=False)
        small = square.at(sizes[1], by := sizes[1].width / sizes[0].width)
        here, there = self.rule.relative(square), self.rule.relative(small)
        if not here.gradient or not there.gradient:
            raise square.without_gradient(self.form)
        share = here.gradient * there.multiplier / (there.gradient * here.multiplier * by)
        sgd = OPTIMIZER_FAMILY.get(numbers.optimizer or self.optimizer) == "sgd"
        return replace(numbers, lr=numbers.lr * (share if sgd else 1.0)).with_gradient(1 / share)

    def forward(self, size: Size | None = None) -> Forward:
        """The rule's with a tie, and its factor on logits times b / n."""
        size = size or self.size
        inner = self.rule.forward(size)
        factor = inner.logit_multiplier * self.there.width / size.width
        return inner._replace(logit_multiplier=factor, ties=True)


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
