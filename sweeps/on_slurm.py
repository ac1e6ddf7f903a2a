"""Runs on a SLURM cluster (`--engine slurm`): jobs through submitit, each with what its runs need.

    python -m sweeps run nanolm_c4/sweeps/figure_12_adam.yaml --engine slurm --partition gpu

Equal runs are an array; runs that have a share of a GPU, or `--pack` runs, are one job. A job is
warned `signal_delay_s` before its time limit, by default in time for its runs to save what they
need to go on; it is then requeued and resumes. What SLURM preempts or cancels without that warning
(SIGTERM) saves, too, and leaves it to SLURM whether it starts again. The driver may die and be
started again: jobs go on, and their results are found in the results folder, which all nodes see.

    python -m sweeps submit FILE [options of `python -m sweeps run`]

has the driver itself run in a job: with `--engine slurm` a small one that submits the others, by
default one that trains the whole sweep where it is.

The folder `slurm` beside the runs holds the jobs' logs, what has become of their runs, and
submitit's own files. Those are pickles that submitit writes and reads to start a job; nothing else
ever reads them, least of all for results.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from sweeps import task
from sweeps.local import LocalPool
from sweeps.pool import Job, Needs, PoolOptions, add_arguments, cores, options, stop_seconds
from training.config import parse_yaml, read_yaml
from training.errors import UserError, one_line_errors
from training.files import write_json
from training.signals import STOPPED

_SEVERAL_NODES = (
    "bash", "scripts/slurm/several_nodes.sh", "scripts/accelerate/several_nodes_fsdp.yaml"
)  # fmt: skip

# submitit parameters that sbatch does not accept.
_NUMBERS = ("signal_delay_s", "array_parallelism")
_LISTS = ("setup", "teardown", "srun_args")
# Options of sbatch that these commands set themselves, and how.
_OWN = {
    "account": "--account",
    "array": "--jobs",
    "cpus_per_task": "--cpus-per-task",
    "gpus_per_node": "--gpus-per-node",
    "mem": "--mem",
    "nodes": "`needs` in the sweep file",
    "ntasks": "--pack",
    "ntasks_per_node": "--pack",
    "partition": "--partition",
    "signal": "--slurm signal_delay_s=SECONDS",
    "time": "--time",
}


# Inside a job.


class _Signals:
    """Which signals a job has got: SIGTERM or SLURM's warning.

    submitit would answer its warning by requeueing the job at once; that comes after saving.
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

    def answer(self) -> None:
        """Requeues the job, which ends this process, once it is warned.

        After a SIGTERM alone SLURM ends the job itself, and starts it again if it was preempted: a
        job that ended by its own will would not come back.
        """
        if self.warning not in self.received:
            print("saved; SLURM ends this job, and starts it again if it was preempted", flush=True)
        while self.warning not in self.received:
            time.sleep(0.5)
        if callable(self.requeue):
            self.requeue(self.warning, None)


@dataclass
class Work:
    """What a job runs: its runs, by the engine of one machine. submitit calls and requeues it."""

    jobs: tuple[Job, ...]
    needs: Needs
    launch: tuple[str, ...]
    folder: Path

    def __call__(self) -> None:
        """Runs to the end, or until it is stopped; outcomes are files."""
        signals = _Signals()
        at_once = None if os.environ.get("CUDA_VISIBLE_DEVICES") else self._side_by_side()
        pool = LocalPool(PoolOptions(workers=at_once, launch=self.launch))
        futures = {pool.submit(job, self.needs): job for job in self.jobs}
        left = set(futures)
        stopping = False
        while left:
            done, left = wait(left, timeout=0.5, return_when="FIRST_COMPLETED")
            for future in done:
                self._tell(future, futures[future])
            if not stopping and (signals.received or self._stop_file.exists()):
                stopping = True
                pool.stop()
        pool.shutdown()
        if self.jobs and not self._stop_file.exists():
            signals.answer()

    def checkpoint(self) -> Any:
        """What submitit starts when the job comes back: the runs that are left."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    @property
    def _stop_file(self) -> Path:
        return self.folder / "stop"

    def _side_by_side(self) -> int:
        """Runs at a time on a node without GPUs."""
        return max(1, min(len(self.jobs), cores() // self.needs.cpus))

    def _tell(self, future: Future[dict[str, Any]], job: Job) -> None:
        """Leaves a run's outcome to the driver, unless this job goes on with it later."""
        try:
            outcome = {"summary": future.result()}
        except BrokenProcessPool as error:
            outcome = {"error": "lost", "message": str(error)}
        except Exception as error:
            outcome = task.told(error, job.run_dir)
        stopped = outcome.get("summary", {}).get("status") == "stopped"
        if not stopped or self._stop_file.exists():
            self.jobs = tuple(other for other in self.jobs if other != job)
            write_json(_outcome_file(self.folder, job), outcome)


