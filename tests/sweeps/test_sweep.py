"""Sweeps: what a file expands to, what results add to it, and what is never run twice."""

import csv
import os

import pytest

from sweeps import tables
from sweeps.progress import Pace, duration, on_a_core, status
from sweeps.sweep_file import grid_values, load_sweep
from tests.sweeps.toys import FakePool, calls, drive, make_toy, rows_of, work_of, write_file
from training.errors import RunError, UserError


@pytest.fixture
def toy(tmp_path, monkeypatch):
    return make_toy(tmp_path, monkeypatch)


def run(package, path, workers=1, seed=0, **options):
    """Runs a sweep through the driver; the rows of its table and its notes."""
    work = drive(work_of(package, path, **options), FakePool(workers, seed))
    return rows_of(work), work.report()


GRID = """
grid: {width: [2, 1]}
curves:
  a: {grid: {lr: {log2: [-6, -4]}}}
  b: {set: {diverge_above: 0.02}, grid: {lr: [0.5, 0.25]}}
"""


def test_a_row_has_the_runs_own_value_of_what_another_curve_sets(toy):
    """A figure takes an empty cell for no value, and two optimisers for one."""
    path = write_file(toy, GRID)
    rows, _ = run(toy, path)
    found = {(row["curve"], row["diverge_above"]) for row in rows}
    assert found == {("a", "1000000000.0"), ("b", "0.02")}


def test_a_grid_is_the_cross_of_its_axes_last_fastest():
    crossed = [{"a": a, "b": b} for a in (1, 2) for b in "xy"]
    assert grid_values({"a": [1, 2], "b": ["x", "y"]}) == crossed


def test_a_sweep_runs_every_point_once_and_writes_one_row_each(toy):
    path = write_file(toy, GRID)
    rows, notes = run(toy, path, workers=2)
    assert len(rows) == 10 and not notes
    assert sorted(calls(toy)) == sorted(row["run"] for row in rows)
    assert [row["status"] for row in rows if row["curve"] == "b"] == ["diverged"] * 4
    first = [(row["width"], row["lr"]) for row in rows[:3]]
    assert first == [("1", "0.015625"), ("1", "0.03125"), ("1", "0.0625")]
    run(toy, path)
    assert len(calls(toy)) == 10  # nothing ran twice


def test_the_cheapest_run_comes_first_and_then_the_largest(toy):
    """One result soon; then those that take longest. With a result there is nothing to wait for."""
    text = "grid: {width: [%s], lr: [1]}\ncurves: {a: {}}"
    rows, _ = run(toy, write_file(toy, text % "8, 1, 2"))
    rows, _ = run(toy, write_file(toy, text % "8, 1, 2, 16, 4"))
    widths = {row["run"]: row["width"] for row in rows}
    assert [widths[name] for name in calls(toy)] == ["1", "8", "2", "16", "4"]


EXTENDING = """
grid: {width: [1, 8], lr: {log2: [-3, -1]}}
curves: {a: {}}
seeds: [0, 1]
extend: {key: lr}
"""


def test_a_cell_grows_until_its_optimum_is_inside(toy):
    rows, notes = run(toy, write_file(toy, EXTENDING), workers=2)
    rates = {w: sorted({float(r["lr"]) for r in rows if r["width"] == w}) for w in "18"}
    assert rates["1"][0] == 2.0**-5  # optimum 2^-4, then one point below it
    assert rates["8"][0] == 2.0**-8  # optimum 2^-7
    assert all(
        sum(r["lr"] == str(rate) for r in rows if r["width"] == "8") == 2 for rate in rates["8"]
    )  # every seed
    assert not notes


def test_an_interrupted_extension_goes_on_and_ends_with_the_same_table(toy):
    path = write_file(toy, EXTENDING)
    whole, _ = run(toy, path)
    folder = toy.parent / "results" / toy.name / "s"
    for name in [row["run"] for row in whole][::2]:
        (folder / name / "summary.json").unlink()
    before = len(calls(toy))
    again, _ = run(toy, path, workers=2)
    assert again == whole
    assert len(calls(toy)) == before + len(whole[::2])


