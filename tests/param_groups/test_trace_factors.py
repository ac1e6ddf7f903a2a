"""Factors that a trace reads: on query-key products, embeddings, branches, logits and what matrices
take; and gains of norms."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from param_groups import CompleteP, Everett, PlanError, Tied, plan
from tests.param_groups.traced_blocks import (
    BASE,
    HEAD,
    WIDE,
    Apart,
    Mlp,
    Rms,
    Scaled,
    linear,
    merged,
    read,
    stack,
)
from tests.param_groups.traced_text import rotated


class Scored(Apart):
    """Attention by hand; `after` is done to scores before the softmax."""

    def __init__(self, n, after):
        super().__init__(n)
        self.after = after

    def forward(self, x):
        q, k, v = self.three(x)
        return self.d(merged(F.softmax(self.after(q @ k.mT), dim=-1) @ v))


TURN = torch.polar(torch.full((12, 4), 1.2), torch.linspace(0, 9, 48).reshape(12, 4))
ONE = SimpleNamespace(weight=1.0, offset=0.0)  # a norm without a gain
BIAS, MASK = torch.linspace(-1, 1, 12 * 12).reshape(12, 12), torch.ones(12, 12).tril() == 0


@pytest.mark.parametrize(
    ("after", "factor"),
    [
        (lambda s: s / 4, 0.25),
        (lambda s: torch.div(s, 4), 0.25),
        (lambda s: s.mul_(0.25), 0.25),
        (lambda s: (s * 0.25 + BIAS).masked_fill(MASK, -1e9), 0.25),
        (lambda s: (s + BIAS) * 0.25, 0.25),
        (lambda s: 30 * torch.tanh(s / 120), 0.25),
        (lambda s: s * torch.tensor(0.25), 0.25),
        (lambda s: s * torch.full((1, 1, 1), 0.25), 0.25),
        (lambda s: s * torch.full((12, 12), 0.25), 0.25),  # measured: one ratio for all
        (lambda s: torch.where(MASK, torch.tensor(-1e30), s * 0.25), 0.25),
        (lambda s: (s * 0.25).sum(1, keepdim=True) / s.shape[1], 0.25),  # a mean over heads
        (lambda s: (s * 0.25).sub((s * 0.25).amax(-1, keepdim=True)), 0.25),
        (lambda s: s * torch.linspace(0.1, 0.5, 12), None),  # a tensor of numbers
        (lambda s: s * torch.linspace(0.1, 0.5, 12) + BIAS, None),
        (lambda s: torch.sign(s) * s.abs() ** torch.linspace(1, 2, 12), None),
    ],
)
def test_the_factor_on_scores_is_read_or_a_doubt_never_one(after, factor):
    build = stack(lambda n: Scored(n, after))
    found = read(build)
    rules = found.rules
    (value,) = {m.value for rule in rules for m in rule.measured}
    power = math.log(0.25) / math.log(8)
    rule = lambda power: Everett("standard", WIDE, BASE, qk_exponent=power)
    if factor is None:
        assert value is None and any("was not read" in doubt for doubt in found.doubts)
        with pytest.raises(PlanError, match="does not say what it multiplies.*applied="):
            plan(build(WIDE), rules, rule(power), lr=1.0)
        applied = {"attention_scale": 8**power}
        assert plan(build(WIDE), rules, rule(power), lr=1.0, applied=applied, head_dim=8).rows
        return
    assert value == pytest.approx(factor, rel=1e-3)
    assert plan(build(WIDE), rules, rule(power), lr=1.0).rows
    for other in (-0.5, -1.0):
        with pytest.raises(PlanError, match="multiplies by 0.25 on query-key products"):
            plan(build(WIDE), rules, rule(other), lr=1.0)


@pytest.mark.parametrize(
    ("ready", "factor"),
    [
        (lambda x: F.normalize(x, dim=-1), 10 / 8),
        (lambda x: x / x.norm(dim=-1, keepdim=True), 10 / 8),
        (lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)), 10.0),
        (lambda x: F.layer_norm(x, (8,)), 10.0),
        (lambda x: x * 0.5, 2.5),
        (lambda x: (x + x.flip(-1)) / 2, 2.5),  # as a rotation before the scale
        (lambda x: rotated(rotated(x)) * 0.25, 10 / 16),  # as many terms as the number divides by
        (lambda x: sum(rotated(one) for one in (x, x, -x, x)) / 8, 10 / 16),
        (lambda x: rotated(x, by=1.2), 14.4),
        (lambda x: torch.view_as_real(TURN * torch.view_as_complex(x.unflatten(-1, (4, 2)))), 14.4),
        (lambda x: x @ (0.5 * torch.eye(8).roll(1, 0)), 2.5),
        (lambda x: torch.lerp(torch.zeros_like(x), x, 0.5), 2.5),
        (lambda x: torch.addcmul(torch.zeros(8), x, torch.linspace(0.5, 0.5, 8)), 2.5),
        (lambda x: (x.sum(-2, keepdim=True) / 12).expand_as(x), 10.0),  # a mean over tokens
        (lambda x: (x.sum(-2, keepdim=True) / 24).expand_as(x), 2.5),
        (lambda x: torch.cat([x[..., :4] * 0.5, x[..., 4:]], -1), None),
    ],
)
def test_norms_of_queries_and_keys_are_in_the_factor_relative_to_entries_of_one(ready, factor):
    class Ready(Apart):
        def forward(self, x):
            q, k, v = self.three(x)
            q, k = (ready(one.contiguous()).reshape(v.shape) for one in (q, k))
            return self.d(merged(F.scaled_dot_product_attention(q, k, v, scale=10.0)))

    (value,) = {m.value for rule in read(stack(Ready)).rules for m in rule.measured}
    assert value == pytest.approx(factor)


def by_hand(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("ready", "factor"),
    [
        (lambda q, one, gain: q * one, 2.0),  # a learned temperature
        (lambda q, one, gain: q / one, 0.5),
        (lambda q, one, gain: q * one.exp(), math.exp(2)),
        (lambda q, one, gain: F.rms_norm(q, (8,), gain), 3.0),
        (lambda q, one, gain: F.normalize(q, dim=-1) * (1 + gain), 4 * 8**-0.5),
        # What a norm takes away again, and what comes after one.
        (lambda q, one, gain: F.normalize(q * gain, dim=-1), 8**-0.5),
        (lambda q, one, gain: F.layer_norm(q * one, (8,)), 1.0),
        (lambda q, one, gain: F.rms_norm(q * one, (8,), gain), 3.0),
        (lambda q, one, gain: q * gain / (q * gain).norm(dim=-1, keepdim=True), 8**-0.5),
        (lambda q, one, gain: by_hand(q * one), 1.0),
        (lambda q, one, gain: by_hand(q / one) * gain, 3.0),
        (lambda q, one, gain: torch.cat([q[..., :4] * one, q[..., 4:]], -1), None),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_gains_on_queries_are_in_the_factor_as_they_start(ready, factor, fused):
    class Gained(Apart):
        def __init__(self, n):
            super().__init__(n)
            self.one, self.gain = (
                nn.Parameter(torch.tensor(2.0)),
                nn.Parameter(torch.full((8,), 3.0)),
            )

        def forward(self, x):
            q, k, v = self.three(x)
            q = ready(q, self.one, self.gain)
            weights = F.softmax(q @ k.mT, dim=-1)
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0) if fused else weights @ v
            return self.d(merged(y)) * self.one * self.gain.mean()

    (value,) = {m.value for rule in read(stack(Gained)).rules for m in rule.measured}
    assert value == pytest.approx(factor)


@pytest.mark.parametrize(
    ("by", "tensor", "factor"),
    [
        ({"embed": 8.0}, "wte.weight", ("embed_scale", 8.0)),
        ({"branch": 0.5}, "blocks.*.attn.d.weight", ("residual_multiplier", 0.5)),
        ({"branch": 0.5}, "blocks.*.mlp.down.weight", ("residual_multiplier", 0.5)),
        ({"logits": 0.125}, "head.weight", ("logit_multiplier", 0.125)),
    ],
)
def test_factors_on_embeddings_branches_and_logits_are_compared(by, tensor, factor):
    build = lambda n: Scaled(n, **by)
    found = read(build)
    (rule,) = (rule for rule in found.rules if rule.pattern == tensor)
    assert [m[:2] for m in rule.measured] == [factor]
    assert f"{factor[1]:g}" in str(found).replace("8.0", "8")
    prescription = Everett("mup", WIDE, BASE, qk_exponent=-0.5)
    with pytest.raises(PlanError, match=f"has a factor {factor[1]:g} in the forward pass"):
        plan(build(WIDE), found.rules, prescription, lr=1.0, absorb_multipliers=True)


class Parallel(nn.Module):
    """Attention and MLP side by side, that `join` adds to the stream; two readouts."""

    def __init__(self, n, join, logits=torch.add):
        super().__init__()
        self.wte, self.one, self.two = nn.Embedding(20, n), linear(n, 20), linear(n, 20)
        self.attn, self.mlp, self.norm = Apart(n), Mlp(n), Rms(n)
        self.join, self.logits = join, logits

    def forward(self, ids):
        x = self.wte(ids)
        for _ in range(2):
            x = self.join(x, self.attn(self.norm(x)), self.mlp(self.norm(x)))
        y = self.norm(x)
        return self.logits(self.one(y), self.two(y))


@pytest.mark.parametrize(
    ("join", "by"),
    [
        (lambda x, a, b: x + a + b, (1.0, 1.0)),
        (lambda x, a, b: x + (a + b) * 0.5, (0.5, 0.5)),
        (lambda x, a, b: sum((x, (a + b) * 0.5)), (0.5, 0.5)),
        (lambda x, a, b: x + (0.5 * a + 2.0 * b), (0.5, 2.0)),
        (lambda x, a, b: x + 0.5 * a + 2.0 * b, (0.5, 2.0)),
        (lambda x, a, b: x + (a - b / 2) * 0.5, (0.5, 0.25)),
        (lambda x, a, b: torch.add(a, b, alpha=2) * 0.5 + x, (0.5, 1.0)),
        (lambda x, a, b: sum((0.5 * a, x, 2.0 * b)), (0.5, 2.0)),
        (lambda x, a, b: torch.addcmul(x, a, torch.ones(1), value=0.5) + 2.0 * b, (0.5, 2.0)),
        (lambda x, a, b: torch.addcmul(x, a, a.sigmoid(), value=0.5) + 2.0 * b, (0.5, 2.0)),
        (lambda x, a, b: x + F.layer_norm(0.5 * a + 2.0 * b, x.shape[-1:]), (1.0, 1.0)),
        (lambda x, a, b: x + Rms.forward(ONE, 0.5 * a + 2.0 * b), (1.0, 1.0)),
    ],
)
def test_a_number_on_a_branch_is_on_each_of_its_ends(join, by):
    found = read(lambda n: Parallel(n, join))
    rules = {rule.pattern: rule for rule in found.rules}
    for name, value in zip(("attn.d.weight", "mlp.down.weight"), by, strict=True):
        measured = [("residual_multiplier", value)] if value != 1.0 else []
        assert [m[:2] for m in rules[name].measured] == measured
        assert found.factors.get(f"branch {name}", "1") == f"{value:g}"
        assert rules[name].role in ("attention_output", "mlp_out")


def test_each_of_two_readouts_has_its_number():
    join = lambda x, a, b: x + a + b
    found = read(lambda n: Parallel(n, join, lambda one, two: 0.5 * one + 2.0 * two))
    rules = {rule.pattern: [m[:2] for m in rule.measured] for rule in found.rules}
    assert rules["one.weight"] == [("logit_multiplier", 0.5)]
    assert rules["two.weight"] == [("logit_multiplier", 2.0)]


def test_a_number_on_the_stream_that_changes_with_the_width_is_refused():
    join = lambda by: lambda x, a, b: x * by(x.shape[-1]) + a + b
    assert read(lambda n: Parallel(n, join(lambda n: 0.5))).rules
    with pytest.raises(PlanError, match="a number multiplies by 0.5, by 1 at the smaller width"):
        _ = read(lambda n: Parallel(n, join(lambda n: BASE / n))).rules
    with pytest.raises(PlanError, match="a number multiplies by 0.75, by 0.5 at the smaller width"):
        _ = read(lambda n: Parallel(n, lambda x, a, b: x.lerp(a, 16 / x.shape[-1]) + b)).rules


def test_a_factor_that_the_rule_asks_for_is_no_error():
    build = lambda n: Scaled(n, branch=0.5)
    rule = CompleteP(WIDE, BASE, depth=2, base_depth=1, qk_exponent=-0.5)
    rules = read(build).rules
    applied = {"residual_multiplier": 0.5}
    numbers = plan(build(WIDE), rules, rule, lr=1.0, absorb_multipliers=True, applied=applied)
    assert [(f.name, f.value) for f in numbers.forward if f.name.startswith("res")] == [
        ("residual_multiplier", 0.5)
    ]


def test_a_tied_readouts_factor_is_reported_and_compared():
    def build(n, of=lambda n: 0.5, before=False):
        by = {"into": of(n)} if before else {"logits": of(n)}
        model = Scaled(n, **by)
        model.head.weight = model.wte.weight
        return model

    def planned(width, of, before):
        rules = read(lambda n: build(n, of, before)).rules
        rule = Tied(Everett("mup", width, BASE, qk_exponent=-0.5))
        model = build(width, of, before)
        found = plan(model, rules, rule, lr=1.0, absorb_multipliers=True).forward
        return [f.value for f in found if f.name == "logit_multiplier"]

    for before in (False, True):
        assert planned(WIDE, lambda n: 0.5, before) == [0.5]
        with pytest.raises(PlanError, match="'wte.weight'.*has a factor 0.5 .* the plan has 0.25"):
            planned(2 * WIDE, lambda n: 0.5, before)
        for width in (WIDE, 4 * WIDE):  # compared at the widths at which it was measured
            assert planned(width, lambda n: BASE / n, before) == [BASE / width]
        with pytest.raises(PlanError, match="'wte.weight'.*has a factor 0.7.* the plan has 0.5"):
            planned(WIDE, lambda n: (BASE / n) ** 0.5, before)


@pytest.mark.parametrize(
    "normed",
    [
        lambda x, g: g * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
        lambda x, g: g * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
        lambda x, g: x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5) * g,
        lambda x, g: (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * g,
        lambda x, g: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * g,
    ],
)
def test_gains_of_norms_by_hand_are_those_of_norms(normed):
    class Root(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.wte, self.mlp, self.head = nn.Embedding(20, n), Mlp(n), linear(n, 20)
            self.gain, self.last = nn.Parameter(torch.ones(n)), nn.Parameter(torch.ones(n))

        def forward(self, ids):
            x = self.wte(ids)
            x = x + self.mlp(normed(x, self.gain))
            return self.head(normed(x, self.last))

    roles = {reading.name: str(reading.role) for reading in read(Root).readings}
    assert (roles["gain"], roles["last"]) == ("norm_scale", "final_norm_scale")


def test_a_factor_into_a_matrix_is_said_where_it_changes_with_the_width():
    steady = read(lambda n: Scaled(n, into=0.5)).factors  # as an activation that is written out has
    assert not [key for key in steady if "head" in key]
    both = read(lambda n: Scaled(n, into=0.5, logits=0.5)).factors
    assert both["logits head.weight"] == "0.25"
    said = read(lambda n: Scaled(n, into=32 / n)).factors["readout head.weight"]
    assert said == "0.5 (1 at the smaller width)"


class NormedMatrix(nn.Module):
    """A readout whose matrix is normed by a vector of its own before it is used."""

    def __init__(self, n):
        super().__init__()
        self.tokens = nn.Embedding(20, n)
        self.head, self.gain = nn.Parameter(torch.randn(20, n)), nn.Parameter(torch.ones(n))

    def forward(self, ids):
        return F.linear(self.tokens(ids), F.rms_norm(self.head, self.gain.shape, self.gain))


def test_a_readout_that_a_vector_norms_is_one_whose_size_has_no_effect():
    found = read(NormedMatrix)
    assert found["head"].role == "readout"
    with pytest.raises(PlanError, match="'head' is normalised before use"):
        _ = found.rules


class Inverse(nn.Module):
    """An attention that has a head dimension as an attribute, and divides by it in its code."""

    def __init__(self, n):
        super().__init__()
        self.tokens, self.head, self.head_dim = nn.Embedding(20, n), nn.Linear(n, 20), 16
        self.q, self.k, self.v, self.out = (nn.Linear(n, n, bias=False) for _ in range(4))

    def forward(self, ids):
        x = self.tokens(ids)
        q, k, v = (
            each(x).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = (q @ k.mT / 16).softmax(-1) @ v
        return self.head(self.out(y.transpose(1, 2).flatten(2)))


def test_what_a_trace_measured_stands_above_a_convention():
    rules, rule = read(Inverse).rules, Everett("mup", WIDE, BASE, qk_exponent=-1.0)
    made = plan(Inverse(WIDE), rules, rule, lr=0.1, absorb_multipliers=True)
    assert [(one.value, one.head_dim) for one in made.forward] == [(1 / 16, 16)]


@pytest.mark.parametrize("learned", [False, True])
def test_a_number_per_head_is_the_factor_that_a_trace_measures(learned):
    class Attention(Apart):
        def __init__(self, n):
            super().__init__(n)
            self.head_dim, scale = 8, torch.full((n // 8, 1, 1), 0.25)
            self.scale = nn.Parameter(scale) if learned else scale

        def forward(self, x):
            q, k, v = self.three(x)
            return self.d(merged((q @ k.mT * self.scale).softmax(-1) @ v))

    build = stack(Attention)
    rules, power = read(build).rules, math.log(0.25) / math.log(8)
    planned = lambda power: plan(
        build(WIDE), rules, Everett("standard", WIDE, BASE, qk_exponent=power), lr=1.0
    )
    (one,) = planned(power).forward
    assert (one.value, one.head_dim) == (pytest.approx(0.25), 8)
    with pytest.raises(PlanError, match="as traced. multiplies by 0.25 on query-key products"):
        planned(-0.5)


@pytest.mark.parametrize("scale", [lambda n: n**-0.5, lambda n: n / WIDE / HEAD])
def test_a_factor_that_the_width_changes_is_no_power_of_the_head_dimension(scale):
    class Wide(Apart):
        def forward(self, x):
            q, k, v = self.three(x)
            y = F.scaled_dot_product_attention(q, k, v, scale=scale(x.shape[-1]))
            return self.d(merged(y))

    assert scale(WIDE) == 1 / HEAD  # what muP asks for
    rule = Everett("mup", WIDE, BASE, qk_exponent=-1)
    with pytest.raises(PlanError, match="'blocks.0.attn.a.weight' .* on query-key products"):
        plan(stack(Wide)(WIDE), read(stack(Wide)).rules, rule, lr=1.0)
