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
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sweeps import slurm_job, task
from sweeps.pool import (
    Job,
    Needs,
    PoolOptions,
    add_arguments,
    add_job_arguments,
    options,
    stop_seconds,
)
from sweeps.slurm_job import outcome_file
from sweeps.sources import folder_of
from training.config import parse_yaml
from training.errors import UserError, one_line_errors
from training.files import write_json

_SEVERAL_NODES = (
    "bash", "scripts/slurm/several_nodes.sh", "scripts/accelerate/several_nodes_fsdp.yaml"
)  # fmt: skip
_OF_RUN = ("--preset", "--storage", "--gpu")  # handed on to the driver
_TOOLS = ("sbatch", "srun", "squeue", "scancel")
# Options of sbatch that have options here, and other ways to say them.
_NAMED = ("account", "cpus_per_task", "gpus_per_node", "mem", "partition", "time")
_OWN = {
    **{key: f"--{key.replace('_', '-')}" for key in _NAMED},
    **dict.fromkeys(("nodes", "ntasks", "ntasks_per_node"), "`needs` in the sweep file, or --pack"),
    "array": "--jobs",
    "signal": "--slurm signal_delay_s=SECONDS",
}


@dataclass(eq=False)
class _Run:
    """A job in SLURM's hands, or on its way there."""

    job: Job
    needs: Needs
    future: Future[dict[str, Any]]
    id: str = ""
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
        run = _Run(job, needs, Future(), _known(folder).get(job.name, ""))
        with self.lock:
            self.packed = self._pack(needs)
            if not run.id:
                outcome_file(folder, job.name).unlink(missing_ok=True)
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
                (folder / slurm_job.STOP).touch()
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

    @property
    def _launches_all(self) -> bool:
        """Whether a launch command starts every run, which then has all of its job's GPUs."""
        return bool(self.options.launch) and not task.only_several(self.options.launch)

    def _pack(self, needs: Needs) -> int:
        shares = 0 < needs.gpus < 1 and not self._launches_all
        return self.options.pack or (int(1 / needs.gpus) if shares else 1)

    def _at_once(self, pack: int, needs: Needs, gpus_per_node: int | None) -> int:
        """Runs of a pack that are trained together; its other runs wait for a GPU in their job."""
        if not (needs.gpus and gpus_per_node):
            return pack
        if self._launches_all:
            return 1
        return max(1, min(pack, int(gpus_per_node * needs.nodes / needs.gpus)))

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
            new = self.new
            kinds: dict[Any, list[_Run]] = {}
            for run in new:
                key = (_folder(run.job), run.needs.model_dump_json())
                kinds.setdefault(key, []).append(run)
            for (folder, _), runs in kinds.items():
                size = self._pack(runs[0].needs)
                packs = [runs[first : first + size] for first in range(0, len(runs), size)]
                try:
                    (folder / slurm_job.STOP).unlink(missing_ok=True)
                    ids = self._submit(folder, packs)
                except (OSError, UserError) as error:
                    for run in runs:
                        run.future.set_exception(error)
                    continue
                finally:  # what is still here when anything else goes wrong ends with an exception
                    self.new = [run for run in self.new if run not in runs]
                for pack, job_id in zip(packs, ids):
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
            "cpus_per_task": self.options.cpus_per_task,
        }
        if asked["gpus_per_node"] is None:
            asked["gpus_per_node"] = -(-int(100 * needs.gpus) // (100 * needs.nodes)) or None
        if asked["cpus_per_task"] is None:
            at_once = self._at_once(len(packs[0]), needs, asked["gpus_per_node"])
            asked["cpus_per_task"] = at_once * max(needs.cpus, needs.processes) // needs.nodes
        if needs.nodes > 1:  # the job's launcher is on its first node
            launch = launch or _SEVERAL_NODES
            part = {"nodes": 1, "gpus": needs.gpus / needs.nodes}
            needs = needs.model_copy(update=part)
        threads = self.options.threads
        work = [
            slurm_job.Runs(
                tuple(replace(run.job, threads=run.job.threads or threads) for run in pack),
                needs, launch, folder,
            )
            for pack in packs
        ]  # fmt: skip
        return submit(work, folder, self.options.requeues, {**self.parameters, **asked})

    def _collect(self) -> int:
        """Takes the outcomes that jobs have left; how many."""
        with self.lock:
            runs = list(self.runs.values())
        found = 0
        for run in runs:
            outcome = task.take_outcome(outcome_file(_folder(run.job), run.job.name))
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
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            raise UserError(
                f"no {tool} on PATH: --engine slurm needs a node of the cluster; --engine local "
                "trains on this machine"
            )
    limit = minutes(options.time or "4:00:00")
    more: dict[str, Any] = {"signal_delay_s": str(int(stop_seconds()) + 60), "requeue": "true"}
    for word in options.slurm:
        key, equals, text = word.partition("=")
        key = key.replace("-", "_")
        if not key or not equals:
            raise UserError(f"--slurm: expected KEY=VALUE, got {word!r}")
        if key in _OWN:
            raise UserError(f"--slurm {key}: use {_OWN[key]}")
        more[key] = text
    delay, setup = more.pop("signal_delay_s"), more.pop("setup", "[]")
    if not delay.isdigit():
        raise UserError(f"--slurm signal_delay_s: expected a number, got {delay!r}")
    if int(delay) >= 60 * limit:
        raise UserError(
            f"--time: {limit} minutes leave no time before the warning, {delay} seconds before "
            "the end; raise it or set --slurm signal_delay_s=SECONDS"
        )
    commands = parse_yaml(setup, "--slurm setup")
    if not isinstance(commands, list) or not all(isinstance(line, str) for line in commands):
        raise UserError("--slurm setup: expected a list, such as 'setup=[\"module load x\"]'")
    flags = {key: True if text == "true" else text for key, text in more.items() if text != "false"}
    given = {name: getattr(options, name) for name in ("partition", "account", "mem")}
    return {
        **given, "time": limit, "signal_delay_s": int(delay), "setup": commands or None,
        "additional_parameters": flags,
    }  # fmt: skip


def minutes(text: str) -> int:
    """A time limit as SLURM writes it, M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, in whole minutes."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text)
    if match is None:
        raise UserError(f"--time: {text!r} is no time such as 90, 12:00:00 or 2-00:00:00")
    numbers = [int(word) for word in match[2].split(":")]
    if match[1] is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, mins, _ = [*numbers, 0, 0][:3]
    return max(1, 60 * (24 * int(match[1] or 0) + hours) + mins)


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, PoolOptions, tuple[str, ...]]:
    """The options of `submit`, those of the engine, and the words for the driver in its job.

    Where the driver trains the runs itself, what sbatch is asked is not said to it again.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sweeps submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="YAML file of a sweep or a search")
    parser.add_argument("--results", type=Path, default=Path("results"), help="seen by all nodes")
    parser.add_argument("--after", metavar="ID:ID", help="start once these jobs have ended")
    named = parser.add_argument_group("as for `python -m sweeps run`").add_argument
    for word in _OF_RUN:
        named(word)
    named("--curves", nargs="+", metavar="NAME")
    add_arguments(parser)
    args, rest = parser.parse_known_args(argv)
    for word in _OF_RUN:
        value = getattr(args, word.removeprefix("--"))
        rest += [] if value is None else [word, value]
    rest += ["--curves", *args.curves] if args.curves else []
    given = options(args)[1]
    jobs = argparse.ArgumentParser()
    add_job_arguments(jobs.add_argument)
    unsaid = {"slurm", "launch", *vars(jobs.parse_args([]))}
    if args.engine == "slurm":
        unsaid = {"slurm", "launch"}
        rest += [f"--slurm={word}" for word in given.slurm]
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in unsaid and value != field.default:
            rest += [f"--{field.name.replace('_', '-')}", str(value)]
    if given.launch:
        rest += ["--launch", shlex.join(given.launch)]
    words = (str(args.file), "--results", str(args.results), "--engine", args.engine, *rest)
    return args, given, words


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m sweeps submit`: exit code 0 once the driver's job is submitted."""
    args, given, words = read(argv)
    with one_line_errors(OSError):
        if args.engine == "ray":
            raise UserError("--engine ray: scripts/slurm/ray.sh starts a cluster and the driver")
        asked = parameters(given)
        # A mistake in the file is one line here rather than a failed job.
        command = [sys.executable, "-m", "sweeps", "run", *words, "--dry-run"]
        checked = subprocess.run(command, capture_output=True, text=True)
        if checked.returncode:
            raise UserError(checked.stderr.strip().removeprefix("error: "))
        if args.after:
            asked["additional_parameters"]["dependency"] = f"afterany:{args.after}"
        if args.engine == "slurm":
            asked |= {"cpus_per_task": 1, "mem": None}
        else:
            asked |= {"cpus_per_task": given.cpus_per_task, "gpus_per_node": given.gpus_per_node}
        folder = folder_of(args.file, args.results.absolute(), args.preset) / "slurm"
        driver = slurm_job.Driver(words, detached=args.engine == "slurm")
        (job,) = submit([driver], folder, given.requeues, asked)
    print(
        f"submitted {job}\nlogs     {folder}\n"
        f"watch    squeue --jobs {job}; tail -f {folder}/{job}_0_log.err\n"
        f"cancel   scancel {job}\nresults  {folder.parent}"
    )
