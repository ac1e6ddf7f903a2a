"""`sweeps cost`: counts of a sweep and of what is left of it, hours, what fits, what is assumed."""

import json
from pathlib import Path

import pytest
import yaml

from nanolm_c4.train import EXPERIMENT as NANO
from sweeps.__main__ import main
from sweeps.search import SearchWork
from sweeps.study import load_search
from sweeps.sweep_file import load_sweep
from tests.run_folders import end_run
from training.config import read_yaml

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
grid: {model.width: [32, 64], optimizer.lr: [0.001, 0.002, 0.004]}
curves: {a: {}, b: {set: {optimizer.name: sgd}}}
"""
LARGE = """
grid: {model.width: [1024, 8192, 16384]}
curves: {a: {}}
"""


@pytest.fixture
def write(tmp_path):
    """Writes a sweep file over one of the repository's configs."""

    def write(text=SMALL, config="laptop", name="s.yaml"):
        path = tmp_path / name
        base = tmp_path / f"{config}.yaml"
        content = read_yaml(ROOT / f"nanolm_c4/configs/{config}.yaml")
        content.get("data", {}).pop("tokenizer", None)  # it is not on this machine
        base.write_text(yaml.safe_dump(content))
        path.write_text(f"experiment: nanolm_c4\nconfig: {base}\n{text}")
        return path

    return write


@pytest.fixture
def said(tmp_path, capsys):
    """Runs the command; the lines that it prints, blanks squeezed."""

    def said(*arguments):
        main(["cost", *map(str, arguments), "--results", str(tmp_path / "results")])
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return said


@pytest.fixture
def planned(said):
    """Runs the command with --json; its whole result."""
    return lambda *arguments: json.loads("\n".join(said(*arguments, "--json")))


def end(folder, status="finished", **more):
    """A run folder with a summary, which it returns."""
    summary = {"status": status, "final_eval_loss": 1.0, "environment": {"commit": "c0ffee"}}
    return end_run(folder, {**summary, **more})


