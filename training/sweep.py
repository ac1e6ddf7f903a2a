"""Sweeps: a grid of configs becomes runs, runs become one table.

    python -m training.sweep nanolm_c4/sweeps/quickstart.yaml --workers 2 [--dry-run]

Runs that are done are not run again; runs that were stopped or killed go on from their newest
checkpoint. Several launchers, on one machine or on several that share the results folder, can work
on one sweep: a run that another one holds is left to it. A run that another sweep of the experiment
has finished, at the same commit, is copied from there.

With `extend`, a cell of the grid (one curve at one width, say) whose best learning rate lies at an
edge gets the next rate, until the optimum is inside or the limit is reached; with `coverage`, rates
above it follow until the first unstable one is known. A sweep file may hold `presets`, other sizes
of the same sweep. `results.csv` has one row per run, by curve and rising grid values; `probes.csv`
the alignment of every dense layer where runs were probed.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import itertools
import json
import math
import secrets
import shlex
import shutil
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

from pydantic import Discriminator, Field, Tag, model_validator

from training import runs, tables, workers
from training.config import (
    PositiveFloat,
    PositiveInt,
    Section,
    apply_preset,
    read_yaml,
    set_keys,
    validate,
)
from training.errors import RunError, UserError, one_line_errors
from training.files import is_locked, open_plain, write_json, write_text, writing
from training.fits import stability
from training.progress import Board
from training.signals import STOPPED
from training.workers import RunBusy, RunFailed, RunStopped, RunUnusable

POLL_SECONDS = 2.0  # between looks at runs that other launchers hold

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


class Multiples(Section):
    """Multiples of the best value that another sweep found."""

    around: tables.Around
    """Where that value comes from."""
    steps: Annotated[list[float], Field(min_length=1)]
    """Exponents of two to multiply it by; [-1, 0, 1] are half of it, itself and twice it."""


Values = Annotated[list[Any], Field(min_length=1)]


def _axis_kind(value: Any) -> str:
    """Which kind of axis a file means, so that what is wrong with it is said of that kind alone."""
    if isinstance(value, Mapping):
        return "Multiples" if {"around", "steps"} & value.keys() else "Log2Range"
    return {Log2Range: "Log2Range", Multiples: "Multiples"}.get(type(value), "list[Any]")


Axis = Annotated[
    Annotated[Values, Tag("list[Any]")]
    | Annotated[Log2Range, Tag("Log2Range")]
    | Annotated[Multiples, Tag("Multiples")],
    Discriminator(_axis_kind),
]


class Horizon(Section):
    """A length that grows with the model, in place of training.steps."""

    tokens_per_parameter: PositiveFloat
    """Training tokens per non-embedding parameter; 20 is compute-optimal (Hoffmann et al.)."""
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Warm-up as a share of the steps; by default the config's own number of steps."""

    def describe(self) -> str:
        """The horizon in words, as results.csv has it."""
        return f"{self.tokens_per_parameter:g} tokens per parameter"


class Curve(Section):
    """One line of a figure: its own settings and grid."""

    set: dict[str, Any] = {}
    """Config keys of this curve."""
    grid: dict[str, Axis] = {}
    """Keys to cross, added to the sweep's grid or replacing a key of it."""
    horizon: Horizon | None = None
    """Length of the runs; by default what the config says."""
    constants: bool = False
    """Take the constants that the search named in `constants` found for such a run."""
    constants_of: dict[str, Any] = {}
    """Look the constants up as if the run had these values, such as {optimizer.name: adam}."""


class MoreSeeds(Section):
    """Other seeds where the grid has certain values."""

    where: dict[str, Values]
    """Grid key -> values it applies to."""
    seeds: Annotated[list[int], Field(min_length=1)]
    """The seeds there."""


class Adjust(Section):
    """Other settings where the grid has certain values, such as a micro-batch for wide models."""

    where: dict[str, Values]
    """Grid key -> values it applies to."""
    set: dict[str, Any]
    """Config keys there."""


class Coverage(Section):
    """Go on above the optimum until the first unstable value is known (Everett et al., App. C)."""

    excess: PositiveFloat = 0.2
    """Above the optimum a value is unstable when its loss exceeds the lowest by this share."""
    gap: PositiveFloat = 0.5
    """Largest distance between the last stable value and that one, as an exponent of two."""


