"""What one sweep takes from another: the best rate of a cell, and constants that a search found.

Tables are found by the sweep file that makes them, under the same preset, so a figure's sweep file
says where each of its numbers comes from.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from training.config import Section, apply_preset, read_yaml
from training.errors import UserError


class Missing(UserError):
    """What another sweep or search shall give is not there yet."""


class Around(Section):
    """The best value that another sweep found for the same kind of run."""

    sweep: str
    """File of that sweep, relative to this one."""
    match: Annotated[list[str], Field(min_length=1)]
    """Columns in which its runs must agree with this point."""
    where: dict[str, Any] = {}
    """Columns of its runs that must have these values."""
    at: dict[str, Any] = {}
    """Values to look for in place of the point's own, such as {model.width: 1024}."""


def folder_of(file: Path, results: Path, preset: str | None) -> Path:
    """Where a sweep's or search's results are: results/<experiment>/<stem>[_<preset>]."""
    data = apply_preset(read_yaml(file), preset, str(file))
    name = file.stem if preset is None else f"{file.stem}_{preset}"
    return results / str(data.get("experiment")) / name


def best(
    around: Around,
    settings: Mapping[str, Any],
    key: str,
    file: Path,
    results: Path,
    preset: str | None,
) -> float:
    """The value of `key` with the lowest mean final evaluation loss over seeds.

    `settings` are the point's own keys and values, `file` the sweep file that asks. Raises Missing
    when that sweep has no such run yet, UserError when its table has no such column.
    """
    source = file.parent / around.sweep
    table = folder_of(source, results, preset) / "results.csv"
    command = _command("sweeps run", source, preset)
    if "curve" in around.where:
        command += f" --curves {around.where['curve']}"
    rows = _read(table, command)
    wanted = {**around.where, **_matched(around, settings, file)}
    for column in (key, *wanted):
        if column not in rows[0]:
            raise UserError(f"{file}: around: {table} has no column {column!r}")
    fitting = [row for row in rows if all(_same(row[c], value) for c, value in wanted.items())]
    losses: dict[float, list[float]] = {}
    for row in fitting:
        if row["status"] != "failed":
            loss = float(row["final_eval_loss"] or math.inf)
            losses.setdefault(float(row[key]), []).append(loss)
    _refuse_unfinished(table, fitting, {row.get("run", "") for row in rows}, key, command)
    means = {value: sum(seeds) / len(seeds) for value, seeds in losses.items()}
    chosen = min(means, key=lambda value: (means[value], value), default=None)
    if chosen is None or math.isinf(means[chosen]):
        raise Missing(f"{table}: no run with {_words(wanted)} that ended well; finish {command}")
    return chosen


def _refuse_unfinished(
    table: Path, rows: Sequence[Mapping[str, str]], done: set[str], key: str, command: str
) -> None:
    """Raises Missing if the cells of these rows have runs to come: the best may be among them.

    A sweep notes in its manifest what a result asks for before the result is in its table.
    """
    entries = [e for e in read_manifest(table.parent / "manifest.json") if e["run"] not in done]
    to_come = [entry["run"] for entry in entries if any(_in_cell(entry, row, key) for row in rows)]
    if to_come:
        raise Missing(
            f"{table}: not complete, {len(to_come)} of the runs that this sweep starts around are "
            f"to come ({to_come[0]}); finish {command}"
        )


def _in_cell(entry: Mapping[str, Any], row: Mapping[str, str], key: str) -> bool:
    """Whether a run of the manifest differs from a row of the table in `key` and seed at most."""
    values = {name: value for name, value in entry["values"].items() if name != key}
    return entry["curve"] == row["curve"] and all(
        _same(row.get(name, ""), value) for name, value in values.items()
    )


def read_manifest(path: Path) -> list[dict[str, Any]]:
    """The runs of a sweep as far as it was asked for; none where there is no manifest."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [entry for entry in entries if {"run", "curve", "values"} <= entry.keys()]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


def _command(module: str, source: Path, preset: str | None) -> str:
    """The command that makes what is missing."""
    return f"python -m {module} {source}" + (f" --preset {preset}" if preset else "")


def _read(table: Path, command: str) -> list[dict[str, str]]:
    try:
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise Missing(f"{table} does not exist; first run {command}") from None
    if not rows:
        raise Missing(f"{table} has no runs; first run {command}")
    return rows


def _matched(around: Around, settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    wanted = {key: around.at.get(key, settings.get(key)) for key in (*around.match, *around.at)}
    for key, value in wanted.items():
        if value is None:
            raise UserError(f"{file}: around.match: {key!r} has no value in this sweep; set it")
    return wanted


def _same(cell: str, value: Any) -> bool:
    """Whether a table's text stands for a config's value."""
    if isinstance(value, bool) or value is None or not isinstance(value, (int, float)):
        return cell == ("" if value is None else str(value))
    try:
        return float(cell) == float(value)
    except ValueError:
        return False


def _words(wanted: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in wanted.items())


def constants(
    search: str, config: Mapping[str, Any], file: Path, results: Path, preset: str | None
) -> dict[str, Any]:
    """The config keys and values that a search found for runs like `config` (dotted keys).

    `search` is the search file relative to `file`. Raises Missing when the search has not got there
    yet, UserError when more than one of its entries fits.
    """
    source = file.parent / search
    path = folder_of(source, results, preset) / "constants.yaml"
    command = _command("sweeps search", source, preset)
    if not path.exists():
        raise Missing(f"{path} does not exist; first run {command}")
    entries = read_yaml(path).get("constants")
    if not isinstance(entries, Sequence) or not all(_is_entry(entry) for entry in entries):
        raise UserError(f"{path}: no list of constants with where and set; make it by {command}")
    fitting = [
        entry for entry in entries if all(config.get(k) == v for k, v in entry["where"].items())
    ]
    if not fitting:
        keys = dict.fromkeys(key for entry in entries for key in entry["where"])
        asked = {key: config.get(key) for key in keys}
        raise Missing(f"{path}: no constants for {_words(asked) or 'these runs'}; finish {command}")
    if len(fitting) > 1:
        where = _words(fitting[0]["where"])
        raise UserError(f"{path}: {len(fitting)} entries fit {where}; keep one")
    return fitting[0]["set"]


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(
        isinstance(entry.get(key), Mapping) for key in ("where", "set")
    )
