"""Engines of sweeps: what their start costs, and runs that are killed in the middle of steps.

    python -m benchmarks.engines start [--engines local ray] [--repeats 3]
    python -m benchmarks.engines kills --engine local [--kills 50]

`start`: seconds until the pool is open, until a first small run has ended and until a second one
has, then the memory (resident, and with shared pages in parts) and CPU time of the driver and all
it has started. `kills`: decoders of width 32 and 150 steps on the embedded corpus. The process of a
run is killed (SIGKILL) at a random moment of a random step, several times per run, and the run
submitted again; its metrics, byte for byte, and its final loss are compared with a run that nothing
disturbed. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from sweeps.pool import ENGINES, Job, Needs, Pool, PoolOptions, open_pool
from training.config import load

STEPS = 150
PER_RUN = 5  # kills


def job(folder: Path, seed: int, steps: int = STEPS) -> Job:
    """A run of the quickstart's decoder, saved every ten steps and logged at every one."""
    from nanolm_c4.config import Config

    changes = [
        "model.width=32",
        f"seed={seed}",
        f"training.steps={steps}",
        "training.log_every=1",
        "schedule.warmup_steps=0",
        "checkpoint.every=10",
        "checkpoint.minutes=null",
    ]
    config = load(Config, harness.ROOT / "nanolm_c4" / "configs" / "laptop.yaml", changes)
    name = f"seed-{seed}"
    return Job(name, "nanolm_c4", config.model_dump(mode="json"), folder / name, threads=1)


def opened(engine: str) -> Pool:
    """An engine for one run at a time."""
    return open_pool(engine, PoolOptions(workers=1, threads=1))


def started(engine: str) -> dict[str, float]:
    """One start, in this process, which has done nothing before."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        pool, ends = opened(engine), [time.perf_counter()]
        for seed in (0, 1):
            pool.submit(job(Path(folder), seed, steps=1), Needs()).result()
            ends.append(time.perf_counter())
        tree = [os.getpid(), *descendants(os.getpid())]
        memory = {kind: sum(megabytes(pid, kind) for pid in tree) for kind in ("Rss", "Pss")}
        cpu = sum(map(cpu_seconds, tree))
        pool.shutdown()
    return {
        "open_seconds": ends[0] - begun,
        "first_run_seconds": ends[1] - ends[0],
        "second_run_seconds": ends[2] - ends[1],
        "resident_mb": memory["Rss"],
        "proportional_mb": memory["Pss"],
        "cpu_seconds": cpu,
        "processes": len(tree),
    }


def descendants(pid: int) -> list[int]:
    """A process's children and theirs."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    children = [int(word) for word in found.stdout.split()]
    return children + [more for child in children for more in descendants(child)]


def megabytes(pid: int, kind: str) -> float:
    """Memory of a process: Rss, or Pss, in which pages shared by n processes count 1/n."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return 1.024e-3 * int(re.search(rf"^{kind}: +(\d+)", text, re.MULTILINE)[1])


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def holder(run_dir: Path) -> int | None:
    """The process that trains a run: the one that holds the lock of its folder."""
    try:
        inode = (run_dir / ".lock").stat().st_ino
    except FileNotFoundError:
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4])
    return None


def logged(run_dir: Path) -> int:
    """The last step in a run's metrics."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    steps = re.findall(r'"step": (\d+)', text)
    return int(steps[-1]) if steps else 0


def saved(run_dir: Path) -> int:
    """The step of a run's newest checkpoint."""
    names = [path.name for path in run_dir.glob("checkpoints/step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def killed_run(
    pool: Pool, one: Job, draw: random.Random
) -> tuple[dict[str, Any], list[int], list[int]]:
    """The summary of a run that is killed, the steps at which it was, and how many each cost."""
    at: list[int] = []
    repeated: list[int] = []
    future = pool.submit(one, Needs())
    targets = sorted(draw.sample(range(2, STEPS - 5), PER_RUN))
    while True:
        pid = holder(one.run_dir)
        if future.done():
            error = future.exception()
            if error is None:
                return future.result(), at, repeated
            if not isinstance(error, pool.lost):
                raise error
            future = pool.submit(one, Needs())
        elif pid is not None and targets and logged(one.run_dir) >= targets[0]:
            time.sleep(draw.uniform(0, 0.02))
            step = logged(one.run_dir)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            at.append(step)
            targets = [target for target in targets[1:] if target > step]
            while not future.done():
                time.sleep(0.01)
            repeated.append(step - saved(one.run_dir))
        time.sleep(0.002)


def kill_series(engine: str, kills: int, minutes: float) -> dict[str, Any]:
    """Runs until `kills` kills have hit a step; what differed and what was done twice."""
    draw = random.Random(0)
    steps: list[int] = []
    repeated: list[int] = []
    differ: list[int] = []
    seed, begun = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pool = opened(engine)
        while len(steps) < kills and time.perf_counter() - begun < 60 * minutes:
            whole, hurt = job(Path(folder) / "whole", seed), job(Path(folder) / "hurt", seed)
            expected = pool.submit(whole, Needs()).result()
            summary, at, cost = killed_run(pool, hurt, draw)
            logs = [(one.run_dir / "metrics.jsonl").read_bytes() for one in (whole, hurt)]
            same = expected["final_eval_loss"] == summary["final_eval_loss"]
            if logs[0] != logs[1] or not same:
                differ.append(seed)
            steps += at
            repeated += cost
            seed += 1
            print(f"{len(steps)} kills, {len(differ)} runs differ", file=sys.stderr)
        pool.shutdown()
    return {
        "engine": engine,
        "kills": len(steps),
        "runs": seed,
        "runs_that_differ": differ,
        "killed_at": steps,
        "steps_done_twice_median": statistics.median(repeated),
        "steps_done_twice_most": max(repeated),
        "seconds": time.perf_counter() - begun,
    }


def starts(engines: list[str], repeats: int) -> list[dict[str, Any]]:
    """Every engine's starts, each in a process without a past, in turn."""
    rows = [(engine, index) for index in range(repeats) for engine in engines]
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    for engine, _ in rows:
        command = [sys.executable, "-m", "benchmarks.engines", "once", "--engine", engine]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=harness.ROOT)
        found[engine].append(json.loads(done.stdout.splitlines()[-1]))
    return [
        {
            "engine": engine,
            "n": repeats,
            "median": {key: statistics.median(row[key] for row in all_) for key in all_[0]},
            "all": all_,
        }
        for engine, all_ in found.items()
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("what", choices=["start", "kills", "once"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--engine", choices=ENGINES, default="local")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further run after")
    return parser.parse_args(argv)


def main() -> None:
    """Prints JSON."""
    args = parse()
    if args.what == "once":
        print(json.dumps(started(args.engine)))
        return
    if args.what == "start":
        harness.show(args, "cpu", starts(args.engines, args.repeats), load=os.getloadavg())
    else:
        series = kill_series(args.engine, args.kills, args.minutes)
        harness.show(args, "cpu", [series], load=os.getloadavg())


if __name__ == "__main__":
    main()
