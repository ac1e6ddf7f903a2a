"""The coordinate check: do activations and updates scale with size as the rule says?

    param-groups check FILE.py                    your own model: task(width, seed) -> Check
    param-groups check hf:gpt2                    a stock model with the rules of its trace
    param-groups check timm:vit_small_patch16_224 --rule mup standard one_rate

First a plan's numbers are compared with published exponents of its rule, or with what stability
demands of any other (theory.py). Then the model is trained for a few steps at several widths and
seeds, and the power of the width is fitted in the RMS of every module's output, of its change, and
of every tensor's update (measuring.py, slopes.py). Exponents of the theory differ by halves, so the
default tolerance is 1/4: a slope is judged by the nearest half.

A file has `def task(width: int, seed: int) -> Check` with model, plan, batches and loss. A stock
model is the model type of a Hugging Face config or a name of timm's; small ones of several widths
are built from the config, untied.

Writes coordinate_check.csv and .json, and with matplotlib coordinate_check.png. Exit code: 0; 1 if
a verdict is bad (grows, vanishes, differs, unclear, not finite); 2 for a mistake of yours, and
where no verdict is bad but a rate depends on what was not judged.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from param_groups.check import judging, measuring, slopes, stock
from param_groups.check.measuring import Build, Check, Measurement
from param_groups.check.written import results_in, write, write_table
from param_groups.exit_code import Verdict
from param_groups.model.factors import unnamed
from param_groups.model.trace import Trace, traced
from param_groups.plan import Plan
from param_groups.roles import PlanError, Role, Rule

TASK = ("task(width, seed)", "a param_groups.check.Check (examples/coordinate_check_mlp.py is one)")


@dataclass(frozen=True)
class Target:
    """What a check is of: how to build it, its name, its results' subfolder, settings to save."""

    build: Build
    name: str
    part: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rules: Callable[[], Sequence[Rule]] = tuple  # of a trace that its plans were made with


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every check has."""
    add, known = parser.add_argument, "at least 3 (default 64 128 256 512)"
    add("--widths", type=int, nargs="+", default=measuring.WIDTHS, help=known)
    add("--steps", type=int, default=measuring.STEPS, help="optimiser steps (default %(default)s)")
    add("--seeds", type=int, default=measuring.SEEDS, help="seeds per width (default %(default)s)")
    add("--tolerance", type=float, default=slopes.TOLERANCE, help="of a slope (default 0.25)")
    add("--out", type=Path, help="folder of the results (default coordinate_check/NAME)")


def check_options(args: argparse.Namespace) -> None:
    """PlanError for options that no slope can be fitted with."""
    measuring.check_numbers(args.widths, args.steps, range(args.seeds))
    if not 0 < args.tolerance < math.inf:
        raise PlanError(f"--tolerance {args.tolerance}: expected a positive number")


def parser_of(prog: str, text: str | None) -> argparse.ArgumentParser:
    """A command's parser, whose help is its module's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=text, formatter_class=raw)


def main(argv: Sequence[str]) -> None:
    """`param-groups check ...`; see the module for its exit codes."""
    parser = parser_of("param-groups check", __doc__)
    parser.add_argument("target", help="FILE.py, hf:NAME or timm:NAME")
    parser.add_argument(
        "--rule", nargs="+", choices=stock.RULES, help="of a stock model (default mup standard)"
    )
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(args)
    if args.target.partition(":")[0] in ("hf", "timm"):
        for width in args.widths:
            stock.sizes(args.target, width)
        targets = [stock_target(args.target, rule) for rule in args.rule or ("mup", "standard")]
    elif args.rule:
        raise PlanError("--rule goes with hf:NAME or timm:NAME; a file makes its own plan")
    else:
        targets = [file_target(Path(args.target), args.widths)]
    outcomes = [run(target, args) for target in targets]
    if any(outcomes):
        raise Verdict(1 if 1 in outcomes else 2)


def stock_target(name: str, rule: str) -> Target:
    """A stock model under one rule; prints what of its forward pass cannot be set."""
    note = stock.planned(name, rule, stock.BASE_WIDTH)[2]
    print(f"{name} under {rule}" + (f"; {note}" if note else ""))
    settings = {"rule": rule, "note": note}
    return Target(stock.check(name, rule), name.replace(":", "-"), rule, settings)


def file_target(path: Path, widths: Sequence[int] = measuring.WIDTHS) -> Target:
    """A user's file with task(width, seed)."""
    task = Ruled(task_of(path), widths)
    return Target(task, path.stem, rules=task.rules)


class Ruled:
    """A user's task whose plans may be functions of rules: such a plan is given the rules of a
    trace, which is made once, and only then."""

    def __init__(self, task: Build, widths: Sequence[int]) -> None:
        self.task, self.trace = task, functools.cache(lambda: trace_of(task, widths))

    def __call__(self, width: int, seed: int) -> Check:
        check = measuring.checked(self.task(width, seed))
        if callable(check.plan):
            check = replace(check, plan=check.plan([*self.trace().rules]))
        return check

    def rules(self) -> Sequence[Rule]:
        """The rules that plans were made with; none if no plan asked for them."""
        return self.trace().made if self.trace.cache_info().currsize else ()


