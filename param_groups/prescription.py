"""What a prescription is: one tensor's numbers, the class to derive from, the optimisers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, TypeGuard

from param_groups.roles import FUSED_PARTS, PlanError, Role, choose

NORMAL, UNIFORM, CONSTANT = "normal", "uniform", "constant"

# The optimiser families of the theory and the optimisers that belong to each (Everett B.8): what
# counts is whether an update scales with the gradient, with nothing, or with the parameter.
OPTIMIZER_FAMILY = {
    "sgd": "sgd",
    "adam": "adam",
    "adam_atan2": "adam",
    "adafactor": "adafactor",
    "adam_param_scaling": "adafactor",
    "muon": "spectral",  # updates of one spectral norm, whatever the gradient: `Spectral`
}


def default_epsilon(optimizer: str) -> float:
    """The global epsilon where none is said: torch's 1e-8 beside a root, and 1e-30 for Adafactor,
    which adds it to g^2 (Shazeer & Stern 2018)."""
    return 1e-30 if optimizer == "adafactor" else 1e-8


def of_families(*families: str) -> tuple[str, ...]:
    """The optimisers of some families."""
    return tuple(name for name, family in OPTIMIZER_FAMILY.items() if family in families)


# AdamW is Adam with decoupled weight decay, which is how every plan decays.
_ALIASES = {"adamw": "adam"}
# Optimisers that are no member of a family, with the reason.
_REFUSED = {
    "torch.optim.muon": "it has a factor of the shape, which is in a plan's rates; use "
    "plan.optimizers(model)",
    **dict.fromkeys(("lamb", "lars"), "its updates are scaled by each layer's trust ratio"),
    "lion": "its rate and decay are a sign update's, which no paper here derives",
    "adagrad": "its updates shrink with the sum of all gradients so far",
    "adadelta": "its updates are scaled by those before them",
    "lbfgs": "its step is a line search's",
    **dict.fromkeys(("shampoo", "soap"), "the size of its matrices' updates goes with both fans"),
    "torch.optim.adafactor": "it caps every rate at 1/sqrt(step) and takes a pair as epsilon",
    "rmsprop": "its average of squared gradients starts at zero without correction",
    "adamax": "its updates are divided by the largest gradient so far",
    "rprop": "its steps are set by signs alone",
}


def exponent_optimizer(name: str) -> str:
    """The name under which an optimiser has exponents; PlanError for one known to have none."""
    if reason := _REFUSED.get(lower := str(name).lower()):
        raise PlanError(
            f"there are no exponents for {name!r}: {reason}; supported: "
            f"{', '.join((*OPTIMIZER_FAMILY, *_ALIASES))}"
        )
    return _ALIASES.get(lower, lower)


@dataclass(frozen=True)
class Numbers:
    """What one tensor gets: `lr` and `eps` relative to the global values, the rest absolute.

    Args:
        init_std: standard deviation of the initial values; `uniform` ones lie within sqrt(3) of it.
        init_distribution: "normal", "uniform" or "constant".
        init_mean: their mean; `constant` tensors are filled with it.
        multiplier: what the layer multiplies by in the forward pass.
        lr: factor on the global learning rate.
        eps: factor on the global epsilon.
        decay: factor on the share of the tensor that one step removes, 0 for none.
        optimizer: the tensor's, where that is not the prescription's.

    >>> Numbers(init_std=0.5, multiplier=4.0).absorbed("adam")  # doctest: +ELLIPSIS
    Numbers(init_std=2.0, ..., multiplier=1.0, lr=4.0, eps=0.25, ...)
    """

    init_std: float
    init_distribution: str = NORMAL
    init_mean: float = 0.0
    multiplier: float = 1.0
    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0
    optimizer: str | None = None

    def starting_at(self, scale: float) -> Numbers:
        """The same with initial values `scale` times as large."""
        return replace(self, init_mean=self.init_mean * scale, init_std=self.init_std * scale)

    def absorbed(self, optimizer: str) -> Numbers:
        """The same training without a forward multiplier m (Everett B.2 with n^theta = m).

        The tensor becomes m W. Its gradient shrinks by m, so the rate grows by m^2 under SGD, m
        under Adam and Muon and not at all under parameter scaling, and epsilon follows the gradient
        (its square in Adafactor, where epsilon is added to g^2). Exact except for the floors of
        parameter scaling.
        """
        m, optimizer = self.multiplier, exponent_optimizer(optimizer)
        family = OPTIMIZER_FAMILY[choose("optimizer", optimizer, (*OPTIMIZER_FAMILY, *_ALIASES))]
        lr_factor = {"sgd": m * m, "adam": m, "spectral": m, "adafactor": 1.0}[family]
        eps_factor = m**2 if optimizer == "adafactor" else m
        return replace(
            self,
            init_std=self.init_std * m,
            init_mean=self.init_mean * m,
            multiplier=1.0,
            lr=self.lr * lr_factor,
            eps=self.eps / eps_factor,
        )


class Prescription(ABC):
    """A named rule for all roles at one width and depth; derive your own from it.

    A class of your own has `width`, `optimizer` and `numbers(role, fan_in, fan_out)`. `plan` takes
    it as the papers' are taken.

    Raises:
        PlanError: from a call, for a role that the rule says nothing about.

    >>> class Mine(Prescription):
    ...     width, optimizer = 256, "adam"
    ...     def numbers(self, role, fan_in, fan_out):
    ...         return Numbers(init_std=fan_in**-0.5, lr=1 / fan_in)
    >>> Mine()(Role.MLP_IN, 256, 1024).init_std
    0.0625
    """

    width: float
    optimizer: str

    def __call__(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """The numbers of one tensor.

        Raises PlanError for a role the paper says nothing about, and for a fused tensor whose
        parts would need different numbers.
        """
        parts = FUSED_PARTS.get(role)
        if parts is None:
            return self.numbers(role, fan_in, fan_out)
        given = {part: self.numbers(part, fan_in, fan_out) for part in parts}
        if len(set(given.values())) > 1:
            raise PlanError(
                f"{type(self).__name__} gives {', '.join(parts)} different numbers, so a fused "
                f"{role} tensor cannot follow it; use separate matrices"
            )
        return given[parts[0]]

    @abstractmethod
    def numbers(self, role: Role, fan_in: int, fan_out: int) -> Numbers:
        """The numbers of one unfused role."""

    def check_roles(self, roles: Collection[str]) -> None:  # noqa: B027 - most have nothing to check
        """Raises PlanError for a model whose roles, together, leave a tensor's numbers open."""

    def attention_exponent(self) -> float:
        """The power of the head dimension on query-key products before the softmax."""
        return -0.5

    def attention_scale(self, head_dim: int) -> float:
        """The factor on query-key products before the softmax."""
        check_positive(type(self).__name__, head_dim=head_dim)
        exponent = self.attention_exponent()
        try:
            scale = float(head_dim**exponent)
        except OverflowError:
            scale = math.inf
        if not 0 < scale < math.inf:
            raise PlanError(
                f"{type(self).__name__}: {head_dim:g}^({exponent:g}), the factor on query-key "
                "products, is outside the range of floats"
            )
        return scale

    def _settle(self, optimizers: Collection[str]) -> None:
        """Numbers as Python's, the optimiser by its name where it is an alias ("adamw").

        Raises PlanError unless that is one of `optimizers`.
        """
        for name, value in vars(self).items():
            object.__setattr__(self, name, python_number(value))
        object.__setattr__(self, "optimizer", exponent_optimizer(self.optimizer))
        if self.optimizer == "muon" and "muon" not in optimizers:
            raise PlanError(
                f"{type(self).__name__} has no rates for 'muon', whose updates are orthogonalised "
                "matrices; use Spectral(width, base_width), which has AdamW for all other tensors"
            )
        aliases = [alias for alias, name in _ALIASES.items() if name in optimizers]
        choose("optimizer", self.optimizer, (*optimizers, *aliases))

    def residual_multiplier(self) -> float:
        """The factor on every residual branch."""
        return 1.0

    def logit_multiplier(self) -> float:
        """The factor on logits computed from a tied word embedding (N_rescale in Dinan et al.)."""
        return 1.0

    def forward(self, head_dim: int | None = None) -> dict[str, float]:
        """The factors of the forward pass by name: those that are not 1, and the attention's.

        The attention's only where the head dimension is given.
        """
        scale = {} if head_dim is None else {"attention_scale": self.attention_scale(head_dim)}
        others = {
            "residual_multiplier": self.residual_multiplier(),
            "logit_multiplier": self.logit_multiplier(),
        }
        return scale | {name: value for name, value in others.items() if value != 1.0}

    def scaled(self, ratio: float) -> Prescription:
        """The prescription of a tensor whose fans are `ratio` times those of a base model."""
        raise PlanError(
            f"{type(self).__name__} is for models of one width; plan without a base model, or with "
            "Everett"
        )

    def follows_gradients(self) -> bool:
        """Whether rates or epsilons undo the gradients' powers of the width, tensor by tensor."""
        return False

    def outside_branches(self) -> Prescription:
        """The rule for tensors outside of all residual branches: itself, if both get the same."""
        return self

    def ties_readout(self) -> bool:
        """Whether the numbers of a word embedding are meant for a readout tied to it, too."""
        return False

    def describe(self) -> dict[str, object]:
        """The prescription's fields by name, ready for JSON."""
        if is_dataclass(self):
            values = asdict(self)
        else:
            values = {"width": self.width, "optimizer": self.optimizer, **vars(self)}
        fields = {key: _plain(value) for key, value in values.items()}
        return {"name": type(self).__name__.lower(), **fields}


