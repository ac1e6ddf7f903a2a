"""ImageNet in shards, tar or parquet, as one Arrow file: copied once, then read by number.

Shards could be streamed without a copy, but then the order depends on how they are dealt to
readers, and images of smaller shares come more often; the Arrow file is faster, and exact.
"""

from __future__ import annotations

import glob
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from training import token_cache
from training.errors import UserError
from vit_imagenet.images import SPLITS, Record, existing_folder

if TYPE_CHECKING:
    import datasets

BUILDERS = {"parquet": "parquet", "tar": "webdataset"}  # kinds of shards and what reads them
SPLIT_WORD = re.compile(r"(?<![A-Za-z0-9])(train|val|test)")  # begins a word of a file's name
COMPLETE = "dataset_info.json"  # what `datasets` writes last into a folder of its cache
TAR_IMAGES = ("jpg", "jpeg", "JPEG", "JPG", "png", "webp")


class Shards(NamedTuple):
    """Files of one split in sorted order."""

    paths: list[Path]
    kind: Literal["parquet", "tar"]


class Columns(NamedTuple):
    """Which columns of a shard hold image and label."""

    image: str
    label: str
    names: list[str] | None
    """Names of the classes, where the shards say."""


def open_shards(path: str, split: str) -> Shards:
    """SPLIT*.parquet or SPLIT*.tar in PATH, or else in PATH/data; split is one of SPLITS.

    A prefix may stand before the split, as in imagenet-train-000000.tar.
    """
    root = existing_folder(path, "train*.tar and val*.tar, or train*.parquet and val*.parquet")
    files = _shard_files(root) or _shard_files(root / "data")  # the hub's layout
    found = {kind: [file for file in files if _is_shard(file, split, kind)] for kind in BUILDERS}
    kinds = [kind for kind, paths in found.items() if paths]
    wanted = " or ".join(f"{split}*.{kind}" for kind in BUILDERS)
    if not kinds:
        raise UserError(
            f"data.path: {root} holds no shard of {split}; expected {wanted} in it or in its "
            f"data/, or such names after a prefix, as imagenet-{split}-000000.tar"
        )
    if len(kinds) > 1:
        raise UserError(
            f"data.path: {root} holds both {found[kinds[0]][0].name} and {found[kinds[1]][0].name};"
            f" expected shards of one kind, {wanted}"
        )
    return Shards(found[kinds[0]], kinds[0])


def _shard_files(folder: Path) -> list[Path]:
    """Shards of either split in a folder, sorted; none if there is no such folder."""
    return sorted(
        file
        for file in folder.glob("[!.]*")
        if any(_is_shard(file, split, kind) for split in SPLITS for kind in BUILDERS)
    )


def _is_shard(file: Path, split: str, kind: str) -> bool:
    """Whether a file's name ends in the kind and has a word that begins with the split.

    Of two splits in a name the first counts, and `test` in it excludes it.
    """
    words = SPLIT_WORD.findall(file.name)
    return file.suffix == f".{kind}" and words[:1] == [split] and "test" not in words


def find_columns(features: datasets.Features, where: object) -> Columns:
    """The columns of image and label; UserError that names `where` when one is missing.

    Parquet: `image` and `label`, as the hub's imagenet-1k. Tar, one file each: NAME.jpg with
    NAME.cls, or with "label" in NAME.json.
    """
    image = next((name for name in ("image", *TAR_IMAGES) if name in features), None)
    has_json_label = isinstance(features.get("json"), dict) and "label" in features["json"]
    label = next((name for name in ("label", "cls") if name in features), None)
    label = label or ("json" if has_json_label else None)
    if image is None or label is None:
        missing = "image" if image is None else "label"
        raise UserError(
            f"{where}: no {missing} in columns {', '.join(features)}; expected image and label "
            "(parquet), or NAME.jpg with NAME.cls or NAME.json with a label (tar)"
        )
    return Columns(image, label, getattr(features[label], "names", None))


class ArrowRows:
    """Rows of an Arrow copy by number; the file is mapped, not read.

    `starts` has each shard's first row and path, in order; it is empty where rows name themselves,
    as those of a tar do.
    """

    def __init__(
        self, rows: datasets.Dataset, columns: Columns, starts: list[tuple[int, str]]
    ) -> None:
        self.rows, self.columns, self.starts = rows, columns, starts

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        """The image as it is stored; one that is missing has no bytes, which cannot be read."""
        row = self.rows[index]
        image, label = row[self.columns.image], row[self.columns.label]
        path = None
        if isinstance(image, dict):
            path, image = image.get("path"), image.get("bytes")
            image = path if image is None else image
        if self.columns.label == "json":
            label = label["label"]
        return Record(image or b"", label, self._name(row, index, path))

    def _name(self, row: dict[str, Any], index: int, path: str | None) -> str:
        """Shard and row, or a tar's key, with the file's own name where the row has it."""
        if "__key__" in row:
            return f"{row['__key__']} in {row['__url__']}"
        start, shard = self.starts[bisect_right(self.starts, index, key=itemgetter(0)) - 1]
        where = f"{shard}, row {index - start}"
        return f"{path} ({where})" if path else where


