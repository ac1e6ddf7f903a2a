"""ImageNet in shards, tar or parquet, as one Arrow file: copied once, then read by number.

Shards could be streamed without a copy, but then the order depends on how they are dealt to
readers, and images of smaller shares come more often; the Arrow file is faster, and exact.
"""

from __future__ import annotations

import glob
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from training.data import token_cache
from training.errors import UserError
from vit_imagenet.images import SPLITS, Record, existing_folder

if TYPE_CHECKING:
    import datasets

BUILDERS = {"parquet": "parquet", "tar": "webdataset"}  # kinds of shards and what reads them
SPLIT_WORD = re.compile(r"(?<![A-Za-z0-9])(train|val|test)")  # begins a word of a file's name
COMPLETE = "dataset_info.json"  # what `datasets` writes last into a folder of its cache
IMAGES = ("image", "jpg", "jpeg", "JPEG", "JPG", "png", "webp")  # columns that may hold the image


class Columns(NamedTuple):
    """Which columns hold image and label, and the classes' names where the shards know them."""

    image: str
    label: str
    names: list[str] | None


def open_shards(path: str, split: str) -> tuple[list[Path], str]:
    """Files and kind of SPLIT*.parquet or SPLIT*.tar in PATH, or else in PATH/data (the hub's way).

    A prefix may stand before the split, as in imagenet-train-000000.tar. Of two splits in a name
    the first counts, and `test` in it excludes it.
    """
    root = existing_folder(path, "train*.tar and val*.tar, or train*.parquet and val*.parquet")
    for folder in (root, root / "data"):
        shards: dict[str, dict[str, list[Path]]] = {name: {} for name in SPLITS}
        for file in sorted(folder.glob("[!.]*")):
            words, kind = SPLIT_WORD.findall(file.name), file.suffix[1:]
            if kind in BUILDERS and words and "test" not in words:
                shards[words[0]].setdefault(kind, []).append(file)
        if any(shards.values()):
            break
    found = shards[split]
    wanted = " or ".join(f"{split}*.{kind}" for kind in BUILDERS)
    if not found:
        raise UserError(
            f"data.path: {root} holds no shard of {split}; expected {wanted} in it or in its "
            f"data/, or such names after a prefix, as imagenet-{split}-000000.tar"
        )
    if len(found) > 1:
        names = " and ".join(found[kind][0].name for kind in BUILDERS)
        raise UserError(
            f"data.path: {root} holds both {names}; expected shards of one kind, {wanted}"
        )
    [(kind, paths)] = found.items()
    return paths, kind


def find_columns(features: datasets.Features, where: object) -> Columns:
    """The columns of image and label; UserError that names `where` when one is missing.

    Parquet: `image` and `label`, as the hub's imagenet-1k. Tar, one file each: NAME.jpg with
    NAME.cls, or with "label" in NAME.json.
    """
    image = next((name for name in IMAGES if name in features), None)
    label = next((name for name in ("label", "cls") if name in features), None)
    if label is None and "label" in (features.get("json") or {}):
        label = "json"
    if image is None or label is None:
        missing = "image" if image is None else "label"
        raise UserError(
            f"{where}: no {missing} in columns {', '.join(features)}; expected image and label "
            "(parquet), or NAME.jpg with NAME.cls or NAME.json with a label (tar)"
        )
    return Columns(image, label, getattr(features[label], "names", None))


class ArrowRows:
    """Rows of an Arrow copy by number; the file is mapped, not read."""

    def __init__(self, rows: datasets.Dataset, columns: Columns, where: str) -> None:
        self.rows, self.columns, self.where = rows, columns, where

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        """The image as it is stored; one that is missing has no bytes, which cannot be read."""
        row = self.rows[index]
        image, label = row[self.columns.image], row[self.columns.label]
        name = f"row {index} of {self.where}"
        if "__key__" in row:
            name = f"{row['__key__']} in {row['__url__']}"
        if isinstance(image, dict):
            path, content = image.get("path"), image.get("bytes")
            image, name = path if content is None else content, f"{path} ({name})" if path else name
        if self.columns.label == "json":
            label = label["label"]
        return Record(image or b"", label, name)


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
    paths, kind = open_shards(path, split)
    where = f"{Path(path).expanduser()}: shards of {split}"
    with quiet_datasets() as datasets:
        try:
            builder = datasets.load_dataset_builder(
                BUILDERS[kind],
                data_files={split: [glob.escape(str(file)) for file in paths]},
                cache_dir=str(Path(cache_dir).expanduser()),
            )

            def rows_of() -> Any:
                if kind == "tar" and not (Path(builder.cache_dir) / COMPLETE).exists():
                    _check_ends(paths)
                builder.download_and_prepare()
                return builder.as_dataset(split)

            rows = token_cache.guard(Path(builder.cache_dir), rows_of)
        except UserError:
            raise
        except Exception as error:  # of Arrow, tarfile or json, under one of the library's own
            raise UserError(f"{where}: cannot be read as {kind} ({_reason(error)})") from error
    columns = find_columns(rows.features, where)
    if isinstance(rows.features[columns.image], datasets.Image):
        rows = rows.cast_column(columns.image, datasets.Image(decode=False))
    _check_labels(rows, columns, classes, where)
    return ArrowRows(rows, columns, where)


def _check_ends(paths: list[Path]) -> None:
    """UserError, naming the first tar that does not end with the block of zeros that every one has.

    tarfile takes a damaged header for the end of the archive, and would silently drop the images
    after it.
    """
    for path in paths:
        try:
            with tarfile.open(path, "r:") as tar:
                while tar.next():
                    tar.members.clear()  # type: ignore[attr-defined]  # it would grow
                end = tar.offset
            with open(path, "rb") as file:
                file.seek(end)
                if not end or file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError(f"damaged or cut off at byte {end}")
        except (tarfile.TarError, OSError) as error:
            raise UserError(
                f"{path}: cannot be read as tar ({_reason(error)}); copy or download it again"
            ) from error


def _reason(error: BaseException) -> str:
    """The first words of what went wrong at the bottom, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join((str(error) or type(error).__name__).split())[:200]


def _check_labels(rows: datasets.Dataset, columns: Columns, classes: int, where: str) -> None:
    """UserError unless all labels are there and in 0 .. classes - 1; a missing one counts as -1."""
    from pyarrow import compute, types

    column = rows.data.column(columns.label)
    if columns.label == "json":
        column = compute.struct_field(column, "label")
    if not types.is_integer(column.type):
        raise UserError(f"{where}: labels are {column.type}; expected whole numbers")
    labels = compute.fill_null(column, -1).to_numpy()
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise UserError(
            f"{where}: label {wrong[0]} is out of range 0 .. {classes - 1} of model.classes "
            f"{classes}; correct the shards or set model.classes"
        )
