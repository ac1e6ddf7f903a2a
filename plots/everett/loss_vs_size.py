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

from plots import panels, rates, style, tables
from plots.everett.published import BEST, INTERVENTIONS, STANDARD_BEATS_MUP
from plots.findings import HEADER, Finding, Printed
from plots.tables import CURVE, OPTIMIZER, PARAMETERIZATION, TableError

TABLES = ("everett/figure_2_adam", "everett/figure_3_sgd", "everett/figure_3_param_scaling")
PER_TABLE = True
CURVES = {
    "global": "one global rate",
    "full": "full alignment",
    "full_constants": "full + constants",
    "none_constants": "no alignment + constants",
}
FAIR = "full_constants"  # where the paper compares parameterisations: both are tuned
OPTIMIZERS = ("adam", "sgd", "adam_param_scaling")  # of Figures 2 and 3
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
    """What every intervention changes at the largest width and what the paper says, and what muP
    loses against standard, table by table; then the lowest loss of all."""
    text: list[Printed] = []
    every = {name: lines(table) for name, table in data.items()}
    for name, table in data.items():
        found = every[name]
        text += [
            name,
            "loss before minus after in nats ± its error from seeds, at the largest width",
            HEADER,
        ]
        own = [("global", curve) for curve in table[CURVE].unique() if curve not in CURVES]
        for optimizer in style.present(style.OPTIMIZERS, table[OPTIMIZER]):
            for before, after in (*STEPS, *own):
                for rule, label in style.present(style.LABELS, table[PARAMETERIZATION]).items():
                    pair = [found.get((optimizer, rule, curve), {}) for curve in (before, after)]
                    gains = INTERVENTIONS.get(optimizer, {}).get((before, after), {}).get(rule)
                    claim = None if gains is None else "gains" if gains else "loses"
                    step = f"{optimizer}, {label}: {before} -> {after}"
                    text.append(rates.compared(step, *pair, claim))
            mup, standard = (found.get((optimizer, rule, FAIR), {}) for rule in ("mup", "standard"))
            if mup and standard:
                claim = "gains" if optimizer == STANDARD_BEATS_MUP else None
                text.append(
                    rates.compared(f"{optimizer}, muP - standard: {FAIR}", mup, standard, claim)
                )
        for (optimizer, rule, curve), sweeps in found.items():
            if law := rates.loss_law(sweeps):
                label = style.LABELS.get(rule, rule)
                text.append(f"{optimizer}, {label}, {curve}: {rates.law_text(law)}")
        text += rates.basis(table, found, KEYS)
    return [*text, best(list(every.values()))]


def best(found: Sequence[rates.Lines]) -> Finding:
    """The loss of the paper's best setting minus the lowest of all others, at the largest width:
    below zero if that setting is the best. The paper speaks of all three optimisers, so that tables
    of some of them are compared without a claim."""
    every = [(key, sweeps) for table in found for key, sweeps in table.items()]
    optimizers = {optimizer for (optimizer, _, _), _ in every}
    whole = optimizers >= set(OPTIMIZERS)
    name = f"lowest loss of {'all' if whole or not every else ', '.join(sorted(optimizers))}: "
    name += f"{', '.join(BEST)} - next best"
    if not every:
        return Finding(name, "not measured: every run diverged", "lowest", "not measured")
    largest = max(width for _, sweeps in every for width in sweeps)
    at = sorted(
        (
            (sweeps[largest], key)
            for key, sweeps in every
            if largest in sweeps and sweeps[largest].ended
        ),
        key=lambda one: one[0].loss,
    )
    published = next((sweep for sweep, key in at if key == BEST), None)
    others = [(sweep, key) for sweep, key in at if key != BEST]
    if published is None or not others:
        why = f"lowest is {', '.join(others[0][1])}" if others else "no other setting"
        return Finding(name, f"not measured at D = {largest}; {why}", "lowest", "not measured")
    other, key = others[0]
    # Errors by seed have too few degrees of freedom for the lowest of many.
    change = rates.unpaired(published, other)
    measured = (
        f"{change.text()} at D = {largest} ({published.loss:.3f} - {other.loss:.3f} of "
        f"{', '.join(key)})"
    )
    verdict = (-change).claimed_gain()
    # The lowest of many is low by chance, too.
    if verdict == "disagrees" and change.value <= change.reach_of(len(others)) * change.error:
        verdict = "within noise"
    claimed = ("lowest", verdict) if whole else ("no claim", "")
    return Finding(name, measured, *claimed, change if whole else None)


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
        for row, optimizer in zip(axes, optimizers, strict=True):
            panels.size_panels(
                row,
                (
                    [
                        (found[optimizer, rule, curve], looks[rule])
                        for rule in rules
                        if (optimizer, rule, curve) in found
                    ]
                    for curve in curves
                ),
            )
        rows = (f"{label}\n{style.LOSS_LABEL}" for label in optimizers.values())
        style.label_grid(axes, curves.values(), y=rows)
        style.legend(figure, style.rule_entries(rules))
        names = " and ".join(optimizers.values())
        figure.suptitle(f"{names}, loss against size by intervention\n{panels.BEST_NOTE}")
        yield name, figure
