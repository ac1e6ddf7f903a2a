"""Images that need no copy: digits and drawn images in memory, ImageNet's folders of files."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image
from torchvision.datasets import folder as torchvision_folder

from training.data import shapes
from training.errors import UserError
from vit_imagenet.transforms import Content

SPLITS = ("train", "val")
SPLIT_KEY = 0x5EED  # images in memory are split alike for every run, whatever its seed
DRAWN_IMAGES, DRAWN_SEED = 50_000, 0  # as many as CIFAR-10 has, the same for every run


class Record(NamedTuple):
    """One image of a source, as stored."""

    content: Content
    label: int
    name: str
    """File, or shard and key."""


class ImageSource(Protocol):
    """Images of one split by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


# In memory


@dataclass
class Pixels:
    """Images in memory, uint8 [N, S, S, 3]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        return Record(self.pixels[index], int(self.labels[index]), f"image {index}")


@functools.lru_cache(maxsize=2)  # runs of a sweep in one process share them
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
    return *_split(pixels, digits.target, validation_fraction), list(map(str, digits.target_names))


@functools.lru_cache(maxsize=2)
def drawn(validation_fraction: float) -> tuple[Pixels, Pixels, list[str]]:
    """50,000 drawn images (`training.data.shapes`), 32 x 32 pixels, ten classes, split likewise.

    A class is a direction and a fineness of stripes, which flips and other scales change.
    """
    pixels_NxCxHxW, labels = shapes.draw(np.arange(DRAWN_IMAGES), DRAWN_SEED)
    pixels = np.ascontiguousarray(pixels_NxCxHxW.transpose(0, 2, 3, 1))
    return *_split(pixels, labels, validation_fraction), list(map(str, range(shapes.CLASSES)))


def _split(pixels: np.ndarray, labels: np.ndarray, fraction: float) -> tuple[Pixels, Pixels]:
    """Training images, and those held out."""
    held_out = _stratified(labels, fraction)
    return Pixels(pixels[~held_out], labels[~held_out]), Pixels(pixels[held_out], labels[held_out])


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
    """Image files by number. Their names are joined in one string: 1.3 million objects would take
    much memory, which every worker would copy."""

    def __init__(self, root: Path, classes: list[str]) -> None:
        names, ends, counts = [], [np.zeros(1, dtype=np.int64)], []
        extensions, start = torchvision_folder.IMG_EXTENSIONS, len(str(root)) + 1
        for name in classes:  # files of a class in sorted order, relative to the root
            found = torchvision_folder.make_dataset(str(root), {name: 0}, extensions)
            files = [os.fsencode(path[start:]) for path, _ in found]
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


def image_folder(path: str) -> tuple[Files, Files, list[str]]:
    """PATH/train/CLASS/*.JPEG and PATH/val/CLASS/*.JPEG: training, validation and classes."""
    made = "`bash scripts/download.sh imagenet --archives FOLDER` unpacks such a one"
    root = existing_folder(path, f"train/ and val/ in it; {made}")
    try:
        train, val = (torchvision_folder.find_classes(str(root / split))[0] for split in SPLITS)
        if train != val:
            odd = min({*train} ^ {*val})
            raise UserError(f"{root}: class {odd} is in only one of train/ and val/; both need it")
        return Files(root / "train", train), Files(root / "val", train), train
    except FileNotFoundError as error:  # torchvision's: no such folder, no class, no image of one
        raise UserError(
            f"data.path: {error}; expected train/CLASS/*.JPEG and val/CLASS/*.JPEG, the validation "
            "images in the class folders of train/ (scripts called valprep.sh sort them)"
        ) from None


def existing_folder(path: str, content: str) -> Path:
    """The folder that data.path names."""
    root = Path(path).expanduser()
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {problem}; expected a folder with {content}")
    return root
