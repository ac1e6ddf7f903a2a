"""Multipliers for other trainers: applied as they apply them, every tensor gets the plan's rate."""

import re
from dataclasses import replace

import pytest
from torch import nn

from param_groups import Everett, PlanError, Role, Rule, plan
from param_groups.export import KEYS, export
from param_groups.plan import DECAY_MODES

WIDTH = 16
RULES = (
    Rule("0.weight", Role.TOKEN_EMBEDDING),
    Rule("1.?.weight", Role.MLP_IN),
    Rule("2.weight", Role.READOUT),
)


def made(parameterization="standard", **settings):
    blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    model = nn.Sequential(nn.Embedding(9, WIDTH), blocks, nn.Linear(WIDTH, 9, bias=False))
    settings = {"lr": 0.1, "weight_decay": 0.2, "decay_mode": "independent", **settings}
    return plan(model, RULES, Everett(parameterization, WIDTH, 4), **settings)


def faster(name):
    """A plan in which one block's tensor has a rate of its own."""
    rows = tuple(replace(row, lr=2 * row.lr) if row.name == name else row for row in made().rows)
    return replace(made(), rows=rows)


@pytest.mark.parametrize("trainer", KEYS)
@pytest.mark.parametrize(
    "settings",
    [
        *({"decay_mode": mode} for mode in DECAY_MODES),
        {"weight_decay": 0.0},
    ],
)
def test_each_tensor_is_matched_once_and_gets_its_numbers(trainer, settings):
    numbers = made(**settings)
    pattern, rate, decay = KEYS[trainer]
    entries = export(numbers, trainer)
    assert len(entries) == 2
    for row in numbers.rows:
        (entry,) = [entry for entry in entries if re.search(entry[pattern], row.name)]
        assert numbers.lr * entry[rate] == pytest.approx(row.lr, rel=1e-14)
        assert numbers.weight_decay * entry[decay] == pytest.approx(row.weight_decay, rel=1e-14)
        assert numbers.weight_decay or entry[decay] == 1.0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (lambda: made("mup"), "cannot multiply '0.weight' by 4; plan with absorb_multipliers"),
        (lambda: made("mup", absorb_multipliers=True), "one epsilon, but '0.weight' has"),
        (lambda: made(applied={"logit_multiplier": 1.0}), "not apply logit_multiplier 1; export"),
        (lambda: made(lr=0.0, weight_decay=0.0), "a learning rate of 0"),
        (lambda: faster("1.1.weight"), "'1.0.weight' has other numbers than the same tensor"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(numbers, message):
    with pytest.raises(PlanError, match=message):
        export(numbers(), "torchtitan")
    with pytest.raises(PlanError, match="unknown trainer 'torchtitn'.*'torchtitan'"):
        export(made(), "torchtitn")
