"""A search's journal against the sealed summaries of its trials, and ranges that reach an end."""

import re
import shutil

import pytest

from sweeps.progress import status
from tests.sweeps.test_search import BASE, EXPERIMENT, SEARCH, run, write_search
from tests.sweeps.toys import calls, make_toy, work_of
from training.errors import UserError


@pytest.fixture
def toy(tmp_path, monkeypatch):
    return make_toy(tmp_path, monkeypatch, EXPERIMENT, BASE)


def digit(text):
    """The file with the last digit of its first loss changed."""
    return re.sub(r"(\d\.\d{6,})(\d)", lambda m: m[1] + str(9 - int(m[2])), text, count=1)


JOURNALS = {
    "a line twice": lambda lines: [lines[0], lines[1], *lines[1:]],
    "the last beginning twice": lambda lines: [
        *lines,
        [line for line in lines if "datetime_start" in line][-1],
    ],
    "lines swapped": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a line lost": lambda lines: [*lines[:3], *lines[4:]],
    "a value": lambda lines: [line.replace('"gamma.a":1.0', '"gamma.a":2.0') for line in lines],
    "a loss": lambda lines: [line.replace('"values":[3.', '"values":[2.') for line in lines],
    "a status": lambda lines: [line.replace("finished", "diverged") for line in lines],
    **{
        f"{kind}": lambda lines, kind=kind: [*lines[:5], f"{kind}\n", *lines[5:]]
        for kind in ("null", "[]", "{}", "3", "[[", "[" * 100_000, "word")
    },
}


@pytest.mark.parametrize("name", JOURNALS)
def test_a_damaged_journal_is_one_line_and_its_advice_brings_the_same_trials(toy, name):
    path = write_search(toy)
    work, _, _ = run(toy, path)
    trials, journal = (work.folder / file for file in ("trials.csv", "journal.jsonl"))
    whole, before = trials.read_bytes(), len(calls(toy))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(JOURNALS[name](lines)))
    with pytest.raises(UserError) as caught:
        status(work_of(toy, path))
    said = str(caught.value)
    assert said.startswith(f"{journal}: damaged (") and "; delete it: runs that" in said
    assert "\n" not in said
    journal.unlink()
    run(toy, path)
    assert trials.read_bytes() == whole and len(calls(toy)) == before


def test_a_trial_is_what_its_runs_sealed_summary_says(toy):
    path = write_search(toy)
    work, _, _ = run(toy, path)
    whole = (work.folder / "trials.csv").read_bytes()
    summary = next(work.folder.glob("*/summary.json"))
    for damage in (digit, lambda text: text[:20], lambda text: ""):
        summary.write_text(damage(summary.read_text()))
        with pytest.raises(UserError, match=f"{summary.parent.name}.*delete it"):
            work_of(toy, path)
        shutil.rmtree(summary.parent, ignore_errors=True)
        (work.folder / "journal.jsonl").unlink()
        assert run(toy, path)[0] and (work.folder / "trials.csv").read_bytes() == whole


def test_a_search_whose_best_value_is_at_the_end_of_what_is_valid_ends(toy):
    """Its next range would leave that: it goes as far as values make a config."""
    train = toy / "train.py"
    train.write_text(train.read_text().replace("return 3 +", "return 3 - config.optimizer.beta1 +"))
    text = SEARCH.replace("gamma.b: [1.0e-2, 1.0e+2]", "optimizer.beta1: [0.5, 0.9]")
    path = write_search(toy, text.replace("rounds: 1", "rounds: 3"))
    work, _, constants = run(toy, path)
    assert [*work.complete] == ["all"] and not work.reasons
    low, high = constants["constants"][0]["ranges"]["optimizer.beta1"]
    assert 0 < low < high < 1
