"""The exponents against the published tables, and against a step-by-step scale simulation."""

import itertools
import json
from fractions import Fraction

import pytest

from param_groups import PlanError
from param_groups.__main__ import constraint_rows, everett_rows, everett_table
from param_groups.rules import exponents as ex
from tests.param_groups.table_1 import PAPER

ROWS = {(line.split()[0], line.split()[1]): line.split()[2:] for line in PAPER.split("\n") if line}
LAYERS = ("embedding", "hidden", "readout")
NAMES = ("standard", "ntk", "mup", "mean_field")
OPTIMIZERS = ("sgd", "adam", "adafactor")
COLUMNS = [(o, kind) for kind in ("full", "none") for o in OPTIMIZERS]
CASES = [(name, *column) for name in NAMES for column in COLUMNS]
GRID = [ex.Alignment(*values) for values in itertools.product((0.5, 0.75, 1), repeat=3)]
EIGHTH = Fraction(1, 8)
# Stable at initialization, in none of the paper's classes: its readout starts smaller than any.
ODD = ex.Parameterization(ex.Layer("1/3", "-1/3"), ex.Layer("-1/4", "3/4"), ex.Layer(2, "-1/4"))


def typed_parameterization(name):
    """Build a, b from the typed table: n^-2b is the variance, n^-a the multiplier."""
    cells = {layer: ROWS[name, layer] for layer in LAYERS}
    return ex.Parameterization(
        *(ex.Layer(-Fraction(row[1]), -Fraction(row[0]) / 2) for row in cells.values())
    )


def typed_rates(name, optimizer, kind):
    """Read the learning rates of one column from the typed table."""
    index = 3 + COLUMNS.index((optimizer, kind))
    return {layer: ROWS[name, layer][index] for layer in LAYERS}


def simulate(table, optimizer, alignment, c, hidden_layers=1, steps=12):
    """Train by exponents alone; return the largest powers of n of any activation and logit change.

    Sizes are powers of n and the size of a sum is the max, so this uses none of the module's
    formulas: it follows the weights, their updates and the changes of each layer through the
    steps. Activations are taken as constant in the backward pass, so an activation that grows is
    reported as such and what follows it means nothing.
    """
    change = dict.fromkeys(LAYERS, -(10**6))
    worst_activation = worst_logit = last = -(10**6)
    for _ in range(steps):
        size = {k: max(-table[k].b, change[k]) for k in LAYERS}
        below = -table.readout.a + size["readout"]
        gradient = {k: below - table[k].a for k in ("embedding", "hidden")}
        gradient["readout"] = -table.readout.a
        step = {"sgd": gradient, "adam": dict.fromkeys(LAYERS, 0), "adafactor": size}[optimizer]
        change = {k: max(change[k], step[k] - c[k]) for k in LAYERS}
        last = change["embedding"] - table.embedding.a
        worst_activation = max(worst_activation, last)
        for k in ["hidden"] * hidden_layers + ["readout"]:
            alpha, omega, u = alignment.at(k)
            terms = (change[k] + alpha, -table[k].b + last + omega, change[k] + last + u)
            following = max(terms) - table[k].a
            if k == "hidden":
                last = following
                worst_activation = max(worst_activation, last)
        worst_logit = max(worst_logit, following)
    return worst_activation, worst_logit, last


def simulated_stable(*args, **kwargs):
    """Whether neither the activations nor the logits grow with width in the simulation."""
    activation, logit, _ = simulate(*args, **kwargs)
    return activation <= 0 and logit <= 0


def test_both_tables_are_the_typed_table():
    table = json.loads(json.dumps(everett_table()))
    header, *rows = everett_rows()
    assert header[-6:] == tuple(f"{optimizer} {kind}" for optimizer, kind in COLUMNS)
    assert rows == [(name, layer, *cells) for (name, layer), cells in ROWS.items()]
    assert [(name, layer) for name in table for layer in table[name]] == list(ROWS)
    for name, layer in ROWS:
        row = table[name][layer]
        rates = [row["lr"][optimizer][kind] for optimizer, kind in COLUMNS]
        cells = [row["init_variance"], row["multiplier"], row["gradient"], *rates]
        assert cells == ROWS[name, layer]


