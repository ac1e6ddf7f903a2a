"""Sweeps: a grid of configs becomes runs, runs become one table.

    python -m training.sweep nanolm_c4/sweeps/quickstart.yaml --workers 2 [--dry-run]

Runs that are done are not run again; runs that were stopped or killed go on from their newest
checkpoint. Several launchers, on one machine or on several that share the results folder, can work
on one sweep: a run that another one holds is left to it. With `extend`, a cell of the grid (one
curve at one width, say) whose best learning rate lies at an edge gets the next rate, until the
optimum is inside or the limit is reached. `results.csv` has one row per run, by curve and rising
grid values.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import Field, model_validator

from training import runs
from training.config import PositiveInt, Section, read_yaml, set_keys, validate
from training.errors import RunError, UserError, one_line_errors
from training.files import is_locked, open_plain, write_json, write_text, writing
from training.progress import Board
from training.signals import STOPPED
from training.workers import RunBusy, RunFailed, RunStopped, RunUnusable, Worker

POLL_SECONDS = 2.0  # between looks at runs that other launchers hold
STOP_SECONDS = 120.0  # for a run to reach its next step and save, when the launcher is stopped

RESULT_COLUMNS = (
    "status",
    "step",
    "steps",
    "final_eval_loss",
    "best_eval_loss",
    "first_train_loss",
    "final_train_loss",
    "targets",
    "parameters",
)


class Log2Range(Section):
    """Powers of two from 2^low to 2^high."""

    log2: tuple[float, float]
    """Lowest and highest exponent, both included."""
    step: Annotated[float, Field(gt=0)] = 1.0
    """Distance between exponents; 0.5 is a factor sqrt(2)."""

    @model_validator(mode="after")
    def _low_comes_first(self) -> Log2Range:
        if self.log2[0] > self.log2[1]:
            raise ValueError(f"log2 {list(self.log2)}: the lowest exponent comes first")
        return self

    def values(self) -> list[float]:
        """The powers, rising."""
        low, high = self.log2
        count = math.floor((high - low) / self.step + 1e-9) + 1
        return [2.0 ** (low + i * self.step) for i in range(count)]


Values = Annotated[list[Any], Field(min_length=1)]


class Curve(Section):
    """One line of a figure: its own settings and grid."""

    set: dict[str, Any] = {}
    """Config keys of this curve."""
    grid: dict[str, Values | Log2Range] = {}
    """Keys to cross, added to the sweep's grid or replacing a key of it."""


class MoreSeeds(Section):
    """Other seeds where the grid has certain values."""

    where: dict[str, Values]
    """Grid key -> values it applies to."""
    seeds: Annotated[list[int], Field(min_length=1)]
    """The seeds there."""


class Extend(Section):
    """Follow an optimum that lies at the edge of a cell's grid."""

    key: str
    """Grid key of the quantity to extend, a positive number such as optimizer.lr."""
    factor: Annotated[float, Field(gt=1)] = 2.0
    """Ratio of a new point to the edge."""
    points: PositiveInt = 6
    """At most this many new points per cell."""


class Transfer(Section):
    """Run the best value of one cell in another one, too, so that using it there is measured."""

    source: dict[str, Any]
    """Grid values of the cell that was tuned, for example {model.width: 64}."""
    target: dict[str, Any]
    """Grid values of the cell that shall use its optimum."""


