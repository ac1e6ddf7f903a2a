"""Schedules that keep the ratios between groups, and the guard against those that do not."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

from param_groups import Everett, PlanError, Role, Rule, guard, plan, schedule
from param_groups.schedules import SHAPES, factor
from training.optim.optimizers import OPTIMIZERS, build

STEPS = 10


def prepared(optimizer=torch.optim.AdamW, family="adam", lr=0.1, **options):
    """(plan, optimiser) of a perceptron whose two matrices' rates are 1 to 1/8 under Adam."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 16, False), torch.nn.Linear(16, 3, False))
    rules = [Rule("0.weight", Role.PATCH_EMBEDDING), Rule("1.weight", Role.READOUT)]
    rule = Everett("standard", 16, 2, optimizer=family)
    numbers = plan(model, rules, rule, lr=lr, **options)
    numbers.initialise(model, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return numbers, optimizer(numbers.groups(model))


def rates(optimizer, scheduler, steps=STEPS):
    """Each step's rates over the plan's, (steps, groups)."""
    seen = []
    for _ in range(steps):
        optimizer.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step()
    return torch.tensor(seen, dtype=torch.float64) / torch.tensor([0.1, 0.1 / 8]).double()


LEFT = {
    "cosine": lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - 0.8 * t,
    "constant": lambda t: 1.0,
}


@pytest.mark.parametrize("shape", LEFT)
def test_a_schedule_multiplies_every_rate_by_one_factor(shape):
    left = LEFT[shape]
    numbers, optimizer = prepared()
    scheduler = schedule(optimizer, shape, total_steps=STEPS, warmup_steps=4, floor=0.2)
    guard(optimizer, numbers)
    wanted = [0, 1 / 4, 2 / 4, 3 / 4, *(left(k / 6) for k in range(7)), left(1)]
    expected = torch.tensor(wanted).double()[:, None].expand(-1, 2)
    torch.testing.assert_close(rates(optimizer, scheduler, 12), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", [{"floor": 1.0}, {"floor": 0}, {"warmup_steps": STEPS}])
def test_the_ends_of_what_is_allowed_are_allowed(settings):
    _, optimizer = prepared()
    scheduler = schedule(optimizer, "linear", total_steps=STEPS, **settings)
    last = rates(optimizer, scheduler, STEPS + 1)[-1]
    assert last.tolist() == pytest.approx([settings.get("floor", 0.0)] * 2)


def timm_cosine(**settings):
    def make(optimizer):
        scheduler = pytest.importorskip("timm.scheduler").CosineLRScheduler
        made, epoch = scheduler(optimizer, t_initial=STEPS, **settings), iter(range(1, STEPS + 1))
        made.step = lambda step=made.step: step(next(epoch))
        return made

    return make


ABSOLUTE = {
    "OneCycleLR(max_lr)": lambda made: OneCycleLR(made, max_lr=0.1, total_steps=STEPS + 1),
    "CosineAnnealingLR(eta_min)": lambda made: CosineAnnealingLR(made, STEPS, eta_min=1e-3),
    "timm lr_min": timm_cosine(lr_min=1e-3),
    "timm warmup_lr_init": timm_cosine(warmup_t=3, warmup_lr_init=1e-3),
}
own = lambda made: [group["lr"] for group in made.param_groups]
RELATIVE = {
    "OneCycleLR(list)": lambda made: OneCycleLR(made, own(made), total_steps=STEPS + 1),
    "CosineAnnealingLR": lambda made: CosineAnnealingLR(made, STEPS),
    "LinearLR": lambda made: LinearLR(made, total_iters=STEPS),
    "timm": timm_cosine(warmup_t=3),
}


@pytest.mark.parametrize("name", ABSOLUTE)
def test_schedulers_of_absolute_rates_are_found(name):
    """The plan's rates are 8 to 1; each of these makes them equal somewhere."""
    numbers, optimizer = prepared()
    with pytest.raises(PlanError, match="the scheduler has changed the ratios between groups"):
        scheduler = ABSOLUTE[name](optimizer)
        guard(optimizer, numbers)
        rates(optimizer, scheduler)


@pytest.mark.parametrize("name", RELATIVE)
def test_schedulers_that_keep_the_ratios_pass(name):
    numbers, optimizer = prepared()
    scheduler = RELATIVE[name](optimizer)
    guard(optimizer, numbers)
    factors = rates(optimizer, scheduler)
    torch.testing.assert_close(factors[:, 0], factors[:, 1])


def test_a_guard_ends_and_wants_the_plans_groups():
    numbers, optimizer = prepared()
    handle = guard(optimizer, numbers)
    optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(PlanError, match="'0.weight' has 2 of the plan's rate, '1.weight' 1;"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    for group in optimizer.param_groups:  # a plan of no rates divides by none
        group["lr"] = group["initial_lr"] = 0.0
    guard(optimizer, replace(numbers, rows=[replace(row, lr=0.0) for row in numbers.rows]))
    for groups in ([], [{"param_names": ["other.weight"]}]):
        bare = torch.optim.AdamW([{"params": optimizer.param_groups[0]["params"], **dict(*groups)}])
        with pytest.raises(PlanError, match="which the plan does not know: take groups from the"):
            guard(bare, numbers)
    for times in (-1.0, float("inf")):  # the same for all groups, and no rate
        optimizer = prepared()[1]
        handle = guard(optimizer, numbers)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * times
        with pytest.raises(PlanError, match="changed the ratios between groups"):
            optimizer.step()
        handle.remove()


SGD = functools.partial(torch.optim.SGD, momentum=0.9)
ADAMW_BY_FLAG = functools.partial(torch.optim.NAdam, decoupled_weight_decay=True)
DECAYS = {"weight_decay": 1e-3, "decay_mode": "independent"}


@pytest.mark.parametrize(
    ("optimizer", "family", "options"),
    [
        (torch.optim.Adam, "adam", {}),
        (torch.optim.AdamW, "adam_atan2", DECAYS),
        (ADAMW_BY_FLAG, "adam", DECAYS),
        (SGD, "sgd", {}),
        (torch.optim.SGD, "sgd", DECAYS),  # without momentum its decay is the plan's
        (type("SGD", (torch.optim.AdamW,), {}), "sgd", DECAYS),  # what it does is its own affair
        *((functools.partial(build, name), name, DECAYS) for name in OPTIMIZERS if name != "muon"),
    ],
)
def test_optimisers_that_may_follow_the_plan_pass(optimizer, family, options):
    numbers, made = prepared(optimizer, family, **options)
    guard(made, numbers)
    made.step()


def resumed(lr, *, made=prepared, shape="cosine", **options):
    """(plan, optimiser) at another rate, the optimiser's and the schedule's state after 3 steps."""
    _, old = made()
    clock = schedule(old, shape, total_steps=STEPS, warmup_steps=2)
    rates(old, clock, 3)
    return *prepared(lr=lr, **options), old.state_dict(), clock.state_dict()


def test_an_old_state_does_not_bring_back_old_rates():
    """It holds lr and initial_lr, all a quarter of the plan's: no ratio has changed."""
    numbers, optimizer, state, _ = resumed(0.4)
    guard(optimizer, numbers)
    optimizer.load_state_dict(state)
    with pytest.raises(PlanError, match="'0.weight' has the initial_lr 0.1, the plan 0.4: the st"):
        optimizer.step()
    with pytest.raises(PlanError, match="the initial_lr 0.1, the plan 0.4: the state is of anothe"):
        guard(optimizer, numbers)


def test_a_schedule_refuses_the_states_of_another_plan_and_leaves_its_own():
    numbers, optimizer, state, clock_state = resumed(0.4)
    clock = schedule(optimizer, total_steps=STEPS)
    with pytest.raises(PlanError, match="saved optimiser's initial_lr is 0.1, this one's 0.4: the"):
        optimizer.load_state_dict(state)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.4
    with pytest.raises(PlanError, match="saved schedule's base_lrs is 0.1, this one's 0.4: the st"):
        clock.load_state_dict(clock_state)
    # The way out that the text names.
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        saved.update(lr=group["lr"], initial_lr=group["initial_lr"])
    optimizer.load_state_dict(state)
    clock.load_state_dict({**clock_state, "base_lrs": clock.base_lrs})
    guard(optimizer, numbers)
    optimizer.step()
    assert int(next(iter(optimizer.state.values()))["step"]) == 4  # it kept its moments
    clock.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * factor_after(4))


def factor_after(step):
    return (1 + math.cos(math.pi * step / STEPS)) / 2


@pytest.mark.parametrize("family", [torch.optim.AdamW, SGD, torch.optim.SGD], ids=str)
def test_a_schedule_is_made_before_a_state_is_loaded(family):
    """Made after it, a schedule would begin with a warm-up's first factor, 0."""
    options = {"optimizer": family, "family": "adam" if family is torch.optim.AdamW else "sgd"}
    made = functools.partial(prepared, **options)
    _, optimizer, state, clock_state = resumed(0.1, made=made, **options)
    late = made()[1]
    late.load_state_dict(state)
    with pytest.raises(PlanError, match="make the schedule first, then load the optimiser's state"):
        schedule(late, total_steps=STEPS, warmup_steps=2)
    clock = schedule(optimizer, total_steps=STEPS, warmup_steps=2)
    optimizer.load_state_dict(state)
    clock.load_state_dict(clock_state)
    assert optimizer.param_groups[0]["lr"] == state["param_groups"][0]["lr"] > 0


@pytest.mark.parametrize("keywords", [{"betas": (0.9, 0.95)}, {"lr": 0.1}, {"amsgrad": True}])
def test_a_keyword_that_acts_or_says_what_the_plan_says_passes(keywords):
    numbers, optimizer = prepared(functools.partial(torch.optim.AdamW, **keywords))
    guard(optimizer, numbers)
    optimizer.step()


# The factor of a schedule, at its corners and against optax's values


# optax 0.2.8, steps 0 to 12: warmup_cosine_decay_schedule(0, 1, 4, 10, 0.1), and linear_schedule
# from 0 to 1 over 4 steps joined with one from 1 to 0.1 over 6, in 64 bits.
OPTAX = {
    "cosine": [0, 0.25, 0.5, 0.75, 1, 0.9397114317029974, 0.775, 0.55, 0.325, 0.16028856829700258]
    + [0.1] * 3,
    "linear": [0, 0.25, 0.5, 0.75, 1, 0.85, 0.7, 0.55, 0.4, 0.25] + [0.1] * 3,
}


@pytest.mark.parametrize("name", OPTAX)
def test_agrees_with_optax(name):
    got = [factor(name, step, warmup_steps=4, total_steps=10, floor=0.1) for step in range(13)]
    assert got == pytest.approx(OPTAX[name], abs=1e-15)


@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("name", SHAPES)
def test_corners(name, floor):
    def at(step):
        return factor(name, step, warmup_steps=100, total_steps=1100, floor=floor)

    end = 1.0 if name == "constant" else floor
    assert [at(0), at(50), at(100)] == [0.0, 0.5, 1.0]
    assert at(600) == pytest.approx((1 + end) / 2, abs=1e-15)
    assert [at(1100), at(1101), at(10**9)] == [end, end, end]
    # Symmetric about the midpoint, as both shapes are.
    assert at(350) + at(850) == pytest.approx(1 + end, abs=1e-15)


@pytest.mark.parametrize("name", SHAPES)
def test_no_warmup_starts_at_the_peak(name):
    assert factor(name, 0, warmup_steps=0, total_steps=7) == 1.0
    assert factor(name, 0, warmup_steps=0, total_steps=1, floor=0.3) == 1.0
    assert factor(name, 7, warmup_steps=0, total_steps=7) == (name == "constant")  # no floor: 0


@pytest.mark.parametrize("name", SHAPES)
def test_warmup_may_fill_the_run(name):
    assert factor(name, 9, warmup_steps=10, total_steps=10) == 0.9
    assert factor(name, 10, warmup_steps=10, total_steps=10, floor=0.2) in (0.2, 1.0)