def trace_of(task: Build, widths: Sequence[int]) -> Trace:
    """What a trace reads of a task's models at the two smallest widths, in one pass to the loss."""
    first = measuring.checked(task(min(widths), 0))
    run = lambda model: first.loss(model, first.batches[0])
    return traced(lambda width: task(width, 0).model, run, sorted(widths)[:2])


def task_of(path: Path) -> Build:
    """The task of a user's file; PlanError for a file that is none, or has none."""
    return function_of(load_module(path), path, *TASK)


def load_module(path: Path) -> ModuleType:
    """A user's file, run once, which may import modules beside it; PlanError for one that is no
    Python file."""
    if not (path.is_file() and path.suffix == ".py"):
        raise PlanError(f"{path}: cannot read the file; give FILE.py, hf:NAME or timm:NAME")
    sys.path.insert(0, str(path.resolve().parent))  # of modules beside it, as `python FILE` has it
    spec = importlib.util.spec_from_file_location(path.stem, os.path.abspath(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def function_of(module: ModuleType, path: Path, signature: str, returns: str) -> Callable[..., Any]:
    """A function of a user's module; PlanError without one that can be called so."""
    name = signature.partition("(")[0]
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        raise PlanError(f"{path}: no function {signature} in it; add one that returns {returns}")
    try:
        inspect.signature(function).bind(*signature.split(","))
    except TypeError as error:
        raise PlanError(f"{path}: {name} is called as {signature}: {error}") from None
    return function


def _unnamed_queries(build: Build, plans: Mapping[int, Plan], device: torch.device) -> list[str]:
    """A line where plans say nothing of what a model's attentions multiply by."""
    width = min(plans)
    if any(factor.name == "attention_scale" for factor in plans[width].forward):
        return []
    check, roles = build(width, 0), {row.name: Role(row.role) for row in plans[width].rows}
    batch = tree_map_only(torch.Tensor, lambda one: one.to(device), check.batches[0])
    said = unnamed(check.model.to(device), lambda model: check.loss(model, batch), roles)
    return [f"not judged: {said}"] if said else []


def run(target: Target, args: argparse.Namespace) -> int:
    """Measures, writes the results, prints the verdicts; the exit code."""
    folder = (args.out or Path("coordinate_check") / target.name) / target.part
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    progress = lambda line: print(line, file=sys.stderr)

    def of_seeds(seeds: Sequence[int]) -> Measurement:
        options: dict[str, Any] = {"steps": args.steps, "seeds": seeds, "device": device}
        return measuring.measure(target.build, args.widths, progress=progress, **options)

    with results_in(folder):
        measurement, powers, seeds = slopes.decided(of_seeds, args.seeds, args.tolerance)
    numbers = judging.judge(measurement.plans)
    numbers += judging.judge_optimizers(measurement.plans, measurement.held)
    rules = target.rules()
    left = judging.not_judged(measurement.plans, measurement.held, rules)
    left += _unnamed_queries(target.build, measurement.plans, device)
    code = 1 if slopes.failed(powers, numbers) else 2 if left else 0
    result = {
        "name": target.name,
        "widths": sorted(args.widths),
        "seeds": seeds,
        "steps": args.steps,
        "tolerance": args.tolerance,
        **target.settings,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(device),
        "passed": not code,
        "not_judged": left,
        "not_called": list(measurement.silent),
        "prescription": measurement.plans[min(measurement.plans)].prescription,
        "numbers": [asdict(one) for one in numbers],
        "slopes": [asdict(slope) for slope in powers],
    }
    table = folder / "coordinate_check.csv"
    write_table(table, measuring.Coordinate.__dataclass_fields__, map(astuple, measurement.points))
    write(folder / "coordinate_check.json", as_json(result))
    print(f"\n{slopes.numbers_table(numbers)}\n\n{slopes.table(powers)}\n")
    if seeds > args.seeds:
        print(f"{seeds} seeds per width: {args.seeds} left a verdict unclear")
    for line in [*judging.heads_note(measurement.plans, rules), *left]:
        print(line)
    if measurement.silent:
        print(f"never called, not measured: {', '.join(measurement.silent)}")
    print(f"{slopes.summary(powers, numbers, left)}\ntable: {table}")
    print(picture("draw", folder / "coordinate_check.png", measurement.points, result))
    return code


def picture(draw: str, path: Path, *what: Any) -> str:
    """Has a function of `figure` draw; the line that says where it is, or why there is none."""
    try:
        figure = importlib.import_module("param_groups.check.figure")
    except ImportError:
        return "no figure: matplotlib is not installed (pip install 'param-groups[check]')"
    getattr(figure, draw)(*what, path)
    return f"figure: {path}"


def as_json(result: Mapping[str, Any]) -> str:
    """A result as JSON, which knows no NaN and no infinity: they are null."""

    def known(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: known(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [known(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(known(result), indent=1, allow_nan=False) + "\n"
