"""Searches for the learning rate on bart_span_denoise (Dinan et al., Part II, Figure 3).

    python -m plots dinan/bart_rates [results.csv metrics.csv]

Validation loss against updates for every learning rate, standard on the left and neural-tangent on
the right, a row per width; steps that were skipped because the gradient overflowed are marked. A
second figure has the lowest loss against the mapped rate, and the optimal one against width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from plots import panels, rates, style, tables
from plots.dinan import searches
from plots.dinan.published import BART_RATES, BART_WIDTH, RATE_EXPONENTS
from plots.dinan.searches import Point, Search, Sweep, bits, exactly, mapped_rate, model_name
from plots.findings import HEADER, UNKNOWN, Estimate, Finding, Printed
from plots.rates import RateSweep, exponent
from plots.statistics import average, differences, mean

TABLES = ("dinan/figure_3_4", "dinan/figure_3_4_metrics")
STRATEGIES = tuple(RATE_EXPONENTS)
# How far the rate is lowered to see what that costs: two steps of the paper's grid.
LOWERED = 4
GRID_STEP = 1.0  # octaves
RED, BLACK, BLUE = (0.84, 0.15, 0.12), (0.0, 0.0, 0.0), (0.25, 0.60, 1.0)
LOST = {"marker": "X", "ms": 6, "ls": "", "zorder": 4}


def read(paths: Sequence[Path]) -> Sweep:
    """Both tables of one sweep, in any order."""
    tables.expect(paths, "results.csv", "metrics.csv")
    return searches.by_loss(paths)[0]


def fits(sweep: Sweep) -> dict[str, dict[int, RateSweep]]:
    """Strategy -> width -> lowest losses against mapped rates, with the optimum's parabola."""
    return rates.curve_sweeps(sweep.rows, STRATEGIES)


def degradation(search: Search | None, fit: RateSweep | None) -> Estimate:
    """What a quarter of the optimal rate (the parabola's, where there is one) costs in nats against
    the best one as it is judged, the mean over seeds; NaN where it was not run."""
    if search is None or fit is None:
        return UNKNOWN
    there = {run.seed: run.best for run in search.judged}
    lower = search.losses_at(fit.best.value / LOWERED)
    return mean(differences(lower, there))


# Findings


def findings(sweep: Sweep) -> list[Printed]:
    """Optima and what surrounds them at every width, then what connects the widths."""
    fitted = fits(sweep)
    result: list[Printed] = [
        "a run's loss is the lowest of its evaluations, points are means over seeds, ± standard "
        "errors",
        rates.noise_line(sweep.rows, "both strategies", "n"),
        "mapped: lr for standard, n^(-3/2) lr for neural-tangent; lr* is the best of the grid, "
        "or the lowest point of the parabola around it",
        HEADER,
    ]
    for width in sweep.widths:
        found = sweep.at(width)
        for strategy in STRATEGIES:
            name = f"{style.STRATEGIES[strategy]}, n = {width}: "
            search, fit = found.get(strategy), fitted[strategy].get(width)
            if search is None:
                result.append(Finding(name + "lr*", "not measured"))
            elif search.optimum is None or fit is None:
                result += [Finding(name + "lr*", "every run diverged"), _skipped(search, name)]
            else:
                result += [*_optimum(search, fit, name), _skipped(search, name)]
        result += _between(found, {s: fitted[s].get(width) for s in STRATEGIES}, width)
    return [*result, *_exponents(fitted), *sweep.failed]


