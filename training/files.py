"""Files that are written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader, or a crash, sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unique on every machine that shares the folder, where process numbers are not.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Busy(UserError):
    """A folder is held by another process."""


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Holds a folder for this process; Busy if another one holds it, on any machine.

    The lock goes with the process, however it ends. Raises UserError where the file system has no
    locks: two processes would then write the same files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{folder}: another process is running this {what}; wait for it") from None
        except OSError as error:
            raise UserError(
                f"{folder / '.lock'}: this file system has no locks ({error.strerror}); use one "
                "that has flock (a local disk, NFS 4, Lustre mounted with -o flock)"
            ) from None
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder now."""
    try:
        with open(folder / ".lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically; raises ValueError for NaN, which JSON does not have."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
