"""What a command writes: a file is whole or as it was, and an error names it."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from param_groups.roles import PlanError


@contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """Makes a folder before what takes long; an error leaves none that is empty.

    PlanError where it cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"--out {folder}: a file is in the way; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--out {folder}: {error.strerror}; give another folder") from None
    try:
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


def write(path: Path, content: str | bytes, adds: bool = False) -> None:
    """Replaces a file, or adds to its end; PlanError where that fails, as on a full disk.

    A device, or what is open, such as /dev/stdout, is written to and not replaced.
    """
    content = content if isinstance(content, bytes) else content.encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    folder = os.path.realpath(path.parent)  # /dev/fd is a folder of /proc
    try:
        device = folder == "/dev" or folder.startswith("/proc/") or path.is_char_device()
        straight = adds or device
        with open(path if straight else temporary, "ab" if adds else "wb") as file:
            file.write(content)
        if not straight:
            os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise PlanError(
            f"{path}: cannot write: {error.strerror}; mend that and give the same command again"
        ) from None


def write_table(path: Path, header: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file; PlanError as `write`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    write(path, text.getvalue())
