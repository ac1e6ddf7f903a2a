"""Figures 2 and 3: what interventions gain at every size."""

import pytest

from plots.everett import loss_vs_size
from tests.plots.everett.constructed import interventions
from tests.plots.made import lines


def test_interventions_are_compared_with_the_papers_claims():
    found = lines(loss_vs_size.findings({"": interventions()}))
    # And muP against standard, tuned against one rate, four exponents, the lowest loss of all.
    assert len(found) == 12 + 2 + 4 + 1
    tuned = found["adam, tuned muP against standard with one rate"]
    assert tuned.measured.startswith("+0.300 ± 0.014") and tuned.published == "gains"
    kept = found["adam, muP, full: exponent of D in the best rate"]
    assert kept.estimate.value == pytest.approx(-0.5) and kept.published == "0"
    helps = found["adam, standard: global -> full"]
    assert helps.measured.startswith("+0.100 ± 0.014 at D = 256 (+0.100 at 32)")
    assert (helps.published, helps.verdict) == ("gains", "agrees")
    assert found["adam, NTK: global -> full"].verdict == "disagrees"
    assert found["adam, standard: full_constants -> none_constants"].verdict == "agrees"
    assert found["adam, muP: full_constants -> none_constants"].verdict == "disagrees"


def test_constants_near_an_edge_of_their_search_decide_nothing():
    table = interventions()
    rule, curve = table["prescription.parameterization"], table["curve"]
    table.loc[(rule == "ntk") & curve.str.endswith("constants"), "constants"] = "near_edge"
    before, after = (lines(loss_vs_size.findings({"": one})) for one in (interventions(), table))
    changed = {name for name, one in after.items() if one.verdict != before[name].verdict}
    assert changed == {f"adam, NTK: {' -> '.join(step)}" for step in loss_vs_size.STEPS[1:]}
    assert {after[name].verdict for name in changed} == {"undecided: constants near an edge"}
    best = table.assign(**{"optimizer.name": "adam_param_scaling"})
    assert best_of([interventions("sgd"), interventions(), best]).verdict.startswith("undecided")


def best_of(tables):
    return loss_vs_size.best(list(map(loss_vs_size.lines, tables)))


def test_the_lowest_of_many_others_is_low_by_chance_too():
    """3.2 errors are beyond noise where the lower one is the lowest of two, and not of 32."""
    best = interventions("adam_param_scaling", {"none_constants": 0.045}, ("ntk",))
    many, few = (
        best_of([*(interventions(name, *more) for name in ("adam", "sgd")), best])
        for more in ((), ({"full_constants": 0.0}, ("standard",)))
    )
    assert many.measured == few.measured and many.measured.startswith("+0.045 ± 0.014")
    assert (many.verdict, few.verdict) == ("within noise", "disagrees")
