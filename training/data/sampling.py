"""Data order: which sample stands where, as a pure function of (seed, epoch, index)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from training.errors import UserError


@lru_cache(maxsize=2)  # a batch touches one epoch, or two where they meet
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch, from a counter-based generator keyed by (seed, epoch)."""
    key = np.array([seed, epoch], dtype=np.uint64)
    # The smallest type that fits halves the memory: billions of tokens make millions of rows.
    dtype = np.int32 if size <= np.iinfo(np.int32).max else np.int64
    order = np.arange(size, dtype=dtype)
    np.random.Generator(np.random.Philox(key=key)).shuffle(order)
    order.flags.writeable = False
    return order


def sample_ids(size: int, seed: int, start: int, count: int) -> np.ndarray:
    """Ids [count] (int64) of global samples start .. start + count - 1 of endless epochs.

    Global sample i is entry i % size of the permutation of range(size) that belongs to epoch
    i // size. Nothing else enters, so any position can be asked for without replaying the ones
    before it. The first call for an epoch costs O(size), the following ones O(count).
    """
    ids = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, offset = divmod(start + filled, size)
        taken = min(size - offset, count - filled)
        ids[filled : filled + taken] = _permutation(size, seed, epoch)[offset : offset + taken]
        filled += taken
    return ids


class Place(NamedTuple):
    """Where a sample stands in training: what its augmentation and noise are a function of."""

    epoch: int
    """Counted from 0."""
    position: int
    """Place in the epoch's order, which decides who shares a batch."""
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    """Which sample it is."""


@dataclass(eq=False)  # two samplers are never one, as torch has it
class BatchIds(Sampler):
    """Batch sampler of one process: the ids of its micro-batches, step after step.

    Optimiser step s (first_step <= s < last_step) consumes global samples s * global_batch ..
    (s + 1) * global_batch - 1, whatever the number of processes. They are cut into world_size
    equal contiguous shares, process `rank` takes share number `rank`, and a share is cut into
    micro-batches of micro_batch samples in order; only the last micro-batch of a share may be
    smaller. Each item is a list of ids, one micro-batch; a step has `micro_batches` of them.
    Epochs follow each other without a gap, so a batch may lie in two of them.

    `global_batch` must be a multiple of `world_size`, which the loop makes sure of.
    """

    size: int
    seed: int
    global_batch: int
    micro_batch: int
    rank: int
    world_size: int
    first_step: int
    last_step: int

    def __post_init__(self) -> None:
        self.share = self.global_batch // self.world_size
        self.share_start = self.rank * self.share

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in one optimiser step of this process."""
        return -(-self.share // self.micro_batch)

    def __len__(self) -> int:
        return max(0, self.last_step - self.first_step) * self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.last_step):
            ids = self._share(step)
            for first in range(0, self.share, self.micro_batch):
                yield ids[first : first + self.micro_batch]

    def _share(self, step: int) -> list:
        """The ids of this process's share of a step."""
        start = step * self.global_batch + self.share_start
        return sample_ids(self.size, self.seed, start, self.share).tolist()


class EpochPlaces(BatchIds):
    """As BatchIds, but items are lists of Place, and an epoch ends with its last whole batch.

    Step s is batch s % steps_per_epoch of epoch s // steps_per_epoch; the size % global_batch
    samples at the end of an epoch's order are left out of it.

    Raises UserError when there are fewer samples than one batch.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps_per_epoch = steps_per_epoch(self.size, self.global_batch)

    def _share(self, step: int) -> list[Place]:
        epoch, batch = divmod(step, self.steps_per_epoch)
        first = batch * self.global_batch + self.share_start
        ids = sample_ids(self.size, self.seed, epoch * self.size + first, self.share).tolist()
        return [Place(epoch, position, index) for position, index in enumerate(ids, start=first)]


def steps_per_epoch(size: int, global_batch: int) -> int:
    """Whole batches in an epoch; UserError if there is none."""
    if size < global_batch:
        raise UserError(
            f"training.batch_size {global_batch} is more than the {size} training samples; lower it"
        )
    return size // global_batch
