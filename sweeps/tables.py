"""The tables that a sweep leaves: results.csv, those of what runs logged, and its manifest.

A command for some curves keeps what the tables say of the others.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.rules import Summary
from sweeps.sources import read_manifest, read_table
from sweeps.sweep_file import Point, Sweep, SweepConfig
from training.errors import RunError
from training.files import write_json, write_text

if TYPE_CHECKING:
    import numpy as np

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One kind of table: which runs have rows in it, and what the rows say."""

    name: str
    columns: tuple[str, ...]
    """Columns after those that say which run it is."""
    rows: Callable[[Path, Summary], Iterable[Values]]
    """Rows of a run by column, from its folder and its summary."""
    counts: Callable[[Point, Summary], bool]
    """Whether a run has rows."""
    wanted: Callable[[SweepConfig], bool] = lambda config: True
    measures: tuple[str, ...] = ()
    """Prefixes of further columns, which differ from sweep to sweep."""
    order: Callable[[Iterable[str]], Iterable[str]] = dict.fromkeys
    """How those columns are ordered."""
    last: tuple[str, ...] = ()
    """Columns after those."""
    named: bool = True
    """The run's name stands before the columns."""


def write(
    sweep: Sweep, points: Sequence[Point], results: Mapping[str, Summary], final: bool
) -> None:
    """results.csv, and at the end also what the runs logged."""
    for table in TABLES if final else TABLES[:1]:
        write_table(sweep, table, points, results)


def write_table(
    sweep: Sweep, table: Table, points: Sequence[Point], results: Mapping[str, Summary]
) -> Path | None:
    """Writes one table, its rows by curve and rising grid values; None if the sweep does not ask
    for it, or if nothing was probed or observed.

    Raises RunError for a run's arrays that are missing or damaged.
    """
    if not table.wanted(sweep.config):
        return None
    path, keys, rows = sweep.folder / table.name, columns(sweep), []
    for point in sorted(points, key=_grid_order(sweep)):
        summary = results.get(point.run)
        if summary is not None and table.counts(point, summary):
            which = _place(sweep, point, keys)
            rows += [{**row, **which} for row in table.rows(sweep.folder / point.run, summary)]
    if not rows and table not in (RESULTS, METRICS):
        return None
    try:
        old = read_table(path)
    except (OSError, ValueError):
        old = []
    ours = {point.curve for point in points}
    others = sweep.config.curves.keys() - ours
    kept = [row for row in old if row.get("curve") in others]
    measured = itertools.chain(*(row.keys() for row in (*rows, *old[:1])))
    extra = (k for k in measured if k and k.startswith(table.measures) and k not in _NOT_EXTRA)
    further = table.order(extra) if table.measures else ()
    run = ["run"] if table.named else []
    header = ["curve", *keys, "horizon", "constants", "seed", *run]
    header += [*table.columns, *further, *table.last]
    order = list(sweep.config.curves)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    # Stable: within a curve, the grid's order.
    for row in sorted([*kept, *rows], key=lambda row: order.index(row["curve"])):
        writer.writerow([row.get(column) for column in header])
    write_text(path, text.getvalue())
    return path


def columns(sweep: Sweep) -> list[str]:
    """The config keys that the sweep sets or crosses: columns of its tables."""
    config = sweep.config
    sets = [config.set, *(curve.set for curve in config.curves.values())]
    grids = [config.grid, *(curve.grid for curve in config.curves.values())]
    return list(dict.fromkeys(key for part in (*sets, *grids) for key in part))


def _place(sweep: Sweep, point: Point, keys: Sequence[str]) -> dict[str, Any]:
    """A point's curve, key columns, horizon, use of constants, seed and run."""
    curve = sweep.config.curves[point.curve]
    values = sweep.adjusted(point.curve, dict(point.values))
    return {
        **{key: values.get(key) for key in keys},
        "curve": point.curve,
        "horizon": curve.horizon.describe() if curve.horizon else "fixed",
        "constants": curve.constants,
        "seed": point.seed,
        "run": point.run,
    }


def _grid_order(sweep: Sweep) -> Callable[[Point], tuple[Any, ...]]:
    """Points by curve and rising grid values."""
    curves = {name: index for index, name in enumerate(sweep.config.curves)}

    def order(point: Point) -> tuple[Any, ...]:
        values = ((_kind(value), value) for _, value in point.values)
        return (curves[point.curve], *values, point.seed)

    return order