def test_fresh_seeds_judge_the_optimum_and_the_table_tells_them_apart(toy):
    path = write_file(toy, EXTENDING.replace("{key: lr}", "{key: lr, seeds: [5, 6, 7]}"))
    assert work_of(toy, path).may_add()[0] == 2 * (6 * 2 + 3)  # cells; points of two seeds, fresh
    rows, notes = run(toy, path, workers=2)
    fresh = {(r["width"], float(r["lr"]), r["seed"]) for r in rows if r["fresh"] == "True"}
    assert fresh == {
        (w, rate, seed) for w, rate in (("1", 2.0**-4), ("8", 2.0**-7)) for seed in "567"
    }
    assert {r["seed"] for r in rows if r["fresh"] == "False"} == {"0", "1"} and not notes
    before = len(calls(toy))
    assert run(toy, path)[0] == rows and len(calls(toy)) == before
    # A command that leaves them out says so; one for a curve alone keeps the marks of the others.
    _, notes = run(toy, path, where=["seed<5"])
    assert [note.partition(": left")[0] for note in notes] == [
        f"a width={width}: further seeds were not run" for width in (1, 8)
    ]


def lowest_at(losses):
    """A toy whose loss at (width, log2 lr) is looked up, for results no parabola gives."""
    return f"""
    table = {losses!r}
    loss = table.get((config.width, round(math.log2(config.lr))), 9.0)
"""


def test_a_second_call_finds_every_run_that_results_had_asked_for(toy):
    """A transferred point may start an extension of its own: it has to be found again."""
    losses = {(1, -power): 1.0 + abs(power - 4) for power in range(2, 10)}
    losses |= {(8, -8): 2.0, (8, -4): 1.5, (8, -3): 1.2, (8, -2): 1.4}
    source = (toy / "train.py").read_text()
    marker = "    diverged = max"
    (toy / "train.py").write_text(source.replace(marker, lowest_at(losses) + marker, 1))
    text = """
curves: {a: {grid: {width: [1, 8], lr: {log2: [-9, -7]}}}}
extend: {key: lr, points: 9}
transfer: {source: {width: 1}, target: {width: 8}}
"""
    path = write_file(toy, text)
    first, _ = run(toy, path)
    before = len(calls(toy))
    again, _ = run(toy, path)
    assert again == first and len(calls(toy)) == before
    assert {float(r["lr"]) for r in first if r["width"] == "8"} >= {2.0**-3, 2.0**-2}


def test_a_broken_result_is_reported_and_the_rest_goes_on(toy):
    path = write_file(toy, EXTENDING)
    rows, _ = run(toy, path)
    folder = toy.parent / "results" / toy.name / "s"
    extended = next(row["run"] for row in rows if float(row["lr"]) == 2.0**-5)
    (folder / extended / "summary.json").write_text("{")
    first = next(row["run"] for row in rows if row["lr"] == "0.125" and row["width"] == "1")
    (folder / first / "summary.json").unlink()
    before = len(calls(toy))
    again, report = run(toy, path, workers=2)
    assert len(calls(toy)) == before + 1
    assert [row["status"] for row in again if row["run"] == extended] == ["failed"]
    assert {row["status"] for row in again if row["run"] != extended} == {"finished"}
    assert len(report) == 1 and f"{extended}/summary.json: not a summary" in report[0]
    (folder / extended / "summary.json").unlink()
    assert run(toy, path) == (rows, [])


def test_a_grid_may_cross_what_the_sweep_sets_for_the_other_curves(toy):
    text = "set: {lr: 2}\ncurves: {a: {}, b: {grid: {lr: [3, 4], width: [1, 2]}}}\n"
    text += "adjust: [{where: {width: [2], lr: [3]}, set: {inner.gain: 5}}]"
    points = load_sweep(write_file(toy, text)).points
    found = [(p.config.lr, p.config.inner.gain) for p in points]
    assert found == [(2, None), (3, None), (3, 5), (4, None), (4, None)]


@pytest.mark.parametrize("name", ["nanolm", "''", ".nanolm_c4", "nanolm_c4/"])
def test_an_unknown_experiment_is_one_line(tmp_path, name):
    path = tmp_path / "s.yaml"
    path.write_text(f"experiment: {name}\nconfig: x.yaml\ncurves: {{a: {{}}}}\n")
    with pytest.raises(UserError, match="s.yaml: experiment '.*' has no train.py here"):
        load_sweep(path)


