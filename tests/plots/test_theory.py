"""The figures of effective_theory, from constructed tables."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from matplotlib.collections import PathCollection

from plots.tables import TableError
from plots.theory import (
    bigram as bigram_exponents,
)
from plots.theory import (
    error as theory_error,
)
from plots.theory import (
    kernels as theory_kernels,
)
from plots.theory import (
    shares as theory_shares,
)
from plots.theory import (
    tables as theory_tables,
)

WIDTHS = (64, 128, 256, 512)
FIGURES = (theory_kernels, theory_error, theory_shares)


def kernels(correction: float = 2.0, power: float = 1.0, error: float = 1e-4) -> pd.DataFrame:
    """G of two blocks and a tangent kernel of three groups, off theory by correction / n^power."""
    rows = []
    for width in (*WIDTHS, math.inf):
        off = 1 + (correction * width**-power if math.isfinite(width) else 0.0)
        cells = [("G", "stem", "", 2.0), ("G", "head", "", 0.5), ("theta", "stem", "total", 2.0)]
        cells += [
            ("theta", "head", part, value)
            for part, value in (("total", 4.0), ("stem", 1.0), ("query", 2.0), ("readout", 1.0))
        ]
        for quantity, block, part, value in cells:
            rows.append({
                "stem": "vision", "width": width, "heads": 2, "networks": 100,
                "quantity": quantity, "block": block, "part": part, "entry": "diagonal",
                "predicted": value, "predicted_error": math.nan, "measured": value * off,
                "error": value * error,
            })
    return pd.DataFrame(rows)


def bigram(**changes) -> pd.DataFrame:
    cells = [
        ("Table 2", "1", "h_1", 0, "prediction", 0.0, 0.01, True, ""),
        ("Table 2", "2", "h_1", 0, "prediction", 0.0, 0.09, None, ""),
        ("alignment", "sp", "u_1", 1, "bound", 1.0, 0.5, True, "1/2 at first"),
        ("Table 1", "sp", "h_1", 1, "prediction", 0.0, 0.02, True, ""),
        ("Table 1", "sp", "h_1", 2, "prediction", 0.0, 0.03, False, "judged elsewhere"),
        ("Table 1", "sp", "h_1", 3, "prediction", 0.0, 0.30, True, ""),
        ("Table 3", "SP (Condition A.2)", "dh_4[y]", 1, "hypothetical", 0.0, 0.5, None, "violated"),
    ]
    columns = ["table", "row", "column", "step", "kind", "predicted", "measured", "met", "note"]
    return pd.DataFrame(cells, columns=columns).assign(error=0.01, z=None, moved=0.25, **changes)


@pytest.fixture
def table(tmp_path):
    def write(frame: pd.DataFrame):
        frame.to_csv(tmp_path / "table.csv", index=False)
        return tmp_path / "table.csv"

    return write


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_power_of_the_corrections_is_recovered(power):
    forward, tangent = theory_error.curves(kernels(power=power, error=1e-6), "vision")
    for curve in (forward["stem"], tangent["Q"]):
        fitted, error = theory_error.decay(curve)
        assert fitted == pytest.approx(power, abs=0.02) and error < 0.1


def test_corrections_within_the_noise_have_no_power():
    noisy = kernels(correction=1.0, error=0.01)
    assert theory_error.decay(theory_error.curves(noisy, "vision")[0]["stem"]) is None
    assert "no correction seen" in theory_error.findings(noisy)


def test_numbers_that_are_the_same_in_all_networks_are_no_curve():
    assert theory_error.curves(kernels(error=0.0), "vision") == ({}, {})


def test_shares_add_up_and_are_those_of_the_largest_width():
    shares = theory_shares.shares(kernels(), "vision")
    assert shares["predicted"].to_dict() == {"stem": 0.25, "query": 0.5, "readout": 0.25}
    assert shares["measured"].sum() == pytest.approx(1)


def test_distances_are_given_per_width():
    text = theory_kernels.findings(kernels())
    assert "n = 64: 3.12 %" in text and "n = inf: 0.00 %" in text


def test_findings_of_the_bigram_model_follow_the_verdicts_of_the_table(table):
    text = bigram_exponents.findings(bigram_exponents.read(table(bigram())))
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines if line[0] != " "][:4] == [
        "Table 1, steps 1 to 3", "Table 2, initialisation", "Table 3, step 1", "alignment, step 1",
    ]
    assert "Table 1, steps 1 to 3: 2 met, 1 missed, 0 not judged" in lines
    assert "    missed: sp, h_1, predicted 0: 0.03 ± 0.01  judged elsewhere" in lines
    unjudged = "1 not judged (1 of too few networks or too small widths)"
    assert f"Table 2, initialisation: 1 met, 0 missed, {unjudged}" in lines
    assert "Table 3, step 1: 0 met, 0 missed, 1 not judged (1 hypothetical)" in lines
    assert any("hypothetical: SP (Condition A.2), dh_4[y], predicted 0: 0.50" in s for s in lines)
    assert "alignment, step 1: 1 met (1 as upper bounds), 0 missed, 0 not judged" in lines
    assert "    last activations' change before step 3: SP 25.0%" in lines
    assert "not of independent trials" in text and "same networks up to the shift" in text


def drawn(table, monkeypatch):
    """The axes of the figure, as drawn."""
    kept = []
    monkeypatch.setattr(bigram_exponents.style, "save", lambda figure, *_: kept.append(figure))
    bigram_exponents.draw(bigram_exponents.read(table), table.parent)
    return kept[0]


def test_panels_of_the_bigram_model_say_what_and_when(table, monkeypatch):
    figure = drawn(table(bigram()), monkeypatch)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0].startswith("Table 1: RMS in training, steps 1 and 3")
    assert titles[1] == "Table 2: variance at initialisation"
    assert [title.split(":")[0] for title in titles[2:]] == ["Table 3", "alignment"]
    legend = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert "1/d" in legend[0] and legend[1] == "2: the same with RMSNorm"
    dashed = [
        [(offset[1], shape.get_linestyles()[0][1] is not None) for offset in shape.get_offsets()]
        for axis in figure.axes[1:3] for shape in axis.collections
        if isinstance(shape, PathCollection)
    ]
    assert dashed == [[(0.0, False)], [(0.0, True)], [(0.0, True)]]
    assert "predicted, not judged" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(("frame", "message"), [
    (bigram().query("step > 1"), "no row of step 0 or 1, the lowest step is 2"),
    (bigram(table="Table 9"), "no row with table Table 1, Table 2"),
    (bigram(kind="guess"), "kind 'guess'; expected prediction, bound, hypothetical"),
    (bigram(met="maybe"), "met 'maybe'; expected True, False or nothing"),
    *[(bigram().drop(columns=name), f"no column '{name}'") for name in ("kind", "met", "step")],
])
def test_a_table_of_the_bigram_model_that_cannot_be_drawn(frame, message, table, tmp_path):
    with pytest.raises(TableError, match=message):
        bigram_exponents.make([table(frame)], tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_figures_are_written(table, tmp_path):
    for module in FIGURES:
        _, paths = module.make([table(kernels())], tmp_path)
        assert [path.suffix for path in paths] == [".png", ".pdf"]
        assert all(path.stat().st_size > 4_000 for path in paths)
    _, paths = bigram_exponents.make([table(bigram())], tmp_path)
    assert all(path.stat().st_size > 4_000 for path in paths)


@pytest.mark.parametrize("module", FIGURES)
def test_a_table_without_a_column_is_refused_by_name(module, table, tmp_path):
    with pytest.raises(TableError, match="no column 'networks'"):
        module.make([table(kernels().drop(columns="networks"))], tmp_path)


@pytest.mark.parametrize(
    "keep, message",
    [
        (lambda rows: rows[rows["quantity"] == "G"], "no theta of the head"),
        (lambda rows: rows[rows["width"] == math.inf], "no theta of the head at a finite width"),
        (lambda rows: pd.concat([rows, rows]), "stands there twice"),
    ],
)
def test_tables_that_lack_what_a_figure_shows_are_refused(keep, message, table, tmp_path):
    with pytest.raises(TableError, match=message):
        theory_shares.make([table(keep(kernels()))], tmp_path)


def test_a_cell_that_is_no_number_is_refused(table):
    frame = kernels().astype({"measured": object})
    frame.loc[0, "measured"] = "much"
    with pytest.raises(TableError, match="'measured' has no number"):
        theory_tables.read_kernels(table(frame))


def test_a_table_that_is_not_there_says_what_makes_it(tmp_path, monkeypatch):
    from plots import tables

    monkeypatch.setattr(tables, "DATA", tmp_path)
    with pytest.raises(TableError, match="effective_theory.run --ship"):
        theory_tables.read_bigram(tmp_path / "effective_theory_bigram.csv")
