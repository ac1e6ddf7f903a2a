"""What a place runs: one job, in the process that got it or in several that a command starts.

The outcome is JSON, `{"summary": ...}` or `{"error": kind, "message": ..., "tail": ...}`, so that
it crosses processes, files and machines alike. Whatever a run prints goes to `log.txt` in its
folder. SIGTERM and SIGINT have the run save and end; its summary then says `stopped`.

A run of several processes is started by a launch command such as `accelerate launch`, which gets
`-m sweeps.task JOB` as its last words and must hand its standard input on to the processes it
starts, as torchrun, accelerate and srun do. The processes save and end when that input does, which
is how they are told to stop and also what happens when the process that started them dies.
"""

import contextlib
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sweeps.pool import Job, Needs, RunFailed, stop_seconds
from training import signals
from training.environment import commit
from training.errors import RunError, UserError, is_users
from training.files import Busy, open_plain, write_json, writing
from training.runs import Summary

Outcome = dict[str, Any]
FIRST_SECONDS = 5.0  # for the first process of a run to report what all of them have met
ANSWER = ".outcome.json"  # in a run's folder, from a process that cannot hand its outcome back

_ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch")
_SHARDED = (
    "--config_file scripts/accelerate/one_node_8gpu_fsdp.yaml --num_processes {processes} "
    "--main_process_port 0"
)
_SHARDED_NODES = (
    "--config_file scripts/accelerate/several_nodes_fsdp.yaml --num_machines {nodes} "
    "--machine_rank {rank} --num_processes {processes} --main_process_ip {address} "
    "--main_process_port {port}"
)
# How launchers are told the number of processes.
_COUNT = re.compile(r"--(?:num[-_]processes|nproc[-_]per[-_]node)[= ](\d+)")
# A scheduler may signal every process of a job. The launcher must ignore that signal: accelerate
# would abandon its processes, and torchrun would kill those that have not saved after 30 seconds.
# torchrun sets its own SIGTERM handler again unless its variable says otherwise.
_DEAF = ("sh", "-c", "trap '' TERM; exec \"$@\"", "sh")
_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"}


class Lost(Exception):
    """A run's worker or node died; the run itself did not fail."""


_KINDS = {"busy": Busy, "folder": RunError, "user": UserError, "lost": Lost}
STOPPED: Outcome = {"summary": {"status": "stopped"}}


@dataclass(frozen=True)
class Node:
    """Which of a run's machines this is, and where the first one listens."""

    rank: int = 0
    address: str = ""
    port: int = 0


def resolve(future: Future[Summary], outcome: Outcome) -> None:
    """Gives a future the summary of an outcome, or the exception that it tells of."""
    if "summary" in outcome:
        future.set_result(outcome["summary"])
    elif outcome["error"] in _KINDS:
        future.set_exception(_KINDS[outcome["error"]](outcome["message"]))
    else:
        future.set_exception(RunFailed(outcome["message"], outcome["tail"]))


def perform(job: Job, needs: Needs, launch: Sequence[str] = (), node: Node = Node()) -> Outcome:
    """Runs a job to its end in this process's main thread, or in processes that it starts."""
    numbers, interrupted = (signal.SIGTERM, signal.SIGINT), False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        if job.threads:
            # torch with MKL obeys MKL_NUM_THREADS; MKL_DYNAMIC=FALSE lets it exceed the core count.
            os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads))
            os.environ["MKL_DYNAMIC"] = "FALSE"
            if "torch" in sys.modules:  # an earlier run of this process has read the variables
                sys.modules["torch"].set_num_threads(job.threads)
        command = launch_command(needs, launch, node)
        with _log(job.run_dir) as log:
            if command:
                return _launched(command, job, log, answers=node.rank == 0)
            outcome = train(job)
            # Compiled code turns an interruption into an error: pydantic's, when it makes a class.
            return STOPPED if interrupted and "error" in outcome else outcome
    except KeyboardInterrupt:  # before the run trained; a run that trains saves and returns
        return STOPPED
    except UserError as error:
        return _outcome_of(error, job.run_dir)
    finally:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()  # a run in another process may share the GPU
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if _parent is not None and os.getppid() != _parent:
            os._exit(0)  # the driver is gone; the executor would wait for its next job for ever


def train(job: Job) -> Outcome:
    """The outcome of a job, trained in this process unless done; a traceback goes to the log."""
    try:
        from training.config import validate
        from training.experiment import load_experiment

        experiment = load_experiment(job.experiment)
        config = validate(experiment.config, job.config, str(job.run_dir))
        return {"summary": experiment.run(config, job.run_dir)}
    except Exception as error:
        with contextlib.suppress(OSError):  # where the log's disk is full
            traceback.print_exc()
            sys.stderr.flush()
        return _outcome_of(error, job.run_dir)


