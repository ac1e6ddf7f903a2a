"""The check among planted mistakes: none of the wrong plans passes, and none of the right fails.

Numbers are judged in all cases, of the plan and of the optimiser. Where they are wrong the check
has failed, whatever training shows. What training shows is tried on samples: of the right plans,
and of wrong rates and starts with the verdicts on numbers left out.
"""

import functools

import pytest
import torch.nn.functional as F

from param_groups import Everett
from param_groups.check import Check, failed, fit, judge, measure
from param_groups.check.judging import judge_optimizers
from param_groups.check.reading import read
from param_groups.check.slopes import BAD, decided
from tests.param_groups.check import planted
from training.optim import optimizers

pytestmark = pytest.mark.xdist_group("planted")  # 198 plans, which test_audit_planted has, too
HALVES = (0, pytest.param(1, marks=pytest.mark.thorough))  # of the cases
QUANTITY = {"eps": "epsilon"}


@functools.cache
def cases():
    """Right and wrong plans; made by who looks at them, as they take seconds."""
    return [*planted.cases(seed=1, wrong=420, right=105)]


def check_of(case, size, seed=0, apart=False):
    """The check of a case; `apart` plants in the optimiser and leaves the plan right."""
    model, right = planted.built(case.subject)[size]
    wrong = case.plan(size)
    groups = wrong.groups(model, check=False, several=True)
    name = str(case.subject.make(size).optimizer)
    optimizer, made = optimizers.build(name, groups), right if apart else wrong
    return Check(model, made, [planted.batch(model, seed)], planted.loss, optimizer=optimizer)


def words(judged):
    return {(one.name, one.quantity.split()[-1]) for one in judged if one.verdict in BAD}


def names(case):
    rows = planted.right_plans(case.subject)[case.subject.sizes[0]].rows
    return {row.name for row in rows if row.role in planted.KINDS[case.kind]}


@pytest.mark.parametrize("half", HALVES)
def test_the_numbers_of_planted_plans_are_called_wrong_and_those_of_right_ones_right(half):
    missed = []
    for case in cases()[half::2]:
        found = words(judge({size: case.plan(size) for size in case.subject.sizes}))
        if not case.power:
            missed += [(str(case), found)] if found else []
            continue
        number = QUANTITY.get(case.number, case.number)
        named = {name for name, quantity in found if quantity == number}
        # Among few tensors of a kind a rule of no paper may be wrong in the others as well.
        whole = case.subject.label.startswith("mine") or named <= names(case)
        missed += [] if named and whole else [(str(case), found)]
    assert not missed, missed


@pytest.mark.parametrize("half", HALVES)
def test_an_optimiser_with_the_mistake_beside_a_right_plan_is_called_wrong(half):
    missed, tried = [], 0
    for case in cases()[half::2]:
        if case.number == "start":  # is no number of an optimiser
            continue
        tried += 1
        plans = planted.right_plans(case.subject)
        checks = {n: check_of(case, n, apart=True) for n in case.subject.sizes}
        held = {n: read(one.model, [one.optimizer], now=True) for n, one in checks.items()}
        found = words(judge_optimizers(plans, held))
        number = {"eps": "epsilon", "decay": "weight_decay"}.get(case.number, case.number)
        right = number in {quantity for _, quantity in found} if case.power else not found
        missed += [] if right else [(str(case), found)]
    assert tried > 150 and not missed, missed


def trained(case):
    """Slopes of what training shows, with more seeds where noise leaves one open."""
    run = lambda seeds: measure(
        lambda size, seed: check_of(case, size, seed), case.subject.sizes, steps=1, seeds=seeds
    )
    return decided(run, 3)[1]


@pytest.mark.parametrize("part", HALVES)
def test_right_plans_pass_in_training(part):
    """One of every optimiser, and routers whose logits start at order one, which noise shakes."""
    right = [c for c in cases() if not c.power]
    shaken = [
        c for c in right if any(w in c.subject.label for w in ("dinan hybrid sgd", "experts"))
    ]
    tried = [*dict.fromkeys([*shaken, *right[::7]])]
    assert len(tried) >= 16 and len(shaken) >= 3
    for case in tried[part::2]:
        slopes = trained(case)
        assert not failed(slopes), (str(case), [one for one in slopes if one.verdict in BAD])


@pytest.mark.thorough
@pytest.mark.parametrize("part", HALVES)
def test_wrong_rates_and_starts_fail_in_training_alone(part):
    """The update shows a wrong rate; a wrong start shows in what the module makes."""
    wrong = [c for c in cases() if c.power and c.only is None and c.number in ("rate", "start")]
    wrong = [c for c in wrong if c.kind in ("query", "hidden", "readout", "embedding")][part::12]
    assert len(wrong) > 7
    for case in wrong:
        assert failed(trained(case)), str(case)


# Factors of a forward pass that no plan knows


SUBJECT = planted.Subject("mup", lambda n: Everett("mup", n, 32))
PLACES = "tokens places stream scores mixed first_branch second_branch logits".split()


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
            x = x + block.output(mixed) * at("first_branch")
            h = block.norms[1](x)
            x = x + block.down(F.relu(block.up(h))) * at("second_branch")
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


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("where", PLACES)
def test_a_factor_that_no_plan_knows_is_seen_from_above_and_from_below(where, half):
    power = 1.0 if (PLACES.index(where) + half) % 2 else -1.0
    assert {"grows", "vanishes"} & set(bad(where, power).values())


@pytest.mark.parametrize("power", [-0.5, 0.5])
def test_a_factor_behind_the_readout_is_seen_in_the_gradient_that_the_loss_hands_it(power):
    assert bad("logits", power)["readout", "gradient"] == ("grows" if power > 0 else "vanishes")
