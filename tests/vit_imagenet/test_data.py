"""vit_imagenet.data and its sources: digits, folders, shards, images that cannot be read."""

import io
import json
import re
import tarfile

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from timm.data import create_transform
from torch.utils.data import DataLoader

from tests import damages
from tests.text_files import error_line
from training.data import shapes
from training.data.sampling import EpochPlaces, Place
from training.errors import UserError
from training.loading import batches as from_worker
from vit_imagenet.config import AugmentationConfig, DataConfig
from vit_imagenet.data import from_config
from vit_imagenet.images import embedded
from vit_imagenet.losses import IGNORE
from vit_imagenet.shards import open_shards
from vit_imagenet.transforms import Unreadable, eval_collate

SIZE = 16
CLASSES = ("ant", "bee", "cat")
PER_CLASS = {"train": 4, "val": 2}
UNMIXED = {"mixup": 0.0, "cutmix": 0.0}


def config(augmentation=None, **fields):
    fields = {"eval_resize": 20, **fields}
    return DataConfig(augmentation=AugmentationConfig(**(augmentation or {})), **fields)


def load(augmentation=None, seed=0, classes=3, **fields):
    return from_config(config(augmentation, **fields), image_size=SIZE, classes=classes, seed=seed)


def digits(augmentation=None, seed=0, **fields):
    return load(augmentation, seed, classes=10, **fields)


def jpeg(number, size=(30, 24), mode="RGB", **options):
    """A smooth image that differs from every other number's, as bytes."""
    noise = np.random.default_rng(number).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode)
    file = io.BytesIO()
    image.save(file, options.pop("format", "JPEG"), quality=95, **options)
    return file.getvalue()


def records():
    """split -> [(class number, name, bytes)], by class and then name."""
    found = {}
    for split, count in PER_CLASS.items():
        found[split] = [
            (label, f"{name}_{i}", jpeg(100 * label + i + 50 * (split == "val")))
            for label, name in enumerate(CLASSES)
            for i in range(count)
        ]
    return found


def write_folder(root):
    for split, rows in records().items():
        for label, name, content in rows:
            folder = root / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.JPEG").write_bytes(content)
    return root


def write_parquet(root, shards=2, features=True):
    """Split into `shards` files; with the hub's features or as bare Arrow columns."""
    root.mkdir(exist_ok=True)
    for split, rows in records().items():
        for shard in range(shards):
            part = rows[shard * len(rows) // shards : (shard + 1) * len(rows) // shards]
            columns = {
                "image": [{"bytes": content, "path": f"{name}.JPEG"} for _, name, content in part],
                "label": [label for label, _, _ in part],
            }
            file = root / f"{'validation' if split == 'val' else split}-{shard:05d}.parquet"
            if features:
                kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])}
                rows_of = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
                rows_of.to_parquet(str(file))
            else:
                parquet.write_table(pyarrow.table(columns), file)
    return root


