"""Tokens per second, time per step, peak memory and FLOP utilisation of training a decoder.

    python -m benchmarks.throughput                       # everything; hours on two cores
    python -m benchmarks.throughput --device cuda --widths 1024 4096 --batch 32

Compares a real run of nanolm_c4 (plan, loop, optimiser, logging every ten steps) with the plain
GPT in plain_gpt.py, in four modes.

Every case has its own process, and all cases are repeated in turn, so that a drift of the
machine meets them alike. The ceiling is the matmul rate of a process of the same run, in float32
for fp32 and in bfloat16 for bf16. FLOPs are the experiment's: 6 per matrix weight and token,
6 per query-key pair and width, pairs counted causally. Memory is the largest sum of live tensors
in one step after the timed ones, weights and optimiser state included, from torch's own record of
every allocation; on a GPU it is its allocator's peak over the timed steps.

The timed steps wait for the device one by one. `free_ms` is that of `--free` further steps that run
as users' do, with one wait at their end; `kernel_ms`, on a GPU, the sum of its kernels' times in a
step. Where kernels take much less than a free step, launches decide. The step of nanochat or of
torchtitan is another architecture's: it is not compared.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness

MODES = {
    "fp32": {"precision": "fp32", "compile": False},
    "fp32_compile": {"precision": "fp32", "compile": True},
    "bf16": {"precision": "bf16", "compile": False},
    "bf16_compile": {"precision": "bf16", "compile": True},
}
PRESCRIPTIONS = {
    "adam": {"parameterization": "mup", "alignment": "full"},
    "muon": {"parameterization": "spectral", "convention": "spectral"},
}
IMPLEMENTATIONS = ("nanolm_c4", "plain")
PROFILED = 3  # steps
KEYS = ("width", "mode", "implementation")  # of a case that trains


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[128, 256, 512], metavar="D")
    add("--modes", nargs="+", choices=MODES, default=["fp32", "fp32_compile", "bf16_compile"])
    add("--repeats", type=int, default=3, help="processes per case")
    add("--steps", type=int, default=12, help="timed steps per process")
    add("--warmup", type=int, default=4, help="steps before them, compilation included")
    add("--layers", type=int, default=8)
    add("--context", type=int, default=512)
    add("--vocab", type=int, default=32_101)
    add("--head-dim", type=int, default=128)
    add("--batch", type=int, default=4, help="rows per step")
    add("--optimizer", choices=("adam", "muon"), default="adam", help="nanolm_c4's")
    add("--free", type=int, default=0, help="steps without a wait, after the timed ones")
    add("--threads", type=int, default=2)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--case", type=json.loads, help=argparse.SUPPRESS)  # of the process that measures
    return parser.parse_args(argv)


# The measuring process: one case, one JSON line


def measure(case: harness.Case) -> dict[str, Any]:
    """Runs one case in this process."""
    import torch

    torch.set_num_threads(case["threads"])
    if "implementation" not in case:
        return measure_matmul(case)
    watch = Stopwatch(case)
    try:
        {"nanolm_c4": train_nanolm, "plain": train_plain}[case["implementation"]](case, watch)
    except Stopwatch.Done:
        return watch.result
    raise RuntimeError("the run ended before enough steps were timed")


class Stopwatch:
    """Times the steps between calls of `tick`; its last call raises `Stopwatch.Done`."""

    class Done(Exception):
        """Enough steps were timed."""

    def __init__(self, case: harness.Case) -> None:
        self.case, self.times, self.on_gpu = case, [], case["device"] == "cuda"

    def tick(self) -> None:
        """Marks the beginning of a step and the end of the one before."""
        import torch

        timed = len(self.times) - self.case["warmup"]
        free = timed - self.case["steps"] - 1  # steps that did not wait
        if self.on_gpu and (free <= 0 or free >= self.case["free"]):
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        if timed == 0 and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if timed == self.case["steps"]:
            self.tensors = None if self.on_gpu else _TensorPeak()
        if free == 0:
            peak = torch.cuda.max_memory_allocated() / 2**20 if self.on_gpu else self.tensors.stop()
            times = self.times[self.case["warmup"] : -1]
            steps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
            self.result = {"ms": steps, "tensors_mb": peak}
            self.times[-1] = time.perf_counter()  # the record's end took time
        if free == self.case["free"]:
            began = self.times[-1 - free]
            self.result["free_ms"] = 1e3 * (self.times[-1] - began) / free if free else None
            if not self.on_gpu:
                raise self.Done
            self.kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.kernels.start()
        if free == self.case["free"] + PROFILED:
            self.kernels.stop()
            total = sum(event.self_device_time_total for event in self.kernels.key_averages())
            self.result["kernel_ms"] = total / 1e3 / PROFILED
            raise self.Done


class _TensorPeak:
    """The largest sum of live tensors on the CPU from its making to `stop`, in MB."""

    def __init__(self) -> None:
        import torch

        storages = {}
        for thing in gc.get_objects():
            # isinstance would follow weak references; compilation leaves tensors without memory.
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self.live = sum(storages.values())
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        self.profiler.start()

    def stop(self) -> float:
        """Ends the record."""
        self.profiler.stop()
        events = self.profiler.profiler.kineto_results.events()
        records = [event for event in events if event.name() == "[memory]"]
        if not records:
            raise RuntimeError("torch's profiler recorded no allocation")
        records.sort(key=lambda event: event.start_ns())
        sizes = itertools.accumulate(event.nbytes() for event in records)
        return (self.live + max(0, *sizes)) / 2**20


def train_nanolm(case: harness.Case, watch: Stopwatch) -> None:
    """A run of nanolm_c4 on random rows, timed where the loop asks for the number of targets."""
    from training import loop

    with tempfile.TemporaryDirectory() as folder:
        loop.train(build_task(case, watch.tick), Path(folder))


def build_task(case: harness.Case, tick: Callable[[], None], **changes: Any) -> Any:
    """nanolm_c4 on random rows; `changes` are of the config's sections."""
    import torch

    from nanolm_c4 import train
    from nanolm_c4.data import collate
    from training import task as tasks

    config = _config(case, **changes)
    rows = _random_rows(case)

    def count(batch: Any) -> torch.Tensor:
        tick()
        return torch.tensor(batch[1].numel())

    model = train.build_model(config, case["vocab"])
    return tasks.Task(
        config=config,
        model=model,
        plan=train.build_plan(config, model),
        train_data=rows,
        eval_data=rows,
        loss=lambda model, batch: model(*batch),
        count=count,
        collate=collate,
    )


