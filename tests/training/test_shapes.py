"""training.data.shapes: the same images everywhere, of the drawn image's own number alone."""

import hashlib

import numpy as np
import pytest

from training.data import shapes
from vit_cifar5m import data

LAST = 2**40 + 7
NUMBERS = np.array([0, 1, 2, 3, 77, 12_345, 4_999_999, LAST])
ALL_ONES, WORD = 2**64 - 1, 2**64


@pytest.fixture(scope="module")
def many():
    """5,000 images, normalised as for training, and their classes."""
    images, labels = shapes.draw(np.arange(5000), 3)
    return data.collate(list(zip(images, labels, strict=True)))[0].numpy(), labels


def python_words(number, seed):
    def mixed(word):
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mixed((mixed(seed) + number * golden) % WORD)
    return [mixed((key + k * golden) % WORD) for k in range(1, shapes.WORDS + 1)]


def python_image(label, words):
    rest = iter(words[: shapes.PARAMETERS])
    low = lambda bounds: bounds[0] + ((next(rest) >> 32) * (bounds[1] - bounds[0] + 1) >> 32)
    cosine, sine = shapes.COSINE.tolist(), shapes.SINE.tolist()
    stretch, mean = shapes.STRETCH.tolist(), shapes.MEAN.tolist()

    def direction(jitter):
        return (label % 5 * 200 + jitter) % 1000

    angle = direction((low((-130, 130)) + low((-130, 130))) >> 1)
    middle, ratio = low(shapes.MIDDLE), low(shapes.RATIO)
    fine, coarse = middle * ratio >> 8, (middle << 8) // ratio
    centre = [low(shapes.CENTRE), low(shapes.CENTRE)]
    radius = [low(shapes.RADIUS), low(shapes.RADIUS)]
    tilt = low((0, 999))
    phase, ground_angle, ground_phase = low((0, 65535)), low((0, 999)), low((0, 65535))

    def wave(x, y, angle, frequency, phase):
        across = frequency * cosine[angle] // shapes.ONE * x + phase
        turn = (across + frequency * sine[angle] // shapes.ONE * y) % 65536
        return ((turn if turn < 32768 else 65535 - turn) >> 7) - 128

    def inside(x, y):
        dx, dy = 16 * x - centre[0], 16 * y - centre[1]
        pairs = (cosine[tilt], sine[tilt]), (-sine[tilt], cosine[tilt])
        square = 0
        for (a, b), r in zip(pairs, radius, strict=True):
            square += (256 * (a * dx) // shapes.ONE // r + 256 * (b * dy) // shapes.ONE // r) ** 2
        return min(max((65536 + 8192 - square) >> 8, 0), 64)

    def colour():
        return [low((-shapes.COLOUR, shapes.COLOUR)) * stretch[c] >> 8 for c in range(3)]

    def contrast(bounds):
        strength = low(bounds)
        return [strength * low((-128, 128)) * stretch[c] >> 15 for c in range(3)]

    ground, blob = colour(), colour()
    strength = low(shapes.NOISE)
    noise = b"".join(word.to_bytes(8, "little") for word in words[shapes.PARAMETERS :])
    blob_contrast = contrast(shapes.BLOB_CONTRAST)
    ground_contrast = contrast(shapes.GROUND_CONTRAST)
    assert next(rest, None) is None
    image = np.empty((3, 32, 32), dtype=np.uint8)
    for c, y, x in np.ndindex(image.shape):
        share = inside(x, y)
        byte = noise[(c * 32 + y) * 32 + x]
        value = mean[c] + ground[c] + ((byte - 256 * (byte > 127)) * strength >> 7)
        value += share * (blob[c] - ground[c]) >> 6
        own, other = (coarse, fine) if label < 5 else (fine, coarse)
        stripe = wave(x, y, angle, own, phase) * share >> 6
        value += stripe * blob_contrast[c] >> 7
        stripe = wave(x, y, ground_angle, other, ground_phase) * (64 - share) >> 6
        value += stripe * ground_contrast[c] >> 7
        image[c, y, x] = min(max(value, 0), 255)
    return image


def test_images_are_those_of_unbounded_whole_numbers():
    for number, seed in ((0, 0), (LAST, 5), (4_999_999, ALL_ONES)):
        images, labels = shapes.draw([number], seed)
        expected = python_image(number % 10, python_words(number, seed))
        np.testing.assert_array_equal(images[0], expected)
        assert labels.tolist() == [number % 10]


@pytest.mark.parametrize("parameters", [0, ALL_ONES])
def test_nothing_overflows_at_the_ends_of_all_ranges(parameters):
    words = python_words(0, 0)
    words[: shapes.PARAMETERS] = [parameters] * shapes.PARAMETERS
    drawn = shapes._paint(np.array([9]), np.array([words], dtype=np.uint64))
    np.testing.assert_array_equal(drawn[0], python_image(9, words))


def test_the_images_of_a_seed_never_change():
    """A checksum of pixels: what a change of it means is that results do not compare any more."""
    images, labels = shapes.draw(NUMBERS, 0)
    assert images.dtype == np.uint8 and images.shape == (8, 3, 32, 32)
    assert labels.dtype == np.int64 and labels.tolist() == [0, 1, 2, 3, 7, 5, 9, 3]
    digest = hashlib.sha256(images.tobytes()).hexdigest()
    assert digest == "316c6287d39241f7a6eabfe636d80894b42713a2bdd613a2f331e637dbaf42fc"


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
