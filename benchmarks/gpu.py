"""Whether a device computes what the tests hold of a CPU: the loss, the rules, resuming, sharding.

    python -m benchmarks.gpu --device cuda

What runs compiled, in bf16 or in several passes only off the CPU is compared with float64. Ends
with 1 if a row is not within its bound. gpu.sh runs this before it times anything. On a CPU what a
GPU compiles is compiled, too, into C++ in place of Triton.
"""

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import distributed

from benchmarks import harness, throughput
from training import linear_cross_entropy, loop, sharding
from training.optim import adafactor, optimizers

SMALL = {"width": 64, "layers": 2, "context": 32, "head_dim": 32, "vocab": 257, "batch": 8}
RANGE = (("adam_atan2", 1e-34), ("adam_atan2", 1e37))
SMALL |= {"steps": 2, "warmup": 1, "free": 0, "threads": 2, "optimizer": "adam", "mode": "fp32"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(argv)


@contextlib.contextmanager
def compiled_everywhere() -> Iterator[None]:
    """The loss and the rules are compiled on a CPU, too; runs there take them as written."""
    kinds = {n: replace(k, fused_on=("cpu", "cuda")) for n, k in optimizers.OPTIMIZERS.items()}
    with (
        mock.patch.multiple(linear_cross_entropy, _EAGER=(), _ANY_SIZE=()),
        mock.patch.object(optimizers, "TORCHS_KERNEL", ()),
        mock.patch.dict(optimizers.OPTIMIZERS, kinds),
    ):
        yield


def losses(device: str) -> Iterator[dict[str, Any]]:
    """Loss and gradients beside float64, of the values that the products see."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=generator).bfloat16().double()
    weight = torch.randn(5003, 64, generator=generator).bfloat16().double() * 0.25
    targets = torch.randint(5003, (300,), generator=generator)
    targets[::7] = -100
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    exact = F.cross_entropy(x @ weight.T, targets, ignore_index=-100, reduction="sum")
    wanted = (exact, *torch.autograd.grad(exact, inputs))
    for precision, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        ours = [tensor.detach().float().to(device).requires_grad_() for tensor in inputs]
        with torch.autocast(device, precision, enabled=precision is torch.bfloat16):
            loss = linear_cross_entropy.linear_cross_entropy(*ours, targets.to(device))
        for what, got, reference in zip(
            ("loss", "gradient of x", "gradient of the weight"),
            (loss, *torch.autograd.grad(loss, ours)),
            wanted,
            strict=True,
        ):
            yield row(f"{what}, {precision}", got.cpu().double(), reference, bound)


def rules(device: str) -> Iterator[dict[str, Any]]:
    """Every update rule, five steps, beside the eager one in float64 on the CPU; adam_atan2 with
    gradients at both ends of float32's range, too."""
    shapes = [(160, 256), (256, 160), (300,)]
    for name, size in (*((name, 1.0) for name in optimizers.OPTIMIZERS), *RANGE):
        ends = []
        for place, dtype in (("cpu", torch.float64), (device, torch.float32)):
            generator = torch.Generator().manual_seed(0)
            params = [torch.randn(shape, generator=generator).to(place, dtype) for shape in shapes]
            kinds = ("muon", "muon", "adam") if name == "muon" else (name,) * 3
            groups = [
                {"params": [p.requires_grad_()], "lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
                | {"optimizer": kind}
                for p, kind in zip(params, kinds, strict=True)
            ]
            fused = False if dtype is torch.float64 else None
            optimizer = optimizers.build(name, groups, fused=fused)
            for _ in range(5):
                for p in params:
                    p.grad = (torch.randn(p.shape, generator=generator) * size).to(place, dtype)
                optimizer.step()
            ends.append(torch.cat([p.detach().cpu().double().flatten() for p in params]))
        # Muon's products are bfloat16 on a GPU.
        at = f", gradients of {size:g}" if size != 1 else ""
        yield row(f"{name}, five steps{at}", *ends[::-1], 0.02 if name == "muon" else 1e-5)


def compiling(device: str) -> Iterator[dict[str, Any]]:
    """Whether what has run so far ran compiled: without a compiler it does as it is written."""
    rules = (optimizers._atan2, optimizers._param_scaling)
    for one in (linear_cross_entropy._two_passes, *rules, adafactor._factored):
        yield {"check": f"{one.function.__name__} is compiled", "passes": one.runs_compiled}


def resuming(device: str) -> Iterator[dict[str, Any]]:
    """A run that is cut off after its third step beside one that is not, in bytes."""

    def cut(step: int, steps: int, loss: float | None) -> None:
        if step == 3:
            raise KeyboardInterrupt

    every = {"checkpoint": {"every": 2, "minutes": None}}
    case = {**SMALL, "device": device}
    with tempfile.TemporaryDirectory() as folder:
        whole, run = Path(folder, "whole"), Path(folder, "run")
        for path, progress in ((whole, None), (run, cut), (run, None)):
            with contextlib.suppress(KeyboardInterrupt):
                loop.train(throughput.build_task(case, lambda: None, **every), path, progress)
        logs = [(path / "metrics.jsonl").read_bytes() for path in (whole, run)]
        yield {"check": "resumed to the same bytes", "passes": logs[0] == logs[1]}


def sharded(device: str) -> Iterator[dict[str, Any]]:
    """The gradient of a model that is sharded over a group of one, beside the model's own."""
    case = {**SMALL, "device": device}
    gradients = []
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/group",
            rank=0,
            world_size=1,
        )
        for shards in (False, True):
            task = throughput.build_task(case, lambda: None)
            task.plan.initialise(task.model, 0)
            if shards:
                sharding.shard(task.model, torch.device(device), sharding.Sharding())
            task.model.to(device)
            rows = [torch.stack(part).to(device) for part in zip(*task.train_data[:8], strict=True)]
            task.loss(task.model, rows).backward()
            parts = [sharding.local(p.grad).cpu().flatten() for p in task.model.parameters()]
            gradients.append(torch.cat(parts).double())
        distributed.destroy_process_group()
    yield row("gradient of a sharded group of one", gradients[1], gradients[0], 1e-5)


def row(check: str, got: torch.Tensor, wanted: torch.Tensor, bound: float) -> dict[str, Any]:
    """The relative error in the L2 norm; what is not finite does not pass."""
    got, wanted = got.detach(), wanted.detach()
    error = float((got - wanted).norm() / wanted.norm())
    passes = math.isfinite(error) and error <= bound
    return {"check": check, "error": error, "bound": bound, "passes": passes}


def main(argv: list[str] | None = None) -> None:
    """Prints all checks as JSON."""
    args = parse(argv)
    checks = (losses, rules, compiling, resuming, sharded)
    with compiled_everywhere():
        found = [made for check in checks for made in check(args.device)]
    harness.show(args, args.device, found)
    if failed := [made["check"] for made in found if not made["passes"]]:
        raise SystemExit(f"error: not as on the CPU: {', '.join(failed)}")


if __name__ == "__main__":
    main()
