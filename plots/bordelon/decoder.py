"""Decoders of growing size at two scales of attention (Bordelon et al., Figures 7 and 12).

    python -m plots bordelon/decoder [results.csv metrics.csv observed_kernels.csv]

The sweep grows one of heads H, head dimension N and depth L at a time from a base model, at
alpha_A = 1 and 1/2. Draws training loss against steps (7a), with what alpha_A changes, and against
FLOPs (12), and kernels before and after training, of the last token (7b) and of the tokens of one
sample (7c). FLOPs are 6 per parameter and token (the caption of Figure 12 leaves the tokens out).
Findings compare final evaluation losses of runs of equal seeds, which see the same text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import observed, scans
from plots.bordelon.observed import LABELS, SeedPairs, Strip
from plots.bordelon.published import ALPHA_CLAIMS, ALPHA_SIDES, FLOPS_PER_PARAMETER, GROWTH
from plots.bordelon.scans import ALPHA, HEAD_DIM, HEADS, LAYERS, SIZES, SYMBOLS, TRAIN_LOSS
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import differences, mean
from plots.tables import CURVE, LOSS, PARAMETERS, RUN, SEED, STATUS, STEP, TableError

TABLES = ("bordelon/figure_7_12", "bordelon/figure_7_12_metrics", "bordelon/figure_7_12_kernels")
STEPS, TARGETS = "steps", "targets"
FLOPS = "flops"
KINDS = ("last_token", "spatial")
PLACE = (CURVE, *SIZES, ALPHA, SEED, RUN)
BySize = dict[int, dict[int, float]]  # size -> seed -> a loss


@dataclass(frozen=True)
class Runs:
    """Finished runs, one row each, what they logged, with the FLOPs spent until then, and their
    kernels; then the names of those that did not finish."""

    results: pd.DataFrame
    metrics: pd.DataFrame
    kernels: pd.DataFrame
    cut: Sequence[str] = ()


def read(paths: Sequence[Path]) -> Runs:
    """The tables of one sweep; TableError for bad ones, or without a finished run."""
    tables.expect(paths, "results.csv", "metrics.csv", "observed_kernels.csv")
    results, metrics, entries = paths
    table = tables.read(results, [*PLACE, STATUS, LOSS, PARAMETERS, STEPS, TARGETS])
    cut = sorted(table.loc[table[STATUS] != "finished", RUN])
    table = table[table[STATUS] == "finished"]
    if table.empty:
        raise TableError(f"{results}: no run in it is finished; run the sweep first")
    # Tokens per step from the whole run.
    cost = FLOPS_PER_PARAMETER * table[PARAMETERS] * table[TARGETS] / table[STEPS]
    logged = tables.read(metrics, [*PLACE, STEP, TRAIN_LOSS, scans.EVAL_LOSS], "metrics.csv")
    logged = logged[logged[RUN].isin(table[RUN])]
    if logged.empty:
        raise TableError(f"{metrics}: none of its runs is in {results}; give tables of one sweep")
    logged = logged.assign(
        **{FLOPS: logged[RUN].map(dict(zip(table[RUN], cost, strict=True))) * logged[STEP]}
    )
    kernels = observed.read_observed(entries, "observed_kernels.csv")
    for kind in KINDS:
        observed.check(kernels, kind, entries)
    return Runs(table, logged, kernels, cut)


# Losses


def finals(runs: Runs, by: str, alpha: float) -> BySize:
    """Size -> seed -> final evaluation loss, of a scan."""
    found: BySize = {}
    for row in scans.scan(runs.results, by, alpha).sort_values(by).to_dict("records"):
        found.setdefault(int(row[by]), {})[int(row[SEED])] = float(row[LOSS])
    return found


def at_flops(rows: pd.DataFrame, budget: float) -> float:
    """A run's evaluation loss at some FLOPs, on a line in their logarithm; NaN outside of it."""
    own = rows[np.isfinite(rows[scans.EVAL_LOSS])].sort_values(FLOPS)
    spent, losses = own[FLOPS].to_numpy(), own[scans.EVAL_LOSS].to_numpy()
    # The end of a run is its budget but for rounding.
    if not len(own) or not spent[0] * (1 - 1e-9) <= budget <= spent[-1] * (1 + 1e-9):
        return math.nan
    return float(np.interp(math.log(budget), np.log(spent), losses))


