"""Which rule keeps its best value as a model grows: width, depth, decay, Muon, and embeddings tied
or not; and as batch (B rows, at one number of tokens) or length (T steps of one batch) grow (ours).

    python -m plots everett/transfer [transfer_embedding.csv transfer_depth.csv ...]

Three columns after the metrics that the abstract of Kalra & Barkeshli (2026) names. The optimum
against the size: its power law, and the root mean square distance to that in octaves. What keeping
the base size's best value costs, by the seeds that choose it. What a rule costs beside another one,
both at their best on fresh seeds, at the largest size; then extrapolated along a line in the
logarithm of the size. A run that ends above the lowest loss at which one began has diverged.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from plots import panels, rates, style, tables
from plots.everett.published import TRANSFER, Rule
from plots.findings import HEADER, Estimate, Finding, Report
from plots.naming import AnyOf
from plots.rates import RateSweep, Sweeps, exponent
from plots.statistics import extrapolated
from plots.tables import CURVE, DECAY, LOSS, RATE, STATUS, WIDTH

PAPER = "Ours, after Kalra & Barkeshli (2026)"
AXES = ("embedding", "depth", "decay", "muon", "tied")
AXES = (*AXES, "batch", "horizon", "batch_decay", "horizon_decay")
TABLES = AnyOf(f"everett/transfer_{axis}" for axis in AXES)
LAYERS, START = "model.layers", "first_train_loss"
# What grows in a sweep, by the first word of its curves, where that is not the model.
GROWS = {"batch": ("training.batch_size", "B"), "horizon": ("training.steps", "T")}
FURTHER = 3  # octaves beyond the largest size that penalties are extrapolated to
LEFT_OUT = 0.05  # of the chances of the base's best value, where a size has no run to say its cost
HIGHEST = 0.6  # nats; what costs more is a cross at the top edge


class Axis(NamedTuple):
    """Runs of the table at `place`, and by curve the sweeps over rate or decay (RATE) by what
    grows (WIDTH)."""

    rows: pd.DataFrame
    lines: Mapping[str, Sweeps]
    rules: Sequence[Rule]
    symbol: str
    place: int


def read(paths: tables.Paths) -> dict[str, Axis]:
    """The axes of all tables given."""
    axes: dict[str, Axis] = {}
    read = [_table(path) for path in paths]
    for place, (path, table) in enumerate(zip(paths, read, strict=True)):  # nothing fitted before
        first = "" if table.empty else table[CURVE].iloc[0].partition("_")[0]
        usual = (LAYERS, "L") if LAYERS in table else (WIDTH, "D")
        size, symbol = GROWS.get(first, usual)
        lost = table[LOSS] > table[START].min() if START in table else False
        ended = {STATUS: table[STATUS].mask(lost, "diverged"), LOSS: table[LOSS].mask(lost)}
        table = table.assign(**{WIDTH: table[size]}, **ended).dropna(subset=[WIDTH])
        if DECAY in table and RATE in table and not table.empty:  # at the best rate of each size
            ended = table[table[LOSS] < math.inf].set_index(RATE)
            table = table[table[RATE] == table[WIDTH].map(ended.groupby(WIDTH)[LOSS].idxmin())]
        if DECAY in table:
            table = table.assign(**{RATE: table[DECAY]})
        table = table.dropna(subset=[RATE])
        known = [rule.curve for rules in TRANSFER.values() for rule in rules]
        table = tables.only(table, path, CURVE, known)
        for name, rules in TRANSFER.items():
            rows = table[table[CURVE].isin([rule.curve for rule in rules])]
            lines = rates.curve_sweeps(rows, dict.fromkeys(rows[CURVE]))
            own = [rule for rule in rules if lines.get(rule.curve)]
            axes |= {name: Axis(rows, lines, own, symbol, place)} if own else {}
    return axes


def _table(path: Path) -> pd.DataFrame:
    """A table of decays may have no column of rates: each size has its own, by `adjust`."""
    numbers = (WIDTH, LAYERS, *(key for key, _ in GROWS.values()), RATE, DECAY, START)
    table = tables.read(path, tables.RESULTS, numbers=numbers)
    return table if DECAY in table else tables.read(path, (*tables.RESULTS, RATE), numbers=numbers)


def paid(rule: Rule, sweeps: Sweeps) -> dict[int, Estimate]:
    """Size -> excess over the lowest loss at the value that the rule carries over from the base
    size, interpolated between runs; infinite above the last value that did not diverge. Its error
    holds that of the base's choice, how the excess differs between the values that may be the
    best there. It rests on as many seeds as a value has; one decides nothing."""
    base, result = sweeps[min(sweeps)], {}
    chances = _chances(base)
    for size, sweep in sweeps.items():
        carried = (size / base.width) ** rule.power
        costs = {v: _excess(sweep, v * carried) for v in base.losses}
        choice = _spread([(chances[v], cost) for v, cost in costs.items()])
        apart = math.sqrt(2 / _seeds(sweep)) * sweep.noise  # of two losses of a size
        error = math.hypot(apart, choice) if size > base.width else 0.0
        number = {"value": costs[base.best.grid_value], "error": error, "groups": _seeds(sweep)}
        result[size] = replace(sweep.lowest, **number, fitted=0)
    return result


def _spread(costs: Sequence[tuple[float, float]]) -> float:
    """The standard deviation of (chance, cost) pairs; NaN where too many costs are unknown."""
    known = np.array([pair for pair in costs if pair[0] and math.isfinite(pair[1])]).reshape(-1, 2)
    weights, values = known.T
    if weights.sum() < 1 - LEFT_OUT:
        return math.nan
    return math.sqrt(weights @ (values - weights @ values / weights.sum()) ** 2 / weights.sum())


def _chances(sweep: RateSweep) -> dict[float, float]:
    """Value -> the chance that other seeds would find it best, from the noise of its losses."""
    losses = np.array(list(sweep.losses.values()))
    noise = np.nan_to_num(sweep.noise) / math.sqrt(_seeds(sweep))
    draws = losses + noise * np.random.default_rng(0).normal(size=(4000, len(losses)))
    best = np.bincount(draws.argmin(axis=1), minlength=len(losses)) / len(draws)
    return dict(zip(sweep.losses, best.tolist(), strict=True))


def _excess(sweep: RateSweep, value: float) -> float:
    """The loss at a value above the lowest one, on a line between the runs beside it."""
    ended = {v: loss for v, loss in sweep.losses.items() if math.isfinite(loss)}
    beyond = math.inf if len(ended) < len(sweep.losses) else math.nan
    at, losses = np.log2(list(ended)), list(ended.values())
    return float(np.interp(math.log2(value), at, losses, math.nan, beyond)) - min(losses)


def _seeds(sweep: RateSweep) -> int:
    return min(map(len, sweep.chosen_from.values()))


def findings(axes: Mapping[str, Axis]) -> Report:
    """The three columns for every rule, then what they rest on."""
    yield HEADER
    for name, axis in axes.items():
        for rule in axis.rules:
            yield from _of_rule(f"{name}: {rule.label}", rule, axis)
    for name, axis in axes.items():
        lines = {(curve,): sweeps for curve, sweeps in axis.lines.items()}
        basis = rates.basis(axis.rows, lines, [CURVE], axis.symbol)
        yield from (f"{name}: {line}" for line in basis)


def _of_rule(name: str, rule: Rule, axis: Axis) -> Report:
    sweeps, symbol, words = axis.lines[rule.curve], axis.symbol, f"{rule.power:g} ({rule.paper})"
    fit, costs = exponent(sweeps), paid(rule, sweeps)
    known = [math.log2(s.best.value / fit(n)) for n, s in sweeps.items() if n not in fit.edge]
    apart = f", {np.sqrt(np.mean(np.square(known))):.2f} octaves off it" if len(known) > 2 else ""
    claim = (words, fit.distance(rule.power)) if rule.paper else ("no claim", "")
    text = fit.text().replace("width", "size") + apart
    yield Finding(f"{name}: exponent of {symbol} in the best value", text, *claim, fit)
    size, cost = max(costs.items())
    cost, far, verdict = replace(cost, by_size=costs), cost.text(), cost.claimed_equal()
    if cost.value == math.inf:
        far, verdict = "diverged", "disagrees"
    claim = ("about 0", verdict) if rule.paper else ("no claim", "")
    yield Finding(f"{name}: paid for the base's value", f"{far} at {symbol} = {size}", *claim, cost)
    if axis.lines.get(rule.against):
        gains = rates.gains(sweeps, axis.lines[rule.against])
        end, last = extrapolated(gains, FURTHER), max(gains)
        cost = replace(gains[last], by_size=gains)
        text = f"{cost.text()} at {symbol} = {last}, a line has {end.text()} at {last * 2**FURTHER}"
        claim = {"above 0": "gains", "about 0": "equal"}.get(rule.claim)
        name = f"{name}: penalty beside {_other(axis, rule)}"
        yield cost.judged(name, claim, rule.claim, text=text)


def _other(axis: Axis, rule: Rule) -> str:
    """The label of the rule that one is compared with."""
    return next(one.label for one in axis.rules if one.curve == rule.against)


def draw(axes: Mapping[str, Axis]) -> style.Drawn:
    """A figure per axis, a panel per column; of rules that share a curve, dotted lines."""
    for name, axis in axes.items():
        beside = {_other(axis, rule) for rule in axis.rules if axis.lines.get(rule.against)}
        title = f"{name}: which rule keeps its best value"
        figure, grid = style.subplots(title, 1, 2 + bool(beside), (3.3, 3.0))
        for place, rule in enumerate(axis.rules):
            _draw_rule(grid[0], axis, rule, place)
        for panel in grid[0][1:]:
            panel.axhline(0, color="0.6", lw=0.8)
            panel.set_xscale("log", base=2)
        value = "decay per step" if "decay" in name else "learning rate"
        titles = f"best {value}", "paid for the base's value", f"beside {', '.join(sorted(beside))}"
        style.label_grid(grid, titles, axis.symbol)
        for panel, label in zip(grid[0], (value, "nats", "nats"), strict=False):
            panel.set_ylabel(label)
        style.octave_limits(grid[0], sorted({int(n) for n in axis.rows[WIDTH]}))
        entries = [(rule.label, _look(place)) for place, rule in enumerate(axis.rules)]
        costs = (cost for rule in axis.rules for cost in _columns(axis, rule))
        unknown = any(v.value <= HIGHEST and v.bar is None for cost in costs for v in cost.values())
        style.legend(figure, [*entries, *[("its error is unknown", style.HOLLOW)] * unknown])
        yield f"transfer_{re.sub('[^a-z0-9]+', '_', name.lower())}", figure, [axis.place]


def _columns(axis: Axis, rule: Rule) -> tuple[Mapping[int, Estimate], Mapping[int, Estimate]]:
    """What keeping the base's value costs, and the penalty beside another rule, by size."""
    sweeps = axis.lines[rule.curve]
    return paid(rule, sweeps), rates.gains(sweeps, axis.lines.get(rule.against, {}))


