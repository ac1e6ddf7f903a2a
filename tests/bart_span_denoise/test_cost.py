"""Closed forms of a run's cost: against the paper, the model class, torch's optimisers, memory."""

import contextlib
import functools
import gc
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bart_span_denoise import cost
from bart_span_denoise.config import Config
from bart_span_denoise.model import POSITION_ROWS, RULES, Bart
from param_groups import Dinan, plan
from training import optimizers
from training.config import set_keys, validate
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("width", "layers", "head_dim", "mlp_ratio", "vocab_size")
LARGE = (1024, 12, 64, 4, 50_265)
R2C2 = (2048, 22, 64, 4, 50_265)
SHAPES = [  # with tokens per sample and samples
    ((64, 1, 16, 4, 100), 30, 4),
    ((48, 3, 8, 2, 211), 38, 2),
    ((32, 2, 32, 1, 64), 14, 5),
]


def settings(shape=LARGE, content=512, rows=512, **changes):
    """A config; `__` stands for the dot of a key."""
    base = {
        "model": dict(zip(KEYS, shape)),
        "prescription": {"strategy": "neural_tangent"},
        "data": {"tokens_per_sample": content},
        "optimizer": {"name": "adam", "lr": 1.0},
        "schedule": {},
        "training": {"steps": 7, "batch_size": rows},
    }
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return validate(Config, set_keys(base, values), "test")


def network(config, device="cpu"):
    """The config's model, initialised unless it is on meta, and its optimiser."""
    shape = config.model
    with torch.device(device):
        model = Bart(
            vocab_size=cost.vocabulary(config), width=shape.width, layers=shape.layers,
            heads=shape.width // shape.head_dim, attention_scale=0.1, logit_multiplier=0.5,
            mlp_ratio=shape.mlp_ratio, position_rows=cost.position_rows(config),
            positions=shape.positions, dropout=shape.dropout,
            attention_dropout=shape.attention_dropout,
        )
    if device == "meta":
        return model, None
    prescription = Dinan(shape.width, optimizer=config.optimizer.name, init="bart")
    planned = plan(model, RULES, prescription, lr=1e-3)
    planned.initialise(model, 0)
    return model, optimizers.build(config.optimizer.name, planned.groups(model))


def batch(config):
    """Encoder ids, decoder ids and targets of full samples."""
    generator = torch.Generator().manual_seed(0)
    size = (3, config.training.batch_size, cost.tokens(config))
    ids = torch.randint(4, cost.vocabulary(config), size, generator=generator)
    return [part.clone() for part in ids]


def precision(config):
    low = config.training.precision == "bf16"
    return torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()


@pytest.fixture(autouse=True)
def dropout_as_on_a_gpu(monkeypatch):
    """A CPU's dropout keeps its mask as numbers and not as bytes."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


# Numbers


@pytest.mark.parametrize(("shape", "total"), [(LARGE, 404_845_568), (R2C2, 2_688_739_328)])
def test_parameters_of_the_papers_models(shape, total):
    width, layers = shape[:2]
    found = cost.parameters(settings(shape))
    assert found["total"] == total == found["embedding"] + found["non_embedding"]
    assert found["embedding"] == (50_265 + 2 * 514) * width
    assert found["non_embedding"] == width**2 * (12 + 16) * layers


@pytest.mark.parametrize("case", [*SHAPES, (LARGE, 512, 512)])
@pytest.mark.parametrize("positions", ["paper", "fairseq"])
def test_parameters_are_those_of_the_model_class(case, positions):
    config = settings(*case, model__positions=positions)
    model, _ = network(config, "meta")
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    blocks = sum(count for name, count in counts.items() if "_blocks." in name)
    assert cost.parameters(config) == {
        "embedding": sum(counts.values()) - blocks,
        "non_embedding": blocks,
        "total": sum(counts.values()),
    }
    assert cost.tokens(config) == model.longest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__trained_vocab_size": 300}, 300),
        ({"data__source": "text", "data__path": "here", "data__trained_vocab_size": 999}, 999),
        ({"data__source": "binarised", "data__path": "here"}, 50_265),
        ({"data__bpe_encoder": "encoder.json", "data__bpe_vocab": "vocab.bpe"}, 50_265),
        ({"model__vocab_size": 77}, 77),
    ],
)
def test_without_a_vocabulary_the_bpe_in_use_counts(changes, words):
    config = settings(**{"model__vocab_size": None, **changes})
    assert cost.vocabulary(config) == words
    assert cost.parameters(config)["embedding"] == (words + 2 * 514) * 1024


@pytest.mark.parametrize("case", SHAPES)
def test_flops_are_those_torch_counts(case):
    """torch counts every pair of positions, and the decoder's own attention is causal: half."""
    config = settings(*case, model__attention_dropout=0.0)
    model, _ = network(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*batch(config)[:2]).sum().backward()
    (width, layers, *_), _, rows = case
    hidden_half = 6 * layers * rows * cost.tokens(config) ** 2 * width
    assert cost.flops(config) == 7 * (counter.get_total_flops() - hidden_half)


def test_flops_and_tokens_of_the_papers_run():
    config = settings(training__steps=200_000)
    assert cost.tokens_per_step(config) == 512 * 514
    weights = 28 * 12 * 1024**2 + 50_265 * 1024
    attention = 5 * 12 * 514 * 1024
    assert cost.flops(config) == 6 * 200_000 * 512 * 514 * (weights + attention)
    assert cost.flops(config) == pytest.approx(1.375e20, rel=1e-3)


