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
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.counts import Setting, read, report, together
from sweeps.needs import GPUS
from sweeps.progress import columns
from training import runs
from training.errors import one_line_errors

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
