"""Sweeps of one global rate at two horizons, as Figures 9 and 11 to 13 of Everett et al. show them:
a fixed number of steps, and one that grows with the model."""

from __future__ import annotations

import pandas as pd

from plots import style, tables
from plots.rates import RateSweep, curve_sweeps
from plots.tables import CURVE, HORIZON, WIDTH

EXPONENT_NOTE = (
    "exponent of the optimal rate in the width ± the larger of two standard errors: from the "
    "scatter of widths about the line, and from the errors of the optima"
)
HORIZONS = ("fixed", "compute_optimal")
COMPUTE_OPTIMAL = "20 tokens per parameter"  # Everett et al., App. H, after Hoffmann et al.
HORIZON_STYLES = {"fixed": ("o", "-"), "compute_optimal": ("s", "--")}
COLUMNS = (*tables.RESULTS, WIDTH, tables.RATE)
Lines = dict[tuple[str, str], dict[int, RateSweep]]


def curves() -> list[str]:
    """Names of the curves of one optimiser's table."""
    return [f"{rule}_{horizon}" for rule in style.LABELS for horizon in HORIZONS]


def horizon_labels(table: pd.DataFrame) -> dict[str, str]:
    """Horizon -> what it is in this table: a short preset's is not the compute-optimal one."""
    rows = table[table[CURVE].str.endswith("compute_optimal")]
    found = list(rows[HORIZON].dropna().unique()) if HORIZON in rows else []
    optimal = not found or found == [COMPUTE_OPTIMAL]
    label = "compute-optimal" if optimal else ", ".join(map(str, found))
    return {"fixed": "fixed steps", "compute_optimal": label}


def lines(table: pd.DataFrame) -> Lines:
    """(parameterisation, horizon) -> sweeps by width, of what has a finished run."""
    found = {}
    for rule in style.LABELS:
        pair = {f"{rule}_{horizon}": (rule, horizon) for horizon in HORIZONS}
        sweeps = curve_sweeps(table[table[CURVE].isin(pair)], pair)
        found |= {pair[curve]: own for curve, own in sweeps.items()}
    return found
