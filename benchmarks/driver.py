"""What the driver costs per run, when runs cost nothing: `python -m benchmarks.driver [RUNS ...]`.

Runs end at once, in a pool that hands their summaries straight back; every cell is extended, so
that the rules have work, too. The time is processor time, and the driver's alone: choosing,
submitting, taking up results, applying the rules, and writing the tables as often as a real sweep
does. It is to stay below 5 ms per run however many runs a sweep has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import resource
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks import harness
from sweeps.driver import Driver
from sweeps.pool import Job, Needs
from sweeps.sweep import Store, SweepWork
from sweeps.sweep_file import load_sweep

SWEEP = """
experiment: nanolm_c4
config: {config}
grid: {{model.width: {widths}, optimizer.lr: {{log2: [-12, -8]}}}}
curves: {{a: {{}}, b: {{set: {{optimizer.name: sgd}}}}}}
seeds: {seeds}
extend: {{key: optimizer.lr}}
"""


class Instant:
    """A pool whose runs have ended when they are submitted, with a parabola for a loss."""

    slots, lost = 64, ()

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The summary, at once."""
        distance = math.log2(job.config["optimizer"]["lr"]) + 6
        future: Future[dict[str, Any]] = Future()
        loss = 3 + distance**2
        future.set_result({"status": "finished", "step": 1, "final_eval_loss": loss})
        return future

    def stop(self) -> None:
        """Nothing is at work."""

    def shutdown(self, wait: bool = True) -> None:
        """Nothing was started."""


def measure(runs: int, folder: Path) -> dict[str, float]:
    """Processor seconds of loading and driving about `runs` runs, and milliseconds per run."""
    path = folder / "sweep.yaml"
    config = harness.ROOT / "nanolm_c4/configs/laptop.yaml"
    seeds = max(1, runs // (2 * 25 * 8))  # two curves, widths, rates with those that are added
    widths = [16 * (i + 1) for i in range(max(1, runs // (2 * 8 * seeds)))]
    path.write_text(SWEEP.format(config=config, widths=widths, seeds=list(range(seeds))))
    begun = time.process_time()
    sweep = load_sweep(path, folder / "results")
    work = SweepWork(sweep, Store(sweep.folder).recall)
    loaded = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):
        Driver(work, Instant(), lambda point: Needs()).run()
    seconds = time.process_time() - loaded
    return {
        "runs": len(work.results),
        "load_s": round(loaded - begun, 2),
        "drive_s": round(seconds, 2),
        "ms_per_run": round(1000 * seconds / len(work.results), 3),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("runs", type=int, nargs="*", default=[1000, 5000, 10000])
    return parser.parse_args(argv)


def main() -> None:
    """A row per size."""
    args, rows = parse(), []
    for runs in args.runs:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(runs, Path(folder)))
    harness.show(args, "cpu", rows)


if __name__ == "__main__":
    main()
