"""The report: complete and self-contained, whatever words are in a table."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from plots import cards, claims, report, style, tables
from plots.catalogue import load, names
from plots.findings import kind as kind_of
from tests.plots.made import unjudged

FULL = style.DPI  # before `coarse` makes it less
SHOWN = ("everett/adafactor", "theory/shares")  # test_figures.py makes the articles of all


class Page(HTMLParser):
    """A page's elements, (tag, attributes) each, and its words."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data

    def all(self, key):
        """An attribute's values, in the order of the page."""
        return [attributes[key] for _, attributes in self.elements if key in attributes]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The report of the shipped tables of two figures, as text."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "DPI", 40)
        patch.setattr(report, "names", lambda: SHOWN)
        for module in (cards, report):
            patch.setattr(module, "claims", unjudged)
        report.main(["--output", str(path)])
    return path.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_shipped_picture_is_that_of_the_shipped_claims(laid_out, monkeypatch, tmp_path):
    """Every claim is in one bar, and the file is what the command writes."""
    monkeypatch.setattr(style, "DPI", FULL)
    report.main(["--picture", str(tmp_path / "report.png")])
    new, old = (
        Image.open(path) for path in (tmp_path / "report.png", style.FIGURES / "report.png")
    )
    assert new.size == old.size and new.width <= 800
    apart = np.abs(np.asarray(new, int) - np.asarray(old, int)).max(axis=-1) > 51
    assert apart.mean() < 0.01
    bars = report.picture().axes[0].patches
    assert sum(bar.get_width() for bar in bars) == len(claims.claims())


def test_the_page_has_its_pictures_and_needs_neither_network_nor_script(shipped):
    page = Page(shipped)
    assert [tag for tag, _ in page.elements].count("article") == len(SHOWN)
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert {image["data-stem"] for image in images} == {"figure_10_adafactor", "shares"}
    assert all(len(image["alt"]) > 40 for image in images)
    assert all(re.match("data:", address) for address in page.all("src"))
    assert all(re.match("data:|#", address) for address in page.all("href"))
    assert not re.search(r"url\(|@import|<script|\{\{", shipped)
    assert not [key for _, attributes in page.elements for key in attributes if key[:2] == "on"]


def test_links_lead_somewhere_and_every_verdict_can_be_hidden(shipped):
    page = Page(shipped)
    ids = page.all("id")
    links = {address[1:] for address in page.all("href") if address.startswith("#")}
    assert len({*ids}) == len(ids) and links <= {*ids}
    assert {*page.all("data-kind")} <= {*cards.VERDICTS}
    for key in cards.VERDICTS:
        assert key in ids and f'body:has(#{key}:not(:checked)) [data-kind="{key}"]' in shipped


