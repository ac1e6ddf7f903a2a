"""Runs on a SLURM cluster (`--engine slurm`): jobs through submitit, each with what its runs need.

Equal runs are an array; runs that have a share of a GPU, or `--pack` runs, are one job. Warned
`signal_delay_s` before its time limit, a job has its runs save, is requeued and resumes; after
SIGTERM alone they save, too, and SLURM decides whether it starts again. Jobs outlive their driver:
one that is started again takes them over, by files in the results folder, which all nodes see.
`submit` has the driver itself run in a job.

The folder `slurm` beside the runs holds the jobs' logs, what has become of their runs, and
submitit's own files. Those are pickles that submitit writes and reads to start a job; nothing else
ever reads them, least of all for results.
"""

from __future__ import annotations

import argparse
import getpass
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from sweeps import slurm_job, task
from sweeps.pool import Job, Needs, Pool, PoolOptions, add_job_arguments, options, stop_seconds
from sweeps.slurm_job import outcome_file
from training.config import parse_yaml
from training.errors import UserError
from training.files import write_json
from training.runs import done

LOOK_SECONDS = 0.5  # between looks at what has come and what jobs have left
REQUEUES = 100  # time limits that a job may reach: 17 days of 4 hours
ASK_SECONDS = 1.0  # between two questions to SLURM; up to 15 the longer nothing has happened
_SEVERAL_NODES = (
    "bash",
    "scripts/slurm/several_nodes.sh",
    "scripts/accelerate/several_nodes_fsdp.yaml",
)
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
    pack: int
    """How many such runs are one job."""
    id: str
    """The job's; empty until it is submitted."""
    future: Future[dict[str, Any]] = field(default_factory=Future)
    missed: int = 0
    """How often in a row SLURM did not know the job."""

    @property
    def folder(self) -> Path:
        return self.job.run_dir.parent.absolute() / "slurm"

    @property
    def outcome(self) -> Path:
        return outcome_file(self.folder, self.job.name)


