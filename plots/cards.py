"""Figures as articles of the report: pictures, the paper's claim, findings, curves and tables."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path

import pandas as pd
import yaml

from plots import style, tables
from plots.catalogue import drawings, enough, load, read, shipped, told
from plots.explorer import explorer
from plots.findings import HEADER, Finding, kind
from plots.tables import DESKTOP, ROOT, RUN, SEED, STATUS, TableError, source_of

CLAIMS = Path(__file__).with_name("claims.yaml")
DPI = 150
SHOWN = 105  # pixels of the page per inch of a figure, as far as it fits
# A sign beside the colour for every kind of verdict, and what the legend says.
VERDICTS = {
    "agrees": ("✓", "agrees"),
    "off": ("Δ", "off by more than its error"),
    "disagrees": ("✗", "disagrees"),
    "open": ("~", "undecided: within noise or few runs"),
    "none": ("–", "no verdict: no claim, or words only"),
}


# Tables: which a figure is drawn from.


def own_table(table: str, results: Path) -> Path | None:
    """The newest table of yours that stands for a shipped one: of its sweep, at any preset."""
    sweep, file = source_of(table)
    paper = table.partition("/")[0]
    homes = [
        experiment
        for experiment in tables.EXPERIMENTS.get(paper, ())
        if (ROOT / experiment / "sweeps" / f"{sweep}.yaml").exists() or sweep == "initial"
    ]
    bases = [results / home for home in homes] + [results]
    if not homes and paper != "theory":
        return None
    folders = [results, *(folder for base in bases for folder in base.glob(f"{sweep}*"))]
    found = [
        folder / file
        for folder in folders
        if (folder.name == sweep or folder.name.startswith(f"{sweep}_"))
        and (folder / file).is_file()
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@dataclass
class Source:
    """The tables of one card of the page, and what is known of how they were made."""

    paths: list[Path]
    own: bool
    commands: list[str] = field(default_factory=list)

    @property
    def version(self) -> str:
        """Changes when a table does."""
        stats = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in self.paths]
        return hashlib.sha256(repr(stats).encode()).hexdigest()[:12]


def sources(name: str, results: Path | None, live: bool) -> Source | None:
    """Where a figure's tables are; None for a live page without results of this figure."""
    listed = load(name).TABLES
    apart = name.endswith(DESKTOP)  # beside the figure, which shows your results of any preset
    mine = [own_table(table, results) for table in listed] if results and not apart else []
    found = [path for path in mine if path]
    if found and (len(found) == len(listed) or enough(name, found)):
        drawn = " ".join(map(_shown, found))
        return Source(found, True, [f"python -m plots {name} {drawn}"])
    if live:
        return None
    paths = shipped(name)
    kept = [f"{path.parent.name}/{path.name.partition('.')[0]}" for path in paths]
    made = [command for table in kept for command in tables.commands(table)]
    made = [command for command in dict.fromkeys(made) if " plots ship " not in command]
    return Source(paths, False, [*made, f"python -m plots {name}"])


