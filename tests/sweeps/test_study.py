"""Studies: ranges that move, constants from trials, what is suggested next, where trials live."""

import math

import numpy as np
import optuna
import pytest

from sweeps.storage import Storage
from sweeps.study import (
    Trial,
    arithmetic_means,
    best_trial,
    equally_good,
    geometric_means,
    is_near_edge,
    next_ranges,
    suggest,
)
from training.errors import UserError

WIDE = (1e-2, 1e2)


def complete(losses, **values):
    """Trials with these losses; every value is a list as long."""
    return [
        Trial(i, {key: column[i] for key, column in values.items()}, "complete", loss)
        for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("exponent", "near"),
    [(-2, True), (-1.6, True), (-1.59, False), (0, False), (1.59, False), (1.6, True), (2, True)],
)
def test_near_an_edge_is_within_a_tenth_of_the_log_range(exponent, near):
    assert is_near_edge(10.0**exponent, WIDE, 0.1) is near
    assert is_near_edge(10.0 ** (exponent / 2), (0.1, 10), 0.1) is near  # of that range's width


def test_with_no_share_only_the_edge_itself_counts():
    assert is_near_edge(1e-2, WIDE, 0.0) and is_near_edge(1e2, WIDE, 0.0)
    assert not is_near_edge(1.01e-2, WIDE, 0.0)


def test_only_the_range_whose_best_value_is_near_an_edge_moves():
    ranges = {"low": WIDE, "inside": WIDE, "high": WIDE}
    best = {"low": 0.02, "inside": 3.0, "high": 100.0}
    moved = next_ranges(best, ranges, 0.1, 100)
    assert moved == {"low": (0.0002, 2.0), "inside": WIDE, "high": (1.0, 10000.0)}


def test_constants_are_means_over_all_trials_within_a_thousandth_of_the_best_loss():
    trials = complete([2.0019, 2.0, 2.0021, 3.0], g=[8.0, 2.0, 100.0, 50.0], h=[1.0, 3.0, 9.0, 9.0])
    good = equally_good(trials, 0.001)
    assert [trial.number for trial in good] == [0, 1]
    assert arithmetic_means(good) == {"g": 5.0, "h": 2.0}
    assert geometric_means(good) == pytest.approx({"g": 4.0, "h": math.sqrt(3)})


def test_the_first_of_equally_low_losses_is_the_best():
    assert best_trial(complete([3.0, 2.0, 2.0], g=[1.0, 2.0, 3.0])).number == 1


def bowl(values):
    return 3 + 0.3 * math.log10(values["a"] / 5) ** 2 + 0.3 * math.log10(values["b"] / 0.1) ** 2


@pytest.mark.parametrize("parallel", [1, 20])
def test_the_sampler_finds_the_minimum_of_a_parabola_in_the_log(parallel):
    """With 20 at once, too; 80 random trials come no closer than about 0.2 in the median."""
    ranges, distances = {"a": WIDE, "b": WIDE}, []
    for seed in range(3):
        trials: list[Trial] = []
        while len(trials) < 80:
            asked = [*trials]
            while len(asked) < len(trials) + parallel:
                values = suggest(asked, ranges, (seed, len(asked)))
                asked.append(Trial(len(asked), values, "running"))
            trials = [Trial(t.number, t.values, "complete", bowl(t.values)) for t in asked]
        best = best_trial(trials).values
        distances.append(math.hypot(math.log10(best["a"] / 5), math.log10(best["b"] / 0.1)))
    assert np.median(distances) < 0.15 and max(distances) < 0.4


