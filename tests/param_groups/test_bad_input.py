"""What plan, guard and a prescription of one's own make of arguments of another kind."""

import json
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from param_groups import (
    Bordelon,
    Depth,
    Dinan,
    Everett,
    Numbers,
    PlanError,
    Prescription,
    Role,
    Rule,
    Tensor,
    guard,
    plan,
)
from param_groups.plan import dumps

RULES = [Rule("weight", Role.HIDDEN, trunk=False)]
RULE = Everett("standard", 8, 4)


def made(model=None, rules=RULES, prescription=RULE, **options):
    model = nn.Linear(8, 8, bias=False) if model is None else model
    return plan(model, rules, prescription, **{"lr": 0.1, **options})


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5])
def test_numbers_of_other_libraries_are_as_good_as_pythons(half):
    """And none of them is left in what is saved as JSON."""
    eight = np.int64(8)
    own = made(
        prescription=Depth(Everett("mup", eight, 4), np.int32(4), alpha=half),
        lr=half,
        applied={"residual_multiplier": 0.5},
    )
    other = made(
        prescription=Depth(Everett("mup", 8, 4), 4, alpha=0.5),
        lr=0.5,
        applied={"residual_multiplier": 0.5},
    )
    assert json.loads(json.dumps(own.prescription))["width"] == 8
    assert own.rows == other.rows
    if not isinstance(half, Fraction):
        assert dumps(own) == dumps(other)
    query = Tensor("query", 16, 16)
    assert Bordelon(eight, np.int64(2), 4)(query) == Bordelon(8, 2, 4)(query)
    assert Dinan(eight).describe() == Dinan(8).describe()


class Bare(Prescription):
    """The least that a prescription of one's own can be; no dataclass."""

    width, optimizer = 8, "adamw"

    def __call__(self, tensor):
        return Numbers(0.5, multiplier=2.0)


@dataclass
class Kept(Bare):
    width: float = 8
    optimizer: str = "adamw"


def test_a_prescription_of_ones_own_may_name_adamw_and_need_not_be_a_dataclass():
    for rule in (Bare(), Kept()):
        numbers = made(prescription=rule, absorb_multipliers=True)
        assert (numbers["weight"].init_std, numbers["weight"].lr) == (1.0, 0.2)
        name = type(rule).__name__.lower()
        assert numbers.prescription == {"name": name, "width": 8, "optimizer": "adamw"}
        model = torch.nn.Linear(8, 8, bias=False)
        numbers.initialise(model, seed=0)
        with pytest.raises(PlanError, match="is of the family 'sgd'"):
            guard(torch.optim.SGD(numbers.groups(model)), numbers)


def test_an_embedding_is_no_readout_where_their_epsilons_differ():
    class Apart(Everett):
        """Equal rates, and an epsilon of its own for the readout."""

        def __call__(self, tensor):
            numbers = super().__call__(tensor)
            return replace(numbers, eps=2.0) if tensor.role is Role.READOUT else numbers

    model = nn.Module()
    model.tokens, model.readout = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    model.readout.weight = model.tokens.weight
    with pytest.raises(PlanError, match="is tied to readout.*eps 1, .*eps 2, .*Tied"):
        plan(model, (Rule("tokens.weight", Role.TOKEN_EMBEDDING),), Apart("standard", 8, 8), lr=0.1)
