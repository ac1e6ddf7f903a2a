"""What sweeps cost, and what is left of them: runs, tokens, FLOPs, GPU-hours, before any is spent.

    python -m sweeps cost nanolm_c4/sweeps/quickstart.yaml [MORE.yaml ...] [key=value ...]
        [--where 'model.width<=256'] [--preset laptop] [--curves NAME ...] [--card A100]
        [--simulate] [--csv FILE] [--json]

Nothing is trained, and only --csv writes. Parameters are those of the plan on the meta device, per
model size; FLOPs for the whole sweep and for the runs without a result. --simulate measures the
memory of a step of each size on fake tensors, on as many GPUs as the file gives it, and says which
cards hold it, in seconds per size. What other sweeps have yet to find is assumed, and named.
"""

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.pool import CARDS
from sweeps.progress import columns, duration, say
from sweeps.rules import FAILED
from sweeps.sweep import Work
from sweeps.tables import write_csv
from training.experiment import Experiment
from training.settings import RunConfig

UTILISATION = 0.4
PARAMETERS = ("embedding", "non_embedding", "total")  # as Everett et al., Table 3, counts them
# Beside what a step takes: the allocator's gaps and kernels' scratch; a process's CUDA context.
MARGIN, CONTEXT = 1.1, 1e9


@dataclass(frozen=True)
class Counted:
    """A run of a sweep, or a trial of a search with values in the middle of their ranges."""

    config: Any
    gpus: int
    tokens: int
    flops: float
    done: bool


def read(work: Work) -> list[Counted]:
    """The runs of a sweep or search."""
    experiment = work.experiment
    return [
        Counted(
            point.config,
            work.needs(point).gpus,
            point.config.training.steps * experiment.tokens_per_step(point.config),
            work.flops(point),
            work.results.get(key, FAILED)["status"] != "failed",
        )
        for key, point in work.points.items()
    ]


def report(work: Work, runs: Sequence[Counted], simulates: bool) -> dict[str, Any]:
    """The counts of one file as JSON types, by model size from the smallest on, and in all."""
    groups: dict[str, list[Counted]] = {}
    for run in runs:
        groups.setdefault(run.config.model.model_dump_json(), []).append(run)
    models = [group[0].config.model.model_dump() for group in groups.values()]
    keys = dict.fromkeys(key for model in models for key in model)  # a default may be left out
    varying = [key for key in keys if len({str(model.get(key)) for model in models}) > 1]
    sizes = [
        {
            "model": {key: model.get(key) for key in varying or list(model)[:1]},
            "parameters": work.experiment.parameters(group[0].config),
            "gpus": max(run.gpus for run in group),
            **totals(group),
            **({"simulated": simulated(work.experiment, group)} if simulates else {}),
        }
        for model, group in zip(models, groups.values(), strict=True)
    ]
    return {
        "file": str(work.file.path),
        "preset": work.file.sources.preset,
        "notes": [*work.file.sources.assumed, *work.report()],
        "sizes": sorted(sizes, key=lambda size: size["parameters"]["total"]),
        **totals(runs),
        "may_add": dict(zip(("runs", "flops"), work.may_add(), strict=True)),
    }


def totals(runs: Sequence[Counted]) -> dict[str, Any]:
    """Runs, tokens, FLOPs and GPU-hours of some runs, and of those that are to do."""

    def hours(run: Counted, card: Any) -> float:
        return run.flops / (getattr(card, run.config.training.precision) * UTILISATION) / 3600

    to_do = [run for run in runs if not run.done]
    return {
        name: {
            "runs": len(some),
            "tokens": sum(run.tokens for run in some),
            "flops": sum(run.flops for run in some),
            "gpu_hours": {card.name: sum(hours(run, card) for run in some) for card in CARDS},
        }
        for name, some in (("all", runs), ("to_do", to_do))
    }


