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

from plots import rates, style, tables
from plots.dinan.published import BART_RATES, BART_WIDTH, RATE_EXPONENTS
from plots.dinan.searches import (
    Point,
    Search,
    Sweep,
    bits,
    by_loss,
    exactly,
    limits,
    mapped_rate,
    model_name,
)
from plots.findings import HEADER, Finding, Printed, claimed_equal, claimed_gain, distance, number
from plots.rates import Exponent, RateSweep, exponent, rate_sweeps, seed_noise
from plots.statistics import mean_and_error

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
    return by_loss(paths)[0]


def fits(sweep: Sweep) -> dict[str, dict[int, RateSweep]]:
    """Strategy -> width -> lowest losses against mapped rates, with the optimum's parabola."""
    noise, _ = seed_noise(sweep.rows)
    return {
        strategy: rate_sweeps(sweep.rows[sweep.rows[tables.CURVE] == strategy], noise)
        for strategy in STRATEGIES
    }


def degradation(search: Search | None, fit: RateSweep | None) -> list[float]:
    """What a quarter of the optimal rate (the parabola's, where there is one) costs in nats against
    the best point, by seed; empty where it was not run."""
    if search is None or fit is None:
        return []
    there = search.losses_at(fit.best.grid_value)
    lower = search.losses_at(fit.best.value / LOWERED)
    return [lower[seed] - there[seed] for seed in sorted(there.keys() & lower.keys())]


# Findings


def findings(sweep: Sweep) -> list[Printed]:
    """Optima and what surrounds them at every width, then what connects the widths."""
    spread, n = seed_noise(sweep.rows)
    noise = f"{spread:.4f} nats over seeds (standard deviation, {n} points)" if n else "not known"
    fitted = fits(sweep)
    result: list[Printed] = [
        "a run's loss is the lowest of its evaluations, points are means over seeds, ± standard "
        f"errors; one run near optima varies by: {noise}",
        "mapped: lr for standard, n^(-3/2) lr for neural-tangent; lr* is the best of the grid, "
        "or the lowest point of the parabola around it",
        HEADER,
    ]
    for width in sweep.widths:
        found = sweep.at(width)
        for strategy in STRATEGIES:
            if strategy in found:
                result += _of_search(found[strategy], fitted[strategy].get(width))
            else:
                name = f"{style.STRATEGIES[strategy]}, n = {width}: lr*"
                result.append(Finding(name, "not measured"))
        result += [_match(fitted, width), _robustness(found, fitted, width)]
    laws = {strategy: exponent(fitted[strategy]) for strategy in STRATEGIES}
    result += [_exponent(strategy, law) for strategy, law in laws.items()]
    return [*result, _own_exponent(laws["neural_tangent"]), *sweep.failed]


def _of_search(search: Search, fit: RateSweep | None) -> list[Finding]:
    if search.optimum is None or fit is None:
        return [Finding(f"{search.name}: lr*", "every run diverged"), _skipped(search)]
    return [_optimum(search), _vertex(search, fit), _minimum(search), _lowered(search, fit),
            _skipped(search)]


def _optimum(search: Search) -> Finding:
    """The best rate of the grid."""
    best, n = search.optimum, len(search.points)
    edge = "" if best not in (search.points[0], search.points[-1]) else ", at the edge"
    measured = f"{best.rate:.3g}, mapped {best.mapped:.3g} (of {n} rate{'s' * (n != 1)}{edge})"
    name = f"{search.name}: lr* of the grid"
    if search.width != BART_WIDTH:
        return Finding(name, measured)
    theirs = BART_RATES[search.strategy]
    octaves = math.log2(best.rate / theirs)
    return Finding(name, measured, f"{theirs:g}", f"lr x 2^{octaves:+.1f}")


