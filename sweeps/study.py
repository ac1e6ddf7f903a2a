"""Search files: what they may say, the studies that they mean, and what trials say in the end.

A study is one combination of the grid: trials of an ordinary run each, log-uniform in the searched
keys (Everett et al., App. C.2; a constant is one gamma of eta_l = beta_n * gamma_l * (n/b)^(-c_l)).
It goes on in rounds: if the best value of a constant lies at or near an edge of its range, that
moves there. All of it is pure; `search.py` runs it. Trials are Optuna's own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from sweeps.request import Around, FileConfig, LoadedFile, Missing, open_file
from sweeps.sweep_file import Values, grid_values
from training import runs
from training.config import Count, PositiveFloat, PositiveInt, Section
from training.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

RATE = "optimizer.lr"
# Trials of a search file, 12,800 in the paper's. All that are to come are counted when the file is
# read, a trial in 10 to 20 us and 0.7 kB, and commands on the largest file shall take 2 s.
MOST_TRIALS = 40_000
Bounds = tuple[float, float]
Ranges = Mapping[str, Bounds]


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
    settings: dict[str, Any]
    config: Any
    """With every searched value in the middle of its first range."""
    identity: str
    rate: float | None  # None where it is searched itself
    rate_from: str


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
        middle = {key: math.sqrt(low * high) for key, (low, high) in ranges}
        config = self.validated(f"study {name!r}", {**settings, **middle})
        identity = json.dumps([runs.identity(config), self.config.sampler_seed], sort_keys=True)
        chosen = None if RATE in self.config.search else config.optimizer.lr
        return Study(name, where, settings, config, identity, chosen, source)

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
    curves: Sequence[str] | None = None,
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
        raise UserError(f"--where: no study of {path} is meant; see them all by --dry-run")
    return search


def suggest(trials: Sequence[FrozenTrial], ranges: Ranges, seed: object) -> dict[str, float]:
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
    study.add_trials(trials)
    return dict(study.ask(distributions(ranges)).params)


def distributions(ranges: Ranges) -> dict[str, BaseDistribution]:
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
    best: Mapping[str, float], ranges: Ranges, share: float, factor: float
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


def best_trial(trials: Sequence[FrozenTrial]) -> FrozenTrial:
    """The complete trial with the lowest loss, the first of equals."""
    return min(trials, key=lambda trial: (trial.value, trial.number))


def equally_good(trials: Sequence[FrozenTrial], within: float) -> list[FrozenTrial]:
    """The trials whose loss exceeds the lowest by at most the share `within` of it."""
    losses = [trial.value for trial in trials if trial.value is not None]  # complete ones have one
    bound = (1 + within) * min(losses)
    return [trial for trial, loss in zip(trials, losses, strict=True) if loss <= bound]


def objective(summary: Mapping[str, Any], config: Any) -> float | None:
    """What a trial minimises: the final evaluation loss, in nats per target.

    A run that diverged has the loss at which the loop calls it diverged, divergence_factor times
    the first training loss. None if even that one was not finite, which no learning rate can fix.
    """
    if summary["status"] == "finished":
        return summary["final_eval_loss"]
    first = summary["first_train_loss"]
    return None if first is None else config.training.divergence_factor * first
