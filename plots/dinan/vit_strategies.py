"""Four scaling strategies at their optima on vit_imagenet (Dinan et al., Part II, Figure 2).

    python -m plots dinan/vit_strategies [results.csv metrics.csv]

Top-1 validation accuracy against epoch at each strategy's (lr*, wd*), a line per seed; the mean
best accuracy with its standard error, over the seeds that did not choose the optimum; and
mid-training spikes per run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pandas as pd

from plots import style
from plots.dinan import spikes
from plots.dinan.published import VIT_CLAIMS, VIT_OPTIMA
from plots.dinan.searches import EPOCH, Run, Search, Sweep, by_accuracy, enlarge_end
from plots.dinan.spikes import TOP1
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import average

TABLES = ("dinan/figure_1_2", "dinan/figure_1_2_metrics")
read = by_accuracy
# Kind of spikes and the runs they are counted in -> marks.
SPIKES = {
    ("accuracy", "all runs"): {"marker": "o", "ms": 4, "ls": ""},
    ("accuracy", "optimum"): {"marker": "o", "ms": 4, "ls": "", "mfc": "white"},
    ("training loss", "all runs"): {"marker": "v", "ms": 5, "ls": ""},
    ("training loss", "optimum"): {"marker": "v", "ms": 5, "ls": "", "mfc": "white"},
}


def judging(search: Search) -> list[Run]:
    """The runs at the optimum that had no say in where it is: the first seed of all points chose
    it, and is the better there for having been chosen. All where there is no other seed."""
    chose = {run.seed for run in search.firsts}
    runs = search.optimum.runs
    return [run for run in runs if run.seed not in chose] or list(runs)


def best_accuracies(search: Search) -> list[float]:
    """Best top-1 in percent of the judging runs that did not diverge."""
    return [100 * run.best for run in judging(search) if not run.diverged]


def spike_counts(search: Search, kind: str, where: str) -> list[int]:
    """Spikes of a kind in every run, or in those at the optimum."""
    runs = search.optimum.runs if where == "optimum" else search.runs
    return [run.spikes[kind != "accuracy"] for run in runs]


def findings(sweep: Sweep) -> list[Printed]:
    """Accuracies, the paper's comparisons of them, spikes, and the product of rate and decay."""
    found = sweep.by_strategy
    text: list[Printed] = [
        "± is the standard error over n runs, without that of a finite validation set; errors "
        "of differences add in squares; best top-1: without the seed that chose the optimum, where "
        "there are others",
        spikes.NOTE,
        HEADER,
    ]
    accuracies = {strategy: best_accuracies(search) for strategy, search in found.items()}
    for strategy, label in style.STRATEGIES.items():
        name = f"{label}: best top-1 (%)"
        if strategy not in found:
            text.append(Finding(name, "not measured"))
            continue
        values, point = accuracies[strategy], found[strategy].optimum
        lost = len(judging(found[strategy])) - len(values)
        n = f"(n = {len(values)}{f', {lost} diverged' if lost else ''})"
        measured = f"{average(values).text(2, '')} {n} at {point.pair}"
        text.append(Finding(name, measured, "in a figure only"))
        text += _luck(found[strategy], label)
    for better, worse in VIT_CLAIMS:
        gain = average(accuracies.get(better, ())) - average(accuracies.get(worse, ()))
        name = f"{style.STRATEGIES[better]} - {style.STRATEGIES[worse]}: best top-1 (points)"
        text.append(Finding(name, gain.text(2), "higher", _verdict(gain), gain))
    for kind, where in SPIKES:
        counts = {strategy: spike_counts(search, kind, where) for strategy, search in found.items()}
        start = counts.get("standard", [])
        for strategy, label in style.STRATEGIES.items():
            name, own = f"{label}: spikes in {kind} per run, {where}", counts.get(strategy, [])
            measured = f"{average(own).text(2, '')} (n = {len(own)})" if own else "not measured"
            if not (start and own) or strategy == "standard":
                text.append(Finding(name, measured))
                continue
            fewer = average(start) - average(own)
            verdict = _verdict(fewer) if any(own) or any(start) else "none in either"
            text.append(
                Finding(
                    name,
                    f"{measured}, {fewer.text(2)} fewer than standard's",
                    "fewer",
                    verdict,
                    fewer,
                )
            )
    return [*text, _product(found), *sweep.failed]


def _luck(search: Search, label: str) -> Iterator[Finding]:
    """How much better the seed that chose the optimum is there than seeds that did not; the error
    is that of one run beside a mean. Nothing where there are no others."""
    judges, others = judging(search), best_accuracies(search)
    chose = [run for run in search.optimum.runs if run not in judges and not run.diverged]
    if chose and others:
        mean, best = average(others), 100 * chose[0].best
        gap = Estimate(best - mean.value, mean.error * math.sqrt(len(others) + 1))
        yield Finding(
            f"{label}: best top-1 of the seed that chose the optimum (%)",
            f"{best:.2f}, {gap.text(2)} to the others' mean",
        )


def _verdict(gain: Estimate) -> str:
    """What a claimed gain came to; seeds that all tie say nothing about its error."""
    if gain.error == 0 and gain.value != 0:
        return f"{'agrees' if gain.value > 0 else 'disagrees'} in sign, seeds tie"
    return gain.claimed_gain()


