"""What a decoder is observed on: text in full rows, whatever evaluation pads."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from measure import observations
from measure.probes import ProbeRecorder
from nanolm_c4 import train
from nanolm_c4.config import Config
from nanolm_c4.data import ValidationRows, from_config
from tests.run_folders import kept, lines
from training.config import load
from training.errors import UserError

CONFIGS = Path(train.__file__).parent / "configs"
LAPTOP = "infinite_limits_laptop.yaml"
T = 32
SMALL = (
    f"model.layers=2 model.context={T} schedule.warmup_steps=0 training.steps=2 "
    "training.batch_size=2 training.eval_samples=2 data.source=local data.tokenizer_vocab_size=64 "
    "data.validation_fraction=0.5 checkpoint.final=true"
).split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents of two to four short words, far fewer tokens than a row has."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for index in range(150):
        words = ["".join(draw.choices("abdeiklmnoprstu", k=3)) for _ in range(draw.randint(2, 4))]
        (folder / f"{index:03}.txt").write_text(" ".join(words))
    return folder


def settings(texts, *overrides, file=LAPTOP):
    own = [f"data.path={texts}", f"data.cache_dir={texts / 'cache'}"]
    return load(Config, CONFIGS / file, [*SMALL, *own, *overrides])


def packed_by_hand(corpus, rows):
    """The first rows of the validation documents laid end to end: (rows, T)."""
    tokens, bounds = corpus.tokens("validation"), corpus.offsets("validation")
    assert np.diff(bounds).max() < T  # all documents are shorter than a row
    ids = [int(i) for first, last in itertools.pairwise(bounds) for i in tokens[first:last]]
    return torch.tensor(ids[: rows * T]).view(rows, T)


@pytest.mark.parametrize("evaluation", ["truncate", "split"])
@pytest.mark.parametrize("file", [LAPTOP, "laptop.yaml"])
def test_observations_are_of_packed_text_and_see_no_pad(
    texts, tmp_path, monkeypatch, file, evaluation
):
    seen, original = [], observations.observe

    def spying(initial, model, batch, forward):
        seen.append(batch[0].clone())
        return original(initial, model, batch, forward)

    monkeypatch.setattr(observations, "observe", spying)
    asked = f"data.evaluation={evaluation} training.observe_every=1 training.observe_samples=3"
    config = settings(texts, *asked.split(), file=file)
    folder = tmp_path / "run"
    train.EXPERIMENT.run(config, folder)
    report = lines(folder, "observations.jsonl")[-1]
    corpus = from_config(config.data)
    rows, pad = packed_by_hand(corpus, 3), corpus.meta["pad"]
    padded = ValidationRows(corpus, T, evaluation == "split")
    assert all((padded[index][0] == pad).any() for index in range(3))
    assert len(seen) == 3 and all(torch.equal(ids, rows) for ids in seen)
    assert not (rows == pad).any()

    decoder, streams = kept(train.build_task(config), folder).model.double().eval(), []
    decoder.final_norm.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
    with torch.no_grad():
        logits = decoder(rows)
    h, width = streams[0].double(), config.model.width
    arrays = load_file(folder / "observations/step_2.safetensors")
    close = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(arrays["last_token_kernel"], h[:, -1] @ h[:, -1].T / width, **close)
    torch.testing.assert_close(arrays["spatial_kernel"], h[0] @ h[0].T / width, **close)
    mean = h.mean(1)
    torch.testing.assert_close(arrays["pooled_kernel"], mean @ mean.T / width, **close)
    torch.testing.assert_close(arrays["outputs"], logits[:, -1], **close)
    stream_rms = h.square().mean().sqrt().item()
    assert report["blocks"][-1]["stream_rms"] == pytest.approx(stream_rms, rel=1e-4)
    if file == LAPTOP:  # whose logits start from zero
        changed = logits.square().mean().sqrt().item()
        assert report["all"]["function_change"] == pytest.approx(changed, rel=1e-4)


def test_probes_see_packed_text_and_no_pad(texts, tmp_path, monkeypatch):
    seen, original = [], ProbeRecorder.start

    def spying(self, run):
        logs = original(self, run)
        seen.append(self.batch[0].clone())
        return logs

    monkeypatch.setattr(ProbeRecorder, "start", spying)
    asked = ["training.probe_every=1", "training.probe_samples=3"]
    config = settings(texts, *asked, file="laptop.yaml")
    train.EXPERIMENT.run(config, tmp_path / "run")
    corpus = from_config(config.data)
    (ids,) = seen
    assert torch.equal(ids, packed_by_hand(corpus, 3)) and not (ids == corpus.meta["pad"]).any()
    little = settings(texts, *asked, "data.max_validation_tokens=1", file="laptop.yaml")
    train.EXPERIMENT.run(little, tmp_path / "little")  # no full row: what there is
    assert (seen[1] == corpus.meta["pad"]).any()


def test_too_little_text_to_observe_is_one_line_of_observed_runs_only(texts, tmp_path):
    rows = from_config(settings(texts).data).meta["validation"]["tokens"] // T
    observed = ["training.observe_every=2", f"training.observe_samples={rows + 1}"]
    with pytest.raises(UserError) as error:
        train.EXPERIMENT.run(settings(texts, *observed), tmp_path / "few")
    assert str(error.value) == (
        f"training.observe_samples {rows + 1} is more than the {rows} full rows of {T} tokens of "
        "the validation data; lower it or give more validation data"
    )
    one_document = "data.max_validation_tokens=1"
    with pytest.raises(UserError) as error:
        config = settings(texts, "training.observe_every=2", one_document)
        train.EXPERIMENT.run(config, tmp_path / "none")
    assert str(error.value) == (
        f"training.observe_samples 8 is more than the 0 full rows of {T} tokens of the validation "
        "data; give more of it"
    )
    summary = train.EXPERIMENT.run(settings(texts, one_document), tmp_path / "run")
    assert summary["status"] == "finished"
