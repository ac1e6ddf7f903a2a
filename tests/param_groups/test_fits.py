"""Optima and exponents on constructed data."""

import math

import numpy as np
import pytest

from param_groups.fits import WINDOW, irreducible_power_law, optimum, power_law, stability


def parabola(vertex, scale=0.1, floor=3.0):
    return lambda value: floor + scale * (math.log2(value) - vertex) ** 2


def test_the_vertex_of_an_exact_parabola_is_found_between_grid_points():
    loss = parabola(-6.7)
    best = optimum({2.0**k: loss(2.0**k) for k in range(-9, -3)})
    assert best.inside
    assert math.log2(best.value) == pytest.approx(-6.7)
    assert best.grid_value == 2.0**-7


def test_the_grid_may_be_uneven_and_unsorted():
    loss = parabola(-5.9)
    values = [2.0**-3, 2.0**-7, 2.0**-5.5, 2.0**-6.5, 2.0**-9]
    assert math.log2(optimum({v: loss(v) for v in values}).value) == pytest.approx(-5.9)


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ({1.0: 3.0, 2.0: 3.1, 4.0: 3.5}, 1.0),  # lowest at the left edge
        ({1.0: 3.5, 2.0: 3.1, 4.0: 3.0}, 4.0),  # at the right edge
        ({1.0: 3.2, 2.0: 3.0, 4.0: math.inf}, 2.0),  # next to divergence
        ({2.0: 3.0}, 2.0),
        ({1.0: 3.0, 2.0: 3.0, 4.0: 3.0}, 1.0),  # of equal losses the lower value
        ({1.0: math.nan, 2.0: 3.0}, 2.0),  # not a number is diverged
    ],
)
def test_without_two_finite_neighbours_the_grid_point_is_reported_as_such(losses, value):
    best = optimum(losses)
    assert (best.value, best.inside) == (value, False)


def test_an_exact_power_law():
    law = power_law([32, 64, 128, 256], [3 * x**-0.8 for x in (32, 64, 128, 256)])
    assert law.exponent == pytest.approx(-0.8)
    assert law.error == pytest.approx(0, abs=1e-12)
    assert law(100) == pytest.approx(3 * 100**-0.8)


def test_the_standard_error_is_that_of_linear_regression():
    # y = 2^(1, 2, 2, 4) at x = 2^(0, 1, 2, 3): slope 0.9, residual sum of squares 0.7.
    law = power_law([1, 2, 4, 8], [2, 4, 4, 16])
    assert law.exponent == pytest.approx(0.9)
    assert law.error == pytest.approx(math.sqrt(0.7 / 2 / 5))


def test_two_points_have_no_error():
    assert math.isnan(power_law([1, 2], [1, 4]).error)


def on_grid(loss, powers):
    return {2.0**power: loss(2.0**power) for power in powers}


def test_a_least_squares_parabola_finds_the_vertex_of_an_exact_one_without_error():
    best = optimum(on_grid(parabola(-6.3), range(-12, -2)), WINDOW)
    assert math.log2(best.value) == pytest.approx(-6.3)
    assert best.error == pytest.approx(0, abs=1e-9)
    assert (best.n, best.inside, best.at_edge) == (5, True, False)


def test_the_window_leaves_out_what_is_not_a_parabola_any_more():
    losses = on_grid(parabola(-6), range(-12, -2))
    losses[2.0**-9] += 0.3
    assert math.log2(optimum(losses, WINDOW).value) == pytest.approx(-6)
    assert math.log2(optimum(losses, 3.0).value) != pytest.approx(-6)


# Five points at -2 to 2 octaves around a vertex at 0 with curvature 0.1, moved by 0.01 times the
# cubic orthogonal polynomial (sum of squares 10): it moves no coefficient up to the second.
CUBIC = {-2: -1, -1: 2, 0: 0, 1: -2, 2: 1}
SCATTERED = {2.0**x: 3 + 0.1 * x * x + 0.01 * c for x, c in CUBIC.items()}


def test_the_vertex_error_from_residuals_is_that_of_the_delta_method():
    # Residual variance 10 * 0.01^2 / 2; the slope's is that over 10; vertex = -slope / 0.2.
    best = optimum(SCATTERED, WINDOW)
    assert best.value == pytest.approx(1)
    assert best.error == pytest.approx(math.sqrt(10 * 1e-4 / 2 / 10) / 0.2)


def test_the_larger_of_residuals_and_given_noise_counts():
    residual = optimum(SCATTERED, WINDOW).error
    assert optimum(SCATTERED, WINDOW, noise=0.001).error == pytest.approx(residual)
    noisy = optimum(SCATTERED, WINDOW, noise=0.1)
    assert noisy.error == pytest.approx(0.1 / math.sqrt(10) / 0.2)


