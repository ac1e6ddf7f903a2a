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


class Verdict(SystemExit):
    """The exit code that a command has come to. The user's file may raise any other SystemExit."""


def say(line: str) -> None:
    """An error's line on standard error, which may be lost: it changes no exit code."""
    with suppress(OSError, ValueError):
        print(f"error: {line}", file=sys.stderr, flush=True)


def with_exit_code(
    command: Callable[[], None], words: Sequence[str], say: Callable[[str], None] = say
) -> None:
    """Runs a command; Verdict with the exit code of what has ended it, unless it returns.

    That is 2 for a mistake of the user's or of his file, which is among `words`, and for a full
    disk behind standard output; 141 where nobody reads that any more, as after `| head`; else what
    the command itself exits with. An error's line goes to `say`.
    """
    code, lost = 2, None
    ended: BaseException | None = None
    files = [os.path.abspath(word) for word in words if word.endswith(".py")]
    try:
        command()
    except PlanError as error:
        ended = error
        say(str(error))
    except Verdict as error:
        ended, code = error, int(error.code or 0)
    except BaseException as error:
        ended = error
        if isinstance(error, SystemExit) and _is_ours(error):
            code = int(error.code or 0)
        elif isinstance(error, OSError) and error.errno in UNPRINTED and _is_ours(error):
            lost = error
        elif files:
            say(_line(error, files[0]))
        else:
            traceback.print_exc()
    try:
        print(end="", flush=True)
    except OSError as error:
        lost = error
    except Exception:  # the file has closed it, which printing has found out before
        pass
    if lost:
        with suppress(OSError):  # for what Python prints at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
        if not isinstance(lost, BrokenPipeError):
            code = 2
            say(f"standard output: cannot write: {lost.strerror}")
    if ended or lost:
        raise Verdict(code) from ended


def _is_ours(error: BaseException) -> bool:
    """Whether this package has raised this by printing, or argparse for it: nobody else's code."""
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SystemExit) and names[-1] != argparse.__file__:
        return False  # a value of the file's that is called from here, such as sys.exit itself
    return all(name == argparse.__file__ or _inside(name) for name in names)


def _inside(name: str) -> bool:
    return Path(name).is_relative_to(Path(__file__).parent)


def _line(error: BaseException, file: str) -> str:
    """What has ended a user's file, with its line, or the last one of this package."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    lines = [f"{file}, line {line}" for name, line in frames if name == file]
    if isinstance(error, SyntaxError) and error.lineno:
        lines.append(f"{error.filename}, line {error.lineno}")
    ours = [f"{file}: {Path(n).name}, line {line}" for n, line in frames if _inside(n)]
    try:
        text = " ".join(str(error).split())[:1000]
    except BaseException:  # the file's own class of errors
        text = ""
    if getattr(sys.stdout, "closed", False):
        lines, text = [file], "it has closed standard output"
    what = ": ".join(filter(None, [type(error).__name__, text]))
    return f"{(lines or ours or [file])[-1]}: {what}; there is no verdict"
