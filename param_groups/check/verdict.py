"""The exit code of a check, an audit or a transfer, from a process that the user's FILE cannot end.

The FILE runs in a process of its own. A verdict is what that has written down; one that ends before
(`sys.exit`, `os._exit`, an error, a signal) gives exit code 2 and one line.
"""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from param_groups.roles import PlanError

# What printing ends in: nobody reads it any more, or there is no room for it.
UNPRINTED = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
    code, lost = 2, None
    try:
        run(name, words)
        code = 0
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
    except BaseException as error:
        if isinstance(error, SystemExit) and _is_ours(error):
            code = int(error.code or 0)
        elif isinstance(error, OSError) and error.errno in UNPRINTED and _is_ours(error):
            lost = error
        else:
            _tell(error, words)
    try:
        print(end="", flush=True)
    except OSError as error:
        lost = error
    except ValueError:  # the FILE has closed it
        code = 2
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python prints at its end
        code = 2
        if isinstance(lost, BrokenPipeError):  # `| head` has seen enough
            code = 141
        else:
            print(f"error: standard output: cannot write: {lost.strerror}", file=sys.stderr)
    Path(place).write_text(str(code))


def _is_ours(error: BaseException) -> bool:
    """Whether this package, or argparse for it, has raised this: nobody else called them."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    return all(name == "argparse" or name.startswith("param_groups.") for name in names)


def _tell(error: BaseException, words: Sequence[str]) -> None:
    """One line with the FILE's line where it has happened; a traceback where the FILE has none."""
    files = {str(Path(word)) for word in words}
    lines = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename in files
    ]
    if isinstance(error, SyntaxError):
        lines.append(f"{error.filename}, line {error.lineno}")
    if getattr(sys.stdout, "closed", False):
        lines, error = [" ".join(files)], ValueError("it has closed standard output")
    if not lines:
        traceback.print_exc()
        return
    what = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"error: {lines[-1]}: {what[:1000]}; there is no verdict", file=sys.stderr)
