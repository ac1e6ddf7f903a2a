"""Dinan et al.'s Figures 1 and 2: optima, spikes and findings right on constructed tables."""

import math

import pandas as pd
import pytest

from plots import style
from plots.dinan import searches, spikes, vit_search, vit_strategies
from plots.dinan.vit_search import NEIGHBOURS
from tests.plots.dinan.searched import OPTIMA, complete, found, frames, point, search, tables_of
from tests.plots.made import lines, written

RATE, DECAY = OPTIMA["standard"]


def points_of(folder, points, strategy="standard"):
    """The points of a strategy's search, best first, as Figure 1 has them."""
    return vit_search.strategies(vit_search.read(tables_of(folder, points)))[strategy]


def best_of(points):
    (best,) = points[points["chosen"]].index
    return points.loc[best, "optimizer.lr"], points.loc[best, "optimizer.weight_decay"]


def said(module, folder, results, metrics):
    return lines(module.findings(module.read(written(folder, results=results, metrics=metrics))))


def test_the_optimum_is_the_point_with_most_seeds(tmp_path):
    """A neighbour's one seed is better than the optimum's first."""
    points = search("standard", accuracies={2: 0.84})
    assert best_of(points_of(tmp_path, points)) == (1e-3, 0.8)
    one = search("standard", accuracies={2: 0.84}, seeds=1)
    assert best_of(points_of(tmp_path, one)) == (2e-3, 0.4)


def test_equal_accuracies_are_decided_by_the_loss_and_divergence_is_worst(tmp_path):
    points = [
        point("standard", 1.0, 1.0, 0.8, loss=0.5),
        point("standard", 2.0, 1.0, 0.8, loss=0.4),
        point("standard", 4.0, 1.0, 0.9, status="diverged"),
        point("standard", 8.0, 1.0, 0.1, loss=0.1),
        point("standard", 16.0, 1.0, 0.9, status="failed"),
        point("standard", 32.0, 1.0, 0.9, seed=1),  # without the first seed: no point
    ]
    own = points_of(tmp_path, points)
    assert list(own["optimizer.lr"]) == [2.0, 1.0, 8.0, 4.0]


PLACES = [searches.pair(RATE * 2.0**up, DECAY * 2.0**wider) for up, wider in NEIGHBOURS]
CORNER = point("standard", 2 * RATE, 2 * DECAY, 0.9)
GONE = point("standard", 2 * RATE, DECAY, 0.99, status="diverged")
# Equal accuracies are decided by the loss.
WITH_LOSS = point("standard", RATE, DECAY, 0.8, loss=0.5)
TIES = [point("standard", 2 * RATE, DECAY, 0.8, loss=loss) for loss in (0.6, 0.4)]
LOWER = search("standard", without=(0,))[1:]


@pytest.mark.parametrize(
    ("points", "measured", "verdict"),
    [
        (search("standard"), "6 of 6 run, none better", "confirmed"),
        *(
            (search("standard", without=(index,)), "5 of 6 run, none better", place)
            for index, place in enumerate(f"not confirmed, not run: {one}" for one in PLACES)
        ),
        *(
            (search("standard", accuracies={index: 0.81}), "6 of 6 run, 1 better", place)
            for index, place in enumerate(f"not confirmed, better: {one}" for one in PLACES)
        ),
        (
            [*search("standard"), CORNER],
            "6 of 6 run, none better",
            "confirmed; better elsewhere: (0.002, 1.6)",
        ),
        ([*search("standard", without=(0,)), GONE], "6 of 6 run, none better", "confirmed"),
        ([WITH_LOSS, *LOWER, TIES[0]], "6 of 6 run, none better", "confirmed"),
        (
            [WITH_LOSS, *LOWER, TIES[1]],
            "6 of 6 run, 1 better",
            f"not confirmed, better: {PLACES[0]}",
        ),
    ],
)
def test_an_optimum_is_confirmed_by_six_lower_neighbours(tmp_path, points, measured, verdict):
    line = found(vit_search, tmp_path, points)["standard: neighbours of the optimum"]
    assert (line.measured, line.verdict) == (measured, verdict)


def test_accuracies_are_means_with_their_standard_errors(tmp_path):
    """A point apart; seed 0, the lowest, has chosen the optimum and does not count."""
    results, metrics = complete()
    text = said(vit_strategies, tmp_path, results, metrics)
    measured = "81.50 ± 0.50 (n = 2) at (0.001, 0.8)"
    assert text["standard: best top-1 (%)"].measured == measured
    # 80 beside 81 and 82: their mean is 81.5, one run lies 0.71 from it, the mean itself 0.5.
    chosen = text["standard: best top-1 of the seed that chose the optimum (%)"]
    assert chosen.measured == "80.00, -1.50 ± 0.87 to the others' mean" and not chosen.verdict

    def gap(pair):
        line = text[f"{pair}: best top-1 (points)"]
        return line.measured, line.verdict

    assert gap("neural-tangent - standard") == ("+5.00 ± 0.71", "agrees")
    assert gap("standard - maximal-update") == ("+1.50 ± 0.50", "within noise")
    assert gap("hybrid - maximal-update") == ("+8.00 ± 0.00", "agrees in sign, seeds tie")
    results.loc[results.curve == "hybrid", "best_eval_top1"] -= 0.4
    text = said(vit_strategies, tmp_path, results, metrics)
    assert gap("hybrid - standard")[1] == "disagrees"
    assert gap("hybrid - maximal-update")[1] == "disagrees in sign, seeds tie"