def test_three_points_have_an_error_only_with_a_given_noise():
    losses = on_grid(parabola(0), (-1, 0, 1))
    assert math.isnan(optimum(losses).error) and math.isnan(optimum(losses, WINDOW).error)
    # Slope's variance noise^2 / 2, vertex = -slope / 0.2.
    assert optimum(losses, noise=0.02).error == pytest.approx(0.02 / math.sqrt(2) / 0.2)


@pytest.mark.parametrize(("step", "noise"), [(0.5, math.nan), (0.5, 0.02), (1.0, 0.02)])
def test_the_true_optimum_lies_within_one_error_as_often_as_it_should(step, noise):
    rng = np.random.default_rng(7)
    hits = []
    for _ in range(600):
        vertex = rng.uniform(-7, -6)
        powers = np.arange(-11, -1, step)
        losses = {
            2.0**p: 4 + 0.1 * (p - vertex) ** 2 + 0.02 * rng.standard_normal() for p in powers
        }
        best = optimum(losses, WINDOW, noise)
        if best.inside:
            hits.append(abs(math.log2(best.value) - vertex) < best.error)
    # 0.68 for a known noise, less for one from few residuals, more for the larger of both.
    assert len(hits) > 550 and 0.58 < np.mean(hits) < 0.8


def test_unstable_rates_do_not_bend_the_parabola():
    losses = on_grid(parabola(-6.2), range(-10, -4))
    losses[2.0**-4], losses[2.0**-3] = 5.0, math.inf
    best = optimum(losses, WINDOW)
    assert math.log2(best.value) == pytest.approx(-6.2)
    assert best.n == 4 and best.inside  # 2^-8 to 2^-5; 2^-4 is unstable


@pytest.mark.parametrize(
    ("losses", "value", "at_edge"),
    [
        ({1.0: 3.0, 2.0: 3.1, 4.0: 3.4}, 1.0, True),
        ({1.0: 3.4, 2.0: 3.1, 4.0: 3.0}, 4.0, True),
        ({1.0: 3.2, 2.0: 3.0, 4.0: math.nan, 8.0: 2.9}, 8.0, True),
        ({2.0: 3.0}, 2.0, True),
    ],
)
def test_at_an_edge_the_grid_point_and_no_error_are_reported(losses, value, at_edge):
    best = optimum(losses, WINDOW, noise=0.01)
    assert (best.value, best.inside, best.at_edge, best.n) == (value, False, at_edge, 0)
    assert math.isnan(best.error)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1: 3.0, 2: 2.0, 4: 2.3, 8: 2.5}, (4, 8)),  # 2.4 is the limit
        ({1: 3.0, 2: 2.0, 4: 2.3}, (4, None)),
        ({1: 3.0, 2: 2.5, 4: 2.0}, (4, None)),  # the optimum is the last rate tried
        ({4: 2.0, 2: 3.0, 8: 9.0}, (4, 8)),  # unsorted
        ({1: 2.0, 2: math.nan, 4: 2.1}, (1, 2)),  # cut at the first, whatever comes after
        ({1: 2.0, 2: 2.5, 4: 2.1, 8: math.inf}, (1, 2)),
        ({1: math.nan, 2: 3.0, 4: 2.0, 8: 2.2}, (8, None)),  # below the optimum nothing counts
        ({1: 9.0, 2: 2.0}, (2, None)),
        ({1: 2.0, 2: 2.4}, (2, None)),  # at the limit is not over it
        ({1: 2.0}, (1, None)),
    ],
)
def test_rates_are_unstable_above_the_optimum_from_twenty_per_cent_on(losses, expected):
    assert stability(losses) == expected


def test_the_excess_can_be_chosen():
    assert stability({1: 2.0, 2: 2.3}, excess=0.1) == (1, 2)


def test_weights_follow_the_errors():
    # Weights 1, 1, 1/4 at x = 0, 1, 2 of y = 0, 1, 4 (log2): by hand, mean 2/3, spread 1.
    law = power_law([1, 2, 4], [1, 2, 16], [1, 1, 2])
    assert law.exponent == pytest.approx(1 / 3 + 1 / 4 * 4 / 3 * 4)
    assert law.error == pytest.approx(1)


def test_equal_errors_give_the_plain_exponent_and_their_own_error():
    x, y = [1, 2, 4, 8], [2, 4, 4, 16]
    assert power_law(x, y, [0.1] * 4).exponent == pytest.approx(power_law(x, y).exponent)
    assert power_law(x, y, [0.1] * 4).error == pytest.approx(0.1 / math.sqrt(5))


SIZES = [9e4, 2.4e5, 6.6e5, 2e6, 7e6]


