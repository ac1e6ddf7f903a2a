"""The quick start's figure: drawn from its table alone, the findings right on a constructed one."""

import pandas as pd
import pytest

from plots import tables
from plots.everett import quickstart
from plots.everett.quickstart import MUP, STANDARD, findings, read
from tests.plots.everett.constructed import sweep
from tests.plots.made import lines


def table(standard=-0.8, mup=0.1, **options):
    """A table whose best rates follow these powers of the width."""
    powers = {"powers": range(-12, -2), **options}
    rows = pd.DataFrame(
        [
            *sweep(STANDARD, "standard", exponent=standard, **powers),
            *sweep(MUP, "mup", exponent=mup, **powers),
        ]
    )
    return rows.assign(run=[f"run-{index}" for index in rows.index])


def value(finding):
    return float(finding.measured.split()[0])


def said(data, tuned=64, used=256, banded=True):
    return lines(findings(quickstart.Data(data, tuned, used, banded)))


NAME = "exponent of the optimal rate in width, "


def test_exponents_and_penalties_are_those_the_table_was_made_with():
    found = said(table())
    assert value(found[NAME + "standard"]) == pytest.approx(-0.8)
    assert value(found[NAME + "muP"]) == pytest.approx(0.1)
    assert value(found["muP minus standard"]) == pytest.approx(0.9)
    # At 256 the standard optimum is 2^-8.6; the best grid rate there is 2^-9, and that of 64 2^-7.
    penalty = 0.05 * (1.6**2 - 0.4**2)
    name = "loss at D=256 with the rate of D=64, "
    assert value(found[name + "standard"]) == pytest.approx(penalty, abs=1e-3)
    assert value(found[name + "muP"]) == pytest.approx(0, abs=1e-9)
    assert all(finding.verdict == "as expected" for finding in found.values())


def test_a_missed_band_is_printed_as_missed():
    found = said(table(standard=-0.1, mup=0.0))
    assert found[NAME + "standard"].verdict == "MISSED"
    assert found[NAME + "muP"].verdict == "as expected"


def test_widths_are_the_sweep_files_and_bands_hold_for_that_sweep_alone(tmp_path):
    """Those of transfer, 64 and 256, where the sweep is the quickstart; else the extreme ones."""
    whole = read([tables.shipped("everett/quickstart")])
    assert (whole.tuned, whole.used, whole.banded) == (64, 256, True)
    folder = tmp_path / "nanolm_c4" / "quickstart"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    table(widths=(32, 64, 128, 256)).assign(steps=150).to_csv(folder / "results.csv", index=False)
    own = read([folder / "results.csv"])
    assert (own.tuned, own.used, own.banded) == (64, 256, True)
    for changed in ({"widths": (32, 64, 96)}, {"steps": 300}):
        steps = changed.pop("steps", 150)
        table(**changed).assign(steps=steps).to_csv(tmp_path / "mine.csv", index=False)
        data = read([tmp_path / "mine.csv"])
        assert (data.tuned, data.used) == (32, changed.get("widths", (256,))[-1])
        found = lines(findings(data))
        assert f"loss at D={data.used} with the rate of D=32, muP" in found
        assert not data.banded and {one.verdict for one in found.values()} == {""}


def test_a_rate_that_was_not_run_there_is_no_finding():
    data = table()
    gone = (data["model.width"] == 256) & (data["optimizer.lr"] == 2.0**-7)
    finding = said(data[~gone])["loss at D=256 with the rate of D=64, standard"]
    assert finding.measured == finding.verdict == "not measured"
