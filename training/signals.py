"""SIGTERM and SIGINT as a request to stop after the step, with a checkpoint."""

from __future__ import annotations

import ctypes
import signal
import threading
from types import FrameType
from typing import Any

# BSD's EX_TEMPFAIL, "try again later": what schedulers are told to requeue on.
STOPPED = 75

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


class StopRequest:
    """While entered, the first SIGTERM or SIGINT sets `requested`; a second SIGINT interrupts.

    Handlers can only be set in the main thread; elsewhere signals keep their meaning.
    """

    _signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


def follow_parent(_worker: int = 0) -> None:
    """Leaves stopping to the parent process, and ends with it, however it ends.

    A signal to the whole group must not end this process before the parent has saved.
    """
    for number in StopRequest._signals:
        signal.signal(number, signal.SIG_IGN)
    when_parent_ends(signal.SIGKILL)


def when_parent_ends(number: int) -> None:
    """Sends this process a signal once the thread that started it has ended (Linux only)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number)
