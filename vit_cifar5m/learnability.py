"""How hard vit_cifar5m's drawn images are: what a linear classifier and a small ViT learn of them.

    python -m vit_cifar5m.learnability                           # three seeds; minutes on two cores
    python -m vit_cifar5m.learnability --json learnability.json  # also to a file

Logistic regression of the pixels makes one pass over the first images of a seed. The Vision
Transformer is plain torch (width 64, two blocks of four heads and an MLP of 256, patches of 4) and
sees every image once. Both: Adam at 1e-3 after 100 steps of warm-up, batches of 128, normalised
pixels, and the same held-out images, which are those of every run. A seed is that of the training
images and of the initial weights. Accuracies and losses (nats) are means over the seeds, with
standard deviations; chance is a uniform guess. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from training import environment, shapes
from training.errors import one_line_errors
from training.files import write_json
from vit_cifar5m.config import DataConfig
from vit_cifar5m.data import Images, collate, from_config

BATCH, LR, WARMUP = 128, 1e-3, 100
WIDTH, BLOCKS, HEADS, PATCH = 64, 2, 4, 4
MEASURED = (100, 200, 300, 500, 1000)  # steps of the ViT, to the last one
LINEAR_IMAGES = 50_000  # that the regression sees once
EVALUATED_AT_ONCE = 512
THREADS = 2

Batch = tuple[torch.Tensor, torch.Tensor]
Result = dict[str, float]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, default=3, metavar="N", help="(default 3)")
    add("--json", type=Path, metavar="FILE", help="write the result there, too")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: expected at least 1")
    return args


class PlainViT(nn.Module):
    """A pre-norm Vision Transformer of torch's own layers, at their own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((shapes.SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(self._block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.readout = nn.Linear(WIDTH, shapes.CLASSES)

    def _block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )

    def forward(self, images_BxCxHxW: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes)."""
        x_BxTxD = self.embedding(images_BxCxHxW).flatten(2).transpose(1, 2) + self.positions
        return self.readout(self.norm(self.blocks(x_BxTxD)).mean(1))


def linear() -> nn.Module:
    """Multinomial logistic regression of all pixels, from zero."""
    readout = nn.Linear(3 * shapes.SIZE**2, shapes.CLASSES)
    nn.init.zeros_(readout.weight)
    nn.init.zeros_(readout.bias)
    return nn.Sequential(nn.Flatten(), readout)


def once(images: Images, steps: int) -> Iterator[Batch]:
    """Batches in the order of the images' numbers, which go through the classes."""
    for step in range(steps):
        yield collate(images.train.__getitems__(range(step * BATCH, (step + 1) * BATCH)))


def shuffled(images: Images, count: int, seed: int) -> Iterator[Batch]:
    """One pass over the first `count` images; its last batch may be smaller."""
    samples = images.train.__getitems__(range(count))
    order = np.random.default_rng(seed).permutation(count)
    for first in range(0, count, BATCH):
        yield collate([samples[i] for i in order[first : first + BATCH]])


def train(model: nn.Module, batches: Iterator[Batch]) -> Iterator[int]:
    """Trains on the batches; yields the number of every step that is done."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for step, (images, labels) in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, step / WARMUP)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        yield step


@torch.no_grad()
def evaluate(model: nn.Module, images: Images) -> Result:
    """Accuracy and mean loss on all held-out images."""
    held_out, right, loss = images.validation, 0, 0.0
    for first in range(0, len(held_out), EVALUATED_AT_ONCE):
        ids = range(first, min(first + EVALUATED_AT_ONCE, len(held_out)))
        pixels, labels = collate(held_out.__getitems__(ids))
        logits = model(pixels)
        right += int((logits.argmax(-1) == labels).sum())
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
    return {"accuracy": right / len(held_out), "loss": loss / len(held_out)}


def measure(seed: int) -> dict[tuple[str, int], Result]:
    """Results of one seed by classifier and step."""
    images = from_config(DataConfig(), seed)
    found = {}
    regression = linear()
    for step in train(regression, shuffled(images, LINEAR_IMAGES, seed)):  # noqa: B007
        pass
    found["logistic regression", step] = evaluate(regression, images)
    torch.manual_seed(seed)
    vit = PlainViT()
    for step in train(vit, once(images, MEASURED[-1])):
        if step in MEASURED:
            found["ViT", step] = evaluate(vit, images)
    return found


def rows(results: list[dict[tuple[str, int], Result]]) -> Iterator[dict[str, Any]]:
    """Means and standard deviations over the seeds' results."""
    yield {
        "classifier": "chance",
        "steps": 0,
        "accuracy": {"mean": 1 / shapes.CLASSES},
        "loss": {"mean": math.log(shapes.CLASSES)},
    }
    for classifier, step in results[0]:
        row: dict[str, Any] = {"classifier": classifier, "steps": step}
        for name in ("accuracy", "loss"):
            values = [result[classifier, step][name] for result in results]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            row[name] = {"mean": statistics.mean(values), "std": deviation, "values": values}
        yield row


@one_line_errors()
def main(argv: list[str] | None = None) -> None:
    """Trains both classifiers with every seed and prints what they reach."""
    options = parse(argv)
    torch.set_num_threads(THREADS)
    results = []
    for seed in range(options.seeds):
        results.append(measure(seed))
        print(f"seed {seed}: {results[-1]}", file=sys.stderr)
    document = {
        "environment": environment.describe(torch.device("cpu")),
        "n": options.seeds,
        "rows": list(rows(results)),
    }
    print(json.dumps(document, indent=1))
    if options.json:
        write_json(options.json, document)


if __name__ == "__main__":
    main()
