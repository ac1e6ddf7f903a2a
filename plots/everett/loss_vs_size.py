"""Eval loss against size under four interventions (Everett et al., Figures 2 and 3).

    python -m plots everett/loss_vs_size [results.csv ...]

One row per optimiser of a table: one global learning rate; per-layer exponents under full
alignment; these with tuned constants; exponents under no alignment with tuned constants. Every
point is the lowest loss of a learning-rate sweep. One figure per table, which has its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.everett.published import BEST, INTERVENTIONS
from plots.findings import HEADER, Finding, Printed
from plots.rates import (
    BEST_NOTE,
    RateSweep,
    compared,
    edge_lines,
    law_text,
    lines_of,
    loss_law,
    lost_lines,
    noise_lines,
    size_panels,
)
from plots.tables import CURVE, OPTIMIZER, PARAMETERIZATION, TableError

TABLES = ("everett/figure_2_adam", "everett/figure_3_sgd", "everett/figure_3_param_scaling")
PER_TABLE = True
CURVES = {
    "global": "one global rate",
    "full": "full alignment",
    "full_constants": "full + constants",
    "none_constants": "no alignment + constants",
}
STEPS = (("global", "full"), ("full", "full_constants"), ("full_constants", "none_constants"))
COLUMNS = (
    *tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, OPTIMIZER, tables.WIDTH, tables.RATE
)
Lines = dict[tuple[str, ...], dict[int, RateSweep]]


def read(paths: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """File name -> table of Figure 2 or 3."""
    data = {tables.name(path): _read(path) for path in paths}
    if len(data) < len(paths):
        raise TableError(f"{paths[-1]}: two tables would be drawn to one file name")
    return data


def _read(path: Path) -> pd.DataFrame:
    table = tables.read(path, COLUMNS)
    return table.dropna(subset=[CURVE, PARAMETERIZATION, OPTIMIZER])


def lines(table: pd.DataFrame) -> Lines:
    """(optimiser, parameterisation, curve) -> sweeps by width, of what has a finished run."""
    keys = {OPTIMIZER: style.OPTIMIZERS, PARAMETERIZATION: style.LABELS}
    return lines_of(table, keys, CURVES)


def findings(data: Mapping[str, pd.DataFrame]) -> list[Printed]:
    """What every intervention changes, table by table, then the lowest loss of all."""
    result = [line for name, table in data.items() for line in (name, *_of_table(table))]
    return [*result, best(list(data.values()))]


def _of_table(table: pd.DataFrame) -> list[Printed]:
    """What every intervention changes at the largest width, and what the paper says."""
    found = lines(table)
    own = [curve for curve in table[CURVE].unique() if curve not in CURVES]
    steps = [
        _step(found, optimizer, rule, before, after)
        for optimizer in style.present(style.OPTIMIZERS, table[OPTIMIZER])
        for before, after in (*STEPS, *((STEPS[0][0], curve) for curve in own))
        for rule in style.present(style.LABELS, table[PARAMETERIZATION])
    ]
    laws = {key: loss_law(sweeps) for key, sweeps in found.items()}
    return [
        "loss before minus after in nats ± its error from seeds, at the largest width",
        HEADER,
        *steps,
        *(f"{optimizer}, {style.LABELS.get(rule, rule)}, {curve}: {law_text(law)}"
          for (optimizer, rule, curve), law in laws.items() if law),
        *edge_lines(found),
        *lost_lines(table, [OPTIMIZER, PARAMETERIZATION, CURVE]),
        *noise_lines(table),
    ]


def _step(found: Lines, optimizer: str, rule: str, before: str, after: str) -> Finding:
    pair = [found.get((optimizer, rule, curve), {}) for curve in (before, after)]
    name = f"{optimizer}, {style.LABELS.get(rule, rule)}: {before} -> {after}"
    claim = INTERVENTIONS.get(optimizer, {}).get((before, after), {}).get(rule)
    return compared(name, *pair, None if claim is None else "gains" if claim else "loses")


def best(tables_: Sequence[pd.DataFrame]) -> str:
    """The lowest loss at the largest width of all tables, and the paper's best."""
    entries = [(key, sweeps) for table in tables_ for key, sweeps in lines(table).items()]
    if not entries:
        return "lowest loss of all: not measured, every run diverged"
    largest = max(width for _, sweeps in entries for width in sweeps)
    at = [(sweeps[largest].loss, key) for key, sweeps in entries if largest in sweeps]
    loss, key = min(at)
    published = next((value for value, other in at if other == BEST), None)
    note = "was not measured" if published is None else f"has {published:.3f}"
    return (f"lowest loss of all at D = {largest}: {', '.join(key)} with {loss:.3f}; the paper's "
            f"best, {', '.join(BEST)}, {note}")


def draw(data: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, object]]:
    """One figure per table."""
    for name, table in data.items():
        yield name, _figure(table)


def _figure(table: pd.DataFrame):
    found, curves = lines(table), style.present(CURVES, table[CURVE])
    optimizers = style.present(style.OPTIMIZERS, table[OPTIMIZER])
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    looks = style.looks(list(rules))
    figure, axes = style.subplots(
        len(optimizers), len(curves), (2.5, 2.5), sharex=True, sharey="row"
    )
    for row, (optimizer, label) in zip(axes, optimizers.items()):
        size_panels(row, (
            [(found[optimizer, rule, curve], looks[rule]) for rule in rules
             if (optimizer, rule, curve) in found]
            for curve in curves
        ))
        row[0].set_ylabel(f"{label}\n{style.LOSS_LABEL}")
    for axis, title in zip(axes[0], curves.values()):
        axis.set_title(title)
    style.legend(figure, style.rule_entries(rules))
    figure.suptitle(f"\n{BEST_NOTE}")
    return figure
