"""The coordinate check: do activations and updates scale with size as the prescription says?

    python -m measure.coordinate_check nanolm_c4 nanolm_c4/configs/laptop.yaml [key=value ...]
    python -m measure.coordinate_check vit_cifar5m vit_cifar5m/configs/laptop.yaml \\
        --scan model.head_dim --widths 8 16 32 64
    python -m measure.coordinate_check examples/coordinate_check_mlp.py
    python -m measure.coordinate_check --model hf:gpt2 [--rule mup standard one_rate]

trains a few steps at several widths and seeds, without warm-up, and fits the power of the width in
the RMS of every module's output at initialisation, of its change, and of every tensor's update
(measure/coordinates.py). Beside each slope stands the aim of the plan's prescription, and what
theory predicts for the first steps, where they differ (measure/theory.py). A slope gets a verdict
(measure/slopes.py); exponents of the theory differ by halves, so the default tolerance is 1/4: a
slope is judged by the nearest half.

The theory is about widths far above everything else, and changes of first order. So for an
experiment the check sets some keys that do not depend on width (CHECK_SETTINGS, and an eighth of
the learning rate) unless they are given on the command line; `--as-configured` leaves them alone.

`--scan KEY` goes through the values of another key than the width: model.heads and model.head_dim,
whose width is in proportion, or model.layers, where the prescription knows the depth (Bordelon et
al.'s, and Everett et al.'s of nanolm_c4 with or without alpha_depth). The powers then are of that
size. Models of different depths are compared by the RMS over all their blocks, which stands under
names like blocks.*.mlp.up.

Your own model: a file with `def task(width: int, seed: int) -> Check`, see measure.coordinates.

A stock model: `--model` takes the model type of a Hugging Face config or a name of timm's, builds
small ones of several widths from its config, untied, with its shipped rules (measure/stock.py), and
checks each rule that `--rule` names.

Writes coordinate_check.csv and .json, from which `python -m plots coordinate_check` draws.
Exit code: 0, 1 if a verdict is bad (grows, shrinks, unclear, not finite), 2 for a mistake in the
command, the config or the file.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from measure import stock
from measure.coordinates import (
    SEEDS,
    STEPS,
    WIDTHS,
    Build,
    Check,
    Coordinate,
    Measurement,
    check_numbers,
    measure,
    pooled,
    recording,
    watched,
)
from measure.slopes import (
    EXCEPTION,
    SEVERITY,
    TOLERANCE,
    UNKNOWN,
    Slope,
    at_rest,
    failed,
    fit,
    worst,
)
from param_groups.rows import align
from training import environment, runs
from training.config import Section, leaves, parse_overrides, read_yaml, set_keys, validate
from training.errors import UserError, one_line_errors
from training.experiment import load_experiment
from training.files import refuse_file, write_json, write_text
from training.task import Task, build_optimizer, first_batches, initialise

# Keys an experiment is checked with, where its config has them. None changes an exponent; all
# bring the widths of a laptop into the range where the exponents show.
CHECK_SETTINGS: dict[str, Any] = {
    # One sample: with as many tokens as widths, how updates align with activations does not show.
    "training.batch_size": 1,
    # An embedding of std 0.01, Everett et al.'s constant, moves by its own size in one step, and
    # that change covers those of all other layers.
    "prescription.embedding_std": 1.0,
    # Residual branches larger than the stream hide at few blocks what happens at many.
    "prescription.beta0": 1.0,
    # An output divided by a small gamma0 starts as large as the loss can feel.
    "prescription.gamma0": 1.0,
    # Weight decay moves a tensor by a share of itself, whatever its rate.
    "optimizer.weight_decay": 0.0,
    # One sample cannot be mixed with another.
    "data.augmentation.mixup": 0.0,
    "data.augmentation.cutmix": 0.0,
    # Dropout is noise.
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
}
# Of optimizer.lr: at the rate of a run, norms saturate within the first steps.
LR_FACTOR = 1 / 8


# ------------------------------------------------------------------------------------------------
# Table and files


def table(slopes: Sequence[Slope]) -> str:
    """Modules, then tensors: slopes at the first and the last step, with the expected ones.

    Repeated blocks are one line, with the slope that is farthest from its aim; the verdict is the
    worst over blocks and all steps.
    """
    last = max(slope.step for slope in slopes)
    modules = [
        ("module", "init", "aim", "change, step 1", f"step {last}", "aim", "predicted", "verdict")
    ]
    tensors = [("tensor", "update, step 1", f"step {last}", "expected", "verdict")]
    for name, group in _lines(slopes, updates=False).items():
        start = _farthest(group, "init", 0)
        one, end = _farthest(group, "change", 1), _farthest(group, "change", last)
        modules.append(
            (
                name,
                _cell(start),
                _number(start and start.aim),
                _cell(one),
                _cell(end),
                _number(one and one.aim),
                _number(one and one.predicted),
                _word(group),
            )
        )
    for name, group in _lines(slopes, updates=True).items():
        one, end = _farthest(group, "update", 1), _farthest(group, "update", last)
        tensors.append((name, _cell(one), _cell(end), _number(one and one.aim), _word(group)))
    notes = dict.fromkeys(slope.note for slope in slopes if slope.verdict == EXCEPTION)
    text = [align(modules), align(tensors), *(f"{EXCEPTION}: {note}" for note in notes)]
    return "\n\n".join(text)


def summary(slopes: Sequence[Slope]) -> str:
    """The outcome in one line."""
    groups = [group for updates in (False, True) for group in _lines(slopes, updates).values()]
    words = list(map(_word, groups))
    counts = ", ".join(f"{words.count(word)} {word}" for word in SEVERITY if word in words)
    still = "; no step has changed anything" if at_rest(slopes) else ""
    return f"{'FAILED' if failed(slopes) else 'passed'}: {counts}{still}"


def _lines(slopes: Sequence[Slope], updates: bool) -> dict[str, list[Slope]]:
    """The slopes of each line of the table, those of tensors or those of modules."""
    groups: dict[str, list[Slope]] = {}
    for slope in slopes:
        if (slope.quantity == "update") == updates:
            groups.setdefault(pooled(slope.name), []).append(slope)
    return groups


def _farthest(group: Sequence[Slope], quantity: str, step: int) -> Slope | None:
    """Of the blocks of one line, the slope to show."""
    there = [slope for slope in group if (slope.quantity, slope.step) == (quantity, step)]
    return max(there, key=lambda s: abs((s.slope or 0) - (s.aim or 0)), default=None)


def _word(group: Sequence[Slope]) -> str:
    return worst([slope.verdict for slope in group])


def _cell(slope: Slope | None) -> str:
    if slope is None or slope.slope is None:
        return (slope and (slope.note or slope.verdict)) or ""
    return f"{round(slope.slope, 2) + 0.0:+.2f} ± {slope.error:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:+.2g}" if abs(value) > 1e-6 else "0"


def write(
    folder: Path, measurement: Measurement, slopes: Sequence[Slope], settings: Mapping[str, Any]
) -> Path:
    """coordinate_check.csv, every point, and coordinate_check.json: slopes, verdicts, settings.

    Returns the path of the table.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Coordinate.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in measurement.points)
    write_text(folder / "coordinate_check.csv", text.getvalue())
    content = {
        **settings,
        "passed": not failed(slopes),
        "not_called": list(measurement.silent),
        "prescription": measurement.plans[min(measurement.plans)].prescription,
        "slopes": [asdict(slope) for slope in slopes],
    }
    write_json(folder / "coordinate_check.json", content)
    return folder / "coordinate_check.csv"