def _shown(path: Path) -> str:
    """A path as a reader types it: from the repository where it lies below it."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def provenance(path: Path) -> dict[str, str]:
    """A row of the list of tables: file, sweep, runs and seeds, commit, machine and checksum."""
    table = pd.read_csv(path, low_memory=False)
    beside = path.with_name(path.name.partition(".")[0] + ".json")
    origin = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    environment = origin.get("environment", {})
    commits = (
        [str(environment["commit"])]
        if "commit" in environment
        else (sorted(set(table["commit"].dropna().astype(str))) if "commit" in table else [])
    )
    runs = origin.get("runs", table[RUN].nunique() if RUN in table else None)
    seeds = table[SEED].nunique() if SEED in table else 0
    packages = environment.get("packages", {})
    shipped = path.is_relative_to(tables.DATA)
    return {
        "table": _shown(path),
        "sweep": source_of(f"{path.parent.name}/{path.name.partition('.')[0]}")[0]
        if shipped
        else path.parent.name,
        "n": (f"{runs:,} runs" if runs else f"{len(table):,} rows")
        + (f", {seeds} seed{'s' * (seeds > 1)}" if seeds else ""),
        "commit": ", ".join(re.sub(r"^(\w{10})\w+", r"\1", commit) for commit in commits) or "–",
        "made with": ", ".join(
            filter(
                None,
                [
                    f"torch {packages['torch']}" if "torch" in packages else "",
                    environment.get("device", ""),
                ],
            )
        )
        or "–",
        "SHA-256": hashlib.sha256(path.read_bytes()).hexdigest()[:12],
    }


# Cards: a figure with its claim, findings, curves and tables.


@dataclass
class Card:
    """One article of the page."""

    name: str
    title: str
    html: str
    counts: Counter[str] = field(default_factory=Counter)


def figure_card(name: str, source: Source) -> Card:
    """A figure: pictures, claim, findings, curves, and where the numbers are from."""
    title, caption = _words(load(name).__doc__ or name)
    preset = "preset desktop" * name.endswith(DESKTOP)
    head = _head(name, title, "your results" if source.own else preset)
    try:
        module = load(name)
        with told(source.paths if source.own else ()):
            data = read(name, source.paths)
            lines = list(module.findings(data))
            pictures = "".join(
                _picture(stem, item, title, caption)
                for stem, item, _ in drawings(name, data, source.paths)
            )
    except TableError as error:  # a sweep that has not come far enough, say
        body = f'<p class="missing">Not drawn yet: {escape(str(error))}</p>'
        return Card(name, title, _article(name, source, head + body + _explorers(source)))
    found = [line for line in lines if isinstance(line, Finding)]
    counts = Counter(kind(finding.verdict) for finding in found)
    header = getattr(module, "HEADER", HEADER)
    notes = [line for line in lines if not isinstance(line, Finding) and line != header]
    rows = [provenance(path) for path in source.paths]
    body = (
        f'{head}<div class="look"><div class="pictures">{pictures}'
        f'<p class="caption">{escape(caption)}</p></div>{_facts(name, source, counts, rows)}</div>'
        f"{_explorers(source)}{_findings(name, found, header.split())}"
        f"{_notes(notes, bool(found))}{_made(rows)}"
    )
    return Card(name, title, _article(name, source, body), counts)


def sweep_card(path: Path) -> Card:
    """A sweep of yours that no figure shows: how its runs ended, and their curves."""
    name, source = f"sweep/{path.parent.name}", Source([path], True)
    head = _head(name, path.parent.name.replace("_", " "), "your results")
    try:
        table = tables.read(path, tables.RESULTS)
    except TableError as error:
        return Card(
            name,
            path.parent.name,
            _article(name, source, f'{head}<p class="missing">{escape(str(error))}</p>'),
        )
    states = ", ".join(f"{n} {state}" for state, n in table[STATUS].value_counts().items())
    curves = _explorers(source) or '<p class="missing">No rate or size varies in it.</p>'
    curves += _made([provenance(path)])
    body = f'{head}<p class="caption">Runs: {escape(states)}.</p>{curves}'
    return Card(name, path.parent.name, _article(name, source, body))


def _article(name: str, source: Source, body: str) -> str:
    return f'<article id="{anchor(name)}" data-version="{source.version}">{body}</article>'


def anchor(name: str) -> str:
    """Where links to an article lead."""
    return re.sub(r"\W+", "-", name).strip("-")


def _words(doc: str) -> tuple[str, str]:
    """(title, caption) from a figure's docstring, without the lines that say how to call it."""
    parts = [" ".join(part.split()) for part in doc.strip().split("\n\n")]
    told = [part for part in parts[1:] if not part.startswith("python -m")]
    return parts[0].rstrip("."), " ".join(told)


def _head(name: str, title: str, badge: str) -> str:
    plain, _, place = title.partition(" (")
    mark = f'<span class="own">{badge}</span>' if badge else ""
    above = f'<p class="place">{escape(place.rstrip(")") or name)}{mark}</p>'
    link = f'<a class="anchor" href="#{anchor(name)}" aria-label="Link to this figure">#</a>'
    return f"{above}<h3>{escape(plain)} {link}</h3>"


def _picture(stem: str, item: object, title: str, caption: str) -> str:
    """A figure as a lossless WebP image inside the page; a table is told apart by its findings."""
    if isinstance(item, pd.DataFrame):
        return ""
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    style.lay_out(item, DPI)
    item.savefig(file, format="webp", dpi=DPI, pil_kwargs={"lossless": True})
    wide, high = (round(inches * SHOWN) for inches in item.get_size_inches())
    plt.close(item)
    shown = stem.replace("_", " ")
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<button class="picture" type="button" aria-label="Enlarge {escape(shown)}">'
        f'<img src="data:image/webp;base64,{data}" width="{wide}" height="{high}" '
        f'alt="{escape(f"{shown}: {title}. {caption}")}" data-stem="{escape(stem)}"></button>'
    )


@cache
def _claims() -> dict[str, dict[str, str]]:
    return yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))


def _formulas(words: str) -> str:
    """A claim's alpha_A, W_Q and n^(-3/2) as they are set in a paper."""
    words = re.sub(r"\b(alpha|[A-Z])_([A-Z])\b", r"\1<sub>\2</sub>", escape(words))
    for plain, set_ in (("alpha", "α"), ("lr*", "lr<sup>*</sup>"), (" = ", "&nbsp;=&nbsp;")):
        words = words.replace(plain, set_)
    return re.sub(
        r"\^\(([^()]*)\)|\^(\d+)",
        lambda found: f"<sup>{(found[1] or found[2]).replace('-', '−')}</sup>",
        words,
    )


