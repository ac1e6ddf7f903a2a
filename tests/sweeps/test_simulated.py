"""Simulated steps: against the closed forms and a real step, and what `cost --simulate` says."""

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed

from sweeps import simulated, task
from sweeps.__main__ import main
from sweeps.needs import GPUS, gpus_of, needs_of, peak_of, refuse_more_than_one_holds
from sweeps.sweep_file import load_sweep
from training.config import load
from training.errors import UserError
from training.experiment import load_experiment
from training.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
# Few blocks, and matrices of the papers' sizes: fake tensors take no time for these.
FAMILIES = {
    "nanolm_c4": ("paper", "model.layers=3", "model.width=4096", "training.micro_batch_size=16"),
    "vit_imagenet": ("paper", "model.layers=2", "training.micro_batch_size=128"),
    "vit_cifar5m": ("paper", "model.layers=2"),
    "bart_span_denoise": ("bart_large", "model.layers=2", "training.micro_batch_size=8"),
}


@pytest.mark.parametrize(("shards", "copies"), [(1, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_closed_forms_are_those_of_a_simulated_step(name, shards, copies):
    base, *changes = FAMILIES[name]
    experiment = load_experiment(name)
    config = load(experiment.config, ROOT / f"{name}/configs/{base}.yaml", changes)
    step = simulate(experiment, config, shards, copies)
    assert not distributed.is_initialized()
    assert step.parameters == experiment.parameters(config)["total"]
    closed = experiment.memory(config, shards=shards, replicas=copies)["total"]
    assert closed == pytest.approx(step.memory, rel=simulated.TOLERANCE)
    flops = experiment.flops(config) / config.training.steps
    if shards == 1:
        assert flops == pytest.approx(step.flops, rel=0.02)  # a stem's gradient by the images
    else:
        assert 1.1 < step.flops / flops < 1.4  # blocks are computed again


def test_copies_are_of_shards():
    with pytest.raises(ValueError, match="copies=2 of shards=1"):
        simulate(load_experiment("nanolm_c4"), None, shards=1, copies=2)


SWEEP = """
experiment: nanolm_c4
config: {base}
set: {{model.layers: 2, training.micro_batch_size: 4, optimizer.lr: 0.0005}}
grid: {{model.width: [128, 12288]}}
curves: {{a: {{}}}}
"""


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(SWEEP.format(base=ROOT / "nanolm_c4/configs/paper.yaml"))
    return path


def test_the_command_says_where_each_size_fits_and_how_it_is_launched(sweep, tmp_path, capsys):
    table = tmp_path / "t.csv"
    main(["cost", str(sweep), "--simulate", "--csv", str(table), "--results", str(tmp_path)])
    out = capsys.readouterr().out
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {"width=128", "width=12288"}
    assert not any(row["disagree"] for row in rows)
    points = {point.config.model.width: point.config for point in load_sweep(sweep).points}
    experiment = load_experiment("nanolm_c4")
    for row in rows:
        config = points[int(row["model"].partition("=")[2])]
        assert row["launch"] in out
        for gpu in (gpu for gpu in GPUS if gpu.name in row["on"].split()):
            peak = peak_of(experiment, config)
            assert float(row["gpus"]) == gpus_of(peak, 256, gpu.memory)
            assert row["gpus_by_closed_form"] == row["gpus"]
        words = shlex.split(row["launch"])
        at = words.index("-m")
        assert words[at + 1] == "nanolm_c4.train"
        assert load(experiment.config, Path(words[at + 2]), words[at + 3 :]) == config
        several = float(row["gpus"]) > 1
        assert several == (words[0] == "accelerate") == (row["sharding"] == "FSDP2")
        assert not several or f"--num_processes {row['gpus']}" in row["launch"]


def test_a_number_of_gpus_that_is_asked_for_is_simulated(sweep, tmp_path, capsys):
    """Of a narrow model, which would take less than one, too."""
    words = ["cost", str(sweep), "--simulate", "--sharded", "--gpus-per-run", "2", "--json"]
    main([*words, "--results", str(tmp_path)])
    narrow, wide = json.loads(capsys.readouterr().out)["files"][0]["sizes"]
    for size in (narrow, wide):
        for entry in size["simulated"]:
            closed = size["largest_run"]["memory_bytes"]["total"]
            assert entry["memory_bytes"] == pytest.approx(closed, rel=simulated.TOLERANCE)
            assert entry["sharding"] == "FSDP2" and entry["micro_batch"] == 4
            assert entry["gpus"] == 2 and "_fsdp.yaml --num_processes 2 " in entry["launch"]
    main([*words[:-1], "--where", "model.width==128", "--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert "of each size, 2 GPUs per run, sharded, FSDP2:" in out and "(HSDP)" in out


def test_the_shipped_table_is_that_of_the_shipped_sweeps(capsys, monkeypatch):
    """Every size, its largest run and what the closed forms say of it, and no other."""
    monkeypatch.chdir(ROOT)
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/sweeps/*.yaml"))
    main(["cost", *files, "--json", "--results", "none"])
    sizes = {
        (file["file"], " ".join(f"{key}={value}" for key, value in size["model"].items())): size
        for file in json.loads(capsys.readouterr().out)["files"]
        for size in file["sizes"]
    }
    with open("benchmarks/results/simulated_launch.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    placed, configs = {}, {}
    for row in rows:
        size = sizes[row["file"], row["model"]]
        run = size["largest_run"]
        assert (row["optimizer"], row["precision"]) == (run["optimizer"], run["precision"])
        assert int(row["parameters"]) == size["parameters"]["total"]
        for gpu in row["on"].split():
            assert float(row["gpus_by_closed_form"]) == size["gpus"][gpu], (row["file"], gpu)
        placed.setdefault((row["file"], row["model"]), []).extend(row["on"].split())
        words = shlex.split(row["launch"])
        module, base, *changes = words[words.index("-m") + 1 :]
        experiment = load_experiment(module.removesuffix(".train"))
        if (config := configs.get((base, *changes))) is None:
            config = configs[base, *changes] = load(experiment.config, Path(base), changes)
        flops = experiment.flops(config) / config.training.steps
        assert flops == float(row["step_flops_by_closed_form"])
        shards = max(1, int(float(row["gpus"])))
        memory = experiment.memory(with_training(config, observe_every=0), shards=shards)
        assert memory["total"] == int(row["memory_bytes_by_closed_form"])
    assert placed.keys() == sizes.keys()
    assert all(sorted(on) == sorted(gpu.name for gpu in GPUS) for on in placed.values())


def test_a_closed_form_that_is_wrong_is_named(sweep, tmp_path, capsys, monkeypatch):
    experiment = load_experiment("nanolm_c4")
    flops = experiment.flops
    object.__setattr__(experiment, "flops", lambda config: 2 * flops(config))
    words = ["cost", str(sweep), "--simulate", "--json", "--where", "model.width==128"]
    try:
        main([*words, "--results", str(tmp_path)])
    finally:
        object.__setattr__(experiment, "flops", flops)
    (size,) = json.loads(capsys.readouterr().out)["files"][0]["sizes"]
    (entry,) = size["simulated"]
    assert entry["disagree"] == ["step_flops"]
    text = simulated.table([("width 128", size["simulated"])])
    assert "the closed forms are wrong for width 128" in text and "step_flops" in text


def test_an_experiment_that_cannot_be_simulated_says_what_it_lacks(sweep):
    experiment = replace(load_experiment("nanolm_c4"), build_blank=None)
    with pytest.raises(UserError, match="nanolm_c4/train.py: EXPERIMENT has no build_blank"):
        simulate(experiment, load_sweep(sweep).points[0].config)


def test_a_table_without_a_simulation_is_refused(sweep, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["cost", str(sweep), "--csv", "t.csv"])
    assert ended.value.code == 2 and "give --simulate, too" in capsys.readouterr().err


@pytest.mark.parametrize(("gpu", "wide"), [("H100", "2 GPUs"), ("B200", "1 GPU")])
def test_a_dry_run_says_what_each_run_takes(sweep, tmp_path, capsys, gpu, wide):
    with pytest.raises(SystemExit):  # its tokeniser is not here
        main(["run", str(sweep), "--dry-run", "--gpu", gpu, "--results", str(tmp_path)])
    narrow_line, wide_line, _ = capsys.readouterr().out.splitlines()
    assert narrow_line.endswith("  1/8 GPU") and wide_line.endswith(f"  {wide}")
    sweep.write_text(sweep.read_text() + "needs: {gpus: 16, processes: 16, nodes: 2}\n")
    with pytest.raises(SystemExit):
        main(["run", str(sweep), "--dry-run", "--results", str(tmp_path)])
    assert capsys.readouterr().out.count("  16 GPUs on 2 nodes\n") == 2


def test_what_a_launch_command_starts_has_a_gpu_and_a_core_per_process(sweep, tmp_path, capsys):
    """A cluster gives a run no other GPUs and cores than those it is said to need."""
    launch = "accelerate launch --num_processes {}"
    words = ["run", str(sweep), "--dry-run", "--gpu", "H100", "--results", str(tmp_path)]
    for count, narrow in ((8, "8 GPUs"), ("{processes}", "1/8 GPU")):
        with pytest.raises(SystemExit):
            main([*words, "--launch", launch.format(count)])
        lines = capsys.readouterr().out.splitlines()
        # Two of a width that two GPUs hold are not eight copies of it.
        assert lines[0].endswith(f"  {narrow}") and lines[1].endswith("  2 GPUs")
    several = [*launch.format(16).split(), "--num_machines", "2"]
    assert task.said_of_all(launch.format(16).split()) == 16 != task.said_of_all(several)
    experiment, (point, _) = load_experiment("nanolm_c4"), load_sweep(sweep).points
    for said, cpus in (({}, 8), ({"cpus": 40}, 40)):
        needs = needs_of(experiment, point.config, said, 80e9, launched=8)
        assert (needs.gpus, needs.cpus, needs.processes) == (8, cpus, 1)


def test_what_no_gpu_holds_or_cannot_be_sharded_is_not_started(sweep):
    experiment, (narrow, wide) = load_experiment("nanolm_c4"), load_sweep(sweep).points
    with pytest.raises(UserError, match="more than one [AH]100 holds: name the GPUs .* by --gpu"):
        refuse_more_than_one_holds(experiment, wide.config)
    refuse_more_than_one_holds(experiment, narrow.config)
    for key in ("probe_every", "observe_every"):
        looking = with_training(wide.config, **{key: 100})
        with pytest.raises(UserError, match=f"training.{key} cannot be where tensors are sharded"):
            needs_of(experiment, looking, {}, 80e9)
        assert needs_of(experiment, looking, {"gpus": 8}, 80e9).gpus == 8


def with_training(config, **changes):
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})
