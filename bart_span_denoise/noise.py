"""BART's corruption: sentences in random order, then spans of text behind one [MASK] each.

Source: Dinan, Yaida & Zhang, Part II section 2 and footnotes 45-50, who ran fairseq's
`DenoisingDataset` (mask 0.3, mask_length span-poisson, poisson_lambda 3, replace_length 1,
mask_random 0, permute_sentences 1). The paper says that 30 % of the tokens are corrupted; fairseq
corrupts 26.7 to 26.8 %, because spans that overlap are not made up for. Both are offered.

All draws of a sample come from one counter-based generator keyed by (seed, epoch, index), so the
corruption is the same in any worker, process, order or resumed run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np

Unit = Literal["word", "token"]
FractionMode = Literal["fairseq", "exact"]

# Third word of Philox's counter: the data order uses the same keys, and 0 here.
_STREAM = 1
MASKED = -1  # in `Noise.places`: a mask, which stands for no one place


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one sample."""
    key = np.array([seed, epoch], dtype=np.uint64)
    # In the counter's highest word: no sample reaches the numbers of the next.
    counter = np.array([0, 0, _STREAM, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


@dataclass(frozen=True, eq=False)
class Noise:
    """Corrupts samples: `noise(tokens, sentence_ends, seed=, epoch=, index=)`.

    The defaults are what the paper's authors ran; the paper's text says fraction_mode "exact".

    fraction_mode "fairseq": ceil(fraction * units) units are to be corrupted. Lengths are drawn
    from Poisson(poisson_lambda) until they sum to that, the last one cut. Those above zero become
    spans at distinct random starts; they may overlap or touch, and a span that begins within
    another adds no mask. Those of length zero become masks inserted anywhere. Text before the
    sample's first word start is never masked.

    fraction_mode "exact": fraction * tokens tokens, rounded half up, are corrupted, by spans that
    neither overlap nor touch; spans of length zero are separate masks between two words, so
    two masks are never adjacent. With unit "word" spans are taken in random order, and the one that
    reaches the budget is cut where words end nearest to it (at random if two ends are as near), so
    the number of corrupted tokens is off by at most half the longest word, and is right on average.
    A sentence's first token starts a word. Where there are more spans than places to keep them
    apart (fractions near 1, samples of a few words), the last ones are merged into one.

    The settings are those of `bart_span_denoise.config`, which holds their bounds.
    """

    mask_id: int
    word_starts: np.ndarray | None = None
    """Bool [V]: whether a token begins a word. Only unit "word" needs it."""
    unit: Unit = "word"
    """What spans are counted in and made of: whole words, or tokens."""
    fraction: float = 0.3
    fraction_mode: FractionMode = "fairseq"
    poisson_lambda: float = 3.0
    """Mean span length in units; at least 1, below which the text would grow by its masks."""
    permute: bool = True
    """Whether sentences are put in random order, every order being equally likely."""

    def __call__(
        self,
        tokens: np.ndarray,
        sentence_ends: np.ndarray,
        *,
        seed: int,
        epoch: int,
        index: int,
    ) -> np.ndarray:
        """The corrupted sample (int64 [L'], a new array) of one place in training.

        tokens: ints [L], start token and end token included; these two stay where they are.
        sentence_ends: ints [S], rising: sentence i is tokens[sentence_ends[i - 1] :
        sentence_ends[i]], the first one begins at 1 and the last one ends at L - 1. Empty when
        there is no token between start and end.

        L' can exceed L by inserted masks in samples of a few words; at hundreds of words and
        poisson_lambda 3 it is about 0.8 L.
        """
        places = self.places(tokens, sentence_ends, seed=seed, epoch=epoch, index=index)
        return np.where(places == MASKED, self.mask_id, np.asarray(tokens)[places])

    def places(
        self,
        tokens: np.ndarray,
        sentence_ends: np.ndarray,
        *,
        seed: int,
        epoch: int,
        index: int,
    ) -> np.ndarray:
        """Where each token of the corrupted sample stands in `tokens` (int64 [L']); MASKED for a
        mask. Arguments are those of a call."""
        tokens, sentence_ends = np.asarray(tokens), np.asarray(sentence_ends)
        rng = generator(seed, epoch, index)
        content, lengths = np.arange(1, len(tokens) - 1), _sentence_lengths(sentence_ends)
        if self.permute:
            content, lengths = permute_sentences(content, lengths, rng)
        if self.fraction_mode == "fairseq":
            content = self._infill_as_fairseq(content, self._words(tokens[content]), rng)
        else:
            words = self._words(tokens[content], np.cumsum(lengths) - lengths)
            content = self._infill_exactly(content, words, rng)
        return np.concatenate(([0], content, [len(tokens) - 1]))

    def _words(self, content: np.ndarray, starts: np.ndarray | None = None) -> np.ndarray:
        """Bounds [W + 1]: unit w is content[bounds[w] : bounds[w + 1]]; `starts` begin one too."""
        if self.unit == "token":
            return np.arange(len(content) + 1)
        begins = self.word_starts[content]
        if starts is not None:
            begins[starts] = True
        return np.append(np.flatnonzero(begins), len(content))

    def _infill_as_fairseq(
        self, content: np.ndarray, words: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """The content (overwritten) with overlapping spans behind masks, and masks inserted."""
        count = len(words) - 1
        # fairseq multiplies in single precision: 30 % of 50 words are 16 words.
        budget = math.ceil(np.float32(count) * np.float32(self.fraction))
        if budget == 0:
            return content
        lengths = _span_lengths(budget, self.poisson_lambda, rng)
        spans = lengths[lengths > 0]
        first = rng.permutation(count)[: len(spans)]
        begin, end = words[first], words[np.minimum(first + spans, count)]
        covering = _coverage(begin, end, len(content))
        masks = begin[covering[begin] == 1]
        content[masks] = MASKED
        kept = covering == 0
        kept[masks] = True
        return self._insert_as_fairseq(content[kept], len(lengths) - len(spans), rng)

    def _insert_as_fairseq(
        self, content: np.ndarray, count: int, rng: np.random.Generator
    ) -> np.ndarray:
        """The content with masks inserted at random."""
        if count == 0:
            return content
        # fairseq passes the count as a share of the sample, start and end included, and rounds
        # up: at times that is one more.
        size = len(content) + 2
        count = math.ceil(size * (count / size))
        positions = rng.choice(len(content) + count, size=count, replace=False, shuffle=False)
        return _insert(content, positions)

    def _infill_exactly(
        self, content: np.ndarray, words: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """The content with spans that do not touch, of the wanted total length, behind masks."""
        budget = _share(self.fraction, len(content))
        if budget == 0:
            return content
        first, lengths = self._spans(budget, words, rng)
        begin, end = words[first], words[first + lengths]
        begin.sort()
        kept = _coverage(begin, end, len(content)) == 0
        kept_before = np.append(0, np.cumsum(kept))
        positions = kept_before[begin] + np.arange(len(begin))
        return _insert(content[kept], positions)

    def _spans(
        self, budget: int, words: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """First words and lengths in words of spans of about `budget` tokens in all."""
        count = len(words) - 1
        # As many words as hold the budget on average, and a tenth more where words differ.
        laid = -(-budget * count // words[-1])
        while True:
            laid = laid if self.unit == "token" else min(count, laid + -(-laid // 10))
            first, lengths = _lay_out(count, laid, self.poisson_lambda, rng)
            total = np.cumsum(words[first + lengths] - words[first])
            if total[-1] >= budget:
                return _cut(first, lengths, total, budget, words, rng)


def permute_sentences(
    content: np.ndarray, lengths: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Content [N] with its sentences (lengths [S], summing to N) in random order; new lengths."""
    order = rng.permutation(len(lengths))
    begin = np.cumsum(lengths) - lengths
    moved = lengths[order]
    shift = begin[order] - (np.cumsum(moved) - moved)
    return content[np.arange(len(content)) + np.repeat(shift, moved)], moved


# Spans


def _span_lengths(budget: int, poisson_lambda: float, rng: np.random.Generator) -> np.ndarray:
    """Poisson lengths up to the one with which they reach the budget, that one cut to fit."""
    draws = 8 + math.ceil(1.2 * budget / poisson_lambda)
    lengths = rng.poisson(poisson_lambda, size=draws)
    while (total := np.cumsum(lengths))[-1] < budget:
        lengths = np.append(lengths, rng.poisson(poisson_lambda, size=draws))
    last = int(np.searchsorted(total, budget))
    lengths[last] -= total[last] - budget
    return lengths[: last + 1]


def _lay_out(
    count: int, covered: int, poisson_lambda: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """First units and lengths of spans over `covered` of `count` units, one unit or more apart.

    Every gap between two kept units, or at either end, has at most one span, and every choice of
    gaps is equally likely. The order is that of drawing, not that in the text.
    """
    lengths = _span_lengths(covered, poisson_lambda, rng)
    gaps = count - covered + 1
    if len(lengths) > gaps:
        lengths = np.append(lengths[: gaps - 1], lengths[gaps - 1 :].sum())
    gap = rng.permutation(gaps)[: len(lengths)]
    in_text = np.argsort(gap)
    before = np.empty_like(lengths)
    before[in_text] = np.cumsum(lengths[in_text]) - lengths[in_text]
    return gap + before, lengths


def _cut(
    first: np.ndarray,
    lengths: np.ndarray,
    total: np.ndarray,
    budget: int,
    words: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The spans up to the one with which their `total` reaches the budget, that one cut to fit."""
    last = int(np.searchsorted(total, budget))
    reach = words[first[last] : first[last] + lengths[last] + 1]
    missing = budget - (total[last] - (reach[-1] - reach[0]))
    distance = np.abs(reach - reach[0] - missing)
    nearest = np.flatnonzero(distance == distance.min())
    lengths[last] = nearest[rng.integers(len(nearest))]
    count = last + 1 if lengths[last] else last
    return first[:count], lengths[:count]


def _coverage(begin: np.ndarray, end: np.ndarray, size: int) -> np.ndarray:
    """How many of the ranges begin .. end - 1 cover each of `size` tokens."""
    opened = np.bincount(begin, minlength=size + 1)
    closed = np.bincount(end, minlength=size + 1)
    return np.cumsum(opened - closed)[:size]


def _insert(content: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The content with masks at the given distinct positions of the result."""
    is_mask = np.zeros(len(content) + len(positions), dtype=bool)
    is_mask[positions] = True
    result = np.full(len(is_mask), MASKED, dtype=np.int64)
    result[~is_mask] = content
    return result


@lru_cache(maxsize=4096)
def _share(fraction: float, size: int) -> int:
    """fraction * size, rounded half up, the fraction being the decimal that was written."""
    return math.floor(Fraction(str(fraction)) * size + Fraction(1, 2))


def _sentence_lengths(ends: np.ndarray) -> np.ndarray:
    """Tokens of each sentence."""
    return np.concatenate((ends[:1] - 1, ends[1:] - ends[:-1]), dtype=np.int64, casting="unsafe")
