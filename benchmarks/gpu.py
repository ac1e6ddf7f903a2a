"""Whether a device computes what the tests hold of a CPU: the loss, the rules, resuming, sharding.

    python -m benchmarks.gpu --device cuda

What runs compiled, in bf16 or in several passes only off the CPU is compared with float64 and with
the CPU. Ends with 1 if a row is not within its bound. gpu.sh runs this before it times anything.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed

from benchmarks import harness, throughput
from training import loop, sharding
from training.linear_cross_entropy import linear_cross_entropy
from training.optim import optimizers

SMALL = {"width": 64, "layers": 2, "context": 32, "head_dim": 32, "vocab": 257, "batch": 8}
SMALL |= {"steps": 2, "warmup": 1, "free": 0, "threads": 2, "optimizer": "adam", "mode": "fp32"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(argv)


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
            loss = linear_cross_entropy(*ours, targets.to(device))
        for what, got, reference in zip(
            ("loss", "gradient of x", "gradient of the weight"),
            (loss, *torch.autograd.grad(loss, ours)),
            wanted,
            strict=True,
        ):
            yield row(f"{what}, {precision}", got.cpu().double(), reference, bound)


def rules(device: str) -> Iterator[dict[str, Any]]:
    """Every update rule beside the CPU's after five steps."""
    for name in optimizers.OPTIMIZERS:
        ends = []
        for place in ("cpu", device):
            generator = torch.Generator().manual_seed(0)
            shapes = [(160, 256), (256, 160), (300,)]
            params = [torch.randn(shape, generator=generator).to(place) for shape in shapes]
            kinds = ("muon", "muon", "adam") if name == "muon" else (name,) * 3
            groups = [
                {"params": [p.requires_grad_()], "lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
                | {"optimizer": kind}
                for p, kind in zip(params, kinds, strict=True)
            ]
            optimizer = optimizers.build(name, groups)
            for _ in range(5):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(place)
                optimizer.step()
            ends.append(torch.cat([p.detach().cpu().double().flatten() for p in params]))
        # Muon's products are bfloat16 on a GPU.
        yield row(f"{name}, five steps", ends[1], ends[0], 0.02 if name == "muon" else 1e-5)


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
    checks = (losses, rules, resuming, sharded)
    found = [made for check in checks for made in check(args.device)]
    harness.show(args, args.device, found)
    if failed := [made["check"] for made in found if not made["passes"]]:
        raise SystemExit(f"error: not as on the CPU: {', '.join(failed)}")


if __name__ == "__main__":
    main()
