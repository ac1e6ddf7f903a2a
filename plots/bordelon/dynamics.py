"""Loss against steps for models of several sizes (Bordelon et al., Figure 11; also 4a, 6a and 8).

    python -m plots.bordelon.dynamics [metrics.csv] [--out FOLDER]

A line per head dimension N, a panel per alpha_A, and the findings: what doubling N changes. For
other figures:

    draw(path, ..., by="model.heads", folder=FIGURES, name="figure_4a")   # whole figure, PNG + PDF
    rows = read(path, ..., by="model.heads")          # or its parts: rows may be filtered at will,
    draw_lines(axis, rows, by="model.heads")          # and this fills one panel of another figure
    gaps(rows, by="model.heads")                      # loss of a size minus that of the next one

The training loss of a run in one pass is that of images or tokens it has not seen. Lines are means
over seeds, and over the logged steps of a quarter octave (scale="log", the default) or a fortieth
of the run (scale="linear"); bands are standard errors over seeds. Runs that ended before the others
of their table are left out, and named in the findings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Finding
from plots.statistics import Estimate, jackknife
from plots.tables import CURVE, LOSS, SEED, TableError

STEM, FIGURE = "infinite_figure_11_metrics", "infinite_figure_11_dynamics"
RUN, STEP, TRAIN_LOSS = "run", "step", "train_loss"
HEAD_DIM, HEADS, LAYERS = "model.head_dim", "model.heads", "model.layers"
ALPHA = "prescription.alpha_attention"
DERIVED = "derived"  # beside exponents that follow from the paper's but do not stand in it
SYMBOLS = {HEAD_DIM: "N", HEADS: "H", LAYERS: "L"}
PER_OCTAVE, PER_RUN = 4, 40
# Ratios of a logarithmic axis' ends: two of 1, 2 and 5 are within the first; up to the second all
# of them have room.
LEAST_SPAN, FEW_DECADES = 5.0, 1e4
LOSS_LABEL = "training loss (nats/image)"


@dataclass(frozen=True)
class Line:
    """Loss against steps of one size: mean over `seeds` seeds and its standard error (NaN for
    one), at the steps that all of them logged."""

    steps: np.ndarray
    losses: np.ndarray
    errors: np.ndarray
    seeds: int


@dataclass(frozen=True)
class Gap:
    """Loss of size `low` minus that of `high`, the next one: mean over logged steps of the runs
    with equal seeds, which see the same samples in the same order, by seed."""

    low: int
    high: int
    by_seed: pd.Series

    @property
    def estimate(self) -> Estimate:
        """The mean over seeds, with its standard error."""
        rows = self.by_seed.rename(LOSS).rename_axis(SEED).reset_index()
        return jackknife(rows, SEED, lambda part: float(part[LOSS].mean()))


def read(*paths: Path, by: str, loss: str = TRAIN_LOSS) -> pd.DataFrame:
    """The rows of metrics tables that have a loss, of runs as long as the longest of their table;
    TableError for bad ones."""
    return pd.concat([_whole(table) for table in _tables(paths, by, loss)], ignore_index=True)


def cut_short(*paths: Path, by: str, loss: str = TRAIN_LOSS) -> list[str]:
    """The runs that `read` leaves out, as they ended before the others of their table."""
    found = _tables(paths, by, loss)
    return [run for table in found for run in sorted({*table[RUN]} - {*_whole(table)[RUN]})]


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    return table[table.groupby(RUN)[STEP].transform("max") == table[STEP].max()]


def _tables(paths: Sequence[Path], by: str, loss: str) -> list[pd.DataFrame]:
    columns = [by, SEED, RUN, STEP, loss]
    found = []
    for path in paths:
        table = tables.read(path, [CURVE, *columns], "metrics.csv")
        table = tables.numbers(table, path, [by, SEED, STEP, loss])
        if ALPHA in table:
            table = tables.numbers(table, path, [ALPHA])
        table = table[np.isfinite(table[loss])]
        if table.empty:
            raise TableError(f"{path}: no run has logged a {loss}")
        found.append(table)
    return found


def lines(
    rows: pd.DataFrame, by: str, loss: str = TRAIN_LOSS, scale: str = "log"
) -> dict[int, Line]:
    """Size -> line, by rising size; TableError where a size has two runs of one seed."""
    last = rows[STEP].max()
    return {int(size): _line(own, by, loss, scale, last) for size, own in rows.groupby(by)}


def _line(rows: pd.DataFrame, by: str, loss: str, scale: str, last: float) -> Line:
    losses = _by_seed(rows, by, loss)
    at = losses.index.to_numpy(float)
    places = PER_OCTAVE * np.log2(at.clip(1)) if scale == "log" else PER_RUN * at / last
    bins = np.ceil(places).astype(int)
    steps = losses.index.to_series().groupby(bins).mean().to_numpy(float)
    binned = losses.groupby(bins).mean()
    n = binned.shape[1]
    errors = binned.std(axis=1, ddof=1) / math.sqrt(n) if n > 1 else binned.mean(axis=1) * math.nan
    return Line(steps, binned.mean(axis=1).to_numpy(), errors.to_numpy(), n)


def _by_seed(rows: pd.DataFrame, by: str, loss: str) -> pd.DataFrame:
    """Losses of one size: a row per step that all seeds have, a column per seed."""
    again = rows[rows.duplicated([SEED, STEP])]
    if not again.empty:
        row = again.iloc[0]
        raise TableError(
            f"two runs with {by} {row[by]:g} and seed {row[SEED]:g} are in one panel, "
            f"{row[RUN]} and another; expected one"
        )
    return rows.pivot(index=STEP, columns=SEED, values=loss).dropna().sort_index()


def gaps(rows: pd.DataFrame, by: str, loss: str = TRAIN_LOSS) -> list[Gap]:
    """What each size gains over the one before it, over common seeds and steps."""
    losses = {int(size): _by_seed(own, by, loss) for size, own in rows.groupby(by)}
    sizes = list(losses)
    found = []
    for low, high in zip(sizes, sizes[1:]):
        values = (losses[low] - losses[high]).dropna(axis=1, how="all").mean()
        if len(values):
            found.append(Gap(low, high, values))
    return found


def panels(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Title -> rows of a panel: one per alpha_A, falling, or one for all if there is none."""
    if ALPHA not in rows:
        return {"": rows}
    return {alpha_title(alpha): rows[rows[ALPHA] == alpha] for alpha in alphas(rows)}


