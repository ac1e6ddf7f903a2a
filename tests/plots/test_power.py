"""The page of claims: its verdicts are those of the shipped tables; rules that give them."""

import json
import math

import pytest
import yaml

from plots import power
from plots.findings import Estimate, Finding

EFFECT = {"effect": 0.28}


def test_the_page_has_the_verdicts_of_the_shipped_tables():
    rows = [line.split(" | ") for line in power.PAGE.read_text(encoding="utf-8").splitlines()]
    written = {(row[0].removeprefix("| "), row[1]): row[2:4] for row in rows if len(row) == 6}
    for claim in (one for ones in power.claims().values() for one in ones):
        word, split = written.pop((claim.said["claim"], claim.said["where"]))
        counts = [
            sum(one.word == known for one in claim.found)
            for known in (power.AGREES, power.UNDECIDED, power.DISAGREES)
        ]
        silent = {"out", "untested"} & claim.said.keys()
        assert split == ("" if silent else " / ".join(map(str, counts))), claim.said
        # What is undecided may be out of reach for its cost, which the planner knows.
        assert word == claim.word or (claim.word, word) == (power.UNDECIDED, power.OUT)
    assert set(written) <= {("claim", "where"), ("---", "---")}


@pytest.mark.parametrize(
    ("measured", "published", "word", "said", "count", "expected"),
    [
        ("+0.30 ± 0.10", "gains", "agrees", {}, 1, "agrees"),
        ("+0.10 ± 0.10", "gains", "within noise", {}, 1, "undecided"),
        ("+0.69 (1 seed)", "> 0.5", "agrees", {}, 1, "undecided"),
        ("+0.30 ± ?", "gains", "agrees in sign, one seed", {}, 1, "undecided"),
        ("-0.30 ± ?", "gains", "disagrees in sign, one seed", {}, 1, "undecided"),
        ("+0.30 ± ?", "0", "off by +0.30, error unknown", {}, 2, "undecided"),
        # An equality holds where a difference would have been seen, and not where errors are large.
        (
            "-1.00 ± 0.09",
            "-1",
            "agrees within 2 SE",
            {"judge": "equal", "effect": 0.28},
            1,
            "agrees",
        ),
        (
            "-1.00 ± 0.30",
            "-1",
            "agrees within 2 SE",
            {"judge": "equal", "effect": 0.28},
            1,
            "undecided",
        ),
        (
            "-1.00 ± 0.09 (n = 3)",
            "-1",
            "agrees within 95 %",
            {"judge": "equal", "effect": 0.28},
            1,
            "undecided",
        ),
        ("-0.75 ± 0.10", "-1", "off by +0.25, 2.5 SE", {}, 12, "disagrees"),
        ("0.85 ± 0.01 (3 seeds)", "> 0.9", "disagrees: below", {}, 1, "disagrees"),
        ("-0.60 ± 0.10 (n = 4 widths)", "-1", "off by +0.40, 4.0 SE", {}, 1, "undecided"),
        ("-0.30 ± 0.10 (n = 3)", "", "", {"judge": "below"}, 1, "undecided"),
        ("-0.30 ± 0.10 (n = 30)", "", "", {"judge": "below"}, 1, "agrees"),
        (
            "0.498 (0.4 to 0.6)",
            "0.5",
            "off by -0.002",
            {"judge": "near", "effect": 0.05},
            1,
            "agrees",
        ),
        (
            "8: 0.02±0.01, 16: 0.02±0.01",
            "",
            "",
            {"judge": "near", "effect": 0.01, "published": 0},
            1,
            "disagrees",
        ),
        (
            "^(-1.43 ± 0.38)",
            "",
            "",
            {"judge": "equal", "effect": 1.4, "published": -1},
            1,
            "agrees",
        ),
    ],
)
def test_findings_are_judged(measured, published, word, said, count, expected):
    line = Finding("name", measured, published, word)
    assert power.judged(line, said, count).word == expected


def test_a_sign_is_judged_by_the_distance_from_zero():
    """And not from the number that the paper prints."""
    line = Finding("name", "+0.40 ± 0.15", "-1.05", "off by +1.45, 9.7 SE")
    found = power.judged(line, {"judge": "below"}, 12)
    assert (found.word, found.alone) == (power.DISAGREES, False)


