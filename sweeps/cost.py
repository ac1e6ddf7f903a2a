"""Plan before you spend: what a sweep, and what is left of it, costs on a few GPUs.

    python -m sweeps cost nanolm_c4/sweeps/quickstart.yaml [MORE.yaml ...] [key=value ...]
        [--where 'model.width<=256'] [--preset laptop] [--curves NAME ...] [--utilisation 0.4]
        [--gpus 8] [--gpus-per-run 8] [--sharded] [--simulate [--csv FILE]] [--json]

Nothing is trained, built or written. Runs, tokens, FLOPs and the time of one GPU stand per model
size, for the whole sweep and for the runs without a result; memory is that of the largest run of a
size, on each of the GPUs that share it, and a run that does not fit says on how many it would if
its weights and state were sharded. --gpus N adds the time that N GPUs take, and their energy. All
numbers are closed forms, in the experiment's cost.py; --simulate checks them by one step of each
size on fake tensors, and says on how many GPUs of each kind it fits and how it is launched. What
other sweeps have yet to find is assumed, and named. Data that runs would not find here are named at
the end, in a note.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.needs import GPUS, gpus_of, holds, peak_of
from sweeps.progress import columns, duration
from sweeps.rules import FAILED
from sweeps.simulated import CSV_COLUMNS, csv_rows, launches, size_of
from sweeps.simulated import table as step_table
from sweeps.sweep import Work
from sweeps.tables import write_csv
from training.errors import UserError
from training.memory import is_observation

# One core, by its processor time for whole steps with one thread on a cloud server: the smallest
# and largest laptop runs of the four experiments took 0.010 to 0.18 s per step of 0.1 to 11.5
# GFLOP, which this says within a factor of two.
CPU_FLOPS, CPU_STEP = 5e10, 0.01  # FLOP/s, and seconds of a step beside
PARAMETERS = ("embedding", "non_embedding", "total")  # as Everett et al., Table 3, counts them
CPU_MOST = 30 * 86400  # seconds of one core; beyond, nobody asks for it
_TITLES = {"optimizer": "state", "weight_copies": "copies", "total": "peak"}  # of kinds of memory


@dataclass(frozen=True)
class Run:
    """A run of a sweep, or a trial of a search with values in the middle of their ranges."""

    identity: tuple[str, str]
    """Equal for runs that are the same: their experiment, the hash of their config, and the search
    whose constants they will take, where those are not known yet."""
    config: Any
    tokens: int
    flops: float
    left: float
    """The share of its steps still to be taken."""
    begun: bool
    """Whether some of them, and not all, may have been."""


def read(work: Work) -> list[Run]:
    """The runs of a sweep or search, and how far they are."""
    cost, runs = work.experiment, []
    for key, point in work.points.items():
        steps, taken = point.config.training.steps, 0
        has_ended = work.results.get(key, FAILED)["status"] != "failed"
        begun = not has_ended and work.has_begun(point)
        if has_ended:
            taken = steps
        elif begun:
            taken = _saved(work.folder / point.run / "checkpoints")
        name = cost.name, point.run.rpartition("-")[2] + point.unknown
        tokens, flops = steps * cost.tokens_per_step(point.config), work.flops(point)
        runs.append(Run(name, point.config, tokens, flops, 1 - taken / steps, begun))
    return runs


def _saved(checkpoints: Path) -> int:
    """The step of the newest of a run's checkpoints; 0 without one."""
    if not checkpoints.is_dir():
        return 0
    from training import checkpoint  # it imports torch, which few sweeps need here

    saved = checkpoint.paths(checkpoints)
    return int(saved[-1].name.rpartition("-")[2]) if saved else 0


