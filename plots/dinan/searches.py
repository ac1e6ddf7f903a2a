"""Searches for learning rate and weight decay: results.csv and metrics.csv of sweeps whose curves
are scaling strategies.

Runs of vit_imagenet are compared by their best top-1 accuracy; those of bart_span_denoise by the
lowest of their evaluations, in nats per target token, as in the legends of Dinan et al. (Part II,
Figures 3 to 5).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import rates, style, tables
from plots.dinan.published import MODELS, RATE_EXPONENTS
from plots.dinan.spikes import LR_FACTOR, TOP1, TRAIN_LOSS
from plots.statistics import average
from plots.tables import CURVE, DECAY, LOSS, RATE, RUN, SEED, STATUS, STEP, WIDTH, TableError

EPOCH, EVAL_LOSS = "epoch", "eval_loss"
BEST_TOP1, BEST_LOSS = "best_eval_top1", "best_eval_loss"
SKIPPED = "skipped_steps"  # so far, because the gradient was not finite; may be absent
INFILLING = ("final_eval_infilling", "final_eval_infilled_tokens")  # of BART's tables
# A strategy's own rate and a run's final loss, where RATE has the mapped one and LOSS the lowest.
LR, FINAL = "lr", "final"
STRATEGIES = tuple(RATE_EXPONENTS)  # of BART
Losses = tuple[np.ndarray, np.ndarray]  # steps, and the losses there


class Searched(NamedTuple):
    """Results without failed runs, run -> metrics by step, and strategies with failed runs."""

    rows: pd.DataFrame
    logs: Mapping[str, pd.DataFrame]
    failed: list[str]

    def log(self, run: str) -> pd.DataFrame:
        """What a run has logged; nothing of one that ended at once."""
        return self.logs.get(run, next(iter(self.logs.values()))[:0])


def _read(paths: tables.Paths, own: Sequence[str], logged: Sequence[str], curves: Iterable[str]):
    columns = [*tables.RESULTS, RUN, RATE, DECAY, *own]
    sources = {"results.csv": columns, "metrics.csv": [CURVE, SEED, RUN, STEP, *logged]}
    results, metrics = tables.read_each(paths, sources, [SKIPPED, *INFILLING])
    results = tables.only(results, paths[0], CURVE, curves)
    rows = results[results[STATUS] != "failed"].sort_values([RATE, DECAY, SEED])
    if rows.empty:
        raise TableError(f"{paths[0]}: every run failed; see their log.txt and run the sweep again")
    ordered = metrics.sort_values([RUN, STEP], kind="stable")
    counts = results.loc[results[STATUS] == "failed", CURVE].value_counts()
    failed = [f"{style.STRATEGIES[s]}: {n} failed left out" for s, n in counts.items()]
    return Searched(rows, dict(iter(ordered.groupby(RUN))), failed)


def by_accuracy(paths: tables.Paths) -> Searched:
    """Searches of ViTs."""
    return _read(paths, [BEST_TOP1], [EPOCH, TRAIN_LOSS, LR_FACTOR, TOP1], style.STRATEGIES)


def firsts(rows: pd.DataFrame) -> pd.DataFrame:
    """The first seed of every point of a strategy's search, which all have in common, best first:
    by best accuracy, then the final loss; those that diverged last."""
    own = rows[rows[SEED] == rows[SEED].min()]
    ended = own[STATUS] != "diverged"
    last = own[LOSS].where(ended, math.inf)
    scores = own.assign(top=own[BEST_TOP1].where(ended, -math.inf), last=last)
    return scores.sort_values(["top", "last", RATE], ascending=[False, True, True])


def optimum(rows: pd.DataFrame) -> pd.DataFrame:
    """The runs of the point with the most seeds, which only a confirmed one gets; else the best."""
    points = firsts(rows)
    seeds = [len(at(rows, point[RATE], point[DECAY])) for _, point in points.iterrows()]
    best = points.iloc[int(np.argmax(seeds))]
    return at(rows, best[RATE], best[DECAY])


def at(rows: pd.DataFrame, rate: float, decay: float) -> pd.DataFrame:
    """The runs at a place, by seed."""
    near = np.isclose(rows[RATE], rate, rtol=1e-6) & np.isclose(rows[DECAY], decay, rtol=1e-6)
    return rows[near]


def percents(runs: pd.DataFrame) -> list[float]:
    """Best accuracies of those that did not diverge."""
    return list(100 * runs.loc[runs[STATUS] != "diverged", BEST_TOP1])


def accuracy(searched: Searched, run: str) -> pd.Series:
    """Top-1 accuracy of a run in per cent by epoch."""
    log = searched.log(run)
    return 100 * log.dropna(subset=[TOP1]).set_index(EPOCH)[TOP1]


def enlarge_end(axis) -> None:
    """Draws the last 40 % of epochs again, enlarged, in the panel's empty lower right: final
    differences of a few points cannot be seen on an axis from 0 to 100 %."""
    lines = [line for line in axis.get_lines() if len(line.get_xdata())]
    axis.set_ylim(0, 103)
    if not lines:
        return
    last = max(max(line.get_xdata()) for line in lines)
    first = 0.6 * last
    part = axis.inset_axes((0.34, 0.09, 0.63, 0.5))
    ends = []
    for line in lines:
        (copied,) = part.plot(*line.get_data())
        copied.update_from(line)
        copied.set(transform=part.transData, clip_path=part.patch)
        ends += [y for x, y in zip(*line.get_data(), strict=True) if x >= first]
    if ends:
        room = 0.05 * (max(ends) - min(ends)) + 0.1
        part.set_ylim(min(ends) - room, max(ends) + room)
    part.set_xlim(first, 1.01 * last)
    part.tick_params(labelsize=6, pad=1)


def by_loss(paths: tables.Paths) -> Searched:
    """Searches of BART models, with lowest losses and mapped rates in the columns that fits read:
    neural-tangent's (lr, wd) at width n stand for standard's (n^(-3/2) lr, n^(3/2) wd) (2E)."""
    own = [WIDTH, tables.PARAMETERS, BEST_LOSS]
    searched = _read(paths, own, [EVAL_LOSS], STRATEGIES)
    rows = searched.rows
    powers = rows[CURVE].map({s: float(power) for s, power in RATE_EXPONENTS.items()})
    mapped = rows[RATE] * rows[WIDTH] ** powers
    diverged = rows[STATUS] == "diverged"
    lowest = rows[BEST_LOSS].mask(diverged, math.inf)
    rows = rows.assign(**{LR: rows[RATE], RATE: mapped, FINAL: rows[LOSS], LOSS: lowest})
    return searched._replace(rows=rows.sort_values([CURVE, WIDTH, RATE, SEED]))


def fits(searched: Searched) -> dict[str, dict[int, rates.RateSweep]]:
    """Strategy -> width -> lowest losses against mapped rates, with the optimum's parabola."""
    return rates.curve_sweeps(searched.rows, STRATEGIES)


