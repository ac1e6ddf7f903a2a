"""Horizon: powers of batch and tokens against what each set holds, in plans, groups, optimisers."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch

import param_groups
from param_groups import (
    CompleteP,
    Decay,
    Depth,
    EpsFollows,
    Everett,
    Horizon,
    Muon,
    Numbers,
    Plan,
    PlanError,
    Prescription,
    Role,
    Rule,
    Tensor,
    Tied,
    Tuned,
    plan,
    timescale,
)
from param_groups.prescription import Momenta
from param_groups.rules.horizon import PUBLISHED
from training.optim import optimizers

BETAS = (0.9, 0.95)
BATCH, TOKENS = 2.0**18, 2.5e9  # of the base
QUERY = Tensor("query", 64, 64)
ROLES = ("token_embedding", "query", "readout")
RULES = [Rule(f"{place}.weight", role) for place, role in enumerate(ROLES)]


def around(rule=None, b=1.0, d=1.0, powers="sde", **more):
    """A rule at b times the base's batch and d times its tokens."""
    at = {"batch": BATCH * b, "base_batch": BATCH, "tokens": TOKENS * d, "base_tokens": TOKENS}
    more = {"betas": BETAS} | more
    return Horizon(rule or Everett("mup", 64, 64), **at, powers=powers, **more)


def model_of(width=64):
    sizes = (torch.nn.Embedding(9, width), torch.nn.Linear(width, width, False))
    return torch.nn.Sequential(*sizes, torch.nn.Linear(width, 9, bias=False))


def planned(rule, model=None, **numbers):
    decay = {"weight_decay": 1e-3, "decay_mode": "independent"}
    numbers = {"lr": 0.01, "absorb_multipliers": True} | decay | numbers
    return plan(model_of() if model is None else model, RULES, rule, **numbers)


# What every set holds, in the words of its source


def sde(b, d):
    """Noise, and the averages of decay and betas as shares of the run, have no power of either."""
    steps = d / b
    now, base = (planned(around(b=at[0], d=at[1])) for at in ((b, d), (1, 1)))
    for one, other in zip(now.rows, base.rows, strict=True):
        yield one.lr**2 * steps, other.lr**2
        yield one.decay_per_step * steps, other.decay_per_step
        yield one.eps * math.sqrt(b), other.eps  # as the noise of a gradient
    for one, other in zip(now.betas, BETAS, strict=True):
        yield (1 - one) * steps, 1 - other


def nanochat(b, d):
    """base_train.py: the rate goes as the root of the batch, torch's decay as that over tokens."""
    now, base = (planned(around(b=at[0], d=at[1], powers="nanochat")) for at in ((b, d), (1, 1)))
    for one, other in zip(now.rows, base.rows, strict=True):
        yield one.lr, other.lr * b**0.5
        yield one.weight_decay, other.weight_decay * b**0.5 / d
        yield one.eps, other.eps
    yield from zip(now.betas, BETAS, strict=True)


def marin(b, d):
    """completed_adamh.py: the second beta forgets half in as many tokens at every batch."""
    now = around(b=b, d=d, powers="marin")
    yield now(QUERY).lr, b**0.5 * d**-0.3
    yield now(QUERY).eps, (d / b) ** 0.5
    yield now.momenta.betas[0], BETAS[0]
    half = lambda beta, batch: batch * math.log(0.5) / math.log(beta)
    yield half(now.momenta.betas[1], b * BATCH), half(BETAS[1], BATCH)


def hyperp(b, d):
    """At the base's batch."""
    now = around(d=d, powers="hyperp")
    yield now(QUERY).lr, d**-0.32
    yield now(QUERY).decay, 1.0


def power_lines(b, d):
    """The time scale, as a share of the run, goes as tokens per parameter to the -0.527."""
    now, base = (planned(around(b=at[0], d=at[1], powers="power_lines")) for at in ((b, d), (1, 1)))
    share = lambda one, b, d: b * BATCH / (one.decay_per_step * d * TOKENS)
    for one, other in zip(now.rows, base.rows, strict=True):
        yield share(one, b, d), share(other, 1, 1) * d**-0.527
        yield one.lr, other.lr


