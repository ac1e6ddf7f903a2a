"""Four scaling strategies at their optima on vit_imagenet (Dinan et al., Part II, Figure 2).

    python -m plots dinan/vit_strategies [results.csv metrics.csv]

Top-1 validation accuracy against epoch at each strategy's (lr*, wd*), a line per seed; the mean
best accuracy with its standard error; and mid-training spikes per run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import style
from plots.dinan import spikes
from plots.dinan.published import VIT_CLAIMS, VIT_OPTIMA
from plots.dinan.searches import EPOCH, Run, Search, Sweep, by_accuracy, enlarge_end
from plots.dinan.spikes import TOP1
from plots.findings import HEADER, Finding, Printed, claimed_gain, number
from plots.statistics import mean_and_error

TABLES = ("dinan/figure_1_2", "dinan/figure_1_2_metrics")
KINDS = ("accuracy", "training loss")


def read(paths: Sequence[Path]) -> Sweep:
    """Both tables of one sweep, in any order."""
    return by_accuracy(paths)


def best_accuracies(search: Search) -> list[float]:
    """Best top-1 in percent at the optimum, of every seed that did not diverge."""
    return [100 * run.best for run in search.optimum.runs if not run.diverged]


def _spike_counts(runs: Sequence[Run], kind: str) -> list[int]:
    return [run.spikes[KINDS.index(kind)] for run in runs]


def findings(sweep: Sweep) -> list[Printed]:
    """Accuracies, the paper's comparisons of them, spikes, and the product of rate and decay."""
    found = sweep.by_strategy
    return [
        "± is the standard error over n runs, without that of a finite validation set; errors "
        "of differences add in squares",
        spikes.NOTE,
        HEADER,
        *(_accuracy(found, strategy) for strategy in style.STRATEGIES),
        *(_difference(found, *claim) for claim in VIT_CLAIMS),
        *(
            _spikes(found, strategy, kind, where)
            for kind in KINDS
            for where in ("all runs", "optimum")
            for strategy in style.STRATEGIES
        ),
        _product(found),
        *sweep.failed,
    ]


def _accuracy(found: Mapping[str, Search], strategy: str) -> Finding:
    name = f"{style.STRATEGIES[strategy]}: best top-1 (%)"
    if strategy not in found:
        return Finding(name, "not measured")
    values, point = best_accuracies(found[strategy]), found[strategy].optimum
    lost = len(point.runs) - len(values)
    note = f", {lost} diverged" if lost else ""
    measured = f"{number(*mean_and_error(values), 2, '')} (n = {len(values)}{note}) at {point.pair}"
    return Finding(name, measured, "in a figure only")


def _difference(found: Mapping[str, Search], better: str, worse: str) -> Finding:
    name = f"{style.STRATEGIES[better]} - {style.STRATEGIES[worse]}: best top-1 (points)"
    values = [best_accuracies(found[s]) if s in found else [] for s in (better, worse)]
    pairs = list(map(mean_and_error, values))
    gain, error = pairs[0][0] - pairs[1][0], math.hypot(pairs[0][1], pairs[1][1])
    return Finding(name, number(gain, error, 2), "higher", _verdict(gain, error))


def _verdict(gain: float, error: float) -> str:
    """What a claimed gain came to; seeds that all tie say nothing about its error."""
    if error == 0 and gain != 0:
        return f"{'agrees' if gain > 0 else 'disagrees'} in sign, seeds tie"
    return claimed_gain(gain, error)


def _spikes(found: Mapping[str, Search], strategy: str, kind: str, where: str) -> Finding:
    """Spikes per run, and whether there are fewer than under the standard strategy."""
    name = f"{style.STRATEGIES[strategy]}: spikes in {kind} per run, {where}"
    if strategy not in found:
        return Finding(name, "not measured")
    counts = {s: _spike_counts(_runs(found[s], where), kind)
              for s in (strategy, "standard") if s in found}
    own = counts[strategy]
    measured = f"{number(*mean_and_error(own), 2, '')} (n = {len(own)})"
    if strategy == "standard":
        return Finding(name, measured)
    return Finding(name, measured, "fewer", _fewer(own, counts.get("standard", [])))


def _runs(search: Search, where: str) -> Sequence[Run]:
    return search.optimum.runs if where == "optimum" else search.runs


def _fewer(own: Sequence[int], standard: Sequence[int]) -> str:
    if standard and not any(own) and not any(standard):
        return "none in either"
    (value, error), (start, start_error) = mean_and_error(own), mean_and_error(standard)
    return _verdict(start - value, math.hypot(error, start_error))


def _product(found: Mapping[str, Search]) -> Finding:
    """lr* wd* of neural-tangent over that of standard."""
    name = "lr* wd*: neural-tangent / standard"
    both = ("standard", "neural_tangent")
    if not all(strategy in found for strategy in both):
        return Finding(name, "not measured", "1", "not measured")
    products = [found[s].optimum.rate * found[s].optimum.decay for s in both]
    theirs = VIT_OPTIMA["standard"][0] * VIT_OPTIMA["standard"][1]
    octaves = math.log2(products[1] / products[0])
    measured = f"{products[1]:.3g} / {products[0]:.3g} = 2^{octaves:+.1f}"
    return Finding(name, measured, f"both {theirs:.3g}", _equal_products(octaves))


