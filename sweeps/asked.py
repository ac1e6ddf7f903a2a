"""What a command asks for: a sweep or search file, the changes to it, and which of its runs."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from sweeps.pool import NODE, Needs
from sweeps.sources import Sources, folder_of, preset_of, read_file
from training import runs
from training.config import (
    Count,
    PositiveInt,
    Section,
    leaves,
    parse_overrides,
    parse_yaml,
    set_keys,
    validate,
)
from training.errors import UserError, nearest
from training.experiment import Experiment, load_experiment

CONDITION = re.compile(r"([\w.]+)\s*(<=|>=|==?|!=|<|>)\s*([^<>=\s].*)", re.DOTALL)
SIGNS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True)
class Condition:
    """One condition, such as model.width<=256: which runs are meant, by one of their keys."""

    key: str
    sign: str
    value: Any
    text: str
    place: str
    """Where it is said."""

    @classmethod
    def read(cls, text: str, place: str = "--where") -> Condition:
        """The condition in a word of the command line; UserError if it is none."""
        found = CONDITION.fullmatch(text.strip())
        if found is None:
            raise UserError(
                f"{place} {text!r}: expected a key, one of {' '.join(SIGNS)} and a value, such as "
                "'model.width<=256'"
            )
        sign = {"=": "=="}.get(found[2], found[2])
        return cls(found[1], sign, parse_yaml(found[3], f"{place} {text}"), text, place)

    def compare(self, value: Any) -> bool:
        """Whether a value stands so to the condition's; UserError if it cannot be compared."""
        if value is None and self.sign not in ("==", "!="):
            return False
        try:
            return bool(SIGNS[self.sign](value, self.value))
        except TypeError:
            raise UserError(
                f"{self.place} {self.text}: {self.key} is {value!r}, which is neither more nor "
                f"less than {self.value!r}; compare it by == or !="
            ) from None

    def holds(self, config: Section) -> bool:
        """Whether a run is meant; UserError for a key or a comparison that makes no sense."""
        try:
            value = functools.reduce(getattr, self.key.split("."), config)
            if isinstance(value, Section):
                raise AttributeError
        except AttributeError:
            keys = [key for key, _ in leaves(type(config))]
            raise UserError(
                f"--where {self.text}: unknown key {self.key!r}{nearest(self.key, keys)}"
            ) from None
        return self.compare(value)


