"""Adafactor against Adam with parameter scaling (Everett et al., Appendix G, Figure 10).

    python -m plots everett/adafactor [results.csv]

Loss of the best rate against size: one global learning rate; full alignment with tuned constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import panels, rates, style, tables
from plots.findings import HEADER, Finding, Printed
from plots.tables import CURVE, PARAMETERIZATION

TABLES = ("everett/figure_10_adafactor",)
FIGURE = "figure_10_adafactor"
FAMILIES = {"adafactor": "Adafactor", "param_scaling": "Adam + parameter scaling"}
OWN = ""  # the family of a curve with another name, which is a setting of its own
SETTINGS = {"global": "one global rate", "full_constants": "full alignment + constants"}
LOOKS: dict[str, dict[str, str]] = {
    "adafactor": {"ls": "-"},
    "param_scaling": {"ls": "--", "mfc": "white"},
    OWN: {},
}
COLUMNS = (*tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, tables.WIDTH, tables.RATE)


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The table of Figure 10."""
    (table,) = tables.read_each(paths, {"results.csv": COLUMNS})
    return table.dropna(subset=[CURVE, PARAMETERIZATION])


def lines(table: pd.DataFrame) -> rates.Lines:
    """(family, setting, parameterisation) -> sweeps by width, of what has a finished run."""
    keys = {f"{family}_{setting}": (family, setting) for family in FAMILIES for setting in SETTINGS}
    found = rates.lines_of(table, {PARAMETERIZATION: style.LABELS}, dict.fromkeys(keys, ""))
    return {(*keys.get(curve, (OWN, curve)), rule): line for (rule, curve), line in found.items()}


def findings(table: pd.DataFrame) -> list[Printed]:
    """What Adafactor loses against Adam + parameter scaling, and whether that grows with size."""
    found, rules = lines(table), style.present(style.LABELS, table[PARAMETERIZATION])
    basis = "difference in nats ± its error from seeds, at the largest width"
    text: list[Printed] = [basis, HEADER]
    growth: list[Printed] = []
    for setting, words in SETTINGS.items():
        for rule, label in rules.items():
            pair = [found.get((family, setting, rule), {}) for family in FAMILIES]
            (width, change), (small, earlier) = rates.gain(*pair), rates.gain(*pair, last=False)
            word = "not measured"
            if width is not None:
                # What is minor is measured by how far apart the parameterisations are.
                losses = {
                    sweeps[width].loss
                    for (family, other, _), sweeps in found.items()
                    if (family, other) == ("param_scaling", setting)
                    and width in sweeps
                    and sweeps[width].ended
                }
                word = "span unknown"
                if len(losses) > 1:
                    share = abs(change.value) / (max(losses) - min(losses))
                    word = f"{share:.0%} of the span of parameterisations"
                if small != width:
                    more = change - earlier
                    growth.append(
                        Finding(
                            f"{label}, {words}: the difference at D = {width} minus at D = {small} "
                            "(nats)",
                            more.text(),
                            "same scaling",
                            more.claimed_equal(),
                            more,
                        )
                    )
            name = f"Adafactor - Adam + PS: {label}, {words}"
            text.append(Finding(name, rates.gain_text(*pair), "minor", word))
    text += growth
    for (family, curve, rule), sweeps in found.items():
        if family == OWN:
            width, best = max(sweeps.items())
            measured = f"{best.lowest.text(sign='')} at D = {width}"
            text.append(Finding(f"{curve}: {rules[rule]}, lowest loss", measured, "no claim"))
    return [*text, *rates.basis(table, found, [CURVE, PARAMETERIZATION])]


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """Figure 10: a panel per setting."""
    found = lines(table)
    settings = style.present(SETTINGS, [setting for _, setting, _ in found])
    rules = style.present(style.LABELS, table[PARAMETERIZATION])
    looks = style.looks(list(rules))
    figure, axes = style.subplots(1, max(len(settings), 1), (4.0, 3.0), sharey=True)
    panels.size_panels(
        axes[0],
        (
            [
                (sweeps, {**looks[rule], **LOOKS[family]})
                for (family, other, rule), sweeps in found.items()
                if other == setting
            ]
            for setting in settings or ("",)
        ),
    )
    style.label_grid(axes, settings.values())
    entries = [(label, {"color": "black", **LOOKS[family]}) for family, label in FAMILIES.items()]
    style.legend(figure, [*style.rule_entries(rules), *entries], ncols=3)
    title = "Adafactor and Adam + parameter scaling, loss against size"
    figure.suptitle(f"{title}\n{panels.BEST_NOTE}")
    yield FIGURE, figure
