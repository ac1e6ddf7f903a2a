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
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from param_groups import Dinan, plan
from training import optimizers
from training.config import set_keys, validate
from training.errors import UserError
from vit_imagenet import cost
from vit_imagenet.config import Config
from vit_imagenet.model import ROLES, build

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("width", "layers", "head_dim", "mlp_ratio", "patch_size", "image_size", "classes")
PAPER = (768, 12, 64, 4, 16, 224, 1000)
SHAPES = [  # with as many images
    ((64, 1, 16, 4, 4, 16, 10), 4),
    ((48, 3, 8, 2, 5, 20, 21), 2),
    ((32, 2, 32, 1, 4, 32, 300), 5),
]


def settings(shape=PAPER, rows=4096, **changes):
    """A config; `__` stands for the dot of a key."""
    base = {
        "model": dict(zip(KEYS, shape)),
        "prescription": {"strategy": "neural_tangent"},
        "data": {"source": "embedded", "augmentation": {"mixup": 0, "cutmix": 0}},
        "optimizer": {"name": "adam", "lr": 1.0},
        "schedule": {},
        "training": {"steps": 7, "batch_size": rows},
    }
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return validate(Config, set_keys(base, values), "test")


def network(config, device="cpu"):
    """The config's model, initialised unless it is on meta, and its optimiser."""
    with torch.device(device):
        model = build(config.model)
    prescription = Dinan(config.model.width, optimizer=config.optimizer.name)
    planned = plan(model, ROLES, prescription, lr=1e-3)
    if device == "meta":
        return model, None
    planned.initialise(model, 0)
    return model, optimizers.build(config.optimizer.name, planned.groups(model))


def batch(config):
    """Images and soft targets."""
    generator = torch.Generator().manual_seed(0)
    shape, rows = config.model, config.training.batch_size
    images = torch.randn(rows, 3, shape.image_size, shape.image_size, generator=generator)
    return images, torch.rand(rows, shape.classes, generator=generator).softmax(-1)


def loss(model, images, targets, low=False):
    """The summed loss, as a run has it: float32 after autocast."""
    with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
        logits = model(images)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


@pytest.mark.parametrize("shape", [*(shape for shape, _ in SHAPES), PAPER])
def test_parameters_are_those_of_the_model_class(shape):
    config = settings(shape)
    model, _ = network(config, "meta")
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    stem = counts["patch_embed.proj.weight"] + counts["pos_embed"]
    assert cost.parameters(config) == {
        "embedding": stem,
        "non_embedding": sum(counts.values()) - stem,
        "total": sum(counts.values()),
    }


def test_parameters_of_the_papers_model():
    found = cost.parameters(settings())
    assert found == {"embedding": 740_352, "non_embedding": 85_703_656, "total": 86_444_008}


@pytest.mark.parametrize(("shape", "rows"), SHAPES)
def test_flops_are_those_torch_counts(shape, rows):
    """But for patchify's gradient of the images, which nobody forms and the convention counts."""
    config = settings(shape, rows)
    model, _ = network(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch(config)[0]).sum().backward()
    patchify = model.patch_embed.proj.weight.numel() * rows * model.pos_embed.shape[1]
    assert cost.flops(config) == 7 * (counter.get_total_flops() + 2 * patchify)


def test_flops_and_tokens_of_the_papers_run():
    config = settings(training__steps=93_600)
    assert cost.tokens_per_step(config) == 4096 * 196
    weights, attention = 768 * 768 + 12 * 12 * 768**2, 2 * 12 * 196 * 768
    image = 196 * (weights + attention) + 768 * 1000
    assert cost.flops(config) == 6 * 93_600 * 4096 * image
    assert cost.flops(config) == pytest.approx(4.019e19, rel=1e-3)


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize(("shape", "rows"), SHAPES[:2])
def test_optimizer_state_is_what_the_optimizer_keeps(shape, rows, name):
    config = settings(shape, rows, optimizer__name=name)
    model, optimizer = network(config)
    loss(model, *batch(config)).backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert cost.optimizer_state(config) == sum(t.numel() * t.element_size() for t in kept)


def test_an_optimizer_without_rates_in_the_paper_is_refused():
    with pytest.raises(UserError, match="optimizer.name adafactor: .* prescribe for adam and sgd"):
        cost.memory(settings(optimizer__name="adafactor"))


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

    low = config.training.precision == "bf16"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model, *batch(config), low)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "rows"), SHAPES)
