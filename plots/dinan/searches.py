"""Searches for learning rate and weight decay in tables: runs, points, optima.

The tables are results.csv and metrics.csv of sweeps whose curves are scaling strategies, in any
order. Runs of vit_imagenet are compared by their best top-1 accuracy; those of bart_span_denoise
by the lowest of their evaluations, in nats per target token, as in the legends of Dinan et al.
(Part II, Figures 3 to 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.dinan import spikes
from plots.dinan.published import MODELS, RATE_EXPONENTS
from plots.dinan.spikes import LR_FACTOR, TOP1, TRAIN_LOSS
from plots.rates import chosen_by_others
from plots.statistics import average
from plots.tables import CURVE, DECAY, LOSS, RATE, RUN, SEED, STATUS, STEP, WIDTH, TableError

EPOCH, EVAL_LOSS = "epoch", "eval_loss"
SKIPPED = "skipped_steps"  # so far, because the gradient was not finite; may be absent
Score = tuple[float, float]


@dataclass(frozen=True)
class Measure:
    """What runs are compared by: a number of results.csv, its evaluations in metrics.csv, and
    what else the tables need."""

    best: str
    logged: str
    results: tuple[str, ...]  # numbers of results.csv
    metrics: tuple[str, ...]  # numbers of metrics.csv; SKIPPED if it is there
    positive: tuple[str, ...]
    run: tuple[str, ...]  # what tells runs apart
    expected: str


ACCURACY = Measure(
    "best_eval_top1",
    TOP1,
    (SEED, RATE, DECAY, LOSS),
    (STEP, EPOCH, TRAIN_LOSS, LR_FACTOR),
    (RATE, DECAY),
    (CURVE, RATE, DECAY, SEED),
    "results.csv of one search per strategy",
)
LOWEST_LOSS = Measure(
    "best_eval_loss",
    EVAL_LOSS,
    (SEED, RATE, DECAY, WIDTH, tables.PARAMETERS, LOSS),
    (STEP,),
    (RATE, WIDTH, tables.PARAMETERS),
    (CURVE, WIDTH, RATE, SEED),
    "results.csv of a sweep with one weight decay per rate",
)


@dataclass(frozen=True, eq=False)
class Run:
    """One run: its best top-1 accuracy (a fraction) or lowest loss, its final loss, and its rows
    of metrics.csv by rising step."""

    name: str
    seed: int
    diverged: bool
    best: float  # a lowest loss is infinite if it diverged
    final: float
    log: pd.DataFrame

    @property
    def score(self) -> Score:
        """Higher is better: best accuracy, then minus the final loss; divergence is worst."""
        return (-math.inf, -math.inf) if self.diverged else (self.best, -self.final)

    @property
    def accuracy(self) -> pd.DataFrame:
        """Epoch and top-1 accuracy of all evaluations."""
        return self.log.loc[self.log[TOP1].notna(), [EPOCH, TOP1]]

    @cached_property
    def spikes(self) -> tuple[int, int]:
        """Numbers of accuracy spikes and of loss spikes."""
        top1, loss = spikes.of_run(self.log)
        return len(top1), len(loss)

    @cached_property
    def steps(self) -> np.ndarray:
        """Steps of all evaluations of the loss."""
        return self.log.loc[self.log[EVAL_LOSS].notna(), STEP].to_numpy(float)

    @cached_property
    def losses(self) -> np.ndarray:
        """The losses there."""
        return self.log.loc[self.log[EVAL_LOSS].notna(), EVAL_LOSS].to_numpy(float)

    @property
    def overflows(self) -> tuple[int, ...] | None:
        """The logged steps at which more steps had been skipped than at the line before; None
        where the table does not say."""
        known = self._skipped
        if known.empty:
            return None
        more = known[SKIPPED].diff().fillna(known[SKIPPED]) > 0
        return tuple(known.loc[more, STEP].astype(int))

    @property
    def skipped(self) -> int | None:
        """The number of skipped steps at the end; None where the table does not say."""
        known = self._skipped
        return None if known.empty else int(known[SKIPPED].iloc[-1])

    @property
    def _skipped(self) -> pd.DataFrame:
        return self.log[self.log[SKIPPED].notna()] if SKIPPED in self.log else self.log[:0]


@dataclass(frozen=True, eq=False)
class Point:
    """One (learning rate, weight decay) with its runs by rising seed; `mapped` is the standard
    strategy's rate that stands for `rate`."""

    rate: float
    decay: float
    mapped: float
    runs: tuple[Run, ...]

    @property
    def score(self) -> Score:
        """The score of the first seed, which all points of a search have in common."""
        return self.runs[0].score

    @property
    def loss(self) -> float:
        """Mean over seeds of the lowest losses; infinite where one diverged."""
        return float(np.mean([run.best for run in self.runs]))

    @property
    def pair(self) -> str:
        """(lr, wd) as findings write it."""
        return pair(self.rate, self.decay)

    @property
    def shown(self) -> str:
        """(lr, wd) as figures write it."""
        return f"({exactly(self.rate)}, {exactly(self.decay)})"

    def label(self, runs: Sequence[Run]) -> str:
        """(lr, wd) [best accuracy in percent of some of its runs]."""
        return f"{self.pair} [{', '.join(map(percent, runs))}]"

    @property
    def text(self) -> str:
        """The loss with its standard error over seeds, or how many of them diverged."""
        lost, n = sum(run.diverged for run in self.runs), len(self.runs)
        if lost:
            return "diverged" if lost == n else f"{lost} of {n} diverged"
        return loss_text([run.best for run in self.runs])

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
    """The points of one strategy at one width (None where the table does not say one)."""

    strategy: str
    width: int | None
    points: tuple[Point, ...]
    optimum: Point | None  # None if all diverged

    @property
    def firsts(self) -> list[Run]:
        """The first seed of every point."""
        return [point.runs[0] for point in self.points]

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order of the points."""
        return [run for point in self.points for run in point.runs]

    @property
    def judged(self) -> tuple[Run, ...]:
        """The runs that judge the best rate, by rising seed: of three seeds or more each at the
        rate that the others choose, those that diverge there left out; else the optimum's. None
        where every point has a run that diverged."""
        if self.optimum is None:
            return ()
        runs = {point.rate: [(run.seed, run.best) for run in point.runs] for point in self.points}
        chosen = chosen_by_others(runs)
        if not chosen:
            return self.optimum.runs
        return tuple(
            sorted(
                (
                    run
                    for point in self.points
                    for run in point.runs
                    if chosen[run.seed] == point.rate and not run.diverged
                ),
                key=lambda run: run.seed,
            )
        )

    def at(self, rate: float, decay: float) -> Point | None:
        """The point at a place, if it was run."""
        near = (p for p in self.points if _same(p.rate, rate) and _same(p.decay, decay))
        return next(near, None)

    def losses_at(self, mapped: float) -> dict[int, float]:
        """Seed -> lowest loss at a mapped rate, on a line in log(rate) between its neighbours.

        Seeds that lack one of them, or diverged there, are left out; empty outside of the rates.
        Points are by rising rate.
        """
        below = [p for p in self.points if p.mapped <= mapped * (1 + 1e-6)]
        above = [p for p in self.points if p.mapped >= mapped * (1 - 1e-6)]
        if not below or not above:
            return {}
        low, high = below[-1], above[0]
        gap = math.log(high.mapped / low.mapped)
        share = math.log(mapped / low.mapped) / gap if high is not low else 0.0
        ends = [{run.seed: run.best for run in point.runs} for point in (low, high)]
        seeds = sorted(ends[0].keys() & ends[1].keys())
        values = {seed: ends[0][seed] + share * (ends[1][seed] - ends[0][seed]) for seed in seeds}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}


@dataclass(frozen=True, eq=False)
class Sweep:
    """Both tables of one sweep: its results without failed runs, searches by (width, strategy),
    and what was left out."""

    path: Path
    rows: pd.DataFrame
    searches: dict[tuple[int | None, str], Search]
    failed: list[str]

    @property
    def widths(self) -> list[int]:
        """All widths, rising."""
        return sorted({width for width, _ in self.searches})

    def at(self, width: int) -> dict[str, Search]:
        """Strategy -> its search at a width, in the order of figures."""
        return {s: self.searches[width, s] for s in style.STRATEGIES if (width, s) in self.searches}

    @property
    def by_strategy(self) -> dict[str, Search]:
        """The same of a sweep with one width."""
        found = {strategy: search for (_, strategy), search in self.searches.items()}
        return {strategy: found[strategy] for strategy in style.STRATEGIES if strategy in found}


# Words and numbers


def pair(rate: float, decay: float) -> str:
    """(lr, wd) with three digits each."""
    return f"({rate:.3g}, {decay:.3g})"


def exactly(value: float) -> str:
    """A power of two as one, in matplotlib's notation; other numbers with three digits."""
    power = math.log2(value)
    near = round(power)
    return f"$2^{{{near}}}$" if _same(value, 2.0**near) and not 1 <= value <= 8 else f"{value:.3g}"


