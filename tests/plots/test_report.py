"""The report: complete, self-contained and usable in a real browser."""

import re

import pandas as pd
import pytest

from plots import cards, report, tables
from plots.catalogue import load, names
from plots.claims import claims
from plots.explorer import explorer
from plots.findings import Finding
from plots.findings import kind as kind_of
from tests.plots.browser import Browser

pytestmark = pytest.mark.xdist_group("report")  # the page is drawn once
# One of every paper, with findings of every verdict; test_figures.py makes the articles of all.
SHOWN = (
    "everett/quickstart",
    "everett/adafactor",
    "dinan/bart_strategies",
    "bordelon/depth",
    "theory/shares",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """(report of the shipped tables, findings by figure, drawings by figure)."""
    found, drawn = {}, {}
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "DPI", 40)
        patch.setattr(report, "names", lambda: SHOWN)
        for name in SHOWN:
            module = load(name)

            def findings(data, name=name, own=module.findings):
                lines = own(data)
                found[name] = [line for line in lines if isinstance(line, Finding)]
                return lines

            def draw(data, name=name, own=module.draw):
                for stem, *rest in own(data):
                    drawn.setdefault(name, []).append(stem)
                    yield stem, *rest

            patch.setattr(module, "findings", findings)
            patch.setattr(module, "draw", draw)
        report.main(["--output", str(path)])
    return path, found, drawn


@pytest.fixture
def page(browser, shipped):
    """The browser with the report open, at 1,600 pixels, light; errors end the test."""
    browser.open(f"file://{shipped[0]}")
    yield browser
    assert not browser.complaints()


def open_curves(page, figure):
    """Opens the first curves of a figure and waits for them to be drawn."""
    page.js(f"document.querySelector('#{figure} .explorer').open = true")
    page.until(f"document.querySelector('#{figure} .chart').dataset.traces > 0")
    page.js("new Promise(resolve => setTimeout(resolve, 100))")


def test_every_figure_has_its_pictures_claim_and_commands(page, shipped):
    _, found, drawn = shipped
    assert {*drawn} == {*found} == {*SHOWN}
    assert page.js("document.querySelectorAll('article').length") == len(drawn)
    for name, stems in drawn.items():
        here = f"document.getElementById('{cards.anchor(name)}')"
        shown = page.js(f"[...{here}.querySelectorAll('.pictures img')].map(i => i.dataset.stem)")
        assert shown == [stem for stem in stems if not stem.startswith("table_")]
        assert f"python -m plots {name}" in page.js(f"{here}.querySelector('.facts').textContent")
        own = [claim for claim in claims() if claim.entry["figure"] == name]
        assert page.js(f"{here}.querySelectorAll('.claim').length") == len(own)
    page.until("[...document.images].every(image => image.complete && image.naturalWidth)")
    assert page.js("[...document.images].every(image => image.alt.length > 40)")


