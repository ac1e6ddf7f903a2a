"""Dinan et al.'s Figures 1 and 2: spikes, optima and findings right on constructed tables."""

import re
import tempfile
from pathlib import Path

import pytest

from plots import style, tables
from plots.__main__ import make
from plots.dinan import searches, vit_search, vit_strategies
from plots.dinan.vit_search import NEIGHBOURS, confirm, read
from tests.plots.dinan.searched import OPTIMA, complete, frames, lines, point, search, written

ROOT = Path(__file__).resolve().parents[3]


def found(points, strategy="standard"):
    return swept(*frames(points)).by_strategy[strategy]


def swept(results, metrics):
    """What is read of these tables, in files."""
    with tempfile.TemporaryDirectory() as folder:
        return read(written(Path(folder), results, metrics))


# Optima and their neighbours


def test_the_optimum_is_the_point_with_most_seeds():
    # A neighbour's one seed is better than the optimum's first.
    points = search("standard", accuracies={2: 0.84})
    assert found(points).optimum.pair == "(0.001, 0.8)"
    assert [run.seed for run in found(points).optimum.runs] == [0, 1, 2]
    assert found(search("standard", accuracies={2: 0.84}, seeds=1)).optimum.pair == "(0.002, 0.4)"


def test_equal_accuracies_are_decided_by_the_loss_and_divergence_is_worst():
    points = [
        point("standard", 1.0, 1.0, 0.8, loss=0.5),
        point("standard", 2.0, 1.0, 0.8, loss=0.4),
        point("standard", 4.0, 1.0, 0.9, status="diverged"),
        point("standard", 8.0, 1.0, 0.1, loss=0.1),
    ]
    own = found(points)
    assert [p.rate for p in own.points] == [2.0, 1.0, 8.0, 4.0]
    assert own.points[-1].label(own.points[-1].runs) == "(4, 1) [diverged]"
    assert own.optimum.label(own.optimum.runs) == "(2, 1) [80.00]"


def test_failed_runs_and_points_without_the_first_seed_are_left_out():
    points = search("standard", without=(0,))
    rate, decay = OPTIMA["standard"]
    points.append(point("standard", 2 * rate, decay, 0.9, status="failed"))
    points.append(point("standard", 2 * rate, decay, 0.9, seed=1))
    own = found(points)
    assert len(own.points) == 6 and own.at(2 * rate, decay) is None
    assert swept(*frames(points)).failed == ["standard: 1 failed run left out"]


def test_an_optimum_with_six_lower_neighbours_is_confirmed():
    state = confirm(found(search("standard")))
    assert state.confirmed and state.verdict == "confirmed"
    assert state.measured == "6 of 6 run, none better"


@pytest.mark.parametrize("index", range(6))
def test_a_missing_or_better_neighbour_is_named(index):
    up, wider = NEIGHBOURS[index]
    place = searches.pair(1e-3 * 2.0**up, 0.8 * 2.0**wider)
    missing = confirm(found(search("standard", without=(index,))))
    assert not missing.confirmed and missing.measured == "5 of 6 run, none better"
    assert missing.verdict == f"not confirmed, not run: {place}"
    better = confirm(found(search("standard", accuracies={index: 0.81})))
    assert not better.confirmed and better.measured == "6 of 6 run, 1 better"
    assert better.verdict == f"not confirmed, better: {place}"


def test_corners_are_no_neighbours_but_better_ones_are_named():
    corner = point("standard", 2e-3, 1.6, 0.9)
    state = confirm(found([*search("standard"), corner]))
    assert state.confirmed and state.verdict == "confirmed; better elsewhere: (0.002, 1.6)"


def test_ties_are_counted_and_the_loss_decides_them():
    rate, decay = OPTIMA["standard"]
    optimum = point("standard", rate, decay, 0.8, loss=0.5)
    for loss, confirmed in ((0.6, True), (0.4, False)):
        rest = search("standard", without=(0,))[1:]
        tied = point("standard", 2 * rate, decay, 0.8, loss=loss)
        state = confirm(found([optimum, *rest, tied]))
        assert state.confirmed is confirmed
        text = "none better, 1 tied and decided by the loss" if confirmed else "1 better"
        assert state.measured.endswith(text)


def test_a_diverged_neighbour_is_run_and_worse():
    rate, decay = OPTIMA["standard"]
    gone = point("standard", 2 * rate, decay, 0.99, status="diverged")
    assert confirm(found([*search("standard", without=(0,)), gone])).confirmed


# Findings of the search


