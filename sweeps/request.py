"""What a command asks for: a file with overrides and conditions, and what it takes from others.

A sweep starts around the best rate of a cell of another one, or takes constants that a search has
found. Tables are found by the sweep file that makes them, under the same preset, so a figure's file
says where each of its numbers comes from.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from sweeps.pool import NODE, Needs
from training import config as configs
from training import runs
from training.conditions import SIGNS, parse
from training.config import Count, PositiveInt, Section
from training.errors import UserError, nearest
from training.experiment import Experiment, load_experiment
from training.files import if_present, parse_json, read_text, refuse_changed
from training.settings import RunConfig

FRESH = "fresh"  # column of tables: a seed that had no say in the choice of its rate
T = TypeVar("T")
# A section in `set` stands for its keys, so that what it does not name stays as it is.
Keys = Annotated[dict[str, Any], AfterValidator(lambda data: dict(runs.flat(data)))]


class Missing(UserError):
    """What another sweep or search shall give is not there yet."""


def cached(parse: Callable[[Path], T]) -> Callable[[Path], T]:
    """Reads a file again only when it has changed: every point of a sweep asks for the same ones.

    What it returns is shared, and not to be changed. Only the newest version of a file is kept.
    """
    known: dict[Path, tuple[tuple[int, ...], T]] = {}

    @functools.wraps(parse)
    def read(path: Path) -> T:
        try:
            stat = path.stat()
        except OSError:
            return parse(path)  # whose own error it is
        stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if path not in known or known[path][0] != stamp:
            known[path] = stamp, parse(path)
        return known[path][1]

    return read


read_file = cached(configs.read_yaml)


@cached
def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV table, all of them text; OSError or ValueError where there is none, or
    another one than was written."""
    refuse_changed(path)
    rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    if rows and "curve" not in rows[0]:
        raise UserError(f"{path}: no column curve; delete it, and the sweep writes it again")
    return rows


def plain(value: Any) -> float | str:
    """A value of a config, or the text that stands for it in a table, as both are compared."""
    text = "" if value is None else str(value)
    try:
        return float(text)
    except ValueError:
        return text


@cached
def read_manifest(path: Path) -> list[dict[str, Any]]:
    """The runs that a sweep has asked for so far; none if the manifest is missing or damaged.
    UserError for another one than was written, or for one that cannot be read now."""
    refuse_changed(path)
    with if_present(path), suppress(ValueError, TypeError, KeyError):  # a RunError is a ValueError
        entries = parse_json(read_text(path))
        return [{**entry, "run": entry["run"], "curve": entry["curve"]} for entry in entries]
    return []


def preset_of(file: Path, preset: str | None) -> dict[str, Any]:
    """What a sweep or search file says under a preset."""
    return configs.apply_preset(read_file(file), preset, str(file))


def folder_of(file: Path, results: Path, preset: str | None, overrides: Sequence[str] = ()) -> Path:
    """Where results are: results/<experiment>/<stem>[_<preset>][+<overrides>]."""
    name = file.stem if preset is None else f"{file.stem}_{preset}"
    if overrides:
        changes = "+".join(sorted(overrides))
        if not re.fullmatch(r"[\w.=+-]{1,80}", changes):
            changes = hashlib.blake2b(changes.encode(), digest_size=5).hexdigest()
        name += f"+{changes}"
    return results / str(preset_of(file, preset).get("experiment")) / name


class Around(Section):
    """The best value that another sweep found for the same kind of run."""

    sweep: str
    """File of that sweep, relative to this one."""
    match: Annotated[list[str], Field(min_length=1)]
    """Columns in which its runs must agree with this point. One curve at one set of its other grid
    values must be left, at any seeds."""
    where: dict[str, Any] = {}
    """Columns of its runs that must have these values."""
    at: dict[str, Any] = {}
    """Values to look for in place of the point's own, such as {model.width: 1024}."""
    preset: str | None = None
    """Preset of that sweep; by default this sweep's own. Another one with other seeds, so that a
    rate is chosen on some seeds and judged on others."""


