"""Runs with and without independent weight decay (Everett et al., Appendix F, Figure 9).

    python -m plots everett/weight_decay [with_decay.csv without_decay.csv]

Reads the table of Figure 9 and, for the runs without decay, that of Figure 12. A column per
parameterisation; loss against rate with decay for both horizons; best loss against size with and
without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import panels, rates, style, tables
from plots.everett import horizons
from plots.everett.horizons import HORIZON_STYLES, HORIZONS
from plots.findings import HEADER, Finding, Printed
from plots.tables import CURVE, DECAY, OPTIMIZER, PARAMETERIZATION, WIDTH, TableError

TABLES = ("everett/figure_9_weight_decay", "everett/figure_12_adam")
FIGURE = "figure_9_weight_decay"
CURVES = {f"decay_{horizon}": horizon for horizon in HORIZONS}
PLAIN = (*horizons.COLUMNS, tables.PARAMETERS)
DECAYED = (*PLAIN, PARAMETERIZATION)


def read(paths: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(with decay, without decay), told apart by their curves; TableError where the second has
    none without, or they are of two optimisers."""
    tables.expect(paths, "results.csv (with decay)", "results.csv (without)")
    if not tables.read(paths[0], [CURVE])[CURVE].isin(CURVES).any():
        paths = paths[::-1]
    decayed = tables.read(paths[0], DECAYED)
    tables.only(decayed, paths[0], CURVE, CURVES)
    own = ~decayed[CURVE].isin(CURVES)  # columns of their own
    decayed.loc[own, PARAMETERIZATION] = decayed[CURVE] + ", " + decayed[PARAMETERIZATION]
    grows = decayed[tables.HORIZON] != "fixed" if tables.HORIZON in decayed else False
    decayed.loc[own, CURVE] = "decay_fixed"
    decayed.loc[own & grows, CURVE] = "decay_compute_optimal"
    plain = tables.read(paths[1], PLAIN)
    plain = plain[~plain[CURVE].isin(CURVES)]
    if plain.empty:
        raise TableError(
            f"{paths[1]}: every run in it has decay; expected those without, as "
            "results.csv of figure_12_adam.yaml has them"
        )
    names = [
        sorted(set(table[OPTIMIZER].dropna())) if OPTIMIZER in table else []
        for table in (decayed, plain)
    ]
    if all(names) and not set.intersection(*map(set, names)):
        raise TableError(
            f"{paths[1]}: runs of {', '.join(names[1])}; expected "
            f"{', '.join(names[0])}, as in {paths[0]}"
        )
    return decayed, horizons.by_rule(plain)


def lines(table: pd.DataFrame) -> rates.Lines:
    """(parameterisation, horizon) -> sweeps by width of the runs with decay."""
    found = rates.lines_of(table, {PARAMETERIZATION: style.LABELS}, CURVES)
    return {(rule, CURVES[curve]): sweeps for (rule, curve), sweeps in found.items()}


def findings(data: tuple[pd.DataFrame, pd.DataFrame]) -> list[Printed]:
    """The exponents with and without decay, and what decay changes at the largest width."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    rules = style.present(style.LABELS, decayed[PARAMETERIZATION])
    exponents, gains = [], []
    for horizon, words in horizons.horizon_labels(decayed).items():
        for rule, label in rules.items():
            pair = [found.get((rule, horizon), {}) for found in (without, with_decay)]
            old, new = map(rates.exponent, pair)
            change = new - old
            note = f" ({new.value:+.2f}, {old.value:+.2f})" if new.law and old.law else ""
            exponents.append(
                Finding(
                    f"exponent with decay - without: {label}, {words}",
                    change.through_widths() + note,
                    "similar",
                    change.claimed_equal(),
                    change,
                )
            )
            name = f"gain in loss from decay: {label}, {words}"
            gains.append(rates.compared(name, *pair, "gains", "slight gain"))
    text = [
        horizons.EXPONENT_NOTE,
        HEADER,
        *exponents,
        *gains,
        *rates.edge_lines(with_decay),
        *("without decay, " + line for line in rates.edge_lines(without)),
        *rates.lost_lines(decayed, [CURVE, PARAMETERIZATION]),
        *rates.selection_lines(
            {**with_decay, **{(*key, "without decay"): sweeps for key, sweeps in without.items()}}
        ),
    ]
    for rule, label in rules.items():
        for table, what in ((decayed, "with"), (plain, "without")):
            own = table[table[PARAMETERIZATION] == rule]
            text.append(rates.noise_line(own, f"{label}, {what} decay"))
    return text


def draw(data: tuple[pd.DataFrame, pd.DataFrame]) -> Iterator[tuple[str, object]]:
    """Figure 9."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    labels, shown = horizons.horizon_labels(decayed), horizons.drawn_horizons(with_decay)
    rules = style.present(style.LABELS, decayed[PARAMETERIZATION])
    figure, axes = style.subplots(len(shown) + 1, len(rules), (2.5, 2.3))
    colors = style.width_colors(sorted(map(int, decayed[WIDTH].unique())))
    horizons.draw_rows(axes[:-1], with_decay, rules, labels, colors)
    looks = style.looks(list(rules))
    panels.size_panels(
        axes[-1],
        (
            [
                (
                    found[rule, horizon],
                    {
                        "color": color,
                        "marker": HORIZON_STYLES[horizon][0],
                        "ls": HORIZON_STYLES[horizon][1],
                        "mfc": face,
                    },
                )
                for horizon in shown
                for found, color, face in (
                    (with_decay, looks[rule]["color"], looks[rule]["color"]),
                    (without, "gray", "white"),
                )
                if (rule, horizon) in found
            ]
            for rule in rules
        ),
    )
    for axis in axes[-1, 1:]:
        axis.sharey(axes[-1, 0])
        axis.tick_params(labelleft=False)
    axes[-1, 0].autoscale(axis="y")  # over all panels; sharey takes the first one's range
    axes[-1, 0].set_ylabel(f"best rate's\n{style.LOSS_LABEL}")
    entries = style.width_entries(colors)
    for horizon in shown:
        marker, line = HORIZON_STYLES[horizon]
        entries.append((labels[horizon], {"color": "0.3", "marker": marker, "ls": line, "ms": 4}))
    entries.append(("without decay", {"color": "gray", "marker": "o", "mfc": "white", "ms": 4}))
    entries += style.STAR_ENTRIES
    style.legend(figure, entries, ncols=min(len(entries), 5))
    values = sorted(decayed[DECAY].dropna().unique()) if DECAY in decayed else []
    per_step = f" of {', '.join(f'{value:g}' for value in values)} per step" if values else ""
    title = f"Adam, one global learning rate, independent weight decay{per_step}"
    figure.suptitle(f"{title}\n{panels.RATE_NOTE}; last row: {panels.BEST_NOTE}")
    yield FIGURE, figure
