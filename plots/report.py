"""All figures and findings as one HTML page that opens from disk.

    python -m plots report                      writes report.html from the shipped tables
    python -m plots report --results results    with your own sweeps in place of the shipped ones
    python -m plots report --picture FILE       its first lines as a picture, and no page

The page needs no network and no script: pictures and tables are inside. A figure is drawn from
your own results where --results has all tables it needs, from the shipped ones otherwise.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from plots import style
from plots.cards import PAGES, Card, figure_card, inputs
from plots.catalogue import PAPERS, names
from plots.claims import PAPERS as OF_THE_PAPERS
from plots.claims import WORDS, claims, tally
from plots.tables import TableError, git
from training.files import write_bytes, write_text

# Of the words of claims, in their order.
COLORS = (style.GREEN, style.SKY, style.ORANGE, style.PINK, style.VERMILION, "0.72", "0.9")


def page(made: Sequence[Card]) -> str:
    """The whole page: contents, overview, papers and their articles."""
    papers = []
    for paper in PAPERS:
        if cards := [card for card in made if card.name.startswith(f"{paper}/")]:
            own = [one for one in claims() if one.entry["figure"].startswith(f"{paper}/")]
            own = [one for one in own if one.paper in OF_THE_PAPERS]
            total = sum((Counter(card.counts) for card in cards), Counter())
            papers.append((paper, f"{tally(own)}." if own else "", cards, total))
    return PAGES.get_template("report.html").render(
        papers=papers,
        commit=git("rev-parse", "--short=10", "HEAD") or "outside of a repository",
        findings=f"{sum(sum(card.counts.values()) for card in made):,}",
        figures=len(made),
    )


def picture():
    """How many claims of each paper have which word, as bars."""
    figure, axes = style.subplots("", 1, 1, (4.9, 2.9))
    axis = axes[0][0]
    papers = [*OF_THE_PAPERS, "ours"]
    of = [one.paper if one.paper in OF_THE_PAPERS else "ours" for one in claims()]
    start = [0] * len(papers)
    colors = dict(zip(WORDS, COLORS, strict=True))
    words = [word for word in WORDS if any(claim.word == word for claim in claims())]
    for word in words:
        pairs = zip(of, claims(), strict=True)
        count = Counter(paper for paper, claim in pairs if claim.word == word)
        widths = [count[paper] for paper in papers]
        bars = axis.barh(papers, widths, left=start, color=colors[word], label=word)
        axis.bar_label(bars, [str(n or "") for n in widths], label_type="center", fontsize=9)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.tick_params(labelsize=10)
    axis.set_xlabel("claims", fontsize=10)
    figure.suptitle("What is reproduced at these sizes", fontsize=12)
    place = {"loc": "outside lower center", "ncols": 3, "columnspacing": 1, "handlelength": 1}
    figure.legend(fontsize=9, frameon=False, **place)
    return figure


def main(argv: Sequence[str]) -> None:
    """The command; TableError for a mistake."""
    look = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(prog="python -m plots report", **look)
    parser.add_argument("--results", type=Path, metavar="DIR", help="your own results")
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("report.html"))
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a picture of all claims")
    args = parser.parse_args(argv)
    results, output = args.results, args.output
    if output.is_dir():
        raise TableError(f"{output} is a folder; give --output a file in it, such as report.html")
    if results and not any(any(results.glob(f"{d}*.csv")) for d in ("", "*/", "*/*/")):
        raise TableError(
            f"{results}: no table of a sweep in it; give --results the folder "
            "that `python -m sweeps run` wrote to, or leave it out"
        )
    if args.picture:
        write_bytes(args.picture, style.files(picture(), "report")["report.png"])
        print(f"written: {args.picture}")
        return
    made = []
    for name in names():  # minutes
        made.append(figure_card(name, inputs(name, results)))
        print(f"drawn: {name}", file=sys.stderr, flush=True)
    text = page(made)
    write_text(output, text)
    print(f"written: {output} ({len(text.encode()) / 1e6:.1f} MB)")
