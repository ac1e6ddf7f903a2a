"""The figures of the check, RMS against size for every module, and of the transfer of a rate."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from param_groups.check.measuring import INPUT, Coordinate, pooled
from param_groups.check.slopes import BAD, UNCLEAR, worst
from param_groups.check.theory import EXCEPTION, OK
from param_groups.check.transfer import Answer
from param_groups.check.written import write

ACROSS = 5
DRAWN = ("init", "change")
COLORS = dict.fromkeys(BAD, "#d55e00") | {UNCLEAR: "#e69f00", EXCEPTION: "#0072b2", OK: "black"}


def draw(points: Sequence[Coordinate], result: Mapping[str, Any], path: Path) -> None:
    """A panel per module (of repeated blocks the worst), a line per step; dashed: what theory
    predicts for the first steps, through the line's first point."""
    words: dict[str, list[str]] = {}
    predictions: dict[tuple[str, str, int], float | None] = {}
    for slope in result["slopes"]:
        if slope["quantity"] in DRAWN and not (INPUT in slope["name"] and slope["verdict"] == OK):
            words.setdefault(slope["name"], []).append(slope["verdict"])
            key = (slope["quantity"], slope["name"], slope["step"])
            predictions[key] = slope["predicted"]
    panels: dict[str, tuple[str, str]] = {}
    for name, of_steps in words.items():
        word, known = worst(of_steps), panels.get(pooled(name))
        if known is None or worst([word, known[1]]) != known[1]:
            panels[pooled(name)] = name, word
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(2.6 * across, 2.3 * down + 0.7), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    steps = max(point.step for point in points)
    shades = matplotlib.colormaps["viridis"].resampled(steps + 1)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, word) in zip(axes.flat, panels.values(), strict=False):
        for (quantity, step), line in _means(points, name).items():
            color = "black" if quantity == "init" else shades(step - 1)
            label = "at initialisation" if quantity == "init" else f"change, step {step}"
            axis.plot([*line], [*line.values()], "o-", ms=3, lw=1.2, color=color, label=label)
            predicted = predictions[quantity, name, step]
            if predicted is not None:
                size, value = next(iter(line.items()))
                law = [value * (n / size) ** predicted for n in line]
                axis.plot([*line], law, "--", lw=0.9, color=color)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.tick_params(labelsize=6)
        title = f"{name.replace(' along', chr(10) + 'along')}\n{word}"
        axis.set_title(title, fontsize=7, color=COLORS.get(word, "dimgray"))
    for row in axes:
        row[0].set_ylabel("RMS", fontsize=7)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="outside lower center", ncols=len(labels))
    rule = result["prescription"]
    keys = ("name", "parameterization", "strategy", "optimizer", "alignment")
    origin = ", ".join(str(rule[key]) for key in keys if isinstance(rule.get(key), str))
    figure.suptitle(f"coordinate check of {result['name']}: {origin}", fontsize=9)
    _save(figure, path)


def _means(points: Sequence[Coordinate], name: str) -> dict[tuple[str, int], dict[int, float]]:
    """(quantity, step) -> size -> geometric mean over seeds of what can be drawn on log axes."""
    logs: dict[tuple[str, int], dict[int, list[float]]] = {}
    for point in points:
        if point.name == name and point.quantity in DRAWN and 0 < point.rms < math.inf:
            by_size = logs.setdefault((point.quantity, point.step), {})
            by_size.setdefault(point.width, []).append(math.log(point.rms))
    return {
        key: {n: math.exp(sum(values) / len(values)) for n, values in sorted(by_size.items())}
        for key, by_size in logs.items()
    }


def draw_transfer(answer: Answer, path: Path) -> None:
    """Loss against rate, a line per width, and its best rate; below, best rates against width."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    shades = matplotlib.colormaps["viridis"].resampled(len(answer.at) + 1)
    for number, one in enumerate(answer.at):
        line = {rate: loss for rate, loss in one.losses.items() if math.isfinite(loss)}
        losses.plot([*line], [*line.values()], "o-", ms=3, color=shades(number), label=one.width)
        if one.best is None:
            continue
        losses.axvline(one.best.value, color=shades(number), ls=":", lw=0.9)
        low, high = (one.best.value * 2.0**side for side in (-one.best.error, one.best.error))
        bar = [[one.best.value - low], [high - one.best.value]] if math.isfinite(high) else None
        full = "none" if one.best.at_edge else shades(number)  # hollow: beyond the rates tried
        rates.errorbar(
            one.width, one.best.value, bar, fmt="o", color=shades(number), mfc=full, capsize=3
        )
    if answer.power is not None:
        widths = [one.width for one in answer.at]
        rates.plot(widths, [answer.power(width) for width in widths], "--", lw=0.9, color="black")
    losses.legend(title="width", fontsize=7)
    ends = [loss for one in answer.at for loss in one.losses.values() if math.isfinite(loss)]
    losses.set(xlabel="learning rate", ylabel="loss of the last tenth")
    if ends:  # what lies far above the best decides nothing
        losses.set_ylim(0.98 * min(ends), min(1.02 * max(ends), 1.5 * min(ends)))
    rates.set(xlabel="width", ylabel="best learning rate")
    for axes in (losses, rates):
        axes.set_xscale("log", base=2)
        axes.tick_params(labelsize=7)
    rates.set_yscale("log", base=2)
    figure.suptitle(f"the best rate: {answer.verdict}", fontsize=10)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write(path, content.getvalue())
