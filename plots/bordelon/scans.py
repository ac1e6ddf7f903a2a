"""Sizes and losses of Bordelon et al.'s sweeps: scans over heads H, head dimension N and depth L.

A scan holds the runs in which one size grows from a base model. Loss against steps is that of a
run in one pass, so the training loss is that of images or tokens it has not seen. Lines are means
over seeds, those of training losses also over the logged steps of a quarter octave (scale="log",
the default) or a fortieth of the run (scale="linear"); bands are standard errors over seeds. Runs
that ended before the others of their table are left out, and named in the findings.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import style, tables
from plots.tables import CURVE, RUN, SEED, STEP, TableError

HEAD_DIM, HEADS, LAYERS = "model.head_dim", "model.heads", "model.layers"
SIZES = (HEADS, HEAD_DIM, LAYERS)
SYMBOLS = {HEAD_DIM: "N", HEADS: "H", LAYERS: "L"}
ALPHA = "prescription.alpha_attention"
# In every figure of the paper that tells alpha_A apart.
ALPHA_LOOKS = {
    1.0: {"color": style.BLUE, "marker": "o"},
    0.5: {"color": style.ORANGE, "marker": "s"},
}
TRAIN_LOSS, EVAL_LOSS = "train_loss", "eval_loss"
CHANCE = math.log(10)  # loss in nats of ten equal probabilities
CHANCE_LOOK = {"color": "black", "ls": ":", "lw": 1}
LOSS_LABEL = "training loss (nats/image)"
PER_OCTAVE, PER_RUN = 4, 40
FEW_POINTS = 25
# Ratios of a logarithmic axis' ends: two of 1, 2 and 5 are within the first; up to the second all
# of them have room.
LEAST_SPAN, FEW_DECADES = 5.0, 1e4
Curves = Mapping[int, pd.DataFrame]  # size -> losses, a row per step and a column per seed


class Losses(NamedTuple):
    """Rows of a metrics table that have a loss, and the runs left out as they ended too early."""

    rows: pd.DataFrame
    cut: list[str]


def read_losses(path: Path, by: str, loss: str = TRAIN_LOSS) -> Losses:
    """The losses of a metrics table, of runs as long as the longest; TableError for a bad one."""
    columns = [CURVE, by, SEED, RUN, STEP, loss]
    table = tables.read(path, columns, "metrics.csv", numbers=[ALPHA, *SIZES])
    table = table[np.isfinite(table[loss])]
    if table.empty:
        raise TableError(f"{path}: no run has logged a {loss}")
    whole = table[table.groupby(RUN)[STEP].transform("max") == table[STEP].max()]
    return Losses(whole, sorted({*table[RUN]} - {*whole[RUN]}))


def cut_lines(runs: Sequence[str]) -> list[str]:
    """The line that names runs that ended early."""
    return [f"left out, as they ended before the others: {', '.join(runs)}"] if runs else []


def base(rows: pd.DataFrame) -> dict[str, int]:
    """The model that all scans grow from: the smallest in every size."""
    return {size: int(rows[size].min()) for size in SIZES}


def scan(rows: pd.DataFrame, by: str, alpha: float | None = None) -> pd.DataFrame:
    """The rows where only `by` differs from the base model, which is one of them."""
    start = base(rows)
    same = np.logical_and.reduce([rows[size] == start[size] for size in SIZES if size != by])
    return rows[same if alpha is None else same & (rows[ALPHA] == alpha)]


def curves(rows: pd.DataFrame, by: str, loss: str = TRAIN_LOSS) -> dict[int, pd.DataFrame]:
    """Losses by size, at the steps that all seeds of a size have."""
    return {
        int(size): own.pivot(index=STEP, columns=SEED, values=loss).dropna().sort_index()
        for size, own in rows.groupby(by)
    }


def alphas(rows: pd.DataFrame) -> list[float]:
    """The values of alpha_A, falling."""
    return sorted(rows[ALPHA].unique(), reverse=True)


def alpha_text(alpha: float) -> str:
    """An exponent as figures and findings write it."""
    return "1/2" if alpha == 0.5 else f"{alpha:g}"


def alpha_title(alpha: float, of: str = "A") -> str:
    """alpha_A, or alpha_L, as figures write it."""
    return rf"$\alpha_{of}$ = {alpha_text(alpha)}"


def alpha_name(alpha: float, of: str = "A") -> str:
    """alpha_A, or alpha_L, as findings write it."""
    return f"alpha_{of} = {alpha_text(alpha)}"


def size_axis(axis, sizes: pd.Series, label: str) -> None:
    """Makes a panel's axes logarithmic, with a tick at each size (heads, head dimension, depth)."""
    ticks = sorted(sizes.unique())
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.xaxis.minorticks_off()
    axis.set_xlabel(label)