def enlarge_end(axis, share: float = 0.4) -> None:
    """The panel's last `share` of epochs once more, where its lower right is empty, as the points
    that runs differ by in the end are not to be seen from 0 to 100 %."""
    lines = [line for line in axis.get_lines() if len(line.get_xdata())]
    axis.set_ylim(0, 103)
    if not lines:
        return
    last = max(max(line.get_xdata()) for line in lines)
    first = (1 - share) * last
    part = axis.inset_axes((0.34, 0.09, 0.63, 0.5))
    ends = []
    for line in lines:
        (copied,) = part.plot(*line.get_data())
        copied.update_from(line)
        copied.set(transform=part.transData, clip_path=part.patch)
        ends += [y for x, y in zip(*line.get_data(), strict=True) if x >= first]
    room = 0.05 * (max(ends) - min(ends)) + 0.1 if ends else 1.0
    if ends:
        part.set_ylim(min(ends) - room, max(ends) + room)
    part.set_xlim(first, 1.01 * last)
    part.tick_params(labelsize=6, pad=1)


def percent(run: Run) -> str:
    """A run's best accuracy, or that it diverged."""
    return "diverged" if run.diverged else f"{100 * run.best:.2f}"


def loss_text(losses: Sequence[float]) -> str:
    """Mean and standard error over seeds."""
    n = len(losses)
    return f"{losses[0]:.3f}" if n == 1 else f"{average(losses).text(sign='')}, n = {n}"


