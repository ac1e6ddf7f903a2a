"""Result tables: where they are shipped, what every figure reads of one, means over seeds."""

import contextlib
import difflib
import functools
import json
import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from training.conditions import SIGNS, parse
from training.errors import UserError
from training.files import refuse_changed

Paths = Sequence[Path]
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "plots" / "data"
CURVE, SEED, STATUS = "curve", "seed", "status"
LOSS, PARAMETERS = "final_eval_loss", "parameters"
PARAMETERIZATION, OPTIMIZER = "prescription.parameterization", "optimizer.name"
WIDTH, RATE, EPS = "model.width", "optimizer.lr", "optimizer.eps"
DECAY = "optimizer.weight_decay"
RUN, STEP, HORIZON = "run", "step", "horizon"
LIMIT = "width"  # infinite where a theory's kernel is a limit
FRESH = "fresh"  # whether a run's seed had no say in the choice of its rate
RESULTS = (CURVE, SEED, STATUS, LOSS)
DESKTOP = "_desktop"  # ends the names of tables and figures of this preset
WIDE = "_wide"  # the same with wider models
CLOSER = "_closer"  # more seeds or further rates, at fewer places
PRESETS = (DESKTOP, CLOSER, "_longer", WIDE)  # ends of tables' names; laptop's have none
GRID = (CURVE, SEED, HORIZON, "constants")  # and all keys of a config, which have a dot
# What tells the rows of a table apart, beside the run; all other columns are measured.
PLACES = {
    *(*GRID, STEP, "network", "layer", "layers", "heads", "head_dim", "block", "token"),
    *("attended", "head", "kind", "role", "row", "column", "alpha_attention", "reference_heads"),
    *("low", "high", "table", "stem", "width", "quantity", "part", "entry"),
}
# Columns of words; all others hold numbers.
WORDS = {
    *(CURVE, STATUS, PARAMETERIZATION, OPTIMIZER, HORIZON, RUN, "prescription.strategy"),
    *("layer", "role", "kind", "commit", "stem", "quantity", "part", "block", "entry", "table"),
    *("row", "column", "note", "met", "name", "constants"),
}
# The experiments whose sweeps reproduce a paper; a shipped table has its sweep's name.
EXPERIMENTS = {
    "everett": ("nanolm_c4",),
    "dinan": ("vit_imagenet", "bart_span_denoise"),
    "bordelon": ("vit_cifar5m", "nanolm_c4"),
}
# File that a sweep writes, by the ending of the shipped table's name.
SOURCES = {
    "metrics": "metrics.csv",
    "observations": "observations.csv",
    "alignment": "probes.csv",
    "kernels": "observed_kernels.csv",
    "attention": "observed_attention.csv",
    "distances": "distances.csv",
}


class TableError(UserError):
    """A table that a figure cannot be drawn from."""


# Conditions on rows


