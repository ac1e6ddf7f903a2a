"""Searches for learning rate and weight decay on vit_imagenet (Dinan et al., Part II, Figure 1).

    python -m plots dinan/vit_search [results.csv metrics.csv]

A panel per scaling strategy: top-1 validation accuracy against epoch for the first seed of every
point of the search, its optimum in black, and enlarged where they end. A second figure maps the
best accuracy of every point and marks the six neighbours that confirm the optimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from plots import style
from plots.dinan import searches, spikes
from plots.dinan.published import BULK_EXPONENTS, VIT_OPTIMA, VIT_WIDTH
from plots.dinan.searches import EPOCH, Point, Search, Sweep, enlarge_end, exactly, pair, percent
from plots.dinan.spikes import TOP1
from plots.findings import HEADER, Finding, Printed

TABLES = ("dinan/figure_1_2", "dinan/figure_1_2_metrics")
# Exponents of two in (lr, wd); twice both and half both are left out (footnote 42).
NEIGHBOURS = ((1, 0), (0, 1), (1, -1), (-1, 1), (0, -1), (-1, 0))
COLORS = style.PALETTE[:-1]  # of learning rates; black is the optimum's
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
# Maps saturate this many points below the best, so that one bad corner does not wash out the rest.
SPAN = 5.0
LOST = (0.6, 0.6, 0.6)  # the colour of runs that diverged
read = searches.by_accuracy


@dataclass(frozen=True)
class Confirmation:
    """Whether the six neighbours of an optimum were run and none is better."""

    missing: tuple[tuple[float, float], ...]
    better: tuple[Point, ...]
    tied: int  # neighbours with the same accuracy and no lower loss
    elsewhere: tuple[Point, ...]  # better points that are no neighbours

    @property
    def confirmed(self) -> bool:
        """Whether the optimum stands."""
        return not self.missing and not self.better

    @property
    def measured(self) -> str:
        """How many neighbours there are and how many of them are better."""
        run = len(NEIGHBOURS) - len(self.missing)
        ties = f", {self.tied} tied and decided by the loss" if self.tied else ""
        return f"{run} of {len(NEIGHBOURS)} run, {len(self.better) or 'none'} better{ties}"

    @property
    def verdict(self) -> str:
        """Confirmed, or what stands against it."""
        against = [
            *(
                [f"not run: {', '.join(pair(*place) for place in self.missing)}"]
                if self.missing
                else []
            ),
            *([f"better: {', '.join(point.pair for point in self.better)}"] if self.better else []),
        ]
        word = f"not confirmed, {'; '.join(against)}" if against else "confirmed"
        far = ", ".join(point.pair for point in self.elsewhere)
        return f"{word}; better elsewhere: {far}" if far else word


def neighbours(point: Point) -> list[tuple[float, float]]:
    """The six places around a point, twice or half its rate and decay."""
    return [(point.rate * 2.0**rate, point.decay * 2.0**decay) for rate, decay in NEIGHBOURS]


def confirm(search: Search) -> Confirmation:
    """The optimum against its neighbours and against all others, by their first seeds."""
    optimum = search.optimum
    around = {place: search.at(*place) for place in neighbours(optimum)}
    there = [point for point in around.values() if point is not None]
    better = [point for point in search.points if point.score > optimum.score]
    return Confirmation(
        missing=tuple(place for place, point in around.items() if point is None),
        better=tuple(point for point in better if point in there),
        tied=sum(p.score[0] == optimum.score[0] and p not in better for p in there),
        elsewhere=tuple(point for point in better if point not in there),
    )


def bulk_rate(strategy: str, rate: float, width: int) -> float:
    """Effective learning rate of the matrices in the blocks: lr times their factor."""
    return rate * width ** float(BULK_EXPONENTS[strategy])


def findings(sweep: Sweep) -> list[Printed]:
    """Optimum, confirmation, spikes and divergence of every strategy."""
    found = sweep.by_strategy
    text: list[Printed] = [
        "one run per point, its first seed; best top-1 over training; equal accuracies are "
        "decided by the final loss",
        spikes.NOTE,
        HEADER,
    ]
    for strategy, label in style.STRATEGIES.items():
        if strategy not in found:
            text.append(Finding(f"{label}: optimum (lr*, wd*)", "not measured"))
            continue
        search, there, state = found[strategy], VIT_OPTIMA.get(strategy), confirm(found[strategy])
        optimum, n, runs = search.optimum, len(search.points), search.firsts
        beside, product = ("in a figure only",), ""
        if there:
            octaves = (math.log2(optimum.rate / there[0]), math.log2(optimum.decay / there[1]))
            beside = pair(*there), "lr x 2^{:+.1f}, wd x 2^{:+.1f}".format(*octaves)
            product = f"{there[0] * there[1]:.3g}"
        text += [
            Finding(
                f"{label}: optimum (lr*, wd*) [best top-1, %]",
                f"{optimum.label(optimum.runs[:1])} of {n} point{'s' * (n != 1)}",
                *beside,
            ),
            Finding(
                f"{label}: neighbours of the optimum", state.measured, "all lower", state.verdict
            ),
            Finding(f"{label}: lr* wd*", f"{optimum.rate * optimum.decay:.3g}", product),
        ]
        if search.width is not None:
            rate = bulk_rate(strategy, optimum.rate, search.width)
            theirs = f"{bulk_rate(strategy, there[0], VIT_WIDTH):.3g}" if there else ""
            measured = f"{rate:.3g} at n = {search.width}"
            text.append(Finding(f"{label}: rate of the blocks' matrices", measured, theirs))
        for kind, counts in zip(
            ("accuracy", "training loss"),
            zip(*(run.spikes for run in runs), strict=True),
            strict=False,
        ):
            measured = f"{sum(counts)} in {sum(map(bool, counts))} of {len(counts)} runs"
            text.append(Finding(f"{label}: spikes in {kind}", measured))
        diverged = sum(run.diverged for run in runs)
        text.append(Finding(f"{label}: diverged", f"{diverged} of {len(runs)} runs"))
    return [*text, *sweep.failed]


def draw(sweep: Sweep) -> Iterator[tuple[str, object]]:
    """Figure 1, and the map of its optima."""
    yield "figure_1_vit_search", _curves(sweep.by_strategy)
    yield "figure_1_vit_optima", _map(sweep.by_strategy)


def _curves(found: Mapping[str, Search]):
    """Figure 1: accuracy against epoch for all points."""
    figure, axes = style.subplots(2, 2, (5.6, 3.3), sharex=True, sharey=True)
    figure.suptitle(
        "searches for learning rate and weight decay\n"
        f"first seed ({_seeds(found)}) of every point; colours: lr, dashes: wd, "
        "*: optimum; the last epochs are enlarged"
    )
    for axis, (strategy, label) in zip(axes.flat, style.STRATEGIES.items(), strict=True):
        axis.set_title(label)
        if strategy in found:
            _draw_curves(axis, found[strategy])
        else:
            style.empty(axis, "not run")
    style.label_grid(axes, x="epoch", y=["top-1 validation accuracy (%)"] * 2)
    return figure


def _seeds(found: Mapping[str, Search]) -> str:
    return ", ".join(map(str, sorted({run.seed for own in found.values() for run in own.firsts})))


def _draw_curves(axis, search: Search) -> None:
    """One line per point, the optimum's last and thick; colours tell learning rates apart, dashes
    weight decays; a cross ends a run that diverged."""
    rates = sorted({point.rate for point in search.points})
    decays = sorted({point.decay for point in search.points}, reverse=True)
    handles = {}
    for point in sorted(search.points, key=lambda point: point == search.optimum):
        best = point == search.optimum
        look = (
            {"color": "black", "lw": 1.8}
            if best
            else {
                "color": COLORS[rates.index(point.rate) % len(COLORS)],
                "lw": 1.0,
                "ls": DASHES[decays.index(point.decay) % len(DASHES)],
            }
        )
        if point.runs[0].diverged:
            look |= {"marker": "X", "ms": 6, "markevery": [-1]}
        line = point.runs[0].accuracy
        label = f"{point.shown} [{percent(point.runs[0])}]" + " *" * best
        (handles[point],) = axis.plot(line[EPOCH], 100 * line[TOP1], label=label, **look)
    enlarge_end(axis)
    axis.legend(
        handles=[handles[point] for point in search.points],
        title="(lr, wd) [best top-1, %]",
        loc="upper left",
        ncols=math.ceil(len(handles) / 22),
        bbox_to_anchor=(1.01, 1.03),
        borderaxespad=0,
        frameon=False,
        fontsize=7,
        title_fontsize=7,
        alignment="left",
        handlelength=3.2,
        labelspacing=0.3,
        columnspacing=1.0,
    )


def _map(found: Mapping[str, Search]):
    """The best accuracy of every point by rate and decay, the optimum and its neighbours marked."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, axes = style.subplots(2, 2, (4.6, 3.4))
    figure.suptitle(
        "the optima and their neighbours\n"
        f"best top-1 (%) of the first seed ({_seeds(found)}) of every point"
    )
    # The points of accuracy that the colours cover: all that occur, in halves, up to SPAN.
    gaps = [
        _gap(search, point)
        for search in found.values()
        for point in search.points
        if not (point.runs[0].diverged or search.optimum.runs[0].diverged)
    ]
    span = min(SPAN, max(0.5, math.ceil(2 * max(gaps, default=0)) / 2))
    for axis, (strategy, label) in zip(axes.flat, style.STRATEGIES.items(), strict=True):
        axis.grid(False)
        if strategy in found:
            _draw_map(axis, found[strategy], span)
            state = confirm(found[strategy])
            word = "confirmed" if state.confirmed else f"not confirmed ({state.measured})"
            axis.set_title(f"{label}: {word}", fontsize=9)
        else:
            axis.set_title(label, fontsize=9)
            style.empty(axis, "not run")
    style.label_grid(axes, x="learning rate", y=["weight decay"] * 2)
    scale = ScalarMappable(Normalize(-span, 0), "viridis")
    bar = figure.colorbar(
        scale, ax=axes, extend="min" if span == SPAN else "neither", shrink=0.8, aspect=30
    )
    bar.set_label("best top-1 minus the optimum's (points)")
    box = {"marker": "s", "ms": 11, "ls": "", "mfc": "white"}
    marks = [
        ("optimum", {**box, "mec": style.VERMILION, "mew": 2.5}),
        ("neighbour", {**box, "mec": "black", "mew": 1.5}),
    ]
    if any(confirm(search).missing for search in found.values()):
        question = {"color": "black", "marker": "$?$", "ls": "", "ms": 7}
        marks.append(("neighbour, not run", question))
    if any(run.diverged for search in found.values() for run in search.firsts):
        marks.append(("diverged", {**box, "mfc": LOST, "mec": LOST}))
    style.legend(figure, marks)
    return figure


