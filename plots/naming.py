"""Curves, optimisers, parameterisations and tables of your own, beside those that a figure knows.

A figure names what it knows in a mapping from name to label, in the paper's order. Whatever else
its table holds comes after that, labels itself, and has a colour that none of the known ones has.
Tables of a figure that draws any of several (`AnyOf`) are told apart by what is in them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plots.style import LABELS, PALETTE, SHAPES
from plots.tables import TableError


class AnyOf(tuple[str, ...]):
    """The tables, PAPER/NAME below plots/data, of a figure that draws what there are of them."""


def told_apart(paths: Sequence[Path], kind: Callable[[Path], str]) -> dict[str, tuple[int, Path]]:
    """Kind -> (place among the paths, path) of tables; TableError for two of one kind."""
    tables: dict[str, tuple[int, Path]] = {}
    for place, path in enumerate(paths):
        if (name := kind(path)) in tables:
            raise TableError(f"{path}: a second table of {name}; expected one of each")
        tables[name] = place, path
    return tables


def present(labels: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Name -> label of those among `names`: known ones in the order of `labels`, then the others,
    which label themselves."""
    listed = list(dict.fromkeys(names))
    known = {name: label for name, label in labels.items() if name in listed}
    return known | {name: name for name in listed if name not in labels}


def split(curve: str, firsts: Iterable[str], seconds: Iterable[str]) -> tuple[str, str] | None:
    """(first, second) of a curve called FIRST_SECOND; None for a curve with another name."""
    seconds = tuple(seconds)
    for first in firsts:
        second = curve.removeprefix(f"{first}_")
        if second != curve and second in seconds:
            return first, second
    return None


Look = Mapping[str, Any]  # properties of a line
RULES: Mapping[str, Look] = {  # parameterisations, which look alike in every figure
    name: {"color": color, "marker": marker}
    for name, color, marker in zip(LABELS, PALETTE, SHAPES, strict=False)
}


def looks(names: Sequence[str], known: Mapping[str, Look] = RULES) -> dict[str, Look]:
    """Name -> look of a line: that of a `known` name; the others have, in their order, colours and
    markers that no known one has."""
    left = [color for color in PALETTE if color not in {look["color"] for look in known.values()}]
    others = [name for name in names if name not in known]
    colors, markers = len(left), len(SHAPES)
    unknown = {
        name: {"color": left[place % colors], "marker": SHAPES[(len(known) + place) % markers]}
        for place, name in enumerate(others)
    }
    return {name: known.get(name) or unknown[name] for name in names}


def rule_entries(rules: Mapping[str, str]) -> list[tuple[str, dict]]:
    """Legend entries of parameterisations, name -> label."""
    look_of = looks(list(rules))
    return [(label, {**look_of[rule], "ms": 4, "lw": 1.2}) for rule, label in rules.items()]