def mapped_rate(strategy: str, rate: float, width: int) -> float:
    """The standard strategy's rate that stands for `rate`: neural-tangent's (lr, wd) at width n
    stand for standard's (n^(-3/2) lr, n^(3/2) wd) (section 2E)."""
    return rate * width ** float(RATE_EXPONENTS[strategy])


def bits(nats: float) -> float:
    """A loss as fairseq logs it."""
    return nats / math.log(2)


def model_name(width: int) -> str:
    """The paper's name of a model, or its width."""
    return MODELS.get(width, f"n = {width}")


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


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-6)


# Reading


def by_accuracy(paths: Sequence[Path]) -> Sweep:
    """Searches of ViTs; points best first. The optimum is the point with the most seeds, which only
    a confirmed one gets; else the best.

    A point without the first seed of its strategy has nothing in common with the others, and is
    left out.
    """
    tables.expect(paths, "results.csv", "metrics.csv")
    ((path, results, logs),) = _read(paths, ACCURACY, style.STRATEGIES)
    kept = results[results[STATUS] != "failed"]
    searches = {}
    for strategy, rows in kept.groupby(CURVE):
        widths = set(rows[WIDTH].dropna()) if WIDTH in rows else set()
        width = int(widths.pop()) if len(widths) == 1 else None
        points = [
            _point(own, rate, ACCURACY, logs) for (rate, _), own in rows.groupby([RATE, DECAY])
        ]
        points = [point for point in points if point.runs[0].seed == rows[SEED].min()]
        points.sort(key=lambda point: (*(-part for part in point.score), point.rate))
        most = max(len(point.runs) for point in points)
        optimum = next(point for point in points if len(point.runs) == most)
        searches[width, strategy] = Search(strategy, width, tuple(points), optimum)
    return Sweep(path, kept, searches, _failed_lines(results))


def by_loss(paths: Sequence[Path]) -> list[Sweep]:
    """Searches of BART models, sweeps by rising size, points by rising rate; the optimum has the
    lowest loss. Results have mapped rates and lowest losses in the columns that fits read."""
    found = []
    for path, results, logs in _read(paths, LOWEST_LOSS, RATE_EXPONENTS):
        kept = results[results[STATUS] != "failed"]
        if kept.empty:
            raise TableError(f"{path}: every run failed; see their log.txt and run the sweep again")
        searches = {}
        for (width, strategy), rows in kept.groupby([WIDTH, CURVE]):
            points = tuple(
                _point(own, mapped_rate(strategy, float(rate), int(width)), LOWEST_LOSS, logs)
                for rate, own in rows.groupby(RATE)
            )
            finite = [point for point in points if math.isfinite(point.loss)]
            best = min(finite, key=lambda point: (point.loss, point.rate), default=None)
            searches[int(width), strategy] = Search(strategy, int(width), points, best)
        columns = zip(kept[CURVE], kept[RATE], kept[WIDTH], strict=True)
        rates = [mapped_rate(strategy, rate, int(width)) for strategy, rate, width in columns]
        rows = kept.assign(**{RATE: rates, LOSS: kept[LOWEST_LOSS.best]})
        found.append(Sweep(path, rows, searches, _failed_lines(results)))
    return sorted(found, key=largest)


