"""Powers over seeds and their errors, against closed forms."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import linregress, t, ttest_ind

from plots.findings import Estimate
from plots.statistics import (
    average,
    differences,
    exponent,
    extrapolated,
    jackknife,
    mean,
    power,
    slope,
)


def test_jackknife_is_the_standard_error_of_a_mean():
    rows = pd.DataFrame({"seed": [0, 1, 2, 3], "x": [1.0, 2.0, 4.0, 9.0]})
    found = jackknife(rows, "seed", lambda part: part["x"].mean())
    assert (found.value, found.error) == pytest.approx((4.0, rows["x"].sem()))
    assert found.groups == 4 and found.text(1).endswith("(n = 4)")
    alone = jackknife(rows[:1], "seed", lambda part: part["x"].mean())
    assert math.isnan(alone.error) and alone.groups == 1


def scans(slopes, sizes=(2, 8, 32)):
    """One seed per slope: size^slope exactly."""
    return pd.DataFrame(
        [
            {"seed": seed, "size": n, "x": n**slope}
            for seed, slope in enumerate(slopes)
            for n in sizes
        ]
    )


def test_the_error_of_a_power_is_that_of_leaving_out_seeds():
    """Neither the scatter about the line nor the points' own errors are mixed into it."""
    rows = scans([-0.48, -0.5, -0.52])
    rows["x"] *= rows["seed"].map({0: 1.0, 1: 1.5, 2: 3.0})  # what whole seeds share cancels
    found = exponent(rows, "seed", "size", "x")
    logs = np.log2(rows.set_index(["seed", "size"])["x"]).unstack()
    parts = [np.log2((2.0 ** logs.drop(seed)).mean()) for seed in logs.index]
    slopes = [linregress(np.log2(logs.columns), part).slope for part in parts]
    assert found.error == found.errors["seeds"] == pytest.approx(math.sqrt(2 * np.var(slopes)))
    assert found.errors["points"] > 10 * found.error
    assert (found.groups, found.freedom) == (3, 2)
    local = [math.sqrt(2 * np.var([(p[8] - p[2]) / 2 for p in parts]))]
    assert found.by_size[8].error == pytest.approx(local[0])


def test_what_bends_a_line_is_a_test_of_the_law_and_not_the_power_s_error():
    noise = np.random.default_rng(0).normal(1, 0.02, 96)
    straight = scans([-0.5] * 24, (2, 4, 8, 16))
    straight["x"] *= noise
    bent = straight.assign(x=straight["x"] * np.where(straight["size"] == 8, 2.0, 1.0))
    one, other = (exponent(rows, "seed", "size", "x") for rows in (straight, bent))
    assert one.chance > 0.01 and not one.text().endswith("law")
    assert other.chance < 1e-6 and other.text() == (
        f"{other.value:+.3f} ± {other.error:.3f} (n = 24), not a power law"
    )
    assert other.error == pytest.approx(one.error, rel=0.2) and other.errors["scatter"] > 0.1
    assert other(8) == pytest.approx(2 ** (other.intercept + 3 * other.value))


def test_lines_of_pure_noise_are_seldom_called_no_power_law():
    """The chance is that of the F distribution: uniform where the law holds."""
    draws = np.random.default_rng(1)
    chances = []
    for _ in range(400):
        points = draws.normal(size=(6, 5))
        parts = [dict(enumerate(np.delete(points, seed, 0).mean(0))) for seed in range(6)]
        parts = [{2**size: one for size, one in part.items()} for part in parts]
        whole = dict(zip((1, 2, 4, 8, 16), points.mean(0), strict=True))
        chances.append(power(whole, None, parts).chance)
    assert np.mean(np.array(chances) < 0.05) == pytest.approx(0.05, abs=0.04)
    assert np.mean(chances) == pytest.approx(0.5, abs=0.08)


def test_without_common_seeds_the_longer_interval_counts():
    """A larger error with many degrees of freedom may have the shorter interval."""
    points = {2: 0.0, 4: -0.5, 8: -1.05}  # one degree of freedom: 12.7 errors
    found = power(points, dict.fromkeys(points, 0.06), (), 23)
    assert found.errors["points"] > found.errors["scatter"] and found.freedom == 1
    assert found.error == found.errors["scatter"]
    wide = power(points, dict.fromkeys(points, 0.6), (), 23)
    assert wide.error == wide.errors["points"] and wide.freedom == 23


def test_one_unknown_error_is_not_made_up():
    points = {2: 0.0, 4: -0.51, 8: -1.0, 16: -1.5}
    found = power(points, {2: 0.1, 4: 0.1, 8: 0.1, 16: math.nan}, (), 8)
    assert "points" not in found.errors and found.error == found.errors["scatter"] < 0.01
    assert math.isnan(found.chance)


def test_powers_that_differ_between_seeds_have_their_scatter_as_error():
    slopes = [0.1, 0.12, 0.14, 0.16]
    found = exponent(scans(slopes), "seed", "size", "x")
    assert found.value == pytest.approx(np.mean(slopes), abs=2e-3)
    assert found.errors["seeds"] == pytest.approx(np.std(slopes, ddof=1) / 2, rel=0.05)


