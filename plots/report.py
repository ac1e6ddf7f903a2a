"""All figures and findings as one HTML page that opens from disk, or a live one of running sweeps.

    python -m plots report                      writes report.html from the shipped tables
    python -m plots report --results results    with your own sweeps in place of the shipped ones
    python -m plots report --live               serves results/ on 127.0.0.1, refreshed as it grows

The page needs no network: pictures, tables, curves and the library that draws the curves (plotly)
are inside. A figure is drawn from your own results where --results has all tables it needs, from
the shipped ones otherwise; a live page has your own only. Sweeps that belong to no figure are shown
with their curves.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from plots.cards import VERDICTS, Card, Source, anchor, figure_card, sources, sweep_card
from plots.catalogue import names
from plots.tables import ROOT, TableError

TEMPLATE = Path(__file__).with_suffix(".html")
PAPERS = {
    "everett": (
        "Everett et al.",
        "Scaling Exponents Across Parameterizations and Optimizers, 2024",
        "Which learning-rate exponents, under which alignment, for which optimiser?",
    ),
    "dinan": (
        "Dinan et al., Part II",
        "Effective Theory of Transformers at Initialization, 2023",
        "Which scaling of groups keeps gradients and updates of order one in practice?",
    ),
    "bordelon": (
        "Bordelon et al.",
        "Infinite Limits of Multi-head Transformer Dynamics, 2024",
        "What does attention learn as head dimension, heads and depth grow?",
    ),
    "theory": (
        "Theory",
        "Dinan et al., Part I, and Stratos, Scale-Invariant Parameterizations",
        "Do random networks follow the predictions at initialisation and in first steps?",
    ),
}
# The page.


def cards(results: Path | None, live: bool, kept: dict[str, tuple[str, Card]]) -> Iterator[Card]:
    """All articles in order; those in `kept` whose tables are as they were are not drawn again."""
    used: set[Path] = set()

    def card(name: str, source: Source, make: Callable[[], Card]) -> Card:
        if kept.get(name, ("",))[0] != source.version:
            kept[name] = source.version, make()
        return kept[name][1]

    for name in names():
        source = sources(name, results, live)
        if source is not None:
            used |= {path for path in source.paths if source.own}
            yield card(name, source, lambda: figure_card(name, source))  # noqa: B023
    own = (
        {path for depth in ("", "*/", "*/*/") for path in results.glob(f"{depth}results.csv")}
        if results
        else set()
    )
    for path in sorted(own - used):
        yield card(f"sweep/{path}", Source([path], True), lambda: sweep_card(path))  # noqa: B023


def page(made: Sequence[Card], state: str = "") -> str:
    """The whole page: contents, overview, papers and their articles; a live one with the `state`
    of the results that it shows."""
    groups = {
        paper: [card for card in made if card.name.partition("/")[0] == paper]
        for paper in (*PAPERS, "sweep")
    }
    groups = {paper: listed for paper, listed in groups.items() if listed}
    papers = {
        **PAPERS,
        "sweep": (
            "Your sweeps",
            "sweeps that belong to no figure of the papers",
            "How did the runs end, and where does the optimum lie?",
        ),
    }
    contents, rows, parts = "", "", ""
    for paper, listed in groups.items():
        short, long, question = papers[paper]
        lasts = [(card.name, card.name.rpartition("/")[2].replace("_", " ")) for card in listed]
        inner = "".join(
            f'<li><a href="#{anchor(name)}">{escape(last)}</a></li>' for name, last in lasts
        )
        contents += f'<li><a href="#{paper}">{escape(short)}</a><ul>{inner}</ul></li>'
        total = sum((card.counts for card in listed), Counter())
        whole = sum(total.values())
        bar = "".join(
            f'<span class="{key}" style="flex:{total[key]}" title="{total[key]} {words}"></span>'
            for key, (_, words) in VERDICTS.items()
            if total[key]
        )
        cells = "".join(f"<td>{total[key] or ''}</td>" for key in VERDICTS)
        rows += (
            f'<tr><th scope="row"><a href="#{paper}">{escape(short)}</a></th>'
            f'<td>{len(listed)}</td>{cells}<td><div class="bar" role="img" '
            f'aria-label="{whole} findings">{bar}</div></td></tr>'
        )
        parts += (
            f'<section id="{paper}"><header class="paper"><h2>{escape(short)}</h2>'
            f'<p class="long">{escape(long)}</p><p>{escape(question)}</p></header>'
            + "".join(card.html for card in listed)
            + "</section>"
        )
    if not parts:
        parts = '<p class="missing">No results yet. The page looks again every few seconds.</p>'
    chips = "".join(
        f'<button type="button" class="badge {key}" data-kind="{key}" aria-pressed="true">'
        f'<span aria-hidden="true">{sign}</span> {escape(words)}</button>'
        for key, (sign, words) in VERDICTS.items()
    )
    filled = {
        "contents": contents,
        "overview": rows,
        "chips": chips,
        "articles": parts,
        "commit": escape(_commit()),
        "state": state,
        "findings": f"{sum(sum(card.counts.values()) for card in made):,}",
        "figures": str(len(made)),
        "library": _library(),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], text)


@cache
def _library() -> str:
    """Plotly's script, compressed: the page unpacks it when curves are first looked into."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