class SweepConfig(Section):
    """A sweep file."""

    experiment: str
    """Experiment folder: a package with a `train` module."""
    config: str
    """Base config, relative to the sweep file."""
    set: dict[str, Any] = {}
    """Config keys of all runs."""
    grid: dict[str, Values | Log2Range] = {}
    """Keys to cross in every curve."""
    curves: Annotated[dict[str, Curve], Field(min_length=1)]
    """Curves by name."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    """Seeds of every point."""
    more_seeds: list[MoreSeeds] = []
    """Exceptions to `seeds`; the first that applies counts."""
    extend: Extend | None = None
    """Follow optima past the edge of the grid."""
    transfer: Transfer | None = None
    """Run one cell's optimum in another; needs `extend`."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a run that fails for a reason of its own is tried again."""

    @model_validator(mode="after")
    def _rules_speak_of_the_grid(self) -> SweepConfig:
        if self.transfer and not self.extend:
            raise ValueError("transfer needs extend, which says whose optimum is meant")
        for name, curve in self.curves.items():
            grid = {**self.grid, **curve.grid}
            if "seed" in {**grid, **self.set, **curve.set}:
                raise ValueError("seed goes into seeds, not into set or grid")
            if self.extend and self.extend.key not in grid:
                raise ValueError(f"extend.key {self.extend.key!r} is not in the grid of {name!r}")
            for rule in self.more_seeds:
                _check_values("more_seeds.where", rule.where, grid, name)
            for place in ("source", "target") if self.transfer else ():
                wanted = {key: [value] for key, value in getattr(self.transfer, place).items()}
                _check_values(f"transfer.{place}", wanted, grid, name)
        return self


def _check_values(
    rule: str, wanted: Mapping[str, list[Any]], grid: Mapping[str, Any], curve: str
) -> None:
    """Raises ValueError for a key or value of a rule that a curve's grid does not have."""
    for key, values in wanted.items():
        if key not in grid:
            raise ValueError(f"{rule}: {key!r} is not in the grid of {curve!r}")
        known = _axis(grid[key])
        for value in values:
            if value not in known:
                raise ValueError(f"{rule}: {key} {value} is not in the grid of {curve!r}: {known}")


Cell = tuple[str, tuple[tuple[str, Any], ...]]  # curve, and its grid values but the extended one


@dataclass(frozen=True)
class Point:
    """One run of a sweep: where it is in the grid and what that makes its config."""

    curve: str
    values: tuple[tuple[str, Any], ...]
    seed: int
    config: Section
    run: str

    def cell(self, extended: str | None) -> Cell:
        """The curve and the values that the extended key varies within."""
        return self.curve, tuple(item for item in self.values if item[0] != extended)


@dataclass
class Sweep:
    """A sweep file read, with its experiment and every point known so far."""

    config: SweepConfig
    path: Path
    experiment: ModuleType
    base: dict[str, Any]
    folder: Path
    points: list[Point] = field(default_factory=list)
    added: dict[Cell, int] = field(default_factory=dict)

    def point(self, curve: str, values: Mapping[str, Any], seed: int) -> Point:
        """The point at some grid values; UserError if they make no valid config."""
        settings = {**self.config.set, **self.config.curves[curve].set, **values, "seed": seed}
        kind = self.experiment.Config
        config = validate(kind, set_keys(self.base, settings), f"{self.path}, curve {curve!r}")
        return Point(curve, tuple(values.items()), seed, config, runs.run_id(config, curve))

    def seeds(self, values: Mapping[str, Any]) -> list[int]:
        """The seeds at some grid values."""
        for rule in self.config.more_seeds:
            if all(values.get(key) in wanted for key, wanted in rule.where.items()):
                return rule.seeds
        return self.config.seeds

    def expand(self, curve: str, values: Mapping[str, Any]) -> list[Point]:
        """One point per seed, without those known already."""
        known = {point.run for point in self.points}
        new = [self.point(curve, values, seed) for seed in self.seeds(values)]
        return [point for point in new if point.run not in known]

    def cell_points(self, cell: Cell) -> list[Point]:
        """The points of a cell."""
        key = self.config.extend.key if self.config.extend else None
        return [point for point in self.points if point.cell(key) == cell]