def rows_where(table: pd.DataFrame, text: str, path: Path) -> pd.DataFrame:
    """The rows that meet a condition such as model.width<=256; TableError for one without column,
    sign and value, for an unknown column and where no row is left."""
    column, sign, value = parse(text, TableError)
    if column not in table:
        near = difflib.get_close_matches(column, list(table), 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TableError(f"{path}: --where names no column of it, {column!r}{hint}")
    cells: pd.Series = table[column]
    other: Any = value
    if pd.api.types.is_bool_dtype(cells) or not pd.api.types.is_numeric_dtype(cells):
        cells = cells.astype(str)
    else:
        try:
            other = float(value)
        except ValueError:
            raise TableError(
                f"{path}: --where compares the numbers of {column} with {value!r}"
            ) from None
    rows = table[SIGNS[sign](cells, other)]
    if rows.empty:
        raise TableError(f"{path}: no row with {column}{sign}{value}")
    return rows


_conditions: list[str] = []  # of the figure that is being drawn


@contextlib.contextmanager
def where(conditions: Iterable[str]) -> Iterator[None]:
    """Tables that are read inside have only the rows that meet all conditions."""
    _conditions[:] = conditions
    try:
        yield
    finally:
        _conditions.clear()


# Reading


def shipped(name: str) -> Path:
    """Where the table PAPER/NAME is kept with the figures; large ones are compressed."""
    packed = DATA / f"{name}.csv.gz"
    return packed if packed.exists() else DATA / f"{name}.csv"


def read_each(paths: Paths, sources: Mapping[str, Sequence[str]], numbers=()) -> list[pd.DataFrame]:
    """A table for each of `sources`, a file's usual name -> the columns it needs."""
    expect(paths, *sources)
    return [
        read(path, columns, source, numbers=numbers)
        for path, (source, columns) in zip(paths, sources.items(), strict=True)
    ]


def read_rates(paths: Paths, known: Iterable[str]) -> pd.DataFrame:
    """The one results.csv of a sweep over rates: the rows of known curves."""
    (table,) = read_each(paths, {"results.csv": [*RESULTS, WIDTH, RATE]})
    return only(table, paths[0], CURVE, known)


def expect(paths: Sequence[Path], *sources: str) -> None:
    """TableError unless there is one table for each of `sources`."""
    if len(paths) != len(sources):
        plural = "s" * (len(paths) != 1)
        raise TableError(
            f"{len(paths)} table{plural} given, expected {len(sources)}: {' '.join(sources)}"
        )


def read(
    path: Path, columns: Sequence[str], source="results.csv", maker="the sweep", numbers=()
) -> pd.DataFrame:
    """A table with `columns`, those of numbers as floats; TableError if it cannot be read, lacks
    one, is empty, has a row twice, or has a word, infinity or nothing for a number. `source` and
    `maker` are the file's usual name and what writes it, for messages; `numbers` are further
    columns of numbers, which may be missing."""
    try:
        stat = path.stat()
        table = _load(path, stat.st_mtime_ns, stat.st_size)
    except UserError as error:
        raise TableError(str(error)) from None
    except Exception as error:  # whatever pandas and the decompressor of a damaged file raise
        raise TableError(f"{path}: cannot read the table: {error}") from None
    missing = [column for column in columns if column not in table]
    if missing:
        raise TableError(f"{path}: no column {missing[0]!r}; is it the {source} of {maker}?")
    if table.empty:
        raise TableError(f"{path}: no runs in it; run {maker} first")
    if RUN in table and (unnamed := table[RUN].isna()).any():
        raise TableError(f"{path}: row {unnamed.argmax() + 1} names no run, so it may stand twice")
    numbers = [
        *(column for column in (*columns, PARAMETERS) if column in table and column not in WORDS),
        *(column for column in numbers if column in table),
    ]
    for column in numbers:
        cells = table[column]
        odd = cells[pd.to_numeric(cells, errors="coerce").isna() & cells.notna()]
        if not odd.empty:
            raise TableError(
                f"{path}: column {column!r} has no number: {odd.iloc[0]!r}; expected a number"
            )
    table = table.astype(dict.fromkeys(numbers, float))
    for column in {*numbers} - {LIMIT}:
        unfit = np.isinf(table[column])
        if column in (SEED, WIDTH, RATE):  # which every run has
            unfit |= table[column].isna()
        elif column == LOSS and STATUS in table:
            unfit |= table[column].isna() & (table[STATUS] == "finished")
        if unfit.any():
            raise TableError(
                f"{path}: {column!r} is {table[column][unfit].iloc[0]:g} in row "
                f"{unfit.argmax() + 1}; expected a number in every row"
            )
    for condition in _conditions:
        table = rows_where(table, condition, path)
    return table


@functools.lru_cache(8)
def _load(path: Path, *_: int) -> pd.DataFrame:
    """A file as it was at some time and length: figures read their tables more than once."""
    refuse_changed(path)
    table = pd.read_csv(path, low_memory=False)  # a column has one type from its first row on
    _refuse_twice([(path, table)])
    return table


def refuse_overlap(paths: Sequence[Path]) -> None:
    """TableError where a row of one table is also in another one of the same columns."""
    alike: dict[tuple[str, ...], list[tuple[Path, pd.DataFrame]]] = {}
    for path in paths:
        table = read(path, ())
        alike.setdefault(tuple(table), []).append((path, table))
    for parts in alike.values():
        _refuse_twice(parts)


def _refuse_twice(parts: Sequence[tuple[Path, pd.DataFrame]]) -> None:
    """TableError for two rows of one run, or of one curve, point of the grid and seed: they would
    count as two."""
    table = pd.concat([table for _, table in parts])
    grid = [key for key in table if key in PLACES or "." in key]
    if STATUS in table and STEP in grid:  # there it is the one at which a run has ended
        grid.remove(STEP)
    measured = [key for key in grid if key not in GRID and "." not in key]
    if RUN in table:  # another table may be of another config, and one of a log lack a column
        one_point = grid if {SEED, STATUS} <= {*table} and not parts[1:] else []
    for keys in ([RUN, *measured], one_point) if RUN in table else (grid,):
        if not keys or not (twice := table.duplicated(keys, keep=False)).any():
            continue
        first, lines = table[twice][keys].iloc[0], []
        for path, own in parts:
            same = ((own[keys] == first) | own[keys].isna() & first.isna()).all(axis=1)
            whole = pd.read_csv(path, dtype=str, skip_blank_lines=False).dropna(how="all")
            lines += [f"{path}: line {whole.index[at] + 2}" for at in np.flatnonzero(same)]
        which = ", ".join(f"{key} {value}" for key, value in first.items())
        raise TableError(
            f"{lines[1]} has what {lines[0]} has, {which}; a row that stands twice counts as two: "
            "remove one"
        )


def only(table: pd.DataFrame, path: Path, column: str, known: Iterable[str]) -> pd.DataFrame:
    """The rows whose `column` has a known value; TableError if there are none."""
    known = list(known)
    rows = table[table[column].isin(known)]
    if rows.empty:
        raise TableError(f"{path}: no row with {column} {', '.join(map(str, known))}")
    return rows


def name(path: Path) -> str:
    """The figure's file name: the table's, or its folder's for a sweep's results.csv."""
    return path.resolve().parent.name if path.stem == "results" else path.name.partition(".")[0]


# What a figure rests on


def origin(path: Path) -> dict[str, Any]:
    """The provenance of a shipped table; of a sweep's own table, its folder's name."""
    notes = path.with_name(path.name.partition(".")[0] + ".json")
    if notes.is_file():
        return json.loads(notes.read_text(encoding="utf-8"))
    folder = path.resolve().parent
    known = any((folder / file).exists() for file in ("manifest.json", "sweep.yaml"))
    return {"sweep": f"{folder.parent.name}/{folder.name}"} if known else {}


def facts(paths: Sequence[Path]) -> list[str]:
    """What a figure of these tables rests on: the sweeps with their presets, the data and the
    number of seeds, as far as the tables and the JSON files beside them say so."""
    origins = [origin(path) for path in paths]
    sweeps = [_named(one["sweep"]) for one in origins if "sweep" in one]
    data = [str(one["data"]) for one in origins if "data" in one]
    counts = map(_replicas, paths)
    of, on = (" and ".join(dict.fromkeys(words)) for words in (sweeps, data))
    conditions = (f"only {condition}" for condition in _conditions)
    return [*filter(None, (of, *conditions, on)), *[*filter(None, counts)][:1]]


def git(*words: str) -> str:
    """What a command of git says of this checkout, times in UTC; nothing where it fails."""
    utc = {**os.environ, "TZ": "UTC"}
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, env=utc, capture_output=True, text=True)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def file_of(sweep: str) -> tuple[Path | None, str]:
    """(file, preset) of a results folder EXPERIMENT/NAME_PRESET; no file where none is there."""
    experiment, _, stem = sweep.partition("/")
    for end in range(len(stem), 0, -1):
        file = Path(experiment) / "sweeps" / f"{stem[:end]}.yaml"
        if (ROOT / file).exists():
            return file, stem[end:].removeprefix("_")
    return None, ""


