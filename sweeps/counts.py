"""Counts of a sweep and of what is left of it: runs, tokens, FLOPs, GPU-hours and memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.needs import GPUS, Gpu
from sweeps.reuse import Store
from sweeps.sources import read_file
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from training import runs
from training.config import Section, apply_preset
from training.errors import UserError
from training.experiment import Experiment
from training.memory import is_observation


@dataclass(frozen=True)
class Setting:
    """How runs use GPUs: how many each, sharded or repeated, at which share of the peak."""

    gpus_per_run: int = 1
    sharded: bool = False
    utilisation: float = 0.4

    def check(self) -> None:
        """Raises UserError for a number that means nothing."""
        if self.gpus_per_run < 1:
            raise UserError(f"--gpus-per-run {self.gpus_per_run}: expected at least 1")
        if not 0 < self.utilisation <= 1:
            raise UserError(
                f"--utilisation {self.utilisation}: expected a share of the peak, such as 0.4"
            )
        if self.sharded and self.gpus_per_run == 1:
            raise UserError("--sharded divides a run over GPUs; say over how many: --gpus-per-run")

    def hours(self, flops: float, precision: str, gpu: Gpu) -> float:
        """GPU-hours of some FLOPs; twice the GPUs take half the time."""
        return flops / (getattr(gpu, precision) * self.utilisation) / 3600


@dataclass(frozen=True)
class Trial:
    """A run of a search, with values in the middle of their ranges."""

    run: str
    config: Any


@dataclass
class Work:
    """The runs of one file: `left` maps a run to the share of its steps still to be taken."""

    file: Path
    preset: str | None
    cost: Experiment
    points: list[Any]
    left: dict[str, float]
    started: int
    notes: list[str] = field(default_factory=list)
    may_add: dict[str, float] = field(default_factory=lambda: {"runs": 0, "flops": 0.0})
    _counts: dict[int, tuple[float, float]] = field(default_factory=dict)

    def counts(self, config: Any) -> tuple[float, float]:
        """Tokens and FLOPs of a whole run; the trials of a study share a config."""
        if id(config) not in self._counts:
            tokens = config.training.steps * self.cost.tokens_per_step(config)
            self._counts[id(config)] = tokens, self.cost.flops(config)
        return self._counts[id(config)]


def read(
    file: Path,
    *,
    preset: str | None = None,
    curves: Sequence[str] | None = None,
    results: Path = runs.RESULTS,
) -> Work:
    """The runs of a sweep or search file, and how far they are; UserError as for running it."""
    if "search" in apply_preset(read_file(file), preset, str(file)):
        if curves:
            raise UserError(f"{file}: a search has no curves; leave out --curves")
        return _read_search(file, preset, results)
    sweep = load_sweep(file, results, preset=preset, curves=curves, draft=True)
    cost = sweep.experiment
    found = SweepWork(sweep, Store(sweep.folder, looks=True).recall)
    done = [run for run, summary in found.results.items() if summary["status"] != "failed"]
    points = list(found.points.values())
    work = _work(file, preset, cost, points, sweep.folder, done)
    work.notes += [*sweep.sources.assumed, *(f"{run}: {why}" for run, why in found.reasons.items())]
    work.may_add = _may_add(found, cost)
    return work


def _read_search(file: Path, preset: str | None, results: Path) -> Work:
    """The trials of a search's rounds; those of a study cost the same, whatever they try."""
    from sweeps.search_file import load_search
    from sweeps.storage import Storage

    found = load_search(file, results, preset, draft=True)
    cost, storage = found.experiment, Storage(found.folder)
    work = Work(file, preset, cost, [], {}, 0, list(found.sources.assumed))
    for study in found.studies:
        config, _ = found.run(study, found.middle)
        rounds = found.config.rounds_of(study, storage.trials)
        for played in rounds:
            trials = [Trial(f"{played.key} {i}", config) for i in range(played.wanted)]
            work.points += trials
            done = len(played.counted)
            work.left |= {trial.run: float(i >= done) for i, trial in enumerate(trials)}
            work.started += len(played.running)
        if not rounds[-1].is_complete:
            later = (found.config.rounds - len(rounds)) * found.config.trials
            work.may_add["runs"] += later
            work.may_add["flops"] += later * cost.flops(config)
    return work


