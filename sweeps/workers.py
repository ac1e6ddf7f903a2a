"""Worker processes: each imports an experiment once and runs one config after another.

Launcher and worker talk in JSON lines over the worker's standard input and output; whatever a run
prints goes to `log.txt` in its folder. With a launch command, such as `accelerate launch`, each run
is started anew by that command, in as many processes as it starts: the first one tells the launcher
how the run goes, and all of them save and end when their standard input does, which is how they are
asked to stop and also what happens when the launcher dies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from training import allocator, signals
from training.errors import RunError, UserError, is_users
from training.files import Busy, open_plain, writing

STOP_SECONDS = "TRAINING_STOP_SECONDS"  # a variable: large models take longer to save
END_SECONDS = 60.0  # for a launch command to end after the run it started
FIRST_SECONDS = 5.0  # for the first process of a run to report what all of them have found

Progress = Callable[[int, int, float], None]


class RunRefused(UserError):
    """A run cannot start because of a mistake of the user's; the message is theirs to read."""


class RunBusy(Exception):
    """Another process is at work in the run's folder."""


class RunUnusable(Exception):
    """A run's folder holds what cannot be used; trying again would not help."""


class RunStopped(Exception):
    """A run was stopped from outside, with what it needs to go on."""


class RunFailed(Exception):
    """A run ended for a reason of its own; the message holds the end of its log."""


_ENDS = {"busy": RunBusy, "unusable": RunUnusable, "refused": RunRefused}