def _named(sweep: str) -> str:
    file, preset = file_of(sweep)
    name = f"{file.parts[0]}/{file.stem}" if file else sweep
    return name + (f", preset {preset}" if preset else "")


def _replicas(path: Path) -> str:
    """How many seeds, or random networks, there are at a point of a table, and how many judge."""
    table = read(path, ())
    for word in ("seeds", "networks"):
        if word in table:
            return f"{span(table[word])} {word}"
    column = SEED if SEED in table else "network"
    if column not in table:
        return ""
    judges, rows = table[is_fresh(table)], table[~is_fresh(table)]
    keys = [key for key in rows if (key == CURVE or "." in key) and rows[key].notna().all()]
    per_point = rows.groupby(keys)[column].nunique() if keys else rows[[column]].nunique()
    text = f"{span(per_point)} {column}{'s' * bool(per_point.max() > 1)} per point"
    if not judges.empty:
        fresh = judges.groupby(keys)[column].nunique()
        text += f", {span(fresh)} fresh {'ones' if fresh.max() > 1 else 'one'} at the best rate"
    return text


def span(counts: pd.Series) -> str:
    """The range of counts: 3, or 2 to 5."""
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}"


def source_of(table: str) -> tuple[str, str, str]:
    """(sweep, its preset, file that it writes) of a shipped table PAPER/NAME."""
    paper, _, stem = table.partition("/")
    if paper == "theory" or stem.startswith("initial_"):
        return "effective_theory" if paper == "theory" else "initial", "", f"{stem}.csv"
    preset = next((end for end in PRESETS if stem.endswith(end)), "")
    stem = stem.removesuffix(preset)
    end = stem.rpartition("_")[2]
    sweep = stem if end == "alignment" else stem.removesuffix(f"_{end}" if end in SOURCES else "")
    return sweep, preset.removeprefix("_") or "laptop", SOURCES.get(end, "results.csv")


