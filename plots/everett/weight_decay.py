"""Runs with and without independent weight decay (Everett et al., Appendix F, Figure 9).

    python -m plots everett/weight_decay [with_decay.csv without_decay.csv]

Reads the table of Figure 9 and, for the runs without decay, that of Figure 12. A column per
parameterisation; loss against rate with decay for both horizons; best loss against size with and
without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.everett import horizons
from plots.everett.horizons import EXPONENT_NOTE, HORIZON_STYLES, HORIZONS, Lines, horizon_labels
from plots.findings import HEADER, Finding, Printed, claimed_equal, claimed_gain, number
from plots.rates import (
    curve_sweeps,
    draw_best,
    draw_rates,
    edge_lines,
    exponent,
    gain,
    loss_limits,
    lost_lines,
    noise_line,
    pair_rows,
)
from plots.tables import CURVE, DECAY, PARAMETERIZATION, WIDTH

TABLES = ("everett/figure_9_weight_decay", "everett/figure_12_adam")
FIGURE = "figure_9_weight_decay"
CURVES = {f"decay_{horizon}": horizon for horizon in HORIZONS}
COLUMNS = (
    *tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, WIDTH, tables.RATE
)


def read(paths: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(with decay, without decay), told apart by their curves."""
    tables.expect(paths, "results.csv (with decay)", "results.csv (without)")
    if tables.read(paths[0], [CURVE])[CURVE].isin(horizons.curves()).any():
        paths = paths[::-1]
    decayed = tables.read(paths[0], COLUMNS)
    plain = tables.read(paths[1], [*horizons.COLUMNS, tables.PARAMETERS])
    decayed = tables.only(decayed, paths[0], CURVE, CURVES)
    decayed = tables.only(decayed, paths[0], PARAMETERIZATION, style.LABELS)
    return decayed, tables.only(plain, paths[1], CURVE, horizons.curves())


def lines(table: pd.DataFrame) -> Lines:
    """(parameterisation, horizon) -> sweeps by width of the runs with decay."""
    return {
        (rule, CURVES[curve]): sweeps
        for rule in style.LABELS
        for curve, sweeps in curve_sweeps(table[table[PARAMETERIZATION] == rule], CURVES).items()
    }


def findings(data: tuple[pd.DataFrame, pd.DataFrame]) -> list[Printed]:
    """The exponents with and without decay, and what decay changes at the largest width."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    labels = horizon_labels(decayed)
    keys = [(rule, horizon, labels[horizon]) for horizon in HORIZONS for rule in style.LABELS]
    text = [
        EXPONENT_NOTE,
        HEADER,
        *(_exponents(with_decay, without, *key) for key in keys),
        *(_gain(with_decay, without, *key) for key in keys),
        *edge_lines(with_decay),
        *("without decay, " + line for line in edge_lines(without)),
        *lost_lines(decayed, [CURVE, PARAMETERIZATION]),
    ]
    for rule, label in style.LABELS.items():
        own = plain[plain[CURVE].isin([f"{rule}_{horizon}" for horizon in HORIZONS])]
        text.append(noise_line(decayed[decayed[PARAMETERIZATION] == rule], f"{label}, with decay"))
        text.append(noise_line(own, f"{label}, without decay"))
    return text


def _exponents(
    with_decay: Lines, without: Lines, rule: str, horizon: str, label: str
) -> Finding:
    fit, plain = (exponent(table.get((rule, horizon), {})) for table in (with_decay, without))
    name = f"exponent with decay - without: {style.LABELS[rule]}, {label}"
    change, error = fit.value - plain.value, float(np.hypot(fit.error, plain.error))
    note = f" ({fit.value:+.2f}, {plain.value:+.2f})" if fit.law and plain.law else ""
    word = claimed_equal(change, error)
    return Finding(name, number(change, error, 2) + note, "similar", word)


def _gain(with_decay: Lines, without: Lines, rule: str, horizon: str, label: str) -> Finding:
    sweeps = (table.get((rule, horizon), {}) for table in (without, with_decay))
    width, change, error = gain(*sweeps)
    name = f"gain in loss from decay: {style.LABELS[rule]}, {label}"
    at = "" if width is None else f" at D = {width}"
    return Finding(name, number(change, error) + at, "slight gain", claimed_gain(change, error))


def draw(data: tuple[pd.DataFrame, pd.DataFrame]) -> Iterator[tuple[str, object]]:
    """Figure 9."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    labels = horizon_labels(decayed)
    figure, axes = style.subplots(3, len(style.LABELS), (2.5, 2.3))
    pair_rows(axes, style.LABELS.values())
    colors = style.width_colors(sorted(map(int, decayed[WIDTH].unique())))
    for row, horizon in zip(axes, HORIZONS):
        drawn = [with_decay.get((rule, horizon), {}) for rule in style.LABELS]
        for axis, sweeps in zip(row, drawn):
            draw_rates(axis, sweeps, colors)
        loss_limits(row, drawn)
        row[0].set_ylabel(f"{labels[horizon]}\n{style.LOSS_LABEL}")
    for axis, rule in zip(axes[2], style.LABELS):
        _draw_best(axis, with_decay, without, rule)
        axis.sharey(axes[2, 0])
        axis.set_xlabel("parameters")
    for axis in axes[:, 1:].flat:
        axis.tick_params(labelleft=False)
    axes[2, 0].set_ylabel(f"best rate\n{style.LOSS_LABEL}")
    _legend(figure, colors, labels)
    title = "Adam, one global learning rate, independent weight decay"
    figure.suptitle(title + _decay(decayed), fontsize=11)
    yield FIGURE, figure


def _draw_best(axis, with_decay: Lines, without: Lines, rule: str) -> None:
    for horizon, (marker, line) in HORIZON_STYLES.items():
        look = {"color": style.color(rule), "marker": marker, "ls": line}
        if (rule, horizon) in with_decay:
            draw_best(axis, with_decay[rule, horizon], **look)
        if (rule, horizon) in without:
            draw_best(axis, without[rule, horizon], **{**look, "color": "gray", "mfc": "white"})


def _decay(table: pd.DataFrame) -> str:
    """The decay per step, where the table says it."""
    values = sorted(table[DECAY].dropna().unique()) if DECAY in table else []
    return f" of {', '.join(f'{value:g}' for value in values)} per step" if values else ""


def _legend(figure, colors: Mapping[int, tuple], labels: Mapping[str, str]) -> None:
    entries = style.width_entries(colors)
    for horizon, (marker, line) in HORIZON_STYLES.items():
        look = {"color": "black", "marker": marker, "ls": line, "ms": 4}
        entries.append((labels[horizon], look))
    entries.append(("without decay", {"color": "gray", "marker": "o", "mfc": "white", "ms": 4}))
    entries += style.STAR_ENTRIES
    style.legend(figure, entries, ncols=min(len(entries), 5))