@cache
def _commit() -> str:
    """The commit of this checkout, or that it is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "outside of a repository"
    return found.stdout.strip()


# Live.


class Live:
    """What a live page shows, drawn again when tables have changed."""

    def __init__(self, results: Path) -> None:
        self.results, self.lock = results, threading.Lock()
        self.kept: dict[str, tuple[str, Card]] = {}

    def state(self) -> str:
        """Changes when any table below the results does."""
        seen = sorted(
            (str(path), path.stat().st_mtime_ns, path.stat().st_size)
            for depth in ("*", "*/*", "*/*/*")
            for path in self.results.glob(f"{depth}.csv")
        )
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def page(self) -> str:
        """The page of now."""
        with self.lock:  # matplotlib draws one figure at a time
            state = self.state()  # before the tables are read: what changes now is seen again
            return page(list(cards(self.results, True, self.kept)), state)


def server(results: Path, port: int) -> ThreadingHTTPServer:
    """A server of the live page on 127.0.0.1; port 0 takes a free one."""
    live = Live(results)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = {"/": live.page, "/state": live.state}.get(self.path)
            if answer is None:
                return self.send_error(HTTPStatus.NOT_FOUND)
            body = answer().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *_: object) -> None:
            """Says nothing: a page that looks every few seconds would fill the terminal."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a page that was closed
                super().handle_error(*_)

    return Server(("127.0.0.1", port), Handler)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a user's mistake is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m plots report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, metavar="DIR", help="your own results")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html")
    parser.add_argument("--live", action="store_true", help="serve a page that refreshes")
    parser.add_argument("--port", type=int, help="of the live page (default: 8765)")
    args = parser.parse_args(argv)
    if args.live and args.output:
        parser.error("--live serves a page and --output writes one: give one of them")
    if args.port is not None and not args.live:
        parser.error("--port is that of the live page: give --live too")
    results = args.results or (Path("results") if args.live else None)
    try:
        if results and not results.is_dir():
            raise TableError(f"{results}: no such folder; give --results the folder of your sweeps")
        places = ("*.csv", "*/*.csv", "*/*/*.csv")  # RESULTS/EXPERIMENT/SWEEP, or one of them
        if results and not args.live and not any(any(results.glob(place)) for place in places):
            raise TableError(
                f"{results}: no table of a sweep in it; give --results the folder "
                "that `python -m sweeps run` wrote to, or leave it out"
            )
        if args.live:
            return _serve(results, 8765 if args.port is None else args.port)
        output = args.output or Path("report.html")
        output.parent.mkdir(parents=True, exist_ok=True)
        made = []
        for card in cards(results, False, {}):  # minutes
            made.append(card)
            print(f"drawn: {card.name}", file=sys.stderr, flush=True)
        text = page(made)
        output.write_text(text, encoding="utf-8")
        print(f"written: {output} ({len(text.encode()) / 1e6:.1f} MB)")
    except (TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _serve(results: Path, port: int) -> None:
    try:
        served = server(results, port)
    except (OSError, OverflowError) as error:
        raise TableError(f"port {port}: {error}; give another one with --port") from None
    with served:
        print(f"http://127.0.0.1:{served.server_port} shows {results}; Ctrl-C ends", flush=True)
        try:
            served.serve_forever()
        except KeyboardInterrupt:
            print("\nended")


if __name__ == "__main__":
    main()