def test_numbers_are_judged_before_they_are_rounded():
    exact = Estimate(0.500, 0.0456)
    line = Finding("name", exact.text(2), "0.65", "off by -0.15, 3.3 SE", exact)
    said = {"judge": "equal", **EFFECT}
    assert power.judged(line, said, 1).off == pytest.approx(0.15)
    assert power.judged(line, said, 20).alone
    rounded = Finding("name", exact.text(2), "0.65", line.verdict)
    assert not power.judged(rounded, said, 20).alone


@pytest.mark.parametrize(("freedom", "alone"), [(None, True), (4, False)])
def test_findings_are_judged_by_the_degrees_of_freedom_of_their_errors(freedom, alone):
    """Three errors: of two findings together 95 % reach to 2.2 of them, and to 3.5 with four."""
    exact = Estimate(-0.3, 0.1, freedom=freedom)
    line = Finding("name", exact.text(), "gains", exact.claimed_gain(), exact)
    found = power.judged(line, EFFECT, 2)
    assert (found.word, found.alone) == (power.DISAGREES, alone)


def test_a_disagreement_smaller_than_the_effect_says_so():
    def row(measured):
        said = {"claim": "c", "where": "w", "sweeps": [], "published": -1, **EFFECT}
        line = Finding("name", measured, "", "")
        return power._row(power.Claim(said, [power.judged(line, said, 1)]), power.DISAGREES, 0.0)

    assert "differs by at most 0.2, less than the effect of 0.28" in row("-0.80 ± 0.05")
    assert "differs" not in row("-0.60 ± 0.05")


@pytest.mark.parametrize(
    ("published", "said", "offs", "shown"),
    [
        ("gains", {}, (0.9, 0.5, 0.7), "+0.5 ± 0.1"),  # the weakest gain,
        ("above 0", {"judge": "above"}, (0.9, 0.5, 0.7), "+0.5 ± 0.1; claimed: above 0"),
        ("0", {"judge": "equal", "effect": 9}, (0.1, 0.15, 0.05), "+0.15 ± 0.1; claimed: 0"),
        ("0", {"judge": "near", "effect": 1}, (0.1, 0.9, 0.5), "+0.9 ± 0.1; claimed: 0"),
        ("gains", {}, (0.9, -0.5, -0.8), "-0.8 ± 0.1"),  # what disagrees most
    ],
)
def test_what_is_decided_shows_the_number_that_decides_it(published, said, offs, shown):
    said = {"claim": "c", "where": "w", **said}
    words = {"gains": lambda off: "agrees" if off > 0 else "disagrees"}
    word = words.get(published, lambda off: "agrees")
    found = [
        power.judged(Finding("x", f"{off:+.2f} ± 0.10", published, word(off)), said, 3)
        for off in offs
    ]
    claim = power.Claim(said, found)
    assert claim.word in (power.AGREES, power.DISAGREES)
    assert f"| {shown}" in power._row(claim, claim.word, 0.0)


@pytest.mark.parametrize(("key", "word"), [("open", power.UNDECIDED), ("untested", power.UNTESTED)])
def test_why_a_claim_is_left_open_stands_beside_it(key, word):
    claim = power.Claim(
        {"claim": "c", "where": "w", key: "for this reason"},
        [power.Judged(power.AGREES, 1.0, 0.1, None)],
    )
    assert claim.word == word and "| for this reason |" in power._row(claim, word, 0.0)


def test_a_few_findings_of_many_disagree_by_chance():
    def word(agreeing, *offs):
        lines = [Finding("x", f"{off} ± 0.10", "0", "off by it") for off in offs]
        found = [power.judged(line, {}, agreeing + len(offs)) for line in lines]
        agrees = power.Judged(power.AGREES, 0.0, 0.1, None)
        return power.Claim({"effect": 1}, found + [agrees] * agreeing).word

    assert word(0, 0.25) == power.DISAGREES  # 2.5 standard errors are enough for one finding,
    assert word(11, 0.25) == power.UNDECIDED  # and not for one of twelve;
    assert word(9, 0.25, 0.25, 0.25) == power.DISAGREES  # three of twelve are too many,
    assert word(11, 0.40) == power.DISAGREES  # and four standard errors too far.
    assert word(3) == power.AGREES


