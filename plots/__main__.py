"""Draws figures from result tables and prints their findings.

    python -m plots NAME [TABLE ...] [--out FOLDER]   one figure, of the shipped tables or of yours
        --where 'model.width<=256' --where 'curve!=mup_fixed'  of these rows alone
    python -m plots --all [--out FOLDER]              every figure of the shipped tables
    python -m plots --list                            all names; NAME --help tells more of one
    python -m plots report [--results DIR]            all figures and findings as one HTML page
    python -m plots ship TABLE PAPER/NAME             keeps a table with the figures
    python -m plots claims                            judges every claim of the papers
    python -m plots fill                              writes claims and findings into READMEs

NAME is PAPER/FIGURE, such as everett/learning_rates, or FIGURE alone where one paper has it;
NAME_desktop is the same of the shipped tables of preset desktop; so are _closer, _longer and _wide.
Figures are PNG and PDF: of shipped tables in plots/figures/PAPER, of others by the first table.
Findings are printed; those of shipped tables stand in plots/findings/PAPER/NAME.txt, too.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from plots import catalogue, style, tables
from plots.catalogue import drawings, find, load, names, one_line, preset_of, shipped
from plots.tables import TableError
from training.errors import one_line_errors
from training.files import write_bytes

COMMANDS = ("ship", "report", "claims", "fill")


def make(
    name: str, paths_of_user: Sequence[Path], out: Path | None, where: Sequence[str] = ()
) -> tuple[str, list[Path]]:
    """(findings, files written) of one figure, from the tables given or the shipped ones, of the
    rows that meet the conditions `where`."""
    module, paths = load(name), list(paths_of_user) or shipped(name)
    if not paths:
        preset = preset_of(name)
        made = [one for table in module.TABLES for one in tables.commands(table + preset)]
        how = f", which these make: {' && '.join(made)}" if made else ""
        raise TableError(f"{name} has no shipped table{how}; give the path of one")
    if where and not (paths_of_user or out):
        raise TableError("--where of the shipped tables would replace their figures; give --out")
    beside = paths[0] if paths[0].is_dir() else paths[0].parent
    folder = out or (beside if paths_of_user else style.FIGURES / name.partition("/")[0])
    for path in (folder, *folder.parents):
        if path.is_file():
            raise TableError(f"{path} is a file, not a folder; give --out a folder")
    files: dict[Path, bytes] = {}
    with tables.where(where), one_line(paths_of_user):  # what cannot be drawn writes nothing
        data = module.read(paths)
        text = "\n".join(map(str, module.findings(data)))
        for stem, item in drawings(name, data, paths):
            files |= {folder / file: content for file, content in style.files(item, stem).items()}
    if not (paths_of_user or out):
        files[catalogue.FINDINGS / f"{name}.txt"] = f"{text}\n".encode()
    for path, content in files.items():
        write_bytes(path, content)
    return text, list(files)


def _draw(args: argparse.Namespace) -> None:
    for name in names() if args.all else [find(args.name)]:
        if args.all:
            print(f"== {name}")
        paper = name.partition("/")[0]
        out = args.out / paper if args.all and args.out else args.out
        text, written = make(name, args.tables, out, args.where)
        print(f"{text}\nwritten: {', '.join(map(str, written))}", flush=True)


def _figures(argv: Sequence[str]) -> None:
    """Draws, lists or explains figures."""
    look = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(prog="python -m plots", add_help=False, **look)
    add = parser.add_argument
    add("name", nargs="?", help="figure, such as everett/learning_rates")
    add("tables", type=Path, nargs="*", help="its tables (default: shipped ones)")
    add("--out", type=Path, help="folder to write to")
    words = "draw these rows alone, such as model.width<=256; may be repeated"
    add("--where", metavar="COLUMN<=VALUE", action="append", default=[], help=words)
    add("--all", action="store_true", help="every figure of shipped tables")
    add("--list", action="store_true", help="names of all figures")
    add("-h", "--help", action="store_true", help="of the command or of a figure")
    args = parser.parse_intermixed_args(argv)
    if not (args.name or args.all or args.list or args.help):
        parser.error("give a figure's NAME, --all or --list")
    if args.name and (args.all or args.list):
        parser.error(f"{args.name!r} with --{'all' if args.all else 'list'}: give one of them")
    if args.help:
        print(load(find(args.name)).__doc__ if args.name else parser.format_help())
    elif args.list:
        for name in names():
            title = (load(name).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            preset = preset_of(name).removeprefix("_")
            print(f"{name:<31} {f'Preset {preset}: ' if preset else ''}{title}")
    else:
        _draw(args)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a user's mistake is one line and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with one_line_errors(OSError):
        if argv and argv[0] in COMMANDS:
            importlib.import_module(f"plots.{argv[0]}").main(argv[1:])
        else:
            _figures(argv)


if __name__ == "__main__":
    main()
