"""Images to batches: CIFAR-5M's files, CIFAR-10's, or images drawn as they are asked for.

Everything is read by number from mapped files, so that data-loading processes share one copy in
the system's cache, and travels as bytes until a batch is made of it. Which image comes when is
`training.data.sampling`'s: a pure function of the seed and the position.
"""

from __future__ import annotations

import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from training.data import shapes, token_cache
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

EMBEDDED_IMAGES = 5_000_000  # as many as CIFAR-5M has, for runs that ask for no more
# An epoch's order numbers up to 2^31 images in 4 bytes each (training.data.sampling): 8 GB of these
# in every process, and some 0.07 s to shuffle each million of them.
MOST_EMBEDDED = 2_000_000_000
# Far past every training image's number; the same for every seed, so that runs of several seeds
# are compared on the same images.
VALIDATION_FIRST, VALIDATION_SEED = 1 << 40, 0
Sample = tuple[np.ndarray, int]


class Images(NamedTuple):
    """A source's images: items are (uint8 [3, 32, 32], label)."""

    train: Drawn | Stored
    validation: Drawn | Stored
    classes: int


def from_config(data: DataConfig, seed: int, visits: int = 0) -> Images:
    """The images of `data.source`; UserError when files are missing, damaged or too few.

    `seed` draws the embedded training images, as many as a run visits; files do not use it.
    Validation images are the same for every seed, and no training image is among them.
    """
    validation = held_out(data, data.validation_images, "data.validation_images")
    train: Drawn | Stored
    if data.source == "embedded":
        train = embedded(data.train_images, visits, seed)
    elif data.source == "cifar5m":
        train = cifar5m(_folder(data), _cache(data), data.train_images)
    else:
        train = cifar10(_folder(data), data.train_images)
    return Images(train, validation, CLASSES)


def held_out(data: SourceConfig, count: int, key: str) -> Drawn | Stored:
    """The first images that no run trains on, without a look at any other file.

    UserError, which names `key`, if there are fewer than `count`.
    """
    if data.source == "embedded":
        return Drawn(VALIDATION_SEED, VALIDATION_FIRST, count)
    if data.source == "cifar5m":
        file = _part_file(_folder(data), PARTS - 1)
        pixels, labels = open_part(file, _cache(data))
    else:
        pixels, labels = open_batch(_binary_folder(_folder(data)), BINARY_TEST)
        file = pixels
    return Stored([pixels], [labels], _counted(len(labels), count, key, file))


def _folder(data: SourceConfig) -> Path:
    """The folder of the source's files; UserError if it is none."""
    folder = Path(str(data.path)).expanduser()
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
    """Images of `training.data.shapes`, by default enough for a run of so many visits.

    The number decides the order. Runs of up to 5,000,000 visits have the order of as many images,
    so that the shorter one sees the first images of the longer one.
    """
    if train_images is None:
        train_images = min(max(EMBEDDED_IMAGES, visits), MOST_EMBEDDED)
    where = "data.source embedded"
    return Drawn(seed, 0, _counted(MOST_EMBEDDED, train_images, "data.train_images", where))


# Files


class Stored(Dataset):
    """The first `size` images of some files, in the files' order: npy, or CIFAR-10's records.

    A file is mapped when it is first used: a worker is sent its name, not its pixels.
    """

    def __init__(self, files: Sequence[Path], labels: Sequence[np.ndarray], size: int) -> None:
        self.files, self.starts = list(files), [0, *accumulate(map(len, labels))]
        self.labels = np.concatenate(labels)[:size].astype(np.uint8)
        self.pixels: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pixels": {}}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} is not in 0 .. {len(self) - 1}")
        part = bisect_right(self.starts, index) - 1
        if part not in self.pixels:
            file = self.files[part]
            self.pixels[part] = (
                np.memmap(file, RECORD, "r")["image"]
                if file.suffix == ".bin"
                else np.load(file, mmap_mode="r").transpose(0, 3, 1, 2)
            )
        image_CxHxW = self.pixels[part][index - self.starts[part]]
        return np.array(image_CxHxW, order="C"), int(self.labels[index])


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
    """Parts 0 to 4, as few as `train_images` takes; part 5 is held out."""
    files, labels, found = [], [], 0
    for number in range(PARTS - 1):
        if train_images is not None and found >= train_images:
            break
        file, part_labels = open_part(_part_file(folder, number, found), cache)
        files.append(file)
        labels.append(part_labels)
        found += len(part_labels)
    return Stored(files, labels, _counted(found, train_images, "data.train_images", folder))


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


def open_part(file: Path, cache: Path) -> tuple[Path, np.ndarray]:
    """The npy file of a part's images in the cache, and its labels; UserError if it is damaged.

    A part is a zip file of X.npy and Y.npy. They are unpacked once for a content, which compares
    them with the zip file's checksums; the cache is named by these.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = [archive.getinfo(name) for name in ("X.npy", "Y.npy")]
            content = [[info.filename, info.CRC, info.file_size] for info in members]
            folder = cache / f"{file.stem}-{token_cache.digest(content)}"

            def build(folder: Path) -> dict[str, Any]:
                archive.extractall(folder, members)
                return {"source": file.name}

            token_cache.prepare(folder, build)
        pixels, labels = (np.load(folder / info.filename, mmap_mode="r") for info in members)
    except UserError:
        raise  # what the cache's disk does not take
    except (KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{file}: cannot be read ({reason(error)}); expected an npz file of CIFAR-5M, whole, "
            f"with arrays X and Y. Download it again from {PUBLISHED}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.shape[1:] != IMAGE or not pixels.size:
        raise UserError(
            f"{file}: X is {pixels.dtype} {list(pixels.shape)}; expected uint8 [n, 32, 32, 3], as "
            f"published at {PUBLISHED}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]:
        raise UserError(
            f"{file}: Y is {labels.dtype} {list(labels.shape)}; expected whole numbers "
            f"[{len(pixels)}], as many as X, as published at {PUBLISHED}"
        )
    _check_labels(labels, f"{file}: Y")
    return folder / members[0].filename, np.array(labels)


# CIFAR-10


def cifar10(folder: Path, train_images: int | None) -> Stored:
    """The binary version's five training batches; the test batch is held out."""
    folder = _binary_folder(folder)
    files, labels = zip(*(open_batch(folder, name) for name in BINARY_TRAIN), strict=True)
    size = _counted(sum(map(len, labels)), train_images, "data.train_images", folder)
    return Stored(files, labels, size)


def _binary_folder(folder: Path) -> Path:
    """Where the batches are: in the folder, or in the one that the archive unpacks to."""
    inner = folder / "cifar-10-batches-bin"
    return inner if inner.is_dir() else folder


def open_batch(folder: Path, name: str) -> tuple[Path, np.ndarray]:
    """A file of records, and their labels."""
    file = folder / name
    if not file.is_file():
        raise UserError(
            f"{folder}: no {name} in it; expected CIFAR-10's binary version, "
            "cifar-10-binary.tar.gz unpacked (the Python version's pickles are never loaded)"
        )
    if file.stat().st_size % RECORD.itemsize or not file.stat().st_size:
        raise UserError(
            f"{file}: {file.stat().st_size} bytes; expected a multiple of {RECORD.itemsize}, the "
            "bytes of an image and its label. Download it again"
        )
    labels = np.array(np.memmap(file, RECORD, "r")["label"])
    _check_labels(labels, str(file))
    return file, labels