def arrow_splits(path: str, classes: int, cache_dir: str) -> tuple[ArrowRows, ArrowRows, list[str]]:
    """Training and validation rows; classes without names in the shards get their numbers."""
    validation = arrow_rows(path, "val", classes, cache_dir)
    train = arrow_rows(path, "train", classes, cache_dir)
    names, others = train.columns.names, validation.columns.names
    if names and others and names != others:
        raise UserError(f"data.path: {path}: shards of train and val name other classes")
    return train, validation, names or others or [str(label) for label in range(classes)]


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """The `datasets` module with its log off: what goes wrong becomes one line."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield datasets
    finally:
        datasets.logging.set_verbosity(level)


def arrow_rows(path: str, split: str, classes: int, cache_dir: str) -> ArrowRows:
    """Copies a split's shards into one Arrow file, unless the cache has it, and opens it."""
    shards = open_shards(path, split)
    where = f"{Path(path).expanduser()}: shards of {split}"
    files = {split: [glob.escape(str(file)) for file in shards.paths]}
    starts = _starts(shards.paths) if shards.kind == "parquet" else []
    with quiet_datasets() as datasets:
        try:
            builder = datasets.load_dataset_builder(
                BUILDERS[shards.kind],
                data_files=files,
                cache_dir=str(Path(cache_dir).expanduser()),
            )

            def rows_of() -> datasets.Dataset:
                if shards.kind == "tar" and not (Path(builder.cache_dir) / COMPLETE).exists():
                    for path in shards.paths:
                        _check_tar(path)
                builder.download_and_prepare()
                return builder.as_dataset(split)

            rows = token_cache.guard(Path(builder.cache_dir), rows_of)
        except UserError:
            raise
        except Exception as error:  # of Arrow, tarfile or json, under one of the library's own
            named = _damaged(shards.paths) if shards.kind == "parquet" else None
            raise UserError(
                f"{named or where}: cannot be read as {shards.kind} ({_reason(error)})"
            ) from error
    columns = find_columns(rows.features, where)
    if isinstance(rows.features[columns.image], datasets.Image):
        rows = rows.cast_column(columns.image, datasets.Image(decode=False))
    _check_labels(rows, columns, classes, where)
    return ArrowRows(rows, columns, starts)


def _check_tar(path: Path) -> None:
    """UserError, naming the file, unless it is a whole tar and its labels can be read.

    To tarfile a damaged header is the end, and the images behind it would be missing without a
    word: the end has to be the block of zeros that every tar ends with.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members.clear()  # which would grow with every member
                if member.name.endswith(".cls"):
                    int(tar.extractfile(member).read())
                elif member.name.endswith(".json"):
                    json.loads(tar.extractfile(member).read())
            tar.fileobj.seek(tar.offset)
            if not tar.offset or tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read as tar ({_reason(error)}); copy or download it again"
        ) from error


def _damaged(paths: list[Path]) -> Path | None:
    """The first parquet file that cannot be read to its end."""
    from pyarrow import parquet

    for path in paths:
        try:
            for _ in parquet.ParquetFile(path).iter_batches():
                pass
        except Exception:
            return path
    return None


def _starts(paths: list[Path]) -> list[tuple[int, str]]:
    """Parquet files' first rows, counted through all of them, and their paths.

    Raises UserError, naming the file, when one is damaged or lacks a column: `datasets` would name
    none.
    """
    import datasets
    from pyarrow import parquet

    starts, first = [], 0
    for path in paths:
        try:
            schema, metadata = parquet.read_schema(path), parquet.read_metadata(path)
            features = datasets.Features.from_arrow_schema(schema)
        except Exception as error:  # Arrow's, or of the features that the hub's files describe
            raise UserError(f"{path}: not a parquet file ({_reason(error)})") from error
        find_columns(features, path)
        starts.append((first, str(path)))
        first += metadata.num_rows
    return starts


def _reason(error: BaseException) -> str:
    """The first words of what went wrong at the bottom, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join((str(error) or type(error).__name__).split())[:200]


def _check_labels(rows: datasets.Dataset, columns: Columns, classes: int, where: str) -> None:
    """UserError unless all labels are there and in 0 .. classes - 1; a missing one counts as -1."""
    from pyarrow import compute

    column = rows.data.column(columns.label)
    if columns.label == "json":
        column = compute.struct_field(column, "label")
    labels = compute.fill_null(column, -1).to_numpy()
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{where}: labels are {labels.dtype}; expected whole numbers")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise UserError(
            f"{where}: label {wrong[0]} is out of range 0 .. {classes - 1} of model.classes "
            f"{classes}; correct the shards or set model.classes"
        )
