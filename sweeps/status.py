"""Where a sweep stands, read from its folder: from any machine that sees it, at any time."""

from __future__ import annotations

from typing import Any

from sweeps.progress import Estimate, columns, duration, last_line
from sweeps.search import SearchWork
from sweeps.sweep import SweepWork
from training.files import is_locked


def status(work: SweepWork | SearchWork) -> str:
    """What is done, at work and at which step, failed and left, and the time that is left.

    A run is at work while a process holds its folder, on whichever machine.
    """
    at_work = [point for point in work.left if is_locked(work.folder / point.run)]
    failed = work.failed_before() - {point.run for point in at_work}
    left = work.total - work.done - len(at_work) - len(failed)
    lines = [
        f"{work.folder}: {work.done} of {work.total} runs done, {len(at_work)} at work, "
        f"{len(failed)} failed, {left} left"
    ]
    if at_work:
        rows = [_row(work, point) for point in at_work]
        lines.append(columns([("at work", "step", "of", "loss"), *rows]))
    lines += [f"failed: {run}, see {work.folder / run / 'log.txt'}" for run in sorted(failed)]
    estimate = Estimate()
    for point, summary in work.ended():
        if "wall_seconds" in summary:
            estimate.add(work.flops(point), summary["step"], summary["wall_seconds"])
    if seconds := estimate.seconds(*work.todo):
        how = f"with {len(at_work)} at work" if at_work else "one run at a time"
        lines.append(f"about {duration(seconds / max(1, len(at_work)))} left, {how}")
    return "\n".join(lines)


def _row(work: SweepWork | SearchWork, point: Any) -> tuple[str, ...]:
    line = last_line(work.folder / point.run)
    loss = line.get("train_loss", line.get("eval_loss"))
    shown = "" if loss is None else f"{loss:.4f}"
    return point.run, str(line.get("step", 0)), str(point.config.training.steps), shown
