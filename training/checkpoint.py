"""Checkpoints: folders that are whole or absent, checked before they are used, never unpickled.

    results/<experiment>/<sweep>/<run>/checkpoints/step-00000120/
        state.safetensors   tensors by name: model/..., optimizer/<tensor>/<key>, pending/...
        meta.json           step, config, plan, position in the logs, the rest of the loop's state
        checksums.json      sha256 and size of the files above

A sharded run has shard-00001-*.safetensors, shard-00002-*.safetensors, ... instead of
state.safetensors, one from each process: its parts of the tensors, with their offsets, in the
Hugging Face format of torch.distributed.checkpoint. Any run reads either.

A checkpoint is written under a temporary name, synced to disk, and renamed. Only meta.json and the
files that checksums.json lists are opened, whatever else lies in the folder, and tensors and JSON
are all that is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import distributed

from training.errors import Damaged, UserError, reason
from training.files import sha256, sync

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

# torch.distributed.checkpoint is imported where it is needed: that takes a second, for which a run
# that is not sharded need not wait.

FORMAT = 1
_STATE, _META, _CHECKSUMS = "state.safetensors", "meta.json", "checksums.json"
_NAME = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"shard-[\w-]+\.safetensors")
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
    temporary = _temporary(path)
    try:
        _clear(temporary)
        temporary.mkdir(parents=True)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, temporary / _STATE)
        sync(temporary / _STATE)
        sums = {_STATE: _checksum(temporary / _STATE)}
        _complete(path, sums, _content(step, tensors, meta), keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(_not_written(path, error)) from None
    return path


def save_shards(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    keep: int,
    group: distributed.ProcessGroup,
) -> Future:
    """Begins to write the checkpoint of a step whose tensors are spread over the processes.

    All processes call it, with a gloo `group` of their own for it; `meta` is the first one's. It
    returns once the tensors are copied to the host, and a thread of each process then writes the
    process's file and its checksum. When all are on the disk the first process adds what is left
    and renames the folder. `finish` waits for that.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.storage import WriteResult

    path = folder / f"step-{step:08d}"
    content = _content(step, tensors, meta)

    class Writer(dcp.HuggingFaceStorageWriter):
        """What fails in one of these in any process fails the save in all of them."""

        def prepare_global_plan(self, plans: Any) -> Any:
            # In the first process, once all have made the folder and before any writes into it.
            for left in Path(self.path).iterdir():
                _clear(left)
            return super().prepare_global_plan(plans)

        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner).value()
            for name in sorted({result.storage_data.relative_path for result in written}):
                checksum = {name: _checksum(Path(self.path) / name)}
                written.append(WriteResult(MetadataIndex(_CHECKSUMS), 0, checksum))
            done: torch.futures.Future = torch.futures.Future()
            done.set_result(written)
            return done

        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            sums: dict[str, Any] = {}
            for result in (result for written in results for result in written):
                if result.index.fqn == _CHECKSUMS:
                    sums |= result.storage_data
            _complete(path, sums, content, keep)

    writer = Writer(str(_temporary(path)), save_distributed=True)
    # All is on the host by then. Else torch would wait for the thread's own GPU, which is the first
    # of the machine in every process, and take memory there.
    writer.per_thread_copy_ahead = 0
    # Without pinned or shared memory, threads and streams: the copy is made when `stage` returns.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    writing = dcp.async_save(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        storage_writer=writer,
        process_group=group,
        async_stager=stager,
    )
    assert isinstance(writing, Future)
    writing.add_done_callback(lambda _: stager.close())
    return writing


