"""Search files: what they may say, and the studies that they mean."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import model_validator

from sweeps.asked import Asked, FileConfig, open_file
from sweeps.sources import Around, Missing
from sweeps.study import MOST_STUDIES, MOST_TRIALS, RATE, Study, Tuning
from sweeps.sweep_file import Values, grid_values
from training import runs
from training.config import PositiveFloat, Section
from training.errors import UserError


class Rate(Section):
    """Where the learning rate of some studies comes from."""

    where: dict[str, Any] = {}
    """Grid key -> value, or list of values, of the studies it is for."""
    around: Around
    """The sweep whose best rate it is."""
    factor: PositiveFloat = 1.0
    """Multiple of that rate."""

    def wanted(self) -> dict[str, list[Any]]:
        """Grid key -> values of the studies it is for."""
        return {k: v if isinstance(v, list) else [v] for k, v in self.where.items()}


class SearchConfig(Tuning, FileConfig):
    """A search file."""

    grid: dict[str, Values] = {}
    """Keys to cross; every combination is a study of its own."""
    rates: list[Rate] = []
    """Where each study's optimizer.lr comes from; by default it is the config's own."""

    @model_validator(mode="after")
    def _can_be_counted(self) -> SearchConfig:
        if (studies := math.prod(map(len, self.grid.values()))) > MOST_STUDIES:
            raise ValueError(
                f"grid: more than {MOST_STUDIES:,} combinations of {', '.join(self.grid)}, each a "
                "study of its own; divide them among several files"
            )
        if studies * self.trials > MOST_TRIALS:
            raise ValueError(
                f"trials: {self.trials:,} in each of {studies:,} studies; at most {MOST_TRIALS:,} "
                "in all: lower trials, or divide the grid among several files"
            )
        return self

    @model_validator(mode="after")
    def _keys_have_one_source(self) -> SearchConfig:
        fixed = {**self.set, **self.grid}
        for key, (low, high) in self.search.items():
            if low >= high:
                raise ValueError(f"search.{key}: [{low:g}, {high:g}]: the lowest value comes first")
            if key in fixed:
                raise ValueError(f"{key!r} is searched; take it out of set and grid")
        if self.rates and RATE in {**fixed, **self.search}:
            raise ValueError(f"rates give {RATE}; take it out of set, grid and search")
        for rate in self.rates:
            for key, values in rate.wanted().items():
                if key not in self.grid or not all(value in self.grid[key] for value in values):
                    raise ValueError(f"rates.where: {key} {rate.where[key]} is not in the grid")
        return self


@dataclass
class Search(Asked):
    """A search file read, with its experiment and its studies."""

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
        fitting = [
            rate
            for rate in self.config.rates
            if all(where.get(key) in values for key, values in rate.wanted().items())
        ]
        if len(fitting) != 1:
            found = "none fits" if not fitting else f"{len(fitting)} fit"
            raise UserError(f"{self.path}: rates: {found} study {name!r}; exactly one must")
        rate = fitting[0]
        try:
            best = self.sources.best(rate.around, self.keys(settings), RATE)
        except Missing as missing:
            self.sources.assume(missing, "counted with the config's own rate")
            return None, "config"
        return best * rate.factor, f"{rate.factor:g} x best of {rate.around.sweep}"

    def run(self, study: Study, values: Mapping[str, float]) -> tuple[Any, str]:
        """The config of a trial and the name of its run."""
        config = self.validated(f"study {study.name!r}", {**study.settings, **values})
        return config, runs.run_id(config, study.name)


def load_search(
    path: Path,
    results: Path = runs.RESULTS,
    preset: str | None = None,
    curves: Sequence[str] | None = None,
    **said: Any,
) -> Search:
    """A search file, its experiment and its studies; UserError for anything that cannot run.

    What may be `said` is in `open_file`.
    """
    if curves:
        raise UserError(f"--curves: {path} is a search, which has no curves")
    search = Search(**open_file(SearchConfig, path, results, preset, **said))
    search.refuse_overrides(search.config.grid, "its grid")
    for condition in search.where:
        if condition.key in search.config.search:
            raise UserError(f"--where {condition.text}: {condition.key} is what {path} searches")
    search.every = [search.study(values) for values in grid_values(search.config.grid, str(path))]
    names = [study.name for study in search.every]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: grid: two studies would be called {name!r}")
    for study in search.every:
        if search.is_meant(study.config):
            search.studies.append(study)
    if not search.studies:
        raise UserError(f"--where: no study of {path} is meant; see them all by --dry-run")
    return search