class Extend(Section):
    """Follow an optimum that lies at the edge of a cell's grid."""

    key: str
    """Grid key of the quantity to extend, a positive number such as optimizer.lr."""
    step: PositiveFloat = 1.0
    """Distance of a new point from the edge, as an exponent of two."""
    points: PositiveInt = 6
    """At most this many new points per cell."""
    coverage: Coverage | None = None
    """How far past the optimum to go; by default until it is inside."""


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
    grid: dict[str, Axis] = {}
    """Keys to cross in every curve."""
    constants: str | None = None
    """Search file, relative to the sweep file, whose constants curves may take."""
    curves: Annotated[dict[str, Curve], Field(min_length=1)]
    """Curves by name."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    """Seeds of every point."""
    more_seeds: list[MoreSeeds] = []
    """Exceptions to `seeds`; the first that applies counts."""
    adjust: list[Adjust] = []
    """Exceptions to `set`; every one that applies counts, the last one most."""
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
            if curve.constants and self.constants is None:
                raise ValueError(f"curve {name!r} takes constants; `constants` must name a search")
            if "seed" in {**grid, **self.set, **curve.set}:
                raise ValueError("seed goes into seeds, not into set or grid")
            if self.extend and self.extend.key not in grid:
                raise ValueError(f"extend.key {self.extend.key!r} is not in the grid of {name!r}")
        for name, where in self._rules():
            _check_values(name, where, [{**self.grid, **c.grid} for c in self.curves.values()])
        return self

    def _rules(self) -> list[tuple[str, dict[str, list[Any]]]]:
        """(name, key -> values) of every rule that speaks of grid values."""
        named = (("more_seeds", self.more_seeds), ("adjust", self.adjust))
        rules = [(f"{name}.where", rule.where) for name, part in named for rule in part]
        if self.transfer:
            for place in ("source", "target"):
                wanted = getattr(self.transfer, place)
                rules.append((f"transfer.{place}", {k: [v] for k, v in wanted.items()}))
        return rules


def _check_values(
    rule: str, wanted: Mapping[str, list[Any]], grids: Sequence[Mapping[str, Any]]
) -> None:
    """Raises ValueError for a key or value of a rule that no curve's grid has."""
    for key, values in wanted.items():
        axes = [grid[key] for grid in grids if key in grid]
        if not axes:
            raise ValueError(f"{rule}: {key!r} is in no curve's grid")
        if any(isinstance(axis, Multiples) for axis in axes):
            raise ValueError(f"{rule}: {key!r} has no fixed values; use another key")
        known = list(dict.fromkeys(value for axis in axes for value in _axis(axis)))
        for value in values:
            if value not in known:
                raise ValueError(f"{rule}: {key} {value} is in no curve's grid: {known}")


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
    """A sweep file read, with its experiment and every point known so far.

    A draft stands in for what other sweeps and searches have not found yet, and says so in
    `assumed`; it can be counted, not run.
    """

    config: SweepConfig
    path: Path
    experiment: ModuleType
    base: dict[str, Any]
    folder: Path
    results: Path = runs.RESULTS
    preset: str | None = None
    draft: bool = False
    points: list[Point] = field(default_factory=list)
    added: dict[Cell, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def settings(self, curve: str) -> dict[str, Any]:
        """The config keys that the sweep and a curve set."""
        return {**self.config.set, **self.config.curves[curve].set}

    def point(self, curve: str, values: Mapping[str, Any], seed: int) -> Point:
        """The point at some grid values; UserError if they make no valid config."""
        rule = self.config.curves[curve]
        settings = {**self.settings(curve), **values, "seed": seed}
        for adjust in self.config.adjust:
            settings |= adjust.set if _applies(adjust, values) else {}
        if rule.constants:
            settings |= self._constants(curve, settings)
        if rule.horizon:
            settings |= self._length(curve, settings, rule.horizon)
        config = self._validated(curve, settings)
        return Point(curve, tuple(values.items()), seed, config, runs.run_id(config, curve))

    def _validated(self, curve: str, settings: Mapping[str, Any]) -> Section:
        where = f"{self.path}, curve {curve!r}"
        return validate(self.experiment.Config, set_keys(self.base, settings), where)

    def _constants(self, curve: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the search found for such a run; nothing in a draft before it has."""
        rule = self.config.curves[curve]
        asked = flat(set_keys(self.base, {**settings, **rule.constants_of}))
        try:
            return tables.constants(
                self.config.constants, asked, self.path, self.results, self.preset
            )
        except tables.Missing as missing:
            self._assume(missing, f"curve {curve!r} is counted with the config's own constants")
            return {}

    def _length(self, curve: str, settings: Mapping[str, Any], horizon: Horizon) -> dict[str, int]:
        """Steps, and warm-up, of a horizon that depends on the model."""
        config = self._validated(curve, {**settings, "schedule.warmup_steps": 0})
        parameters = self.experiment.parameters(config)["non_embedding"]
        tokens = horizon.tokens_per_parameter * parameters
        steps = max(1, round(tokens / self.experiment.tokens_per_step(config)))
        if horizon.warmup_fraction is None:
            return {"training.steps": steps}
        warmup = round(horizon.warmup_fraction * steps)
        return {"training.steps": steps, "schedule.warmup_steps": warmup}

    def _assume(self, missing: tables.Missing, instead: str) -> None:
        """Notes what a draft does without; raises `missing` otherwise."""
        if not self.draft:
            raise missing
        line = f"{missing}; until then {instead}"
        self.assumed += [] if line in self.assumed else [line]

    def grid(self, curve: str) -> list[dict[str, Any]]:
        """Every combination of a curve's grid values, the last key varying fastest."""
        grid = {**self.config.grid, **self.config.curves[curve].grid}
        combinations = grid_values({k: v for k, v in grid.items() if not isinstance(v, Multiples)})
        for key, axis in grid.items():
            if isinstance(axis, Multiples):
                combinations = [
                    {**values, key: value}
                    for values in combinations
                    for value in self._multiples(curve, values, key, axis)
                ]
        return [{key: values[key] for key in grid} for values in combinations]

    def _multiples(
        self, curve: str, values: Mapping[str, Any], key: str, axis: Multiples
    ) -> list[float]:
        settings = {**self.settings(curve), **values}
        try:
            centre = tables.best(
                axis.around, settings, key, self.path, self.results, self.preset
            )
        except tables.Missing as missing:
            centre = flat(set_keys(self.base, settings)).get(key)
            self._assume(missing, f"curve {curve!r} is counted around {key} {centre:g}")
        return [shifted(centre, step) for step in sorted(axis.steps)]

    def seeds(self, values: Mapping[str, Any]) -> list[int]:
        """The seeds at some grid values."""
        for rule in self.config.more_seeds:
            if _applies(rule, values):
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


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as {dotted key: value}."""
    leaves = {}
    for key, value in data.items():
        inner = isinstance(value, Mapping)
        leaves |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return leaves


def shifted(value: float, step: float) -> float:
    """value * 2^step; quarter powers of two stay exactly that, however they were reached."""
    quarters = 4 * (math.log2(value) + step)
    near = abs(quarters - round(quarters)) < 1e-9
    return 2.0 ** (round(quarters) / 4) if near else value * 2.0**step


def _applies(rule: MoreSeeds | Adjust, values: Mapping[str, Any]) -> bool:
    return all(values.get(key) in wanted for key, wanted in rule.where.items())


def load_sweep(
    path: Path,
    results: Path = runs.RESULTS,
    preset: str | None = None,
    curves: Sequence[str] | None = None,
    draft: bool = False,
) -> Sweep:
    """A sweep file, its experiment and its grid; UserError for anything that cannot run.

    `curves` chooses some of its curves. With `draft`, what other sweeps and searches have not found
    yet is assumed, so that the sweep can be counted before anything has run.
    """
    data = apply_preset(read_yaml(path), preset, str(path))
    config = validate(SweepConfig, data, str(path))
    try:
        experiment = importlib.import_module(f"{config.experiment}.train")
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: experiment {config.experiment!r} has no train.py here; run from the "
            "repository's root and give the folder's name"
        ) from None
    base = read_yaml(path.parent / config.config)
    folder = tables.folder_of(path, results, preset)
    sweep = Sweep(config, path, experiment, base, folder, results, preset, draft)
    for curve in _chosen(path, config, curves):
        for values in sweep.grid(curve):
            sweep.points += sweep.expand(curve, values)
    return sweep


def _chosen(path: Path, config: SweepConfig, curves: Sequence[str] | None) -> list[str]:
    """The curves to run, in the file's order; UserError for one that it does not have."""
    for name in curves or ():
        if name not in config.curves:
            known = ", ".join(config.curves)
            raise UserError(f"--curves: {path} has no curve {name!r}; it has {known}")
    return [name for name in config.curves if curves is None or name in curves]


def grid_values(grid: Mapping[str, Values | Log2Range]) -> list[dict[str, Any]]:
    """Every combination of a grid's values, the last key varying fastest."""
    axes = [_axis(values) for values in grid.values()]
    return [dict(zip(grid, combination)) for combination in itertools.product(*axes)]


def _axis(values: list[Any] | Log2Range) -> list[Any]:
    return values.values() if isinstance(values, Log2Range) else values


def next_value(
    losses: Mapping[float, float], step: float, coverage: Coverage | None = None
) -> float | None:
    """The value to try next, or None when the optimum, and what `coverage` asks for, is known.

    `losses` maps positive values to mean losses, infinite where a run diverged. First the lowest
    loss must lie inside; if all diverged the next value is below the lowest. Then the smallest
    unstable value above it must be known, and the last stable one be near enough.
    """
    values = sorted(losses)
    best = min(values, key=lambda value: (losses[value], value))
    if best == values[0] or math.isinf(losses[best]):
        return shifted(values[0], -step)
    if best == values[-1]:
        return shifted(best, step)
    if coverage is None:
        return None
    stable, unstable = stability(losses, coverage.excess)
    if unstable is None:
        return shifted(values[-1], step)
    distance = math.log2(unstable / stable)
    return shifted(stable, distance / 2) if distance > coverage.gap + 1e-9 else None


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
    """Hands out points, largest first, and adds the ones that results ask for.

    Unless it only looks, it copies what other sweeps have finished.
    """

    def __init__(self, sweep: Sweep, looks: bool = False) -> None:
        self.looks = looks
        self.sweep = sweep
        self.summaries: dict[str, dict[str, Any]] = {}
        self.running: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.since = time.time()
        self.notes: list[str] = []
        self.stopped = False
        self.error: Exception | None = None
        self.others: dict[str, list[Path]] | None = None
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
        if summary is None:
            summary = self._reused(point)
        if summary is not None:
            self.summaries[point.run] = summary

    def _reused(self, point: Point) -> dict[str, Any] | None:
        """The result of the same run in another sweep of the experiment, copied from there."""
        if self.others is None:
            self.others = _runs_elsewhere(self.sweep.folder)
        for folder in self.others.get(_hash(point.run), ()):
            with suppress(RunError, OSError, ValueError):
                target = None if self.looks else self.sweep.folder / point.run
                summary = _take_over(folder, target)
                if summary is not None:
                    return summary
        return None

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
            value = next_value(losses, extend.step, extend.coverage) if losses else None
            if value is None:
                return True
            if self.sweep.added.get(cell, 0) == extend.points:
                note = f"{extend.points} values of {extend.key} added, and more are needed"
                note = f"{_cell_name(cell)}: {note}"
                self.notes += [] if note in self.notes else [note]
                return True
            if not self._add(cell, value):  # it is there, but failed
                return True
            self.sweep.added[cell] = self.sweep.added.get(cell, 0) + 1
        return True


def _hash(run: str) -> str:
    """The part of a run's name that its config alone decides."""
    return run.rpartition("-")[2]


def _runs_elsewhere(folder: Path) -> dict[str, list[Path]]:
    """Hash -> run folders in the other sweeps of an experiment."""
    found: dict[str, list[Path]] = {}
    for other in sorted(folder.parent.glob("*/*-*/summary.json")):
        if other.parent.parent != folder:
            found.setdefault(_hash(other.parent.name), []).append(other.parent)
    return found


# A finished run's own files; nothing else in its folder is a result.
_RESULT_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "probes.jsonl", "summary.json")


def _take_over(source: Path, target: Path | None) -> dict[str, Any] | None:
    """The summary of a finished run of this commit, copied to `target` whole or not at all.

    None if it is not done, was made at another commit, or if `target` has begun on its own.
    """
    from training.environment import commit

    summary = runs.done(source)
    if summary is None or summary.get("environment", {}).get("commit") != commit():
        return None
    if target is None:
        return summary
    if target.exists() and any(not entry.name.startswith(".") for entry in target.iterdir()):
        return None
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    aside.mkdir(parents=True)
    try:
        for name in _RESULT_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, aside / name)
        if target.exists():  # an empty one, made by a worker that found nothing to do
            return None
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return summary


