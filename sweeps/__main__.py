"""Many runs: grids with their extensions, confirmed searches, and studies of constants.

    python -m sweeps run nanolm_c4/sweeps/quickstart.yaml --workers 2
    python -m sweeps run FILE training.steps=50 --where 'model.width<=64'
    python -m sweeps run FILE --dry-run         what it would run, in a line
    python -m sweeps status FILE                where it stands, from any machine
    python -m sweeps cost FILE [FILE ...]       FLOPs and GPU-hours, before anything runs

`search` is another word for `run`. Runs that are done are not run again; what was stopped or killed
resumes from its newest checkpoint. See sweeps/README.md.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from sweeps import cost, pool
from sweeps.driver import Driver
from sweeps.pool import CARDS
from sweeps.progress import duration, on_a_core, say, status
from sweeps.request import LoadedFile, preset_of
from sweeps.search import SearchWork
from sweeps.study import Search, load_search
from sweeps.sweep import SweepWork, Work, of_other_commits, recall
from sweeps.sweep_file import Sweep, load_sweep
from training import runs
from training.errors import UserError, one_line_errors
from training.files import Busy, locked
from training.signals import STOPPED

CPU_MOST = 30 * 86400  # seconds of cores; beyond, the time of GPUs is shown


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a run failed, 2 for a user's mistake, 75 when stopped."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # Overrides may stand anywhere; argparse gives some of them to the list before.
    words = [*args.file, *(args.curves or ()), *rest]
    changes = [w for w in words if "=" in w and not (w.startswith("-") or os.path.exists(w))]
    files = [w for w in [*args.file, *rest] if w not in changes and not w.startswith("-")]
    unknown = [w for w in rest if w.startswith("-")]
    if unknown or not files:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" if unknown else "which file?")
    if files[1:] and args.command != "cost":
        parser.error(f"one sweep file; `cost` alone takes several: {' '.join(files)}")
    args.overrides = changes
    args.curves = [name for name in args.curves or () if name not in changes]
    paths = list(map(Path, files))
    code = 0
    with one_line_errors(OSError):
        if args.command == "cost":
            cost.run(args, [work_of(read(args, path, looks=True), looks=True) for path in paths])
        elif args.command == "status":
            print(status(work_of(read(args, paths[0], looks=True), looks=True)))
        else:
            code = _run(args, paths[0])
    if code:
        raise SystemExit(code)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m sweeps", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, line in (
        ("run", "train what a sweep or search file asks for"),
        ("status", "where a sweep or search stands"),
        ("cost", "runs, FLOPs and GPU-hours of sweep files"),
    ):
        about, alias = cost.__doc__ if name == "cost" else line, ["search"] * (name == "run")
        command = commands.add_parser(
            name, aliases=alias, help=line, description=about, formatter_class=raw
        )
        add = command.add_argument
        many = " of sweeps, for example nanolm_c4/sweeps/*" if name == "cost" else ""
        # What argparse leaves over are changes: `main` takes them wherever they stand.
        words = f"YAML file{many}, and key=value: changes to the config of every run"
        shown = "FILE" if many else "FILE [key=value ...]"
        add("file", nargs="+" if many else 1, metavar=shown, help=words)
        words = "only runs whose config has this, such as 'model.width<=256'; may be repeated"
        add("--where", action="append", default=[], metavar="CONDITION", help=words)
        add("--preset", help="another size of the sweep that its file holds")
        add("--curves", nargs="+", metavar="NAME", help="only these curves")
        add("--results", type=Path, default=runs.RESULTS, help="results folder")
        if name == "cost":
            add("--card", choices=[card.name for card in CARDS], default="H100", help="whose hours")
            add("--simulate", action="store_true", help="measure memory on fake tensors")
            add("--csv", type=Path, metavar="FILE", help="simulate, and write its table here")
            add("--json", action="store_true", help="all of it as JSON")
        if name == "run":
            add("--dry-run", action="store_true", help="say what is to do and stop")
            add("--verbose", action="store_true", help="with --dry-run: each input and each run")
            add("--strict", action="store_true", help="with --dry-run: 2 if data or GPUs lack")
            add("--gpus", type=int, help="with --dry-run: of a job (default: those here)")
            add = command.add_argument_group("where runs run").add_argument
            add("--engine", choices=sorted(pool.ENGINES), default="local", help="default: local")
            add("--workers", type=int, help="runs at a time (default: one per GPU, without GPUs 1)")
            add("--threads", type=int, help="threads per run (default: an equal share of cores)")
            words = (
                "start each run by this command, such as 'accelerate launch --config_file FILE'; "
                "with {processes} in it only those runs that need several"
            )
            add("--launch", type=shlex.split, default=[], metavar="COMMAND", help=words)
            add("--address", help="ray: a cluster's address (default: Ray on this machine)")
    return parser


def read(args: argparse.Namespace, path: Path, looks: bool) -> LoadedFile:
    """The sweep or search in a file; with `looks` nothing is refused as missing."""
    load = load_search if "search" in preset_of(path, args.preset) else load_sweep
    options = {"draft": looks, "overrides": args.overrides, "where": args.where}
    return load(path, args.results, args.preset, curves=args.curves, **options)


def work_of(file: LoadedFile, looks: bool) -> Work:
    """What is left of a sweep or search; with `looks` nothing is written."""
    summary_of = partial(recall, file.folder, looks=looks)
    if isinstance(file, Search):
        return SearchWork(file, summary_of)
    assert isinstance(file, Sweep)
    return SweepWork(file, summary_of)


def _run(args: argparse.Namespace, path: Path) -> int:
    """Runs what is left of a sweep or search, or says what that is."""
    options = pool.PoolOptions(args.workers, args.threads, tuple(args.launch), args.address)
    file = read(args, path, looks=args.dry_run)
    if args.dry_run:
        pool.check(args.engine, options)
        work = work_of(file, looks=True)
        more = [*file.sources.assumed, *work.listed()] if args.verbose else []
        lacking = dict.fromkeys(file.missing_data(point.config for point in work.left))
        most = max(map(work.needs, work.left), default=pool.Needs(), key=lambda one: one.gpus)
        print("\n".join([_headline(work, args.workers or 1), *more]), flush=True)
        if args.engine == "local" or args.gpus is not None:
            count = len(pool.visible_gpus()) if args.gpus is None else args.gpus
            if most.lacks(count):
                lacking[
                    f"note: {path}: its largest run needs {most.gpus} GPUs, and there are {count}; "
                    "take more nodes, or leave it out by --where"
                ] = None
        for line in lacking:
            say(line)
        return 2 if lacking and args.strict else 0
    with ExitStack() as held:  # before it reads what is done: two would number their trials alike
        try:
            held.enter_context(locked(file.folder, "sweep"))
        except Busy:
            raise UserError(
                f"{file.folder}: another driver is at work here; `python -m sweeps status {path}` "
                "shows how far it is"
            ) from None
        for leftover in file.folder.glob(".*.tmp"):  # of a driver that was killed as it wrote
            leftover.unlink(missing_ok=True)
        work = work_of(file, looks=False)
        for line in of_other_commits(work.results):
            say(line)
        if not Driver(work, pool.open_pool(args.engine, options)).run():
            say("stopped; the same command goes on from here")
            return STOPPED
    for line in work.report():
        say(line)
    print(work.table)
    return int(bool(work.reasons))


def _headline(work: Work, workers: int) -> str:
    """The name, the runs and the time of what is to do, as scripts add them up."""
    name, preset = work.file.path.stem, work.file.sources.preset
    more, flops, late = work.may_add()[0], work.todo[0], len(work.file.sources.assumed)
    seconds = on_a_core(flops, work.todo[1]) / workers
    hours = flops / (CARDS[0].bf16 * cost.UTILISATION) / 3600
    time = f"{duration(seconds)} on {workers} CPU core{'s' * (workers > 1)}"
    return (
        f"{name}{f' ({preset})' if preset else ''}: "
        f"{len(work.left)} of {len(work.points)} runs to do"
        f"{f' and up to {more} more' if more else ''}, {flops:.3g} FLOPs, about "
        + (time if seconds < CPU_MOST else f"{hours:,.{int(hours < 10)}f} {CARDS[0].name}-hours")
        + f"; inputs to come: {late} (see --verbose)" * bool(late)
    )


if __name__ == "__main__":
    main()
