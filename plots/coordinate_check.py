"""The coordinate check's figure: RMS against width for every module, with the expected slopes.

    python -m plots coordinate_check TABLE

TABLE is the coordinate_check.csv that `python -m measure.coordinate_check` wrote, or its folder;
slopes and verdicts are read from the coordinate_check.json next to it.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from plots import style, tables
from plots.findings import Estimate, Finding, Printed
from plots.tables import TableError

TABLES = ()  # a check is the user's own
NAME = "coordinate_check"
COLUMNS = ("quantity", "name", "part", "step", "width", "seed", "rms")
COLUMNS_ACROSS = 5
# Worst first, with the colour of a panel's title.
VERDICTS = {
    "not finite": style.VERMILION,
    "grows": style.VERMILION,
    "shrinks": style.VERMILION,
    "unclear": style.ORANGE,
    "expected exception": style.BLUE,
    "ok": "black",
    "-": "dimgray",
}


def read(paths: Sequence[Path]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A check's points, and its slopes and settings; TableError if a file is missing or another."""
    tables.expect(paths, f"{NAME}.csv")
    path = paths[0] / f"{NAME}.csv" if paths[0].is_dir() else paths[0]
    table = tables.read(path, COLUMNS, f"{NAME}.csv", "the check")
    notes = path.with_suffix(".json")
    try:
        result = json.loads(notes.read_text(encoding="utf-8"))
        words = {slope["verdict"] for slope in result["slopes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableError(f"{notes}: no slopes of a check ({error!r}); run it again") from None
    if not words <= {*VERDICTS}:
        odd = sorted(words - {*VERDICTS})[0]
        raise TableError(f"{notes}: verdict {odd!r}; expected one of {', '.join(VERDICTS)}")
    return table, result


def findings(data: tuple[pd.DataFrame, Mapping[str, Any]]) -> list[Printed]:
    """A line per panel: the first slope that has the verdict of its title."""
    result = data[1]
    text: list[Printed] = [str(Finding("module", "slope of its RMS", "predicted", "verdict"))]
    for name, word in panels(result).items():
        slope = next(
            s
            for s in result["slopes"]
            if s["name"] == name and s["verdict"] == word and s["quantity"] != "update"
        )
        what = "initial RMS" if slope["quantity"] == "init" else f"change, step {slope['step']}"
        measured = [math.nan if slope[key] is None else slope[key] for key in ("slope", "error")]
        predicted = "" if slope["predicted"] is None else f"{slope['predicted']:+.2f}"
        text.append(Finding(f"{name}: {what}", Estimate(*measured).text(2), predicted, word))
    return text


def panels(result: Mapping[str, Any]) -> dict[str, str]:
    """Module -> verdict of what is drawn: of repeated blocks the one with the worst verdict."""
    rank = list(VERDICTS)
    words: dict[str, str] = {}
    for slope in result["slopes"]:
        if slope["quantity"] != "update":
            name = slope["name"]
            words[name] = min(words.get(name, "-"), slope["verdict"], key=rank.index)
    chosen: dict[str, str] = {}
    for name, word in words.items():
        kind = re.sub(r"(?<=\.)\d+(?=\.|$|\s)", "*", name)
        if kind not in chosen or rank.index(word) < rank.index(words[chosen[kind]]):
            chosen[kind] = name
    return {name: words[name] for name in chosen.values()}


def means(table: pd.DataFrame, name: str) -> dict[tuple[str, int], pd.Series]:
    """(quantity, step) -> geometric mean over seeds by width, of what can be drawn on log axes."""
    rows = table[(table.name == name) & (table.quantity != "update") & (table.rms > 0)]
    rows = rows.assign(log=rows.rms.map(math.log))
    rows = rows[rows.log.map(math.isfinite)]
    return {
        key: group.groupby("width").log.mean().map(math.exp)
        for key, group in rows.groupby(["quantity", "step"])
    }


def draw(data: tuple[pd.DataFrame, Mapping[str, Any]]) -> Iterator[tuple]:
    """RMS against width, a panel per module and a line per step; dashed: the predicted slope."""
    import seaborn as sns

    table, result = data
    chosen = panels(result)
    scan = str(result.get("scan", "width")).rpartition(".")[2].replace("_", " ")
    across = min(COLUMNS_ACROSS, len(chosen))
    down = math.ceil(len(chosen) / across)
    figure, axes = style.subplots(down, across, (2.5, 2.3))
    steps = int(table.step.max())
    colors = {("change", t): c for t, c in enumerate(sns.color_palette("viridis", steps), start=1)}
    colors["init", 0] = "black"
    for axis, (name, word) in zip(axes.flat, chosen.items(), strict=False):
        own = [slope for slope in result["slopes"] if slope["name"] == name]
        predicted = {(slope["quantity"], slope["step"]): slope["predicted"] for slope in own}
        for key, line in means(table, name).items():
            axis.plot(line.index, line.values, "o-", ms=3, lw=1.2, color=colors[key])
            if predicted.get(key) is not None:
                law = line.iloc[0] * (line.index / line.index[0]) ** predicted[key]
                axis.plot(line.index, law, "--", lw=0.9, color=colors[key])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.tick_params(labelsize=6)
        axis.set_xlabel(scan, fontsize=7)
        title = f"{name.replace(' along', chr(10) + 'along')}\n{word}"
        axis.set_title(title, fontsize=7, color=VERDICTS[word])
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    style.label_grid(axes, y=["RMS"] * down)
    names = {0: "at initialisation", 1: "change after step 1"}
    entries = [
        (names.get(step, f"step {step}"), {"color": color, "marker": "o", "ms": 3})
        for (_, step), color in sorted(colors.items(), key=lambda one: one[0][1])
    ]
    dashed = ("slope predicted for the first steps", {"color": "black", "ls": "--", "lw": 0.9})
    style.legend(figure, [*entries, dashed], fontsize=7, frameon=True)
    rule = result.get("prescription", {})
    keys = ("name", "parameterization", "strategy", "optimizer", "alignment")
    words = [rule[key] for key in keys if isinstance(rule.get(key), str)]
    target = " of " + Path(result["target"][0]).name if result.get("target") else ""
    figure.suptitle(f"coordinate check{target}: {', '.join(words) or 'own plan'}", fontsize=9)
    yield NAME, figure
