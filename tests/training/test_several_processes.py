"""Two processes: the run that one trains, in the same order, and as hard to lose."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from tests.processes import LAUNCH_CONFIGS, Program, launch_environment
from tests.run_folders import lines, newest, tensors
from tests.training import toy_run as toy
from training.config import load
from training.data.sampling import sample_ids
from vit_cifar5m import train as vit

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("toy_run.py")
LONG = ["training.steps=40", "training.log_every=1", "checkpoint.every=0"]


def start(processes, folder, *overrides, script=SCRIPT, **more):
    return Program(script, folder, *overrides, ranks=processes, **more)


def launch(processes, folder, *overrides, **more):
    process = start(processes, folder, *overrides, **more)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


def weights(folder):
    return tensors(newest(folder))


def notes(folder, what, rank):
    return (folder / f"{what}-{rank}").read_text().split("\n")[:-1]


def test_two_processes_train_what_one_does_in_the_same_order(tmp_path):
    """Without dropout, whose draws belong to a process."""
    told = launch_environment("several_nodes", "--num_machines", "1", "--num_processes", "2")
    for processes, environment in ((1, {}), (2, told)):
        (tmp_path / f"notes{processes}").mkdir()
        more = {"TOY_NOTES": tmp_path / f"notes{processes}", **environment}
        launch(processes, tmp_path / f"run{processes}", TOY_DROPOUT=0, **more)
    one, two = weights(tmp_path / "run1"), weights(tmp_path / "run2")
    assert one.keys() == two.keys()
    for name in one:
        if not name.endswith("/calls"):
            torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-7)
    for name in ("metrics.jsonl", "probes.jsonl"):
        first, second = (flat(lines(tmp_path / run, name)) for run in ("run1", "run2"))
        assert second == pytest.approx(first, rel=1e-4, abs=1e-7)
    # Per step of 4 rows the first process reads the first two, the second one the others.
    ids = sample_ids(23, 0, 0, 7 * 4).reshape(7, 2, 2)
    alone = [int(i) for i in notes(tmp_path / "notes1", "ids", 0)]
    assert alone == ids.flatten().tolist()
    rates = notes(tmp_path / "notes1", "rates", 0)
    assert len(rates) == 7
    for rank in (0, 1):
        read = [int(i) for i in notes(tmp_path / "notes2", "ids", rank)]
        assert read == ids[:, rank].flatten().tolist()
        assert notes(tmp_path / "notes2", "rates", rank) == rates  # stepped once, not twice


def flat(value):
    """The numbers of nested dicts and lists, in order; absent ones as -1."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    return [-1 if value is None else value]


def test_two_processes_that_are_killed_go_on_to_the_same_bits(tmp_path):
    overrides = ["training.steps=12", "checkpoint.every=3", "training.log_every=1"]
    launch(2, tmp_path / "whole", *overrides)
    process = start(2, tmp_path / "run", *overrides, TOY_PAUSE=0.2)
    process.wait_for("step 5")
    os.kill(process.pids[0], signal.SIGKILL)  # torchrun then ends the other
    process.communicate(timeout=600)
    assert not (tmp_path / "run/summary.json").exists()
    assert "resuming after step" in launch(2, tmp_path / "run", *overrides)
    assert toy.left_behind(tmp_path / "run") == toy.left_behind(tmp_path / "whole")


def test_two_processes_stop_together_and_one_can_go_on(tmp_path):
    process = start(2, tmp_path / "run", *LONG, TOY_PAUSE=0.2, TOY_DROPOUT=0)
    process.wait_for("step 3")
    os.kill(process.pids[1], signal.SIGTERM)  # one is told, both stop
    process.communicate(timeout=600)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped" and 3 <= summary["step"] < 40
    launch(1, tmp_path / "run", *LONG, TOY_DROPOUT=0)
    launch(1, tmp_path / "whole", *LONG, TOY_DROPOUT=0)
    first, second = (flat(lines(tmp_path / run)) for run in ("whole", "run"))
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)


