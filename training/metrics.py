"""Logs of a run: JSON lines that grow with it and are cut back to a checkpoint when it resumes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from training.checkpoint import Damaged
from training.errors import UserError


class Log:
    """A file of JSON lines, one per record."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line; UserError when it cannot be written, ValueError for NaN."""
        line = json.dumps(record, allow_nan=False) + "\n"
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write: {error.strerror}. Make room there and run the same "
                "command again: it goes on from the last checkpoint"
            ) from None

    def position(self) -> dict[str, Any]:
        """Length and checksum of what is on the disk now, for a checkpoint."""
        if not self.path.exists():
            return {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())
            content = file.read()
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def check(self, position: dict[str, Any]) -> None:
        """Raises Damaged unless the file still starts with what it held at `position`."""
        length = position["bytes"]
        content = self.path.read_bytes()[:length] if self.path.exists() else b""
        if len(content) < length or hashlib.sha256(content).hexdigest() != position["sha256"]:
            raise Damaged(f"{self.path}: lacks lines that the checkpoint's run had written")

    def cut(self, length: int) -> None:
        """Drops what was written after the first `length` bytes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            file.truncate(length)
            os.fsync(file.fileno())
