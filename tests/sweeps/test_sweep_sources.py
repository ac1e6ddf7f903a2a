"""What a sweep takes from elsewhere: presets, other sweeps' optima, constants, horizons, runs."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from sweeps import __main__ as command
from sweeps.request import Around, Sources
from sweeps.sweep_file import load_sweep, shifted
from sweeps.tables import write as write_tables
from tests.run_folders import end_run
from tests.sweeps.toys import calls, drive, make_toy, rows_of, work_of, write_file
from training import files
from training.errors import UserError


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A package with the toy experiment, at a commit."""
    monkeypatch.setattr("training.environment.commit", lambda: "c0ffee")
    return make_toy(tmp_path, monkeypatch)


def write(package, name, text):
    return write_file(package, text, name)


def load(package, path, **options):
    return load_sweep(path, package.parent / "results", **options)


def run(package, path, **options):
    """Runs a sweep; the rows of its table."""
    return rows_of(drive(work_of(package, path, **options)))


PRESETS = """
set: {inner.kind: big}
grid: {width: [64, 32], lr: {log2: [-8, -6]}}
curves:
  a: {set: {inner.gain: 1.0}}
  b: {set: {inner.gain: 2.0}}
extend: {key: lr}
presets:
  small: {grid: {width: [2, 1]}, curves: {b: {set: {inner.gain: 4.0}}}, extend: null}
"""


def test_a_preset_changes_what_it_names_and_keeps_the_rest(toy):
    path = write(toy, "s.yaml", PRESETS)
    full, small = load(toy, path), load(toy, path, preset="small")
    assert {p.config.width for p in full.points} == {64, 32}
    sizes = {(p.config.width, p.config.inner.gain) for p in small.points}
    assert sizes == {(width, gain) for width in (1, 2) for gain in (1.0, 4.0)}
    assert {p.config.inner.kind for p in small.points} == {"big"}
    assert len(small.points) == 12 and small.config.extend is None
    assert (full.folder.name, small.folder.name) == ("s", "s_small")


SOURCE = """
set: {inner.kind: plain}
grid: {width: [1, 4], lr: {log2: [-7, -3]}}
curves: {tuned: {}}
"""
USER = """
set: {inner.kind: plain}
grid: {width: [1, 4]}
curves:
  own: {grid: {lr: {around: {sweep: source.yaml, match: [inner.kind, width]}, steps: [-1, 0]}}}
  fixed:
    grid:
      lr: {around: {sweep: source.yaml, match: [inner.kind], at: {width: 1}}, steps: [0]}
"""


def test_a_grid_can_start_around_what_another_sweep_found(toy):
    run(toy, write(toy, "source.yaml", SOURCE))
    points = load(toy, write(toy, "s.yaml", USER)).points
    found = {(p.curve, p.config.width, p.config.lr) for p in points}
    own = {("own", width, 2.0**power) for width, power in ((1, -5), (1, -4), (4, -7), (4, -6))}
    assert found == own | {("fixed", width, 2.0**-4) for width in (1, 4)}


CHOSEN = """curve,lr,horizon,status,final_eval_loss,fresh,seed
a,0.5,fixed,finished,3.0,False,0\na,0.5,fixed,finished,3.4,False,1
a,0.25,fixed,finished,3.1,False,0\na,0.25,fixed,finished,3.2,False,1
a,0.25,fixed,finished,3.5,False,2
a,0.25,fixed,finished,9.0,True,3\na,0.25,fixed,diverged,,True,4
a,1.0,fixed,finished,2.0,False,0\na,1.0,fixed,diverged,,False,1
a,2.0,fixed,failed,,False,0\na,4.0,long,finished,1.0,False,0
"""  # means 3.2 and 3.15; a further seed of the optimum alone has no say; fresh ones judge
SEVERAL = """curve,width,lr,data.seed,final_eval_loss,status,kind
full,16,0.1,0,3.0,finished,k\nfull,16,0.2,0,2.0,finished,k\nfull,16,0.2,1,2.1,finished,k
full,32,0.2,0,2.0,finished,k\nfull,32,0.4,0,1.5,finished,k
none,16,0.1,0,1.2,finished,k\nnone,16.0,0.2,0,3.5,finished,k
"""
SMALL = "curve,lr,kind,status,final_eval_loss\na,0.5,k,finished,3\n"
APART = "differ in width (16, 32); name width in match, where or at"