def _equal_products(octaves: float) -> str:
    """A step of the search is an octave of either factor."""
    if abs(octaves) < 0.5:
        return "agrees"
    return "within one step of the search" if abs(octaves) < 1.01 else "disagrees"


def draw(sweep: Sweep) -> Iterator[tuple[str, object]]:
    """Figure 2: curves on the left, accuracies and spikes on the right."""
    found = sweep.by_strategy
    figure, axes = style.subplots(
        2, 2, (5.0, 2.4), gridspec_kw={"width_ratios": [1.7, 1]}
    )
    for axis in axes[:, 0]:
        axis.remove()
    left = figure.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    _draw_curves(left, found)
    _draw_accuracies(axes[0, 1], found)
    _draw_spikes(axes[1, 1], found)
    for axis in axes[:, 1]:
        axis.set_xticks(range(len(style.STRATEGIES)), labels=_TICKS, fontsize=7)
        axis.set_xlim(-0.6, len(style.STRATEGIES) - 0.4)
        axis.grid(False, axis="x")
    figure.suptitle("strategies at their optima\nleft: mean over seeds (thick) and every seed "
                    "(thin), the last epochs enlarged; right: seeds, mean ± standard error")
    style.legend(figure, _entries(found), title="strategy (lr*, wd*)", title_fontsize=8)
    yield "figure_2_vit_strategies", figure


_TICKS = [label.replace("-", "-\n") for label in style.STRATEGIES.values()]


def _draw_curves(axis, found: Mapping[str, Search]) -> None:
    """The mean over seeds, where all have an evaluation, over a thin line of each."""
    for strategy, search in found.items():
        color, lines = style.STRATEGY_COLORS[strategy], [run.accuracy.set_index(EPOCH)[TOP1]
                                                         for run in search.optimum.runs]
        for line in lines:
            axis.plot(line.index, 100 * line, color=color, lw=0.6, alpha=0.45)
        mean = 100 * pd.concat(lines, axis=1).dropna().mean(axis=1)
        axis.plot(mean.index, mean, color=color, lw=1.8, ms=4, markevery=5,
                  marker=style.STRATEGY_MARKERS[strategy])
    enlarge_end(axis)
    axis.set_xlabel("epoch")
    axis.set_ylabel("top-1 validation accuracy (%)")


def _entries(found: Mapping[str, Search]) -> list[tuple[str, dict]]:
    return [
        (f"{style.STRATEGIES[strategy]} {search.optimum.shown}",
         {"color": style.STRATEGY_COLORS[strategy], "marker": style.STRATEGY_MARKERS[strategy],
          "ms": 4})
        for strategy, search in found.items()
    ]


def _draw_accuracies(axis, found: Mapping[str, Search]) -> None:
    """Every seed, the mean and its standard error."""
    for place, strategy in enumerate(style.STRATEGIES):
        values = best_accuracies(found[strategy]) if strategy in found else []
        if values:
            color, marker = style.STRATEGY_COLORS[strategy], style.STRATEGY_MARKERS[strategy]
            value, error = mean_and_error(values)
            beside = [place - 0.3 + 0.3 * index / len(values) for index in range(len(values))]
            axis.plot(beside, values, color=color, marker=marker, ms=4, ls="", alpha=0.5, mew=0)
            axis.errorbar(place + 0.15, value, error if math.isfinite(error) else None,
                          color=color, marker=marker, ms=5, capsize=3)
    axis.set_ylabel("best top-1 (%)")


def _draw_spikes(axis, found: Mapping[str, Search]) -> None:
    """Mean spikes per run: both kinds, of all runs and of those at the optimum."""
    places = [(kind, where) for kind in KINDS for where in ("all runs", "optimum")]
    for place, strategy in enumerate(style.STRATEGIES):
        for index, (kind, where) in enumerate(places):
            if strategy in found:
                counts = _spike_counts(_runs(found[strategy], where), kind)
                value, error = mean_and_error(counts)
                look = {**_LOOKS[kind, where], "color": style.STRATEGY_COLORS[strategy]}
                axis.errorbar(place + 0.17 * (index - 1.5), value,
                              error if math.isfinite(error) else None, capsize=2, lw=1, **look)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0) - 0.02 * high, 1.45 * max(high, 1))  # room for the legend
    axis.set_ylabel("spikes per run")
    axis.legend(handles=_spike_entries(), fontsize=6.5, ncols=2, loc="upper center")


_LOOKS = {
    ("accuracy", "all runs"): {"marker": "o", "ms": 4, "ls": ""},
    ("accuracy", "optimum"): {"marker": "o", "ms": 4, "ls": "", "mfc": "white"},
    ("training loss", "all runs"): {"marker": "v", "ms": 5, "ls": ""},
    ("training loss", "optimum"): {"marker": "v", "ms": 5, "ls": "", "mfc": "white"},
}


def _spike_entries() -> list:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color="black", label=f"{kind}, {where}", **look)
            for (kind, where), look in _LOOKS.items()]
