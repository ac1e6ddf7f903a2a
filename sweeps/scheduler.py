"""What a sweep runs next: points not done yet, and those that results ask for."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure.fits import stability
from sweeps import confirm
from sweeps.sweep_file import Cell, Coverage, Point, Sweep
from training import runs
from training.config import shifted
from training.errors import RunError, UserError
from training.files import is_locked, open_plain, writing

POLL_SECONDS = 2.0  # between looks at runs that other launchers hold


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
        self.impossible: dict[tuple[Cell, confirm.Place], str] = {}
        self.stopped = False
        self.error: Exception | None = None
        self.others: dict[str, list[Path]] | None = None
        self.condition = threading.Condition(threading.RLock())
        for point in sweep.points:
            self._recall(point)
        self._settle()

    @property
    def _key(self) -> str:
        """The key that `extend` follows."""
        return self.sweep.config.extend.key

    def _cells(self) -> list[Cell]:
        searched = self.sweep.config.searched
        return list(dict.fromkeys(point.cell(searched) for point in self.sweep.points))

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
        self.notes.clear()  # what is still so is remarked again
        while known != len(self.sweep.points):
            known = len(self.sweep.points)
            sources = self._sources()
            follow = self._walk if self.sweep.config.confirm else self._grow
            settled = {cell for cell in self._cells() if cell not in sources and follow(cell)}
            for target, source in sources.items():
                if source in settled:
                    self._transfer(source, target)
                    self._grow(target)

    def _sources(self) -> dict[Cell, Cell]:
        """Target cell -> source cell of every transfer between two cells that exist."""
        rule, pairs = self.sweep.config.transfer, {}
        if rule is None:
            return pairs
        cells = self._cells()
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
            self._add(target, {self._key: min(losses, key=lambda value: losses[value])})

    def _remark(self, note: str) -> None:
        self.notes += [] if note in self.notes else [note]

    def _add(
        self, cell: Cell, place: Mapping[str, float], seeds: list[int] | None = None
    ) -> bool:
        """Adds a cell's points at one place; False if it has them already."""
        curve, values = cell
        everywhere = {**dict(values), **place}
        new = self.sweep.expand(curve, self.sweep.in_order(curve, everywhere), seeds)
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
                self._remark(f"{cell_name(cell)}: {note}")
                return True
            if not self._add(cell, {extend.key: value}):  # it is there, but failed
                self._remark(f"{cell_name(cell)}: {extend.key} {value:g} failed, and it is needed")
                return True
            self.sweep.added[cell] = self.sweep.added.get(cell, 0) + 1
        return True

    def _walk(self, cell: Cell) -> bool:
        """Adds the neighbours of a complete cell's best point until none is better.

        Whether the cell is settled: complete, and confirmed as far as it can be.
        """
        rule = self.sweep.config.confirm
        scores = self._scores(cell, rule)
        if not scores:
            return scores is not None
        best = confirm.candidate(scores)
        tried = {self._place(point) for point in self.sweep.cell_points(cell)}
        neighbours = confirm.around(best, rule.neighbours, tried)
        refused = {place for other, place in self.impossible if other == cell}
        new = [place for place in neighbours if place not in tried | refused]
        if self.sweep.added.get(cell, 0) + len(new) > rule.points:
            self._remark(_unfinished_walk(cell, rule, best, scores[best]))
        elif new:
            self.sweep.added[cell] = self.sweep.added.get(cell, 0) + len(new)
            for place in new:
                self._try(cell, place)
            return self._walk(cell)  # they may be known already
        elif any(place not in scores for place in neighbours):
            why = [self.impossible[cell, place] for place in neighbours if place in refused]
            reason = why[0] if why else "a neighbour failed"
            self._remark(f"{cell_name(cell)}: {rule.at(best)} is not confirmed: {reason}")
        else:
            self._add(cell, dict(zip(rule.keys, best)), rule.seeds)
        return True

    def _try(self, cell: Cell, place: confirm.Place) -> None:
        """Adds a place, or notes why its values make no config."""
        try:
            self._add(cell, dict(zip(self.sweep.config.searched, place)))
        except UserError as error:
            self.impossible[cell, place] = str(error)

    def _scores(
        self, cell: Cell, rule: confirm.Confirm
    ) -> dict[confirm.Place, confirm.Score] | None:
        """Place -> mean score over the search's seeds; None while a run is missing.

        Places where a seed failed are left out, and so are the optimum's further seeds.
        """
        scores: dict[confirm.Place, list[confirm.Score | None]] = {}
        for point in self.sweep.cell_points(cell):
            if point.seed not in self.sweep.seeds(dict(point.values)):
                continue
            if point.run not in self.summaries:
                return None
            try:
                score = confirm.score(self.summaries[point.run], rule.metric)
            except KeyError:
                raise UserError(_no_metric(rule.metric, self.summaries[point.run])) from None
            scores.setdefault(self._place(point), []).append(score)
        return {
            place: confirm.mean_score(seeds) for place, seeds in scores.items() if None not in seeds
        }

    def _place(self, point: Point) -> confirm.Place:
        values = dict(point.values)
        return tuple(values[key] for key in self.sweep.config.searched)


def _unfinished_walk(
    cell: Cell, rule: confirm.Confirm, best: confirm.Place, score: confirm.Score
) -> str:
    if math.isinf(score[0]):
        return f"{cell_name(cell)}: every run diverged, also after {rule.points} more points"
    note = f"{rule.points} points are not enough to confirm {rule.at(best)}"
    return f"{cell_name(cell)}: {note}; raise confirm.points"


def _no_metric(metric: str, summary: Mapping[str, Any]) -> str:
    known = [key for key in summary if key.startswith(("final_eval_", "best_eval_"))]
    return f"confirm.metric: runs measure no {metric!r}; they have {', '.join(known)}"


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
_RESULT_FILES = (
    "config.yaml",
    "plan.json",
    "metrics.jsonl",
    "timing.jsonl",
    "probes.jsonl",
    "observations.jsonl",
    "summary.json",
)
_RESULT_FOLDER = "observations"  # the arrays beside observations.jsonl


def _take_over(source: Path, target: Path | None) -> dict[str, Any] | None:
    """The summary of a finished run of this commit, copied to `target` whole or not at all.

    None if it is not done, was made at another commit, or if `target` has begun on its own. What
    has no commit, or changes since it, may be other code.
    """
    from training.environment import commit

    summary = runs.done(source)
    ours = commit()
    if summary is None or ours is None or ours.endswith("+changes"):
        return None
    if summary.get("environment", {}).get("commit") != ours:
        return None
    if target is None:
        return summary
    if target.exists() and any(target.iterdir()):
        return None
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    aside.mkdir(parents=True)
    try:
        for name in _RESULT_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, aside / name)
        if (source / _RESULT_FOLDER).is_dir():
            shutil.copytree(source / _RESULT_FOLDER, aside / _RESULT_FOLDER, symlinks=True)
        aside.rename(target)  # over an empty folder at most; otherwise OSError
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return summary


def cell_name(cell: Cell) -> str:
    """A cell in words."""
    return " ".join([cell[0], *(f"{key}={value}" for key, value in cell[1])])
