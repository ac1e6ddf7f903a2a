"""What is under way: runs, their results, and the runs that rules ask for next."""

import heapq
import math
import shutil
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sweeps import tables
from sweeps.pool import Needs
from sweeps.request import LoadedFile, read_table
from sweeps.rules import DONE, FAILED, Cell
from sweeps.sweep_file import CellKey, Point, Sweep
from training import environment, runs
from training.errors import Damaged, RunError, UserError
from training.runs import Summary

FEW = 9  # runs that are named one by one for the same reason
Recall = Callable[[str], Summary | None]


def recall(folder: Path, run: str, looks: bool = False) -> Summary | None:
    """The summary of a run that is done, or None; RunError for one that cannot be read.

    A run whose seal is broken is not done: unless this only looks, its folder is put aside and it
    is trained again.
    """
    path = folder / run
    try:
        summary = runs.sealed(path, run)
    except Damaged as damage:
        if not looks:
            aside = path.with_name(f"damaged-{run}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            line = f"{damage}; the run is trained again, and what it was is in {aside}"
            print(line, file=sys.stderr, flush=True)
        return None
    return shortened(summary) if summary else None


def shortened(summary: Summary) -> Summary:
    """A smaller summary for the driver: of the environment only the commit, no parameters by role,
    and interned keys. It takes half the memory."""
    commit = {"commit": summary.get("environment", {}).get("commit")}
    slim = {**summary, "environment": commit, "parameters_by_role": None, "files": None}
    return {sys.intern(key): value for key, value in slim.items()}


class Work(ABC):
    """What is left of a sweep or search, for one driver; a result can add new runs.

    `recall` gives the summary of a run that is done already. The largest of the runs that wait come
    first, so that none of them is left for the end.
    """

    table_name: str
    """What a user wants to know."""

    def __init__(self, file: LoadedFile, recall: Recall = lambda run: None) -> None:
        self.file, self.recall = file, recall
        self.folder, self.experiment = file.folder, file.experiment
        self.table = self.folder / self.table_name
        self.points: dict[str, Point] = {}
        self.results: dict[str, Summary] = {}
        self.reasons: dict[str, str] = {}  # of what was given up
        self.notes: dict[str, str] = {}
        self.data: dict[str, tuple[str, str]] = {}  # by a config's data: checksum and first run
        self.todo = [0.0, 0]  # FLOPs and steps of the runs without a result
        self._waiting: list[tuple[float, int, str]] = []

    @abstractmethod
    def record(self, point: Point, summary: Summary) -> None:
        """Takes a result, and adds the points that it asks for."""

    @abstractmethod
    def failed_before(self) -> set[str]:
        """Runs that an earlier command, or one at work now, has given up."""

    @abstractmethod
    def may_add(self) -> tuple[int, float]:
        """The most runs that results can still ask for, and their FLOPs."""

    @abstractmethod
    def write(self, final: bool) -> None:
        """Writes the tables as they stand, and at the end those of what runs logged."""

    @abstractmethod
    def listed(self) -> list[str]:
        """What is to do, in lines."""

    def next(self) -> Point | None:
        """A run that nobody is at work on; None while there is none."""
        while self._waiting:
            key = heapq.heappop(self._waiting)[2]
            if key not in self.results:
                return self.points[key]
        return None

    def put_back(self, point: Point, order: int = 0) -> None:
        """A run that was begun and did not end: it is handed out again, first among its equals."""
        heapq.heappush(self._waiting, (-self.flops(point), order, point.key))

    def fail(self, point: Point, reason: str) -> None:
        """Gives a run up; the rest goes on."""
        self.reasons[point.run] = reason
        self.record(point, FAILED)

    def needs(self, point: Point) -> Needs:
        """What a run needs of the place where it is trained."""
        return self.file.needs(dict(point.values))

    def flops(self, point: Point) -> float:
        """What a run costs."""
        return self.experiment.flops(point.config)

    @property
    def left(self) -> list[Point]:
        """The points without a result."""
        return [point for key, point in self.points.items() if key not in self.results]

    def report(self) -> list[str]:
        """What a user should know at the end: optima at an edge, and what was given up."""
        lines, count = [*self.notes.values()], Counter[str]()
        for name, why in self.reasons.items():
            count[why] += 1
            lines += [f"{name}: {why}"] * (count[why] <= FEW)
        more = {why: number - FEW for why, number in count.items() if number > FEW}
        return [*lines, *(f"and {number} more: {why}" for why, number in more.items())]

    def outcome(self, point: Point) -> str:
        """A run with its result, as a line for people."""
        short = ((k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in point.values)
        words = (f"{key.rpartition('.')[2]}={value}" for key, value in short)
        run = " ".join([point.curve, *words, f"seed={point.seed}"])
        summary = self.results.get(point.key)
        if summary is None:
            ending = "not done, will be tried again"
        elif summary["status"] == "finished":
            ending = f"eval loss {summary['final_eval_loss']:.4f}"
        else:
            at = f" at step {summary['step']}" if "step" in summary else ""
            ending = f"{summary['status']}{at}"
        return f"{run}  {ending}"

    def _enter(self, point: Point) -> None:
        """Counts a point among those to do, in place of one that had its key."""
        if point.key in self.points:
            self._count(self.points[point.key], -1)
        self.points[point.key] = point
        self._count(point, 1)

    def _count(self, point: Point, sign: int) -> None:
        self.todo[0] += sign * self.flops(point)
        self.todo[1] += sign * point.config.training.steps

    def _recalled(self, point: Point) -> Summary | None:
        """The summary of a run that is done already; one that cannot be read has failed."""
        try:
            return self.recall(point.run)
        except RunError as error:
            self.reasons[point.run] = str(error).removeprefix(f"{self.folder / point.run}: ")
            return FAILED

    def _take(self, point: Point, summary: Summary) -> None:
        """UserError for a run on other data than the ones before: losses would not compare."""
        if checksum := summary.get("data_checksum"):
            config: Any = point.config
            of = repr((config.data, getattr(config.model, "positions", None)))  # BART's rows
            first, run = self.data.setdefault(of, (checksum, point.run))
            if checksum != first:
                raise UserError(
                    f"{self.folder}: {run} and {point.run} were trained on other data: another "
                    f"file or sentencepiece; delete folders with {first} or {checksum} in "
                    "summary.json"
                )
        self._count(point, -1)
        self.results[point.key] = summary


class SweepWork(Work):
    """What is left of a sweep.

    Before any result the cheapest run comes first, which shows within seconds whether the setup
    works. Handling a result takes time in proportion to its cell, not to the sweep.
    """

    table_name = "results.csv"

    def __init__(self, sweep: Sweep, recall: Recall = lambda run: None) -> None:
        super().__init__(sweep, recall)
        self.sweep = sweep
        self.cells: dict[CellKey, Cell] = {}
        self._targets: dict[CellKey, list[CellKey]] = {}
        for point in sweep.points:
            cell = self.cells.setdefault(point.cell, Cell(cell_name(point.cell)))
            cell.named.add(point.place)
            self._add(point)
        if rule := sweep.config.transfer:
            for curve, values in self.cells:
                target = (curve, tuple({**dict(values), **rule.target}.items()))
                copied = rule.source.items() <= dict(values).items() and target != (curve, values)
                if copied and target in self.cells:
                    self.cells[target].source = self.cells[curve, values]
                    self._targets.setdefault((curve, values), []).append(target)
        for key in self.cells:
            self._advance(key)
        if self._waiting and not self.results:
            cheapest = max(self._waiting, key=lambda item: (item[0], -item[1]))
            self._waiting.remove(cheapest)
            heapq.heapify(self._waiting)
            heapq.heappush(self._waiting, (-math.inf, 0, cheapest[2]))

    def record(self, point: Point, summary: Summary) -> None:
        self._take(point, summary)
        self.cells[point.cell].results[point.place][point.seed] = summary
        self._advance(point.cell)

    def failed_before(self) -> set[str]:
        try:
            rows = read_table(self.table)
            failed = {row["run"] for row in rows if row["status"] == "failed"}
        except (OSError, ValueError, KeyError):
            return set()
        return failed & {point.run for point in self.left}

    def may_add(self) -> tuple[int, float]:
        rule = self.sweep.rule
        groups: dict[CellKey, list[Point]] = {}
        for point in self.points.values() if rule else ():
            groups.setdefault(point.cell, []).append(point)
        count, flops = 0, 0.0
        for key, points in groups.items():
            cell = self.cells[key]
            if rule and not cell.settled:
                seeds = self.sweep.seeds(dict(points[0].values))
                further = len({*rule.seeds} - {*seeds}) * (2 if cell.source else 1)
                more = (rule.points - cell.added) * len(seeds) + further
                count, flops = count + more, flops + more * max(map(self.flops, points))
        return count, flops

    def write(self, final: bool) -> None:
        """The manifest and results.csv, and at the end the tables of what runs logged.

        A run whose seal is broken by then is named, and has no rows in those tables.
        """
        points = list(self.points.values())
        logged = dict(self.results)
        for point in points if final else ():
            if logged.get(point.key, FAILED) is not FAILED:
                folder, again = self.folder / point.run, "the same command trains the run again"
                try:
                    if runs.sealed(folder, point.run):
                        continue
                    problem = f"{folder} is gone; {again}"
                except Damaged as damage:
                    problem = f"{damage}; {again}"
                except RunError as error:  # it says itself what to do
                    problem = str(error)
                self.reasons[point.run], logged[point.key] = problem, FAILED
        tables.write_manifest(self.sweep, points)
        tables.write(self.sweep, points, logged, final)

    def listed(self) -> list[str]:
        """What is to do, one line per run."""
        return [
            f"{cell_name((point.curve, point.values))} seed={point.seed}  {point.run}"
            f"{in_words(self.needs(point))}"
            for point in self.left
        ]

    def _add(self, point: Point) -> None:
        """Takes up a point, and its result if there is one."""
        if point.key in self.points:
            return
        self._enter(point)
        summary = self._recalled(point)
        self.cells[point.cell].results.setdefault(point.place, {})[point.seed] = summary
        if summary is None:
            self.put_back(point, len(self.points))
        else:
            self._take(point, summary)

    def _advance(self, key: CellKey) -> None:
        """Adds what a cell's rule asks for until it waits: results may be there already.

        Values that make no config are noted as refused.
        """
        cell = self.cells[key]
        while not cell.settled:
            answer = self.sweep.rule.next(cell) if self.sweep.rule else DONE
            cell.settled = answer.done
            if answer.note:
                self.notes[cell.name] = answer.note
            for place in answer.places:
                try:
                    points = self.sweep.at(key, place, answer.seeds)
                except UserError as error:
                    if place in cell.results:
                        note = f"{cell.name}: further seeds were not run: {error}"
                        self.notes[f"{cell.name}, seeds"] = note
                    else:
                        cell.refused[place] = str(error)
                    continue
                if answer.seeds is not None:
                    seeds = self.sweep.seeds(dict(points[0].values)) if points else ()
                    cell.further[place] = tuple(s for s in answer.seeds if s not in seeds)
                cell.results.setdefault(place, {})
                for point in points:
                    self._add(point)
            if not answer.places and not answer.done:
                return
        for target in self._targets.get(key, ()):
            self._advance(target)


def cell_name(key: CellKey) -> str:
    """A cell by its curve and its grid values."""
    return " ".join([key[0], *(f"{name}={value}" for name, value in key[1])])


def in_words(needs: Needs) -> str:
    """The GPUs of a run that takes several, as the end of a line."""
    where = f" on {needs.nodes} nodes" if needs.nodes > 1 else ""
    return f"  {needs.gpus} GPUs{where}" if needs.gpus > 1 else ""


def of_other_commits(results: Mapping[str, Summary]) -> list[str]:
    """A line on the results of runs that other code than this has made."""
    ours = environment.commit()
    commits = [r.get("environment", r).get("commit") for r in results.values()]
    others = [commit for commit in commits if commit not in (None, ours)]
    if ours is None or not others:
        return []
    names = list(dict.fromkeys(_short(commit) for commit in others))
    shown = ", ".join(names[:3]) + (", ..." if names[3:] else "")
    return [
        f"runs that are done and were made at another commit than {_short(ours)}: {len(others)} "
        f"(at {shown}); delete a run's folder to train it again"
    ]


def _short(commit: str) -> str:
    """The first figures of a commit, and whether files differ from it."""
    head, plus, changes = commit.partition("+")
    return f"{head[:7]}{plus}{changes}"
