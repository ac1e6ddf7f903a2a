"""The plan: rows, torch groups, decay, initial values and equivalent training, on tiny models."""

import functools
import json
import math

import pytest
import torch
from torch import nn

from param_groups import Dinan, EpsFollows, Everett, Forward, Plan, PlanError, Role, Rule, plan
from param_groups.layers import Embedding, LayerNorm, Linear
from param_groups.plan import DECAY_MODES, dumps
from param_groups.prescription import Prescription
from param_groups.quantities import Numbers
from param_groups.rules.exponents import TENSOR_PROGRAMS
from tests.param_groups.wrapped import ruled

WIDTH, VOCABULARY, CONTEXT = 8, 11, 5
RULES = ruled("""
tokens.weight token_embedding, positions.weight position_embedding, blocks.*.norm.weight norm_scale,
blocks.*.query.weight query, blocks.*.up.weight mlp_in, blocks.*.down.weight mlp_out,
readout.weight readout""")


class Block(nn.Module):
    """One norm, one square matrix and an MLP: the tensors of a block, not its attention."""

    def __init__(self, width, linear, norm):
        super().__init__()
        self.norm = norm(width)
        self.query = linear(width, width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h + self.query(h))))


class Decoder(nn.Module):
    """Embeddings, blocks and a readout, of the package's layers or of torch's own."""

    def __init__(self, width=WIDTH, depth=2, plain=False):
        super().__init__()
        linear, norm = Linear, LayerNorm
        embedding = Embedding
        if plain:
            linear = lambda n_in, n_out: nn.Linear(n_in, n_out, bias=False)
            norm = lambda n: nn.LayerNorm(n, eps=1e-6, bias=False)
            embedding = nn.Embedding
        self.tokens = embedding(VOCABULARY, width)
        self.positions = embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, linear, norm) for _ in range(depth))
        self.readout = linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.readout(x)


class Fixed(Prescription):
    """One given answer for every role, for tests of the plan alone."""

    optimizer = "adam"

    def __init__(self, width=WIDTH, **roles):
        self.width, self.roles = width, roles

    def __call__(self, tensor):
        return self.roles.get(str(tensor.role), Numbers(0.5))

    def forward(self, size=None):
        return Forward(attention=0.0)

    def describe(self):
        return {"name": "fixed"}


def mup(width=WIDTH, base=4, **options):
    return Everett("mup", width, base, **options)


def decoder_plan(prescription=None, model=None, **settings):
    model = model or Decoder()
    return plan(model, RULES, prescription or mup(), **{"lr": 0.1, **settings})


def names_of(model):
    return [name for name, _ in model.named_parameters()]


# muP with Adam and full alignment at n = 8, base 4: lr 0.1 * 2^(-1/2, -1, -1/2) and epsilon
# 1e-8 * 2^(-1/2, -1, -1/2) for embedding, hidden and readout, multipliers sqrt(8), 1, 1/sqrt(8).
ROOT, THIN = math.sqrt(2), 8**-0.5
# name: role, shape, fans, mean, std, distribution, multiplier, lr, eps
EMBEDDED, HIDDEN = (0.1 / ROOT, 1e-8 / ROOT), (0.05, 0.5e-8)
MUP_ROWS = {
    "tokens.weight": (("token_embedding", (11, 8), (1, 8), 0, THIN, "normal", 8**0.5), EMBEDDED),
    "positions.weight": (
        ("position_embedding", (5, 8), (1, 8), 0, THIN, "normal", 8**0.5),
        EMBEDDED,
    ),
    "blocks.1.norm.weight": (("norm_scale", (8,), (1, 8), THIN, 0, "constant", 8**0.5), EMBEDDED),
    "blocks.1.query.weight": (("query", (8, 8), (8, 8), 0, THIN, "normal", 1.0), HIDDEN),
    "blocks.1.up.weight": (("mlp_in", (32, 8), (8, 32), 0, THIN, "normal", 1.0), HIDDEN),
    "blocks.1.down.weight": (("mlp_out", (8, 32), (32, 8), 0, 32**-0.5, "normal", 1.0), HIDDEN),
    "readout.weight": (("readout", (11, 8), (8, 11), 0, THIN, "normal", THIN), EMBEDDED),
}


