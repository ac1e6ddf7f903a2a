"""The exit code of a check, an audit or a transfer, from a process that the user's FILE cannot end.

The FILE runs in a process of its own. A verdict is what that has written down; one that ends before
(`sys.exit`, `os._exit`, an error, a signal) gives exit code 2 and one line.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from param_groups.exit_code import with_exit_code
from param_groups.roles import PlanError

# A command and the file that has it.
COMMANDS = {"check": "command", "audit": "audit", "transfer": "transfer_command"}


def run(name: str, words: Sequence[str]) -> None:
    """One of the commands, in this process; its module is imported only now."""
    try:
        module = importlib.import_module(f"param_groups.check.{COMMANDS[name]}")
    except ModuleNotFoundError as error:
        if error.name != "numpy":  # of all that a command imports, torch alone is required
            raise
        raise PlanError(f"{name} needs numpy: pip install 'param-groups[check]'") from None
    module.main(words)


def main(name: str, words: Sequence[str]) -> None:
    """A command in another process; ends this one with its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict"
        start = "from param_groups.check.verdict import judge; judge()"
        process = subprocess.Popen([sys.executable, "-c", start, str(verdict), name, *words])
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which has reached that process, too
            code = process.wait()
        if verdict.exists():
            raise SystemExit(int(verdict.read_text()))
    files = " ".join(word for word in words if word.endswith(".py")) or name
    print(f"error: {files}: the process ended with code {code} and no verdict", file=sys.stderr)
    raise SystemExit(2)


def judge() -> None:
    """The command in this process, `judge VERDICT NAME ...`; writes its exit code there."""
    place, name, *words = sys.argv[1:]
    code = 0
    try:
        with_exit_code(lambda: run(name, words), words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    Path(place).write_text(str(code))
