"""Dinan et al.'s Figures 1 and 2: spikes, optima and findings right on constructed tables."""

import math
import tempfile
from pathlib import Path

import pandas as pd
import pytest

from plots import style, tables
from plots.__main__ import make
from plots.dinan import searches, spikes, vit_search, vit_strategies
from plots.dinan.vit_search import NEIGHBOURS, confirm, read
from plots.findings import Finding
from plots.tables import TableError

ROOT = Path(__file__).resolve().parents[3]
OPTIMA = {
    "standard": (1e-3, 0.8),
    "neural_tangent": (20.0, 4e-5),
    "hybrid": (4.0, 2e-4),
    "maximal_update": (1.0, 8e-4),
}
# Best accuracies of the three seeds at the optimum.
SEEDS = {
    "standard": (0.80, 0.81, 0.82),
    "neural_tangent": (0.85, 0.86, 0.87),
    "hybrid": (0.88, 0.88, 0.88),
    "maximal_update": (0.80, 0.80, 0.80),
}
STEPS, WARM_UP = 30, 5


def point(strategy, rate, decay, best, *, seed=0, status="finished", loss=None, dips=()):
    """(row of results, rows of metrics): accuracy rises to `best`; it drops to 0 for one
    evaluation at every step of `dips`, and the training loss doubles there."""
    run = f"{strategy}-{rate:g}-{decay:g}-{seed}"
    key = {"curve": strategy, "optimizer.lr": rate, "optimizer.weight_decay": decay, "seed": seed}
    lost = status != "finished"
    result = {**key, "status": status, "best_eval_top1": math.nan if lost else best, "run": run,
              "final_eval_loss": math.nan if lost else 1 - best if loss is None else loss,
              "model.width": 768}
    lines = [
        {**key, "run": run, "step": step, "epoch": step / 2, "gradient_norm": 1.0,
         "train_loss": 2.0 if step in dips else 1.0,
         "lr_factor": min(step / WARM_UP, (STEPS + WARM_UP - step) / STEPS),
         "eval_loss": 1.0, "eval_top1": 0.0 if step in dips else best * step / STEPS,
         "eval_top5": 1.0}
        for step in range(1, STEPS + 1)
    ]
    return result, lines


def search(strategy, *, seeds=3, without=(), accuracies=None, **options):
    """An optimum with its seeds, and neighbours five points lower by default."""
    rate, decay = OPTIMA[strategy]
    found = [point(strategy, rate, decay, best, seed=seed, **options)
             for seed, best in enumerate(SEEDS[strategy][:seeds])]
    for index, (up, wider) in enumerate(NEIGHBOURS):
        if index not in without:
            best = (accuracies or {}).get(index, SEEDS[strategy][0] - 0.05)
            found.append(point(strategy, rate * 2.0**up, decay * 2.0**wider, best))
    return found


def frames(points):
    """(results, metrics) as tables."""
    results, metrics = zip(*points)
    return pd.DataFrame(results), pd.DataFrame([line for lines in metrics for line in lines])


def complete(**options):
    return frames([p for strategy in OPTIMA for p in search(strategy, **options)])


def found(points, strategy="standard"):
    return swept(*frames(points)).by_strategy[strategy]


def swept(results, metrics):
    """What is read of these tables, in files."""
    with tempfile.TemporaryDirectory() as folder:
        return read(written(Path(folder), results, metrics))


def written(folder, results, metrics):
    folder.mkdir(exist_ok=True)
    paths = [folder / "results.csv", folder / "metrics.csv"]
    results.to_csv(paths[0], index=False)
    metrics.to_csv(paths[1], index=False)
    return paths


def lines(findings):
    return {line.name: line for line in findings if isinstance(line, Finding)}


# Spikes


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


def test_the_drop_that_makes_a_spike_is_an_argument():
    assert spikes.accuracy_spikes([1, 2, 3], [0.5, 0.3, 0.6], 0, drop=0.2) == []
    assert spikes.accuracy_spikes([1, 2, 3], [0.5, 0.3, 0.6], 0, drop=0.1) == [2]


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
    assert spikes.loss_spikes(steps[1:], losses[1:], warm_up=0, fewest=19) == [210]


def test_the_window_the_deviations_and_the_share_are_arguments():
    # Of the 20 lines before, 10 are at 3 and the last 10 at 1.
    steps, losses = list(range(21)), [3.0] * 10 + [1.0] * 10 + [1.5]
    assert spikes.loss_spikes(steps, losses, 0) == []  # m = 2
    assert spikes.loss_spikes(steps, losses, 0, window=10, fewest=10) == [20]
    assert spikes.loss_spikes(steps, losses, 0, window=10, fewest=10, share=0.6) == []
    assert spikes.loss_spikes(*series(0.1, 1.5), warm_up=0, mads=4) == [210]


