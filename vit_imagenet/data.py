"""Images to batches: source -> decoded and augmented samples -> Mixup and CutMix.

All that is random about a training sample is a function of (seed, epoch, index), all that is
random about mixing one of (seed, epoch, position): neither the number of processes and workers
nor the size of a micro-batch changes a pixel. The transforms are timm's.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import random
import re
import struct
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, auto_augment, create_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.mixup import mixup_target
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch.utils.data import Dataset, default_collate
from torchvision.datasets import folder as torchvision_folder
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize
from torchvision.transforms import functional as vision

from training.errors import UserError
from training.sampling import Place
from vit_imagenet.losses import IGNORE
from vit_imagenet.streaming import Stream

if TYPE_CHECKING:
    import datasets

    from vit_imagenet.config import AugmentationConfig, DataConfig

# timm's own Normalize, without the checks that take longer than a small image's arithmetic.
MEAN_Cx1x1 = torch.tensor(IMAGENET_DEFAULT_MEAN).view(3, 1, 1)
STD_Cx1x1 = torch.tensor(IMAGENET_DEFAULT_STD).view(3, 1, 1)
# What Pillow's plugins raise for a damaged file; UnidentifiedImageError is an OSError.
DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
SPLITS = ("train", "val")
BUILDERS = {"parquet": "parquet", "tar": "webdataset"}  # kinds of shards and what reads them
SPLIT_WORD = re.compile(r"(?<![A-Za-z0-9])(train|val|test)")  # begins a word of a file's name
TAR_IMAGES = ("jpg", "jpeg", "JPEG", "JPG", "png", "webp")
SPLIT_KEY = 0x5EED  # the embedded images are split alike for every run, whatever its seed
RAND_AUGMENT = re.compile(
    r"rand(-(m\d+|n\d+|mmax\d+|inc[01]|p\d*\.?\d+|mstd(\d*\.?\d+|inf)|tweights))*"
)

Content = str | bytes | np.ndarray
Sample = tuple[torch.Tensor, int, Place]


# Randomness


@contextmanager
def seeded(*key: object) -> Iterator[None]:
    """Seeds the global generators of `random`, numpy and torch (CPU) from a key for a while.

    timm's transforms draw from all three. Their states are put back, since without workers the
    training process itself prepares the samples. `torch.manual_seed` would seed GPUs too.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=40).digest()
    random.seed(digest[:16])
    np.random.seed(np.frombuffer(digest[16:32], dtype="<u4"))
    torch.default_generator.manual_seed(int.from_bytes(digest[32:], "little") >> 1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


# Decoding


class Unreadable(Exception):
    """An image that cannot be decoded, and why."""


@contextmanager
def _decoding() -> Iterator[None]:
    """Turns whatever Pillow raises for a damaged file into Unreadable."""
    try:
        yield
    except DECODING_ERRORS as error:
        # Pillow names the buffer it read from, which says nothing.
        reason = re.sub(r" <_io\.BytesIO object at 0x\w+>", "", str(error))
        raise Unreadable(" ".join(reason.split()) or type(error).__name__) from error


def open_image(content: Content) -> Image.Image:
    """A file's name, its bytes or an array (height, width, 3) as an image, not yet decoded."""
    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    if isinstance(content, str):
        content = Path(content).read_bytes()
    if not content:
        raise OSError("no bytes")
    return Image.open(io.BytesIO(content))


def decoded(image: Image.Image) -> Image.Image:
    """The image in memory, as RGB whatever it was: grey, CMYK, with a palette or transparency."""
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def normalised(pixels_HxWxC: np.ndarray) -> torch.Tensor:
    """Bytes as a float32 tensor [3, H, W]: by ImageNet's means and deviations, as timm's."""
    image_CxHxW = torch.from_numpy(pixels_HxWxC).permute(2, 0, 1).contiguous()
    return image_CxHxW.to(torch.float32).div_(255).sub_(MEAN_Cx1x1).div_(STD_Cx1x1)


class PilCrop(RandomResizedCropAndInterpolation):
    """timm's random resized crop of an image that is decoded whole."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return super().__call__(decoded(image))


class DraftCrop(RandomResizedCropAndInterpolation):
    """The same crop, of an image that libjpeg reduces by 2, 4 or 8 while decoding it.

    The box is drawn from the full size, which is known beforehand. The reduction is the largest
    that leaves the crop its final size on the shorter side; other formats have none.
    """

    def __call__(self, image: Image.Image) -> Image.Image:
        top, left, height, width = self.get_params(image, self.scale, self.ratio)
        spare = min(height // self.size[0], width // self.size[1])
        factor = next((k for k in (8, 4, 2) if k <= spare), 1)
        reduced = (image.width // factor, image.height // factor)
        if factor == 1 or image.draft(None, reduced) is None:
            return vision.resized_crop(
                decoded(image), top, left, height, width, self.size, self.interpolation
            )
        box = (left, top, left + width, top + height)
        box = tuple(edge / factor for edge in box)
        return decoded(image).resize(self.size[::-1], Image.Resampling.BICUBIC, box=box)


# Transforms


class TrainTransform:
    """Content to a normalised image [3, S, S], augmented by timm with what `seeded` gives."""

    def __init__(self, image_size: int, augmentation: AugmentationConfig, decoder: str) -> None:
        (crop, *flip), colours, (_, _, *erase) = _timm(image_size, augmentation)
        kind = DraftCrop if decoder == "draft" else PilCrop
        self.crop = kind(image_size, crop.scale, crop.ratio, interpolation="bicubic")
        self.augment, self.erase = Compose([*flip, *colours]), Compose(erase)
        low, high = augmentation.crop_ratio
        whole = augmentation.crop_scale == (1.0, 1.0) and low <= 1 <= high
        # Then timm's crop always takes the whole of a square image and nothing is random.
        self.keeps = whole and not (flip or colours or erase)
        self.shape = (image_size, image_size, 3)

    def __call__(self, content: Content, *key: object) -> torch.Tensor:
        """The image under this key; raises Unreadable."""
        if self.keeps and isinstance(content, np.ndarray) and content.shape == self.shape:
            return normalised(content)
        with seeded("image", *key):
            with _decoding():
                image = self.crop(open_image(content))
            return self.erase(normalised(np.array(self.augment(image))))


def _timm(image_size: int, augmentation: AugmentationConfig) -> tuple[list, list, list]:
    """timm's training transforms: of geometry, of colours, of tensors; ones that are off absent."""
    spelling = augmentation.rand_augment
    if spelling is not None and not RAND_AUGMENT.fullmatch(spelling):
        raise UserError(
            f"data.augmentation.rand_augment: {spelling!r} is not RandAugment in timm's spelling; "
            "expected something like rand-m9-mstd0.5-inc1, or null for none"
        )
    stages = create_transform(
        image_size,
        is_training=True,
        scale=augmentation.crop_scale,
        ratio=augmentation.crop_ratio,
        hflip=augmentation.flip,
        color_jitter=None,
        auto_augment=spelling,
        interpolation="bicubic",
        re_prob=augmentation.erasing,
        re_mode="pixel",
        re_count=1,
        separate=True,
    )
    geometry, colours, tensors = (stage.transforms for stage in stages)
    for operation in colours[0].ops if colours else ():
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = posterize
    return geometry, colours, tensors


def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's posterize, with black for 0 bits, its strongest: Pillow 13 no longer accepts those."""
    if bits == 0:
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits, **options)