def equal_flops(runs: Runs, by: str, alpha: float) -> list[tuple[int, int, Estimate]]:
    """(low, high, loss of low - loss of high) for consecutive sizes, at the FLOPs of the smaller
    one's end."""
    rows, found = scans.scan(runs.metrics, by, alpha), []
    sizes = sorted({int(size) for size in rows[by]})
    for low, high in itertools.pairwise(sizes):
        gaps = {}
        for seed, own in rows[rows[by].isin((low, high))].groupby(SEED):
            small, large = (own[own[by] == size] for size in (low, high))
            budget = small[FLOPS].max()
            gaps[seed] = at_flops(small, budget) - at_flops(large, budget)
        known = {seed: gap for seed, gap in gaps.items() if math.isfinite(gap)}
        found.append((low, high, mean(known)))
    return found


# Findings


def findings(runs: Runs) -> list[Printed]:
    """Final losses, what growing gives, at equal FLOPs too, what alpha_A changes, then kernels."""
    result: list[Printed] = [
        "losses in nats per token over validation text; ± standard errors over seeds (n), of "
        "differences between runs of equal seeds; FLOPs: 6 per parameter and token",
        "alpha_A = 1 against 1/2: Fig. 7a shows lower losses at 1/2 for H and N, the caption "
        "of Fig. 12 says of the same runs that 1 is better at fixed compute; runs of one size "
        "cost the same",
        HEADER,
    ]
    for alpha in scans.alphas(runs.results):
        place = f"{scans.alpha_name(alpha)}: "
        for by in SIZES:
            found = finals(runs, by, alpha)
            texts = [f"{size}: {mean(own).compact()}" for size, own in found.items()]
            n = "-".join(map(str, sorted({len(own) for own in found.values()})))
            measured = f"{', '.join(texts)} (n = {n})" if texts else "not measured"
            result += [
                Finding(f"{place}final loss by {SYMBOLS[by]}", measured),
                _growth(found, by, place),
            ]
            result += [_per_flop(gap, by, place) for gap in equal_flops(runs, by, alpha)]
        result.append(_little(*(finals(runs, by, alpha) for by in (HEADS, LAYERS)), place))
    return [*result, *_of_alpha(runs), *_of_kernels(runs.kernels), *scans.cut_lines(runs.cut)]


def _growth(found: BySize, by: str, place: str) -> Finding:
    """What growing the base model to the largest of the scan gains."""
    name = f"{place}loss of the base minus that of the largest {SYMBOLS[by]}"
    published = GROWTH[by]
    if len(found) < 2:
        return Finding(name, "not measured", published)
    gain = mean(differences(found[min(found)], found[max(found)]))
    return Finding(name, gain.text(4), published, "" if by == LAYERS else gain.claimed_gain())


def _little(heads: BySize, layers: BySize, place: str) -> Finding:
    """Whether growing H gains more than growing L does, by the largest factor both scans have."""
    factors = [
        {size / min(found): own for size, own in found.items()} if found else {}
        for found in (heads, layers)
    ]
    factor = max(factors[0].keys() & factors[1].keys(), default=1)
    # Ours: the paper compares them neither by a number nor at equal cost.
    if factor == 1:
        name = f"{place}gain of growing H minus that of L"
        return Finding(name, "not measured", "above 0 (ours)")
    gain = mean(differences(*(differences(found[1], found[factor]) for found in factors)))
    name = f"{place}gain of {factor:g} times H minus that of L"
    return Finding(name, gain.text(4), "above 0 (ours)", gain.claimed_gain())


