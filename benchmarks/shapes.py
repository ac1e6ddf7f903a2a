"""How fast vit_cifar5m's images come: images per second of one core, from number to batch.

    python -m benchmarks.shapes                      # JSON; seconds on one core
    python -m benchmarks.shapes --json shapes.json   # also to a file

Drawn images alone, in batches and one by one; drawn and made a batch of, as training does; read
from an npz file of the published format, mapped; and from a DataLoader of two processes, the time
they take to start included. One thread each; medians over the repeats, with quartiles. Seconds are
the processor's, so that other programs disturb little; the loader's are the clock's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import harness
from training import shapes
from training.sampling import BatchIds
from vit_cifar5m.data import Drawn, Stored, collate, open_part

LOADER = "drawn, loader of 2"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--batch", type=int, default=128, help="images of a batch")
    add("--batches", type=int, default=40, help="batches per repeat")
    add("--repeats", type=int, default=7)
    return parser.parse_args(argv)


def loaded(dataset: Dataset, batch: int, count: int, workers: int = 0) -> int:
    """Goes through so many batches in a shuffled order, as training does; their images."""
    order = BatchIds(len(dataset), 0, batch, batch, 0, 1, 0, count)
    loader = DataLoader(dataset, batch_sampler=order, collate_fn=collate, num_workers=workers)
    return sum(len(labels) for _, labels in loader)


def cases(folder: Path, batch: int, count: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """What is measured, and what returns how many images it handled."""
    drawn, alone = Drawn(0, 0, batch * count), range(8 * count)
    yield (
        "drawn by the batch",
        lambda: sum(len(shapes.draw(np.arange(batch) + batch * k, 0)[1]) for k in range(count)),
    )
    yield "drawn one by one", lambda: sum(len(shapes.draw([k], 0)[1]) for k in alone)
    yield "drawn, batches made", lambda: loaded(drawn, batch, count)
    stored = written(folder, drawn)
    yield "npz mapped, batches made", lambda: loaded(stored, batch, count)
    yield LOADER, lambda: loaded(Drawn(0, 0, 10 * len(drawn)), batch, 10 * count, workers=2)


def written(folder: Path, drawn: Drawn) -> Stored:
    """Drawn images as a file of CIFAR-5M's format, opened."""
    images, labels = shapes.draw(np.arange(len(drawn)), 0)
    np.savez(folder / "part0.npz", X=images.transpose(0, 2, 3, 1), Y=labels)
    pixels, labels = open_part(folder / "part0.npz", folder)
    return Stored([pixels], labels, len(labels))


def main(argv: list[str] | None = None) -> None:
    """Measures all cases and prints them."""
    options = parse(argv)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, function in cases(Path(folder), options.batch, options.batches):
            clock = time.perf_counter if name == LOADER else time.process_time
            rows.append({"case": name, **harness.speed(function, options.repeats, clock)})
    harness.show(options, "cpu", rows, unit="images per second")


if __name__ == "__main__":
    main()