HELD = {one.__name__: one for one in (sde, nanochat, marin, hyperp, power_lines)}


def check(name):
    for b, d in itertools.product((0.5, 1.0, 2.0), (1.0, 4.0, 6.25)):
        for one, other in HELD[name](b, d):
            assert one == pytest.approx(other, rel=1e-9), (b, d)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_holds_what_its_source_says(name):
    check(name)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in PUBLISHED for key in PUBLISHED[name].powers]
)
def test_a_wrong_power_in_a_published_set_is_caught(name, key, place, monkeypatch):
    known = PUBLISHED[name]
    pair = list(known.powers[key])
    if pair[place] is None:
        pytest.skip("nothing is said of it")
    for wrong in (-0.5, 0.3, 1):
        planted = [*pair]
        planted[place] += wrong * 0.1
        powers = {**known.powers, key: tuple(planted)}
        monkeypatch.setitem(PUBLISHED, name, known._replace(powers=powers))
        with pytest.raises(AssertionError):
            check(name)


def test_every_set_has_a_source_and_is_tested():
    assert HELD.keys() == PUBLISHED.keys()
    known = r"derived|third-hand|\.py|et al\. 20\d\d"
    assert all(re.search(known, one.source) for one in PUBLISHED.values())


@pytest.mark.parametrize("name", ["sde", "nanochat"])
def test_the_decay_of_a_held_time_scale_is_timescales(name):
    for b, d in itertools.product((0.5, 2.0), (1.0, 8.0)):
        base, now = (
            timescale(tokens_per_step=BATCH * one, tokens=TOKENS * other, tau=0.2)
            for one, other in ((1, 1), (b, d))
        )
        made = planned(around(b=b, d=d, powers=name), weight_decay=base)
        assert [row.decay_per_step for row in made.rows] == [pytest.approx(now)] * 3


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adafactor", "adam_param_scaling"])
def test_powers_of_ones_own_are_of_any_optimiser_and_epsilon_follows_its_place(optimizer):
    rule = Everett("mup", 256, 64, optimizer)
    powers = {"lr": (0.5, -0.32), "eps": (-0.5, 0.0)}
    now = around(rule, b=4, d=16, powers=powers, betas=None)(QUERY)
    assert now.lr == pytest.approx(rule(QUERY).lr * 2 * 16**-0.32)
    assert now.eps == rule(QUERY).eps * (0.25 if optimizer == "adafactor" else 0.5)
    assert now.decay == rule(QUERY).decay


def test_the_base_keeps_every_number_to_the_bit():
    rule = CompleteP(64, 16, depth=4, base_depth=2)
    for name, betas in itertools.product(PUBLISHED, [BETAS, (0.3, 0.1), (0.0, 0.0)]):
        if PUBLISHED[name].one_size:
            continue
        same = around(rule, powers=name, betas=betas)
        assert same(QUERY) == rule(QUERY) and same.forward() == rule.forward()
        assert same.momenta.betas == betas


# Around and inside others


INIT = dict.fromkeys(map(str, Role), 0.02)
WRAPPERS = {"EpsFollows": EpsFollows, "Tied": Tied, "Muon": Muon}
WRAPPERS |= {"Depth": lambda rule: Depth(rule, 8, 2, 0.5), "Decay": lambda rule: Decay(rule, -0.5)}
WRAPPERS["Tuned"] = lambda rule: Tuned(rule, INIT)


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_goes_around_every_wrapper_and_into_none(name):
    """Muon would replace its rate, and a recipe divide by it: its powers would be lost."""
    rule, powers = Everett("mup", 256, 64), {"lr": (0.5, -1.0), "decay": (1.0, 0.0)}
    inside = WRAPPERS[name](rule)
    for role in ("token_embedding", "query", "readout"):
        tensor = Tensor(role, 256, 256)
        now, before = around(inside, 4, 16, powers)(tensor), inside(tensor)
        expected = (before.lr / 8, before.decay * 4, before.eps, before.init_std)
        assert (now.lr, now.decay, now.eps, now.init_std) == pytest.approx(expected)
        assert now.optimizer == before.optimizer
    outside = around(inside, powers=powers)
    assert outside.forward() == inside.forward()
    with pytest.raises(PlanError, match=f"{name} would undo what Horizon does; put Horizon around"):
        WRAPPERS[name](around(rule))


