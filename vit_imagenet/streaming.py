"""Training images read from shards in order: no copy of them is made, no random access is needed.

Shards are dealt to *lanes*. Optimiser steps are cut into micro-batches, numbered on through the
whole run; micro-batch g is read from lane g % lanes, by process g % processes, and that process's
DataLoader workers take turns. When processes x workers divides the number of lanes, each lane, and
so each shard, has one reader, and which sample stands where depends on the seed, the lanes and the
micro-batch size alone.

A lane reads its own shards over and over. Each pass takes them in a new order, and permutes
consecutive blocks of it, so that a run can go on anywhere by reading one block again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from training.errors import UserError
from training.files import write_json
from training.sampling import Place

if TYPE_CHECKING:
    import datasets

Kind = Literal["parquet", "tar"]
Prepare = Callable[[bytes | str, int, Place], Any]
Collate = Callable[[list[Any]], Any]

BUFFER = 1024  # raw images a lane holds; about 110 MB of ImageNet's
READ_ROWS = 64  # samples read from a shard at a time
IMAGE, LABEL = "image", "label"  # parquet columns
TAR_LABELS = ("cls", "json")  # WebDataset's class number, or "label" in a JSON file
TAR_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_ORDER, _BLOCK = 11, 12  # keep the draws for shards and blocks apart from each other and others


# Shards


@dataclass(frozen=True)
class Shard:
    """One file of samples."""

    path: Path
    size: int
    """Samples in it."""
    images: tuple[str, ...]
    """Fields that hold an image: the column, or the members' extensions."""
    label: str
    """Field that holds the label."""


class Raw(NamedTuple):
    """A sample as it is stored: nothing is decoded."""

    image: bytes | str
    """The file's bytes, its path where a parquet shard holds paths, or b"" where there is none."""
    label: int


def scan(path: Path, kind: Kind) -> Shard:
    """Counts a shard's samples, from parquet's metadata or the tar's headers.

    Raises UserError for a file that cannot be read or holds no samples, a column or member that is
    missing, and a label column that is not of integers.
    """
    shard = _scan_parquet(path) if kind == "parquet" else _scan_tar(path)
    if not shard.size:
        raise UserError(f"{path}: holds no samples; remove it or replace it")
    return shard


def _scan_parquet(path: Path) -> Shard:
    import pyarrow
    import pyarrow.parquet

    with _one_line(path, "parquet"), pyarrow.parquet.ParquetFile(path) as file:
        schema, size = file.schema_arrow, file.metadata.num_rows
    for column in (IMAGE, LABEL):
        if column not in schema.names:
            raise UserError(
                f"{path}: no column {column!r}; it has {', '.join(schema.names)}; expected "
                f"{IMAGE!r} (bytes of image files) and {LABEL!r} (class numbers)"
            )
    if not pyarrow.types.is_integer(schema.field(LABEL).type):
        raise UserError(
            f"{path}: column {LABEL!r} is {schema.field(LABEL).type}; expected integers, the "
            "class numbers"
        )
    return Shard(path, size, (IMAGE,), LABEL)


def _scan_tar(path: Path) -> Shard:
    size, images, label = 0, set(), None
    for key, fields in _tar_samples(path):
        if label is None:
            label = next((field for field in TAR_LABELS if field in fields), TAR_LABELS[0])
        if fields.count(label) != 1:
            raise UserError(
                f"{path}: sample {key!r} has {fields.count(label) or 'no'} label; expected in "
                f"every sample one member {key}.cls, the class number, or in every one "
                f'{key}.json with "label" in it'
            )
        found = [field for field in fields if field.split(".")[-1].lower() in TAR_IMAGES]
        if len(found) != 1:
            raise UserError(
                f"{path}: sample {key!r} has {len(found) or 'no'} images; expected one member "
                f"{key}.jpg (or {', '.join(TAR_IMAGES[1:])}), but it has {', '.join(fields)}"
            )
        images.update(found)
        size += 1
    return Shard(path, size, tuple(sorted(images)), label or TAR_LABELS[0])


