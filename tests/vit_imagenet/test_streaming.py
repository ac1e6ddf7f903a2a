"""Streaming: one data order for any number of processes and workers, exact resumption, errors."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from torch.utils.data import DataLoader, get_worker_info

from training.errors import UserError
from training.sampling import Place
from vit_imagenet import streaming
from vit_imagenet.streaming import Stream

SIZES = (7, 5, 9, 6, 8, 5, 7, 6, 4)  # samples of each shard
LANES, BUFFER, MICRO, BATCH = 4, 4, 3, 24
STEPS = 6  # 36 samples of each lane: more than two passes of 13 to 16
SEED = 3


def image(index: int) -> bytes:
    """Not an image: whatever decodes it fails."""
    return f"bytes of {index}".encode()


def write_parquet(path: Path, rows: list[tuple[bytes | None, int | None]]) -> None:
    table = pyarrow.table(
        {
            "image": [{"bytes": data, "path": None} for data, _ in rows],
            "label": pyarrow.array([label for _, label in rows], pyarrow.int64()),
            "other": ["x"] * len(rows),
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=3)


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))


def tar_sample(index: int, label: int, extension: str = "jpg") -> list[tuple[str, bytes]]:
    key = f"train/n{index:05d}"
    return [
        (f"{key}.{extension}", image(index)),
        (f"{key}.cls", str(label).encode()),
        (f"{key}.json", json.dumps({f"key{index}": index}).encode()),
    ]


def make_shards(folder: Path, kind: str, sizes: tuple[int, ...] = SIZES) -> list[Path]:
    """Shards of samples 0, 1, ...; a sample's label is 10 times its number."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"train-{number}[a].{kind}"  # with characters that mean something to glob
        indices = range(first, first + size)
        if kind == "parquet":
            write_parquet(path, [(image(index), 10 * index) for index in indices])
        else:
            extensions = ("jpg", "JPEG")
            write_tar(
                path,
                [m for i in indices for m in tar_sample(i, 10 * i, extensions[i % 2])],
            )
        paths.append(path)
        first += size
    return paths


