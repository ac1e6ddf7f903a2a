"""The sweeps of Bordelon et al. record what their figures need; run_ids.json holds their runs."""

from pathlib import Path

import pytest
import torch

from sweeps.sweep_file import load_sweep
from training import task as tasks
from training.config import load
from vit_cifar5m import train
from vit_cifar5m.config import Config

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "vit_cifar5m/sweeps"
VIT = SWEEPS / "figure_6.yaml"
DECODER = ROOT / "nanolm_c4/sweeps/figure_7_12.yaml"


@pytest.mark.parametrize("preset", [None, "laptop"])
def test_what_is_measured_is_observed_before_training_and_at_its_end(preset, tmp_path):
    for name in ("figure_11", "figure_13"):
        sweep = load_sweep(SWEEPS / f"{name}.yaml", tmp_path, preset)
        assert sweep.config.observations and sweep.config.metrics == (name == "figure_11")
        for point in sweep.points:
            settings = point.config.training
            assert settings.observe_every >= settings.steps
    for name in ("figure_4", "figure_5"):
        sweep = load_sweep(SWEEPS / f"{name}.yaml", tmp_path, preset)
        assert sweep.config.metrics and (sweep.config.observations or name == "figure_4")
        for settings in (point.config.training for point in sweep.points):
            assert settings.observe_every and settings.steps % settings.eval_every == 0


def test_runs_of_one_data_seed_differ_in_their_initial_weights_alone():
    words = (
        "model.head_dim=2 model.heads=2 model.layers=1 model.patch_size=16 training.batch_size=4"
    ).split()

    def begin(seed, *more):
        config = load(
            Config, ROOT / "vit_cifar5m/configs/laptop.yaml", [*words, f"seed={seed}", *more]
        )
        task = train.build_task(config)
        tasks.initialise(task)
        return task.model.readout.weight, next(iter(tasks.first_batches(task, 1)))[0]

    (one, images), (two, same) = begin(3, "data.seed=0"), begin(4, "data.seed=0")
    assert torch.equal(images, same) and not torch.equal(one, two)
    assert torch.equal(begin(0)[1], images)
    assert not torch.equal(begin(4)[1], images)


def models(sweep):
    """(alpha_A, H, N, L) of every point."""
    configs = [p.config for p in sweep.points if p.seed == sweep.config.seeds[0]]
    alphas = [config.prescription.alpha_attention for config in configs]
    shapes = [(c.model.heads, c.model.head_dim, c.model.layers) for c in configs]
    return [(alpha, *shape) for alpha, shape in zip(alphas, shapes, strict=True)]


@pytest.mark.parametrize("path", [VIT, DECODER])
@pytest.mark.parametrize("preset", [None, "laptop"])
def test_scans_share_one_base_and_record_what_the_figures_need(path, preset, tmp_path):
    sweep = load_sweep(path, tmp_path, preset)
    assert len(set(models(sweep))) == len(models(sweep))
    base = min(models(sweep))[1:]
    for _, *sizes in models(sweep):
        assert sum(size != own for size, own in zip(sizes, base, strict=True)) <= 1
    for config in (point.config for point in sweep.points):
        # Two observations, before and after: nothing between.
        assert config.training.observe_every == config.training.steps
        # A curve of test loss, Fig. 6a.
        settings = config.training
        assert settings.eval_per_octave or 0 < settings.eval_every * 10 <= settings.steps
    assert sweep.config.metrics and sweep.config.observations
    sizes = {f"model.{size}" for size in ("heads", "head_dim", "layers")}
    assert {*sizes, "prescription.alpha_attention"} <= {
        *sweep.config.set,
        *(key for grid in sweep.config.grids.values() for key in grid),
    }
    assert len(sweep.config.seeds) > 1
    if preset:
        assert sum(sweep.experiment.flops(point.config) for point in sweep.points) < 3e13
