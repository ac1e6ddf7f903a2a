"""Loss against steps for models of several sizes (Bordelon et al., Figure 11).

    python -m plots bordelon/dynamics [metrics.csv ...]

A line per head dimension N, a panel per alpha_A, and the findings: what doubling N changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import style
from plots.bordelon import scans
from plots.bordelon.scans import ALPHA, BANDS, HEAD_DIM, TRAIN_LOSS, Losses
from plots.findings import HEADER, Finding, Printed
from plots.statistics import jackknife
from plots.tables import SEED

TABLES = ("bordelon/figure_11_metrics",)


def read(paths: Sequence[Path]) -> Losses:
    """The training losses of runs that grow N."""
    return scans.read_losses(paths, HEAD_DIM)


def panels(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Title -> rows of a panel: one per alpha_A, falling, or one for all if there is none."""
    if ALPHA not in rows:
        return {"": rows}
    return {scans.alpha_title(alpha): rows[rows[ALPHA] == alpha] for alpha in scans.alphas(rows)}


def findings(losses: Losses) -> list[Printed]:
    """What each doubling changes, compared with the first one."""
    result: list[Printed] = [
        f"{TRAIN_LOSS}, mean over all logged steps; runs of one seed see the same samples; ± "
        "standard error over seeds (n)",
        HEADER,
    ]
    for title, own in panels(losses.rows).items():
        place = f"{scans.plain(title)}: " if title else ""
        found = scans.gaps(own, HEAD_DIM)
        for gap in found:
            name = f"{place}loss of N = {gap.low} minus that of {gap.high}"
            # The paper speaks of similar dynamics; that they come closer is ours.
            claim = ("shrinks (ours)", _shrinks(gap, found[0])) if gap is not found[0] else ()
            result.append(Finding(name, gap.estimate.text(4), *claim))
    return [*result, *scans.cut_lines(losses.cut)]


def _shrinks(gap: scans.Gap, first: scans.Gap) -> str:
    """Whether a step in size changes less than the first one did, in absolute value; of the seeds
    that both have."""
    both = pd.DataFrame({"first": first.by_seed, "gap": gap.by_seed}).dropna()
    both = both.rename_axis(SEED).reset_index()

    def less(part: pd.DataFrame) -> float:
        return abs(part["first"].mean()) - abs(part["gap"].mean())

    return jackknife(both, SEED, less).claimed_gain()


def draw(losses: Losses) -> Iterator[tuple[str, object]]:
    """A panel per alpha_A, a line per N."""
    found = panels(losses.rows)
    figure, axes = style.subplots(1, len(found), (4.0, 3.2), sharey=True)
    figure.suptitle(f"training loss\n{BANDS}")
    for axis, (title, rows) in zip(axes[0], found.items(), strict=True):
        scans.draw_lines(axis, rows, HEAD_DIM, TRAIN_LOSS, "linear")
        axis.set_title(title)
    axes[0][0].set_ylabel(scans.LOSS_LABEL)
    yield "figure_11_dynamics", figure
