"""What an experiment is: all that a folder says so that it can be trained, planned and swept.

A folder NAME has a `train.py` that ends with `EXPERIMENT = Experiment.of(globals(), cost)`.
`python -m NAME.train` trains one config or prints its plan; sweeps and the coordinate check use
`load_experiment(NAME)`.

Nothing here imports torch before a config is known to be right: `--help` and a mistyped key answer
at once.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from training.config import describe, load, read_yaml
from training.errors import UserError, nearest, one_line_errors
from training.settings import RunConfig

if TYPE_CHECKING:
    from torch import nn

    from param_groups import Plan
    from training.runs import Summary
    from training.task import Loss, Progress, Task

C = TypeVar("C", bound=RunConfig)


class Weights(NamedTuple):
    """Numbers of a model's parameters, and of those in matrices, which multiply every token."""

    by_role: Counter[str]
    matrices: int


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[C]):
    """A folder's model, data and costs, by the functions that make them from a config.

    - `config`: the class of its configs.
    - `build_task(config)`: model, plan, data and loss, for the loop and the coordinate check.
    - `build_plan(config, model)`: every tensor's numbers.
    - `build_blank(config, rows)`: a model, its summed loss as in `Task`, and a batch of so many
      samples without content, on torch's default device, for `training.simulate`; no data are read.
    - `products(config, weights)`: multiply-adds of a forward pass of one sample.
    - `tokens_per_step(config)`: positions that one optimiser step sees, over all processes.
    - `result(summary)`: a finished run's outcome, a few words.
    - `shape(config)`: all that decides the shapes of its model, which is built once for each.
    - `embedding`: roles whose parameters count as the embedding's.
    - `reads`: keys of the config that name the files and folders which runs read.
    - `arithmetic(task)`: lines, shown before training, on how the run's numbers come about; by
      default none. UserError for a run whose data does not last.
    """

    name: str
    description: str
    config: type[C]
    build_task: Callable[[C], Task]
    build_plan: Callable[[C, nn.Module], Plan]
    products: Callable[[C, Weights], int]
    tokens_per_step: Callable[[C], int]
    result: Callable[[Summary], str]
    build_blank: Callable[[C, int], tuple[nn.Module, Loss, object]] | None = None
    shape: Callable[[C], object] = lambda config: config.model_dump_json(include={"model", "data"})
    embedding: tuple[str, ...] = ("token_embedding", "patch_embedding", "position_embedding")
    reads: tuple[str, ...] = ("data.path",)
    arithmetic: Callable[[Task], list[str]] = lambda task: []
    _weights: dict[object, Weights] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, train: Mapping[str, Any], cost: ModuleType, **more: Any) -> Experiment[Any]:
        """The experiment of a folder: what `train.py` and `cost.py` have under the names of the
        fields, and their `Config`."""
        every = {**vars(cost), **train, "name": train["__package__"], "config": train["Config"]}
        named = {one.name: every[one.name] for one in fields(cls) if one.name in every}
        return cls(**{**named, "description": train["__doc__"], **more})

    def weights(self, config: C) -> Weights:
        """A model's parameters, by its plan on the meta device; tied tensors count once."""
        key = self.shape(config)
        if key not in self._weights:
            from param_groups import Role

            by_role = Counter[str]()
            for row in self.plan(config).rows:
                by_role[row.role] += math.prod(row.shape)
            looked_up = {role for role in by_role if Role(role).facts.layout in ("table", "vector")}
            matrices = sum(count for role, count in by_role.items() if role not in looked_up)
            self._weights[key] = Weights(by_role, matrices)
        return self._weights[key]

    def blank(self, config: C, rows: int) -> tuple[nn.Module, Loss, object]:
        """`build_blank` on the meta device; UserError if the experiment has none."""
        import torch

        if self.build_blank is None:
            raise UserError(
                f"{self.name}/train.py: EXPERIMENT has no build_blank, which plans without data "
                "and simulated steps need; add one as in nanolm_c4/train.py"
            )
        with torch.device("meta"):
            return self.build_blank(config, rows)

    def plan(self, config: C) -> Plan:
        """Every tensor's numbers, of a model on the meta device, without data."""
        return self.build_plan(config, self.blank(config, rows=1)[0])

    def parameters(self, config: C) -> dict[str, int]:
        """Numbers of parameters: embedding and non_embedding, and total, their sum."""
        by_role = self.weights(config).by_role
        embedding, total = sum(by_role[role] for role in self.embedding), by_role.total()
        return {"embedding": embedding, "non_embedding": total - embedding, "total": total}

    def flops(self, config: C) -> float:
        """Floating-point operations of the whole training: 2 per product of a forward pass, and
        twice as many of the backward pass. Evaluation and probes are not counted."""
        samples = config.training.steps * config.training.batch_size
        return 6.0 * samples * self.products(config, self.weights(config))

    def check_data(self, config: C) -> None:
        """Raises UserError if data that the config names are not on this machine; reads none."""
        for key in self.reads:
            named: object = config
            for word in key.split("."):
                named = getattr(named, word, None)
            if named is None or Path(str(named)).expanduser().exists():
                continue
            raise UserError(
                f"{key}: {named} does not exist on this machine; put the data there, or set "
                f"{key}; `bash scripts/download.sh` says how to get the papers' data"
            )

    def run(self, config: C, run_dir: Path, progress: Progress | None = None) -> Summary:
        """Trains one config into `run_dir`, unless it is done; returns its summary.

        `progress(step, steps, loss)` is called after every step, see `training.task.Progress`.
        """
        from training import environment, processes, runs
        from training.loop import train

        environment.commit()  # of the code that trains; files may change while it does
        state = processes.state()
        micro_batches, samples = config.training.split(state.num_processes)
        task = self.build_task(config)
        lines = [
            f"batch {config.training.batch_size} = {state.num_processes} processes x "
            f"{micro_batches} micro-batches of {samples}",
            *self.arithmetic(task),
        ]
        if state.is_main_process:
            print(*lines, sep="\n", file=sys.stderr)
        return runs.train_once(
            run_dir, config, task.plan, lambda: train(task, run_dir, progress), task.data_checksum
        )

    def main(self, argv: Sequence[str] | None = None) -> None:
        """`CONFIG.yaml [key=value ...] [--run-dir DIR] [--plan [--json]]`, all keys in --help.

        Exit code 0, 2 for a user's mistake (one line), 75 when a signal stopped the run.
        """
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.name}.train",
            description=self.description,
            epilog="config keys, to set as key=value:\n" + describe(self.config),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add, single = parser.add_argument, f"results/{self.name}/single"
        add("config", type=Path, help="YAML file, for example in configs/")
        add("overrides", nargs="*", default=[], metavar="key=value", help="changes to the config")
        add(
            "--run-dir", type=Path, help=f"folder of the run (default: {single}/<id of the config>)"
        )
        add("--plan", action="store_true", help="print every tensor's numbers and stop")
        add("--json", action="store_true", help="with --plan: as JSON")
        args = parser.parse_intermixed_args(argv)  # overrides before or after the options
        if args.json and not args.plan:
            parser.error("--json goes with --plan")
        with one_line_errors(OSError):
            if {"experiment", "config"} <= read_yaml(args.config).keys():
                raise UserError(
                    f"{args.config}: this is a file of many runs, not the config of one: python -m "
                    f"sweeps run {args.config} trains them"
                )
            config = load(self.config, args.config, args.overrides)
            if args.plan:
                from param_groups.plan import dumps

                plan = self.plan(config)
                print(dumps(plan) if args.json else plan.table())
            else:
                self._train(config, args.config, args.run_dir)

    def _train(self, config: C, file: Path, run_dir: Path | None) -> None:
        """One run with progress on stderr."""
        from training import processes, runs, signals

        run_dir = run_dir or runs.RESULTS / self.name / "single" / runs.run_id(config)
        written = run_dir / "config.yaml"
        if written.exists() and written.samefile(file) and not (run_dir / "plan.json").exists():
            raise UserError(
                f"{file}: the run would write its own config over it; choose another --run-dir"
            )
        summary = self.run(config, run_dir, Steps())
        if processes.state().is_main_process:
            outcome = f"{summary['status']}: {self.result(summary)}; {run_dir}/summary.json"
            print(outcome, file=sys.stderr)
        processes.leave()  # together: torchrun ends all once the first one is gone
        if summary["status"] == "stopped":
            raise SystemExit(signals.STOPPED)


