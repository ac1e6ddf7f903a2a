"""Searches for the learning rate on bart_span_denoise (Dinan et al., Part II, Figure 3).

    python -m plots dinan/bart_rates [results.csv metrics.csv]

Validation loss against updates for every learning rate, standard on the left and neural-tangent on
the right, a row per width: means over seeds, [lowest loss ± standard error over n seeds]. A second
figure has the lowest loss against the mapped rate, and the optimal one against width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from plots import panels, rates, style
from plots.dinan import searches
from plots.dinan.published import BART_RATES, BART_WIDTH, MODELS, RATE_EXPONENTS
from plots.dinan.searches import STRATEGIES, Losses, Searched
from plots.findings import HEADER, UNKNOWN, Estimate, Finding, Report
from plots.rates import RateSweep, exponent
from plots.statistics import average, differences, mean
from plots.tables import RATE, RUN, SEED, STEP, WIDTH

TABLES = ("dinan/figure_3_4", "dinan/figure_3_4_metrics")
# How far the rate is lowered to see what that costs: two steps of the paper's grid.
LOWERED = 4
GRID_STEP = 1.0  # octaves
read = searches.by_loss


def widths(searched: Searched) -> list[int]:
    """All widths, rising."""
    return sorted(map(int, searched.rows[WIDTH].unique()))


def losses_at(sweep: RateSweep, rate: float) -> dict[int, float]:
    """Seed -> lowest loss at a mapped rate, on a line in log(rate) between its neighbours. Seeds
    that lack one of them, or diverged there, are left out; empty outside of the rates."""
    below = [r for r in sorted(sweep.chosen_from) if r <= rate * (1 + 1e-6)]
    above = [r for r in sorted(sweep.chosen_from) if r >= rate * (1 - 1e-6)]
    if not below or not above:
        return {}
    low, high = below[-1], above[0]
    share = math.log(rate / low) / math.log(high / low) if high > low else 0.0
    first, second = sweep.chosen_from[low], sweep.chosen_from[high]
    values = {s: first[s] + share * (second[s] - first[s]) for s in first.keys() & second.keys()}
    return {seed: value for seed, value in sorted(values.items()) if math.isfinite(value)}


def degradation(sweep: RateSweep | None, vertex: bool = False) -> Estimate:
    """What a quarter of the optimal rate, the grid's as in the paper or the parabola's, costs in
    nats against the best one as it is judged, the mean over seeds; NaN where it was not run."""
    if sweep is None:
        return UNKNOWN
    rate = sweep.best.value if vertex else sweep.best.grid_value
    return mean(differences(losses_at(sweep, rate / LOWERED), sweep.ended))


def findings(searched: Searched) -> Report:
    """Optima and what surrounds them at every width, then what connects the widths."""
    sweeps_of = searches.fits(searched)
    yield (
        "a run's loss is the lowest of its evaluations; mapped: lr for standard, n^(-3/2) lr for "
        "neural-tangent; lr*: the best of the grid, or the lowest point of the parabola around it"
    )
    yield rates.noise_line(searched.rows, "n")
    yield HEADER
    for width in widths(searched):
        for strategy in STRATEGIES:
            name = f"{style.STRATEGIES[strategy]}, n = {width}: "
            rows, sweep = searches.of(searched, strategy, width), sweeps_of[strategy].get(width)
            if sweep:
                yield from _optimum(searched, strategy, sweep, name)
            elif len(rows):
                yield Finding(f"{name}lr*", "every run diverged")
            if len(rows):
                yield _skipped(searched, rows, name)
        yield from _between([sweeps_of[s].get(width) for s in STRATEGIES], width)
    yield from _exponents(sweeps_of)
    yield from searched.failed


def _optimum(searched: Searched, strategy: str, sweep: RateSweep, name: str) -> Report:
    """The best rate of the grid and by a parabola, the loss there, and what a lower rate costs."""
    best, n = sweep.best, len(sweep.chosen_from)
    power = float(RATE_EXPONENTS[strategy])
    rate = best.grid_value / sweep.width**power
    edge = ", at the edge" if best.at_edge else ""
    grid = f"{rate:.3g}, mapped {best.grid_value:.3g} (of {n} rate{'s' * (n != 1)}{edge})"
    error = f"{best.error:.2f}" if math.isfinite(best.error) else "?"
    parabola = f"{best.value:.3g}, ± {error} octaves ({best.n} rates)"
    if not best.inside:
        why = "the best rate is at the edge" if best.at_edge else "none between stable rates"
        parabola = f"no parabola: {why}"
    beside: list[tuple[str, ...]] = [(), ()]
    if searches.model_name(searched.rows, sweep.width) == MODELS[BART_WIDTH][0]:
        theirs = BART_RATES[strategy]
        there = theirs * BART_WIDTH**power
        octaves = [math.log2(value / there) for value in (best.grid_value, best.value)]
        beside[0] = (f"{theirs:g}", f"lr x 2^{octaves[0]:+.1f}")
        beside[1] = (f"{there:.3g} (grid)", f"lr x 2^{octaves[1]:+.2f}") if best.inside else ()
    loss = average(list(sweep.ended.values()))
    bits = Estimate(loss.value / math.log(2), loss.error / math.log(2))
    lowest = f"{loss.text(4, '')} nats, {bits.text(4, '')} bits (n = {len(sweep.ended)})"
    yield Finding(f"{name}lr* of the grid", grid, *beside[0])
    yield Finding(f"{name}lr* by a parabola, mapped", parabola, *beside[1])
    yield Finding(f"{name}lowest loss", lowest)
    lower = f"{name}loss at lr* / {LOWERED} minus lowest (nats)"
    yield Finding(lower, degradation(sweep).text(4))
    yield from _parts(searches.judging_runs(searched, strategy, sweep), name)


def _parts(runs: pd.DataFrame, name: str) -> Report:
    """What the final loss is of masked targets and of copied ones, per target of its kind."""
    infilling, share = searches.INFILLING
    if infilling in runs and len(runs):
        filled = (runs[infilling] / runs[share]).to_dict()
        copied = ((runs[searches.FINAL] - runs[infilling]) / (1 - runs[share])).to_dict()
        text = f"{mean(filled).text(3, '')}, {runs[share].mean():.0%} of targets"
        yield Finding(f"{name}final loss of infilling (nats)", text)
        text = f"{mean(copied).text(3, '')}, the others"
        yield Finding(f"{name}final loss of copying (nats)", text)


def _skipped(searched: Searched, rows: pd.DataFrame, name: str) -> Finding:
    """Steps that were skipped because the gradient overflowed, by falling rate."""
    name += "overflowing steps per run, by lr"
    logs = {run: searched.log(run) for run in rows[RUN]}
    skipped = searches.SKIPPED
    counts = {run: log[skipped].max() for run, log in logs.items() if skipped in log}
    if not counts:
        return Finding(name, "not recorded", "at the higher lr")
    means = rows.assign(skipped=rows[RUN].map(counts)).groupby(searches.LR)["skipped"].mean()[::-1]
    hit = [f"{rate:.3g}: {value:.3g}" for rate, value in means.items() if value > 0]
    verdict = "" if hit else "none here"
    return Finding(name, ", ".join(hit) or "none", "at the higher lr", verdict)


def _between(both: list[RateSweep | None], width: int) -> Report:
    """How far apart the mapped optima lie, and whether a lower rate costs standard more."""
    if None not in both:
        standard, scaled = (Estimate(math.log2(one.best.value), one.best.error) for one in both)
        gap = scaled - standard
        # The paper compares points of a grid; errors longer than its cell do not.
        within = abs(gap.value) <= GRID_STEP / 2 and gap.error <= GRID_STEP / 2
        verdict = "agrees within the paper's grid" if within else gap.claimed_equal()
        if any(one.best.at_edge for one in both):
            verdict, gap = "undecided: at an edge", replace(gap, error=math.nan)
        name = f"n = {width}: mapped lr*, neural-tangent / standard (octaves)"
        yield Finding(name, gap.text(2), "0", verdict, gap)
    for vertex, whose in ((False, ""), (True, "the parabola's ")):
        more = degradation(both[0], vertex) - degradation(both[1], vertex)
        name = f"n = {width}: cost of {whose}lr* / {LOWERED}, standard - neural-tangent"
        yield more.judged(name, "gains", "above 0", 4)


def _exponents(sweeps_of: Mapping[str, rates.Sweeps]) -> Report:
    """The mapped optima's powers of n; neural-tangent's global rate should have none."""
    power = RATE_EXPONENTS["neural_tangent"]
    for strategy in STRATEGIES:
        fit = exponent(sweeps_of[strategy])
        name = f"{style.STRATEGIES[strategy]}: exponent of the width in mapped lr*"
        yield fit.finding(name, float(power), f"{power} (lambda)", 2)
    own = replace(fit, value=fit.value - float(power), by_size={})
    yield own.finding("neural-tangent: exponent of the width in lr* itself", 0.0, digits=2)


def draw(searched: Searched) -> style.Drawn:
    """Figure 3, and its optima."""
    sweeps_of = searches.fits(searched)
    yield "figure_3_bart_rates", _curves(searched, sweeps_of)
    lines = []
    for strategy in STRATEGIES:
        label = style.STRATEGIES[strategy] + (r", lr $n^{-3/2}$" if strategy != "standard" else "")
        power = float(RATE_EXPONENTS["neural_tangent"])
        lines.append(panels.Line(label, sweeps_of[strategy], style.STRATEGY_LOOKS[strategy], power))
    loss = f"minimum {style.VALIDATION_LABEL}"
    figure = panels.transfer("optima", lines, "n", "width n", "lr, mapped", loss)
    yield "figure_3_bart_optima", figure


def _curves(searched: Searched, sweeps_of: Mapping[str, rates.Sweeps]):
    """Figure 3: a row of panels per width."""
    title = "searches for the learning rate: best black, lower blue, higher red"
    figure, axes = style.subplots(title, len(widths(searched)), 2, (6.0, 3.0), sharey="row")
    for row, width in zip(axes, widths(searched), strict=True):
        drawn: list[Losses] = []
        for axis, strategy in zip(row, STRATEGIES, strict=True):
            name = searches.model_name(searched.rows, width)
            axis.set_title(f"{style.STRATEGIES[strategy]}, {name}")
            rows, sweep = searches.of(searched, strategy, width), sweeps_of[strategy].get(width)
            drawn += _draw_search(axis, searched, rows, sweep)
            axis.tick_params(labelleft=True)
            axis.set_ylabel(style.VALIDATION_LABEL)
        last = max((steps[-1] for steps, _ in drawn if len(steps)), default=1.0)
        low, high = searches.limits(drawn, last)
        row[0].set_ylim(low - 0.08 * (high - low), high + 0.06 * (high - low))
        for axis in row:
            style.update_ticks(axis, 1.02 * last)
    style.label_grid(axes, x="updates")
    entries = [("optimum *", {"color": "gray", "lw": 2.2})]
    if np.isinf(searched.rows[searches.LOSS]).any():
        entries.append(("diverged", {"color": "gray", **style.LOST}))
    style.legend(figure, entries)
    return figure


def _beside(every: Sequence[float], best: float | None) -> dict[float, Any]:
    """Rate -> colour by how many steps of the grid it lies from the best one."""
    from matplotlib import colormaps

    middle = every.index(best) if best in every else len(every)
    far = max(middle, len(every) - 1 - middle, 1)
    shades = {rate: 0.95 - 0.6 * abs(index - middle) / far for index, rate in enumerate(every)}
    maps = {rate: colormaps["Blues" if i < middle else "Reds"] for i, rate in enumerate(every)}
    return {rate: maps[rate](shades[rate]) if rate != best else "black" for rate in every}


def _draw_search(axis, searched: Searched, rows, sweep: RateSweep | None) -> list[Losses]:
    """A line per rate, the mean over seeds or the first that diverged; returns the others."""
    colors = _beside(sorted(rows[RATE].unique()), sweep.best.grid_value if sweep else None)
    handles, drawn = [], []
    for rate, own in rows.groupby(RATE):
        best = sweep is not None and rate == sweep.best.grid_value
        lost = own[np.isinf(own[searches.LOSS])]
        log = pd.concat([searched.log(run) for run in (lost if len(lost) else own)[RUN]])
        evaluated = log.dropna(subset=[searches.EVAL_LOSS])
        line = evaluated.pivot_table(index=STEP, columns=SEED, values=searches.EVAL_LOSS).dropna()
        steps, values = line.index.to_numpy(float), line.mean(axis=1).to_numpy()
        text = f"{len(lost)} of {len(own)} diverged"
        if lost.empty:
            text = searches.loss_text(list(own[searches.LOSS]))
            drawn.append((steps, values))
        mapped = "" if own[searches.LR].iloc[0] == rate else f" ({searches.exactly(rate)})"
        label = f"{searches.exactly(own[searches.LR].iloc[0])}{mapped} [{text}]" + " *" * best
        look = {"color": colors[rate], "lw": 2.2 if best else 1.0, "zorder": 3 if best else 2}
        handles += axis.plot(steps, values, label=label, **look)
        if len(lost) and len(steps):
            axis.plot(steps[-1], values[-1], color=colors[rate], **style.LOST)
    mapped = r" ($n^{-3/2}$ lr)" if (rows[searches.LR] != rows[RATE]).any() else ""
    title = f"lr{mapped} [minimum loss, nats]"
    place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.03), "borderaxespad": 0}
    size = {"fontsize": 6.5, "title_fontsize": 6.5, "alignment": "left", "frameon": False}
    axis.legend(handles=handles[::-1], title=title, **place, **size)
    return drawn
