"""Optima and exponents on constructed data."""

import math

import numpy as np
import pytest

from param_groups.fits import WINDOW, optimum, power_law, stability


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
    assert math.isnan(power_law([1, 2], [1, 4]).error)  # two points have none


def on_grid(loss, powers):
    return {2.0**power: loss(2.0**power) for power in powers}


def test_a_least_squares_parabola_finds_the_vertex_of_an_exact_one_without_error():
    best = optimum(on_grid(parabola(-6.3), range(-12, -2)), WINDOW)
    assert math.log2(best.value) == pytest.approx(-6.3)
    assert best.error == pytest.approx(0, abs=1e-9)
    assert best.vertex_loss == pytest.approx(parabola(-6.3)(2.0**-6.3))
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
        grid, noisy = np.arange(-11, -1, step), lambda: 0.02 * rng.standard_normal()
        losses = {2.0**p: 4 + 0.1 * (p - vertex) ** 2 + noisy() for p in grid}
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
        ({1.0: 3.0, 2.0: 3.0, 4.0: 3.0}, 1.0, True),  # of equal losses the lower value
        # Next to a run that is lost: the next rate is unstable, the one before diverged.
        ({1.0: 3.4, 2.0: 3.1, 4.0: 3.0, 8.0: 4.0}, 4.0, False),
        ({1.0: math.nan, 2.0: 3.0, 4.0: 3.1, 8.0: 3.3}, 2.0, False),
        ({1.0: 3.2, 2.0: 3.0, 4.0: math.inf}, 2.0, False),
    ],
)
def test_at_an_edge_and_next_to_a_lost_run_the_grid_point_is_reported(losses, value, at_edge):
    """Without an error at the edge; inside, the error is the grid's resolution."""
    best = optimum(losses, WINDOW, noise=0.01)
    assert (best.value, best.inside, best.at_edge, best.n) == (value, False, at_edge, 0)
    error = math.nan if at_edge else 1 / math.sqrt(12)
    assert best.error == pytest.approx(error, nan_ok=True)
    through_three = optimum(losses)
    unstable = losses.get(8.0) == 4.0  # which the parabola through three points takes
    assert unstable or (through_three.value, through_three.inside) == (value, False)


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


@pytest.mark.parametrize(("noise", "low"), [(math.nan, -0.5), (0.01, -0.5), (0.05, -1.5), (1, -2)])
def test_next_to_a_run_that_is_lost_losses_within_the_noise_widen_the_cell(noise, low):
    """A uniform place between `low` octaves below the best and half an octave above it."""
    best = optimum({1.0: 3.4, 2.0: 3.1, 4.0: 3.0, 8.0: math.inf}, WINDOW, noise)
    assert best.error == pytest.approx(math.sqrt((0.125 - low**3) / (3 * (0.5 - low))))