def test_fairseqs_positions_hold_two_tokens_less():
    config = settings(model__positions="fairseq")
    assert cost.position_rows(config) == POSITION_ROWS == 514
    assert cost.tokens_per_step(config) == 512 * 512


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize("case", SHAPES[:2])
def test_optimizer_state_is_what_the_optimizer_keeps(case, name):
    config = settings(*case, optimizer__name=name)
    model, optimizer = network(config)
    model(*batch(config)).backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert cost.optimizer_state(config) == sum(t.numel() * t.element_size() for t in kept)


def test_an_optimizer_without_rates_in_the_paper_is_refused():
    with pytest.raises(UserError, match="optimizer.name adafactor: .* prescribe for adam and sgd"):
        cost.memory(settings(optimizer__name="adafactor"))


# Memory


def saved_bytes(config):
    """Bytes that autograd keeps for the backward pass, parameters excluded."""
    model, _ = network(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given out again
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, precision(config):
        model(*batch(config))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("low", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("case", SHAPES)
def test_activations_are_what_autograd_keeps(case, dropout, low):
    """Beside them it keeps the copies of weights and the output's gradient.

    Targets, [pad]s and, under autocast, the encoder's unrounded output live on without being kept.
    Attention has no dropout here: with it a CPU computes attention as no GPU does.
    """
    config = settings(
        *case, training__precision=low, model__dropout=dropout, model__attention_dropout=0.0
    )
    (width, *_, words), _, rows = case
    parts = cost.memory(config)
    alive = 8 + 1 + (4 * width if low == "bf16" else 0)
    kept = parts["activations"] - rows * cost.tokens(config) * alive
    assert kept + parts["weight_copies"] + 4 * words * width == saved_bytes(config)


def peak_bytes(config, recomputed=False):
    """The largest sum of live tensors in a second step of a micro-batched training loop."""
    model, optimizer = network(config)
    for block in [*model.encoder_blocks, *model.decoder_blocks] if recomputed else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    rows = config.training.micro_batch_size or config.training.batch_size
    parts = [part[:rows] for part in batch(config)]

    def step():
        for _ in range(config.training.batch_size // rows):
            with precision(config):
                loss = model(*(part.clone() for part in parts))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    live = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *state])
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    records = sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda e: e.start_ns()
    )
    return live + max(itertools.accumulate(event.nbytes() for event in records))


WORDY = ((128, 1, 32, 1, 4000), 14, 2)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (((256, 1, 64, 4, 64), 14, 2), {}),  # the optimiser's step is the peak
        (((64, 4, 16, 4, 100), 62, 16), {}),  # activations are
        (((64, 4, 16, 4, 100), 62, 16), {"training__micro_batch_size": 4}),
        (((64, 4, 16, 4, 100), 62, 16), {"training__precision": "bf16"}),
        (((64, 2, 16, 1, 2000), 62, 16), {}),  # logits are
        (WORDY, {}),  # the word embedding's gradients are
        (WORDY, {"training__micro_batch_size": 1}),
    ],
)
def test_the_total_is_the_peak_of_a_step(case, changes):
    config = settings(*case, **{"model__attention_dropout": 0.0, **changes})
    assert cost.memory(config)["total"] == pytest.approx(peak_bytes(config), rel=0.03)


def test_blocks_that_are_recomputed_keep_their_input_and_one_of_them_everything():
    config = settings((64, 8, 16, 4, 100), 62, 16, model__attention_dropout=0.0)
    parts = cost.memory(config)
    kept = cost.activations(config, 16, recomputed=True)
    assert kept < parts["activations"] / 4
    expected = parts["weights"] + parts["optimizer"] + kept + parts["loss"]
    assert expected == pytest.approx(peak_bytes(config, recomputed=True), rel=0.1)
    assert cost.memory(config, shards=2)["activations"] == cost.activations(config, 8, True)


def test_shards_divide_the_state_and_replicas_repeat_it():
    config = settings(R2C2, training__micro_batch_size=4)
    one, replicated = cost.memory(config), cost.memory(config, replicas=8)
    sharded = cost.memory(config, shards=8)
    for part in ("weights", "gradients", "optimizer"):
        assert replicated[part] == one[part] == pytest.approx(8 * sharded[part], abs=8)
    assert replicated["activations"] == one["activations"]  # the same micro-batch
    assert replicated["loss"] == one["loss"] == sharded["loss"]
    assert replicated["communication"] == one["weights"]  # DDP's buckets
    embedding = (50_265 + 2 * 514) * 2048
    assert one["communication"] == 0
    assert sharded["communication"] == 4 * (embedding + 4 * 16 * 2048**2)


def test_a_gpu_takes_no_more_samples_than_its_share_of_the_batch():
    config = settings(rows=64, training__micro_batch_size=32)
    per_row = cost.activations(config, 8) - cost.activations(config, 7)
    first, second = (cost.memory(config, replicas=n)["activations"] for n in (2, 16))
    assert first - second == 28 * per_row


def test_bf16_rounds_the_matrices_of_all_blocks_or_of_one_decoder_block():
    low = settings(training__precision="bf16")
    assert cost.memory(settings())["weight_copies"] == 0
    assert cost.memory(low)["weight_copies"] == 2 * 28 * 12 * 1024**2
    assert cost.memory(low, shards=8)["weight_copies"] == 2 * 16 * 1024**2


def test_counting_imports_neither_torch_nor_fairseq():
    code = (
        "import sys, bart_span_denoise.cost\n"
        "sys.exit(bool({'torch', 'fairseq'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
