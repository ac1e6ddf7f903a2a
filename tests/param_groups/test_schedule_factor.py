"""The factor of a schedule, at its corners and against optax's values."""

import pytest

from param_groups.schedules import SHAPES, factor

# optax 0.2.8, steps 0 to 12: warmup_cosine_decay_schedule(0, 1, 4, 10, 0.1), and linear_schedule
# from 0 to 1 over 4 steps joined with one from 1 to 0.1 over 6, in 64 bits.
OPTAX = {
    "cosine": [0, 0.25, 0.5, 0.75, 1, 0.9397114317029974, 0.775, 0.55, 0.325, 0.16028856829700258]
    + [0.1] * 3,
    "linear": [0, 0.25, 0.5, 0.75, 1, 0.85, 0.7, 0.55, 0.4, 0.25] + [0.1] * 3,
}


@pytest.mark.parametrize("name", OPTAX)
def test_agrees_with_optax(name):
    got = [factor(name, step, warmup_steps=4, total_steps=10, floor=0.1) for step in range(13)]
    assert got == pytest.approx(OPTAX[name], abs=1e-15)


@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("name", SHAPES)
def test_corners(name, floor):
    def at(step):
        return factor(name, step, warmup_steps=100, total_steps=1100, floor=floor)

    end = 1.0 if name == "constant" else floor
    assert [at(0), at(50), at(100)] == [0.0, 0.5, 1.0]
    assert at(600) == pytest.approx((1 + end) / 2, abs=1e-15)
    assert [at(1100), at(1101), at(10**9)] == [end, end, end]
    # Symmetric about the midpoint, as both shapes are.
    assert at(350) + at(850) == pytest.approx(1 + end, abs=1e-15)


@pytest.mark.parametrize("name", SHAPES)
def test_no_warmup_starts_at_the_peak(name):
    assert factor(name, 0, warmup_steps=0, total_steps=7) == 1.0
    assert factor(name, 0, warmup_steps=0, total_steps=1, floor=0.3) == 1.0


def test_without_a_floor_the_rate_ends_at_zero():
    assert factor("cosine", 7, warmup_steps=0, total_steps=7) == 0.0


@pytest.mark.parametrize("name", SHAPES)
def test_warmup_may_fill_the_run(name):
    assert factor(name, 9, warmup_steps=10, total_steps=10) == 0.9
    assert factor(name, 10, warmup_steps=10, total_steps=10, floor=0.2) in (0.2, 1.0)


@pytest.mark.parametrize("name", SHAPES)
def test_stays_in_the_unit_interval_and_rises_then_falls(name):
    for warmup, total, floor in [(0, 1, 0.0), (3, 17, 0.1), (5, 5, 0.7), (1, 1000, 1 / 3)]:
        curve = [
            factor(name, step, warmup_steps=warmup, total_steps=total, floor=floor)
            for step in range(total + 3)
        ]
        assert all(0 <= value <= 1 for value in curve)
        assert curve[:warmup] == sorted(curve[:warmup])
        assert curve[warmup:] == sorted(curve[warmup:], reverse=True)