def load_sweep(path: Path, results: Path = runs.RESULTS) -> Sweep:
    """A sweep file, its experiment and its grid; UserError for anything that cannot run."""
    config = validate(SweepConfig, read_yaml(path), str(path))
    try:
        experiment = importlib.import_module(f"{config.experiment}.train")
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: experiment {config.experiment!r} has no train.py here; run from the "
            "repository's root and give the folder's name"
        ) from None
    base = read_yaml(path.parent / config.config)
    folder = results / config.experiment / path.stem
    sweep = Sweep(config, path, experiment, base, folder)
    for curve in config.curves:
        for values in grid_values({**config.grid, **config.curves[curve].grid}):
            sweep.points += sweep.expand(curve, values)
    return sweep


def grid_values(grid: Mapping[str, list[Any] | Log2Range]) -> list[dict[str, Any]]:
    """Every combination of a grid's values, the last key varying fastest."""
    axes = [_axis(values) for values in grid.values()]
    return [dict(zip(grid, combination)) for combination in itertools.product(*axes)]


def _axis(values: list[Any] | Log2Range) -> list[Any]:
    return values.values() if isinstance(values, Log2Range) else values


def next_value(losses: Mapping[float, float], factor: float) -> float | None:
    """The value to try next when the lowest loss lies at an edge, or None when it lies inside.

    `losses` maps positive values to mean losses, infinite where a run diverged; if all diverged
    the next value is below the lowest.
    """
    values = sorted(losses)
    best = min(values, key=lambda value: (losses[value], value))
    if best == values[0] or math.isinf(losses[best]):
        return values[0] / factor
    return values[-1] * factor if best == values[-1] else None


def mean_losses(
    points: Iterable[Point], key: str, summaries: Mapping[str, dict[str, Any]]
) -> dict[float, float] | None:
    """Value of `key` -> final evaluation loss over seeds; None while a run is missing.

    Runs that failed for a reason of their own are left out.
    """
    losses: dict[float, list[float]] = {}
    for point in points:
        if point.run not in summaries:
            return None
        summary = summaries[point.run]
        if summary["status"] != "failed":
            loss = summary["final_eval_loss"]
            value = dict(point.values)[key]
            losses.setdefault(value, []).append(math.inf if loss is None else loss)
    return {value: sum(seeds) / len(seeds) for value, seeds in losses.items()}


