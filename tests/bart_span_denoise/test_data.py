"""Text to batches: packing, the cache, binarised corpora, noise by place; offline and small."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from bart_span_denoise import bpe, corpora, data, fairseq_library
from bart_span_denoise.bpe import BOS, EOS, FILES, PAD, Bpe
from bart_span_denoise.config import Config
from training.errors import UserError
from training.sampling import Place
from training.text import in_validation, split_sentences

ROOT = Path(data.__file__).parents[1]
SYLLABLES = "ka ri no the mu sel to ven ba pi lor e dan is wo ghu".split()
WORDS = [a + b + c for a in SYLLABLES for b in SYLLABLES[::3] for c in ("", "s", "'s", "ing")]
SIZE, LIMIT = 320, 40


def write_documents(count, seed=0):
    """Random documents of a few sentences, some of them longer than a sample."""
    draw = random.Random(seed)
    length = lambda: 60 if draw.random() < 0.05 else draw.randint(1, 9)
    sentence = lambda: " ".join(draw.choices(WORDS, k=length())) + draw.choice(".!?")
    return [" ".join(sentence() for _ in range(draw.randint(1, 9))) for _ in range(count)]


DOCUMENTS = write_documents(60)


def of_split(split, texts=DOCUMENTS):
    return [t for t in texts if in_validation(t, 0.3) == (split == "validation")]


def config(tmp_path, positions="paper", seed=0, noise=None, **settings):
    """A config at toy size, of a text file in tmp_path unless told otherwise."""
    section = {
        "source": "text",
        "trained_vocab_size": SIZE,
        "tokens_per_sample": LIMIT,
        "validation_fraction": 0.3,
        "cache_dir": str(tmp_path / "cache"),
        "noise": noise or {},
        **settings,
    }
    if section["source"] == "text":
        section.setdefault("path", str(as_jsonl(tmp_path / "text.jsonl")))
    return Config.model_validate({
        "seed": seed,
        "model": {"width": 64, "layers": 1, "positions": positions},
        "prescription": {"strategy": "standard"},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "schedule": {"name": "constant"},
        "training": {"steps": 1, "batch_size": 4},
        "data": section,
    })  # fmt: skip


def prepare(tmp_path, **settings):
    return data.from_config(config(tmp_path, **settings))


def as_jsonl(file, texts=DOCUMENTS):
    if not file.exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def stored(corpus, split):
    """All stored tokens of a split."""
    return np.array(corpus.cache.tokens(split))


def clean(corpus, split):
    """The clean samples of a split."""
    samples = getattr(corpus, split)
    return [samples.clean(index) for index in range(len(samples))]


def error_line(action):
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(ours, theirs):
    """Whether two datasets or batches hold equal tensors."""
    return all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Files of a BPE, as config keys."""
    folder = tmp_path_factory.mktemp("bpe")
    bpe.train(DOCUMENTS, SIZE, folder)
    return {key: str(folder / name) for key, name in zip(data.BPE_KEYS, FILES)}


# Batches


def test_collate_shifts_and_pads():
    rows = [([0, 9, 2], [0, 5, 6, 7, 2]), ([0, 9, 8, 4, 6, 2], [0, 5, 2])]
    batch = data.collate([tuple(map(torch.tensor, row)) for row in rows])
    encoder, decoder, targets = batch
    assert encoder.tolist() == [[0, 9, 2, 1, 1, 1], [0, 9, 8, 4, 6, 2]]
    assert decoder.tolist() == [[2, 0, 5, 6, 7], [2, 0, 5, 1, 1]]
    assert targets.tolist() == [[0, 5, 6, 7, 2], [0, 5, 2, -100, -100]]
    assert {tensor.dtype for tensor in batch} == {torch.int64}
    assert data.count(batch).item() == 8


