"""Ablations, rates against width and the positional embedding's rate: known numbers are found; and
searches with holes in their tables."""

import math
from itertools import product

import pytest

from plots.__main__ import make
from plots.dinan import ablations, position_rate, rate_transfer
from plots.dinan.published import TRANSFER_EXPONENTS
from tests.plots.dinan.searched import (
    both,
    complete,
    frames,
    point,
    r2c2,
    read_rows,
    run,
    tables_of,
)
from tests.plots.made import lines, written

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


# Searches with holes in their tables


VIT = {
    "dinan/vit_search": {"figure_1_vit_search", "figure_1_vit_optima"},
    "dinan/vit_strategies": {"figure_2_vit_strategies"},
}
BART = {
    "dinan/bart_rates": {"figure_3_bart_rates", "figure_3_bart_optima"},
    "dinan/bart_strategies": {"figure_4_bart_strategies", "figure_5_bart_r2c2"},
}
each_figure = pytest.mark.parametrize("name", [*VIT, *BART])


def whole(name):
    """(results, metrics) of every sweep that the figure is drawn of."""
    if name in VIT:
        return [complete(dips=(25,))]
    seeds = {"seeds": (0, 1)}
    sweeps = [frames(both(width=64, skips=(20,), **seeds) + both(width=128, **seeds))]
    return sweeps + [frames(r2c2())] * (name == "dinan/bart_strategies")


@pytest.mark.parametrize(
    "name", [pytest.param("dinan/vit_search", marks=pytest.mark.thorough), "dinan/bart_strategies"]
)
def test_the_order_of_rows_does_not_matter(tmp_path, name):
    made = []
    for order in (1, -1):
        paths = []
        for index, (results, metrics) in enumerate(whole(name)):
            paths += written(
                tmp_path / f"{order}{index}", results=results[::order], metrics=metrics[::order]
            )
        text, files = make(name, paths, tmp_path / f"out{order}")
        made.append((text, [f.read_bytes() for f in files if f.suffix == ".png"]))
    assert made[0] == made[1]
    assert {file.stem for file in files} == {**VIT, **BART}[name]


@each_figure
def test_a_search_with_holes_is_drawn_all_the_same(tmp_path, name):
    """One strategy has one run, another one that diverged without a line and one that failed."""
    if name in VIT:
        made = [
            point("hybrid", rate, 2e-4, 0.8, status=status)[0]
            for rate, status in ((4.0, "diverged"), (8.0, "failed"))
        ]
        runs, left_out = [point("standard", 1e-3, 0.8, 0.8)], "hybrid"
    else:
        made = [
            run("neural_tangent", rate, math.nan, status=status)[0]
            for rate, status in ((1e-3, "diverged"), (2e-3, "failed"))
        ]
        runs, left_out = [run("standard", 1e-3, 2.0)], "neural-tangent"
    paths = tables_of(tmp_path, [*runs, *((row, []) for row in made)])
    text, files = make(name, paths, tmp_path / "out")
    assert all(file.stat().st_size for file in files)
    assert text.endswith(f"{left_out}: 1 failed left out")
