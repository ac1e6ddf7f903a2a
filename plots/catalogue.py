"""The figures by name: which there are, their modules, and their drawings with a paper's credit."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd

from plots import style, tables
from plots.findings import Printed
from plots.tables import DESKTOP, TableError

PAPERS = ("everett", "dinan", "bordelon", "theory")
CHECK = "coordinate_check"  # of no paper: draws a user's own check


def names() -> list[str]:
    """The figures that have shipped tables, by paper: NAME of preset laptop, NAME_desktop of
    desktop."""
    return [
        name for figure in figures() for name in (figure, f"{figure}{DESKTOP}") if shipped(name)
    ]


def figures() -> list[str]:
    """All figures, by paper."""
    packages = {paper: importlib.import_module(f"plots.{paper}") for paper in PAPERS}
    return [f"{paper}/{figure}" for paper in packages for figure in packages[paper].FIGURES]


def shipped(name: str) -> list[Path]:
    """The shipped tables of a figure, of its preset: all, or those that there are where it can do
    with some (ANY) or has a figure for each (PER_TABLE); else none."""
    module, preset = load(name), DESKTOP if name.endswith(DESKTOP) else ""
    paths = [tables.shipped(f"{table}{preset}") for table in module.TABLES]
    found = [path for path in paths if path.exists()]
    some = getattr(module, "ANY", False) or getattr(module, "PER_TABLE", False)
    return found if found == paths or some else []


def find(word: str) -> str:
    """The full name of a figure; TableError, with the nearest name, for what is none."""
    known = list(dict.fromkeys([*figures(), *names(), CHECK]))
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


@functools.cache
def of_shipped(name: str) -> Sequence[Printed]:
    """What a figure says of its shipped tables; () where it has none."""
    module, paths = load(name), shipped(name)
    return module.findings(module.read(paths)) if paths else ()


@contextlib.contextmanager
def one_line(given: Sequence[Path]) -> Iterator[None]:
    """What the numbers of a user's tables break is one line; of shipped ones it is our mistake."""
    try:
        yield
    except TableError:
        raise
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        if not given:
            raise
        files, why = ", ".join(map(str, given)), " ".join(str(error).split())
        raise TableError(
            f"{files}: its numbers cannot be drawn: {type(error).__name__}: {why}"
        ) from error


def drawings(name: str, data: object, paths: Sequence[Path]) -> list[tuple[str, object]]:
    """(file name, figure or data frame) of what a figure's data, read from `paths`, show. A line
    above a figure's panels says its paper and what its tables rest on. A preset's figures that are
    those of laptop again (ONCE) are left out."""
    module, folder = load(name), name.rpartition("/")[0]
    package = importlib.import_module(f"plots.{folder}") if folder else None
    paper = getattr(module, "PAPER", getattr(package, "PAPER", None))
    parts = getattr(module, "PARTS", {})
    preset = DESKTOP if name.endswith(DESKTOP) else ""
    made = []
    for index, (stem, item) in enumerate(module.draw(data)):
        if preset and stem in getattr(module, "ONCE", ()):
            continue
        if paper and not isinstance(item, pd.DataFrame):
            per_table = getattr(module, "PER_TABLE", False) and index < len(paths)
            own = [paths[index]] if per_table else paths[parts.get(stem, slice(None))]
            style.credit(item, paper, stem, tables.facts(own, stem not in _counted(module)))
        made.append((stem.removesuffix(preset) + preset, item))
    return made


def _counted(module: ModuleType) -> Sequence[str]:
    """The figures that say their seeds or networks themselves."""
    return getattr(module, "COUNTED", ())
