"""The proof of transfer's words: its shipped losses judged again, and stacks of seeds."""

import json
from pathlib import Path

import pytest

from benchmarks import transfer_words
from benchmarks.transfer_words import PLANTED, judge, mup, train

RESULTS = Path(transfer_words.__file__).parent / "results"
SHIPPED = {
    row["rule"]: row for row in json.loads((RESULTS / "transfer_words.json").read_text())["rows"]
}


@pytest.mark.parametrize("rule", PLANTED)
def test_at_most_one_word_of_twenty_is_wrong(rule):
    losses = transfer_words.read(RESULTS / "transfer_words.csv")[rule]
    row, known = judge(rule, 20, 2, losses), len(losses)
    assert row["wrong"] <= 0.05 and len(losses) == known
    kept = ("stays", "moves", "undecided", "wrong")
    assert {key: row[key] for key in kept} == {key: SHIPPED[rule][key] for key in kept}


def test_seeds_train_side_by_side_as_alone(monkeypatch):
    monkeypatch.setattr(transfer_words, "STEPS", 10)
    alone = [train(mup(8), 8, -5.0, range(seed, seed + 1))[0] for seed in range(2)]
    assert train(mup(8), 8, -5.0, range(2)) == pytest.approx(alone, rel=1e-4)
