"""The figures by name: which there are, their modules, and their drawings with a paper's credit."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from types import ModuleType

import pandas as pd

from plots import ship, style
from plots.tables import TableError

CHECK = "coordinate_check"  # of no paper: draws a user's own check


def names() -> list[str]:
    """The figures that have shipped tables, by paper."""
    packages = {paper: importlib.import_module(f"plots.{paper}") for paper in ship.PAPERS}
    return [f"{paper}/{figure}" for paper in packages for figure in packages[paper].FIGURES]


def find(word: str) -> str:
    """The full name of a figure; TableError, with the nearest name, for what is none."""
    known = [*names(), CHECK]
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
    return importlib.import_module("plots." + name.replace("/", "."))


def drawings(name: str, data: object) -> Iterator[tuple[str, object]]:
    """(file name, figure or data frame) of a figure's data; figures say which paper they are of."""
    module, folder = load(name), name.rpartition("/")[0]
    package = importlib.import_module(f"plots.{folder}") if folder else None
    paper = getattr(module, "PAPER", getattr(package, "PAPER", None))
    for stem, item in module.draw(data):
        if paper and not isinstance(item, pd.DataFrame):
            style.credit(item, paper, stem)
        yield stem, item
