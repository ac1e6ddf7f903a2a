"""Figures 3, 4 and 5 of Bordelon et al.: findings on known answers, and what is drawn."""

import math
import re
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad

from plots.__main__ import make
from plots.bordelon import depth, initial_heads
from tests.plots.made import rows, written

# Figures 3 and 4


def heads_tables(folder, late=-0.5):
    """Tables with exact powers; networks and seeds differ by a factor of their own. Models of the
    ensemble, H = 16, are as far from it as they differ, which is of no exponent. H = 4 stays at
    chance, without a spread; the rest ends at 1 + 8 / H with one of 1 / H."""
    kernels = [
        (4, 2, h, k, layer, (1 + k / 10) * layer / h, layer)
        for h, k, layer in product((4, 8, 16), range(3), (1, 2))
    ]
    attention = [
        (a, n, 8, k, n ** (1 - 2 * a), (3 + 6 / n) * n ** (2 - 4 * a))
        for a, n, k in product((0.5, 1.0), (1, 4, 16), range(2))
    ]
    bins = [(0.5, n, h, 1, low, low + 1, 10) for n, h, low in product((1, 4), (8, 16), (-1, 0))]
    distance = [
        (h, s, t, h == 16, (7 if h == 16 else 1) * (1 + s / 10) * h**power)
        for h, s, (t, power) in product((4, 8, 16), range(3), ((0, -1), (25, -1), (60, late)))
    ]
    metric = [
        (h, s, t, loss)
        for h, s in product((4, 8, 16, 32), range(3))
        for t, loss in ((0, math.nan), (30, 3.0), (60, 2.3 if h == 4 else 1 + (8 + s) / h / 2))
    ]
    return written(
        folder,
        a=rows("head_dim layers heads network layer square_error reference_square", kernels),
        b=rows("alpha_attention head_dim heads network second_moment fourth_moment", attention),
        c=rows("alpha_attention head_dim heads networks low high count", bins),
        d=rows("model.heads seed step member square_distance", distance),
        e=rows("model.heads seed step eval_loss", metric),
    )


def test_known_powers_are_found(tmp_path):
    paths = heads_tables(tmp_path)
    start, drawn = make("bordelon/initial_heads", paths[:3], tmp_path / "figures")
    text, files = make("bordelon/heads", paths[3:], tmp_path / "figures")
    lines = [*start.splitlines(), *text.splitlines()]

    def line(start):
        return next(line for line in lines if line.startswith(start))

    assert "-1.000 ± " in line("3a: H in the kernel's square error, layer 2")
    assert line("3a: the same, all layers").endswith("agrees within 95 %")
    assert "-1.000 ± 0.000" in line("3c: N in the variance of A, alpha_A = 1 ")
    assert "+0.000 ± 0.000" in line("3c: N in the variance of A, alpha_A = 1/2").replace("-0", "+0")
    assert "6.00, 6.00, 6.00" in line("3c: N x excess kurtosis, alpha_A = 1/2")
    assert "-1.000 ± 0.000" in line("3c: N in the excess kurtosis of A, alpha_A = 1 ")
    assert "-1.000" in line("4b: H in the logits' square error, step 25")
    assert "-0.500" in line("4b: the same, step 60")
    assert "+0.500" in line("4b: exponent at step 60 minus step 25")
    assert line("4b: exponent at").endswith("agrees")
    stems = {"figure_3_initial_heads", "figure_4_many_heads"}
    assert {file.stem for file in [*drawn, *files]} == stems


@pytest.mark.parametrize("head_dim", [1, 4, 16])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_exact_density_has_its_moments(head_dim, alpha):
    def moment(power):
        def integrand(a):
            return a**power * float(initial_heads.density(np.array([a]), head_dim, alpha)[0])

        return 2 * quad(integrand, 0, 60, points=[0.01, 1, 10], limit=200)[0]

    variance = head_dim ** (1 - 2 * alpha)
    assert moment(0) == pytest.approx(1, rel=1e-4)
    assert moment(2) == pytest.approx(variance, rel=1e-4)
    assert moment(4) == pytest.approx((3 + 6 / head_dim) * variance**2, rel=1e-4)


