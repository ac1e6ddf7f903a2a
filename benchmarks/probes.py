"""What one probe costs: time against a training step, and peak memory above it.

    python -m benchmarks.probes                                  # about two minutes on two cores
    python -m benchmarks.probes --widths 1024 --contexts 512 --vocab 32101 --layers 8 --batch 4
    python -m benchmarks.probes --device cuda --widths 1024 4096 --batch 32

Trains nanolm_c4's decoder (muP, Adam, float32) on random rows, in a process without and one with
a probe at every step, in turn. The probe's forward pass runs on a batch of the training step's
size; a run that probes every k steps on as many rows pays 1/k of it. Peak memory is that of the
timed steps: the process's resident set above what it had before the model was built; on a GPU
the allocator's own peak. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import harness

# What a probed step consists of, in its order.
PARTS = ("training_step", "before_step", "after_step", "read")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[128, 256], metavar="D")
    add("--contexts", type=int, nargs="+", default=[64, 512], metavar="T")
    add("--repeats", type=int, default=3, help="processes per case")
    add("--steps", type=int, default=10, help="timed steps per process")
    add("--warmup", type=int, default=3, help="steps before them")
    add("--layers", type=int, default=2)
    add("--vocab", type=int, default=1024)
    add("--head-dim", type=int, default=32)
    add("--batch", type=int, default=16, help="rows per step")
    add("--threads", type=int, default=2)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    harness.add_case(parser)
    return parser.parse_args(argv)


def measure(case: harness.Case) -> dict[str, Any]:
    """Trains for warm-up and timed steps: milliseconds of every part of each, and memory."""
    device = case["device"]
    start_mb = 0.0 if device == "cuda" else harness.resident_mb()
    training = Training(case)
    steps = []
    for step in range(case["warmup"] + case["steps"]):
        if step == case["warmup"]:
            harness.reset_peak(device)
        steps.append(training.step())
    peak = harness.peak_mb(device) - start_mb
    return {
        "ms": steps[case["warmup"] :],
        "forward_ms": [training.timed(training.forward) for _ in range(case["steps"])],
        "peak_mb": peak,
        "parameters": sum(p.numel() for p in training.model.parameters()),
    }


class Training:
    """A decoder that trains on one batch, with a probe at every step or none."""

    def __init__(self, case: harness.Case) -> None:
        from measure.probes import Probes
        from nanolm_c4 import train
        from training import optimizers

        self.case, config = case, harness.decoder_config(case)
        self.model = train.build_model(config, case["vocab"]).to(case["device"])
        plan = train.build_plan(config, self.model)
        plan.initialise(self.model, seed=0)
        self.optimizer = optimizers.build("adam", plan.groups(self.model))
        self.probes = Probes(self.model, plan, self.optimizer) if case["probed"] else None
        rows = harness.random_rows(case, case["batch"]).to(case["device"])
        self.batch = rows[:, :-1], rows[:, 1:]

    def forward(self) -> None:
        """An evaluation pass, for comparison."""
        import torch

        with torch.no_grad():
            self.model(self.batch[0])

    def backward(self) -> None:
        """The mean loss of the batch and its gradient."""
        (self.model(*self.batch) / self.batch[1].numel()).backward()

    def step(self) -> dict[str, float]:
        """One step; milliseconds of each part, a part that is not there being 0."""
        parts = dict.fromkeys(PARTS, 0.0)
        parts["training_step"] += self.timed(self.backward)
        if self.probes:
            parts["before_step"] = self.timed(self.probes.before_step)
        parts["training_step"] += self.timed(self.optimizer.step)
        if self.probes:
            parts["after_step"] = self.timed(self.probes.after_step)
        parts["training_step"] += self.timed(self.optimizer.zero_grad)
        if self.probes:
            parts["read"] = self.timed(lambda: self.probes.read(lambda: self.model(self.batch[0])))
        return parts

    def timed(self, function: Callable[[], object]) -> float:
        return harness.milliseconds(function, self.case["device"])


def summarise(shape: dict[str, int], plain: list[dict], probed: list[dict]) -> dict[str, Any]:
    """One row: both kinds of step, the probe's parts, and what they add to time and memory."""
    parts = {part: [step[part] for result in probed for step in result["ms"]] for part in PARTS}
    without = [sum(step.values()) for result in plain for step in result["ms"]]
    forward = [ms for result in plain for ms in result["forward_ms"]]
    probe = [sum(step[part] for part in PARTS[1:]) for result in probed for step in result["ms"]]
    peaks = [statistics.median(result["peak_mb"] for result in kind) for kind in (plain, probed)]
    parameters = plain[0]["parameters"]
    return {
        **shape,
        "parameters": parameters,
        "parameters_mb": 4 * parameters / 2**20,
        "step_ms": harness.spread(without),
        "evaluation_forward_ms": harness.spread(forward),
        "probe_ms": harness.spread(probe),
        "probe_parts_ms": {part: harness.spread(parts[part]) for part in PARTS[1:]},
        "probe_over_step": statistics.median(probe) / statistics.median(without),
        "probe_over_forward": statistics.median(probe) / statistics.median(forward),
        "peak_mb": {"plain": peaks[0], "probed": peaks[1]},
        "extra_peak_mb": peaks[1] - peaks[0],
    }


def main() -> None:
    """Measures all cases in turn and prints the result as JSON."""
    args = parse()
    if args.case:
        return harness.answer(args.case, measure)
    keys = ("steps", "warmup", "layers", "vocab", "head_dim", "batch", "threads", "device")
    shared = {key: getattr(args, key) for key in keys}
    grid = [{"width": w, "context": t} for w, t in itertools.product(args.widths, args.contexts)]
    measured = [(shape, [], []) for shape in grid]
    for _ in range(args.repeats):
        for shape, plain, probed in measured:
            for probing, results in ((False, plain), (True, probed)):
                results.append(harness.fresh("probes", {**shared, **shape, "probed": probing}))
    harness.show(args, args.device, [summarise(*row) for row in measured])
    return None


if __name__ == "__main__":
    main()