def _per_flop(gap: tuple[int, int, Estimate], by: str, place: str) -> Finding:
    low, high, gain = gap
    symbol = SYMBOLS[by]
    name = f"{place}the same, {symbol} = {low} minus {high}, at equal FLOPs"
    # The paper says nothing of when growing pays.
    better = {"agrees": f"{symbol} = {high} is better", "disagrees": f"{symbol} = {low} is better"}
    verdict = gain.claimed_gain() if gain.groups else ""
    return Finding(name, gain.text(4), "", better.get(verdict, verdict))


def _of_alpha(runs: Runs) -> list[Finding]:
    """What alpha_A = 1/2 gains, at equal size and so at equal FLOPs as well, beside the paper's two
    claims of it; after N, whether growing N gains more at 1/2, as heads differ (section 3.2)."""
    if set(scans.alphas(runs.results)) != {1.0, 0.5}:
        return [Finding("loss at alpha_A = 1 minus that at 1/2", "not measured")]
    result = []
    for by in SIZES:
        one, half = (finals(runs, by, alpha) for alpha in (1.0, 0.5))
        for size in sorted(one.keys() & half.keys()):
            place = f"{SYMBOLS[by]} = {size}"
            if size == scans.base(runs.results)[by]:  # it is in all scans, and said once
                if by != HEADS:
                    continue
                place = "base"
            gain = mean(differences(one[size], half[size]))
            verdict = gain.claimed_gain()
            claim = (ALPHA_CLAIMS, ALPHA_SIDES.get(verdict, verdict)) if by != LAYERS else ()
            name = f"loss at alpha_A = 1 minus that at 1/2, {place}"
            result.append(Finding(name, gain.text(4), *claim))
        if by == HEAD_DIM:
            name, claim = "gain of growing N at alpha_A = 1/2 minus that at 1", ("above 0",)
            measured = "not measured"
            if len(one) > 1 and len(half) > 1:
                gain = mean(
                    differences(
                        *(
                            differences(found[min(found)], found[max(found)])
                            for found in (half, one)
                        )
                    )
                )
                measured, claim = gain.text(4), ("above 0", gain.claimed_gain())
            result.append(Finding(name, measured, *claim))
    return result


def _of_kernels(kernels: pd.DataFrame) -> list[Printed]:
    """How alike the final kernels are across sizes at each alpha_A, and at both of them."""
    found: list[Printed] = [*observed.basis(kernels)]
    for kind in KINDS:
        for by in SIZES:
            for alpha in scans.alphas(kernels):
                own = observed.pairs(kernels, kind, by, alpha)
                finding = observed.aligned(own, kind, by, 1)
                found.append(replace(finding, name=f"{scans.alpha_name(alpha)}: {finding.name}"))
            found += _across(kernels, kind, by)
    return found


def _across(kernels: pd.DataFrame, kind: str, by: str) -> list[Finding]:
    """Alignment of a model's final kernels at alpha_A = 1 and 1/2, of different seeds, and by how
    much it exceeds that of different seeds at one alpha_A."""
    name = f"final {kind} kernel: alignment of alpha_A = 1 and 1/2, by {SYMBOLS[by]}"
    one, half = (observed.pairs(kernels, kind, by, alpha) for alpha in (1.0, 0.5))
    across: dict[int, SeedPairs] = {}
    excess: dict[int, SeedPairs] = {}
    both = sorted(one.keys() & half.keys())
    for (size, seed), (same, other) in itertools.permutations(both, 2):
        if size == same:
            value, *within = (
                observed.alignment(first[size, seed][1], second[size, other][1])
                for first, second in ((one, half), (one, one), (half, half))
            )
            across.setdefault(size, {})[seed, other] = value
            excess.setdefault(size, {})[seed, other] = value - sum(within) / 2
    return [
        Finding(name, observed.by_size(across) or "not measured", "about 1"),
        Finding(f"{name}, minus within one", observed.by_size(excess) or "not measured"),
    ]


# Figures


def draw(runs: Runs) -> Iterator[tuple[str, object]]:
    """Figures 7 and 12."""
    trained = runs.metrics[np.isfinite(runs.metrics[TRAIN_LOSS])]
    yield "figure_7_dynamics", _steps(trained, scans.alphas(runs.results))
    yield "figure_12_flops", _flops(trained, scans.alphas(runs.results))
    for kind, letter in zip(KINDS, "bc", strict=True):
        title = f"({letter}) {kind.replace('_', ' ')} kernels\n{observed.first_seed(runs.kernels)}"
        strips = _strips(runs.kernels, kind)
        yield f"figure_7_{kind}", observed.draw_strips(strips, LABELS[kind], title)


