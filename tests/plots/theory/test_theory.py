"""The figures of effective_theory, from constructed tables."""

import math

import pandas as pd
import pytest
from matplotlib.collections import PathCollection

from plots.__main__ import make
from plots.findings import Finding
from plots.tables import TableError
from plots.theory import bigram as exponents
from plots.theory import error, kernels, shares
from tests.plots import made

WIDTHS = (64, 128, 256, 512)


def entries(correction: float = 2.0, power: float = 1.0, error: float = 1e-4) -> pd.DataFrame:
    """G of two blocks and a tangent kernel of three groups, off theory by correction / n^power."""
    rows = []
    for width in (*WIDTHS, math.inf):
        off = 1 + (correction * width**-power if math.isfinite(width) else 0.0)
        cells = [("G", "stem", "", 2.0), ("G", "head", "", 0.5), ("theta", "stem", "total", 2.0)]
        cells += [
            ("theta", "head", part, value)
            for part, value in (("total", 4.0), ("stem", 1.0), ("query", 2.0), ("readout", 1.0))
        ]
        for *place, value in cells:
            rows.append((width, *place, value, value * off, value * error))
    found = made.rows("width quantity block part predicted measured error", rows)
    same = {"stem": "vision", "heads": 2, "networks": 100, "entry": "diagonal"}
    return found.assign(**same, predicted_error=math.nan)


def fitted(**changes) -> pd.DataFrame:
    cells = [
        ("Table 2", "1", "h_1", 0, "prediction", 0.0, 0.01, True, ""),
        ("Table 2", "2", "h_1", 0, "prediction", 0.0, 0.09, None, ""),
        ("alignment", "sp", "u_1", 1, "bound", 1.0, 0.5, True, "1/2 at first"),
        ("Table 1", "sp", "h_1", 1, "prediction", 0.0, 0.02, True, ""),
        ("Table 1", "sp", "h_1", 2, "prediction", 0.0, 0.03, False, "judged elsewhere"),
        ("Table 1", "sp", "h_1", 3, "prediction", 0.0, 0.30, True, ""),
        ("Table 3", "SP (Condition A.2)", "dh_4[y]", 1, "hypothetical", 0.0, 0.5, None, "violated"),
    ]
    columns = "table row column step kind predicted measured met note"
    return made.rows(columns, cells).assign(error=0.01, z=None, moved=0.25, **changes)


@pytest.fixture
def table(tmp_path):
    return lambda frame: made.written(tmp_path, table=frame)[0]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_power_of_the_corrections_is_recovered(power):
    forward, tangent = error.curves(entries(power=power, error=1e-6), "vision")
    for curve in (forward["stem"], tangent["Q"]):
        found = error.decay(curve)
        assert found.value == pytest.approx(-power, abs=0.02) and found.error < 0.1
    named = {line.name: line for line in error.findings(entries(power=power, error=1e-6))[1:]}
    found = named["vision: share of the tangent kernel, Q, correction's power of n"]
    assert found.verdict.startswith("agrees" if power == 1 else "off by")


def test_corrections_within_the_noise_have_no_power():
    noisy = entries(correction=1.0, error=0.01)
    assert error.decay(error.curves(noisy, "vision")[0]["stem"]) is None
    found = error.findings(noisy)[1]
    assert found.name == "vision: G, stem, correction" and found.verdict == "within noise"
    assert found.measured == "none seen: +1.56 ± 1.00 % at n = 64"


def test_numbers_that_are_the_same_in_all_networks_are_no_curve():
    assert error.curves(entries(error=0.0), "vision") == ({}, {})


def test_shares_add_up_and_are_those_of_the_largest_width():
    found = shares.shares(entries(), "vision")
    assert found["predicted"].to_dict() == {"stem": 0.25, "query": 0.5, "readout": 0.25}
    assert found["measured"].sum() == pytest.approx(1)


