"""Optima and exponents on constructed data."""

import math

import pytest

from training.fits import optimum, power_law


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
    ],
)
def test_without_two_finite_neighbours_the_grid_point_is_reported_as_such(losses, value):
    best = optimum(losses)
    assert (best.value, best.inside) == (value, False)


def test_equal_losses_take_the_lower_value_and_have_no_vertex_without_curvature():
    best = optimum({1.0: 3.0, 2.0: 3.0, 4.0: 3.0})
    assert (best.value, best.inside) == (1.0, False)


def test_all_diverged_is_an_error():
    with pytest.raises(ValueError, match="diverged"):
        optimum({1.0: math.inf, 2.0: math.inf})


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


def test_two_points_have_no_error_and_one_has_no_law():
    assert math.isnan(power_law([1, 2], [1, 4]).error)
    with pytest.raises(ValueError, match="two different x"):
        power_law([2, 2], [1, 4])
