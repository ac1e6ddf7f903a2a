"""Rules are pure: the runs of a sweep do not depend on the order in which their results arrive.

The recorded results of every shipped sweep, fed through the rules, give its shipped points and its
shipped table, byte for byte.
"""

import csv
import gzip
import itertools
import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest

from sweeps import tables
from sweeps.request import read_file
from sweeps.rules import (
    DONE,
    FAILED,
    WAIT,
    Cell,
    Confirm,
    Coverage,
    Extend,
    Next,
    mean_losses,
    next_value,
    optimum,
)
from sweeps.study import is_near_edge, suggest
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "plots/data"


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ({1.0: 3, 2.0: 2, 4.0: 3}, None),
        ({1.0: 2, 2.0: 3, 4.0: 4}, 0.5),
        ({1.0: 4, 2.0: 3, 4.0: 2}, 8.0),
        ({1.0: math.inf, 2.0: math.inf}, 0.5),
        ({1.0: 3}, 0.5),
        ({1.0: 2, 2.0: 2, 4.0: 2}, 0.5),  # flat: towards the safe side
    ],
)
def test_the_next_value_follows_the_optimum_past_the_edge(losses, value):
    assert next_value(losses, 1.0) == value


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ({1: 3.0, 2: 2.0, 4: 2.1}, 8.0),  # inside, but no unstable value is known yet
        ({1: 3.0, 2: 2.0, 4: 2.1, 8: math.inf}, 2**2.5),  # known, but 2^1 apart
        ({1: 3.0, 2: 2.0, 4: 2.1, 8: 2.5}, 2**2.5),  # 25% above the lowest
        ({1: 3.0, 2: 2.0, 4: 2.1, 2**2.5: 2.2, 8: math.inf}, None),
        ({1: 3.0, 2: 2.0, 2**1.5: 2.5, 4: 2.1}, None),  # cut at the first unstable value
        ({1: 2.0, 2: 3.0}, 0.5),  # the optimum comes first
    ],
)
def test_coverage_goes_on_to_the_first_unstable_value(losses, value):
    assert next_value(losses, 1.0, Coverage(excess=0.2, gap=0.5)) == value


def test_coverage_is_as_wide_as_it_is_told():
    losses = {1: 3.0, 2: 2.0, 2**1.5: 2.3, 4: 2.5}
    assert next_value(losses, 1.0, Coverage(excess=0.1)) is None
    assert next_value(losses, 1.0, Coverage(excess=0.2)) is None
    assert next_value(losses, 1.0, Coverage(excess=0.3)) == 8.0
    assert next_value(losses, 1.0, Coverage(excess=0.2, gap=0.4)) == 2**1.75
    assert Extend(key="lr", coverage=Coverage(excess=0.3)).next(cell(losses)) == Next(((8.0,),))


def cell(losses, given=None, **more):
    """A cell by its losses; None where a run is not done."""
    results = {
        (value,): {0: None if loss is None else {"status": "finished", "final_eval_loss": loss}}
        for value, loss in losses.items()
    }
    places = results if given is None else [(value,) for value in given]
    return Cell("a", results, set(places), **more)


def test_a_rule_answers_with_places_wait_or_done():
    rule = Extend(key="lr", points=2)
    assert rule.next(cell({1.0: 3.0, 2.0: None})) == WAIT
    assert rule.next(cell({1.0: 3.0, 2.0: 2.0})) == Next(((4.0,),))
    assert rule.next(cell({1.0: 3.0, 2.0: 2.0, 4.0: 5.0})) == DONE
    failed = cell({1.0: 3.0})
    failed.results[1.0,][0] = FAILED
    assert rule.next(failed) == DONE and optimum(failed) is None
    known = cell({0.5: 1.0, 1.0: 2.0})
    known.results[0.25,] = {0: FAILED}
    assert rule.next(known).note == "a: lr 0.25 failed; it is needed"
    limit = rule.next(cell({1.0: 4.0, 2.0: 3.0, 4.0: 2.0, 8.0: 1.0}, given=[1.0, 2.0]))
    assert limit.done and limit.note == "a: 2 values of lr added, and more are needed"


