"""vit_imagenet.transforms: augmentation and mixing as functions of a sample's place."""

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import Mixup, create_transform
from torch.utils.data import DataLoader

from tests.vit_imagenet.test_data import SIZE, UNMIXED, digits, equal
from training.data.sampling import EpochPlaces, Place
from vit_imagenet.config import AugmentationConfig
from vit_imagenet.transforms import Collate, seeded

OFF = {"crop_scale": (1.0, 1.0), "flip": 0.0, "rand_augment": None, "erasing": 0.0}


def places(count, epoch=0, first=0):
    return [Place(epoch, first + i, i) for i in range(count)]


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
    images, collate = digits(), Collate(AugmentationConfig(mix_group=2), 10, 0)
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
    for values in zip(*(draws(*key) for key in keys), strict=True):
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


def loader(images, collate, batch, micro, workers=0, rank=0, world=1, steps=2, seed=0):
    ids = EpochPlaces(len(images.train), seed, batch, micro, rank, world, 0, steps)
    return DataLoader(images.train, batch_sampler=ids, collate_fn=collate, num_workers=workers)


def test_batches_do_not_depend_on_workers_micro_batches_or_processes():
    augmentation = {"mix_group": 4}
    images = digits(augmentation)
    collate = Collate(AugmentationConfig(**augmentation), 10, 0)
    whole = [torch.cat(part) for part in zip(*loader(images, collate, 16, 16), strict=True)]
    assert whole[0].shape == (32, 3, SIZE, SIZE) and whole[1].shape == (32, 10)
    for micro, workers in ((16, 2), (4, 0), (8, 2)):
        batches = list(loader(images, collate, 16, micro, workers))
        assert len(batches) == 32 // micro
        assert equal([torch.cat(part) for part in zip(*batches, strict=True)], whole)
    halves = [list(loader(images, collate, 16, 8, rank=rank, world=2)) for rank in (0, 1)]
    in_order = [batch for step in zip(*halves, strict=True) for batch in step]
    assert equal([torch.cat(part) for part in zip(*in_order, strict=True)], whole)


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


def test_the_data_sets_and_collation_travel_to_spawned_workers():
    collate = Collate(AugmentationConfig(mix_group=2), 10, 0)
    images = digits()
    samples = [images.train[place] for place in places(2)]
    assert equal(list(pickle.loads(pickle.dumps(collate))(samples)), list(collate(samples)))
    clone = pickle.loads(pickle.dumps(images.train.prepare))
    assert equal(clone(images.train.source[1].content, 3, Place(0, 1, 1))[0], samples[1][0])