def _gap(search: Search, point: Point) -> float:
    """Points of accuracy between a point and the optimum, of their first seeds."""
    return 100 * (search.optimum.runs[0].best - point.runs[0].best)


def _draw_map(axis, search: Search, span: float) -> None:
    """A square per point in octaves, with its accuracy written in it."""
    import matplotlib
    from matplotlib.patches import Rectangle

    optimum, around = search.optimum, neighbours(search.optimum)
    beside = [search.at(*place) for place in around]
    gaps = [1.0]  # an octave, or the finest distance of two points' rates or decays if that is less
    for values in ({p.rate for p in search.points}, {p.decay for p in search.points}):
        logs = sorted(map(math.log2, values))
        gaps += [high - low for low, high in itertools.pairwise(logs) if high - low > 1e-3]
    side = min(gaps)
    # What is drawn last lies on top: edges of neighbours, then that of the optimum.
    for point in sorted(search.points, key=lambda p: (p == optimum, p in beside)):
        edge, width = ("black", 1.5) if point in beside else ("white", 0.5)
        if point == optimum:
            edge, width = style.VERMILION, 2.5
        lost, x, y = point.runs[0].diverged, math.log2(point.rate), math.log2(point.decay)
        share = 0.0
        if not lost and not optimum.runs[0].diverged:
            share = min(max(1 - _gap(search, point) / span, 0.0), 1.0)
        color = LOST if lost else matplotlib.colormaps["viridis"](share)
        axis.add_patch(
            Rectangle(
                (x - side / 2, y - side / 2),
                side,
                side,
                facecolor=color,
                edgecolor=edge,
                linewidth=width,
            )
        )
        ink = "black" if share > 0.6 or lost else "white"
        text = "div." if lost else percent(point.runs[0])
        axis.text(x, y, text, ha="center", va="center", fontsize=6, color=ink)
    missing = [place for place, point in zip(around, beside, strict=True) if point is None]
    for rate, decay in missing:
        axis.text(math.log2(rate), math.log2(decay), "?", ha="center", va="center", fontsize=9)
    places = [(p.rate, p.decay) for p in search.points] + missing
    # Ticks at the values that were run, at most eight, and room around.
    for values, along, limits in zip(
        zip(*places, strict=True),
        (axis.xaxis, axis.yaxis),
        (axis.set_xlim, axis.set_ylim),
        strict=False,
    ):
        values = sorted({f"{value:.3g}": value for value in values}.values())
        shown = values[:: math.ceil(len(values) / 8)]
        labels = [exactly(value) for value in shown]
        along.set_ticks([math.log2(value) for value in shown], labels=labels, fontsize=7)
        limits(math.log2(values[0]) - 0.6 * side, math.log2(values[-1]) + 0.6 * side)
