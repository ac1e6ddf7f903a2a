"""Figures as articles of the report: pictures, the paper's claims, findings and tables."""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from plots import style, tables
from plots.catalogue import drawings, load, one_line, preset_of, shipped
from plots.claims import claims
from plots.findings import HEADER, Finding, kind
from plots.naming import AnyOf
from plots.tables import ROOT, RUN, SEED, TableError, source_of

DPI = 150
SHOWN = 105  # pixels of the page per inch of a figure, as far as it fits
# A sign beside the colour for every kind of verdict, and what the legend says.
VERDICTS = {
    "agrees": ("✓", "agrees"),
    "off": ("Δ", "off by more than its error"),
    "disagrees": ("✗", "disagrees"),
    "open": ("~", "undecided: within noise, few runs or an edge"),
    "none": ("–", "no verdict: no claim, or words only"),
}


class Inputs(NamedTuple):
    """The tables of one card of the page, and the commands that draw it."""

    paths: list[Path]
    own: bool
    commands: Sequence[str] = ()


def own_table(table: str, results: Path) -> Path | None:
    """The newest table of yours that stands for a shipped one: of its sweep, at any preset."""
    sweep, _, file = source_of(table)
    described = tables.sweep_file(table)
    home = "vit_cifar5m" if described is None else described.parts[0]  # of `initial`, too
    bases = (results, results / home)
    folders = {results, *(folder for base in bases for folder in base.glob(f"{sweep}*"))}
    named = (one for one in folders if re.fullmatch(rf"{sweep}(_.*)?", one.name))
    files = [one / file for one in named if (one / file).is_file()]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def inputs(name: str, results: Path | None) -> Inputs:
    """Where a figure's tables are: yours, where all are there, or the shipped ones."""
    listed = load(name).TABLES
    apart = preset_of(name)  # beside the figure, which shows your results of any preset
    mine = [own_table(table, results) for table in listed] if results and not apart else []
    paths = [path for path in mine if path]
    if paths and (len(paths) == len(listed) or isinstance(listed, AnyOf)):
        return Inputs(paths, True, [f"python -m plots {name} {' '.join(map(_shown, paths))}"])
    paths = shipped(name)
    stems = [f"{path.parent.name}/{path.name.partition('.')[0]}" for path in paths]
    made = [command for table in stems for command in tables.commands(table)]
    made = [command for command in dict.fromkeys(made) if " plots ship " not in command]
    return Inputs(paths, False, [*made, f"python -m plots {name}"])


def _shown(path: Path) -> str:
    """A path as a reader types it: from the repository where it lies below it."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def provenance(path: Path) -> dict[str, str]:
    """A row of the list of tables: file, sweep, runs and seeds, commit, machine and checksum."""
    table, origin = tables.read(path, ()), tables.origin(path)
    environment = origin.get("environment", {})
    commits = {str(environment["commit"])} if "commit" in environment else set()
    if "commit" in table and not commits:
        commits = set(table["commit"].dropna().astype(str))
    runs = origin.get("runs", table[RUN].nunique() if RUN in table else None)
    seeds = table[SEED].nunique() if SEED in table else 0
    torch = environment.get("packages", {}).get("torch")
    made = [f"torch {torch}"] * bool(torch) + [environment.get("device", "")]
    return {
        "table": _shown(path),
        "sweep": str(origin.get("sweep", path.parent.name)),
        "n": (f"{runs:,} runs" if runs else f"{len(table):,} rows")
        + (f", {seeds} seed{'s' * (seeds > 1)}" if seeds else ""),
        "commit": ", ".join(commit[:10] for commit in sorted(commits)) or "–",
        "made with": ", ".join(filter(None, made)) or "–",
        "SHA-256": hashlib.sha256(path.read_bytes()).hexdigest()[:12],
    }


class Card(NamedTuple):
    """One article of the page, and its verdicts by kind."""

    name: str
    html: Markup
    counts: Mapping[str, int] = {}


def figure_card(name: str, source: Inputs) -> Card:
    """A figure: pictures, claims, findings, and where the numbers are from."""
    module, preset = load(name), preset_of(name)
    whole, caption = _words(module.__doc__ or name)
    title, _, place = whole.partition(" (")
    words = {"name": name, "title": title, "place": place.rstrip(")"), "caption": caption}
    words["mark"] = "your results" if source.own else preset.replace("_", "preset ")
    template = PAGES.get_template("article.html")
    try:
        with one_line(source.paths if source.own else ()):
            data = module.read(source.paths)
            lines = list(module.findings(data))
            pictures = [_picture(*one) for one in drawings(name, data, source.paths)]
    except TableError as error:  # a sweep that has not come far enough, say
        return Card(name, Markup(template.render(words, problem=str(error))))
    findings = [line for line in lines if isinstance(line, Finding)]
    counts = Counter(kind(finding.verdict) for finding in findings)
    header = getattr(module, "HEADER", HEADER)
    others = [line for line in lines if not isinstance(line, Finding) and line != header]
    rows = [provenance(path) for path in source.paths]
    html = template.render(
        words,
        problem="",
        whole_title=whole,
        pictures=pictures,
        claims=[one for one in claims() if one.entry["figure"] == name.removesuffix(preset)],
        counts=counts,
        rows={row["sweep"]: row for row in rows}.values(),
        commands=source.commands,
        columns=(*header.split()[:3], "verdict"),
        findings=findings,
        notes=[line for other in others for line in str(other).splitlines()],
        tables=rows,
    )
    return Card(name, Markup(html), counts)


def anchor(name: str) -> str:
    """Where links to an article lead."""
    return re.sub(r"\W+", "-", name).strip("-")


def _words(doc: str) -> tuple[str, str]:
    """(title, caption) from a figure's docstring, without the lines that say how to call it."""
    first, *others = [" ".join(part.split()) for part in doc.strip().split("\n\n")]
    caption = [part for part in others if not part.startswith("python -m")]
    return first.rstrip("."), " ".join(caption)


def _picture(stem: str, item: Any) -> dict[str, Any]:
    """A figure as a lossless WebP image inside the page."""
    wide, high = (round(inches * SHOWN) for inches in item.get_size_inches())
    (image,) = style.files(item, stem, DPI, {"webp": {"pil_kwargs": {"lossless": True}}}).values()
    data = base64.b64encode(image).decode()
    shown = stem.replace("_", " ")
    return {"stem": stem, "shown": shown, "wide": wide, "high": high, "data": data}


def _formulas(words: str) -> Markup:
    """A claim's alpha_A, W_Q and n^(-3/2) as they are set in a paper."""
    words = re.sub(r"\b(alpha|[A-Z])_([A-Z])\b", r"\1<sub>\2</sub>", str(escape(words)))
    for plain, set_ in (("alpha", "α"), ("lr*", "lr<sup>*</sup>"), (" = ", "&nbsp;=&nbsp;")):
        words = words.replace(plain, set_)
    words = re.sub(r"\^(?:\(([^()]*)\)|(\d+))", r"<sup>\1\2</sup>", words)
    return Markup(re.sub("<sup>[^<]*</sup>", lambda match: match[0].replace("-", "−"), words))


PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,  # a name that nothing has is an error, and no empty place
    trim_blocks=True,
    lstrip_blocks=True,
)
PAGES.globals |= {"anchor": anchor, "formulas": _formulas, "kind_of": kind, "verdicts": VERDICTS}