def files_under(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_sweep_that_never_ran_is_counted_by_size_and_in_all(write, planned):
    path = write()
    (counts,) = planned(path)["files"]
    points = load_sweep(path).points
    assert counts["all"] == counts["to_do"] and counts["all"]["runs"] == 12
    assert counts["all"]["tokens"] == 12 * 150 * 16 * 64
    assert counts["all"]["flops"] == pytest.approx(sum(NANO.flops(p.config) for p in points))
    assert [size["model"] for size in counts["sizes"]] == [{"width": 32}, {"width": 64}]
    small = counts["sizes"][0]
    configs = [p.config for p in points if p.config.model.width == 32]
    assert small["parameters"] == NANO.parameters(configs[0])
    assert small["all"]["flops"] == pytest.approx(sum(map(NANO.flops, configs)))


def test_models_that_leave_a_default_out_are_counted_apart(write, planned):
    (counts,) = planned(write("grid: {model.norms: [false, true]}\ncurves: {a: {}}\n"))["files"]
    assert {size["model"]["norms"] for size in counts["sizes"]} == {False, None}


def test_what_is_done_or_unreadable_is_told_apart(write, planned, tmp_path):
    path = write()
    grid = load_sweep(path, tmp_path / "results")
    wide = [point for point in grid.points if point.config.model.width == 64]
    end(grid.folder / wide[0].run)
    end(grid.folder / wide[1].run, "diverged", final_eval_loss=None)
    end(grid.folder / wide[2].run, "stopped")
    (grid.folder / wide[4].run).mkdir()
    (grid.folder / wide[4].run / "summary.json").write_text("not JSON")
    (counts,) = planned(path)["files"]
    assert (counts["all"]["runs"], counts["to_do"]["runs"]) == (12, 10)
    left = counts["sizes"][1]["to_do"]
    assert (left["runs"], left["tokens"]) == (4, 4 * 150 * 1024)
    assert left["flops"] == pytest.approx(4 * NANO.flops(wide[0].config))
    assert counts["sizes"][0]["to_do"] == counts["sizes"][0]["all"]
    (note,) = counts["notes"]
    assert wide[4].run in note and "not a summary" in note


def test_runs_of_other_tokens_are_refused(write, planned, tmp_path, capsys):
    """Another version of sentencepiece trains another tokeniser: a loss per token changes."""
    grid = load_sweep(path := write(), tmp_path / "results")
    for point, data in zip(grid.points, "aab", strict=False):
        planned(path)
        end(grid.folder / point.run, data_checksum=data)
    with pytest.raises(SystemExit):
        planned(path)
    assert "were trained on other data" in capsys.readouterr().err


def test_planning_writes_nothing_and_adds_files_up(write, planned, tmp_path):
    one, other = write(name="one.yaml"), write(name="other.yaml")
    first = load_sweep(one, tmp_path / "results").points[0]
    end(tmp_path / "results/nanolm_c4/one" / first.run)
    before = files_under(tmp_path)
    result = planned(one, other)
    assert files_under(tmp_path) == before
    assert [counts["to_do"]["runs"] for counts in result["files"]] == [11, 12]
    assert result["together"]["all"]["runs"] == 24
    assert result["together"]["to_do"]["runs"] == 23
    flops = result["files"][0]["all"]["flops"]
    assert result["together"]["all"]["flops"] == pytest.approx(2 * flops)


def test_gpu_hours_are_flops_over_the_peak_of_the_runs_precision(write, planned):
    path = write(LARGE, "paper")
    (bf16,) = planned(path)["files"]
    hours = bf16["all"]["gpu_hours"]
    assert [*hours] == ["H100", "A100", "RTX 4090", "L4", "T4"]
    assert hours["T4"] == pytest.approx(bf16["all"]["flops"] / (0.4 * 8.1e12) / 3600)  # no bf16
    assert hours["A100"] == pytest.approx(bf16["all"]["flops"] / (0.4 * 312e12) / 3600)
    assert hours["H100"] == pytest.approx(bf16["all"]["flops"] / (0.4 * 989e12) / 3600)
    (fp32,) = planned(write(LARGE + "set: {training.precision: fp32}", "paper"))["files"]
    assert fp32["all"]["gpu_hours"]["A100"] == pytest.approx(
        bf16["all"]["flops"] / (0.4 * 19.5e12) / 3600
    )


def test_gpu_hours_are_those_of_all_gpus_of_a_run(write, planned):
    (one,) = planned(write(LARGE, "paper"))["files"]
    many = "adjust: [{where: {model.width: [16384]}, gpus: 16}]"
    path = write(LARGE + many, "paper")
    (several,) = planned(path)["files"]
    assert [size["gpus"] for size in several["sizes"]] == [1, 1, 16]
    assert several["all"] == one["all"]


def test_the_table_has_the_counts_and_what_they_assume(write, said):
    lines = said(write())
    assert lines[0].endswith("s.yaml: 12 runs, 12 to do")
    titles = "model embedding non-embedding parameters GPUs runs tokens FLOPs 1 H100"
    assert titles in lines
    (row,) = [row.split() for row in lines if row.startswith("width 64 6")]
    assert row[2:8] == ["65,536", "168,256", "233,792", "1", "6", "9.22e+05"]
    for words in ("6 per weight", "40 %", "989", "RTX 4090 165.2, 82.6", "datasheets"):
        assert words in " ".join(lines)


def test_data_that_are_not_here_are_named_after_the_counts(write, capsys, tmp_path):
    path = write(SMALL + "set: {data.source: local, data.path: /no/where}\n")
    said = (
        f"{path}: data.path: /no/where does not exist on this machine; put the data there, or set "
        "data.path; `bash scripts/download.sh` says how to get the papers' data\n"
    )
    results = ["--results", str(tmp_path / "results")]
    for words in (["run", "--dry-run"], ["cost"]):  # a plan is made before its data are there
        main([words[0], str(path), *words[1:], *results])
        out, err = capsys.readouterr()
        assert "12" in out and err == f"note: {said}"
    main(["cost", str(path), f"data.path={tmp_path}", *results])
    assert not capsys.readouterr().err


def test_a_strict_look_ends_with_2_where_data_or_gpus_are_missing(write, capsys, tmp_path):
    look = lambda path, *words: main(
        ["run", str(path), "--dry-run", "--strict", *words, "--results", str(tmp_path / "results")]
    )
    many = write(LARGE + "adjust: [{where: {model.width: [16384]}, gpus: 16}]", "paper")
    changes = ["data.source=embedded", f"data.tokenizer={tmp_path}"]
    look(many, "--gpus", "16", *changes)
    look(many, "--gpus", "8", "--where", "model.width<16384", *changes)
    assert not capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        look(many, "--gpus", "8", *changes)
    said = (
        f"note: {many}: its largest run needs 16 GPUs, and there are 8; take more nodes, or leave"
    )
    assert capsys.readouterr().err.startswith(said)
    path = write(SMALL + "set: {data.source: local, data.path: /no/where}\n")
    with pytest.raises(SystemExit, match="2"):
        look(path)
    assert capsys.readouterr().err.count("/no/where does not exist") == 1


def test_extension_is_counted_at_its_most(write, planned, tmp_path):
    path = write(SMALL + "extend: {key: optimizer.lr, points: 3}\nseeds: [0, 1]\n")
    (counts,) = planned(path)["files"]
    assert counts["may_add"]["runs"] == 4 * 3 * 2  # cells, points, seeds
    grid = load_sweep(path, tmp_path / "results")
    cell = [p for p in grid.points if p.curve == "a" and p.config.model.width == 64]
    for point in cell:  # the optimum is inside: this cell asks for no more
        best = dict(point.values)["optimizer.lr"] == 0.002
        end(grid.folder / point.run, final_eval_loss=1.0 if best else 2.0)
    (counts,) = planned(path)["files"]
    assert counts["may_add"]["runs"] == 3 * 3 * 2
    for point in cell:  # at the edge: one more value is known to be needed, two may be
        end(grid.folder / point.run, final_eval_loss=dict(point.values)["optimizer.lr"])
    (counts,) = planned(path)["files"]
    assert counts["to_do"]["runs"] == 24 - 6 + 2
    assert counts["may_add"]["runs"] == (3 * 3 + 2) * 2


def test_the_command_line_chooses_what_is_counted(write, planned):
    path = write(SMALL + "presets: {tiny: {grid: {model.width: [16]}}}")
    assert planned(path, "--curves", "b")["files"][0]["all"]["runs"] == 6
    (counts,) = planned(path, "--preset", "tiny")["files"]
    assert (counts["all"]["runs"], counts["preset"]) == (6, "tiny")
    assert counts["sizes"][0]["parameters"]["embedding"] == 1024 * 16
    words = ["training.steps=30", "schedule.warmup_steps=0", "--where", "model.width>32"]
    (counts,) = planned(*words, path)["files"]
    assert counts["all"]["tokens"] == 6 * 30 * 16 * 64 and len(counts["sizes"]) == 1


def test_what_other_commands_have_yet_to_find_is_assumed_and_named(write, planned, tmp_path):
    write("search: {}", name="constants.yaml")
    text = "constants: constants.yaml\ncurves: {a: {constants: true}}\n"
    (counts,) = planned(write(text))["files"]
    assert counts["all"]["runs"] == 1
    (note,) = counts["notes"]
    assert "sweeps search" in note and "'a'" in note


SEARCH = """
grid: {optimizer.name: [adam, sgd]}
search: {prescription.gamma_hidden: [0.01, 100]}
trials: 12
rounds: 3
"""


def test_trials_of_a_search_are_counted_like_runs(write, planned, tmp_path):
    path = write(SEARCH, name="constants.yaml")
    before = files_under(tmp_path)
    (counts,) = planned(path)["files"]
    assert files_under(tmp_path) == before
    config = load_sweep(write("curves: {a: {}}")).points[0].config
    assert counts["all"]["runs"] == counts["to_do"]["runs"] == 24
    assert counts["all"]["flops"] == pytest.approx(24 * NANO.flops(config))
    assert counts["may_add"]["runs"] == 2 * 2 * 12  # studies, later rounds, trials
    assert planned(path, write())["together"]["all"]["runs"] == 24 + 12


def test_trials_that_are_done_are_told_from_those_that_are_not(write, planned, tmp_path):
    path = write(SEARCH, name="constants.yaml")
    work = SearchWork(load_search(path, tmp_path / "results"), lambda run: None)
    for _ in range(2):
        point = work.next()
    work.record(point, end(work.folder / point.run))
    (counts,) = planned(path)["files"]
    assert (counts["all"]["runs"], counts["to_do"]["runs"]) == (24, 23)
    assert counts["may_add"]["runs"] == 2 * 2 * 12
