"""READMEs hold the claims and findings of the shipped tables; configs and sweep files hold none."""

import re

import pytest

from plots import fill
from plots.catalogue import of_shipped
from plots.claims import PAGE
from plots.findings import Finding
from plots.tables import ROOT, TableError
from tests.tracked import tracked

EXPERIMENTS = ("nanolm_c4", "vit_imagenet", "vit_cifar5m", "bart_span_denoise", "effective_theory")

# Every figure's findings take most of a minute: one process has the tests that need them.
pytestmark = pytest.mark.xdist_group("claims")


@pytest.mark.thorough
def test_every_marked_file_is_as_the_command_writes_it():
    for path in fill.files():
        text = path.read_text(encoding="utf-8")
        assert text == fill.filled(text), f"{path}: `python -m plots fill`"


@pytest.mark.thorough
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_first_table_of_an_experiment_has_its_claims(experiment):
    path = ROOT / experiment / "README.md"
    assert path in fill.files()
    first = next(line for line in path.read_text().splitlines() if line.startswith("|"))
    assert first == "| claim | here | number | drift |"
    assert len(fill.claims_table(experiment)) > 6


def test_numbers_between_marks_are_written_and_nothing_else_is_touched():
    text = "a\n<!-- findings: theory/shares vision: share of Q -->\nold\n<!-- end -->\nb\n"
    (line,) = (
        one
        for one in of_shipped("theory/shares")
        if isinstance(one, Finding) and one.name.startswith("vision: share of Q")
    )
    new = fill.filled(text)
    row = f"| {line.name} | {line.measured} | {line.published} | {line.verdict} |"
    assert new.splitlines()[0] == "a" and new.splitlines()[-1] == "b"
    assert row in new and "old" not in new and fill.filled(new) == new


def test_a_pattern_without_a_finding_is_an_error():
    with pytest.raises(TableError, match="everett/quickstart has no finding 'none'"):
        fill.filled("<!-- findings: everett/quickstart none -->\n<!-- end -->\n")


def test_the_front_page_has_the_numbers_of_the_claims():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    holds = text[text.index("### What holds") : text.index("### Eight words")]
    numbers = re.findall(r"−?[\d.]+ ± [\d.]+|\d+ of \d+|\d+ not judged", holds)
    page = PAGE.read_text(encoding="utf-8")
    assert len(numbers) > 6
    for number in numbers:
        met, _, every = number.partition(" of ")
        written = number.replace("−", "-") if not every else f"{met} met"
        assert written in page, number


def test_nothing_but_text_for_readers_is_written(tmp_path, monkeypatch):
    """Results flow into READMEs, and never back into what starts the runs."""
    marks = "<!-- findings: theory/shares vision: share of Q -->\n<!-- end -->\n"
    files = [tmp_path / "a" / name for name in ("README.md", "configs/c.yaml", "sweeps/s.yaml")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(marks)
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    fill.main([])
    changed = [file for file in files if file.read_text() != marks]
    assert changed == files[:1]


@pytest.mark.parametrize(
    "path", tracked("*/sweeps/*.yaml", "*/configs/*.yaml"), ids=lambda path: path.stem
)
def test_four_lines_say_what_to_expect_how_long_it_takes_and_the_command(path):
    name = path.relative_to(ROOT)
    head = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))[0]
    what, expected, time, command = head.splitlines()
    assert len(what) <= 100 and re.fullmatch(r"# Expected: [^±]*\.", expected)
    assert "+-" not in expected
    assert "not known" not in expected or path.parent.name == "configs"  # of the papers' sizes
    assert re.search(r"\d (?:s|minutes|hours|H100-hours) (?:of|on) (?:one|two|\d)", time)
    assert re.search(rf"python -m \S+ .*({name}|{path.stem})\b|bash scripts/\w+\.sh", command)
