"""What an observation costs, against a run that makes one; all other costs are in test_costs."""

import pytest

from measure import observations
from tests.cost_cases import CIFAR
from tests.memory import most_allocated
from training import memory
from vit_cifar5m import cost, train

PAPER = (16, 16, 4, 4)  # N, H, L, patch


def settings(shape=PAPER, rows=4, **changes):
    return CIFAR.settings((*shape, rows), **changes)


def observed_peaks(config, folder, monkeypatch):
    """The most bytes each observation of a run allocates and has not yet freed."""
    found, observe = [], observations.ObservationRecorder.observe

    def measured(self):
        assert all(parameter.grad is None for parameter in self.run.task.model.parameters())
        made = []
        found.append(most_allocated(lambda: made.append(observe(self))))
        return made[0]

    monkeypatch.setattr(observations.ObservationRecorder, "observe", measured)
    train.EXPERIMENT.run(config, folder)
    return found


@pytest.mark.parametrize(
    "shape",
    [(4, 64, 2, 4), (8, 3, 1, 2), (16, 16, 3, 4)],  # kurtosis over heads, too few for it, movement
)
def test_an_observation_takes_what_a_run_does_for_one(shape, tmp_path, monkeypatch):
    config = settings(
        shape,
        2,
        training__observe_every=1,
        training__observe_samples=8,
        training__steps=1,
        training__eval_every=0,
        data__validation_images=8,
    )
    parts = cost.memory(config)
    peaks = observed_peaks(config, tmp_path, monkeypatch)
    assert peaks == pytest.approx([parts["observation"]] * 2, rel=0.03)  # before and after a step
    assert memory.is_observation(parts)  # of 8 images, and the step has 2
    assert parts["total"] == parts["weights"] + parts["optimizer"] + parts["observation"]


def test_an_observation_of_2048_heads():
    """That of Figure 4: 32 images in 64 patches, two blocks of width 8192."""
    observed = {"training__observe_every": 25, "training__observe_samples": 32}
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