class SlurmPool(Pool):
    """A job per run, or per pack of runs, with their own resources."""

    lost = (task.Lost,)

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        _require_slurm()
        self.parameters = parameters(options)
        self.coming = 0
        self.closed = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    @property
    def slots(self) -> int:
        """Runs here, and one more while another job may be in the queue."""
        with self.lock:
            jobs = len({run.id for run in self.runs if run.id})
            jobs += sum(Fraction(1, run.pack) for run in self.runs if not run.id)
            return len(self.runs) + (jobs < self.options.jobs)

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The run's summary to come; a job that an earlier driver has submitted is taken over.

        A summary that a job has left is taken if the run's folder has it, too. Otherwise that was
        deleted since, for the run to be trained again.
        """
        job = replace(job, threads=job.threads or self.options.threads)
        run = _Run(job, needs, self._pack(needs), "")
        run.id = _known(run.folder).get(job.name, "")
        outcome = task.take_outcome(run.outcome)
        stale = outcome is not None and "error" not in outcome and done(job.run_dir) is None
        with self.lock:
            if stale:
                run.id = ""
                _remember(run.folder, {job.name: None})
            self.runs.append(run)
            if run.id and outcome is not None:
                self._finish(run, outcome)
        return run.future

    def _stop(self, at_once: bool) -> None:
        for run in [run for run in self.runs if not run.id]:
            self._finish(run, task.STOPPED)
        ids = sorted({run.id for run in self.runs})
        for folder in {run.folder for run in self.runs}:
            (folder / slurm_job.STOP).touch()
        if ids and at_once:
            _slurm("scancel", *ids)
            for run in list(self.runs):
                self._finish(run, {"error": "lost", "message": f"job {run.id} was cancelled"})
        elif ids:
            _slurm("scancel", "--state=PENDING", *ids)
            _slurm("scancel", "--signal=TERM", *ids)

    def _close(self, wait: bool) -> None:
        """Leaves the jobs to SLURM; a driver that is started again finds them."""
        self.closed.set()
        self.watcher.join()

    def _pack(self, needs: Needs) -> int:
        shares = 0 < needs.gpus < 1 and not _launches_all(self.options)
        return self.options.pack or (int(1 / needs.gpus) if shares else 1)

    def _watch(self) -> None:
        """Submits what came since, takes outcomes, and asks SLURM which jobs it knows."""
        changed = asked = time.monotonic()
        while not self.closed.wait(LOOK_SECONDS):
            try:
                happened = self._send() + self._collect()
                now = time.monotonic()
                changed = now if happened else changed
                if now - asked > min(15.0, ASK_SECONDS + (now - changed) / 10):
                    asked = now
                    self._miss()
            except Exception as error:
                with self.lock:
                    runs, self.runs = self.runs, []
                for run in runs:
                    run.future.set_exception(error)

    def _send(self) -> int:
        """Submits what has come once no more comes, equal runs as one array; how many there are."""
        with self.lock:
            new = [run for run in self.runs if not run.id]
            before, self.coming = self.coming, len(new)
            if before != len(new):
                return len(new)
            kinds: dict[Any, list[_Run]] = {}
            for run in new:
                kinds.setdefault((run.folder, run.needs.model_dump_json()), []).append(run)
            for (folder, _), runs in kinds.items():
                size = runs[0].pack
                packs = [runs[first : first + size] for first in range(0, len(runs), size)]
                try:
                    (folder / slurm_job.STOP).unlink(missing_ok=True)
                    ids = self._submit(folder, packs)
                except (OSError, UserError) as error:
                    self.runs = [run for run in self.runs if run not in runs]
                    for run in runs:
                        run.future.set_exception(error)
                    continue
                for pack, job_id in zip(packs, ids, strict=True):
                    for run in pack:
                        run.id = job_id
                _remember(folder, {run.job.name: run.id for run in runs})
        return len(new)

    def _submit(self, folder: Path, packs: Sequence[Sequence[_Run]]) -> list[str]:
        """The ids of an array of jobs with equal needs."""
        needs, launch, given = packs[0][0].needs, self.options.launch, self.options
        gpus, cpus, at_once = given.gpus_per_node, given.cpus_per_task, len(packs[0])
        if gpus is None:
            gpus = -(-int(100 * needs.gpus) // (100 * needs.nodes)) or None
        if needs.gpus and gpus:  # other runs of the pack wait for a GPU in their job
            fit = 1 if _launches_all(given) else int(gpus * needs.nodes / needs.gpus)
            at_once = max(1, min(at_once, fit))
        if cpus is None:
            cpus = at_once * max(needs.cpus, needs.processes) // needs.nodes
        asked = {"nodes": needs.nodes, "gpus_per_node": gpus, "cpus_per_task": cpus}
        if needs.nodes > 1:  # the job's launcher is on its first node
            launch = launch or _SEVERAL_NODES
            part = {"nodes": 1, "gpus": needs.gpus / needs.nodes}
            needs = needs.model_copy(update=part)
        work = [
            slurm_job.Runs(tuple(run.job for run in pack), needs, launch, folder) for pack in packs
        ]
        return submit(work, folder, {**self.parameters, **asked})

    def _collect(self) -> int:
        """Takes the outcomes that jobs have left; how many."""
        with self.lock:
            runs = [run for run in self.runs if run.id]
        outcomes = [(run, task.take_outcome(run.outcome)) for run in runs]
        for run, outcome in outcomes:
            if outcome is not None:
                self._finish(run, outcome)
        return sum(outcome is not None for _, outcome in outcomes)

    def _miss(self) -> None:
        """Gives up jobs that SLURM has not known twice and that have left no outcome."""
        listed = self.runs and _slurm(
            "squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i"
        )
        if not self.runs or listed is None:  # SLURM does not answer
            return
        ids = set(listed.split())
        self._collect()
        with self.lock:
            runs = [run for run in self.runs if run.id]
        for run in runs:
            run.missed = 0 if run.id in ids else run.missed + 1
            if run.missed > 1:
                log = run.folder / f"{run.id}_0_log.err"
                message = f"job {run.id} ended without an outcome; see {log}"
                lost = {"error": "lost", "message": message}
                self._finish(run, task.STOPPED if self.stops else lost)

    def _finish(self, run: _Run, outcome: dict[str, Any]) -> None:
        with self.lock:
            if run not in self.runs:
                return
            self.runs.remove(run)
            if run.id:
                _remember(run.folder, {run.job.name: None})
        task.resolve(run.future, outcome)


def _launches_all(options: PoolOptions) -> bool:
    """Whether a launch command starts every run, which then has all of its job's GPUs."""
    return bool(options.launch) and not task.only_several(options.launch)


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