def test_seeds_are_shades_from_the_strategys_colour_to_a_paler_one():
    assert style.shades("#000000", 1) == [(0, 0, 0)]
    first, second, third = style.shades("#000000", 3)
    assert first == (0, 0, 0) and third == pytest.approx((0.65, 0.65, 0.65))
    assert second == pytest.approx((0.325, 0.325, 0.325))


# What counts as a mid-training spike


@pytest.mark.parametrize(
    ("top1", "begins"),
    [
        ([0.1, 0.5, 0.6, 0.7], []),
        ([0.1, 0.5, 0.3, 0.7], [3]),
        ([0.1, 0.5, 0.3, 0.4, 0.7], [3]),  # two in a row are one
        ([0.1, 0.5, 0.3, 0.5, 0.4], [3, 5]),
        ([0.1, 0.9, 0.85, 0.9], []),  # exactly at the threshold, 0.9 - 0.85 > 0.05 in floats
        ([0.1, 0.9, 0.8499, 0.9], [3]),
        ([0.5, 0.1, 0.6, 0.7], []),  # during warm-up
        ([0.5, 0.1, 0.1, 0.7], [3]),  # goes on after warm-up; the best of the warm-up counts
        ([0.1, 0.50, 0.46, 0.42], [4]),  # below the best so far, not below the one before
        ([], []),
    ],
)
def test_accuracy_spikes_begin_where_accuracy_falls_below_its_best(top1, begins):
    steps = list(range(1, len(top1) + 1))
    assert spikes.accuracy_spikes(steps, top1, warm_up=3) == begins


def series(spread, *ending):
    """20 losses of median 1 and MAD `spread`, then `ending`, at steps 10, 20, ..."""
    losses = [1 + spread, 1 - spread] * 10 + list(ending)
    return [10 * (1 + index) for index in range(len(losses))], losses


@pytest.mark.parametrize(
    ("spread", "ending", "begins"),
    [
        (0.0, (1.0, 1.0), []),
        (0.0, (1.05, 1.0), []),  # at 5% of the median
        (0.0, (1.06, 1.0), [210]),
        (0.0, (1.06, 1.07, 1.0, 1.06), [210, 240]),  # two in a row are one
        (0.1, (1.59, 1.0), []),  # within 6 MAD
        (0.1, (1.61, 1.0), [210]),
        (0.0, (math.inf, math.nan, 1.0), []),  # divergence is no spike
        (0.0, (0.5,), []),
    ],
)
def test_loss_spikes_begin_where_the_loss_rises_above_the_window(spread, ending, begins):
    assert spikes.loss_spikes(*series(spread, *ending), warm_up=0) == begins


def test_loss_spikes_need_warm_up_to_be_over_and_enough_lines_before():
    steps, losses = series(0.0, 2.0, 1.0)
    assert spikes.loss_spikes(steps, losses, warm_up=211) == []
    assert spikes.loss_spikes(steps, losses, warm_up=210) == [210]
    assert spikes.loss_spikes(steps[1:], losses[1:], warm_up=0) == []


def test_the_median_is_that_of_the_last_fifty_lines():
    losses = [3.0] * 30 + [1.0] * 30 + [1.5]
    assert spikes.loss_spikes(range(61), losses, 0) == [60]  # m = 1; of all lines before, m = 2
    assert spikes.loss_spikes(range(56), [*losses[:55], 1.5], 0) == []  # as many at 3: m = 2


@pytest.mark.parametrize(
    ("factors", "begins"),
    [
        ([0.5, 1.0, 1.0, 0.3, 0.2], [4]),  # ends with the first line of the highest factor
        ([0.1, 0.2, 0.3, 0.4, 0.5], []),  # the run ended during warm-up
        ([1.0] * 5, [2, 4]),  # no warm-up
    ],
)
def test_warm_up_ends_where_the_rate_is_highest(factors, begins):
    top1 = [0.5, 0.1 if begins == [2, 4] else 0.5, 0.5, 0.1, 0.5]
    columns = {"step": range(1, 6), "lr_factor": factors, "eval_top1": top1, "train_loss": 1.0}
    assert spikes.of_run(pd.DataFrame(columns))[0] == begins


def test_a_runs_spikes_are_those_of_its_lines():
    _, metrics = frames([point("standard", 1e-3, 0.8, 0.9, dips=(3, 10, 25, 26))])
    # Step 3 is warm-up, and at step 10 there are too few lines for a median.
    assert spikes.of_run(metrics) == ([10, 25], [25])


def test_lines_without_an_evaluation_or_a_loss_are_passed_over():
    _, metrics = frames([point("standard", 1e-3, 0.8, 0.9, dips=(25, 26, 27))])
    metrics.loc[metrics.step == 26, "eval_top1"] = math.nan
    metrics.loc[metrics.step == 26, "train_loss"] = math.nan
    assert spikes.of_run(metrics) == ([25], [25])
