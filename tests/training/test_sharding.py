"""Two processes that share every tensor (FSDP2) train what one process does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import load_file

from tests.training import sharded_run as small
from training import sharding
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("sharded_run.py")
FILES = ROOT / "scripts/accelerate"
# The files as they are, with as many processes as a test has.
ONE_NODE = ["one_node_8gpu_fsdp.yaml", "--num_processes", "2", "--main_process_port", "0"]
NODES = ["several_nodes_fsdp.yaml", "--num_machines", "1", "--num_processes", "2",
         "--main_process_port", "0"]  # fmt: skip


def start(options, *arguments):
    """Two processes, by accelerate and one of its config files."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("accelerate"), "launch", "--config_file",
         FILES / options[0], *options[1:], SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def launch(options, *arguments):
    process = start(options, *arguments)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return errors


def wait_for(process, step):
    while f"step {step}\n" != process.stdout.readline():
        assert process.poll() is None, process.stderr.read()


def children(pid):
    """The processes that the launcher has started."""
    out = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(line) for line in out.split()]


def saved(run):
    return load_file(sorted(run.glob("checkpoints/step-*"))[-1] / "state.safetensors")


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(run, wanted, rtol):
    """Equal tensors, under equal names and in equal shapes, and equal lines, up to rounding."""
    tensors, whole = saved(run), saved(wanted)
    assert tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        assert tensors[name].dtype == tensor.dtype
        size = tensor.double().abs().max().item()
        torch.testing.assert_close(
            tensors[name], tensor, rtol=rtol, atol=rtol * size,
            msg=lambda found, name=name: f"{name}: {found}",
        )  # fmt: skip
    assert len(lines(run)) == len(lines(wanted))
    for line, expected in zip(lines(run), lines(wanted)):
        assert line == pytest.approx(expected, rel=rtol)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of the script's runs, made by two processes and by this one."""
    folder = tmp_path_factory.mktemp("runs")
    launch(ONE_NODE, "train", folder / "two")
    small.train_all(folder / "one")
    return folder


@pytest.mark.parametrize("name", small.RUNS)
def test_two_processes_that_share_every_tensor_train_what_one_does(runs, name):
    """Every optimiser, micro-batches, clipping, uneven and missing evaluation samples."""
    # Adam turns the rounding of tiny gradients into steps; bf16 has 2 to 3 digits.
    rtol = 1e-2 if name == "bf16" else 1e-4
    assert_same_run(runs / "two" / name, runs / "one" / name, rtol)


def test_the_runs_are_sensitive_to_what_is_compared(runs):
    """Clipping has clipped, and training has moved each tensor by much more than the tolerance."""
    logged = [line for line in lines(runs / "one/accumulated") if "lr_factor" in line]
    norms = [line["gradient_norm"] for line in logged]
    assert min(norms) > 2 * 0.05
    task = small.build_task([])
    task.plan.initialise(task.model, 0)
    for name in ("sgd", "adam", "adam_param_scaling", "adafactor", "adam_atan2"):
        weights = saved(runs / "one" / name)
        for key, first in task.model.named_parameters():
            last = weights[f"model/{key}"]
            assert (last - first).abs().max() > 1e-3 * last.abs().max(), (name, key)


def test_parts_update_rules_and_refusals(tmp_path):
    launch(NODES, "check", tmp_path)


def test_a_run_goes_on_in_other_numbers_of_processes(tmp_path):
    """From one to two, killed there, on as two, stopped there, and finished by one."""
    overrides = ["optimizer.name=adafactor", "training.steps=40", "checkpoint.every=2"]
    run = tmp_path / "run"
    assert small.train(run, overrides, stop_at=3)["step"] == 3
    process = start(ONE_NODE, "run", run, *overrides)
    wait_for(process, 8)
    os.kill(children(process.pid)[0], signal.SIGKILL)  # the launcher then ends the other
    process.communicate(timeout=60)
    assert not (run / "summary.json").exists()
    process = start(ONE_NODE, "run", run, *overrides)
    wait_for(process, 14)
    os.kill(children(process.pid)[1], signal.SIGTERM)  # one is told, both stop
    process.communicate(timeout=60)
    stopped = json.loads((run / "summary.json").read_text())
    assert stopped["status"] == "stopped" and 14 <= stopped["step"] < 40
    assert stopped["resumed_from"][0] == 3 and stopped["resumed_from"][1] >= 6
    finished = small.train(run, overrides)
    assert finished["resumed_from"][2:] == [stopped["step"]]
    small.train(tmp_path / "whole", overrides)
    assert_same_run(run, tmp_path / "whole", 1e-4)


def test_accelerate_knows_every_key_of_the_config_files():
    known = {action.dest for action in launch_command_parser()._actions}
    for name in ("one_node_8gpu_fsdp", "several_nodes_fsdp"):
        # Refuses a key that it has no field for.
        file = load_config_from_file(str(FILES / f"{name}.yaml"))
        assert file.distributed_type == "FSDP" and file.fsdp_config["fsdp_version"] == 2
        assert set(file.fsdp_config) <= known
        # Only what `sharding` reads: a key that nothing reads would promise something.
        assert set(file.fsdp_config) == {
            "fsdp_version", "fsdp_reshard_after_forward", "fsdp_activation_checkpointing",
        }  # fmt: skip


def test_one_process_is_not_sharded(monkeypatch):
    assert sharding.requested() is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="a single process has nothing to shard"):
        sharding.requested()


def test_units_are_the_outermost_members_of_lists():
    nn = torch.nn
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model = nn.Module()
    model.body = nn.Module()
    model.body.blocks = nn.ModuleList([Holder(block), Holder(block), nn.Dropout()])
    model.heads = nn.ModuleList([nn.ModuleList([nn.Linear(2, 1)])])
    model.readout = nn.Linear(2, 2)
    units = list(sharding.units(model))
    assert units == [*list(model.body.blocks)[:2], model.heads[0][0]]


class Holder(torch.nn.Module):
    """A block with a list inside, which is not cut again."""

    def __init__(self, inner):
        super().__init__()
        self.inner = torch.nn.ModuleList([inner])


def test_a_container_s_own_members_are_units():
    blocks = [torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2)]
    assert list(sharding.units(torch.nn.Sequential(*blocks))) == [blocks[0], blocks[2]]


def test_buffers_keep_their_values_when_parameters_get_memory():
    with torch.device("meta"):
        model = torch.nn.Linear(3, 3)
    model.register_buffer("table", torch.arange(2000.0), persistent=False)
    sharding.allocate(model, torch.device("cpu"))
    assert not model.weight.is_meta and torch.equal(model.table, torch.arange(2000.0))


def test_a_value_that_version_2_does_not_know_is_one_line(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD")
    monkeypatch.setattr(sharding.processes, "state", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(UserError, match="fsdp_config: .*; expected true or false"):
        sharding.requested()
