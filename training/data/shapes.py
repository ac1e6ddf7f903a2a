"""Drawn images: a stand-in for CIFAR-5M, image i < 2^63 a pure function of (seed, i).

A blob of random place, size, tilt and colours is filled with stripes, on a striped ground,
under noise. The class is two things at once: which of five directions the blob's stripes
take, and whether they are coarser (classes 0 to 4) or finer (5 to 9) than the ground's. Colours,
contrasts, phases, places and the ground's direction say nothing of it.

Phases are uniform, so every value of every pixel is equally likely in all classes: zero weights
minimise the expected cross-entropy, ln 10, of a linear classifier of pixels. Directions vary within
a class by more than half the distance to the next one, and some stripes are fainter than the noise:
no classifier gets all images right.

All arithmetic is of whole numbers that do not overflow their type, or wrap in unsigned ones as
they are defined to; the one table is rounded to 14 bits. So the images are the same on every
machine and under every version of numpy.
"""

import math

import numpy as np

SIZE = 32
CLASSES = 10
DIRECTIONS = 5
CHUNK = 32  # images drawn together: their fields stay in the processor's cache

GOLDEN, MIX_1, MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
PARAMETERS = 27  # random numbers of an image, besides a byte of noise for every value
WORDS = PARAMETERS + 3 * SIZE * SIZE // 8
STEPS = np.arange(1, WORDS + 1, dtype=np.uint64) * GOLDEN

HALF_TURN = 1000  # directions are told apart to 0.18 degrees
ONE = 1 << 14  # 1.0 of the tables
COSINE, SINE = (
    np.array([round(ONE * function(math.pi * k / HALF_TURN)) for k in range(HALF_TURN)], np.int32)
    for function in (math.cos, math.sin)
)
GRID = np.arange(SIZE, dtype=np.int32)

# Ranges that are drawn from, both ends included. Lengths are in 1/16 pixel, frequencies in 1/65536
# of a period per pixel, colours and contrasts in steps of brightness.
JITTER = 130  # of a blob's direction, triangular; its neighbours are 200 away
MIDDLE = (8000, 13500)  # geometric mean of the two frequencies: periods of 4.9 to 8.2 pixels
RATIO = (290, 370)  # of a frequency to that mean, in 1/256
CENTRE = (16 * 9, 16 * 22)
RADIUS = (16 * 8, 16 * 16)
COLOUR = 70
BLOB_CONTRAST = (16, 190)
GROUND_CONTRAST = (0, 120)
NOISE = (5, 90)
# Make the channels' means and deviations over all images those of CIFAR-10, by which all sources
# are normalised. In 1/256: how far colours and contrasts of a channel are stretched.
MEAN = np.array([127, 124, 114], dtype=np.int32)
STRETCH = np.array([299, 293, 331], dtype=np.int32)


def mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood 2014) of uint64, in place."""
    words ^= words >> np.uint64(30)
    words *= MIX_1
    words ^= words >> np.uint64(27)
    words *= MIX_2
    words ^= words >> np.uint64(31)
    return words


def random_words(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Random uint64 [B, WORDS]: of each image its own, whatever the others are."""
    start = mixed(np.array([seed], dtype=np.uint64))
    keys = mixed(start + numbers.astype(np.uint64) * GOLDEN)
    return mixed(keys[:, None] + STEPS)


class Draws:
    """An image's random numbers, [B, PARAMETERS] words, given out one after the other."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = (words >> np.uint64(32)).astype(np.int64)
        self.used = 0

    def one(self, low: int, high: int) -> np.ndarray:
        """A whole number in low .. high for each image, int32 [B]."""
        return self.some(1, low, high)[:, 0]

    def some(self, count: int, low: int, high: int) -> np.ndarray:
        """The same for several numbers, int32 [B, count]."""
        taken = self.words[:, self.used : self.used + count]
        self.used += count
        return (low + (taken * (high - low + 1) >> 32)).astype(np.int32)


def draw(numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [B, 3, 32, 32] of these numbers (0 and up), and their classes int64 [B].

    The class is number % 10, so that every ten neighbours have one of each; the seed, in
    0 .. 2^64 - 1, decides all the rest.
    """
    numbers = np.asarray(numbers, dtype=np.int64)
    images = np.empty((len(numbers), 3, SIZE, SIZE), dtype=np.uint8)
    for first in range(0, len(numbers), CHUNK):
        chunk = slice(first, first + CHUNK)
        images[chunk] = _paint(numbers[chunk] % CLASSES, random_words(numbers[chunk], seed))
    return images, numbers % CLASSES


