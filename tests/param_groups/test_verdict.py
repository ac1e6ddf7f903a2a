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
}

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
        (tmp_path / "file.py").write_text(text)
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
    options = "--widths 16 32 64 --steps 1 --seeds 1 --out".split()
    found, said = ended("check", text, *options, str(tmp_path), end=end)
    assert found == code and said.endswith(says) and said.count("error: ") == (code == 2)


def test_a_file_that_is_no_python_is_one_line(ended):
    code, said = ended("check", "def task(:\n")
    assert code == 2 and said.startswith("error: ") and "file.py, line 1: SyntaxError" in said


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
