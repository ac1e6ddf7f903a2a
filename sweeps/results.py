"""The tables that a sweep leaves: results.csv, those of what runs logged, and its manifest.

A launcher of some curves keeps what the tables say of the others; a lock on the sweep's folder
keeps two launchers from overwriting each other's rows.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.sweep_file import Point, Sweep
from sweeps.tables import read_manifest
from training.errors import RunError
from training.files import locked, write_json, write_text

if TYPE_CHECKING:
    import numpy as np

TABLE_SECONDS = 60.0  # another launcher writes a table in far less

RESULT_COLUMNS = (
    "status",
    "step",
    "steps",
    "final_eval_loss",
    "best_eval_loss",
    "first_train_loss",
    "final_train_loss",
    "targets",
    "parameters",
)


def columns(sweep: Sweep) -> list[str]:
    """The config keys that the sweep sets or crosses: columns of its tables."""
    config = sweep.config
    sets = [config.set, *(curve.set for curve in config.curves.values())]
    grids = [config.grid, *(curve.grid for curve in config.curves.values())]
    return list(dict.fromkeys(key for part in (*sets, *grids) for key in part))


def _place(sweep: Sweep, point: Point, keys: Sequence[str]) -> list[Any]:
    """A point's curve, key columns, horizon and use of constants, as tables have them."""
    curve = sweep.config.curves[point.curve]
    values = sweep.adjusted(point.curve, dict(point.values))
    horizon = curve.horizon.describe() if curve.horizon else "fixed"
    return [point.curve, *(values.get(key) for key in keys), horizon, curve.constants]


