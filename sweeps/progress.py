"""How far a sweep is: a line per run at work while it runs, and where it stands from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.task import STEP
from training.experiment import bar
from training.files import is_locked, open_plain, read_text

LINES = 20  # runs at work that are shown; a cluster may have thousands
TAIL = 4096  # bytes at the end of metrics.jsonl, which hold its last line


# One core, by its processor time for whole steps with one thread on a cloud server: the smallest
# and largest laptop runs of the four experiments took 0.010 to 0.18 s per step of 0.1 to 11.5
# GFLOP, which this says within a factor of two.
CPU_FLOPS, CPU_STEP = 5e10, 0.01  # FLOP/s, and seconds of a step beside


def on_a_core(flops: float, steps: float) -> float:
    """Seconds that runs take on one core, before any has been seen."""
    return flops / CPU_FLOPS + steps * CPU_STEP


def say(line: str) -> None:
    """A line on stderr; where that is closed or full, none: no run ends for it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


class Board:
    """Lines redrawn in place on a terminal; elsewhere one line per run that has ended."""

    def __init__(self, work: Any) -> None:
        self.work, self.estimate = work, Estimate()
        self.live: Any = None
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False, markup=False)
            self.live = Live(console=console, auto_refresh=False, transient=True)
            self.live.start()

    def say(self, text: str) -> None:
        """A line, or several, that stay."""
        if self.live is None:
            say(text)
        else:
            self.live.console.print(text, soft_wrap=True)

    def ended(self, point: Any, seconds: float, trained: bool, at_work: int) -> None:
        """A run has ended; `trained` in this command from its start to its end."""
        if trained:
            self.estimate.add(self.work.flops(point), point.config.training.steps, seconds)
        left = "" if self.live else self._left(at_work)
        self.say(f"{self.count()}  {self.work.outcome(point)}  {duration(seconds)}{left}")

    def show(self, runs: Iterable[Any]) -> None:
        """Redraws the runs at work, each with the step and the loss that it has logged last."""
        if self.live is None:
            return
        from rich.text import Text

        runs = list(runs)
        shown = []
        for point in runs[:LINES]:
            step, steps, loss = _at(self.work.folder / point.run, point)
            at = f"{bar(step, steps)}  step {step}/{steps}" if step else "starting"
            shown.append(f"{point.run}  {at}" + (f"  loss {loss:.3f}" if loss is not None else ""))
        more = [f"and {len(runs) - LINES} more runs at work"] if len(runs) > LINES else []
        count = f"{self.count()} runs done{self._left(len(runs))}"
        text = Text("\n".join([*shown, *more, count]), no_wrap=True, overflow="ellipsis")
        self.live.update(text, refresh=True)

    def close(self) -> None:
        """Removes the lines of runs at work."""
        if self.live is not None:
            self.live.stop()

    def count(self) -> str:
        """Runs that are done, of those that are known."""
        return f"[{len(self.work.results)}/{len(self.work.points)}]"

    def _left(self, at_work: int) -> str:
        """Rules may still ask for more runs, which nobody can count."""
        seconds = self.estimate.seconds(*self.work.todo)
        return "" if not seconds else f"  about {duration(seconds / max(1, at_work))} left"


class Estimate:
    """Seconds of a run by its FLOPs and steps, from the runs that have ended.

    Least squares of seconds on FLOPs and steps (a step costs time even in a small model), kept as
    sums, so that a result costs the same after a thousand others.
    """

    def __init__(self) -> None:
        self._products, self._seconds = np.zeros((2, 2)), np.zeros(2)

    def add(self, flops: float, steps: int, seconds: float) -> None:
        """A run that has ended."""
        row = np.array([flops, steps], dtype=float)
        self._products += np.outer(row, row)
        self._seconds += row * seconds

    def seconds(self, flops: float, steps: float) -> float | None:
        """What work would take on one worker; None before the first run has ended."""
        scale = np.sqrt(np.diag(self._products))
        if not scale.all():
            return None
        scaled = self._products / np.outer(scale, scale)
        weights = np.linalg.lstsq(scaled, self._seconds / scale, rcond=1e-12)[0]
        return float(np.maximum(weights, 0) @ (np.array([flops, steps]) / scale))


def duration(seconds: float) -> str:
    """A time in the two largest of days, hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes >= 1440:
        days, hours = divmod(round(minutes / 60), 24)
        return f"{days} d {hours} h" if days < 100 else f"{seconds / 86400:,.0f} d"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min"


def columns(lines: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as text in columns."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def last_line(run_dir: Path) -> dict[str, Any]:
    """The last whole line of a run's metrics.jsonl; empty before there is one."""
    try:
        with open_plain(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().split(b"\n")[:-1]
        line = json.loads(lines[-1])
        return line if isinstance(line, dict) else {}
    except (OSError, ValueError, IndexError):
        return {}


def _at(run_dir: Path, point: Any) -> tuple[int, int, float | None]:
    """The step that a run is at, of how many, and the loss that it has logged last."""
    line = last_line(run_dir)
    step, loss = line.get("step", 0), line.get("train_loss", line.get("eval_loss"))
    with contextlib.suppress(OSError, ValueError):
        step = max(step, int(read_text(run_dir / STEP)))
    return step, point.config.training.steps, loss


def status(work: Any) -> str:
    """What is done, at work and at which step, failed and left, and the time that is left.

    It is read from the sweep's folder, from any machine that sees it, at any time. A run is at work
    while a process holds its folder, on whichever machine.
    """
    at_work = [point for point in work.left if is_locked(work.folder / point.run)]
    failed = work.failed_before() - {point.run for point in at_work}
    done, known = len(work.results), len(work.points)
    lines = [
        f"{work.folder}: {done} of {known} runs done, {len(at_work)} at work, "
        f"{len(failed)} failed, {known - done - len(at_work) - len(failed)} left"
    ]
    rows = [("at work", "step", "of", "loss")]
    for point in at_work:
        step, steps, loss = _at(work.folder / point.run, point)
        rows.append((point.run, str(step), str(steps), "" if loss is None else f"{loss:.4f}"))
    lines += [columns(rows)] if at_work else []
    lines += [f"failed: {run}, see {work.folder / run / 'log.txt'}" for run in sorted(failed)]
    estimate = Estimate()
    for point, summary in work.ended():
        if "wall_seconds" in summary:
            estimate.add(work.flops(point), summary["step"], summary["wall_seconds"])
    if seconds := estimate.seconds(*work.todo):
        how = f"with {len(at_work)} at work" if at_work else "one run at a time"
        lines.append(f"about {duration(seconds / max(1, len(at_work)))} left, {how}")
    return "\n".join(lines)