@pytest.mark.parametrize(("name", "optimizer", "kind"), CASES)
def test_solver_reproduces_every_column(name, optimizer, kind):
    alignment = {"full": ex.FULL_ALIGNMENT, "none": ex.NO_ALIGNMENT}[kind]
    table = typed_parameterization(name)
    for hidden_layers in (1, 2, 5):
        by_name = ex.solve(name, optimizer, kind, hidden_layers=hidden_layers)
        by_value = ex.solve(table, optimizer, alignment, hidden_layers=hidden_layers)
        assert by_name == by_value
        assert by_value.to_dict()["lr"] == typed_rates(name, optimizer, kind)
        assert by_value.stable
    solution = ex.solve(table, optimizer, alignment)
    _, logit, last = simulate(table, optimizer, alignment, solution.c)
    assert (-last, -logit) == solution.residuals[-2:]


def test_exactly_four_columns_are_trivial():
    """The paper says none is; with its own definition the logits move as n^-1/2 in these four."""
    solutions = {case: ex.solve(*case) for case in CASES}
    for solution in solutions.values():
        assert solution.feature_learning
        assert solution.residuals == (0, 0, 0 if solution.nontrivial else Fraction(1, 2))
    trivial = {case for case, solution in solutions.items() if not solution.nontrivial}
    assert trivial == set(itertools.product(("mup", "mean_field"), ("sgd", "adafactor"), ("none",)))


def lowered(c, layer, generous=()):
    """Lower c of one layer by 1/8 and give the generous layers a rate that disturbs nothing."""
    after = {k: v + 8 if k in generous else v for k, v in c.items()}
    return {**after, layer: c[layer] - EIGHTH}


def assert_maximal(table, optimizer, alignment, hidden_layers=1):
    """The solution is stable, no c can be lowered alone, nor at the expense of later layers."""
    c = ex.solve(table, optimizer, alignment, hidden_layers=hidden_layers).c
    assert simulated_stable(table, optimizer, alignment, c, hidden_layers)
    assert ex.is_stable(table, optimizer, alignment, c, hidden_layers=hidden_layers)
    for index, layer in enumerate(LAYERS):
        for generous in ((), LAYERS[index + 1 :]):
            bold = lowered(c, layer, generous)
            assert not simulated_stable(table, optimizer, alignment, bold, hidden_layers)
            assert not ex.is_stable(table, optimizer, alignment, bold, hidden_layers=hidden_layers)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_solution_is_maximal_on_the_grid(name, optimizer):
    for alignment in GRID[::2]:
        assert_maximal(typed_parameterization(name), optimizer, alignment)