class EvalTransform:
    """Content to a normalised image [3, S, S]: shorter side to `resize`, centre crop.

    Images are decoded whole whatever the training's decoder, so that its choice does not change
    how a model is judged.
    """

    def __init__(self, image_size: int, resize: int) -> None:
        self.shape = (image_size, image_size, 3)
        self.keeps = resize == image_size
        self.fit = Compose([Resize(resize, InterpolationMode.BICUBIC), CenterCrop(image_size)])

    def __call__(self, content: Content) -> torch.Tensor:
        """The image; raises Unreadable."""
        if self.keeps and isinstance(content, np.ndarray) and content.shape == self.shape:
            return normalised(content)
        with _decoding():
            return normalised(np.array(self.fit(decoded(open_image(content)))))


@dataclass(frozen=True)
class Prepare:
    """Content, label and place to a training sample; raises Unreadable."""

    transform: TrainTransform
    seed: int

    def __call__(self, content: Content, label: int, place: Place) -> Sample:
        return self.transform(content, self.seed, place.epoch, place.index), label, place


class Unreadables:
    """Which images could not be read: named and counted once in a process and its workers.

    One flag per image in shared memory: workers know of each other's and later epochs of earlier
    ones'. A flag decides no sample, which stay functions of the files and their place.
    """

    def __init__(self, size: int, limit: int) -> None:
        self.flags = torch.zeros(size, dtype=torch.uint8).share_memory_()
        self.limit = limit

    def __contains__(self, index: int) -> bool:
        return bool(self.flags[index])

    def note(self, index: int, name: str, reason: object) -> None:
        """Names an image on stderr; UserError when it is one more than data.max_unreadable."""
        if index in self:
            return
        self.flags[index] = 1
        count = int(self.flags.sum(dtype=torch.int64))
        if count > self.limit:
            raise UserError(
                f"{count} images cannot be read, the last one {name} ({reason}); replace them, or "
                f"allow more than data.max_unreadable {self.limit}"
            )
        print(f"not used: {name}: cannot be read ({reason})", file=sys.stderr, flush=True)