def report(work: Work, runs: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    """The counts of one file as JSON types, by model size from the smallest on, and in all."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.config.model.model_dump_json(), []).append(run)
    models = [group[0].config.model.model_dump() for group in groups.values()]
    varying = [key for key in models[0] if len({str(model[key]) for model in models}) > 1]
    varying = varying or list(models[0])[:1]  # of models that are all the same
    sizes = [_size(group, varying, work, args) for group in groups.values()]
    to_do = [run for run in runs if run.left]
    failed = (f"{run}: {why}" for run, why in work.reasons.items())
    return {
        "file": str(work.asked.path),
        "preset": work.asked.sources.preset,
        "notes": [*work.asked.sources.assumed, *failed],
        "runs": {
            "all": len(runs),
            "done": len(runs) - len(to_do),
            "started": sum(run.begun for run in runs),
            "to_do": len(to_do),
        },
        "sizes": sorted(sizes, key=lambda size: size["parameters"]["total"]),
        **_totals(runs, args),
        "may_add": dict(zip(("runs", "flops"), work.may_add(), strict=True)),
    }


def _totals(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    """Runs, tokens, FLOPs and time of some runs, and of what is to do of them."""
    totals: dict[str, Any] = {}
    for name in ("all", "to_do"):
        parts = [(run, 1.0 if name == "all" else run.left) for run in runs]
        parts = [(run, share) for run, share in parts if share]
        totals[name] = {
            "runs": len(parts),
            "tokens": sum(round(share * run.tokens) for run, share in parts),
            "flops": sum(share * run.flops for run, share in parts),
            "gpu_hours": {},
            "cpu_seconds": sum(
                share * (run.flops / CPU_FLOPS + run.config.training.steps * CPU_STEP)
                for run, share in parts
            ),
        }
    totals["longest_run_hours"], ends = {}, {}
    for gpu in GPUS:
        each = [
            run.flops / (getattr(gpu, run.config.training.precision) * args.utilisation) / 3600
            for run in runs
        ]  # GPU-hours; twice the GPUs take half the time
        hours = sum(run.left * own for run, own in zip(runs, each, strict=True))
        totals["all"]["gpu_hours"][gpu.name] = sum(each)
        totals["to_do"]["gpu_hours"][gpu.name] = hours
        most = max((run.left * own for run, own in zip(runs, each, strict=True)), default=0.0)
        longest = totals["longest_run_hours"][gpu.name] = most / args.gpus_per_run
        if args.gpus:
            ends[gpu.name] = {
                "hours": max(hours / args.gpus, longest),
                "kwh": hours * gpu.watts / 1000,
            }
    return totals | ({"with_gpus": ends} if args.gpus else {})


def _size(
    runs: Sequence[Run], varying: Sequence[str], work: Work, args: argparse.Namespace
) -> dict[str, Any]:
    """One model size: its counts, and the memory of its largest run."""
    cost, how = work.asked.experiment, "shards" if args.sharded else "replicas"
    unlike: dict[str, Any] = {}  # by what memory can depend on
    for config in {id(run.config): run.config for run in runs}.values():
        unlike.setdefault(size_of(config), config)
    memories = []
    for config in unlike.values():
        if config.training.batch_size % args.gpus_per_run:
            raise UserError(
                f"{work.asked.path}: training.batch_size {config.training.batch_size} does not "
                f"divide by {args.gpus_per_run} GPUs; change --gpus-per-run"
            )
        memories.append((config, cost.memory(config, **{how: args.gpus_per_run})))
    config, memory = max(memories, key=lambda item: item[1]["total"])

    peak, batch = peak_of(cost, config), config.training.batch_size
    counts = {gpu.name: gpus_of(peak, batch, gpu.memory) for gpu in GPUS}
    sharded = args.gpus_per_run if args.sharded else None
    simulated = {"simulated": launches(work.asked, config, sharded)} if args.simulate else {}
    return {
        "model": {key: getattr(config.model, key) for key in varying},
        "parameters": cost.parameters(config),
        **_totals(runs, args),
        "largest_run": {
            "optimizer": config.optimizer.name,
            "precision": config.training.precision,
            "observed": bool(getattr(config.training, "observe_every", 0)),
            "peak_of": "observation" if is_observation(memory) else "training_step",
            "memory_bytes": memory,
        },
        "fits": {gpu.name: holds(gpu.memory, memory["total"]) for gpu in GPUS},
        "gpus": counts,
        **simulated,
    }


def text(counts: Mapping[str, Any], args: argparse.Namespace) -> str:
    """One file's report for people."""
    number, sizes = counts["runs"], counts["sizes"]
    preset = f" (preset {counts['preset']})" if counts["preset"] else ""
    names = [" ".join(f"{key} {value}" for key, value in size["model"].items()) for size in sizes]
    rows = [
        (
            name,
            *(f"{size['parameters'][kind]:,}" for kind in PARAMETERS),
            size["all"],
            size["to_do"]["runs"],
        )
        for name, size in zip(names, sizes, strict=True)
    ]
    rows += [
        (title, "", "", "", counts[key], number["to_do"])
        for title, key in (("all", "all"), ("to do", "to_do"))
    ]
    lines = [
        f"{counts['file']}{preset}: {number['all']} runs, {number['done']} done, "
        f"{number['started']} started, {number['to_do']} to do",
        *(f"assumed or not counted: {note}" for note in counts["notes"]),
        "",
        _work_table(("model", "embedding", "non-embedding", "parameters"), rows),
    ]
    if more := counts["may_add"]["runs"]:
        flops = _short(counts["may_add"]["flops"])
        lines.append(f"results may ask for up to {more} more runs, {flops} FLOPs")
    lines += _ends(counts, args)
    lines += ["", f"GB per GPU, the largest run of each size ({_how(args)}):"]
    used = [size["largest_run"]["memory_bytes"] for size in sizes]
    shown = dict.fromkeys(part for parts in used for part in parts if parts[part])
    titles = (_TITLES.get(part, part.replace("_", " ")) for part in shown)
    memory = [("model", "run", *titles, *(gpu.name for gpu in GPUS))]
    for name, size in zip(names, sizes, strict=True):
        run = size["largest_run"]
        parts = (f"{run['memory_bytes'].get(part, 0) / 1e9:.3g}" for part in shown)
        fits = (_fit(size, gpu.name) for gpu in GPUS)
        memory.append((name, f"{run['optimizer']} {run['precision']}", *parts, *fits))
    lines.append(columns(memory))
    large = [
        name
        for name, size in zip(names, sizes, strict=True)
        if size["largest_run"]["peak_of"] == "observation"
    ]
    if large:
        lines.append(
            f"the peak is an observation's, not a training step's, at {', '.join(large)}: fewer "
            "training.observe_samples lower it"
        )
    if args.simulate:
        steps = [(name, size["simulated"]) for name, size in zip(names, sizes, strict=True)]
        how = f", {_how(args)}" if args.sharded else ""
        lines += ["", f"simulated, the largest run of each size{how}:", step_table(steps)]
    if args.sharded and any(size["largest_run"]["observed"] for size in sizes):
        lines.append("a sharded run cannot be observed: planned without training.observe_every")
    return "\n".join(lines)


def _work_table(titles: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """Rows of titles, a total and a number of runs to do; the time of a core if it can be meant."""
    with_cpu = all(row[-2]["cpu_seconds"] < CPU_MOST for row in rows)
    devices = [*(f"1 {gpu.name}" for gpu in GPUS), *(["1 CPU core"] if with_cpu else [])]
    table = [(*titles, "runs", "to do", "tokens", "FLOPs", *devices)]
    for *names, total, to_do in rows:
        seconds = [3600 * hours for hours in total["gpu_hours"].values()]
        seconds += [total["cpu_seconds"]] if with_cpu else []
        numbers = _short(total["tokens"]), _short(total["flops"])
        table.append((*names, str(total["runs"]), str(to_do), *numbers, *map(duration, seconds)))
    return columns(table)


def _short(number: float) -> str:
    return f"{number:.3g}" if number >= 1e5 else f"{number:,.0f}"


def _how(args: argparse.Namespace) -> str:
    """How runs use GPUs, in words."""
    if args.gpus_per_run == 1:
        return "one GPU per run"
    kind = "sharded, FSDP2" if args.sharded else "replicated, DDP"
    return f"{args.gpus_per_run} GPUs per run, {kind}"


def _ends(counts: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """When it can be over at the earliest, and its energy."""
    if not counts["to_do"]["runs"]:
        return []
    hours = counts["longest_run_hours"]
    each = ", ".join(f"{duration(3600 * hours[gpu.name])} on {gpu.name}" for gpu in GPUS)
    lines = [f"the longest run to do: {each} ({_how(args)})"]
    if args.gpus:
        ends = (
            f"{duration(3600 * found['hours'])} and {found['kwh']:.3g} kWh on {name}"
            for name, found in counts["with_gpus"].items()
        )
        lines.append(f"with {args.gpus} GPUs, at least: {', '.join(ends)}")
    return lines


def _fit(size: Mapping[str, Any], gpu: str) -> str:
    """Whether a run fits, and else on how many GPUs it does when sharded."""
    if size["fits"][gpu]:
        return "fits"
    needed = size["gpus"][gpu]
    if not needed:
        return "DOES NOT FIT on any number"
    unobserved = ", unobserved" if size["largest_run"]["observed"] else ""
    return f"DOES NOT FIT ({needed:g} sharded do{unobserved})"


def assumptions(args: argparse.Namespace) -> list[str]:
    """What every number rests on."""
    peaks = "; ".join(
        f"{gpu.name} {gpu.bf16 / 1e12:g} TFLOP/s bf16, {gpu.fp32 / 1e12:g} fp32, "
        f"{gpu.memory / 1e9:g} GB, {gpu.watts:g} W ({gpu.source})"
        for gpu in GPUS
    )
    energy = (
        "With --gpus: GPUs always busy, or as long as the longest run; energy is GPU-hours at the "
        "GPU's rated power, without processors, memory, network, cooling and idle time."
    )
    simulation = (
        "Simulated is a step on one GPU, or sharded over several (FSDP2). Shards of which every "
        "node has all (HSDP) take on each GPU what those of one node take; whole models on several "
        "GPUs (DDP, --gpus-per-run) are counted in closed forms alone."
    )
    return [
        "FLOPs: 6 per weight of a matrix and token, and attention; evaluation, probes and "
        f"observations are not counted. Time of a GPU: at {100 * args.utilisation:g} % of the "
        "dense peak of each run's precision (fp32 without TF32). Time of a CPU core: "
        f"{CPU_FLOPS / 1e9:g} GFLOP/s and {1000 * CPU_STEP:g} ms per step, measured on one core of "
        "a cloud server; yours may take half or twice as long.",
        "Memory: GB are 1e9 bytes; closed forms of what eager training and its observations hold "
        "(torch.compile holds less), not measured on these GPUs. A run fits if its peak, a tenth "
        "more and 1 GB are below the GPU's nominal memory, as engines count. A sharded run "
        "recomputes its blocks' activations, a third more work, which FLOPs and times leave out: "
        "give a lower utilisation for it.",
        f"GPUs: {peaks}.",
        *([energy] if args.gpus else []),
        *([simulation] if args.simulate else []),
    ]


def add_arguments(add: Any) -> None:
    """The options of the command besides those that say which sweep is meant."""
    add("--utilisation", type=float, default=0.4, help="share of the GPU's peak (default 0.4)")
    add("--gpus", type=int, metavar="N", help="GPUs there are: adds time and energy")
    add("--gpus-per-run", type=int, default=1, metavar="N", help="GPUs of one run (default 1)")
    add("--sharded", action="store_true", help="weights and state divided over them (FSDP2)")
    add(
        "--simulate",
        action="store_true",
        help="one step of each size on fake tensors: GPUs that "
        "it needs, its memory and FLOPs beside the closed forms, its launch command",
    )
    add("--csv", type=Path, metavar="FILE", help="with --simulate: its table as a file")
    add("--json", action="store_true", help="all of it as JSON")


def run(args: argparse.Namespace, opened: Callable[[], Sequence[Work]]) -> None:
    """Prints what sweeps cost, and a note where data are not here; UserError for a mistake."""
    if args.gpus_per_run < 1:
        raise UserError(f"--gpus-per-run {args.gpus_per_run}: expected at least 1")
    if not 0 < args.utilisation <= 1:
        raise UserError(
            f"--utilisation {args.utilisation}: expected a share of the peak, such as 0.4"
        )
    if args.sharded and args.gpus_per_run == 1:
        raise UserError("--sharded divides a run over GPUs; say over how many: --gpus-per-run")
    if args.gpus is not None and args.gpus < args.gpus_per_run:
        raise UserError(f"--gpus {args.gpus}: a run alone takes {args.gpus_per_run}")
    if args.csv and not args.simulate:
        raise UserError("--csv holds the simulated table: give --simulate, too")
    files = [(work, read(work)) for work in opened()]
    counts, total = [report(work, runs, args) for work, runs in files], None
    if len(files) > 1:
        # A run that several files have is trained once, as sweeps share their results. One that is
        # done in one sweep only was made at another commit, and is still to do.
        every = sorted((run for _, runs in files for run in runs), key=lambda run: run.left)
        total = _totals(list({run.identity: run for run in every}.values()), args)
    if args.csv:
        write_csv(args.csv, CSV_COLUMNS, csv_rows(counts))
    if args.json:
        content = {"files": counts, "together": total, "assumptions": assumptions(args)}
        print(json.dumps(content, indent=1))
    else:
        tables = [text(count, args) for count in counts]
        if total:
            left = total["to_do"]["runs"]
            rows = [("all", total["all"], left), ("to do", total["to_do"], left)]
            table = _work_table(["all files, each run once"], rows)
            tables.append("\n".join([table, *_ends(total, args)]))
        footnotes = [textwrap.fill(line, 100) for line in assumptions(args)]
        print("\n\n".join([*tables, "\n".join(footnotes)]), flush=True)
    for work, runs in files:
        try:
            work.asked.refuse_missing_data(run.config for run in runs if run.left)
        except UserError as error:  # a plan is made before its data are there
            print(f"note: {error}", file=sys.stderr)