@dataclass
class Sources:
    """Everything that the sweep or search in `file` takes from other ones.

    A draft does without what they have not found yet, and says so in `assumed`.
    """

    file: Path
    results: Path
    preset: str | None
    draft: bool = False
    assumed: list[str] = field(default_factory=list)

    def assume(self, missing: Missing, instead: str) -> None:
        """Notes what a draft does without; raises `missing` otherwise."""
        if not self.draft:
            raise missing
        line = f"{missing}; until then {instead}"
        self.assumed += [] if line in self.assumed else [line]

    def best(self, around: Around, settings: Mapping[str, Any], key: str) -> float:
        """The value of `key` with the lowest mean final evaluation loss over seeds.

        `settings` are the point's own keys and values. Raises Missing when that sweep has no such
        run yet, or runs to come in the same cell; UserError when its table has no such column or
        when runs of several curves or cells fit, whose rates mean different things.
        """
        table, command = self._place("results.csv", around.sweep, "run", around.preset)
        if "curve" in around.where:
            command += f" --curves {around.where['curve']}"
        rows = read_table(table) if table.exists() else []
        if not rows:
            raise Missing(f"{table} has no runs yet; first run {command}")
        matched = {k: around.at.get(k, settings.get(k)) for k in (*around.match, *around.at)}
        wanted = {**around.where, **matched}
        for column in (key, *wanted):
            if column not in rows[0]:
                raise UserError(f"{self.file}: around: {table} has no column {column!r}")
        if lacking := [name for name, value in matched.items() if value is None]:
            raise UserError(f"{self.file}: around.match: {lacking[0]!r} has no value in this sweep")
        fitting = [row for row in rows if all(plain(row[c]) == plain(v) for c, v in wanted.items())]
        data = preset_of(self.file.parent / around.sweep, around.preset or self.preset)
        parts = [data, *data.get("curves", {}).values()]
        crossed = itertools.chain(*(part.get("grid", ()) for part in parts if part))
        for column in {"curve": None, **dict.fromkeys(crossed)}:
            cells = {plain(row.get(column)): row.get(column, "") for row in fitting}
            if len(cells) > 1 and column != key and column.rpartition(".")[2] != "seed":
                raise UserError(
                    f"{self.file}: around: runs of {table} that fit differ in {column} "
                    f"({', '.join(cells.values())}); name {column} in match, where or at"
                )
        to_come = _to_come(table, fitting, {row.get("run", "") for row in rows}, key)
        if to_come:  # the best may be among them
            raise Missing(
                f"{table}: not complete, {len(to_come)} of the runs that this sweep starts around "
                f"are to come ({to_come[0]}); finish {command}"
            )
        losses: dict[float, dict[tuple[str, ...], float]] = {}
        for row in fitting:
            if row["status"] != "failed" and row.get(FRESH) != "True":
                loss = float(row["final_eval_loss"] or math.inf)
                seed = tuple(v for k, v in row.items() if k.rpartition(".")[2] == "seed")
                losses.setdefault(float(row[key]), {})[seed] = loss
        # Means over the seeds that all values have: further ones may stand beside an optimum alone.
        shared = set.intersection(*map(set, losses.values())) if losses else set()
        means = {v: fmean(of[one] for one in shared or of) for v, of in losses.items()}
        chosen = min(means, key=lambda value: (means[value], value), default=None)
        if chosen is None or math.isinf(means[chosen]):
            raise Missing(
                f"{table}: no run with {_words(wanted)} that ended well; finish {command}"
            )
        return chosen

    def constants(
        self, search: str, config: Mapping[str, Any], preset: str | None = None
    ) -> tuple[dict[str, Any], bool | str]:
        """The config keys and values that a search found for runs like `config` (dotted keys), and
        True, or "near_edge" where it ended near an edge of its ranges.

        `search` is the search file relative to this one, `preset` its preset if it is not this
        sweep's. Raises Missing when the search has not got there yet.
        """
        path, command = self._place("constants.yaml", search, "search", preset)
        if not path.exists():
            raise Missing(f"{path} does not exist; first run {command}")
        refuse_changed(path)
        entries = read_file(path).get("constants") or []
        fitting = [e for e in entries if all(config.get(k) == v for k, v in e["where"].items())]
        if not fitting:
            keys = dict.fromkeys(key for entry in entries for key in entry["where"])
            wanted = _words({key: config.get(key) for key in keys}) or "these runs"
            raise Missing(f"{path}: no constants for {wanted}; finish {command}")
        return fitting[0]["set"], "near_edge" if fitting[0].get("near_edge") else True

    def _place(
        self, name: str, source: str, command: str, preset: str | None = None
    ) -> tuple[Path, str]:
        """A file among another sweep's results, and the command that makes it."""
        file, preset = self.file.parent / source, preset or self.preset
        path = folder_of(file, self.results, preset) / name
        option = f" --preset {preset}" if preset else ""
        return path, f"python -m sweeps {command} {file}{option}"


def _to_come(table: Path, rows: Sequence[Mapping[str, str]], done: set[str], key: str) -> list[str]:
    """The runs to come in the cells of some rows: those that differ in `key` and seed at most.

    A sweep notes in its manifest what a result asks for before the result is in its table.
    """
    return [
        entry["run"]
        for entry in read_manifest(table.parent / "manifest.json")
        if entry["run"] not in done and not entry.get(FRESH)
        if any(
            row["curve"] == entry["curve"]
            and all(plain(row.get(k)) == plain(v) for k, v in entry["values"].items() if k != key)
            for row in rows
        )
    ]


def _words(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in wanted.items())


