"""Searches for learning rate and weight decay on vit_imagenet (Dinan et al., Part II, Figure 1).

    python -m plots dinan/vit_search [results.csv metrics.csv]

A panel per scaling strategy: top-1 validation accuracy against epoch for the first seed of every
point of the search, its optimum in black, and enlarged where they end. A second figure maps the
best accuracy of every point and marks the six neighbours that confirm the optimum.
"""

import itertools
import math

import pandas as pd

from plots import style
from plots.dinan import searches, spikes
from plots.dinan.published import BULK_EXPONENTS, VIT_OPTIMA, VIT_WIDTH
from plots.dinan.searches import BEST_TOP1, Searched, exactly, pair, shown
from plots.findings import HEADER, Finding, Report
from plots.tables import CURVE, DECAY, RATE, RUN, STATUS, WIDTH

TABLES = ("dinan/figure_1_2", "dinan/figure_1_2_metrics")
ONCE = True  # of the first seed alone, which all presets have
# Exponents of two in (lr, wd); twice both and half both are left out (footnote 42).
NEIGHBOURS = ((1, 0), (0, 1), (1, -1), (-1, 1), (0, -1), (-1, 0))
COLORS = style.PALETTE[:-1]  # of learning rates; black is the optimum's
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
# Maps saturate this many points below the best, so that one bad corner does not wash out the rest.
SPAN = 5.0
LOST = (0.6, 0.6, 0.6)  # the colour of runs that diverged
read = searches.by_accuracy
RateDecay = tuple[float, float]


def strategies(searched: Searched) -> dict[str, pd.DataFrame]:
    """Strategy -> the first seed of its points, best first, the optimum's marked."""
    points_of = {}
    for strategy in style.STRATEGIES:
        rows = searched.rows[searched.rows[CURVE] == strategy]
        if len(rows):
            best, points = searches.optimum(rows), searches.firsts(rows)
            points_of[strategy] = points.assign(chosen=points[RUN].isin(best[RUN]))
    return points_of


def neighbours(points: pd.DataFrame) -> dict[RateDecay, pd.DataFrame]:
    """The six places around the optimum, at twice or half its rate and decay, with their runs."""
    best = points[points["chosen"]].iloc[0]
    places = [(best[RATE] * 2.0**rate, best[DECAY] * 2.0**decay) for rate, decay in NEIGHBOURS]
    return {place: searches.at(points, *place) for place in places}


def confirmed(points: pd.DataFrame) -> tuple[str, str]:
    """(how many of the neighbours were run and are better, whether that confirms the optimum)."""
    best, around = points[points["chosen"]].iloc[0], neighbours(points)
    before = points.iloc[: int(points["chosen"].to_numpy().argmax())]
    before = before[(before["top"] > best["top"]) | (before["last"] < best["last"])]
    beside = set(itertools.chain.from_iterable(one[RUN] for one in around.values()))
    better = before[before[RUN].isin(beside)]
    missing = [pair(*place) for place, one in around.items() if one.empty]
    run = len(NEIGHBOURS) - len(missing)
    against = [f"not run: {', '.join(missing)}"] * bool(missing)
    against += [f"better: {pair(one[RATE], one[DECAY])}" for _, one in better.iterrows()]
    word = f"not confirmed, {'; '.join(against)}" if against else "confirmed"
    far = [pair(one[RATE], one[DECAY]) for _, one in before[~before[RUN].isin(beside)].iterrows()]
    word += f"; better elsewhere: {', '.join(far)}" if far else ""
    return f"{run} of {len(NEIGHBOURS)} run, {len(better) or 'none'} better", word


