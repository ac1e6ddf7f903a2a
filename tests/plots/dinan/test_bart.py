"""Dinan et al.'s Figures 3 to 5: losses, optima and findings right on constructed tables."""

import math

import numpy as np
import pytest

from param_groups.fits import Optimum
from plots.dinan import bart_rates, bart_strategies, searches
from plots.rates import RateSweep
from tests.plots.dinan.searched import RATES, both, found, parabola, r2c2, run, tables_of
from tests.plots.made import lines


def swept(folder, runs):
    return bart_rates.read(tables_of(folder, runs))


def compared(folder, runs, larger=()):
    """What Figures 4 and 5 read, and their findings."""
    paths = tables_of(folder / "a", runs)
    paths += tables_of(folder / "b", larger) if larger else []
    data = bart_strategies.read(paths)
    return data, lines(bart_strategies.findings(data))


def test_neural_tangents_rates_are_mapped_by_the_width(tmp_path):
    searched = swept(tmp_path, both() + both(width=64))
    for by_width in searches.fits(searched).values():
        assert list(by_width) == [64, 1024]
        for sweep in by_width.values():
            assert list(sweep.losses) == pytest.approx(RATES)
            assert sweep.best.grid_value == pytest.approx(1e-3)
    said = lines(bart_rates.findings(searched))
    assert said["neural-tangent, n = 64: lr* of the grid"].measured.startswith("0.512, mapped")


def test_losses_between_rates_lie_on_a_line_in_the_logarithm(tmp_path):
    sweep = searches.fits(swept(tmp_path, both(seeds=(0, 1))))["standard"][1024]
    assert bart_rates.losses_at(sweep, 1e-3) == pytest.approx({0: 2.0, 1: 2.01})
    # Halfway in octaves between 2.0 and 2.04.
    assert bart_rates.losses_at(sweep, 1e-3 * 2**0.5) == pytest.approx({0: 2.02, 1: 2.03})
    assert bart_rates.losses_at(sweep, 1e-5) == {} == bart_rates.losses_at(sweep, 1.0)


def test_the_limits_follow_the_best_line_and_what_can_be_shown_of_the_others():
    steps = np.arange(1, 101)
    best, other, far = (steps, 4 - steps / 100), (steps, 5 - steps / 100), (steps, 50.0 + 0 * steps)
    assert searches.limits([best], 100) == pytest.approx((3.0, 3.9))
    assert searches.limits([best, other], 100) == pytest.approx((3.0, 4.9))
    assert searches.limits([best, far], 100) == pytest.approx((3.0, 3.0 + 6 * 0.9))
    assert searches.limits([best], 50, first=0.5) == pytest.approx((3.5, 3.75))
    assert searches.limits([], 100) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("error", "at_edge", "verdict"),
    [
        (0.1, False, "agrees within the paper's grid"),
        (0.4, False, "agrees"),  # by its error of 0.57 octaves alone
        (math.nan, False, "undecided: error unknown"),
        (math.nan, True, "undecided: at an edge"),
    ],
)
def test_optima_of_large_errors_or_at_an_edge_do_not_agree_by_the_grid(error, at_edge, verdict):
    best = Optimum(1e-3, 1e-3, 2.0, not at_edge, at_edge, error)
    sweep = RateSweep(64, 1.0, {1e-3: {0: 2.0}}, best, "own", {0: 2.0}, {1e-3: {0: 2.0}}, 0.1)
    match, *_ = bart_rates._between([sweep, sweep], 64)
    assert match.verdict == verdict


def test_the_final_loss_is_split_into_infilling_and_copying(tmp_path):
    """30 % of targets stand behind masks: 1.8 nats per target of 2.0 are theirs."""
    parts = {"final_eval_infilling": 1.8, "final_eval_infilled_tokens": 0.3}
    runs = [run("standard", 1e-3, 2.0, seed=seed, **parts) for seed in range(3)]
    for row, _ in runs:
        row["final_eval_loss"] = 2.0
    said = found(bart_rates, tmp_path, runs)
    filled, copied = (
        said[f"standard, n = 1024: final loss of {what} (nats)"].measured
        for what in ("infilling", "copying")
    )
    assert filled == "6.000 ± 0.000 (n = 3), 30% of targets"
    assert copied == "0.286 ± 0.000 (n = 3), the others"


def test_the_exponent_of_the_mapped_optimum_is_that_between_widths(tmp_path):
    runs = [
        one
        for step, width in enumerate((64, 128, 256))
        for strategy, best in (("standard", 1e-3), ("neural_tangent", 1e-3 / 2 ** (step / 2)))
        for one in parabola(strategy, best=best, width=width)
    ]
    said = found(bart_rates, tmp_path, runs)
    tangent = said["neural-tangent: exponent of the width in mapped lr*"]
    assert tangent.measured.startswith("-0.50 ± ") and tangent.published == "-3/2 (lambda)"
    assert tangent.verdict == "undecided (n = 3)"
    own = said["neural-tangent: exponent of the width in lr* itself"]
    assert own.measured.startswith("+1.00 ± ") and own.published == "0"
    name = "standard: exponent of the width in mapped lr*"
    assert said[name].measured.startswith("+0.00 ± ")
    assert found(bart_rates, tmp_path, both())[name].measured == "no fit: 1 width"


def test_the_early_stage_of_the_larger_model(tmp_path):
    _, said = compared(tmp_path, both(), r2c2())
    gap = said["R2C2: standard - neural-tangent up to step 50 (nats)"]
    assert (gap.measured, gap.published) == ("+0.6000 ± ?", "above 0")
    assert gap.verdict == "agrees in sign, one seed"
    # 2.4 (2 - t / 50) reaches 3.0 at t = 37.5 of standard's 50.
    assert said["R2C2: updates to standard's loss then, relative"].measured == "0.750 ± ? (n = 1)"
    slow = [
        run(s, 7e-4, x, width=2048, steps=50) for s, x in (("standard", 2.4), ("neural_tangent", 3))
    ]
    _, said = compared(tmp_path, both(), slow)
    reached = said["R2C2: updates to standard's loss then, relative"].measured
    assert reached == "not measured (n = 0, 1 did not reach it)"
