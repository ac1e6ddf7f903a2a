"""Search files: their keys, the studies that they define, and the constants that trials give.

A study is one combination of the grid: trials of an ordinary run each, log-uniform in the searched
keys (Everett et al., App. C.2; a constant is one gamma of eta_l = beta_n * gamma_l * (n/b)^(-c_l)).
It goes on in rounds: if the best value of a constant lies at or near an edge of its range, that
moves there. Trials are Optuna's own, in its journal; `search.py` runs them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from sweeps.journal import Bounds, Journal, Ranges, distributions
from sweeps.request import Around, FileConfig, LoadedFile, Missing, open_file
from sweeps.sweep_file import Values, grid_values
from training import runs
from training.config import Count, PositiveFloat, PositiveInt, Section
from training.errors import UserError
from training.settings import RunConfig

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

RATE = "optimizer.lr"
# Trials of a search file, 12,800 in the paper's. All that are to come are counted when the file is
# read, a trial in 10 to 20 us and 0.7 kB, and commands on the largest file shall take 2 s.
MOST_TRIALS = 40_000


class Rate(Section):
    """Where the learning rate of some studies comes from."""

    where: dict[str, Any] = {}
    """Grid key -> value, or list of values, of the studies it is for."""
    around: Around
    """The sweep whose best rate it is."""
    factor: PositiveFloat = 1.0
    """Multiple of that rate."""

    def fits(self, where: Mapping[str, Any]) -> bool:
        """Whether it is for the study at some grid values."""
        return all(where.get(key) in _listed(value) for key, value in self.where.items())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class SearchConfig(FileConfig):
    """A search file."""

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
    grid: dict[str, Values] = {}
    """Keys to cross; every combination is a study of its own."""
    rates: list[Rate] = []
    """Where each study's optimizer.lr comes from; by default it is the config's own."""

    @model_validator(mode="after")
    def _parts_agree(self) -> SearchConfig:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        studies = math.prod(map(len, self.grid.values()))
        if studies * self.trials > MOST_TRIALS:
            yield (
                f"trials: {self.trials:,} in each of {studies:,} studies; at most {MOST_TRIALS:,} "
                "in all: lower trials, or divide the grid among several files"
            )
        fixed = {**self.set, **self.grid}
        for key, (low, high) in self.search.items():
            if low >= high:
                yield f"search.{key}: [{low:g}, {high:g}]: the lowest value comes first"
            if key in fixed:
                yield f"{key!r} is searched; take it out of set and grid"
        if self.rates and RATE in {**fixed, **self.search}:
            yield f"rates give {RATE}; take it out of set, grid and search"
        for rate in self.rates:
            for key, value in rate.where.items():
                if not all(one in self.grid.get(key, ()) for one in _listed(value)):
                    yield f"rates.where: {key} {value} is not in the grid"


@dataclass(frozen=True)
class Study:
    """One combination of the grid: what is fixed in all its runs."""

    name: str
    where: dict[str, Any]
    config: RunConfig
    """With every searched value in the middle of its first range."""
    identity: str
    rate: float | None  # None where it is searched itself
    rate_from: str
    at: Callable[[Mapping[str, float]], RunConfig]
    """Its config with searched values; UserError where they make none."""

    def is_valid(self, values: Mapping[str, float]) -> bool:
        """Whether searched values make a config."""
        try:
            self.at(values)
        except UserError:
            return False
        return True


@dataclass
class Search(LoadedFile):
    """A search file with its experiment and its studies."""

    config: SearchConfig
    every: list[Study] = field(default_factory=list)
    """All studies of the file."""
    studies: list[Study] = field(default_factory=list)
    """Those that are meant."""

    def study(self, where: dict[str, Any]) -> Study:
        """The study at some grid values; UserError if they make no valid config."""
        # A word that can be a folder's name.
        words = [re.sub(r"[^A-Za-z0-9._-]+", "_", str(value)) for value in where.values()]
        name = "-".join(words) or "all"
        settings = {**self.config.set, **where}
        rate, source = self._rate(name, where, settings)
        settings |= {} if rate is None else {RATE: rate}
        ranges = self.config.search.items()
        middle = {key: math.sqrt(low) * math.sqrt(high) for key, (low, high) in ranges}

        def at(values: Mapping[str, float]) -> RunConfig:
            return self.validated(f"study {name!r}", {**settings, **values})

        config, *_ = at(middle), *(at({**middle, key: end}) for key, ends in ranges for end in ends)
        identity = json.dumps([runs.identity(config), self.config.sampler_seed], sort_keys=True)
        chosen = None if RATE in self.config.search else config.optimizer.lr
        return Study(name, where, config, identity, chosen, source, at)

    def _rate(
        self, name: str, where: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> tuple[float | None, str]:
        """The study's learning rate and its source; None leaves it to the config."""
        if not self.config.rates:
            return None, "search" if RATE in self.config.search else "config"
        fitting = [rate for rate in self.config.rates if rate.fits(where)]
        if len(fitting) != 1:
            count = "none fits" if not fitting else f"{len(fitting)} fit"
            raise UserError(f"{self.path}: rates: {count} study {name!r}; exactly one must")
        rate = fitting[0]
        try:
            best = self.sources.best(rate.around, self.keys(settings), RATE)
        except Missing as missing:
            self.sources.assume(missing, "counted with the config's own rate")
            return None, "config"
        return best * rate.factor, f"{rate.factor:g} x best of {rate.around.sweep}"


