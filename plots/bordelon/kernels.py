"""Kernels and attention of Vision Transformers of growing size (Bordelon et al., Figures 6, 8-10).

    python -m plots bordelon/kernels [observed_kernels.csv observed_attention.csv metrics.csv]

The sweep grows one of heads H, head dimension N and depth L at a time from a base model. Draws the
test loss (6a) and the training loss (8) of each scan against steps, pooled kernels (6b, 9) and
spatial ones (6c, 10) before and after training, divided by the mean of their diagonal, with their
similarity to that of the largest size, and the density over heads of the attention logits A (6d).
The findings: how alike the kernels of different sizes and different seeds are, how the initial
kernel's scale falls with L, and how the spread of A over heads changes with N.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import observed, scans
from plots.bordelon.observed import BLOCK, HEAD, LABELS, STATES, VALUE, Pairs
from plots.bordelon.published import CAPTION_2B, DERIVED
from plots.bordelon.scans import EVAL_LOSS, HEAD_DIM, LAYERS, SIZES, SYMBOLS, TRAIN_LOSS, Losses
from plots.findings import HEADER, Finding, Report, exact_text
from plots.floors import irreducible_power_law
from plots.statistics import complete, differences, exponent, jackknife, mean
from plots.tables import SEED, STEP

TABLES = ("bordelon/figure_6_kernels", "bordelon/figure_6_attention", "bordelon/figure_6_metrics")
KINDS = ("pooled", "spatial")


class Data(NamedTuple):
    """Kernels, attention logits and losses of one sweep."""

    kernels: pd.DataFrame
    attention: pd.DataFrame
    test: Losses
    train: Losses


def read(paths: tables.Paths) -> Data:
    """The three tables of one sweep."""
    tables.expect(paths, "observed_kernels.csv", "observed_attention.csv", "metrics.csv")
    own = [BLOCK, observed.TOKEN, observed.ATTENDED, HEAD, VALUE]
    needed = [*observed.PLACE, *own]
    attention = tables.read(paths[1], needed, "observed_attention.csv", numbers=own)
    losses = (scans.read_losses(paths[2], scans.HEADS, loss) for loss in (EVAL_LOSS, TRAIN_LOSS))
    kernels = observed.read_kernels(paths[0], KINDS)
    return Data(kernels, attention[np.isfinite(attention[VALUE])], *losses)


def entries(rows: pd.DataFrame, by: str, alpha: float) -> dict[tuple[int, int], np.ndarray]:
    """(size, seed) -> A as (2, places, heads): before and after; a place has a block, too."""
    values = {}
    for (size, seed), run in scans.scan(rows, by, alpha).groupby([by, SEED]):
        place = [BLOCK, observed.TOKEN, observed.ATTENDED]
        grid = run.pivot(index=[STEP, *place], columns=HEAD, values=VALUE)
        steps = grid.index.get_level_values(STEP).unique()
        if len(steps) == 2 and not grid.isna().to_numpy().any():
            states = [grid.loc[step].to_numpy() for step in sorted(steps)]
            if states[0].shape == states[1].shape:
                values[int(size), int(seed)] = np.stack(states)
    return values


def spread(values: np.ndarray) -> float:
    """Unbiased variance over heads, mean over places: (places, heads) -> number."""
    return float(values.var(axis=-1, ddof=1).mean()) if values.shape[-1] > 1 else math.nan


def findings(data: Data) -> Report:
    """Alignment of sizes, scale over depth, and the spread over heads against N."""
    kernels, attention = data.kernels, data.attention
    alpha = scans.alphas(kernels)[0]
    start = ", ".join(f"{SYMBOLS[size]} = {value}" for size, value in scans.base(kernels).items())
    yield f"base {start}; kernels of the residual stream after the last block"
    yield from observed.basis(kernels)
    yield HEADER
    for by in [by for by in SIZES if kernels[by].nunique() > 1] or SIZES:  # a table of one scan
        for kind in KINDS:
            pairs = observed.pairs(kernels, kind, by, alpha)
            yield from (observed.aligned(pairs, kind, by, state) for state in (0, 1))
    for kind in KINDS:
        yield from _scales(observed.pairs(kernels, kind, LAYERS, alpha), kind)
    for own in scans.alphas(attention):
        yield from _spreads(entries(attention, HEAD_DIM, own), own)
    yield from scans.cut_lines(data.train.cut)


def _scales(pairs: Pairs, kind: str) -> Report:
    """How the initial kernel's scale falls with depth: branches add an amount of order 1/L."""
    places = [(size, seed, observed.scale(initial)) for (size, seed), (initial, _) in pairs.items()]
    rows = pd.DataFrame(places, columns=[LAYERS, SEED, VALUE])
    by_depth = rows.groupby(LAYERS)
    values = {int(n): dict(zip(of[SEED], of[VALUE], strict=True)) for n, of in by_depth}
    name = f"initial {kind} kernel: mean of the diagonal, by L"
    if len(values) < 2:
        yield Finding(name, "not measured", "falls")
        return
    text = ", ".join(f"{size}: {mean(own).compact()}" for size, own in values.items())
    fall = mean(differences(values[min(values)], values[max(values)]))
    yield fall.judged(name, "gains", "falls", text=f"{text} (n = {fall.groups})")
    name = f"initial {kind} kernel: exponent of L in what branches add"  # to that of the embedding

    def of_depth(part: pd.DataFrame) -> float:
        means = part.groupby(LAYERS)[VALUE].mean()
        law = irreducible_power_law(means.index.tolist(), means.tolist())
        # At a bound of the fit, the scales do not determine it.
        return -law.exponent if math.isfinite(law.exponent_error) else math.nan

    try:
        fitted = jackknife(complete(rows, SEED, LAYERS), SEED, of_depth)
    except (ValueError, RuntimeError) as error:
        yield Finding(name, f"not measured: {error}", f"-1 {DERIVED}")
    else:
        yield fitted.finding(name, -1.0, f"-1 {DERIVED}")


