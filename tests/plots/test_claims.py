"""Claims: one word each, from sign, size, drift and what differs; on constructed numbers, and what
holds for the page."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest

from plots import catalogue, claims, rates
from plots.claims import AWAY, NO, NONE, STILL, TOWARD, UNKNOWN, YES, Claim, claimed, judgement
from plots.findings import Estimate, Finding
from plots.tables import CLOSER, DESKTOP, WIDE
from sweeps.sweep_file import load_sweep

# Every figure's findings take most of a minute: one process has the tests that need them.
pytestmark = pytest.mark.xdist_group("claims")


def finding(value, error, published, groups=10, sizes=None, name="power of n", blocked=""):
    by_size = {n: Estimate(one, error) for n, one in (sizes or {}).items()}
    estimate = Estimate(value, error, groups, by_size=by_size, blocked=blocked)
    return Finding(name, estimate.text(), published, "", estimate)


def word(*found, effect=0.25, cause=""):
    own = [judgement(one, one.published, effect, len(found)) for one in found]
    return Claim("paper", {"claim": "c", "where": "w"}, own, cause).word


FALLING = {16: -0.4, 32: -0.6, 64: -0.8}


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        # Tiny errors show any correction at a finite size; within the effect it does not matter.
        ("reproduced", [finding(-1.15, 1e-4, "-1")]),
        ("reproduced", [finding(-1.0, 0.02, "-1"), finding(0.1, 0.02, "0")]),
        ("reproduced", [finding(0.3, 0.01, "gains")]),
        ("reproduced", [finding(0.93, 0.001, "> 0.9"), finding(0.75, 0.001, "0.7 to 0.8")]),
        ("reproduced", [finding(-0.1, 0.02, "not below 0")]),
        ("approaching", [finding(-0.6, 1e-4, "-1", sizes=FALLING)]),
        ("approaching", [finding(-0.6, 1e-4, "-1", sizes=FALLING), finding(-1.0, 0.02, "-1")]),
        ("reproduced in sign", [finding(-0.6, 0.05, "-1", sizes=FALLING)]),  # the last may lie off
        ("reproduced in sign", [finding(-0.5, 0.01, "-1")]),
        ("reproduced in sign", [finding(-0.8, 0.2, "-1")]),
        ("not reproduced", [finding(0.5, 0.01, "-1")]),
        ("not reproduced", [finding(-0.5, 0.01, "0")]),
        ("reproduced in sign", [finding(0.2, 0.01, "gains")]),  # less than what matters
        ("reproduced in sign", [finding(0.26, 0.05, "gains")]),  # may be less
        ("not reproduced", [finding(-0.5, 0.01, "gains"), finding(0.5, 0.01, "gains")]),
        ("not reproduced", [finding(0.3, 0.001, "> 0.9")]),
        ("undecided", [finding(-0.2, 0.3, "-1")]),
        ("undecided", [finding(0.1, 0.2, "gains")]),
        ("undecided", [finding(-0.1, 0.001, "gains")]),  # a difference that does not matter
        ("undecided", [finding(-0.26, 0.05, "gains")]),  # one that may not
        ("undecided", [finding(0.2, 0.01, "gains", groups=2)]),
        ("undecided", [finding(0.2, 0.01, "gains", blocked="constants near an edge")]),
        ("not tested", []),
    ],
)
def test_every_word_on_constructed_numbers(expected, found):
    assert word(*found) == expected


@pytest.mark.parametrize(
    ("value", "matters"), [(0.039, "no"), (0.044, "open"), (0.056, "open"), (0.07, "yes")]
)
def test_one_number_has_one_word_whatever_is_claimed_of_it(value, matters):
    """A difference that does not matter where two are claimed to be alike is no gain, and no loss,
    where one is claimed; and the other way round."""
    words = {
        claim: word(finding(value, 0.004, claim, 5), effect=0.05)
        for claim in ("equal", "gains", "loses")
    }
    assert words == {
        "equal": {"no": "reproduced", "open": "undecided", "yes": "not reproduced"}[matters],
        "gains": "reproduced" if matters == "yes" else "reproduced in sign",
        "loses": "not reproduced" if matters == "yes" else "undecided",
    }


def test_what_a_cause_and_an_edge_do():
    assert word(finding(0.5, 0.01, "-1"), cause="epsilon") == "not reproduced, cause known"
    off = finding(0.5, 0.01, "-1", blocked="constants near an edge")
    assert word(off, cause="epsilon") == "undecided"


def test_of_many_findings_one_at_95_percent_is_chance():
    """Of 24 numbers that are right one lies more than two errors off; a no takes more than that."""
    right, off = finding(0.0, 0.1, "0", 40), finding(0.52, 0.1, "0", 40)
    assert word(off) == "not reproduced"
    assert word(off, *[right] * 23) == "undecided"


@pytest.mark.parametrize(
    ("values", "drift"),
    [
        ((-0.4, -0.6, -0.8), TOWARD),
        ((-0.8, -0.6, -0.4), AWAY),
        ((-0.6, -0.6, -0.601), STILL),
        ((-0.9, -0.4, -0.6, -0.8), TOWARD),  # the last three
        ((-0.6,), UNKNOWN),
    ],
)
def test_drift_is_of_the_last_sizes(values, drift):
    sizes = {2**place: value for place, value in enumerate(values)}
    assert judgement(finding(-0.6, 0.01, "-1", sizes=sizes), "-1", 0.25).drift == drift


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ("-1/2", ("number", -0.5, -0.5)),
        ("-1 derived (caption -2)", ("number", -1, -1)),
        ("+0.65", ("number", 0.65, 0.65)),
        ("no gain", ("number", 0, 0)),
        ("0.7 to 0.8", ("range", 0.7, 0.8)),
        ("<= 0.8", ("range", float("-inf"), 0.8)),
        ("> 0.9", ("range", 0.9, float("inf"))),
        ("below 0, marginally", ("side", float("-inf"), 0)),
        ("loses", ("side", float("-inf"), 0)),
        ("rises", ("side", 0, float("inf"))),
        ("not below 0", ("not below", 0, float("inf"))),
    ],
)
def test_what_a_finding_is_compared_with(published, expected):
    assert claimed(published) == expected


def test_columns_are_of_all_findings():
    both = finding(-1, 0.01, "-1"), finding(0, 0.3, "0")
    own = [judgement(one, one.published, 0.25) for one in both]
    claim = Claim("paper", {}, own)
    assert (own[0].sign, own[0].size, own[1].sign) == (YES, YES, NONE)
    assert (claim.column("sign"), claim.column("size")) == (YES, UNKNOWN)
    assert judgement(finding(0.5, 0.01, "-1"), "-1", 0.25).sign == NO


@pytest.fixture
def figure(monkeypatch):
    """A figure whose findings are those given, and those of presets desktop, wide and closer."""

    def run(laptop, desktop=(), wide=(), closer=()):
        by_preset = {"": laptop, DESKTOP: desktop, WIDE: wide, CLOSER: closer}
        of = {f"paper/figure{preset}": lines for preset, lines in by_preset.items()}
        monkeypatch.setattr(catalogue, "of_shipped", lambda name: of[name])
        return {"claim": "c", "where": "w", "figure": "paper/figure", "effect": 0.05}

    return run


def test_a_claim_about_large_models_is_judged_at_the_widest(figure):
    values = {64: 0.651, 128: 0.517, 256: 0.122, 512: float("nan")}  # which was not measured
    lines = [finding(v, 0.04, "below 0", 3, name=f"n = {n}: gap") for n, v in values.items()]
    claim = claims.judge("paper", {**figure(lines), "findings": r"n = (\d+): gap"})
    assert [one.finding.name for one in claim.judgements] == ["n = 256: gap"]
    assert claim.word == "undecided" and claim.number.startswith("n = 256: gap +0.12 ± 0.04 (")


def test_wider_models_decide_and_their_drift_is_their_own(figure):
    """Between two presets the machine and the data may change, too."""
    narrow = finding(-0.11, 0.003, "gains", sizes={32: -0.18, 128: -0.11})
    wide = finding(-0.06, 0.003, "gains", sizes={1024: -0.04})
    first = {**figure([finding(0.2, 0.01, "gains")], [narrow]), "findings": "power"}
    assert (
        claims.judge("paper", first).number == "power of n -0.110 ± 0.003 (n = 10), claimed gains"
    )
    entry = {**figure([], [narrow], [wide]), "findings": "power"}
    claim = claims.judge("paper", entry)
    assert (claim.number[11:17], claim.known_drift) == ("-0.060", "")
    wide = finding(-0.06, 0.003, "gains", sizes={512: -0.09, 1024: -0.04})
    claim = claims.judge("paper", {**figure([], [narrow], [wide]), "findings": "power"})
    assert (claim.known_drift, claim.word) == ("toward", "approaching")


@pytest.mark.parametrize(
    ("groups", "sizes", "stand"),
    [
        (10, {32: 0.1, 1024: 0.3}, ["+0.300"]),
        (12, {1024: 0.3}, ["+0.300"]),
        (3, {32: 0.1, 1024: 0.3}, ["+0.100", "+0.300"]),  # of fewer seeds
        (10, {32: 0.3}, ["+0.100", "+0.300"]),  # of smaller sizes
    ],
)
def test_a_later_preset_replaces_an_earlier_one_where_it_is_not_weaker(
    figure, groups, sizes, stand
):
    early = finding(0.1, 0.003, "gains", 10, {32: 0.2, 128: 0.1})
    late = finding(0.3, 0.003, "gains", groups, sizes)
    claim = claims.judge("paper", {**figure([], [early], [late]), "findings": "power"})
    assert sorted(one.finding.measured[:6] for one in claim.judgements) == stand
    if len(stand) > 1:  # the number says which one it is of
        assert claim.number.startswith("power of n (desktop) +0.100")
    (last,) = stand[-1:] if len(stand) == 1 else stand[:1]  # what looks closer at less stands alone
    claim = claims.judge("paper", {**figure([], [early], closer=[late]), "findings": "power"})
    assert [one.finding.measured[:6] for one in claim.judgements] == [last]


def test_a_claim_of_one_preset_is_judged_by_it_alone(figure):
    """As where its runs are longer: what others say is of another claim."""
    early = finding(0.1, 0.003, "gains", 10, {32: 0.2, 128: 0.1})
    late = finding(0.3, 0.003, "gains", 10, {64: 0.3})
    entry = {**figure([early], [early], closer=[late]), "findings": "power"}
    for preset, value in ((None, "+0.100"), ("closer", "+0.300")):
        claim = claims.judge("paper", {**entry, "preset": preset})
        assert [one.finding.measured[:6] for one in claim.judgements] == [value]


def test_fits_through_fewer_widths_or_of_fewer_seeds_are_the_weaker_ones():
    def fit(widths, seeds):
        sweep = SimpleNamespace(chosen_from={1.0: dict.fromkeys(range(seeds), 0.0)})
        sweeps = dict.fromkeys(range(widths), sweep)
        power = rates.Exponent(-1.0, 0.1, widths, 2, sweeps=sweeps)
        return Finding("power", power.text(), "-1", "", power)

    assert claims.weaker(fit(5, 3), fit(7, 3)) and claims.weaker(fit(7, 2), fit(5, 3))
    assert not claims.weaker(fit(7, 3), fit(5, 3)) and not claims.weaker(fit(5, 3), fit(5, 3))
    unknown = Finding("power", "not measured", "-1", "", Estimate(float("nan"), float("nan"), 9))
    assert claims.weaker(unknown, fit(5, 3)) and not claims.weaker(fit(5, 3), unknown)


def test_a_cause_is_known_if_a_run_without_it_has_the_claim_s_sign(figure):
    """That the difference is small without it explains its size, and not its sign."""
    found = [finding(-0.2, 0.01, "gains"), finding(0.06, 0.01, "no claim", name="cured")]
    found.append(finding(-0.01, 0.001, "no claim", name="smaller"))
    found.append(finding(-0.3, 0.5, "no claim", name="noisy"))  # which shows nothing
    entry = {**figure(found), "findings": "power"}
    assert claims.judge("paper", entry).word == "not reproduced"
    for pattern, expected in (
        ("cured", "not reproduced, cause known"),
        ("smaller", "not reproduced"),
        ("noisy", "not reproduced"),
        ("power", "not reproduced"),
        ("nowhere", "not reproduced"),
    ):
        cause = {"words": "embeddings", "figure": entry["figure"], "findings": pattern}
        cause["published"] = "gains"
        assert claims.judge("paper", {**entry, "cause": cause}).word == expected


def test_what_stands_beside_a_difference_leaves_its_sign(figure):
    """Rates that are not equal may make a part of a lead: its size is open, as the page says."""
    entry = {**figure([finding(0.3, 0.01, "gains")]), "findings": "power"}
    assert claims.judge("paper", entry).word == "reproduced"
    entry["beside"] = "rates differ"
    assert claims.judge("paper", entry).word == "reproduced in sign"
    for value, word_ in ((-0.3, "not reproduced"), (0.001, "undecided")):
        other = {**figure([finding(value, 0.01, "gains")]), "findings": "power", "beside": "x"}
        assert claims.judge("paper", other).word == word_


def test_a_number_says_what_it_is_of_and_stands_beside_what_is_claimed(figure):
    found = [
        finding(-0.85, 0.027, "-1.09", name="adam, standard, fixed steps"),
        finding(-0.4, 0.151, "-0.99", name="adam, muP, fixed steps"),
    ]
    claim = claims.judge("paper", {**figure(found), "findings": "adam"})
    assert claim.number == "muP -0.40 ± 0.15 (n = 10), claimed -0.99"
    alone = [finding(0.1, 0.0004, "above 0", name="n = 4: gap (nats)")]
    claim = claims.judge("paper", {**figure(alone), "findings": "n"})
    assert claim.number == "n = 4: gap +0.1000 ± 0.0004 (n = 10), claimed above 0"
    assert (claim.drift, claim.known_drift) == (UNKNOWN, "")


def test_an_effect_that_is_younger_than_its_table_says_so(figure, monkeypatch):
    dates = {"old": "2026-01-01T00:00", "new": "2026-03-01T00:00", "undated": None}
    monkeypatch.setattr(claims.tables, "origin", lambda path: {"date": dates[path]})
    found = [finding(0.3, 0.003, "gains")]
    of = ((["new"], False), (["new", "old"], True), (["undated"], True), ([], True))
    for names, late in of:
        monkeypatch.setattr(catalogue, "saying", lambda name, finding, names=names: names)
        entry = {**figure(found), "findings": "power", "since": "2026-02-01T12:30"}
        claim = claims.judge("paper", entry)
        assert claim.after_the_data is late
        assert claim.effect == f"effect 0.05 (2026-02-01{', after the data' * late})"


def test_an_effect_is_as_old_as_the_table_that_its_finding_is_of():
    """A figure that draws any of several tables has findings of each, and of all together."""
    name, by_decay = "everett/transfer_closer", "decay: decay per step as 1/D: paid"
    (decay,) = {
        path
        for one in catalogue.of_shipped(name)
        if isinstance(one, Finding) and one.name.startswith(by_decay)
        for path in catalogue.saying(name, one.name)
    }
    assert decay.name == "transfer_decay_closer.csv"
    assert len(catalogue.shipped(name)) > 1
    assert catalogue.saying(name, "of all") == catalogue.shipped(name)


@pytest.mark.thorough
def test_no_effect_is_younger_than_its_table_without_saying_so():
    """Dates are those of git: when an effect came into this file, and of the runs' commits."""
    late = set()
    for claim in (one for one in claims.claims() if one.judgements and "effect" in one.entry):
        for one in claim.judgements:
            for path in catalogue.saying(claim.entry["figure"] + one.preset, one.finding.name):
                date = claims.tables.origin(path)["date"]
                late |= {claim.entry["claim"]} if claim.entry["since"] > date else set()
    page = claims.PAGE.read_text(encoding="utf-8")
    said = {line.split(" | ")[0][2:] for line in page.splitlines() if "after the data)" in line}
    assert late and said == late