def write_results(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path:
    """results.csv: one row per run that is done, by curve and rising grid values.

    Rows of curves that were left out this time stay as they are.
    """
    path = sweep.folder / "results.csv"
    keys = columns(sweep)
    measured = list(dict.fromkeys([*_measured(summaries), *_header(path, _MEASURED)]))
    place = ["curve", *keys, "horizon", "constants", "seed"]
    header = [*place, *RESULT_COLUMNS, *measured, "commit", "run"]
    rows = []
    for point in sorted(sweep.points, key=_grid_order(sweep)):
        summary = summaries.get(point.run)
        if summary is not None:
            results = [summary.get(column) for column in (*RESULT_COLUMNS, *measured)]
            commit = summary.get("environment", {}).get("commit")
            place = _place(sweep, point, keys)
            rows.append([*place, point.seed, *results, commit, point.run])
    _write_csv(sweep, path, header, rows)
    return path


def _measured(summaries: Mapping[str, dict[str, Any]]) -> list[str]:
    """What runs measured beyond the loss, as their summaries name it."""
    keys = dict.fromkeys(key for summary in summaries.values() for key in summary)
    return [key for key in keys if key.startswith(_MEASURED) and key not in _NOT_EXTRA]


_MEASURED = ("final_eval_", "best_eval_")
_NOT_EXTRA = (*RESULT_COLUMNS, "best_eval_step")


def _header(path: Path, prefixes: tuple[str, ...]) -> list[str]:
    """Columns of measures in a table that is there: other curves may have what these have not."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            first = next(csv.reader(file), [])
    except (OSError, ValueError):
        return []
    return [name for name in first if name.startswith(prefixes) and name not in _NOT_EXTRA]


_FAILED = {"status": "failed"}
METRIC_COLUMNS = ("step", "epoch", "train_loss", "lr_factor", "gradient_norm", "skipped_steps")


def write_metrics(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path | None:
    """metrics.csv: every line that the runs logged; None unless the sweep asks for it.

    Runs that failed are left out: what they had logged is no result.
    """
    if not sweep.config.metrics:
        return None
    keys, lines = columns(sweep), []
    for point in sorted(sweep.points, key=_grid_order(sweep)):
        if summaries.get(point.run, _FAILED)["status"] != "failed":
            place = [*_place(sweep, point, keys), point.seed, point.run]
            lines += [(place, line) for line in _logged(sweep.folder / point.run)]
    path = sweep.folder / "metrics.csv"
    measured = {key for _, line in lines for key in line if key.startswith("eval_")}
    logged = [*METRIC_COLUMNS, *sorted(measured | {*_header(path, ("eval_",))})]
    rows = [[*place, *(line.get(key) for key in logged)] for place, line in lines]
    header = ["curve", *keys, "horizon", "constants", "seed", "run", *logged]
    _write_csv(sweep, path, header, rows)
    return path


def _logged(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, one per step: training and evaluation of a step share one."""
    with open(run_dir / "metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        steps.setdefault(line["step"], {}).update(line)
    return list(steps.values())


def _rows_of_others(sweep: Sweep, path: Path, header: list[str]) -> list[list[Any]]:
    """Rows of an earlier table whose curves this launcher leaves out, under the present columns."""
    ours = {point.curve for point in sweep.points}
    try:
        with open(path, newline="", encoding="utf-8") as file:
            first, *rows = csv.reader(file)
    except (OSError, ValueError):
        return []
    if "curve" not in first:
        return []
    others = sweep.config.curves.keys() - ours
    named = (dict(zip(first, row)) for row in rows)
    return [[row.get(column, "") for column in header] for row in named if row["curve"] in others]


def _write_csv(
    sweep: Sweep, path: Path, header: list[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Writes a table of this launcher's rows and those of the curves that it leaves out."""
    order = list(sweep.config.curves)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    with locked(sweep.folder, "sweep's tables", TABLE_SECONDS):
        whole = [*_rows_of_others(sweep, path, header), *rows]
        # Stable: within a curve, the grid's order.
        writer.writerows(sorted(whole, key=lambda row: order.index(row[0])))
        write_text(path, text.getvalue())


PROBE_COLUMNS = ("step", "layer", "role", "fan_in", "alignment")


def write_probes(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path | None:
    """probes.csv: log alignment ratio per run, step and dense layer; None if nothing was probed."""
    keys, rows = columns(sweep), []
    for point in sorted(sweep.points, key=_grid_order(sweep)):
        failed = summaries.get(point.run, _FAILED)["status"] == "failed"
        if point.config.training.probe_every and not failed:
            place = [*_place(sweep, point, keys), point.seed, point.run]
            rows += [[*place, *row] for row in _alignment(sweep.folder / point.run)]
    if not rows:
        return None
    path = sweep.folder / "probes.csv"
    header = ["curve", *keys, "horizon", "constants", "seed", "run", *PROBE_COLUMNS]
    _write_csv(sweep, path, header, rows)
    return path


def _alignment(run_dir: Path) -> list[list[Any]]:
    """(step, layer, role, fan_in, alignment) of a run's probes."""
    try:
        with open(run_dir / "plan.json", encoding="utf-8") as file:
            plan = {row["name"]: row for row in json.load(file)["rows"]}
        with open(run_dir / "probes.jsonl", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except FileNotFoundError:  # it diverged before its first probe
        return []
    return [
        [line["step"], layer, *_of_plan(plan, layer), measured["alignment"]]
        for line in lines
        for layer, measured in line["layers"].items()
    ]


def _of_plan(plan: Mapping[str, Mapping[str, Any]], layer: str) -> tuple[Any, Any]:
    row = plan.get(f"{layer}.weight", {})
    return row.get("role"), row.get("fan_in")


OBSERVATION_COLUMNS = (
    *("step", "block", "stream_rms", "stream_change", "kernel_alignment", "kernel_change"),
    *("attention_rms", "head_variance", "excess_kurtosis"),
    *("query_change", "key_change", "attention_change"),
    *("query_change_weights", "key_change_weights", "attention_change_weights"),
    *("query_weight_change", "query_weight_relative", "key_weight_change", "key_weight_relative"),
    *("embedding_rms", "embedding_change", "function_change"),
)


def write_observations(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path | None:
    """observations.csv: one row per run, observed step and block, with "all" for them together.

    Of finished runs alone: the last observed step of any other is not the end of its training.
    None unless the sweep asks for it and such a run observed something; see
    `measure.observations`.
    """
    keys, rows = columns(sweep), []
    for point in _observed_points(sweep, summaries):
        place = [*_place(sweep, point, keys), point.seed, point.run]
        rows += [[*place, *row] for row in _observed(sweep.folder / point.run)]
    if not rows:
        return None
    path = sweep.folder / "observations.csv"
    header = ["curve", *keys, "horizon", "constants", "seed", "run", *OBSERVATION_COLUMNS]
    _write_csv(sweep, path, header, rows)
    return path


def _observed_points(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> list[Point]:
    """The finished runs, in the grid's order; none unless the sweep asks for observations."""
    if not sweep.config.observations:
        return []
    points = sorted(sweep.points, key=_grid_order(sweep))
    return [p for p in points if summaries.get(p.run, _FAILED)["status"] == "finished"]


def _observed(run_dir: Path) -> list[list[Any]]:
    """The rows of a run's observations; a number that was not finite is an empty cell."""
    try:
        with open(run_dir / "observations.jsonl", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except FileNotFoundError:  # it does not observe
        return []
    rows = []
    for line in lines:
        for numbers in (*line["blocks"], {"block": "all", **line["all"]}):
            values = {"step": line["step"], **numbers}
            rows.append([values.get(column) for column in OBSERVATION_COLUMNS])
    return rows


KERNEL_COLUMNS = ("step", "kind", "row", "column", "value")
ATTENTION_COLUMNS = ("step", "block", "token", "attended", "head", "value")
# Arrays of an observed step, by what the table calls them.
KERNELS = {
    "pooled": "pooled_kernel",
    "last_token": "last_token_kernel",
    "spatial": "spatial_kernel",
}
KERNEL_SIDE = 64  # of a spatial kernel, say; as wide as a figure shows
ARRAY_DIGITS = 6  # of float32


def write_observed_kernels(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path | None:
    """observed_kernels.csv: kernels of finished runs after the last block, one row per entry.

    Of the first and the last observed step; kernels are symmetric, and rows have row <= column. Of
    a kernel with more than 64 rows every k-th row and column is there, under its own number. None
    as for `write_observations`. Raises RunError for arrays that are missing or damaged.
    """
    return _write_arrays(sweep, summaries, "observed_kernels.csv", KERNEL_COLUMNS, _kernel_rows)


def write_observed_attention(sweep: Sweep, summaries: Mapping[str, dict[str, Any]]) -> Path | None:
    """observed_attention.csv: the logits A of every head of sample 0 at the recorded places.

    One row per block, place (token, attended) and head, of the first and the last observed step;
    None and errors as for `write_observed_kernels`.
    """
    name = "observed_attention.csv"
    return _write_arrays(sweep, summaries, name, ATTENTION_COLUMNS, _attention_rows)


Arrays = Mapping[str, "np.ndarray"]


def _write_arrays(
    sweep: Sweep,
    summaries: Mapping[str, dict[str, Any]],
    name: str,
    measured: Sequence[str],
    rows_of: Callable[[Arrays], Iterable[Sequence[Any]]],
) -> Path | None:
    """A table of what `rows_of` makes of the first and the last arrays of each finished run."""
    keys, rows = columns(sweep), []
    for point in _observed_points(sweep, summaries):
        place = [*_place(sweep, point, keys), point.seed, point.run]
        for step in _ends(sweep.folder / point.run):
            arrays = _arrays(sweep.folder / point.run, step)
            rows += [[*place, step, *row] for row in rows_of(arrays)]
    if not rows:
        return None
    header = ["curve", *keys, "horizon", "constants", "seed", "run", *measured]
    _write_csv(sweep, sweep.folder / name, header, rows)
    return sweep.folder / name


def _ends(run_dir: Path) -> list[int]:
    """The first and the last step that a run observed."""
    steps = [row[0] for row in _observed(run_dir)]
    return list(dict.fromkeys([steps[0], steps[-1]])) if steps else []


def _arrays(run_dir: Path, step: int) -> Arrays:
    """The arrays of an observed step; RunError if its file is not there or not whole."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = run_dir / "observations" / f"step_{step}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{path}: cannot read the arrays of step {step} ({error}); delete "
            f"{run_dir} to run again"
        ) from None


def _kernel_rows(arrays: Arrays) -> Iterator[tuple[Any, ...]]:
    """(kind, row, column, value) of the kernels among the arrays."""
    for kind, name in KERNELS.items():
        kernel = arrays.get(name, ())
        kept = range(0, len(kernel), -(-len(kernel) // KERNEL_SIDE) or 1)
        for row, column in itertools.combinations_with_replacement(kept, 2):
            yield kind, row, column, _digits(kernel[row, column])


def _attention_rows(arrays: Arrays) -> Iterator[tuple[Any, ...]]:
    """(block, token, attended, head, value) of the recorded attention logits."""
    places = arrays.get("attention_places", ())
    for block, entries in enumerate(arrays.get("attention_entries", ())):
        for (token, attended), heads in zip(places, entries):
            for head, value in enumerate(heads):
                yield block, int(token), int(attended), head, _digits(value)


def _digits(value: float) -> float | None:
    """A number as these tables have it; an empty cell for one that is not finite."""
    return float(f"{value:.{ARRAY_DIGITS}g}") if math.isfinite(value) else None


def _grid_order(sweep: Sweep):
    curves = list(sweep.config.curves)

    def order(point: Point) -> tuple:
        values = ((_kind(value), value) for _, value in point.values)
        return (curves.index(point.curve), *values, point.seed)

    return order


def _kind(value: Any) -> str:
    """What values can be compared with each other."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if is_number else str(type(value))


def write_manifest(sweep: Sweep) -> None:
    """manifest.json: every run the sweep has asked for so far."""
    entries = [
        {"run": p.run, "curve": p.curve, "values": dict(p.values), "seed": p.seed}
        for p in sweep.points
    ]
    path = sweep.folder / "manifest.json"
    others = sweep.config.curves.keys() - {point.curve for point in sweep.points}
    with locked(sweep.folder, "sweep's tables", TABLE_SECONDS):
        kept = [entry for entry in read_manifest(path) if entry["curve"] in others]
        write_json(path, [*kept, *entries])