def test_the_time_left_begins_with_the_plan_and_follows_what_runs_have_taken():
    """The first run of a worker is not counted: it started a process and read the data."""
    pace = Pace()
    assert pace.seconds(1e11, 100) == on_a_core(1e11, 100) == 2 + 1
    pace.add(1e11, 100, 6.0)
    pace.add(1e11, 100, 12.0)
    assert pace.seconds(2e11, 200) == pytest.approx(18)
    assert pace.seconds(-1e-9, 0) == 0  # what a sum of floats leaves


TIMES = {0.031: "0.031 s", 20: "20 s", 150: "2 min", 3599: "1 h 0 min", 8000: "2 h 13 min"}
TIMES |= {86399: "1 d 0 h", 1e6: "11 d 14 h", 2e8: "2,315 d"}


def test_times_are_in_units_that_people_use():
    assert {seconds: duration(seconds) for seconds in TIMES} == TIMES


def test_metrics_have_a_row_per_step_and_a_launch_of_one_curve_keeps_the_others(toy):
    text = "curves: {a: {}, b: {set: {fail_below: 1}}}\nmetrics: true\nretries: 0\n"
    for curve in "ab":
        work = drive(work_of(toy, write_file(toy, text), curves=[curve]))
    ends = [(row["curve"], row["status"]) for row in rows_of(work)]
    assert ends == [("a", "finished"), ("b", "failed")]
    with open(work.folder / "metrics.csv", newline="") as file:
        first, second = csv.DictReader(file)
    measured = "step epoch train_loss lr_factor gradient_norm skipped_steps eval_loss eval_top1"
    keys = measured.split()
    assert list(first)[-8:] == keys
    assert [first[key] for key in keys] == ["1", "", "2.0", "0.5", "1.0", "", "", ""]
    loss = rows_of(work)[0]["final_eval_loss"]  # training and evaluation of a step share a row
    assert [second[key] for key in keys] == ["2", "1.0", "1.0", "1.0", "", "", loss, f"-{loss}"]
    assert {first["curve"], second["curve"]} == {"a"} and first["run"] == rows_of(work)[0]["run"]


PROBES = b'{"step": 1, "layers": {"a": {"alignment": 0.5}}}\n'
ZEROS = b"\0" * 40  # as a power cut may leave a file


@pytest.mark.parametrize(
    ("table", "files", "damaged"),
    [
        (tables.METRICS, {"metrics.jsonl": ZEROS}, "metrics.jsonl"),
        (tables.PROBES, {"probes.jsonl": ZEROS}, "probes.jsonl"),
        (tables.OBSERVATIONS, {"observations.jsonl": ZEROS}, "observations.jsonl"),
        (tables.PROBES, {"probes.jsonl": PROBES, "plan.json": b'{"rows": ['}, "plan.json"),
        (tables.PROBES, {"probes.jsonl": PROBES, "plan.json": b'{"forward": []}'}, "plan.json"),
        (tables.PROBES, {"probes.jsonl": PROBES}, "plan.json"),
    ],
)
def test_a_damaged_log_or_plan_is_named_with_what_to_do(tmp_path, table, files, damaged):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError) as caught:
        list(table.rows(tmp_path, {}))
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / damaged}: cannot read") and "\n" not in line
    assert line.endswith(f"delete {tmp_path} to run again")


@pytest.mark.parametrize(
    "content", ["null", "3", "[1, 2]", "{}", "[" * 100_000, "a,b\n1,2\n", None]
)
@pytest.mark.parametrize("name", ["results.csv", "manifest.json", "metrics.csv"])
def test_tables_of_another_kind_and_pipes_are_written_anew(toy, name, content):
    """Nothing waits for a pipe, or takes what is valid JSON and no list of runs for one."""
    path = write_file(toy, GRID)
    rows, _ = run(toy, path)
    file = toy.parent / "results" / toy.name / "s" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file) if content is None else file.write_text(content)
    assert status(work_of(toy, path)) and run(toy, path)[0] == rows
    assert name == "metrics.csv" or file.is_file()