def _steps(rows: pd.DataFrame, own: list[float]):
    """Figure 7a: training loss against steps, a row per scan and a column per alpha_A; then what
    alpha_A = 1/2 gains, which is too little to be seen across panels."""
    both = own == [1.0, 0.5]
    figure, axes = style.subplots(len(SIZES), len(own) + both, (3.5, 2.3), sharex=True)
    figure.suptitle(f"(a) training loss\n{scans.BANDS}, of runs of equal seeds on the right")
    for row, by in zip(axes, SIZES, strict=True):
        for axis, alpha in zip(row, own, strict=True):
            axis.set_title(scans.alpha_title(alpha))
            axis.sharey(axes[0][0])
            scans.draw_lines(axis, scans.scan(rows, by, alpha), by, scale="linear")
        if both:
            scans.draw_curves(row[-1], _gains(rows, by), by)
            row[-1].sharey(axes[0][-1])
            row[-1].axhline(0, color="black", lw=0.8)
            row[-1].set(title=r"loss at $\alpha_A$ = 1 minus that at 1/2", xlabel="steps")
        row[0].set_ylabel("training loss\n(nats/token)")
    _outer(axes, len(own))
    return figure


def _gains(rows: pd.DataFrame, by: str) -> dict[int, scans.LossCurve]:
    """Size -> training loss at alpha_A = 1 minus that at 1/2, of runs of equal seeds."""
    one, half = (
        {
            int(size): scans.by_seed(own, by, TRAIN_LOSS)
            for size, own in scans.scan(rows, by, alpha).groupby(by)
        }
        for alpha in (1.0, 0.5)
    )
    gains = {
        size: (one[size] - half[size]).dropna(axis=1, how="all").dropna()
        for size in sorted(one.keys() & half.keys())
    }
    return {
        size: scans.curve(own, TRAIN_LOSS, "linear", rows[STEP].max())
        for size, own in gains.items()
        if own.size
    }


def _flops(rows: pd.DataFrame, own: list[float]):
    """Figure 12: the same training losses against FLOPs."""
    figure, axes = style.subplots(len(SIZES), len(own), (3.6, 2.3), sharex=True, sharey=True)
    figure.suptitle(
        f"training loss against compute\n{scans.BANDS}; FLOPs: 6 per parameter "
        "and token, of which the paper's caption leaves out the tokens"
    )
    for row, by in zip(axes, SIZES, strict=True):
        for axis, alpha in zip(row, own, strict=True):
            axis.set_title(scans.alpha_title(alpha))
            scans.draw_lines(axis, scans.scan(rows, by, alpha), by, against=FLOPS)
            axis.set_xlabel("training FLOPs\n(6 x parameters x tokens)")
        row[0].set_ylabel("training loss\n(nats/token)")
    _outer(axes, len(own))
    return figure


def _outer(axes, shared: int) -> None:
    """Labels of common axes at the figure's edges alone; `shared` columns have one loss."""
    for row in axes:
        for index, axis in enumerate(row):
            axis.tick_params(labelleft=index in (0, shared))
    for axis in axes[:-1].flat:
        axis.set_xlabel("")


def _strips(kernels: pd.DataFrame, kind: str) -> list[Strip]:
    """Figure 7b, c: the initial kernels of the base and the largest models, then the final ones
    at every alpha_A."""
    grid: list[Strip] = []
    for alpha in scans.alphas(kernels):
        # As in the figure, one row of initial kernels: those at the first alpha_A.
        for strip in observed.largest_of_scans(kernels[kernels[ALPHA] == alpha], kind)[
            bool(grid) :
        ]:
            label = f"{strip.label}\n{scans.alpha_title(alpha)}"
            grid += [Strip(label, strip.panels)] if strip.panels else []
    return grid
