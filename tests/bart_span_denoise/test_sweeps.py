"""The sweeps of Figures 3 to 5, and the script that launches them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bart_span_denoise import train
from sweeps.sweep_file import load_sweep
from training.config import load

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "bart_span_denoise/sweeps"


def test_neural_tangent_runs_are_the_standard_ones_mapped(tmp_path):
    """(n^(3/2) lr, n^(-3/2) wd), point by point (section 2E)."""
    for name, n in (("figure_3_4", 1024), ("figure_5", 2048)):
        points = load_sweep(SWEEPS / f"{name}.yaml", tmp_path).points
        standard, mapped = (
            [point.config.optimizer for point in points if point.curve == curve]
            for curve in ("standard", "neural_tangent")
        )
        assert len(standard) == len(mapped) > 0
        for ours, theirs in zip(mapped, standard):
            assert ours.lr == pytest.approx(n**1.5 * theirs.lr)
            assert ours.weight_decay == pytest.approx(n**-1.5 * theirs.weight_decay)


def test_the_published_optima_are_in_the_grids(tmp_path):
    points = load_sweep(SWEEPS / "figure_3_4.yaml", tmp_path).points
    rates = {curve: [p.config.optimizer.lr for p in points if p.curve == curve]
             for curve in ("standard", "neural_tangent")}
    assert 1e-3 in rates["standard"] and {16.384, 32.768} <= set(rates["neural_tangent"])
    r2c2 = [p.config.optimizer.lr for p in load_sweep(SWEEPS / "figure_5.yaml", tmp_path).points]
    assert r2c2 == [7e-4, pytest.approx(64.88, abs=0.01)]


@pytest.mark.parametrize(
    ("name", "parameters", "steps"),
    [("figure_3_4", 404_845_568, 200_000), ("figure_5", 2_688_739_328, 15_000)],
)
def test_the_paper_s_settings_stand_in_every_run(tmp_path, name, parameters, steps):
    for point in load_sweep(SWEEPS / f"{name}.yaml", tmp_path).points:
        config, optimizer = point.config, point.config.optimizer
        assert train.parameters(config)["total"] == parameters
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.998, 1e-6)
        assert (optimizer.clip_norm, optimizer.decay_mode) == (0.1, "global")
        assert (config.training.steps, config.training.batch_size) == (steps, 512)
        assert (config.schedule.name, config.schedule.warmup_steps) == ("linear", 5000)
        assert (config.schedule.steps or steps) == 200_000
        assert config.model.dropout == config.model.attention_dropout == 0.1
        noise = config.data.noise
        assert (noise.unit, noise.fraction, noise.fraction_mode) == ("word", 0.3, "fairseq")


def test_the_laptop_decay_is_mapped_at_each_width(tmp_path):
    sweep = load_sweep(SWEEPS / "figure_3_4.yaml", tmp_path, "laptop")
    for point in sweep.points:
        n = point.config.model.width
        factor = n**-1.5 if point.curve == "neural_tangent" else 1
        assert point.config.optimizer.weight_decay == pytest.approx(0.01 * factor)
    assert {point.config.model.width for point in sweep.points} == {64, 128}


def test_the_laptop_keeps_the_paper_s_epsilon_clip_and_schedule():
    laptop = load(train.Config, ROOT / "bart_span_denoise/configs/laptop.yaml")
    assert (laptop.optimizer.eps, laptop.optimizer.clip_norm) == (1e-6, 0.1)
    assert laptop.schedule.name == "linear"


# ------------------------------------------------------------------------------------------------
# Scripts


@pytest.fixture
def launcher(tmp_path):
    """Runs the script where `accelerate` and `python` only say what they are given."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/bart_span_denoise.sh", tmp_path / "scripts")
    (tmp_path / "scripts/environment.sh").write_text(f'cd "{tmp_path}"\n')
    (tmp_path / "bin").mkdir()
    for name in ("accelerate", "python"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        path.chmod(0o755)

    def call(*words, **variables):
        env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **variables}
        command = ["bash", "scripts/bart_span_denoise.sh", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    return call


def test_bart_large_is_launched_by_ddp_and_r2c2_sharded(launcher):
    assert launcher("optimizer.lr=5e-4", GPUS="4").stdout == (
        "accelerate launch --config_file scripts/accelerate/one_node_8gpu.yaml --num_processes 4 "
        "-m bart_span_denoise.train bart_span_denoise/configs/bart_large.yaml optimizer.lr=5e-4\n"
    )
    assert launcher("r2c2", "seed=1").stdout == (
        "accelerate launch --config_file scripts/accelerate/one_node_8gpu_fsdp.yaml "
        "--num_processes 8 -m bart_span_denoise.train bart_span_denoise/configs/r2c2.yaml seed=1\n"
    )


def test_several_nodes_need_a_rank_and_an_address(launcher):
    out = launcher("r2c2", NODES="2", NODE="1", FIRST_NODE="10.0.0.1").stdout
    assert "several_nodes_fsdp.yaml --num_machines 2 --num_processes 16 --machine_rank 1" in out
    refused = launcher(NODES="2")
    assert refused.returncode != 0 and "the rank of this node" in refused.stderr


def test_the_sweeps_are_launched_and_drawn(launcher):
    lines = launcher("sweeps").stdout.splitlines()
    assert [" ".join(line.split()[2:4]) for line in lines] == [
        "sweeps run", "sweeps run", "plots dinan/bart_rates", "plots dinan/bart_strategies"
    ]
    assert "one_node_8gpu.yaml" in lines[0] and "one_node_8gpu_fsdp.yaml" in lines[1]
    assert "figure_5/metrics.csv" in lines[3]
    for refused in (launcher("sweeps", "seed=1"), launcher("sweeps", NODES="2")):
        assert refused.returncode == 2 and refused.stderr.startswith("error: sweeps takes no")
