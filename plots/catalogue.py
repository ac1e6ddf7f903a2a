"""The figures by name: which there are, their modules, and their drawings with a paper's credit."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from plots import ship, style, tables
from plots.tables import DESKTOP, TableError


def names() -> list[str]:
    """The figures that have shipped tables, by paper; each again as NAME_desktop where tables of
    preset desktop are shipped, too."""
    packages = {paper: importlib.import_module(f"plots.{paper}") for paper in ship.PAPERS}
    figures = [f"{paper}/{figure}" for paper in packages for figure in packages[paper].FIGURES]
    return [
        name
        for figure in figures
        for name in (figure, f"{figure}{DESKTOP}")
        if name == figure or shipped(name)
    ]


def shipped(name: str) -> list[Path]:
    """The shipped tables of a figure; of NAME_desktop those that there are, if it can do with
    them."""
    listed = load(name).TABLES
    if not name.endswith(DESKTOP):
        return [tables.shipped(table) for table in listed]
    paths = [tables.shipped(f"{table}{DESKTOP}") for table in listed]
    found = [path for path in paths if path.exists()]
    return found if found == paths or (found and enough(name, found)) else []


def enough(name: str, paths: Sequence[Path]) -> bool:
    """Whether a figure can do with some of its tables."""
    try:
        with told(paths):
            read(name, paths)
    except TableError:
        return False
    return True


def find(word: str) -> str:
    """The full name of a figure; TableError, with the nearest name, for what is none."""
    known = names()
    found = [name for name in known if word in (name, name.partition("/")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise TableError(f"{word!r} is a figure of {len(found)} papers: {', '.join(found)}")
    lasts = {name.rpartition("/")[2]: name for name in known}
    near = difflib.get_close_matches(word, [*known, *lasts], 1, 0.5)
    hint = f"did you mean {lasts.get(near[0], near[0])}? " if near else ""
    raise TableError(f"no figure {word!r}; {hint}`python -m plots --list` has all names")


def load(name: str) -> ModuleType:
    """The module of a figure: TABLES, read(paths), findings(data) and draw(data)."""
    return importlib.import_module("plots." + name.removesuffix(DESKTOP).replace("/", "."))


def read(name: str, paths: Sequence[Path]) -> Any:
    """What a figure reads from its tables; TableError for bad ones, and for tables of two sweeps
    where the figure shows one."""
    module = load(name)
    data = module.read(paths)
    sweeps = [tables.source_of(table)[0] for table in module.TABLES]
    several = {sweep for sweep in sweeps if sweeps.count(sweep) > 1} - {"initial"}  # has no runs
    if len(several) == 1:
        tables.of_one_sweep(paths)
    return data


@contextlib.contextmanager
def told(given: Sequence[Path]) -> Iterator[None]:
    """What the numbers of a user's tables break is one line; of shipped ones it is our mistake."""
    try:
        yield
    except TableError:
        raise
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        if not given:
            raise
        why = " ".join(str(error).split())
        raise TableError(
            f"{', '.join(map(str, given))}: its numbers cannot be drawn: "
            f"{type(error).__name__}: {why}"
        ) from error


def drawings(
    name: str, data: object, paths: Sequence[Path], also: Sequence[str] = ()
) -> list[tuple[str, object, str]]:
    """(file name, figure or data frame, caption) of what a figure's data, read from `paths`, show.

    A figure's caption line says its paper, what its tables rest on, and `also`; a data frame and a
    user's own check have none.
    """
    module, folder = load(name), name.rpartition("/")[0]
    package = importlib.import_module(f"plots.{folder}") if folder else None
    paper = getattr(module, "PAPER", getattr(package, "PAPER", None))
    drawn = list(module.draw(data))
    counted = getattr(module, "COUNTED", ())  # figures that say their seeds or networks themselves
    facts = [tables.facts(paths, not counted)] * len(drawn) if paper else [[]]
    if getattr(module, "PER_TABLE", False):  # its figures are one for each table
        facts = [tables.facts([path]) for path in paths]
    elif parts := getattr(module, "PARTS", {}):  # each of them is drawn of some tables
        facts = [tables.facts(paths[parts[stem]]) for stem, _ in drawn]
    facts += [[]] * (len(drawn) - len(facts))  # what follows the figures, such as Table 4
    preset = DESKTOP if name.endswith(DESKTOP) else ""
    return [
        (
            stem.removesuffix(preset) + preset,
            item,
            ""
            if isinstance(item, pd.DataFrame)
            else style.credit(item, paper, stem, [*known, *also]),
        )
        for (stem, item), known in zip(drawn, facts, strict=True)
    ]