class Steps:
    """A line on stderr per logged step, with the time that is left."""

    first, begun = 0, 0.0

    def __call__(self, step: int, steps: int, loss: float | None) -> None:
        if not self.first:
            self.first, self.begun = step, time.monotonic()
        if loss is not None:
            rest = (time.monotonic() - self.begun) / max(1, step - self.first) * (steps - step)
            left = f"  {rest:.0f} s left" if self.first < step < steps else ""
            print(f"step {step}/{steps}  train loss {loss:.4f}{left}", file=sys.stderr)


def load_experiment(name: str, named_in: Path | str | None = None) -> Experiment[Any]:
    """The experiment of folder `name`, which the file `named_in` asks for.

    This is the only import of an experiment by its name. Raises UserError when the folder has no
    train.py, or that has no EXPERIMENT.
    """
    where = "" if named_in is None else f"{named_in}: "
    try:
        if not all(word.isidentifier() for word in name.split(".")):
            raise ModuleNotFoundError(name=name)
        module = importlib.import_module(f"{name}.train")
    except ModuleNotFoundError as error:
        if error.name not in (name, f"{name}.train"):
            raise
        folders = sorted(path.parent.name for path in Path().glob("*/train.py"))
        raise UserError(
            f"{where}experiment {name!r} has no train.py here{nearest(name, folders)}; run from "
            "the repository's root and give the folder's name"
        ) from None
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"{where}{module.__file__} has no EXPERIMENT; add one that is a "
            "training.experiment.Experiment, as in nanolm_c4/train.py"
        )
    return experiment
