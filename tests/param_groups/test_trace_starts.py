"""What a trace says of starts, depths, parts and names, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from param_groups import Everett, Muon, Plan, PlanError, Rule, Tuned, initial_stds, plan, traced
from tests.param_groups import traced_odd, traced_text
from tests.param_groups.traced_blocks import (
    BASE,
    IDS,
    WIDE,
    Apart,
    Mlp,
    Rms,
    Stack,
    heads,
    linear,
    merged,
    read,
    stack,
    text,
)
from tests.param_groups.traced_text import Bank

GROUPS = stack(traced_text.Interleaved, traced_text.GateUp)

# Starts


class Starts(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(20, n), Rms(n, offset=1.0)
        self.blocks = nn.ModuleList(linear(n, n) for _ in range(2))
        self.resid = nn.Parameter(torch.full((2,), 1.1))
        self.dt_bias = nn.Parameter(torch.linspace(-6.6, -2, n))
        self.noise, self.head = nn.Parameter(0.1 * torch.randn(n)), linear(n, 20)
        self.gate, self.fixed = nn.Parameter(torch.randn(1)), nn.Parameter(torch.full((1,), -4.0))
        nn.init.zeros_(self.blocks[1].weight)

    def forward(self, ids):
        x = self.tokens(ids)
        for gain, block in zip(self.resid, self.blocks, strict=True):
            y = block(self.norm(x)) + self.noise + self.fixed
            x = gain * x + self.gate * y.relu() * F.softplus(y + self.dt_bias)
        return self.head(x)


def test_initialise_keeps_starts_that_are_not_the_roles_and_says_so():
    found = read(Starts)
    starts = {r.name: r.start for r in found.readings if r.start}
    assert starts.pop("gate").startswith("starts between")  # one number may be from any law
    assert starts == {
        "norm.weight": "starts at 0",
        "blocks.1.weight": "starts at 0",
        "resid": "starts at 1.1",
        "dt_bias": "starts between -6.6 and -2",
        "fixed": "starts at -4",
    }
    assert "acts as 1" in found["norm.weight"].why
    model = Starts(WIDE)
    dt, gate = model.dt_bias.detach().clone(), model.gate.item()
    rule = Everett("mup", WIDE, BASE)
    numbers = plan(model, found.rules, rule, lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    assert model.gate.item() == gate
    assert torch.equal(model.dt_bias, dt) and not model.blocks[1].weight.any()
    assert model.resid.tolist() == pytest.approx([1.1, 1.1]) and not model.norm.weight.any()
    assert not model.noise.any() and model.fixed == -4.0
    assert model.blocks[0].weight.all()  # torch's noise is no start
    x = torch.randn(500, WIDE)
    assert model.norm(x).std().item() == pytest.approx(1, rel=0.05)
    model(IDS).square().mean().backward()
    assert model.tokens.weight.grad.any()
    (line,) = (line for line in numbers.table().splitlines() if line.startswith("dt_bias"))
    assert "kept as built" in line
    assert Plan.from_dict(json.loads(json.dumps(numbers.to_dict()))) == numbers
    torch.optim.AdamW(numbers.groups(model)).step()


def test_starts_are_drawn_where_that_is_asked_for():
    found = read(Starts, draw=("blocks.*", "dt_bias"))
    model = Starts(WIDE)
    numbers = plan(model, found.rules, Everett("mup", WIDE, BASE), lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    assert not model.dt_bias.any() and model.blocks[1].weight.all()
    assert found["dt_bias"].start == "starts between -6.6 and -2, to be drawn"


def test_a_build_that_seeds_itself_does_not_look_fixed():
    def build(n):
        torch.manual_seed(3)
        return Starts(n)

    found = read(build)
    assert found["blocks.0.weight"].keep is False and found["dt_bias"].keep is True


def test_a_tuned_recipe_takes_no_size_from_what_is_closed_or_kept():
    """nanochat's last matrices start at 0, its gains at 1.15: both stay, at any width."""
    build = traced_text.NanoChat
    rules, model = read(build).rules, build(WIDE)
    stds = initial_stds(build(BASE), rules)
    assert stds["attention_output"] == 0 < stds["query"]
    factors = {"attention_scale": 1.44 * 8**-0.5}
    power = math.log(factors["attention_scale"]) / math.log(8)
    rule = Tuned(Everett("mup", WIDE, BASE, qk_exponent=power), init=stds, base_head_dim=None)
    with pytest.raises(PlanError, match="on query-key products"):  # a recipe's is d^(-1/2)
        plan(model, rules, rule, lr=0.1, absorb_multipliers=True)
    rules = [replace(rule, measured=()) for rule in rules]
    numbers = plan(model, rules, rule, lr=0.1, absorb_multipliers=True, head_dim=8)
    numbers.initialise(model, seed=0)
    assert not model.h[0].attn.d.weight.any() and model.h[0].attn.a.weight.all()
    assert model.resid.tolist() == pytest.approx([1.15, 1.15])


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