def _product(found: Mapping[str, Search]) -> Finding:
    """lr* wd* of neural-tangent over that of standard; a step of the search is an octave of either
    factor."""
    name = "lr* wd*: neural-tangent / standard"
    both = ("standard", "neural_tangent")
    if not all(strategy in found for strategy in both):
        return Finding(name, "not measured", "1", "not measured")
    products = [found[s].optimum.rate * found[s].optimum.decay for s in both]
    theirs = VIT_OPTIMA["standard"][0] * VIT_OPTIMA["standard"][1]
    octaves = math.log2(products[1] / products[0])
    measured = f"{products[1]:.3g} / {products[0]:.3g} = 2^{octaves:+.1f}"
    verdict = "agrees" if abs(octaves) < 0.5 else "disagrees"
    if 0.5 <= abs(octaves) < 1.01:
        verdict = "within one step of the search"
    return Finding(name, measured, f"both {theirs:.3g}", verdict)


def draw(sweep: Sweep) -> Iterator[tuple[str, object]]:
    """Figure 2: curves on the left, accuracies and spikes on the right."""
    found = sweep.by_strategy
    figure, axes = style.subplots(2, 2, (5.0, 2.4), gridspec_kw={"width_ratios": [1.7, 1]})
    for axis in axes[:, 0]:
        axis.remove()
    left = figure.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    _draw_curves(left, found)
    _draw_accuracies(axes[0, 1], found)
    _draw_spikes(axes[1, 1], found)
    ticks = [label.replace("-", "-\n") for label in style.STRATEGIES.values()]
    for axis in axes[:, 1]:
        axis.set_xticks(range(len(ticks)), labels=ticks, fontsize=7)
        axis.set_xlim(-0.6, len(ticks) - 0.4)
        axis.grid(False, axis="x")
    figure.suptitle(
        "strategies at their optima\nleft: mean over seeds (thick) and every seed "
        "(thin), the last epochs enlarged; right: seeds that did not choose the "
        "optimum, mean ± standard error"
    )
    entries = [
        (
            f"{style.STRATEGIES[strategy]} {search.optimum.shown}",
            {
                "color": style.STRATEGY_COLORS[strategy],
                "marker": style.STRATEGY_MARKERS[strategy],
                "ms": 4,
            },
        )
        for strategy, search in found.items()
    ]
    style.legend(figure, entries, title="strategy (lr*, wd*)", title_fontsize=8)
    yield "figure_2_vit_strategies", figure


def _draw_curves(axis, found: Mapping[str, Search]) -> None:
    """The mean over seeds, where all have an evaluation, over a thin line of each."""
    for strategy, search in found.items():
        color, lines = (
            style.STRATEGY_COLORS[strategy],
            [run.accuracy.set_index(EPOCH)[TOP1] for run in search.optimum.runs],
        )
        for line in lines:
            axis.plot(line.index, 100 * line, color=color, lw=0.6, alpha=0.45)
        mean = 100 * pd.concat(lines, axis=1).dropna().mean(axis=1)
        axis.plot(
            mean.index,
            mean,
            color=color,
            lw=1.8,
            ms=4,
            markevery=5,
            marker=style.STRATEGY_MARKERS[strategy],
        )
    enlarge_end(axis)
    axis.set_xlabel("epoch")
    axis.set_ylabel("top-1 validation accuracy (%)")


def _draw_accuracies(axis, found: Mapping[str, Search]) -> None:
    """Every seed, the mean and its standard error."""
    for place, strategy in enumerate(style.STRATEGIES):
        values = best_accuracies(found[strategy]) if strategy in found else []
        if values:
            color, marker = style.STRATEGY_COLORS[strategy], style.STRATEGY_MARKERS[strategy]
            mean = average(values)
            beside = [place - 0.3 + 0.3 * index / len(values) for index in range(len(values))]
            axis.plot(beside, values, color=color, marker=marker, ms=4, ls="", alpha=0.5, mew=0)
            axis.errorbar(
                place + 0.15, mean.value, mean.bar, color=color, marker=marker, ms=5, capsize=3
            )
    axis.set_ylabel("best top-1 (%)")


def _draw_spikes(axis, found: Mapping[str, Search]) -> None:
    """Mean spikes per run: both kinds, of all runs and of those at the optimum."""
    for place, (strategy, color) in enumerate(style.STRATEGY_COLORS.items()):
        for index, ((kind, where), look) in enumerate(SPIKES.items()):
            if strategy in found:
                mean = average(spike_counts(found[strategy], kind, where))
                axis.errorbar(
                    place + 0.17 * (index - 1.5),
                    mean.value,
                    mean.bar,
                    capsize=2,
                    lw=1,
                    color=color,
                    **look,
                )
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0) - 0.02 * high, 1.45 * max(high, 1))  # room for the legend
    axis.set_ylabel("spikes per run")
    entries = [(", ".join(place), {"color": "black", **look}) for place, look in SPIKES.items()]
    axis.legend(handles=style.handles(entries), fontsize=6.5, ncols=2, loc="upper center")
