"""What plan, guard and a prescription of one's own make of arguments of another kind."""

import json
import os
import random
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
    Plan,
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
    with pytest.raises(PlanError, match="is tied to readout.*eps 1, .*eps 2, .*untie"):
        plan(model, (Rule("tokens.weight", Role.TOKEN_EMBEDDING),), Apart("standard", 8, 8), lr=0.1)


ODD = (None, True, False, "", "0.1", "zeros", "é" * 300, -1, 0, 3, 2**70, -0.5, 1e308, float("nan"))
ODD += (float("inf"), [], [1], [[]], {}, {"a": 1}, ["weight"], "weight")


def fuzzed(draw, saved):
    """A saved plan with one to three values replaced, taken out, added or doubled."""
    data = json.loads(saved)
    for _ in range(draw.choice((1, 1, 2, 3))):
        place = draw.choice([data, *data["rows"], *data["forward"], data["prescription"]])
        if not isinstance(place, dict) or not place:
            continue
        key, kind = draw.choice([*place]), draw.random()
        if kind < 0.8:
            place[key] = draw.choice(ODD)
        elif kind < 0.88:
            del place[key]
        elif kind < 0.92:
            place["other"] = draw.choice(ODD)
        else:
            data["rows"] = [*data["rows"], draw.choice(data["rows"])] if data["rows"] else []
        if not all(isinstance(data.get(key), list) for key in ("rows", "forward")):
            break
        if not all(isinstance(row, dict) for row in (*data["rows"], *data["forward"])):
            break
        if not isinstance(data.get("prescription"), dict):
            break
    return data


def test_a_saved_plan_with_odd_values_works_or_is_one_line():
    """As many as FUZZ says, by default 10,000: `FUZZ=5000000 pytest ...` takes about an hour."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rules = [Rule("*.weight", Role.HIDDEN), Rule("*.bias", Role.HIDDEN_BIAS)]
    saved = dumps(made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), rules))
    draw, refused = random.Random(0), []
    for _ in range(int(os.environ.get("FUZZ", 10_000))):
        data = fuzzed(draw, saved)
        try:
            found = Plan.from_dict(data)
            found.table(), dumps(found), found.differences(found)
            found.initialise(model, 0)
            assert len(found.groups(model)) > 0
        except PlanError as error:
            refused += [str(error)]
    assert len(refused) > 1000 and not any("\n" in line for line in refused)
