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

from plots import rates, style, tables
from plots.everett.published import BEST, INTERVENTIONS
from plots.findings import HEADER, Printed
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
KEYS = [OPTIMIZER, PARAMETERIZATION, CURVE]
COLUMNS = (*tables.RESULTS, tables.PARAMETERS, *KEYS, tables.WIDTH, tables.RATE)


def read(paths: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """File name -> table of Figure 2 or 3."""
    data = {tables.name(path): tables.read(path, COLUMNS).dropna(subset=KEYS) for path in paths}
    if len(data) < len(paths):
        raise TableError(f"{paths[-1]}: two tables would be drawn to one file name")
    return data


def lines(table: pd.DataFrame) -> rates.Lines:
    """(optimiser, parameterisation, curve) -> sweeps by width, of what has a finished run."""
    keys = {OPTIMIZER: style.OPTIMIZERS, PARAMETERIZATION: style.LABELS}
    return rates.lines_of(table, keys, CURVES)


def findings(data: Mapping[str, pd.DataFrame]) -> list[Printed]:
    """What every intervention changes at the largest width and what the paper says, table by
    table, then the lowest loss of all."""
    text: list[Printed] = []
    for name, table in data.items():
        found = lines(table)
        text += [name, "loss before minus after in nats ± its error from seeds, at the largest "
                       "width", HEADER]
        own = [("global", curve) for curve in table[CURVE].unique() if curve not in CURVES]
        for optimizer in style.present(style.OPTIMIZERS, table[OPTIMIZER]):
            for before, after in (*STEPS, *own):
                for rule, label in style.present(style.LABELS, table[PARAMETERIZATION]).items():
                    pair = [found.get((optimizer, rule, curve), {}) for curve in (before, after)]
                    gains = INTERVENTIONS.get(optimizer, {}).get((before, after), {}).get(rule)
                    claim = None if gains is None else "gains" if gains else "loses"
                    step = f"{optimizer}, {label}: {before} -> {after}"
                    text.append(rates.compared(step, *pair, claim))
        for (optimizer, rule, curve), sweeps in found.items():
            if law := rates.loss_law(sweeps):
                label = style.LABELS.get(rule, rule)
                text.append(f"{optimizer}, {label}, {curve}: {rates.law_text(law)}")
        text += rates.basis(table, found, KEYS)
    return [*text, best(list(data.values()))]


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
    """One figure per table: a row per optimiser, a column per intervention."""
    for name, table in data.items():
        found, curves = lines(table), style.present(CURVES, table[CURVE])
        optimizers = style.present(style.OPTIMIZERS, table[OPTIMIZER])
        rules = style.present(style.LABELS, table[PARAMETERIZATION])
        looks = style.looks(list(rules))
        figure, axes = style.subplots(
            len(optimizers), len(curves), (2.5, 2.5), sharex=True, sharey="row"
        )
        for row, optimizer in zip(axes, optimizers):
            rates.size_panels(row, (
                [(found[optimizer, rule, curve], looks[rule]) for rule in rules
                 if (optimizer, rule, curve) in found]
                for curve in curves
            ))
        names = (f"{label}\n{style.LOSS_LABEL}" for label in optimizers.values())
        style.label_grid(axes, curves.values(), y=names)
        style.legend(figure, style.rule_entries(rules))
        figure.suptitle(f"\n{rates.BEST_NOTE}")
        yield name, figure
