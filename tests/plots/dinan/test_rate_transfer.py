"""Rates and widths of Dinan et al.'s strategies: exponents and findings right on known tables."""

import functools
import math
import re
from pathlib import Path

import pytest

from plots.catalogue import of_shipped
from plots.dinan import rate_transfer
from plots.dinan.published import TRANSFER_EXPONENTS
from plots.tables import TableError
from tests.plots.dinan.searched import lines, read_rows

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
        assert found.published == f"{power} (derived)" and found.verdict.startswith(verdict), found
    assert findings["standard: exponent of the width in lr*"].measured.startswith("-1.50 ±")
    cost = "cost of the smallest n's lr* at the largest"
    assert findings[f"maximal-update: {cost}"].measured == "same grid rate"
    # lr* is 8^(1/2) at n = 128; the grid has 2 and 4, alike.
    assert findings[f"hybrid: {cost}"].measured.startswith("+0.200 ±")
    text = "\n".join(map(str, rate_transfer.findings(table)))
    assert "0.007 at n = 16" in text and " D = " not in text
    assert "weight decay was not searched for" in text
    ((name, figure),) = rate_transfer.draw(table)
    titles = ["standard", "neural-tangent", "hybrid", "maximal-update", "best rate"]
    assert name == "rate_transfer" and [axis.get_title() for axis in figure.axes] == titles
    # Two rows of three, which a README does not shrink beyond reading.
    places = [axis.get_subplotspec() for axis in figure.axes]
    assert [(one.rowspan.start, one.colspan.start) for one in places] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
    assert figure.get_figwidth() <= 9.0
    (legend,) = figure.legends
    assert sum(" $\\sim n^{" in entry.get_text() for entry in legend.get_texts()) == 4


@pytest.mark.parametrize(
    ("pair", "measured", "verdict"),
    [
        ("hybrid - neural-tangent", "-0.075 ± 0.007", "agrees"),
        ("hybrid - standard", "-0.200 ± 0.007", "agrees"),
        ("hybrid - maximal-update", "-0.075 ± 0.007", "agrees"),
        ("neural-tangent - standard", "-0.125 ± 0.007", "agrees"),
        ("neural-tangent - maximal-update", "+0.000 ± 0.007", "within noise"),
        ("standard - maximal-update", "+0.125 ± 0.007", "disagrees"),
    ],
)
def test_lowest_losses_at_the_largest_width_are_compared_with_the_papers_order(
    tmp_path, pair, measured, verdict
):
    """Of the grid's rates: at n = 128 optima of standard and hybrid lie between two."""
    found = lines(rate_transfer.findings(read(tmp_path, ROWS)))[f"n = 128: {pair} (nats)"]
    assert found.measured.startswith(f"{measured} at n = 128 (")
    assert (found.published, found.verdict) == ("below 0", verdict)


def test_missing_strategies_and_optima_at_an_edge_are_said(tmp_path):
    rows = [one for one in ROWS if one["curve"] == "standard" and one["optimizer.lr"] <= 1 / 8]
    table = read(tmp_path, rows)
    text = "\n".join(map(str, rate_transfer.findings(table)))
    assert "standard: best rate at the edge of its sweep at n = 16, 32, 64" in text
    assert "no fit: 1 width; at edge: 16, 32, 64" in text and "hybrid" not in text
    assert len(dict(rate_transfer.draw(table))["rate_transfer"].axes) == 2


def test_tables_of_another_sweep_or_without_a_run_are_one_line(tmp_path):
    for rows, message in (
        ([*ROWS, ROWS[0]], "two runs with curve standard, model.width 16, .*rate_transfer.yaml"),
        ([one | {"curve": "adam"} for one in ROWS], "no row with curve standard, neural_tangent"),
        ([one | {"status": "failed"} for one in ROWS], "every run failed"),
    ):
        with pytest.raises(TableError, match=message):
            read(tmp_path, rows)


@pytest.mark.parametrize("name", ["dinan/rate_transfer", "dinan/rate_transfer_desktop"])
def test_the_readme_quotes_the_shipped_tables(name):
    readme = (Path(__file__).resolve().parents[3] / "vit_imagenet/README.md").read_text()
    words = re.sub(r"\s+", " ", readme).replace("−", "-")
    quoted = "exponent|cost|nats|lowest" if name.endswith("desktop") else "exponent"
    for line, finding in lines(of_shipped(name)).items():
        numbers = re.findall(r"(\d\.\d+) ?± ?(\d\.\d+)", finding.measured)
        if re.search(quoted, line):  # the last of several by width
            assert all(" ± ".join(pair) in words for pair in numbers[-1:]), finding
            if name.endswith("desktop") and re.match("(standard|neural-tangent): exp", line):
                assert f"(n^({finding.measured.partition(' (')[0]})" in words.replace(
                    "beside n", "(n"
                ), finding
