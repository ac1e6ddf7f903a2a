"""Result tables: where they are shipped, what every figure asks of one, means over seeds."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "plots" / "data"
CURVE, SEED, STATUS = "curve", "seed", "status"
LOSS, PARAMETERS = "final_eval_loss", "parameters"
PARAMETERIZATION, OPTIMIZER = "prescription.parameterization", "optimizer.name"
WIDTH, RATE, EPS = "model.width", "optimizer.lr", "optimizer.eps"
DECAY = "optimizer.weight_decay"
RUN, STEP, HORIZON = "run", "step", "horizon"
FRESH = "fresh"  # whether a run's seed had no say in the choice of its rate
RESULTS = (CURVE, SEED, STATUS, LOSS)
DESKTOP = "_desktop"  # ends the names of tables and figures of this preset, beside those of laptop
# Columns of words; all others hold numbers, COUNTS whole ones.
WORDS = {
    CURVE,
    STATUS,
    PARAMETERIZATION,
    OPTIMIZER,
    HORIZON,
    RUN,
    "prescription.strategy",
    "layer",
    "role",
    "kind",
    "commit",
    "stem",
    "quantity",
    "part",
    "block",
    "entry",
    "table",
    "row",
    "column",
    "note",
    "met",
    "name",
    "constants",
}
ERRORS = {"error", "predicted_error"}
COUNTS = {SEED, WIDTH, STEP, "model.heads", "model.layers", "model.head_dim"}
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


class TableError(ValueError):
    """A table that a figure cannot be drawn from."""


@dataclass(frozen=True)
class Condition:
    """One condition on the rows that are drawn, such as model.width<=256."""

    column: str
    sign: str
    value: str

    COMPARE = {
        "<=": operator.le,
        ">=": operator.ge,
        "!=": operator.ne,
        "=": operator.eq,
        "<": operator.lt,
        ">": operator.gt,
    }

    @classmethod
    def parse(cls, text: str) -> Condition:
        """TableError for a text without column, sign and value."""
        found = re.fullmatch(r"([\w.]+)\s*(<=|>=|!=|==?|<|>)\s*([^<>=\s].*)", text.strip())
        if not found:
            raise TableError(
                f"--where {text!r}: expected COLUMN, one of "
                f"{' '.join(cls.COMPARE)} and a value, such as model.width<=256"
            )
        column, sign, value = found.groups()
        return cls(column, "=" if sign == "==" else sign, value)

    def rows(self, table: pd.DataFrame, path: Path) -> pd.DataFrame:
        """The rows that meet it; TableError for an unknown column and where none is left."""
        if self.column not in table:
            near = difflib.get_close_matches(self.column, list(table), 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TableError(f"{path}: --where names no column of it, {self.column!r}{hint}")
        cells: pd.Series = table[self.column]
        value: Any = self.value
        if pd.api.types.is_bool_dtype(cells) or not pd.api.types.is_numeric_dtype(cells):
            cells = cells.astype(str)
        else:
            try:
                value = float(value)
            except ValueError:
                raise TableError(
                    f"{path}: --where compares the numbers of {self.column} with {value!r}"
                ) from None
        found = table[self.COMPARE[self.sign](cells, value)]
        if found.empty:
            raise TableError(f"{path}: no row with {self.column}{self.sign}{self.value}")
        return found


_conditions: list[Condition] = []  # of the figure that is being drawn
_met: list[Path] = []  # the tables of which they have left some rows


@contextlib.contextmanager
def where(conditions: Iterable[Condition]) -> Iterator[None]:
    """Tables that are read inside have only the rows that meet all conditions."""
    _conditions[:] = conditions
    try:
        yield
    except TableError as error:
        if _met:
            raise TableError(f"{error} (of the rows that --where leaves)") from error
        raise
    finally:
        _conditions.clear()
        _met.clear()


def shipped(name: str) -> Path:
    """Where the table PAPER/NAME is kept with the figures; large ones are compressed."""
    packed = DATA / f"{name}.csv.gz"
    return packed if packed.exists() else DATA / f"{name}.csv"


def read_each(
    paths: Sequence[Path], sources: Mapping[str, Sequence[str]], numbers: Sequence[str] = ()
) -> list[pd.DataFrame]:
    """A table for each of `sources`, a file's usual name -> the columns it needs."""
    expect(paths, *sources)
    return [
        read(path, columns, source, numbers=numbers)
        for path, (source, columns) in zip(paths, sources.items(), strict=True)
    ]


