"""Schedules at their corners, against optax's values, and what they keep between groups."""

import ast
import inspect
import math

import pytest
import torch

from training import schedules
from training.optimizers import build
from training.schedules import SHAPES, ScheduleError, factor, set_lr

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


def test_a_quarter_of_the_way_down_tells_cosine_from_linear():
    numbers = {"warmup_steps": 0, "total_steps": 8}
    assert factor("cosine", 2, **numbers) == pytest.approx((1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert factor("linear", 2, **numbers) == 0.75
    assert factor("constant", 2, **numbers) == 1.0


@pytest.mark.parametrize("name", SHAPES)
def test_no_warmup_starts_at_the_peak(name):
    assert factor(name, 0, warmup_steps=0, total_steps=7) == 1.0
    assert factor(name, 0, warmup_steps=0, total_steps=1, floor=0.3) == 1.0


@pytest.mark.parametrize("name", SHAPES)
def test_warmup_may_fill_the_run(name):
    assert factor(name, 9, warmup_steps=10, total_steps=10) == 0.9
    assert factor(name, 10, warmup_steps=10, total_steps=10, floor=0.2) in (0.2, 1.0)


@pytest.mark.parametrize("name", SHAPES)
def test_stays_in_the_unit_interval_and_rises_then_falls(name):
    for warmup, total, floor in [(0, 1, 0.0), (3, 17, 0.1), (5, 5, 0.7), (1, 1000, 1 / 3)]:
        curve = [
            factor(name, step, warmup_steps=warmup, total_steps=total, floor=floor)
            for step in range(total + 3)
        ]
        assert all(0 <= value <= 1 for value in curve)
        assert curve[:warmup] == sorted(curve[:warmup])
        assert curve[warmup:] == sorted(curve[warmup:], reverse=True)


def test_a_quoted_minimum_rate_is_a_fraction_of_the_peak():
    """lr_min = 1e-6 beside a peak of 1e-3, 20 of 300 epochs of 312 steps warming up."""
    lr, lr_min = 1e-3, 1e-6
    numbers = {"warmup_steps": 6240, "total_steps": 93600, "floor": lr_min / lr}
    for step in (6240, 30000, 93599):
        angle = math.pi * (step - 6240) / (93600 - 6240)
        expected = lr_min + (lr - lr_min) / 2 * (1 + math.cos(angle))
        assert lr * factor("cosine", step, **numbers) == pytest.approx(expected, rel=1e-12)


def optimizer_with(rows):
    """An optimiser with one unit parameter per (lr, weight_decay)."""
    groups = [
        {
            "params": [torch.ones(1, dtype=torch.float64, requires_grad=True)],
            **{"name": f"group{i}", "param_names": [f"p{i}"], "eps": 0.0},
            **{"lr": lr, "initial_lr": lr, "weight_decay": decay},
        }
        for i, (lr, decay) in enumerate(rows)
    ]
    return build("adam_atan2", groups)


def removed_by_one_step(optimizer):
    """The fraction of each group's parameter that decay removes; there is no other update."""
    params = [group["params"][0] for group in optimizer.param_groups]
    before = [param.item() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return [1 - param.item() / old for param, old in zip(params, before)]


@pytest.mark.parametrize("name", SHAPES)
def test_ratios_of_rates_and_decays_survive_every_step(name):
    rows = [(1e-3, 0.8), (0.5, 0.02), (20.0, 4e-4)]
    optimizer = optimizer_with(rows)
    for step in range(1, 20):
        now = factor(name, step, warmup_steps=5, total_steps=20, floor=0.05)
        set_lr(optimizer, now)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([lr * now for lr, _ in rows], rel=1e-15)
        removed = removed_by_one_step(optimizer)
        assert removed == pytest.approx([lr * decay * now for lr, decay in rows], rel=1e-10)


def test_independent_decay_is_the_same_for_every_rate():
    """A plan's wd / lr per group removes factor * wd everywhere."""
    optimizer = optimizer_with([(lr, 1e-2 / lr) for lr in (1e-4, 1.0, 20.0)])
    for step in range(12):
        now = factor("cosine", step, warmup_steps=3, total_steps=12)
        set_lr(optimizer, now)
        assert removed_by_one_step(optimizer) == pytest.approx([1e-2 * now] * 3, rel=1e-10)


def test_the_rate_depends_on_the_peak_and_not_on_the_rate_before():
    optimizer = optimizer_with([(0.1, 0.0)])
    for now in (0.0, 0.5, 1.0):
        set_lr(optimizer, now)
        assert optimizer.param_groups[0]["lr"] == 0.1 * now


def test_a_group_without_a_peak_is_named_and_nothing_is_touched():
    optimizer = optimizer_with([(0.1, 0.0), (0.2, 0.0)])
    del optimizer.param_groups[1]["initial_lr"]
    with pytest.raises(ScheduleError, match="^group 'group1' has no 'initial_lr'"):
        set_lr(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("wrong", [-0.1, 1.5, math.nan])
def test_only_factors_are_accepted(wrong):
    with pytest.raises(ScheduleError, match=r"must be in \[0, 1\]"):
        set_lr(optimizer_with([(0.1, 0.0)]), wrong)


def test_schedules_do_without_torch():
    tree = ast.parse(inspect.getsource(schedules))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
                for alias in node.names}  # fmt: skip
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any((name or "").startswith("torch") for name in imported | modules)
