"""The look all figures share, and how they are saved."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Drawn = Iterator[tuple]  # (file name, figure) each, and of some tables alone these places among all
FIGURES = Path(__file__).resolve().parent / "figures"
DPI = 160
FORMATS = {"png": {"metadata": {}}, "pdf": {"metadata": {"CreationDate": None}}}
# Above all panels: a line of title and a line of caption; inches, and points of the caption.
TITLE_HEIGHT, CAPTION_HEIGHT, CAPTION_SIZE = 0.25, 0.18, 7.0
# Okabe and Ito (2008), without their yellow, which is too pale for a line on white, and Tol's wine
# (2021). Any two are told apart with deuteranopia and protanopia (tests/plots/test_style.py).
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
VERMILION, SKY, BLACK, WINE = "#D55E00", "#56B4E9", "#000000", "#882255"
PALETTE = (BLUE, ORANGE, GREEN, WINE, SKY, VERMILION, PINK, BLACK)
SHAPES = "os^DvP*X"
LABELS = {"standard": "standard", "ntk": "NTK", "mup": "muP", "mean_field": "mean-field"}
OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adam_param_scaling": "Adam + parameter scaling",
    "adafactor": "Adafactor",
}
STAR = {"marker": "*", "ms": 10, "mec": "black", "mew": 0.5, "zorder": 5, "ls": ""}
VERTEX = {"marker": "D", "ms": 4, "mfc": "white", "mew": 0.9, "zorder": 6, "ls": ""}
LOST = {"marker": "X", "ms": 6, "mec": "white", "mew": 0.6, "zorder": 4, "ls": ""}  # diverged
HOLLOW = {"color": "gray", "marker": "o", "mfc": "white", "ms": 5, "ls": ""}
LOSS_LABEL = "eval loss (nats/token)"
VALIDATION_LABEL = "validation loss (nats/token)"
# Scaling strategies of Dinan et al., in the colours of their Figure 2 as far as the colour-blind
# can tell them apart, and markers for the rest.
STRATEGY_LOOKS = {
    "standard": {"color": BLACK, "marker": "o"},
    "neural_tangent": {"color": BLUE, "marker": "s"},
    "hybrid": {"color": PINK, "marker": "D"},
    "maximal_update": {"color": VERMILION, "marker": "^"},
}
STRATEGIES = {name: name.replace("_", "-") for name in STRATEGY_LOOKS}
# The palest seed of a strategy, as the share of white in its colour.
PALEST = 0.65


def width_colors(widths: Sequence[int]) -> dict[int, tuple[float, float, float]]:
    """Width -> colour, dark to light with size."""
    import seaborn as sns

    return dict(zip(sorted(widths), sns.color_palette("viridis", len(widths)), strict=True))


def shades(color: str, n: int) -> list[tuple[float, float, float]]:
    """`n` shades from a colour to a paler one, for seeds."""
    from matplotlib.colors import to_rgb

    whites = [PALEST * index / (n - 1) for index in range(n)] if n > 1 else [0.0]
    return [tuple(part + (1 - part) * white for part in to_rgb(color)) for white in whites]


def subplots(title: str, down: int, across: int, panel: tuple[float, float], **options):
    """(figure, grid of axes) with panels of `panel` inches, in the house's style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(style="whitegrid", context="paper")
    options |= {"figsize": (panel[0] * across, panel[1] * down), "squeeze": False}
    figure, axes = plt.subplots(down, across, constrained_layout=True, **options)
    figure.suptitle(title)
    return figure, axes


def legend(figure, entries: Sequence[tuple[str, Any]], axis=None, **options) -> None:
    """One legend, (label, line properties or an artist) each: below all panels, in as many columns
    as fit, or in the place of an `axis` that is left over."""
    if axis is not None:
        axis.axis("off")
        axis.legend(handles=handles(entries), loc="center", fontsize=8, frameon=False)
        return
    labels = [label for label, _ in entries]
    options = {"ncols": len(labels), "fontsize": 8, "frameon": False, **options}
    inches = [0.6 + 0.0078 * options["fontsize"] * len(label) for label in labels]

    def across(columns: int) -> float:
        down = math.ceil(len(labels) / columns)
        return sum(max(inches[i : i + down]) for i in range(0, len(labels), down))

    while options["ncols"] > 1 and across(options["ncols"]) > figure.get_figwidth():
        options["ncols"] -= 1
    # No more columns than fill their rows: a last row of one has no reader.
    options["ncols"] = math.ceil(len(labels) / math.ceil(len(labels) / options["ncols"]))
    figure.legend(handles=handles(entries), loc="outside lower center", **options)


def handles(entries: Sequence[tuple[str, Any]]) -> list:
    """What a legend shows for (label, line properties or an artist) each."""
    from matplotlib.lines import Line2D

    artists = [Line2D([], [], **look) if isinstance(look, dict) else look for _, look in entries]
    for handle, (label, _) in zip(artists, entries, strict=True):
        handle.set_label(label)
    return artists


