"""Kernels against depth: theory as lines, random networks as points (Dinan et al., Part I).

    python -m plots theory/kernels [kernels.csv]

Upper row: the mean diagonal of the forward kernel G; lower row: that of the neural tangent kernel.
Points are means over networks with standard errors, side by side.
"""

import pandas as pd

from plots import style
from plots.findings import HEADER, Estimate, Report
from plots.theory import tables as theory_tables
from plots.theory.tables import KERNELS, STEMS, short

TABLES = (KERNELS,)
read = theory_tables.read_kernels
ROWS = (
    ("G", "", r"forward kernel $G^{(\ell)}$"),
    ("theta", "total", r"tangent kernel $\Theta^{(\ell)}$"),
)


def diagonal(table: pd.DataFrame, stem: str, quantity: str, part: str) -> pd.DataFrame:
    """The rows of one quantity's mean diagonal, all widths."""
    chosen = (table["stem"] == stem) & (table["quantity"] == quantity) & (table["part"] == part)
    return table[chosen & (table["entry"] == "diagonal")]


def findings(table: pd.DataFrame) -> Report:
    """Per stem and quantity, every block at the largest width beside theory, and by width the
    largest distance from it over the blocks."""
    yield HEADER
    for stem in theory_tables.stems(table):
        for quantity, part, _ in ROWS:
            rows = diagonal(table, stem, quantity, part)
            largest = theory_tables.widths(rows)[-1]
            judged = rows[(rows["width"] == largest) & theory_tables.varies(rows)]
            for _, row in judged.iterrows():
                name = f"{stem}: {quantity}, {short(row['block'])}, n = {largest}"
                predicted, measured = row["predicted"], Estimate(row["measured"], row["error"])
                yield measured.finding(name, predicted, f"{predicted:.4f}", 4, "")
            off = (rows["measured"] / rows["predicted"] - 1).abs().groupby(rows["width"]).max()
            shown = ", ".join(f"n = {width:g}: {100 * value:.2f} %" for width, value in off.items())
            yield f"{stem}: {quantity}, largest distance over the blocks: {shown}"


def draw(table: pd.DataFrame) -> style.Drawn:
    """A column per stem."""
    stems = theory_tables.stems(table)
    title = "kernels and tangent kernels by block"
    figure, axes = style.subplots(title, len(ROWS), len(stems), (2.45, 2.0))
    colors = style.width_colors(theory_tables.widths(table))
    look = {"marker": "o", "ms": 4, "ls": "", "zorder": 2}
    for column, stem in enumerate(stems):
        for axis, (quantity, part, label) in zip(axes[:, column], ROWS, strict=True):
            rows = diagonal(table, stem, quantity, part)
            theory = rows.drop_duplicates("block")  # in the order of a forward pass
            place = {block: index for index, block in enumerate(theory["block"])}
            axis.plot(range(len(place)), theory["predicted"], color="black", lw=1, zorder=1)
            for index, (width, color) in enumerate(colors.items()):
                own = rows[rows["width"] == width]
                at = own["block"].map(place) + 0.12 * (index - (len(colors) - 1) / 2)
                axis.errorbar(at, own["measured"], own["error"], color=color, **look)
            axis.set_xticks(range(len(place)), [*map(short, place)], fontsize=7)
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
    style.label_grid(axes, (STEMS[stem] for stem in stems))
    entries = [("theory, leading order", {"color": "black", "lw": 1})]
    entries += [(f"n = {width}", {"color": color, **look}) for width, color in colors.items()]
    style.legend(figure, entries)
    yield "kernels", figure
