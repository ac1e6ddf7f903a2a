"""Representations of finished runs, from their final checkpoints.

    python -m training.observe RUN_DIR [--reference RUN_DIR ...] [--samples 8] [--out FILE] [--json]

Prints what `training.observations` measures, between the initial state, drawn again from the seed,
and the final one, which checkpoint.final=true keeps. With references also the mean square distance
of the run's logits to the limit that the references, runs of the widest models, scatter around
(Bordelon et al., Fig. 4b): to their mean, less its own scatter, and without the run itself if it
is one of them. `--out` writes the same as JSON. In float32, on the GPU if there is one.

Exit code 2 for a run that is not finished, has no checkpoint, or saw other samples or outputs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import runs
from training.config import read_yaml, validate
from training.errors import RunError, UserError, one_line_errors
from training.files import write_json
from training.sweep_file import import_experiment

if TYPE_CHECKING:
    import torch

    from training.loop import Task
    from training.observations import Observation


@dataclass(frozen=True)
class Final:
    """A finished run: its task, whose model has the final values, and the steps it took."""

    run_dir: Path
    task: Task
    step: int
    batch: Any


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, or 2 for a user's mistake (one line)."""
    args = _parser().parse_args(argv)
    with one_line_errors(OSError):
        if args.samples < 1:
            raise UserError(f"--samples: {args.samples} given, expected at least 1")
        report = observe_run(args.run, args.reference, args.samples, args.experiment)
        if args.out is not None:
            write_json(args.out, report)
        print(json.dumps(report, indent=1) if args.json else table(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.observe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="folder of a finished run")
    add("--reference", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="the ensemble")
    add("--samples", type=int, default=8, help="evaluation samples, from the first on (default 8)")
    add("--experiment", help="its folder; by default RUN_DIR is results/EXPERIMENT/SWEEP/RUN")
    add("--out", type=Path, metavar="FILE", help="also write the numbers there, as JSON")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def observe_run(
    run_dir: Path, references: Sequence[Path] = (), samples: int = 8, experiment: str | None = None
) -> dict[str, Any]:
    """The report of a run as JSON types; RunError or UserError for what cannot be observed."""
    from training import observations

    run = load_final(run_dir, samples, experiment)
    initial = observations.initial_state(run.task)
    forward = observations.forward_of(run.task)
    found = observations.observe(initial, run.task.model, run.batch, forward)
    report = {"run": str(run_dir), **found.line(run.step)}
    if references:
        report["function_distance"] = _distance(run, found, references, samples, experiment)
    return report


def _distance(
    run: Final,
    found: Observation,
    references: Sequence[Path],
    samples: int,
    experiment: str | None,
) -> dict[str, Any]:
    """How far the run's function is from the limit of the references."""
    from training import representations

    own = run.run_dir.resolve()
    folders = list(dict.fromkeys(folder.resolve() for folder in references))
    others = [folder for folder in folders if folder != own]
    outputs = [_outputs_like(run, found, folder, samples, experiment) for folder in others]
    member = own in folders
    if member:
        mean_square = representations.leave_one_out([found.outputs, *outputs])[0]
    else:
        mean_square = representations.distance_to_ensemble(found.outputs, outputs)
    return {"mean_square": mean_square, "references": len(outputs), "is_one_of_them": member}


def _outputs_like(
    run: Final, found: Observation, folder: Path, samples: int, experiment: str | None
) -> torch.Tensor:
    """The logits of a reference on the run's own samples."""
    from training import observations
    from training.representations import capture

    other = load_final(folder, samples, experiment)
    if not _same(run.batch, other.batch):
        raise RunError(
            f"{folder}: its first {samples} evaluation samples are not those of {run.run_dir}; "
            "compare runs on the same data"
        )
    forward = observations.forward_of(other.task)
    outputs = capture(other.task.model, other.batch, forward).outputs
    if outputs.shape != found.outputs.shape:
        raise RunError(
            f"{folder}: its outputs have shape {tuple(outputs.shape)}, those of {run.run_dir} "
            f"{tuple(found.outputs.shape)}; compare runs with the same outputs"
        )
    return outputs


def _same(first: Any, second: Any) -> bool:
    """Whether two batches hold the same tensors."""
    import torch

    if isinstance(first, torch.Tensor):
        same_kind = isinstance(second, torch.Tensor) and first.shape == second.shape
        return same_kind and torch.equal(first, second)
    if isinstance(first, (tuple, list)):
        pairs = zip(first, second)
        return len(first) == len(second) and all(_same(one, other) for one, other in pairs)
    return first == second


def load_final(run_dir: Path, samples: int, experiment: str | None = None) -> Final:
    """A finished run with the weights of its last step, and its first evaluation samples.

    Raises RunError when the run is not finished or has kept no checkpoint of its last step, when
    that is damaged, or was made by another plan; UserError for an experiment that has no task.
    """
    import torch

    from training import checkpoint, observations, state

    step = _finished(run_dir)
    name = experiment or run_dir.resolve().parent.parent.name
    build_task, kind = _experiment(run_dir, name)
    data = read_yaml(run_dir / "config.yaml")
    path = _final_checkpoint(run_dir, step)
    task = build_task(validate(kind, data, str(run_dir / "config.yaml")))
    try:
        saved = checkpoint.load(path)
        _refuse_others(path, saved, task)
        state.check_model(task.model, saved.part("model"))
    except checkpoint.Damaged as damage:
        raise RunError(f"{damage}; the run has to be trained again") from None
    task.plan.initialise(task.model, task.config.seed)  # which also sets the multipliers
    state.load_model(task.model, saved.part("model"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task.model.to(device)
    return Final(run_dir, task, step, observations.eval_batch(task, samples, device))


def _finished(run_dir: Path) -> int:
    """The number of steps of a finished run; RunError for any other."""
    if not run_dir.is_dir():
        raise RunError(f"{run_dir}: no such run; expected a folder with config.yaml")
    summary = runs.summary(run_dir)
    if summary is None:
        raise RunError(f"{run_dir}: not finished, it has no summary.json; train it to its end")
    if summary["status"] != "finished":
        raise RunError(
            f"{run_dir}: not finished but {summary['status']} at step {summary.get('step')}; only "
            "a finished run has a final state"
        )
    return summary["steps"]


def _experiment(run_dir: Path, name: str) -> tuple[Callable[[Any], Task], Any]:
    """build_task and Config of an experiment."""
    module = import_experiment(run_dir, name)
    if not hasattr(module, "build_task"):
        raise UserError(f"{run_dir}: experiment {name!r} has no build_task in its train.py")
    return module.build_task, module.Config


def _final_checkpoint(run_dir: Path, step: int) -> Path:
    from training import checkpoint

    kept = checkpoint.paths(run_dir / "checkpoints")
    if not kept or kept[-1].name != f"step-{step:08d}":
        raise RunError(
            f"{run_dir}: no checkpoint of its last step {step}; run the same config with "
            "checkpoint.final=true, which keeps one"
        )
    return kept[-1]


def _refuse_others(path: Path, saved: Any, task: Task) -> None:
    """Raises RunError unless the checkpoint was made by this config and plan."""
    from param_groups import Plan
    from training.checkpoint import Damaged

    try:
        plan = Plan.from_dict(saved.meta["plan"])
        config = dict(saved.meta["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: not a checkpoint of a run ({error!r})") from None
    runs.refuse_differences(path, config, plan, task.config, task.plan)


def table(report: dict[str, Any]) -> str:
    """The report for people: a row per quantity, a column per block."""
    from param_groups.plan import align

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