@dataclass(frozen=True)
class Drive:
    """What the job of `python -m sweeps submit` runs: a driver, in a process of its own."""

    words: tuple[str, ...]
    detached: bool
    """The runs are in other jobs, which go on without it."""

    def __call__(self) -> None:
        """Runs to the end; otherwise exits: 1 a run failed, 2 a user's mistake, 75 stopped."""
        signals = _Signals()
        driver = subprocess.Popen([sys.executable, "-m", "sweeps", *self.words])
        asked = False
        while (code := driver.poll()) is None:
            if signals.received and not asked:
                asked = True
                (driver.kill if self.detached else driver.terminate)()
            time.sleep(0.2)
        if asked and code in (STOPPED, -signal.SIGKILL):
            signals.answer()
        if code:
            raise SystemExit(code)

    def checkpoint(self) -> Any:
        """What submitit starts when the job comes back: the same, as the results are the state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _outcome_file(folder: Path, job: Job) -> Path:
    return folder / f"{job.name}.outcome.json"


# The driver's side.


@dataclass(eq=False)
class _Run:
    """A job in SLURM's hands, or on its way there."""

    job: Job
    needs: Needs
    future: Future[dict[str, Any]]
    id: str | None = None
    missed: int = 0
    """How often in a row SLURM did not know the job."""


