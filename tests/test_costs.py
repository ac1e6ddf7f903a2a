"""What runs cost, of all experiments: closed forms of parameters and FLOPs against the papers, the
model class and torch's counter, and simulated steps against the memory that real ones take."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.cost_cases import ALL, BART, CIFAR, DECODER, NANO, R2C2, VIT
from tests.memory import most_alive
from training.experiment import load_experiment
from training.simulate import simulate

each = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
each_shape = pytest.mark.parametrize(
    ("case", "shape"), [(case, shape) for case in ALL for shape in case.shapes]
)
dinan = pytest.mark.parametrize("case", [BART, VIT], ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def dropout_as_on_a_gpu(monkeypatch):
    """A CPU's dropout keeps its mask as numbers and not as bytes."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


# Numbers


@pytest.mark.parametrize(
    ("case", "shape", "embedding", "others"),
    [
        (BART, BART.paper, (50_265 + 2 * 514) * 1024, 404_845_568 - (50_265 + 2 * 514) * 1024),
        (BART, R2C2, (50_265 + 2 * 514) * 2048, 2_688_739_328 - (50_265 + 2 * 514) * 2048),
        (VIT, VIT.paper, 740_352, 85_703_656),
        (CIFAR, CIFAR.paper, (48 + 64) * 256, 1_604_096 - (48 + 64) * 256),
    ],
)
def test_parameters_of_the_papers_models(case, shape, embedding, others):
    assert case.cost.parameters(case.settings(shape)) == {
        "embedding": embedding,
        "non_embedding": others,
        "total": embedding + others,
    }


@pytest.mark.parametrize(
    ("case", "shape", "changes"),
    [(case, shape, {}) for case in (*ALL, DECODER) for shape in (*case.shapes, case.paper)]
    + [(BART, shape, {"model__positions": "fairseq"}) for shape in (*BART.shapes, BART.paper)],
)
def test_parameters_are_those_of_the_model_class(case, shape, changes):
    config = case.settings(shape, **changes)
    model, _ = case.network(config, "meta")
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    stem = sum(count for name, count in counts.items() if case.stem(name))
    total = sum(counts.values())
    found = case.cost.parameters(config)
    assert found == {"embedding": stem, "non_embedding": total - stem, "total": total}
    if case is BART:
        assert case.cost.tokens(config) == model.longest


TOKENS = {"data__noise": {"unit": "token"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__trained_vocab_size": 300}, 300),
        ({"data__source": "text", "data__path": "here", "data__trained_vocab_size": 999}, 999),
        ({"data__source": "binarised", "data__path": ".", **TOKENS}, 9),
        (
            {
                "data__bpe_encoder": "encoder.json",
                "data__bpe_vocab": "vocab.bpe",
                "data__bpe_dictionary": "dict.txt",
            },
            9,
        ),
        ({"model__vocab_size": 77, "data__source": "binarised", "data__path": "x", **TOKENS}, 77),
    ],
)
def test_without_a_vocabulary_the_dictionary_or_bpe_in_use_counts(
    changes, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dict.txt").write_text("a 5\nb 4\nc 3\nd 1\n")  # and 5 special ones
    config = BART.settings(BART.paper, **{"model__vocab_size": None, **changes})
    assert BART.cost.vocabulary(config) == words
    assert BART.cost.parameters(config)["embedding"] == (words + 2 * 514) * 1024


@pytest.mark.parametrize(
    ("case", "steps", "tokens", "weights", "attention", "sample", "flops"),
    [
        # Per token: weights of matrices, and pairs of tokens times width; then per sample.
        (BART, 200_000, 514, 28 * 12 * 1024**2 + 50_265 * 1024, 5 * 12 * 514 * 1024, 0, 1.375e20),
        (VIT, 93_600, 196, 768**2 + 12 * 12 * 768**2, 2 * 12 * 196 * 768, 768_000, 4.019e19),
        (CIFAR, 19_540, 64, 48 * 256 + 24 * 256**2, 2 * 4 * 64 * 256, 2560, 3.297e15),
    ],
)
def test_flops_and_tokens_of_the_papers_runs(
    case, steps, tokens, weights, attention, sample, flops
):
    config = case.settings(case.paper, training__steps=steps)
    rows = config.training.batch_size
    assert case.cost.tokens_per_step(config) == rows * tokens
    exact = 6 * steps * rows * (tokens * (weights + attention) + sample)
    assert case.cost.flops(config) == exact == pytest.approx(flops, rel=1e-3)


def test_fairseqs_positions_hold_two_tokens_less():
    config = BART.settings(BART.paper, model__positions="fairseq")
    assert BART.cost.position_rows(config) == 514
    assert BART.cost.tokens_per_step(config) == 512 * 512


@each_shape
def test_flops_are_those_torch_counts(case, shape):
    config = case.settings(shape)
    model, _ = case.network(config)
    inputs = case.inputs(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs[: 2 if case is BART else 1]).sum().backward()
    counted = counter.get_total_flops() + case.uncounted(config, model)
    assert case.cost.flops(config) == 7 * counted


# Memory


def peak_bytes(case, config):
    """The largest sum of live tensors in a second step of a micro-batched training loop."""
    model, optimizer = case.network(config)
    rows = config.training.micro_batch_size or config.training.batch_size
    inputs = [part[:rows] for part in case.inputs(config)]

    def step():
        for _ in range(config.training.batch_size // rows):
            case.loss(config, model, *(part.clone() for part in inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return most_alive(model, optimizer, step)


DEEP = (64, 2, 16, 4, 100, 62, 32)
WORDY = (128, 1, 32, 1, 4000, 14, 2)
IMAGES = (64, 2, 16, 4, 4, 32, 10, 64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "shape", "changes"),
    [
        (BART, (256, 1, 64, 4, 64, 14, 2), {}),  # the optimiser's step is the peak
        (BART, DEEP, {}),  # activations are
        (BART, DEEP, {"training__precision": "bf16"}),
        (BART, (64, 2, 16, 1, 2000, 62, 16), {}),  # logits are
        (BART, WORDY, {}),  # the word embedding's gradients are
        (BART, WORDY, {"training__micro_batch_size": 1}),
        (VIT, (256, 1, 64, 4, 4, 8, 10, 2), {}),
        (VIT, IMAGES, {}),
        (VIT, IMAGES, {"training__precision": "bf16"}),
        (VIT, (32, 1, 16, 1, 8, 8, 2000, 64), {}),
        (VIT, (256, 2, 64, 4, 4, 8, 10, 2), {"optimizer__name": "sgd"}),
        (NANO, (256, 1, 64, 4, 32, 64, 2), {}),
        (NANO, (64, 2, 16, 4, 32, 100, 64), {}),
        (NANO, (64, 2, 16, 4, 64, 100, 16), {"training__micro_batch_size": 4}),
        (NANO, (128, 2, 32, 4, 32, 4000, 8), {}),
        (NANO, (256, 2, 64, 4, 32, 64, 2), {"optimizer__name": "sgd"}),
        (DECODER, (256, 2, 8, 1, 8, 64, 2), {}),
        (DECODER, (64, 2, 8, 1, 8, 64, 64), {}),
        (DECODER, (64, 2, 8, 1, 8, 4000, 64), {}),
    ],
)
def test_a_simulated_step_takes_what_a_real_one_does(case, shape, changes):
    config = case.settings(shape, **changes)
    found = simulate(load_experiment(case.name), config).memory
    # Gradients of tied weights are added into a third tensor, where real ones may be in place.
    tied = 0.15 if shape == WORDY else 0.05
    assert found == pytest.approx(peak_bytes(case, config), rel=tied)