class Scheduler:
    """Hands out points, largest first, and adds the ones that results ask for."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.summaries: dict[str, dict[str, Any]] = {}
        self.running: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.since = time.time()
        self.notes: list[str] = []
        self.stopped = False
        self.error: Exception | None = None
        self.condition = threading.Condition(threading.RLock())
        for point in sweep.points:
            self._recall(point)
        self._settle()

    @property
    def _key(self) -> str | None:
        return self.sweep.config.extend.key if self.sweep.config.extend else None

    def take(self) -> Point | None:
        """The next point to run; waits for results that may add one; None when all is done.

        A point that another launcher runs is its own: this one looks for the result, or for its
        end without one, every few seconds.
        """
        with self.condition:
            while not self.stopped:
                point = self._free_point()
                if point is not None:
                    self.running.add(point.run)
                    return point
                elsewhere = bool(self.waiting()) or self._tried_elsewhere()
                if not elsewhere and not self.running:
                    return None
                self.condition.wait(POLL_SECONDS if elsewhere else None)
            return None

    def _free_point(self) -> Point | None:
        """The largest point that is neither done, nor running here, nor held by another."""
        while True:
            known = len(self.summaries)
            waiting = sorted(
                self.waiting(),
                key=lambda point: self.sweep.experiment.flops(point.config),
                reverse=True,
            )
            for point in waiting:
                # First the lock, then the summary: a run that ends in between is seen as done.
                held = is_locked(self.sweep.folder / point.run)
                self._recall(point)
                if point.run not in self.summaries and self._tries(point) > self._retries:
                    self._give_up(point, f"failed {self._tries(point)} times, elsewhere")
                if not held and point.run not in self.summaries:
                    return point
            if len(self.summaries) == known and not self._recall_failed():
                return None
            self._settle()  # what others have finished may ask for more

    def _recall_failed(self) -> bool:
        """Takes over results of other launchers for runs that failed here; whether there were."""
        failed = [point for point in self.sweep.points if point.run in self.reasons]
        for point in failed:
            with suppress(RunError):
                summary = runs.done(self.sweep.folder / point.run)
                if summary is not None:
                    self.summaries[point.run] = summary
                    del self.reasons[point.run]
        return len(failed) > len(self.reasons)

    def _tried_elsewhere(self) -> bool:
        """Whether another launcher is at work on a run that failed here."""
        return any(is_locked(self.sweep.folder / run) for run in self.reasons)

    def waiting(self) -> list[Point]:
        """The points that are neither done nor running."""
        busy = self.running | self.summaries.keys()
        return [point for point in self.sweep.points if point.run not in busy]

    def finish(self, point: Point, summary: dict[str, Any]) -> None:
        """Records a result and adds the points it asks for."""
        with self.condition:
            self.running.discard(point.run)
            self.summaries[point.run] = summary
            self._settle()
            self.condition.notify_all()

    def stop(self, error: Exception | None = None) -> None:
        """Hands out nothing more; the first `error` given is what the launcher ends with."""
        with self.condition:
            self.stopped, self.error = True, self.error or error
            self.condition.notify_all()

    def put_back(self, point: Point) -> None:
        """Returns a point that another launcher took first, or that was stopped."""
        with self.condition:
            self.running.discard(point.run)
            self.condition.notify_all()

    def fail(self, point: Point, reason: str) -> None:
        """Puts a failed run back, or reports it once its tries are used up."""
        with self.condition:
            self._note_failure(point, reason)
            tries = self._tries(point)
            if tries <= self._retries:
                self.put_back(point)
            else:
                self.give_up(point, f"failed {tries} times: {reason}")

    def give_up(self, point: Point, reason: str) -> None:
        """Reports a run that will not be tried again; the rest goes on."""
        with self.condition:
            self._give_up(point, reason)
            self.finish(point, self.summaries[point.run])

    def report(self) -> list[str]:
        """What a user should know at the end: optima at an edge, and runs that failed."""
        return [*self.notes, *(f"{run} {reason}" for run, reason in self.reasons.items())]

    @property
    def _retries(self) -> int:
        return self.sweep.config.retries

    def _failures(self, point: Point) -> Path:
        return self.sweep.folder / point.run / "failures.jsonl"

    def _note_failure(self, point: Point, reason: str) -> None:
        path = self._failures(point)
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path), open_plain(path, "a") as file:
            file.write(json.dumps({"time": time.time(), "reason": reason}) + "\n")

    def _tries(self, point: Point) -> int:
        """Failures of a run since this launcher started, its own and those of others."""
        try:
            with open_plain(self._failures(point), "r") as file:
                return sum(json.loads(line)["time"] >= self.since for line in file)
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _recall(self, point: Point) -> None:
        """Looks for a run's summary; one that cannot be read is reported, and the rest goes on."""
        try:
            summary = runs.done(self.sweep.folder / point.run)
        except RunError as error:
            self._give_up(point, str(error))
            return
        if summary is not None:
            self.summaries[point.run] = summary

    def _give_up(self, point: Point, reason: str) -> None:
        self.reasons[point.run] = reason
        self.summaries[point.run] = {"status": "failed"}

    def _settle(self) -> None:
        """Adds points until results ask for no more: those recalled may ask for others.

        A cell that shall get another one's optimum is extended only after it has it, so the points
        of a sweep do not depend on the order in which its runs end.
        """
        known = -1
        while known != len(self.sweep.points):
            known = len(self.sweep.points)
            sources = self._sources()
            cells = dict.fromkeys(point.cell(self._key) for point in self.sweep.points)
            settled = {cell for cell in cells if cell not in sources and self._grow(cell)}
            for target, source in sources.items():
                if source in settled:
                    self._transfer(source, target)
                    self._grow(target)

    def _sources(self) -> dict[Cell, Cell]:
        """Target cell -> source cell of every transfer between two cells that exist."""
        rule, pairs = self.sweep.config.transfer, {}
        if rule is None:
            return pairs
        cells = dict.fromkeys(point.cell(self._key) for point in self.sweep.points)
        for curve, values in cells:
            if rule.source.items() <= dict(values).items():
                target = (curve, tuple({**dict(values), **rule.target}.items()))
                if target in cells and target != (curve, values):
                    pairs[target] = (curve, values)
        return pairs

    def _transfer(self, source: Cell, target: Cell) -> None:
        """Adds the best value of a settled cell to another one."""
        losses = mean_losses(self.sweep.cell_points(source), self._key, self.summaries)
        if losses:  # empty if every run failed
            self._add(target, min(losses, key=lambda value: losses[value]))

    def _add(self, cell: Cell, value: float) -> bool:
        """Adds a cell's points at one value; False if it has them already."""
        curve, values = cell
        new = self.sweep.expand(curve, {**dict(values), self._key: value})
        for point in new:
            self.sweep.points.append(point)
            self._recall(point)
        return bool(new)

    def _grow(self, cell: Cell) -> bool:
        """Extends a complete cell past its edge, also over points that earlier sweeps added.

        Whether the cell is settled: complete, and not to be extended.
        """
        extend = self.sweep.config.extend
        while extend:
            losses = mean_losses(self.sweep.cell_points(cell), extend.key, self.summaries)
            if losses is None:
                return False
            value = next_value(losses, extend.factor) if losses else None
            if value is None:
                return True
            if self.sweep.added.get(cell, 0) == extend.points:
                note = f"best {extend.key} still at the edge, {extend.points} added"
                note = f"{_cell_name(cell)}: {note}"
                self.notes += [] if note in self.notes else [note]
                return True
            if not self._add(cell, value):  # it is there, but failed
                return True
            self.sweep.added[cell] = self.sweep.added.get(cell, 0) + 1
        return True