def test_collate_to_a_multiple(corpus):
    samples = [corpus.validation[i] for i in range(5)]
    plain, padded = data.collate(samples), data.collate(samples, multiple=8)
    assert [tensor.shape[1] % 8 for tensor in padded] == [0, 0, 0]
    assert padded[1].shape == padded[2].shape
    for before, after, fill in zip(plain, padded, (PAD, PAD, data.IGNORE)):
        size = before.shape[1]
        assert size <= after.shape[1] < size + 8
        assert torch.equal(after[:, :size], before)
        assert (after[:, size:] == fill).all()
    assert data.collate(samples, multiple=LIMIT + 2)[0].shape[1] == LIMIT + 2


def test_decoder_ids_are_fairseqs(corpus):
    """fairseq's own collater, of the same samples: the decoder's input and the padding."""
    fairseq = fairseq_library.load()
    samples = [corpus.validation[i] for i in range(7)]
    items = [{"id": i, "source": s, "target": t} for i, (s, t) in enumerate(samples)]
    theirs = fairseq.data.denoising_dataset.collate(
        items, pad_idx=PAD, eos_idx=EOS, vocab=None, left_pad_source=False, left_pad_target=False
    )
    order = theirs["id"]
    encoder, decoder, targets = data.collate(samples)
    assert torch.equal(theirs["net_input"]["src_tokens"], encoder[order])
    assert torch.equal(theirs["net_input"]["prev_output_tokens"], decoder[order])
    assert torch.equal(theirs["target"], targets[order].masked_fill(targets[order] < 0, PAD))
    assert theirs["ntokens"] == data.count((encoder, decoder, targets))


# Documents to tokens


def test_samples_hold_the_text_in_order(corpus):
    """Documents, sentence by sentence, are what the samples hold, and nothing is lost."""
    for split in ("train", "validation"):
        ids = np.concatenate([tokens[1:-1] for tokens, _ in clean(corpus, split)])
        assert corpus.bpe.decode(ids) == "".join(of_split(split))
        assert corpus.cache.meta[split]["tokens"] == len(ids)
        assert corpus.cache.meta[split]["characters"] == sum(map(len, of_split(split)))
        assert corpus.cache.meta[split]["documents"] == len(of_split(split))


def test_sentences_tokenise_as_running_text(corpus):
    text = of_split("train")[0]
    lines = np.split(stored(corpus, "train"), np.flatnonzero(stored(corpus, "train") == EOS) + 1)
    document = lines[: next(i for i, line in enumerate(lines) if len(line) == 1)]
    ids = [line[:-1] for line in document]
    assert np.concatenate(ids).tolist() == corpus.bpe.encode(text).tolist()
    assert [corpus.bpe.decode(line).strip() for line in ids] == [*split_sentences(text)]
    assert len(ids) > 1


def test_fairseq_loads_the_cache(corpus):
    """The cache is itself a folder of fairseq-preprocess."""
    fairseq = fairseq_library.load()
    for split, stem in data.STEMS.items():
        theirs = fairseq.data.indexed_dataset.MMapIndexedDataset(str(corpus.cache.folder / stem))
        lines = [theirs[i] for i in range(len(theirs))]
        assert torch.cat(lines).tolist() == stored(corpus, split).tolist()
        assert all(line[-1] == EOS and (line[:-1] != EOS).all() for line in lines)
        assert sum(len(line) == 1 for line in lines) == len(of_split(split))


def test_a_given_bpe_is_used(tmp_path, gpt2, corpus):
    given = prepare(tmp_path, **gpt2, trained_vocab_size=999)
    assert given.vocab_size == SIZE
    loaded = Bpe(*gpt2.values())
    text = of_split("validation")[0]
    expected = loaded.encode(text)
    ids = np.concatenate([tokens[1:-1] for tokens, _ in clean(given, "validation")])
    assert ids[: len(expected)].tolist() == expected.tolist()
    assert given.cache.folder.name != corpus.cache.folder.name


def test_reading_stops_after_the_asked_tokens(tmp_path, corpus):
    short = prepare(tmp_path, max_train_tokens=2000, max_validation_tokens=1000)
    for split, limit in (("train", 2000), ("validation", 1000)):
        tokens = stored(short, split)
        assert tokens.tolist() == stored(corpus, split)[: len(tokens)].tolist()
        breaks = np.flatnonzero((tokens[1:] == EOS) & (tokens[:-1] == EOS)) + 1
        content = [int((tokens[: end + 1] != EOS).sum()) for end in breaks]
        assert content[-2] < limit <= content[-1] == short.cache.meta[split]["tokens"]


