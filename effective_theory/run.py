"""The papers' theory compared with what networks do: everything at once, as tables and JSON.

    python -m effective_theory.run [vision language bigram] [--workers 2] [key=value ...]

Names are those of configs/ (or paths of YAML files); by default all three. Keys of the theory and
its networks go to every config named, those of the bigram model are written bigram.key=value.
Results go to results/effective_theory/ (--out): NAME.json with every entry, kernels.csv and
bigram.csv; the commands that draw figures from them are printed. `--ship plots/data/theory` keeps
the tables there, too, with what they were made of, for `bash scripts/plots.sh`.

Exit code 1 if a number misses its tolerance, 2 for a mistake in the command or a config. Judged are
mean diagonals at n >= 512 with >= 300 networks (G 1 %, tangent kernel per group 2 %, queries and
keys 5 %), and exponents of >= 300 networks per width up to d >= 512 (0.07).
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from effective_theory import bigram_training, compare
from effective_theory.bigram import BigramConfig
from effective_theory.bigram_exponents import FittedExponent
from effective_theory.config import Config
from training.config import describe, load
from training.environment import describe as describe_environment
from training.errors import UserError, one_line_errors
from training.files import write_json, write_text

CONFIGS = Path(__file__).resolve().parent / "configs"
OUT = Path("results/effective_theory")
BIGRAM = "bigram"
NAMES = ("vision", "language", BIGRAM)
FIGURES = {"kernels": ("kernels", "error", "shares"), BIGRAM: ("bigram",)}


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    with one_line_errors(OSError):
        args = _parser().parse_intermixed_args(argv)
        job = _job(args)
        _prepare("--out", job.out)
        if job.ship:
            _prepare("--ship", job.ship)
            if job.ship.samefile(job.out):
                raise UserError(
                    f"--ship {job.ship}: is the folder of --out, too, whose files it "
                    "would replace by others of their names; name another folder"
                )
        missed = run(job)
    for line in missed:
        print(line, file=sys.stderr)
    raise SystemExit(1 if missed else 0)


@dataclass(frozen=True)
class Job:
    """What one call does."""

    kernels: Mapping[str, Config]
    """Configs of encoders, by name."""
    bigram: BigramConfig | None
    out: Path
    workers: int
    ship: Path | None
    """Folder of tables that are kept with the figures."""


def run(job: Job) -> list[str]:
    """Computes and writes; returns a line per number that misses its tolerance.

    Every table is written as soon as its last row is there.
    """
    start, missed = time.perf_counter(), []
    if job.kernels:
        rows = [row for name, config in job.kernels.items() for row in _encoder(job, name, config)]
        _keep(job, "kernels", [row.to_dict() for row in rows], job.kernels, start)
        missed += [_missed(row) for row in rows if row.met is False]
    if job.bigram is not None:
        begun = time.perf_counter()
        rows = bigram_training.tables(job.bigram)
        seconds = time.perf_counter() - begun
        print(f"{BIGRAM}: {seconds:.0f} s", flush=True)
        _write_entries(job, BIGRAM, job.bigram, seconds, {"rows": [row.to_dict() for row in rows]})
        numbers = [row.to_dict() | {"predicted": float(row.predicted)} for row in rows]
        _keep(job, BIGRAM, numbers, {BIGRAM: job.bigram}, begun)
        missed += [_missed_exponent(row) for row in rows if row.met is False]
    print(f"{time.perf_counter() - start:.0f} s; results: {job.out}")
    return missed


def _encoder(job: Job, name: str, config: Config) -> list[compare.Comparison]:
    """One config's comparisons: printed, and written with every entry."""
    start = time.perf_counter()
    result = compare.compare(config, job.workers, _progress(name))
    seconds = time.perf_counter() - start
    print(compare.table(result.rows), f"{name}: {seconds:.0f} s\n", sep="\n", flush=True)
    _write_entries(job, name, config, seconds, compare.as_json(result))
    return result.rows


def _write_entries(job: Job, name: str, config: Any, seconds: float, found: Mapping) -> None:
    """NAME.json."""
    job.out.mkdir(parents=True, exist_ok=True)
    value = {"config": config.model_dump(mode="json"), "seconds": seconds, **found}
    environment = describe_environment(torch.device("cpu"))
    write_json(job.out / f"{name}.json", {"environment": environment} | _finite(value))


