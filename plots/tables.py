"""What every figure asks of a result table: its columns, its curves, means over seeds."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

DATA = Path(__file__).resolve().parent / "data"
CURVE, SEED, STATUS = "curve", "seed", "status"
LOSS, PARAMETERS = "final_eval_loss", "parameters"
PARAMETERIZATION, OPTIMIZER = "prescription.parameterization", "optimizer.name"
WIDTH, RATE, EPS = "model.width", "optimizer.lr", "optimizer.eps"
DECAY = "optimizer.weight_decay"
HORIZON = "horizon"
RESULTS = (CURVE, SEED, STATUS, LOSS)
# Experiment, sweep file and preset behind tables' names; all others are nanolm_c4's sweep of that
# name.
_LAPTOP = "laptop"
_SWEEPS = {
    "figure_1_2": ("vit_imagenet", "figure_1_2", _LAPTOP),
    "bart_figure_3_4": ("bart_span_denoise", "figure_3_4", _LAPTOP),
    "bart_figure_5": ("bart_span_denoise", "figure_5", None),  # R2C2 has no small form
    "infinite_figure_2": ("vit_cifar5m", "figure_2", _LAPTOP),
    "infinite_figure_4": ("vit_cifar5m", "figure_4", _LAPTOP),
    "infinite_figure_5": ("vit_cifar5m", "figure_5", _LAPTOP),
    "infinite_figure_11": ("vit_cifar5m", "figure_11", _LAPTOP),
    "infinite_figure_13": ("vit_cifar5m", "figure_13", _LAPTOP),
    "infinite_figure_6": ("vit_cifar5m", "figure_6", _LAPTOP),
    "infinite_figure_7_12": ("nanolm_c4", "figure_7_12", _LAPTOP),
}


class TableError(ValueError):
    """A table that a figure cannot be drawn from."""


def shipped(stem: str) -> Path:
    """Where the table of sweep `stem` is kept with the figures; large ones are compressed."""
    packed = DATA / f"{stem}.csv.gz"
    return packed if packed.exists() else DATA / f"{stem}.csv"


def read(path: Path, columns: Sequence[str], source: str = "results.csv") -> pd.DataFrame:
    """A table with `columns`; TableError if it is missing, lacks one or is empty."""
    if path.parent == DATA and not path.exists():
        raise TableError(f"{path}: no such table; {_makers(path.stem, source)}")
    try:
        table = pd.read_csv(path)
    except (OSError, EOFError, zlib.error, pd.errors.ParserError, pd.errors.EmptyDataError,
            UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot read the table: {error}") from None
    missing = [column for column in columns if column not in table]
    if missing:
        raise TableError(f"{path}: no column {missing[0]!r}; is it the {source} of this sweep?")
    if table.empty:
        raise TableError(f"{path}: no runs in it; run the sweep first")
    return table


def _makers(stem: str, source: str) -> str:
    """The commands that make the shipped table `stem`, in words."""
    if stem.startswith("initial_"):
        return "`python -m vit_cifar5m.initial --ship` makes it"
    table = re.sub(r"_(metrics|observations|kernels|attention|distances)$", "", stem)
    experiment, sweep, preset = _SWEEPS.get(table, ("nanolm_c4", table, _LAPTOP))
    asked, suffix = (f" --preset {preset}", f"_{preset}") if preset else ("", "")
    folder = f"results/{experiment}/{sweep}{suffix}"
    commands = [f"python -m sweeps run {experiment}/sweeps/{sweep}.yaml{asked}"]
    if source == "distances.csv":
        commands.append(f"python -m vit_cifar5m.distances {folder}")
    commands.append(f"python -m plots.ship {folder}/{source} {stem}")
    return ", ".join(f"`{c}`" for c in commands[:-1]) + f" and `{commands[-1]}` make it"


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


def name(path: Path) -> str:
    """The figure's file name: the table's, or its folder's for a sweep's results.csv."""
    return path.resolve().parent.name if path.stem in ("results", "probes") else path.stem


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
