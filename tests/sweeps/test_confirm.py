"""The climb to a confirmed optimum, and metrics.csv, through the driver."""

import csv
import math
import shutil

import pytest

from sweeps.rules import SIX_NEIGHBOURS, around, candidate, mean_score, score
from tests.sweeps.toys import FakePool, drive, make_toy, work_of, write_file

# Accuracy: 1 at lr 2^-3, wd 2^-5, falling with the distance; a tilted valley, so that the walk has
# to turn. The loss breaks ties: accuracy is rounded to `round`.
TOY = """
import json, math
from pathlib import Path
from pydantic import model_validator
from training.config import Section
from training.settings import LoopConfig
from training.files import write_json, write_text

class Config(Section):
    seed: int = 0
    size: int = 1
    lr: float
    wd: float
    digits: int = 9
    diverge_above: float = 1e9
    fail_at: float = 0.0
    fail_seed: int = -1
    fail_while: str = ""
    least_wd: float = 0.0
    tell: bool = True
    training: LoopConfig

    @model_validator(mode="after")
    def _large_enough(self):
        if self.wd < self.least_wd:
            raise ValueError(f"wd {self.wd:g} is less than {self.least_wd:g}; raise it")
        return self

def flops(config):
    return 1.0

def run(config, run_dir, progress=None):
    missing = config.fail_while and Path(config.fail_while).exists()
    if config.lr == config.fail_at or config.seed == config.fail_seed or missing:
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "tra')
        raise RuntimeError("no such rate")
    x, y = math.log2(config.lr) + 3, math.log2(config.wd) + 5
    far = (x + y) ** 2 + 0.3 * (x - y) ** 2
    # Seeds beyond the search's own would lead elsewhere, if they counted.
    accuracy = 1 - 0.01 * far - (0.5 if config.seed and config.tell else 0)
    diverged = config.lr > config.diverge_above
    lines = [
        {"step": 1, "train_loss": 2.0, "lr_factor": 0.5, "gradient_norm": 1.0},
        {"step": 2, "epoch": 1.0, "train_loss": 1.0, "lr_factor": 1.0, "gradient_norm": None},
        {"step": 2, "epoch": 1.0, "eval_loss": far, "eval_top1": accuracy},
    ]
    write_text(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\\n" for line in lines))
    summary = {
        "status": "diverged" if diverged else "finished", "step": 2, "steps": 2,
        "final_eval_loss": None if diverged else far, "best_eval_loss": far,
        "best_eval_top1": round(accuracy, config.digits), "best_eval_top1_step": 2,
    }
    write_json(run_dir / "summary.json", summary)
    return summary
"""
SEARCH = """
grid: {size: [1], lr: [0.001], wd: [0.4]}
curves: {a: {}}
metrics: true
retries: 0
"""
CONFIRM = "confirm: {keys: [lr, wd], metric: best_eval_top1, seeds: [0, 1, 2]%s}\n"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with the toy experiment in package `toy_<unique>`, ready to import."""
    base = "lr: 1\nwd: 1\ntraining: {steps: 2, batch_size: 1}\n"
    return make_toy(tmp_path, monkeypatch, TOY, base)


def run(package, text, workers=1, **options):
    """(rows of the table, notes, folder) of a sweep run by the driver."""
    work = drive(work_of(package, write_file(package, text), **options), FakePool(workers))
    return table(work.table), work.report(), work.folder


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def places(rows, seed="0"):
    return {(float(row["lr"]), float(row["wd"])) for row in rows if row["seed"] == seed}


def accuracy(place):
    """The toy's accuracy, written anew."""
    x, y = math.log2(place[0]) + 3, math.log2(place[1]) + 5
    return 1 - 0.01 * ((x + y) ** 2 + 0.3 * (x - y) ** 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_walk_ends_at_a_point_whose_six_neighbours_are_all_worse(toy, workers):
    rows, notes, _ = run(toy, SEARCH + CONFIRM % "", workers)
    tried = places(rows)
    best = max(tried, key=accuracy)
    assert not notes
    assert set(around(best, SIX_NEIGHBOURS)) <= tried
    # The grid is {0.001 2^i} x {0.4 2^j}: the optimum of the whole grid, found by another road.
    grid = [(0.001 * 2.0**i, 0.4 * 2.0**j) for i in range(-4, 12) for j in range(-12, 4)]
    assert best == max(grid, key=accuracy)
    assert all(best[0] * 2 != place[0] or best[1] * 2 != place[1] for place in tried)


def test_only_the_confirmed_optimum_gets_its_seeds_and_they_do_not_move_it(toy):
    rows, _, _ = run(toy, SEARCH + CONFIRM % "")
    best = max(places(rows), key=accuracy)
    assert places(rows, "1") == places(rows, "2") == {best}


def test_a_plateau_is_decided_by_the_loss(toy):
    rows, notes, _ = run(toy, "set: {digits: 0}\n" + SEARCH + CONFIRM % "")
    assert not notes and len({row["best_eval_top1"] for row in rows if row["seed"] == "0"}) <= 2
    searched = [row for row in rows if row["seed"] == "0"]
    best = min(searched, key=lambda row: float(row["final_eval_loss"]))
    assert (float(best["lr"]), float(best["wd"])) == max(places(rows), key=accuracy)
    assert [row["seed"] for row in rows if row["lr"] == best["lr"] and row["wd"] == best["wd"]] == [
        "0",
        "1",
        "2",
    ]


def test_a_limit_ends_the_walk_with_a_note_and_without_seeds(toy):
    rows, notes, _ = run(toy, SEARCH + CONFIRM % ", points: 7")
    assert len(rows) <= 8 and places(rows, "1") == set()
    assert len(notes) == 1 and "7 points are not enough to confirm lr=" in notes[0]
    assert "raise confirm.points" in notes[0]


def test_a_failed_neighbour_leaves_the_optimum_unconfirmed(toy):
    best_lr = max(
        ((0.001 * 2.0**i, 0.4 * 2.0**j) for i in range(12) for j in range(-9, 2)), key=accuracy
    )[0]
    text = f"set: {{fail_at: {2 * best_lr!r}}}\n" + SEARCH + CONFIRM % ""
    rows, notes, _ = run(toy, text)
    assert any("is not confirmed: a neighbour failed" in note for note in notes)
    assert places(rows, "1") == set()


def test_a_search_that_starts_where_all_diverges_walks_down(toy):
    rows, notes, _ = run(
        toy, "set: {diverge_above: 0.3}\n" + SEARCH.replace("0.001", "1.024") + CONFIRM % ""
    )
    assert not notes
    finished = {p for p in places(rows) if p[0] <= 0.3}
    assert set(around(max(finished, key=accuracy), SIX_NEIGHBOURS)) <= places(rows)


def test_metrics_csv_has_one_row_per_step_with_training_and_evaluation_joined(toy):
    rows, _, folder = run(toy, SEARCH + CONFIRM % "")
    lines = table(folder / "metrics.csv")
    assert len(lines) == 2 * len(rows)
    first, second = lines[:2]
    assert list(first)[-8:] == [
        *("step", "epoch", "train_loss", "lr_factor", "gradient_norm", "skipped_steps"),
        *("eval_loss", "eval_top1"),
    ]
    assert (first["step"], first["epoch"], first["train_loss"], first["eval_top1"]) == (
        "1",
        "",
        "2.0",
        "",
    )
    assert (second["step"], second["epoch"], second["train_loss"]) == ("2", "1.0", "1.0")
    assert float(second["eval_top1"]) == pytest.approx(
        accuracy((float(second["lr"]), float(second["wd"]))) - 0.5 * (second["seed"] != "0")
    )
    assert {row["run"] for row in lines} == {row["run"] for row in rows}


def test_scores_order_runs_by_metric_then_loss_and_divergence_last():
    fine = {"status": "finished", "final_eval_loss": 0.5, "best_eval_top1": 0.9}
    worse = {**fine, "final_eval_loss": 0.6}
    gone = {"status": "diverged", "final_eval_loss": None, "best_eval_top1": 0.99}
    assert score(fine, "best_eval_top1") > score(worse, "best_eval_top1")
    assert score(worse, "best_eval_top1") > score(gone, "best_eval_top1")
    assert score(fine, "final_eval_loss") > score(worse, "final_eval_loss")
    assert score({"status": "failed"}, "best_eval_top1") is None
    assert mean_score([(0.5, -1.0), (0.7, -3.0)]) == pytest.approx((0.6, -2.0))
    odd = {**fine, "best_eval_x_loss": 2.0}  # a name alone does not make a loss
    assert score(odd, "best_eval_x_loss")[0] == 2


def test_of_equal_points_the_one_low_in_every_key_is_the_candidate():
    gone = -math.inf, -math.inf
    places = {(2.0, 2.0): gone, (1.0, 2.0): gone, (2.0, 1.0): gone, (1.0, 1.0): gone}
    assert candidate(places) == (1.0, 1.0)


def test_half_steps_come_back_to_the_very_same_numbers():
    place, known = (0.001,), {(0.001,)}
    for step in (0.5, 0.5, 0.5, -0.5, -0.5, -0.5):
        (place,) = around(place, [[step]], known)
        known.add(place)
    assert place == (0.001,) and len(known) == 4


# Several seeds, cells, launches


def test_a_place_with_a_failed_seed_does_not_count(toy):
    """Seed 1 fails at the optimum: what is left of that place must not be compared."""
    text = "set: {tell: false}\nseeds: [0, 1]\n" + SEARCH.replace("0.001", "0.125").replace(
        "0.4", "0.03125"
    )
    rows, notes, _ = run(
        toy,
        text.replace("tell: false", "tell: false, fail_at: 0.25")
        + "confirm: {keys: [lr, wd], metric: best_eval_top1, seeds: [2]}\n",
    )
    assert any("is not confirmed: a neighbour failed" in note for note in notes)
    assert places(rows, "2") == set()


def test_values_that_make_no_config_are_an_edge_of_the_search(toy):
    text = "set: {least_wd: 0.3}\n" + SEARCH + CONFIRM % ""
    rows, notes, _ = run(toy, text)
    assert min(wd for _, wd in places(rows)) >= 0.3
    assert len(notes) == 1 and "is not confirmed: " in notes[0]
    assert "wd 0.2 is less than 0.3; raise it" in notes[0] and places(rows, "1") == set()


def test_every_run_that_diverges_is_said_to(toy):
    _rows, notes, _ = run(toy, "set: {diverge_above: 0.0}\n" + SEARCH + CONFIRM % ", points: 9")
    assert notes == ["a size=1: every run diverged, also after 9 more points"]


def test_a_neighbour_that_failed_and_then_succeeds_confirms_the_optimum(toy):
    flag = toy.parent / "no disk"
    flag.touch()
    text = f"set: {{fail_while: '{flag}'}}\n" + SEARCH + CONFIRM % ""
    _, notes, _ = run(toy, text)
    assert notes
    flag.unlink()
    rows, notes, _ = run(toy, text)
    assert not notes and len(places(rows, "1")) == 1


def test_cells_are_searched_each_for_itself_whatever_the_number_of_workers(toy):
    text = SEARCH.replace("size: [1]", "size: [1, 2, 3]") + CONFIRM % ""
    first, _, folder = run(toy, text, workers=2)
    again, _, _ = run(toy, text.replace("retries: 0", "retries: 1\n"), workers=1)
    assert [row["run"] for row in first] == [row["run"] for row in again]
    shutil.rmtree(folder)
    alone, _, _ = run(toy, text, workers=1)
    assert [row["run"] for row in first] == [row["run"] for row in alone]
    assert len({row["size"] for row in first if row["seed"] == "2"}) == 3


def test_a_launch_of_one_curve_keeps_what_the_others_measured(toy):
    text = SEARCH.replace("{a: {}}", "{a: {}, b: {set: {fail_at: 0.001}}}")
    for curve in "ab":
        rows, _, folder = run(toy, text, curves=[curve])
    lines = table(folder / "metrics.csv")
    assert [(row["curve"], row["status"]) for row in rows] == [("a", "finished"), ("b", "failed")]
    assert float(rows[0]["best_eval_top1"]) == pytest.approx(accuracy((0.001, 0.4)))
    assert {line["curve"] for line in lines} == {"a"} and lines[1]["eval_top1"]


def test_the_cost_counts_what_a_search_may_still_add(toy):
    work = work_of(toy, write_file(toy, SEARCH + CONFIRM % ", points: 50"))
    assert work.may_add() == (52, 52.0)
    assert drive(work).may_add() == (0, 0.0)
