"""How constants are searched: rounds of trials, what to try next, and what trials say in the end.

Everett et al., App. C.2; all of it pure. Symbols: a constant is one gamma of
eta_l = beta_n * gamma_l * (n/b)^(-c_l).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from sweeps.rules import WAIT, Next
from training.config import Count, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from optuna.distributions import FloatDistribution
    from optuna.trial import FrozenTrial

RATE = "optimizer.lr"
# Trials of a search file, 12,800 in the paper's, and its studies. All that are to come are counted
# when the file is read, a trial in 10 to 20 us and 0.7 kB, a study in 0.25 ms, and commands on the
# largest file shall take 2 s.
MOST_TRIALS, MOST_STUDIES = 40_000, 1000

Bounds = tuple[float, float]
State = Literal["waiting", "running", "complete", "fail"]  # as Optuna names them


@dataclass(frozen=True)
class Trial:
    """One trial of a study."""

    number: int
    """Position in the study, from 0."""
    values: dict[str, float]
    """Config key -> value tried."""
    state: State
    """Waiting for its values; running means begun, perhaps by a driver that is gone."""
    loss: float | None = None
    """What the search minimises; a diverged run has a penalty. None unless complete."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Once it has ended: its `run` and `status`, and the `commit` or the `reason`."""


@dataclass(frozen=True)
class Study:
    """One combination of the grid: what is fixed in all its runs."""

    name: str
    where: dict[str, Any]
    settings: dict[str, Any]
    config: Any
    """With every searched value in the middle of its first range."""
    identity: str
    rate: float | None  # None where it is searched itself
    rate_from: str


@dataclass(frozen=True)
class Round:
    """One pass of a study over given ranges, and its trials so far."""

    study: Study
    number: int
    ranges: dict[str, Bounds]
    trials: list[Trial]
    wanted: int

    @functools.cached_property
    def key(self) -> str:
        """The name of its trials in the storage; other settings or ranges have another one."""
        ranges = {key: list(bounds) for key, bounds in self.ranges.items()}
        text = json.dumps([self.study.identity, ranges])
        digest = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
        return f"{self.study.name} round {self.number} {digest}"

    @property
    def counted(self) -> list[Trial]:
        """The complete trials, by number, up to the number wanted."""
        return [trial for trial in self.trials if trial.state == "complete"][: self.wanted]

    @property
    def finished(self) -> list[Trial]:
        """The counted trials that have not diverged."""
        return [trial for trial in self.counted if trial.note["status"] == "finished"]

    @property
    def running(self) -> list[Trial]:
        """Trials begun and not ended."""
        return [trial for trial in self.trials if trial.state == "running"]

    @property
    def missing(self) -> int:
        """How many of the trials wanted are not complete."""
        return self.wanted - len(self.counted)


class Tuning(Section):
    """The rule of every study: trials in rounds, whose ranges follow an optimum at their edge."""

    search: Annotated[dict[str, tuple[PositiveFloat, PositiveFloat]], Field(min_length=1)]
    """Config key -> lowest and highest value of the first round, searched log-uniformly."""
    trials: Annotated[int, Field(gt=0, le=MOST_TRIALS)]
    """Trials of a study, in every round."""
    parallel: PositiveInt = 1
    """At most so many trials of a study in progress."""
    equal_within: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """Trials whose loss exceeds the best by at most this share count as equally good."""
    edge: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """Share of a range's logarithm, at either end, that counts as near its edge."""
    extend: Annotated[float, Field(gt=1)] = 100.0
    """A range whose edge is best becomes 1/extend to extend times the best value."""
    rounds: PositiveInt = 2
    """At most so many rounds of a study, the first one included."""
    sampler_seed: Count = 0
    """Seed of the values that trials get."""

    def next(self, rounds: Sequence[Round], replaced: Collection[tuple[str, int]] = ()) -> Next:
        """The next trial of a study, a place in the order of `search`; or to wait, or the end.

        `replaced` are trials (key of the round, number) that failed in an earlier command.
        """
        last = rounds[-1]
        if not last.missing:
            note = "" if last.finished else f"all {last.wanted} trials diverged; lower {RATE}"
            return Next(done=True, note=note)
        fresh = [trial for trial in last.trials if (last.key, trial.number) not in replaced]
        if len(fresh) >= last.wanted and not last.running:
            failed = sum(trial.state == "fail" for trial in fresh)
            note = f"{failed} trials failed; the same command replaces them"
            return Next(done=True, note=note)
        if len(fresh) >= last.wanted or len(last.running) >= self.parallel:
            return WAIT
        values = self._next_values(rounds, fresh)
        return Next((tuple(values[key] for key in self.search),))

    def rounds_of(self, study: Study, trials: Callable[[str], list[Trial]]) -> list[Round]:
        """The rounds of a study that have begun, or whose turn it is; `trials` by a round's key."""
        found: list[Round] = []
        ranges: dict[str, Bounds] = dict(self.search)
        for number in range(1, self.rounds + 1):
            found.append(Round(study, number, ranges, [], self.trials))
            found[-1].trials.extend(trials(found[-1].key))
            if found[-1].missing or not found[-1].finished:
                break
            best = best_trial(found[-1].finished).values
            following = next_ranges(best, ranges, self.edge, self.extend)
            if following == ranges:
                break
            ranges = following
        return found

    def _next_values(self, rounds: Sequence[Round], fresh: Sequence[Trial]) -> dict[str, float]:
        """The values of the last round's next trial, from its number and the trials so far.

        Before the sampler is asked, and where the ranges allow it, all constants are 1; and after a
        round, its best is tried, so that no later one ends worse: that run is done, and costs
        nothing.
        """
        last, tried = rounds[-1], [trial.values for trial in fresh]
        first = [dict.fromkeys(self.search, 1.0)]
        first += [best_trial(earlier.finished).values for earlier in rounds[:-1]]
        for values in first:
            inside = all(low <= values[key] <= high for key, (low, high) in last.ranges.items())
            if inside and values not in tried:
                return values
        seed = (self.sampler_seed, last.study.name, last.number, len(last.trials))
        return suggest(last.trials, last.ranges, seed)


