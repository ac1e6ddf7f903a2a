"""Result tables: where they are shipped, what every figure asks of one, means over seeds."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "plots" / "data"
CURVE, SEED, STATUS = "curve", "seed", "status"
LOSS, PARAMETERS = "final_eval_loss", "parameters"
PARAMETERIZATION, OPTIMIZER = "prescription.parameterization", "optimizer.name"
WIDTH, RATE, EPS = "model.width", "optimizer.lr", "optimizer.eps"
DECAY = "optimizer.weight_decay"
RUN, STEP, HORIZON = "run", "step", "horizon"
RESULTS = (CURVE, SEED, STATUS, LOSS)
# The experiments whose sweeps reproduce a paper; a shipped table has its sweep's name.
EXPERIMENTS = {
    "everett": ("nanolm_c4",),
    "dinan": ("vit_imagenet", "bart_span_denoise"),
    "bordelon": ("vit_cifar5m", "nanolm_c4"),
}


class TableError(ValueError):
    """A table that a figure cannot be drawn from."""


def shipped(name: str) -> Path:
    """Where the table PAPER/NAME is kept with the figures; large ones are compressed."""
    packed = DATA / f"{name}.csv.gz"
    return packed if packed.exists() else DATA / f"{name}.csv"


def expect(paths: Sequence[Path], *sources: str) -> None:
    """TableError unless there is one table for each of `sources`."""
    if len(paths) != len(sources):
        raise TableError(
            f"{len(paths)} table{'s' * (len(paths) != 1)} given, expected {len(sources)}: "
            + " ".join(sources)
        )


def read(
    path: Path, columns: Sequence[str], source: str = "results.csv", maker: str = "the sweep"
) -> pd.DataFrame:
    """A table with `columns`; TableError if it is missing, lacks one or is empty. `source` and
    `maker` are the file's usual name and what writes it, for messages."""
    if path.is_relative_to(DATA) and not path.exists():
        raise TableError(f"{path}: no such table; {_makers(path, source)}")
    try:
        table = pd.read_csv(path)
    except (OSError, EOFError, zlib.error, pd.errors.ParserError, pd.errors.EmptyDataError,
            UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot read the table: {error}") from None
    missing = [column for column in columns if column not in table]
    if missing:
        raise TableError(f"{path}: no column {missing[0]!r}; is it the {source} of {maker}?")
    if table.empty:
        raise TableError(f"{path}: no runs in it; run {maker} first")
    return table


def _makers(path: Path, source: str) -> str:
    """The commands that make a shipped table, as a message has them."""
    found = commands(path, source)
    if not found:
        return f"no sweep {' or '.join(_sweep_files(path)) or path.stem} makes it"
    text = ", ".join(f"`{command}`" for command in found[:-1])
    return f"{text} and `{found[-1]}` make it" if text else f"`{found[-1]}` makes it"


def _sweep_files(path: Path) -> list[str]:
    """Where the sweep of a shipped table may be described."""
    paper, stem = path.parent.name, path.name.partition(".")[0]
    sweep = re.sub(r"_(metrics|observations|kernels|attention|distances)$", "", stem)
    return [f"{experiment}/sweeps/{sweep}.yaml" for experiment in EXPERIMENTS.get(paper, ())]


def commands(path: Path, source: str) -> list[str]:
    """The commands that make a shipped table from its sweep's `source`; [] if no sweep does."""
    paper, stem = path.parent.name, path.name.partition(".")[0]
    if paper == "theory":
        return ["python -m effective_theory.run --ship plots/data/theory"]
    if stem.startswith("initial_"):
        return ["python -m vit_cifar5m.initial --ship plots/data/bordelon"]
    file = next((file for file in _sweep_files(path) if (ROOT / file).exists()), None)
    if file is None:
        return []
    text = (ROOT / file).read_text(encoding="utf-8")
    small = re.search("^  laptop:", text, re.MULTILINE) is not None  # has that preset
    experiment, _, name = file.partition("/sweeps/")
    folder = f"results/{experiment}/{name.removesuffix('.yaml')}{'_laptop' * small}"
    found = [f"python -m sweeps run {file}{' --preset laptop' * small}"]
    if source == "distances.csv":
        found.append(f"python -m vit_cifar5m.distances {folder}")
    return [*found, f"python -m plots ship {folder}/{source} {paper}/{stem}"]


def numbers(table: pd.DataFrame, path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """The table with `columns` as numbers; TableError at the first that is none."""
    for column in columns:
        try:
            table = table.assign(**{column: pd.to_numeric(table[column]).astype(float)})
        except (ValueError, TypeError) as error:
            raise TableError(f"{path}: column {column!r} has no number: {error}") from None
    return table


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
    point = ", ".join(f"{key} {_plainly(again.iloc[0][key])}" for key in keys)
    raise TableError(f"{path}: two runs with {point}; expected one; is it the {expected}?")


def _plainly(value: object) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def name(path: Path) -> str:
    """The figure's file name: the table's, or its folder's for a sweep's results.csv."""
    return path.resolve().parent.name if path.stem == "results" else path.stem


def losses(rows: pd.DataFrame) -> pd.Series:
    """Final loss by row, infinite where a run diverged; runs that failed are left out."""
    rows = rows[rows[STATUS] != "failed"]
    return rows[LOSS].where(rows[STATUS] != "diverged").fillna(math.inf)


def mean_losses(rows: pd.DataFrame, column: str) -> dict[float, float]:
    """Value of `column` -> mean loss over the rows that have it, infinite where one diverged."""
    values = losses(rows)
    return dict(values.groupby(rows.loc[values.index, column]).mean().items())


def counts(rows: pd.DataFrame, column: str) -> dict[float, int]:
    """Value of `column` -> number of seeds behind its mean loss."""
    values = losses(rows)
    return dict(values.groupby(rows.loc[values.index, column]).count().items())
