"""Roles from use: every tensor of other people's kinds of models is right or refused."""

import fnmatch
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from param_groups import CompleteP, Everett, Plan, PlanError, Rule, Spectral, plan, traced
from param_groups.roles import default_layout
from tests.param_groups import traced_other, traced_text
from tests.param_groups.traced_other import text
from tests.param_groups.traced_text import IDS, Apart, Bank, Mlp, Rms, Stack, heads, linear, merged

CASES = traced_text.CASES | traced_other.CASES
BASE, WIDE = 32, 64


def expectations(case, names):
    """{tensor: (role and layout, fan-in, power of the rate, start)} as a case states them."""
    expected = {}
    lines = [line.split() for line in case.expected.splitlines() if line]
    for pattern, role, fan_in, power, *start in lines:
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        assert hits, pattern
        numbers = (role, eval(fan_in, {"n": WIDE}), int(power), *(start or ["1"]))
        expected |= dict.fromkeys(hits, numbers)
    return expected


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_right_or_refused(name):
    case = CASES[name]
    found = traced(case.build, case.run, (BASE, WIDE))
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
    rows = planned(wide, power).rows
    at_base = {row.name: row.lr for row in planned(small, power).rows}
    got = {}
    for row in rows:
        reading = found[row.name]
        layout = "" if reading.layout is default_layout(reading.role) else f"/{reading.layout}"
        start = "kept" if row.init_distribution == "kept" else f"{reading.scale:g}"
        ratio = row.lr / at_base[row.name]
        got[row.name] = (row.role + layout, row.fan_in, round(math.log2(ratio), 3), start)
    assert got == expectations(case, got), str(found)
    if case.attention:
        with pytest.raises(PlanError, match="on query-key products"):
            planned(wide, power + 0.25)


# What the first form of a trace got wrong, and other inputs of each kind


def stack(attention=Apart, mlp=Mlp, norm=Rms):
    return lambda n: Stack(n, attention, mlp, norm)


def read(build, **more):
    return traced(build, text, (BASE, WIDE), **more)


def test_products_without_a_softmax_are_no_attention():
    class Bilinear(Apart):  # also where a sigmoid follows
        def forward(self, x):
            q, k, v = (heads(layer(x)) for layer in (self.a, self.b, self.c))
            return self.d(merged((q @ k.mT).sigmoid() @ v))

    found = read(stack(Bilinear))
    assert not found.parts and not any(key.startswith("attention") for key in found.factors)
    assert {str(found[f"blocks.0.attn.{key}.weight"].role) for key in "abc"} == {"mlp_in"}


class Scored(Apart):
    """Attention by hand; `after` is done to scores before the softmax."""

    def __init__(self, n, after):
        super().__init__(n)
        self.after = after

    def forward(self, x):
        q, k, v = (heads(layer(x)) for layer in (self.a, self.b, self.c))
        return self.d(merged(F.softmax(self.after(q @ k.mT), dim=-1) @ v))


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
    ],
)
def test_norms_of_queries_and_keys_are_in_the_factor_relative_to_entries_of_one(ready, factor):
    class Ready(Apart):
        def forward(self, x):
            q, k, v = (heads(layer(x)) for layer in (self.a, self.b, self.c))
            y = F.scaled_dot_product_attention(ready(q), ready(k), v, scale=10.0)
            return self.d(merged(y))

    (value,) = {m.value for rule in read(stack(Ready)).rules for m in rule.measured}
    assert value == pytest.approx(factor)


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


# Factors beside the attention's


class Scaled(Stack):
    def __init__(self, n, embed=1.0, branch=1.0, into=1.0, logits=1.0):
        super().__init__(n, Apart, Mlp, Rms)
        self.by = embed, branch, into, logits

    def forward(self, ids):
        embed, branch, into, logits = self.by
        x = self.wte(ids) * embed
        for block in self.blocks:
            x = x + branch * block.attn(block.n1(x))
            x = x + block.mlp(block.n2(x)) * branch
        return logits * self.head(self.final(x) * into)


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