@dataclass(frozen=True)
class Where:
    """A condition on the config of a run, such as model.width<=256."""

    key: str
    sign: str
    value: Any
    text: str

    @classmethod
    def parse(cls, text: str) -> Where:
        """The condition in a word of the command line; UserError if it is none."""
        key, sign, value = parse(text, UserError)
        return cls(key, sign, configs.parse_yaml(value, f"--where {text}"), text)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of a table, with all its keys, is of a run that is meant."""
        value, other = plain(row.get(self.key)), plain(self.value)
        return SIGNS[self.sign](value, other) if type(value) is type(other) else self.sign == "!="

    def holds(self, config: Section) -> bool:
        """Whether a config meets the condition; UserError for an unknown key or bad comparison."""
        keys = [key for key, _ in configs.leaves(type(config))]
        if self.key not in keys:
            raise UserError(
                f"--where {self.text}: unknown key {self.key!r}{nearest(self.key, keys)}"
            )
        value = functools.reduce(getattr, self.key.split("."), config)
        if value is None and self.sign in ("<", "<=", ">", ">="):
            return False
        try:
            return bool(SIGNS[self.sign](value, self.value))
        except TypeError:
            raise UserError(
                f"--where {self.text}: {self.key} is {value!r}, which is neither more nor less "
                f"than {self.value!r}; compare it by == or !="
            ) from None


class FileConfig(Section):
    """What every file of many runs says."""

    experiment: str
    """Experiment folder: a package with a `train` module."""
    config: str
    """Base config, relative to this file."""
    set: Keys = {}
    """Config keys of all runs."""
    gpus: PositiveInt = 1
    """GPUs of every run. Above 1 it is sharded over them (FSDP2) unless --launch says otherwise;
    above 8 these are whole machines."""
    processes: PositiveInt | None = None
    """Processes of every run; by default one for each of its GPUs."""
    retries: Count = 1
    """How often a run that fails for a reason of its own is tried again."""


@dataclass
class LoadedFile:
    """A sweep or search file as a command means it, with its experiment."""

    path: Path
    config: FileConfig
    experiment: Experiment[RunConfig]
    base: dict[str, Any]
    """The config that all runs start from."""
    folder: Path
    sources: Sources
    where: tuple[Where, ...]
    overrides: Sequence[str]

    def validated(self, name: str, settings: Mapping[str, Any]) -> RunConfig:
        """The config with dotted keys set; UserError, naming the curve or study, for a bad one."""
        where = f"{self.path}, {name}"
        return configs.validate(self.experiment.config, self._data(settings), where)

    def keys(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All dotted keys of the base config, some of them set."""
        return dict(runs.flat(self._data(settings)))

    def _data(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return configs.set_keys(self.base, settings)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def needs(self, values: Mapping[str, Any]) -> Needs:
        """What a run at some grid values needs. The last part of the file that sets a key decides;
        by default a run has one process per GPU. UserError for what no machines have."""
        gpus, processes = 1, None
        for part in (self.config, *self._adjustments(values)):
            gpus = part.gpus or gpus
            processes = part.processes or (processes if part.gpus is None else None)
        needs = Needs(gpus, processes or gpus)
        if (gpus > NODE and gpus % NODE) or needs.processes % needs.nodes:
            raise UserError(
                f"{self.path}: gpus {gpus}, processes {needs.processes}: above {NODE} GPUs a run "
                "has those of whole machines, and as many processes on each"
            )
        return needs

    def _adjustments(self, values: Mapping[str, Any]) -> Sequence[Any]:
        """The parts of the file that say something else of runs at some grid values."""
        return ()

    def is_meant(self, config: Section) -> bool:
        """Whether --where leaves a run with this config in."""
        return all(condition.holds(config) for condition in self.where)

    def missing_data(self, configs: Iterable[RunConfig]) -> Iterator[str]:
        """A line on data that these runs read and this machine lacks; plans are made before."""
        unlike = {repr(getattr(config, "data", None)): config for config in configs}
        for config in unlike.values():
            try:
                self.experiment.check_data(config)
            except (OSError, UserError) as error:
                yield f"note: {self.path}: {error}"

    def refuse_overrides(self, keys: Iterable[str], place: str) -> None:
        """Raises UserError for an override of a key to which the file gives values of its own."""
        for word, key in itertools.product(self.overrides, keys):
            changed = word.partition("=")[0]
            if f"{key}.".startswith(f"{changed}.") or f"{changed}.".startswith(f"{key}."):
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
    """The members of a `LoadedFile` for a file of class `kind`; UserError for what is wrong there.

    With `draft`, what other sweeps and searches have not found yet is assumed, so that this one can
    be counted before anything has run. `overrides` are key=value words for the config of every run,
    `where` conditions on it.
    """
    data = preset_of(path, preset)
    config = configs.validate(kind, data, str(path))
    if overrides:
        changes = json.loads(json.dumps(configs.parse_overrides(overrides)))  # all keys are text
        config = config.model_copy(update={"set": config.set | dict(runs.flat(changes))})
    experiment = load_experiment(config.experiment, path)
    free = getattr(experiment.config, "without_effect", ())  # keys that are no part of a run's name
    named = [
        word
        for word in overrides
        if not any(f"{word.partition('=')[0]}.".startswith(f"{key}.") for key in free)
    ]
    return {
        "path": path,
        "config": config,
        "experiment": experiment,
        "base": read_file(path.parent / config.config),
        "folder": folder_of(path, results, preset, named),
        "sources": Sources(path, results, preset, draft),
        "where": tuple(map(Where.parse, where)),
        "overrides": overrides,
    }
