"""Figures as articles of the report: pictures, the paper's claims, findings and tables."""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

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
    html: str
    counts: Mapping[str, int] = {}


def figure_card(name: str, source: Inputs) -> Card:
    """A figure: pictures, claims, findings, and where the numbers are from."""
    module = load(name)
    title, caption = _words(module.__doc__ or name)
    preset = preset_of(name).replace("_", "preset ")
    head = _head(name, title, "your results" if source.own else preset)
    try:
        with one_line(source.paths if source.own else ()):
            data = module.read(source.paths)
            lines = list(module.findings(data))
            pictures = "".join(
                _picture(stem, item, title, caption)
                for stem, item in drawings(name, data, source.paths)
            )
    except TableError as error:  # a sweep that has not come far enough, say
        body = f'<p class="missing">Not drawn yet: {escape(str(error))}</p>'
        return Card(name, _article(name, head + body))
    findings = [line for line in lines if isinstance(line, Finding)]
    counts = Counter(kind(finding.verdict) for finding in findings)
    header = getattr(module, "HEADER", HEADER)
    notes = [line for line in lines if not isinstance(line, Finding) and line != header]
    rows = [provenance(path) for path in source.paths]
    body = (
        f'{head}<div class="look"><div class="pictures">{pictures}'
        f'<p class="caption">{escape(caption)}</p></div>{_facts(name, source, counts, rows)}</div>'
        f"{_findings(name, findings, header.split())}{_notes(notes, bool(findings))}{_made(rows)}"
    )
    return Card(name, _article(name, body), counts)


def _article(name: str, body: str) -> str:
    return f'<article id="{anchor(name)}">{body}</article>'


def anchor(name: str) -> str:
    """Where links to an article lead."""
    return re.sub(r"\W+", "-", name).strip("-")


def _words(doc: str) -> tuple[str, str]:
    """(title, caption) from a figure's docstring, without the lines that say how to call it."""
    first, *others = [" ".join(part.split()) for part in doc.strip().split("\n\n")]
    caption = [part for part in others if not part.startswith("python -m")]
    return first.rstrip("."), " ".join(caption)


def _head(name: str, title: str, badge: str) -> str:
    plain, _, place = title.partition(" (")
    mark = f'<span class="own">{badge}</span>' if badge else ""
    above = f'<p class="place">{escape(place.rstrip(")") or name)}{mark}</p>'
    link = f'<a class="anchor" href="#{anchor(name)}" aria-label="Link to this figure">#</a>'
    return f"{above}<h3>{escape(plain)} {link}</h3>"


def _picture(stem: str, item: Any, title: str, caption: str) -> str:
    """A figure as a lossless WebP image inside the page."""
    wide, high = (round(inches * SHOWN) for inches in item.get_size_inches())
    (image,) = style.files(item, stem, DPI, {"webp": {"pil_kwargs": {"lossless": True}}}).values()
    shown, data = stem.replace("_", " "), base64.b64encode(image).decode()
    return (
        f'<label class="picture"><input type="checkbox" aria-label="Enlarge {escape(shown)}"><img '
        f'src="data:image/webp;base64,{data}" width="{wide}" height="{high}" '
        f'alt="{escape(f"{shown}: {title}. {caption}")}" data-stem="{escape(stem)}"></label>'
    )


def _formulas(words: str) -> str:
    """A claim's alpha_A, W_Q and n^(-3/2) as they are set in a paper."""
    words = re.sub(r"\b(alpha|[A-Z])_([A-Z])\b", r"\1<sub>\2</sub>", escape(words))
    for plain, set_ in (("alpha", "α"), ("lr*", "lr<sup>*</sup>"), (" = ", "&nbsp;=&nbsp;")):
        words = words.replace(plain, set_)
    words = re.sub(r"\^(?:\(([^()]*)\)|(\d+))", r"<sup>\1\2</sup>", words)
    return re.sub("<sup>[^<]*</sup>", lambda match: match[0].replace("-", "−"), words)


def _facts(name: str, source: Inputs, counts: Counter[str], rows: Sequence[dict[str, str]]) -> str:
    """The column beside the pictures: claims, verdicts, runs and commands."""
    figure = name.removesuffix(preset_of(name))
    own = [claim for claim in claims() if claim.entry["figure"] == figure]
    words = "".join(
        f'<p class="claim">{_formulas(claim.entry["claim"])}: <b>{claim.word}</b> '
        f'<span class="where">{escape(claim.entry["where"])}</span></p>'
        for claim in own
    )
    tally = "".join(
        f"<li>{_badge(key, str(counts[key]))} {escape(VERDICTS[key][1])}</li>"
        for key in VERDICTS
        if counts[key]
    )
    runs = {row["sweep"]: row["n"] for row in rows}
    commands = "".join(
        f'<code class="command">{escape(command).replace("/", "/<wbr>")}</code>'
        for command in source.commands
    )
    return (
        f'<aside class="facts"><h4>Claims, with all shipped tables</h4>'
        f"{words or '<p>None is listed.</p>'}"
        f'<h4>Measured here</h4><ul class="tally">'
        f"{tally or '<li>Numbers without a verdict, listed below.</li>'}</ul>"
        f"<h4>Runs</h4><p>{escape('; '.join(f'{key}: {n}' for key, n in runs.items()))}</p>"
        f"<h4>Made by</h4>{commands}</aside>"
    )


def _badge(key: str, words: str) -> str:
    return (
        f'<span class="badge {key}"><span aria-hidden="true">{VERDICTS[key][0]}</span> '
        f"{escape(words)}</span>"
    )


def _findings(name: str, findings: Sequence[Finding], columns: Sequence[str]) -> str:
    """The table of findings."""
    if not findings:
        return ""
    rows = "".join(
        f'<tr data-kind="{kind(finding.verdict)}"><td>{escape(finding.name)}</td>'
        f'<td data-label="measured">{escape(finding.measured)}</td>'
        f'<td data-label="{columns[2]}">{escape(finding.published)}</td><td data-label="verdict">'
        f"{_badge(kind(finding.verdict), finding.verdict) if finding.verdict else ''}</td></tr>"
        for finding in findings
    )
    return _table(f"Findings of {name}", (*columns[:3], "verdict"), rows, ' class="findings"')


def _table(label: str, heads: Iterable[str], rows: str, kind: str = "") -> str:
    """Rows under their heads, which a reader may scroll."""
    heads = "".join(f'<th scope="col">{word}</th>' for word in heads)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table{kind}><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _notes(notes: Sequence[str], beside: bool) -> str:
    """What the findings rest on; where a figure has no verdicts, its numbers."""
    lines = [line for note in notes for line in str(note).splitlines()]
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    words = f"What these numbers rest on ({len(lines)})" if beside else "Measured"
    opened = "" if beside and len(lines) > 4 else " open"
    return f'<details class="notes"{opened}><summary>{words}</summary><ul>{items}</ul></details>'


def _made(rows: Sequence[dict[str, str]]) -> str:
    """Tables, runs, commit and machine."""
    cells = (
        "".join(f'<td data-label="{word}">{escape(value)}</td>' for word, value in row.items())
        for row in rows
    )
    body = _table("Tables", rows[0], "".join(f"<tr>{row}</tr>" for row in cells))
    return f'<details class="made"><summary>Tables, runs and commit</summary>{body}</details>'
