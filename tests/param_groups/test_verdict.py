"""The exit code of a check or audit is a verdict, whatever the user's FILE does to its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from param_groups.check import verdict
from param_groups.roles import PlanError

ROOT = Path(__file__).resolve().parents[2]

TASK = "def task(width, seed):\n    "
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


def ended(folder, command, text):
    (folder / "file.py").write_text(text)
    words = [sys.executable, "-m", "param_groups", command, folder / "file.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("command", ["check", "audit"])
def test_a_file_that_ends_the_process_has_no_verdict(tmp_path, command, name):
    function = TASK if command == "check" else "def build(width):\n    "
    for text in (PROBES[name], function + PROBES[name]) if command == "check" else (PROBES[name],):
        code, said = ended(tmp_path, command, text)
        assert code == 2 and said.startswith(f"error: {tmp_path}/file.py") and "no verdict" in said
        assert said.count("\n") == 1


def test_a_file_that_is_no_python_is_one_line(tmp_path):
    code, said = ended(tmp_path, "check", "def task(:\n")
    assert code == 2 and said.startswith("error: ") and "file.py, line 1: SyntaxError" in said


def test_a_file_that_exits_after_the_verdict_does_not_change_it(tmp_path):
    text = "import atexit, os\natexit.register(os._exit, 0)\n" + TASK + "return 3\n"
    code, said = ended(tmp_path, "check", text)
    assert code == 2 and said.count("\n") == 1, said


def test_fits_without_numpy_are_one_line(monkeypatch):
    for name in ("fits", "check.transfer", "check.transfer_command"):
        monkeypatch.delitem(sys.modules, f"param_groups.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(PlanError, match="^transfer needs numpy: pip install 'param-groups"):
        verdict.run("transfer", [])
