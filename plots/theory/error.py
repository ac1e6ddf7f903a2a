"""Distance between networks and theory against width, on log axes (Dinan et al., Part I).

    python -m plots theory/error [kernels.csv]

Left: the forward kernel of every block. Right: the contribution of every group to the network's
tangent kernel. Points are |measured / predicted - 1| of mean diagonals with the standard errors of
the means, side by side; those within two of these are hollow and have no line. The dotted line
falls as 1 / n. Numbers that are the same in all networks (the gradient of the head's bias) are left
out. PE: position embedding; Q, K, V, U: query, key, value, output of attention; W, X: MLP's layers.
"""

import math
from dataclasses import replace

import numpy as np
import pandas as pd

from plots import style
from plots.findings import HEADER, Estimate, Finding, Report
from plots.theory import tables as theory_tables
from plots.theory.tables import GROUPS, KERNELS, STEMS, short, widths

TABLES = (KERNELS,)
read = theory_tables.read_kernels
MARKERS = "os^DvP*Xh"
KINDS = {"G": "forward kernel by block", "share of the tangent kernel": "tangent kernel by group"}
Curves = dict[str, pd.DataFrame]


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Relative distance and its standard error, of rows with one width each."""
    signed = rows["measured"] / rows["predicted"] - 1
    error = (rows["error"] / rows["predicted"]).abs()
    columns = {"width": rows["width"], "signed": signed, "distance": signed.abs(), "error": error}
    return pd.DataFrame(columns).sort_values("width")


def curves(table: pd.DataFrame, stem: str) -> tuple[Curves, Curves]:
    """Block -> distances of G, group -> distances of its share of the tangent kernel."""
    rows = table[(table["stem"] == stem) & (table["entry"] == "diagonal")]
    rows = rows[rows["width"].isin(widths(table)) & (rows["predicted"] != 0)]
    rows = rows[theory_tables.varies(rows)]
    blocks = rows[rows["quantity"] == "G"].groupby("block", sort=False)
    groups = rows[(rows["quantity"] == "theta") & (rows["block"] == "head")]
    own = {symbol: groups[groups["part"] == group] for group, symbol in GROUPS.items()}
    by_block = {short(block): errors(of) for block, of in blocks}
    return by_block, {symbol: errors(of) for symbol, of in own.items() if len(of)}


def findings(table: pd.DataFrame) -> Report:
    """The power of the width with which each distance falls, and the distance at the smallest."""
    yield HEADER
    for stem in theory_tables.stems(table):
        for kind, curves_of in zip(KINDS, curves(table, stem), strict=True):
            for name, curve in curves_of.items():
                law, first = decay(curve), curve.iloc[0]
                start = f"{100 * first['signed']:+.2f} ± {100 * first['error']:.2f} % at "
                start += f"n = {first['width']:g}"
                name = f"{stem}: {kind}, {name}, correction"
                if law is None:
                    yield Finding(name, f"none seen: {start}", "of 1/n", "within noise")
                else:
                    line = law.finding(f"{name}'s power of n", -1.0)
                    yield replace(line, measured=f"{law.text(2)}; {start}")


def decay(curve: pd.DataFrame) -> Estimate | None:
    """-p of the fit signed = b n^(-p), by weighted least squares on all widths.

    The error is where chi squared has risen by 1. None if b is within five errors of zero.
    """
    if len(curve) < 3:
        return None
    n = (curve["width"] / curve["width"].min()).to_numpy()
    y, weight = curve["signed"].to_numpy(), 1 / curve["error"].to_numpy() ** 2
    powers = np.linspace(-2, 4, 601)
    shapes = n[None] ** -powers[:, None]
    strength = (shapes**2 * weight).sum(1)
    b = (shapes * y * weight).sum(1) / strength
    chi = ((y - b[:, None] * shapes) ** 2 * weight).sum(1)
    best = int(chi.argmin())
    if abs(b[best]) < 5 / math.sqrt(strength[best]):
        return None
    inside = powers[chi <= chi[best] + 1]
    # At an end of the range the interval has one side only.
    sides = 1 if best in (0, len(powers) - 1) else 2
    return Estimate(-float(powers[best]), float(inside[-1] - inside[0]) / sides)


def draw(table: pd.DataFrame) -> style.Drawn:
    """A row per stem."""
    stems = theory_tables.stems(table)
    title = "distance between networks and theory; hollow: within two errors"
    figure, axes = style.subplots(title, len(stems), 2, (4.6, 2.8))
    for row, stem in zip(axes, stems, strict=True):
        for axis, curves_of, title in zip(row, curves(table, stem), KINDS.values(), strict=True):
            _panel(axis, curves_of)
            axis.set_title(f"{STEMS[stem]}: {title}", fontsize=9)
        row[0].set_ylabel("|measured / theory - 1|")
    for axis in axes[-1]:
        axis.set_xlabel("width n")
    style.legend(figure, [("1 / n", {"color": "black", "ls": ":", "lw": 1})])
    yield "error", figure


def _panel(axis, curves: Curves) -> None:
    ticks = sorted({int(width) for curve in curves.values() for width in curve["width"]})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    worst = 0.0
    for index, (name, curve) in enumerate(curves.items()):
        shift = 2 ** (0.055 * (index - (len(curves) - 1) / 2))  # side by side
        look = {"color": (*style.PALETTE, "0.5")[index], "marker": MARKERS[index], "ms": 4.5}
        far = curve["distance"] > 2 * curve["error"]
        seen = curve[far]
        parts = (seen, {"lw": 1, "label": name}), (curve[~far], {"ls": "", "mfc": "w"})
        for part, shape in parts:
            low = np.minimum(part["error"], 0.9 * part["distance"])  # a log axis has no zero
            bars = {"elinewidth": 0.8, **shape}
            points = part["width"] * shift, part["distance"], [low, part["error"]]
            axis.errorbar(*points, **bars, **look)
        if len(seen) > 1:  # the guide begins where a curve is drawn
            worst = max(worst, seen["distance"].iloc[0] * seen["width"].iloc[0] / ticks[0])
    axis.set_xticks(ticks, [str(width) for width in ticks])
    axis.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    axis.xaxis.minorticks_off()
    if worst and len(ticks) > 1:
        axis.plot(ticks, [worst * ticks[0] / tick for tick in ticks], color="black", ls=":", lw=1)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