# Figure 5


def depth_tables(folder, statuses=("finished",) * 3, gain=0.05, level=1.0):
    observations, results, metrics = [], [], []
    for alpha, layers, seed in product((0.5, 1.0), (1, 4, 16), range(len(statuses))):
        place = (layers, alpha, seed, f"{alpha}-{layers}-{seed}")
        for step, factor, block in product((0, 20), (1 + seed / 10,), ("0", "all")):
            moved = (step > 0) * factor * layers ** (alpha - 1) if block == "all" else 99.0
            observations.append((*place, step, block, moved, 2 * moved, 3 * moved))
        results.append((*place, 4 * alpha, 8, 10, statuses[seed], 100 * layers))
        loss = level + seed / 10 - (gain * layers if alpha == 1 else 0)
        metrics += [(*place, 0, math.nan), (*place, 10, 3.0), (*place, 20, loss)]
    key = "model.layers prescription.alpha_depth seed run "
    moves = "query_weight_relative key_weight_relative attention_change_weights"
    settings = "optimizer.lr model.patch_size training.batch_size status parameters"
    return written(
        folder,
        a=rows(f"{key} step block {moves}", observations),
        b=rows(key + settings, results),
        c=rows(f"{key} step eval_loss", metrics),
    )


def test_movement_and_loss_over_depth_are_found(tmp_path):
    text, files = make("bordelon/depth", depth_tables(tmp_path), tmp_path / "figures")
    lines = text.splitlines()
    moved = [line for line in lines if line.startswith("5a")]
    assert len(moved) == 12 and all(line.endswith("agrees within 95 %") for line in moved)
    powers = [float(re.search(r" ([+-]\d\S+) ±", line)[1]) for line in moved]
    assert "alpha_L = 1/2" in moved[0]
    assert powers == pytest.approx([-0.5] * 6 + [0] * 6, abs=1e-9)
    assert moved[1].startswith("5a: L = 4 to 16 in the movement of W_Q, alpha_L = 1/2")
    gains = [line for line in lines if line.startswith("5b: final loss, alpha_L = 1/2 minus 1")]
    assert all(
        gain in line for gain, line in zip(("+0.050", "+0.200", "+0.800"), gains, strict=True)
    )
    assert "eta_0 = 2 (alpha_L = 1/2), 4 (alpha_L = 1)" in lines[0]
    assert gains[-1].endswith("agrees") and not any(g.endswith("agrees") for g in gains[:-1])
    assert [file.name for file in files] == ["figure_5_depth.png"]


def gain_of(losses):
    """The last finding: what alpha_L = 1 gains at the largest depth."""
    *_, gain = depth._of_losses(losses)
    return gain


def test_depths_are_compared_on_the_seeds_that_have_both(tmp_path):
    """Losses differ by 1 between seeds: unpaired, a lost run would be a gain."""
    _, losses, _ = depth.read(depth_tables(tmp_path, gain=0))
    apart = losses.assign(eval_loss=losses["eval_loss"] + losses["seed"])
    lost = (apart["seed"] == 2) & (apart["model.layers"] == 16) & (apart[depth.ALPHA_L] == 1)
    gain = gain_of(apart[~lost])
    assert gain.estimate.value == pytest.approx(0) and "(n = 2)" in gain.measured
    assert gain.verdict == "undecided (n = 2)"


def test_compute_is_six_flops_per_parameter_and_token(tmp_path):
    _, losses, _ = depth.read(depth_tables(tmp_path))
    rows = losses[(losses["model.layers"] == 4) & (losses["step"] == 20)]
    assert set(rows["flops"]) == {6 * 400 * 16 * 10 * 20}
    assert set(losses["step"]) == {10, 20}


def test_runs_that_did_not_finish_count_nowhere(tmp_path):
    paths = depth_tables(tmp_path, statuses=("finished", "diverged", "finished"))
    movement, losses, _ = depth.read(paths)
    assert set(movement["seed"]) == set(losses["seed"]) == {0, 2}