@pytest.mark.parametrize(
    ("floor", "amplitude", "exponent"), [(3.0, 20, 0.4), (1.0, 5, 0.05), (4.0, 1e5, 1.2)]
)
def test_a_power_law_with_a_floor_is_recovered(floor, amplitude, exponent):
    law = irreducible_power_law(SIZES, [floor + amplitude * x**-exponent for x in SIZES])
    assert law.floor == pytest.approx(floor, rel=1e-6)
    assert law.exponent == pytest.approx(exponent, rel=1e-6)
    assert law(3e5) == pytest.approx(floor + amplitude * 3e5**-exponent)
    assert law.exponent_error < 1e-6 and law.floor_error < 1e-6


def test_errors_of_floor_and_exponent_grow_with_the_larger_of_residuals_and_noise():
    losses = [3 + 20 * x**-0.4 + 0.01 * (-1) ** k for k, x in enumerate(SIZES)]
    plain = irreducible_power_law(SIZES, losses)
    small = irreducible_power_law(SIZES, losses, noise=1e-6)
    large, larger = (irreducible_power_law(SIZES, losses, noise=n) for n in (0.1, 0.2))
    assert small.exponent_error == plain.exponent_error > 0
    assert larger.exponent_error == pytest.approx(2 * large.exponent_error)
    assert large.floor_error > plain.floor_error


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_an_exact_fit_has_the_errors_of_the_noise_given(exponent):
    # Sizes whose geometric mean is 1 are not rescaled, so that the Jacobian can be written down;
    # the powers of exponent 1 are exact, so that no residual is left to scale.
    sizes, floor, amplitude, noise = np.array([0.25, 0.5, 2.0, 4.0]), 3.0, 2.0, 0.01
    law = irreducible_power_law(sizes, floor + amplitude * sizes**-exponent, noise)
    jacobian = np.stack(
        [np.ones(4), sizes**-exponent, -amplitude * np.log(sizes) * sizes**-exponent], axis=1
    )
    errors = noise * np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    assert law.floor_error == pytest.approx(errors[0], rel=1e-4)
    assert law.exponent_error == pytest.approx(errors[2], rel=1e-4)


def test_the_errors_hold_the_truth_as_often_as_they_should():
    rng = np.random.default_rng(3)
    hits = []
    for _ in range(60):
        losses = [3 + 20 * x**-0.4 + 0.003 * rng.standard_normal() for x in SIZES]
        law = irreducible_power_law(SIZES, losses, noise=0.003)
        hits.append(abs(law.exponent - 0.4) < 2 * law.exponent_error)
    assert np.mean(hits) > 0.85


@pytest.mark.parametrize("losses", [[3, 3, 3, 3], [3, 3.1, 3.2, 3.3]])
def test_a_floor_that_the_data_do_not_determine_has_no_error(losses):
    law = irreducible_power_law([1, 2, 4, 8], losses)
    assert math.isnan(law.floor_error) and math.isnan(law.exponent_error)


@pytest.mark.parametrize("unit", [1e-8, 1e6])
def test_a_law_with_a_floor_does_not_depend_on_the_unit_of_the_losses(unit):
    x = [1, 2, 4, 8, 16, 32]
    found = irreducible_power_law(x, [unit * (0.2 + 2 / one) for one in x], noise=0.01 * unit)
    plain = irreducible_power_law(x, [0.2 + 2 / one for one in x], noise=0.01)
    assert found.exponent == pytest.approx(1) and found.floor == pytest.approx(0.2 * unit)
    assert found.exponent_error == pytest.approx(plain.exponent_error)
    assert found.floor_error == pytest.approx(unit * plain.floor_error)


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ({1.0: 3.4, 2.0: 3.1, 4.0: 3.0, 8.0: 4.0}, 4.0),  # the next rate is unstable
        ({1.0: math.nan, 2.0: 3.0, 4.0: 3.1, 8.0: 3.3}, 2.0),  # the one before diverged
        ({1.0: 3.2, 2.0: 3.0, 4.0: math.inf}, 2.0),
    ],
)
def test_next_to_a_run_that_is_lost_the_error_is_the_grid_s_resolution(losses, value):
    best = optimum(losses, WINDOW, noise=0.01)
    assert (best.value, best.inside, best.at_edge, best.n) == (value, False, False, 0)
    assert best.error == pytest.approx(1 / math.sqrt(12))


@pytest.mark.parametrize(("noise", "low"), [(math.nan, -0.5), (0.01, -0.5), (0.05, -1.5), (1, -2)])
def test_next_to_a_run_that_is_lost_losses_within_the_noise_widen_the_cell(noise, low):
    """A uniform place between `low` octaves below the best and half an octave above it."""
    best = optimum({1.0: 3.4, 2.0: 3.1, 4.0: 3.0, 8.0: math.inf}, WINDOW, noise)
    assert best.error == pytest.approx(math.sqrt((0.125 - low**3) / (3 * (0.5 - low))))
