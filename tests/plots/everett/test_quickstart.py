"""Figures: drawn from tables alone, the findings right on constructed data."""

import math
from pathlib import Path

import pandas as pd
import pytest

from plots import tables
from plots.__main__ import make
from plots.everett import quickstart
from plots.everett.quickstart import MUP, STANDARD, findings, read
from plots.findings import Finding

ROOT = Path(__file__).resolve().parents[3]


def table(standard=-0.8, mup=0.1, seeds=(0, 1), diverged_above=math.inf):
    """Losses that are parabolas in log2 lr whose optimum follows a power of width."""
    rows = []
    for curve, exponent in ((STANDARD, standard), (MUP, mup)):
        for width in (32, 64, 128, 256):
            for power in range(-12, -2):
                for seed in seeds:
                    optimum = -7 + exponent * math.log2(width / 64)
                    loss = 5 - width / 1000 + 0.05 * (power - optimum) ** 2 + 0.02 * seed
                    gone = 2.0**power > diverged_above
                    rows.append({
                        "curve": curve, "model.width": width, "optimizer.lr": 2.0**power,
                        "seed": seed, "status": "diverged" if gone else "finished",
                        "final_eval_loss": math.nan if gone else loss, "run": "x",
                    })
    return pd.DataFrame(rows)


def by_name(found):
    return {line.name: line for line in found[1:] if isinstance(line, Finding)}


def value(finding):
    return float(finding.measured.split()[0])


def test_exponents_and_penalties_are_those_the_table_was_made_with():
    found = by_name(findings(table()))
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
    found = by_name(findings(table(standard=-0.1, mup=0.0)))
    name = "exponent of the optimal rate in width, "
    assert found[name + "standard"].verdict == "MISSED"
    assert found[name + "muP"].verdict == "as expected"


def test_diverged_runs_are_losses_without_limit_and_seeds_are_averaged():
    losses = quickstart.sweeps(table(diverged_above=2**-5), STANDARD)[64].losses
    assert losses[2.0**-4] == math.inf
    assert losses[2.0**-7] == pytest.approx(5 - 0.064 + 0.01)


def test_a_rate_that_was_not_run_there_is_no_finding():
    data = table()
    gone = (data["model.width"] == 256) & (data["optimizer.lr"] == 2.0**-7)
    found = by_name(findings(data[~gone]))
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
    message = "no finished run of curve 'standard_global' at model.width 256; finish the sweep"
    assert message in refused("quickstart", tmp_path / "t.csv")


def test_the_readme_quotes_the_shipped_table():
    readme = (ROOT / "README.md").read_text()
    found = by_name(findings(read([tables.shipped("everett/quickstart")])))
    for curve in ("standard", "muP"):
        finding = found[f"exponent of the optimal rate in width, {curve}"]
        assert f"{value(finding):+.2f}".replace("-", "−") in readme
