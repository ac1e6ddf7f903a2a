"""The tables that a sweep leaves: results.csv, those of what runs logged, and its manifest.

A command for some curves or runs keeps what the tables say of the others.
"""

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.request import FRESH, plain, read_manifest, read_table
from sweeps.sweep_file import Point, Sweep
from training import files
from training.errors import RunError, UserError
from training.files import parse_json, read_text, reading, write_text
from training.runs import Summary

if TYPE_CHECKING:
    import numpy as np

Cells = Mapping[str, Any]
Arrays = Mapping[str, "np.ndarray"]
Write = Callable[[Path, str], None]
KERNEL_SIDE = 64  # rows of a kernel at most, as many as a figure shows


@dataclass(frozen=True)
class Table:
    """One kind of table: which runs have rows in it, and what the rows say."""

    name: str
    columns: tuple[str, ...]
    """Columns after those that say which run it is."""
    rows: Callable[[Path, Summary], Iterable[Cells]]
    """Rows of a run by column, from its folder and its summary."""
    statuses: tuple[str, ...] = ("finished", "diverged")
    """How runs with rows have ended: what a failed one had logged is no result."""
    wanted: str | None = None
    """The key of the sweep file that asks for it."""
    measures: tuple[str, ...] = ()
    """Prefixes of further columns, which differ from sweep to sweep."""
    last: tuple[str, ...] = ()
    """Columns after those."""


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
    if table.wanted and not getattr(sweep.config, table.wanted):
        return None
    config, path, rows = sweep.config, sweep.folder / table.name, list[dict[str, Any]]()
    grids, curves = config.grids, list(config.curves)
    # The config keys that the sweep sets or crosses are columns.
    sets = [config.set, *(curve.set for curve in config.curves.values())]
    keys = list(dict.fromkeys(key for part in (*sets, *grids.values()) for key in part))
    for point in points:
        summary = results.get(point.run)
        if summary and summary["status"] in table.statuses:
            curve = config.curves[point.curve]
            values = dict(point.values)
            which = {
                **{k: values[k] if k in values else _at(point.config, k) for k in keys},
                "curve": point.curve,
                "horizon": curve.horizon.describe() if curve.horizon else "fixed",
                "constants": point.constants,
                "seed": point.seed,
                FRESH: sweep.is_fresh(point),
                "run": point.run,
            }
            rows += [{**row, **which} for row in table.rows(sweep.folder / point.run, summary)]
    if not rows and table not in (RESULTS, METRICS):
        return None
    try:
        old = read_table(path)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError) and not _is_whole(sweep, points):
            raise  # it has changed since `write_manifest` has looked
        old = []
    measured = dict.fromkeys(itertools.chain(*(row.keys() for row in (*rows, *old[:1]))))
    further = [k for k in measured if k and k.startswith(table.measures) and k not in _NOT_EXTRA]
    further = sorted(further) if table is METRICS else further
    everything = [*_others(sweep, points, old), *rows]
    judged = [FRESH] if any(str(row.get(FRESH)) == "True" for row in everything) else []
    header = ["curve", *keys, "horizon", "constants", "seed", *judged]
    header += [*([] if table is RESULTS else ["run"]), *table.columns, *further, *table.last]

    def order(row: Cells) -> tuple[Any, ...]:
        """Numbers rise, and stand before words."""
        cells = [plain(row.get(key)) for key in (*grids[row["curve"]], "seed")]
        return curves.index(row["curve"]), *((isinstance(cell, str), cell) for cell in cells)

    write_csv(path, header, sorted(everything, key=order), files.write_table)
    return path


def _at(config: Any, key: str) -> Any:
    """A dotted key's value in a config; None in a config that has no such key."""
    for part in key.split("."):
        config = getattr(config, part, None)
    return config


