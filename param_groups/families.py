"""Optimisers: which family of the theory each belongs to, and what follows from that."""

from __future__ import annotations

from param_groups.roles import PlanError

# The optimiser families of the theory and the optimisers that belong to each (Everett B.8): what
# counts is whether an update scales with the gradient, with nothing, or with the parameter.
OPTIMIZER_FAMILY = {
    "sgd": "sgd",
    "adam": "adam",
    "adam_atan2": "adam",
    "adafactor": "adafactor",
    "adam_param_scaling": "adafactor",
    "muon": "spectral",  # updates of one spectral norm, whatever the gradient
}
# The power of a multiplier in the rate of the tensor that has absorbed it (Everett et al., B.2).
SHIFT = {"sgd": 2, "adam": 1, "adafactor": 0, "spectral": 1}

# The averages over steps that an optimiser keeps, by their keys in torch groups.
AVERAGES = {
    "sgd": ("momentum",),
    "adam": ("betas",),
    "adam_atan2": ("betas",),
    "adafactor": (),
    "adam_param_scaling": ("betas",),
    "muon": ("momentum",),
}


def of_families(*families: str) -> tuple[str, ...]:
    """The optimisers of some families."""
    return tuple(name for name, family in OPTIMIZER_FAMILY.items() if family in families)


def epsilon_power(optimizer: str) -> int:
    """The power of the gradient beside which an optimiser adds epsilon: Adafactor adds it to g^2,
    all others to a size."""
    return 2 if optimizer == "adafactor" else 1


def default_epsilon(optimizer: str) -> float:
    """The global epsilon where none is said: torch's 1e-8, and 1e-30 beside g^2 (Shazeer & Stern
    2018)."""
    return 1e-30 if epsilon_power(optimizer) == 2 else 1e-8


# AdamW is Adam with decoupled weight decay, which is how every plan decays.
ALIASES = {"adamw": "adam"}
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


def reason_without(name: str) -> str:
    """Why an optimiser is of no family; "" if nothing is known against it."""
    return _REFUSED.get(name.lower(), "")


def exponent_optimizer(name: str) -> str:
    """The name under which an optimiser has exponents; PlanError for one known to have none."""
    lower = str(name).lower()
    if reason := reason_without(lower):
        raise PlanError(
            f"there are no exponents for {name!r}: {reason}; supported: "
            f"{', '.join((*OPTIMIZER_FAMILY, *ALIASES))}"
        )
    return ALIASES.get(lower, lower)
