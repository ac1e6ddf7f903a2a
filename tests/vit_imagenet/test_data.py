"""vit_imagenet.data: sources, augmentation as a function of its place, mixing, bad images."""

import io
import json
import pickle
import random
import re
import tarfile

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from timm.data import Mixup, create_transform
from torch.utils.data import DataLoader

from training.errors import UserError
from training.loading import batches as from_worker
from training.sampling import EpochPlaces, Place
from vit_imagenet import data as module
from vit_imagenet.config import AugmentationConfig, DataConfig
from vit_imagenet.data import Collate, eval_collate, from_config, seeded
from vit_imagenet.losses import IGNORE

SIZE = 16
CLASSES = ("ant", "bee", "cat")
PER_CLASS = {"train": 4, "val": 2}
OFF = {"crop_scale": (1.0, 1.0), "flip": 0.0, "rand_augment": None, "erasing": 0.0}
UNMIXED = {"mixup": 0.0, "cutmix": 0.0}


def config(augmentation=None, **fields):
    fields = {"eval_resize": 20, **fields}
    return DataConfig(augmentation=AugmentationConfig(**(augmentation or {})), **fields)


def load(augmentation=None, seed=0, classes=3, **fields):
    return from_config(
        config(augmentation, **fields), image_size=SIZE, classes=classes, seed=seed
    )


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


def places(count, epoch=0, first=0):
    return [Place(epoch, first + i, i) for i in range(count)]


