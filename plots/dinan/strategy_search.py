"""What a search for learning rate and weight decay found: points, optima, neighbours, spikes.

The tables are results.csv and metrics.csv of one sweep whose curves are scaling strategies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.dinan import spikes
from plots.dinan.spikes import LR_FACTOR, STEP, TOP1, TRAIN_LOSS
from plots.tables import CURVE, DECAY, LOSS, RATE, SEED, STATUS, TableError, numbers

STEMS = ("figure_1_2", "figure_1_2_metrics")
BEST, RUN, EPOCH = "best_eval_top1", "run", "epoch"
RESULTS = (*tables.RESULTS, RATE, DECAY, BEST, RUN)
METRICS = (CURVE, SEED, RUN, STEP, EPOCH, TRAIN_LOSS, LR_FACTOR, TOP1)
# Exponents of two in (lr, wd); twice both and half both are left out (footnote 42).
NEIGHBOURS = ((1, 0), (0, 1), (1, -1), (-1, 1), (0, -1), (-1, 0))
Score = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One run of a point; top-1 accuracies are fractions."""

    name: str
    seed: int
    diverged: bool
    top1: float
    loss: float

    @property
    def score(self) -> Score:
        """Higher is better: best accuracy, then minus the final loss; divergence is worst."""
        return (-math.inf, -math.inf) if self.diverged else (self.top1, -self.loss)


@dataclass(frozen=True)
class Point:
    """One (learning rate, weight decay) with its runs by rising seed."""

    rate: float
    decay: float
    runs: tuple[Run, ...]

    @property
    def score(self) -> Score:
        """The score of the first seed, which all points of a search have in common."""
        return self.runs[0].score

    @property
    def pair(self) -> str:
        """(lr, wd) as figures and findings write it."""
        return pair(self.rate, self.decay)

    def label(self, runs: Sequence[Run]) -> str:
        """(lr, wd) [best accuracy in percent of some of its runs]."""
        return f"{self.pair} [{', '.join(map(percent, runs))}]"


def pair(rate: float, decay: float) -> str:
    """(lr, wd) with three digits each."""
    return f"({rate:.3g}, {decay:.3g})"


def percent(run: Run) -> str:
    """A run's best accuracy, or that it diverged."""
    return "diverged" if run.diverged else f"{100 * run.top1:.2f}"


@dataclass(frozen=True)
class Confirmation:
    """Whether the six neighbours of an optimum were run and none is better."""

    missing: tuple[tuple[float, float], ...]
    better: tuple[Point, ...]
    tied: int  # neighbours with the same accuracy and no lower loss
    elsewhere: tuple[Point, ...]  # better points that are no neighbours

    @property
    def confirmed(self) -> bool:
        """Whether the optimum stands."""
        return not self.missing and not self.better

    @property
    def measured(self) -> str:
        """How many neighbours there are and how many of them are better."""
        run = len(NEIGHBOURS) - len(self.missing)
        ties = f", {self.tied} tied and decided by the loss" if self.tied else ""
        return f"{run} of {len(NEIGHBOURS)} run, {len(self.better) or 'none'} better{ties}"

    @property
    def verdict(self) -> str:
        """Confirmed, or what stands against it."""
        against = [
            *([f"not run: {', '.join(pair(*place) for place in self.missing)}"]
              if self.missing else []),
            *([f"better: {', '.join(point.pair for point in self.better)}"]
              if self.better else []),
        ]
        word = f"not confirmed, {'; '.join(against)}" if against else "confirmed"
        far = ", ".join(point.pair for point in self.elsewhere)
        return f"{word}; better elsewhere: {far}" if far else word


@dataclass(frozen=True)
class Search:
    """All points of one strategy, best first, and its optimum."""

    points: tuple[Point, ...]
    width: int | None
    lines: Mapping[str, pd.DataFrame]  # run -> its rows of metrics.csv

    @cached_property
    def optimum(self) -> Point:
        """The point with the most seeds, which only a confirmed optimum gets; else the best."""
        most = max(len(point.runs) for point in self.points)
        return next(point for point in self.points if len(point.runs) == most)

    @property
    def firsts(self) -> list[Run]:
        """The first seed of every point, best first."""
        return [point.runs[0] for point in self.points]

    @property
    def runs(self) -> list[Run]:
        """All runs, those of the best point first."""
        return [run for point in self.points for run in point.runs]

    @cached_property
    def spikes(self) -> dict[str, tuple[int, int]]:
        """Run -> number of accuracy spikes and of loss spikes."""
        found = {name: spikes.of_run(rows) for name, rows in self.lines.items()}
        return {name: (len(top1), len(loss)) for name, (top1, loss) in found.items()}

    def at(self, rate: float, decay: float) -> Point | None:
        """The point at a place, if it was run."""
        near = (p for p in self.points if _same(p.rate, rate) and _same(p.decay, decay))
        return next(near, None)

    def accuracy(self, run: Run) -> pd.DataFrame:
        """Epoch and top-1 accuracy of a run's evaluations."""
        rows = self.lines[run.name]
        return rows.loc[rows[TOP1].notna(), [EPOCH, TOP1]]


def neighbours(point: Point) -> list[tuple[float, float]]:
    """The six places around a point, twice or half its rate and decay."""
    return [(point.rate * 2.0**rate, point.decay * 2.0**decay) for rate, decay in NEIGHBOURS]