def _keep(
    job: Job, name: str, rows: Sequence[Mapping], configs: Mapping[str, Any], start: float
) -> None:
    """Writes a table, says how to draw it and, when asked, ships it with what it was made of."""
    table = job.out / f"{name}.csv"
    write_table(table, rows)
    if job.ship:
        shutil.copyfile(table, job.ship / table.name)
        origin = {
            "environment": describe_environment(torch.device("cpu")),
            "seconds": round(time.perf_counter() - start),
            "workers": job.workers,
            "configs": {key: config.model_dump(mode="json") for key, config in configs.items()},
        }
        write_json(job.ship / f"{name}.json", origin)
    for figure in FIGURES[name]:
        print(f"figure: python -m plots theory/{figure} {table}", flush=True)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file of dictionaries with the same keys; lists are left out, NaN is an empty cell."""
    columns = [key for key, value in rows[0].items() if not isinstance(value, list)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null, and "inf" for infinite width."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _cell(value: Any) -> Any:
    unknown = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if unknown else value


def _prepare(option: str, folder: Path) -> None:
    """Finds out before minutes of work whether results can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {folder}: cannot write results there ({error.strerror}); name another folder"
        ) from None


def _missed(row: compare.Comparison) -> str:
    return (
        f"missed: {row.stem} n = {row.width:g} {row.quantity} {row.block} {row.part}: measured / "
        f"predicted = {row.ratio:.4f}, z = {row.z:.1f}, tolerance {row.tolerance:.0%}"
    )


def _missed_exponent(row: FittedExponent) -> str:
    return (
        f"missed: {row.table}, {row.row}, {row.column}, step {row.step}: {row.measured:.3f} ± "
        f"{row.error:.3f}, predicted {row.predicted}"
    )


def _progress(name: str) -> Callable[[int, int], None] | None:
    """Networks done, on one line of a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        print(
            f"\r{name}: {done} of {total} networks",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )

    return show


def _job(args: argparse.Namespace) -> Job:
    names = [word for word in args.words if "=" not in word] or list(NAMES)
    overrides = [word for word in args.words if "=" in word]
    own = [word.removeprefix("bigram.") for word in overrides if word.startswith("bigram.")]
    others = [word for word in overrides if not word.startswith("bigram.")]
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: expected at least 1")
    files = _files(names)
    if others and set(files) == {BIGRAM}:
        raise UserError(f"{others[0]}: keys of the bigram model are written bigram.key=value")
    if own and BIGRAM not in files:
        raise UserError(f"bigram.{own[0]}: the bigram model is not among {', '.join(files)}")
    bigram = load(BigramConfig, files[BIGRAM], own) if BIGRAM in files else None
    return Job(_encoders(files, others), bigram, args.out, args.workers, args.ship)


def _encoders(files: Mapping[str, Path], overrides: list[str]) -> dict[str, Config]:
    stems, configs = {}, {}
    for name, path in files.items():
        if name == BIGRAM:
            continue
        configs[name] = load(Config, path, overrides)
        configs[name].check_measurement()
        stem = configs[name].model.stem
        if stem in stems:
            raise UserError(
                f"{path}: {stems[stem]} has stem {stem} too, and a figure shows one of each; "
                "compare them in two calls, each with another --out"
            )
        stems[stem] = path
    return configs


def _files(names: Sequence[str]) -> dict[str, Path]:
    """Config files by the name that their results get."""
    files: dict[str, Path] = {}
    for name in names:
        path = _file(name)
        if path.stem in files:
            raise UserError(
                f"{name}: {files[path.stem]} has the same name, and so would its results; rename it"
            )
        files[path.stem] = path
    return files


def _file(name: str) -> Path:
    """The config of a name, or a path."""
    if name in NAMES:
        return CONFIGS / f"{name}.yaml"
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"{name}: expected one of {', '.join(NAMES)}, the path of a YAML file or key=value"
        )
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m effective_theory.run",
        description=__doc__,
        epilog="config keys:\n"
        + describe(Config)
        + "\nkeys after bigram.:\n"
        + describe(BigramConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="NAME | key=value", help="see above")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="also keep the tables there")
    return parser


if __name__ == "__main__":
    main()
