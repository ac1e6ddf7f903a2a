"""The sweep of Figures 1 and 2, and the scripts that launch it."""

import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sweeps.confirm import around
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
        assert train.parameters(config)["total"] == 86_444_008
        assert config.training.steps == 300 * (1_281_167 // 4096)
        assert config.schedule.warmup_steps == 20 * 312 and config.training.eval_every == 312
        optimizer = config.optimizer
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)
        assert config.floor * optimizer.lr == pytest.approx(1e-6)


def test_a_laptop_run_has_few_enough_parameters_to_train_in_seconds(tmp_path):
    for point in load_sweep(SWEEP, tmp_path, "laptop").points:
        assert train.flops(point.config) < 1e12
        assert point.config.data.source == "embedded"


# ------------------------------------------------------------------------------------------------
# Scripts


@pytest.fixture
def launcher(tmp_path):
    """Runs scripts/vit_imagenet.sh where `accelerate` and `python` only say what they are given."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/vit_imagenet.sh", tmp_path / "scripts")
    (tmp_path / "scripts/environment.sh").write_text(f'cd "{tmp_path}"\n')
    (tmp_path / "bin").mkdir()
    for name in ("accelerate", "python"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        path.chmod(0o755)

    def call(*words, **variables):
        env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **variables}
        command = ["bash", "scripts/vit_imagenet.sh", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return call


def test_one_node_launches_one_process_per_gpu_and_passes_overrides_on(launcher):
    out = launcher("optimizer.lr=1e-3", GPUS="4").stdout
    assert out == (
        "accelerate launch --config_file scripts/accelerate/one_node_8gpu.yaml --num_processes 4 "
        "-m vit_imagenet.train vit_imagenet/configs/paper.yaml optimizer.lr=1e-3\n"
    )
    assert "--num_processes 8 " in launcher("run").stdout


def test_several_nodes_need_a_rank_and_an_address(launcher):
    out = launcher(NODES="2", NODE="1", FIRST_NODE="10.0.0.1").stdout
    assert "several_nodes.yaml --num_machines 2 --num_processes 16 --machine_rank 1" in out
    assert "--main_process_ip 10.0.0.1 -m vit_imagenet.train" in out
    refused = launcher(NODES="2")
    assert refused.returncode != 0 and "the rank of this node" in refused.stderr


def test_the_search_launches_its_runs_by_accelerate_and_draws(launcher, tmp_path):
    assert len(launcher("search", "--dry-run").stdout.splitlines()) == 1  # no table to draw yet
    table = tmp_path / "results/vit_imagenet/figure_1_2/metrics.csv"
    table.parent.mkdir(parents=True)
    table.touch()
    lines = launcher("search").stdout.splitlines()
    assert lines[0].startswith("python -m sweeps run vit_imagenet/sweeps/figure_1_2.yaml")
    assert lines[0].endswith("--num_processes 8 --main_process_port 0")
    drawn = [line.split()[1:4] for line in lines[1:]]
    assert drawn == [["-m", "plots", f"dinan/{name}"] for name in ("vit_search", "vit_strategies")]
    slurm = launcher("slurm", "--partition", "gpu").stdout
    file = "vit_imagenet/sweeps/figure_1_2.yaml"
    assert slurm.startswith(f"python -m sweeps submit {file} --engine slurm --jobs 4")
    assert slurm.rstrip().endswith("--main_process_port 0 --partition gpu")


@pytest.mark.parametrize("name", ["one_node_8gpu", "several_nodes"])
def test_the_launch_configs_are_there(name):
    assert (ROOT / f"scripts/accelerate/{name}.yaml").exists()
