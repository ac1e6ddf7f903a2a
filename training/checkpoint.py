"""Checkpoints: folders that are whole or absent, checked before they are used, never unpickled.

    results/<experiment>/<sweep>/<run>/checkpoints/step-00000120/
        state.safetensors   tensors by name: model/..., optimizer/<tensor>/<key>, rng/..., loop/...
        meta.json           step, config, plan, position in the logs, the rest of the loop's state
        checksums.json      sha256 and size of the two files above

A checkpoint is written under a temporary name, synced to disk, and renamed. Only these three names
are opened, whatever else lies in the folder, and tensors and JSON are all that is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from training.errors import Damaged, UserError
from training.files import sync

FORMAT = 1
_STATE, _META, _CHECKSUMS = "state.safetensors", "meta.json", "checksums.json"
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".writing-"
_REMOVED = ".removing-"
_ASIDE = "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after optimiser step `step`."""

    path: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def part(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose name starts with `prefix` and a slash, without that."""
        start = f"{prefix}/"
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    keep: int,
) -> Path:
    """Writes the checkpoint of a step into `folder`, then removes all but the newest `keep`.

    Raises UserError when it cannot be written (a full disk, say); the older ones stay as they are.
    """
    path = folder / f"step-{step:08d}"
    temporary = folder / f"{_TEMPORARY}{path.name}"
    try:
        _clear(temporary)
        temporary.mkdir(parents=True)
        save_file(_storable(tensors), temporary / _STATE)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        content = {"format": FORMAT, "step": step, "tensors": shapes, **meta}
        (temporary / _META).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        sums = {name: _checksum(temporary / name) for name in (_STATE, _META)}
        (temporary / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
        for name in (_STATE, _META, _CHECKSUMS):
            sync(temporary / name)
        sync(temporary)
        os.rename(temporary, path)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(_not_written(path, error)) from None
    for old in paths(folder)[:-keep]:
        try:
            _remove(old)
        except OSError as error:  # the new one is safe; an old one too many does no harm
            print(f"{old}: cannot be removed: {error.strerror}", file=sys.stderr)
    return path


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
    return sorted(entries, key=_step)


def load(path: Path, verify: bool = True) -> Checkpoint:
    """A checkpoint read from disk, its tensors on the CPU.

    Raises Damaged when a file is missing, is not a plain file, differs from its checksum or does
    not hold what it should. Without `verify` the checksums are left out.
    """
    try:
        _plain(path)
        if verify:
            _verify(path)
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
        tensors = load_file(path / _STATE)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{path}: not a whole checkpoint ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise Damaged(f"{path}: {_META} is not of format {FORMAT}")
    if meta.get("step") != _step(path):
        raise Damaged(f"{path}: {_META} is of step {meta.get('step')}")
    if meta.get("tensors") != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise Damaged(f"{path}: {_STATE} holds other tensors than {_META} says")
    return Checkpoint(path, meta["step"], meta, tensors)


def set_aside(path: Path) -> Path:
    """Renames a checkpoint that cannot be used, so that its step can be saved again."""
    aside = path.with_name(f"{_ASIDE}{path.name}")
    _clear(aside)
    os.rename(path, aside)
    return aside


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


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _checksum(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _plain(path: Path) -> None:
    """Raises Damaged unless this is a folder with plain files: a pipe would be read for ever."""
    if path.is_symlink():
        raise Damaged(f"{path}: a link, not a checkpoint")
    for name in (_STATE, _META, _CHECKSUMS):
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise Damaged(f"{file}: missing, or not a plain file")


def _verify(path: Path) -> None:
    """Raises Damaged unless the checksums are those of the files."""
    sums = json.loads((path / _CHECKSUMS).read_text(encoding="utf-8"))
    for name in (_STATE, _META):
        if not isinstance(sums, dict) or sums.get(name) != _checksum(path / name):
            raise Damaged(f"{path / name}: differs from what was written (checksum)")


def _not_written(path: Path, error: Exception) -> str:
    good = paths(path.parent)
    kept = "none was there yet"
    if good:
        kept = f"{good[-1].name} is intact, and the run resumes from it"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (
        f"{path}: cannot write the checkpoint: {reason}; {kept}. "
        "Make room there and run the same command again"
    )


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
