"""Random text, a config at toy size, and what tests ask of a prepared corpus."""

import json
import random

import numpy as np
import torch

from bart_span_denoise import data, fairseq_interop
from bart_span_denoise.bpe import EOS
from bart_span_denoise.config import Config
from tests.text_files import write_documents
from training.data.text import in_validation

SIZE, LIMIT = 320, 40
DOCUMENTS = write_documents(60, least=1, long=0.05)  # some sentences are longer than a sample


def of_split(split, texts=DOCUMENTS):
    return [t for t in texts if in_validation(t, 0.3) == (split == "validation")]


def config(tmp_path, positions="paper", seed=0, noise=None, **settings):
    """A config at toy size, of a text file in tmp_path unless told otherwise."""
    section = {"source": "text", "trained_vocab_size": SIZE, "tokens_per_sample": LIMIT}
    section |= {"validation_fraction": 0.3, "cache_dir": str(tmp_path / "cache")}
    section |= {"noise": noise or {}, **settings}
    if section["source"] == "text":
        section.setdefault("path", str(as_jsonl(tmp_path / "text.jsonl")))
    keys = {"prescription": {"strategy": "standard"}, "optimizer": {"name": "adam", "lr": 1e-3}}
    keys |= {"schedule": {"name": "constant"}, "training": {"steps": 1, "batch_size": 4}}
    model = {"width": 64, "layers": 1, "positions": positions}
    return Config.model_validate({"seed": seed, "model": model, "data": section, **keys})


def prepare(tmp_path, **settings):
    return data.from_config(config(tmp_path, **settings))


def fairseq_preprocess(*arguments):
    """fairseq's own command, with `--only-source` and these arguments."""
    fairseq_interop.fairseq()
    with fairseq_interop.process_as_it_was():
        from fairseq import options
        from fairseq_cli import preprocess

        words = ["--only-source", *map(str, arguments)]
        preprocess.main(options.get_preprocessing_parser().parse_args(words))


def as_jsonl(file, texts=DOCUMENTS):
    if not file.exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def stored(corpus, split):
    return np.array(corpus.cache.tokens(split))


def clean(corpus, split):
    samples = getattr(corpus, split)
    return [samples.clean(index) for index in range(len(samples))]


def same(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def line_tokens(sizes, seed=0):
    """Stored lines of the given sizes of content, of distinct neighbours."""
    rng = np.random.default_rng(seed)
    lines = [np.append(rng.integers(4, 1000, size), EOS) for size in sizes]
    return np.concatenate(lines).astype("<u2")


def random_sizes(seed, count=300, limit=20):
    draw = random.Random(seed)
    kinds = [lambda: 0, lambda: limit, lambda: draw.randint(1, 6), lambda: draw.randint(1, 90)]
    return [draw.choices(kinds, (2, 1, 10, 1))[0]() for _ in range(count)]
