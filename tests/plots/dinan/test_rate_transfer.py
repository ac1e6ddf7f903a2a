"""Rates and widths of Dinan et al.'s strategies: exponents and findings right on known tables."""

import functools
import math

import pytest

from plots.dinan import position_rate, rate_transfer
from plots.dinan.published import TRANSFER_EXPONENTS
from plots.tables import TableError
from tests.plots.dinan.searched import read_rows
from tests.plots.made import lines

WIDTHS, POWERS = (16, 32, 64, 128), {**TRANSFER_EXPONENTS, "hybrid": 0.5}
FLOOR = {"standard": 1.3, "neural_tangent": 1.2, "hybrid": 1.1, "maximal_update": 1.2}


def row(strategy, width, rate, seed=0):
    """A parabola about an optimum that goes as the strategy's power of the width; 1 at 16."""
    off = math.log2(rate) - POWERS[strategy] * math.log2(width / 16)
    return {
        "curve": strategy,
        "model.width": width,
        "optimizer.lr": rate,
        "seed": seed,
        "status": "finished",
        "final_eval_loss": FLOOR[strategy] + 0.1 * off**2 + 0.01 * seed,
        "parameters": width**2,
        "final_eval_top1": 0.5,
    }


ROWS = [
    row(strategy, width, 2.0**octave, seed)
    for strategy in POWERS
    for width in WIDTHS
    for octave in range(-7, 4)
    for seed in (0, 1)
]


read = functools.partial(read_rows, rate_transfer)


def test_exponents_stand_beside_those_that_follow_from_the_relative_rates(tmp_path):
    table = read(tmp_path, ROWS)
    findings = lines(rate_transfer.findings(table))
    for name, power, verdict in (
        ("standard", "-3/2", "agrees within 95 %"),
        ("neural-tangent", "0", "agrees within 95 %"),
        ("maximal-update", "0", "agrees within 95 %"),
        ("hybrid", "0", "off by +0.50"),
    ):
        found = findings[f"{name}: exponent of the width in lr*"]
        assert found.published == f"{power} derived" and found.verdict.startswith(verdict), found
    assert findings["standard: exponent of the width in lr*"].measured.startswith("-1.50 ±")
    cost = "cost of the smallest n's lr* at the largest"
    assert findings[f"maximal-update: {cost}"].measured == "same grid rate"
    # lr* is 8^(1/2) at n = 128; the grid has 2 and 4, alike.
    assert findings[f"hybrid: {cost}"].measured.startswith("+0.200 ±")
    text = "\n".join(map(str, rate_transfer.findings(table)))
    assert "0.007 at n = 16" in text and " D = " not in text
    assert "weight decay was not searched for" in text
    ((name, figure),) = rate_transfer.draw(table)
    titles = ["standard", "neural-tangent", "hybrid", "maximal-update", "best rate", ""]
    assert name == "rate_transfer" and [axis.get_title() for axis in figure.axes] == titles
    words = [entry.get_text() for entry in figure.axes[-1].get_legend().get_texts()]
    assert sum("$n^{" in word for word in words) == 4


def test_a_table_of_other_curves_is_one_line(tmp_path):
    with pytest.raises(TableError, match="no row with curve standard, neural_tangent"):
        read(tmp_path, [one | {"curve": f"adam {one['curve']}"} for one in ROWS])


def test_the_blocks_rates_of_two_strategies_are_mapped_by_the_width(tmp_path):
    """Standard's best rate is the blocks', (n / 16)^(-3/2) here; neural-tangent's is 1, for them
    times lambda = n^(-3/2): 16^(3/2) or 6 octaves apart at every width."""
    found = lines(rate_transfer.findings(read(tmp_path, ROWS)))
    for width in WIDTHS:
        gap = found[f"n = {width}: blocks' lr*, neural-tangent / standard (octaves)"]
        assert gap.estimate.value == pytest.approx(-6, abs=0.01) and gap.published == "0"


def test_what_a_tensors_rate_gains_is_told_from_what_others_do(tmp_path):
    """n times the positions' rate is all that neural-tangent gains, the bias' gains nothing."""
    floors = {
        "standard": 0.9,
        "position": 0.8,
        "head_bias": 0.9,
        "neural_tangent": 0.8,
        "blocks_alone": 0.9,
    }
    rows = [
        {
            **row("hybrid", 64, 2.0**octave, seed),
            "curve": curve,
            "final_eval_loss": floor + 0.1 * (octave + 3) ** 2 + 0.01 * seed + 1e-4 * seed * octave,
        }
        for curve, floor in floors.items()
        for octave in range(-5, 0)
        for seed in (0, 1, 2)
    ]
    table = read_rows(position_rate, tmp_path, rows)
    found = lines(position_rate.findings(table))
    expected = {
        "standard - neural-tangent (nats)": 0.1,
        "standard - standard, n times the positions' rate (nats)": 0.1,
        "standard, n times the positions' rate - neural-tangent (nats)": 0.0,
        "standard, n times the bias' rate - standard (nats)": 0.0,
        "neural-tangent, positions at the blocks' rate - standard (nats)": 0.0,
    }
    for name, gain in expected.items():
        assert found[name].estimate.value == pytest.approx(gain, abs=1e-9)
        assert found[name].verdict == "agrees", name
    assert len(list(position_rate.draw(table))) == 1
