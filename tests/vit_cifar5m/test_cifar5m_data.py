"""vit_cifar5m.data: sources, files as published and damaged ones, one visit to every image."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests import damages
from tests.text_files import error_line
from training.data import shapes
from training.data.sampling import BatchIds
from training.errors import UserError
from training.loading import batches
from vit_cifar5m import data as module
from vit_cifar5m.config import DataConfig, SourceConfig
from vit_cifar5m.data import check_single_visit, collate, from_config

COUNTS = (4, 3, 5, 2, 4, 6)  # images of each part
SAVE = {"stored": np.savez, "deflated": np.savez_compressed}


def part(number):
    generator = np.random.default_rng(number)
    pixels = generator.integers(0, 256, (COUNTS[number], 32, 32, 3), dtype=np.uint8)
    return {"X": pixels, "Y": generator.integers(0, 10, COUNTS[number])}


def write_parts(folder, kind="stored", name="cifar5m_part{}.npz", numbers=range(6)):
    folder.mkdir(exist_ok=True)
    for number in numbers:
        SAVE[kind](folder / name.format(number), **part(number))
    return folder


def records(number, count=4):
    """Bytes of a binary batch: labels, pixels channel by channel."""
    generator = np.random.default_rng(100 + number)
    rows = generator.integers(0, 256, (count, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows


def write_batches(folder):
    folder.mkdir(exist_ok=True)
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").write_bytes(records(number).tobytes())
    (folder / "test_batch.bin").write_bytes(records(0).tobytes())
    return folder


def load(source, folder, tmp_path, **fields):
    path = None if source == "embedded" else str(folder)
    fields = {"cache_dir": str(tmp_path / "cache"), "validation_images": 2, **fields}
    return from_config(DataConfig(source=source, path=path, **fields), seed=0)


def refused(source, folder, tmp_path, **fields):
    """The one line that a user reads."""
    return error_line(lambda: load(source, folder, tmp_path, **fields))


def assert_items(dataset, images, labels):
    """Images are given channels first, whatever the file's order."""
    assert len(dataset) == len(labels)
    for (image, label), expected, expected_label in zip(dataset, images, labels, strict=True):
        assert image.dtype == np.uint8 and type(label) is int and label == expected_label
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("name", ["cifar5m_part{}.npz", "part{}.npz"])
@pytest.mark.parametrize("kind", SAVE)
def test_five_parts_train_and_the_sixth_is_held_out(tmp_path, kind, name):
    images = load("cifar5m", write_parts(tmp_path / "c5m", kind, name), tmp_path)
    parts = [part(number) for number in range(6)]
    pixels = [p["X"].transpose(0, 3, 1, 2) for p in parts]
    assert images.classes == 10
    assert_items(
        images.train, np.concatenate(pixels[:5]), np.concatenate([p["Y"] for p in parts[:5]])
    )
    assert_items(images.validation, pixels[5][:2], parts[5]["Y"][:2])
    assert len(list((tmp_path / "cache").rglob("X.npy"))) == 6
    assert len(pickle.dumps(images.train)) < 3072  # less than one image: none travels


def test_parts_are_unpacked_once_for_a_content(tmp_path, capfd):
    folder = write_parts(tmp_path / "c5m")
    file = load("cifar5m", folder, tmp_path).train.files[0]
    made = file.stat().st_mtime_ns
    load("cifar5m", folder, tmp_path)
    assert file.stat().st_mtime_ns == made
    file.write_bytes(file.read_bytes()[:-1])
    train = load("cifar5m", folder, tmp_path).train
    assert "rebuilding it" in capfd.readouterr().err
    np.testing.assert_array_equal(train[3][0], part(0)["X"][3].transpose(2, 0, 1))
    assert len(list((tmp_path / "cache" / "cifar5m").iterdir())) == 6  # nothing is left over
    changed = {**part(0), "X": part(0)["X"] ^ 1}
    np.savez(folder / "cifar5m_part0.npz", **changed)
    image = load("cifar5m", folder, tmp_path).train[2][0]
    np.testing.assert_array_equal(image, changed["X"][2].transpose(2, 0, 1))