def _optimum(search: Search, fit: RateSweep, name: str) -> list[Finding]:
    """The best rate of the grid, the lowest point of the parabola around it in mapped units, the
    loss there, and what a lower rate costs."""
    best, vertex, n = search.optimum, fit.best, len(search.points)
    edge = "" if best not in (search.points[0], search.points[-1]) else ", at the edge"
    grid = f"{best.rate:.3g}, mapped {best.mapped:.3g} (of {n} rate{'s' * (n != 1)}{edge})"
    error = f"{vertex.error:.2f}" if math.isfinite(vertex.error) else "?"
    parabola = f"{vertex.value:.3g}, ± {error} octaves ({vertex.n} rates)"
    beside: list[tuple[str, ...]] = [(), ()]
    if search.width == BART_WIDTH:
        theirs = BART_RATES[search.strategy]
        there = mapped_rate(search.strategy, theirs, BART_WIDTH)
        beside = [
            (f"{theirs:g}", f"lr x 2^{math.log2(best.rate / theirs):+.1f}"),
            (f"{there:.3g} (grid)", f"lr x 2^{math.log2(vertex.value / there):+.2f}"),
        ]
    if not vertex.inside:
        why = "the best rate is at the edge" if vertex.at_edge else "runs diverge beside the best"
        parabola, beside[1] = f"no parabola: {why}", ()
    loss = average([run.best for run in search.judged])
    in_bits = Estimate(bits(loss.value), bits(loss.error))
    return [
        Finding(name + "lr* of the grid", grid, *beside[0]),
        Finding(name + "lr* by a parabola, mapped", parabola, *beside[1]),
        Finding(
            name + "lowest loss",
            f"{loss.text(4, '')} nats, {in_bits.text(4, '')} bits (n = {len(search.judged)})",
        ),
        Finding(
            name + f"loss at lr* / {LOWERED} minus lowest (nats)", degradation(search, fit).text(4)
        ),
    ]


def _skipped(search: Search, name: str) -> Finding:
    """Steps skipped per run, by falling rate, and whether rates above the optimum skip more than
    the others."""
    name += "overflowing steps per run, by lr"
    counts = {
        point: [run.skipped for run in point.runs if run.skipped is not None]
        for point in reversed(search.points)
    }
    means = {point: sum(own) / len(own) for point, own in counts.items() if own}
    if not means:
        return Finding(name, "not recorded", "at the higher lr")
    hit = [f"{point.rate:.3g}: {value:.3g}" for point, value in means.items() if value]
    others = ["others none"] if 0 < len(hit) < len(means) else []
    verdict = "" if hit else "none here"
    if hit and search.optimum is not None:
        above, below = (
            [
                value
                for point, value in means.items()
                if (point.rate > search.optimum.rate) == higher
            ]
            for higher in (True, False)
        )
        verdict = "not measured"
        if above and below:
            more, less = (mean(dict(enumerate(own))) for own in (above, below))
            verdict = (more - less).claimed_gain()
    return Finding(name, ", ".join(hit + others) or "none", "at the higher lr", verdict)


def _between(
    found: Mapping[str, Search], fitted: Mapping[str, RateSweep | None], width: int
) -> list[Finding]:
    """How far apart the two strategies' optima lie once they are mapped, and whether lowering the
    rate costs the standard strategy more."""
    name = f"n = {width}: mapped lr*, neural-tangent / standard (octaves)"
    both = [fitted[strategy] for strategy in ("neural_tangent", "standard")]
    match = Finding(name, "not measured", "0", "not measured")
    if None not in both:
        first, second = (Estimate(math.log2(fit.best.value), fit.best.error) for fit in both)
        gap = first - second
        # The paper compares points of a grid; errors longer than its cell do not.
        within = abs(gap.value) <= GRID_STEP / 2 and gap.error <= GRID_STEP / 2
        verdict = "agrees within the paper's grid" if within else gap.claimed_equal()
        if any(fit.best.at_edge for fit in both):
            verdict = "undecided: at an edge"
        match = Finding(name, gap.text(2), "0", verdict, gap)
    high, low = (
        degradation(found.get(strategy), fitted[strategy])
        for strategy in ("standard", "neural_tangent")
    )
    more = high - low
    name = f"n = {width}: cost of lr* / {LOWERED}, standard - neural-tangent"
    return [match, Finding(name, more.text(4), "above 0", more.claimed_gain())]


