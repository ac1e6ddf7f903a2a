"""Files that are written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader, or a crash, sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Holds a folder for this process; UserError if another one holds it.

    The lock goes with the process, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is running this {what}; wait for it"
            ) from None
        yield


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically; raises ValueError for NaN, which JSON does not have."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