def test_a_suggestion_depends_on_the_seed_and_the_trials_alone():
    ranges = {"a": WIDE, "b": (1.0, 2.0)}
    steps = range(15)
    trials = complete(
        [3 - 0.1 * i for i in steps],
        a=[0.02 * 1.5**i for i in steps],
        b=[1 + i / 20 for i in steps],
    )
    first = suggest(trials, ranges, (0, "study", 15))
    assert suggest(list(trials), ranges, (0, "study", 15)) == first
    assert suggest(trials, ranges, (1, "study", 15)) != first
    assert suggest(trials[:14], ranges, (0, "study", 15)) != first
    running = [*trials, Trial(15, first, "running")]
    assert suggest(running, ranges, (0, "study", 15)) != first  # it keeps away from it
    assert 1e-2 <= first["a"] <= 1e2 and 1 <= first["b"] <= 2


def test_early_values_are_uniform_in_the_logarithm():
    drawn = [math.log10(suggest([], {"a": WIDE}, seed)["a"]) for seed in range(200)]
    counts, _ = np.histogram(drawn, bins=4, range=(-2, 2))
    assert counts.sum() == 200 and counts.min() > 30


FIRST = Trial(0, {"a": 1.0}, "running")


def test_what_one_storage_writes_another_one_reads(tmp_path):
    ranges, folder = {"a": WIDE}, tmp_path / "s"
    ours = Storage(folder)
    assert ours.trials("x") == [] and not folder.exists()
    first, second = Trial(0, {"a": 0.1 + 0.2}, "running"), Trial(1, {"a": 1.0}, "running")
    for trial in (first, second):
        ours.add("x", trial, ranges, f"x-{trial.number}")
    assert Storage(folder).trials("x") == [first, second]
    ended = ours.end("x", first, {"status": "finished"}, 2.5)
    failed = ours.end("x", second, {"status": "failed"}, None)
    assert ended == Trial(0, {"a": 0.1 + 0.2}, "complete", 2.5, {"status": "finished"})
    assert failed == Trial(1, {"a": 1.0}, "fail", None, {"status": "failed"})
    assert Storage(folder).trials("x") == [ended, failed] and ours.trials("y") == []


def test_trials_can_live_in_any_database_that_optuna_knows(tmp_path):
    url = f"sqlite:///{tmp_path}/trials.db"
    ours = Storage(tmp_path / "s", url)
    ours.add("x", FIRST, {"a": WIDE}, "x-0")
    trial = ours.end("x", FIRST, {"status": "d"}, 2.5)
    assert Storage(tmp_path / "s", url).trials("x") == [trial]
    assert not (tmp_path / "s/journal.jsonl").exists()
    with pytest.raises(UserError, match="--storage nonsense: cannot open it"):
        Storage(tmp_path, "nonsense").trials("x")


def test_the_journal_is_one_that_optuna_opens_itself(tmp_path):
    ours = Storage(tmp_path)
    ours.add("x", FIRST, {"a": WIDE}, "x-0")
    ours.end("x", FIRST, {"status": "finished"}, 2.5)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.jsonl"))
    study = optuna.load_study(study_name="x", storage=optuna.storages.JournalStorage(backend))
    assert (study.best_value, study.best_params) == (2.5, {"a": 1.0})
    assert study.best_trial.user_attrs == {"run": "x-0"}


def test_half_a_line_that_a_crash_left_is_dropped(tmp_path):
    ours = Storage(tmp_path)
    ours.add("x", FIRST, {"a": WIDE}, "x-0")
    with open(ours.path, "a") as file:
        file.write('{"op_code": 6, "tri')
    again = Storage(tmp_path)
    assert again.trials("x") == [FIRST]
    ended = again.end("x", FIRST, {"status": "finished"}, 2.5)
    assert Storage(tmp_path).trials("x") == [ended]


def test_a_damaged_journal_is_named(tmp_path):
    ours = Storage(tmp_path)
    ours.add("x", FIRST, {"a": WIDE}, "x-0")
    ours.path.write_text("nonsense\n" + ours.path.read_text())
    with pytest.raises(UserError, match=r"journal.jsonl: damaged .*; delete it"):
        Storage(tmp_path).trials("x")