def test_a_place_counts_by_the_mean_of_its_seeds():
    several = cell({1.0: 3.0, 2.0: 2.0})
    several.results[2.0,][1] = {"status": "finished", "final_eval_loss": 5.0}
    several.results[1.0,][1] = FAILED  # has no say
    assert mean_losses(several) == {1.0: 3.0, 2.0: 3.5} and optimum(several) == (1.0,)
    several.results[1.0,][2] = {"status": "diverged", "final_eval_loss": None}
    assert mean_losses(several) == {1.0: math.inf, 2.0: 3.5}


def test_a_value_that_makes_no_config_ends_an_extension_with_its_reason():
    answer = Extend(key="lr").next(cell({1.0: 1.0, 2.0: 2.0}, refused={(0.5,): "lr is too small"}))
    assert answer.done
    assert answer.note == "a: lr 0.5 was not run: lr is too small; it is needed"


def test_a_cell_waits_for_its_source_and_then_runs_its_optimum():
    rule, source = Extend(key="lr"), cell({1.0: 3.0, 2.0: 2.0, 4.0: 3.0})
    target = cell({8.0: 1.0, 16.0: 2.0}, source=source)
    assert rule.next(target) == WAIT
    source.settled = True
    assert rule.next(target) == Next(((2.0,),))
    target.results[2.0,] = {0: {"status": "finished", "final_eval_loss": 5.0}}
    assert target.added == 0  # it has been given this place
    assert rule.next(target) == Next(((4.0,),))  # between it and the best one
    target.results[4.0,] = {0: {"status": "finished", "final_eval_loss": 5.0}}
    assert (target.added, rule.next(target)) == (1, DONE)
    assert optimum(cell({1.0: 2.0, 4.0: 2.0, 2.0: 3.0})) == (1.0,)


@pytest.mark.parametrize(
    ("given", "transferred", "added", "value"),
    [
        ({1: 3.0, 2: 2.5, 4: 2.2}, (16, 2.4), {}, 8),  # 4 is not inside before 8 was run
        ({1: 3.0, 2: 2.5, 4: 2.2}, (16, 2.4), {8: 2.3}, None),
        ({1: 3.0, 2: 2.5, 4: 2.2}, (16, 2.4), {8: 2.1}, None),
        ({1: 3.0, 2: 2.5, 4: 2.2}, (16, 2.0), {32: 2.1}, 8),  # the transferred one is best
        ({16: 2.2, 32: 2.5, 64: 3.0}, (2, 2.4), {}, 8),  # from below
        ({1: 3.0, 2: 2.1, 4: 2.2}, (16, 2.4), {}, None),  # the optimum is elsewhere
        ({1: 3.0, 4: 2.2, 16: 2.4}, (16, 2.4), {}, None),  # the file's own grid is as wide
    ],
)
def test_a_transferred_optimum_encloses_another_only_beside_it(given, transferred, added, value):
    place, loss = transferred
    source = cell({place / 2: 3.0, place: 2.0, place * 2: 3.0}, settled=True)
    target = cell({**given, place: loss, **added}, given=given, source=source)
    assert Extend(key="lr").next(target) == (DONE if value is None else Next(((value,),)))


def test_a_neighbour_that_was_run_is_known_whatever_its_last_digit():
    """0.1 times the root of two, over it, is 0.10000000000000002."""
    rule = Confirm(keys=["lr"], neighbours=[[0.5], [-0.5]], metric="final_eval_loss")
    low, best, high = 0.1, 0.1 * 2**0.5, 0.2
    known = cell({low: 3.0, best: 2.0, high: 3.0})
    assert rule.next(known) == Next(((best,),), seeds=(), done=True)