@pytest.fixture(params=["parquet", "tar"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def shards(tmp_path: Path, kind: str) -> list[Path]:
    return make_shards(tmp_path, kind)


def keep(data: bytes | str, label: int, place: Place) -> tuple:
    """A sample that shows all that went into it."""
    return data, label, place


def make_stream(shards: list[Path], **changes) -> Stream:
    kind = shards[0].suffix[1:]
    settings = {"prepare": keep, "lanes": LANES, "seed": SEED, "buffer": BUFFER} | changes
    return Stream(shards, kind, **settings)


def batches_of(stream: Stream, rank=0, world=1, first=0, last=STEPS, workers=0):
    return stream.batches(BATCH, MICRO, rank, world, first, last, workers, list)


def everything(stream: Stream, **changes) -> list[list[tuple]]:
    return list(batches_of(stream, **changes))


def of_ranks(stream: Stream, world: int, **changes) -> list[list[tuple]]:
    """The micro-batches of all processes, in the order of their positions."""
    parts = [everything(stream, rank=rank, world=world, **changes) for rank in range(world)]
    return [batch for group in zip(*parts, strict=True) for batch in group]


def shard_of(index: int) -> int:
    return next(n for n in range(len(SIZES)) if index < sum(SIZES[: n + 1]))


def lane_of(position: int) -> int:
    return position // MICRO % LANES


# Order


def test_samples_are_those_of_their_index_and_positions_count_through_the_run(shards):
    samples = [sample for batch in everything(make_stream(shards)) for sample in batch]
    assert [place.position for *_, place in samples] == list(range(STEPS * BATCH))
    for data, label, place in samples:
        assert (data, label) == (image(place.index), 10 * place.index)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_order_of_one(shards, world):
    stream = make_stream(shards)
    assert of_ranks(stream, world) == everything(stream)


def test_steps_hold_the_same_samples_for_any_number_of_processes(shards):
    stream = make_stream(shards)
    per_step = BATCH // MICRO
    whole = everything(stream)
    for rank in range(4):
        share = everything(stream, rank=rank, world=4)
        assert len(share) == len(batches_of(stream, rank=rank, world=4)) == len(whole) // 4
        for number, batch in enumerate(share):
            step = number // (per_step // 4)
            assert batch in whole[step * per_step : (step + 1) * per_step]


def keep_with_worker(data: bytes | str, label: int, place: Place) -> tuple:
    info = get_worker_info()
    return data, label, place, info.id if info else None


def test_workers_change_nothing_and_share_no_shard(shards):
    loader = DataLoader(
        batches_of(make_stream(shards, prepare=keep_with_worker), rank=1, world=2, workers=2),
        batch_size=None,
        num_workers=2,
    )
    found = [[tuple(sample) for sample in batch] for batch in loader]
    assert [[sample[:3] for sample in batch] for batch in found] == everything(
        make_stream(shards), rank=1, world=2
    )
    readers: dict[int, set] = {}
    for *_, place, worker in (sample for batch in found for sample in batch):
        readers.setdefault(shard_of(place.index), set()).add(worker)
    assert set().union(*readers.values()) == {0, 1}
    assert all(len(workers) == 1 for workers in readers.values())


def test_workers_take_turns_from_any_first_step_to_an_uneven_end(shards):
    """8 lanes, 1 micro-batch a step: a resumed run's first lane falls to another worker."""
    stream = make_stream(shards, lanes=8)
    settings = {"rank": 0, "world_size": 1, "first_step": 3, "last_step": 8, "collate": list}
    plain = stream.batches(MICRO, MICRO, workers=0, **settings)
    shared = stream.batches(MICRO, MICRO, workers=2, **settings)
    assert len(shared) == 5
    found = list(DataLoader(shared, batch_size=None, num_workers=2))
    assert [[tuple(sample) for sample in batch] for batch in found] == list(plain)


def test_no_shard_is_opened_by_two_processes(shards, monkeypatch):
    opened: list[list[Path]] = []
    original = streaming._open

    def counted(shard, kind):
        opened[-1].append(shard.path)
        return original(shard, kind)

    monkeypatch.setattr(streaming, "_open", counted)
    stream = make_stream(shards)
    for rank in range(4):
        opened.append([])
        everything(stream, rank=rank, world=4)
    assert sorted(path for paths in opened for path in set(paths)) == sorted(shards)


def test_a_lane_takes_each_of_its_samples_once_a_pass_and_each_pass_in_another_order(shards):
    stream = make_stream(shards)
    passes: dict[tuple[int, int], list[int]] = {}
    for batch in everything(stream):
        for _, _, place in batch:
            passes.setdefault((lane_of(place.position), place.epoch), []).append(place.index)
    seen = [index for lane in range(LANES) for index in passes[lane, 0]]
    assert sorted(seen) == list(range(sum(SIZES)))
    for lane in range(LANES):
        first, second = passes[lane, 0], passes[lane, 1]
        assert sorted(first) == sorted(second) and first != second
        assert first != sorted(first)
        assert len(first) == stream.lane_sizes[lane]


def test_a_pass_takes_whole_shards_in_an_order_of_its_own(shards):
    """With blocks of one sample nothing else is permuted."""
    stream = make_stream(shards, lanes=1, buffer=1)
    orders = set()
    items = stream.lanes[0].items(0)
    for epoch in range(3):
        read = list(islice(items, stream.size))
        assert {item.epoch for item in read} == {epoch}
        order = list(dict.fromkeys(shard_of(item.index) for item in read))
        assert sorted(order) == list(range(len(SIZES)))
        starts = [sum(SIZES[:shard]) for shard in order]
        expected = [s + row for s, shard in zip(starts, order) for row in range(SIZES[shard])]
        assert [item.index for item in read] == expected
        orders.add(tuple(order))
    assert len(orders) == 3


def test_blocks_are_permuted_within_themselves(shards):
    stream = make_stream(shards, lanes=1, buffer=5)
    plain = make_stream(shards, lanes=1, buffer=1)
    mixed = [item.index for item in islice(stream.lanes[0].items(0), stream.size)]
    read = [item.index for item in islice(plain.lanes[0].items(0), stream.size)]
    for first in range(0, stream.size, 5):
        assert sorted(mixed[first : first + 5]) == sorted(read[first : first + 5])
    moved = {
        tuple(read[first : first + 5].index(index) for index in mixed[first : first + 5])
        for first in range(0, 55, 5)
    }
    assert len(moved) > 5  # each block has a permutation of its own


def test_another_seed_is_another_order(shards):
    orders = [
        [place.index for batch in everything(make_stream(shards, seed=seed)) for *_, place in batch]
        for seed in (SEED, SEED, SEED + 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_parquet_and_tar_give_the_same(tmp_path):
    streams = [make_stream(make_shards(tmp_path, kind)) for kind in ("parquet", "tar")]
    assert everything(streams[0]) == everything(streams[1])
    assert streams[0].size == streams[1].size == len(streams[0]) == sum(SIZES)


def test_shards_are_dealt_evenly(shards):
    """The largest first, each to the lane that has least: 9+5, 8+5+4, 7+6 and 7+6 samples."""
    stream = make_stream(shards)
    assert [sorted(shard.size for shard in lane.shards) for lane in stream.lanes] == [
        [5, 9], [4, 5, 8], [6, 7], [6, 7],
    ]
    assert stream.lane_sizes == [14, 17, 13, 13]


def test_a_block_is_held_and_no_more(shards, monkeypatch):
    """Raw images in memory never exceed the buffer and one batch of a file's rows."""
    handed, fetched = 0, 0
    original = streaming.Lane._read

    def counted(self, epoch, row):
        nonlocal fetched
        for item in original(self, epoch, row):
            fetched += 1
            yield item

    monkeypatch.setattr(streaming.Lane, "_read", counted)
    stream = make_stream(shards, lanes=1, buffer=19)  # three blocks a pass
    for _ in islice(stream.lanes[0].items(0), 3 * stream.size):
        handed += 1
        assert handed - 1 <= fetched <= handed + 19


# Resumption


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(shards, step):
    whole = everything(make_stream(shards))
    calls = Counter()

    def counting(data, label, place):
        calls[place.position] += 1
        return data, label, place

    resumed = make_stream(shards, prepare=counting)
    assert of_ranks(resumed, 2, first=step) == whole[step * BATCH // MICRO :]
    assert calls == Counter(range(step * BATCH, STEPS * BATCH))  # and nothing else was decoded


def test_every_start_of_a_lane_continues_its_order(shards):
    lane = make_stream(shards, lanes=2).lanes[0]
    whole = list(islice(lane.items(0), 3 * lane.size + 5))
    for start in range(3 * lane.size):
        assert list(islice(lane.items(start), 5)) == whole[start : start + 5]


def test_shards_before_the_start_stay_closed(shards, monkeypatch):
    opened = []
    original = streaming._open
    monkeypatch.setattr(
        streaming, "_open", lambda shard, kind: opened.append(shard.path) or original(shard, kind)
    )
    stream = make_stream(shards, lanes=1, buffer=1)
    last = list(islice(stream.lanes[0].items(stream.size), stream.size))[-1]
    opened.clear()
    assert next(stream.lanes[0].items(2 * stream.size - 1)) == last
    assert opened == [shards[shard_of(last.index)]]


# Images that cannot be read


def unreadable(bad: set[int]):
    def prepare(data, label, place):
        return None if place.index in bad else (data, label, place)

    return prepare


def test_the_next_readable_sample_stands_in_and_no_other_moves(shards):
    bad = {0, 1, 20, 21, 22, 40}
    plain = [s for batch in everything(make_stream(shards)) for s in batch]
    stream = make_stream(shards, prepare=unreadable(bad))
    found = [s for batch in everything(stream) for s in batch]
    lanes = [list(islice(lane.items(0), 2 * STEPS * BATCH)) for lane in stream.lanes]
    replaced = 0
    for before, after in zip(plain, found, strict=True):
        place = after[2]
        assert place.position == before[2].position
        if before[2].index not in bad:
            assert after == before
            continue
        replaced += 1
        micro, within = divmod(place.position, MICRO)
        number = micro // LANES * MICRO + within
        items = lanes[micro % LANES][number:]
        expected = next(item for item in items if item.index not in bad)
        assert (place.epoch, place.index) == (expected.epoch, expected.index)
        assert after[:2] == (image(expected.index), 10 * expected.index)
    assert replaced >= 2 * len(bad)


def test_stand_ins_are_the_same_after_a_resume_and_in_other_processes(shards):
    stream = make_stream(shards, prepare=unreadable({0, 1, 20, 21, 22, 40}))
    whole = everything(stream)
    for step in range(STEPS):
        assert of_ranks(stream, 4, first=step) == whole[step * BATCH // MICRO :]


def test_an_image_is_tried_once_a_pass_not_once_for_each_it_would_stand_in_for(shards):
    tried = Counter()

    def prepare(data, label, place):
        tried[place.epoch, place.index] += 1
        return None if place.index % 2 else (data, label, place)

    list(islice(make_stream(shards, lanes=1, prepare=prepare).samples(0, 0, MICRO), 57))
    assert {count for (_, index), count in tried.items() if index % 2} == {1}


def test_a_lane_without_a_readable_image_is_an_error(shards):
    with pytest.raises(UserError, match="neither this nor another shard of its lane has"):
        everything(make_stream(shards, prepare=lambda *_: None))


# What is read


def test_paths_in_parquet_are_handed_on(tmp_path):
    rows = [{"bytes": None, "path": f"/pictures/{n}.jpg"} for n in range(3)]
    table = pyarrow.table({"image": rows, "label": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    samples = everything(make_stream([tmp_path / "a.parquet"], lanes=1), last=1)[0]
    assert {sample[0] for sample in samples} == {row["path"] for row in rows}


def test_bytes_without_a_path_column_are_images_too(tmp_path):
    table = pyarrow.table({"image": [image(0), image(1), image(2)], "label": [0, 10, 20]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    samples = everything(make_stream([tmp_path / "a.parquet"], lanes=1), last=1)[0]
    assert sorted(sample[:2] for sample in samples) == [(image(n), 10 * n) for n in range(3)]


@pytest.mark.parametrize(
    "missing", [None, {"bytes": None, "path": None}, {"bytes": None, "path": ""}]
)
def test_a_row_without_an_image_is_handed_on_as_no_bytes(tmp_path, missing):
    """What prepares samples counts it among the images that cannot be read."""
    there = {"bytes": image(0), "path": "0.jpg"}
    table = pyarrow.table({"image": [there, missing, there], "label": [0, 10, 20]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    samples = everything(make_stream([tmp_path / "a.parquet"], lanes=1), last=1)[0]
    assert sorted(sample[:2] for sample in samples) == [(b"", 10), (image(0), 0), (image(0), 20)]


def test_hidden_members_and_folders_of_a_tar_are_no_samples(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, [(".hidden.txt", b""), *tar_sample(0, 0), ("README", b""), *tar_sample(1, 10)])
    samples = everything(make_stream([path], lanes=1), last=1)
    assert {sample[:2] for batch in samples for sample in batch} == {(image(0), 0), (image(1), 10)}


def test_labels_in_json_members(tmp_path):
    """What else is in them may differ from sample to sample."""
    path = tmp_path / "a.tar"
    texts = [json.dumps({f"key{n}": [n], "label": 10 * n}).encode() for n in range(3)]
    pictures = [(f"{n}.jpg", image(n)) for n in range(3)]
    write_tar(path, sorted([*pictures, *((f"{n}.json", texts[n]) for n in range(3))]))
    samples = everything(make_stream([path], lanes=1), last=1)[0]
    assert sorted(sample[:2] for sample in samples) == [(image(n), 10 * n) for n in range(3)]


def test_json_members_without_a_label(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, [("a.jpg", image(0)), ("a.json", b'{"height": 3}')])
    found = message(everything, make_stream([path], lanes=1))
    assert found == f"{path}: row 0 has no label; every sample needs one"


def test_tars_are_counted_once(tmp_path, monkeypatch):
    shards, cache = make_shards(tmp_path, "tar", (3, 4, 5)), tmp_path / "cache"
    counted = []
    original = streaming._scan_tar
    monkeypatch.setattr(
        streaming, "_scan_tar", lambda path: counted.append(path) or original(path)
    )
    first = make_stream(shards, lanes=3, cache_dir=cache)
    assert counted == shards and first.size == 12
    again = make_stream(shards, lanes=3, cache_dir=cache)
    assert counted == shards and again.lanes == first.lanes
    write_tar(shards[1], [m for n in range(9) for m in tar_sample(n, n)])
    assert make_stream(shards, lanes=3, cache_dir=cache).size == 17
    assert counted == [*shards, shards[1]]
    [file] = cache.iterdir()
    file.write_text("{")
    assert make_stream(shards, lanes=3, cache_dir=cache).size == 17
    assert counted == [*shards, shards[1], *shards]


# Errors


def message(function, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        function(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_fewer_shards_than_lanes(shards):
    found = message(make_stream, shards, lanes=10)
    assert "data.lanes: 10 lanes" in found and "9 training shards" in found
    assert "set data.lanes to 9 or less" in found


def test_micro_batches_that_processes_cannot_share(shards):
    stream = make_stream(shards)
    found = message(stream.batches, 40, 3, 0, 4, 0, 1, 0, list)
    assert "training.batch_size 40" in found
    assert "training.micro_batch_size 3 x 4 processes" in found
    assert "training.batch_size 36 or 48, or training.micro_batch_size 2, would do" in found
    for batch, micro in ((36, 3), (48, 3), (40, 2)):
        stream.batches(batch, micro, 0, 4, 0, 1, 0, list)


def test_a_batch_that_processes_cannot_share(shards):
    found = message(make_stream(shards).batches, 2, 3, 0, 4, 0, 1, 0, list)
    assert found.endswith("training.batch_size 12 would do")


def test_micro_batches_must_be_given(shards):
    found = message(make_stream(shards).batches, 40, None, 0, 4, 0, 1, 0, list)
    assert "training.micro_batch_size is missing" in found


@pytest.mark.parametrize(
    "lanes, world, workers, advice",
    [
        (8, 3, 0, "data.lanes 6 or 9 would do"),
        (8, 2, 3, "data.lanes 6, or training.data_workers 2 would do"),
        (4, 2, 5, "training.data_workers 2 would do"),
        (8, 3, 4, "data.lanes 3 with training.data_workers 1 would do"),
        (8, 10, 1, "at most 9 processes, one for each training shard, would do"),
    ],
)
def test_lanes_that_workers_cannot_share(shards, lanes, world, workers, advice):
    stream = make_stream(shards, lanes=lanes)
    found = message(stream.batches, 9 * 8 * 10, 3, 0, world, 0, 1, workers, list)
    assert f"data.lanes: {lanes} lanes cannot be shared equally by {world} processes" in found
    assert f"training.data_workers {workers}" in found
    assert found.endswith(advice)


@pytest.mark.parametrize(
    "lanes, world, workers", [(6, 3, 0), (9, 3, 0), (6, 2, 3), (8, 2, 2), (4, 2, 2), (3, 3, 1)]
)
def test_what_those_messages_advise_works(shards, lanes, world, workers):
    make_stream(shards, lanes=lanes).batches(9 * 8 * 10, 3, 0, world, 0, 1, workers, list)


def test_a_shard_that_is_missing(tmp_path, kind):
    path = tmp_path / f"none.{kind}"
    for cache in (None, tmp_path / "cache"):
        found = message(make_stream, [path], lanes=1, cache_dir=cache)
        assert found.startswith(f"{path}: cannot be read as {kind}: ")


def test_a_shard_that_is_something_else(shards):
    shards[4].write_bytes(b"<html>404</html>" * 100)
    found = message(make_stream, shards)
    assert found.startswith(f"{shards[4]}: cannot be read as {shards[4].suffix[1:]}: ")
    assert found.endswith("replace or remove the file")


@pytest.mark.parametrize("length", [100, 3 * 6 * 512, 3 * 6 * 512 + 100, 3 * 6 * 512 + 520])
def test_a_tar_that_was_cut_off(tmp_path, length):
    """Between two samples too: three members of a header and a block make one."""
    [path] = make_shards(tmp_path, "tar", (9,))
    path.write_bytes(path.read_bytes()[:length])
    assert message(make_stream, [path], lanes=1).startswith(f"{path}: cannot be read as tar: ")


def test_a_tar_with_a_damaged_header(tmp_path):
    [path] = make_shards(tmp_path, "tar", (9,))
    data = path.read_bytes()
    path.write_bytes(data[: 18 * 512] + b"x" * 512 + data[19 * 512 :])
    assert "it is damaged or cut off" in message(make_stream, [path], lanes=1)


def test_a_shard_that_breaks_while_it_is_read(shards, kind):
    """Its first headers or pages are overwritten; parquet's footer stays, so it still opens."""
    stream = make_stream(shards)
    damaged = slice(0, 2000) if kind == "tar" else slice(4, 200)
    for path in shards:
        data = bytearray(path.read_bytes())
        data[damaged] = b"x" * (damaged.stop - damaged.start)
        path.write_bytes(data)
    found = message(everything, stream)
    assert any(found.startswith(f"{path}: cannot be read as {kind}: ") for path in shards)


def test_a_shard_that_was_replaced_during_the_run(shards, kind):
    stream = make_stream(shards, lanes=1)
    for path in shards:
        if kind == "parquet":
            write_parquet(path, [(image(0), 0)])
        else:
            write_tar(path, tar_sample(0, 0, "jpg") + tar_sample(1, 0, "JPEG"))
    found = message(everything, stream)
    assert "when the run began; start anew with the shards as they are" in found


def test_an_empty_shard(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write_parquet(path, []) if kind == "parquet" else write_tar(path, [])
    assert message(make_stream, [path], lanes=1) == (
        f"{path}: holds no samples; remove it or replace it"
    )


@pytest.mark.parametrize("column", ["image", "label"])
def test_a_missing_column(tmp_path, column):
    path = tmp_path / "a.parquet"
    columns = {"image": [b""], "label": [1], "extra": [2]}
    del columns[column]
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    found = message(make_stream, [path], lanes=1)
    assert found.startswith(f"{path}: no column {column!r}; it has {', '.join(columns)}")


def test_labels_that_are_no_class_numbers(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [b""], "label": ["cat"]}), path)
    found = message(make_stream, [path], lanes=1)
    assert found == f"{path}: column 'label' is string; expected integers, the class numbers"


def test_a_row_without_a_label(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [(image(0), 0), (image(1), None)])
    stream = make_stream([path], lanes=1)
    found = message(everything, stream)
    assert found == f"{path}: row 1 has no label; every sample needs one"
    from_there = streaming.read(stream.lanes[0].shards[0], "parquet", first=1)
    assert message(list, from_there) == found  # rows count from the shard's first


@pytest.mark.parametrize(
    "members, expected",
    [
        ([("b.jpg", b"")], "sample 'b' has no label; expected in every sample"),
        ([("b.json", b"{}"), ("b.jpg", b"")], "sample 'b' has no label; expected in every sample"),
        ([("b.cls", b"1"), ("b.txt", b"")], "sample 'b' has no images; expected one member b.jpg"),
        ([("b.cls", b"1"), ("b.jpg", b""), ("b.png", b"")], "sample 'b' has 2 images"),
    ],
)
def test_a_tar_sample_without_label_or_image(tmp_path, members, expected):
    path = tmp_path / "a.tar"
    write_tar(path, [("a.jpg", b""), ("a.cls", b"1"), *members, ("c.jpg", b""), ("c.cls", b"1")])
    found = message(make_stream, [path], lanes=1)
    assert found.startswith(f"{path}: {expected}")


def test_a_label_in_a_tar_that_is_no_number(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, [("a.jpg", b""), ("a.cls", b"cat")])
    found = message(everything, make_stream([path], lanes=1))
    assert found.startswith(f"{path}: cannot be read as tar: ") and "'cat'" in found
