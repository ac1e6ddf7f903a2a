"""The quickstart: does the best learning rate move with width, and does muP hold it still?

    python -m plots everett/quickstart [results.csv]

Loss against learning rate for four widths, standard and muP, and how the optimum moves. The rate is
carried from the narrower to the wider model that the sweep file's `transfer` names, or from the
narrowest to the widest. What is expected of the findings are bands for this small sweep, not the
paper's numbers: with other widths or steps than those of quickstart.yaml there are none.
"""

import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from plots import naming, panels, rates, style, tables
from plots.findings import Finding, Report
from plots.rates import exponent
from plots.tables import CURVE, LOSS, RATE, ROOT, WIDTH, TableError

TABLES = ("everett/quickstart",)
STANDARD, MUP = "standard_global", "mup_full"
TITLES = {STANDARD: "standard, one global rate", MUP: "muP, full-alignment exponents"}
RULES = {STANDARD: "standard", MUP: "mup"}  # whose colours the curves have
SWEEP, CONFIG = "nanolm_c4/sweeps/quickstart.yaml", "nanolm_c4/configs/laptop.yaml"
HEADER = str(Finding("finding", "measured", "expected"))


class Data(NamedTuple):
    """The table, the two widths that a rate is carried between, and whether its widths and steps
    are those that bands are expected of."""

    table: pd.DataFrame
    tuned: int
    used: int
    banded: bool


def read(paths: tables.Paths) -> Data:
    """The sweep's table; TableError if a curve lacks one of the two widths that are compared."""
    (table,) = tables.read_each(paths, {"results.csv": (*tables.RESULTS, WIDTH, RATE)})
    widths = sorted(map(int, table[WIDTH].unique()))
    file, _ = tables.file_of(str(tables.origin(paths[0]).get("sweep", "")))
    transfer = _yaml(file).get("transfer", {}) if file else {}
    named = [int(transfer.get(end, {}).get(WIDTH, 0)) for end in ("source", "target")]
    tuned, used = named if {*named} <= {*widths} else (widths[0], widths[-1])
    for curve in (STANDARD, MUP):
        by_width = sweeps(table, curve)
        for width in (tuned, used):
            if width not in by_width:
                raise TableError(
                    f"{paths[0]}: no finished run of curve {curve!r} at {WIDTH} {width}; finish "
                    f"the sweep, with no --where that leaves it out"
                )
    planned = _yaml(SWEEP)["grid"][WIDTH], [_yaml(CONFIG)["training"]["steps"]]
    steps = table["steps"].unique() if "steps" in table else planned[1]
    banded = ({*widths}, {*steps}) == ({*planned[0]}, {*planned[1]})
    return Data(table, tuned, used, banded)


def _yaml(file: str | Path) -> dict:
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def sweeps(table: pd.DataFrame, curve: str) -> rates.Sweeps:
    """Width -> sweep; its optimum is the vertex through the best rate and its neighbours."""
    noise, _ = seed_spread(table, curve)
    return rates.rate_sweeps(table[table[CURVE] == curve], noise, window=None)


def seed_spread(table: pd.DataFrame, curve: str) -> tuple[float, int]:
    """(standard deviation of the final loss over seeds, number of points it is pooled over)."""
    rows = table[(table[CURVE] == curve) & table[LOSS].notna()]
    groups = rows.groupby([WIDTH, RATE])[LOSS]
    variances = groups.var()[groups.count() > 1]
    return math.sqrt(variances.mean()) if len(variances) else math.nan, len(variances)


def findings(data: Data) -> Report:
    """The quickstart's claims, measured, and what they rest on."""
    table = data.table
    titles = naming.present(TITLES, table[CURVE])
    sweeps_of = {curve: sweeps(table, curve) for curve in titles}
    fits = {curve: exponent(line) for curve, line in sweeps_of.items()}

    def finding(name: str, value, text: str, low: float = -math.inf, high: float = math.inf):
        if not data.banded:
            return Finding(name, text, "", "", value)
        band = f"[{low:g}, {high:g}]"
        band = f"> {low:g}" if math.isinf(high) else f"< {high:g}" if math.isinf(low) else band
        met = "as expected" if low <= value.value <= high else "MISSED"
        return Finding(name, text, band, met, value)

    name = "exponent of the optimal rate in width, "
    bands = {STANDARD: (-1.3, -0.5), MUP: (-0.3, 0.3)}
    words = {curve: title.partition(",")[0] for curve, title in titles.items()}
    yield HEADER
    for curve, band in bands.items():
        yield finding(name + words[curve], fits[curve], fits[curve].text(3), *band)
    change = fits[MUP] - fits[STANDARD]
    yield finding("muP minus standard", change, change.through_widths(3), 0.5)
    costs = {STANDARD: {"low": 0.05}, MUP: {"high": 0.05}}
    for curve, band in costs.items():
        line = sweeps_of[curve]
        cost = rates.cost_of(line[data.used], line[data.tuned].best.grid_value)
        place = f"loss at D={data.used} with the rate of D={data.tuned}, {words[curve]}"
        yield finding(place, cost, f"{cost.value:+.3f} nats", **band)
    for curve, title in titles.items():
        spread, n = seed_spread(table, curve)
        if n:
            yield (
                f"{title}: final loss varies by {spread:.3f} nats over seeds "
                f"(standard deviation, pooled over {n} points with two seeds)"
            )
        edges = [width for width, one in sweeps_of[curve].items() if not one.best.inside]
        if edges:
            yield f"{title}: no parabola at width {rates.listed(edges)}; grid point used"
        if curve not in TITLES:
            yield Finding(name + title, fits[curve].text(3))


def draw(data: Data) -> style.Drawn:
    """Losses against rate, a panel per curve, and the optima against width."""
    titles = naming.present(TITLES, data.table[CURVE])
    looks = naming.looks([RULES.get(curve, curve) for curve in titles]).values()
    lines = [
        panels.Line(title, sweeps(data.table, curve), look)
        for (curve, title), look in zip(titles.items(), looks, strict=True)
    ]
    title, small = "learning rates against width", len(lines) == len(TITLES)
    figure = panels.transfer(title, lines, "D", "width D", "learning rate", style.LOSS_LABEL, small)
    yield "quickstart", figure