def submit(work: Sequence[Callable[[], None]], folder: Path, asked: dict[str, Any]) -> list[str]:
    """The ids of an array of jobs with the same parameters; UserError where sbatch refuses them."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedSubmissionError, UncompletedJobError

    # One task per job, on its first node, with all of the job's cores there, which srun has not
    # taken over from sbatch since SLURM 22.05.
    cores = asked.get("cpus_per_task")
    srun = ["--nodes=1", "--ntasks=1"] + ([f"--cpus-per-task={cores}"] if cores else [])
    asked = {key: value for key, value in asked.items() if value is not None}
    try:
        executor = SlurmExecutor(folder, max_num_timeout=REQUEUES)
        name = "-".join(folder.parts[-3:-1])
        executor.update_parameters(job_name=name, srun_args=srun, **asked)
        return [started.job_id for started in executor.submit_array(list(work))]
    except (UncompletedJobError, FailedSubmissionError) as error:
        said = str(error).strip().splitlines() or ["it gave no reason"]
        raise UserError(f"sbatch refused the jobs: {said[0]}") from None


def parameters(options: PoolOptions) -> dict[str, Any]:
    """submitit's parameters for the options of every job; UserError where they contradict."""
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
        **given,
        "time": limit,
        "signal_delay_s": int(delay),
        "setup": commands or None,
        "additional_parameters": flags,
    }


def _room(needs: Sequence[Needs], given: PoolOptions) -> dict[str, int | None]:
    """GPUs of the largest of some runs, and cores for as many as one job trains at a time.

    Runs of several nodes have none: where one machine trains, they are refused.
    """
    needs = [one for one in needs if one.nodes == 1]
    gpus, cpus = given.gpus_per_node, given.cpus_per_task
    if gpus is None:
        gpus = max((math.ceil(one.gpus) for one in needs), default=0) or None
    if cpus is None:
        for one in needs:
            fit = int(gpus / one.gpus) if gpus and one.gpus and not _launches_all(given) else 1
            at_once = given.workers or max(1, min(fit, len(needs)))
            cpus = max(cpus or 1, at_once * max(one.cpus, one.processes))
    return {"gpus_per_node": gpus, "cpus_per_task": cpus}


def _require_slurm() -> None:
    """Raises UserError on a machine that cannot submit jobs."""
    for tool in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(tool) is None:
            raise UserError(
                f"no {tool} on PATH: --engine slurm needs a node of the cluster; --engine local "
                "trains on this machine"
            )


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


def submit_driver(
    args: argparse.Namespace, words: Sequence[str], folder: Path, needs: Sequence[Needs]
) -> str:
    """Submits `python -m sweeps run WORDS` as a job with its logs in `folder`, which it returns the
    report of. A driver that trains the runs itself has room for the largest of their `needs`, and
    is not told again what sbatch is asked."""
    _require_slurm()
    given = options(args)[1]
    asked = parameters(given)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--after")
    if args.after:
        asked["additional_parameters"]["dependency"] = f"afterany:{args.after}"
    if args.engine == "slurm":
        asked |= {"cpus_per_task": 1, "mem": None}
    else:
        add_job_arguments(parser.add_argument)
        asked |= _room(needs, given)
    words = tuple(parser.parse_known_args(words)[1])
    driver = slurm_job.Driver(words, detached=args.engine == "slurm")
    (job,) = submit([driver], folder, asked)
    return (
        f"submitted {job}\nlogs     {folder}\n"
        f"watch    squeue --jobs {job}; tail -f {folder}/{job}_0_log.err\n"
        f"cancel   scancel {job}\nresults  {folder.parent}"
    )
