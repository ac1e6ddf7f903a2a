"""Caches of tokenised text and of pixels: folders named by their content, checked before use.

A cache is some files and a meta.json with the size, time of change and SHA-256 of each. It gets its
name when it is complete, so an interrupted preparation leaves nothing behind and of concurrent
ones the first wins. Files are hashed when they are made. A file of another time, as of a copied
cache, is hashed again, and what is damaged is prepared again.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from training.config import Section, load
from training.errors import UserError, one_line_errors, reason
from training.files import discard, parse_json, publish, scratch_folder, sha256, sync, write_json

META = "meta.json"
REPORT_SECONDS = 10.0

Report = Callable[[str], None]
Opened = TypeVar("Opened")


def print_line(line: str) -> None:
    """A line on stderr."""
    print(line, file=sys.stderr, flush=True)


class Progress:
    """Reports every REPORT_SECONDS how much of a split is tokenised."""

    def __init__(self, split: str, report: Report) -> None:
        self.split, self.report = split, report
        self.due = time.monotonic() + REPORT_SECONDS

    def __call__(self, documents: int, tokens: int) -> None:
        if time.monotonic() >= self.due:
            self.report(f"{self.split}: {documents:,} documents, {tokens:,} tokens")
            self.due = time.monotonic() + REPORT_SECONDS


# Making


def digest(identity: Any) -> str:
    """A short name for all that decides a cache's content (JSON types)."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def prepare(
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
    packages: tuple[str, ...] = (),
    report: Report = print_line,
) -> None:
    """Makes the cache `folder`, unless there is one without damage.

    `build` writes the files into the folder that it is given and returns what meta.json shall say,
    but for its "files", which may be many. The versions of `packages` are added. Raises UserError
    where the folder cannot be written.
    """
    if os.path.lexists(folder):
        problem = cache_problem(folder)
        if problem is None:
            return
        report(f"{folder}: {problem}; rebuilding it")
    with scratch_folder(folder) as scratch:
        _describe(scratch, build(scratch), packages)
        publish(scratch, folder, cache_problem)


def guard(folder: Path, make: Callable[[], Opened]) -> Opened:
    """Opens `folder` with `make`, which itself fills a missing folder, whole or not at all.

    For libraries that keep a cache but never check it: a folder whose files have changed since it
    was first opened is rebuilt.
    """
    if (folder / META).exists() and (problem := cache_problem(folder)):
        print_line(f"{folder}: {problem}; rebuilding it")
        discard(folder)
    opened = make()
    if not (folder / META).exists():
        with contextlib.suppress(UserError):  # another user's, which only they can write to
            _describe(folder, {}, ())
    return opened


def _describe(folder: Path, meta: dict[str, Any], packages: tuple[str, ...]) -> None:
    """Writes meta.json over the finished files; a folder without it is not a cache."""
    files = sorted(file for file in folder.iterdir() if not file.name.endswith(".lock"))
    versions = {name: importlib.metadata.version(name) for name in packages}
    for file in files:
        sync(file)
    meta = {name: value for name, value in meta.items() if name != "files"} | {
        "sizes": {file.name: file.stat().st_size for file in files},
        "modified": {file.name: file.stat().st_mtime_ns for file in files},
        "sha256": {file.name: sha256(file) for file in files},
        "versions": {"python": platform.python_version(), **versions},
    }
    write_json(folder / META, meta)


def cache_problem(folder: Path) -> str | None:
    """Why a cache cannot be used, in a few words; None if it can."""
    try:
        meta = parse_json((folder / META).read_bytes())
        sizes, sums, modified = (dict(meta[key]) for key in ("sizes", "sha256", "modified"))
    except (OSError, ValueError, KeyError, TypeError):
        return f"{META} is missing or unreadable"
    now = {}
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            return f"{name} has {found or 'no'} bytes where {META} says {size}"
        now[name] = file.stat().st_mtime_ns
        if now[name] != modified.get(name) and sha256(file) != sums[name]:
            return f"{name} is damaged: its SHA-256 is not the one in {META}"
    if now != modified:
        with contextlib.suppress(UserError):  # a read-only cache is hashed by every run
            write_json(folder / META, {**meta, "modified": now})
    return None


# Reading


class TokenCache:
    """A prepared folder; its files are opened when first used, and again in DataLoader workers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        problem = cache_problem(self.folder)
        if problem:
            raise UserError(f"{self.folder}: {problem}; prepare the corpus again")
        self.meta: dict[str, Any] = parse_json((self.folder / META).read_bytes())
        self._opened: dict[str, Any] = {}

    @property
    def checksum(self) -> str:
        """Of the content: equal for equal text, wherever it was read from."""
        return digest(self.meta["sha256"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def array(self, name: str) -> np.ndarray:
        """NAME.npy, mapped."""
        return self.opened(name, lambda: np.load(self.folder / f"{name}.npy", mmap_mode="r"))

    def opened(self, name: str, opener: Callable[[], Opened]) -> Opened:
        """What `opener` opens, kept; UserError if the cache was deleted or cut while in use."""
        if name not in self._opened:
            try:
                self._opened[name] = opener()
            except UserError:
                raise
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{self.folder}: {name} cannot be opened ({reason(error)}); it was there when "
                    "the run began: give the same command again to rebuild it"
                ) from error
        value: Opened = self._opened[name]
        return value


# Command


def command(
    name: str,
    kind: type[Section],
    prepare: Callable[[Any, int], TokenCache],
    arguments: list[str] | None,
) -> None:
    """`python -m NAME CONFIG [key=value]`: prepares a cache, prints its folder and meta.json.

    A user's mistake ends with exit code 2 and one line.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description="Tokenise a config's corpus ahead of training, and print what it holds.",
    )
    add = parser.add_argument
    add("config", type=Path, help="config of the runs that will use it")
    add("overrides", nargs="*", default=[], metavar="key=value", help="changes to the config")
    add("--threads", type=int, default=os.cpu_count(), help="threads of the tokeniser")
    options = parser.parse_intermixed_args(arguments)
    with one_line_errors(OSError):  # a full disk, a folder without permission
        cache = prepare(load(kind, options.config, options.overrides), options.threads)
    print(json.dumps({"folder": str(cache.folder), **cache.meta}, indent=2))
