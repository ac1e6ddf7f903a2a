"""Dinan et al.'s Figures 3 to 5: losses, optima and findings right on constructed tables."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from measure.fits import Optimum
from plots import tables
from plots.__main__ import make
from plots.dinan import bart_rates, bart_strategies, searches
from plots.dinan.searches import by_loss
from plots.rates import RateSweep
from plots.tables import TableError
from tests.plots.dinan.searched import RATES, both, frames, lines, parabola, r2c2, run, written

ROOT = Path(__file__).resolve().parents[3]


def swept(folder, runs):
    (sweep,) = by_loss(written(folder, *frames(runs)))
    return sweep


# What the tables say


def test_neural_tangents_rates_are_mapped_by_the_width(tmp_path):
    assert searches.mapped_rate("neural_tangent", 32.768, 1024) == pytest.approx(1e-3)
    assert searches.mapped_rate("standard", 1e-3, 1024) == 1e-3
    sweep = swept(tmp_path, both() + both(width=64))
    assert sweep.widths == [64, 1024]
    for search in sweep.searches.values():
        assert [point.mapped for point in search.points] == pytest.approx(RATES)
        assert search.optimum.mapped == pytest.approx(1e-3)
    assert sweep.searches[64, "neural_tangent"].optimum.rate == pytest.approx(0.512)
    assert sweep.searches[1024, "neural_tangent"].optimum.pair == "(32.8, 3.05e-07)"


def test_a_points_loss_is_the_mean_over_seeds_of_the_lowest_losses(tmp_path):
    search = swept(tmp_path, both(seeds=(0, 1, 2))).searches[1024, "standard"]
    assert search.optimum.loss == pytest.approx(2.01)  # best_eval_loss, not the final one
    assert search.optimum.text == "2.010 ± 0.006, n = 3"
    steps, losses = search.optimum.line
    assert steps.tolist() == list(range(10, 101, 10))
    assert losses == pytest.approx(2.01 * (2 - steps / 100))


def test_lines_of_seeds_are_averaged_where_all_were_evaluated(tmp_path):
    results, metrics = frames(both(seeds=(0, 1)))
    name = "standard-1024-0.001-1"
    metrics.loc[(metrics.run == name) & (metrics.step == 50), "eval_loss"] = math.nan
    (sweep,) = by_loss(written(tmp_path, results, metrics))
    steps, losses = sweep.searches[1024, "standard"].optimum.line
    assert steps.tolist() == [10, 20, 30, 40, 60, 70, 80, 90, 100]
    assert losses == pytest.approx(2.005 * (2 - steps / 100))


def test_a_point_with_a_diverged_seed_is_no_optimum_and_shows_that_seed(tmp_path):
    runs = both(seeds=(0,))
    runs += [run("standard", 1e-3, 9.0, seed=1, status="diverged")]
    search = swept(tmp_path, runs).searches[1024, "standard"]
    point = next(p for p in search.points if p.rate == pytest.approx(1e-3))
    assert point.loss == math.inf and point.text == "1 of 2 diverged"
    assert point.line[1][-1] == 9.0
    assert search.optimum.rate == pytest.approx(5e-4)


def test_overflows_are_where_the_count_of_skipped_steps_rises(tmp_path):
    (result, metrics) = run("standard", 1e-3, 2.0, skips=(5, 12, 13, 40))
    sweep = swept(tmp_path, [(result, metrics)])
    (only,) = sweep.searches[1024, "standard"].optimum.runs
    assert only.overflows == (5, 15, 40) and only.skipped == 4


def test_without_a_column_of_skipped_steps_overflows_are_not_recorded(tmp_path):
    results, metrics = frames(both())
    (sweep,) = by_loss(written(tmp_path, results, metrics.drop(columns="skipped_steps")))
    assert sweep.searches[1024, "standard"].optimum.runs[0].overflows is None
    found = lines(bart_rates.findings(sweep))
    finding = found["standard, n = 1024: overflowing steps per run, by lr"]
    assert (finding.measured, finding.verdict) == ("not recorded", "")


def test_losses_between_rates_lie_on_a_line_in_the_logarithm(tmp_path):
    search = swept(tmp_path, both(seeds=(0, 1))).searches[1024, "standard"]
    assert search.losses_at(1e-3) == pytest.approx({0: 2.0, 1: 2.01})
    # Halfway in octaves between 2.0 and 2.04.
    assert search.losses_at(1e-3 * 2**0.5) == pytest.approx({0: 2.02, 1: 2.03})
    assert search.losses_at(1e-5) == {} == search.losses_at(1.0)


def test_the_limits_follow_the_best_line_and_what_can_be_shown_of_the_others():
    steps = np.arange(1, 101)
    best, other, far = (steps, 4 - steps / 100), (steps, 5 - steps / 100), (steps, 50.0 + 0 * steps)
    assert searches.limits([best], 100) == pytest.approx((3.0, 3.9))
    assert searches.limits([best, other], 100) == pytest.approx((3.0, 4.9))
    assert searches.limits([best, far], 100) == pytest.approx((3.0, 3.0 + 6 * 0.9))
    assert searches.limits([best], 50, first=0.5) == pytest.approx((3.5, 3.75))
    assert searches.limits([], 100) == (0.0, 1.0)


# Findings of the search


def test_optima_stand_beside_the_published_ones(tmp_path):
    runs = parabola("standard", best=1.1e-3) + parabola("neural_tangent", best=6e-4)
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    best = found["standard, n = 1024: lr* of the grid"]
    assert best.measured == "0.001, mapped 0.001 (of 6 rates)"
    assert (best.published, best.verdict) == ("0.001", "lr x 2^+0.0")
    vertex = found["standard, n = 1024: lr* by a parabola, mapped"]
    # Losses are an exact parabola, so the vertex is too, without residuals.
    assert vertex.measured == "0.0011, ± 0.00 octaves (5 rates)"
    assert (vertex.published, vertex.verdict) == ("0.001 (grid)", "lr x 2^+0.14")
    best = found["neural-tangent, n = 1024: lr* of the grid"]
    assert best.measured == "16.4, mapped 0.0005 (of 6 rates)"
    assert (best.published, best.verdict) == ("32.768", "lr x 2^-1.0")
    match = found["n = 1024: mapped lr*, neural-tangent / standard (octaves)"]
    assert match.measured == "-0.87 ± 0.00" and match.verdict == "disagrees"
    loss = found["standard, n = 1024: lowest loss"].measured
    lowest = 2 + 0.04 * math.log2(1.1) ** 2
    assert loss == f"{lowest:.4f} ± ? nats, {lowest / math.log(2):.4f} ± ? bits (n = 1)"


def test_optima_less_than_half_a_step_of_the_grid_apart_agree(tmp_path):
    runs = parabola("standard") + parabola("neural_tangent", best=1.3e-3)
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    match = found["n = 1024: mapped lr*, neural-tangent / standard (octaves)"]
    assert match.measured == "+0.38 ± 0.00"
    assert match.verdict == "agrees within the paper's grid"


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
    fits = {}
    for strategy in ("standard", "neural_tangent"):
        best = Optimum(1e-3, 1e-3, 2.0, not at_edge, at_edge, error)
        fits[strategy] = RateSweep(
            64, 1.0, {1e-3: 2.0}, {0: 2.0}, 0.1, best, "own", {1e-3: {0: 2.0}}
        )
    match, _ = bart_rates._between({}, fits, 64)
    assert match.verdict == verdict


def test_other_widths_have_no_published_rate(tmp_path):
    found = lines(bart_rates.findings(swept(tmp_path, both(width=64))))
    best = found["neural-tangent, n = 64: lr* of the grid"]
    assert best.measured == "0.512, mapped 0.001 (of 6 rates)" and best.published == ""


def test_an_optimum_at_the_edge_has_no_parabola(tmp_path):
    runs = parabola("standard", best=1.0) + parabola("neural_tangent")
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    assert found["standard, n = 1024: lr* of the grid"].measured.endswith("at the edge)")
    vertex = found["standard, n = 1024: lr* by a parabola, mapped"].measured
    assert vertex == "no parabola: the best rate is at the edge"


def test_lowering_the_rate_costs_what_the_parabola_says(tmp_path):
    found = lines(bart_rates.findings(swept(tmp_path, both(seeds=(0, 1, 2)))))
    # Two octaves: 4 times the curvature, the same for each seed.
    standard = found["standard, n = 1024: loss at lr* / 4 minus lowest (nats)"]
    assert standard.measured == "+0.1600 ± 0.0000 (n = 3)"
    tangent = found["neural-tangent, n = 1024: loss at lr* / 4 minus lowest (nats)"]
    assert tangent.measured == "+0.0800 ± 0.0000 (n = 3)"
    gap = found["n = 1024: cost of lr* / 4, standard - neural-tangent"]
    assert (gap.measured, gap.verdict) == ("+0.0800 ± 0.0000 (n = 3)", "agrees")


@pytest.mark.parametrize(("curvature", "verdict"), [(0.06, "disagrees"), (0.02, "agrees")])
def test_robustness_is_judged_by_its_sign(tmp_path, curvature, verdict):
    """And by two seeds it is not."""
    for seeds, word in (((0, 1, 2), verdict), ((0, 1), "undecided (n = 2)")):
        runs = parabola("standard", seeds=(0, 1, 2)) + parabola(
            "neural_tangent", curvature=curvature, seeds=seeds
        )
        gap = lines(bart_rates.findings(swept(tmp_path / word, runs)))[
            "n = 1024: cost of lr* / 4, standard - neural-tangent"
        ]
        assert gap.verdict == word and gap.measured.endswith(f" (n = {len(seeds)})")


def test_a_quarter_of_the_optimum_that_was_not_run_is_not_measured(tmp_path):
    runs = [
        r
        for r in both()
        if r[0]["run"] not in ("standard-1024-0.000125-0", "standard-1024-0.00025-0")
    ]
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    cost = found["standard, n = 1024: loss at lr* / 4 minus lowest (nats)"]
    assert cost.measured == "not measured"
    gap = found["n = 1024: cost of lr* / 4, standard - neural-tangent"]
    assert gap.measured == gap.verdict == "not measured"


@pytest.mark.parametrize(
    ("skips", "measured", "verdict"),
    [
        ({4e-3: 3, 2e-3: 1}, "0.004: 3, 0.002: 1, others none", "undecided (n = 2)"),
        # One rate of several that skips is no more than the spread of rates.
        ({2.5e-4: 2}, "0.00025: 2, others none", "undecided (n = 2)"),
        ({}, "none", "none here"),
    ],
)
def test_overflowing_steps_are_counted_by_rate(tmp_path, skips, measured, verdict):
    runs = [
        run(
            "standard",
            rate,
            2 + 0.04 * math.log2(rate / 1e-3) ** 2,
            skips=range(20, 20 + skips.get(rate, 0)),
        )
        for rate in RATES
    ]
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    finding = found["standard, n = 1024: overflowing steps per run, by lr"]
    assert (finding.measured, finding.published) == (measured, "at the higher lr")
    assert finding.verdict == verdict


@pytest.mark.parametrize(
    ("skips", "verdict"),
    [
        ({2: 3, 4: 4, 8: 5}, "agrees"),
        ({8: 1}, "within noise"),
        ({0.25: 1, 0.5: 1, 1: 1}, "disagrees"),
    ],
)
def test_rates_above_the_optimum_skip_more_beyond_their_spread(tmp_path, skips, verdict):
    """Of three rates above it one alone skips a step: an error of 1/3."""
    runs = [
        run(
            "standard",
            1e-3 * rate,
            2 + 0.04 * math.log2(rate) ** 2,
            skips=range(20, 20 + skips.get(rate, 0)),
        )
        for rate in (0.25, 0.5, 1, 2, 4, 8)
    ]
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    assert found["standard, n = 1024: overflowing steps per run, by lr"].verdict == verdict


def test_overflowing_steps_are_means_over_seeds(tmp_path):
    runs = [run("standard", 1e-3, 2.0, seed=seed, skips=range(seed + 1)) for seed in (0, 1)]
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    finding = found["standard, n = 1024: overflowing steps per run, by lr"]
    assert (finding.measured, finding.verdict) == ("0.001: 1.5", "not measured")


def test_the_exponent_of_the_mapped_optimum_is_that_between_widths(tmp_path):
    moved = parabola("neural_tangent", best=1e-3, width=64) + parabola(
        "neural_tangent", best=1e-3 / 2**0.5, width=128
    )
    runs = moved + parabola("standard", width=64) + parabola("standard", width=128)
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    tangent = found["neural-tangent: exponent of the width in mapped lr*"]
    assert tangent.measured.startswith("-0.50 ± ") and tangent.published == "-3/2 (lambda)"
    assert tangent.verdict == "undecided (n = 2)" and tangent.estimate.fitted == 2
    own = found["neural-tangent: exponent of the width in lr* itself"]
    assert own.measured.startswith("+1.00 ± ") and own.published == "0"
    assert own.verdict == "undecided (n = 2)"
    assert found["standard: exponent of the width in mapped lr*"].measured.startswith("+0.00 ± ")
    one = lines(bart_rates.findings(swept(tmp_path, both())))
    name = "standard: exponent of the width in mapped lr*"
    assert one[name].measured == "no fit: 1 width"


def test_a_strategy_that_was_not_run_or_diverged_is_said_to_be(tmp_path):
    runs = [run("standard", rate, 3.0, status="diverged") for rate in RATES]
    found = lines(bart_rates.findings(swept(tmp_path, runs)))
    assert found["standard, n = 1024: lr*"].measured == "every run diverged"
    assert found["neural-tangent, n = 1024: lr*"].measured == "not measured"


# Findings of the comparison


def test_minimum_losses_are_compared_with_the_papers_words(tmp_path):
    sweep = swept(tmp_path, both(seeds=(0, 1, 2)))
    found = lines(bart_strategies.findings((sweep, None)))
    loss = found["standard, BART-large: lowest loss (nats)"]
    assert loss.measured == "2.0100 ± 0.0058 (n = 3), 2.8998 bits, at (0.001, 0.01)"
    gap = found["BART-large: standard - neural-tangent (nats)"]
    assert gap.measured == "-0.0500 ± 0.0000 (n = 3)"  # by seed
    assert (gap.published, gap.verdict) == ("below 0, marginally", "agrees")


@pytest.mark.parametrize(
    ("lowest", "seeds", "verdict"),
    [
        (1.95, (0, 1, 2), "disagrees"),
        (2.005, (0, 1, 2), "agrees"),
        (2.05, (0, 1, 2), "agrees"),
        (1.975, (3, 4, 5), "within noise"),
    ],  # other seeds: 2.01 and 2.015, ± 0.0058 each
)
def test_a_better_neural_tangent_disagrees_with_the_paper(tmp_path, lowest, seeds, verdict):
    runs = parabola("standard", seeds=(0, 1, 2)) + parabola(
        "neural_tangent", lowest=lowest, seeds=seeds
    )
    found = lines(bart_strategies.findings((swept(tmp_path, runs), None)))
    assert found["BART-large: standard - neural-tangent (nats)"].verdict == verdict


def test_three_seeds_are_each_judged_at_the_rate_that_the_others_choose(tmp_path):
    """Seeds 0 and 1 like the first rate, seed 2 the second, and more so; the third diverges."""
    losses = {1e-3: (2.0, 2.0, 2.3), 2e-3: (2.2, 2.2, 1.88)}
    runs = [
        run("standard", rate, loss, seed=seed)
        for rate, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    runs += [
        run("standard", 4e-3, 1.0, seed=seed, status="diverged" if seed else "finished")
        for seed in range(3)
    ]
    search = swept(tmp_path, runs).searches[1024, "standard"]
    assert search.optimum.rate == pytest.approx(2e-3)
    assert [(one.seed, one.best) for one in search.judged] == [(0, 2.2), (1, 2.2), (2, 2.3)]
    # Two seeds diverge at every rate: there is no best one that the third, which ends, could judge.
    lost = [
        run("standard", rate, 2.0, seed=seed, status="diverged" if seed else "finished")
        for rate in (1e-3, 2e-3)
        for seed in range(3)
    ]
    sweep = swept(tmp_path / "lost", lost)
    assert sweep.searches[1024, "standard"].judged == ()
    assert bart_strategies.optima(sweep, 1024) == {}
    two = swept(tmp_path / "two", [one for one in runs if one[0]["seed"]]).searches
    assert two[1024, "standard"].judged == two[1024, "standard"].optimum.runs


def test_the_early_stage_of_the_larger_model(tmp_path):
    sweep, larger = swept(tmp_path / "a", both()), swept(tmp_path / "b", r2c2())
    found = lines(bart_strategies.findings((sweep, larger)))
    gap = found["R2C2: standard - neural-tangent up to step 50 (nats)"]
    assert (gap.measured, gap.published) == ("+0.6000 ± ?", "above 0")
    assert gap.verdict == "agrees in sign, one seed"
    # 2.4 (2 - t / 50) reaches 3.0 at t = 37.5 of standard's 50.
    assert found["R2C2: updates to standard's loss then, relative"].measured == "0.750 ± ? (n = 1)"
    # The smaller model's losses up to the larger one's end: 1.5 times the last.
    early = found["BART-large: standard - neural-tangent up to step 50 (nats)"]
    assert early.measured == "-0.0750 ± ?" and not early.published
    reached = found["BART-large: updates to standard's loss then, relative"].measured
    assert reached == f"{100 * (2 - 3 / 2.05) / 50:.3f} ± ? (n = 1)"


def test_a_loss_that_is_never_reached_is_said_to_be(tmp_path):
    points = (("standard", 2.4), ("neural_tangent", 3.0))
    larger = swept(tmp_path, [run(s, 7e-4, x, width=2048, steps=50) for s, x in points])
    found = lines(bart_strategies.findings((swept(tmp_path / "a", both()), larger)))
    slow = found["R2C2: updates to standard's loss then, relative"]
    assert slow.measured == "not reached (n = 1)"
    verdict = found["R2C2: standard - neural-tangent up to step 50 (nats)"].verdict
    assert verdict == "disagrees in sign, one seed"


# Figures


def test_colours_go_from_red_over_black_to_blue_as_the_rate_falls(tmp_path):
    points = swept(tmp_path, both()).searches[1024, "standard"].points
    colors = bart_rates.rate_colors(points)
    falling = [colors[point] for point in reversed(points)]
    assert falling[:2] == [bart_rates.RED, bart_rates.BLACK] and falling[-1] == bart_rates.BLUE
    blues = [color[2] for color in falling[1:]]
    assert blues == sorted(blues) and len(set(blues)) == len(blues)
    assert list(bart_rates.rate_colors(points[:1]).values()) == [bart_rates.RED]


def test_figure_3_has_a_line_per_rate_with_its_legend_and_overflows(tmp_path):
    runs = both() + both(width=64, skips=(20, 60))
    figure = dict(bart_rates.draw(swept(tmp_path, runs)))["figure_3_bart_rates"]
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == [
        "standard, n = 64",
        "neural-tangent, n = 64",
        "standard, BART-large",
        "neural-tangent, BART-large",
    ]
    texts = [text.get_text() for text in panels[3].get_legend().get_texts()]
    assert texts[2] == "32.8 (0.001) [2.050] *"
    rates = [text.partition(" ")[0] for text in texts]
    assert rates == ["131", "65.5", "32.8", "16.4", "8.19", "4.1"]
    rugs = [line for line in panels[0].lines if line.get_marker() == "|"]
    assert len(rugs) == 6 and list(rugs[0].get_xdata()) == [20, 60]
    assert not [line for line in panels[2].lines if line.get_marker() == "|"]
    assert panels[0].get_ylabel() == "validation loss (nats/token)"
    (bits,) = panels[1].child_axes
    assert bits.get_ylabel() == "validation loss (bits/token)"
    figure.canvas.draw()
    assert bits.get_ylim() == pytest.approx([x / math.log(2) for x in panels[1].get_ylim()])


def test_figure_5_ends_with_the_larger_model_and_dashes_the_smaller(tmp_path):
    sweep, larger = swept(tmp_path / "a", both()), swept(tmp_path / "b", r2c2())
    figure = dict(bart_strategies.draw((sweep, larger)))["figure_5_bart_r2c2"]
    axis = figure.axes[0]
    assert axis.get_xlim() == (0, 50)
    assert [line.get_linestyle() for line in axis.lines] == ["-", "-", "--", "--"]
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert texts == [
        "R2C2 standard (0.0007, 0.01) [3.000]",
        "R2C2 neural-tangent (64.9, 1.08e-07) [2.400]",
        "BART-large standard (0.001, 0.01) [3.000]",  # up to there, not its 2.000
        "BART-large neural-tangent (32.8, 3.05e-07) [3.075]",
    ]


def test_a_larger_model_may_be_narrow_and_deep(tmp_path):
    results, metrics = frames(r2c2())
    results = results.assign(**{"model.width": 64, "model.layers": 22})
    small = written(tmp_path / "a", *frames(both()))
    data = bart_strategies.read([*written(tmp_path / "b", results, metrics), *small])
    assert [sweep.widths for sweep in data] == [[1024], [64]]
    name = "n = 64, 22 + 22 blocks"
    assert f"standard, {name}: lowest loss (nats)" in lines(bart_strategies.findings(data))
    figure = dict(bart_strategies.draw(data))["figure_5_bart_r2c2"]
    first, *_, last = figure.axes[0].get_legend().get_texts()
    assert first.get_text().startswith(f"{name} standard")
    assert last.get_text().startswith("BART-large neural-tangent")


# Commands and files


def test_without_the_larger_models_tables_figure_5_is_said_to_be_missing(tmp_path):
    paths = written(tmp_path, *frames(both()))
    text, files = make("dinan/bart_strategies", paths, tmp_path / "out")
    assert {file.stem for file in files} == {"figure_4_bart_strategies"}
    assert text.endswith("Figure 5 needs the tables of bart_span_denoise/sweeps/figure_5.yaml too")


def test_tables_that_make_no_sweeps_are_refused(tmp_path):
    paths = written(tmp_path / "a", *frames(both()))
    more = written(tmp_path / "b", *frames(r2c2()))
    for given in (paths[:1], [*paths, more[0]], [paths[0]] * 2, [paths[0], more[0]]):
        with pytest.raises(TableError, match="expected results.csv and metrics.csv of every sweep"):
            by_loss(given)
    with pytest.raises(TableError, match="4 tables given, expected 2: results.csv metrics.csv"):
        bart_rates.read([*paths, *more])
    again = written(tmp_path / "c", *frames(both()))
    with pytest.raises(TableError, match="1,048,576 parameters as in .*; expected a larger model"):
        bart_strategies.read([*paths, *again])
    last = written(tmp_path / "d", *frames(both(width=64)))
    with pytest.raises(TableError, match="expected the tables of one sweep or two, got 6"):
        bart_strategies.read([*paths, *more, *last])


def test_the_readme_quotes_the_shipped_tables():
    sweep = bart_rates.read([tables.shipped(table) for table in bart_rates.TABLES])
    readme = (ROOT / "bart_span_denoise/README.md").read_text().replace("−", "-")
    said = lines(bart_rates.findings(sweep))
    cost = said["n = 64: cost of lr* / 4, standard - neural-tangent"]
    value, error = (float(word) for word in cost.measured.split() if "0." in word)
    assert f"less at n = 64, by {value:.3f} ± {error:.3f} nats, within noise at two" in " ".join(
        readme.split()
    )
    assert cost.verdict == "undecided (n = 2)"
    found = [f for f in said.values() if "exponent of" in f.name]
    assert len(found) == 3
    for finding in found:
        value, _, error, *_ = finding.measured.split()
        assert f"n^({value} ± {error})" in readme, finding.name
    data = bart_strategies.read([tables.shipped(table) for table in bart_strategies.TABLES])
    for name, finding in lines(bart_strategies.findings(data)).items():
        if "22 + 22" in name or "step 100" in name:
            assert " ".join(finding.measured.lstrip("+").split()[:3]) in readme, name


def test_the_readme_quotes_three_widths():
    results, metrics = (tables.shipped(f"{table}_desktop") for table in bart_rates.TABLES)
    sweep = bart_rates.read([results, metrics])
    readme = (ROOT / "bart_span_denoise/README.md").read_text().replace("−", "-")
    section = readme.partition("### Three widths")[2].partition("\n### ")[0]
    rows = dict(line.strip("| ").split(" | ", 1) for line in section.splitlines() if " | " in line)
    said = lines([*bart_rates.findings(sweep), *bart_strategies.findings((sweep, None))])

    def quoted(row, finding, digits, words=(0, 2)):
        found = [said[f"n = {width}: {finding}"] for width in sweep.widths]
        numbers = [[float(f.measured.split()[word]) for word in words] for f in found]
        expected = [f"{value:+.{digits}f} ± {error:.{digits}f}" for value, error in numbers]
        assert rows[row].split(" | ") == expected
        return [f.verdict for f in found]

    gap = "standard - neural-tangent"
    assert quoted(f"{gap}, nats", f"{gap} (nats)", 4) == ["disagrees", "disagrees", "within noise"]
    costs = quoted(f"loss at lr\\*/4 above the lowest, {gap}", f"cost of lr* / 4, {gap}", 4)
    assert costs == ["agrees"] * 3
    optima = "mapped lr*, neural-tangent / standard"
    row = "mapped lr\\*, neural-tangent / standard, octaves"
    assert quoted(row, f"{optima} (octaves)", 2) == ["agrees within the paper's grid"] * 3
    for finding in (f for name, f in said.items() if "exponent of" in name):
        value, _, error, *_ = finding.measured.split()
        assert f"n^({value} ± {error})" in section and finding.verdict == "undecided (n = 3)"

    frame = pd.read_csv(results)
    lower = {}
    for (strategy, _), runs in frame.groupby(["curve", "model.width"]):
        losses = runs.pivot(index="optimizer.lr", columns="seed", values="best_eval_loss")
        chosen = [losses.drop(columns=seed).mean(axis=1).idxmin() for seed in losses]
        judged = np.mean(
            [losses.loc[rate, seed] for rate, seed in zip(chosen, losses, strict=True)]
        )
        lower.setdefault(strategy, []).append(f"{judged - losses.mean(axis=1).min():.3f}")
    first, second, third = lower["standard"]
    assert f"{first}, {second} and {third} nats lower" in " ".join(section.split())
    assert lower["neural_tangent"] == ["0.000"] * 3
    for strategy in ("standard", "neural-tangent"):
        optima, losses = (
            rows[row].split(" | ")
            for row in (f"mapped lr\\*, {strategy}", f"lowest loss, {strategy}, nats")
        )
        for width, optimum, loss in zip(sweep.widths, optima, losses, strict=True):
            best = said[f"{strategy}, n = {width}: lr* by a parabola, mapped"].measured
            assert best.replace(",", "").startswith(optimum)
            lowest, _, error, *_ = said[f"{strategy}, n = {width}: lowest loss"].measured.split()
            assert loss == f"{lowest} ± {error}"
