"""Theory and networks joined: the tolerances promised, and what a comparison counts as."""

from __future__ import annotations

import json
import math

import pytest
import torch

from effective_theory import compare
from effective_theory.compare import Comparison
from effective_theory.config import Config
from training.config import load

CONFIGS = "effective_theory/configs"


def row(**changes) -> Comparison:
    values = dict(
        stem="vision", width=512, heads=2, networks=300, quantity="theta", block="head",
        part="mlp_in", entry="diagonal", predicted=2.0, predicted_error=math.nan, measured=2.03,
        error=0.01,
    )
    return Comparison(**values | changes)


def test_ratio_and_z_score():
    assert row().ratio == pytest.approx(1.015)
    assert row().z == pytest.approx(3.0)
    assert row(predicted_error=0.01).z == pytest.approx(3 / math.sqrt(2))
    assert math.isnan(row(predicted=0.0).ratio)


@pytest.mark.parametrize(
    "changes, met",
    [
        ({}, True),
        ({"measured": 2.05}, False),
        ({"measured": 2.09, "part": "query"}, True),
        ({"measured": 1.89, "part": "key"}, False),
        ({"quantity": "G", "part": ""}, False),
        ({"quantity": "G", "part": "", "measured": 1.99}, True),
        ({"width": 256, "measured": 3.0}, None),
        ({"networks": 299, "measured": 3.0}, None),
        ({"entry": "rest", "measured": 3.0}, None),
        ({"width": math.inf, "measured": 3.0}, None),
    ],
)
def test_tolerances_hold_at_large_widths_with_many_networks(changes, met):
    assert row(**changes).met is met


@pytest.fixture(scope="module")
def result():
    overrides = (
        "measure.widths=[32, 64]", "measure.seeds=[60, 40]", "model.heads=1", "model.depth=1",
        "model.mlp_ratio=1", "model.outputs=16", "theory.attention_draws=4096",
    )
    return compare.compare(load(Config, f"{CONFIGS}/vision.yaml", overrides))


def test_theory_and_networks_agree_within_errors_and_the_corrections_of_small_widths(result):
    rows = [r for r in result.rows if r.entry == "diagonal" and r.quantity != "gradient"]
    assert {r.width for r in rows} == {32, 64, math.inf}
    # Stem and what only depends on it have no corrections: errors alone explain the distance.
    for r in rows:
        slack = 0.0 if (r.quantity, r.block) == ("G", "stem") else 4 / min(r.width, 64)
        assert abs(r.ratio - 1) <= slack + 4 * r.error / abs(r.predicted), r


def test_groups_add_up_to_the_whole_kernel(result):
    for part in result.measured:
        for block, groups in part.mean.groups.items():
            total = sum(groups.values())
            torch.testing.assert_close(total, part.mean.theta[block]["total"])


def test_diagonals_error_is_that_of_the_networks_means_not_of_single_entries(result):
    part = result.measured[0]
    entries = part.se.G["mlp.0"].diagonal()
    own = part.se.diagonals["G", "mlp.0"]
    independent = entries.norm() / len(entries)
    assert independent / 2 < own < entries.mean() * 1.001


def test_rest_compares_along_the_prediction(result):
    rest = [r for r in result.rows if r.entry == "rest" and r.quantity == "G"]
    assert rest and all(abs(r.z) < 4 for r in rest if r.block == "stem")
    assert all(r.predicted > 0 for r in rest)


def test_json_holds_every_entry(result):
    value = json.loads(json.dumps(compare.as_json(result)))
    size = len(value["theory"]["G"]["stem"])
    assert size == 8
    assert len(value["measured"]["64"]["mean"]["theta"]["mlp.0"]["attention.0.query"]) == size
    assert value["measured"]["64"]["networks"] == 40
    assert set(value["theory"]["theta"]["head"]) >= {"stem", "readout_bias", "total"}


def test_table_shows_the_verdicts(result):
    text = compare.table([*result.rows, row(), row(measured=2.2)])
    assert "2% met" in text and "2% MISSED" in text
    assert "Theta query" in text and "G mlp.0" in text
