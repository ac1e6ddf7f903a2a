"""Standard and neural-tangent scaling on BART-large and R2C2 (Dinan et al., II, Figures 4 and 5).

    python -m plots dinan/bart_strategies [results.csv metrics.csv [results.csv metrics.csv]]

Figure 4: validation loss against updates of both strategies at their best (lr, wd), a panel per
width. Figure 5, where the tables of the larger model's sweep are given too: that model and the
smaller one (dashed) at its largest width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from plots import style, tables
from plots.dinan import searches
from plots.dinan.published import MODELS, RATE_EXPONENTS
from plots.dinan.searches import Point, Run, Sweep, model_name
from plots.findings import HEADER, Finding, Printed
from plots.rates import PAIRED
from plots.statistics import average, differences, mean

TABLES = (
    "dinan/figure_3_4",
    "dinan/figure_3_4_metrics",
    "dinan/figure_5",
    "dinan/figure_5_metrics",
)
# Which of them a figure is drawn of, for its caption.
PARTS = {"figure_4_bart_strategies": slice(2), "figure_5_bart_r2c2": slice(4)}
STRATEGIES = tuple(RATE_EXPONENTS)
LAYERS = "model.layers"
Data = tuple[Sweep, Sweep | None]


def read(paths: Sequence[Path]) -> Data:
    """One sweep, or two by rising size; TableError if the second has no larger model."""
    found = searches.by_loss(paths)
    if len(found) > 2:
        raise tables.TableError(
            f"{paths[0]}: expected the tables of one sweep or two, got {len(paths)}"
        )
    sweep, larger = found[0], found[1] if len(found) == 2 else None
    if larger and searches.largest(larger) <= searches.largest(sweep):
        raise tables.TableError(
            f"{larger.path}: {searches.largest(larger):,.0f} parameters as in "
            f"{sweep.path}; expected a larger model"
        )
    return sweep, larger


def optima(sweep: Sweep, width: int) -> dict[str, Point]:
    """Strategy -> its best point at a width with the runs that judge it, where not all diverged."""
    return {
        strategy: replace(search.optimum, runs=search.judged)
        for strategy, search in sweep.at(width).items()
        if search.judged
    }


def named(sweep: Sweep, width: int) -> str:
    """The paper's name of a model; of others the width, and the blocks where the table has them."""
    name, layers = model_name(width), sweep.rows.get(LAYERS)
    if layers is None or width in MODELS:
        return name
    return f"{name}, {layers.iloc[0]} + {layers.iloc[0]} blocks"


def lowest(run: Run, last: float) -> float:
    """The lowest loss up to a step; NaN without an evaluation."""
    inside = run.losses[run.steps <= last]
    return float(inside.min()) if len(inside) else math.nan


def updates_to(run: Run, loss: float) -> float:
    """Updates until a loss is reached, on straight lines between evaluations; NaN if it is not."""
    below = np.flatnonzero(run.losses <= loss)
    if not len(below):
        return math.nan
    index = below[0]
    if index == 0:
        return float(run.steps[0])
    (x0, x1), (y0, y1) = run.steps[index - 1 : index + 1], run.losses[index - 1 : index + 1]
    return float(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))


# Findings


def findings(data: Data) -> list[Printed]:
    """Losses at the optima and their difference, then the early stage of the larger model."""
    sweep, larger = data
    result: list[Printed] = [
        "a run's loss is the lowest of its evaluations, of three seeds or more each at the rate "
        "that the others choose; ± standard errors over n seeds, of differences by seed where both "
        "have the same three or more, else added in squares",
        HEADER,
    ]
    for width in sweep.widths:
        found, name = optima(sweep, width), named(sweep, width)
        result += [*_losses(found, name), _difference(found, name, None)]
    if larger:
        last, (own, other) = end(larger), ((one, one.widths[-1]) for one in (larger, sweep))
        found, name = optima(*own), named(*own)
        result += _losses(found, name)
        result += [_difference(found, name, last), _speed(found, name, last)]
        found, name = optima(*other), named(*other)
        result += [_difference(found, name, last, early=True), _speed(found, name, last)]
    else:
        result.append("Figure 5 needs the tables of bart_span_denoise/sweeps/figure_5.yaml too")
    return [*result, *(line for own in data if own for line in own.failed)]


def end(sweep: Sweep) -> float:
    """The last evaluation of the best points at the largest width."""
    points = optima(sweep, sweep.widths[-1]).values()
    return max((run.steps[-1] for point in points for run in point.runs), default=math.nan)


def _losses(found: Mapping[str, Point], model: str) -> list[Finding]:
    """The mean of the lowest losses of both strategies."""
    result = []
    for strategy in STRATEGIES:
        name = f"{style.STRATEGIES[strategy]}, {model}: lowest loss (nats)"
        if strategy not in found:
            result.append(Finding(name, "not measured"))
            continue
        loss, point = average([run.best for run in found[strategy].runs]), found[strategy]
        measured = (
            f"{loss.text(4, '')} (n = {len(point.runs)}), "
            f"{searches.bits(loss.value):.4f} bits, at {point.pair}"
        )
        result.append(Finding(name, measured))
    return result