class SlurmPool:
    """A job per run, or per pack of runs, with their own resources."""

    lost = (task.Lost,)

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self.parameters = parameters(options)
        self.runs: dict[str, _Run] = {}
        self.new: list[_Run] = []
        self.lock = threading.RLock()
        self.stops = 0
        self.deadline = float("inf")
        self.packed = 1
        self.closed = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    @property
    def slots(self) -> int:
        """As many runs as `jobs` jobs hold."""
        return self.options.jobs * self.packed

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The run's summary to come; a job that an earlier driver has submitted is taken over."""
        folder = _folder(job)
        run = _Run(job, needs, Future(), _known(folder).get(job.name))
        with self.lock:
            self.packed = self._pack(needs)
            if run.id is None:
                _outcome_file(folder, job).unlink(missing_ok=True)
                self.new.append(run)
            else:
                self.runs[job.name] = run
        return run.future

    def stop(self) -> None:
        """Has every run save and end; what is left after stop_seconds(), or now if called again,
        is cancelled."""
        with self.lock:
            self.stops += 1
            for run in self.new:
                task.resolve(run.future, task.STOPPED)
            self.new.clear()
            ids = sorted({run.id for run in self.runs.values()})
            for folder in {_folder(run.job) for run in self.runs.values()}:
                (folder / "stop").touch()
            if not ids:
                return
            if self.stops == 1:
                self.deadline = time.monotonic() + stop_seconds()
                _slurm("scancel", "--state=PENDING", *ids)
                _slurm("scancel", "--signal=TERM", *ids)
                return
            _slurm("scancel", *ids)
            for run in list(self.runs.values()):
                self._finish(run, {"error": "lost", "message": f"job {run.id} was cancelled"})

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the jobs to SLURM; a driver that is started again finds them."""
        with self.lock:
            futures = [run.future for run in (*self.runs.values(), *self.new)]
        for future in futures if wait and not cancel_futures else ():
            future.exception()
        self.closed.set()
        self.watcher.join()

    def _pack(self, needs: Needs) -> int:
        return self.options.pack or (int(1 / needs.gpus) if 0 < needs.gpus < 1 else 1)

    def _watch(self) -> None:
        """Submits what came since, takes outcomes, and asks SLURM which jobs it knows.

        It is asked every second at first, and less often the longer nothing has happened.
        """
        changed = asked = time.monotonic()
        while not self.closed.wait(0.5):
            try:
                happened = self._send() + self._collect()
                now = time.monotonic()
                changed = now if happened else changed
                if now - asked > min(15.0, 1.0 + (now - changed) / 10):
                    asked = now
                    self._miss()
                if now > self.deadline and self.stops == 1:
                    self.stop()
            except Exception as error:
                with self.lock:
                    waiting = [*self.new, *self.runs.values()]
                    self.new.clear()
                    self.runs.clear()
                for run in waiting:
                    run.future.set_exception(error)

    def _send(self) -> int:
        """Submits what has come, equal runs as one array; how many runs that were."""
        with self.lock:
            new, self.new = self.new, []
            kinds: dict[Any, list[_Run]] = {}
            for run in new:
                key = (_folder(run.job), run.needs.model_dump_json())
                kinds.setdefault(key, []).append(run)
            for (folder, _), runs in kinds.items():
                (folder / "stop").unlink(missing_ok=True)
                size = self._pack(runs[0].needs)
                packs = [runs[first : first + size] for first in range(0, len(runs), size)]
                for pack, job_id in zip(packs, self._submit(folder, packs)):
                    for run in pack:
                        run.id = job_id
                        self.runs[run.job.name] = run
                _remember(folder, {run.job.name: run.id for run in runs})
        return len(new)

    def _submit(self, folder: Path, packs: Sequence[Sequence[_Run]]) -> list[str]:
        """The ids of an array of jobs with equal needs."""
        needs, launch = packs[0][0].needs, self.options.launch
        asked = {
            "nodes": needs.nodes,
            "gpus_per_node": self.options.gpus_per_node,
            "cpus_per_task": self.options.cpus_per_task or needs.cpus // needs.nodes or None,
        }
        if asked["gpus_per_node"] is None:
            asked["gpus_per_node"] = -(-int(100 * needs.gpus) // (100 * needs.nodes)) or None
        if needs.nodes > 1:  # the job's launcher is on its first node
            launch = launch or _SEVERAL_NODES
            part = {"nodes": 1, "gpus": needs.gpus / needs.nodes}
            needs = needs.model_copy(update=part)
        threads = self.options.threads
        work = [
            Work(tuple(replace(run.job, threads=run.job.threads or threads) for run in pack),
                 needs, launch, folder)
            for pack in packs
        ]  # fmt: skip
        return submit(work, folder, self.options.requeues, {**self.parameters, **asked})

    def _collect(self) -> int:
        """Takes the outcomes that jobs have left; how many."""
        with self.lock:
            runs = list(self.runs.values())
        found = 0
        for run in runs:
            outcome = task.take_outcome(_outcome_file(_folder(run.job), run.job))
            if outcome is not None:
                found += 1
                self._finish(run, outcome)
        return found

    def _miss(self) -> None:
        """Gives up jobs that SLURM has not known twice and that have left no outcome."""
        if not self.runs:
            return
        listed = _slurm("squeue", "--noheader", "--array", f"--user={getpass.getuser()}",
                        "--format=%i")  # fmt: skip
        if listed is None:  # SLURM does not answer
            return
        ids = set(listed.split())
        self._collect()
        with self.lock:
            runs = list(self.runs.values())
        for run in runs:
            run.missed = 0 if run.id in ids else run.missed + 1
            if run.missed < 2:
                continue
            if self.stops:
                self._finish(run, task.STOPPED)
                continue
            log = _folder(run.job) / f"{run.id}_0_log.err"
            message = f"job {run.id} ended without an outcome; see {log}"
            self._finish(run, {"error": "lost", "message": message})

    def _finish(self, run: _Run, outcome: dict[str, Any]) -> None:
        with self.lock:
            if self.runs.pop(run.job.name, None) is None:
                return
            _remember(_folder(run.job), {run.job.name: None})
        task.resolve(run.future, outcome)


def _folder(job: Job) -> Path:
    return job.run_dir.parent.absolute() / "slurm"


def _known(folder: Path) -> dict[str, str]:
    """The ids of the jobs that were submitted and have not ended, by run."""
    try:
        return json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def _remember(folder: Path, changes: dict[str, str | None]) -> None:
    known = {**_known(folder), **changes}
    write_json(folder / "jobs.json", {run: job for run, job in known.items() if job is not None})


def _slurm(*command: str) -> str | None:
    """What one of SLURM's commands prints; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def submit(
    work: Sequence[Callable[[], None]], folder: Path, requeues: int, asked: dict[str, Any]
) -> list[str]:
    """The ids of an array of jobs with the same parameters; UserError where sbatch refuses them."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedSubmissionError, UncompletedJobError

    try:
        executor = SlurmExecutor(folder, max_num_timeout=requeues)
        asked = {key: value for key, value in asked.items() if value is not None}
        asked["srun_args"] = [*_srun(asked), *asked.get("srun_args", ())]
        executor.update_parameters(job_name="-".join(folder.parts[-3:-1]), **asked)
        return [started.job_id for started in executor.submit_array(list(work))]
    except (UncompletedJobError, FailedSubmissionError) as error:
        said = str(error).strip().splitlines() or ["it gave no reason"]
        raise UserError(f"sbatch refused the jobs: {said[0]}") from None


def _srun(asked: dict[str, Any]) -> list[str]:
    """One task per job, on its first node, with all of the job's cores there."""
    words = ["--nodes=1", "--ntasks=1"]
    # Since SLURM 22.05 srun does not take it over from sbatch.
    return words + [f"--cpus-per-task={asked[key]}" for key in ("cpus_per_task",) if key in asked]