def _tar_samples(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(key, extensions) of every sample: neighbouring members of one name, as `datasets` has it."""
    current: str | None = None
    fields: list[str] = []
    for name in _tar_members(path):
        parts = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
        if parts is None or os.path.basename(name).startswith((".", "__")):
            continue
        if current not in (None, parts[1]):
            yield current, fields
            fields = []
        current = parts[1]
        fields.append(parts[2])
    if current is not None:
        yield current, fields


def _tar_members(path: Path) -> list[str]:
    """Names of the files in a tar; only headers are read."""
    names = []
    with _one_line(path, "tar"), tarfile.open(path) as tar:
        while (member := tar.next()) is not None:
            if member.isreg():
                names.append(member.name)
            tar.members = []  # else tarfile keeps every header
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            # tarfile takes any damaged header but the first for the end, and says nothing.
            raise tarfile.ReadError("it is damaged or cut off, as a tar ends in zeros")
    return names


def read(shard: Shard, kind: Kind, first: int = 0) -> Iterator[Raw]:
    """The samples of a shard from row `first` on, streamed through `datasets`.

    Raises UserError, naming the shard, when it cannot be read, lacks a label, or is not as long as
    when it was counted.
    """
    seen = 0
    for batch in _batches_of(shard, kind):
        skipped = min(max(first - seen, 0), len(batch))
        if skipped < len(batch):  # rows that are skipped stay as they came
            for row, record in enumerate(batch.records(skipped), start=seen + skipped):
                yield _raw(shard, record, row)
        seen += len(batch)
    if seen != shard.size:
        raise UserError(
            f"{shard.path}: holds {seen} samples, {shard.size} when the run began; start anew "
            "with the shards as they are"
        )


class _Table:
    """Rows of a parquet shard, in Arrow's form until they are asked for."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def records(self, first: int) -> list[dict[str, Any]]:
        return self.table.slice(first).to_pylist()


class _Columns:
    """Samples of a tar shard, as lists per field."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def records(self, first: int) -> list[dict[str, Any]]:
        rows = zip(*(values[first:] for values in self.columns.values()))
        return [dict(zip(self.columns, row)) for row in rows]


def _batches_of(shard: Shard, kind: Kind) -> Iterator[_Table | _Columns]:
    """A shard's samples, READ_ROWS at a time."""
    batches = None
    while True:
        with _one_line(shard.path, kind):  # not around a yield: the reader's errors are its own
            if batches is None:
                # Not `iter(dataset)`, which inside a DataLoader's worker leaves out other
                # workers' files: all of them, where each file is a dataset.
                batches = _open(shard, kind).iter(batch_size=READ_ROWS)
            batch = next(batches, None)
        if batch is None:
            return
        yield _Table(batch) if kind == "parquet" else _Columns(batch)


def _open(shard: Shard, kind: Kind) -> datasets.IterableDataset:
    """One shard as a streaming dataset that decodes nothing."""
    import datasets

    number = datasets.Value("int64")
    features = {field: datasets.Image(decode=False) for field in shard.images}
    features[shard.label] = {"label": number} if shard.label == "json" else number
    narrow = {"columns": [*features], "batch_size": READ_ROWS} if kind == "parquet" else {}
    with tempfile.TemporaryDirectory() as scratch:
        stream = datasets.load_dataset(
            "parquet" if kind == "parquet" else "webdataset",
            data_files=[glob.escape(str(shard.path))],
            split="train",
            streaming=True,
            features=datasets.Features(features),
            cache_dir=scratch,  # else every shard leaves a lock in the home folder
            **narrow,
        )
    return stream.with_format("arrow") if kind == "parquet" else stream


def _raw(shard: Shard, record: dict[str, Any], row: int) -> Raw:
    """The one image of a record, and its label; a missing image is an unreadable one, b""."""
    label = record[shard.label]
    if isinstance(label, dict):
        label = label["label"]
    if label is None:
        raise UserError(f"{shard.path}: row {row} has no label; every sample needs one")
    stored = next((record[field] for field in shard.images if record[field] is not None), {})
    image = stored.get("path") if stored.get("bytes") is None else stored["bytes"]
    return Raw(image or b"", label)


@contextmanager
def _one_line(path: Path, kind: Kind) -> Iterator[None]:
    """Turns whatever a library finds wrong with a shard into one line; its own log stays off."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path}: cannot be read as {kind}: {reason}; replace or remove the file"
        ) from None
    finally:
        datasets.logging.set_verbosity(level)


def scan_all(paths: Sequence[Path], kind: Kind, cache_dir: Path | None) -> list[Shard]:
    """`scan` of every shard; what tars hold is kept in cache_dir, as headers lie far apart."""
    if kind == "parquet" or cache_dir is None:
        return [scan(path, kind) for path in paths]
    names = json.dumps([str(path.resolve()) for path in paths])
    cache = cache_dir / f"shards-{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"
    known = _read_cache(cache)
    entries = {str(path.resolve()): _entry(path, kind, known) for path in paths}
    if entries != known:
        write_json(cache, entries)
    return [
        Shard(path, entry["samples"], tuple(entry["images"]), entry["label"])
        for path, entry in zip(paths, entries.values(), strict=True)
    ]


def _read_cache(cache: Path) -> dict[str, dict[str, Any]]:
    """What an earlier run counted; nothing if there is no such file or it is damaged."""
    try:
        return dict(json.loads(cache.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _entry(path: Path, kind: Kind, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The cache's entry of one shard, counted anew if the file is not the one that was."""
    with _one_line(path, kind):
        stat = path.stat()
    stamp = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    entry = known.get(str(path.resolve()))
    if isinstance(entry, dict) and {key: entry.get(key) for key in stamp} == stamp:
        if entry.keys() == {*stamp, "samples", "images", "label"}:
            return entry
    shard = scan(path, kind)
    found = {"samples": shard.size, "images": list(shard.images), "label": shard.label}
    return {**stamp, **found}


# Lanes


class Item(NamedTuple):
    """A raw sample in the order of its lane."""

    epoch: int
    """The lane's pass."""
    index: int
    """Which sample it is, of all shards'."""
    raw: Raw


def _draws(purpose: int, seed: int, epoch: int, lane: int, block: int = 0) -> np.random.Generator:
    """A generator of its own for each block of each pass of each lane."""
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, lane, block, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True)
class Lane:
    """Some of the shards, read by one reader over and over."""

    number: int
    shards: tuple[Shard, ...]
    offsets: tuple[int, ...]
    """Index of each shard's first sample."""
    kind: Kind
    seed: int
    buffer: int

    @property
    def size(self) -> int:
        """Samples in one pass."""
        return sum(shard.size for shard in self.shards)

    def items(self, start: int) -> Iterator[Item]:
        """Samples start, start + 1, ... of the lane's endless order.

        While a block is handed out, as much of the next one is read: the lane holds one block of
        raw samples, and only at the start waits for a whole one.
        """
        epoch, row = divmod(start, self.size)
        block, skipped = divmod(row, self.buffer)
        return islice(self._items(epoch, block), skipped, None)

    def _items(self, epoch: int, block: int) -> Iterator[Item]:
        """All items from the start of a block of a pass on."""
        source, orders = self._read(epoch, block * self.buffer), self._orders(epoch, block)
        order = next(orders)
        held: list[Item | None] = list(islice(source, len(order)))
        for following in orders:
            ahead: list[Item | None] = []
            for taken, place in enumerate(order, start=1):
                yield held[place]
                held[place] = None
                wanted = len(following) * taken // len(order)
                ahead.extend(islice(source, wanted - len(ahead)))
            order, held = following, ahead

    def _orders(self, epoch: int, block: int) -> Iterator[np.ndarray]:
        """The permutation of each block, from one of them on; a pass's last may be smaller."""
        for epoch in count(epoch):
            for first in range(block * self.buffer, self.size, self.buffer):
                draws = _draws(_BLOCK, self.seed, epoch, self.number, first // self.buffer)
                yield draws.permutation(min(self.buffer, self.size - first))
            block = 0

    def _read(self, epoch: int, row: int) -> Iterator[Item]:
        """Samples as they lie in the shards, from row `row` of a pass on; earlier shards stay
        closed."""
        for epoch in count(epoch):
            order = _draws(_ORDER, self.seed, epoch, self.number).permutation(len(self.shards))
            for place in order:
                shard, offset = self.shards[place], self.offsets[place]
                if row >= shard.size:
                    row -= shard.size
                    continue
                for index, raw in enumerate(read(shard, self.kind, row), start=offset + row):
                    yield Item(epoch, index, raw)
                row = 0


def deal(shards: Sequence[Shard], lanes: int) -> list[list[int]]:
    """Numbers of the shards of each lane: the largest first, each to the lane that has least.

    Raises UserError when there are fewer shards than lanes.
    """
    if len(shards) < lanes:
        raise UserError(
            f"data.lanes: {lanes} lanes need a shard each, but there are {len(shards)} training "
            f"shards; set data.lanes to {len(shards)} or less, or make more shards"
        )
    dealt: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    for number in sorted(range(len(shards)), key=lambda number: (-shards[number].size, number)):
        lane = min(range(lanes), key=loads.__getitem__)
        dealt[lane].append(number)
        loads[lane] += shards[number].size
    return [sorted(numbers) for numbers in dealt]


# The stream


class Stream:
    """Training samples of all shards, as micro-batches in an order that any number of processes
    and workers shares.

    `prepare(bytes or path, label, place)` makes a sample; it must be a pure function, or return
    None for an image that cannot be read: the lane's next readable sample then stands in for it
    (and comes in its own place as well), so that no later sample moves. It may be set after
    construction, by one that names shards. Place.epoch is the pass of
    the sample's lane, Place.position counts samples from the start of the run, Place.index is the
    sample's number, shards counted in the order given.

    Lanes of fewer samples come round sooner: `lane_sizes` tells by how much.

    Raises UserError for shards that cannot be used and for fewer shards than lanes.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        kind: Kind,
        prepare: Prepare | None,
        lanes: int,
        seed: int,
        buffer: int = BUFFER,
        cache_dir: Path | None = None,
    ) -> None:
        self.prepare = prepare
        scanned = scan_all(shards, kind, cache_dir)
        starts = [0, *accumulate(shard.size for shard in scanned)]
        self.size = starts[-1]
        self.shard_count = len(scanned)
        self.lanes = [
            Lane(
                number,
                tuple(scanned[shard] for shard in dealt),
                tuple(starts[shard] for shard in dealt),
                kind,
                seed,
                buffer,
            )
            for number, dealt in enumerate(deal(scanned, lanes))
        ]

    def __len__(self) -> int:
        return self.size

    @property
    def lane_sizes(self) -> list[int]:
        """Samples in one pass of each lane."""
        return [lane.size for lane in self.lanes]

    def batches(
        self,
        global_batch: int,
        micro_batch: int | None,
        rank: int,
        world_size: int,
        first_step: int,
        last_step: int,
        workers: int,
        collate: Collate,
    ) -> Batches:
        """This process's micro-batches of steps first_step .. last_step - 1, collated, in order.

        For `DataLoader(..., batch_size=None, num_workers=workers)`. Raises UserError when
        micro-batches cannot be shared by the processes, or lanes by the workers.
        """
        if micro_batch is None:
            raise UserError(
                "training.micro_batch_size is missing: data.streaming reads whole micro-batches "
                "from a lane, so that their size is part of the data order"
            )
        _check_batch(global_batch, micro_batch, world_size)
        _check_lanes(len(self.lanes), world_size, workers, self.shard_count)
        per_step = global_batch // micro_batch
        numbers = range(first_step * per_step + rank, last_step * per_step, world_size)
        return Batches(self, numbers, micro_batch, workers, collate)

    def samples(self, lane: int, start: int, micro_batch: int) -> Iterator[Any]:
        """Prepared samples start, start + 1, ... of a lane."""
        items, waiting = self.lanes[lane].items(start), deque()
        for number in count(start):
            micro, within = divmod(number, micro_batch)
            position = (micro * len(self.lanes) + lane) * micro_batch + within
            yield self._readable(self.lanes[lane], items, waiting, position)
            waiting.popleft()

    def _readable(
        self, lane: Lane, items: Iterator[Item], waiting: deque[Item | None], position: int
    ) -> Any:
        """The first sample that can be prepared; `waiting` has the items from here on that were
        looked at, None for those that could not."""
        for ahead in range(lane.size):
            if ahead == len(waiting):
                waiting.append(next(items))
            item = waiting[ahead]
            if item is None:
                continue
            place = Place(item.epoch, position, item.index)
            sample = self.prepare(item.raw.image, item.raw.label, place)
            if sample is not None:
                return sample
            waiting[ahead] = None
        raise UserError(
            f"{lane.shards[0].path}: neither this nor another shard of its lane has an image that "
            "can be read"
        )


class Batches(IterableDataset):
    """Micro-batches of one process; its DataLoader's workers take turns."""

    def __init__(
        self, stream: Stream, numbers: range, micro_batch: int, workers: int, collate: Collate
    ) -> None:
        super().__init__()
        self.stream, self.numbers, self.micro_batch = stream, numbers, micro_batch
        self.workers, self.collate = workers, collate

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if workers != max(self.workers, 1):
            raise ValueError(f"made for {self.workers} workers, read by {workers}")
        lanes: dict[int, Iterator[Any]] = {}
        for number in self.numbers[worker::workers]:
            micro, lane = divmod(number, len(self.stream.lanes))
            if lane not in lanes:
                start = micro * self.micro_batch
                lanes[lane] = self.stream.samples(lane, start, self.micro_batch)
            yield self.collate(list(islice(lanes[lane], self.micro_batch)))


def _check_batch(global_batch: int, micro_batch: int, world_size: int) -> None:
    """Refuses batches that are not the same number of whole micro-batches in every process."""
    whole = micro_batch * world_size
    if global_batch % whole == 0:
        return
    fits = f"training.batch_size {_multiples(global_batch, whole)}"
    if global_batch % world_size == 0:
        micro = _divisor(global_batch // world_size, micro_batch)
        fits += f", or training.micro_batch_size {micro},"
    raise UserError(
        f"data.streaming: training.batch_size {global_batch} is not a multiple of "
        f"training.micro_batch_size {micro_batch} x {world_size} processes; {fits} would do"
    )


def _check_lanes(lanes: int, world_size: int, workers: int, shards: int) -> None:
    """Refuses lanes that would have more than one reader, and readers without a lane."""
    readers = world_size * max(workers, 1)
    if lanes % readers == 0:
        return
    fits = []
    if readers <= shards:
        fits.append(f"data.lanes {_multiples(lanes, readers, most=shards)}")
    if lanes % world_size == 0:
        fits.append(f"training.data_workers {_divisor(lanes // world_size, workers)}")
    if not fits:
        fits.append(f"data.lanes {world_size} with training.data_workers 1")
    if world_size > shards:
        fits = [f"at most {shards} processes, one for each training shard,"]
    raise UserError(
        f"data.lanes: {lanes} lanes cannot be shared equally by {world_size} processes with "
        f"{max(workers, 1)} reader(s) each (training.data_workers {workers}); "
        f"{', or '.join(fits)} would do"
    )


def _multiples(value: int, unit: int, most: int | None = None) -> str:
    """The multiples of `unit` next to `value`; `most` is at least both `value` and `unit`."""
    below = value // unit * unit
    found = [n for n in (below, below + unit) if n > 0 and (most is None or n <= most)]
    return " or ".join(map(str, found))


def _divisor(value: int, limit: int) -> int:
    """The largest divisor of `value` up to `limit`."""
    return next(n for n in range(min(limit, value), 0, -1) if value % n == 0)
