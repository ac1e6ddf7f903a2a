"""Exponents of Stratos' bigram family: predicted and fitted ones.

    python -m plots theory/bigram [bigram.csv]

A panel per table, at initialisation, or at the first and the last step of training; squares:
predicted (a triangle: predicted as an upper bound; dashed: not judged), points: fitted over widths,
with standard errors. Counts are not of independent trials: all rows see the same draws of the
weights; SP and NTK, and muP and mean-field, are the same networks up to the shift of 1.2.1.
"""

import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Estimate, Finding, Report
from plots.tables import TableError
from plots.theory import tables as theory_tables
from plots.theory.tables import BIGRAM, BIGRAM_COLUMNS

PAPER = "Stratos"
TABLES = (BIGRAM,)
PANELS = {"Table 1": "RMS", "Table 2": "variance", "Table 3": "RMS", "alignment": "α, ω and u"}
# Rows as the legends call them; in Table 2 sigma^2 are variances of entries of W_0 and W_r.
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
# Condition A.2 would keep the change of logits of order one. The caption of Table 3 says that SP
# breaks it, and that they grow as the root of d.
BROKEN = 0.5
_GRAY = {"color": "gray", "ls": ""}
_HOLLOW = {**_GRAY, "mfc": "none", "ms": 8, "mew": 1.2}
MARKS = (
    ("predicted", {**_HOLLOW, "marker": "s"}),
    ("predicted upper bound", {**_HOLLOW, "marker": "v"}),
    ("fitted, initialisation or step 1", {**_GRAY, "marker": "o", "ms": 4.5}),
    ("fitted, last step", {**_GRAY, "marker": "x", "ms": 4.5}),
)
_VERDICTS = {"True": "met", "False": "missed", "": ""}
_WIDTH = 0.8  # of a column of the figure that its rows' points spread over


def read(paths: tables.Paths) -> pd.DataFrame:
    """The table with the column `verdict`: met, missed or "", not judged; in the order of PANELS.
    TableError for one with neither initialisation nor the first step."""
    table = theory_tables.read(paths, "bigram.csv", BIGRAM_COLUMNS, "note")
    table = tables.only(table, paths[0], "table", PANELS)
    if not (table["step"] <= 1).any():
        lowest = f"the lowest step is {table['step'].min():g}"
        raise TableError(f"{paths[0]}: no row of step 0 or 1, {lowest}; give the whole table")
    verdict = table["met"].map(str, na_action="ignore").fillna("").map(_VERDICTS)
    if verdict.isna().any():
        value = table.loc[verdict.isna(), "met"].iloc[0]
        raise TableError(f"{paths[0]}: met {value!r}; expected True, False or nothing")
    order = {name: index for index, name in enumerate(PANELS)}
    table = table.assign(verdict=verdict)
    return table.sort_values("table", key=lambda names: names.map(order), kind="stable")


def findings(table: pd.DataFrame) -> Report:
    """Per table, how many exponents are as predicted, and those that are not or are not judged."""
    yield HEADER
    for name, rows in table.groupby("table", sort=False):
        first, last = int(rows["step"].min()), int(rows["step"].max())
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        verdict, kind = rows["verdict"], rows["kind"]
        met, missed = rows[verdict == "met"], rows[verdict == "missed"]
        bounds, unjudged = (met["kind"] == "bound").sum(), (verdict == "").sum()
        measured = f"{len(met)} met{f' ({bounds} as upper bounds)' if bounds else ''}"
        measured += f", {len(missed)} missed{f', {unjudged} not judged' if unjudged else ''}"
        word = "disagrees" if len(missed) else "agrees" if len(met) else ""
        place = f"{name}, {when if last else 'initialisation'}: exponents"
        yield Finding(place, measured, "all met", word)
        for _, row in missed.iterrows():
            place = f"{name}, missed: {row['row']}, {row['column']}, step {row['step']:g}"
            one = Estimate(row["measured"], row["error"])
            yield one.finding(place, row["predicted"], f"{row['predicted']:g}", 2)
        broken = rows[(kind == "hypothetical") & (rows["step"] == last)]
        for _, row in broken.iterrows():
            place = f"Condition A.2 breaks: {row['row']}, {row['column']}, step {row['step']:g}"
            one = Estimate(row["measured"], row["error"])
            yield one.finding(place, BROKEN, f"{BROKEN:g} (A.2: 0)", 2)
        noted = pd.concat([missed, broken])
        noted = noted[noted["note"] != ""].drop_duplicates(["row", "column"])
        yield from (f"{row['row']}, {row['column']}: {row['note']}" for _, row in noted.iterrows())
        if last:  # how far the networks had come in training
            end = rows[rows["step"] == last].dropna(subset=["moved"]).drop_duplicates("row")
            moved = zip(end["row"], end["moved"], strict=True)
            shown = ", ".join(f"{ROWS.get(row, row)} {share:.1%}" for row, share in moved)
            yield f"{name}: last activations' change before step {last}: {shown}"