def _facts(name: str, source: Source, counts: Counter[str], rows: Sequence[dict[str, str]]) -> str:
    """The column beside the pictures: claim, verdicts, runs, preset and commands."""
    claim = _claims().get(name.removesuffix(DESKTOP))
    told = (
        f'{_formulas(claim["claim"])} <span class="where">{escape(claim["where"])}</span>'
        if (claim)
        else "None is listed."
    )
    seen = (
        "".join(
            f"<li>{_badge(key, str(counts[key]))} {escape(VERDICTS[key][1])}</li>"
            for key in VERDICTS
            if counts[key]
        )
        or "<li>Numbers without a verdict, listed below.</li>"
    )
    runs = {row["sweep"]: row["n"] for row in rows}
    presets = dict.fromkeys(re.findall(r"--preset (\w+)", " ".join(source.commands)))
    preset = ", ".join(presets) or (
        "none: the sweep has one size"
        if not source.own
        else ", ".join(path.parent.name for path in source.paths)
    )
    commands = "".join(
        f'<div class="command"><code>{escape(command).replace("/", "/<wbr>")}</code>'
        f'<button type="button" class="copy" aria-label="Copy the command">copy</button></div>'
        for command in source.commands
    )
    return (
        f'<aside class="facts"><h4>The paper says</h4><p class="claim">{told}</p>'
        f'<h4>Measured here</h4><ul class="tally">{seen}</ul>'
        f"<h4>Runs</h4><p>{escape('; '.join(runs.values()))}</p>"
        f"<h4>Preset</h4><p>{escape(preset)}</p><h4>Made by</h4>{commands}</aside>"
    )


def _badge(key: str, words: str) -> str:
    return (
        f'<span class="badge {key}"><span aria-hidden="true">{VERDICTS[key][0]}</span> '
        f"{escape(words)}</span>"
    )


def _findings(name: str, found: Sequence[Finding], columns: Sequence[str]) -> str:
    """The sortable table of findings."""
    if not found:
        return ""
    rows = "".join(
        f'<tr data-kind="{kind(finding.verdict)}"><td>{escape(finding.name)}</td>'
        f'<td data-label="measured">{escape(finding.measured)}</td>'
        f'<td data-label="{columns[2]}">{escape(finding.published)}</td><td data-label="verdict">'
        f"{_badge(kind(finding.verdict), finding.verdict) if finding.verdict else ''}</td></tr>"
        for finding in found
    )
    heads = "".join(
        f'<th scope="col"><button type="button">{word}</button></th>'
        for word in (*columns[:3], "verdict")
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Findings of {escape(name)}">'
        f'<table class="findings sortable"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>'
        "</table></div>"
    )


def _notes(notes: Sequence[str], beside: bool) -> str:
    """What the findings rest on; where a figure has no verdicts, its numbers."""
    lines = [line for note in notes for line in str(note).splitlines()]
    if not lines:
        return ""
    if any(re.search(r"\S {2,}\S", line) for line in lines):  # columns
        told = f'<pre tabindex="0">{escape(chr(10).join(lines))}</pre>'
    else:
        told = "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
    words = f"What these numbers rest on ({len(lines)})" if beside else "Measured"
    opened = "" if beside and len(lines) > 4 else " open"
    return f'<details class="notes"{opened}><summary>{words}</summary>{told}</details>'


def _made(rows: Sequence[dict[str, str]]) -> str:
    """Tables, runs, commit and machine."""
    heads = "".join(f'<th scope="col">{word}</th>' for word in rows[0])
    cells = [
        "".join(f'<td data-label="{word}">{escape(value)}</td>' for word, value in row.items())
        for row in rows
    ]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return (
        '<details class="made"><summary>Tables, runs and commit</summary><div class="scroll" '
        f'tabindex="0" role="region" aria-label="Tables"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _explorers(source: Source) -> str:
    """Curves to look into, one per table of results that has some; drawn by the page."""
    shown = ""
    for path in source.paths:
        try:
            found = explorer(tables.read(path, (), maker="the sweep"))
        except (TableError, ValueError):
            continue
        if found:
            data = json.dumps(found, default=float).replace("</", "<\\/")
            words = tables.name(path).replace("_", " ")
            label = escape(f"{words}: loss by {found['axis'] or found['size']}")
            shown += (
                f'<details class="explorer" data-label="{label}"><summary>Look into the curves: '
                f'{label}</summary><script type="application/json">{data}</script></details>'
            )
    return shown
