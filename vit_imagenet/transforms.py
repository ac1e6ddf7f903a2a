"""Stored images to tensors: decoding, timm's augmentation, Mixup and CutMix.

All that is random about a training sample is a function of (seed, epoch, index), all that is
random about mixing one of (seed, epoch, position): neither the number of processes and workers
nor the size of a micro-batch changes a pixel.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, auto_augment, create_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.mixup import mixup_target
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch.utils.data import default_collate
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from training.data.sampling import Place
from training.errors import UserError

if TYPE_CHECKING:
    from vit_imagenet.config import AugmentationConfig

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
RAND_AUGMENT = re.compile(
    r"rand(-(m\d+|n\d+|mmax\d+|inc[01]|p\d*\.?\d+|mstd(\d*\.?\d+|inf)|tweights))*"
)

Content = str | bytes | np.ndarray
"""A file's name, a file's bytes, or pixels [height, width, 3]."""
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


class WholeCrop(RandomResizedCropAndInterpolation):
    """timm's random resized crop of an image that is decoded whole.

    libjpeg could reduce an image while decoding it (Pillow's `draft`), but only where the crop is
    at least twice the final size: 283 against 291 images/s at ImageNet's usual 500 x 375 pixels.
    """

    def __call__(self, image: Image.Image) -> Image.Image:
        return super().__call__(decoded(image))


# Transforms


class TrainTransform:
    """Content to a normalised image [3, S, S], augmented by timm with what `seeded` gives."""

    def __init__(self, image_size: int, augmentation: AugmentationConfig) -> None:
        (crop, *flip), colours, (_, _, *erase) = _timm(image_size, augmentation)
        self.crop = WholeCrop(image_size, crop.scale, crop.ratio, interpolation="bicubic")
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
        color_jitter=None,  # type: ignore[arg-type]  # timm's own word for none
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
    """Content to a normalised image [3, S, S]: shorter side to `resize`, centre crop."""

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
            return self.mixup(images, labels)[1]  # type: ignore[misc]  # mixing is on here

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
