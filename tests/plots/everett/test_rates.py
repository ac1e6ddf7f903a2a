"""Sweeps of learning rates: what is read, means and noise over seeds, errors of what is fitted."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from plots import panels, rates, style
from tests.plots.everett.constructed import sweep
from tests.plots.made import rows


def test_means_are_over_seeds_and_one_diverged_seed_makes_the_point_diverge():
    rows = pd.DataFrame(sweep("global", "mup", widths=(64,), powers=(-8, -7, -6)))
    rows.loc[(rows["optimizer.lr"] == 2**-6) & (rows.seed == 1), "status"] = "diverged"
    rows.loc[(rows["optimizer.lr"] == 2**-8) & (rows.seed == 1), "status"] = "failed"
    (found,) = rates.rate_sweeps(rows).values()
    losses, seeds = found.losses, {rate: len(of) for rate, of in found.chosen_from.items()}
    assert losses[2**-7] == pytest.approx(5.01)
    assert losses[2**-6] == math.inf
    assert losses[2**-8] == pytest.approx(5.05)
    assert seeds == {2**-8: 1, 2**-7: 2, 2**-6: 2}


def test_noise_is_pooled_over_points_near_optima():
    rows = pd.DataFrame(sweep("global", "mup", widths=(64,)))
    # Rates up to two octaves away lie within 5% of the lowest loss, 5.01.
    far = rows["optimizer.lr"] >= 2**-4
    rows.loc[far & (rows.seed == 1), "final_eval_loss"] += 1.0
    noise, freedom = noise_of(rows)
    assert noise == pytest.approx(0.02 / math.sqrt(2)) and freedom == 5
    assert noise_of(rows[rows.seed == 0])[1] == 0


def noise_of(rows):
    return rates.seed_noise(rates.seeded_points(rows))


def seeded(seeds, spread=0.02):
    """Rows of widths with a spread of their own: width -> seeds, width -> their distance."""
    rows = []
    for width, own in seeds.items():
        apart = spread[width] if isinstance(spread, dict) else spread
        rows += sweep("global", "mup", widths=(width,), seeds=own, exponent=0.0, spread=apart)
    return pd.DataFrame(rows)


def test_a_width_has_the_noise_of_its_own_seeds():
    """Seeds at D = 32 lie ten times as far apart as at 64; nothing is shared between them."""
    rows = seeded({32: (0, 1), 64: (0, 1)}, {32: 0.2, 64: 0.02})
    noise = rates.width_noise(rows)
    assert noise[64] == (pytest.approx(0.02 / math.sqrt(2)), 5, (64,))
    assert noise[32] == (pytest.approx(0.2 / math.sqrt(2)), 5, (32,))
    found = rates.lines_of(rows, {}, {})[("global",)]
    assert found[32].best.error == pytest.approx(10 * found[64].best.error)
    assert found[32].lowest.error == pytest.approx(10 * found[64].lowest.error)
    assert rates.noise_line(rows).endswith("muP 0.141 at D = 32, 0.014 at D = 64")


@pytest.mark.parametrize("rates_with_seeds", [0, 3], ids=["one seed", "three degrees of freedom"])
def test_a_width_with_few_seeds_takes_the_spread_of_others_and_says_so(rates_with_seeds):
    rows = seeded({32: (0, 1), 64: (0, 1)})
    near = [2.0**power for power in (-8, -7, -6)][:rates_with_seeds]
    lone = (rows["model.width"] == 64) & (rows["seed"] == 1) & ~rows["optimizer.lr"].isin(near)
    rows = rows[~lone]
    assert noise_of(rows[rows["model.width"] == 64])[1] == rates_with_seeds
    of = (32, 64) if rates_with_seeds else (32,)
    noise = rates.width_noise(rows)
    spread = pytest.approx(0.02 / math.sqrt(2)), 5 + rates_with_seeds, of
    assert noise[32][1:] == (5, (32,)) and noise[64] == spread
    whose = f"0.014 at D = 64 (spread of D = {', '.join(map(str, of))})"
    assert rates.noise_line(rows).endswith(f"muP 0.014 at D = 32, {whose}")


def test_runs_that_several_curves_share_count_once_in_the_noise():
    rows = seeded({32: (0, 1)})
    both = pd.concat([rows, rows.assign(curve="full")], ignore_index=True)
    assert noise_of(both) == noise_of(rows)


# Rate -> losses of seeds 0, 1 and 2: two like rate 1, the third rate 2; rate 4 diverges for it.
LIKED = {1.0: (1.0, 1.0, 1.3), 2.0: (1.2, 1.2, 0.88), 4.0: (1.5, 1.5, None)}


def judged(losses, fresh=()):
    """Rows of one width; `fresh` are losses of fresh seeds at rate 1."""
    runs = [
        (rate, seed, loss, False)
        for rate, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    runs += [(1.0, 7 + seed, loss, True) for seed, loss in enumerate(fresh)]
    found = rows("optimizer.lr seed final_eval_loss fresh", runs)
    status = found["final_eval_loss"].isna().map({True: "diverged", False: "finished"})
    return found.assign(curve="a", status=status, **{"model.width": 32})


def judged_sweep(losses, fresh=()):
    rows = judged(losses, fresh)
    (sweep,) = rates.rate_sweeps(rows, noise=0.1).values()
    said = rates.basis(rows, {("a",): {32: sweep}}, ["curve"])
    return sweep, [line for line in said if "judge" in line]


def test_three_seeds_are_each_judged_at_the_rate_that_the_others_choose():
    sweep, said = judged_sweep(LIKED)
    assert sweep.judges == "others" and sweep.best.grid_value == 2.0  # of all three, by 1.0933
    assert sweep.runs == {0: 1.2, 1: 1.2, 2: 1.3}  # two and two tie but for 0.02
    assert sweep.loss == pytest.approx(3.7 / 3)
    whole = "n = 1 sweeps, 0.140 nats above the lowest loss in the mean"
    assert said == [f"every seed is judged at the rate that the others choose ({whole})"]


@pytest.mark.parametrize(
    ("losses", "runs"),
    [
        ({rate: found[1:] for rate, found in LIKED.items()}, {0: 1.2, 1: 0.88}),
        ({1.0: LIKED[1.0]}, {0: 1.0, 1: 1.0, 2: 1.3}),
        ({1.0: LIKED[1.0], 8.0: LIKED[1.0][:2]}, {0: 1.0, 1: 1.0}),  # one rate that all have
    ],
    ids=["two seeds", "one rate", "one rate of all seeds"],
)
def test_fewer_seeds_or_rates_judge_what_they_choose(losses, runs):
    sweep, said = judged_sweep(losses)
    assert (sweep.judges, sweep.runs, sweep.loss) == ("own", runs, sweep.best.loss)
    chosen = ["best rates are judged by the seeds that choose them (n = 1 sweeps)"]
    assert said == (chosen if len(losses) > 1 else [])


def test_a_judge_that_diverges_is_left_out_and_decides_nothing():
    """Without seed 0 rate 4 is the best of the three that all have, where it diverges."""
    losses = {1.0: (1.1, 1.3, 1.3), 2.0: (1.1, 1.2, 1.2), 4.0: (None, 0.9, 0.9)}
    sweep, said = judged_sweep(losses)
    assert sweep.best.grid_value == 2.0 and sweep.runs == {0: math.inf, 1: 1.2, 2: 1.2}
    assert sweep.ended == {1: 1.2, 2: 1.2} and sweep.loss == pytest.approx(1.2)
    assert sweep.lowest.error == pytest.approx(0.1 / math.sqrt(2)) and sweep.unstable == 4.0
    assert said[-1] == "of the runs that judge some diverge, and are left out: a at D = 32"
    lost, _ = judged_sweep({1.0: (1.0, 1.0, 1.0), 2.0: (1.5, 1.5, 1.5)}, fresh=(None, None))
    assert math.isnan(lost.loss)
    steady, _ = judged_sweep({1.0: (2.0, 2.0, 2.1), 2.0: (2.1, 2.1, 2.2)})
    for before, count in ((lost, 3), (steady, 1)):
        finding = rates.compared("gain", {32: before}, {32: sweep}, "gains")
        assert finding.verdict == "undecided: a run diverges"
        assert f", {count} diverged at D = 32" in finding.measured
        assert math.isnan(finding.estimate.value)


def test_fresh_seeds_judge_a_rate_and_have_no_say_in_which():
    sweep, said = judged_sweep({1.0: (1.0, 1.0, 1.0), 2.0: (1.1, 1.1, 1.1)}, (1.3, 1.4, None, 1.5))
    assert sweep.best.grid_value == 1.0 and sweep.losses == {1.0: 1.0, 2.0: pytest.approx(1.1)}
    assert sweep.judges == "fresh" and list(sweep.runs) == [7, 8, 9, 10]
    assert sweep.loss == pytest.approx(1.4)
    assert said[0] == "best rates are judged on fresh seeds (n = 1 sweeps)"
    other, _ = judged_sweep({1.0: (2.0, 2.0, 2.0), 2.0: (2.5, 2.5, 2.5)}, (2.3, 2.5, 9.0, None))
    gain = rates.difference(other, sweep)  # by seed, of those that end on both sides
    assert gain.groups == 2 and gain.value == pytest.approx(1.05)


def test_what_a_rate_costs_is_measured_on_the_seeds_that_judge():
    """Fresh seeds, at both rates, end 0.3 below those that choose: the cost is theirs."""
    rows = judged({1.0: (1.0, 1.0, 1.0), 2.0: (1.1, 1.1, 1.1)}, (0.7, 0.8, 0.6))
    there = rows[rows["fresh"]].assign(**{"optimizer.lr": 2.0})
    there["final_eval_loss"] += [0.1, 0.11, 0.09]
    sweep = rates.rate_sweeps(pd.concat([rows, there]), noise=0.1)[32]
    cost = rates.cost_of(sweep, 2.0)
    assert (cost.value, cost.error) == (pytest.approx(0.1), pytest.approx(0.01 / math.sqrt(3)))
    assert math.isnan(rates.cost_of(sweep, 4.0).value)
    there["status"] = "diverged"
    sweep = rates.rate_sweeps(pd.concat([rows, there]), noise=0.1)[32]
    assert rates.cost_of(sweep, 2.0).value == math.inf


def test_the_error_of_a_best_loss_and_of_an_optimum_follow_from_noise_and_seeds():
    rows = pd.DataFrame(sweep("global", "mup", widths=(64,)))
    found = rates.rate_sweeps(rows, noise=0.1)[64]
    assert found.loss == pytest.approx(5.01)
    assert found.lowest.error == pytest.approx(0.1 / math.sqrt(2))
    # Five points, slope variance sigma^2 / 10, curvature 0.05.
    assert found.best.error == pytest.approx(0.1 / math.sqrt(2) / math.sqrt(10) / 0.1)


def test_the_curve_is_cut_at_its_first_unstable_rate():
    rows = pd.DataFrame(sweep("global", "mup", widths=(64,), diverged_above=2**-5))
    assert max(rates.rate_sweeps(rows)[64].stable) == 2**-5


def test_a_width_at_the_edge_is_no_part_of_the_exponent():
    rows = sweep("global", "mup", exponent=-1.0, powers=range(-9, -3))
    sweeps = rates.rate_sweeps(pd.DataFrame(rows))
    fit = rates.exponent(sweeps)
    assert fit.edge == (256,) and fit.groups == 3
    assert fit.value == pytest.approx(-1.0)
    assert "at edge: 256" in fit.text()


def test_an_exponents_error_is_at_least_what_the_optima_imply():
    rows = pd.DataFrame(sweep("global", "mup", exponent=-1.0))  # all optima on the grid
    exact = rates.rate_sweeps(rows, noise=0.1)
    fit = rates.exponent(exact)
    one = 0.1 / math.sqrt(2) / math.sqrt(10) / 0.1  # octaves, of every optimum
    assert fit.errors["scatter"] == pytest.approx(0, abs=1e-9)
    assert fit.error == pytest.approx(one / math.sqrt(5), rel=1e-6)
    # At D = 256 alone three times as much, 1.5 octaves of 5 from the middle; all weigh alike.
    loud = {**exact, 256: rates.rate_sweeps(rows[rows["model.width"] == 256], noise=0.3)[256]}
    error = one * math.hypot(1.5, 0.5, 0.5, 3 * 1.5) / 5
    assert rates.exponent(loud).error == pytest.approx(error, rel=1e-6)
    lost = {**exact, 256: rates.rate_sweeps(rows[rows["model.width"] == 256], noise=1e3)[256]}
    assert rates.exponent(lost).error == pytest.approx(0, abs=1e-9)  # of the scatter alone


def test_exponents_and_their_differences_are_judged_by_the_widths_they_rest_on():
    """Four widths leave two degrees of freedom: 95 % reach to 4.3 errors; three leave one."""
    one, few = (rates.Exponent(-0.5, 0.1, n, 2) for n in (4, 3))
    assert one.distance(-0.1) == "agrees within 95 %" and one.distance(0.0).startswith("off by")
    assert few.distance(0.5) == "undecided (n = 3)"
    change = one - rates.Exponent(0.0, 0.1, 4, 2)
    assert (change.freedom, change.groups, change.fitted) == (pytest.approx(4), 4, 2)
    assert change.claimed_equal() == "disagrees"  # 3.5 errors; 2.8 of them are 95 %
    assert change.through_widths() == "-0.50 ± 0.14 (n = 4 widths)"
    assert (one - few).claimed_equal() == "undecided (n = 3)"


@pytest.mark.parametrize("error", [math.nan, 2.5])
def test_an_optimum_without_an_error_does_not_set_that_of_the_line(error):
    """muP at D = 2,048 has one rate below the best and no parabola: seven widths on a line."""
    rows = pd.DataFrame(sweep("global", "mup", exponent=-1.0))  # all optima on the grid
    exact = rates.rate_sweeps(rows, noise=0.1)
    unknown = replace(exact[256], best=replace(exact[256].best, error=error))
    fit = rates.exponent({**exact, 256: unknown})
    assert fit.groups == 4 and "points" not in fit.errors
    assert fit.error == pytest.approx(0, abs=1e-9)  # of the scatter alone
    _, axes = style.subplots("", 1, 1, (2.5, 2.5))
    panels.draw_optima(axes[0, 0], {**exact, 256: unknown}, fit, color="black")
    low, high = axes[0, 0].collections[-1].get_segments()[0][:, 1]
    assert low == high  # no bar
    faces = [container.lines[0].get_markerfacecolor() for container in axes[0, 0].containers]
    assert faces == ["black"] * 3 + ["white"]


@pytest.mark.parametrize(("seeds", "others", "rate"), [(4, 4, 1), (4, 4, 2), (2, 2, 1), (3, 4, 1)])
def test_a_gain_over_three_common_seeds_or_more_is_judged_by_seed(seeds, others, rate):
    """Seeds differ by 0.1 and what a seed gains by 0.01: two orders of magnitude in the error."""
    runs = [("before", s, 1.0, 4.2 + 0.1 * s + 0.01 * (s % 2)) for s in range(seeds)]
    runs += [("after", s, rate, 4.0 + 0.1 * s) for s in range(others)]
    table = rows("curve seed optimizer.lr final_eval_loss", runs)
    table = table.assign(status="finished", **{"model.width": 32})
    found = rates.curve_sweeps(table, ["before", "after"])
    finding = rates.compared("gain", found["before"], found["after"], "gains")
    if seeds == others == 4:  # 0.01 / sqrt(3) over sqrt(4)
        assert finding.measured == "+0.205 ± 0.003 (n = 4) at D = 32"
        assert finding.verdict == "agrees"
    else:
        error = float(finding.measured.split()[2])
        assert error > 0.06 and "(n = " not in finding.measured


@pytest.mark.parametrize(("gain", "verdict"), [(0.2, "within noise"), (0.25, "agrees")])
def test_a_gain_is_judged_by_the_degrees_of_freedom_of_its_spread(gain, verdict):
    """Three seeds of each, others in both, leave four degrees of freedom: 95 % reach to 2.78 errors
    of 0.1 sqrt(2 / 3), so 0.227."""
    runs = [("before", s, 1.0, 4.0 + 0.1 * s) for s in range(3)]
    runs += [("after", s + 3, 2.0, 4.0 - gain + 0.1 * s) for s in range(3)]
    table = rows("curve seed optimizer.lr final_eval_loss", runs)
    table = table.assign(status="finished", **{"model.width": 32})
    found = rates.curve_sweeps(table, ["before", "after"])
    change = rates.difference(found["before"][32], found["after"][32])
    assert (change.freedom, change.groups) == (4, None)
    assert change.error == pytest.approx(0.1 * math.sqrt(2 / 3))
    assert rates.compared("gain", found["before"], found["after"], "gains").verdict == verdict


def test_an_exponents_error_is_that_of_seeds_and_windows_stand_beside_it():
    """A seed whose optima fall twice as fast; then losses that rise steeply to the right, so that a
    parabola's vertex depends on how far it reaches."""
    rows = [
        r for s in range(3) for r in sweep("a", "mup", exponent=-0.5 - 0.5 * (s == 2), seeds=(s,))
    ]
    fit = rates.exponent(rates.rate_sweeps(pd.DataFrame(rows)))
    assert fit.error == fit.errors["seeds"] > 0.05
    assert fit.freedom == 2
    bent = pd.DataFrame(sweep("a", "mup", exponent=-0.5))
    vertex = -7 - 0.5 * (bent["model.width"] / 64).map(math.log2)
    above = bent["optimizer.lr"].map(math.log2) - vertex > 1
    bent.loc[above, "final_eval_loss"] += 0.3 * bent.loc[above, "model.width"].map(math.log2) / 8
    fit = rates.exponent(rates.rate_sweeps(bent))
    moved = [abs(value - fit.value) for value in rates.by_window(fit.sweeps).values()]
    assert len(moved) == len(rates.WINDOWS)
    assert fit.windows == pytest.approx(max(moved)) and fit.windows > 0.001
    assert fit.error == max(fit.errors.values()) and "windows" not in fit.errors
    assert f"; other windows ± {fit.windows:.2f})" in fit.text()


def test_local_slopes_stand_beside_an_exponent():
    fit = rates.exponent(rates.rate_sweeps(pd.DataFrame(sweep("a", "mup", exponent=-0.5))))
    assert list(fit.by_size) == [64, 128, 256]
    assert all(one.value == pytest.approx(-0.5) for one in fit.by_size.values())
    assert fit(64) == pytest.approx(2**-7)