def _keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `set` says, by dotted keys; an error for one that it says twice."""
    found: dict[str, Any] = {}
    for key, value in runs.flat(data):
        if key in found:
            raise PydanticCustomError(
                "twice", "expected every key once, {key} stands there twice", {"key": key}
            )
        found[key] = value
    return found


# A section in `set` stands for its keys, so that what it does not name stays as it is.
Keys = Annotated[dict[str, Any], AfterValidator(_keys)]


def _are_whole(gpus: float) -> float:
    if gpus > 1 and gpus % (1 if gpus <= NODE else NODE):
        raise PydanticCustomError(
            "gpus",
            "expected a share of one GPU, a whole number, or above {node} those of whole machines",
            {"node": NODE},
        )
    return gpus


Gpus = Annotated[float, Field(ge=0), AfterValidator(_are_whole)]


class FileConfig(Section):
    """What every file of many runs says."""

    experiment: str
    """Experiment folder: a package with a `train` module."""
    config: str
    """Base config, relative to this file."""
    set: Keys = {}
    """Config keys of all runs."""
    gpus: Gpus = 1
    """GPUs of every run: below 1 a share of one; above 1 it is sharded over them (FSDP2) unless
    --launch says otherwise."""
    processes: PositiveInt | None = None
    """Processes of every run; by default one for each of its GPUs."""
    retries: Count = 1
    """How often a run that fails for a reason of its own is tried again."""


@dataclass
class Asked:
    """A sweep or search file as a command means it, with its experiment."""

    path: Path
    config: Any
    experiment: Experiment
    base: dict[str, Any]
    """The config that all runs start from."""
    folder: Path
    sources: Sources
    where: tuple[Condition, ...]
    overrides: Sequence[str]

    def validated(self, name: str, settings: Mapping[str, Any]) -> Any:
        """The config with some dotted keys set; UserError, naming the curve or study, for a bad
        one."""
        where = f"{self.path}, {name}"
        return validate(self.experiment.config, self._data(settings), where)

    def keys(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All dotted keys of the base config, some of them set."""
        return dict(runs.flat(self._data(settings)))

    def _data(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The base config with some dotted keys set; UserError for what has no place in it."""
        try:
            return set_keys(self.base, settings)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def needs(self, values: Mapping[str, Any]) -> Needs:
        """What a run at some grid values needs."""
        return self._needs(self.config)

    def _needs(self, *parts: Any) -> Needs:
        """What parts of the file say, the last most; a process per GPU unless one says otherwise.

        Raises UserError for processes that cannot be divided over the machines of so many GPUs.
        """
        gpus, processes = 1.0, None
        for part in parts:
            gpus = gpus if part.gpus is None else part.gpus
            processes = part.processes or (processes if part.gpus is None else None)
        needs = Needs(gpus, processes or max(1, int(gpus)))
        if needs.processes % needs.nodes:
            raise UserError(
                f"{self.path}: processes {needs.processes} cannot be divided over the "
                f"{needs.nodes} machines of {gpus:g} GPUs"
            )
        return needs

    def is_meant(self, config: Section) -> bool:
        """Whether --where leaves a run with this config in."""
        return all(condition.holds(config) for condition in self.where)

    def refuse_missing_data(self, configs: Iterable[Any]) -> None:
        """Raises UserError if data that one of these runs reads are not on this machine."""
        unlike = {repr(getattr(config, "data", None)): config for config in configs}
        for config in unlike.values():
            try:
                self.experiment.check_data(config)
            except (OSError, UserError) as error:
                raise UserError(f"{self.path}: {error}") from None

    def refuse_overrides(self, own: Iterable[str], place: str) -> None:
        """Raises UserError for an override of a key to which the file gives values of its own."""
        for word, key in itertools.product(self.overrides, own):
            said = word.partition("=")[0]
            if f"{key}.".startswith(f"{said}.") or f"{said}.".startswith(f"{key}."):
                raise UserError(
                    f"{word}: {self.path} sets {key} itself, in {place}; choose runs by --where or "
                    "change the file"
                )


def open_file(
    kind: type[FileConfig],
    path: Path,
    results: Path,
    preset: str | None,
    *,
    draft: bool = False,
    overrides: Sequence[str] = (),
    where: Sequence[str] = (),
) -> dict[str, Any]:
    """The members of an `Asked` for a file of class `kind`; UserError for what is wrong with it.

    With `draft`, what other sweeps and searches have not found yet is assumed, so that this one can
    be counted before anything has run. `overrides` are key=value words for the config of every run,
    `where` conditions on it.
    """
    data = preset_of(path, preset)
    if "experiment" not in data and {"optimizer", "training"} & data.keys():
        folder = path.absolute().parent.parent.name
        raise UserError(
            f"{path}: this is the config of one run, not a sweep: python -m {folder}.train {path} "
            "trains it; a sweep file names it under `config`"
        )
    config = validate(kind, data, str(path))
    if overrides:
        said = json.loads(json.dumps(parse_overrides(overrides)))  # all keys are text
        data = {**data, "set": config.set | dict(runs.flat(said))}
        config = validate(kind, data, str(path))
    experiment = load_experiment(config.experiment, path)
    free = getattr(experiment.config, "without_effect", ())  # keys that are no part of a run's name
    changes = [
        word
        for word in overrides
        if not any(f"{word.partition('=')[0]}.".startswith(f"{key}.") for key in free)
    ]
    return {
        "path": path,
        "config": config,
        "experiment": experiment,
        "base": read_file(path.parent / config.config),
        "folder": folder_of(path, results, preset, changes),
        "sources": Sources(path, results, preset, draft),
        "where": tuple(map(Condition.read, where)),
        "overrides": overrides,
    }