def label_grid(axes, titles: Iterable[str] = (), x: str = "", y: Iterable[str] = ()) -> None:
    """Titles above the first row of panels, what all have below the last, and `y` left of rows."""
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title)
    for axis in axes[-1] if x else ():
        axis.set_xlabel(x)
    for row, label in zip(axes, y, strict=False):
        row[0].set_ylabel(label)


def empty(axis, why: str) -> None:
    """Says in a panel without data why there are none."""
    place = {"transform": axis.transAxes, "ha": "center", "va": "center"}
    axis.text(0.5, 0.5, why, color="0.4", fontsize=8, **place)
    axis.grid(False)


def octave_limits(axes: Sequence, widths: list[int]) -> None:
    """Ticks at the widths, with labels as far as they have room, and in all panels of a row equally
    many whole octaves of rates, so that slopes can be compared; at least two."""
    drawn = [axis for axis in axes if axis.has_data() and axis.get_yscale() == "log"]
    ends = [[math.log2(end) for end in axis.get_ylim()] for axis in drawn]
    ends = [[math.floor(low), math.ceil(high)] for low, high in ends]
    most = max((high - low for low, high in ends), default=2)
    for axis, (low, high) in zip(drawn, ends, strict=True):
        spare = max(most, 2) - (high - low)
        axis.set_ylim(2.0 ** (low - spare // 2), 2.0 ** (high + spare - spare // 2))
    for axis in axes:
        axis.set_xlim(min(widths) / 1.3, max(widths) * 1.3)
        inches = axis.figure.get_figwidth() / axis.get_subplotspec().get_gridspec().ncols - 0.8
        digit = math.log2(1.3**2 * max(widths) / min(widths)) / inches * 0.075  # octaves it takes
        labelled: list[int] = []
        for width in sorted(widths, key=lambda w: (w & (w - 1) != 0, w)):  # powers of two first
            room = (len(str(width)) + 1) * digit
            if all(abs(math.log2(width / other)) >= room for other in labelled):
                labelled.append(width)
        axis.set_xticks(widths, labels=[str(w) if w in labelled else "" for w in widths])
        axis.minorticks_off()


def update_ticks(axis, last: float) -> None:
    """An axis of updates from 0 to `last`, with ticks such as 50k."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_xlim(0, last)
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def rate_entries(lines: Iterable[Any]) -> list[tuple[str, dict]]:
    """Legend entries of the marks in panels of loss against rate and of optima, as far as there
    are some: of Lines, or (label, sweeps) and more each."""
    sweeps = [sweep for line in lines for sweep in line[1].values()]
    gray, doubt = {"color": "gray"}, any(s.best.at_edge or not s.best.inside for s in sweeps)
    entries = [
        ("best rate run", gray | STAR, True),
        ("vertex of a parabola ± standard error", gray | VERTEX, True),
        ("a run diverged", gray | LOST, any(sweep.unstable for sweep in sweeps)),
        ("best rate first or last tried, or its error unknown", HOLLOW, doubt),
    ]
    return [(label, look) for label, look, there in entries if there]


def width_entries(colors: Mapping[int, tuple], symbol: str = "D") -> list[tuple[str, dict]]:
    """Legend entries of widths, or of another size."""
    return [(f"{symbol} = {n}", {"color": c, "marker": "o", "ms": 3}) for n, c in colors.items()]


def credit(figure, paper: str, name: str, facts: Sequence[str]) -> None:
    """Says above all panels which figure of which paper this is, by its file name, and in one
    smaller line below that what it rests on."""
    number = re.match(r"figure_(\d+[a-z]?)(_|$)", name)
    title = f"{paper}, Figure {number[1]}" if number else paper
    title, text = f"{title}: {figure.get_suptitle()}", "; ".join(facts)
    width, height = figure.get_size_inches()
    strip = TITLE_HEIGHT + CAPTION_HEIGHT * bool(text)
    total = height + strip  # room that panels do not lose
    figure.set_figheight(total)
    size = min(10, 118 * width / len(title))  # points, in which it fits
    figure.suptitle(title, fontsize=size, y=1 - 0.06 / total, va="top").set_in_layout(False)
    size = min(CAPTION_SIZE, 125 * width / max(len(text), 1))
    place = {"va": "top", "ha": "center", "color": "0.35", "fontsize": size}
    figure.text(0.5, 1 - TITLE_HEIGHT / total, text, **place).set_in_layout(False)
    figure.get_layout_engine().set(rect=(0, 0, 1, height / total))


def lay_out(figure, dpi: float) -> None:
    """Gives panels their places once and for all; savefig would draw a figure for it each time."""
    figure.set_dpi(dpi)
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine(None)


def files(item, name: str, dpi: float = 0, formats: Mapping = FORMATS) -> dict[str, bytes]:
    """File name -> a figure as PNG and PDF, or in other formats; the same data, the same bytes."""
    import matplotlib.pyplot as plt

    contents, dpi = {}, dpi or DPI
    lay_out(item, dpi)
    for ending, options in formats.items():
        file = io.BytesIO()
        item.savefig(file, format=ending, dpi=dpi, **options)
        contents[f"{name}.{ending}"] = file.getvalue()
    plt.close(item)
    return contents