def test_activations_are_what_autograd_keeps(shape, rows, precision):
    """Beside them it keeps the copies of weights, the targets and the log-probabilities.

    Under autocast the images themselves and the rounded head bias live on without being kept.
    """
    config = settings(shape, rows, training__precision=precision)
    parts = cost.memory(config)
    kept = parts["activations"] + parts["weight_copies"] + 2 * 4 * rows * shape[-1]
    if precision == "bf16":
        kept -= 4 * batch(config)[0].numel() + 2 * shape[-1]
    assert kept == saved_bytes(config)


def peak_bytes(config, recomputed=False):
    """The largest sum of live tensors in a second step of a micro-batched training loop."""
    model, optimizer = network(config)
    for block in model.blocks if recomputed else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    low = config.training.precision == "bf16"
    rows = config.training.micro_batch_size or config.training.batch_size
    images, targets = (part[:rows] for part in batch(config))

    def step():
        for _ in range(config.training.batch_size // rows):
            loss(model, images.clone(), targets.clone(), low).backward()
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


@pytest.mark.parametrize(
    ("shape", "rows", "changes"),
    [
        ((256, 1, 64, 4, 4, 8, 10), 2, {}),  # the optimiser's step is the peak
        ((64, 4, 16, 4, 4, 32, 10), 32, {}),  # activations are
        ((64, 4, 16, 4, 4, 32, 10), 32, {"training__micro_batch_size": 8}),
        ((64, 4, 16, 4, 4, 32, 10), 32, {"training__precision": "bf16"}),
        ((32, 1, 16, 1, 8, 8, 2000), 64, {}),  # logits are
        ((256, 2, 64, 4, 4, 8, 10), 2, {"optimizer__name": "sgd"}),
    ],
)
def test_the_total_is_the_peak_of_a_step(shape, rows, changes):
    config = settings(shape, rows, **changes)
    assert cost.memory(config)["total"] == pytest.approx(peak_bytes(config), rel=0.1)


def test_blocks_that_are_recomputed_keep_their_input_and_one_of_them_everything():
    config = settings((64, 8, 16, 4, 4, 32, 10), 32)
    parts = cost.memory(config)
    kept = cost.activations(config, 32, recomputed=True)
    assert kept < parts["activations"] / 3
    expected = parts["weights"] + parts["optimizer"] + kept + parts["loss"]
    assert expected == pytest.approx(peak_bytes(config, recomputed=True), rel=0.1)
    assert cost.memory(config, shards=2)["activations"] == cost.activations(config, 16, True)


def test_shards_divide_the_state_and_replicas_repeat_it():
    config = settings(training__micro_batch_size=64)
    one, replicated = cost.memory(config), cost.memory(config, replicas=8)
    sharded = cost.memory(config, shards=8)
    for part in ("weights", "gradients", "optimizer"):
        assert replicated[part] == one[part] == pytest.approx(8 * sharded[part], abs=8)
    assert replicated["activations"] == one["activations"]  # the same micro-batch
    assert replicated["loss"] == one["loss"] == sharded["loss"]
    assert replicated["communication"] == one["weights"]  # DDP's buckets
    assert one["communication"] == 0 < sharded["communication"]


def test_a_gpu_takes_no_more_images_than_its_share_of_the_batch():
    config = settings(rows=64, training__micro_batch_size=32)
    per_row = cost.activations(config, 8) - cost.activations(config, 7)
    first, second = (cost.memory(config, replicas=n)["activations"] for n in (2, 16))
    assert first - second == 28 * per_row


def test_bf16_rounds_the_weights_of_all_matrices_or_of_one_block():
    low = settings(training__precision="bf16")
    assert cost.memory(settings())["weight_copies"] == 0
    matrices = 86_444_008 - 196 * 768
    assert cost.memory(low)["weight_copies"] == 2 * matrices
    block = 12 * 768**2
    assert cost.memory(low, shards=8)["weight_copies"] == 2 * (matrices - 11 * block)


def test_counting_imports_neither_torch_nor_timm():
    code = "import sys, vit_imagenet.cost; sys.exit(bool({'torch', 'timm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