def alphas(rows: pd.DataFrame) -> list[float]:
    """The values of alpha_A, falling."""
    return sorted(rows[ALPHA].unique(), reverse=True)


def alpha_text(alpha: float) -> str:
    """An exponent as figures and findings write it."""
    return "1/2" if alpha == 0.5 else f"{alpha:g}"


def alpha_title(alpha: float) -> str:
    """alpha_A as figures write it."""
    return rf"$\alpha_A$ = {alpha_text(alpha)}"


def size_axis(axis, sizes: pd.Series, label: str) -> None:
    """Makes a panel's axes logarithmic, with a tick at each size (heads, head dimension, depth)."""
    ticks = sorted(sizes.unique())
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.xaxis.minorticks_off()
    axis.set_xlabel(label)


def draw_lines(
    axis, rows: pd.DataFrame, by: str, loss: str = TRAIN_LOSS, scale: str = "log"
) -> None:
    """Fills a panel: loss against steps, a line per size."""
    found = lines(rows, by, loss, scale)
    for (size, line), color in zip(found.items(), style.width_colors(list(found)).values()):
        axis.plot(line.steps, line.losses, lw=1.3, color=color,
                  label=f"{SYMBOLS.get(by, by)} = {size}")
        if line.seeds > 1:
            axis.fill_between(line.steps, line.losses - line.errors, line.losses + line.errors,
                              color=color, alpha=0.2, lw=0)
    axis.set_xscale(scale)
    axis.set_xlabel("steps")
    axis.legend(fontsize=7, frameon=False)


