"""What holds for every figure: its shipped tables draw it, and a bad table is one line."""

import gzip
import html
import itertools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from plots import cards, style, tables
from plots.__main__ import main, make
from plots.catalogue import FINDINGS, load, names, of_shipped, preset_of, shipped
from plots.findings import Finding
from plots.naming import AnyOf

ROOT = Path(__file__).resolve().parents[2]
NAMES = names()
FIGURES = [name for name in NAMES if not preset_of(name)]
NUMBER = re.compile(r"[+-]?\d+(?:\.(\d+))?(?:e([+-]\d+))?")
DPI = style.DPI
TITLES = {
    "everett/adafactor": "Everett et al., Figure 10",
    "everett/weight_decay": "Everett et al., Figure 9: Adam, one global learning rate, indep",
    "theory/error": "Dinan et al., Part I: distance between",
    "theory/kernels": "Dinan et al., Part I: kernels and tangent",
    "theory/shares": "Dinan et al., Part I: each group's share",
    "theory/bigram": "Stratos: exponents of the bigram model",
    "dinan/vit_strategies": "Dinan et al., Part II, Figure 2",
    "bordelon/rate_transfer": "Bordelon et al., Figure 2a",
}
FEW = ("everett/quickstart", "bordelon/rate_transfer", "dinan/rate_transfer", "theory/shares")
MARKED = [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in NAMES]
CUT = ("figure_5_bart_r2c2", "figure_3_initial_heads", "error")  # show a part on purpose


def moved(new, old):
    """The lines that differ: in a word, or in a number by more than one in its last place, which
    another processor may round otherwise."""

    def words(line):
        return " ".join(NUMBER.sub("#", line).split())

    def far(one, other):
        last = 10.0 ** (int(other[2] or 0) - len(other[1] or ""))
        return abs(float(one[0]) - float(other[0])) > 1.01 * last

    if len(new) != len(old):
        return [f"{len(new)} lines, {len(old)} before"]
    return [
        f"{one}\n{other}"
        for one, other in zip(new, old, strict=True)
        if words(one) != words(other) or any(map(far, NUMBER.finditer(one), NUMBER.finditer(other)))
    ]


@pytest.mark.parametrize(
    ("new", "differs"),
    [
        ("lr* 0.51 ± 0.02  agrees", False),
        ("lr* 0.50 ± 0.02 agrees", False),
        ("lr* 0.53 ± 0.02 agrees", True),
        ("lr* 0.51 ± 0.02 disagrees", True),
        ("lr* -0.51 ± 0.02 agrees", True),
        ("lr* 0.51 ± ? agrees", True),
    ],
)
def test_findings_are_compared_by_words_and_by_printed_digits(new, differs):
    assert bool(moved([new], ["lr* 0.51 ± 0.02 agrees"])) is differs
    assert not moved(["8e-05 to -0.00"], ["7e-05 to 0.00"]) and moved(["8e-05"], ["6e-05"])
    assert moved([new, new], [new])