def largest(sweep: Sweep) -> float:
    """The parameters of a sweep's largest model."""
    return float(sweep.rows[tables.PARAMETERS].max())


def _read(
    paths: Sequence[Path], measure: Measure, curves: Iterable[str]
) -> list[tuple[Path, pd.DataFrame, Mapping[str, pd.DataFrame]]]:
    """(path, results, run -> rows of its metrics) of every sweep, failed runs left in."""
    kinds = {
        path: STATUS
        in tables.read(
            path, [CURVE], "metrics.csv" if path.stem.endswith("metrics") else "results.csv"
        )
        for path in paths
    }
    results = [path for path, is_results in kinds.items() if is_results]
    metrics = [path for path, is_results in kinds.items() if not is_results]
    if len(kinds) != len(paths) or not results or len(results) != len(metrics):
        raise TableError(
            f"{paths[0]}: expected results.csv and metrics.csv of every sweep; the "
            f"results are the tables with a column {STATUS!r}"
        )
    logs: dict[str, pd.DataFrame] = {}
    for path in metrics:
        columns = [CURVE, SEED, RUN, *measure.metrics, measure.logged]
        table = tables.read(path, columns, "metrics.csv", numbers=[SKIPPED])
        table = tables.only(table, path, CURVE, curves).sort_values([RUN, STEP], kind="stable")
        logs |= dict(iter(table.groupby(RUN)))
    logged_in = metrics[0] if len(metrics) == 1 else None
    return [
        (path, _results(path, measure, curves, logs, logged_in or path), logs) for path in results
    ]


def _results(
    path: Path,
    measure: Measure,
    curves: Iterable[str],
    logs: Mapping[str, pd.DataFrame],
    logged_in: Path,
) -> pd.DataFrame:
    """Every run has its place in the search, a finished one its best value and evaluations."""
    columns = [*measure.results, measure.best]
    rows = tables.only(tables.read(path, [*tables.RESULTS, RUN, *columns]), path, CURVE, curves)
    for column in (RATE, DECAY, *measure.positive):
        above = column in measure.positive
        bad = rows[~(rows[column] > 0 if above else rows[column] >= 0)]
        if not bad.empty:
            bound = "above 0" if above else "of 0 or more"
            raise TableError(f"{path}: run {bad[RUN].iloc[0]} has no {column} {bound}")
    finished = rows[rows[STATUS] == "finished"]
    for column in (measure.best, LOSS):
        bad = finished[finished[column].isna()]
        if not bad.empty:
            raise TableError(f"{path}: run {bad[RUN].iloc[0]} is finished but has no {column}")
    for run in finished[RUN]:
        if run not in logs or logs[run][measure.logged].isna().all():
            raise TableError(
                f"{logged_in}: no {measure.logged} of run {run}; are results and "
                "metrics of the same sweep?"
            )
    return rows.sort_values([RATE, DECAY, SEED])


def _point(
    rows: pd.DataFrame, mapped: float, measure: Measure, logs: Mapping[str, pd.DataFrame]
) -> Point:
    empty = pd.DataFrame(columns=[*measure.metrics, measure.logged], dtype=float)
    runs = []
    for row in rows.to_dict("records"):
        diverged = row[STATUS] == "diverged"
        lost = diverged and measure is LOWEST_LOSS
        best = math.inf if lost else float(row[measure.best])
        log = logs.get(row[RUN], empty)
        runs.append(Run(row[RUN], int(row[SEED]), diverged, best, float(row[LOSS]), log))
    first = rows.iloc[0]
    return Point(float(first[RATE]), float(first[DECAY]), mapped, tuple(runs))


def _failed_lines(results: pd.DataFrame) -> list[str]:
    """How many runs of a strategy are left out because they failed."""
    failed = results.loc[results[STATUS] == "failed", CURVE].value_counts().to_dict()
    return [
        f"{label}: {failed[strategy]} failed run{'s' * (failed[strategy] != 1)} left out"
        for strategy, label in style.STRATEGIES.items()
        if strategy in failed
    ]
