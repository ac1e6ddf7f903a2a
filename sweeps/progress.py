"""What a sweep shows while it runs: one line per worker and an estimate of what is left."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Board:
    """Redraws its lines in place on a terminal; elsewhere prints one line per finished run."""

    def __init__(self, scheduler: Any, flops: Callable[[Any], float]) -> None:
        self.scheduler, self.flops = scheduler, flops
        self.lines: dict[int, str] = {}
        self.started: dict[int, float] = {}
        self.costs: list[tuple[float, int, float]] = []  # FLOPs, steps, seconds of finished runs
        self.drawn = 0
        self.lock = threading.Lock()
        self.terminal = sys.stderr.isatty()

    def start(self, worker: int, point: Any) -> None:
        """A worker has taken a run."""
        with self.lock:
            self.started[worker] = time.monotonic()
            self.lines[worker] = f"worker {worker}: {describe(point)}  starting"
            self._draw()

    def step(self, worker: int, step: int, steps: int, loss: float) -> None:
        """A run reports a step."""
        with self.lock:
            head = self.lines[worker].partition("  ")[0]
            self.lines[worker] = f"{head}  step {step}/{steps}  train loss {loss:.3f}"
            self._draw()

    def done(self, worker: int, point: Any, scheduler: Any) -> None:
        """A run has ended, with a result or without."""
        with self.lock:
            summary = scheduler.summaries.get(point.run)
            seconds = time.monotonic() - self.started[worker]
            if summary is not None and summary["status"] != "failed":
                self.costs.append((self.flops(point.config), point.config.training.steps, seconds))
            self.lines.pop(worker, None)
            text = f"{self._count()}  {describe(point)}  {outcome(summary)}  {seconds:.0f} s"
            self._draw(finished=text)

    def note(self, text: str) -> None:
        """Something worth knowing now, in lines of its own."""
        with self.lock:
            self._draw(finished=text, estimate=False)

    def close(self) -> None:
        """Removes the workers' lines."""
        with self.lock:
            self.lines.clear()
            self._draw(last=True)

    def _count(self) -> str:
        total = len(self.scheduler.sweep.points)
        return f"[{len(self.scheduler.summaries)}/{total}]"

    def _draw(
        self, finished: str | None = None, last: bool = False, estimate: bool = True
    ) -> None:
        if not self.terminal:
            if finished:
                left = self._left() if estimate else ""
                print(f"{finished}{left}", file=sys.stderr, flush=True)
            return
        out = f"\x1b[{self.drawn}F\x1b[J" if self.drawn else ""
        out += f"{finished}\n" if finished else ""
        status = [] if last else [self.lines[key] for key in sorted(self.lines)]
        if not last:
            status.append(f"{self._count()} runs done{self._left()}")
        self.drawn = len(status)
        columns = shutil.get_terminal_size().columns - 1  # a wrapped line would not be redrawn
        sys.stderr.write(out + "".join(f"{line[:columns]}\n" for line in status))
        sys.stderr.flush()

    def _left(self) -> str:
        waiting = [point.config for point in self.scheduler.waiting()]
        work = [(self.flops(config), config.training.steps) for config in waiting]
        seconds = estimate(self.costs, work)
        if seconds is None or not work:
            return ""
        # Runs under way are left out, and cells may still ask for more points.
        return f"  about {max(1, round(seconds / max(1, len(self.started)) / 60))} min left"


def estimate(
    done: list[tuple[float, int, float]], work: list[tuple[float, int]]
) -> float | None:
    """Seconds that `work` (FLOPs, steps) takes on one worker, by what finished runs cost.

    Least squares of seconds on FLOPs and steps (a step has a cost of its own, which rules small
    models); None before the first run has finished.
    """
    if not done:
        return None
    table = np.array(done, dtype=float)
    scale = table[:, :2].max(axis=0)
    weights, *_ = np.linalg.lstsq(table[:, :2] / scale, table[:, 2], rcond=None)
    weights = np.maximum(weights, 0)
    return float(sum((np.array(item) / scale) @ weights for item in work))


def describe(point: Any) -> str:
    """A run in words: its curve and where it is in the grid."""
    values = " ".join(f"{key.rpartition('.')[2]}={value:.4g}" if isinstance(value, float)
                      else f"{key.rpartition('.')[2]}={value}" for key, value in point.values)
    return f"{point.curve} {values} seed={point.seed}"


def outcome(summary: dict[str, Any] | None) -> str:
    """A run's result in words."""
    if summary is None:
        return "not done, will be tried again"
    if summary["status"] == "finished":
        return f"eval loss {summary['final_eval_loss']:.4f}"
    return f"{summary['status']} at step {summary['step']}" if "step" in summary else "failed"