class Worker:
    """The launcher's side: a process that is started when needed and replaced when it dies."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[str] | None = None

    def run(
        self, experiment: str, config: dict[str, Any], run_dir: Path, progress: Progress
    ) -> dict[str, Any]:
        """The summary of one run that is done; otherwise one of this module's exceptions."""
        process = self._started(_job(experiment, config, run_dir) + "\n")
        summary = _outcome(map(json.loads, process.stdout), run_dir, progress)
        if summary is None:
            raise self._died(run_dir)
        return summary

    def ask_to_stop(self) -> None:
        """Has the run in progress save a checkpoint and end; without one the process ends."""
        process = self.process
        if process is not None:
            process.terminate()

    def close(self) -> None:
        """Ends the process; a run in progress is killed."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def _started(self, job: str) -> subprocess.Popen[str]:
        """The process with a job handed over; one that died while it had none is replaced."""
        while True:
            fresh = self.process is None
            process = self._alive()
            try:
                process.stdin.write(job)
                process.stdin.flush()
                return process
            except BrokenPipeError:
                process.wait()
                self.process = None
                if fresh:
                    raise

    def _alive(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sweeps.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is the launcher's, which ends its workers
            )
        return self.process

    def _died(self, run_dir: Path) -> RunFailed:
        process, self.process = self.process, None
        code = process.wait() if process is not None else "none, closed by the launcher"
        return _ended(f"the worker process ended with code {code}", run_dir)


# A scheduler may signal every process of a job. What starts a run's processes must outlive that:
# accelerate would leave its process behind, torchrun kill what has not saved after 30 seconds; it
# listens to SIGTERM again unless its own variable says otherwise.
_DEAF = ("sh", "-c", "trap '' TERM USR2; exec \"$@\"", "sh")
_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"}


class LaunchedWorker(Worker):
    """Starts each run by a command that starts its processes, such as `accelerate launch`.

    The command gets `-m sweeps.workers JOB` as its last words, and must hand its standard input
    and output on to the processes it starts, as torchrun, accelerate and srun do. Raises RunRefused
    if there is no such command.
    """

    def __init__(self, environment: dict[str, str], launch: Sequence[str]) -> None:
        super().__init__(environment)
        self.launch = tuple(launch)
        self.asked = False

    def run(
        self, experiment: str, config: dict[str, Any], run_dir: Path, progress: Progress
    ) -> dict[str, Any]:
        """The summary of one run that is done; otherwise one of this module's exceptions."""
        path = run_dir / "log.txt"
        with writing(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            log = open_plain(path, "a")
        with log:
            process = self._launched(_job(experiment, config, run_dir), log)
            try:
                summary = _outcome(_messages(process.stdout, log), run_dir, progress)
                code = _wait(process)
            finally:
                self.close()
        if summary is not None:
            return summary
        if self.asked:  # before it trained
            raise RunStopped
        raise _ended(f"{self.launch[0]} ended with code {code} and no word of the run", run_dir)

    def ask_to_stop(self) -> None:
        """Has the run in progress save a checkpoint and end."""
        process, self.asked = self.process, True
        if process is not None:
            process.stdin.close()

    def close(self) -> None:
        """Ends every process of a run in progress: each follows the command that started it."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()

    def _launched(self, job: str, log: IO[str]) -> subprocess.Popen[str]:
        found = shutil.which(self.launch[0], path=self.environment.get("PATH"))
        if found is None:
            raise RunRefused(f"--launch: no command {self.launch[0]!r} on PATH")
        self.process = subprocess.Popen(
            [*_DEAF, *self.launch, "-m", "sweeps.workers", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**_TORCHRUN, **self.environment},
            start_new_session=True,
        )
        if self.asked:
            self.process.stdin.close()
        return self.process


def crew(workers: int, threads: int, launch: Sequence[str] = ()) -> list[Worker]:
    """Workers that share this machine and its GPUs.

    Without a launch command a worker has one GPU; with one, an equal share of all of them.
    """
    share = max(1, len(visible_gpus()) // workers) if launch else 1
    settings = environments(workers, threads, share)
    return [LaunchedWorker(own, launch) if launch else Worker(own) for own in settings]


class Scheduler(Protocol):
    """What hands out runs and takes their results: a sweep's, or a search's."""

    stopped: bool
    error: Exception | None

    def finish(self, task: Any, summary: dict[str, Any]) -> None:
        """A run is done."""

    def put_back(self, task: Any) -> None:
        """A run is held by another launcher, or was stopped."""

    def give_up(self, task: Any, reason: str) -> None:
        """A run cannot be used."""

    def fail(self, task: Any, reason: str) -> None:
        """A run ended for a reason of its own."""

    def stop(self, error: Exception | None = None) -> None:
        """No more runs are handed out."""


def attempt(
    worker: Worker,
    scheduler: Scheduler,
    task: Any,
    source: Any,
    progress: Progress,
    note: Callable[[str], None],
) -> None:
    """Runs one task (`config`, `run`) of a sweep or search and tells the scheduler how it ended."""
    try:
        summary = worker.run(
            source.config.experiment,
            task.config.model_dump(mode="json"),
            source.folder / task.run,
            progress,
        )
        scheduler.finish(task, summary)
    except (RunBusy, RunStopped):
        scheduler.put_back(task)
    except RunUnusable as problem:
        scheduler.give_up(task, str(problem))
    except RunFailed as failure:
        if not scheduler.stopped:  # else the launcher itself has ended the worker
            scheduler.fail(task, str(failure))
            note(f"{task.run}: {failure}")


def run_all(
    crew: Sequence[Worker], scheduler: Scheduler, serve: Callable[[int, Worker], None]
) -> None:
    """Calls serve(index, worker) in one thread per worker until all have returned.

    Raises KeyboardInterrupt when interrupted, after every run at work here has saved a checkpoint
    (at once when interrupted again), and whatever ended a thread. No worker outlives the call.
    """

    def guarded(index: int, worker: Worker) -> None:
        try:
            serve(index, worker)
        except Exception as error:  # a thread's own end would leave the others waiting for ever
            scheduler.stop(error)
        finally:
            worker.close()

    ends = in_threads(guarded, enumerate(crew))
    try:
        for end in ends:
            end.wait()
    except KeyboardInterrupt:
        scheduler.stop()
        _let_save(crew, ends)
        raise
    finally:
        scheduler.stop()
        for worker in crew:
            worker.close()
    if scheduler.error:
        raise scheduler.error


def in_threads(
    function: Callable[..., None], calls: Iterable[tuple[Any, ...]]
) -> list[threading.Event]:
    """Calls a function in threads, one per tuple of arguments; for each an event that it has ended.

    An interrupted Thread.join takes its thread for ended (CPython before 3.13); an event does not.
    """

    def call(arguments: tuple[Any, ...], ended: threading.Event) -> None:
        try:
            function(*arguments)
        finally:
            ended.set()

    events = []
    for arguments in calls:
        events.append(threading.Event())
        threading.Thread(target=call, args=(arguments, events[-1]), daemon=True).start()
    return events


def _let_save(crew: Sequence[Worker], ends: Sequence[threading.Event]) -> None:
    """Asks the workers to stop and waits until their runs have saved what they need to go on."""
    print("stopping: runs save a checkpoint; interrupt again to end them now", file=sys.stderr)
    for worker in crew:
        worker.ask_to_stop()
    deadline = time.monotonic() + stop_seconds()
    for end in ends:
        end.wait(max(0.0, deadline - time.monotonic()))


def stop_seconds() -> float:
    """Seconds that a run has to reach its next step and save when it is asked to stop: 120, or what
    the environment says. UserError if that is no number."""
    text = os.environ.get(STOP_SECONDS, "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise UserError(f"{STOP_SECONDS}: expected a number of seconds above 0, got {text!r}")
    return seconds


def threads_each(workers: int, threads: int | None) -> int:
    """Threads of each worker, by default an equal share of the cores; UserError below 1."""
    if workers < 1 or (threads is not None and threads < 1):
        raise UserError("--workers and --threads must be at least 1")
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # those of the batch job, not of the node
    else:
        cores = os.cpu_count() or 1
    return threads or max(1, cores // workers)


def environments(workers: int, threads: int, processes: int = 1) -> list[dict[str, str]]:
    """The environment of each worker: its threads and, where there are GPUs, `processes` of them.

    GPUs are handed out in turn. Workers with one process each may share a GPU, as small runs do;
    where a run has several, raises UserError unless each process can have its own. Without GPUs
    nothing is said about them.
    """
    gpus = visible_gpus()
    if gpus and processes > 1 and workers * processes > len(gpus):
        raise UserError(
            f"{workers} workers with {processes} processes each need {workers * processes} GPUs, "
            f"but {len(gpus)} are visible; take at most {len(gpus) // processes} workers"
        )
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    turns = itertools.cycle(gpus)
    own = [list(itertools.islice(turns, processes)) for _ in range(workers)]
    return [
        {**settings, "CUDA_VISIBLE_DEVICES": ",".join(some)} if some else dict(settings)
        for some in own
    ]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; torch is not loaded.

    Without that variable, every GPU that nvidia-smi lists; parts of a GPU (MIG) must be named in
    the variable.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        words = [word.strip() for word in named.split(",")]
        return list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, words))
    try:
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE)


def log_tail(run_dir: Path, lines: int = 5) -> str:
    """The last lines of a run's log."""
    try:
        text = (run_dir / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _job(experiment: str, config: dict[str, Any], run_dir: Path) -> str:
    return json.dumps({"experiment": experiment, "config": config, "run_dir": str(run_dir)})


def _outcome(
    messages: Iterable[dict[str, Any]], run_dir: Path, progress: Progress
) -> dict[str, Any] | None:
    """The summary that messages end with, or the exception they tell of; None if they just end."""
    for message in messages:
        if message["event"] == "step":
            progress(message["step"], message["steps"], message["loss"])
        elif message["event"] == "done":
            if message["summary"]["status"] == "stopped":
                raise RunStopped
            return message["summary"]
        elif message["event"] in _ENDS:
            raise _ENDS[message["event"]](message["error"])
        else:
            raise _ended(f"{message['error']}; the end of {run_dir / 'log.txt'}:", run_dir)
    return None


def _messages(lines: Iterable[str], log: IO[str]) -> Iterator[dict[str, Any]]:
    """The messages among what a launch command prints; the rest goes to the log."""
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict) and "event" in message:
            yield message
        else:
            log.write(line)
            log.flush()


def _wait(process: subprocess.Popen[str]) -> int | str:
    """The exit code of a command whose run has ended; it is not waited for for ever."""
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "none, it had to be killed"


def _ended(how: str, run_dir: Path) -> RunFailed:
    tail = log_tail(run_dir)
    return RunFailed(f"{how}\n{tail}" if tail else how)


def _queue(jobs: IO[str]) -> queue.SimpleQueue:
    """The jobs as they come; when the launcher is gone, the run at work is told to stop.

    A run that trains then saves and ends; one that does not train yet ends at once.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        for line in jobs:
            waiting.put(line)
        waiting.put(None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()
    return waiting


Tell = Callable[..., None]


def _teller(answers: IO[str]) -> Tell:
    def tell(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone, see _queue
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    return tell


def _work(jobs: IO[str], tell: Tell) -> None:
    """The worker's side: run jobs until the launcher closes the pipe."""
    for line in iter(_queue(jobs).get, None):
        _run(json.loads(line), tell)


def _run(job: dict[str, Any], tell: Tell) -> bool:
    """Runs a job and tells how it ended; whether it is done or stopped."""
    run_dir = Path(job["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        _log_to(run_dir / "log.txt")
        summary = _train(job, run_dir, lambda *step: tell(event="step", **_named(step)))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        tell(**_told(error))
        return False
    tell(event="done", summary=summary)
    return True


def _told(error: Exception) -> dict[str, str]:
    """What the launcher hears of an error."""
    if isinstance(error, Busy):
        return {"event": "busy", "error": str(error)}
    if isinstance(error, RunError):
        return {"event": "unusable", "error": str(error)}
    if is_users(error):
        return {"event": "refused", "error": str(error)}
    return {"event": "failed", "error": f"{type(error).__name__}: {error}"}


def _train(job: dict[str, Any], run_dir: Path, progress: Progress) -> dict[str, Any]:
    from training.config import validate
    from training.experiment import load_experiment

    experiment = load_experiment(job["experiment"])
    config = validate(experiment.config, job["config"], str(run_dir))
    return experiment.run(config, run_dir, progress)


def _named(step: tuple[int, int, float]) -> dict[str, float]:
    return dict(zip(("step", "steps", "loss"), step))


def _log_to(path: Path) -> None:
    """Sends standard output and error, also those of libraries in C, to a file."""
    with writing(path), open_plain(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _rank(job: str, tell: Tell) -> None:
    """One process of a run that a launch command has started; the first one tells of it.

    A process that ends with an error has the command end the others, so one that merely follows the
    first one's decision to end does not, and one that fails beside it leaves it the time to report.
    """
    signals.follow_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the run trains, and then saves on it
    threading.Thread(target=_stop_with_input, daemon=True).start()
    first = os.environ.get("RANK", "0") == "0"
    try:
        fine = _run(json.loads(job), tell if first else lambda **_: None)
    except SystemExit:  # the first process has found what is wrong, see processes.on_main
        return
    if not fine:
        time.sleep(0 if first else FIRST_SECONDS)
        raise SystemExit(1)


def _stop_with_input() -> None:
    """Ends this process when its standard input does: with a checkpoint if it trains."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(stop_seconds())
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs as `python -m sweeps.workers [JOB]`; keeps the real standard output for answers."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a scheduler's word to the launcher
    allocator.keep_memory()
    tell = _teller(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    jobs = sys.argv[1:] if argv is None else argv
    if jobs:
        _rank(jobs[0], tell)
    else:
        _work(sys.stdin, tell)


if __name__ == "__main__":
    main()
