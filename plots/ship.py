"""Keeps a sweep's table with the figures it draws.

    python -m plots ship results.csv PAPER/NAME

Copies the table to plots/data/PAPER/NAME.csv and writes NAME.json: sweep, data, commit and its
date, versions, device and number of runs, read from the runs' configs and summaries. Tables above
1.5 MB, such as those of kernels, are kept compressed, as NAME.csv.gz.
"""

import argparse
import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from plots.catalogue import PAPERS
from plots.tables import DATA, TableError, git, read
from training.files import write_bytes, write_json

LARGE = 1_500_000  # bytes
# What the data that come with an experiment are, for captions.
EMBEDDED = {
    "nanolm_c4": "the World English Bible",
    "bart_span_denoise": "the World English Bible",
    "vit_imagenet": "1,797 digits of scikit-learn",
    "vit_cifar5m": "drawn images of blobs",
}


def provenance(table: Path, written: bytes) -> dict[str, object]:
    """The sweep, the data and the environment that all runs of a table with this text share;
    TableError when environments differ or are missing."""
    try:
        # A table of probes has many rows per run.
        lines = csv.DictReader(written.decode("utf-8").splitlines())
        names = list(dict.fromkeys(row["run"] for row in lines))
    except (KeyError, UnicodeDecodeError, csv.Error) as error:
        words = f"no result table: {error!r}; expected a CSV file with a column run"
        raise TableError(f"{table}: {words}") from None
    if not names:
        raise TableError(f"{table}: no runs in it; run the sweep first")
    environments: dict[str, dict] = {}
    for name in names:
        path = table.parent / name / "summary.json"
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            environments[name] = dict(summary["environment"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TableError(f"{path}: no summary with an environment ({error})") from None
    first = environments[names[0]]
    # Beside a GPU the number of threads of its CPU changes no result.
    same = {"threads": first.get("threads")} if "NVIDIA" in str(first.get("device")) else {}
    for name, other in environments.items():
        other |= same
        if other != first:
            key = next(k for k in first | other if first.get(k) != other.get(k))
            words = f"run {name} was made elsewhere than {names[0]}"
            change = f"{key} {first.get(key)} -> {other.get(key)}"
            raise TableError(f"{table}: {words} ({change}); run all again")
    folder = table.resolve().parent
    origin = {"runs": len(names), "sweep": f"{folder.parent.name}/{folder.name}"}
    data = _data(folder / names[0] / "config.yaml")
    # When the commit was made, in UTC; nothing for one that git lacks.
    shown = ("--date=format-local:%Y-%m-%dT%H:%M", "--format=%cd", str(first.get("commit")))
    date = git("show", "-s", *shown)
    return {**origin, **data, **({"date": date} if date else {}), "environment": first}


def _data(config: Path) -> dict[str, str]:
    """What a run was trained on, in words; nothing for a run without a config."""
    if not config.exists():
        return {}
    source = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]["source"]
    experiment = config.parents[2].name
    words = {"embedded": EMBEDDED.get(experiment, source), "drawn": EMBEDDED["vit_cifar5m"]}
    return {"data": words.get(source, source)}


def keep(written: bytes, path: Path) -> None:
    """Writes a table to `path`, or to `path`.gz if it is large; the other one is removed."""
    packed = path.with_name(path.name + ".gz")
    if len(written) < LARGE:
        write_bytes(path, written)
        packed.unlink(missing_ok=True)
    else:
        write_bytes(packed, gzip.compress(written, mtime=0))  # the same table gives the same bytes
        path.unlink(missing_ok=True)


def main(argv: Sequence[str]) -> None:
    """The command; TableError for a table that cannot be shipped."""
    look = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(prog="python -m plots ship", **look)
    parser.add_argument("table", type=Path, help="results.csv of a finished sweep")
    parser.add_argument("name", help="paper and name, for example everett/quickstart")
    parser.add_argument("--data", type=Path, default=DATA, help="folder to write to")
    args = parser.parse_args(argv)
    paper, _, name = args.name.partition("/")
    if paper not in PAPERS or not name or "/" in name:
        raise TableError(f"{args.name}: expected PAPER/NAME, PAPER one of {', '.join(PAPERS)}")
    try:
        written = args.table.read_bytes()
    except OSError as error:
        how = "give a table of a sweep, such as results/EXPERIMENT/SWEEP/results.csv"
        raise TableError(f"{args.table}: {error.strerror}; {how}") from None
    origin = provenance(args.table, written)
    read(args.table, ())  # refuses rows that stand twice
    keep(written, args.data / paper / f"{name}.csv")
    write_json(args.data / paper / f"{name}.json", origin)
