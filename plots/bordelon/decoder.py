"""Decoders of growing size at two scales of attention (Bordelon et al., Figures 7 and 12).

    python -m plots bordelon/decoder [results.csv metrics.csv observed_kernels.csv]

The sweep grows one of heads H, head dimension N and depth L at a time from a base model, at
alpha_A = 1 and 1/2. Draws training loss against steps (7a), with what alpha_A changes, and against
FLOPs (12), and kernels before and after training, of the last token (7b) and of the tokens of one
sample (7c). FLOPs are 6 per parameter and token (the caption of Figure 12 leaves the tokens out).
Findings compare final evaluation losses of runs of equal seeds, which see the same text.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import observed, scans
from plots.bordelon.observed import LABELS, STATES, SeedPairs
from plots.bordelon.published import ALPHA_CLAIMS, ALPHA_SIDES, FLOPS_PER_PARAMETER, GROWTH
from plots.bordelon.scans import ALPHA, EVAL_LOSS, HEAD_DIM, HEADS, LAYERS, SIZES, SYMBOLS
from plots.findings import HEADER, Finding, Report
from plots.statistics import differences, mean
from plots.tables import CURVE, LOSS, PARAMETERS, RUN, SEED, STATUS, STEP, TableError

TABLES = ("bordelon/figure_7_12", "bordelon/figure_7_12_metrics", "bordelon/figure_7_12_kernels")
ONCE = ("figure_7_last_token", "figure_7_spatial")  # of the first seed
STEPS, TARGETS = "steps", "targets"
FLOPS = "flops"
KINDS = ("last_token", "spatial")
PLACE = (CURVE, *SIZES, ALPHA, SEED, RUN)
BySize = dict[int, dict[int, float]]  # size -> seed -> a loss


class Data(NamedTuple):
    """Finished runs, one row each, what they logged, with the FLOPs spent until then, and their
    kernels; then the names of those that did not finish."""

    results: pd.DataFrame
    metrics: pd.DataFrame
    kernels: pd.DataFrame
    cut: Sequence[str] = ()


def read(paths: tables.Paths) -> Data:
    """The tables of one sweep; TableError without a finished run."""
    tables.expect(paths, "results.csv", "metrics.csv", "observed_kernels.csv")
    table = tables.read(paths[0], [*PLACE, STATUS, LOSS, PARAMETERS, STEPS, TARGETS])
    cut = sorted(table.loc[table[STATUS] != "finished", RUN])
    table = table[table[STATUS] == "finished"]
    if table.empty:
        raise TableError(f"{paths[0]}: no run in it is finished; run the sweep first")
    # Tokens per step from the whole run.
    cost = FLOPS_PER_PARAMETER * table[PARAMETERS] * table[TARGETS] / table[STEPS]
    metrics = tables.read(paths[1], [*PLACE, STEP, scans.TRAIN_LOSS, EVAL_LOSS], "metrics.csv")
    metrics = metrics[metrics[RUN].isin(table[RUN])]
    spent = metrics[RUN].map(dict(zip(table[RUN], cost, strict=True))) * metrics[STEP]
    kernels = observed.read_kernels(paths[2], KINDS)
    return Data(table, metrics.assign(**{FLOPS: spent}), kernels, cut)


def finals(data: Data, by: str, alpha: float) -> BySize:
    """Size -> seed -> final evaluation loss, of a scan."""
    losses: BySize = {}
    for row in scans.scan(data.results, by, alpha).sort_values(by).to_dict("records"):
        losses.setdefault(int(row[by]), {})[int(row[SEED])] = float(row[LOSS])
    return losses


def findings(data: Data) -> Report:
    """Final losses, what growing gives, what alpha_A changes, then kernels."""
    yield (
        "losses in nats per token over validation text; ± standard errors over seeds (n), of "
        "differences between runs of equal seeds; FLOPs: 6 per parameter and token"
    )
    yield (
        "alpha_A = 1 against 1/2: Fig. 7a shows lower losses at 1/2 for H and N, the caption "
        "of Fig. 12 says of the same runs that 1 is better at fixed compute; runs of one size "
        "cost the same"
    )
    yield HEADER
    for alpha in scans.alphas(data.results):
        place, grown = f"{scans.alpha_name(alpha)}: ", {}
        for by in SIZES:
            losses = finals(data, by, alpha)
            texts = [f"{size}: {mean(own).compact()}" for size, own in losses.items()]
            measured = f"{', '.join(texts)} (n = {len(next(iter(losses.values()), ()))})"
            yield Finding(f"{place}final loss by {SYMBOLS[by]}", measured)
            if len(losses) < 2:
                continue
            gain = mean(differences(losses[min(losses)], losses[max(losses)]))
            name = f"{place}loss of the base minus that of the largest {SYMBOLS[by]}"
            yield gain.judged(name, None if by == LAYERS else "gains", GROWTH[by], 4)
            start = min(losses)
            grown[by] = {size / start: differences(losses[start], losses[size]) for size in losses}
        # Ours: the paper compares H and L neither by a number nor at equal cost.
        equal = ("equal", "about 0") if alpha == 1 else (None, "")
        both = ((HEADS, LAYERS, ("gains", "above 0 (ours)")), (HEAD_DIM, HEADS, equal))
        for one, other, claim in both:
            factors = grown.get(one, {}).keys() & grown.get(other, {}).keys()
            if (factor := max(factors, default=1)) > 1:
                gain = mean(differences(grown[one][factor], grown[other][factor]))
                name = f"{place}gain of {factor:g} times {SYMBOLS[one]} minus that of "
                yield gain.judged(name + SYMBOLS[other], *claim, 4)
    yield from _of_alpha(data)
    yield from observed.basis(data.kernels)
    for kind, by in itertools.product(KINDS, SIZES):
        for alpha in scans.alphas(data.kernels):
            own = observed.pairs(data.kernels, kind, by, alpha)
            yield observed.aligned(own, kind, by, 1, f"{scans.alpha_name(alpha)}: ")
        yield from _across(data.kernels, kind, by)
    yield from scans.cut_lines(data.cut)


def _of_alpha(data: Data) -> Report:
    """What alpha_A = 1/2 gains at equal size and FLOPs; there N gains more, too (section 3.2)."""
    start = scans.base(data.results)
    for by in SIZES:
        one, half = (finals(data, by, alpha) for alpha in (1.0, 0.5))
        for size in sorted(one.keys() & half.keys()):
            place = f"{SYMBOLS[by]} = {size}"
            if size == start[by]:  # it is in all scans, and said once
                if by != HEADS:
                    continue
                place = "base"
            gain = mean(differences(one[size], half[size]))
            claim = ("gains", ALPHA_CLAIMS) if by != LAYERS else (None, "")
            finding = gain.judged(f"loss at alpha_A = 1 minus that at 1/2, {place}", *claim, 4)
            verdict = ALPHA_SIDES.get(finding.verdict, finding.verdict)
            yield replace(finding, verdict=verdict)
        if by == HEAD_DIM and len(one) > 1 and len(half) > 1:
            ends = (differences(of[min(of)], of[max(of)]) for of in (half, one))
            gain = mean(differences(*ends))
            name = "gain of growing N at alpha_A = 1/2 minus that at 1"
            yield gain.judged(name, "gains", "above 0", 4)


def _across(kernels: pd.DataFrame, kind: str, by: str) -> Report:
    """Alignment of final kernels of other seeds across alpha_A, and minus that at one of them."""
    name = f"final {kind} kernel: alignment of alpha_A = 1 and 1/2, by {SYMBOLS[by]}"
    one, half = (
        {place: observed.centred(final) for place, (_, final) in of.items()}
        for of in (observed.pairs(kernels, kind, by, alpha) for alpha in (1.0, 0.5))
    )
    across: dict[int, SeedPairs] = {}
    excess: dict[int, SeedPairs] = {}
    for (size, seed), (same, other) in itertools.permutations(sorted(one.keys() & half.keys()), 2):
        if size == same:
            value, *within = (
                observed.product(first[size, seed], second[size, other])
                for first, second in ((one, half), (one, one), (half, half))
            )
            across.setdefault(size, {})[seed, other] = value
            excess.setdefault(size, {})[seed, other] = value - sum(within) / 2
    by_size = {size: observed.over_seeds(values) for size, values in excess.items()}
    # The size at which they are least alike.
    worst = max(by_size.values(), key=lambda gap: abs(gap.value), default=None)
    yield Finding(name, observed.by_size(across) or "not measured", "about 1")
    yield Finding(f"{name}, minus within one", observed.by_size(excess), "about 0", "", worst)


def draw(data: Data) -> style.Drawn:
    """Figures 7 and 12."""
    trained = data.metrics[np.isfinite(data.metrics[scans.TRAIN_LOSS])]
    own = scans.alphas(data.results)
    yield "figure_7_dynamics", _steps(trained, own), [0, 1]
    yield "figure_12_flops", _flops(trained, own), [0, 1]
    for kind, letter in zip(KINDS, "bc", strict=True):
        grid: list[observed.Strip] = []
        for alpha in own:
            # As in the figure, one row of initial kernels: those at the first alpha_A.
            for strip in observed.strips(data.kernels, kind, alpha, False)[bool(grid) :]:
                label = f"{strip.label}\n{scans.alpha_title(alpha)}"
                grid += [observed.Strip(label, strip.panels)] if strip.panels else []
        words = kind.replace("_", " ")
        title = f"({letter}) {words} kernels of the first seed, {STATES[0]} and after"
        yield f"figure_7_{kind}", observed.draw_strips(grid, LABELS[kind], title), [2]


def _steps(rows: pd.DataFrame, own: list[float]):
    """Figure 7a, and what alpha_A = 1/2 gains, which is too little to be seen across panels."""
    both = own == [1.0, 0.5]
    title = "(a) training loss"
    figure, axes = style.subplots(title, len(SIZES), len(own) + both, (3.5, 2.3), sharex=True)
    for row, by in zip(axes, SIZES, strict=True):
        lines = [scans.curves(scans.scan(rows, by, alpha), by) for alpha in own]
        for axis, alpha, line in zip(row[: len(own)], own, lines, strict=True):
            axis.set_title(scans.alpha_title(alpha))
            axis.sharey(axes[0][0])
            scans.draw_lines(axis, line, by, "linear")
        if both:
            scans.draw_lines(row[-1], _gains(*lines), by, "linear")
            row[-1].sharey(axes[0][-1])
            row[-1].axhline(0, color="black", lw=0.8)
            row[-1].set_title(r"loss at $\alpha_A$ = 1 minus that at 1/2")
        row[0].set_ylabel("training loss\n(nats/token)")
        for index, axis in enumerate(row):  # labels of common axes at the edges alone
            axis.tick_params(labelleft=index in (0, len(own)))
    for axis in axes[:-1].flat:
        axis.set_xlabel("")
    return figure


def _flops(rows: pd.DataFrame, own: list[float]):
    """Figure 12; of both alpha_A the difference, a hundredth of what the losses fall by."""
    both = own == [1.0, 0.5]
    words = r"loss at $\alpha_A$ = 1 minus that at 1/2" if both else "training loss"
    title = f"{words}, against compute"
    figure, axes = style.subplots(title, 1, len(SIZES), (3.6, 2.9), sharey=True)
    for axis, by in zip(axes[0], SIZES, strict=True):
        grown = [scans.scan(rows, by, alpha) for alpha in own]
        per_step = (grown[0][FLOPS] / grown[0][STEP]).groupby(grown[0][by]).mean().to_dict()
        lines = [scans.curves(scan, by) for scan in grown]
        scans.draw_lines(axis, _gains(*lines) if both else lines[0], by, factors=per_step)
        axis.set(title=f"{SYMBOLS[by]} grows", xlabel="training FLOPs (6 x parameters x tokens)")
        if both:
            axis.axhline(0, color="black", lw=0.8)
    axes[0][0].set_ylabel("nats/token")
    return figure


def _gains(one: Mapping[int, pd.DataFrame], half: Mapping[int, pd.DataFrame]):
    """Size -> losses at alpha_A = 1 minus those at 1/2, on equal seeds and steps."""
    gains = {n: (one[n] - half[n]).dropna(axis=1, how="all").dropna() for n in one if n in half}
    return {n: gap for n, gap in gains.items() if gap.size}