def write_csv(
    path: Path, header: Sequence[str], rows: Iterable[Cells], write: Write = write_text
) -> None:
    """Writes a table, whole or not at all; columns that a row lacks are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([row.get(column) for column in header] for row in rows)
    write(path, text.getvalue())


def _is_whole(sweep: Sweep, points: Sequence[Point]) -> bool:
    """Whether a command is for all curves and runs, so that nothing of before stays in a table."""
    return {*sweep.config.curves} == {point.curve for point in points} and not sweep.where


def _others(sweep: Sweep, points: Sequence[Point], old: Iterable[Any]) -> list[Any]:
    """Rows of an earlier table or manifest that this command does not replace: those of other
    curves, and of runs that --where leaves out."""
    ours, curves = {point.run for point in points}, {point.curve for point in points}
    fixed = {name: sweep.keys(sweep.settings(name, {})) for name in sweep.config.curves}
    adjusted = [key for rule in sweep.config.adjust for key in rule.set]
    for name, curve in sweep.config.curves.items():  # what depends on the run is not known here
        for key in [*adjusted, *(curve.horizon.keys if curve.horizon else ())]:
            fixed[name].pop(key, None)

    def stays(entry: Mapping[str, Any]) -> bool:
        settings = {**fixed[entry["curve"]], **entry, **entry.get("values", {})}
        meant = all(w.key in settings and w.fits(settings) for w in sweep.where)
        return entry["curve"] not in curves or not meant

    return [e for e in old if e.get("curve") in fixed and e.get("run") not in ours and stays(e)]


def write_manifest(sweep: Sweep, points: Sequence[Point]) -> None:
    """manifest.json: every run the sweep has asked for so far, and those that --where leaves out.

    Without the latter, a sweep that starts around this best run would take a cell as complete.
    """
    path, every = sweep.folder / "manifest.json", [*points, *sweep.left_out]
    entries = [
        {
            "run": p.run,
            "curve": p.curve,
            "values": dict(p.values),
            "seed": p.seed,
            FRESH: sweep.is_fresh(p),
        }
        for p in every
    ]
    old = list[Any]()
    if not _is_whole(sweep, points):
        for table in TABLES:  # what it says of other curves stays: before anything is trained
            if not table.wanted or getattr(sweep.config, table.wanted):
                files.refuse_changed(sweep.folder / table.name)
        old = _others(sweep, every, read_manifest(path))
    files.write_table(path, json.dumps([*old, *entries], indent=1, allow_nan=False) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, none where it diverged before the first; RunError if damaged."""
    if not path.exists():
        return []
    with reading(path, f"; delete {path.parent} to run again"):
        lines = [parse_json(line) for line in read_text(path).splitlines()]
        return [{**line, "step": line["step"]} for line in lines]


def _logged(run_dir: Path, summary: Summary) -> list[Cells]:
    """The lines of metrics.jsonl, one per step: training and evaluation of a step share one."""
    steps: dict[int, dict[str, Any]] = {}
    for line in _lines(run_dir / "metrics.jsonl"):
        steps.setdefault(line["step"], {}).update(line)
    return list(steps.values())


def _alignment(run_dir: Path, summary: Summary) -> Iterator[Cells]:
    """The log alignment ratio of every dense layer at every probe."""
    lines, path, plan = _lines(run_dir / "probes.jsonl"), run_dir / "plan.json", {}
    if lines:
        with reading(path, f"; delete {run_dir} to run again"):
            rows = parse_json(read_text(path))["rows"]
            plan = {row["name"]: row for row in rows}
    for line in lines:
        for layer, measured in line["layers"].items():
            row = plan.get(f"{layer}.weight", {})
            yield {**row, "step": line["step"], "layer": layer, "alignment": measured["alignment"]}


def _observed(run_dir: Path, summary: Summary) -> Iterator[Cells]:
    """One row per observed step and block, with "all" for the blocks together."""
    for line in _lines(run_dir / "observations.jsonl"):
        for numbers in (*line["blocks"], {"block": "all", **line["all"]}):
            yield {"step": line["step"], **numbers}


