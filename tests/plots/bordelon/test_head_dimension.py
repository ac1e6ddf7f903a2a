"""Bordelon et al.'s Figures 2 to 5, 6d, 11 and 13: findings right on constructed tables."""

import itertools
import math
import re
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad

from plots.__main__ import make
from plots.bordelon import depth, dynamics, head_dimension, initial_heads, rate_transfer, scans
from plots.bordelon.scans import HEAD_DIM
from tests.plots.made import lines, rows, written

N = (8, 16, 32, 64)


def read(module, folder, *tables):
    """What a figure reads of tables with these rows."""
    return module.read(written(folder, **{f"t{index}": r for index, r in enumerate(tables)}))


# Figure 2a


def rate_row(alpha, n, rate, loss, seed=0, status="finished"):
    place = {"curve": "transfer", "prescription.alpha_attention": alpha, "model.head_dim": n}
    ended = {"seed": seed, "status": status, "final_eval_loss": loss}
    return {**place, "optimizer.lr": rate, **ended}


def rate_rows(power=None, seeds=(0, 1)):
    """Parabolas whose optimum goes as N^power[alpha]; 2 at N = 8."""
    power = power or {1.0: 0.25, 0.5: 0.0}
    return [
        rate_row(
            alpha, n, rate, 1 + 0.1 * (math.log2(rate / 2 / (n / 8) ** p)) ** 2 + 0.01 * seed, seed
        )
        for alpha, p in power.items()
        for n in N
        for rate in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
        for seed in seeds
    ]


def test_the_exponent_of_the_best_rate_is_found_for_each_alpha(tmp_path):
    rows = read(rate_transfer, tmp_path, rate_rows())
    said = lines(rate_transfer.findings(rows))
    moved = said["alpha_A = 1: exponent of N in the best rate"]
    assert moved.measured.startswith("+0.25 ±") and "n = 4 widths" in moved.measured
    kept = said["alpha_A = 1/2: exponent of N in the best rate"]
    assert kept.measured.startswith(("+0.00", "-0.00")) and kept.verdict == "agrees within 95 %"
    # N = 64 is best at 2 x 8^(1/4) = 3.36: the grid has 4, and 2 costs (0.75^2 - 0.25^2) / 10.
    cost = "cost of the smallest N's rate at the largest N"
    assert said[f"alpha_A = 1: {cost}"].measured.startswith("+0.050")
    assert said[f"alpha_A = 1/2: {cost}"].measured == "same grid rate"


# Figures 2b and 13


def observed(n, alpha, step, measured, seed=0, **more):
    """One run's rows of one step: a block and all blocks, of which only the latter count."""
    key = {"curve": "c", "prescription.alpha_attention": alpha, "model.head_dim": n, **more}
    key |= {"seed": seed, "run": f"{alpha}-{n}-{seed}-{more}", "step": step}
    first = {**key, "block": "0", **dict.fromkeys(measured, 7.0)}
    return [first, {**key, "block": "all", **measured}]


def scattered(value, seed):
    """Three seeds' values: 2% apart, whatever N."""
    return value * (0.98 + 0.02 * seed)


def variance_rows():
    """N^(1 - 2 alpha) before training; N^-2 and N^0 after. Seeds scatter by 2%."""
    after = {1.0: -2, 0.5: 0}
    return [
        row
        for alpha, power in after.items()
        for n in N
        for seed in (0, 1, 2)
        for step, exponent in ((0, 1 - 2 * alpha), (500, power))
        for row in observed(
            n, alpha, step, {"head_variance": scattered(3 * n**exponent, seed)}, seed
        )
    ]


def test_slopes_of_the_variance_over_heads_stand_beside_theory_and_caption(tmp_path):
    data = read(head_dimension, tmp_path, variance_rows())
    said = lines(head_dimension.findings(data))
    start = said["alpha_A = 1: variance of A over heads at initialisation"]
    assert start.measured.startswith("-1.000 ± 0.0")
    assert (start.published, start.verdict) == ("-1", "agrees within 95 %")
    end = said["alpha_A = 1: variance of A over heads at t = 500"]
    assert end.measured.startswith("-2.000") and end.published == "-1 derived (caption -2)"
    assert end.verdict.startswith("off by -1.00")
    half = said["alpha_A = 1/2: variance of A over heads at t = 500"]
    assert (half.published, half.verdict) == ("not below 0", "agrees")
    calm = said["alpha_A = 1/2: variance of A over heads at initialisation"]
    assert (calm.published, calm.verdict) == ("0", "agrees within 95 %")


MOVED = ("key_change_weights", "attention_change_weights", "key_change", "attention_change")


