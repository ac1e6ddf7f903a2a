"""Numbers in the forward pass: on weights, each one on what the weight makes; in tensors."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from param_groups import Everett, PlanError, plan
from tests.param_groups import traced_odd
from tests.param_groups.traced_blocks import (
    BASE,
    HEAD,
    IDS,
    TOKENS,
    WIDE,
    Apart,
    Mlp,
    Rms,
    Scaled,
    Stack,
    heads,
    merged,
    read,
    stack,
)
from tests.param_groups.traced_text import rotated


class By(nn.Module):
    """A layer whose weight is a function of its parameter."""

    def __init__(self, layer, by):
        super().__init__()
        self.layer, self.by = layer, by

    def forward(self, x):
        return functional_call(self.layer, {"weight": self.by(self.layer.weight)}, (x,))


def weighed(path, by, attention=Apart):
    def build(n):
        model, (part, _, last) = Stack(n, attention, Mlp, Rms), path.rpartition(".")
        for owner in [block[part] for block in model.blocks] if part else [model]:
            setattr(owner, last, By(getattr(owner, last), by))
        return model

    return build


class Ready(Apart):
    def __init__(self, n, ready):
        super().__init__(n)
        self.ready = ready

    def forward(self, x):
        q, k, v = self.three(x)
        return self.d(merged(F.scaled_dot_product_attention(self.ready(q), self.ready(k), v)))


def standard(w):
    return (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)


def halves(w, *numbers):
    """The first half of the rows, once with each number."""
    return torch.cat([w[: len(w) // 2] * by for by in numbers])


def blocks(w):
    """A mask of blocks of 8 inputs."""
    at = torch.arange(len(w))[:, None] * w.shape[1] // len(w)
    return at // 8 == torch.arange(w.shape[1]) // 8


Turned, Normed = (
    lambda n: Ready(n, lambda x: rotated(x, by=1.2)),
    lambda n: Ready(n, lambda x: F.layer_norm(x, (8,))),
)


@pytest.mark.parametrize(
    ("path", "by", "factor", "value", "attention"),
    [
        ("attn.a", lambda w: w * 0.6, "attention_scale", 0.6, Apart),
        ("attn.b", lambda w: (w.double() / 2).float(), "attention_scale", 0.5, Apart),
        ("attn.a", lambda w: w * 0.6, "attention_scale", 0.6 * 1.44, Turned),
        ("attn.a", lambda w: w * 0.6, "attention_scale", 1.0, Normed),
        ("attn.a", lambda w: 2 * F.normalize(w, dim=1), "attention_scale", 2.0, Apart),
        ("attn.a", lambda w: w.shape[1] ** -0.5 * standard(w), "attention_scale", 1.0, Apart),
        ("attn.a", lambda w: w * torch.linspace(0.1, 0.5, len(w)), "attention_scale", None, Apart),
        ("attn.b", lambda w: torch.cat([w[:2] * 0.6, w[2:]]), "attention_scale", None, Apart),
        ("attn.a", lambda w: w.abs(), "attention_scale", None, Apart),
        ("attn.a", lambda w: w.relu(), "attention_scale", None, Apart),
        ("attn.a", lambda w: w.tril(), "attention_scale", None, Apart),
        ("attn.b", lambda w: w * (w.detach().roll(1) > 0), "attention_scale", None, Apart),
        ("attn.a", lambda w: halves(w, 0.5, 2.0), "attention_scale", None, Apart),
        ("attn.a", lambda w: halves(w, 0.6, 0.6), "attention_scale", 0.6, Apart),
        ("attn.a", lambda w: w + (w.relu() - w).detach(), "attention_scale", None, Apart),
        ("attn.c", lambda w: w * 0.6, "weight", 0.6, Apart),
        ("mlp.up", lambda w: torch.mul(0.6, w), "weight", 0.6, Apart),
        ("attn.d", lambda w: w * 0.6, "residual_multiplier", 0.6, Apart),
        ("mlp.down", lambda w: 2 * F.normalize(w, dim=1), "residual_multiplier", 2.0, Apart),
        ("wte", lambda w: w * 0.6, "embed_scale", 0.6, Apart),
        ("head", lambda w: w * 0.6, "logit_multiplier", 0.6, Apart),
    ],
)
def test_a_number_on_a_weight_is_one_on_what_it_makes(path, by, factor, value, attention):
    found, name = read(weighed(path, by, attention)), f"{path}.layer.weight"
    values = {m.value for rule in found.rules for m in rule.measured if m.factor == factor}
    if factor == "weight":
        assert not values and found.factors[f"weight blocks.0.{name}"] == f"{value:g}"
        return
    (one,), size = values, HEAD**-0.5 if factor == "attention_scale" else 1.0
    assert one == (None if value is None else pytest.approx(value * size, rel=1e-5))
    doubt = f"what multiplies blocks.0.{name} before it is used was not read"
    assert (doubt in found.doubts) == (value is None)
    if value != 1.0:
        with pytest.raises(PlanError, match="does not say what it mul|multiplies by|has a factor"):
            rule = Everett("mup", WIDE, BASE, qk_exponent=-0.5)
            plan(
                weighed(path, by, attention)(WIDE),
                found.rules,
                rule,
                lr=1.0,
                absorb_multipliers=True,
            )


MATRICES = ["attn.a", "attn.c", "attn.d", "mlp.up", "mlp.down", "head"]


@pytest.mark.parametrize(
    ("path", "by"),
    [
        *itertools.product([*MATRICES, "wte"], [lambda w: w * w.shape[1] ** -0.5]),
        *itertools.product(MATRICES, [standard, lambda w: w + (w.sign() - w).detach()]),
        *itertools.product(MATRICES[1:4], [lambda w: w * blocks(w)]),
        ("mlp.up", lambda w: w * torch.linspace(0.5, 1.0, w.shape[1]) / w.shape[1]),
    ],
)
def test_a_number_on_a_weight_that_the_width_changes_is_refused(path, by):
    with pytest.raises(PlanError, match="counts .* times at the smaller|normalised before use"):
        _ = read(weighed(path, by)).rules


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ (w * 0.6).T,
        lambda x, w: torch.einsum("btn,mn->btm", x, w / (1 / 0.6)),
        lambda x, w: F.conv1d(x.mT, w[..., None] * 0.6).mT,
        lambda x, w: torch.addmm(torch.zeros(1), x.flatten(0, 1), w.T.mul(0.6)).view_as(x),
        lambda x, w: (x[..., None, :] * (w * 0.6)).sum(-1),
        lambda x, w: F.linear(x, torch.cat([one * 0.6 for one in w.split(8)])),
        lambda x, w: F.linear(x, (torch.cat([w, w]) * 0.6)[: len(w)]),
    ],
)
def test_every_product_has_the_number_on_its_weight(product):
    class Written(Apart):
        def three(self, x):
            return heads(product(x, self.a.weight)), heads(self.b(x)), heads(self.c(x))

    (value,) = {m.value for rule in read(stack(Written)).rules for m in rule.measured}
    assert value == pytest.approx(0.6 * HEAD**-0.5)


def test_a_closed_term_beside_queries_hides_no_number():
    class Half(traced_odd.WithLora):
        def three(self, x):
            q = 0.5 * self.a.base(x) + 2.0 * (x @ self.a.one.T @ self.a.two.T)
            return heads(q), heads(self.b(x)), heads(self.c(x))

    (value,) = {m.value for rule in read(stack(Half)).rules for m in rule.measured}
    assert value == pytest.approx(0.5 * HEAD**-0.5)


# Tensors of numbers on activations


def ramp(x, low=0.1):
    """Numbers of several sizes, of which one stands on each channel."""
    return torch.linspace(low, 3 * low, x.shape[-1])


def turned(x):
    """Rotary positions, put together in place."""
    y, angles = torch.empty_like(x), torch.arange(x.shape[1])[:, None] * ramp(x[..., ::2])
    y[..., ::2] = x[..., ::2] * angles.cos() - x[..., 1::2] * angles.sin()
    y[..., 1::2] = torch.addcmul(x[..., 1::2] * angles.cos(), x[..., ::2], angles.sin())
    return y


def written(x, part):
    """Half of an activation, or of a part of it."""
    y = x.clone()
    part(y).mul_(0.5)
    return y


def multiplied(x, by):
    x *= by
    return x


PLACES = {"embed": "embed_scale", "branch": "residual_multiplier", "logits": "logit_multiplier"}
RAMP = 0.2 * (1 + 1 / 12 * (1 + 2 / (WIDE - 1))) ** 0.5  # its root mean square


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("does", "factor"),
    [
        (lambda x: x * ramp(x), RAMP),
        (lambda x: x.clone().div_(1 / ramp(x)), RAMP),
        (lambda x: torch.lerp(torch.zeros_like(x), x, ramp(x)), RAMP),
        (lambda x: torch.addcmul(ramp(x), x, ramp(x)), RAMP),
        (lambda x: torch.einsum("btn,n->btn", x, ramp(x)), RAMP),
        (lambda x: F.layer_norm(x, x.shape[-1:], ramp(x)), RAMP),
        (lambda x: x.bfloat16().mul(0.5 * torch.ones(12, 1, dtype=torch.bfloat16)).float(), 0.5),
        (lambda x: torch.ldexp(x, torch.tensor(-1)), 0.5),
        (lambda x: x / torch.tensor(2), 0.5),
        (lambda x: x @ (0.5 * torch.eye(x.shape[-1]).roll(1, 0)), 0.5),
        (lambda x: F.linear(x, 0.5 * torch.eye(x.shape[-1])), 0.5),
        (lambda x: torch.add(torch.zeros(1), x, alpha=0.5), 0.5),
        (lambda x: torch._foreach_mul([x], 0.5)[0], 0.5),
        (lambda x: (torch._foreach_mul_([y := x.clone()], 0.5), y)[1], 0.5),
        (lambda x: torch.mul(*torch.broadcast_tensors(x, torch.tensor([[0.5]]))), 0.5),
        (lambda x: multiplied(torch.full_like(x, 0.5), x), 0.5),
        (lambda x: x * np.float32(0.5), 0.5),
        (lambda x: (x * torch.tensor(0.5 + 0j)).real, 0.5),
        (lambda x: torch.full_like(x, 0.5).mul_(x), 0.5),
        (lambda x: torch.einsum("btn,btn->btn", x, 0.5 * torch.ones_like(x).mul_(x > -9)), 0.5),
        # Chosen by an index and by a condition; written through a view.
        (lambda x: x * torch.full((3,), 0.5)[x.argmax(-1) % 3][..., None], 0.5),
        (lambda x: x * torch.where(x > 0, 0.5, -0.5), 0.5),
        (lambda x: written(x, lambda y: y.view(-1)), 0.5),
        (lambda x: written(x, lambda y: y[..., ::2]), None),
        (lambda x: x.abs() ** ramp(x), None),
        (lambda x: torch.fmod(x, ramp(x)), None),
        # Nothing is multiplied: turned, masked, bent at a number, a mean over tokens.
        (turned, 1.0),
        (lambda x: x * (ramp(x) > 0.2), 1.0),
        (lambda x: x * (ramp(x) > 0.2).float() + x.flip(1) * (ramp(x) <= 0.2).float(), 1.0),
        (lambda x: torch.ones_like(x).mul_(x), 1.0),
        (lambda x: F.layer_norm(x, x.shape[-1:], None, torch.zeros(x.shape[-1])), 1.0),
        (lambda x: torch.maximum(x, torch.zeros(1)), 1.0),
        (lambda x: torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None] @ x, 1.0),
    ],
)
def test_what_several_numbers_do_to_activations_is_measured_or_refused(place, does, factor):
    if place == "logits" and factor == RAMP:  # which have 20 channels
        factor = 0.2 * (1 + 1 / 12 * (1 + 2 / (TOKENS - 1))) ** 0.5
    found = read(lambda n: Scaled(n, **{place: does}))
    values = {m.value for rule in found.rules for m in rule.measured if m.factor == PLACES[place]}
    assert [*values] == [factor and pytest.approx(factor, rel=1e-4)] * (factor != 1.0)
    assert any("was not read" in doubt for doubt in found.doubts) == (factor is None)
    if factor is None:
        with pytest.raises(PlanError, match="multiplied in the forward pass by what was not read"):
            rule = Everett("mup", WIDE, BASE, qk_exponent=-0.5)
            plan(Scaled(WIDE), found.rules, rule, lr=1.0, absorb_multipliers=True)


@pytest.mark.parametrize("place", [*PLACES, "into", "mlp", "value"])
@pytest.mark.parametrize(
    "does",
    [
        lambda x, by: x * (ramp(x) * by),
        lambda x, by: x / (ramp(x) / by),
        lambda x, by: torch.lerp(torch.zeros_like(x), x, by),
        lambda x, by: torch.addcmul(ramp(x), x, ramp(x), value=by),
        lambda x, by: torch.einsum("btn,n->btn", x, ramp(x) * by),
        lambda x, by: F.layer_norm(x, x.shape[-1:], ramp(x) * by),
        lambda x, by: torch.ldexp(x, torch.tensor(math.log2(by))),
        lambda x, by: x / torch.arange(1, 1 + x.shape[-1]) / torch.tensor(int(by**-2)),
        lambda x, by: x @ (torch.eye(x.shape[-1]) * by),
    ],
)
def test_several_numbers_that_the_width_changes_are_refused(place, does):
    class Inside(Mlp):
        def forward(self, x):
            return self.down(by_width(F.gelu(self.up(x))))

    class Values(Apart):
        def three(self, x):
            return heads(self.a(x)), heads(self.b(x)), heads(by_width(self.c(x)))

    def build(n):
        nonlocal by_width
        by_width = lambda x: does(x, n**-0.5)
        parts = {"mlp": (Apart, Inside), "value": (Values, Mlp)}
        return Stack(n, *parts[place], Rms) if place in parts else Scaled(n, **{place: by_width})

    by_width = None
    with pytest.raises(PlanError, match="in the forward pass, where the|by .* at the smaller"):
        rule = Everett("mup", WIDE, BASE, qk_exponent=-0.5)
        plan(build(WIDE), read(build).rules, rule, lr=1.0, absorb_multipliers=True)


class Bare(Mlp):
    """An MLP that `join` ends, with a bias of its own."""

    def __init__(self, n, join):
        super().__init__(n)
        self.shift, self.join = nn.Parameter(torch.zeros(n)), join

    def forward(self, x):
        return self.join(super().forward(x), x, self.shift)


def test_a_norm_without_a_gain_has_a_bias():
    join = lambda y, x, b: F.layer_norm(y, x.shape[-1:], None, b)
    found = read(stack(mlp=lambda n: Bare(n, join)))
    assert found["blocks.0.mlp.shift"].role == "norm_bias"
    assert not [m for rule in found.rules for m in rule.measured if m.value is None]


def test_one_over_an_activation_is_no_number_on_it():
    join = lambda y, x, b: torch.full((1, 1), 2.0) / (y + b)
    said = read(stack(mlp=lambda n: Bare(n, join))).factors
    assert said["branch blocks.0.mlp.down.weight"] == "2"


def test_a_product_that_one_call_adds_to_activations_is_a_doubt():
    join = lambda y, x, b: torch.addmm(y[0], x[0], torch.eye(x.shape[-1])) + b
    found = read(stack(mlp=lambda n: Bare(n, join)))
    with pytest.raises(PlanError, match="addmm adds a product to activations, in one call"):
        _ = found.rules


def test_a_loss_beside_the_logits_leaves_the_readouts_number():
    class Loss(Scaled):
        def forward(self, ids):
            logits = super().forward(ids)
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

    said = read(lambda n: Loss(n, into=lambda x: x * (BASE / 2 / x.shape[-1]))).factors
    assert said["readout head.weight"] == "0.25 (0.5 at the smaller width)"


def test_positions_that_a_model_gets_are_no_number_on_normed_queries():
    class Rotary(Apart):
        def three(self, x):
            q, k, v = super().three(x)
            frequencies = torch.tensor([[0.1], [1.0], [2.0], [3.0]]).to(x)
            angles = (frequencies * self.steps[:, None]).mT
            cos, sin = (one.repeat(1, 1, 2)[:, None] for one in (angles.cos(), angles.sin()))
            turn = lambda x: x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin
            return *(turn(F.rms_norm(1e-4 * one, (8,), eps=1e-6)) for one in (q, k)), v

    class Placed(Stack):
        def forward(self, ids, steps):
            for block in self.blocks:
                block.attn.steps = steps
            return super().forward(ids)

    run = lambda model: model(IDS, torch.arange(12.0).expand(2, -1))
    found = read(lambda n: Placed(n, Rotary, Mlp, Rms), run)
    (value,) = {m.value for rule in found.rules for m in rule.measured}
    assert value == pytest.approx(HEAD**-0.5)  # whatever a norm's eps leaves of them
