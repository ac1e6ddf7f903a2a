"""How far the functions of a sweep's runs are from the limit of many heads, step by step.

    python -m vit_cifar5m.distances results/vit_cifar5m/figure_4 [--out FILE]

Reads the logits of the observed samples (training.observe_every) of every finished run of a sweep
over model.heads and writes distances.csv into its folder: per run and observed step the mean square
difference of the logits to the limit H -> infinity (Bordelon et al., Fig. 4b). The ensemble mean of
the widest models stands in for it; its own scatter, their variance over their number, is
subtracted. Every run is compared with the widest models of the other seeds alone: runs of one seed
begin with the same random numbers at every size (initialisation draws by seed and name), so that
the widest model of the same seed is correlated with it. One run's number may come out below zero.

Each curve has its own limit, and so has each combination of values where the grid crosses
heads with other keys. Those keys are columns of the table, empty for curves without them.

Runs of several seeds scatter by what the seed decides. With data.seed set that is the initial
weights alone; without it each seed also has its own batches, and a part of the distance that comes
from them does not fall with H.

Exit code 2 for a folder that is no sweep's, fewer than three seeds of a limit's widest models, runs
that are not finished, have no logits, or other steps or samples than those they are compared with.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from training.errors import RunError, UserError, one_line_errors

if TYPE_CHECKING:
    import torch

HEADS = "model.heads"
TABLE = "distances.csv"
PLACE = ("curve", HEADS, "seed", "run", "step")  # then the grid's other keys
MEASURED = ("square_distance", "widest", "references", "member")
_STEP = re.compile(r"step_(\d+)\.safetensors")


class Entry(BaseModel, strict=True):
    """What is needed of a run in the sweep's manifest."""

    run: str
    curve: str
    values: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class Run:
    """A finished run and its logits: observed step -> (samples, classes).

    `others` are the grid's other values by key: runs that share them and the curve have one limit.
    """

    curve: str
    others: Mapping[str, Any]
    heads: int
    seed: int
    name: str
    logits: Mapping[int, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, or 2 for a user's mistake (one line)."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_cifar5m.distances",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", type=Path, metavar="FOLDER", help="results folder of a sweep")
    parser.add_argument("--out", type=Path, help=f"table to write (default FOLDER/{TABLE})")
    args = parser.parse_args(argv)
    with one_line_errors(OSError):
        path = args.out or args.sweep / TABLE
        table = rows(read_runs(args.sweep))
        others = dict.fromkeys(key for row in table for key in row if key not in PLACE + MEASURED)
        write(path, [*PLACE, *others, *MEASURED], table)
    print(path)


def rows(found: Sequence[Run]) -> list[dict[str, Any]]:
    """The table's rows, by curve, the grid's other values, heads, seed and step.

    Curves and other values in the order in which the sweep has them. UserError if a limit has too
    few models.
    """
    curves = list(dict.fromkeys(run.curve for run in found))
    table = []
    for group in sorted(_groups(found), key=lambda group: curves.index(group[0].curve)):
        widest = max(run.heads for run in group)
        members = [run for run in group if run.heads == widest]
        seeds = len({run.seed for run in members})
        if seeds < 3:
            others = ", ".join(f"{key} {value}" for key, value in group[0].others.items())
            raise UserError(
                f"curve {group[0].curve!r}{others and ' with '}{others}: {seeds} "
                f"seed{'s' * (seeds != 1)} of the widest models ({HEADS} {widest}); expected at "
                "least three, as a run is not compared with models of its seed: give the sweep "
                "more seeds"
            )
        for run in sorted(group, key=lambda run: (run.heads, run.seed)):
            table += _of_run(run, members)
    return table


def _groups(found: Sequence[Run]) -> list[list[Run]]:
    """The runs of each limit: of one curve and the same values of all keys but the heads."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in found:
        limit = (run.curve, json.dumps(run.others, sort_keys=True))
        groups.setdefault(limit, []).append(run)
    return list(groups.values())


def _of_run(run: Run, members: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of a run: its distance to the widest models of the other seeds, by step."""
    from measure.representations import distance_to_ensemble

    widest, references = members[0].heads, [one for one in members if one.seed != run.seed]
    table = []
    for step, logits in run.logits.items():
        distance = distance_to_ensemble(logits, [one.logits[step] for one in references])
        place = (run.curve, run.heads, run.seed, run.name, step)
        measured = (distance, widest, len(references), run.heads == widest)
        table.append(
            {
                **dict(zip(PLACE, place, strict=True)),
                **run.others,
                **dict(zip(MEASURED, measured, strict=True)),
            }
        )
    return table


def read_runs(folder: Path) -> list[Run]:
    """The sweep's finished runs with their logits.

    Runs that diverged or failed are left out, as the distance of what they ended with says nothing.
    Raises UserError for a folder without runs, RunError for a damaged manifest and for a run that
    is not at its end, has not stored its logits, or is not comparable with the first of its limit.
    """
    if not (folder / "manifest.json").exists():
        raise UserError(
            f"{folder}: no manifest.json in it; expected the results folder of a sweep, as "
            "`python -m sweeps run` leaves it"
        )
    entries = _entries(folder / "manifest.json")
    found = [run for entry in entries if (run := _run(folder, entry)) is not None]
    if not found:
        raise UserError(f"{folder}: no finished run in it; run the sweep first")
    for group in _groups(found):
        _check_comparable(folder, group)
    return found


def _entries(path: Path) -> list[Entry]:
    """The runs that the manifest names; RunError if it is damaged."""
    try:
        return TypeAdapter(list[Entry]).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise RunError(
            f"{path}: cannot read it ({where}{first['msg']}), expected a list of runs, each with "
            f"{', '.join(Entry.model_fields)}; run the sweep again to write it again; runs that "
            "are done are kept"
        ) from None


def _run(folder: Path, entry: Entry) -> Run | None:
    """The run of a manifest's entry, None if it diverged or failed."""
    from training import runs

    run_dir = folder / entry.run
    summary = runs.summary(run_dir)
    if summary is None or summary["status"] == "stopped":
        raise RunError(f"{run_dir}: not finished; run the sweep to its end first")
    if summary["status"] != "finished":
        return None
    if HEADS not in entry.values:
        raise UserError(f"{folder}: its grid has no {HEADS}; expected a sweep over heads")
    others = dict(entry.values)
    heads = int(others.pop(HEADS))
    return Run(entry.curve, others, heads, entry.seed, entry.run, _logits(run_dir))


def _logits(run_dir: Path) -> dict[int, torch.Tensor]:
    """Observed step -> logits, by rising step."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    steps = {}
    for path in sorted((run_dir / "observations").glob("step_*.safetensors")):
        if match := _STEP.fullmatch(path.name):
            try:
                steps[int(match[1])] = load_file(path).get("outputs")
            except (SafetensorError, OSError) as error:
                raise RunError(f"{path}: cannot read it ({error}); train the run again") from None
            if steps[int(match[1])] is None:
                raise RunError(f"{path}: no 'outputs' in it; delete the run and train it again")
    if not steps:
        raise RunError(
            f"{run_dir}: nothing was observed; set training.observe_every in the sweep and run it "
            "again"
        )
    return dict(sorted(steps.items()))


def _check_comparable(folder: Path, found: Sequence[Run]) -> None:
    """Raises RunError where runs differ in observed steps, in data or in the shape of logits."""
    first = found[0]
    shape, data = next(iter(first.logits.values())).shape, _data(folder / first.name)
    for run in found[1:]:
        where = folder / run.name
        if list(run.logits) != list(first.logits):
            raise RunError(
                f"{where}: observed steps {_some(run.logits)}, but {first.name} "
                f"{_some(first.logits)}; give all runs the same training.observe_every and steps"
            )
        for step, logits in run.logits.items():
            if logits.shape != shape:
                raise RunError(
                    f"{where}: logits of step {step} have shape {tuple(logits.shape)}, those of "
                    f"{first.name} {tuple(shape)}; give all runs the same "
                    "training.observe_samples"
                )
        if _data(where) != data:
            raise RunError(
                f"{where}: its data section differs from that of {first.name}, so that it may have "
                "seen other samples; compare runs on the same data"
            )


def _data(run_dir: Path) -> Any:
    from training.config import read_yaml

    return read_yaml(run_dir / "config.yaml").get("data")


def _some(steps: Mapping[int, Any]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", shown[-1]])


def write(path: Path, columns: Sequence[str], table: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table as CSV, whole or not at all; what a row lacks is empty."""
    from training.files import write_text

    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_text(path, text.getvalue())


if __name__ == "__main__":
    main()