def _cell_name(cell: Cell) -> str:
    return " ".join([cell[0], *(f"{key}={value}" for key, value in cell[1])])


def write_results(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path:
    """results.csv: one row per run that is done, by curve and rising grid values."""
    keys = list(dict.fromkeys(key for point in sweep.points for key, _ in point.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["curve", *keys, "seed", *RESULT_COLUMNS, "commit", "run"])
    for point in sorted(sweep.points, key=_grid_order(sweep, keys)):
        summary = summaries.get(point.run)
        if summary is not None:
            values = [dict(point.values).get(key) for key in keys]
            results = [summary.get(column) for column in RESULT_COLUMNS]
            commit = summary.get("environment", {}).get("commit")
            writer.writerow([point.curve, *values, point.seed, *results, commit, point.run])
    path = sweep.folder / "results.csv"
    write_text(path, text.getvalue())
    return path


def _grid_order(sweep: Sweep, keys: Sequence[str]):
    curves = list(sweep.config.curves)

    def order(point: Point) -> tuple:
        values = [dict(point.values).get(key) for key in keys]
        return (curves.index(point.curve), *((str(type(v)), v) for v in values), point.seed)

    return order


def write_manifest(sweep: Sweep) -> None:
    """manifest.json: every run the sweep has asked for so far."""
    entries = [
        {"run": p.run, "curve": p.curve, "values": dict(p.values), "seed": p.seed}
        for p in sweep.points
    ]
    write_json(sweep.folder / "manifest.json", entries)


def _serve(index: int, scheduler: Scheduler, board: Board, worker: Worker) -> None:
    """One thread: a worker process and the points it runs."""
    sweep = scheduler.sweep
    try:
        while (point := scheduler.take()) is not None:
            board.start(index, point)
            try:
                summary = worker.run(
                    sweep.config.experiment,
                    point.config.model_dump(mode="json"),
                    sweep.folder / point.run,
                    lambda step, steps, loss: board.step(index, step, steps, loss),
                )
                scheduler.finish(point, summary)
            except (RunBusy, RunStopped):
                scheduler.put_back(point)
            except RunUnusable as problem:
                scheduler.give_up(point, str(problem))
            except RunFailed as failure:
                if scheduler.stopped:
                    return
                scheduler.fail(point, str(failure))
                board.note(f"{point.run}: {failure}")
            with scheduler.condition:
                write_manifest(sweep)
                write_results(sweep, scheduler.summaries)
            board.done(index, point, scheduler)
    except Exception as error:  # a thread's own end would leave the others waiting for ever
        scheduler.stop(error)
    finally:
        worker.close()


def run_sweep(sweep: Sweep, workers: int, threads: int) -> Scheduler:
    """Runs what is not done and returns the scheduler with every summary.

    Raises KeyboardInterrupt when interrupted, after every run at work here has saved a checkpoint
    (at once when interrupted again), and whatever ended a worker's thread.
    """
    scheduler = Scheduler(sweep)
    write_manifest(sweep)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    board = Board(scheduler, sweep.experiment.flops)
    crew = [Worker(environment) for _ in range(workers if scheduler.waiting() else 0)]
    serving = [
        threading.Thread(target=_serve, args=(index, scheduler, board, worker), daemon=True)
        for index, worker in enumerate(crew)
    ]
    for thread in serving:
        thread.start()
    try:
        for thread in serving:
            thread.join()
    except KeyboardInterrupt:
        scheduler.stop()
        _let_save(crew, serving)
        raise
    finally:  # no worker outlives the launcher
        scheduler.stop()
        for worker in crew:
            worker.close()
        board.close()
    if scheduler.error:
        raise scheduler.error
    write_manifest(sweep)
    write_results(sweep, scheduler.summaries)
    return scheduler


def _let_save(crew: Sequence[Worker], serving: Sequence[threading.Thread]) -> None:
    """Asks the workers to stop and waits until their runs have saved what they need to go on."""
    print("stopping: runs save a checkpoint; interrupt again to end them now", file=sys.stderr)
    for worker in crew:
        worker.ask_to_stop()
    end = time.monotonic() + STOP_SECONDS
    for thread in serving:
        thread.join(max(0.0, end - time.monotonic()))


def dry_run(sweep: Sweep) -> str:
    """What a sweep would run, one line per run that is not done."""
    scheduler = Scheduler(sweep)
    lines = [
        f"{_cell_name((point.curve, point.values))} seed={point.seed}  {point.run}"
        for point in scheduler.waiting()
    ]
    flops = sum(sweep.experiment.flops(point.config) for point in scheduler.waiting())
    total = f"{len(lines)} of {len(sweep.points)} runs to do, about {flops:.3g} FLOPs"
    return "\n".join([*lines, total])


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a run failed, 2 for a user's mistake, 75 when stopped."""
    parser = argparse.ArgumentParser(prog="python -m training.sweep", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("sweep", type=Path, help="YAML file, for example in nanolm_c4/sweeps/")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--threads", type=int, help="threads per worker (default: cores / workers)")
    parser.add_argument("--results", type=Path, default=runs.RESULTS, help="results folder")
    parser.add_argument("--dry-run", action="store_true", help="list the runs to do and stop")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers go, too
    with one_line_errors(OSError):
        if args.workers < 1 or (args.threads is not None and args.threads < 1):
            raise UserError("--workers and --threads must be at least 1")
        sweep = load_sweep(args.sweep, args.results)
        if args.dry_run:
            print(dry_run(sweep))
            return
        threads = args.threads or max(1, (os.cpu_count() or 1) // args.workers)
        try:
            scheduler = run_sweep(sweep, args.workers, threads)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            raise SystemExit(STOPPED) from None
    for line in scheduler.report():
        print(line, file=sys.stderr)
    print(sweep.folder / "results.csv")
    if any(summary["status"] == "failed" for summary in scheduler.summaries.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