def label_decades(axis, along: str = "y") -> None:
    """Labels a panel's logarithmic values at 1, 2 and 5 of each decade, or only at 1 over many;
    to call after drawing, as it widens what spans too little for two labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_ylim() if along == "y" else axis.get_xlim()
    room = math.sqrt(max(1.0, LEAST_SPAN * low / high))
    axis.set(**{f"{along}lim": (low / room, high * room)})
    subs = (1.0, 2.0, 5.0) if high / low < FEW_DECADES else (1.0,)
    # Numbers for what is read as one, powers where zeros would have to be counted.
    plain = low >= 5e-5 and high < 1e5

    def label(value: float, _) -> str:
        digit, exponent = f"{value:.0e}".split("e")
        factor = "" if digit == "1" else rf"{digit}\cdot"
        return f"{value:g}" if plain else f"${factor}10^{{{int(exponent)}}}$"

    ticks = axis.yaxis if along == "y" else axis.xaxis
    ticks.set_major_locator(LogLocator(subs=subs, numticks=20))
    ticks.set_major_formatter(FuncFormatter(label))
    ticks.set_minor_locator(NullLocator())


def draw_lines(
    axis, curves: Curves, by: str, scale="log", binned=True, factors: Mapping | None = None
) -> None:
    """Fills a panel: loss against steps, or `factors` times these by size, a line per size with its
    band; evaluations, which are few and not noisy, keep their places (`binned` False)."""
    last = max((own.index.max() for own in curves.values()), default=1)
    colors = style.width_colors(list(curves)).values()
    for (size, losses), color in zip(curves.items(), colors, strict=True):
        at = losses.index.to_numpy(float)
        places = PER_OCTAVE * np.log2(at.clip(1)) if scale == "log" else PER_RUN * at / last
        bins = np.ceil(places).astype(int) if binned else np.arange(len(at))
        steps = losses.index.to_series().groupby(bins).mean().to_numpy(float)
        steps = steps * (factors or {}).get(size, 1.0)
        values = losses.groupby(bins).mean()
        mean, error = values.mean(axis=1), values.sem(axis=1)
        mark = {"ms": 3, "marker": "o" if len(steps) < FEW_POINTS else ""}
        axis.plot(steps, mean, lw=1.3, color=color, label=f"{SYMBOLS[by]} = {size}", **mark)
        if values.shape[1] > 1:
            axis.fill_between(steps, mean - error, mean + error, color=color, alpha=0.2, lw=0)
    axis.set_xscale(scale)
    axis.set_xlabel("steps")
    axis.legend(fontsize=7, frameon=False)


def mean_line(axis, rows: pd.DataFrame, size: str, value: str, color, label: str, **look) -> None:
    """Means with standard errors; what is not above zero has no place on a log axis."""
    groups = rows.groupby(size)[value]
    means, errors = groups.mean(), groups.sem().fillna(0)
    means = means[means > 0]
    bars = [np.minimum(errors[means.index], 0.99 * means), errors[means.index]]
    look = {"marker": "o", "ms": 3, "lw": 1, "elinewidth": 0.7, **look}
    axis.errorbar(means.index, means, bars, color=color, label=label, **look)


def guide(axis, means: pd.Series, power: float, label: str, above: float = 1.6, **look) -> None:
    """A dotted line of the predicted power, above the points."""
    means = means[means > 0]
    if len(means) > 1:
        sizes = means.index.to_numpy(float)
        line = above * means.iloc[0] * (sizes / sizes[0]) ** power
        axis.plot(sizes, line, ":", **{"color": "black", "lw": 1.2, **look}, label=label)