def expect(paths: Sequence[Path], *sources: str) -> None:
    """TableError unless there is one table for each of `sources`."""
    if len(paths) != len(sources):
        raise TableError(
            f"{len(paths)} table{'s' * (len(paths) != 1)} given, expected {len(sources)}: "
            + " ".join(sources)
        )


def read(
    path: Path,
    columns: Sequence[str],
    source: str = "results.csv",
    maker: str = "the sweep",
    numbers: Sequence[str] = (),
) -> pd.DataFrame:
    """A table with `columns`, those of numbers as floats; TableError if it is missing, lacks one,
    is empty or has a word for a number. `source` and `maker` are the file's usual name and what
    writes it, for messages; `numbers` are further columns of numbers: those that may be missing,
    and those that hold WORDS in other tables."""
    if path.is_relative_to(DATA) and not path.exists():
        table_name = f"{path.parent.name}/{path.name.partition('.')[0]}"
        found = [f"`{command}`" for command in commands(table_name)]
        sweeps = " or ".join(sweep_files(table_name)) or path.stem
        how = (
            f"{', '.join(found[:-1])} and {found[-1]} make it"
            if found[1:]
            else f"{found[0]} makes it"
            if found
            else f"no sweep {sweeps} makes it"
        )
        raise TableError(f"{path}: no such table; {how}")
    try:
        table = pd.read_csv(path)
    except Exception as error:  # whatever pandas and the decompressor of a damaged file raise
        raise TableError(f"{path}: cannot read the table: {error}") from None
    missing = [column for column in columns if column not in table]
    if missing:
        raise TableError(f"{path}: no column {missing[0]!r}; is it the {source} of {maker}?")
    if table.empty:
        raise TableError(f"{path}: no runs in it; run {maker} first")
    numbers = [
        *(column for column in columns if column not in WORDS),
        *(column for column in numbers if column in table),
    ]
    for column in (*numbers, *({PARAMETERS} & {*table})):
        _check_numbers(table[column], path)
    table = table.astype(dict.fromkeys(numbers, float))
    for condition in _conditions:
        table = condition.rows(table, path)
    _met.extend([path] if _conditions else [])
    return table


def _check_numbers(cells: pd.Series, path: Path) -> None:
    """TableError for a word in a column of numbers, and for counts that are none."""
    try:
        values = pd.to_numeric(cells, errors="coerce")
    except OverflowError:
        raise TableError(f"{path}: column {cells.name!r} has no number: one is too large") from None
    odd, expected = cells[values.isna() & cells.notna()], "a number"
    if cells.name in COUNTS:
        odd, expected = cells[cells.notna() & ~(values % 1 == 0)], "a whole number"
    if cells.name in (SEED, WIDTH):
        odd = cells[~(values % 1 == 0)]
    if cells.name in ERRORS and odd.empty:
        odd, expected = cells[values < 0], "no error below zero"
    if not odd.empty:
        raise TableError(
            f"{path}: column {cells.name!r} has no number: {odd.iloc[0]!r}; expected {expected}"
        )


def facts(paths: Sequence[Path], counted: bool = True) -> list[str]:
    """What a figure of these tables rests on, for its caption: the sweep with its preset, the data
    and the number of seeds, as far as the tables and the JSON files beside them say so."""
    origins = [_origin(path) for path in paths]
    by_preset: dict[str, dict[str, None]] = {}
    for origin in origins:
        if "sweep" in origin:
            sweep, preset = _preset(str(origin["sweep"]))
            by_preset.setdefault(preset, {})[sweep] = None
    data = dict.fromkeys(str(origin["data"]) for origin in origins if "data" in origin)
    counts = [_replicas(path) for path in paths if counted]
    return [
        *(
            f"sweep{'s' * (len(sweeps) > 1)} {' and '.join(sweeps)}{preset}"
            for preset, sweeps in by_preset.items()
        ),
        *("only " + " and ".join(origin["only"]) for origin in origins if "only" in origin),
        *(["data: " + " and ".join(data)] if data else []),
        *list(dict.fromkeys(filter(None, counts)))[:1],
    ]


