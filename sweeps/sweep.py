"""Sweeps: a grid of configs becomes runs, runs become one table.

    python -m sweeps run nanolm_c4/sweeps/quickstart.yaml --workers 2 [--dry-run]

Runs that are done are not run again; runs that were stopped or killed go on from their newest
checkpoint. Several launchers, on one machine or on several that share the results folder, can work
on one sweep: a run that another one holds is left to it. A run that another sweep of the experiment
has finished, at the same commit, is copied from there.

With `extend`, a cell of the grid (one curve at one width, say) whose best learning rate lies at an
edge gets the next rate, until the optimum is inside or the limit is reached; with `coverage`, rates
above it follow until the first unstable one is known. With `confirm`, a cell is searched over
several keys: the neighbours of its best point are run until none of them is better. A sweep file
may hold `presets`, other sizes of the same sweep. `results.csv` has one row per run, by curve and
rising grid values; `probes.csv` the alignment of every dense layer where runs were probed;
`metrics.csv` and `observations.csv`, where the file asks for them, what runs logged and observed;
`observed_kernels.csv` and `observed_attention.csv` the kernels and attention logits of the first
and last observed step.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps import workers
from sweeps.progress import Board
from sweeps.results import (
    write_manifest,
    write_metrics,
    write_observations,
    write_observed_attention,
    write_observed_kernels,
    write_probes,
    write_results,
)
from sweeps.scheduler import Scheduler, cell_name
from sweeps.sweep_file import Sweep, load_sweep
from training import runs
from training.errors import one_line_errors
from training.signals import STOPPED


def run_sweep(
    sweep: Sweep, count: int, threads: int, launch: Sequence[str] = ()
) -> Scheduler:
    """Runs what is not done in `count` workers; returns the scheduler with every summary.

    Raises KeyboardInterrupt when interrupted, after every run at work here has saved a checkpoint
    (at once when interrupted again), and whatever ended a worker's thread.
    """
    scheduler = Scheduler(sweep)
    write_manifest(sweep)
    board = Board(scheduler, sweep.experiment.flops)

    def serve(index: int, worker: workers.Worker) -> None:
        """One thread: a worker process and the points it runs."""
        while (point := scheduler.take()) is not None:
            board.start(index, point)
            progress = functools.partial(board.step, index)
            workers.attempt(worker, scheduler, point, sweep, progress, board.note)
            with scheduler.condition:
                write_manifest(sweep)
                write_results(sweep, scheduler.summaries)
            board.done(index, point, scheduler)

    crew = workers.crew(count, threads, launch) if scheduler.waiting() else []
    try:
        workers.run_all(crew, scheduler, serve)
    finally:
        board.close()
    write_manifest(sweep)
    write_results(sweep, scheduler.summaries)
    write_probes(sweep, scheduler.summaries)
    write_metrics(sweep, scheduler.summaries)
    write_observations(sweep, scheduler.summaries)
    write_observed_kernels(sweep, scheduler.summaries)
    write_observed_attention(sweep, scheduler.summaries)
    return scheduler


def dry_run(sweep: Sweep) -> str:
    """What a sweep would run, one line per run that is not done."""
    scheduler = Scheduler(sweep, looks=True)
    lines = [
        f"{cell_name((point.curve, point.values))} seed={point.seed}  {point.run}"
        for point in scheduler.waiting()
    ]
    flops = sum(sweep.experiment.flops(point.config) for point in scheduler.waiting())
    total = f"{len(lines)} of {len(sweep.points)} runs to do, about {flops:.3g} FLOPs"
    return "\n".join([*sweep.assumed, *lines, total])


@dataclass(frozen=True)
class Options:
    """One launcher: what the command line, or a job on a cluster, asks for."""

    sweep: Path
    preset: str | None = None
    curves: tuple[str, ...] | None = None
    workers: int = 1
    threads: int | None = None
    results: Path = runs.RESULTS
    launch: tuple[str, ...] = ()

    def load(self, draft: bool = False) -> Sweep:
        """The sweep with the chosen preset and curves."""
        return load_sweep(self.sweep, self.results, self.preset, self.curves, draft)


def run(options: Options) -> int:
    """Runs a sweep; the exit code: 0, 1 if a run failed, 75 when stopped. Or a UserError."""
    threads = workers.threads_each(options.workers, options.threads)
    sweep = options.load()
    try:
        scheduler = run_sweep(sweep, options.workers, threads, options.launch)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    for line in scheduler.report():
        print(line, file=sys.stderr)
    print(sweep.folder / "results.csv")
    failed = any(summary["status"] == "failed" for summary in scheduler.summaries.values())
    return int(failed)


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Options of every command that runs a sweep."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("sweep", type=Path, help="YAML file, for example in nanolm_c4/sweeps/")
    parser.add_argument("--preset", help="another size of the sweep that its file holds")
    parser.add_argument("--curves", nargs="+", metavar="NAME", help="only these curves")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--threads", type=int, help="threads per worker (default: cores / workers)")
    parser.add_argument("--results", type=Path, default=runs.RESULTS, help="results folder")
    parser.add_argument(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="start each run by this command, such as 'accelerate launch --config_file FILE'",
    )
    return parser


def options_from(args: argparse.Namespace) -> Options:
    """The options of a parsed command line."""
    curves = None if args.curves is None else tuple(args.curves)
    return Options(
        args.sweep,
        args.preset,
        curves,
        args.workers,
        args.threads,
        args.results,
        tuple(args.launch),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a run failed, 2 for a user's mistake, 75 when stopped."""
    commands = parser("python -m sweeps run", __doc__)
    commands.add_argument("--dry-run", action="store_true", help="list the runs to do and stop")
    args = commands.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers go, too
    with one_line_errors(OSError):
        options = options_from(args)
        if args.dry_run:
            print(dry_run(options.load(draft=True)))
            return
        code = run(options)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
