"""The figures by name: which there are, their modules, and their drawings with a paper's credit."""

import contextlib
import difflib
import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from plots import style, tables
from plots.findings import Finding, Printed
from plots.naming import AnyOf
from plots.tables import PRESETS, TableError

# Folder -> whom its figures credit, unless one says so itself (PAPER), and their names.
PAPERS = {
    "everett": (
        "Everett et al.",
        "quickstart loss_vs_size alignment epsilon weight_decay adafactor learning_rates depth "
        "length transfer table_4 table_4_constants",
    ),
    "dinan": (
        "Dinan et al., Part II",
        "vit_search vit_strategies rate_transfer position_rate bart_rates bart_strategies "
        "ablations",
    ),
    "bordelon": (
        "Bordelon et al.",
        "rate_transfer head_dimension dynamics initial_heads heads depth kernels decoder",
    ),
    "theory": ("Dinan et al., Part I", "kernels error shares bigram"),
}
FINDINGS = Path(__file__).resolve().parent / "findings"  # of the shipped tables, as printed


def names() -> list[str]:
    """The figures that have shipped tables, by paper: NAME of preset laptop, NAME_desktop,
    NAME_closer, NAME_longer and NAME_wide of others."""
    every = (figure + preset for figure in figures() for preset in ("", *PRESETS))
    return list(filter(shipped, every))


def figures() -> list[str]:
    """All figures, by paper."""
    return [f"{paper}/{one}" for paper, (_, listed) in PAPERS.items() for one in listed.split()]


def shipped(name: str) -> list[Path]:
    """The shipped tables of a figure's preset: all, or those there are of `AnyOf`."""
    module, preset = load(name), preset_of(name)
    if preset and getattr(module, "ONCE", ()) is True:
        return []
    paths = [tables.shipped(f"{table}{preset}") for table in module.TABLES]
    present = [path for path in paths if path.exists()]
    return present if present == paths or isinstance(module.TABLES, AnyOf) else []


def find(word: str) -> str:
    """The full name of a figure; TableError, with the nearest name, for what is none."""
    known = list(dict.fromkeys([*figures(), *names()]))
    matches = [name for name in known if word in (name, name.partition("/")[2])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise TableError(f"{word!r} is a figure of {len(matches)} papers: {', '.join(matches)}")
    lasts = {name.rpartition("/")[2]: name for name in known}
    near = difflib.get_close_matches(word, [*known, *lasts], 1, 0.5)
    hint = f"did you mean {lasts.get(near[0], near[0])}? " if near else ""
    raise TableError(f"no figure {word!r}; {hint}`python -m plots --list` has all names")


def load(name: str) -> ModuleType:
    """The module of a figure: TABLES, read(paths) -> data, findings(data) -> Report, and
    draw(data) -> Drawn."""
    name = name.removesuffix(preset_of(name))
    return importlib.import_module("plots." + name.replace("/", "."))


def preset_of(name: str) -> str:
    """The end of a figure's name that says the preset of its tables; "" for laptop."""
    return next((preset for preset in PRESETS if name.endswith(preset)), "")


@functools.cache
def of_shipped(name: str) -> Sequence[Printed]:
    """What a figure says of its shipped tables; () where it has none."""
    module, paths = load(name), shipped(name)
    return list(module.findings(module.read(paths))) if paths else ()


def saying(name: str, finding: str) -> Sequence[Path]:
    """The shipped tables of a figure that a finding rests on. Where a figure draws any of several:
    those that give this finding by themselves, or all if none does."""
    paths = shipped(name)
    if len(paths) < 2 or not isinstance(load(name).TABLES, AnyOf):
        return paths
    return [path for path in paths if finding in _said_alone(name, path)] or paths


@functools.cache
def _said_alone(name: str, path: Path) -> set[str]:
    module = load(name)
    try:
        said = list(module.findings(module.read([path])))
    except TableError:  # it takes another table beside it
        return set()
    return {line.name for line in said if isinstance(line, Finding)}


@contextlib.contextmanager
def one_line(paths_of_user: Sequence[Path]) -> Iterator[None]:
    """An error from a user's tables becomes one line; with shipped tables it has a traceback.
    TableError, too, where two of them have a row in common."""
    try:
        yield
        tables.refuse_overlap(paths_of_user)
    except TableError:
        raise
    except (
        *(ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError),
    ) as error:
        if not paths_of_user:
            raise
        files, why = ", ".join(map(str, paths_of_user)), " ".join(str(error).split())
        raise TableError(
            f"{files}: its numbers cannot be drawn: {type(error).__name__}: {why}"
        ) from error


def drawings(name: str, data: object, paths: Sequence[Path]) -> list[tuple[str, object]]:
    """(file name, figure) of what a figure's data, read from `paths`, show. Lines
    above a figure's panels say its paper and what its tables rest on. Of other presets those
    that they do not change (ONCE) are left out."""
    module, preset, made = load(name), preset_of(name), []
    paper = getattr(module, "PAPER", PAPERS[name.partition("/")[0]][0])
    once, facts = getattr(module, "ONCE", ()), functools.cache(tables.facts)
    for stem, item, *indices in module.draw(data):
        if preset and stem in once:
            continue
        own = [paths[index] for index in indices[0]] if indices else paths
        style.credit(item, paper, stem, facts(tuple(own)))
        made.append((stem.removesuffix(preset) + preset, item))
    return made
