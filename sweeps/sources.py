"""What one sweep takes from another: the best rate of a cell, and constants that a search found.

Tables are found by the sweep file that makes them, under the same preset, so a figure's sweep file
says where each of its numbers comes from.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from training.config import Section, apply_preset, read_yaml
from training.errors import UserError

# Column of tables: whether a run's seed is a fresh one, which had no say in the choice of its rate.
FRESH = "fresh"


class Missing(UserError):
    """What another sweep or search shall give is not there yet."""


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


def cached(parse: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Reads a file again only when it has changed: every point of a sweep asks for the same ones.

    What it returns is shared, and not to be changed.
    """

    @functools.lru_cache(maxsize=256)
    def parsed(path: Path, stamp: tuple[int, ...]) -> Any:
        return parse(path)

    @functools.wraps(parse)
    def read(path: Path) -> Any:
        try:
            found = path.stat()
        except OSError:
            return parse(path)  # whose own error it is
        return parsed(path, (found.st_ino, found.st_mtime_ns, found.st_size))

    return read


read_file = cached(read_yaml)
read_own = cached(functools.partial(read_yaml, own=True))


def preset_of(file: Path, preset: str | None) -> dict[str, Any]:
    """What a sweep or search file says under a preset."""
    return apply_preset(read_file(file), preset, str(file))


def is_override(word: str) -> bool:
    """Whether a word of the command line is key=value, and neither an option nor a file."""
    return "=" in word and not word.startswith("-") and not os.path.exists(word)


def folder_of(file: Path, results: Path, preset: str | None, overrides: Sequence[str] = ()) -> Path:
    """Where a sweep's or search's results are: results/<experiment>/<stem>[_<preset>].

    With overrides, whose tables are not those of the file as it stands, they follow after a `+`.
    """
    name = file.stem if preset is None else f"{file.stem}_{preset}"
    if overrides:
        changes = "+".join(sorted(overrides))
        if not re.fullmatch(r"[\w.=+-]{1,80}", changes):
            changes = hashlib.blake2b(changes.encode(), digest_size=5).hexdigest()
        name += f"+{changes}"
    return results / str(preset_of(file, preset).get("experiment")) / name


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
        run yet, UserError when its table has no such column or when runs of several curves or cells
        fit, whose rates mean different things.
        """
        table, command = self._place("results.csv", around.sweep, "run", around.preset)
        if "curve" in around.where:
            command += f" --curves {around.where['curve']}"
        try:
            rows = read_table(table)
        except FileNotFoundError:
            raise Missing(f"{table} does not exist; first run {command}") from None
        if not rows:
            raise Missing(f"{table} has no runs; first run {command}")
        own = {k: around.at.get(k, settings.get(k)) for k in (*around.match, *around.at)}
        for name, value in own.items():
            if value is None:
                raise UserError(
                    f"{self.file}: around.match: {name!r} has no value in this sweep; set it"
                )
        wanted = {**around.where, **own}
        for column in (key, *wanted):
            if column not in rows[0]:
                raise UserError(f"{self.file}: around: {table} has no column {column!r}")
        fitting = [row for row in rows if all(_same(row[c], value) for c, value in wanted.items())]
        self._refuse_several_cells(around, key, table, fitting)
        losses: dict[float, list[float]] = {}
        for row in fitting:
            if row["status"] != "failed" and row.get(FRESH) != "True":
                loss = float(row["final_eval_loss"] or math.inf)
                losses.setdefault(float(row[key]), []).append(loss)
        _refuse_unfinished(table, fitting, {row.get("run", "") for row in rows}, key, command)
        means = {value: sum(seeds) / len(seeds) for value, seeds in losses.items()}
        chosen = min(means, key=lambda value: (means[value], value), default=None)
        if chosen is None or math.isinf(means[chosen]):
            raise Missing(
                f"{table}: no run with {_words(wanted)} that ended well; finish {command}"
            )
        return chosen

    def _refuse_several_cells(
        self, around: Around, key: str, table: Path, rows: Sequence[Mapping[str, str]]
    ) -> None:
        """Raises UserError if the rows differ in more than `key` and seeds of what their file
        crosses."""
        said = preset_of(self.file.parent / around.sweep, around.preset or self.preset)
        curves = said.get("curves")
        parts = [said, *(curves.values() if isinstance(curves, Mapping) else ())]
        grids = [part.get("grid") for part in parts if isinstance(part, Mapping)]
        crossed = itertools.chain(*(grid for grid in grids if isinstance(grid, Mapping)))
        for column in dict.fromkeys(["curve", *crossed]):
            known = {_plain(row.get(column, "")): row.get(column, "") for row in rows}
            if len(known) > 1 and column != key and column.rpartition(".")[2] != "seed":
                raise UserError(
                    f"{self.file}: around: runs of {table} that fit differ in {column} "
                    f"({', '.join(known.values())}); name {column} in match, where or at"
                )

    def constants(self, search: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config keys and values that a search found for runs like `config` (dotted keys).

        `search` is the search file relative to this one. Raises Missing when the search has not got
        there yet, UserError when more than one of its entries fits.
        """
        path, command = self._place("constants.yaml", search, "search")
        if not path.exists():
            raise Missing(f"{path} does not exist; first run {command}")
        entries = read_own(path).get("constants")
        if not isinstance(entries, Sequence) or not all(
            isinstance(entry, Mapping) and isinstance(entry.get(part), Mapping)
            for entry in entries
            for part in ("where", "set")
        ):
            raise UserError(
                f"{path}: no list of constants with where and set; make it by {command}"
            )
        fitting = [e for e in entries if all(config.get(k) == v for k, v in e["where"].items())]
        if not fitting:
            keys = dict.fromkeys(key for entry in entries for key in entry["where"])
            asked = _words({key: config.get(key) for key in keys}) or "these runs"
            raise Missing(f"{path}: no constants for {asked}; finish {command}")
        if len(fitting) > 1:
            where = _words(fitting[0]["where"])
            raise UserError(f"{path}: {len(fitting)} entries fit {where}; keep one")
        return fitting[0]["set"]

    def _place(
        self, name: str, source: str, command: str, preset: str | None = None
    ) -> tuple[Path, str]:
        """A file among another sweep's results, and the command that makes it."""
        file, preset = self.file.parent / source, preset or self.preset
        path = folder_of(file, self.results, preset) / name
        option = f" --preset {preset}" if preset else ""
        return path, f"python -m sweeps {command} {file}{option}"