def _look(place: int) -> dict:
    return {"color": style.PALETTE[place], "marker": style.SHAPES[place], "ms": 4}


def _draw_rule(panels_, axis: Axis, rule: Rule, place: int) -> None:
    """The optima, what is paid and the penalty; hollow where its error is unknown."""
    first, *others = panels_
    sweeps, shift, look = axis.lines[rule.curve], 1.04 ** (place - 1), _look(place)
    shape = {key: look[key] for key in ("color", "marker")}
    if len(axis.lines) == len(axis.rules):
        panels.draw_optima(first, sweeps, exponent(sweeps), shift, **shape)
    else:
        sizes = np.array(sorted(sweeps), float)
        line = sweeps[min(sweeps)].best.value * (sizes / sizes[0]) ** rule.power
        first.plot(sizes, line, ls=":", color=look["color"])
        panels.draw_optima(first, sweeps, exponent(sweeps), color="black", marker="o")
    for panel, costs in zip(others, _columns(axis, rule), strict=False):
        shown = {n: one for n, one in costs.items() if one.value <= HIGHEST}
        bars = [one.bar or 0.0 for one in shown.values()]
        at, values = [n * shift for n in shown], [one.value for one in shown.values()]
        panel.errorbar(at, values, bars, capsize=2, **look)
        for size in (n for n, one in shown.items() if one.bar is None):
            panel.plot(size * shift, shown[size].value, **look, mfc="white", zorder=3)
        edge = {"transform": panel.get_xaxis_transform(), "clip_on": False}
        for size in (n for n, one in costs.items() if one.value > HIGHEST):
            panel.plot(size * shift, 1.0, color=look["color"], **style.LOST, **edge)