def test_a_factor_that_the_rule_asks_for_is_no_error():
    build = lambda n: Scaled(n, branch=0.5)
    rule = CompleteP(WIDE, BASE, depth=2, base_depth=1, qk_exponent=-0.5)
    rules = [
        replace(r, role="final_norm_scale", trunk=None) if r.pattern == "final.weight" else r
        for r in read(build).rules
    ]
    applied = {"residual_multiplier": 0.5}
    numbers = plan(build(WIDE), rules, rule, lr=1.0, absorb_multipliers=True, applied=applied)
    assert [(f.name, f.value) for f in numbers.forward if f.name.startswith("res")] == [
        ("residual_multiplier", 0.5)
    ]


def test_a_factor_into_a_matrix_is_said_where_it_changes_with_the_width():
    assert "input head.weight" not in read(lambda n: Scaled(n, into=0.5)).factors
    said = read(lambda n: Scaled(n, into=32 / n)).factors["input head.weight"]
    assert said == "0.5 (1 at the smaller width)"


# Starts


class Starts(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(20, n), Rms(n, offset=1.0)
        self.blocks = nn.ModuleList(linear(n, n) for _ in range(2))
        self.resid = nn.Parameter(torch.full((2,), 1.1))
        self.dt_bias = nn.Parameter(torch.linspace(-6.6, -2, n))
        self.noise, self.head = nn.Parameter(0.1 * torch.randn(n)), linear(n, 20)
        nn.init.zeros_(self.blocks[1].weight)

    def forward(self, ids):
        x = self.tokens(ids)
        for gain, block in zip(self.resid, self.blocks, strict=True):
            y = block(self.norm(x)) + self.noise
            x = gain * x + y.relu() * F.softplus(y + self.dt_bias)
        return self.head(x)


def test_initialise_keeps_starts_that_are_not_the_roles_and_says_so():
    found = read(Starts)
    assert found.starts == {
        "norm.weight": "starts at 0",
        "blocks.1.weight": "starts at 0",
        "resid": "starts at 1.1",
        "dt_bias": "starts between -6.6 and -2",
    }
    assert "acts as 1" in found["norm.weight"].why
    model = Starts(WIDE)
    dt = model.dt_bias.detach().clone()
    rule = Everett("mup", WIDE, BASE)
    numbers = plan(model, found.rules, rule, lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    assert torch.equal(model.dt_bias, dt) and not model.blocks[1].weight.any()
    assert model.resid.tolist() == pytest.approx([1.1, 1.1]) and not model.norm.weight.any()
    assert not model.noise.any() and model.blocks[0].weight.all()  # torch's noise is no start
    x = torch.randn(500, WIDE)
    assert model.norm(x).std().item() == pytest.approx(1, rel=0.05)
    model(IDS).square().mean().backward()
    assert model.tokens.weight.grad.any()
    (line,) = (line for line in numbers.table().splitlines() if line.startswith("dt_bias"))
    assert "kept as built" in line
    assert Plan.from_dict(json.loads(json.dumps(numbers.to_dict()))) == numbers
    torch.optim.AdamW(numbers.groups(model)).step()


def test_starts_are_drawn_where_that_is_asked_for():
    found = read(Starts, draw=["blocks.*", "dt_bias"])
    model = Starts(WIDE)
    numbers = plan(model, found.rules, Everett("mup", WIDE, BASE), lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    assert not model.dt_bias.any() and model.blocks[1].weight.all()
    assert found.starts["dt_bias"] == "starts between -6.6 and -2, to be drawn"


def test_a_build_that_seeds_itself_does_not_look_fixed():
    def build(n):
        torch.manual_seed(3)
        return Starts(n)

    found = read(build)
    assert found["blocks.0.weight"].keep is False and found["dt_bias"].keep is True


# Widths, depths, names


def test_a_role_does_not_depend_on_the_width_being_the_vocabularys():
    """A readout of a square shape is a readout; 20 is the vocabulary."""

    class Square(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.emb, self.mid, self.out = nn.Embedding(20, n), linear(n, n), linear(n, 20)

        def forward(self, ids):
            return self.out(self.mid(self.emb(ids)).relu())

    for widths in ((20, 40), (10, 20), (40, 10)):
        roles = [str(rule.role) for rule in traced(Square, text, widths).rules]
        assert roles == ["token_embedding", "hidden", "readout"]


def test_names_decide_nothing():
    class Lying(Apart):
        def __init__(self, n):
            super().__init__(n)
            self.norm, self.readout, self.embedding, self.bias = (linear(n, n) for _ in range(4))
            del self.a, self.b, self.c, self.d

        def forward(self, x):
            q, k, v = (heads(layer(x)) for layer in (self.norm, self.readout, self.embedding))
            return self.bias(merged(F.scaled_dot_product_attention(q, k, v)))

    found = read(stack(Lying))
    names = ("norm", "readout", "embedding", "bias")
    roles = [str(found[f"blocks.1.attn.{name}.weight"].role) for name in names]
    assert roles == ["query", "key", "value", "attention_output"]


def test_two_depths_say_what_a_block_holds():
    class PostNorm(Stack):  # its norms are on the stream, and yet more in a deeper model
        def forward(self, ids):
            x = self.wte(ids)
            for block in self.blocks:
                x = block.n1(x + block.attn(x))
                x = block.n2(x + block.mlp(x))
            return self.head(self.final(x))

    build = lambda n, depth=2: PostNorm(n, Apart, Mlp, Rms, layers=depth)
    shallow, deep = read(build), read(build, depths=(2, 3))
    for name, flow, depth in (
        ("blocks.0.n1.weight", False, True),
        ("blocks.0.attn.a.weight", True, True),
        ("final.weight", False, False),
    ):
        assert (shallow[name].inside, deep[name].inside) == (flow, depth)
    bank = traced(lambda n, depth=2: Bank(n, depth), text, (BASE, WIDE), depths=(2, 3))
    assert bank["attn"].inside and not bank["wte.weight"].inside
    rules = {rule.pattern: rule for rule in bank.rules}
    assert rules["attn"].trunk is False and rules["wte.weight"].trunk is None


def test_parts_of_fused_tensors_are_ranges_of_their_outputs():
    fused = read(stack(traced_text.Fused, norm=nn.LayerNorm)).parts["blocks.0.attn.c_attn.weight"]
    n = WIDE
    assert fused == {"query": ((0, n),), "key": ((n, 2 * n),), "value": ((2 * n, 3 * n),)}
    groups = read(traced_text.groups_interleaved).parts["blocks.0.attn.qkv.weight"]
    assert groups["query"][:2] == ((0, 16), (32, 48)) and groups["key"][0] == (16, 24)
    both = read(traced_text.groups_interleaved)["blocks.0.mlp.both.weight"].why
    assert both.endswith("split into 128 + 128")


def test_muon_refuses_fused_tensors_that_a_trace_finds():
    case = CASES["talking_heads"]
    rules = traced(case.build, case.run, (BASE, WIDE)).rules
    with pytest.raises(PlanError, match="key_value"):
        plan(case.build(WIDE), rules, Spectral(WIDE, BASE, qk_exponent=-0.5), lr=1.0)


# Refusals


def test_without_gradients_only_the_parts_are_in_doubt():
    class Quiet(Stack):
        def forward(self, ids):
            with torch.no_grad():
                return super().forward(ids)

    build = lambda kind: lambda n: Quiet(n, kind, Mlp, Rms)
    apart, fused = read(build(Apart)), read(build(traced_text.Fused))
    assert [str(apart[f"blocks.0.attn.{key}.weight"].role) for key in "abcd"] == [
        "query",
        "key",
        "value",
        "attention_output",
    ]
    assert not apart.doubts
    assert str(fused["blocks.0.attn.c_attn.weight"].role) == "qkv"
    assert any(
        "which outputs of blocks.*.attn.c_attn.weight" in line for line in str(fused).split("\n")
    )


def test_an_op_of_ones_own_is_refused():
    @torch.library.custom_op("param_groups_test::mix", mutates_args=())
    def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * k + v

    torch.library.register_autograd(mix, lambda ctx, grad: (grad, grad, grad))

    class Own(Apart):
        def forward(self, x):
            return self.d(torch.ops.param_groups_test.mix(self.a(x), self.b(x), self.c(x)))

    with pytest.raises(PlanError, match="what param_groups_test.mix.* is not known"):
        _ = read(stack(Own)).rules


def test_what_nothing_uses_is_said_and_can_be_given_by_hand():
    class Idle(Mlp):
        def __init__(self, n):
            super().__init__(n)
            self.idle = linear(n, n)

    with pytest.raises(
        PlanError, match=r"'blocks.0.mlp.idle.weight' is taken by nothing; give.*known="
    ):
        _ = read(stack(mlp=Idle)).rules
    found = read(stack(mlp=Idle), known=[Rule("blocks.*.mlp.idle.weight", "hidden", trunk=False)])
    numbers = plan(stack(mlp=Idle)(WIDE), found.rules, Everett("standard", WIDE, BASE), lr=1.0)
    assert numbers["blocks.0.mlp.idle.weight"].lr == 0.5
    assert found["blocks.0.mlp.idle.weight"].why == "by hand"


def test_experts_without_tokens_are_as_their_siblings():
    class Seldom(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.gate, self.experts = linear(n, 4), nn.ModuleList(Mlp(n) for _ in range(4))

        def forward(self, x):
            which = int(self.gate(x.mean((0, 1))).topk(1).indices)
            return self.experts[0](x) if which < 4 else self.experts[1](x)

    found = read(stack(mlp=Seldom))
    assert {str(found[f"blocks.0.mlp.experts.{i}.up.weight"].role) for i in range(4)} == {"mlp_in"}
    assert "no token came here" in found["blocks.0.mlp.experts.3.up.weight"].why
    assert any(rule.pattern == "blocks.*.mlp.experts.*.up.weight" for rule in found.rules)


@pytest.mark.parametrize(
    ("build", "run", "widths", "message"),
    [
        (stack(), lambda model: model.wte(IDS), (32, 64), "run.model. has to call model"),
        (stack(), text, (64, 64), "two different ones"),
        (stack(), text, (32, 64, 128), "two different ones"),
        (lambda n: "model", text, (32, 64), "gives an nn.Module, got str"),
        (
            lambda n: nn.Linear(n, n, bias=n > 40),
            lambda m: m(torch.randn(2, m.in_features)),
            (32, 64),
            "'bias' is in the model of one of the widths",
        ),
    ],
)
def test_calls_that_cannot_be_right_are_refused_in_one_line(build, run, widths, message):
    with pytest.raises(PlanError, match=message) as error:
        traced(build, run, widths)
    assert "\n" not in str(error.value)


def test_a_model_on_the_meta_device_is_refused():
    def build(n):
        with torch.device("meta"):
            return linear(n, n)

    with pytest.raises(PlanError, match="on the meta device; build the model on the CPU"):
        traced(build, text, (32, 64))


def test_the_text_has_a_line_per_kind_and_then_doubts():
    lines = str(read(traced_text.nanogpt)).splitlines()
    assert lines[0].split() == ["tensor", "shape", "use", "role", "fan_in", "start", "why"]
    (line,) = (line for line in lines if "attn.c_attn.weight  " in line)
    assert line.startswith("2 x blocks.*.attn.c_attn.weight  3n x n ")
    assert "qkv" in line and "query (0:64), key (64:128), value (128:192)" in line
    assert lines[-1] == "attention: 0.3536, head dimension 8, its power -0.5 (2 times)"
    refused = traced(traced_other.lora_merged, text, (BASE, WIDE))
    assert (
        str(refused).splitlines()[-1].startswith("# check: blocks.*.attn.a.two goes into a product")
    )
