"""The corruption: a pure function of its place, fairseq's statistics, and the exact setting."""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from bart_span_denoise import fairseq_interop
from bart_span_denoise.noise import MASKED, Noise, generator

# fairseq takes seconds to import: one process has all tests that do.
pytestmark = pytest.mark.xdist_group("fairseq")
START, END, FULL_STOP = 0, 2, 17
VOCABULARY = 3000
MASK = VOCABULARY - 1
# Even ids begin a word; a full stop, as GPT-2's BPE has it, does not.
WORD_STARTS = np.arange(VOCABULARY) % 2 == 0
UNITS, MODES = ("word", "token"), ("fairseq", "exact")
ALL = [(unit, mode) for unit in UNITS for mode in MODES]


def noise(unit="word", fraction_mode="fairseq", **fields):
    """The noise of this vocabulary."""
    return Noise(MASK, WORD_STARTS, unit=unit, fraction_mode=fraction_mode, **fields)


def text(seed, size=512, full_stops=False):
    """A sample of distinct tokens, 1.4 per word, and its ends, of sentences of some 25 tokens.

    With full_stops, sentences end with this one token, and begin with a token that is no word
    start, as GPT-2's BPE encodes the beginning of a line.
    """
    rng = np.random.default_rng([seed, size])
    ends = rng.random(size) < 1 / 25
    ends[1:] &= ~ends[:-1]
    ends[-2:] = [False, True][-size:] if size else []
    begins = rng.random(size) < 0.7
    if full_stops:
        begins[ends] = begins[:1] = False
        begins[1:][ends[:-1]] = False
    ids = 20 + 2 * rng.permutation((VOCABULARY - 30) // 2)[:size] + ~begins
    if full_stops:
        ids[ends] = FULL_STOP
    return np.concatenate(([START], ids, [END])), np.flatnonzero(ends) + 2


def corrupt(noise, sample, seed=0, epoch=0, index=0):
    return noise(*sample, seed=seed, epoch=epoch, index=index)


@pytest.mark.parametrize(("unit", "mode"), ALL)
def test_places_say_where_every_token_of_the_source_stands(unit, mode):
    """Distinct tokens: what the source has is found in the sample by its id."""
    sample, ours = text(3), noise(unit, mode)
    places = ours.places(*sample, seed=1, epoch=2, index=3)
    source = ours(*sample, seed=1, epoch=2, index=3)
    np.testing.assert_array_equal(places == MASKED, source == MASK)
    known = places != MASKED
    np.testing.assert_array_equal(sample[0][places[known]], source[known])
    assert len(set(places[known])) == known.sum()
    assert 0.15 < np.isin(sample[0][1:-1], source, invert=True).mean() < 0.45


def permuted(noise, sample, **place):
    """The sample before its spans are drawn: what a fraction of 0 leaves."""
    return corrupt(replace(noise, fraction=0.0), sample, **place)


def gaps(clean, corrupted):
    """Removed tokens and masks [L_kept - 1, 2] between tokens that stayed; distinct tokens only."""
    place = np.full(VOCABULARY, -1)
    place[clean] = np.arange(len(clean))
    stayed = np.flatnonzero(corrupted != MASK)
    places = place[corrupted[stayed]]
    assert (places >= 0).all(), "a token that was not there"
    removed = np.diff(places) - 1
    assert (removed >= 0).all(), "not in the order of the clean text"
    return np.stack((removed, np.diff(stayed) - 1), axis=1)


def close(ours, theirs, errors=4.0):
    """Columns of per-sample statistics agree in the mean, by the spread of paired differences."""
    difference = np.asarray(ours, float) - np.asarray(theirs, float)
    error = difference.std(axis=0, ddof=1) / np.sqrt(len(difference))
    score = difference.mean(axis=0) / np.where(error > 0, error, 1)
    assert (np.abs(score) < errors).all(), score.round(1)


# A pure function of seed, epoch and index


def test_same_in_any_order_and_in_a_fresh_process():
    script = """
import json, sys
import numpy as np
from bart_span_denoise.noise import Noise
np.random.seed(int(sys.argv[1]))
case = json.load(sys.stdin)
starts = np.array(case["starts"])
for unit, mode in case["all"]:
    noise = Noise(case["mask"], starts, unit=unit, fraction_mode=mode)
    for index in (4, 0, 9):
        found = noise(case["tokens"], case["ends"], seed=1, epoch=2, index=index)
        print(json.dumps(found.tolist()))
"""
    tokens, ends = text(0)
    case = {"mask": MASK, "starts": WORD_STARTS.tolist(), "tokens": tokens.tolist()}
    case = json.dumps({**case, "ends": ends.tolist(), "all": ALL})
    command, root = [sys.executable, "-c", script, "77"], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, input=case, capture_output=True, text=True, cwd=root, check=True)
    there = [json.loads(line) for line in done.stdout.splitlines()]
    places = [(*setting, index) for setting in ALL for index in (4, 0, 9)]
    here = {
        (unit, mode, index): corrupt(noise(unit, mode), (tokens, ends), 1, 2, index).tolist()
        for unit, mode, index in reversed(places)
    }
    assert there == [here[place] for place in places]