def _paint(classes: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Images of these classes from random words, int16 in 0 .. 255."""
    draws = Draws(words[:, :PARAMETERS])
    inside, blob, ground = _fields(classes, draws)
    colour, other = _colour(draws, COLOUR), _colour(draws, COLOUR)
    image = _noise(words[:, PARAMETERS:], draws)
    layers = (
        (inside, other - colour, 6),
        (blob, _contrast(draws, BLOB_CONTRAST), 7),
        (ground, _contrast(draws, GROUND_CONTRAST), 7),
    )
    for channel in range(3):
        image[:, channel] += _spread(MEAN[channel] + colour[:, channel])
        for field, strength, shift in layers:
            layer = field * _spread(strength[:, channel])
            layer >>= shift
            image[:, channel] += layer
    return np.clip(image, 0, 255, out=image)


def _fields(classes: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blob's place (0 .. 64), its stripes, the ground's (-128 .. 127): int16 [B, 32, 32]."""
    jitter = draws.some(2, -JITTER, JITTER).sum(axis=1) >> 1
    direction = (classes % DIRECTIONS * (HALF_TURN // DIRECTIONS) + jitter) % HALF_TURN
    middle, ratio = draws.one(*MIDDLE), draws.one(*RATIO)
    fine, coarse = middle * ratio >> 8, (middle << 8) // ratio
    finer = classes >= DIRECTIONS
    inside = blob_mask(draws)
    blob = stripes(direction, np.where(finer, fine, coarse), draws.one(0, 65535))
    other_direction = draws.one(0, HALF_TURN - 1)
    ground = stripes(other_direction, np.where(finer, coarse, fine), draws.one(0, 65535))
    for field, share in ((blob, inside), (ground, 64 - inside)):
        field *= share
        field >>= 6
    return inside, blob, ground


def stripes(direction: np.ndarray, frequency: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """Triangle waves in -128 .. 127 along a direction, int16 [B, 32, 32]."""
    across = (frequency * COSINE[direction] // ONE)[:, None] * GRID + phase[:, None]
    down = (frequency * SINE[direction] // ONE)[:, None] * GRID
    turns = across.astype(np.uint16)[:, None, :] + down.astype(np.uint16)[:, :, None]
    wave = turns.view(np.int16)
    wave ^= wave >> 15  # the second half of a period back down
    wave >>= 7
    wave -= 128
    return wave


def blob_mask(draws: Draws) -> np.ndarray:
    """An ellipse: 64 inside, 0 outside, in steps over about a pixel between; int16 [B, 32, 32]."""
    dx, dy = (16 * GRID - draws.one(*CENTRE)[:, None] for _ in range(2))
    radii = [draws.one(*RADIUS)[:, None] for _ in range(2)]
    tilt = draws.one(0, HALF_TURN - 1)
    cosine, sine = COSINE[tilt][:, None], SINE[tilt][:, None]
    square = np.zeros((len(tilt), SIZE, SIZE), dtype=np.int32)
    for a, b, radius in ((cosine, sine, radii[0]), (-sine, cosine, radii[1])):
        across, down = (256 * part // ONE // radius for part in (a * dx, b * dy))
        along = across[:, None, :] + down[:, :, None]  # in 1/256 of the radius
        along *= along
        square += along
    inside = (65536 + 8192 - square) >> 8
    return np.clip(inside, 0, 64, out=inside).astype(np.int16)


def _colour(draws: Draws, reach: int) -> np.ndarray:
    """A random colour about grey, int32 [B, 3]."""
    return draws.some(3, -reach, reach) * STRETCH >> 8


def _contrast(draws: Draws, strength: tuple[int, int]) -> np.ndarray:
    """How far dark stripes are from bright ones, of either sign by channel: int32 [B, 3]."""
    return draws.one(*strength)[:, None] * draws.some(3, -128, 128) * STRETCH >> 15


def _noise(words: np.ndarray, draws: Draws) -> np.ndarray:
    """Uniform noise of a strength of the image's own, int16 [B, 3, 32, 32]."""
    noise = words.astype("<u8", copy=False).view(np.int8).astype(np.int16)
    noise *= _spread(draws.one(*NOISE)).reshape(-1, 1)
    noise >>= 7
    return noise.reshape(-1, 3, SIZE, SIZE)


def _spread(values: np.ndarray) -> np.ndarray:
    """A number per image, to be combined with its pixels."""
    return values.astype(np.int16)[:, None, None]