def test_optima_stand_beside_the_published_ones():
    findings = lines(vit_search.findings(swept(*complete())))
    best = findings["standard: optimum (lr*, wd*) [best top-1, %]"]
    assert best.measured == "(0.001, 0.8) [80.00] of 7 points"
    assert (best.published, best.verdict) == ("(0.001, 0.8)", "lr x 2^+0.0, wd x 2^+0.0")
    product = findings["neural-tangent: lr* wd*"]
    assert (product.measured, product.published) == ("0.0008", "0.0008")
    rate = findings["neural-tangent: rate of the blocks' matrices"]
    assert (rate.measured, rate.published) == ("0.00094 at n = 768", "0.00094")
    assert findings["hybrid: optimum (lr*, wd*) [best top-1, %]"].published == "in a figure only"
    assert findings["hybrid: neighbours of the optimum"].verdict == "confirmed"


def test_the_rate_of_the_blocks_follows_the_strategys_power_of_the_width():
    rates = {s: vit_search.bulk_rate(s, rate, 256) for s, (rate, _) in OPTIMA.items()}
    assert rates == pytest.approx(
        {
            "standard": 1e-3,
            "neural_tangent": 20 / 4096,
            "hybrid": 4 / 1024,
            "maximal_update": 1 / 256,
        }
    )


@pytest.mark.parametrize("widths", [None, (64, 128)])
def test_without_one_width_there_is_no_rate_of_the_blocks(widths):
    results, metrics = complete()
    results = results.drop(columns="model.width")
    if widths:
        results["model.width"] = [widths[index % 2] for index in range(len(results))]
    names = lines(vit_search.findings(swept(results, metrics)))
    assert not any("blocks" in name for name in names)


def test_spikes_and_divergence_are_counted_over_the_first_seed_of_all_points():
    rate, decay = OPTIMA["standard"]
    points = search("standard", dips=(10, 25), without=(0,))  # seeds 1 and 2 do not count here
    points.append(point("standard", 2 * rate, decay, 0.9, status="diverged", dips=(27,)))
    findings = lines(vit_search.findings(swept(*frames(points))))
    assert findings["standard: spikes in accuracy"].measured == "3 in 2 of 7 runs"
    assert findings["standard: spikes in training loss"].measured == "2 in 2 of 7 runs"
    assert findings["standard: diverged"].measured == "1 of 7 runs"
    assert findings["hybrid: optimum (lr*, wd*)"].measured == "not measured"


# Findings of the comparison


def test_accuracies_are_means_with_their_standard_errors():
    findings = lines(vit_strategies.findings(swept(*complete())))
    # A point apart; seed 0, the lowest, has chosen the optimum and does not count.
    measured = "81.50 ± 0.50 (n = 2) at (0.001, 0.8)"
    assert findings["standard: best top-1 (%)"].measured == measured
    gain = findings["neural-tangent - standard: best top-1 (points)"]
    assert gain.measured == "+5.00 ± 0.71" and gain.verdict == "agrees"
    worst = findings["standard - maximal-update: best top-1 (points)"]
    assert worst.measured == "+1.50 ± 0.50" and worst.verdict == "within noise"
    tie = findings["hybrid - maximal-update: best top-1 (points)"]
    assert tie.measured == "+8.00 ± 0.00" and tie.verdict == "agrees in sign, seeds tie"


def test_claims_that_the_table_contradicts_are_said_to_be():
    results, metrics = complete()
    hybrid = results.curve == "hybrid"
    results.loc[hybrid, "best_eval_top1"] -= 0.4
    findings = lines(vit_strategies.findings(swept(results, metrics)))
    assert findings["hybrid - standard: best top-1 (points)"].verdict == "disagrees"
    assert findings["hybrid - maximal-update: best top-1 (points)"].verdict == (
        "disagrees in sign, seeds tie"
    )


def test_one_seed_and_a_missing_strategy_leave_things_open():
    points = [p for s in ("standard", "neural_tangent") for p in search(s, seeds=1)]
    findings = lines(vit_strategies.findings(swept(*frames(points))))
    gain = findings["neural-tangent - standard: best top-1 (points)"]
    assert gain.measured == "+5.00 ± ?" and gain.verdict == "agrees in sign, one seed"
    gone = findings["hybrid - standard: best top-1 (points)"]
    assert gone.measured == gone.verdict == "not measured"
    assert findings["hybrid: best top-1 (%)"].measured == "not measured"


def test_a_diverged_seed_is_no_part_of_the_mean_and_is_counted():
    points = search("standard", seeds=3)
    points.append(point("standard", *OPTIMA["standard"], 0.9, seed=3, status="diverged"))
    findings = lines(vit_strategies.findings(swept(*frames(points))))
    assert findings["standard: best top-1 (%)"].measured == (
        "81.50 ± 0.50 (n = 2, 1 diverged) at (0.001, 0.8)"
    )


def test_the_seed_that_chose_the_optimum_stands_beside_the_others():
    chosen = "best top-1 of the seed that chose the optimum (%)"
    found = lines(vit_strategies.findings(swept(*complete())))
    # 80 beside 81 and 82: their mean is 81.5, one run lies 0.71 from it, the mean itself 0.5.
    assert found[f"standard: {chosen}"].measured == "80.00, -1.50 ± 0.87 to the others' mean"
    assert not found[f"standard: {chosen}"].verdict
    alone = vit_strategies.findings(swept(*frames(search("standard", seeds=1))))
    assert f"standard: {chosen}" not in lines(alone)


