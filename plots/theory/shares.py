"""Each group's share of the network's tangent kernel (Dinan et al., Part I, section 3).

    python -m plots theory/shares [kernels.csv]

Bars: theory; points: networks of the largest width, with standard errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd

from plots import style
from plots.findings import Printed
from plots.theory import tables as theory_tables
from plots.theory.tables import GROUPS, KERNELS, LETTERS, STEMS, widths

TABLES = (KERNELS,)
COUNTED = ("shares",)
read = partial(theory_tables.read_kernels, quantities=("theta",))


def shares(table: pd.DataFrame, stem: str) -> pd.DataFrame:
    """Group -> predicted and measured share of the trace at the largest width, with errors.

    The error is that of the group alone; the total's is smaller.
    """
    rows = table[(table["stem"] == stem) & (table["quantity"] == "theta")]
    rows = rows[(rows["block"] == "head") & (rows["entry"] == "diagonal")]
    largest = widths(rows[rows["part"] == "total"])[-1]
    rows = rows[rows["width"] == largest].set_index("part")
    present = [group for group in GROUPS if group in rows.index]
    own = rows.loc[present, ["predicted", "measured", "error"]]
    total = rows.loc["total"]
    return pd.DataFrame({
        "predicted": own["predicted"] / total["predicted"],
        "measured": own["measured"] / total["measured"],
        "error": own["error"] / total["measured"],
    })


def findings(table: pd.DataFrame) -> list[Printed]:
    """Predicted and measured shares of every stem and group."""
    lines = []
    for stem in theory_tables.stems(table):
        for group, row in shares(table, stem).iterrows():
            lines.append(
                f"{stem:<9} {group:<17} {100 * row['predicted']:6.2f} % predicted, "
                f"{100 * row['measured']:6.2f} ± {100 * row['error']:.2f} % measured"
            )
    return lines


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """A panel per stem."""
    stems = theory_tables.stems(table)
    figure, axes = style.subplots(1, len(stems), (4.4, 2.8))
    networks: set[float] = set()
    for axis, stem in zip(axes[0], stems):
        found, own = shares(table, stem), table[table["stem"] == stem]
        largest = widths(own)[-1]
        networks |= {*own[own["width"] == largest]["networks"]}
        places = range(len(found))
        axis.bar(places, found["predicted"], color=style.SKY)
        axis.errorbar(
            places, found["measured"], found["error"], color="black", marker="o", ms=3, ls="",
            capsize=2,
        )
        axis.set_xticks(places, [GROUPS[group] for group in found.index], fontsize=8)
        axis.set_title(f"{STEMS[stem]}, n = {largest}")
        axis.xaxis.grid(False)
    axes[0, 0].set_ylabel(r"share of tr $\Theta$")
    entries = [
        ("theory", {"color": style.SKY, "lw": 6}),
        ("networks", {"color": "black", "marker": "o", "ms": 3, "ls": ""}),
    ]
    style.legend(figure, entries)
    counts = " and ".join(f"{count:g}" for count in sorted(networks))
    figure.suptitle("each group's share of the tangent kernel\n"
                    f"bars: theory; points: {counts} networks ± standard error; {LETTERS}")
    yield "shares", figure