def parameters(options: PoolOptions) -> dict[str, Any]:
    """submitit's parameters for the options of every job; UserError where they contradict."""
    for tool in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(tool) is None:
            raise UserError(
                f"no {tool} on PATH: --engine slurm runs on a node of the cluster; --engine local "
                "trains on this machine"
            )
    limit = minutes(options.time or "4:00:00")
    more = _more(options.slurm)
    asked = {name: more.pop(name) for name in (*_NUMBERS, *_LISTS) if name in more}
    delay = asked.setdefault("signal_delay_s", int(stop_seconds()) + 60)
    if delay >= 60 * limit:
        raise UserError(
            f"--time: {limit} minutes leave no time before the warning, {delay} seconds before "
            "the end; raise it or set --slurm signal_delay_s=SECONDS"
        )
    flags = {"requeue": True, **more}
    flags = {key: value for key, value in flags.items() if value is not False}
    names = ("partition", "account", "mem")
    given = {name: getattr(options, name) for name in names}
    return {**asked, **given, "time": limit, "additional_parameters": flags}


def _more(words: Iterable[str]) -> dict[str, Any]:
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


def minutes(text: str) -> int:
    """A time limit as SLURM writes it, M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, in whole minutes."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text)
    if match is None:
        raise UserError(f"--time: {text!r} is no time such as 90, 12:00:00 or 2-00:00:00")
    numbers = [int(word) for word in match[2].split(":")]
    if match[1] is not None:
        hours, mins, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, mins, seconds = numbers
    else:
        hours, mins, seconds = 0, *[*numbers, 0][:2]
    total = 60 * (60 * (24 * int(match[1] or 0) + hours) + mins) + seconds
    return max(1, total // 60)


# `python -m sweeps submit`


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0 once the driver's job is submitted, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m sweeps submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", type=Path, help="YAML file of a sweep or a search")
    parser.add_argument("--results", type=Path, default=Path("results"), help="seen by all nodes")
    parser.add_argument("--after", metavar="ID:ID", help="start once these jobs have ended")
    add_arguments(parser)
    args, rest = parser.parse_known_args(argv)
    with one_line_errors(OSError):
        engine, given = options(args)
        if engine == "ray":
            raise UserError("--engine ray: bash scripts/slurm/ray.sh starts a cluster and driver")
        print(_submit_driver(args, engine, given, rest))


def _submit_driver(
    args: argparse.Namespace, engine: str, given: PoolOptions, rest: Sequence[str]
) -> str:
    """Submits the driver of a sweep or search; what a user wants to know of its job."""
    asked = parameters(given)
    words = [str(args.sweep), "--results", str(args.results), *rest]
    words += _again(given, engine)
    content = read_yaml(args.sweep)
    command = "search" if "search" in content else "run"
    folder = args.results.absolute() / content.get("experiment", "") / args.sweep.stem / "slurm"
    if args.after:
        asked["additional_parameters"]["dependency"] = f"afterany:{args.after}"
    if engine == "local":
        asked |= {"gpus_per_node": given.gpus_per_node, "cpus_per_task": given.cpus_per_task}
    else:
        asked |= {"mem": None, "cpus_per_task": 1}
    (job,) = submit([Drive((command, *words), engine == "slurm")], folder, given.requeues, asked)
    return "\n".join(
        [
            f"submitted {job}",
            f"logs     {folder}",
            f"watch    squeue --jobs {job}; tail -f {folder}/{job}_0_log.err",
            f"cancel   scancel {job}",
            f"results  {folder.parent}",
        ]
    )


def _again(given: PoolOptions, engine: str) -> list[str]:
    """The words for the driver: those of its engine."""
    words = ["--engine", engine]
    names = ["workers", "threads"]
    if engine == "slurm":
        names += ["jobs", "pack", "time", "partition", "account", "gpus_per_node",
                  "cpus_per_task", "mem", "requeues"]  # fmt: skip
        words += [f"--slurm={word}" for word in given.slurm]
    for name in names:
        if getattr(given, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    return words + (["--launch", " ".join(given.launch)] if given.launch else [])


if __name__ == "__main__":
    # submitit names what it stores by its module, and `__main__` is another one in a job.
    from sweeps import on_slurm

    on_slurm.main()