def _work(
    file: Path,
    preset: str | None,
    cost: Experiment,
    points: list[Any],
    folder: Path,
    done: Iterable[str],
) -> Work:
    left = {point.run: 1.0 for point in points} | dict.fromkeys(done, 0.0)
    started = 0
    for point in points:
        if left[point.run]:
            taken = _steps_taken(folder / point.run)
            started += taken is not None
            left[point.run] = 1 - (taken or 0) / point.config.training.steps
    return Work(file, preset, cost, points, left, started)


def _steps_taken(run_dir: Path) -> int | None:
    """Steps that a run would not take again; None if it has never begun."""
    if not (run_dir / "metrics.jsonl").exists():
        return None
    from training import checkpoint  # it imports torch, which only a sweep under way needs

    saved = checkpoint.paths(run_dir / "checkpoints")
    return int(saved[-1].name.rpartition("-")[2]) if saved else 0


def _may_add(found: SweepWork, cost: Experiment) -> dict[str, float]:
    """The most that `extend` or `confirm` can still add, in cells that are not complete."""
    config = found.sweep.config
    rule = config.extend or config.confirm
    most: dict[str, float] = {"runs": 0, "flops": 0.0}
    largest: dict[Any, float] = {}
    seeds: dict[Any, list[int]] = {}
    for point in found.points.values():
        key = point.cell(config.searched)
        largest[key] = max(largest.get(key, 0.0), cost.flops(point.config))
        seeds.setdefault(key, found.sweep.seeds(dict(point.values)))
    for key, cell in found.cells.items() if rule else ():
        if not cell.settled:
            further = set(config.confirm.seeds if config.confirm else ()) - set(seeds[key])
            count = (rule.points - cell.added) * len(seeds[key]) + len(further)
            most["runs"] += count
            most["flops"] += count * largest[key]
    return most


def report(work: Work, setting: Setting) -> dict[str, Any]:
    """The counts of one file as JSON types, by model size from the smallest on, and in all."""
    groups: dict[str, list[Any]] = {}
    for points in _same_config(work.points):
        key = json.dumps(points[0].config.model.model_dump(mode="json"), sort_keys=True)
        groups.setdefault(key, []).extend(points)
    varying = _varying([points[0].config.model for points in groups.values()])
    sizes = [_size(points, varying, work, setting) for points in groups.values()]
    to_do = [point for point in work.points if work.left[point.run]]
    return {
        "file": str(work.file),
        "preset": work.preset,
        "notes": work.notes,
        "runs": {
            "all": len(work.points),
            "done": len(work.points) - len(to_do),
            "started": work.started,
            "to_do": len(to_do),
        },
        "sizes": sorted(sizes, key=lambda size: size["parameters"]["total"]),
        "all": _sum(_whole(work, work.points), setting),
        "to_do": _sum(_left(work, work.points), setting),
        "may_add": work.may_add,
        "longest_run_hours": _longest(work, setting),
    }


def _same_config(points: Iterable[Any]) -> list[list[Any]]:
    """Points by their config: the trials of a study share one, thousands of them."""
    groups: dict[int, list[Any]] = {}
    for point in points:
        groups.setdefault(id(point.config), []).append(point)
    return list(groups.values())


def _varying(models: Sequence[Section]) -> list[str]:
    """The keys in which models differ; the first one if they are all the same."""
    dumps = [model.model_dump() for model in models]
    keys = [key for key in dumps[0] if len({str(dump[key]) for dump in dumps}) > 1]
    return keys or list(dumps[0])[:1]


def _size(
    points: Sequence[Any], varying: Sequence[str], work: Work, setting: Setting
) -> dict[str, Any]:
    """One model size: its counts, and the memory of its largest run."""
    model = points[0].config.model
    needs = [_memory(point.config, work, setting) for point in _unlike(points)]
    config, memory = max(needs, key=lambda need: need[1]["total"])
    return {
        "model": {key: getattr(model, key) for key in varying},
        "parameters": work.cost.parameters(config),
        "all": _sum(_whole(work, points), setting),
        "to_do": _sum(_left(work, points), setting),
        "largest_run": {
            "optimizer": config.optimizer.name,
            "precision": config.training.precision,
            "observed": bool(getattr(config.training, "observe_every", 0)),
            "peak_of": "observation" if is_observation(memory) else "training_step",
            "memory_bytes": memory,
        },
        "fits": {gpu.name: memory["total"] <= gpu.memory for gpu in GPUS},
        "gpus_when_sharded": {gpu.name: _gpus_needed(config, work.cost, gpu) for gpu in GPUS},
    }


