"""What is expected of slopes: the exponents that follow from numbers are those of the papers."""

import csv
import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from measure import theory
from measure.theory import expectation, expected_update, power, theory_of
from param_groups import (
    Bordelon,
    Dinan,
    Everett,
    Numbers,
    Prescription,
    Role,
    Rule,
    plan,
)
from param_groups.exponents import HALF, Alignment

# Until commit 10aa469 these exponents were written down by hand for each prescription; the table
# was frozen from there. Columns are (aim, prediction) by part, and multiplier times update.
with open(Path(__file__).with_name("coordinate_theory.csv"), newline="") as file:
    FROZEN = {row.pop("prescription"): row for row in csv.DictReader(file)}

MATRICES = {
    Role.PATCH_EMBEDDING: ("width", 12),
    Role.POSITION_EMBEDDING: (5, "width"),
    Role.QUERY: ("width", "width"),
    Role.KEY: ("width", "width"),
    Role.VALUE: ("width", "width"),
    Role.ATTENTION_OUTPUT: ("width", "width"),
    Role.MLP_IN: ("wide", "width"),
    Role.MLP_OUT: ("width", "wide"),
    Role.READOUT: (10, "width"),
    Role.READOUT_BIAS: (10,),
}
BART = {Role.TOKEN_EMBEDDING: (40, "width")} | {
    role: shape
    for role, shape in MATRICES.items()
    if role not in (Role.PATCH_EMBEDDING, Role.READOUT, Role.READOUT_BIAS)
}
RULES = [Rule(f"{role}.weight", role) for role in MATRICES | BART]


def plan_of(rule, shapes=MATRICES, **options):
    """The plan of one matrix per role."""
    sizes = {"width": rule.width, "wide": 4 * rule.width}
    model = nn.ModuleDict()
    for role, shape in shapes.items():
        owner = nn.Module()
        shape = [sizes.get(size, size) for size in shape]
        owner.weight = nn.Parameter(torch.empty(shape, device="meta"))
        owner.multiplier = 1.0
        model[str(role)] = owner
    used = [rule_ for rule_ in RULES if rule_.role in shapes]
    head_dim = getattr(rule, "head_dim", 16)
    applied = rule.forward(head_dim if Role.QUERY in shapes else None)
    return plan(model, used, rule, lr=0.1, applied=applied, head_dim=head_dim, **options)


def of_label(label):
    """A row's plans by size: {size: plan}."""
    paper, *words = label.split()
    if paper == "everett":
        name, optimizer, alignment, *value = words
        aligned = Alignment(alpha=1, omega=value[0], u=1) if value else alignment
        fields = {"optimizer": optimizer, "alignment": aligned}
        fields |= {"hidden_layers": 1} if value else {}  # what the table is for
        make = lambda n: Everett(name, n, 32, **fields)
    elif paper == "bordelon":
        size, optimizer, alpha = words
        key = "alpha_depth" if size == "depth" else "alpha_attention"
        fields = {
            "head_dim": 16,
            "heads": 4,
            "depth": 2,
            "optimizer": optimizer,
            "zero_readout": optimizer != "adam_atan2",
            key: float(alpha),
        }
        scan = "heads" if size == "width" else size
        make = lambda n: Bordelon(**fields | {scan: n})
    else:
        strategy, optimizer = words
        fields = {
            "optimizer": optimizer,
            "init": paper.removeprefix("dinan-") if "-" in paper else "vit",
            "strategy": strategy,
        }
        if "=" in strategy:
            fields |= {"strategy": "meta_principled", "s": float(strategy.split("=")[1])}
        make = lambda n: Dinan(n, **fields)
    return {n: plan_of(make(n), BART if paper == "dinan-bart" else MATRICES) for n in (8, 48)}


@pytest.mark.parametrize("label", FROZEN)
def test_exponents_from_numbers_are_those_that_were_written_by_hand(label):
    plans, row = of_label(label), FROZEN[label]
    found = theory_of(plans)
    if set(row.values()) == {"-"}:
        assert found is None
        return
    for part in ("embedding", "hidden", "logits"):
        assert expectation(found, "init", part)[1] == Fraction(row[f"init {part}"]), part
        expected = Fraction(row[f"aim {part}"]), Fraction(row[f"first {part}"])
        assert expectation(found, "change", part) == expected, part
    for name, role in {
        "embedding": Role.POSITION_EMBEDDING,
        "hidden": Role.MLP_OUT,
        "readout": Role.READOUT,
        "query": Role.QUERY,
    }.items():
        aim, first = expected_update(f"{role}.weight", plans, found)
        small, large = (plans[n][f"{role}.weight"].multiplier for n in (8, 48))
        scaled = power(small, large, 6)  # the table is of multiplier times update
        assert aim + scaled == Fraction(row[f"update {name}"]), name
        if name == "query":
            assert first + scaled == Fraction(row["first query"])


