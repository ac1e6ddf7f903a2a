"""The command line that every experiment's train.py shares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.config import RunConfig, Section, describe

Progress = Callable[[int, int, float], None]


def parser(experiment: str, kind: type[Section], description: str) -> argparse.ArgumentParser:
    """`CONFIG.yaml [key=value ...] [--run-dir DIR] [--plan [--json]]`, all keys in --help."""
    result = argparse.ArgumentParser(
        prog=f"python -m {experiment}.train",
        description=description,
        epilog="config keys, to set as key=value:\n" + describe(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("config", type=Path, help="YAML file, for example in configs/")
    result.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    result.add_argument(
        "--run-dir",
        type=Path,
        help=f"folder of the run (default: results/{experiment}/single/<id of the config>)",
    )
    result.add_argument("--plan", action="store_true", help="print every tensor's numbers and stop")
    result.add_argument("--json", action="store_true", help="with --plan: as JSON")
    return result


def parse(
    arguments: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parses the command; overrides may stand before or after the options."""
    args = arguments.parse_intermixed_args(argv)
    if args.json and not args.plan:
        arguments.error("--json goes with --plan")
    return args


def train(
    experiment: str,
    config: RunConfig,
    run: Callable[[RunConfig, Path, Progress], dict[str, Any]],
    run_dir: Path | None,
    result: Callable[[dict[str, Any]], str],
) -> None:
    """Runs one config with progress on stderr; exit code 75 if a signal stopped it.

    `result` says a summary's outcome in words.
    """
    from training import allocator, processes, runs, signals

    allocator.keep_memory()
    run_dir = run_dir or runs.RESULTS / experiment / "single" / runs.run_id(config)
    summary = run(config, run_dir, _show)
    if processes.state().is_main_process:
        words = f"{summary['status']}: {result(summary)}; {run_dir}/summary.json"
        print(words, file=sys.stderr)
    if summary["status"] == "stopped":
        processes.state().wait_for_everyone()  # torchrun ends all once the first one is gone
        raise SystemExit(signals.STOPPED)


def _show(step: int, steps: int, loss: float) -> None:
    print(f"step {step}/{steps}  train loss {loss:.4f}", file=sys.stderr)