@pytest.mark.parametrize("hidden_layers", [1, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", [typed_parameterization("ntk"), ODD])
def test_solution_is_maximal_for_unusual_cases(table, optimizer, hidden_layers):
    """Deep networks, weak omega, u above alpha, and a readout with its own alignment."""
    cases = "3/4 3/4 1 1, 1/2 0 1 1, 1/4 1/4 3/4 1, 0 1/8 1/3 7/8 1 0, 1 1 1 0 0 1, 1 1/2 1 1"
    for values in cases.split(", "):
        assert_maximal(table, optimizer, ex.Alignment(*values.split()), hidden_layers)


def test_hidden_layers_share_the_rate_of_the_neediest():
    """omega = 0 and u = 1 help later layers: with two of them, half the slowdown is enough."""
    alignment = ex.Alignment("1/2", 0, 1, omega_readout=1)
    one, two = (ex.solve("standard", "adam", alignment, hidden_layers=n) for n in (1, 2))
    assert (one.c["embedding"], one.c["hidden"]) == (0, Fraction(3, 2))
    assert (two.c["embedding"], two.c["hidden"]) == (0, Fraction(5, 4))
    assert two.residuals[-2] == Fraction(1, 2)


def test_strong_omega_needs_smaller_changes_near_the_input():
    solution = ex.solve("mup", "adam", ex.Alignment(1, "3/4", 1, "1/2"), hidden_layers=2)
    assert solution.residuals[:3] == (Fraction(1, 2), Fraction(1, 4), 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_stability_agrees_with_the_simulation_on_a_lattice(name, optimizer):
    table, half = typed_parameterization(name), Fraction(1, 2)
    seen = set()
    for values in itertools.product([k * half for k in (-3, -1, 0, 1, 3)], repeat=3):
        c = dict(zip(LAYERS, values, strict=True))
        stable = ex.is_stable(name, optimizer, "none", c)
        # Eight steps show Adafactor's growth: n^1/2 per step against an allowance of n^3/2.
        assert stable == simulated_stable(table, optimizer, ex.NO_ALIGNMENT, c, steps=8), c
        seen.add(stable)
    assert seen == {True, False}


def test_sgd_gradients_grow_with_an_outgrown_readout():
    """Readout rate 1 instead of 1/sqrt(n): its update is sqrt(n) larger than its initial size."""
    c = {"embedding": Fraction(-1, 2), "hidden": 0, "readout": 0}
    chain = ex.residuals("standard", "sgd", "none", c)
    assert chain == (Fraction(-1, 2), -1, Fraction(-3, 2))
    assert not ex.is_stable("standard", "sgd", "none", c)
    maximal = ex.residuals("standard", "sgd", "none", {**c, "readout": Fraction(1, 2)})
    assert maximal == (0, 0, 0)


def test_adafactor_hidden_layers_may_not_grow_either():
    """Only alpha < 1/2 can tell: the constraint is then not implied by the activations."""
    weak = ex.Alignment("1/4", "1/4", "1/4")
    c = {"embedding": 0, "hidden": Fraction(-1, 4), "readout": 0}
    assert min(ex.residuals("standard", "adafactor", weak, c)) >= 0
    assert not ex.is_stable("standard", "adafactor", weak, c)
    assert ex.solve("standard", "adafactor", weak).c["hidden"] == 0


def test_small_rates_are_stable_and_move_nothing():
    case = ("mup", "adam", "full", dict.fromkeys(LAYERS, 3))
    small = ex.Solution(case[3], ex.residuals(*case), ex.is_stable(*case))
    assert (small.stable, small.nontrivial, small.feature_learning) == (True, False, False)


def test_hidden_layers_learn_features_beside_a_slow_embedding():
    case = ("mup", "adam", "full", {**ex.solve("mup", "adam", "full").c, "embedding": 3})
    slow = ex.Solution(case[3], ex.residuals(*case), ex.is_stable(*case))
    assert slow.residuals[0] > 0 and slow.nontrivial and slow.feature_learning


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["standard", "ntk"])
def test_standard_and_ntk_cannot_learn_features_in_tensor_programs(name, optimizer):
    solution = ex.solve(name, optimizer, ex.TENSOR_PROGRAMS)
    assert solution.nontrivial and not solution.feature_learning
    assert solution.residuals == (Fraction(1, 2), Fraction(1, 2), 0)
    lattice = [Fraction(k, 2) for k in range(-1, 4)]
    for values in itertools.product(lattice, repeat=3):
        case = (name, optimizer, ex.TENSOR_PROGRAMS, dict(zip(LAYERS, values, strict=True)))
        assert not (ex.is_stable(*case) and ex.residuals(*case)[-2] == 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mup", "mean_field"])
def test_mup_and_mean_field_learn_features_in_tensor_programs(name, optimizer):
    solution = ex.solve(name, optimizer, ex.TENSOR_PROGRAMS)
    assert solution.stable and solution.nontrivial and solution.feature_learning
    assert solution.to_dict()["lr"] == typed_rates(name, optimizer, "full")


@pytest.mark.parametrize(("optimizer", "kind"), COLUMNS)
@pytest.mark.parametrize(
    ("source", "target", "thetas"),
    [("standard", "ntk", ("0", "1/2", "1/2")), ("mup", "mean_field", ("1/2", "1/2", "1/2"))],
)
def test_shift_maps_the_published_columns(source, target, thetas, optimizer, kind):
    """It holds for all 36 pairs, the readouts limited by their initial scale included."""
    before, after = (typed_parameterization(name) for name in (source, target))
    rates, expected = (typed_rates(name, optimizer, kind) for name in (source, target))
    for layer, theta in zip(LAYERS, thetas, strict=True):
        moved, c = ex.shift(before[layer], -Fraction(rates[layer]), theta, optimizer)
        assert moved == after[layer]
        assert str(-c) == expected[layer]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_solutions_of_shifted_parameterizations_are_shifted(optimizer):
    for alignment in GRID:
        solution = ex.solve(ODD, optimizer, alignment)
        layers, c = [], {}
        for layer, theta in zip(LAYERS, ("1/3", "-2", "5/4"), strict=True):
            moved, c[layer] = ex.shift(ODD[layer], solution.c[layer], theta, optimizer)
            layers.append(moved)
        shifted = ex.solve(ex.Parameterization(*layers), optimizer, alignment)
        assert shifted.c == c
        assert shifted.residuals == solution.residuals


def test_a_fraction_is_exact_and_a_float_counts_as_printed():
    for text in ("1/2", "0.5", " 1/2 ", 0.5, Fraction(1, 2)):
        assert ex.fraction(text) == Fraction(1, 2)
    assert ex.fraction(0.1) == Fraction(1, 10)


@pytest.mark.parametrize(
    ("layer", "exponents", "constraint"),
    [
        ("embedding", (0, "1/2"), r"embedding needs a \+ b = 0, has 1/2"),
        ("hidden", (0, 1), r"hidden needs a \+ b = 1/2, has 1"),
        ("readout", (0, "1/4"), r"readout needs a \+ b >= 1/2, has 1/4"),
    ],
)
def test_instability_at_initialization_names_the_constraint(layer, exponents, constraint):
    layers = {k: typed_parameterization("standard")[k] for k in LAYERS}
    broken = ex.Parameterization(**{**layers, layer: ex.Layer(*exponents)})
    assert not ex.is_stable_at_init(broken)
    assert not ex.is_stable(broken, "adam", "full", dict.fromkeys(LAYERS, 9))
    with pytest.raises(PlanError, match=constraint):
        ex.solve(broken, "adam", "full")


def test_readout_alignment_defaults_to_the_common_values():
    alignment = ex.Alignment(1, "1/2", "3/4", omega_readout=0)
    assert alignment.at("hidden") == (1, Fraction(1, 2), Fraction(3, 4))
    assert alignment.at("readout") == (1, 0, Fraction(3, 4))
    assert ex.TENSOR_PROGRAMS.at("readout") == (1, 1, 1)
    given = ex.Alignment(1, 1, 1, omega_readout=0, alpha_readout="1/2", u_readout="1/4")
    assert given.at("readout") == (Fraction(1, 2), 0, Fraction(1, 4))


@pytest.mark.parametrize("optimizer", ex.OPTIMIZERS)
def test_the_printed_constraints_decide_what_is_stable(optimizer):
    """Table 2, every line evaluated, for all parameterisations and rates about the largest."""
    header, *rows = constraint_rows()
    texts = [row[header.index(optimizer)] for row in rows if row[header.index(optimizer)]]
    seen = set()
    steps = [Fraction(step, 2) for step in (-1, 0, 2)]
    for name, kind in itertools.product(ex.PARAMETERIZATION_TABLE, ex.ALIGNMENTS):
        table, alignment = ex.PARAMETERIZATION_TABLE[name], Fraction(1 if kind == "full" else 1 / 2)
        best = ex.solve(name, optimizer, kind).c
        for shifts in itertools.product(steps, repeat=3):
            c = {layer: best[layer] + shift for layer, shift in zip(ex.LAYERS, shifts, strict=True)}
            chain = ex.residuals(name, optimizer, kind, c)
            values = {"r_k": chain[0], "r_L": chain[1]}
            for letter, layer in zip("1lr", ex.LAYERS, strict=True):
                own = {"a": table[layer].a, "b": table[layer].b, "c": c[layer], "alpha": alignment}
                own |= {"u": alignment, "omega": Fraction(1, 2)}
                values |= {f"{symbol}_{letter}": value for symbol, value in own.items()}
            below = min(table.readout.scale, 2 * table.readout.a + c["readout"])
            values |= {f"g_{letter}": below + values[f"a_{letter}"] for letter in "1l"}
            printed = all(eval(text, {}, values) for text in texts)
            assert printed == ex.is_stable(name, optimizer, kind, c), (name, kind, c)
            seen.add(printed)
    assert seen == {True, False}