def finish(folder: Path, step: int, writing: Future) -> None:
    """Waits for what `save_shards` has begun; UserError, as `save`, when it cannot be written.

    All processes call it; those other than the first then end silently.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    path = folder / f"step-{step:08d}"
    try:
        writing.result()
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        if distributed.get_rank():
            raise SystemExit(2) from None
        shutil.rmtree(_temporary(path), ignore_errors=True)
        raise UserError(_not_written(path, error)) from None


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


def check(path: Path, share: int = 0, shares: int = 1) -> None:
    """Raises Damaged unless all files are plain ones and those of a share fit their checksums.

    The processes of a run check one share each.
    """
    try:
        sums = _sums(path)
        for name in sorted(sums)[share::shares]:
            if sums[name] != _checksum(path / name):
                raise Damaged(f"{path / name}: differs from what was written (checksum)")
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not a whole checkpoint ({error})") from None


def load(path: Path, verify: bool = True, shapes_only: bool = False) -> Checkpoint:
    """A checkpoint read from disk, its tensors whole and on the CPU.

    Raises Damaged when a file is missing, is not a plain file, differs from its checksum or does
    not hold what it should. Without `verify` the checksums are left out. With `shapes_only` the
    tensors have no values; `read` fetches those that a process needs.
    """
    if verify:
        check(path)
    try:
        files = [name for name in _sums(path) if name != _META]
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
        if files == [_STATE] and not shapes_only:
            tensors = load_file(path / _STATE)
        else:
            tensors = _described(path, "meta" if shapes_only else "cpu")
            if not shapes_only:
                read(path, tensors)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{path}: not a whole checkpoint ({error})") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise Damaged(f"{path}: {_META} is not of format {FORMAT}")
    if meta.get("step") != _step(path):
        raise Damaged(f"{path}: {_META} is of step {meta.get('step')}")
    if meta.get("tensors") != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise Damaged(f"{path}: {' and '.join(files)} hold other tensors than {_META} says")
    return Checkpoint(path, meta["step"], meta, tensors)


def read(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    group: distributed.ProcessGroup | None = None,
) -> None:
    """Fills tensors in place with those of a checkpoint that `check` has passed.

    Where they are sharded, all processes of `group` call it and each reads its part only. Raises
    Damaged if that fails.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():  # of being a single process
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(
                dict(tensors),
                storage_reader=_reader(path),
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as failed:
            error = next(iter(failed.failures.values()))[0]
            raise Damaged(f"{path}: cannot be read ({reason(error)})") from None


def _reader(path: Path) -> HuggingFaceStorageReader:
    """Torch's reader, of the listed files only."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Listed(FileSystem):
        """A folder that holds nothing else."""

        def ls(self, folder: Any) -> list[str]:
            return [str(path / name) for name in sorted(_sums(path))]

    reader = HuggingFaceStorageReader(str(path))
    reader.fs = Listed()
    return reader


def _described(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Tensors without values as the files' headers say; Damaged if parts of one are missing."""
    tensors = {}
    for name, entry in _reader(path).read_metadata().state_dict_metadata.items():
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise Damaged(f"{path}: parts of {name!r} are missing, or are there twice")
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    return tensors


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


def _temporary(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{path.name}")


def _content(step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> str:
    """meta.json, as things are now: training may go on before it is written."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return json.dumps({"format": FORMAT, "step": step, "tensors": shapes, **meta}, allow_nan=False)


def _complete(path: Path, sums: dict[str, Any], content: str, keep: int) -> None:
    """Adds meta.json and the checksums, and renames the folder; then removes older ones."""
    temporary = _temporary(path)
    (temporary / _META).write_text(content, encoding="utf-8")
    sums = {**sums, _META: _checksum(temporary / _META)}
    (temporary / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
    for name in (_META, _CHECKSUMS):
        sync(temporary / name)
    sync(temporary)
    os.rename(temporary, path)
    sync(path.parent)
    for old in paths(path.parent)[:-keep]:
        try:
            _remove(old)
        except OSError as error:  # the new one is safe; an old one too many does no harm
            print(f"{old}: cannot be removed: {error.strerror}", file=sys.stderr)


def _checksum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _sums(path: Path) -> dict[str, Any]:
    """What checksums.json says of each file; Damaged unless these are there as plain files.

    A pipe would be read for ever, and another name might lead out of the folder.
    """
    if path.is_symlink():
        raise Damaged(f"{path}: a link, not a checkpoint")
    _plain(path / _CHECKSUMS)
    sums = json.loads((path / _CHECKSUMS).read_text(encoding="utf-8"))
    states = sorted(sums.keys() - {_META}) if isinstance(sums, dict) and _META in sums else []
    if not states or (states != [_STATE] and not all(map(_SHARD.fullmatch, states))):
        raise Damaged(f"{path / _CHECKSUMS}: does not list the files of a checkpoint")
    for name in (_META, *states):
        _plain(path / name)
    return sums


def _plain(file: Path) -> None:
    if file.is_symlink() or not file.is_file():
        raise Damaged(f"{file}: missing, or not a plain file")


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