def test_a_search_without_points_left_ends_with_its_reason():
    rule = Confirm(keys=["lr"], neighbours=[[1], [-1]], metric="final_eval_loss", points=1)
    answer = rule.next(cell({1.0: 1.0}))
    assert (answer.done, answer.places) == (True, ())
    assert answer.note == "a: 1 points are not enough to confirm lr=1; raise confirm.points"


def test_further_seeds_of_an_optimum_have_no_say_in_where_it_is():
    rule = Confirm(keys=["lr"], neighbours=[[1], [-1]], metric="best_eval_loss", seeds=[0, 1])
    run = {"status": "finished", "final_eval_loss": 1.0}
    scores = {0.5: 2.0, 1.0: 1.0, 2.0: 2.0}
    found = Cell("a", {(v,): {0: {**run, "best_eval_loss": s}} for v, s in scores.items()})
    found.given = set(found.results)
    assert rule.next(found) == Next(((1.0,),), seeds=(0, 1), done=True)
    found.further[1.0,] = (1,)
    found.results[1.0,][1] = {**run, "best_eval_loss": 99.0}
    assert rule.next(found).places == ((1.0,),)


def test_fresh_seeds_run_the_optimum_alone_and_have_no_say_in_where_it_is():
    rule = Extend(key="lr", points=2, seeds=[7, 8])
    found = cell({1.0: 3.0, 2.0: 2.0, 4.0: 3.0})
    assert rule.next(found) == Next(((2.0,),), seeds=(7, 8), done=True)
    found.further[2.0,] = (7, 8)
    found.results[2.0,] |= {7: {"status": "finished", "final_eval_loss": 99.0}, 8: None}
    assert optimum(found) == (2.0,) and mean_losses(found)[2.0] == 2.0
    found.settled = True  # its target waits for none of them
    target = cell({4.0: 3.0, 8.0: 2.0, 16.0: 3.0, 2.0: 5.0}, source=found)
    assert rule.next(target) == Next(((8.0,), (2.0,)), seeds=(7, 8), done=True)
    cut = rule.next(cell({1.0: 4.0, 2.0: 3.0, 4.0: 2.0, 8.0: 1.0}, given=[1.0, 2.0]))
    assert (cut.places, cut.seeds) == (((8.0,),), (7, 8)) and "more are needed" in cut.note
    failed = cell({1.0: 3.0})
    failed.results[1.0,][0] = FAILED
    assert rule.next(failed).places == ()
    lost = cell(dict.fromkeys((1.0, 2.0, 0.5, 0.25), math.inf), given=[1.0, 2.0])
    assert rule.next(lost).done and rule.next(lost).places == ()


# Whatever the order


def play(sweep, result, seed, room):
    """Runs a sweep with at most `room` runs at a time, which end in a random order."""
    work, random_, at_work = SweepWork(sweep), random.Random(seed), []
    while True:
        while len(at_work) < room and (point := work.next()):
            at_work.append(point)
        if not at_work:
            return work
        point = at_work.pop(random_.randrange(len(at_work)))
        if random_.random() < 0.1:  # a place that died, or a run that was stopped
            work.put_back(point)
            continue
        summary = result(point)
        if summary["status"] == "failed":
            work.fail(point, "broken")
        else:
            work.record(point, summary)


GRID = f"""
experiment: nanolm_c4
config: {ROOT}/nanolm_c4/configs/laptop.yaml
grid: {{model.width: [16, 32, 64], optimizer.lr: {{log2: [-9, -7]}}}}
curves: {{a: {{}}}}
"""
SWEEPS = {
    "extension": "extend: {key: optimizer.lr, points: 5}\nseeds: [0, 1]\n",
    "coverage": "extend: {key: optimizer.lr, points: 9, coverage: {}}\n",
    "transfer": "extend: {key: optimizer.lr}\n"
    "transfer: {source: {model.width: 16}, target: {model.width: 64}}\n",
    "fresh": "extend: {key: optimizer.lr, points: 5, seeds: [7, 8]}\nseeds: [0, 1]\n"
    "transfer: {source: {model.width: 16}, target: {model.width: 64}}\n",
    "climb": "confirm: {keys: [optimizer.lr], neighbours: [[1], [-1], [2]], seeds: [0, 1, 2]}\n",
}


