"""The look all figures share, and how they are saved."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

FIGURES = Path(__file__).resolve().parent / "figures"
DPI = 160
CREDIT = 0.2  # inches
LABELS = {"standard": "standard", "ntk": "NTK", "mup": "muP", "mean_field": "mean-field"}
# Positions in seaborn's "deep" palette, and a marker that tells them apart without colour.
_COLORS = {"standard": 0, "ntk": 1, "mup": 2, "mean_field": 3}
MARKERS = {"standard": "o", "ntk": "s", "mup": "^", "mean_field": "D"}
OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adam_param_scaling": "Adam + parameter scaling",
    "adafactor": "Adafactor",
}
_STAR = {"marker": "*", "ms": 9, "ls": "", "mec": "black"}
# What stars mean in panels of loss against rate.
STAR_ENTRIES = (
    ("optimum (bar: its error)", {"color": "gray", **_STAR}),
    ("no parabola", {"color": "white", **_STAR}),
)
LOSS_LABEL = "eval loss (nats/token)"
VALIDATION_LABEL = "validation loss (nats/token)"
# Scaling strategies of Dinan et al., in the colours of their Figure 2 as far as the colour-blind
# can tell them apart, and markers for the rest.
STRATEGIES = {
    "standard": "standard",
    "neural_tangent": "neural-tangent",
    "hybrid": "hybrid",
    "maximal_update": "maximal-update",
}
STRATEGY_COLORS = {
    "standard": "#000000", "neural_tangent": "#0072B2", "hybrid": "#A65CC9",
    "maximal_update": "#D7301F",
}
# The palest seed of a strategy, as the share of white in its colour.
PALEST = 0.65
STRATEGY_MARKERS = {"standard": "o", "neural_tangent": "s", "hybrid": "D", "maximal_update": "^"}


def color(parameterization: str) -> tuple[float, float, float]:
    """A parameterisation's colour, the same in every figure."""
    import seaborn as sns

    return sns.color_palette("deep")[_COLORS[parameterization]]


def width_colors(widths: Sequence[int]) -> dict[int, tuple[float, float, float]]:
    """Width -> colour, dark to light with size."""
    import seaborn as sns

    return dict(zip(sorted(widths), sns.color_palette("viridis", len(widths))))


def shades(color: str, n: int) -> list[tuple[float, float, float]]:
    """`n` shades from a colour to a paler one, for seeds."""
    from matplotlib.colors import to_rgb

    whites = [PALEST * index / (n - 1) for index in range(n)] if n > 1 else [0.0]
    return [tuple(part + (1 - part) * white for part in to_rgb(color)) for white in whites]


def subplots(down: int, across: int, panel: tuple[float, float], **options):
    """(figure, grid of axes) with panels of `panel` inches, in the house's style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(style="whitegrid", context="paper")
    size = (panel[0] * across, panel[1] * down)
    return plt.subplots(
        down, across, figsize=size, squeeze=False, constrained_layout=True, **options
    )


def legend(figure, entries: Sequence[tuple[str, dict]], **options) -> None:
    """One legend below all panels: (label, line properties) each."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **properties) for _, properties in entries]
    labels = [label for label, _ in entries]
    options = {"ncols": len(labels), "fontsize": 8, "frameon": False, **options}
    figure.legend(handles, labels, loc="outside lower center", **options)


def bits_axis(axis) -> None:
    """A second scale on the right: nats on the left in bits."""
    scale = (lambda nats: nats / math.log(2), lambda bits: bits * math.log(2))
    axis.secondary_yaxis("right", functions=scale).set_ylabel("validation loss (bits/token)")


def update_ticks(axis, last: float) -> None:
    """An axis of updates from 0 to `last`, with ticks such as 50k."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_xlim(0, last)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def parameterization_entries() -> list[tuple[str, dict]]:
    """Legend entries of all four parameterisations."""
    return [
        (label, {"color": color(rule), "marker": MARKERS[rule], "ms": 4, "lw": 1.2})
        for rule, label in LABELS.items()
    ]


def width_entries(colors: Mapping[int, tuple]) -> list[tuple[str, dict]]:
    """Legend entries of widths."""
    return [(f"D = {w}", {"color": c, "marker": "o", "ms": 3}) for w, c in colors.items()]


def credit(figure, paper: str, name: str) -> None:
    """Says above all panels which figure of which paper this is, by its file name."""
    number = re.match(r"figure_(\d+[a-z]?)(_|$)", name)
    source = f"{paper}, Figure {number[1]}" if number else paper
    own = figure.get_suptitle()
    if not own:
        figure.set_figheight(figure.get_figheight() + CREDIT)  # room that panels do not lose
    figure.suptitle(f"{source}: {own}" if own else source, fontsize=10)


def save(item, folder: Path, name: str) -> list[Path]:
    """Writes a figure as PNG and PDF, or a table as CSV; the same data give the same bytes."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(item, pd.DataFrame):
        item.to_csv(folder / f"{name}.csv", index=False, na_rep="nan")
        return [folder / f"{name}.csv"]
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
        item.savefig(path, dpi=DPI, metadata=metadata)
        item.set_layout_engine("none")  # what the first file laid out holds for the second
    plt.close(item)
    return paths
