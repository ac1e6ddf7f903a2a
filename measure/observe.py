"""Representations of finished or stopped runs, from their checkpoints.

    python -m measure.observe RUN_DIR [--reference RUN_DIR ...] [--step N] [--samples N]
        [--out FILE] [--arrays FILE] [--json]

Prints what `measure.observations` measures, between the initial state, drawn again from the seed,
and that of the newest checkpoint, or of step N if that one is kept. A finished run has kept its
last one with checkpoint.final=true, and checkpoint.keep of them in all; a stopped run has what it
goes on from. The samples are those that a run observes while it trains: training.observe_samples of
them if this one did, or else 8, unless --samples says how many.

With references also the mean square distance of the run's logits to the limit that the references,
runs of the widest models, scatter around (Bordelon et al., Fig. 4b): to their mean at the same
step, less its own scatter, and without the run itself if it is one of them.

`--out` writes the same numbers as JSON. `--arrays` writes both states as safetensors, under
step_0/NAME and step_N/NAME what a run that observes stores of a step: kernels of the stream after
the last block, attention logits of sample 0 at a few places for every block and head, and the
model's logits (`measure.observations.arrays_of`). In float32, on the GPU if there is one.

Exit code 2 for a run that is neither finished nor stopped, has no such checkpoint or too few
samples, or saw other samples or outputs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from measure import observations, representations
from measure.observations import Observation
from param_groups import Plan
from param_groups.rows import align
from training import checkpoint, runs, state
from training.config import read_yaml, validate
from training.errors import Damaged, RunError, UserError, one_line_errors
from training.experiment import load_experiment
from training.files import write_json
from training.task import Task

SAMPLES = 8  # of a run that has observed nothing


@dataclass(frozen=True)
class Kept:
    """What a run has kept: its task, whose model has the values of a checkpoint, and its step."""

    run_dir: Path
    task: Task
    step: int
    batch: Any


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, or 2 for a user's mistake (one line)."""
    args = _parser().parse_args(argv)
    with one_line_errors(OSError):
        if args.samples is not None and args.samples < 1:
            raise UserError(f"--samples: {args.samples} given, expected at least 1")
        report, arrays = observe_run(
            args.run, args.reference, args.samples, args.experiment, args.step
        )
        if args.arrays is not None:
            observations.write_arrays(args.arrays, arrays)
        if args.out is not None:
            write_json(args.out, report)
        print(json.dumps(report, indent=1) if args.json else table(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m measure.observe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="folder of a finished or stopped run")
    add("--reference", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="the ensemble")
    add("--step", type=int, metavar="N", help="step of the checkpoint (default the newest kept)")
    samples = f"how many (default the run's training.observe_samples, {SAMPLES} if it has none)"
    add("--samples", type=int, metavar="N", help=samples)
    add("--experiment", help="its folder; by default RUN_DIR is results/EXPERIMENT/SWEEP/RUN")
    add("--out", type=Path, metavar="FILE", help="also write the numbers there, as JSON")
    add("--arrays", type=Path, metavar="FILE", help="write kernels, attention and logits there")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def observe_run(
    run_dir: Path,
    references: Sequence[Path] = (),
    samples: int | None = None,
    experiment: str | None = None,
    step: int | None = None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The report of a run as JSON types, and the arrays of its two states as step_N/NAME.

    Of the newest checkpoint or that of `step`, on as many samples as `load_kept` says; RunError or
    UserError for what cannot be observed.
    """
    run = load_kept(run_dir, samples, experiment, step)
    initial = observations.initial_state(run.task)
    forward = observations.forward_of(run.task)
    found = observations.observe(initial, run.task.model, run.batch, forward)
    report = {"run": str(run_dir), **found.line(run.step)}
    if references:
        report["function_distance"] = _distance(run, found, references, experiment)
    start = observations.arrays_of(representations.capture(initial, run.batch, forward))
    states = {0: start, run.step: found.arrays}
    return report, {f"step_{s}/{name}": a for s, own in states.items() for name, a in own.items()}


def _distance(
    run: Kept,
    found: Observation,
    references: Sequence[Path],
    experiment: str | None,
) -> dict[str, Any]:
    """How far the run's function is from the limit of the references."""
    own = run.run_dir.resolve()
    folders = list(dict.fromkeys(folder.resolve() for folder in references))
    others = [folder for folder in folders if folder != own]
    outputs = [_outputs_like(run, found, folder, experiment) for folder in others]
    member = own in folders
    if member:
        mean_square = representations.leave_one_out([found.outputs, *outputs])[0]
    else:
        mean_square = representations.distance_to_ensemble(found.outputs, outputs)
    return {"mean_square": mean_square, "references": len(outputs), "is_one_of_them": member}


def _outputs_like(
    run: Kept, found: Observation, folder: Path, experiment: str | None
) -> torch.Tensor:
    """The logits of a reference on the run's own samples, after as many steps."""
    other = load_kept(folder, found.samples, experiment, run.step)
    if not _same(run.batch, other.batch):
        raise RunError(
            f"{folder}: its first {found.samples} samples are not those of {run.run_dir}; compare "
            "runs on the same data"
        )
    forward = observations.forward_of(other.task)
    outputs = representations.capture(other.task.model, other.batch, forward).outputs
    if outputs.shape != found.outputs.shape:
        raise RunError(
            f"{folder}: its outputs have shape {tuple(outputs.shape)}, those of {run.run_dir} "
            f"{tuple(found.outputs.shape)}; compare runs with the same outputs"
        )
    return outputs


def _same(first: Any, second: Any) -> bool:
    """Whether two batches hold the same tensors."""
    if isinstance(first, torch.Tensor):
        same_kind = isinstance(second, torch.Tensor) and first.shape == second.shape
        return same_kind and torch.equal(first, second)
    if isinstance(first, (tuple, list)):
        pairs = zip(first, second, strict=True)
        return len(first) == len(second) and all(_same(one, other) for one, other in pairs)
    return first == second


def load_kept(
    run_dir: Path,
    samples: int | None = None,
    experiment: str | None = None,
    step: int | None = None,
) -> Kept:
    """A run with the weights of its newest checkpoint, or of `step`, and the samples to observe.

    By default as many as the run observed in training; if it did not, SAMPLES or what there are.
    Raises RunError when the run is neither finished nor stopped or has kept no such checkpoint, or
    when that is damaged or was made by another plan; UserError for no such experiment and
    for too few samples.
    """
    _check_ended(run_dir)
    name = experiment or run_dir.resolve().parent.parent.name
    try:
        own = load_experiment(name, run_dir)
    except UserError:
        if experiment or Path(name, "train.py").is_file():
            raise
        raise RunError(
            f"{run_dir}: by its folder a run of {name!r}, which has no train.py here; "
            "name its experiment, such as --experiment nanolm_c4, and run from the "
            "repository's root"
        ) from None
    data = read_yaml(run_dir / "config.yaml")
    path = _checkpoint(run_dir, step)
    task = own.build_task(validate(own.config, data, str(run_dir / "config.yaml")))
    if samples is None:
        samples = _observed_samples(task)
    observations.check_samples(task, samples, f"{run_dir}: --samples")
    try:
        checkpoint.check(path)
        saved = checkpoint.load(path)
        _refuse_others(path, saved, task)
    except Damaged as damage:
        raise RunError(f"{damage}; the run has to be trained again") from None
    task.plan.initialise(task.model, task.config.seed)  # which also sets the multipliers
    state.load_model(task.model, saved)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task.model.to(device)
    return Kept(run_dir, task, saved.meta["step"], observations.eval_batch(task, samples, device))


def _observed_samples(task: Task) -> int:
    """Samples that a run observes in training; if none, SAMPLES, as far as there are as many."""
    settings = task.config.training
    if getattr(settings, "observe_every", 0):
        return settings.observe_samples
    return max(1, min(SAMPLES, len(task.observed_data)))


def _check_ended(run_dir: Path) -> None:
    """Raises RunError unless the run is finished or stopped: a running one changes its files."""
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: no such run; expected a folder with config.yaml")
    summary = runs.summary(run_dir)
    if summary is None:
        raise RunError(
            f"{run_dir}: neither finished nor stopped, it has no summary.json; train it to its end"
        )
    if summary["status"] not in ("finished", "stopped"):
        raise RunError(
            f"{run_dir}: {summary['status']} at step {summary.get('step')}; only a run that is "
            "finished or stopped can be observed"
        )


def _checkpoint(run_dir: Path, step: int | None) -> Path:
    """The newest checkpoint of a run, or that of a step."""
    kept = {
        int(path.name.removeprefix("step-")): path
        for path in checkpoint.paths(run_dir / "checkpoints")
    }
    if not kept:
        raise RunError(
            f"{run_dir}: no checkpoint in it; run the same config with checkpoint.final=true, "
            "which keeps the last one"
        )
    if step is not None and step not in kept:
        raise RunError(
            f"{run_dir}: no checkpoint of step {step}, it has kept {', '.join(map(str, kept))}; "
            "checkpoint.every and checkpoint.keep say which are kept"
        )
    return kept[max(kept) if step is None else step]


def _refuse_others(path: Path, saved: Any, task: Task) -> None:
    """Raises RunError unless the checkpoint was made by this config and plan."""
    try:
        plan = Plan.from_dict(saved.meta["plan"])
        config = dict(saved.meta["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: not a checkpoint of a run ({error!r})") from None
    runs.refuse_differences(path, config, plan, task.config, task.plan)


def table(report: dict[str, Any]) -> str:
    """The report for people: a row per quantity, a column per block."""
    blocks, whole = report["blocks"], report["all"]
    header = ("quantity", *(f"block {numbers['block']}" for numbers in blocks), "all")
    rows = [
        (name, *(_cell(numbers.get(name, "")) for numbers in blocks), _cell(value))
        for name, value in whole.items()
    ]
    title = f"{report['run']}: {report['samples']} samples, step {report['step']} beside step 0"
    return "\n".join([title, align([header, *rows]), *_distance_line(report)])


def _distance_line(report: dict[str, Any]) -> list[str]:
    if "function_distance" not in report:
        return []
    found = report["function_distance"]
    rest = "the other " if found["is_one_of_them"] else ""
    count = found["references"]
    scatter = ", its scatter taken off" if count > 1 or rest else ", a single one"
    mean = f"mean of {rest}{count} references{scatter}"
    return [f"mean square distance of the logits to the {mean}: {found['mean_square']:.4g}"]


def _cell(value: float | str | None) -> str:
    return value if isinstance(value, str) else "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
