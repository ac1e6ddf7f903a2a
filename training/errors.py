"""Mistakes that are the user's: shown as one line, without a traceback."""

import difflib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TextIO

LONGEST_NAME, LONGEST_LINE = 100, 2000  # characters of what a message quotes, and of a message


class UserError(ValueError):
    """A mistake of the user's: names the file and key, what was expected and what to do."""


class Damaged(Exception):
    """A checkpoint is not what was written; the message names it and says what is wrong."""


class RunError(UserError):
    """What is wrong with one run's folder; other runs of a sweep go on."""


class Unprinted(OSError):
    """Standard output cannot be written to, as on a full disk."""


class _Guarded:
    """stdout or stderr, and what becomes of an error of writing to it (a full device)."""

    def __init__(self, stream: TextIO, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        self._stream, self._guard = stream, guard

    def write(self, text: str) -> int:
        with self._guard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guard():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _named() -> Iterator[None]:
    """An error of stdout names no file: Unprinted does, unless its reader is gone."""
    try:
        yield
    except (BrokenPipeError, Unprinted):
        raise
    except OSError as error:
        raise Unprinted(f"standard output: cannot write: {error.strerror}") from None


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Ends a command with exit code 2 and one line on stderr for a mistake of the user's.

    A user's mistake is a UserError, a PlanError of param_groups, or one of
    `kinds`; any other error is a bug and keeps its traceback. Ctrl-C gives exit code 130. If the
    reader closes the pipe early, as `| head` does, the exit code is 141, without a line. A full
    disk behind stdout is one line, too; a closed or full stderr does not end the command.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by whoever started the command
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:  # else something has its number already
                os.set_inheritable(number, True)  # the processes of runs have it, too
            setattr(sys, name, os.fdopen(opened, "w" if number else "r"))
    shown = sys.stdout, sys.stderr
    sys.stdout = _Guarded(sys.stdout, _named)
    sys.stderr = _Guarded(sys.stderr, lambda: suppress(OSError))
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(1, 0)
            if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
                # It is stdout that nobody reads, and not a pipe between processes.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python prints at its end
                raise SystemExit(141) from None
        if not (isinstance(error, (Unprinted, *kinds)) or is_users(error)):
            raise
        line = " ".join(str(error).splitlines())[:LONGEST_LINE]
        many = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        more = "; raise the limit, `ulimit -n`, or take fewer workers" if many else ""
        print(f"error: {line}{more}", file=sys.stderr, flush=True)
        try:
            sys.stdout.flush()
        except OSError:  # what Python holds for it would give the exit code 120 at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(2) from None
    finally:
        sys.stdout, sys.stderr = shown


def is_users(error: Exception) -> bool:
    """Whether an error is a mistake of the user's rather than of ours."""
    if isinstance(error, UserError):
        return True
    # Imported here because it imports torch, which a mistyped command need not wait for.
    from param_groups import PlanError

    return isinstance(error, PlanError)


def reason(error: BaseException) -> str:
    """An error's kind and first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def nearest(given: object, valid: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the valid name that is most like the given one; "" of none.

    A name whose last part has the same initials is the likely one: lr for learning_rate.
    """

    def initials(key: str) -> str:
        words = key.rpartition(".")[2].split("_")
        return words[0] if len(words) == 1 else "".join(word[:1] for word in words)

    name, names = str(given)[:LONGEST_NAME], list(valid)
    same = [one for one in names if initials(one) == initials(name)]
    found = difflib.get_close_matches(name, same or names, n=1, cutoff=0.0)
    return f"; did you mean {found[0]!r}?" if found else ""