def test_every_finding_stands_beside_its_verdict(page, shipped):
    for name, findings in shipped[1].items():
        rows = page.js(
            f"[...document.querySelectorAll('#{cards.anchor(name)} tr[data-kind]')]"
            ".map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert len(rows) == len(findings)
        for row, finding in zip(rows, findings, strict=True):
            assert row[:3] == [finding.name, finding.measured, finding.published]
            assert row[3].endswith(finding.verdict) and bool(row[3]) == bool(finding.verdict)


def test_nothing_comes_from_outside_and_the_page_stays_small(page, shipped):
    requests = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert len(requests) > len(SHOWN)
    assert all(re.match("file:|data:|blob:", url) for url in requests)
    assert not re.search(r"""(src|href)=["'](https?:)?//""", shipped[0].read_text())
    assert shipped[0].stat().st_size < 15e6


def test_links_lead_somewhere(page):
    assert (
        page.js("""[...document.querySelectorAll('a[href^="#"]')].filter(
        link => !document.getElementById(link.hash.slice(1))).map(link => link.hash)""")
        == []
    )
    assert page.js(
        "new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
        " === document.querySelectorAll('[id]').length"
    )


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_on_a_phone_and_on_a_desk(page, width, scheme):
    page.look(width, 900, scheme)
    open_curves(page, "everett-quickstart")
    assert page.js("document.documentElement.scrollWidth") <= width
    ratios = page.js("""(() => {
      const light = text => { const p = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * p[0] + .7152 * p[1] + .0722 * p[2]; };
      const behind = e => { const b = getComputedStyle(e).backgroundColor;
        return b === 'rgba(0, 0, 0, 0)' ? behind(e.parentElement) : b; };
      return ['h1', '.title p', '.claim', '.caption', '.where', 'td .badge.agrees', 'td .badge.off',
        'td .badge.disagrees', 'td .badge.open', 'td .badge.none', '.chip', 'h4'].map(q => {
        const e = document.querySelector(q); if (!e) return [q, 0];
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
        return [q, (a + .05) / (b + .05)]; });
    })()""")
    assert all(ratio >= 4.5 for _, ratio in ratios), ratios


def test_a_click_sorts_a_table(page):
    cells = (
        "[...document.querySelectorAll('#everett-adafactor .findings tbody tr')]"
        ".map(row => row.cells[1].textContent)"
    )
    button = "#everett-adafactor .findings th:nth-child(2) button"
    before = page.js(cells)
    page.click(button)
    rising = page.js(cells)
    values = [float(cell.split()[0]) for cell in rising if cell[0] in "+-"]
    assert values == sorted(values) and sorted(rising) == sorted(before) != rising != before
    page.click(button)
    falling = [float(cell.split()[0]) for cell in page.js(cells) if cell[0] in "+-"]
    assert falling == values[::-1]
    assert page.js(f"document.querySelector('{button}').parentNode.ariaSort") == "descending"


def test_findings_are_filtered_by_verdict_and_by_words(page):
    shown = "[...document.querySelectorAll('tr[data-kind]')].filter(row => !row.hidden)"
    whole = page.js(f"{shown}.length")
    agree = page.js("document.querySelectorAll('tr[data-kind=agrees]').length")
    page.click(".filter [data-kind=agrees]")
    assert page.js(f"{shown}.length") == whole - agree > 0
    page.click(".filter [data-kind=agrees]")
    page.click(".filter input")
    page.call("Input.insertText", text="optimal rate")
    assert 0 < page.js(f"{shown}.length") < whole
    assert page.js(f"{shown}.every(row => /optimal rate/i.test(row.textContent))")


def test_curves_are_chosen(page):
    open_curves(page, "everett-quickstart")
    chart = "document.querySelector('#everett-quickstart .chart')"
    names_ = f"{chart}.data.map(trace => trace.name).filter(name => /^width/.test(name))"
    assert page.js(names_) == [f"width {width}" for width in (32, 64, 128, 256)] * 2
    page.click("#everett-quickstart .sizes [data-value='64']")
    page.until(f"!{names_}.includes('width 64')")
    page.click("#everett-quickstart .groups [data-value='mup full']")
    page.until(f"{names_}.length === 3")
    page.click("#everett-quickstart .views [data-value='optimum']")
    page.until(f"{chart}.data.length === 1 && {chart}.data[0].name === 'standard global'")


def test_a_picture_is_enlarged_and_closed(page):
    page.click("#everett-quickstart .picture")
    assert page.js(
        "document.querySelector('dialog').open && document.querySelector('dialog img')"
        ".naturalWidth > 0"
    )
    page.click("dialog button")
    assert not page.js("document.querySelector('dialog').open")


# Without a browser.


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        ("agrees", "agrees"),
        ("agrees within 95 %", "agrees"),
        ("as expected", "agrees"),
        ("off by +0.2, 3 SE", "off"),
        ("disagrees", "disagrees"),
        ("MISSED", "disagrees"),
        ("within noise", "open"),
        ("undecided (n = 2)", "open"),
        ("L = 8 is better", "none"),
        ("", "none"),
    ],
)
def test_a_verdict_has_the_sign_of_its_kind(verdict, kind):
    assert kind_of(verdict) == kind


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
    assert not cards.sources("everett/quickstart", results.home).own
    path = results("everett/quickstart", "nanolm_c4/quickstart")
    source = cards.sources("everett/quickstart", results.home)
    assert source.own and source.paths == [path]
    assert f"python -m plots everett/quickstart {path}" in source.commands
    # Of three tables one is enough, as it is for the figure itself; of two that go together not.
    results("everett/figure_12_adam", "nanolm_c4/figure_12_adam")
    assert len(cards.sources("everett/learning_rates", results.home).paths) == 1
    results("dinan/figure_1_2", "vit_imagenet/figure_1_2")
    assert not cards.sources("dinan/vit_search", results.home).own