# ------------------------------------------------------------------------------------------------
# The papers' closed forms


@pytest.mark.parametrize(
    ("name", "alignment", "part", "aim", "predicted"),
    [
        ("standard", "full", "logits", 0, "1/2"),
        ("ntk", "full", "logits", 0, "1/2"),
        ("mup", "full", "logits", 0, 0),
        ("mean_field", "full", "logits", 0, 0),
        ("standard", "full", "hidden", 0, 0),
        ("mup", "full", "embedding", 0, 0),
        ("standard", "none", "hidden", 0, "1/2"),
        ("standard", "none", "logits", 0, 1),
        ("mean_field", "none", "logits", 0, "1/2"),
        ("mup", "none", "logits", 0, "1/2"),
        ("standard", "global", "hidden", 0, 1),
        ("standard", "global", "logits", 0, "3/2"),
        ("mup", "global", "embedding", 0, "1/2"),
        ("mean_field", "global", "hidden", 0, "1/2"),
    ],
)
def test_changes_predicted_for_adam(name, alignment, part, aim, predicted):
    """First order, alpha = 1, omega = 1 at the readout: max of d - alpha and a + b + r - omega."""
    found = theory_of(of_label(f"everett {name} adam {alignment}"))
    assert expectation(found, "change", part) == (Fraction(aim), Fraction(predicted))


@pytest.mark.parametrize("name", ["mup", "mean_field"])
def test_the_two_adafactor_cases_whose_logits_shrink_in_theory(name):
    """Errata of Everett et al.: r_{L+1} = 1/2 for muP and mean field without alignment."""
    found = theory_of(of_label(f"everett {name} adafactor none"))
    assert expectation(found, "change", "logits")[0] == -HALF


@pytest.mark.parametrize("s", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_dinan_changes_activations_as_s_says(s, optimizer):
    """Footnote 8: hidden changes go as n^(-(1 - s)/2), logits change by a constant."""
    found = theory_of(of_label(f"dinan s={s} {optimizer}"))
    assert expectation(found, "change", "hidden") == (Fraction(s - 1) / 2,) * 2
    assert expectation(found, "change", "logits") == (0, 0)
    assert expectation(found, "init", "logits") == (-Fraction(s) / 2,) * 2


# ------------------------------------------------------------------------------------------------
# A plan of one's own


@dataclasses.dataclass(frozen=True)
class Mine(Prescription):
    """Some muP of a user's: rates of hidden matrices fall by n^(-rate), Adam or SGD."""

    width: int
    optimizer: str = "adam"
    rate: float = 1.0
    alignment: str | None = None

    def numbers(self, role, fan_in, fan_out):
        hidden = {"adam": self.width**-self.rate, "sgd": self.width ** (1 - self.rate)}
        lr = {"adam": 1 / self.width, "sgd": 1 / self.width}[self.optimizer]
        if role in (Role.PATCH_EMBEDDING, Role.POSITION_EMBEDDING):
            return Numbers(fan_in**-0.5, lr=self.width if self.optimizer == "sgd" else 1.0)
        if role in (Role.READOUT, Role.READOUT_BIAS):
            return Numbers(1 / self.width if role is Role.READOUT else 0.0, lr=lr)
        return Numbers(fan_in**-0.5, lr=hidden[self.optimizer])

    def attention_exponent(self):
        return -1.0


def plans_of_mine(**fields):
    return {n: plan_of(Mine(n, **fields)) for n in (8, 48)}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("rate", "grows"), [(1.0, 0), (0.5, HALF), (1.5, 0)])
def test_a_prescription_of_ones_own_is_predicted_from_the_plans_numbers(optimizer, rate, grows):
    """muP's shift with unit multipliers: its exponents are those of maximal-update (s = 1)."""
    plans = plans_of_mine(optimizer=optimizer, rate=rate)
    found = theory_of(plans)
    assert theory.prescription_of(plans[8]) is None
    assert expectation(found, "change", "hidden") == (0, grows)
    assert expectation(found, "change", "logits") == (0, grows)
    assert expectation(found, "init", "logits") == (-HALF, -HALF)
    aim, first = expected_update("query.weight", plans, found)
    assert aim == first == -Fraction(rate)
    assert expected_update("readout_bias.weight", plans, found)[0] == -1


def test_a_prescription_of_ones_own_may_say_what_alignment_it_assumes():
    found = theory_of(plans_of_mine(rate=0.5, alignment="none"))
    assert expectation(found, "change", "hidden") == (0, HALF)
    assert theory.assumed_alignment(plan_of(Mine(8))) is None
    assert found.alignment.alpha == HALF


