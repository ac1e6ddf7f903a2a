"""Dinan et al.'s Figures 1 and 2: optima and findings right on constructed tables."""

import pytest

from plots import style
from plots.dinan import searches, vit_search, vit_strategies
from plots.dinan.vit_search import NEIGHBOURS
from tests.plots.dinan.searched import OPTIMA, complete, found, point, search, tables_of
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


def test_optima_stand_beside_the_published_ones(tmp_path):
    results, metrics = complete()
    text = said(vit_search, tmp_path, results, metrics)
    best = text["standard: optimum (lr*, wd*) [best top-1, %]"]
    assert best.measured == "(0.001, 0.8) [80.00] of 7 points"
    assert (best.published, best.verdict) == ("(0.001, 0.8)", "lr x 2^+0.0, wd x 2^+0.0")
    product = text["neural-tangent: lr* wd*"]
    assert (product.measured, product.published) == ("0.0008", "0.0008")
    rate = text["neural-tangent: rate of the blocks' matrices"]
    assert (rate.measured, rate.published) == ("0.00094 at n = 768", "0.00094")
    assert text["hybrid: optimum (lr*, wd*) [best top-1, %]"].published == "in a figure only"
    for widths in (None, (64, 128)):  # without one width there is no rate of the blocks
        other = results.drop(columns="model.width")
        if widths:
            other["model.width"] = [widths[index % 2] for index in range(len(other))]
        assert not any("blocks" in name for name in said(vit_search, tmp_path, other, metrics))


def test_spikes_and_divergence_are_counted_over_the_first_seed_of_all_points(tmp_path):
    points = search("standard", dips=(10, 25), without=(0,))  # seeds 1 and 2 do not count here
    points.append(point("standard", 2 * RATE, DECAY, 0.9, status="diverged", dips=(27,)))
    text = found(vit_search, tmp_path, points)
    assert text["standard: spikes in accuracy"].measured == "3 in 2 of 7 runs"
    assert text["standard: spikes in training loss"].measured == "2 in 2 of 7 runs"
    assert text["standard: diverged"].measured == "1 of 7 runs"
    assert not any(name.startswith("hybrid") for name in text)


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


def test_one_seed_a_missing_strategy_and_a_diverged_seed(tmp_path):
    points = [p for s in ("standard", "neural_tangent") for p in search(s, seeds=1)]
    text = found(vit_strategies, tmp_path, points)
    gain = text["neural-tangent - standard: best top-1 (points)"]
    assert gain.measured == "+5.00 ± ?" and gain.verdict == "agrees in sign, one seed"
    gone = text["hybrid - standard: best top-1 (points)"]
    assert gone.measured == gone.verdict == "not measured"
    assert "standard: best top-1 of the seed that chose the optimum (%)" not in text
    lost = point("standard", *OPTIMA["standard"], 0.9, seed=3, status="diverged")
    text = found(vit_strategies, tmp_path, [*search("standard"), lost])
    measured = "81.50 ± 0.50 (n = 2, 1 diverged) at (0.001, 0.8)"
    assert text["standard: best top-1 (%)"].measured == measured


def test_spikes_per_run_are_compared_with_the_standard_strategy(tmp_path):
    points = [*search("standard", dips=(10, 25)), *search("neural_tangent")]
    text = found(vit_strategies, tmp_path, points + search("hybrid", dips=(10, 15, 25)))
    # Three of nine runs have two; the standard error over runs is 1 / 3.
    name = "spikes in accuracy per run"
    assert text[f"standard: {name}, all runs"].measured == "0.67 ± 0.33 (n = 9)"
    assert text[f"standard: {name}, optimum"].measured == "2.00 ± 0.00 (n = 3)"
    fewer = text[f"neural-tangent: {name}, all runs"]
    assert (fewer.published, fewer.verdict) == ("fewer", "within noise")
    assert fewer.measured == "0.00 ± 0.00 (n = 9), +0.67 ± 0.33 fewer than standard's"
    assert text[f"neural-tangent: {name}, optimum"].verdict == "agrees in sign, seeds tie"
    assert text[f"hybrid: {name}, optimum"].verdict == "disagrees in sign, seeds tie"
    loss = text["standard: spikes in training loss per run, optimum"]
    assert loss.measured == "1.00 ± 0.00 (n = 3)"  # too few lines before step 10
    none = said(vit_strategies, tmp_path, *complete())
    assert none[f"hybrid: {name}, all runs"].verdict == "none in either"


@pytest.mark.parametrize(
    ("octaves", "verdict"), [(0, "agrees"), (1, "within one step of the search"), (-2, "disagrees")]
)
def test_products_of_rate_and_decay_are_compared_in_steps_of_the_search(tmp_path, octaves, verdict):
    results, metrics = complete()
    results.loc[results.curve == "neural_tangent", "optimizer.lr"] *= 2.0**octaves
    line = said(vit_strategies, tmp_path, results, metrics)["lr* wd*: neural-tangent / standard"]
    assert line.verdict == verdict and line.published == "both 0.0008"
    assert line.measured.endswith(f"/ 0.0008 = 2^{octaves:+.1f}")


def test_seeds_are_shades_from_the_strategys_colour_to_a_paler_one():
    assert style.shades("#000000", 1) == [(0, 0, 0)]
    first, second, third = style.shades("#000000", 3)
    assert first == (0, 0, 0) and third == pytest.approx((0.65, 0.65, 0.65))
    assert second == pytest.approx((0.325, 0.325, 0.325))
