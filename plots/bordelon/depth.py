"""Depth L for alpha_L = 1/2 and 1 (Bordelon et al., Figure 5): weights that move, loss per FLOP.

    python -m plots bordelon/depth [OBSERVATIONS RESULTS METRICS]

Tables of a sweep over model.layers such as vit_cifar5m/sweeps/figure_5.yaml. (a) ||W - W_0|| /
||W_0|| of query and key weights at the last observed step, pooled over blocks, against L, expected
to go as L^(alpha_L - 1), like the change of attention logits that they cause. (b) evaluation loss
against training FLOPs, 6 per parameter and token. Of several eta_0 both show one per alpha_L, as
movement compares depths at equal eta_0: of those with the most finished runs that whose runs end
with the lowest loss, on the seeds that are shown. Where there are several, final losses stand
beside each other at the best eta_0 of every depth, too. Exponents are unweighted fits to means over
seeds, their errors jackknife ones over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import rates, style, tables
from plots.bordelon import scans
from plots.bordelon.published import FLOPS_PER_PARAMETER
from plots.bordelon.scans import ALPHA_LOOKS, CHANCE, LAYERS
from plots.bordelon.scans import EVAL_LOSS as LOSS
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.statistics import complete, exponent, jackknife
from plots.tables import RATE, TableError

TABLES = ("bordelon/figure_5_observations", "bordelon/figure_5", "bordelon/figure_5_metrics")
ALPHA_L = "prescription.alpha_depth"
PATCH, IMAGE, BATCH = "model.patch_size", 32, "training.batch_size"
MOVED = {"query_weight_relative": r"$W_Q$", "key_weight_relative": r"$W_K$"}
# What that movement makes of the attention logits, (16); not drawn.
INDUCED = {"attention_change_weights": "A by W_Q, W_K"}
COLUMNS = {
    "observations.csv": (LAYERS, ALPHA_L, "seed", "run", "step", "block", *MOVED, *INDUCED),
    "results.csv": (LAYERS, ALPHA_L, RATE, PATCH, BATCH, "seed", "run", "status", "parameters"),
    "metrics.csv": ("run", "step", "eval_loss"),
}
FLOPS = "flops"
STYLES = {0.5: "-", 1.0: "--"}  # as in the paper: alpha_L = 1 is dashed
Data = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]


def read(paths: Sequence[Path]) -> Data:
    """(movement, losses, tried): a row per run at the last observed step, a row per run and
    evaluation, both at the one eta_0 of each alpha_L that is shown; a row per run at any eta_0.

    Runs that did not finish are left out; among the last, those that diverged have an infinite
    loss. TableError unless there are three tables of one sweep.
    """
    observations, results, metrics = tables.read_each(paths, COLUMNS)
    finished = results[results["status"] == "finished"]
    if finished.empty:
        raise TableError(f"{paths[1]}: no finished run in it; finish the sweep first")
    last = metrics.dropna(subset=[LOSS]).sort_values("step").groupby("run")[LOSS].last()
    finished = finished.assign(last=finished["run"].map(last))
    diverged = results[results["status"] == "diverged"].assign(last=math.inf)
    tried = pd.concat([finished, diverged]).dropna(subset=["last"])
    finished = _best_rates(finished)
    movement = _movement(observations, finished, paths[0])
    return movement, _losses(metrics, finished, paths[2]), tried


def _best_rates(finished: pd.DataFrame) -> pd.DataFrame:
    """The runs of one rate per alpha_L: that of the most finished runs, over depths and seeds, then
    of the lowest mean of their last losses, then the lower one."""
    ranked = finished.groupby([ALPHA_L, RATE]).agg(runs=("run", "count"), loss=("last", "mean"))
    ranked = ranked.reset_index()
    ranked = ranked.sort_values(["runs", "loss", RATE], ascending=[False, True, True])
    best = ranked.drop_duplicates(ALPHA_L)[[ALPHA_L, RATE]]
    return finished.merge(best, on=[ALPHA_L, RATE])


def _movement(observations: pd.DataFrame, finished: pd.DataFrame, path: Path) -> pd.DataFrame:
    rows = observations[observations["run"].isin(finished["run"])]
    rows = rows[(rows["block"] == "all") & (rows["step"] == rows["step"].max())]
    if rows.empty:
        raise TableError(
            f"{path}: no row with block all of a finished run; are these tables of one sweep?"
        )
    return rows


def _losses(metrics: pd.DataFrame, finished: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Evaluations with the run's sizes and the training FLOPs until then."""
    own = finished.drop(columns=["step", LOSS], errors="ignore")
    rows = metrics[["run", "step", LOSS]].dropna().merge(own, on="run")
    if rows.empty:
        raise TableError(f"{path}: no evaluation of a finished run; are these tables of one sweep?")
    tokens = (IMAGE // rows[PATCH]) ** 2
    cost = FLOPS_PER_PARAMETER * rows["parameters"] * tokens * rows[BATCH]
    return rows.assign(flops=cost * rows["step"])


def alphas(rows: pd.DataFrame) -> list[float]:
    """The depth exponents of a table, rising."""
    return sorted(rows[ALPHA_L].unique())


# Findings


def findings(data: Data) -> list[Printed]:
    """5a by alpha_L and weight, then 5b by depth."""
    movement, losses, tried = data
    result = [_basis(movement, losses), HEADER]
    for alpha in alphas(movement):
        rows = movement[movement[ALPHA_L] == alpha]
        depths = sorted(rows[LAYERS].unique())
        for column, label in (MOVED | INDUCED).items():
            what = label.strip("$")
            name = f"5a: L in the movement of {what}, alpha_L = {scans.alpha_text(alpha)}"
            result.append(exponent(rows, "seed", LAYERS, column).finding(name, alpha - 1))
            if len(depths) > 2:  # the power is one of large L
                name = name.replace("L in", f"L = {depths[-2]:.0f} to {depths[-1]:.0f} in")
                deep = exponent(rows[rows[LAYERS].isin(depths[-2:])], "seed", LAYERS, column)
                result.append(deep.finding(name, alpha - 1))
    return [*result, *_of_losses(losses), *_of_rates(tried)]


def _of_losses(losses: pd.DataFrame) -> list[Finding]:
    """What alpha_L = 1 gains at the same steps, so at the same compute, at every depth.

    The caption claims it at large L. As the exponents have rates of their own, and may differ at
    the least depth already, how the gain grows from there is said, too. There is no verdict while
    the mean of a curve ends above chance.
    """
    last = scans.final(losses)
    if alphas(last) != [0.5, 1.0]:
        return [Finding("5b: loss with alpha_L = 1/2 minus alpha_L = 1", "not measured")]
    depths = sorted(last[LAYERS].unique())
    result = []
    for alpha, rows in last.groupby(ALPHA_L):
        means = rows.groupby(LAYERS)[LOSS].mean()
        values = ", ".join(f"{depth:.0f}: {loss:.3f}" for depth, loss in means.items())
        name = f"5b: final loss by L, alpha_L = {scans.alpha_text(alpha)} (nats)"
        result.append(Finding(name, values))
    for depth in depths:
        both = complete(last[last[LAYERS] == depth], "seed", ALPHA_L)
        found = jackknife(both, "seed", lambda part, depth=depth: _gain(part, depth))
        name = f"5b: final loss, alpha_L = 1/2 minus 1, L = {depth:.0f} (nats)"
        claimed = depth == depths[-1] and len(depths) > 1
        claim = ("above 0", _verdict(found, last)) if claimed else ()
        result.append(Finding(name, found.text(), *claim))
    if len(depths) > 1:  # by how much the gain at the largest depth exceeds that at the least
        low, high = depths[0], depths[-1]
        ends = complete(last[last[LAYERS].isin((low, high))], "seed", ALPHA_L, LAYERS)
        found = jackknife(ends, "seed", lambda part: _gain(part, high) - _gain(part, low))
        name = f"5b: that gain at L = {high:.0f} minus at L = {low:.0f} (nats)"
        result.append(Finding(name, found.text()))
    return result


def _of_rates(tried: pd.DataFrame) -> list[Printed]:
    """The same gain by seed with both alpha_L at their best eta_0 of every depth, where several
    were run; an eta_0 is judged by seeds that did not choose it."""
    if tried.groupby(ALPHA_L)[RATE].nunique().max() < 2 or alphas(tried) != [0.5, 1.0]:
        return []
    kept = [complete(rows, "seed", ALPHA_L, RATE) for _, rows in tried.groupby(LAYERS)]
    tried = pd.concat(kept)  # the seeds that have every eta_0 of a depth
    tried = tried.assign(**{tables.LOSS: tried["last"], tables.WIDTH: tried[LAYERS]})
    found = {
        scans.alpha_text(alpha): rates.rate_sweeps(rows) for alpha, rows in tried.groupby(ALPHA_L)
    }
    result: list[Printed] = []
    for alpha, sweeps in found.items():
        values = ", ".join(
            f"{depth}: {sweep.best.grid_value:g}" + " (first or last)" * sweep.best.at_edge
            for depth, sweep in sweeps.items()
        )
        result.append(Finding(f"5b: best eta_0 by L, alpha_L = {alpha}", values))
    half, one = found.values()
    for depth in sorted(half.keys() & one.keys()):
        gain = rates.difference(half[depth], one[depth])
        name = f"5b: each at its best eta_0, alpha_L = 1/2 minus 1, L = {depth} (nats)"
        claim = ("above 0", gain.claimed_gain()) if depth == tried[LAYERS].max() else ()
        result.append(Finding(name, gain.text(), *claim))
    return [*result, *rates.selection_lines({(alpha,): one for alpha, one in found.items()}, "L")]


def _verdict(found: Estimate, last: pd.DataFrame) -> str:
    """Whether alpha_L = 1 gains, if all curves have learnt something."""
    means = last.groupby([ALPHA_L, LAYERS])[LOSS].mean()
    lost = [(alpha, depth) for (alpha, depth), loss in means.items() if not loss < CHANCE]
    if not lost:
        return found.claimed_gain()
    return "no verdict: above chance, ln 10 = 2.303, " + "; ".join(
        f"alpha_L = {scans.alpha_text(alpha)}, L = "
        + ", ".join(f"{depth:.0f}" for own, depth in lost if own == alpha)
        for alpha in sorted({alpha for alpha, _ in lost})
    )


def _gain(rows: pd.DataFrame, depth: float) -> float:
    means = rows[rows[LAYERS] == depth].groupby(ALPHA_L)[LOSS].mean()
    return means.get(0.5, math.nan) - means.get(1.0, math.nan)


def _basis(movement: pd.DataFrame, losses: pd.DataFrame) -> str:
    """What the findings rest on."""
    seeds = movement.groupby([ALPHA_L, LAYERS])["seed"].nunique()
    depths = ", ".join(f"{depth:.0f}" for depth in sorted(movement[LAYERS].unique()))
    shown = ", ".join(
        f"{rate:g} (alpha_L = {scans.alpha_text(alpha)})"
        for alpha, rate in losses.groupby(ALPHA_L)[RATE].first().items()
    )
    return (
        f"L = {depths}; eta_0 = {shown}; {scans.span(seeds)} seeds; movement after "
        f"{movement['step'].max():.0f} steps, loss after {losses['step'].max():.0f}; ± is "
        "jackknife over seeds"
    )


# Figure


def draw(data: Data) -> Iterator[tuple[str, object]]:
    """Figure 5a and b."""
    movement, losses, _ = data
    figure, axes = style.subplots(1, 2, (4.6, 3.4))
    figure.suptitle(
        "depth\nmeans over seeds, bars: standard error; dotted: powers of the paper; "
        "FLOPs: 6 per parameter and token"
    )
    _draw_movement(axes[0][0], movement)
    _draw_losses(axes[0][1], losses)
    yield "figure_5_depth", figure


def _draw_movement(axis, movement: pd.DataFrame) -> None:
    for alpha in alphas(movement):
        color = ALPHA_LOOKS.get(alpha, {}).get("color", "gray")
        rows = movement[movement[ALPHA_L] == alpha]
        for (column, label), marker in zip(MOVED.items(), "os", strict=True):
            groups = rows.groupby(LAYERS)[column]
            means, errors = groups.mean(), groups.sem().fillna(0)
            axis.errorbar(
                means.index,
                means,
                errors,
                color=color,
                marker=marker,
                ms=4,
                lw=1,
                ls=STYLES.get(alpha, "-"),
                label=rf"{label}, $\alpha_L$ = {scans.alpha_text(alpha)}",
            )
        top = 1.25 * rows.groupby(LAYERS)[list(MOVED)].mean().max(axis=1).iloc[0]
        depths = sorted(rows[LAYERS].unique())
        guide = [top * (depth / depths[0]) ** (alpha - 1) for depth in depths]
        power = "L^{%g}" % (alpha - 1) if alpha != 1 else r"\mathrm{constant}"
        axis.plot(depths, guide, ":", color=color, lw=1.2, label=f"${power}$")
    scans.size_axis(axis, movement[LAYERS], "depth $L$ (blocks)")
    scans.label_decades(axis)
    axis.set_ylabel(r"$\|W - W_0\| \, / \, \|W_0\|$")
    axis.set_title(f"(a) query and key weights, step {movement['step'].max():.0f}", fontsize=9)
    axis.legend(fontsize=6, ncols=2)


def _draw_losses(axis, losses: pd.DataFrame) -> None:
    colors = style.width_colors(sorted(losses[LAYERS].unique()))
    for (depth, alpha), rows in losses.groupby([LAYERS, ALPHA_L]):
        means = rows.groupby(FLOPS)[LOSS].mean()
        axis.plot(means.index, means, STYLES.get(alpha, "-"), color=colors[depth], lw=1.2)
    for depth, color in colors.items():
        axis.plot([], [], color=color, label=f"$L = {depth:.0f}$")
    for alpha in alphas(losses):
        label = rf"$\alpha_L$ = {scans.alpha_text(alpha)}"
        axis.plot([], [], STYLES.get(alpha, "-"), color="gray", label=label)
    axis.axhline(CHANCE, color="black", ls=":", lw=1, label="chance, ln 10")
    axis.set_xscale("log")
    axis.set_xlabel("training compute (FLOPs)")
    axis.set_ylabel("evaluation loss (nats/image)")
    axis.set_title("(b) loss against compute", fontsize=9)
    axis.legend(fontsize=6, ncols=2)
