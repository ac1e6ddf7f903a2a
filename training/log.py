"""What a run writes down: JSON lines, cut back to a checkpoint on resume, and its history."""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.errors import Damaged, RunError
from training.files import checksum, if_present, open_plain, sync, writing

_PART = 1 << 20  # bytes read at once


class Log:
    """A file of JSON lines, one per record, and the checksum of what is in it.

    `arrays` are the checksums of further files that its lines tell of, by name in the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrays: dict[str, dict[str, Any]] = {}
        self._bytes, self._hash = 0, hashlib.sha256()

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line, null for what is not finite; UserError when it cannot be written."""
        line = (json.dumps(_finite_in(record), allow_nan=False) + "\n").encode()
        with writing(self.path), open_plain(self.path, "ab") as file:
            self._compare(file.tell())
            file.write(line)
        self._bytes += len(line)
        self._hash.update(line)

    def position(self) -> dict[str, Any]:
        """Length and checksum of what has been written, once it is on the disk."""
        if self._bytes:
            self._compare(self.path.stat().st_size if self.path.exists() else 0)
            with writing(self.path):
                sync(self.path)
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest(), "arrays": self.arrays}

    def sums(self) -> dict[str, dict[str, Any]]:
        """Checksums by name of the file itself and of its arrays."""
        found = self.position()
        return {self.path.name: found, **found.pop("arrays")}

    def _compare(self, found: int) -> None:
        """Raises RunError unless the file is as long as it was left."""
        if found != self._bytes:
            raise RunError(
                f"{self.path}: has {found} bytes where the run has written {self._bytes}; leave "
                "its files alone while it trains, delete the folder and run it again"
            )

    def check(self, position: dict[str, Any]) -> None:
        """Raises Damaged unless the file still starts with what it held at `position`, and its
        arrays of that time are as they were written."""
        if position["bytes"] and self._read(position["bytes"]).hexdigest() != position["sha256"]:
            raise Damaged(f"{self.path}: lacks lines that the checkpoint's run had written")
        if other := changed(self.path.parent, position.get("arrays", {})):
            raise Damaged(f"{self.path.parent / other}: not what the checkpoint's run had written")

    def cut(self, length: int) -> None:
        """Drops what was written after the first `length` bytes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self.path), open_plain(self.path, "ab") as file:
            file.truncate(length)
            os.fsync(file.fileno())
        self._bytes, self._hash = length, self._read(length)

    def _read(self, length: int) -> Any:
        """The checksum of the first `length` bytes, or of as many as there are."""
        checksum = hashlib.sha256()
        with if_present(self.path), open_plain(self.path, "rb") as file:
            while part := file.read(min(length, _PART)):
                checksum.update(part)
                length -= len(part)
        return checksum


def changed(folder: Path, sums: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first file of a folder that has not the checksum that it should; None if all have."""
    for name, wanted in sums.items():
        found = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}  # of a log without lines
        with if_present(folder / name):
            found = checksum(folder / name)
        if found != wanted:
            return name
    return None


@dataclass
class History:
    """Times, counts and evaluations of a run, kept across resumes; the summary reports them."""

    evals: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    eval_targets: int | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    resumed_from: list[int] = field(default_factory=list)
    seconds_before: float = 0.0
    eval_seconds: float = 0.0
    observe_seconds: float = 0.0
    started: float = field(default_factory=lambda: time.perf_counter())

    def seconds(self) -> float:
        """Seconds since the run began, without those between a stop and a resume."""
        return self.seconds_before + time.perf_counter() - self.started

    def train_seconds(self) -> float:
        """The same without evaluations and observations."""
        return self.seconds() - self.eval_seconds - self.observe_seconds

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        kept = {name: value for name, value in vars(self).items() if name != "started"}
        return {**kept, "seconds_before": self.seconds()}

    def restore(self, kept: dict[str, Any], step: int) -> None:
        """The inverse of `state`, for a run that resumes after `step`."""
        vars(self).update(kept)
        self.resumed_from = [*self.resumed_from, step]

    def measured(self, finished: bool) -> dict[str, Any]:
        """Last and best evaluation of the loss, then of whatever else was measured."""
        names = list(self.evals[-1][1]) if self.evals else ["loss"]
        values: dict[str, Any] = {}
        for name in names:
            best: tuple[int | None, float | None] = (None, None)
            for step, means in self.evals:
                new, old = means[name], best[1]
                if old is None or (new < old if lower_is_better(name) else new > old):
                    best = step, new
            last = self.evals[-1][1][name] if finished else None
            values |= {f"final_eval_{name}": last, f"best_eval_{name}": best[1]}
            values["best_eval_step" if name == "loss" else f"best_eval_{name}_step"] = best[0]
        return values


def lower_is_better(measure: str) -> bool:
    """Whether a measure of an evaluation is better low: a loss, in nats or bits, or part of it."""
    return measure in ("loss", "bits", "infilling")


def _finite_in(value: Any) -> Any:
    """A record's value, with null for NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite_in(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def finite(value: float | None) -> float | None:
    """The value as JSON can hold it: None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
