"""What a prescription is: a value that one calls with a tensor and that returns its numbers.

    Everett("mup", 1024, 256)(Tensor("query", 1024, 1024)).lr   # 0.25

Papers' rules are prescriptions (`rules`), and so are those around another (`rules.wrappers`).
Nothing outside of a prescription knows which one it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any, ClassVar, NamedTuple

from param_groups.families import ALIASES, exponent_optimizer
from param_groups.quantities import Asked, Numbers, check_positive, finite, python_number
from param_groups.roles import IN, OUT, UNTIE, Layout, Measured, PlanError, Role, choose


class Size(NamedTuple):
    """The sizes that prescriptions scale with.

    Args:
        width: of the model.
        depth: number of blocks, None where it does not count.

    >>> Size(64)
    Size(width=64, depth=None)
    """

    width: float
    depth: float | None = None


@dataclass(frozen=True)
class Tensor:
    """One tensor, as a prescription sees it.

    Args:
        role: a `Role` or its name.
        fan_in, fan_out: inputs summed into one output, and outputs.
        size: of the model at this tensor, where it is not the prescription's own; of a model of
            several widths, the base width times the ratio of the tensor's fans to the base's.
        inside: whether a residual branch holds it; None for what its role says.
        reads_out: a word embedding that is the readout, too.
        name, shape, tied_to: in its model, with its other names.
        scale: what its rule multiplies its initial values by.
        unplaced: why nobody knows whether a branch holds it; "" where that is known.
        summed: why its gradient has no power of the width; "" where it has.
        keep, measured: as in its rule.
        part_of: the role of the fused tensor that holds it at places that nobody knows.
        layout: of its axes.
        cuts: its rule's `parts`.

    Raises:
        PlanError: a name that is no role.

    >>> Tensor("qkv", 64, 192).parts[0].role
    <Role.QUERY: 'query'>
    """

    role: Role
    fan_in: int
    fan_out: int
    size: Size | None = None
    inside: bool | None = None
    reads_out: bool = False
    name: str = ""
    shape: tuple[int, ...] = ()
    tied_to: tuple[str, ...] = ()
    scale: float = 1.0
    unplaced: str = ""
    summed: str = ""
    part_of: Role | None = None
    keep: bool = False
    measured: tuple[Measured, ...] = ()
    layout: Layout = Layout.LINEAR
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role(choose("role", self.role, Role)))

    def __str__(self) -> str:
        return f"{self.name!r} ({self.role})" if self.name else f"a {self.role}"

    @property
    def in_branch(self) -> bool:
        """Whether a residual branch holds it; PlanError where nobody knows."""
        if self.unplaced:
            raise PlanError(f"{self} {self.unplaced}")
        return self.role.facts.branch if self.inside is None else self.inside

    def without_gradient(self, owner: str) -> PlanError:
        """The error where `owner` needs a power of the width that the gradient does not have."""
        why = (
            self.summed
            or self.unplaced
            or "has a gradient for which no power of the width is known"
        )
        return PlanError(f"{owner}: {self} {why}: use adam or adafactor, without EpsFollows")

    @property
    def outputs(self) -> tuple[int, ...]:
        """Those of each matrix that it holds, empty where nobody knows; PlanError for odd cuts."""
        roles = len(self.role.parts)
        if self.cuts is None:
            even = self.fan_out == roles * self.fan_in
            return (self.fan_out // roles,) * roles if roles == 1 or even else ()
        unit, rest = divmod(self.fan_out, sum(self.cuts) or 1)
        if rest:
            raise PlanError(
                f"{self} has {self.fan_out} outputs, which parts={self.cuts} do not divide: "
                "give their sizes along the outputs, or the ratios of these"
            )
        return tuple(unit * size for size in self.cuts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that a fused one holds; of any other the tensor itself."""
        roles, outputs = self.role.parts, self.outputs
        if len(outputs) == len(roles) == 1:
            return (self,)
        if not outputs:
            return tuple(replace(self, role=role, cuts=None, part_of=self.role) for role in roles)
        alike = len(outputs) == len(roles)  # else heads, whose order among roles does not count
        pairs = zip(roles, outputs, strict=True) if alike else product(roles, outputs)
        return tuple(replace(self, role=role, fan_out=n, cuts=None) for role, n in pairs)

    def at(self, size: Size, ratio: float) -> Tensor:
        """The same tensor of a model `ratio` times as wide."""
        grows = self.role.facts.grows
        fan_in = max(round(self.fan_in * ratio), 1) if IN in grows else self.fan_in
        fan_out = max(round(self.fan_out * ratio), 1) if OUT in grows else self.fan_out
        return replace(self, fan_in=fan_in, fan_out=fan_out, size=size)