def test_spikes_per_run_are_compared_with_the_standard_strategy():
    points = [*search("standard", dips=(10, 25)), *search("neural_tangent")]
    points += search("hybrid", dips=(10, 15, 25))
    findings = lines(vit_strategies.findings(swept(*frames(points))))
    # Three of nine runs have two; the standard error over runs is 1 / 3.
    name = "spikes in accuracy per run"
    assert findings[f"standard: {name}, all runs"].measured == "0.67 ± 0.33 (n = 9)"
    assert findings[f"standard: {name}, optimum"].measured == "2.00 ± 0.00 (n = 3)"
    fewer = findings[f"neural-tangent: {name}, all runs"]
    assert (fewer.published, fewer.verdict) == ("fewer", "within noise")
    assert fewer.measured == "0.00 ± 0.00 (n = 9), +0.67 ± 0.33 fewer than standard's"
    at_best = findings[f"neural-tangent: {name}, optimum"]
    assert at_best.measured == "0.00 ± 0.00 (n = 3), +2.00 ± 0.00 fewer than standard's"
    assert at_best.verdict == "agrees in sign, seeds tie"
    more = findings[f"hybrid: {name}, optimum"]
    assert more.measured.startswith("3.00") and more.verdict == "disagrees in sign, seeds tie"
    loss = findings["standard: spikes in training loss per run, optimum"]
    assert loss.measured == "1.00 ± 0.00 (n = 3)"  # too few lines before step 10


def test_no_spikes_at_all_are_no_fewer():
    findings = lines(vit_strategies.findings(swept(*complete())))
    assert findings["hybrid: spikes in accuracy per run, all runs"].verdict == "none in either"


@pytest.mark.parametrize(
    ("octaves", "verdict"),
    [(0, "agrees"), (1, "within one step of the search"), (-2, "disagrees")],
)
def test_products_of_rate_and_decay_are_compared_in_steps_of_the_search(octaves, verdict):
    results, metrics = complete()
    moved = results.curve == "neural_tangent"
    results.loc[moved, "optimizer.lr"] *= 2.0**octaves
    finding = lines(vit_strategies.findings(swept(results, metrics)))[
        "lr* wd*: neural-tangent / standard"
    ]
    assert finding.verdict == verdict and finding.published == "both 0.0008"
    assert finding.measured.endswith(f"/ 0.0008 = 2^{octaves:+.1f}")


def test_a_large_search_is_drawn(tmp_path):
    points = [
        point("standard", 1e-3 * 2.0**i, 2.0**j, 0.8 - 0.01 * abs(i + j))
        for i in range(6)
        for j in range(8)
    ]
    text, files = make("dinan/vit_search", written(tmp_path, *frames(points)), tmp_path / "out")
    assert "of 48 points" in text and len(files) == 4


def test_seeds_are_shades_from_the_strategys_colour_to_a_paler_one():
    assert style.shades("#000000", 1) == [(0, 0, 0)]
    first, second, third = style.shades("#000000", 3)
    assert first == (0, 0, 0) and third == pytest.approx((0.65, 0.65, 0.65))
    assert second == pytest.approx((0.325, 0.325, 0.325))


def test_the_readme_quotes_the_shipped_tables():
    sweep = read([tables.shipped(table) for table in vit_search.TABLES])
    search = "\n".join(map(str, vit_search.findings(sweep)))
    assert search.count("6 of 6 run, none better") == 4 and search.count("confirmed") == 4
    readme = (ROOT / "vit_imagenet/README.md").read_text()
    for preset in ("", "_desktop"):
        paths = [tables.shipped(table + preset) for table in vit_strategies.TABLES]
        text = list(map(str, vit_strategies.findings(read(paths))))
        means = [line for line in text if ": best top-1 (%) " in line]
        gaps = [line for line in text if ": best top-1 (points) " in line]
        chose = [line for line in text if "of the seed that chose" in line]
        assert len(means) == 4 and len(gaps) == 6 and len(chose) == 4
        if preset:
            best = [re.search(r"\(%\) +(\S+), \+(\S+ ± \S+)", line) for line in chose]
            names = [
                f"{found[1]} % ({line.partition(':')[0]})"
                for found, line in zip(best, chose, strict=True)
            ]
            points = [found[2] for found in best]
            words = " ".join(readme.split())
            for numbers, end in ((names, ", "), (points, " points above the means of the other")):
                said = ", ".join(numbers[:-1]) + f" and {numbers[-1]}{end}"
                assert said in words, said
        for line in means:
            assert line.split("(%)")[1].split("(n")[0].strip() in readme, line
        for line in gaps:
            gap = re.search(r"[+-](\S+ ± \S+)", line)[1]
            assert gap in readme or line.startswith("neural-tangent - maximal"), line
