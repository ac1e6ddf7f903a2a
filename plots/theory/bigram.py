"""Exponents of Stratos' bigram family: predicted and fitted ones.

    python -m plots theory/bigram [bigram.csv]

A panel per table, at initialisation, or at the first and the last step of training; squares:
predicted (a triangle: predicted as an upper bound), points: fitted over widths, with standard
errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.tables import TableError
from plots.theory import tables as theory_tables
from plots.theory.tables import BIGRAM

PAPER = "Stratos"
TABLES = (BIGRAM,)
PANELS = {
    "Table 1": "RMS",
    "Table 2": "variance",
    "Table 3": "RMS",
    "alignment": "α, ω and u",
}
CLAIMS = ("prediction", "bound", "hypothetical")
# Rows as the legends call them; in Table 2 sigma^2 are the variances of the entries of W_0 and of
# the readout W_r.
ROWS = {
    "sp": "SP",
    "ntk": "NTK",
    "mup": "muP",
    "mf": "mean-field",
    "1": r"1: $\sigma_0^2 = 1$, $\sigma_r^2 = 1/d$",
    "2": "2: the same with RMSNorm",
    "3": r"3: $\sigma_0^2 = 1/d$, $\sigma_r^2 = 1/d$",
    "4": "4: the same with RMSNorm",
    "5": r"5: $\sigma_0^2 = 1$, $\sigma_r^2 = 1$",
    "6": "6: the same with RMSNorm",
}
SHARED = (
    "Counts are not of independent trials: all rows see the same draws of the weights. SP and NTK, "
    "and muP and\nmean-field, are the same networks up to the shift of 1.2.1; rows 1 and 2 of "
    "Table 3 are both SP, its last row is muP."
)
AXES = {"alignment": "α, ω and u: exponents of d"}
_HOLLOW = {"color": "gray", "mfc": "none", "ms": 8, "ls": "", "mew": 1.2}
# A scatter's properties: the edge of a line's marker is never dashed.
_DASHED = {
    "marker": "s",
    "s": 64,
    "facecolors": "none",
    "edgecolors": "gray",
    "linestyles": "--",
    "lw": 1.2,
}
MARKS = (
    ("predicted", {**_HOLLOW, "marker": "s"}),
    ("predicted upper bound", {**_HOLLOW, "marker": "v"}),
    ("predicted, not judged", _DASHED),
    ("fitted, initialisation or step 1", {"color": "gray", "marker": "o", "ms": 4.5, "ls": ""}),
    ("fitted, last step", {"color": "gray", "marker": "x", "ms": 4.5, "ls": ""}),
)
_VERDICTS = {"True": "met", "False": "missed", "": ""}
_WIDTH = 0.8  # of a column of the figure that its rows' points spread over


def read(paths: Sequence[Path]) -> pd.DataFrame:
    """The table with the column `verdict`: met, missed or "", not judged; in the order of PANELS.

    TableError for another table, or one with neither initialisation nor the first step.
    """
    table, path = theory_tables.read_bigram(paths), paths[0]
    table = tables.only(table, path, "table", PANELS)
    if not (table["step"] <= 1).any():
        raise TableError(
            f"{path}: no row of step 0 or 1, the lowest step is {table['step'].min():g}; "
            "give the whole table"
        )
    odd = table.loc[~table["kind"].isin(CLAIMS), "kind"]
    if not odd.empty:
        raise TableError(f"{path}: kind {odd.iloc[0]!r}; expected {', '.join(CLAIMS)}")
    verdict = table["met"].map(str, na_action="ignore").fillna("").map(_VERDICTS)
    if verdict.isna().any():
        value = table.loc[verdict.isna(), "met"].iloc[0]
        raise TableError(f"{path}: met {value!r}; expected True, False or nothing")
    order = {name: index for index, name in enumerate(PANELS)}
    table = table.assign(verdict=verdict)
    return table.sort_values("table", key=lambda names: names.map(order), kind="stable")


def findings(table: pd.DataFrame) -> list[Printed]:
    """Per table, how many exponents are as predicted, and those that are not or are not judged."""
    lines: list[Printed] = [HEADER]
    for name, rows in table.groupby("table", sort=False):
        first, last = int(rows["step"].min()), int(rows["step"].max())
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        missed = (rows["verdict"] == "missed").sum()
        judged = (rows["verdict"] != "").any()
        verdict = ("disagrees" if missed else "agrees") if judged else ""
        lines.append(
            Finding(
                f"{name}, {when if last else 'initialisation'}: exponents",
                _counts(rows),
                "all met",
                verdict,
            )
        )
        told = rows[
            (rows["verdict"] == "missed")
            | (rows["kind"] == "hypothetical") & (rows["step"] == last)
        ]
        for _, row in told.iterrows():
            what = row["verdict"] or "hypothesis"
            found = f"{what}: {row['row']}, {row['column']}, step {row['step']:g}"
            measured = Estimate(row["measured"], row["error"])
            lines.append(measured.finding(found, row["predicted"], f"{row['predicted']:g}", 2))
        noted = told[told["note"] != ""].drop_duplicates(["row", "column"])
        lines += [f"{row['row']}, {row['column']}: {row['note']}" for _, row in noted.iterrows()]
        if last:  # how far the networks had come in training
            end = rows[rows["step"] == last].drop_duplicates("row")
            shown = ", ".join(
                f"{ROWS.get(row, row)} {m:.1%}"
                for row, m in zip(end["row"], end["moved"], strict=True)
            )
            lines.append(f"{name}: last activations' change before step {last}: {shown}")
    return [*lines, SHARED]


def _counts(rows: pd.DataFrame) -> str:
    """How many are met, missed and not judged."""
    verdict, kind = rows["verdict"], rows["kind"]
    met, bounds = (verdict == "met").sum(), ((verdict == "met") & (kind == "bound")).sum()
    hypothetical = (kind == "hypothetical").sum()
    few = ((verdict == "") & (kind != "hypothetical")).sum()
    why = [f"{hypothetical} hypothetical"] if hypothetical else []
    why += [f"{few} of too few networks or too small widths"] if few else []
    reasons = f" ({', '.join(why)})" if why else ""
    as_bounds = f" ({bounds} as upper bounds)" if bounds else ""
    missed = (verdict == "missed").sum()
    return f"{met} met{as_bounds}, {missed} missed, {(verdict == '').sum()} not judged{reasons}"


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """A panel per table, rows of a table side by side."""
    names = list(dict.fromkeys(table["table"]))
    figure, axes = style.subplots(len(names), 1, (9.0, 2.9))
    for axis, name in zip(axes[:, 0], names, strict=True):
        _panel(axis, table[table["table"] == name])
        axis.set_title(_title(table[table["table"] == name]), fontsize=10)
    marks = [
        (label, axes[0, 0].scatter([], [], **look) if look is _DASHED else look)
        for label, look in MARKS
    ]
    style.legend(figure, marks, ncols=3)
    figure.suptitle(
        "exponents of the bigram model, predicted and fitted\n"
        "bars: standard errors of the fits over widths"
    )
    yield "bigram", figure


def _title(rows: pd.DataFrame) -> str:
    name = rows["table"].iloc[0]
    last = int(rows["step"].max())
    if last == 0:
        return f"{name}: {PANELS[name]} at initialisation"
    steps = "step 1" if last == 1 else f"steps 1 and {last}"
    when = "" if name == "alignment" else " (h, h' and W' before the step, Δh by it)"
    return f"{name}: {PANELS[name]} in training, {steps}{when}"


def _panel(axis, rows: pd.DataFrame) -> None:
    """All exponents of one table, at the first and at the last step."""
    columns = list(dict.fromkeys(rows["column"]))
    names = list(dict.fromkeys(rows["row"].astype(str)))
    last = rows["step"].max()
    for index, (name, color) in enumerate(zip(names, style.PALETTE, strict=False)):
        own = rows[rows["row"].astype(str) == name]
        slot = _WIDTH / len(names)
        shift = slot * (index + 0.5) - _WIDTH / 2
        own = own.assign(place=[columns.index(column) + shift for column in own["column"]])
        first, final = own[own["step"] <= 1], own[(own["step"] == last) & (own["step"] > 1)]
        size = min(0.95 * 72 * 8 * slot / len(columns), 8.5)  # points; the axes are 8 inches wide
        _predicted(axis, first, color, size)
        side = slot / 5 if len(final) else 0.0
        for points, place, marker in ((first, -side, "o"), (final, side, "x")):
            axis.errorbar(
                points["place"] + place,
                points["measured"],
                points["error"],
                color=color,
                marker=marker,
                ms=0.48 * size,
                ls="",
                elinewidth=1,
                label=ROWS.get(name, name) if marker == "o" else None,
            )
    for edge in range(1, len(columns)):
        axis.axvline(edge - 0.5, color="0.85", lw=0.8)
    axis.grid(False, axis="x")
    axis.margins(y=0.1)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_xticks(range(len(columns)), [_symbol(column) for column in columns], fontsize=10)
    axis.set_ylabel(AXES.get(rows["table"].iloc[0], "exponent of d"))
    axis.legend(
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        frameon=False,
        ncols=min(len(names), 4),
        handletextpad=0.2,
    )


def _predicted(axis, rows: pd.DataFrame, color, points: float) -> None:
    for (bound, judged), own in rows.groupby([rows["kind"] == "bound", rows["verdict"] != ""]):
        axis.scatter(
            own["place"],
            own["predicted"],
            marker="v" if bound else "s",
            s=points**2,
            facecolors="none",
            edgecolors=[color],
            linestyles="-" if judged else "--",
            lw=1.2,
        )


def _symbol(column: str) -> str:
    """A column's name in the paper's symbols: dh_4[y] as the change of the logit of y."""
    name, _, rest = column.partition("_")
    number, target, _ = rest.partition("[y]")
    letters = {"alpha": r"\alpha", "omega": r"\omega", "dh": r"\Delta h"}
    prime = "'" if name.endswith("'") else ""
    symbol = letters.get(name, name.removesuffix("'"))
    return rf"${symbol}{prime}_{{{number}}}{target}$"
