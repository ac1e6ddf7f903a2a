"""Images to batches: CIFAR-5M's files, CIFAR-10's, or images drawn as they are asked for.

Everything is read by number from mapped files, so that data-loading processes share one copy in
the system's cache, and travels as bytes until a batch is made of it. Which image comes when is
`training.sampling`'s: a pure function of the seed and the position.
"""

from __future__ import annotations

import lzma
import math
import os
import struct
import tokenize
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch.utils.data import Dataset

from training import shapes, token_cache
from training.errors import UserError, reason

if TYPE_CHECKING:
    from vit_cifar5m.config import DataConfig, SourceConfig

# Of CIFAR-10's 50,000 training images, pixels as fractions of 255: what timm and most code for it
# normalise by. CIFAR-5M samples a model of the same images; the drawn ones are made to have them.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
MEAN_Cx1x1 = torch.tensor(MEAN).view(3, 1, 1) * 255
STD_Cx1x1 = torch.tensor(STD).view(3, 1, 1) * 255

CLASSES = 10  # of every source
IMAGE = (32, 32, 3)
# Nakkiran et al. (2021), "The Deep Bootstrap Framework": six files of 1,000,448 images, of which
# they train on the first five and test on the sixth. The bucket names them part0.npz to part5.npz.
PARTS = 6
PART_NAMES = ("cifar5m_part{}.npz", "part{}.npz")
PUBLISHED = "https://github.com/preetum/cifar5m"
# The binary version: a byte for the label, then 1,024 of red, of green and of blue.
RECORD = np.dtype([("label", "u1"), ("image", "u1", (3, 32, 32))])
BINARY_TRAIN = [f"data_batch_{k}.bin" for k in range(1, 6)]
BINARY_TEST = "test_batch.bin"
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip file's member: lengths of name and extra
COPIED_AT_ONCE = 1 << 20

EMBEDDED_IMAGES = 5_000_000  # as many as CIFAR-5M has, for runs that ask for no more
# An epoch's order numbers up to 2^31 images in 4 bytes each (training.sampling): 8 GB of these in
# every process, and some 0.07 s to shuffle each million of them.
MOST_EMBEDDED = 2_000_000_000
# Far past every training image's number; the same for every seed, so that runs of several seeds
# are compared on the same images.
VALIDATION_FIRST, VALIDATION_SEED = 1 << 40, 0
# What a damaged zip file makes zipfile and the decompressors raise (bzip2's is an OSError), and a
# garbled npy header the parser of Python that numpy reads it with.
DAMAGE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
DAMAGE += (struct.error, NotImplementedError, RuntimeError)  # and what they do not know
GARBLED = (SyntaxError, tokenize.TokenError, TypeError, MemoryError)

Sample = tuple[np.ndarray, int]


class Images(NamedTuple):
    """A source's images: items are (uint8 [3, 32, 32], label)."""

    train: Dataset
    validation: Dataset
    classes: int


def from_config(data: DataConfig, seed: int, visits: int = 0) -> Images:
    """The images of `data.source`; UserError when files are missing, damaged or too few.

    `seed` draws the embedded training images and is of no use to files; of them there are as many
    as a run visits. Validation images are the same for every seed, and no training image is among
    them.
    """
    validation = held_out(data, data.validation_images, "data.validation_images")
    if data.source == "embedded":
        train = embedded(data.train_images, visits, seed)
    elif data.source == "cifar5m":
        train = cifar5m(_folder(data), _cache(data), data.train_images)
    else:
        train = cifar10(_folder(data), data.train_images)
    return Images(train, validation, CLASSES)


def held_out(data: SourceConfig, count: int, key: str) -> Dataset:
    """The first images that no run trains on, without a look at any other file.

    UserError, which names `key`, if there are fewer than `count`.
    """
    if data.source == "embedded":
        return Drawn(VALIDATION_SEED, VALIDATION_FIRST, count)
    if data.source == "cifar5m":
        pixels, labels = open_part(_part_file(_folder(data), PARTS - 1), _cache(data))
    else:
        pixels, labels = open_batch(_binary_folder(_folder(data)), BINARY_TEST)
    return Stored([pixels], labels, _counted(len(labels), count, key, pixels.file))


