"""Each group's share of the network's tangent kernel (Dinan et al., Part I, section 3).

    python -m plots theory/shares [kernels.csv]

Bars: theory; points: networks of the largest width, with standard errors. PE: position embedding;
Q, K, V, U: query, key, value, output of attention; W, X: MLP's layers.
"""

from functools import partial

import numpy as np
import pandas as pd

from plots import style
from plots.findings import HEADER, Estimate, Report
from plots.theory import tables as theory_tables
from plots.theory.tables import GROUPS, KERNELS, STEMS, widths

TABLES = (KERNELS,)
read = partial(theory_tables.read_kernels, quantities=("theta",))


def shares(table: pd.DataFrame, stem: str) -> pd.DataFrame:
    """Group -> predicted and measured share of the trace at the largest width, with errors.

    The error is that of group and total as if they were independent: at least the share's own, as
    the total rises with the group.
    """
    rows = table[(table["stem"] == stem) & (table["quantity"] == "theta")]
    rows = rows[(rows["block"] == "head") & (rows["entry"] == "diagonal")]
    largest = widths(rows[rows["part"] == "total"])[-1]
    rows = rows[rows["width"] == largest].set_index("part")
    own = rows.loc[[g for g in GROUPS if g in rows.index], ["predicted", "measured", "error"]]
    total = rows.loc["total"]
    measured = own["measured"] / total["measured"]
    error = np.hypot(own["error"], measured * total["error"]) / total["measured"]
    predicted = own["predicted"] / total["predicted"]
    return pd.DataFrame({"predicted": predicted, "measured": measured, "error": error})


def findings(table: pd.DataFrame) -> Report:
    """Measured and predicted shares of every stem and group, in per cent."""
    yield HEADER
    for stem in theory_tables.stems(table):
        for group, row in shares(table, stem).iterrows():
            predicted, measured, error = 100 * row[["predicted", "measured", "error"]]
            name = f"{stem}: share of {GROUPS[str(group)]} in the tangent kernel, %"
            beside = f"{predicted:.2f}"
            yield Estimate(measured, error).finding(name, predicted, beside, 2, "")


def draw(table: pd.DataFrame) -> style.Drawn:
    """A panel per stem."""
    stems = theory_tables.stems(table)
    title = "each group's share of the tangent kernel"
    figure, axes = style.subplots(title, 1, len(stems), (4.4, 2.8))
    for axis, stem in zip(axes[0], stems, strict=True):
        shares_of, largest = shares(table, stem), widths(table[table["stem"] == stem])[-1]
        places = range(len(shares_of))
        axis.bar(places, shares_of["predicted"], color=style.SKY)
        look = {"color": "black", "marker": "o", "ms": 3, "ls": "", "capsize": 2}
        axis.errorbar(places, shares_of["measured"], shares_of["error"], **look)
        axis.set_xticks(places, [GROUPS[group] for group in shares_of.index], fontsize=8)
        axis.set_title(f"{STEMS[stem]}, n = {largest}")
        axis.xaxis.grid(False)
    axes[0, 0].set_ylabel(r"share of tr $\Theta$")
    entries = [
        ("theory", {"color": style.SKY, "lw": 6}),
        ("networks", {"color": "black", "marker": "o", "ms": 3, "ls": ""}),
    ]
    style.legend(figure, entries)
    yield "shares", figure
