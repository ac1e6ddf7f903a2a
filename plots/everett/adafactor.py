"""Adafactor against Adam with parameter scaling (Everett et al., Appendix G, Figure 10).

    python -m plots everett/adafactor [results.csv]

Loss of the best rate against size: one global learning rate; full alignment with tuned constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Finding, Printed, claimed_equal, number
from plots.rates import (
    BEST_NOTE,
    RateSweep,
    edge_lines,
    gain,
    gain_text,
    lines_of,
    lost_lines,
    noise_lines,
    size_panels,
)
from plots.tables import CURVE, PARAMETERIZATION

TABLES = ("everett/figure_10_adafactor",)
FIGURE = "figure_10_adafactor"
FAMILIES = {"adafactor": "Adafactor", "param_scaling": "Adam + parameter scaling"}
OWN = ""  # the family of a curve with another name, which is a setting of its own
SETTINGS = {"global": "one global rate", "full_constants": "full alignment + constants"}
LOOKS: dict[str, dict[str, str]] = {
    "adafactor": {"ls": "-"}, "param_scaling": {"ls": "--", "mfc": "white"}, OWN: {},
}
COLUMNS = (
    *tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, tables.WIDTH, tables.RATE
)
Lines = dict[tuple[str, str, str], dict[int, RateSweep]]


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The table of Figure 10."""
    tables.expect(paths, "results.csv")
    return tables.read(paths[0], COLUMNS).dropna(subset=[CURVE, PARAMETERIZATION])


def lines(table: pd.DataFrame) -> Lines:
    """(family, setting, parameterisation) -> sweeps by width, of what has a finished run."""
    keys = {f"{family}_{setting}": (family, setting) for family in FAMILIES for setting in SETTINGS}
    found = lines_of(table, {PARAMETERIZATION: style.LABELS}, dict.fromkeys(keys, ""))
    return {(*keys.get(curve, (OWN, curve)), rule): line for (rule, curve), line in found.items()}


def findings(table: pd.DataFrame) -> list[Printed]:
    """What Adafactor loses against Adam + parameter scaling, and whether that grows with size."""
    return [
        "difference in nats ± its error from seeds, at the largest width",
        HEADER,
        *_differences(lines(table), style.present(style.LABELS, table[PARAMETERIZATION])),
        *edge_lines(lines(table)),
        *lost_lines(table, [CURVE, PARAMETERIZATION]),
        *noise_lines(table),
    ]


def _differences(found: Lines, rules: Mapping[str, str]) -> list[Finding]:
    result = []
    for setting in SETTINGS:
        for rule, label in rules.items():
            pair = [found.get((family, setting, rule), {}) for family in FAMILIES]
            width, change, error = gain(*pair)
            small, earlier, other = gain(*pair, last=False)
            name = f"Adafactor - Adam + PS: {label}, {SETTINGS[setting]}"
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
    for (family, curve, rule), sweeps in found.items():
        if family == OWN:
            width, best = max(sweeps.items())
            name = f"{curve}: {rules[rule]}, lowest loss"
            measured = f"{number(best.loss, best.error, sign='')} at D = {width}"
            result.append(Finding(name, measured, "no claim"))
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
    settings = style.present(SETTINGS, [setting for _, setting, _ in found])
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    looks = style.looks(list(rules))
    figure, axes = style.subplots(1, max(len(settings), 1), (4.0, 3.0), sharey=True)
    size_panels(axes[0], (
        [(sweeps, {**looks[rule], **LOOKS[family]})
         for (family, other, rule), sweeps in found.items() if other == setting]
        for setting in settings or ("",)
    ))
    for axis, title in zip(axes[0], settings.values()):
        axis.set_title(title)
    entries = [(label, {"color": "black", **LOOKS[family]}) for family, label in FAMILIES.items()]
    style.legend(figure, [*style.rule_entries(rules), *entries], ncols=3)
    figure.suptitle(f"\n{BEST_NOTE}")
    yield FIGURE, figure