@pytest.mark.xdist_group("claims")  # which take the findings of every figure, too
@pytest.mark.parametrize("name", MARKED)
def test_the_shipped_tables_say_the_shipped_findings(name):
    """Everything that a figure prints; `python -m plots --all` writes it."""
    old = (FINDINGS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    differs = moved("\n".join(map(str, of_shipped(name))).splitlines(), old)
    assert not differs, "\n".join(["new and old:", *differs])


@pytest.mark.xdist_group("claims")
@pytest.mark.parametrize("name", MARKED)
def test_the_shipped_tables_draw_the_shipped_figure_and_its_article(
    name, monkeypatch, laid_out, claimed
):
    """Letters may lie a pixel off on another machine, what is drawn may not. The article says of
    which figure of the paper, what the paper claims, every finding, and where numbers are from."""
    module, home, drawn = load(name), style.FIGURES / name.partition("/")[0], {}
    lines = of_shipped(name)
    monkeypatch.setattr(module, "findings", lambda _: lines)  # which are dear, and asked for again
    monkeypatch.setattr(cards, "_picture", lambda stem, item, *_: drawn.update({stem: item}) or "")
    card = cards.figure_card(name, cards.inputs(name, None))
    text = "\n".join(map(str, lines))
    assert drawn and ("± " in text or "%" in text or "met" in text)
    for stem, item in drawn.items():
        assert item.get_suptitle().startswith(TITLES.get(name.removesuffix(preset_of(name)), ""))
        assert not re.search(r"Figure \w+$", item.get_suptitle())  # but what it shows
        assert all("\n" not in text.get_text() for text in item.texts)
        for spine in itertools.chain(*(axis.spines.values() for axis in item.axes)):
            spine.set_in_layout(False)  # the panels' edges, which take half of the time
        style.lay_out(item, DPI)
        item.canvas.draw()
        for axis in () if stem.startswith(CUT) else item.axes:
            low, high = sorted(axis.get_ylim())
            ends = [end for end in axis.dataLim.intervaly if np.isfinite(end)]
            assert all(low <= end <= high for end in ends), f"{axis.get_title()}: data are cut off"
        new, old = map(np.asarray, (item.canvas.buffer_rgba(), Image.open(home / f"{stem}.png")))
        assert new.shape == old.shape
        other = new.view(np.uint32) != old.view(np.uint32)  # few pixels, if any
        apart = np.abs(new[other[..., 0]].astype(int) - old[other[..., 0]]).max(axis=-1) > 51
        assert apart.sum() < 0.01 * other.size, stem
    said = " ".join(html.unescape(re.sub("<[^>]*>", "|", card.html)).split())
    found = [line for line in lines if isinstance(line, Finding)]
    assert sum(card.counts.values()) == len(found) == card.html.count("<tr data-kind=")
    assert all(f"|{line.measured}|" in said and line.verdict in said for line in found)
    figures = {claim.entry["figure"] for claim in claimed}
    assert ("None is listed" in said) == (name.removesuffix(preset_of(name)) not in figures)
    assert f"python -m plots {name}" in said.replace("/|", "/")
    made = said[said.index("|Tables, runs and commit|") :]
    for path in shipped(name):
        origin = tables.origin(path)
        assert str(path.relative_to(ROOT)) in made
        assert origin["environment"]["commit"][:10] in made
        assert not origin.get("runs") or f"{origin['runs']:,} runs" in made


def test_pictures_of_the_front_page_can_be_read_on_a_phone():
    """At 400 pixels, half of the most that they have, ticks of 8 points are 9 pixels high."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\]\((plots/figures/\S+\.png)\)", text)
    assert len(found) >= 6
    assert all(Image.open(ROOT / path).width <= 800 for path in found), found


@pytest.mark.parametrize(  # lines; thorough: bars
    "name", ["everett/quickstart", pytest.param("theory/shares", marks=pytest.mark.thorough)]
)
def test_the_same_tables_give_the_same_bytes(name, tmp_path, laid_out):
    written = [make(name, (), tmp_path / turn)[1] for turn in "ab"]
    assert {path.suffix for path in written[0]} == {".png", ".pdf"}
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*written, strict=True))
    assert not any(b"CreationDate" in path.read_bytes() for path in written[0])  # of this second


def test_every_shipped_file_is_drawn_or_read_by_a_figure(tmp_path):
    """No picture or table is left over from a figure that has another name now."""
    kept = {str(path.relative_to(FINDINGS))[:-4] for path in FINDINGS.glob("*/*")}
    assert kept == set(NAMES)
    read = {path for name in NAMES for path in shipped(name)}
    kept = {*tables.DATA.glob("*/*.csv"), *tables.DATA.glob("*/*.csv.gz")}
    assert kept == read
    assert not [
        path
        for path in (*tables.DATA.iterdir(), *style.FIGURES.iterdir())
        if path.is_file() and path.name != "report.png"
    ]  # a screenshot


@pytest.mark.thorough
@pytest.mark.parametrize("name", FIGURES)
def test_a_table_that_is_none_is_one_line(name, tmp_path, refused):
    """Each of a figure's tables in turn: of another kind, empty, and with words for numbers."""
    paths = shipped(name)
    for index, path in enumerate(paths):
        table = pd.read_csv(path, nrows=1)
        bad = tmp_path / f"{path.name.partition('.')[0]}.csv"
        for content, message in (
            ("a,b\n1,2\n", "no column '"),
            (",".join(table.columns) + "\n", "no runs in it; run "),
            (table.astype(object).map(lambda _: "much").to_csv(index=False), "no number: 'much'"),
        ):
            bad.write_text(content)
            error = refused(name, *paths[:index], bad, *paths[index + 1 :])
            assert error.startswith(f"error: {bad}: ") and message in error, (bad, error)


@pytest.mark.thorough
def test_a_row_that_stands_twice_is_refused_in_every_table_with_both_lines(tmp_path):
    """It would count as another seed: in the same words, and from a run of another name, as in two
    tables that overlap, where one curve, point of the grid and seed was trained again."""
    for path in sorted({path for name in NAMES for path in shipped(name)}):
        table = pd.read_csv(path, dtype=str, keep_default_na=False, nrows=40)
        again = table.iloc[[2]]
        rows = [again, *([again.assign(run="other-0")] if "status" in table else [])]
        for row in rows:
            bad = tmp_path / f"{path.name.partition('.')[0]}.csv"
            bad.write_text(f"{table.to_csv(index=False)}\n{row.to_csv(index=False, header=False)}")
            with pytest.raises(tables.TableError, match="stands twice counts as two") as caught:
                tables.read(bad, ())
            first, second = (f"{bad}: line {line} has" for line in (4, len(table) + 3))
            assert str(caught.value).startswith(f"{second} what {first}, ")


def test_two_tables_with_a_row_in_common_are_refused(tmp_path, refused):
    """Not two kinds of tables, which tell of the same runs."""
    lines = tables.shipped("everett/transfer_embedding").read_text().splitlines(keepends=True)
    parts = [tmp_path / "one.csv", tmp_path / "other.csv"]
    for path, own in zip(parts, (lines[:50], [lines[0], *lines[49:]]), strict=True):
        path.write_text("".join(own))
    assert f"{parts[1]}: line 2 has what {parts[0]}: line 50 has, run " in refused(
        "transfer", *parts
    )
    parts[1].write_text("".join([lines[0], *lines[50:]]))
    tables.refuse_overlap([*parts, *shipped("bordelon/depth")])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("csv", None),
        ("csv", lambda text: b""),
        ("csv", lambda text: b"\x89PNG\r\n\x1a\n\x00\xff"),
        ("zip", lambda text: text),
        ("csv.gz", lambda text: gzip.compress(text)[:-20]),
    ],
)
def test_a_file_that_pandas_cannot_read_is_one_line(kind, change, tmp_path, refused):
    bad = tmp_path / f"figure_10_adafactor.{kind}"
    if change:
        bad.write_bytes(change(tables.shipped("everett/figure_10_adafactor").read_bytes()))
    assert f"{bad}: cannot read the table" in refused("everett/adafactor", bad)