def test_errors_of_what_is_undecided_say_how_many_runs_decide_it():
    def times(*found):
        return power.Claim({"effect": 0.28}, list(found)).times

    open_one = power.Judged(power.UNDECIDED, 0.0, 0.3, None)
    assert times(open_one) == pytest.approx(9)
    assert math.isnan(times(power.Judged(power.AGREES, 0.0, 0.3, None)))
    # Of three seeds the error itself is uncertain: 10 times as many.
    assert times(power.Judged(power.UNDECIDED, 0.0, 0.3, 3)) == pytest.approx(10)
    assert times(power.Judged(power.UNDECIDED, 0.1, math.nan, 1)) == 3


def test_claims_rest_on_desktop_where_its_tables_have_their_findings(tmp_path):
    said = yaml.safe_load(power.CLAIMS.read_text(encoding="utf-8"))["Everett et al."]
    words = (
        "Adam: the best global rate goes as D^-1.09",  # of one sweep, whose preset desktop
        "exponents at the compute-optimal horizon",
    )  # leaves the second one's runs out
    said = [one for start in words for one in said if one["claim"].startswith(start)]
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"Everett et al.": said}))
    assert [one.desktop for one in power.claims(path)["Everett et al."]] == [True, False]


def test_an_exponent_of_three_widths_takes_a_fourth_and_no_seeds():
    def claim(measured):
        line = Finding("x", measured, "-3/2", "off by it")
        return power.Claim({"effect": 0.28}, [power.judged(line, {"judge": "equal"} | EFFECT, 1)])

    assert claim("-0.47 ± 0.10 (n = 3 widths)").more_widths
    assert not claim("-0.47 ± 0.90 (n = 3 widths)").more_widths  # seeds, too
    assert claim("-0.47 ± 0.10 (n = 4 widths)").word == power.DISAGREES


def test_runs_cost_what_those_of_the_shipped_table_did(tmp_path, monkeypatch):
    plans = {
        "desktop": {"runs": 50, "core": 2.0},
        "laptop": {"runs": 10, "core": 0.5},
        None: {"runs": 4, "core": 0.1},
    }
    monkeypatch.setattr(power, "DATA", tmp_path)
    monkeypatch.setattr(power, "planned", lambda sweep, preset: plans.get(preset, {}))

    def ship(sweep, runs):
        folder = tmp_path / "paper"
        folder.mkdir(exist_ok=True)
        (folder / f"{sweep.replace('/', '_')}.json").write_text(
            json.dumps({"sweep": sweep, "runs": runs})
        )

    assert power.cost("e/s") == 0.5  # as planned, of the preset laptop
    ship("e/s_laptop", 30)
    assert power.cost("e/s") == pytest.approx(1.5)  # the sweep asked for 20 runs more
    ship("e/s_desktop", 75)
    assert power.cost("e/s") == pytest.approx(1.5)  # what laptop's findings rest on
    assert power.cost("e/s", desktop=True) == pytest.approx(3.0)
    del plans["desktop"], plans["laptop"]
    assert power.cost("e/t") == 0.1  # a file without presets


def test_numbers_by_size_are_the_last_minus_the_first():
    assert power.measured("4: 0.90±0.03, 8: 0.95±0.04 (n = 3)") == pytest.approx((0.05, 0.05))


def test_numbers_by_size_without_errors_are_numbers_by_size():
    value, error = power.measured("4: 0.900, 8: 0.950 (n = 2)")
    assert value == pytest.approx(0.05) and math.isnan(error)


def test_a_pattern_that_matches_no_finding_is_named(tmp_path):
    path = tmp_path / "claims.yaml"
    claim = "{claim: c, where: w, figure: everett/quickstart, findings: none of it}"
    path.write_text(f"P:\n- {claim}\n")
    with pytest.raises(ValueError, match="everett/quickstart has no finding 'none of it'"):
        power.claims(path)
