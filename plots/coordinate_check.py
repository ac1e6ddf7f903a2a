"""The coordinate check's figure: RMS against width for every module, with the expected slopes.

    python -m plots.coordinate_check FOLDER [--out FOLDER]

Reads the coordinate_check.csv and .json that `python -m measure.coordinate_check` left in a folder
and nothing else. Writes PNG and PDF.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

NAME = "coordinate_check"
COLUMNS = ("quantity", "name", "part", "step", "width", "seed", "rms")
COLUMNS_ACROSS = 5
# Worst first, with the colour of a panel's title.
VERDICTS = {
    "not finite": "firebrick",
    "grows": "firebrick",
    "shrinks": "firebrick",
    "unclear": "darkorange",
    "expected exception": "royalblue",
    "ok": "black",
    "-": "dimgray",
}


class TableError(ValueError):
    """Files that this figure cannot be drawn from."""


def read(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A check's points and slopes; TableError if a file is missing or is another one's."""
    path = folder / f"{NAME}.csv"
    try:
        table = pd.read_csv(path)
        path = folder / f"{NAME}.json"
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: cannot read the file: {error}") from None
    missing = [column for column in COLUMNS if column not in table]
    if missing or "slopes" not in result:
        raise TableError(f"{folder}: no {missing[0] if missing else 'slopes'} in its {NAME} files")
    if table.empty:
        raise TableError(f"{folder}: no points in {NAME}.csv; run the check again")
    return table, result


def panels(table: pd.DataFrame, result: Mapping[str, Any]) -> dict[str, str]:
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


def draw(table: pd.DataFrame, result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws the figure into `folder` as coordinate_check.png and .pdf and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(style="whitegrid", context="paper")
    chosen = panels(table, result)
    across = min(COLUMNS_ACROSS, len(chosen))
    down = math.ceil(len(chosen) / across)
    figure, axes = plt.subplots(
        down, across, figsize=(2.5 * across, 2.3 * down), squeeze=False, constrained_layout=True
    )
    steps = int(table.step.max())
    colors = {("change", t): c for t, c in enumerate(sns.color_palette("viridis", steps), start=1)}
    colors["init", 0] = "black"
    for axis, (name, word) in zip(axes.flat, chosen.items()):
        _draw_panel(axis, means(table, name), _expected(result, name), colors)
        axis.set_title(f"{name.replace(' along', chr(10) + 'along')}\n{word}", fontsize=7,
                       color=VERDICTS[word])
    for axis in axes.flat[len(chosen):]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("RMS")
    handles, labels = _legend(colors)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)
    figure.suptitle(_title(result), fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{NAME}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        # Without a date in the file, the same table gives the same bytes.
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
        figure.savefig(path, dpi=160, metadata=metadata)
    plt.close(figure)
    return paths


def _expected(result: Mapping[str, Any], name: str) -> dict[tuple[str, int], float]:
    """(quantity, step) -> the slope to draw dashed: predicted of the first steps, where known."""
    return {
        (slope["quantity"], slope["step"]): slope["predicted"]
        for slope in result["slopes"]
        if slope["name"] == name and slope["predicted"] is not None
    }


def _draw_panel(
    axis,
    lines: Mapping[tuple[str, int], pd.Series],
    expected: Mapping[tuple[str, int], float],
    colors: Mapping[tuple[str, int], Any],
) -> None:
    for key, line in lines.items():
        axis.plot(line.index, line.values, "o-", ms=3, lw=1.2, color=colors[key])
        if key in expected:
            law = line.iloc[0] * (line.index / line.index[0]) ** expected[key]
            axis.plot(line.index, law, "--", lw=0.9, color=colors[key])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.tick_params(labelsize=6)
    axis.set_xlabel("width", fontsize=7)


def _legend(colors: Mapping[tuple[str, int], Any]) -> tuple[list, list[str]]:
    from matplotlib.lines import Line2D

    order = sorted(colors, key=lambda key: key[1])
    names = {0: "at initialisation", 1: "change after step 1"}
    handles = [Line2D([], [], color=colors[key], marker="o", ms=3) for key in order]
    handles.append(Line2D([], [], color="black", ls="--", lw=0.9))
    labels = [names.get(step, f"step {step}") for _, step in order]
    return handles, [*labels, "slope predicted for the first steps"]


def _title(result: Mapping[str, Any]) -> str:
    rule = result.get("prescription", {})
    keys = ("name", "parameterization", "strategy", "optimizer", "alignment")
    words = [str(rule[key]) for key in keys if isinstance(rule.get(key), str)]
    return f"coordinate check: {', '.join(words) or 'own plan'}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a bad folder is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m plots.coordinate_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="results folder of a check")
    parser.add_argument("--out", type=Path, help="folder to write to (default: the same)")
    args = parser.parse_args(argv)
    try:
        paths = draw(*read(args.folder), args.out or args.folder)
    except (TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("figure: " + ", ".join(map(str, paths)))


if __name__ == "__main__":
    main()
