"""Loss against steps for models of several sizes (Bordelon et al., Figure 11).

    python -m plots bordelon/dynamics [metrics.csv]

A line per head dimension N, a panel per alpha_A; below, each loss minus that of the largest N on
equal seeds, which vanishes as dynamics become alike. The findings: what doubling N changes.
"""

import itertools

import pandas as pd

from plots import style, tables
from plots.bordelon import scans
from plots.bordelon.scans import ALPHA, HEAD_DIM, TRAIN_LOSS, Losses
from plots.findings import HEADER, Finding, Report
from plots.statistics import jackknife, mean
from plots.tables import SEED

TABLES = ("bordelon/figure_11_metrics",)


def read(paths: tables.Paths) -> Losses:
    """The training losses of runs that grow N."""
    tables.expect(paths, "metrics.csv")
    return scans.read_losses(paths[0], HEAD_DIM)


def by_alpha(rows: pd.DataFrame) -> dict[float, pd.DataFrame]:
    """alpha_A, falling -> its rows; all at 1 where a table does not say it."""
    if ALPHA not in rows:
        return {1.0: rows}
    return {alpha: rows[rows[ALPHA] == alpha] for alpha in scans.alphas(rows)}


def findings(losses: Losses) -> Report:
    """What each doubling changes, compared with the first one."""
    yield (
        f"{TRAIN_LOSS}, mean over all logged steps; runs of one seed see the same samples; ± "
        "standard error over seeds (n)"
    )
    yield HEADER
    for alpha, rows in by_alpha(losses.rows).items():
        gaps = pd.DataFrame()  # a row per seed, a column per doubling
        for (low, one), (high, other) in itertools.pairwise(scans.curves(rows, HEAD_DIM).items()):
            gap = (one - other).dropna(axis=1, how="all").mean()
            name = f"{scans.alpha_name(alpha)}: loss of N = {low} minus that of {high}"
            gaps = pd.concat([gaps, gap.rename(name)], axis=1)
            text = mean(gap.to_dict()).text(4)
            if gaps.shape[1] == 1:
                yield Finding(name, text)
                continue
            both = gaps[[gaps.columns[0], name]].dropna().rename_axis(SEED).reset_index()
            fall = lambda of: abs(of.iloc[:, 1].mean()) - abs(of.iloc[:, 2].mean())
            less = jackknife(both, SEED, fall)
            # The paper speaks of similar dynamics; that they come closer is ours.
            yield less.judged(name, "gains", "shrinks (ours)", text=text)
    yield from scans.cut_lines(losses.cut)


def draw(losses: Losses) -> style.Drawn:
    """A panel per alpha_A, a line per N."""
    rows_of = by_alpha(losses.rows)
    title = "training loss, and its distance to that of the largest N"
    figure, axes = style.subplots(title, 2, len(rows_of), (4.0, 2.6), sharex=True, sharey="row")
    for (upper, lower), (alpha, rows) in zip(axes.T, rows_of.items(), strict=True):
        lines = scans.curves(rows, HEAD_DIM)
        scans.draw_lines(upper, lines, HEAD_DIM, "linear")
        largest = lines[max(lines)]
        apart = {size: (own - largest).dropna(axis=1, how="all") for size, own in lines.items()}
        del apart[max(apart)]
        scans.draw_lines(lower, apart, HEAD_DIM, "linear")
        lower.axhline(0, color="black", lw=0.8)
        upper.set(title=scans.alpha_title(alpha), xlabel="")
    axes[0][0].set_ylabel(scans.LOSS_LABEL)
    axes[1][0].set_ylabel("minus that of the largest N")
    yield "figure_11_dynamics", figure
