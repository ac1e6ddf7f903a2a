"""Checkpoints: folders that are whole or absent, checked before they are used, never unpickled.

    results/<experiment>/<sweep>/<run>/checkpoints/step-00000120/
        shard-00001-model-00001-of-00001.safetensors   tensors by name: model/..., pending/...,
                                                       optimizer/<tensor>/<key>
        meta.json           step, config, plan, position in the logs, the rest of the loop's state
        checksums.json      sha256 and size of the files above

Every process writes the parts that it holds of the tensors into a file of its own, with their
offsets, as the Hugging Face format of torch.distributed.checkpoint has them; one process holds all.
Any number of processes reads them. A checkpoint is written under a temporary name, synced to disk,
and renamed; training waits for that. Only the files that checksums.json lists are opened.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from training import processes, sharding
from training.errors import Damaged, UserError, reason
from training.files import checksum, if_present, parse_json, read_text, sync

_META, _CHECKSUMS, _SUFFIX = "meta.json", "checksums.json", ".safetensors"
_SHARD = "shard-{:05d}-model-00001-of-00001" + _SUFFIX  # torch's name of a process's file
_OFFSETS = "DCP_SHARDING_INFO"  # torch's name of the offsets in it
_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[\w-]+(\.json|\.safetensors)")
_TEMPORARY, _REMOVED, _ASIDE = ".writing-", ".removing-", "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is open: what it says of its run, and its tensors' parts on the disk."""

    path: Path
    meta: dict[str, Any]
    parts: dict[str, list[tuple[int, Any]]]
    """Per tensor safetensors' slices and their first rows, in the order of rows."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        shapes = [part.get_shape() for _, part in self.parts[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()

    def read(self, name: str, first: int = 0, rows: int | None = None) -> torch.Tensor:
        """A tensor's rows from `first` on, by default all, on the CPU in memory of its own."""
        parts = self.parts[name]
        if not self.shape(name):
            return parts[0][1][...].clone()
        end = self.shape(name)[0] if rows is None else first + rows
        pieces = []
        for start, part in parts:
            length = part.get_shape()[0]
            low, high = (min(max(row - start, 0), length) for row in (first, end))
            pieces.append(part[low:high])
        return torch.cat(pieces)

    def named(self, prefix: str) -> list[str]:
        """The names below `prefix`, without it."""
        start = f"{prefix}/"
        return [name.removeprefix(start) for name in self.parts if name.startswith(start)]


