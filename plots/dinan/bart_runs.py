"""Runs of bart_span_denoise in tables: losses by strategy, width and rate; skipped steps.

The tables are results.csv and metrics.csv of sweeps whose curves are scaling strategies, losses in
nats per target token. A run's loss is the lowest of its evaluations, as in the legends of Dinan et
al. (Part II, Figures 3 to 5). Neural-tangent's (lr, wd) at width n stand for standard's
(n^(-3/2) lr, n^(3/2) wd) (section 2E); the former is called the mapped rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.dinan.strategy_search import failed_lines
from plots.dinan.vit_strategies import mean
from plots.tables import CURVE, DECAY, LOSS, RATE, SEED, STATUS, WIDTH, TableError

BEST, RUN, STEP, EVAL_LOSS = "best_eval_loss", "run", "step", "eval_loss"
SKIPPED = "skipped_steps"  # so far, because the gradient was not finite; may be absent
RESULTS = (*tables.RESULTS, RATE, DECAY, WIDTH, BEST, RUN)
METRICS = (CURVE, SEED, RUN, STEP, EVAL_LOSS)
# Power of the width that leads from a strategy's global rate to the mapped one.
RATE_EXPONENTS = {"standard": Fraction(0), "neural_tangent": Fraction(-3, 2)}
STRATEGIES = tuple(RATE_EXPONENTS)
MODELS = {1024: "BART-large", 2048: "R2C2"}


def mapped_rate(strategy: str, rate: float, width: int) -> float:
    """The standard strategy's rate that stands for `rate`."""
    return rate * width ** float(RATE_EXPONENTS[strategy])


def bits(nats: float) -> float:
    """A loss as fairseq logs it."""
    return nats / math.log(2)


@dataclass(frozen=True, eq=False)
class Run:
    """One run: its lowest loss (infinite if it diverged) and all its evaluations.

    `overflows` are the logged steps at which more steps had been skipped than at the line before,
    `skipped` their number at the end; None where the table does not say.
    """

    name: str
    seed: int
    loss: float
    steps: np.ndarray
    losses: np.ndarray
    overflows: tuple[int, ...] | None
    skipped: int | None

    @property
    def diverged(self) -> bool:
        """Whether it has no loss to speak of."""
        return not math.isfinite(self.loss)


