"""The exit code of a check, an audit or a transfer, from a process that the user's FILE cannot end.

The FILE runs in a process of its own. A verdict is what that has written down, with the lines of
errors; one that ends before (`os._exit`, a signal) gives exit code 2 and one line.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from param_groups.exit_code import Verdict, say, with_exit_code
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
    """A command in another process; ends this one with its exit code, after its errors."""
    with tempfile.TemporaryDirectory() as folder:
        verdict = Path(folder) / "verdict"
        verdict.touch()  # readable whatever umask the file sets
        start = "from param_groups.check.verdict import judge; judge()"
        process = subprocess.Popen([sys.executable, "-c", start, str(verdict), name, *words])
        for _ in range(3):
            with suppress(KeyboardInterrupt):  # which has reached that process, too
                process.wait()
        if process.poll() is None:  # three have not ended it
            process.kill()
        try:
            code, *lines = json.loads(verdict.read_text())
        except (OSError, ValueError):
            files = " ".join(word for word in words if word.endswith(".py")) or name
            code = 2
            lines = [f"{files}: the process ended with code {process.wait()} and no verdict"]
    if lines:  # any further error follows from the first
        say(lines[0])
    raise Verdict(code)


def judge() -> None:
    """The command in this process, `judge VERDICT NAME ...`; writes its exit code and errors."""
    place, name, *words = sys.argv[1:]
    process, end = os.getpid(), os._exit
    said: list[str] = []
    code = 0
    try:
        try:
            with_exit_code(lambda: run(name, words), words, said.append)
        except Verdict as ended:
            code = int(ended.code or 0)
        if os.getpid() == process:  # the file may have made others
            Path(place).write_text(json.dumps([code, *said]))
    except BaseException:  # the file has broken what this needs
        end(1)