def _refuse_unfinished(
    table: Path, rows: Sequence[Mapping[str, str]], done: set[str], key: str, command: str
) -> None:
    """Raises Missing if the cells of these rows have unfinished runs: the best may be among them.

    A sweep notes in its manifest what a result asks for before the result is in its table. A run is
    in the cell of a row from which it differs in `key` and seed at most.
    """

    def in_cell(entry: Mapping[str, Any], row: Mapping[str, str]) -> bool:
        values = [(name, value) for name, value in entry["values"].items() if name != key]
        return entry["curve"] == row["curve"] and all(
            _same(row.get(name, ""), value) for name, value in values
        )

    noted = read_manifest(table.parent / "manifest.json")
    entries = [e for e in noted if e["run"] not in done and not e.get(FRESH)]
    to_come = [entry["run"] for entry in entries if any(in_cell(entry, row) for row in rows)]
    if to_come:
        raise Missing(
            f"{table}: not complete, {len(to_come)} of the runs that this sweep starts around are "
            f"to come ({to_come[0]}); finish {command}"
        )


@cached
def read_manifest(path: Path) -> list[dict[str, Any]]:
    """The runs of a sweep as far as it was asked for; none where there is no manifest."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [entry for entry in entries if {"run", "curve", "values"} <= entry.keys()]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


@cached
def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV table, all of them text; OSError or ValueError where there is none."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _same(cell: str, value: Any) -> bool:
    """Whether a table's text stands for a config's value."""
    if isinstance(value, bool) or value is None or not isinstance(value, (int, float)):
        return cell == ("" if value is None else str(value))
    return _plain(cell) == float(value)


def _plain(cell: str) -> float | str:
    """A table's text as the number that it stands for, if any."""
    try:
        return float(cell)
    except ValueError:
        return cell


def _words(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in wanted.items())