@dataclass(frozen=True, eq=False)
class Point:
    """One (learning rate, weight decay) with its runs by rising seed."""

    rate: float
    decay: float
    mapped: float
    runs: tuple[Run, ...]

    @property
    def loss(self) -> float:
        """Mean over seeds of the lowest losses; infinite where one diverged."""
        return float(np.mean([run.loss for run in self.runs]))

    @property
    def pair(self) -> str:
        """(lr, wd) as figures and findings write it."""
        return f"({self.rate:.3g}, {self.decay:.3g})"

    @property
    def text(self) -> str:
        """The loss with its standard error over seeds, or how many of them diverged."""
        lost, n = sum(run.diverged for run in self.runs), len(self.runs)
        if lost:
            return "diverged" if lost == n else f"{lost} of {n} diverged"
        value, error = mean([run.loss for run in self.runs])
        return f"{value:.3f}" if n == 1 else f"{value:.3f} ± {error:.3f}, n = {n}"

    @property
    def line(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the mean loss over seeds, at steps all have; of the first that diverged, if
        one did."""
        for run in self.runs:
            if run.diverged:
                return run.steps, run.losses
        common = sorted(set.intersection(*(set(run.steps) for run in self.runs)))
        rows = [run.losses[np.isin(run.steps, common)] for run in self.runs]
        return np.array(common), np.mean(rows, axis=0)


@dataclass(frozen=True, eq=False)
class Search:
    """The points of one strategy at one width, by rising rate."""

    strategy: str
    width: int
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """Strategy and width."""
        return f"{style.STRATEGIES[self.strategy]}, n = {self.width}"

    @cached_property
    def optimum(self) -> Point | None:
        """The point with the lowest loss; None if all diverged."""
        found = [point for point in self.points if math.isfinite(point.loss)]
        return min(found, key=lambda point: (point.loss, point.rate), default=None)

    def losses_at(self, mapped: float) -> dict[int, float]:
        """Seed -> lowest loss at a mapped rate, on a line in log(rate) between its neighbours.

        Seeds that lack one of them, or diverged there, are left out; empty outside of the rates.
        """
        below = [p for p in self.points if p.mapped <= mapped * (1 + 1e-6)]
        above = [p for p in self.points if p.mapped >= mapped * (1 - 1e-6)]
        if not below or not above:
            return {}
        low, high = below[-1], above[0]
        gap = math.log(high.mapped / low.mapped)
        share = math.log(mapped / low.mapped) / gap if high is not low else 0.0
        ends = [{run.seed: run.loss for run in point.runs} for point in (low, high)]
        seeds = sorted(ends[0].keys() & ends[1].keys())
        values = {seed: ends[0][seed] + share * (ends[1][seed] - ends[0][seed]) for seed in seeds}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}


@dataclass(frozen=True, eq=False)
class Sweep:
    """Both tables of one sweep; `rows` are the results with mapped rates and lowest losses in the
    columns that fits read, `searches` go by (width, strategy), `failed` says what was left out."""

    path: Path
    rows: pd.DataFrame
    searches: dict[tuple[int, str], Search]
    failed: list[str]

    @property
    def widths(self) -> list[int]:
        """All widths, rising."""
        return sorted({width for width, _ in self.searches})

    def at(self, width: int) -> dict[str, Search]:
        """Strategy -> its search at a width."""
        return {s: self.searches[width, s] for s in STRATEGIES if (width, s) in self.searches}


def model_name(width: int) -> str:
    """The paper's name of a model, or its width."""
    return MODELS.get(width, f"n = {width}")


def read(paths: Sequence[Path]) -> list[Sweep]:
    """The sweeps of some tables, in any order, by rising width; TableError for bad ones."""
    kinds = {path: STATUS in tables.read(path, [CURVE], _source(path)) for path in paths}
    results = [path for path, is_results in kinds.items() if is_results]
    metrics = [path for path, is_results in kinds.items() if not is_results]
    if len(kinds) != len(paths) or not results or len(results) != len(metrics):
        raise TableError(f"{paths[0]}: expected results.csv and metrics.csv of every sweep; the "
                         f"results are the tables with a column {STATUS!r}")
    logs = {path: _metrics(path) for path in metrics}
    return sorted((_sweep(path, logs) for path in results), key=lambda sweep: sweep.widths[-1])


def _source(path: Path) -> str:
    return "metrics.csv" if path.stem.endswith("metrics") else "results.csv"


def _metrics(path: Path) -> pd.DataFrame:
    table = tables.only(tables.read(path, METRICS, "metrics.csv"), path, CURVE, STRATEGIES)
    columns = [STEP, EVAL_LOSS, *([SKIPPED] if SKIPPED in table else [])]
    table = tables.numbers(table, path, columns)
    return table.sort_values([RUN, STEP], kind="stable")


def _sweep(path: Path, logs: dict[Path, pd.DataFrame]) -> Sweep:
    results = tables.only(tables.read(path, RESULTS), path, CURVE, STRATEGIES)
    results = tables.numbers(results, path, (SEED, RATE, DECAY, WIDTH, LOSS, BEST))
    _check(results, path)
    kept = results[results[STATUS] != "failed"]
    if kept.empty:
        raise TableError(f"{path}: every run failed; see their log.txt and run the sweep again")
    lines = {run: rows for log in logs.values() for run, rows in log.groupby(RUN)}
    _check_logged(kept, lines, next(iter(logs)) if len(logs) == 1 else path)
    searches = {
        (int(width), strategy): _search(strategy, int(width), rows, lines)
        for (width, strategy), rows in kept.groupby([WIDTH, CURVE])
    }
    return Sweep(path, _mapped(kept), searches, failed_lines(results))


def _check(results: pd.DataFrame, path: Path) -> None:
    """Every run has its place, a point one weight decay, and a finished run its loss."""
    for column, bound in ((RATE, "above 0"), (WIDTH, "above 0"), (DECAY, "of 0 or more")):
        good = results[column] >= 0 if column == DECAY else results[column] > 0
        if not good.all():
            raise TableError(f"{path}: run {results[RUN][~good].iloc[0]} has no {column} {bound}")
    again = results[results.duplicated([CURVE, WIDTH, RATE, SEED])]
    if not again.empty:
        row = again.iloc[0]
        raise TableError(f"{path}: two runs of {row[CURVE]} at width {row[WIDTH]:g}, lr "
                         f"{row[RATE]:g}, seed {row[SEED]:g}; expected one weight decay per rate")
    finished = ~results[STATUS].isin(["failed", "diverged"])
    odd = results[finished & results[BEST].isna()]
    if not odd.empty:
        raise TableError(f"{path}: run {odd[RUN].iloc[0]} is finished but has no {BEST}")


def _check_logged(results: pd.DataFrame, lines: dict[str, pd.DataFrame], path: Path) -> None:
    """Every finished run has evaluations."""
    for run in results.loc[results[STATUS] != "diverged", RUN]:
        if run not in lines or lines[run][EVAL_LOSS].isna().all():
            raise TableError(f"{path}: no {EVAL_LOSS} of run {run}; are results and metrics of the "
                             "same sweep?")


def _mapped(results: pd.DataFrame) -> pd.DataFrame:
    """Results with mapped rates and lowest losses, in the columns of rates and final losses."""
    columns = zip(results[CURVE], results[RATE], results[WIDTH])
    rates = [mapped_rate(strategy, rate, int(width)) for strategy, rate, width in columns]
    return results.assign(**{RATE: rates, LOSS: results[BEST]})


def _search(
    strategy: str, width: int, results: pd.DataFrame, lines: dict[str, pd.DataFrame]
) -> Search:
    points = []
    for rate, rows in results.sort_values([RATE, SEED]).groupby(RATE):
        runs = tuple(_run(row, lines.get(row[RUN])) for _, row in rows.iterrows())
        mapped = mapped_rate(strategy, float(rate), width)
        points.append(Point(float(rate), float(rows[DECAY].iloc[0]), mapped, runs))
    return Search(strategy, width, tuple(points))


def _run(row: pd.Series, line: pd.DataFrame | None) -> Run:
    loss = math.inf if row[STATUS] == "diverged" else float(row[BEST])
    if line is None:
        line = pd.DataFrame(columns=[STEP, EVAL_LOSS], dtype=float)
    evaluated = line[line[EVAL_LOSS].notna()]
    steps, losses = evaluated[STEP].to_numpy(float), evaluated[EVAL_LOSS].to_numpy(float)
    return Run(row[RUN], int(row[SEED]), loss, steps, losses, *_overflows(line))


def _overflows(line: pd.DataFrame) -> tuple[tuple[int, ...] | None, int | None]:
    """Steps of lines with more skipped steps than the line before, and the last count."""
    known = line[line[SKIPPED].notna()] if SKIPPED in line else line[:0]
    if known.empty:
        return None, None
    more = known[SKIPPED].diff().fillna(known[SKIPPED]) > 0
    return tuple(known.loc[more, STEP].astype(int)), int(known[SKIPPED].iloc[-1])


def limits(
    lines: Iterable[tuple[np.ndarray, np.ndarray]], last: float, first: float = 0.1
) -> tuple[float, float]:
    """Losses to show of lines up to step `last`: from the lowest of all to the highest that any
    has from a share `first` of the way on, but at most six times as far as the best line falls."""
    spans = []
    for steps, losses in lines:
        inside = losses[(steps >= first * last) & (steps <= last)]
        if len(inside):
            spans.append((float(inside.min()), float(inside.max())))
    if not spans:
        return 0.0, 1.0
    low, top = min(spans)
    high = min(max(high for _, high in spans), low + 6 * max(top - low, 1e-3))
    return low, max(high, low + 1e-3)