def load_search(
    path: Path,
    results: Path = runs.RESULTS,
    preset: str | None = None,
    *,
    curves: Sequence[str] = (),
    **options: Any,
) -> Search:
    """A search file, its experiment and its studies; UserError for anything that cannot run.

    Other options are those of `open_file`.
    """
    if curves:
        raise UserError(f"--curves: {path} is a search, which has no curves")
    search = Search(**open_file(SearchConfig, path, results, preset, **options))
    search.refuse_overrides(search.config.grid, "its grid")
    search.refuse_overrides(search.config.search, "what it searches")
    for condition in search.where:
        if condition.key in search.config.search:
            raise UserError(f"--where {condition.text}: {condition.key} is what {path} searches")
    search.every = [search.study(values) for values in grid_values(search.config.grid, str(path))]
    names = [study.name for study in search.every]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: grid: two studies would be called {name!r}")
    search.studies = [study for study in search.every if search.is_meant(study.config)]
    if not search.studies:
        raise UserError(f"--where: no study of {path} matches; --dry-run without it lists them all")
    return search


@dataclass(frozen=True)
class Round:
    """One pass of a study over given ranges."""

    study: Study
    number: int
    ranges: dict[str, Bounds]
    wanted: int
    journal: Journal

    @functools.cached_property
    def key(self) -> str:
        """The name of its trials in the storage; other settings or ranges have another one."""
        ranges = {key: list(bounds) for key, bounds in self.ranges.items()}
        text = json.dumps([self.study.identity, ranges])
        digest = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
        return f"{self.study.name} round {self.number} {digest}"

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials begun so far, by number."""
        return self.journal.trials(self.key)

    @property
    def counted(self) -> list[FrozenTrial]:
        """The complete trials, by number, up to the number wanted."""
        return [trial for trial in self.trials if trial.state.name == "COMPLETE"][: self.wanted]

    @property
    def finished(self) -> list[FrozenTrial]:
        """The counted trials that have not diverged."""
        return [trial for trial in self.counted if trial.user_attrs["status"] == "finished"]

    @property
    def running(self) -> list[FrozenTrial]:
        """Trials begun and not ended."""
        return [trial for trial in self.trials if trial.state.name == "RUNNING"]

    @property
    def missing(self) -> int:
        """How many of the trials wanted are not complete."""
        return self.wanted - len(self.counted)


def rounds_of(config: SearchConfig, study: Study, journal: Journal) -> list[Round]:
    """The rounds of a study that have begun, or whose turn it is."""
    rounds, ranges = [], dict(config.search)
    for number in range(1, config.rounds + 1):
        rounds.append(Round(study, number, ranges, config.trials, journal))
        if rounds[-1].missing or not rounds[-1].finished:
            break
        best = best_trial(rounds[-1].finished).params
        following = next_ranges(best, ranges, config.edge, config.extend, study.is_valid)
        if following == ranges:
            break
        ranges = following
    return rounds


def next_values(
    config: SearchConfig, rounds: Sequence[Round], fresh: Sequence[FrozenTrial]
) -> dict[str, float]:
    """The values of the last round's next trial, from its number and the trials so far.

    Before the sampler is asked, and where the ranges allow it, all constants are 1; and after a
    round, its best is tried, so that no later one ends worse: that run is done, and costs nothing.
    """
    last, tried = rounds[-1], [trial.params for trial in fresh]
    first = [dict.fromkeys(config.search, 1.0)]
    first += [best_trial(earlier.finished).params for earlier in rounds[:-1]]
    for values in first:
        inside = all(low <= values[key] <= high for key, (low, high) in last.ranges.items())
        if inside and values not in tried:
            return values
    trials = last.trials
    seed = (config.sampler_seed, last.study.name, last.number, len(trials))
    return suggest(trials, last.ranges, seed)


def constants_of(config: SearchConfig, rounds: Sequence[Round]) -> dict[str, Any]:
    """What constants.yaml says about a complete study."""
    last = rounds[-1]
    finished, counted = last.finished, last.counted
    best, good = best_trial(finished), equally_good(finished, config.equal_within)
    values = {key: [trial.params[key] for trial in good] for key in good[0].params}
    ones = (t for r in rounds for t in r.finished if set(t.params.values()) == {1.0})
    return {
        "where": last.study.where,
        "set": {key: sum(column) / len(good) for key, column in values.items()},
        # In the logarithm, in which they are searched.
        "geometric_means": {
            key: math.exp(sum(map(math.log, column)) / len(good)) for key, column in values.items()
        },
        "equally_good": len(good),
        "best": {
            "trial": best.number,
            "loss": best.value,
            "run": best.user_attrs["run"],
            "set": best.params,
        },
        "loss_with_all_at_1": next((trial.value for trial in ones), None),
        "trials": len(counted),
        "diverged": len(counted) - len(finished),
        "rounds": last.number,
        "ranges": {key: list(bounds) for key, bounds in last.ranges.items()},
        "near_edge": [
            key
            for key, bounds in last.ranges.items()
            if is_near_edge(best.params[key], bounds, config.edge)
        ],
        "rate": last.study.rate,
        "rate_from": last.study.rate_from,
        "commit": best.user_attrs["commit"],
    }


def suggest(trials: Sequence[FrozenTrial], ranges: Ranges, seed: object) -> dict[str, float]:
    """The values to try next, log-uniform at first: a pure function of its arguments.

    The sampler is a multivariate tree-structured Parzen estimator. It uses ranks, so the size of a
    diverged run's penalty has no effect. Running trials count as bad ("constant liar"), which keeps
    100 parallel ones apart. Optuna's Gaussian process, on a noisy bowl in three constants with a
    diverging region (300 trials, 100 at once), took 95 s against 1 s and found a worse optimum.
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
    study.add_trials(trials)
    return dict(study.ask(distributions(ranges)).params)


