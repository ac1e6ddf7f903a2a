"""Mistakes that are the user's: shown as one line, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake of the user's: names the file and key, what was expected and what to do."""


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Ends a command with exit code 2 and one line on stderr for UserError and `kinds`."""
    try:
        yield
    except (UserError, *kinds) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