def summary(described: Mapping[str, object]) -> str:
    """A described prescription for people: what it is, and the fields that are not its defaults."""
    kinds: dict[str, Any] = {kind.__name__.lower(): kind for kind in Prescription.__subclasses__()}
    kind = kinds.get(str(described.get("name")))
    usual = {one.name: one.default for one in fields(kind)} if is_dataclass(kind) else {}
    usual = {key: usual[key] for key in usual.keys() - {"optimizer", "alignment", "strategy"}}
    shown = [(key, value) for key, value in described.items() if value != usual.get(key, MISSING)]
    return ", ".join(
        f"{key} ({summary(value)})" if isinstance(value, Mapping) else f"{key} {value}"
        for key, value in shown
    )


def _plain(value: object) -> object:
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return python_number(value)


def finite(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold; True and False are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def python_number(value: Any) -> Any:
    """A number of another library (numpy's) as Python's own, which JSON knows."""
    if isinstance(value, (int, float, Fraction)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_flag(name: str, value: object) -> None:
    """Raises PlanError unless a value is True or False: a text such as "False" counts as true."""
    if value is not True and value is not False:
        raise PlanError(f"{name} is True or False, got {value!r}")


def check_positive(owner: str, **values: float) -> None:
    """Raises PlanError for a value that is not positive and finite."""
    for name, value in values.items():
        if not (finite(value) and value > 0):
            raise PlanError(f"{owner}: {name} must be positive and finite, got {value!r}")


def check_limits(owner: str, **powers: float) -> None:
    """Raises PlanError for a power of the depth or the head dimension that leaves no limit."""
    for name, value in powers.items():
        if not (finite(value) and 0.5 <= value <= 1):
            raise PlanError(f"{owner}: {name} must lie in [1/2, 1], got {value!r}")


def check_sizes(owner: str, **values: int) -> None:
    """Raises PlanError for a number of axes, heads or layers that is not a positive integer."""
    check_positive(owner, **values)
    for name, value in values.items():
        if value != int(value):
            raise PlanError(f"{owner}: {name} must be an integer, got {value!r}")