def _exponents(fitted: Mapping[str, Mapping[int, RateSweep]]) -> list[Finding]:
    """The mapped optima's powers of the width; then that of neural-tangent's global rate, which is
    what lambda leaves to tune and should not know the width."""
    power, result = RATE_EXPONENTS["neural_tangent"], []
    for strategy in STRATEGIES:
        fit = exponent(fitted[strategy])
        name = f"{style.STRATEGIES[strategy]}: exponent of the width in mapped lr*"
        beside = (f"{power} (lambda)", fit.distance(float(power)), fit) if fit.law else ()
        result.append(Finding(name, fit.text(), *beside))
    fit = exponent(fitted["neural_tangent"])
    own = Estimate(fit.value - float(power), fit.error, fit.groups, fit.fitted)
    beside = (own.through_widths(), "0", own.distance(0.0), own) if fit.law else (fit.text(),)
    return [*result, Finding("neural-tangent: exponent of the width in lr* itself", *beside)]


# Figure 3


def rate_colors(points: Sequence[Point]) -> dict[Point, tuple[float, float, float]]:
    """Red for the highest rate, the others from black to blue as the rate falls."""
    *lower, highest = points
    last = max(len(lower) - 1, 1)
    shares = [index / last for index in range(len(lower))]
    mixed = [
        tuple(black + share * (blue - black) for black, blue in zip(BLACK, BLUE, strict=True))
        for share in shares
    ]
    return {highest: RED, **dict(zip(reversed(lower), mixed, strict=True))}


def draw(sweep: Sweep) -> Iterator[tuple[str, object]]:
    """Figure 3, and its optima."""
    yield "figure_3_bart_rates", _curves(sweep)
    yield "figure_3_bart_optima", _optima(sweep)


def _curves(sweep: Sweep):
    """Figure 3: a row of panels per width."""
    widths = sweep.widths
    figure, axes = style.subplots(len(widths), 2, (6.5, 3.1), sharey="row")
    figure.suptitle(
        "searches for the learning rate\nmeans over seeds; [lowest loss ± standard "
        "error over n seeds]; from black to blue as the rate falls, the highest red"
    )
    for row, width in zip(axes, widths, strict=True):
        found = sweep.at(width)
        lines = [point.line for search in found.values() for point in search.points]
        last = max((steps[-1] for steps, _ in lines if len(steps)), default=1.0)
        low, high = searches.limits(
            [
                point.line
                for search in found.values()
                for point in search.points
                if math.isfinite(point.loss)
            ],
            last,
        )
        for axis, strategy in zip(row, STRATEGIES, strict=True):
            axis.set_title(f"{style.STRATEGIES[strategy]}, {model_name(width)}")
            if strategy in found:
                _draw_search(axis, found[strategy], high)
            style.update_ticks(axis, 1.02 * last)
            axis.tick_params(labelleft=True)
            axis.set_ylabel(style.VALIDATION_LABEL)
            style.bits_axis(axis)
        overflow = any(run.overflows for search in found.values() for run in search.runs)
        row[0].set_ylim(
            low - (0.16 if overflow else 0.06) * (high - low), high + 0.06 * (high - low)
        )
    style.label_grid(axes, x="updates")
    runs = [run for search in sweep.searches.values() for run in search.runs]
    entries = [("optimum *", {"color": "black", "lw": 1.9})]
    if any(run.diverged for run in runs):
        entries.append(("diverged", {"color": "gray", **LOST}))
    if any(run.overflows for run in runs):
        entries.append(
            ("gradient overflow", {"color": "gray", "marker": "|", "ls": "", "ms": 6, "mew": 1})
        )
    style.legend(figure, entries)
    return figure