def draw(
    *paths: Path,
    by: str,
    folder: Path,
    name: str,
    loss: str = TRAIN_LOSS,
    label: str = LOSS_LABEL,
    scale: str = "log",
) -> list[Path]:
    """The figure `name` of some metrics tables: a panel per alpha_A, a line per value of `by`."""
    found = panels(read(*paths, by=by, loss=loss))
    figure, axes = style.subplots(1, len(found), (4.0, 3.2), sharey=True)
    for axis, (title, rows) in zip(axes[0], found.items()):
        draw_lines(axis, rows, by, loss, scale)
        axis.set_title(title)
    axes[0][0].set_ylabel(label)
    return style.save(figure, folder, name)


def findings(rows: pd.DataFrame, by: str, loss: str = TRAIN_LOSS) -> list[Finding]:
    """What each doubling changes, beside what the first one changes."""
    symbol, result = SYMBOLS.get(by, by), []
    for title, own in panels(rows).items():
        place = f"{plain(title)}: " if title else ""
        found = gaps(own, by, loss)
        for gap in found:
            name = f"{place}loss of {symbol} = {gap.low} minus that of {gap.high}"
            measured = gap.estimate.text(4)
            # The paper speaks of similar dynamics; this is ours.
            beside = "shrinks (ours)" if gap is not found[0] else ""
            result.append(Finding(name, measured, beside, _shrinks(gap, found[0])))
    return result


def one_run_each(rows: pd.DataFrame, path: Path, keys: Sequence[str], expected: str) -> None:
    """TableError if two rows have the same `keys`: the table is not that of the `expected` sweep,
    and its runs differ in something that the figure does not show."""
    again = rows[rows.duplicated(list(keys))]
    if again.empty:
        return
    point = ", ".join(f"{key} {_plainly(again.iloc[0][key])}" for key in keys)
    raise TableError(f"{path}: two runs with {point}; expected one; is it the {expected}?")


def _plainly(value: object) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def label_decades(axis) -> None:
    """Labels a panel's logarithmic values at 1, 2 and 5 of each decade, or only at 1 over many;
    to call after drawing, as it widens what spans too little for two labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_ylim()
    room = math.sqrt(max(1.0, LEAST_SPAN * low / high))
    axis.set_ylim(low / room, high * room)
    subs = (1.0, 2.0, 5.0) if high / low < FEW_DECADES else (1.0,)
    axis.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def plain(title: str) -> str:
    """A title as terminals can show it."""
    return title.replace(r"$\alpha_A$", "alpha_A")


def _shrinks(gap: Gap, first: Gap) -> str:
    """Whether a step in size changes less than the first one did, in absolute value; of the seeds
    that both have."""
    if gap is first:
        return ""
    both = pd.DataFrame({"first": first.by_seed, "gap": gap.by_seed}).dropna()
    both = both.rename_axis(SEED).reset_index()

    def less(part: pd.DataFrame) -> float:
        return abs(part["first"].mean()) - abs(part["gap"].mean())

    return jackknife(both, SEED, less).claimed_gain()


def report(rows: pd.DataFrame, by: str, loss: str = TRAIN_LOSS) -> str:
    """The findings in words."""
    text = [f"{loss}, mean over all logged steps; runs of one seed see the same samples; ± standard"
            " error over seeds (n)", HEADER]
    return "\n".join(text + [finding.line() for finding in findings(rows, by, loss)])


def _figure_11(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    lost = cut_lines(cut_short(*paths, by=HEAD_DIM))
    text = "\n".join([report(read(*paths, by=HEAD_DIM), HEAD_DIM), *lost])
    return text, draw(*paths, by=HEAD_DIM, folder=folder, name=FIGURE, scale="linear")


def cut_lines(runs: Sequence[str]) -> list[str]:
    """The line that names runs that ended early."""
    return [f"left out, as they ended before the others: {', '.join(runs)}"] if runs else []


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a bad table is one line and exit code 2."""
    style.command("infinite_dynamics", __doc__, [STEM], _figure_11, argv)


if __name__ == "__main__":
    main()