class Forward(NamedTuple):
    """What a prescription wants of the forward pass.

    Args:
        attention: the power of the head dimension on query-key products before the softmax.
        constant: what multiplies that power.
        residual_multiplier: the factor on every residual branch.
        logit_multiplier: that on logits from a tied word embedding (N_rescale in Dinan et al.).
        head_dim: the prescription's own, where it has one.
        way_out: how to ask for another power of the head dimension; "" if one cannot.
        ties: whether a word embedding is meant to be the readout, too.

    >>> Forward(attention=-1.0).attention_scale(64)
    0.015625
    """

    attention: float = -0.5
    constant: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    head_dim: int | None = None
    way_out: str = ""
    ties: bool = False

    def attention_scale(self, head_dim: int) -> float:
        """The factor on query-key products; PlanError where no float holds it."""
        check_positive("attention_scale", head_dim=head_dim)
        try:
            scale = float(self.constant * head_dim**self.attention)
        except OverflowError:
            scale = math.inf
        if not 0 < scale < math.inf:
            raise PlanError(
                f"{head_dim:g}^({self.attention:g}), the factor on query-key products, is outside "
                "the range of floats"
            )
        return scale

    def factors(self, head_dim: int | None = None) -> dict[str, float]:
        """By name, those that are not 1, and the attention's where a head dimension is given."""
        scale = {} if head_dim is None else {"attention_scale": self.attention_scale(head_dim)}
        others = {
            "residual_multiplier": self.residual_multiplier,
            "logit_multiplier": self.logit_multiplier,
        }
        return scale | {name: value for name, value in others.items() if value != 1.0}


class Momenta(NamedTuple):
    """Averages over steps, as torch groups name them; None for those of the optimiser's caller.

    Args:
        betas: of Adam and its kind, and of what Muon leaves to AdamW.
        momentum: of SGD, and of Muon's matrices.

    >>> Momenta(betas=(0.9, 0.95)).momentum is None
    True
    """

    betas: tuple[float, float] | None = None
    momentum: float | None = None


