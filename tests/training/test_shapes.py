"""training.data.shapes: the same images everywhere, of the drawn image's own number alone."""

import hashlib

import numpy as np
import pytest

from training.data import shapes
from vit_cifar5m import data

LAST = 2**40 + 7
NUMBERS = np.array([0, 1, 2, 3, 77, 12_345, 4_999_999, LAST])
ALL_ONES = 2**64 - 1
# By seed; then of whole images whose every random word is the least or the largest. Found equal to
# the same formulas in whole numbers of any size, one value at a time.
DIGESTS = {
    0: "316c6287d39241f7a6eabfe636d80894b42713a2bdd613a2f331e637dbaf42fc",
    5: "a12043c00307731adc03c7a99c314997d5c2ec32eca9cd6e6f2acc0232808e26",
    ALL_ONES: "513acf12c5007465984d8dd2ed8ee15eb9272236aabbc0520b88f39ce77d1aa7",
}
ENDS = {
    0: "e283b11476b8a1910221497996e52715e01bac13b13e8e68490f5ce5f2ceb965",
    ALL_ONES: "5efdfe92c9718805a5c465c7bc28e607d47aa8dffbc7ecd821ef96aeaf868862",
}


@pytest.fixture(scope="module")
def many():
    """5,000 images, normalised as for training, and their classes."""
    images, labels = shapes.draw(np.arange(5000), 3)
    return data.collate(list(zip(images, labels, strict=True)))[0].numpy(), labels


def test_the_images_of_a_seed_never_change():
    """Checksums of pixels: what a change of one means is that results do not compare any more."""
    for seed, digest in DIGESTS.items():
        images, labels = shapes.draw(NUMBERS, seed)
        assert images.dtype == np.uint8 and images.shape == (8, 3, 32, 32)
        assert labels.dtype == np.int64 and labels.tolist() == [0, 1, 2, 3, 7, 5, 9, 3]
        assert hashlib.sha256(images.tobytes()).hexdigest() == digest
    for word, digest in ENDS.items():
        words = np.full((2, shapes.WORDS), word, dtype=np.uint64)
        images = shapes._paint(np.array([4, 9]), words)
        assert hashlib.sha256(images.tobytes()).hexdigest() == digest


def test_an_image_depends_on_neither_batch_nor_order():
    alone = [shapes.draw([number], 1)[0][0] for number in NUMBERS]
    crowd = np.random.default_rng(0).permutation(np.concatenate([NUMBERS, np.arange(100, 190)]))
    images, labels = shapes.draw(crowd, 1)
    for number, image in zip(NUMBERS, alone, strict=True):
        place = np.flatnonzero(crowd == number)[0]
        np.testing.assert_array_equal(images[place], image)
        assert labels[place] == number % 10


def test_channels_are_normalised_by_the_constants_of_cifar(many):
    images = many[0]
    np.testing.assert_allclose(images.mean((0, 2, 3), np.float64), 0, atol=0.025)
    np.testing.assert_allclose(images.std((0, 2, 3)), 1, atol=0.02)


def test_no_pixel_tells_the_classes_apart(many):
    """The same mean and deviation everywhere, up to what 500 images per class leave open."""
    images, labels = many
    for power in (1, 2):
        values = images**power
        means = np.stack([values[labels == k].mean(0) for k in range(10)])
        scores = (means - values.mean(0)) / (values.std(0) / np.sqrt(500 * 10 / 9))
        assert np.sqrt((scores**2).mean()) == pytest.approx(1, abs=0.15)
        assert np.abs(scores).max() < 6


def readout(features, labels):
    """Accuracy of least squares on the last 2,000 images, fitted to the others."""
    features = np.hstack([features - features.mean(0), np.ones((len(features), 1))])
    features /= features.std(0) + 1e-3
    train, test = features[:-2000], features[-2000:]
    gram = train.T @ train + 0.02 * len(train) * np.eye(train.shape[1])
    weights = np.linalg.solve(gram, train.T @ np.eye(10)[labels[:-2000]])
    return ((test @ weights).argmax(1) == labels[-2000:]).mean()


def test_stripes_tell_what_pixels_do_not(many):
    """A readout of pixels is near chance, one of the middle's power spectrum is not."""
    images, labels = many
    grey = images.mean(1)
    spectrum = np.abs(np.fft.rfft2(images[:, :, 8:24, 8:24])).sum(1).reshape(len(images), -1)
    assert readout(grey[:, ::2, ::2].reshape(len(images), -1), labels) < 0.16
    assert readout(np.log(1 + spectrum), labels) > 0.35


def test_stripes_have_the_direction_and_period_asked_for():
    for direction, frequency in ((0, 8192), (250, 11585), (500, 16384), (750, 11585)):
        wave = shapes.stripes(*(np.array([v]) for v in (direction, frequency, 1000)))[0]
        assert -128 <= wave.min() < -100 and 100 < wave.max() <= 127
        spectrum = np.abs(np.fft.fft2(wave - wave.mean()))
        row, column = np.unravel_index(spectrum.argmax(), spectrum.shape)
        angle, cycles = np.pi * direction / 1000, 32 * frequency / 65536
        expected = np.rint([cycles * np.sin(angle), cycles * np.cos(angle)])
        found = np.array([row, column])
        assert any((sign * expected % 32 == found).all() for sign in (1, -1))
