"""Stratos' Table 1 against Everett et al.'s, and his conditions against their stability."""

import itertools
from fractions import Fraction

import pytest

from effective_theory.stratos import STRATOS_TABLE, general_violations, violations
from param_groups import exponents as ex
from param_groups.tables import STRATOS_NAMES, stratos_table

TABLES = ex.PARAMETERIZATION_TABLE
GRID = [ex.Alignment(*values) for values in itertools.product((0.5, 0.75, 1), repeat=3)]


@pytest.mark.parametrize("name", STRATOS_TABLE)
def test_table_1_is_everetts_adam_with_full_alignment(name):
    everett = STRATOS_NAMES[name]
    row = STRATOS_TABLE[name]
    for layer in ex.LAYERS:
        assert ex.Layer(row["a"][layer], row["b"][layer]) == TABLES[everett][layer]
        assert row["c"][layer] == ex.solve(everett, "adam", "full").c[layer]
        printed = stratos_table()[name][layer]  # which `param_groups table` derives
        assert printed == {symbol: str(row[symbol][layer]) for symbol in "abc"}
    assert violations(TABLES[everett], row["c"]) == []
    assert general_violations(TABLES[everett], row["c"], ex.FULL_ALIGNMENT) == []


def numbers(found):
    """The equation number of each violation."""
    return [violation.split()[0] for violation in found]


def test_each_condition_is_named():
    c = STRATOS_TABLE["mup"]["c"]
    quick = {layer: value - Fraction(1, 8) for layer, value in c.items()}
    assert numbers(violations(TABLES["mup"], quick)) == ["(21)", "(22)", "(22)"]
    assert numbers(violations(TABLES["mup"], c, omega="3/4")) == ["(23)"]
    assert numbers(violations(TABLES["mup"], c, 1)) == []
    loud = ex.Parameterization(ex.Layer(0, "-1/2"), ex.Layer(0, 0), ex.Layer(0, 0))
    slow = dict.fromkeys(ex.LAYERS, 1)
    assert numbers(violations(loud, slow)) == ["(6)", "(7)", "(8)", "(24)"]


def test_the_readouts_condition_is_sufficient_but_not_necessary():
    """With omega = 1 at the readout, standard is stable only through small changes before it."""
    c, table = STRATOS_TABLE["sp"]["c"], TABLES["standard"]
    assert numbers(violations(table, c, 1)) == ["(24)"]
    assert numbers(general_violations(table, c, ex.TENSOR_PROGRAMS)) == ["(18)"]
    careful = ex.solve("standard", "adam", ex.TENSOR_PROGRAMS).c
    assert numbers(violations(table, careful, 1)) == ["(24)"]
    assert general_violations(table, careful, ex.TENSOR_PROGRAMS) == []


@pytest.mark.parametrize("name", TABLES)
def test_general_conditions_are_stability_under_adam(name):
    named = set()
    lattice = itertools.product((0, 0.5, 1.5), repeat=3)
    for alignment, values in itertools.product(GRID[::4], lattice):
        c = dict(zip(ex.LAYERS, values, strict=True))
        found = general_violations(TABLES[name], c, alignment, hidden_layers=2)
        assert (found == []) == ex.is_stable(name, "adam", alignment, c, hidden_layers=2)
        named.update(numbers(found))
    assert {"(18)", "(19)", "(20)"} <= named


def test_a_violation_says_by_how_much():
    c = {"embedding": Fraction(-1, 4), "hidden": 9, "readout": 9}
    found = general_violations(TABLES["standard"], c, ex.FULL_ALIGNMENT)
    assert found[0] == "(14) a + c >= 0 at embedding fails by 1/4"
