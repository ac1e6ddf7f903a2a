"""Figures 4 and 8: losses over epsilon, and what its cures gain."""

import math

import pytest

from plots.everett import epsilon
from tests.plots.everett.constructed import heat, mitigations
from tests.plots.made import lines


def test_heat_maps_are_losses_above_the_best_of_a_width():
    grid = epsilon.heat_map(heat(lost=-12), "constant", "mup")
    assert list(grid.index) == [64, 128] and grid.shape == (2, 7)
    assert grid.loc[64, 1e-9] == 0 and grid.loc[64, 1e-6] == pytest.approx(0.3)
    assert grid.loc[128, 1e-12] == math.inf
    finding = epsilon._of_heat(heat())[0]
    assert "1e-12: +0.300, 1e-06: +0.300 at D = 128" in finding.measured
    assert finding.verdict == "best: 1e-09 at 64, 1e-09 at 128"


def test_what_a_cure_gains_with_every_doubling_of_the_width_is_a_line_through_all_of_them():
    table = mitigations(growth=0.25, widths=(32, 64, 128))
    found = lines(epsilon._of_mitigations(table))
    grows = found["mean-field: small over enlarged, per doubling of D"]
    # 0.6 / 4 nats; the error of the first and last gain, 0.0141 each, over the two octaves.
    assert (grows.measured, grows.published) == ("+0.150 ± 0.010", "grows")
    assert grows.verdict == "agrees"
    none = found["muP: small over enlarged, per doubling of D"]
    assert (none.measured, none.verdict) == ("+0.000 ± 0.010", "agrees")
    single = lines(epsilon._of_mitigations(mitigations(widths=(32,))))
    assert single["NTK: small over enlarged, per doubling of D"].verdict == "not measured"
