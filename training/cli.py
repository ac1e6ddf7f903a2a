"""The command line that every experiment's train.py shares."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.config import Section, describe


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