def _kind(value: Any) -> str:
    """What values can be compared with each other."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if is_number else str(type(value))


def write_manifest(sweep: Sweep, points: Sequence[Point]) -> None:
    """manifest.json: every run the sweep has asked for so far."""
    entries = [
        {"run": p.run, "curve": p.curve, "values": dict(p.values), "seed": p.seed} for p in points
    ]
    path = sweep.folder / "manifest.json"
    others = sweep.config.curves.keys() - {point.curve for point in points}
    kept = [entry for entry in read_manifest(path) if entry["curve"] in others]
    write_json(path, [*kept, *entries])


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; none where it diverged before the first one."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def _finished(point: Point, summary: Summary) -> bool:
    """Of finished runs alone: the last observed step of any other is not the end of training."""
    return summary["status"] == "finished"


def _not_failed(point: Point, summary: Summary) -> bool:
    """What a failed run had logged is no result."""
    return summary["status"] != "failed"


_RESULT_COLUMNS = (
    *("status", "step", "steps", "final_eval_loss", "best_eval_loss"),
    *("first_train_loss", "final_train_loss", "targets", "parameters"),
)
_NOT_EXTRA = (*_RESULT_COLUMNS, "best_eval_step")


def _result(run_dir: Path, summary: Summary) -> list[Values]:
    return [{**summary, "commit": summary.get("environment", {}).get("commit")}]


RESULTS = Table(
    "results.csv",
    _RESULT_COLUMNS,
    _result,
    counts=lambda point, summary: True,
    measures=("final_eval_", "best_eval_"),
    last=("commit", "run"),
    named=False,
)


def _logged(run_dir: Path, summary: Summary) -> list[Values]:
    """The lines of metrics.jsonl, one per step: training and evaluation of a step share one."""
    steps: dict[int, dict[str, Any]] = {}
    for line in _lines(run_dir / "metrics.jsonl"):
        steps.setdefault(line["step"], {}).update(line)
    return list(steps.values())


METRICS = Table(
    "metrics.csv",
    ("step", "epoch", "train_loss", "lr_factor", "gradient_norm", "skipped_steps"),
    _logged,
    counts=_not_failed,
    wanted=lambda config: config.metrics,
    measures=("eval_",),
    order=lambda names: sorted(set(names)),
)


def _alignment(run_dir: Path, summary: Summary) -> Iterator[Values]:
    """The log alignment ratio of every dense layer at every probe."""
    lines = _lines(run_dir / "probes.jsonl")
    if not lines:
        return
    with open(run_dir / "plan.json", encoding="utf-8") as file:
        plan = {row["name"]: row for row in json.load(file)["rows"]}
    for line in lines:
        for layer, measured in line["layers"].items():
            row = plan.get(f"{layer}.weight", {})
            yield {
                "step": line["step"],
                "layer": layer,
                "role": row.get("role"),
                "fan_in": row.get("fan_in"),
                "alignment": measured["alignment"],
            }


PROBES = Table(
    "probes.csv",
    ("step", "layer", "role", "fan_in", "alignment"),
    _alignment,
    counts=lambda point, summary: bool(point.config.training.probe_every)
    and _not_failed(point, summary),
)


def _observed(run_dir: Path, summary: Summary) -> Iterator[Values]:
    """One row per observed step and block, with "all" for the blocks together."""
    for line in _lines(run_dir / "observations.jsonl"):
        for numbers in (*line["blocks"], {"block": "all", **line["all"]}):
            yield {"step": line["step"], **numbers}


def _observes(config: SweepConfig) -> bool:
    return config.observations


OBSERVATIONS = Table(
    "observations.csv",
    (
        *("step", "block", "stream_rms", "stream_change", "kernel_alignment", "kernel_change"),
        *("attention_rms", "head_variance", "excess_kurtosis"),
        *("query_change", "key_change", "attention_change"),
        *("query_change_weights", "key_change_weights", "attention_change_weights"),
        *("query_weight_change", "query_weight_relative"),
        *("key_weight_change", "key_weight_relative"),
        *("embedding_rms", "embedding_change", "function_change"),
    ),
    _observed,
    counts=_finished,
    wanted=_observes,
)

# Arrays of an observed step, by what the table calls them.
_KERNELS = {
    "pooled": "pooled_kernel",
    "last_token": "last_token_kernel",
    "spatial": "spatial_kernel",
}
KERNEL_SIDE = 64  # rows of a kernel at most, as many as a figure shows
_DIGITS = 6  # of float32
Arrays = Mapping[str, "np.ndarray"]


def _at_ends(rows: Callable[[Arrays], Iterator[Values]]) -> Callable[..., Iterator[Values]]:
    """What `rows` makes of the arrays of a run's first and last observed step."""

    def read(run_dir: Path, summary: Summary) -> Iterator[Values]:
        steps = [line["step"] for line in _lines(run_dir / "observations.jsonl")]
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            for row in rows(_arrays(run_dir, step)):
                yield {"step": step, **row}

    return read


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


def _kernel_rows(arrays: Arrays) -> Iterator[Values]:
    """Entries of the kernels after the last block; they are symmetric, so row <= column.

    Of a kernel with more than 64 rows every k-th row and column is there, under its own number.
    """
    for kind, name in _KERNELS.items():
        kernel = arrays.get(name, ())
        kept = range(0, len(kernel), -(-len(kernel) // KERNEL_SIDE) or 1)
        for row, column in itertools.combinations_with_replacement(kept, 2):
            value = _rounded(kernel[row, column])
            yield {"kind": kind, "row": row, "column": column, "value": value}


def _attention_rows(arrays: Arrays) -> Iterator[Values]:
    """The logits A of every head of sample 0 at the recorded places (token, attended)."""
    places = arrays.get("attention_places", ())
    for block, entries in enumerate(arrays.get("attention_entries", ())):
        for (token, attended), heads in zip(places, entries):
            which = {"block": block, "token": int(token), "attended": int(attended)}
            for head, value in enumerate(heads):
                yield {**which, "head": head, "value": _rounded(value)}


def _rounded(value: float) -> float | None:
    """A number as these tables have it; an empty cell for one that is not finite."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


OBSERVED_KERNELS = Table(
    "observed_kernels.csv",
    ("step", "kind", "row", "column", "value"),
    _at_ends(_kernel_rows),
    counts=_finished,
    wanted=_observes,
)
OBSERVED_ATTENTION = Table(
    "observed_attention.csv",
    ("step", "block", "token", "attended", "head", "value"),
    _at_ends(_attention_rows),
    counts=_finished,
    wanted=_observes,
)
TABLES = (RESULTS, METRICS, PROBES, OBSERVATIONS, OBSERVED_KERNELS, OBSERVED_ATTENTION)