@pytest.mark.thorough
def test_every_claim_is_tested_or_says_why_not_and_no_number_is_tried_twice():
    every = claims.claims()
    tried, shipped = Counter(), catalogue.names()
    for claim in every:
        if "untested" not in claim.entry and claim.entry["figure"] in shipped:
            assert claim.judgements, claim.entry["claim"]
            assert claim.entry.get("effect") or claim.paper == "Stratos"
        of = claim.entry["figure"]
        tried.update((of + one.preset, one.finding.name) for one in claim.judgements)
    assert tried and max(tried.values()) == 1, tried.most_common(3)


def plan_of(prepared, folder):
    """(seeds at the largest size or fresh ones, sizes) of a prepared preset's runs."""
    file, preset, _ = prepared.split(", ", 2)
    path = claims.PAGE.parents[1] / file
    sweep = load_sweep(path, folder, preset.removeprefix("preset "), draft=True)
    seeds = {}
    for point in sweep.points:
        for size in [value for key, value in point.values if key.startswith("model.")] or [0]:
            seeds.setdefault(size, set()).add(point.seed)
    fresh = sweep.config.extend.seeds if sweep.config.extend else ()
    return max(len(seeds[max(seeds)]), len(fresh)), sorted(seeds)


def weaker_runs(claim, prepared, folder):
    """[(seeds, sizes) of a prepared preset's runs beside a judgement's] where one is smaller."""
    seeds, sizes = plan_of(prepared, folder)
    found = []
    for estimate in (one.finding.estimate for one in claim.judgements):
        fit = estimate.fitted > 1  # whose second number is that of its sizes
        basis = seeds, len(sizes) if fit else sizes[-1]
        pairs = list(zip(basis, estimate.basis, strict=True))
        found += [] if all(new >= old for new, old in pairs) else [pairs]
    return found


@pytest.mark.thorough
def test_a_prepared_run_is_not_weaker_than_what_it_would_replace(tmp_path):
    """Of fewer seeds or at smaller sizes it would be dropped, and its claim stay as it is."""
    for claim in claims.claims():
        if prepared := claim.entry.get("prepared"):
            assert not weaker_runs(claim, prepared, tmp_path), claim.entry["claim"]
    (deep,) = (one for one in claims.claims() if one.entry["claim"].startswith("1/L ends lower"))
    file = "nanolm_c4/sweeps/transfer_depth.yaml, preset"
    assert not weaker_runs(deep, f"{file} closer, the runs that judge it", tmp_path)
    assert weaker_runs(deep, f"{file} laptop, of fewer seeds", tmp_path)


@pytest.mark.thorough
def test_the_shipped_page_is_that_of_the_shipped_tables():
    every = claims.claims()
    text = claims.PAGE.read_text(encoding="utf-8")
    assert text == claims.page()
    assert "does not say that a paper is wrong" in text.splitlines()[0]
    heads = {claim.paper for claim in every}
    assert len(re.findall(r"^\| ", text, re.MULTILINE)) == len(every) + len(heads)
    assert text.index("## Ours, which no paper states") > text.index("## Stratos")