# Datasets


class Record(NamedTuple):
    """One image of a source, as stored."""

    content: Content
    label: int
    name: str
    """File, or shard and key."""


class Source(Protocol):
    """Images of one split by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


class TrainImages(Dataset):
    """Training samples by Place: (image [3, S, S] float32, label, place).

    An unreadable image is replaced by the next readable one, under its own augmentation.
    """

    def __init__(self, source: Source, prepare: Prepare, unreadable: Unreadables) -> None:
        self.source, self.prepare, self.unreadable = source, prepare, unreadable

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: Place) -> Sample:
        for index in chain(range(place.index, len(self)), range(place.index)):
            record = self.source[index]
            try:
                return self.prepare(record.content, record.label, place)
            except Unreadable as reason:
                self.unreadable.note(index, record.name, reason)
        raise UserError(f"none of the {len(self)} training images can be read; see data.path")


class ValidationImages(Dataset):
    """Validation samples by number: (image [3, S, S] float32, label).

    An unreadable image is black and labelled IGNORE. `first` is its flags' place among those of
    all images.
    """

    def __init__(
        self, source: Source, transform: EvalTransform, unreadable: Unreadables, first: int
    ) -> None:
        self.source, self.transform = source, transform
        self.unreadable, self.first = unreadable, first

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        record = self.source[index]
        try:
            return self.transform(record.content), record.label
        except Unreadable as reason:
            self.unreadable.note(self.first + index, record.name, reason)
        height, width, channels = self.transform.shape
        return torch.zeros(channels, height, width), IGNORE


# Batches


class Collate:
    """Training samples to (images [B, 3, S, S], soft targets [B, classes]), both float32.

    Each `mix_group` images that follow each other in the epoch's order share one draw of timm's
    Mixup, keyed by (seed, epoch, group): a batch cut anywhere between groups gives the same.
    """

    def __init__(self, augmentation: AugmentationConfig, classes: int, seed: int) -> None:
        self.group, self.classes, self.seed = augmentation.mix_group, classes, seed
        self.smoothing = augmentation.label_smoothing
        self.mixup = None
        if augmentation.mixup or augmentation.cutmix:
            self.mixup = Mixup(
                mixup_alpha=augmentation.mixup,
                cutmix_alpha=augmentation.cutmix,
                prob=1.0,
                switch_prob=augmentation.cutmix_share,
                mode="batch",
                label_smoothing=self.smoothing,
                num_classes=classes,
            )

    def __call__(self, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """UserError if the samples are not whole groups and mixing is on."""
        images, labels, places = zip(*samples, strict=True)
        images_BxCxHxW, labels_B = default_collate(list(images)), torch.tensor(labels)
        if self.mixup is None:
            return images_BxCxHxW, mixup_target(labels_B, self.classes, 1.0, self.smoothing)
        self._check(places)
        parts = zip(
            places[:: self.group],
            images_BxCxHxW.split(self.group),
            labels_B.split(self.group),
            strict=True,
        )
        return images_BxCxHxW, torch.cat([self._mix(*part) for part in parts])

    def _mix(self, first: Place, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mixes one group's images in place; its targets."""
        with seeded("mix", self.seed, first.epoch, first.position // self.group):
            return self.mixup(images, labels)[1]

    def _check(self, places: tuple[Place, ...]) -> None:
        """Refuses a micro-batch that cuts a group."""
        first, positions = places[0].position, [place.position for place in places]
        whole = first % self.group == 0 == len(places) % self.group
        if not whole or positions != list(range(first, first + len(places))):
            raise UserError(
                f"a micro-batch of {len(places)} images from position {first} on "
                f"does not consist of whole groups of data.augmentation.mix_group {self.group}; "
                "training.batch_size / processes and training.micro_batch_size must be multiples "
                "of it"
            )


def eval_collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Validation samples as (images [B, 3, S, S], labels [B] int64)."""
    images, labels = zip(*samples, strict=True)
    return default_collate(list(images)), torch.tensor(labels)


# Embedded: handwritten digits


@dataclass
class Pixels:
    """Images in memory, uint8 [N, S, S, 3]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        return Record(self.pixels[index], int(self.labels[index]), f"embedded image {index}")


def embedded(image_size: int, validation_fraction: float) -> tuple[Pixels, Pixels, list[str]]:
    """1,797 digits of 8 x 8 pixels, scaled up (bicubic): training, validation and classes.

    The same share of each class is held out, at least one image and at most all but one.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    size = (image_size, image_size)
    scaled = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in grey]
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in scaled])
    held_out = _stratified(digits.target, validation_fraction)
    parts = [Pixels(pixels[ids], digits.target[ids]) for ids in (~held_out, held_out)]
    return *parts, [str(name) for name in digits.target_names]


def _stratified(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Which images are held out (bool): a fixed draw from each class."""
    held_out = np.zeros(len(labels), dtype=bool)
    generator = np.random.Generator(np.random.Philox(key=SPLIT_KEY))
    for label in np.unique(labels):
        ids = generator.permutation(np.flatnonzero(labels == label))
        held_out[ids[: min(max(round(fraction * len(ids)), 1), len(ids) - 1)]] = True
    return held_out


# Folders of image files


class Files:
    """Image files by number; names lie end to end in one string, as 1.3 million objects are much
    memory, which every worker would copy."""

    def __init__(self, root: Path, classes: list[str]) -> None:
        names, ends, counts = [], [np.zeros(1, dtype=np.int64)], []
        for name in classes:
            files = _class_files(root, name)
            names.append(b"".join(files))
            ends.append(np.cumsum([len(file) for file in files]) + ends[-1][-1])
            counts.append(len(files))
        self.root, self.names, self.ends = str(root), b"".join(names), np.concatenate(ends)
        self.labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        name = self.names[self.ends[index] : self.ends[index + 1]]
        path = f"{self.root}/{os.fsdecode(name)}"
        return Record(path, int(self.labels[index]), path)


def _class_files(root: Path, name: str) -> list[bytes]:
    """Files of one class in sorted order, relative to the root."""
    extensions = torchvision_folder.IMG_EXTENSIONS
    try:
        found = torchvision_folder.make_dataset(str(root), {name: 0}, extensions)
    except FileNotFoundError:
        raise UserError(
            f"{root / name}: no image in this class's folder; expected files that end in "
            f"{', '.join(extensions)}, or remove the folder"
        ) from None
    start = len(str(root)) + 1
    return [os.fsencode(path[start:]) for path, _ in found]


def image_folder(path: str) -> tuple[Files, Files, list[str]]:
    """PATH/train/CLASS/*.JPEG and PATH/val/CLASS/*.JPEG: training, validation and classes."""
    root = _folder(path, "train/ and val/ in it")
    found = {split: _classes(root, split) for split in SPLITS}
    for here, there in (SPLITS, SPLITS[::-1]):
        extra = sorted(set(found[here]) - set(found[there]))
        if extra:
            raise UserError(
                f"{root}: class {extra[0]} is in {here}/ but not in {there}/"
                + (f", as are {len(extra) - 1} others" if extra[1:] else "")
                + "; both need the same class folders"
            )
    train, validation = (Files(root / split, found["train"]) for split in SPLITS)
    return train, validation, found["train"]


def _folder(path: str, content: str) -> Path:
    """The folder that data.path names."""
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"data.path: {root} does not exist; expected a folder with {content}")
    if not root.is_dir():
        raise UserError(f"data.path: {root} is a file; expected a folder with {content}")
    return root