def _spreads(values: Mapping[tuple[int, int], np.ndarray], alpha: float) -> Report:
    """Exponents of N in the variance over heads, before and after, and in the change of A."""
    place = scans.alpha_name(alpha)
    variance, text = 1 - 2 * alpha, exact_text(1 - 2 * alpha)
    # Of alpha_A = 1 the caption of Fig. 6d says that the initial variance decreases and the update
    # is about the same for all N, of 1/2 that both distributions are; that of Fig. 2b says N^-2.
    final = f"{text} {DERIVED} (2b: {CAPTION_2B})" if alpha == 1 else text
    measured = (
        ("initial variance of A over heads", lambda a: spread(a[0]), variance, text),
        ("final variance of A over heads", lambda a: spread(a[1]), variance, final),
        ("RMS change of A", lambda a: float(np.sqrt(np.square(a[1] - a[0]).mean())), 0.0, "0"),
    )
    for name, value, published, beside in measured:
        places = [(size, seed, value(a)) for (size, seed), a in values.items()]
        rows = pd.DataFrame(places, columns=[HEAD_DIM, SEED, VALUE])
        power = exponent(rows, SEED, HEAD_DIM, VALUE)
        yield power.finding(f"{place}: {name}, exponent of N", published, beside)


def draw(data: Data) -> style.Drawn:
    """Figures 6 and 8 to 10."""
    yield "figure_6_dynamics", _dynamics(data.test.rows, EVAL_LOSS, "test loss (nats/image)"), [2]
    yield "figure_8_dynamics", _dynamics(data.train.rows, TRAIN_LOSS, scans.LOSS_LABEL), [2]
    kernels, alpha = data.kernels, scans.alphas(data.kernels)[0]
    for kind, letter, number in zip(KINDS, "bc", (9, 10), strict=True):
        title = f"{kind} kernels of the first seed, {scans.alpha_title(alpha)}"
        for name, every in ((f"figure_6_{kind}", False), (f"figure_{number}_kernels", True)):
            grid = observed.strips(kernels, kind, alpha, every)
            label = title if every else f"({letter}) {title}"
            yield name, observed.draw_strips(grid, LABELS[kind], label), [0]
    yield "figure_6_attention", _attention(data.attention), [1]


def _attention(attention: pd.DataFrame):
    """Figure 6d: A at one pair of tokens, a tick per head, and Gaussian estimates of densities."""
    from scipy.stats import gaussian_kde

    own = scans.alphas(attention)
    title = "(d) attention logits of heads; sd: standard deviation"
    figure, axes = style.subplots(title, len(own), 2, (3.8, 2.6), sharey="row")
    for row, alpha in zip(axes, own, strict=True):
        # N -> A (2, heads of all seeds) of the last block, the last token attending to the middle:
        # the places of a block are sorted, and the last but one is (last, middle) of its token.
        seeds: dict[int, list[np.ndarray]] = {}
        for (size, _), states in entries(attention, HEAD_DIM, alpha).items():
            seeds.setdefault(size, []).append(states[:, -2])
        colors = style.width_colors(list(seeds))
        for size in sorted(seeds):
            states = np.concatenate(seeds[size], axis=1)
            for axis, values in zip(row, states, strict=True):
                deviation = values.std(ddof=1)
                x = np.linspace(values.min() - 3 * deviation, values.max() + 3 * deviation, 200)
                label = f"N = {size}, sd {deviation:.2f}"
                look = {"color": colors[size], "lw": 1.3, "label": label}
                axis.plot(x, gaussian_kde(values)(x), **look)
                axis.plot(values, np.zeros_like(values), "|", ms=5, mew=0.7, color=colors[size])
        for axis, state in zip(row, STATES, strict=True):
            axis.set_title(f"{state}, {scans.alpha_title(alpha)}")
            axis.legend(fontsize=7, frameon=False)
        row[0].set_ylabel("density over heads")
    style.label_grid(axes, x="attention logit A")
    return figure


def _dynamics(rows: pd.DataFrame, loss: str, label: str):
    """Figures 6a (test loss) and 8 (training loss, before the first evaluation, too)."""
    alpha = scans.alphas(rows)[0]
    title = "training loss" if loss == TRAIN_LOSS else "(a) test loss, from the first evaluation on"
    figure, axes = style.subplots(title, 1, len(SIZES), (3.4, 2.9), sharex=True, sharey=True)
    for axis, by in zip(axes[0], SIZES, strict=True):
        own = scans.curves(scans.scan(rows, by, alpha), by, loss)
        scans.draw_lines(axis, own, by, binned=loss == TRAIN_LOSS)
        axis.set_title(f"{SYMBOLS[by]} grows, {scans.alpha_title(alpha)}")
    scans.label_decades(axes[0][0], "x")
    axes[0][0].set_ylabel(label)
    return figure