@pytest.mark.parametrize("kind", SWEEPS)
@pytest.mark.parametrize("optimum", [-3, -5, -10, -12])
def test_the_points_of_a_sweep_do_not_depend_on_the_order_of_results(tmp_path, kind, optimum):
    path = tmp_path / "s.yaml"
    path.write_text(GRID + SWEEPS[kind])

    def result(point):
        """Losses and failures are drawn by the run alone, around a parabola."""
        dice = random.Random(f"{optimum} {point.values} {point.seed}")
        distance = math.log2(point.place[0]) - optimum
        if dice.random() < 0.06:
            return {"status": "failed"}
        if distance > 2:
            return {"status": "diverged", "final_eval_loss": None, "best_eval_loss": 1.0}
        loss = 3 + 0.1 * distance**2 + 0.2 * dice.random()
        return {"status": "finished", "final_eval_loss": loss, "best_eval_loss": loss}

    sweep = load_sweep(path)
    ends = []
    for seed, room in itertools.product(range(3), (1, 4, 100)):
        work = play(sweep, result, seed, room)
        ends.append((set(work.points), sorted(work.notes.items()), work.next()))
    assert all(end == ends[0] for end in ends)
    assert len(ends[0][0]) > len(sweep.points)  # the rule did ask for more


def test_what_is_known_at_the_start_asks_for_the_same_runs(tmp_path):
    """A sweep that is stopped anywhere and begun again comes to the same points."""
    path = tmp_path / "s.yaml"
    path.write_text(GRID + "extend: {key: optimizer.lr}\n")

    def result(point):
        distance = math.log2(point.place[0]) + 5
        return {"status": "finished", "final_eval_loss": 3 + distance**2}

    whole = play(load_sweep(path), result, 0, 2)
    for seed in range(5):
        kept = random.Random(seed).sample(sorted(whole.results), 5)
        work = SweepWork(load_sweep(path), {run: whole.results[run] for run in kept}.get)
        while point := work.next():
            work.record(point, result(point))
        assert work.points.keys() == whole.points.keys()


# The shipped sweeps, replayed

FOLDERS = {
    "everett": ["nanolm_c4"],
    "bordelon": ["vit_cifar5m", "nanolm_c4"],
    "dinan": ["vit_imagenet", "bart_span_denoise"],
}


def shipped():
    """(table, sweep file, preset) of every shipped table of results."""
    for table in sorted(DATA.glob("*/*.csv")):
        files = [
            ROOT / folder / "sweeps" / f"{table.stem}.yaml"
            for folder in FOLDERS.get(table.parent.name, ())
        ]
        for file in filter(Path.exists, files):
            if "status" in table.open().readline().split(","):
                has_laptop = "laptop" in read_file(file).get("presets", {})
                yield table, file, "laptop" if has_laptop else None


SHIPPED = list(shipped())
NAMES = [f"{table.parent.name}/{table.stem}" for table, *_ in SHIPPED]


def text_beside(notes):
    """A shipped table, by the file that says where it comes from."""
    (table,) = notes.parent.glob(f"{notes.stem}.csv*")
    with (gzip.open if table.suffix == ".gz" else open)(table, "rt", newline="") as file:
        return file.read()