def test_workers_read_the_same_images(tmp_path):
    images = load("cifar5m", write_parts(tmp_path / "c5m"), tmp_path)
    order = [[17, 0, 4], [3, 6, 11]]
    workers = DataLoader(images.train, batch_sampler=order, num_workers=2, collate_fn=collate)
    for (pixels, labels), ids in zip(batches(workers), order, strict=True):
        expected = collate([images.train[i] for i in ids])
        assert torch.equal(pixels, expected[0]) and torch.equal(labels, expected[1])


PIXELS, LABELS = part(0)["X"], part(0)["Y"]


@pytest.mark.parametrize("damage", damages.of("npz"), ids=str)
@pytest.mark.parametrize("kind", SAVE)
def test_a_damaged_part_is_refused_and_leaves_nothing(tmp_path, kind, damage):
    folder = write_parts(tmp_path / "c5m", kind)
    file = damage.do(folder)
    message = refused("cifar5m", folder, tmp_path)
    assert message.startswith(f"{file}: {damage.words}") and "Download it again" in message
    cache = tmp_path / "cache" / "cifar5m"
    assert not cache.exists() or not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_not_the_files_fault(tmp_path):
    folder = write_parts(tmp_path / "c5m")
    (tmp_path / "cache").write_text("a file")
    assert refused("cifar5m", folder, tmp_path).startswith("data.cache_dir: ")


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_binary_batches_are_read_in_order(tmp_path, inner):
    write_batches(tmp_path / inner)
    images = load("cifar10", tmp_path, tmp_path, validation_images=3)
    rows = np.concatenate([records(number) for number in range(1, 6)])
    assert images.classes == 10
    assert_items(images.train, rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])
    assert_items(images.validation, records(0)[:3, 1:].reshape(-1, 3, 32, 32), records(0)[:3, 0])
    assert len(pickle.dumps(images.train)) < 3072
    assert len(load("cifar10", tmp_path, tmp_path, train_images=7).train) == 7


def whole(dataset):
    if isinstance(dataset, module.Drawn):
        return [bytes(image) for image, _ in dataset.__getitems__(range(len(dataset)))]
    return [bytes(image) for image, _ in (dataset[i] for i in range(len(dataset)))]


def test_embedded_images_are_the_drawn_ones():
    images = from_config(DataConfig(), seed=4)
    assert images.classes == 10
    assert (len(images.train), len(images.validation)) == (5_000_000, 2048)
    ids = [4_999_999, 3, 70]
    drawn, labels = shapes.draw(ids, 4)
    for found in (images.train.__getitems__(ids), [images.train[i] for i in ids]):
        assert [label for _, label in found] == labels.tolist()
        np.testing.assert_array_equal(np.stack([image for image, _ in found]), drawn)
    for beyond in (-1, 5_000_000):
        with pytest.raises(IndexError):
            images.train[beyond]


def test_validation_images_are_held_out_and_the_same_for_every_seed():
    data = DataConfig(train_images=2000, validation_images=500)
    first, second = (from_config(data, seed) for seed in (0, 1))
    held_out, also = (whole(images.validation) for images in (first, second))
    assert held_out == also and not set(held_out) & set(whole(first.train))
    # No number of a training image, however many there are, is one of a validation image.
    assert first.validation.first > module.MOST_EMBEDDED


def test_a_run_has_as_many_drawn_images_as_it_visits():
    """The number decides their order, which stays that of 5,000,000 for all shorter runs."""

    def trained(visits, **fields):
        return len(from_config(DataConfig(**fields), seed=0, visits=visits).train)

    assert [trained(visits) for visits in (1, 5_000_000)] == [5_000_000] * 2
    assert trained(5_002_240) == 5_002_240
    assert trained(10**10) == module.MOST_EMBEDDED
    for fields in ({"train_images": 7}, {"train_images": 6_000_000}):
        assert trained(5_002_240, **fields) == fields["train_images"]
    stated = DataConfig.model_fields["train_images"].description.replace("\n", " ")
    for number in (module.MOST_EMBEDDED, module.EMBEDDED_IMAGES):
        assert f"{number:,}" in stated
    assert np.iinfo(np.int32).max >= module.MOST_EMBEDDED  # 4 bytes each in training.data.sampling


