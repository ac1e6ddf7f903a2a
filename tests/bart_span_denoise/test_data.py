"""Text to batches: packing, the cache, binarised corpora, noise by place; offline and small."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from bart_span_denoise import corpora, data, fairseq_interop
from bart_span_denoise.bpe import BOS, EOS, PAD, Bpe
from tests.bart_span_denoise.texts import (
    LIMIT,
    SIZE,
    as_jsonl,
    clean,
    config,
    line_tokens,
    of_split,
    prepare,
    random_sizes,
    same,
    stored,
    write_documents,
)
from training.data.sampling import Place
from training.data.text import split_sentences

# fairseq takes seconds to import: one process has all tests that do.
pytestmark = pytest.mark.xdist_group("fairseq")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("text"))


def test_collate_to_a_multiple(corpus):
    samples = [corpus.validation[i] for i in range(5)]
    plain, padded = data.collate(samples), data.collate(samples, multiple=8)
    assert [tensor.shape[1] % 8 for tensor in padded] == [0, 0, 0]
    assert padded[1].shape == padded[2].shape
    for before, after, fill in zip(plain, padded, (PAD, PAD, data.IGNORE), strict=True):
        size = before.shape[1]
        assert size <= after.shape[1] < size + 8
        assert torch.equal(after[:, :size], before)
        assert (after[:, size:] == fill).all()
    assert data.collate(samples, multiple=LIMIT + 2)[0].shape[1] == LIMIT + 2


def test_decoder_ids_are_fairseqs(corpus):
    """fairseq's own collater, of the same samples: the decoder's input and the padding."""
    fairseq = fairseq_interop.fairseq()
    samples = [corpus.validation[i] for i in range(7)]
    items = [{"id": i, "source": s, "target": t} for i, (s, t, _) in enumerate(samples)]
    theirs = fairseq.data.denoising_dataset.collate(
        items, pad_idx=PAD, eos_idx=EOS, vocab=None, left_pad_source=False, left_pad_target=False
    )
    order = theirs["id"]
    encoder, decoder, targets = data.collate(samples)
    assert torch.equal(theirs["net_input"]["src_tokens"], encoder[order])
    assert torch.equal(theirs["net_input"]["prev_output_tokens"], decoder[order])
    assert torch.equal(theirs["target"], targets[order].masked_fill(targets[order] < 0, PAD))
    assert theirs["ntokens"] == data.count((encoder, decoder, targets))


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
    fairseq = fairseq_interop.fairseq()
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
    fairseq = fairseq_interop.fairseq()
    tokens = line_tokens(sizes)
    lines = torch.from_numpy(tokens.astype(np.int64)).split([size + 1 for size in sizes])
    settings = {"pad": PAD, "eos": EOS, "break_mode": "complete", "document_sep_len": 0}
    blocks = fairseq.data.TokenBlockDataset([line[:-1] for line in lines], sizes, 20, **settings)
    bounds = corpora.pack(tokens, 20).bounds
    ours = [corpora.sample(tokens[a:b], None)[0] for a, b in itertools.pairwise(bounds)]
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
    target, ends = reseeded.train.clean(3)
    expected = reseeded.train.noise(target, ends, seed=1, epoch=2, index=3)
    source, kept = reseeded.train[Place(2, 0, 3)]
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


def test_evaluation_knows_which_targets_no_source_token_gives(corpus):
    """A hidden target lies behind a mask: copying from the source cannot give it."""
    samples = [corpus.validation[index] for index in range(6)]
    sources, _, targets, hidden = data.collate_evaluation(samples)
    for source, target, covered in zip(sources, targets, hidden, strict=True):
        shown, behind = target[(target >= 0) & (covered < 0)], target[covered >= 0]
        assert torch.equal(behind, target[covered >= 0]) and 0.1 < len(behind) / len(target) < 0.45
        kept = source[(source != corpus.cache.meta["mask"]) & (source != data.PAD)]
        assert sorted(kept.tolist()) == sorted(shown.tolist())


def test_worker_processes_give_the_same_batches_and_are_sent_little(corpus):
    places = [[Place(0, 2 * i, i), Place(0, 2 * i + 1, i + 20)] for i in range(8)]
    loaders = [
        DataLoader(corpus.train, batch_sampler=places, collate_fn=data.collate, num_workers=workers)
        for workers in (0, 2)
    ]
    assert same(*map(list, loaders))
    sent = pickle.dumps(corpus.train)
    assert same([corpus.train[Place(0, 0, 1)]], [pickle.loads(sent)[Place(0, 0, 1)]])
    assert len(sent) < 20_000


def test_other_settings_and_other_text_are_another_cache(tmp_path, corpus):
    keys = {"tokens_per_sample": 50, "trained_vocab_size": 330, "max_train_tokens": 500}
    keys |= {"validation_fraction": 0.4, "positions": "fairseq"}
    settings = [{}, *({key: value} for key, value in keys.items())]
    found = [prepare(tmp_path, **changes) for changes in settings]
    assert same([found[0].train[Place(0, 0, 3)]], [corpus.train[Place(0, 0, 3)]])
    (tmp_path / "text.jsonl").unlink()
    as_jsonl(tmp_path / "text.jsonl", write_documents(60, seed=5))
    folders = {one.cache.folder for one in (*found, prepare(tmp_path))}
    assert len(folders) == len(settings) + 1


def test_the_command_says_what_the_samples_are(tmp_path, corpus, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path).model_dump(mode="json", exclude_unset=True)))
    data.main([str(file), "data.tokens_per_sample=40"])
    out, err = capsys.readouterr()
    assert json.loads(out)["folder"] == str(prepare(tmp_path).cache.folder)
    assert err.splitlines()[-2:] == corpus.describe()