def suggest(
    trials: Sequence[Trial], ranges: Mapping[str, Bounds], seed: object
) -> dict[str, float]:
    """The values to try next, log-uniform at first: a pure function of its arguments.

    The sampler is a tree-structured Parzen estimator over all keys jointly. It looks at ranks, so
    the penalty of a diverged run bends nothing, and counts running trials as bad ones, which keeps
    a hundred at once apart. Optuna's Gaussian process, on a noisy bowl in three constants with a
    region that diverges, 300 trials, 100 at once: 95 s against 1 s, and a worse optimum.
    """
    import optuna  # takes a second, which commands that only look need not wait for

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=int.from_bytes(digest, "big"), multivariate=True, constant_liar=True
        )
    study = optuna.create_study(sampler=sampler)
    study.add_trials([frozen(trial, ranges) for trial in trials])
    return dict(study.ask(_distributions(ranges)).params)


def frozen(
    trial: Trial, ranges: Mapping[str, Bounds], attributes: Mapping[str, Any] | None = None
) -> FrozenTrial:
    """A trial as Optuna has it."""
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState[trial.state.upper()],
        value=trial.loss,
        params=trial.values,
        distributions=_distributions(ranges),
        user_attrs=dict(attributes or {}),
    )


def _distributions(ranges: Mapping[str, Bounds]) -> dict[str, FloatDistribution]:
    from optuna.distributions import FloatDistribution

    return {key: FloatDistribution(low, high, log=True) for key, (low, high) in ranges.items()}


def is_near_edge(value: float, bounds: Bounds, share: float) -> bool:
    """Whether a value lies within `share` of the log range from either end.

    The paper says "at or near the edge" and gives no number; 10% is this repository's.
    """
    low, high = map(math.log, bounds)
    margin = share * (high - low) + 1e-9  # a value at the margin counts, whatever the rounding
    return math.log(value) - low <= margin or high - math.log(value) <= margin


def next_ranges(
    best: Mapping[str, float], ranges: Mapping[str, Bounds], share: float, factor: float
) -> dict[str, Bounds]:
    """The ranges of the next round: those of constants whose best value is near an edge move.

    They become best / factor to best * factor; the others stay.
    """
    return {
        key: (best[key] / factor, best[key] * factor)
        if is_near_edge(best[key], bounds, share)
        else bounds
        for key, bounds in ranges.items()
    }


def best_trial(trials: Sequence[Trial]) -> Trial:
    """The complete trial with the lowest loss, the first of equals."""
    return min(trials, key=lambda trial: (trial.loss, trial.number))


def equally_good(trials: Sequence[Trial], within: float) -> list[Trial]:
    """The trials whose loss exceeds the lowest by at most the share `within` of it."""
    bound = (1 + within) * best_trial(trials).loss
    return [trial for trial in trials if trial.loss <= bound]


def arithmetic_means(trials: Sequence[Trial]) -> dict[str, float]:
    """The mean of every constant: the paper's "average"."""
    return {key: sum(t.values[key] for t in trials) / len(trials) for key in trials[0].values}


def geometric_means(trials: Sequence[Trial]) -> dict[str, float]:
    """The mean of every constant in the logarithm, in which they are searched."""
    return {
        key: math.exp(sum(math.log(t.values[key]) for t in trials) / len(trials))
        for key in trials[0].values
    }