class SlicedBy(traced_odd.Sliced):
    """Each of three slices of one matrix times a number."""

    def three(self, x):
        rows = zip((0.6, 0.5, 2.0), self.all.chunk(3), strict=True)
        return [heads(F.linear(x, by * w)) for by, w in rows]


def test_parts_of_fused_tensors_are_ranges_of_their_outputs():
    fused = read(stack(traced_text.Fused, norm=nn.LayerNorm))["blocks.0.attn.c_attn.weight"].places
    n = WIDE
    assert fused == {"query": ((0, n),), "key": ((n, 2 * n),), "value": ((2 * n, 3 * n),)}
    groups = read(GROUPS)["blocks.0.attn.qkv.weight"].places
    assert groups["query"][:2] == ((0, 16), (32, 48)) and groups["key"][0] == (16, 24)
    both = read(GROUPS)["blocks.0.mlp.both.weight"].why
    assert both.endswith("split into 128 + 128")
    cuts = lambda build, name: read(build)[f"blocks.0.{name}"].parts
    assert cuts(stack(traced_text.Fused, norm=nn.LayerNorm), "attn.c_attn.weight") == (1, 1, 1)
    assert cuts(stack(traced_odd.Sliced), "attn.all") == (1, 1, 1)
    assert cuts(stack(SlicedBy), "attn.all") == (1, 1, 1)
    assert read(stack(SlicedBy)).factors["attention"].startswith(f"{0.3 * 8**-0.5:.4g}, head dim")
    assert cuts(GROUPS, "mlp.both.weight") == (1, 1)
    assert cuts(GROUPS, "attn.qkv.weight") == ()  # no cut separates them
    assert cuts(traced_odd.Palm, "1.all.weight") == ()  # other ratios elsewhere
    assert cuts(stack(), "attn.a.weight") is None


def test_muon_takes_the_parts_that_a_trace_finds_and_refuses_what_no_cut_separates():
    rule = Muon(Everett("mup", WIDE, BASE, qk_exponent=-0.5))
    build = stack(traced_text.Fused, norm=nn.LayerNorm)
    row = plan(build(WIDE), read(build).rules, rule, lr=1.0)["blocks.0.attn.c_attn.weight"]
    assert row.optimizer == "muon" and row.lr == 1.0  # that of a square third
    for build, why in (
        (GROUPS, "attn.qkv.weight"),
        (stack(traced_odd.PerHead), "attn.q.*is a tensor with an axis of heads"),
    ):
        with pytest.raises(PlanError, match=why):
            plan(build(WIDE), read(build).rules, rule, lr=1.0)


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
    found = read(stack(mlp=Idle), known=(Rule("blocks.*.mlp.idle.weight", "hidden", trunk=False),))
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


def test_the_text_has_a_line_per_kind_and_then_doubts():
    lines = str(read(traced_text.nanogpt)).splitlines()
    assert lines[0].split() == ["tensor", "shape", "use", "role", "fan_in", "start", "why"]
    (line,) = (line for line in lines if "attn.c_attn.weight  " in line)
    assert line.startswith("2 x blocks.*.attn.c_attn.weight  3n x n ")
    assert "qkv" in line and "query (0:64), key (64:128), value (128:192)" in line
    assert lines[-1] == "attention: 0.3536, head dimension 8, its power -0.5 (2 times)"
    refused = read(traced_odd.lora_merged)
    assert (
        str(refused).splitlines()[-1].startswith("# check: blocks.*.attn.a.two goes into a product")
    )


class Wrapped(Stack):
    """Blocks inside whatever a trainer puts around them."""

    def __init__(self, n, around):
        super().__init__(n, traced_text.Fused, Mlp)
        self.around = around

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = self.around(lambda x, block=block: x + block.attn(block.n1(x)), x)
            x = self.around(lambda x, block=block: x + block.mlp(block.n2(x)), x)
        return self.head(self.final(x))


def quietly(f, x):
    with torch.no_grad():
        return f(x)


def in_half(f, x):
    with torch.autocast("cpu", torch.bfloat16):
        return f(x)


@pytest.mark.parametrize(
    "around",
    [
        lambda f, x: checkpoint(f, x, use_reentrant=True),
        lambda f, x: checkpoint(f, x, use_reentrant=False),
        lambda f, x: torch.compile(f)(x),
        quietly,
        in_half,
    ],
)
def test_what_is_around_a_block_changes_no_role(around):
    plain = read(lambda n: Wrapped(n, lambda f, x: f(x)))
    found = read(lambda n: Wrapped(n, around))
    tell = lambda one: [(r.name, r.role, r.layout, r.fan_in, r.inside) for r in one.readings]
    assert tell(found) == tell(plain) and found.factors == plain.factors


def test_scores_that_are_no_product_are_a_doubt_and_an_error():
    class Broadcast(Apart):
        def forward(self, x):
            q, k, v = self.three(x)
            scores = (q[:, :, :, None] * k[:, :, None]).sum(-1)
            return self.d(merged(scores.softmax(-1) @ v))

    with pytest.raises(PlanError, match="takes a softmax whose scores were not seen"):
        _ = read(stack(Broadcast)).rules
