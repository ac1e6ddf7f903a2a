"""What counts as a mid-training spike."""

import math

import pandas as pd
import pytest

from plots.dinan import spikes
from tests.plots.dinan.searched import frames, point


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
