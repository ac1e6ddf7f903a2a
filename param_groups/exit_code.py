"""How a command ends: its exit code, and one line for what has ended it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from param_groups.roles import PlanError

# What printing ends in: nobody reads it any more, or there is no room for it.
UNPRINTED = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def with_exit_code(command: Callable[[], None], words: Sequence[str]) -> None:
    """Runs a command; SystemExit with the exit code of what has ended it, unless it returns.

    That is 2 for a mistake of the user's or of his file, which is among `words`, and for a full
    disk behind standard output; 141 where nobody reads that any more, as after `| head`; else what
    the command itself exits with.
    """
    code, lost = 2, None
    ended: BaseException | None = None
    try:
        command()
    except PlanError as error:
        ended = error
        _print(str(error))
    except BaseException as error:
        ended = error
        if isinstance(error, SystemExit) and _is_ours(error):
            code = int(error.code or 0)
        elif isinstance(error, OSError) and error.errno in UNPRINTED and _is_ours(error):
            lost = error
        else:
            _tell(error, words)
    try:
        with suppress(ValueError):  # the file has closed it, which printing has found out before
            print(end="", flush=True)
    except OSError as error:
        lost = error
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python prints at its end
        code = 141
        if not isinstance(lost, BrokenPipeError):
            code = 2
            _print(f"standard output: cannot write: {lost.strerror}")
    if ended or lost:
        raise SystemExit(code) from ended


def _is_ours(error: BaseException) -> bool:
    """Whether this package, or argparse for it, has raised this: nobody else called them."""
    ours = Path(__file__).parent
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return all(file == argparse.__file__ or Path(file).is_relative_to(ours) for file in files)


def _tell(error: BaseException, words: Sequence[str]) -> None:
    """One line with the file's line where it has happened; a traceback where the file has none."""
    files = {Path(word).resolve() for word in words}
    lines = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if Path(frame.f_code.co_filename).resolve() in files
    ]
    if isinstance(error, SyntaxError):
        lines.append(f"{error.filename}, line {error.lineno}")
    if sys.stdout and sys.stdout.closed:
        lines, error = [*words[:1]], ValueError("it has closed standard output")
    if lines:
        try:
            text = " ".join(str(error).split())
        except Exception:  # the file's own class of errors
            text = ""
        what = ": ".join(filter(None, [type(error).__name__, text]))
        _print(f"{lines[-1]}: {what[:1000]}; there is no verdict")
    else:
        with suppress(OSError):
            traceback.print_exc()


def _print(line: str) -> None:
    """A line on standard error, which may be lost: it changes no exit code."""
    with suppress(OSError):
        print(f"error: {line}", file=sys.stderr, flush=True)