@pytest.mark.parametrize("alignment", ["full", "none", None])
def test_rates_that_grow_under_what_they_assume_are_no_aim(alignment):
    """A constant rate of hidden matrices: saying an alignment does not make its growth right."""
    found = theory_of(plans_of_mine(rate=0.0, alignment=alignment))
    assert expectation(found, "change", "hidden") == (0, 1)
    assert not theory.has_exceptions(found, "change", "hidden")
    right = theory_of(plans_of_mine(rate=0.5 if alignment == "none" else 1.0, alignment=alignment))
    assert theory.has_exceptions(right, "change", "hidden") == (alignment is not None)
    assert not theory.has_exceptions(right, "init", "hidden")


@pytest.mark.parametrize("size", ["head_dim", "depth"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_rule_under_another_name_is_predicted_as_the_papers_is(size, optimizer, alpha):
    """From the rows and the forward factors that a plan keeps; nothing is assumed for its aims."""
    plans = of_label(f"bordelon {size} {optimizer} {alpha}")
    renamed = {
        n: dataclasses.replace(found, prescription={**found.prescription, "name": "mine"})
        for n, found in plans.items()
    }
    papers, mine = theory_of(plans), theory_of(renamed)
    assert mine == dataclasses.replace(papers, alignment=None)
    for name in ("query.weight", "mlp_out.weight", "position_embedding.weight"):
        assert expected_update(name, renamed, mine) == expected_update(name, plans, papers)


def test_a_plan_changed_by_hand_is_held_to_its_prescription_or_else_taken_at_its_word():
    """Of a paper's rule the numbers are known; of any other they are those of the rows."""

    def faster(plans, name):
        def row_of(row, n):
            return dataclasses.replace(row, lr=row.lr * n) if row.name == name else row

        return {
            n: dataclasses.replace(found, rows=tuple(row_of(row, n) for row in found.rows))
            for n, found in plans.items()
        }

    known = faster(of_label("everett mup adam full"), "mlp_in.weight")
    assert expected_update("mlp_in.weight", known, theory_of(known)) == (-1, -1)
    assert expectation(theory_of(known), "change", "hidden") == (0, 0)
    own = faster(plans_of_mine(), "mlp_in.weight")
    assert expected_update("mlp_in.weight", own, theory_of(own)) == (0, 0)
    assert expected_update("query.weight", own, theory_of(own)) == (-1, -1)
    assert expectation(theory_of(own), "change", "hidden") == (0, 1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adafactor"])
def test_absorbed_multipliers_move_into_the_update(optimizer):
    rule = {n: Everett("mup", n, 32, optimizer=optimizer) for n in (8, 48)}
    plain, absorbed = (
        {n: plan_of(rule[n], absorb_multipliers=absorb) for n in rule} for absorb in (False, True)
    )
    for name in ("position_embedding.weight", "mlp_out.weight", "readout.weight"):
        before, after = (
            expected_update(name, plans, theory_of(plans))[0] for plans in (plain, absorbed)
        )
        multiplier = power(*(plain[n][name].multiplier for n in (8, 48)), 6)
        assert after == before + multiplier


def test_parameter_scaling_moves_what_starts_at_zero_by_the_floor():
    for absorb in (False, True):
        plans = {
            n: plan_of(Everett("mup", n, 32, optimizer="adafactor"), absorb_multipliers=absorb)
            for n in (8, 48)
        }
        assert expected_update("readout_bias.weight", plans, theory_of(plans))[0] == 0


def test_where_nothing_follows_from_the_numbers_activations_are_to_stay_constant():
    """BART's one initial std, an optimiser of no family, depths under an unknown prescription."""
    unknown = {
        n: dataclasses.replace(found, prescription={"optimizer": "mine"})
        for n, found in plans_of_mine().items()
    }
    depths = {
        n: dataclasses.replace(found, prescription={"depth": n}, forward=None)
        for n, found in plans_of_mine().items()
    }
    for plans in (of_label("dinan-bart standard adam"), unknown, depths):
        assert theory_of(plans) is None
    assert expectation(None, "init", "logits") == (None, None)
    assert expectation(None, "change", "hidden") == (0, 0)
    assert expected_update("query.weight", unknown, None) == (None, None)
    bart = of_label("dinan-bart neural_tangent adam")
    assert expected_update("query.weight", bart, None) == (Fraction(-3, 2),) * 2  # the rate


@pytest.mark.parametrize(
    "rule",
    [
        Everett("mup", 64, 32),
        Everett("ntk", 64, 32, alignment=Alignment("3/4", "1/2", "3/4")),
        Everett("mup", 64, 32, alignment=Alignment(alpha=1, omega=1, u=1), hidden_layers=3),
        Dinan(width=64),
        Bordelon(head_dim=16, heads=4, depth=2),
    ],
)
def test_a_prescription_is_read_back_from_its_plan(rule):
    saved = json.loads(json.dumps(rule.describe()))
    numbers = dataclasses.replace(plan_of(Mine(8)), prescription=saved)
    assert theory.prescription_of(numbers) == rule