def findings(searched: Searched) -> Report:
    """Optimum, confirmation, spikes and divergence of every strategy."""
    yield (
        "one run per point, its first seed; best top-1 over training; equal accuracies are "
        "decided by the final loss"
    )
    yield spikes.NOTE
    yield HEADER
    for strategy, points in strategies(searched).items():
        label, there = style.STRATEGIES[strategy], VIT_OPTIMA.get(strategy)
        best = points[points["chosen"]].iloc[0]
        beside, product = ("in a figure only",), ""
        if there:
            octaves = (math.log2(best[RATE] / there[0]), math.log2(best[DECAY] / there[1]))
            beside = pair(*there), "lr x 2^{:+.1f}, wd x 2^{:+.1f}".format(*octaves)
            product = f"{there[0] * there[1]:.3g}"
        measured = f"{pair(best[RATE], best[DECAY])} [{100 * best[BEST_TOP1]:.2f}] of {len(points)}"
        around, word = confirmed(points)
        yield Finding(f"{label}: optimum (lr*, wd*) [best top-1, %]", f"{measured} points", *beside)
        yield Finding(f"{label}: neighbours of the optimum", around, "all lower", word)
        yield Finding(f"{label}: lr* wd*", f"{best[RATE] * best[DECAY]:.3g}", product)
        if WIDTH in points and points[WIDTH].nunique() == 1:
            power, width = float(BULK_EXPONENTS[strategy]), int(best[WIDTH])
            theirs = f"{there[0] * VIT_WIDTH**power:.3g}" if there else ""
            measured = f"{best[RATE] * width**power:.3g} at n = {width}"
            yield Finding(f"{label}: rate of the blocks' matrices", measured, theirs)
        counts = [list(map(len, spikes.of_run(searched.log(run)))) for run in points[RUN]]
        for kind, own in zip(("accuracy", "training loss"), zip(*counts, strict=True), strict=True):
            measured = f"{sum(own)} in {sum(map(bool, own))} of {len(own)} runs"
            yield Finding(f"{label}: spikes in {kind}", measured)
        lost = (points[STATUS] == "diverged").sum()
        yield Finding(f"{label}: diverged", f"{lost} of {len(points)} runs")
    yield from searched.failed


def draw(searched: Searched) -> style.Drawn:
    """Figure 1, and the map of its optima."""
    points_of = strategies(searched)
    yield "figure_1_vit_search", _curves(searched, points_of)
    yield "figure_1_vit_optima", _map(points_of)


def _curves(searched: Searched, points_of: dict[str, pd.DataFrame]):
    """Figure 1; the optimum's line is thick, and a cross ends a run that diverged."""
    title = "searches for learning rate and weight decay; colours: lr, dashes: wd"
    figure, axes = style.subplots(title, 2, 2, (5.6, 3.3), sharex=True, sharey=True)
    for axis, (strategy, label) in zip(axes.flat, style.STRATEGIES.items(), strict=True):
        axis.set_title(label)
        if strategy not in points_of:
            style.empty(axis, "not run")
            continue
        points = points_of[strategy]
        rates, decays = sorted(points[RATE].unique()), sorted(points[DECAY].unique())[::-1]
        handles = {}
        for _, point in points.sort_values("chosen", kind="stable").iterrows():
            look = {"color": "black", "lw": 1.8}
            if not point["chosen"]:
                color = COLORS[rates.index(point[RATE]) % len(COLORS)]
                dash = DASHES[decays.index(point[DECAY]) % len(DASHES)]
                look = {"color": color, "lw": 1.0, "ls": dash}
            if point[STATUS] == "diverged":
                look |= {"marker": "X", "ms": 6, "markevery": [-1]}
            text = "diverged" if point[STATUS] == "diverged" else f"{100 * point[BEST_TOP1]:.2f}"
            name = f"{shown(point[RATE], point[DECAY])} [{text}]" + " *" * point["chosen"]
            line = searches.accuracy(searched, point[RUN])
            (handles[point[RUN]],) = axis.plot(line.index, line, label=name, **look)
        searches.enlarge_end(axis)
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.03), "borderaxespad": 0}
        size = {"fontsize": 7, "title_fontsize": 7, "labelspacing": 0.3, "handlelength": 3.2}
        shape = {"ncols": math.ceil(len(handles) / 22), "frameon": False, "alignment": "left"}
        shape |= {"handles": [handles[run] for run in points[RUN]], **place, **size}
        axis.legend(title="(lr, wd) [best top-1, %]", **shape)
    style.label_grid(axes, x="epoch", y=["top-1 validation accuracy (%)"] * 2)
    return figure


