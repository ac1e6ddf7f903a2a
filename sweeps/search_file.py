"""Search files: what they may say, the studies that they mean, and how far their trials are."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from sweeps import search_rules, tables
from sweeps.sweep_file import Values, flat, grid_values
from sweeps.trials import Bounds, Journal, Trial, suggest
from training import runs
from training.config import (
    Count,
    PositiveFloat,
    PositiveInt,
    Section,
    apply_preset,
    read_yaml,
    set_keys,
    validate,
)
from training.errors import UserError
from training.experiment import Experiment, load_experiment

RATE = "optimizer.lr"

Range = tuple[PositiveFloat, PositiveFloat]


class Rate(Section):
    """Where the learning rate of some studies comes from."""

    where: dict[str, Any] = {}
    """Grid key -> value, or list of values, of the studies it is for."""
    around: tables.Around
    """The sweep whose best rate it is."""
    factor: PositiveFloat = 1.0
    """Multiple of that rate."""

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether it is for the study at some grid values."""
        return all(values.get(key) in _as_list(wanted) for key, wanted in self.where.items())


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class SearchConfig(Section):
    """A search file."""

    experiment: str
    """Experiment folder: a package with a `train` module."""
    config: str
    """Base config, relative to the search file."""
    set: dict[str, Any] = {}
    """Config keys of all runs."""
    grid: dict[str, Values] = {}
    """Keys to cross; every combination is a study of its own."""
    rates: list[Rate] = []
    """Where each study's optimizer.lr comes from; by default it is the config's own."""
    search: Annotated[dict[str, Range], Field(min_length=1)]
    """Config key -> lowest and highest value of the first round, searched log-uniformly."""
    trials: PositiveInt
    """Trials of a study, in every round."""
    parallel: PositiveInt = 1
    """At most so many trials of a study in progress, over all launchers."""
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
    retries: Count = 1
    """How often a run that fails for a reason of its own is tried again."""

    @model_validator(mode="after")
    def _keys_have_one_source(self) -> SearchConfig:
        for key, (low, high) in self.search.items():
            if low >= high:
                raise ValueError(f"search.{key}: [{low:g}, {high:g}]: the lowest value comes first")
        fixed = {**self.set, **self.grid}
        for key in self.search:
            if key in fixed:
                raise ValueError(f"{key!r} is searched; take it out of set and grid")
        if self.rates and RATE in {**fixed, **self.search}:
            raise ValueError(f"rates give {RATE}; take it out of set, grid and search")
        for rate in self.rates:
            for key, wanted in rate.where.items():
                if key not in self.grid or not all(v in self.grid[key] for v in _as_list(wanted)):
                    raise ValueError(f"rates.where: {key} {wanted} is not in the grid")
        return self


@dataclass(frozen=True)
class Study:
    """One combination of the grid: what is fixed in all its runs."""

    name: str
    where: dict[str, Any]
    settings: dict[str, Any]
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

    @property
    def key(self) -> str:
        """The name of its trials in the journal; other settings or ranges have another one."""
        return _round_key(self.study, self.number, self.ranges)

    @property
    def counted(self) -> list[Trial]:
        """The complete trials, by number, up to the number wanted."""
        return [trial for trial in self.trials if trial.state == "complete"][: self.wanted]

    @property
    def running(self) -> list[Trial]:
        """Trials begun and not ended."""
        return [trial for trial in self.trials if trial.state == "running"]

    @property
    def is_complete(self) -> bool:
        """Whether all trials wanted are complete."""
        return len(self.counted) == self.wanted


def _round_key(study: Study, number: int, ranges: Mapping[str, Bounds]) -> str:
    text = json.dumps([study.identity, {key: list(bounds) for key, bounds in ranges.items()}])
    digest = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    return f"{study.name} round {number} {digest}"


