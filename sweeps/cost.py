"""Plan before you spend: what a sweep, and what is left of it, costs on a few GPUs.

    python -m sweeps cost nanolm_c4/sweeps/quickstart.yaml [MORE.yaml ...] [--preset laptop]
        [--curves NAME ...] [--utilisation 0.4] [--gpus-per-run 8] [--sharded] [--json]

Nothing is trained, built or written. Runs, tokens, FLOPs and GPU-hours stand per model size, for
the whole sweep and for the runs without a result; memory is that of the largest run of a size, on
each of the GPUs that share it, and a run that does not fit says on how many it would if its weights
and state were sharded. All numbers are closed forms, in the experiment's cost.py; what other sweeps
have yet to find is assumed, and named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from sweeps.needs import GPUS, Gpu
from sweeps.progress import columns
from sweeps.reuse import Store
from sweeps.sources import read_file
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from training import runs
from training.config import Section, apply_preset
from training.errors import UserError, one_line_errors
from training.memory import is_observation

COST_FUNCTIONS = ("flops", "parameters", "tokens_per_step", "memory")


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
    cost: ModuleType
    points: list[Any]
    left: dict[str, float]
    started: int
    notes: list[str] = field(default_factory=list)
    may_add: dict[str, float] = field(default_factory=lambda: {"runs": 0, "flops": 0.0})


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
    cost = _cost(file, sweep.config.experiment)
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
    cost, storage = _cost(file, found.config.experiment), Storage(found.folder)
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


def _cost(file: Path, experiment: str) -> ModuleType:
    """The experiment's closed forms."""
    try:
        module = importlib.import_module(f"{experiment}.cost")
    except ModuleNotFoundError as error:
        if error.name not in (experiment, f"{experiment}.cost"):
            raise
        module = None
    missing = [name for name in COST_FUNCTIONS if not hasattr(module, name)]
    if missing:
        raise UserError(
            f"{file}: planning needs {experiment}/cost.py with {', '.join(COST_FUNCTIONS)}; "
            f"it lacks {', '.join(missing)}"
        )
    return module


