"""Standard and neural-tangent scaling on BART-large and R2C2 (Dinan et al., II, Figures 4 and 5).

    python -m plots dinan/bart_strategies [results.csv metrics.csv [results.csv metrics.csv]]

Figure 4: validation loss against updates of both strategies at their best (lr, wd), a panel per
width and a line per seed, paler with the seed, of three or more each at the rate that the others
choose. Figure 5, where the tables of the larger model's sweep are given too: that model and the
smaller one (dashed) at its largest width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plots import style
from plots.dinan import searches
from plots.dinan.searches import LR, STRATEGIES, Losses, Searched
from plots.findings import HEADER, UNKNOWN, Estimate, Finding, Report
from plots.naming import AnyOf
from plots.rates import PAIRED
from plots.statistics import average, differences, mean
from plots.tables import CURVE, DECAY, LOSS, RUN, SEED, WIDTH

TABLES = AnyOf(f"dinan/figure_{name}" for name in ("3_4", "3_4_metrics", "5", "5_metrics"))
LAYERS = "model.layers"


@dataclass(frozen=True)
class Best:
    """The runs that judge a strategy's best (lr, wd), by seed: lowest losses, and lines."""

    rate: float
    decay: float
    lowest: Mapping[int, float]
    lines: Mapping[int, Losses]

    def up_to(self, last: float) -> dict[int, float]:
        """Seed -> the lowest loss up to a step; NaN without an evaluation."""
        inside = {seed: values[steps <= last] for seed, (steps, values) in self.lines.items()}
        return {seed: float(v.min()) if len(v) else math.nan for seed, v in inside.items()}


Optima = dict[str, Best]  # by strategy
Models = dict[int, Optima]  # by width


@dataclass(frozen=True)
class Data:
    """A sweep's models by rising width, the larger one's, where it is given, and their names."""

    models: Models
    larger: Models
    named: Mapping[tuple[int, int], str]
    failed: Sequence[str]


def read(paths: Sequence[Path]) -> Data:
    """One sweep, or two."""
    sweeps = [searches.by_loss(paths[i : i + 2]) for i in range(0, len(paths), 2)]
    models, larger = [*map(optima, sweeps), {}][:2]
    named = {(i, w): name for i, sweep in enumerate(sweeps) for w, name in _names(sweep)}
    return Data(models, larger, named, [line for sweep in sweeps for line in sweep.failed])


def _names(sweep: Searched) -> Iterator[tuple[int, str]]:
    """(width, the paper's name of a model), or else the width again and the blocks if known."""
    for width in map(int, sweep.rows[WIDTH].unique()):
        name = searches.model_name(sweep.rows, width)
        if LAYERS in sweep.rows and name.startswith("n"):
            name += ", {0} + {0} blocks".format(sweep.rows[LAYERS].iloc[0])
        yield width, name


def optima(sweep: Searched) -> Models:
    """Width -> strategy -> its best point, where not all diverged."""
    models: Models = {int(width): {} for width in sorted(sweep.rows[WIDTH].unique())}
    for strategy, by_width in searches.fits(sweep).items():
        for width, swept in by_width.items():
            runs = searches.judging_runs(sweep, strategy, swept)
            near = np.isclose(sweep.rows[searches.RATE], swept.best.grid_value, rtol=1e-9)
            same = (sweep.rows[CURVE] == strategy) & (sweep.rows[WIDTH] == width)
            point = sweep.rows[near & same].iloc[0]
            lines = {row[SEED]: searches.losses(sweep, row[RUN]) for _, row in runs.iterrows()}
            lowest = dict(zip(runs[SEED], runs[LOSS], strict=True))
            if lines:
                models[width][strategy] = Best(point[LR], point[DECAY], lowest, lines)
    return models


def findings(data: Data) -> Report:
    """Losses at the optima and their difference, then the early stage of the larger model."""
    yield (
        "a run's loss is the lowest of its evaluations, of three seeds or more each at the rate "
        "that the others choose; ± standard errors over n seeds, of differences by seed where both "
        "have the same three or more, else added in squares"
    )
    yield HEADER
    by_width: dict[float, Estimate] = {}
    for width, best_of in data.models.items():
        name = data.named[0, width]
        yield from _losses(best_of, name)
        by_width[width] = gap = _gap({s: best.lowest for s, best in best_of.items()})
        gap, words = replace(gap, by_size=dict(by_width)), "below 0, marginally"
        what = f"{name}: standard - neural-tangent (nats)"
        yield gap.judged(what, "loses", words, 4)
    for width, best_of in data.larger.items():
        yield from _losses(best_of, data.named[1, width])
        yield from _early(best_of, data.named[1, width], end(best_of), claimed=True)
    if data.larger:
        width, best_of = max(data.models.items())
        yield from _early(best_of, data.named[0, width], end(data.larger[max(data.larger)]))
    yield from data.failed


def _early(best_of: Optima, name: str, last: float, claimed: bool = False) -> list[Finding]:
    """The difference up to a step, and how many updates neural-tangent takes to standard's loss."""
    gap = _gap({strategy: best.up_to(last) for strategy, best in best_of.items()})
    claim = ("above 0", gap.claimed_gain(), gap) if claimed else ()
    early = f"{name}: standard - neural-tangent up to step {last:g} (nats)"
    return [Finding(early, gap.text(4), *claim), *_speed(best_of, name, last)]