@dataclass
class Search:
    """A search file read, with its experiment, its studies and its journal.

    A draft stands in for rates that sweeps have not found yet, and says so in `assumed`; it can be
    counted, not run.
    """

    config: SearchConfig
    path: Path
    preset: str | None
    experiment: Experiment
    base: dict[str, Any]
    folder: Path
    results: Path
    draft: bool = False
    studies: list[Study] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder)
        self.studies = [self._study(values) for values in grid_values(self.config.grid)]

        names = [study.name for study in self.studies]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"{self.path}: grid: two studies would be called {name!r}")

    @property
    def middle(self) -> dict[str, float]:
        """The centre of the first round's ranges."""
        return {key: math.sqrt(low * high) for key, (low, high) in self.config.search.items()}

    def _study(self, where: dict[str, Any]) -> Study:
        """The study at some grid values; UserError if they make no valid config."""
        name = _label(where.values())
        settings = {**self.config.set, **where}
        rate, source = self._rate(name, where, settings)
        settings |= {} if rate is None else {RATE: rate}
        config = self._validated(name, {**settings, **self.middle})
        identity = json.dumps([runs.identity(config), self.config.sampler_seed], sort_keys=True)
        chosen = None if RATE in self.config.search else config.optimizer.lr
        return Study(name, where, settings, identity, chosen, source)

    def _rate(
        self, name: str, where: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> tuple[float | None, str]:
        """The study's learning rate and its source; None leaves it to the config."""
        fitting = [rate for rate in self.config.rates if rate.fits(where)]
        if not self.config.rates:
            return None, "search" if RATE in self.config.search else "config"
        if len(fitting) != 1:
            found = "none fits" if not fitting else f"{len(fitting)} fit"
            raise UserError(f"{self.path}: rates: {found} study {name!r}; exactly one must")
        rate = fitting[0]
        asked = flat(set_keys(self.base, settings))
        try:
            best = tables.best(rate.around, asked, RATE, self.path, self.results, self.preset)
        except tables.Missing as missing:
            if not self.draft:
                raise
            line = f"{missing}; until then counted with the config's own rate"
            self.assumed += [] if line in self.assumed else [line]
            return None, "config"
        return best * rate.factor, f"{rate.factor:g} x best of {rate.around.sweep}"

    def _validated(self, name: str, settings: Mapping[str, Any]) -> Section:
        where = f"{self.path}, study {name!r}"
        return validate(self.experiment.config, set_keys(self.base, settings), where)

    def run(self, study: Study, values: Mapping[str, float]) -> tuple[Section, str]:
        """The config of a trial and the name of its run."""
        config = self._validated(study.name, {**study.settings, **values})
        return config, runs.run_id(config, study.name)

    def rounds(self, study: Study) -> list[Round]:
        """The rounds of a study that have begun, or whose turn it is."""
        found: list[Round] = []
        ranges: dict[str, Bounds] = dict(self.config.search)
        for number in range(1, self.config.rounds + 1):
            trials = self.journal.trials(_round_key(study, number, ranges))
            found.append(Round(study, number, ranges, trials, self.config.trials))
            following = self._ranges_after(found[-1])
            if following == ranges:
                break
            ranges = following
        return found

    def _ranges_after(self, played: Round) -> dict[str, Bounds]:
        """The ranges of the round after one; the same where it is the last for now."""
        if not played.is_complete or not self.finished(played):
            return played.ranges
        best = search_rules.best_trial(self.finished(played)).values
        return search_rules.next_ranges(
            best, played.ranges, self.config.edge, self.config.extend
        )

    def finished(self, played: Round) -> list[Trial]:
        """The counted trials that have not diverged."""
        notes = self.journal.notes(played.key)
        return [t for t in played.counted if notes[t.number]["status"] == "finished"]

    def first_values(self, rounds: Sequence[Round]) -> list[dict[str, float]]:
        """What the last round tries before it asks the sampler, where its ranges allow it.

        All constants at 1; after a round, its best, so that no later one ends worse: that run is
        done, and costs nothing.
        """
        values = [{key: 1.0 for key in self.config.search}]
        for earlier in rounds[:-1]:
            values.append(search_rules.best_trial(self.finished(earlier)).values)
        inside = rounds[-1].ranges.items()
        distinct = [v for i, v in enumerate(values) if v not in values[:i]]
        return [v for v in distinct if all(low <= v[key] <= high for key, (low, high) in inside)]

    def next_values(self, rounds: Sequence[Round], fresh: Sequence[Trial]) -> dict[str, float]:
        """The values of the last round's next trial, from its number and the trials so far.

        `fresh` are the trials without those that failed in an earlier launch.
        """
        last, tried = rounds[-1], [trial.values for trial in fresh]
        for values in self.first_values(rounds):
            if values not in tried:
                return values
        seed = (self.config.sampler_seed, last.study.name, last.number, len(last.trials))
        return suggest(last.trials, last.ranges, seed)


def _label(values: Sequence[Any]) -> str:
    """Grid values as one word that can be a folder's name."""
    words = (re.sub(r"[^A-Za-z0-9._-]+", "_", str(value)) for value in values)
    return "-".join(words) or "all"


def load_search(
    path: Path, results: Path = runs.RESULTS, preset: str | None = None, draft: bool = False
) -> Search:
    """A search file, its experiment and its studies; UserError for anything that cannot run."""
    config = validate(SearchConfig, apply_preset(read_yaml(path), preset, str(path)), str(path))
    experiment = load_experiment(config.experiment, path)
    base = read_yaml(path.parent / config.config)
    folder = tables.folder_of(path, results, preset)
    return Search(config, path, preset, experiment, base, folder, results, draft)
