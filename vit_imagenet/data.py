"""Images to samples: a source's splits, decoded and augmented, and those that cannot be read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from training.data.sampling import Place
from training.errors import UserError
from vit_imagenet.images import ImageSource, drawn, embedded, image_folder
from vit_imagenet.losses import IGNORE
from vit_imagenet.shards import arrow_splits
from vit_imagenet.transforms import EvalTransform, Prepare, Sample, TrainTransform, Unreadable

if TYPE_CHECKING:
    from vit_imagenet.config import DataConfig


class Unreadables:
    """Which images could not be read: named and counted once in a process and its workers.

    One flag per image in shared memory, so that workers and later epochs know which images failed
    before. Flags change no sample: samples depend on the files and their place alone.
    """

    def __init__(self, size: int, limit: int) -> None:
        self.flags = torch.zeros(size, dtype=torch.uint8).share_memory_()
        self.limit = limit

    def note(self, index: int, name: str, reason: object) -> None:
        """Names an image on stderr; UserError when it is one more than data.max_unreadable."""
        if self.flags[index]:
            return
        self.flags[index] = 1
        count = int(self.flags.sum(dtype=torch.int64))
        if count > self.limit:
            raise UserError(
                f"{count} images cannot be read, the last one {name} ({reason}); replace them, or "
                f"allow more than data.max_unreadable {self.limit}"
            )
        print(f"not used: {name}: cannot be read ({reason})", file=sys.stderr, flush=True)


class TrainImages(Dataset):
    """Training samples by Place: (image [3, S, S] float32, label, place).

    An unreadable image is replaced by the next readable one, under its own augmentation.
    """

    def __init__(self, source: ImageSource, prepare: Prepare, unreadable: Unreadables) -> None:
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
        self, source: ImageSource, transform: EvalTransform, unreadable: Unreadables, first: int
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


@dataclass
class Images:
    """A source's two splits as samples."""

    train: TrainImages
    validation: ValidationImages
    classes: list[str]
    """Names in the order of the labels."""


def from_config(data: DataConfig, *, image_size: int, classes: int, seed: int) -> Images:
    """The images of a config; UserError when they are not there or not of so many classes."""
    source: ImageSource
    held_out: ImageSource
    path = str(data.path)
    if data.source == "embedded":
        source, held_out, names = embedded(image_size, data.validation_fraction)
    elif data.source == "drawn":
        source, held_out, names = drawn(data.validation_fraction)
    elif data.source == "folder":
        source, held_out, names = image_folder(path)
    else:
        source, held_out, names = arrow_splits(path, classes, data.cache_dir)
    if len(names) != classes:
        raise UserError(
            f"model.classes is {classes}, but the {data.source} source has {len(names)} classes; "
            f"set model.classes={len(names)}"
        )
    unreadable = Unreadables(len(source) + len(held_out), data.max_unreadable)
    prepare = Prepare(TrainTransform(image_size, data.augmentation), seed)
    evaluation = EvalTransform(image_size, data.eval_resize)
    return Images(
        TrainImages(source, prepare, unreadable),
        ValidationImages(held_out, evaluation, unreadable, first=len(source)),
        names,
    )
