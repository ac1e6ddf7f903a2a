"""Adafactor beside Adam with parameter scaling (Everett et al., Appendix G, Figure 10).

    python -m plots.everett.adafactor [results.csv] [--out FOLDER]

Loss of the best rate against size: one global learning rate; full alignment with tuned constants.
Writes PNG and PDF.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Finding, claimed_equal, number
from plots.rate_panels import draw_best
from plots.rate_sweeps import (
    RateSweep,
    edge_lines,
    gain,
    lost_lines,
    noise_line,
    rate_sweeps,
    seed_noise,
)
from plots.tables import CURVE, PARAMETERIZATION, TableError

STEMS = ("figure_10_adafactor",)
FAMILIES = {"adafactor": "Adafactor", "param_scaling": "Adam + parameter scaling"}
SETTINGS = {"global": "one global rate", "full_constants": "full alignment + constants"}
LOOKS = {"adafactor": {"ls": "-"}, "param_scaling": {"ls": "--", "mfc": "white"}}
COLUMNS = (
    *tables.RESULTS, tables.PARAMETERS, PARAMETERIZATION, tables.WIDTH, tables.RATE
)
Lines = dict[tuple[str, str, str], dict[int, RateSweep]]


def read(path: Path) -> pd.DataFrame:
    """The table of Figure 10."""
    known = [f"{family}_{setting}" for family in FAMILIES for setting in SETTINGS]
    table = tables.only(tables.read(path, COLUMNS), path, CURVE, known)
    return tables.only(table, path, PARAMETERIZATION, style.LABELS)


def lines(table: pd.DataFrame) -> Lines:
    """(family, setting, parameterisation) -> sweeps by width, of what has a finished run."""
    found = {}
    for rule in style.LABELS:
        rows = table[table[PARAMETERIZATION] == rule]
        noise, _ = seed_noise(rows)
        for family in FAMILIES:
            for setting in SETTINGS:
                sweeps = rate_sweeps(rows[rows[CURVE] == f"{family}_{setting}"], noise)
                if sweeps:
                    found[family, setting, rule] = sweeps
    return found


def findings(table: pd.DataFrame) -> list[Finding]:
    """What Adafactor loses against Adam + parameter scaling, and whether that grows with size."""
    found, result = lines(table), []
    for setting in SETTINGS:
        for rule in style.LABELS:
            pair = [found.get((family, setting, rule), {}) for family in FAMILIES]
            width, change, error = gain(*pair)
            small, earlier, other = gain(*pair, last=False)
            name = f"Adafactor - Adam + PS: {style.LABELS[rule]}, {SETTINGS[setting]}"
            if width is None:
                result.append(Finding(name, "not measured", "minor", "not measured"))
                continue
            note = f" ({earlier:+.3f} at {small})" if small != width else ""
            measured = f"{number(change, error)} at D = {width}{note}"
            share = abs(change) / _span(found, setting, width)
            known = math.isfinite(share)
            word = f"{share:.0%} of the span of parameterisations" if known else "span unknown"
            if small != width:
                same = claimed_equal(change - earlier, (error**2 + other**2) ** 0.5)
                word += f"; same scaling: {same}"
            result.append(Finding(name, measured, "minor", word))
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


def report(table: pd.DataFrame) -> str:
    """The findings in words, with what they rest on."""
    text = ["difference in nats ± its error from seeds, at the largest width", HEADER]
    text += [finding.line() for finding in findings(table)]
    text += edge_lines(lines(table))
    text += lost_lines(table, [CURVE, PARAMETERIZATION])
    text += [
        noise_line(table[table[PARAMETERIZATION] == rule], label)
        for rule, label in style.LABELS.items()
    ]
    return "\n".join(text)


def draw(table: pd.DataFrame, folder: Path, name: str) -> list[Path]:
    """Draws the figure and returns the paths of PNG and PDF."""
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
    return style.save(figure, folder, name)


def make(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    """Findings and figure of one table."""
    if len(paths) != 1:
        raise TableError(f"{paths[1]}: expected one table")
    table = read(paths[0])
    return report(table), draw(table, folder, tables.name(paths[0]))


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    style.command("adafactor", __doc__, STEMS, make, argv)


if __name__ == "__main__":
    main()
