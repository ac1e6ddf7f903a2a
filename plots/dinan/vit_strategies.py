"""Four scaling strategies at their optima on vit_imagenet (Dinan et al., Part II, Figure 2).

    python -m plots dinan/vit_strategies [results.csv metrics.csv]

Top-1 validation accuracy against epoch at each strategy's (lr*, wd*), a thin line per seed and
their mean; the mean best accuracy with its standard error, over the seeds that did not choose the
optimum; and mid-training spikes per run.
"""

import math

import pandas as pd

from plots import style
from plots.dinan import searches, spikes
from plots.dinan.published import VIT_CLAIMS, VIT_OPTIMA
from plots.dinan.searches import BEST_TOP1, Searched, pair, percents, shown
from plots.findings import HEADER, UNKNOWN, Estimate, Finding, Report
from plots.statistics import average
from plots.style import STRATEGIES, STRATEGY_LOOKS
from plots.tables import CURVE, DECAY, RATE, RUN, SEED, STATUS

TABLES = ("dinan/figure_1_2", "dinan/figure_1_2_metrics")
TITLE = "strategies at their optima"
read = searches.by_accuracy
# Kind of spikes and the runs they are counted in -> marks.
SPIKES = {
    ("accuracy", "all runs"): {"marker": "o", "ms": 4, "ls": ""},
    ("accuracy", "optimum"): {"marker": "o", "ms": 4, "ls": "", "mfc": "white"},
    ("training loss", "all runs"): {"marker": "v", "ms": 5, "ls": ""},
    ("training loss", "optimum"): {"marker": "v", "ms": 5, "ls": "", "mfc": "white"},
}


def optima(searched: Searched) -> dict[str, pd.DataFrame]:
    """Strategy -> the runs at its optimum; `chose` marks the seed that chose it."""
    runs_of = {}
    for strategy in STRATEGIES:
        rows = searched.rows[searched.rows[CURVE] == strategy]
        if len(rows):
            best = searches.optimum(rows)
            runs_of[strategy] = best.assign(chose=best[SEED] == rows[SEED].min())
    return runs_of


