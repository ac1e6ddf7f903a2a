"""Figures 2 and 3: what interventions gain at every size."""

import pandas as pd
import pytest

from plots.everett import loss_vs_size
from tests.plots.everett.constructed import SHIFTS, interventions
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


def shifted(optimizer, shift):
    """A table whose muP lies `shift` above the other parameterisations."""
    rows = interventions(optimizer, rules=("standard", "ntk", "mean_field"))
    shifts = {curve: value + shift for curve, value in SHIFTS.items()}
    return pd.concat([rows, interventions(optimizer, shifts, ("mup",))])


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.1, "agrees"), (-0.1, "disagrees"), (0.01, "within noise")]
)
def test_what_mup_loses_against_standard_is_claimed_of_adam_alone(shift, verdict):
    data = {name: shifted(name, shift) for name in ("adam", "sgd")}
    found = lines(loss_vs_size.findings(data))
    adam, sgd = (found[f"{name}, muP - standard: full_constants"] for name in data)
    assert adam.measured.startswith(f"{shift:+.3f} ± 0.014 at D = 256")
    assert (adam.published, adam.verdict) == ("gains", verdict)
    assert (sgd.measured, sgd.published, sgd.verdict) == (adam.measured, "no claim", "")


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


@pytest.mark.parametrize(
    ("shift", "measured", "verdict"),
    [
        (-0.1, "-0.100 ± 0.014 at D = 256 (next: adam, standard, full_constants)", "agrees"),
        (0.1, "+0.100 ± 0.014", "disagrees"),
        (-0.02, "-0.020 ± 0.014", "within noise"),
        (0.02, "+0.020 ± 0.014", "within noise"),
    ],
)
def test_the_papers_best_setting_is_compared_with_the_best_other_one(shift, measured, verdict):
    best = interventions("adam_param_scaling", {"none_constants": shift}, ("ntk",))
    found = best_of([interventions(), interventions("sgd"), best])
    name = "lowest loss of all: adam_param_scaling, ntk, none_constants - next best"
    assert found.name == name and found.measured.startswith(measured)
    assert (found.published, found.verdict) == ("lowest", verdict)
    # Without SGD it is not the best of all, and the paper says nothing.
    two = best_of([interventions(), best])
    assert two.name.startswith("lowest loss of adam, adam_param_scaling: ")
    assert (two.measured, two.published, two.verdict) == (found.measured, "no claim", "")
    gone = best_of([interventions()])
    assert gone.measured == best_of([best]).measured == "not measured at D = 256"
    assert best_of([best[:0]]).measured == "not measured at D = 0"


def test_the_title_says_which_optimiser_is_shown():
    ((_, figure, tables),) = loss_vs_size.draw({"figure_3_sgd": interventions("sgd")})
    assert figure.get_suptitle() == "SGD, loss against size by intervention" and tables == [0]
