"""Quantities: what a tensor gets, what a plan is asked for, and which values are numbers at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, TypeGuard

from param_groups.families import (
    ALIASES,
    OPTIMIZER_FAMILY,
    SHIFT,
    default_epsilon,
    epsilon_power,
    exponent_optimizer,
)
from param_groups.roles import PlanError, choose

DISTRIBUTIONS = NORMAL, UNIFORM, CONSTANT, KEPT = "normal", "uniform", "constant", "kept"

# The three meanings of a weight decay, as the fraction of a tensor that one step removes at the
# peak of the schedule, which all three follow; global is Dinan, Yaida & Zhang (1.94).
DECAY_MODES = {
    "independent": "weight_decay itself",
    "global": "weight_decay times the global lr",
    "per_group": "weight_decay times the tensor's own rate, as in torch's AdamW; with "
    "absorb_multipliers the rate before they were absorbed",
}


@dataclass(frozen=True)
class Numbers:
    """What one tensor gets: `lr` and `eps` relative to the global values, the rest absolute.

    Args:
        init_std: standard deviation of the initial values; `uniform` ones lie within sqrt(3) of it.
        init_distribution: "normal", "uniform", "constant", or "kept": the model's own stay.
        init_mean: their mean; `constant` tensors are filled with it.
        multiplier: what the layer multiplies by in the forward pass.
        lr: factor on the global learning rate.
        eps: factor on the global epsilon.
        decay: factor on the share of the tensor that one step removes, 0 for none.
        optimizer: the tensor's, where that is not the prescription's.
        gradient: its size up to a constant, None where no power of it is known. Epsilon speaks of
            it, SGD's rate, and whatever multiplies a branch.
        eps_power: the power of the gradient that `eps` has, 0 for an epsilon of its own.
        parts: of a tensor whose matrices Muon trains one by one, (outputs, rate over `lr`) of each.

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
    gradient: float | None = None
    eps_power: int = 0
    parts: tuple[tuple[int, float], ...] = ()

    def starting_at(self, scale: float) -> Numbers:
        """The same with initial values `scale` times as large."""
        return replace(self, init_mean=self.init_mean * scale, init_std=self.init_std * scale)

    def with_gradient(self, factor: float) -> Numbers:
        """The same where gradients are `factor` times as large; an epsilon that follows them is."""
        gradient = None if self.gradient is None else self.gradient * factor
        return replace(self, gradient=gradient, eps=self.eps * factor**self.eps_power)

    def absorbed(self, optimizer: str) -> Numbers:
        """The same training without a forward multiplier m (Everett B.2 with n^theta = m).

        The tensor becomes m W. Its gradient shrinks by m, so the rate grows by m^2 under SGD, m
        under Adam and Muon and not at all under parameter scaling, and epsilon follows the gradient
        (its square in Adafactor, where epsilon is added to g^2). Exact except for the floors of
        parameter scaling.
        """
        m, optimizer = self.multiplier, exponent_optimizer(optimizer)
        family = OPTIMIZER_FAMILY[choose("optimizer", optimizer, (*OPTIMIZER_FAMILY, *ALIASES))]
        return replace(
            self,
            init_std=self.init_std * m,
            init_mean=self.init_mean * m,
            multiplier=1.0,
            lr=self.lr * math.prod((m,) * SHIFT[family]),
            eps=self.eps / m ** epsilon_power(optimizer),
            gradient=None if self.gradient is None else self.gradient / m,
        )


@dataclass(frozen=True)
class Asked:
    """The global numbers of a plan, which those of a prescription multiply."""

    lr: float
    eps: float
    weight_decay: float
    decay_mode: str
    absorb: bool = False

    @classmethod
    def of(
        cls,
        lr: float,
        eps: float | None,
        weight_decay: float,
        decay_mode: str | None,
        absorb: bool,
        optimizer: str,
    ) -> Asked:
        """The numbers as Python's own, with the optimiser's own epsilon where there is none.

        Raises PlanError for what is no number, and for a decay without its mode, as its two
        readings differ by the rate.
        """
        check_flag("absorb_multipliers", absorb)
        eps = default_epsilon(optimizer) if eps is None else eps
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not (finite(value) and value >= 0):
                raise PlanError(f"{name} must be finite and not negative, got {value!r}")
        if decay_mode is None and weight_decay:
            raise PlanError(
                f"weight_decay {weight_decay:g} needs a decay_mode: 'independent' removes "
                f"{100 * weight_decay:.4g} % of every tensor per step, 'per_group', torch's "
                f"meaning, {100 * weight_decay * lr:.4g} % at this rate; 'global' is that of Dinan "
                "et al. (1.94)"
            )
        mode = choose("decay mode", decay_mode or "independent", DECAY_MODES)
        lr, eps, weight_decay = map(python_number, (lr, eps, weight_decay))
        return cls(lr, eps, weight_decay, mode, absorb)

    @property
    def globals(self) -> tuple[float, float, float, str]:
        """Rate, epsilon, decay and the decay's meaning."""
        return self.lr, self.eps, self.weight_decay, self.decay_mode

    def torch_decay(self, factor: float, own: float, before: float) -> float:
        """The weight_decay of a torch group, whose product with the group's rate is the decay that
        the mode asks for.

        Args:
            factor: the tensor's own, of its `Numbers`.
            own: the group's rate.
            before: the tensor's relative rate before a multiplier was absorbed, over that after.
        """
        decay = self.weight_decay * factor
        if decay == 0:
            return decay
        if self.decay_mode == "per_group":
            return decay * before
        if own == 0:
            raise PlanError(f"{self.decay_mode} weight decay needs a learning rate above 0")
        return decay / own if self.decay_mode == "independent" else decay * (self.lr / own)


# Which values are numbers


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


def check_finite(owner: str, **values: object) -> None:
    """Raises PlanError for a value that is not finite."""
    for name, value in values.items():
        if not finite(value):
            raise PlanError(f"{owner}: {name} must be finite, got {value!r}")


def check_positive(owner: str, **values: float) -> None:
    """Raises PlanError for a value that is not positive and finite."""
    for name, value in values.items():
        if not (finite(value) and value > 0):
            raise PlanError(f"{owner}: {name} must be positive and finite, got {value!r}")


def check_averages(owner: str, betas: Any, momentum: Any) -> None:
    """Raises PlanError unless betas are None or two numbers in [0, 1), and momentum None or one."""
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    if betas is not None and not (two and all(finite(one) and 0 <= one < 1 for one in betas)):
        raise PlanError(f"{owner}: betas must be two numbers in [0, 1), got {betas!r}")
    if momentum is not None and not (finite(momentum) and 0 <= momentum < 1):
        raise PlanError(f"{owner}: momentum must be a number in [0, 1), got {momentum!r}")


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
