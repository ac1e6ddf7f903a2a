"""Table 4's exponents with tuned constants, beside those without (ours).

    python -m plots everett/table_4_constants [table_4_constants.csv figure_12_adam.csv]

Without constants one rate serves embeddings and blocks, whose best rates differ: is the exponent of
the global rate nearer to the paper's when they do not?
"""

import math
from collections.abc import Mapping

import pandas as pd

from plots import naming, rates, style, tables
from plots.everett import horizons
from plots.everett.entries import beside
from plots.everett.published import TABLE_4
from plots.findings import HEADER, Report
from plots.rates import Exponent, Sweeps
from plots.tables import PARAMETERIZATION

TABLES = ("everett/table_4_constants", "everett/figure_12_adam")
SETTINGS = {"without": "without constants", "with": "with constants"}


def read(paths: tables.Paths) -> dict[str, tuple[pd.DataFrame, Mapping[str, Sweeps]]]:
    """with or without -> (table, parameterisation -> sweeps by width)."""
    columns = (*horizons.COLUMNS, PARAMETERIZATION)
    sources = {"table_4_constants.csv": columns, "figure_12_adam.csv": columns}
    tuned, plain = tables.read_each(paths, sources)
    own = rates.lines_of(tuned, {PARAMETERIZATION: style.LABELS}, {})
    lines = horizons.lines(plain).items()
    fixed = {rule: line for (rule, horizon), line in lines if horizon == "fixed"}
    return {
        "without": (horizons.by_rule(plain), fixed),
        "with": (tuned, {rule: sweeps for (rule, _), sweeps in own.items()}),
    }


def exponents(data) -> dict[str, dict[str, Exponent]]:
    """Parameterisation -> with or without -> the exponent."""
    both = {setting: lines for setting, (_, lines) in data.items()}
    rules = naming.present(style.LABELS, [rule for lines in both.values() for rule in lines])
    return {
        rule: {s: rates.exponent(both[s][rule]) for s in SETTINGS if rule in both[s]}
        for rule in rules
    }


def findings(data) -> Report:
    """Both exponents, and what constants change."""
    yield horizons.EXPONENT_NOTE
    yield HEADER
    for rule, fits in exponents(data).items():
        name = f"adam, {style.LABELS.get(rule, rule)}"
        published = TABLE_4["fixed"]["adam"].get(rule, math.nan)
        for setting, fit in fits.items():
            yield beside(f"{name}, {SETTINGS[setting]}", fit, published)
        if len(fits) == 2:
            yield beside(f"{name}: what they change", fits["with"] - fits["without"])
    table, lines = data["with"]
    named = {(rule,): sweeps for rule, sweeps in lines.items()}
    yield from rates.basis(table, named, [PARAMETERIZATION])


def draw(data) -> style.Drawn:
    """An exponent per parameterisation and setting, and the paper's."""
    title = "Adam's exponents with and without constants (ours)"
    figure, axes = style.subplots(title, 1, 1, (5.0, 3.2))
    axis, fits = axes[0][0], exponents(data)
    faces = {"without": "white", "with": None}
    for place, (rule, own) in enumerate(fits.items()):
        look = naming.looks([rule])[rule]
        for shift, (setting, fit) in zip((-0.15, 0.15), own.items(), strict=False):
            face = {"mfc": faces[setting] or look["color"], "capsize": 2, "ms": 6}
            axis.errorbar(place + shift, fit.value, fit.bar or 0.0, **look, **face)
        published = TABLE_4["fixed"]["adam"].get(rule, math.nan)
        axis.plot([place - 0.3, place + 0.3], [published] * 2, ":", color="0.3")
    axis.set_xticks(range(len(fits)), [style.LABELS.get(rule, rule) for rule in fits])
    axis.set_ylabel("exponent of the best rate in the width")
    entries = [
        ("without constants", style.HOLLOW),
        ("with constants", {**style.HOLLOW, "mfc": "gray"}),
        ("the paper", {"color": "0.3", "ls": ":"}),
    ]
    style.legend(figure, entries)
    yield "table_4_constants", figure