def _classes(root: Path, split: str) -> list[str]:
    """Names of a split's class folders, sorted."""
    folder = root / split
    if not folder.is_dir():
        raise UserError(f"data.path: {root} has no folder {split}/; expected {split}/CLASS/*.JPEG")
    try:
        return torchvision_folder.find_classes(str(folder))[0]
    except FileNotFoundError:
        advice = ""
        if split == "val" and any(map(torchvision_folder.is_image_file, os.listdir(folder))):
            advice = (
                ": sort its images into the class folders of train/ (the 1,000 of ImageNet, whose "
                "validation tar has none: many scripts called valprep.sh do it)"
            )
        raise UserError(
            f"{folder}: no class folder in it; expected {split}/CLASS/*.JPEG{advice}"
        ) from None


# Shards


class Shards(NamedTuple):
    """Files of one split in sorted order."""

    paths: list[Path]
    kind: Literal["parquet", "tar"]


class Columns(NamedTuple):
    """Where a shard's rows keep what."""

    image: str
    label: str
    names: list[str] | None
    """Names of the classes, where the shards say."""


def open_shards(path: str, split: str) -> Shards:
    """SPLIT*.parquet or SPLIT*.tar in PATH, or else in PATH/data; split is one of SPLITS.

    A prefix may stand before the split, as in imagenet-train-000000.tar.
    """
    root = _folder(path, "train*.tar and val*.tar, or train*.parquet and val*.parquet")
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
    """The columns of image and label; UserError, naming the shards, when one is missing.

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


def row_name(starts: list[tuple[int, str]], index: int) -> str:
    """Shard and row in it of a sample; `starts` has each shard's first sample and path, sorted."""
    start, path = starts[bisect_right(starts, index, key=itemgetter(0)) - 1]
    return f"{path}, row {index - start}"


