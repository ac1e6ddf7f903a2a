"""Eval loss against size under four interventions (Everett et al., Figures 2 and 3).

    python -m plots.everett.loss_vs_size [results.csv ...] [--out FOLDER]

One row per optimiser of a table: one global learning rate; per-layer exponents under full
alignment; these with tuned constants; exponents under no alignment with tuned constants. Every
point is the lowest loss of a learning-rate sweep. Writes PNG and PDF, one figure per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.everett.published import BEST, INTERVENTIONS
from plots.findings import HEADER, Finding, claimed_gain, number
from plots.rate_panels import draw_best
from plots.rate_sweeps import (
    RateSweep,
    edge_lines,
    gain,
    law_text,
    loss_law,
    lost_lines,
    noise_line,
    rate_sweeps,
    seed_noise,
)
from plots.tables import CURVE, OPTIMIZER, PARAMETERIZATION, TableError

STEMS = ("figure_2_adam", "figure_3_sgd", "figure_3_param_scaling")
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
Lines = dict[tuple[str, str, str], dict[int, RateSweep]]


def read(path: Path) -> pd.DataFrame:
    """A table of Figure 2 or 3."""
    table = tables.only(tables.read(path, COLUMNS), path, CURVE, CURVES)
    table = tables.only(table, path, PARAMETERIZATION, style.LABELS)
    return tables.only(table, path, OPTIMIZER, style.OPTIMIZERS)


def lines(table: pd.DataFrame) -> Lines:
    """(optimiser, parameterisation, curve) -> sweeps by width, of what has a finished run."""
    found = {}
    for optimizer in optimizers(table):
        own = table[table[OPTIMIZER] == optimizer]
        for rule in style.LABELS:
            rows = own[own[PARAMETERIZATION] == rule]
            noise, _ = seed_noise(rows)
            for curve in CURVES:
                sweeps = rate_sweeps(rows[rows[CURVE] == curve], noise)
                if sweeps:
                    found[optimizer, rule, curve] = sweeps
    return found


def optimizers(table: pd.DataFrame) -> list[str]:
    """The table's optimisers in the order of the figure."""
    return [name for name in style.OPTIMIZERS if (table[OPTIMIZER] == name).any()]


def findings(table: pd.DataFrame) -> list[Finding]:
    """What every intervention changes at the largest width, beside what the paper says."""
    found = lines(table)
    return [
        _step(found, optimizer, rule, before, after)
        for optimizer in optimizers(table)
        for before, after in STEPS
        for rule in style.LABELS
    ]


def _step(found: Lines, optimizer: str, rule: str, before: str, after: str) -> Finding:
    first, second = (found.get((optimizer, rule, curve), {}) for curve in (before, after))
    width, change, error = gain(first, second)
    small, earlier, _ = gain(first, second, last=False)
    name = f"{optimizer}, {style.LABELS[rule]}: {before} -> {after}"
    claim = INTERVENTIONS.get(optimizer, {}).get((before, after), {}).get(rule)
    if width is None:
        return Finding(name, "not measured")
    at = f"at D = {width}" + (f" ({earlier:+.3f} at {small})" if small != width else "")
    if claim is None:
        return Finding(name, f"{number(change, error)} {at}", "no claim")
    word = claimed_gain(change if claim else -change, error)
    return Finding(name, f"{number(change, error)} {at}", "gains" if claim else "loses", word)


def best(tables_: Sequence[pd.DataFrame]) -> str:
    """The lowest loss at the largest width of all tables beside the paper's best."""
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


def report(table: pd.DataFrame) -> str:
    """The findings of one table in words, with what they rest on."""
    text = ["loss before minus after in nats ± its error from seeds, at the largest width", HEADER]
    text += [finding.line() for finding in findings(table)]
    for (optimizer, rule, curve), sweeps in lines(table).items():
        law = loss_law(sweeps)
        if law:
            text.append(f"{optimizer}, {style.LABELS[rule]}, {curve}: {law_text(law)}")
    text += edge_lines(lines(table))
    text += lost_lines(table, [OPTIMIZER, PARAMETERIZATION, CURVE])
    for rule in style.LABELS:
        text.append(noise_line(table[table[PARAMETERIZATION] == rule], style.LABELS[rule]))
    return "\n".join(text)


def draw(table: pd.DataFrame, folder: Path, name: str) -> list[Path]:
    """Draws one table's figure and returns the paths of PNG and PDF."""
    found, names = lines(table), optimizers(table)
    figure, axes = style.subplots(len(names), len(CURVES), (2.5, 2.5), sharex=True, sharey="row")
    for row, optimizer in zip(axes, names):
        for axis, curve in zip(row, CURVES):
            for rule in style.LABELS:
                if (optimizer, rule, curve) in found:
                    look = {"color": style.color(rule), "marker": style.MARKERS[rule]}
                    draw_best(axis, found[optimizer, rule, curve], **look)
        row[0].set_ylabel(f"{style.OPTIMIZERS[optimizer]}\n{style.LOSS_LABEL}")
    for axis, title in zip(axes[0], CURVES.values()):
        axis.set_title(title)
    for axis in axes[-1]:
        axis.set_xlabel("parameters")
    style.legend(figure, style.parameterization_entries())
    return style.save(figure, folder, name)


def make(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    """Findings and figures of all tables."""
    data = {path: read(path) for path in paths}
    if len({tables.name(path) for path in data}) < len(data):
        raise TableError(f"{paths[-1]}: two tables would be drawn to one file name")
    text = [f"{tables.name(path)}\n{report(table)}" for path, table in data.items()]
    text.append(best(list(data.values())))
    files = [draw(table, folder, tables.name(path)) for path, table in data.items()]
    return "\n".join(text), [file for pair in files for file in pair]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    style.command("loss_vs_size", __doc__, STEMS, make, argv)


if __name__ == "__main__":
    main()
