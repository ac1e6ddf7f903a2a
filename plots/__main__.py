"""Draws figures from result tables and prints their findings.

    python -m plots NAME [TABLE ...] [--out FOLDER]   one figure, of the shipped tables or of yours
        --where 'model.width<=256' --where 'curve!=mup_fixed'  of these rows alone
        --label muP="µP" --label my_curve="ours"               other words in titles and legends
        --style paper|talk                                     serif, captionless; or larger
    python -m plots --all [--out FOLDER]              every figure of the shipped tables
    python -m plots --list                            all names; NAME --help tells more of one
    python -m plots report [--results DIR] [--live]   all figures and findings as one HTML page
    python -m plots ship TABLE PAPER/NAME             keeps a table with the figures

NAME is PAPER/FIGURE, such as everett/learning_rates, or FIGURE alone where one paper has it;
NAME_desktop is the same of the shipped tables of preset desktop, where there are some.
Figures are written as PNG and PDF: those of shipped tables to plots/figures/PAPER, others next to
the first table.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from plots import report, ship, style, tables
from plots.catalogue import drawings, find, load, names, read, shipped, told
from plots.tables import DESKTOP, Condition, TableError


def make(
    name: str,
    given: Sequence[Path],
    out: Path | None,
    where: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    kind: str | None = None,
    unseen: set[str] | None = None,
) -> tuple[str, list[Path]]:
    """(findings, files written) of one figure, from the tables given or the shipped ones, of the
    rows that meet the conditions `where`, with other words for labels, in a style for print.

    A label that the figure lacks is a TableError, or with `unseen` stays in it: those that no
    figure has had so far."""
    module = load(name)
    paths = list(given) or shipped(name)
    if not paths:
        raise TableError(f"{name} has no shipped table; give the path of one")
    own = paths[0] if paths[0].is_dir() else paths[0].parent
    folder = out or (own if given else style.FIGURES / name.partition("/")[0])
    for path in (folder, *folder.parents):
        if path.is_file():
            raise TableError(f"{path} is a file, not a folder; give --out a folder")
    _check_belong(name, given)
    with tables.where([Condition.parse(text) for text in where]), told(given):
        data = read(name, paths)
        text = "\n".join(map(str, module.findings(data)))
        drawn = drawings(name, data, paths, [f"only {text}" for text in where])
        for _, item, _ in drawn if given and (where or labels or kind) else ():
            if not isinstance(item, pd.DataFrame):
                item.draw_without_rendering()  # what cannot be drawn is not the words' fault
    labels = labels or {}
    missing = set(labels) if unseen is None else unseen
    for _, item, _ in drawn:
        if not isinstance(item, pd.DataFrame):
            missing -= (renamed := style.rename(item, labels))
            if renamed:
                _check_words(item, {label: labels[label] for label in renamed})
            if kind:
                style.dress(item, kind)
    if missing and unseen is None:
        raise TableError(f"--label {min(missing)!r}: no such words in the figure")
    if kind == "paper":
        text = "\n".join([*(caption for *_, caption in drawn if caption), text])
    files: dict[Path, bytes] = {}
    with told(given):  # what cannot be drawn shows before a file is written
        for stem, item, _ in drawn:
            files |= {
                folder / file: content for file, content in style.files(item, stem, kind).items()
            }
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_bytes(content)
    return text, list(files)


def _check_words(figure, labels: Mapping[str, str]) -> None:
    """TableError where a figure cannot be drawn with the words it was given."""
    try:
        figure.draw_without_rendering()
    except ValueError:
        words = ", ".join(f"'{old}={new}'" for old, new in sorted(labels.items()))
        raise TableError(f"--label {words}: not valid mathtext") from None


def _check_belong(name: str, given: Sequence[Path]) -> None:
    """TableError for a table whose curves are those of another figure's shipped tables."""
    mine = shipped(name)
    for path in given:
        found = set() if path in mine else _curves(path)
        if not found or any(found & _shipped_curves(table) for table in mine):
            continue
        others = [
            other
            for other in names()
            if not other.endswith(DESKTOP)
            and any(found <= _shipped_curves(table) for table in shipped(other))
        ]
        if others:
            raise TableError(
                f"{path}: this is a table of {' and '.join(others)}; how to draw it: "
                f"`python -m plots {others[0]} --help`"
            )


def _curves(path: Path) -> set[str]:
    """The curves of a table; none where it has no such column or cannot be read."""
    try:
        return set(pd.read_csv(path, usecols=[tables.CURVE])[tables.CURVE].astype(str))
    except Exception:  # `tables.read` says what is wrong with it
        return set()


_shipped_curves = functools.cache(_curves)


def _run(args: argparse.Namespace) -> None:
    if args.list:
        for name in names():
            title = (load(name).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            desktop = "Preset desktop: " if name.endswith(DESKTOP) else ""
            print(f"{name:<31} {desktop}{title}")
        return
    chosen = names() if args.all else [find(args.name)]
    labels = dict(args.label)
    unseen = set(labels) if args.all else None
    for name in chosen:
        if args.all:
            print(f"== {name}")
        paper = name.partition("/")[0]
        out = args.out / paper if args.all and args.out else args.out
        text, written = make(name, args.tables, out, args.where, labels, args.style, unseen)
        print(f"{text}\nwritten: {', '.join(map(str, written))}")
    if unseen:
        raise TableError(f"--label {min(unseen)!r}: no such words in any figure")


def _label(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not (old and sign):
        raise argparse.ArgumentTypeError(f"{text!r}: expected OLD=NEW")
    return old, new


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plots",
        description=__doc__,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="figure, such as everett/learning_rates")
    parser.add_argument("tables", type=Path, nargs="*", help="its tables (default: shipped ones)")
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument(
        "--where",
        metavar="COLUMN<=VALUE",
        action="append",
        default=[],
        help="draw these rows alone, such as model.width<=256; may be repeated",
    )
    parser.add_argument(
        "--label",
        metavar="OLD=NEW",
        action="append",
        default=[],
        type=_label,
        help="another word for one in titles and legends; may be repeated",
    )
    parser.add_argument(
        "--style",
        choices=style.STYLES,
        help="paper: serif, without title and caption; talk: larger",
    )
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
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
    except (TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