def draw(table: pd.DataFrame) -> style.Drawn:
    """A panel per table, rows of a table side by side."""
    names = list(dict.fromkeys(table["table"]))
    title = "exponents of the bigram model, predicted and fitted"
    figure, axes = style.subplots(title, len(names), 1, (9.0, 2.9))
    for axis, name in zip(axes[:, 0], names, strict=True):
        _panel(axis, table[table["table"] == name])
        axis.set_title(_title(table[table["table"] == name]), fontsize=10)
    style.legend(figure, MARKS)
    yield "bigram", figure


def _title(rows: pd.DataFrame) -> str:
    name, last = rows["table"].iloc[0], int(rows["step"].max())
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
    slot = _WIDTH / len(names)
    size = min(0.95 * 72 * 8 * slot / len(columns), 8.5)  # points; the axes are 8 inches wide
    for index, (name, color) in enumerate(zip(names, style.PALETTE, strict=False)):
        own = rows[rows["row"].astype(str) == name]
        shift = slot * (index + 0.5) - _WIDTH / 2
        own = own.assign(place=[columns.index(column) + shift for column in own["column"]])
        first, final = own[own["step"] <= 1], own[(own["step"] == last) & (own["step"] > 1)]
        kinds = first.groupby([first["kind"] == "bound", first["verdict"] != ""])
        for (bound, judged), points in kinds:
            look = {"marker": "v" if bound else "s", "linestyles": "-" if judged else "--"}
            edge = {"facecolors": "none", "edgecolors": [color], "lw": 1.2, "s": size**2}
            axis.scatter(points["place"], points["predicted"], **look, **edge)
        side = slot / 5 if len(final) else 0.0
        for points, place, marker in ((first, -side, "o"), (final, side, "x")):
            look = {"color": color, "marker": marker, "ms": 0.48 * size, "ls": "", "elinewidth": 1}
            label = ROWS.get(name, name) if marker == "o" else None
            places = points["place"] + place
            axis.errorbar(places, points["measured"], points["error"], label=label, **look)
    for edge in range(1, len(columns)):
        axis.axvline(edge - 0.5, color="0.85", lw=0.8)
    axis.grid(False, axis="x")
    axis.margins(y=0.1)
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_xticks(range(len(columns)), [_symbol(column) for column in columns], fontsize=10)
    alone = rows["table"].iloc[0] == "alignment"
    axis.set_ylabel("α, ω and u: exponents of d" if alone else "exponent of d")
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "frameon": False}
    axis.legend(fontsize=8, ncols=min(len(names), 4), handletextpad=0.2, **place)


def _symbol(column: str) -> str:
    """A column's name in the paper's symbols: dh_4[y] as the change of the logit of y."""
    name, _, rest = column.partition("_")
    number, target, _ = rest.partition("[y]")
    letters = {"alpha": r"\alpha", "omega": r"\omega", "dh": r"\Delta h"}
    prime = "'" if name.endswith("'") else ""
    symbol = letters.get(name, name.removesuffix("'"))
    return rf"${symbol}{prime}_{{{number}}}{target}$"