def _vertex(search: Search, fit: RateSweep) -> Finding:
    """The lowest point of the parabola around it, in mapped units."""
    name, best = f"{search.name}: lr* by a parabola, mapped", fit.best
    if not best.inside:
        why = "the best rate is at the edge" if best.at_edge else "runs diverge beside the best"
        return Finding(name, f"no parabola: {why}")
    error = f"{best.error:.2f}" if math.isfinite(best.error) else "?"
    measured = f"{best.value:.3g}, ± {error} octaves ({best.n} rates)"
    if search.width != BART_WIDTH:
        return Finding(name, measured)
    theirs = mapped_rate(search.strategy, BART_RATES[search.strategy], BART_WIDTH)
    octaves = math.log2(best.value / theirs)
    return Finding(name, measured, f"{theirs:.3g} (grid)", f"lr x 2^{octaves:+.2f}")


def _minimum(search: Search) -> Finding:
    best = search.optimum
    value, error = mean_and_error([run.best for run in best.runs])
    measured = (f"{number(value, error, 4, '')} nats, "
                f"{number(bits(value), bits(error), 4, '')} bits (n = {len(best.runs)})")
    return Finding(f"{search.name}: lowest loss", measured)


def _lowered(search: Search, fit: RateSweep) -> Finding:
    values = degradation(search, fit)
    measured = number(*mean_and_error(values), 4)
    return Finding(f"{search.name}: loss at lr* / {LOWERED} minus lowest (nats)",
                   f"{measured} (n = {len(values)})" if values else measured)


def _skipped(search: Search) -> Finding:
    """Steps skipped per run, by falling rate."""
    name = f"{search.name}: overflowing steps per run, by lr"
    counts = {
        point: [run.skipped for run in point.runs if run.skipped is not None]
        for point in reversed(search.points)
    }
    means = {point: sum(own) / len(own) for point, own in counts.items() if own}
    if not means:
        return Finding(name, "not recorded", "at the higher lr")
    hit = [f"{point.rate:.3g}: {value:.3g}" for point, value in means.items() if value]
    others = ["others none"] if 0 < len(hit) < len(means) else []
    return Finding(name, ", ".join(hit + others) or "none", "at the higher lr",
                   _at_higher_rates(search, means))


def _at_higher_rates(search: Search, skipped: Mapping[Point, float]) -> str:
    """Whether rates above the optimum skip more steps per run than the others."""
    if not any(skipped.values()):
        return "none here"
    if search.optimum is None:
        return ""
    higher = [value for p, value in skipped.items() if p.rate > search.optimum.rate]
    others = [value for p, value in skipped.items() if p.rate <= search.optimum.rate]
    if not higher or not others:
        return "not measured"
    return "agrees" if mean_and_error(higher)[0] > mean_and_error(others)[0] else "disagrees"


def _match(fitted: Mapping[str, Mapping[int, RateSweep]], width: int) -> Finding:
    """How far apart the two strategies' optima lie once they are mapped."""
    name = f"n = {width}: mapped lr*, neural-tangent / standard (octaves)"
    both = [fitted[strategy].get(width) for strategy in ("neural_tangent", "standard")]
    if None in both:
        return Finding(name, "not measured", "0", "not measured")
    theirs, ours = (fit.best for fit in both)
    gap, error = math.log2(theirs.value / ours.value), math.hypot(theirs.error, ours.error)
    within = abs(gap) <= GRID_STEP / 2  # the paper compares points of a grid
    verdict = "agrees within the paper's grid" if within else claimed_equal(gap, error)
    return Finding(name, number(gap, error, 2), "0", verdict)


def _robustness(
    found: Mapping[str, Search], fitted: Mapping[str, Mapping[int, RateSweep]], width: int
) -> Finding:
    """Whether lowering the rate costs the standard strategy more."""
    name = f"n = {width}: cost of lr* / {LOWERED}, standard - neural-tangent"
    values = [degradation(found.get(s), fitted[s].get(width)) for s in STRATEGIES]
    (first, first_error), (second, second_error) = map(mean_and_error, values)
    gap, error = first - second, math.hypot(first_error, second_error)
    return Finding(name, number(gap, error, 4), "above 0", claimed_gain(gap, error))