class Prescription(ABC):
    """A named rule for all tensors of a model; derive your own from it.

    A class of your own has `width`, `optimizer` and `__call__(tensor)`; `forward` if it has factors
    and `refuse` if it is wrong for some tensor. All else follows from these and is there for
    wrappers to change. `plan` and the wrappers take it as they take the papers'. With `base`, the
    `Size` at which it was tuned, it can be wrapped by what compares with a base. Then it reads the
    width at a tensor by `at(tensor)`.

    Raises:
        PlanError: from a call, for a tensor that the rule says nothing about.

    >>> class Mine(Prescription):
    ...     width, optimizer, base = 256, "adam", Size(64)
    ...     def __call__(self, tensor):
    ...         return Numbers(init_std=tensor.fan_in**-0.5, lr=64 / self.at(tensor).width)
    >>> Mine()(Tensor("mlp_in", 256, 1024)).lr
    0.25
    """

    width: float
    optimizer: str
    base_depth: float | None = None  # of a rule for the depth
    outermost: ClassVar[bool] = False  # whether a prescription around it would undo what it does

    @abstractmethod
    def __call__(self, tensor: Tensor) -> Numbers:
        """The numbers of one tensor."""

    def relative(self, tensor: Tensor) -> Numbers:
        """The numbers but for the initial size, which may be unknown."""
        return self(tensor)

    def forward(self, size: Size | None = None) -> Forward:
        """The factors of the forward pass, at the prescription's size or another."""
        return Forward()

    @property
    def size(self) -> Size:
        """The size of the model that the prescription is for."""
        return Size(self.width)

    @property
    def base(self) -> Size | None:
        """The size at which relative numbers are 1; None for a rule without one."""
        return None

    @property
    def momenta(self) -> Momenta:
        """The averages of the optimisers, for a rule that sets them."""
        return Momenta()

    def at(self, tensor: Tensor) -> Size:
        """The size at a tensor."""
        return tensor.size or self.size

    def refuse(self, tensor: Tensor, asked: Asked) -> None:
        """PlanError for a tensor, or for a meaning of decay, that the numbers are wrong for.

        A row that serves as embedding and readout needs numbers that are meant for both. A decay
        that has a power of a size cannot be per rate where that has one, too.
        """
        if tensor.reads_out and not self.forward().ties:
            self._refuse_tie(tensor)
        elif tensor.reads_out and not asked.absorb and self.relative(tensor).multiplier != 1:
            raise PlanError(
                f"{tensor} is tied, and one multiplier would act in both of its places: plan with "
                "absorb_multipliers=True"
            )
        if not (asked.weight_decay and asked.decay_mode == "per_group"):
            return
        size = self.at(tensor)
        twice = {"width": tensor.at(size._replace(width=2 * size.width), 2.0)}
        if size.depth is not None:
            twice["depth"] = replace(tensor, size=size._replace(depth=2 * size.depth))
        here = self.relative(tensor)
        for what, larger in twice.items():
            there = self.relative(larger)
            still = math.isclose(here.lr, there.lr, rel_tol=1e-9)
            if not (still or math.isclose(here.decay, there.decay, rel_tol=1e-9)):
                raise PlanError(
                    f"{tensor}: decay_mode 'per_group' has the rate's power of the {what} already, "
                    "and the prescription's decay has one of its own; use 'independent' or 'global'"
                )

    def _refuse_tie(self, tensor: Tensor) -> None:
        vocabulary, width = tensor.shape[0], tensor.shape[-1]
        keys = ("lr", "eps", "decay", "multiplier")
        both = {
            role: self.relative(replace(tensor, role=role, fan_in=fan_in, fan_out=fan_out))
            for role, fan_in, fan_out in (
                (Role.TOKEN_EMBEDDING, 1, width),
                (Role.READOUT, width, vocabulary),
            )
        }
        if any(len({vars(one)[key] for one in both.values()}) > 1 for key in keys):
            texts = (
                f"{role} " + ", ".join(f"{key} {vars(one)[key]:g}" for key in keys)
                for role, one in both.items()
            )
            raise PlanError(
                f"{tensor.name!r} is tied to {', '.join(tensor.tied_to)}, but {self.form} gives "
                f"{'; '.join(texts)}{UNTIE}"
            )

    @property
    def form(self) -> str:
        """What it is made of, for people."""
        return type(self).__name__

    def describe(self) -> dict[str, object]:
        """The prescription's fields by name, ready for JSON."""
        values = asdict(self) if is_dataclass(self) else vars(self)
        both = {"width": self.width, "optimizer": self.optimizer}  # a class may have them as one
        return {"name": type(self).__name__.lower(), **plain({**values, **both})}

    def settle(self, optimizers: Collection[str]) -> None:
        """Numbers as Python's, the optimiser by its name where it is an alias ("adamw").

        Raises PlanError unless that is one of `optimizers`.
        """
        for name, value in vars(self).items():
            object.__setattr__(self, name, python_number(value))
        object.__setattr__(self, "optimizer", exponent_optimizer(self.optimizer))
        if self.optimizer == "muon":
            raise PlanError(
                f"{type(self).__name__} has no rates for 'muon', whose updates are orthogonalised "
                "matrices; put Muon(...) around a rule for Adam, which all other tensors keep"
            )
        aliases = [alias for alias, name in ALIASES.items() if name in optimizers]
        choose("optimizer", self.optimizer, (*optimizers, *aliases))


