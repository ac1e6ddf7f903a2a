"""Distance between networks and theory against width, on log axes (Dinan et al., Part I).

    python -m plots theory/error [kernels.csv]

Left: the forward kernel of every block. Right: the contribution of every group to the network's
tangent kernel. Points are |measured / predicted - 1| of mean diagonals with the standard errors of
the means, side by side; a point within two of them from zero is hollow, pale and joined to no
other, one below the axis an arrow at its end. The dotted line falls as 1 / n. Numbers that are the
same in all networks (the gradient of the head's bias) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from plots import style
from plots.findings import HEADER, Estimate, Finding, Printed
from plots.theory import tables as theory_tables
from plots.theory.tables import GROUPS, KERNELS, LETTERS, STEMS, short, widths

TABLES = (KERNELS,)
read = theory_tables.read_kernels
MARKERS = "os^DvP*Xh"
_PALE = {"color": "0.5", "mfc": "none", "ls": "", "ms": 4}
MARKS = (
    ("more than two standard errors from theory", {"color": "0.3", "marker": "o", "ms": 4.5}),
    ("within two: no difference seen", {**_PALE, "marker": "o"}),
    ("the same, below the axis", {**_PALE, "marker": 7}),
    ("1 / n", {"color": "black", "ls": ":", "lw": 1}),
)
FLOOR = 3e-4  # below it there is only noise


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Relative distance and its standard error, of rows with one width each."""
    return pd.DataFrame(
        {
            "width": rows["width"],
            "signed": rows["measured"] / rows["predicted"] - 1,
            "distance": (rows["measured"] / rows["predicted"] - 1).abs(),
            "error": (rows["error"] / rows["predicted"]).abs(),
        }
    ).sort_values("width")


def curves(
    table: pd.DataFrame, stem: str
) -> tuple[dict[str, pd.DataFrame], dict[str, pd.DataFrame]]:
    """Block -> distances of G, group -> distances of its share of the tangent kernel."""
    rows = table[(table["stem"] == stem) & (table["entry"] == "diagonal")]
    rows = rows[rows["width"].isin(widths(table)) & (rows["predicted"] != 0)]
    rows = rows[theory_tables.varies(rows)]
    forward = {
        short(block): errors(own)
        for block, own in rows[rows["quantity"] == "G"].groupby("block", sort=False)
    }
    groups = rows[(rows["quantity"] == "theta") & (rows["block"] == "head")]
    tangent = {
        symbol: errors(groups[groups["part"] == group])
        for group, symbol in GROUPS.items()
        if (groups["part"] == group).any()
    }
    return forward, tangent


def findings(table: pd.DataFrame) -> list[Printed]:
    """The power of the width with which each distance falls, and the distance at the smallest."""
    lines: list[Printed] = [HEADER]
    for stem in theory_tables.stems(table):
        for kind, found in zip(
            ("G", "share of the tangent kernel"), curves(table, stem), strict=True
        ):
            for name, curve in found.items():
                law, first = decay(curve), curve.iloc[0]
                start = (
                    f"{100 * first['signed']:+.2f} ± {100 * first['error']:.2f} % at "
                    f"n = {first['width']:g}"
                )
                name = f"{stem}: {kind}, {name}, correction"
                if law is None:
                    lines.append(Finding(name, f"none seen: {start}", "of 1/n", "within noise"))
                else:
                    line = law.finding(f"{name}'s power of n", -1.0)
                    lines.append(replace(line, measured=f"{law.text(2)}; {start}"))
    return lines


def decay(curve: pd.DataFrame) -> Estimate | None:
    """-p of the fit signed = b n^(-p), by weighted least squares on all widths.

    The error is where chi squared has risen by 1. None where b is within five of its errors of
    zero.
    """
    if len(curve) < 3:
        return None
    n = (curve["width"] / curve["width"].min()).to_numpy()
    y, weight = curve["signed"].to_numpy(), 1 / curve["error"].to_numpy() ** 2
    powers = np.linspace(0, 4, 401)
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


def draw(table: pd.DataFrame) -> Iterator[tuple[str, object]]:
    """A row per stem."""
    stems = theory_tables.stems(table)
    figure, axes = style.subplots(len(stems), 2, (4.6, 2.8))
    for row, stem in zip(axes, stems, strict=True):
        titles = ("forward kernel by block", "tangent kernel by group")
        for axis, found, title in zip(row, curves(table, stem), titles, strict=True):
            _panel(axis, found)
            axis.set_title(f"{STEMS[stem]}: {title}", fontsize=9)
        row[0].set_ylabel("|measured / theory - 1|")
    for axis in axes[-1]:
        axis.set_xlabel("width n")
    style.legend(figure, MARKS, ncols=2)
    figure.suptitle(
        f"distance between networks and theory\nbars: standard errors over networks; {LETTERS}"
    )
    yield "error", figure


def _panel(axis, found: dict[str, pd.DataFrame]) -> None:
    ticks = sorted({int(width) for curve in found.values() for width in curve["width"]})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for index, (name, curve) in enumerate(found.items()):
        shift = 2 ** (0.055 * (index - (len(found) - 1) / 2))  # side by side
        look = {"color": (*style.PALETTE, "0.5")[index], "marker": MARKERS[index]}
        _line(axis, curve.assign(width=curve["width"] * shift), look)
        axis.plot([], [], ms=4, lw=0.8, label=name, **look)
    axis.set_xticks(ticks, [str(width) for width in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=FLOOR)
    worst = max((curve["distance"].iloc[0] for curve in found.values() if len(curve)), default=None)
    if worst and len(ticks) > 1:
        axis.plot(ticks, [worst * ticks[0] / tick for tick in ticks], color="black", ls=":", lw=1)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _line(axis, curve: pd.DataFrame, look: dict[str, str]) -> None:
    """Points that differ from theory, joined and with bars; hollow ones within the noise."""
    seen = curve["distance"] > 2 * curve["error"]
    # No line through noise: a NaN breaks it.
    axis.plot(curve["width"], curve["distance"].where(seen), color=look["color"], lw=1)
    sure, noise = curve[seen], curve[~seen]
    low = np.minimum(sure["error"], 0.99 * sure["distance"])  # a log axis has no zero
    axis.errorbar(
        sure["width"], sure["distance"], [low, sure["error"]], ls="", ms=4.5, elinewidth=0.8, **look
    )
    inside = noise[noise["distance"] > FLOOR]
    axis.plot(inside["width"], inside["distance"], ls="", ms=3, mfc="none", alpha=0.45, **look)
    below = curve[curve["distance"] <= FLOOR]
    axis.plot(
        below["width"],
        [1.1 * FLOOR] * len(below),
        ls="",
        ms=3,
        mfc="none",
        alpha=0.45,
        color=look["color"],
        marker=7,
    )