# Packing


def line_tokens(sizes, seed=0):
    """Stored lines of the given sizes of content, of distinct neighbours."""
    rng = np.random.default_rng(seed)
    lines = [np.append(rng.integers(4, 1000, size), EOS) for size in sizes]
    return np.concatenate(lines).astype("<u2")


def packed_slowly(sizes, limit):
    """Sentence lengths of each sample, and how many sentences were split, token by token."""
    samples, over_long = [], 0
    for size in filter(None, sizes):
        over_long += size > limit
        if samples and size <= limit - sum(samples[-1]):
            samples[-1].append(size)
            continue
        pieces = [limit] * (size // limit) + [size % limit] * (size % limit > 0)
        samples += [[piece] for piece in pieces]
    return samples, over_long


def random_sizes(seed, count=300, limit=20):
    draw = random.Random(seed)
    kinds = [lambda: 0, lambda: limit, lambda: draw.randint(1, 6), lambda: draw.randint(1, 90)]
    return [draw.choices(kinds, (2, 1, 10, 1))[0]() for _ in range(count)]


@pytest.mark.parametrize("window", [1, 7, 64, 2**22])
@pytest.mark.parametrize("seed", range(6))
def test_packing_keeps_every_sentence(monkeypatch, seed, window):
    monkeypatch.setattr(corpora, "WINDOW", window)
    sizes = random_sizes(seed)
    tokens = line_tokens(sizes)
    packed = corpora.pack(tokens, 20)
    parts = [tokens[a:b] for a, b in zip(packed.bounds[:-1], packed.bounds[1:], strict=True)]
    assert np.concatenate(parts).tolist() == tokens.tolist()
    samples = [corpora.sample(part, None) for part in parts]
    expected, over_long = packed_slowly(sizes, 20)
    assert [np.diff(ends, prepend=1).tolist() for _, ends in samples] == expected
    assert over_long > 3
    assert packed[1:] == (sum(sizes), np.count_nonzero(sizes), over_long)
    for ids, ends in samples:
        assert (ids[0], ids[-1], ends[-1]) == (BOS, EOS, len(ids) - 1)
        assert 3 <= len(ids) <= 22


def test_packing_is_fairseqs_complete_mode():
    """Without empty lines, behind which fairseq's blocks lose tokens, and without long ones."""
    sizes = [min(size, 20) for size in random_sizes(9) if size]
    fairseq = fairseq_library.load()
    tokens = line_tokens(sizes)
    lines = torch.from_numpy(tokens.astype(np.int64)).split([size + 1 for size in sizes])
    blocks = fairseq.data.TokenBlockDataset(
        [line[:-1] for line in lines], sizes, 20, pad=PAD, eos=EOS, break_mode="complete",
        document_sep_len=0,
    )  # fmt: skip
    bounds = corpora.pack(tokens, 20).bounds
    ours = [corpora.sample(tokens[a:b], None)[0] for a, b in zip(bounds[:-1], bounds[1:])]
    theirs = [blocks[i].tolist() for i in range(len(blocks))]
    assert [ids[1:-1].tolist() for ids in ours] == theirs


def test_no_sample_is_longer_than_the_positions(tmp_path, corpus):
    fairseq = prepare(tmp_path, positions="fairseq")
    for found, longest in ((corpus, LIMIT + 2), (fairseq, LIMIT)):
        lengths = [len(tokens) for tokens, _ in clean(found, "train")]
        assert max(lengths) == longest, "sentences are long enough to fill one"
        assert sum(lengths) - 2 * len(lengths) == corpus.cache.meta["train"]["tokens"]


def test_sources_that_noise_makes_too_long_lose_masks_only(tmp_path):
    """Samples of 4 tokens where half of the spans are empty: many sources exceed 6."""
    noise = {"unit": "token", "poisson_lambda": 1.0, "fraction": 0.6}
    corpus = prepare(tmp_path, tokens_per_sample=4, noise=noise)
    mask, cut = corpus.cache.meta["mask"], 0
    for index in range(200):
        target, ends = corpus.train.clean(index)
        full = corpus.train.noise(target, ends, seed=0, epoch=0, index=index)
        source = corpus.train[Place(0, 0, index)][0].numpy()
        cut += len(full) > 6
        assert source.tolist() == full.tolist() if len(full) <= 6 else len(source) == 6
        assert source[source != mask].tolist() == full[full != mask].tolist()
    assert cut > 10


# Samples by place


def test_train_samples_are_a_function_of_seed_and_place(tmp_path, corpus):
    other = prepare(tmp_path, path=str(as_jsonl(tmp_path / "text.jsonl")))
    places = [Place(1, position, index) for position, index in enumerate([5, 0, 3, 9])]
    first = [corpus.train[place] for place in places]
    torch.manual_seed(5)
    assert same(first, [other.train[place] for place in reversed(places)][::-1])
    assert same(first, [corpus.train[place._replace(position=7)] for place in places])
    assert not same(first, [corpus.train[place._replace(epoch=2)] for place in places])
    reseeded = prepare(tmp_path, seed=1)
    assert not same(first, [reseeded.train[place] for place in places])
    targets = lambda samples: [target.tolist() for _, target in samples]
    assert targets(first) == targets([reseeded.train[place] for place in places])


def test_train_samples_are_the_noise_of_their_place(tmp_path):
    corpus = prepare(tmp_path, seed=3)
    target, ends = corpus.train.clean(4)
    expected = corpus.train.noise(target, ends, seed=3, epoch=2, index=4)
    source, kept = corpus.train[Place(2, 0, 4)]
    assert (source.tolist(), kept.tolist()) == (expected.tolist(), target.tolist())
    assert corpus.cache.meta["mask"] in source.tolist()
    assert (source.dtype, kept.dtype) == (torch.int64, torch.int64)


def test_validation_noise_is_one_for_all_runs(tmp_path, corpus):
    other = prepare(tmp_path, seed=8)
    ours = [corpus.validation[i] for i in range(len(corpus.validation))]
    assert same(ours, [other.validation[i] for i in range(len(other.validation))])
    target, ends = corpus.validation.clean(2)
    noise = corpus.validation.noise(target, ends, seed=0, epoch=2**64 - 1, index=2)
    assert ours[2][0].tolist() == noise.tolist()


def test_config_reaches_the_noise(tmp_path):
    settings = {
        "unit": "token", "fraction": 0.5, "fraction_mode": "exact", "poisson_lambda": 2.0,
        "permute": False,
    }  # fmt: skip
    noise = prepare(tmp_path, noise=settings).train.noise
    assert {name: getattr(noise, name) for name in settings} == settings
    starts = prepare(tmp_path).train.noise.word_starts
    assert 0 < starts[4:].sum() < SIZE - 4


def test_worker_processes_give_the_same_batches(corpus):
    places = [[Place(0, 2 * i, i), Place(0, 2 * i + 1, i + 20)] for i in range(8)]
    loaders = [
        DataLoader(corpus.train, batch_sampler=places, collate_fn=data.collate, num_workers=workers)
        for workers in (0, 2)
    ]
    assert same(*map(list, loaders))


def test_samples_survive_pickling(corpus):
    again = pickle.loads(pickle.dumps(corpus.train))
    assert same([corpus.train[Place(0, 0, 1)]], [again[Place(0, 0, 1)]])
    assert len(pickle.dumps(corpus.train)) < 20_000


def test_samples_out_of_range(corpus):
    size = len(corpus.validation)
    for index in (-1, size):
        with pytest.raises(IndexError, match=f"sample {index} of {size} in validation"):
            corpus.validation[index]


def test_describe_says_what_there_is(corpus):
    train, validation = corpus.describe()
    meta = corpus.cache.meta["train"]
    mean = f"{meta['tokens'] / meta['samples']:.1f}"
    assert train.startswith(f"train: {meta['samples']:,} samples of {mean} tokens and ")
    sentences = [s for d in of_split("train") for s in data._sentences(d)]
    long = sum(len(corpus.bpe.encode(sentence)) > LIMIT for sentence in sentences)
    assert f"; {long} sentences of more than {LIMIT} tokens were split" in train
    assert long > 2
    assert validation.startswith("validation: ")


# Cache


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_sample": 50},
        {"trained_vocab_size": 330},
        {"max_train_tokens": 500},
        {"validation_fraction": 0.4},
        {"positions": "fairseq"},
    ],
    ids=str,
)
def test_other_settings_are_another_cache(tmp_path, corpus, change):
    plain, other = prepare(tmp_path), prepare(tmp_path, **change)
    assert plain.cache.folder != other.cache.folder
    assert same([plain.train[Place(0, 0, 3)]], [corpus.train[Place(0, 0, 3)]])


