"""Programs of tests in processes that have torch imported already: tenths of a second, not seconds.

A server imports what all programs need and forks; what is run, its arguments, its environment and
how it ends are as from a command line, torchrun's variables included. The launchers themselves are
tested where a test says so.
"""

import atexit
import fcntl
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.forkserver import _forkserver
from pathlib import Path

LAUNCH_CONFIGS = Path(__file__).resolve().parents[1] / "scripts/accelerate"

_context = multiprocessing.get_context("forkserver")
# A run of two processes needs torch's compiler, which takes as long to import as torch itself does.
_context.set_forkserver_preload(
    "torch torch._dynamo accelerate pytest training.loop measure.probes sweeps.driver "
    "vit_imagenet.data vit_imagenet.model vit_imagenet.transforms".split()
)


@functools.cache
def _share_server():
    """Has the processes of one test run use the server of the first that needs one: what it imports
    takes four seconds. It ends when nobody holds its pipe any more."""
    note = Path(tempfile.gettempdir(), f"forkserver-{os.environ['PYTEST_XDIST_TESTRUNUID']}")
    with open(note, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            _forkserver._forkserver_address, pipe = json.load(file)
            _forkserver._forkserver_alive_fd = os.open(pipe, os.O_WRONLY)
            _forkserver.ensure_running = lambda: None
        except (ValueError, OSError):  # there is none, or who started it has ended
            _forkserver.ensure_running()
            file.truncate(0)
            pipe = f"/proc/{os.getpid()}/fd/{_forkserver._forkserver_alive_fd}"
            json.dump([_forkserver._forkserver_address, pipe], file)
            atexit.register(note.unlink, missing_ok=True)


class Program:
    """`python ARGUMENTS`, or as many processes of it as torchrun would start; like a Popen."""

    def __init__(self, *arguments, ranks=1, cwd=None, **environment):
        self.returncode = None
        folder = Path(tempfile.mkdtemp(prefix="program-"))
        self.files = [folder / name for name in ("out", "err")]
        for file in self.files:
            file.touch()
        self.stdout = _Growing(self.files[0], self.poll)
        given = {**os.environ, **{key: str(value) for key, value in environment.items()}}
        together, self.store = meeting(ranks) if ranks > 1 else ({}, None)
        self.processes = []
        if "PYTEST_XDIST_TESTRUNUID" in os.environ:
            _share_server()
        for rank in range(ranks):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), **together} if ranks > 1 else {}
            told = [*map(str, arguments)], {**given, **mine}, str(cwd or os.getcwd()), self.files
            process = _context.Process(target=_run, args=told)
            process.start()
            self.processes.append(process)

    @property
    def pids(self):
        return [process.pid for process in self.processes]

    def poll(self):
        """None while any process runs; one that fails ends the others, as with torchrun."""
        codes = [process.exitcode for process in self.processes]
        if any(codes) and None in codes:
            time.sleep(0.3)  # for those that stop by themselves with the same message
            for process in self.processes:
                process.terminate()
        if None not in codes:
            self.returncode = next(filter(None, codes), 0)
        return self.returncode

    def wait(self, timeout=200):
        """The exit code: of the first process that failed, or 0."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                for process in self.processes:
                    process.kill()
                raise TimeoutError(f"{timeout} s: {self.files[1].read_text()}")
            time.sleep(0.02)
        return self.returncode

    def wait_for(self, words):
        """Until it prints a line with these words."""
        while words not in (line := self.stdout.readline()):
            assert line, self.files[1].read_text()

    def communicate(self, timeout=200):
        """(what it printed, its errors) once all processes have ended."""
        self.wait(timeout)
        texts = tuple(file.read_text() for file in self.files)
        shutil.rmtree(self.files[0].parent)
        return texts

    def send_signal(self, number):
        """To all processes, as from whoever started them."""
        for pid in self.pids:
            os.kill(pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def meeting(ranks):
    """Variables of processes that meet in a store of this one's, as torchrun's do, and the store:
    nobody else can take a port that is bound before its number is known."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": ranks}
    told |= {"LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in told.items()}, store


def launch_environment(config, *options):
    """What `accelerate launch` with a file of `LAUNCH_CONFIGS` tells the processes, by its code.

    With a port of its own: for several machines accelerate refuses one that is in use, and the
    files' may be, by a launch of another test.
    """
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = str(LAUNCH_CONFIGS / f"{config}.yaml")
    given = ["--config_file", file, "--main_process_port", "0", *options, "program.py"]
    arguments = launch.launch_command_parser().parse_args(given)
    arguments, *_ = launch._validate_launch_command(arguments)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    environment = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(prefixes)}


class _Growing:
    """Lines of a file that processes still write."""

    def __init__(self, path, ended):
        self.file, self.ended, self.rest = open(path), ended, ""

    def readline(self):
        """The next line, waited for; empty once the processes have ended."""
        while True:
            over = self.ended() is not None
            self.rest += self.file.readline()
            if self.rest.endswith("\n") or over:
                line, self.rest = self.rest, ""
                return line
            time.sleep(0.01)


def finished(*arguments, **more):
    """A program that has ended, with `returncode`, `out` and `err`."""
    program = Program(*arguments, **more)
    program.out, program.err = program.communicate()
    return program


def gone(pid):
    """Whether a process has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_end(pids, minutes=5):
    """Waits until all processes have ended; whether they do."""
    end = time.monotonic() + 60 * minutes
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return all(map(gone, pids))


def _run(arguments, environment, cwd, files):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, file in zip((1, 2), files, strict=True):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    multiprocessing.set_start_method(None, force=True)  # what this process starts is as elsewhere
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    module = arguments[0] == "-m"
    sys.argv = arguments[1:] if module else arguments
    if module:
        sys.path.insert(0, cwd)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
