"""Logs of a run: JSON lines that grow with it and are cut back to a checkpoint when it resumes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from training.checkpoint import Damaged
from training.files import open_plain, sync, writing

_PART = 1 << 20  # bytes read at once


class Log:
    """A file of JSON lines, one per record, and the checksum of what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes, self._hash = 0, hashlib.sha256()

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line; UserError when it cannot be written, ValueError for NaN."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with writing(self.path), open_plain(self.path, "ab") as file:
            file.write(line)
        self._bytes += len(line)
        self._hash.update(line)

    def position(self) -> dict[str, Any]:
        """Length and checksum of what has been written, once it is on the disk."""
        if self._bytes:
            with writing(self.path):
                sync(self.path)
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def check(self, position: dict[str, Any]) -> None:
        """Raises Damaged unless the file still starts with what it held at `position`."""
        if not position["bytes"]:
            return
        found = self._read(position["bytes"])
        if found is None or found.hexdigest() != position["sha256"]:
            raise Damaged(f"{self.path}: lacks lines that the checkpoint's run had written")

    def cut(self, length: int) -> None:
        """Drops what was written after the first `length` bytes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self.path), open_plain(self.path, "ab") as file:
            file.truncate(length)
            os.fsync(file.fileno())
        self._bytes, self._hash = length, self._read(length)

    def _read(self, length: int) -> Any:
        """The checksum of the first `length` bytes; None if there are fewer."""
        checksum = hashlib.sha256()
        try:
            with open_plain(self.path, "rb") as file:
                while length and (part := file.read(min(length, _PART))):
                    checksum.update(part)
                    length -= len(part)
        except OSError:
            return None
        return None if length else checksum