def test_numbers_that_break_a_figure_are_a_line_in_its_card(results, monkeypatch):
    path = results("everett/quickstart", "nanolm_c4/quickstart")
    module = load("everett/quickstart")
    for part in ("read", "findings"):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, lambda _: [][0])
            card = cards.figure_card("everett/quickstart", cards.Source([path], True))
            assert "Not drawn yet" in card.html and "its numbers cannot be drawn" in card.html
            with pytest.raises(IndexError):  # of shipped tables it is our mistake
                cards.figure_card("everett/quickstart", cards.Source([path], False))


def test_points_are_those_of_the_table():
    table = pd.read_csv(tables.shipped("everett/quickstart"))
    table.loc[table["curve"] == "mup_full", "curve"] = "my_own_rule"
    found = explorer(table)
    assert found["groups"] == ["standard global", "my own rule"]
    rows = table[(table["curve"] == "my_own_rule") & (table["model.width"] == 32)]
    for rate, seeds in rows.groupby("optimizer.lr")["final_eval_loss"]:
        point = next(p for p in found["points"] if p[:3] == ["my own rule", 32, rate])
        assert point[3:] == [
            pytest.approx(seeds.mean(), abs=1e-5),
            pytest.approx(seeds.std(), abs=1e-5),
            2,
            0,
        ]
    lost = table.assign(status=table["status"].where(table.index != rows.index[0], "diverged"))
    assert [p[6] for p in explorer(lost)["points"] if p[6]] == [1]
    assert explorer(table[["curve", "seed"]]) is None
    judges = table.assign(seed=9, final_eval_loss=99.0, fresh=True)
    assert explorer(pd.concat([table.assign(fresh=False), judges])) == explorer(table)
    several = pd.read_csv(tables.shipped("bordelon/figure_7_12"))  # grows three sizes in turn
    assert explorer(several) is None


PAYLOADS = (
    "<!--<script>",
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'>",
    "{{library}}",
    "javascript:window.ran=1",
    "\"'><b>bold</b>&amp;",
)


def test_the_page_survives_any_text(results, browser, monkeypatch, tmp_path):
    """In every word of two tables: of one that a figure draws, and of one that none does."""
    monkeypatch.setattr(cards, "DPI", 40)
    monkeypatch.setattr(report, "names", lambda: ["everett/adafactor"])
    for index, payload in enumerate(PAYLOADS):
        words = {"prescription.parameterization": payload, "commit": payload, "run": payload}
        results("everett/figure_10_adafactor", "nanolm_c4/figure_10_adafactor", **words)
        results("everett/quickstart", f"nanolm_c4/own{index}", curve=payload, status=payload)
    output = tmp_path / "report.html"
    report.main(["--results", str(results.home), "--output", str(output)])
    browser.open(f"file://{output}")
    assert browser.js("document.querySelectorAll('article').length") == 1 + len(PAYLOADS)
    assert browser.js("window.ran") is None and browser.js("typeof all") == "function"
    for index, payload in enumerate(PAYLOADS):
        said = browser.js(f"document.querySelector('#sweep-own{index}').textContent")
        assert payload in said
    assert not browser.complaints()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--results", "nowhere"], "nowhere: no table of a sweep in it; give --results the folder"),
        (["--results", "."], ".: no table of a sweep in it; give --results the folder that"),
        (["--output", "."], ". is a folder; give --output a file in it, such as report.html"),
    ],
)
def test_a_folder_that_cannot_serve_is_one_line_at_once(
    words, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "names", lambda: pytest.fail("a figure is drawn"))
    with pytest.raises(SystemExit, match="2"):
        report.main(words)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
