"""The two tables that `python -m effective_theory.run` writes, and what its figures read of them.

kernels: one row per kernel entry and width, predicted and measured. `width` is inf for the
extrapolation to infinite width. bigram: one row per fitted exponent.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from plots import tables
from plots.tables import TableError

KERNELS, BIGRAM = "theory/kernels", "theory/bigram"
MAKER = "effective_theory.run"
KERNEL_COLUMNS = (
    "stem width heads networks quantity block part entry predicted predicted_error measured error"
).split()
BIGRAM_COLUMNS = "table row column step kind predicted measured error moved z met note".split()
# Groups in the order of a forward pass, and their symbols in the paper.
GROUPS = {
    "stem": "stem",
    "position": "PE",
    "query": "Q",
    "key": "K",
    "value": "V",
    "attention_output": "U",
    "mlp_in": "W",
    "mlp_out": "X",
    "readout": "head",
    "readout_bias": "bias",
}
STEMS = {"vision": "vision", "language": "language, tied head"}


def read_kernels(paths: tables.Paths, quantities: Sequence[str] = ("G", "theta")) -> pd.DataFrame:
    """The table of kernels; TableError if a stem lacks one of them at a finite width."""
    table, path = read(paths, "kernels.csv", KERNEL_COLUMNS, "part", "block"), paths[0]
    table = tables.only(table, path, "stem", STEMS)
    finite = table[np.isfinite(table["width"]) & (table["block"] == "head")]
    for stem in stems(table):
        for quantity in quantities:
            rows = finite[(finite["stem"] == stem) & (finite["quantity"] == quantity)]
            if rows.empty or (quantity == "theta" and not (rows["part"] == "total").any()):
                words = f"no {quantity} of the head at a finite width for stem {stem}"
                raise TableError(f"{path}: {words}; is it the kernels.csv of {MAKER}?")
    return table


def read(paths: tables.Paths, source: str, columns: Sequence[str], *texts: str) -> pd.DataFrame:
    """The table, empty cells of the columns `texts` as empty words."""
    tables.expect(paths, source)
    table = tables.read(paths[0], columns, source, MAKER)
    return table.assign(**{key: table[key].astype(object).fillna("") for key in texts})


def stems(table: pd.DataFrame) -> list[str]:
    """The stems that a table has, vision first."""
    return [stem for stem in STEMS if (table["stem"] == stem).any()]


def widths(table: pd.DataFrame) -> list[int]:
    """The finite widths of a table, rising."""
    return sorted(map(int, table.loc[np.isfinite(table["width"]), "width"].unique()))


def varies(rows: pd.DataFrame) -> pd.Series:
    """Whether a number differs between networks; where none does, there is no standard error."""
    return rows["error"] > 1e-7 * rows["predicted"]


def short(block: str) -> str:
    """A block's label: attention.0 as att 1."""
    kind, _, number = block.partition(".")
    name = {"attention": "att", "mlp": "MLP"}.get(kind, kind)
    return f"{name} {int(number) + 1}" if number else name
