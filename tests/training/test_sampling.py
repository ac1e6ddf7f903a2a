"""Data order: a function of seed, epoch and index, whatever the processes and workers."""

import numpy as np
import pytest

from training.data.sampling import BatchIds, EpochPlaces, sample_ids

ORDER = {"size": 50, "seed": 3, "global_batch": 12, "micro_batch": 4, "first_step": 0}
# sample_ids(size=10, seed=7, start=0, count=20)
FROZEN = [6, 3, 9, 1, 2, 0, 5, 7, 8, 4, 1, 9, 2, 8, 5, 0, 4, 3, 7, 6]


def batches(**changes):
    """All micro-batches of one process."""
    settings = {**ORDER, "rank": 0, "world_size": 1, "last_step": 9, **changes}
    return list(BatchIds(**settings))


def flat(micro_batches):
    return [i for ids in micro_batches for i in ids]


def test_every_epoch_is_a_permutation():
    ids = sample_ids(50, 0, 0, 150).reshape(3, 50)
    assert ids.dtype == np.int64
    assert (np.sort(ids, axis=1) == np.arange(50)).all()


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = sample_ids(50, 0, 0, 100).reshape(2, 50)
    assert not (first == second).all()
    assert not (first == sample_ids(50, 1, 0, 50)).all()
    # Seed and epoch are not added up: (0, epoch 1) and (1, epoch 0) differ.
    assert not (second == sample_ids(50, 1, 0, 50)).all()


def test_order_is_frozen():
    """Results cite seeds; another numpy must not silently give them another order."""
    assert sample_ids(10, 7, 0, 20).tolist() == FROZEN


def test_any_window_equals_the_same_part_of_the_whole():
    whole = sample_ids(7, 5, 0, 40)
    for start, count in [(0, 0), (3, 4), (5, 4), (6, 1), (7, 7), (2, 30), (39, 1)]:
        assert (sample_ids(7, 5, start, count) == whole[start : start + count]).all()


def test_a_far_position_costs_one_epoch_only():
    assert len(sample_ids(10, 0, 10**15 + 3, 4)) == 4


def test_changing_a_result_changes_no_later_one():
    ids = sample_ids(10, 0, 0, 10)
    before = ids.copy()
    ids[:] = 0
    assert (sample_ids(10, 0, 0, 10) == before).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_in_order_make_up_the_global_batch(world_size):
    shares = [
        np.array(flat(batches(rank=rank, world_size=world_size))).reshape(9, -1)
        for rank in range(world_size)
    ]
    whole = np.concatenate(shares, axis=1)
    assert whole.flatten().tolist() == sample_ids(50, 3, 0, 108).tolist()


@pytest.mark.parametrize(("micro_batch", "sizes"), [(1, [1] * 12), (5, [5, 5, 2]), (99, [12])])
def test_micro_batches_keep_the_order_and_never_span_two_steps(micro_batch, sizes):
    cut = batches(micro_batch=micro_batch)
    assert flat(cut) == flat(batches()) and [len(ids) for ids in cut] == 9 * sizes
    settings = {**ORDER, "micro_batch": micro_batch, "rank": 0, "world_size": 1, "last_step": 9}
    assert BatchIds(**settings).micro_batches == len(sizes)


@pytest.mark.parametrize("step", [1, 4, 8, 9])
def test_starting_at_a_step_equals_skipping(step):
    assert batches(first_step=step) == batches()[3 * step :]


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 5}, {"first_step": 4}, {"last_step": 0}])
def test_length_is_the_number_of_micro_batches(changes):
    settings = {**ORDER, "rank": 0, "world_size": 1, "last_step": 9, **changes}
    assert len(BatchIds(**settings)) == len(batches(**changes))


def places(**changes):
    settings = {**ORDER, "rank": 0, "world_size": 1, "first_step": 0, "last_step": 9, **changes}
    return [place for batch in EpochPlaces(**settings) for place in batch]


def test_an_epoch_ends_with_its_last_whole_batch():
    size, batch = ORDER["size"], ORDER["global_batch"]
    per_epoch = size // batch
    found = places()
    assert [p.epoch for p in found] == [s // per_epoch for s in range(9) for _ in range(batch)]
    for epoch in {p.epoch for p in found}:
        own = [p for p in found if p.epoch == epoch]
        assert [p.position for p in own] == list(range(len(own)))
        order = sample_ids(size, ORDER["seed"], epoch * size, len(own)).tolist()
        assert [p.index for p in own] == order and len(set(order)) == len(order)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_places_are_the_same_for_any_number_of_processes(world_size):
    shares = [places(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(place for share in shares for place in share) == sorted(places())
    assert places(first_step=4) == places()[4 * ORDER["global_batch"] :]
