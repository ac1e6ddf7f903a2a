"""Files and folders that are written whole or not at all, and locks on folders."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from training.errors import RunError, UserError, reason

NOTES = "tables.sha256.json"  # checksums of the tables of a folder
LOOKS = 0, 0.1, 0.5, 1  # seconds before each look: a driver, of another node, too, may be writing
LOCK_SECONDS = 2.0  # a process that only looks at a lock holds it for a moment


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the file system refuses (a full disk, say) into one line that names the file."""
    try:
        yield
    except OSError as error:
        known = {errno.ELOOP: "a link", errno.ENXIO: "a pipe"}
        refusal = known.get(error.errno or 0) or error.strerror or str(error)
        raise UserError(
            f"{path}: cannot write: {refusal}; fix that and give the same command again (a run "
            "resumes from its last checkpoint)"
        ) from None


@contextmanager
def reading(path: Path, advice: str = "") -> Iterator[None]:
    """Turns what is wrong with a file of a run into a RunError that names it."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: cannot read it ({reason(error)}){advice}") from None


# Of a path where another thing stands than the file that was written, or nothing.
_ABSENT = {None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}


@contextmanager
def if_present(path: Path) -> Iterator[None]:
    """Ends where no file stands at a path, or a link, a pipe or a folder; RunError for a file that
    cannot be read now: it may be whole."""
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise RunError(
                f"{path}: cannot read it ({reason(error)}), nothing is changed; give the same "
                "command again once that works"
            ) from None


def open_plain(path: Path, mode: str) -> IO[Any]:
    """Opens a file of a results folder; OSError for a link out of it and for a pipe.

    A pipe would be waited on for ever.
    """

    def opener(path: str, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return descriptor

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def read_text(path: Path) -> str:
    """The text of a file of a results folder; OSError as `open_plain`, ValueError if it is none."""
    with open_plain(path, "r") as file:
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """What JSON says; ValueError for what is none, or is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def refuse_file(folder: Path) -> None:
    """RunError where a folder, or one that it would lie in, is a file."""
    for path in (folder, *folder.parents):
        if path.is_file():
            raise RunError(f"{path} is a file, not a folder; give another folder")


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file atomically: a reader, or a crash, sees the old content or the new one.

    A device, or what is open, such as /dev/stdout, is written to and not replaced.
    """
    temporary = _hidden(path)
    with writing(path):
        folder = os.path.realpath(path.parent)  # /dev/fd is a folder of /proc
        if folder == "/dev" or folder.startswith("/proc/") or path.is_char_device():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file atomically, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically; raises ValueError for NaN, which JSON does not have."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_table(path: Path, text: str) -> None:
    """Replaces a table that others read atomically, its checksum in `NOTES` beside it.

    What was there, be it nothing, is counted, too, until it is replaced: a kill leaves either.
    """
    content, notes, noted = text.encode("utf-8"), path.with_name(NOTES), dict[str, Any]()
    new = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    old = [found := _sum(path)]
    with suppress(OSError, ValueError, TypeError):  # damaged notes: what is written now counts
        noted = dict(parse_json(read_text(notes)))
        old = old if found in noted.get(path.name, old) else []
    if old != [new]:
        write_json(notes, {**noted, path.name: [new, *old]})
        write_bytes(path, content)
    write_json(notes, {**noted, path.name: [new]})


def refuse_changed(path: Path) -> None:
    """UserError unless a table is as `write_table` has left it, as far as that is noted."""
    notes, again = path.with_name(NOTES), "; give the command that makes it again"
    for seconds in LOOKS:
        time.sleep(seconds)
        with reading(notes, f"{again}, or delete it"):
            sums = parse_json(read_text(notes)).get(path.name) if notes.exists() else None
            failed: RunError | None = None
            try:
                if sums is None or _sum(path) in sums:
                    return
            except RunError as error:  # what another node has just replaced is stale for a moment
                failed = error
    raise failed or UserError(
        f"{path}: not as it was written{again}, without --curves and --where, or delete {NOTES} "
        "beside it to take it as it is"
    )


def _sum(path: Path) -> dict[str, Any] | None:
    """The checksum of a table, or of what links to it; None where there is none."""
    with if_present(path):
        return checksum(path.resolve())
    return None


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    """The checksum of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def checksum(file: Path) -> dict[str, Any]:
    """Length and SHA-256 of a file of a results folder; OSError as `open_plain`."""
    with open_plain(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")  # type: ignore[arg-type]  # a binary file
        return {"bytes": opened.tell(), "sha256": digest.hexdigest()}


def _hidden(path: Path) -> Path:
    """A name in the same folder for what is not finished, or about to be deleted.

    It is unique on every machine that shares the folder; process numbers are not.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def scratch_folder(final: Path, key: str = "data.cache_dir") -> Iterator[Path]:
    """A hidden folder next to the final one, deleted at the end; those of the same name that
    killed processes have left are deleted before.

    UserError names the `key` that the user has set the place by, where it cannot be written or is
    full: an error of writing names no file, and numpy's not even a number.
    """
    scratch, locks = _hidden(final), list[int]()
    for leftover in final.parent.glob(f".{glob.escape(final.name)}.????????.tmp"):
        _sweep(leftover)
    try:
        while not scratch.exists():  # or another process has swept it before it was locked
            scratch.mkdir(parents=True)
            locks.append(os.open(scratch, os.O_RDONLY))
            with suppress(OSError):  # a file system without locks: nobody sweeps there
                fcntl.flock(locks[-1], fcntl.LOCK_SH)
        yield scratch
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if scratch.exists() and not full and error.filename:
            raise  # which names the file
        raise UserError(
            f"{key}: {final.parent} {'is full' if full else 'cannot be written'} "
            f"({reason(error)}); expected a folder with room and write permission"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for lock in locks:
            os.close(lock)


def _sweep(scratch: Path) -> None:
    """Deletes the folder of a process that was killed: nobody holds it."""
    with suppress(OSError):
        lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os.close(lock)


def publish(scratch: Path, final: Path, problem: Callable[[Path], str | None]) -> None:
    """Gives a finished folder its name, unless one without a `problem` has it already."""
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
    aside = _hidden(folder)
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return  # another process was faster
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()


class Busy(UserError):
    """A folder is held by another process."""


_held: list[IO[Any]] = []


def _forget_locks() -> None:
    """In a forked child: a lock is its parent's, and must not outlive it there."""
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def locked(folder: Path, what: str, patience: float = LOCK_SECONDS) -> Iterator[None]:
    """Holds a folder for this process; Busy if another one does for `patience` seconds.

    It may be on another machine. The lock goes with the process, however it ends. Raises UserError
    where the file system has no locks: two processes would then write the same files.
    """
    with writing(folder / ".lock"):
        folder.mkdir(parents=True, exist_ok=True)
        file = open_plain(folder / ".lock", "a")
    _held.append(file)
    end, held = time.monotonic() + patience, False
    try:
        while not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() > end:
                    problem = f"another process is running this {what}; wait for it"
                    raise Busy(f"{folder}: {problem}") from None
                time.sleep(0.1)
            except OSError as error:
                raise UserError(
                    f"{folder / '.lock'}: this file system has no locks ({error.strerror}); use "
                    "one that has flock (a local disk, NFS 4, Lustre mounted with -o flock)"
                ) from None
        yield
    finally:
        if file in _held:
            _held.remove(file)
        file.close()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder now."""
    try:
        with open_plain(folder / ".lock", "r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or one that our processes cannot lock
        return False
    return False
