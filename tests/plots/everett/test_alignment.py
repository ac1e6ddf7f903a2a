"""Figures 1 and 5 to 7: where alignment starts and peaks."""

import numpy as np
import pandas as pd
import pytest

from plots.everett import alignment
from tests.plots.everett.constructed import probes
from tests.plots.made import lines, written


def at_paper(ratio, width=128):
    """The ratio that the same factor of alignment has at D = 4,096."""
    return 1 + (ratio - 1) * np.log(width) / np.log(4096)


def said(folder, table):
    """The findings of a table in a file, by name."""
    return lines(alignment.findings(alignment.read(written(folder, probes=table))))


def test_alignment_starts_and_peaks_are_those_of_the_probes(tmp_path):
    found = said(tmp_path, probes(seeds=(0, 1, 2)))
    top = "adam, muP: readout's peak minus the highest of other layers"
    assert found["adam, muP: first value, all layers"].measured.startswith("0.500")
    peak = found["adam, muP: peak of the readout"]
    assert "[0.960 at D = 128, step 20]" in peak.measured  # 0.95, and 0.01 with every seed
    assert peak.estimate.value == pytest.approx(at_paper(0.96))
    assert (peak.published, peak.verdict) == ("> 0.9", "agrees")
    assert found["adam, standard: peak of the readout"].verdict == "disagrees: above"
    assert found["sgd, muP: peak of the readout"].published == "low amounts"
    assert found[top].verdict == "agrees" and "next MLP up" in found[top].measured
    mlp = found["adafactor, NTK: highest peak of MLP layers"]
    assert "[0.760 at D = 128" in mlp.measured and mlp.published == "<= 0.8"
    one = said(tmp_path, probes(seeds=(0,)))
    for name in (
        "adam, muP: peak of the readout",
        "adafactor, NTK: highest peak of MLP layers",
        top,
    ):
        assert one[name].verdict in ("undecided (n = 1)", "agrees in sign, error unknown")
    high = said(tmp_path, probes(readout=0.3, mlp=0.95, seeds=(0, 1, 2), widths=(1024,)))
    assert high["adam, standard: peak of the readout"].verdict == "disagrees: below"
    assert high[top].verdict == "disagrees"
    assert high["adam, standard: highest peak of MLP layers"].verdict == "disagrees: above"


def test_one_factor_of_alignment_is_one_number_at_every_width(tmp_path):
    """f = 1/2 in the readout at both widths, so A = 1 - log 2 / log D."""
    table = probes(seeds=(0, 1, 2))
    there = (table.layer == "readout") & (table.step == 20)
    factor = 1 - np.log(2) / np.log(table["model.width"])
    found = said(tmp_path, table.assign(alignment=table.alignment.mask(there, factor)))
    gap = found["adam, standard: readout's peak from D = 64 to 128"]
    assert gap.estimate.value == pytest.approx(0, abs=1e-12)
    peak = found["adam, standard: peak of the readout"].estimate
    assert [one.value for one in peak.by_size.values()] == pytest.approx(
        [1 - np.log(2) / np.log(4096)] * 2
    )


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
    height, step = alignment.peak(rows, "alignment")
    assert abs(height.value - 0.7) < 2 * 0.025 and height.groups == 4
    assert step == draws.mean(0).argmax()
