"""Several processes that share every tensor (FSDP2) train what one process does."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.processes import Program, launch_environment
from tests.run_folders import flip, lines, newest, tensors
from tests.training import sharded_run as small
from training import sharding
from training.checkpoints import checkpoint
from training.errors import Damaged

pytestmark = pytest.mark.xdist_group("sharding")  # the runs are made once

SCRIPT = Path(__file__).with_name("sharded_run.py")
# The files as they are, with as many processes as a test has.
ONE_NODE = ["one_node_8gpu_fsdp", "--num_processes", "2"]
FOUR = ["several_nodes_fsdp", "--num_processes", "4"]
ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(options, *arguments, **more):
    """The processes that accelerate would start with one of its config files."""
    environment = {**launch_environment(*options), **ALONE, **more}
    return Program(SCRIPT, *arguments, ranks=int(options[2]), **environment)


def saved(run):
    return tensors(newest(run))


def assert_same_run(run, wanted, rtol):
    """Equal tensors, under equal names and in equal shapes, and equal lines, up to rounding."""
    found, whole = saved(run), saved(wanted)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype
        close = {"rtol": rtol, "atol": rtol * tensor.double().abs().max().item()}
        torch.testing.assert_close(
            found[name], tensor, **close, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert len(lines(run)) == len(lines(wanted))
    for line, expected in zip(lines(run), lines(wanted), strict=True):
        assert line == pytest.approx(expected, rel=rtol)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of the script's runs, made by two processes and by this one."""
    folder = tmp_path_factory.mktemp("runs")
    process = start(ONE_NODE, "train", folder / "two")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    small.train_all(folder / "one")
    return folder


@pytest.mark.parametrize("name", small.RUNS)
def test_two_processes_that_share_every_tensor_train_what_one_does(runs, name):
    """Every optimiser, micro-batches, clipping, uneven and missing evaluation samples."""
    # Adam turns the rounding of tiny gradients into steps; bf16 has 2 to 3 digits, fp16 3.
    rtol = {"bf16": 1e-2, "fp16": 1e-2}.get(name, 1e-4)
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


def test_a_resumed_run_ends_with_the_same_bits(runs):
    """Stopped, and its newest checkpoint damaged: on from the one before."""
    ends = runs / "two/on", runs / "two/adafactor"
    resumed, whole = map(saved, ends)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    assert lines(ends[0]) == lines(ends[1])
    states = [json.loads((newest(run) / "meta.json").read_text())["random"] for run in ends]
    assert states[0] == states[1] and len(states[0]) == 2


def test_every_process_writes_its_parts_and_nothing_is_pickled(runs):
    files = [path for path in newest(runs / "two/adam").iterdir() if path.name.startswith("shard-")]
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    suffixes = {path.suffix for path in newest(runs / "two/adam").iterdir()}
    assert suffixes == {".json", ".safetensors"}


def part(path, number):
    return next(path.glob(f"shard-0000{number}-*"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(part(path, 2)), "shard-00002.*differs from what was written"),
        (lambda path: part(path, 2).unlink(), "No such file or directory.*shard-00002"),
        (lambda path: flip(path / "meta.json"), "meta.json: differs"),
    ],
)
def test_a_damaged_part_is_named(runs, tmp_path, damage, message):
    path = shutil.copytree(newest(runs / "two/adafactor"), tmp_path / "step-00000005")
    os.mkfifo(path / "shard-00003-other.safetensors")  # is not listed, and nobody waits for it
    assert tensors(path).keys() == saved(runs / "two/adafactor").keys()
    damage(path)
    with pytest.raises(Damaged, match=message):
        checkpoint.check(path)


def test_parts_update_rules_loss_scales_and_refusals(runs, tmp_path):
    """In four parts, some without a row; a training run there, too."""
    process = start(FOUR, "check", tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert_same_run(tmp_path / "adafactor", runs / "one/adafactor", 1e-4)


def test_a_run_goes_on_in_other_numbers_of_processes(tmp_path):
    """From one to two, killed while they save, on as two, stopped there, and finished by one."""
    overrides = ["optimizer.name=adafactor", "training.steps=40", "checkpoint.every=2"]
    run = tmp_path / "run"
    assert small.train(run, overrides, stop_at=3)["step"] == 3
    process = start(ONE_NODE, "run", run, *overrides, SLOW_SAVE="8")
    process.wait_for("step 8\n")
    while not list(run.glob("checkpoints/.writing-step-00000008/shard-00002-*")):
        assert process.poll() is None, process.files[1].read_text()
        time.sleep(0.01)
    for pid in process.pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=600)
    assert not (run / "summary.json").exists() and newest(run).name == "step-00000006"
    process = start(ONE_NODE, "run", run, *overrides)
    process.wait_for("step 14\n")
    os.kill(process.pids[1], signal.SIGTERM)  # one is told, both stop
    process.communicate(timeout=600)
    stopped = json.loads((run / "summary.json").read_text())
    assert stopped["status"] == "stopped" and 14 <= stopped["step"] < 40
    assert stopped["resumed_from"] == [3, 6]
    assert not list((run / "checkpoints").glob(".*"))
    finished = small.train(run, overrides)
    assert finished["resumed_from"][2:] == [stopped["step"]]
    small.train(tmp_path / "whole", overrides)
    assert_same_run(run, tmp_path / "whole", 1e-4)


def test_xdist_keeps_a_group_in_one_process(request):
    """Else every process would make the runs."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@sharding")


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


def test_ties_and_the_values_of_buffers_stay_when_parameters_get_memory():
    with torch.device("meta"):
        model = torch.nn.ModuleList([torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)])
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.arange(2000.0), persistent=False)
    sharding.allocate(model, torch.device("cpu"))
    assert model[1].weight is model[0].weight and not model[0].weight.is_meta
    assert torch.equal(model.table, torch.arange(2000.0))