def judging_runs(searched: Searched, strategy: str, sweep: rates.RateSweep) -> pd.DataFrame:
    """The runs that judge the best rate, by rising seed: of three seeds or more each at the rate
    that the others choose, those that diverge there left out."""
    rows = of(searched, strategy, sweep.width)
    chosen = rates.chosen_by_others(sweep.chosen_from)
    wanted = rows[SEED].map(chosen).fillna(sweep.best.grid_value)
    runs = rows[np.isclose(rows[RATE], wanted, rtol=1e-9)]
    return runs[runs[SEED].isin(list(sweep.ended))].sort_values(SEED)


def of(searched: Searched, strategy: str, width: int) -> pd.DataFrame:
    """The rows of a strategy at a width, by rising rate."""
    rows = searched.rows
    return rows[(rows[CURVE] == strategy) & (rows[WIDTH] == width)]


def losses(searched: Searched, run: str) -> Losses:
    """Steps of all evaluations of a run, and their losses."""
    log = searched.log(run).dropna(subset=[EVAL_LOSS])
    return log[STEP].to_numpy(float), log[EVAL_LOSS].to_numpy(float)


def limits(lines: Iterable[Losses], last: float, first: float = 0.1) -> tuple[float, float]:
    """Losses to show of lines up to step `last`: from the lowest of all to the highest that any
    has from a share `first` of the way on, but at most six times as far as the best line falls."""
    inside = [values[(steps >= first * last) & (steps <= last)] for steps, values in lines]
    spans = [(float(values.min()), float(values.max())) for values in inside if len(values)]
    if not spans:
        return 0.0, 1.0
    low, top = min(spans)
    high = min(max(high for _, high in spans), low + 6 * max(top - low, 1e-3))
    return low, max(high, low + 1e-3)


def loss_text(values: Sequence[float]) -> str:
    """Mean and standard error over seeds."""
    n = len(values)
    return f"{values[0]:.3f}" if n == 1 else f"{average(values).text(sign='')}, n = {n}"


def model_name(rows: pd.DataFrame, width: int) -> str:
    """The paper's name of a model of its width and, within 10 %, its size; of others the width."""
    name, size = MODELS.get(width, ("", 1.0))
    parameters = rows.loc[rows[WIDTH] == width, tables.PARAMETERS]
    return name if (abs(parameters / size - 1) < 0.1).all() else f"n = {width}"


def pair(rate: float, decay: float) -> str:
    """(lr, wd) with three digits each."""
    return f"({rate:.3g}, {decay:.3g})"


def exactly(value: float) -> str:
    """A power of two as one, in matplotlib's notation; other numbers with three digits."""
    near = round(math.log2(value))
    same = math.isclose(value, 2.0**near, rel_tol=1e-6) and not 1 <= value <= 8
    return f"$2^{{{near}}}$" if same else f"{value:.3g}"


def shown(rate: float, decay: float) -> str:
    """(lr, wd) as figures write it."""
    return f"({exactly(rate)}, {exactly(decay)})"
