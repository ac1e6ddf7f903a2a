"""Many runs: grids with their extensions, confirmed searches, and studies of constants.

    python -m sweeps run nanolm_c4/sweeps/quickstart.yaml --workers 2
    python -m sweeps run FILE training.steps=50 --where 'model.width<=64'
    python -m sweeps run FILE --dry-run         what it would run
    python -m sweeps status FILE                where it stands, from any machine
    python -m sweeps cost FILE [FILE ...]       FLOPs, time and memory, before anything runs

`search` is another word for `run`. Runs that are done are not run again; what was stopped or killed
resumes from its newest checkpoint. A run that another sweep of the experiment has finished, at the
same commit, is copied from there. See sweeps/README.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps import cost, pool, task
from sweeps.driver import Driver
from sweeps.progress import status
from sweeps.reuse import Store, of_other_commits, of_other_data
from sweeps.search import SearchWork
from sweeps.search_file import load_search
from sweeps.sources import is_override, preset_of
from sweeps.storage import Storage
from sweeps.sweep import SweepWork, Work
from sweeps.sweep_file import Sweep, load_sweep
from training import runs
from training.errors import UserError, one_line_errors
from training.files import Busy, locked
from training.signals import STOPPED


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a run failed, 2 for a user's mistake, 75 when stopped."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # Overrides may stand anywhere; argparse gives some of them to the list before.
    changes = [w for w in [*args.file, *(args.curves or ()), *rest] if is_override(w)]
    files = [w for w in [*args.file, *rest] if w not in changes and not w.startswith("-")]
    unknown = [w for w in rest if w.startswith("-")]
    if unknown or not files:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" if unknown else "which file?")
    if files[1:] and args.command != "cost":
        parser.error(f"one sweep file; `cost` alone takes several: {' '.join(files)}")
    curves = [name for name in args.curves or () if name not in changes] or None
    args.said = {"preset": args.preset, "curves": curves, "overrides": changes, "where": args.where}
    args.files = list(map(Path, files))
    args.file = args.files[0]
    with one_line_errors(OSError):
        if args.command == "cost":
            return cost.run(args, lambda: [_look(args, file) for file in args.files])
        if args.command == "status":
            return print(status(_look(args, args.file)))
        code = _run(args)
    if code:
        raise SystemExit(code)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sweeps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, line in (
        ("run", "train what a sweep or search file asks for"),
        ("status", "where a sweep or search stands"),
        ("cost", "runs, FLOPs, time and memory of sweep files"),
    ):
        command = commands.add_parser(
            name,
            aliases=["search"] if name == "run" else (),
            help=line,
            description=cost.__doc__ if name == "cost" else line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = command.add_argument
        many = " of sweeps, for example nanolm_c4/sweeps/*" if name == "cost" else ""
        # What argparse leaves over are changes: `main` takes them wherever they stand.
        add(
            "file",
            nargs="+" if many else 1,
            metavar="FILE" if many else "FILE [key=value ...]",
            help=f"YAML file{many}, and key=value: changes to the config of every run",
        )
        add(
            "--where",
            action="append",
            default=[],
            metavar="CONDITION",
            help="only the runs whose config has this, such as 'model.width<=256' (< <= > >= == "
            "!=); may be repeated",
        )
        add("--preset", help="another size of the sweep that its file holds")
        add("--curves", nargs="+", metavar="NAME", help="only these curves")
        add("--results", type=Path, default=runs.RESULTS, help="results folder")
        add(
            "--storage",
            metavar="URL",
            help="a search's trials in this database "
            "(default: journal.jsonl in its results folder)",
        )
        if name == "cost":
            cost.add_arguments(add)
        if name == "run":
            _add_engine(command)
            add("--dry-run", action="store_true", help="list what is to do and stop")
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """The options that say where runs run."""
    add = parser.add_argument_group("where runs run").add_argument
    add("--engine", choices=sorted(pool.ENGINES), default="local", help="default: local")
    add("--workers", type=int, help="runs at a time (default: what the GPUs hold, without GPUs 1)")
    add("--threads", type=int, help="threads per run (default: an equal share of the cores)")
    add(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="start each run by this command, such as 'accelerate launch --config_file FILE'; "
        "with {processes} in it only those runs that need several",
    )
    add("--address", help="ray: a cluster's address (default: Ray on this machine)")


def _options(args: argparse.Namespace) -> pool.PoolOptions:
    return pool.PoolOptions(args.workers, args.threads, tuple(args.launch), args.address)


def read(args: argparse.Namespace, file: Path, looks: bool) -> Any:
    """The sweep or search in a file; with `looks` nothing is refused as missing."""
    is_search = "search" in preset_of(file, args.preset)
    if args.storage and not is_search and args.command != "cost":  # of both kinds
        raise UserError(f"--storage: {file} is a sweep, which has no trials to store")
    load = load_search if is_search else load_sweep
    return load(file, args.results, draft=looks, **args.said)


def work_of(asked: Any, storage: str | None, looks: bool) -> Work:
    """What is left of a sweep or search; with `looks` nothing is written."""
    recall = Store(asked.folder, looks).recall
    if isinstance(asked, Sweep):
        return SweepWork(asked, recall)
    return SearchWork(asked, recall, Storage(asked.folder, storage))


def _run(args: argparse.Namespace) -> int:
    """Runs what is left of a sweep or search, or lists it."""
    asked = read(args, args.file, looks=args.dry_run)
    if args.dry_run:
        pool.check(args.engine, _options(args))
        work = work_of(asked, args.storage, looks=True)
        print(work.dry_run(), flush=True)
        asked.refuse_missing_data(point.config for point in work.left)
        return 0
    with ExitStack() as held:  # before it reads what is done: two would number their trials alike
        try:
            held.enter_context(locked(asked.folder, "sweep"))
        except Busy:
            raise UserError(
                f"{asked.folder}: another driver is at work here; `python -m sweeps status "
                f"{args.file}` shows how far it is"
            ) from None
        return _drive(asked, args)


def _drive(asked: Any, args: argparse.Namespace) -> int:
    """The driver of a sweep or search to its end; the exit code."""
    work = work_of(asked, args.storage, looks=False)
    for line in (*of_other_commits(work.results.values()), *work.before()):
        print(line, file=sys.stderr)
    options = _options(args)
    launched = task.processes_of_all(options.launch)

    def needs(point: Any) -> pool.Needs:
        """What the file says; a launch command of all runs has a GPU for each of its processes."""
        needed = work.needs(point)
        return replace(needed, gpus=launched) if needed == pool.Needs() else needed

    if not Driver(work, pool.open_pool(args.engine, options), needs).run():
        print("stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    for line in (*of_other_data(work.ended()), *work.report()):
        print(line, file=sys.stderr)
    print(work.table)
    return int(bool(work.reasons))


def _look(args: argparse.Namespace, file: Path) -> Work:
    """A sweep or search of which nothing is written."""
    return work_of(read(args, file, looks=True), args.storage, looks=True)


if __name__ == "__main__":
    main()