def judging(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose seed did not choose the optimum; all if there is no other seed."""
    return runs if runs["chose"].all() else runs[~runs["chose"]]


def spike_counts(searched: Searched, best: pd.DataFrame) -> dict[tuple[str, str], list[int]]:
    """Spikes of every kind in all runs of a strategy, and in those at its optimum."""
    rows = searched.rows[searched.rows[CURVE] == best[CURVE].iloc[0]]
    begins = {run: spikes.of_run(searched.log(run)) for run in rows[RUN]}
    runs = {"all runs": rows[RUN], "optimum": best[RUN]}
    return {
        (kind, where): [len(begins[run][kind != "accuracy"]) for run in runs[where]]
        for kind, where in SPIKES
    }


def findings(searched: Searched) -> Report:
    """Accuracies, the paper's comparisons of them, spikes, and the product of rate and decay."""
    runs_of = optima(searched)
    yield (
        "± is the standard error over n runs, without that of a finite validation set; errors "
        "of differences add in squares; best top-1: without the seed that chose the optimum, where "
        "there are others"
    )
    yield spikes.NOTE
    yield HEADER
    means = {}
    for strategy, runs in runs_of.items():
        label, values = STRATEGIES[strategy], percents(judging(runs))
        means[strategy] = average(values)
        lost = len(judging(runs)) - len(values)
        n = f"(n = {len(values)}{f', {lost} diverged' if lost else ''})"
        place = pair(runs[RATE].iloc[0], runs[DECAY].iloc[0])
        measured = f"{means[strategy].text(2, '')} {n} at {place}"
        yield Finding(f"{label}: best top-1 (%)", measured, "in a figure only")
        chose = runs[runs["chose"] & (runs[STATUS] != "diverged")]
        if len(chose) and not runs["chose"].all() and values:
            best = 100 * chose[BEST_TOP1].iloc[0]
            error = means[strategy].error * math.sqrt(len(values) + 1)  # of a run beside a mean
            gap = Estimate(best - means[strategy].value, error)
            name = f"{label}: best top-1 of the seed that chose the optimum (%)"
            yield Finding(name, f"{best:.2f}, {gap.text(2)} to the others' mean")
    for better, worse in VIT_CLAIMS:
        gain = means.get(better, UNKNOWN) - means.get(worse, UNKNOWN)
        name = f"{STRATEGIES[better]} - {STRATEGIES[worse]}: best top-1 (points)"
        yield Finding(name, gain.text(2), "higher", _verdict(gain), gain)
    spiked = {strategy: spike_counts(searched, runs) for strategy, runs in runs_of.items()}
    for kind, where in SPIKES:
        counts = {strategy: of[kind, where] for strategy, of in spiked.items()}
        for strategy, own in counts.items():
            name = f"{STRATEGIES[strategy]}: spikes in {kind} per run, {where}"
            measured = f"{average(own).text(2, '')} (n = {len(own)})"
            if strategy == "standard" or "standard" not in counts:
                yield Finding(name, measured)
                continue
            start = counts["standard"]
            fewer = average(start) - average(own)
            verdict = _verdict(fewer) if any(own) or any(start) else "none in either"
            measured += f", {fewer.text(2)} fewer than standard's"
            yield Finding(name, measured, "fewer", verdict, fewer)
    if {"standard", "neural_tangent"} <= runs_of.keys():
        yield _product(runs_of)
    yield from searched.failed


def _verdict(gain: Estimate) -> str:
    """What a claimed gain came to; seeds that all tie say nothing about its error."""
    if gain.error == 0 and gain.value != 0:
        return f"{'agrees' if gain.value > 0 else 'disagrees'} in sign, seeds tie"
    return gain.claimed_gain()


def _product(runs_of: dict[str, pd.DataFrame]) -> Finding:
    """lr* wd* of neural-tangent over that of standard; the search steps by octaves of each."""
    best = [runs_of[strategy].iloc[0] for strategy in ("standard", "neural_tangent")]
    standard, scaled = (point[RATE] * point[DECAY] for point in best)
    theirs = VIT_OPTIMA["standard"][0] * VIT_OPTIMA["standard"][1]
    octaves = math.log2(scaled / standard)
    measured = f"{scaled:.3g} / {standard:.3g} = 2^{octaves:+.1f}"
    verdict = "agrees" if abs(octaves) < 0.5 else "disagrees"
    if 0.5 <= abs(octaves) < 1.01:
        verdict = "within one step of the search"
    name = "lr* wd*: neural-tangent / standard"
    return Finding(name, measured, f"both {theirs:.3g}", verdict)


def draw(searched: Searched) -> style.Drawn:
    """Figure 2: curves on the left, accuracies and spikes on the right."""
    runs_of = optima(searched)
    figure, axes = style.subplots(TITLE, 2, 2, (5.0, 2.4), gridspec_kw={"width_ratios": [1.7, 1]})
    for axis in axes[:, 0]:
        axis.remove()
    left = figure.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    entries = []
    for strategy, runs in runs_of.items():
        look = {**STRATEGY_LOOKS[strategy], "ms": 4}
        lines = [searches.accuracy(searched, run) for run in runs[RUN]]
        for line in lines:
            left.plot(line.index, line, color=look["color"], lw=0.6, alpha=0.45)
        mean = pd.concat(lines, axis=1).dropna().mean(axis=1)
        left.plot(mean.index, mean, lw=1.8, markevery=5, **look)
        place = shown(runs[RATE].iloc[0], runs[DECAY].iloc[0])
        entries.append((f"{STRATEGIES[strategy]} {place}", look))
    searches.enlarge_end(left)
    left.set(xlabel="epoch", ylabel="top-1 validation accuracy (%)")
    _draw_accuracies(axes[0, 1], runs_of)
    _draw_spikes(axes[1, 1], searched, runs_of)
    ticks = [label.replace("-", "-\n") for label in STRATEGIES.values()]
    for axis in axes[:, 1]:
        axis.set_xticks(range(len(ticks)), labels=ticks, fontsize=7)
        axis.set_xlim(-0.6, len(ticks) - 0.4)
        axis.grid(False, axis="x")
    style.legend(figure, entries, title="strategy (lr*, wd*)", title_fontsize=8)
    yield "figure_2_vit_strategies", figure
    alone, axes = style.subplots(TITLE, 1, 1, (4.6, 3.3))
    _draw_accuracies(axes[0][0], runs_of)
    axes[0][0].set_xticks(range(len(ticks)), labels=STRATEGIES.values(), fontsize=10)
    axes[0][0].tick_params(axis="y", labelsize=10)
    axes[0][0].set_ylabel("best top-1 (%), a point per seed", fontsize=10)
    yield "figure_2_vit_best", alone


def _draw_accuracies(axis, runs_of: dict[str, pd.DataFrame]) -> None:
    """Every judging seed, the mean and its standard error."""
    for place, strategy in enumerate(STRATEGIES):
        values = percents(judging(runs_of[strategy])) if strategy in runs_of else []
        if values:
            look, mean = STRATEGY_LOOKS[strategy], average(values)
            beside = [place - 0.3 + 0.3 * index / len(values) for index in range(len(values))]
            axis.plot(beside, values, ms=4, ls="", alpha=0.5, mew=0, **look)
            axis.errorbar(place + 0.15, mean.value, mean.bar, ms=5, capsize=3, **look)
    axis.set_ylabel("best top-1 (%)")


def _draw_spikes(axis, searched: Searched, runs_of: dict[str, pd.DataFrame]) -> None:
    """Mean spikes per run: both kinds, of all runs and of those at the optimum."""
    for place, (strategy, of_strategy) in enumerate(STRATEGY_LOOKS.items()):
        counts = spike_counts(searched, runs_of[strategy]) if strategy in runs_of else {}
        for index, (of, own) in enumerate(counts.items()):
            mean, beside = average(own), place + 0.17 * (index - 1.5)
            look = {"color": of_strategy["color"], "capsize": 2, "lw": 1, **SPIKES[of]}
            axis.errorbar(beside, mean.value, mean.bar, **look)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0) - 0.02 * high, 1.45 * max(high, 1))  # room for the legend
    axis.set_ylabel("spikes per run")
    entries = [(", ".join(place), {"color": "black", **look}) for place, look in SPIKES.items()]
    axis.legend(handles=style.handles(entries), fontsize=6.5, ncols=2, loc="upper center")