def is_near_edge(value: float, bounds: Bounds, share: float) -> bool:
    """Whether a value lies within `share` of the log range from either end.

    The paper says "at or near the edge" and gives no number; 10% is this repository's.
    """
    low, high = map(math.log, bounds)
    margin = share * (high - low) + 1e-9  # include a value exactly at the margin
    return math.log(value) - low <= margin or high - math.log(value) <= margin


def next_ranges(
    best: Mapping[str, float],
    ranges: Ranges,
    share: float,
    factor: float,
    is_valid: Callable[[Mapping[str, float]], bool],
) -> dict[str, Bounds]:
    """The ranges of the next round: those of constants whose best value is near an edge move.

    They become best / factor to best * factor, as far as such values make a config; the others
    stay.
    """

    def last_valid(key: str, end: float) -> float:
        """The value closest to `end` that makes a config, by halving the logarithm's interval."""
        inside, outside = best[key], end
        while not is_valid({**best, key: outside}):
            middle = math.sqrt(inside) * math.sqrt(end)
            if middle in (inside, end):
                return inside
            if is_valid({**best, key: middle}):
                inside = middle
            else:
                end = outside = middle
        return outside

    tiny, huge = sys.float_info.min, sys.float_info.max
    return {
        key: (
            last_valid(key, max(best[key] / factor, tiny)),
            last_valid(key, min(best[key] * factor, huge)),
        )
        if is_near_edge(best[key], bounds, share)
        else bounds
        for key, bounds in ranges.items()
    }


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial:
    """The complete trial with the lowest loss, the first of equals."""
    return min(trials, key=lambda trial: (trial.value, trial.number))


def equally_good(trials: Sequence[FrozenTrial], within: float) -> list[FrozenTrial]:
    """The trials whose loss exceeds the lowest by at most the share `within` of it."""
    losses = [trial.value for trial in trials if trial.value is not None]  # complete ones have one
    bound = (1 + within) * min(losses)
    return [trial for trial, loss in zip(trials, losses, strict=True) if loss <= bound]


def objective(summary: Mapping[str, Any], config: RunConfig) -> float | None:
    """What a trial minimises: the final evaluation loss, in nats per target.

    A run that diverged has the loss at which the loop calls it diverged, divergence_factor times
    the first training loss. None if even that one was not finite, which no learning rate can fix.
    """
    if summary["status"] == "finished":
        return summary["final_eval_loss"]
    first = summary["first_train_loss"]
    return None if first is None else config.training.divergence_factor * first