def test_warm_up_ends_with_the_first_line_of_the_highest_factor():
    assert spikes.warm_up_end([10, 20, 30, 40], [0.5, 1.0, 1.0, 0.3]) == 20
    assert spikes.warm_up_end([10, 20], [0.25, 0.5]) == 20  # it ended during warm-up
    assert spikes.warm_up_end([10, 20], [1.0, 1.0]) == 10  # no warm-up
    assert spikes.warm_up_end([], []) == 0


def test_a_runs_spikes_are_those_of_its_lines():
    _, metrics = frames([point("standard", 1e-3, 0.8, 0.9, dips=(3, 10, 25, 26))])
    # Step 3 is warm-up, and at step 10 there are too few lines for a median.
    assert spikes.of_run(metrics) == ([10, 25], [25])


def test_lines_without_an_evaluation_or_a_loss_are_passed_over():
    _, metrics = frames([point("standard", 1e-3, 0.8, 0.9, dips=(25, 26, 27))])
    metrics.loc[metrics.step == 26, "eval_top1"] = math.nan
    metrics.loc[metrics.step == 26, "train_loss"] = math.nan
    assert spikes.of_run(metrics) == ([25], [25])


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
    assert rates == pytest.approx({
        "standard": 1e-3, "neural_tangent": 20 / 4096, "hybrid": 4 / 1024,
        "maximal_update": 1 / 256,
    })


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
    # Standard deviation of one point, three seeds.
    measured = "81.00 ± 0.58 (n = 3) at (0.001, 0.8)"
    assert findings["standard: best top-1 (%)"].measured == measured
    gain = findings["neural-tangent - standard: best top-1 (points)"]
    assert gain.measured == "+5.00 ± 0.82" and gain.verdict == "agrees"
    worst = findings["standard - maximal-update: best top-1 (points)"]
    assert worst.measured == "+1.00 ± 0.58" and worst.verdict == "within noise"
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
    points = search("standard", seeds=2)
    points.append(point("standard", *OPTIMA["standard"], 0.9, seed=2, status="diverged"))
    findings = lines(vit_strategies.findings(swept(*frames(points))))
    assert findings["standard: best top-1 (%)"].measured == (
        "80.50 ± 0.50 (n = 2, 1 diverged) at (0.001, 0.8)"
    )


def test_spikes_per_run_are_compared_with_the_standard_strategy():
    points = [*search("standard", dips=(10, 25)), *search("neural_tangent")]
    points += search("hybrid", dips=(10, 15, 25))
    findings = lines(vit_strategies.findings(swept(*frames(points))))
    # Three of nine runs have two; the standard error over runs is 1 / 3.
    name = "spikes in accuracy per run"
    assert findings[f"standard: {name}, all runs"].measured == "0.67 ± 0.33 (n = 9)"
    assert findings[f"standard: {name}, optimum"].measured == "2.00 ± 0.00 (n = 3)"
    fewer = findings[f"neural-tangent: {name}, all runs"]
    assert (fewer.published, fewer.verdict) == ("fewer", "within noise")  # 0.67 ± 0.33
    at_best = findings[f"neural-tangent: {name}, optimum"]
    assert at_best.measured == "0.00 ± 0.00 (n = 3)"
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
        "lr* wd*: neural-tangent / standard"]
    assert finding.verdict == verdict and finding.published == "both 0.0008"
    assert finding.measured.endswith(f"/ 0.0008 = 2^{octaves:+.1f}")


# Commands and files

each_figure = pytest.mark.parametrize("name", ["dinan/vit_search", "dinan/vit_strategies"])


@each_figure
def test_neither_the_order_of_tables_nor_that_of_rows_matters(tmp_path, name):
    results, metrics = complete(dips=(25,))
    first = written(tmp_path / "first", results, metrics)
    second = written(tmp_path / "second", results.iloc[::-1], metrics.iloc[::-1])[::-1]
    (text, files), (again, others) = (
        make(name, paths, tmp_path / out) for paths, out in ((first, "a"), (second, "b")))
    assert text == again and "median of the 50" in text
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(files, others))


