"""Caches of files: made aside, given their name when whole, never met half-written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UserError


def reason(error: BaseException) -> str:
    """An error's kind and first line."""
    if isinstance(error, StopIteration):
        return "no records"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def sha256(file: Path) -> str:
    """The checksum of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name and renames it, so that it is whole or absent."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        scratch.write_bytes(content)
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({reason(error)})") from error


@contextmanager
def scratch_folder(final: Path) -> Iterator[Path]:
    """A folder beside the final one, gone at the end whatever happens short of a kill."""
    scratch = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cache_dir: {final.parent} cannot be written ({reason(error)}); expected a folder "
            "with write permission"
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(scratch: Path, final: Path, problem: Callable[[Path], str | None]) -> None:
    """Gives a finished folder its name; if one without a `problem` got there first, it stays."""
    while True:
        try:
            os.rename(scratch, final)
            return
        except OSError:
            if not os.path.lexists(final):
                raise
        if problem(final) is None:
            return
        discard(final)


def discard(folder: Path) -> None:
    """Moves an unusable cache out of the way before deleting it: no reader meets half of it."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return  # another process was faster
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


def cache_problem(folder: Path) -> str | None:
    """Why a cache folder cannot be used, in a few words; None if it can.

    Its meta.json has "sizes", the bytes of every file by name.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = meta["sizes"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "meta.json is missing or unreadable"
    for name, size in sizes:
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            return f"{name} has {found or 'no'} bytes where meta.json says {size}"
    return None
