"""Adafactor against Adam with parameter scaling (Everett et al., Appendix G, Figure 10).

    python -m plots everett/adafactor [results.csv]

Loss of the best rate against size: one global learning rate; full alignment with tuned constants.
"""

from dataclasses import replace

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.findings import HEADER, Finding, Printed, Report
from plots.tables import CURVE, PARAMETERIZATION

TABLES = ("everett/figure_10_adafactor",)
FAMILIES = {"adafactor": "Adafactor", "param_scaling": "Adam + parameter scaling"}
OWN = ""  # the family of a curve with another name, which is a setting of its own
SETTINGS = {"global": "one global rate", "full_constants": "full alignment + constants"}
LOOKS: dict[str, dict[str, object]] = {
    "adafactor": {"ls": "-"},
    "param_scaling": {"ls": (0, (2, 2)), "marker": "x"},  # what coincides is seen through it
    OWN: {},
}
COLUMNS = (*tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, tables.WIDTH, tables.RATE)


def read(paths: tables.Paths) -> pd.DataFrame:
    """The table of Figure 10."""
    (table,) = tables.read_each(paths, {"results.csv": COLUMNS})
    return table.dropna(subset=[CURVE, PARAMETERIZATION])


def lines(table: pd.DataFrame) -> rates.Lines:
    """(family, setting, parameterisation) -> sweeps by width, of what has a finished run."""
    curves = {f"{family}_{setting}": "" for family in FAMILIES for setting in SETTINGS}
    by_curve = rates.lines_of(table, {PARAMETERIZATION: style.LABELS}, curves)
    return {
        (*(naming.split(curve, FAMILIES, SETTINGS) or (OWN, curve)), rule): line
        for (rule, curve), line in by_curve.items()
    }


def findings(table: pd.DataFrame) -> Report:
    """What Adafactor loses against Adam + parameter scaling, as a share of how far apart the
    parameterisations are, as the paper calls it minor; and whether that grows with size."""
    sweeps_of, rules = lines(table), naming.present(style.LABELS, table[PARAMETERIZATION])
    yield "difference in nats ± its error from seeds, at the largest width"
    yield HEADER
    growth: list[Printed] = []
    for setting, words in SETTINGS.items():
        for rule, label in rules.items():
            pair = [sweeps_of.get((family, setting, rule), {}) for family in FAMILIES]
            name = f"Adafactor - Adam + PS: {label}, {words}"
            finding = rates.compared(name, *pair, None, "minor")
            by_width = rates.gains(*pair)
            if by_width:
                width = max(by_width)
                shown = ["param_scaling", setting]
                there = ((key, line) for (*key, _), line in sweeps_of.items() if width in line)
                losses = [line[width].loss for key, line in there if key == shown]
                span = max(losses) - min(losses)
                if span:
                    share = abs(by_width[width].value) / span
                    verdict = f"{share:.0%} of the span of parameterisations"
                    finding = replace(finding, verdict=verdict)
            if len(by_width) > 1:
                more = replace(by_width[width] - by_width[min(by_width)], by_size={})
                name = f"{label}, {words}: the difference at D = {width} minus at D = "
                name += f"{min(by_width)} (nats)"
                growth.append(more.judged(name, "equal", "same scaling"))
            yield finding
    yield from growth
    for (family, curve, rule), sweeps in sweeps_of.items():
        if family == OWN:
            width, best = max(sweeps.items())
            measured = f"{best.lowest.text(sign='')} at D = {width}"
            yield Finding(f"{curve}: {rules[rule]}, lowest loss", measured, "no claim")
    yield from rates.basis(table, sweeps_of, [CURVE, PARAMETERIZATION])


def draw(table: pd.DataFrame) -> style.Drawn:
    """Figure 10: a panel per setting."""
    sweeps_of = lines(table)
    settings = naming.present(SETTINGS, [setting for _, setting, _ in sweeps_of]) or {"": ""}
    rules = naming.present(style.LABELS, table[PARAMETERIZATION])
    looks = naming.looks(list(rules))
    title = "Adafactor and Adam + parameter scaling, loss against size"
    figure, axes = style.subplots(title, 1, len(settings), (4.0, 3.0), sharey=True)
    drawn = (
        [
            (sweeps, {**looks[rule], **LOOKS[family]})
            for (family, other, rule), sweeps in sweeps_of.items()
            if other == setting
        ]
        for setting in settings
    )
    panels.size_panels(axes[0], drawn)
    style.label_grid(axes, settings.values())
    entries = [(label, {"color": "black", **LOOKS[family]}) for family, label in FAMILIES.items()]
    style.legend(figure, [*naming.rule_entries(rules), *entries, *panels.lost_entries(sweeps_of)])
    yield "figure_10_adafactor", figure