def test_one_process_observes_or_evaluates_and_none_waits_for_ever(tmp_path):
    """A run with a single evaluation sample, and in the same launch one that observes."""
    file = ROOT / "vit_cifar5m/configs/laptop.yaml"
    words = (
        "model.head_dim=4 model.heads=4 model.layers=2 model.patch_size=16 training.steps=3 "
        "training.batch_size=4 training.observe_every=2 training.observe_samples=5 "
        "data.validation_images=6"
    ).split()
    observing = [str(file), *words, "--run-dir", str(tmp_path / "run2")]
    script = tmp_path / "both.py"
    script.write_text(
        "import toy_run\nfrom vit_cifar5m import train\n"
        f"toy_run.main()\ntrain.EXPERIMENT.main({observing})\n"
    )
    alone = ["training.eval_samples=1", "training.eval_every=1"]
    places = f"{ROOT}{os.pathsep}{SCRIPT.parent}"
    launch(2, tmp_path / "run", *alone, script=script, PYTHONPATH=places)
    vit.EXPERIMENT.run(load(vit.Config, file, words), tmp_path / "run1")
    one, two = (lines(tmp_path / run, "observations.jsonl") for run in ("run1", "run2"))
    assert [line["step"] for line in two] == [0, 2, 3]
    assert flat(two) == pytest.approx(flat(one), rel=1e-4, abs=1e-6)
    for step in (0, 2, 3):
        first, second = (
            load_file(tmp_path / run / f"observations/step_{step}.safetensors")
            for run in ("run1", "run2")
        )
        assert first.keys() == second.keys()
        for name, array in first.items():
            torch.testing.assert_close(second[name], array, rtol=1e-4, atol=1e-6)


def test_every_process_drops_out_for_itself_and_one_of_them_tells_a_refusal(tmp_path):
    """Equal masks everywhere would drop the same units of every share of the batch."""
    launch(2, tmp_path)
    meta = newest(tmp_path) / "meta.json"
    states = [state["torch"] for state in json.loads(meta.read_text())["random"]]
    assert len(states) == 2 and states[0] != states[1]
    process = start(2, tmp_path, "optimizer.beta1=0.5")
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    assert errors.count("optimizer.beta1 0.9 -> 0.5") == 1


@pytest.mark.thorough
def test_accelerate_launches_and_a_signal_to_it_stops_all_with_a_checkpoint(tmp_path):
    """Of two sharded runs: one has a worker for data in each process; the second is stopped, and
    its processes write their parts."""
    script = tmp_path / "both.py"
    script.write_text(
        "import sys, pathlib, sharded_run\n"
        "whole = pathlib.Path(sys.argv[2]).with_name('whole')\n"
        "sharded_run.train(whole, ['training.data_workers=1'])\nsharded_run.main()\n"
    )
    words = ["run", tmp_path / "run", "training.steps=90", "checkpoint.every=0"]
    several = ["--num_machines", "1", "--num_processes", "2"]
    several += ["--main_process_port", "0"]  # one that no other test's launch can have
    command = ["-m", "accelerate.commands.launch", "--config_file"]
    command += [LAUNCH_CONFIGS / "several_nodes_fsdp.yaml", *several, script, *words]
    here = {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "", "TOY_NOTES": tmp_path}
    process = Program(*command, **here, PYTHONPATH=f"{ROOT}{os.pathsep}{SCRIPT.parent}")
    for step in range(1, 6):
        process.wait_for(f"step {step}")
    process.wait_for("step 3")
    process.terminate()  # torchrun tells both; its own exit code is not ours to choose
    process.communicate(timeout=600)
    assert process.returncode != 0
    whole, summary = (
        json.loads((tmp_path / run / "summary.json").read_text()) for run in ("whole", "run")
    )
    assert (whole["status"], summary["status"]) == ("finished", "stopped")
    logged = [line["step"] for line in lines(tmp_path / "whole") if "train_loss" in line]
    assert logged == [1, 2, 3, 4, 5]  # one process writes
    (saved,) = (tmp_path / "run/checkpoints").iterdir()
    assert saved.name == f"step-{summary['step']:08d}" and len(list(saved.glob("shard-*"))) == 2
    read = [len(notes(tmp_path, "ids", rank)) for rank in (0, 1)]
    assert read == [(5 + summary["step"]) * 8 // 2] * 2


def test_the_config_files_are_understood_whole():
    for path in LAUNCH_CONFIGS.iterdir():
        file = load_config_from_file(str(path))
        # Precision is the experiment config's; a second place to set it would not be read.
        assert file.mixed_precision == "no"
        if path.stem != "one_gpu":  # whose one process is told nothing
            launch_environment(path.stem)  # accelerate refuses a key that it does not know
        if path.stem.endswith("sdp"):  # only what `sharding` reads
            read = {"version", "reshard_after_forward", "activation_checkpointing"}
            assert file.fsdp_config.keys() == {f"fsdp_{key}" for key in read}
            assert file.distributed_type == "FSDP"
