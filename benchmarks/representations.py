"""What one observation of the representations costs: time against a training step, and memory.

    python -m benchmarks.representations                         # about a minute on one core
    python -m benchmarks.representations --heads 8 32 --contexts 64 512 --samples 8
    python -m benchmarks.representations --experiment vit_cifar5m --contexts 16 64
    python -m benchmarks.representations --device cuda --heads 32 128 --contexts 512

Trains nanolm_c4's decoder (muP, Adam, float32) on random rows, or vit_cifar5m's Vision Transformer
(laptop.yaml, SGD) on drawn images of T = 16, 64 or 256 tokens; a run that observes every k steps
pays 1/k of an observation. Parts: drawing the initial state again, a capture of one state, and the
whole observation with its arrays. Every case has its own process. Peak memory is that of the
timed steps and observations: the process's resident set above what it had before the model was
built; on a GPU the allocator's own peak. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import harness

PARTS = ("training_step", "forward", "initial_state", "capture", "observation")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--experiment", choices=("nanolm_c4", "vit_cifar5m"), default="nanolm_c4")
    add("--heads", type=int, nargs="+", default=[4, 16], metavar="H")
    add(
        "--contexts",
        type=int,
        nargs="+",
        default=[64, 256],
        metavar="T",
        help="tokens; of vit_cifar5m 4, 16, 64, 256 or 1024",
    )
    add("--head-dim", type=int, default=16, metavar="N")
    add("--layers", type=int, default=4)
    add("--vocab", type=int, default=1024)
    add("--batch", type=int, default=16, help="rows per training step")
    add("--samples", type=int, default=8, help="rows that an observation sees")
    add("--repeats", type=int, default=5, help="timings of every part")
    add("--threads", type=int, default=1)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    harness.add_case(parser)
    options = parser.parse_args(argv)
    patches = {(32 // side) ** 2 for side in (1, 2, 4, 8, 16)}
    if options.experiment == "vit_cifar5m" and not patches.issuperset(options.contexts):
        parser.error(
            f"--contexts {options.contexts}: square patches of 32 x 32 pixels make "
            f"{', '.join(map(str, sorted(patches)))} tokens; use these"
        )
    return options


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of every part, and the peaks of training and of observing."""
    import torch

    from measure import observations
    from measure.representations import capture

    device = case["device"]
    start_mb = 0.0 if device == "cuda" else harness.resident_mb()
    task, step = (_decoder if case["experiment"] == "nanolm_c4" else _vit)(case)
    batch = observations.eval_batch(task, case["samples"], torch.device(device))
    parts: dict[str, Callable[[], object]] = {
        "training_step": step,
        "forward": lambda: _forward(task, batch),
        "initial_state": lambda: observations.initial_state(task),
        "capture": lambda: capture(observations.current_state(task), batch, task.forward),
        "observation": lambda: observations.observe(
            observations.initial_state(task),
            observations.current_state(task),
            batch,
            observations.forward_of(task),
        ),
    }
    ms, peaks = {}, {}
    for part, function in parts.items():
        function()
        harness.reset_peak(device)
        ms[part] = [harness.milliseconds(function, device) for _ in range(case["repeats"])]
        peaks[part] = harness.peak_mb(device) - start_mb
    parameters = sum(p.numel() for p in task.model.parameters())
    return {"ms": ms, "peak_mb": peaks, "parameters": parameters}


def _vit(case: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """A Vision Transformer's task on drawn images, and its training step."""
    import torch

    from training import task as tasks
    from training.config import load
    from vit_cifar5m import train
    from vit_cifar5m.config import Config

    words = [
        f"model.patch_size={32 // math.isqrt(case['context'])}",
        "data.validation_images=256",
        f"training.batch_size={case['batch']}",
        "prescription.alpha_attention=0.5",
        *(f"model.{key}={case[key]}" for key in ("heads", "head_dim", "layers")),
    ]
    config = load(Config, harness.ROOT / "vit_cifar5m/configs/laptop.yaml", words)
    task = train.build_task(config)
    task.model.to(case["device"])
    tasks.initialise(task)
    optimizer = tasks.build_optimizer(task)
    images = [task.train_data[i] for i in range(case["batch"])]
    batch = [tensor.to(torch.device(case["device"])) for tensor in task.collate(images)]

    def step() -> None:
        (task.loss(task.model, batch) / case["batch"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return task, step


def _decoder(case: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """A decoder's task on random rows, and its training step."""
    import torch

    from nanolm_c4 import train
    from training import task as tasks

    config = harness.decoder_config(case | {"width": case["heads"] * case["head_dim"]})
    model = train.build_model(config, case["vocab"]).to(case["device"])
    rows = harness.random_rows(case, 64)
    task = tasks.Task(
        config=config,
        model=model,
        plan=train.build_plan(config, model),
        train_data=rows,
        eval_data=[(row[:-1], row[1:]) for row in rows],
        loss=lambda model, batch: model(*batch),
        count=lambda batch: torch.tensor(batch[1].numel()),
        forward=lambda model, batch: model(batch[0]),
    )
    tasks.initialise(task)
    optimizer = tasks.build_optimizer(task)
    rows = rows[: case["batch"]].to(case["device"])

    def step() -> None:
        (task.loss(model, (rows[:, :-1], rows[:, 1:])) / rows[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return task, step


def _forward(task: Any, batch: Any) -> None:
    import torch

    with torch.no_grad():
        task.forward(task.model, batch)


def summarise(shape: dict[str, int], result: dict[str, Any]) -> dict[str, Any]:
    """One row: every part's time, and what observing takes against a training step."""
    medians = {part: statistics.median(result["ms"][part]) for part in PARTS}
    step, peaks = medians["training_step"], result["peak_mb"]
    return {
        **shape,
        "parameters": result["parameters"],
        "ms": {part: harness.spread(result["ms"][part]) for part in PARTS},
        "capture_over_step": medians["capture"] / step,
        "capture_over_forward": medians["capture"] / medians["forward"],
        "observation_over_step": medians["observation"] / step,
        "peak_mb": peaks,
        "extra_peak_mb": peaks["observation"] - peaks["training_step"],
    }


def main() -> None:
    """Measures all cases in turn and prints the result as JSON."""
    args = parse()
    if args.case:
        return harness.answer(args.case, measure)
    keys = (
        "experiment",
        "head_dim",
        "layers",
        "vocab",
        "batch",
        "samples",
        "repeats",
        "threads",
        "device",
    )
    shared = {key: getattr(args, key) for key in keys}
    shapes = [{"heads": h, "context": t} for h, t in itertools.product(args.heads, args.contexts)]
    rows = [
        summarise(shape, harness.fresh("representations", {**shared, **shape})) for shape in shapes
    ]
    harness.show(args, args.device, rows)
    return None


if __name__ == "__main__":
    main()
