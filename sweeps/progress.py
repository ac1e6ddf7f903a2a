"""How far a sweep is: a line per run while it runs, and where it stands from elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.files import is_locked, open_plain, parse_json

if TYPE_CHECKING:
    from sweeps.sweep import Work
    from sweeps.sweep_file import Point

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
    """A line for every run that has ended, with the time that is left."""

    def __init__(self, work: Work) -> None:
        self.work, self.pace, self.first = work, Pace(), 0

    def ended(self, point: Point, seconds: float, trained: bool, at_work: int) -> None:
        """A run has ended; `trained` in this command from its start to its end.

        The first run of each worker does not count: it also started a process and read the data.
        """
        self.first += 1
        if trained and self.first > at_work:
            self.pace.add(self.work.flops(point), point.config.training.steps, seconds)
        left = ""
        if len(self.work.results) < len(self.work.points):
            # Rules may still ask for more runs, which nobody can count.
            rest = self.pace.seconds(*self.work.todo) / max(1, at_work)
            left = f"  about {duration(rest)} left"
        say(f"{self.count()}  {self.work.outcome(point)}  {duration(seconds)}{left}")

    def count(self) -> str:
        """Runs that are done, of those that are known."""
        return f"[{len(self.work.results)}/{len(self.work.points)}]"


class Pace:
    """Seconds of a worker: those planned for a core, times how much longer past runs took."""

    def __init__(self) -> None:
        self.planned = self.taken = 0.0

    def add(self, flops: float, steps: int, seconds: float) -> None:
        """A run that has ended."""
        self.planned += on_a_core(flops, steps)
        self.taken += seconds

    def seconds(self, flops: float, steps: float) -> float:
        """What work would take on one worker."""
        ratio = self.taken / self.planned if self.planned else 1.0
        return max(0.0, ratio * on_a_core(flops, steps))


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
        line = parse_json(lines[-1])
        return line if isinstance(line, dict) else {}
    except (OSError, ValueError, IndexError):
        return {}


def status(work: Work) -> str:
    """What is done, at work and at which step, failed and left, and the time that is left.

    It is read from the sweep's folder, from any machine that sees it, at any time. A run is at work
    while a process holds its folder, on whichever machine.
    """
    at_work = [point for point in work.left if is_locked(work.folder / point.run)]
    failed = work.failed_before() - {point.run for point in at_work}
    done, known = len(work.results), len(work.points)
    left = known - done - len(at_work) - len(failed)
    lines = [
        f"{work.folder}: {done} of {known} runs done, {len(at_work)} at work, "
        f"{len(failed)} failed, {left} left"
    ]
    rows = [("at work", "step", "of", "loss")]
    for point in at_work:
        line = last_line(work.folder / point.run)
        loss = line.get("train_loss", line.get("eval_loss", ""))
        step, steps = line.get("step", 0), point.config.training.steps
        rows.append((point.run, str(step), str(steps), str(loss)))
    lines += [columns(rows)] if at_work else []
    lines += [f"failed: {run}, see {work.folder / run / 'log.txt'}" for run in sorted(failed)]
    pace = Pace()
    for key, summary in work.results.items():
        if "wall_seconds" in summary:
            pace.add(work.flops(work.points[key]), summary["step"], summary["wall_seconds"])
    if pace.planned and done < known:
        how = f"with {len(at_work)} at work" if at_work else "one run at a time"
        seconds = pace.seconds(work.todo[0], work.todo[1]) / max(1, len(at_work))
        lines.append(f"about {duration(seconds)} left, {how}")
    return "\n".join(lines)