def _exponent(strategy: str, fit: Exponent) -> Finding:
    name = f"{style.STRATEGIES[strategy]}: exponent of the width in mapped lr*"
    if fit.law is None:
        return Finding(name, fit.text())
    power = RATE_EXPONENTS["neural_tangent"]
    verdict = distance(fit.value, fit.error, float(power))
    return Finding(name, fit.text(), f"{power} (lambda)", verdict)


def _own_exponent(fit: Exponent) -> Finding:
    """Neural-tangent's global rate is what lambda leaves to tune: it should not know the width."""
    name = "neural-tangent: exponent of the width in lr* itself"
    if fit.law is None:
        return Finding(name, fit.text())
    own = fit.value - float(RATE_EXPONENTS["neural_tangent"])
    return Finding(name, number(own, fit.error, 2), "0", distance(own, fit.error, 0.0))


# Figure 3


def rate_colors(points: Sequence[Point]) -> dict[Point, tuple[float, float, float]]:
    """Red for the highest rate, the others from black to blue as the rate falls."""
    *lower, highest = points
    last = max(len(lower) - 1, 1)
    shares = [index / last for index in range(len(lower))]
    mixed = [
        tuple(black + share * (blue - black) for black, blue in zip(BLACK, BLUE))
        for share in shares
    ]
    return {highest: RED, **dict(zip(reversed(lower), mixed))}


def draw(sweep: Sweep) -> Iterator[tuple[str, object]]:
    """Figure 3, and its optima."""
    yield "figure_3_bart_rates", _curves(sweep)
    yield "figure_3_bart_optima", _optima(sweep)


def _curves(sweep: Sweep):
    """Figure 3: a row of panels per width."""
    widths = sweep.widths
    figure, axes = style.subplots(len(widths), 2, (6.5, 3.1), sharey="row")
    figure.suptitle("searches for the learning rate\nmeans over seeds; [lowest loss ± standard "
                    "error over n seeds]; from black to blue as the rate falls, the highest red")
    for row, width in zip(axes, widths):
        found = sweep.at(width)
        lines = [point.line for search in found.values() for point in search.points]
        last = max((steps[-1] for steps, _ in lines if len(steps)), default=1.0)
        low, high = limits(
            [point.line for search in found.values() for point in search.points
             if math.isfinite(point.loss)], last
        )
        for axis, strategy in zip(row, STRATEGIES):
            axis.set_title(f"{style.STRATEGIES[strategy]}, {model_name(width)}")
            if strategy in found:
                _draw_search(axis, found[strategy], high)
            style.update_ticks(axis, 1.02 * last)
            axis.tick_params(labelleft=True)
            axis.set_ylabel(style.VALIDATION_LABEL)
            style.bits_axis(axis)
        overflow = any(run.overflows for search in found.values() for run in search.runs)
        row[0].set_ylim(low - (0.16 if overflow else 0.06) * (high - low),
                        high + 0.06 * (high - low))
    for axis in axes[-1]:
        axis.set_xlabel("updates")
    style.legend(figure, _entries(sweep))
    return figure


def _draw_search(axis, search: Search, top: float) -> None:
    """A line per rate, the optimum's thick, and overflows below the lines, a row per rate."""
    colors, handles, row = rate_colors(search.points), {}, 0
    for point in search.points:
        best = point is search.optimum
        look = {"color": colors[point], "lw": 1.9 if best else 1.0, "zorder": 3 if best else 2}
        steps, losses = point.line
        handles[point], = axis.plot(steps, losses, label=_label(point) + " *" * best, **look)
        if not math.isfinite(point.loss) and len(steps):
            axis.plot(steps[-1], min(losses[-1], top), color=colors[point], **LOST)
    for point in reversed(search.points):
        steps = sorted({step for run in point.runs for step in run.overflows or ()})
        if steps:
            height = 0.02 + 0.028 * row
            axis.plot(steps, [height] * len(steps), "|", color=colors[point], ms=4, mew=1,
                      transform=axis.get_xaxis_transform(), clip_on=False)
            row += 1
    axis.legend(
        handles=[handles[point] for point in reversed(search.points)], title=_title(search),
        loc="upper left", fontsize=6.5, title_fontsize=6.5, alignment="left", frameon=False,
        bbox_to_anchor=(1.16, 1.03), borderaxespad=0,  # right of the scale in bits
    )


