"""READMEs, configs and sweep files hold the findings of the shipped tables."""

import pytest

from plots import fill
from plots.catalogue import of_shipped
from plots.findings import Finding
from plots.tables import ROOT, TableError

EXPERIMENTS = ("nanolm_c4", "vit_imagenet", "vit_cifar5m", "bart_span_denoise", "effective_theory")

# Every figure's findings take most of a minute: one process has the tests that need them.
pytestmark = pytest.mark.xdist_group("claims")


def test_every_marked_file_is_as_the_command_writes_it():
    for path in fill.files():
        text = path.read_text(encoding="utf-8")
        assert text == fill.filled(text), f"{path}: run `python -m plots fill`"


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
    assert lines[2] == "# 60 runs, 1 to 2 seeds per point, AMD EPYC:"
    assert lines[3].startswith("#   muP minus standard: +0.770 ± ") and lines[4] == "# end"


def test_a_pattern_without_a_finding_is_an_error():
    with pytest.raises(TableError, match="everett/quickstart has no finding 'none'"):
        fill.filled("# findings: everett/quickstart none\n# end\n")
