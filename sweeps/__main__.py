"""Many runs: grids with their extensions, confirmed searches, and studies of constants.

    python -m sweeps run nanolm_c4/sweeps/quickstart.yaml --workers 2
    python -m sweeps run FILE --dry-run         what it would run
    python -m sweeps status FILE                where it stands, from any machine
    python -m sweeps cost FILE [FILE ...]       FLOPs, GPU-hours and memory, before anything runs
    python -m sweeps submit FILE [options]      the same command as a job of a SLURM cluster

`search` is another word for `run`. Runs that are done are not run again; what was stopped or killed
resumes from its newest checkpoint. A run that another sweep of the experiment has finished, at the
same commit, is copied from there. See sweeps/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sweeps import needs, pool
from training import runs
from training.config import apply_preset
from training.errors import UserError, one_line_errors
from training.files import Busy, locked
from training.signals import STOPPED

# Commands whose options stand in files of their own.
_ELSEWHERE = {"cost": "sweeps.cost", "submit": "sweeps.on_slurm"}


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a run failed, 2 for a user's mistake, 75 when stopped."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _ELSEWHERE:
        importlib.import_module(_ELSEWHERE[words[0]]).main(words[1:])
        return
    args = _parser().parse_args(words)
    with one_line_errors(OSError):
        code = args.command(args)
    if code:
        raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sweeps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add = commands.add_parser
    for word in ("run", "search"):
        command = add(word, help="train what a sweep or search file asks for")
        pool.add_arguments(_file(command, _run))
        command.add_argument("--gpu", choices=[gpu.name for gpu in needs.GPUS],
                             help="GPUs of the place where runs run (default: this machine's)")
        command.add_argument("--dry-run", action="store_true", help="list what is to do and stop")
    _file(add("status", help="where a sweep or search stands"), _status)
    for word, line in (
        ("cost", "runs, FLOPs, GPU-hours and memory of sweep files"),
        ("submit", "`run` as a job of a SLURM cluster"),
    ):
        add(word, help=line)
    return parser


def _file(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """The options that say which sweep is meant."""
    parser.set_defaults(command=command)
    parser.add_argument("file", type=Path, help="YAML file, for example in nanolm_c4/sweeps/")
    parser.add_argument("--preset", help="another size of the sweep that its file holds")
    parser.add_argument("--curves", nargs="+", metavar="NAME", help="only these curves")
    parser.add_argument("--results", type=Path, default=runs.RESULTS, help="results folder")
    parser.add_argument("--storage", metavar="URL", help="a search's trials in this database "
                        "(default: journal.jsonl in its results folder)")  # fmt: skip
    return parser


def read(args: argparse.Namespace, looks: bool):
    """The sweep or search in a file; with `looks` nothing is refused as missing."""
    from sweeps.sources import read_file

    data = apply_preset(read_file(args.file), args.preset, str(args.file))
    if "search" not in data:
        from sweeps.sweep_file import load_sweep

        if args.storage:
            raise UserError(f"--storage: {args.file} is a sweep, which has no trials to store")
        return load_sweep(args.file, args.results, args.preset, args.curves, draft=looks)
    from sweeps.search_file import load_search

    if args.curves:
        raise UserError(f"--curves: {args.file} is a search, which has no curves")
    return load_search(args.file, args.results, args.preset, draft=looks)


def work_of(asked: Any, storage: str | None, looks: bool):
    """What is left of a sweep or search; with `looks` nothing is written."""
    from sweeps.reuse import Store
    from sweeps.sweep_file import Sweep

    recall = Store(asked.folder, looks).recall
    if isinstance(asked, Sweep):
        from sweeps.sweep import SweepWork

        return SweepWork(asked, recall)
    from sweeps.search import SearchWork
    from sweeps.storage import Storage

    return SearchWork(asked, Storage(asked.folder, storage), recall)


@contextmanager
def _only_driver(folder: Path, file: Path) -> Iterator[None]:
    """Holds a sweep's folder: two drivers would number their trials alike. UserError if held."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder, "sweep"))
        except Busy:
            raise UserError(
                f"{folder}: another driver is at work here; `python -m sweeps status {file}` shows "
                "how far it is"
            ) from None
        yield


def _run(args: argparse.Namespace) -> int:
    """Runs what is left of a sweep or search."""
    asked = read(args, looks=args.dry_run)
    if args.dry_run:
        print(work_of(asked, args.storage, looks=True).dry_run())
        return 0
    with _only_driver(asked.folder, args.file):  # before it reads what is done
        return _drive(asked, args)


def _drive(asked: Any, args: argparse.Namespace) -> int:
    """The driver of a sweep or search to its end; the exit code."""
    from sweeps.driver import Driver

    work = work_of(asked, args.storage, looks=False)
    for line in work.before():
        print(line, file=sys.stderr)
    gpu = needs.memory_of(args.gpu)
    unsaid = "gpus" not in asked.config.needs.model_fields_set and args.gpus_per_node != 0
    if gpu is None and args.engine != "local" and unsaid:
        print(
            "this machine has no GPU to go by: every run gets 1 GPU, unless --gpu names one of the "
            f"cluster's or {args.file} says `needs: {{gpus: ...}}`", file=sys.stderr
        )  # fmt: skip
    engine = pool.open_pool(*pool.options(args))
    driver = Driver(
        work, engine, lambda point: needs.needs_of(work.experiment, point.config,
                                                   work.needs(point), gpu)
    )
    if not driver.run():
        print("stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    for line in work.report():
        print(line, file=sys.stderr)
    print(work.table())
    return int(work.failed)


def _status(args: argparse.Namespace) -> int:
    from sweeps.status import status

    print(status(work_of(read(args, looks=True), args.storage, looks=True)))
    return 0


if __name__ == "__main__":
    main()
