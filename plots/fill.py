"""Writes claims and findings of the shipped tables into READMEs.

    python -m plots fill

Between a line `<!-- claims: EXPERIMENT -->`, or `<!-- findings: FIGURE PATTERN -->` with a pattern
of findings' names, and the next `<!-- end -->` this command writes a table.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from plots import catalogue, tables
from plots.claims import PAPERS, claims
from plots.findings import Finding
from plots.tables import ROOT, TableError
from training.files import write_text

READMES = ("*.md", "*/README.md")
MARKED = re.compile(
    r"^(<!-- (claims|findings): (\S+) ?([^\n]*?) -->\n)(.*?)^(<!-- end -->)$",
    re.MULTILINE | re.DOTALL,
)


def experiment_of(figure: str) -> str:
    """The folder whose runs a figure shows."""
    for file in filter(None, map(tables.sweep_file, catalogue.load(figure).TABLES)):
        return file.parts[0]
    return "effective_theory" if figure.startswith("theory/") else "vit_cifar5m"


def claims_table(experiment: str) -> list[str]:
    """Every claim that an experiment tests: claim, word, number and drift."""
    own = [claim for claim in claims() if experiment_of(claim.entry["figure"]) == experiment]
    lines = ["| claim | here | number | drift |", "|---|---|---|---|"]
    for claim in (claim for claim in own if claim.judgements):
        number = re.sub(r" \(n = [^)]*\)", "", claim.number)
        what = claim.entry["claim"] + " (ours)" * (claim.paper not in PAPERS)
        lines.append(f"| {what} | {claim.word} | {number} | {claim.known_drift} |")
    rest = sum(not claim.judgements for claim in own)
    more = f" and lists {rest} more claim{'s' * (rest > 1)}" if rest else ""
    return [*lines, f"\n[plots/claims.md](../plots/claims.md) explains the columns{more}."]


def findings_of(figure: str, pattern: str) -> list[Finding]:
    """The findings of a figure's shipped tables whose names match; TableError for none."""
    lines = catalogue.of_shipped(figure)
    findings = [one for one in lines if isinstance(one, Finding) and re.match(pattern, one.name)]
    if not findings:
        raise TableError(f"{figure} has no finding {pattern!r}; `python -m plots {figure}` has all")
    return findings


def filled(text: str) -> str:
    """A README's text with the tables that its marks ask for."""

    def block(match: re.Match[str]) -> str:
        head, kind, what, pattern, _, foot = match.groups()
        if kind == "claims":
            lines = claims_table(what)
        else:
            lines = ["| finding | measured | published | verdict |", "|---|---|---|---|"]
            for one in findings_of(what, pattern):
                lines.append(f"| {one.name} | {one.measured} | {one.published} | {one.verdict} |")
        return head + "".join(f"{line}\n" for line in lines) + foot

    return MARKED.sub(block, text)


def files() -> list[Path]:
    """The READMEs, and files beside the root's, that have marks."""
    paths = sorted(path for pattern in READMES for path in ROOT.glob(pattern))
    return [path for path in paths if MARKED.search(path.read_text(encoding="utf-8"))]


def main(argv: Sequence[str]) -> None:
    """Writes all files; there are no options."""
    look = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    argparse.ArgumentParser(prog="python -m plots fill", **look).parse_args(argv)
    for path in files():
        write_text(path, filled(path.read_text(encoding="utf-8")))
        print(path.relative_to(ROOT))
