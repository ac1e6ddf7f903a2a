"""What all benchmarks share: fresh processes, turns, spreads, and the JSON document.

A case that is measured alone runs in its own process, so that neither warm caches nor what
malloc keeps passes from one to the next. Alternatives that are compared take turns in an order that
rotates, so that a drift of the machine meets them alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Case = dict[str, Any]


def parser(text: str) -> argparse.ArgumentParser:
    """A benchmark's command line: its docstring as help, and --json."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=text, formatter_class=raw)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    return made


def show(
    options: argparse.Namespace, device: str, rows: Sequence[Mapping[str, Any]], **more: Any
) -> None:
    """Prints the JSON document: environment, arguments and results; with --json keeps it, too."""
    import torch

    from training import environment

    described = environment.describe(torch.device(device))
    arguments = {key: value for key, value in vars(options).items() if key not in ("json", "case")}
    described["threads"] = torch.get_num_threads()
    document = {"environment": described, "arguments": arguments, **more, "rows": list(rows)}
    text = json.dumps(document, indent=1, default=str)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Number, median, quartiles and least of some values."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return {"n": len(values), "median": median, "quartiles": [low, high], "min": min(values)}


def milliseconds(function: Callable[[], object], device: str = "cpu") -> float:
    """The time of a call, on a GPU until its work is done."""
    import torch

    started = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def take_turns(
    actions: Mapping[str, Callable[[], float]], repeats: int, warmup: int
) -> dict[str, list[float]]:
    """What every action returns in every turn after `warmup` ones; each begins with another."""
    values: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = actions[name]()
            if turn >= warmup:
                values[name].append(value)
    return values


def ratios(times: Mapping[str, Sequence[float]], above: str, below: str) -> dict[str, Any]:
    """The spread of the ratio of two actions within each turn."""
    return spread([x / y for x, y in zip(times[above], times[below], strict=True)])


def fresh(module: str, case: Case) -> Any:
    """What `python -m benchmarks.MODULE --case CASE` prints last, as JSON.

    SystemExit if the process fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
    if case["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: the process of {case} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