def _folder(data: SourceConfig) -> Path:
    """The folder of the source's files; UserError if it is none."""
    folder = Path(data.path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"data.path: {folder} is not a folder; expected that of {data.source}, which "
            f"`bash scripts/download.sh {data.source}` fetches"
        )
    return folder


def _cache(data: SourceConfig) -> Path:
    return Path(data.cache_dir).expanduser() / "cifar5m"


def collate(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as (images [B, 3, 32, 32] float32 of mean 0 and deviation 1, labels [B] int64)."""
    images, labels = zip(*samples, strict=True)
    images_BxCxHxW = torch.from_numpy(np.stack(images)).to(torch.float32)
    return images_BxCxHxW.sub_(MEAN_Cx1x1).div_(STD_Cx1x1), torch.tensor(labels)


def check_single_visit(data: DataConfig, images: int, steps: int, batch_size: int) -> None:
    """UserError if a run of so many steps would see an image twice without `data.repeat`."""
    wanted = steps * batch_size
    if data.repeat or wanted <= images:
        return
    raise UserError(
        f"training.steps {steps} x training.batch_size {batch_size} = {wanted} images, but there "
        f"are {images} to be seen once; lower training.steps (to {images // batch_size}) or "
        "training.batch_size, raise data.train_images where the source has more, or allow a run "
        "to see images again with data.repeat=true"
    )


def _counted(available: int, wanted: int | None, key: str, where: object) -> int:
    """How many of the available images are used."""
    if wanted is not None and wanted > available:
        raise UserError(
            f"{key}: {wanted} wanted, but {where} has {available} images; expected at most that"
        )
    return available if wanted is None else wanted


# Embedded


class Drawn(Dataset):
    """Drawn images `first` .. `first` + `size` - 1 of a seed."""

    def __init__(self, seed: int, first: int, size: int) -> None:
        self.seed, self.first, self.size = seed, first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """A batch drawn at once, as torch's DataLoader asks for it: some ten times as fast."""
        numbers = np.asarray(indices, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.size:
            raise IndexError(f"images {indices} are not all in 0 .. {self.size - 1}")
        images, labels = shapes.draw(numbers + self.first, self.seed)
        return list(zip(images, labels.tolist(), strict=True))


def embedded(train_images: int | None, visits: int, seed: int) -> Drawn:
    """Images of `training.shapes`, by default enough for a run of so many visits.

    The number decides the order. Runs of up to 5,000,000 visits have the order of as many images,
    so that the shorter one sees the first images of the longer one.
    """
    if train_images is None:
        train_images = min(max(EMBEDDED_IMAGES, visits), MOST_EMBEDDED)
    where = "data.source embedded"
    return Drawn(seed, 0, _counted(MOST_EMBEDDED, train_images, "data.train_images", where))


# Files


@dataclass
class Mapped:
    """An array in a file, mapped when it is first used: a worker is sent this, not the pixels."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        self._array: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}

    @property
    def array(self) -> np.ndarray:
        """The mapped array, read-only."""
        if self._array is None:
            self._array = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
        return self._array

    def image(self, index: int) -> np.ndarray:
        """A copy of an image, uint8 [3, 32, 32], whether stored so or channels last."""
        if self.dtype == RECORD:
            return np.array(self.array[index]["image"])
        return np.ascontiguousarray(self.array[index].transpose(2, 0, 1))


class Stored(Dataset):
    """The first `size` images of some files, in the files' order."""

    def __init__(self, parts: Sequence[Mapped], labels: np.ndarray, size: int) -> None:
        self.parts, self.labels = list(parts), labels[:size].astype(np.uint8)
        self.starts = [0, *accumulate(part.shape[0] for part in parts)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} is not in 0 .. {len(self) - 1}")
        part = bisect_right(self.starts, index) - 1
        return self.parts[part].image(index - self.starts[part]), int(self.labels[index])


def _check_labels(labels: np.ndarray, where: str) -> None:
    """UserError, naming the first one, when labels are not in 0 .. 9."""
    wrong = np.flatnonzero((labels < 0) | (labels >= CLASSES))
    if wrong.size:
        raise UserError(
            f"{where}: label {labels[wrong[0]]} of image {wrong[0]} is out of range 0 .. 9; "
            "download the file again"
        )


# CIFAR-5M


def cifar5m(folder: Path, cache: Path, train_images: int | None) -> Stored:
    """Parts 0 to 4, as few as `train_images` takes; part 5 is held out.

    A part is a zip file of X (uint8 [n, 32, 32, 3]) and Y (whole numbers [n]). X is mapped where it
    lies if it is stored as it is, else from a copy in the cache.
    """
    parts: list[Mapped] = []
    labels: list[np.ndarray] = []
    found = 0
    for number in range(PARTS - 1):
        if train_images is not None and found >= train_images:
            break
        pixels, part_labels = open_part(_part_file(folder, number, found), cache)
        parts.append(pixels)
        labels.append(part_labels)
        found += len(part_labels)
    size = _counted(found, train_images, "data.train_images", folder)
    return Stored(parts, np.concatenate(labels), size)


def _part_file(folder: Path, number: int, found: int = 0) -> Path:
    """The file of a part; UserError if there is none."""
    names = [name.format(number) for name in PART_NAMES]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    fewer = f", or use what is there with data.train_images={found}" if found else ""
    raise UserError(
        f"{folder}: no {names[0]} in it; expected CIFAR-5M's part {number} under this name or "
        f"{names[1]}. Get it from {PUBLISHED}{fewer}"
    )


@contextmanager
def _reading(file: Path, key: str) -> Iterator[None]:
    """Turns what a damaged file raises into one line."""
    try:
        yield
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(
            f"{file}: {key} cannot be read ({reason(error)}); expected an npz file of CIFAR-5M, "
            f"whole. Download it again from {PUBLISHED}"
        ) from error


def open_part(file: Path, cache: Path) -> tuple[Mapped, np.ndarray]:
    """A part's images, mapped, and its labels, in memory; UserError if they cannot be.

    Checked: names, shapes, types and sizes of both arrays, labels by their range, and the zip
    file's checksums of both. That of the pixels takes reading all of them, once for a content.
    """
    with _reading(file, "it"):
        archive = zipfile.ZipFile(file)
    with archive:
        with _member(archive, file, "X") as stream:
            shape, dtype = _header(stream, file, "X")
            start = stream.tell()
        if dtype != np.uint8 or len(shape) != 4 or shape[1:] != IMAGE or not shape[0]:
            raise _unexpected(file, "X", shape, dtype, "uint8 [n, 32, 32, 3]")
        labels = _labels(archive, file, shape[0])
        info = archive.getinfo("X.npy")
        expected = start + math.prod(shape)
        if info.file_size != expected:
            raise _cut_off(file, "X", info.file_size, expected)
        place, offset = _whole(archive, file, info, cache)
        return Mapped(place, offset + start, shape, dtype), labels


@contextmanager
def _member(archive: zipfile.ZipFile, file: Path, key: str) -> Iterator[IO[bytes]]:
    """An array of the file as a stream."""
    names = archive.namelist()
    if f"{key}.npy" not in names:
        found = ", ".join(sorted(name.removesuffix(".npy") for name in names)) or "nothing"
        raise UserError(
            f"{file}: no array {key} in it, but {found}; expected X and Y, as published at "
            f"{PUBLISHED}"
        )
    with _reading(file, key), archive.open(f"{key}.npy") as stream:
        yield stream


def _header(stream: IO[bytes], file: Path, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an npy stream, which then stands at its first value."""
    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"npy format {version} is unknown")
    try:
        shape, fortran, dtype = read(stream)
    except GARBLED as error:
        raise ValueError(f"its npy header is garbled, {reason(error)}") from error
    if fortran and len(shape) > 1:
        raise UserError(
            f"{file}: {key} is stored in Fortran's order; expected C's, as published at {PUBLISHED}"
        )
    return shape, dtype


def _labels(archive: zipfile.ZipFile, file: Path, count: int) -> np.ndarray:
    """All labels of a part."""
    with _member(archive, file, "Y") as stream:
        shape, dtype = _header(stream, file, "Y")
        if dtype.kind not in "iu" or shape != (count,):
            raise _unexpected(file, "Y", shape, dtype, f"whole numbers [{count}], as many as X")
        content = stream.read()
    if len(content) != count * dtype.itemsize:
        raise _cut_off(file, "Y", len(content), count * dtype.itemsize)
    labels = np.frombuffer(content, dtype)
    _check_labels(labels, f"{file}: Y")
    return labels


def _unexpected(
    file: Path, key: str, shape: tuple[int, ...], dtype: np.dtype, expected: str
) -> UserError:
    return UserError(
        f"{file}: {key} is {dtype} {list(shape)}; expected {expected}, as published at {PUBLISHED}"
    )


def _cut_off(file: Path, key: str, found: int, expected: int) -> UserError:
    return UserError(
        f"{file}: {key} has {found} bytes, expected {expected} for its shape; download it again "
        f"from {PUBLISHED}"
    )


def _place(file: Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin in the file."""
    with _reading(file, "X"), open(file, "rb") as opened:
        opened.seek(info.header_offset)
        name, extra = LOCAL_HEADER.unpack(opened.read(LOCAL_HEADER.size))
    return info.header_offset + LOCAL_HEADER.size + name + extra


def _whole(
    archive: zipfile.ZipFile, file: Path, info: zipfile.ZipInfo, cache: Path
) -> tuple[Path, int]:
    """Where a member's bytes are, and from which one on: in the part itself if they are stored as
    they are, else in the cache, unpacked once.

    Either way they are all read once, which compares them with the zip file's checksum, and a
    folder of the cache says that they were. It is named by what the zip file says of the member,
    and by what tells that the part was written to, where its own bytes are used.
    """
    stored, part = info.compress_type == zipfile.ZIP_STORED, file.stat()
    identity = [info.filename, info.CRC, info.file_size, info.compress_size]
    identity += [part.st_size, part.st_mtime_ns, part.st_ino] * stored
    folder = cache / f"{file.stem}-{token_cache.digest(identity)}"

    def build(folder: Path) -> dict[str, Any]:
        with _member(archive, file, "X") as stream:
            copy = os.devnull if stored else folder / info.filename
            _copy(_chunks(stream, file), Path(copy), info.file_size)
        return {"source": file.name}

    token_cache.prepare(folder, build)
    return (file, _place(file, info)) if stored else (folder / info.filename, 0)


def _chunks(stream: IO[bytes], file: Path) -> Iterator[bytes]:
    """What is in a stream; damage is UserError here, where none of it is the copy's."""
    while True:
        with _reading(file, "X"):
            chunk = stream.read(COPIED_AT_ONCE)
        if not chunk:
            return
        yield chunk


def _copy(chunks: Iterator[bytes], path: Path, size: int) -> None:
    """Writes a file of the cache; UserError if it cannot be, as on a full disk."""
    try:
        with open(path, "wb") as copy:
            copy.writelines(chunks)
    except OSError as error:
        raise UserError(
            f"data.cache_dir: {path.parent.parent} cannot be written ({reason(error)}); expected "
            f"room for {size} bytes"
        ) from error


# CIFAR-10


def cifar10(folder: Path, train_images: int | None) -> Stored:
    """The binary version's five training batches; the test batch is held out."""
    folder = _binary_folder(folder)
    train, labels = zip(*(open_batch(folder, name) for name in BINARY_TRAIN), strict=True)
    train_labels = np.concatenate(labels)
    size = _counted(len(train_labels), train_images, "data.train_images", folder)
    return Stored(train, train_labels, size)


def _binary_folder(folder: Path) -> Path:
    """Where the batches are: in the folder, or in the one that the archive unpacks to."""
    inner = folder / "cifar-10-batches-bin"
    return inner if inner.is_dir() else folder


def open_batch(folder: Path, name: str) -> tuple[Mapped, np.ndarray]:
    """A file of records, mapped, and their labels."""
    file = folder / name
    if not file.is_file():
        raise UserError(f"{folder}: no {name} in it; {_binary_version(folder)}")
    count, rest = divmod(file.stat().st_size, RECORD.itemsize)
    if rest or not count:
        raise UserError(
            f"{file}: {file.stat().st_size} bytes; expected a multiple of {RECORD.itemsize}, the "
            "bytes of an image and its label. Download it again"
        )
    mapped = Mapped(file, 0, (count,), RECORD)
    labels = np.array(mapped.array["label"])
    _check_labels(labels, str(file))
    return mapped, labels


def _binary_version(folder: Path) -> str:
    """What to do where the binary files are not."""
    source = "expected CIFAR-10's binary version, cifar-10-binary.tar.gz unpacked"
    pickled = [folder / "data_batch_1", folder / "cifar-10-batches-py"]
    if any(path.exists() for path in pickled):
        return f"the Python version is there, but pickles are never loaded; {source}"
    return source