def _map(points_of: dict[str, pd.DataFrame]):
    """The best accuracy of every point by rate and decay, the optimum and its neighbours marked."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    title = "the optima and their neighbours, best top-1 (%)"
    figure, axes = style.subplots(title, 2, 2, (4.6, 3.4))
    top = max(100 * points["top"].max() for points in points_of.values())
    for axis, (strategy, label) in zip(axes.flat, style.STRATEGIES.items(), strict=True):
        axis.grid(False)
        axis.set_title(label, fontsize=9)
        if strategy in points_of:
            _draw_map(axis, points_of[strategy], top)
            axis.set_title(f"{label}: {confirmed(points_of[strategy])[1]}", fontsize=9)
        else:
            style.empty(axis, "not run")
    style.label_grid(axes, x="learning rate", y=["weight decay"] * 2)
    scale = ScalarMappable(Normalize(top - SPAN, top), "viridis")
    bar = figure.colorbar(scale, ax=axes, extend="min", shrink=0.8, aspect=30)
    bar.set_label("best top-1 (%)")
    box = {"marker": "s", "ms": 11, "ls": "", "mfc": "white"}
    marks = [
        ("optimum", {**box, "mec": style.VERMILION, "mew": 2.5}),
        ("neighbour", {**box, "mec": "black", "mew": 1.5}),
        ("diverged", {**box, "mfc": LOST, "mec": LOST}),
        ("neighbour, not run", {"color": "black", "marker": "$?$", "ls": "", "ms": 7}),
    ]
    style.legend(figure, marks)
    return figure


def _draw_map(axis, points: pd.DataFrame, top: float) -> None:
    """A square per point in octaves, with its accuracy in it; panels share their colours."""
    import matplotlib
    from matplotlib.patches import Rectangle

    around = neighbours(points)
    beside = set(itertools.chain.from_iterable(one[RUN] for one in around.values()))
    gaps = [1.0]  # an octave, or the finest distance of two points' rates or decays if that is less
    for column in (RATE, DECAY):
        logs = sorted(map(math.log2, points[column].unique()))
        gaps += [high - low for low, high in itertools.pairwise(logs) if high - low > 1e-3]
    side = min(gaps)
    # What is drawn last lies on top: edges of neighbours, then that of the optimum.
    order = points.assign(beside=points[RUN].isin(beside)).sort_values(["chosen", "beside"])
    for _, point in order.iterrows():
        edge, width = ("black", 1.5) if point["beside"] else ("white", 0.5)
        if point["chosen"]:
            edge, width = style.VERMILION, 2.5
        lost, x, y = point[STATUS] == "diverged", math.log2(point[RATE]), math.log2(point[DECAY])
        share = 0.0 if lost else min(max(1 - (top - 100 * point["top"]) / SPAN, 0.0), 1.0)
        face = LOST if lost else matplotlib.colormaps["viridis"](share)
        look = {"facecolor": face, "edgecolor": edge, "linewidth": width}
        axis.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, **look))
        ink = "black" if share > 0.6 or lost else "white"
        text = "div." if lost else f"{100 * point['top']:.2f}"
        axis.text(x, y, text, ha="center", va="center", fontsize=6, color=ink)
    missing = [place for place, one in around.items() if one.empty]
    for rate, decay in missing:
        axis.text(math.log2(rate), math.log2(decay), "?", ha="center", va="center", fontsize=9)
    # Ticks at the values that were run, at most eight, and room around.
    ends = ((axis.xaxis, axis.set_xlim), (axis.yaxis, axis.set_ylim))
    for index, (column, (along, limit)) in enumerate(zip((RATE, DECAY), ends, strict=True)):
        values = [*points[column], *(place[index] for place in missing)]
        values = sorted({f"{value:.3g}": value for value in values}.values())
        ticks = values[:: math.ceil(len(values) / 8)]
        along.set_ticks([*map(math.log2, ticks)], labels=[*map(exactly, ticks)], fontsize=7)
        limit(math.log2(values[0]) - 0.6 * side, math.log2(values[-1]) + 0.6 * side)
