"""Simulated steps, what `cost --simulate` says of them, and the table of them that is shipped."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed

from sweeps import cost
from sweeps.__main__ import main
from sweeps.pool import CARDS
from sweeps.request import preset_of
from sweeps.search import SearchWork
from sweeps.study import load_search
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from tests.tracked import tracked
from training.config import load
from training.errors import UserError
from training.experiment import load_experiment
from training.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
# Few blocks, and matrices of the papers' sizes: fake tensors take no time for these.
FAMILIES = {
    "nanolm_c4": ("paper", "model.layers=3", "model.width=4096", "training.micro_batch_size=16"),
    "vit_imagenet": ("paper", "model.layers=2", "training.micro_batch_size=128"),
    "vit_cifar5m": ("paper", "model.layers=2", "training.micro_batch_size=16"),
    "bart_span_denoise": ("bart_large", "model.layers=2", "training.micro_batch_size=8"),
}


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
