"""Points of a sweep's results.csv for curves that a reader looks into: which runs share a point,
which column is the axis, and where the optimum lies."""

import math
from collections.abc import Sequence

import pandas as pd

from measure.fits import optimum
from plots import style, tables
from plots.tables import CURVE, DECAY, EPS, LOSS, PARAMETERIZATION, RATE, SEED, STATUS, WIDTH

# In the order in which a table's lines are told apart by one of them.
SIZES = (WIDTH, "model.head_dim", "model.layers", "model.heads")
AXES = (RATE, EPS, DECAY)
NAMES = {
    WIDTH: "width",
    RATE: "learning rate",
    EPS: "epsilon",
    DECAY: "weight decay",
    "model.head_dim": "head dimension",
    "model.layers": "depth",
    "model.heads": "heads",
}


def explorer(table: pd.DataFrame) -> dict | None:
    """Losses of a results table as groups (a curve's panel), sizes (its lines) and points; None for
    a table that has no axis to look along, such as one that grows several sizes in turn. Seeds that
    chose no rate are left out.

    A point is [group, size, axis value, mean loss or None, standard deviation or None, runs, runs
    that diverged]; an optimum [group, size, its place, lowest loss, whether its place is the vertex
    of a parabola, place of the lowest loss].
    """
    if not {*tables.RESULTS} <= {*table.columns}:
        return None
    table = table[~tables.is_fresh(table)]  # they would lift the rate that they judge
    varied = [column for column in table if "." in column or column == CURVE]
    varied = [column for column in varied if table[column].nunique(dropna=False) > 1]
    sizes = [column for column in SIZES if column in varied]
    axes = [column for column in AXES if column in varied]
    groups = [column for column in varied if column not in (*sizes, *axes)]
    groups.sort(key=lambda column: column not in (CURVE, PARAMETERIZATION))
    groups = _free(table, groups, [])
    free = _free(table, axes, [*groups, *sizes[:1]])
    axis, *others = free or [None]
    lines = (sizes + others)[:1]
    rest = _free(table, [*sizes[1:], *(others if sizes else others[1:])], [*groups, *lines])
    if not lines or rest:
        return None
    rows = table.dropna(subset=[*lines, *([axis] if axis else [])])
    return _points(rows, groups, lines[0], axis)


def _free(table: pd.DataFrame, columns: Sequence[str], given: Sequence[str]) -> list[str]:
    """Those of `columns` that `given` and the ones before do not determine."""
    free: list[str] = []
    for column in columns:
        by = [*given, *free]
        parts = table.groupby(by, dropna=False)[column] if by else [(None, table[column])]
        if max(part.nunique(dropna=False) for _, part in parts) > 1:
            free.append(column)
    return free


def _points(rows: pd.DataFrame, groups: list[str], size: str, axis: str | None) -> dict:
    rows = rows[rows[STATUS] != "failed"]
    losses = rows[LOSS].where(rows[STATUS] != "diverged").fillna(math.inf)
    labels = [_label(row, groups) for row in rows.to_dict("records")]
    rows = rows.assign(loss=losses, group=labels)
    points, best = [], []
    for (group, line), cell in rows.groupby(["group", size], sort=False):
        means = {}
        for place, runs in cell.groupby(axis) if axis else [(None, cell)]:
            ended = runs["loss"][runs["loss"].map(math.isfinite)]
            lost = len(runs) - len(ended)
            means[place] = math.inf if lost else ended.mean()
            spread = ended.std() if len(ended) > 1 else math.nan
            known = [round(v, 5) if math.isfinite(v) else None for v in (ended.mean(), spread)]
            points.append([group, line, place, *known, len(runs), lost])
        if not any(map(math.isfinite, means.values())):
            continue
        if axis == RATE and len(means) > 1:  # in its logarithm losses are parabolas near the best
            top = optimum(means)
            best.append([group, line, top.value, top.loss, top.inside, top.grid_value])
        else:
            place = min(means, key=lambda key: means[key])
            best.append([group, line, place, means[place], False, place])
    return {
        "axis": NAMES.get(axis),
        "size": NAMES[size],
        "groups": list(rows["group"].unique()),
        "sizes": sorted(rows[size].unique().tolist()),
        "points": points,
        "best": best,
        "seeds": int(rows[SEED].nunique()),
    }


def _label(row: dict, groups: Sequence[str]) -> str:
    """A group's name: words as they are, numbers after their key."""
    parts = []
    for column in groups:
        value = row[column]
        if column == CURVE:
            parts.append(value.replace("_", " "))
        elif isinstance(value, str):
            parts.append(style.LABELS.get(value, value))
        else:
            parts.append(f"{column.rpartition('.')[2].replace('_', ' ')} = {value:g}")
    return " · ".join(parts) or str(row[CURVE]).replace("_", " ")
