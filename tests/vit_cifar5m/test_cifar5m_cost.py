"""Closed forms of a run's cost: against the model class, torch's counters and its optimisers."""

import contextlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from measure import observations
from training import memory, optimizers
from training.config import load
from vit_cifar5m import cost, train
from vit_cifar5m.config import Config
from vit_cifar5m.model import cross_entropy

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(8, 2, 1, 4), (4, 6, 3, 8), (16, 4, 2, 16)]  # N, H, L, patch
PAPER = (16, 16, 4, 4)


def settings(shape=PAPER, rows=4, **changes):
    """A config; `__` stands for the dot of a key."""
    names = ("model.head_dim", "model.heads", "model.layers", "model.patch_size")
    values = dict(zip(names, shape)) | {"training.batch_size": rows, "training.steps": 7}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    path = ROOT / "vit_cifar5m/configs/laptop.yaml"
    return load(Config, path, [f"{key}={value}" for key, value in values.items()])


def network(config, device="cpu"):
    """The config's model, initialised unless it is on meta, and its plan."""
    with torch.device(device):
        model = train.build_model(config)
    planned = train.build_plan(config, model)
    if device == "cpu":
        planned.initialise(model, 0)
    return model, planned


def batch(config):
    generator = torch.Generator().manual_seed(0)
    rows = config.training.batch_size
    images = torch.randn(rows, 3, 32, 32, generator=generator)
    return images, torch.randint(config.model.classes, (rows,), generator=generator)


def loss(config, model):
    images, labels = batch(config)
    low = config.training.precision == "bf16"
    with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
        logits = model(images)
    return cross_entropy(logits, labels)


@pytest.mark.parametrize("shape", [*SHAPES, PAPER])
def test_parameters_are_those_of_the_model_class(shape):
    config = settings(shape)
    model, _ = network(config, "meta")
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    stem = counts["patch_embedding.weight"] + counts["position_embedding.weight"]
    assert cost.parameters(config) == {
        "embedding": stem,
        "non_embedding": sum(counts.values()) - stem,
        "total": sum(counts.values()),
    }


def test_numbers_of_the_papers_base_model():
    config = settings(rows=256, training__steps=19_540)
    assert cost.parameters(config)["total"] == 6 * 4 * 256**2 + (48 + 64 + 10) * 256 == 1_604_096
    assert cost.tokens_per_step(config) == 256 * 64
    image = 64 * (48 * 256 + 24 * 256**2 + 2 * 4 * 64 * 256) + 2560
    assert cost.flops(config) == 6 * 19_540 * 256 * image


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_torch_counts(shape):
    """But for the gradient of the patches, which nobody forms and the convention counts."""
    config = settings(shape)
    model, _ = network(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch(config)[0]).sum().backward()
    patches = model.patch_embedding.weight.numel() * 4 * cost.tokens(config.model)
    assert cost.flops(config) == 7 * (counter.get_total_flops() + 2 * patches)


@pytest.mark.parametrize("name", ["sgd", "adam", "adam_atan2"])
def test_optimizer_state_is_what_the_optimizer_keeps(name):
    config = settings(SHAPES[1], optimizer__name=name)
    model, planned = network(config)
    optimizer = optimizers.build(name, planned.groups(model))
    loss(config, model).backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    size = sum(t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor))
    assert cost.optimizer_state(config) == size


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

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(config, model)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_keeps(shape, precision):
    """Beside them: copies of weights, the log-probabilities, labels and numbers of positions."""
    config = settings(shape, training__precision=precision)
    parts = cost.memory(config)
    found = saved_bytes(config) - parts["activations"] - parts["weight_copies"]
    assert found == 4 * 4 * 10 + 4 * 8 + 8 * cost.tokens(config.model) + 4


def test_shards_divide_the_state_and_replicas_repeat_it():
    config = settings(rows=256, training__micro_batch_size=8)
    one, replicated = cost.memory(config), cost.memory(config, replicas=8)
    sharded = cost.memory(config, shards=8)
    for part in ("weights", "gradients", "optimizer"):
        assert replicated[part] == one[part] == pytest.approx(8 * sharded[part], abs=8)
    assert replicated["activations"] == one["activations"] > sharded["activations"]
    assert replicated["communication"] == one["weights"]
    assert one["communication"] == 0 < sharded["communication"]
    assert one["weight_copies"] > sharded["weight_copies"]


def observed_peaks(config, folder, monkeypatch):
    """The most bytes each observation of a run allocates and has not yet freed."""
    found, observe = [], observations.ObservationRecorder.observe
    activities = [torch.profiler.ProfilerActivity.CPU]

    def measured(self):
        assert all(parameter.grad is None for parameter in self.run.task.model.parameters())
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            observation = observe(self)
        events = profiler.profiler.kineto_results.events()
        records = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
        found.append(max(itertools.accumulate(event.nbytes() for event in records)))
        return observation

    monkeypatch.setattr(observations.ObservationRecorder, "observe", measured)
    train.EXPERIMENT.run(config, folder)
    return found


@pytest.mark.parametrize(
    "shape",
    [(4, 64, 2, 4), (8, 3, 1, 2), (16, 16, 3, 4)],  # kurtosis over heads, too few for it, movement
)
def test_an_observation_takes_what_a_run_does_for_one(shape, tmp_path, monkeypatch):
    config = settings(
        shape, 2, training__observe_every=1, training__observe_samples=8, training__steps=1,
        training__eval_every=0, data__validation_images=8,
    )
    parts = cost.memory(config)
    peaks = observed_peaks(config, tmp_path, monkeypatch)
    assert peaks == pytest.approx([parts["observation"]] * 2, rel=0.03)  # before and after a step
    assert memory.is_observation(parts)  # of 8 images, and the step has 2
    assert parts["total"] == parts["weights"] + parts["optimizer"] + parts["observation"]


def test_an_observation_of_2048_heads():
    """That of Figure 4: 32 images in 64 patches, two blocks of width 8192."""
    observed = dict(training__observe_every=25, training__observe_samples=32)
    config = settings((4, 2048, 2, 4), 256, **observed)
    weights = 4 * (12 * 8192**2 + (48 + 64 + 10) * 8192)
    streams, logits = 2 * 9 * 4 * 32 * 64 * 8192, 4 * 32 * 2048 * 64**2
    over_heads = 3 * logits + logits // 2048
    assert cost.memory(config)["observation"] == weights + streams + over_heads + 2 * 4 * 32 * 10
    assert not memory.is_observation(cost.memory(config))  # a step of 256 images takes more
    few = settings((4, 2048, 2, 4), 8, **observed)
    assert memory.is_observation(cost.memory(few))
    assert cost.memory(few, replicas=2)["observation"] == cost.memory(config)["observation"]


def test_a_run_that_is_not_observed_needs_nothing_for_it():
    observed = settings(PAPER, training__observe_every=1, training__observe_samples=512)
    assert cost.memory(observed)["total"] > cost.memory(settings(PAPER))["total"]
    for parts in (cost.memory(settings(PAPER)), cost.memory(observed, shards=2)):
        assert parts["observation"] == 0 and not memory.is_observation(parts)


def test_counting_does_not_import_torch():
    code = "import sys, vit_cifar5m.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