def _difference(
    found: Mapping[str, Point], model: str, last: float | None, early: bool = False
) -> Finding:
    """Standard minus neural-tangent. The paper has standard marginally better for BART-large, and
    neural-tangent for R2C2, early in training."""
    where = f" up to step {last:g}" if last is not None else ""
    name = f"{model}: standard - neural-tangent{where} (nats)"
    published = "above 0" if last is not None else "below 0, marginally"
    if not all(strategy in found for strategy in STRATEGIES):
        return Finding(name, "not measured", "" if early else published, "not measured")
    until = math.inf if last is None else last
    losses = [{run.seed: lowest(run, until) for run in found[s].runs} for s in STRATEGIES]
    first, second = (average([*own.values()]) for own in losses)
    by_seed = losses[0].keys() == losses[1].keys() and len(losses[0]) >= PAIRED
    gap = mean(differences(*losses)) if by_seed else first - second
    if early:
        return Finding(name, gap.text(4))
    verdict = (-gap if last is None else gap).claimed_gain()
    return Finding(name, gap.text(4), published, verdict, gap)


def _speed(found: Mapping[str, Point], model: str, last: float) -> Finding:
    """How many updates neural-tangent takes to the loss that standard has at `last`, by seed."""
    name = f"{model}: updates to standard's loss then, relative"
    if not all(strategy in found for strategy in STRATEGIES):
        return Finding(name, "not measured")
    standard = {run.seed: run for run in found["standard"].runs}
    pairs = [
        (standard[run.seed], run) for run in found["neural_tangent"].runs if run.seed in standard
    ]
    values = [
        updates_to(run, lowest(own, last)) / updates_to(own, lowest(own, last))
        for own, run in pairs
    ]
    reached = [value for value in values if math.isfinite(value)]
    short = len(values) - len(reached)
    missing = f", {short} did not reach it" if short else ""
    if not reached:
        return Finding(name, f"not reached (n = {len(values)})")
    return Finding(name, f"{average(reached).text(3, '')} (n = {len(reached)}{missing})")


# Figures


def draw(data: Data) -> Iterator[tuple[str, object]]:
    """Figure 4, and Figure 5 where there is a larger model."""
    sweep, larger = data
    yield "figure_4_bart_strategies", _figure_4(sweep)
    if larger:
        yield "figure_5_bart_r2c2", _figure_5(sweep, larger)


def _figure_4(sweep: Sweep):
    """Figure 4: both optima, a panel per width."""
    widths = sweep.widths
    figure, axes = style.subplots(1, len(widths), (4.9, 3.5), sharey=True)
    figure.suptitle(f"strategies at their optima\n{_SHADES}; legend: mean ± standard error")
    points = [point for width in widths for point in optima(sweep, width).values()]
    for axis, width in zip(axes[0], widths, strict=True):
        found = optima(sweep, width)
        for strategy, point in found.items():
            _draw_point(axis, strategy, point)
        _finish(axis, points, math.inf)
        axis.set_title(named(sweep, width))
        _legend(axis, [_entry(s, p.shown, p.text) for s, p in found.items()], "(lr, wd)")
    axes[0][0].set_ylabel(style.VALIDATION_LABEL)
    return figure


def _figure_5(sweep: Sweep, larger: Sweep):
    """Figure 5: the larger model, and the smaller one dashed, up to the larger one's end."""
    figure, axes = style.subplots(1, 1, (5.6, 3.8))
    figure.suptitle(f"the larger model and the smaller one (dashed)\n{_SHADES}")
    axis, last, entries, points = axes[0][0], end(larger), [], []
    for own, look in ((larger, {}), (sweep, {"ls": "--"})):
        width = own.widths[-1]
        for strategy, point in optima(own, width).items():
            _draw_point(axis, strategy, point, **look)
            points.append(point)
            text = searches.loss_text([lowest(run, last) for run in point.runs])
            entries.append(_entry(strategy, point.shown, text, named(own, width) + " ", **look))
    _finish(axis, points, last, 0.25)  # a third of it is warm-up
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.2 * (high - low))  # the legend has four entries
    axis.set_ylabel(style.VALIDATION_LABEL)
    _legend(axis, entries, f"(lr, wd), up to step {last:g}")
    return figure


_SHADES = (
    "a line per seed, the first the darkest, of three or more each at the rate that the others "
    "choose"
)


def _draw_point(axis, strategy: str, point: Point, **look) -> None:
    """A line per seed, paler with the seed, the first on top."""
    colors = style.shades(style.STRATEGY_COLORS[strategy], len(point.runs))
    for run, color in reversed(list(zip(point.runs, colors, strict=True))):
        axis.plot(run.steps, run.losses, color=color, lw=1.3, **look)


def _finish(axis, points: Sequence[Point], last: float, first: float = 0.1) -> None:
    """Limits, by the losses from a share `first` of the way on, and both scales."""
    lines = [(run.steps, run.losses) for point in points for run in point.runs]
    longest = max((steps[-1] for steps, _ in lines), default=1.0)
    last = min(last, longest)
    low, high = searches.limits(lines, last, first)
    axis.set_ylim(low - 0.06 * (high - low), high + 0.25 * (high - low))
    style.update_ticks(axis, 1.02 * last if last == longest else last)
    axis.set_xlabel("updates")
    style.bits_axis(axis)


def _entry(strategy: str, pair: str, text: str, model: str = "", **look) -> tuple[str, dict]:
    label = f"{model}{style.STRATEGIES[strategy]} {pair} [{text}]"
    return label, {"color": style.STRATEGY_COLORS[strategy], "lw": 1.3, **look}


def _legend(axis, entries: Sequence[tuple[str, dict]], what: str) -> None:
    axis.legend(
        handles=style.handles(entries),
        title=f"{what} [minimum loss, nats]",
        fontsize=7,
        title_fontsize=7,
        loc="upper right",
    )