def _label(point: Point) -> str:
    mapped = "" if point.mapped == point.rate else f" ({exactly(point.mapped)})"
    return f"{exactly(point.rate)}{mapped} [{point.text}]"


def _title(search: Search) -> str:
    mapped = "" if search.strategy == "standard" else r" ($n^{-3/2}$ lr)"
    return f"lr{mapped} [minimum loss, nats]"


def _entries(sweep: Sweep) -> list[tuple[str, dict]]:
    """What occurs in some panel."""
    runs = [run for search in sweep.searches.values() for run in search.runs]
    entries = [("optimum *", {"color": "black", "lw": 1.9})]
    if any(run.diverged for run in runs):
        entries.append(("diverged", {"color": "gray", **LOST}))
    if any(run.overflows for run in runs):
        entries.append(("gradient overflow", {"color": "gray", "marker": "|", "ls": "", "ms": 6,
                                              "mew": 1}))
    return entries


# Optima


def _optima(sweep: Sweep):
    """Lowest loss against the mapped rate for each strategy, then optima against width."""
    fitted, colors = fits(sweep), style.width_colors(sweep.widths)
    figure, axes = style.subplots(1, 3, (3.7, 3.2))
    note = rates.optima_note(map(exponent, fitted.values()))
    figure.suptitle(f"optima\n{rates.RATE_NOTE}; {note}; dotted: the paper's power of the width in "
                    "the mapped rate, -3/2")
    for axis, strategy in zip(axes[0], STRATEGIES):
        axis.set_title(style.STRATEGIES[strategy])
        rates.draw_rates(axis, fitted[strategy], colors)
        axis.set_xlabel("lr" if strategy == "standard" else r"$n^{-3/2}$ lr")
    _join(axes[0][0], axes[0][1])
    axes[0][0].set_ylabel("minimum " + style.VALIDATION_LABEL)
    _draw_widths(axes[0][2], fitted, sweep.widths)
    entries = [(f"n = {width}", {"color": color, "marker": "o", "ms": 3})
               for width, color in colors.items()]
    style.legend(figure, [*entries, *style.STAR_ENTRIES])
    return figure


def _join(first, second) -> None:
    """The same rates and losses in both panels, with room for stars at the lowest."""
    limits = [(axis.get_xlim(), axis.get_ylim()) for axis in (first, second) if axis.lines]
    if limits:
        (lows, highs), (bottoms, tops) = (list(zip(*ends)) for ends in zip(*limits))
        for axis in (first, second):
            bottom = min(bottoms) - 0.05 * (max(tops) - min(bottoms))
            axis.set(xlim=(min(lows), max(highs)), ylim=(bottom, max(tops)))


def _draw_widths(axis, fitted: Mapping[str, Mapping[int, RateSweep]], widths: list[int]) -> None:
    for strategy, fit in fitted.items():
        law = exponent(fit)
        known = law.law is not None
        label = style.STRATEGIES[strategy]
        label += rf": $n^{{{law.value:.2f} \pm {law.error:.2f}}}$" if known else ""
        label += f", {law.widths} widths" if known else ""
        look = {"color": style.STRATEGY_COLORS[strategy], "label": label,
                "marker": style.STRATEGY_MARKERS[strategy]}
        if fit:
            rates.draw_optima(axis, fit, law, **look)
            power = float(RATE_EXPONENTS["neural_tangent"])
            rates.draw_published(axis, fit, power, color=look["color"])
    rates.octave_limits(axis, widths)
    axis.set_title("optimum")
    axis.set_xlabel("width n")
    axis.set_ylabel("optimal lr, mapped")
    if any(fitted.values()):
        axis.legend(fontsize=6.5, loc="lower left")
