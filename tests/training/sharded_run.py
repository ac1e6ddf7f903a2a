"""What a sharded run must be able to do, small; the tests launch it with several processes.

    sharded_run.py check DIR                 parts, update rules, refusals, one of the runs below
    sharded_run.py train DIR                 the runs below, each into its folder
    sharded_run.py run DIR [key=value ...]   one run, exit code as documented; with SLOW_SAVE=STEP
                                             the checkpoint of that step never gets done

Tensors do not divide by two: 131 rows, 1 row, 1 entry. Widths are past Adafactor's 128.
"""

import errno
import math
import os
import re
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import tensor
from torch.distributed.device_mesh import init_device_mesh

from measure.probes import ProbeRecorder
from param_groups import Everett, Muon, Role, Rule, plan
from param_groups.layers import Embedding, LayerNorm, Linear, Multiplied
from tests.run_folders import flip
from tests.training import toy_run as toy
from training import processes, sharding, signals
from training.checkpoints import checkpoint, state
from training.config import parse_overrides, set_keys, validate
from training.errors import UserError, one_line_errors
from training.linear_cross_entropy import linear_cross_entropy
from training.optim import optimizers
from training.settings import RunConfig
from training.task import Task

WIDTH, VOCAB = 130, 131
RULES = (
    Rule("embedding.weight", Role.TOKEN_EMBEDDING),
    Rule("blocks.*.qkv.weight", Role.QKV, parts=(2, 1, 1)),
    Rule("blocks.*.up.weight", Role.MLP_IN),
    Rule("blocks.*.down.weight", Role.MLP_OUT),
    Rule("blocks.*.gain", Role.HIDDEN_BIAS),
    Rule("*norm.weight", Role.NORM_SCALE),
    Rule("readout.weight", Role.READOUT),
)
LOOP = {"steps": 5, "batch_size": 8, "log_every": 1, "eval_every": 3, "eval_batch_size": 2}
SETTINGS = {
    "optimizer": {"lr": 0.01, "weight_decay": 1e-3, "decay_mode": "independent"},
    "schedule": {"warmup_steps": 2},
    "training": {**LOOP, "eval_samples": 5},
    "checkpoint": {"every": 0, "minutes": None, "final": True},
}
# Five evaluation samples in batches of 2: two batches in the first process, one in the second.
RUNS = {
    **{name: [f"optimizer.name={name}"] for name in optimizers.OPTIMIZERS},
    "sgd": ["optimizer.name=sgd", "optimizer.lr=0.3"],
    "muon_fused": ["optimizer.name=muon"],
    "accumulated": ["training.micro_batch_size=1", "optimizer.clip_norm=0.05"],
    "one_sample": ["training.eval_samples=1", "training.steps=2", "training.eval_every=1"],
    "bf16": ["training.precision=bf16", "optimizer.name=sgd", "optimizer.lr=0.3"],
    "fp16": ["training.precision=fp16", "optimizer.name=sgd", "optimizer.lr=19.2"],
}


