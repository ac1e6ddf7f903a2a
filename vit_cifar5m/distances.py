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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import RunError, UserError, one_line_errors

if TYPE_CHECKING:
    import torch

HEADS = "model.heads"
TABLE = "distances.csv"
PLACE = ("curve", HEADS, "seed", "run", "step")  # then the grid's other keys
MEASURED = ("square_distance", "widest", "references", "member")


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
    data: Any
    """The data section of its config."""


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
    from training.files import parse_json, reading

    manifest = folder / "manifest.json"
    if not manifest.exists():
        raise UserError(
            f"{folder}: no manifest.json in it; expected the results folder of a sweep, as "
            "`python -m sweeps run` leaves it"
        )
    with reading(manifest, "; run the sweep again to write it again"):
        entries = {entry["run"]: entry for entry in parse_json(manifest.read_bytes())}.values()
        found = [run for entry in entries if (run := _run(folder, **entry)) is not None]
    if not found:
        raise UserError(f"{folder}: no finished run in it; run the sweep first")
    for first, *others in _groups(found):
        shapes = {step: logits.shape for step, logits in first.logits.items()}
        for run in others:
            same = {step: logits.shape for step, logits in run.logits.items()} == shapes
            if not same or run.data != first.data:
                raise RunError(
                    f"{folder / run.name}: its observed steps, samples or data section are not "
                    f"those of {first.name}; give all runs the same data, training.steps, "
                    "training.observe_every and training.observe_samples"
                )
    return found


def _run(
    folder: Path, run: str, curve: str, values: dict[str, Any], seed: int, **more: Any
) -> Run | None:
    """The run of a manifest's entry, None if it diverged or failed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from training import runs
    from training.config import read_yaml

    run_dir = folder / run
    summary = runs.done(run_dir)
    if summary is None:
        raise RunError(f"{run_dir}: not finished; run the sweep to its end first")
    if summary["status"] != "finished":
        return None
    if HEADS not in values:
        raise UserError(f"{folder}: its grid has no {HEADS}; expected a sweep over heads")
    steps = {}
    for path in (run_dir / "observations").glob("step_*.safetensors"):
        try:
            steps[int(path.stem.removeprefix("step_"))] = load_file(path)["outputs"]
        except (SafetensorError, OSError, KeyError) as error:
            raise RunError(
                f"{path}: cannot read its outputs ({error}); delete the run and train it again"
            ) from None
    if not steps:
        raise RunError(
            f"{run_dir}: nothing was observed; set training.observe_every in the sweep and run it "
            "again"
        )
    others, data = dict(values), read_yaml(run_dir / "config.yaml").get("data")
    return Run(curve, others, int(others.pop(HEADS)), seed, run, dict(sorted(steps.items())), data)


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