def _cell_name(cell: Cell) -> str:
    return " ".join([cell[0], *(f"{key}={value}" for key, value in cell[1])])


def columns(sweep: Sweep) -> list[str]:
    """The config keys that the sweep sets or crosses: columns of its tables."""
    config = sweep.config
    sets = [config.set, *(curve.set for curve in config.curves.values())]
    grids = [config.grid, *(curve.grid for curve in config.curves.values())]
    return list(dict.fromkeys(key for part in (*sets, *grids) for key in part))


def _place(sweep: Sweep, point: Point, keys: Sequence[str]) -> list[Any]:
    """A point's curve, key columns, horizon and use of constants, as tables have them."""
    curve = sweep.config.curves[point.curve]
    values = {**sweep.settings(point.curve), **dict(point.values)}
    horizon = curve.horizon.describe() if curve.horizon else "fixed"
    return [point.curve, *(values.get(key) for key in keys), horizon, curve.constants]


def write_results(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path:
    """results.csv: one row per run that is done, by curve and rising grid values.

    Rows of curves that were left out this time stay as they are.
    """
    keys = columns(sweep)
    header = ["curve", *keys, "horizon", "constants", "seed", *RESULT_COLUMNS, "commit", "run"]
    path = sweep.folder / "results.csv"
    rows = _rows_of_others(sweep, path, header)
    for point in sorted(sweep.points, key=_grid_order(sweep)):
        summary = summaries.get(point.run)
        if summary is not None:
            results = [summary.get(column) for column in RESULT_COLUMNS]
            commit = summary.get("environment", {}).get("commit")
            place = _place(sweep, point, keys)
            rows.append([*place, point.seed, *results, commit, point.run])
    order = list(sweep.config.curves)
    rows.sort(key=lambda row: order.index(row[0]))  # stable: within a curve, the grid's order
    _write_csv(path, header, rows)
    return path


def _rows_of_others(sweep: Sweep, path: Path, header: list[str]) -> list[list[Any]]:
    """Rows of an earlier table whose curves this launcher leaves out, if it is of this sweep."""
    ours = {point.curve for point in sweep.points}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            first, *rows = csv.reader(file)
    except (OSError, ValueError):
        return []
    others = sweep.config.curves.keys() - ours
    return [row for row in rows if row[0] in others] if first == header else []


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())