def equal(found, expected):
    """Whether two nested samples hold the same bits."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(found, (tuple, list)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


# Randomness


def test_a_sample_is_a_function_of_seed_epoch_and_index():
    place = Place(3, 17, 5)
    image, label, back = digits().train[place]
    assert back == place and image.shape == (3, SIZE, SIZE) and image.dtype == torch.float32
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    again, other = digits(), digits(seed=1)
    again.train[Place(3, 17, 6)]
    assert torch.equal(again.train[place][0], image)
    assert torch.equal(again.train[place._replace(position=4)][0], image)
    for changed in (again.train[place._replace(epoch=4)], other.train[place]):
        assert changed[1] == label and not torch.equal(changed[0], image)


@pytest.mark.parametrize("only", ["crop", "flip", "rand_augment", "erasing"])
def test_each_augmentation_alone_differs_between_epochs_and_repeats(only):
    settings = {
        "crop": {"crop_scale": (0.3, 0.6)},
        "flip": {"flip": 0.5},
        "rand_augment": {"rand_augment": "rand-m9-mstd0.5-inc1"},
        "erasing": {"erasing": 0.5},
    }[only]
    images = digits(OFF | settings)
    found = [[images.train[Place(epoch, 0, 7)][0] for epoch in range(12)] for _ in range(2)]
    assert equal(*found)
    assert len({image.numpy().tobytes() for image in found[0]}) > 1


def test_erased_pixels_are_drawn_from_the_key():
    images = digits(OFF | {"erasing": 1.0})
    plain = digits(OFF).train[Place(0, 0, 7)][0]
    first, *later = (images.train[Place(epoch, 0, 7)][0] for epoch in range(12))
    erased = first != plain
    assert 0.02 * SIZE**2 / 2 <= erased.any(0).sum() <= SIZE**2 / 2  # timm: 2 % to a third
    overlaps = [(other, erased & (other != plain)) for other in later]
    overlaps = [(other, both) for other, both in overlaps if both.any()]
    assert len(overlaps) >= 3
    for other, both in overlaps:
        assert (first[both] != other[both]).all()
    torch.manual_seed(99)
    assert torch.equal(images.train[Place(0, 0, 7)][0], first)


def test_global_generators_go_on_as_if_nothing_had_been_drawn():
    images, collate = digits(), Collate(config({"mix_group": 2}).augmentation, 10, 0)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # leaves half a pair of normals behind
    expected = random.getstate(), np.random.get_state(), torch.get_rng_state()
    collate([images.train[place] for place in places(4)])
    assert random.getstate() == expected[0] and torch.equal(torch.get_rng_state(), expected[2])
    for found, wanted in zip(np.random.get_state(), expected[1], strict=True):
        assert np.array_equal(found, wanted)


def test_generators_are_put_back_after_an_error():
    state = random.getstate()
    with pytest.raises(KeyError), seeded("x"):
        raise KeyError
    assert random.getstate() == state


def test_keys_differ_in_every_part():
    def draws(*key):
        with seeded(*key):
            return random.random(), np.random.rand(), torch.rand(1).item()

    keys = [("a", 1, 2), ("a", 2, 1), ("b", 1, 2), ("a", 12)]
    for values in zip(*(draws(*key) for key in keys)):
        assert len(set(values)) == len(keys)
    assert draws("a", 1, 2) == draws("a", 1, 2)


def test_transforms_are_timms():
    augmentation = {"rand_augment": "rand-m5-n2-mstd0.5-inc1", "erasing": 0.9, "flip": 0.5}
    images = digits(augmentation)
    timms = create_transform(
        SIZE,
        is_training=True,
        scale=(0.08, 1.0),
        color_jitter=None,
        auto_augment="rand-m5-n2-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.9,
        re_mode="pixel",
    )
    for index in range(20):
        source = Image.fromarray(images.train.source[index].content)
        with seeded("image", 0, 2, index):
            expected = timms(source)
        assert torch.equal(images.train[Place(2, 0, index)][0], expected)


def test_the_short_way_without_augmentation_gives_timms_pixels():
    images = digits(OFF)
    assert images.train.prepare.transform.keeps
    timms = create_transform(
        SIZE, is_training=True, scale=(1, 1), hflip=0, color_jitter=None, interpolation="bicubic"
    )
    for index in range(5):
        expected = timms(Image.fromarray(images.train.source[index].content))
        assert torch.equal(images.train[Place(1, 0, index)][0], expected)


@pytest.mark.parametrize(
    "change", [{"crop_scale": (0.5, 1.0)}, {"flip": 0.1}, {"erasing": 0.1}, {"crop_ratio": (2, 3)}]
)
def test_the_short_way_is_left_when_anything_is_random(change):
    assert not digits(OFF | change).train.prepare.transform.keeps


def test_the_strongest_posterize_is_black_whatever_pillow_accepts():
    images = digits(OFF | {"rand_augment": "rand-m10-n1-p1-inc1"})
    ops = images.train.prepare.transform.augment.transforms[0].ops
    (operation,) = [op for op in ops if op.name == "PosterizeIncreasing"]
    image = Image.fromarray(images.train.source[0].content)
    assert np.array(image).any() and not np.array(operation(image)).any()


@pytest.mark.parametrize("spelling", ["m9", "rand-m9-mst0.5", "original", "rand-m", "rand-m9_n2"])
def test_rand_augment_in_another_spelling_is_refused(spelling):
    with pytest.raises(UserError, match="data.augmentation.rand_augment: '.*rand-m9-mstd0.5-inc1"):
        digits({"rand_augment": spelling})


# Batches


def loader(images, collate, batch, micro, workers=0, rank=0, world=1, steps=2, seed=0):
    ids = EpochPlaces(images.train_size, seed, batch, micro, rank, world, 0, steps)
    return DataLoader(images.train, batch_sampler=ids, collate_fn=collate, num_workers=workers)


def test_batches_do_not_depend_on_workers_micro_batches_or_processes():
    augmentation = {"mix_group": 4}
    images = digits(augmentation)
    collate = Collate(config(augmentation).augmentation, 10, 0)
    whole = [torch.cat(part) for part in zip(*loader(images, collate, 16, 16))]
    assert whole[0].shape == (32, 3, SIZE, SIZE) and whole[1].shape == (32, 10)
    for micro, workers in ((16, 2), (4, 0), (8, 2)):
        batches = list(loader(images, collate, 16, micro, workers))
        assert len(batches) == 32 // micro
        assert equal([torch.cat(part) for part in zip(*batches)], whole)
    halves = [list(loader(images, collate, 16, 8, rank=rank, world=2)) for rank in (0, 1)]
    in_order = [batch for step in zip(*halves, strict=True) for batch in step]
    assert equal([torch.cat(part) for part in zip(*in_order)], whole)


@pytest.mark.parametrize(
    "alphas", [{"mixup": 0.8, "cutmix": 1.0}, {"mixup": 0.8, "cutmix": 0}, {"mixup": 0.0}]
)
def test_mixing_is_timms_on_each_group(alphas):
    augmentation = AugmentationConfig(**alphas, mix_group=4)
    collate = Collate(augmentation, 10, seed=3)
    samples = [(torch.randn(3, 6, 6), i % 10, Place(2, 8 + i, i)) for i in range(12)]
    images, targets = collate(samples)
    assert targets.dtype == images.dtype == torch.float32
    for group in range(3):
        part = samples[4 * group : 4 * group + 4]
        stacked = torch.stack([image for image, _, _ in part])
        labels = torch.tensor([label for _, label, _ in part])
        timms = Mixup(augmentation.mixup, augmentation.cutmix, label_smoothing=0.1, num_classes=10)
        with seeded("mix", 3, 2, 2 + group):
            expected = timms(stacked, labels)
        assert equal((images[4 * group :][:4], targets[4 * group :][:4]), expected)
    torch.testing.assert_close(targets.sum(1), torch.ones(12))


def test_both_kinds_of_mixing_come_in_their_share():
    collate = Collate(AugmentationConfig(mix_group=2, cutmix_share=0.25), 10, 0)
    ramp = torch.linspace(0, 1, 3 * 64).view(3, 8, 8)
    samples = [(ramp + i % 2, i % 2, Place(0, i, i)) for i in range(800)]
    images, _ = collate(samples)
    # CutMix leaves every pixel one of the two images'.
    whole = ((images - ramp).frac().abs() % 1 < 1e-4) | ((images - ramp) > 1 - 1e-4)
    share = whole.flatten(1).all(1)[::2].float().mean()
    assert 0.14 < share < 0.36  # 5 deviations of 400 draws


def test_halves_of_a_batch_collated_apart_equal_the_whole():
    images, collate = digits(), Collate(AugmentationConfig(mix_group=4), 10, 0)
    samples = [images.train[place] for place in places(8)]
    halves = [collate(samples[:4]), collate(samples[4:])]
    assert equal([torch.cat(part) for part in zip(*halves)], list(collate(samples)))


def test_mixing_differs_by_seed_epoch_and_group():
    samples = [(torch.randn(3, 4, 4), i, Place(0, i, i)) for i in range(2)]
    augmentation = AugmentationConfig(mix_group=2, cutmix=0.0)

    def targets(seed, epoch, first):
        moved = [(x, label, Place(epoch, first + i, i)) for i, (x, label, _) in enumerate(samples)]
        return Collate(augmentation, 10, seed)(moved)[1]

    drawn = [targets(*key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 2))]
    assert len({target.numpy().tobytes() for target in drawn}) == 4


def test_without_mixing_labels_are_only_smoothed_and_groups_do_not_matter():
    collate = Collate(AugmentationConfig(**UNMIXED, label_smoothing=0.2), 10, 0)
    images = [torch.randn(3, 4, 4) for _ in range(3)]
    stacked, targets = collate([(images[i], i, Place(0, 5 + i, i)) for i in range(3)])
    assert torch.equal(stacked, torch.stack(images))
    torch.testing.assert_close(targets, torch.full((3, 10), 0.02) + 0.8 * torch.eye(10)[:3])


@pytest.mark.parametrize("first, count", [(0, 6), (2, 4), (0, 2)])
def test_a_micro_batch_that_cuts_a_group_is_refused(first, count):
    samples = [(torch.zeros(3, 2, 2), 0, place) for place in places(count, first=first)]
    expected = (
        f"a micro-batch of {count} images from position {first} .*data.augmentation.mix_group 4; "
        "training.batch_size / processes and training.micro_batch_size must be multiples"
    )
    with pytest.raises(UserError, match=expected):
        Collate(AugmentationConfig(mix_group=4), 10, 0)(samples)


def test_the_data_sets_and_collation_travel_to_spawned_workers():
    collate = Collate(AugmentationConfig(mix_group=2), 10, 0)
    images = digits()
    samples = [images.train[place] for place in places(2)]
    assert equal(list(pickle.loads(pickle.dumps(collate))(samples)), list(collate(samples)))
    clone = pickle.loads(pickle.dumps(images.train.prepare))
    assert equal(clone(images.train.source[1].content, 3, Place(0, 1, 1))[0], samples[1][0])


def test_evaluation_batches_have_labels():
    images = digits(eval_resize=SIZE)
    stacked, labels = eval_collate([images.validation[i] for i in range(4)])
    assert stacked.shape == (4, 3, SIZE, SIZE) and labels.dtype == torch.int64


# Embedded


def test_digits_are_split_once_for_all_seeds_without_overlap():
    first, second = digits(seed=0), digits(seed=1)
    train, validation = (part.source for part in (first.train, first.validation))
    assert len(first.classes) == 10 and first.classes[3] == "3"
    assert (first.train_size, first.validation_size) == (len(train), len(validation))
    assert first.train_size + first.validation_size == 1797
    assert np.array_equal(train.pixels, second.train.source.pixels)
    rows = [{row.tobytes() for row in part.pixels} for part in (train, validation)]
    assert len(rows[0]) + len(rows[1]) > 1790 and len(rows[0] & rows[1]) <= 1
    for label in range(10):
        held, kept = ((part.labels == label).sum() for part in (validation, train))
        assert held == round(0.2 * (held + kept))


def test_digits_keep_their_pixels_at_their_own_size():
    from sklearn.datasets import load_digits

    train, validation, _ = module.embedded(8, 0.2)
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


def test_a_wrong_number_of_classes_is_refused():
    with pytest.raises(UserError, match="model.classes is 7, but .* has 10 .*set model.classes=10"):
        load(classes=7)


# Folders and shards


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
    assert (images.train_size, images.validation_size) == (12, 6)
    timms = create_transform(SIZE, crop_pct=SIZE / 20, interpolation="bicubic")
    for index, (label, _, content) in enumerate(records()["val"]):
        image = Image.open(io.BytesIO(content))
        assert equal(images.validation[index], (timms(image), label))
    for index, (label, _, content) in enumerate(records()["train"]):
        place = Place(1, 0, index)
        expected = images.train.prepare(content, label, place)
        assert equal(images.train[place], expected)


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_a_stream_gives_the_same_samples_and_counts_unreadable_ones(tmp_path, capfd, kind):
    write = {"parquet": write_parquet, "tar": write_tar}[kind]
    root = write(tmp_path / "images")
    mapped = opened(root, "shards")
    fields = {"source": "shards", "streaming": True, "lanes": 2}
    images = opened(root, augmentation=UNMIXED, **fields)
    assert images.train_size == 12 and images.classes == mapped.classes
    collate = Collate(config(UNMIXED).augmentation, 3, 0)
    stream = images.train.batches(
        global_batch=4, micro_batch=2, rank=0, world_size=1, first_step=0, last_step=3, workers=0,
        collate=list,
    )
    samples = [sample for batch in stream for sample in batch]
    assert sorted({sample[2].index for sample in samples}) == list(range(12))
    for sample in samples:
        assert equal(sample, mapped.train[sample[2]])
    assert collate(samples)[1].shape == (12, 3)
    make = images.train.prepare
    assert make(b"no image", 0, Place(0, 0, 7)) is None and 7 in make.unreadable
    assert re.search(r"not used: .*train\S*1\.\w+, row 1: cannot be read", capfd.readouterr().err)
    with pytest.raises(UserError, match="label 3 is out of range 0 .. 2 of model.classes 3"):
        make(jpeg(0), 3, Place(0, 0, 8))


@pytest.mark.parametrize("streaming", [False, True])
def test_unreadable_rows_of_parquet_are_named_by_shard_and_row(tmp_path, capfd, streaming):
    """A missing image too: counted and replaced, in the Arrow copy and in the stream."""
    root = write_parquet(tmp_path / "images", features=False)
    shard = root / "train-00001.parquet"
    table = parquet.read_table(shard)
    rows = table["image"].to_pylist()
    rows[1], rows[4] = None, {"bytes": b"no image", "path": None}
    column = pyarrow.array(rows, table["image"].type)
    parquet.write_table(table.set_column(0, "image", column), shard)
    images = opened(root, "shards", UNMIXED, streaming=streaming, lanes=2)
    capfd.readouterr()  # what copying the shards shows
    batches = loader(images, list, 12, 4, steps=1)
    if streaming:
        batches = images.train.batches(12, 4, 0, 1, 0, 3, 0, list)
    samples = [sample for batch in batches for sample in batch]
    assert len(samples) == 12 * (3 if streaming else 1) and None not in samples
    assert sorted(line.split(" (")[0] for line in capfd.readouterr().err.splitlines()) == [
        f"not used: {shard}, row 1: cannot be read", f"not used: {shard}, row 4: cannot be read",
    ]


def test_rows_name_their_file_too_where_they_know_it(tmp_path):
    mapped = opened(write_parquet(tmp_path / "images"), "shards").train.source
    shard = tmp_path / "images" / "train-00001.parquet"
    assert mapped[7].name == f"bee_3.JPEG ({shard}, row 1)"
    tar = opened(write_tar(tmp_path / "tars"), "shards").train.source
    assert tar[7].name == f"bee_3 in {tmp_path / 'tars' / 'train-1.tar'}"


@pytest.mark.parametrize("folder", [".", "data"])
def test_shards_are_found_by_a_word_of_their_name(tmp_path, folder):
    """The split may stand after a prefix and in data/, as the hub has it."""
    names = {
        "train": ["imagenet-train-000000.tar", "imagenet_train-000001.tar", "train.tar"],
        "val": ["imagenet1k-validation-00.tar", "val-0.tar"],
        None: ["imagenet-test-0.tar", "test-val.tar", "train-test.tar", "interval-0.tar",
               "._val-0.tar", "train.txt", "train.tar.json"],
    }
    root = tmp_path / folder
    root.mkdir(exist_ok=True)
    for name in (name for part in names.values() for name in part):
        (root / name).touch()
    for split in ("train", "val"):
        expected = [root / name for name in names[split]]
        assert module.open_shards(str(tmp_path), split) == (expected, "tar")


def test_shards_in_data_are_left_alone_where_the_folder_has_some(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-0.tar", "data/train-1.tar", "data/val-0.tar"):
        (tmp_path / name).touch()
    assert module.open_shards(str(tmp_path), "train").paths == [tmp_path / "train-0.tar"]
    with pytest.raises(UserError, match="holds no shard of val"):
        module.open_shards(str(tmp_path), "val")


def test_names_of_a_folder_are_kept_in_one_string(folder):
    files = opened(folder).train.source
    names = [files[i].name for i in range(len(files))]
    assert names == sorted(str(file) for file in folder.glob("train/*/*.JPEG"))
    (folder / "train" / "ant" / "über 1.jpg").write_bytes(jpeg(1))
    assert opened(folder).train.source[4].name.endswith("ant/über 1.jpg")


def break_folder(root, how):
    """One mistake in a good folder; its error."""
    if how == "missing":
        root.rename(root.with_name("elsewhere"))
        return f"data.path: {root} does not exist; expected a folder with train/ and val/"
    if how == "a file":
        root.rename(root.with_name("elsewhere"))
        root.write_bytes(b"")
        return f"data.path: {root} is a file; expected a folder with train/ and val/"
    if how == "no split":
        (root / "val").rename(root / "validation")
        return f"{root} has no folder val/; expected val/CLASS"
    if how == "no classes":
        (root / "train").rename(root / "old")
        (root / "train").mkdir()
        return f"{root}/train: no class folder in it; expected train/CLASS"
    if how == "flat":
        for file in [*root.glob("val/*/*")]:
            file.rename(root / "val" / file.name)
        for name in CLASSES:
            (root / "val" / name).rmdir()
        return (
            f"{root}/val: no class folder in it; expected val/CLASS/*.JPEG: sort its images into "
            "the class folders of train/ (the 1,000 of ImageNet, "
        )
    if how == "empty class":
        for file in (root / "train" / "bee").iterdir():
            file.rename(file.with_suffix(".txt"))
        return f"{root}/train/bee: no image in this class's folder; expected files that end in .jpg"
    where = {"extra in val": ("val", "train"), "extra in train": ("train", "val")}[how]
    (root / where[0] / "wasp").mkdir()
    return f"{root}: class wasp is in {where[0]}/ but not in {where[1]}/; both need"


MISTAKES = (
    "missing", "a file", "no split", "no classes", "flat", "empty class", "extra in val",
    "extra in train",
)


@pytest.mark.parametrize("how", MISTAKES)
def test_mistakes_in_a_folder_are_one_line(folder, how):
    expected = break_folder(folder, how)
    with pytest.raises(UserError) as caught:
        opened(folder)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_shards_that_are_missing_mixed_damaged_or_lack_a_column_are_one_line(tmp_path):
    root = tmp_path / "images"
    root.mkdir()

    def message():
        with pytest.raises(UserError) as caught:
            opened(root, "shards")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert message().endswith(
        f"{root} holds no shard of val; expected val*.parquet or val*.tar in it or in its data/, "
        "or such names after a prefix, as imagenet-val-000000.tar"
    )
    write_parquet(root)
    (root / "train-x.tar").write_bytes(b"")
    assert f"{root} holds both train-00000.parquet and train-x.tar" in message()
    (root / "train-x.tar").unlink()
    bad = root / "train-00001.parquet"
    table = parquet.read_table(bad)
    parquet.write_table(table.drop_columns("label"), bad)
    assert f"{bad}: no label in columns image; expected image and label" in message()
    bad.write_bytes(b"PAR1 nothing")
    assert f"{bad}: not a parquet file (" in message()


@pytest.mark.parametrize("label", [3, -1, None])
def test_labels_out_of_range_are_refused(tmp_path, label):
    root = write_parquet(tmp_path / "images", shards=1, features=False)
    table = parquet.read_table(root / "train-00000.parquet")
    labels = pyarrow.array([label, *table["label"].to_pylist()[1:]], pyarrow.int64())
    parquet.write_table(table.set_column(1, "label", labels), root / "train-00000.parquet")
    found = -1 if label is None else label
    expected = rf"shards of train: label {found} is out of range 0 \.\. 2 of model.classes 3"
    with pytest.raises(UserError, match=expected):
        opened(root, "shards")


def test_a_damaged_tar_is_one_line(tmp_path):
    root = write_tar(tmp_path / "images")
    (root / "train-0.tar").write_bytes(b"not a tar" * 100)
    with pytest.raises(UserError, match="shards of train: cannot be read as tar"):
        opened(root, "shards")


# Unreadable images


BROKEN = {
    "truncated": (lambda content: content[:-100], "image file is truncated"),
    "text": (lambda _: b"<html>404</html>", "cannot identify image file"),
    "empty": (lambda _: b"", "no bytes"),
    "absent": (None, "No such file"),
}


def spoil(file, how):
    change, reason = BROKEN[how]
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    return reason


@pytest.mark.parametrize("decoder", ["pil", "draft"])
@pytest.mark.parametrize("how", BROKEN)
def test_an_unreadable_training_image_is_replaced_by_the_next(folder, capfd, how, decoder):
    images = opened(folder, decoder=decoder)
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
    batches = loader(images, None, 12, 2, workers, steps=1)
    with pytest.raises(UserError) as caught:
        list(from_worker(batches))
    expected = r"3 images cannot be read, the last one \S+/(ant_0|bee_2|cat_3).JPEG \(cannot .*"
    assert re.fullmatch(expected + "data.max_unreadable 2", str(caught.value))


def test_workers_and_both_splits_share_one_count(folder, capfd):
    spoil(folder / "train" / "ant" / "ant_0.JPEG", "text")
    spoil(folder / "val" / "ant" / "ant_0.JPEG", "text")
    images = opened(folder, max_unreadable=2)
    for _ in range(2):  # new workers each time
        list(loader(images, list, 12, 2, workers=2, steps=1))
        list(DataLoader(images.validation, collate_fn=eval_collate, num_workers=1))
    assert images.train.unreadable.flags.sum() == 2
    assert capfd.readouterr().err.count("not used") == 2
    spoil(folder / "val" / "cat" / "cat_1.JPEG", "text")
    with pytest.raises(UserError, match="3 images cannot be read.*val/cat/cat_1"):
        images.validation[5]


def test_nothing_readable_is_an_error(folder):
    for file in folder.glob("train/*/*.JPEG"):
        spoil(file, "empty")
    images = opened(folder, max_unreadable=100)
    with pytest.raises(UserError, match="none of the 12 training images can be read"):
        images.train[Place(0, 0, 5)]


def test_unusual_but_sound_images_are_converted(folder):
    images = opened(folder)
    file = folder / "val" / "ant" / "ant_0.JPEG"
    for options in (
        {"mode": "L"},
        {"mode": "CMYK"},
        {"mode": "RGBA", "format": "PNG"},
        {"mode": "P", "format": "PNG"},
        {"mode": "1", "format": "PNG"},
    ):
        file.write_bytes(jpeg(1, **options))
        image, label = images.validation[0]
        assert label == 0 and image.shape == (3, SIZE, SIZE) and image.std() > 0.1
        assert images.train.prepare(str(file), 0, Place(0, 0, 0))[0].shape == (3, SIZE, SIZE)


def test_a_decompression_bomb_is_an_unreadable_image(folder, monkeypatch):
    images = opened(folder)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(module.Unreadable):
        images.train.prepare(jpeg(0, (13, 13)), 0, Place(0, 0, 0))
        images.train.prepare(jpeg(0, (90, 90)), 0, Place(0, 0, 0))


# The draft decoder


def drawn(decoder, content, crop_scale=(0.3, 1.0), count=12):
    transform = module.TrainTransform(
        SIZE, AugmentationConfig(**OFF | {"crop_scale": crop_scale}), decoder
    )
    return [transform(content, 0, epoch, 0) for epoch in range(count)]


def test_draft_crops_the_same_boxes():
    content = jpeg(3, (211, 157))
    exact, draft = (torch.stack(drawn(decoder, content)) for decoder in ("pil", "draft"))
    between = (exact - exact.roll(1, 0)).abs().mean()
    assert 0 < (exact - draft).abs().mean() < 0.03 < 0.1 * between


def test_draft_reduces_as_far_as_the_crop_allows(monkeypatch):
    sizes = []
    decode = module.decoded
    spy = lambda image: sizes.append(image.size) or decode(image)  # noqa: E731
    monkeypatch.setattr(module, "decoded", spy)
    for side, crop in ((128, 1.0), (127, 1.0), (41, 1.0), (31, 1.0), (256, 0.25)):
        drawn("draft", jpeg(3, (side, side)), (crop, crop), count=1)
    # 127 // 16 = 7: by 4, to a side of ceil(127 / 4); a quarter of the area has half the side
    assert [width for width, _ in sizes[:4]] == [16, 32, 21, 31]
    assert sizes[4][0] in (32, 64)


def test_draft_gives_pils_pixels_where_nothing_can_be_reduced():
    for content in (jpeg(4, (30, 24)), jpeg(4, (211, 157), format="PNG")):
        assert equal(drawn("draft", content), drawn("pil", content))


def test_evaluation_does_not_depend_on_the_decoder(folder):
    both = [opened(folder, decoder=decoder).validation[1] for decoder in ("pil", "draft")]
    assert equal(*both)
