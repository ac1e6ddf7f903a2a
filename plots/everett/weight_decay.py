"""Runs with and without independent weight decay (Everett et al., Appendix F, Figure 9).

    python -m plots everett/weight_decay [with_decay.csv without_decay.csv]

Reads the table of Figure 9 and, for the runs without decay, that of Figure 12. A column per
parameterisation; loss against rate with decay for both horizons; best loss against size with and
without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.everett import horizons
from plots.everett.horizons import (
    EXPONENT_NOTE,
    HORIZON_STYLES,
    HORIZONS,
    Lines,
    draw_rows,
    drawn_horizons,
    horizon_labels,
)
from plots.findings import HEADER, Finding, Printed, claimed_equal, number
from plots.rates import (
    BEST_NOTE,
    RATE_NOTE,
    compared,
    edge_lines,
    exponent,
    lines_of,
    lost_lines,
    noise_line,
    size_panels,
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
    if not tables.read(paths[0], [CURVE])[CURVE].isin(CURVES).any():
        paths = paths[::-1]
    decayed = tables.read(paths[0], COLUMNS)
    tables.only(decayed, paths[0], CURVE, CURVES)
    own = ~decayed[CURVE].isin(CURVES)  # columns of their own
    decayed.loc[own, PARAMETERIZATION] = decayed[CURVE] + ", " + decayed[PARAMETERIZATION]
    grows = decayed[tables.HORIZON] != "fixed" if tables.HORIZON in decayed else False
    decayed.loc[own, CURVE] = "decay_fixed"
    decayed.loc[own & grows, CURVE] = "decay_compute_optimal"
    plain = tables.read(paths[1], [*horizons.COLUMNS, tables.PARAMETERS])
    return decayed, horizons.by_rule(plain)


def lines(table: pd.DataFrame) -> Lines:
    """(parameterisation, horizon) -> sweeps by width of the runs with decay."""
    found = lines_of(table, {PARAMETERIZATION: style.LABELS}, CURVES)
    return {(rule, CURVES[curve]): sweeps for (rule, curve), sweeps in found.items()}


def findings(data: tuple[pd.DataFrame, pd.DataFrame]) -> list[Printed]:
    """The exponents with and without decay, and what decay changes at the largest width."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    labels = horizon_labels(decayed)
    rules = style.present(style.LABELS, decayed[PARAMETERIZATION])
    keys = [(rule, horizon, labels[horizon]) for horizon in HORIZONS for rule in rules]
    text = [
        EXPONENT_NOTE,
        HEADER,
        *(_exponents(with_decay, without, *key) for key in keys),
        *(_gain(with_decay, without, *key) for key in keys),
        *edge_lines(with_decay),
        *("without decay, " + line for line in edge_lines(without)),
        *lost_lines(decayed, [CURVE, PARAMETERIZATION]),
    ]
    for rule, label in rules.items():
        own = plain[plain[PARAMETERIZATION] == rule]
        text.append(noise_line(decayed[decayed[PARAMETERIZATION] == rule], f"{label}, with decay"))
        text.append(noise_line(own, f"{label}, without decay"))
    return text


def _exponents(
    with_decay: Lines, without: Lines, rule: str, horizon: str, label: str
) -> Finding:
    fit, plain = (exponent(table.get((rule, horizon), {})) for table in (with_decay, without))
    name = f"exponent with decay - without: {style.LABELS.get(rule, rule)}, {label}"
    change, error = fit.value - plain.value, float(np.hypot(fit.error, plain.error))
    note = f" ({fit.value:+.2f}, {plain.value:+.2f})" if fit.law and plain.law else ""
    word = claimed_equal(change, error)
    return Finding(name, number(change, error, 2) + note, "similar", word)


def _gain(with_decay: Lines, without: Lines, rule: str, horizon: str, label: str) -> Finding:
    pair = [table.get((rule, horizon), {}) for table in (without, with_decay)]
    name = f"gain in loss from decay: {style.LABELS.get(rule, rule)}, {label}"
    return compared(name, *pair, "gains", "slight gain")


def draw(data: tuple[pd.DataFrame, pd.DataFrame]) -> Iterator[tuple[str, object]]:
    """Figure 9."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    labels, shown = horizon_labels(decayed), drawn_horizons(with_decay)
    rules = style.present(style.LABELS, decayed[PARAMETERIZATION])
    figure, axes = style.subplots(len(shown) + 1, len(rules), (2.5, 2.3))
    colors = style.width_colors(sorted(map(int, decayed[WIDTH].unique())))
    draw_rows(axes[:-1], with_decay, rules, labels, colors)
    looks = style.looks(list(rules))
    size_panels(axes[-1], (
        [
            (found[rule, horizon], {"color": color, "marker": HORIZON_STYLES[horizon][0],
                                    "ls": HORIZON_STYLES[horizon][1], "mfc": face})
            for horizon in shown
            for found, color, face in ((with_decay, looks[rule]["color"], looks[rule]["color"]),
                                       (without, "gray", "white"))
            if (rule, horizon) in found
        ]
        for rule in rules
    ))
    for axis in axes[-1, 1:]:
        axis.sharey(axes[-1, 0])
        axis.tick_params(labelleft=False)
    axes[-1, 0].set_ylabel(f"best rate's\n{style.LOSS_LABEL}")
    entries = style.width_entries(colors)
    for horizon in shown:
        marker, line = HORIZON_STYLES[horizon]
        entries.append((labels[horizon], {"color": "0.3", "marker": marker, "ls": line, "ms": 4}))
    entries.append(("without decay", {"color": "gray", "marker": "o", "mfc": "white", "ms": 4}))
    entries += style.STAR_ENTRIES
    style.legend(figure, entries, ncols=min(len(entries), 5))
    title = "Adam, one global learning rate, independent weight decay"
    figure.suptitle(f"{title}{_decay(decayed)}\n{RATE_NOTE}; last row: {BEST_NOTE}")
    yield FIGURE, figure


def _decay(table: pd.DataFrame) -> str:
    """The decay per step, where the table says it."""
    values = sorted(table[DECAY].dropna().unique()) if DECAY in table else []
    return f" of {', '.join(f'{value:g}' for value in values)} per step" if values else ""