@pytest.mark.parametrize("name", MUP_ROWS)
def test_a_row_holds_the_absolute_numbers_of_its_tensor(name):
    (role, shape, fans, mean, std, distribution, multiplier), (lr, eps) = MUP_ROWS[name]
    row = decoder_plan(EpsFollows(mup()))[name]
    assert (row.name, row.role, row.shape, row.tied_to) == (name, role, shape, ())
    assert ((row.fan_in, row.fan_out), row.init_distribution) == (fans, distribution)
    got = (row.init_mean, row.init_std, row.multiplier, row.lr, row.eps)
    assert got == pytest.approx((mean, std, multiplier, lr, eps), rel=1e-14)


def test_rows_keep_the_models_order_and_only_read_the_model():
    model = Decoder()
    before = {name: id(p) for name, p in model.named_parameters()}
    result = decoder_plan(model=model)
    assert [row.name for row in result.rows] == names_of(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.readout.multiplier == 1.0 and model.readout.weight.isnan().all()


def test_a_plan_is_made_without_allocating_the_model():
    with torch.device("meta"):
        model = Decoder()
    assert decoder_plan(model=model).rows == decoder_plan().rows


def test_a_row_is_found_by_any_name_of_its_tensor():
    model = Decoder()
    model.readout.weight = model.tokens.weight
    result = plan(model, RULES[:-1], Fixed(), lr=0.1)
    assert result["readout.weight"] is result["tokens.weight"]
    assert result["tokens.weight"].tied_to == ("readout.weight",)
    with pytest.raises(KeyError, match="read"):
        result["read"]


def test_a_learning_rate_of_zero_is_allowed():
    assert {row.lr for row in decoder_plan(lr=0.0).rows} == {0.0}


def test_groups_carry_real_numbers_and_the_names_of_their_tensors():
    model = Decoder()
    result = decoder_plan(EpsFollows(mup()), model, weight_decay=0.01, decay_mode="independent")
    groups = result.groups(model, check=False)
    assert [(group["name"], len(group["params"])) for group in groups] == [
        ("token_embedding+position_embedding+norm_scale+readout", 5),
        ("query+mlp_in+mlp_out", 6),
    ]
    parameters = dict(model.named_parameters())
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(parameters)
    for group in groups:
        assert group["initial_lr"] == group["lr"]
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            row = result[name]
            assert parameter is parameters[name]
            for key in ("lr", "eps", "weight_decay"):
                assert group[key] == getattr(row, key)


def test_frozen_tensors_are_planned_but_not_trained():
    model = Decoder()
    result = decoder_plan(model=model)
    model.blocks[0].query.weight.requires_grad_(False)
    given = [name for group in result.groups(model, check=False) for name in group["param_names"]]
    assert sorted(given) == sorted(set(names_of(model)) - {"blocks.0.query.weight"})


def test_a_tensor_that_was_frozen_when_drawn_is_not_trained_undrawn():
    model = Decoder()
    result = decoder_plan(model=model)
    frozen = model.blocks[0].query.weight.requires_grad_(False)
    result.initialise(model, seed=0)
    result.groups(model)
    frozen.requires_grad_(True)
    with pytest.raises(PlanError, match="'blocks.0.query.weight' was frozen at initialise"):
        result.groups(model)
    result.initialise(model, seed=0)
    result.groups(model)
    frozen.requires_grad_(False)
    result.initialise(model, seed=0, keep="blocks.0.*")  # kept on purpose
    frozen.requires_grad_(True)
    result.groups(model)


def test_a_tied_tensor_is_trained_once():
    model = Decoder()
    model.readout.weight = model.tokens.weight
    (group,) = plan(model, RULES[:-1], Fixed(), lr=0.1).groups(model, check=False)
    assert group["param_names"] == names_of(model)
    assert len(group["params"]) == len({id(p) for p in group["params"]})


LR, WD = 0.3, 0.01


class Head(nn.Module):
    """Tensors of Dinan et al.'s vision model, the head with its bias."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.positions = nn.Embedding(CONTEXT, width)
        self.query = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 7)


HEAD_RULES = ruled("""positions.weight position_embedding, query.weight query,
head.weight readout, head.bias readout_bias""")


def expected_decay(mode, own_lr):
    """What one step removes: wd, the global rate times wd, or the tensor's own rate times wd."""
    return {"independent": WD, "global": LR * WD, "per_group": own_lr * WD}[mode]


def head_plan(mode, model):
    return plan(model, HEAD_RULES, Dinan(WIDTH), lr=LR, weight_decay=WD, decay_mode=mode)


@pytest.mark.parametrize("mode", DECAY_MODES)
def test_rate_times_decay_is_what_the_mode_says(mode):
    result = head_plan(mode, Head())
    rates = {
        "positions.weight": LR * WIDTH**-0.5,
        "query.weight": LR * WIDTH**-1.5,
        "head.weight": LR / (WIDTH * 7**0.5),
    }
    for name, rate in rates.items():
        row = result[name]
        assert row.lr == pytest.approx(rate, rel=1e-14)
        assert row.lr * row.weight_decay == pytest.approx(expected_decay(mode, rate), rel=1e-14)
        assert row.decay_per_step == row.lr * row.weight_decay
    assert result["head.bias"].weight_decay == 0.0
    assert {row.weight_decay for row in decoder_plan(decay_mode=mode).rows} == {0.0}


def test_tensors_named_by_no_decay_keep_their_size_and_no_step_removes_a_whole_tensor():
    made = functools.partial(plan, Head(), HEAD_RULES, Dinan(WIDTH), lr=0.5, decay_mode="global")
    few = made(weight_decay=0.1, no_decay=["pos*", "head.*"])
    assert [row.name for row in few.rows if row.weight_decay] == ["query.weight"]
    assert few["query.weight"] == made(weight_decay=0.1)["query.weight"]
    by_role = ["readout_bias", "readout", "position_embedding", "norm_scale"]  # it has no norm
    assert few == made(weight_decay=0.1, no_decay=by_role)
    with pytest.raises(PlanError, match="decay 2 removes 1 times 'positions.weight'.* global lr"):
        made(weight_decay=2.0)
    assert made(weight_decay=2.0, no_decay="*").rows


PLANS = {
    "decoder": lambda: decoder_plan(weight_decay=0.1, decay_mode="global"),
    "an alignment of exact fractions": lambda: decoder_plan(mup(alignment=TENSOR_PROGRAMS)),
    "dinan": lambda: head_plan("independent", Head()),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_survives_json(case):
    result = PLANS[case]()
    again = Plan.from_dict(json.loads(dumps(result)))
    assert again == result
    assert json.loads(json.dumps(result.to_dict())) == json.loads(dumps(result))
    assert isinstance(again.rows[0].shape, tuple) and isinstance(again.rows[0].tied_to, tuple)


def test_another_road_to_the_same_numbers_is_no_difference():
    """Rows are compared, not the settings: at the base width these two modes are one."""
    at_base = {"prescription": mup(base=WIDTH)}
    one = decoder_plan(**at_base, weight_decay=0.1, decay_mode="per_group")
    other = decoder_plan(**at_base, weight_decay=0.1, decay_mode="global")
    assert one != other and one.differences(other) == one.differences(one) == []


def test_differences_name_tensor_field_and_both_values_or_the_plan_that_has_it():
    lines = decoder_plan(lr=0.1).differences(decoder_plan(lr=0.2))
    assert len(lines) == len(decoder_plan().rows)
    assert "blocks.0.query.weight: lr 0.05 -> 0.1" in lines
    assert lines == sorted(lines)
    short, long = decoder_plan(model=Decoder(depth=1)), decoder_plan()
    assert "blocks.1.up.weight: only in the second plan" in short.differences(long)
    assert "blocks.1.up.weight: only in the first plan" in long.differences(short)
    assert len(short.differences(long)) == 4


def test_the_table_shows_blocks_once_and_every_number():
    text = decoder_plan(model=Decoder(depth=12), weight_decay=0.1, decay_mode="independent").table()
    title, header, *body = text.splitlines()
    assert "lr 0.1" in title and "decay 10 % per step (independent)" in title
    assert "everett" in title and "mup" in title
    assert header.split() == "tensor role shape fan_in init multiplier lr eps decay/step".split()
    assert len(body) == 7
    assert body[0].split()[:2] == ["tokens.weight", "token_embedding"]
    (line,) = [line for line in body if line.startswith("blocks.*.down.weight")]
    cells = "blocks.*.down.weight (12 tensors) mlp_out 8x32 32 normal 0.1768 1 0.05 1e-08 0.1"
    assert line.split() == cells.split()
    assert [line for line in body if line != line.rstrip()] == []
    assert "blocks.3" not in text
    assert max(map(len, body)) < 160


def test_the_table_keeps_blocks_with_other_numbers_apart():
    class Lower(Fixed):
        """Only the first call for a query differs."""

        def __call__(self, tensor):
            if tensor.role is Role.QUERY and not self.roles.get("seen"):
                self.roles["seen"] = True
                return Numbers(0.5, lr=0.25)
            return Numbers(0.5)

    lines = plan(Decoder(depth=3), RULES, Lower(), lr=1.0).table().splitlines()
    queries = [line for line in lines if line.startswith("blocks.*.query.weight")]
    assert len(queries) == 2 and "(2 tensors)" in queries[1] and " 0.25 " in queries[0]


def test_the_table_shows_tied_names_and_constants():
    model = Decoder()
    model.readout.weight = model.tokens.weight
    tied = plan(model, RULES[:-1], Everett("standard", WIDTH, 4, alignment="global"), lr=0.1)
    settings = "parameterization standard, width 8, base_width 4, optimizer adam, alignment global"
    assert f"; name everett, {settings}\n" in tied.table()  # and nothing that is a default
    assert "tokens.weight (= readout.weight)" in tied.table()
    text = plan(Decoder(), RULES, mup(), lr=0.1).table()
    assert "constant 0.3536" in text  # 8^(-1/2), the norm scales' initial value


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("name", ["tokens", "readout"])
@pytest.mark.parametrize(
    ("prescription", "fits"),
    [
        (mup(), False),  # the readout would get the embedding's multiplier
        (Everett("standard", WIDTH, 4), False),  # and here its rate
        (Everett("standard", WIDTH, WIDTH), True),
        (Everett("standard", WIDTH, 4, alignment="global"), True),
        # It has a factor of its own on tied logits, and so the embedding's numbers for both.
        (Dinan(WIDTH, init="bart"), True),
    ],
)
def test_an_embedding_is_also_the_readout_only_where_one_row_can_serve_both(
    prescription, fits, name, absorb
):
    model = nn.Module()
    model.tokens, model.readout = Embedding(11, WIDTH), Linear(WIDTH, 11)
    model.readout.weight = model.tokens.weight
    rules = (Rule(f"{name}.weight", RULES[0].role if name == "tokens" else Role.READOUT),)
    applied = prescription.forward().factors()
    keys = {"lr": 0.1, "absorb_multipliers": absorb, "applied": applied}
    make = lambda: plan(model, rules, prescription, **keys)
    if fits:
        assert len(make().rows) == 1
    else:
        with pytest.raises(PlanError, match="'tokens.weight' is tied to readout.*Tied"):
            make()
