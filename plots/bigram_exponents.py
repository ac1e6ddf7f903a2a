"""Exponents of Stratos' bigram family: predicted beside fitted ones.

    python -m plots.bigram_exponents [bigram.csv] [--out FOLDER]

A panel per table, at initialisation or after the first step of training; squares: predicted,
points: fitted over widths, with standard errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from plots import style, theory_tables
from plots.theory_tables import BIGRAM

FIGURE = "bigram_exponents"
TOLERANCE = 0.07


def findings(table: pd.DataFrame) -> str:
    """Per table, how many exponents lie within the tolerance, and those that do not."""
    lines = []
    for name, rows in table.groupby("table", sort=False):
        off = (rows["measured"] - rows["predicted"]).abs()
        steps = f"{int(rows['step'].min())} to {int(rows['step'].max())}"
        lines.append(
            f"{name}, steps {steps}: {(off <= TOLERANCE).sum()} of {len(rows)} exponents within "
            f"{TOLERANCE} of the prediction"
        )
        far = rows[off > TOLERANCE]
        for (note, row, column), own in far.groupby(["note", "row", "column"], sort=False):
            lines.append(f"    {row}, {column}, {_span(own)}  {note}".rstrip())
    return "\n".join(lines)


def _span(rows: pd.DataFrame) -> str:
    """One row's exponents over the steps beside what is predicted."""
    shown = ", ".join(f"{m:.2f} ± {e:.2f}" for m, e in zip(rows["measured"], rows["error"]))
    return f"predicted {rows['predicted'].iloc[0]:g}: {shown}"


def draw(table: pd.DataFrame, folder: Path) -> list[Path]:
    """PNG and PDF, a panel per table, rows of a table side by side."""
    import seaborn as sns

    table = table[table["step"] <= 1]
    names = list(dict.fromkeys(table["table"]))
    figure, axes = style.subplots(len(names), 1, (9.0, 2.6))
    for axis, name in zip(axes[:, 0], names):
        rows = table[table["table"] == name]
        columns = list(dict.fromkeys(rows["column"]))
        kinds = list(dict.fromkeys(rows["row"]))
        colors = sns.color_palette("husl", len(kinds))
        for index, (kind, color) in enumerate(zip(kinds, colors)):
            own = rows[rows["row"] == kind]
            shift = 0.7 * ((index + 0.5) / len(kinds) - 0.5)
            places = [columns.index(column) + shift for column in own["column"]]
            axis.plot(places, own["predicted"], color=color, marker="s", ms=7, mfc="none", ls="")
            axis.errorbar(
                places, own["measured"], own["error"], color=color, marker="o", ms=3, ls="",
                label=str(kind),
            )
        axis.set_xticks(range(len(columns)), columns, fontsize=7)
        axis.set_ylabel("exponent of d")
        axis.set_title(str(name), fontsize=9)
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    entries = [
        ("predicted", {"color": "gray", "marker": "s", "ms": 7, "mfc": "none", "ls": ""}),
        ("fitted", {"color": "gray", "marker": "o", "ms": 3, "ls": ""}),
    ]
    style.legend(figure, entries)
    return style.save(figure, folder, FIGURE)


def make(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    """Findings and files of the table given."""
    table = theory_tables.read_bigram(paths[0])
    return findings(table), draw(table, folder)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    style.command("bigram_exponents", __doc__, [BIGRAM], make, argv)


if __name__ == "__main__":
    main()