def checked(prescription: Prescription) -> Prescription:
    """A prescription that a plan can be made of; PlanError for what is none."""
    if not isinstance(prescription, Prescription):
        raise PlanError(f"a prescription is a rule such as Everett(...); got {prescription!r}")
    if lacking := {"width", "optimizer"} - {*dir(prescription)}:
        raise PlanError(f"{prescription.form} has no {sorted(lacking)[0]}")
    return prescription


def numbers_of(prescription: Prescription, tensor: Tensor, asked: Asked) -> Numbers:
    """What a prescription gives a tensor of a model, which may be fused.

    Raises PlanError for a tensor that it refuses, and for a fused one whose parts would need
    different numbers, rates by Muon excepted.
    """
    numbers: list[Numbers] = []
    rates: dict[int, float] = {}
    parts = dict.fromkeys(tensor.parts)
    for part in parts:
        one = _numbers(prescription, part, asked)
        if (one.optimizer or prescription.optimizer) == "muon":
            one = replace(one, lr=one.lr / rates.setdefault(part.fan_out, one.lr))
        numbers.append(one)
    if len(set(numbers)) > 1:
        held = ", ".join(dict.fromkeys(part.role for part in parts))
        raise PlanError(
            f"{prescription.form} gives {held} different numbers, so a "
            f"fused {tensor.role} tensor cannot follow it; use separate matrices"
        )
    if not rates:
        return numbers[0]
    first, *more = tensor.outputs
    each = tuple((size, rates[size] / rates[first]) for size in (first, *more) if more)
    if asked.weight_decay and asked.decay_mode == "per_group" and len({*rates.values()}) > 1:
        raise PlanError(
            f"{tensor} holds matrices of {', '.join(map(str, rates))} outputs, whose rates by Muon "
            "differ, and decay_mode 'per_group' would have another decay for each; use "
            "'independent' or 'global'"
        )
    return replace(numbers[0], lr=rates[first], parts=each)


def _numbers(prescription: Prescription, tensor: Tensor, asked: Asked) -> Numbers:
    """The same of a tensor that is not fused; PlanError for what is no number of its kind."""
    try:
        prescription.refuse(tensor, asked)
        numbers = prescription(tensor)
    except (OverflowError, ZeroDivisionError) as error:
        raise PlanError(f"{prescription.form} has no numbers for {tensor}: {error}") from error
    values = {key: python_number(vars(numbers)[key]) for key in (*_SIZES, "init_mean")}
    for key, value in values.items():
        negative = key in _SIZES and finite(value) and value < 0
        if not finite(value) or negative or (key == "multiplier" and value == 0):
            raise PlanError(
                f"{prescription.form} gives {tensor} the {key} {value!r}, expected a finite number"
                + (" above 0" if key == "multiplier" else " of at least 0" * (key in _SIZES))
            )
    return replace(numbers, **values)


_SIZES = ("init_std", "multiplier", "lr", "eps", "decay")

# For people and for JSON


def summary(described: Mapping[str, object]) -> str:
    """A described prescription for people: what it is, and the fields that are not its defaults."""
    kinds = {kind.__name__.lower(): kind for kind in _derived(Prescription)}
    kind: Any = kinds.get(str(described.get("name")))
    usual = {one.name: one.default for one in fields(kind)} if is_dataclass(kind) else {}
    usual = {key: usual[key] for key in usual.keys() - {"optimizer", "alignment", "strategy"}}
    shown = [(key, value) for key, value in described.items() if value != usual.get(key, MISSING)]
    return ", ".join(
        f"{key} ({summary(value)})" if isinstance(value, Mapping) else f"{key} {value}"
        for key, value in shown
    )


def _derived(kind: type[Any]) -> list[type[Any]]:
    return [one for child in kind.__subclasses__() for one in (child, *_derived(child))]


def plain(value: Any) -> Any:
    """A value as JSON has it; fractions as text."""
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [*map(plain, value)]
    return python_number(value)
