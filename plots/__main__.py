"""Draws figures from result tables and prints their findings.

    python -m plots NAME [TABLE ...] [--out FOLDER]   one figure, of the shipped tables or of yours
    python -m plots --all [--out FOLDER]              every figure of the shipped tables
    python -m plots --list                            all names; NAME --help tells more of one
    python -m plots ship TABLE PAPER/NAME             keeps a table with the figures
    python -m plots report [--results DIR] [--live]   all figures and findings as one HTML page

NAME is PAPER/FIGURE, such as everett/learning_rates, or FIGURE alone where one paper has it.
Figures are written as PNG and PDF: those of shipped tables to plots/figures/PAPER, others next to
the first table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from plots import report, ship, style
from plots.catalogue import CHECK, drawings, find, load, names
from plots.tables import TableError, shipped


def make(name: str, given: Sequence[Path], out: Path | None) -> tuple[str, list[Path]]:
    """(findings, files written) of one figure, from the tables given or the shipped ones."""
    module = load(name)
    paths = list(given) or [shipped(table) for table in module.TABLES]
    if not paths:
        raise TableError(f"{name} has no shipped table; give the path of one")
    own = paths[0] if paths[0].is_dir() else paths[0].parent
    folder = out or (own if given else style.FIGURES / name.partition("/")[0])
    data = module.read(paths)
    text = "\n".join(map(str, module.findings(data)))
    written = []
    for stem, item in drawings(name, data):
        written += style.save(item, folder, stem)
    return text, written


def _run(args: argparse.Namespace) -> None:
    if args.list:
        for name in (*names(), CHECK):
            title = (load(name).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            print(f"{name:<26}{title}")
        return
    chosen = names() if args.all else [find(args.name)]
    for name in chosen:
        if args.all:
            print(f"== {name}")
        paper = name.partition("/")[0]
        out = args.out / paper if args.all and args.out else args.out
        text, written = make(name, args.tables, out)
        print(f"{text}\nwritten: {', '.join(map(str, written))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plots", description=__doc__, add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="figure, such as everett/learning_rates")
    parser.add_argument("tables", type=Path, nargs="*", help="its tables (default: shipped ones)")
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--all", action="store_true", help="every figure of shipped tables")
    parser.add_argument("--list", action="store_true", help="names of all figures")
    parser.add_argument("-h", "--help", action="store_true", help="of the command or of a figure")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a user's mistake is one line and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["ship"], ["report"]):
        return {"ship": ship, "report": report}[argv[0]].main(argv[1:])
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    if not (args.name or args.all or args.list or args.help):
        parser.error("give a figure's NAME, --all or --list")
    if args.name and (args.all or args.list):
        parser.error(f"{args.name!r} with --{'all' if args.all else 'list'}: give one of them")
    try:
        if args.help:
            print(load(find(args.name)).__doc__ if args.name else parser.format_help())
        else:
            _run(args)
    except (TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