def write_tar(root, label="cls", shards=2):
    root.mkdir(exist_ok=True)
    for split, rows in records().items():
        for shard in range(shards):
            part = rows[shard * len(rows) // shards : (shard + 1) * len(rows) // shards]
            with tarfile.open(root / f"{split}-{shard}.tar", "w") as tar:
                for number, name, content in part:
                    text = str(number) if label == "cls" else json.dumps({"label": number})
                    for end, value in (("jpg", content), (label, text.encode())):
                        member = tarfile.TarInfo(f"{name}.{end}")
                        member.size = len(value)
                        tar.addfile(member, io.BytesIO(value))
    return root


def one_epoch(images, collate, micro, workers=0):
    """All training images once, `micro` at a time."""
    ids = EpochPlaces(len(images.train), 0, len(images.train), micro, 0, 1, 0, 1)
    return DataLoader(images.train, batch_sampler=ids, collate_fn=collate, num_workers=workers)


def equal(found, expected):
    """Whether two nested samples hold the same bits."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(found, (tuple, list)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


def test_digits_are_split_once_for_all_seeds_without_overlap():
    first, second = digits(seed=0), digits(seed=1)
    train, validation = (part.source for part in (first.train, first.validation))
    assert len(first.classes) == 10 and first.classes[3] == "3"
    assert (len(first.train), len(first.validation)) == (len(train), len(validation))
    assert len(train) + len(validation) == 1797
    assert np.array_equal(train.pixels, second.train.source.pixels)
    rows = [{row.tobytes() for row in part.pixels} for part in (train, validation)]
    assert len(rows[0]) + len(rows[1]) > 1790 and len(rows[0] & rows[1]) <= 1
    for label in range(10):
        held, kept = ((part.labels == label).sum() for part in (validation, train))
        assert held == round(0.2 * (held + kept))


def test_digits_keep_their_pixels_at_their_own_size():
    from sklearn.datasets import load_digits

    train, validation, _ = embedded(8, 0.2)
    found = sorted(row[..., 0].tobytes() for part in (train, validation) for row in part.pixels)
    original = np.round(load_digits().images * 255 / 16).astype(np.uint8)
    assert found == sorted(row.tobytes() for row in original)
    assert np.array_equal(train.pixels[..., 0], train.pixels[..., 2])


def test_an_evaluation_image_at_its_own_size_is_only_normalised():
    images = digits(eval_resize=SIZE)
    pixels = images.validation.source[4].content
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((pixels / 255.0 - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(images.validation[4][0].numpy(), expected, atol=1e-6)


def test_drawn_images_are_those_of_the_generator_split_by_class_for_all_seeds():
    first, second = (
        load(UNMIXED, seed, 10, source="drawn", eval_resize=32, validation_fraction=0.02)
        for seed in (0, 1)
    )
    train, validation = first.train.source, first.validation.source
    assert train is second.train.source and (len(train), len(validation)) == (49_000, 1000)
    assert np.bincount(validation.labels).tolist() == [100] * 10
    pixels, labels = shapes.draw(np.arange(50), 0)
    rows = {
        row.tobytes(): label
        for row, label in zip(pixels.transpose(0, 2, 3, 1), labels, strict=True)
    }
    found = [source[i] for source in (train, validation) for i in range(50)]
    again = [
        rows[one.content.tobytes()] == one.label for one in found if one.content.tobytes() in rows
    ]
    assert len(again) >= 45 and all(again)
    assert first.train[Place(0, 0, 0)][0].shape == (3, SIZE, SIZE)


SOURCES = {
    "folder": (write_folder, "folder"),
    "parquet": (write_parquet, "shards"),
    "bare parquet": (lambda root: write_parquet(root, features=False), "shards"),
    "tar": (write_tar, "shards"),
    "tar with json": (lambda root: write_tar(root, "json"), "shards"),
}


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "images")


def opened(root, source="folder", augmentation=None, **fields):
    fields = {"cache_dir": str(root.parent / "cache"), **fields}
    return load(augmentation, path=str(root), source=source, **fields)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_samples(tmp_path, name):
    write, source = SOURCES[name]
    images = opened(write(tmp_path / "images"), source)
    named = name in ("folder", "parquet")
    assert images.classes == (list(CLASSES) if named else ["0", "1", "2"])
    assert (len(images.train), len(images.validation)) == (12, 6)
    timms = create_transform(SIZE, crop_pct=SIZE / 20, interpolation="bicubic")
    for index, (label, _, content) in enumerate(records()["val"]):
        image = Image.open(io.BytesIO(content))
        assert equal(images.validation[index], (timms(image), label))
    for index, (label, _, content) in enumerate(records()["train"]):
        place = Place(1, 0, index)
        expected = images.train.prepare(content, label, place)
        assert equal(images.train[place], expected)


def test_unreadable_rows_are_named_and_replaced(tmp_path, capfd):
    """A missing image too."""
    root = write_parquet(tmp_path / "images", features=False)
    shard = root / "train-00001.parquet"
    table = parquet.read_table(shard)
    rows = table["image"].to_pylist()
    rows[1], rows[4] = None, {"bytes": b"no image", "path": None}
    column = pyarrow.array(rows, table["image"].type)
    parquet.write_table(table.set_column(0, "image", column), shard)
    images = opened(root, "shards", UNMIXED)
    capfd.readouterr()  # what copying the shards shows
    samples = [sample for batch in one_epoch(images, list, 4) for sample in batch]
    assert len(samples) == 12 and None not in samples
    assert sorted(line.split(" (")[0] for line in capfd.readouterr().err.splitlines()) == [
        f"not used: row {row} of {root}: shards of train: cannot be read" for row in (10, 7)
    ]
    named = opened(write_parquet(tmp_path / "whole"), "shards").train.source[7].name
    assert named == f"bee_3.JPEG (row 7 of {tmp_path / 'whole'}: shards of train)"
    tar = opened(write_tar(tmp_path / "tars"), "shards").train.source
    assert tar[7].name == f"bee_3.jpg (bee_3 in {tmp_path / 'tars' / 'train-1.tar'})"


@pytest.mark.parametrize("folder", [".", "data"])
def test_shards_are_found_by_a_word_of_their_name(tmp_path, folder):
    """The split may stand after a prefix and in data/, as the hub has it."""
    names = {
        "train": ["imagenet-train-000000.tar", "imagenet_train-000001.tar", "train.tar"],
        "val": ["imagenet1k-validation-00.tar", "val-0.tar"],
    }
    others = "imagenet-test-0.tar test-val.tar train-test.tar interval-0.tar ._val-0.tar train.txt"
    root = tmp_path / folder
    root.mkdir(exist_ok=True)
    for name in (*names["train"], *names["val"], *others.split(), "train.tar.json"):
        (root / name).touch()
    for split in ("train", "val"):
        expected = [root / name for name in names[split]]
        assert open_shards(str(tmp_path), split) == (expected, "tar")


BROKEN = {
    "truncated": (lambda content: content[:-100], "image file is truncated"),
    "text": (lambda _: b"<html>404</html>", "cannot identify image file"),
    "flipped": (lambda content: damages.flip(content, 0), "cannot identify image file"),
    "empty": (lambda _: b"", "no bytes"),
    "absent": (None, "No such file"),
}


def spoil(file, how):
    change, reason = BROKEN[how]
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    return reason


@pytest.mark.parametrize("how", BROKEN)
def test_an_unreadable_training_image_is_replaced_by_the_next(folder, capfd, how):
    images = opened(folder)
    bad = folder / "train" / "ant" / "ant_3.JPEG"
    reason = spoil(bad, how)
    place = Place(0, 3, 3)
    following = images.train.source[4]
    assert following.label == 1
    expected = images.train.prepare(following.content, 1, place)
    for _ in range(2):
        assert equal(images.train[place], expected)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"not used: {bad}: cannot be read (")
    assert reason in lines[0] and "BytesIO" not in lines[0]


def test_the_last_image_is_replaced_by_the_first_and_the_next_bad_one_passed_over(folder):
    images = opened(folder)
    for name in ("cat/cat_3", "ant/ant_0"):
        spoil(folder / "train" / f"{name}.JPEG", "empty")
    sample = images.train[Place(0, 0, 11)]
    assert equal(sample, images.train.prepare(images.train.source[1].content, 0, Place(0, 0, 11)))


def test_an_unreadable_validation_image_is_not_counted(folder, capfd):
    images = opened(folder)
    bad = folder / "val" / "bee" / "bee_0.JPEG"
    spoil(bad, "truncated")
    for _ in range(2):
        stacked, labels = eval_collate([images.validation[i] for i in range(6)])
    assert labels.tolist() == [0, 0, IGNORE, 1, 2, 2] and not stacked[2].any()
    assert capfd.readouterr().err.count(str(bad)) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_unreadable_images_end_the_run(folder, workers):
    for name in ("ant/ant_0", "bee/bee_2", "cat/cat_3"):
        spoil(folder / "train" / f"{name}.JPEG", "text")
    images = opened(folder, augmentation=UNMIXED, max_unreadable=2)
    batches = one_epoch(images, None, 2, workers)
    with pytest.raises(UserError) as caught:
        list(from_worker(batches))
    expected = r"3 images cannot be read, the last one \S+/(ant_0|bee_2|cat_3).JPEG \(cannot .*"
    assert re.fullmatch(expected + "data.max_unreadable 2", str(caught.value))


def test_workers_and_both_splits_share_one_count(folder, capfd):
    spoil(folder / "train" / "ant" / "ant_0.JPEG", "text")
    spoil(folder / "val" / "ant" / "ant_0.JPEG", "text")
    images = opened(folder, max_unreadable=2)
    for _ in range(2):  # new workers each time
        list(one_epoch(images, list, 2, workers=2))
        list(DataLoader(images.validation, collate_fn=eval_collate, num_workers=1))
    assert images.train.unreadable.flags.sum() == 2
    assert capfd.readouterr().err.count("not used") == 2
    spoil(folder / "val" / "cat" / "cat_1.JPEG", "text")
    with pytest.raises(UserError, match="3 images cannot be read.*val/cat/cat_1"):
        images.validation[5]


def test_unusual_but_sound_images_are_converted(folder):
    images = opened(folder)
    file = folder / "val" / "ant" / "ant_0.JPEG"
    kinds = {"L": "JPEG", "CMYK": "JPEG", "RGBA": "PNG", "P": "PNG", "1": "PNG"}
    for mode, format_ in kinds.items():
        file.write_bytes(jpeg(1, mode=mode, format=format_))
        image, label = images.validation[0]
        assert label == 0 and image.shape == (3, SIZE, SIZE) and image.std() > 0.1
        assert images.train.prepare(str(file), 0, Place(0, 0, 0))[0].shape == (3, SIZE, SIZE)


def test_a_decompression_bomb_is_an_unreadable_image(folder, monkeypatch):
    images = opened(folder)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(Unreadable):
        images.train.prepare(jpeg(0, (13, 13)), 0, Place(0, 0, 0))
        images.train.prepare(jpeg(0, (90, 90)), 0, Place(0, 0, 0))


# Damaged shards, and damaged copies of them: named, and nothing of them used


@pytest.mark.parametrize("damage", damages.of("tar"), ids=str)
def test_a_damaged_tar_is_named_and_nothing_of_it_used(tmp_path, damage):
    root = write_tar(tmp_path / "images")
    file = damage.do(root)
    line = error_line(lambda: opened(root, "shards"))
    assert damage.follows(f"{file}: ", line)


@pytest.mark.parametrize("write", [write_parquet, write_tar])
def test_a_damaged_arrow_copy_is_made_again(tmp_path, capfd, write):
    root = write(tmp_path / "images")
    before = [record.content for record in opened(root, "shards").train.source]
    file = next((tmp_path / "cache").rglob("*-train.arrow"))
    content = file.read_bytes()
    file.write_bytes(damages.flip(content, len(content) // 2))
    after = [record.content for record in opened(root, "shards").train.source]
    assert after == before
    assert f"{file.name} is damaged: its SHA-256 is not" in capfd.readouterr().err