def _at_ends(rows: Callable[[Arrays], Iterator[Cells]]) -> Callable[..., Iterator[Cells]]:
    """What `rows` makes of the arrays of a run's first and last observed step.

    RunError if the file of their arrays is not there or not whole.
    """

    def read(run_dir: Path, summary: Summary) -> Iterator[Cells]:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        steps = [line["step"] for line in _lines(run_dir / "observations.jsonl")]
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            path = run_dir / "observations" / f"step_{step}.safetensors"
            try:
                arrays = load_file(path)
            except (OSError, SafetensorError) as error:
                raise RunError(
                    f"{path}: cannot read the arrays of step {step} ({error}); delete "
                    f"{run_dir} to run again"
                ) from None
            yield from ({"step": step, **row} for row in rows(arrays))

    return read


def _kernel_rows(arrays: Arrays) -> Iterator[Cells]:
    """Entries of the kernels after the last block; they are symmetric, so row <= column.

    Of a kernel with more than 64 rows every k-th row and column is there, under its own number.
    """
    for kind in ("pooled", "last_token", "spatial"):
        if (kernel := arrays.get(f"{kind}_kernel")) is None:
            continue
        shown = range(0, len(kernel), -(-len(kernel) // KERNEL_SIDE))
        for row, column in itertools.combinations_with_replacement(shown, 2):
            value = _rounded(kernel[row, column])
            yield {"kind": kind, "row": row, "column": column, "value": value}


def _attention_rows(arrays: Arrays) -> Iterator[Cells]:
    """The logits A of every head of sample 0 at the recorded places (token, attended)."""
    places = arrays.get("attention_places", ())
    for block, entries in enumerate(arrays.get("attention_entries", ())):
        for (token, attended), heads in zip(places, entries, strict=True):
            which = {"block": block, "token": int(token), "attended": int(attended)}
            for head, value in enumerate(heads):
                yield {**which, "head": head, "value": _rounded(value)}


def _rounded(value: float) -> float | None:
    """A number in the digits of float32; an empty cell for one that is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


_RESULT_COLUMNS = tuple(
    "status step steps final_eval_loss best_eval_loss first_train_loss final_train_loss targets "
    "parameters".split()
)
_NOT_EXTRA = (*_RESULT_COLUMNS, "best_eval_step")
RESULTS = Table(
    "results.csv",
    _RESULT_COLUMNS,
    lambda run_dir, summary: [{**summary, "commit": summary.get("environment", {}).get("commit")}],
    statuses=("finished", "diverged", "failed"),
    measures=("final_eval_", "best_eval_"),
    last=("commit", "run"),
)
METRICS = Table(
    "metrics.csv",
    ("step", "epoch", "train_loss", "lr_factor", "gradient_norm", "skipped_steps"),
    _logged,
    wanted="metrics",
    measures=("eval_",),
)
PROBES = Table("probes.csv", ("step", "layer", "role", "fan_in", "alignment"), _alignment)
_OBSERVED_COLUMNS = (
    "step block stream_rms stream_change kernel_alignment kernel_change attention_rms "
    "head_variance excess_kurtosis query_change key_change attention_change query_change_weights "
    "key_change_weights attention_change_weights query_weight_change query_weight_relative "
    "key_weight_change key_weight_relative embedding_rms embedding_change function_change"
)
# Of finished runs alone: the last observed step of any other is not the end of training.
OBSERVATIONS, OBSERVED_KERNELS, OBSERVED_ATTENTION = (
    Table(name, tuple(names.split()), rows, statuses=("finished",), wanted="observations")
    for name, names, rows in (
        ("observations.csv", _OBSERVED_COLUMNS, _observed),
        ("observed_kernels.csv", "step kind row column value", _at_ends(_kernel_rows)),
        (
            "observed_attention.csv",
            "step block token attended head value",
            _at_ends(_attention_rows),
        ),
    )
)
TABLES = (RESULTS, METRICS, PROBES, OBSERVATIONS, OBSERVED_KERNELS, OBSERVED_ATTENTION)
