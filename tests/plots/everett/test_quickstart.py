"""The quick start's figure: drawn from its table alone, the findings right on a constructed one."""

import math
from pathlib import Path

import pandas as pd
import pytest

from plots import tables
from plots.__main__ import make
from plots.everett import quickstart
from plots.everett.quickstart import MUP, STANDARD, findings, read
from tests.plots.everett.constructed import lines, sweep

ROOT = Path(__file__).resolve().parents[3]


def table(standard=-0.8, mup=0.1, **options):
    """A table whose best rates follow these powers of the width."""
    powers = {"powers": range(-12, -2), **options}
    return pd.DataFrame(
        [
            *sweep(STANDARD, "standard", exponent=standard, **powers),
            *sweep(MUP, "mup", exponent=mup, **powers),
        ]
    )


def value(finding):
    return float(finding.measured.split()[0])


def test_exponents_and_penalties_are_those_the_table_was_made_with():
    found = lines(findings(table()))
    name = "exponent of the optimal rate in width, "
    assert value(found[name + "standard"]) == pytest.approx(-0.8)
    assert value(found[name + "muP"]) == pytest.approx(0.1)
    assert value(found["muP minus standard"]) == pytest.approx(0.9)
    # At 256 the standard optimum is 2^-8.6; the best grid rate there is 2^-9, and that of 64 2^-7.
    penalty = 0.05 * (1.6**2 - 0.4**2)
    name = "loss at D=256 with the rate of D=64, "
    assert value(found[name + "standard"]) == pytest.approx(penalty, abs=1e-3)
    assert value(found[name + "muP"]) == pytest.approx(0, abs=1e-9)
    assert all(finding.verdict == "as expected" for finding in found.values())


def test_a_missed_band_is_printed_as_missed():
    found = lines(findings(table(standard=-0.1, mup=0.0)))
    name = "exponent of the optimal rate in width, "
    assert found[name + "standard"].verdict == "MISSED"
    assert found[name + "muP"].verdict == "as expected"


def test_diverged_runs_are_losses_without_limit_and_seeds_are_averaged():
    losses = quickstart.sweeps(table(diverged_above=2**-5), STANDARD)[64].losses
    assert losses[2.0**-4] == math.inf
    assert losses[2.0**-7] == pytest.approx(3 + 2 + 0.01)


def test_a_rate_that_was_not_run_there_is_no_finding():
    data = table()
    gone = (data["model.width"] == 256) & (data["optimizer.lr"] == 2.0**-7)
    found = lines(findings(data[~gone]))
    finding = found["loss at D=256 with the rate of D=64, standard"]
    assert finding.measured.startswith("+nan") and finding.verdict == "MISSED"


def test_the_spread_over_seeds_is_a_pooled_standard_deviation():
    spread, n = quickstart.seed_spread(table(), MUP)
    assert spread == pytest.approx(0.02 / math.sqrt(2)) and n == 40


def test_curves_with_divergence_and_one_seed_can_be_drawn(tmp_path):
    table(seeds=(0,), diverged_above=2**-6).to_csv(tmp_path / "t.csv", index=False)
    _, files = make("everett/quickstart", [tmp_path / "t.csv"], tmp_path / "out")
    assert [file.name for file in files] == ["quickstart.png", "quickstart.pdf"]


def test_a_sweep_without_one_of_the_two_widths_is_one_line(tmp_path, refused):
    rows = table()
    rows[rows["model.width"] != 256].to_csv(tmp_path / "t.csv", index=False)
    said = refused("quickstart", tmp_path / "t.csv")
    assert "no finished run of curve 'standard_global' at model.width 256; finish the" in said
    assert "sweep, with no --where that leaves out 64 or 256" in said


def test_the_readme_quotes_the_shipped_table():
    readme = (ROOT / "README.md").read_text()
    found = lines(findings(read([tables.shipped("everett/quickstart")])))
    for curve in ("standard", "muP"):
        finding = found[f"exponent of the optimal rate in width, {curve}"]
        assert f"{value(finding):+.2f}".replace("-", "−") in readme