def test_distances_are_given_per_width():
    _, stem, head, by_width, *_ = kernels.findings(entries())
    assert "n = 64: 3.12 %" in by_width and "n = inf: 0.00 %" in by_width
    assert (stem.name, stem.published) == ("vision: G, stem, n = 512", "2.0000")
    assert stem.measured == "2.0078 ± 0.0002" and stem.verdict == "off by +0.01, 39.1 SE"
    assert head.name == "vision: G, head, n = 512"
    _, stem, *_ = kernels.findings(entries(error=0.01))
    assert stem.verdict == "agrees within 2 SE"


def test_a_number_that_is_the_same_in_all_networks_has_no_verdict():
    found = kernels.findings(entries(error=0.0))
    assert not any(isinstance(line, Finding) for line in found) and len(found) == 3


def test_shares_stand_beside_their_predictions():
    found = shares.findings(entries(error=0.01))
    query = next(line for line in found if isinstance(line, Finding) and "Q" in line.name)
    assert query.name == "vision: share of Q in the tangent kernel, %"
    assert (query.published, query.verdict) == ("50.00", "agrees within 2 SE")
    # 1 % of group and total, their squares added, of a half; the measured total is 0.4 % larger
    assert query.measured == "50.00 ± 0.70"


def test_findings_of_the_bigram_model_follow_the_verdicts_of_the_table(table):
    lines = exponents.findings(exponents.read([table(fitted())]))
    told = {line.name: line for line in lines if isinstance(line, Finding)}
    counts = {
        name: (line.measured, line.verdict)
        for name, line in told.items()
        if name.endswith("exponents")
    }
    assert counts == {
        "Table 1, steps 1 to 3: exponents": ("2 met, 1 missed", "disagrees"),
        "Table 2, initialisation: exponents": ("1 met, 0 missed, 1 not judged", "agrees"),
        "Table 3, step 1: exponents": ("0 met, 0 missed, 1 not judged", ""),
        "alignment, step 1: exponents": ("1 met (1 as upper bounds), 0 missed", "agrees"),
    }
    missed = told["Table 1, missed: sp, h_1, step 2"]
    assert (missed.measured, missed.published) == ("+0.03 ± 0.01", "0")
    # The paper says that SP breaks the condition: 0.5 is what it predicts.
    broken = told["Condition A.2 breaks: SP (Condition A.2), dh_4[y], step 1"]
    assert (broken.published, broken.verdict) == ("0.5 (A.2: 0)", "agrees within 2 SE")
    assert "sp, h_1: judged elsewhere" in lines
    assert "Table 1: last activations' change before step 3: SP 25.0%" in lines


def test_panels_of_the_bigram_model_say_what_and_when(table):
    ((_, figure),) = exponents.draw(exponents.read([table(fitted())]))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0].startswith("Table 1: RMS in training, steps 1 and 3")
    assert titles[1] == "Table 2: variance at initialisation"
    assert [title.split(":")[0] for title in titles[2:]] == ["Table 3", "alignment"]
    legend = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert "1/d" in legend[0] and legend[1] == "2: the same with RMSNorm"
    dashed = [
        [(offset[1], shape.get_linestyles()[0][1] is not None) for offset in shape.get_offsets()]
        for axis in figure.axes[1:3]
        for shape in axis.collections
        if isinstance(shape, PathCollection)
    ]
    assert dashed == [[(0.0, False)], [(0.0, True)], [(0.0, True)]]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (fitted().query("step > 1"), "no row of step 0 or 1, the lowest step is 2"),
        (fitted(table="Table 9"), "no row with table Table 1, Table 2"),
        (fitted(met="maybe"), "met 'maybe'; expected True, False or nothing"),
    ],
)
def test_a_table_of_the_bigram_model_that_cannot_be_drawn(frame, message, table, tmp_path):
    with pytest.raises(TableError, match=message):
        make("theory/bigram", [table(frame)], tmp_path)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda rows: rows[rows["quantity"] == "G"], "no theta of the head"),
        (lambda rows: rows[rows["width"] == math.inf], "no theta of the head at a finite width"),
    ],
)
def test_tables_that_lack_what_a_figure_shows_are_refused(keep, message, table, tmp_path):
    with pytest.raises(TableError, match=message):
        shares.read([table(keep(entries()))])
