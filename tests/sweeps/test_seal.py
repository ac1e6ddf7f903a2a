"""Results that are not as a run has written them are in no table: the run is trained again."""

import contextlib
import errno
import json
import os
import shutil

import pytest

import plots.tables
from sweeps.__main__ import main
from sweeps.request import read_manifest
from tests.run_folders import Death, flip
from tests.sweeps.toys import FakePool, calls, drive, make_toy, work_of, write_file
from training import files, runs
from training.errors import RunError, UserError

SWEEP = "grid: {width: [1, 2], lr: [0.25]}\ncurves: {a: {}}\nmetrics: true\n"
LOGGED = """
    from training.files import write_text
    lines = [{"step": step, "train_loss": loss + step / 10} for step in (1, 2, 3)]
    write_text(run_dir / "metrics.jsonl", "".join(json.dumps(line) + "\\n" for line in lines))
    (run_dir / "observations").mkdir()
    (run_dir / "observations/step_3.safetensors").write_bytes(bytes(range(40)))
    return summary
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    package = make_toy(tmp_path, monkeypatch)
    file = package / "train.py"
    text = file.read_text().replace("    return summary\n", LOGGED, 1)
    file.write_text(text.replace("import math", "import json, math", 1))
    return package


def lines(path, change):
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


DAMAGES = {
    "cut at a line's end": ("metrics.jsonl", lambda p, _: lines(p, lambda ls: ls[:-1])),
    "emptied": ("metrics.jsonl", lambda p, _: p.write_text("")),
    "a line lost": ("metrics.jsonl", lambda p, _: lines(p, lambda ls: [ls[0], ls[2]])),
    "lines swapped": ("metrics.jsonl", lambda p, _: lines(p, lambda ls: [ls[1], ls[0], ls[2]])),
    "a line twice": ("metrics.jsonl", lambda p, _: lines(p, lambda ls: [*ls, ls[-1]])),
    "a digit": ("metrics.jsonl", lambda p, _: p.write_text(p.read_text().replace("3.", "2.", 1))),
    "gone": ("metrics.jsonl", lambda p, _: p.unlink()),
    "of another run": ("metrics.jsonl", lambda p, other: shutil.copy(other, p)),
    "a bit of arrays": ("observations/step_3.safetensors", lambda p, _: flip(p)),
    "arrays gone": ("observations/step_3.safetensors", lambda p, _: p.unlink()),
    "arrays too many": ("observations/step_9.safetensors", lambda p, _: p.write_bytes(b"9")),
    "a log too many": ("probes.jsonl", lambda p, _: p.write_text("{}\n")),
    "a loss": ("summary.json", lambda p, _: p.write_text(p.read_text().replace("3.", "2.", 1))),
    "a line less": ("summary.json", lambda p, _: lines(p, lambda ls: [*ls[:2], *ls[3:]])),
    "a summary of another run": ("summary.json", lambda p, other: shutil.copy(other, p)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_whose_files_have_changed_is_named_and_trained_again(toy, name, capsys):
    path = write_file(toy, SWEEP)
    work = drive(work_of(toy, path), FakePool())
    tables = [path.read_bytes() for path in sorted(work.folder.glob("*.csv"))]
    ours, theirs = (work.folder / point.run for point in work.points.values())
    file, damage = DAMAGES[name]
    damage(ours / file, theirs / file)
    main(["status", str(path), "--results", str(toy.parent / "results")])
    assert "1 of 2 runs done" in capsys.readouterr().out and ours.exists()  # it only looks
    again = drive(work_of(toy, path), FakePool())
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith(f"{ours}/{file} is ") and "trained again" in said
    assert calls(toy).count(ours.name) == 2 and calls(toy).count(theirs.name) == 1
    assert not again.reasons and (work.folder / f"damaged-{ours.name}").is_dir()
    assert tables == [path.read_bytes() for path in sorted(work.folder.glob("*.csv"))]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_whose_files_change_while_others_train_is_in_no_table(toy, name):
    path = write_file(toy, SWEEP)
    whole = drive(work_of(toy, path), FakePool())
    ours, theirs = (whole.folder / point.run for point in whole.points.values())
    late = work_of(toy, path)  # which takes both for done
    DAMAGES[name][1](ours / DAMAGES[name][0], theirs / DAMAGES[name][0])
    late.write(final=True)
    assert [*late.reasons] == [ours.name] and "trains the run again" in late.reasons[ours.name]
    text = (late.folder / "metrics.csv").read_text()
    assert ours.name not in text and theirs.name in text


@pytest.fixture
def unreadable(monkeypatch):
    """Makes reading a file of this name fail: `names` has those that still do."""
    opened, names = files.open_plain, []

    def fails(path, mode):
        if path.name in names:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, mode)

    monkeypatch.setattr(files, "open_plain", fails)
    return names


def test_a_run_that_cannot_be_read_at_the_end_is_not_said_to_be_trained_again(toy, unreadable):
    late = drive(work_of(toy, write_file(toy, SWEEP)), FakePool())
    unreadable.append("metrics.jsonl")
    late.write(final=True)
    said = {*late.reasons.values()}
    assert len(late.reasons) == 2 and all(line.endswith("once that works") for line in said)


def test_a_manifest_that_cannot_be_read_now_is_not_an_empty_one(toy, unreadable):
    """Runs of other curves would be lost from it; no sum of it is noted, so nothing else sees."""
    work = drive(work_of(toy, write_file(toy, SWEEP)), FakePool())
    path = work.folder / "manifest.json"
    (work.folder / files.NOTES).unlink()
    unreadable.append(path.name)
    with pytest.raises(RunError, match=f"{path}: cannot read it .*, nothing is changed"):
        read_manifest(path)


def test_a_table_that_is_stale_for_a_moment_is_looked_at_again(toy, unreadable, monkeypatch):
    work = drive(work_of(toy, write_file(toy, SWEEP)), FakePool())
    path = work.folder / "results.csv"
    unreadable.append(path.name)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: seconds and unreadable.clear())
    files.refuse_changed(path)


TABLES = {
    "a digit": lambda p: p.write_text(p.read_text().replace("3", "2", 1)),
    "a bit": flip,
    "a line lost": lambda p: lines(p, lambda ls: ls[:-1]),
    "a line twice": lambda p: lines(p, lambda ls: [*ls, ls[-1]]),
    "emptied": lambda p: p.write_text(""),
    "gone": lambda p: p.unlink(),
}


@pytest.mark.parametrize("damage", TABLES)
@pytest.mark.parametrize("name", ["results.csv", "metrics.csv", "manifest.json"])
def test_a_table_that_has_changed_gives_nothing_to_another_one(toy, name, damage, monkeypatch):
    """It would stay as it is: rows of other curves, the best rate of a sweep, a figure's points."""
    monkeypatch.setattr(files, "LOOKS", [0])
    curves = "grid: {width: [1, 2], lr: [0.25, 0.5]}\ncurves: {a: {}, b: {set: {minimum_a: 2.0}}}\n"
    file, later = write_file(toy, curves + "metrics: true\n"), toy / "later.yaml"
    work = drive(work_of(toy, file), FakePool())
    whole = [path.read_bytes() for path in sorted(work.folder.glob("*.[cj]s*"))]
    around = "{around: {sweep: s.yaml, match: [width], where: {curve: a}}, steps: [0]}"
    write_file(toy, f"grid: {{width: [1], lr: {around}}}\ncurves: {{a: {{}}}}\n", later.name)
    rate = dict(work_of(toy, later).left[0].values)["lr"]
    TABLES[damage](work.folder / name)
    changed = f"{name}: not as it was written; give the command that makes it again"
    trained = len(calls(toy))
    with pytest.raises(UserError, match=changed):
        drive(work_of(toy, file, curves=["b"]), FakePool())
    assert len(calls(toy)) == trained
    if damage != "gone" and name != "metrics.csv":
        with pytest.raises(UserError, match=changed):
            work_of(toy, later)
    if damage != "gone" and name != "manifest.json":
        with pytest.raises(UserError, match=changed):
            plots.tables.read(work.folder / name, ())
    drive(work_of(toy, file), FakePool())
    assert whole == [path.read_bytes() for path in sorted(work.folder.glob("*.[cj]s*"))]
    assert dict(work_of(toy, later).left[0].values)["lr"] == rate


