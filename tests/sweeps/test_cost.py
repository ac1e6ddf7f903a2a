"""`sweeps cost`: counts of a sweep and of what is left of it, hours, what fits, what is assumed."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch import distributed

from nanolm_c4.train import EXPERIMENT as NANO
from sweeps import cost
from sweeps.__main__ import main
from sweeps.pool import CARDS
from sweeps.request import preset_of
from sweeps.search import SearchWork
from sweeps.study import load_search
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from tests.run_folders import end_run
from tests.tracked import tracked
from training.config import load, read_yaml
from training.errors import UserError
from training.experiment import load_experiment
from training.simulate import simulate

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
    a100 = bf16["all"]["flops"] / (0.4 * 19.5e12) / 3600
    assert fp32["all"]["gpu_hours"]["A100"] == pytest.approx(a100)


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


# Simulated steps, what `cost --simulate` says of them, and the table of them that is shipped


# Few blocks, and matrices of the papers' sizes: fake tensors take no time for these.
FAMILIES = {
    "nanolm_c4": ("paper", "model.layers=3", "model.width=4096", "training.micro_batch_size=16"),
    "vit_imagenet": ("paper", "model.layers=2", "training.micro_batch_size=128"),
    "vit_cifar5m": ("paper", "model.layers=2", "training.micro_batch_size=16"),
    "bart_span_denoise": ("bart_large", "model.layers=2", "training.micro_batch_size=8"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_a_simulated_step_has_the_closed_forms_parameters_and_flops(name):
    base, *changes = FAMILIES[name]
    experiment = load_experiment(name)
    config = load(experiment.config, ROOT / f"{name}/configs/{base}.yaml", changes)
    one = simulate(experiment, config)
    assert not distributed.is_initialized()
    parameters = experiment.parameters(config)["total"]
    assert one.parameters == parameters
    flops = experiment.flops(config) / config.training.steps
    assert flops == pytest.approx(one.flops, rel=0.02)  # a stem's gradient by the images
    if name != "nanolm_c4":  # whose sweeps alone have sharded runs
        return
    sharded = simulate(experiment, config, 4)
    assert sharded.parameters == parameters
    assert 1.1 < sharded.flops / flops < 1.4  # blocks are computed again
    assert 4 * 3 * parameters / 4 < sharded.memory < one.memory  # weights, gradients, moments


SWEEP = """
experiment: nanolm_c4
config: {base}
set: {{model.layers: 2, training.micro_batch_size: 4, optimizer.lr: 0.0005}}
grid: {{model.width: [128, 12288]}}
curves: {{a: {{}}}}
adjust: [{{where: {{model.width: [12288]}}, gpus: 2}}]
"""


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(SWEEP.format(base=ROOT / "nanolm_c4/configs/paper.yaml"))
    return path


def test_the_command_says_which_cards_hold_each_size(sweep, tmp_path, capsys):
    words = ["cost", str(sweep), "--simulate", "--results", str(tmp_path)]
    main([*words, "--csv", str(tmp_path / "t.csv")])
    out = capsys.readouterr().out
    assert "fits on" in out and "H100, A100, RTX 4090" in out
    main([*words, "--json"])
    narrow, wide = json.loads(capsys.readouterr().out)["files"][0]["sizes"]
    [one], [two] = narrow["simulated"], wide["simulated"]
    assert (one["gpus"], two["gpus"]) == (1, 2)
    assert one["memory_on_each"] == one["memory_on_one"]
    assert two["memory_on_each"] < two["memory_on_one"]
    assert one["fits"] == [card.name for card in CARDS]
    bytes_ = 1.1 * two["memory_on_each"] + 1e9
    assert two["fits"] == [card.name for card in CARDS if card.memory >= bytes_] != one["fits"]
    with open(tmp_path / "t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["width=128", "width=12288"]
    assert int(rows[1]["memory_on_each"]) == two["memory_on_each"]


@pytest.mark.thorough
@pytest.mark.parametrize("path", tracked("*/sweeps/*.yaml"), ids=lambda path: path.stem)
def test_the_gpus_of_shipped_files_are_those_of_the_simulated_table(path, tmp_path):
    """One where an H100 holds the run, else so many H100s that they do.

    `python -m sweeps cost FILES --simulate --csv sweeps/simulated.csv` writes the table.
    """
    with open(ROOT / "sweeps/simulated.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["file"] == str(path.relative_to(ROOT))]
    if "search" in preset_of(path, None):
        search = load_search(path, tmp_path, draft=True)
        work = SearchWork(search, lambda run: None)
    else:
        work = SweepWork(load_sweep(path, tmp_path, draft=True))
    wanted = {}
    for run in cost.read(work):
        parameters = work.experiment.parameters(run.config)["total"]
        flops = work.experiment.flops(run.config) / run.config.training.steps
        if run.config.optimizer.name == "muon":  # five Newton-Schulz steps: X X^T, its square, B X
            shape = run.config.model
            mlp = 4 * shape.mlp_ratio + 2  # width times ratio to width
            flops += 5 * shape.layers * shape.width**3 * (4 * (4 + 2) + 2 * mlp)
        wanted[parameters, *map(str, cost.kind_of(run).values())] = flops
    found, alone = {}, {}
    for row in rows:
        key = int(row["parameters"]), *(row[k] for k in ("optimizer", "precision", "micro_batch"))
        found[*key, row["gpus"]] = float(row["step_flops"])
        on_one = cost.MARGIN * int(row["memory_on_one"]) + cost.CONTEXT <= 80e9
        alone.setdefault((row["model"], row["gpus"]), []).append(on_one)
        assert "H100" in row["fits"].split(), row
    assert all(all(each) == (gpus == "1") for (_, gpus), each in alone.items()), alone
    assert found.keys() == wanted.keys()
    for key, flops in found.items():
        # A readout's bias widens a product by 8 columns, which the closed form leaves out.
        assert flops == pytest.approx(wanted[key], rel=0.12)


def test_an_experiment_that_cannot_be_simulated_says_what_it_lacks(sweep):
    experiment = replace(load_experiment("nanolm_c4"), build_blank=None)
    with pytest.raises(UserError, match="nanolm_c4/train.py: EXPERIMENT has no build_blank"):
        simulate(experiment, load_sweep(sweep).points[0].config)
