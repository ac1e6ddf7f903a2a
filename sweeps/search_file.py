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

from sweeps.pool import Needs
from sweeps.sources import Around, Missing, Sources, folder_of, read_file
from sweeps.study import RATE, Study, Tuning
from sweeps.sweep_file import Values, flat, grid_values
from training import runs
from training.config import Count, PositiveFloat, Section, apply_preset, set_keys, validate
from training.errors import UserError
from training.experiment import Experiment, load_experiment


class Rate(Section):
    """Where the learning rate of some studies comes from."""

    where: dict[str, Any] = {}
    """Grid key -> value, or list of values, of the studies it is for."""
    around: Around
    """The sweep whose best rate it is."""
    factor: PositiveFloat = 1.0
    """Multiple of that rate."""

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Whether it is for the study at some grid values."""
        return all(values.get(key) in _as_list(wanted) for key, wanted in self.where.items())


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class SearchConfig(Tuning):
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
    retries: Count = 1
    """How often a run that fails for a reason of its own is tried again."""
    needs: Needs = Needs()
    """What every run needs; by default what the model's memory and the GPU's size ask for."""

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


@dataclass
class Search:
    """A search file read, with its experiment and its studies."""

    config: SearchConfig
    path: Path
    preset: str | None
    experiment: Experiment
    base: dict[str, Any]
    folder: Path
    sources: Sources
    studies: list[Study] = field(default_factory=list)

    def __post_init__(self) -> None:
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
            best = self.sources.best(rate.around, asked, RATE)
        except Missing as missing:
            self.sources.assume(missing, "counted with the config's own rate")
            return None, "config"
        return best * rate.factor, f"{rate.factor:g} x best of {rate.around.sweep}"

    def _validated(self, name: str, settings: Mapping[str, Any]) -> Section:
        where = f"{self.path}, study {name!r}"
        return validate(self.experiment.config, set_keys(self.base, settings), where)

    def run(self, study: Study, values: Mapping[str, float]) -> tuple[Section, str]:
        """The config of a trial and the name of its run."""
        config = self._validated(study.name, {**study.settings, **values})
        return config, runs.run_id(config, study.name)


def _label(values: Sequence[Any]) -> str:
    """Grid values as one word that can be a folder's name."""
    words = (re.sub(r"[^A-Za-z0-9._-]+", "_", str(value)) for value in values)
    return "-".join(words) or "all"


def load_search(
    path: Path, results: Path = runs.RESULTS, preset: str | None = None, draft: bool = False
) -> Search:
    """A search file, its experiment and its studies; UserError for anything that cannot run."""
    config = validate(SearchConfig, apply_preset(read_file(path), preset, str(path)), str(path))
    experiment = load_experiment(config.experiment, path)
    base = read_file(path.parent / config.config)
    folder = folder_of(path, results, preset)
    sources = Sources(path, results, preset, draft)
    return Search(config, path, preset, experiment, base, folder, sources)