@pytest.mark.parametrize("before", ["none", "not noted", "noted"])
@pytest.mark.parametrize("number", range(4))
def test_a_table_whose_writing_is_killed_is_as_it_was_written(
    tmp_path, monkeypatch, number, before
):
    """Between its notes and itself: it is the one of before or the new one, twice in a row."""
    path, writes, done = tmp_path / "t.csv", files.write_bytes, []
    if before != "none":
        {"noted": files.write_table, "not noted": files.write_text}[before](path, "a\n1\n")

    def dies(*args):
        if len(done) == number:
            raise Death
        done.append(args)
        writes(*args)

    for text in ("a\n2\n", "a\n3\n"):
        done.clear()
        with monkeypatch.context() as patch, contextlib.suppress(Death):
            patch.setattr(files, "write_bytes", dies)
            files.write_table(path, text)
        files.refuse_changed(path)


def test_a_table_elsewhere_is_read_through_a_link_and_one_without_notes_as_it_is(tmp_path):
    path, elsewhere = tmp_path / "t.csv", tmp_path / "elsewhere.csv"
    files.write_table(path, "a\n1\n")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    files.refuse_changed(path)
    elsewhere.write_text("a\n2\n")
    with pytest.raises(UserError, match=f"delete {files.NOTES} beside it"):
        files.refuse_changed(path)
    (tmp_path / files.NOTES).unlink()
    files.refuse_changed(path)


def test_results_from_before_summaries_had_a_seal_are_named_in_few_lines(toy):
    """They are not taken, nor trained again without a word: that would take what they took."""
    path = write_file(toy, SWEEP + f"seeds: [{', '.join(map(str, range(8)))}]\n")
    work = drive(work_of(toy, path), FakePool())
    for file in work.folder.glob("*/summary.json"):
        old = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("seal", "files")}
        file.write_text(json.dumps(old))
    before = len(calls(toy))
    report = drive(work_of(toy, path), FakePool()).report()
    assert len(report) == 10 and report[-1].startswith("and 7 more: summary.json has no seal")
    assert "delete the folder to train it again" in report[0] and len(calls(toy)) == before


def test_a_summary_is_sealed_whatever_it_says(tmp_path):
    """Numbers are compared as JSON has them; another label of the same config is the same run."""
    outcome = {"status": "finished", "a": 0.1 + 0.2, "b": [1e300, None, {"c": 3}], "d": "ä"}
    runs.write_summary(tmp_path, "run-0123", outcome, [])
    found = runs.sealed(tmp_path, "curve-0123")
    assert {key: found[key] for key in outcome} == outcome
