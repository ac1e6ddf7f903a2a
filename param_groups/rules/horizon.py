"""Batch and horizon as a prescription around a rule: powers of both in rate, decay, epsilon, betas.

    rule = CompleteP(1024, 256, depth=16, base_depth=4)
    rule = Horizon(rule, batch=2**20, tokens=1e11, base_batch=2**18, base_tokens=2.5e9,
                   powers="sde", betas=(0.9, 0.95))

With b = batch / base batch and d = tokens / base tokens, a run has d / b times the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from param_groups.families import AVERAGES, epsilon_power, of_families
from param_groups.prescription import Momenta, Tensor
from param_groups.quantities import Asked, Numbers, check_averages, check_positive, finite
from param_groups.roles import PlanError, choose
from param_groups.rules.wrappers import Around

Pair = tuple[float | None, float | None]  # powers of batch and tokens; None: nothing is said
ONE_LESS, HALF_LIFE = "1 - ", "half-life of "  # in steps, and in tokens
AVERAGED = {"beta1": "betas", "beta2": "betas", "momentum": "momentum"}
NUMBERS = ("lr", "decay", "eps", *(way + one for one in AVERAGED for way in (ONE_LESS, HALF_LIFE)))
TIME_SCALE = (1.0, -1.0)  # of a decay per step whose average is a share of the run's tokens


class Published(NamedTuple):
    """A set of powers: of `NUMBERS`, for which optimisers, whose, and whether at one model size."""

    powers: Mapping[str, Pair]
    optimizers: tuple[str, ...]
    source: str
    one_size: bool = False


ADAM = of_families("adam")
PUBLISHED = {
    "sde": Published(
        {
            "lr": (0.5, -0.5),
            "decay": TIME_SCALE,
            "eps": (-0.5, 0.0),
            "1 - beta1": (1.0, -1.0),
            "1 - beta2": (1.0, -1.0),
        },
        ADAM,
        "derived in `Horizon` from Malladi et al. 2022 and Wang & Aitchison 2024",
    ),
    "nanochat": Published(  # there torch's lambda goes as b^(1/2) / d
        {"lr": (0.5, 0.0), "decay": TIME_SCALE},
        (*ADAM, "muon"),
        "nanochat, scripts/base_train.py, which hopes that it holds for Muon",
    ),
    "marin": Published(
        {"lr": (0.5, -0.3), "eps": (-0.5, 0.5), "half-life of beta2": (0.0, 0.0)},
        ADAM,
        "marin, completed_adamh.py, for AdamH, whose matrices keep their norm and do not decay",
    ),
    "hyperp": Published(
        {"lr": (None, -0.32)},
        (*ADAM, "muon"),
        "Ren et al. 2026, HyperP, for matrices that keep their norm; Bjorck et al. for AdamW",
    ),
    "power_lines": Published(  # b / d by the time scale, which goes as (tokens / parameters)^-0.527
        {"decay": (1.0, -0.473)},
        ADAM,
        "Bergsma et al. 2025, Power Lines; the power of the time scale is third-hand",
        one_size=True,
    ),
}


def scaled(batch: float, tokens: float, powers: Pair) -> float:
    """batch^p tokens^q."""
    p, q = (power or 0.0 for power in powers)
    return float(batch**p * tokens**q)


def timescale(*, tokens_per_step: int, tokens: int, tau: float) -> float:
    """The decay per step with which weights average over `tau` of a run's tokens.

    AdamW keeps an exponential moving average of updates, over 1 / decay steps; Wang & Aitchison
    2024 hold that time fixed as a share of the data while model and batch grow. At the base's batch
    and tokens it is the decay that `Horizon` carries on by "sde" and "nanochat".

    Args:
        tokens_per_step: tokens of one optimiser step.
        tokens: tokens of the whole run.
        tau: length of the average over that of the run (their tau_epoch times epochs).

    Returns:
        tokens_per_step / (tau * tokens), for `plan(weight_decay=..., decay_mode="independent")`.

    Raises:
        PlanError: a number that is not positive, or an average shorter than a step.

    Source: Wang & Aitchison 2024, "How to set AdamW's weight decay as you scale model and dataset
    size", tau = 1 / (lr lambda).

    >>> timescale(tokens_per_step=1000, tokens=1_000_000, tau=0.2)
    0.005
    """
    check_positive("timescale", tokens_per_step=tokens_per_step, tokens=tokens, tau=tau)
    decay = scaled(tokens_per_step, tokens, TIME_SCALE) / tau
    if decay >= 1:
        raise PlanError(f"timescale: tau {tau:g} of {tokens:,} tokens is less than one step")
    return decay


@dataclass(frozen=True)
class Horizon(Around):
    """A rule that was tuned at one batch and one number of tokens, at others.

    It is the outermost: others replace rates (`Muon`) or divide by the base's (`Tuned`), so that
    its powers would be lost inside. Every tensor has the same powers. A number that a set does not
    name stays as it is; "decay" is that per step, so torch's weight_decay has the power of it less
    that of the rate. Coordinate check and `transfer` see one batch and horizon, and say nothing of
    these powers.

    Derivation of "sde": noise adds up as lr^2 x steps, which is held: lr ~ (b / d)^(1/2). The
    average of the decay is held as a share of the run, lr x lambda x steps, and so are those of the
    betas, (1 - beta) x steps: b / d. In b at a fixed d this is the square-root rule of Malladi et
    al., the same stochastic differential equation; noise in the gradient, and epsilon beside it,
    goes as b^(-1/2). In d the noise alone is held, not the drift. No power of d in epsilon follows,
    since a gradient does not know the horizon. Mlodozeniec et al. 2025, Complete(d)P (arXiv
    2512.22382), have (d / b)^(1/2), third-hand: `powers={**PUBLISHED["sde"].powers, "eps": (-0.5,
    0.5)}`.

    Args:
        rule: any prescription.
        batch, base_batch: of the run and of the one that was tuned, in one unit.
        tokens, base_tokens: of the whole runs.
        powers: a name of `PUBLISHED`, or powers of (b, d) by `NUMBERS`: {"lr": (0.5, -0.32),
            "1 - beta2": (1, -1)}; "half-life of beta2" is that in tokens. Epsilon's are of what is
            added to a gradient's size; Adafactor, which adds it to the square, takes the square.
        betas: AdamW's at the base, which the powers change and `Plan.groups` hands on.
        momentum: Muon's or SGD's at the base, likewise.

    Raises:
        PlanError: an unknown set or number, powers that are no pair, an optimiser that a set is not
            published for, another batch where a set has none, another size where it is for one;
            betas that are to change and are not given, or would leave [0, 1); from a plan, decay
            mode "per_group" where rate and decay have powers.

    Source: a set's own line in `PUBLISHED`.

    >>> from param_groups import Everett
    >>> at = {"batch": 64, "base_batch": 16, "tokens": 4e9, "base_tokens": 1e9}
    >>> rule = Horizon(Everett("mup", 256, 256), **at, powers={"lr": (0.5, -1.0)})
    >>> rule(Tensor("query", 256, 256)).lr
    0.5
    """

    batch: float = field(kw_only=True)
    tokens: float = field(kw_only=True)
    base_batch: float = field(kw_only=True)
    base_tokens: float = field(kw_only=True)
    powers: str | Mapping[str, Pair] = field(kw_only=True)
    betas: tuple[float, float] | None = field(default=None, kw_only=True)
    momentum: float | None = field(default=None, kw_only=True)
    outermost = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at = ("batch", "tokens", "base_batch", "base_tokens")
        check_positive("Horizon", **{key: vars(self)[key] for key in at})
        check_averages("Horizon", self.betas, self.momentum)
        if not isinstance(self.powers, Mapping):
            self._check_published(PUBLISHED[choose("powers", self.powers, PUBLISHED)])
        for key, pair in self.pairs.items():
            choose("number in powers", key, NUMBERS)
            two = isinstance(pair, (tuple, list)) and len(pair) == 2
            if not (two and all(power is None or finite(power) for power in pair)):
                raise PlanError(f"Horizon: powers of {key} are (of batch, of tokens), got {pair!r}")
            for what, power, ratio in zip(at, pair, self._ratios, strict=False):
                if power is None and ratio != 1:
                    raise PlanError(
                        f"Horizon: powers {self.powers!r} say nothing of {key} at another {what}, "
                        f"which is {ratio:g} times the base's; give powers of your own"
                    )
        self._check_averages()

    def _check_published(self, known: Published) -> None:
        why, base = "", self.rule.base
        if self.optimizer not in known.optimizers:
            why = f"is published for {', '.join(known.optimizers)} and not for {self.optimizer!r}"
        elif known.one_size and base not in (None, self.rule.size):
            why = f"counts tokens per parameter: for one model, not at {self.rule.size} and {base}"
        if why:
            raise PlanError(f"Horizon: {self.powers} {why}; give powers of your own")

    def _check_averages(self) -> None:
        known = (*AVERAGES.get(self.optimizer, ()), *["betas"] * (self.optimizer == "muon"))
        named = [(key, AVERAGED[key.rpartition(" ")[2]]) for key in self.pairs if " " in key]
        given = [key for key, value in self._tuned._asdict().items() if value is not None]
        for key, where in (*named, *zip(given, given, strict=True)):
            if where not in known:
                raise PlanError(f"Horizon: {self.optimizer} has no {where}, so leave out {key!r}")
            if where not in given:
                raise PlanError(f"Horizon: powers of {key!r} need {where}=, those at the base")
            if None not in (vars(self)[where], getattr(self.rule.momenta, where)):
                raise PlanError(f"Horizon: {self.rule.form} sets {where}; leave out {where}=")
        for one in AVERAGED:
            if {ONE_LESS + one, HALF_LIFE + one} <= self.pairs.keys():
                raise PlanError(f"Horizon: powers name {one} twice; leave one out")
        _ = self.momenta  # refuses what would leave [0, 1)

    @property
    def _tuned(self) -> Momenta:
        betas, momentum = self.rule.momenta
        return Momenta(self.betas or betas, momentum if self.momentum is None else self.momentum)

    @property
    def pairs(self) -> Mapping[str, Pair]:
        """Powers of batch and tokens, by number."""
        return self.powers if isinstance(self.powers, Mapping) else PUBLISHED[self.powers].powers

    @property
    def _ratios(self) -> tuple[float, float]:
        return self.batch / self.base_batch, self.tokens / self.base_tokens

    def factor(self, number: str) -> float:
        """What multiplies one of `NUMBERS`; 1 where no power is given."""
        return scaled(*self._ratios, self.pairs.get(number, (0.0, 0.0)))

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """Rate, epsilon and decay per step."""
        lr, decay, eps = map(self.factor, ("lr", "decay", "eps"))
        eps **= epsilon_power(numbers.optimizer or self.optimizer)
        lr, decay, eps = numbers.lr * lr, numbers.decay * decay, numbers.eps * eps
        return replace(numbers, lr=lr, decay=decay, eps=eps)

    @property
    def momenta(self) -> Momenta:
        """The averages of its optimisers, at this batch and horizon."""
        betas, momentum = self._tuned
        if betas is not None:
            betas = (self._average("beta1", betas[0]), self._average("beta2", betas[1]))
        return Momenta(betas, None if momentum is None else self._average("momentum", momentum))

    def _average(self, name: str, base: float) -> float:
        if HALF_LIFE + name in self.pairs:  # steps of b tokens each
            return float(base ** (self._ratios[0] / self.factor(HALF_LIFE + name)))
        factor = self.factor(ONE_LESS + name)
        average = base + (1 - base) * (1 - factor)  # to the bit at a factor of 1
        if not 0 <= average < 1:
            raise PlanError(
                f"Horizon: {name} {base:g} would become {average:g}, since 1 - {name} is to be "
                f"{factor:g} times as large; this batch is too large for so short a run"
            )
        return average

    def refuse(self, tensor: Tensor, asked: Asked) -> None:
        """As all; a decay per rate has the rate's powers, and cannot have those of its own."""
        super().refuse(tensor, asked)
        lr, decay = (self.pairs.get(key, (0.0, 0.0)) for key in ("lr", "decay"))
        if asked.weight_decay and asked.decay_mode == "per_group" and any(lr) and any(decay):
            raise PlanError(
                "decay_mode 'per_group' has the rate's powers of batch and tokens, and Horizon's "
                "decay is that per step: use 'independent' with the base's lr times weight_decay"
            )

    def describe(self) -> dict[str, object]:
        """As all, with the powers as text, and averages where they are set."""
        powers = ", ".join(
            " ".join((key, *([f"b^{b:g}"] if b else []), *([f"d^{d:g}"] if d else [])))
            + ("" if b or d else " constant")
            for key, (b, d) in self.pairs.items()
        )
        text = powers if self.pairs is self.powers else f"{self.powers} ({powers})"
        described = {**super().describe(), "powers": text}
        unset = {key for key in Momenta._fields if vars(self)[key] is None}
        return {key: value for key, value in described.items() if key not in unset}