@pytest.mark.parametrize(
    ("table", "around", "of", "best"),
    [
        (CHOSEN, {"match": ["horizon"]}, {"horizon": "fixed"}, 0.25),
        (CHOSEN, {"match": ["horizon"]}, {"horizon": "long"}, 4.0),
        (CHOSEN, {"match": ["horizon"]}, {"horizon": "short"}, "no run with horizon short that e"),
        (SEVERAL, {"match": ["width"], "where": {"curve": "full"}}, {}, 0.2),
        (SEVERAL, {"match": ["width"], "where": {"curve": "none"}}, {}, 0.1),
        (SEVERAL, {"match": ["width"]}, {}, "differ in curve (full, none); name curve in match, "),
        (SEVERAL, {"match": ["kind"], "where": {"curve": "full"}}, {}, APART),
        (SMALL, {"match": ["kind"], "preset": "small"}, {}, 0.5),  # not the sweep's own
        (SMALL, {"match": ["kind"]}, {}, "s_large/results.csv has no runs yet; first run "),
    ],
)
def test_the_rate_taken_is_the_best_of_the_runs_that_fit_by_the_seeds_that_choose(
    tmp_path, table, around, of, best
):
    """The lowest mean; rates of several curves or cells are not mixed."""
    presets = "presets: {small: {}, large: {}}\n" if table is SMALL else ""
    grids = "grid: {lr: [0.1], data.seed: [0, 1]}\ncurves: {full: {grid: {width: [16, 32]}}}\n"
    (tmp_path / "s.yaml").write_text("experiment: e\n" + (grids if table is SEVERAL else presets))
    folder = tmp_path / "results/e" / ("s_small" if table is SMALL else "s")
    folder.mkdir(parents=True)
    (folder / "results.csv").write_text(table)
    sources = Sources(tmp_path / "t.yaml", tmp_path / "results", "large" if presets else None)
    values = {"width": 16, "kind": "k", **of}
    if isinstance(best, float):
        assert sources.best(Around(sweep="s.yaml", **around), values, "lr") == best
    else:
        with pytest.raises(UserError, match=re.escape(best)):
            sources.best(Around(sweep="s.yaml", **around), values, "lr")


def test_a_sweep_that_is_not_complete_gives_no_optimum(toy):
    source = drive(work_of(toy, write(toy, "source.yaml", SOURCE)))
    manifest = source.folder / "manifest.json"
    entries = json.loads(manifest.read_text())
    wide = {"run": "tuned-new", "curve": "tuned", "values": {"width": 4, "lr": 1.0}, "seed": 0}
    files.write_table(manifest, json.dumps([*entries, wide]))  # a result has asked for it
    path = write(toy, "s.yaml", USER)
    with pytest.raises(UserError, match="not complete, 1 of the runs .* to come .tuned-new.; fini"):
        load(toy, path)
    assert load(toy, path, curves=["fixed"]).points  # starts around width 1 alone
    for harmless in ({"curve": "another"}, {"fresh": True}):  # a fresh seed moves no optimum
        files.write_table(manifest, json.dumps([*entries, wide | harmless]))
        assert load(toy, path).points


@pytest.mark.parametrize("where", ["lr<0.03", "seed==0"])
def test_runs_that_a_condition_leaves_out_are_to_come(toy, where):
    source = write(toy, "source.yaml", SOURCE + "seeds: [0, 1]\n")
    path = write(toy, "s.yaml", USER)
    part = drive(work_of(toy, source, where=[where]))
    assert len(part.results) == len(part.points) == len(rows_of(part)) < 20
    with pytest.raises(UserError, match="not complete, .* of the runs .* to come"):
        load(toy, path)
    whole = drive(work_of(toy, source))
    points = load(toy, path).points
    assert points and len(rows_of(whole)) == 20
    again = drive(work_of(toy, source, where=[where]))  # which forgets none of the others
    assert len(rows_of(again)) == 20 and len(again.points) == len(part.points)
    entries = json.loads((again.folder / "manifest.json").read_text())
    assert len(entries) == len({entry["run"] for entry in entries}) == 20
    assert load(toy, path).points == points


def test_a_draft_counts_runs_before_anything_ran_and_says_what_it_assumes(toy):
    write(toy, "source.yaml", SOURCE)
    draft = load(toy, write(toy, "s.yaml", USER), draft=True)
    assert len(draft.points) == 2 * 2 + 2 * 1
    assert {p.config.lr for p in draft.points if p.curve == "own"} == {0.25, 0.5}  # base: 0.5
    assumed = draft.sources.assumed
    assert len(assumed) == 2 and "counted around lr 0.5" in assumed[0]
    with pytest.raises(UserError, match="unknown key 'lrr'; did you mean 'lr'"):
        load(toy, write(toy, "s.yaml", USER.replace("lr: {around", "lrr: {around")), draft=True)