@pytest.mark.parametrize("source", ["embedded", "cifar5m", "cifar10"])
def test_more_images_than_there_are_is_refused(tmp_path, source):
    write_parts(tmp_path)
    write_batches(tmp_path)
    most = {"embedded": 2_000_000_000, "cifar5m": 18, "cifar10": 20}[source]
    assert len(load(source, tmp_path, tmp_path, train_images=most).train) == most
    message = refused(source, tmp_path, tmp_path, train_images=most + 1)
    assert f"data.train_images: {most + 1}" in message and str(most) in message
    if source != "embedded":
        message = refused(source, tmp_path, tmp_path, validation_images=7)
        assert "data.validation_images: 7" in message and str(tmp_path) in message


@pytest.mark.parametrize(
    ("source", "name"), [("cifar5m", "part5.npz"), ("cifar10", "test_batch.bin")]
)
def test_held_out_images_need_no_other_file(tmp_path, source, name):
    folder = tmp_path / "all"
    write_parts(folder, name="part{}.npz") if source == "cifar5m" else write_batches(folder)
    expected = whole(load(source, folder, tmp_path, validation_images=3).validation)
    (tmp_path / "one").mkdir()
    (folder / name).rename(tmp_path / "one" / name)
    data = SourceConfig(source=source, path=str(tmp_path / "one"))
    found = module.held_out(data, 3, "samples")
    assert whole(found) == expected
    with pytest.raises(UserError, match="samples: 7 wanted, but .* has [46] images"):
        module.held_out(data, 7, "samples")


def test_batches_are_normalised_by_channel():
    images = np.zeros((2, 3, 32, 32), dtype=np.uint8)
    images[1] = 255
    pixels, labels = collate([(images[0], 7), (images[1], 2)])
    assert pixels.dtype == torch.float32 and pixels.shape == (2, 3, 32, 32)
    assert labels.dtype == torch.int64 and labels.tolist() == [7, 2]
    for channel, (mean, std) in enumerate(
        zip((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), strict=True)
    ):
        found = pixels[:, channel, 5, 9].tolist()
        assert found == pytest.approx([-mean / std, (1 - mean) / std], rel=1e-6)


def visited(train, seed, batch, steps, processes, workers):
    """What the processes of a run are given, in the order of its steps."""
    shares = []
    for rank in range(processes):
        ids = BatchIds(len(train), seed, batch, 7, rank, processes, 0, steps)
        loader = DataLoader(train, batch_sampler=ids, num_workers=workers, collate_fn=list)
        micro = list(batches(loader))
        per_step = ids.micro_batches
        shares.append(
            [[*itertools.chain(*micro[s * per_step : (s + 1) * per_step])] for s in range(steps)]
        )
    return [
        bytes(image) for step in zip(*shares, strict=True) for share in step for image, _ in share
    ]


def test_a_run_visits_every_image_once_in_an_order_of_the_seed(monkeypatch):
    """However many processes and workers there are; and images are drawn by the batch."""
    train = from_config(DataConfig(train_images=120), seed=0).train
    everything = sorted(whole(train))
    monkeypatch.delattr(module.Drawn, "__getitem__")
    orders = [visited(train, 5, 20, 6, *shape) for shape in ((1, 0), (2, 0), (2, 2))]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == everything and len(set(orders[0])) == 120
    other = visited(train, 6, 20, 6, 1, 0)
    assert other != orders[0] and sorted(other) == everything


def test_more_steps_than_images_need_repeat():
    once, again = DataConfig(), DataConfig(repeat=True)
    check_single_visit(once, images=1280, steps=10, batch_size=128)
    check_single_visit(again, images=1279, steps=10, batch_size=128)
    with pytest.raises(UserError) as caught:
        check_single_visit(once, images=1279, steps=10, batch_size=128)
    words = "steps 10;batch_size 128;1280;1279;(to 9);data.train_images;data.repeat=true"
    assert all(word in str(caught.value) for word in words.split(";"))
