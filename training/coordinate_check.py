"""The coordinate check of an experiment: `param-groups check` for a config of this repository.

    python -m training.coordinate_check nanolm_c4 nanolm_c4/configs/laptop.yaml [key=value ...]
    python -m training.coordinate_check vit_cifar5m vit_cifar5m/configs/laptop.yaml \\
        --scan model.head_dim --widths 8 16 32 64

trains a few steps at several widths and seeds, without warm-up, and fits the power of the width in
every module's output, its change, and every tensor's update (param_groups/check).

The theory is about widths far above everything else, and changes of first order. So the check sets
some keys that do not depend on width (CHECK_SETTINGS, and an eighth of the learning rate) unless
they are given on the command line; `--as-configured` leaves them alone.

`--scan KEY` goes through the values of another key than the width: model.heads and model.head_dim,
whose width is in proportion, or model.layers, where the prescription knows the depth (Bordelon et
al.'s, and Everett et al.'s of nanolm_c4 with or without alpha_depth). The powers then are of that
size. Models of different depths are compared by their blocks at the same relative depths, under the
names of the shallowest model's. There a batch has DEPTH_BATCH samples.

Exit code: 0; 1 if a verdict is bad; 2 for a mistake in the command or the config, and where a rate
depends on what was not judged.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from param_groups.check import Check, command
from param_groups.check.measuring import watched
from param_groups.check.recording import recording
from training import runs
from training.config import leaves, parse_overrides, read_yaml, set_keys, validate
from training.errors import UserError, one_line_errors
from training.experiment import load_experiment
from training.task import Task, build_optimizer, first_batches, initialise

# Keys an experiment is checked with, where its config has them. None changes an exponent; all
# bring the widths of a laptop into the range where the exponents show.
CHECK_SETTINGS: dict[str, Any] = {
    # One sample: with as many tokens as the width, the alignment of updates cannot be seen.
    "training.batch_size": 1,
    # An embedding of std 0.01, Everett et al.'s constant, moves by its own size in one step, and
    # that change covers those of all other layers.
    "prescription.embedding_std": 1.0,
    # Residual branches larger than the stream hide at few blocks what happens at many.
    "prescription.beta0": 1.0,
    # Divided by a small gamma0, the initial output is large enough to affect the loss.
    "prescription.gamma0": 1.0,
    "optimizer.weight_decay": 0.0,  # at rates far above a run's a plan refuses one
    # One sample cannot be mixed with another.
    "data.augmentation.mixup": 0.0,
    "data.augmentation.cutmix": 0.0,
    # Dropout is noise.
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
}
# Over depths the width stays, so samples hide no power; at one, noise leaves single blocks unclear.
DEPTH_BATCH = 8
# Of optimizer.lr: at the rate of a run, norms saturate within the first steps.
LR_FACTOR = 1 / 8


def experiment_target(
    name: str, path: Path, overrides: Sequence[str], args: argparse.Namespace
) -> command.Target:
    """An experiment's config at any width; every width is validated before the first is built."""
    experiment = load_experiment(name)
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    given = dict(runs.flat(parse_overrides(overrides)))
    data = set_keys(read_yaml(path), given)
    validate(experiment.config, data, where)
    values = {key: value for key, value in runs.flat(data) if value is not None}
    if args.scan == "model.width" and "model.width" not in values and "model.heads" in values:
        raise UserError(
            f"{where}: gives model.heads and no model.width to scan; scan the heads, to which the "
            "width is in proportion: --scan model.heads --widths 4 8 16 32"
        )
    chosen: dict[str, Any] = {}
    if not args.as_configured:
        keys = {key for key, _ in leaves(experiment.config)} - given.keys()
        keys -= {f"prescription.{key}" for key in ("beta0", "gamma0")} - values.keys()
        if values.get("prescription.parameterization") == "bordelon":
            keys.discard("prescription.embedding_std")  # it has its own scale of embeddings
        chosen = {key: value for key, value in CHECK_SETTINGS.items() if key in keys}
        if args.scan == "model.layers" and "training.batch_size" in keys:
            chosen["training.batch_size"] = DEPTH_BATCH
        lr = values.get("optimizer.lr")
        if "optimizer.lr" in keys and isinstance(lr, (int, float)):
            chosen["optimizer.lr"] = lr * LR_FACTOR

    def config(width: int, seed: int) -> Any:
        changes = {**chosen, args.scan: width, "seed": seed}
        return validate(experiment.config, set_keys(data, changes), where)

    def build(width: int, seed: int) -> Check:
        return _from_task(experiment.build_task(config(width, seed)), args.steps)

    configs = [config(width, 0) for width in args.widths]
    folder = f"{name}/{runs.run_id(configs[0], path.stem)}"
    settings = {"config": str(path), "overrides": given, "set_for_the_check": chosen}
    for key, value in chosen.items():
        print(f"set for the check: {key}={value}")
    return command.Target(build, folder, settings={**settings, "scan": args.scan})


def _from_task(task: Task, steps: int) -> Check:
    """The first steps of a run, at constant rates."""
    batches = list(first_batches(task, steps))
    initialise(task)
    return Check(
        model=task.model,
        plan=task.plan,
        batches=batches,
        loss=_loss_through_logits(task, batches[0]),
        optimizer=build_optimizer(task),
        clip_norm=task.config.optimizer.clip_norm,
        after_init=task.after_init,
    )


def _loss_through_logits(task: Task, batch: Any) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The task's mean loss, computed so that the readout is called.

    A model may fuse readout and cross-entropy. Then the loss is taken of the logits that the task's
    `forward` returns, which must be the same number.
    """

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(model, batch) / task.count(batch)

    def unfused(model: nn.Module, batch: Any) -> torch.Tensor:
        assert task.forward is not None
        return F.cross_entropy(task.forward(model, batch).flatten(0, -2), batch[1].flatten())

    readouts = [name for name, part in watched(task.model, task.plan).items() if part == "logits"]
    with torch.no_grad(), recording(task.model, readouts, lambda t: t) as outputs:
        value = mean(task.model, batch)
    if outputs or not readouts or task.forward is None:
        return mean
    with torch.no_grad():
        other = unfused(task.model, batch)
    if not torch.isclose(value, other, rtol=1e-4):
        raise UserError(
            f"{readouts[0]!r} is not called for the loss ({value:.6g}), and the cross-entropy of "
            f"the logits is another number ({other:.6g}); the logits cannot be measured"
        )
    return unfused


def main(argv: Sequence[str] | None = None) -> None:
    """The command; see the module for its exit codes."""
    parser = command.parser_of("python -m training.coordinate_check", __doc__)
    add = parser.add_argument
    add("experiment", help="experiment folder; files and stock models: param-groups check --help")
    add("config", type=Path, help="config of the experiment")
    add("overrides", nargs="*", metavar="key=value")
    add("--scan", metavar="KEY", default="model.width", help="config key that --widths are of")
    add("--as-configured", action="store_true", help="set no key but width and seed")
    command.add_options(parser)
    args = parser.parse_intermixed_args(argv)
    with one_line_errors(OSError):
        command.check_options(args)
        target = experiment_target(args.experiment, args.config, args.overrides, args)
        code = command.run(target, args)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
