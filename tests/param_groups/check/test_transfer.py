"""Does the best rate stay? What is trained next, and what constructed losses say."""

import math
import random

import pytest

from param_groups.check import transfer
from param_groups.check.transfer import MOVES, STAYS, UNDECIDED, Grid, answer, wanted

GRID = Grid((64, 128, 256, 512), tuple(range(-9, -4)), 1.0, (0, 1), (2, 3))


def law(power, best=-7.0, noise=0.002, seed=0, curvature=0.05):
    """A run's loss: a parabola in log2 of the rate around 2^best (n/64)^power, a common part of
    every seed and width, and noise of its own."""

    def loss(run):
        draw = random.Random(f"{seed} {run.width} {run.seed}")
        common = draw.gauss(0, 0.05)
        own = random.Random(f"{seed} {run}").gauss(0, noise)
        off = run.octave - best - power * math.log2(run.width / 64)
        return 3.0 - 0.1 * math.log2(run.width / 64) + curvature * off**2 + common + own

    return loss


def trained(grid, loss):
    """Losses of everything that is wanted, as a command trains it."""
    losses = {}
    for _ in range(100):
        runs = wanted(grid, losses)
        if not runs:
            return losses
        assert len(set(runs)) == len(runs) and not losses.keys() & set(runs)
        losses |= {run: loss(run) for run in runs}
    raise AssertionError("the grid never ends")


@pytest.mark.parametrize(
    ("power", "verdict"), [(0.0, STAYS), (0.1, STAYS), (-0.5, MOVES), (-1.0, MOVES), (0.5, MOVES)]
)
def test_a_known_power_is_found_and_named(power, verdict):
    said = [answer(GRID, trained(GRID, law(power, seed=seed))) for seed in range(20)]
    assert [one.verdict for one in said] == [verdict] * 20
    covered = [abs(one.power.exponent - power) <= one.reach for one in said]
    assert sum(covered) >= 17  # of 20 intervals of 95 %


def test_a_power_between_the_words_is_undecided_and_says_what_would_decide():
    one = answer(GRID, trained(GRID, law(0.2, noise=0.02)))
    assert one.verdict == UNDECIDED and "--" in one.advice
    assert answer(GRID, trained(GRID, law(0.25))).verdict == UNDECIDED  # where the words part


def test_what_seeds_share_does_not_widen_the_error():
    """A seed's data is the same at every rate, so that its part of the loss moves no vertex."""
    assert answer(GRID, trained(GRID, law(0.0, noise=0.0005))).reach < 0.05


def test_a_steep_curve_has_a_known_noise_though_no_other_rate_is_near_its_best():
    two = Grid(GRID.widths[::3], GRID.octaves, 1.0, GRID.seeds, ())
    said = [answer(two, trained(two, law(0.0, curvature=0.3, seed=seed))) for seed in range(5)]
    assert [one.verdict for one in said] == [STAYS] * 5


def test_one_seed_decides_nothing_by_luck():
    alone = Grid(GRID.widths[:2], GRID.octaves, 1.0, (0,), ())
    one = answer(alone, trained(alone, law(0.0)))
    assert one.verdict == UNDECIDED and "--seeds" in one.advice


@pytest.mark.parametrize("best", [-13.0, -1.0])
def test_the_grid_grows_past_an_edge_at_the_widths_that_need_it(best):
    losses = trained(GRID, law(-0.5, best=best, noise=0.0))
    one = answer(GRID, losses)
    assert one.verdict == MOVES and one.power.exponent == pytest.approx(-0.5, abs=0.02)
    for width in GRID.widths:
        rates = transfer.means(GRID, losses, width)
        assert min(rates) < one.power(width) < max(rates)


def test_a_rate_without_neighbours_is_no_best_rate():
    falls = lambda run: -0.1 * run.octave
    one = answer(GRID, trained(GRID, falls))
    assert one.verdict == UNDECIDED and "no best rate between others at width 64" in one.advice


def test_widths_that_always_diverge_are_named():
    one = answer(GRID, trained(GRID, lambda run: math.inf if run.width == 512 else law(0.0)(run)))
    assert one.verdict == UNDECIDED and one.advice.endswith("at width 512: give other --lr")
    assert transfer.answer(GRID, trained(GRID, lambda run: math.inf)).power is None


def test_rates_that_diverge_above_the_best_leave_a_verdict():
    cliff = lambda run: math.inf if run.octave > -6 else law(0.0, best=-6.6)(run)
    assert answer(GRID, trained(GRID, cliff)).verdict == STAYS


def test_the_price_is_that_of_fresh_seeds_at_the_bases_rate():
    one = answer(GRID, trained(GRID, law(-1.0, noise=0.0)))
    base, *_, last = one.at
    assert base.price == 0 and last.price == pytest.approx(0.05 * 3**2)  # three octaves off
    assert last.at_base - last.lowest == pytest.approx(last.price)


def test_student_covers_as_scipy_does():
    from scipy.special import stdtrit

    for freedom in (1, 2, 5, 12, 13, 20, 50, 1000):
        assert transfer.student(freedom) == pytest.approx(stdtrit(freedom, 0.975), abs=0.02)
    assert transfer.student(0) == math.inf


def test_curves_collapse_up_to_units():
    curve = [1 / (1 + x) for x in range(10)]
    same = {64: [curve] * 2, 128: [[2 + 3 * y for y in curve]] * 2}
    assert transfer.collapse(same) == pytest.approx((0.0, 0.0), abs=1e-12)
    other = {64: [curve] * 2, 128: [[y**3 for y in curve]] * 2}
    assert transfer.collapse(other)[0] > 0.05
