"""How fast ImageNet's images come: images per second of one core, for every stage of vit_imagenet.

    python -m benchmarks.images                               # about a minute on two cores
    python -m benchmarks.images --json benchmarks/results/images.json
    python -m benchmarks.images --size 1600 1200 --no-model   # larger images

Makes JPEG files of ImageNet's typical size (500 x 375 pixels, 110 KB) in a temporary folder; what
decoding takes depends on the number of pixels and bytes, not on what is to be seen. Measures
decoding alone, the paper's training pipeline (random resized crop to 224, flip, RandAugment, Random
Erasing), evaluation, Mixup and CutMix of 64 images, a DataLoader of two
processes, and for comparison torchvision's decoder and a training step of ViT-B. One thread each;
medians over the repeats, with quartiles. Seconds are the processor's, so that other programs
disturb little; the loader's are the clock's.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image

from benchmarks import harness
from training import allocator
from training.sampling import Place
from vit_imagenet.config import AugmentationConfig, DataConfig, ModelConfig
from vit_imagenet.data import Images, from_config
from vit_imagenet.transforms import Collate, decoded, open_image

GPU = 3800  # images per second at which an H100 trains ViT-B/16, at 40 % of its bf16 peak
SIZE = (500, 375)
BYTES_PER_PIXEL = 110_000 / (500 * 375)
GROUP = 64
LOADER = "loader of 2"
Case = tuple[str, str, Callable[[], int]]  # stage, decoder, what returns how many it handled


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--images", type=int, default=64, help="files per repeat, a multiple of 8")
    add("--size", type=int, nargs=2, default=SIZE, metavar=("WIDTH", "HEIGHT"))
    add("--repeats", type=int, default=7)
    add("--no-model", dest="model", action="store_false", help="leave ViT-B out")
    return parser.parse_args(argv)


# Images


def synthetic(number: int, size: tuple[int, int]) -> bytes:
    """A JPEG of shapes, texture and noise, at the quality that gives it ImageNet's bytes."""
    generator = np.random.default_rng(number)
    grains = ((0.5, size[0] // 80), (0.3, size[0] // 12), (0.2, size[0]))
    pixels = sum(share * _noise(generator, cells, size) for share, cells in grains)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    wanted = BYTES_PER_PIXEL * size[0] * size[1]
    qualities = range(10, 98)
    quality = bisect(qualities, wanted, key=lambda quality: len(_saved(image, quality)))
    return _saved(image, qualities[min(quality, len(qualities) - 1)])


def _noise(generator: np.random.Generator, cells: int, size: tuple[int, int]) -> np.ndarray:
    """Random colours on a grid, smoothly scaled up to the image's size."""
    rows = max(cells * size[1] // size[0], 1)
    grid = generator.integers(0, 256, (rows, cells, 3), dtype=np.uint8)
    scaled = Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC)
    return 1.3 * np.asarray(scaled, dtype=np.float32) - 40


def _saved(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def write_images(root: Path, count: int, size: tuple[int, int]) -> int:
    """A folder of eight classes, the same files for training and validation; their mean bytes."""
    files = [synthetic(number, size) for number in range(count)]
    for split in ("train", "val"):
        for number, content in enumerate(files):
            folder = root / split / f"class{number % 8}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.JPEG").write_bytes(content)
    return round(statistics.mean(map(len, files)))


# Cases


def cases(root: Path) -> list[Case]:
    """Everything on one core, and the loader."""
    # Under the paper's augmentation, which is the config's default.
    data = DataConfig(source="folder", path=str(root))
    images = from_config(data, image_size=224, classes=8, seed=0)
    size, epochs = len(images.train), iter(range(10**9))
    contents = [Path(images.train.source[i].content).read_bytes() for i in range(size)]
    return [
        ("decode", "pil", lambda: _each(lambda i: decoded(open_image(contents[i])), size)),
        ("decode", "torchvision", lambda: _each(_torchvision(contents), size)),
        ("train", "pil", lambda: _train(images, next(epochs))),
        ("evaluate", "pil", lambda: _each(images.validation.__getitem__, size)),
        ("mix", "", _mixing()),
        (LOADER, "pil", lambda: _load(images, next(epochs))),
    ]


def _each(function: Callable[[int], Any], count: int) -> int:
    for index in range(count):
        function(index)
    return count


def _torchvision(contents: list[bytes]) -> Callable[[int], torch.Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    raw = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    return lambda index: decode_jpeg(raw[index], ImageReadMode.RGB)


def _places(images: Images, epoch: int) -> list[Place]:
    return [Place(epoch, index, index) for index in range(len(images.train))]


def _train(images: Images, epoch: int) -> int:
    places = _places(images, epoch)
    return _each(lambda index: images.train[places[index]], len(places))


def _mixing() -> Callable[[], int]:
    """Collates groups of random images: half of them Mixup, half CutMix."""
    collate = Collate(AugmentationConfig(mix_group=GROUP), 1000, seed=0)
    pixels = torch.randn(GROUP, 3, 224, 224)

    def mix() -> int:
        for group in range(8):
            first = GROUP * group
            collate([(x, i, Place(0, first + i, i)) for i, x in enumerate(pixels)])
        return 8 * GROUP

    return mix


def _load(images: Images, epoch: int) -> int:
    """Eight epochs of whole batches from two processes, the time they take to start included."""
    from torch.utils.data import DataLoader

    group = len(images.train) // 2
    collate = Collate(AugmentationConfig(mix_group=group), 8, seed=0)
    batches = [
        part
        for further in range(8)
        for places in [_places(images, 8 * epoch + further)]
        for part in (places[:group], places[group:])
    ]
    loader = DataLoader(images.train, batch_sampler=batches, collate_fn=collate, num_workers=2)
    return sum(len(targets) for _, targets in loader)


def model_step() -> Callable[[], int]:
    """One forward and backward pass of the paper's ViT-B/16 in float32, batch 8."""
    from vit_imagenet import model as vit
    from vit_imagenet.losses import soft_cross_entropy

    shape = {"width": 768, "layers": 12, "patch_size": 16, "image_size": 224, "classes": 1000}
    network = vit.build(ModelConfig(**shape))
    with torch.no_grad():  # values without meaning, but none that are slow
        for parameter in network.parameters():
            parameter.normal_(std=0.02)
    images, targets = torch.randn(8, 3, 224, 224), torch.full((8, 1000), 1e-3)

    def step() -> int:
        network.zero_grad()
        soft_cross_entropy(network(images), targets).backward()
        return 8

    return step


# Measuring


def rows(options: argparse.Namespace, root: Path) -> Iterator[dict[str, Any]]:
    """One measured case after the other."""
    for stage, decoder, function in cases(root):
        clock = time.perf_counter if stage == LOADER else time.process_time
        found = harness.speed(function, options.repeats, clock)
        yield {"stage": stage, "decoder": decoder, **found}
    if options.model:
        yield {"stage": "ViT-B step", "decoder": "", **harness.speed(model_step(), 3)}


def report(line: str) -> None:
    """A line for people; standard output is the JSON document's."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Measures all cases, prints them and what they mean for a GPU."""
    options = parse(argv)
    torch.set_num_threads(1)
    allocator.keep_memory()  # as training does
    with tempfile.TemporaryDirectory() as folder:
        mean_bytes = write_images(Path(folder), options.images, tuple(options.size))
        size = "{} x {}".format(*options.size)
        report(f"{options.images} files of {size} pixels, {mean_bytes / 1e3:.0f} KB")
        measured = []
        for row in rows(options, Path(folder)):
            measured.append(row)
            report(f"{row['stage']:12} {row['decoder']:12} {row['median']:9.1f} images/s")
    speeds = {(row["stage"], row["decoder"]): row["median"] for row in measured}
    cores = GPU * (1 / speeds["train", "pil"] + 1 / speeds["mix", ""])  # that augment and mix
    report(f"{GPU:,} images/s and GPU take {cores:.1f} such cores")
    machine = {"images_per_second": GPU, "pil": cores}
    harness.show(options, "cpu", measured, file_bytes=mean_bytes, cores_per_gpu=machine)


if __name__ == "__main__":
    main()
