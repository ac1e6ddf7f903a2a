"""Ablations, rates against width and the positional embedding's rate: known numbers are found."""

import math
from itertools import product

import pytest

from plots.dinan import ablations, position_rate, rate_transfer
from plots.dinan.published import TRANSFER_EXPONENTS
from tests.plots.dinan.searched import read_rows
from tests.plots.made import lines

# Final loss at the best rate: of seed 0, every further seed adds 0.1 to all curves alike.
LOWEST = {
    "standard": 4.7,
    "standard_rescale": 4.75,
    "standard_c_we": 4.2,
    "standard_both": 4.1,
    "neural_tangent": 4.0,
    "neural_tangent_rescale": 4.02,
    "neural_tangent_c_we": 4.6,
}
POWERS = {**TRANSFER_EXPONENTS, "hybrid": 0.5}
FLOOR = {"standard": 1.3, "neural_tangent": 1.2, "hybrid": 1.1, "maximal_update": 1.2}
# n times the positions' rate is all that neural-tangent gains, the bias' gains nothing.
POSITION = {
    "standard": 0.9,
    "position": 0.8,
    "head_bias": 0.9,
    "neural_tangent": 0.8,
    "blocks_alone": 0.9,
}


def row(curve, width, octave, seed, loss):
    place = {"curve": curve, "model.width": width, "optimizer.lr": 2.0**octave, "seed": seed}
    more = {"parameters": width**2, "final_eval_top1": 0.5}
    return {**place, "status": "finished", "final_eval_loss": loss, **more}


ABLATIONS = [
    row(curve, 64, octave, seed, lowest + 0.2 * abs(octave - 2) + 0.1 * seed)
    for (curve, lowest), octave, seed in product(LOWEST.items(), (1, 2, 3), range(3))
]
TRANSFER = [  # parabolas about optima that go as the strategy's power of the width; 1 at 16
    row(curve, n, octave, seed, floor + 0.1 * (octave - power * math.log2(n / 16)) ** 2 + seed / 99)
    for (curve, power), floor in zip(POWERS.items(), map(FLOOR.get, POWERS), strict=True)
    for n, octave, seed in product((16, 32, 64, 128), range(-7, 4), (0, 1))
]
POSITIONS = [
    row(curve, 64, octave, seed, floor + 0.1 * (octave + 3) ** 2 + seed * (0.01 + 1e-4 * octave))
    for (curve, floor), octave, seed in product(POSITION.items(), range(-5, 0), range(3))
]
COST = "cost of the smallest n's lr* at the largest"


@pytest.mark.parametrize(
    ("module", "rows", "expected"),
    [
        (
            ablations,
            ABLATIONS,
            {
                "gain of C_WE = 1, in standard (nats)": 0.5,
                "gain of N_rescale, in standard (nats)": -0.05,
                "gain of both, in standard (nats)": 0.6,
                "gain of C_WE = 1, in neural-tangent (nats)": 0.6,
                "gain of N_rescale, in neural-tangent (nats)": 0.02,
                "gain of relative rates, with both (nats)": 0.1,
                "gain of all three (nats)": 0.7,
            },
        ),
        (
            rate_transfer,
            TRANSFER,
            {
                "standard: exponent of the width in lr*": -1.5,
                "neural-tangent: exponent of the width in lr*": 0.0,
                "hybrid: exponent of the width in lr*": 0.5,
                # Standard's best rate is the blocks', (n / 16)^(-3/2) here; neural-tangent's is 1,
                # for them times lambda = n^(-3/2): 16^(3/2) or 6 octaves apart at every width.
                "n = 128: blocks' lr*, neural-tangent / standard (octaves)": -6.0,
                "n = 128: neural-tangent - standard (nats)": -0.125,  # of the grid's rates
            },
        ),
        (
            position_rate,
            POSITIONS,
            {
                "standard - neural-tangent (nats)": 0.1,
                "standard - standard, n times the positions' rate (nats)": 0.1,
                "standard, n times the positions' rate - neural-tangent (nats)": 0.0,
                "standard, n times the bias' rate - standard (nats)": 0.0,
                "neural-tangent, positions at the blocks' rate - standard (nats)": 0.0,
            },
        ),
    ],
    ids=["ablations", "rate_transfer", "position_rate"],
)
def test_the_numbers_that_tables_were_made_with_are_found(module, rows, expected, tmp_path):
    table = read_rows(module, tmp_path, rows)
    found = lines(module.findings(table))
    measured = {name: found[name].estimate.value for name in expected}
    assert measured == pytest.approx(expected, abs=1e-2)
    assert all(found[name].estimate.error < 0.02 for name in expected)  # seeds differ by far more
    assert len(list(module.draw(table))) == 1


def test_keeping_a_rate_costs_nothing_where_it_is_the_best_one_again(tmp_path):
    found = lines(rate_transfer.findings(read_rows(rate_transfer, tmp_path, TRANSFER)))
    assert found[f"maximal-update: {COST}"].measured == "same grid rate"
    # lr* is 8^(1/2) at n = 128; the grid has 2 and 4, alike.
    assert found[f"hybrid: {COST}"].measured.startswith("+0.200 ±")