def read_row(row: dict[str, Any], columns: Columns, where: str) -> Record:
    """A row of a shard, read without decoding; `where` names it if the row does not."""
    image, label = row[columns.image], row[columns.label]
    if isinstance(image, dict):
        path, image = image.get("path"), image.get("bytes")
        image = path if image is None else image
        where = f"{path} ({where})" if path else where
    if "__key__" in row:
        where = f"{row['__key__']} in {row['__url__']}"
    return Record(image or b"", label["label"] if columns.label == "json" else label, where)


class ArrowRows:
    """Rows of an Arrow copy by number; the file is mapped, not read.

    `starts` is as in `row_name`, or empty where the rows name themselves, as those of a tar.
    """

    def __init__(
        self, rows: datasets.Dataset, columns: Columns, starts: list[tuple[int, str]]
    ) -> None:
        self.rows, self.columns, self.starts = rows, columns, starts

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        where = row_name(self.starts, index) if self.starts else ""
        return read_row(self.rows[index], self.columns, where)


def arrow_rows(path: str, split: str, classes: int, cache_dir: str) -> ArrowRows:
    """Copies a split's shards into one Arrow file, unless the cache has it, and opens it."""
    import datasets

    shards = open_shards(path, split)
    where = f"{Path(path).expanduser()}: shards of {split}"
    files = {split: [glob.escape(str(file)) for file in shards.paths]}
    starts = _starts(shards.paths) if shards.kind == "parquet" else []
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is one line of ours
    try:
        rows = datasets.load_dataset(
            BUILDERS[shards.kind],
            data_files=files,
            split=split,
            cache_dir=str(Path(cache_dir).expanduser()),
        )
    except Exception as error:  # of Arrow, tarfile or json, under one of the library's own
        raise UserError(f"{where}: cannot be read as {shards.kind} ({_reason(error)})") from error
    finally:
        datasets.logging.set_verbosity(level)
    columns = find_columns(rows.features, where)
    if isinstance(rows.features[columns.image], datasets.Image):
        rows = rows.cast_column(columns.image, datasets.Image(decode=False))
    check_labels(_labels(rows, columns), classes, where)
    return ArrowRows(rows, columns, starts)


def _starts(paths: list[Path]) -> list[tuple[int, str]]:
    """Parquet files' first rows, counted through all of them; each is checked."""
    from pyarrow import parquet

    starts, first = [], 0
    for path in paths:
        check_parquet(path)
        starts.append((first, str(path)))
        first += parquet.read_metadata(path).num_rows
    return starts


def check_parquet(file: Path) -> Columns:
    """A file's columns; UserError, naming it, when it is damaged or lacks one."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a parquet file ({_reason(error)})") from error
    return find_columns(datasets.Features.from_arrow_schema(schema), file)


def _reason(error: BaseException) -> str:
    """The first words of what went wrong at the bottom, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join((str(error) or type(error).__name__).split())[:200]