# ------------------------------------------------------------------------------------------------
# Command


@dataclass(frozen=True)
class Target:
    """What a command names: how to build it, where its results go, what was set for the check."""

    build: Build
    folder: Path
    settings: Mapping[str, Any]


def experiment_target(
    experiment: str,
    path: Path,
    overrides: Sequence[str],
    *,
    width_key: str,
    steps: int,
    widths: Sequence[int],
    as_configured: bool = False,
) -> Target:
    """An experiment's config at any width; every width is validated before the first is built."""
    found = load_experiment(experiment)
    data, given = read_yaml(path), dict(runs.flat(parse_overrides(overrides)))
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    for section in ("optimizer", "prescription"):
        if not isinstance(data.get(section, {}), Mapping):
            raise UserError(f"{path}: {section}: expected a section, got {data[section]!r}")
    chosen = {} if as_configured else _check_settings(found.config, data, given)
    model = set_keys(data, given).get("model")
    by_heads = isinstance(model, Mapping) and model.get("heads") is not None
    if width_key == "model.width" and by_heads and model.get("width") is None:
        raise UserError(
            f"{where}: gives model.heads and no model.width to scan; scan the heads, to which the "
            "width is in proportion: --scan model.heads --widths 4 8 16 32"
        )

    def config(width: int, seed: int) -> Section:
        values = {**chosen, **given, width_key: width, "seed": seed}
        return validate(found.config, set_keys(data, values), where)

    def build(width: int, seed: int) -> Check:
        return _from_task(found.build_task(config(width, seed)), steps)

    configs = [config(width, 0) for width in widths]
    folder = runs.RESULTS / experiment / "coordinate_check" / runs.run_id(configs[0], path.stem)
    return Target(build, folder, {"set_for_the_check": chosen, "overrides": given})


