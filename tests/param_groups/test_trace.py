"""Roles from use: every tensor of other people's kinds of models is right or refused."""

import fnmatch
import math

import pytest

from param_groups import Everett, PlanError, plan, traced
from param_groups.roles import default_layout
from tests.param_groups import traced_other, traced_text

CASES = traced_text.CASES | traced_other.CASES
BASE, WIDE = 32, 64


def expectations(case, names):
    """{tensor: (role and layout, fan-in, power of the rate, start)} as a case states them."""
    expected = {}
    lines = [line.split() for line in case.expected.splitlines() if line]
    for pattern, role, fan_in, power, *start in lines:
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        assert hits, pattern
        numbers = (role, eval(fan_in, {"n": WIDE}), int(power), *(start or ["1"]))
        expected |= dict.fromkeys(hits, numbers)
    return expected


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_right_or_refused(name):
    case = CASES[name]
    found = traced(case.build, case.run, (BASE, WIDE))
    if case.refused:
        with pytest.raises(PlanError, match=case.refused) as error:
            _ = found.rules
        assert "\n" not in str(error.value) and found.doubts
        return
    wide, small = case.build(WIDE), case.build(BASE)
    power = None
    if case.attention:
        size = case.head_dim(WIDE)
        power = math.log(case.attention(size)) / math.log(size)
    planned = lambda model, power: plan(
        model, found.rules, Everett("standard", BASE, BASE, qk_exponent=power), lr=1.0, base=small
    )
    rows = planned(wide, power).rows
    at_base = {row.name: row.lr for row in planned(small, power).rows}
    got = {}
    for row in rows:
        reading = found[row.name]
        layout = "" if reading.layout is default_layout(reading.role) else f"/{reading.layout}"
        start = "kept" if row.init_distribution == "kept" else f"{reading.scale:g}"
        ratio = row.lr / at_base[row.name]
        got[row.name] = (row.role + layout, row.fan_in, round(math.log2(ratio), 3), start)
    assert got == expectations(case, got), str(found)
    if case.attention:
        with pytest.raises(PlanError, match="on query-key products"):
            planned(wide, power + 0.25)
