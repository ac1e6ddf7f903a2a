"""Figures 2 and 3: what interventions gain at every size."""

import pandas as pd
import pytest

from plots import rates
from plots.everett import loss_vs_size
from tests.plots.everett.constructed import SHIFTS, interventions, lines, sweep


def test_interventions_are_compared_with_the_papers_claims():
    found = lines(loss_vs_size.findings({"": interventions()}))
    assert len(found) == 12
    helps = found["adam, standard: global -> full"]
    assert helps.measured.startswith("+0.100 ± 0.014 at D = 256 (+0.100 at 32)")
    assert (helps.published, helps.verdict) == ("gains", "agrees")
    assert found["adam, NTK: global -> full"].verdict == "disagrees"
    assert found["adam, standard: full_constants -> none_constants"].verdict == "agrees"
    assert found["adam, muP: full_constants -> none_constants"].verdict == "disagrees"


def test_a_small_gain_is_noise_and_one_seed_has_none_to_compare_with():
    close = {**SHIFTS, "global": 0.21}
    name = "adam, standard: global -> full"
    found = lines(loss_vs_size.findings({"": interventions(shifts=close)}))
    assert found[name].verdict == "within noise"
    found = lines(loss_vs_size.findings({"": interventions(seeds=(0,))}))[name]
    assert "± ?" in found.measured and found.verdict == "agrees in sign, one seed"


def test_what_the_paper_does_not_say_is_no_verdict():
    found = lines(loss_vs_size.findings({"": interventions("adam_param_scaling")}))
    assert found["adam_param_scaling, muP: global -> full"].published == "no claim"
    assert found["adam_param_scaling, muP: full_constants -> none_constants"].verdict == "disagrees"


def test_the_lowest_loss_of_all_tables_stands_beside_the_papers_best():
    better = interventions("adam_param_scaling", {**SHIFTS, "none_constants": -0.5}, ("ntk",))
    text = loss_vs_size.best([interventions(), better])
    assert "adam_param_scaling, ntk, none_constants with 3.510" in text
    assert text.endswith("none_constants, has 3.510")


def test_the_floor_of_loss_against_size_is_found():
    # Loss 3 + 2 (D / 64)^-1/2 + 0.01 (mean over seeds) is a power -1/4 of D^2 parameters.
    sweeps = rates.rate_sweeps(pd.DataFrame(sweep("full", "mup", exponent=0.0)), 0.01)
    law = rates.loss_law(sweeps)
    assert law.floor == pytest.approx(3.01, abs=1e-3)
    assert law.exponent == pytest.approx(0.25, abs=1e-3)
    assert law.exponent_error > 1e-3 and "(n = 4 sizes)" in rates.law_text(law)
    three = rates.rate_sweeps(pd.DataFrame(sweep("full", "mup", widths=(32, 64, 128))))
    assert rates.loss_law(three) is None
