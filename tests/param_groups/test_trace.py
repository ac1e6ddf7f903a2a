"""Roles from use: every tensor of other people's kinds of models is right or refused."""

import fnmatch
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from param_groups import Everett, PlanError, Role, plan, traced
from param_groups.model.factors import unnamed
from tests.param_groups import traced_mixers, traced_odd, traced_text, traced_vision
from tests.param_groups.traced_blocks import (
    BASE,
    CASES,
    WIDE,
    Apart,
    Mlp,
    linear,
    merged,
    read,
    stack,
)

MODULES = traced_text, traced_mixers, traced_vision, traced_odd  # which write CASES


def expectations(case, names):
    """{tensor: (role and layout, fan-in, power of the rate, start)} as a case states them."""
    expected = {}
    for pattern, role, fan_in, power, start in case.expected:
        hits = fnmatch.filter(names, pattern)
        assert hits, pattern
        expected |= dict.fromkeys(hits, (role, eval(fan_in, {"n": WIDE}), power, start))
    return expected


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_right_or_refused(name):
    case = CASES[name]
    found = read(case.build, case.run)
    if case.refused:
        with pytest.raises(PlanError, match=case.refused) as error:
            _ = found.rules
        assert "\n" not in str(error.value) and found.doubts
        return
    wide, small = case.build(WIDE), case.build(BASE)
    power = None
    if case.attention:
        size = case.head_dim(WIDE)
        power = math.log(case.attention(size)) / math.log(size)
    planned = lambda model, power: plan(
        model, found.rules, Everett("standard", BASE, BASE, qk_exponent=power), lr=1.0, base=small
    )
    at_base = planned(small, power)
    got = {}
    for row in planned(wide, power).rows:
        reading = found[row.name]
        layout = "" if reading.layout is reading.role.facts.layout else f"/{reading.layout}"
        start = "kept" if row.init_distribution == "kept" else f"{reading.scale:g}"
        ratio = round(math.log2(row.lr / at_base[row.name].lr), 3)
        got[row.name] = (row.role + layout, row.fan_in, ratio, start)
    assert got == expectations(case, got), str(found)
    roles = {row.name: Role(row.role) for row in at_base.rows}
    assert at_base.forward or not unnamed(small, case.run, roles)
    if case.attention:
        with pytest.raises(PlanError, match="on query-key products"):
            planned(wide, power + 0.25)
        said = unnamed(small, case.run, dict.fromkeys(roles, Role.HIDDEN))
        assert f"multiplied by {case.attention(case.head_dim(BASE)):.4g} at head dim" in said


# What the first form of a trace got wrong, and other inputs of each kind


def test_products_without_a_softmax_are_no_attention():
    class Bilinear(Apart):  # also where a sigmoid follows
        def forward(self, x):
            q, k, v = self.three(x)
            return self.d(merged((q @ k.mT).sigmoid() @ v))

    found = read(stack(Bilinear))
    assert not any(r.places for r in found.readings) and not any(
        key.startswith("attention") for key in found.factors
    )
    assert {str(found[f"blocks.0.attn.{key}.weight"].role) for key in "abc"} == {"mlp_in"}


def test_dropout_is_no_factor_and_the_random_state_is_left_alone():
    class Dropped(Mlp):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3, self.training)

    before = torch.get_rng_state()
    found = read(stack(mlp=Dropped))
    assert [*found.factors] == ["attention"]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("picked", [lambda bias, which: bias[which], lambda b, w: b[int(w[0])]])