def test_words_are_readable_on_their_grounds(shipped):
    """Contrast of 4.5 or more, by light and by dark."""

    def light(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes = re.findall(r":root \{(.*?)\}", shipped, re.DOTALL)
    assert len(schemes) == 2  # of light and of dark
    for scheme in schemes:
        color = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        pairs = [(key, f"{key}-wash") for key in cards.VERDICTS]
        pairs += [
            (word, on) for word in ("ink", "soft", "accent") for on in ("paper", "card", "wash")
        ]
        for word, ground in pairs:
            one, other = sorted((light(color[word]), light(color[ground])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, (word, ground)


@pytest.mark.parametrize(
    ("kind", "verdicts"),
    [
        ("agrees", ("agrees", "agrees within 95 %", "as expected")),
        ("off", ("off by +0.2, 3 SE",)),
        ("disagrees", ("disagrees", "MISSED")),
        ("open", ("within noise", "undecided (n = 2)")),
        ("none", ("L = 8 is better", "")),
    ],
)
def test_a_verdict_has_the_sign_of_its_kind(kind, verdicts):
    assert {kind_of(verdict) for verdict in verdicts} == {kind}


@pytest.fixture
def results(tmp_path):
    """Copies a shipped table, or a part of it, to where a sweep of one's own would write it."""

    def put(table, folder, rows=None, **columns):
        path = tmp_path / "results" / folder / cards.source_of(table)[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.read_csv(tables.shipped(table))[:rows].assign(**columns).to_csv(path, index=False)
        return path

    (tmp_path / "results").mkdir()
    put.home = tmp_path / "results"
    return put


@pytest.mark.parametrize(
    ("table", "folder"),
    [
        ("everett/quickstart", "nanolm_c4/quickstart"),
        ("everett/figure_2_adam", "nanolm_c4/figure_2_adam_laptop"),
        ("bordelon/figure_2", "vit_cifar5m/figure_2_laptop"),
        ("bordelon/figure_5_observations", "vit_cifar5m/figure_5"),
        ("everett/figure_1_5_6_7_alignment", "nanolm_c4/figure_1_5_6_7_alignment_laptop"),
        ("theory/bigram", "effective_theory"),
        ("bordelon/initial_density", "vit_cifar5m/initial_laptop"),
    ],
)
def test_own_tables_are_found_where_sweeps_write_them(table, folder, results):
    assert cards.own_table(table, results.home) is None
    path = results(table, folder, 3)
    assert cards.own_table(table, results.home) == path
    for other in {table for name in names() for table in load(name).TABLES} - {table}:
        found = cards.own_table(other, results.home)
        assert found is None or found != path, other


def test_own_results_take_the_place_of_shipped_ones(results):
    assert not cards.inputs("everett/quickstart", results.home).own
    path = results("everett/quickstart", "nanolm_c4/quickstart")
    source = cards.inputs("everett/quickstart", results.home)
    assert source.own and source.paths == [path]
    assert f"python -m plots everett/quickstart {path}" in source.commands
    # Of three tables one is enough, as it is for the figure itself; of two that go together not.
    results("everett/figure_12_adam", "nanolm_c4/figure_12_adam")
    assert len(cards.inputs("everett/learning_rates", results.home).paths) == 1
    results("dinan/figure_1_2", "vit_imagenet/figure_1_2")
    assert not cards.inputs("dinan/vit_search", results.home).own


def test_numbers_that_break_a_figure_are_a_line(results, monkeypatch, refused, claimed):
    path = results("everett/quickstart", "nanolm_c4/quickstart")
    module = load("everett/quickstart")
    for part in ("read", "findings"):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, lambda _: [][0])
            card = cards.figure_card("everett/quickstart", cards.Inputs([path], True))
            assert "Not drawn yet" in card.html and "its numbers cannot be drawn" in card.html
            assert "its numbers cannot be drawn" in refused("everett/quickstart", path)
            with pytest.raises(IndexError):  # of shipped tables it is our mistake
                cards.figure_card("everett/quickstart", cards.Inputs([path], False))


PAYLOAD = (
    "<!--<script></script><script>a()</script><img src=x onerror='a()'>{{library}}\"'><b>b</b>&amp;"
)


def test_the_page_survives_any_text(results, monkeypatch, tmp_path, claimed):
    """In every word of a table that a figure draws: the elements are those of harmless words."""
    monkeypatch.setattr(cards, "DPI", 40)
    monkeypatch.setattr(report, "names", lambda: ["everett/adafactor"])
    output, pages = tmp_path / "report.html", []
    for word in ("mine", PAYLOAD):
        words = {"prescription.parameterization": word, "commit": word, "run": word}
        results("everett/figure_10_adafactor", "nanolm_c4/figure_10_adafactor", **words)
        report.main(["--results", str(results.home), "--output", str(output)])
        pages.append(Page(output.read_text(encoding="utf-8")))
    plain, odd = ([(tag, sorted(keys)) for tag, keys in page.elements] for page in pages)
    assert odd == plain and PAYLOAD in pages[1].words