@pytest.mark.parametrize("n", [3, 10, None])
def test_verdicts_on_few_seeds_are_wrong_as_rarely_as_they_say(n):
    quantile = 2.0 if n is None else t.ppf(0.975, df=n - 1)
    inside, outside = (Estimate((1 + side) * quantile, 1.0, n) for side in (-1e-4, 1e-4))
    assert (inside.claimed_gain(), outside.claimed_gain()) == ("within noise", "agrees")
    assert (inside.claimed_equal(), (-outside).claimed_equal()) == ("agrees", "disagrees")
    assert (-outside).claimed_gain() == "disagrees"
    of_a_fit = {"groups": None if n is None else n + 1, "fitted": 2}
    near, far = (Estimate(5 + found.value, 1.0, **of_a_fit) for found in (inside, outside))
    assert near.distance(5.0) == "agrees within " + ("2 SE" if n is None else "95 %")
    assert far.distance(5.0).startswith("off by")


def test_verdicts_need_two_degrees_of_freedom_and_an_error():
    for n in (1, 2):
        few = Estimate(9.0, 0.1, n)
        found = {few.claimed_gain(), few.claimed_equal(), few.claimed_no_fall(), few.distance(1.0)}
        assert found == {f"undecided (n = {n})"}
    assert Estimate(9.0, 0.1, 3, fitted=2).distance(1.0) == "undecided (n = 3)"
    assert Estimate(math.nan, math.nan, 0).claimed_gain() == "not measured"
    assert Estimate(1.0, math.nan, 3).claimed_gain() == "agrees in sign, error unknown"
    assert Estimate(1.0, math.nan).claimed_gain() == "agrees in sign, one seed"
    change = Estimate(1.0, 3.0) - Estimate(0.5, 4.0, 7)
    assert (change.value, change.error, change.groups, change.freedom) == (0.5, 5.0, None, None)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 5), (13, 4)])
def test_differences_of_means_are_judged_as_by_welch(sizes):
    draws = np.random.default_rng(sum(sizes))
    first, second = (draws.normal(size=n) * n for n in sizes)
    change = average(list(first)) - average(list(second))
    expected = ttest_ind(first, second, equal_var=False)
    assert change.freedom == pytest.approx(expected.df)
    assert change.reach == pytest.approx(t.ppf(0.975, df=expected.df))
    assert change.value / change.error == pytest.approx(expected.statistic)
    line = slope({64: average(list(second)), 128: average(list(first))})
    assert (line.value, line.error, line.freedom) == pytest.approx(
        (change.value, change.error, change.freedom)
    )


def test_sizes_without_a_number_above_zero_are_left_out():
    rows = scans([1.0, 1.0], sizes=(2, 4, 8, 16))
    rows.loc[rows["size"] == 4, "x"] = -1.0
    rows.loc[rows["size"] == 8, "x"] = math.inf
    assert exponent(rows, "seed", "size", "x").value == pytest.approx(1.0)
    found = exponent(rows[rows["size"] < 8], "seed", "size", "x")
    assert math.isnan(found.value) and found.text() == "not measured"


def test_sizes_are_compared_on_the_seeds_that_have_all_of_them():
    """Seeds differ tenfold: without its largest size a seed would bend the power."""
    rows = scans([-0.5] * 4)
    rows["x"] *= 10.0 ** rows["seed"]
    found = exponent(rows[(rows["seed"] != 3) | (rows["size"] != 32)], "seed", "size", "x")
    assert found.value == pytest.approx(-0.5) and found.groups == 3
    rows.loc[(rows["seed"] == 2) & (rows["size"] == 2), "x"] = math.nan
    assert exponent(rows, "seed", "size", "x").groups == 3
    lone = exponent(rows[(rows["seed"] == 0) | (rows["size"] != 32)], "seed", "size", "x")
    assert (lone.groups, lone.distance(-0.5)) == (1, "undecided (n = 1)")


def test_what_is_not_below_zero_is_judged_by_one_side():
    assert Estimate(0.4, 0.01, 5).claimed_no_fall() == "agrees"
    assert Estimate(-0.02, 0.01, 5).claimed_no_fall() == "agrees"
    assert Estimate(-0.4, 0.01, 5).claimed_no_fall() == "disagrees"
    assert Estimate(-0.4, math.nan, 5).claimed_no_fall() == "undecided: error unknown"


def test_means_and_differences_are_over_common_seeds():
    found = mean(differences({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.0, 2: 5.0, 3: 7.0}))
    assert (found.value, found.error, found.groups) == (2.5, pytest.approx(1.5), 2)
    assert mean({}).text() == "not measured"
    assert mean({0: math.inf}).claimed_gain() == "not measured"


def test_a_line_beyond_the_largest_size_has_its_predictions_error():
    """Two octaves beyond 32, from three sizes an octave apart."""
    values = {8: 1.0, 16: 4.0, 32: 5.0}
    beyond = extrapolated({n: Estimate(value, 0.1, 5) for n, value in values.items()}, 2)
    design = np.array([[1, 3], [1, 4], [1, 5]])
    at = np.array([1, 7]) @ np.linalg.pinv(design)
    assert beyond.value == pytest.approx(at @ list(values.values()))
    assert beyond.error == pytest.approx(0.1 * math.sqrt(at @ at))
    assert math.isnan(extrapolated({8: Estimate(1.0, 0.1)}, 2).value)