def _config(case: harness.Case, **changes: Any) -> Any:
    """nanolm_c4's config for a case: muP and Adam, or Muon."""
    from nanolm_c4.config import Config
    from training.config import validate

    shape = {key: case[key] for key in ("width", "layers", "head_dim", "context")}
    fields = {
        "model": {**shape, "vocab_size": case["vocab"]},
        "prescription": {"base_width": 64, **PRESCRIPTIONS[case["optimizer"]]},
        "optimizer": {"name": case["optimizer"], "lr": 2**-9},
        "schedule": {"name": "constant"},
        "training": {
            "steps": case["warmup"] + case["steps"] + case["free"] + PROFILED + 2,
            "batch_size": case["batch"],
            "divergence_factor": 1e9,  # random tokens teach nothing; a diverging run would end
            **MODES[case["mode"]],
        },
        "data": {},
    }
    fields = {name: section | changes.get(name, {}) for name, section in fields.items()}
    fields |= {name: section for name, section in changes.items() if name not in fields}
    return validate(Config, fields, "benchmark")


def _random_rows(case: harness.Case) -> list[Any]:
    """Inputs and targets, (context,) each, of eight batches."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (8 * case["batch"], case["context"] + 1)
    rows = torch.randint(case["vocab"], shape, generator=generator)
    return [(row[:-1], row[1:]) for row in rows]


def train_plain(case: harness.Case, watch: Stopwatch) -> None:
    """The plain GPT on the same rows."""
    import torch

    from benchmarks.plain_gpt import PlainGPT, train

    rows = _random_rows(case)

    def batches() -> Iterator[Any]:
        for step in itertools.count():
            watch.tick()
            picked = [rows[(step * case["batch"] + i) % len(rows)] for i in range(case["batch"])]
            yield tuple(torch.stack(part) for part in zip(*picked, strict=True))

    heads = case["width"] // case["head_dim"]
    model = PlainGPT(case["vocab"], case["context"], case["layers"], heads, case["width"])
    mode = MODES[case["mode"]]
    how = {"bf16": mode["precision"] == "bf16", "compiled": mode["compile"]}
    train(model, batches(), **how, device=case["device"])


def measure_matmul(case: harness.Case) -> dict[str, Any]:
    """FLOP/s of square matrix products: the best of three sizes, each the median of its runs."""
    import torch

    sizes = (4096, 8192, 16384) if case["device"] == "cuda" else (1024, 2048, 3072)
    best = {"fp32": 0.0, "bf16": 0.0}
    for size, (name, kind) in itertools.product(
        sizes, (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ):
        a, b = (torch.randn(size, size, device=case["device"]).to(kind) for _ in range(2))
        out = torch.empty_like(a)
        product = partial(torch.mm, a, b, out=out)
        times = [harness.milliseconds(product, case["device"]) for _ in range(7)]
        best[name] = max(best[name], 2e3 * size**3 / statistics.median(times[2:]))
    return best


# The launching process


def cases(args: argparse.Namespace) -> list[harness.Case]:
    """Every case of one repetition: the ceiling, and all that train."""
    own = ("widths", "modes", "repeats", "case", "json")  # of the launching process
    shared = {key: value for key, value in vars(args).items() if key not in own}
    grid = itertools.product(args.widths, args.modes, IMPLEMENTATIONS)
    return [shared, *({**shared, **dict(zip(KEYS, values, strict=True))} for values in grid)]


def summarise(
    case: harness.Case, results: list[dict[str, Any]], ceiling: dict[str, Any]
) -> dict[str, Any]:
    """One row of the table: statistics over all timed steps of all processes of a case."""
    from nanolm_c4 import train

    steps = [ms for result in results for ms in result["ms"]]
    median, tokens = statistics.median(steps), case["batch"] * case["context"]
    config = _config(case)
    flops = train.EXPERIMENT.flops(config) / config.training.steps
    rate = flops / median * 1e3
    return {
        **{key: case[key] for key in KEYS},
        "n": len(steps),
        "ms_per_step": median,
        "ms_min": min(steps),
        "ms_process_medians": [statistics.median(result["ms"]) for result in results],
        **{
            key: statistics.median(result[key] for result in results)
            for key in ("free_ms", "kernel_ms")
            if results[0].get(key) is not None
        },
        "tokens_per_second": tokens / median * 1e3,
        "tensors_mb": max(result["tensors_mb"] for result in results),
        "flops_per_step": flops,
        "utilisation": rate / ceiling[MODES[case["mode"]]["precision"]],
    }


def comparisons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of nanolm_c4 to the plain GPT.

    `speed` compares the fastest process of each: a shared machine now and then slows a whole
    process several times over, which a median over few processes does not withstand.
    """
    found = {tuple(row[key] for key in KEYS): row for row in rows}
    result = []
    for (width, mode, implementation), ours in found.items():
        plain = found.get((width, mode, "plain"))
        if implementation == "plain" or plain is None:
            continue
        fastest = [min(row["ms_process_medians"]) for row in (plain, ours)]
        peak = ours["tensors_mb"] / plain["tensors_mb"]
        row = {"width": width, "mode": mode, "speed": fastest[0] / fastest[1], "peak": peak}
        result.append(row)
    return result


def main() -> None:
    """Measures all cases in turn and prints the result as JSON."""
    args = parse()
    if args.case:
        print(json.dumps(measure(args.case)))
        return
    measured = [(case, []) for case in cases(args)]
    for repeat in range(args.repeats):
        for case, results in measured:
            results.append(harness.fresh("throughput", case))
            label = " ".join(str(case[key]) for key in KEYS if key in case) or "matmul"
            print(f"{repeat + 1}/{args.repeats} {label}", file=sys.stderr)
    (_, matmul), *training = measured
    ceiling = {
        kind: statistics.median(result[kind] for result in matmul) for kind in ("fp32", "bf16")
    }
    rows = [summarise(case, results, ceiling) for case, results in training]
    more = {"matmul_flops_per_second": ceiling, "comparisons": comparisons(rows)}
    harness.show(args, args.device, rows, **more)


if __name__ == "__main__":
    main()
