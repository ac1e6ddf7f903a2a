"""Slopes with their errors against closed forms, and the verdicts."""

import dataclasses
import math
import random

import pytest

from param_groups import Plan
from param_groups.check import figure, slopes
from param_groups.check.measuring import Coordinate, Measurement
from param_groups.check.slopes import (
    EXCEPTION,
    GROWS,
    NOT_FINITE,
    OK,
    UNCLEAR,
    UNKNOWN,
    VANISHES,
    fit,
    slope_of,
    summary,
    table,
    verdict,
)


def power_points(law, widths=(64, 128, 256, 512), seeds=3):
    """Points of law(width, seed)."""
    return [
        Coordinate("change", "x", "hidden", 1, w, s, law(w, s))
        for w in widths
        for s in range(seeds)
    ]


def test_a_power_law_is_fitted_exactly():
    slope_, error = slope_of(power_points(lambda w, s: 3 * w**-0.75))
    assert slope_ == pytest.approx(-0.75, abs=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


def test_what_a_seed_adds_at_every_size_is_no_error_of_the_slope():
    """One seed's batch is ten times another's: the levels differ, the slopes do not."""
    slope_, reach = slope_of(power_points(lambda w, s: w**-0.5 * 10.0**s))
    assert slope_ == pytest.approx(-0.5) and reach == pytest.approx(0, abs=1e-12)


def test_the_interval_is_that_of_the_slopes_of_single_seeds():
    """Slopes of 1/2 and +-d about it: the closed form of their mean, with (4 - 1)(3 - 1) degrees of
    freedom that also hold what is no line."""
    d = 0.3
    _, reach = slope_of(power_points(lambda w, s: w ** (0.5 + d * (s - 1))))
    assert reach == pytest.approx(2.447 * math.sqrt(2 * d**2 / 6 / 3), rel=1e-9)


def test_one_seed_has_the_scatter_about_its_line_alone():
    bent = lambda w, s: 2 ** (0.1 * (math.log2(w) - 7.5) ** 2)
    scatter = math.sqrt(4 * 0.1**2 / 2 / 5)  # of residuals 0.1 (+1, -1, -1, +1) about the line
    assert slope_of(power_points(bent, seeds=1))[1] == pytest.approx(4.303 * scatter)


def test_a_bend_that_all_seeds_share_is_in_the_interval_however_many_there_are():
    bent = lambda w, s: 2 ** (0.2 * (math.log2(w) - 7.5) ** 2 + 1e-3 * (s - 1) * (w % 3))
    few, many = (slope_of(power_points(bent, seeds=n))[1] for n in (3, 30))
    assert many == pytest.approx(few, rel=0.01) and few > 0.15


def noisy(draw, seeds, noise, power=0.0):
    law = {(w, s): w**power * 2 ** draw.gauss(0, noise) for w in (64, 128, 256) for s in seeds}
    return power_points(lambda w, s: law[w, s], (64, 128, 256), len(seeds))


def test_noise_alone_makes_no_bend_and_its_interval_holds_the_truth_as_often_as_it_says():
    draw, held, wide, n = random.Random(0), 0, 0, 1000
    for _ in range(n):
        slope_, reach = slope_of(noisy(draw, range(12), 1.0))
        held += abs(slope_) <= reach
        wide += reach > 0.8  # twice the usual one: taken for a bend
    assert 0.93 < held / n < 0.97 and wide < 5


@pytest.mark.parametrize("noise", [0.2, 0.5, 1.0, 2.0])
def test_however_large_the_noise_a_power_that_is_half_off_hardly_ever_passes(noise):
    """And a right one is never said to grow or to vanish, by more than chance."""
    draw, passed, wrong, n = random.Random(1), 0, 0, 1000
    for _ in range(n):
        word = verdict(*slope_of(noisy(draw, range(3), noise, 0.5)), 0, 0)
        passed += word == OK
        word = verdict(*slope_of(noisy(draw, range(3), noise)), 0, 0)
        wrong += word in (GROWS, VANISHES)
    assert passed < 0.04 * n and wrong < 0.04 * n


VERDICTS = {  # of a slope, its reach, what is aimed at and what is predicted
    OK: [(0.05, 0.04, 0, 0), (0.1, 0.04, 0, 0.5), (-0.5, 0.04, -0.5, -0.5), (0.05, 0.4, 0, 0)],
    GROWS: [(0.4, 0.04, 0, 0), (1.0, 0.04, 0, 0.5), (0.9, 0.4, 0, 0)],
    VANISHES: [(-0.4, 0.04, 0, 0), (-0.5, 0.04, 0, 0.5)],
    EXCEPTION: [(0.45, 0.04, 0, 0.5), (0.3, 0.4, 0, 0.5)],
    UNCLEAR: [(0.05, 0.5, 0, 0), (0.2, 0.4, 0, 0), (-0.2, 0.4, 0, 0), (0.3, 0.1, 0, 0)],
    UNKNOWN: [(3.0, 0.01, None, None)],
}


@pytest.mark.parametrize("word", VERDICTS)
def test_verdicts(word):
    assert {verdict(*case) for case in VERDICTS[word]} == {word}
    assert verdict(0.3, 0.6, 0, 0.5) == UNCLEAR


def test_the_plain_size_of_logits_is_judged_from_above_only():
    assert verdict(-0.4, 0.04, 0, 0, one_sided=True) == UNKNOWN
    assert verdict(0.4, 0.04, 0, 0, one_sided=True) == GROWS
    assert verdict(0.4, 0.04, 0, 0.5, one_sided=True) == EXCEPTION
    assert verdict(0.1, 0.6, 0, 0.5, one_sided=True) == OK
    assert verdict(0.3, 0.04, -0.5, -0.5, one_sided=True) == GROWS
    assert verdict(0.1, 0.5, 0, 0, one_sided=True) == UNCLEAR


def test_values_without_a_logarithm_get_a_word_instead_of_a_slope():
    plans = {width: Plan((), {"name": "mine"}, 0.1, 1e-8, 0.0, "global") for width in (64, 128)}
    for value, word in ((0.0, UNKNOWN), (math.nan, NOT_FINITE), (math.inf, NOT_FINITE)):
        measured = Measurement(
            power_points(lambda w, s, value=value: value if s or not value else 1.0), plans
        )
        (found,) = fit(measured)
        assert (found.slope, found.verdict) == (None, word)
        table([found])


def test_zeros_among_other_values_are_no_verdict_to_pass_by():
    plans = {width: Plan((), {"name": "mine"}, 0.1, 1e-8, 0.0, "global") for width in (64, 128)}
    lost = power_points(lambda w, s: 0.0 if (w, s) == (512, 2) else float(w))
    (found,) = fit(Measurement(lost, plans))
    assert (found.verdict, found.note) == (UNCLEAR, "zero at width 512, seed 2")
    still = fit(Measurement(power_points(lambda w, s: 0.0), plans))
    assert slopes.failed([found]) and slopes.failed(still)
    assert summary(still) == "FAILED: 1 -; no step has changed anything"


def test_the_most_severe_verdict_stands_for_several():
    assert slopes.worst([OK, UNCLEAR, GROWS, UNKNOWN]) == GROWS


def test_what_is_drawn_are_geometric_means_and_what_is_printed_has_a_sign():
    law = lambda w, s: {0: 4.0, 1: 0.25, 2: math.nan}[s] / w
    points = [*power_points(law), Coordinate("update", "x", "tensor", 1, 64, 0, 9.0)]
    means = figure._means([*points, Coordinate("init", "y", "hidden", 0, 64, 0, 1.0)], "x")
    assert means == {("change", 1): {w: pytest.approx(1 / w) for w in (64, 128, 256, 512)}}
    words = {None: "-", 0.5: "+0.5", -1.0: "-1", 1e-9: "0", -1e-9: "0", 2e-6: "+2e-06"}
    assert {value: slopes._number(value) for value in words} == words


def slope(quantity, name, step, slope, aim, predicted, word=OK):
    return slopes.Slope(quantity, name, "hidden", step, slope, 0.01, aim, predicted, word)


BLOCKS = [
    slope("init", "blocks.0.up", 0, 0.0, 0.0, 0.0),
    slope("change", "blocks.0.up", 1, 0.25, 0.5, -0.5),
    slope("change", "blocks.0.up", 2, 0.5, 0.5, -0.5),
    slope("init", "blocks.1.up", 0, 0.01, 0.0, 0.0),
    slope("change", "blocks.1.up", 1, 2.0, 0.5, -0.5, GROWS),
    slope("change", "blocks.1.up", 2, 0.5, 0.5, None),
    slope("change", "blocks.2.up", 1, 0.5, 0.5, -0.5),
    slope("update", "blocks.1.up.weight", 1, -1.0, -1.0, -1.0),
]


def test_an_input_has_a_line_where_it_is_bad_alone():
    right, wrong = (
        slope("init", f"{n} input", 0, 0.0, 0.0, 0.0, w) for n, w in (("a", OK), ("b", GROWS))
    )
    moved = slope("change", "a", 1, 0.0, 0.0, 0.0)
    assert "a input" not in table([moved, right]) and "b input" in table([moved, right, wrong])
    assert summary([moved, right]) == "passed: 1 ok"


def test_more_seeds_are_measured_where_noise_alone_leaves_a_verdict_open():
    """Up to four times as many; none where another verdict is bad, as more would not help."""
    plans = {n: Plan((), {"optimizer": "adam"}, 0.1, 1e-8, 0.0, "global") for n in (64, 128)}

    def run(law):
        asked = []

        def measured(seeds):
            asked.extend(seeds)
            points = power_points(law, seeds=1)
            of_seed = lambda p, s: dataclasses.replace(p, seed=s, rms=law(p.width, s))
            return Measurement([of_seed(p, s) for s in seeds for p in points], plans)

        _, found, seeds = slopes.decided(measured, 3)
        return found[0].verdict, seeds, asked

    settles = lambda w, s: (w / 64) ** (0.8 * (s - 1) * (s < 3))
    assert run(settles)[0] == OK and run(settles)[1] in (6, 12)
    assert run(lambda w, s: (w / 64) ** (2 * (-1) ** s))[1:] == (12, [*range(12)])
    assert run(lambda w, s: float(w))[1:] == (3, [0, 1, 2])


def test_a_table_has_a_line_per_kind_of_block_with_aims_beside_what_is_measured():
    modules, tensors = table(BLOCKS).split("\n\n")
    head, line = modules.splitlines()
    words = "module init aim gradient aim change, step 1 step 2 aim predicted verdict"
    assert head.split() == words.split()
    cells = "blocks.*.up +0.01 ± 0.01 0 +2.00 ± 0.01 +0.50 ± 0.01 +0.5 -0.5 grows"
    assert line.split() == cells.split()
    assert tensors.splitlines()[1].split() == "blocks.*.up.weight -1.00 ± 0.01 -1 ok".split()


def test_a_figure_has_a_panel_for_the_worst_block_and_a_dashed_line_for_what_theory_predicts(
    tmp_path, monkeypatch
):
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    points = [
        Coordinate(quantity, f"blocks.{block}.up", "hidden", step, size, 0, 1.0 * size**block)
        for block in (0, 1)
        for quantity, step in (("init", 0), ("change", 1), ("change", 2))
        for size in (64, 128, 256)
    ]
    result = {"slopes": [vars(one) for one in BLOCKS], "name": "toy", "prescription": {}}
    figure.draw(points, result, tmp_path / "check.png")
    (axis,) = [axis for axis in drawn[0].axes if axis.get_visible()]
    assert axis.get_title() == "blocks.1.up\ngrows" and axis.get_ylabel() == "RMS"
    solid = [line for line in axis.lines if line.get_linestyle() == "-"]
    labels = ["at initialisation", "change, step 1", "change, step 2"]
    assert [line.get_label() for line in solid] == labels
    dashed = [list(line.get_ydata()) for line in axis.lines if line.get_linestyle() == "--"]
    laws = [[64.0 * (size / 64) ** power for size in (64, 128, 256)] for power in (0.0, -0.5)]
    assert dashed == [pytest.approx(law) for law in laws]  # step 2 has no prediction