def _check_settings(
    kind: type[Section], data: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """CHECK_SETTINGS where the experiment has the key and the command line has not."""
    keys = {key for key, _ in leaves(kind)} - given.keys()
    chosen = {key: value for key, value in CHECK_SETTINGS.items() if key in keys}
    lr = (data.get("optimizer") or {}).get("lr")
    if "optimizer.lr" in keys and isinstance(lr, (int, float)):
        chosen["optimizer.lr"] = lr * LR_FACTOR
    for name in ("beta0", "gamma0"):  # not numbers of every rule: only in place of one
        if (data.get("prescription") or {}).get(name) is None:
            chosen.pop(f"prescription.{name}", None)
    rule = "prescription.parameterization"
    named = given.get(rule) or (data.get("prescription") or {}).get("parameterization")
    if named == "bordelon":  # has its own scale of embeddings
        chosen.pop("prescription.embedding_std", None)
    return chosen


def _from_task(task: Task, steps: int) -> Check:
    """The first steps of a run, at constant rates."""
    config = task.config
    batches = list(first_batches(task, steps))
    initialise(task)
    return Check(
        model=task.model,
        plan=task.plan,
        batches=batches,
        loss=_loss_through_logits(task, batches[0]),
        optimizer=build_optimizer(task),
        clip_norm=config.optimizer.clip_norm,
        after_init=task.after_init,
    )


def _loss_through_logits(task: Task, batch: Any) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The task's mean loss, computed so that the readout is called.

    A model may fuse readout and cross-entropy when it is given targets. Then the loss is taken of
    the logits that it returns without, which must be the same number.
    """

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(model, batch) / task.count(batch)

    def unfused(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    readouts = [name for name, part in watched(task.model, task.plan).items() if part == "logits"]
    with torch.no_grad(), recording(task.model, readouts, lambda t: t) as outputs:
        value = mean(task.model, batch)
    if outputs or not readouts or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return mean
    with torch.no_grad():
        other = unfused(task.model, batch)
    if not torch.isclose(value, other, rtol=1e-4):
        raise UserError(
            f"{readouts[0]!r} is not called for the loss ({value:.6g}), and the cross-entropy of "
            f"model(inputs) is another number ({other:.6g}); the logits cannot be measured"
        )
    return unfused


def stock_target(name: str, rule: str, widths: Sequence[int] = WIDTHS) -> Target:
    """A stock model under one rule; widths that it cannot have, and what its forward pass cannot be
    given, are said at once."""
    for width in widths:
        stock.sizes(name, width)
    note = stock.planned(name, rule, stock.BASE_WIDTH)[2]  # on the CPU, as LayerScales are read
    print(f"{name} under {rule}" + (f"; {note}" if note else ""))
    folder = runs.RESULTS / "stock" / "coordinate_check" / name.replace(":", "-") / rule
    return Target(stock.check(name, rule), folder, {"rule": rule, "note": note})


def file_target(path: Path, overrides: Sequence[str] = ()) -> Target:
    """A user's own file with task(width, seed)."""
    if overrides:
        raise UserError(f"{path}: key=value goes with an experiment's config, got {overrides[0]!r}")
    if not path.is_file():
        raise UserError(f"{path}: cannot read the file; give a Python file with task(width, seed)")
    sys.path.insert(0, str(path.resolve().parent))  # of modules beside it, as `python FILE` has it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    task = getattr(module, "task", None)
    if not callable(task):
        raise UserError(
            f"{path}: no function task(width, seed) in it; add one that returns a "
            "measure.coordinates.Check (examples/coordinate_check_mlp.py is one)"
        )
    return Target(task, runs.RESULTS / "own" / "coordinate_check" / path.stem, {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m measure.coordinate_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        default="",
        help="experiment folder, or a Python file with task(width, seed)",
    )
    add("rest", nargs="*", metavar="config.yaml [key=value ...]", help="config of the experiment")
    add("--widths", type=int, nargs="+", default=WIDTHS, help="at least 3 (default 64 128 256 512)")
    add(
        "--scan",
        "--width-key",
        dest="width_key",
        metavar="KEY",
        default="model.width",
        help="config key of the size that --widths are of (default model.width)",
    )
    add("--steps", type=int, default=STEPS, help=f"optimiser steps (default {STEPS})")
    add("--seeds", type=int, default=SEEDS, help=f"seeds per width (default {SEEDS})")
    add("--tolerance", type=float, default=TOLERANCE, help=f"of a slope (default {TOLERANCE})")
    add("--model", metavar="NAME", help="stock model, hf:gpt2 or timm:vit_small_patch16_224")
    add(
        "--rule",
        nargs="+",
        choices=stock.RULES,
        help="what a stock model is planned by (default mup standard)",
    )
    add("--as-configured", action="store_true", help="set no key but width and seed")
    add("--out", type=Path, help="folder of the results (default results/.../coordinate_check/...)")
    return parser


def _targets(args: argparse.Namespace) -> list[Target]:
    check_numbers(args.widths, args.steps, range(args.seeds))
    if not 0 < args.tolerance < math.inf:
        raise UserError(f"--tolerance {args.tolerance}: expected a positive number")
    if bool(args.model) == bool(args.target):
        raise UserError("give an experiment and its config, a Python file, or --model NAME")
    own = args.target.endswith(".py")
    if own or args.model:
        what = "a Python file" if own else "a stock model"
        if args.width_key != "model.width":
            raise UserError(f"--scan goes with an experiment; {what} is scanned in its width")
        if args.as_configured:
            raise UserError(f"--as-configured goes with an experiment; {what} has no config")
    if args.model:
        rules = args.rule or ("mup", "standard")
        return [stock_target(args.model, rule, args.widths) for rule in rules]
    if args.rule:
        raise UserError(
            "--rule goes with --model; a Python file makes its own plan"
            if own
            else "--rule goes with --model; an experiment has its rule from the config, "
            "such as prescription.parameterization=standard"
        )
    return [_target(args)]


def _target(args: argparse.Namespace) -> Target:
    if args.target.endswith(".py"):
        return file_target(Path(args.target), args.rest)
    if not args.rest:
        if Path(args.target).is_file():
            raise UserError(
                f"{args.target}: give the experiment's folder before its config, for "
                f"example nanolm_c4 {args.target}"
            )
        raise UserError(
            f"{args.target}: give the experiment's config, for example "
            f"{args.target}/configs/laptop.yaml"
        )
    return experiment_target(
        args.target,
        Path(args.rest[0]),
        args.rest[1:],
        width_key=args.width_key,
        steps=args.steps,
        widths=args.widths,
        as_configured=args.as_configured,
    )


def _run(args: argparse.Namespace, target: Target) -> list[Slope]:
    out = args.out and (args.out / target.folder.name if args.model else args.out)
    folder = out or target.folder
    refuse_file(folder)  # before what takes long
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measurement = measure(
        target.build,
        args.widths,
        steps=args.steps,
        seeds=range(args.seeds),
        device=device,
        progress=lambda line: print(line, file=sys.stderr),
    )
    slopes = fit(measurement, args.tolerance)
    settings = {
        "target": [args.model or args.target, *args.rest],
        "scan": args.width_key,
        "widths": sorted(args.widths),
        "seeds": args.seeds,
        "steps": args.steps,
        "tolerance": args.tolerance,
        **target.settings,
        "environment": environment.describe(device),
    }
    path = write(folder, measurement, slopes, settings)
    for key, value in target.settings.get("set_for_the_check", {}).items():
        print(f"set for the check: {key}={value}")
    print("\n" + table(slopes) + "\n")
    if measurement.silent:
        print(f"never called, not measured: {', '.join(measurement.silent)}")
    print(summary(slopes))
    print(f"table: {path}\nfigure: python -m plots coordinate_check {path}")
    return slopes


def main(argv: Sequence[str] | None = None) -> None:
    """The command; see the module for its exit codes."""
    args = _parser().parse_intermixed_args(argv)
    with one_line_errors(OSError):
        outcomes = [failed(_run(args, target)) for target in _targets(args)]
    if any(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