ORIGINS = {notes: json.loads(notes.read_text()).get("sweep") for notes in DATA.glob("*/*.json")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A results folder in which sweeps find what they take from each other."""
    folder = tmp_path_factory.mktemp("results")
    for notes, sweep in ORIGINS.items():
        if sweep and "status" in (text := text_beside(notes)).partition("\n")[0].split(","):
            (folder / sweep).mkdir(parents=True)
            (folder / sweep / "results.csv").write_text(text, newline="")
    for name in ("constants", "constants_desktop", "constants_embedding_1_desktop"):
        (own := folder / "nanolm_c4" / (name if "_" in name else f"{name}_laptop")).mkdir()
        shutil.copy(DATA / f"everett/{name}.yaml", own / "constants.yaml")
    return folder


def typed(text):
    """The value behind a cell of a table."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def test_every_sweep_with_results_is_replayed():
    assert len(SHIPPED) >= 16 and {table.parent.name for table, *_ in SHIPPED} == set(FOLDERS)


@pytest.mark.parametrize(("table", "file", "preset"), SHIPPED, ids=NAMES)
def test_recorded_results_give_the_shipped_points_and_table(results, tmp_path, table, file, preset):
    sweep = load_sweep(file, results, preset)
    axes = {point.curve: [key for key, _ in point.values] for point in sweep.points}
    rows = {}
    with open(table, newline="") as lines:
        for row in csv.DictReader(lines):
            values = tuple((key, typed(row[key])) for key in axes[row["curve"]])
            rows[row["curve"], values, int(row["seed"])] = row

    def row_of(point):
        return rows[point.curve, point.values, point.seed]

    def result(point):
        row = {key: typed(cell) for key, cell in row_of(point).items() if cell}
        return {"final_eval_loss": None, **row, "environment": {"commit": row_of(point)["commit"]}}

    for seed in range(2):
        work = play(sweep, result, seed, 5)
        points = list(work.points.values())
        assert {(p.curve, p.values, p.seed) for p in points} == rows.keys()
        assert all("more are needed" in note for note in work.notes.values())
    sweep.folder = tmp_path
    tables.write(sweep, points, work.results, final=False)
    text = table.read_text()
    for point in points:  # some tables were made before runs had their present names
        text = text.replace(row_of(point)["run"], point.run)
    written = (tmp_path / "results.csv").read_text()
    assert written == text


@pytest.mark.thorough
def test_numbers_of_former_settings_are_called_so(results):
    """The names of runs come from their settings: a table of the present ones has all of these."""
    for file in sorted(ROOT.glob("*/sweeps/*.yaml")):
        head, _, _ = file.read_text().partition("experiment:")
        if shown := re.search(r"^# (?:preset (\w+), )?[\d,]+ runs, ", head, re.MULTILINE):
            sweep = f"{file.parts[-3]}/{file.stem}" + (f"_{shown[1]}" if shown[1] else "")
            text = "".join(text_beside(notes) for notes, of in ORIGINS.items() if of == sweep)
            runs = {point.run for point in load_sweep(file, results, shown[1]).points}
            present = runs <= set(re.split(r"[,\n]", text))
            assert present == ("from former settings" not in head), file


def test_shipped_constants_say_which_are_near_an_edge_of_their_ranges():
    for table in DATA.glob("everett/constants*.yaml"):
        for entry in (file := read_file(table))["constants"]:
            ends, best = entry["ranges"].items(), entry["best"]["set"]
            assert all(low <= best[key] <= high for key, (low, high) in ends)
            near = [key for key, of in ends if is_near_edge(best[key], of, file["search"]["edge"])]
            assert near == entry["near_edge"], (table, entry["where"])


def test_the_sampler_gives_the_recorded_trials():
    """The second trial of preset laptop's search with standard and SGD; it depends on no loss."""
    ranges = dict.fromkeys(("embedding", "hidden", "readout"), (1e-2, 1e2))
    given = suggest([], ranges, (0, "effective-standard-sgd", 1, 1))
    recorded = [22.807887451003424, 0.22439802444770182, 0.035832244153487756]
    assert list(given.values()) == pytest.approx(recorded, rel=1e-9)
