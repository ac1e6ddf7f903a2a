"""The sweep of Figures 1 and 2, and the scripts that launch it."""

import math
from pathlib import Path

import pytest

from sweeps.rules import around
from sweeps.sweep_file import load_sweep
from vit_imagenet import train

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "vit_imagenet/sweeps/figure_1_2.yaml"
STRATEGIES = ["standard", "neural_tangent", "hybrid", "maximal_update"]


@pytest.fixture(params=[None, "laptop"])
def sweep(request, tmp_path):
    return load_sweep(SWEEP, tmp_path, request.param)


def bulk(config):
    """lr lambda of the blocks' matrices, as in the paper's table."""
    s = {"standard": None, "neural_tangent": 0, "hybrid": 0.5, "maximal_update": 1}
    s, n = s[config.prescription.strategy], config.model.width
    return config.optimizer.lr * (1 if s is None else n ** (-1 - (1 - s) / 2))


def test_four_searches_start_at_about_equal_rates_and_equal_decay(sweep):
    assert [point.curve for point in sweep.points] == STRATEGIES
    for point in sweep.points:
        config = point.config
        assert config.prescription.strategy == point.curve
        assert abs(math.log2(bulk(config) / bulk(sweep.points[0].config))) < 0.55
        decay = config.optimizer.lr * config.optimizer.weight_decay
        first = sweep.points[0].config.optimizer
        assert decay == pytest.approx(first.lr * first.weight_decay)
        assert config.optimizer.decay_mode == "global"


def test_the_paper_s_search_starts_at_the_published_optima(tmp_path):
    points = load_sweep(SWEEP, tmp_path).points[:2]
    found = [(p.config.optimizer.lr, p.config.optimizer.weight_decay) for p in points]
    assert found == [(1e-3, 0.8), (20, 4e-5)]


def test_the_rule_is_the_paper_s(sweep):
    rule = sweep.config.confirm
    published = {(2, 1), (1, 2), (2, 0.5), (0.5, 2), (1, 0.5), (0.5, 1)}
    assert set(around((1.0, 1.0), rule.neighbours)) == published
    assert rule.metric == "best_eval_top1" and sweep.config.metrics
    assert rule.seeds == list(range(5 if sweep.folder.name.endswith("_laptop") else 3))


def test_the_paper_s_settings_stand_in_every_run(tmp_path):
    for point in load_sweep(SWEEP, tmp_path).points:
        config = point.config
        assert train.EXPERIMENT.parameters(config)["total"] == 86_444_008
        assert config.training.steps == 300 * (1_281_167 // 4096)
        assert config.schedule.warmup_steps == 20 * 312 and config.training.eval_every == 312
        optimizer = config.optimizer
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)
        assert config.floor * optimizer.lr == pytest.approx(1e-6)
