"""Stratos' Table 1 against Everett et al.'s, and his conditions against their stability."""

import itertools
from collections.abc import Mapping
from fractions import Fraction

import pytest

from effective_theory.stratos.table_1 import STRATOS_NAMES, STRATOS_TABLE
from param_groups.rules import exponents as ex

TABLES = ex.PARAMETERIZATION_TABLE
GRID = [ex.Alignment(*values) for values in itertools.product((0.5, 0.75, 1), repeat=3)]


# His conditions, an independent reference for `param_groups.rules.exponents.is_stable`.


def violations(
    table: ex.Parameterization,
    c: Mapping[str, ex.Number],
    omega_readout: ex.Number = ex.HALF,
    *,
    omega: ex.Number = ex.HALF,
) -> list[str]:
    """Those of conditions (6)-(8) and (21)-(24) that fail; empty when all hold.

    They are sufficient for stability with full alignment: they credit the layers with no residual,
    so rates that are stable only thanks to r_L > 0 are reported under (24).
    """
    bound = max(ex.HALF, ex.fraction(omega_readout))
    rates = {layer: ex.fraction(c[layer]) for layer in ex.LAYERS}
    return _failures(
        [
            ("(6) a + b = 0 at embedding", -abs(table.embedding.scale)),
            ("(7) a + b = 1/2 at hidden", -abs(table.hidden.scale - ex.HALF)),
            ("(8) a + b >= 1/2 at readout", table.readout.scale - ex.HALF),
            ("(21) a + c >= 0 at embedding", table.embedding.a + rates["embedding"]),
            ("(22) a + c >= 1 at hidden", table.hidden.a + rates["hidden"] - 1),
            ("(22) a + c >= 1 at readout", table.readout.a + rates["readout"] - 1),
            ("(23) omega <= 1/2 at hidden", ex.HALF - ex.fraction(omega)),
            (f"(24) a + b >= {bound} at readout", table.readout.scale - bound),
        ]
    )


def general_violations(
    table: ex.Parameterization,
    c: Mapping[str, ex.Number],
    alignment: ex.Alignment,
    *,
    hidden_layers: int = 1,
) -> list[str]:
    """Those of conditions (14) and (18)-(20) that fail.

    These hold for any alignment and use each layer's input residual, which `residuals` computes
    from the same rates. Together with (6)-(8) they are equivalent to `is_stable` for Adam. Raises
    as `residuals` does.
    """
    inputs = ex.residuals(table, "adam", alignment, c, hidden_layers=hidden_layers)[:-1]
    conditions = [("(14) a + c >= 0 at embedding", inputs[0])]
    for index, before in enumerate(inputs):
        layer = "hidden" if index < hidden_layers else "readout"
        where = f"hidden layer {index + 1}" if layer == "hidden" else layer
        alpha, omega, u = alignment.at(layer)
        update = table[layer].a + ex.fraction(c[layer])
        conditions += [
            (f"(18) a + b + r >= omega at {where}", table[layer].scale + before - omega),
            (f"(19) a + c >= alpha at {where}", update - alpha),
            (f"(20) a + c + r >= u at {where}", update + before - u),
        ]
    return _failures(conditions)


def _failures(conditions: list[tuple[str, Fraction]]) -> list[str]:
    """The conditions whose slack is negative."""
    return [f"{name} fails by {-slack}" for name, slack in conditions if slack < 0]


@pytest.mark.parametrize("name", STRATOS_TABLE)
def test_table_1_is_everetts_adam_with_full_alignment(name):
    everett = STRATOS_NAMES[name]
    row = STRATOS_TABLE[name]
    for layer in ex.LAYERS:
        assert ex.Layer(row["a"][layer], row["b"][layer]) == TABLES[everett][layer]
        assert row["c"][layer] == ex.solve(everett, "adam", "full").c[layer]
    assert violations(TABLES[everett], row["c"]) == []
    assert general_violations(TABLES[everett], row["c"], ex.FULL_ALIGNMENT) == []


def numbers(found):
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
