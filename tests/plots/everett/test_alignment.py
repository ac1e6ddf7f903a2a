"""Figures 1 and 5 to 7: where alignment starts and peaks."""

import numpy as np
import pandas as pd
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
    one = lines(alignment.findings(alignment.read([usual]).query("seed == 0")))
    mlp = "adafactor, NTK: highest peak of MLP layers"
    for name in ("adam, muP: peak of the readout", mlp, kind):
        assert one[name].verdict == "undecided (n = 1)"
    high = lines(alignment.findings(alignment.read([odd])))
    assert high["adam, standard: peak of the readout"].verdict == "disagrees: below"
    assert high[kind].verdict == "disagrees"
    assert high["adam, standard: highest peak of MLP layers"].verdict == "disagrees: above"


def test_noise_does_not_count_as_height():
    """Alignment that stays at 0.7: the highest of 200 means over four seeds is 0.76, by chance."""
    draws = np.random.default_rng(0).normal(0.7, 0.05, (4, 200))
    rows = pd.DataFrame(
        [
            {"seed": seed, "step": step, "layer": "readout", "alignment": value}
            for seed, own in enumerate(draws)
            for step, value in enumerate(own)
        ]
    )
    assert draws.mean(0).max() > 0.755
    height, text = alignment.peak(rows)
    assert abs(height.value - 0.7) < 2 * 0.025 and height.groups == 4
    assert f"at step {draws.mean(0).argmax()}" in text


def said(folder, table):
    """The findings of a table in a file, by name."""
    return lines(alignment.findings(alignment.read(written(folder, probes=table))))


def moved(table, change):
    """The readout's peak at the larger width moved by `change`."""
    there = (table.layer == "readout") & (table["model.width"] == 128) & (table.step == 20)
    return table.assign(alignment=table.alignment + change * there)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (0.2, "disagrees: above"),
        (-0.2, "disagrees: below"),
        (0.0, "agrees"),
        (0.06, "within noise"),
    ],
)
def test_peaks_of_every_width_are_judged_and_what_the_width_changes(tmp_path, change, verdict):
    three = probes(seeds=(0, 1, 2))  # a peak's standard error is 0.00577, Student's reach 4.3
    found = said(tmp_path, moved(three, change))
    name = "adam, standard: peak of the readout"
    assert found[f"{name}, D = 64"].measured == "0.960 ± 0.006 at step 20 (3 seeds)"
    assert found[name].measured.startswith(f"{0.96 + change:.3f}")  # of the largest width
    assert f"{name}, D = 128" not in found
    small = found["adafactor, mean-field: highest peak of MLP layers, D = 64"]
    assert small.measured.startswith("0.760") and small.published == "<= 0.8"
    gap = found["adam, standard: readout's peak from D = 64 to 128"]
    assert gap.measured == f"{change:+.3f} ± 0.008 (3 seeds)"
    assert (gap.published, gap.verdict) == ("-0.05 to 0.05", verdict)
    single = said(tmp_path, moved(probes(seeds=(0,)), change))
    assert single["adam, muP: readout's peak from D = 64 to 128"].verdict == "undecided (n = 1)"


def test_a_single_width_has_no_other_to_compare_with(tmp_path):
    found = said(tmp_path, probes(widths=(64,)))
    assert not [name for name in found if "D = " in name]
    assert found["adam, muP: peak of the readout"].measured.startswith("0.955")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (-0.2, "agrees"),
        (0.2, "disagrees"),
        (0.0, "within noise"),
    ],
)
def test_sgds_peaks_are_compared_where_the_paper_has_words_only(tmp_path, change, verdict):
    table = probes(seeds=(0, 1, 2), curves=("sgd", "adam"))
    there = (table["prescription.parameterization"] == "mean_field") & (table.step == 20)
    table.loc[there & (table.layer == "readout"), "alignment"] += change
    found = said(tmp_path, table)
    for other in ("standard", "muP"):
        gap = found[f"sgd, mean-field - {other}: peak of the readout"]
        assert gap.measured == f"{change:+.3f} ± 0.008 (3 seeds)"
        assert (gap.published, gap.verdict) == ("below 0", verdict)
    assert found["sgd, NTK - muP: peak of the readout"].verdict == "within noise"
    assert not [name for name in found if name.startswith("adam, ") and " - " in name]


def test_a_trace_is_the_mean_over_seeds_and_blocks_with_the_span_of_blocks():
    table = probes(widths=(64,), curves=("adam",))
    up = table.layer.str.endswith("mlp.up") & (table["prescription.parameterization"] == "mup")
    rows = alignment.trace(table[up])
    assert rows.loc[20].to_dict() == pytest.approx({"mean": 0.73, "min": 0.705, "max": 0.755})
