"""Sweeps and searches on a SLURM cluster: an array of jobs, each one launcher, through submitit.

    python -m sweeps submit nanolm_c4/sweeps/figure_2_adam.yaml --jobs 16 --gpus-per-node 8 \\
        --workers 8 --cpus-per-task 64 --time 12:00:00 --partition gpu

Every job does what `python -m sweeps run` (or `sweeps.search`) does with the same options:
jobs share the work through the locks of its runs, so their number changes nothing but speed, more
can be submitted at any time, and a job that finds nothing left to do ends at once. The results
folder must be on a file system with flock that all nodes see.

A job is warned `signal_delay_s` before its time limit, by default in time for its runs to save
what they need to go on; it is then requeued and goes on from there. What SLURM preempts or cancels
without that warning (SIGTERM) saves, too, and leaves it to SLURM whether it starts again.

The folder `slurm` beside the results holds the jobs' logs and submitit's own files. Those are
pickles that submitit writes and reads to start a job; nothing else ever reads them, least of all
for results.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sweeps.workers import stop_seconds, visible_gpus
from training.config import parse_yaml, read_yaml
from training.errors import UserError, one_line_errors
from training.signals import STOPPED

REQUEUES = 100
LOCAL_MINUTES = 14 * 24 * 60

# Words of submitit's that are no options of sbatch.
_NUMBERS = ("signal_delay_s", "array_parallelism")
_LISTS = ("setup", "teardown", "srun_args")
# Options of sbatch that this command sets itself, and how.
_OWN = {
    "account": "--account",
    "array": "--jobs",
    "cpus_per_task": "--cpus-per-task",
    "gpus_per_node": "--gpus-per-node",
    "mem": "--mem",
    "nodes": "--nodes",
    "ntasks": "--workers",
    "ntasks_per_node": "--workers",
    "partition": "--partition",
    "signal": "--slurm signal_delay_s=SECONDS",
    "time": "--time",
}


class _Stop:
    """The first SIGTERM or warning interrupts the launcher, which lets its runs save.

    submitit would answer its warning by requeueing the job at once; that comes afterwards.
    """

    def __init__(self) -> None:
        from submitit import JobEnvironment

        self.warning = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
        self.requeue = signal.getsignal(self.warning)
        self.received: list[int] = []
        for number in (signal.SIGTERM, self.warning):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) == 1:  # a second one must not cut short what the first one asked for
            raise KeyboardInterrupt

    def answer(self) -> None:
        """Requeues the job, which ends this process, if it was warned; else returns to end it.

        After a SIGTERM alone SLURM ends the job itself, and starts it again if it was preempted: a
        job that ended by its own will would not come back.
        """
        on_slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
        if on_slurm and self.warning not in self.received:
            print("saved; SLURM ends this job, and starts it again if it was preempted", flush=True)
        while on_slurm and self.warning not in self.received:
            time.sleep(1.0)
        if self.warning in self.received and callable(self.requeue):
            self.requeue(self.warning, None)


@dataclass(frozen=True)
class Launcher:
    """What a job runs: one launcher of a sweep or a search. submitit calls and requeues it."""

    module: str
    """sweeps.sweep or sweeps.search."""
    options: Any
    """The module's own."""

    def __call__(self) -> None:
        """Runs to the end; otherwise exits: 1 a run failed, 2 a user's mistake, 75 stopped."""
        stop = _Stop()
        with one_line_errors(OSError):
            code = self._run()
        if code == STOPPED:
            stop.answer()
        if code:
            raise SystemExit(code)

    def checkpoint(self) -> Any:
        """What submitit starts when the job comes back: the same, as the results are the state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _run(self) -> int:
        try:
            return importlib.import_module(self.module).run(self.options)
        except KeyboardInterrupt:  # before the first run or after the last one
            return STOPPED


_SHARED = ("preset", "curves", "workers", "threads", "results", "launch")


def launcher(args: argparse.Namespace) -> Launcher:
    """The launcher of a sweep or a search file; UserError for an option that its kind lacks."""
    module = "sweeps.search" if "search" in read_yaml(args.sweep) else "sweeps.sweep"
    kind = importlib.import_module(module).Options
    file, *known = (item.name for item in dataclasses.fields(kind))
    given = {name: getattr(args, name) for name in _SHARED}
    for name in given.keys() - set(known):
        if given.pop(name):
            raise UserError(f"--{name}: {args.sweep} is a search, which has no such option")
    return Launcher(module, kind(**{file: args.sweep, **given}))


def submit(job: Launcher, folder: Path, args: argparse.Namespace) -> list[str]:
    """Submits `args.jobs` times the same job, with logs in `folder`; their ids."""
    if args.local:
        return _submit_local(job, folder, args)
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedSubmissionError, UncompletedJobError

    parameters = slurm_parameters(args)
    try:
        executor = SlurmExecutor(folder, max_num_timeout=args.requeues)
        executor.update_parameters(job_name="-".join(folder.parts[-3:-1]), **parameters)
        return [started.job_id for started in executor.submit_array([job] * args.jobs)]
    except (UncompletedJobError, FailedSubmissionError) as error:
        said = str(error).strip().splitlines() or ["it gave no reason"]
        raise UserError(f"sbatch refused the jobs: {said[0]}") from None


def slurm_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """submitit's parameters for the command's options; UserError where they contradict."""
    for tool in ("sbatch", "srun"):
        if shutil.which(tool) is None:
            raise UserError(
                f"no {tool} on PATH: submit from a node of the cluster, or add --local to run the "
                "jobs on this machine"
            )
    if args.nodes > 1 and not args.launch:
        raise UserError("--nodes: a job on several nodes needs --launch, which starts runs on them")
    more = _more(args.slurm)
    parameters = {name: more.pop(name) for name in (*_NUMBERS, *_LISTS) if name in more}
    delay = parameters.setdefault("signal_delay_s", _signal_delay())
    if delay >= 60 * args.time:
        raise UserError(
            f"--time: {args.time} minutes leave no time before the warning, {delay} seconds before "
            "the end; raise it or set --slurm signal_delay_s=SECONDS"
        )
    names = ("partition", "account", "gpus_per_node", "nodes", "cpus_per_task", "mem", "time")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    parameters["srun_args"] = [*_srun(args), *parameters.get("srun_args", ())]
    parameters.setdefault("array_parallelism", args.jobs)
    options = {"requeue": True, **more}
    options = {key: value for key, value in options.items() if value is not False}
    return {**parameters, **given, "additional_parameters": options}


def _srun(args: argparse.Namespace) -> list[str]:
    """One launcher per job, on its first node, with all of the job's cores there."""
    words = ["--nodes=1", "--ntasks=1"]
    # Since SLURM 22.05 srun does not take it over from sbatch.
    return words + ([f"--cpus-per-task={args.cpus_per_task}"] if args.cpus_per_task else [])