def test_it_goes_around_a_rule_of_ones_own():
    class Mine(Prescription):
        width, optimizer = 64, "adam"

        def __call__(self, tensor):
            return Numbers(0.02)

    assert around(Mine(), 4, 1)(QUERY).lr == 2.0


def test_betas_of_a_rule_pass_wrappers_and_are_those_at_the_base():
    class Mine(Prescription):
        width, optimizer, momenta = 64, "adam", Momenta(betas=(0.8, 0.9))

        def __call__(self, tensor):
            return Numbers(0.02)

    deep = Depth(Mine(), 4, 2)
    assert deep.momenta.betas == planned(deep, applied={"residual_multiplier": 0.5}).betas
    assert deep.momenta.betas == (0.8, 0.9)
    assert around(deep, 1, 2, betas=None).momenta.betas == pytest.approx((0.9, 0.95))
    with pytest.raises(PlanError, match=r"Depth\(Mine\) sets betas; leave out betas="):
        around(deep)


# Meanings of decay


def test_a_decay_has_its_powers_in_both_modes_that_are_per_step_and_is_refused_per_rate():
    for mode in ("independent", "global"):
        base, now = (planned(around(b=b, d=16), decay_mode=mode) for b in (16, 4))
        for one, other in zip(now.rows, base.rows, strict=True):
            assert one.decay_per_step == pytest.approx(other.decay_per_step / 4)
    with pytest.raises(PlanError, match="'per_group' has the rate's powers .* use 'independent'"):
        planned(around(), decay_mode="per_group")
    alone = {"lr": (0.5, 0.0)}, {"decay": (1.0, -1.0)}
    for powers in alone:  # torch's decay as it is, or with the powers of that per step
        base, now = (planned(around(b=b, powers=powers), decay_mode="per_group") for b in (1, 4))
        ratios = [n.weight_decay / o.weight_decay for n, o in zip(now.rows, base.rows, strict=True)]
        assert ratios == pytest.approx([1.0 if "lr" in powers else 4.0] * 3)


def test_betas_enter_groups_only_where_a_prescription_sets_them_and_train_as_keywords():
    finals = []
    for rule in (around(b=2, d=8), around(b=2, d=8, powers={"lr": (0.5, -0.5)}, betas=None)):
        model = model_of()
        made = planned(rule, model, weight_decay=0.0, eps=1e-8)
        made.initialise(model, seed=0)
        groups = made.groups(model)
        own = rule.betas is not None
        assert all(("betas" in group) is own and "momentum" not in group for group in groups)
        betas = {} if own else {"betas": around(b=2, d=8).momenta.betas}
        optimizer = torch.optim.AdamW(groups, **betas)
        for step in range(4):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randint(9, (5,))).logsumexp(-1).sum().backward()
            for param in model.parameters():
                param.grad *= 1e6  # far from epsilon, which the two have otherwise
            optimizer.step()
        finals.append([param.detach().clone() for param in model.parameters()])
    for one, other in zip(*finals, strict=True):
        torch.testing.assert_close(one, other)
    assert planned(around(b=2, d=8)).betas == (0.975, 0.9875)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *itertools.product(("adam", "adam_atan2", "adam_param_scaling", "muon"), ["betas"]),
        *itertools.product(("sgd", "muon"), ["momentum"]),
    ],
)
def test_the_loops_optimisers_read_them_from_the_group(name, key):
    rule = Muon(Everett("mup", 64, 64)) if name == "muon" else Everett("mup", 64, 64, name)
    one = "beta2" if key == "betas" else key
    own = {"betas": BETAS if key == "betas" else None}
    own |= {"momentum": 0.75} if key == "momentum" else {}
    made = planned(around(rule, 0.5, 1, {f"1 - {one}": (1.0, 0.0)}, **own), model := model_of())
    made.initialise(model, seed=0)
    groups = made.groups(model, several=name == "muon")
    defaults = {"betas": (0.5, 0.6), "momentum": 0.2}
    built = optimizers.build(name, groups, **defaults)
    for group in built.param_groups:
        concerned = name != "muon" or (group["optimizer"] == "muon") == (key == "momentum")
        expected = {"betas": (0.9, 0.975), "momentum": 0.875} if concerned else defaults
        assert group[key] == pytest.approx(expected[key])
    assert f"{key} " in made.table().splitlines()[1]