def test_a_bias_of_chosen_experts_is_a_vector(picked):
    class Chosen(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.gate, self.up = linear(n, 3), nn.Parameter(torch.randn(3, n, n))
            self.bias = nn.Parameter(torch.zeros(3, n))

        def forward(self, x):
            which = self.gate(x.mean((0, 1))[None]).topk(1).indices[0]
            return x @ self.up[which[0]] + picked(self.bias, which)

    found = read(stack(mlp=Chosen))
    bias = found["blocks.0.mlp.bias"]
    assert (str(bias.role), str(bias.layout)) == ("hidden_bias", "vector")
    assert str(found["blocks.0.mlp.gate.weight"].role) == "router"
    assert str(found["blocks.0.mlp.up"].layout) == "experts_transposed"


@pytest.mark.parametrize(
    ("mixed", "refused"),
    [
        (lambda w: w.flatten().cumsum(0)[-w.shape[1] :], True),
        (lambda w: torch.fft.fft(w[0]).real, True),
        (lambda w: w.sum() * torch.ones(()), True),
        (lambda w: w.nansum() * torch.ones(()), True),
        (lambda w: w.logsumexp(-1)[0], True),
        (lambda w: torch.fft.fft2(w).real[0], True),
        (lambda w: w.view(-1).cumsum(0)[-w.shape[1] :], True),
        (lambda w: torch.fft.fftshift(w, dim=-1)[0], False),
        (lambda w: torch.sum(w, axis=0), False),
        (lambda w: torch.sum(w, dim=0), False),  # of four vectors
        (lambda w: torch.fft.fft(w, dim=0).real[1], False),
        (lambda w: torch.dot(w[0], w[0]) * torch.ones(()), True),
        (lambda w: w.norm() * torch.ones(()), True),
        (lambda w: w.mean() * w.numel(), True),
        (lambda w: w[0] * w.shape[1] ** 0.5, True),  # by a number
        (lambda w: w[0] / torch.tensor(float(w.shape[1])), True),
        (lambda w: w[0] * 0.5, False),
        (lambda w: w.sum() / w.numel(), False),
        (lambda w: w.mean(), False),  # moves as one entry does
    ],
)
def test_a_vector_that_is_summed_along_the_width_is_no_vector(mixed, refused):
    """Its entries move alike, so that a sum moves as many times as far."""

    class Shifted(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.w, self.head = (
                linear(6, n),
                nn.Parameter(torch.ones(4, n)),
                linear(n, 3),
            )

        def forward(self, x):
            return self.head(self.first(x) * mixed(self.w))

    reading = traced(Shifted, lambda model: model(torch.randn(5, 6)), (BASE, WIDE))["w"]
    assert any(text in reading.problem for text in ("added up", "a product of")) is refused
    assert refused or reading.role is Role.LAYER_SCALE


parts = lambda x: x.unflatten(1, (-1, 8))


def blocks(x):
    """A matrix for each eight channels."""
    return torch.diag_embed(parts(x))


def scores(q, k):
    """Of heads of eight channels."""
    return parts(q).transpose(0, 1) @ parts(k).permute(1, 2, 0)


def noise(x, size):
    return torch.empty_like(x[:, :1]).log_normal_(0, size / 8).clamp(max=1)


MATRIX, VECTOR = lambda n: (n, n), lambda n: (n,)


def gathered(x, function):
    """All columns of x added up in the first of two."""
    index = torch.zeros(x.shape[1], dtype=torch.long)
    index = index.expand_as(x) if function == "scatter_add" else index
    return getattr(torch.zeros(len(x), 2), function)(1, index, x)[:, :1]


def one_by_one(x):
    """All columns of x added up in a loop."""
    out = torch.zeros(len(x), 1)
    for column in x.split(1, dim=1):
        out = out.index_add(1, torch.zeros(1, dtype=torch.long), column)
    return out


def seldom(x, seen=[]):  # noqa: B006
    """A function of one's own whose every second call gives no tensor."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(seldom, (x,), x)
    seen.append(x)
    return x + 0 if len(seen) % 2 else None


@pytest.mark.parametrize(
    ("size", "product", "problem"),
    [
        (VECTOR, lambda x, w: (x * w * 0.5).sum(-1, keepdim=True), "no layout"),
        (VECTOR, lambda x, w: (-(x * w)).double().sum(axis=-1)[:, None], "no layout"),
        (lambda n: (n // 8, 8), lambda x, w: (x * w.view(-1)).nansum(-1)[:, None], "no layout"),
        (MATRIX, lambda x, w: (x[:, None] * w).mean(2), "4 times as many entries"),
        (VECTOR, lambda x, w: (x * w + x).sum(-1)[:, None], "of which 64 are added up, 32 at"),
        (VECTOR, lambda x, w: (x * w).relu().view(5, -1, 8).sum((1, 2))[:, None], "added"),
        (VECTOR, lambda x, w: torch.addcmul(x, x, w).mT.sum(0)[:, None], "added up"),
        (VECTOR, lambda x, w: (x * w).cumsum(-1), "added up"),
        (VECTOR, lambda x, w: (x * w).cumsum_(-1), "added up"),
        (VECTOR, lambda x, w: torch.einsum("bi->b", x + w)[:, None], "added up"),
        (VECTOR, lambda x, w: (x * w) @ torch.ones(x.shape[1], 1), "added up"),
        (VECTOR, lambda x, w: (x * w).mean(-1, True) * x.shape[1], "added up"),
        (VECTOR, lambda x, w: ((x * w) * x).sum(-1, True).sigmoid() * x, "added up"),
        (VECTOR, lambda x, w: torch.linalg.vecdot(x * w, x)[:, None], "added up"),
        (VECTOR, lambda x, w: torch.fft.fft(x * w).real, "added up"),
        (
            lambda n: (n // 8, 8, n),
            lambda x, w: (parts(x).transpose(0, 1) @ w).sum(0),
            "of which 8",
        ),
        (  # in a branch, before a norm
            lambda n: (n // 8, 8, n),
            lambda x, w: F.layer_norm(x + (parts(x).transpose(0, 1) @ w).sum(0), x.shape[1:]),
            "of which 8",
        ),
        # Scores of all heads, before a softmax.
        (MATRIX, lambda x, w: sum(scores(x @ w, x)).softmax(-1) @ x, "added up"),
        (MATRIX, lambda x, w: scores(x @ w, x).mean(0).softmax(-1) @ x, ""),
        (MATRIX, lambda x, w: (scores(x @ w, x).sum(0) / len(x.T) * 8).softmax(-1) @ x, ""),
        (MATRIX, lambda x, w: (scores(x @ w, x).sum(0) / len(x.T) ** 0.5).softmax(-1) @ x, "added"),
        (MATRIX, lambda x, w: F.linear(x, w / x.shape[1] ** 0.5), "counts 0.125 times"),
        (MATRIX, lambda x, w: F.linear(x / x.shape[1] ** 0.5, w), "by 0.125, by 0.1768"),
        (VECTOR, lambda x, w: (x * w + x).sum(-1, True) / x.sum(-1, True), ""),
        (VECTOR, lambda x, w: F.rms_norm(x, w.shape, w).sum(-1, True), "of which 64"),
        (
            lambda n: (n, n),
            lambda x, w: (
                F.scaled_dot_product_attention(x[:, None], x[:, None], (x @ w)[:, None])
                .sum(-1)
                .repeat(1, x.shape[1])
            ),
            "of which 64",
        ),
        (MATRIX, lambda x, w: ((x @ w) * x).sum(-1, True), "of which 64"),
        (MATRIX, lambda x, w: ((x @ w) * x).sum(-1, True) / 1024, "count 0.0625 times, 0.03125"),
        (MATRIX, lambda x, w: (x @ w) @ x.mT @ x, "of which 64"),  # without a softmax
        (VECTOR, lambda x, w: (x * w).norm(dim=-1, keepdim=True), "added up"),
        (VECTOR, lambda x, w: (x * w) / (x * w).norm(dim=-1, keepdim=True), ""),
        (VECTOR, lambda x, w: x * w * (1 / (x * w).square().sum(-1, True).sqrt()), ""),
        (VECTOR, lambda x, w: (x * w).exp() / (x * w).exp().sum(-1, True), ""),
        (VECTOR, lambda x, w: (x * w + x).sum(-1, True) / x.shape[1], ""),  # a mean
        (VECTOR, lambda x, w: parts(x * w).sum(1).repeat(1, x.shape[1] // 8), "of which 8 are"),
        (VECTOR, lambda x, w: torch.fft.fft(x * w, norm="ortho").real, ""),
        (VECTOR, lambda x, w: F.rms_norm(x * w + x, x.shape[1:]), ""),
        (
            MATRIX,  # norms by hand, of a sum
            lambda x, w: (x / (x.square().sum(-1, True) / x.shape[1]).sqrt()) @ w,
            "",
        ),
        (MATRIX, lambda x, w: x * (x.square().sum(-1, True) / x.shape[1] + 1e-6).rsqrt() @ w, ""),
        (MATRIX, lambda x, w: x / x.square().sum(-1, True).sqrt() * x.shape[1] ** 0.5 @ w, ""),
        (VECTOR, lambda x, w: F.rms_norm((x * w).cumsum(-1), x.shape[1:]), ""),
        # Numbers of every form: by keyword, in a constant tensor, on one of two terms, divided.
        (MATRIX, lambda x, w: F.linear(torch.mul(x, other=x.shape[1]), w), "takes"),
        (MATRIX, lambda x, w: x * torch.full(x.shape[1:], x.shape[1] * 1.0) @ w, "takes"),
        (MATRIX, lambda x, w: F.linear(x, w * torch.full(w.shape, x.shape[1] ** -0.5)), "counts"),
        (MATRIX, lambda x, w: (x @ w * x.shape[1] + x.relu()).relu(), "terms"),
        (MATRIX, lambda x, w: torch.add(x.relu(), x @ w, alpha=x.shape[1]).relu(), "terms"),
        (MATRIX, lambda x, w: x * (x.shape[1] ** 0.5 / x.norm(dim=-1, keepdim=True)) @ w, ""),
        # Functions that no list names, loops, and a second use of the same kind.
        (VECTOR, lambda x, w: F.adaptive_avg_pool1d((x * w)[:, None], 1)[:, 0], ""),
        (VECTOR, lambda x, w: F.adaptive_avg_pool1d(x * w, 1) * x.shape[1], "added up"),
        (VECTOR, lambda x, w: F.lp_pool1d((x * w)[:, None], 1, x.shape[1])[:, 0], "added up"),
        (VECTOR, lambda x, w: F.interpolate((x * w)[:, None], 1)[:, 0], ""),
        (VECTOR, lambda x, w: F.interpolate((x * w)[:, None], 1)[:, 0] * x.shape[1], "added up"),
        (VECTOR, lambda x, w: gathered(x * w, "index_add"), "of which 64 are added up, 32 at"),
        (VECTOR, lambda x, w: gathered(x * w, "scatter_add"), "of which 64 are added up, 32 at"),
        (VECTOR, lambda x, w: x + gathered(x * w, "scatter_add") / x.shape[1], ""),
        (VECTOR, lambda x, w: one_by_one(x * w), "of which 64 are added up, 32 at"),
        (VECTOR, lambda x, w: one_by_one(x * w) / x.shape[1], ""),
        (VECTOR, lambda x, w: torch.tensordot(x * w, x, ([1], [1]))[:, :1], "added up"),
        (VECTOR, lambda x, w: torch.cdist(x * w, x)[:, :1], "added up"),
        (VECTOR, lambda x, w: sum((x * w)[:, i : i + 1] for i in range(x.shape[1])), "added up"),
        (VECTOR, lambda x, w: sum((x * w).unbind(1))[:, None] / x.shape[1], ""),
        (MATRIX, lambda x, w: sum((x @ w).split(8, dim=1)).repeat(1, x.shape[1] // 8), "added"),
        (VECTOR, lambda x, w: x * (x * w).var(1, keepdim=True), ""),
        (VECTOR, lambda x, w: x * (x * w).std(1, keepdim=True) * x.shape[1], "added up"),
        (VECTOR, lambda x, w: x * w + x * (w * x.shape[1]), "counts 64 times"),
        (MATRIX, lambda x, w: (x @ w).relu() + (x * x.shape[1]) @ w, "takes"),
        (MATRIX, lambda x, w: F.scaled_dot_product_attention(x, x, x * x.shape[1]) @ w, "takes"),
        (MATRIX, lambda x, w: (F.scaled_dot_product_attention(x, x, x) * x.shape[1]) @ w, "takes"),
        (MATRIX, lambda x, w: ((x @ x.mT).softmax(-1) / x.shape[1]) @ x @ w, "takes"),
        (MATRIX, lambda x, w: torch.addmm(x, x, w, alpha=x.shape[1] ** -0.5), "takes"),
        (MATRIX, lambda x, w: (x * x.shape[1]) @ w + (x * 2) @ w, "takes"),
        (
            lambda n: (2 * n, n),
            lambda x, w: F.linear(
                torch.cat([x.relu() * x.shape[1], x], 1), w.view(-1, 2 * x.shape[1])
            ),
            "",
        ),
        (VECTOR, lambda x, w: (x * w.expand(len(x), -1)).sum(0), ""),  # over the rows
        # Functions that tell entries of one nothing: no inverse, no entry read.
        (VECTOR, lambda x, w: (x * w).logcumsumexp(0), ""),
        (VECTOR, lambda x, w: (x * w).logcumsumexp(1), "added up"),
        (
            VECTOR,
            lambda x, w: torch.linalg.inv(torch.eye(8) + blocks(x * w))[..., 0].flatten(1),
            "",
        ),
        (VECTOR, lambda x, w: torch.linalg.inv(torch.diag_embed(x * w))[..., 0], "added up"),
        (VECTOR, lambda x, w: x * w + noise(x * w, x.shape[1]), ""),
        (VECTOR, lambda x, w: torch.empty_like(x * w).copy_(x * w), ""),  # of any content
        (VECTOR, lambda x, w: seldom(x * w), "added up"),
        (VECTOR, lambda x, w: torch.minimum(x * w, (x * w).new_full((1, 1), x.shape[1])), ""),
        (VECTOR, lambda x, w: x * w, ""),
    ],
)
def test_a_product_that_is_written_out_is_no_gain(size, product, problem):
    class Written(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.hidden, self.head = linear(6, n), linear(n, n), linear(n, 3)
            self.w = nn.Parameter(torch.randn(size(n)))

        def forward(self, x):
            x = self.hidden(self.first(x))
            return self.head(x + product(x, self.w).to(x.dtype))

    reading = traced(Written, lambda model: model(torch.randn(5, 6)), (BASE, WIDE))["w"]
    assert problem in reading.problem and bool(problem) == bool(reading.problem)


@pytest.mark.parametrize("rows", [5, 4, 8, BASE, WIDE])
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: (x * w).sum(0) + (x * w).sum(1, keepdim=True),
        lambda x, w: (x * w).sum((0, 1), keepdim=True),
        lambda x, w: (x * w).mT.sum(1) + (parts(x * w).sum(1)).repeat(1, x.shape[1] // 8),
        lambda x, w: (x * w).sum(0) + torch.einsum("bi->b", x * w)[:, None],
        lambda x, w: ((x * w).sum(0, True) + x).sum(1, True) + (x * w).sum(0),
        lambda x, w: torch.maximum(sum((x * w).unbind(0)), sum((x * w).split(1, dim=1))),
    ],
)
def test_a_sum_over_rows_hides_none_over_channels(rows, product):
    """As many rows as the width, at either size, or as heads."""

    class Both(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.head = linear(6, n), linear(n, 3)
            self.w = nn.Parameter(torch.randn(n))

        def forward(self, x):
            x = self.first(x)
            return self.head(x.relu() + product(x, self.w))

    run = lambda model: model(torch.randn(rows, 6))
    reading = traced(Both, run, (BASE, WIDE))["w"]
    assert "added up" in reading.problem or "no layout" in reading.problem


@pytest.mark.parametrize(
    ("size", "taken", "refused"),
    [
        (
            lambda n: (n, n * n),
            lambda x, w: F.linear((x[:, :, None] * x[:, None]).flatten(1), w),
            4,
        ),
        (lambda n: (n, n, n), lambda x, w: torch.einsum("bi,ijk,bj->bk", x, w, x), 4),
        (lambda n: (n // 8, 8, 8), lambda x, w: torch.einsum("bgi,gij->bgj", parts(x), w), 0),
        (lambda n: (n, n + 6), lambda x, w: F.linear(F.pad(x, (0, 6)), w), 0),
    ],
)
def test_a_matrix_that_sums_over_another_power_of_the_width_is_refused(size, taken, refused):
    """Its rate would be that of n inputs where a plan has one width for all."""

    class Powers(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.hidden, self.head = linear(6, n), linear(n, n), linear(n, 3)
            self.w = nn.Parameter(torch.randn(size(n)))

        def forward(self, x):
            return self.head(self.hidden(taken(self.first(x), self.w).flatten(1)))

    found = traced(Powers, lambda model: model(torch.randn(5, 6)), (BASE, WIDE))
    assert bool(found["w"].problem) is bool(refused), found
    if refused:
        with pytest.raises(PlanError, match="'w' sums over 4 times as many .* base=.*known="):
            _ = found.rules


@pytest.mark.parametrize("shape", [lambda n: (n, n), lambda n: (n, 1)])
def test_a_matrix_times_another_entry_by_entry_is_a_product_of_parameters(shape):
    class Masked(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.hidden, self.head = linear(6, n), linear(n, n), linear(n, 3)
            self.mask = nn.Parameter(torch.ones(shape(n)))

        def forward(self, x):
            return self.head(F.linear(self.first(x), self.hidden.weight * self.mask))

    found = traced(Masked, lambda model: model(torch.randn(5, 6)), (BASE, WIDE))
    whole = shape(2) == (2, 2)
    for name in ("mask", "hidden.weight"):
        assert ("a product of parameters" in found[name].problem) is whole
    assert whole or (found["mask"].role, found["hidden.weight"].role) == ("layer_scale", "hidden")