def kind_of(run: Counted) -> dict[str, Any]:
    """What the memory of a step of one model depends on. A prescription changes it by 2 % at most,
    and the first one of a file is taken."""
    training = run.config.training
    share = -(-training.batch_size // run.gpus)
    return {
        "optimizer": run.config.optimizer.name,
        "precision": training.precision,
        "micro_batch": min(training.micro_batch_size or share, share),
        "gpus": run.gpus,
    }


_steps: dict[Any, Any] = {}  # what has been simulated: files share sizes


def simulated(experiment: Experiment[RunConfig], runs: Sequence[Counted]) -> list[dict[str, Any]]:
    """A step of every kind of run of one model: what it takes on each GPU, and which cards hold it.

    FLOPs are those on one GPU, where no forward pass is computed again.
    """
    from training.simulate import simulate  # torch, for which other commands do not wait

    rows = []
    kinds = {tuple(kind_of(run).values()): run for run in reversed(runs)}  # the first of a kind
    for kind, run in reversed(kinds.items()):
        # A prescription may add a bias, so a model has several numbers of parameters.
        parameters = tuple(experiment.parameters(run.config).values())
        model = experiment.name, run.config.model.model_dump_json(), parameters
        for gpus in {1, run.gpus}:
            key = model, kind, run.config.training.batch_size, gpus
            if key not in _steps:
                _steps[key] = simulate(experiment, run.config, gpus)
        one, each = (_steps[*key[:-1], gpus] for gpus in (1, run.gpus))
        rows.append(
            {
                **kind_of(run),
                "parameters": one.parameters,
                "step_flops": one.flops,
                "memory_on_one": one.memory,
                "memory_on_each": each.memory,
                "fits": [c.name for c in CARDS if MARGIN * each.memory + CONTEXT <= c.memory],
            }
        )
    return rows


def text(counts: Mapping[str, Any], card: str) -> str:
    """The report of a file, or the totals of all files, for people."""

    def short(number: float) -> str:
        return f"{number:.3g}" if number >= 1e5 else f"{number:,.0f}"

    def numbers(total: Mapping[str, Any]) -> tuple[str, ...]:
        time = duration(3600 * total["gpu_hours"][card])
        return str(total["runs"]), short(total["tokens"]), short(total["flops"]), time

    titles = "embedding", "non-embedding", "parameters", "GPUs"
    rows: list[tuple[str, ...]] = [("model", *titles, "runs", "tokens", "FLOPs", f"1 {card}")]
    steps = [("model", "run", "micro-batch", "GPUs", "GB on each", "FLOPs / step", "fits on")]
    for size in counts.get("sizes", ()):
        name = " ".join(f"{key} {value}" for key, value in size["model"].items())
        parameters = (f"{size['parameters'][kind]:,}" for kind in PARAMETERS)
        rows.append((name, *parameters, str(size["gpus"]), *numbers(size["all"])))
        for one in size.get("simulated", ()):
            words = (
                f"{one['optimizer']} {one['precision']}",
                str(one["micro_batch"]),
                str(one["gpus"]),
                f"{one['memory_on_each'] / 1e9:.3g}",
                f"{one['step_flops']:.4g}",
                ", ".join(one["fits"]) or "none of these: more `gpus` in the sweep file",
            )
            steps.append((name, *words))
    for kind, key in (("all", "all"), ("to do", "to_do")):
        rows.append((kind, *[""] * 4, *numbers(counts[key])))
    preset = f" (preset {counts['preset']})" if counts.get("preset") else ""
    lines = [
        f"{counts['file']}{preset}: {counts['all']['runs']} runs, {counts['to_do']['runs']} to do",
        *(f"assumed or not counted: {note}" for note in counts.get("notes", ())),
        "",
        columns(rows),
    ]
    more = counts.get("may_add", {"runs": 0})
    if more["runs"]:
        flops = short(more["flops"])
        lines.append(f"results may ask for up to {more['runs']} more runs, {flops} FLOPs")
    if counts["to_do"]["runs"]:
        hours = (f"{number:.3g} {name}" for name, number in counts["to_do"]["gpu_hours"].items())
        lines.append(f"GPU-hours to do: {', '.join(hours)}")
    if steps[1:]:
        lines += ["", "simulated:", columns(steps)]
    return "\n".join(lines)


def assumptions(simulates: bool) -> list[str]:
    """What every number rests on."""
    rates = ", ".join(f"{c.name} {c.bf16 / 1e12:g}, {c.fp32 / 1e12:g}" for c in CARDS)
    flops = (
        "FLOPs: 6 per weight of a matrix and token, and attention; evaluation, probes and what "
        "sharded runs compute again, a third more, are not counted. GPU-hours: at "
        f"{100 * UTILISATION:g} % of the dense peak of each run's precision, in TFLOP/s bf16 "
        f"and fp32 (datasheets, see sweeps/pool.py): {rates}."
    )
    memory = (
        f"A card holds a run if {MARGIN:g} times the bytes of an eager step and {CONTEXT / 1e9:g} "
        "GB (1e9 bytes) are below its memory; observations and probes are not simulated."
    )
    return [flops, memory] if simulates else [flops]


def run(args: argparse.Namespace, works: Sequence[Work]) -> None:
    """Prints what sweeps cost, and a note where data are not here."""
    simulates = args.simulate or args.csv is not None
    files = [(work, read(work)) for work in works]
    counts = [report(work, runs, simulates) for work, runs in files]
    every = [run for _, runs in files for run in runs]
    together = totals(every) if len(files) > 1 else None
    if args.csv:
        rows = [
            {
                "file": file["file"],
                "model": " ".join(f"{key}={value}" for key, value in size["model"].items()),
                **one,
                "fits": " ".join(name.replace(" ", "-") for name in one["fits"]),
            }
            for file in counts
            for size in file["sizes"]
            for one in size["simulated"]
        ]
        write_csv(args.csv, list(rows[0]), rows)
    if args.json:
        content = {"files": counts, "together": together, "assumptions": assumptions(simulates)}
        print(json.dumps(content, indent=1))
    else:
        sections = counts + ([{"file": "all files", **together}] if together else [])
        tables = [text(section, args.card) for section in sections]
        footnotes = [textwrap.fill(line, 100) for line in assumptions(simulates)]
        print("\n\n".join([*tables, "\n".join(footnotes)]), flush=True)
    for work, runs in files:
        for line in work.file.missing_data(run.config for run in runs if not run.done):
            say(line)
