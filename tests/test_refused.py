"""The pages of refusals, `tests/<room>/refused.txt`: what they say, and that none is missing."""

from pathlib import Path

import pytest

from tests import refusals
from tests.test_imports import STANDS_ON

PAGES = {room: Path(__file__).parent / room / "refused.txt" for room in STANDS_ON}


@pytest.mark.filterwarnings("ignore")  # of what is refused a line later
@pytest.mark.parametrize("room", PAGES)
def test_what_can_go_wrong_is_said_in_one_line(room, tmp_path, monkeypatch):
    problems = refusals.complaints(room, PAGES[room], tmp_path, monkeypatch)
    assert not problems, "\n".join(problems)


def test_a_page_that_is_wrong_is_seen(tmp_path, monkeypatch):
    """Another message, more than a line, no error, a file that is left, a raise without a case."""
    (tmp_path / "runs").mkdir()
    page = tmp_path / "refused.txt"
    page.write_text(
        """>>> from param_groups import Depth, fits

>>> fits.power_law([2, 2], [1, 3])
ValueError: another message

>>> raise ValueError("one\\ntwo")
ValueError: one two

>>> fits.power_law([1, 2], [1, 3])
ValueError: no such law

>>> open("left", "w").close()
>>> Depth(3, 2)
PlanError: Depth goes around a prescription, got 3

- `param_groups/rules/wrappers.py: goes around`: reached, in truth
- `param_groups/fits.py: every run diverged`: and this is not
- `param_groups/fits.py: a message of former days`: and this is none
"""
    )
    problems = refusals.complaints("param_groups", page, tmp_path / "runs", monkeypatch)
    said = "\n".join(problems)
    assert "power law needs at least two different x\n    expected ValueError: another" in said
    assert "more than one line" in said and "no error" in said and "something was written" in said
    assert "reached, and listed as not" in said and "every run diverged" not in said
    assert "no raise says 'a message of former days'" in said
    assert 150 < len(problems) < 250  # what this page leaves out