PROBE_COLUMNS = ("step", "layer", "role", "fan_in", "alignment")


def write_probes(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path | None:
    """probes.csv: log alignment ratio per run, step and dense layer; None if nothing was probed."""
    keys, rows = columns(sweep), []
    for point in sorted(sweep.points, key=_grid_order(sweep)):
        if point.config.training.probe_every and point.run in summaries:
            place = [*_place(sweep, point, keys), point.seed, point.run]
            rows += [[*place, *row] for row in _alignment(sweep.folder / point.run)]
    if not rows:
        return None
    path = sweep.folder / "probes.csv"
    header = ["curve", *keys, "horizon", "constants", "seed", "run", *PROBE_COLUMNS]
    _write_csv(path, header, rows)
    return path


def _alignment(run_dir: Path) -> list[list[Any]]:
    """(step, layer, role, fan_in, alignment) of a run's probes."""
    try:
        with open(run_dir / "plan.json", encoding="utf-8") as file:
            plan = {row["name"]: row for row in json.load(file)["rows"]}
        with open(run_dir / "probes.jsonl", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except FileNotFoundError:  # it failed before its first probe
        return []
    return [
        [line["step"], layer, *_of_plan(plan, layer), measured["alignment"]]
        for line in lines
        for layer, measured in line["layers"].items()
    ]


def _of_plan(plan: Mapping[str, Mapping[str, Any]], layer: str) -> tuple[Any, Any]:
    row = plan.get(f"{layer}.weight", {})
    return row.get("role"), row.get("fan_in")


def _grid_order(sweep: Sweep):
    curves = list(sweep.config.curves)

    def order(point: Point) -> tuple:
        values = ((str(type(value)), value) for _, value in point.values)
        return (curves.index(point.curve), *values, point.seed)

    return order


def write_manifest(sweep: Sweep) -> None:
    """manifest.json: every run the sweep has asked for so far."""
    entries = [
        {"run": p.run, "curve": p.curve, "values": dict(p.values), "seed": p.seed}
        for p in sweep.points
    ]
    write_json(sweep.folder / "manifest.json", entries)


def _serve(index: int, scheduler: Scheduler, board: Board, worker: workers.Worker) -> None:
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


def run_sweep(
    sweep: Sweep, count: int, threads: int, launch: Sequence[str] = ()
) -> Scheduler:
    """Runs what is not done in `count` workers; returns the scheduler with every summary.

    Raises KeyboardInterrupt when interrupted, after every run at work here has saved a checkpoint
    (at once when interrupted again), and whatever ended a worker's thread.
    """
    scheduler = Scheduler(sweep)
    write_manifest(sweep)
    board = Board(scheduler, sweep.experiment.flops)
    crew = workers.crew(count, threads, launch) if scheduler.waiting() else []
    calls = [(index, scheduler, board, worker) for index, worker in enumerate(crew)]
    ends = workers.in_threads(_serve, calls)
    try:
        for end in ends:
            end.wait()
    except KeyboardInterrupt:
        scheduler.stop()
        workers.let_save(crew, ends)
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
    write_probes(sweep, scheduler.summaries)
    return scheduler


def dry_run(sweep: Sweep) -> str:
    """What a sweep would run, one line per run that is not done."""
    scheduler = Scheduler(sweep, looks=True)
    lines = [
        f"{_cell_name((point.curve, point.values))} seed={point.seed}  {point.run}"
        for point in scheduler.waiting()
    ]
    flops = sum(sweep.experiment.flops(point.config) for point in scheduler.waiting())
    total = f"{len(lines)} of {len(sweep.points)} runs to do, about {flops:.3g} FLOPs"
    return "\n".join([*sweep.assumed, *lines, total])


@dataclass(frozen=True)
class Options:
    """One launcher: what the command line, or a job on a cluster, asks for."""

    sweep: Path
    preset: str | None = None
    curves: tuple[str, ...] | None = None
    workers: int = 1
    threads: int | None = None
    results: Path = runs.RESULTS
    launch: tuple[str, ...] = ()

    def load(self, draft: bool = False) -> Sweep:
        """The sweep with the chosen preset and curves."""
        return load_sweep(self.sweep, self.results, self.preset, self.curves, draft)


def run(options: Options) -> int:
    """Runs a sweep; the exit code: 0, 1 if a run failed, 75 when stopped. Or a UserError."""
    threads = workers.threads_each(options.workers, options.threads)
    sweep = options.load()
    try:
        scheduler = run_sweep(sweep, options.workers, threads, options.launch)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    for line in scheduler.report():
        print(line, file=sys.stderr)
    print(sweep.folder / "results.csv")
    failed = any(summary["status"] == "failed" for summary in scheduler.summaries.values())
    return int(failed)


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Options of every command that runs a sweep."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("sweep", type=Path, help="YAML file, for example in nanolm_c4/sweeps/")
    parser.add_argument("--preset", help="another size of the sweep that its file holds")
    parser.add_argument("--curves", nargs="+", metavar="NAME", help="only these curves")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--threads", type=int, help="threads per worker (default: cores / workers)")
    parser.add_argument("--results", type=Path, default=runs.RESULTS, help="results folder")
    parser.add_argument(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="start each run by this command, such as 'accelerate launch --config_file FILE'",
    )
    return parser


def options_from(args: argparse.Namespace) -> Options:
    """The options of a parsed command line."""
    curves = None if args.curves is None else tuple(args.curves)
    return Options(
        args.sweep,
        args.preset,
        curves,
        args.workers,
        args.threads,
        args.results,
        tuple(args.launch),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a run failed, 2 for a user's mistake, 75 when stopped."""
    commands = parser("python -m training.sweep", __doc__)
    commands.add_argument("--dry-run", action="store_true", help="list the runs to do and stop")
    args = commands.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers go, too
    with one_line_errors(OSError):
        options = options_from(args)
        if args.dry_run:
            print(dry_run(options.load(draft=True)))
            return
        code = run(options)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