def movement_rows():
    """What the paper's exponents say of W_Q and W_K, and N^0.3 in all. Seeds scatter by 2%."""
    cells = itertools.product(("sgd", "adam"), (1.0, 0.5), N, (1, 200), (0, 1, 2))
    found = []
    for optimizer, alpha, n, step, seed in cells:
        first = 0.5 if (optimizer, step) == ("sgd", 1) else 0.0
        powers = (alpha - 1 - first, -first, 0.3, 0.3)
        measured = {
            k: scattered(0.1 * n**power, seed) for k, power in zip(MOVED, powers, strict=True)
        }
        key = {"optimizer.name": optimizer, "training.steps": step}
        found += observed(n, alpha, 0, dict.fromkeys(MOVED, 0.0), seed, **key)
        found += observed(n, alpha, step, measured, seed, **key)
    return found


def test_slopes_of_movement_stand_beside_the_papers_exponents(tmp_path):
    data = read(head_dimension, tmp_path, movement_rows())
    said = lines(head_dimension.findings(data))
    assert len(said) == 2 * 2 * 2 * 4
    expected = {
        "SGD, alpha_A = 1, t = 1": ("-1/2 derived", "-1/2 derived"),
        "SGD, alpha_A = 1, t = 200": ("0", "0"),
        "SGD, alpha_A = 1/2, t = 1": ("-1 derived", "-1/2 derived"),
        "Adam, alpha_A = 1/2, t = 1": ("-1/2", "0"),
        "Adam, alpha_A = 1, t = 1": ("0", "0"),
    }
    for place, published in expected.items():
        for what, beside in zip("kA", published, strict=True):
            finding = said[f"{place}: change of {what} by W_Q, W_K"]
            assert (finding.published, finding.verdict) == (beside, "agrees within 95 %")
            assert "(n = 3)" in finding.measured


def test_one_head_dimension_has_no_slope_and_a_second_table_of_a_figure_no_place(tmp_path, refused):
    rows = [row for row in movement_rows() if row["model.head_dim"] == 8]
    said = lines(head_dimension.findings(read(head_dimension, tmp_path, rows)))
    assert {finding.measured for finding in said.values()} == {"not measured"}
    paths = written(tmp_path, a=variance_rows(), b=variance_rows())
    assert "a second table of Figure 2b" in refused("bordelon/head_dimension", *paths)


# Figure 11


def logged(size, seed, loss, **more):
    """A run's metrics: `loss` times what one seed's samples are worth, falling with the step."""
    key = {"curve": "dynamics", HEAD_DIM: size, "seed": seed, **more}
    key["run"] = f"{more}-{size}-{seed}"
    return [
        {**key, "step": step, "train_loss": math.nan if step % 2 else loss + seed + 1 / step}
        for step in range(1, 101)
    ]


def dynamics_rows(alphas=(1.0, 0.5), seeds=(0, 1, 2)):
    """Losses 2 + 1/N: doubling N halves what it gains; seeds differ by far more."""
    return [
        row
        for alpha in alphas
        for n in N
        for seed in seeds
        for row in logged(
            n, seed, 2 + 1 / n + 0.001 * seed / n, **{"prescription.alpha_attention": alpha}
        )
    ]


def test_sizes_are_compared_on_the_same_samples(tmp_path):
    losses = read(dynamics, tmp_path, dynamics_rows())
    said = list(lines(dynamics.findings(losses)).values())
    assert len(said) == 6
    # 1/8 - 1/16, and a thousandth more for every further seed
    assert said[0].name == "alpha_A = 1: loss of N = 8 minus that of 16"
    assert said[0].measured == "+0.0626 ± 0.0000 (n = 3)" and said[0].verdict == ""
    assert said[2].measured.startswith("+0.0156") and said[2].verdict == "agrees"


def test_a_run_that_ended_early_counts_nowhere_and_is_named(tmp_path):
    """Its first steps against whole runs would be a gap of their own."""
    rows = [
        row
        for row in dynamics_rows()
        if row["step"] <= 20 or (row["seed"], row[HEAD_DIM]) != (1, 16)
    ]
    losses = read(dynamics, tmp_path, rows)
    printed = [*dynamics.findings(losses)]
    said = list(lines(printed).values())
    assert said[0].measured.startswith("+0.0626") and said[0].measured.endswith("(n = 2)")
    assert said[2].measured.endswith("(n = 3)") and said[2].verdict == "undecided (n = 2)"
    assert scans.curves(dynamics.by_alpha(losses.rows)[1.0], HEAD_DIM)[16].index[-1] > 90
    assert printed[-1].startswith("left out, as they ended before the others: ")
    assert printed[-1].count("-16-1") == 2


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
