"""What all benchmarks share: fresh processes, turns, spreads, memory, and the JSON document.

A case that is measured alone runs in its own process, so that neither warm caches nor what
malloc keeps passes from one to the next. Alternatives that are compared take turns in an order that
rotates, so that a drift of the machine meets them alike.
"""

from __future__ import annotations

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
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    document = {
        "environment": {**described, "threads": torch.get_num_threads()},
        "arguments": arguments,
        **more,
        "rows": list(rows),
    }
    text = json.dumps(document, indent=1, default=str)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Number, median, quartiles and least of some values."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return {"n": len(values), "median": median, "quartiles": [low, high], "min": min(values)}


# ------------------------------------------------------------------------------------------------
# Time


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
    found: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = actions[name]()
            if turn >= warmup:
                found[name].append(value)
    return found


def per_second(function: Callable[[], int], clock: Callable[[], float]) -> float:
    """How many of what `function` counts come per second."""
    started = clock()
    count = function()
    return count / (clock() - started)


def speed(
    function: Callable[[], int], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, Any]:
    """The spread of `per_second` over some repeats, after one that does not count."""
    count = function()
    return {**spread([per_second(function, clock) for _ in range(repeats)]), "images": count}


def ratios(times: Mapping[str, Sequence[float]], above: str, below: str) -> dict[str, Any]:
    """The spread of the ratio of two actions within each turn."""
    return spread([x / y for x, y in zip(times[above], times[below], strict=True)])


# ------------------------------------------------------------------------------------------------
# Memory of this process


def resident_mb(key: str = "VmRSS") -> float:
    """Resident set from /proc in MB, "VmHWM" for its peak; ru_maxrss would include the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def reset_peak(device: str) -> None:
    """Begins another peak."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: str) -> float:
    """The largest resident set since `reset_peak`; on a GPU the peak of torch's allocator."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resident_mb("VmHWM")


# ------------------------------------------------------------------------------------------------
# A process per case


def add_case(made: argparse.ArgumentParser) -> None:
    """The hidden option that `fresh` calls a benchmark with."""
    made.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)


def fresh(module: str, case: Case, variables: Mapping[str, str | None] | None = None) -> Any:
    """What `python -m benchmarks.MODULE --case CASE` prints last, as JSON.

    `variables` are added to the environment, None removes one. SystemExit if the process fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"]), **(variables or {})}
    command = [sys.executable, "-m", f"benchmarks.{module}", "--case", json.dumps(case)]
    done = subprocess.run(
        command,
        env={key: value for key, value in environment.items() if value is not None},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"error: the process of {case} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(case: Case, measure: Callable[[Case], Any]) -> None:
    """The measuring process: one line of JSON."""
    import torch

    torch.set_num_threads(case["threads"])
    print(json.dumps(measure(case)))


# ------------------------------------------------------------------------------------------------
# The decoder that is timed


def paper_decoder(width: int, head_dim: int) -> Any:
    """Everett et al.'s decoder at one width: L = 8, context 512, V = 32,101."""
    from nanolm_c4.model import Decoder

    heads = max(1, width // head_dim)
    return Decoder(
        vocab_size=32_101,
        context=512,
        layers=8,
        heads=heads,
        head_dim=width // heads,
        mlp_ratio=4,
        attention_scale=head_dim**-0.5,
    )


def decoder_config(case: Case, **training: Any) -> Any:
    """nanolm_c4's config for a case: muP, Adam, float32 unless `training` says otherwise."""
    from nanolm_c4.config import Config
    from training.config import validate

    shape = {key: case[key] for key in ("width", "layers", "head_dim", "context")}
    fields = {
        "model": {**shape, "vocab_size": case["vocab"]},
        "prescription": {"parameterization": "mup", "alignment": "full", "base_width": 64},
        "optimizer": {"name": "adam", "lr": 2**-9},
        "schedule": {"name": "constant"},
        "training": {"steps": 1, "batch_size": case["batch"], **training},
        "data": {},
    }
    return validate(Config, fields, "benchmark")


def random_rows(case: Case, count: int) -> Any:
    """Token ids (count, context + 1)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(case["vocab"], (count, case["context"] + 1), generator=generator)
