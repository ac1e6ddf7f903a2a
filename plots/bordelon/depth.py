"""Depth L for alpha_L = 1/2 and 1 (Bordelon et al., Figure 5): weights that move, loss per FLOP.

    python -m plots bordelon/depth [OBSERVATIONS RESULTS METRICS]

Tables of a sweep over model.layers such as vit_cifar5m/sweeps/figure_5.yaml. (a) ||W - W_0|| /
||W_0|| of query and key weights at the last observed step, pooled over blocks, against L, expected
to go as L^(alpha_L - 1), like the change of attention logits that they cause. (b) evaluation loss
against training FLOPs, 6 per parameter and token. Both panels show one eta_0 per alpha_L, as
movement compares depths at equal eta_0: of the eta_0 with the most finished runs, the one with the
lowest mean final loss, on the seeds that are shown. If there are several eta_0, findings also
compare final losses at the best eta_0 of every depth.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from plots import rates, style, tables
from plots.bordelon import scans
from plots.bordelon.published import FLOPS_PER_PARAMETER
from plots.bordelon.scans import ALPHA_LOOKS, CHANCE, EVAL_LOSS, LAYERS
from plots.findings import HEADER, Finding, Report
from plots.statistics import complete, differences, exponent, mean
from plots.tables import PARAMETERS, RATE, RUN, SEED, STATUS, STEP, TableError

TABLES = ("bordelon/figure_5_observations", "bordelon/figure_5", "bordelon/figure_5_metrics")
ALPHA_L = "prescription.alpha_depth"
PATCH, IMAGE, BATCH = "model.patch_size", 32, "training.batch_size"
MOVED = {"query_weight_relative": r"$W_Q$", "key_weight_relative": r"$W_K$"}
# What that movement makes of the attention logits, (16); not drawn.
INDUCED = {"attention_change_weights": "A by W_Q, W_K"}
COLUMNS = {
    "observations.csv": (LAYERS, ALPHA_L, SEED, RUN, STEP, "block", *MOVED, *INDUCED),
    "results.csv": (LAYERS, ALPHA_L, RATE, PATCH, BATCH, SEED, RUN, STATUS, PARAMETERS),
    "metrics.csv": (RUN, STEP, EVAL_LOSS),
}
FLOPS, LAST = "flops", "last"
STYLES = {0.5: "-", 1.0: "--"}  # as in the paper: alpha_L = 1 is dashed


class Data(NamedTuple):
    """A row per run at the last observed step, and a row per run and evaluation, both at the one
    eta_0 of each alpha_L that is shown; a row per run at any eta_0 with its last loss, infinite
    where it diverged."""

    movement: pd.DataFrame
    losses: pd.DataFrame
    tried: pd.DataFrame


def read(paths: tables.Paths) -> Data:
    """The three tables of one sweep, runs that did not finish left out; TableError without one."""
    observations, results, metrics = tables.read_each(paths, COLUMNS)
    evaluated = metrics.dropna(subset=[EVAL_LOSS]).sort_values(STEP)
    results = results.assign(**{LAST: results[RUN].map(evaluated.groupby(RUN)[EVAL_LOSS].last())})
    finished = results[results[STATUS] == "finished"]
    if finished.empty:
        raise TableError(f"{paths[1]}: no finished run in it; finish the sweep first")
    diverged = results[results[STATUS] == "diverged"].assign(**{LAST: math.inf})
    tried = pd.concat([finished, diverged]).dropna(subset=[LAST])
    ranked = finished.groupby([ALPHA_L, RATE]).agg(runs=(RUN, "count"), loss=(LAST, "mean"))
    ranked = ranked.reset_index().sort_values(["runs", "loss", RATE], ascending=[False, True, True])
    best = ranked.drop_duplicates(ALPHA_L)[[ALPHA_L, RATE]]
    shown = finished.merge(best, on=[ALPHA_L, RATE])
    rows = observations[observations[RUN].isin(shown[RUN]) & (observations["block"] == "all")]
    movement = rows[rows[STEP] == rows[STEP].max()]
    own = shown.drop(columns=[STEP, EVAL_LOSS], errors="ignore")
    losses = evaluated[[RUN, STEP, EVAL_LOSS]].merge(own, on=RUN)
    if movement.empty or losses.empty:
        raise TableError(
            f"{paths[0]}: nothing observed of a finished run; give tables of one sweep"
        )
    cost = FLOPS_PER_PARAMETER * losses[PARAMETERS] * (IMAGE // losses[PATCH]) ** 2 * losses[BATCH]
    return Data(movement, losses.assign(**{FLOPS: cost * losses[STEP]}), tried)


def findings(data: Data) -> Report:
    """5a by alpha_L and weight, then 5b by depth."""
    movement, losses, tried = data
    rate_of = losses.groupby(ALPHA_L)[RATE].first().items()
    shown = ", ".join(f"{rate:g} ({scans.alpha_name(alpha, 'L')})" for alpha, rate in rate_of)
    seeds = tables.span(movement.groupby([ALPHA_L, LAYERS])[SEED].nunique())
    yield (
        f"eta_0 = {shown}; {seeds} seeds; movement after {movement[STEP].max():.0f} steps, loss "
        f"after {losses[STEP].max():.0f}; ± of powers: from leaving out a seed"
    )
    yield HEADER
    for alpha, rows in movement.groupby(ALPHA_L):
        depths = sorted(rows[LAYERS].unique())
        for column, label in (MOVED | INDUCED).items():
            name = f"5a: L in the movement of {label.strip('$')}, {scans.alpha_name(alpha, 'L')}"
            yield exponent(rows, SEED, LAYERS, column).finding(name, alpha - 1)
            if len(depths) > 2:  # the power is one of large L
                name = name.replace("L in", f"L = {depths[-2]:.0f} to {depths[-1]:.0f} in")
                deep = exponent(rows[rows[LAYERS].isin(depths[-2:])], SEED, LAYERS, column)
                yield deep.finding(name, alpha - 1)
    yield from _of_losses(losses)
    yield from _of_rates(tried)


def _of_losses(losses: pd.DataFrame) -> Report:
    """What alpha_L = 1 gains at the same compute, claimed at large L; no verdict above chance."""
    last = losses[losses[STEP] == losses[STEP].max()]
    means = last.groupby([ALPHA_L, LAYERS])[EVAL_LOSS].mean()
    for alpha, own in means.groupby(level=ALPHA_L):
        values = ", ".join(f"{depth:.0f}: {loss:.3f}" for (_, depth), loss in own.items())
        name = f"5b: final loss by L, {scans.alpha_name(alpha, 'L')} (nats)"
        yield Finding(name, values)
    above = (place for place, loss in means.items() if not loss < CHANCE)
    lost = [f"{scans.alpha_name(alpha, 'L')}, L = {depth:.0f}" for alpha, depth in above]
    depths = sorted(last[LAYERS].unique())
    for depth in depths:
        both = last[last[LAYERS] == depth].pivot(index=SEED, columns=ALPHA_L, values=EVAL_LOSS)
        if list(both) != [0.5, 1.0]:
            continue
        gain = mean(differences(both[0.5].dropna().to_dict(), both[1.0].dropna().to_dict()))
        name = f"5b: final loss, alpha_L = 1/2 minus 1, L = {depth:.0f} (nats)"
        claim = ("gains", "above 0") if depth == depths[-1] and len(depths) > 1 else (None, "")
        finding, why = gain.judged(name, *claim), f"above chance, ln 10 = 2.303, {'; '.join(lost)}"
        yield replace(finding, verdict=f"no verdict: {why}") if lost and claim[0] else finding


def _of_rates(tried: pd.DataFrame) -> Report:
    """The same gain with both alpha_L at their best eta_0 of every depth, where several ran."""
    if tried.groupby(ALPHA_L)[RATE].nunique().max() < 2 or tried[ALPHA_L].nunique() < 2:
        return
    whole = [complete(rows, SEED, ALPHA_L, RATE) for _, rows in tried.groupby(LAYERS)]
    tried = pd.concat(whole)  # the seeds that have every eta_0 of a depth
    tried = tried.assign(**{tables.LOSS: tried[LAST], tables.WIDTH: tried[LAYERS]})
    by_alpha = {alpha: rates.rate_sweeps(rows) for alpha, rows in tried.groupby(ALPHA_L)}
    for alpha, sweeps in by_alpha.items():
        values = ", ".join(
            f"{depth}: {sweep.best.grid_value:g}" + " (first or last)" * sweep.best.at_edge
            for depth, sweep in sweeps.items()
        )
        yield Finding(f"5b: best eta_0 by L, {scans.alpha_name(alpha, 'L')}", values)
    gains = rates.gains(by_alpha[0.5], by_alpha[1.0])
    for depth, gain in gains.items():
        name = f"5b: each at its best eta_0, alpha_L = 1/2 minus 1, L = {depth} (nats)"
        claim = ("gains", "above 0") if depth == max(gains) else (None, "")
        yield gain.judged(name, *claim)


def draw(data: Data) -> style.Drawn:
    """Figure 5a and b."""
    figure, axes = style.subplots("depth; dotted: powers of the paper", 1, 2, (4.6, 3.4))
    _draw_movement(axes[0][0], data.movement)
    _draw_losses(axes[0][1], data.losses)
    yield "figure_5_depth", figure


def _draw_movement(axis, movement: pd.DataFrame) -> None:
    for alpha, rows in movement.groupby(ALPHA_L):
        color = ALPHA_LOOKS.get(alpha, {}).get("color", "gray")
        for (column, label), marker in zip(MOVED.items(), "os", strict=True):
            look = {"marker": marker, "ms": 4, "ls": STYLES.get(alpha, "-")}
            name = f"{label}, {scans.alpha_title(alpha, 'L')}"
            scans.mean_line(axis, rows, LAYERS, column, color, name, **look)
        middle = rows.groupby(LAYERS)[list(MOVED)].mean().mean(axis=1)
        power = "L^{%g}" % (alpha - 1) if alpha != 1 else r"\mathrm{constant}"
        scans.guide(axis, middle, alpha - 1, f"${power}$", 1.0, color="0.45")
    scans.size_axis(axis, movement[LAYERS], "depth $L$ (blocks)")
    scans.label_decades(axis)
    axis.set_ylabel(r"$\|W - W_0\| \, / \, \|W_0\|$")
    axis.set_title(f"(a) query and key weights, step {movement[STEP].max():.0f}", fontsize=9)
    axis.legend(fontsize=6, ncols=2)


def _draw_losses(axis, losses: pd.DataFrame) -> None:
    colors = style.width_colors(sorted(losses[LAYERS].unique()))
    for (depth, alpha), rows in losses.groupby([LAYERS, ALPHA_L]):
        losses_at = rows.groupby(FLOPS)[EVAL_LOSS]
        means, errors = losses_at.mean(), losses_at.sem().fillna(0)
        axis.plot(means.index, means, STYLES.get(alpha, "-"), color=colors[depth], lw=1.2)
        band = {"color": colors[depth], "alpha": 0.2, "lw": 0}
        axis.fill_between(means.index, means - errors, means + errors, **band)
    entries = [(f"$L = {depth:.0f}$", {"color": color}) for depth, color in colors.items()]
    for alpha in sorted(losses[ALPHA_L].unique()):
        label = scans.alpha_title(alpha, "L")
        entries.append((label, {"ls": STYLES.get(alpha, "-"), "color": "gray"}))
    axis.axhline(CHANCE, **scans.CHANCE_LOOK)
    entries.append(("chance, ln 10", scans.CHANCE_LOOK))
    axis.set_xscale("log")
    axis.set_xlabel("training compute (FLOPs)")
    axis.set_ylabel("evaluation loss (nats/image)")
    axis.set_title("(b) loss against compute", fontsize=9)
    axis.legend(handles=style.handles(entries), fontsize=6, ncols=2)