def confirm(search: Search) -> Confirmation:
    """The optimum against its neighbours and against all others, by their first seeds."""
    optimum = search.optimum
    around = {place: search.at(*place) for place in neighbours(optimum)}
    there = [point for point in around.values() if point is not None]
    better = [point for point in search.points if point.score > optimum.score]
    return Confirmation(
        missing=tuple(place for place, point in around.items() if point is None),
        better=tuple(point for point in better if point in there),
        tied=sum(p.score[0] == optimum.score[0] and p not in better for p in there),
        elsewhere=tuple(point for point in better if point not in there),
    )


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-6)


def read(paths: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(results, metrics) of one sweep in either order, failed runs left in; TableError if bad."""
    found = [STATUS in tables.read(path, [CURVE], _source(path)) for path in paths]
    if sorted(found) != [False, True]:
        raise TableError(f"{paths[0]}: expected results.csv and metrics.csv of a sweep; the "
                         f"results are the table with a column {STATUS!r}")
    paths = paths if found[0] else paths[::-1]
    results = tables.only(tables.read(paths[0], RESULTS), paths[0], CURVE, style.STRATEGIES)
    metrics = tables.read(paths[1], METRICS, "metrics.csv")
    metrics = tables.only(metrics, paths[1], CURVE, style.STRATEGIES)
    results = numbers(results, paths[0], (SEED, RATE, DECAY, LOSS, BEST))
    metrics = numbers(metrics, paths[1], METRICS[3:])
    _check_results(results, paths[0])
    _check_metrics(results, metrics, paths[1])
    return results, metrics.sort_values([RUN, STEP], kind="stable")


def _source(path: Path) -> str:
    return "metrics.csv" if path.stem.endswith("metrics") else "results.csv"


def _check_results(results: pd.DataFrame, path: Path) -> None:
    """Every run has its place in the search, and a finished one its accuracy and loss."""
    for column in (RATE, DECAY):
        odd = results[~(results[column] > 0)]
        if not odd.empty:
            raise TableError(f"{path}: run {odd[RUN].iloc[0]} has no {column} above 0")
    again = results[results.duplicated([CURVE, RATE, DECAY, SEED])]
    if not again.empty:
        row = again.iloc[0]
        raise TableError(f"{path}: two runs of {row[CURVE]} at {pair(row[RATE], row[DECAY])}, seed "
                         f"{row[SEED]:g}; expected one search per strategy")
    finished = results[results[STATUS] == "finished"]
    for column in (BEST, LOSS):
        odd = finished[finished[column].isna()]
        if not odd.empty:
            raise TableError(f"{path}: run {odd[RUN].iloc[0]} is finished but has no {column}")


def _check_metrics(results: pd.DataFrame, metrics: pd.DataFrame, path: Path) -> None:
    """Every finished run was logged."""
    evaluated = set(metrics.loc[metrics[TOP1].notna(), RUN])
    for run in results.loc[results[STATUS] == "finished", RUN]:
        if run not in evaluated:
            raise TableError(f"{path}: no {TOP1} of run {run}; is it the metrics.csv of the same "
                             "sweep as the results?")


def searches(results: pd.DataFrame, metrics: pd.DataFrame) -> dict[str, Search]:
    """Strategy -> its search, in the order of figures; failed runs are left out.

    A point without the first seed of its strategy is left out too: it has nothing in common with
    the others.
    """
    logged = {name: rows for name, rows in metrics.groupby(RUN)}
    found = {}
    for strategy in style.STRATEGIES:
        rows = results[(results[CURVE] == strategy) & (results[STATUS] != "failed")]
        rows = rows.sort_values([RATE, DECAY, SEED])
        points = [_point(own) for _, own in rows.groupby([RATE, DECAY])]
        points = [point for point in points if point.runs[0].seed == rows[SEED].min()]
        if points:
            points.sort(key=lambda point: (*(-part for part in point.score), point.rate))
            names = [run.name for point in points for run in point.runs]
            lines = {name: logged.get(name, metrics.iloc[:0]) for name in names}
            found[strategy] = Search(tuple(points), _width(rows), lines)
    return found


def _point(rows: pd.DataFrame) -> Point:
    runs = tuple(
        Run(name, int(seed), status == "diverged", top1, loss)
        for name, seed, status, top1, loss in rows[[RUN, SEED, STATUS, BEST, LOSS]].itertuples(
            index=False
        )
    )
    return Point(float(rows[RATE].iloc[0]), float(rows[DECAY].iloc[0]), runs)


def _width(rows: pd.DataFrame) -> int | None:
    """The model's width, where the table says it and it is one."""
    widths = set(rows[tables.WIDTH].dropna()) if tables.WIDTH in rows else set()
    return int(widths.pop()) if len(widths) == 1 else None


def failed_lines(results: pd.DataFrame) -> list[str]:
    """How many runs of a strategy are left out because they failed."""
    failed = results.loc[results[STATUS] == "failed", CURVE].value_counts().to_dict()
    return [
        f"{label}: {failed[strategy]} failed run{'s' * (failed[strategy] != 1)} left out"
        for strategy, label in style.STRATEGIES.items()
        if strategy in failed
    ]