def _more(words: Sequence[str]) -> dict[str, Any]:
    """The values of --slurm key=value, by key; UserError for one that has an option of its own."""
    values = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.replace("-", "_")
        if not key or not equals:
            raise UserError(f"--slurm: expected KEY=VALUE, got {word!r}")
        if key in _OWN:
            raise UserError(f"--slurm {key}: use {_OWN[key]}")
        values[key] = _value(key, text)
    return values


def _value(key: str, text: str) -> Any:
    """A number or a list where submitit wants one; otherwise a flag or sbatch's own word."""
    if key in _NUMBERS:
        if not text.isdigit():
            raise UserError(f"--slurm {key}: expected a number, got {text!r}")
        return int(text)
    if key in _LISTS:
        value = parse_yaml(text, f"--slurm {key}")
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            raise UserError(f"--slurm {key}: expected a list, such as '{key}=[\"module load x\"]'")
        return value
    return {"true": True, "false": False}.get(text, text)


def _submit_local(job: Launcher, folder: Path, args: argparse.Namespace) -> list[str]:
    from submitit import LocalExecutor

    if args.nodes > 1:
        raise UserError("--nodes: --local has this machine only")
    for name in ("partition", "account", "cpus_per_task", "mem", "slurm"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')}: --local asks no SLURM; leave it out")
    shares = _local_gpus(args.jobs, args.gpus_per_node)
    executor, ids = LocalExecutor(folder, max_num_timeout=args.requeues), []
    for gpus in shares:
        executor.update_parameters(
            timeout_min=args.time,
            signal_delay_s=_signal_delay(),
            gpus_per_node=len(gpus),
            visible_gpus=gpus,
        )
        ids.append(executor.submit(job).job_id)
    return ids


def _local_gpus(jobs: int, each: int | None) -> list[tuple[int, ...]]:
    """The GPUs of every job: `each`, or an equal share of those there are."""
    gpus = visible_gpus()
    each = len(gpus) // jobs if each is None else each
    if each * jobs > len(gpus):
        raise UserError(f"--gpus-per-node: {jobs} jobs need {each * jobs} GPUs, {len(gpus)} here")
    if each and not all(gpu.isdigit() for gpu in gpus):
        raise UserError("CUDA_VISIBLE_DEVICES: --local wants GPUs by number, such as 0,1")
    return [tuple(map(int, gpus[each * job : each * (job + 1)])) for job in range(jobs)]


def _signal_delay() -> int:
    """Seconds before its time limit that a job is warned: to save, and to be requeued."""
    return int(stop_seconds()) + 60


def minutes(text: str) -> int:
    """A time limit as SLURM writes it, M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, in whole minutes."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90, 12:00:00 or 2-00:00:00")
    numbers = [int(word) for word in match[2].split(":")]
    if match[1] is not None:
        hours, mins, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, mins, seconds = numbers
    else:
        hours, mins, seconds = 0, *[*numbers, 0][:2]
    total = 60 * (60 * (24 * int(match[1] or 0) + hours) + mins) + seconds
    return max(1, total // 60)


def report(ids: Sequence[str], folder: Path, local: bool) -> str:
    """What a user wants to know of jobs that were submitted."""
    logs = f"{folder}/{ids[0]}_0_log.err" if len(ids) == 1 else f"{folder}/*_log.err"
    first = ids[0].partition("_")[0]
    watch = "ps -p " + ",".join(ids) if local else f"squeue --jobs {first}"
    cancel = "kill " + " ".join(ids) if local else f"scancel {first}"
    return "\n".join(
        [
            f"submitted {' '.join(ids)}",
            f"logs     {folder}",
            f"watch    {watch}; tail -f {logs}",
            f"cancel   {cancel}",
            f"results  {folder.parent}",
        ]
    )


def parser() -> argparse.ArgumentParser:
    """The command's options: those of a sweep, and those of SLURM."""
    commands = argparse.ArgumentParser(
        prog="python -m sweeps submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = commands.add_argument
    add("sweep", type=Path, help="YAML file of a sweep or a search")
    add("--jobs", type=int, required=True, help="jobs, each a launcher of its own")
    add("--preset", help="another size of the sweep that its file holds")
    add("--curves", nargs="+", metavar="NAME", help="only these curves")
    add("--workers", type=int, default=1, help="worker processes per job (default 1)")
    add("--threads", type=int, help="threads per worker (default: the job's cores / workers)")
    add("--results", type=Path, default=Path("results"), help="results folder, seen by all nodes")
    add(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="start each run by this command, such as 'accelerate launch --config_file FILE'",
    )
    add("--local", action="store_true", help="run the jobs on this machine, without SLURM")
    add("--time", type=minutes, help="time limit of a job (default 4 hours, two weeks if --local)")
    add("--requeues", type=int, default=REQUEUES, help="time limits a job may reach (default 100)")
    add("--partition", help="partition to submit to")
    add("--account", help="account to charge")
    add("--nodes", type=int, default=1, help="nodes per job (default 1); more need --launch")
    add("--gpus-per-node", type=int, help="GPUs per node (default: SLURM's; a share if --local)")
    add("--cpus-per-task", type=int, help="cores per job and node")
    add("--mem", help="memory per node, such as 200G")
    add(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other option of sbatch, such as qos=long; also signal_delay_s=SECONDS and "
        "'setup=[\"module load cuda\"]', commands to run first; may be repeated",
    )
    return commands


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0 once the jobs are submitted, 2 for a user's mistake."""
    args = parser().parse_args(argv)
    args.launch, args.curves = tuple(args.launch), args.curves and tuple(args.curves)
    args.time = args.time or (LOCAL_MINUTES if args.local else 4 * 60)
    with one_line_errors(OSError):
        for name in ("jobs", "workers", "nodes", "requeues"):
            if getattr(args, name) < 1:
                raise UserError(f"--{name} must be at least 1")
        job = launcher(args)
        # A mistake in the file is one line here rather than as many failed jobs. What jobs that
        # this one depends on will have found by then need not be there yet.
        later = any(word.startswith("dependency=") for word in args.slurm)
        folder = job.options.load(draft=later).folder / "slurm"
        print(report(submit(job, folder, args), folder, args.local))


if __name__ == "__main__":
    # submitit names what it stores by its module, and `__main__` is another one in a job.
    from sweeps import slurm

    slurm.main()