def test_every_part_of_the_place_counts():
    sample = text(0)
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0), (0, 0, 2**40), (1, 1, 0)]
    found = {corrupt(noise(), sample, *place).tobytes() for place in places}
    assert len(found) == len(places)


def test_streams_overlap_neither_the_data_orders_nor_the_neighbours():
    order = np.random.Generator(np.random.Philox(key=np.array([3, 5], dtype=np.uint64)))
    assert not np.array_equal(order.random(8), generator(3, 5, 0).random(8))
    draws = np.concatenate([generator(0, 0, index).random(2000) for index in range(4)])
    assert len(np.unique(draws)) == len(draws)


def test_global_generators_and_input_are_left_alone():
    sample = text(0)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    kept = sample[0].copy(), sample[1].copy()
    for unit, mode in ALL:
        for permute in (True, False):
            corrupt(noise(unit, mode, permute=permute), sample)
    assert np.array_equal(sample[0], kept[0]) and np.array_equal(sample[1], kept[1])
    assert random.getstate() == before[0] and str(np.random.get_state()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_orders_of_three_sentences_are_equally_likely():
    tokens = np.array([START, 20, 22, 24, 26, 28, 30, END])
    shuffle = noise(fraction=0.0)
    draws = [corrupt(shuffle, (tokens, [2, 4, 7]), index=index) for index in range(6000)]
    found = Counter(tuple(draw) for draw in draws)
    sentences = {(20,), (22, 24), (26, 28, 30)}
    for order in found:
        assert order[0] == START and order[-1] == END
        assert {part for part in sentences if part in _runs(order)} == sentences
    assert len(found) == 6
    chi_square = sum((count - 1000) ** 2 / 1000 for count in found.values())
    assert chi_square < 20.5  # 5 degrees of freedom: p = 0.001


def _runs(row):
    return {tuple(row[i:j]) for i in range(len(row)) for j in range(i + 1, len(row) + 1)}


def test_sentences_stay_whole_and_without_permutation_in_order():
    tokens, ends = text(3)
    clean = permuted(noise(), (tokens, ends))
    begin = np.flatnonzero(np.isin(clean, tokens[np.append(1, ends[:-1])]))
    moved = np.split(clean[1:-1], begin[1:] - 1)
    sentences = np.split(tokens[1:-1], ends[:-1] - 1)
    assert sorted(map(tuple, moved)) == sorted(map(tuple, sentences))
    assert not np.array_equal(clean, tokens)
    assert np.array_equal(permuted(noise(permute=False), (tokens, ends)), tokens)


# The statistics of fairseq


class Texts:
    """What a DenoisingDataset wraps: token tensors, a new copy at each access."""

    def __init__(self, samples):
        self.samples = samples

    def __getitem__(self, index):
        return torch.tensor(self.samples[index][0])

    def __len__(self):
        return len(self.samples)


@pytest.fixture(scope="module")
def fairseq():
    """Makes fairseq's DenoisingDataset over samples, in the setting that `noise` is compared to."""
    library = fairseq_interop.fairseq()
    vocab = library.data.Dictionary()
    for number in range(VOCABULARY - 1 - len(vocab)):
        vocab.add_symbol(str(number))
    assert vocab.add_symbol("<mask>") == MASK and vocab.index("13") == FULL_STOP
    starts = torch.from_numpy(WORD_STARTS.astype(np.uint8))
    fixed = {"shuffle": False, "seed": 0, "mask": 0.3, "mask_random": 0.0, "insert": 0.0}
    fixed |= {"rotate": 0.0, "bpe": "gpt2", "replace_length": 1, "mask_length": "span-poisson"}
    kind = library.data.denoising_dataset.DenoisingDataset

    def make(text, unit, permute=1.0, poisson_lambda=3.0):
        torch.manual_seed(0)  # what its noise is drawn from
        more = {**fixed, "permute_sentences": permute, "poisson_lambda": poisson_lambda}
        return kind(Texts(text), None, vocab, MASK, starts if unit == "word" else None, **more)

    return make


def both(fairseq, samples, unit, permute):
    """Every sample corrupted by this and by fairseq."""
    theirs = fairseq(samples, unit, permute=float(permute))
    ours = noise(unit, permute=permute)
    return [
        (corrupt(ours, sample, index=index), theirs[index]["source"].numpy())
        for index, sample in enumerate(samples)
    ]


def spans_of(clean, corrupted):
    """Statistics of one sample: corrupted share, masks, their spans' lengths, the two ends."""
    table = gaps(clean, corrupted)
    removed, masks = table.T
    assert (masks[removed > 0] > 0).all(), "text is missing without a mask"
    one = removed[masks == 1]
    lengths = np.bincount(np.minimum(one, 15), minlength=16)
    several = [np.sum(masks == 2), np.sum(masks > 2), removed[masks == 2].sum()]
    inner = clean[1:-1]
    at_ends = [np.sum(~np.isin(part, corrupted)) for part in (inner[:8], inner[-8:])]
    return [removed.sum() / len(inner), masks.sum(), *lengths, *several, *at_ends]


@pytest.mark.parametrize("unit", UNITS)
def test_spans_are_those_of_fairseq(fairseq, unit):
    samples = [text(seed) for seed in range(400)]
    pairs = both(fairseq, samples, unit, permute=False)
    rows = [
        [spans_of(clean, out) for out in pair]
        for (clean, _), pair in zip(samples, pairs, strict=True)
    ]
    table = np.array(rows)  # [samples, 2, statistics]
    close(table[:, 0], table[:, 1])
    assert 0.263 < table[:, :, 0].mean() < 0.272


SIZES = {"of 512 tokens, permuted": [512] * 300, "short": [1 + n % 12 for n in range(1200)]}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("sizes", SIZES)
def test_whole_samples_are_those_of_fairseq(fairseq, unit, sizes):
    """Their length, masks and full stops that are left."""
    samples = [text(seed, size, full_stops=size > 12) for seed, size in enumerate(SIZES[sizes])]
    pairs = both(fairseq, samples, unit, permute=sizes != "short")

    def counts(out):
        masks = np.sum(out == MASK)
        return [len(out), masks, masks > 2, np.sum(out == FULL_STOP)]

    table = np.array([[counts(out) for out in pair] for pair in pairs])
    close(table[:, 0], table[:, 1])


@pytest.mark.parametrize("size", [10, 40, 50, 90, 100, 101])
def test_budget_is_rounded_up_in_single_precision(fairseq, size):
    """Seen where a span takes it all: 16 of 50 tokens, not 15."""
    samples = [text(0, size=size)] * 200
    theirs = fairseq(samples, "token", permute=0.0, poisson_lambda=16.0)
    ours = noise("token", permute=False, poisson_lambda=60.0)
    clean = samples[0][0]
    found = max(gaps(clean, corrupt(ours, samples[0], index=i))[:, 0].max() for i in range(200))
    if size <= 50:  # above, its spans of 16 on average may not reach the budget at once
        assert found == max(gaps(clean, row["source"].numpy())[:, 0].max() for row in theirs)
    assert found == {10: 3, 40: 12, 50: 16, 90: 28, 100: 31, 101: 31}[size]


def test_inserted_masks_are_counted_as_fairseq_rounds(fairseq):
    reference, ours = fairseq([], "token"), noise("token")
    rng = generator(0, 0, 0)
    for size in range(60):
        content = np.full(size, 20)
        clean = torch.from_numpy(np.concatenate(([START], content, [END])))
        for count in range(1, 16):
            theirs = reference.add_insertion_noise(clean, count / len(clean))
            found = ours._insert_as_fairseq(content, count, rng)
            assert len(found) + 2 == len(theirs), (size, count)
            assert np.sum(found == MASKED) == len(theirs) - len(clean)


# The exact fraction


def budget(size, fraction="0.3"):
    """The wanted number of corrupted tokens, rounded half up."""
    return int((Decimal(fraction) * size).quantize(Decimal(1), rounding=ROUND_HALF_UP))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("fraction", ["0.05", "0.3", "0.5", "0.9", "1.0"])
def test_the_exact_share_is_met_and_masks_are_never_adjacent(unit, fraction):
    """To the token, or as near as whole words allow; right on average."""
    exact, off = noise(unit, "exact", fraction=float(fraction)), []
    for size in [*range(41), 255, *[512] * 10]:
        for index in range(5):
            tokens, ends = text(index, size)
            clean = permuted(exact, (tokens, ends), index=index)
            out = corrupt(exact, (tokens, ends), index=index)
            off.append(gaps(clean, out)[:, 0].sum() - budget(size, fraction))
            longest = max(map(len, words_of(clean, tokens, ends)), default=0)
            assert abs(off[-1]) <= (longest / 2 if unit == "word" else 0), (size, index)
            assert not ((out[1:] == MASK) & (out[:-1] == MASK)).any()
    assert abs(np.mean(off)) < 0.1  # by cutting, words of two tokens would give 0.25


def words_of(clean, tokens, ends):
    """The words of a permuted sample, each a list; a sentence's first token starts one."""
    starts = set(tokens[np.concatenate(([1], ends[:-1])).astype(int)]) if len(ends) else set()
    words = []
    for token in clean[1:-1]:
        if WORD_STARTS[token] or token in starts:
            words.append([])
        words[-1].append(token)
    return words


def test_exact_lengths_are_poisson_until_the_budget():
    """Against lengths drawn one by one, the last one cut; 154 of 512 tokens."""
    exact, rng, ours, theirs = noise("token", "exact"), np.random.default_rng(0), [], []
    for index in range(600):
        sample = text(index)
        removed, masks = gaps(
            permuted(exact, sample, index=index), corrupt(exact, sample, index=index)
        ).T
        ours.append(np.bincount(removed[masks == 1], minlength=30)[:12])
        lengths = []
        while sum(lengths) < 154:
            lengths.append(min(rng.poisson(3), 154 - sum(lengths)))
        theirs.append(np.bincount(lengths, minlength=30)[:12])
    close(ours, theirs)
    assert np.mean(ours, axis=0)[0] == pytest.approx(51.3 * np.exp(-3), rel=0.08)


def test_exact_lengths_in_words_are_poisson():
    """Zero words as often as Poisson(3) has it; the mean of all is 3 words."""
    exact, table = noise("word", "exact"), []
    for index in range(200):
        tokens, ends = text(index)
        clean = permuted(exact, (tokens, ends), index=index)
        out = corrupt(exact, (tokens, ends), index=index)
        gone = [word for word in words_of(clean, tokens, ends) if word[0] not in out]
        masks = np.sum(out == MASK)
        empty = np.sum(gaps(clean, out)[:, 1]) - np.sum(gaps(clean, out)[:, 0] > 0)
        table.append([len(gone), masks, empty])
    words, masks, empty = np.sum(table, axis=0)
    assert words / masks == pytest.approx(3, rel=0.03)
    assert empty / masks == pytest.approx(np.exp(-3), rel=0.15)


def test_exact_place_of_one_span_is_uniform():
    """Spans of 3 in 10 tokens have 8 places."""
    exact = noise("token", "exact", poisson_lambda=60.0, permute=False)
    sample = text(0, size=10)
    counts = Counter(
        int(np.flatnonzero(corrupt(exact, sample, index=index) == MASK)[0]) for index in range(4000)
    )
    assert sorted(counts) == list(range(1, 9))
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 24.3  # p = 0.001, 7 free


@pytest.mark.parametrize(("unit", "mode"), ALL)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 30, 200, 512])
def test_what_is_left_is_the_permuted_text_without_whole_spans(unit, mode, size):
    for index in range(20):
        tokens, ends = text(index, size)
        setting = noise(unit, mode)
        out = corrupt(setting, (tokens, ends), index=index)
        clean = permuted(setting, (tokens, ends), index=index)
        assert out.dtype == np.int64 and out[0] == START and out[-1] == END
        assert sorted(clean) == sorted(tokens)
        removed, masks = gaps(clean, out).T
        assert (masks[removed > 0] > 0).all()
        if unit == "word":
            starts = [] if mode == "fairseq" else [tokens[1], *tokens[ends[:-1]]] if size else []
            assert_whole_words(clean[1:-1], out, starts)


def assert_whole_words(content, out, starts):
    """Every word is there or gone; what comes before the first start is there."""
    begins = WORD_STARTS[content] | np.isin(content, starts)
    word = np.cumsum(begins)
    there = np.isin(content, out)
    for number in range(len(content) + 1):
        part = there[word == number]
        assert part.all() or (not part.any() and number > 0)


def test_one_token():
    """30 % of one word is one word for fairseq, and of one token none when rounded."""
    sample = np.array([START, 20, END]), [2]
    out = [corrupt(noise(), sample, index=index) for index in range(50)]
    assert all(20 not in row and MASK in row for row in out)
    assert {tuple(row) for row in out} >= {(START, MASK, END)}
    assert corrupt(noise("token", "exact"), sample).tolist() == sample[0].tolist()


def test_words_without_a_start_are_left_by_fairseq_and_masked_by_exact():
    sample = np.array([START, *range(21, 61, 2), END]), [21]
    assert np.array_equal(corrupt(noise(), sample), sample[0])
    assert corrupt(noise("word", "exact", fraction=1.0), sample).tolist() == [START, MASK, END]