CONSTANTS = """
grid: {inner.kind: [plain, fancy], lr: [0.5]}
curves:
  tuned: {constants: true}
  borrowed: {constants: true, constants_of: {inner.kind: fancy}}
  default: {}
constants: search.yaml
"""


def write_constants(package, entries):
    write(package, "search.yaml", "")
    folder = package.parent / "results" / package.name / "search"
    folder.mkdir(parents=True)
    files.write_table(folder / "constants.yaml", yaml.safe_dump({"constants": entries}))
    return folder / "constants.yaml"


def test_curves_take_the_constants_that_fit_their_runs(toy):
    gains = {"plain": 3.0, "fancy": 5.0}
    entry = lambda kind: {"where": {"inner.kind": kind}, "set": {"inner.gain": gains[kind]}}
    constants = write_constants(toy, [*map(entry, gains)])
    points = load(toy, write(toy, "s.yaml", CONSTANTS)).points
    found = {(p.curve, p.config.inner.kind): p.config.inner.gain for p in points}
    curves = {"tuned": (3.0, 5.0), "borrowed": (5.0, 5.0), "default": (None, None)}
    assert found == {(c, kind): curves[c][i] for c in curves for i, kind in enumerate(gains)}
    constants.write_text(constants.read_text().replace("5.0", "6.0"))
    with pytest.raises(UserError, match="constants.yaml: not as it was written; give the command"):
        load(toy, toy / "s.yaml")


def test_a_draft_assumes_constants_that_are_not_there(toy):
    write(toy, "search.yaml", "")
    draft = load(toy, write(toy, "s.yaml", CONSTANTS), draft=True)
    assert len(draft.sources.assumed) == 2


HORIZON = """
grid: {width: [4, 16], lr: [0.5]}
curves:
  fixed: {}
  long: {horizon: {tokens_per_parameter: 20, warmup_fraction: 0.1}}
"""


def test_a_horizon_sets_steps_and_warmup_from_the_model(toy):
    sweep = load(toy, write(toy, "s.yaml", HORIZON))
    found = {
        (p.curve, p.config.width): (p.config.training.steps, p.config.schedule.warmup_steps)
        for p in sweep.points
    }
    # 20 tokens x 10 width^2 parameters / (8 tokens x 2 samples)
    fixed = {("fixed", width): (9, 0) for width in (4, 16)}
    assert found == fixed | {("long", 4): (200, 20), ("long", 16): (3200, 320)}
    rows = run(toy, write(toy, "s.yaml", HORIZON + "set: {training.steps: 7}\n"))
    assert {row["horizon"] for row in rows} == {"fixed", "20 tokens per parameter"}
    assert {row["training.steps"] for row in rows} == {"7", "200", "3200"}  # what the runs had


def test_adjusted_settings_apply_where_the_grid_says(toy):
    text = HORIZON + "adjust:\n- {where: {width: [16]}, set: {training.micro_batch_size: 1}}\n"
    points = load(toy, write(toy, "s.yaml", text)).points
    assert {(p.config.width, p.config.training.micro_batch_size) for p in points} == {
        (4, None),
        (16, 1),
    }
    key = "inner.gain"  # a column of the table, since a curve sets it
    text = text.replace("training.micro_batch_size: 1", f"{key}: 4.0")
    rows = run(toy, write(toy, "adjusted.yaml", f"set: {{{key}: 2.0}}\n" + text))
    assert {(row["width"], row[key]) for row in rows} == {("4", "2.0"), ("16", "4.0")}
    wrong = text.replace("width: [16]", "width: [5]")
    with pytest.raises(UserError, match=r"adjust.where: width 5 is in no curve's grid: \[4, 16\]"):
        load(toy, write(toy, "s.yaml", wrong))


def test_shifts_stay_on_the_grid_however_they_are_reached():
    assert shifted(shifted(2.0**-7, 0.5), 0.5) == 2.0**-6
    assert shifted(2.0**0.25, 0.25) == 2**0.5
    assert shifted(0.01, 1) == 0.02


