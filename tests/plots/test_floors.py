"""Power laws with an irreducible term: known ones are recovered, and errors are what they say."""

import math

import numpy as np
import pytest

from plots.floors import irreducible_power_law

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
