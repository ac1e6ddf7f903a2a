"""Factors of a forward pass that no plan knows are seen, whether something grows or vanishes."""

import pytest
import torch.nn.functional as F

from param_groups import Everett
from param_groups.check import Check, fit, measure
from param_groups.check.slopes import BAD
from tests.param_groups.check import planted

SUBJECT = planted.Subject("mup", lambda n: Everett("mup", n, 32))
PLACES = (
    "tokens",
    "places",
    "stream",
    "scores",
    "mixed",
    "first branch",
    "second branch",
    "logits",
)


class Factored(planted.Tiny):
    """The model with a factor at one place."""

    where, factor = "", 1.0

    def forward(self, x):
        at = lambda where: self.factor if where == self.where else 1.0
        split = lambda t: t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        x = self.first(x) * at("tokens") + self.places.weight * at("places")
        x = x * at("stream")
        for block in self.blocks:
            h = block.norms[0](x)
            q, k, v = (split(part(h)) for part in (block.query, block.key, block.value))
            scale = self.scale * at("scores")
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
            mixed = mixed.transpose(1, 2).flatten(2) * at("mixed")
            x = x + block.output(mixed) * at("first branch")
            h = block.norms[1](x)
            x = x + block.down(F.relu(block.up(h))) * at("second branch")
        return self.readout(self.norm(x)) * at("logits")


def bad(where, power):
    def task(width, seed):
        model, made = planted.built(SUBJECT)[width]
        model.__class__, model.where, model.factor = Factored, where, (width / 32) ** power
        return Check(model, made, [planted.batch(model, seed)], planted.loss)

    slopes = fit(measure(task, (32, 64, 128), steps=1, seeds=range(4)))
    return {(one.name, one.quantity): one.verdict for one in slopes if one.verdict in BAD}


def test_without_a_factor_nothing_is_wrong():
    assert not bad("", 0.0)


@pytest.mark.parametrize("power", [-1.0, 1.0])
@pytest.mark.parametrize("where", PLACES)
def test_a_factor_that_no_plan_knows_is_seen_from_above_and_from_below(where, power):
    assert {"grows", "vanishes"} & set(bad(where, power).values())


@pytest.mark.parametrize("power", [-0.5, 0.5])
def test_a_factor_behind_the_readout_is_seen_in_the_gradient_that_the_loss_hands_it(power):
    assert bad("logits", power)["readout", "gradient"] == ("grows" if power > 0 else "vanishes")
