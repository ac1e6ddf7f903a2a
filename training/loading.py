"""Batches from data-loading processes, which end with the run that they load for."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from typing import TypeVar

from training.errors import UserError

Batch = TypeVar("Batch")


def batches(loader: Iterable[Batch]) -> Iterator[Batch]:
    """The batches of a DataLoader; a UserError in one of its processes keeps its own words.

    torch raises it anew with the process's traceback for a message.
    """
    iterator = iter(loader)
    # Registered anew, so that it comes before torch's own, which waits for each of them.
    atexit.unregister(_kill_children)
    atexit.register(_kill_children)
    try:
        yield from iterator
        return
    except UserError as caught:
        error = type(caught)(_own_words(caught))
        caught.__traceback__ = None
    # Now nothing refers to the iterator any more, and its processes end.
    del iterator
    raise error


def _own_words(error: UserError) -> str:
    """What the process said, without torch's frame around it."""
    kind = type(error)
    before, marker, words = str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")
    return words.strip() if marker and before.startswith("Caught ") else str(error)


def _kill_children() -> None:
    """Ends data-loading processes at exit: they ignore the SIGTERM that others would end them by.

    Such a process is left when an error ends the run, as the error holds on to its frames.
    """
    children = [child for child in multiprocessing.active_children() if child.daemon]
    if children:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report their end
    for child in children:
        child.kill()