def sweep_file(table: str) -> Path | None:
    """The file of the sweep that makes a shipped table PAPER/NAME; None where none does."""
    files = (
        Path(experiment) / "sweeps" / f"{source_of(table)[0]}.yaml"
        for experiment in EXPERIMENTS.get(table.partition("/")[0], ())
    )
    return next((file for file in files if (ROOT / file).exists()), None)


def commands(table: str) -> list[str]:
    """The commands that make a shipped table PAPER/NAME; [] if no sweep does."""
    sweep, preset, source = source_of(table)
    if sweep == "effective_theory":
        return ["python -m effective_theory.run --ship plots/data/theory"]
    if sweep == "initial":
        return ["python -m vit_cifar5m.initial --ship plots/data/bordelon"]
    file = sweep_file(table)
    if file is None:
        return []
    has = re.search(f"^  {preset}:", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    folder = f"results/{file.parts[0]}/{sweep}" + (f"_{preset}" if has else "")
    made = [f"python -m sweeps run {file}" + (f" --preset {preset}" if has else "")]
    if source == "distances.csv":
        made.append(f"python -m vit_cifar5m.distances {folder}")
    return [*made, f"python -m plots ship {folder}/{source} {table}"]


# Losses


def is_fresh(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of seeds that had no say in the choice of their rate."""
    return rows.get(FRESH, pd.Series(False, rows.index)).astype(str) == "True"


def runs(rows: pd.DataFrame, *columns: str) -> Iterator[tuple]:
    """(values of `columns`, seed, final loss) of every run but those that failed; a loss is
    infinite where the run diverged. Tables are cut into hundreds of cells, too small for pandas."""
    lists = (rows[key].tolist() for key in (*columns, SEED, STATUS, LOSS))
    for *values, seed, status, loss in zip(*lists, strict=True):
        if status != "failed":
            ended = status != "diverged" and not math.isnan(loss)
            yield *values, int(seed), loss if ended else math.inf