def test_other_text_is_another_cache(tmp_path):
    first = prepare(tmp_path)
    (tmp_path / "text.jsonl").unlink()
    as_jsonl(tmp_path / "text.jsonl", write_documents(60, seed=5))
    assert prepare(tmp_path).cache.folder != first.cache.folder


# Binarised corpora

PREPROCESS = """
import json, sys
from bart_span_denoise import fairseq_library
fairseq = fairseq_library.load()
from fairseq import options
from fairseq_cli import preprocess
for arguments in json.load(sys.stdin):
    preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
"""


def fairseq_preprocess(*runs):
    """fairseq's own command, once for each list of arguments."""
    subprocess.run(
        [sys.executable, "-c", PREPROCESS],
        input=json.dumps(runs), text=True, cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip


def write_encoded(folder, gpt2, split_lines):
    """GPT-2's numbers of each line, as fairseq's multiprocessing_bpe_encoder writes them."""
    loaded = Bpe(*gpt2.values())
    for split in ("train", "validation"):
        lines = []
        for document in of_split(split):
            lines += [*(split_lines(document)), ""]
        ids = (" ".join(loaded.symbols[i] for i in loaded.encode(line)) for line in lines)
        (folder / f"{split}.bpe").write_text("".join(f"{line}\n" for line in ids))
    return folder


@pytest.fixture(scope="module")
def binarised(tmp_path_factory, gpt2):
    """Folders of fairseq-preprocess.

    A sentence a line over the BPE's dict.txt, a document a line over a dictionary of their own,
    and the first in fairseq's older format.
    """
    root = tmp_path_factory.mktemp("binarised")
    for name in ("sentences", "documents"):
        (root / name).mkdir()
    write_encoded(root / "sentences", gpt2, split_sentences)
    write_encoded(root / "documents", gpt2, lambda document: [document])
    runs = []
    for name, more in {
        "sentences": ["--srcdict", gpt2["bpe_dictionary"], "--dataset-impl", "mmap"],
        "documents": ["--dataset-impl", "mmap"],
        "cached": ["--dataset-impl", "cached"],
    }.items():
        text = root / ("sentences" if name == "cached" else name)
        files = ["--trainpref", f"{text}/train.bpe", "--validpref", f"{text}/validation.bpe"]
        runs.append(["--only-source", *files, "--destdir", f"{root}/{name}-bin", *more])
    fairseq_preprocess(*runs)
    return {name: root / f"{name}-bin" for name in ("sentences", "documents", "cached")}


def bpe_files(gpt2):
    return {key: gpt2[key] for key in data.BPE_KEYS[:2]}


def prepare_binarised(tmp_path, folder, **settings):
    return prepare(tmp_path, source="binarised", path=str(folder), **settings)


def test_binarised_tokens_are_fairseqs(tmp_path, binarised, gpt2):
    """Every line that fairseq's reader has, without </s>, is a sentence, in order."""
    corpus = prepare_binarised(tmp_path, binarised["sentences"], **bpe_files(gpt2))
    fairseq = fairseq_library.load()
    for split, stem in data.STEMS.items():
        theirs = fairseq.data.indexed_dataset.MMapIndexedDataset(
            str(binarised["sentences"] / stem)
        )
        lines = [theirs[i] for i in range(len(theirs))]
        sentences, long = [], 0
        for tokens, ends in clean(corpus, split):
            sentences += np.split(tokens[1:-1], ends[:-1] - 1)
        assert np.concatenate(sentences).tolist() == torch.cat([x[:-1] for x in lines]).tolist()
        short = [line[:-1].tolist() for line in lines if 1 < len(line) <= LIMIT + 1]
        long = sum(len(line) > LIMIT + 1 for line in lines)
        assert [s.tolist() for s in sentences if s.tolist() in short] == short
        assert corpus.cache.meta[split]["over_long"] == long > 0
        assert corpus.cache.meta[split]["sentences"] == len(short) + long


def test_binarised_corpora_are_packed_like_text(tmp_path, binarised, gpt2):
    """The words of fairseq's dictionary keep their ids, and <mask> comes last."""
    corpus = prepare_binarised(tmp_path, binarised["sentences"], **bpe_files(gpt2))
    loaded = Bpe(*gpt2.values())
    assert (corpus.vocab_size, corpus.cache.meta["mask"]) == (SIZE, SIZE - 1)
    assert corpus.train.noise.word_starts.tolist() == loaded.word_starts.tolist()
    assert corpus.bpe.mask == SIZE - 1
    text = corpus.bpe.decode(np.concatenate([t[1:-1] for t, _ in clean(corpus, "train")]))
    assert text == "".join("".join(split_sentences(d)) for d in of_split("train"))


def test_documents_in_lines_are_cut_into_sentences(tmp_path, binarised, gpt2):
    """With a dictionary of its own, which lacks tokens, and whole documents in lines."""
    corpus = prepare_binarised(tmp_path, binarised["documents"], **bpe_files(gpt2))
    assert corpus.vocab_size % 8 == 1, "padded by fairseq, and <mask>"
    starts, found = corpus.train.noise.word_starts, []
    for tokens, ends in clean(corpus, "train"):
        found += [corpus.bpe.decode(s).strip() for s in np.split(tokens[1:-1], ends[:-1] - 1)]
    sentences = [s for d in of_split("train") for s in split_sentences(d)]
    assert "".join(found).replace(" ", "") == "".join(sentences).replace(" ", "")
    short = [s for s in sentences if len(corpus.bpe.encode(f" {s}")) <= LIMIT - 1]
    missing = Counter(short) - Counter(found)
    assert not missing and len(short) > 100
    assert starts[corpus.bpe.encode(" no")[0]]
    assert corpus.cache.meta["train"]["sentences"] == len(sentences)


def test_sentences_within_lines_are_fairseqs_at_full_stops(gpt2, monkeypatch):
    """Where all sentences end with full stops, fairseq cuts alike: both reversed give one text."""
    loaded = Bpe(*gpt2.values())
    stops = corpora.Stops(loaded.sentence_stops, loaded.word_starts)
    text = "no mu. the sel ven. to ba pi lor. e dan."
    line = np.append(loaded.encode(text), EOS)
    ids, ends = corpora.sample(line, stops)
    assert len(ends) == 4
    permute = fairseq_library.load().data.denoising_dataset.DenoisingDataset.permute_sentences
    orders = iter([torch.arange, lambda n: torch.arange(n - 1, -1, -1)])
    monkeypatch.setattr(torch, "randperm", lambda n: next(orders)(n))
    rule = SimpleNamespace(full_stop_index=loaded.encode(".")[0])
    theirs = permute(rule, torch.from_numpy(ids), 1.0).tolist()
    assert np.concatenate(np.split(ids[1:-1], ends[:-1] - 1)[::-1]).tolist() == theirs[1:-1]
    numbers = np.append(loaded.encode("no 3.14 mu! is the sel? to"), EOS)
    ids, ends = corpora.sample(numbers, stops)
    found = [loaded.decode(part) for part in np.split(ids[1:-1], ends[:-1] - 1)]
    assert found == ["no 3.14 mu!", " is the sel?", " to"]


def test_binarised_without_the_bpes_files(tmp_path, binarised):
    corpus = prepare_binarised(tmp_path, binarised["documents"], noise={"unit": "token"})
    assert corpus.bpe is None
    assert corpus.cache.meta["train"]["sentences"] == len(of_split("train"))
    source, target = corpus.train[Place(0, 0, 0)]
    assert corpus.cache.meta["mask"] in source.tolist()
    assert corpus.cache.meta["mask"] == corpus.vocab_size - 1


def test_unknown_tokens_are_reported(tmp_path, binarised, gpt2):
    """validation.bpe has symbols that training text has not: fairseq writes <unk>."""
    folder = tmp_path / "unknown"
    shutil.copytree(binarised["documents"], folder)
    tokens = np.memmap(folder / "valid.bin", "<u2", "r+")
    tokens[np.flatnonzero(tokens > 10)[:3]] = 3
    tokens.flush()
    corpus = prepare_binarised(tmp_path, folder, noise={"unit": "token"})
    already = np.count_nonzero(np.fromfile(binarised["documents"] / "valid.bin", "<u2") == 3)
    assert corpus.describe()[1].endswith(f"; {already + 3} tokens are <unk>")


def test_a_changed_binarised_corpus_is_another_cache(tmp_path, binarised):
    folder = tmp_path / "corpus"
    shutil.copytree(binarised["sentences"], folder)
    settings = {"noise": {"unit": "token"}}
    first = prepare_binarised(tmp_path, folder, **settings).cache.folder
    assert prepare_binarised(tmp_path, folder, **settings).cache.folder == first
    os.utime(folder / "train.bin", (1, 1))
    assert prepare_binarised(tmp_path, folder, **settings).cache.folder != first


def test_index_round_trip_in_parts(tmp_path, monkeypatch):
    """Pointers and line ends are written and checked a part at a time."""
    monkeypatch.setattr(corpora, "ONCE", 7)
    monkeypatch.setattr(corpora, "WINDOW", 50)
    tokens = line_tokens(random_sizes(1))
    lines = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]
    for vocab_size, dtype in ((1000, "<u2"), (70_000, "<u4")):
        corpora.write(tmp_path / "train", lines, vocab_size)
        found = corpora.read(tmp_path / "train")
        assert found.dtype == dtype
        assert found.tolist() == tokens.tolist()
        assert corpora.check(tmp_path / "train", vocab_size) == 0
        fairseqs = fairseq_library.load().data.indexed_dataset
        theirs = fairseqs.MMapIndexedDataset(str(tmp_path / "train"))
        assert [theirs[i].tolist() for i in range(len(theirs))] == [x.tolist() for x in lines]
        assert theirs._index.dtype == fairseqs.best_fitting_int_dtype(vocab_size)