def _origin(path: Path) -> dict[str, Any]:
    """The provenance of a shipped table; of a sweep's own table, its folder's name."""
    notes = path.with_name(path.name.partition(".")[0] + ".json")
    if path.is_relative_to(DATA):
        return json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    folder = path.resolve().parent
    known = any((folder / name).exists() for name in ("manifest.json", "sweep.yaml"))
    return {"sweep": f"{folder.parent.name}/{folder.name}"} if known else {}


def _preset(sweep: str) -> tuple[str, str]:
    """EXPERIMENT/NAME_PRESET as EXPERIMENT/NAME and ", preset PRESET"."""
    experiment, _, name = sweep.partition("/")
    for end in range(len(name), 0, -1):
        if (ROOT / experiment / "sweeps" / f"{name[:end]}.yaml").exists():
            preset = name[end:].removeprefix("_")
            return f"{experiment}/{name[:end]}", f", preset {preset}" if preset else ""
    return sweep, ""


def _replicas(path: Path) -> str:
    """How many seeds, or random networks, there are at a point of a table, and how many judge."""
    columns = {CURVE, SEED, FRESH, "seeds", "networks", "network"}
    kept = columns | {one.column for one in _conditions}
    table = pd.read_csv(path, usecols=lambda name: name in kept or "." in name)
    for condition in _conditions:
        table = condition.rows(table, path)
    judges = table[is_fresh(table)]
    table = table[~is_fresh(table)].drop(columns=FRESH, errors="ignore")
    for word in ("seeds", "networks"):
        if word in table:
            return f"{_span(table[word])} {word}"
    column = SEED if SEED in table else "network"
    if column not in table:
        return ""
    keys = [key for key in table if key != column and table[key].notna().all()]
    found = table.groupby(keys)[column].nunique() if keys else table[[column]].nunique()
    text = f"{_span(found)} {column}{'s' * bool(found.max() > 1)} per point"
    if not judges.empty:
        text += f", {_span(judges.groupby(keys)[column].nunique())} fresh ones at the best rate"
    return text


def _span(values: pd.Series) -> str:
    """The range of counts; ? where a damaged table has none."""
    counts = pd.to_numeric(values, errors="coerce")
    counts = counts[counts.map(math.isfinite)]
    if counts.empty:
        return "?"
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low} to {high}"


def source_of(table: str) -> tuple[str, str]:
    """(sweep, file that the sweep writes) of a shipped table PAPER/NAME."""
    paper, _, stem = table.partition("/")
    if paper == "theory" or stem.startswith("initial_"):
        return "effective_theory" if paper == "theory" else "initial", f"{stem}.csv"
    stem = stem.removesuffix(DESKTOP)
    end = stem.rpartition("_")[2]
    sweep = stem if end == "alignment" else stem.removesuffix(f"_{end}" if end in SOURCES else "")
    return sweep, SOURCES.get(end, "results.csv")


def sweep_files(table: str) -> list[str]:
    """Where the sweep of a shipped table PAPER/NAME may be described."""
    experiments = EXPERIMENTS.get(table.partition("/")[0], ())
    return [f"{experiment}/sweeps/{source_of(table)[0]}.yaml" for experiment in experiments]


def commands(table: str) -> list[str]:
    """The commands that make a shipped table PAPER/NAME; [] if no sweep does."""
    sweep, source = source_of(table)
    if sweep == "effective_theory":
        return ["python -m effective_theory.run --ship plots/data/theory"]
    if sweep == "initial":
        return ["python -m vit_cifar5m.initial --ship plots/data/bordelon"]
    file = next((file for file in sweep_files(table) if (ROOT / file).exists()), None)
    if file is None:
        return []
    text = (ROOT / file).read_text(encoding="utf-8")
    preset = "desktop" if table.endswith(DESKTOP) else "laptop"
    has = re.search(f"^  {preset}:", text, re.MULTILINE) is not None
    folder = f"results/{file.partition('/')[0]}/{sweep}" + f"_{preset}" * has
    found = [f"python -m sweeps run {file}" + f" --preset {preset}" * has]
    if source == "distances.csv":
        found.append(f"python -m vit_cifar5m.distances {folder}")
    return [*found, f"python -m plots ship {folder}/{source} {table}"]


