"""Adafactor against Adam with parameter scaling (Everett et al., Appendix G, Figure 10).

    python -m plots everett/adafactor [results.csv]

Loss of the best rate against size: one global learning rate; full alignment with tuned constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Finding, Printed, claimed_equal
from plots.rates import (
    RateSweep,
    curve_sweeps,
    draw_best,
    edge_lines,
    gain,
    gain_text,
    lost_lines,
    noise_lines,
)
from plots.tables import CURVE, PARAMETERIZATION

TABLES = ("everett/figure_10_adafactor",)
FIGURE = "figure_10_adafactor"
FAMILIES = {"adafactor": "Adafactor", "param_scaling": "Adam + parameter scaling"}
SETTINGS = {"global": "one global rate", "full_constants": "full alignment + constants"}
LOOKS = {"adafactor": {"ls": "-"}, "param_scaling": {"ls": "--", "mfc": "white"}}
COLUMNS = (
    *tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, tables.WIDTH, tables.RATE
)
Lines = dict[tuple[str, str, str], dict[int, RateSweep]]


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The table of Figure 10."""
    tables.expect(paths, "results.csv")
    path = paths[0]
    known = [f"{family}_{setting}" for family in FAMILIES for setting in SETTINGS]
    table = tables.only(tables.read(path, COLUMNS), path, CURVE, known)
    return tables.only(table, path, PARAMETERIZATION, style.LABELS)


def lines(table: pd.DataFrame) -> Lines:
    """(family, setting, parameterisation) -> sweeps by width, of what has a finished run."""
    keys = {f"{family}_{setting}": (family, setting) for family in FAMILIES for setting in SETTINGS}
    return {
        (*keys[curve], rule): sweeps
        for rule in style.LABELS
        for curve, sweeps in curve_sweeps(table[table[PARAMETERIZATION] == rule], keys).items()
    }


def findings(table: pd.DataFrame) -> list[Printed]:
    """What Adafactor loses against Adam + parameter scaling, and whether that grows with size."""
    return [
        "difference in nats ± its error from seeds, at the largest width",
        HEADER,
        *_differences(lines(table)),
        *edge_lines(lines(table)),
        *lost_lines(table, [CURVE, PARAMETERIZATION]),
        *noise_lines(table),
    ]


def _differences(found: Lines) -> list[Finding]:
    result = []
    for setting in SETTINGS:
        for rule in style.LABELS:
            pair = [found.get((family, setting, rule), {}) for family in FAMILIES]
            width, change, error = gain(*pair)
            small, earlier, other = gain(*pair, last=False)
            name = f"Adafactor - Adam + PS: {style.LABELS[rule]}, {SETTINGS[setting]}"
            if width is None:
                result.append(Finding(name, "not measured", "minor", "not measured"))
                continue
            share = abs(change) / _span(found, setting, width)
            known = math.isfinite(share)
            word = f"{share:.0%} of the span of parameterisations" if known else "span unknown"
            if small != width:
                same = claimed_equal(change - earlier, (error**2 + other**2) ** 0.5)
                word += f"; same scaling: {same}"
            result.append(Finding(name, gain_text(*pair), "minor", word))
    return result


def _span(found: Lines, setting: str, width: int) -> float:
    """Highest minus lowest loss over parameterisations, for a measure of what is minor; NaN for
    fewer than two."""
    losses = [
        sweeps[width].loss
        for (family, other, _), sweeps in found.items()
        if (family, other) == ("param_scaling", setting) and width in sweeps
    ]
    return max(losses) - min(losses) if len(set(losses)) > 1 else math.nan


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Figure 10: a panel per setting."""
    found = lines(table)
    figure, axes = style.subplots(1, len(SETTINGS), (4.0, 3.0), sharey=True)
    for axis, (setting, title) in zip(axes[0], SETTINGS.items()):
        for (family, other, rule), sweeps in found.items():
            if other == setting:
                look = {"color": style.color(rule), "marker": style.MARKERS[rule]}
                draw_best(axis, sweeps, **look, **LOOKS[family])
        axis.set_title(title)
        axis.set_xlabel("parameters")
    axes[0, 0].set_ylabel(style.LOSS_LABEL)
    entries = [(label, {"color": "black", **LOOKS[family]}) for family, label in FAMILIES.items()]
    style.legend(figure, [*style.parameterization_entries(), *entries], ncols=3)
    yield FIGURE, figure
