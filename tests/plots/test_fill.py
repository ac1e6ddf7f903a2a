"""READMEs, configs and sweep files hold the findings of the shipped tables."""

import re
from pathlib import Path

import pytest

from plots import fill
from plots.catalogue import of_shipped
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
        assert text == fill.filled(text, path.relative_to(ROOT)), f"{path}: `python -m plots fill`"


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


def test_a_yaml_file_says_runs_seeds_and_machine():
    text = "# head\n# findings: everett/quickstart muP minus\n# end\nexperiment: nanolm_c4\n"
    lines = fill.filled(text).splitlines()
    assert lines[2] == "# 60 runs, 1 to 2 seeds per point, Intel(R) Xeon(R) Processor:"
    assert lines[3].startswith("#   muP minus standard: +0.798 ± ") and lines[4] == "# end"


def test_a_pattern_without_a_finding_is_an_error():
    with pytest.raises(TableError, match="everett/quickstart has no finding 'none'"):
        fill.filled("# findings: everett/quickstart none\n# end\n")


def test_a_sweep_file_rests_on_its_own_table_of_a_figure_with_several():
    text = "# findings: everett/learning_rates_desktop adam, muP\n# end\n"
    file = Path("nanolm_c4/sweeps/figure_12_adam.yaml")
    assert "\n# preset desktop, 752 runs, 3 to 5 seeds" in fill.filled(text, file)
    assert fill.filled(text, file.with_name("a_copy_of_mine.yaml")) == text


@pytest.mark.parametrize(
    "path", tracked("*/sweeps/*.yaml", "*/configs/*.yaml"), ids=lambda path: path.stem
)
def test_every_config_begins_with_what_to_expect_how_long_it_takes_and_the_command(path):
    name = path.relative_to(ROOT)
    head = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))[0]
    assert re.search(rf"python -m \S+ .*({name}|{path.stem})\b|bash scripts/\w+\.sh", head)
    assert re.search(r"\d (?:s|minutes|hours|H100-hours) (?:of|on) (?:one|two|\d)", head)
    assert ("# findings: " in head) == bool(re.search(r"\n# .*\d runs, \d.*:\n#   ", head))
    assert re.search(
        r"^# (?:findings: |Expected: |Not known: |No table of it)|not known", head, re.M
    )
