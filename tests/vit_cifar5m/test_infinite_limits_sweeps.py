"""The sweeps of Bordelon et al.'s figures are the papers', and record what the figures need."""

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


def values(configs, section, key):
    return sorted({getattr(getattr(config, section), key) for config in configs})


@pytest.mark.parametrize(
    ("name", "runs", "heads", "head_dims", "steps", "optimizers"),
    [
        ("figure_2", 2 * 5 * 8 * 2, 16, [4, 8, 16, 32, 64], [2500], ["sgd"]),
        ("figure_11", 2 * 7 * 3, 4, [8, 16, 32, 64, 128, 256, 512], [2500], ["sgd"]),
        ("figure_13", 4 * 7 * 2 * 3, 1, [2**k for k in range(7, 14)], [1, 200], ["adam", "sgd"]),
    ],
)
def test_every_sweep_of_the_paper_crosses_head_dimensions_and_both_alphas(
    name, runs, heads, head_dims, steps, optimizers, tmp_path
):
    points = load_sweep(SWEEPS / f"{name}.yaml", tmp_path).points
    configs = [point.config for point in points]
    assert len(configs) == len({point.run for point in points}) == runs
    assert values(configs, "model", "heads") == [heads]
    assert values(configs, "model", "head_dim") == head_dims
    assert values(configs, "prescription", "alpha_attention") == [0.5, 1.0]
    assert values(configs, "training", "steps") == steps
    assert values(configs, "optimizer", "name") == optimizers
    for config in configs:
        rule = config.prescription
        rich = (name, config.optimizer.name) == ("figure_13", "sgd")
        assert (rule.alpha_depth, rule.beta0, rule.gamma0) == (1, 4, 2.0 if rich else 0.1)
        assert config.data.source == "cifar5m"


@pytest.mark.parametrize("preset", [None, "laptop"])
def test_what_is_measured_is_observed_before_training_and_at_its_end(preset, tmp_path):
    for name in ("figure_11", "figure_13"):
        sweep = load_sweep(SWEEPS / f"{name}.yaml", tmp_path, preset)
        assert sweep.config.observations and sweep.config.metrics == (name == "figure_11")
        for point in sweep.points:
            settings = point.config.training
            assert settings.observe_every >= settings.steps


def test_the_sweep_over_heads_is_the_papers():
    sweep = load_sweep(SWEEPS / "figure_4.yaml")
    assert len(sweep.points) == 8 * 10
    assert sorted({p.config.model.heads for p in sweep.points}) == [2**k for k in range(4, 12)]
    config = sweep.points[0].config
    assert (config.model.layers, config.model.head_dim, config.training.steps) == (2, 4, 2500)
    rule = config.prescription
    assert (rule.gamma0, rule.beta0, rule.alpha_attention) == (0.05, 4, 0.5)
    assert (config.optimizer.name, config.optimizer.momentum) == ("sgd", 0)
    steps = (0, 25, 100, 250, 500, 1000, 2000)  # of Figure 4b
    assert all(step % config.training.observe_every == 0 for step in steps)
    assert sweep.config.metrics


def test_seeds_of_the_sweep_over_heads_share_their_data():
    points = load_sweep(SWEEPS / "figure_4.yaml", preset="laptop").points
    assert len(points) == 5 * 5 and {p.seed for p in points} == set(range(5))
    assert {p.config.data.seed for p in points} == {0}
    assert {p.config.training.observe_every for p in points} == {25}


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


@pytest.mark.parametrize(
    ("preset", "depths", "tried"), [(None, [1, 4, 8, 16, 32], 7), ("laptop", [1, 2, 4, 8, 16], 1)]
)
def test_the_sweep_over_depth_has_both_exponents_at_equal_width(preset, depths, tried):
    sweep = load_sweep(SWEEPS / "figure_5.yaml", preset=preset)
    assert len(sweep.points) == 2 * len(depths) * tried * 3  # seeds
    found = {(p.config.prescription.alpha_depth, p.config.model.layers) for p in sweep.points}
    assert found == {(alpha, depth) for alpha in (0.5, 1.0) for depth in depths}
    assert len({p.config.model.width for p in sweep.points}) == 1
    rates = {(p.config.prescription.alpha_depth, p.config.optimizer.lr) for p in sweep.points}
    assert len(rates) == 2 * tried
    assert sweep.config.metrics and sweep.config.observations
    settings = sweep.points[0].config.training
    assert settings.observe_every and settings.steps % settings.eval_every == 0


def models(sweep):
    """(alpha_A, H, N, L) of every point."""
    configs = [p.config for p in sweep.points if p.seed == sweep.config.seeds[0]]
    alphas = [config.prescription.alpha_attention for config in configs]
    shapes = [(c.model.heads, c.model.head_dim, c.model.layers) for c in configs]
    return [(alpha, *shape) for alpha, shape in zip(alphas, shapes, strict=True)]


def test_figure_6_is_the_papers_scans_from_one_base(tmp_path):
    sweep = load_sweep(VIT, tmp_path)
    ones = {
        (16, 16, 4),
        *((h, 16, 4) for h in (32, 64, 128)),
        *((16, n, 4) for n in (32, 64, 128)),
        *((16, 16, d) for d in (8, 16, 32, 64)),
    }
    halves = {(16, n, 4) for n in (16, 32, 64, 128)}
    assert sorted(models(sweep)) == sorted([*((1, *m) for m in ones), *((0.5, *m) for m in halves)])
    for config in (point.config for point in sweep.points):
        rule, loop = config.prescription, config.training
        assert (rule.alpha_depth, rule.beta0, rule.gamma0) == (1, 4, 0.1)
        assert config.optimizer.name == "sgd" and config.optimizer.momentum > 0
        assert 4_990_000 < loop.steps * loop.batch_size <= 5_002_240 and not config.data.repeat


def test_figure_7_12_is_the_papers_scans_at_both_alphas(tmp_path):
    sweep = load_sweep(DECODER, tmp_path)
    own = {
        (8, 8, 4),
        *((h, 8, 4) for h in (16, 32, 64, 128)),
        *((8, n, 4) for n in (16, 32, 64, 128)),
        *((8, 8, d) for d in (8, 16, 32, 64)),
    }
    assert sorted(models(sweep)) == sorted((a, *m) for a in (0.5, 1) for m in own)
    for config in (point.config for point in sweep.points):
        rule = config.prescription
        assert (rule.alpha_depth, rule.beta0, rule.gamma0) == (1, 4, 0.25)
        assert (config.optimizer.name, config.training.steps) == ("adam", 10_000)


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
