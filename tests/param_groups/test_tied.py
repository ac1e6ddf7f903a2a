"""Tied embeddings trained from scratch, and keys that heads share: numbers, checks and refusals."""

import pytest
import torch
from torch import nn

from param_groups import (
    CompleteP,
    Decay,
    Depth,
    EpsFollows,
    Everett,
    Muon,
    PlanError,
    Tied,
    fans_of,
    plan,
    rules_for,
)
from param_groups.check import Check, fit, judge, measure
from param_groups.check.measuring import OWN
from param_groups.check.stock import HEAD_DIM, TOKENS, batch_of, loss_of, sizes
from param_groups.check.theory import EXCEPTION, GROWS, OK, VANISHES
from param_groups.prescription import Size
from param_groups.stock.rules import stock

WIDTHS = (64, 128, 256)


def everett(width, **more):
    return Everett("mup", width, 64, qk_exponent=-0.5, **{"embedding_std": 0.25, **more})


def gpt2(width, factor=None):
    """A small GPT-2, tied, which multiplies its logits."""
    model = stock("hf:gpt2", **sizes("hf:gpt2", width), tie_word_embeddings=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    factor = 64 / width if factor is None else factor
    model.lm_head.register_forward_hook(lambda _, inputs, output: output * factor)
    return model


def planned(width, rule, model=None, **more):
    model = model or gpt2(width)
    applied = {"logit_multiplier": 64 / width}
    keys = {"lr": 2**-8, "absorb_multipliers": True, "applied": applied, **more}
    return model, plan(model, rules_for(model), rule, **keys)


@pytest.mark.parametrize("around", [lambda r: r, Muon, EpsFollows, lambda r: Depth(r, 2, 2)])
def test_a_tied_tensor_has_the_embeddings_numbers_and_all_others_their_own(around):
    _, tied = planned(128, around(Tied(everett(128))))
    other, untied = (model := stock("hf:gpt2", **sizes("hf:gpt2", 128))), None
    untied = plan(other, rules_for(model), around(everett(128)), lr=2**-8, absorb_multipliers=True)
    for row in tied.rows:
        same = untied[row.name]
        assert (row.lr, row.eps, row.init_std) == (same.lr, same.eps, same.init_std)
    assert tied["lm_head.weight"] is tied["transformer.wte.weight"]
    assert ("logit_multiplier", 0.5) in [(one.name, one.value) for one in tied.forward]


def test_order_changes_no_number():
    inside = planned(128, Tied(Muon(Decay(everett(128), exponent=-1))))[1]
    outside = planned(128, Decay(Muon(Tied(everett(128))), exponent=-1))[1]
    assert not inside.differences(outside)


def test_at_another_size_the_factors_are_those_of_that_size():
    rule = Depth(everett(64), 2, 2)
    size = Size(width=256, depth=8)
    expected = rule.forward(size)._replace(logit_multiplier=0.25, ties=True)
    assert Tied(rule).forward(size) == expected and expected.residual_multiplier == 0.25


def test_with_a_base_model_the_logits_follow_its_width():
    rule = Tied(everett(64))
    with torch.device("meta"):
        base = fans_of(gpt2(64), rules_for(gpt2(64)))
    _, made = planned(128, rule, base=base)
    assert ("logit_multiplier", 0.5) in [(one.name, one.value) for one in made.forward]


# What the check measures


def measured(around, power=1.0, seeds=2):
    def task(width, seed):
        model, made = planned(width, around(width), gpt2(width, (64 / width) ** power))
        return Check(model, made, [batch_of("hf:gpt2", seed)], loss_of)

    return measure(task, WIDTHS, steps=2, seeds=range(seeds))


def coordinate(around, power=1.0, seeds=2):
    done = measured(around, power, seeds)
    return fit(done), judge(done.plans)


@pytest.mark.parametrize("around", [Tied, lambda rule: Muon(Tied(rule))])
def test_logits_start_at_order_one_and_no_number_is_off(around):
    slopes, numbers = coordinate(lambda width: around(everett(width)))
    assert {one.verdict for one in numbers} == {OK}
    words = {s.verdict for s in slopes if s.verdict != "-"}  # two seeds leave gradients unclear
    assert not words & {GROWS, VANISHES}
    whole, own = starts(slopes)
    assert whole.aim == own.aim == 0 and whole.predicted == -0.5
    assert own.verdict == OK and whole.verdict in (OK, EXCEPTION) and -0.5 < whole.slope < own.slope


def starts(slopes):
    """Those of all logits, and of the logit of each position's token."""
    found = {s.name: s for s in slopes if s.quantity == "init" and s.part == "logits"}
    return found["lm_head"], found["lm_head" + OWN]


def test_the_start_of_tied_logits_is_that_of_their_own_and_of_the_others():
    """RMS^2 = own^2 / V + (initial scale x base width)^2 / width: between 0 and -1/2, by V."""
    points = [p for p in measured(lambda n: Tied(everett(n))).points if p.quantity == "init"]
    names = ("lm_head", "lm_head" + OWN)
    for point, own in zip(*([p for p in points if p.name == n] for n in names), strict=True):
        others = (0.25 * 64) ** 2 / point.width
        assert point.rms**2 == pytest.approx(own.rms**2 / TOKENS + others, rel=0.25)
        assert own.rms == pytest.approx(3.4, rel=0.35)  # 16 times the embedding's share


OFF = [(0.5, GROWS), (1.5, VANISHES)]
OFF += [pytest.param(*one, marks=pytest.mark.thorough) for one in ((0, GROWS), (2, VANISHES))]


@pytest.mark.parametrize(("power", "word"), OFF)
def test_a_power_of_the_factor_that_the_model_does_not_apply_shows(power, word):
    """At the start already; half a power too many or too few is in one of the two rows."""
    slopes, _ = coordinate(lambda width: Tied(everett(width, embedding_std=1.0)), power, seeds=4)
    assert word in {one.verdict for one in starts(slopes)}


# Keys that heads share


def llama(width, heads_per_key, head_dim=HEAD_DIM):
    keys = {"num_key_value_heads": width // head_dim // heads_per_key, "head_dim": head_dim}
    return stock("hf:llama", **{**sizes("hf:llama", width), **keys})


@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_a_ratio_that_is_one_at_all_widths_has_no_power(ratio):
    """Without a base model, and with one that says the same."""
    with torch.device("meta"):
        wide, base = llama(256, ratio), llama(128, ratio)
    keys = {"lr": 0.1, "absorb_multipliers": True}
    keys["applied"] = {"residual_multiplier": 1.0}
    rule = CompleteP(256, 128, 2, 2, qk_exponent=-0.5)
    alone = plan(wide, rules_for(wide), rule, **keys)
    several = CompleteP(128, 128, 2, 2, qk_exponent=-0.5)
    beside = plan(wide, rules_for(wide), several, base=base, **keys)
    for row in alone.rows:
        assert row.eps == pytest.approx(beside[row.name].eps, rel=1e-12)
    sgd = Everett("mup", 256, 128, "sgd", qk_exponent=-0.5)
    assert plan(wide, rules_for(wide), sgd, lr=0.1, absorb_multipliers=True)


def test_a_ratio_that_changes_is_refused_beside_a_base_model_and_by_the_check():
    with torch.device("meta"):
        models = {width: llama(width, width // 64) for width in (128, 256)}
    rule = CompleteP(128, 128, 2, 2, qk_exponent=-0.5)
    keys = {"lr": 0.1, "absorb_multipliers": True}
    with pytest.raises(PlanError, match="'.*k_proj.weight' .key. has 1 times .*share a key"):
        plan(models[256], rules_for(models[256]), rule, base=models[128], **keys)
    plans = {}
    for width, model in models.items():
        rule = CompleteP(width, 128, 2, 2, qk_exponent=-0.5)
        plans[width] = plan(model, rules_for(model), rule, **keys)
    off = {one.name.split(".")[-2]: one.note for one in judge(plans) if one.quantity == "heads"}
    assert off == dict.fromkeys(
        ("k_proj", "v_proj"), "0.5 outputs per input at 128, 0.25 outputs per input at 256"
    )