def _losses(best_of: Optima, model: str) -> Report:
    """The mean of the lowest losses of both strategies."""
    for strategy, best in best_of.items():
        loss = average(list(best.lowest.values()))
        text = f"{loss.text(4, '')} (n = {len(best.lowest)}), {loss.value / math.log(2):.4f} bits, "
        text += f"at {searches.pair(best.rate, best.decay)}"
        name = f"{style.STRATEGIES[strategy]}, {model}: lowest loss (nats)"
        yield Finding(name, text)


def _gap(losses: Mapping[str, Mapping[int, float]]) -> Estimate:
    """Standard minus neural-tangent."""
    if len(losses) < 2:
        return UNKNOWN
    first, second = (losses[strategy] for strategy in STRATEGIES)
    if first.keys() == second.keys() and len(first) >= PAIRED:
        return mean(differences(first, second))
    return average([*first.values()]) - average([*second.values()])


def end(best_of: Optima) -> float:
    """The last evaluation of the best points."""
    last = [steps[-1] for best in best_of.values() for steps, _ in best.lines.values()]
    return max(last, default=0)


def updates_to(line: Losses, loss: float) -> float:
    """Updates until a loss is reached, on straight lines between evaluations; NaN if it is not."""
    steps, values = line
    below = np.flatnonzero(values <= loss)
    if not len(below):
        return math.nan
    around = slice(max(below[0] - 1, 0), below[0] + 1)
    return float(np.interp(-loss, -values[around], steps[around]))


def _speed(best_of: Optima, model: str, last: float) -> list[Finding]:
    """How many updates neural-tangent takes to the loss that standard has at `last`, by seed."""
    if len(best_of) < 2:
        return []
    standard, scaled = (best_of[strategy] for strategy in STRATEGIES)
    goals = standard.up_to(last)
    shares = [
        updates_to(line, goals[seed]) / updates_to(standard.lines[seed], goals[seed])
        for seed, line in scaled.lines.items()
        if seed in goals
    ]
    reached = [share for share in shares if math.isfinite(share)]
    short = len(shares) - len(reached)
    missing = f", {short} did not reach it" if short else ""
    text = f"{average(reached).text(3, '')} (n = {len(reached)}{missing})"
    return [Finding(f"{model}: updates to standard's loss then, relative", text)]


def draw(data: Data) -> style.Drawn:
    """Figure 4, and Figure 5 where there is a larger model."""
    across = min(3, len(data.models))
    down = -(-len(data.models) // across)
    title = "strategies at their optima"
    figure, axes = style.subplots(title, down, across, (min(4.9, 12 / across), 3.5), sharey=True)
    for axis in axes.flat[len(data.models) :]:
        axis.axis("off")
    every = [best for best_of in data.models.values() for best in best_of.values()]
    for axis, (width, best_of) in zip(axes.flat, data.models.items(), strict=False):
        entries = [_drawn(axis, strategy, best, "") for strategy, best in best_of.items()]
        _finish(axis, every, math.inf, entries, "(lr, wd)")
        axis.set_title(data.named[0, width])
    for axis in axes[:, 0]:
        axis.set_ylabel(style.VALIDATION_LABEL)
    yield "figure_4_bart_strategies", figure, [0, 1]
    if data.larger:
        (width, best_of), (smaller, own) = max(data.larger.items()), max(data.models.items())
        title = "the larger model and the smaller one (dashed)"
        figure, axes = style.subplots(title, 1, 1, (5.6, 3.8))
        entries, last = [], end(best_of)
        for optima_, key, look in ((best_of, (1, width), {}), (own, (0, smaller), {"ls": "--"})):
            for strategy, best in optima_.items():
                name = f"{data.named[key]} "
                entries.append(_drawn(axes[0][0], strategy, best, name, last, **look))
        every = [*best_of.values(), *own.values()]
        # A third of it is warm-up; the legend has four entries.
        _finish(axes[0][0], every, last, entries, f"(lr, wd), up to step {last:g}", 0.25, 0.5)
        axes[0][0].set_ylabel(style.VALIDATION_LABEL)
        yield "figure_5_bart_r2c2", figure, [0, 1, 2, 3]


def _drawn(axis, strategy: str, best: Best, model: str, last=math.inf, **look) -> tuple[str, dict]:
    """Draws a line per seed, paler with the seed, the first on top; the legend's entry."""
    color = style.STRATEGY_LOOKS[strategy]["color"]
    colors = style.shades(color, len(best.lines))
    for line, shade in reversed(list(zip(best.lines.values(), colors, strict=True))):
        axis.plot(*line, color=shade, lw=1.3, **look)
    values = best.lowest if math.isinf(last) else best.up_to(last)
    place = searches.shown(best.rate, best.decay)
    text = searches.loss_text(list(values.values()))
    label = f"{model}{style.STRATEGIES[strategy]} {place} [{text}]"
    return label, {"color": color, "lw": 1.3, **look}


def _finish(
    axis, every: Sequence[Best], last: float, entries: list, title: str, first=0.1, room=0.25
) -> None:
    """Limits, by the losses from a share `first` of the way on, and the legend with its `room`."""
    lines = [line for best in every for line in best.lines.values()]
    longest = max((steps[-1] for steps, _ in lines), default=1.0)
    last = min(last, longest)
    low, high = searches.limits(lines, last, first)
    axis.set_ylim(low - 0.06 * (high - low), high + room * (high - low))
    style.update_ticks(axis, 1.02 * last if last == longest else last)
    axis.set_xlabel("updates")
    size = {"fontsize": 7, "title_fontsize": 7, "loc": "upper right"}
    axis.legend(handles=style.handles(entries), title=f"{title} [minimum loss, nats]", **size)
