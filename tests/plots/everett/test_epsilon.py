"""Figures 4 and 8: losses over epsilon, and what its cures gain."""

import math

import pytest

from plots.everett import epsilon
from plots.tables import TableError
from tests.plots.everett.constructed import heat, lines, mitigations, written


def test_heat_maps_are_losses_above_the_best_of_a_width():
    grid = epsilon.heat_map(heat(lost=-12), "constant", "mup")
    assert list(grid.index) == [64, 128] and grid.shape == (2, 7)
    assert grid.loc[64, 1e-9] == 0 and grid.loc[64, 1e-6] == pytest.approx(0.3)
    assert grid.loc[128, 1e-12] == math.inf
    finding = epsilon.heat_findings(heat())[0]
    assert "1e-12: +0.300, 1e-06: +0.300 at D = 128" in finding.measured
    assert finding.verdict == "best: 1e-09 at 64, 1e-09 at 128"


def test_mitigations_are_measured_against_the_enlarged_epsilon():
    found = lines(epsilon.mitigation_findings(mitigations()))
    gain = found["mean-field: gain of atan2 over enlarged"]
    assert gain.measured.startswith("+0.600 ± 0.014 at D = 64") and gain.verdict == "agrees"
    assert found["standard: gain of small over enlarged"].verdict == "agrees"  # none, as claimed
    assert found["standard - NTK: small"].verdict == "agrees"
    worse = lines(epsilon.mitigation_findings(mitigations(gains=(0.5, 0.0, 0.0, 0.0))))
    assert worse["standard: gain of small over enlarged"].verdict == "disagrees"
    assert worse["NTK: gain of small over enlarged"].verdict == "within noise"


def test_what_a_cure_gains_with_every_doubling_of_the_width_is_a_line_through_all_of_them():
    table = mitigations(growth=0.25, widths=(32, 64, 128))
    found = lines(epsilon.mitigation_findings(table))
    grows = found["mean-field: small over enlarged, per doubling of D"]
    # 0.6 / 4 nats; the error of the first and last gain, 0.0141 each, over the two octaves.
    assert (grows.measured, grows.published) == ("+0.150 ± 0.010", "grows")
    assert grows.verdict == "agrees"
    none = found["muP: small over enlarged, per doubling of D"]
    assert (none.measured, none.verdict) == ("+0.000 ± 0.010", "agrees")
    single = lines(epsilon.mitigation_findings(mitigations(widths=(32,))))
    assert single["NTK: small over enlarged, per doubling of D"].verdict == "not measured"


@pytest.mark.parametrize(
    ("data", "titles"),
    [
        (
            (heat(), mitigations()),
            [
                "Adam, loss over ε, loss against size with cures of a too large ε",
                "Adam, loss against size with cures of a too large ε",
            ],
        ),
        ((heat(), None), ["Adam, loss over ε"]),
    ],
)
def test_titles_say_what_is_shown(data, titles):
    shown = [figure.get_suptitle() for _, figure in epsilon.draw(data)]
    assert [title.partition("\n")[0] for title in shown] == titles


def test_an_enlarged_epsilon_is_named_with_its_value(tmp_path):
    assert epsilon.caption(mitigations()) == (
        "baseline: ε enlarged to 0.0001, because gradients sink to the usual 1e-9 only at widths "
        "that were not run"
    )
    assert epsilon.caption(mitigations("default")) == "baseline: the default ε"
    for curve, words in (
        ("enlarged", "ε enlarged to 0.0001 (paper: 1e-9)"),
        ("default", "default ε"),
    ):
        shown = dict(epsilon.draw((heat(), mitigations(curve))))["figure_4_epsilon"]
        titles = [axis.get_title() for axis in shown.axes]
        assert f"(d) all: solid {words}, dashed per-layer ε" in titles
    paths = written(tmp_path, results=mitigations().drop(columns="optimizer.eps"))
    with pytest.raises(TableError, match="'enlarged' needs one value in column optimizer.eps"):
        epsilon.read(paths)