def save(
    folder: Path, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], keep: int
) -> Path:
    """Writes the checkpoint of a step into `folder`, then removes all but the newest `keep`.

    All processes call it; `meta` is the first one's. Raises UserError when any of them cannot write
    (a full disk, say); the older checkpoints stay as they are.
    """
    path = folder / f"step-{step:08d}"
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")

    def begin() -> None:
        with _writing(path, temporary):
            _clear(temporary)
            temporary.mkdir(parents=True)

    def complete() -> None:
        with _writing(path, temporary):
            sums: dict[str, Any] = {}
            for written, error in shares:
                if error is not None:
                    raise OSError(error)
                sums |= written
            content = json.dumps({"step": step, **meta}, allow_nan=False)
            (temporary / _META).write_text(content, encoding="utf-8")
            sums[_META] = checksum(temporary / _META)
            (temporary / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
            for written in (temporary / _META, temporary / _CHECKSUMS, temporary):
                sync(written)
            os.rename(temporary, path)
            sync(folder)
        for old in paths(folder)[:-keep]:
            try:
                _remove(old)
            except OSError as error:  # the new one is safe; an old one too many does no harm
                print(f"{old}: cannot be removed: {error.strerror}", file=sys.stderr)

    processes.on_main(begin)
    file = temporary / _SHARD.format(processes.state().process_index + 1)
    share: tuple[dict[str, Any], str | None]
    try:
        _write_parts(file, tensors)
        share = {file.name: checksum(file)}, None
    except (OSError, SafetensorError) as error:
        share = {}, getattr(error, "strerror", None) or str(error)
    shares = gather_object([share])
    processes.on_main(complete)
    return path


def _write_parts(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes what this process holds of tensors and no process before it does."""
    parts, offsets = {}, {}
    for name, tensor in tensors.items():
        part, first = sharding.share(tensor)
        if part is not None:
            parts[name] = part.detach().cpu().contiguous()
            offsets[name] = {"saved_offsets": [first, *[0] * (part.ndim - 1)][: part.ndim]}
    save_file(parts, file, {_OFFSETS: json.dumps(offsets, sort_keys=True)})
    sync(file)


@contextlib.contextmanager
def _writing(path: Path, temporary: Path) -> Iterator[None]:
    """Turns what the file system refuses into one line, and removes what was written."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        good = paths(path.parent)
        kept = f"{good[-1].name} is intact, and the run resumes from it" if good else ""
        raise UserError(
            f"{path}: cannot write the checkpoint: {error.strerror or error}; "
            f"{kept or 'none was there yet'}. Make room there and run the same command again"
        ) from None


def paths(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, oldest first; UserError if it is a link.

    What it leads to would be deleted in the course of a run.
    """
    if folder.is_symlink():
        raise UserError(f"{folder}: a link, not a folder of checkpoints; remove it")
    try:
        entries = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise UserError(f"{folder}: not a folder of checkpoints; remove it") from None
    return sorted(entries, key=lambda path: int(path.name.removeprefix("step-")))


def check(path: Path, share: int = 0, shares: int = 1) -> None:
    """Raises Damaged unless the files of a share are what was written, and no links or pipes.

    The processes of a run check one share each.
    """
    with _reading(path):
        for name, wanted in sorted(_sums(path).items())[share::shares]:
            if wanted != checksum(path / name):
                raise Damaged(f"{path / name}: differs from what was written (checksum)")


def load(path: Path) -> Checkpoint:
    """Opens a checkpoint that `check` has passed; Damaged if that cannot be."""
    parts: dict[str, list[tuple[int, Any]]] = {}
    with _reading(path):
        for name in sorted(_sums(path).keys() - {_META}):
            file = safe_open(path / name, "pt")
            offsets = parse_json(file.metadata()[_OFFSETS])
            for key in file.keys():  # noqa: SIM118 - no mapping
                first = (offsets[key]["saved_offsets"] or [0])[0]
                parts.setdefault(key, []).append((first, file.get_slice(key)))
        return Checkpoint(path, parse_json(read_text(path / _META)), parts)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what is wrong with a checkpoint's files into Damaged; RunError where they may be whole
    and cannot be read now."""
    try:
        yield
    except OSError as error:
        with if_present(path):
            raise
        raise Damaged(f"{path}: not a whole checkpoint ({reason(error)})") from None
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise Damaged(f"{path}: not a whole checkpoint ({reason(error)})") from None


def _sums(path: Path) -> dict[str, Any]:
    """What checksums.json says of each file; no name in it leads out of the folder."""
    if path.is_symlink():
        raise Damaged(f"{path}: a link, not a checkpoint")
    sums = parse_json(read_text(path / _CHECKSUMS))
    if _META not in sums or not all(map(_FILE.fullmatch, sums)):
        raise Damaged(f"{path / _CHECKSUMS}: does not list the files of a checkpoint")
    return sums


def set_aside(damaged: Iterable[Path]) -> None:
    """Renames checkpoints that cannot be used, so that their steps can be saved again."""
    for path in damaged:
        aside = path.with_name(f"{_ASIDE}{path.name}")
        _clear(aside)
        os.rename(path, aside)


def tidy(folder: Path) -> None:
    """Removes what interrupted writing or removing has left, as far as it can be."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.startswith((_TEMPORARY, _REMOVED)):
                with contextlib.suppress(OSError):
                    _clear(entry)


def discard(folder: Path) -> None:
    """Removes every checkpoint, damaged ones too, and the folder if nothing else is in it."""
    for path in paths(folder):
        _remove(path)
    for path in folder.glob(f"{_ASIDE}step-*"):
        _clear(path)
    tidy(folder)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _remove(path: Path) -> None:
    """Removes a checkpoint; one that is half removed no longer looks like one."""
    gone = path.with_name(f"{_REMOVED}{path.name}")
    _clear(gone)
    os.rename(path, gone)
    _clear(gone)


def _clear(path: Path) -> None:
    """Deletes a folder, a file or a link (not what it points to), if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