def test_muons_pair_takes_the_plans_numbers_and_refuses_others():
    rule = around(Muon(Everett("mup", 64, 64)), 2, 1, {"1 - momentum": (1, 0)}, momentum=0.95)
    made = planned(rule, model := model_of())
    made.initialise(model, seed=0)
    pair = made.optimizers(model)
    for group in pair.param_groups:
        assert group["betas"] == BETAS
        assert group["momentum"] == pytest.approx(0.9) or group["optimizer"] == "adam"
    assert "betas 0.9, 0.95 of adam; momentum 0.9 of muon" in str(made)
    with pytest.raises(PlanError, match=r"momentum=0.5 beside the plan's 0.8999"):
        made.optimizers(model, momentum=0.5)
    with pytest.raises(PlanError, match=r"betas=\(0.9, 0.99\) beside the plan's \(0.9, 0.95\)"):
        made.optimizers(model, betas=(0.9, 0.99))


def test_saved_plans_have_them_only_where_they_are_set_and_old_ones_are_read():
    plain, now = planned(Everett("mup", 64, 64)), planned(around(b=2, d=8))
    assert not {"betas", "momentum"} & plain.to_dict().keys()
    for one in (plain, now):
        assert Plan.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert now.to_dict()["betas"] == (0.975, 0.9875)
    other = planned(around(b=2, d=8, betas=(0.9, 0.99)))
    assert now.differences(other) == ["betas: (0.975, 0.9875) -> (0.975, 0.9975)"]
    assert "betas: None -> (0.975, 0.9875)" in plain.differences(now)
    for odd in ([0.9], [0.9, 1.0], 0.9, [0.9, None], "ab"):
        with pytest.raises(PlanError, match="betas must be two numbers"):
            Plan.from_dict({**now.to_dict(), "betas": odd})


def test_a_plan_says_what_it_is_made_of():
    text = str(planned(around(b=2, d=8)))
    assert "powers sde (lr b^0.5 d^-0.5, decay b^1 d^-1, eps b^-0.5, 1 - beta1 b^1 d^-1" in text
    assert "form Horizon(Everett)" in text and "\nbetas 0.975, 0.9875 of adam\n" in text
    assert "half-life of beta2 constant)" in str(planned(around(powers="marin")))
    own = str(planned(around(powers={"lr": (0.5, -0.32)}, betas=None)))
    assert "powers lr b^0.5 d^-0.32, form" in own and "betas" not in own


def test_the_example_of_the_readme_runs_and_says_what_it_says():
    readme = (Path(param_groups.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", readme, re.S) if "Horizon(" in one]
    names = {**vars(param_groups), "model": model_of(1024), "roles": RULES}
    exec(code, names)
    made = names["numbers"]
    values = re.findall(r"^# (.*?): (.*)", code, re.M)
    assert values, "the example says what comes out"
    for expression, text in values:
        assert eval(expression, {**names, **vars(made)}) == pytest.approx(eval(text)), expression
