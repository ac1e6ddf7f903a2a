"""The exit code of a check or audit is a verdict, whatever the user's FILE does to its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from param_groups.check import verdict
from param_groups.roles import PlanError
from tests.processes import Program

ROOT = Path(__file__).resolve().parents[2]

TASK, BUILD = "def task(width, seed):\n    ", "def build(width):\n    "
PROBES = {
    "exit 0": "import sys; sys.exit(0)",
    "exit 1": "import sys; sys.exit(1)",
    "by argparse": "import argparse; argparse.ArgumentParser().exit()",
    "a word": "import sys; sys.exit('bye')",
    "at once": "import os; os._exit(0)",
    "a mistake": "1 / 0",
    "interrupted": "raise KeyboardInterrupt",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "many lines": "raise ValueError('one\\ntwo')",
    "an error that ends": "class E(Exception):\n        __str__ = lambda _: exit(0)\n    raise E",
    "an alarm": "import signal; signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()",
    "a parent that ends": "import os; os.fork() and os._exit(0)",
    "no endless depth": "f = lambda: f()\n    f()",
}
# What a file's own code does not show: it changes what the command needs, or hands it `sys.exit`.
CHANGED = {
    "os.closerange(0, 99)": "Bad file descriptor",
    "builtins.open = None": "written.py",
    "builtins.print = None": "command.py",
    "sys.stderr.close()": "closed file",
    "json.dumps = None": "the process ended with code 1",
    "os.unlink(sys.argv[1]), os.rmdir(os.path.dirname(sys.argv[1]))": "ended with code 1",
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))": "ended with code 1",
    "torch.set_grad_enabled(False)": "does not require grad",
    "torch.set_default_device('meta')": "meta tensor",
    "globals().update(task=lambda *_: replace(made(*_), batches=None))": "no len()",
    "globals().update(task=lambda *_: replace(made(*_), after_init=sys.exit))": "SystemExit",
    "globals().update(task=lambda *_: replace(made(*_), loss=lambda *_: 0))": "not iterable",
}
UNHARMED = ("os.fork()", "atexit.register(os._exit, 1)", "os.umask(0o777)", "os.chdir('/')")
OTHERS = "import atexit, builtins, json, os, resource, sys\nfrom dataclasses import replace\n"
NOT_PYTHON = (b"def task(:\n", b"x = 1\0", "x".encode("utf-16"), b"x = '\xe9'", b"-" * 9999 + b"1")
OPTIONS = "--widths 16 32 64 --steps 1 --seeds 1 --out".split()

# The other process, whose stdout is `end`, or a pipe that nobody reads, as behind `| head`.
JUDGE = """
import os, sys
from param_groups.check import verdict
read, write = os.pipe()
os.close(read)
end = sys.argv.pop(1)
os.dup2(os.open(end, os.O_WRONLY) if end else write, 1)
sys.stdout = open(1, "w", closefd=False)
sys.modules["param_groups.check.figure"] = None
verdict.judge()
"""


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """(exit code, errors) of a command on a file, whose process has torch imported already."""
    (tmp_path / "judge.py").write_text(JUDGE)

    def run(command, text, *options, end="/dev/stdout"):
        programs = []

        def start(words):
            judge = tmp_path / "judge.py", end, *words[3:]
            programs.append(Program(*judge, cwd=ROOT, PYTHONPATH=ROOT))
            return programs[0]

        monkeypatch.setattr(verdict.subprocess, "Popen", start)
        (tmp_path / "file.py").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SystemExit) as stopped:
            verdict.main(command, [str(tmp_path / "file.py"), *options])
        (program,) = programs
        return stopped.value.code, program.communicate()[1] + capsys.readouterr().err

    return run


@pytest.mark.parametrize("name", PROBES)
def test_a_file_that_ends_the_process_has_no_verdict(tmp_path, ended, name):
    probe = PROBES[name]
    for command, text in (("check", probe), ("check", TASK + probe), ("audit", BUILD + probe)):
        code, said = ended(command, text)
        assert code == 2 and said.startswith(f"error: {tmp_path}/file.py") and "no verdict" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("change", [*CHANGED, *UNHARMED])
def test_a_file_that_changes_what_the_command_needs_has_no_verdict_or_its_own(
    tmp_path, ended, change
):
    text = (ROOT / "examples/coordinate_check_mlp.py").read_text() + OTHERS
    code, said = ended("check", f"{text}made = task\n{change}\n", *OPTIONS, str(tmp_path))
    if change in UNHARMED:
        assert code == 0 and "error" not in said
    else:
        assert code == 2 and said.splitlines()[-1].startswith(f"error: {tmp_path}/file.py")
        assert said.count("error: ") == 1 and CHANGED[change] in said and "Traceback" not in said


@pytest.mark.parametrize("build", ["sys.exit", "os._exit"])
def test_a_function_that_ends_the_process_and_has_no_line_of_its_own(tmp_path, ended, build):
    code, said = ended("audit", f"import os, sys\nbuild = {build}\n")
    assert code == 2 and said.startswith(f"error: {tmp_path}/file.py: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "probe", ["import sys; sys.stdout.close()", "import sys; sys.stdout = None"]
)
def test_a_file_that_closes_standard_output_is_one_line(ended, probe):
    code, said = ended("check", TASK + probe)
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("/dev/stdout", 0, ""),
        ("", 141, ""),
        ("/dev/full", 2, "standard output: cannot write: No space left on device\n"),
    ],
)
def test_a_verdict_and_what_cannot_be_printed(tmp_path, ended, end, code, says):
    text = (ROOT / "examples/coordinate_check_mlp.py").read_text()
    found, said = ended("check", text, *OPTIONS, str(tmp_path), end=end)
    assert found == code and said.endswith(says) and said.count("error: ") == (code == 2)


@pytest.mark.parametrize("content", NOT_PYTHON, ids=range(len(NOT_PYTHON)))
def test_a_file_that_is_no_python_is_one_line(tmp_path, ended, content):
    code, said = ended("check", content)
    assert code == 2 and said.startswith(f"error: {tmp_path}/file.py") and said.count("\n") == 1


def test_the_help_of_a_command_is_no_verdict_and_ends_with_zero(ended):
    assert ended("check", "1 / 0", "--help") == (0, "")


@pytest.mark.thorough
@pytest.mark.parametrize("errors", ["errors", "/dev/full"])
def test_a_mistake_in_a_file_of_this_folder_is_one_line_that_may_be_lost(tmp_path, errors):
    """As from a command line, and though the file exits with 0 after the verdict."""
    text = "import atexit, os; atexit.register(os._exit, 0)\n" + TASK + "1 / 0"
    (tmp_path / "file.py").write_text(text)
    words = [sys.executable, "-m", "param_groups", "check", "file.py"]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with open(tmp_path / errors, "w") as file:
        done = subprocess.run(words, cwd=tmp_path, stderr=file, env=environment)
    assert done.returncode == 2
    said = errors == "/dev/full" or (tmp_path / errors).read_text()
    assert said is True or (said.count("\n") == 1 and "line 3: ZeroDivisionError" in said), said


def test_fits_without_numpy_are_one_line(monkeypatch):
    for name in ("fits", "check.transfer", "check.transfer_command"):
        monkeypatch.delitem(sys.modules, f"param_groups.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(PlanError, match="^transfer needs numpy: pip install 'param-groups"):
        verdict.run("transfer", [])