@each_figure
def test_a_search_with_holes_is_drawn_all_the_same(tmp_path, name):
    """One strategy has one point, one only divergence without a line, two were not run."""
    one = point("standard", 1e-3, 0.8, 0.8)
    gone, _ = point("hybrid", 4.0, 2e-4, 0.8, status="diverged")
    failed, _ = point("hybrid", 8.0, 2e-4, 0.8, status="failed")
    paths = written(tmp_path, *frames([one, (gone, []), (failed, [])]))
    text, files = make(name, paths, tmp_path / "out")
    assert all(file.stat().st_size for file in files)
    assert "not measured" in text and text.endswith("hybrid: 1 failed run left out")


def test_a_large_search_is_drawn(tmp_path):
    points = [point("standard", 1e-3 * 2.0**i, 2.0**j, 0.8 - 0.01 * abs(i + j))
              for i in range(6) for j in range(8)]
    text, files = make("dinan/vit_search", written(tmp_path, *frames(points)), tmp_path / "out")
    assert "of 48 points" in text and len(files) == 4


def test_seeds_are_shades_from_the_strategys_colour_to_a_paler_one():
    assert style.shades("#000000", 1) == [(0, 0, 0)]
    first, second, third = style.shades("#000000", 3)
    assert first == (0, 0, 0) and third == pytest.approx((0.65, 0.65, 0.65))
    assert second == pytest.approx((0.325, 0.325, 0.325))


@each_figure
@pytest.mark.parametrize("bad", [0, 1])
def test_a_table_of_another_figure_is_one_line(tmp_path, name, bad, refused):
    paths = written(tmp_path, *complete())
    pd.read_csv(paths[bad]).assign(curve="unheard_of").to_csv(paths[bad], index=False)
    message = "no row with curve standard, neural_tangent, hybrid, maximal_update"
    assert refused(name, *paths).startswith(f"error: {paths[bad]}: {message}")


def without(column):
    return lambda results, metrics: (results.drop(columns=column), metrics)


def changed(column, value):
    def change(results, metrics):
        results = results.astype({column: object})
        results.loc[3, column] = value
        return results, metrics

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("best_eval_top1"), "results.csv: no column 'best_eval_top1'"),
        (without("status"), "expected results.csv and metrics.csv of every sweep; the results are "
                            "the tables with a column 'status'"),
        (lambda r, m: (r, m.drop(columns="lr_factor")),
         "metrics.csv: no column 'lr_factor'; is it the metrics.csv of the sweep"),
        (lambda r, m: (r, m[m.run != r.run[3]]),
         "metrics.csv: no eval_top1 of run standard-0.002-0.8-0; are results and metrics of the "
         "same sweep"),
        (changed("optimizer.lr", "fast"), "column 'optimizer.lr' has no number: .*fast"),
        (changed("optimizer.lr", math.nan), "run standard-0.002-0.8-0 has no optimizer.lr above 0"),
        (changed("optimizer.weight_decay", 0), "has no optimizer.weight_decay above 0"),
        (changed("best_eval_top1", math.nan), "is finished but has no best_eval_top1"),
        (changed("final_eval_loss", math.nan), "is finished but has no final_eval_loss"),
        (changed("optimizer.lr", 1e-3),
         "two runs with curve standard, optimizer.lr 0.001, optimizer.weight_decay 0.8, seed 0; "
         "expected one; is it the results.csv of one search per strategy"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path, change, message):
    paths = written(tmp_path, *change(*complete()))
    with pytest.raises(TableError, match=message) as caught:
        read(paths)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_one_table_or_two_of_a_kind_are_refused(tmp_path):
    paths = written(tmp_path, *complete())
    for given in (paths[:1], [*paths, paths[0]]):
        with pytest.raises(TableError, match="given, expected 2: results.csv metrics.csv"):
            read(given)
    for given in ([paths[0]] * 2, [paths[1]] * 2):
        with pytest.raises(TableError, match="expected results.csv and metrics.csv of every sweep"):
            read(given)


def test_the_readme_quotes_the_shipped_tables():
    sweep = read([tables.shipped(table) for table in vit_search.TABLES])
    search = "\n".join(map(str, vit_search.findings(sweep)))
    assert search.count("6 of 6 run, none better") == 4 and search.count("confirmed") == 4
    text = "\n".join(map(str, vit_strategies.findings(sweep)))
    readme = (ROOT / "vit_imagenet/README.md").read_text()
    for line in text.splitlines():
        if line.split(":")[1:] and line.split(":")[1].startswith(" best top-1 (%)"):
            assert line.split("(%)")[1].split("(n")[0].strip() in readme, line
    for gap in ("neural-tangent - standard", "hybrid - standard", "hybrid - maximal-update"):
        found = next(line for line in text.splitlines() if line.startswith(f"{gap}: best"))
        assert found.split("(points)")[1].split()[0].lstrip("+") in readme, found
