"""Sweeps of one global rate at two horizons, as Figures 9 and 11 to 13 of Everett et al. show them:
a fixed number of steps, and one that grows with the model."""

from collections.abc import Mapping

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.tables import CURVE, HORIZON, PARAMETERIZATION

EXPONENT_NOTE = (
    "exponent of the optimal rate in the width ± its error from leaving out a seed; where widths "
    "share fewer than three seeds, from the optima's errors or from the scatter about the line, "
    "whichever interval is longer; other windows: how far they move it"
)
HORIZONS = ("fixed", "compute_optimal")
COMPUTE_OPTIMAL = "20 tokens per parameter"  # Everett et al., App. H, after Hoffmann et al.
LOOKS = {"fixed": {"marker": "o", "ls": "-"}, "compute_optimal": {"marker": "s", "ls": "--"}}
COLUMNS = (*tables.RESULTS, tables.WIDTH, tables.RATE)


def places(table: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Curve -> (parameterisation, horizon), from its name. A curve with another name than
    RULE_HORIZON is a column of its own, at the horizon that the table says."""
    parts = {}
    for curve in table[CURVE].unique():
        horizon = next((word for word in HORIZONS if curve.endswith(f"_{word}")), None)
        grows = HORIZON in table and (table.loc[table[CURVE] == curve, HORIZON] != "fixed").any()
        rule = curve.removesuffix(f"_{horizon}")
        parts[curve] = rule, horizon or HORIZONS[bool(grows)]
    return parts


def horizon_labels(table: pd.DataFrame) -> dict[str, str]:
    """Horizon -> what it is in this table: a short preset's is not the compute-optimal one."""
    grown = [curve for curve, (_, horizon) in places(table).items() if horizon != "fixed"]
    rows = table[table[CURVE].isin(grown)]
    words = list(rows[HORIZON].dropna().unique()) if HORIZON in rows else []
    optimal = not words or words == [COMPUTE_OPTIMAL]
    label = "compute-optimal" if optimal else ", ".join(map(str, words))
    return {"fixed": "fixed steps", "compute_optimal": label}


def lines(table: pd.DataFrame) -> rates.Lines:
    """(parameterisation, horizon) -> sweeps by width, of what has a finished run."""
    sweeps_of, where = {}, places(table)
    for rule in naming.present(style.LABELS, [rule for rule, _ in where.values()]):
        own = [curve for curve, (name, _) in where.items() if name == rule]
        own.sort(key=lambda curve: HORIZONS.index(where[curve][1]))
        sweeps = rates.curve_sweeps(table[table[CURVE].isin(own)], own)
        sweeps_of |= {where[curve]: line for curve, line in sweeps.items() if line}
    return sweeps_of


def by_rule(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its parameterisations as a column, as the names of its curves say."""
    where = places(table)
    return table.assign(**{PARAMETERIZATION: [where[curve][0] for curve in table[CURVE]]})


def draw_rows(axes, sweeps_of: rates.Lines, rules: Mapping, labels: Mapping, colors) -> None:
    """A row of loss against rate for every horizon that has runs, a column per parameterisation;
    the columns share their rates. Losses are each panel's own: a common range flattens most."""
    shown = drawn_horizons(sweeps_of)
    for row, horizon in zip(axes, shown, strict=True):
        own = [sweeps_of.get((rule, horizon), {}) for rule in rules]
        for axis, first, sweeps in zip(row, axes[0], own, strict=True):
            if axis is not first:
                axis.sharex(first)
                first.tick_params(labelbottom=False)
            panels.draw_rates(axis, sweeps, colors)
            panels.loss_limits([axis], [sweeps])
    names = (f"{labels[horizon]}\n{style.LOSS_LABEL}" for horizon in shown)
    style.label_grid(axes, rules.values(), "learning rate", names)


def legend_entries(shown: list[str], labels: Mapping[str, str], ms: int) -> list[tuple[str, dict]]:
    """Legend entries of horizons, where there are two."""
    entries = [(labels[one], {"color": "0.3", "ms": ms, **LOOKS[one]}) for one in shown]
    return entries if len(shown) > 1 else []


def drawn_horizons(sweeps_of: rates.Lines) -> list[str]:
    """The horizons that have a finished run; the first where none has."""
    return [one for one in HORIZONS if any(one == other for _, other in sweeps_of)] or [HORIZONS[0]]