def _outcome_of(error: Exception, run_dir: Path) -> Outcome:
    for kind, exception in _KINDS.items():  # Busy and RunError before UserError
        if isinstance(error, exception) or (kind == "user" and is_users(error)):
            return {"error": kind, "message": str(error)}
    message = f"{type(error).__name__}: {error}; the end of {run_dir / 'log.txt'}:"
    return {"error": "failed", "message": message, "tail": log_tail(run_dir)}


def log_tail(run_dir: Path) -> str:
    """The last five lines of a run's log."""
    try:
        text = (run_dir / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-5:])


@contextlib.contextmanager
def _log(run_dir: Path) -> Iterator[IO[str]]:
    """Sends standard output and error, also those of libraries in C, to the run's log."""
    path = run_dir / "log.txt"
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        log = open_plain(path, "a")
    before = [os.dup(number) for number in (1, 2)]
    with log:
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            yield log
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            for number, copy in zip((1, 2), before, strict=True):
                os.dup2(copy, number)
                os.close(copy)


_parent: int | None = None


def begin(parent: int, environment: Mapping[str, str]) -> None:
    """Makes this process a worker of the driver on this machine: it saves and ends with it."""
    global _parent
    os.environ.update(environment)
    os.setsid()  # Ctrl-C is the driver's, which stops its runs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.when_parent_ends(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    if os.getppid() != parent:
        os._exit(0)
    _parent = parent
    commit()  # of the code that its runs are trained by


def only_several(launch: Sequence[str]) -> bool:
    """Whether a launch command is for runs of several processes; others start every run."""
    return any("{processes}" in word for word in launch)


def processes_of_all(launch: Sequence[str]) -> int:
    """Processes of every run where a launch command starts all on one machine; else 1."""
    words = " ".join(launch)
    count = None if only_several(launch) or "--num_machines" in words else _COUNT.search(words)
    return int(count[1]) if count else 1


def launch_command(needs: Needs, launch: Sequence[str], node: Node) -> list[str]:
    """The command that starts a run's processes; empty where this process trains.

    A launch command with {processes} in it starts runs of several processes alone, any other starts
    every run as it stands. UserError if there is no such command on PATH.
    """
    several = needs.processes > 1
    words = [] if not several and only_several(launch) else list(launch)
    if several and not launch:
        words = [*_ACCELERATE, *(_SHARDED_NODES if needs.nodes > 1 else _SHARDED).split()]
    values = {"processes": needs.processes, "nodes": needs.nodes, **asdict(node)}
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", str(value)) for word in words]
    if words and shutil.which(words[0]) is None:
        raise UserError(f"--launch: no command {words[0]!r} on PATH")
    return words


def _launched(command: list[str], job: Job, log: IO[str], answers: bool) -> Outcome:
    """The outcome of a run whose processes a command starts, or of one machine's part of it.

    A stop, or the end of this process, closes the processes' input.
    """
    answer = job.run_dir / ANSWER
    if answers:
        answer.unlink(missing_ok=True)
    words = json.dumps({**asdict(job), "run_dir": str(job.run_dir)})
    process = subprocess.Popen(
        [*_DEAF, *command, "-m", "sweeps.task", words],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        text=True,
        env={**_TORCHRUN, **os.environ},
        start_new_session=True,
    )
    assert process.stdin is not None
    stopped = False
    with process.stdin:
        try:
            # Ray interrupts Python and no system call; a wait with an end comes back to Python.
            process.wait(threading.TIMEOUT_MAX)
        except KeyboardInterrupt:
            stopped = True
            process.stdin.close()
            # Once the first process has answered all have saved, and the launcher has an eighth of
            # the time to end: torchrun may wait for minutes for a process of another node.
            end = time.monotonic() + stop_seconds()
            while process.poll() is None and time.monotonic() < end:
                if answers and answer.exists():
                    end = min(end, time.monotonic() + stop_seconds() / 8)
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):  # every process of the run
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if answers and answer.exists():
        outcome = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        return outcome
    if stopped or (not answers and code == 0):
        return STOPPED
    message = f"{command[0]} ended with code {code} and no word of the run"
    return {"error": "failed", "message": message, "tail": log_tail(job.run_dir)}


def _stop_with_input() -> None:
    """Ends this process when its standard input does: with a checkpoint if it trains."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop_seconds())
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """One process, `python -m sweeps.task JOB`, of a run that a launch command has started.

    The first one answers for all. A process that ends with an error has the command end the others,
    so one that merely follows the first one's decision to end does not, and one that fails leaves
    the first the time to report.
    """
    words = json.loads(sys.argv[1])
    job = Job(**{**words, "run_dir": Path(words["run_dir"])})
    signals.follow_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the run trains, and then saves on it
    threading.Thread(target=_stop_with_input, daemon=True).start()
    first = os.environ.get("RANK", "0") == "0"
    try:
        outcome = train(job)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told too late: it has stopped with others
    except SystemExit:  # the first process has met what is wrong, see processes.on_main
        return
    if first:
        write_json(job.run_dir / ANSWER, outcome)
    if "error" in outcome:
        time.sleep(0 if first else FIRST_SECONDS)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