def _labels(rows: datasets.Dataset, columns: Columns) -> np.ndarray:
    """All labels of an Arrow copy; a missing one is -1."""
    from pyarrow import compute

    column = rows.data.column(columns.label)
    if columns.label == "json":
        column = compute.struct_field(column, "label")
    return compute.fill_null(column, -1).to_numpy()


def check_labels(labels: np.ndarray, classes: int, where: object) -> None:
    """UserError unless all labels are in 0 .. classes - 1."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{where}: labels are {labels.dtype}; expected whole numbers")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise UserError(
            f"{where}: label {wrong[0]} is out of range 0 .. {classes - 1} of model.classes "
            f"{classes}; mend the shards or set model.classes"
        )


class StreamSample:
    """What a stream makes of a stored image: a sample, or None if it cannot be read."""

    def __init__(
        self, stream: Stream, prepare: Prepare, classes: int, unreadable: Unreadables
    ) -> None:
        self.prepare, self.classes, self.unreadable = prepare, classes, unreadable
        self.starts = sorted(
            (offset, str(shard.path))
            for lane in stream.lanes
            for offset, shard in zip(lane.offsets, lane.shards, strict=True)
        )

    def __call__(self, content: Content, label: int, place: Place) -> Sample | None:
        if not 0 <= label < self.classes:
            check_labels(np.array([label]), self.classes, row_name(self.starts, place.index))
        try:
            return self.prepare(content, label, place)
        except Unreadable as reason:
            self.unreadable.note(place.index, row_name(self.starts, place.index), reason)
            return None


# All of it


@dataclass
class Images:
    """A source's two splits as samples."""

    train: TrainImages | Stream
    """By Place, or micro-batches in order."""
    validation: ValidationImages
    classes: list[str]
    """Names in the order of the labels."""

    @property
    def train_size(self) -> int:
        return len(self.train)

    @property
    def validation_size(self) -> int:
        return len(self.validation)


def from_config(data: DataConfig, *, image_size: int, classes: int, seed: int) -> Images:
    """The images of a config; UserError when they are not there or not of so many classes."""
    prepare = Prepare(TrainTransform(image_size, data.augmentation, data.decoder), seed)
    source, held_out, names = _splits(data, image_size, classes, seed)
    if len(names) != classes:
        raise UserError(
            f"model.classes is {classes}, but the {data.source} source has {len(names)} classes; "
            f"set model.classes={len(names)}"
        )
    unreadable = Unreadables(len(source) + len(held_out), data.max_unreadable)
    if isinstance(source, Stream):
        train, train.prepare = source, StreamSample(source, prepare, classes, unreadable)
    else:
        train = TrainImages(source, prepare, unreadable)
    evaluation = EvalTransform(image_size, data.eval_resize)
    validation = ValidationImages(held_out, evaluation, unreadable, first=len(source))
    return Images(train, validation, names)


def _splits(
    data: DataConfig, image_size: int, classes: int, seed: int
) -> tuple[Source | Stream, Source, list[str]]:
    """Training and validation images as stored, and the classes' names."""
    if data.source == "embedded":
        return embedded(image_size, data.validation_fraction)
    if data.source == "folder":
        return image_folder(data.path)
    return _shards(data, classes, seed)


def _shards(
    data: DataConfig, classes: int, seed: int
) -> tuple[ArrowRows | Stream, ArrowRows, list[str]]:
    """As `_splits`; classes without names in the shards are named by their number."""
    validation = arrow_rows(data.path, "val", classes, data.cache_dir)
    if data.streaming:
        shards = open_shards(data.path, "train")
        cache = Path(data.cache_dir).expanduser()
        # What prepares a sample needs to know how many there are.
        train = Stream(*shards, prepare=None, lanes=data.lanes, seed=seed, cache_dir=cache)
        names = check_parquet(shards.paths[0]).names if shards.kind == "parquet" else None
    else:
        train = arrow_rows(data.path, "train", classes, data.cache_dir)
        names = train.columns.names
    others = validation.columns.names
    if names and others and names != others:
        raise UserError(f"data.path: {data.path}: shards of train and val name other classes")
    return train, validation, names or others or [str(label) for label in range(classes)]