def _unlike(points: Sequence[Any]) -> list[Any]:
    """One point for each set of what memory can depend on: not the rates, the seed, the length."""

    def key(point: Any) -> str:
        config = point.config.model_dump(mode="json")
        config["optimizer"] = config["optimizer"]["name"]
        config["training"]["steps"] = config["schedule"] = config["seed"] = None
        return json.dumps(config, sort_keys=True)

    unlike = (group[0] for group in _same_config(points))
    return list({key(point): point for point in unlike}.values())


def _memory(config: Any, work: Work, setting: Setting) -> tuple[Any, dict[str, int]]:
    """A config and the bytes it needs on each of its GPUs."""
    batch = config.training.batch_size
    if batch % setting.gpus_per_run:
        raise UserError(
            f"{work.file}: training.batch_size {batch} does not divide by "
            f"{setting.gpus_per_run} GPUs; change --gpus-per-run"
        )
    how = "shards" if setting.sharded else "replicas"
    return config, work.cost.memory(config, **{how: setting.gpus_per_run})


def _gpus_needed(config: Any, cost: Experiment, gpu: Gpu) -> int | None:
    """The smallest power of two over which a run can be sharded to fit; None if there is none."""
    count, batch = 1, config.training.batch_size
    while batch % count == 0:
        if cost.memory(config, shards=count)["total"] <= gpu.memory:
            return count
        count *= 2
    return None


Part = tuple[Work, Any, float]  # a point of a file's work, and the share of it that is meant


def _whole(work: Work, points: Iterable[Any]) -> list[Part]:
    return [(work, point, 1.0) for point in points]


def _left(work: Work, points: Iterable[Any]) -> list[Part]:
    return [(work, point, work.left[point.run]) for point in points if work.left[point.run]]


def _sum(parts: Iterable[Part], setting: Setting) -> dict[str, Any]:
    """Runs, tokens, FLOPs and GPU-hours of some points."""
    runs, tokens, flops = 0, 0, dict.fromkeys(("bf16", "fp32"), 0.0)
    for work, point, share in parts:
        each, total = work.counts(point.config)
        runs += 1
        tokens += round(share * each)
        flops[point.config.training.precision] += share * total
    hours = {
        gpu.name: sum(setting.hours(part, precision, gpu) for precision, part in flops.items())
        for gpu in GPUS
    }
    return {"runs": runs, "tokens": tokens, "flops": sum(flops.values()), "gpu_hours": hours}


def _longest(work: Work, setting: Setting) -> dict[str, float]:
    """Hours that the longest run to do takes on its GPUs; nothing ends before."""
    longest = dict.fromkeys((gpu.name for gpu in GPUS), 0.0)
    for _, point, share in _left(work, work.points):
        flops = share * work.counts(point.config)[1] / setting.gpus_per_run
        for gpu in GPUS:
            hours = setting.hours(flops, point.config.training.precision, gpu)
            longest[gpu.name] = max(longest[gpu.name], hours)
    return longest


def together(works: Sequence[Work], setting: Setting) -> dict[str, Any]:
    """All files at once; a run that several have is trained once, as sweeps share their results.

    One that is done in one sweep only was made at another commit, and is still to do.
    """
    most: dict[tuple[str, str], Part] = {}
    for work in works:
        for point in work.points:
            key, left = (work.cost.name, _identity(point)), work.left[point.run]
            if key not in most or left > most[key][2]:
                most[key] = work, point, left
    whole = [(work, point, 1.0) for work, point, _ in most.values()]
    to_do = [part for part in most.values() if part[2]]
    return {"all": _sum(whole, setting), "to_do": _sum(to_do, setting)}


def _identity(point: Any) -> str:
    """Equal for points whose runs are the same: a run's name ends with a hash of its config."""
    return point.run if isinstance(point, Trial) else point.run.rpartition("-")[2]