# Mistakes


def overwrite(file, value, where=0):
    def change(folder):
        tokens = np.memmap(folder / file, "<u2", "r+")
        tokens[where] = value
        tokens.flush()

    return change


BROKEN = {
    "no folder": (shutil.rmtree, "is not a folder; expected one made by fairseq-preprocess"),
    "no valid.bin": (lambda f: (f / "valid.bin").unlink(), "valid.bin does not exist; expected"),
    "no train.idx": (lambda f: (f / "train.idx").unlink(), "train.idx does not exist; expected"),
    "no dictionary": (lambda f: (f / "dict.txt").unlink(), "dict.txt does not exist; expected"),
    "cut tokens": (lambda f: os.truncate(f / "train.bin", 100), "train.bin has 100 bytes where"),
    "cut index": (lambda f: os.truncate(f / "train.idx", 99), "lines as it says; make it again"),
    "no index": (lambda f: os.truncate(f / "train.idx", 9), "is not fairseq's mmap index"),
    "no line end": (overwrite("train.bin", 5, -1), "train.bin: line "),
    "large id": (overwrite("train.bin", 9999), "holds token id 9999, but the dictionary has"),
    "a pad": (overwrite("valid.bin", 1), "valid.bin holds <s> or <pad>"),
    "blank": (overwrite("valid.bin", EOS, slice(None)), "valid.bin has only empty lines"),
    "no symbols": (lambda f: (f / "dict.txt").write_text("x\n"), "is not fairseq's dict.txt"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_binarised_corpora_are_named(tmp_path, binarised, case):
    damage, message = BROKEN[case]
    folder = tmp_path / "corpus"
    shutil.copytree(binarised["sentences"], folder)
    damage(folder)
    line = error_line(lambda: prepare_binarised(tmp_path, folder, noise={"unit": "token"}))
    assert line.startswith(f"data.path: {folder}")
    assert message in line
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_other_formats_of_fairseq_say_which_is_read(tmp_path, binarised):
    settings = {"noise": {"unit": "token"}}
    line = error_line(lambda: prepare_binarised(tmp_path, binarised["cached"], **settings))
    assert line.startswith(f"data.path: {binarised['cached'] / 'train.idx'} is not fairseq's mmap")
    assert "--dataset-impl mmap" in line


def test_words_of_a_binarised_corpus_need_the_bpe(tmp_path, binarised):
    line = error_line(lambda: prepare_binarised(tmp_path, binarised["sentences"]))
    assert line.startswith("data.noise.unit: word needs data.bpe_encoder and data.bpe_vocab")
    assert "set data.noise.unit=token" in line


def test_a_bpe_of_another_corpus_is_refused(tmp_path, binarised, gpt2):
    other = tmp_path / "other"
    other.mkdir()
    bpe.train(DOCUMENTS, 300, other)
    files = {"bpe_encoder": str(other / FILES[0]), "bpe_vocab": str(other / FILES[1])}
    line = error_line(lambda: prepare_binarised(tmp_path, binarised["sentences"], **files))
    assert line.startswith(f"data.path: {binarised['sentences'] / 'dict.txt'} has 295, expected")
    assert "is it over another BPE?" in line


def test_which_files_go_together(tmp_path, gpt2, binarised):
    text = lambda **keys: error_line(lambda: prepare(tmp_path, **keys))
    assert text(**bpe_files(gpt2)).startswith("data.bpe_dictionary: missing; expected")
    dictionary = {"bpe_dictionary": gpt2["bpe_dictionary"]}
    assert "given without data.bpe_encoder and data.bpe_vocab" in text(**dictionary)
    line = error_line(lambda: prepare_binarised(tmp_path, binarised["sentences"], **gpt2))
    assert "a binarised folder has its own dict.txt" in line


@pytest.mark.parametrize("key", data.BPE_KEYS)
def test_missing_bpe_files_are_named(tmp_path, gpt2, key):
    nowhere = str(tmp_path / "nowhere")
    line = error_line(lambda: prepare(tmp_path, **{**gpt2, key: nowhere}))
    assert line.startswith(f"data.{key}: {nowhere} does not exist; expected ")


def test_a_bpe_that_does_not_work_leaves_nothing(tmp_path, gpt2):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    line = error_line(lambda: prepare(tmp_path, **{**gpt2, "bpe_encoder": str(broken)}))
    assert line.startswith(f"data.bpe_encoder: {broken} is not JSON")
    assert list((tmp_path / "cache").iterdir()) == []


def test_too_short_samples_are_refused(tmp_path):
    line = error_line(lambda: prepare(tmp_path, positions="fairseq", tokens_per_sample=2))
    assert line.startswith("data.tokens_per_sample: 2 given, but with model.positions fairseq")
    assert len(prepare(tmp_path, positions="fairseq", tokens_per_sample=3).train) > 1000


def test_the_command_says_what_the_samples_are(tmp_path, corpus, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path).model_dump(mode="json", exclude_unset=True)))
    data.main([str(file), "data.tokens_per_sample=40"])
    out, err = capsys.readouterr()
    assert json.loads(out)["folder"] == str(prepare(tmp_path).cache.folder)
    assert err.splitlines()[-2:] == corpus.describe()