def test_runs_that_are_done_and_of_another_commit_are_told_and_kept(toy, monkeypatch, capsys):
    words = ["run", str(write(toy, "s.yaml", SOURCE)), "--results", str(toy.parent / "results")]
    made = drive(work_of(toy, Path(words[1])))
    two = list(made.folder.glob("*/summary.json"))[:2]
    for commit, path in zip(("b" * 40 + "+changes", None), two, strict=True):
        changed = {**json.loads(path.read_text()), "environment": {"commit": commit}}
        end_run(path.parent, changed)
    before = len(calls(toy))
    for ours, said in (
        ("c0ffee", "c0ffee: 1 (at bbbbbbb+changes);"),
        ("d" * 40, "ddddddd: 9 (at "),
        (None, None),
    ):
        monkeypatch.setattr("training.environment.commit", lambda ours=ours: ours)
        command.main(words)
        told = "runs that are done and were made at another commit than"
        error = capsys.readouterr().err
        assert f"{told} {said}" in error if said else told not in error
    assert len(calls(toy)) == before


def test_chosen_curves_run_alone_and_the_table_keeps_the_others(toy):
    path = write(toy, "s.yaml", HORIZON)
    assert {row["curve"] for row in run(toy, path, curves=("long",))} == {"long"}
    assert {row["curve"] for row in run(toy, path, curves=("fixed",))} == {"fixed", "long"}
    assert [row["curve"] for row in run(toy, path)] == ["fixed"] * 2 + ["long"] * 2
    manifest = toy.parent / "results" / toy.name / "s" / "manifest.json"
    run(toy, path, curves=("long",))
    assert {entry["curve"] for entry in json.loads(manifest.read_text())} == {"fixed", "long"}


def test_rows_of_a_former_config_go_where_a_condition_trains_again(toy):
    """They would be taken for further seeds of the new runs."""
    path = write(toy, "s.yaml", "grid: {width: [4, 16], lr: [0.5]}\ncurves: {a: {}, b: {}}\n")
    former = {row["run"]: row for row in run(toy, path)}
    base = toy / "base.yaml"
    base.write_text(base.read_text().replace("steps: 9", "steps: 8"))
    rows = run(toy, path, where=["width<=4"])
    kept = [row for row in rows if row["run"] in former]
    assert [(row["curve"], row["width"]) for row in rows] == [
        (c, w) for c in "ab" for w in ("4", "16")
    ]
    assert [row["width"] for row in kept] == ["16", "16"]


def test_rows_stay_where_a_condition_is_on_what_their_width_decides(toy):
    adjust = "adjust: [{where: {width: [4]}, set: {training.batch_size: 8}}]\n"
    path = write(
        toy, "s.yaml", f"grid: {{width: [1, 4], lr: [0.5]}}\ncurves: {{a: {{}}}}\n{adjust}"
    )
    for where in ([], ["training.batch_size<=2"]):
        assert [row["width"] for row in run(toy, path, where=where)] == ["1", "4"]


def test_a_sweep_may_match_what_its_config_alone_says(toy):
    run(toy, write(toy, "source.yaml", "grid: {width: [1], lr: [0.25]}\ncurves: {a: {}}\n"))
    axis = "{around: {sweep: source.yaml, match: [width]}, steps: [0]}"
    path = write(toy, "s.yaml", f"grid: {{lr: {axis}}}\ncurves: {{a: {{}}}}\n")
    assert [point.config.lr for point in load(toy, path).points] == [0.25]


def test_the_table_has_a_column_for_every_key_that_is_set(toy):
    rows = run(toy, write(toy, "s.yaml", PRESETS), preset="small")
    keys = "curve inner.kind inner.gain width lr horizon constants"
    assert list(rows[0])[:7] == keys.split()
    assert {(row["curve"], row["inner.gain"], row["inner.kind"]) for row in rows} == {
        ("a", "1.0", "big"),
        ("b", "4.0", "big"),
    }


def test_probes_become_one_table(toy):
    text = SOURCE + "presets: {}\n"
    path = write(toy, "s.yaml", text.replace("plain}", "plain, training.probe_every: 1}", 1))
    sweep = load(toy, path)
    summaries = {}
    for point in sweep.points:
        folder = sweep.folder / point.run
        folder.mkdir(parents=True)
        plan = {"rows": [{"name": "up.weight", "role": "mlp_up", "fan_in": 32}]}
        (folder / "plan.json").write_text(json.dumps(plan))
        lines = [{"step": s, "layers": {"up": {"alignment": a}}} for s, a in ((1, 0.5), (2, None))]
        (folder / "probes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summaries[point.run] = {"status": "finished"}
    write_tables(sweep, sweep.points, summaries, final=True)
    with open(sweep.folder / "probes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(sweep.points)
    keys = "step layer role fan_in alignment"
    assert [rows[0][key] for key in keys.split()] == ["1", "up", "mlp_up", "32", "0.5"]
    assert rows[1]["alignment"] == "" and {row["width"] for row in rows} == {"1", "4"}
