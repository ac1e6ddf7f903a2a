"""Figures 1 and 5 to 7: where alignment starts and peaks."""

import pytest

from plots.everett import alignment
from tests.plots.everett.constructed import lines, probes, written


def test_alignment_starts_and_peaks_are_those_of_the_probes(tmp_path):
    usual, odd, close = written(
        tmp_path, usual=probes(), odd=probes(readout=0.6, mlp=0.9), close=probes(readout=0.76)
    )
    kind = "adam, muP: kind of layer with the highest peak"
    assert lines(alignment.findings(alignment.read([close])))[kind].verdict == "within noise"
    found = lines(alignment.findings(alignment.read([usual])))
    assert found["adam, muP: first value, all layers"].measured.startswith("0.500")
    peak = found["adam, muP: peak of the readout"]
    assert peak.measured == "0.955 ± 0.005 at step 20 (2 seeds)"
    assert (peak.published, peak.verdict) == ("> 0.9", "within noise")  # 12.7 errors of two seeds
    assert found["adam, standard: peak of the readout"].verdict == "disagrees: above"
    assert found["sgd, muP: peak of the readout"].published == "low amounts"
    assert found[kind].verdict == "agrees"
    mlp = found["adafactor, NTK: highest peak of MLP layers"]
    assert mlp.measured.startswith("0.755") and mlp.verdict == "within noise"
    one = alignment.read([usual]).query("seed == 0")
    assert lines(alignment.findings(one))["adam, muP: peak of the readout"].verdict == "agrees"
    high = lines(alignment.findings(alignment.read([odd])))
    assert high["adam, standard: peak of the readout"].verdict == "disagrees: below"
    assert high[kind].verdict == "disagrees"
    assert high["adam, standard: highest peak of MLP layers"].verdict == "disagrees: above"


def test_a_trace_is_the_mean_over_seeds_and_blocks_with_the_span_of_blocks():
    table = probes(widths=(64,), curves=("adam",))
    up = table.layer.str.endswith("mlp.up") & (table["prescription.parameterization"] == "mup")
    rows = alignment.trace(table[up])
    assert rows.loc[20].to_dict() == pytest.approx({"mean": 0.73, "min": 0.705, "max": 0.755})