@pytest.mark.parametrize("name", [n for n in FIGURES if not isinstance(load(n).TABLES, AnyOf)])
def test_a_table_too_many_is_refused_by_every_figure(name, refused):
    assert "expected" in refused(name, *shipped(name), *shipped(name)[:1])


def test_a_figure_of_your_own_table_lies_next_to_it(tmp_path, capsys, laid_out):
    table = tmp_path / "results.csv"
    table.write_bytes(tables.shipped("theory/kernels").read_bytes())
    main(["shares", str(table)])
    assert f"written: {tmp_path}/shares.png" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".png", ".pdf"}


def test_all_draws_every_figure_into_its_papers_folder(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "plots.__main__.make",
        lambda name, given, out, *_: drawn.append((name, given, out)) or ("", []),
    )
    main(["--all", "--out", str(tmp_path)])
    assert drawn == [(name, [], tmp_path / name.partition("/")[0]) for name in NAMES]
    main(["--list"])
    listed = capsys.readouterr().out.splitlines()[-len(NAMES) :]
    assert [line.split()[0] for line in listed] == [*NAMES]
    assert all(len(line.split()) > 3 for line in listed)
    assert all(("_desktop " in line) == ("Preset desktop: " in line) for line in listed)


@pytest.mark.parametrize(
    "words", [[], ["--all", "quickstart"], ["quickstart", "--where", "seed=0"]]
)
def test_a_call_without_a_name_or_with_too_much_says_what_to_give(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "give" in capsys.readouterr().err


def test_help_is_that_of_the_figure(capsys):
    main(["bordelon/depth", "--help"])
    usage = "python -m plots bordelon/depth [OBSERVATIONS RESULTS METRICS]"
    assert usage in capsys.readouterr().out
    main(["--help"])
    assert "python -m plots ship TABLE PAPER/NAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "commands"),
    [
        (
            "everett/figure_1_5_6_7_alignment",
            "sweeps run nanolm_c4/sweeps/figure_1_5_6_7_alignment.yaml --preset laptop && "
            "plots ship results/nanolm_c4/figure_1_5_6_7_alignment_laptop/probes.csv TABLE",
        ),
        (
            "bordelon/figure_4_distances",
            "sweeps run vit_cifar5m/sweeps/figure_4.yaml --preset laptop && "
            "vit_cifar5m.distances results/vit_cifar5m/figure_4_laptop && "
            "plots ship results/vit_cifar5m/figure_4_laptop/distances.csv TABLE",
        ),
        ("bordelon/initial_density", "vit_cifar5m.initial --ship plots/data/bordelon"),
        ("theory/bigram", "effective_theory.run --ship plots/data/theory"),
    ],
)
def test_a_table_is_made_by_these_commands(table, commands):
    made = [f"python -m {command}" for command in commands.replace("TABLE", table).split(" && ")]
    assert tables.commands(table) == made


def test_no_figure_is_another_figures_library():
    figures = {f"plots.{name.replace('/', '.')}" for name in FIGURES}
    for path in (ROOT / "plots").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] == ["from"]:
                found = {words[1], *(f"{words[1]}.{word.strip(',')}" for word in words[3:])}
                assert not found & figures, f"{path}: {line}"