def _work(
    file: Path,
    preset: str | None,
    cost: ModuleType,
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


def _may_add(found: SweepWork, cost: ModuleType) -> dict[str, float]:
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


# ------------------------------------------------------------------------------------------------
# Counting


def report(work: Work, setting: Setting) -> dict[str, Any]:
    """The counts of one file as JSON types, by model size from the smallest on, and in all."""
    groups: dict[str, list[Any]] = {}
    for point in work.points:
        key = json.dumps(point.config.model.model_dump(mode="json"), sort_keys=True)
        groups.setdefault(key, []).append(point)
    varying = _varying([point.config.model for point in work.points])
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
        "all": _sum(work, work.points, setting, lambda point: 1.0),
        "to_do": _sum(work, to_do, setting, lambda point: work.left[point.run]),
        "may_add": work.may_add,
        "longest_run_hours": _longest(work, to_do, setting),
    }


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
    to_do = [point for point in points if work.left[point.run]]
    needs = [_memory(point.config, work, setting) for point in _unlike(points)]
    config, memory = max(needs, key=lambda need: need[1]["total"])
    return {
        "model": {key: getattr(model, key) for key in varying},
        "parameters": work.cost.parameters(config),
        "all": _sum(work, points, setting, lambda point: 1.0),
        "to_do": _sum(work, to_do, setting, lambda point: work.left[point.run]),
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

    return list({key(point): point for point in points}.values())


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


def _gpus_needed(config: Any, cost: ModuleType, gpu: Gpu) -> int | None:
    """The smallest power of two over which a run can be sharded to fit; None if there is none."""
    count, batch = 1, config.training.batch_size
    while batch % count == 0:
        if cost.memory(config, shards=count)["total"] <= gpu.memory:
            return count
        count *= 2
    return None


def _sum(
    work: Work, points: Iterable[Any], setting: Setting, share: Callable[[Any], float]
) -> dict[str, Any]:
    """Runs, tokens, FLOPs and GPU-hours of some points, of each only its `share`."""
    total: dict[str, Any] = {"runs": 0, "tokens": 0, "flops": 0.0}
    hours = dict.fromkeys((gpu.name for gpu in GPUS), 0.0)
    for point in points:
        config, part = point.config, share(point)
        total["runs"] += 1
        total["tokens"] += round(part * config.training.steps * work.cost.tokens_per_step(config))
        flops = part * work.cost.flops(config)
        total["flops"] += flops
        for gpu in GPUS:
            hours[gpu.name] += setting.hours(flops, config.training.precision, gpu)
    return {**total, "gpu_hours": hours}


def _longest(work: Work, points: Sequence[Any], setting: Setting) -> dict[str, float]:
    """Hours that the longest run to do takes on its GPUs; nothing ends before."""
    return {
        gpu.name: max(
            (
                work.left[point.run]
                * setting.hours(work.cost.flops(point.config), point.config.training.precision, gpu)
                / setting.gpus_per_run
                for point in points
            ),
            default=0.0,
        )
        for gpu in GPUS
    }


def together(works: Sequence[Work], setting: Setting) -> dict[str, Any]:
    """All files at once; a run that several have is trained once, as sweeps share their results.

    One that is done in one sweep only was made at another commit, and is still to do.
    """
    first: dict[tuple[str, str], tuple[Work, Any]] = {}
    for work in works:
        for point in work.points:
            key = (work.cost.__name__, _identity(point))
            if key not in first or work.left[point.run] > first[key][0].left[first[key][1].run]:
                first[key] = work, point
    sums = {"all": [], "to_do": []}
    for work, point in first.values():
        sums["all"].append(_sum(work, [point], setting, lambda p: 1.0))
        if part := work.left[point.run]:
            sums["to_do"].append(_sum(work, [point], setting, lambda p, part=part: part))
    return {name: _added(parts) for name, parts in sums.items()}


def _identity(point: Any) -> str:
    """Equal for points whose runs are the same."""
    if isinstance(point, Trial):
        return point.run
    return json.dumps(runs.identity(point.config), sort_keys=True)


def _added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    hours = {gpu.name: sum(part["gpu_hours"][gpu.name] for part in parts) for gpu in GPUS}
    total = {key: sum(part[key] for part in parts) for key in ("runs", "tokens", "flops")}
    return {**total, "gpu_hours": hours}


def assumptions(setting: Setting) -> list[str]:
    """What every number rests on."""
    peaks = "; ".join(
        f"{gpu.name} {gpu.bf16 / 1e12:g} TFLOP/s bf16, {gpu.fp32 / 1e12:g} fp32, "
        f"{gpu.memory / 1e9:g} GB ({gpu.source})"
        for gpu in GPUS
    )
    return [
        "FLOPs: 6 per weight of a matrix and token, and attention; evaluation, probes and "
        f"observations are not counted. GPU-hours: at {100 * setting.utilisation:g} % of the dense "
        "peak of each run's precision (fp32 without TF32).",
        "Memory: GB are 1e9 bytes; closed forms of what eager training and its observations hold "
        "(torch.compile holds less), not measured on these GPUs. A run fits if its peak is below "
        "the GPU's nominal memory. A sharded run recomputes its blocks' activations, a third more "
        "work, which FLOPs and GPU-hours leave out: give a lower utilisation for it.",
        f"GPUs: {peaks}.",
    ]


# ------------------------------------------------------------------------------------------------
# Printing

_HOURS = tuple(f"{gpu.name} h" for gpu in GPUS)
_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "state",
    "weight_copies": "copies",
    "activations": "activations",
    "loss": "loss",
    "communication": "communication",
    "update": "update",
    "observation": "observation",
    "total": "peak",
}


def text(counts: Mapping[str, Any], setting: Setting) -> str:
    """One file's report for people."""
    number = counts["runs"]
    preset = f" (preset {counts['preset']})" if counts["preset"] else ""
    lines = [
        f"{counts['file']}{preset}: {number['all']} runs, {number['done']} done, "
        f"{number['started']} started, {number['to_do']} to do",
        *(f"assumed or not counted: {note}" for note in counts["notes"]),
        "",
        _work_table(counts),
        *_additions(counts, setting),
        "",
        _memory_title(setting),
        _memory_table(counts),
        *_observed(counts, setting),
    ]
    return "\n".join(lines)


def _work_table(counts: Mapping[str, Any]) -> str:
    rows = [("model", "parameters", "runs", "to do", "tokens", "FLOPs", *_HOURS)]
    for size in counts["sizes"]:
        parameters = f"{size['parameters']['total']:,}"
        rows.append((_model(size), parameters, *_cells(size["all"], size["to_do"]["runs"])))
    rows.append(("all", "", *_cells(counts["all"], counts["to_do"]["runs"])))
    rows.append(("to do", "", *_cells(counts["to_do"], counts["to_do"]["runs"])))
    return columns(rows)


def _cells(total: Mapping[str, Any], to_do: int) -> tuple[str, ...]:
    hours = (f"{total['gpu_hours'][gpu.name]:.3g}" for gpu in GPUS)
    return str(total["runs"]), str(to_do), _short(total["tokens"]), _short(total["flops"]), *hours


def _short(number: float) -> str:
    return f"{number:.3g}" if number >= 1e5 else f"{number:,.0f}"


def _model(size: Mapping[str, Any]) -> str:
    return " ".join(f"{key} {value}" for key, value in size["model"].items())


