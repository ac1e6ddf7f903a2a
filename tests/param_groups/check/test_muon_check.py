"""The check of Muon: conventions that transfer pass, with few tokens and with many; others fail."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from param_groups import Depth, Everett, Prescription, Role, Tuned, plan
from param_groups.check import judge, slopes, theory
from param_groups.check.measuring import Check, measure
from tests.param_groups.test_muon import RULES, Block, spectral

WIDTHS = (64, 128, 256)


class Own(Prescription):
    """A rule of no paper with Muon in it, right or off by a power of the width."""

    def __init__(self, width, power):
        self.width, self.optimizer, self.power = width, "muon", power

    def __call__(self, tensor):
        numbers = spectral(self.width, 64, adam_factor=0.02)(tensor)
        off = (self.width / 64) ** self.power if numbers.optimizer == "muon" else 1.0
        return replace(numbers, lr=numbers.lr * off)


def checked(rule, tokens):
    """(verdicts of the numbers, those that are bad in what is measured)."""

    def build(width, seed):
        model = Block(width)
        made = plan(model, RULES, rule(width), lr=0.02, absorb_multipliers=True)
        made.initialise(model, seed=seed)
        ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(seed))
        batch = (ids, ids.roll(1))
        return Check(model, made, [batch], lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))

    measurement = measure(build, WIDTHS, steps=2, seeds=range(2), device=torch.device("cpu"))
    numbers = {one.name: one.verdict for one in judge(measurement.plans)}
    found = slopes.fit(measurement)
    return numbers, [one for one in found if one.verdict in slopes.BAD]


@pytest.mark.parametrize("tokens", [16, 640])
@pytest.mark.parametrize("convention", ["spectral", "original", "match_rms"])
def test_a_convention_that_transfers_passes(convention, tokens):
    numbers, bad = checked(lambda n: spectral(n, 64, convention=convention), tokens)
    assert set(numbers.values()) == {theory.OK} and not bad


@pytest.mark.parametrize("tokens", [16, 640])
def test_match_rms_without_its_power_grows(tokens):
    # What AdamW does to the embedding would hide how the hidden layers change.
    fields = {"convention": "match_rms", "rate_exponent": 0.0, "adam_factor": 0.02}
    numbers, bad = checked(lambda n: spectral(n, 64, **fields), tokens)
    assert {numbers["up.weight"], numbers["down.weight"]} == {theory.GROWS}
    assert {one.verdict for one in bad if one.name == "down"} == {theory.GROWS}


@pytest.mark.parametrize("tokens", [16, 640])
@pytest.mark.parametrize(("power", "word"), [(0, "ok"), (0.5, "grows"), (-0.5, "vanishes")])
def test_a_rule_of_no_paper_is_held_to_stability_with_few_tokens_and_with_many(power, word, tokens):
    """An update's spectral norm is the rate; the size of its entries also goes with the tokens."""
    numbers, bad = checked(lambda n: Own(n, power), tokens)
    assert numbers["up.weight"] == word and bool(bad) == bool(power)
    updates = {one.name: one.verdict for one in bad if one.quantity == "update"}
    assert not power or {updates["up.weight"], updates["down.weight"]} == {word}


def test_depth_needs_branches_that_fall_with_it():
    class Blocks(nn.Module):
        def __init__(self, n, layers):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(n, n, bias=False) for _ in range(layers))

    rules = [type(RULES[0])("blocks.*.weight", Role.HIDDEN)]

    def made(depth, **fields):
        rule = Depth(spectral(32, 32), depth, **fields)
        applied = {"residual_multiplier": fields.get("base_depth", 1.0) / depth}
        return plan(Blocks(32, depth), rules, rule, lr=0.1, applied=applied)

    def plans(**fields):
        return {depth: made(depth, **fields) for depth in (2, 4, 8)}

    verdicts = {one.quantity: one.verdict for one in judge(plans(base_depth=2))}
    assert verdicts["factor"] == verdicts["rate"] == theory.OK
    assert theory.expected_of(plans()).residual == 1


def test_a_recipe_is_held_to_its_rules_paper():
    def made(n, base):
        init = {"token_embedding": 1.0, "mlp_in": 0.1, "mlp_out": 0.05, "readout": 0.01}
        return plan(
            Block(n), RULES, Tuned(Everett("mup", n, base), init), lr=0.1, absorb_multipliers=True
        )

    right = judge({n: made(n, 64) for n in (64, 128)})
    assert {one.verdict for one in right} == {theory.OK} and "Table 1" in right[0].source
    wrong = judge({n: made(n, n // 2) for n in (64, 128)})  # another base at every width
    assert theory.DIFFERS in {one.verdict for one in wrong}
