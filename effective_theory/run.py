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
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effective_theory.dinan import compare
from effective_theory.dinan.config import Config
from effective_theory.stratos import training as bigram_training
from effective_theory.stratos.bigram import BigramConfig
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
        configs = _configs(args.words)
        if args.workers < 1:
            raise UserError(f"--workers {args.workers}: expected at least 1")
        args.out.mkdir(parents=True, exist_ok=True)  # before minutes of work
        if args.ship:
            args.ship.mkdir(parents=True, exist_ok=True)
            if args.ship.samefile(args.out):
                raise UserError(
                    f"--ship {args.ship}: is the folder of --out, too, whose files it "
                    "would replace by others of their names; name another folder"
                )
        missed = run(configs, args.out, args.workers, args.ship)
    for line in missed:
        print(line, file=sys.stderr)
    raise SystemExit(1 if missed else 0)


def run(configs: Mapping[str, Any], out: Path, workers: int, ship: Path | None) -> list[str]:
    """Computes and writes; returns a line per number that misses its tolerance.

    Every table is written as soon as its last row is there; `ship` is where it is kept, too.
    """
    start, missed = time.perf_counter(), []
    environment = describe_environment(torch.device("cpu"))

    def entries(name: str, seconds: float, results: Mapping) -> None:
        print(f"{name}: {seconds:.0f} s\n", flush=True)
        value = {"config": configs[name].model_dump(mode="json"), "seconds": seconds, **results}
        write_json(out / f"{name}.json", {"environment": environment} | _finite(value))

    def keep(table: str, rows: Sequence[Mapping], names: Sequence[str], begun: float) -> None:
        path = out / f"{table}.csv"
        write_table(path, rows)
        if ship:
            shutil.copyfile(path, ship / path.name)
            origin = {
                "environment": environment,
                "seconds": round(time.perf_counter() - begun),
                "workers": workers,
                "configs": {name: configs[name].model_dump(mode="json") for name in names},
            }
            write_json(ship / f"{table}.json", origin)
        for figure in FIGURES[table]:
            print(f"figure: python -m plots theory/{figure} {path}", flush=True)

    encoders, rows = [name for name in configs if name != BIGRAM], []
    for name in encoders:
        begun = time.perf_counter()
        progress = partial(_show_progress, name) if sys.stderr.isatty() else None
        result = compare.compare(configs[name], workers, progress)
        print(compare.table(result.rows))
        entries(name, time.perf_counter() - begun, compare.as_json(result))
        rows += result.rows
    if encoders:
        keep("kernels", [row.to_dict() for row in rows], encoders, start)
    missed = [
        f"missed: {row.stem} n = {row.width:g} {row.quantity} {row.block} {row.part}: measured / "
        f"predicted = {row.ratio:.4f}, z = {row.z:.1f}, tolerance {row.tolerance:.0%}"
        for row in rows
        if row.met is False
    ]
    if BIGRAM in configs:
        begun = time.perf_counter()
        fitted = bigram_training.tables(configs[BIGRAM])
        found = {"rows": [row.to_dict() for row in fitted]}
        entries(BIGRAM, time.perf_counter() - begun, found)
        numbers = [row.to_dict() | {"predicted": float(row.predicted)} for row in fitted]
        keep(BIGRAM, numbers, [BIGRAM], begun)
        missed += [
            f"missed: {row.table}, {row.row}, {row.column}, step {row.step}: {row.measured:.3f} ± "
            f"{row.error:.3f}, predicted {row.predicted}"
            for row in fitted
            if row.met is False
        ]
    print(f"{time.perf_counter() - start:.0f} s; results: {out}")
    return missed


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file of dictionaries with the same keys; lists are left out, NaN is an empty cell."""
    columns = [key for key, value in rows[0].items() if not isinstance(value, list)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:  # NaN is what does not equal itself
        writer.writerow({k: "" if isinstance(v, float) and v != v else v for k, v in row.items()})
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


def _show_progress(name: str, done: int, total: int) -> None:
    """Networks done, on one line of a terminal."""
    end = "\n" if done == total else ""
    print(f"\r{name}: {done} of {total} networks", end=end, file=sys.stderr, flush=True)


def _configs(words: Sequence[str]) -> dict[str, Config | BigramConfig]:
    """Configs by the name that their results get, with the overrides."""
    names = [word for word in words if "=" not in word] or list(NAMES)
    bigrams = [word[7:] for word in words if "=" in word and word.startswith("bigram.")]
    others = [word for word in words if "=" in word and not word.startswith("bigram.")]
    configs: dict[str, Config | BigramConfig] = {}
    stems: dict[str, str] = {}
    for name in names:
        path = CONFIGS / f"{name}.yaml" if name in NAMES else Path(name)
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"{name}: expected one of {', '.join(NAMES)}, the path of a YAML file or key=value"
            )
        if path.stem in configs:
            raise UserError(f"{name}: another config has the same name, {path.stem}; rename it")
        if path.stem == BIGRAM:
            configs[BIGRAM] = load(BigramConfig, path, bigrams)
            continue
        config = configs[path.stem] = load(Config, path, others)
        config.check_measurement()
        if config.model.stem in stems:
            raise UserError(
                f"{path}: {stems[config.model.stem]} has stem {config.model.stem} too, and a "
                "figure shows one of each; compare them in two calls, each with another --out"
            )
        stems[config.model.stem] = name
    if others and set(configs) == {BIGRAM}:
        raise UserError(f"{others[0]}: keys of the bigram model are written bigram.key=value")
    if bigrams and BIGRAM not in configs:
        raise UserError(f"bigram.{bigrams[0]}: the bigram model is not among {', '.join(configs)}")
    return configs


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