def _additions(counts: Mapping[str, Any], setting: Setting) -> list[str]:
    """Lines on what may come on top, and on how long it takes at least."""
    lines = []
    if more := counts["may_add"]["runs"]:
        flops = _short(counts["may_add"]["flops"])
        lines.append(f"results may ask for up to {more} more runs, {flops} FLOPs")
    hours = counts["longest_run_hours"]
    if counts["to_do"]["runs"]:
        each = ", ".join(f"{hours[gpu.name]:.3g} h on {gpu.name}" for gpu in GPUS)
        lines.append(f"the longest run to do: {each} ({_how(setting)})")
    return lines


def _how(setting: Setting) -> str:
    if setting.gpus_per_run == 1:
        return "one GPU per run"
    kind = "sharded, FSDP2" if setting.sharded else "replicated, DDP"
    return f"{setting.gpus_per_run} GPUs per run, {kind}"


def _memory_title(setting: Setting) -> str:
    return f"GB per GPU, the largest run of each size ({_how(setting)}):"


def _memory_table(counts: Mapping[str, Any]) -> str:
    names = [gpu.name for gpu in GPUS]
    shown = [
        part
        for part in _PARTS
        if any(size["largest_run"]["memory_bytes"].get(part) for size in counts["sizes"])
    ]
    rows = [("model", "run", *(_PARTS[part] for part in shown), *names)]
    for size in counts["sizes"]:
        run = size["largest_run"]
        sizes = (f"{run['memory_bytes'].get(part, 0) / 1e9:.3g}" for part in shown)
        fits = (_fit(size, name) for name in names)
        rows.append((_model(size), f"{run['optimizer']} {run['precision']}", *sizes, *fits))
    return columns(rows)


def _fit(size: Mapping[str, Any], gpu: str) -> str:
    """Whether a run fits, and else on how many GPUs it does when sharded."""
    if size["fits"][gpu]:
        return "fits"
    needed = size["gpus_when_sharded"][gpu]
    if not needed:
        return "DOES NOT FIT on any number"
    unobserved = ", unobserved" if size["largest_run"]["observed"] else ""
    return f"DOES NOT FIT ({needed} sharded do{unobserved})"


def _observed(counts: Mapping[str, Any], setting: Setting) -> list[str]:
    """Lines on runs that need the more memory for being observed, or cannot be."""
    runs_of = {_model(size): size["largest_run"] for size in counts["sizes"]}
    lines = []
    if large := [name for name, run in runs_of.items() if run["peak_of"] == "observation"]:
        lines.append(
            f"the peak is an observation's, not a training step's, at {', '.join(large)}: fewer "
            "training.observe_samples lower it"
        )
    if setting.sharded and any(run["observed"] for run in runs_of.values()):
        lines.append("a sharded run cannot be observed: planned without training.observe_every")
    return lines


def _total_text(total: Mapping[str, Any]) -> str:
    left = total["to_do"]["runs"]
    rows = [("all files, each run once", "runs", "to do", "tokens", "FLOPs", *_HOURS)]
    names = {"all": "all", "to_do": "to do"}
    return columns(rows + [(name, *_cells(total[key], left)) for key, name in names.items()])


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, or 2 for a user's mistake (one line)."""
    args = _parser().parse_args(argv)
    with one_line_errors(OSError):
        setting = Setting(args.gpus_per_run, args.sharded, args.utilisation)
        setting.check()
        works = [
            read(file, preset=args.preset, curves=args.curves, results=args.results)
            for file in args.sweep
        ]
        counts = [report(work, setting) for work in works]
        total = together(works, setting) if len(works) > 1 else None
        if args.json:
            content = {"files": counts, "together": total, "assumptions": assumptions(setting)}
            print(json.dumps(content, indent=1))
            return
        tables = [text(count, setting) for count in counts]
        tables += [_total_text(total)] if total else []
        footnotes = [textwrap.fill(line, 100) for line in assumptions(setting)]
        print("\n\n".join([*tables, "\n".join(footnotes)]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sweeps cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweep", type=Path, nargs="+", help="YAML files of sweeps, for example nanolm_c4/sweeps/*")
    add("--preset", help="another size of the sweep that its file holds")
    add("--curves", nargs="+", metavar="NAME", help="only these curves")
    add("--utilisation", type=float, default=0.4, help="share of the GPU's peak (default 0.4)")
    add("--gpus-per-run", type=int, default=1, metavar="N", help="GPUs of one run (default 1)")
    add("--sharded", action="store_true", help="weights and state divided over them (FSDP2)")
    add("--results", type=Path, default=runs.RESULTS, help="results folder")
    add("--json", action="store_true", help="all of it as JSON")
    return parser


if __name__ == "__main__":
    main()