def only(table: pd.DataFrame, path: Path, column: str, known: Iterable[str]) -> pd.DataFrame:
    """The rows whose `column` has a known value; TableError if there are none."""
    known = list(known)
    rows = table[table[column].isin(known)]
    if rows.empty:
        raise TableError(
            f"{path}: no row with {column} {', '.join(map(str, known))}; is it the table of this "
            "figure?"
        )
    return rows


def one_run_each(rows: pd.DataFrame, path: Path, keys: Sequence[str], expected: str) -> None:
    """TableError if two rows have the same `keys`: the table is not that of the `expected` sweep,
    and its runs differ in something that the figure does not show."""
    again = rows[rows.duplicated(list(keys))]
    if again.empty:
        return
    values = {key: again.iloc[0][key] for key in keys}
    point = ", ".join(
        f"{key} {value if isinstance(value, str) else f'{value:g}'}"
        for key, value in values.items()
    )
    raise TableError(f"{path}: two runs with {point}; expected one; is it the {expected}?")


def of_one_sweep(paths: Sequence[Path]) -> None:
    """TableError for a table with runs that results.csv lacks or, where that is not among them,
    the table with the most runs. A table may have fewer: results.csv is written as runs end, the
    others when the sweep does, and what runs observe is kept of finished ones alone."""
    runs: dict[Path, set[str]] = {}
    results, kept = [], {RUN, STATUS, *(condition.column for condition in _conditions)}
    for path in paths:
        table = pd.read_csv(path, usecols=lambda column: column in kept, dtype={RUN: str})
        for condition in _conditions:
            table = condition.rows(table, path)
        if RUN in table:
            runs[path] = set(table[RUN].dropna())
            results += [path] if STATUS in table else []
    whole = max(results or runs, key=lambda path: len(runs[path]), default=None)
    for path, own in runs.items():
        if whole and (odd := sorted(own - runs[whole])):
            raise TableError(
                f"{path}: {len(odd)} of its {len(own)} runs, such as {odd[0]}, are "
                f"not in {whole}; expected tables of one sweep (run it to its end, if "
                "its file was changed while it ran)"
            )


def name(path: Path) -> str:
    """The figure's file name: the table's, or its folder's for a sweep's results.csv."""
    return path.resolve().parent.name if path.stem == "results" else path.stem


def is_fresh(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of seeds that had no say in the choice of their rate."""
    return rows.get(FRESH, pd.Series(False, rows.index)).astype(str) == "True"


def losses(rows: pd.DataFrame) -> pd.Series:
    """Final loss by row, infinite where a run diverged; runs that failed are left out."""
    rows = rows[rows[STATUS] != "failed"]
    return rows[LOSS].where(rows[STATUS] != "diverged").fillna(math.inf)


def losses_by(rows: pd.DataFrame, column: str) -> dict[float, list[tuple[int, float]]]:
    """Value of `column` -> (seed, final loss) of the runs that have it, in the order of values;
    losses as in `losses`. Tables are cut into hundreds of cells, too small for pandas."""
    found: dict[float, list[tuple[int, float]]] = {}
    for value, seed, status, loss in zip(
        *(rows[key].tolist() for key in (column, SEED, STATUS, LOSS)), strict=True
    ):
        if status != "failed" and not math.isnan(value):
            ended = status != "diverged" and not math.isnan(loss)
            found.setdefault(value, []).append((int(seed), loss if ended else math.inf))
    return dict(sorted(found.items()))


def mean_losses(found: Mapping[float, Sequence[tuple[int, float]]]) -> dict[float, float]:
    """Value -> mean loss of `losses_by`, infinite where a run diverged."""
    return {value: fmean(loss for _, loss in runs) for value, runs in found.items()}