def _draw_search(axis, search: Search, top: float) -> None:
    """A line per rate, the optimum's thick, and overflows below the lines, a row per rate."""
    colors, handles, row = rate_colors(search.points), {}, 0
    for point in search.points:
        best = point is search.optimum
        look = {"color": colors[point], "lw": 1.9 if best else 1.0, "zorder": 3 if best else 2}
        steps, losses = point.line
        mapped = "" if point.mapped == point.rate else f" ({exactly(point.mapped)})"
        label = f"{exactly(point.rate)}{mapped} [{point.text}]" + " *" * best
        (handles[point],) = axis.plot(steps, losses, label=label, **look)
        if not math.isfinite(point.loss) and len(steps):
            axis.plot(steps[-1], min(losses[-1], top), color=colors[point], **LOST)
    for point in reversed(search.points):
        steps = sorted({step for run in point.runs for step in run.overflows or ()})
        if steps:
            height = 0.02 + 0.028 * row
            axis.plot(
                steps,
                [height] * len(steps),
                "|",
                color=colors[point],
                ms=4,
                mew=1,
                transform=axis.get_xaxis_transform(),
                clip_on=False,
            )
            row += 1
    mapped = "" if search.strategy == "standard" else r" ($n^{-3/2}$ lr)"
    axis.legend(
        handles=[handles[point] for point in reversed(search.points)],
        title=f"lr{mapped} [minimum loss, nats]",
        loc="upper left",
        fontsize=6.5,
        title_fontsize=6.5,
        alignment="left",
        frameon=False,
        bbox_to_anchor=(1.16, 1.03),
        borderaxespad=0,  # right of the scale in bits
    )


# Optima


def _optima(sweep: Sweep):
    """Lowest loss against the mapped rate for each strategy, then optima against width."""
    fitted, colors = fits(sweep), style.width_colors(sweep.widths)
    figure, axes = style.subplots(1, 3, (3.7, 3.2))
    note = panels.optima_note(map(exponent, fitted.values()), "n")
    figure.suptitle(
        f"optima\n{panels.RATE_NOTE}; {note}; dotted: the paper's power of the width "
        "in the mapped rate, -3/2"
    )
    for axis, strategy in zip(axes[0], STRATEGIES, strict=True):
        axis.set_title(style.STRATEGIES[strategy])
        panels.draw_rates(axis, fitted[strategy], colors)
        axis.set_xlabel("lr" if strategy == "standard" else r"$n^{-3/2}$ lr")
    limits = [(axis.get_xlim(), axis.get_ylim()) for axis in axes[0][:2] if axis.lines]
    if limits:  # the same rates and losses in both panels, with room for stars at the lowest
        (lows, highs), (bottoms, tops) = (
            list(zip(*ends, strict=True)) for ends in zip(*limits, strict=False)
        )
        bottom = min(bottoms) - 0.05 * (max(tops) - min(bottoms))
        for axis in axes[0][:2]:
            axis.set(xlim=(min(lows), max(highs)), ylim=(bottom, max(tops)))
    axes[0][0].set_ylabel("minimum " + style.VALIDATION_LABEL)
    _draw_widths(axes[0][2], fitted, sweep.widths)
    style.legend(figure, [*style.width_entries(colors, "n"), *style.STAR_ENTRIES])
    return figure


def _draw_widths(axis, fitted: Mapping[str, Mapping[int, RateSweep]], widths: list[int]) -> None:
    for strategy, fit in fitted.items():
        law = exponent(fit)
        known = law.law is not None
        label = style.STRATEGIES[strategy]
        label += rf": $n^{{{law.value:.2f} \pm {law.error:.2f}}}$" if known else ""
        label += f", {law.widths} widths" if known else ""
        look = {
            "color": style.STRATEGY_COLORS[strategy],
            "label": label,
            "marker": style.STRATEGY_MARKERS[strategy],
        }
        if fit:
            panels.draw_optima(axis, fit, law, **look)
            power = float(RATE_EXPONENTS["neural_tangent"])
            panels.draw_published(axis, fit, power, color=look["color"])
    style.octave_limits(axis, widths)
    axis.set_title("optimum")
    axis.set_xlabel("width n")
    axis.set_ylabel("optimal lr, mapped")
    if any(fitted.values()):
        axis.legend(fontsize=6.5, loc="lower left")