class Block(Multiplied):
    """Two dense layers, a norm, and one number that scales what they add; before them three
    matrices in one tensor, if `fused`, of which a cut in two or four parts goes through one."""

    def __init__(self, fused=False):
        super().__init__()
        self.norm = LayerNorm(WIDTH)
        self.qkv = Linear(WIDTH, 2 * WIDTH) if fused else None
        self.up, self.down = Linear(WIDTH, 1), Linear(1, WIDTH)
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, x):
        if self.qkv is not None:
            query, key, value = self.qkv(self.norm(x)).split((WIDTH, WIDTH // 2, WIDTH // 2), -1)
            x = x + query * torch.cat([torch.sigmoid(key), value], -1)
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * (1 + self.gain * self.multiplier)


class Model(nn.Module):
    """Embedding, blocks, norm, readout; the summed cross-entropy of the next token."""

    def __init__(self, scale=1.0, fused=False):
        super().__init__()
        self.embedding = Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(2))
        self.norm = LayerNorm(WIDTH)
        self.readout = Linear(WIDTH, VOCAB)
        self.scale = scale

    def forward(self, ids):
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        readout = self.readout  # whose weight is used without calling it
        loss = linear_cross_entropy(
            self.norm(x).flatten(0, 1), readout.weight, ids[:, 1:].flatten(), readout.multiplier
        )
        return loss * self.scale


def build_task(overrides, meta=False, scale=1.0, fused=False):
    config = validate(RunConfig, set_keys(SETTINGS, parse_overrides(overrides)), "sharded")
    with torch.device("meta" if meta else "cpu"):
        model = Model(scale, fused)
    name, keys = config.optimizer.name, {"qk_exponent": -0.5}
    rules = [rule for rule in RULES if fused or rule.role is not Role.QKV]
    inner = Everett("mup", WIDTH, WIDTH / 4, "adam" if name == "muon" else name, **keys)
    prescription = Muon(inner) if name == "muon" else inner
    return Task(
        config=config,
        model=model,
        plan=plan(model, rules, prescription, **config.optimizer.numbers),
        train_data=toy.Rows(1, noted=True, words=VOCAB),
        eval_data=toy.Rows(2, words=VOCAB),
        loss=lambda model, batch: model(batch),
        # Rows count differently, so that a mean of the processes' means would show.
        count=lambda batch: (batch[:, 0] % 3 + 1).sum(),
        recorders=[ProbeRecorder()],
    )


def train(run_dir, overrides, stop_at=None, pause=0.0, **more):
    """Trains in this process; returns the summary."""
    return toy.run_task(run_dir, build_task(overrides, **more), pause, stop_at)


def train_all(folder):
    """Every one of `RUNS`, the model with or without memory when it is handed over."""
    for index, (name, overrides) in enumerate(RUNS.items()):
        scale = 1 / 64 if name == "fp16" else 1.0
        fused = name == "muon_fused"
        train(folder / name, overrides, scale=scale, meta=index % 2 == 0, fused=fused)


def train_on(folder):
    """One of `RUNS` stopped after step 3, and on from step 2 as that checkpoint is damaged.

    Of Adafactor, whose state has whole shapes, shapes without an axis, and numbers.
    """
    overrides = [*RUNS["adafactor"], "checkpoint.every=2"]
    assert train(folder, overrides, stop_at=3)["step"] == 3
    if distributed.get_rank() == 0:
        flip(max(folder.glob("checkpoints/step-00000003/shard-00002-*")))
    distributed.barrier()
    assert train(folder, overrides)["resumed_from"] == [2]
    assert (folder / "checkpoints/damaged-step-00000003").is_dir()


def check_parts():
    """No process holds more than its part of any tensor, and together they are what one draws."""
    whole = build_task([])
    whole.plan.initialise(whole.model, 3)
    wanted = dict(whole.model.named_parameters())
    world, rank = distributed.get_world_size(), distributed.get_rank()
    for meta in (False, True):
        task = build_task([], meta=meta)
        sharding.shard(task.model, torch.device("cpu"), sharding.requested())
        assert all(p.is_meta == meta for p in task.model.parameters())
        sharding.allocate(task.model, torch.device("cpu"))
        task.plan.initialise(task.model, 3)
        units = [type(m).__name__ for m in task.model.modules() if hasattr(m, "unshard")]
        assert units == ["FSDPModel", "FSDPBlock", "FSDPBlock"]
        for group in task.plan.groups(task.model):
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                assert group["lr"] == task.plan[name].lr
                part = wanted[name].chunk(world)[rank : rank + 1] or [wanted[name][:0]]
                assert torch.equal(sharding.local(parameter), part[0]), name
                assert torch.equal(parameter.full_tensor(), wanted[name]), name
                most = 4 * math.ceil(len(parameter) / world) * parameter[0].numel()
                assert sharding.local(parameter).untyped_storage().nbytes() <= most


SHAPES = {"tall": (131, 129), "wide": (129, 140), "stack": (3, 128, 130), "deep": (130, 2, 128)}
SHAPES |= {"vector": (7,), "row": (1, 5), "number": (1,), "small": (3, 4)}


# What Muon is told of the matrices in these: parts that a cut goes through, of unequal rates.
MATRICES = {
    "tall": {"parts": ((60, 0.5), (40, 2.0), (31, 1.0))},
    "wide": {},
    "stack": {"layout": "experts", "parts": ((64, 0.5), (64, 2.0))},
    "deep": {"layout": "linear"},
    "small": {"layout": "transposed", "parts": ((1, 0.5), (3, 2.0))},
}


def compare_optimizers(folder):
    """Each rule, five steps: sharded tensors end where whole ones do, with their state."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for name in optimizers.OPTIMIZERS:
        ends = {}
        for kind in ("whole", "sharded"):
            tensors = build_tensors(mesh if kind == "sharded" else None)
            ends[kind] = step_all(name, tensors, folder / name / kind)
        assert ends["whole"].keys() == ends["sharded"].keys()
        for path, wanted in ends["whole"].items():
            got = ends["sharded"][path]
            close = {"rtol": 1e-5, "atol": 2e-6 * wanted.abs().max().item()}
            torch.testing.assert_close(
                got, wanted, **close, msg=lambda found, at=f"{name} {path}": f"{at}: {found}"
            )


def check_loss_scale():
    """An overflow in one process's part of a gradient halves the scale of all, once."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    tensors = build_tensors(mesh)
    optimizer = torch.optim.SGD(tensors.values())
    scaler = torch.amp.GradScaler("cpu")
    for step, worst in enumerate((2.0**10, math.inf, 2.0**10)):
        scaler.scale(torch.ones(()))
        for key, parameter in tensors.items():
            gradient = torch.ones(SHAPES[key])
            gradient.view(-1)[0] = worst if key == "tall" else 1.0
            parameter.grad = place(gradient, parameter.device_mesh)
        scaler.unscale_(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0**15 if step else 2.0**16)


def build_tensors(mesh):
    """Parameters of all shapes, their halves of different size, sharded over a mesh if given."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator) * 0.1
        values[: (len(values) + 1) // 2] *= 20
        tensors[name] = nn.Parameter(place(values, mesh))
    return tensors


def place(values, mesh):
    if mesh is None:
        return values
    return tensor.distribute_tensor(values, mesh, [tensor.Shard(0)])


def step_all(name, tensors, folder):
    """Five steps with gradients that differ between halves; saves and loads state on the way."""
    numbers = {"lr": 0.02, "initial_lr": 0.02, "eps": 1e-9, "weight_decay": 0.1}
    told = MATRICES if name == "muon" else {}
    groups = [
        {"params": [tensors[key]], "param_names": [key], "optimizer": "muon", **numbers, **more}
        for key, more in told.items()
    ]
    rest = {key: tensor for key, tensor in tensors.items() if key not in told}
    groups += [{"params": list(rest.values()), "param_names": list(rest), **numbers}]
    optimizer = optimizers.build(name, groups)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for key, parameter in tensors.items():
            gradient = torch.randn(SHAPES[key], generator=generator)
            gradient[: (len(gradient) + 1) // 2] *= 1e-3
            if key == "small":
                gradient *= 1e-20 if step else 0.0
            if key == "tall":
                gradient[-1] *= 1e12
            mesh = parameter.device_mesh if sharding.is_sharded(parameter) else None
            parameter.grad = place(gradient, mesh)
        optimizer.step()
        if step == 2:
            saved = state.optimizer_tensors(optimizer)
            saved = {f"optimizer/{path}": tensor for path, tensor in saved.items()}
            path = checkpoint.save(folder, step, saved, {}, 1)
            optimizer = optimizers.build(name, groups)
            state.load_optimizer(optimizer, checkpoint.load(path))
    ends = {**tensors, **state.optimizer_tensors(optimizer)}
    return {
        key: (value.full_tensor() if sharding.is_sharded(value) else value).detach()
        for key, value in ends.items()
    }


def expect_refusals(folder):
    """Each refused with one clear line, in every process, before anything is trained."""
    with pytest.raises(UserError, match="training.probe_every is not supported with sharding"):
        train(folder / "probes", ["training.probe_every=2"])
    task = build_task([])
    task.model.scalar = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match=r"'scalar' is a scalar.*shape \(1,\)"):
        sharding.shard(task.model, torch.device("cpu"), sharding.requested())
    task = build_task([])
    task.model.register_buffer("mask", torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="buffer 'mask' is on the meta device"):
        sharding.allocate(task.model, torch.device("cpu"))
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == 1:
            patch.setattr(checkpoint, "checksum", mock.Mock(side_effect=full))
        first = distributed.get_rank() == 0
        with pytest.raises(UserError if first else SystemExit) as refusal:
            train(folder / "full", RUNS["sgd"])
    assert not first or re.search(
        "step-00000005: cannot write the checkpoint: No space left on device; none was there yet",
        str(refusal.value),
    )
    distributed.barrier()
    assert not list((folder / "full/checkpoints").iterdir())
    for key, value, wanted in (("version", "1", "2"), ("offload_params", "true", "false")):
        message = f"fsdp_{key}: {value} is not supported; expected {wanted}"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=message):
            patch.setenv(f"FSDP_{key.upper()}", value)
            sharding.requested()


def slow_down(name):
    """Lets the second process take for ever to write its file of the checkpoint of this name."""
    checksum = checkpoint.checksum

    def slow(path):
        if name in path.parent.name and "shard-00002" in path.name:
            time.sleep(1000)
        return checksum(path)

    checkpoint.checksum = slow


def main():
    command, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    processes.state()
    if "SLOW_SAVE" in os.environ:
        slow_down(f"step-{int(os.environ['SLOW_SAVE']):08d}")
    with one_line_errors(OSError):
        if command == "check":
            check_parts()
            compare_optimizers(Path(rest[0]))
            check_loss_scale()
            expect_refusals(Path(rest[0]))
            train(Path(rest[0]) / "adafactor", RUNS["adafactor"])
        elif command == "train":
            train_all(Path(rest[0]))
            train_on(Path(rest[0]) / "on")
        elif train(Path(rest[0]), rest[1:], pause=0.05)["status"] == "stopped":
            raise SystemExit(signals.STOPPED)


if __name__ == "__main__":
    main()
