"""What the command line says of a file: overrides, --where, and what neither of them may do."""

import itertools
import shlex

import pytest

from sweeps.__main__ import main
from sweeps.study import load_search
from sweeps.sweep_file import load_sweep
from tests.sweeps.toys import calls, drive, make_toy, rows_of, work_of, write_file

SWEEP = """
set: {inner.kind: big}
grid: {width: [1, 2, 4]}
curves: {a: {}, b: {set: {inner.gain: 2.0}, horizon: {tokens_per_parameter: 1}}}
seeds: [0, 1]
"""
SEARCH = "search: {lr: [0.1, 10]}\ntrials: 2\ngrid: {width: [1, 2]}\nrounds: 1\n"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    return make_toy(tmp_path, monkeypatch)


def load(toy, path, **said):
    return load_sweep(path, toy.parent / "results", **said)


def test_an_override_is_part_of_every_config_and_of_the_names_of_runs(toy):
    path = write_file(toy, SWEEP)
    plain = load(toy, path, curves=["a"])
    said = load(toy, path, curves=["a"], overrides=["training.steps=7", "inner.kind=small"])
    assert {(p.config.training.steps, p.config.inner.kind) for p in said.points} == {(7, "small")}
    assert not {p.run for p in plain.points} & {p.run for p in said.points}
    assert said.folder.name == "s+inner.kind=small+training.steps=7"  # tables of its own
    assert load(toy, path, curves=["a"], overrides=["inner.kind=big"]).points == plain.points
    name = load(toy, path, overrides=["inner.kind=a/b c"]).folder.name
    assert "/" not in name and " " not in name and name.startswith("s+")


@pytest.mark.parametrize("word", ["training.data_workers=1", "checkpoint.every=3", "checkpoint={}"])
def test_an_override_that_changes_no_result_goes_on_where_the_sweep_was(toy, word):
    path = write_file(toy, SWEEP)
    plain, said = load(toy, path), load(toy, path, overrides=[word])
    assert said.folder == plain.folder
    assert [point.run for point in said.points] == [point.run for point in plain.points]
    longer = load(toy, path, curves=["a"], overrides=[word, "training.steps=7"])
    assert longer.folder.name == "s+training.steps=7"


@pytest.mark.parametrize(
    "words",
    [
        "{path} inner.kind=odd --where width>=2 --where seed==0 --dry-run --verbose",
        "--where 'width >= 2' --verbose --dry-run {path} --where seed=0 inner.kind=odd",
        "--verbose {path} --curves a b inner.kind=odd --where width>=2 --where seed==0 --dry-run",
    ],
)
def test_overrides_and_conditions_may_stand_anywhere(toy, capsys, words):
    path = write_file(toy, SWEEP)
    main(["run", *shlex.split(words.format(path=path)), "--results", str(toy.parent / "results")])
    headline, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        [curve, f"width={width}", "seed=0"] for curve in "ab" for width in (2, 4)
    ]
    assert headline == "s: 4 of 4 runs to do, 12 FLOPs, about 0.3 s on 1 CPU core"
    assert not calls(toy)
    main(["status", str(path), "inner.kind=odd", "--where", "seed==0"])
    assert "+inner.kind=odd: 0 of 6 runs done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("conditions", "widths"),
    [
        (["width<2"], {1}),
        (["width<=2"], {1, 2}),
        (["width>2"], {4}),
        (["width!=2"], {1, 4}),
        (["width >= 2", "width<4"], {2}),
        (["inner.kind==big"], {1, 2, 4}),
        (["inner.gain==null", "width==4"], {4}),
    ],
)
def test_conditions_choose_runs_by_any_key(toy, conditions, widths):
    found = load(toy, write_file(toy, SWEEP), where=conditions)
    assert {point.config.width for point in found.points} == widths


def test_a_key_without_a_value_is_neither_more_nor_less(toy):
    found = load(toy, write_file(toy, SWEEP), where=["inner.gain>0"])
    assert {point.curve for point in found.points} == {"b"}


def test_what_is_left_out_keeps_its_rows_and_is_not_called_missing(toy):
    path = write_file(toy, SWEEP)
    first = drive(work_of(toy, path, where=["width<=2", "seed==0"]))
    assert len(rows_of(first)) == 4 and not first.reasons
    second = drive(work_of(toy, path, where=["width>=2"]))
    found = rows_of(second)
    seen = [(row["curve"], row["width"], row["seed"]) for row in found]
    places = itertools.product("ab", "124", "01")
    assert seen == [place for place in places if place[1:] != ("1", "1")]
    whole = drive(work_of(toy, path))
    assert len(rows_of(whole)) == 12 and found == [r for r in rows_of(whole) if r in found]


def test_a_search_keeps_the_constants_of_studies_that_are_left_out(toy):
    path, results = write_file(toy, SEARCH), toy.parent / "results"
    drive(work_of(toy, path, where=["width==2"]))
    constants = results / toy.name / "s/constants.yaml"
    assert constants.read_text().count("where:") == 1
    work = drive(work_of(toy, path, where=["width<2"]))
    assert (len(work.results), len(work.points)) == (2, 2)
    assert constants.read_text().count("where:") == 2
    assert len((constants.with_name("trials.csv")).read_text().splitlines()) == 5
    found = load_search(path, results, overrides=["inner.kind=odd"])
    assert found.folder.name == "s+inner.kind=odd"


def test_an_extension_stays_within_the_conditions_and_says_so(toy):
    text = "grid: {width: [8], lr: [1, 2]}\ncurves: {a: {}}\nextend: {key: lr}\n"
    work = drive(work_of(toy, write_file(toy, text), where=["lr>=0.5"]))
    assert [row["lr"] for row in rows_of(work)] == ["0.5", "1", "2"]
    assert work.report() == [
        "a width=8: lr 0.25 was not run: left out by --where lr>=0.5; it is needed"
    ]


@pytest.mark.parametrize("command", ["run", "status"])
def test_commands_of_one_file_say_that_it_is_one(toy, capsys, command):
    paths = [str(write_file(toy, SWEEP, name)) for name in ("s.yaml", "t.yaml")]
    for words in (paths, [*paths, "inner.kind=odd"]):
        with pytest.raises(SystemExit) as ended:
            main([command, *words])
        said = f"error: one sweep file; `cost` alone takes several: {' '.join(paths)}\n"
        assert ended.value.code == 2 and capsys.readouterr().err.endswith(said)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage = capsys.readouterr().out.split("\n\n")[0]
    assert usage.endswith(" FILE [key=value ...]")
